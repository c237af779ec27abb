"""Faster ways of computing on a CPU, each of which can be switched off. None changes a result beyond rounding.

    products     fp32 by oneDNN: F.linear is Intel's MKL, which does not use the AVX-512 units of AMD's processors
    gelu         GELU inside oneDNN's product, where no gradient is needed
    rows         attention of one key head after the other by these products; needs `products`
    reversed     a step of decoding as (W·xᵀ)ᵀ: MKL then reads W in order
    bf16         products of many bf16 rows in fp32, a block of W at a time, where x86 cannot multiply in bf16

The processor decides, by vendor and instruction set, never by timing: a resumed run must be equal to the bit. The
environment variable DMT_CPU_PATH overrides it: "torch" takes none, "onednn" the first four, "gelu" that one.
"""

import contextlib
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from model.common import UserError, shown

ONEDNN = ("products", "gelu", "rows", "reversed")
# Multiplications from which oneDNN is faster than MKL. Below, its set-up costs more than it saves, unless the weight
# has at least an eighth of this number of elements and so has to be read from memory.
MIN_OPERATIONS = 1 << 21
MAX_DECODE_ROWS, MIN_WEIGHT_ELEMENTS = 4, 1 << 16  # rows of x, and elements of a weight, of a reversed product
MAX_MAP_ELEMENTS = 1 << 18  # queries times keys of `row_attention`, which holds all maps
MIN_WIDE_ROWS = 16  # rows of x from which bf16 products are faster in fp32
# oneDNN's x·Wᵀ + b, with an optional activation. A private operator: PyTorch's compiler emits it too.
onednn_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def choose(vendor: str, capability: str, lacks_bf16: bool, forced: str = "") -> frozenset[str]:
    """The ways to take on a processor. forced: DMT_CPU_PATH; UserError for a name in it that is none."""
    bf16 = ("bf16",) * lacks_bf16
    by_processor = (*ONEDNN * ((vendor, capability) == ("AuthenticAMD", "AVX512")), *bf16)
    names = {"": by_processor, "torch": (), "onednn": (*ONEDNN, *bf16)}.get(forced, forced.split(","))
    if not set(names) <= {*ONEDNN, "bf16"}:
        raise UserError(f"DMT_CPU_PATH={shown(forced)}: expected torch, onednn, or some of {','.join(ONEDNN)},bf16")
    return frozenset(names)


def lacks_bf16(machine: str, multiplies: bool, limit: str = "") -> bool:
    """Whether a processor is an x86 without instructions for bf16, or ONEDNN_MAX_CPU_ISA keeps oneDNN from them."""
    narrow = limit.upper() in ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
    return machine.lower() in ("x86_64", "amd64") and (narrow or not multiplies)


def cpuinfo(entry: str) -> str:
    """What Linux tells of the processor, such as its "vendor_id"; "" where the system does not."""
    file = Path("/proc/cpuinfo")
    told = re.search(rf"^{entry}\s*:\s*(\S.*)", file.read_text(encoding="utf-8"), re.M) if file.exists() else None
    return told[1] if told else ""


# Read once, at import: torch.compile cannot trace these queries. A mistake is raised by the first `uses`.
mistake: UserError | None = None
try:
    _multiplies = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    _lacks = lacks_bf16(platform.machine(), _multiplies, os.environ.get("ONEDNN_MAX_CPU_ISA", ""))
    _vendor = cpuinfo("vendor_id") or platform.processor().rpartition(" ")[2]  # Windows ends the name with the vendor
    ways = choose(_vendor, torch.backends.cpu.get_cpu_capability(), _lacks, os.environ.get("DMT_CPU_PATH", ""))
except UserError as error:
    ways, mistake = frozenset(), error


