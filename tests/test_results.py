"""RESULTS.md, its tables, and README.md: every interval follows from a CSV of cells, or is one of an earlier report."""

import csv
import re
import runpy
from collections import defaultdict
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/results"
PAGES = sorted(FOLDER.glob("*.md"))
REPORTS = "".join(file.read_text(encoding="utf-8") for file in FOLDER.glob("*.json"))
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


def from_cells(page: Path) -> list[tuple[float, ...]]:
    """Every row minus another, and minus the mean of the two plain rows, of the CSV beside a page, by measure."""
    sums, scores, known = defaultdict(lambda: np.zeros(2)), defaultdict(dict), []
    with page.with_suffix(".csv").open(encoding="utf-8", newline="") as text:
        for line in csv.DictReader(text):
            if line["split"] == "test" and int(line["seed"]) < 100:
                for measure in {line["measure"], f"{line['measure']}/{line['rung']}"}:
                    place = line["study"], measure, line["row"], line["rate"], line["seed"]
                    sums[place] += float(line["right"]), float(line["n"])
    for (*place, seed), (right, n) in sums.items():
        scores[tuple(place)][seed] = 100 * right / n
    for study, measure, row, rate in [place for place in scores if place[2] == "plain again"]:
        plain, again = scores[study, measure, "plain", rate], scores[study, measure, row, rate]
        scores[study, measure, "both", rate] = {seed: (plain[seed] + again[seed]) / 2 for seed in again}
    for (place, of_row), (other, of_control) in permutations(scores.items(), 2):
        if place[:2] == other[:2] and len(seeds := of_row.keys() & of_control.keys()) > 2:
            gaps = np.array([of_row[seed] - of_control[seed] for seed in seeds])
            half = T[len(seeds) - 1] * gaps.std(ddof=1) / len(seeds) ** 0.5
            known.append((gaps.mean(), gaps.mean() - half, gaps.mean() + half))
    return known


FROM_CELLS = {page: from_cells(page) for page in PAGES}
ALL_CELLS = sum(FROM_CELLS.values(), [])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_table_follows_from_its_cells(page):
    """Breaks when a table was not made from the CSV beside it, or its intervals are not Student's t over runs."""
    tables = runpy.run_path(str(FOLDER / "pages.py"))["tables"]
    assert (text := page.read_text(encoding="utf-8")) == tables(page.stem)
    assert len(shown := estimates(text)) >= 3 and not [gap for gap in shown if not is_known(gap, FROM_CELLS[page])]


def test_every_interval_of_the_page_follows_from_cells():
    """Breaks when an interval of RESULTS.md is changed by hand, or rests on no cells that a reader has."""
    assert len(shown := estimates(NEW)) >= 10
    assert not [estimate for estimate in shown if not is_known(estimate, ALL_CELLS)]
    assert not is_known(("+40.5", *shown[-1][1:]), ALL_CELLS)


def test_every_earlier_interval_was_written_by_a_command():
    """Breaks when an interval of earlier reports, or of README's findings, is none of docs/results, however rounded."""
    known = [tuple(map(float, estimate)) for estimate in estimates(REPORTS)] + ALL_CELLS
    findings = (ROOT / "README.md").read_text(encoding="utf-8").split("## Findings")[1].split("\n## ")[0]
    shown = estimates(f"{EARLIER} {findings}")
    assert len(shown) >= 5 and not [estimate for estimate in shown if not is_known(estimate, known)]
