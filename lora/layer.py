"""LoRA on one linear layer: a frozen base and a trained low-rank update beside it, or merged into its weight.

In: x (…, in_features). Out: base_layer(x) + (alpha / r)·B·A·dropout(x) (…, out_features).
"""

import torch
from torch import nn

from model.lowrank import LowRank


class LoRALinear(nn.Module):
    """W x + (alpha / r)·B·A·x (Hu et al. 2021, Eq. 3). `base_layer`, PEFT's name, holds W.

    Differential attention with two branches does not call this layer: it calls `base_layer` once and adds `lora`, and
    its second update, itself.
    """

    def __init__(self, base_layer: nn.Linear, r: int, alpha: float, dropout: float = 0.0):
        super().__init__()
        self.base_layer = base_layer
        self.alpha = alpha
        device = base_layer.weight.device
        self.lora = LowRank(base_layer.in_features, base_layer.out_features, r, alpha, dropout, device)
        self.original: torch.Tensor | None = None  # W while merged; not a buffer, so it is neither saved nor moved
        self.train(base_layer.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.base_layer(x)
        return base if self.merged else self.lora.add_to(base, x)

    @property
    def merged(self) -> bool:
        return self.original is not None

    @torch.no_grad()
    def merge(self) -> None:
        """Add the update to the weight: summed in fp32 (fp64 for an fp64 base), rounded once to the weight's dtype.

        (W + Δ) − Δ is not W in floating point, so W itself is kept in main memory.
        """
        if self.merged:
            return
        weight = self.base_layer.weight
        exact = torch.promote_types(weight.dtype, torch.float32)
        merged = weight.to(exact) + self.lora.delta_weight().to(exact)
        self.original = weight.detach().cpu()
        weight.data = merged.to(weight.dtype)  # new storage: on a CPU `original` keeps the old one without a copy

    def unmerge(self) -> None:
        """Restore W, to the bit."""
        if self.original is not None:
            self.base_layer.weight.data = self.original.to(self.base_layer.weight)
            self.original = None
