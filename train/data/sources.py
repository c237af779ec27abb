"""The records that `--data` and `--eval-data` name: one source, or several together.

In: settings. Out: a list of records, or `Shards`, which `train/data/batches.py` accepts as a list.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from os.path import realpath
from pathlib import Path

from eval.data import some
from eval.records import Record, read_data, source_parts, split_records
from model.common import UserError
from train.data.shards import Shards
from train.settings import Settings


def read_records(settings: Settings, split: str = "train") -> Sequence[Record]:
    """The records of the split "train" or "validation". Raises UserError for data that is absent or empty.

    Of several sources, no picture is in both splits. With --eval-data, which is the validation split, such pictures are
    counted on stderr.
    """
    if not settings.eval_data:
        records = read_sources("--data", settings.data, split, settings, settings.fraction, settings.validation)
    elif split == "validation":
        records = read_sources("--eval-data", settings.eval_data, "train", settings)
    else:
        records = read_sources("--data", settings.data, split, settings, settings.fraction)
        warn_of_common(records, read_sources("--eval-data", settings.eval_data, "train", settings))
    return records


def read_sources(
    flag: str, sources: Sequence[str], split: str, settings: Settings, fraction: float = 1.0, validation: float = 0.0
) -> Sequence[Record]:
    """The records of all sources in a split; files are split together, so that a picture is in one split of all."""
    kinds, sampled = [source_parts(source)[0] for source in sources], settings.answers == "sampled"
    share = {"fraction": fraction, "validation": validation, "seed": settings.seed}
    if "shards" in kinds:
        if {*kinds} != {"shards"}:
            raise UserError(f"{flag} {' '.join(sources)}: tar shards stand alone: pack the others with train.shard")
        patterns = [str(source_parts(source)[1]) for source in sources]
        records = Shards(*patterns, split=split, sampled=sampled, buffer=settings.shuffle_buffer, **share)
    else:
        options = {name: getattr(settings, name) for name in ("images", "prompt", "seed", "samples")}
        options |= {"tasks": settings.tasks.split(","), "sampled": sampled}
        drawn, files = [], []
        for source, kind in zip(sources, kinds, strict=True):
            is_drawn = kind == "embedded"
            side = "validation" if flag == "--eval-data" else split
            of_source = read_data(source, side if is_drawn else "all", **options)
            if len(sources) > 1:  # which may use one name or key for different things
                names = [{"name": f"{source}: {r.name}", "key": f"{source}: {r.key}"} for r in of_source]
                of_source = [replace(record, **name) for record, name in zip(of_source, names, strict=True)]
            (drawn if is_drawn else files).extend(of_source)
        records = [*drawn, *split_records(files, split, **share)]
    if not len(records):
        raise UserError(f"{flag} {' '.join(sources)}: no {split} records: check --validation and --fraction")
    return records


def warn_of_common(learned: Sequence[Record], asked: Sequence[Record]) -> None:
    """Print a line on stderr if pictures of --eval-data are trained on. Those in tar shards have no names."""
    files = [
        {realpath(path) for record in records for path in record.pictures if isinstance(path, Path)}
        for records in (learned, asked)
        if not isinstance(records, Shards)
    ]
    common = sorted(set.intersection(*files)) if len(files) == 2 else []
    if common and os.environ.get("RANK", "0") == "0":  # the first process of torchrun
        count = f"{len(common)} of the {len(files[1])} pictures of --eval-data are in --data, too"
        names = some([Path(path).name for path in common])
        print(f"warning: {count} ({names}): the scores say little about new pictures", file=sys.stderr)
