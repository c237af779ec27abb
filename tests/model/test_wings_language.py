"""WINGS on a language model that has read text alone: a random Qwen2 and a random SigLIP of transformers."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from PIL import Image

from model.attention import set_attention_backend
from model.common import UserError
from model.generate import ask
from model.processor import Processor
from model.system_configs import LanguageWingsConfig, read_config
from model.tokenizer import load_tokenizer
from model.wings import route
from tests.model.test_wings import randomized
from train import finetune
from train.optim import trainable
from train.settings import parse
from train.systems.open import open_model
from weights.load import load_model, load_text

SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    """text/, siglip/, and own.jsonl with two pictures and a row of text alone."""
    folder = tmp_path_factory.mktemp("parts")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({piece: id_ for id_, piece in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    torch.manual_seed(0)
    ids = {"eos_token_id": 258, "pad_token_id": 256, "bos_token_id": None}  # the end of a turn: a chat model
    config = transformers.Qwen2Config(**SIZES, num_key_value_heads=1, vocab_size=264, tie_word_embeddings=False, **ids)
    text = transformers.Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in text.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    text.save_pretrained(folder / "text")
    tokenizer.save(str(folder / "text" / "tokenizer.json"))
    vision = SIZES | {"hidden_size": 20, "patch_size": 14, "image_size": 60}  # 16 patches, and a rest of 4 pixels
    siglip = transformers.SiglipConfig(vision_config=vision, text_config=SIZES | {"vocab_size": 50})
    transformers.SiglipModel(siglip).save_pretrained(folder / "siglip")
    rows = [{"prefix": "Hello?", "suffix": "hi"}]
    for name, size in (("a.png", (40, 20)), ("b.png", (30, 30))):
        Image.new("RGB", size, (200, 30, 90)).save(folder / name)
        turns = [("What is<image> it?", "a box"), ("Sure?", "yes")]
        said = [{"from": role, "value": v} for turn in turns for role, v in zip(("human", "gpt"), turn, strict=True)]
        rows.append({"image": name, "conversations": said})
        rows.append({"image": name, "prefix": "Say<image>", "suffix": "box"})
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def flags(parts: Path, *more: str) -> list[str]:
    """The flags of stage 1."""
    base = f"--arch wings --stage 1 --r 4 --base {parts}/siglip --data jsonl:{parts}/own.jsonl".split()
    return [*base, "--option", f"language_model={parts / 'text'}", *more]


def opened(parts: Path, *more: str):
    return open_model(parse(flags(parts, *more))[0], CPU)[0].eval()


def reader(parts: Path, model) -> Processor:
    return Processor(model.config, load_tokenizer(parts / "text" / "tokenizer.json"))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_start_is_the_language_model(parts, dtype):
    """Breaks when a picture's parts move a logit of text alone before they have learned anything, in either stage."""
    text, ids = load_text(parts / "text", dtype), torch.randint(0, 256, (2, 11))
    first = opened(parts).to(dtype)
    valid = torch.ones_like(ids)
    valid[0, :4] = 0
    for model in (first, route(first)):
        backend = "sdpa" if model is first else "eager"  # a router needs the weights of attention
        for each in (model, text):
            set_attention_backend(each, backend)
        logits = model(ids, None, torch.zeros_like(ids), valid)
        assert torch.equal(logits[valid.bool()], text(ids, valid)[valid.bool()])
        assert torch.equal(model(ids, None, torch.zeros_like(ids)), text(ids))


@torch.no_grad()
def test_a_picture_anywhere(parts):
    """Breaks when a picture is not read where it stands, or its tokens see later text; caches: test_contract.py."""
    model = randomized(route(opened(parts)))
    processor = reader(parts, model)
    batch = processor([Image.new("RGB", (40, 20), (0, 90, 200)), None], ["Where is<image> the dog?", "Hello?"])
    slot = batch.input_ids[0] == model.config.image_token_id
    assert slot.sum() == model.config.num_image_tokens == 16
    logits, other = (
        model(batch.input_ids, sign * batch.pixel_values, batch.token_type_ids, batch.attention_mask)
        for sign in (1, -1)
    )
    start = int(slot.int().argmax())
    assert torch.equal(other[0, :start], logits[0, :start]) and torch.equal(other[1], logits[1])
    assert (other[0, start:] - logits[0, start:]).abs().amax(1).min() > 0
    assert isinstance(ask(model, processor, [None], ["Hello?"], max_new_tokens=3)[0], str)


