"""Pack training data into tar shards: a few large files in place of very many small ones.

In: any data that `train.finetune` reads. Out: PREFIX-000.tar, PREFIX-001.tar, … with their indices, in webdataset's
layout: each picture once, as the file that it was, beside its questions.

    python -m train.shard vqav2:DIR --out shards/vqa
    python -m train.finetune --data shards:'shards/vqa-{000..082}.tar' …

A shard is written atomically, so an interrupted command that is given again continues with the first missing shard.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from model.common import UserError, run_command
from train.data.pack import make
from train.data.sources import read_records
from train.settings import Settings


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m train.shard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="embedded, vqav2:DIR (official files), or jsonl:FILE (image, prefix, suffix)")
    parser.add_argument("--out", type=Path, required=True, metavar="PREFIX", help="shards are PREFIX-000.tar, …")
    parser.add_argument(
        "--per-shard", type=int, default=1000, metavar="N", help="pictures of a shard, at most (default: %(default)s)"
    )
    parser.add_argument(
        "--megabytes",
        type=float,
        default=1000.0,
        metavar="M",
        help="picture files of a shard in 10^6 bytes, at most (default: %(default)s)",
    )
    parser.add_argument("--prompt", default=Settings.prompt, help="prompt of a VQAv2 question (default: %(default)r)")
    parser.add_argument(
        "--samples",
        type=int,
        default=Settings.samples,
        metavar="N",
        help="questions of the embedded data (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the order of pictures (default: %(default)s)")
    parser.add_argument(
        "--max-bad",
        type=int,
        default=Settings.max_bad,
        metavar="N",
        help="records without a readable picture to leave out before giving up (default: %(default)s)",
    )
    parser.add_argument("--images", help="folder of the pictures (default: that of vqav2:DIR, or where jsonl:FILE is)")
    parser.add_argument(
        "--allow-outside",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="pack pictures outside of that folder too, if names lead there (default: --no-allow-outside)",
    )
    args = parser.parse_args(argv)
    if args.per_shard < 1 or args.samples < 1 or not args.megabytes > 0:
        raise UserError("--per-shard, --samples and --megabytes must be above 0")
    if args.data.startswith("shards:"):
        raise UserError(f"{args.data}: these are shards already: give what they were made of")
    # all records: --validation and --fraction apply where the shards are read
    settings = Settings(
        data=args.data,
        prompt=args.prompt,
        samples=args.samples,
        seed=args.seed,
        fraction=1.0,
        validation=0.0,
        answers="sampled",
        images=args.images,
        allow_outside=args.allow_outside,
    )
    paths = make(read_records(settings), args.out, args.per_shard, args.megabytes, args.seed, args.max_bad)
    first, last = (path.stem.removeprefix(f"{args.out.name}-") for path in (paths[0], paths[-1]))
    pattern = args.out.with_name(f"{args.out.name}-{{{first}..{last}}}.tar")
    print(f"{len(paths)} shards: --data shards:'{pattern}'")


if __name__ == "__main__":
    run_command(main)
