"""The embedded benchmark and its tokenizer: true answers, disjoint splits, the same bytes everywhere.

Answers are checked by a second reading of the scene: from where objects are drawn, in pixels, with rules of its own.
"""

import hashlib
import random
import re
from collections import Counter, defaultdict

import numpy as np
import pytest
import sentencepiece
from PIL import Image
from transformers import AddedToken, GemmaTokenizer
from transformers.tokenization_utils_base import generate_merges

from eval import pictures, scenes
from eval.records import sample_record
from model.common import UserError
from model.processor import Processor
from model.source import BUNDLED_FOLDER
from train.data.batches import collate
from train.embedded.tokenizer import main, train_tokenizer, words

MODEL_FILE = BUNDLED_FOLDER / "tokenizer.model"
LOCATIONS = [f"<loc{value:04d}>" for value in range(1024)]


@pytest.fixture(scope="module")
def pieces() -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(MODEL_FILE))


def stream(task: str, split: str, count: int, seed: int = 0) -> list[pictures.Sample]:
    return [scenes.sample(task, split, index, seed) for index in range(count)]


# --- a second reading of a scene --------------------------------------------------------------------------------------


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
    return len(objects) if noun == "objects" else sum(name in group for name, _, _ in objects)


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


def boxes(suffix: str) -> list[tuple[tuple[int, ...], str]]:
    found = re.findall(r"<loc(\d{4})><loc(\d{4})><loc(\d{4})><loc(\d{4})> (\S+)", suffix)
    return [(tuple(map(int, values)), name) for *values, name in found]


def inside(box: tuple[int, ...], x: float, y: float) -> bool:
    top, left, bottom, right = (value * 112 / 1024 for value in box)
    return left <= x <= right and top <= y <= bottom


# --- splits and determinism -------------------------------------------------------------------------------------------


@pytest.mark.long
def test_every_composition_belongs_to_one_split():
    """Breaks when a scene leaks from one split into another."""
    compositions = defaultdict(set)
    for task in scenes.TASKS:
        for split in pictures.SPLITS:
            for seed in (0, 1):
                compositions[split] |= {sample.scene.squares for sample in stream(task, split, 60, seed)}
    for strategy in scenes.STRATEGIES:
        compositions["test"] |= {sample.scene.squares for sample in scenes.pope(strategy, images=20)}
    compositions["test"] |= {
        scenes.needle("n2o2", "test", i, needles=2, negative=True).scene.squares for i in range(20)
    }
    train, validation, test = (compositions[split] for split in pictures.SPLITS)
    assert min(map(len, (train, validation, test))) > 300
    assert not train & validation and not train & test and not validation & test
    assert all(pictures.split_of(squares) == split for split, group in compositions.items() for squares in group)


def test_splits_hold_the_promised_shares():
    """Breaks when the hash starves a split: its scenes would take for ever to draw."""
    single = [
        tuple(name if i == square else "none" for i in range(16)) for square in range(16) for name in pictures.NAMES
    ]
    shares = Counter(map(pictures.split_of, single))
    assert abs(shares["train"] / 640 - 6 / 8) < 0.05 and min(shares["test"], shares["validation"]) > 640 / 8 - 25


def test_samples_depend_on_nothing_but_their_address():
    """Breaks when order, a global generator or a cache decides what a sample is."""
    addresses = [(task, split, index) for task in scenes.TASKS for split in ("train", "test") for index in (0, 7, 200)]
    first = {address: scenes.sample(*address) for address in addresses}
    random.seed(1)
    np.random.seed(1)
    scenes.vqa_picture.cache_clear()
    for address in reversed(addresses):
        again = scenes.sample(*address)
        assert again == first[address]
        assert np.array_equal(again.scene.render(), first[address].scene.render())
    assert scenes.sample("vqa", "train", 0, seed=1) != scenes.sample("vqa", "train", 0, seed=0)


