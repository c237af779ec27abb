"""The embedded benchmark: questions about small pictures composed from 40 emoji, whose answers are
known.

In: a task's name, a split and an index. Out: a `Sample` (picture, prefix, suffix) in PaliGemma's
prompt language, a `Needle` with its questions, or POPE's questions. `eval/vqa.py`,
`eval/needle.py` and `eval/pope.py` score answers to them; `train/` learns from them.
`eval/data/pictures.py` draws the pictures.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache, partial
from itertools import combinations
from typing import NamedTuple

from eval.data.pictures import (
    CATEGORIES,
    GRID,
    NAMES,
    NONE,
    Dice,
    Sample,
    Scene,
    compose,
    count,
    ordinary,
    paint,
)
from model.common import UserError

PLACES = ("top left", "top right", "bottom left", "bottom right")  # quadrants, row-major
NUMBERS = ("two", "three", "four", "five")
IRREGULAR = {"fish": "fish", "grapes": "grapes", "bus": "buses"}
IRREGULAR |= {f"{stem}y": f"{stem}ies" for stem in ("butterfl", "strawberr")}

# Names in text


def quadrant(square: int) -> str:
    return PLACES[square // (2 * GRID) * 2 + square % GRID // 2]


def box(square: int) -> str:
    """The box of a square, y1 x1 y2 x2 in 1/1024 of the picture's side; not that of the object
    inside it, so that a right answer is one exact string. Square 6 (row 1, column 2) is
    <loc0256><loc0512><loc0511><loc0767>."""
    step = 1024 // GRID
    row, col = divmod(square, GRID)
    top, left = row * step, col * step
    sides = top, left, top + step - 1, left + step - 1
    return "".join(f"<loc{side:04d}>" for side in sides)


def plural(name: str) -> str:
    return IRREGULAR.get(name, name + "s")


def with_article(name: str) -> str:
    """The article follows the first letter alone, as in POPE."""
    return f"{'an' if name.startswith(tuple('aeiou')) else 'a'} {name}"


def describe(squares: Sequence[str]) -> str:
    """A caption: the objects in raster order ("two dogs, a cat and an apple")."""
    parts = []
    for name, number in count(squares).items():
        several = f"{NUMBERS[number - 2]} {plural(name)}"
        parts.append(with_article(name) if number == 1 else several)
    *others, last = parts
    return f"{', '.join(others)} and {last}" if others else last


# Dense answers, which teach where things are


def dense(task: str, split: str, index: int, seed: int = 0) -> Sample:
    """scan: the names of all 16 squares, row-major, of up to 16 objects. caption: "two dogs and a
    cat". detect: PaliGemma's detection, `detect dog` → "<loc…> dog ; <loc…> dog", boxes in raster
    order."""
    most = GRID**2 if task == "scan" else 5
    dice, squares = compose(task, split, seed, index, partial(ordinary, most=most))
    if task == "scan":
        prefix = task
        suffix = " ".join(squares)
    elif task == "caption":
        prefix = "caption en"
        suffix = describe(squares)
    else:
        name = dice.pick(list(count(squares)))
        prefix = f"detect {name}"
        places = [square for square, other in enumerate(squares) if other == name]
        suffix = " ; ".join(f"{box(square)} {name}" for square in places)
    return Sample(task, paint(dice, squares), prefix, suffix, index, index)


# By task, whose name begins the prompt: the kind of `facts`
PROBES = {"locate": "where", "count": "count", "exist": "object"}


def probe(task: str, split: str, index: int, seed: int = 0) -> Sample:
    """`locate dog` → "top left", `count dog` → "2", `exist dog` → "no": VQA's facts in two
    words."""
    kind = PROBES[task]
    dice, squares = compose(
        task, split, seed, index, usable=lambda squares: bool(facts(squares)[kind])
    )
    answer, thing, _ = _balanced(dice, facts(squares)[kind])
    return Sample(task, paint(dice, squares), f"{task} {thing}", answer, index, index)


# Visual question answering

# kind: (VQAv2's answer type, VQAv2's question type, the wording)
KINDS = {
    "object": ("yes/no", "is there a", "Is there {a_thing} in the image?"),
    "category": ("yes/no", "is any", "Is any {thing} in the image?"),
    "position": ("yes/no", "is the", "Is the {thing} in the {place}?"),
    "count": ("number", "how many", "How many {things} are there?"),
    "count category": ("number", "how many", "How many {things} are there?"),
    "total": ("number", "how many", "How many objects are there?"),
    "where": ("other", "where is the", "Where is the {thing}?"),
    "what": ("other", "what is in the", "What is in the {place}?"),
    "which": ("other", "which", "Which {thing} is in the image?"),
}
Fact = tuple[str, str, str]  # answer, thing, place
ASKED_CATEGORIES = ("animal", "food", "vehicle")  # "thing" as a category would not be understood
# Answer types of a picture's questions, near VQAv2's shares (38 % yes/no, 12 % number, 50 % other;
# 5.4 a picture)
QUESTIONS = ("yes/no", "yes/no", "number", "other", "other", "other")


@lru_cache(maxsize=16)
def facts(squares: tuple[str, ...]) -> dict[str, list[Fact]]:
    """All questions by kind: (answer, thing, place). None is ambiguous: "where" needs an object
    that occurs once, "what" a quadrant with one object, "which" a category with one kind of
    object."""
    # 1. what is where
    there = count(squares)
    held = {place: [] for place in PLACES}
    for square, name in enumerate(squares):
        if name != NONE:
            held[quadrant(square)].append(name)
    members = {}
    for category in ASKED_CATEGORIES:
        members[category] = [name for name in there if name in CATEGORIES[category]]
    # 2. the questions about it
    found = {kind: [] for kind in KINDS}
    for name in NAMES:
        found["object"].append(("yes" if name in there else "no", name, ""))
        found["count"].append((str(there[name]), name, ""))
    for category, names in members.items():
        found["category"].append(("yes" if names else "no", category, ""))
        found["count category"].append((str(sum(map(there.get, names))), category, ""))
        if len(names) == 1:
            found["which"].append((names[0], category, ""))
    for name, number in there.items():
        if number == 1:
            own = quadrant(squares.index(name))
            found["where"].append((own, name, ""))
            for place in PLACES:
                found["position"].append(("yes" if place == own else "no", name, place))
    found["total"].append((str(sum(there.values())), "", ""))
    for place, names in held.items():
        if len(names) == 1:
            found["what"].append((names[0], "", place))
    return found


def _balanced(dice: Dice, candidates: Iterable[Fact]) -> Fact:
    """Draw an answer, then a question with that answer, since many more objects are absent than
    present."""
    by_answer = defaultdict(list)
    for fact in candidates:
        by_answer[fact[0]].append(fact)
    return dice.pick(by_answer[dice.pick(list(by_answer))])


@cache
def _question(kind: str, thing: str, place: str = "") -> str:
    return KINDS[kind][2].format(
        thing=thing, a_thing=with_article(thing), things=plural(thing), place=place
    )


@lru_cache(maxsize=64)
def vqa_picture(split: str, image_id: int, seed: int = 0) -> tuple[Sample, ...]:
    """The questions on one picture, none twice, prompt `answer en QUESTION`; answer types as in
    `QUESTIONS`."""
    kinds = defaultdict(list)
    for kind, (answer_type, *_) in KINDS.items():
        kinds[answer_type].append(kind)

    def usable(squares: Sequence[str]) -> bool:
        found = sum(len(facts(squares)[kind]) for kind in kinds["other"])
        return found >= QUESTIONS.count("other")

    dice, squares = compose("vqa", split, seed, image_id, usable=usable)
    scene = paint(dice, squares)
    samples = {}
    for answer_type in QUESTIONS:
        for kind in dice.draw(kinds[answer_type], len(kinds[answer_type])):
            found = facts(squares)[kind]
            left = [fact for fact in found if _question(kind, *fact[1:]) not in samples]
            if left:
                answer, thing, place = _balanced(dice, left)
                question = _question(kind, thing, place)
                about = image_id, image_id * 1000 + len(samples), KINDS[kind][1], answer_type
                samples[question] = Sample("vqa", scene, f"answer en {question}", answer, *about)
                break
    return tuple(samples.values())


# Needles in a haystack of sub-images

NEEDLES = {"n2o1": (2, 1, 3), "n2o2": (2, 2, 3), "n4o1": (4, 1, 15)}  # see `layout_of`
NEEDLE_TITLES = {
    "n2o1": "2×2, one object each",
    "n2o2": "2×2, two objects each",
    "n4o1": "4×4, one object each",
}


class Needle(NamedTuple):
    """One stitched picture of n×n sub-images, MMNeedle with M = 1. `targets` are the rows and
    columns of the captions' sub-images, from 0; (-1, -1) is not there. `samples` are the
    `place_questions` of each. Chance of one is 1/n²."""

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


@lru_cache(maxsize=64)
def needle(
    kind: str, split: str, index: int, seed: int = 0, *, needles: int = 1, negative: bool = False
) -> Needle:
    """Needle test `index`. First needles take turns: N² consecutive indices have them in each place
    once. negative: no caption is there; of two objects both are, in different sub-images. The
    answer is "none" then."""
    n, objects, distractors = layout_of(kind)
    first = index % n**2
    # 1. the picture
    draw = partial(_stitched, n=n, objects=objects, first=first, filled=distractors + 1)
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
        elsewhere = [place for place in range(n**2) if place != first]
        others = dice.draw(elsewhere, needles - 1)
        targets = [divmod(place, n) for place in (first, *others)]
        wanted = [inside[target] for target in targets]
    else:
        targets = [(-1, -1)] * needles
        absent = [(name,) for name in NAMES if name not in squares]
        if objects == 2:  # both are there, but apart
            together = list(map(set, inside.values()))
            absent = [pair for pair in combinations(count(squares), 2) if set(pair) not in together]
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
    return Needle(scene, n, captions, tuple(targets), tuple(samples))


def layout_of(kind: str) -> tuple[int, int, int]:
    """Sub-images along a side, objects in each, and how many sub-images beside the needle's have
    any: of n4d7 4×4, one object in the needle's and in 7 others. 3×3 fill the picture's upper
    left."""
    if kind in NEEDLES:
        return NEEDLES[kind]
    n, distractors = map(int, kind[1:].split("d"))
    return n, 1, distractors


def _stitched(dice: Dice, n: int, objects: int, first: int, filled: int) -> list[tuple[int, str]]:
    """N×N sub-images, so many of them `filled`, of `objects` each. Of two, every sub-image shares
    one with that at `first`, and each of its two is shared by some other: no single object decides
    the place."""
    a, b, *names = dice.draw(NAMES, len(NAMES))
    elsewhere = [place for place in range(n**2) if place != first]
    shared = [a, b, *(dice.pick((a, b)) for _ in elsewhere[2:])]
    groups = [[name] for name in names]
    if objects == 2:
        shared = dice.draw(shared, len(elsewhere))
        groups = [[a, b], *zip(shared, names, strict=False)]
    places = [first, *dice.draw(elsewhere, len(elsewhere))]
    part = GRID // n
    placed = []
    for place, group in zip(places[:filled], groups, strict=False):
        top, left = place // n * part, place % n * part
        spots = dice.draw(range(part**2), objects)
        for spot, name in zip(spots, group, strict=True):
            row, col = divmod(spot, part)
            placed.append(((top + row) * GRID + left + col, name))
    return placed


# POPE

STRATEGIES = ("random", "popular", "adversarial")


def pope(
    strategy: str, split: str = "test", images: int = 100, objects: int | None = None
) -> list[Sample]:
    """POPE's polling (arXiv 2305.10355): of each picture three present objects and three absent
    ones in turn. Absent ones are drawn at random; or are the most frequent objects; or those that
    most often accompany the present object asked about just before, as counted over train scenes.
    Pictures and "yes" questions are the same in all three. objects: in each picture, all different,
    in random squares (None: up to 5 of an ordinary one, 3 kinds at least)."""

    def crowd(dice: Dice) -> Iterable[tuple[int, str]]:
        squares = dice.draw(range(GRID**2), objects)
        return zip(squares, dice.draw(NAMES, objects), strict=True)

    def rank(present: str) -> Counter:
        """How often the objects are drawn as absent ones."""
        if strategy == "random":
            return Counter()
        frequency, company = object_statistics()
        return frequency if strategy == "popular" else company[present]

    stream, draw = (f"pope/{objects}", crowd) if objects else ("pope", ordinary)
    samples = []
    for image_id in range(images):
        dice, squares = compose(
            stream, split, 0, image_id, draw, lambda squares: len(count(squares)) >= 3
        )
        scene = paint(dice, squares)
        present = dice.draw(count(squares), 3)
        absent = [name for name in dice.draw(NAMES, len(NAMES)) if name not in squares]
        for name in present:
            # the first of equals, and `absent` is shuffled
            other = max(absent, key=rank(name).__getitem__)
            absent.remove(other)
            for thing, answer in ((name, "yes"), (other, "no")):
                prefix = f"answer en {_question('object', thing)}"
                about = image_id, len(samples) + 1, "is there a", "yes/no"
                samples.append(Sample(f"pope-{strategy}", scene, prefix, answer, *about))
    return samples


@cache
def object_statistics() -> tuple[Counter, dict[str, Counter]]:
    """How many of 4000 train scenes hold each object, and each pair of objects."""
    frequency = Counter()
    company = {name: Counter() for name in NAMES}
    for index in range(4000):
        _, squares = compose("statistics", "train", 0, index)
        there = count(squares)
        frequency.update(there.keys())
        for name in there:
            company[name].update(there.keys() - {name})
    return frequency, company


# All tasks

TASKS = ("scan", "detect", *PROBES, "caption", "vqa", *NEEDLES)


def sample(task: str, split: str, index: int, seed: int = 0) -> Sample:
    """Sample number `index` of a task's endless stream; the questions about one picture follow each
    other. Raises UserError for an unknown task."""
    if task not in TASKS:
        raise UserError(f"task is {task!r}: expected one of {', '.join(TASKS)}")
    if task == "vqa":
        return vqa_picture(split, index // len(QUESTIONS), seed)[index % len(QUESTIONS)]
    if task in NEEDLES:
        each = 2 if NEEDLES[task][0] == 2 else 1
        return needle(task, split, index // each, seed).samples[index % each]
    make = probe if task in PROBES else dense
    return make(task, split, index, seed)
