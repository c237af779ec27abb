"""Frozen weights in 8 bits: a quarter of fp32's memory, half of bf16's.

In: a model, adapted or not. Out: the same model, each frozen linear layer an `Int8Linear`. Embedding, head, norms and
all trained parameters are unchanged. `python -m train.finetune --quantize int8` uses it.
"""

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from lora.adapter import adapter_parameters, fingerprint
from model.graft import Adaptable
from model.linear import Linear, linear


class Int8Linear(Linear):
    """x·Wᵀ + b with W = scale · weight: 8 bits of weight, −127 … 127, and one scale for each output channel (row).

    The scale is the row's largest value / 127, rounded to bf16, so that it is the same in every dtype that a product is
    computed in. W differs from the original by at most half a scale.
    """

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = linear.weight.detach()
        largest = weight.abs().amax(dim=1).float()
        scale = (largest / 127).bfloat16().float()
        steps = weight / torch.where(largest > 0, scale, 1.0)[:, None]
        self.weight = nn.Parameter(steps.round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = _Product.apply(x, self.weight, self.scale)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Product(torch.autograd.Function):
    """x·(scale · weight)ᵀ. The backward pass dequantizes again: autograd would keep every dequantized weight."""

    @staticmethod
    def forward(ctx, x, weight, scale):
        ctx.save_for_backward(weight, scale)
        return linear(x, _dequantized(weight, scale, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, scale = ctx.saved_tensors
        return linear(grad, _dequantized(weight, scale, grad.dtype).T), None, None


def _dequantized(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype).mul_(scale.to(dtype)[:, None])


def quantize(model: Adaptable) -> int:
    """Turn every frozen linear layer of `model` into an `Int8Linear`, in place; returns how many.

    The model keeps the fingerprint of its weights before: an adapter trained here belongs to the base in full precision
    and opens on it. Frozen means `requires_grad` is off.
    """
    if not model.language_model.embed_tokens.weight.is_meta:
        model.base_fingerprint = fingerprint(model)
    own = set(adapter_parameters(model).values())
    frozen = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not isinstance(module, Int8Linear)
        and not module.weight.requires_grad
        and module is not model.language_model.lm_head
        and module.weight not in own
    ]
    for path, module in frozen:
        model.set_submodule(path, Int8Linear(module).train(module.training))
    return len(frozen)
