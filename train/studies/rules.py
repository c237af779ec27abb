"""The rules of every study: which measures count, how a rate is chosen, and the verdicts.

1. `is_inside`: a measure counts where its control is from 15 to 95 % of the way from guessing to 100 %, on the
   validation split.
2. `wider`: a rate is chosen on the validation split, from a grid that is the same for all rows and grows by factors
   of 2 until every row's best is inside.
3. `judge`: better, worse, equivalent within a margin, or undecided; p-values are Holm's over a table.
4. `check`: each prediction beside the verdict.

The number of seeds is fixed before a study runs: seeds that are added until a difference is known would bias it.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from eval.statistics import Estimate, holm

MARGIN = 3.0  # the smallest difference of interest, in points
INSIDE = (0.15, 0.95)
FEWEST_SEEDS = 5  # below, a report says that nothing is decided
MOST_RATES = 10
TUNING_SEEDS = 3  # that choose the rates
TIE = 1 / 6  # of the margin: rates whose scores differ by less are equally good


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
    differences: Mapping[tuple, Estimate],
    inside: Collection[tuple],
    margins: Mapping[tuple, float],
    less_is_better: Collection[tuple] = (),
) -> dict[tuple, dict]:
    """{"p", "visible", "verdict"} of each difference of a table; p-values are Holm's over those that are `inside`.

    A difference that is shown to be within its margin is "equivalent" also where it is not 0. visible: the true
    difference that 80 % of such studies would find.
    """
    usable = [name for name in differences if name in inside]
    unequal = dict(zip(usable, holm([differences[name].p for name in usable]), strict=True))
    equal = dict(zip(usable, holm([differences[name].equivalence(margins[name]) for name in usable]), strict=True))
    judged = {}
    for name, difference in differences.items():
        if name not in inside:
            verdict = "out of range"
        elif equal[name] < 0.05:
            verdict = "equivalent"
        elif unequal[name] < 0.05:
            verdict = "better" if (difference.mean > 0) != (name in less_is_better) else "worse"
        else:
            verdict = "undecided"
        judged[name] = {"p": unequal.get(name), "visible": difference.visible(max(1, len(usable))), "verdict": verdict}
    return judged


def check(predictions: Sequence[Prediction], verdicts: Mapping[tuple[str, str], str]) -> list[dict]:
    """Each prediction about a (row, measure) with its verdict, and whether that confirms it."""
    checked = []
    for predicted in predictions:
        if found := verdicts.get((predicted.row, predicted.measure)):
            is_open = found not in ("better", "worse", "equivalent")
            outcome = "open" if is_open else "confirmed" if found == predicted.verdict else "refuted"
            checked.append(predicted._asdict() | {"found": found, "outcome": outcome})
    return checked
