"""The records that `--data` names: embedded scenes, VQAv2's official files, a user's JSON lines, or tar shards."""

from collections.abc import Sequence
from pathlib import Path

from model.common import UserError
from train.data.records import Record, embedded_records, jsonl_records, vqav2_records
from train.data.shards import Shards
from train.settings import Settings


def read_records(settings: Settings, split: str = "train") -> Sequence[Record]:
    """The records of a split. Raises UserError for data that is absent or empty."""
    kind, _, path = settings.data.partition(":")
    share = {"split": split, "fraction": settings.fraction, "validation": settings.validation, "seed": settings.seed}
    images = None if settings.images is None else Path(settings.images)
    pictures = {"images": images, "allow_outside": settings.allow_outside}
    if settings.data == "embedded":
        return embedded_records(settings.tasks.split(","), split, settings.samples, settings.seed)
    if kind == "vqav2" and path:
        records = vqav2_records(Path(path), settings.prompt, sampled=settings.answers == "sampled", **share, **pictures)
    elif kind == "jsonl" and path:
        records = jsonl_records(Path(path), **share, **pictures)
    elif kind == "shards" and path:
        records = Shards(path, buffer=settings.shuffle_buffer, sampled=settings.answers == "sampled", **share)
    else:
        raise UserError(f"--data {settings.data}: expected embedded, vqav2:DIR, jsonl:FILE or shards:PATTERN")
    if not records:
        raise UserError(f"--data {settings.data}: no {split} records: check --validation and --fraction")
    return records
