"""Weights in 8 and 4 bits: how far off they are, that LoRA learns around them, and that its adapter
fits the base."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lora import adapter
from lora.adapter import quantize
from model import cpu
from model.differential import graft
from model.linear import Linear
from model.systems.qmamba import QMamba
from tests.model.test_qmamba import CONFIG as QMAMBA
from tests.reference import batch, dice, dtypes, hf_forward, hf_model, ours, relative_error
from tests.runs import assert_same_tensors, refused, run
from train.optim import trainable
from train.settings import parse
from weights import quantize as packing
from weights.load import load_model
from weights.quantize import Int8Linear, Nf4Linear, QuantizedLinear

TARGETS = r"language_model\..*\.(q_proj|up_proj)"


@pytest.fixture
def model():
    return ours(hf_model(1), "sdpa").requires_grad_(False)


@pytest.fixture(scope="module")
def inputs():
    return batch(hf_model(1))


@torch.no_grad()
def move(model):
    """Give what is trained values that matter."""
    for parameter in trainable(model).values():
        parameter += 0.05 * torch.randn(parameter.shape, generator=dice(0))


@pytest.mark.long
@dtypes
@pytest.mark.parametrize("rows, columns", [(96, 200), (1, 7), (300, 2048), (64, 63)])
def test_nf4_is_that_of_bitsandbytes(rows, columns, dtype, seeded):
    """Breaks when a code, a nibble, a block, a scale or the table of scales is another than
    theirs."""
    functional = pytest.importorskip("bitsandbytes").functional
    linear = Linear(columns, rows, bias=False).to(dtype)
    weight = linear.weight.requires_grad_(False)
    weight *= torch.logspace(-3, 2, rows)[:, None].to(dtype)
    packed, state = functional.quantize_4bit(
        weight, blocksize=64, quant_type="nf4", compress_statistics=True
    )
    layer = Nf4Linear(linear)
    assert torch.equal(packing.dynamic_table(), state.state2.code)
    assert torch.equal(layer.weight[: packed.numel()], packed.flatten())
    assert torch.equal(layer.nested_scale, state.state2.absmax)
    assert layer.offset == state.offset
    # theirs looks scales up in bins, so that one beside the middle of two entries may get the other
    between = (layer.table[layer.scale.int()] + layer.table[state.absmax.int()]) / 2
    largest = torch.stack([block.abs().max() for block in weight.float().flatten().split(64)])
    of_block = layer.nested_scale.repeat_interleave(packing.NESTED_BLOCK)[: len(largest)]
    differ = (layer.scale != state.absmax) & (
        of_block > 0
    )  # a single block is its mean: any entry times 0
    assert (((largest - layer.offset) / of_block - between).abs()[differ] < 2e-5).all()
    layer.scale.copy_(state.absmax)
    assert torch.equal(layer.put_back().weight, functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("kind", packing.KINDS)
@dtypes
def test_products_are_those_of_the_stored_weights(kind, dtype, monkeypatch, seeded):
    """Breaks when few rows, many rows, a block of the weight, the plain way or a cast computes by
    other numbers, a scale belongs to another channel, or a value wraps around."""
    tolerance = 1e-6 if dtype == torch.float32 else 5e-3
    for width, out in ((128, 300), (70, 64), (192, 17)):
        linear = Linear(width, out, bias=dtype == torch.float32).requires_grad_(False)
        linear.weight *= torch.linspace(1, 4, out)[:, None]
        linear.weight[5] = 0
        if kind == "int8":  # a value that towers above its channel, and is negative
            linear.weight[7, 3] = -linear.weight[7].abs().max() - 1
        layer = packing.KINDS[kind](linear)
        weight = layer.put_back().weight.double()
        error = (weight - linear.weight.double()).abs().amax(1)
        # of 8 bits half a step, whose scale is rounded to bf16 by up to 2⁻⁸
        share = {"int8": 0.502 / 127, "nf4": 0.2}[kind]
        assert (error <= share * linear.weight.abs().amax(1)).all()
        if kind == "int8":
            assert layer.scale.bfloat16().float().equal(layer.scale)
        for rows in (1, 16, 17, 40):
            x = torch.randn(2, rows, width)[:1].to(dtype)
            exact = F.linear(x.double(), weight)
            if linear.bias is not None:
                exact += linear.bias
            with monkeypatch.context() as patch, torch.no_grad():
                patch.setattr("model.linear.BLOCK_ELEMENTS", 1 << 14)
                assert relative_error(layer(x), exact) < tolerance
                patch.setattr("weights.quantize._int8_product", None)
                plain = layer(x)
                patch.setattr(cpu, "ways", frozenset({"bf16"}))
                wide = layer(x)
            assert relative_error(plain, exact) < tolerance
            assert wide.dtype == plain.dtype == dtype
            assert relative_error(wide, exact) < (tolerance if rows < 17 else 2e-3)
        assert torch.equal(layer.to(torch.bfloat16).put_back().weight.double(), weight)


@pytest.mark.parametrize("kind", packing.KINDS)
@torch.no_grad()
def test_a_quantized_model_is_transformers_with_these_weights(kind, inputs, tmp_path, monkeypatch):
    """Breaks when a layer is quantized that computes otherwise, or one that is quantized while it
    is read."""
    monkeypatch.setattr("model.linear.BLOCK_ELEMENTS", 1 << 12)
    hf = hf_model(1)
    hf.save_pretrained(tmp_path, max_shard_size="100KB")
    model = load_model(tmp_path, quantize=kind)
    in_place = ours(hf_model(1), "sdpa")
    fingerprint = adapter.fingerprint(in_place)
    state = model.state_dict()
    quantize(in_place, kind, head=True)
    assert adapter.fingerprint(model) == adapter.fingerprint(in_place) == fingerprint
    assert_same_tensors(in_place.state_dict(), state)
    quantized = model(**inputs)
    adapter.merge(model)  # puts all back
    assert adapter.fingerprint(model) == fingerprint
    hf.load_state_dict(
        {f"model.{name}": tensor for name, tensor in model.state_dict().items()}, strict=False
    )
    assert relative_error(quantized, hf_forward(hf, inputs)) < 1e-5
    assert relative_error(model(**inputs), hf_forward(hf, inputs)) < 1e-5


def test_what_is_quantized_and_what_cannot_be(model):
    """Breaks when what learns, the embedding or a norm goes to 8 bits, a frozen layer stays, or a
    mistake passes."""
    refused(lambda: quantize(model, "int3"), "int3", "int8, nf4")
    refused(lambda: quantize(QMamba(QMAMBA), "nf4"), "QMamba")
    model.requires_grad_(True)
    refused(lambda: quantize(model, "nf4"), "no layer is frozen")
    assert model.quantized is None
    adapter.inject(model, TARGETS, 3, 6.0)
    adapter.merge(model)
    refused(lambda: quantize(model), "merged")
    adapter.unmerge(model)
    trained = list(trainable(model))
    linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    for _ in range(2):  # a second time changes nothing
        quantize(model)
        packed = [m for m in model.modules() if isinstance(m, Int8Linear)]
        assert len(packed) == linears - len(trained)
        assert sum(p.dtype == torch.int8 for p in model.parameters()) == len(packed)
        assert list(trainable(model)) == trained
    refused(lambda: quantize(model, "nf4"), "quantized to int8 already")


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, bits", [("softmax", "int8"), ("twin", "int8"), ("v2", "nf4"), ("shared", "int8")]
)
def test_gradients_reach_lora_as_through_the_whole_weights(kind, bits, model, inputs):
    """Breaks when the backward pass multiplies by another matrix than the forward pass."""
    if kind != "softmax":
        graft(model, kind)
    adapter.inject(model, TARGETS, 3, 6.0)
    move(model)
    quantize(model, bits)
    exact = copy.deepcopy(model)
    for path, layer in list(exact.named_modules()):
        if isinstance(layer, QuantizedLinear):  # the same weights, as plain layers of fp32
            exact.set_submodule(path, layer.put_back())
    model.language_model.checkpointing = bits == "nf4"
    for either in (model, exact):
        either(**inputs, targets=inputs["input_ids"].roll(-1, 1)).backward()
    for name, parameter in trainable(exact).items():
        assert parameter.grad.any(), name
        assert relative_error(model.get_parameter(name).grad, parameter.grad) <= 2e-4, name


def test_nothing_is_kept_for_the_backward_pass_but_the_8_bits():
    """Breaks when autograd holds every weight once more, put back, or autocast is ignored."""
    layer = Int8Linear(Linear(512, 512))
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        layer(torch.randn(2, 512, requires_grad=True)).sum().backward()
    assert sum(t.numel() * t.element_size() for t in held) <= 512 * 512 + 4 * 512 + 4 * 2 * 512
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, 512)).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", packing.KINDS)
@torch.no_grad()
def test_the_adapter_belongs_to_the_whole_base(kind, tmp_path, inputs):
    """Breaks when an adapter is refused by its base, computes otherwise than in training, or is
    merged elsewhere."""
    hf = hf_model(1)
    whole, quantized, later, plain = (ours(hf, "sdpa").requires_grad_(False) for _ in range(4))
    adapter.inject(quantized, TARGETS, 3, 6.0)
    quantize(quantized, kind)
    move(quantized)
    before = quantized(**inputs)
    adapter.save(quantized, tmp_path)
    adapter.load(whole, tmp_path)
    assert torch.equal(whole(**inputs), before), "the base is quantized as in training"
    adapter.load(plain, tmp_path, whole=True)
    assert plain.quantized is None
    quantize(later, kind)
    adapter.load(later, tmp_path)  # quantized first, adapted afterwards
    assert relative_error(later(**inputs), before) < 1e-5
    adapter.merge(quantized)
    assert quantized.quantized is None
    assert relative_error(quantized(**inputs), before) < 1e-5
    adapter.unmerge(quantized)
    assert relative_error(quantized(**inputs), before) < 1e-6
    adapter.save(quantized, tmp_path)
    again = ours(hf, "sdpa").requires_grad_(False)
    adapter.load(again, tmp_path)
    assert torch.equal(again(**inputs), before), "saved after merging it is the same adapter"


@pytest.mark.long
def test_the_command(tmp_path):
    """Breaks when --quantize cannot train, opens another base, or takes weights that learn or are
    sharded."""
    flags = "--attention twin --steps 4 --lr 1e-2"
    plain, packed = (run(flags, more, out=tmp_path / more[-4:]) for more in ("", "--quantize int8"))
    losses = [r["loss"] for r in plain]
    assert [r["loss"] for r in packed] == pytest.approx(losses, rel=2e-2)
    assert [r["loss"] for r in packed] != losses
    adapter.load(load_model("tiny"), tmp_path / "int8")
    for more in ("--full --attention softmax", "--shard"):
        flags = f"--base tiny --device cpu --quantize int8 {more}".split()
        refused(partial(parse, flags), "--quantize")
