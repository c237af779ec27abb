"""Memory-bound steps of a layer with gradients written out: RMSNorm and RoPE in fp32 on a CPU.

In and out: what `model/gemma.py` and `model/attention.py` compute by PyTorch's own functions, up to rounding. Autograd
would keep and read more tensors of the size of the hidden states than the equations need.
"""

import torch
from torch.autograd.function import once_differentiable

from model import cpu


def pays(x: torch.Tensor) -> bool:
    """Whether to call the functions of this file: fp32 on a CPU, with a gradient, not compiled (a compiler fuses).

    Not under autocast, which would compute the sums of squares in bf16.
    """
    return cpu.path != "torch" and cpu.needs_gradient(x) and cpu.is_fp32(x, x) and not torch.compiler.is_compiling()


class RMSNorm(torch.autograd.Function):
    """y = x·r·g with r = (mean(x²) + eps)^(-1/2), for x (…, H) and a gain g (H,).

    dx = r·(d − x·r²·mean(d·x)) with d = dy·g;  dg = Σ dy·x·r over all rows.
    """

    @staticmethod
    def forward(ctx, x, gain, eps):
        r = torch.linalg.vecdot(x, x)[..., None].div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain, r)
        return (x * r).mul_(gain)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, gain, r = ctx.saved_tensors
        grad_gain = (grad * x).mul_(r).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        d = grad * gain
        mean = torch.linalg.vecdot(d, x)[..., None].div_(x.shape[-1])
        return d.addcmul_(x, mean.mul_(r * r), value=-1).mul_(r), grad_gain, None


class Rotation(torch.autograd.Function):
    """x·cos + x̃·sin, where x̃ has the halves of x (…, D) exchanged and `sin` the sign: the transpose turns back.

    cos and sin are the tables of `Rope`: the halves of sin are each other's negative.
    """

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _rotate(grad, *ctx.saved_tensors, -1), None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    out = x * cos
    ours, others = out.chunk(2, dim=-1), x.chunk(2, dim=-1)
    for half, other, factor in zip(ours, reversed(others), sin.chunk(2, dim=-1), strict=True):
        half.addcmul_(other, factor, value=sign)
    return out
