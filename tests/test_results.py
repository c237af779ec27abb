"""RESULTS.md and README.md: every table and every estimate with an interval is one that a study's command wrote."""

import json
import re
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {
    file.name: json.loads(file.read_text(encoding="utf-8")) for file in sorted((ROOT / "docs/results").glob("*.json"))
}
KEPT = list(FILES.values())
NUMBER = r"[+−-]?\d+(?:\.\d+)?"
ESTIMATE = re.compile(rf"({NUMBER})(?: (?:points|nats|%))?[ (]*\[({NUMBER}),\s({NUMBER})\]")


def tables_of(text: str) -> list[list[str]]:
    """The tables of a Markdown text, as lines."""
    lines = [line if line.startswith("|") else "" for line in text.splitlines()]
    return [list(table) for is_table, table in groupby(lines, bool) if is_table]


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


WORDS = re.compile(r"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?!\w)")
# numbers of the text that are no findings of a kept report: settings, the papers' figures, what was run before
STATED = {
    "Does differential": "4,000 6.25 560 480 200",
    "Does it help": "7,500 22,500 0.0025 0.02",
    "WINGS and Q-Mamba": "12,000 906 491 58 92 48.8 32.5 75.0 73.1 75.9 5.2 3.2 0.23 1,024 4,096",
    "The Differential Transformer": "400,000 0.02 0.27 0.40 0.64 0.18 0.28",
}
# numbers of tables that RESULTS.md does not show: the file, and how the line begins
QUOTED = {
    "50.8": ("scratch-full.json", "| answer on distractors, n4o1 "),
    "0.269": ("scratch-full.json", "| split |      tuning |  234 "),
    "0.052": ("text-full.json", "| all "),
    "0.888": ("text-full.json", "| all "),
}


def numbers(text: str) -> list[str]:
    return [one.replace(",", "") for one in WORDS.findall(text)]


def foreign_numbers(section: str) -> list[str]:
    """The numbers of a section's text that stand neither in its tables nor in the text of the reports that it names.

    Estimates with an interval are checked whole, above.
    """
    prose = " ".join(line for line in section.splitlines() if line[:1] != "|")
    prose = ESTIMATE.sub(" ", re.sub(r"```.*?```|`[^`]*`", "", prose))
    named = {"earlier.json", *re.findall(r"docs/results/([\w-]+\.json)", section)}
    written = [line for line in section.splitlines() if line[:1] == "|"]
    written += [line for name in named for line in [FILES[name]["made_by"], *FILES[name].get("words", [])]]
    for number, (name, start) in QUOTED.items():
        lines = [line for table in FILES[name]["tables"] for line in table if line.startswith(start)]
        written += [number] * any(number.replace(",", "") in numbers(line) for line in lines)
    written.append(next(stated for title, stated in STATED.items() if section.startswith(title)))
    known = [float(one) for line in written for one in numbers(re.sub("[−-]", " ", line))]
    return [
        one
        for one in set(numbers(prose))
        if not any(abs(float(one) - other) <= 0.5001 * 10.0 ** -len(one.partition(".")[2]) for other in known)
    ]


@pytest.mark.parametrize("section", (ROOT / "RESULTS.md").read_text(encoding="utf-8").split("\n## ")[1:])
def test_every_number_of_the_text_is_that_of_a_table_or_report(section):
    """Breaks when a number of RESULTS.md's text becomes one that its section's tables and reports do not have."""
    assert not foreign_numbers(section)
    assert foreign_numbers(f"{section}\n12,345.6 of them") == ["12345.6"]