def test_the_benchmark_is_the_published_one():
    """Breaks when the test scenes or questions change: figures measured before are then of another benchmark."""
    digest = hashlib.sha256()
    for task in scenes.TASKS:
        for s in stream(task, "test", 50):
            text = repr((s.prefix, s.suffix, s.scene.objects, s.scene.ground))
            digest.update(text.replace("Placed(square=", "Placed(cell=").encode())  # as it was named when published
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


def test_unknown_names_are_refused():
    """Breaks when a typing error ends in a traceback, or in the scenes of no split."""
    for call, message in (
        (lambda: scenes.sample("scam", "train", 0), "task is 'scam': expected one of scan, "),
        (lambda: scenes.sample("scan", "val", 0), "split is 'val': expected one of train, validation, test"),
        (lambda: scenes.needle("n8o1", "test", 0), "needle kind is 'n8o1'"),
        (lambda: scenes.needle("n2o1", "test", 0, needles=5), "5 needles in 2×2 sub-images: expected 1 to 4"),
        (lambda: scenes.pope("hard"), "strategy is 'hard'"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            call()


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_sprites_are_all_there_and_attributed():
    """Breaks when a sprite is missing, the pictures grow, or their licence gets lost."""
    files = {path.stem: path for path in pictures.SPRITES.glob("*.webp")}
    assert sorted(files) == sorted(pictures.NAMES) and len(files) == 40
    assert [len(names) for names in pictures.CATEGORIES.values()] == [12, 12, 8, 8]
    assert sum(path.stat().st_size for path in files.values()) < 100_000
    for path in files.values():
        with Image.open(path) as image:
            assert (image.size, image.mode) == ((64, 64), "RGBA")
    licence = (pictures.SPRITES / "LICENSE").read_text()
    assert "MIT License" in licence and "Copyright (c) Microsoft Corporation" in licence and "Fluent Emoji" in licence
    assert all(re.search(rf"^  {name} ", licence, re.M) for name in pictures.NAMES)


def test_rendering_agrees_with_pillow():
    """Breaks when sprites turn transparent, shift, lose their mirroring or brightness, or a level wraps around."""
    for index in range(12):
        scene = scenes.sample("scan", "train", index).scene
        (grey, down, across) = (np.array(values, float) for values in scene.ground)
        ramp = (np.arange(112) * 2 - 111)[:, None] / 112
        ground = grey + (ramp * down)[:, None] + (ramp * across)[None, :]
        expected = Image.fromarray(ground.round().astype(np.uint8))
        for placed in scene.objects:
            sprite = Image.open(pictures.SPRITES / f"{placed.name}.webp").resize((placed.size,) * 2, Image.BICUBIC)
            if placed.mirrored:
                sprite = sprite.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            bright = Image.merge(
                "RGB", [c.point(lambda v, b=placed.brightness: min(255, v * b // 128)) for c in sprite.split()[:3]]
            )
            row, column = divmod(placed.square, 4)
            expected.paste(bright, (28 * column + placed.x, 28 * row + placed.y), sprite.getchannel("A"))
        difference = np.abs(scene.render().astype(int) - np.asarray(expected, int))
        # half-transparent rims that are brightened may differ: there the clipping comes before or after the blend
        assert np.quantile(difference, 0.99) <= 4 and difference.mean() < 1


def test_objects_stay_in_their_squares_and_vary():
    """Breaks when an object crosses into the next patch, or jitter, scale, mirroring or brightness stop varying."""
    looks = defaultdict(set)
    for index in range(60):
        scene = scenes.sample("vqa", "train", index * 6).scene
        bare = pictures.Scene(scene.squares, (), scene.ground)
        touched = (scene.render() != bare.render()).any(axis=-1).reshape(4, 28, 4, 28).any(axis=(1, 3)).reshape(-1)
        assert [bool(t) for t in touched] == [name != "none" for name in scene.squares]
        assert 1 <= len(scene.objects) <= 5
        for placed in scene.objects:
            assert 0.78 < placed.size / 28 <= 1 and 0.85 <= placed.brightness / 128 <= 1.102
            assert placed.x + placed.size <= 28 and placed.y + placed.size <= 28
            for name in ("size", "x", "y", "mirrored", "brightness"):
                looks[name].add(getattr(placed, name))
    assert {name: len(values) >= (2 if name == "mirrored" else 6) for name, values in looks.items()} == dict.fromkeys(
        ("size", "x", "y", "mirrored", "brightness"), True
    )


@pytest.mark.parametrize("chance", [0.0, 1 - 2**-53])
def test_the_most_extreme_ground_does_not_wrap_around(chance, monkeypatch):
    """Breaks when the darkest or brightest ground leaves 0 to 255."""
    monkeypatch.setattr(pictures.Dice, "random", lambda dice: chance)
    picture = pictures.paint(pictures.Dice(0), ("none",) * 16).render().astype(int)
    assert picture.max() - picture.min() > 100
    assert np.abs(np.diff(picture, axis=0)).max() <= 1 and np.abs(np.diff(picture, axis=1)).max() <= 1


# --- answers ----------------------------------------------------------------------------------------------------------


def test_vqa_answers_are_true_and_the_only_true_ones():
    """Breaks when an answer is wrong, a question has two right answers, or a picture gets a question twice."""
    for image_id in range(150):
        samples = scenes.vqa_picture("test", image_id)
        assert [s.answer_type for s in samples] == ["yes/no", "yes/no", "number", "other", "other", "other"]
        assert len({s.prefix for s in samples}) == 6
        for s in samples:
            assert s.prefix == f"answer en {s.question}"
            assert s.question.lower().startswith(s.question_type)
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
        found = boxes(s.suffix)
        assert len(found) == len(middles) > 0 and s.suffix.count(" ; ") == len(found) - 1
        assert all(label == name and inside(b, x, y) for (b, label), (x, y) in zip(found, middles, strict=True))


def test_dense_detection_lists_everything_and_masks_the_names(pieces):
    """Breaks when the list of all objects is wrong, or the loss falls on names in random order, or misses a box."""
    shuffled = False
    for s in stream("detect_all", "train", 100):
        found = re.findall(r"(\w+)<loc(\d{4})><loc(\d{4})>", s.suffix)
        assert s.suffix == " ".join(f"{name}<loc{y}><loc{x}>" for name, y, x in found)
        found = [((int(y), int(x), int(y) + 256, int(x) + 256), name) for name, y, x in found]
        objects = seen(s.scene)
        assert s.prefix == "detect" and sorted(name for _, name in found) == sorted(name for name, _, _ in objects)
        left = list(objects)
        for b, name in found:  # of one name, the first in raster order comes first
            first = next(o for o in left if o[0] == name)
            assert inside(b, first[1], first[2])
            left.remove(first)
        shuffled |= [name for _, name in found] != [name for name, _, _ in objects]
        end, masked, kept = 0, [], []
        for piece in pieces.encode(s.suffix, out_type=str):
            start, end = end, end + len(piece)
            (masked if any(a <= start and end <= b for a, b in s.unsupervised) else kept).append(piece.strip("▁"))
        assert masked == [name for _, name in found]
        assert set(kept) <= set(LOCATIONS) and len(kept) == 2 * len(found)
    assert shuffled


# --- balance ----------------------------------------------------------------------------------------------------------


def test_blind_baseline_is_the_most_frequent_train_answer():
    """Breaks when the blind baseline is not the one worked out by hand."""

    def made(prefix: str, answer: str, kind: str = "number") -> pictures.Sample:
        return pictures.Sample("vqa", None, prefix, answer, 0, 0, "how many", kind)

    train = [made("dogs?", "1"), made("dogs?", "2"), made("dogs?", "2"), made("cats?", "3"), made("cats?", "0")]
    test = [made("dogs?", "2"), made("dogs?", "1"), made("cats?", "0"), made("pigs?", "2"), made("is?", "no", "yes/no")]
    # dogs → 2; cats → 0 (a tie, the first in order); pigs, never asked → 2, as "how many" in general
    assert scenes.blind(train, test) == {"overall": 60.0, "number": 75.0, "yes/no": 0.0}


@pytest.mark.long
def test_answers_are_balanced():
    """Breaks when a model that never looks at the picture does well."""
    accuracy = scenes.blind(stream("vqa", "train", 12000), stream("vqa", "test", 1800))
    print("blind:", {group: round(value, 1) for group, value in accuracy.items()})
    assert 28 < accuracy["overall"] < 37
    assert 50 <= accuracy["yes/no"] < 60 and 30 < accuracy["number"] < 48 and 12 < accuracy["other"] < 20
    for kind, chance in (("n2o1", 50), ("n2o2", 50), ("n4o1", 100 / 16)):  # of one question
        assert scenes.blind(stream(kind, "train", 4000), stream(kind, "test", 320))["overall"] < chance + 8


def test_vqav2_files_have_the_official_layout():
    """Breaks when the official scorer or a reader of VQAv2 could not take the embedded split."""
    questions, annotations = scenes.vqav2_files("test", images=5)
    head = {"info", "task_type", "data_type", "license", "data_subtype"}
    assert set(questions) == head | {"questions"} and set(annotations) == head | {"annotations"}
    assert all(set(q) == {"image_id", "question", "question_id"} for q in questions["questions"])
    assert len({q["question_id"] for q in questions["questions"]}) == 30
    for i, (q, a) in enumerate(zip(questions["questions"], annotations["annotations"], strict=True)):
        types = {"question_type", "answer_type"}
        assert set(a) == types | {"question_id", "image_id", "multiple_choice_answer", "answers"}
        assert (a["question_id"], a["image_id"]) == (q["question_id"], q["image_id"])
        assert [answer["answer_id"] for answer in a["answers"]] == list(range(1, 11))
        assert all(set(r) == {"answer", "answer_confidence", "answer_id"} for r in a["answers"])
        sample = scenes.sample("vqa", "test", i)
        assert {r["answer"] for r in a["answers"]} == {a["multiple_choice_answer"]} == {sample.suffix}
        assert q["question"] == sample.question


# --- needles ----------------------------------------------------------------------------------------------------------


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
        assert needle.n == n and all(len(names) == objects for names in parts(needle).values())
        (target,) = needle.targets
        (caption,) = needle.captions
        assert [spot for spot, names in parts(needle).items() if set(nouns(caption)) <= set(names)] == [target]
        assert parts(needle)[target] == nouns(caption)
        turns[target] += 1
        asked = {s.prefix: s.suffix for s in needle.samples()}
        head = f"Caption: {caption}. Where is the caption? "
        row, column = target
        assert asked == (
            {head + "Top or Bottom?": ["top", "bottom"][row], head + "Left or Right?": ["left", "right"][column]}
            if n == 2
            else {head + "Row and Column?": f"row {row + 1} column {column + 1}"}
        )
    assert set(turns.values()) == {4} and len(turns) == n**2
    streamed = [s for index in range(8) for s in scenes.needle(kind, "train", index).samples()]
    assert streamed == stream(kind, "train", len(streamed))


def test_distractors_share_one_object_with_the_needle():
    """Breaks when one of the two objects alone tells where the needle is."""
    for index in range(60):
        needle = scenes.needle("n2o2", "test", index)
        wanted = set(nouns(needle.captions[0]))
        others = [set(names) for spot, names in parts(needle).items() if spot != needle.targets[0]]
        assert all(len(wanted & other) == 1 for other in others)
        assert set.union(*others) >= wanted


@pytest.mark.parametrize("kind", scenes.NEEDLES)
@pytest.mark.parametrize("needles", [1, 2])
def test_negatives_and_several_needles(kind, needles):
    """Breaks when an absent needle can be found, or the second needle is not where it is said to be."""
    for index in range(20):
        absent = scenes.needle(kind, "test", index, needles=needles, negative=True)
        assert absent.targets == ((-1, -1),) * needles
        assert len({frozenset(nouns(caption)) for caption in absent.captions}) == needles
        for caption in absent.captions:
            assert not any(set(nouns(caption)) <= set(names) for names in parts(absent).values())
            if kind == "n2o2":  # both objects are there, apart
                assert set(nouns(caption)) <= set(absent.scene.squares)
        assert {s.suffix for s in absent.samples()} == {"none"}
        there = scenes.needle(kind, "test", index, needles=needles)
        assert len(set(there.targets)) == needles
        assert [parts(there)[target] for target in there.targets] == [nouns(caption) for caption in there.captions]
        assert len({s.question_id for s in there.samples()}) == len(there.samples())


# --- POPE -------------------------------------------------------------------------------------------------------------


def test_pope_asks_about_present_and_absent_objects_in_turn():
    """Breaks when labels are wrong or unbalanced, or the strategies differ in more than the absent objects."""
    polls = {strategy: scenes.pope(strategy, images=60) for strategy in scenes.STRATEGIES}
    frequency, company = scenes.object_statistics()
    fame, closeness = Counter(), Counter()
    for strategy, poll in polls.items():
        assert len(poll) == 360 and [s.suffix for s in poll] == ["yes", "no"] * 180
        assert [s.question_id for s in poll] == list(range(1, 361))
        assert [s.prefix for s in poll[::2]] == [s.prefix for s in polls["random"][::2]]
        assert all(s.scene == other.scene for s, other in zip(poll, polls["random"], strict=True))
        for start in range(0, 360, 6):
            assert len({s.prefix for s in poll[start : start + 6]}) == 6
        for yes, no in zip(poll[::2], poll[1::2], strict=True):
            assert truth(yes.question, seen(yes.scene)) == {"yes"} and truth(no.question, seen(no.scene)) == {"no"}
            present, absent = (s.question.split()[3] for s in (yes, no))
            fame[strategy] += frequency[absent]
            closeness[strategy] += company[present][absent]
    assert fame["popular"] > 1.5 * fame["random"] and closeness["adversarial"] > 2 * closeness["random"]


def test_objects_have_favourites_and_company():
    """Breaks when popular and adversarial questions have nothing to exploit."""
    frequency, company = scenes.object_statistics()
    assert frequency["dog"] > 2 * frequency["butterfly"]
    for name, partner in (("lion", "elephant"), ("key", "clock"), ("cat", "dog")):
        assert company[name].most_common(1)[0][0] == partner
    assert all(company[a][b] == company[b][a] for a in pictures.NAMES for b in pictures.NAMES)


# --- tokenizer --------------------------------------------------------------------------------------------------------


def test_tokenizer_is_made_the_same_again(pieces, tmp_path, capsys):
    """Breaks when the shipped pieces are not those that the command makes: every row of the embedding would move."""
    main(["--out", str(tmp_path / "tokenizer.model")])
    assert "1722 pieces; <image> is id 1722, the embedding has 1728 rows" in capsys.readouterr().out
    again = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert [again.id_to_piece(i) for i in range(again.vocab_size())] == [pieces.id_to_piece(i) for i in range(1722)]
    assert train_tokenizer() == (tmp_path / "tokenizer.model").read_bytes()


def test_tokenizer_has_the_ids_of_gemma(pieces):
    """Breaks when a control id moves, or text is normalised, trimmed or given a space in front."""
    assert (pieces.pad_id(), pieces.eos_id(), pieces.bos_id(), pieces.unk_id()) == (0, 1, 2, 3)
    assert [pieces.id_to_piece(i) for i in range(4)] == ["<pad>", "<eos>", "<bos>", "<unk>"]
    first = pieces.piece_to_id("<loc0000>")
    assert [pieces.piece_to_id(piece) for piece in LOCATIONS] == list(range(first, first + 1024))
    assert MODEL_FILE.stat().st_size < 50_000
    assert pieces.encode("dog dog\n", out_type=str) == ["dog", "▁dog", "\n"]
    for text in ("", " ", "  a  dog ", "Ünïcode 🐶\t…", "<loc0003><loc1024> cathedral\n\n", "ﬁ ① Å"):
        assert pieces.decode(pieces.encode(text)) == text
        assert pieces.unk_id() not in pieces.encode(text)


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
