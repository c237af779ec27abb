"""What every model promises: a cache, other rows, the side of the padding, checkpointing and the
choice of positions change nothing. One contract for all models that answer."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_pre_hook

from eval.answer import log_likelihoods
from model import paligemma
from model.config import PaliGemmaConfig, TextConfig, VisionConfig
from model.differential import KINDS, graft
from model.generate import generate
from model.paligemma import PaliGemma
from model.systems import configs
from model.systems.mamba import MambaLM
from tests.files import json_lines
from tests.reference import is_valid, left_padded, randomize, relative_error, right_padded
from weights.load import kind_of

IMAGE = 63
SLOTS = 4  # a picture takes four tokens
ROWS = ((5, 6), (2, 4), (1, 5))  # tokens of prefix and suffix; the longest passes the window
VISION = VisionConfig(20, 28, 3, 2, patch_size=14, image_size=28)
GEMMA = TextConfig("gemma", 64, 24, 40, 3, 2, 1, head_dim=16)
# soft caps saturate, and half as many heads are left for pairs
GEMMA2 = replace(
    GEMMA, model_type="gemma2", num_attention_heads=4, num_key_value_heads=2, sliding_window=6
)
GEMMA2 = replace(
    GEMMA2, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, query_pre_attn_scalar=24
)
FAMILY = vars(GEMMA) | {"hidden_activation": "silu", "tie_word_embeddings": False}
QWEN = configs.LlamaConfig(**FAMILY | {"model_type": "qwen2"})
LLAMA = configs.LlamaConfig(
    **FAMILY | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    stretch=configs.RopeStretch(4.0, 1.0, 4.0, 40),
)
BASE = PaliGemmaConfig(VISION, GEMMA, IMAGE)
MAMBA = configs.MambaConfig(64, 28, 3, state_size=5, conv_kernel=3, eos_token_id=1, bos_token_id=2)
PROJECTOR = configs.ProjectorConfig(
    queries=4, hidden_size=24, num_blocks=2, num_attention_heads=4, state_size=6
)
WIDE = replace(VISION, image_size=42, feature_layer=-2)  # nine features for four queries
BASE2 = replace(BASE, text=GEMMA2)
TEXT = replace(GEMMA2, model_type="gemma")
MODELS = {
    "paligemma 1": BASE,
    "paligemma 2": BASE2,
    **dict.fromkeys(KINDS, BASE2),
    "wings 1": configs.WingsConfig(**vars(BASE), rank=5, routed=False),
    "wings 2": configs.WingsConfig(**vars(BASE), rank=5),
    "wings on gemma 2": configs.WingsConfig(**vars(BASE2), rank=5),
    "wings on llama": configs.LanguageWingsConfig(VISION, LLAMA, IMAGE, rank=5),
    "wings on qwen": configs.LanguageWingsConfig(VISION, QWEN, IMAGE, rank=5),
    "gemma": configs.LanguageConfig(GEMMA, (1,), 0),
    "gemma 2": configs.LanguageConfig(GEMMA2, (1,), 0),
    "llama": configs.LanguageConfig(LLAMA, (1, 2)),
    "qwen": configs.LanguageConfig(QWEN, (1, 2)),
    "plain transformer": configs.TextModelConfig.of(TEXT, False),
    "differential transformer": configs.TextModelConfig.of(TEXT, True),
    "mamba": MAMBA,
    "q-mamba": configs.QMambaConfig(WIDE, PROJECTOR, MAMBA, IMAGE),
}


@pytest.fixture(params=MODELS)
def model(request, seeded):
    config = MODELS[request.param]
    model = kind_of(config)[0](config).eval()
    if request.param in KINDS:
        graft(model, request.param)
    if isinstance(config, configs.TextModelConfig):  # it has no tokens of its own
        model.config = configs.LanguageConfig(config.text, (1,), 0)
    randomize(model)
    return model


def batch(model):
    """Left-padded rows: a picture's tokens if the model reads pictures, then prefix and suffix."""
    if vision := getattr(model.config, "vision", None):
        return left_padded(ROWS, SLOTS, vision.image_size, IMAGE)
    return left_padded(ROWS, 0, 1, IMAGE) | {"pixel_values": None}


def alone(inputs, row):
    """One row without its padding."""
    valid = inputs["attention_mask"][row].bool()
    taken = {name: None if t is None else t[row : row + 1] for name, t in inputs.items()}
    return {name: t if name == "pixel_values" else t[:, valid] for name, t in taken.items()}


def test_cached_is_uncached(model):
    """Breaks when a token read with a cache, in training too, sees other keys, positions or states
    than without."""
    inputs = batch(model)
    logits = model(**inputs)
    valid = is_valid(inputs)
    checkpoint(model, True)
    ids = inputs["input_ids"]
    width = valid.shape[1]
    for parts in ((1, 1, 1, 1), (1, 3), (2, 2)):
        cache = model.new_cache(width)
        at = 0
        read = []
        for size in (width - 4, *parts):
            end = at + size
            seen = {name: inputs[name][:, :end] for name in ("token_type_ids", "attention_mask")}
            pixels = None if at else inputs["pixel_values"]
            read.append(model(ids[:, at:end], pixel_values=pixels, cache=cache, **seen))
            at = end
        assert relative_error(torch.cat(read, dim=1)[valid], logits[valid]) <= 2e-6, parts


