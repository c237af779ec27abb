"""Every variant against its equation written out in fp64, and what makes a graft safe: exact
starts, caches, names."""

import json
import math
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import Qwen3NextConfig
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.qwen3_next import modeling_qwen3_next

from lora import adapter
from lora.adapter import LoRALinear, quantize
from model import differential
from model.attention import Attention, Rope, attention_mask, tapped
from model.config import PaliGemmaConfig, TextConfig, VisionConfig
from model.differential import KINDS, fold, graft, lambdas, map_distance, new_parameters
from model.paligemma import PaliGemma, initialize
from tests.files import json_lines
from tests.reference import (
    backends,
    dtypes,
    generations,
    left_padded,
    relative_error,
    set_attention_backend,
)
from tests.runs import assert_same_tensors, refused
from train.optim import SCALARS, trainable

pytestmark = pytest.mark.usefixtures("seeded")

# Each way to compute a head. Adding a variant adds its line here and its equation to
# `heads_by_equation`.
VARIANTS = """softmax softmax
shared shared
shared-bare shared norm=false lambda_init=0.3
split split
split-bare split norm=false lambda_init=0.0
split-fresh split rope_pairs="fresh"
twin twin r=3 alpha=6.0 mu=0.7
v2 v2 r=3 alpha=6.0
v2-published v2 r=3 alpha=6.0 exact=false
dex dex
dex-heads dex heads=[1]
difflora difflora r=3 alpha=6.0
difflora-alone difflora r=3 alpha=6.0 alone=true norm=true
mean mean
gate gate
temperature temperature
sink sink"""


def parsed(options):
    """Options as on the command line, NAME=VALUE with JSON's values."""
    pairs = (option.split("=") for option in options)
    return {name: json.loads(value) for name, value in pairs}


LINES = map(str.split, VARIANTS.splitlines())
VARIANTS = {variant: (kind, parsed(options)) for variant, kind, *options in LINES}
EXACT = "softmax twin v2 dex dex-heads mean gate temperature".split()
THETA = 10000.0
IMAGE = 127
# of `plain_attention`
SIZES = """{"k": 1}
{"k": 2}
{"k": 4, "d": 20, "bias": true}
{"k": 2, "softcap": 2.0}"""
TARGETS = r"language_model\..*\.(self_attn|mlp)\.\w+_proj"


def plain_attention(n=4, k=2, d=16, hidden=24, softcap=None, bias=False):
    """Weights of unit gain, queries and keys of more: attention is far from uniform."""
    attention = Attention(hidden, n, k, d, scale=d**-0.5, softcap=softcap, bias=bias)
    for name, parameter in attention.named_parameters():
        gain = 1.5 if name.startswith(("q_", "k_")) else 1.0
        nn.init.normal_(parameter, std=gain * hidden**-0.5)
    return attention


@torch.no_grad()
def stir(model, plain_names):
    """Move every parameter that is new off its starting value."""
    for name, parameter in model.named_parameters():
        if name not in plain_names:
            parameter.add_(0.3 * torch.randn_like(parameter))


def sibling(variant, layer=2, lora=False, **sizes):
    """A plain attention and its sibling with every new parameter, and LoRA on q and k, off its
    starting value."""
    plain = plain_attention(**sizes)
    kind, options = VARIANTS[variant]
    module = KINDS[kind](plain, layer, **options)
    old = set(plain.state_dict())
    if lora:
        for name in ("q_proj", "k_proj"):
            setattr(module, name, LoRALinear(getattr(module, name), 3, 6.0))
        old |= {name.replace("_proj.", "_proj.base_layer.") for name in old}
    stir(module, old)
    return plain, module


def inputs(rows=2, width=9, hidden=24, start=1):
    """Hidden states, positions from `start`, and a prefix-LM mask with padding in the first row."""
    valid = torch.ones(rows, width, dtype=torch.bool)
    valid[0, :2] = False
    types = (torch.arange(width) >= 5).long().expand(rows, width)
    positions = torch.arange(start, start + width).expand(rows, width)
    return torch.randn(rows, width, hidden), Rope(positions, THETA), attention_mask(valid, types)


