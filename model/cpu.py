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
from torch.autograd.function import once_differentiable

from model.common import UserError, cpuinfo, shown

ONEDNN = ("products", "gelu", "reversed")
# Multiplications from which oneDNN is faster than MKL. Below, its set-up costs more than it saves,
# unless the weight has at least an eighth of this number of elements and so has to be read from
# memory.
MIN_OPERATIONS = 1 << 21
MAX_DECODE_ROWS, MIN_WEIGHT_ELEMENTS = (
    4,
    1 << 16,
)  # rows of x, and elements of a weight, of a reversed product
# oneDNN's x·Wᵀ + b, with an optional activation. A private operator: PyTorch's compiler emits it
# too.
onednn_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def choose(vendor: str, capability: str, lacks_bf16: bool, forced: str = "") -> frozenset[str]:
    """The ways to take on a processor. forced: DMT_CPU_PATH."""
    on_amd, bf16 = (vendor, capability) == ("AuthenticAMD", "AVX512"), ("bf16",) * lacks_bf16
    named = {"": (*ONEDNN * on_amd, *bf16), "torch": (), "onednn": (*ONEDNN, *bf16)}
    return frozenset(named.get(forced, forced.split(",")))


# Read once, at import: torch.compile cannot trace these queries.
ways = choose(
    cpuinfo("vendor_id")
    or platform.processor().rpartition(" ")[2],  # Windows ends the name with the vendor
    torch.backends.cpu.get_cpu_capability(),
    platform.machine().lower() in ("x86_64", "amd64")
    and not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()),
    os.environ.get("DMT_CPU_PATH", ""),
)


def check() -> None:
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


def is_fp32(*tensors: torch.Tensor) -> bool:
    """Whether all are fp32 on a CPU, and stay so: autocast would make their products bf16."""
    fit = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
    return fit and not torch.is_autocast_enabled("cpu")


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (…, in) · weightᵀ (in, out) + bias (out,), as F.linear."""
    if is_reversed(x, weight, bias):
        rows = x.reshape(-1, x.shape[-1])
        doubled = torch.cat((rows, rows)) if len(rows) == 1 else rows  # it is not faster for one
        return F.linear(weight, doubled).T[: len(rows)].contiguous().view(*x.shape[:-1], -1)
    # the compiler chooses a product itself; a test of sizes would make it recompile for every new
    # size
    if torch.compiler.is_compiling() or not ("products" in ways and onednn_can(x, weight)):
        return F.linear(x, weight, bias)
    if not (
        weight.is_contiguous() or weight.T.is_contiguous()
    ):  # oneDNN is very slow for a weight with strides
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
        (x, weight), rows = ctx.saved_tensors, grad.flatten(0, -2)
        grad_x, grad_weight = None if weight is None else linear(grad, weight.T), None
        # oneDNN copies a transposed first operand, so the narrower matrix is put first
        if x is not None:
            x = x.flatten(0, -2)
            grad_weight = (
                linear(x.T, rows.T).T if x.shape[1] < rows.shape[1] else linear(rows.T, x.T)
            )
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def onednn_can(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies x (…, in) by weight (out, in), and they are large enough. It raises
    for no rows."""
    large = x.numel() * weight.shape[0] >= MIN_OPERATIONS or weight.numel() >= MIN_OPERATIONS >> 3
    return bool(
        x.numel() > 0
        and large
        and is_fp32(x, weight)
        and torch.backends.mkldnn.enabled
        and onednn_linear
    )


def is_reversed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a product is one of few rows, whose time is spent reading the weights."""
    few = (
        bias is None
        and 0 < x.numel() <= MAX_DECODE_ROWS * x.shape[-1]
        and weight.numel() >= MIN_WEIGHT_ELEMENTS
    )
    return few and not torch.is_grad_enabled() and "reversed" in ways and is_fp32(x, weight)


def linear_gelu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """gelu(x·weightᵀ + bias), tanh approximation, in one kernel; None where it does not pay or
    gradients are needed."""
    can = "gelu" in ways and not (torch.compiler.is_compiling() or needs_gradient(x, weight, bias))
    can = can and onednn_can(x, weight) and not is_reversed(x, weight, bias)
    return onednn_linear(x, weight, bias, "gelu", [], "tanh") if can else None
