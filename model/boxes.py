"""Boxes and codes of masks in an answer.

In: the answer of a PaliGemma as text. Out: labels, boxes in pixels, and the codes of their masks;
with the log-probabilities of its tokens, the score of each box.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

_PART = re.compile(r"\s*((?:<loc\d{4}>){4})((?:<seg\d{3}>)*)([^<>]*)")
_NUMBER = re.compile(r"\d+")


class Said(NamedTuple):
    """An object of an answer. codes: the 16 of its mask, or none."""

    label: str
    box: tuple[float, float, float, float]
    codes: tuple[int, ...]


def parse_objects(text: str, width: int, height: int, as_said=False) -> list[Said]:
    """The objects of an answer about a picture of width × height pixels; boxes are (x1, y1, x2, y2)
    in its pixels.

    The answer reads `<locY1><locX1><locY2><locX2> label ; …`, with 16 of <seg000> … <seg127> before
    a label that has a mask. Place p of 0 … 1023 is p/1023 of the side (big_vision, PaliGemma's
    detection format). Parts of the text that are not a box are ignored, and so are codes of another
    number or beyond 127. Corners that have changed places are put back for a drawing, and left
    `as_said` for a score.
    """
    found = []
    for match in map(_PART.fullmatch, text.split(";")):
        if match is None:
            continue
        places = [int(number) for number in _NUMBER.findall(match[1])]
        if max(places) > 1023:
            continue
        y1, x1, y2, x2 = (place / 1023 for place in places)
        if not as_said:
            (x1, x2), (y1, y2) = sorted((x1, x2)), sorted((y1, y2))
        codes = tuple(int(number) for number in _NUMBER.findall(match[2]))
        if len(codes) != 16 or max(codes) > 127:
            codes = ()
        box = (x1 * width, y1 * height, x2 * width, y2 * height)
        found.append(Said(match[3].strip(), box, codes))
    return found


def parse_boxes(
    text: str, width: int, height: int, as_said=False
) -> list[tuple[str, tuple[float, ...]]]:
    """Labels and boxes of `parse_objects`."""
    return [(said.label, said.box) for said in parse_objects(text, width, height, as_said)]


def location_scores(text: str, ends: Sequence[int], log_probs: Sequence[float]) -> list[float]:
    """The score of each part of an answer between semicolons: the product of the probabilities of
    the tokens that spell its four locations; 0 for a part that is no box.

    ends (T,): the characters of `text` up to the end of each token. log_probs (T,): in nats.
    """
    starts = [0, *ends]
    scores = []
    begin = 0  # of the part
    for part in text.split(";"):
        score = 0.0
        if match := _PART.fullmatch(part):
            first, last = begin + match.start(1), begin + match.end(1)
            spelled = 0.0
            for start, end, log_prob in zip(starts, ends, log_probs, strict=False):
                if start < last and end > first:
                    spelled += log_prob
            score = math.exp(spelled)
        scores.append(score)
        begin += len(part) + 1
    return scores
