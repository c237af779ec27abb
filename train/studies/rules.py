"""The rules of every study: which measures count, how a rate is chosen, and the verdicts.

1. `is_inside`: a measure counts where its control is from 15 to 95 % of the way from guessing to 100 %, on the
   validation split.
2. `wider`: a rate is chosen on the validation split, from a grid that is the same for all rows and grows by factors
   of 2 until every row's best is inside.
3. `judge`: better, worse, equivalent within a margin, or undecided; p-values are Holm's over a table.
4. `check`: each prediction beside the verdict.

The number of seeds is fixed before a study runs: seeds that are added until a difference is known would bias it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eval.statistics import Estimate, holm

MARGIN = 3.0  # the smallest difference of interest, in points
INSIDE = (0.15, 0.95)
FEWEST_SEEDS = 5  # below, a report says that nothing is decided
MOST_RATES = 10
TUNING_SEEDS = 3  # that choose the rates
TIE = 1 / 6  # of the margin: rates whose scores differ by less are equally good


@dataclass(frozen=True)
class Measure:
    """Examples of the test split that each cell is scored on.

    groups: the picture or document of each example. chance: the score of guessing in percent, None if unknown.
    is_share: scores are from 0 to 1 and shown in percent; others are shown as they are, in the unit that the title
    names. margin: the smallest difference of interest, in points or the unit. rungs: the difficulty of each example, if
    they differ. view: what is judged in place of paired differences (seeds, examples), such as their slope. failed: the
    score of a cell that diverged.
    """

    title: str
    groups: Sequence
    chance: float | None = None
    is_share: bool = True
    margin: float = MARGIN
    less_is_better: bool = False
    in_mean: bool = True
    rungs: Sequence[str] = ()
    view: Callable[[np.ndarray], np.ndarray] = lambda scores: scores
    failed: float = 0.0

    @property
    def scale(self) -> float:
        return 100.0 if self.is_share else 1.0

    @property
    def digits(self) -> int:
        return 1 if self.is_share else 3


class Prediction(NamedTuple):
    """The verdict that is expected of a row on a measure, beside the first of its controls, before the study runs."""

    row: str
    measure: str
    verdict: str
    reason: str


def share_of_range(score: float, chance: float) -> float:
    """How far a score in percent is from guessing (0) to 100 % (1)."""
    return (score - chance) / (100 - chance)


def is_inside(score: float, chance: float | None) -> bool:
    """Whether a measure with this score of the control can show a difference in either direction; both in percent."""
    return INSIDE[0] <= share_of_range(score, chance or 0.0) <= INSIDE[1]


def best_rate(validation: Mapping[float, float], tie: float) -> float:
    """The lowest rate whose score is within `tie` of the best, in the unit of the score."""
    best = max(validation.values())
    return min(rate for rate, score in validation.items() if score >= best - tie)


def wider(grid: Sequence[float], best: Collection[float]) -> list[float]:
    """The rates to try next, so that the `best` of every row is inside the sorted grid: half the lowest, twice the
    highest. None beyond MOST_RATES; a single rate is not searched for."""
    more = [grid[0] / 2] * (grid[0] in best) + [grid[-1] * 2] * (grid[-1] in best)
    return [] if len(grid) == 1 or len(grid) + len(more) > MOST_RATES else more


def judge(
    differences: Mapping[tuple[str, str], Estimate], inside: Collection[tuple[str, str]], columns: Mapping[str, Measure]
) -> dict[tuple[str, str], dict]:
    """{"p", "visible", "verdict"} of each difference by (row, column); p-values are Holm's over those `inside`.

    A difference that is shown to be within its margin is "equivalent" also where it is not 0. visible: the true
    difference that 80 % of such studies would find.
    """
    usable = {place: difference for place, difference in differences.items() if place in inside}
    unequal = dict(zip(usable, holm([gap.p for gap in usable.values()]), strict=True))
    outside = [gap.equivalence(columns[name].margin) for (_, name), gap in usable.items()]
    equal, judged = dict(zip(usable, holm(outside), strict=True)), {}
    for place, difference in differences.items():
        verdict = "undecided" if place in inside else "out of range"
        if equal.get(place, 1.0) < 0.05:
            verdict = "equivalent"
        elif unequal.get(place, 1.0) < 0.05:
            verdict = "better" if (difference.mean > 0) != columns[place[1]].less_is_better else "worse"
        visible = difference.visible(max(1, len(usable)))
        judged[place] = {"p": unequal.get(place), "visible": visible, "verdict": verdict}
    return judged


def check(predictions: Sequence[Prediction], judged: Mapping[tuple[str, str], Mapping]) -> list[dict]:
    """Each prediction about a judged difference with its verdict, and whether that confirms it."""
    checked = []
    for predicted in predictions:
        if difference := judged.get((predicted.row, predicted.measure)):
            is_open = (verdict := difference["verdict"]) not in ("better", "worse", "equivalent")
            outcome = "open" if is_open else "confirmed" if verdict == predicted.verdict else "refuted"
            checked.append(predicted._asdict() | {"found": verdict, "outcome": outcome})
    return checked
