"""The records that `--data` and `--eval-data` name, one source or a mixture of several.

In: settings. Out: a sequence of records, or a `Mixture`, which `train/data/batches.py` accepts instead of a list.
"""

import os
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

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
    known = {} if known is None else known
    is_eval = split == "validation" and bool(settings.eval_data)
    flag, given = ("--eval-data", settings.eval_data) if is_eval else ("--data", settings.data)
    sources, weights = _weights(flag, given)
    parts = _read(settings, sources, split, known)
    if not any(map(len, parts)):
        raise UserError(f"{flag} {' '.join(given)}: no {split} records: check --validation and --fraction")
    asked = [source for source in _weights("--eval-data", settings.eval_data)[0] if source != "embedded"]
    if split == "train" and asked:
        _warn_of_common(parts, _read(settings, asked, "validation", known))
    if len(parts) == 1:
        return parts[0]
    if weights and split == "train" or any(isinstance(part, Shards) for part in parts):
        return Mixture(parts, weights if split == "train" else None, settings.shuffle_buffer, sources)
    return [record for part in parts for record in part]


def _weights(flag: str, given: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """The sources without their weights, and these; None where there are none. Raises UserError for useless ones."""
    matches = [WEIGHT.fullmatch(source) for source in given]
    if not any(matches):
        return list(given), None
    if flag == "--eval-data" or len(given) == 1 or not all(match and float(match[2]) for match in matches):
        rule = "@WEIGHT, above 0, stands at each source of a mixture in --data, or at none"
        raise UserError(f"{flag} {' '.join(given)}: {rule}: add or leave out weights")
    return [match[1] for match in matches if match], [float(match[2]) for match in matches if match]


def _read(
    settings: Settings, sources: Sequence[str], split: str, known: dict[str, list[Record]]
) -> list[Sequence[Record]]:
    """The records of each source in a split; files are split together, so that a picture is in one split of all."""
    share = {"fraction": settings.fraction, "validation": settings.validation, "seed": settings.seed}
    side = split
    if settings.eval_data:  # nothing of --data is held out, and all of --eval-data is asked
        side, share["validation"] = "train", 0.0
        share["fraction"] = 1.0 if split == "validation" else settings.fraction
    options: dict[str, Any] = {"tasks": settings.tasks.split(",")}
    options |= {name: getattr(settings, name) for name in ("images", "allow_outside", "prompt", "seed", "samples")}
    sampled, parts, files = settings.answers == "sampled", [], []
    for number, source in enumerate(sources):
        kind, path = source_parts(source)
        if kind == "shards":
            parts.append(Shards(str(path), side, sampled=sampled, buffer=settings.shuffle_buffer, **share))
            continue
        if source not in known or kind == "embedded":
            known[source] = read_data(source, split if kind == "embedded" else "all", sampled=sampled, **options)
        parts.append([of_source(r, source) for r in known[source]] if len(sources) > 1 else known[source])
        files += [] if kind == "embedded" else [number]
    kept = {id(r) for r in split_records([r for number in files for r in parts[number]], side, **share)}
    for number in files:
        parts[number] = [record for record in parts[number] if id(record) in kept]
    return parts


def of_source(record: Record, source: str) -> Record:
    """A record of one of several sources, which may use one name or key for different things."""
    return replace(record, name=f"{source}: {record.name}", key=f"{source}: {record.key}")


def _warn_of_common(learned: Sequence[Sequence[Record]], asked: Sequence[Sequence[Record]]) -> None:
    """Print a line on stderr if pictures of --eval-data are trained on. Those in tar shards have no names."""
    files = []
    for parts in (learned, asked):
        records = chain.from_iterable(part for part in parts if not isinstance(part, Shards))
        files.append({real_path(path) for record in records for path in record.pictures if isinstance(path, Path)})
    common = sorted(files[0] & files[1])
    if common and os.environ.get("RANK", "0") == "0":  # the first process of torchrun
        count = f"{len(common)} of the {len(files[1])} pictures of --eval-data are in --data, too"
        names = some([Path(path).name for path in common])
        print(f"warning: {count} ({names}): the scores say little about new pictures", file=sys.stderr)


class Mixture(Planned):
    """The records of `sources` in one order, numbered through, source by source.

    weights: the share of each source in the samples of an epoch, None: each record once. buffer: how many samples are
    shuffled together where a source is a set of tar shards.
    """

    def __init__(
        self, parts: Sequence[Sequence[Record]], weights: Sequence[float] | None, buffer: int, sources: Sequence[str]
    ):
        self.parts, self.sources = parts, sources
        sizes = np.array([len(part) for part in parts])
        self.begins, self.samples = np.cumsum(sizes) - sizes, int(sizes.sum())
        self.window = buffer if any(isinstance(part, Shards) for part in parts) else self.samples
        self.counts = sizes  # samples of each source in an epoch
        if weights is not None:
            bounds = np.round(np.cumsum(weights) / sum(weights) * self.samples).astype(int)
            self.counts = np.diff(bounds, prepend=0)
            for size, count, source in zip(sizes, self.counts, sources, strict=True):
                if not size or not count:
                    problem = f"{size} records and {count} of an epoch's {self.samples:,} samples"
                    raise UserError(f"{source}: {problem}: leave it out, or give it more weight")

    def __len__(self) -> int:
        return self.samples

    def _place(self, index: int) -> tuple[int, int]:
        """The number of a record's source, and of the record in it."""
        number = int(np.searchsorted(self.begins, index, side="right")) - 1
        return number, int(index - self.begins[number])

    def __getitem__(self, index: int) -> Record:
        number, within = self._place(index)
        record = self.parts[number][within]
        return of_source(record, self.sources[number]) if isinstance(self.parts[number], Shards) else record

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """The numbers of an epoch's samples: each source goes on where it has ended in the epoch before."""
        marks = np.repeat(np.arange(len(self.parts)), self.counts)
        np.random.default_rng((seed, epoch)).shuffle(marks)
        order = np.empty(self.samples, dtype=np.int64)
        for number, (part, count) in enumerate(zip(self.parts, self.counts, strict=True)):
            if count:
                passes, start = divmod(epoch * count, len(part))
                turns = range(passes, passes - (start + count) // -len(part))
                numbers = np.concatenate([_order_of(part, f"{seed}/{number}", turn) for turn in turns])
                order[marks == number] = numbers[start : start + count] + self.begins[number]
        return order

    def describe(self, numbers: Sequence[int], picture_tokens: int = 0) -> tuple[list, list[int]]:
        """The keys of records, and their approximate lengths in tokens, see `Planned`."""
        keys, lengths = [], []
        for number, within in map(self._place, numbers):
            if isinstance(part := self.parts[number], Shards):
                (key,), (length,) = part.describe([within], picture_tokens)
            else:
                key, length = part[within].key, text_length(part[within]) // CHARACTERS
                length += (len(part[within].pictures) - 1) * picture_tokens
            keys.append((number, key))
            lengths.append(length)
        return keys, lengths


def _order_of(part: Sequence[Record], seed: str, turn: int) -> np.ndarray:
    """The numbers of a source's records, each once; of tar shards the shards are shuffled."""
    if isinstance(part, Shards):
        return part.order(seed, turn)
    return np.array(random.Random(f"mixture/{seed}/{turn}").sample(range(len(part)), len(part)))
