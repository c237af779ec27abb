"""Held-out examples: the loss of their answers, and what a model answers, before, during and after
training.

In: records that are not trained on, and a model. Out: loss, exact match and VQA accuracy; for the
loop the metrics of an evaluation, the best weights in RUN/best, and whether to stop early. All
processes share the examples.

An evaluation changes nothing in training: every step of the loop sets the model's mode and the
random seed.
"""

import contextlib
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from eval.data.records import Record, blind
from model.common import UserError
from model.device import autocast_of
from model.differential import lambdas, map_distance, variants_of
from model.paligemma import MAX_LOGITS, PaliGemma
from model.processor import Processor
from train.checkpoint import Best, Progress, Result, atomic_folder
from train.data.batches import MicroBatches, load
from train.data.sources import read_records
from train.distributed import World, ask_together, is_sharded
from train.model import inputs, write_trained
from train.settings import Settings

ASKED = 200  # examples that a model answers at an evaluation during training; the loss is of all
Metric = Callable[
    [list[str], list], float
]  # of the answers, and of the right ones: each a text, or a list of several
FEW = 20  # held-out pictures: of fewer, one is worth more than 5 % of a score
LONGEST, LONGEST_BOXES = 64, 256  # tokens of an answer that is generated; of one that names boxes


@dataclass(frozen=True)
class HeldOut:
    """The held-out examples of a run, see `open_held_out`.

    lengths: tokens of each right answer, its end included. plan: the numbers of the records of each
    batch. asked: of the records whose answer is generated: a single turn of at most LONGEST tokens.
    metrics: more scores, by name.
    """

    records: list[Record]
    lengths: list[int]
    plan: list[list[int]]
    asked: list[int]
    processor: Processor
    settings: Settings
    world: World
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    @torch.no_grad()
    def evaluate(
        self,
        model: PaliGemma,
        title: str | None = None,
        *,
        most: int | None = None,
        without_pictures: bool = False,
    ) -> Result:
        """The losses of all records, the answers to `most` of them (None: to all), and their
        scores.

        without_pictures: every picture is gray. Every process must call it. A model sharded by
        FSDP2 answers nothing.
        """
        from eval.question import question_of
        from eval.vqa_scoring import record_scores

        records, answers = (
            blind(self.records) if without_pictures else self.records,
            [None] * len(self.records),
        )
        losses, tokens = self._losses(model.eval(), records)
        if numbers := [] if is_sharded(model) else choose(self.asked, most or len(self.asked)):
            longest = max(self.lengths[number] for number in numbers)
            asks, options = (
                [question_of(records[n]) for n in numbers],
                {"max_new_tokens": longest, "progress": title},
            )
            said = ask_together(self.world, model, self.processor, asks, **options)
            for number, answer in zip(numbers, said, strict=True):
                answers[number] = answer
        pairs = [*zip(self.records, answers, strict=True)]
        of_record = [
            {} if answer is None else record_scores(record, answer) for record, answer in pairs
        ]
        scores = {
            "loss": math.fsum(loss for loss in losses if loss is not None) / tokens
            if tokens
            else None
        }
        for measure in ("exact_match", "vqa_accuracy"):
            values = [measured[measure] for measured in of_record if measure in measured]
            scores[measure] = 100 * sum(values) / len(values) if values else None
        if answered := [(record, answer) for record, answer in pairs if answer is not None]:
            given = (
                [answer for _, answer in answered],
                [[*record.answers] or record.suffix for record, _ in answered],
            )
            scores |= {name: float(metric(*given)) for name, metric in self.metrics.items()}
        if rows := rows_of_boxes(answered):
            from eval.detect import boxes_of, score_boxes

            share = score_boxes(
                [row.question.truth.boxes for row in rows], [boxes_of(row)[0] for row in rows]
            )["AP"]
            scores["AP"] = None if share is None else 100 * share
        return Result(
            losses, answers, [measured.get("exact_match") for measured in of_record], scores
        )

    def test(self, model: PaliGemma, column: str) -> Result:
        """`evaluate`, and as `tests` accuracies in percent: "vqa" and "needle", None where the data
        has no such questions, and of the embedded scenes their details."""
        result = self.evaluate(model, f"held-out, {column}")
        result.tests = {"vqa": result.scores["vqa_accuracy"], "needle": None}
        if self.settings.is_embedded:
            from eval import needle, vqa
            from eval.data.haystacks import NEEDLE_TITLES, NEEDLES

            limit, kinds = self.settings.eval_limit, dict.fromkeys(self.settings.tasks.split(","))
            opened, ask_all = (model, self.processor), partial(ask_together, self.world)
            details = vqa.evaluate_embedded(*opened, limit, f"VQA, {column}", ask_all=ask_all)
            needles = {
                kind: needle.evaluate_embedded(
                    *opened,
                    kind,
                    limit // 2,
                    f"needle, {NEEDLE_TITLES[kind]}, {column}",
                    ask_all=ask_all,
                )
                for kind in kinds
                if kind in NEEDLES
            }
            result.tests = {"vqa": details["overall"], "needle": needles.get("n2o1")}
            result.tests |= {"vqa_details": details, "needle_details": needles}
        return result

    def _losses(
        self, model: PaliGemma, records: Sequence[Record]
    ) -> tuple[list[float | None], int]:
        """Nats by record, and all tokens. All processes call the model equally often, since FSDP2
        computes in step."""
        rank, size, device = self.world.rank, self.world.size, self.world.device
        plan, shares, on_gpu = (
            [*self.plan, *[[]] * (-len(self.plan) % size)],
            {},
            device.type == "cuda",
        )
        for micro in load(
            MicroBatches(records, self.processor), plan[rank::size], self.settings.workers, on_gpu
        ):
            micro = micro.to(device)
            with autocast_of(self.settings.autocast, device):
                logits = model(**inputs(micro), positions_to_keep=micro.positions).transpose(1, 2)
                losses = (
                    F.cross_entropy(logits, micro.targets, ignore_index=-100, reduction="none")
                    .sum(1)
                    .tolist()
                )
            shares |= zip(
                micro.names,
                zip(losses, (micro.targets != -100).sum(1).tolist(), strict=True),
                strict=False,
            )
        known = {name: row for share in self.world.gather(shares) for name, row in share.items()}
        losses = [known[record.name][0] if record.name in known else None for record in records]
        return losses, sum(tokens for _, tokens in known.values())

    def validate(
        self,
        model: PaliGemma,
        run: Path,
        total: int,
        files: Sequence[Path],
        step: int,
        progress: Progress,
    ) -> dict[str, Any]:
        """Evaluate every --eval-every of `total` steps and after the last; returns the scores, and
        `maps_of`.

        `progress.best` becomes this step if it `is_better`, and then RUN/best is written, with the
        `files` of the base. `progress.stopped` becomes this step when --patience is used up.
        """
        settings, every = self.settings, self.settings.eval_every
        if every is None:  # ten, or so many that they take about a seventh of the time
            cost = len(self.records) / 3 + 2 * min(ASKED, len(self.asked))  # in samples of training
            rows = settings.step_batch or settings.batch_size * self.world.size
            every = -(-total // max(3, min(10, int(0.15 * total * rows / cost))))
        if every == 0 or step % every and step != total:
            return {}
        scores, best = self.evaluate(model, most=ASKED).scores, progress.best
        loss, exact = scores["loss"], scores["exact_match"]
        if loss is None or not math.isfinite(loss):  # no example could be used
            return {}
        if best is None or is_better(scores, vars(best), min(ASKED, len(self.asked))):
            progress.best = Best(step, loss, exact)
            if settings.keep_best:
                with atomic_folder(run / "best", self.world) as folder:
                    write_trained(model, folder, settings, self.world, files)
        else:
            best.since += 1
            progress.stopped = step if 0 < settings.patience <= best.since else None
        known = {
            "held_out_loss" if name == "loss" else name: v
            for name, v in scores.items()
            if v is not None
        }
        return known | (
            self.maps_of(model) if self.world.is_first and not is_sharded(model) else {}
        )

    def maps_of(self, model: PaliGemma) -> dict[str, dict]:
        """λ or μ by layer, and of variants with two maps the distance between them on the first
        batch."""
        values = {"lambda": lambdas(model)}
        if any(variant.maps == 2 for variant in variants_of(model).values()):
            micro = MicroBatches(self.records, self.processor)[self.plan[0]].to(self.world.device)
            values["map_distance"] = map_distance(model.eval(), **inputs(micro))
        return {
            name: {path: v.tolist() for path, v in layers.items()}
            for name, layers in values.items()
            if layers
        }


def is_better(scores: Mapping[str, Any], others: Mapping[str, Any], asked: int) -> bool:
    """Whether `scores` beat others on the same examples: by exact match, of `asked` answers, where
    it differs by more than two standard errors of one of them, else by the loss, which tells more
    of few examples."""
    ours, theirs = (of["exact_match"] or 0.0 for of in (scores, others))
    noise = 200 * math.sqrt(theirs / 100 * (1 - theirs / 100) / max(1, asked))
    return scores["loss"] < others["loss"] if abs(ours - theirs) <= noise else ours > theirs


def rows_of_boxes(answered: Sequence[tuple[Record, str]]) -> list:
    """The records that ask for boxes, with their answers, as rows of `eval.detect`."""
    from eval.detect import Row, question_of

    return [
        Row(question_of(r, truth=r.detection), (answer, []), {})
        for r, answer in answered
        if r.detection
    ]


def open_held_out(
    settings: Settings,
    processor: Processor,
    world: World,
    memory: Mapping[str, list[Record]] = {},
    metrics: Mapping[str, Metric] = {},
) -> HeldOut | None:
    """Up to --eval-limit held-out examples, drawn from all, of the embedded scenes a quarter of
    that; None without any, and with --no-evaluate. Raises UserError for --eval-data that cannot be
    read."""
    if not settings.evaluate:
        return None
    most = settings.eval_limit // 4 if settings.is_embedded else settings.eval_limit
    source, records = [], []
    try:
        source = read_records(replace(settings, samples=most), "validation", memory)
    except UserError:  # too few pictures
        if settings.eval_data:
            raise
    for number in choose(range(len(source)), most):
        with contextlib.suppress(
            UserError
        ):  # of a damaged shard; training names what it leaves out
            records.append(replace(source[number], sampled=False))
    records = [record for record in records if record.turns]
    count = len({record.key for record in records})
    if count < FEW and world.is_first and settings.validation > 0:
        print(
            f"warning: {count} held-out examples of their own are too few to choose the best step, "
            f"and for a score: raise --validation {settings.validation} or --eval-limit, or give "
            "--eval-data",
            file=sys.stderr,
        )
    if not records:
        return None
    answers = [
        [len(ids) + 1 for ids in processor.tokenizer.encode([a for _, a in r.turns])]
        for r in records
    ]
    lengths, longest = [of_record[-1] for of_record in answers], max(map(sum, answers))
    # rows of training, or fewer where their logits would take more memory than those of training's
    # loss
    rows = min(
        settings.batch_size, max(1, MAX_LOGITS // (processor.config.text.vocab_size * longest))
    )
    order = sorted(
        range(len(records)),
        key=lambda number: sum(len("".join(turn)) for turn in records[number].turns),
    )
    plan = [order[start : start + rows] for start in range(0, len(order), rows)]
    limits = [LONGEST_BOXES if record.detection else LONGEST for record in records]
    asked = [
        n for n, record in enumerate(records) if len(record.turns) == 1 and lengths[n] <= limits[n]
    ]
    return HeldOut(records, lengths, plan, asked, processor, settings, world, metrics)


def choose(items: Sequence[int], most: int) -> list[int]:
    """Up to `most` of the items, in their order: drawn, since neighbours may be of a kind, and
    tasks come in turn."""
    return list(items) if len(items) <= most else sorted(random.Random(0).sample(items, most))
