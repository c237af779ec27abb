"""Supervised training on pictures and text: the loss of a micro-batch, cached features, and the call of the loop.

In: an opened model, its processor, and records. Out: the trained model, in place, see `train/loop.py`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from eval.records import Record
from model.common import UserError
from model.device import autocast_of
from model.differential import lambdas, map_distance
from model.paligemma import PaliGemma
from model.processor import Processor
from train.checkpoint import checkpoints, read_state
from train.data.batches import MicroBatch, Order, idle
from train.data.features import FeatureCache
from train.distributed import World
from train.loop import LoopOptions, fit
from train.settings import Settings, step_layout


def supervised_loss(model: nn.Module, micro: MicroBatch) -> torch.Tensor:
    """The sum of cross-entropies over the supervised tokens."""
    return forward(model, micro, micro.targets)


def forward(model: nn.Module, micro: MicroBatch, targets: torch.Tensor | None = None) -> torch.Tensor:
    """Logits (B, T, V) of the supervised positions, where alone the head runs; the loss with `targets`."""
    batch = micro.batch
    return model(
        batch.input_ids,
        batch.pixel_values,
        batch.token_type_ids,
        batch.attention_mask,
        positions_to_keep=micro.positions,
        image_features=micro.features,
        image_index=micro.image_index,
        targets=targets,
    )


def row_losses(model: nn.Module, micro: MicroBatch) -> torch.Tensor:
    """(B,): the cross-entropies of each row, summed over its supervised tokens."""
    logits = forward(model, micro)
    return F.cross_entropy(logits.transpose(1, 2), micro.targets, ignore_index=-100, reduction="none").sum(1)


def train_on(
    records: Sequence[Record],
    model: PaliGemma,
    optimizer: torch.optim.Optimizer,
    processor: Processor,
    settings: Settings,
    run: Path,
    world: World,
    kept: Mapping | None = None,
    check: Callable[[PaliGemma, FeatureCache | None, int, int, dict], dict] | None = None,
) -> dict:
    """Train `model` in place on `records`, see `train.loop.fit`; returns the run's progress.

    check: `Watch.check` of `train/validation.py`.
    """
    cache = open_cache(model, settings, world)
    order = make_order(records, processor, settings, world, processes_of(run, world), cache)

    def prepare(micro: MicroBatch) -> MicroBatch:
        micro = ready(micro, model, processor, world.device, cache)
        if settings.compile:
            free_sizes(micro)
        return micro

    def measure(step: int, micro: MicroBatch) -> dict:
        if step % settings.measure_every or micro.is_empty and not world.splits_rows:
            return {}
        found = distances(model, prepare(micro))
        return mean_over_rows(found, micro, world) if world.splits_rows else found

    # a part of a sharded model cannot be called alone
    is_asked = world.is_first or world.splits_rows
    measures = settings.measure_every and is_asked and not is_sharded(settings, world)
    return fit(
        model,
        optimizer,
        order,
        lambda called, micro: supervised_loss(called, prepare(micro)),
        LoopOptions.of(settings),
        run,
        world,
        measure=measure if measures else None,
        validate=partial(check, model, cache, order.total) if check else None,
        kept=kept,
    )


def make_order(
    records: Sequence[Record],
    processor: Processor,
    settings: Settings,
    world: World,
    processes: int | None = None,
    cache: FeatureCache | None = None,
) -> Order:
    """The order of a run. processes: the number that it began with. Raises UserError for steps that cannot be made."""
    rows, micro_batches = step_layout(settings, processes or world.at_once)
    rank, size, part, parts = (0, 1, world.rank, world.size) if world.splits_rows else (world.rank, world.size, 0, 1)
    if world.is_first and settings.batch_size > (wanted := settings.step_batch or settings.batch_size):
        print(f"--batch-size {settings.batch_size}: a step has {wanted} rows, see --step-batch", file=sys.stderr)
    return Order(
        records,
        processor,
        batch_size=rows,
        accumulate=world.share(micro_batches),
        epochs=settings.epochs,
        steps=settings.steps,
        seed=settings.seed,
        per_picture=settings.per_picture,
        rank=rank,
        world_size=size,
        part=part,
        parts=parts,
        cache=cache,
    )


def ready(
    micro: MicroBatch, model: PaliGemma, processor: Processor, device: torch.device, cache: FeatureCache | None = None
) -> MicroBatch:
    """The micro-batch as the model reads it, on its device. An empty one becomes a blank row: others wait for it."""
    return with_features(model, (idle(processor) if micro.is_empty else micro).to(device), cache)


def is_sharded(settings: Settings, world: World) -> bool:
    """Whether no process holds a whole model."""
    return settings.shard and world.size > 1


def processes_of(run: Path | None, world: World) -> int:
    """The number of processes that `run` began with: resumed by another number, its steps keep their micro-batches.

    Processes that split rows count as one.
    """
    found = checkpoints(run) if run is not None else []
    return read_state(found[-1])["progress"].get("processes", world.at_once) if found else world.at_once


def open_cache(model: PaliGemma, settings: Settings, world: World) -> FeatureCache | None:
    """The cache of `--cache-features`. Raises UserError where the vision tower is trained or sharded."""
    if settings.cache_features is None:
        return None
    if is_sharded(settings, world):
        raise UserError("--cache-features: with --shard no process holds a whole vision tower: leave one of them out")
    with autocast_of(settings.autocast, world.device):
        return FeatureCache.open(settings.cache_features, model)


@torch.no_grad()
def with_features(model: PaliGemma, micro: MicroBatch, cache: FeatureCache | None) -> MicroBatch:
    """The micro-batch with all its features: pictures that the cache does not have are encoded, and saved to it.

    All features are in bf16, the new ones too: a run learns the same whether the cache was empty or full.
    """
    if cache is None or not micro.keys:
        return micro
    new = cache.encode(model, micro.batch.pixel_values)
    for key, features in zip(micro.keys, new.cpu(), strict=True):
        cache.save(key, features)
    return replace(micro, features=micro.features.index_copy(0, micro.unseen, new))


def free_sizes(micro: MicroBatch) -> None:
    """Mark for torch.compile the sizes that change from batch to batch, so that it does not compile for every length.

    It treats sizes of 1 apart: a batch of a single row or picture is compiled by itself.
    """
    batch = micro.batch
    for tensor in (batch.input_ids, batch.token_type_ids, batch.attention_mask, micro.positions, micro.targets):
        torch._dynamo.maybe_mark_dynamic(tensor, (0, 1))
    for tensor in (batch.pixel_values, micro.features, micro.image_index):
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


def distances(model: PaliGemma, micro: MicroBatch) -> dict:
    """λ or μ, and the total variation distance between the two maps, by layer, on one micro-batch."""
    batch = micro.batch
    model.eval()
    distance = map_distance(
        model,
        input_ids=batch.input_ids,
        pixel_values=batch.pixel_values,
        token_type_ids=batch.token_type_ids,
        attention_mask=batch.attention_mask,
        image_features=micro.features,
        image_index=micro.image_index,
    )
    model.train()
    record = {
        "lambda": {path: value.tolist() for path, value in lambdas(model).items()},
        "map_distance": {path: value.item() for path, value in distance.items()},
    }
    return {name: by_layer for name, by_layer in record.items() if by_layer}


def mean_over_rows(found: dict, micro: MicroBatch, world: World) -> dict:
    """The `distances` of a micro-batch whose rows are split, from those of the processes' parts.

    Each counts by the queries that it was averaged over: tokens in the decoder, pictures in the vision tower, of which
    one that two processes share counts twice. A part without rows does not count.
    """
    queries = int(micro.batch.attention_mask.sum()), len(micro.batch.pixel_values)
    sums: dict[str, list[tuple[float, int]]] = {}
    for of_part, (tokens, pictures) in world.gather(({} if micro.is_empty else found.get("map_distance", {}), queries)):
        for path, value in of_part.items():
            if number := tokens if path.startswith("language_model.") else pictures:
                sums.setdefault(path, []).append((value, number))
    means = {path: sum(v * n for v, n in pairs) / sum(n for _, n in pairs) for path, pairs in sums.items()}
    return {name: by_layer for name, by_layer in (found | {"map_distance": means}).items() if by_layer}
