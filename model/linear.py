"""Linear layers. Every matrix of the models is one of these.

In: x (…, in_features). Out: x·Wᵀ + b (…, out_features). `model/cpu.py` may compute the same product
faster.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from model import cpu

BLOCK_ELEMENTS = (
    1 << 20
)  # of a weight that is unpacked in blocks on a CPU: as many as stay in its cache
BLOCK_ROWS = 64  # at least, and a multiple of this
MIN_WIDE_ROWS = 16  # rows of x from which bf16 products are faster in fp32
ACTIVATIONS = {
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
}


class Linear(nn.Linear):
    """nn.Linear through `linear`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """nn.Embedding, whose matrix may be the head's, too."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (…, H) to logits (…, V)."""
        return linear(hidden, self.weight)


def fp32_is_faster(x: torch.Tensor) -> bool:
    """Whether x (…, in), in bf16, is multiplied faster with x and the weights in fp32, which costs
    a pass over both."""
    many = (
        x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and x.numel() >= MIN_WIDE_ROWS * x.shape[-1]
    )
    return (
        many
        and "bf16" in cpu.ways
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (…, in) · weightᵀ (in, out) + bias (out,), as F.linear."""
    if fp32_is_faster(x) and weight.dtype == x.dtype and not torch.is_grad_enabled():
        return by_blocks(
            x.float(), weight.shape, lambda start, end: weight[start:end].float(), x.dtype, bias
        )
    return cpu.linear(x, weight, bias)


def by_blocks(
    x: torch.Tensor,
    shape: Sequence[int],
    unpack: Callable[[int, int], torch.Tensor],
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x (…, in) · Wᵀ + bias in `dtype`, rounded to it once, with only a block of W (out, in) =
    `shape` at a time.

    unpack: from the first row and the one after the last to these rows of W, in the dtype of x.
    """
    y = torch.empty(*x.shape[:-1], shape[0], dtype=dtype, device=x.device)
    step = block_rows(shape[1])
    for start in range(0, shape[0], step):
        end = min(start + step, shape[0])
        part = None if bias is None else bias[start:end].to(x.dtype)
        y[..., start:end] = linear(x, unpack(start, end), part)
    return y


def block_rows(width: int) -> int:
    """How many rows of a weight (out, width) are unpacked at a time."""
    return max(1, BLOCK_ELEMENTS // (width * BLOCK_ROWS)) * BLOCK_ROWS


def activated(layer: nn.Module, x: torch.Tensor, activation: str) -> torch.Tensor:
    """One of ACTIVATIONS of layer(x)."""
    product = None
    # LoRA and 8 bits have their own `forward`
    if activation == "gelu_pytorch_tanh" and type(layer) is Linear:
        product = cpu.linear_gelu(x, layer.weight, layer.bias)
    return ACTIVATIONS[activation](layer(x)) if product is None else product
