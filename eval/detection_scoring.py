"""COCO's measures of detection: average precision and recall by overlap, size and number of detections.

In: the true and the found boxes of each picture. Out: the twelve numbers of COCO's table, and the AP of each class.

Source: Lin et al., "Microsoft COCO: Common Objects in Context", ECCV 2014; the rules are those of its evaluation code
(https://cocodataset.org/#detection-eval), to the tie.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from eval.records import Box

THRESHOLDS = np.linspace(0.5, 0.95, 10)  # of the overlap (IoU)
RECALLS = np.linspace(0, 1, 101)
SIZES = {"": (0, 1e10), " small": (0, 32**2), " medium": (32**2, 96**2), " large": (96**2, 1e10)}  # area, both ends
MOST = 100  # detections of one class in one picture


class Found(NamedTuple):
    """A box that a model has named: x and y of its upper left corner, in pixels."""

    label: str
    x: float
    y: float
    width: float
    height: float
    score: float = 1.0


class Matches(NamedTuple):
    """What became of the detections D of one class, in one picture or in all: score and rank in its picture (D,);
    hit and ignored (thresholds, D); and how many truths there are to find."""

    score: np.ndarray
    rank: np.ndarray
    hit: np.ndarray
    ignored: np.ndarray
    truths: int


def score_boxes(truths: Sequence[Sequence[Box]], found: Sequence[Sequence[Found]]) -> dict:
    """COCO's table, as fractions, and "classes", the AP of each; truths and detections of one picture after the other.

    The order of the pictures decides between equal scores: COCO's is that of their ids. None: no truth of that size.
    """
    pairs = {truth.label: [] for of_picture in truths for truth in of_picture}
    for of_picture, detections in zip(truths, found, strict=True):
        for label in {box.label for box in (*of_picture, *detections)} & pairs.keys():
            best = sorted((f for f in detections if f.label == label), key=lambda f: -f.score)[:MOST]
            pairs[label].append(([truth for truth in of_picture if truth.label == label], best))
    result, by_class = {}, {}
    for size, limits in SIZES.items():
        pooled = {label: pool(match(*pair, limits) for pair in of_class) for label, of_class in pairs.items()}
        pooled = {label: matches for label, matches in pooled.items() if matches.truths}
        precision = np.array([average_precision(matches) for matches in pooled.values()]).reshape(-1, len(THRESHOLDS))
        result[f"AP{size}"] = _mean(precision)
        if not size:
            result |= {"AP50": _mean(precision[:, 0]), "AP75": _mean(precision[:, 5])}
            by_class = dict(zip(pooled, precision.mean(axis=1).tolist(), strict=True))
        for most in (1, 10, MOST) if not size else (MOST,):
            hits = [(m.hit[:, m.rank < most].sum(axis=1).mean(), m.truths) for m in pooled.values()]
            result[f"AR{size or most}"] = _mean([float(hit / truths) for hit, truths in hits])
    return result | {"classes": by_class}


def _mean(values) -> float | None:
    return float(np.mean(values)) if len(values) else None


def match(truths: Sequence[Box], found: Sequence[Found], limits: tuple[float, float] = SIZES[""]) -> Matches:
    """Detections of one class in one picture, best first, each to the free truth with the largest overlap.

    At equal overlap the later truth is taken, and a real one before one that is ignored: a crowd, which many may match,
    or a truth of another size. Detections of ignored truths, and those of another size without a truth, are ignored.
    """
    low, high = limits
    crowd = np.array([truth.is_crowd for truth in truths], bool)
    ignored = crowd | np.array([not low <= truth.area <= high for truth in truths], bool)
    iou = overlaps(found, truths)
    hit = np.zeros((len(THRESHOLDS), len(found)), bool)
    neither = hit | np.array([not low <= f.width * f.height <= high for f in found], bool)
    for at, threshold in enumerate(THRESHOLDS):
        free = np.ones(len(truths), bool)
        for number in range(len(found)):
            fits = (free | crowd) & (iou[number] >= threshold)
            fits = fits & ~ignored if (fits & ~ignored).any() else fits
            if fits.any():
                best = np.flatnonzero(fits & (iou[number] == iou[number][fits].max()))[-1]
                free[best] = False
                hit[at, number], neither[at, number] = not ignored[best], ignored[best]
    scores = np.array([f.score for f in found], np.float64)
    return Matches(scores, np.arange(len(found)), hit, neither, int((~ignored).sum()))


def overlaps(found: Sequence[Found], truths: Sequence[Box]) -> np.ndarray:
    """IoU (found, truths); with a crowd, the share of the found box that lies in it."""
    boxes = ([(b.x, b.y, b.width, b.height) for b in boxes] for boxes in (found, truths))
    (left, top, width, height), true = (np.array(sides, np.float64).reshape(-1, 4).T[..., None] for sides in boxes)
    true_left, true_top, true_width, true_height = true[..., 0]
    across = np.minimum(left + width, true_left + true_width) - np.maximum(left, true_left)
    down = np.minimum(top + height, true_top + true_height) - np.maximum(top, true_top)
    common = np.where((across > 0) & (down > 0), across * down, 0.0)
    whole = np.where([t.is_crowd for t in truths], width * height, width * height + true_width * true_height - common)
    return np.divide(common, whole, out=np.zeros_like(common), where=common > 0)


def pool(matches: Iterable[Matches]) -> Matches:
    """The detections of all pictures, best first; of equal ones the earlier."""
    score, rank, hit, ignored, truths = zip(*matches, strict=True)
    order = np.argsort(-np.concatenate(score), kind="stable")
    both = (np.concatenate(part, axis=1)[:, order] for part in (hit, ignored))
    return Matches(np.concatenate(score)[order], np.concatenate(rank)[order], *both, sum(truths))


def average_precision(matches: Matches) -> np.ndarray:
    """(thresholds,) mean over 101 recalls r of the largest precision at a recall of r or more, 0 where none is."""
    hits = np.cumsum(matches.hit, axis=1)
    misses = np.cumsum(~matches.hit & ~matches.ignored, axis=1)
    precision = hits / (hits + misses + np.spacing(1))
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    reached = [np.searchsorted(row / matches.truths, RECALLS) for row in hits]
    return np.array([np.append(row, 0.0)[at].mean() for row, at in zip(precision, reached, strict=True)])
