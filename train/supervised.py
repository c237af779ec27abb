"""Supervised training on pictures and text: the loss of a micro-batch, the call of the loop.

In: an opened model, and the order of its data. Out: the trained model, in place, see `train/loop.py`.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from model.paligemma import PaliGemma
from train.checkpoint import Progress
from train.data.batches import MicroBatch, Order
from train.distributed import World
from train.loop import fit
from train.settings import Settings


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


def shifted(pixels: torch.Tensor) -> torch.Tensor:
    """Pictures (B, 3, R, R), each moved by up to a sixteenth of its side; borders are repeated."""
    count, size = len(pixels), pixels.shape[-1]
    moves = torch.randint(-(size // 16), size // 16 + 1, (2, count, 1))
    rows, columns = (torch.arange(size) + moves).clamp(0, size - 1).to(pixels.device)  # (B, R)
    return pixels[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None]].movedim(-1, 1)


def supervised_loss(model: nn.Module, micro: MicroBatch) -> torch.Tensor:
    """The sum of cross-entropies over the supervised tokens."""
    return model(**inputs(micro), positions_to_keep=micro.positions, targets=micro.targets)


def inputs(micro: MicroBatch) -> dict[str, torch.Tensor]:
    """The arguments of the model that are the batch itself."""
    return {name: tensor for name, tensor in vars(micro.batch).items() if name != "labels"}
