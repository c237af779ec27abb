"""What a run would take, before anything is trained: `python -m train.finetune --plan`.

In: the settings of one run or of several. Out: a `PlanRow` for each: what is trained, samples, steps and tokens, the
memory of one GPU, disk, and the hours of a GPU by its published peak. Headers of the weights are compared with their
config.json and a sample of the data is opened as training opens it, but no weight is read, and no GPU is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch

from eval.records import Record
from eval.report import markdown_table
from model.common import UserError, shown
from model.device import autocast_dtype, dtype_name
from model.paligemma import PaliGemma
from model.processor import Processor
from model.source import preset_of
from train.align import check_align
from train.cost import StepCost, step_costs
from train.data.batches import MicroBatch, Order, without_rows
from train.data.sources import read_records
from train.distributed import World, computes_in_bf16, layers_of
from train.optim import count, trainable
from train.recipes import GPUS
from train.settings import Settings, run_stem, step_layout
from train.show_batch import batch_lines
from train.supervised import make_order
from train.systems.open import SYSTEMS, open_model, open_processor, weights_dtype

SHARES = (0.3, 0.5)  # of the peak, which a training step may reach
SAMPLE, SHOWN = 128, 4  # rows that are opened, and printed


@dataclass(frozen=True)
class PlanRow:
    """One run. samples, steps, tokens and flops are those of the whole run on all GPUs, without evaluation.

    tokens: with padding, and those of pictures. plain and checkpointed: a step on one GPU, without and with
    `--checkpointing`. batch: the first rows as the model reads them. left_out: a line for each record that was opened
    and cannot be used.
    """

    name: str
    gpus: int
    parameters: int
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
    batch: tuple[str, ...]
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
    """What the run of `settings` on `gpus` GPUs would take. Raises UserError for all that the run would refuse.

    `device` decides dtypes, as in the run; "auto" is a GPU here. start: a model on the meta device, in the run's dtype,
    and its processor, where there are no files of it yet. known: see `read_records`.
    """
    rows, micro_batches = step_layout(settings, gpus)
    records, accumulates = read_records(settings, known=known), micro_batches > gpus
    device = torch.device("cuda" if settings.device == "auto" else settings.device)
    dtype = dtype_name(weights_dtype(settings, device))
    model, _ = open_model(replace(settings, dtype=dtype), torch.device("meta"), start and start[0])
    if settings.align:
        check_align(model, records)
    learned, autocast = trainable(model), autocast_dtype(settings.autocast, device)
    result = sum(tensor.nbytes for tensor in (model.state_dict() if settings.writes_model else learned).values())
    processor = start[1] if start else open_tokenizer(settings, model)
    order = make_order(records, processor, settings, World(0, gpus, torch.device("cpu")))
    sample = open_sample(order, settings)
    parameters, trained = count(model.parameters()), count(learned.values())
    gathered = gathered_bytes(model, autocast)
    costs = step_costs(model, sample.widest, autocast, accumulates, optimizer=settings.optimizer)
    kept = 4 * trained + costs[0].moments  # in a checkpoint
    if gpus > 1:
        costs = tuple(spread_cost(cost, gpus, gathered if settings.shard else None) for cost in costs)
    samples = min(order.total * rows * micro_batches, settings.epochs * len(records))
    tokens = samples * sample.tokens / sample.rows
    return PlanRow(
        name=name or run_stem(settings),
        gpus=gpus,
        parameters=parameters,
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
        flops=costs[settings.checkpointing].flops * tokens / sample.widest.batch.input_ids.numel(),
        batch=tuple(batch_lines(sample.first, processor)[: 2 * SHOWN]),
        left_out=sample.left_out,
    )


def open_tokenizer(settings: Settings, model: PaliGemma) -> Processor:
    """The processor of the run; for a preset without a tokenizer with that of the embedded base, of smaller pieces."""
    source = settings.base if settings.stage is None else SYSTEMS[settings.arch].tokenizer_source(settings)
    if preset_of(source):
        return Processor(model.config, Processor.from_source("embedded").tokenizer, max_length=settings.max_length)
    return open_processor(settings, model)[0]


@dataclass
class Sample:
    """The first micro-batches of a run. tokens: with padding. widest: that with the most."""

    first: MicroBatch
    widest: MicroBatch
    rows: int
    tokens: int
    left_out: tuple[str, ...]  # a line for each record that cannot be used


def open_sample(order: Order, settings: Settings) -> Sample:
    """Open about SAMPLE rows of a run. Raises UserError where a run would: for too many unusable ones, or no others."""
    first = widest = without_rows()
    rows, tokens, bad = 0, 0, []
    for micro in chain.from_iterable(order.steps(0, settings.workers)):
        ids = micro.batch.input_ids
        first = micro if first.is_empty else first
        widest = micro if ids.numel() > widest.batch.input_ids.numel() else widest
        rows, tokens, bad = rows + len(ids), tokens + ids.numel(), [*bad, *micro.bad]
        if len(bad) > settings.max_bad or rows + len(bad) >= SAMPLE:
            break
    if len(bad) > settings.max_bad or widest.is_empty:
        raise UserError(f"{len(bad)} of the first {rows + len(bad)} records are unusable; the last: {bad[-1]}")
    return Sample(first, widest, rows, tokens, tuple(bad))


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


def spell(number: float) -> str:
    """Two digits, or up to one behind the point."""
    return f"{number:.1f}" if number >= 1 else f"{number:.2g}"


def plan_table(rows: Sequence[PlanRow], gpu: str = "H100") -> str:
    """The runs as a Markdown table; below it what the numbers mean, and rows of the first run's first batch."""
    peak, capacity = GPUS[gpu]

    def gib(size: float) -> str:
        return spell(size / 2**30)

    def total(cost: StepCost) -> str:
        return gib(cost.memory) + (f" (> {capacity} GB)" if cost.memory > capacity * 1e9 else "")

    lines = [
        (
            row.name,
            f"{row.trainable:,}",
            f"{row.step_rows}",
            f"{row.samples:,}",
            f"{row.steps:,}",
            f"{row.tokens:,}",
            gib(row.plain.weights),
            gib(row.plain.gradients),
            gib(row.plain.moments),
            f"{gib(row.plain.activations)} / {gib(row.checkpointed.activations)}",
            f"{total(row.plain)} / {total(row.checkpointed)}",
            gib(row.disk),
            f"{row.flops:.2e}",
            " – ".join(spell(row.hours(gpu, share)) for share in sorted(SHARES, reverse=True)),
        )
        for row in rows
    ]
    head = (
        *("run", "trained", "rows a step", "samples", "steps", "tokens"),
        *("weights, GiB", "gradients", "moments", "activations", "GPU memory", "disk, GiB", "FLOPs", "hours"),
    )
    gpus = " or ".join(dict.fromkeys(str(row.gpus) for row in rows))
    about = (
        "Memory: of one GPU, for micro-batches of "
        f"{', '.join(dict.fromkeys(str(row.rows) for row in rows))} rows, without / with `--checkpointing`; CUDA takes "
        f"about 1 GiB more. Hours: at {SHARES[1]:.0%} to {SHARES[0]:.0%} of the {peak / 1e12:.0f} TFLOP/s (bf16) of "
        f"{gpus} × {gpu}, without evaluation. Estimated from shapes; nothing was trained."
    )
    left_out = dict.fromkeys(f"left out: {line}" for row in rows for line in row.left_out)
    batch = [shown(line, 10_000) for line in rows[0].batch]
    return "\n".join([*markdown_table(head, lines), "", about, *left_out, "", "The first rows of a batch:", *batch])
