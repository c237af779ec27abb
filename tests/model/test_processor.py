"""The processor against transformers' PaliGemmaProcessor, bit for bit, and what it refuses.

The tokenizer is a sentencepiece model trained here on a few sentences, with Gemma's settings and PaliGemma's
location pieces; transformers' GemmaTokenizer is built from its pieces.
"""

import dataclasses
import http.server
import json
import os
import pickle
import random
import shutil
import threading
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import sentencepiece
import torch
from transformers import AddedToken, GemmaTokenizer, PaliGemmaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.tokenization_utils_base import generate_merges

import model.images as images_module
import model.source as source_module
from model.common import UserError
from model.config import PRESETS, PaliGemmaConfig, TextConfig, VisionConfig
from model.images import load_image, to_pixels
from model.paligemma import PaliGemma, initialize
from model.processor import Batch, Processor, load_tokenizer, parse_boxes
from model.source import resolve
from tests.model.test_images import SIDE, picture

TOKENS = 16
LOCATIONS = [f"<loc{i:04}>" for i in range(1024)] + [f"<seg{i:03}>" for i in range(128)]
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
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=1600,
        hard_vocab_limit=False,
        byte_fallback=True,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=["<mask>", "\n", "\n\n", "▁▁", "▁▁▁", *LOCATIONS],
        minloglevel=2,
        num_threads=1,
    )
    pieces = load_tokenizer(folder / "tokenizer.model").vocab_size()
    config = PaliGemmaConfig(
        VisionConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=SIDE),
        TextConfig(
            vocab_size=pieces + 8,
            hidden_size=24,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            head_dim=8,
        ),
        image_token_id=pieces,
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


@pytest.fixture(scope="session")
def processor(folder) -> Processor:
    return Processor.from_source(folder)


@pytest.fixture(scope="session")
def hf(folder) -> PaliGemmaProcessor:
    pieces = load_tokenizer(folder / "tokenizer.model")
    vocabulary = {pieces.id_to_piece(i): i for i in range(pieces.vocab_size())}
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=generate_merges(vocabulary))
    user_defined = ["<mask>", "\n", "\n\n", "▁▁", "▁▁▁", *LOCATIONS]
    tokenizer.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in user_defined])
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


def test_rows_of_several_pictures_equal_transformers(processor, hf):
    """Breaks when a row of two pictures gets one block of image tokens, or pictures change their order."""
    images = [[picture(seed=0), picture(seed=1)], [picture(seed=2)]]
    batch = processor(images, TEXTS[:2], ["left", "a cow"])
    expected = hf(images=images, text=TEXTS[:2], suffix=["left", "a cow"], padding="longest", return_tensors="pt")
    assert_same_batch(batch, expected)
    assert len(batch.pixel_values) == 3


def test_a_slot_before_the_text_is_that_of_transformers(processor, hf):
    """Breaks when `<image>` at the start of a prompt, which transformers asks for, is laid out otherwise than there."""
    prompts = [f"<image>{text}" for text in TEXTS[:2]]
    images = [picture(seed=0), picture(seed=1)]
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


def test_location_tokens_are_single_ids(processor):
    """Breaks when <loc…> or <seg…> are spelled in characters: detection prompts would be noise."""
    for piece in ("<loc0000>", "<loc1023>", "<seg000>", "<seg127>"):
        assert processor.encode(piece) == [processor.tokenizer.piece_to_id(piece)]


def test_decode_drops_control_tokens(processor):
    """Breaks when padding, image tokens or rows beyond the vocabulary reach the answer's text."""
    ids, pieces = processor.encode("a cow"), processor.tokenizer.vocab_size()
    noisy = [0, 2, pieces, *ids[:1], 3, pieces + 5, -100, *ids[1:], 1, *ids]
    assert processor.decode(noisy) == processor.decode(torch.tensor(noisy)) == "a cow"
    assert processor.decode([]) == processor.decode([1, *ids]) == ""


