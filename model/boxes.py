"""Boxes of a detection answer.

In: the answer of a PaliGemma as text. Out: labels and boxes in pixels.
"""

import re

_BOX = re.compile(r"\s*<loc(\d{4})><loc(\d{4})><loc(\d{4})><loc(\d{4})>(?:<seg\d{3}>)*([^<>]*)")


def parse_boxes(
    text: str, width: int, height: int, as_said=False
) -> list[tuple[str, tuple[float, ...]]]:
    """Labels and boxes (x1, y1, x2, y2), in pixels of a width × height picture, of a detection
    answer.

    The answer reads `<locY1><locX1><locY2><locX2> label ; …`; place p of 0 … 1023 is p/1023 of the
    side (big_vision, PaliGemma's detection format). Parts of the text that are not a box are
    ignored. Corners that have changed places are put back for a drawing, and left `as_said` for a
    score.
    """
    boxes = []
    for match in map(_BOX.fullmatch, text.split(";")):
        if match and max(match.groups()[:4]) <= "1023":
            y1, x1, y2, x2 = (int(place) / 1023 for place in match.groups()[:4])
            if not as_said:
                (x1, x2), (y1, y2) = sorted((x1, x2)), sorted((y1, y2))
            boxes.append((match[5].strip(), (x1 * width, y1 * height, x2 * width, y2 * height)))
    return boxes
