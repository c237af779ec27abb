"""From records to batches: what is learned, in which order, and how a run finds its place again.

In: `--data`, which names the embedded scenes or files on disk (`eval/` reads both). Out: micro-batches, planned ahead
from a seed alone, so that a resumed run sees exactly what an uninterrupted one would have seen.
Next: `train/finetune.py`.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

import torch
from PIL import Image
from torch.utils.data import DataLoader

from eval import scenes
from eval.datasets import find_image, read_annotations, read_examples, read_questions
from model.common import UserError
from model.images import load_image
from model.processor import Batch, Processor
from train.data.features import FeatureCache
from train.recipes import EMBEDDED_TASKS


@dataclass(frozen=True)
class Record:
    """One thing to learn. `picture` is a path, or draws or opens itself, or is None where there is text alone; records
    with the same `key` share it."""

    name: str
    key: str
    picture: Path | Callable[[], Image.Image | BinaryIO] | None
    prefix: str
    suffix: str
    choices: tuple[str, ...] = ()  # answers to draw one from, anew each epoch, in place of `suffix`


# ---------------------------------------------------------------------------------------------------------------------
# Where records come from
# ---------------------------------------------------------------------------------------------------------------------

QUESTIONS_FILE = "v2_OpenEnded_mscoco_train2014_questions.json"
ANNOTATIONS_FILE = "v2_mscoco_train2014_annotations.json"


def embedded_records(tasks: Sequence[str] = EMBEDDED_TASKS, split: str = "train", count: int = 12000, seed: int = 0):
    """`count` records of the embedded scenes, the tasks in turn; a task that is named twice comes twice as often."""
    drawn: dict[str, int] = defaultdict(int)
    records = []
    for number in range(count):
        task = tasks[number % len(tasks)]
        records.append(sample_record(scenes.sample(task, split, drawn[task], seed), split))
        drawn[task] += 1
    return records


def sample_record(s: scenes.Sample, split: str) -> Record:
    name, key = f"{s.task}/{split}/{s.question_id}", f"{s.task}/{s.image_id}"
    return Record(name, key, partial(_render, s.scene), s.prefix, s.suffix)


def _render(scene: scenes.Scene) -> Image.Image:
    return Image.fromarray(scene.render())


def vqav2_records(
    folder: Path,
    prompt: str,
    split: str = "train",
    fraction: float = 1.0,
    validation: float = 0.0,
    seed: int = 0,
    sampled: bool = False,
) -> list[Record]:
    """Questions of VQAv2's train2014 in their official layout under `folder`; the answer is multiple_choice_answer, or,
    `sampled`, one of the ten, drawn anew each epoch.

    `prompt` is a template with {question}. Of the pictures, the share `validation` is held out by image id (split
    "validation"), and the share `fraction` of the rest is used (the paper's Part 1: 0.4). Raises UserError for files
    that are absent, and for a question without its annotation.
    """
    questions = read_questions(folder / QUESTIONS_FILE)
    annotations = {a.question_id: a for a in read_annotations(folder / ANNOTATIONS_FILE)}
    missing = [q.question_id for q in questions if q.question_id not in annotations]
    if missing:
        raise UserError(
            f"{folder}: {len(missing)} questions have no annotation (first: {missing[0]}): "
            "take both files of one release"
        )
    chosen = set(_share_of_pictures(sorted({q.image for q in questions}), split, fraction, validation, seed))
    return [
        Record(
            str(q.question_id),
            q.image,
            find_image(folder, q.image),
            prompt.format(question=q.question),
            annotations[q.question_id].answer,
            tuple(a["answer"] for a in annotations[q.question_id].answers) if sampled else (),
        )
        for q in questions
        if q.image in chosen
    ]


def jsonl_records(path: Path, split: str = "train", fraction: float = 1.0, validation: float = 0.0, seed: int = 0):
    """A user's own {"image", "prefix", "suffix"} lines, split by picture as VQAv2 is."""
    examples = read_examples(path)
    chosen = set(_share_of_pictures(sorted({str(e.image) for e in examples}), split, fraction, validation, seed))
    return [
        Record(f"{path.name}:{number}", str(e.image), e.image, e.prefix, e.suffix)
        for number, e in enumerate(examples, 1)
        if str(e.image) in chosen
    ]


def _share_of_pictures(pictures: list[str], split: str, fraction: float, validation: float, seed: int) -> list[str]:
    """The pictures of a split: questions of one picture never fall on both sides of it."""
    random.Random(f"split/{seed}").shuffle(pictures)
    held_out = round(len(pictures) * validation)
    if split == "validation":
        return pictures[:held_out]
    return pictures[held_out : held_out + max(1, round((len(pictures) - held_out) * fraction))]


# ---------------------------------------------------------------------------------------------------------------------
# The order
# ---------------------------------------------------------------------------------------------------------------------


BUCKET = 32  # tokens of text


def plan_epoch(
    keys: Sequence[Hashable], lengths: Sequence[int], batch_size: int, seed: int | str, epoch: int, per_picture: int = 1
) -> list[list[int]]:
    """Record indices of every micro-batch of an epoch: each record once, shuffled, rows of a batch of similar length.

    Up to `per_picture` questions of one picture travel together and share its encoding. Lengths differ by less than
    BUCKET within a batch, but for the last of a pool of 50 batches; within a bucket the order is random. Sorting by the
    exact length would save little more, beside the image tokens, and part the tasks of a mixture into batches of one
    task each, between which the loss swings.
    """
    dice = random.Random(f"plan/{seed}/{epoch}")
    by_picture = defaultdict(list)
    for index, key in enumerate(keys):
        by_picture[key].append(index)
    units = []
    for indices in by_picture.values():
        dice.shuffle(indices)
        units += [indices[i : i + per_picture] for i in range(0, len(indices), per_picture)]
    dice.shuffle(units)
    batches, pool, size = [], [], 0
    for number, unit in enumerate(units, 1):
        pool.append(unit)
        size += len(unit)
        if size >= 50 * batch_size or number == len(units):
            # stable, so that units of one bucket keep their random order
            order = [i for unit in sorted(pool, key=lambda unit: max(lengths[i] for i in unit) // BUCKET) for i in unit]
            # whole batches, so that every epoch has equally many; what is over goes into the next pool
            whole = size if number == len(units) else size - size % batch_size
            batches += [order[i : i + batch_size] for i in range(0, whole, batch_size)]
            pool = [order[whole:]] if size > whole else []
            size -= whole
    dice.shuffle(batches)
    return batches


# ---------------------------------------------------------------------------------------------------------------------
# Micro-batches
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass reads. Pictures are there once; `image_index` (slots,) says whose is whose.

    positions (B, T) and targets (B, T): where the head runs, and which token must come next there; −100 fills up.
    With a cache of features, `features` (pictures, I, H) has what it knows, and zeros at the `unseen` ones, whose
    pixels alone are in the batch, under their `keys`.
    """

    batch: Batch
    image_index: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    tokens: int  # supervised ones: what the loss is normalised by
    names: tuple[str, ...]
    bad: tuple[str, ...] = field(default=())  # one line for each record that had to be left out
    features: torch.Tensor | None = None
    unseen: torch.Tensor | None = None
    keys: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether it has no rows: there was nothing to read, or all of it was bad."""
        return not len(self.targets)

    def to(self, device: str | torch.device, dtype: torch.dtype | None = None) -> "MicroBatch":
        tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in self._tensors()}
        return replace(self, batch=self.batch.to(device, dtype), **tensors)

    def pin_memory(self) -> "MicroBatch":
        tensors = {name: tensor.pin_memory() for name, tensor in self._tensors()}
        return replace(self, batch=self.batch.pin_memory(), **tensors)

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, value) for name, value in vars(self).items() if isinstance(value, torch.Tensor)]


