"""What a run takes, before anything is trained: `python -m train.finetune --plan`.

In: the settings of a run. Out: a `PlanRow`: sizes, the memory of one GPU, disk, and hours by a
GPU's published peak.
A sample of the data is opened as training opens it; of the weights headers alone are read, and no
GPU is needed.

A step is traced: it runs on tensors that have a shape and no memory, and every storage is counted
while it is alive. Scans, and weights in few bits are unpacked, as on a GPU. Sizes are printed
in GB, 10⁹ bytes, those of a GPU with CUDA's own; CUDA also copies keys and values for all heads
where attention has a mask.
"""

import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from eval.report import markdown_table
from model.common import UserError
from model.device import DTYPES, autocast_dtype, processor_name
from model.paligemma import PaliGemma
from model.processor import Processor, processor_for
from model.source import preset_of
from train.align import align, is_taught
from train.checkpoint import Progress
from train.data.batches import MicroBatch, Order
from train.data.sources import read_records
from train.distributed import World, layers_of, reads_bf16
from train.model import open_model, open_processor, supervised_loss, weights_dtype
from train.optim import count, is_inner_matrix, trainable
from train.settings import GPUS, Settings, step_layout

aten = torch.ops.aten
SHARES = (0.5, 0.3)  # of the peak, which a training step may reach
SAMPLE = 128  # rows that are opened
CUDA = 1e9  # bytes of its own, about
CARDS = {16: "T4", 24: "RTX4090", 48: "L40S", 80: "A100"}  # GB of memory, and a GPU that has it


@dataclass(frozen=True)
class StepCost:
    """Bytes at the peak of a step, and the FLOPs of one micro-batch's matrix products."""

    weights: float
    gradients: float  # also their copies, where GPUs exchange them
    moments: float  # both of Adam or the one of Muon, in the parameters' dtype
    activations: float  # whatever else is alive at the peak
    flops: float

    @property
    def memory(self) -> float:
        return self.weights + self.gradients + self.moments + self.activations


@dataclass(frozen=True)
class PlanRow:
    """One run. samples, steps, tokens and flops are those of the whole run on all GPUs, without
    evaluation."""

    name: str
    gpus: int
    trained: int  # parameters
    rows: int  # of a micro-batch
    step_rows: int
    samples: int
    steps: int
    tokens: int  # with padding, and those of pictures
    plain: StepCost  # of a step on one GPU
    checkpointed: StepCost  # the same with `--checkpointing`
    disk: int  # bytes
    flops: float

    def memory(self, checkpointing: bool) -> float:
        """GB of one GPU, with CUDA's own."""
        return ((self.checkpointed if checkpointing else self.plain).memory + CUDA) / 1e9

    def hours(self, gpu: str) -> str:
        return " – ".join(
            f"{self.flops / (share * GPUS[gpu][0] * self.gpus) / 3600:,.2f}" for share in SHARES
        )


def plan(settings: Settings, name: str | None = None, gpus: int = 1) -> PlanRow:
    """What the run of `settings` on `gpus` GPUs takes. `device` decides dtypes; "auto" is a GPU
    here. Raises UserError for all that the run would refuse."""
    rows, micro_batches = step_layout(settings, gpus)
    records = read_records(settings)
    device = torch.device("cuda" if settings.device == "auto" else settings.device)
    dtype = next(name for name, kind in DTYPES.items() if kind == weights_dtype(settings, device))
    model, _ = open_model(replace(settings, dtype=dtype), torch.device("meta"))
    learned, autocast = trainable(model), autocast_dtype(settings.autocast, device)
    result = bytes_of((model.state_dict() if settings.writes_model else learned).values())
    order = Order(
        records, processor_of(settings, model), settings, World(0, gpus, torch.device("cpu"))
    )
    micros = open_sample(order, settings)
    widest = max(micros, key=lambda micro: micro.batch.input_ids.numel())
    trained = count(learned.values())
    costs = step_costs(model, widest, autocast, micro_batches > gpus, settings.optimizer)
    # one checkpoint more than is kept while it is written
    disk = (4 * trained + costs[0].moments) * (settings.keep + 1) + result * (
        2 if settings.keep_best else 1
    )
    if gpus > 1:
        costs = [spread_cost(cost, gpus, model, settings.shard, autocast) for cost in costs]
    epochs, rest = divmod(order.total, order.steps_per_epoch)
    samples = epochs * len(records) + rest * rows * micro_batches
    tokens = (
        samples * sum(m.batch.input_ids.numel() for m in micros) / sum(len(m.names) for m in micros)
    )
    flops = costs[settings.checkpointing].flops * tokens / widest.batch.input_ids.numel()
    sizes = (trained, rows, rows * micro_batches, samples, order.total, round(tokens))
    return PlanRow(name or settings.stem, gpus, *sizes, *costs, disk, flops)