def uses(way: str) -> bool:
    if mistake is not None:
        raise mistake
    return way in ways


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
    on_cpu = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)
    return on_cpu and not torch.is_autocast_enabled("cpu")


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (…, in) · weightᵀ (in, out) + bias (out,), as F.linear."""
    if is_reversed(x, weight, bias):
        rows = x.reshape(-1, x.shape[-1])
        doubled = torch.cat((rows, rows)) if len(rows) == 1 else rows  # it is not faster for one
        return F.linear(weight, doubled).T[: len(rows)].contiguous().view(*x.shape[:-1], -1)
    # the compiler chooses a product itself; a test of sizes would make it recompile for every new size
    if torch.compiler.is_compiling() or not (uses("products") and onednn_can(x, weight)):
        return F.linear(x, weight, bias)
    if needs_gradient(x, weight, bias):
        return _Linear.apply(x, weight, bias)
    if not (weight.is_contiguous() or weight.T.is_contiguous()):  # oneDNN is very slow for a weight with strides
        weight = weight.contiguous()
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
        grad_x = None if weight is None else linear(grad, weight.T)
        grad_weight = None
        if x is not None:  # oneDNN copies a transposed first operand, so the narrower matrix is put first
            x = x.flatten(0, -2)
            grad_weight = linear(x.T, rows.T).T if x.shape[1] < rows.shape[1] else linear(rows.T, x.T)
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


def onednn_can(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies x (…, in) by weight (out, in), and they are large enough. It raises for no rows."""
    large = x.numel() * weight.shape[0] >= MIN_OPERATIONS or weight.numel() >= MIN_OPERATIONS >> 3
    can = onednn_linear is not None and torch.backends.mkldnn.enabled
    return bool(x.numel() > 0 and large and is_fp32(x, weight) and can)


def is_reversed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a product is one of few rows, whose time is spent reading the weights."""
    few = bias is None and 0 < x.numel() <= MAX_DECODE_ROWS * x.shape[-1] and weight.numel() >= MIN_WEIGHT_ELEMENTS
    return few and not torch.is_grad_enabled() and uses("reversed") and is_fp32(x, weight)


def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """gelu(x·weightᵀ + bias), tanh approximation, in one kernel; None where it does not pay or gradients are needed."""
    if torch.compiler.is_compiling() or not uses("gelu") or needs_gradient(x, weight, bias):
        return None
    if is_reversed(x, weight, bias) or not onednn_can(x, weight):
        return None
    return onednn_linear(x, weight, bias, "gelu", [], "tanh")


def fp32_is_faster(x: torch.Tensor) -> bool:
    """Whether x (…, in), in bf16, is multiplied faster with x and the weights in fp32, which costs a pass over both."""
    many = x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.numel() >= MIN_WIDE_ROWS * x.shape[-1]
    return many and uses("bf16") and not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")


def rows_are_faster(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether `row_attention` is faster than the fused kernel, for queries (B, N, S, D) and keys (B, K, Sk, D)."""
    if torch.compiler.is_compiling() or not (uses("rows") and uses("products")):
        return False
    fits = q.shape[2] > 1 and q.shape[2] * k.shape[2] <= MAX_MAP_ELEMENTS
    return fits and onednn_can(q[0, : q.shape[1] // k.shape[1]], k[0, 0])


def row_attention(q, k, v, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """softmax(qkᵀ·scale)·v (B, N, S, D) for q (B, N, S, D), k and v (B, K, Sk, D), mask (B or 1, 1, S, Sk)."""
    heads, keys = [], k * scale  # the keys have fewer heads
    bias = None if mask is None else torch.zeros_like(mask, dtype=v.dtype).masked_fill_(~mask, -torch.inf)
    for row in range(len(q)):
        for head, queries in enumerate(q[row].chunk(k.shape[1])):  # (N/K, S, D), which read this key head
            logits = linear(queries, keys[row, head])
            logits = logits if bias is None else logits + bias[row % len(bias)]
            heads.append(linear(logits.softmax(-1), v[row, head].T))
    return torch.cat(heads).view(*q.shape[:-1], -1)