def tiny(generation=1, dtype=torch.float32):
    """Two layers a tower; heads of 20 in the vision tower, so that their halves (10) need filling
    up."""
    text = TextConfig("gemma", 128, 72, 96, 2, 4, 1, head_dim=16)
    if generation == 2:
        caps = {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24, "sliding_window": 6}
        text = replace(text, model_type="gemma2", num_key_value_heads=2, **caps)
    model = PaliGemma(
        PaliGemmaConfig(VisionConfig(40, 56, 2, 2, 14, 28), text, image_token_id=IMAGE)
    )
    return initialize(model, position_std=0.5).to(dtype).eval()


def batch(rows=((5, 4), (2, 3))):
    """A left-padded batch of (prefix, suffix) lengths after a picture of 4 tokens."""
    return left_padded(rows, 4, 28, IMAGE, seed=3)


def logits_of(model):
    """The logits of `batch`."""
    return model(**batch())


def grafted(variant, diff_in="both", stirred=True, **kwargs):
    model = tiny(**kwargs)
    plain_names = set(model.state_dict())
    kind, options = VARIANTS[variant]
    graft(model, kind, diff_in=diff_in, **options)
    if stirred:
        stir(model, plain_names)
    return model


def turned(x, positions):
    """RoPE as multiplication of complex numbers, channel i with channel i + width/2; x (S,
    width)."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * THETA ** -(torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), dim=-1)


def heads_by_equation(module, variant, x, positions, mask):  # noqa: C901  # every variant, written a second time
    """The output of `module` for one row x (S, H) in fp64, head by head, from its parameters and
    the papers alone."""
    kind, options = VARIANTS[variant]
    p = {name: value.double() for name, value in module.state_dict().items()}
    width = module.head_dim
    groups = module.num_heads // module.num_key_value_heads
    x = x.double()
    positions = positions.double()

    def low_rank(name):
        return (
            2.0 * p[f"{name}.lora_B.weight"] @ p[f"{name}.lora_A.weight"]
        )  # alpha / r = 2 throughout

    def projected(name, head, second=None):
        stem = f"{name}_proj." + ("base_layer." if f"{name}_proj.base_layer.weight" in p else "")
        own = slice(head * width, (head + 1) * width)
        weight = p[stem + "weight"][own]
        if second or "base_layer" in stem:
            weight = weight + low_rank(second or f"{name}_proj.lora")[own]
        bias = p.get(stem + "bias", torch.zeros(module.num_heads * width, dtype=torch.float64))
        if second and options.get("alone"):
            return x @ low_rank(second)[own].T
        return x @ weight.T + bias[own]

    def bounded(q, k, scale):
        logits = q @ k.T * scale
        if module.softcap:
            logits = module.softcap * torch.tanh(logits / module.softcap)
        return logits.masked_fill(~mask, -math.inf)

    def attention_map(q, k):
        return bounded(rotated(q), rotated(k), scale).softmax(-1)

    def second_map(head, key_head):
        k = projected("k", key_head, "k2" if "k2.lora_A.weight" in p else None)
        return attention_map(projected("q", head, "q2"), k)

    def lam():
        init = options.get("lambda_init", 0.8 - 0.6 * math.exp(-0.3))  # the second layer
        products = [(p[f"lambda_q{i}"] @ p[f"lambda_k{i}"]).exp() for i in (1, 2)]
        return products[0] - products[1] + init, init

    def normed(out):
        if not options.get("norm", True):
            return out
        rms = (out.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        init = 0.1 if kind == "difflora" else lam()[1]
        return out / rms * p["subln.weight"] * (1 - init)

    scale = width**-0.5
    rotated = partial(turned, positions=positions)
    heads = []
    for head in range(module.num_heads):
        key_head = head // groups
        q = projected("q", head)
        k = projected("k", key_head)
        v = projected("v", key_head)
        full = attention_map(q, k)
        if kind == "softmax":
            out = full @ v
        elif kind == "shared":
            out = normed((full - lam()[0] * full) @ v)
        elif kind == "split":
            quarters = torch.arange(width).view(4, -1)
            if options.get("rope_pairs") == "fresh":
                cuts = quarters.view(2, -1)
                pairs = [(rotated(q[:, cut]), rotated(k[:, cut])) for cut in cuts]
            else:
                cuts = quarters[[0, 2]].flatten(), quarters[[1, 3]].flatten()
                pairs = [(rotated(q)[:, cut], rotated(k)[:, cut]) for cut in cuts]
            first, second = (bounded(*pair, scale * 2**0.5).softmax(-1) for pair in pairs)
            out = normed((first - lam()[0] * second) @ v)
        elif kind == "twin":
            ratio = p["mu"][head] / (1 + p["mu"][head])
            out = (full - ratio * second_map(head, key_head)) @ v / (1 - ratio)
        elif kind == "difflora":
            out = (full - p["lambda_d"] * second_map(head, key_head)) @ v
            out = normed(out) if options.get("norm") else out
        elif kind == "v2":
            second = second_map(head, key_head)
            ratio = torch.sigmoid(x @ p["lambda_proj.weight"][head] + p["lambda_proj.bias"][head])
            out = full @ v - ratio[:, None] * (second @ v)
            if options.get("exact", True):
                out = out * (1 + math.exp(-4))
        elif kind == "dex":
            out = full @ v
            if head in options.get("heads", range(module.num_heads)):
                out = out - p["lambda_d"] * (out @ p["w_d"])
        elif kind == "mean":
            seen = mask.double()
            out = (full - p["lambda_mean"][head] * seen / seen.sum(-1, keepdim=True)) @ v
        elif kind == "gate":
            out = full @ v * 2 * torch.sigmoid(x @ p["gate.weight"][head])[:, None]
        elif kind == "temperature":
            out = attention_map(q * p["temperature"][head], k) @ v
        elif kind == "sink":
            logits = bounded(rotated(q), rotated(k), scale)
            beside = torch.full((len(x), 1), p["sinks"][head].item(), dtype=torch.float64)
            out = torch.cat([logits, beside], dim=-1).softmax(-1)[:, :-1] @ v
        heads.append(out)
    return torch.cat(heads, dim=-1) @ p["o_proj.weight"].T + p.get("o_proj.bias", 0.0)


@pytest.mark.long
@backends
@pytest.mark.parametrize("sizes", json_lines(SIZES))
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_is_its_equation(variant, sizes, backend):
    """Breaks when a variant computes something else, pairs a query half with another head's key, or
    drops LoRA."""
    _, module = sibling(variant, lora=True, **sizes)
    set_attention_backend(module, backend)
    x, rope, mask = inputs()
    out = module(x, rope, mask)
    for row in range(len(x)):
        expected = heads_by_equation(module, variant, x[row], rope.positions[row], mask[row, 0])
        assert relative_error(out[row], expected) < 3e-6


@pytest.mark.long
@generations
@backends
@dtypes
@pytest.mark.parametrize("variant", EXACT)
def test_exact_variants_start_at_the_base_to_the_bit(variant, dtype, backend, generation):
    """Breaks when a graft shifts the pretrained model before the first step, LoRA beside it or
    not."""
    model = tiny(generation, dtype)
    set_attention_backend(model, backend)
    kind, options = VARIANTS[variant]
    with torch.no_grad():
        base = logits_of(model)
        graft(model, kind, diff_in="both", **options)
        assert torch.equal(logits_of(model), base)
        adapter.inject(model, TARGETS, 4, 8.0, dropout=0.5)
        assert torch.equal(model.train()(**batch()), base)


def test_how_far_each_variant_starts():
    """Breaks when the column "at step 0" of the variants' table is no longer true."""
    x, rope, mask = inputs()

    def shift(kind, **options):
        plain = plain_attention()
        return relative_error(KINDS[kind](plain, 1, **options)(x, rope, mask), plain(x, rope, mask))

    assert shift("difflora") == pytest.approx(0.1, abs=1e-6)
    assert 0 < shift("sink") < 0.02 < shift("sink", start=0.0)
    assert shift("v2", exact=False) == pytest.approx(0.018, abs=1e-4)  # σ(−4)
    assert min(shift("shared"), shift("split")) > 0.1


