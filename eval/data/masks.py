"""Masks in COCO's annotations: polygons, and run lengths as numbers or as a text.

In: a segmentation as JSON has it. Out: truth values (height, width), equal to pycocotools' to the
pixel.

Source: Lin et al., "Microsoft COCO: Common Objects in Context", ECCV 2014, and the code of its API,
common/maskApi.c.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from eval.data.files import check
from eval.data.record import Box
from model.common import quoted

FINE = 5  # points of an outline in a pixel's side
MOST_PIXELS = 1 << 28


def mask_of(segmentation: Any, height: int, width: int) -> np.ndarray:
    """The mask (height, width) of run lengths, or of polygons, whose union it is. Raises
    LookupError, TypeError and ValueError."""
    check(0 < height * width <= MOST_PIXELS, f"no picture has {width}×{height} pixels")
    if isinstance(segmentation, Mapping):
        size = segmentation["size"]
        is_right = size == [height, width]
        check(is_right, f"the mask's size is {quoted(size)}, expected {[height, width]}")
        return of_runs(segmentation["counts"], height, width)
    is_list = isinstance(segmentation, list) and len(segmentation) > 0
    check(is_list, f"segmentation is {quoted(segmentation)}, expected polygons or run lengths")
    mask = np.zeros((height, width), bool)
    for polygon in segmentation:
        mask |= of_polygon(polygon, height, width)
    return mask


def checked_mask(box: Box, height: int, width: int) -> np.ndarray:
    """The mask (height, width) of an object. Raises as `mask_of`, and ValueError for one most of
    which is outside of its box; in a box thinner than two pixels it may be empty."""
    mask = mask_of(box.segmentation, height, width)
    row, column = mask.nonzero()
    is_inside = (column > box.x - 1) & (column < box.x + box.width)
    is_inside &= (row > box.y - 1) & (row < box.y + box.height)
    inside = np.count_nonzero(is_inside)
    is_thin = min(box.width, box.height) < 2
    fits = is_thin or inside > len(row) / 2
    check(fits, f"the bbox of {box.label} holds {inside} of the {len(row)} pixels of its mask")
    return mask


def of_polygon(polygon: Sequence[float], height: int, width: int) -> np.ndarray:
    """The mask of a polygon x1, y1, x2, y2, … in pixels, in which a column's pixels change where
    the outline crosses its middle."""
    numbers = np.array(polygon, np.float64)
    count = numbers.size
    is_whole = numbers.ndim == 1 and count >= 6 and count % 2 == 0
    check(is_whole, f"a polygon has {count} numbers: give x and y of three points or more")
    points = numbers.reshape(-1, 2)
    sides = np.array([width, height])
    is_near = ((points >= -sides) & (points <= 2 * sides)).all()
    check(is_near, f"a polygon leaves the picture, {width}×{height} pixels: {quoted(polygon, 100)}")
    return of_runs(runs_within(points.tobytes(), height, width).tolist(), height, width)


@lru_cache(1 << 16)  # a polygon is checked, and scored twice
def runs_within(outline: bytes, height: int, width: int) -> np.ndarray:
    """The run lengths of `of_polygon`, of its points (N, 2) in float64."""
    points = np.frombuffer(outline).reshape(-1, 2)
    # 1. a fine outline
    corners = (FINE * points + 0.5).astype(np.int64)
    lines = [line(start, end) for start, end in pairwise([*corners, corners[0]])]
    outline = np.concatenate(lines)
    # 2. where it crosses the middle of a column
    is_step = outline[1:, 0] != outline[:-1, 0]
    left, upper = np.minimum(outline[1:], outline[:-1])[is_step].T
    column = left // FINE
    is_middle = (left % FINE == FINE // 2) & (column >= 0) & (column < width)
    row = (upper[is_middle] + FINE // 2) // FINE
    # 3. the pixels from one crossing to the next are outside and inside in turn
    crossings = np.sort(column[is_middle] * height + row.clip(0, height))
    return np.diff(crossings, prepend=0, append=height * width)


def line(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """The points (N, 2) from one to the other, a step of 1 along the longer way."""
    across, down = np.abs(end - start)
    longer = int(down > across)
    low, high = sorted((start, end), key=lambda point: point[longer])
    steps = np.arange(high[longer] - low[longer] + 1)
    slope = (high - low) / max(1, steps[-1])
    points = (low + steps[:, None] * slope + 0.5).astype(np.int64)  # towards 0, as C does
    points[:, longer] = low[longer] + steps
    return points if start[longer] <= end[longer] else points[::-1]


def of_runs(counts: str | Sequence[int], height: int, width: int) -> np.ndarray:
    """The mask of run lengths: of pixels outside and inside in turn, column by column."""
    if isinstance(counts, str):
        counts = read_counts(counts)
    are_whole = all(type(count) is int and count >= 0 for count in counts)
    fits = are_whole and sum(counts) == height * width
    check(fits, f"counts {quoted(counts, 60)} do not sum up to {height * width} pixels")
    inside = np.arange(len(counts)) % 2 == 1
    return np.repeat(inside, counts).reshape(width, height).T


def read_counts(text: str) -> list[int]:
    """The run lengths in a text: five bits a letter, the lowest first, with a sign; from the fourth
    on each is the difference to the one before the last."""
    counts = []
    value = shift = 0
    for letter in text:
        bits = ord(letter) - ord("0")
        check(
            0 <= bits < 64 and shift < 60, f"counts hold {quoted(letter)}, which is no run length"
        )
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        if len(counts) > 2:
            value += counts[-2]
        counts.append(value)
        value = shift = 0
    check(shift == 0, "counts end within a number")
    return counts