@pytest.mark.parametrize(
    ("where", "piece"), [*product(("prefix", "suffix"), ("<bos>", "<eos>", "<pad>", "<unk>")), ("suffix", "<image>")]
)
def test_text_cannot_spell_control_tokens(processor, piece, where):
    """Breaks when a user's text ends a sequence or adds a picture unnoticed."""
    text = {"prefix": "what", "suffix": "that"} | {where: f"read {piece} here"}
    with pytest.raises(UserError, match=rf"^row 0: .*{piece}"):
        processor([picture()], [text["prefix"]], [text["suffix"]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([None], [""]), "row 0: the prefix is ''"),
        (([None, None], ["x", " \n"]), "row 1: the prefix is"),
        (([None], [5]), "row 0: the prefix is 5"),
        (([None], ["x"], [""]), "row 0: the suffix is ''"),
        (([None, None], ["x", "y"], ["a", None]), "row 1: the suffix is None"),
        (([None], "x"), "prefixes is of type str"),
        ((picture(), ["x"]), "images is of type Image"),
        (([None], ["x", "y"]), "1 images, 2 prefixes"),
        (([None], ["x"], ["a", "b"]), "1 images, 1 prefixes, 2 suffixes"),
        (([None], ["x"], []), "0 suffixes"),
        (([], []), "0 images"),
        (([None], ["\ud800"]), "row 0: .*not valid Unicode"),
        (([None], ["<loc1024> x"]), "row 0: .*<loc1024>"),
        (([[picture(), None]], ["x"]), "NoneType passed as a picture"),
    ],
)
def test_bad_rows(processor, arguments, message):
    """Breaks when a malformed row is trained on, or ends in a traceback that does not name it."""
    with pytest.raises(UserError, match=message):
        processor(*arguments)


def test_max_length_is_an_error_and_never_a_cut(folder):
    """Breaks when a long prompt loses its end silently."""
    length = processor_length(Processor.from_source(folder), "caption en", "a cow")
    assert processor_length(Processor.from_source(folder, max_length=length), "caption en", "a cow") == length
    with pytest.raises(UserError, match=f"row 0: {length} tokens, but max_length is {length - 1}"):
        processor_length(Processor.from_source(folder, max_length=length - 1), "caption en", "a cow")


@pytest.mark.long
def test_a_row_has_8192_tokens_by_default(folder, monkeypatch):
    """Breaks when a text of megabytes, or a row of a thousand pictures, is encoded before it is refused."""
    processor = Processor.from_source(folder)
    words = "the cow " * 8000
    with pytest.raises(UserError, match="tokens, but max_length is 8192: .*shorten the text or raise max_length"):
        processor.layout(0, words)
    assert len(Processor.from_source(folder, max_length=None).layout(0, words)[0]) > 8192
    monkeypatch.setattr(Processor, "encode", lambda *_: pytest.fail("encoded"))
    for pictures, text in ((10**9, "x"), (0, "x" * 10**7), (600, "x")):
        with pytest.raises(UserError, match="at least [0-9]+ tokens, but max_length is 8192") as caught:
            processor.layout(pictures, text)
        assert len(str(caught.value)) < 300


def processor_length(processor: Processor, prefix: str, suffix: str) -> int:
    return processor([picture()], [prefix], [suffix]).input_ids.shape[1]


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


def test_batch_to_casts_pixels_alone(processor):
    """Breaks when ids become floats, or pixels stay in fp32 beside a bf16 model."""
    batch = processor([picture()], ["caption en"]).to("cpu", torch.bfloat16)
    types = {field.name: getattr(batch, field.name).dtype for field in dataclasses.fields(batch)}
    assert types.pop("pixel_values") == torch.bfloat16 and set(types.values()) == {torch.int64}
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.labels = None


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


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("", []),
        ("no cow here", []),
        ("<loc0001><loc0002><loc0003> cow", []),
        ("<loc0001><loc0002><loc0003><loc0004><loc0005> cow", []),
        ("<loc0001><loc0002><loc0003><loc1024> cow", []),
        ("cow ; <loc0001><loc0002><loc0003><loc0004> dog ;", ["dog"]),
        ("<loc0001><loc0002><loc0003><loc0004>", [""]),
        ("<loc0001><loc0002><loc0003><loc0004><seg001><seg127> cow", ["cow"]),
    ],
)
def test_answers_that_are_not_quite_boxes(text, labels):
    """Breaks when a model's malformed answer raises, or is drawn somewhere."""
    assert [label for label, _ in parse_boxes(text, 100, 100)] == labels


def test_box_corners_are_ordered():
    """Breaks when an answer with swapped corners makes a box that cannot be drawn."""
    assert parse_boxes("<loc0512><loc0768><loc0256><loc0000> x", 1023, 1023) == [("x", (0, 256, 768, 512))]


# ---------------------------------------------------------------------------------------------------------------------
# Sources
# ---------------------------------------------------------------------------------------------------------------------


