"""Weights in 8 and 4 bits: how far off they are, that LoRA learns around them, and that its adapter fits the base."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lora import adapter
from lora.adapter import quantize
from lora.quantize import (
    INT4_LAYOUTS,
    KINDS,
    NESTED_BLOCK,
    Int4Linear,
    Int8Linear,
    Nf4Linear,
    QuantizedLinear,
    dynamic_table,
    int4_layout,
)
from model import cpu
from model.common import UserError
from model.differential import graft
from model.linear import Linear
from model.qmamba import QMamba
from tests.model.test_qmamba import CONFIG as QMAMBA
from tests.reference import batch, hf_forward, hf_model, ours, relative_error
from tests.runs import run
from train.optim import trainable
from train.settings import parse
from weights.load import load_model

TARGETS = r"language_model\..*\.(q_proj|up_proj)"


def put_back(layer: Int8Linear) -> torch.Tensor:
    return layer.weight.double() * layer.scale.double()[:, None]


@pytest.mark.long
def test_nf4_is_that_of_bitsandbytes():
    """Breaks when a code, a nibble, a block, a scale or the table of scales is another than theirs."""
    functional = pytest.importorskip("bitsandbytes").functional
    torch.manual_seed(0)
    for rows, columns in ((96, 200), (1, 7), (300, 2048), (64, 63)):
        for dtype in (torch.float32, torch.bfloat16):
            linear = Linear(columns, rows, bias=False).to(dtype)
            weight = linear.weight.requires_grad_(False)
            weight *= torch.logspace(-3, 2, rows)[:, None].to(dtype)
            packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
            layer = Nf4Linear(linear)
            assert torch.equal(dynamic_table(), state.state2.code)
            assert torch.equal(layer.weight[: packed.numel()], packed.flatten())
            assert torch.equal(layer.nested_scale, state.state2.absmax) and layer.offset == state.offset
            # theirs looks scales up in bins, so that one beside the middle of two entries may get the other
            between = (layer.table[layer.scale.int()] + layer.table[state.absmax.int()]) / 2
            largest = torch.stack([block.abs().max() for block in weight.float().flatten().split(64)])
            of_block = layer.nested_scale.repeat_interleave(NESTED_BLOCK)[: len(largest)]
            differ = (layer.scale != state.absmax) & (of_block > 0)  # a single block is its mean: any entry times 0
            assert (((largest - layer.offset) / of_block - between).abs()[differ] < 2e-5).all()
            layer.scale.copy_(state.absmax)
            assert torch.equal(layer.put_back().weight, functional.dequantize_4bit(packed, state))


def test_what_is_stored():
    """Breaks when NF4's scales are stored whole, a code has a byte of its own, or a cast rounds a scale."""
    layer = Nf4Linear(Linear(1024, 1024, bias=False))
    assert 8 * sum(t.numel() * t.element_size() for t in layer.stored()) <= 4.2 * 1024**2
    for kind in KINDS.values():  # a cast leaves the scales
        cast = kind(Linear(130, 77, bias=False))
        before = cast.put_back().weight
        assert torch.equal(cast.to(torch.bfloat16).put_back().weight, before)
    zero = Nf4Linear(nn.Linear(70, 3).requires_grad_(False).apply(lambda module: nn.init.zeros_(module.weight)))
    assert not zero.put_back().weight.any()


