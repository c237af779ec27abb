"""The embedded benchmark and its tokenizer: true answers, disjoint splits, the same bytes everywhere.

Answers are checked by a second reading of the scene: from where objects are drawn, in pixels, with rules of its own.
"""

import hashlib
import random
import re
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from PIL import Image
from sentencepiece import SentencePieceProcessor
from transformers import AddedToken, GemmaTokenizer
from transformers.tokenization_utils_base import generate_merges

from eval import pictures, scenes, vqa
from eval.records import sample_record
from model.common import UserError
from model.processor import Processor
from model.source import BUNDLED_FOLDER
from train.data.batches import collate
from train.embedded.tokenizer import main, words

LOCATIONS = [f"<loc{value:04d}>" for value in range(1024)]


@pytest.fixture(scope="module")
def pieces() -> SentencePieceProcessor:
    return SentencePieceProcessor(model_file=str(BUNDLED_FOLDER / "tokenizer.model"))


def stream(task: str, split: str, count: int, seed: int = 0) -> list[pictures.Sample]:
    return [scenes.sample(task, split, index, seed) for index in range(count)]


def seen(scene: pictures.Scene) -> list[tuple[str, float, float]]:
    """(name, x, y) of each object's middle, in pixels, in the order of rows of 28 pixels."""
    middles = []
    for placed in scene.objects:
        row, column = divmod(placed.square, 4)
        middles.append((placed.name, column * 28 + placed.x + placed.size / 2, row * 28 + placed.y + placed.size / 2))
    return sorted(middles, key=lambda middle: (middle[2] // 28, middle[1]))


def place(x: float, y: float) -> str:
    return f"{'top' if y < 56 else 'bottom'} {'left' if x < 56 else 'right'}"


def number_of(objects: list, noun: str) -> int:
    forms = {noun, noun.removesuffix("s"), noun.removesuffix("es"), noun.removesuffix("ies") + "y"}
    (singular,) = forms & {*pictures.NAMES, *pictures.CATEGORIES} or {""}
    group = pictures.CATEGORIES.get(singular, [singular])
    return sum(noun == "objects" or name in group for name, _, _ in objects)


def truth(question: str, objects: list) -> set[str]:
    """All answers that a person could defend."""
    rules = {
        r"Is there an? (\w+) in the image\?": lambda name: {"yes" if number_of(objects, name) else "no"},
        r"Is any (\w+) in the image\?": lambda name: {"yes" if number_of(objects, name) else "no"},
        r"Is the (\w+) in the (.*)\?": lambda name, where: {
            "yes" if place(x, y) == where else "no" for other, x, y in objects if other == name
        },
        r"How many (\w+) are there\?": lambda noun: {str(number_of(objects, noun))},
        r"Where is the (\w+)\?": lambda name: {place(x, y) for other, x, y in objects if other == name},
        r"What is in the (.*)\?": lambda where: {name for name, x, y in objects if place(x, y) == where},
        r"Which (\w+) is in the image\?": lambda group: {n for n, _, _ in objects if n in pictures.CATEGORIES[group]},
    }
    (answers,) = (rule(*match.groups()) for form, rule in rules.items() if (match := re.fullmatch(form, question)))
    return answers


def inside(top: int, left: int, bottom: int, right: int, x: float, y: float) -> bool:
    return left <= x * 1024 / 112 <= right and top <= y * 1024 / 112 <= bottom


@pytest.mark.long
def test_every_composition_belongs_to_one_split():
    """Breaks when a scene leaks from one split into another."""
    groups = {split: [s for task in scenes.TASKS for s in stream(task, split, 100)] for split in pictures.SPLITS}
    groups["test"] += [s for strategy in scenes.STRATEGIES for s in scenes.pope(strategy, images=20)]
    compositions = {split: {s.scene.squares for s in samples} for split, samples in groups.items()}
    assert min(map(len, compositions.values())) > 300
    assert not any(a & b for a, b in combinations(compositions.values(), 2))
    assert all(pictures.split_of(squares) == split for split, group in compositions.items() for squares in group)


def test_samples_depend_on_nothing_but_their_address():
    """Breaks when order, a global generator or a cache decides what a sample is."""
    addresses = [(task, split, index) for task in scenes.TASKS for split in ("train", "test") for index in (0, 7, 200)]
    first = [scenes.sample(*address) for address in addresses]
    random.seed(1)
    scenes.vqa_picture.cache_clear()
    assert [scenes.sample(*address) for address in reversed(addresses)] == first[::-1]
    assert scenes.sample("vqa", "train", 0, seed=1) != scenes.sample("vqa", "train", 0, seed=0)


def test_the_benchmark_is_the_published_one():
    """Breaks when the test scenes or questions change: figures measured before are then of another benchmark."""
    texts = [
        repr((s.prefix, s.suffix, s.scene.objects, s.scene.ground)) for t in scenes.TASKS for s in stream(t, "test", 50)
    ]
    digest = hashlib.sha256("".join(texts).replace("Placed(square=", "Placed(cell=").encode())  # as it was published
    for strategy in scenes.STRATEGIES:
        digest.update(repr([(s.prefix, s.suffix) for s in scenes.pope(strategy, images=20)]).encode())
    assert digest.hexdigest()[:16] == "59e1e740f7770ed3"


def test_the_model_sees_what_it_always_saw():
    """Breaks when a picture is drawn otherwise, or a pixel or token of a batch changes: no run could be repeated."""
    digest, processor = hashlib.sha256(), Processor.from_source("embedded")
    for task in scenes.TASKS:
        micro = collate([sample_record(s, "train") for s in stream(task, "train", 30)], processor)
        for tensor in (micro.batch.pixel_values, micro.batch.input_ids, micro.batch.image_index, micro.targets):
            digest.update(tensor.contiguous().numpy().tobytes())
    assert digest.hexdigest()[:16] == "0f458c1a2b42305a"


def test_rendering_agrees_with_pillow():
    """Breaks when sprites turn transparent, shift, lose their mirroring or brightness, or a level wraps around."""
    ramp = (np.arange(112) * 2 - 111)[:, None] / 112
    for sample in stream("scan", "train", 12):
        grey, down, across = np.array(sample.scene.ground, float)
        expected = Image.fromarray((grey + (ramp * down)[:, None] + (ramp * across)[None, :]).round().astype(np.uint8))
        for placed in sample.scene.objects:
            sprite = Image.open(pictures.SPRITES / f"{placed.name}.webp").resize((placed.size,) * 2, Image.BICUBIC)
            if placed.mirrored:
                sprite = sprite.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            bright = sprite.convert("RGB").point(lambda v, b=placed.brightness: min(255, v * b // 128))
            row, column = divmod(placed.square, 4)
            expected.paste(bright, (28 * column + placed.x, 28 * row + placed.y), sprite.getchannel("A"))
        difference = np.abs(sample.scene.render().astype(int) - np.asarray(expected, int))
        # half-transparent rims that are brightened may differ: there the clipping comes before or after the blend
        assert np.quantile(difference, 0.99) <= 4 and difference.mean() < 1


def test_vqa_answers_are_true_and_the_only_true_ones():
    """Breaks when an answer is wrong, a question has two right answers, or a picture gets a question twice."""
    for image_id in range(150):
        samples = scenes.vqa_picture("test", image_id)
        assert tuple(s.answer_type for s in samples) == scenes.QUESTIONS and len({s.prefix for s in samples}) == 6
        for s in samples:
            assert s.prefix == f"answer en {s.question}" and s.question.lower().startswith(s.question_type)
            assert truth(s.question, seen(s.scene)) == {s.suffix}, (s.question, s.suffix, s.scene.squares)


def test_short_probes_are_true():
    """Breaks when a pretraining answer is wrong."""
    long = {"locate": "Where is the {}?", "exist": "Is there a {} in the image?", "count": "How many {} are there?"}
    for task, wording in long.items():
        for s in stream(task, "train", 100):
            word, name = s.prefix.split()
            noun = pictures.plural(name) if task == "count" else name
            assert word == task and truth(wording.format(noun), seen(s.scene)) == {s.suffix}


def test_scan_and_caption_say_what_is_there():
    """Breaks when the names of squares, which the alignment loss uses too, or a caption disagree with the picture."""
    for s in stream("scan", "train", 40):
        names = s.suffix.split()
        assert names == list(s.scene.squares) and len(names) == 16
        assert [name for name in names if name != "none"] == [name for name, _, _ in seen(s.scene)]
    assert {len(s.scene.objects) for s in stream("scan", "train", 200)} == set(range(1, 17))
    for s in stream("caption", "train", 100):
        parts = re.split(r", | and ", s.suffix)
        numbers = {"a": 1, "an": 1, "two": 2, "three": 3, "four": 4, "five": 5}
        told = [(numbers[part.split()[0]], part.split()[1]) for part in parts]
        objects = seen(s.scene)
        assert all(number_of(objects, noun) == n for n, noun in told) and sum(n for n, _ in told) == len(objects)
        assert s.suffix.count(" and ") == (len(parts) > 1)
    assert pictures.describe(["apple", "none", "dog", "bus", "dog"]) == "an apple, two dogs and a bus"


def test_detection_boxes_hold_the_objects():
    """Breaks when a box is not the object's square, or the order of its numbers is not PaliGemma's y1 x1 y2 x2."""
    assert pictures.box(6) == "<loc0256><loc0512><loc0511><loc0767>"
    for s in stream("detect", "train", 100):
        name = s.prefix.removeprefix("detect ")
        middles = [(x, y) for other, x, y in seen(s.scene) if other == name]
        for part, middle in zip(s.suffix.split(" ; "), middles, strict=True):
            *sides, label = re.fullmatch(r"<loc(\d{4})><loc(\d{4})><loc(\d{4})><loc(\d{4})> (\S+)", part).groups()
            assert label == name and inside(*map(int, sides), *middle)


def test_dense_detection_lists_everything_and_masks_the_names(pieces):
    """Breaks when the list of all objects is wrong, or the loss falls on names in random order, or misses a box."""
    for s in stream("detect_all", "train", 100):
        told, objects = re.findall(r"(\w+)<loc(\d{4})><loc(\d{4})>", s.suffix), seen(s.scene)
        assert s.suffix == " ".join(f"{name}<loc{y}><loc{x}>" for name, y, x in told) and s.prefix == "detect"
        assert sorted(name for name, *_ in told) == sorted(name for name, *_ in objects)
        for name, y, x in told:  # of one name, the first in raster order comes first
            first = next(o for o in objects if o[0] == name)
            assert inside(int(y), int(x), int(y) + 256, int(x) + 256, *first[1:])
            objects.remove(first)
        end, masked, kept = 0, [], []
        for piece in pieces.encode(s.suffix, out_type=str):
            start, end = end, end + len(piece)
            (masked if any(a <= start and end <= b for a, b in s.unsupervised) else kept).append(piece.strip("▁"))
        assert masked == [name for name, *_ in told] and kept == [f"<loc{at}>" for _, *both in told for at in both]


def guess(train, test) -> dict[str, float]:
    return vqa.guess_accuracy(vqa.of_samples(test, "test"), vqa.of_samples(train, "train"))


def test_the_text_only_guess_is_the_most_frequent_train_answer():
    """Breaks when the guess is not the one worked out by hand."""

    def made(prefix: str, answer: str, kind: str = "number") -> pictures.Sample:
        return pictures.Sample("vqa", pictures.Scene((), (), 0), prefix, answer, 0, 0, "how many", kind)

    train = [made("dogs?", "1"), made("dogs?", "2"), made("dogs?", "2"), made("cats?", "3"), made("cats?", "0")]
    test = [made("dogs?", "2"), made("dogs?", "1"), made("cats?", "0"), made("pigs?", "2"), made("is?", "no", "yes/no")]
    # dogs → 2; cats → 0 (a tie, the first in order); pigs, never asked → 2, as "how many" in general
    assert guess(train, test) == {"overall": 60.0, "number": 75.0, "yes/no": 0.0}


@pytest.mark.long
def test_answers_are_balanced():
    """Breaks when a model that never looks at the picture does well."""
    accuracy = guess(stream("vqa", "train", 12000), stream("vqa", "test", 1800))
    assert 28 < accuracy["overall"] < 37
    assert 50 <= accuracy["yes/no"] < 60 and 30 < accuracy["number"] < 48 and 12 < accuracy["other"] < 20
    for kind, chance in (("n2o1", 50), ("n2o2", 50), ("n4o1", 100 / 16)):  # of one question
        assert guess(stream(kind, "train", 4000), stream(kind, "test", 320))["overall"] < chance + 8


def parts(needle: scenes.Needle) -> dict[tuple[int, int], list[str]]:
    """The objects of each sub-image, in raster order, from their places in pixels."""
    found = {(row, column): [] for row in range(needle.n) for column in range(needle.n)}
    for name, x, y in seen(needle.scene):
        found[int(y * needle.n / 112), int(x * needle.n / 112)].append(name)
    return found


def nouns(caption: str) -> list[str]:
    return [part.split()[1] for part in caption.split(" and ")]


@pytest.mark.parametrize("kind", scenes.NEEDLES)
def test_needles_are_in_one_place_and_take_turns(kind):
    """Breaks when a caption fits no or two sub-images, the answers are wrong, or a quadrant is asked more often."""
    n, objects = scenes.NEEDLES[kind]
    turns = Counter()
    for index in range(4 * n**2):
        needle = scenes.needle(kind, "test", index)
        (target,), (caption,), places = needle.targets, needle.captions, parts(needle)
        assert needle.n == n and all(len(names) == objects for names in places.values())
        assert [spot for spot, names in places.items() if set(nouns(caption)) <= set(names)] == [target]
        assert places[target] == nouns(caption)
        turns[target] += 1
        head, (row, column) = f"Caption: {caption}. Where is the caption? ", target
        told = {"Row and Column?": f"row {row + 1} column {column + 1}"}
        if n == 2:
            told = {"Top or Bottom?": ["top", "bottom"][row], "Left or Right?": ["left", "right"][column]}
        assert {s.prefix: s.suffix for s in needle.samples()} == {head + text: word for text, word in told.items()}
    assert set(turns.values()) == {4} and len(turns) == n**2
    streamed = [s for index in range(8) for s in scenes.needle(kind, "train", index).samples()]
    assert streamed == stream(kind, "train", len(streamed))


def test_distractors_share_one_object_with_the_needle():
    """Breaks when one of the two objects alone tells where the needle is."""
    for needle in (scenes.needle("n2o2", "test", index) for index in range(60)):
        (target,), wanted = needle.targets, set(nouns(needle.captions[0]))
        others = [set(names) for spot, names in parts(needle).items() if spot != target]
        assert all(len(wanted & other) == 1 for other in others) and set.union(*others) >= wanted


@pytest.mark.parametrize("kind", scenes.NEEDLES)
@pytest.mark.parametrize("needles", [1, 2])
def test_negatives_and_several_needles(kind, needles):
    """Breaks when an absent needle can be found, or the second needle is not where it is said to be."""
    for index in range(20):
        absent = scenes.needle(kind, "test", index, needles=needles, negative=True)
        assert absent.targets == ((-1, -1),) * needles and {s.suffix for s in absent.samples()} == {"none"}
        wanted = {frozenset(nouns(caption)) for caption in absent.captions}
        assert len(wanted) == needles and not any(w <= set(names) for w in wanted for names in parts(absent).values())
        assert kind != "n2o2" or set().union(*wanted) <= set(absent.scene.squares)  # both objects are there, apart
        there = scenes.needle(kind, "test", index, needles=needles)
        ids = [s.question_id for s in there.samples()]
        assert len(set(there.targets)) == needles and len({*ids}) == len(ids)
        assert [parts(there)[target] for target in there.targets] == [nouns(caption) for caption in there.captions]
    with pytest.raises(UserError, match="expected 1 to"):
        scenes.needle(kind, "test", 0, needles=17)


def test_pope_asks_about_present_and_absent_objects_in_turn():
    """Breaks when labels are wrong or unbalanced, or the strategies differ in more than the absent objects."""
    polls = {strategy: scenes.pope(strategy, images=60) for strategy in scenes.STRATEGIES}
    frequency, company = scenes.object_statistics()
    fame, closeness = Counter(), Counter()
    for strategy, poll in polls.items():
        assert [s.suffix for s in poll] == ["yes", "no"] * 180 and [s.question_id for s in poll] == [*range(1, 361)]
        assert [s.prefix for s in poll[::2]] == [s.prefix for s in polls["random"][::2]]
        assert [s.scene for s in poll] == [s.scene for s in polls["random"]]
        assert all(len({s.prefix for s in poll[start : start + 6]}) == 6 for start in range(0, 360, 6))
        for yes, no in zip(poll[::2], poll[1::2], strict=True):
            assert truth(yes.question, seen(yes.scene)) == {"yes"} and truth(no.question, seen(no.scene)) == {"no"}
            present, absent = (s.question.split()[3] for s in (yes, no))
            fame[strategy] += frequency[absent]
            closeness[strategy] += company[present][absent]
    assert fame["popular"] > 1.5 * fame["random"] and closeness["adversarial"] > 2 * closeness["random"]


def test_tokenizer_is_made_the_same_again(tmp_path, capsys):
    """Breaks when the shipped pieces are not those that the command makes: every row of the embedding would move."""
    main(["--out", str(tmp_path / "tokenizer.model")])
    assert "1722 pieces; <image> is id 1722, the embedding has 1728 rows" in capsys.readouterr().out
    again, shipped = (SentencePieceProcessor(model_file=str(f / "tokenizer.model")) for f in (tmp_path, BUNDLED_FOLDER))
    assert [again.id_to_piece(i) for i in range(again.vocab_size())] == [shipped.id_to_piece(i) for i in range(1722)]


@pytest.mark.long
def test_every_word_is_one_piece(pieces):
    """Breaks when a word of a task falls apart: answers grow long, and the alignment loss has no single target."""
    bare, plurals = words()
    assert all(len(pieces.encode(text)) == 1 for word in bare for text in (word, f" {word}"))
    assert all(len(pieces.encode(f" {word}")) == 1 for word in plurals)
    samples = [s for task in scenes.TASKS for s in stream(task, "train", 300)]
    samples += [s for kind in scenes.NEEDLES for s in scenes.needle(kind, "test", 0, negative=True).samples()]
    for text in {text for s in samples for text in (f"{s.prefix}\n", s.suffix)}:
        # a space before a box stands alone, as in PaliGemma: the box is a symbol of its own
        expected = re.findall(r"<loc\d{4}>| ?\w+| ?[^\w\s<]| |\n", text)
        assert [piece.replace("▁", " ") for piece in pieces.encode(text, out_type=str)] == expected


def test_tokenizer_agrees_with_transformers(pieces):
    """Breaks when the model, shipped in the published format, gets other ids in transformers."""
    vocabulary = {pieces.id_to_piece(i): i for i in range(pieces.vocab_size())}
    theirs = GemmaTokenizer(vocab=vocabulary, merges=generate_merges(vocabulary))
    theirs.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in ("\n", *LOCATIONS)])
    assert len(theirs) == pieces.vocab_size()  # nothing was missing, <image> comes next
    texts = [text for task in scenes.TASKS for s in stream(task, "train", 20) for text in (f"{s.prefix}\n", s.suffix)]
    for text in (*texts, "  a  cathedral, über 12 dogs\n", "detect horses ; <loc0100> 🐶"):
        assert theirs(text, add_special_tokens=False)["input_ids"] == pieces.encode(text), text
