"""Linear layers: nn.Linear, with the faster of the two matrix products that PyTorch brings for a CPU.

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
    # the compiler chooses for itself, and must not remember sizes
    if torch.compiler.is_compiling() or not onednn_is_faster(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return _Linear.apply(x, weight, bias)
    if not (weight.is_contiguous() or weight.T.is_contiguous()):  # where a view leaves gaps, oneDNN is very slow
        weight = weight.contiguous()
    return _product(x, weight, bias, "none", [], "")


def onednn_is_faster(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether oneDNN multiplies x (…, in) by weight (…, out, in) faster than F.linear."""
    return (
        (x.numel() * weight.shape[-2] >= LARGE or weight.numel() >= LARGE >> 3)
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and _product is not None
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkldnn.enabled
        and not torch.is_autocast_enabled("cpu")
    )


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
