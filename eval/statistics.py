"""Bootstrap intervals of a mean, over examples, pictures and training runs; and the best guess without a picture.

In: a score for each example, of one run or of several. Out: the mean with its interval. Two models are compared on the
*difference* of their scores on the same examples (paired), which is what `bootstrap(a - b)` gives: a difference whose
interval holds 0 is not significant.

Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993 (percentile intervals).
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
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


def correlation(
    x, y, groups: Sequence[int | str], *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval | None:
    """Pearson's correlation of points (x, y) with its percentile interval; None where x or y is constant.

    `groups` of points, such as the checkpoints of one run, are drawn anew as a whole. Samples without a correlation are
    left out.
    """
    x, y = (np.asarray(values, dtype=np.float64) - np.mean(values) for values in (x, y))
    group = np.unique(groups, return_inverse=True)[1]
    moments = np.ones_like(x), x, y, x * x, y * y, x * y
    sums = np.stack([np.bincount(group, weights=values) for values in moments])  # (6, groups)

    def pearson(picked: np.ndarray) -> np.ndarray:
        n, sx, sy, xx, yy, xy = sums[:, picked].sum(axis=-1)
        spread = np.clip(n * xx - sx**2, 0, None) * np.clip(n * yy - sy**2, 0, None)
        defined = spread > 1e-18 * n**4
        return ((n * xy - sx * sy) / np.sqrt(np.where(defined, spread, np.nan)))[defined]

    whole = pearson(np.arange(sums.shape[1])[None])
    if not len(whole):
        return None
    found = pearson(np.random.default_rng(seed).integers(sums.shape[1], size=(resamples, sums.shape[1])))
    low, high = np.quantile(found, ((1 - confidence) / 2, (1 + confidence) / 2))
    return Interval(float(whole[0]), float(low), float(high))


def blind_guesses(train: Iterable[tuple[Iterable[Hashable], str]], test: Iterable[Iterable[Hashable]]) -> list[str]:
    """The best guess to each question of `test` without its picture: the answer most frequent in `train` under the
    first of its keys that occurs there, of equally frequent ones the first in the alphabet.

    A question's keys go from specific to general, such as its text, its type and (); `train` has (keys, answer) pairs.
    """
    answers: dict[Hashable, Counter[str]] = defaultdict(Counter)
    for keys, answer in train:
        for key in keys:
            answers[key][answer] += 1
    best = {key: min(found, key=lambda text: (-found[text], text)) for key, found in answers.items()}
    return [next(best[key] for key in keys if key in best) for keys in test]