def test_shared_is_one_scaled_attention(monkeypatch):
    """Breaks when `shared` pays for two maps."""
    attention = Mock(wraps=Attention.softmax_attention)
    monkeypatch.setattr(Attention, "softmax_attention", lambda *args: attention(*args))
    one = "softmax shared dex gate temperature sink".split()
    maps = dict.fromkeys(one, 1) | dict.fromkeys("split twin v2 difflora mean".split(), 2)
    assert {kind: KINDS[kind].maps for kind in KINDS} == maps
    assert {kind for kind, _ in VARIANTS.values()} == set(KINDS)
    for variant, (kind, _) in VARIANTS.items():
        attention.reset_mock()
        sibling(variant)[1](*inputs())
        assert attention.call_count == maps[kind]


def test_the_norm_takes_lambda_its_gradient():
    """Breaks when Eq. 5 with Eq. 6 is presented as learning λ: the norm leaves a thousandth of
    it."""
    x, rope, mask = inputs()
    target = torch.randn(2, 9, 24)
    norms = {}
    for norm in (True, False):
        torch.manual_seed(1)
        module = KINDS["shared"](plain_attention(), 3, norm=norm)
        (module(x, rope, mask) - target).pow(2).mean().backward()
        gradients = [p.grad for name, p in module.named_parameters() if name.startswith("lambda_")]
        norms[norm] = torch.cat(gradients).norm().item()
    assert norms[False] > 1e-3
    assert norms[True] < 3e-3 * norms[False]


