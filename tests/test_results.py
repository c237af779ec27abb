"""RESULTS.md, its tables, and README.md: every interval follows from a CSV of cells, or is one of an earlier report."""

import csv
import importlib.util
import json
import re
from collections import defaultdict
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/results"
PAGES = sorted(FOLDER.glob("*.md"))
KEPT = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.json"))]
NEW, EARLIER = (ROOT / "RESULTS.md").read_text(encoding="utf-8").split("\n## Earlier ")
NUMBER = r"[+−-]?\d+(?:\.\d+)?"
ESTIMATE = re.compile(rf"({NUMBER})(?: (?:points|nats|%))?[ (]*\[({NUMBER}),\s({NUMBER})\]")
# Two-sided 5 % points of Student's t by degrees of freedom, from a printed table
T = {2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 6: 2.4469, 7: 2.3646, 8: 2.3060, 9: 2.2622}


def estimates(text: str) -> list[tuple[str, ...]]:
    """Each mean with the ends of its interval, as they are written."""
    return [tuple(part.replace("−", "-") for part in match.groups()) for match in ESTIMATE.finditer(text)]


def is_known(written: tuple[str, ...], known: list[tuple[float, ...]]) -> bool:
    """Whether the numbers are known ones, rounded; a difference may be written the other way round."""
    halves = [0.502 * 10.0 ** -len(part.partition(".")[2]) for part in written]
    values = tuple(map(float, written))
    return any(
        all(abs(value - other) <= half for value, other, half in zip(values, way, halves, strict=True))
        for mean, low, high in known
        for way in ((mean, low, high), (-mean, -high, -low))
    )


def from_cells(name: str) -> list[tuple[float, ...]]:
    """Every row minus another, and minus the mean of the two plain rows, of a CSV, on all its measures and rungs."""
    cells = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    with (FOLDER / name).open(encoding="utf-8", newline="") as text:
        for line in csv.DictReader(text):
            if line["split"] == "test" and int(line["seed"]) < 100:
                for measure in {line["measure"], line["measure"] + "/" + line["rung"]}:
                    cell = cells[line["study"], measure, line["row"], line["rate"]][int(line["seed"])]
                    cell[0], cell[1] = cell[0] + float(line["right"]), cell[1] + float(line["n"])
    scores = {place: {seed: 100 * a / n for seed, (a, n) in of.items()} for place, of in cells.items()}
    for study, measure, row, rate in [place for place in scores if place[2] == "plain again"]:
        pair = scores[study, measure, row, rate], scores[study, measure, "plain", rate]
        scores[study, measure, "both", rate] = {seed: sum(of[seed] for of in pair) / 2 for seed in pair[0]}
    by_place, known = defaultdict(list), []
    for (study, measure, *_), of in scores.items():
        by_place[study, measure].append(of)
    for of_row, of_control in (pair for rows in by_place.values() for pair in permutations(rows, 2)):
        if len(seeds := sorted(of_row.keys() & of_control.keys())) > 2:
            gaps = np.array([of_row[seed] - of_control[seed] for seed in seeds])
            half = T[len(seeds) - 1] * gaps.std(ddof=1) / len(seeds) ** 0.5
            known.append((gaps.mean(), gaps.mean() - half, gaps.mean() + half))
    return known


@pytest.fixture(scope="module")
def known() -> list[tuple[float, ...]]:
    return [gap for page in PAGES for gap in from_cells(page.with_suffix(".csv").name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_table_follows_from_its_cells(page):
    """Breaks when a table was not made from the CSV beside it, or its intervals are not Student's t over runs."""
    spec = importlib.util.spec_from_file_location("pages", FOLDER / "pages.py")
    spec.loader.exec_module(pages := importlib.util.module_from_spec(spec))
    text, gaps = page.read_text(encoding="utf-8"), from_cells(page.with_suffix(".csv").name)
    assert text == pages.tables(page.stem)
    assert len(shown := estimates(text)) >= 3 and not [gap for gap in shown if not is_known(gap, gaps)]


def test_every_interval_of_the_page_follows_from_cells(known):
    """Breaks when an interval of RESULTS.md is changed by hand, or rests on no cells that a reader has."""
    assert len(shown := estimates(NEW)) >= 10
    assert not [estimate for estimate in shown if not is_known(estimate, known)]
    (mean, low, high), *_ = known
    assert not is_known((f"{mean + 0.2:.1f}", f"{low:.1f}", f"{high:.1f}"), known[:1])


def test_every_earlier_interval_was_written_by_a_command():
    """Breaks when an interval of earlier reports, or of README's findings, is none of docs/results, however rounded."""
    assert all({*report} >= {"made_by", "tables"} and report["made_by"] for report in KEPT)
    written = [line for report in KEPT for table in [*report["tables"], report.get("words", [])] for line in table]
    of_reports = [tuple(map(float, estimate)) for estimate in estimates("\n".join(written))]
    of_reports += [gap for page in PAGES for gap in from_cells(page.with_suffix(".csv").name)]
    findings = (ROOT / "README.md").read_text(encoding="utf-8").split("## Findings")[1].split("\n## ")[0]
    shown = estimates(f"{EARLIER} {findings}")
    assert len(shown) >= 5 and not [estimate for estimate in shown if not is_known(estimate, of_reports)]
