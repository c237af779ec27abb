"""Intervals of a mean over examples and pictures.

In: a score for each example. Out: the mean with its interval; that of a − b compares two models on the same examples
(paired). `train/estimates.py` has those of several runs.

Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993 (percentile intervals).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """A mean, and the ends of its interval."""

    mean: float
    low: float
    high: float


def bootstrap(scores: Sequence[float], groups: Sequence[int | str] | None = None) -> Interval:
    """Mean of `scores`, one for each example, with its 95 % percentile interval. Groups are drawn with replacement:
    examples of one, such as the questions on one picture, stay together. By default each example is its own group."""
    group = np.arange(len(scores)) if groups is None else np.unique(groups, return_inverse=True)[1]
    sizes, sums = np.bincount(group), np.bincount(group, weights=scores)
    draw, means = np.random.default_rng(0), []
    batch = max(1, 200_000 // len(sizes))  # rows at a time, to stay in the processor's cache
    for start in range(0, 10_000, batch):
        picked = draw.integers(len(sizes), size=(min(batch, 10_000 - start), len(sizes)))
        means.append(sums[picked].sum(axis=1) / sizes[picked].sum(axis=1))
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Interval(float(np.mean(scores)), float(low), float(high))