def test_embedded_and_presets_use_the_bundled_tokenizer(folder, monkeypatch):
    """Breaks when `embedded` or a preset of its vocabulary needs a download, or a big preset gets a small tokenizer."""
    monkeypatch.setattr(source_module, "BUNDLED_FOLDER", folder)
    bundled = PaliGemmaConfig.from_file(folder / "config.json")
    assert bundled.image_token_id == load_tokenizer(folder / "tokenizer.model").vocab_size()
    other = dataclasses.replace(bundled, vision=dataclasses.replace(bundled.vision, image_size=28))
    monkeypatch.setitem(PRESETS, "half", other)
    assert Processor.from_source("embedded").config == bundled
    assert Processor.from_source("half")([picture()], ["x"]).pixel_values.shape == (1, 3, 28, 28)
    with pytest.raises(UserError, match="paligemma-3b-224: this preset has random weights and no tokenizer"):
        Processor.from_source("paligemma-3b-224")
    monkeypatch.setattr(source_module, "BUNDLED_FOLDER", folder / "gone")
    with pytest.raises(UserError, match="bundled base is missing"):
        Processor.from_source("embedded")


def test_a_folder_wins_over_a_name(folder, tmp_path, monkeypatch):
    """Breaks when a user's folder is ignored because it is called like a preset."""
    monkeypatch.chdir(tmp_path)
    os.symlink(folder, tmp_path / "paligemma-3b-224")
    assert Processor.from_source("paligemma-3b-224").config.vision.image_size == SIDE


