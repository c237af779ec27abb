"""The embedded benchmark: questions about small pictures composed from 40 emoji, whose answers are known.

In: a task's name, a split and an index. Out: a `Sample` (picture, prefix, suffix) in PaliGemma's prompt language, a
`Needle` with its questions, or POPE's questions. `eval/vqa.py`, `eval/needle.py` and `eval/pope.py` score answers to
them; `train/` learns from them. `eval/pictures.py` draws the pictures.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import combinations

from eval.pictures import (
    CATEGORIES,
    GRID,
    NAMES,
    NONE,
    NUMBERS,
    PLACES,
    Dice,
    Sample,
    Scene,
    box,
    compose,
    count,
    crowd,
    describe,
    ordinary,
    paint,
    place_objects,
    plural,
    quadrant,
    with_article,
)
from model.common import UserError

# Pretraining: dense answers, which teach where things are


def scan(split: str, index: int, seed: int = 0) -> Sample:
    """The names of all 16 squares, row-major. Up to 16 objects, since most squares of an ordinary scene are empty."""
    dice, squares = compose("scan", split, seed, index, partial(ordinary, most=GRID**2))
    return Sample("scan", paint(dice, squares), "scan", " ".join(squares), index, index)


def detect_all(split: str, index: int, seed: int = 0) -> Sample:
    """All objects with the top left corners of their boxes, "dog<locY1><locX1> cat<locY1><locX1>", in random order,
    those of one name in raster order.

    The name comes first and carries no loss: the order of names is random, and the noise of guessing it would outweigh
    the rest, while the place follows from picture and name. Half a box keeps the answers, and so pretraining, short;
    `detect` has PaliGemma's own format, whole boxes before names.
    """
    dice, squares = compose("detect_all", split, seed, index)
    places, names = defaultdict(list), [name for name in squares if name != NONE]
    for square, name in enumerate(squares):
        places[name].append(square)
    suffix, spans = "", []
    for name in dice.draw(names, len(names)):
        start = len(suffix)  # with the space before the word: one piece holds both
        suffix += f"{' ' * bool(suffix)}{name}"
        spans.append((start, len(suffix)))
        suffix += box(places[name].pop(0))[: len("<loc0000>") * 2]
    return Sample("detect_all", paint(dice, squares), "detect", suffix, index, index, unsupervised=tuple(spans))


def detect(split: str, index: int, seed: int = 0) -> Sample:
    """PaliGemma's detection: `detect dog` → "<loc…> dog ; <loc…> dog", boxes in raster order."""
    dice, squares = compose("detect", split, seed, index)
    name = dice.pick(list(count(squares)))
    suffix = " ; ".join(f"{box(square)} {name}" for square, other in enumerate(squares) if other == name)
    return Sample("detect", paint(dice, squares), f"detect {name}", suffix, index, index)


def caption(split: str, index: int, seed: int = 0) -> Sample:
    """`caption en` → "two dogs and a cat"."""
    dice, squares = compose("caption", split, seed, index)
    return Sample("caption", paint(dice, squares), "caption en", describe(squares), index, index)


def probe(task: str, split: str, index: int, seed: int = 0) -> Sample:
    """`locate dog` → "top left", `count dog` → "2", `exist dog` → "no": VQA's facts in two words. `left or right dog` →
    "left" and `row and column dog` → "row 2 column 3" teach the answer words of the needle tests, whose questions are
    kept for fine-tuning: a word that was never an answer is hard to learn as one."""
    kind, wording = PROBES[task]
    dice, squares = compose(task, split, seed, index, usable=lambda squares: any(facts(squares, kind)))
    answer, thing, _ = _balanced(dice, facts(squares, kind))
    return Sample(task, paint(dice, squares), f"{wording} {thing}", answer, index, index)


# task: (the kind of `facts`, the prompt before the thing)
PROBES = {"locate": ("where", "locate"), "count": ("count", "count"), "exist": ("object", "exist")}
PROBES |= {"vertical": ("top or bottom",) * 2, "horizontal": ("left or right",) * 2, "cell": ("row and column",) * 2}

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
ASKED_CATEGORIES = ("animal", "food", "vehicle")  # "thing" as a category would not be understood
# Answer types of a picture's questions, near VQAv2's shares (38 % yes/no, 12 % number, 50 % other; 5.4 a picture)
QUESTIONS = ("yes/no", "yes/no", "number", "other", "other", "other")


