"""Held-out examples: the loss of their answers, and what a model answers, before, during and after
training.

In: records that are not trained on, and a model. Out: loss, exact match and VQA accuracy; for the
loop the metrics of an evaluation, the best weights in RUN/best, and whether to stop early. All
processes share the examples.

An evaluation changes nothing in training: every step of the loop sets the model's mode and the
random seed.
"""

import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from eval import needle, vqa
from eval.data.haystacks import NEEDLE_TITLES, NEEDLES
from eval.data.record import Record
from eval.data.records import blind
from eval.detect import Row, asks_masks, boxes_of, overlap_of, score_boxes
from eval.question import parts_of, question_of
from eval.vqa_scoring import record_scores
from model.common import UserError, shown, without_none
from model.device import autocast_of
from model.differential import lambdas, map_distance, variants_of
from model.masks import MaskCoder
from model.paligemma import MAX_LOGITS, PaliGemma
from model.processor import Processor
from train.checkpoint import Best, Progress, Result, atomic_folder
from train.data.batches import MicroBatches, load_batches
from train.data.sources import read_split
from train.distributed import World, ask_together, is_sharded
from train.model import inputs, write_trained
from train.settings import Settings
from weights.masks import load_mask_coder

# examples that a model answers at an evaluation during training; the loss is of all
MOST_ASKED = 200
# of the answers, and of the right ones: each a text, or a list of several
Metric = Callable[[list[str], list], float]
FEW = 20  # held-out pictures: of fewer, one is worth more than 5 % of a score
LONGEST = 64  # tokens of an answer that is generated
LONGEST_BOXES = 256  # of one that names boxes


