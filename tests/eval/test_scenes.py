"""The embedded benchmark and its tokenizer: true answers, disjoint splits, the same bytes
everywhere.

Answers are checked by a second reading of the scene: from where objects are drawn, in pixels, with
rules of its own.
"""

import hashlib
import random
import re
from collections import Counter
from itertools import combinations

import pytest

from eval.data import haystacks, pictures, polls, scenes, wording
from eval.data.records import sample_record
from model.common import read_json
from model.source import BUNDLED_FOLDER
from train.data.batches import collate


def stream(task, split, count, seed=0):
    return [scenes.sample(task, split, index, seed) for index in range(count)]


def seen(scene):
    """(name, x, y) of each object's middle, in pixels, in the order of rows of 28 pixels."""
    middles = []
    for placed in scene.objects:
        row, column = divmod(placed.square, 4)
        half = placed.size / 2
        middles.append((placed.name, column * 28 + placed.x + half, row * 28 + placed.y + half))
    return sorted(middles, key=lambda middle: (middle[2] // 28, middle[1]))


def place(x, y):
    return f"{'top' if y < 56 else 'bottom'} {'left' if x < 56 else 'right'}"


def number_of(objects, noun):
    forms = {noun, noun.removesuffix("s"), noun.removesuffix("es"), noun.removesuffix("ies") + "y"}
    (singular,) = forms & {*pictures.NAMES, *pictures.CATEGORIES} or {""}
    group = pictures.CATEGORIES.get(singular, [singular])
    return sum(noun == "objects" or name in group for name, _, _ in objects)


def is_there(name, objects):
    return {"yes" if number_of(objects, name) else "no"}


RULES = {  # the form of a question: all answers to it that a person could defend
    r"Is there an? (\w+) in the image\?": lambda objects, name: is_there(name, objects),
    r"Is any (\w+) in the image\?": lambda objects, name: is_there(name, objects),
    r"Is the (\w+) in the (.*)\?": lambda objects, name, where: {
        "yes" if place(x, y) == where else "no" for other, x, y in objects if other == name
    },
    r"How many (\w+) are there\?": lambda objects, noun: {str(number_of(objects, noun))},
    r"Where is the (\w+)\?": lambda objects, name: {
        place(x, y) for other, x, y in objects if other == name
    },
    r"What is in the (.*)\?": lambda objects, where: {
        name for name, x, y in objects if place(x, y) == where
    },
    r"Which (\w+) is in the image\?": lambda objects, group: {
        name for name, _, _ in objects if name in pictures.CATEGORIES[group]
    },
}


def truth(question, objects):
    """All answers that a person could defend."""
    matches = {form: re.fullmatch(form, question) for form in RULES}
    ((form, match),) = ((form, match) for form, match in matches.items() if match)
    return RULES[form](objects, *match.groups())


@pytest.mark.long
def test_every_composition_belongs_to_one_split():
    """Breaks when a scene leaks from one split into another."""
    groups = {}
    for split in pictures.SPLITS:
        groups[split] = [s for task in scenes.TASKS for s in stream(task, split, 100)]
    # nor does order, a global generator or a cache decide what a sample is
    vqa = [s for s in groups["train"] if s.prefix.startswith("answer")][:100]
    random.seed(1)
    scenes.vqa_picture.cache_clear()
    assert [scenes.sample("vqa", "train", n) for n in reversed(range(100))] == vqa[::-1]
    for strategy in polls.STRATEGIES:
        groups["test"] += polls.pope(strategy, images=20)
    compositions = []
    for samples in groups.values():
        compositions.append({sample.scene.squares for sample in samples})
    assert min(map(len, compositions)) > 300
    assert not any(a & b for a, b in combinations(compositions, 2))
    for split, group in zip(groups, compositions, strict=True):
        assert {pictures.split_of(squares) for squares in group} == {split}


def test_the_benchmark_and_its_pixels_are_the_published_ones(processor):
    """Breaks when test scenes, questions, pixels or tokens change: figures measured before are of
    another benchmark."""
    samples = [s for task in scenes.TASKS for s in stream(task, "test", 50)]
    told = [repr((s.prefix, s.suffix, s.scene.objects, s.scene.ground)) for s in samples]
    text = "".join(told).replace("Placed(square=", "Placed(cell=")  # as it was published
    for strategy in polls.STRATEGIES:
        text += repr([(s.prefix, s.suffix) for s in polls.pope(strategy, images=20)])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "b392ca89673b7e97"
    digest = hashlib.sha256()
    for task in scenes.TASKS:
        micro = collate([sample_record(s, "train") for s in stream(task, "train", 30)], processor)
        batch = micro.batch
        for tensor in (batch.pixel_values, batch.input_ids, batch.image_index, micro.targets):
            digest.update(tensor.contiguous().numpy().tobytes())
    assert digest.hexdigest()[:16] == "a957687731d9d21c"


def test_vqa_answers_are_true_and_the_only_true_ones():
    """Breaks when an answer is wrong, a question has two right answers, or a picture gets a
    question twice."""
    for image_id in range(150):
        samples = scenes.vqa_picture("test", image_id)
        assert tuple(s.answer_type for s in samples) == scenes.QUESTIONS
        assert len({s.prefix for s in samples}) == 6
        for s in samples:
            assert s.prefix == f"answer en {s.question}"
            assert s.question.lower().startswith(s.question_type)
            assert truth(s.question, seen(s.scene)) == {s.suffix}, s.scene.squares


def test_short_probes_are_true():
    """Breaks when a pretraining answer is wrong."""
    long = {
        "locate": "Where is the {}?",
        "exist": "Is there a {} in the image?",
        "count": "How many {}s are there?",
    }
    for task, question in long.items():
        for s in stream(task, "train", 100):
            word, name = s.prefix.split()
            assert word == task
            assert truth(question.format(name), seen(s.scene)) == {s.suffix}


def test_scan_and_caption_say_what_is_there():
    """Breaks when the names of squares, which the alignment loss uses too, or a caption disagree
    with the picture."""
    for s in stream("scan", "train", 40):
        names = s.suffix.split()
        assert names == list(s.scene.squares)
        assert len(names) == 16
        assert [name for name in names if name != "none"] == [name for name, _, _ in seen(s.scene)]
    numbers = {"a": 1, "an": 1, "two": 2, "three": 3, "four": 4, "five": 5}
    for s in stream("caption", "train", 100):
        objects = seen(s.scene)
        told = [part.split() for part in re.split(r", | and ", s.suffix)]
        assert all(number_of(objects, noun) == numbers[word] for word, noun in told)
        assert sum(numbers[word] for word, _ in told) == len(objects)
        assert s.suffix.count(" and ") == (len(told) > 1)
    assert wording.describe("apple none dog bus dog".split()) == "an apple, two dogs and a bus"


def test_detection_boxes_hold_the_objects():
    """Breaks when a box is not the object's square, or the order of its numbers is not PaliGemma's
    y1 x1 y2 x2."""
    assert scenes.box(6) == "<loc0256><loc0512><loc0511><loc0767>"
    for s in stream("detect", "train", 100):
        name = s.prefix.removeprefix("detect ")
        middles = [(x, y) for other, x, y in seen(s.scene) if other == name]
        for part, (x, y) in zip(s.suffix.split(" ; "), middles, strict=True):
            sides = re.fullmatch(r"<loc(\d{4})>" * 4 + f" {name}", part).groups()
            top, left, bottom, right = (int(side) * 112 / 1024 for side in sides)
            assert left <= x <= right
            assert top <= y <= bottom


def parts_of(needle):
    """The objects of each sub-image, in raster order."""
    parts = {(row, column): [] for row in range(needle.n) for column in range(needle.n)}
    for name, x, y in seen(needle.scene):
        parts[int(y * needle.n / 112), int(x * needle.n / 112)].append(name)
    return parts


def nouns(caption):
    return [part.split()[1] for part in caption.split(" and ")]


@pytest.mark.parametrize("kind", haystacks.NEEDLES)
def test_needles_are_in_one_place_and_take_turns(kind):
    """Breaks when a caption fits no or two sub-images, one object tells the place, or a quadrant
    comes more often."""
    n, objects, _ = haystacks.NEEDLES[kind]
    turns = Counter()
    for index in range(4 * n**2):
        needle = haystacks.haystack(kind, "test", index)
        parts = parts_of(needle)
        (target,) = needle.targets
        (caption,) = needle.captions
        row, column = target
        wanted = nouns(caption)
        assert all(len(names) == objects for names in parts.values())
        assert parts.pop(target) == wanted
        assert all(len({*wanted} & {*names}) == objects - 1 for names in parts.values())
        assert objects == 1 or {*wanted} <= {name for names in parts.values() for name in names}
        turns[target] += 1
        told = {"Row and Column?": f"row {row + 1} column {column + 1}"}
        if n == 2:
            told = {
                "Top or Bottom?": ["top", "bottom"][row],
                "Left or Right?": ["left", "right"][column],
            }
        asked = f"Caption: {caption}. Where is the caption? "
        assert {s.prefix.removeprefix(asked): s.suffix for s in needle.samples} == told
    assert [*turns.values()] == [4] * n**2
    streamed = [s for index in range(8) for s in haystacks.haystack(kind, "train", index).samples]
    assert streamed == stream(kind, "train", len(streamed))


@pytest.mark.parametrize("kind", haystacks.NEEDLES)
def test_absent_and_several_needles(kind):
    """Breaks when an absent needle can be found, or the second needle is not where it is said to
    be."""
    for index in range(20):
        absent = haystacks.haystack(kind, "test", index, needles=2, negative=True)
        wanted = {frozenset(nouns(caption)) for caption in absent.captions}
        parts = [set(names) for names in parts_of(absent).values()]
        assert absent.targets == ((-1, -1),) * 2
        assert {s.suffix for s in absent.samples} == {"none"}
        assert len(wanted) == 2
        assert not any(names <= part for names in wanted for part in parts)
        if kind == "n2o2":  # both objects are there, apart
            assert set().union(*wanted) <= set().union(*parts)
        there = haystacks.haystack(kind, "test", index, needles=2)
        assert len(set(there.targets)) == 2
        assert len({s.question_id for s in there.samples}) == len(there.samples)
        shown = parts_of(there)
        assert [shown[target] for target in there.targets] == [*map(nouns, there.captions)]


def test_pope_asks_about_present_and_absent_objects_in_turn():
    """Breaks when labels are wrong or unbalanced, or the strategies differ in more than the absent
    objects."""
    asked = {strategy: polls.pope(strategy, images=60) for strategy in polls.STRATEGIES}
    frequency, company = polls.object_statistics()
    fame = Counter()
    closeness = Counter()
    for strategy, poll in asked.items():
        assert [s.suffix for s in poll] == ["yes", "no"] * 180
        assert [s.question_id for s in poll] == [*range(1, 361)]
        assert [s.prefix for s in poll[::2]] == [s.prefix for s in asked["random"][::2]]
        assert [s.scene for s in poll] == [s.scene for s in asked["random"]]
        assert len({(n // 6, s.prefix) for n, s in enumerate(poll)}) == 360
        for s in poll:
            assert truth(s.question, seen(s.scene)) == {s.suffix}
        things = [s.question.split()[3] for s in poll]
        for present, absent in zip(things[::2], things[1::2], strict=True):
            fame[strategy] += frequency[absent]
            closeness[strategy] += company[present][absent]
    assert fame["popular"] > 1.5 * fame["random"]
    assert closeness["adversarial"] > 2 * closeness["random"]


def test_the_base_was_trained_with_the_shipped_tokenizer():
    """Breaks when the shipped pieces change: every row of the embedding would mean another word."""
    trained_with = read_json(BUNDLED_FOLDER / "pretraining.json")["tokenizer_sha256"]
    shipped = (BUNDLED_FOLDER / "tokenizer.model").read_bytes()
    assert hashlib.sha256(shipped).hexdigest() == trained_with
