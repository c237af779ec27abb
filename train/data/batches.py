"""Micro-batches: which records are learned together, in which order, laid out as tensors.

In: records. Out: for each step a list of `MicroBatch`. The plan follows from the seed alone, so a
resumed run reads exactly what an uninterrupted one would have read.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count, islice, pairwise
from random import Random

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from eval.data.records import Record, gray_picture
from eval.question import parts_of
from model.common import UserError, shown
from model.processor import Batch, Movable, Processor
from train.distributed import World
from train.settings import Settings, step_layout

# of a run whose --epochs is not given, unless one epoch has more steps
STEPS, MOST_EPOCHS = 320, 32
BUCKET = 32  # tokens of text: rows of one batch have lengths of the same bucket


@dataclass(frozen=True)
class MicroBatch(Movable):
    """What one forward and backward pass reads. positions (B, T): where the head runs. targets (B,
    T): the next token at each position; -100 is padding."""

    batch: Batch
    positions: Tensor
    targets: Tensor
    tokens: int  # supervised tokens: the loss is divided by their number
    names: tuple[str, ...]
    bad: tuple[str, ...] = ()  # one line for each record that was left out


def supervised(labels: Tensor) -> tuple[Tensor, Tensor]:
    """From labels (B, S), shifted by one: positions (B, T) whose logits count, and their targets
    (B, T). Rows with fewer than T supervised tokens repeat position 0 with target -100."""
    is_target = labels[:, 1:] != -100
    width = int(is_target.sum(1).max())
    # supervised positions first, in their order
    positions = (~is_target).long().argsort(dim=1, stable=True)[:, :width]
    kept = is_target.gather(1, positions)
    return positions * kept, labels[:, 1:].gather(1, positions).masked_fill(~kept, -100)


def collate(records: Sequence[Record], processor: Processor) -> MicroBatch:
    """Open pictures, prepare them and the text, and lay them out as one micro-batch. A record that
    cannot be used is left out and gets a line in `bad`. If none is left, a blank row without
    targets stands for them: other processes wait for its gradients."""
    # by key; of a photograph no more than the model sees is kept
    opened = {}
    good, rows, bad = [], [], []
    for record in records:
        try:
            if record.pictures and record.key not in opened:
                opened[record.key] = list(map(processor.pixels, record.pictures))
            rows.append(processor.row_of(len(record.pictures), record.turns))
            good.append(record)
        except UserError as error:
            bad.append(shown(f"{record.name}: {error}", 600))
    pictures = [picture for r in good if r.pictures for picture in opened[r.key]]
    if not good:
        roomy = copy(processor)
        roomy.max_length = sys.maxsize  # the user's may be too short for a picture
        rows = [roomy.row_of(1, [("nothing", "nothing")])]
        pictures = [processor.pixels(gray_picture)]
    batch = processor.pad(rows, pictures)
    positions, targets = supervised(batch.labels)
    targets = targets if good else torch.full_like(targets, -100)
    names = tuple(record.name for record in good)
    return MicroBatch(
        batch,
        positions,
        targets,
        int((targets != -100).sum()),
        names,
        tuple(bad),
    )


@dataclass(frozen=True)
class MicroBatches(Dataset):
    """Micro-batches by the numbers of their records, for the workers of a DataLoader. epoch_seed:
    answers that are drawn anew in each epoch follow it."""

    records: Sequence[Record]
    processor: Processor
    epoch_seed: str = ""

    def __getitem__(self, numbers: Sequence[int]) -> MicroBatch:
        records = [self.records[number] for number in numbers]
        for place, record in enumerate(records):
            given = [text for text in record.answers if text.strip()]
            if record.sampled and given:
                answer = Random(f"{self.epoch_seed}/{record.name}").choice(given)
                turns = (*record.turns[:-1], (record.prefix, answer))
                records[place] = replace(record, turns=turns)
        return collate(records, self.processor)


def load_batches(
    batches: Dataset,
    plan: Iterable[Sequence],
    workers: int | None,
    pin: bool,
) -> Iterator:
    """`batches[item]` for each item of a plan, in its order, made by `workers` processes, 0: by
    this one. pin: for a GPU, in page-locked memory; then workers None are this process's share of
    the cores, but at most 8."""
    if workers is None:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        workers = min(8, (os.cpu_count() or 1) // processes) if pin else 0
    own = torch.Generator()  # drawing from the global one would change what dropout draws
    options = {"batch_size": None, "num_workers": workers, "pin_memory": pin, "generator": own}
    return iter(DataLoader(batches, sampler=plan, **options))


def plan_epoch(
    keys: Sequence[Hashable],
    lengths: Sequence[int],
    batch_size: int,
    seed: int | str,
    epoch: int,
    per_picture: int = 1,
) -> list[list[int]]:
    """Record indices of every micro-batch of an epoch: each record once, shuffled, rows of a batch
    of similar length.

    keys: the picture of each record; up to `per_picture` records of one are kept together and share
    its encoding. lengths: tokens of text of each record, which differ by less than BUCKET within a
    batch, except in the last of a pool of 50. Exact lengths would give batches of a single task,
    between which the loss oscillates.
    """
    rng = Random(f"plan/{seed}/{epoch}")
    # 1. records of one picture that stay together
    by_picture = defaultdict(list)
    for index, key in enumerate(keys):
        by_picture[key].append(index)
    units = []
    for indices in by_picture.values():
        rng.shuffle(indices)
        units += parts_of(indices, per_picture)
    rng.shuffle(units)

    def bucket(unit: list[int]) -> int:
        return max(lengths[index] for index in unit) // BUCKET

    # 2. batches of similar lengths from a pool
    batches, pool = [], []
    size = 0  # records in the pool
    for number, unit in enumerate(units, 1):
        pool.append(unit)
        size += len(unit)
        is_last = number == len(units)
        if size >= 50 * batch_size or is_last:
            # stable, so that units of one bucket keep their random order
            order = list(chain(*sorted(pool, key=bucket)))
            # whole batches only, so that every epoch has the same number; the rest goes into the
            # next pool
            whole = size if is_last else size - size % batch_size
            batches += [order[i : i + batch_size] for i in range(0, whole, batch_size)]
            pool = [order[whole:]] if size > whole else []
            size -= whole
    rng.shuffle(batches)
    return batches


def shifted(pixels: Tensor) -> Tensor:
    """Pictures (B, 3, R, R), each moved by up to a sixteenth of its side; borders are repeated."""
    count, size = len(pixels), pixels.shape[-1]
    moves = torch.randint(-(size // 16), size // 16 + 1, (2, count, 1))
    rows, columns = (torch.arange(size) + moves).clamp(0, size - 1).to(pixels.device)  # (B, R)
    number = torch.arange(count)[:, None, None]
    moved = pixels[number, :, rows[:, :, None], columns[:, None]]  # (B, R, R, 3)
    return moved.movedim(-1, 1)


class Weighted(list):
    """The records of several sources, `parts`; of an epoch's samples each source gives a share, its
    weight."""

    def __init__(self, parts: Sequence[Sequence[Record]], weights: Sequence[float]):
        super().__init__(chain(*parts))
        self.parts = parts
        shares = accumulate(weights, initial=0)
        bounds = [round(len(self) * share / sum(weights)) for share in shares]
        # samples of each source in an epoch
        self.counts = [end - start for start, end in pairwise(bounds)]
        if 0 in self.counts:
            raise UserError(
                f"--data: of weights {weights} one gives no sample to an epoch: raise it"
            )

    def numbers(self, seed: int, epoch: int) -> list[int]:
        """The numbers of an epoch's records: each source goes on where it ended in the epoch
        before."""
        numbers = []
        begin = 0
        for source, (part, taken) in enumerate(zip(self.parts, self.counts, strict=True)):
            size = len(part)
            first = epoch * taken
            of_source = []
            # passes over the source
            passes = range(first // size, -(-(first + taken) // size))
            for turn in passes:
                dice = Random(f"source/{seed}/{source}/{turn}")
                of_source += dice.sample(range(begin, begin + size), size)
            first -= passes.start * size
            numbers += of_source[first : first + taken]
            begin += size
        return numbers


class Order:
    """Which micro-batches a process reads at each of `total` steps: a pure function of the seed, so
    a run can start anywhere. A step takes `accumulate` micro-batches on each of `world_size`
    processes, an epoch's last step what is left.

    Raises UserError for steps that cannot be made, and for too few records for one.
    """

    def __init__(
        self,
        records: Sequence[Record],
        processor: Processor,
        settings: Settings,
        world: World,
    ):
        self.records, self.processor = records, processor
        self.seed, self.per_picture = settings.seed, settings.per_picture
        self.rank, self.world_size = world.rank, world.size
        self.batch_size, of_step = step_layout(settings, world.size)
        self.accumulate = of_step // world.size
        encoded = processor.tokenizer.encode(["".join(chain(*r.turns)) for r in records])
        # beside one picture: a batch of equal records has the same length whatever a picture's
        # tokens are
        more = [(len(r.pictures) - 1) * processor.config.num_image_tokens for r in records]
        self.lengths = [len(ids) + tokens for ids, tokens in zip(encoded, more, strict=True)]
        self.most_bad = settings.most_bad(len(records))
        self.micro_batches = -(-len(records) // self.batch_size)
        if self.micro_batches < of_step:
            raise UserError(
                f"{len(records)} records make {self.micro_batches} micro-batches, but a step takes "
                f"{of_step}: lower --step-batch or --batch-size, or give more data"
            )
        self.steps_per_epoch = -(-self.micro_batches // of_step)
        whole = (settings.epochs or 1) * self.steps_per_epoch
        if settings.epochs is None and not settings.is_embedded:
            whole = max(whole, min(STEPS, MOST_EPOCHS * self.steps_per_epoch))
        self.total = settings.steps or whole

    def plan(self, epoch: int, first: int) -> Iterable[list[int]]:
        """The numbers of the records of an epoch's micro-batches, of all processes, from number
        `first` on."""
        drawn = range(len(self.records))
        if isinstance(self.records, Weighted):
            drawn = self.records.numbers(self.seed, epoch)
        # a record that is drawn again does not stay with itself
        times = defaultdict(count)
        keys = [(self.records[n].key, next(times[n])) for n in drawn]
        lengths = [self.lengths[n] for n in drawn]
        batches = plan_epoch(
            keys,
            lengths,
            self.batch_size,
            self.seed,
            epoch,
            self.per_picture,
        )
        return (list(map(drawn.__getitem__, batch)) for batch in batches[first:])

    def steps(
        self, first: int, workers: int | None = 0, pin: bool = False
    ) -> Iterator[list[MicroBatch]]:
        """This process's micro-batches of each step, from step `first` to the last. All processes
        have the same number in a step; of the last round of an epoch, if there are too few, those
        that remain get an empty one."""
        step = first
        over = self.micro_batches % self.world_size
        while step < self.total:
            epoch, done = divmod(step, self.steps_per_epoch)
            plan = self.plan(epoch, done * self.accumulate * self.world_size)
            share = islice(plan, self.rank, None, self.world_size)
            of_epoch = MicroBatches(self.records, self.processor, f"{self.seed}/{epoch}")
            batches = load_batches(of_epoch, share, workers, pin)
            if 0 < over <= self.rank:
                batches = chain(batches, [collate([], self.processor)])
            for _ in range(min(self.steps_per_epoch - done, self.total - step)):
                yield list(islice(batches, self.accumulate))
                step += 1
