"""Gemma's tokenizer.json, read without the package `tokenizers`, against transformers' GemmaTokenizer on any text."""

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
import torch
from transformers import AddedToken, AutoTokenizer, GemmaTokenizer, PaliGemmaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.tokenization_utils_base import generate_merges

import weights.export
from model.common import UserError
from model.config import PaliGemmaConfig
from model.processor import Processor
from model.source import BUNDLED_FOLDER
from model.tokenizer import LOCATIONS, load_tokenizer
from model.tokenizer import GemmaTokenizer as Ours
from weights.load import load_model

pytestmark = pytest.mark.long

CORPUS = """answer en where is the cow standing?
caption en the cow is standing in the green field beside two dogs
detect cat ; dog
the cat is on the mat, and the dog isn't; 12 34 567.
segment the largest animal in the photograph
<b>bold</b> <unused0> <table>
日本語のテキスト と 絵
un éléphant gris près de l'étang aaaa abab aabbaa""".splitlines()
RESERVED = ["<mask>", "[multimodal]", *(f"<unused{i}>" for i in range(12)), "<b>", "</b>", "<table>", "<h1>"]
RUNS = [character * length for character in "\n\t▁" for length in range(1 + (character == "▁"), 32)]
CONTROL = {"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
PIECES = {"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"}


def from_sentencepiece(model_file: Path, added: list[str]) -> GemmaTokenizer:
    """transformers' tokenizer of the pieces of a sentencepiece model."""
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    vocabulary = {pieces.id_to_piece(i): i for i in range(pieces.vocab_size())}
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=generate_merges(vocabulary))
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in added])
    return tokenizer


def embedded(folder: Path) -> GemmaTokenizer:
    """The pieces of the embedded base, with no byte of theirs changed."""
    return from_sentencepiece(BUNDLED_FOLDER / "tokenizer.model", [])


def gemma(folder: Path) -> GemmaTokenizer:
    """Gemma's settings: byte fallback, runs of white space, reserved pieces, locations."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_prefix=str(folder / "gemma"),
        model_type="bpe",
        vocab_size=1900,
        hard_vocab_limit=False,
        byte_fallback=True,
        **CONTROL,
        **PIECES,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=[*RESERVED, *RUNS, *LOCATIONS],
        minloglevel=2,
        num_threads=1,
    )
    return from_sentencepiece(folder / "gemma.model", [*RESERVED, *RUNS])


def learned(folder: Path) -> GemmaTokenizer:
    """Merges that the package `tokenizers` has learned: of the pairs that make a piece only one is a merge."""
    learner = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    learner.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*control, *(f"<0x{b:02X}>" for b in range(256))], show_progress=False
    )
    learner.train_from_iterator([*CORPUS * 3, "ababab baba aaaaaa", " of the  of the"], trainer)
    model = json.loads(learner.to_str())["model"]
    tokenizer = GemmaTokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
    tokenizer.add_tokens([AddedToken("a b", normalized=True), AddedToken("a", normalized=False), "dog s", "cow stand"])
    return tokenizer


@pytest.fixture(scope="module", params=[embedded, gemma, learned])
def folder(request, tmp_path_factory) -> Path:
    """What PaliGemmaProcessor.save_pretrained of transformers 5 writes, and a config.json."""
    folder = tmp_path_factory.mktemp("processor")
    pictures = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    pictures.image_seq_length = 4
    tokenizer = request.param(folder)
    PaliGemmaProcessor(pictures, tokenizer).save_pretrained(folder)
    assert (folder / "tokenizer.json").exists() and not (folder / "tokenizer.model").exists()
    raw = json.loads((BUNDLED_FOLDER / "config.json").read_text())
    raw["vision_config"] |= {"image_size": 28, "patch_size": 14}
    raw["image_token_index"] = tokenizer.convert_tokens_to_ids("<image>")
    raw["text_config"]["vocab_size"] = len(tokenizer) + 8
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def texts(count: int, pieces: list[str]) -> list[str]:
    """Random texts: words, pieces, runs of white space, any code point, fragments of reserved pieces."""
    draw = random.Random(0)
    nasty = ["<", "<<b>", "</", "<unused", "<unused1", "<0x41>", "<loc0001>", "<loc00011>", "<seg>", "▁▁a▁", "\u200d"]
    nasty += [
        "\ufeff",
        "\0",
        "\r\n",
        "e\u0301",
        "🐮🏽",
        "日本語",
        "<unused0><b>\n\n",
        "> </",
        "aab",
        "a b",
        "cow stand",
    ]
    kinds = [
        lambda: draw.choice(CORPUS),
        lambda: draw.choice(draw.choice(CORPUS).split()) + draw.choice(" ,\n"),
        lambda: draw.choice(" \t\n▁") * draw.choice([1, 2, 3, 30, 31, 32, 33, 62, 63, 64, 100]),
        lambda: draw.choice(pieces),
        lambda: draw.choice(pieces).replace("▁", " "),
        lambda: chr(draw.choice([draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)])),
        lambda: draw.choice(nasty),
        lambda: "".join(draw.choices("ab ", k=12)),
        lambda: " ",
    ]
    return ["".join(draw.choice(kinds)() for _ in range(draw.randrange(1, 25))) for _ in range(count)]


def test_any_text_has_the_ids_of_transformers(folder):
    """Breaks when a merge, an added token, a run of white space or a byte is found otherwise than by transformers."""
    ours, theirs = load_tokenizer(folder / "tokenizer.json"), AutoTokenizer.from_pretrained(folder)
    assert isinstance(ours, Ours) and isinstance(theirs, GemmaTokenizer)
    theirs.add_bos_token = False
    for text in texts(3000, list(theirs.get_vocab())):
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], repr(text)


def test_any_ids_have_the_text_of_transformers(folder):
    """Breaks when bytes, spaces or special tokens are decoded otherwise."""
    ours, theirs = load_tokenizer(folder / "tokenizer.json"), AutoTokenizer.from_pretrained(folder)
    draw = random.Random(1)
    byte = ours.piece_to_id("<0x00>")
    for _ in range(2000):
        ids = [draw.choice([draw.randrange(ours.vocab_size()), byte + draw.randrange(256)]) for _ in range(12)]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), ids


def test_a_batch_equals_that_of_transformers(folder):
    """Breaks when a folder with tokenizer.json alone does not open, or its rows differ from PaliGemmaProcessor's."""
    picture = np.zeros((28, 28, 3), dtype=np.uint8)
    theirs = PaliGemmaProcessor.from_pretrained(folder)
    ours = Processor.from_source(folder)
    prompts, answers = ["caption en", "two  lines\n", "<b> ▁▁ \t\t cow"], ["a cow", "dog\n\n", "日本語 🐮"]
    expected = theirs(
        text=prompts, images=[picture] * 3, suffix=answers, return_tensors="pt", padding="longest", padding_side="left"
    )
    batch = ours([picture] * 3, prompts, answers)
    for name in ("input_ids", "token_type_ids", "attention_mask"):
        assert torch.equal(getattr(batch, name), expected[name]), name
    assert [ours.decode(batch.labels[i][batch.labels[i] >= 0]) for i in range(3)] == answers


