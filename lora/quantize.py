"""Frozen weights in 8 bits: a quarter of fp32's memory, half of bf16's, for what LoRA leaves as it is.

In: a model, adapted or not. Out: the same model, each frozen linear layer an `Int8Linear`. Embedding, head, norms and
all that learns stay as they are. Next: `train/finetune.py --quantize int8`.
"""

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from lora.adapter import adapter_parameters, fingerprint
from model.graft import Adaptable
from model.linear import Linear, linear


class Int8Linear(Linear):
    """x·Wᵀ + b with W = scale · weight: 8 bits of weight, −127 … 127, and one scale for each output channel (row).

    W differs from the original by at most half a scale, which is the row's largest value / 127, rounded to bf16: so no
    dtype that W is put back into for a product changes the scale.
    """

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight = linear.weight.detach()
        largest = weight.abs().amax(dim=1).float()
        scale = (largest / 127).bfloat16().float()
        whole = weight / torch.where(largest > 0, scale, 1.0)[:, None]
        self.weight = nn.Parameter(whole.round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = _Product.apply(x, self.weight, self.scale)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Product(torch.autograd.Function):
    """x·(scale · weight)ᵀ. The backward pass puts the weight back anew: autograd would keep all of them till then."""

    @staticmethod
    def forward(ctx, x, weight, scale):
        ctx.save_for_backward(weight, scale)
        return linear(x, _put_back(weight, scale, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return linear(grad, _put_back(*ctx.saved_tensors, grad.dtype).T), None, None


def _put_back(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype).mul_(scale.to(dtype)[:, None])


def quantize(model: Adaptable) -> int:
    """Turn every linear layer of `model` that does not learn into an `Int8Linear`, in place; returns how many.

    Before, the model's fingerprint is taken: an adapter trained here belongs to the whole base, and opens on it. Where
    nothing is to learn, switch off `requires_grad` first.
    """
    model.base_fingerprint = fingerprint(model)
    own = set(adapter_parameters(model).values())
    frozen = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not isinstance(module, Int8Linear)
        and not module.weight.requires_grad
        and module.weight not in own
    ]
    for path, module in frozen:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Int8Linear(module).train(module.training))
    return len(frozen)
