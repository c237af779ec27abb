"""Differential attention on pretrained weights: the variants, and what users call to graft, fold and measure them.

    name       heads                                          new parameters of a layer       at step 0    maps
    softmax    A·V                                            –                               exact        1
    shared     norm((1 − λ)·A·V)·(1 − λ_init)                 4·D, D                          shifted      1
    split      norm((A₁ − λ·A₂)·V)·(1 − λ_init)               4·D/2, D                        shifted      2
    twin       o₁ + μ·(o₁ − o₂)                               LoRA on q and k, N              exact        2
    v2         o₁ − σ(w·x + b)·o₂, one K                      LoRA on q, (H + 1)·N            nearly exact 2
    dex        o − λ·o·W_D, merges into W_O                   D·D, 1                          exact        1

A is an attention map, o = A·V, norm an RMSNorm by head, W_O the output projection. "The paper" is Differential
MultiModal Transformers (Li et al. 2024), which this project rebuilds; the original is Differential Transformer (Ye et
al. 2024). New parameters are fp32 whatever the model's dtype, because λ, μ and small updates are lost in bf16's 8
bits. Set the model's dtype before grafting: `model.to(dtype)` afterwards casts them with the rest. Maps are subtracted
in fp32.

The classes are in `model/variants.py`, `graft` and `fold` in `model/graft.py`; LoRA adapters (`lora/`) train around
what is grafted.
"""

from collections.abc import Callable

import torch
from torch import nn

from model.attention import Attention, tapped
from model.graft import FEED_FORWARDS, Graft, SwiGLU, fold, graft, new_parameters, variants_of  # noqa: F401
from model.variants import KINDS, Differential, default_options, lambda_schedule, options_of  # noqa: F401


def lambdas(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weight of the second map, by the path of the attention: λ (1,) or (N,), for twin μ (N,); detached."""
    found = {path: module.coefficient() for path, module in variants_of(model).items()}
    return {path: value.detach() for path, value in found.items() if value is not None}


@torch.no_grad()
def map_distance(model: nn.Module, **batch) -> dict[str, torch.Tensor]:
    """Total variation ½·Σ|A₁ − A₂| between the two maps of each layer, from 0 to 1, by the attention's path.

    A scalar for each attention with two maps: the mean over heads and valid queries of one forward pass of `batch`,
    the arguments of the model. Dropout follows the model's mode.
    """
    distances: dict[str, torch.Tensor] = {}
    valid = batch.get("attention_mask")

    def watch(path: str) -> Callable[[torch.Tensor], None]:
        maps: list[torch.Tensor] = []

        def tap(weights: torch.Tensor) -> None:
            maps.append(weights.float())
            if len(maps) == 2:
                by_query = (maps[0] - maps[1]).abs().sum(-1).mean(1) / 2  # (B, S)
                if valid is not None and path.startswith("language_model."):
                    by_query = by_query[valid.bool()]
                distances[path] = by_query.mean()

        return tap

    taps: dict[Attention, Callable[[torch.Tensor], None]] = {
        module: watch(path) for path, module in variants_of(model).items() if module.maps == 2
    }
    if taps:
        with tapped(taps):
            model(**(batch | {"positions_to_keep": 1}))  # the head, the widest product, is not needed here
    return distances
