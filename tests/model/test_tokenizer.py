"""Any tokenizer.json against transformers, on any text; which of two files is read, and what needs
which package."""

import json
import random
import shutil
import sys

import numpy as np
import pytest
import tokenizers
import torch
from transformers import AddedToken, AutoTokenizer, GemmaTokenizer, PaliGemmaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from model.processor import Processor
from model.source import BUNDLED_FOLDER
from model.tokenizer import LOCATIONS, SPECIAL, find_tokenizer, load_tokenizer
from tests.files import json_lines, read_json, write_json
from tests.pieces import SENTENCES, gemma_tokenizer, texts, train_pieces
from tests.runs import refused

pytestmark = pytest.mark.long

RESERVED = "<mask> [multimodal] <b> </b> <table> <h1>".split()
RESERVED += [f"<unused{i}>" for i in range(12)]
RUNS = ["\n", *(character * length for character in "\n\t▁" for length in range(2, 32))]


def gemma(folder):
    """Gemma's settings, and its published vocabulary's way with byte 9, whose piece is a tab in
    place of <0x09>."""
    file = train_pieces(folder / "drawn", SENTENCES * 3, 1900, [*RESERVED, *RUNS, *LOCATIONS])
    return gemma_tokenizer(file, [*RESERVED, *RUNS], {"<0x09>": "\t"})


def learned(folder):
    """Merges that the package `tokenizers` has learned, and added tokens with a space, found before
    and after them."""
    learner = tokenizers.Tokenizer(
        tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    learner.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, show_progress=False
    )
    learner.train_from_iterator([*SENTENCES * 3, "ababab baba aaaaaa", " of the  of the"], trainer)
    model = json.loads(learner.to_str())["model"]
    tokenizer = GemmaTokenizer(
        vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]]
    )
    tokenizer.add_tokens([AddedToken("a b", normalized=True), AddedToken("a", normalized=False)])
    tokenizer.add_tokens(["dog s", "cow stand"])
    return tokenizer


@pytest.fixture(scope="module", params=[gemma, learned])
def folder(request, tmp_path_factory):
    """What PaliGemmaProcessor.save_pretrained of transformers 5 writes, and a config.json."""
    folder = tmp_path_factory.mktemp("processor")
    pictures = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    pictures.image_seq_length = 4
    tokenizer = request.param(tmp_path_factory.mktemp("pieces"))
    PaliGemmaProcessor(pictures, tokenizer).save_pretrained(folder)
    raw = read_json(BUNDLED_FOLDER / "config.json")
    raw["vision_config"] |= {"image_size": 28, "patch_size": 14}
    raw["image_token_index"] = tokenizer.convert_tokens_to_ids("<image>")
    raw["text_config"]["vocab_size"] = len(tokenizer) + 8
    write_json(folder / "config.json", raw)
    return folder


def test_any_text_has_the_ids_of_transformers_and_any_ids_the_text(folder):
    """Breaks when a tab, an emoji, an added token, a run of spaces or a byte is read or written
    otherwise."""
    ours = load_tokenizer(folder / "tokenizer.json")
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.add_bos_token = False
    for text in texts(3000, list(theirs.get_vocab())):
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], repr(text)
    draw = random.Random(1)
    byte = ours.piece_to_id("<0x00>")
    for _ in range(2000):
        any_id = range(ours.vocab_size())
        ids = [draw.choice(draw.choice([any_id, range(byte, byte + 256)])) for _ in range(12)]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), ids


def test_a_batch_equals_that_of_transformers(folder):
    """Breaks when a folder with tokenizer.json alone does not open, or its rows differ from
    PaliGemmaProcessor's."""
    pictures = [np.zeros((28, 28, 3), np.uint8)] * 3
    theirs = PaliGemmaProcessor.from_pretrained(folder)
    prompts = ["caption en", "two  lines\n", "<b> ▁▁ \t\t cow"]
    answers = ["a cow", "dog\n\n", "日本語 🐮"]
    options = {"return_tensors": "pt", "padding": "longest", "padding_side": "left"}
    expected = theirs(text=prompts, images=pictures, suffix=answers, **options)
    assert torch.equal(
        Processor.from_source(folder)(pictures, prompts, answers).input_ids, expected["input_ids"]
    )


