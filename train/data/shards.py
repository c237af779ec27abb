"""Records in tar shards, as in webdataset: `name.jpg` beside `name.json`, which holds {"prefix", "suffix"}.

In: tar files. A .json may hold a list, for several questions on one picture, and conversations, as a user's own file
(`eval/own_files.py`). A sample with other than one picture, name.0.jpg, name.1.jpg, …, says in each entry which of them
it shows: "pictures": [0, 1]. Out: `Shards`, a sequence of records that `train/data/batches.py` accepts as a list.

An index beside each shard says where every picture and text begins and how long it is. A record is read by its number:
sharing an epoch between processes and workers, and resuming in its middle, are arithmetic on numbers. Nothing is
unpacked, and no name in a tar is used as a path.
"""

import fcntl
import os
import random
import re
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from io import BytesIO
from itertools import chain, groupby
from pathlib import Path
from typing import BinaryIO

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tqdm import tqdm

from eval.datasets import some
from eval.own_files import read_turns
from eval.records import Record
from model.common import UserError, atomic_path, parse_json, shown
from train.data.batches import CHARACTERS, Planned

PICTURES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "jp2")
# Columns of an index, a row for each record: numbers of its sample and of its question in the sample; offset and size
# of the text in bytes; the sample's first picture in the table of pictures, and their number; characters of the turns.
SAMPLE, QUESTION, TEXT, TEXT_SIZE, PICTURE, PICTURE_COUNT, LENGTH = range(7)
BLOCK = tarfile.BLOCKSIZE
RANGE = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")
MAX_SHARDS = 1_000_000


def expand(pattern: str) -> list[Path]:
    """The paths of a pattern with {first..last}, numbers with as many digits as `first`. Raises UserError if none."""
    paths = [pattern]
    while found := RANGE.search(paths[0]):
        digits, numbers = len(found[1]), range(int(found[1]), int(found[2]) + 1)
        if not 0 < len(paths) * len(numbers) <= MAX_SHARDS:
            raise UserError(f"{pattern}: no range of 1 to {MAX_SHARDS:,} shards: write {{first..last}}: {{000..127}}")
        paths = [RANGE.sub(f"{number:0{digits}}", path, count=1) for path in paths for number in numbers]
    return list(map(Path, paths))


# The index of a shard


def index_of(shard: Path) -> dict[str, np.ndarray]:
    """The index of a shard, see `build_index`; if there is none that fits, it is made and written beside the shard.

    One process makes it. Others that want it meanwhile wait, and read it.
    """
    path = shard.with_suffix(".index.safetensors")
    with shard.open("rb") as file:
        with suppress(OSError):  # a file system without locks: processes may do the same work
            fcntl.flock(file, fcntl.LOCK_EX)
        if (index := _read_index(path, file)) is None:
            index = build_index(shard)
            with suppress(UserError), atomic_path(path) as temporary:  # the folder may be read-only
                save_file(index, temporary)
    return index


def _read_index(path: Path, shard: BinaryIO) -> dict[str, np.ndarray] | None:
    """The index in the file `path`; None if there is none, or the shard was changed since."""
    with suppress(OSError, SafetensorError, KeyError, ValueError):
        index = load_file(path)
        size, end = index["tar"].tolist()
        # a member that `tar -r` appends stands where the tar ended, even if the padded size is the same
        if size == os.fstat(shard.fileno()).st_size and os.pread(shard.fileno(), BLOCK, end) == bytes(BLOCK):
            return index
    return None


def build_index(shard: Path) -> dict[str, np.ndarray]:
    """The index of a shard, int64, from the tar alone.

    "records" (records, 7): the columns above. "pictures" (pictures, 2): offset and size of each in bytes.
    "tar" (2,): bytes of the file, and the offset at which the tar ends.
    Raises UserError for a shard that is compressed, damaged or cut short.
    """
    records, pictures, sample = [], [], 0
    try:
        with tarfile.open(shard, "r:") as tar:
            for key, members in groupby(filter(tarfile.TarInfo.isreg, tar), key=lambda member: _split(member.name)[0]):
                files = [(_split(member.name)[1], member) for member in members]
                shows = [(member.offset_data, member.size) for ending, member in files if ending in PICTURES]
                texts = [member for ending, member in files if ending == "json"]
                if not key or not shows + texts:  # hidden files, a README
                    continue
                place, lengths = (0, 0), [0]
                if len(texts) == 1:
                    place, lengths = (texts[0].offset_data, texts[0].size), _lengths(tar.extractfile(texts[0]))
                for question, length in enumerate(lengths):
                    records.append((sample, question, *place, len(pictures), len(shows), length))
                pictures += shows
                sample += 1
            end = tar.offset
        with shard.open("rb") as file:
            file.seek(end)
            if file.read(BLOCK) != bytes(BLOCK):  # tarfile stops without an error where it cannot read a header
                raise EOFError(f"it ends at byte {end:,}")
    except Exception as error:  # tarfile raises errors of many kinds on damaged files
        raise UserError(
            f"{shard}: no whole tar, or a compressed one ({error}): make or copy it again, uncompressed"
        ) from None
    return {
        "records": np.array(records, dtype=np.int64).reshape(-1, LENGTH + 1),
        "pictures": np.array(pictures, dtype=np.int64).reshape(-1, 2),
        "tar": np.array([shard.stat().st_size, end]),
    }


def _split(name: str) -> tuple[str, str]:
    """A member's name as key and ending: the key ends at the file name's first dot, as in webdataset."""
    folder, slash, file = name.rpartition("/")
    stem = file.partition(".")[0]
    return (folder + slash + stem if stem else ""), file.rpartition(".")[2].lower()


