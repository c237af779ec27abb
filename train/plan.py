"""What a run takes, before anything is trained: `python -m train.finetune --plan`.

In: the settings of a run. Out: a `PlanRow`: sizes, the memory of one GPU, disk, and hours by a
GPU's published peak. A sample of the data is opened as training opens it; of the weights headers
alone are read, and no GPU is needed.

A step is traced: it runs on tensors that have a shape and no memory, and every storage is counted
while it is alive. As on a GPU, scans run in parallel, and weights in few bits are unpacked. Sizes
are printed in GB, 10⁹ bytes, those of a GPU with CUDA's own; CUDA also copies keys and values for
all heads where attention has a mask.
"""

import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor
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
from train.data.sources import read_split
from train.distributed import World, layers_of, reads_bf16
from train.model import open_model, open_processor, supervised_loss, weights_dtype
from train.optim import is_inner_matrix, parameter_count, trainable
from train.settings import GPUS, Settings, step_layout

aten = torch.ops.aten
SHARES = (0.5, 0.3)  # of the peak, which a training step may reach
SAMPLE = 128  # rows that are opened
CUDA = 1e9  # bytes of its own, about
CARDS = {16: "T4", 24: "RTX4090", 48: "L40S", 80: "A100"}  # GB of memory, and a GPU that has it
HEAD = "run|trained|rows a step|samples|steps|tokens|memory, GB|disk, GB|FLOPs".split("|")
ALONE = World(0, 1, torch.device("cpu"))


class StepCost(NamedTuple):
    """Bytes at the peak of a step, and the FLOPs of one micro-batch's matrix products."""

    weights: float
    gradients: float  # also their copies, where GPUs exchange them
    moments: float  # both of Adam or the one of Muon, in the parameters' dtype
    activations: float  # whatever else is alive at the peak
    flops: float

    @property
    def memory(self) -> float:
        return self.weights + self.gradients + self.moments + self.activations


class PlanRow(NamedTuple):
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
        cost = self.checkpointed if checkpointing else self.plain
        return (cost.memory + CUDA) / 1e9

    def hours(self, gpu: str) -> str:
        peak = GPUS[gpu][0] * self.gpus
        return " – ".join(f"{self.flops / (share * peak) / 3600:,.2f}" for share in SHARES)


def plan(settings: Settings, name: str | None = None, gpus: int = 1) -> PlanRow:
    """What the run of `settings` on `gpus` GPUs takes. `device` decides dtypes; "auto" is a GPU
    here. Raises UserError for all that the run would refuse."""
    # 1. the model, without its values, and some data
    rows, micro_batches = step_layout(settings, gpus)
    records = read_split(settings)
    device = torch.device("cuda" if settings.device == "auto" else settings.device)
    of_weights = weights_dtype(settings, device)
    dtype = next(name for name, kind in DTYPES.items() if kind == of_weights)
    model, _ = open_model(replace(settings, dtype=dtype), torch.device("meta"))
    order = Order(records, processor_of(settings, model), settings, replace(ALONE, size=gpus))
    micros = open_sample(order, settings)
    widest = max(micros, key=lambda micro: micro.batch.input_ids.numel())

    # 2. a step
    autocast = autocast_dtype(settings.autocast, device)
    learned = trainable(model)
    trained = parameter_count(learned.values())
    written = model.state_dict() if settings.writes_model else learned
    result = bytes_of(written.values())
    costs = step_costs(model, widest, autocast, micro_batches > gpus, settings.optimizer)
    # one checkpoint more than is kept while it is written
    disk = (4 * trained + costs[0].moments) * (settings.keep + 1) + result
    if settings.keep_best:
        disk += result
    if gpus > 1:
        costs = [spread_cost(cost, gpus, model, settings.shard, autocast) for cost in costs]
    plain, checkpointed = costs

    # 3. all steps
    step_rows = rows * micro_batches
    epochs, rest = divmod(order.total, order.steps_per_epoch)
    samples = epochs * len(records) + rest * step_rows
    of_sample = sum(micro.batch.input_ids.numel() for micro in micros)
    tokens = samples * of_sample / sum(len(micro.names) for micro in micros)
    of_step = checkpointed if settings.checkpointing else plain
    return PlanRow(
        name=name or settings.stem,
        gpus=gpus,
        trained=trained,
        rows=rows,
        step_rows=step_rows,
        samples=samples,
        steps=order.total,
        tokens=round(tokens),
        plain=plain,
        checkpointed=checkpointed,
        disk=disk,
        flops=of_step.flops * tokens / widest.batch.input_ids.numel(),
    )


def processor_of(settings: Settings, model: PaliGemma) -> Processor:
    """The processor of the run; for a preset without a tokenizer with that of the embedded base, of
    smaller pieces."""
    if preset_of(settings.tokenizer_source()):
        tokenizer = Processor.from_source("embedded").tokenizer
        return processor_for(model.config, tokenizer, max_length=settings.max_length)
    return open_processor(settings, model)[0]


