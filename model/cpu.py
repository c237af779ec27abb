"""Faster matrix products and attention in fp32 on a CPU. Nothing here changes a result beyond rounding.

`model/linear.py` and `model/attention.py` ask here first and otherwise call PyTorch's own functions.

F.linear in fp32 is Intel's MKL, which does not use the AVX-512 units of AMD's processors. oneDNN does, and is about
twice as fast there (`python -m train.benchmark` prints both). Attention that is computed key head by key head with
these products then also beats the fused CPU kernel. On Intel's own processors MKL is the faster one. GELU is slow in
PyTorch everywhere, and fast as a part of oneDNN's product.

So the processor decides, once, by vendor and instruction set, never by timing: a resumed run must be equal to the bit.
The environment variable DMT_CPU_PATH forces one of PATHS on any machine.
"""

import contextlib
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

# Multiplications from which oneDNN is faster than MKL. Below, its set-up costs more than it saves, unless the weight
# has at least an eighth of this number of elements and so has to be read from memory.
MIN_OPERATIONS = 1 << 21
MAX_DECODE_ROWS = 4  # rows of x in a step of decoding
MIN_WEIGHT_ELEMENTS = 1 << 16  # elements of a weight from which `_few_rows` is faster
MAX_MAP_ELEMENTS = 1 << 18  # elements of an attention map, 512 queries times keys: `row_attention` holds all maps

MIN_WIDE_ROWS = 16  # rows of x from which bf16 products are faster in fp32, where the processor cannot multiply in bf16
# onednn: products and attention by oneDNN. mkl: products by MKL. Both take oneDNN's GELU, batched attention for few
# keys, and the gradients of model/fused.py. torch: PyTorch's own functions alone, those that transformers calls.
PATHS = ("onednn", "mkl", "torch")


def choose_path(vendor: str, capability: str, forced: str = "") -> str:
    """One of PATHS: "onednn" on AMD's processors with AVX-512, "mkl" on Intel's, "torch" on all others.

    vendor: as the processor names it. capability: torch.backends.cpu.get_cpu_capability(). forced: overrides them.
    """
    known = {("AuthenticAMD", "AVX512"): "onednn", ("GenuineIntel", "AVX512"): "mkl", ("GenuineIntel", "AVX2"): "mkl"}
    return forced or known.get((vendor, capability), "torch")


def _vendor() -> str:
    """The name that the processor has for its maker, such as "AuthenticAMD"; "" where the system does not tell it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # Windows ends its processor's name with the vendor
        return platform.processor().rpartition(" ")[2]
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def lacks_bf16(machine: str, multiplies: bool, limit: str = "", forced: str = "") -> bool:
    """Whether products of many bf16 rows are to be computed in fp32, three times as fast on such a processor.

    machine: as platform.machine(); only x86 is known to need it. multiplies: whether the processor has instructions for
    bf16. limit: ONEDNN_MAX_CPU_ISA, which may keep oneDNN from them. forced: DMT_CPU_PATH; "torch" leaves bf16 alone.
    """
    narrow = limit.upper() in ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
    return machine.lower() in ("x86_64", "amd64") and forced != "torch" and (narrow or not multiplies)


# Read once, at import: torch.compile cannot trace these queries.
path = choose_path(_vendor(), torch.backends.cpu.get_cpu_capability(), os.environ.get("DMT_CPU_PATH", ""))
widens_bf16 = lacks_bf16(
    platform.machine(),
    torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
    os.environ.get("ONEDNN_MAX_CPU_ISA", ""),
    os.environ.get("DMT_CPU_PATH", ""),
)
_has_mkl = torch.backends.mkl.is_available()
# oneDNN's x·Wᵀ + b, with an optional activation. A private operator: PyTorch's compiler emits it too.
onednn_linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """Within the block, compute by `name`, one of PATHS."""
    global path
    before, path = path, name
    try:
        yield
    finally:
        path = before


# Products


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """x (…, in) · weightᵀ (in, out) + bias (out,), or None where F.linear is as fast or has to be used."""
    if few_rows_are_faster(x, weight, bias):
        return _few_rows(x, weight)
    # the compiler chooses a product itself; a test of sizes would make it recompile for every new size
    if torch.compiler.is_compiling() or not onednn_is_faster(x, weight):
        return None
    if needs_gradient(x, weight, bias):
        return _Linear.apply(x, weight, bias)
    if not (weight.is_contiguous() or weight.T.is_contiguous()):  # oneDNN is very slow for a weight with strides
        weight = weight.contiguous()
    return onednn_linear(x, weight, bias, "none", [], "")


def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """gelu(x·weightᵀ + bias), tanh approximation, in one kernel; None where it does not pay or gradients are needed."""
    if (
        torch.compiler.is_compiling()
        or needs_gradient(x, weight, bias)
        or few_rows_are_faster(x, weight, bias)
        or path == "torch"
        or not _onednn_can(x, weight)
    ):
        return None
    return onednn_linear(x, weight, bias, "gelu", [], "tanh")


def fp32_is_faster(x: torch.Tensor) -> bool:
    """Whether x (…, in), in bf16, is multiplied faster with x and the weights in fp32, which costs a pass over both."""
    return (
        widens_bf16
        and x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and x.numel() >= MIN_WIDE_ROWS * x.shape[-1]
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


def onednn_is_faster(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies x (…, in) by weight (…, out, in) faster than F.linear."""
    return path == "onednn" and _onednn_can(x, weight)


