"""The records that `--data` names: embedded scenes, VQAv2's official files, a user's JSON lines, or tar shards."""

from collections.abc import Sequence

from eval.records import Record, read_data
from model.common import UserError
from train.data.shards import Shards
from train.settings import Settings


def read_records(settings: Settings, split: str = "train") -> Sequence[Record]:
    """The records of a split. Raises UserError for data that is absent or empty."""
    kind, _, path = settings.data.partition(":")
    share = {"fraction": settings.fraction, "validation": settings.validation, "seed": settings.seed}
    share["sampled"] = settings.answers == "sampled"
    if kind == "shards" and path:
        records: Sequence[Record] = Shards(path, split, buffer=settings.shuffle_buffer, **share)
    else:
        records = read_data(
            settings.data,
            split,
            images=settings.images,
            allow_outside=settings.allow_outside,
            prompt=settings.prompt,
            tasks=settings.tasks.split(","),
            samples=settings.samples,
            **share,
        )
    if not records:
        raise UserError(f"--data {settings.data}: no {split} records: check --validation and --fraction")
    return records