def open_sample(order: Order, settings: Settings) -> list[MicroBatch]:
    """The first micro-batches of a run, of about SAMPLE rows. Raises UserError for too many
    unusable records."""
    micros, bad = [], []
    rows = 0
    for micro in chain.from_iterable(order.steps(0, settings.workers)):
        if micro.names:
            micros.append(micro)
        rows += len(micro.names)
        bad += micro.bad
        if len(bad) > order.most_bad or rows + len(bad) >= SAMPLE:
            break
    if len(bad) > order.most_bad or not micros:
        raise UserError(
            f"{len(bad)} of the first {rows + len(bad)} records are unusable; the last: {bad[-1]}"
        )
    return micros


def spread_cost(
    cost: StepCost,
    gpus: int,
    model: PaliGemma,
    shard: bool,
    autocast: torch.dtype | None,
) -> StepCost:
    """The cost of one of `gpus` GPUs: DDP exchanges copies of the gradients, FSDP2 gathers two
    layers at a time."""
    if not shard:
        return cost._replace(gradients=2 * cost.gradients)
    sizes = [bytes_of(layer.parameters()) for layer in layers_of(model)]
    outside = bytes_of(model.parameters()) - sum(sizes)
    gathered = 2 * max(sizes) + outside
    if reads_bf16(model, autocast):
        gathered /= 2
    return cost._replace(
        weights=cost.weights / gpus + gathered,
        gradients=cost.gradients / gpus,
        moments=cost.moments / gpus,
    )


def bytes_of(tensors: Iterable[Tensor]) -> int:
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
    # 1. tensors without memory; a model reads the values of integers, as to count image slots
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype))
    pixels = fake.from_tensor(micro.batch.pixel_values)
    shapes = replace(micro, batch=replace(micro.batch, pixel_values=pixels))

    # 2. what is alive all the time
    learned = trainable(model)
    tensors = [*model.parameters(), *model.buffers()]
    gradients = bytes_of(learned.values())
    moments = 2 * gradients
    if optimizer == "muon":
        moments -= bytes_of(p for name, p in learned.items() if is_inner_matrix(name, p))

    # 3. a step of each kind
    costs = []
    model.train()
    for checkpointing in (False, True):
        model.set_checkpointing(checkpointing)
        with _Counter(tensors) as counter:
            for parameter in learned.values():
                parameter.grad = parameter.detach().clone() if accumulates else None
            # its copies of weights end with it
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                value = supervised_loss(model, shapes)
            (value / micro.tokens).backward()
            del value
        activations = counter.peak - gradients
        costs.append(StepCost(bytes_of(tensors), gradients, moments, activations, counter.flops))
    return costs


class _Counter(TorchDispatchMode):
    """Counts FLOPs, and the bytes of storages while they are alive, but not those of `tensors`."""

    def __init__(self, tensors: Sequence[Tensor]):
        super().__init__()
        self.live = self.peak = self.flops = 0
        self.known = WeakIdKeyDictionary({tensor.untyped_storage(): True for tensor in tensors})

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if count_flops := FLOPS.get(func.overloadpacket):
            self.flops += count_flops(*args, **kwargs, out_val=out)
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._watch(tensor.untyped_storage())
        return out

    def _watch(self, storage: torch.UntypedStorage) -> None:
        if storage not in self.known:
            self.known[storage] = True
            self._add(storage.nbytes())
            weakref.finalize(storage, self._add, -storage.nbytes())

    def _add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


# The tables


def report(settings: Settings, gpu: str | None, gpus: int) -> str:
    """What `--plan` prints: sizes, how many rows of a micro-batch fit on which GPU, and in the last
    line with which flags the run fits on the smallest; of the bundled toy model CPU seconds."""
    if gpu is None and settings.base == "embedded" and type(settings) is Settings:
        settings = replace(settings, device="cpu")
        table = plan_table([plan(settings)], None)
        seconds = f"about {cpu_seconds(settings):,.0f} CPU seconds on {processor_name()}"
        return f"{table}\n\n{seconds}, and up to a third for evaluations"
    # 1. as it is, and other ways
    row = plan(settings, gpus=gpus)
    cards = {GPUS[gpu][1]: gpu} if gpu else CARDS
    needed = row.memory(settings.checkpointing)
    ways = {"": {row.rows: needed}}
    if gpu is None or needed > GPUS[gpu][1]:
        ways |= ways_of(settings, row)

    # 2. where each fits
    lines = []
    fits = {}
    for flags, memory in ways.items():
        line = [flags or "as it is"]
        for size in cards:
            rows = max((rows for rows in memory if memory[rows] <= size), default=0)
            line.append(f"{rows} ({memory[rows]:.1f} GB)" if rows else "no")
            if rows and size not in fits:
                more = f" --batch-size {rows} --step-batch {row.step_rows}"
                words = flags if rows == row.rows else (flags + more).strip()
                how = f"with {words}" if words else "as it is"
                fits[size] = f"fits on {size} GB {how} ({memory[rows]:.1f} GB of {size})"
        lines.append(line)
    lines.append(["hours", *map(row.hours, cards.values())])
    head = ["fits, with rows of a micro-batch"]
    head += [f"{size} GB ({name})" for size, name in cards.items()]
    table = "\n".join(markdown_table(head, lines))

    # 3. the smallest that it fits on
    if fits:
        verdict = fits[min(fits)]
    else:
        least = min(min(memory.values()) for memory in ways.values())
        verdict = f"does not fit on {max(cards)} GB: it takes {least:.1f} GB or more"
        verdict += "; spread it over GPUs with --shard"
    return "\n\n".join([plan_table([row], gpu), table, verdict])


