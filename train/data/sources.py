"""The records that `--data` and `--eval-data` name: one source, or several together.

In: settings. Out: a list of records, `Weighted` where the sources have shares of an epoch, or `Shards`.
"""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from os.path import realpath
from pathlib import Path

from eval.records import Record, embedded_records, read_data, source_parts, split_records
from model.common import UserError
from train.data.batches import Weighted
from train.settings import Settings

WEIGHT = re.compile(r"(.+)@(\d{1,9}\.?\d*|\.\d+)")


def read_records(settings: Settings, split: str = "train") -> Sequence[Record]:
    """The records of the split "train" or "validation", which is --eval-data where it is given; those of its pictures
    that are trained on are counted on stderr. Raises UserError."""
    if not settings.eval_data:
        return read_sources("--data", settings.data, split, settings, settings.fraction, settings.validation)
    asked = read_sources("--eval-data", settings.eval_data, "train", settings)
    if split == "validation":
        return asked
    learned = read_sources("--data", settings.data, split, settings, settings.fraction)
    files = [
        {realpath(path) for record in records for path in record.pictures if isinstance(path, Path)}
        for records in (learned, asked)
        if isinstance(records, list)  # pictures in tar shards have no names
    ]
    common = set.intersection(*files) if len(files) == 2 else ()
    if common and os.environ.get("RANK", "0") == "0":  # the first process of torchrun
        count = f"{len(common)} of the {len(files[1])} pictures of --eval-data are in --data, too"
        print(f"warning: {count}: the scores say little about new pictures", file=sys.stderr)
    return learned


def read_sources(
    flag: str, sources: Sequence[str], split: str, settings: Settings, fraction: float = 1.0, validation: float = 0.0
) -> Sequence[Record]:
    """The records of all sources in a split; files are split together, so that a picture is in one split of all.

    Raises UserError for more than --max-bad records of which their files already say that they cannot be used.
    """
    given = " ".join([flag, *sources])
    matches = [WEIGHT.fullmatch(source) for source in sources]
    weights = [float(match[2]) for match in matches if match]
    if weights and (flag == "--eval-data" or len(weights) < len(sources) or len(sources) == 1 or not all(weights)):
        raise UserError(f"{given}: @WEIGHT, above 0, stands at every source of several in --data, or at none")
    sources = [match[1] if match else source for match, source in zip(matches, sources, strict=True)]
    kinds, sampled = [source_parts(source)[0] for source in sources], settings.answers == "sampled"
    share = {"fraction": fraction, "validation": validation, "seed": settings.seed}
    if "shards" in kinds:
        from train.data.shards import Shards

        if weights or {*kinds} != {"shards"}:
            raise UserError(f"{given}: tar shards stand alone, without weights: pack the others with train.shard")
        patterns = [str(source_parts(source)[1]) for source in sources]
        records = Shards(*patterns, split=split, sampled=sampled, buffer=settings.shuffle_buffer, **share)
    else:
        parts, files = [], []
        for source, kind in zip(sources, kinds, strict=True):
            if kind == "embedded":
                side = "validation" if flag == "--eval-data" else split
                part = embedded_records(settings.tasks.split(","), side, settings.samples, settings.seed)
            else:
                part = [replace(r, sampled=sampled) for r in read_data(source, settings.images, settings.prompt)]
            if len(sources) > 1:  # which may use one name or key for different things
                part = [replace(r, name=f"{source}: {r.name}", key=f"{source}: {r.key}") for r in part]
            parts.append(part)
            files += [] if kind == "embedded" else part
        left_out = {r.name for r in files} - {r.name for r in split_records(files, split, **share)}
        parts = [[r for r in part if r.name not in left_out] for part in parts]
        records = Weighted(parts, weights) if weights and split == "train" else list(chain(*parts))
    bad = [r for r in records if not r.turns] if isinstance(records, list) else []  # shards say it when they are read
    if len(bad) > settings.max_bad:
        problem = (
            f"{len(bad)} records cannot be used, more than --max-bad {settings.max_bad}: correct them, or raise it"
        )
        raise UserError(f"{given}: {problem}; the first: {bad[0].name}: {bad[0].pictures[0].problem}")
    if not len(records) or isinstance(records, Weighted) and not all(records.sizes):
        raise UserError(f"{given}: no {split} records: check --validation and --fraction")
    return records
