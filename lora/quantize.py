"""Frozen weights in 8 or 4 bits: a quarter or an eighth of fp32's memory, with LoRA trained around them.

In: a linear layer. Out: an `Int8Linear` or `Nf4Linear` of KINDS, which computes with weights that are put back for
each product. `lora.adapter.quantize` replaces all frozen layers of a model, as `train.finetune --quantize nf4` does.
"""

from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from model.linear import Linear, linear

BLOCK, NESTED_BLOCK = 64, 256  # weights with one scale, scales with one scale of their own
# NormalFloat of 4 bits (Dettmers et al. 2023, appendix E): quantiles of the normal distribution over [-1, 1]
# fmt: off
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on


class QuantizedLinear(Linear):
    """x·Wᵀ + b, where W is put back from a few bits by `unpack(dtype, shape, *stored)`."""

    kind: ClassVar[str]

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.dtype = linear.weight.dtype  # of the weights before
        self.pack(linear.weight.detach())

    def pack(self, weight: torch.Tensor) -> None:
        """Set what `stored` returns. weight (out, in)."""
        raise NotImplementedError

    def stored(self) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError

    @staticmethod
    def unpack(dtype: torch.dtype, shape: tuple[int, int], *stored: torch.Tensor) -> torch.Tensor:
        """W (out, in) = `shape`, in `dtype`."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = _Product.apply(x, self.unpack, (self.out_features, self.in_features), *self.stored())
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _apply(self, fn, recurse=True):
        """As nn.Module's, but `model.to(dtype)` moves the scales without rounding them."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self.get_buffer(name)
            if moved.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def put_back(self) -> Linear:
        """A plain layer of the weights that this one computes with, in the dtype that they had before."""
        with torch.device("meta"):
            plain = Linear(self.in_features, self.out_features, bias=False)
        weight = self.unpack(self.dtype, (self.out_features, self.in_features), *self.stored())
        plain.weight, plain.bias = nn.Parameter(weight, requires_grad=False), self.bias
        return plain.train(self.training)


class _Product(torch.autograd.Function):
    """x·Wᵀ. The backward pass puts W back again: autograd would keep every such weight."""

    @staticmethod
    def forward(ctx, x, unpack, shape, *stored):
        ctx.save_for_backward(*stored)
        ctx.unpack, ctx.shape = unpack, shape
        return linear(x, unpack(x.dtype, shape, *stored))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):
        stored = ctx.saved_tensors  # once: checkpointing gives them a single time
        return linear(grad, ctx.unpack(grad.dtype, ctx.shape, *stored).T), None, None, *[None] * len(stored)


class Int8Linear(QuantizedLinear):
    """W = scale · weight: 8 bits of weight, −127 … 127, and one scale for each output channel (row).

    The scale is the row's largest value / 127, rounded to bf16, so that it is the same in every dtype that a product is
    computed in. W differs from the original by at most half a scale.
    """

    kind = "int8"

    def pack(self, weight):
        largest = weight.abs().amax(dim=1).float()
        scale = (largest / 127).bfloat16().float()
        steps = weight / torch.where(largest > 0, scale, 1.0)[:, None]
        self.weight = nn.Parameter(steps.round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def stored(self):
        return self.weight, self.scale

    @staticmethod
    def unpack(dtype, shape, *stored):
        weight, scale = stored
        return weight.to(dtype).mul_(scale.to(dtype)[:, None])


class Nf4Linear(QuantizedLinear):
    """4-bit NormalFloat with double quantization (QLoRA, Dettmers et al. 2023): 4.13 bits a weight.

    In row-major order, each block of 64 weights has a scale s, its largest absolute value, and each weight is the
    nearest of s · NF4; two are in a byte, the first in its high half. Of the scales, s − mean(s) is itself stored in 8
    bits, by a table, with one fp32 scale for each block of 256. The bytes and the layout are those of bitsandbytes; a
    scale within 1e-5 of the middle of two table entries may be rounded to the other one there.
    """

    kind = "nf4"

    def pack(self, weight):
        device = weight.device
        values = _blocks(weight.float().flatten(), BLOCK)
        scale = values.abs().amax(dim=1)
        values = values * torch.where(scale > 0, 1 / scale, 0.0)[:, None]
        codes = torch.tensor(NF4, device=device)
        numbers = _nearest(values.flatten(), codes)
        self.weight = nn.Parameter((numbers[::2] << 4 | numbers[1::2]).contiguous(), requires_grad=False)
        pairs = torch.cartesian_prod(codes, codes)  # of each byte
        offset = scale.mean()
        nested = _blocks(scale - offset, NESTED_BLOCK)
        nested_scale = nested.abs().amax(dim=1)
        steps = nested / torch.where(nested_scale > 0, nested_scale, 1.0)[:, None]
        table = dynamic_table(device)
        parts = {"pairs": pairs, "table": table, "nested_scale": nested_scale, "offset": offset}
        parts["scale"] = _nearest(steps.flatten(), table)[: len(scale)].clone()
        for name, tensor in parts.items():
            self.register_buffer(name, tensor)

    def stored(self):
        return self.weight, self.pairs, self.scale, self.table, self.nested_scale, self.offset

    @staticmethod
    def unpack(dtype, shape, *stored):
        weight, pairs, scale, table, nested_scale, offset = stored
        nested = _blocks(table[scale.int()], NESTED_BLOCK) * nested_scale[:, None]
        scale = nested.flatten()[: len(scale)] + offset
        values = pairs[weight.int()].view(-1, BLOCK) * scale[:, None]
        return values.flatten()[: shape[0] * shape[1]].view(shape).to(dtype)


def dynamic_table(device: torch.device | None = None) -> torch.Tensor:
    """The 256 numbers, in [-1, 1] and in order, by which a scale is stored in 8 bits, fp32.

    They are 0, 1, and for e = 0 … 6 both signs of 10^(e−6) times the 2^e middles of equal parts of [0.1, 1].
    """
    numbers = [torch.tensor([0.0, 1.0])]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        middles = 10.0 ** (exponent - 6) * (edges[:-1] + edges[1:]) / 2
        numbers += [middles, -middles]
    return torch.cat(numbers).sort().values.to(device)


def _blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    """values (n,) as (⌈n / size⌉, size), filled up with zeros."""
    return nn.functional.pad(values, (0, -len(values) % size)).view(-1, size)


def _nearest(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The number of the nearest of the ascending `codes`, uint8; of two as near, the lower one."""
    return torch.bucketize(values, (codes[1:] + codes[:-1]) / 2, out_int32=True).to(torch.uint8)


KINDS: dict[str, type[QuantizedLinear]] = {layer.kind: layer for layer in (Int8Linear, Nf4Linear)}
