"""Weights in 8 or 4 bits: a half to an eighth of their memory, read faster in decoding, with LoRA
trained around them.

A layer of KINDS computes with weights that are put back for each product. `lora.adapter.quantize`
replaces the frozen layers of a model, as `train.finetune --quantize nf4` does. With `quantize`,
`weights.load.load_model` replaces all layers, while it reads them.

A product of few bf16 rows on a CPU, as in decoding, is PyTorch's own where there is one: it reads
the codes alone. Every other product puts weights back: on a CPU a block of rows at a time, on a GPU
a whole layer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from model import cpu
from model.common import UserError, quoted
from model.gemma import Adaptable, Gemma
from model.linear import Embedding, Linear, block_rows, by_blocks, fp32_is_faster, linear
from weights.fingerprint import sampled

GROUP = 64  # weights that share a scale
NESTED_BLOCK = 256  # scales that share a scale of their own
FEW_ROWS = 16  # rows of x up to which PyTorch's own products are the faster ones
# NormalFloat of 4 bits (Dettmers et al. 2023, appendix E): quantiles of the normal distribution
# over [-1, 1], in fp32
NF4 = [-1, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]


class QuantizedLinear(Linear):
    """x·Wᵀ + b, where W is put back from a few bits by `unpack`."""

    kind: ClassVar[str]
    # rows (n, in) of W to their codes and their scales
    encode: ClassVar[Callable]
    # (stored(), shape of W, dtype, start, a multiple of BLOCK_ROWS, end) to rows of W
    unpack: ClassVar[Callable]

    def __init__(
        self,
        linear: nn.Linear | nn.Embedding,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ):
        """The weight is cast to `dtype` and moved to `device` first, a few rows at a time; None: as
        it is."""
        nn.Module.__init__(self)
        weight = linear.weight.detach()
        self.shape = weight.shape
        self.out_features, self.in_features = self.shape
        self.bias = getattr(linear, "bias", None)
        self.dtype = dtype or weight.dtype  # of the weights before
        # what a fingerprint reads of W
        self.original = None if weight.is_meta else sampled(weight, self.dtype)
        blocks = weight.split(block_rows(self.in_features))
        encoded = [self.encode(rows.to(device, self.dtype)) for rows in blocks]
        codes, scale = map(torch.cat, zip(*encoded, strict=True))
        self.weight = nn.Parameter(codes, requires_grad=False)
        for name, buffer in self.scales_of(scale).items():
            self.register_buffer(name, buffer)

    @staticmethod
    def scales_of(scale: Tensor) -> dict[str, Tensor]:
        """What is stored beside the codes."""
        return {"scale": scale}

    def stored(self) -> tuple[Tensor, ...]:
        return self.weight, *self.buffers(recurse=False)

    def multiply_few(self, x: Tensor) -> Tensor | None:
        """x (n, in)·Wᵀ in bf16 on a CPU; None where this PyTorch has no product for it."""
        return None

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        y = None
        few = 0 < x.numel() <= FEW_ROWS * self.in_features
        if few and x.dtype == torch.bfloat16 and device == "cpu" and not cpu.needs_gradient(x):
            y = self.multiply_few(x.reshape(-1, self.in_features).contiguous())
        if y is None:
            y = _Product.apply(x, self.unpack, self.shape, *self.stored())
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def _apply(self, fn, recurse=True):
        """As nn.Module's, but `model.to(dtype)` moves the scales without rounding them."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, moved in self.named_buffers(recurse=False):
            if moved.dtype != before[name].dtype:
                self._buffers[name] = before[name].to(moved.device)
        return self

    def put_back(self) -> nn.Module:
        """A plain layer of the weights that this one computes with, in the dtype that they had
        before."""
        whole = self.unpack(self.stored(), self.shape, self.dtype, 0, self.out_features)
        with torch.device("meta"):
            plain = Linear(self.in_features, self.out_features, bias=False)
        plain.weight = nn.Parameter(whole.contiguous(), requires_grad=False)
        plain.bias = self.bias
        return plain.train(self.training)


