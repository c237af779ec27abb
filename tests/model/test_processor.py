"""The processor against transformers' PaliGemmaProcessor, bit for bit, and what it refuses.

The tokenizer is a sentencepiece model trained here on a few sentences, with Gemma's settings and PaliGemma's
location pieces; transformers' GemmaTokenizer is built from its pieces.
"""

import dataclasses
import json
import os
import pickle
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from transformers import PaliGemmaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

import model.images as images_module
from model.common import UserError
from model.config import PRESETS, PaliGemmaConfig, TextConfig, VisionConfig
from model.images import load_image, to_pixels
from model.paligemma import PaliGemma, initialize
from model.processor import Batch, Processor, load_tokenizer, parse_boxes
from model.source import BUNDLED_FOLDER, resolve
from model.tokenizer import LOCATIONS
from tests.model.test_images import SIDE, picture
from tests.pieces import gemma_tokenizer, train_pieces

TOKENS = 16
SYMBOLS = ["<mask>", "\n", "\n\n", "▁▁", "▁▁▁", *LOCATIONS]
CORPUS = """answer en where is the cow standing?
answer en how many dogs are in the picture?
caption en the cow is standing in the green field beside two dogs
detect cat ; dog
the cat is on the mat, and the dog isn't; 12 34 567.
what is the colour of the bus? red and white
segment the largest animal in the photograph
日本語のテキスト と 絵
un éléphant gris près de l'étang""".splitlines()
TEXTS = [
    "answer en where is the cow standing?",
    "caption en",
    "  two leading spaces",
    " one, and a trailing one ",
    "a prompt that ends in a newline\n",
    "two\n\nlines",
    "tab\there",
    "日本語 éléphant 🐮 zß½",
    "e\u0301 is no é, \u00a0 no space, \u3000 neither",
    "<loc0100><loc0000><loc1023><loc0512> cat ; <seg007>",
    "<mask> is a piece, <loc> and </s> are not",
    "x" * 200,
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A model folder as Processor.from_source takes it: config.json and tokenizer.model."""
    folder = tmp_path_factory.mktemp("model")
    train_pieces(folder / "tokenizer", CORPUS * 3, 1600, SYMBOLS)
    pieces = load_tokenizer(folder / "tokenizer.model").vocab_size()
    config = PaliGemmaConfig(
        VisionConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=SIDE),
        TextConfig("gemma", pieces + 8, 24, 32, num_hidden_layers=1, num_attention_heads=2, head_dim=8),
        image_token_id=pieces,
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


@pytest.fixture(scope="session")
def processor(folder) -> Processor:
    return Processor.from_source(folder)


@pytest.fixture(scope="session")
def hf(folder) -> PaliGemmaProcessor:
    tokenizer = gemma_tokenizer(folder / "tokenizer.model", SYMBOLS)
    pictures = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    pictures.image_seq_length = TOKENS
    return PaliGemmaProcessor(pictures, tokenizer)


def assert_same_batch(batch: Batch, expected) -> None:
    for name in ("input_ids", "token_type_ids", "attention_mask", "labels", "pixel_values"):
        ours, theirs = getattr(batch, name), expected[name]
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name


# ---------------------------------------------------------------------------------------------------------------------
# Layout and tokens
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("with_suffix", [False, True])
def test_batch_equals_transformers(folder, hf, side, with_suffix, monkeypatch):
    """Breaks when layout, padding, types, labels or pixels differ from what PaliGemma was trained on."""
    monkeypatch.setattr(hf.tokenizer, "padding_side", side)
    images = [picture(seed=i) for i in range(len(TEXTS))]
    suffixes = [TEXTS[-1 - i] for i in range(len(TEXTS))] if with_suffix else None
    batch = Processor.from_source(folder, padding_side=side)(images, TEXTS, suffixes)
    expected = hf(images=images, text=TEXTS, suffix=suffixes, padding="longest", return_tensors="pt")
    assert_same_batch(batch, expected)
    assert (batch.attention_mask.sum(1) < batch.input_ids.shape[1]).any()  # some row is padded
    assert (batch.labels >= 0).any() == with_suffix


@pytest.mark.parametrize("mark", ["", "<image>"])
def test_rows_of_several_pictures_equal_transformers(processor, hf, mark):
    """Breaks when a row of two pictures gets one block of image tokens, or `<image>` before a text two."""
    images = [[picture(seed=0), picture(seed=1)][: 1 if mark else 2], [picture(seed=2)]]
    prompts = [mark + text for text in TEXTS[:2]]
    expected = hf(images=images, text=prompts, suffix=["left", "a cow"], padding="longest", return_tensors="pt")
    assert_same_batch(processor(images, prompts, ["left", "a cow"]), expected)


def test_layout_by_hand(processor):
    """Breaks when a part of the sequence moves: image, bos, prompt and newline | answer, eos."""
    encode, config = processor.tokenizer.encode, processor.config
    batch = processor([picture(), None], ["caption en", "caption en"], ["a cow", "a cow"])
    prompt, answer = [2, *encode("caption en\n")], [*encode("a cow"), 1]
    assert batch.input_ids[0].tolist() == [config.image_token_id] * TOKENS + prompt + answer
    assert batch.input_ids[1].tolist() == [0] * TOKENS + prompt + answer  # text alone, padded before bos
    assert batch.attention_mask[1].tolist() == [0] * TOKENS + [1] * len(prompt + answer)
    assert batch.token_type_ids[0].tolist() == [0] * (TOKENS + len(prompt)) + [1] * len(answer)
    assert batch.labels[0].tolist() == [-100] * (TOKENS + len(prompt)) + answer


def test_random_text_encodes_as_transformers_does(processor, hf):
    """Breaks when spaces, newlines, bytes or location tokens come out as other ids than in training."""
    rng = random.Random(0)
    parts = [*"abcdeghnotw 12,.?'\n\t<>é日🐮ß", "  ", "the ", "cow", "<loc0007>", "<seg127>", "<loc12>"]
    for _ in range(300):
        text = "".join(rng.choices(parts, k=rng.randint(1, 25)))
        if " " * 4 in text:
            continue  # runs of spaces are pieces up to 3 here, up to 31 in Gemma; beyond, the two libraries differ
        ids = processor.encode(text)
        assert ids == hf.tokenizer(text, add_special_tokens=False)["input_ids"], repr(text)
        assert processor.decode([*ids, 1, 99, 98]) == hf.tokenizer.decode([*ids, 1], skip_special_tokens=True) == text


def test_decode_drops_control_tokens(processor):
    """Breaks when padding, image tokens or rows beyond the vocabulary reach the answer's text."""
    ids, pieces = processor.encode("a cow"), processor.tokenizer.vocab_size()
    noisy = [0, 2, pieces, *ids[:1], 3, pieces + 5, -100, *ids[1:], 1, *ids]
    assert processor.decode(noisy) == processor.decode(torch.tensor(noisy)) == "a cow"
    assert processor.decode([]) == processor.decode([1, *ids]) == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([None], ["read <bos> here"]), "row 0: .*<bos>"),
        (([None], ["x"], ["read <eos> here"]), "row 0: .*<eos>"),
        (([None], ["x"], ["read <image> here"]), "row 0: .*<image>"),
        (([None, None], ["x", " \n"]), "row 1: the prefix is"),
        (([None], ["x"], [""]), "row 0: .*the suffix ''"),
        (([None], ["<image> x"]), "row 0: 1 <image> in the prompt for 0"),
        (([None], ["<loc1024> x"]), "row 0: .*<loc1024>"),
        (([[picture(), None]], ["x"]), "NoneType passed as a picture"),
    ],
)
def test_bad_rows(processor, arguments, message):
    """Breaks when a text ends a sequence or adds a picture unnoticed, or a bad row does not say which it is."""
    with pytest.raises(UserError, match=message):
        processor(*arguments)


