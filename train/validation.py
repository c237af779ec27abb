"""Held-out examples: the loss of their answers, and what a model answers, before, during and after training.

In: records that are not trained on, and a model. Out: loss, exact match and VQA accuracy; for the loop the metrics of
an evaluation, the best weights in RUN/best, and whether to stop early. `train/summary.py` prints the tables.

An evaluation changes nothing in training: weights, gradients, modes and random numbers are what they were before.
The processes of a run share the examples, and all get the whole result.
"""

import contextlib
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from eval.command import ask_of
from eval.records import Record, blind
from eval.vqa_data import score
from model.common import UserError, write_text
from model.device import autocast_of
from model.paligemma import MAX_LOGITS, PaliGemma
from model.processor import Processor
from train.checkpoint import Best, Progress, write_folder
from train.data.batches import MicroBatch, MicroBatches, load, text_length
from train.data.sources import read_records
from train.distributed import World, ask_together
from train.loop import Watch
from train.settings import Settings
from train.supervised import distances, is_sharded, ready, row_losses
from train.systems.open import write_trained

ASKED = 200  # examples that a model answers at an evaluation during training; the loss is of all
STEP_FILE = "step"  # of RUN/best
LONGEST = 64  # tokens of an answer; where most answers are longer, none is generated


@dataclass(frozen=True)
class Result:
    """What a model makes of held-out records, by record. losses: nats of the right answer, None for a record that could
    not be used. tokens: its length. answers: what the model says, None where it was not asked."""

    losses: list[float | None]
    tokens: list[int]
    answers: list[str | None]


@dataclass(frozen=True)
class HeldOut:
    """The held-out examples of a run, see `open_held_out`.

    lengths: tokens of each right answer, its end included. plan: the numbers of the records of each batch. asked: those
    that a model can be asked for their answer; none where most answers are too long to be generated.
    """

    records: list[Record]
    lengths: list[int]
    plan: list[list[int]]
    asked: list[int]
    processor: Processor
    settings: Settings
    world: World

    def evaluate(
        self, model: PaliGemma, title: str | None = None, *, most: int | None = None, without_pictures: bool = False
    ) -> Result:
        """The losses of all records, and the answers to `most` of them (None: to all).

        without_pictures: every picture is gray. Every process must call it. A model that FSDP2 has sharded can only be
        asked nothing: `most` is 0.
        """
        records = blind(self.records) if without_pictures else self.records
        answers: list[str | None] = [None] * len(records)
        numbers = choose(self.asked, len(self.asked) if most is None else most)
        with evaluating(model, self.world.device):
            losses, tokens = self._losses(model, records)
            if numbers:
                questions = [ask_of(records[number]) for number in numbers]
                longest = min(LONGEST, max(self.lengths[number] for number in numbers))
                options = {"max_new_tokens": longest, "progress": title, "left_out": {}}
                said = ask_together(self.world, model, self.processor, questions, **options)
                for number, answer in zip(numbers, said, strict=True):
                    answers[number] = answer
        return Result(losses, tokens, answers)

    def measure(self, model: PaliGemma, title: str, without_pictures: bool = False) -> dict:
        """ "held_out", the `scores` of a model, and "records", the fields of the `Result`."""
        result = self.evaluate(model, title, without_pictures=without_pictures)
        return {"held_out": self.scores(result), "records": asdict(result)}

    def _losses(self, model: PaliGemma, records: Sequence[Record]) -> tuple[list[float | None], list[int]]:
        """Nats and tokens by record. All processes call the model equally often, since FSDP2 computes in step."""
        rank, size = self.world.rank, self.world.size
        plan = [*self.plan, *[[]] * (-len(self.plan) % size)]
        places, shares = {record.name: number for number, record in enumerate(records)}, []
        on_gpu = self.world.device.type == "cuda"
        for micro in load(MicroBatches(records, self.processor), plan[rank::size], self.settings.workers, on_gpu):
            names, micro = micro.names, ready(micro, self.processor, self.world.device)
            with autocast_of(self.settings.autocast, self.world.device):
                by_row = row_losses(model, micro)
            shares += zip(names, by_row.tolist(), (micro.targets != -100).sum(1).tolist(), strict=False)
        losses: list[float | None] = [None] * len(records)
        tokens = [0] * len(records)
        for of_process in self.world.gather(shares):
            for name, loss, count in of_process:
                losses[places[name]], tokens[places[name]] = loss, count
        return losses, tokens

    def matches(self, result: Result) -> list[float | None]:
        """Exact match, 0 or 1, of each answer."""
        by_name = score(self.records, result.answers)["exact_match"]
        return [by_name.get(record.name) for record in self.records]

    def scores(self, result: Result) -> dict[str, float | None]:
        """Loss in nats a token, exact match and VQA accuracy in percent; None where there is none."""
        tokens, losses = sum(result.tokens), [loss for loss in result.losses if loss is not None]
        by_measure = score(self.records, result.answers)
        percent = {name: 100 * sum(values.values()) / len(values) for name, values in by_measure.items() if values}
        loss = {"loss": math.fsum(losses) / tokens if tokens else None}
        return loss | {name: percent.get(name) for name in ("exact_match", "vqa_accuracy")}