class _Product(torch.autograd.Function):
    """x·Wᵀ. The backward pass puts W back again: autograd would keep every such weight."""

    @staticmethod
    def forward(ctx, x, unpack, shape, *stored):
        ctx.save_for_backward(*stored)
        ctx.unpack, ctx.shape = unpack, shape
        dtype = torch.float32 if fp32_is_faster(x) else x.dtype
        rows = partial(unpack, stored, shape, dtype)
        if x.device.type != "cpu" or isinstance(x, FakeTensor) or torch.compiler.is_compiling():
            return linear(x, rows(0, shape[0]))
        return by_blocks(x.to(dtype), shape, rows, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad):
        stored = ctx.saved_tensors  # once: checkpointing gives them a single time
        dtype = torch.float32 if fp32_is_faster(grad) else grad.dtype
        weight = ctx.unpack(stored, ctx.shape, dtype, 0, ctx.shape[0])
        return linear(grad.to(dtype), weight.T).to(grad.dtype), None, None, *[None] * len(stored)


class Int8Linear(QuantizedLinear):
    """W = scale · weight: 8 bits of weight, −127 … 127, and one scale for each output channel
    (row): its largest value / 127, rounded to bf16, so that it is the same in every dtype of a
    product."""

    kind = "int8"
    scale: Tensor

    @staticmethod
    def encode(rows):
        steps = rows.to(torch.float32, copy=True)
        largest = steps.abs().amax(dim=1)
        scale = (largest / 127).bfloat16().float()
        steps = steps.div_(torch.where(largest > 0, scale, 1.0)[:, None])
        return steps.round_().to(torch.int8), scale

    @staticmethod
    def unpack(stored, shape, dtype, start, end):
        weight, scale = stored
        return weight[start:end].to(dtype).mul_(scale[start:end, None].to(dtype))

    def multiply_few(self, x):
        # it leaves out what exceeds whole vectors
        if _int8_product is None or self.in_features % GROUP:
            return None
        return _int8_product(x, self.weight, self.scale.bfloat16())


