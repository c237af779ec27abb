"""Linear layers: nn.Linear, with the fastest of the matrix products that PyTorch brings for a CPU.

In: x (…, in_features). Out: x·Wᵀ + b (…, out_features). Every matrix of the model is one of these.
Next: `model/attention.py`, `model/lowrank.py`.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

# Multiplications and additions from which oneDNN is faster; below, its set-up costs more than it saves, unless the
# weight is so large, an eighth of this many elements, that it comes from memory.
LARGE = 1 << 21
FEW, WORTH_IT = 4, 1 << 16  # rows that count as few, and elements of a weight from which it matters

ACTIVATIONS = {"gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}

# asked once: the compiler cannot look into either
_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
_has_mkl = torch.backends.mkl.is_available()
_product = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # oneDNN's x·Wᵀ + b; PyTorch's compiler uses it too


class Linear(nn.Linear):
    """nn.Linear through `linear`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (…, in) · weightᵀ (in, out) + bias (out,), as F.linear.

    For fp32 on a CPU, F.linear is Intel's MKL, which does not use the AVX-512 units of other makers' processors. There
    oneDNN is about twice as fast (`python -m train.benchmark` prints both); results differ by rounding.
    `torch.backends.mkldnn.flags(enabled=False)` switches it off.
    """
    if rows_are_few(x, weight, bias):
        return _of_few_rows(x, weight)
    # the compiler chooses for itself, and must not remember sizes
    if torch.compiler.is_compiling() or not onednn_is_faster(x, weight):
        return F.linear(x, weight, bias)
    if _learns(x, weight, bias):
        return _Linear.apply(x, weight, bias)
    if not (weight.is_contiguous() or weight.T.is_contiguous()):  # where a view leaves gaps, oneDNN is very slow
        weight = weight.contiguous()
    return _product(x, weight, bias, "none", [], "")


def activated(layer: nn.Module, x: torch.Tensor, activation: str) -> torch.Tensor:
    """One of ACTIVATIONS of layer(x); without gradients, oneDNN applies it to what it still has in its registers."""
    if (
        activation == "gelu_pytorch_tanh"
        and type(layer) is Linear
        and not torch.compiler.is_compiling()
        and not _learns(x, layer.weight, layer.bias)
        and not rows_are_few(x, layer.weight, layer.bias)
        and onednn_is_faster(x, layer.weight)
    ):
        return _product(x, layer.weight, layer.bias, "gelu", [], "tanh")
    return ACTIVATIONS[activation](layer(x))


def onednn_is_faster(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies x (…, in) by weight (…, out, in) faster than F.linear."""
    return (
        (x.numel() * weight.shape[-2] >= LARGE or weight.numel() >= LARGE >> 3)
        and _is_wide_fp32(x, weight)
        and _product is not None
        and torch.backends.mkldnn.enabled
    )


def rows_are_few(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether `_of_few_rows` is faster, as in a step of decoding, whose time goes into reading the weights."""
    return (
        bias is None
        and not torch.is_grad_enabled()
        and x.numel() <= FEW * x.shape[-1]
        and weight.numel() >= WORTH_IT
        and _is_wide_fp32(x, weight)
        and _has_mkl
    )


def _is_wide_fp32(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether x·Wᵀ is a product in fp32 on a CPU with AVX-512."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and _wide
        and not torch.is_autocast_enabled("cpu")
    )


def _of_few_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x·Wᵀ as (W·xᵀ)ᵀ: MKL then reads W in order, up to twice as fast, though not for a vector, which is doubled."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] == 1:
        product = F.linear(weight, torch.cat((rows, rows)))[:, 0]
    else:
        product = F.linear(weight, rows).T
    return product.contiguous().view(*x.shape[:-1], -1)


def _learns(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        learns, back = ctx.needs_input_grad[1], ctx.needs_input_grad[0]
        ctx.save_for_backward(x if learns else None, weight if back else None)
        return _product(x, weight, bias, "none", [], "")

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_x = None if weight is None else linear(grad, weight.T)
        grad_weight = None
        if x is not None:  # the first operand is copied when it is transposed: the narrower one comes first
            x = x.flatten(0, -2)
            grad_weight = linear(x.T, rows.T).T if x.shape[1] < rows.shape[1] else linear(rows.T, x.T)
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None