def test_above_one_lambda_flips_the_attention():
    """Breaks when the sign flip that `shared` documents is gone: norm(s·x) = sign(s)·norm(x)."""
    _, module = sibling("shared")
    x, rope, mask = inputs()
    for name in ("lambda_q1", "lambda_k1", "lambda_q2"):
        getattr(module, name).data.zero_()
    module.lambda_k1.data[0] = 1.0

    def at(value):
        module.lambda_q1.data[0] = math.log(value - module.lambda_init + 1)
        assert module.coefficient().item() == pytest.approx(value)
        return module(x, rope, mask)

    assert relative_error(at(1.3), -at(0.7)) < 1e-6
    assert relative_error(at(0.6), at(0.1)) < 1e-3  # and otherwise λ does not matter


def test_lambda_is_scheduled_from_layer_one():
    """Breaks when layers are counted from 0, which gives the first one a negative λ_init."""
    model = tiny()
    graft(model, "shared", diff_in="both")
    for layers in (model.language_model.layers, model.vision_tower.encoder.layers):
        assert [round(layer.self_attn.lambda_init, 6) for layer in layers] == [0.2, 0.355509]
    assert KINDS["shared"](plain_attention(), 18).lambda_init == pytest.approx(0.796342, abs=1e-6)
    new = new_parameters(model)
    gains = [p for name, p in new.items() if name.endswith("subln.weight")]
    assert len(gains) == 4
    assert all((gain == 1).all() for gain in gains)
    vectors = torch.cat([p.detach() for name, p in new.items() if "lambda_" in name])
    assert len(vectors) == 2 * 4 * 16 + 2 * 4 * 20
    assert 0.08 < vectors.std() < 0.12


def test_halves_are_as_wide_as_fused_kernels_ask():
    """Breaks when CUDA's kernels refuse a half of 10 channels."""
    assert sibling("split", d=20)[1].halves(torch.ones(1, 20))[0].shape == (1, 16)


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_autocast_agrees_and_keeps_lambda_in_fp32(variant):
    """Breaks when autocast fails on mixed dtypes, or casts λ, μ or a gate down with the rest."""
    model = grafted(variant, generation=1)
    exact = logits_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        rough = logits_of(model)
        assert all(value.dtype == torch.float32 for value in lambdas(model).values())
    assert 0 < relative_error(rough, exact) < 0.2
    rough.sum().backward()
    assert all(model.get_parameter(name).grad.isfinite().all() for name in new_parameters(model))