def nibbles(layer: Int4Linear, row: int, column: int) -> int:
    """The code of one weight, by PyTorch's layout for 64 rows: two rows 32 apart in a byte, column after column."""
    block, inner = divmod(row, 64)
    packed = layer.weight.flatten()[block * 32 * layer.weight.shape[1] * 2 :]
    return int(packed[column * 32 + inner % 32]) >> 4 * (inner // 32) & 15


def test_int4_groups_by_hand(monkeypatch):
    """Breaks when a code, a nibble, a group's scale or zero, or what fills up rows and columns is another."""
    codes = (torch.arange(100 * 200) * 7919 % 1009 % 16).view(100, 200)
    codes[:, ::64], codes[:, 1::64] = 0, 15  # each group has its smallest and its largest
    scale = 2.0 ** (torch.arange(100)[:, None] % 5 - torch.arange(200) // 64)
    weight = (codes - 8) * scale + 3 * scale  # −5 to 10 steps: exact, and never 0 in the middle
    linear = Linear(200, 100, bias=False).requires_grad_(False)
    linear.weight.copy_(weight)
    for layout in INT4_LAYOUTS:
        with monkeypatch.context() as patch:
            patch.setattr("lora.quantize.int4_layout", lambda layout=layout: layout)
            layer = Int4Linear(linear)
            assert torch.equal(layer.put_back().weight, weight)
            assert layer.weight.shape == (128, 128) and layer.scales.shape == (4, 128, 2)
            assert torch.equal(layer.scales[2, 3], torch.tensor([2.0, 6.0]).bfloat16())  # 2³ / 2², and 3 of it
            if layout == (64, 32):
                for row, column in ((0, 0), (5, 1), (31, 199), (33, 100), (63, 64), (64, 7), (99, 198)):
                    assert nibbles(layer, row, column) == codes[row, column]
    pack = getattr(torch.ops.aten, "_convert_weight_to_int4pack_for_cpu", None)
    if pack and int4_layout():
        filled = F.pad(codes, (0, 56), value=5)  # a 0 in a group that is not full
        filled = F.pad(filled, (0, 0, 0, 28), value=8)  # in an empty one
        assert torch.equal(Int4Linear(linear).weight, pack(filled.int(), 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_stored_weights(kind, dtype, monkeypatch):
    """Breaks when few rows, many rows, a block of the weight or the plain way multiply by other numbers."""
    torch.manual_seed(0)
    monkeypatch.setattr("model.linear.BLOCK_ELEMENTS", 1 << 14)
    for width, out in ((128, 300), (70, 64), (192, 17)):
        linear = Linear(width, out, bias=dtype == torch.float32).requires_grad_(False)
        linear.weight *= torch.linspace(1, 4, out)[:, None]
        layer = KINDS[kind](linear)
        weight = layer.put_back().weight.double()
        worst = (weight - linear.weight.double()).abs().amax(1) / linear.weight.double().abs().amax(1)
        assert worst.max() < {"int8": 0.006, "int4": 0.09, "nf4": 0.2}[kind]
        for rows in (1, 16, 17, 40):
            x = torch.randn(2, rows, width)[:1].to(dtype)
            exact = F.linear(x.double(), weight, None if linear.bias is None else linear.bias.double())
            tolerance = 1e-6 if dtype == torch.float32 else 5e-3
            with torch.no_grad():
                assert relative_error(layer(x), exact) < tolerance
                for name, value in (("_int8_product", None), ("_int4_product", None)):
                    monkeypatch.setattr(f"lora.quantize.{name}", value)
                plain = layer(x)
                monkeypatch.setattr(cpu, "ways", frozenset({"bf16"}))
                wide = layer(x)
            monkeypatch.undo()
            monkeypatch.setattr("model.linear.BLOCK_ELEMENTS", 1 << 14)
            assert relative_error(plain, exact) < tolerance and wide.dtype == plain.dtype == dtype
            assert relative_error(wide, exact) < (tolerance if rows < 17 else 2e-3)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_decoding_takes_the_products_of_few_bits(kind, monkeypatch):
    """Breaks when a step of decoding puts all weights back, or an unsuited shape or a gradient does not."""
    module, name = (torch, "_weight_int8pack_mm") if kind == "int8" else (torch.ops.aten, "_weight_int4pack_mm_for_cpu")
    if not hasattr(module, name):
        pytest.skip("this PyTorch has no such product")
    calls, original = [], getattr(module, name)
    monkeypatch.setattr(f"lora.quantize._{kind}_product", lambda *args: calls.append(1) or original(*args))
    layer, x = KINDS[kind](Linear(128, 64)), torch.randn(16, 128).bfloat16()
    layer(x)
    assert len(calls) == 1
    for other in (x.float(), torch.cat((x, x[:1])), x.clone().requires_grad_()):
        layer(other)
    assert len(calls) == 1


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_quantized_model_is_transformers_with_these_weights(kind, inputs, tmp_path):
    """Breaks when a layer is quantized that computes otherwise, or the embedding and the head differ."""
    hf = hf_model(1)
    hf.save_pretrained(tmp_path)
    model = load_model(tmp_path, quantize=kind)
    in_place = ours(hf_model(1), "sdpa")
    linears = sum(isinstance(module, nn.Linear) for module in in_place.modules())
    fingerprint = adapter.fingerprint(in_place)
    assert quantize(in_place, kind, head=True) == linears + (kind != "nf4") and in_place.quantized == kind
    assert adapter.fingerprint(model) == adapter.fingerprint(in_place) == fingerprint
    state = in_place.state_dict()
    assert all(torch.equal(tensor, state.pop(name)) for name, tensor in model.state_dict().items()) and not state
    quantized = model(**inputs)
    adapter.merge(model)  # puts all back
    assert adapter.fingerprint(model) == fingerprint
    hf.load_state_dict({f"model.{name}": tensor for name, tensor in model.state_dict().items()}, strict=False)
    assert relative_error(quantized, hf_forward(hf, inputs)) < 1e-5
    assert relative_error(model(**inputs), hf_forward(hf, inputs)) < 1e-5


def test_what_cannot_be_quantized(model):
    """Breaks when a mistake is not told in one line, or leaves a model that is half quantized."""
    with pytest.raises(UserError, match="'int3': choose one of int8, int4, nf4"):
        quantize(model, "int3")
    adapter.inject(model, TARGETS, 3, 6.0)
    adapter.merge(model)
    with pytest.raises(UserError, match="LoRA is merged .* int8: unmerge it first"):
        quantize(model)
    assert model.quantized is None
    adapter.unmerge(model)
    assert quantize(model)
    with pytest.raises(UserError, match="quantized to int8 already: load it anew for nf4"):
        quantize(model, "nf4")
    with pytest.raises(UserError, match="QMamba cannot be quantized to int4"):
        quantize(QMamba(QMAMBA), "int4")


@pytest.mark.parametrize("kind", KINDS)
def test_merging_keeps_what_was_trained(kind, model, inputs, tmp_path):
    """Breaks when LoRA is merged into weights it was not trained around, or a model put back counts as packed."""
    adapter.inject(model, TARGETS, 3, 6.0)
    quantize(model, kind)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        before = model(**inputs)
        adapter.merge(model)
        assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
        assert relative_error(model(**inputs), before) < 1e-5
        adapter.unmerge(model)
        assert relative_error(model(**inputs), before) < 1e-6
    adapter.save(model, tmp_path)
    assert model.quantized is None and "quantized" not in (tmp_path / "adapter_config.json").read_text()
    assert quantize(model, "int4" if kind == "int8" else "int8")


@pytest.fixture
def model():
    return ours(hf_model(1), "sdpa").requires_grad_(False)


@pytest.fixture(scope="module")
def inputs():
    return batch(hf_model(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_weight_is_off_by_at_most_half_a_step_of_its_channel(dtype):
    """Breaks when a scale belongs to another channel, a value wraps around, or rounding is not to the nearest."""
    torch.manual_seed(0)
    linear = Linear(64, 48)
    with torch.no_grad():
        linear.weight *= torch.logspace(-6, 3, 48)[:, None]  # channels of very different size
        linear.weight[5] = 0
        linear.weight[7, 3] = -40 * linear.weight[7].abs().max()  # one that towers above its channel, and is negative
        linear.to(dtype)
    layer = Int8Linear(linear)
    largest = linear.weight.double().abs().amax(1)
    assert layer.weight.dtype == torch.int8 and layer.weight.abs().amax() <= 127 and not layer.weight.requires_grad
    error = (put_back(layer) - linear.weight.double()).abs().amax(1)
    # half a step; the largest value itself may be off by the rounding of its scale to bf16, 2⁻⁹
    assert (error <= largest * max(0.501 / 127, 2**-8)).all()
    assert not layer.weight[5].any() and layer.weight[7, 3] <= -126
    assert layer.scale.bfloat16().float().equal(layer.scale)
    x = torch.randn(3, 5, 64, dtype=dtype)
    expected = x.double() @ put_back(layer).T + linear.bias.double()
    assert layer(x).dtype == dtype and relative_error(layer(x), expected) <= (1e-6 if dtype == torch.float32 else 1e-2)


def test_what_is_quantized(model):
    """Breaks when something that learns, the embedding, the head or a norm goes to 8 bits, or a frozen layer stays."""
    adapter.inject(model, TARGETS, 3, 6.0)
    linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    halves = 2 * len(adapter.lora_layers(model))
    state = sum(p.numel() * p.element_size() for p in model.parameters())
    assert quantize(model) == linears - halves
    assert {p.dtype for p in trainable(model).values()} == {torch.float32}
    assert len(trainable(model)) == halves
    assert {name for name, p in model.named_parameters() if p.dtype == torch.int8} == {
        f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Int8Linear)
    }
    assert model.language_model.embed_tokens.weight.dtype == torch.float32
    assert sum(p.numel() * p.element_size() for p in model.parameters()) < 0.5 * state
    assert quantize(model) == 0  # a second time changes nothing


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "bits"), [("softmax", "int8"), ("twin", "int8"), ("v2", "nf4"), ("shared", "int8"), ("softmax", "nf4")]
)
def test_gradients_reach_lora_as_through_the_whole_weights(kind, bits, model, inputs):
    """Breaks when the backward pass multiplies by another matrix than the forward pass."""
    if kind != "softmax":
        graft(model, kind)
    adapter.inject(model, TARGETS, 3, 6.0)
    with torch.no_grad():
        torch.manual_seed(0)
        for parameter in trainable(model).values():
            parameter += 0.1 * torch.randn_like(parameter)
    quantize(model, bits)
    exact = copy.deepcopy(model)
    for path, layer in list(exact.named_modules()):
        if isinstance(layer, QuantizedLinear):  # the same weights, as plain layers of fp32
            exact.set_submodule(path, layer.put_back())
    targets = inputs["input_ids"].roll(-1, 1)
    model.language_model.checkpointing = bits == "nf4"
    for either in (model, exact):
        either(**inputs, targets=targets).backward()
    for name, parameter in trainable(exact).items():
        ours = model.get_parameter(name).grad
        assert parameter.grad.any() and relative_error(ours, parameter.grad) <= 2e-4, name
    assert not any(p.grad is not None for name, p in model.named_parameters() if name not in trainable(model))


def test_nothing_is_kept_for_the_backward_pass_but_the_8_bits():
    """Breaks when autograd holds every weight once more, put back, or autocast is ignored and slows the rest down."""
    layer, held = Int8Linear(Linear(512, 512)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        layer(torch.randn(2, 512, requires_grad=True)).sum().backward()
    assert sum(t.nbytes for t in held) <= 512 * 512 + 4 * 512 + 4 * 2 * 512
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, 512)).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_belongs_to_the_whole_base(kind, tmp_path, inputs):
    """Breaks when an adapter is refused by its base, or that computes otherwise than in training."""
    hf = hf_model(1)
    whole, quantized = ours(hf, "sdpa"), ours(hf, "sdpa")
    fingerprint = adapter.fingerprint(whole)
    adapter.inject(quantized, TARGETS, 3, 6.0)
    quantize(quantized, kind)
    with torch.no_grad():
        for parameter in trainable(quantized).values():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    assert adapter.fingerprint(quantized) == fingerprint
    adapter.save(quantized, tmp_path)
    adapter.load(whole, tmp_path)
    assert torch.equal(quantized(**inputs), whole(**inputs)), "the base is quantized as in training"
    later = ours(hf, "sdpa").requires_grad_(False)
    quantize(later, kind)
    adapter.load(later, tmp_path)  # quantized first, adapted afterwards
    assert relative_error(later(**inputs), quantized(**inputs)) < 1e-5
    config = tmp_path / "adapter_config.json"
    config.write_text(config.read_text().replace(f'"{kind}"', '"fp3"'))
    with pytest.raises(UserError, match="fp3.*int8"):
        adapter.load(ours(hf, "sdpa"), tmp_path)


@pytest.mark.long
def test_the_command(tmp_path):
    """Breaks when --quantize cannot train, opens another base, or takes weights that learn or are sharded."""
    arguments = ["--attention", "twin", "--steps", 4, "--lr", "1e-2"]
    plain = run(*arguments, out=tmp_path / "plain")
    small = run(*arguments, "--quantize", "int8", out=tmp_path / "small")
    assert [r["loss"] for r in small] == pytest.approx([r["loss"] for r in plain], rel=2e-2)
    assert [r["loss"] for r in small] != [r["loss"] for r in plain]
    adapter.load(load_model("tiny"), tmp_path / "small")
    for flags in (["--full", "--attention", "softmax"], ["--shard"]):
        with pytest.raises(UserError, match="--quantize"):
            parse(["--base", "tiny", "--device", "cpu", "--quantize", "int8", *flags])
