"""Train a part of an embedded model causally, and keep the rest frozen.

In: records and rules, which name what is trained. Out: the trained model, in place. `train/embedded/text.py` trains the
decoder of the text base so.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from eval.records import Record
from model.paligemma import PaliGemma
from model.processor import Processor
from train.checkpoint import Progress
from train.data.batches import MicroBatch, collate
from train.distributed import World
from train.loop import LoopSettings, fit
from train.optim import Rule, make_adamw, parameter_groups
from train.supervised import supervised_loss


@dataclass(frozen=True)
class InOrder:
    """An order for the training loop: step n reads micro-batch n."""

    micros: Sequence[MicroBatch]

    @property
    def total(self) -> int:
        return len(self.micros)

    def steps(self, first: int, workers: int | None = 0, pin: bool = False) -> Iterator[list[MicroBatch]]:
        for micro in self.micros[first:]:
            yield [micro]


def prepare(records: Sequence[Record], processor: Processor, rows: int) -> list[MicroBatch]:
    """Micro-batches of `rows` records, in order; no token sees a later one, in the prompt too."""
    micros = [collate(records[start : start + rows], processor) for start in range(0, len(records), rows)]
    causal = [replace(micro.batch, token_type_ids=torch.ones_like(micro.batch.input_ids)) for micro in micros]
    return [replace(micro, batch=batch) for micro, batch in zip(micros, causal, strict=True)]


def learn(model: PaliGemma, rules: Sequence[Rule], micros: Sequence[MicroBatch], run: Path) -> Progress:
    """Train what `rules` name on the micro-batches, in place; an interrupted run goes on. Returns its progress."""
    run.mkdir(parents=True, exist_ok=True)
    optimizer = make_adamw(parameter_groups(model, rules), (0.9, 0.98))
    settings, alone = LoopSettings(schedule="cosine", warmup=0.05, clip=1.0), World(0, 1, torch.device("cpu"))
    progress = fit(model, optimizer, InOrder(micros), supervised_loss, settings, run, alone)
    model.eval()
    return progress