def _onednn_can(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies them, and they are large enough."""
    return (
        x.numel() > 0  # oneDNN raises otherwise
        and (x.numel() * weight.shape[-2] >= MIN_OPERATIONS or weight.numel() >= MIN_OPERATIONS >> 3)
        and is_fp32(x, weight)
        and onednn_linear is not None
        and bool(torch.backends.mkldnn.enabled)
    )


def few_rows_are_faster(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `_few_rows` is faster: true for a step of decoding, whose time is spent reading the weights."""
    return (
        bias is None
        and not torch.is_grad_enabled()
        and 0 < x.numel() <= MAX_DECODE_ROWS * x.shape[-1]
        and weight.numel() >= MIN_WEIGHT_ELEMENTS
        and path == "onednn"
        and is_fp32(x, weight)
        and _has_mkl
    )


def is_fp32(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether both are fp32 on a CPU, and stay so: autocast would make their products bf16."""
    on_cpu = x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    return on_cpu and x.dtype == weight.dtype == torch.float32


def _few_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x·Wᵀ as (W·xᵀ)ᵀ: MKL then reads W in order, up to twice as fast. Not for one row, which is therefore doubled."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] == 1:
        product = F.linear(weight, torch.cat((rows, rows)))[:, 0]
    else:
        product = F.linear(weight, rows).T
    return product.contiguous().view(*x.shape[:-1], -1)


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd records an operation on these tensors."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x·weightᵀ by the fastest of the products above; x (G, R, C) with weight (G, O, C) are G products."""
    if weight.dim() == 3:
        return torch.bmm(x, weight.mT)
    product = linear(x, weight)
    return F.linear(x, weight) if product is None else product


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
        grad_x = None if weight is None else _multiply(grad, weight.T)
        grad_weight = None
        if x is not None:  # oneDNN copies a transposed first operand, so the narrower matrix is put first
            x = x.flatten(0, -2)
            grad_weight = _multiply(x.T, rows.T).T if x.shape[1] < rows.shape[1] else _multiply(rows.T, x.T)
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


# Attention


def _only(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0]


def rows_are_faster(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether `row_attention` is faster than the fused kernel, for queries (B, N, S, D) and keys (B, K, Sk, D).

    It is where oneDNN is, and with gradients for few keys: the fused kernel computes their maps a second time.
    """
    if path == "torch" or torch.compiler.is_compiling() or not is_fp32(q, k):
        return False
    if q.shape[2] < 2 or q.shape[2] * k.shape[2] > MAX_MAP_ELEMENTS:
        return False
    if onednn_is_faster(q[0, : q.shape[1] // k.shape[1]], k[0]):
        return True
    return needs_gradient(q, k) and k.shape[2] <= 2 * k.shape[3]


def row_attention(
    maps: Sequence[tuple[torch.Tensor, torch.Tensor]],
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    factor: torch.Tensor | None = None,
    extrapolate: bool = False,
) -> torch.Tensor:
    """softmax(qkᵀ·scale)·v (B, N, S, D), for one key head of one batch row after the other by oneDNN, else for all.

    maps: one pair (q, k), or two, whose attention maps `blend` combines before the product with v; q (B, N, S, D),
    k (B, K, Sk, D), v (B, K, Sk, D). mask (B, 1, S, Sk) or (1, 1, S, Sk). factor: of `blend`, (B, N, S or 1, 1).
    """
    (rows, heads, queries, _), keys = maps[0][0].shape, v.shape[1]

    def by_key_head(t: torch.Tensor) -> torch.Tensor:
        """(B, N, S, …) as (B·K, N/K·S, …)."""
        return t.reshape(rows * keys, heads // keys * queries, -1)

    bias = None if mask is None else torch.zeros_like(mask, dtype=v.dtype).masked_fill_(~mask, -torch.inf)
    factor = None if factor is None else by_key_head(factor.expand(-1, -1, queries, -1))
    queries_by_map = [by_key_head(q) for q, _ in maps]
    keys_by_map = [(k * scale).flatten(0, 1) for _, k in maps]  # the scale goes to the keys: they have fewer heads
    out = _RowAttention.apply(v.flatten(0, 1), factor, bias, extrapolate, *queries_by_map, *keys_by_map)
    return out.view(rows, heads, queries, -1)


def blend(first: torch.Tensor, second: torch.Tensor, factor: torch.Tensor, extrapolate: bool) -> torch.Tensor:
    """first − factor·second, or with `extrapolate` first + factor·(first − second), which is `first` if both are equal.

    It is linear: blending two attention maps and multiplying by V equals blending the two products with V.
    """
    return torch.lerp(first, second, -factor) if extrapolate else torch.addcmul(first, factor, second, value=-1)


class _RowAttention(torch.autograd.Function):
    """O = P·V for each of G groups, a group being one key head of one batch row and the R queries that read it.

        Lₙ = Qₙ·Kₙᵀ + bias,  Aₙ = softmax(Lₙ) for each map n;  P = A₁, or blend(A₁, A₂, f)

    Shapes in a group: Qₙ (R, D), Kₙ (Sk, D), V (Sk, D), f (R, 1), maps (R, Sk). oneDNN multiplies one group after the
    other; else a `part` is all of them, and shapes begin with G.
    """

    @staticmethod
    def forward(ctx, v, factor, bias, extrapolate, *queries_and_keys):
        count, keep = len(queries_and_keys) // 2, any(ctx.needs_input_grad)
        queries, keys = queries_and_keys[:count], queries_and_keys[count:]
        ctx.one_by_one = onednn_is_faster(queries[0][0], keys[0][0])
        outputs, kept = [], []
        for part in range(len(v)) if ctx.one_by_one else [slice(None)]:
            maps = []
            for q, k in zip(queries, keys, strict=True):
                logits = _multiply(q[part], k[part])
                if bias is not None:  # of a batch row, (1, S, Sk), or of all, (B, 1, S, Sk): its heads share it
                    shared = bias[part * len(bias) // len(v)] if isinstance(part, int) else bias
                    logits.view(*shared.shape[:-3], -1, *shared.shape[-2:]).add_(shared)
                maps.append(logits.softmax(-1))
            combined = maps[0] if factor is None else blend(maps[0], maps[1], factor[part], extrapolate)
            outputs.append(_multiply(combined, v[part].mT))
            kept += maps if keep else []
        ctx.save_for_backward(v, factor, *queries_and_keys, *kept)
        ctx.extrapolate, ctx.count = extrapolate, count
        return torch.stack(outputs) if ctx.one_by_one else _only(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Gradients from dO, written out; autograd would pass over each map a dozen times more and keep P as well.

            dV = Pᵀ·dO                                    P is computed again from the kept Aₙ
            dP = dO·Vᵀ
            df = rowsum(dP ⊙ ∂P/∂f)                       ∂P/∂f = −A₂; extrapolated: A₁ − A₂
            dAₙ = wₙ ⊙ dP                                 w = (1, −f); extrapolated: (1 + f, −f); one number a row
            dLₙ = Aₙ ⊙ (dAₙ − rowsum(dAₙ ⊙ Aₙ))           the Jacobian of softmax
            dQₙ = dLₙ·Kₙ,  dKₙ = dLₙᵀ·Qₙ

        The Jacobian is linear and wₙ is constant along a row, so dLₙ = wₙ ⊙ J(dP). wₙ is therefore applied to the
        narrow matrices instead of the maps: dQₙ = wₙ ⊙ (J(dP)·Kₙ), dKₙ = J(dP)ᵀ·(wₙ ⊙ Qₙ).
        """
        (v, factor, *rest), count = ctx.saved_tensors, ctx.count
        queries, keys, kept = rest[:count], rest[count : 2 * count], rest[2 * count :]
        grad_v, grad_factor = [], []
        grad_queries, grad_keys = [[] for _ in queries], [[] for _ in keys]
        for number, part in enumerate(range(len(v)) if ctx.one_by_one else [slice(None)]):
            maps, grad_out = kept[number * count :][:count], grad[part].contiguous()
            combined, weights = maps[0], [None]
            grad_combined = _multiply(grad_out, v[part])  # dP
            if factor is not None:
                f = factor[part]
                combined = blend(maps[0], maps[1], f, ctx.extrapolate)
                derivative, sign = (maps[0] - maps[1], 1) if ctx.extrapolate else (maps[1], -1)
                grad_factor.append(torch.linalg.vecdot(derivative, grad_combined)[..., None] * sign)
                weights = [1 + f if ctx.extrapolate else None, -f]
            # oneDNN copies a transposed first operand, so the narrow matrix is put first and the product transposed
            grad_v.append(_multiply(grad_out.mT, combined.mT).mT)
            for n, weight in enumerate(weights):
                grad_logits = torch.ops.aten._softmax_backward_data(grad_combined, maps[n], -1, v.dtype)  # J(dP)
                q, grad_q = queries[n][part], _multiply(grad_logits, keys[n][part].mT)
                grad_queries[n].append(grad_q if weight is None else grad_q.mul_(weight))
                grad_keys[n].append(_multiply((q if weight is None else q * weight).mT, grad_logits.mT).mT)
        join = torch.stack if ctx.one_by_one else _only
        grad_factor = join(grad_factor) if grad_factor else None
        return join(grad_v), grad_factor, None, None, *map(join, grad_queries + grad_keys)
