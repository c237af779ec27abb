"""The records that `--data` and `--eval-data` name, one source or a mixture of several.

In: settings. Out: a sequence of records, or a `Mixture`, which `train/data/batches.py` accepts instead of a list.
"""

import random
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from eval.datasets import real_path, some
from eval.records import Record, read_data, source_parts, split_records
from model.common import UserError
from train.data.batches import CHARACTERS, Planned, text_length
from train.data.shards import Shards
from train.settings import Settings

WEIGHT = re.compile(r"(.+)@(\d+\.?\d*|\.\d+)")


def read_records(
    settings: Settings, split: str = "train", known: dict[str, list[Record]] | None = None
) -> Sequence[Record]:
    """The records of the split "train" or "validation". Raises UserError for data that is absent or empty.

    known: filled with the records of every file, by source, so that a second call reads none again. Of several sources,
    no picture is in both splits. With --eval-data, which is the validation split, such pictures are counted on stderr.
    """
    is_own = split == "validation" and settings.eval_data
    flag, sources = ("--eval-data", settings.eval_data) if is_own else ("--data", settings.data)
    names, weights = _weights(flag, sources)
    asked = [one for one in _weights("--eval-data", settings.eval_data)[0] if one != "embedded"]  # has no files
    known = {} if known is None else known
    parts = _read(settings, names, split, known)
    if not any(map(len, parts)):
        raise UserError(f"{flag} {' '.join(sources)}: no {split} records: check --validation and --fraction")
    if split == "train" and asked:
        _warn_of_common(parts, _read(settings, asked, "validation", known))
    if len(parts) == 1:
        return parts[0]
    if split == "validation":
        weights = None
    if weights is None and not any(isinstance(part, Shards) for part in parts):
        return [record for part in parts for record in part]
    return Mixture(parts, weights, settings.shuffle_buffer, names)


