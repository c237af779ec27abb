"""Intervals of a mean over examples, pictures and training runs, and tests of differences.

In: a score for each example, of one run or of several. Out: the mean with its interval. Two models are compared on the
*difference* of their scores on the same examples (paired), which is what `bootstrap(a - b)` and `estimate(a - b)` give.

`bootstrap` resamples runs and examples. Of five runs its intervals cover the truth in about 85 % of all cases, not in
95 %, since it cannot know how little five runs say of all runs. `estimate`, which the studies use for differences of
runs, takes the components of variance and Student's t instead; both agree where runs are many.

Sources: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993 (percentile intervals). Howe 1974, Graybill and
Wang 1980 (intervals of a sum of components). Holm 1979. Schuirmann 1987 (two one-sided tests).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """A mean, and the ends of its interval."""

    mean: float
    low: float
    high: float

    @property
    def significant(self) -> bool:
        """For a difference: 0 is outside."""
        return not self.low <= 0 <= self.high


def bootstrap(
    scores,
    groups: Sequence[int | str] | None = None,
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """Mean of `scores`, (examples,) or (runs, examples), with its percentile interval.

    Runs, if there are several, and `groups` of examples are drawn anew with replacement: examples of one group, such as
    the questions on one picture, are not independent and stay together. By default each example is its own group.
    """
    scores = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    runs, examples = scores.shape
    group = np.arange(examples) if groups is None else np.unique(groups, return_inverse=True)[1]
    sizes = np.bincount(group)
    sums = np.stack([np.bincount(group, weights=run) for run in scores])  # (runs, groups)
    draw, means = np.random.default_rng(seed), []
    batch = max(1, 200_000 // len(sizes))  # rows at a time, to stay in the processor's cache
    for start in range(0, resamples, batch):
        rows = min(batch, resamples - start)
        picked = draw.integers(len(sizes), size=(rows, len(sizes)))
        run_mean = sums[draw.integers(runs, size=(rows, runs))].mean(axis=1)  # (rows, groups)
        means.append(np.take_along_axis(run_mean, picked, axis=1).sum(axis=1) / sizes[picked].sum(axis=1))
    low, high = np.quantile(np.concatenate(means), ((1 - confidence) / 2, (1 + confidence) / 2))
    return Interval(float(scores.mean()), float(low), float(high))


class Estimate(NamedTuple):
    """A mean, the ends of its 95 % interval, its standard error as far as runs vary, with the degrees of freedom of
    that, and the same as far as examples do that all runs share. Of one run, examples are in the place of runs.

    Quantiles of both parts are added as the sides of a right angle. One number of degrees of freedom for their sum
    (Satterthwaite) is large where few runs are alike by chance, just where the error is too small: of five runs whose
    levels vary most, p-values below 0.002 then are three times as frequent as they should be, and Holm's rests on them.
    """

    mean: float
    low: float
    high: float
    error: float
    freedom: float
    shared_error: float = 0.0
    shared_freedom: float = math.inf

    significant = Interval.significant

    @property
    def p(self) -> float:
        """The two-sided p of "the mean is 0"."""
        return min(1.0, 2 * self.above(0.0) if self.mean > 0 else 2 * self.below(0.0))

    def above(self, bound: float) -> float:
        """The one-sided p of "the mean is at most `bound`": small where it is above."""
        return self._tail(self.mean - bound)

    def below(self, bound: float) -> float:
        """The one-sided p of "the mean is at least `bound`": small where it is below."""
        return self._tail(bound - self.mean)

    def equivalence(self, margin: float) -> float:
        """The p of "the mean is outside ±margin", by two one-sided tests."""
        return max(self.above(-margin), self.below(margin))

    def visible(self, tests: int = 1, power: float = 0.8) -> float:
        """The smallest true difference that is found with this `power`, tested at 5 % shared among so many `tests`."""
        return self.reach(0.025 / tests) + self.reach(1 - power)

    def reach(self, p: float) -> float:
        """What the mean is above the truth by, or more, with a probability of p ≤ 0.5."""
        return math.hypot(
            self.error * t_point(p, self.freedom),
            self.shared_error and self.shared_error * t_point(p, self.shared_freedom),
        )

    def _tail(self, distance: float) -> float:
        """The p with `reach(p)` = distance, by halving the range of its logarithm."""
        if distance < 0:
            return 1 - self._tail(-distance)
        if not self.error:
            return float(distance == 0)
        if not self.shared_error:
            return t_tail(distance / self.error, self.freedom)
        low, high = math.log(2), 690.0  # of −ln p
        while high - low > 1e-10:
            middle = (low + high) / 2
            low, high = (middle, high) if self.reach(math.exp(-middle)) < distance else (low, middle)
        return math.exp(-low)


def estimate(scores, groups: Sequence[int | str] | None = None) -> Estimate:
    """Mean of `scores`, (examples,) or (runs, examples), for any run of its kind on any example of its kind.

    Runs and `groups` of examples (default: each example) are crossed random effects: every run has the same examples.
    Their components of variance give the standard error. One run: nothing is known of others, and examples alone vary.
    """
    scores = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    runs, examples = scores.shape
    mean = float(scores.mean())
    group = np.arange(examples) if groups is None else np.unique(groups, return_inverse=True)[1]
    number = int(group.max()) + 1
    # sums of a group, in units of the mean: groups with more examples weigh more
    sums = np.stack([np.bincount(group, weights=run - mean) for run in scores]) * number / examples
    by_run, by_group = sums.mean(axis=1), sums.mean(axis=0)
    rest = sums - by_run[:, None] - by_group
    degrees = np.array([runs - 1, number - 1, (runs - 1) * (number - 1)])
    squares = np.array([number * (by_run**2).sum(), runs * (by_group**2).sum(), (rest**2).sum()])
    squares[degrees == 0] = 0  # mean squares: of runs, of groups, and what neither explains
    squares /= np.maximum(degrees, 1)
    parts = [(squares[0], runs - 1), (max(squares[1] - squares[2], 0.0), number - 1)]
    parts = [(math.sqrt(part / (runs * number)), freedom) for part, freedom in parts if part > 1e-24 * max(1, mean**2)]
    found = Estimate(mean, mean, mean, *sum(parts, ()) or (0.0, math.inf))
    half = found.reach(0.025)
    return found._replace(low=mean - half, high=mean + half)


def slope_scores(x, scores) -> np.ndarray:
    """Scores whose mean is the slope of `scores` (…, examples) over x (examples,), so that `estimate` gives its
    interval: the influence of each example on the least-squares line."""
    x, scores = np.asarray(x, dtype=np.float64), np.asarray(scores, dtype=np.float64)
    away = x - x.mean()
    spread = (away**2).mean()
    whole = scores.reshape(-1, len(x)).mean(axis=0)
    slope = (away * whole).mean() / spread
    return slope + away * (scores - whole.mean() - slope * away) / spread


def holm(values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number: at most 5 % of all tables have one below 0.05 by chance."""
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = largest
    return adjusted


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(100)


