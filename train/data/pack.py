"""Write records as tar shards: a few large files in place of very many small ones.

In: records of `eval/records.py`. Out: PREFIX-000.tar, PREFIX-001.tar, … with their indices, in webdataset's
layout: each picture once, as the file that it was, beside its questions. `train/data/shards.py` reads them.
A shard is written atomically, so an interrupted command that is given again continues with the first missing shard.
"""

import hashlib
import io
import json
import random
import tarfile
from collections.abc import Hashable, Sequence
from pathlib import Path

from tqdm import tqdm

from eval.own_files import ROLES
from eval.records import Picture, Record, groups_of
from model.common import Expected, UserError, atomic_path, read_bytes, read_field, read_json, shown, write_text
from model.images import load_image
from train.data.shards import MAX_BYTES, PICTURES, index_of


def group(records: Sequence[Record], seed: int) -> list[list[Record]]:
    """The records of each picture together, the pictures shuffled, so that every shard is a random mixture."""
    groups, samples = groups_of(records), {}
    for record in records:
        samples.setdefault(groups.get(record.name, record.key), []).append(record)
    ordered = list(samples.values())
    random.Random(f"shard/{seed}").shuffle(ordered)
    return ordered


def names_of(record: Record) -> list[Hashable]:
    """What tells a record's pictures from others: a path, or the record's key and the place there."""
    return [one if isinstance(one, Path) else (record.key, place) for place, one in enumerate(record.pictures)]


def pictures_of(sample: Sequence[Record]) -> dict[Hashable, Picture]:
    """The distinct pictures of a sample by name."""
    return {name: one for record in sample for name, one in zip(names_of(record), record.pictures, strict=True)}


def cut(samples: Sequence[Sequence[Record]], per_shard: int, megabytes: float) -> list[range]:
    """Which samples each shard gets: at most `per_shard`, at most `megabytes` of picture files, at least one."""
    shards, first, size = [], 0, 0
    for number, sample in enumerate(samples):
        files = [path for path in pictures_of(sample) if isinstance(path, Path) and path.is_file()]
        more = sum(path.stat().st_size for path in files)
        if number > first and (number - first == per_shard or size + more > megabytes * 1e6):
            shards.append(range(first, number))
            first, size = number, 0
        size += more
    return [*shards, range(first, len(samples))]


def encode(picture: Picture) -> tuple[str, bytes]:
    """Ending and bytes of a picture: a file as it is, a drawing as PNG.

    Raises UserError for a file that is absent, too large or cannot be decoded as a picture.
    """
    if not isinstance(picture, Path):
        drawn = io.BytesIO()
        load_image(picture()).save(drawn, "png")
        return "png", drawn.getvalue()
    ending = picture.suffix[1:].lower()
    if ending not in PICTURES:
        raise UserError(f"{shown(picture)}: ends in none of {', '.join(PICTURES)}: rename or convert it")
    content = read_bytes(picture, MAX_BYTES)
    file = io.BytesIO(content)
    file.name = shown(picture)
    load_image(file)  # only what decodes is packed
    return ending, content


def texts(sample: Sequence[Record], pictures: Sequence[Hashable]) -> bytes:
    """The questions of a sample with these pictures as JSON: an object, or a list of several."""
    entries = []
    for record in sample:
        entry: dict = {"name": record.name}
        if len(record.turns) > 1:
            said = [(role, text) for turn in record.turns for role, text in zip(ROLES, turn, strict=True)]
            entry["conversations"] = [{"from": role, "value": text} for role, text in said]
        else:
            entry |= {"prefix": record.prefix, "suffix": record.suffix}
        if record.answers:
            entry["answers"] = record.answers
        if len(record.pictures) != 1 or len(pictures) != 1:
            entry["pictures"] = [pictures.index(name) for name in names_of(record)]
        entries.append(entry)
    return json.dumps(entries if len(entries) > 1 else entries[0], ensure_ascii=False).encode()


