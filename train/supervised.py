"""Supervised training on pictures and text: the order of the data, the loss of a micro-batch, the call of the loop.

In: an opened model, its processor, and records. Out: the trained model, in place, see `train/loop.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from eval.records import Record
from model.common import UserError
from model.paligemma import PaliGemma
from model.processor import Processor
from train.checkpoint import Progress
from train.data.batches import MicroBatch, Order
from train.distributed import World
from train.loop import fit
from train.settings import Settings, step_layout


def train_on(
    order: Order, model: PaliGemma, optimizer: Optimizer, settings: Settings, run: Path, world: World, **options
) -> Progress:
    """Train `model` in place on `order`; returns the run's progress. options: of `fit`."""

    location = order.processor.tokenizer.piece_to_id("<loc0000>")

    def loss(called: nn.Module, micro: MicroBatch) -> torch.Tensor:
        micro = micro.to(world.device)
        if settings.shift and not ((micro.targets >= location) & (micro.targets < location + 1024)).any():  # no boxes
            micro = replace(micro, batch=replace(micro.batch, pixel_values=shifted(micro.batch.pixel_values)))
        return supervised_loss(called, micro)

    return fit(model, optimizer, order, loss, settings, run, world, **options)


def make_order(
    records: Sequence[Record], processor: Processor, settings: Settings, world: World, processes: int | None = None
) -> Order:
    """The order of a run. processes: the number that it began with; the micro-batches of its steps stay the same.
    Raises UserError for steps that cannot be made."""
    rows, micro_batches = step_layout(settings, processes or world.size)
    if micro_batches % world.size:
        problem = f"{world.size} processes cannot share {micro_batches} micro-batches"
        raise UserError(f"{problem}: start a number that divides them")
    chosen = {name: getattr(settings, name) for name in ("epochs", "steps", "seed", "per_picture")}
    chosen["epochs"] = chosen["epochs"] or (1 if settings.is_embedded else None)
    chosen |= {"batch_size": rows, "accumulate": micro_batches // world.size}
    return Order(records, processor, rank=world.rank, world_size=world.size, **chosen)


def shifted(pixels: torch.Tensor) -> torch.Tensor:
    """Pictures (B, 3, R, R), each moved by up to a sixteenth of its side; borders are repeated."""
    count, size = len(pixels), pixels.shape[-1]
    moves = torch.randint(-(size // 16), size // 16 + 1, (2, count, 1))
    rows, columns = (torch.arange(size) + moves).clamp(0, size - 1).to(pixels.device)  # (B, R)
    return pixels[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None]].movedim(-1, 1)


def supervised_loss(model: nn.Module, micro: MicroBatch) -> torch.Tensor:
    """The sum of cross-entropies over the supervised tokens."""
    return forward(model, micro, targets=micro.targets)


def row_losses(model: nn.Module, micro: MicroBatch) -> torch.Tensor:
    """(B,): the cross-entropies of each row, summed over its supervised tokens."""
    logits = forward(model, micro)
    return F.cross_entropy(logits.transpose(1, 2), micro.targets, ignore_index=-100, reduction="none").sum(1)


def forward(model: nn.Module, micro: MicroBatch, **options) -> torch.Tensor:
    """Logits (B, T, V) of the supervised positions, where alone the head runs; the loss with `targets`."""
    return model(**inputs(micro), positions_to_keep=micro.positions, **options)


def inputs(micro: MicroBatch) -> dict[str, torch.Tensor]:
    """The arguments of the model that are the batch itself."""
    return {name: tensor for name, tensor in vars(micro.batch).items() if name != "labels"}
