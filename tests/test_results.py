"""RESULTS.md, its tables, and README.md: every interval follows from a CSV of cells, or is one of
an earlier report."""

import csv
import re
import runpy
from collections import defaultdict
from itertools import permutations

import numpy as np
import pytest

from model.differential import graft
from tests.house import ROOT
from weights.load import load_model

FOLDER = ROOT / "docs/results"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.with_suffix(".csv").exists())
REPORTS = "".join(file.read_text(encoding="utf-8") for file in FOLDER.glob("*.json"))
PAGE = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
EARLIER = (FOLDER / "earlier.md").read_text(encoding="utf-8")
NUMBER = r"[+−-]?\d+(?:\.\d+)?"
ESTIMATE = re.compile(rf"({NUMBER})(?: (?:points|nats|%))?[ (]*\[({NUMBER}),\s({NUMBER})\]")
# Two-sided 5 % points of Student's t by degrees of freedom, from a printed table
T = [
    *map(
        float,
        "inf inf 4.302653 3.182446 2.776445 2.570582 2.446912 2.364624 2.306004 2.262157".split(),
    )
]


def estimates(text):
    """Each mean with the ends of its interval, as they are written."""
    return list(map(tuple, ESTIMATE.findall(text.replace("−", "-"))))


def is_known(written, known):
    """Whether the numbers are known ones, rounded; a difference may be written the other way
    round."""
    halves = [0.502 * 10.0 ** -len(part.partition(".")[2]) for part in written]
    mean, low, high = map(float, written)
    for way in ((mean, low, high), (-mean, -high, -low)):
        if (np.abs(np.subtract(known, way)) <= halves).all(1).any():
            return True
    return False


# Of the measures of grafts, in percent; of VQA the best answer to each question, without its
# picture
GUESSES = {"VQA": 33.0, "n2o2": 25.0, "n3d8": 100 / 9, "n4o1": 6.25, "e16": 50.0}


def mean_of(scores):
    """Of several scores by seed, by seed."""
    means = {}
    for seed in scores[-1]:
        means[seed] = np.mean([of[seed] for of in scores])
    return means


def from_cells(page):
    """Every row minus another, and minus the mean of plain rows, of the CSV beside a page, by
    measure; of grafts the mean of the measures in range too."""
    sums = defaultdict(lambda: np.zeros(2))
    scores = defaultdict(dict)
    known = []
    validation = defaultdict(list)
    with page.with_suffix(".csv").open(encoding="utf-8", newline="") as text:
        for line in csv.DictReader(text):
            if line["split"] == "validation" and (
                line["row"] == "fine-tuned" or line["row"].startswith("LoRA")
            ):
                validation[line["measure"]].append(100 * float(line["right"]) / float(line["n"]))
            if line["split"] == "test" and int(line["seed"]) < 100:
                for measure in {line["measure"], f"{line['measure']}/{line['rung']}"}:
                    place = line["study"], measure, line["row"], line["rate"], line["seed"]
                    sums[place] += float(line["right"]), float(line["n"])
    for (*place, seed), (right, n) in sums.items():
        scores[tuple(place)][seed] = 100 * right / n
    shares = {m: np.mean(validation[m]) for m in GUESSES.keys() & validation.keys()}
    shares = {m: (mean - GUESSES[m]) / (100 - GUESSES[m]) for m, mean in shares.items()}
    inside = [measure for measure, share in shares.items() if 0.15 <= share <= 0.95]
    for study, row, rate in {(s, r, rate) for s, _, r, rate in scores if inside}:
        of_measures = [scores[study, measure, row, rate] for measure in inside]
        scores[study, "mean", row, rate] = mean_of(of_measures)
    for study, measure, rate in {(s, m, rate) for s, m, _, rate in scores}:
        for pool in (
            ("plain", "plain again"),
            ("plain, few", "plain again, few"),
            ("plain, prose", "plain again, prose"),
            ("fine-tuned", *(f"LoRA r{rank}" for rank in range(17, 21))),
            ("fine-tuned", "LoRA r17", "LoRA r19", "LoRA r20"),
        ):
            if all((study, measure, row, rate) in scores for row in pool):
                of_rows = [scores[study, measure, row, rate] for row in pool]
                scores[study, measure, str(pool), rate] = mean_of(of_rows)
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
    """Breaks when a table was not made from the CSV beside it, or its intervals are not Student's t
    over runs."""
    tables = runpy.run_path(str(FOLDER / "pages.py"))["tables"]
    text = page.read_text(encoding="utf-8")
    assert text == tables(page.stem)
    shown = estimates(text)
    assert len(shown) >= 3
    assert not [gap for gap in shown if not is_known(gap, FROM_CELLS[page])]


def test_every_interval_of_the_page_follows_from_cells():
    """Breaks when an interval or a table of RESULTS.md is changed by hand, or rests on no cells that
    a reader has."""
    assert runpy.run_path(str(FOLDER / "pages.py"))["fill"](PAGE) == PAGE
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
