"""What a run takes, before anything is trained: `python -m train.finetune --plan`.

In: the settings of a run. Out: a `PlanRow`: what is trained, samples, steps, tokens, the memory of one GPU, disk, and
hours by a GPU's published peak. Headers of the weights are compared with their config.json, and a sample of the data is
opened as training opens it, but no weight is read and no GPU is needed.

A step is not taken but traced: it runs on tensors that have a shape and no memory, and every storage is counted while
it is alive. On a CPU this is what the allocator reports, but that Mamba scans, and weights in few bits are unpacked, as
on a GPU. CUDA adds about 1 GiB of its own, and copies of keys and values for all heads where attention has a mask.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from eval.records import Record
from eval.report import markdown_table
from model.common import UserError
from model.device import autocast_dtype, dtype_name, without_values
from model.paligemma import PaliGemma
from model.processor import Processor
from model.source import preset_of
from train.align import check_align
from train.data.batches import MicroBatch, Order
from train.data.sources import read_records
from train.distributed import World, computes_in_bf16, layers_of
from train.loop import Micro
from train.optim import count, is_inner_matrix, trainable
from train.recipes import GPUS
from train.settings import Settings, run_stem, step_layout
from train.supervised import make_order, supervised_loss
from train.systems.open import SYSTEMS, open_model, open_processor, weights_dtype

aten = torch.ops.aten
SHARES = (0.5, 0.3)  # of the peak, which a training step may reach
SAMPLE = 128  # rows that are opened


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


@dataclass(frozen=True)
class PlanRow:
    """One run. samples, steps, tokens and flops are those of the whole run on all GPUs, without evaluation.

    tokens: with padding, and those of pictures. plain and checkpointed: a step on one GPU, without and with
    `--checkpointing`. left_out: a line for each record that was opened and cannot be used.
    """

    name: str
    gpus: int
    trainable: int
    rows: int  # of a micro-batch
    step_rows: int  # of a step
    samples: int
    steps: int
    tokens: int
    plain: StepCost
    checkpointed: StepCost
    disk: int  # bytes
    flops: float
    left_out: tuple[str, ...]

    def hours(self, gpu: str, share: float) -> float:
        """Hours of the run at a share of the peak of each GPU."""
        return self.flops / (share * GPUS[gpu][0] * self.gpus) / 3600


def plan(
    settings: Settings,
    name: str | None = None,
    gpus: int = 1,
    start: tuple[PaliGemma, Processor] | None = None,
    known: dict[str, list[Record]] | None = None,
) -> PlanRow:
    """What the run of `settings` on `gpus` GPUs takes. Raises UserError for all that the run would refuse.

    `device` decides dtypes, as in the run; "auto" is a GPU here. start: a model on the meta device, in the run's dtype,
    and its processor, where there are no files of it yet. known: see `read_records`.
    """
    rows, micro_batches = step_layout(settings, gpus)
    records = read_records(settings, known=known)
    device = torch.device("cuda" if settings.device == "auto" else settings.device)
    dtype = dtype_name(weights_dtype(settings, device))
    model, _ = open_model(replace(settings, dtype=dtype), torch.device("meta"), start and start[0])
    if settings.align:
        check_align(model, records)
    learned, autocast = trainable(model), autocast_dtype(settings.autocast, device)
    result = sum(tensor.nbytes for tensor in (model.state_dict() if settings.writes_model else learned).values())
    processor = start[1] if start else open_tokenizer(settings, model)
    order = make_order(records, processor, settings, World(0, gpus, torch.device("cpu")))
    micros, left_out = open_sample(order, settings)
    widest = max(micros, key=lambda micro: micro.batch.input_ids.numel())
    trained, gathered = count(learned.values()), gathered_bytes(model, autocast)
    costs = step_costs(model, widest, autocast, micro_batches > gpus, optimizer=settings.optimizer)
    kept = 4 * trained + costs[0].moments  # in a checkpoint
    if gpus > 1:
        costs = tuple(spread_cost(cost, gpus, gathered if settings.shard else None) for cost in costs)
    samples = min(order.total * rows * micro_batches, settings.epochs * len(records))
    tokens = samples * sum(m.batch.input_ids.numel() for m in micros) / sum(len(m.names) for m in micros)
    return PlanRow(
        name=name or run_stem(settings),
        gpus=gpus,
        trainable=trained,
        rows=rows,
        step_rows=rows * micro_batches,
        samples=samples,
        steps=order.total,
        tokens=round(tokens),
        plain=costs[0],
        checkpointed=costs[1],
        # one checkpoint more than is kept while it is written
        disk=kept * (settings.keep + 1) + result * (2 if settings.keep_best else 1),
        flops=costs[settings.checkpointing].flops * tokens / widest.batch.input_ids.numel(),
        left_out=left_out,
    )


def open_tokenizer(settings: Settings, model: PaliGemma) -> Processor:
    """The processor of the run; for a preset without a tokenizer with that of the embedded base, of smaller pieces."""
    source = settings.base if settings.stage is None else SYSTEMS[settings.arch].tokenizer_source(settings)
    if preset_of(source):
        return Processor(model.config, Processor.from_source("embedded").tokenizer, max_length=settings.max_length)
    return open_processor(settings, model)[0]


def open_sample(order: Order, settings: Settings) -> tuple[list[MicroBatch], tuple[str, ...]]:
    """The first micro-batches of a run, of about SAMPLE rows, and a line for each record that cannot be used.

    Raises UserError where the run would: for too many unusable records, or no others.
    """
    micros, rows, bad = [], 0, []
    for micro in chain.from_iterable(order.steps(0, settings.workers)):
        micros += [] if micro.is_empty else [micro]
        rows, bad = rows + len(micro.names), [*bad, *micro.bad]
        if len(bad) > settings.max_bad or rows + len(bad) >= SAMPLE:
            break
    if len(bad) > settings.max_bad or not micros:
        raise UserError(f"{len(bad)} of the first {rows + len(bad)} records are unusable; the last: {bad[-1]}")
    return micros, tuple(bad)


# Several GPUs


def gathered_bytes(model: PaliGemma, autocast: torch.dtype | None) -> float:
    """Bytes of the weights that FSDP2 gathers at a time: two layers, and what is outside of the layers."""
    sizes = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers_of(model)]
    outside = sum(parameter.nbytes for parameter in model.parameters()) - sum(sizes)
    halved = autocast == torch.bfloat16 and computes_in_bf16(model)
    return (2 * max(sizes) + outside) * (0.5 if halved else 1)


def spread_cost(cost: StepCost, gpus: int, gathered: float | None) -> StepCost:
    """The cost of one of `gpus` GPUs. gathered: see `gathered_bytes`, under `--shard`; None without it."""
    if gathered is None:  # DDP exchanges copies of the gradients
        return replace(cost, gradients=2 * cost.gradients)
    parts = {name: getattr(cost, name) / gpus for name in ("gradients", "moments", "update")}
    return replace(cost, weights=cost.weights / gpus + gathered, **parts)


# A step, traced


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
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    learned, tensors, by_muon = trainable(model), [*model.parameters(), *model.buffers()], optimizer == "muon"
    moments = sum(p.nbytes * (1 if by_muon and is_inner_matrix(name, p) else 2) for name, p in learned.items())
    weights = sum(tensor.nbytes for tensor in tensors)
    gradients = sum(parameter.nbytes for parameter in learned.values())
    # RAdam has no fused kernel: on a GPU it updates all parameters at once, with a tensor of the size of each
    update = gradients if optimizer == "radam" else 0
    for checkpointing in (False, True):
        counter = _Counter()
        with fake, counter, without_values():
            for tensor in tensors:
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


def _shapes_of(value, fake: FakeTensorMode, counter: "_Counter"):
    """A micro-batch, or a part of it, without its pictures' values; those of its integers are known to the counter."""
    if is_dataclass(value):
        return replace(value, **{f.name: _shapes_of(getattr(value, f.name), fake, counter) for f in fields(value)})
    if not isinstance(value, torch.Tensor):
        return value
    shape = fake.from_tensor(value)
    if not value.is_floating_point():
        counter.values[shape] = value
    return shape


