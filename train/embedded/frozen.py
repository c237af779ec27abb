"""Training and questions on pictures that a frozen vision tower has encoded beforehand, once for all rows of a study.

In: records and the vision tower. Out: micro-batches that hold features (pictures, I, W) of the tower in place of
pixels, and answers. The projector still has to be applied to the features: it is trained.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from eval.records import Record
from model.generate import generate
from model.images import to_pixels
from model.paligemma import PaliGemma
from model.processor import Processor
from model.siglip import Siglip
from train.checkpoint import Progress
from train.data.batches import MicroBatch, supervised
from train.distributed import World
from train.loop import LoopSettings, Watch, fit
from train.optim import Rule, make_adamw, parameter_groups
from train.supervised import supervised_loss

ENCODED_AT_ONCE = 32  # pictures


@dataclass(frozen=True)
class EncodedRecords:
    """Records with the features (pictures, I, W) of their pictures; `rows` says which belong to a record's key."""

    records: Sequence[Record]
    features: torch.Tensor
    rows: dict[str, int]

    def batch(self, processor: Processor, numbers: Sequence[int], causal: bool = False) -> MicroBatch:
        """The micro-batch of the records with these numbers. causal: no token sees a later one, in the prompt too."""
        records = [self.records[number] for number in numbers]
        batch = processor.pad([processor.layout(len(r.pictures), r.prefix, r.suffix) for r in records])
        if causal:
            batch = replace(batch, token_type_ids=torch.ones_like(batch.input_ids))
        positions, targets = supervised(batch.labels)
        features = self.features[[self.rows[r.key] for r in records if r.pictures]]
        names = tuple(record.name for record in records)
        return MicroBatch(batch, positions, targets, int((targets != -100).sum()), names, features=features)

    def in_order(self, processor: Processor, rows: int) -> list[MicroBatch]:
        """Causal micro-batches of `rows` records, one after the other."""
        numbers = range(len(self.records))
        return [self.batch(processor, numbers[at : at + rows], causal=True) for at in numbers[::rows]]


def encode(records: Sequence[Record], tower: Siglip) -> EncodedRecords:
    """The records with their pictures encoded; records with the same key share a picture."""
    pictures = {record.key: picture for record in records for picture in record.pictures}
    features = encode_pictures(list(pictures.values()), tower)
    return EncodedRecords(records, features, {key: row for row, key in enumerate(pictures)})


@torch.no_grad()
def encode_pictures(pictures: Sequence[Callable], tower: Siglip) -> torch.Tensor:
    """Features (pictures, I, W) of the vision tower, of functions that draw the pictures."""
    config, parts = tower.config, []
    for start in range(0, len(pictures), ENCODED_AT_ONCE):
        part = pictures[start : start + ENCODED_AT_ONCE]
        parts.append(tower(torch.stack([to_pixels(draw, config.image_size) for draw in part])))
    return torch.cat(parts) if parts else torch.zeros(0, config.num_image_tokens, config.hidden_size)


def prepare(records: Sequence[Record], processor: Processor, tower: Siglip, rows: int) -> list[MicroBatch]:
    """Causal micro-batches of `rows` records, with features of the vision tower in place of pixels."""
    return encode(records, tower).in_order(processor, rows)


@dataclass(frozen=True)
class EncodedOrder:
    """An order for the training loop: step n reads the one micro-batch `batch(n)`."""

    total: int
    batch: Callable[[int], MicroBatch]

    def steps(self, first: int, workers: int | None = 0, pin: bool = False) -> Iterator[list[MicroBatch]]:
        for step in range(first, self.total):
            yield [self.batch(step)]


def encoded_loss(model: nn.Module, micro: MicroBatch) -> torch.Tensor:
    """The loss of a micro-batch whose features have not passed the projector yet, summed over its tokens."""
    return supervised_loss(model, projected(model, micro))


def projected(model: nn.Module, micro: MicroBatch) -> MicroBatch:
    """A micro-batch with its features passed through the projector."""
    return replace(micro, features=model.multi_modal_projector(micro.features))


def learn(
    model: PaliGemma, rules: Sequence[Rule], micros: Sequence[MicroBatch], run: Path, watch: Watch | None = None
) -> Progress:
    """Train what `rules` name on the micro-batches, in place; an interrupted run goes on. Returns its progress.

    watch(step, progress): called after each step, such as to add to the progress.
    """
    run.mkdir(parents=True, exist_ok=True)
    optimizer = make_adamw(parameter_groups(model, rules), (0.9, 0.98))
    order = EncodedOrder(len(micros), micros.__getitem__)
    settings = LoopSettings(schedule="cosine", warmup=0.05, clip=1.0)
    alone = World(0, 1, torch.device("cpu"))
    progress = fit(model, optimizer, order, encoded_loss, settings, run, alone, watch=watch)
    model.eval()
    return progress


@torch.no_grad()
def answer(
    model: PaliGemma,
    processor: Processor,
    prompts: Sequence[str],
    features: torch.Tensor | None = None,
    max_new_tokens: int = 20,
    rows: int = 100,
) -> list[str]:
    """Answers to prompts, each about one encoded picture, or to text alone; causal, `rows` prompts at once.

    features (prompts, I, W): of the vision tower. max_new_tokens: of an answer.
    """
    model.eval()
    answers = []
    for start in range(0, len(prompts), rows):
        part = slice(start, start + rows)
        batch = processor.pad([processor.layout(int(features is not None), prompt) for prompt in prompts[part]])
        new = generate(
            model,
            batch.input_ids,
            None,
            torch.ones_like(batch.input_ids),
            batch.attention_mask,
            max_new_tokens,
            image_features=None if features is None else model.multi_modal_projector(features[part]),
        )
        answers += [processor.decode(row) for row in new]
    return answers
