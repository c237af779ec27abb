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
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from eval.records import Record
from model.common import UserError, atomic_path, read_bytes, read_text, shown, write_text
from model.images import load_image
from train.data.shards import MAX_BYTES, PICTURES, index_of


def group(records: Sequence[Record], seed: int) -> list[list[Record]]:
    """The records of each picture together, the pictures shuffled, so that every shard is a random mixture."""
    by_picture: dict[str, list[Record]] = {}
    for record in records:
        by_picture.setdefault(record.key, []).append(record)
    samples = list(by_picture.values())
    random.Random(f"shard/{seed}").shuffle(samples)
    return samples


def cut(samples: Sequence[Sequence[Record]], per_shard: int, megabytes: float) -> list[range]:
    """Which samples each shard gets: at most `per_shard`, at most `megabytes` of picture files, at least one."""
    shards, first, size = [], 0, 0
    for number, sample in enumerate(samples):
        (picture,) = sample[0].pictures
        more = picture.stat().st_size if isinstance(picture, Path) and picture.is_file() else 0
        if number > first and (number - first == per_shard or size + more > megabytes * 1e6):
            shards.append(range(first, number))
            first, size = number, 0
        size += more
    return [*shards, range(first, len(samples))]


def encode(record: Record) -> tuple[str, bytes]:
    """Ending and bytes of a record's picture: a file as it is, a drawing as PNG.

    Raises UserError for a file that is absent, too large or cannot be decoded as a picture.
    """
    (picture,) = record.pictures
    if not isinstance(picture, Path):
        drawn = io.BytesIO()
        picture().save(drawn, "png")
        return "png", drawn.getvalue()
    ending = picture.suffix[1:].lower()
    if ending not in PICTURES:
        raise UserError(f"{shown(picture)}: ends in none of {', '.join(PICTURES)}: rename or convert it")
    content = read_bytes(picture, MAX_BYTES)
    file = io.BytesIO(content)
    file.name = shown(picture)
    load_image(file)  # only what decodes is packed
    return ending, content


def texts(sample: Sequence[Record]) -> bytes:
    """The questions of a picture as JSON: an object, or a list of several."""
    entries = [
        {"name": record.name, "prefix": record.prefix, "suffix": record.suffix}
        | ({"choices": record.answers} if record.sampled else {})
        for record in sample
    ]
    return json.dumps(entries if len(entries) > 1 else entries[0], ensure_ascii=False).encode()


def write_shard(path: Path, samples: dict[int, list[Record]], max_bad: int) -> list[str]:
    """Write numbered samples to a tar; returns one line for each record whose picture cannot be read.

    Raises UserError, and writes nothing, if they are more than `max_bad`.
    """
    bad: list[str] = []
    with atomic_path(path) as temporary, tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, sample in samples.items():
            try:
                picture = encode(sample[0])
            except UserError as error:
                bad += [shown(f"{record.name}: {error}", 600) for record in sample]
                if len(bad) > max_bad:
                    raise UserError(f"more unusable records than --max-bad; the last: {bad[-1]}") from None
                continue
            for ending, content in (picture, ("json", texts(sample))):
                member = tarfile.TarInfo(f"{number:09d}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return bad


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
        digest.update(texts(sample))
    plan = {"records": len(records), "ends": [shard.stop for shard in shards], "sha256": digest.hexdigest()}
    manifest = prefix.with_name(f"{prefix.name}.json")
    if not manifest.exists():
        write_text(manifest, json.dumps(plan) + "\n")
    elif read_text(manifest) != json.dumps(plan) + "\n":
        raise UserError(
            f"--out {prefix}: {manifest} belongs to shards of other records, pictures or sizes: give another prefix, "
            "or delete that file and its shards"
        )
    digits = max(3, len(str(len(shards) - 1)))
    paths = [prefix.with_name(f"{prefix.name}-{number:0{digits}}.tar") for number in range(len(shards))]
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
