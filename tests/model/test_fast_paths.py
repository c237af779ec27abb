"""Every faster way to compute gives what the plain way gives: products, the loss, and compiled
steps."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter

from eval.data.records import embedded_records
from lora import adapter
from lora.adapter import LoRALinear
from model import cpu, device, paligemma
from model.compiled import CompiledStep
from model.differential import graft
from model.gemma import RMSNorm
from model.generate import generate
from model.linear import ACTIVATIONS, Linear, activated, linear
from tests.model.test_differential import TARGETS, sibling
from tests.reference import (
    batch,
    dice,
    generations,
    relative_error,
    right_padded,
    set_attention_backend,
    twins,
)
from tests.runs import refused
from train.data.batches import collate
from train.model import supervised_loss
from train.optim import trainable
from weights.load import load_model

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.fixture
def onednn(monkeypatch):
    """oneDNN takes every product in fp32, however small; for each, whether its weight has no gaps:
    40 times faster."""
    if cpu.onednn_linear is None or not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    original = cpu.onednn_linear
    calls = []
    monkeypatch.setattr(cpu, "MIN_OPERATIONS", 0)
    monkeypatch.setattr(cpu, "ways", frozenset(cpu.ONEDNN))

    def counted(x, weight, *others):
        calls.append(weight.is_contiguous() or weight.T.is_contiguous())
        return original(x, weight, *others)

    monkeypatch.setattr(cpu, "onednn_linear", counted)
    return calls


def gradients(output, *leaves):
    """Of a sum that weighs every element of `output` differently."""
    weights = torch.randn(output.shape, generator=dice(9), dtype=torch.float64)
    return list(torch.autograd.grad((output.double() * weights).sum(), leaves))


def test_the_processor_chooses_and_a_typing_error_is_reported(monkeypatch):
    """Breaks when a processor gets another's products, or a misspelt way silently means
    something."""
    assert cpu.choose("AuthenticAMD", "AVX512", False) == set(cpu.ONEDNN)
    assert cpu.choose("GenuineIntel", "AVX512", True) == {"bf16"}
    assert cpu.choose("AuthenticAMD", "AVX2", False) == set()
    assert cpu.choose("AuthenticAMD", "AVX512", True, "torch") == set()
    assert cpu.choose("", "", True, "gelu,bf16") == {"gelu", "bf16"}
    monkeypatch.setattr(cpu, "ways", cpu.choose("", "", False, "gelu,onednm"))
    for call in ((device.choose_device, "cpu"), (load_model, "tiny")):
        refused(partial(*call), "DMT_CPU_PATH=onednm")


def test_bf16_where_the_processor_cannot_multiply_it(monkeypatch):
    """Breaks when a block of the weight is left out or rounded, or the sum is rounded twice."""
    monkeypatch.setattr("model.linear.BLOCK_ELEMENTS", 1 << 15)
    for rows, width, out in ((16, 512, 200), (40, 96, 1000), (300, 64, 64)):
        x = torch.randn(2, rows // 2, width).bfloat16()
        weight = torch.randn(out, width).bfloat16()
        bias = torch.randn(out).mul(30).bfloat16()
        for given in ((weight, bias), (weight,)):
            exact = F.linear(x.double(), *(t.double() for t in given))
            with torch.no_grad(), cpu.using("torch"):
                plain = linear(x, *given)
            assert torch.equal(plain, F.linear(x, *given))
            with cpu.using("bf16"):
                with torch.no_grad():
                    wide = linear(x, *given)
                    few = linear(x[:1, :7], *given)
                learned = linear(x.clone().requires_grad_(), *given)
            assert torch.equal(learned, plain), "gradients are those of bf16"
            assert wide.dtype == torch.bfloat16
            assert torch.equal(few, F.linear(x[:1, :7], *given))
            # rounded once, so that nothing but a sum in the middle of two numbers of bf16 may differ
            once = (exact.bfloat16().double() - exact).norm()
            assert (wide.double() - exact).norm() <= (1 + 1e-5) * once


@pytest.mark.parametrize("shape, out", [((7, 24), 40), ((2, 5, 40), 24), ((1, 3, 2, 8), 8)])
@pytest.mark.parametrize("bias", [True, False])
def test_onednn_multiplies_as_f_linear_does(shape, out, bias, onednn):
    """Breaks when x, weight or bias get another gradient, the transposed product is mixed up, or a
    view is misread."""
    x = torch.randn(shape, requires_grad=True)
    for weight in (
        torch.randn(out, shape[-1]),
        torch.randn(shape[-1], out).T,
        torch.randn(out, 2 * shape[-1])[:, ::2],
    ):
        leaves = [x, weight.requires_grad_(True)] + [torch.randn(out, requires_grad=True)] * bias
        exact = F.linear(*(t.double() for t in leaves))
        y = linear(*leaves)
        assert relative_error(y, exact) < 1e-6
        for mine, theirs in zip(gradients(y, *leaves), gradients(exact, *leaves), strict=True):
            assert mine.shape == theirs.shape
            assert relative_error(mine, theirs) < 1e-6
    assert onednn
    assert all(onednn)


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "silu"])
def test_an_activation_within_the_product_is_the_activation(activation, onednn):
    """Breaks when oneDNN computes another GELU, a bias is lost, or gradients, LoRA or 8 bits are
    bypassed."""
    layer = Linear(24, 40)
    x = torch.randn(3, 5, 24)
    exact = ACTIVATIONS[activation](
        F.linear(x.double(), layer.weight.double(), layer.bias.double())
    )
    learned = activated(layer, x, activation)
    assert learned.requires_grad
    assert relative_error(learned, exact) < 1e-6
    adapted = LoRALinear(layer, 2, 4.0)
    nn.init.normal_(adapted.lora.lora_B.weight)
    called = []
    layer.register_forward_hook(lambda *_: called.append(1))
    with torch.no_grad():
        assert relative_error(activated(layer, x, activation), exact) < 1e-6
        assert bool(called) == (activation == "silu")  # the fused product does not call the layer
        expected = ACTIVATIONS[activation](adapted(x))
        assert torch.equal(activated(adapted, x, activation), expected)
        assert relative_error(expected, exact) > 1e-2


@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 24), (1, 1, 24), (2, 2, 24), (3, 24), (5, 24)])
def test_few_rows_are_multiplied_the_other_way_round(shape, monkeypatch):
    """Breaks when the doubled vector's copy is returned, rows are exchanged, or the result has gaps
    in memory."""
    monkeypatch.setattr(cpu, "MIN_WEIGHT_ELEMENTS", 0)
    monkeypatch.setattr(cpu, "ways", frozenset({"reversed"}))
    rows = torch.Size(shape[:-1]).numel()
    bias = torch.randn(40)
    for x in (
        torch.randn(shape),
        torch.randn(*shape[:-1], 48)[..., ::2],
        torch.randn(24, *shape[:-1]).movedim(0, -1),
    ):
        for weight in (torch.randn(40, 24), torch.randn(24, 40).T):
            assert not cpu.is_reversed(x, weight, None)  # gradients may be needed
            with torch.no_grad():
                assert cpu.is_reversed(x, weight, None) == (rows <= 4)
                assert not cpu.is_reversed(x, weight, bias)
                y = linear(x, weight)
            exact = F.linear(x.double(), weight.double())
            assert y.is_contiguous() and y.shape == exact.shape
            assert relative_error(y, exact) < 1e-6
    torch._dynamo.reset()
    # a compiled step of decoding goes the same way, and the compiler must see all of it
    with torch.no_grad():
        assert torch.equal(torch.compile(linear, backend="eager", fullgraph=True)(x, weight), y)


def test_norms_stay_in_fp32_under_autocast():
    """Breaks when a mean of squares is rounded to bf16, and every hidden state with it, because a
    product would be."""
    x = torch.randn(2, 4, 9, 16)
    for function in (RMSNorm(16, 1e-6), sibling("shared")[1].normalise):
        with torch.autocast("cpu", torch.bfloat16):
            found = function(x)
        assert found.dtype == torch.float32
        assert relative_error(found, function(x)) < 1e-6


def smoothed(logits, targets, smoothing):
    """The loss of big_vision's train.py, of rows (T, V) and targets (T,), written in NumPy; summed
    over the tokens that have a target."""
    logits = logits.astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = np.eye(logits.shape[-1])[targets.clip(min=0)]
    wanted = np.where(wanted == 1.0, 1.0 - smoothing, smoothing / (logits.shape[-1] - 1))
    return -(logp * wanted).sum(-1)[targets >= 0].sum()


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
@pytest.mark.parametrize("smoothing", [0.0, 0.4])
def test_the_loss_is_that_of_big_vision(rows_at_once, smoothing, monkeypatch):
    """Breaks when the target gets s / V on top of 1 − s, ignored tokens count, or a row or a
    gradient of the loss in chunks is lost."""
    monkeypatch.setattr(paligemma, "MAX_LOGITS", 11 * rows_at_once)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (2, 5))
    targets[0, 3:] = targets[1, 0] = -100

    sizes = []

    def loss(hidden, weight):
        def head(rows):
            sizes.append(len(rows))
            return F.linear(rows, weight)

        return paligemma.logits_or_loss(head, 11, hidden, targets, smoothing)

    value = loss(hidden, weight)
    assert max(sizes) == min(rows_at_once, 10) and sum(sizes) == 10
    logits = F.linear(hidden, weight).flatten(0, 1)
    published = smoothed(logits.detach().numpy(), targets.flatten().numpy(), smoothing)
    assert value.item() == pytest.approx(published, rel=1e-12)
    share = smoothing * 11 / 10
    whole = F.cross_entropy(logits, targets.flatten(), reduction="sum", label_smoothing=share)
    for mine, theirs in zip(
        torch.autograd.grad(value, (hidden, weight)),
        torch.autograd.grad(whole, (hidden, weight)),
        strict=True,
    ):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-13)
    assert torch.autograd.gradcheck(loss, (hidden, weight))
    assert not torch.autograd.grad(loss(hidden, weight), hidden)[0][0, 3:].any()
    targets[:] = -100
    assert loss(hidden, weight) == 0


@pytest.mark.long
def test_a_compiled_training_step_learns_the_same(processor):
    """Breaks when compiling changes the loss or a gradient beyond rounding."""
    torch._dynamo.reset()
    model = load_model("tiny")
    del model.vision_tower.encoder.layers[1:], model.language_model.layers[1:]
    graft(model, "twin", r=3, alpha=6.0)
    adapter.inject(model, TARGETS, 2, 4.0)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter += 0.1 * torch.randn_like(parameter)
    called = torch.compile(model, backend="aot_eager", fullgraph=True)
    for count in (4, 3):  # of different lengths, numbers of rows and pictures
        micro = collate(embedded_records(("caption",), count=count), processor)
        losses, gradients = [], []
        for either in (model, called):
            model.zero_grad()
            loss = supervised_loss(either, micro)
            loss.backward()
            losses.append(loss.item())
            gradients.append({name: p.grad.clone() for name, p in trainable(model).items()})
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        for name, plain in gradients[0].items():
            assert plain.abs().max() < 1e-5 or relative_error(gradients[1][name], plain) < 1e-4


@pytest.mark.long
@generations
def test_compiled_decoding_equals_the_plain_one_and_compiles_once(generation):
    """Breaks when the static cache shows what is not written yet, keeps an old prompt, or a length
    compiles anew."""
    torch._dynamo.reset()
    counter = CompileCounter()
    hf, model, _ = twins(generation, num_hidden_layers=2)
    set_attention_backend(model, "sdpa")
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled = CompiledStep(model, bucket=64, backend=counter)
        assert torch._dynamo.config.recompile_limit == 64
    for seed, sizes in enumerate(((6, 2, 4), (9, 9, 1), (3, 2, 2))):
        prompt = batch(hf, [(size, 0) for size in sizes], seed)
        prompt = right_padded(prompt) if seed == 1 else prompt
        plain = generate(model, **prompt, max_new_tokens=12)
        fast = generate(model, **prompt, max_new_tokens=12, compiled=compiled)
        assert all(map(torch.equal, fast, plain))
    assert counter.frame_count == 1
    cache = compiled.cache[0].keys
    generate(model, **batch(hf, ((4, 0), (4, 0), (4, 0))), max_new_tokens=50, compiled=compiled)
    assert compiled.cache[0].capacity == 128
    assert compiled.cache[0].keys is not cache  # 70 positions
    generate(model, **prompt, max_new_tokens=12, compiled=compiled)
    assert compiled.cache[0].keys is cache and counter.frame_count == 2, "both sizes are kept"


@pytest.mark.long
def test_a_compiler_that_cannot_work_is_one_line():
    """Breaks when a machine without a C++ compiler gets a page of traceback for --compile."""

    def fails(*_):
        raise OSError("no working C++ compiler")

    torch._dynamo.reset()
    _, model, inputs = twins()
    compiled = CompiledStep(model, backend=fails)
    says = "torch.compile: ", "no working C++ compiler", ": install ", " --compile"
    refused(lambda: generate(model, **inputs, max_new_tokens=2, compiled=compiled), *says)
