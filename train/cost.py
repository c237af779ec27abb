"""What a training step takes, found without taking it: memory and floating-point operations, from shapes alone.

In: a model on the meta device and a micro-batch. Out: bytes of weights, gradients, moments and activations, and FLOPs.
The step itself runs, on tensors that have a shape and no memory, and every storage is counted while it is alive. On a
CPU this is what the allocator reports, but that Mamba scans, and weights in few bits are unpacked, as on a GPU. CUDA
adds about 1 GiB of its own, and copies of the keys and values for all heads where attention has a mask.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from model.device import without_values
from train.loop import Micro
from train.optim import is_inner_matrix, trainable
from train.supervised import supervised_loss

aten = torch.ops.aten


def _attention_flops(query, key, *others, out_val=None, **options) -> int:
    """Two products with a map of queries × keys, for queries (B, N, S, D)."""
    return 4 * query.numel() * key.shape[2]


def _attention_backward_flops(grad, query, key, *others, out_val=None, **options) -> int:
    """Four products, and that of the map once more."""
    return 10 * query.numel() * key.shape[2]


def _linear_flops(x, weight, *others, out_val=None, **options) -> int:
    return 2 * x.numel() * weight.shape[0]


# beside PyTorch's own registry: what the CPU's operators compute
FLOPS = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    torch.ops.mkldnn._linear_pointwise: _linear_flops,
}


@dataclass(frozen=True)
class StepCost:
    """Bytes at the peak of a step, and the FLOPs of one micro-batch's matrix products.

    gradients: also their copies, where GPUs exchange them. moments: both of Adam or the one of Muon, in the parameters'
    dtype. activations: whatever else is alive at the peak. update: what the optimizer's step takes, after them.
    """

    weights: float
    gradients: float
    moments: float
    activations: float
    flops: float
    update: float = 0.0

    @property
    def memory(self) -> float:
        return self.weights + self.gradients + self.moments + max(self.activations, self.update)


class _Counter(TorchDispatchMode):
    """Counts the bytes of living storages, and FLOPs, of operators on tensors without memory.

    `values` has the values of integer tensors and of what follows from them alone: a model reads them, for example to
    count image slots.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = self.flops = 0
        self.values = WeakTensorKeyDictionary()
        self.known = WeakIdKeyDictionary()

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self.known:
            size = self.known[storage] = storage.nbytes()
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self.live -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:  # two thirds of the calls
            return args[0].fake_device
        inputs = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is aten._local_scalar_dense.default:
            with _disable_current_modes():
                return self.values[inputs[0]].item()
        out = func(*args, **kwargs)
        formula = FLOPS.get(func.overloadpacket) or flop_registry.get(func.overloadpacket)
        self.flops += formula(*args, **kwargs, out_val=out) if formula else 0
        outputs = [leaf for leaf in tree_iter(out) if isinstance(leaf, torch.Tensor)]
        for tensor in outputs:
            self.add(tensor)
        if all(tensor in self.values for tensor in inputs) and (
            inputs or not any(map(torch.is_floating_point, outputs))
        ):
            args, kwargs = tree_map_only(torch.Tensor, self.values.__getitem__, (args, kwargs))
            with _disable_current_modes():
                values = [leaf for leaf in tree_iter(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
            for tensor, value in zip(outputs, values, strict=True):
                self.values[tensor] = value
        return out


def step_costs(
    model: nn.Module,
    micro: Micro,
    autocast: torch.dtype | None,
    accumulates: bool = False,
    loss: Callable[..., torch.Tensor] = supervised_loss,
    optimizer: str = "adamw",
) -> tuple[StepCost, StepCost]:
    """What a step of `model` costs, without and with checkpointing.

    model: on the meta device, what is trained requires gradients; afterwards it is of no use. accumulates: gradients of
    an earlier micro-batch are there when this one begins. loss(model, micro): the sum over the supervised tokens.
    """
    fake, costs = FakeTensorMode(), []
    with fake:
        _take_shapes(model)
    learned, by_muon = trainable(model), optimizer == "muon"
    moments = sum((1 if by_muon and is_inner_matrix(*one) else 2) * one[1].nbytes for one in learned.items())
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    gradients = sum(parameter.nbytes for parameter in learned.values())
    # RAdam has no fused kernel: on a GPU it updates all parameters at once, with a tensor of the size of each
    update = gradients if optimizer == "radam" else 0
    for checkpointing in (False, True):
        counter = _Counter()
        with fake, counter, without_values():
            for tensor in (*model.parameters(), *model.buffers()):
                counter.known[tensor.untyped_storage()] = 0  # counted above
            for parameter in learned.values():
                parameter.grad = torch.empty_like(parameter) if accumulates else None
            counter.live = counter.peak = gradients if accumulates else 0
            shapes = _shapes_of(micro, fake, counter)
            model.train()
            model.set_checkpointing(checkpointing)
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                value = loss(model, shapes)
            (value / micro.tokens).backward()
        costs.append(StepCost(weights, gradients, moments, counter.peak - gradients, counter.flops, update))
    return costs[0], costs[1]


def _take_shapes(model: nn.Module) -> None:
    """Replace parameters and buffers by tensors of the same shapes that seem to be on a CPU."""
    taken = {}
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if tensor not in taken:
                shape = torch.empty(tensor.shape, dtype=tensor.dtype)
                is_parameter = isinstance(tensor, nn.Parameter)
                taken[tensor] = nn.Parameter(shape, tensor.requires_grad) if is_parameter else shape
            setattr(module, name, taken[tensor])


def _shapes_of(value, fake: FakeTensorMode, counter: _Counter):
    """A micro-batch, or a part of it, without its pictures' values; those of its integers are known to the counter."""
    if is_dataclass(value):
        own = {field.name: _shapes_of(getattr(value, field.name), fake, counter) for field in fields(value)}
        return replace(value, **own)
    if not isinstance(value, torch.Tensor):
        return value
    shape = fake.from_tensor(value)
    if not value.is_floating_point():
        counter.values[shape] = value
    return shape