@torch.no_grad()
def test_a_row_depends_on_nothing_but_itself(model):
    """Breaks when other rows, or the side of the padding, change what a row computes."""
    inputs = batch(model)
    logits = model(**inputs)
    valid = is_valid(inputs)
    moved = right_padded(inputs)
    assert relative_error(model(**moved)[is_valid(moved)], logits[valid]) <= 2e-6
    for row in range(len(ROWS)):
        assert relative_error(model(**alone(inputs, row))[0], logits[row, valid[row]]) <= 2e-6


@pytest.mark.long
def test_answers_alone_together_and_padded_on_the_right(model):
    """Breaks when an answer depends on the other rows, or on the padding's side."""
    inputs = batch(model)
    together = generate(model, **inputs, max_new_tokens=10)
    assert len({tuple(row.tolist()) for row in together}) > 1
    right = generate(model, **right_padded(inputs), max_new_tokens=10)
    assert all(map(torch.equal, right, together))
    for row in range(len(ROWS)):
        (answer,) = generate(model, **alone(inputs, row), max_new_tokens=10)
        assert torch.equal(answer, together[row])


@pytest.mark.long
@torch.no_grad()
def test_choices_are_weighed_as_if_each_were_read_alone(model):
    """Breaks when choices that share a prompt's cache move each other, or a shorter one's padding
    reaches its state."""
    inputs = batch(model)
    choices = [[[5, 6], [7, 8, 9]], [[10]], [[11, 12], [13]]]
    pictures = ()
    if inputs["pixel_values"] is not None:
        pictures = model.encode_images(inputs["pixel_values"]), torch.arange(len(ROWS))
    of_rows = log_likelihoods(model, SimpleNamespace(**inputs), choices, *pictures)
    for row, found in enumerate(of_rows):
        given = alone(inputs, row)
        for choice, likelihood in zip(choices[row], found, strict=True):
            ids = torch.cat((given["input_ids"], torch.tensor([choice])), dim=1)
            types = F.pad(given["token_type_ids"], (0, len(choice)), value=1)
            more = {"token_type_ids": types, "attention_mask": torch.ones_like(ids)}
            log_p = model(**given | more | {"input_ids": ids})[0].log_softmax(-1)
            expected = log_p[-len(choice) - 1 : -1][range(len(choice)), choice].sum()
            torch.testing.assert_close(likelihood, expected, atol=1e-4, rtol=1e-4)


def checkpoint(model, on):
    if isinstance(model, MambaLM):
        model.backbone.checkpointing = on
    else:
        model.set_checkpointing(on)


@pytest.mark.long
def test_checkpointed_gradients_are_the_same(model):
    """Breaks when recomputing activations changes what is learned, or nothing is recomputed."""
    inputs = batch(model)
    gradients = []
    calls = []
    for on in (False, True):
        checkpoint(model, on)
        model.zero_grad()
        calls.append(0)
        with register_module_forward_pre_hook(lambda *_: calls.append(calls.pop() + 1)):
            model(**inputs).square().mean().backward()
        gradients.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    assert calls[0] < calls[1]
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


@torch.no_grad()
def test_positions_to_keep_are_rows_of_all_logits(model, monkeypatch):
    """Breaks when head or loss, whole or in chunks, are of other positions than those to keep; −100
    is no target."""
    for inputs in (batch(model), right_padded(batch(model))):
        logits = model(**inputs)
        index = torch.tensor([[3, 5], [4, 10], [0, 7]])
        each = torch.stack([row[i] for row, i in zip(logits, index, strict=True)])
        picks = [(2, logits[:, -2:]), (index[0], logits[:, index[0]]), (index, each)]
        for positions, expected in picks:
            assert relative_error(model(**inputs, positions_to_keep=positions), expected) <= 2e-6
        targets = torch.tensor([[5, 6], [-100, 8], [9, 10]])
        loss = F.cross_entropy(each.flatten(0, 1), targets.flatten(), reduction="sum")
        for chunk in (
            (1 << 20, 100) if not isinstance(model, MambaLM) else ()
        ):  # which is trained through a Q-Mamba
            monkeypatch.setattr(paligemma, "MAX_LOGITS", chunk)
            found = model(**inputs, positions_to_keep=index, targets=targets)
            assert found.item() == pytest.approx(loss.item(), rel=1e-5)


# image tokens of each row, pictures, and their side
MISFITS = """[[3, 5], 2, 28]
[[4, 4], 1, 28]
[[4, 0], 2, 28]
[[4, 4], 2, 42]"""


@pytest.mark.parametrize("rows, n, side", json_lines(MISFITS))
def test_image_tokens_that_do_not_fit_the_pictures_are_refused(rows, n, side):
    """Breaks when a picture is read at a part of its slots, by the next row, or not at all, exit
    code 0."""
    ids = torch.tensor([[IMAGE] * count + [5] * (6 - count) for count in rows])
    with pytest.raises(ValueError, match="image tokens" if side == 28 else "pictures"):
        PaliGemma(BASE)(ids, torch.zeros(n, 3, side, side), torch.zeros_like(ids))