def _weights(flag: str, sources: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """The sources without their weights, and these; None where there are none. Raises UserError for useless ones."""
    found = [WEIGHT.fullmatch(source) for source in sources]
    if not any(found):
        return list(sources), None
    where = f"{flag} {' '.join(sources)}"
    if flag == "--eval-data":
        raise UserError(f"{where}: all of the held-out records are asked: leave @WEIGHT out")
    if len(sources) == 1:
        raise UserError(f"{where}: a weight is for a mixture: leave @WEIGHT out, or take --fraction for a part")
    if not all(found) or not all(float(one[2]) for one in found):
        raise UserError(f"{where}: give each source a weight above 0, or none to any")
    return [one[1] for one in found], [float(one[2]) for one in found]


def _read(
    settings: Settings, sources: Sequence[str], split: str, known: dict[str, list[Record]]
) -> list[Sequence[Record]]:
    """The records of each source in a split; files are split together, so that a picture is in one split of all."""
    sampled = settings.answers == "sampled"
    has_own = bool(settings.eval_data)
    share = {"fraction": 1.0 if has_own and split == "validation" else settings.fraction}
    share |= {"validation": 0.0 if has_own else settings.validation, "seed": settings.seed}
    whole = "train" if has_own else split  # the part of --eval-data, too, that is read: all of it
    parts: list[Sequence[Record]] = []
    files: list[tuple[int, Record]] = []
    for number, source in enumerate(sources):
        kind, path = source_parts(source)
        if kind == "shards":
            parts.append(Shards(str(path), whole, sampled=sampled, buffer=settings.shuffle_buffer, **share))
            continue
        records = known.get(source) or read_data(
            source,
            split if kind == "embedded" else "all",
            images=settings.images,
            allow_outside=settings.allow_outside,
            prompt=settings.prompt,
            sampled=sampled,
            seed=settings.seed,
            tasks=settings.tasks.split(","),
            samples=settings.samples,
        )
        if kind != "embedded":
            known[source] = records
        if len(sources) > 1:
            records = [of_source(record, source) for record in records]
        parts.append(records)
        files += [(number, record) for record in records if kind != "embedded"]
    if files:
        kept = {id(record) for record in split_records([record for _, record in files], whole, **share)}
        for number in {number for number, _ in files}:
            parts[number] = [record for owner, record in files if owner == number and id(record) in kept]
    return parts


def of_source(record: Record, source: str) -> Record:
    """A record of one of several sources, which may use one name or key for different things."""
    return replace(record, name=f"{source}: {record.name}", key=f"{source}: {record.key}")


def _warn_of_common(train: Sequence[Sequence[Record]], held_out: Sequence[Sequence[Record]]) -> None:
    """Print a line on stderr if pictures of --eval-data are trained on. Pictures in tar shards have no names."""
    learned, asked = (
        {
            real_path(picture)
            for part in parts
            if not isinstance(part, Shards)
            for record in part
            for picture in record.pictures
            if isinstance(picture, Path)
        }
        for parts in (train, held_out)
    )
    common = sorted(learned & asked)
    if common and not (dist.is_initialized() and dist.get_rank()):
        print(
            f"warning: {len(common)} of the {len(asked)} pictures of --eval-data are in --data, too "
            f"({some([Path(path).name for path in common])}): the scores say little about new pictures",
            file=sys.stderr,
        )


class Mixture(Planned):
    """Several sources in one order. Records are numbered through, source by source.

    weights: the share of each source in the samples of an epoch, None: each record once. buffer: how many samples are
    shuffled together where a source is a set of tar shards. sources: the name of each; records of tar shards get theirs
    when they are read.
    """

    def __init__(
        self, parts: Sequence[Sequence[Record]], weights: Sequence[float] | None, buffer: int, sources: Sequence[str]
    ):
        self.parts, self.weights, self.sources = parts, weights, sources
        self.ends = np.cumsum([len(part) for part in parts])
        self.samples = int(self.ends[-1])
        self.window = buffer if any(isinstance(part, Shards) for part in parts) else self.samples
        self.counts = [len(part) for part in parts]
        if weights is not None:
            bounds = np.round(np.cumsum(weights) / sum(weights) * self.samples).astype(int)
            self.counts = np.diff(bounds, prepend=0).tolist()
            for part, count, source in zip(parts, self.counts, sources, strict=True):
                if not len(part):
                    raise UserError("a source of the mixture has no records: check --validation and --fraction")
                if not count:
                    raise UserError(
                        f"{source}: its weight is less than one of an epoch's {self.samples:,} samples: raise it, or "
                        "leave the source out"
                    )

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> Record:
        number = int(np.searchsorted(self.ends, index, side="right"))
        part = self.parts[number]
        record = part[index - int(self.ends[number]) + len(part)]
        return of_source(record, self.sources[number]) if isinstance(part, Shards) else record

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The numbers of an epoch's samples: each source goes on where it has ended in the epoch before."""
        marks = np.repeat(np.arange(len(self.parts)), self.counts)
        np.random.default_rng((seed, epoch)).shuffle(marks)
        order = np.empty(self.samples, dtype=np.int64)
        for number, (part, count) in enumerate(zip(self.parts, self.counts, strict=True)):
            start, chosen = epoch * count, [np.empty(0, dtype=np.int64)]
            while (done := sum(map(len, chosen))) < count:
                turn, place = divmod(start + done, len(part))
                chosen.append(self._pass(number, f"{seed}/{number}", turn)[place : place + count - done])
            order[marks == number] = np.concatenate(chosen) + self.ends[number] - len(part)
        return order

    def _pass(self, number: int, seed: str, turn: int) -> np.ndarray:
        """The numbers of a source's records within it, each once; of tar shards the shards are shuffled."""
        part = self.parts[number]
        if isinstance(part, Shards):
            return part.order(seed, turn)
        numbers = list(range(len(part)))
        random.Random(f"mixture/{seed}/{turn}").shuffle(numbers)
        return np.array(numbers)

    def describe(self, numbers: Sequence[int], picture_tokens: int = 0) -> tuple[list, list[int]]:
        """The keys of records, and their approximate lengths in tokens, see `Shards.describe`."""
        keys: list = []
        lengths: list[int] = []
        for index in numbers:
            number = int(np.searchsorted(self.ends, index, side="right"))
            part = self.parts[number]
            within = index - int(self.ends[number]) + len(part)
            if isinstance(part, Shards):
                (key,), (length,) = part.describe([within], picture_tokens)
            else:
                record = part[within]
                key, length = record.key, text_length(record) // CHARACTERS
                length += (len(record.pictures) - 1) * picture_tokens
            keys.append((number, key))
            lengths.append(length)
        return keys, lengths