def processor_of(settings: Settings, model: PaliGemma) -> Processor:
    """The processor of the run; for a preset without a tokenizer with that of the embedded base, of
    smaller pieces."""
    if preset_of(settings.tokenizer_source()):
        return processor_for(
            model.config,
            Processor.from_source("embedded").tokenizer,
            max_length=settings.max_length,
        )
    return open_processor(settings, model)[0]


def open_sample(order: Order, settings: Settings) -> list[MicroBatch]:
    """The first micro-batches of a run, of about SAMPLE rows. Raises UserError for too many
    unusable records."""
    micros, rows, bad = [], 0, []
    for micro in chain.from_iterable(order.steps(0, settings.workers)):
        micros += [micro] if micro.names else []
        rows, bad = rows + len(micro.names), [*bad, *micro.bad]
        if len(bad) > order.most_bad or rows + len(bad) >= SAMPLE:
            break
    if len(bad) > order.most_bad or not micros:
        raise UserError(
            f"{len(bad)} of the first {rows + len(bad)} records are unusable; the last: {bad[-1]}"
        )
    return micros


def spread_cost(
    cost: StepCost, gpus: int, model: PaliGemma, shard: bool, autocast: torch.dtype | None
) -> StepCost:
    """The cost of one of `gpus` GPUs: DDP exchanges copies of the gradients, FSDP2 gathers two
    layers at a time."""
    if not shard:
        return replace(cost, gradients=2 * cost.gradients)
    sizes = [bytes_of(layer.parameters()) for layer in layers_of(model)]
    outside = bytes_of(model.parameters()) - sum(sizes)
    weights = cost.weights / gpus + (2 * max(sizes) + outside) * (
        0.5 if reads_bf16(model, autocast) else 1
    )
    return replace(
        cost, weights=weights, gradients=cost.gradients / gpus, moments=cost.moments / gpus
    )


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


# A step, traced

