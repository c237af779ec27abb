"""Linear layers. Every matrix of the models is one of these.

In: x (…, in_features). Out: x·Wᵀ + b (…, out_features). `model/cpu.py` may compute the same product faster.
"""

import torch
import torch.nn.functional as F
from torch import nn

from model import cpu

ACTIVATIONS = {"gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}


class Linear(nn.Linear):
    """nn.Linear through `linear`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (…, in) · weightᵀ (in, out) + bias (out,), as F.linear."""
    product = cpu.linear(x, weight, bias)
    return F.linear(x, weight, bias) if product is None else product


def activated(layer: nn.Module, x: torch.Tensor, activation: str) -> torch.Tensor:
    """One of ACTIVATIONS of layer(x)."""
    product = None
    if activation == "gelu_pytorch_tanh" and type(layer) is Linear:  # LoRA and 8 bits have their own `forward`
        product = cpu.linear_gelu(x, layer.weight, layer.bias)
    return ACTIVATIONS[activation](layer(x)) if product is None else product
