"""WINGS on a language model that has read text alone: a random Qwen2 or Llama and a random SigLIP
of transformers."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from PIL import Image

from eval.open import wording_of
from model.processor import Processor, processor_for
from model.source import BUNDLED_FOLDER
from model.systems.chat import load_text_tokenizer
from model.systems.wings import route
from model.tokenizer import load_tokenizer
from tests.files import draw, write_lines
from tests.pieces import qwen_tokenizer
from tests.reference import dtypes, hf_language, set_attention_backend
from tests.runs import stage_settings, words
from train.model import open_model
from train.systems import wings
from weights.load import load_model, load_text

SIZES = json.loads("""{"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 2}""")


TURNS = """{% for one in messages %}<|im_start|>{{ one.role }}
{{ one.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# the texts of the system turn: without a template that of Qwen's
SYSTEM = {"qwen2": "You are a helpful assistant.", "llama": "You are a parrot."}


@pytest.fixture(scope="module", params=SYSTEM)
def parts(request, tmp_path_factory):
    """text/, siglip/, and own.jsonl with a picture and a row of text alone."""
    folder = tmp_path_factory.mktemp("parts")
    tokenizer = qwen_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    if request.param == "llama":
        tokenizer.chat_template = f"<|im_start|>system\n{SYSTEM['llama']}<|im_end|>\n" + TURNS
    tokenizer.save_pretrained(folder / "text")
    shutil.copy(BUNDLED_FOLDER / "tokenizer.model", folder / "text")  # another one, of fewer tokens
    ends = {"eos_token_id": len(tokenizer) - 1, "bos_token_id": None}  # of a turn: a chat model
    text = hf_language(request.param, vocab_size=len(tokenizer) + 4, **ends)
    text.save_pretrained(folder / "text")
    # 16 patches, and a rest of 4 pixels
    vision = SIZES | {"hidden_size": 20, "patch_size": 14, "image_size": 60}
    siglip = transformers.SiglipConfig(vision_config=vision, text_config=SIZES | {"vocab_size": 50})
    transformers.SiglipModel(siglip).save_pretrained(folder / "siglip")
    draw(folder / "a.png", (200, 30, 90), size=(40, 20))
    said = zip(("human", "gpt") * 2, ("What is<image> it?", "a box", "Sure?", "yes"), strict=True)
    turns = [{"from": role, "value": text} for role, text in said]
    rows = [{"prefix": "Hello?", "suffix": "hi"}, {"image": "a.png", "conversations": turns}]
    rows.append({"image": "a.png", "prefix": "Say<image>", "suffix": "box"})
    write_lines(folder / "own.jsonl", rows)
    return folder


def flags(parts, more=""):
    """The flags of stage 1."""
    base = f"--stage 1 --r 4 --base {parts}/siglip --option language_model={parts}/text"
    return f"{base} --data jsonl:{parts}/own.jsonl {more}"


def opened(parts, more=""):
    return open_model(stage_settings("wings", flags(parts, more)), torch.device("cpu"))[0].eval()


def reader(parts, model):
    return processor_for(model.config, load_tokenizer(parts / "text/tokenizer.json"))


@torch.no_grad()
@dtypes
def test_the_start_is_the_language_model(parts, dtype):
    """Breaks when a picture's parts move a logit of text alone before they have learned anything,
    in either stage."""
    text = load_text(parts / "text", dtype)
    ids = torch.randint(0, 256, (2, 11))
    first = opened(parts).to(dtype)
    valid = torch.ones_like(ids)
    valid[0, :4] = 0
    for model in (first, route(first)):
        for each in (model, text):  # a router needs the attention's weights
            set_attention_backend(each, "sdpa" if model is first else "eager")
        logits = model(ids, None, torch.zeros_like(ids), valid)
        assert torch.equal(logits[valid.bool()], text(ids, valid)[valid.bool()])


def test_a_conversation_is_laid_out_and_learned_as_released(parts, monkeypatch):
    """Breaks when a picture is elsewhere in a turn, or another token is learned; the turns:
    test_chat.py."""
    model = opened(parts)
    theirs = transformers.AutoTokenizer.from_pretrained(parts / "text")
    image = model.config.image_token_id
    ids, _, learned = reader(parts, model).row_of(
        1, [("What is<image> it?", "a box"), ("Sure?", "yes")]
    )
    kind = model.config.text.model_type
    system = f"<|im_start|>system\n{SYSTEM[kind]}<|im_end|>\n<|im_start|>user\n"
    asked = system + "What is it?<|im_end|>\n<|im_start|>assistant\na box<|im_end|>\n"
    asked += "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
    assert theirs.decode([i for i in ids if i != image]) == asked
    chosen = [i for i, is_learned in zip(ids, learned, strict=True) if is_learned]
    assert theirs.decode(chosen) == "a box<|im_end|>\nyes<|im_end|>"
    unmarked = reader(parts, model).row_of(1, [("One", "a"), ("Two", "b")])[0]
    assert theirs.decode(unmarked[: unmarked.index(image)]) == system
    start = len(theirs(system + "What is").input_ids)
    assert [place for place, i in enumerate(ids) if i == image] == list(range(start, start + 16))
    # a model that is not asked in turns: the prompt, a newline, the answer and its end
    plain = opened(parts, "--option chat=false")
    ids = reader(parts, plain).row_of(1, [("Say<image>", "box")])[0]
    assert theirs.decode([i for i in ids if i != image]) == "Say\nbox<|im_end|>"
    # bos, where the tokenizer's file adds it, stands before a picture; config.json alone adds none
    tokenizer = load_tokenizer(parts / "text/tokenizer.json")
    bos = theirs("!").input_ids
    config = replace(plain.config, bos_token_id=bos[0])
    for before in ([], bos):
        tokenizer.before = before
        ids = processor_for(config, tokenizer).row_of(1, [("Say", "box")])[0]
        assert ids == [*before, *[image] * 16, *theirs("Say\nbox<|im_end|>").input_ids]
    # and as the language model's own files say
    known = load_text_tokenizer(parts / "text")
    known.begin, known.opening = [], bos
    monkeypatch.setattr(wings, "load_text_tokenizer", lambda source: known)
    config = replace(opened(parts).config, bos_token_id=bos[0])
    texts = processor_for(config, load_tokenizer(parts / "text/tokenizer.model")).texts
    assert (texts.begin, texts.opening) == ([], bos)


def test_pictures_are_padded_to_squares(parts):
    """Breaks when a picture is stretched."""
    pixels = reader(parts, opened(parts)).pixels(Image.new("RGB", (120, 60), (255, 255, 255)))
    assert pixels.shape == (3, 60, 60)
    assert (pixels[:, 20:40] == 1).all()
    assert ((pixels[:, [0, 5, 54, 59]] - (127 / 127.5 - 1)).abs() < 1e-6).all()


@pytest.mark.long
def test_both_stages_are_trained_and_opened_elsewhere(parts, tmp_path):
    """Breaks when stage 1 changes the language model, or RUN/model needs other folders to go on or
    to answer."""
    small = "--steps 2 --step-batch 2 --batch-size 2 --device cpu --lr 0.01 --eval-every 0"
    wings.main(words(flags(parts), small, f"--no-evaluate --out {tmp_path}/1"))
    model = load_model(tmp_path / "1/model")
    moved = tmp_path / "moved"
    for name, tensor in load_text(parts / "text").state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert model.language_model.layers[0].self_attn.visual.o.B.weight.any()
    shutil.move(tmp_path / "1/model", moved)
    assert {path.suffix for path in moved.glob("tokenizer.*")} == {".json", ".model"}
    assert wording_of(str(moved)) == "llava"
    second = f"--stage 2 --base {moved} --data jsonl:{parts}/own.jsonl --out {tmp_path}/2"
    wings.main(words(second, small, f"--evaluate --eval-data jsonl:{parts}/own.jsonl"))
    again = load_model(tmp_path / "2/model")
    assert again.config.routed
    assert again.config.chat
    assert Processor.from_source(tmp_path / "2/model").texts


@torch.no_grad()
def test_a_router_counts_distances_from_the_token_itself(parts):
    """Breaks when queries and keys count positions from different numbers, as PaliGemma and
    language models do."""
    model = route(opened(parts))
    valid = torch.ones(1, 5, dtype=torch.bool)
    buckets = model.language_model.geometry(torch.randn(1, 5, 64), valid, valid.long())[0].buckets
    assert buckets[0, 4].tolist() == [2, 2, 1, 1, 0]  # distances 4 to 0, by octave


def test_features_are_of_the_layer_that_is_asked_for(parts):
    """Breaks when `feature_layer` is passed over."""
    for more, layer in (("", -2), ("--option feature_layer=-1", -1)):
        model = opened(parts, more)
        assert model.config.vision.feature_layer == layer
        assert model.vision_tower.config.feature_layer == layer
