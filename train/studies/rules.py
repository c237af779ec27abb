"""The rules of every study: which measures count, and the verdicts.

A measure counts where its control is from 15 to 95 % of the way from guessing to 100 %, on the
validation split. A row is better, worse, equivalent within a margin, or undecided; p-values are
Holm's over a table. The number of seeds is fixed before a study runs: seeds that are added until a
difference is known would bias it.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from eval.student import t_tail
from train.estimates import Estimate

MARGIN = 3.0  # the smallest difference of interest, in points
INSIDE = (0.15, 0.95)
FEWEST_SEEDS = 5  # below, a report says that nothing is decided
MOST_RATES = 10
TUNING_SEEDS = 3  # that choose the rates
TIE = 1 / 6  # of the margin: rates whose scores differ by less are equally good


@dataclass(frozen=True)
class Measure:
    """Examples of the test split that each cell is scored on.

    groups: the picture or document of each example. chance: the score of guessing in percent, None
    if unknown. is_share: scores are from 0 to 1, shown in percent; others are in the unit that the
    title names, as is the margin, the smallest difference of interest. rungs: the difficulty of
    each example, if they differ. failed: the score of a cell that diverged.
    """

    title: str
    groups: Sequence
    chance: float | None = None
    is_share: bool = True
    margin: float = MARGIN
    less_is_better: bool = False
    in_mean: bool = True
    rungs: Sequence[str] = ()
    failed: float = 0.0

    @property
    def scale(self) -> float:
        return 100.0 if self.is_share else 1.0

    @property
    def digits(self) -> int:
        return 1 if self.is_share else 3


def share_of_range(score: float, chance: float | None) -> float:
    """How far a score in percent is from guessing (0) to 100 % (1)."""
    chance = chance or 0.0
    return (score - chance) / (100 - chance)


def is_inside(score: float, chance: float | None) -> bool:
    """Whether a measure with this score of the control can show a difference in either direction;
    both in percent."""
    return INSIDE[0] <= share_of_range(score, chance) <= INSIDE[1]


def exact_interval(hits: int, trials: int) -> tuple[float, float]:
    """The 95 % interval of a share, of few or of runs that differ by all or nothing (Clopper and
    Pearson 1934)."""
    shares = np.linspace(0, 1, 100_001)
    chances = []  # of each number of hits, by share
    for n in range(trials + 1):
        chances.append(math.comb(trials, n) * shares**n * (1 - shares) ** (trials - n))
    low, high = 0.0, 1.0
    if hits:  # so many hits or more: rises with the share
        low = np.interp(0.025, sum(chances[hits:]), shares)
    if hits < trials:  # so many or fewer: falls
        high = np.interp(-0.025, -sum(chances[: hits + 1]), shares)
    return low, high


def tail_of(gap: Estimate, distance: float) -> float:
    """The p of a mean that is so far above the truth, or farther: `gap.reach(p)` = distance, by
    halving the range of its logarithm."""
    if distance < 0:
        return 1 - tail_of(gap, -distance)
    if not gap.error:
        return float(distance == 0)
    if not gap.shared_error:
        return t_tail(distance / gap.error, gap.freedom)
    low, high = math.log(2), 690.0  # of −ln p
    while high - low > 1e-10:
        middle = (low + high) / 2
        if gap.reach(math.exp(-middle)) < distance:
            low = middle
        else:
            high = middle
    return math.exp(-low)


def difference_p(gap: Estimate) -> float:
    """The two-sided p of "the mean is 0"."""
    return min(1.0, 2 * tail_of(gap, abs(gap.mean)))


def equivalence_p(gap: Estimate, margin: float) -> float:
    """The p of "the mean is outside ±margin", by two one-sided tests (Schuirmann 1987)."""
    return max(tail_of(gap, gap.mean + margin), tail_of(gap, margin - gap.mean))


def visible(gap: Estimate, tests: int = 1) -> float:
    """The smallest true difference that is found with a power of 73 % (5 runs) to 80 % (many),
    tested at 5 % shared among so many `tests`."""
    return gap.reach(0.025 / tests) + gap.reach(0.2)


def holm(values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm 1979): at most 5 % of all tables have one below 0.05
    by chance."""
    order = np.argsort(values)
    steps = np.arange(len(values), 0, -1) * np.take(values, order)
    return np.minimum(1.0, np.maximum.accumulate(steps))[np.argsort(order)].tolist()


def judge(
    differences: Mapping[tuple[str, str], Estimate],
    inside: Collection[tuple[str, str]],
    columns: Mapping[str, Measure],
) -> dict[tuple[str, str], dict]:
    """{"p", "visible", "verdict"} of each difference by (row, column); p-values are Holm's over
    those `inside`.

    A difference within its margin is "equivalent" also where it is not 0. visible: what about
    three of four such studies would find.
    """
    usable = {place: difference for place, difference in differences.items() if place in inside}
    # p that the difference is 0, and that it is not within its margin
    zero = [difference_p(gap) for gap in usable.values()]
    outside = [equivalence_p(gap, columns[name].margin) for (_, name), gap in usable.items()]
    unequal = dict(zip(usable, holm(zero), strict=True))
    equal = dict(zip(usable, holm(outside), strict=True))
    judged = {}
    for place, difference in differences.items():
        verdict = "undecided" if place in inside else "out of range"
        if equal.get(place, 1.0) < 0.05:
            verdict = "equivalent"
        elif unequal.get(place, 1.0) < 0.05:
            is_more = difference.mean > 0
            is_better = is_more != columns[place[1]].less_is_better
            verdict = "better" if is_better else "worse"
        judged[place] = {
            "p": unequal.get(place),
            "visible": visible(difference, max(1, len(usable))),
            "verdict": verdict,
        }
    return judged
