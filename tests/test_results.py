"""RESULTS.md and README.md: every table and every interval is one that a study's command wrote."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
KEPT = [json.loads(file.read_text(encoding="utf-8")) for file in sorted((ROOT / "docs/results").glob("*.json"))]
RESULTS = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
NUMBER = r"[+−-]?\d+(?:\.\d+)?"
ESTIMATE = re.compile(rf"({NUMBER})(?: (?:points|nats|%))?[ (]*\[({NUMBER}),\s({NUMBER})\]")


def tables_of(text: str) -> list[list[str]]:
    """The Markdown tables of a text, by lines."""
    return [block.splitlines() for block in re.findall(r"(?:^\|.*\n?)+", text, re.M)]


def estimates(text: str) -> list[tuple[str, ...]]:
    """Each mean with the ends of its interval, as they are written."""
    return [tuple(part.replace("−", "-") for part in match.groups()) for match in ESTIMATE.finditer(text)]


def is_known(written: tuple[str, ...], known: list[tuple[float, ...]]) -> bool:
    """Whether the numbers are known ones, rounded; a difference may be written the other way round."""
    halves = [0.5001 * 10.0 ** -len(part.partition(".")[2]) for part in written]
    values = tuple(map(float, written))
    return any(
        all(abs(value - other) <= half for value, other, half in zip(values, way, halves, strict=True))
        for mean, low, high in known
        for way in ((mean, low, high), (-mean, -high, -low))
    )


def test_every_table_was_written_by_a_command():
    """Breaks when a number of RESULTS.md is changed by hand, or a table has no file that says what it was made with."""
    assert all({*report} >= {"made_by", "tables"} and report["made_by"] for report in KEPT)
    known, tables = [table for report in KEPT for table in report["tables"]], tables_of(RESULTS)
    assert len(tables) >= 5
    foreign = [table for table in tables if table not in known]
    assert not foreign, f"not in docs/results: {foreign[0][0]}"


def test_every_estimate_in_the_text_was_written_by_a_command():
    """Breaks when an interval of the prose, or of README's findings, is none of docs/results, however rounded."""
    written = "\n".join(line for report in KEPT for table in report["tables"] for line in table)
    written += "\n".join(line for report in KEPT for line in report.get("words", []))
    known = [tuple(map(float, estimate)) for estimate in estimates(written)]
    findings = (ROOT / "README.md").read_text(encoding="utf-8").split("## Findings")[1].split("\n## ")[0]
    shown = estimates(" ".join([*(line for line in RESULTS.splitlines() if line[:1] != "|"), findings]))
    assert len(shown) >= 5
    assert not [estimate for estimate in shown if not is_known(estimate, known)]
    mean, low, high = known[0]
    assert not is_known((f"{mean + 0.2:.1f}", f"{low:.1f}", f"{high:.1f}"), known[:1])