def test_the_difference_is_taken_in_fp32():
    """Breaks when the subtraction of two bf16 outputs is rounded more than once."""
    _, module = sibling("twin")
    x, rope, mask = inputs()
    pair = torch.randn(2, 2, 4, 9, 16).bfloat16()
    outputs = iter(pair)
    module.softmax_attention = lambda *_: next(outputs)
    first, second = pair.double()
    exact = first + module.mu.double()[:, None, None] * (first - second)
    found = module.mix(x, *module.project(x, rope), mask).bfloat16()
    assert (found == exact.bfloat16()).float().mean() > 0.99


def test_autocast_does_not_round_what_a_control_adds():
    """Breaks when the change of `dex`, or the logits that `sink` sums, are those of bf16."""
    _, dex = sibling("dex")
    dex.w_d.data.normal_()
    heads = torch.randn(2, 4, 9, 16)
    exact = heads.double() - dex.lambda_d.double() * (heads.double() @ dex.w_d.double())
    _, sink = sibling("sink")
    sink.softmax_attention = lambda *_: torch.ones(2, 4, 9, 1)
    q, k = torch.randn(2, 2, 4, 9, 16).bfloat16().mul(4)
    total = (q.double() @ k.double().transpose(2, 3) * sink.scale).logsumexp(-1, keepdim=True)
    sink.sinks.data.fill_(total.mean())
    left = torch.sigmoid(total - sink.sinks.double()[:, None, None])
    with torch.autocast("cpu", torch.bfloat16):
        assert relative_error(dex.change(heads), exact) < 1e-6
        assert relative_error(sink.mix(None, q, k, k, None), left) < 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_new_parameters_are_fp32_drawn_by_the_seed_and_trained(variant):
    """Breaks when λ trains in bf16, two runs of a seed differ, or LoRA freezes λ, as in the paper's
    published code."""
    kind, options = VARIANTS[variant]

    def drawn(seed):
        model = tiny(dtype=torch.bfloat16)
        state, plain = torch.get_rng_state(), dict(model.named_parameters())
        names = graft(model, kind, diff_in="both", seed=seed, **options)
        assert torch.equal(torch.get_rng_state(), state)
        assert names == [name for name, _ in model.named_parameters() if name not in plain]
        return model, new_parameters(model)

    model, first = drawn(1)
    _, other = drawn(2)
    assert bool(first) == (kind != "softmax")
    assert all(value.dtype == torch.float32 for value in first.values())
    assert all(re.search(rf"lora|w_d|{SCALARS}", name) for name in first)  # they do not decay
    assert_same_tensors(first, drawn(1)[1])
    assert not any(torch.equal(first[n], other[n]) for n in first if re.search("a_q|lora_A", n))
    paths = adapter.inject(model, TARGETS, 2, 4.0)
    lora = {f"{path}.lora.lora_{half}.weight" for path in paths for half in "AB"}
    assert trainable(model).keys() == first.keys() | lora
    logits_of(model).float().pow(2).mean().backward()
    assert all(value.grad is not None for value in first.values())
    assert not first or any(value.grad.any() for value in first.values())


# a kind, and options of which each is refused
MISTAKES = """triplet r=1
twin rank=8 mu=0.0 mu=null mu="1" mu=HUGE mu=NaN
dex heads=[4] heads=1000000000 heads=[] heads=[true] heads=[0.0] heads="01" heads=[[0]]
dex lambda_init=null lambda_init=[[1]] lambda_init=0 lambda_init="layer" lambda_init=true
dex lambda_init=HUGE
split lambda_init=null lambda_init=[[1]] lambda_init="1" lambda_init=false rope_pairs=["kept"]
shared norm=0 norm="no" norm=null
v2 r=null r=2.0 r=true r=[2]
difflora lambda_init=1.0 lambda_init=NaN lambda_init="layer"
sink start=null start=61 start=NaN
softmax seed="x" seed=1.5 seed=null seed=HUGE""".replace("HUGE", "1" + "0" * 400)