# Beside PyTorch's own registry, what the CPU's operators compute. An attention map of queries (B, N, S, D) × keys takes
# two products forwards, and backwards four and that of the map once more.
FLOPS = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, *rest: 4 * query.numel() * key.shape[2],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda gradient, query, key, *rest: 10 * query.numel() * key.shape[2]
    ),
    torch.ops.mkldnn._linear_pointwise: lambda x, weight, *rest: 2 * x.numel() * weight.shape[0],
}


class _Counter(TorchDispatchMode):
    """Counts the bytes of living storages, and FLOPs, of operators on tensors without memory.

    `values` has the values of integer tensors and of what follows from them alone: a model reads them, for example to
    count image slots.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = self.flops = 0
        self.values, self.known = WeakTensorKeyDictionary(), WeakIdKeyDictionary()

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage not in self.known:
            size = self.known[storage] = storage.nbytes()
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self.live -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, operator = kwargs or {}, func.overloadpacket
        if func is torch.ops.prim.device.default:  # two thirds of the calls
            return args[0].fake_device
        inputs = _tensors((args, kwargs))
        if func is aten._local_scalar_dense.default:
            with _disable_current_modes():
                return self.values[inputs[0]].item()
        out = func(*args, **kwargs)
        if operator in FLOPS:
            self.flops += FLOPS[operator](*args)
        elif operator in flop_registry:
            self.flops += flop_registry[operator](*args, **kwargs, out_val=out)
        outputs = _tensors(out)
        for tensor in outputs:
            self._add(tensor.untyped_storage())
        follows = all(tensor in self.values for tensor in inputs)
        if follows and (inputs or not any(map(torch.is_floating_point, outputs))):
            args, kwargs = tree_map_only(torch.Tensor, self.values.__getitem__, (args, kwargs))
            with _disable_current_modes():
                self.values.update(zip(outputs, _tensors(func(*args, **kwargs)), strict=True))
        return out


def _tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor)]


# The table


def spell(number: float) -> str:
    """Two digits, or up to one behind the point."""
    return f"{number:.1f}" if number >= 1 else f"{number:.2g}"


def gib(size: float, capacity: float = float("inf")) -> str:
    """Bytes in GiB; above `capacity` bytes with a mark."""
    return spell(size / 2**30) + (f" (> {capacity / 1e9:.0f} GB)" if size > capacity else "")


def plan_table(rows: Sequence[PlanRow], gpu: str = "H100") -> str:
    """The runs as a Markdown table; below it what the numbers mean, and the records that are left out."""
    peak, capacity = GPUS[gpu]
    head = "run, trained, rows a step, samples, steps, tokens, weights, gradients, moments, activations, GPU memory"
    cells = []
    for row in rows:
        plain, checkpointed = row.plain, row.checkpointed
        counts = (row.trainable, row.step_rows, row.samples, row.steps, row.tokens)
        sizes = [gib(plain.weights), gib(plain.gradients), gib(plain.moments)]
        sizes.append(f"{gib(plain.activations)} / {gib(checkpointed.activations)}")
        sizes.append(f"{gib(plain.memory, capacity * 1e9)} / {gib(checkpointed.memory, capacity * 1e9)}")
        hours = " – ".join(spell(row.hours(gpu, share)) for share in SHARES)
        cells.append((row.name, *(f"{n:,}" for n in counts), *sizes, gib(row.disk), f"{row.flops:.2e}", hours))
    gpus, batches = (dict.fromkeys(str(getattr(row, name)) for row in rows) for name in ("gpus", "rows"))
    about = (
        f"Memory and disk in GiB. Memory: of one GPU, for micro-batches of {', '.join(batches)} rows, without / with "
        f"`--checkpointing`; CUDA takes about 1 GiB more. Hours: at {SHARES[0]:.0%} to {SHARES[1]:.0%} of the "
        f"{peak / 1e12:.0f} TFLOP/s (bf16) of {' or '.join(gpus)} × {gpu}, without evaluation. Estimated from shapes; "
        "nothing was trained."
    )
    left_out = dict.fromkeys(f"left out: {line}" for row in rows for line in row.left_out)
    return "\n".join([*markdown_table([*head.split(", "), "disk", "FLOPs", "hours"], cells), "", about, *left_out])