def test_an_export_keeps_the_tokenizer(tmp_path):
    """Breaks when the tokenizer is lost on the way, so that an exported folder opens in neither library."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).write_bytes((BUNDLED_FOLDER / name).read_bytes())
    embedded(source).save_pretrained(source)
    weights.export.main([str(source), str(tmp_path / "out")])
    assert load_model(tmp_path / "out").config == PaliGemmaConfig.from_file(source / "config.json")
    text = "answer en Is there a dog in the image?"
    assert Processor.from_source(tmp_path / "out").encode(text) == Processor.from_source("embedded").encode(text)


def test_nothing_else_is_needed(tmp_path, monkeypatch):
    """Breaks when the package `tokenizers` is imported for Gemma's file."""
    embedded(tmp_path).save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert load_tokenizer(tmp_path / "tokenizer.json").encode("dog")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(model=None), "expected a model"),
        (lambda raw: raw.update(normalizer=None), "not Gemma's kind of tokenizer .normalizer is None"),
        (lambda raw: raw["model"].update(type="Unigram"), "model.type is 'Unigram'"),
        (lambda raw: raw["model"].update(byte_fallback=False), "byte_fallback is False"),
        (lambda raw: raw["model"].update(dropout=0.1), "dropout is 0.1"),
        (lambda raw: raw["model"]["vocab"].pop("<0x41>"), "damaged vocabulary .*0x41"),
        (lambda raw: raw["model"]["vocab"].update({"x-": 1}), "each of one piece"),
        (lambda raw: raw["model"]["vocab"].update({"x-": 10**12}), "whole numbers below"),
        (lambda raw: raw["model"]["vocab"].update({"x-": "7"}), "whole numbers"),
        (lambda raw: raw["model"]["merges"].append(["q", "nothing"]), "damaged vocabulary"),
        (lambda raw: raw["model"]["merges"].append(["q"]), "damaged vocabulary"),
        (lambda raw: raw["model"]["merges"].append(7), "damaged vocabulary"),
        (lambda raw: raw["added_tokens"][0].update(lstrip=True), "options that Gemma's do not have"),
        (lambda raw: raw["added_tokens"].append({}), "damaged vocabulary"),
        (lambda raw: raw["added_tokens"].append(7), "damaged vocabulary"),
        (lambda raw: raw.update(added_tokens={"a": 1}), "expected a model"),
    ],
)
def test_other_files_are_refused(tmp_path, change, message):
    """Breaks when another tokenizer is read as Gemma's, or a damaged one ends in a traceback."""
    embedded(tmp_path).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
