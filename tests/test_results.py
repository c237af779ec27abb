"""RESULTS.md and README.md: every table and every estimate with an interval is one that a study's command wrote."""

import json
import re
from pathlib import Path

from train.studies.engine import tables_of

ROOT = Path(__file__).parent.parent
KEPT = [json.loads(file.read_text(encoding="utf-8")) for file in sorted((ROOT / "docs/results").glob("*.json"))]
NUMBER = r"[+−-]?\d+(?:\.\d+)?"
ESTIMATE = re.compile(rf"({NUMBER})(?: (?:points|nats|%))?[ (]*\[({NUMBER}),\s({NUMBER})\]")


def estimates(text: str) -> list[tuple[str, ...]]:
    """Each mean with the ends of its interval, as they are written."""
    return [tuple(part.replace("−", "-") for part in found.groups()) for found in ESTIMATE.finditer(text)]


def is_known(written: tuple[str, ...], known: list[tuple[float, ...]]) -> bool:
    """Whether the numbers are known ones, rounded; a difference may be written the other way round."""
    digits = [len(part.partition(".")[2]) for part in written]
    values = tuple(map(float, written))
    return any(
        all(abs(one - other) <= 0.5001 * 10.0**-places for one, other, places in zip(values, way, digits, strict=True))
        for mean, low, high in known
        for way in ((mean, low, high), (-mean, -high, -low))
    )


def test_every_table_was_written_by_a_command():
    """Breaks when a number of RESULTS.md is changed by hand, or a table has no file that says what it was made with."""
    assert all({*one} >= {"made_by", "tables"} and one["made_by"] for one in KEPT)
    known = [table for one in KEPT for table in one["tables"]]
    tables = tables_of((ROOT / "RESULTS.md").read_text(encoding="utf-8"))
    assert len(tables) >= 5
    foreign = [table for table in tables if table not in known]
    assert not foreign, f"not in docs/results: {foreign[0][0]}"


def test_every_estimate_in_the_text_was_written_by_a_command():
    """Breaks when an interval of the prose, or of README's findings, is none of docs/results, however rounded."""
    written = "\n".join(line for one in KEPT for table in one["tables"] for line in table)
    written += "\n".join(line for one in KEPT for line in one.get("words", []))
    known = [tuple(map(float, one)) for one in estimates(written)]
    prose = [line for line in (ROOT / "RESULTS.md").read_text(encoding="utf-8").splitlines() if line[:1] != "|"]
    findings = (ROOT / "README.md").read_text(encoding="utf-8").split("## Findings")[1].split("\n## ")[0]
    text = " ".join([*prose, findings])
    found = estimates(text)
    assert len(found) >= 5 and text.count("[+") + text.count("[−") == len([one for one in found if one[1][0] in "+-"])
    foreign = [one for one in found if not is_known(one, known)]
    assert not foreign, f"not in docs/results: {foreign}"
    mean, low, high = known[0]
    assert not is_known((f"{mean + 0.2:.1f}", f"{low:.1f}", f"{high:.1f}"), known[:1])
