"""RESULTS.md, its tables, and README.md: every interval follows from a CSV of cells, or is one of
an earlier report."""

import re
import runpy
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from model.differential import graft
from weights.load import load_model

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/results"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.with_suffix(".csv").exists())
REPORTS = "".join(file.read_text(encoding="utf-8") for file in FOLDER.glob("*.json"))
PAGE = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
EARLIER = (FOLDER / "earlier.md").read_text(encoding="utf-8")
SCRIPT = runpy.run_path(str(FOLDER / "pages.py"))
NUMBER = r"[+−-]?\d+(?:\.\d+)?"
ESTIMATE = re.compile(rf"({NUMBER})(?: (?:points|nats|%))?[ (]*\[({NUMBER}),\s({NUMBER})\]")
# Two-sided 5 % points of Student's t by degrees of freedom, from a printed table
T = [float("inf")] * 2
T += [4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157]


# of plain rows, which tables have beside others
POOLS = (
    ("plain", "plain again"),
    ("plain, few", "plain again, few"),
    ("fine-tuned", *(f"LoRA r{rank}" for rank in range(17, 21))),
    ("fine-tuned", "LoRA r17", "LoRA r19", "LoRA r20"),
)


def estimates(text):
    """Each mean with the ends of its interval, as they are written."""
    found = ESTIMATE.findall(text.replace("−", "-"))
    return list(map(tuple, found))


def is_known(written, known):
    """Whether the numbers are known ones, rounded; a difference may be written the other way
    round."""
    halves = [0.502 * 10.0 ** -len(part.partition(".")[2]) for part in written]
    mean, low, high = map(float, written)
    for way in ((mean, low, high), (-mean, -high, -low)):
        if (np.abs(np.subtract(known, way)) <= halves).all(1).any():
            return True
    return False


def from_cells(page):
    """Every row minus another, and minus the mean of plain rows, of the CSV beside a page, by
    measure."""
    scores = SCRIPT["read"](page.stem)
    known = []
    for study, measure in {(study, measure) for study, _, measure in scores}:
        of_rows = {row: of for (s, row, m), of in scores.items() if (s, m) == (study, measure)}
        for pool in POOLS:
            if {*pool} <= of_rows.keys():
                of_pool = [of_rows[row] for row in pool]
                of_rows[str(pool)] = mean = {}
                for seed in of_pool[-1]:
                    mean[seed] = np.mean([of[seed] for of in of_pool])
        for of_row, of_control in permutations(of_rows.values(), 2):
            if len(seeds := of_row.keys() & of_control.keys()) > 2:
                gaps = np.array([of_row[seed] - of_control[seed] for seed in seeds])
                half = T[len(seeds) - 1] * gaps.std(ddof=1) / len(seeds) ** 0.5
                known.append((gaps.mean(), gaps.mean() - half, gaps.mean() + half))
    return known


FROM_CELLS = {page: from_cells(page) for page in PAGES}
ALL_CELLS = sum(FROM_CELLS.values(), [])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_table_follows_from_its_cells(page):
    """Breaks when a table was not made from the CSV beside it, or its intervals are not Student's t
    over runs."""
    text = page.read_text(encoding="utf-8")
    assert text == SCRIPT["tables"](page.stem)
    shown = estimates(text)
    assert len(shown) >= 3
    assert not [gap for gap in shown if not is_known(gap, FROM_CELLS[page])]


def test_every_interval_of_the_page_follows_from_cells():
    """Breaks when an interval or a table of RESULTS.md is changed by hand, or rests on no cells that
    a reader has."""
    assert SCRIPT["fill"](PAGE) == PAGE
    shown = estimates(PAGE)
    assert len(shown) >= 10
    assert not [estimate for estimate in shown if not is_known(estimate, ALL_CELLS)]
    assert not is_known(("+40.5", *shown[-1][1:]), ALL_CELLS)


def test_equal_branches_learn_against_each_other_and_feel_alike():
    """Breaks when an angle is of other gradients: while o₁ = o₂, those of q are opposite, those by
    the input equal."""
    model = load_model("embedded")
    graft(model, "v2")
    angles = runpy.run_path(str(FOLDER / "branches.py"))["cosines"](model)
    assert np.allclose(angles, [[-1, 1]] * 4, atol=1e-6)


def test_the_page_is_short_and_plain():
    """Breaks when RESULTS.md takes more than ten minutes: 200 lines, 25 words a sentence."""
    assert len(PAGE.splitlines()) <= 200
    prose = re.sub(r"^([|#<!]| {4}).*$|```.*?```|\]\([^)]*\)", "", PAGE, flags=re.M | re.S)
    sentences = re.split(r"(?<=[.?:!])\s|\n\n|\n- ", prose)
    assert not [sentence for sentence in sentences if len(sentence.split()) > 25]


def test_every_earlier_interval_was_written_by_a_command():
    """Breaks when an interval of earlier reports, or of README's findings, is none of docs/results,
    however rounded."""
    known = [tuple(map(float, estimate)) for estimate in estimates(REPORTS)] + ALL_CELLS
    findings = (
        (ROOT / "README.md").read_text(encoding="utf-8").split("## Findings")[1].split("\n## ")[0]
    )
    shown = estimates(f"{EARLIER} {findings}")
    assert len(shown) >= 5
    assert not [estimate for estimate in shown if not is_known(estimate, known)]