def test_max_length_is_an_error_and_never_a_cut(folder, processor):
    """Breaks when a long prompt loses its end silently."""
    length = len(processor.layout(1, "caption en", "a cow")[0])
    assert len(Processor.from_source(folder, max_length=length).layout(1, "caption en", "a cow")[0]) == length
    with pytest.raises(UserError, match=f"{length} tokens, but max_length is {length - 1}"):
        Processor.from_source(folder, max_length=length - 1).layout(1, "caption en", "a cow")


def test_a_picture_given_twice_is_opened_once(processor, tmp_path, monkeypatch):
    """Breaks when shared pictures are decoded again, or when image_index joins different ones."""
    opened = []
    monkeypatch.setattr(images_module, "load_image", lambda *a: opened.append(a[0]) or load_image(*a))
    path = tmp_path / "a.png"
    picture(seed=1).save(path)
    same, equal = picture(), picture()
    batch = processor([[same, path], None, same, str(path), equal], ["x"] * 5)
    assert len(opened) == 3
    assert batch.image_index.tolist() == [0, 1, 0, 1, 2]
    assert len(batch.pixel_values) == 3
    for number, given in enumerate((same, path, equal)):
        assert torch.equal(batch.pixel_values[number], to_pixels(load_image(given), SIDE))
    assert not torch.equal(batch.pixel_values[0], batch.pixel_values[1])


