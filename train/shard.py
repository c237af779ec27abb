"""Pack training data into tar shards: a few large files in place of very many small ones.

In: any data that `train.finetune` reads. Out: PREFIX-000.tar, PREFIX-001.tar, … with their indices, in webdataset's
layout: each picture once, as the file that it was, beside its questions.

    python -m train.shard vqav2:DIR --out shards/vqa
    python -m train.finetune --data shards:'shards/vqa-{000..082}.tar' …

A shard is written atomically, so an interrupted command that is given again continues with the first missing shard.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.records import SOURCES
from model.common import UserError, run_command
from train.data.pack import make
from train.data.sources import read_records
from train.flags import FlagParser, add_flags, check_ranges, flag, from_values
from train.settings import Settings


@dataclass(frozen=True)
class PackOptions:
    """The flags of this command, beside the data and --out."""

    per_shard: int = flag(1000, "pictures of a shard, at most", least=1, metavar="N")
    megabytes: float = flag(1000.0, "picture files of a shard in 10^6 bytes, at most", least=1e-6, metavar="M")
    prompt: str = flag(Settings.prompt, "prompt of a VQAv2 question")
    samples: int = flag(Settings.samples, "questions of the embedded data", least=1, most=10**8, metavar="N")
    seed: int = flag(0, "of the order of pictures", least=0)
    max_bad: int = flag(
        Settings.max_bad, "records without a readable picture to leave out before giving up", least=0, metavar="N"
    )
    images: str | None = flag(None, "folder of the pictures (default: vqav2:DIR itself, or where the FILE is)")
    allow_outside: bool = flag(False, "pack pictures outside of that folder too, if names lead there")


def main(argv: Sequence[str] | None = None) -> None:
    parser = FlagParser(prog="python -m train.shard", description=__doc__)
    parser.add_argument("data", help=SOURCES)
    parser.add_argument("--out", type=Path, required=True, metavar="PREFIX", help="shards are PREFIX-000.tar, …")
    add_flags(parser, PackOptions)
    given = vars(parser.parse_args(argv))
    data, out = given.pop("data"), given.pop("out")
    options = from_values(PackOptions, given)
    check_ranges(options)
    if data.startswith("shards:"):
        raise UserError(f"{data}: these are shards already: give what they were made of")
    # all records: --validation and --fraction apply where the shards are read
    shared = {name: getattr(options, name) for name in ("prompt", "samples", "seed", "images", "allow_outside")}
    records = read_records(Settings(data=(data,), fraction=1.0, validation=0.0, answers="sampled", **shared))
    paths = make(records, out, options.per_shard, options.megabytes, options.seed, options.max_bad)
    first, last = (path.stem.removeprefix(f"{out.name}-") for path in (paths[0], paths[-1]))
    pattern = out.with_name(f"{out.name}-{{{first}..{last}}}.tar")
    print(f"{len(paths)} shards: --data shards:'{pattern}'")


if __name__ == "__main__":
    run_command(main)