@torch.no_grad()
def test_gate_and_sink_are_those_of_transformers():
    """Breaks when our gate is not that of Qwen3-Next, or our sink not that of gpt-oss."""
    x, _, mask = inputs()
    bias = torch.zeros(mask.shape).masked_fill(~mask, -1e9)
    _, sink = sibling("sink")
    q, k, v = sink.project(x, None)
    theirs = SimpleNamespace(num_key_value_groups=2, sinks=sink.sinks, training=False)
    heads, _ = modeling_gpt_oss.eager_attention_forward(theirs, q, k, v, bias, sink.scale)
    assert relative_error(sink.mix(x, q, k, v, mask).transpose(1, 2), heads) < 1e-6

    _, gate = sibling("gate")
    sizes = json.loads("""{"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16}""")
    config = Qwen3NextConfig(**sizes, attn_implementation="eager")
    attention = modeling_qwen3_next.Qwen3NextAttention(config, 0)
    attention.q_norm = attention.k_norm = nn.Identity()
    rows = gate.gate.weight.repeat_interleave(16, dim=0)  # theirs has a gate of each channel
    both = torch.cat([t.view(4, 16, 24) for t in (gate.q_proj.weight, rows)], dim=1)
    attention.q_proj.weight.copy_(both.flatten(0, 1))
    attention.k_proj.weight.copy_(gate.k_proj.weight)
    attention.v_proj.weight.copy_(gate.v_proj.weight)
    attention.o_proj.weight.copy_(2 * gate.o_proj.weight)  # σ, not 2σ
    unrotated = torch.ones(2, 9, 16), torch.zeros(2, 9, 16)
    assert relative_error(gate(x, None, mask), attention(x, unrotated, bias)[0]) < 1e-6


def test_mistakes_are_named_and_change_nothing():
    """Breaks when a mistyped or hopeless graft is accepted, or leaves half a graft behind."""
    model = tiny()
    for line in MISTAKES.splitlines():
        kind, *options = line.split()
        for option in options:
            refused(partial(graft, model, kind, **parsed([option])))
    assert model.grafts == ()
    assert all(type(layer.self_attn) is Attention for layer in model.language_model.layers)
    graft(model, "twin")
    again = partial(graft, model, "dex", diff_in="both")
    refused(again, "language_model.layers.0 has no plain attention")
    assert type(model.vision_tower.encoder.layers[0].self_attn) is Attention
    merged = tiny()
    adapter.inject(merged, TARGETS, 2, 4.0)
    adapter.merge(merged)
    refused(lambda: graft(merged, "v2"), "LoRA is merged")  # its update would be added again


@pytest.mark.long
@pytest.mark.parametrize("variant", ["dex", "dex-heads", "temperature"])
def test_lora_can_be_removed_after_folding(variant):
    """Breaks when `unmerge` or `disabled` restores an output projection without the fold, or a
    merge adds twice."""
    model = grafted(variant)
    adapter.inject(model, TARGETS, 2, 4.0)
    stir(model, {name for name, _ in model.named_parameters() if "lora_B" not in name})
    trained = logits_of(model)
    with adapter.disabled(model):
        without = logits_of(model)
    assert relative_error(without, trained) > 0.05
    adapter.merge(model)
    fold(model)
    for _ in range(2):
        assert relative_error(logits_of(model), trained) < 2e-6
        with adapter.disabled(model):
            assert relative_error(logits_of(model), without) < 2e-6
        assert relative_error(logits_of(model), trained) < 2e-6
        adapter.unmerge(model)
        assert relative_error(logits_of(model), trained) < 2e-6, "unmerged LoRA computes the same"
        adapter.merge(model)


UNFOLDABLE = [kind for kind in KINDS if not KINDS[kind].foldable]


