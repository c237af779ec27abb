"""The embedded benchmark: small pictures composed from 40 emoji, and questions about them whose answers are known.

In: a task's name, a split and an index. Out: a `Sample` (picture, prefix, suffix) in PaliGemma's prompt language, a
`Needle` with its questions, POPE's questions, or a split in VQAv2's file format. Next: `eval/vqa.py`, `eval/needle.py`
and `eval/pope.py` score answers to them, `train/` learns from them.

A picture is 112×112 with 4×4 cells of 28 pixels, one patch of the embedded base each; a cell holds one object or none.
Everything follows from (task, split, seed, index) alone; there is no global random state. A *composition*, which
object is in which cell, belongs to exactly one split, by its hash (`split_of`), so that no composition of one
split is ever seen in another. The splits do share the sprites: what is new in the test split is composition, place,
scale, mirroring, brightness and ground, not the objects.

Which objects an ordinary scene holds is skewed on purpose, as in photographs: the first names of a category are the
most frequent, and an object brings its partner (dog and cat, tiger and horse, …) or another of its kind along.
"""

import hashlib
import random
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import accumulate, combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from model.common import UserError

CATEGORIES = {
    "animal": "dog cat tiger horse cow pig lion elephant frog penguin fish butterfly".split(),
    "food": "apple banana strawberry watermelon grapes orange carrot bread cheese pizza burger cake".split(),
    "vehicle": "car bus train airplane bicycle rocket boat tractor".split(),
    "thing": "ball book key clock guitar umbrella gift hat".split(),
}
NAMES = [name for names in CATEGORIES.values() for name in names]
NONE = "none"  # an empty cell; also the right answer about a needle that is not there
SPRITES = Path(__file__).parent / "sprites"

SIDE, GRID, CELL = 112, 4, 28  # pixels of a picture, cells along a side, pixels of a cell
HALVES = ("top or bottom", "left or right")
PLACES = ("top left", "top right", "bottom left", "bottom right")  # quadrants, row-major
NUMBERS = ("two", "three", "four", "five")
SPLITS = ("train", "validation", "test")


# --- chance -----------------------------------------------------------------------------------------------------------


class Dice(random.Random):
    """Choices that are the same in every version of Python, which promises that only for the sequence of `random()`."""

    def below(self, n: int) -> int:
        return int(self.random() * n)

    def pick(self, items: Sequence):
        return items[self.below(len(items))]

    def draw(self, items: Iterable, k: int) -> list:
        """`k` of `items` in random order, none twice."""
        items = list(items)
        for i in range(k):
            j = i + self.below(len(items) - i)
            items[i], items[j] = items[j], items[i]
        return items[:k]


def split_of(cells: Sequence[str]) -> str:
    """The one split a composition (16 names or "none", row-major) belongs to: 6/8 train, 1/8 each of the others."""
    bucket = hashlib.sha256(" ".join(cells).encode()).digest()[0] % 8
    return ("validation", "test")[bucket] if bucket < 2 else "train"


# --- compositions -----------------------------------------------------------------------------------------------------

_POPULARITY = list(accumulate(1 / (rank + 4) for names in CATEGORIES.values() for rank in range(len(names))))


def _popular(dice: Dice) -> str:
    return NAMES[bisect(_POPULARITY, dice.random() * _POPULARITY[-1])]


def _partner(name: str) -> str:
    """Its neighbour in the list. Categories have even lengths, so that partners are of one category."""
    return NAMES[NAMES.index(name) ^ 1]


def _ordinary(dice: Dice, most: int = 5) -> tuple[str, ...]:
    """1 to `most` objects in random cells: popular ones, second ones of a kind (there is something to count), partners
    of those there already (co-occurrence, which POPE's adversarial questions exploit)."""
    names = []
    for _ in range(1 + dice.below(most)):
        chance = dice.random()
        if names and chance < 0.25:
            names.append(dice.pick(names))
        elif names and chance < 0.5:
            names.append(_partner(dice.pick(names)))
        else:
            names.append(_popular(dice))
    return _place(zip(dice.draw(range(GRID**2), len(names)), names, strict=True))