def write_shard(path: Path, samples: dict[int, list[Record]], max_bad: int) -> list[str]:
    """Write numbered samples to a tar; returns one line for each record whose pictures cannot be read.

    Raises UserError, and writes nothing, if they are more than `max_bad`.
    """
    bad: list[str] = []
    with atomic_path(path) as temporary, tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, sample in samples.items():
            encoded: dict[Hashable, tuple[str, bytes]] = {}
            good = []
            for record in sample:
                try:
                    found = pictures_of([record])
                    encoded |= {key: encode(picture) for key, picture in found.items() if key not in encoded}
                    good.append(record)
                except UserError as error:
                    bad.append(shown(f"{record.name}: {error}", 600))
                    if len(bad) > max_bad:
                        raise UserError(f"more unusable records than --max-bad; the last: {bad[-1]}") from None
            keys = list(pictures_of(good))
            if not good:
                continue
            files = [encoded[key] for key in keys]
            names = [f"{place}.{ending}" if len(files) > 1 else ending for place, (ending, _) in enumerate(files)]
            members = [*zip(names, (content for _, content in files), strict=True), ("json", texts(good, keys))]
            for name, content in members:
                member = tarfile.TarInfo(f"{number:09d}.{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return bad


def fingerprint(samples: Sequence[Sequence[Record]]) -> str:
    """A hash of the sizes and times of the picture files of a shard."""
    files = [path for sample in samples for path in pictures_of(sample) if isinstance(path, Path) and path.is_file()]
    states = [(status.st_size, status.st_mtime_ns) for status in (path.stat() for path in files)]
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()[:16]


def check_made(manifest: Path, plan: dict, paths: Sequence[Path], prefix: Path) -> None:
    """Raise UserError if shards that are there already were not made by this plan, of these pictures.

    A picture of a shard that is still to be made may have been repaired. Older manifests say nothing of pictures.
    """
    remedy = "give another prefix, or delete that file and all shards of this prefix"
    if manifest.exists():
        stored = read_json(manifest)
        before = read_field(stored, "pictures", Expected(list), shown(manifest), default=plan["pictures"])
        changed = [path for path, old, new in zip(paths, before, plan["pictures"], strict=False) if old != new]
        if stored | {"pictures": before} != plan | {"pictures": before} or any(path.exists() for path in changed):
            raise UserError(
                f"--out {prefix}: {manifest} belongs to shards of other records, pictures or sizes: {remedy}"
            )
    elif found := [path for path in paths if path.exists()]:
        raise UserError(f"--out {prefix}: {found[0]} is there, but not {manifest}, which says what it holds: {remedy}")


def make(
    records: Sequence[Record], prefix: Path, per_shard: int, megabytes: float, seed: int = 0, max_bad: int = 0
) -> list[Path]:
    """Make all shards that do not exist yet; returns the paths of all. Records that are left out are printed.

    Raises UserError if `prefix` already names shards of other records or sizes, or if more than `max_bad` records
    are unusable.
    """
    samples = group(records, seed)
    shards = cut(samples, per_shard, megabytes)
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(texts(sample, list(pictures_of(sample))))
    plan = {"records": len(records), "ends": [shard.stop for shard in shards], "sha256": digest.hexdigest()}
    plan["pictures"] = [fingerprint(samples[numbers.start : numbers.stop]) for numbers in shards]
    digits = max(3, len(str(len(shards) - 1)))
    paths = [prefix.with_name(f"{prefix.name}-{number:0{digits}}.tar") for number in range(len(shards))]
    manifest = prefix.with_name(f"{prefix.name}.json")
    check_made(manifest, plan, paths, prefix)
    write_text(manifest, json.dumps(plan) + "\n")
    with tqdm(total=len(samples), desc=str(prefix), unit="picture") as bar:
        for path, numbers in zip(paths, shards, strict=True):
            if not path.exists():
                bad = write_shard(path, {number: samples[number] for number in numbers}, max_bad)
                max_bad -= len(bad)
                for line in bad:
                    bar.write(f"left out {line}")
            index_of(path)
            bar.update(len(numbers))
    return paths