class Int8Embedding(Int8Linear):
    """An embedding whose rows are those of an `Int8Linear`, which is also the head where the two
    are tied."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids].to(self.dtype) * self.scale[ids].to(self.dtype)[..., None]

    def logits(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)

    def put_back(self):
        return Embedding.from_pretrained(super().put_back().weight)


# PyTorch's products of few rows with few bits: private operators, also emitted by its compiler
_int8_product: Any = getattr(torch, "_weight_int8pack_mm", None)


class Nf4Linear(QuantizedLinear):
    """4-bit NormalFloat with double quantization (QLoRA, Dettmers et al. 2023): 4.13 bits a weight.

    In row-major order, each block of 64 weights has a scale s, its largest absolute value, and each
    weight is the nearest of s · NF4; two are in a byte, the first in its high half. Of the scales,
    s − mean(s) is itself stored in 8 bits, by a table, with one fp32 scale for each block of 256.
    The bytes and the layout are those of bitsandbytes; a scale within 1e-5 of the middle of two
    table entries may be rounded to the other one there.
    """

    kind = "nf4"

    @staticmethod
    def encode(rows):
        values = rows.to(torch.float32, copy=True).flatten()
        values = F.pad(values, (0, -len(values) % GROUP)).view(-1, GROUP)
        scale = values.abs().amax(dim=1)
        values.mul_(torch.where(scale > 0, 1 / scale, 0.0)[:, None])
        numbers = _nearest(values, torch.tensor(NF4, device=rows.device))
        return (numbers[:, ::2] << 4 | numbers[:, 1::2]).flatten(), scale

    @staticmethod
    def scales_of(scale):
        codes = torch.tensor(NF4, device=scale.device)
        table, offset = dynamic_table(scale.device), scale.mean()
        nested = F.pad(scale - offset, (0, -len(scale) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
        nested_scale = nested.abs().amax(dim=1)
        steps = nested / torch.where(nested_scale > 0, nested_scale, 1.0)[:, None]
        return {
            "pairs": torch.cartesian_prod(codes, codes),  # of each byte
            "scale": _nearest(steps.flatten(), table)[: len(scale)].clone(),
            "table": table,
            "nested_scale": nested_scale,
            "offset": offset,
        }

    @staticmethod
    def unpack(stored, shape, dtype, start, end):
        weight, pairs, scale, table, nested_scale, offset = stored
        width = shape[1]
        # the groups of these rows; the last one is rounded up
        first, last = start * width // GROUP, -(-end * width // GROUP)
        nested = nested_scale[torch.arange(first, last, device=weight.device) // NESTED_BLOCK]
        scale = table[scale[first:last].int()] * nested + offset
        codes = weight[first * GROUP // 2 : last * GROUP // 2]
        values = pairs[codes.int()].view(-1, GROUP) * scale[:, None]
        return values.flatten()[: (end - start) * width].view(-1, width).to(dtype)


def dynamic_table(device: torch.device | None = None) -> Tensor:
    """The 256 numbers, in [-1, 1] and in order, by which a scale is stored in 8 bits, fp32.

    They are 0, 1, and for e = 0 … 6 both signs of 10^(e−6) times the 2^e middles of equal parts of
    [0.1, 1].
    """
    numbers = [torch.tensor([0.0, 1.0])]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        middles = 10.0 ** (exponent - 6) * (edges[:-1] + edges[1:]) / 2
        numbers += [middles, -middles]
    return torch.cat(numbers).sort().values.to(device)


def _nearest(values: Tensor, codes: Tensor) -> Tensor:
    """The number of the nearest of the ascending `codes`, uint8; of two as near, the lower one."""
    middles = (codes[1:] + codes[:-1]) / 2
    if len(codes) > 16:
        return torch.bucketize(values, middles, out_int32=True).to(torch.uint8)
    numbers = torch.zeros_like(values, dtype=torch.uint8)
    for middle in middles:  # several times as fast as searching
        numbers += values > middle
    return numbers


KINDS: dict[str, type[QuantizedLinear]] = {layer.kind: layer for layer in (Int8Linear, Nf4Linear)}
# PyTorch multiplies it on a CPU in bf16; embedding and head may be in 8 bits, too
BF16_KINDS = ("int8",)
MIN_OUTPUTS = 16  # a layer with fewer is a gate: it stays as it is


# a layer to replace and the class that does, by path
Layers = dict[str, tuple[Any, type[QuantizedLinear]]]


def replaceable(model: Adaptable, kind: str | None, head: bool) -> Layers:
    """The layers of `model` that `kind` replaces, and by which class, by path.

    They are all frozen linear layers but the head. With `head` they are all linear layers, frozen
    or not; embedding and head only for a kind of BF16_KINDS. A kind of None replaces nothing.
    Raises UserError for an unknown kind, a model that is quantized in another way, and one whose
    decoder is not Gemma's.
    """
    if kind is None:
        return {}
    if kind not in KINDS:
        raise UserError(f"cannot quantize to {quoted(kind)}: choose one of {', '.join(KINDS)}")
    if model.quantized not in (None, kind):
        raise UserError(
            f"the model is quantized to {model.quantized} already: load it anew for {kind}"
        )
    if not isinstance(model.language_model, Gemma):
        raise UserError(
            f"{type(model).__name__} cannot be quantized to {kind}: its scans need whole weights"
        )
    with_head = head and kind in BF16_KINDS
    layers = {}
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            continue
        if isinstance(module, Embedding):
            is_chosen, replacement = with_head, Int8Embedding
        elif module is model.language_model.lm_head:
            is_chosen, replacement = with_head, Int8Linear
        elif isinstance(module, nn.Linear) and module.out_features >= MIN_OUTPUTS:
            is_chosen, replacement = head or not module.weight.requires_grad, KINDS[kind]
        else:
            continue
        if is_chosen:
            layers[path] = module, replacement
    return layers


def pack(model: Any, kind: str | None, layers: Layers) -> Any:
    """Replace these `layers` of `model`, as `replaceable` returns them; returns it."""
    for path, (module, replacement) in layers.items():
        model.set_submodule(path, replacement(module).train(module.training))
    model.quantized = kind
    return model
