"""Pack training data into tar shards: a few large files in place of very many small ones.

In: data in files that `train.finetune` reads. Out: PREFIX-000.tar, PREFIX-001.tar, … with their
indices: each picture once, as the file that it was, beside its questions; see
`train/data/shards.py`.

    python -m train.shard vqav2:DIR --out shards/vqa
    python -m train.finetune --data shards:'shards/vqa-{000..082}.tar' …

Shards get their names when all are written: a command that fails or is killed leaves none.
"""

import glob
import json
import random
import tarfile
from collections import defaultdict
from collections.abc import Sequence
from io import BytesIO
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from eval.command import add_flag, command_parser, positive, whole
from eval.records import ROLES, SOURCES, Picture, Record, Refusal, groups_of, read_data
from model.common import UserError, file_errors, run_command, shown, sync_files, sync_folder
from train.data.shards import PICTURES, index_of
from train.settings import Settings


def pack(
    records: Sequence[Record], prefix: Path, per_shard: int = 1000, max_bad: int = 0
) -> list[Path]:
    """Write the shards of `records` and their indices; returns the shards. Records that are left
    out are printed.

    Pictures are shuffled; all records of a picture are in one sample. Raises UserError, before
    anything is written, for more than `max_bad` records without their pictures, and where shards of
    this prefix are there.
    """
    groups, of_group, bad, ends = groups_of(records), defaultdict(list), 0, ", ".join(PICTURES)
    for record in records:
        problems = [
            picture.problem
            if isinstance(picture, Refusal)
            else f"{picture}: not found, or ends in none of {ends}"
            for picture in record.pictures
            if isinstance(picture, Refusal)
            or picture.suffix.lower() not in PICTURES
            or not picture.is_file()
        ]
        if problems:  # training finds out whether its pictures can be decoded
            bad += 1
            print(f"left out {shown(f'{record.name}: {problems[0]}', 600)}")
        else:
            of_group[groups[record.name]].append(record)
    if bad > max_bad or not of_group:
        raise UserError(
            f"{bad} of {len(records)} records cannot be used: see above, --images and --max-bad"
        )
    samples = random.Random("shard/0").sample(list(of_group.values()), len(of_group))
    starts = range(0, len(samples), per_shard)
    paths = [prefix.with_name(f"{prefix.name}-{number:03}.tar") for number in range(len(starts))]
    with file_errors(prefix):
        prefix.parent.mkdir(parents=True, exist_ok=True)
        if list(prefix.parent.glob(f"{glob.escape(prefix.name)}-[0-9]*.tar")):
            raise UserError(
                f"--out {prefix}: there are shards of this name: delete them, or give another name"
            )
        # named when all are written: a part of them, left by a killed command, would be trained on
        # as if it were all
        with TemporaryDirectory(prefix=f".{prefix.name[:40]}-", dir=prefix.parent) as name:
            folder = Path(name)
            for path, start in zip(paths, tqdm(starts, "shards"), strict=True):
                write_shard(folder / path.name, samples[start : start + per_shard], start)
                index_of(folder / path.name)
            sync_files(folder)
            for file in folder.iterdir():
                file.rename(prefix.with_name(file.name))
            sync_folder(prefix.parent)
    return paths


def write_shard(path: Path, samples: Sequence[Sequence[Record]], first: int) -> None:
    """Write samples, numbered from `first`: the distinct pictures of each, and its questions as
    JSON."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, sample in enumerate(samples, first):
            pictures = list(
                dict.fromkeys(chain.from_iterable(record.pictures for record in sample))
            )
            places = [f".{place}" for place in range(len(pictures))] if len(pictures) > 1 else [""]
            files = [
                (place + p.suffix.lower(), p.read_bytes())
                for place, p in zip(places, pictures, strict=False)
            ]
            questions = [question(record, pictures) for record in sample]
            files.append(
                (
                    ".json",
                    json.dumps(questions, ensure_ascii=False).encode("utf-8", "backslashreplace"),
                )
            )
            for name, content in files:
                member = tarfile.TarInfo(f"{number:09d}{name}")
                member.size = len(content)
                tar.addfile(member, BytesIO(content))


def question(record: Record, pictures: Sequence[Picture]) -> dict:
    """A record as a .json holds it; `pictures` are those of the sample."""
    entry = {"name": record.name, "pictures": list(map(pictures.index, record.pictures))}
    more = {"answers": record.answers, "type": record.kind}
    entry |= {name: value for name, value in more.items() if value}
    if len(record.turns) > 1:
        said = [
            {"from": role, "value": text}
            for turn in record.turns
            for role, text in zip(ROLES, turn, strict=True)
        ]
        return entry | {"conversations": said}
    return entry | {"prefix": record.prefix, "suffix": record.suffix}


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser("train.shard", __doc__)
    parser.add_argument("data", help=SOURCES)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="PREFIX", help="shards are PREFIX-000.tar, …"
    )
    add_flag(
        parser,
        "--per-shard",
        "samples of a shard: pictures with their questions",
        1000,
        type=positive,
    )
    add_flag(
        parser,
        "--max-bad",
        "records without pictures to leave out, at most",
        Settings.max_bad,
        type=whole(0),
    )
    add_flag(parser, "--prompt", "prompt of a VQAv2 question", Settings.prompt)
    add_flag(
        parser,
        "--images",
        "folder of the pictures (default: vqav2:DIR itself, or where the FILE is)",
    )
    args = parser.parse_args(argv)
    if not args.out.name:
        raise UserError(f"--out {args.out}: is no prefix of names: give one, such as shards/vqa")
    if args.data == "embedded":
        raise UserError(
            "embedded: these pictures are drawn while training needs them: give data in files"
        )
    paths = pack(
        read_data(args.data, args.images, args.prompt), args.out, args.per_shard, args.max_bad
    )
    print(f"{len(paths)} shards: --data shards:'{args.out}-{{000..{len(paths) - 1:03}}}.tar'")


if __name__ == "__main__":
    run_command(main)