def supervised(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """From labels (B, S), the one shift: positions (B, T) whose logits count, and their targets (B, T).

    Position p predicts label p + 1. Rows with fewer than T supervised tokens repeat position 0 with target −100.
    """
    is_target = labels[:, 1:] != -100
    width = int(is_target.sum(1).max()) if labels.numel() else 0
    # supervised positions first, each in its order
    positions = (~is_target).long().argsort(dim=1, stable=True)[:, :width]
    kept = is_target.gather(1, positions)
    return positions * kept, labels[:, 1:].gather(1, positions).masked_fill(~kept, -100)


def without_rows(bad: Sequence[str] = ()) -> MicroBatch:
    """An empty micro-batch, with one line in `bad` for each record that was left out."""
    ids, index = torch.empty(0, 0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    batch = Batch(ids, torch.empty(0, 3, 1, 1), ids, ids, ids, index)
    return MicroBatch(batch, index, ids, ids, tokens=0, names=(), bad=tuple(bad))


def collate(
    records: Sequence[Record], processor: Processor, cache: FeatureCache | None = None, bad: Sequence[str] = ()
) -> MicroBatch:
    """Open pictures, prepare them and the text, and lay them out as one micro-batch.

    A record whose picture or text cannot be used is left out and gets a line in `bad`, after those given: records that
    could not even be read. If no record is left, the micro-batch is empty.
    """
    pictures: dict[str, Image.Image] = {}
    good, rows, bad = [], [], list(bad)
    draft = processor.config.vision.image_size if processor.draft else None
    for record in records:
        try:
            if record.picture is not None and record.key not in pictures:
                picture = record.picture() if callable(record.picture) else record.picture
                pictures[record.key] = load_image(picture, draft)
            rows.append(processor.layout(int(record.picture is not None), record.prefix, record.suffix))
            good.append(record)
        except UserError as error:
            bad.append(f"{record.name}: {error}")
    if not good:
        return without_rows(bad)
    batch = processor.pad(rows, [pictures[r.key] for r in good if r.picture is not None])
    positions, targets = supervised(batch.labels)
    micro = MicroBatch(
        batch,
        batch.image_index,
        positions,
        targets,
        int((targets != -100).sum()),
        tuple(r.name for r in good),
        tuple(bad),
    )
    return micro if cache is None else look_up(micro, cache)


def look_up(micro: MicroBatch, cache: FeatureCache) -> MicroBatch:
    """The micro-batch with the features of its pictures that `cache` has."""
    pixels = micro.batch.pixel_values
    keys = [cache.key(picture) for picture in pixels]
    found = [cache.load(key) for key in keys]
    unseen = [number for number, known in enumerate(found) if known is None]
    blank = torch.zeros(cache.shape, dtype=torch.bfloat16)
    return replace(
        micro,
        batch=replace(micro.batch, pixel_values=pixels[unseen]),
        unseen=torch.tensor(unseen, dtype=torch.int64),
        features=torch.stack([blank if known is None else known for known in found] or [blank])[: len(found)],
        keys=tuple(keys[number] for number in unseen),
    )


def idle(processor: Processor) -> MicroBatch:
    """One blank row that teaches nothing: what a process computes beside the others when it has nothing to learn."""
    blank = Image.new("RGB", (processor.config.vision.image_size,) * 2)
    micro = collate([Record("blank", "blank", lambda: blank, "nothing", "nothing")], processor)
    return replace(micro, targets=torch.full_like(micro.targets, -100), tokens=0, names=())


class _MicroBatches(torch.utils.data.Dataset):
    """Micro-batches by the numbers of their records, for the workers of a DataLoader."""

    def __init__(self, records: Sequence[Record], epoch_seed: str, processor: Processor, cache: FeatureCache | None):
        self.records, self.epoch_seed, self.processor, self.cache = records, epoch_seed, processor, cache

    def __getitem__(self, numbers: Sequence[int]) -> MicroBatch:
        records, bad = [], []
        for number in numbers:
            try:
                records.append(self._record(number))
            except UserError as error:
                bad.append(str(error))
        return collate(records, self.processor, self.cache, bad)

    def _record(self, number: int) -> Record:
        record = self.records[number]
        if not record.choices:
            return record
        return replace(record, suffix=random.Random(f"{self.epoch_seed}/{record.name}").choice(record.choices))


def load_batches(
    records: Sequence[Record],
    plan: Iterable[Sequence[int]],
    processor: Processor,
    workers: int = 0,
    pin: bool = False,
    epoch_seed: str = "",
    cache: FeatureCache | None = None,
) -> Iterator[MicroBatch]:
    """The micro-batches of a plan, in its order, decoded by `workers` processes."""
    return iter(
        DataLoader(
            _MicroBatches(records, epoch_seed, processor, cache),
            sampler=plan,
            batch_size=None,  # each item is a whole micro-batch
            num_workers=workers,
            pin_memory=pin,
            generator=torch.Generator(),  # its own: drawing from the global one would change what dropout draws
        )
    )


class Order:
    """Which micro-batches a process reads at every step: a pure function of the seed, so a run can start anywhere.

    A step takes `accumulate` micro-batches on each of `world_size` processes; an epoch's last step takes what is left.
    `total` is the number of steps. records: a list, planned as a whole, or a source that brings its own `plan`, as
    `train/data/shards.py` does. Raises UserError if no step is whole.
    """

    def __init__(
        self,
        records: Sequence[Record],
        processor: Processor,
        *,
        batch_size: int,
        accumulate: int = 1,
        epochs: int = 1,
        steps: int | None = None,
        seed: int = 0,
        per_picture: int = 1,
        rank: int = 0,
        world_size: int = 1,
        cache: FeatureCache | None = None,
    ):
        self.records, self.processor, self.cache = records, processor, cache
        self.accumulate, self.rank, self.world_size, self.seed = accumulate, rank, world_size, seed
        if hasattr(records, "plan"):
            self.plan = partial(records.plan, batch_size, seed, per_picture=per_picture)
        else:
            lengths = [len(ids) for ids in processor.tokenizer.encode([r.prefix + r.suffix for r in records])]
            keys = [r.key for r in records]
            self.plan = lambda epoch, first: plan_epoch(keys, lengths, batch_size, seed, epoch, per_picture)[first:]
        self.micro_batches = -(-len(records) // batch_size)
        if self.micro_batches < accumulate * world_size:
            raise UserError(
                f"{len(records)} records make {self.micro_batches} micro-batches, but a step takes "
                f"{accumulate * world_size}: lower the batch size or the accumulation, or give more data"
            )
        self.steps_per_epoch = -(-self.micro_batches // (accumulate * world_size))
        self.total = steps or self.steps_per_epoch * epochs

    def steps(self, first: int, workers: int = 0, pin: bool = False) -> Iterator[list[MicroBatch]]:
        """This process's micro-batches of each step, from step `first` to the last.

        All processes go through a step in equally many rounds, since they compute together. Where the last round of an
        epoch has too few micro-batches, the other processes get an empty one.
        """
        step, over = first, self.micro_batches % self.world_size
        while step < self.total:
            epoch, done = divmod(step, self.steps_per_epoch)
            plan = self.plan(epoch=epoch, first=done * self.accumulate * self.world_size)
            own = islice(plan, self.rank, None, self.world_size)
            batches = load_batches(self.records, own, self.processor, workers, pin, f"{self.seed}/{epoch}", self.cache)
            batches = chain(batches, [without_rows()] if 0 < over <= self.rank else [])
            for _ in range(min(self.steps_per_epoch - done, self.total - step)):
                yield list(islice(batches, self.accumulate))
                step += 1