def facts(squares: Sequence[str], kind: str) -> Iterator[tuple[str, str, str]]:
    """All questions of one kind: (answer, thing, place). None is ambiguous: "where" needs an object that occurs once,
    "what" a quadrant with one object, "which" a category with one kind of object."""
    there = count(squares)
    if kind == "object":
        yield from (("yes" if name in there else "no", name, "") for name in NAMES)
    elif kind == "count":
        yield from ((str(there[name]), name, "") for name in NAMES)
    elif kind == "total":
        yield str(sum(there.values())), "", ""
    elif kind == "what":
        for place in PLACES:
            names = [name for square, name in enumerate(squares) if name != NONE and quadrant(square) == place]
            if len(names) == 1:
                yield names[0], "", place
    elif "category" in kind or kind == "which":
        for category in ASKED_CATEGORIES:
            members = [name for name in there if name in CATEGORIES[category]]
            if kind == "category":
                yield "yes" if members else "no", category, ""
            elif kind == "count category":
                yield str(sum(there[name] for name in members)), category, ""
            elif len(members) == 1:
                yield members[0], category, ""
    else:
        for name in (name for name, number in there.items() if number == 1):
            square = squares.index(name)
            place, (row, column) = quadrant(square), divmod(square, GRID)
            if kind == "position":
                yield from (("yes" if other == place else "no", name, other) for other in PLACES)
            else:
                vertical, horizontal = place.split()
                answers = {"where": place, "top or bottom": vertical, "left or right": horizontal}
                yield (answers | {"row and column": f"row {row + 1} column {column + 1}"})[kind], name, ""


def _balanced(dice: Dice, candidates: Iterable[tuple[str, str, str]]) -> tuple[str, str, str]:
    """Draw an answer, then a question with that answer, since many more objects are absent than present."""
    by_answer = defaultdict(list)
    for fact in candidates:
        by_answer[fact[0]].append(fact)
    return dice.pick(by_answer[dice.pick(list(by_answer))])


@cache
def _question(kind: str, thing: str, place: str = "") -> str:
    return KINDS[kind][2].format(thing=thing, a_thing=with_article(thing), things=plural(thing), place=place)


@lru_cache(maxsize=64)
def vqa_picture(split: str, image_id: int, seed: int = 0) -> tuple[Sample, ...]:
    """The questions on one picture, none twice, prompt `answer en QUESTION`; answer types as in `QUESTIONS`."""
    kinds = {name: [kind for kind, (answer_type, *_) in KINDS.items() if answer_type == name] for name in QUESTIONS}

    def usable(squares: Sequence[str]) -> bool:
        return sum(1 for kind in kinds["other"] for _ in facts(squares, kind)) >= QUESTIONS.count("other")

    dice, squares = compose("vqa", split, seed, image_id, usable=usable)
    scene, samples = paint(dice, squares), {}
    for answer_type in QUESTIONS:
        for kind in dice.draw(kinds[answer_type], len(kinds[answer_type])):
            left = [fact for fact in facts(squares, kind) if _question(kind, *fact[1:]) not in samples]
            if left:
                answer, thing, place = _balanced(dice, left)
                question, ids = _question(kind, thing, place), (image_id, image_id * 1000 + len(samples))
                types = KINDS[kind][1], answer_type
                samples[question] = Sample("vqa", scene, f"answer en {question}", answer, *ids, *types)
                break
    return tuple(samples.values())


