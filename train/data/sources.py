"""The records that `--data` and `--eval-data` name: one source, or several together; or that a
program has made.

In: settings, and examples in memory. Out: a list of records, or `Weighted` with shares of an epoch.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from eval.data import records as readers
from eval.data.files import placed
from eval.data.records import (
    Record,
    contents_of,
    embedded_records,
    read_data,
    record_of,
    split_records,
)
from model.common import UserError, without_none
from train.data.batches import Weighted
from train.settings import Settings

WEIGHT = re.compile(r"(.+)@(\d{1,9}(?:\.\d*)?|\.\d+)")
MEMORY = "python:"  # the kind of source, in config.json, of examples that a program has made


@dataclass(frozen=True, eq=False)
class ExamplePicture:
    """A picture of an example. It is read anew whenever it is opened, since a data set may decode
    its pictures."""

    examples: Sequence[Mapping] = field(repr=False)
    number: int
    place: int  # among the pictures of the example
    digest: str  # of size and pixels

    def __call__(self) -> Any:
        return example_record(self.examples[self.number]).pictures[self.place]

    def __str__(self) -> str:
        return self.digest


def example_record(example: Mapping, folder: str | Path = ".") -> Record:
    """The record of an example; Hugging Face's data sets have None for what is absent."""
    return record_of(without_none(example), folder)


def example_records(
    examples: Sequence[Mapping],
    name: str,
    folder: str | Path,
) -> list[Record]:
    """The records of a program's examples; pictures in files stay there, in `folder` if their paths
    are relative.

    name: before the number of each, for messages. Raises UserError if none can be used.
    """

    def make(number: int) -> Record:
        record = example_record(examples[number], folder)
        pictures = []
        for place, picture in enumerate(record.pictures):
            if not isinstance(picture, Path):
                picture = ExamplePicture(examples, number, place, readers.name_of(picture))
            pictures.append(picture)
        return replace(record, pictures=tuple(pictures))

    return readers.read_records(name, make, placed(range(len(examples))))


def read_split(
    settings: Settings,
    split: str = "train",
    memory: Mapping[str, list[Record]] = {},
) -> Sequence[Record]:
    """The records of the split "train" or "validation", which is --eval-data where it is given;
    what of it is trained on is counted on stderr. Raises UserError."""
    if not settings.eval_data:
        return read_sources("--data", settings.data, split, settings, memory)
    asked = read_sources("--eval-data", settings.eval_data, "train", settings, memory)
    if split == "validation":
        return asked
    learned = read_sources("--data", settings.data, split, settings, memory)
    if os.environ.get("RANK", "0") == "0":  # the first process of torchrun
        contents = contents_of([*asked, *learned])
        held_out = set().union(*contents[: len(asked)])
        common = held_out.intersection(chain(*contents[len(asked) :]))
        if common:
            print(
                f"warning: {len(common)} of the {len(held_out)} pictures, or texts without, of "
                "--eval-data are in --data: the scores say little of others",
                file=sys.stderr,
            )
    return learned


def read_sources(
    flag: str,
    sources: Sequence[str],
    split: str,
    settings: Settings,
    memory: Mapping[str, list[Record]],
) -> Sequence[Record]:
    """The records of all sources in a split; files are split together, so that a picture is in one
    split of all.

    Raises UserError for more than --max-bad records of which their files already say that they
    cannot be used.
    """
    # 1. the records of each source
    given = " ".join([flag, *sources])
    names, weights = read_weights(given, flag, sources)
    parts, files = [], []
    for source in names:
        part = read_source(source, flag, split, settings, memory)
        if len(names) > 1:  # which may use one name or key for different things
            part = [replace(r, name=f"{source}: {r.name}", key=f"{source}: {r.key}") for r in part]
        parts.append(part)
        if source != "embedded":
            files += part

    # 2. those of the split
    fraction = settings.fraction if flag == "--data" else 1.0
    validation = 0.0 if settings.eval_data else settings.validation
    kept = split_records(files, split, fraction, validation, settings.seed)
    left_out = {r.name for r in files} - {r.name for r in kept}
    for number, part in enumerate(parts):
        parts[number] = [r for r in part if r.name not in left_out]
    records = list(chain(*parts))

    # 3. whether they can be used
    bad = [r for r in records if not r.turns]
    most = settings.most_bad(len(records))
    if len(bad) > most:
        first = f"{bad[0].name}: {bad[0].pictures[0].problem}"
        raise UserError(
            f"{given}: {len(bad)} of {len(records)} records cannot be used, more than {most}: "
            f"correct them, or raise --max-bad (up to half of all); the first: {first}"
        )
    is_weighted = weights and split == "train"
    if not records or is_weighted and not all(parts):
        raise UserError(f"{given}: no {split} records: check --validation and --fraction")
    return Weighted(parts, weights) if is_weighted else records


def read_weights(
    given: str,
    flag: str,
    sources: Sequence[str],
) -> tuple[list[str], list[float]]:
    """The sources without their weights, and these, if there are any. Raises UserError."""
    names, weights = [], []
    for source in sources:
        match = WEIGHT.fullmatch(source)
        if match:
            source = match[1]
            weights.append(float(match[2]))
        names.append(source)
    is_partial = len(weights) < len(sources) or not all(weights)
    if weights and (is_partial or len(sources) == 1 or flag == "--eval-data"):
        raise UserError(
            f"{given}: @WEIGHT, above 0, stands at every source of several in --data, or at none"
        )
    return names, weights


def read_source(
    source: str,
    flag: str,
    split: str,
    settings: Settings,
    memory: Mapping[str, list[Record]],
) -> list[Record]:
    """All records of a source; of the embedded scenes those of a split. Raises UserError."""
    if source == "embedded":
        side = "validation" if flag == "--eval-data" else split
        tasks = settings.tasks.split(",")
        return embedded_records(tasks, side, settings.samples, settings.seed)
    records = memory.get(source)
    if records is None and source.startswith(MEMORY):
        raise UserError(
            f"{flag} {source}: a program has made these data: go on there, finetune(resume=…, data=…)"
        )
    if records is None:
        records = read_data(source, settings.images, settings.prompt, settings.masks_file)
    return [replace(record, sampled=settings.answers == "sampled") for record in records]
