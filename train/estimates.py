"""Intervals of a mean over training runs and examples.

In: a score for each example, of one run or of several. Out: the mean with its interval, from the
components of variance and Student's t; `estimate(a - b)` compares two models on the same examples
(paired).

Sources: Howe 1974, Graybill and Wang 1980 (intervals of a sum of components).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eval.student import t_point


class Estimate(NamedTuple):
    """A mean with its 95 % interval. The half-widths of runs and examples combine as sqrt(a² + b²).
    With Satterthwaite's degrees of freedom, p-values below 0.002 of five runs would come three
    times too often. `train/studies/rules.py` has these p-values."""

    mean: float
    low: float
    high: float
    error: float  # standard error of the runs; of one run, of the examples
    freedom: float  # its degrees of freedom
    shared_error: float = 0.0  # standard error of the examples that all runs share
    shared_freedom: float = 1.0

    def reach(self, p: float) -> float:
        """The mean exceeds the truth by this much, or more, with a probability of p ≤ 0.5."""
        own = self.error * t_point(p, self.freedom)
        if not self.shared_error:
            return own
        return math.hypot(own, self.shared_error * t_point(p, self.shared_freedom))


def estimate(scores, groups: Sequence[int | str] | None = None) -> Estimate:
    """Mean of `scores`, (examples,) or (runs, examples), for any run on any example of their kinds.
    Runs and `groups` of examples (default: each example) are crossed random effects, whose
    components of variance give the standard error. Of one run, examples alone vary."""
    scores = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    if not np.isfinite(scores).all():
        raise ValueError("a score is not finite, and decides nothing")
    runs, examples = scores.shape
    mean = float(scores.mean())
    group = np.arange(examples)
    if groups is not None:
        group = np.unique(groups, return_inverse=True)[1]
    number = int(group.max()) + 1
    # 1. sums of a group, in units of the mean: groups with more examples weigh more
    sums = np.stack([np.bincount(group, weights=run - mean) for run in scores]) * number / examples
    by_run = sums.mean(axis=1)
    by_group = sums.mean(axis=0)
    rest = sums - by_run[:, None] - by_group
    # 2. mean squares: of runs, of groups, and what neither explains
    degrees = np.array([runs - 1, number - 1, (runs - 1) * (number - 1)])
    squares = np.array([number * (by_run**2).sum(), runs * (by_group**2).sum(), (rest**2).sum()])
    squares[degrees == 0] = 0
    of_runs, of_groups, of_rest = squares / np.maximum(degrees, 1)
    # 3. standard errors with their degrees of freedom, of the components that there are
    errors = []
    for part, freedom in (of_runs, runs - 1), (max(of_groups - of_rest, 0.0), number - 1):
        if part > 1e-24 * max(1, mean**2):
            errors += [math.sqrt(part / (runs * number)), freedom]
    if not errors:  # all are alike, or there is one alone, which says nothing of others
        errors = [0.0 if degrees.any() else math.inf, 1.0]
    result = Estimate(mean, mean, mean, *errors)  # one component alone has the first two fields
    half = result.reach(0.025)
    return result._replace(low=mean - half, high=mean + half)