# Beside PyTorch's own registry, what the CPU's operators compute. An attention map of queries (B,
# N, S, D) × keys takes two products forwards, and backwards four and that of the map once more.
FLOPS = flop_registry | {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, *_, **__: (
        4 * query.numel() * key.shape[2]
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, q, k, *__, **___: (
        10 * q.numel() * k.shape[2]
    ),
    torch.ops.mkldnn._linear_pointwise: lambda x, weight, *_, **__: 2 * x.numel() * weight.shape[0],
}


def step_costs(
    model: torch.nn.Module,
    micro: MicroBatch,
    autocast: torch.dtype | None,
    accumulates: bool,
    optimizer: str,
) -> list[StepCost]:
    """What a step of `model`, on the meta device, costs, without and with checkpointing; afterwards
    it is of no use. accumulates: an earlier micro-batch has left its gradients."""
    fake, costs = FakeTensorMode(allow_non_fake_inputs=True), []
    with fake:
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    # A model reads the values of integers, for example to count image slots: these stay.
    shapes = replace(
        micro, batch=replace(micro.batch, pixel_values=fake.from_tensor(micro.batch.pixel_values))
    )
    learned, tensors, by_muon = (
        trainable(model),
        [*model.parameters(), *model.buffers()],
        optimizer == "muon",
    )
    weights, gradients = bytes_of(tensors), bytes_of(learned.values())
    moments = sum(
        p.nbytes * (1 if by_muon and is_inner_matrix(name, p) else 2) for name, p in learned.items()
    )
    model.train()
    for checkpointing in (False, True):
        model.set_checkpointing(checkpointing)
        with _Counter(tensors) as counter:
            for parameter in learned.values():
                parameter.grad = parameter.detach().clone() if accumulates else None
            with torch.autocast(
                "cpu", autocast, enabled=autocast is not None
            ):  # its copies of weights end here
                value = supervised_loss(model, shapes)
            (value / micro.tokens).backward()
            del value
        costs.append(StepCost(weights, gradients, moments, counter.peak - gradients, counter.flops))
    return costs


class _Counter(TorchDispatchMode):
    """Counts FLOPs, and the bytes of storages while they are alive, but not those of `tensors`."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        super().__init__()
        self.live = self.peak = self.flops = 0
        self.known = WeakIdKeyDictionary({tensor.untyped_storage(): True for tensor in tensors})

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if count_flops := FLOPS.get(func.overloadpacket):
            self.flops += count_flops(*args, **(kwargs or {}), out_val=out)
        for tensor in tree_iter(out):
            if (
                isinstance(tensor, torch.Tensor)
                and (storage := tensor.untyped_storage()) not in self.known
            ):
                self.known[storage] = True
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return out

    def _add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


# The tables


def report(settings: Settings, gpu: str | None, gpus: int) -> str:
    """What `--plan` prints: sizes, how many rows of a micro-batch fit on which GPU, and in the last
    line with which flags the run fits on the smallest; of the bundled toy model CPU seconds."""
    if gpu is None and settings.base == "embedded" and type(settings) is Settings:
        table, seconds = (
            plan_table([plan(replace(settings, device="cpu"))], None),
            cpu_seconds(settings),
        )
        return f"{table}\n\nabout {seconds:,.0f} CPU seconds on {processor_name()}, and up to a third for evaluations"
    row, cards, lines, fits = (
        plan(settings, gpus=gpus),
        {GPUS[gpu][1]: gpu} if gpu else CARDS,
        [],
        {},
    )
    ways = {"": {row.rows: row.memory(settings.checkpointing)}}
    if gpu is None or ways[""][row.rows] > GPUS[gpu][1]:
        ways |= ways_of(settings, row)
    for flags, memory in ways.items():
        lines.append([flags or "as it is"])
        for size in cards:
            rows = max((rows for rows in memory if memory[rows] <= size), default=0)
            lines[-1].append(f"{rows} ({memory[rows]:.1f} GB)" if rows else "no")
            if rows and size not in fits:
                more = [f"--batch-size {rows} --step-batch {row.step_rows}"] * (rows != row.rows)
                how = (
                    f"with {' '.join([flags] * bool(flags) + more)}"
                    if flags or more
                    else "as it is"
                )
                fits[size] = f"fits on {size} GB {how} ({memory[rows]:.1f} GB of {size})"
    least = min(needed for memory in ways.values() for needed in memory.values())
    no = f"does not fit on {max(cards)} GB: it takes {least:.1f} GB or more; spread it over GPUs with --shard"
    head = (
        "fits, with rows of a micro-batch",
        *(f"{size} GB ({name})" for size, name in cards.items()),
    )
    lines.append(["hours", *map(row.hours, cards.values())])
    table = "\n".join(markdown_table(head, lines))
    return "\n\n".join([plan_table([row], gpu), table, fits[min(fits)] if fits else no])


def ways_of(settings: Settings, row: PlanRow) -> dict[str, dict[int, float]]:
    """Other ways to take the steps of `row`: by flags, the GB of one GPU by rows of a micro-batch.

    One row and all rows of a step are traced. A peak is convex in rows, so none between is above
    the line of both.
    """
    share, ways = row.step_rows // row.gpus, {}
    is_fixed = settings.quantize or settings.writes_model or settings.shard
    for quantize, note in ((settings.quantize, ""), ("nf4", "--quantize nf4 "))[
        : 1 if is_fixed else 2
    ]:
        chosen = replace(settings, quantize=quantize, step_batch=row.step_rows)
        few, many = (plan(replace(chosen, batch_size=rows), gpus=row.gpus) for rows in (1, share))
        for on, flag in ((False, "--no-checkpointing"), (True, "--checkpointing")):
            slope = (many.memory(on) - few.memory(on)) / max(1, share - 1)
            memory = {
                n: few.memory(on) + slope * (n - 1) for n in range(1, share + 1) if share % n == 0
            }
            ways[(note + flag * (on != settings.checkpointing)).strip()] = memory
    return ways


def cpu_seconds(settings: Settings) -> float:
    """CPU seconds of a run of the bundled toy model, from four steps here with random weights of
    its sizes."""
    settings, world = replace(settings, base="tiny", device="cpu"), World(0, 1, torch.device("cpu"))
    (model, optimizer), records = open_model(settings, world.device), read_records(settings)
    order, marks = Order(records, processor_of(settings, model), settings, world), []
    if settings.align and is_taught(records):
        model.vision_tower.requires_grad_(False)
    for micro in chain.from_iterable(islice(order.steps(0, 0), 5)):
        (supervised_loss(model, micro) / max(1, micro.tokens)).backward()
        optimizer.step()
        marks.append(time.process_time())
    of_step = (
        step_layout(settings, 1)[1] * (marks[-1] - marks[0]) / max(1, len(marks) - 1)
    )  # the first warms up
    if settings.align:
        silent = replace(world, rank=1)  # only the first shows its progress
        align(model, records, replace(settings, align=4), silent, None, Progress())
    return order.total * of_step + settings.align * (time.process_time() - marks[-1]) / 4


def plan_table(rows: Sequence[PlanRow], gpu: str | None) -> str:
    """The runs as a Markdown table, with hours on `gpu`; below it what the numbers mean."""
    head = [
        "run",
        "trained",
        "rows a step",
        "samples",
        "steps",
        "tokens",
        "memory, GB",
        "disk, GB",
        "FLOPs",
    ]
    cells = []
    for row in rows:
        counts = (
            f"{n:,}" for n in (row.trained, row.step_rows, row.samples, row.steps, row.tokens)
        )
        sizes = row.memory(False), row.memory(True)
        memory = " / ".join(
            f"{size:,.1f}" + "!" * bool(gpu and size > GPUS[gpu][1]) for size in sizes
        )
        cells.append([row.name, *counts, memory, f"{row.disk / 1e9:,.2f}", f"{row.flops:.2e}"])
        cells[-1] += [row.hours(gpu)] if gpu else []
    gpus, batches = (
        " or ".join(dict.fromkeys(str(getattr(row, name)) for row in rows))
        for name in ("gpus", "rows")
    )
    about = f"Memory: of one GPU, for micro-batches of {batches} rows, without / with `--checkpointing`, "
    about += f"{CUDA / 1e9:.0f} GB of CUDA's own included"
    if gpu:
        about += (
            f"; ! is more than {GPUS[gpu][1]} GB. Hours: at {SHARES[0]:.0%} to {SHARES[1]:.0%} of "
        )
        about += f"{GPUS[gpu][0] / 1e12:.0f} TFLOP/s (bf16) of {gpus} × {gpu}, without evaluation"
    return "\n".join([*markdown_table(head + ["hours"] * bool(gpu), cells), "", about + "."])
