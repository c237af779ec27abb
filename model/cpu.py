"""Faster ways of computing on a CPU, each of which can be switched off. None changes a result beyond rounding.

    products     fp32 by oneDNN: F.linear is Intel's MKL, which does not use the AVX-512 units of AMD's processors
    gelu         GELU inside oneDNN's product, where no gradient is needed
    reversed     a step of decoding as (W·xᵀ)ᵀ: MKL then reads W in order
    bf16         products of many bf16 rows in fp32, a block of W at a time, where x86 cannot multiply in bf16

The processor decides, by vendor and instruction set, never by timing: a resumed run must be equal to the bit. The
environment variable DMT_CPU_PATH overrides it: "torch" takes none, "onednn" the first three, "gelu" that one.
"""

import contextlib
import os
import platform
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.common import UserError, cpuinfo, shown

ONEDNN = ("products", "gelu", "reversed")
# Multiplications from which oneDNN is faster than MKL. Below, its set-up costs more than it saves,
# unless the weight has at least an eighth of this number of elements and so has to be read from
# memory.
MIN_OPERATIONS = 1 << 21
# rows of x, and elements of a weight, of a reversed product
MAX_DECODE_ROWS = 4
MIN_WEIGHT_ELEMENTS = 1 << 16
# oneDNN's x·Wᵀ + b, with an optional activation. A private operator: PyTorch's compiler emits it
# too.
onednn_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def choose(
    vendor: str,
    capability: str,
    lacks_bf16: bool,
    forced: str = "",
) -> frozenset[str]:
    """The ways to take on a processor. forced: DMT_CPU_PATH."""
    own = ["bf16"] if lacks_bf16 else []
    if forced == "torch":
        return frozenset()
    if forced not in ("", "onednn"):
        return frozenset(forced.split(","))
    if forced or (vendor, capability) == ("AuthenticAMD", "AVX512"):
        own += ONEDNN
    return frozenset(own)


# Read once, at import: torch.compile cannot trace these queries.
is_x86 = platform.machine().lower() in ("x86_64", "amd64")
ways = choose(
    # Windows ends the name with the vendor
    cpuinfo("vendor_id") or platform.processor().rpartition(" ")[2],
    torch.backends.cpu.get_cpu_capability(),
    is_x86 and not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()),
    os.environ.get("DMT_CPU_PATH", ""),
)


def check_ways() -> None:
    """Raise UserError for a name in DMT_CPU_PATH that is none."""
    if wrong := ways - {*ONEDNN, "bf16"}:
        raise UserError(
            f"DMT_CPU_PATH={shown(min(wrong))}: expected torch, onednn, or some of "
            f"{','.join(ONEDNN)},bf16"
        )


@contextlib.contextmanager
def using(names: str) -> Iterator[None]:
    """Within the block, take the ways that DMT_CPU_PATH=names would."""
    global ways
    before, ways = ways, choose("", "", False, names)
    try:
        yield
    finally:
        ways = before


def is_fp32(*tensors: Tensor) -> bool:
    """Whether all are fp32 on a CPU, and stay so: autocast would make their products bf16."""
    fit = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
    return fit and not torch.is_autocast_enabled("cpu")


def needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (…, in) · weightᵀ (in, out) + bias (out,), as F.linear."""
    if is_reversed(x, weight, bias):
        rows = x.reshape(-1, x.shape[-1])
        doubled = torch.cat((rows, rows)) if len(rows) == 1 else rows  # it is not faster for one
        columns = F.linear(weight, doubled)
        return columns.T[: len(rows)].contiguous().view(*x.shape[:-1], -1)
    # the compiler chooses a product itself; a test of sizes would make it recompile for every new
    # size
    if torch.compiler.is_compiling() or "products" not in ways or not onednn_can(x, weight):
        return F.linear(x, weight, bias)
    # oneDNN is very slow for a weight with strides
    if not (weight.is_contiguous() or weight.T.is_contiguous()):
        weight = weight.contiguous()
    if needs_gradient(x, weight, bias):
        return _Linear.apply(x, weight, bias)
    return onednn_linear(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """oneDNN's product and the gradients that are needed of dx = dy·W, dW = dyᵀ·x and db = Σ dy."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return onednn_linear(x, weight, bias, "none", [], "")

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        if weight is not None:
            grad_x = product(grad, weight.T)
        # oneDNN copies a transposed first operand, so the narrower matrix is put first
        if x is not None:
            x = x.flatten(0, -2)
            is_wider = x.shape[1] < rows.shape[1]
            grad_weight = product(x.T, rows.T).T if is_wider else product(rows.T, x.T)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias


def onednn_can(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN multiplies x (…, in) by weight (out, in), and they are large enough. It raises
    for no rows."""
    large = x.numel() * weight.shape[0] >= MIN_OPERATIONS or weight.numel() >= MIN_OPERATIONS >> 3
    if not large or x.numel() == 0 or onednn_linear is None:
        return False
    return is_fp32(x, weight) and bool(torch.backends.mkldnn.enabled)


def is_reversed(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a product is one of few rows, whose time is spent reading the weights."""
    if bias is not None or torch.is_grad_enabled() or "reversed" not in ways:
        return False
    few = 0 < x.numel() <= MAX_DECODE_ROWS * x.shape[-1]
    return few and weight.numel() >= MIN_WEIGHT_ELEMENTS and is_fp32(x, weight)


def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor | None:
    """gelu(x·weightᵀ + bias), tanh approximation, in one kernel; None where it does not pay or
    gradients are needed."""
    if "gelu" not in ways or torch.compiler.is_compiling() or needs_gradient(x, weight, bias):
        return None
    if not onednn_can(x, weight) or is_reversed(x, weight, bias):
        return None
    return onednn_linear(x, weight, bias, "gelu", [], "tanh")
