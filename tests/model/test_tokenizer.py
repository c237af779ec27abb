"""Any tokenizer.json against transformers, on any text; which of two files is read, and what needs
which package."""

import json
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from transformers import AddedToken, AutoTokenizer, GemmaTokenizer, PaliGemmaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from model.processor import Processor
from model.source import BUNDLED_FOLDER
from model.tokenizer import LOCATIONS, find_tokenizer, load_tokenizer
from tests.pieces import SENTENCES, gemma_tokenizer, texts, train_pieces
from tests.runs import refused

pytestmark = pytest.mark.long

RESERVED = [
    "<mask>",
    "[multimodal]",
    *(f"<unused{i}>" for i in range(12)),
    "<b>",
    "</b>",
    "<table>",
    "<h1>",
]
RUNS = [
    character * length
    for character in "\n\t▁"
    for length in range(1 if character == "\n" else 2, 32)
]


def gemma(folder: Path) -> GemmaTokenizer:
    """Gemma's settings, and its published vocabulary's way with byte 9, whose piece is a tab in
    place of <0x09>."""
    file = train_pieces(folder / "drawn", SENTENCES * 3, 1900, [*RESERVED, *RUNS, *LOCATIONS])
    return gemma_tokenizer(file, [*RESERVED, *RUNS], {"<0x09>": "\t"})


def learned(folder: Path) -> GemmaTokenizer:
    """Merges that the package `tokenizers` has learned, and added tokens with a space, found before
    and after them."""
    learner = tokenizers.Tokenizer(
        tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    learner.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    special = [
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<mask>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, show_progress=False
    )
    learner.train_from_iterator([*SENTENCES * 3, "ababab baba aaaaaa", " of the  of the"], trainer)
    model = json.loads(learner.to_str())["model"]
    tokenizer = GemmaTokenizer(
        vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]]
    )
    tokenizer.add_tokens(
        [
            AddedToken("a b", normalized=True),
            AddedToken("a", normalized=False),
            "dog s",
            "cow stand",
        ]
    )
    return tokenizer


@pytest.fixture(scope="module", params=[gemma, learned])
def folder(request, tmp_path_factory) -> Path:
    """What PaliGemmaProcessor.save_pretrained of transformers 5 writes, and a config.json."""
    folder = tmp_path_factory.mktemp("processor")
    pictures = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    pictures.image_seq_length = 4
    tokenizer = request.param(tmp_path_factory.mktemp("pieces"))
    PaliGemmaProcessor(pictures, tokenizer).save_pretrained(folder)
    raw = json.loads((BUNDLED_FOLDER / "config.json").read_text())
    raw["vision_config"] |= {"image_size": 28, "patch_size": 14}
    raw["image_token_index"] = tokenizer.convert_tokens_to_ids("<image>")
    raw["text_config"]["vocab_size"] = len(tokenizer) + 8
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_any_text_has_the_ids_of_transformers_and_any_ids_the_text(folder):
    """Breaks when a tab, an emoji, an added token, a run of spaces or a byte is read or written
    otherwise."""
    ours, theirs = load_tokenizer(folder / "tokenizer.json"), AutoTokenizer.from_pretrained(folder)
    theirs.add_bos_token = False
    for text in texts(3000, list(theirs.get_vocab())):
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], repr(text)
    draw, byte = random.Random(1), ours.piece_to_id("<0x00>")
    for _ in range(2000):
        ids = [
            draw.choice([draw.randrange(ours.vocab_size()), byte + draw.randrange(256)])
            for _ in range(12)
        ]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), ids


def test_a_batch_equals_that_of_transformers(folder):
    """Breaks when a folder with tokenizer.json alone does not open, or its rows differ from
    PaliGemmaProcessor's."""
    pictures, theirs = (
        [np.zeros((28, 28, 3), np.uint8)] * 3,
        PaliGemmaProcessor.from_pretrained(folder),
    )
    prompts, answers = (
        ["caption en", "two  lines\n", "<b> ▁▁ \t\t cow"],
        ["a cow", "dog\n\n", "日本語 🐮"],
    )
    options = {"return_tensors": "pt", "padding": "longest", "padding_side": "left"}
    expected = theirs(text=prompts, images=pictures, suffix=answers, **options)
    assert torch.equal(
        Processor.from_source(folder)(pictures, prompts, answers).input_ids, expected["input_ids"]
    )


def test_tokenizer_model_comes_first_and_needs_no_package(tmp_path, monkeypatch):
    """Breaks when ids depend on what is installed, or the base install cannot open the embedded
    base."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert Processor.from_source("embedded").encode("dog")
    shutil.copy(BUNDLED_FOLDER / "tokenizer.json", tmp_path)
    refused(lambda: load_tokenizer(find_tokenizer(tmp_path)), "pip install tokenizers")
    shutil.copy(BUNDLED_FOLDER / "tokenizer.model", tmp_path)
    assert load_tokenizer(find_tokenizer(tmp_path)).encode("dog")
