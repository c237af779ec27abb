"""Pictures of the embedded benchmark: which object is where, and how it is drawn.

In: seeded dice. Out: a composition (the name of the object in each of 16 squares) and a `Scene`,
which renders it. `eval/data/scenes.py` asks questions about them.

A picture has 112×112 pixels in 4×4 squares of 28, one patch of the embedded base each; a square
holds one object or none. Everything follows from (task, split, seed, index). A composition belongs
to exactly one split, by its hash. The splits share the sprites: new in the test split are
composition, place, scale, mirroring, brightness and ground. The objects of an ordinary scene are
skewed on purpose, as in photographs: the first names of a category are the most frequent, and an
object often comes with its partner (dog and cat, tiger and horse, …) or with another of its kind.
"""

import hashlib
import random
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

CATEGORIES = {
    "animal": "dog cat tiger horse cow pig lion elephant frog penguin fish butterfly".split(),
    "food": (
        "apple banana strawberry watermelon grapes orange carrot bread cheese pizza burger cake"
    ).split(),
    "vehicle": "car bus train airplane bicycle rocket boat tractor".split(),
    "thing": "ball book key clock guitar umbrella gift hat".split(),
}
NAMES = [name for names in CATEGORIES.values() for name in names]
NONE = "none"  # an empty square
SPRITES = Path(__file__).parent / "sprites"
SIDE = 112  # pixels along a picture's side
GRID = 4  # squares along a side
SQUARE = 28  # pixels along a square's side
SPLITS = ("train", "validation", "test")

# Compositions


class Dice(random.Random):
    """Choices that are the same in every version of Python, which promises that only for the
    sequence of `random()`."""

    def below(self, n: int) -> int:
        return int(self.random() * n)

    def pick(self, items: Sequence):
        return items[self.below(len(items))]

    def draw(self, items: Iterable, k: int) -> list:
        """`k` of `items` in random order, none twice."""
        items = list(items)
        chance = self.random
        for i in range(k):
            j = i + int(chance() * (len(items) - i))  # `below` without a call
            items[i], items[j] = items[j], items[i]
        return items[:k]


def split_of(squares: Sequence[str]) -> str:
    """The one split a composition (16 names or "none", row-major) belongs to: 6/8 train, 1/8 each
    of the others."""
    bucket = hashlib.sha256(" ".join(squares).encode()).digest()[0] % 8
    return ("validation", "test")[bucket] if bucket < 2 else "train"


_SHARES = [1 / (rank + 4) for names in CATEGORIES.values() for rank in range(len(names))]
_POPULARITY = list(accumulate(_SHARES))


def ordinary(dice: Dice, most: int = 5) -> Iterable[tuple[int, str]]:
    """(square, name) of 1 to `most` objects: popular ones, a second one of a name (for questions
    that count), and partners of those already there (co-occurrence, which POPE's adversarial
    questions exploit)."""
    names = []
    for _ in range(1 + dice.below(most)):
        chance = dice.random()
        if names and chance < 0.25:
            names.append(dice.pick(names))
        elif names and chance < 0.5:
            # its neighbor in the list; categories have even lengths, so it is of the same one
            names.append(NAMES[NAMES.index(dice.pick(names)) ^ 1])
        else:
            names.append(NAMES[bisect(_POPULARITY, dice.random() * _POPULARITY[-1])])
    return zip(dice.draw(range(GRID**2), len(names)), names, strict=True)


def compose(
    task: str,
    split: str,
    seed: int,
    index: int,
    draw: Callable = ordinary,
    usable: Callable = lambda squares: True,
) -> tuple[Dice, tuple[str, ...]]:
    """The dice of one picture and the first composition they `draw`, as (square, name) of its
    objects, that is `usable` and belongs to `split`."""
    assert split in SPLITS
    dice = Dice(f"{task}/{split}/{seed}/{index}")
    while True:
        names = dict(draw(dice))
        squares = tuple(names.get(square, NONE) for square in range(GRID**2))
        if split_of(squares) == split and usable(squares):
            return dice, squares


def count(squares: Sequence[str]) -> Counter:
    """How often each object occurs, in raster order of its first one."""
    return Counter(name for name in squares if name != NONE)