def _place(objects: Iterable[tuple[int, str]]) -> tuple[str, ...]:
    cells = [NONE] * GRID**2
    for cell, name in objects:
        cells[cell] = name
    return tuple(cells)


def _compose(
    task: str, split: str, seed: int, index: int, draw: Callable = _ordinary, usable: Callable = lambda cells: True
) -> tuple[Dice, tuple[str, ...]]:
    """The dice of one picture and the first composition they draw that is usable and belongs to `split`."""
    if split not in SPLITS:
        raise UserError(f"split is {split!r}: expected one of {', '.join(SPLITS)}")
    dice = Dice(f"{task}/{split}/{seed}/{index}")
    while True:
        cells = draw(dice)
        if split_of(cells) == split and usable(cells):
            return dice, cells


def _quadrant(cell: int) -> str:
    return PLACES[cell // (2 * GRID) * 2 + cell % GRID // 2]


def _unique(cells: Sequence[str]) -> list[str]:
    """Names that are there once, in raster order."""
    return [name for name, count in _count(cells).items() if count == 1]


def _count(cells: Sequence[str]) -> Counter:
    return Counter(name for name in cells if name != NONE)


# --- pictures ---------------------------------------------------------------------------------------------------------


class Placed(NamedTuple):
    """How an object is drawn: sprite side, top left corner inside its cell (pixels), brightness in 1/128."""

    cell: int
    name: str
    size: int
    y: int
    x: int
    mirrored: bool
    brightness: int


@dataclass(frozen=True)
class Scene:
    """A picture before it is drawn. `ground`, RGB each: level in the middle, rise from there to the bottom and to the
    right border."""

    cells: tuple[str, ...]
    objects: tuple[Placed, ...]
    ground: tuple[tuple[int, int, int], ...]

    def render(self) -> np.ndarray:
        """Draw it: (112, 112, 3) uint8, RGB. Integers throughout: no rounding differs from machine to machine."""
        level, down, across = np.array(self.ground, np.int32)[..., None]
        ramp = np.arange(1 - SIDE, SIDE, 2, dtype=np.int32)  # -111 … 111
        rows, columns = level + ramp * down // SIDE, ramp * across // SIDE
        # one plane a channel: NumPy is many times slower when its innermost axis is the three channels
        canvas = (rows.astype(np.int16)[:, :, None] + columns.astype(np.int16)[:, None, :]).view(np.uint16)
        for cell, name, size, y, x, mirrored, brightness in self.objects:
            color, transparency = _stamp(name, size, mirrored)
            top, left = cell // GRID * CELL + y, cell % GRID * CELL + x
            region = canvas[:, top : top + size, left : left + size]
            region *= transparency
            region >>= 8
            region += color * np.uint16(brightness) >> 7
            np.minimum(region, 255, out=region)
        return np.stack(list(canvas.astype(np.uint8)), axis=-1)


@cache
def _stamp(name: str, size: int, mirrored: bool) -> tuple[np.ndarray, np.ndarray]:
    """A sprite scaled to `size`: color times opacity (3, size, size), transparency 0–256 (size, size); uint16."""
    image = Image.open(SPRITES / f"{name}.webp").convert("RGBA").resize((size, size), Image.Resampling.BICUBIC)
    pixels = np.ascontiguousarray(np.asarray(image, np.uint16).transpose(2, 0, 1)[:, :, :: -1 if mirrored else 1])
    opacity = pixels[3]
    return pixels[:3] * opacity // 255, 256 - opacity - (opacity >> 7)


def _paint(dice: Dice, cells: tuple[str, ...]) -> Scene:
    """Draw lots for everything that a composition leaves open: scale 80–100 % of a cell, place in it, mirroring,
    brightness 0.85–1.1, ground."""
    objects = []
    for cell, name in enumerate(cells):
        if name != NONE:
            size = CELL - dice.below(7)
            spare = CELL - size + 1
            looks = dice.below(spare), dice.below(spare), dice.random() < 0.5, 109 + dice.below(33)
            objects.append(Placed(cell, name, size, *looks))
    # 112–168 ± 14 for the tint ± 2·36 for both rises: within 0–255
    grey, down, across = 112 + dice.below(57), dice.below(61) - 30, dice.below(61) - 30
    tint = [
        tuple(base + dice.below(2 * most + 1) - most for _ in "RGB")
        for base, most in ((grey, 14), (down, 6), (across, 6))
    ]
    return Scene(cells, tuple(objects), tuple(tint))


# --- samples ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One picture, one prompt, one answer. Samples of one picture share their `scene` and `image_id`.

    `unsupervised`: character spans [start, end) of the suffix that carry no loss, since nobody could know them.
    """

    task: str
    scene: Scene
    prefix: str
    suffix: str
    image_id: int
    question_id: int
    question_type: str = ""
    answer_type: str | None = None  # "yes/no", "number" or "other", for VQA
    unsupervised: tuple[tuple[int, int], ...] = ()

    @property
    def image(self) -> Image.Image:
        return Image.fromarray(self.scene.render())

    @property
    def question(self) -> str:
        """The prefix without PaliGemma's `answer en`."""
        return self.prefix.removeprefix("answer en ")


def sample(task: str, split: str, index: int, seed: int = 0) -> Sample:
    """Sample number `index` of a task's endless stream. Raises UserError for an unknown task or split."""
    if task not in TASKS:
        raise UserError(f"task is {task!r}: expected one of {', '.join(TASKS)}")
    return TASKS[task](split, index, seed)


def box(cell: int) -> str:
    """The box of a *cell* in PaliGemma's language: y1 x1 y2 x2 in 1/1024 of the picture's side.

    The cell's and not the object's, which jitters inside it: so a right answer is one exact string, and each of the
    four numbers takes four values. Cell 6 (row 1, column 2) is <loc0256><loc0512><loc0511><loc0767>.
    """
    step = 1024 // GRID
    y, x = cell // GRID * step, cell % GRID * step
    return "".join(f"<loc{value:04d}>" for value in (y, x, y + step - 1, x + step - 1))


def plural(name: str) -> str:
    irregular = {
        "fish": "fish",
        "butterfly": "butterflies",
        "strawberry": "strawberries",
        "grapes": "grapes",
        "bus": "buses",
    }
    return irregular.get(name, name + "s")


def with_article(name: str) -> str:
    """By the first letter alone, as POPE does it."""
    return f"{'an' if name.startswith(tuple('aeiou')) else 'a'} {name}"


def describe(cells: Sequence[str]) -> str:
    """A caption: what there is, in raster order ("two dogs, a cat and an apple")."""
    parts = [with_article(name) if n == 1 else f"{NUMBERS[n - 2]} {plural(name)}" for name, n in _count(cells).items()]
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


# --- pretraining: dense answers, which teach where things are ---------------------------------------------------------


def scan(split: str, index: int, seed: int = 0) -> Sample:
    """The names of all 16 cells, row-major. Up to 16 objects, for most cells of an ordinary scene are empty."""
    dice, cells = _compose("scan", split, seed, index, partial(_ordinary, most=GRID**2))
    return Sample("scan", _paint(dice, cells), "scan", " ".join(cells), index, index)


def detect_all(split: str, index: int, seed: int = 0) -> Sample:
    """All objects with the top left corners of their boxes, "dog<locY1><locX1> cat<locY1><locX1>", in random order,
    those of one name in raster order.

    Here the name comes first and carries no loss: given the name, the place can be known; which name is next cannot,
    and learning to guess it drowns the rest. Half a box keeps the answer, and so pretraining, short; `detect` is
    PaliGemma's own format, whole boxes before names.
    """
    dice, cells = _compose("detect_all", split, seed, index)
    places, names = defaultdict(list), [name for name in cells if name != NONE]
    for cell, name in enumerate(cells):
        places[name].append(cell)
    suffix, spans = "", []
    for name in dice.draw(names, len(names)):
        start = len(suffix)  # with the space before the word: one piece holds both
        suffix += f"{' ' * bool(suffix)}{name}"
        spans.append((start, len(suffix)))
        suffix += box(places[name].pop(0))[: len("<loc0000>") * 2]
    return Sample("detect_all", _paint(dice, cells), "detect", suffix, index, index, unsupervised=tuple(spans))


def detect(split: str, index: int, seed: int = 0) -> Sample:
    """PaliGemma's detection: `detect dog` → "<loc…> dog ; <loc…> dog", boxes in raster order."""
    dice, cells = _compose("detect", split, seed, index)
    name = dice.pick(list(_count(cells)))
    suffix = " ; ".join(f"{box(cell)} {name}" for cell, other in enumerate(cells) if other == name)
    return Sample("detect", _paint(dice, cells), f"detect {name}", suffix, index, index)


def caption(split: str, index: int, seed: int = 0) -> Sample:
    """`caption en` → "two dogs and a cat"."""
    dice, cells = _compose("caption", split, seed, index)
    return Sample("caption", _paint(dice, cells), "caption en", describe(cells), index, index)


def probe(task: str, split: str, index: int, seed: int = 0) -> Sample:
    """`locate dog` → "top left", `count dog` → "2", `exist dog` → "no": VQA's facts in two words. And where a thing is
    in other words, `left or right dog` → "left", `row and column dog` → "row 2 column 3": only what was once an answer
    is easily one again, and the questions of the needles are kept for fine-tuning."""
    kind, wording = PROBES[task]
    dice, cells = _compose(task, split, seed, index, usable=lambda cells: any(facts(cells, kind)))
    answer, thing, _ = _balanced(dice, facts(cells, kind))
    return Sample(task, _paint(dice, cells), f"{wording} {thing}", answer, index, index)


# task: (what is asked, the prompt before the thing)
PROBES = {
    "locate": ("where", "locate"),
    "count": ("count", "count"),
    "exist": ("object", "exist"),
    "vertical": ("top or bottom", "top or bottom"),
    "horizontal": ("left or right", "left or right"),
    "cell": ("row and column", "row and column"),
}


# --- visual question answering ----------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of question: VQAv2's answer type and question type, and the wording."""

    answer_type: str
    question_type: str
    wording: str


KINDS = {
    "object": Kind("yes/no", "is there a", "Is there {a_thing} in the image?"),
    "category": Kind("yes/no", "is any", "Is any {thing} in the image?"),
    "position": Kind("yes/no", "is the", "Is the {thing} in the {place}?"),
    "count": Kind("number", "how many", "How many {things} are there?"),
    "count category": Kind("number", "how many", "How many {things} are there?"),
    "total": Kind("number", "how many", "How many objects are there?"),
    "where": Kind("other", "where is the", "Where is the {thing}?"),
    "what": Kind("other", "what is in the", "What is in the {place}?"),
    "which": Kind("other", "which", "Which {thing} is in the image?"),
}
ASKED_CATEGORIES = ("animal", "food", "vehicle")  # "thing" as a category would not be understood
# Answer types of a picture's questions, near VQAv2's shares (38 % yes/no, 12 % number, 50 % other; 5.4 a picture)
QUESTIONS = ("yes/no", "yes/no", "number", "other", "other", "other")


def facts(cells: Sequence[str], kind: str) -> Iterator[tuple[str, str, str]]:
    """All that can be asked of one kind: (answer, thing, place). Never ambiguous: "where" needs an object that is
    there once, "what" a quadrant with one object, "which" a category with one kind of object."""
    there = _count(cells)
    if kind == "object":
        yield from (("yes" if name in there else "no", name, "") for name in NAMES)
    elif kind == "count":
        yield from ((str(there[name]), name, "") for name in NAMES)
    elif kind == "total":
        yield str(sum(there.values())), "", ""
    elif kind in ("where", "position", *HALVES, "row and column"):
        for name in _unique(cells):
            cell = cells.index(name)
            place, (row, column) = _quadrant(cell), divmod(cell, GRID)
            if kind == "position":
                yield from (("yes" if other == place else "no", name, other) for other in PLACES)
            elif kind == "row and column":
                yield f"row {row + 1} column {column + 1}", name, ""
            else:
                yield place if kind == "where" else place.split()[HALVES.index(kind)], name, ""
    elif kind == "what":
        for place in PLACES:
            names = [name for cell, name in enumerate(cells) if name != NONE and _quadrant(cell) == place]
            if len(names) == 1:
                yield names[0], "", place
    else:
        for category in ASKED_CATEGORIES:
            counts = [there[name] for name in CATEGORIES[category] if name in there]
            if kind == "category":
                yield "yes" if counts else "no", category, ""
            elif kind == "count category":
                yield str(sum(counts)), category, ""
            elif len(counts) == 1:
                yield next(name for name in there if name in CATEGORIES[category]), category, ""


def _balanced(dice: Dice, candidates: Iterable[tuple[str, str, str]]) -> tuple[str, str, str]:
    """First an answer, then one of the questions that have it: there are many more absent objects than present."""
    by_answer = defaultdict(list)
    for fact in candidates:
        by_answer[fact[0]].append(fact)
    return dice.pick(by_answer[dice.pick(list(by_answer))])


@lru_cache(maxsize=64)
def vqa_picture(split: str, image_id: int, seed: int = 0) -> tuple[Sample, ...]:
    """The questions on one picture, none twice, prompt `answer en QUESTION`; answer types as in `QUESTIONS`."""
    kinds = {answer_type: [] for answer_type in QUESTIONS}
    for kind, (answer_type, *_) in KINDS.items():
        kinds[answer_type].append(kind)

    def usable(cells: Sequence[str]) -> bool:
        return sum(1 for kind in kinds["other"] for _ in facts(cells, kind)) >= QUESTIONS.count("other")

    dice, cells = _compose("vqa", split, seed, image_id, usable=usable)
    scene, asked = _paint(dice, cells), {}
    for answer_type in QUESTIONS:
        for kind in dice.draw(kinds[answer_type], len(kinds[answer_type])):
            left = [fact for fact in facts(cells, kind) if _ask(kind, *fact[1:]) not in asked]
            if left:
                answer, thing, place = _balanced(dice, left)
                asked[_ask(kind, thing, place)] = kind, answer
                break
    return tuple(
        Sample(
            "vqa",
            scene,
            f"answer en {question}",
            answer,
            image_id,
            image_id * 1000 + number,
            KINDS[kind].question_type,
            KINDS[kind].answer_type,
        )
        for number, (question, (kind, answer)) in enumerate(asked.items())
    )


def _ask(kind: str, thing: str, place: str = "") -> str:
    return KINDS[kind].wording.format(thing=thing, a_thing=with_article(thing), things=plural(thing), place=place)


def vqa(split: str, index: int, seed: int = 0) -> Sample:
    """Question `index`; each run of `len(QUESTIONS)` indices is about one picture."""
    return vqa_picture(split, index // len(QUESTIONS), seed)[index % len(QUESTIONS)]


def vqav2_files(split: str = "test", images: int = 200, seed: int = 0) -> tuple[dict, dict]:
    """The split as VQAv2's two files (questions, annotations); ten identical answers, `answer_id` 1 to 10."""
    samples = [s for image_id in range(images) for s in vqa_picture(split, image_id, seed)]
    head = {
        "info": {"description": "The embedded scenes in VQAv2's format."},
        "task_type": "Open-Ended",
        "data_type": "embedded",
        "data_subtype": split,
        "license": {"name": "Apache License 2.0"},
    }
    questions = [{"image_id": s.image_id, "question": s.question, "question_id": s.question_id} for s in samples]
    annotations = [
        {
            "question_id": s.question_id,
            "image_id": s.image_id,
            "question_type": s.question_type,
            "answer_type": s.answer_type,
            "multiple_choice_answer": s.suffix,
            "answers": [{"answer": s.suffix, "answer_confidence": "yes", "answer_id": i} for i in range(1, 11)],
        }
        for s in samples
    ]
    return head | {"questions": questions}, head | {"annotations": annotations}


def blind(train: Iterable[Sample], test: Iterable[Sample]) -> dict[str, float]:
    """Accuracy in percent, overall and by answer type, of the best guess without a picture: the most frequent answer
    that `train` has to the same prefix, or to the same question type if the prefix is new."""
    answers = defaultdict(Counter)
    for s in train:
        for key in (s.prefix, (s.question_type,), ()):
            answers[key][s.suffix] += 1
    hits = defaultdict(list)
    for s in test:
        key = next(key for key in (s.prefix, (s.question_type,), ()) if key in answers)
        guess = min(answers[key].items(), key=lambda item: (-item[1], item[0]))[0]
        for group in ("overall", s.answer_type or s.task):
            hits[group].append(guess == s.suffix)
    return {group: 100 * sum(right) / len(right) for group, right in hits.items()}


# --- needles in a haystack of sub-images ------------------------------------------------------------------------------

NEEDLES = {"n2o1": (2, 1), "n2o2": (2, 2), "n4o1": (4, 1)}  # sub-images along a side, objects in each


@dataclass(frozen=True)
class Needle:
    """One stitched picture of N×N sub-images (MMNeedle with M = 1) and the captions to find in it.

    `targets`: row and column of each caption's sub-image, from 0 as in MMNeedle's metadata; (-1, -1) for one that is
    not there. Each needle is one of N² places, so chance is 1/N².
    """

    kind: str
    scene: Scene
    n: int
    captions: tuple[str, ...]
    targets: tuple[tuple[int, int], ...]
    id: int

    def samples(self) -> list[Sample]:
        """The questions of the paper's protocol. For 2×2 two of each caption, Top or Bottom and Left or Right; for 4×4
        one, with the answer "row 2 column 3", counted from 1. About a needle that is not there: "none"."""
        samples = []
        for caption, (row, column) in zip(self.captions, self.targets, strict=True):
            if self.n == 2:
                asked = (("Top or Bottom", ("top", "bottom")[row]), ("Left or Right", ("left", "right")[column]))
            else:
                asked = (("Row and Column", f"row {row + 1} column {column + 1}"),)
            for choice, answer in asked:
                prefix = f"Caption: {caption}. Where is the caption? {choice}?"
                samples.append(
                    Sample(
                        self.kind,
                        self.scene,
                        prefix,
                        NONE if row < 0 else answer,
                        self.id,
                        self.id * 1000 + len(samples),
                        choice,
                    )
                )
        return samples


def needle(kind: str, split: str, index: int, seed: int = 0, *, needles: int = 1, negative: bool = False) -> Needle:
    """Needle test `index`. Targets take turns: N² consecutive indices have their first needle in each place once.

    `negative`: nothing that a caption says is there; of two objects, both are, but in different sub-images.
    Raises UserError for an unknown kind or more needles than places.
    """
    if kind not in NEEDLES:
        raise UserError(f"needle kind is {kind!r}: expected one of {', '.join(NEEDLES)}")
    n, objects = NEEDLES[kind]
    if not 1 <= needles <= n**2:
        raise UserError(f"{needles} needles in {n}×{n} sub-images: expected 1 to {n**2}")
    first = index % n**2
    stream = f"{kind}/{needles}{'/negative' * negative}"
    dice, cells = _compose(stream, split, seed, index, draw=partial(_stitched, n=n, objects=objects, first=first))
    parts = [_part(cells, n, place) for place in range(n**2)]
    if negative:
        targets = [(-1, -1)] * needles
        if objects == 1:
            wanted = dice.draw(((name,) for name in NAMES if name not in cells), needles)
        else:
            together = [set(part) for part in parts]
            pairs = combinations(_count(cells), 2)
            wanted = dice.draw((pair for pair in pairs if set(pair) not in together), needles)
    else:
        places = [first, *dice.draw((place for place in range(n**2) if place != first), needles - 1)]
        targets = [divmod(place, n) for place in places]
        wanted = [parts[place] for place in places]
    captions = tuple(describe(names) for names in wanted)
    return Needle(kind, _paint(dice, cells), n, captions, tuple(targets), index)


def _stitched(dice: Dice, n: int, objects: int, first: int) -> tuple[str, ...]:
    """N×N sub-images of `objects` each. With two, every sub-image shares one object with the one at place `first`, and
    each of its two is shared by some other: no single object gives the place away."""
    a, b, *names = dice.draw(NAMES, len(NAMES))
    shared = [a, b, *(dice.pick((a, b)) for _ in range(n**2 - 3))]
    groups = [[a, b], *zip(dice.draw(shared, n**2 - 1), names, strict=False)] if objects == 2 else [[x] for x in names]
    places = [first, *dice.draw((place for place in range(n**2) if place != first), n**2 - 1)]
    part = GRID // n
    placed = []
    for place, group in zip(places, groups, strict=False):
        corner = place // n * part * GRID + place % n * part
        spots = dice.draw(range(part**2), objects)
        placed += [(corner + spot // part * GRID + spot % part, name) for spot, name in zip(spots, group, strict=True)]
    return _place(placed)


def _part(cells: Sequence[str], n: int, place: int) -> list[str]:
    """The objects of one of N×N sub-images, in raster order."""
    part = GRID // n
    top, left = place // n * part, place % n * part
    rows = (cells[row * GRID + left : row * GRID + left + part] for row in range(top, top + part))
    return [name for row in rows for name in row if name != NONE]


def _needle_question(kind: str, split: str, index: int, seed: int = 0) -> Sample:
    each = 2 if NEEDLES[kind][0] == 2 else 1
    return needle(kind, split, index // each, seed).samples()[index % each]


# --- POPE -------------------------------------------------------------------------------------------------------------

STRATEGIES = ("random", "popular", "adversarial")


def pope(strategy: str, split: str = "test", images: int = 100, seed: int = 0) -> list[Sample]:
    """POPE's polling (arXiv 2305.10355): of each picture three present objects and three absent ones in turn.

    Absent ones are drawn at random; or are the most frequent objects; or those that most often accompany the present
    object asked about just before, as counted over train scenes. Pictures and "yes" questions are the same in all
    three. Raises UserError for an unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise UserError(f"strategy is {strategy!r}: expected one of {', '.join(STRATEGIES)}")
    frequency, company = object_statistics()
    samples = []
    for image_id in range(images):
        dice, cells = _compose("pope", split, seed, image_id, usable=lambda cells: len(_count(cells)) >= 3)
        scene, present = _paint(dice, cells), dice.draw(_count(cells), 3)
        absent = [name for name in dice.draw(NAMES, len(NAMES)) if name not in cells]
        for name in present:
            rank = {"random": Counter(), "popular": frequency, "adversarial": company[name]}[strategy]
            other = max(absent, key=rank.__getitem__)  # the first of equals, and `absent` is shuffled
            absent.remove(other)
            for asked, answer in ((name, "yes"), (other, "no")):
                prefix = f"answer en {_ask('object', asked)}"
                samples.append(
                    Sample(
                        f"pope-{strategy}",
                        scene,
                        prefix,
                        answer,
                        image_id,
                        len(samples) + 1,
                        KINDS["object"].question_type,
                        "yes/no",
                    )
                )
    return samples


@cache
def object_statistics(scenes: int = 4000) -> tuple[Counter, dict[str, Counter]]:
    """How many train scenes hold each object, and each pair of objects."""
    frequency, company = Counter(), {name: Counter() for name in NAMES}
    for index in range(scenes):
        there = _count(_compose("statistics", "train", 0, index)[1])
        frequency.update(there.keys())
        for name in there:
            company[name].update(there.keys() - {name})
    return frequency, company


# --- all of it --------------------------------------------------------------------------------------------------------

TASKS: dict[str, Callable[[str, int, int], Sample]] = {
    "scan": scan,
    "detect_all": detect_all,
    "detect": detect,
    **{task: partial(probe, task) for task in PROBES},
    "caption": caption,
    "vqa": vqa,
    **{kind: partial(_needle_question, kind) for kind in NEEDLES},
}

# Every word and mark of the tasks; `train/embedded/tokenizer.py` makes each one piece
WORDS = [
    *NAMES,
    *ASKED_CATEGORIES,
    *NUMBERS,
    NONE,
    *"0123456789,.:;?",
    *"scan detect locate count exist caption answer en yes no top bottom left right row column".split(),
    *"a an and any are how image in is many objects or the there what where which".split(),
    *"Bottom Caption Column How Is Left Right Row Top What Where Which".split(),
]
PLURALS = [plural(name) for name in (*NAMES, *ASKED_CATEGORIES)]
