"""The processor against transformers' PaliGemmaProcessor, bit for bit, and what it refuses.

The tokenizer is a sentencepiece model trained here on a few sentences, with Gemma's settings and
PaliGemma's
location pieces; transformers' GemmaTokenizer is built from its pieces.
"""

import json
import os
import pickle
import random
import shutil
from functools import partial

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from transformers import PaliGemmaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

import model.images as images_module
from model.boxes import parse_objects
from model.config import PRESETS, PaliGemmaConfig, TextConfig, VisionConfig
from model.images import load_image, to_pixels
from model.processor import Processor, load_tokenizer
from model.source import BUNDLED_FOLDER, resolve
from model.tokenizer import LOCATIONS
from tests.files import json_lines, picture, read_json, write_json
from tests.pieces import SENTENCES, gemma_tokenizer, train_pieces
from tests.runs import refused

TOKENS = 16
SIDE = 56
SIDES = {"height": 56, "width": 56}
SYMBOLS = ["<mask>", "\n", "\n\n", "▁▁", "▁▁▁", *LOCATIONS]
TEXTS = """answer en where is the cow standing?|caption en|  two leading spaces, and a trailing one |ends in a newline
|two

lines, a tab\there|日本語 éléphant 🐮 zß½; e\u0301 is no é, \u00a0 no space, \u3000 neither
|<mask>, <loc> and </s>|""".split("|")
TEXTS = [*TEXTS[:-1], "<loc0100><loc0000><loc1023><loc0512> cat ; <seg007>", "x" * 200]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A model folder as Processor.from_source takes it: config.json and tokenizer.model."""
    folder = tmp_path_factory.mktemp("model")
    train_pieces(folder / "tokenizer", SENTENCES * 3, 1600, SYMBOLS)
    pieces = load_tokenizer(folder / "tokenizer.model").vocab_size()
    config = PaliGemmaConfig(
        VisionConfig(16, 24, 1, 2, 14, SIDE),
        TextConfig("gemma", pieces + 8, 24, 32, 1, 2, 1, 8),
        pieces,
    )
    write_json(folder / "config.json", config.to_dict())
    return folder


@pytest.fixture(scope="session")
def processor(folder):
    return Processor.from_source(folder)


@pytest.fixture(scope="session")
def hf(folder):
    pictures = SiglipImageProcessorPil(size=SIDES)
    pictures.image_seq_length = TOKENS
    return PaliGemmaProcessor(pictures, gemma_tokenizer(folder / "tokenizer.model", SYMBOLS))


def assert_same_batch(batch, expected):
    for name in "input_ids token_type_ids attention_mask labels pixel_values".split():
        assert getattr(batch, name).dtype == expected[name].dtype
        assert torch.equal(getattr(batch, name), expected[name])


@pytest.mark.parametrize("with_suffix", [False, True])
def test_batch_equals_transformers(processor, hf, with_suffix):
    """Breaks when layout, padding, types, labels or pixels differ from what PaliGemma was trained
    on."""
    images = [picture(seed=i) for i in range(len(TEXTS))]
    suffixes = TEXTS[::-1] if with_suffix else None
    batch = processor(images, TEXTS, suffixes)
    assert_same_batch(
        batch,
        hf(images=images, text=TEXTS, suffix=suffixes, padding="longest", return_tensors="pt"),
    )
    assert (batch.attention_mask.sum(1) < batch.input_ids.shape[1]).any()  # some row is padded


@pytest.mark.parametrize("mark", ["", "<image>"])
def test_rows_of_several_pictures_equal_transformers(processor, hf, mark):
    """Breaks when a row of two pictures gets one block of image tokens, or `<image>` before a text
    two."""
    images = [[picture(seed=0), picture(seed=1)][: 1 if mark else 2], [picture(seed=2)]]
    prompts = [mark + text for text in TEXTS[:2]]
    expected = hf(
        images=images,
        text=prompts,
        suffix=["left", "a cow"],
        padding="longest",
        return_tensors="pt",
    )
    assert_same_batch(processor(images, prompts, ["left", "a cow"]), expected)


def test_layout_by_hand(processor):
    """Breaks when a part of the sequence moves: image, bos, prompt and newline | answer, eos; and
    turns after them."""
    encode = processor.tokenizer.encode
    config = processor.config
    batch = processor([picture(), None], ["caption en"] * 2, ["a cow"] * 2)
    prompt = [2, *encode("caption en\n")]
    answer = [*encode("a cow"), 1]
    assert (
        batch.input_ids[1].tolist() == [0] * TOKENS + prompt + answer
    )  # text alone, padded before bos
    assert batch.token_type_ids[0].tolist() == [0] * (TOKENS + len(prompt)) + [1] * len(answer)
    ids, types, learned = processor.row_of(
        2, [("one <image> two\n<image>", "a cow"), ("caption en", None)]
    )
    assert processor.row_of(2, [("<image>a<image>b", None)]) == processor.row_of(2, [("a b", None)])
    assert processor.row_of(1, [("is (<image>it)", None)]) == processor.row_of(
        1, [("is (it)", None)]
    )
    first = [config.image_token_id] * 2 * TOKENS + [2, *encode("one two\n")]
    later = encode("caption en\n")
    assert ids == first + answer + later
    assert types == [0] * len(first) + [1] * len(answer + later)
    assert learned == [0] * len(first) + [1] * len(answer) + [0] * len(later)


def test_random_text_encodes_as_transformers_does(processor, hf):
    """Breaks when spaces, newlines, bytes or location tokens come out as other ids than in
    training."""
    rng = random.Random(0)
    parts = [*"abcdeghnotw 12,.?'\n\t<>é日🐮ß", "  ", "the "]
    parts += "cow <loc0007> <seg127> <loc12>".split()
    for _ in range(300):
        text = "".join(rng.choices(parts, k=rng.randint(1, 25)))
        # runs of spaces are pieces up to 3 here, 31 in Gemma; beyond, the two libraries differ
        if " " * 4 in text:
            continue
        ids = processor.encode(text)
        assert ids == hf.tokenizer(text, add_special_tokens=False)["input_ids"], repr(text)
        assert processor.decode([*ids, 1, 99, 98]) == text
        assert hf.tokenizer.decode([*ids, 1], skip_special_tokens=True) == text
    ids = processor.encode("a cow")
    pieces = processor.tokenizer.vocab_size()
    noisy = [0, 2, pieces, *ids[:1], 3, pieces + 5, -100, *ids[1:], 1, *ids]
    assert processor.decode(noisy) == processor.decode(torch.tensor(noisy)) == "a cow"


# pictures, prefixes and suffixes; what is said of them
BAD_ROWS = r"""[[[null], ["read <bos> here"]], "row 0: ", "<bos>"]
[[[null, null], ["x", " \n"]], "row 1: ", "prefix"]
[[[null], ["x"], ["read <image> here"]], "row 0: ", "suffix"]
[[[null], ["<image> x"]], "row 0: ", "1 <image>"]
[[[null], ["LONG"]], "row 0: ", "max_length"]""".replace("LONG", "x " * 9000)


def test_bad_rows(processor):
    """Breaks when a text ends a sequence, adds a picture or is cut, or a bad row does not say which
    it is."""
    for arguments, *parts in json_lines(BAD_ROWS):
        refused(partial(processor, *arguments), *parts)


def test_a_picture_given_twice_is_opened_once(processor, tmp_path, monkeypatch):
    """Breaks when shared pictures are decoded again, or when image_index joins different ones."""
    opened = []
    monkeypatch.setattr(
        images_module, "load_image", lambda source: opened.append(source) or load_image(source)
    )
    path = tmp_path / "a.png"
    picture(seed=1).save(path)
    same = picture()
    equal = picture()
    processor = pickle.loads(pickle.dumps(processor))  # for a DataLoader's workers
    batch = processor([[same, path], None, same, str(path), equal], ["x"] * 5)
    assert len(opened) == len(batch.pixel_values) == 3
    assert batch.image_index.tolist() == [0, 1, 0, 1, 2]
    assert torch.equal(
        batch.pixel_values,
        torch.stack([to_pixels(load_image(p), SIDE) for p in (same, path, equal)]),
    )


def test_boxes_by_hand():
    """Breaks when x and y are swapped, the last place is not the far side, or a malformed answer is
    drawn."""
    text = (
        "<loc0256><loc0000><loc0512><loc1023> brown cow ; <loc0000><loc0512><loc1023><loc0768>dog"
    )
    cow = (0.0, 256.0, 2046.0, 512.0)
    dog = (1024.0, 0.0, 1536.0, 1023.0)
    found = [(said.label, said.box) for said in parse_objects(text, 2046, 1023)]
    assert found == [("brown cow", cow), ("dog", dog)]
    box = "<loc0001><loc0002><loc0003>"
    whole = f"{box}<loc0004>"
    for text, labels in (
        (f"no cow; {box} cow; {whole}<loc0005> cow; {box}<loc1024> cow", []),
        (f"{whole} dog ; {whole}; {whole}<seg001><seg127> cow", ["dog", "", "cow"]),
        # as the published reader: words before a box are no part of it
        (f"there is {whole} dog, and; {whole} {'<seg001>' * 16} cow", ["dog, and", "cow"]),
    ):
        found = parse_objects(text, 100, 100)
        assert [said.label for said in found] == labels
    assert found[1].codes == (1,) * 16


def test_presets_use_the_bundled_tokenizer_and_folders_win_over_names(folder, workplace):
    """Breaks when a big preset gets a small tokenizer, or a user's folder is ignored because it is
    called like it."""
    assert Processor.from_source("tiny").config == PRESETS["tiny"]
    refused(lambda: Processor.from_source("paligemma-3b-224"), "paligemma-3b-224: ", "tokenizer")
    os.symlink(folder, "paligemma-3b-224")
    assert Processor.from_source("paligemma-3b-224").config.vision.image_size == SIDE


# a file | what it says instead | a word of the message
FOREIGN = """tokenizer.model | | not found
tokenizer.model | version https://git-lfs.github.com/spec/v1 | sentencepiece
config.json | {"eos_token_id": 5} | of another model
config.json | {"image_token_index": 300} | of another model
preprocessor_config.json | {"size": {"height": 56, "width": 8}} | size
processor_config.json | {"image_processor": {"image_mean": [0.485, 0.456, 0.406]}} | image_mean
processor_config.json | {"image_processor": [1]} | processor_config.json:
preprocessor_config.json | {"image_processor": "x"} | preprocessor_config.json:"""


@pytest.mark.parametrize("line", FOREIGN.splitlines())
def test_folders_that_hold_no_processor(folder, tmp_path, line):
    """Breaks when a missing or foreign tokenizer, or other pixels in training, are found out only
    by bad answers."""
    name, change, part = map(str.strip, line.split("|"))
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / name
    if name == "config.json":
        write_json(file, read_json(file) | json.loads(change))
    elif change:
        file.write_text(change)
    else:
        file.unlink()
    refused(lambda: Processor.from_source(tmp_path), part)


def test_what_is_asked_of_the_hub(folder, processor, monkeypatch):
    """Breaks when a typing error or a processor downloads gigabytes, or a refusal is a traceback of
    its library."""
    asked = []

    def download(repo, revision, allow_patterns):
        asked.append((repo, revision, allow_patterns))
        if revision == "v9":
            raise errors.LocalEntryNotFoundError("offline\nsecond line")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert Processor.from_source("some/model", revision="v1").config == processor.config
    refused(lambda: Processor.from_source("embedded", revision="v1"), "--revision v1", "embedded")
    (*given, names), *_ = asked
    assert given == ["some/model", "v1"]
    assert not [name for name in names if "safetensors" in name or "*" in name]
    refused(lambda: resolve("some/model", ["config.json"], "v9"), "some/model: ", "offline")
    absent = "./none/at/all gpt2 ~nobody-here/model \x1b[2J/x".split()
    for source in (*absent, folder / "config.json", "n" * 5000):
        refused(partial(resolve, source, ["*"]))
    assert resolve(folder, ["*"]) == folder
    assert resolve("embedded", ["*"]) == BUNDLED_FOLDER
    assert len(asked) == 2


@pytest.mark.weights
@pytest.mark.skipif(
    "PALIGEMMA_WEIGHTS" not in os.environ,
    reason="needs PALIGEMMA_WEIGHTS: a published model's folder",
)
def test_ids_of_the_published_tokenizer():
    """Breaks when the tokenizer's settings are overridden: ids written down from Gemma's published
    model."""
    processor = Processor.from_source(os.environ["PALIGEMMA_WEIGHTS"])
    assert processor.encode("\n") == [108]
    assert processor.encode("a\n\n") == [235250, 109]
    ids = processor.encode("answer en where is the cow?\n")
    assert " ".join(map(str, ids)) == "13072 659 1570 603 573 13910 235336 108"
    assert processor.encode("  a\t日本語 é") == [139, 235250, 226, 62938, 1428]
    assert processor.encode("<loc0000><loc1023><seg127>") == [256000, 257023, 257151]