def saved(folder, change=lambda tokenizer: None):
    """The embedded tokenizer as transformers saves it, changed, with tokenizer.model beside it."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_FOLDER, tokenizer_class="GemmaTokenizer")
    change(tokenizer)
    tokenizer.save_pretrained(folder)
    shutil.copy(BUNDLED_FOLDER / "tokenizer.model", folder)
    return folder


def rename(folder):
    """Give a piece of tokenizer.json another name, as is done with <unused0> of Gemma."""
    raw = read_json(folder / "tokenizer.json")
    raw["model"]["vocab"]["<brand>"] = raw["model"]["vocab"].pop("<loc1023>")
    for token in raw["added_tokens"]:
        token["content"] = token["content"].replace("<loc1023>", "<brand>")
    write_json(folder / "tokenizer.json", raw)
    (folder / "tokenizer_config.json").unlink()


@pytest.mark.parametrize("is_renamed", [False, True])
def test_a_token_that_tokenizer_model_lacks_is_not_lost(is_renamed, tmp_path):
    """Breaks when an added or renamed token becomes five pieces, and vanishes from answers."""
    saved(tmp_path, lambda tokenizer: is_renamed or tokenizer.add_tokens(["<brand>"]))
    if is_renamed:
        rename(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, tokenizer_class="GemmaTokenizer")
    ours = load_tokenizer(find_tokenizer(tmp_path))
    for text in ("a <brand> dog", "<brand>", "x<brand>y <loc0007>"):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == ids
        assert theirs.convert_tokens_to_ids("<brand>") in ids
        assert ours.decode(ids) == theirs.decode(ids)


# a file; what it may say, and what it may not
BESIDE = """["added_tokens.json", {"<image>": 1722, "<loc0000>": 6}, {"<brand>": 1723}]
["tokenizer_config.json", {"added_tokens_decoder": {"6": {"content": "<loc0000>"}}, "bos_token": "<bos>"}, \
{"added_tokens_decoder": {"7": {"content": "<loc0000>"}}}]"""


def test_tokens_that_only_a_file_beside_names_are_refused(tmp_path):
    """Breaks when added_tokens.json or tokenizer_config.json name a token that the tokenizer has
    not, or at another id, and nothing is said; or one is missed that all have."""
    for name in ("tokenizer.model", "tokenizer.json"):
        for file, agreeing, other in json_lines(BESIDE):
            shutil.copy(BUNDLED_FOLDER / name, tmp_path)
            write_json(tmp_path / file, agreeing)
            assert load_tokenizer(tmp_path / name).encode("dog")
            write_json(tmp_path / file, other)
            refused(lambda name=name: load_tokenizer(tmp_path / name), file, "<")
            (tmp_path / file).unlink()


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
# of a tokenizer.json. A thousand and 256 times longer: too little to harm where it is not refused
PARTS = """{
    "normalizer": {"type": "Sequence", "normalizers": [REPLACE, REPLACE, REPLACE]},
    "decoder": {"type": "Sequence", "decoders": [REPLACE, REPLACE, REPLACE]},
    "pre_tokenizer": {"type": "Sequence",
        "pretokenizers": [BYTES, BYTES, BYTES, BYTES, BYTES, BYTES, BYTES, BYTES]}
}"""
BYTES = """{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
    "use_regex": false}"""
LONGER = json.loads(PARTS.replace("REPLACE", json.dumps(REPLACE)).replace("BYTES", BYTES))
TEMPLATE = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
WORDS = {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100, "unk_token": "[UNK]"}


def changed(folder, **parts):
    """The embedded tokenizer.json with other parts."""
    write_json(folder / "tokenizer.json", read_json(BUNDLED_FOLDER / "tokenizer.json") | parts)
    return folder / "tokenizer.json"


def test_a_tokenizer_that_fails_at_its_first_text_is_refused(tmp_path):
    """Breaks when a tokenizer.json fills the memory, loses each text, or raises at a text what no
    command expects; or when an empty tokenizer.model is opened."""
    for part, steps in (*LONGER.items(), ("normalizer", {"type": "Prepend", "prepend": "a" * 200})):
        file = changed(tmp_path, **{part: steps})
        refused(lambda file=file: load_tokenizer(file), "longer")
    vocabulary = read_json(BUNDLED_FOLDER / "tokenizer.json")["model"]["vocab"]
    for kind in ("WordPiece", "WordLevel"):
        model = {"type": kind, "vocab": vocabulary, **WORDS}
        refused(lambda model=model: load_tokenizer(changed(tmp_path, model=model)), "[UNK]")
    nothing = changed(tmp_path, normalizer=REPLACE | {"pattern": {"Regex": "."}, "content": ""})
    refused(lambda: load_tokenizer(nothing), "leaves nothing")
    sequence = {"type": "Sequence", "processors": [TEMPLATE, TEMPLATE]}
    for processor in (TEMPLATE, sequence):
        ours = load_tokenizer(changed(tmp_path, post_processor=processor))
        assert ours.decode(ours.encode("a dog")) == "a dog"
    (tmp_path / "tokenizer.model").touch()
    refused(lambda: load_tokenizer(tmp_path / "tokenizer.model"), "not a sentencepiece")


def test_tokenizer_model_comes_first_and_needs_no_package(tmp_path, monkeypatch):
    """Breaks when ids depend on what is installed, or the base install cannot open the embedded
    base."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert Processor.from_source("embedded").encode("dog")
    shutil.copy(BUNDLED_FOLDER / "tokenizer.json", tmp_path)
    refused(lambda: load_tokenizer(find_tokenizer(tmp_path)), "pip install tokenizers")
    shutil.copy(BUNDLED_FOLDER / "tokenizer.model", tmp_path)
    assert load_tokenizer(find_tokenizer(tmp_path)).encode("dog")
    same = saved(tmp_path / "same") / "tokenizer.json"
    same.write_text(same.read_text().replace('"<0x09>"', '"\\t"'))  # as in Gemma's published file
    assert load_tokenizer(find_tokenizer(same.parent)).encode("dog")
