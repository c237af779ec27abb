"""A low-rank linear map, used by LoRA and by the second branches of differential attention.

In: x (…, in_features). Out: scale · B(A(dropout(x))) (…, out_features), exactly zero at the start.
"""

import math

import torch
from torch import Tensor, nn

from model.common import UserError
from model.linear import Linear


class LowRank(nn.Module):
    """ΔW = (alpha / r) · B·A, LoRA's update (Hu et al. 2021, Eq. 3).

    `lora_A` is drawn Kaiming-uniform with a = √5, `lora_B` is zero, so the map starts at zero and
    only B has a gradient in the first step. Parameters stay in fp32 whatever the base's dtype: the
    product is cast to the dtype of x. Raises UserError for values from which nothing could be
    learned, or that no computer can hold.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        r: int,
        alpha: float,
        dropout: float = 0.0,
        device=None,
    ):
        super().__init__()
        if not (1 <= r <= 4096 and 0 < alpha <= 1e6 and 0 <= dropout < 1):
            raise UserError(
                f"r {r}, alpha {alpha}, dropout {dropout}: expected 1 ≤ r ≤ 4096, 0 < alpha ≤ 1000000 "
                "and 0 ≤ dropout < 1"
            )
        self.r, self.scaling, self.dropout = r, alpha / r, dropout
        self.enabled = True
        options = {"bias": False, "device": device, "dtype": torch.float32}
        self.lora_A = Linear(in_features, r, **options)
        self.lora_B = Linear(r, out_features, **options)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def add_to(self, base: Tensor, x: Tensor) -> Tensor:
        """base + scale · B(A(dropout(x))) in the dtype of `base`, or `base` itself while
        disabled."""
        return (base + self(x)).to(base.dtype) if self.enabled else base

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(x, self.dropout, self.training)
        if not torch.is_autocast_enabled(x.device.type):
            h = h.to(self.lora_A.weight.dtype)
        h = self.lora_A(h) * self.scaling  # at rank r, the narrowest point
        return self.lora_B(h).to(x.dtype)

    def delta_weight(self) -> Tensor:
        """ΔW (out_features, in_features) in fp32."""
        return self.scaling * (self.lora_B.weight.float() @ self.lora_A.weight.float())
