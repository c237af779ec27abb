"""MMNeedle's haystacks: stitched pictures, and tests that are chosen from its files or drawn from a user's pictures.

In: tests (`eval/data.py`), or captioned pictures. Out: M stitched pictures for a test, and the tests to ask.
`eval/needle.py` asks them.
"""

import random
from collections.abc import Mapping, Sequence
from math import isqrt
from pathlib import Path

from PIL import Image

from eval.data import ABSENT, NeedleTest
from model.common import UserError

SUB_IMAGE = 256  # px along each side of a sub-image
FIRST_ABSENT_ID = 5000  # MMNeedle's ids from here on have no needle in the haystack


def stitch(pictures: Sequence[Path | Image.Image], size: int = SUB_IMAGE) -> Image.Image:
    """N² pictures, row-major, each resized to size×size px (aspect not kept), as one of N·size×N·size px.

    Raises UserError for an unreadable file."""
    from model.images import load_image  # imports torch, which scoring does not need

    side = isqrt(len(pictures))
    canvas = Image.new("RGB", (side * size, side * size))
    for at, picture in enumerate(pictures):
        canvas.paste(load_image(picture).resize((size, size)), (at % side * size, at // side * size))
    return canvas


def draw_tests(
    captions: Mapping[str, str],
    count: int,
    pictures: int = 1,
    side: int = 2,
    needles: int = 1,
    *,
    absent: bool = False,
    seed: int = 42,
) -> list[NeedleTest]:
    """`count` tests over any captioned pictures (name to caption), of M `pictures` of `side`×`side` and K `needles`.

    First needles take all places in turn. No picture occurs twice in a test; with `absent` the needles are not in it.
    Raises UserError if pictures are few.
    """
    names, draw, tests = sorted(captions), random.Random(seed), []
    cells, size = side**2, pictures * side**2
    if needles > size or len(names) < size + needles * absent:
        problem = (
            f"{len(names)} captioned pictures are too few for {pictures} of {side} by {side} and {needles} needle(s)"
        )
        raise UserError(f"{problem}: give more, or ask for less")
    for number in range(count):
        drawn = draw.sample(names, size + needles * absent)
        others = draw.sample([spot for spot in range(size) if spot != number % size], needles - 1)
        spots = range(size, size + needles) if absent else [number % size, *others]
        places = tuple(ABSENT if absent else (s // cells, s % cells // side, s % side) for s in spots)
        haystack = tuple(tuple(drawn[at : at + cells]) for at in range(0, size, cells))
        targets = tuple(drawn[spot] for spot in spots)
        of_targets = tuple(captions[name] for name in targets)
        tests.append(NeedleTest(number + FIRST_ABSENT_ID * absent, haystack, places, targets, of_targets))
    return tests


def choose(tests: Sequence[NeedleTest], count: int, seed: int) -> list[NeedleTest]:
    """`count` tests drawn at random, in the order of their ids; if each has one needle that is there, the same number
    for every place of the grid. Raises UserError if there are too few."""
    draw, places = random.Random(seed), {}
    for test in tests:
        places.setdefault(test.places, []).append(test)
    is_balanced = all(len(place) == 1 for place in places) and (ABSENT,) not in places and count >= len(places) > 0
    pools = [places[place] for place in sorted(places)] if is_balanced else [tests]
    each, chosen = count // len(pools), []
    for pool in pools:
        if len(pool) < each:
            where = f"have their needle at {pool[0].places[0]}" if is_balanced else "are of this kind"
            raise UserError(f"{each} tests are asked for, but {len(pool)} {where}: lower --limit")
        chosen += draw.sample(pool, each)
    return sorted(chosen, key=lambda test: test.id)
