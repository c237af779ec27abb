"""Masks that a model has said, beside the true ones.

In: boxes with codes, a coder that decodes them, and true masks as annotated. Out: the overlap of
each pair, for COCO's measures in `eval/detect.py`, and that of a whole answer, as big_vision scores
segmentation.

Source: COCO's API, common/maskApi.c; big_vision, evaluators/proj/paligemma/transfers/
segmentation.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eval.data.masks import mask_of
from eval.data.record import Box, Detection


class FoundMask(NamedTuple):
    """An object whose mask a model has named."""

    label: str
    mask: np.ndarray  # (height, width) of truth values
    score: float

    @property
    def area(self) -> int:
        return int(self.mask.sum())


def masks_of(found: Sequence, truth: Detection, coder: Any) -> list[FoundMask]:
    """The masks of the boxes of an answer (`eval.detect.Found`) that have one. coder: a
    `MaskCoder`."""
    masks = []
    for box in found:
        if box.said.codes:
            mask = coder.to_mask(box.said.codes, box.said.box, truth.width, truth.height)
            masks.append(FoundMask(box.label, mask, box.score))
    return masks


def mask_overlaps(found: Sequence[FoundMask], truths: Sequence[Box]) -> np.ndarray:
    """IoU (found, truths) in pixels; with a crowd, the share of the found mask that lies in it."""
    result = np.zeros((len(found), len(truths)))
    if not found:
        return result
    for column, truth in enumerate(truths):
        true = mask_of(truth.segmentation, *found[0].mask.shape)
        for row, said in enumerate(found):
            common = np.count_nonzero(true & said.mask)
            union = np.count_nonzero(true | said.mask)
            whole = said.area if truth.is_crowd else union
            result[row, column] = common / max(1, whole)
    return result


def answer_overlap(found: Sequence[FoundMask], truth: Detection) -> float:
    """The IoU of all masks of an answer together with all true ones together, in pixels. Crowds
    belong to neither."""
    size = truth.height, truth.width
    said = np.zeros(size, bool)
    for mask in found:
        said |= mask.mask
    true = np.zeros(size, bool)
    for box in truth.boxes:
        if not box.is_crowd:
            true |= mask_of(box.segmentation, *size)
    return np.count_nonzero(said & true) / max(1, np.count_nonzero(said | true))