def open_held_out(
    settings: Settings, processor: Processor, world: World, known: dict[str, list[Record]] | None = None
) -> HeldOut | None:
    """Up to --eval-limit held-out examples, drawn from all; None where there are none, which a line on stderr says.

    Of the embedded scenes, which have tests of their own, a quarter of that. known: see `read_records`. Raises
    UserError for --eval-data that cannot be read.
    """
    most = settings.eval_limit // 4 if settings.is_embedded else settings.eval_limit
    source: Sequence[Record] = []
    try:
        source = read_records(replace(settings, samples=most), "validation", known)
    except UserError:  # too few pictures
        if settings.eval_data:
            raise
    records: list[Record] = []
    for number in choose(range(len(source)), most):
        with contextlib.suppress(UserError):  # of a damaged shard; training names what it leaves out
            records.append(replace(source[number], sampled=False))
    records = [record for record in records if record.turns]
    if not records:
        if world.is_first and settings.validation > 0:
            print(
                f"nothing is held out: --validation {settings.validation} of the pictures is none, or none that can be "
                "used: give --eval-data, or a larger share",
                file=sys.stderr,
            )
        return None
    answers = [[len(ids) + 1 for ids in processor.tokenizer.encode([a for _, a in r.turns])] for r in records]
    lengths, longest = [of_record[-1] for of_record in answers], max(map(sum, answers))
    # rows of training, or fewer where their logits would take more memory than those of training's loss
    rows = min(settings.batch_size, max(1, MAX_LOGITS // (processor.config.text.vocab_size * longest)))
    order = sorted(range(len(records)), key=lambda number: text_length(records[number]))
    plan = [order[start : start + rows] for start in range(0, len(order), rows)]
    asked = [number for number, r in enumerate(records) if len(r.turns) == 1]
    generates = 2 * sum(lengths[number] <= LONGEST for number in asked) > len(records)
    return HeldOut(records, lengths, plan, asked if generates else [], processor, settings, world)


def choose(items: Sequence[int], most: int) -> list[int]:
    """Up to `most` of the items, in their order: drawn, since neighbours may be of a kind, and tasks come in turn."""
    return list(items) if len(items) <= most else sorted(random.Random(0).sample(items, most))


@contextlib.contextmanager
def evaluating(model: nn.Module, device: torch.device) -> Iterator[None]:
    """The model in eval mode for the block, without gradients; random numbers go on afterwards as if it were not."""
    was_training, devices = model.training, [device] if device.type == "cuda" else []
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        model.train(was_training)


@dataclass(frozen=True)
class TrainingWatch(Watch):
    """What a fine-tuning run is watched by: distances of the two maps, held-out scores, and the best weights.

    total: steps of the run. files: of the base, written beside a whole model. held_out: None evaluates nothing.
    """

    model: PaliGemma
    held_out: HeldOut | None
    settings: Settings
    run: Path
    world: World
    total: int
    files: Sequence[Path] = ()

    def measure(self, step: int, micro: MicroBatch) -> dict:
        """λ and the distance between the two maps, every --measure-every steps; of a sharded model nothing."""
        every, is_first = self.settings.measure_every, self.world.is_first
        if not every or step % every or micro.is_empty or not is_first or is_sharded(self.settings, self.world):
            return {}
        return distances(self.model, micro.to(self.world.device))

    def validate(self, step: int, progress: Progress) -> dict[str, float]:
        """Evaluate the model every --eval-every steps and after the last; returns loss and exact match.

        `progress.best` becomes this step if its exact match is the highest so far, or equal and its loss the lowest
        (where no answer is generated, by the loss alone), and then RUN/best is written; `progress.stopped` becomes it
        when --patience is used up.
        """
        settings, held_out = self.settings, self.held_out
        if held_out is None or settings.eval_every == 0:
            return {}
        if step % (settings.eval_every or -(-self.total // 10)) and step != self.total:
            return {}
        most = 0 if is_sharded(settings, self.world) else ASKED
        scores = held_out.scores(held_out.evaluate(self.model, most=most))
        loss, exact, best = scores["loss"], scores["exact_match"], progress.best
        if best and settings.keep_best and _read_step(self.run / "best") != best.step:
            best = None  # the run was resumed from a step before that of the folder: its weights are of another course
        is_number = loss is not None and math.isfinite(loss)
        if not is_number and best is None:  # no example could be used, or nothing would be better
            return {}
        if best is None or is_number and (exact or 0, -loss) > (best.exact_match or 0, -best.loss):
            progress.best = Best(step, loss, exact)
            if settings.keep_best:
                write_folder(partial(self._write_best, step), self.run / "best", self.world)
        else:
            progress.best = replace(best, since=best.since + 1)
        if settings.patience and progress.best.since >= settings.patience:
            progress.stopped = step
        if not is_number:
            return {}
        return {"held_out_loss": loss} | ({} if exact is None else {"exact_match": exact})

    def _write_best(self, step: int, folder: Path) -> None:
        write_trained(self.model, folder, self.settings, self.world, self.files)
        if self.world.is_first:
            write_text(folder / STEP_FILE, f"{step}\n")


def _read_step(folder: Path) -> int | None:
    """The step that the weights of RUN/best are of; None for a folder that is not there."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / STEP_FILE).read_text())
    return None