def vqa(split: str, index: int, seed: int = 0) -> Sample:
    """Question `index`; each run of `len(QUESTIONS)` indices is about one picture."""
    return vqa_picture(split, index // len(QUESTIONS), seed)[index % len(QUESTIONS)]


# Needles in a haystack of sub-images

NEEDLES = {"n2o1": (2, 1), "n2o2": (2, 2), "n4o1": (4, 1)}  # sub-images along a side, objects in each
NEEDLE_TITLES = {"n2o1": "2×2, one object each", "n2o2": "2×2, two objects each", "n4o1": "4×4, one object each"}


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
        """The `place_questions` of each caption. About a needle that is not there: "none"."""
        samples = []
        for caption, (row, column) in zip(self.captions, self.targets, strict=True):
            rights = (row, column) if self.n == 2 else (row * self.n + column,)
            for (prefix, words), right in zip(place_questions(caption, self.n), rights, strict=True):
                suffix, number = NONE if row < 0 else words[right], self.id * 1000 + len(samples)
                question_type = prefix.rpartition("? ")[2].removesuffix("?")
                samples.append(Sample(self.kind, self.scene, prefix, suffix, self.id, number, question_type))
        return samples


def place_questions(caption: str, side: int) -> list[tuple[str, tuple[str, ...]]]:
    """(prompt, words to choose from) of the paper's protocol: two for a 2×2 grid, whose words are those of its rows and
    of its columns; for a larger one a single question with answers like "row 2 column 3", counted from 1, row-major."""
    head = f"Caption: {caption}. Where is the caption? "
    if side == 2:
        return [(f"{head}Top or Bottom?", ("top", "bottom")), (f"{head}Left or Right?", ("left", "right"))]
    places = tuple(f"row {row} column {col}" for row in range(1, side + 1) for col in range(1, side + 1))
    return [(f"{head}Row and Column?", places)]


@lru_cache(maxsize=64)
def needle(kind: str, split: str, index: int, seed: int = 0, *, needles: int = 1, negative: bool = False) -> Needle:
    """Needle test `index`. Targets take turns: N² consecutive indices have their first needle in each place once.

    `negative`: nothing that a caption says is there; of two objects, both are, but in different sub-images.
    Raises UserError for more needles than places.
    """
    n, objects, distractors = layout_of(kind)
    most = n**2 if distractors == n**2 - 1 else 1
    if not 1 <= needles <= most:
        raise UserError(f"{needles} needles in {n}×{n} sub-images: expected 1 to {most}")
    first = index % n**2
    draw = partial(_stitched, n=n, objects=objects, first=first, filled=distractors + 1)
    dice, squares = compose(f"{kind}/{needles}{'/negative' * negative}", split, seed, index, draw=draw)
    parts = [_part(squares, n, place) for place in range(n**2)]
    if not negative:
        places = [first, *dice.draw((place for place in range(n**2) if place != first), needles - 1)]
        targets, wanted = [divmod(place, n) for place in places], [parts[place] for place in places]
    else:
        targets, together = [(-1, -1)] * needles, [set(part) for part in parts]
        absent = ((name,) for name in NAMES if name not in squares)
        apart = (pair for pair in combinations(count(squares), 2) if set(pair) not in together)
        wanted = dice.draw(absent if objects == 1 else apart, needles)
    captions = tuple(describe(names) for names in wanted)
    return Needle(kind, paint(dice, squares), n, captions, tuple(targets), index)


def layout_of(kind: str) -> tuple[int, int, int]:
    """Sub-images along a side, objects in each, and how many sub-images beside the needle's have any.

    Besides NEEDLES: n4d7 is 4×4 with one object in the needle's and in 7 other sub-images; 3×3 fill the upper left of
    the picture."""
    if kind in NEEDLES:
        n, objects = NEEDLES[kind]
        return n, objects, n**2 - 1
    match = re.fullmatch(r"n([234])d(\d{1,2})", kind)
    assert match and int(match[2]) < int(match[1]) ** 2, f"needle kind is {kind!r}: expected {list(NEEDLES)}, or n4d7"
    return int(match[1]), 1, int(match[2])


def _stitched(dice: Dice, n: int, objects: int, first: int, filled: int) -> tuple[str, ...]:
    """N×N sub-images, so many of them `filled`, of `objects` each.

    With two, every sub-image shares one object with that at `first`, and each of its two is shared by some other: no
    single object decides the place."""
    a, b, *names = dice.draw(NAMES, len(NAMES))
    shared = [a, b, *(dice.pick((a, b)) for _ in range(n**2 - 3))]
    groups = [[a, b], *zip(dice.draw(shared, n**2 - 1), names, strict=False)] if objects == 2 else [[x] for x in names]
    places = [first, *dice.draw((place for place in range(n**2) if place != first), n**2 - 1)]
    part, placed = GRID // n, []
    for place, group in zip(places[:filled], groups, strict=False):
        corner = place // n * part * GRID + place % n * part
        spots = dice.draw(range(part**2), objects)
        placed += [(corner + spot // part * GRID + spot % part, name) for spot, name in zip(spots, group, strict=True)]
    return place_objects(placed)


def _part(squares: Sequence[str], n: int, place: int) -> list[str]:
    """The objects of one of N×N sub-images, in raster order."""
    part = GRID // n
    top, left = place // n * part, place % n * part
    rows = (squares[row * GRID + left : row * GRID + left + part] for row in range(top, top + part))
    return [name for row in rows for name in row if name != NONE]


def _needle_question(kind: str, split: str, index: int, seed: int = 0) -> Sample:
    each = 2 if layout_of(kind)[0] == 2 else 1
    return needle(kind, split, index // each, seed).samples()[index % each]


# POPE

STRATEGIES = ("random", "popular", "adversarial")


def pope(
    strategy: str, split: str = "test", images: int = 100, seed: int = 0, objects: int | None = None
) -> list[Sample]:
    """POPE's polling (arXiv 2305.10355): of each picture three present objects and three absent ones in turn.

    objects: in each picture, all different (None: up to 5 in an ordinary one, 3 kinds at least).

    Absent ones are drawn at random; or are the most frequent objects; or those that most often accompany the present
    object asked about just before, as counted over train scenes. Pictures and "yes" questions are the same in all
    three.
    """
    assert strategy in STRATEGIES, f"strategy is {strategy!r}: expected one of {', '.join(STRATEGIES)}"
    frequency, company = (Counter(), defaultdict(Counter)) if strategy == "random" else object_statistics()
    samples, stream, draw = [], "pope", ordinary
    if objects:
        stream, draw = f"pope/{objects}", partial(crowd, objects=objects)
    for image_id in range(images):
        dice, squares = compose(stream, split, seed, image_id, draw, lambda squares: len(count(squares)) >= 3)
        scene, present = paint(dice, squares), dice.draw(count(squares), 3)
        absent = [name for name in dice.draw(NAMES, len(NAMES)) if name not in squares]
        for name in present:
            rank = {"random": Counter(), "popular": frequency, "adversarial": company[name]}[strategy]
            other = max(absent, key=rank.__getitem__)  # the first of equals, and `absent` is shuffled
            absent.remove(other)
            for thing, answer in ((name, "yes"), (other, "no")):
                prefix, ids = f"answer en {_question('object', thing)}", (image_id, len(samples) + 1)
                samples.append(Sample(f"pope-{strategy}", scene, prefix, answer, *ids, "is there a", "yes/no"))
    return samples


@cache
def object_statistics(scenes: int = 4000) -> tuple[Counter, dict[str, Counter]]:
    """How many train scenes hold each object, and each pair of objects."""
    frequency, company = Counter(), {name: Counter() for name in NAMES}
    for index in range(scenes):
        there = count(compose("statistics", "train", 0, index)[1])
        frequency.update(there.keys())
        for name in there:
            company[name].update(there.keys() - {name})
    return frequency, company


# All tasks

TASKS: dict[str, Callable[[str, int, int], Sample]] = {"scan": scan, "detect_all": detect_all, "detect": detect}
TASKS |= {task: partial(probe, task) for task in PROBES}
TASKS |= {"caption": caption, "vqa": vqa}
TASKS |= {kind: partial(_needle_question, kind) for kind in NEEDLES}


def sample(task: str, split: str, index: int, seed: int = 0) -> Sample:
    """Sample number `index` of a task's endless stream. Raises UserError for an unknown task."""
    if task not in TASKS:
        raise UserError(f"task is {task!r}: expected one of {', '.join(TASKS)}")
    return TASKS[task](split, index, seed)


# Every word and mark of the tasks; `train/embedded/tokenizer.py` makes each one piece
WORDS = [*NAMES, *ASKED_CATEGORIES, *NUMBERS, NONE, *"0123456789,.:;?"]
WORDS += "scan detect locate count exist caption answer en yes no top bottom left right row column".split()
WORDS += "a an and any are how image in is many objects or the there what where which".split()
WORDS += "Bottom Caption Column How Is Left Right Row Top What Where Which".split()
PLURALS = [plural(name) for name in (*NAMES, *ASKED_CATEGORIES)]