def t_tail(t: float, freedom: float) -> float:
    """P(T > t) of Student's t.

    With t = √f·tan θ the density is c·cos^(f − 1) θ, which is smooth on a finite range: Gauss-Legendre integrates it.
    Beyond 1 the tail itself, or the digits would cancel, to where the integrand has fallen to e⁻⁵⁰ of its first value.
    """
    if math.isinf(freedom):
        return 0.5 * math.erfc(t / math.sqrt(2))
    end = math.atan2(abs(t), math.sqrt(freedom))
    is_far = abs(t) > 1
    last = math.acos(math.cos(end) * math.exp(-50 / (freedom - 1))) if freedom > 1 else math.pi / 2
    start, stop = (end, last) if is_far else (0.0, end)
    angles = start + (stop - start) * (_NODES + 1) / 2
    area = float(np.cos(angles) ** (freedom - 1) @ _WEIGHTS) * (stop - start) / 2 * _t_scale(freedom)
    above = area if is_far else 0.5 - area
    return above if t >= 0 else 1 - above


def t_density(t: float, freedom: float) -> float:
    """The density of Student's t."""
    if math.isinf(freedom):
        return math.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    return _t_scale(freedom) / math.sqrt(freedom) * (1 + t * t / freedom) ** (-(freedom + 1) / 2)


def _t_scale(freedom: float) -> float:
    """The density of θ at 0."""
    return math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)


def t_point(p: float, freedom: float) -> float:
    """The t with P(T > t) = p ≤ 0.5, by Newton's method: from 0 on the tail is convex, so that t only grows, and a step
    back is one of rounding."""
    t, step = 0.0, 1.0
    while step > 1e-12 * (1 + t):
        step = (t_tail(t, freedom) - p) / t_density(t, freedom)
        t += step
    return t
