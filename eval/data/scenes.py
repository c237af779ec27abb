"""The embedded benchmark: questions about small pictures composed from 40 emoji, whose answers are
known.

In: a task's name, a split and an index. Out: a `Sample` (picture, prefix, suffix) in PaliGemma's
prompt language. `eval/vqa.py` scores answers to them; `train/` learns from them.
`eval/data/pictures.py` draws the pictures; `eval/data/haystacks.py` and `eval/data/polls.py` ask
for needles and POPE's questions.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache, partial

from eval.data.haystacks import NEEDLES, haystack, layout_of
from eval.data.pictures import (
    CATEGORIES,
    GRID,
    NAMES,
    NONE,
    Dice,
    Sample,
    compose,
    count,
    ordinary,
    paint,
)
from eval.data.wording import describe, plural, with_article
from model.common import UserError

PLACES = ("top left", "top right", "bottom left", "bottom right")  # quadrants, row-major


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


# Dense answers, which teach where things are


def dense(task: str, split: str, index: int, seed: int) -> Sample:
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


def probe(task: str, split: str, index: int, seed: int) -> Sample:
    """`locate dog` → "top left", `count dog` → "2", `exist dog` → "no": VQA's facts in two
    words."""
    kind = PROBES[task]
    dice, squares = compose(
        task,
        split,
        seed,
        index,
        usable=lambda squares: facts(squares)[kind],
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


@lru_cache(16)
def facts(squares: tuple[str, ...]) -> dict[str, list[Fact]]:
    """All questions by kind: (answer, thing, place). None is ambiguous: "where" needs an object
    that occurs once, "what" a quadrant with one object, "which" a category with one kind of
    object."""
    # 1. what is where
    there = count(squares)
    inside = {place: [] for place in PLACES}
    for square, name in enumerate(squares):
        if name != NONE:
            inside[quadrant(square)].append(name)
    members = {}
    for category in ASKED_CATEGORIES:
        members[category] = [name for name in there if name in CATEGORIES[category]]
    # 2. the questions about it
    found = {kind: [] for kind in KINDS}

    def add(kind, answer, thing="", place=""):
        if isinstance(answer, bool):
            answer = "yes" if answer else "no"
        found[kind].append((str(answer), thing, place))

    for name in NAMES:
        add("object", name in there, name)
        add("count", there[name], name)
    for category, names in members.items():
        add("category", len(names) > 0, category)
        add("count category", sum(map(there.get, names)), category)
        if len(names) == 1:
            add("which", names[0], category)
    for name, number in there.items():
        if number == 1:
            own = quadrant(squares.index(name))
            add("where", own, name)
            for place in PLACES:
                add("position", place == own, name, place)
    add("total", there.total())
    for place, names in inside.items():
        if len(names) == 1:
            add("what", names[0], place=place)
    return found


def _balanced(dice: Dice, candidates: Iterable[Fact]) -> Fact:
    """Draw an answer, then a question with that answer, since many more objects are absent than
    present."""
    by_answer = defaultdict(list)
    for fact in candidates:
        by_answer[fact[0]].append(fact)
    return dice.pick(by_answer[dice.pick(list(by_answer))])


@cache
def _question(kind: str, thing: str, place: str) -> str:
    return KINDS[kind][2].format(
        thing=thing,
        a_thing=with_article(thing),
        things=plural(thing),
        place=place,
    )


@lru_cache(64)
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
        each = 2 if layout_of(task)[0] == 2 else 1
        return haystack(task, split, index // each, seed).samples[index % each]
    make = probe if task in PROBES else dense
    return make(task, split, index, seed)
