"""WINGS: no learner sees later tokens, each computes the formula of the paper, and the base model
stays intact."""

import math
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from lora import adapter
from model.attention import Rope
from model.compiled import CompiledStep
from model.differential import graft
from model.generate import generate
from model.paligemma import PaliGemma, initialize
from model.systems.configs import WingsConfig
from model.systems.wings import OCTAVES, Learner, LearnerInput, Router, attach, route
from tests.model.test_contract import BASE, IMAGE, SLOTS
from tests.reference import dice, is_valid, set_attention_backend
from tests.runs import assert_same_tensors, refused, stage_settings
from train.model import load_start, open_model
from train.optim import parameter_count, parameter_names
from weights.export import export_model
from weights.load import load_model

HIDDEN = BASE.text.hidden_size
HEADS = BASE.text.num_attention_heads


def base():
    return initialize(PaliGemma(BASE)).eval()


@torch.no_grad()
def randomized(model, seed=1):
    """Every learner and router with weights that matter."""
    generator = dice(seed)
    for name, parameter in model.named_parameters():
        is_learner = re.search(r"(visual|textual)\.|^[qkvo]\.", name)
        if is_learner or "router" in name or name.startswith("linear."):
            width = parameter.shape[1] if is_learner else 1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * width**-0.5)
    return model


def wings(routed=True):
    return randomized(attach(base(), 5, routed=routed))


def batch(rows=((2, 1, 3), (0, 0, 4), (0, 1, 2))):
    """Left-padded rows of (text before, pictures, text after) in tokens."""
    generator = dice(2)
    width = max(a + SLOTS * n + b for a, n, b in rows)
    ids = torch.randint(3, IMAGE, (len(rows), width), generator=generator)
    valid = torch.zeros_like(ids)
    for row, (before, pictures, after) in enumerate(rows):
        start = width - before - SLOTS * pictures - after
        ids[row, :start] = 0
        valid[row, start:] = 1
        ids[row, start + before : width - after] = IMAGE
    count = sum(pictures for _, pictures, _ in rows)
    given = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": valid}
    return given | {"pixel_values": torch.rand(count, 3, 28, 28, generator=generator) * 2 - 1}


@pytest.mark.long
@pytest.mark.parametrize("routed", [False, True])
def test_no_query_has_a_gradient_from_what_comes_after_it(routed):
    """Breaks when a learner, the router or the mask lets a token see a later one, or padding."""
    model = wings(routed)
    inputs = batch()
    decoder = model.language_model
    valid = is_valid(inputs)
    types = (inputs["input_ids"] != IMAGE).long()
    x = torch.randn(*valid.shape, HIDDEN, generator=dice(3))
    for query in range(x.shape[1]):
        x = x.detach().requires_grad_()
        hidden = decoder(x, valid, types)[:, query]
        (gradient,) = torch.autograd.grad((hidden[valid[:, query]] ** 2).sum() + 0 * x.sum(), x)
        reached = gradient.abs().sum(-1) > 0  # (B, S)
        may = valid & valid[:, query, None] & (torch.arange(x.shape[1]) <= query)
        assert torch.equal(reached, may), f"query {query}"