def test_folders_that_hold_no_processor(folder, tmp_path):
    """Breaks when a missing or foreign tokenizer is found out only by bad answers."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = (folder / "tokenizer.model").read_bytes()

    def refused(message: str, tokenizer: bytes | None = tokenizer, **changes) -> None:
        text = config["text_config"] | changes.pop("text_config", {})
        (tmp_path / "config.json").write_text(json.dumps(config | changes | {"text_config": text}))
        (tmp_path / "tokenizer.model").unlink(missing_ok=True)
        if tokenizer is not None:
            (tmp_path / "tokenizer.model").write_bytes(tokenizer)
        with pytest.raises(UserError, match=message):
            Processor.from_source(tmp_path)

    refused("tokenizer.json: not found, nor a tokenizer.model: copy either .*paligemma-3b-pt-224", tokenizer=None)
    refused("tokenizer.model: not a sentencepiece model", tokenizer=b"version https://git-lfs.github.com/spec/v1\n")
    refused("of another model: its eos id is 1, but config.json says 5", eos_token_id=5)
    refused("image token 300 is its piece", image_token_index=300)
    refused("pieces, but the embedding only 256 rows", text_config={"vocab_size": 256})
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="config.json: not found"):
        Processor.from_source(tmp_path)


def test_sources_that_are_nothing(folder, tmp_path):
    """Breaks when a typing error in a path turns into a download or a traceback."""
    for source, message in [
        (tmp_path / "none", "no such folder"),
        ("./none/at/all", "no such folder"),
        ("gpt2", "no such folder: give a model folder, 'embedded', a preset"),
        (str(folder / "config.json"), "is a file, expected a folder: give the folder that holds it"),
    ]:
        with pytest.raises(UserError, match=message):
            resolve(source, ["*"])
    with pytest.raises(UserError, match="revision 'main' belongs to a hub id"):
        resolve(folder, ["*"], "main")
    assert resolve(folder, ["*"]) == folder


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    """A hub on this machine with as much of the protocol as huggingface_hub needs; `hub.error` makes it refuse."""
    files = {name: (folder / name).read_bytes() for name in ("config.json", "tokenizer.model")}
    files["model.safetensors"] = b"0" * 100
    state = SimpleNamespace(error=None, asked=[], fetched=[], commit="a" * 40)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            path = self.path.split("?")[0]
            state.asked.append(path)
            if state.error:
                status, code = state.error
                return self.reply(status, b"{}", {"X-Error-Code": code, "X-Error-Message": "refused"})
            name = path.rsplit("/", 1)[-1]
            if "/resolve/" in path and name in files:
                if self.command == "GET":
                    state.fetched.append(name)
                return self.reply(200, files[name], {"ETag": f'"{name}-1"', "X-Repo-Commit": state.commit})
            listing = [{"type": "file", "path": n, "size": len(b), "oid": f"{n}-1"} for n, b in files.items()]
            info = {"id": "some/model", "sha": state.commit, "siblings": [{"rfilename": n} for n in files]}
            return self.reply(200, json.dumps(listing if "/tree/" in path else info).encode(), {})

        do_HEAD = do_GET

        def reply(self, status: int, body: bytes, headers: dict) -> None:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    state.server = server
    place = {"endpoint": f"http://127.0.0.1:{server.server_port}", "cache_dir": tmp_path / "cache"}
    download = partial(huggingface_hub.snapshot_download, **place)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    yield state
    server.shutdown()
    server.server_close()


PIXEL_OPTIONS = [
    {"size": {"height": 2 * SIDE, "width": 2 * SIDE}},
    {"resample": 2},
    {"image_mean": [0.485, 0.456, 0.406]},
    {"image_std": [1.0, 1.0, 1.0]},
    {"rescale_factor": 1 / 127.5},
    {"do_normalize": False},
    {"do_resize": False},
    {"do_center_crop": True, "crop_size": {"height": SIDE, "width": SIDE}},
]


@pytest.mark.parametrize("nested", [False, True])
def test_pixels_that_are_prepared_otherwise_are_refused(folder, hf, tmp_path, nested):
    """Breaks when a model that was trained with other pixels, as its own file says, is given ours."""
    for file in folder.iterdir():
        shutil.copy(file, tmp_path)
    name = "processor_config.json" if nested else "preprocessor_config.json"
    for options in [{}, *PIXEL_OPTIONS]:
        theirs = SiglipImageProcessorPil(**({"size": {"height": SIDE, "width": SIDE}} | options))
        theirs.image_seq_length = TOKENS
        (PaliGemmaProcessor(theirs, hf.tokenizer) if nested else theirs).save_pretrained(tmp_path / "saved")
        shutil.copy(tmp_path / "saved" / name, tmp_path)
        if options:
            with pytest.raises(UserError, match=f"{name}: {next(iter(options))} is "):
                Processor.from_source(tmp_path)
            continue
        pixels = theirs(picture(), return_tensors="pt")["pixel_values"]
        assert torch.equal(Processor.from_source(tmp_path)([picture()], ["a"]).pixel_values, pixels)


def test_tokens_that_were_added_to_a_tokenizer_model(folder, processor, tmp_path):
    """Breaks when a token that a model has learned is spelled out in pieces, since tokenizer.model does not have it."""
    for file in folder.iterdir():
        shutil.copy(file, tmp_path)
    (tmp_path / "added_tokens.json").write_text(
        json.dumps({"<image>": processor.config.image_token_id, "<unk>": 3, "\n": 9})
    )
    assert Processor.from_source(tmp_path).encode("a dog") == processor.encode("a dog")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<image>": 7, "<robot>": processor.config.image_token_id}))
    with pytest.raises(UserError, match="added_tokens.json: adds .'<robot>'.: remove tokenizer.model"):
        Processor.from_source(tmp_path)


def test_hub_fetches_only_what_is_needed(hub, processor):
    """Breaks when opening a processor downloads gigabytes of weights, or twice, or asks the hub more than needed."""
    for _ in range(2):
        hub.asked.clear()
        assert Processor.from_source("some/model").config == processor.config
        assert sum("/revision/" in path for path in hub.asked) == 1
    Processor.from_source("some/model", revision="v1")
    assert sorted(hub.fetched) == ["config.json", "tokenizer.model"]
    assert any(path.endswith("/revision/v1") for path in hub.asked)
    hub.error = (503, "")
    assert Processor.from_source("some/model").config == processor.config  # from the cache


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "GatedRepo", "accept it at https://huggingface.co/some/model, then set HF_TOKEN or run `hf auth login`"),
        (401, "RepoNotFound", "neither a folder here nor a model on the hub that you may see"),
        (404, "RepoNotFound", "neither a folder here nor a model on the hub that you may see"),
        (404, "RevisionNotFound", "no revision 'v9'"),
    ],
)
def test_hub_refusals(hub, status, code, message):
    """Breaks when a missing licence or a typing error shows as a traceback of the HTTP library."""
    hub.error = (status, code)
    with pytest.raises(UserError, match=f"^some/model: .*{message}") as error:
        resolve("some/model", ["config.json"], "v9")
    assert "\n" not in str(error.value)


def test_hub_out_of_reach(hub, monkeypatch):
    """Breaks when a machine without network gets pages of connection errors."""
    hub.server.shutdown()
    hub.server.server_close()
    with pytest.raises(UserError, match="some/model: .*the hub cannot be reached"):
        resolve("some/model", ["config.json"])

    def fail(*_, **__):
        raise OSError("No space left on device\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=r"the download failed \(OSError: No space left on device\)"):
        resolve("some/model", ["config.json"])
    with pytest.raises(UserError, match="no valid hub id"):
        monkeypatch.undo()
        resolve("some/model--x..y", ["config.json"])


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
