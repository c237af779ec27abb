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
from eval.data.records import (
    Record,
    contents_of,
    embedded_records,
    read_data,
    record_of,
    source_parts,
    split_records,
)
from model.common import UserError
from train.data.batches import Weighted
from train.settings import Settings

WEIGHT = re.compile(r"(.+)@(\d{1,9}(?:\.\d*)?|\.\d+)")
MEMORY = "python:"  # the kind of source, in config.json, of examples that a program has made


@dataclass(frozen=True, eq=False)
class HeldPicture:
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
    return record_of({name: value for name, value in example.items() if value is not None}, folder)


def held_records(examples: Sequence[Mapping], name: str, folder: str | Path) -> list[Record]:
    """The records of a program's examples; pictures in files stay there, in `folder` if their paths
    are relative.

    name: before the number of each, for messages. Raises UserError if none can be used.
    """

    def held(number: int) -> Record:
        record, pictures = example_record(examples[number], folder), []
        for place, picture in enumerate(record.pictures):
            if not isinstance(picture, Path):
                picture = HeldPicture(examples, number, place, readers.name_of(picture))
            pictures.append(picture)
        return replace(record, pictures=tuple(pictures))

    return readers.read_records(
        name, held, [(f"[{number}]", number) for number in range(len(examples))]
    )


def read_records(
    settings: Settings, split: str = "train", memory: Mapping[str, list[Record]] = {}
) -> Sequence[Record]:
    """The records of the split "train" or "validation", which is --eval-data where it is given;
    what of it is trained on is counted on stderr. Raises UserError."""
    if not settings.eval_data:
        return read_sources("--data", settings.data, split, settings, memory)
    asked = read_sources("--eval-data", settings.eval_data, "train", settings, memory)
    if split == "validation":
        return asked
    learned = read_sources("--data", settings.data, split, settings, memory)
    is_first = os.environ.get("RANK", "0") == "0"  # the first process of torchrun
    if is_first:
        contents = contents_of([*asked, *learned])
        held_out = set().union(*contents[: len(asked)])
        common = held_out.intersection(chain(*contents[len(asked) :]))
        count = f"{len(common)} of the {len(held_out)} pictures, or texts without, of --eval-data"
        if common:
            print(
                f"warning: {count} are in --data: the scores say little of others", file=sys.stderr
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
    given = " ".join([flag, *sources])
    matches = [WEIGHT.fullmatch(source) for source in sources]
    weights = [float(match[2]) for match in matches if match]
    if weights and (
        flag == "--eval-data"
        or len(weights) < len(sources)
        or len(sources) == 1
        or not all(weights)
    ):
        raise UserError(
            f"{given}: @WEIGHT, above 0, stands at every source of several in --data, or at none"
        )
    sources = [
        match[1] if match else source for match, source in zip(matches, sources, strict=True)
    ]
    if any(source.startswith(MEMORY) and source not in memory for source in sources):
        raise UserError(
            f"{given}: a program has made these data: go on there, finetune(resume=…, data=…)"
        )
    kinds = [MEMORY if source in memory else source_parts(source)[0] for source in sources]
    fraction, validation = settings.fraction if flag == "--data" else 1.0, settings.validation
    share = {
        "fraction": fraction,
        "validation": 0.0 if settings.eval_data else validation,
        "seed": settings.seed,
    }
    parts, files = [], []
    for source, kind in zip(sources, kinds, strict=True):
        if kind == "embedded":
            side = "validation" if flag == "--eval-data" else split
            part = embedded_records(
                settings.tasks.split(","), side, settings.samples, settings.seed
            )
        else:
            part = memory.get(source) or read_data(source, settings.images, settings.prompt)
            part = [replace(r, sampled=settings.answers == "sampled") for r in part]
        if len(sources) > 1:  # which may use one name or key for different things
            part = [replace(r, name=f"{source}: {r.name}", key=f"{source}: {r.key}") for r in part]
        parts.append(part)
        files += [] if kind == "embedded" else part
    left_out = {r.name for r in files} - {r.name for r in split_records(files, split, **share)}
    parts = [[r for r in part if r.name not in left_out] for part in parts]
    records = Weighted(parts, weights) if weights and split == "train" else list(chain(*parts))
    bad = [r for r in records if not r.turns]
    most = settings.most_bad(len(records))
    if len(bad) > most:
        problem = f"{len(bad)} of {len(records)} records cannot be used, more than {most}"
        first = f"{bad[0].name}: {bad[0].pictures[0].problem}"
        raise UserError(
            f"{given}: {problem}: correct them, or raise --max-bad (up to half of all); the first: "
            f"{first}"
        )
    if not len(records) or isinstance(records, Weighted) and not all(records.sizes):
        raise UserError(f"{given}: no {split} records: check --validation and --fraction")
    return records
