"""The rules of every study: what a measure must be able to show, how rates and seeds are chosen, and the verdicts.

1. `choose_rung`: a measure counts only where its control is between 15 and 95 % of the way from guessing to 100 %.
2. `bracket`: a rate is chosen by the mean of three seeds on the validation split, from a grid that is the same for all
   rows and grows by factors of 2 until every row's best is inside.
3. `enough`: at least five seeds, then more until the 95 % interval of the main difference is within ±3 points, or ten.
4. `judge`: better, worse, equivalent within ±3 points, or undecided; p-values are Holm's over a table.
5. `check`: what was predicted beside what was found.

What a control and a positive control are, is the study's own; `train/studies/attention.py` has both.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from eval.statistics import Estimate, holm

MARGIN = 3.0  # the smallest difference of interest, in points
INSIDE = (0.15, 0.95)
TUNING_SEEDS, LEAST_SEEDS, MOST_SEEDS = 3, 5, 10
MOST_RATES = 10
# how a table is to be read
VERDICTS = (
    "Verdicts are corrected for the number of differences in a table (Holm; the last column by itself): better, worse, "
    f"equivalent (within ±{MARGIN:g}, two one-sided tests), undecided; out of range: the control guesses or is "
    "perfect, so that nothing is measured."
)
TIE = 0.005  # half a point on the validation split is noise: the lower rate is taken, and no grid grows for it

Name = TypeVar("Name")
Scores = Mapping[str, Mapping[float, float]]  # of the validation split, by row and rate


class Prediction(NamedTuple):
    """What is expected of a row against its control before the study runs; found: a verdict of `judge`."""

    row: str
    measure: str
    verdict: str
    reason: str


def share_of_range(score: float, chance: float) -> float:
    """How far a score in percent is from guessing (0) to 100 % (1)."""
    return (score - chance) / (100 - chance)


def is_inside(score: float, chance: float) -> bool:
    """Whether a measure with this score of the control can show a difference in either direction."""
    return INSIDE[0] <= share_of_range(score, chance) <= INSIDE[1]


def choose_rung(ladder: Sequence[str], scores: Mapping[str, float], chances: Mapping[str, float]) -> str:
    """The hardest difficulty of a ladder (from easy to hard) at which the control is inside; else the nearest."""
    inside = [rung for rung in ladder if is_inside(scores[rung], chances[rung])]
    if inside:
        return inside[-1]
    middle = sum(INSIDE) / 2
    return min(ladder, key=lambda rung: abs(share_of_range(scores[rung], chances[rung]) - middle))


def choose_rungs(
    ladders: Mapping[str, Sequence[str]], scores: Mapping[str, float], chances: Mapping[str, float]
) -> dict[str, dict]:
    """By ladder {"chosen", "pilot": the scores of its difficulties}."""
    return {
        title: {"chosen": choose_rung(ladder, scores, chances), "pilot": {rung: scores[rung] for rung in ladder}}
        for title, ladder in ladders.items()
    }


def mean_scores(names: Iterable[tuple], values: Iterable[float]) -> Scores:
    """The mean of values by row and rate, with which each of `names` begins; a seed may follow."""
    found: dict[str, dict[float, list[float]]] = {}
    for (row, rate, *_), value in zip(names, values, strict=True):
        found.setdefault(row, {}).setdefault(rate, []).append(value)
    return {row: {rate: float(np.mean(of_rate)) for rate, of_rate in of_row.items()} for row, of_row in found.items()}


def best_rate(validation: Mapping[float, float], margin: float = TIE) -> float:
    """The lowest rate whose score (0 to 1) on the validation split is within `margin` of the best."""
    best = max(validation.values())
    return min(rate for rate, score in validation.items() if score >= best - margin)


def bracket(rates: Sequence[float], score: Callable[[Sequence[float]], Scores]) -> Scores:
    """The scores of all rows at all rates of a grid with every row's best inside, or of `MOST_RATES`.

    score(rates): of every row at these rates, and at those given before. A single rate is not searched for.
    """
    grid = sorted(rates)
    while True:
        scores = score(grid)
        if len(grid) == 1:
            return scores
        best = {best_rate(of_row) for of_row in scores.values()}
        more = [grid[0] / 2] * (grid[0] in best) + [grid[-1] * 2] * (grid[-1] in best)
        if not more or len(grid) + len(more) > MOST_RATES:
            return scores
        grid = sorted([*grid, *more])


def edges(scores: Scores) -> list[str]:
    """The rows whose best rate is the lowest or the highest tried."""
    return [row for row, tried in scores.items() if len(tried) > 1 and best_rate(tried) in (min(tried), max(tried))]


def enough(main: Sequence[Estimate], seeds: int, least: int = LEAST_SEEDS, most: int = MOST_SEEDS) -> bool:
    """Whether no more seeds are needed for these differences. Where there are none, nothing is known yet."""
    known = bool(main) and all(one.high - one.low <= 2 * MARGIN for one in main)
    return seeds >= most or seeds >= least and known


def judge(
    differences: Mapping[Name, Estimate],
    measurable: bool | Mapping[Name, bool] = True,
    *,
    seeds: Mapping[Name, int] | None = None,
    less_is_better: Collection[Name] = (),
    margins: Mapping[Name, float] | None = None,
) -> dict[Name, dict]:
    """By name {"p", "p_equivalent", "visible", "verdict"} of a table's differences: p-values are Holm's over them, over
    those in range and the others apart.

    measurable: whether the control is in range. seeds: of each difference; one says nothing of other runs. visible: the
    true difference that would have been found in 80 % of such studies. A difference that is shown to be within ±3
    points, or the given margin, is "equivalent" also where it is not 0.
    """
    if isinstance(measurable, Mapping):
        found: dict[Name, dict] = {}
        for is_inside in (True, False):
            part = {name: one for name, one in differences.items() if bool(measurable[name]) == is_inside}
            found |= judge(part, is_inside, seeds=seeds, less_is_better=less_is_better, margins=margins)
        return found
    unequal = holm([one.p for one in differences.values()])
    equal = holm([one.equivalence((margins or {}).get(name, MARGIN)) for name, one in differences.items()])
    found = {}
    for (name, one), p, p_equivalent in zip(differences.items(), unequal, equal, strict=True):
        verdict = "undecided"
        if seeds and seeds[name] == 1:
            verdict = "one seed"
        elif not measurable:
            verdict = "out of range"
        elif p_equivalent < 0.05:
            verdict = "equivalent"
        elif p < 0.05:
            verdict = "better" if (one.mean > 0) != (name in less_is_better) else "worse"
        visible = one.visible(len(differences))
        found[name] = {"p": p, "p_equivalent": p_equivalent, "visible": visible, "verdict": verdict}
    return found


def in_words(judged: Mapping[str, Mapping], sizes: bool = True) -> str:
    """Judged differences by verdict, such as "worse in VQA (-3.2); undecided in 2×2 (±4.0 would have been seen)"."""
    parts: dict[str, list[str]] = {}
    for about, one in judged.items():
        if one["verdict"] == "undecided":
            about += f" (±{one['visible']:.1f} would have been seen)"
        elif sizes and one["verdict"] in ("better", "worse"):
            about += f" ({one['mean']:+.1f})"
        parts.setdefault(one["verdict"], []).append(about)
    return "; ".join(f"{verdict} in {', '.join(of_verdict)}" for verdict, of_verdict in parts.items())


def limits(seeds: int, edges: Sequence[str]) -> list[str]:
    """What limits the verdicts, in sentences. edges: rows whose best rate is at an end of the grid."""
    few = f"{seeds} seed(s): fewer than {LEAST_SEEDS} decide nothing."
    at_edge = f"The best rate is the lowest or the highest tried for: {'; '.join(edges)}."
    return [few] * (seeds < LEAST_SEEDS) + [at_edge] * bool(edges)


def check(predictions: Sequence[Prediction], verdicts: Mapping[str, Mapping[str, str]]) -> list[dict]:
    """Each prediction with what was found (by row and measure), and whether that confirms it."""
    checked = []
    for one in predictions:
        found = verdicts.get(one.row, {}).get(one.measure)
        if found is not None:
            is_open = found not in ("better", "worse", "equivalent")
            outcome = "open" if is_open else "confirmed" if found == one.verdict else "refuted"
            checked.append({**one._asdict(), "found": found, "outcome": outcome})
    return checked
