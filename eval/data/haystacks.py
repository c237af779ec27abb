"""Needles in a haystack of embedded sub-images: MMNeedle with one stitched picture of n×n.

In: a kind of haystack, a split and an index. Out: a `Haystack`: the picture, the captions of the
sub-images to be found, and the questions about their places.
"""

from collections import defaultdict
from functools import lru_cache, partial
from itertools import combinations
from typing import NamedTuple

from eval.data.pictures import GRID, NAMES, NONE, Dice, Sample, Scene, compose, count, paint
from eval.data.wording import describe

NEEDLES = {  # see `layout_of`
    "n2o1": (2, 1, 3),
    "n2o2": (2, 2, 3),
    "n4o1": (4, 1, 15),
}
NEEDLE_TITLES = {
    "n2o1": "2×2, one object each",
    "n2o2": "2×2, two objects each",
    "n4o1": "4×4, one object each",
}


class Haystack(NamedTuple):
    """One stitched picture of n×n sub-images. `targets` are the rows and columns of the captions'
    sub-images, from 0; (-1, -1) is not there. `samples` are the `place_questions` of each. Chance
    of one is 1/n²."""

    scene: Scene
    n: int
    captions: tuple[str, ...]
    targets: tuple[tuple[int, int], ...]
    samples: tuple[Sample, ...]


def place_questions(caption: str, side: int) -> list[tuple[str, tuple[str, ...]]]:
    """(prompt, words to choose from) of the paper's protocol: two for a 2×2 grid, whose words are
    those of its rows and of its columns; for a larger one a single question with answers like "row
    2 column 3", counted from 1, row-major."""
    head = f"Caption: {caption}. Where is the caption? "
    if side == 2:
        vertical = f"{head}Top or Bottom?", ("top", "bottom")
        horizontal = f"{head}Left or Right?", ("left", "right")
        return [vertical, horizontal]
    numbers = range(1, side + 1)
    places = tuple(f"row {row} column {col}" for row in numbers for col in numbers)
    return [(f"{head}Row and Column?", places)]


@lru_cache(64)
def haystack(
    kind: str,
    split: str,
    index: int,
    seed: int = 0,
    *,
    needles: int = 1,
    negative: bool = False,
) -> Haystack:
    """Haystack `index`. First needles take turns: N² consecutive indices have them in each place
    once. negative: no caption is there; of two objects both are, in different sub-images. The
    answer is "none" then."""
    n, objects, distractors = layout_of(kind)
    first = index % n**2
    # 1. the picture
    draw = partial(
        _stitched,
        n=n,
        objects=objects,
        first=first,
        filled=distractors + 1,
    )
    half = "/negative" if negative else ""
    dice, squares = compose(f"{kind}/{needles}{half}", split, seed, index, draw=draw)
    inside = defaultdict(list)  # the objects of each sub-image
    part = GRID // n
    for square, name in enumerate(squares):
        if name != NONE:
            row, col = divmod(square, GRID)
            inside[row // part, col // part].append(name)
    # 2. what is looked for in it
    if not negative:
        others = dice.draw(_others(n, first), needles - 1)
        targets = [divmod(place, n) for place in (first, *others)]
        wanted = [inside[target] for target in targets]
    else:
        targets = [(-1, -1)] * needles
        absent = [(name,) for name in NAMES if name not in squares]
        if objects == 2:  # both are there, but apart
            together = list(map(set, inside.values()))
            pairs = combinations(count(squares), 2)
            absent = [pair for pair in pairs if set(pair) not in together]
        wanted = dice.draw(absent, needles)
    # 3. the questions
    scene = paint(dice, squares)
    captions = tuple(map(describe, wanted))
    samples = []
    for caption, (row, col) in zip(captions, targets, strict=True):
        rights = (row, col) if n == 2 else [row * n + col]
        for (prefix, words), right in zip(place_questions(caption, n), rights, strict=True):
            question_type = prefix.rpartition("? ")[2].removesuffix("?")
            suffix = NONE if negative else words[right]
            ids = index, index * 1000 + len(samples)
            samples.append(Sample(kind, scene, prefix, suffix, *ids, question_type))
    return Haystack(scene, n, captions, tuple(targets), tuple(samples))


def layout_of(kind: str) -> tuple[int, int, int]:
    """Sub-images along a side, objects in each, and how many sub-images beside the needle's have
    any: of n4d7 4×4, one object in the needle's and in 7 others. 3×3 fill the picture's upper
    left."""
    if kind in NEEDLES:
        return NEEDLES[kind]
    n, distractors = map(int, kind[1:].split("d"))
    return n, 1, distractors


def _others(n: int, first: int) -> list[int]:
    """The places of n×n sub-images beside the first needle's."""
    return [place for place in range(n**2) if place != first]


def _stitched(
    dice: Dice,
    n: int,
    objects: int,
    first: int,
    filled: int,
) -> list[tuple[int, str]]:
    """N×N sub-images, so many of them `filled`, of `objects` each. Of two, every sub-image shares
    one with that at `first`, and each of its two is shared by some other: no single object decides
    the place."""
    a, b, *names = dice.draw(NAMES, len(NAMES))
    elsewhere = _others(n, first)
    shared = [a, b, *(dice.pick((a, b)) for _ in elsewhere[2:])]
    groups = [[name] for name in names]
    if objects == 2:
        shared = dice.draw(shared, len(elsewhere))
        groups = [[a, b], *zip(shared, names, strict=False)]
    places = [first, *dice.draw(elsewhere, len(elsewhere))]
    part = GRID // n
    placed = []
    for place, group in zip(places[:filled], groups, strict=False):
        top = place // n * part
        left = place % n * part
        spots = dice.draw(range(part**2), objects)
        for spot, name in zip(spots, group, strict=True):
            row, col = divmod(spot, part)
            placed.append(((top + row) * GRID + left + col, name))
    return placed