@dataclass(frozen=True)
class HeldOut:
    """The held-out examples of a run, see `open_held_out`."""

    records: list[Record]
    lengths: list[int]  # tokens of the longest right answer to each, its end included
    plan: list[list[int]]  # the numbers of the records of each batch
    asked: list[int]  # records whose answer is generated: of one turn, not too long
    processor: Processor
    settings: Settings
    world: World
    metrics: Mapping[str, Metric] = field(default_factory=dict)  # more scores, by name
    coder: MaskCoder | None = None  # where masks are asked for

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
        # 1. losses
        records = blind(self.records) if without_pictures else self.records
        losses, tokens = self._losses(model.eval(), records)
        unusable = [r.name for r, loss in zip(records, losses, strict=True) if loss is None]
        if len(unusable) > self.settings.most_bad(len(records)):
            raise UserError(
                f"{len(unusable)} of {len(records)} held-out examples are unusable, such as "
                f"{shown(unusable[0])}: correct them, or raise --max-bad"
            )
        scores = {"loss": None}
        if tokens:
            scores["loss"] = math.fsum(loss for loss in losses if loss is not None) / tokens

        # 2. answers
        answers = [None] * len(records)
        numbers = draw_numbers(self.asked, most or len(self.asked))
        if numbers and not is_sharded(model):
            said = ask_together(
                self.world,
                model,
                self.processor,
                [question_of(records[number]) for number in numbers],
                max_new_tokens=max(self.lengths[number] for number in numbers),
                progress=title,
            )
            for number, answer in zip(numbers, said, strict=True):
                answers[number] = answer

        # 3. scores
        of_record = []
        answered = []
        for record, answer in zip(self.records, answers, strict=True):
            of_record.append({})
            if answer is not None:
                answered.append((record, answer))
                of_record[-1] = record_scores(record, answer)
        for measure in ("exact_match", "vqa_accuracy"):
            values = [of[measure] for of in of_record if measure in of]
            scores[measure] = 100 * sum(values) / len(values) if values else None
        if answered:
            scores |= self._more_scores(answered)
        return Result(losses, answers, [of.get("exact_match") for of in of_record], scores)

    def _more_scores(self, answered: Sequence[tuple[Record, str]]) -> dict[str, float | None]:
        """Those of `metrics`, and the average precision of boxes and the mean IoU of masks in
        percent."""
        said = [answer for _, answer in answered]
        truths = [record.truth for record, _ in answered]
        scores = {name: float(metric(said, truths)) for name, metric in self.metrics.items()}
        rows = rows_of_boxes(answered)
        if rows:
            true_boxes = [row.question.truth.boxes for row in rows]
            share = score_boxes(true_boxes, [boxes_of(row)[0] for row in rows])["AP"]
            scores["AP"] = None if share is None else 100 * share
        asked = [row for row in rows if asks_masks(row.question)]
        if self.coder and asked:
            overlaps = [overlap_of(row, self.coder) for row in asked]
            scores["mIoU"] = 100 * sum(overlaps) / len(asked)
        return scores

    def evaluate_column(self, model: PaliGemma, column: str) -> Result:
        """`evaluate`, with what a column of the run's table has besides, in percent: `tests` "vqa"
        and "needle", None without such questions, and details of the embedded scenes."""
        result = self.evaluate(model, f"held-out, {column}")
        result.tests = {"vqa": result.scores["vqa_accuracy"], "needle": None}
        if not self.settings.is_embedded:
            return result
        limit = self.settings.eval_limit
        ask_all = partial(ask_together, self.world)
        details = vqa.evaluate_embedded(
            model, self.processor, limit, f"VQA, {column}", ask_all=ask_all
        )
        needles = {}
        for kind in self.settings.tasks.split(","):
            if kind in NEEDLES and kind not in needles:
                title = f"needle, {NEEDLE_TITLES[kind]}, {column}"
                needles[kind] = needle.evaluate_embedded(
                    model, self.processor, kind, limit // 2, title, ask_all=ask_all
                )
        result.tests = {
            "vqa": details["overall"],
            "needle": needles.get("n2o1"),
            "vqa_details": details,
            "needle_details": needles,
        }
        return result

    def _losses(
        self, model: PaliGemma, records: Sequence[Record]
    ) -> tuple[list[float | None], int]:
        """The loss of each record, in nats, None where it has no row; and the tokens of all. All
        processes call the model equally often, since FSDP2 computes in step."""
        # 1. this process's share: as many batches as others', some of them empty
        world = self.world
        empty = [[]] * (-len(self.plan) % world.size)
        share = [*self.plan, *empty][world.rank :: world.size]
        batches = MicroBatches(records, self.processor)
        is_cuda = world.device.type == "cuda"
        of_share = {}
        tokens = 0
        for micro in load_batches(batches, share, self.settings.workers, is_cuda):
            micro = micro.to(world.device)
            with autocast_of(self.settings.autocast, world.device):
                logits = model(**inputs(micro), positions_to_keep=micro.positions).transpose(1, 2)
                losses = F.cross_entropy(logits, micro.targets, reduction="none").sum(1)
            # an empty batch has a blank row, with neither name nor tokens
            of_share |= zip(micro.names, losses.tolist(), strict=False)
            tokens += micro.tokens

        # 2. those of all
        by_name = {}
        total = 0
        for of_process, count in world.gather((of_share, tokens)):
            by_name |= of_process
            total += count
        return [by_name.get(record.name) for record in records], total

    def evaluate_step(
        self,
        model: PaliGemma,
        run: Path,
        total: int,
        files: Sequence[Path],
        step: int,
        progress: Progress,
    ) -> dict[str, Any]:
        """Evaluate at every `interval` of `total` steps and after the last; returns the scores, and
        `maps_of`.

        `progress.best` becomes this step if it `is_better`, and then RUN/best is written, with the
        `files` of the base. `progress.stopped` becomes this step when --patience is used up.
        """
        # 1. the scores
        every = self.interval(total)
        if every == 0 or step % every and step != total:
            return {}
        scores = self.evaluate(model, most=MOST_ASKED).scores
        loss = scores["loss"]
        if loss is None or not math.isfinite(loss):  # no example could be used
            return {}

        # 2. the best weights
        settings = self.settings
        best = progress.best
        if best is None or is_better(scores, vars(best), min(MOST_ASKED, len(self.asked))):
            progress.best = Best(step, loss, scores["exact_match"])
            if settings.keep_best:
                with atomic_folder(run / "best", self.world) as folder:
                    write_trained(model, folder, settings, self.world, files)
        else:
            best.since += 1
            if 0 < settings.patience <= best.since:
                progress.stopped = step

        # 3. what metrics.jsonl gets
        known = without_none(scores)
        record = {"held_out_loss": known.pop("loss"), **known}
        if self.world.is_first and not is_sharded(model):
            record |= self.maps_of(model)
        return record

    def interval(self, total: int) -> int:
        """Steps between evaluations, 0 none: --eval-every, or so many that three to ten evaluations
        take about a seventh of the time of `total` steps."""
        settings = self.settings
        if settings.eval_every is not None:
            return settings.eval_every
        # in samples of training: a loss costs a third of one, an answer two
        cost = len(self.records) / 3 + 2 * min(MOST_ASKED, len(self.asked))
        rows = settings.step_batch or settings.batch_size * self.world.size
        count = max(3, min(10, int(0.15 * total * rows / cost)))
        return -(-total // count)

    def maps_of(self, model: PaliGemma) -> dict[str, dict]:
        """λ or μ by layer, and of variants with two maps the distance between them on the first
        batch."""
        values = {"lambda": lambdas(model)}
        if any(variant.maps == 2 for variant in variants_of(model).values()):
            micro = MicroBatches(self.records, self.processor)[self.plan[0]].to(self.world.device)
            values["map_distance"] = map_distance(model.eval(), **inputs(micro))
        record = {}
        for name, layers in values.items():
            if layers:
                record[name] = {path: value.tolist() for path, value in layers.items()}
        return record


def is_better(
    scores: Mapping[str, Any],
    others: Mapping[str, Any],
    asked: int,
) -> bool:
    """Whether `scores` beat others on the same examples: by exact match, of `asked` answers, where
    it differs by more than two standard errors of their mean, else by the loss, which tells more of
    few examples."""
    ours = scores["exact_match"] or 0.0
    theirs = others["exact_match"] or 0.0
    share = (ours + theirs) / 200
    noise = 200 * math.sqrt(share * (1 - share) / max(1, asked))
    if abs(ours - theirs) <= noise:
        return scores["loss"] < others["loss"]
    return ours > theirs


def rows_of_boxes(answered: Sequence[tuple[Record, str]]) -> list[Row]:
    """The records that ask for boxes, with their answers, as rows of `eval.detect`."""
    rows = []
    for record, answer in answered:
        if record.detection:
            rows.append(Row(question_of(record, truth=record.detection), (answer, []), {}))
    return rows


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
    # 1. the examples
    records = held_out_records(settings, memory)
    count = len({record.key for record in records})
    if count < FEW and world.is_first and (settings.validation > 0 or settings.patience):
        print(
            f"warning: {count} held-out examples of their own are too few to choose the best step, "
            f"and for a score: raise --validation {settings.validation} or --eval-limit, or give "
            "--eval-data",
            file=sys.stderr,
        )
    if not records:
        return None

    # 2. their answers
    lengths, asked = [], []
    longest = 0  # of all answers of a record
    for number, record in enumerate(records):
        encoded = processor.tokenizer.encode([answer for _, answer in record.turns])
        of_turns = [len(ids) + 1 for ids in encoded]
        longest = max(longest, sum(of_turns))
        others = processor.tokenizer.encode([*record.answers])
        limit = LONGEST_BOXES if record.detection else LONGEST
        right = max([of_turns[-1], *(len(ids) + 1 for ids in others)])
        lengths.append(min(limit, right))
        if len(of_turns) == 1 and of_turns[-1] <= limit:
            asked.append(number)

    # 3. batches of rows alike: as in training, or fewer where their logits would take more memory
    # than those of training's loss
    rows = max(1, MAX_LOGITS // (processor.config.text.vocab_size * longest))
    rows = min(settings.batch_size, rows)
    characters = [len("".join(chain(*record.turns))) for record in records]
    order = sorted(range(len(records)), key=characters.__getitem__)
    plan = parts_of(order, rows)
    coder = load_mask_coder(settings.masks_file)
    return HeldOut(
        records,
        lengths,
        plan,
        asked,
        processor,
        settings,
        world,
        metrics,
        coder,
    )


def held_out_records(settings: Settings, memory: Mapping[str, list[Record]]) -> list[Record]:
    """The usable records of the validation split, or so many of them as are evaluated."""
    most = settings.eval_limit
    if settings.is_embedded and not settings.eval_data:
        most //= 4
    try:
        records = read_split(replace(settings, samples=most), "validation", memory)
    except UserError:
        if settings.eval_data:
            raise
        return []  # too few pictures
    drawn = [records[number] for number in draw_numbers(range(len(records)), most)]
    return [replace(record, sampled=False) for record in drawn if record.turns]


def draw_numbers(items: Sequence[int], most: int) -> list[int]:
    """Up to `most` of the items, in their order: drawn, since neighbours may be of a kind, and
    tasks come in turn."""
    if len(items) <= most:
        return list(items)
    return sorted(random.Random(0).sample(items, most))
