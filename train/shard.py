"""Pack training data into tar shards: a few large files in place of very many small ones.

In: any data that `train.finetune` reads. Out: PREFIX-000.tar, PREFIX-001.tar, … with their indices, in webdataset's
layout: each picture once, as the file that it was, beside its questions. `train/data/shards.py` reads them.

    python -m train.shard vqav2:DIR --out shards/vqa
    python -m train.finetune --data shards:'shards/vqa-{000..082}.tar' …

Shards get their names when all are written: a command that fails leaves none.
"""

import io
import json
import random
import re
import tarfile
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm import tqdm

from eval.own_files import ROLES
from eval.records import SOURCES, Picture, Record, Refusal, groups_of
from model.common import UserError, file_errors, run_command, shown, sync_files, sync_folder
from model.images import load_image
from train.data.shards import PICTURES, index_of
from train.data.sources import read_records
from train.flags import FlagParser, add_flags, check_ranges, flag, from_values
from train.settings import Settings


@dataclass(frozen=True)
class PackOptions:
    """The flags of this command, beside the data and --out."""

    per_shard: int = flag(1000, "samples of a shard: pictures with their questions", least=1, metavar="N")
    prompt: str = flag(Settings.prompt, "prompt of a VQAv2 question")
    samples: int = flag(Settings.samples, "questions of the embedded data", least=1, most=10**8, metavar="N")
    seed: int = flag(0, "of the order of pictures", least=0)
    max_bad: int = flag(Settings.max_bad, "records without their pictures to leave out, at most", least=0, metavar="N")
    images: str | None = flag(None, "folder of the pictures (default: vqav2:DIR itself, or where the FILE is)")
    allow_outside: bool = flag(False, "pack pictures outside of that folder too, if names lead there")


def pack(records: Sequence[Record], prefix: Path, per_shard: int, seed: int = 0, max_bad: int = 0) -> list[Path]:
    """Write the shards of `records` and their indices; returns the shards. Records that are left out are printed.

    Raises UserError for too many of these, before anything is written, and where shards of this prefix are there.
    """
    problems = {r.name: problem for r in records for problem in map(problem_of, r.pictures) if problem}
    for name, problem in problems.items():
        print(f"left out {shown(f'{name}: {problem}', 600)}")
    samples = group([r for r in records if r.name not in problems], seed)
    if len(problems) > max_bad or not samples:
        raise UserError(f"{len(problems)} of {len(records)} records cannot be used: see above, --images and --max-bad")
    starts = range(0, len(samples), per_shard)
    digits = max(3, len(str(len(starts) - 1)))
    paths = [prefix.with_name(f"{prefix.name}-{number:0{digits}}.tar") for number in range(len(starts))]
    with file_errors(prefix):
        prefix.parent.mkdir(parents=True, exist_ok=True)
        if any(re.fullmatch(rf"{re.escape(prefix.name)}-\d+\.tar", path.name) for path in prefix.parent.iterdir()):
            raise UserError(f"--out {prefix}: there are shards of this name: delete them, or give another name")
        with TemporaryDirectory(prefix=f".{prefix.name[:40]}-", dir=prefix.parent) as folder:
            for path, start in zip(paths, tqdm(starts, "shards"), strict=True):
                write_shard(Path(folder, path.name), samples[start : start + per_shard], start)
                index_of(Path(folder, path.name))
            sync_files(Path(folder))
            for file in Path(folder).iterdir():
                file.rename(prefix.with_name(file.name))
            sync_folder(prefix.parent)
    return paths


def problem_of(picture: Picture) -> str | None:
    """Why a picture cannot be packed. Training finds out whether its file can be decoded."""
    if isinstance(picture, Refusal):
        return picture.problem
    if isinstance(picture, Path) and not (picture.suffix[1:].lower() in PICTURES and picture.is_file()):
        return f"{picture}: not found, or ends in none of {', '.join(PICTURES)}"
    return None


def group(records: Sequence[Record], seed: int) -> list[list[Record]]:
    """The records of each picture together, the pictures shuffled, so that every shard is a random mixture."""
    groups, samples = groups_of(records), defaultdict(list)
    for record in records:
        samples[groups[record.name]].append(record)
    return random.Random(f"shard/{seed}").sample(list(samples.values()), len(samples))


def write_shard(path: Path, samples: Sequence[Sequence[Record]], first: int) -> None:
    """Write samples, numbered from `first`: the distinct pictures of each, and its questions as JSON."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, sample in enumerate(samples, first):
            pictures = dict(chain.from_iterable(zip(names_of(r), r.pictures, strict=True) for r in sample))
            files = [encode(picture) for picture in pictures.values()]
            places = [f"{place}." for place in range(len(files))] if len(files) > 1 else [""]
            members = [(place + ending, content) for place, (ending, content) in zip(places, files, strict=False)]
            questions = [question(record, list(pictures)) for record in sample]
            members.append(("json", json.dumps(questions, ensure_ascii=False).encode()))
            for name, content in members:
                member = tarfile.TarInfo(f"{number:09d}.{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def names_of(record: Record) -> list[Hashable]:
    """What tells a record's pictures from others: a path, or the record's key and the place there."""
    return [one if isinstance(one, Path) else (record.key, place) for place, one in enumerate(record.pictures)]


def encode(picture: Picture) -> tuple[str, bytes]:
    """Ending and content of a picture: a file as it is, a drawing as PNG."""
    if isinstance(picture, Path):
        return picture.suffix[1:].lower(), picture.read_bytes()
    load_image(picture()).save(drawn := io.BytesIO(), "png")
    return "png", drawn.getvalue()


def question(record: Record, names: Sequence[Hashable]) -> dict:
    """A record as a .json holds it; `names` are those of the sample's pictures."""
    entry: dict = {"name": record.name, "pictures": [names.index(name) for name in names_of(record)]}
    if record.answers:
        entry["answers"] = record.answers
    if len(record.turns) == 1:
        return entry | {"prefix": record.prefix, "suffix": record.suffix}
    said = [(role, text) for turn in record.turns for role, text in zip(ROLES, turn, strict=True)]
    return entry | {"conversations": [{"from": role, "value": text} for role, text in said]}


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
    paths = pack(records, out, options.per_shard, options.seed, options.max_bad)
    first, last = (path.stem.removeprefix(f"{out.name}-") for path in (paths[0], paths[-1]))
    pattern = out.with_name(f"{out.name}-{{{first}..{last}}}.tar")
    print(f"{len(paths)} shards: --data shards:'{pattern}'")


if __name__ == "__main__":
    run_command(main)
