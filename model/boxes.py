"""Boxes and codes of masks in an answer.

In: the answer of a PaliGemma as text. Out: labels, boxes in pixels, and the codes of their masks;
with the log-probabilities of its tokens, the score of each box.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

_PART = re.compile(r"([^<>]*)((?:<loc\d{4}>){4})\s*((?:<seg\d{3}>)*)([^<>]*)")
_NUMBER = re.compile(r"\d+")


class Said(NamedTuple):
    """An object of an answer. codes: the 16 of its mask, or none. part: the number of its part of
    the answer, between semicolons."""

    label: str
    box: tuple[float, float, float, float]
    codes: tuple[int, ...]
    part: int = 0


def parse_objects(text: str, width: int, height: int, as_said=False) -> list[Said]:
    """The objects of an answer about a picture of width × height pixels; boxes are (x1, y1, x2, y2)
    in its pixels.

    The answer reads `<locY1><locX1><locY2><locX2> label ; …`, with 16 of <seg000> … <seg127> before
    a label that has a mask. Place p of 0 … 1023 is p/1023 of the side (big_vision, PaliGemma's
    detection format). Parts of the text that are not a box are ignored, and so are words before a
    box, and codes of another number or beyond 127. Corners that have changed places are put back
    for a drawing, and left `as_said` for a score.
    """
    found = []
    for number, part in enumerate(text.split(";")):
        match = _PART.fullmatch(part)
        if match is None:
            continue
        before, locations, masks, behind = match.groups()
        label = behind.strip()
        if before.strip() and not label:
            continue  # a name before its box
        places = [int(digits) for digits in _NUMBER.findall(locations)]
        if max(places) > 1023:
            continue
        y1, x1, y2, x2 = (place / 1023 for place in places)
        if not as_said:
            (x1, x2), (y1, y2) = sorted((x1, x2)), sorted((y1, y2))
        codes = tuple(int(digits) for digits in _NUMBER.findall(masks))
        if len(codes) != 16 or max(codes) > 127:
            codes = ()
        box = (x1 * width, y1 * height, x2 * width, y2 * height)
        found.append(Said(label, box, codes, number))
    return found


def location_scores(pieces: Sequence[str], log_probs: Sequence[float]) -> list[float]:
    """The score of each part of an answer between semicolons: the product of the probabilities of
    its four locations; 0 for a part with another number of them.

    pieces (T,): the texts of the answer's tokens. log_probs (T,): of these, in nats.
    """
    parts = [[]]
    for piece, log_prob in zip(pieces, log_probs, strict=True):
        if re.fullmatch(r"<loc\d{4}>", piece):
            parts[-1].append(log_prob)
        for _ in range(piece.count(";")):
            parts.append([])
    return [math.exp(sum(part)) if len(part) == 4 else 0.0 for part in parts]
