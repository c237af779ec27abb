"""An attention variant, and the controls: each has one part of what a second map may do.

In and out as of `Attention`; the table of all variants is in `model/differential.py`, which grafts
them. o = A·V is the output of a head whose map A is of the logits s.
"""

from typing import Any

import torch
from torch import Tensor, nn

from model.attention import Attention, Rope
from model.common import UserError
from model.linear import filled


class Variant(Attention):
    """A variant takes over the projections of a plain attention, trained, with LoRA, or on meta.

    `layer` counts from 1. Keyword arguments of a subclass are the options that `graft` accepts for
    it.
    """

    kind: str
    maps = 1  # attention maps of a head; `tap` is called once for each, A₁ first
    # projections whose weights a second branch reads too: no LoRA is merged there
    read_twice: tuple[str, ...] = ()
    foldable = False  # `fold` makes plain attention of it
    # "lora_A" or "lora_B": which of them `fold_into` changes; "" where it changes no weight
    lora_half = ""
    formula = "A₁ − λA₂"  # of `difference`
    lambda_init = 0.0
    weight_name = ""  # of the parameter that is the weight of the second map

    def __init__(self, plain: Attention, layer: int, norm: bool = False):
        self.adopt(plain)
        self.folded_name = self.output_name  # the projection that `fold_into` changes
        self.subln = nn.RMSNorm(self.head_dim, 1e-5) if norm else None

    def coefficient(self) -> Any:
        """The weight of the second map in fp32: λ (1,), or λ or μ of each head (N,).

        None for a variant without.
        """
        return self.get_parameter(self.weight_name).float() if self.weight_name else None

    def factor(self, x: Tensor) -> Tensor:
        """The weight of the second map where the hidden states are x (B, S, H), in fp32.

        It broadcasts to (B, N, S, 1).
        """
        return self.coefficient()[:, None, None]

    def blend(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Two products of maps with V, combined and normed in fp32, in their dtype."""
        heads = self.difference(self.factor(x), first.float(), second.float())
        return self.normalise(heads).to(first.dtype)

    def difference(self, factor: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """What is left of two maps, or of their products with V, in fp32."""
        return first - factor * second

    def normalise(self, heads: Tensor) -> Tensor:
        """norm(heads)·(1 − λ_init) of heads (B, N, S, D) in fp32; without a norm, heads."""
        return heads if self.subln is None else self.subln(heads) * (1 - self.lambda_init)

    def fold_into(self, layer: nn.Linear) -> None:
        """Change a linear layer so that plain attention computes the same with it."""


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """factor·x, computed in fp32, in the dtype of x."""
    return (x.float() * factor).to(x.dtype)


def scores_of(linear: nn.Linear, x: Tensor) -> Tensor:
    """N numbers of hidden states x (B, S, H) by a linear layer, in fp32, as (B, N, S, 1)."""
    bias = None if linear.bias is None else linear.bias.float()
    with torch.autocast(x.device.type, enabled=False):
        scores = nn.functional.linear(x.float(), linear.weight.float(), bias)
    return scores.transpose(1, 2)[..., None]


class Softmax(Variant):
    """Plain attention as a variant: the control of every comparison."""

    kind = "softmax"
    foldable = True


class Mean(Variant):
    """o − λ·Ū, Ū the mean of the visible values: a floor that all positions share is subtracted.

    One λ a head, 0 at the start, where its gradient is −⟨∂o, Ū⟩. The map of Ū is uniform: that of
    queries that are zero.
    """

    kind = "mean"
    maps = 2
    weight_name = "lambda_mean"

    def __init__(self, plain: Attention, layer: int):
        super().__init__(plain, layer)
        self.lambda_mean = filled(self.num_heads, 0.0)

    def mix(self, x, q, k, v, mask) -> Tensor:
        queries = q, torch.zeros_like(q)
        return self.blend(x, *(self.softmax_attention(each, k, v, mask) for each in queries))


class Gate(Variant):
    """Gated attention by head (Qiu et al. 2025, arXiv 2505.06708): o·2σ(w·x), where w starts at 0."""

    kind = "gate"

    def __init__(self, plain: Attention, layer: int):
        super().__init__(plain, layer)
        self.gate = nn.Linear(self.hidden_size, self.num_heads, bias=False)
        nn.init.zeros_(self.gate.weight)

    def mix(self, x, q, k, v, mask) -> Tensor:
        open_to = 2 * torch.sigmoid(scores_of(self.gate, x))
        return scaled(self.softmax_attention(q, k, v, mask), open_to)


class Temperature(Variant):
    """One factor a head for q, 1 at the start: a sharper or flatter map. It folds into q_proj."""

    kind = "temperature"
    foldable = True
    lora_half = "lora_B"

    def __init__(self, plain: Attention, layer: int):
        super().__init__(plain, layer)
        self.folded_name = "q_proj"
        self.temperature = filled(self.num_heads, 1.0)

    def project(self, x: Tensor, rope: Rope | None):
        q, k, v = super().project(x, rope)
        return scaled(q, self.temperature.float()[:, None, None]), k, v

    def fold_into(self, layer: nn.Linear) -> None:
        """The rows of each head of W (N·D, …), and the bias, times its factor."""
        factors = self.temperature.repeat_interleave(self.head_dim)
        layer.weight.mul_(factors[:, None])
        if layer.bias is not None:
            layer.bias.mul_(factors)


class Sink(Variant):
    """A learned logit b of each head beside the keys, as in gpt-oss: o·σ(logsumexp(s) − b).

    b starts at `start`, far below the others; at 0 it is the softmax that adds one to its sum.
    """

    kind = "sink"

    def __init__(self, plain: Attention, layer: int, *, start: float = -4.0):
        super().__init__(plain, layer)
        if not abs(start) <= 60:
            raise UserError(f"start is {start!r}, expected a logit of at most ±60")
        self.sinks = filled(self.num_heads, start)

    def mix(self, x, q, k, v, mask) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            logits = self.logits(q.float(), k.float(), mask, self.scale)
        total = logits.logsumexp(-1, keepdim=True)
        left = torch.sigmoid(total - self.sinks.float()[:, None, None])
        return scaled(self.softmax_attention(q, k, v, mask), left)
