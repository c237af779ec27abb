"""Linear layers. Every matrix of the models is one of these.

In: x (…, in_features). Out: x·Wᵀ + b (…, out_features). `model/cpu.py` may compute the same product
faster.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import cpu

# On a CPU a weight is unpacked in blocks of so many elements, which stay in its cache; a block has
# BLOCK_ROWS rows, or a multiple of them
BLOCK_ELEMENTS = 1 << 20
BLOCK_ROWS = 64
MIN_WIDE_ROWS = 16  # rows of x from which bf16 products are faster in fp32
ACTIVATIONS = {
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "silu": F.silu,
}


class Linear(nn.Linear):
    """nn.Linear through `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """nn.Embedding, whose matrix may be the head's, too."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (…, H) to logits (…, V)."""
        return linear(hidden, self.weight)


def filled(count: int, value: float) -> nn.Parameter:
    """A parameter of `count` numbers that start at one value."""
    return nn.Parameter(torch.full((count,), float(value)))


def fp32_is_faster(x: Tensor) -> bool:
    """Whether x (…, in), in bf16, is multiplied faster with x and the weights in fp32, which costs
    a pass over both."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or "bf16" not in cpu.ways:
        return False
    many = x.numel() >= MIN_WIDE_ROWS * x.shape[-1]
    return many and not (torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (…, in) · weightᵀ (in, out) + bias (out,), as F.linear."""
    if fp32_is_faster(x) and weight.dtype == x.dtype and not torch.is_grad_enabled():

        def unpack(start: int, end: int) -> Tensor:
            return weight[start:end].float()

        return by_blocks(x.float(), weight.shape, unpack, x.dtype, bias)
    return cpu.product(x, weight, bias)


def by_blocks(
    x: Tensor,
    shape: Sequence[int],
    unpack: Callable[[int, int], Tensor],
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """x (…, in) · Wᵀ + bias in `dtype`, rounded to it once, with only a block of W (out, in) =
    `shape` at a time.

    unpack: from the first row and the one after the last to these rows of W, in the dtype of x.
    """
    y = x.new_empty(*x.shape[:-1], shape[0], dtype=dtype)
    step = block_rows(shape[1])
    for start in range(0, shape[0], step):
        end = min(start + step, shape[0])
        part = None if bias is None else bias[start:end].to(x.dtype)
        y[..., start:end] = linear(x, unpack(start, end), part)
    return y


def block_rows(width: int) -> int:
    """How many rows of a weight (out, width) are unpacked at a time."""
    return max(1, BLOCK_ELEMENTS // (width * BLOCK_ROWS)) * BLOCK_ROWS


def activated(layer: nn.Module, x: Tensor, activation: str) -> Tensor:
    """One of ACTIVATIONS of layer(x)."""
    # LoRA and 8 bits have their own `forward`
    if activation == "gelu_pytorch_tanh" and type(layer) is Linear:
        found = cpu.linear_gelu(x, layer.weight, layer.bias)
        if found is not None:
            return found
    return ACTIVATIONS[activation](layer(x))