def ways_of(settings: Settings, row: PlanRow) -> dict[str, dict[int, float]]:
    """Other ways to take the steps of `row`: by flags, the GB of one GPU by rows of a micro-batch.

    One row and all rows of a step are traced. A peak is convex in rows, so none between is above
    the line of both.
    """
    share = row.step_rows // row.gpus
    kinds = {"": settings.quantize}
    if not (settings.quantize or settings.writes_model or settings.shard):
        kinds["--quantize nf4 "] = "nf4"
    ways = {}
    for note, quantize in kinds.items():
        chosen = replace(settings, quantize=quantize, step_batch=row.step_rows)
        few = plan(replace(chosen, batch_size=1), gpus=row.gpus)
        many = plan(replace(chosen, batch_size=share), gpus=row.gpus)
        for checkpointing, flag in ((False, "--no-checkpointing"), (True, "--checkpointing")):
            least = few.memory(checkpointing)
            slope = (many.memory(checkpointing) - least) / max(1, share - 1)
            flags = note if checkpointing == settings.checkpointing else note + flag
            rows = [n for n in range(1, share + 1) if share % n == 0]
            ways[flags.strip()] = {n: least + slope * (n - 1) for n in rows}
    return ways


def cpu_seconds(settings: Settings) -> float:
    """CPU seconds of a run of the bundled toy model, from four steps here."""
    # 1. its steps
    settings = replace(settings, device="cpu")
    model, optimizer = open_model(settings, ALONE.device)
    records = read_split(settings)
    order = Order(records, processor_of(settings, model), settings, ALONE)
    if settings.align and is_taught(records):
        model.vision_tower.requires_grad_(False)
    marks = []
    for micro in chain.from_iterable(islice(order.steps(0), 5)):
        (supervised_loss(model, micro) / max(1, micro.tokens)).backward()
        optimizer.step()
        marks.append(time.process_time())
    of_micro = (marks[-1] - marks[0]) / max(1, len(marks) - 1)  # the first warms up
    seconds = order.total * step_layout(settings, 1)[1] * of_micro

    # 2. those of its alignment, in a process that shows no progress
    if settings.align:
        quiet = replace(ALONE, rank=1)
        align(model, records, replace(settings, align=4), quiet, None, Progress())
        seconds += settings.align * (time.process_time() - marks[-1]) / 4
    return seconds


def plan_table(rows: Sequence[PlanRow], gpu: str | None) -> str:
    """The runs as a Markdown table, with hours on `gpu`; below it what the numbers mean."""
    # 1. a line for each run
    head = [*HEAD]
    if gpu:
        head.append("hours")
    lines = []
    for row in rows:
        counts = (row.trained, row.step_rows, row.samples, row.steps, row.tokens)
        sizes = []
        for checkpointing in (False, True):
            size = row.memory(checkpointing)
            mark = "!" if gpu and size > GPUS[gpu][1] else ""
            sizes.append(f"{size:,.1f}{mark}")
        line = [row.name, *(f"{count:,}" for count in counts), " / ".join(sizes)]
        line += [f"{row.disk / 1e9:,.2f}", f"{row.flops:.2e}"]
        if gpu:
            line.append(row.hours(gpu))
        lines.append(line)

    # 2. what they mean
    gpus = " or ".join(dict.fromkeys(str(row.gpus) for row in rows))
    batches = " or ".join(dict.fromkeys(str(row.rows) for row in rows))
    about = f"Memory: of one GPU, for micro-batches of {batches} rows, without / with "
    about += f"`--checkpointing`, {CUDA / 1e9:.0f} GB of CUDA's own included"
    if gpu:
        peak, size = GPUS[gpu]
        about += f"; ! is more than {size} GB. Hours: at {SHARES[0]:.0%} to {SHARES[1]:.0%} of "
        kind = "bf16"
        if gpu == "T4":
            kind = "fp16: it has no bf16, so give `--dtype fp16 --autocast fp16`"
        about += f"{peak / 1e12:.0f} TFLOP/s ({kind}) of {gpus} × {gpu}, without evaluation"
    return "\n".join([*markdown_table(head, lines), "", f"{about}."])