@pytest.mark.parametrize("kind", [*UNFOLDABLE, "dex"])
def test_folding_refuses_what_no_plain_model_computes(kind):
    """Breaks when an export drops a second branch or a new feed-forward."""
    model = tiny()
    graft(model, kind, feed_forward="swiglu-new" if kind == "dex" else "mlp")
    refused(partial(fold, model), f"no plain model computes '{kind}'")
    assert model.language_model.layers[0].self_attn.kind == kind


def test_folding_rounds_nothing_into_8_bits():
    """Breaks when a fold is rounded into integers of 8 bits, or one that changes no weight is
    refused."""
    for kind in ("dex", "temperature", "softmax"):
        model = grafted(kind)
        quantize(model.requires_grad_(False))
        logits = logits_of(model)
        is_kept = kind != "softmax"
        if is_kept:
            refused(partial(fold, model), "is quantized")
        else:
            fold(model)
        assert torch.equal(logits_of(model), logits)
        assert bool(model.grafts) == is_kept


def swiglu(x, gate, up, down):
    gate = x @ gate.weight.T
    return (gate * torch.sigmoid(gate) * (x @ up.weight.T)) @ down.weight.T


def test_feed_forwards_of_table_1():
    """Breaks when swiglu loses the pretrained weights, or swiglu-new has another shape than Eq. 7
    or is not trained."""
    x = torch.randn(2, 5, 72)
    model = tiny()
    weights = {name: p.clone() for name, p in model.named_parameters()}
    assert graft(model, "softmax", feed_forward="swiglu") == []
    assert_same_tensors(dict(model.named_parameters()), weights)
    mlp = model.language_model.layers[1].mlp
    logits = logits_of(model)
    assert relative_error(mlp(x), swiglu(x, mlp.gate_proj, mlp.up_proj, mlp.down_proj)) < 1e-6
    fold(model)
    plain = PaliGemma(model.config)
    plain.load_state_dict(model.state_dict())
    assert model.config.text.hidden_activation == "silu"
    assert torch.equal(plain.eval()(**batch()), logits)

    model = tiny(dtype=torch.bfloat16)
    names = graft(model, "softmax", feed_forward="swiglu-new")
    mlp = model.language_model.layers[1].mlp
    assert relative_error(mlp(x), swiglu(x, mlp.w_g, mlp.w_1, mlp.w_2)) < 1e-6
    assert mlp(x.bfloat16()).dtype == torch.bfloat16
    assert mlp.w_g.weight.dtype == torch.float32
    assert len(names) == 6
    with torch.device("meta"):  # rounded down
        assert differential.SwiGLU(2048).w_g.out_features == 5461
    adapter.inject(model, TARGETS, 2, 4.0)
    assert mlp.w_g.weight.requires_grad
    assert not isinstance(mlp.w_g, LoRALinear)


def test_map_distance_is_total_variation():
    """Breaks when the logged distance is another one, counts padding, or leaves the model
    changed."""
    model = grafted("twin", stirred=False)
    distances = map_distance(model, **batch())
    assert list(distances) == list(lambdas(model))
    assert not any(distances.values())
    stir(model, {name for name, _ in model.named_parameters() if "lora_B" not in name})
    maps = []
    logits = logits_of(model)
    attention = model.language_model.layers[1].self_attn
    with tapped({attention: maps.append}):
        with tapped({attention: lambda weights: None}):
            logits_of(model)
        logits_of(model)  # the tap set before is back
    apart = (maps[0] - maps[1]).abs().sum(-1).mean(1) / 2  # (B, S)
    by_hand = apart[batch()["attention_mask"].bool()].mean()
    assert len(maps) == 2
    found = map_distance(model, **batch())
    assert found["language_model.layers.1.self_attn"] == pytest.approx(by_hand.item(), rel=1e-5)
    assert 0 < found["vision_tower.encoder.layers.0.self_attn"] < 1
    assert attention.tap is None
    assert torch.equal(logits_of(model), logits)
    assert map_distance(grafted("shared"), **batch()) == {}