@torch.no_grad()
def test_batch_feeds_the_model(processor):
    """Breaks when the batch and the model disagree: padding, rows without a picture, or one picture for two rows."""
    net = initialize(PaliGemma(processor.config)).eval()
    shared = picture()
    batch = processor([shared, None, shared], ["caption en", "what is a cow?", "detect cat"], ["a", "b", "c"])
    arguments = (batch.token_type_ids, batch.attention_mask)
    logits = net(batch.input_ids, batch.pixel_values, *arguments, image_index=batch.image_index)
    assert len(batch.pixel_values) == 1
    by_slot = batch.pixel_values[batch.image_index]
    torch.testing.assert_close(net(batch.input_ids, by_slot, *arguments), logits)
    alone = processor([None], ["what is a cow?"], ["b"])
    assert alone.pixel_values.shape == (0, 3, SIDE, SIDE)
    expected = net(alone.input_ids, alone.pixel_values, alone.token_type_ids)[0]
    torch.testing.assert_close(logits[1, -len(expected) :], expected, atol=1e-5, rtol=1e-5)


def test_processor_crosses_process_borders(processor):
    """Breaks when a DataLoader's spawned workers cannot receive the processor."""
    copy = pickle.loads(pickle.dumps(processor))
    ours, theirs = processor([picture()], ["caption en"], ["a cow"]), copy([picture()], ["caption en"], ["a cow"])
    assert all(torch.equal(getattr(ours, f.name), getattr(theirs, f.name)) for f in dataclasses.fields(ours))


# ---------------------------------------------------------------------------------------------------------------------
# Boxes
# ---------------------------------------------------------------------------------------------------------------------


def test_boxes_by_hand():
    """Breaks when x and y are swapped, or the last place is not the far side, as in the published decoder."""
    text = "<loc0256><loc0000><loc0512><loc1023> brown cow ; <loc0000><loc0512><loc1023><loc0768>dog"
    assert parse_boxes(text, 2046, 1023) == [
        ("brown cow", (0.0, 256.0, 2046.0, 512.0)),
        ("dog", (1024.0, 0.0, 1536.0, 1023.0)),
    ]


def test_answers_that_are_not_quite_boxes():
    """Breaks when a model's malformed answer raises, or is drawn somewhere."""
    box = "<loc0001><loc0002><loc0003>"
    for text, labels in (
        ("no cow here", []),
        (f"{box} cow", []),
        (f"{box}<loc0004><loc0005> cow", []),
        (f"{box}<loc1024> cow", []),
        (f"cow ; {box}<loc0004> dog ; {box}<loc0004>", ["dog", ""]),
        (f"{box}<loc0004><seg001><seg127> cow", ["cow"]),
    ):
        assert [label for label, _ in parse_boxes(text, 100, 100)] == labels


# ---------------------------------------------------------------------------------------------------------------------
# Sources
# ---------------------------------------------------------------------------------------------------------------------