def test_a_conversation_is_laid_out_and_learned_as_released(parts):
    """Breaks when a picture is elsewhere in a turn, or another token is learned; the turns: test_chat.py."""
    model = opened(parts)
    processor, text = reader(parts, model), tokenizers.Tokenizer.from_file(str(parts / "text" / "tokenizer.json"))
    image = model.config.image_token_id

    def spelled(ids, learned=None) -> str:
        """The text of a row, or of its learned tokens."""
        chosen = zip(ids, learned or [1] * len(ids), strict=True)
        return text.decode([i for i, is_chosen in chosen if is_chosen and i != image], skip_special_tokens=False)

    user, mine = "<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n"
    ids, _, learned = processor.layout(1, "Sure?", "yes", [("What is<image> it?", "a box")])
    first = SYSTEM + user.format("What is it?") + mine
    assert spelled(ids) == first + "a box<|im_end|>\n" + user.format("Sure?") + mine + "yes<|im_end|>"
    assert spelled(ids, learned) == "a box<|im_end|>\nyes<|im_end|>"
    before = len(text.encode(SYSTEM + "<|im_start|>user\nWhat is").ids)
    assert ids[before : before + 17] == [*[image] * 16, *text.encode(" ").ids]
    # without a mark the picture opens the last question
    ids = processor.layout(1, "Sure?", None, [("What?", "a box")])[0]
    opening = SYSTEM + user.format("What?") + mine + "a box<|im_end|>\n<|im_start|>user\n"
    assert ids[len(text.encode(opening).ids) :][:16] == [image] * 16
    # a model that is not asked in turns: the prompt, a newline, the answer and its end
    plain = opened(parts, "--option", "chat=false")
    ids, _, learned = reader(parts, plain).layout(1, "Say<image>", "box")
    assert spelled(ids) == "Say\nbox<|im_end|>" and spelled(ids, learned) == "box<|im_end|>"


def test_pictures_are_padded_to_squares(parts):
    """Breaks when a picture is stretched."""
    pixels = reader(parts, opened(parts)).pixels(Image.new("RGB", (120, 60), (255, 255, 255)))
    assert pixels.shape == (3, 60, 60) and (pixels[:, 20:40] == 1).all()
    assert ((pixels[:, [0, 5, 54, 59]] - (127 / 127.5 - 1)).abs() < 1e-6).all()


@pytest.mark.long
def test_both_stages_are_trained_resumed_and_opened_elsewhere(parts, tmp_path):
    """Breaks when a stage trains another part, a run does not go on to the bit, or RUN/model needs other folders."""
    small = "--steps 4 --step-batch 2 --batch-size 2 --checkpoint-every 2 --no-evaluate".split()
    small += "--device cpu --lr 0.01".split()
    finetune.main([*flags(parts), *small, "--out", str(tmp_path / "1")])
    model = load_model(tmp_path / "1" / "model")
    text = load_text(parts / "text").state_dict()
    for name, tensor in text.items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert model.language_model.layers[0].self_attn.visual.o.B.weight.any()
    shutil.copytree(tmp_path / "1", tmp_path / "again", ignore=shutil.ignore_patterns("model", "*4", ".lock"))
    finetune.main(["--resume", str(tmp_path / "again")])
    for name, tensor in load_model(tmp_path / "again" / "model").state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name

    moved = tmp_path / "moved"
    shutil.move(tmp_path / "1" / "model", moved)
    second = f"--arch wings --stage 2 --base {moved} --data jsonl:{parts}/own.jsonl".split()
    learned = trainable(open_model(parse(second)[0], CPU)[0])
    assert {name.split(".")[0] for name in learned} == {"multi_modal_projector", "language_model"}
    assert {"language_model.lm_head.weight", "language_model.layers.0.self_attn.router.linear.weight"} <= learned.keys()
    asked = f"--evaluate --eval-every 0 --eval-data jsonl:{parts}/own.jsonl".split()  # text alone, too
    finetune.main([*second, *small, *asked, "--out", str(tmp_path / "2")])
    assert len((tmp_path / "2" / "answers.jsonl").read_text().splitlines()) == 3
    again, processor = load_model(tmp_path / "2" / "model"), Processor.from_source(tmp_path / "2" / "model")
    assert again.config.routed and again.config.chat and again.config == read_config(tmp_path / "2/model/config.json")
    assert type(again.config) is LanguageWingsConfig and processor.text is not None


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--option language=x", "--option language"),
        ("--option chat=maybe", "--option chat=maybe"),
        ("--option feature_layer=9", "feature_layer 9"),
        ("--stage 2", "stage 1 has decided that"),
    ],
)
def test_options_that_make_no_model_are_refused(parts, option, message):
    """Breaks when a misspelt or impossible option trains something else."""
    with pytest.raises(UserError, match=message):
        opened(parts, *option.split())


@torch.no_grad()
def test_a_router_counts_distances_from_the_token_itself(parts):
    """Breaks when queries and keys count positions from different numbers, as PaliGemma and language models do."""
    model = route(opened(parts))
    x, valid = torch.randn(1, 5, model.config.text.hidden_size), torch.ones(1, 5, dtype=torch.bool)
    buckets = model.language_model.geometry(x, valid, valid.long())[0].buckets
    assert buckets[0, 4].tolist() == [2, 2, 1, 1, 0]  # distances 4 to 0, by octave