# Drawing


class Placed(NamedTuple):
    """How an object is drawn."""

    square: int
    name: str
    size: int  # pixels along the sprite's side
    y: int  # its top left corner, pixels inside the square
    x: int
    mirrored: bool
    brightness: int  # in 1/128


class Scene(NamedTuple):
    """A picture before it is drawn. `ground`, RGB each: level in the middle, rise from there to the
    bottom and to the right border."""

    squares: tuple[str, ...]
    objects: tuple[Placed, ...]
    ground: tuple[tuple[int, ...], ...]

    def render(self) -> np.ndarray:
        """The picture (112, 112, 3) uint8, RGB. Integer arithmetic only: it is the same on every
        machine."""
        level, down, across = np.array(self.ground, np.int16)[..., None]
        rows = level + _RAMP * down // SIDE
        columns = _RAMP * across // SIDE
        # one plane per channel: NumPy is many times slower when its innermost axis is the three
        # channels
        canvas = (rows[:, :, None] + columns[:, None, :]).view(np.uint16)
        for square, name, size, y, x, mirrored, brightness in self.objects:
            color, transparency = _stamp(name, size, mirrored)
            row, col = divmod(square, GRID)
            top, left = row * SQUARE + y, col * SQUARE + x
            region = canvas[:, top : top + size, left : left + size]
            mixed = (region * transparency >> 8) + (color * np.uint16(brightness) >> 7)
            np.minimum(mixed, 255, out=region)
        return canvas.astype(np.uint8).transpose(1, 2, 0)


_RAMP = np.arange(1 - SIDE, SIDE, 2, dtype=np.int16)  # -111 … 111
_sprite = cache(lambda name: Image.open(SPRITES / f"{name}.webp").convert("RGBA"))


@cache
def _stamp(name: str, size: int, mirrored: bool) -> tuple[np.ndarray, np.ndarray]:
    """A sprite scaled to `size`: color times opacity (3, size, size), transparency 0–256 (size,
    size); uint16."""
    image = _sprite(name).resize((size, size), Image.Resampling.BICUBIC)
    pixels = np.asarray(image, np.uint16).transpose(2, 0, 1)  # (4, size, size)
    pixels = np.ascontiguousarray(pixels[:, :, ::-1] if mirrored else pixels)
    opacity = pixels[3]
    return pixels[:3] * opacity // 255, 256 - opacity - (opacity >> 7)


def paint(dice: Dice, squares: tuple[str, ...]) -> Scene:
    """Draw at random what a composition leaves open: scale 80–100 % of a square, place in it,
    mirroring, brightness 0.85–1.1, ground."""
    objects = []
    for square, name in enumerate(squares):
        if name != NONE:
            size = SQUARE - dice.below(7)
            spare = SQUARE - size + 1
            y, x = dice.below(spare), dice.below(spare)
            mirrored = dice.random() < 0.5
            brightness = 109 + dice.below(33)
            objects.append(Placed(square, name, size, y, x, mirrored, brightness))
    # 112–168 ± 14 for the tint ± 2·36 for both rises: within 0–255
    grey = 112 + dice.below(57)
    down, across = dice.below(61) - 30, dice.below(61) - 30
    levels = (grey, 14), (down, 6), (across, 6)
    ground = []
    for base, most in levels:
        ground.append(tuple(base + dice.below(2 * most + 1) - most for _ in "RGB"))
    return Scene(squares, tuple(objects), tuple(ground))


class Sample(NamedTuple):
    """One picture, one prompt, one answer. Samples of one picture share their `scene` and
    `image_id`."""

    task: str
    scene: Scene
    prefix: str  # the prompt
    suffix: str  # the answer
    image_id: int
    question_id: int
    question_type: str = ""  # the first words of the question, for VQA
    answer_type: str | None = None  # "yes/no", "number" or "other", for VQA

    @property
    def image(self) -> Image.Image:
        return Image.fromarray(self.scene.render())

    @property
    def question(self) -> str:
        """The prefix without PaliGemma's `answer en`."""
        return self.prefix.removeprefix("answer en ")