def _entries(file: BinaryIO) -> list:
    """The questions in a sample's .json. Raises UserError if it is damaged."""
    value = parse_json(file.read(), file.name)
    return value if isinstance(value, list) else [value]


def _lengths(file: BinaryIO) -> list[int]:
    """The characters of each question of a sample; 0 for a damaged one, which is reported when it is read."""
    lengths = []
    with suppress(UserError):
        for entry in _entries(file):
            lengths.append(0)
            with suppress(UserError, TypeError):
                lengths[-1] = sum(map(len, chain(*read_turns(entry, "")[0])))
    return lengths or [0]


# One record


@lru_cache(maxsize=64)
def _open(shard: Path) -> BinaryIO:
    return shard.open("rb", buffering=0)


def read_member(shard: Path, offset: int, size: int) -> BytesIO:
    """The member whose content begins at `offset`, in memory, with a `name` for messages. Raises UserError."""
    try:
        # pread: a worker shares the file and its position with the process that it was forked from
        raw = os.pread(_open(shard).fileno(), BLOCK + size, offset - BLOCK)
        member = tarfile.TarInfo.frombuf(raw[:BLOCK], "utf-8", "surrogateescape")
        if member.size != size or len(raw) != BLOCK + size:
            raise tarfile.HeaderError("another size")
    except (OSError, tarfile.HeaderError) as error:
        place = f"{shard}: no member of {size:,} bytes at byte {offset:,} ({error})"
        raise UserError(f"{place}: delete its .index.safetensors if the shard was changed") from None
    file = BytesIO(raw[BLOCK:])
    file.name = f"{shard}: {shown(member.name, 1000)}"
    return file


class Shards(Planned):
    """The records of tar shards by number, each read when it is needed; about 70 bytes of memory for each.

    split, fraction, validation: as for other data on disk, by sample: all questions of one are in the same split.
    buffer: how many records are shuffled together. sampled: each epoch draws one of "answers".
    Raises UserError for a pattern without readable shards.
    """

    def __init__(
        self,
        pattern: str,
        split: str = "train",
        fraction: float = 1.0,
        validation: float = 0.0,
        seed: int = 0,
        buffer: int = 10_000,
        sampled: bool = False,
    ):
        self.paths, self.window, self.sampled = expand(pattern), buffer, sampled
        if absent := [str(path) for path in self.paths if not path.is_file()]:
            count = f"{len(absent)} of {len(self.paths)} shards"
            raise UserError(f"{pattern}: {count} are not there ({some(absent)}): check the path and the range")
        # Each process of torchrun begins at another shard, so that together they make the indices that are missing.
        rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
        numbers = np.roll(range(len(self.paths)), -(len(self.paths) * rank // size)).tolist()
        bar = tqdm(numbers, "indices of shards", delay=2, disable=rank > 0)
        indices = {number: index_of(self.paths[number]) for number in bar}
        self.pictures = np.concatenate([indices[number]["pictures"] for number in sorted(indices)])
        rows, samples, pictures = [], 0, 0
        for number in sorted(indices):
            part = indices[number]["records"]
            count = int(part[-1, SAMPLE]) + 1 if len(part) else 0
            held_out, used = np.random.default_rng((seed, number)).random((2, count))[:, part[:, SAMPLE]]
            keep = held_out < validation if split == "validation" else (held_out >= validation) & (used < fraction)
            part[:, SAMPLE] += samples
            part[:, PICTURE] += pictures
            rows.append(part[keep])
            samples, pictures = samples + count, pictures + len(indices[number]["pictures"])
        self.rows, self.ends = np.concatenate(rows), np.cumsum(list(map(len, rows)))
        self.samples = len(self.rows)  # of an epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Record:
        """The record `index`. Raises UserError, naming shard and member, for a damaged one."""
        shard = self.paths[int(np.searchsorted(self.ends, index, side="right"))]
        sample, question, text, text_size, first, count, _ = self.rows[index].tolist()
        places, where = self.pictures[first : first + count].tolist(), f"{shard}: sample {sample}"
        try:
            file = read_member(shard, *((text, text_size) if text else places[0]))
            where = file.name
            entry = _entries(file)[question] if text else {}
            chosen = entry.get("pictures", [0] if count == 1 else None)
            pictures = tuple(partial(read_member, shard, *places[number]) for number in chosen)
            turns, answers = read_turns(entry, where)
        except (LookupError, TypeError, AttributeError):
            problem = 'expected one picture and one .json of {"prefix", "suffix"}, or of "pictures" beside them'
            raise UserError(f"{where}: {problem}: make the shard again") from None
        member = where.removeprefix(f"{shard}: ")
        key = _split(member)[0] + (f" ({sample})" if len(member.encode()) >= 100 else "")  # headers cut longer ones off
        name = entry["name"] if isinstance(entry.get("name"), str) else f"{shard.name}/{key}[{question}]"
        return Record(name, f"{shard}: {sample} {chosen}", pictures, turns, answers, self.sampled)

    def order(self, seed: int | str, epoch: int) -> np.ndarray:
        """The numbers of all records, those of a shard together, the shards shuffled."""
        shards = list(range(len(self.paths)))
        random.Random(f"shards/{seed}/{epoch}").shuffle(shards)
        begins = self.ends - np.diff(self.ends, prepend=0)
        return np.concatenate([np.arange(begins[shard], self.ends[shard]) for shard in shards])

    def describe(self, numbers: Sequence[int], picture_tokens: int = 0) -> tuple[list[int], list[int]]:
        """The samples of records, which stand for their pictures, and their approximate lengths, see `Planned`."""
        rows = self.rows[numbers]
        lengths = rows[:, LENGTH] // CHARACTERS + (rows[:, PICTURE_COUNT] - 1) * picture_tokens
        return rows[:, SAMPLE].tolist(), lengths.tolist()