def test_presets_use_the_bundled_tokenizer_and_folders_win_over_names(folder, tmp_path, monkeypatch):
    """Breaks when a big preset gets a small tokenizer, or a user's folder is ignored because it is called like it."""
    assert Processor.from_source("tiny").config == PRESETS["tiny"]
    with pytest.raises(UserError, match="paligemma-3b-224: this preset has random weights and no tokenizer"):
        Processor.from_source("paligemma-3b-224")
    monkeypatch.chdir(tmp_path)
    os.symlink(folder, tmp_path / "paligemma-3b-224")
    assert Processor.from_source("paligemma-3b-224").config.vision.image_size == SIDE


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("tokenizer.model", None, "not found, nor a tokenizer.model: copy either .*paligemma-3b-pt-224"),
        ("tokenizer.model", b"version https://git-lfs.github.com/spec/v1\n", "not a sentencepiece model"),
        ("config.json", None, "config.json: not found"),
        ("config.json", {"eos_token_id": 5}, "of another model: its eos id is 1, but config.json says 5"),
        ("config.json", {"image_token_index": 300}, "image token 300 is its piece"),
        ("config.json", {"text_config": {"vocab_size": 256}}, "pieces, but the embedding only 256 rows"),
    ],
)
def test_folders_that_hold_no_processor(folder, tmp_path, file, change, message):
    """Breaks when a missing or foreign tokenizer is found out only by bad answers."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    if isinstance(change, dict):
        raw = json.loads((folder / file).read_text())
        change = {name: raw[name] | value if isinstance(value, dict) else value for name, value in change.items()}
        change = json.dumps(raw | change).encode()
    (tmp_path / file).unlink()
    if change is not None:
        (tmp_path / file).write_bytes(change)
    with pytest.raises(UserError, match=message):
        Processor.from_source(tmp_path)


@pytest.mark.parametrize("nested", [False, True])
def test_pixels_that_are_prepared_otherwise_are_refused(folder, hf, tmp_path, nested):
    """Breaks when a model that was trained with other pixels, as its own file says, is given ours."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    name, sides = "processor_config.json" if nested else "preprocessor_config.json", {"height": SIDE, "width": SIDE}
    for options in (
        *(
            {},
            {"size": {"height": 2 * SIDE, "width": 2 * SIDE}},
            {"resample": 2},
            {"image_mean": [0.485, 0.456, 0.406]},
        ),
        *({"rescale_factor": 1 / 127.5}, {"do_resize": False}, {"do_center_crop": True, "crop_size": sides}),
    ):
        theirs = SiglipImageProcessorPil(**({"size": sides} | options))
        theirs.image_seq_length = TOKENS
        (PaliGemmaProcessor(theirs, hf.tokenizer) if nested else theirs).save_pretrained(tmp_path / "saved")
        shutil.copy(tmp_path / "saved" / name, tmp_path)
        if options:
            with pytest.raises(UserError, match=f"{name}: {next(iter(options))} is "):
                Processor.from_source(tmp_path)
            continue
        pixels = theirs(picture(), return_tensors="pt")["pixel_values"]
        assert torch.equal(Processor.from_source(tmp_path)([picture()], ["a"]).pixel_values, pixels)


def test_sources_that_are_nothing(folder, tmp_path):
    """Breaks when a typing error in a path turns into a download or a traceback."""
    for source in (tmp_path / "none", "./none/at/all", "gpt2", str(folder / "config.json")):
        with pytest.raises(UserError, match="no such folder"):
            resolve(source, ["*"])
    with pytest.raises(UserError, match="revision 'main'"):
        resolve(folder, ["*"], "main")
    assert resolve(folder, ["*"]) == folder and resolve("embedded", ["*"]) == BUNDLED_FOLDER


def test_what_is_asked_of_the_hub(folder, processor, monkeypatch):
    """Breaks when opening a processor downloads gigabytes of weights, or a refusal is a traceback of its library."""
    asked = []

    def download(repo, revision, allow_patterns):
        asked.append((repo, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert Processor.from_source("some/model", revision="v1").config == processor.config
    (call,) = asked
    assert call[:2] == ("some/model", "v1") and not [name for name in call[2] if "safetensors" in name or "*" in name]
    reply = SimpleNamespace(headers={}, request=None, status_code=404)
    for error, message in (
        (errors.GatedRepoError("gated", response=reply), "accept it at https://huggingface.co/some/model"),
        (errors.RepositoryNotFoundError("none", response=reply), "neither a folder here nor a model on the hub"),
        (errors.RevisionNotFoundError("none", response=reply), "no revision 'v9'"),
        (errors.LocalEntryNotFoundError("offline"), "the hub cannot be reached"),
        (OSError("No space left on device\nsecond line"), "the download failed .OSError: No space left"),
    ):
        monkeypatch.setattr(huggingface_hub, "snapshot_download", MagicMock(side_effect=error))
        with pytest.raises(UserError, match=f"^some/model: .*{message}") as caught:
            resolve("some/model", ["config.json"], "v9")
        assert "\n" not in str(caught.value)


@pytest.mark.weights
@pytest.mark.skipif("PALIGEMMA_WEIGHTS" not in os.environ, reason="needs PALIGEMMA_WEIGHTS: a published model's folder")
def test_ids_of_the_published_tokenizer():
    """Breaks when the tokenizer's settings are overridden: ids written down from Gemma's published model."""
    processor = Processor.from_source(os.environ["PALIGEMMA_WEIGHTS"])
    assert processor.encode("\n") == [108] and processor.encode("a\n\n") == [235250, 109]
    assert processor.encode("answer en where is the cow?\n") == [13072, 659, 1570, 603, 573, 13910, 235336, 108]
    assert processor.encode("  a\t日本語 é") == [139, 235250, 226, 62938, 1428]
    assert processor.encode("<loc0000><loc1023><seg000><seg127>") == [256000, 257023, 257024, 257151]
    assert processor.config.image_token_id == 257152