def rotated(vectors, positions):
    """RoPE of vectors (n, D) in fp64: pairs (i, i + D/2) are complex numbers that turn by their
    position."""
    half = vectors.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(*vectors.split(half, dim=1)) * torch.exp(1j * angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def test_a_learner_equals_the_formula_written_out():
    """Breaks when the residual 1 + W, the scale, RoPE's true positions, the mask or W_o are not
    LoRRA's."""
    generator = dice(5)
    width = HIDDEN // HEADS
    learner = randomized(Learner(HIDDEN, HEADS, 5)).double()
    h, x = (torch.randn(1, n, HIDDEN, generator=generator, dtype=torch.float64) for n in (5, 3))
    at = torch.tensor([1, 2, 5, 6, 9])
    of_keys = torch.tensor([2, 4, 6])  # the first query sees no key
    mask = of_keys <= at[:, None]
    # RoPE's angles are fp32 in the model: the keys' and queries' turns agree to its rounding alone
    given = LearnerInput(x, Rope(of_keys[None], 10000.0), mask[None, None])
    result = learner(h, Rope(at[None], 10000.0), given)[0]
    state = learner.state_dict()
    q, k, v, o = (state[f"{name}.A.weight"].T @ state[f"{name}.B.weight"].T for name in "qkvo")
    parts = h[0] + h[0] @ q, x[0] + x[0] @ k, x[0] + x[0] @ v
    heads = []
    for q, k, v in zip(*(part.split(width, dim=1) for part in parts), strict=True):
        logits = rotated(q, at) @ rotated(k, of_keys).T / math.sqrt(width)
        weights = logits.exp() * mask
        heads.append(weights[1:] / weights[1:].sum(1, keepdim=True) @ v)
    torch.testing.assert_close(result[1:], torch.cat(heads, dim=1) @ o, atol=1e-6, rtol=1e-5)
    assert (result[0] == 0).all()


@pytest.mark.parametrize("routed", [False, True])
def test_the_start_is_the_base(routed):
    """Breaks when a learner has a bias or another rank, or learners or routers move a logit before
    they learn."""
    plain = base()
    inputs = batch()
    model = attach(plain, 5, routed=routed)
    assert parameter_count(model.language_model.layers[0].self_attn.visual.parameters()) == 960
    parameters = model.named_parameters()
    a = torch.cat([p.flatten() for name, p in parameters if name.endswith(".A.weight")])
    assert abs(a.mean()) < 2e-3
    assert abs(a.std() - 0.02) < 1e-3
    for each in (plain, model):  # a router needs the weights: its main attention is never fused
        set_attention_backend(each, "eager" if routed else "sdpa")
    causal = torch.ones_like(inputs["token_type_ids"])
    valid = is_valid(inputs)
    assert torch.equal(model(**inputs)[valid], plain(**inputs | {"token_type_ids": causal})[valid])


def test_stage_2_starts_where_stage_1_ended(tmp_path):
    """Breaks when routing halves what the visual learners learned, or a folder forgets a learner,
    router or size."""
    first = wings(routed=False)
    inputs = batch()
    set_attention_backend(first, "eager")
    logits = first(**inputs)
    valid = is_valid(inputs)
    second = route(first)
    set_attention_backend(second, "eager")
    assert torch.equal(second(**inputs)[valid], logits[valid])
    assert torch.equal(first(**inputs), logits)
    assert second.config.routed
    assert {n for n, _ in second.named_parameters()} > {n for n, _ in first.named_parameters()}
    export_model(randomized(second, seed=7), tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert again.config == second.config == WingsConfig(**vars(BASE), rank=5)
    assert_same_tensors(again.state_dict(), second.state_dict())


def test_what_a_layer_adds_is_the_routed_sum():
    """Breaks when a learner is left out, added twice, or weighed by the other's weight."""
    model = wings()
    inputs = batch()
    seen = {}
    attention = model.language_model.layers[1].self_attn
    for name in "visual textual router o_proj".split():
        attention.get_submodule(name).register_forward_hook(
            lambda m, args, out, name=name: seen.__setitem__(name, out)
        )
    attention.register_forward_hook(lambda m, args, out: seen.__setitem__("all", out))
    model(**inputs)
    learners = torch.stack((seen["visual"], seen["textual"]), dim=-1)
    expected = seen["o_proj"] + (learners * seen["router"][..., None, :]).sum(-1)
    torch.testing.assert_close(seen["all"], expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(seen["router"].sum(-1), torch.ones(seen["router"].shape[:2]))


def test_a_router_reads_octaves_of_distance():
    """Breaks when a row of attention is not summed as documented: by distance, apart for pictures
    and text."""
    router = randomized(Router())
    size = 20
    weights = torch.rand(1, HEADS, size, size, generator=dice(4)).tril()
    columns = torch.tensor([[3, 4, 5, 6, 1 << 40]])
    decoder = wings().language_model
    at = torch.arange(1, 21)[None]
    result = router(weights, decoder.bucket(at, at, columns))
    for i in range(size):
        pooled = torch.zeros(2 * OCTAVES)
        for j in range(i + 1):
            octave = (i - j + 1).bit_length() - 1
            kind = 1 if 3 <= j < 7 else 0  # a picture's, or text
            pooled[octave + OCTAVES * kind] += weights[0, :, i, j].sum()
        expected = F.silu(router.linear(pooled)).softmax(-1)
        torch.testing.assert_close(result[0, i], expected, atol=1e-5, rtol=1e-5)
    assert (
        decoder.bucket(torch.tensor([[1 << 20]]), at, columns)[0, 0, 0] == OCTAVES - 1
    )  # far away is one group


def test_a_batch_of_text_alone_gives_every_parameter_a_gradient():
    """Breaks when processes that train together wait for gradients that one of them does not
    have."""
    model = wings()
    model(**batch(((0, 0, 4), (0, 0, 2)))).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not model.language_model.layers[0].self_attn.visual.o.B.weight.grad.any()


def test_what_a_cache_keeps():
    """Breaks when the caches have room for tokens that never come."""
    model = wings()
    inputs = batch(((2, 1, 6), (0, 0, 9), (0, 1, 5)))
    first = {name: of if name == "pixel_values" else of[:, :-3] for name, of in inputs.items()}
    cache = model.new_cache(inputs["input_ids"].shape[1])
    model(**first, cache=cache)
    assert cache[0].visual.capacity == SLOTS
    assert cache[0].textual.capacity == 9  # of the row of text alone
    refused(
        lambda: generate(model, **inputs, max_new_tokens=2, compiled=CompiledStep(model)),
        "without --compile",
    )


@pytest.mark.long
def test_each_stage_trains_its_parts(tmp_path):
    """Breaks when a stage trains the vision tower, forgets a part, has another rate than the paper,
    or comes first."""
    projector = r"multi_modal_projector\..*"
    rest = r"language_model\..*"
    visual = r"language_model\.layers\.\d\.self_attn\.visual\..*"
    export_model(attach(load_model("embedded"), 4), tmp_path / "model")
    stages = (
        ("embedded", {projector: 2e-4, visual: 2e-4}),
        (tmp_path / "model", {projector: 1e-5, rest: 2e-6}),
    )
    for stage, (source, wanted) in enumerate(stages, 1):
        settings = stage_settings("wings", f"--stage {stage} --base {source} --r 4 --data jsonl:x")
        model, optimizer = open_model(settings, torch.device("cpu"))
        rates = {}
        for group in optimizer.param_groups:
            assert group["weight_decay"] == (1e-9, 1e-8)[stage - 1]
            rates |= dict.fromkeys(group["names"], group["base_lr"])
        expected = {}
        for pattern, rate in wanted.items():
            expected |= dict.fromkeys(parameter_names(model, pattern), rate)
        assert rates == pytest.approx(expected)
        assert model.config.routed == (stage == 2)
        assert settings.step_batch == (256, 64)[stage - 1]
        recipe = settings.schedule, settings.warmup, settings.clip, settings.epochs
        assert recipe == ("cosine", 0.03, 1.0, 1)
    settings = stage_settings("wings", "--stage 2 --base embedded --r 4 --data jsonl:x")
    refused(lambda: load_start(settings, torch.device("cpu")), "no model of stage 1")


def test_learners_go_beside_plain_attention_alone():
    """Breaks when learners are put beside a graft or an adapter, whose tensors they would not take
    over."""
    models = grafted, adapted, _ = base(), base(), wings()
    graft(grafted, "twin")
    adapter.inject(adapted, r".*q_proj", 2, 4.0)
    for model in models:
        refused(
            partial(attach, model), "a plain PaliGemma" if model is adapted else "plain attention"
        )
