"""MMNeedle's haystacks: stitched pictures, and tests that are chosen from its files or drawn from a user's pictures.

In: tests (`eval/data.py`), or captioned pictures. Out: M stitched pictures for a test, and the tests to ask.
`eval/needle.py` asks them.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from PIL import Image

from eval.data import ABSENT, NeedleTest
from model.common import UserError

SUB_IMAGE = 256  # px along each side of a sub-image
FIRST_ABSENT_ID = 5000  # MMNeedle's ids from here on have no needle in the haystack


def stitch(images: Sequence[Image.Image], size: int = SUB_IMAGE) -> Image.Image:
    """N² pictures, row-major, each resized to size×size px (aspect not kept), as one of N·size×N·size px."""
    side = round(len(images) ** 0.5)
    assert side * side == len(images), f"{len(images)} pictures do not fill a square"
    canvas = Image.new("RGB", (side * size, side * size))
    for at, image in enumerate(images):
        row, col = divmod(at, side)
        canvas.paste(image.convert("RGB").resize((size, size)), (col * size, row * size))
    return canvas


def stitch_files(paths: Sequence[Path], size: int = SUB_IMAGE) -> Image.Image:
    """The stitched picture of N² files. Raises UserError if one is unreadable."""
    from model.images import load_image  # imports torch, which scoring does not need

    return stitch([load_image(path) for path in paths], size)


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
    size = pictures * side**2
    if needles > size or len(names) < size + needles * absent:
        raise UserError(
            f"{len(names)} captioned pictures are too few for {pictures} picture(s) of {side} by {side} with {needles} "
            f"needle(s) {'beside' if absent else 'among'} them: give more, or ask for less"
        )
    for number in range(count):
        names_drawn = draw.sample(names, size + needles * absent)
        first = number % size
        others = draw.sample([spot for spot in range(size) if spot != first], needles - 1)
        spots = list(range(size, size + needles)) if absent else [first, *others]
        targets = tuple(names_drawn[spot] for spot in spots)
        tests.append(
            NeedleTest(
                id=number + FIRST_ABSENT_ID * absent,
                haystack=tuple(tuple(names_drawn[at : at + side**2]) for at in range(0, size, side**2)),
                places=tuple(ABSENT if absent else (s // side**2, s % side**2 // side, s % side) for s in spots),
                targets=targets,
                captions=tuple(captions[name] for name in targets),
            )
        )
    return tests


def choose(tests: Sequence[NeedleTest], count: int, seed: int) -> list[NeedleTest]:
    """`count` tests drawn at random, in the order of their ids; if each has one needle that is there, the same number
    for every place of the grid. Raises UserError if there are too few."""
    draw, places = random.Random(seed), {}
    for test in tests:
        places.setdefault(test.places, []).append(test)
    balanced = all(len(place) == 1 for place in places) and (ABSENT,) not in places and count >= len(places) > 0
    each, chosen = count // len(places) if balanced else count, []
    for place, found in sorted(places.items()) if balanced else [("all", tests)]:
        if len(found) < each:
            where = f"have their needle at {place[0]}" if balanced else "are of this kind"
            raise UserError(f"{each} tests are asked for, but {len(found)} {where}: lower --limit")
        chosen += draw.sample(found, each)
    return sorted(chosen, key=lambda test: test.id)
