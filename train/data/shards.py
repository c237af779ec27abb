"""Records in tar shards, as in webdataset: `name.jpg` beside `name.json`, which holds {"prefix", "suffix"}.

In: tar files. A .json may hold a list, for several questions on one picture, and conversations, as a user's own file
(`eval/records.py`). A sample with other than one picture, name.0.jpg, name.1.jpg, …, says in each entry which of them
it shows: "pictures": [0, 1]. Out: `Shards`, a sequence of records that `train/data/batches.py` accepts as a list.

An index beside each shard says where each picture and text begins: a record is read by its number, so that processes
share an epoch, and a run resumes in its middle, by arithmetic. Nothing is unpacked; no name in a tar is used as a path.
"""

import os
import random
import re
import tarfile
from collections.abc import Iterator, Sequence
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

from eval.data import WRONG, problems_at, some
from eval.records import Record, read_turns
from model.common import UserError, atomic_path, parse_json, shown
from train.data.batches import CHARACTERS, plan_epoch

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".jp2")
# Columns of an index, a row for each record: numbers of its sample and of its question in the sample; offset and size
# of the text in bytes; the sample's first picture in the table of pictures, and their number; characters of the turns.
SAMPLE, QUESTION, TEXT, TEXT_SIZE, PICTURE, PICTURE_COUNT, LENGTH = range(7)
BLOCK, INDEX = tarfile.BLOCKSIZE, ".index.safetensors"


def expand(pattern: str) -> list[Path]:
    """The paths of a pattern, which may have one range {first..last}; numbers have as many digits as `first`."""
    if not (match := re.search(r"\{(\d{1,6})\.\.(\d{1,6})\}", pattern)):
        return [Path(pattern)]
    numbers = range(int(match[1]), int(match[2]) + 1)
    return [Path(pattern.replace(match[0], f"{number:0{len(match[1])}}")) for number in numbers]


# The index of a shard


def index_of(shard: Path) -> dict[str, np.ndarray]:
    """The index of a shard, see `build_index`; where there is none for its size, it is made and written beside it."""
    path = shard.with_suffix(INDEX)
    with suppress(OSError, SafetensorError, KeyError):
        index = load_file(path)
        if index["tar"][0] == shard.stat().st_size:
            return index
    index = build_index(shard)
    with suppress(UserError), atomic_path(path) as temporary:  # the folder may be read-only
        save_file(index, temporary)
    return index


def build_index(shard: Path) -> dict[str, np.ndarray]:
    """The index of a shard, int64, from the tar alone.

    "records" (records, 7): the columns above. "pictures" (pictures, 2): offset and size of each in bytes. "tar" (1,):
    bytes of the file. Raises UserError for a shard that is compressed, damaged or cut short.
    """
    records, pictures, sample = [], [], 0
    try:
        with tarfile.open(shard, "r:") as tar, shard.open("rb") as file:
            for key, group in groupby(filter(tarfile.TarInfo.isreg, tar), key=lambda member: key_of(member.name)):
                members = [(Path(member.name).suffix.lower(), (member.offset_data, member.size)) for member in group]
                shows, texts = ([place for end, place in members if end in ends] for ends in (PICTURES, (".json",)))
                if not key or not shows + texts:  # hidden files, a README
                    continue
                text = (texts if len(texts) == 1 else shows + texts)[0]  # reading a picture as JSON says what is wrong
                lengths = _lengths(os.pread(file.fileno(), text[1], text[0])) if len(texts) == 1 else [0]
                for question, length in enumerate(lengths):
                    records.append((sample, question, *text, len(pictures), len(shows), length))
                pictures += shows
                sample += 1
            if os.pread(file.fileno(), BLOCK, tar.offset) != bytes(BLOCK):
                raise EOFError(f"it ends at byte {tar.offset:,}")  # tarfile stops in silence at a damaged header
    except Exception as error:  # tarfile raises errors of many kinds on damaged files
        problem = f"no whole tar, or a compressed one ({error}): make or copy it again, uncompressed"
        raise UserError(f"{shard}: {problem}") from None
    columns = np.array(records, dtype=np.int64).reshape(-1, LENGTH + 1)
    places = np.array(pictures, dtype=np.int64).reshape(-1, 2)
    return {"records": columns, "pictures": places, "tar": np.array([shard.stat().st_size])}


def key_of(name: str) -> str:
    """The key of a member: its name up to the first dot of the file's, as in webdataset; a hidden file has none."""
    folder, slash, file = name.rpartition("/")
    stem = file.partition(".")[0]
    return folder + slash + stem if stem else ""


def _entries(content: bytes, where: str) -> list:
    """The questions in a sample's .json. Raises UserError if it is damaged."""
    value = parse_json(content, where)
    return value if isinstance(value, list) else [value]


def _lengths(content: bytes) -> list[int]:
    """The characters of each question of a sample; 0 for a damaged one, which is reported when it is read."""
    lengths = []
    with suppress(UserError):
        for entry in _entries(content, ""):
            lengths.append(0)
            with suppress(*WRONG):
                lengths[-1] = sum(map(len, chain(*read_turns(entry)[0])))
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


class Shards(Sequence):
    """The records of tar shards by number, each read when it is needed; about 70 bytes of memory for each.

    split, fraction, validation: as for other data on disk, by sample: all questions of one are in the same split.
    buffer: how many records are shuffled together. sampled: each epoch draws one of "answers".
    Raises UserError for a pattern without readable shards.
    """

    def __init__(
        self,
        *patterns: str,
        split: str = "train",
        fraction: float = 1.0,
        validation: float = 0.0,
        seed: int = 0,
        buffer: int = 10_000,
        sampled: bool = False,
    ):
        self.paths, self.buffer, self.sampled = [*chain(*map(expand, patterns))], buffer, sampled
        absent = [str(path) for path in self.paths if not path.is_file()]
        if absent or not self.paths:
            count = f"{len(absent)} of {len(self.paths)} shards"
            raise UserError(f"{' '.join(patterns)}: {count} are not there ({some(absent)}): check {{first..last}}")
        # Each process of torchrun begins at another shard, so that together they make the indices that are missing.
        rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
        numbers = np.roll(range(len(self.paths)), -(len(self.paths) * rank // size)).tolist()
        bar = tqdm(numbers, "indices of shards", delay=2, disable=rank > 0)
        indices = {number: index_of(self.paths[number]) for number in bar}
        self.pictures, rows, samples = [indices[number]["pictures"] for number in sorted(indices)], [], 0
        for number in sorted(indices):
            part = indices[number]["records"]
            count = int(part[:, SAMPLE].max(initial=-1)) + 1
            held_out, used = np.random.default_rng((seed, number)).random((2, count))[:, part[:, SAMPLE]]
            keep = held_out < validation if split == "validation" else (held_out >= validation) & (used < fraction)
            part[:, SAMPLE] += samples
            rows.append(part[keep])
            samples += count
        self.rows, self.ends = np.concatenate(rows), np.cumsum(list(map(len, rows)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Record:
        """The record `index`. Raises UserError, naming shard and member, for a damaged one."""
        number = int(np.searchsorted(self.ends, index, side="right"))
        shard, (sample, question, text, size, first, count, _) = self.paths[number], self.rows[index].tolist()
        file = read_member(shard, text, size)
        try:
            entry = _entries(file.read(), file.name)[question]
            places = self.pictures[number][first : first + count].tolist()
            chosen = entry.get("pictures", [0] if count == 1 else None)
            pictures = tuple(partial(read_member, shard, *places[place]) for place in chosen)
            with problems_at(file.name):
                turns, answers = read_turns(entry)
        except (LookupError, TypeError, AttributeError):
            problem = 'expected one picture and one .json of {"prefix", "suffix"}, or of "pictures" beside them'
            raise UserError(f"{file.name}: {problem}: make the shard again") from None
        key = key_of(file.name.removeprefix(f"{shard}: "))  # a tar header cuts long names: the number tells them apart
        name = entry["name"] if isinstance(entry.get("name"), str) else f"{shard.name}/{key}[{question}] ({sample})"
        return Record(name, f"{shard}: {sample} {chosen}", pictures, turns, answers, self.sampled)

    def plan(
        self, batch_size: int, seed: int, epoch: int, per_picture: int = 1, first: int = 0, picture_tokens: int = 0
    ) -> Iterator[list[int]]:
        """The micro-batches of an epoch from number `first` on; all but the last have `batch_size` records.

        Shards are shuffled, and within a window of `buffer` records `plan_epoch` plans.
        """
        parts = np.split(np.arange(len(self)), self.ends[:-1])
        random.Random(f"shards/{seed}/{epoch}").shuffle(parts)
        order, window = np.concatenate(parts), batch_size * max(1, self.buffer // batch_size)
        for start in range(first * batch_size // window * window, len(order), window):
            numbers = order[start : start + window]
            rows = self.rows[numbers]
            lengths = rows[:, LENGTH] // CHARACTERS + (rows[:, PICTURE_COUNT] - 1) * picture_tokens
            keys = rows[:, SAMPLE].tolist()
            batches = plan_epoch(keys, lengths.tolist(), batch_size, f"{seed}/{start}", epoch, per_picture)
            for batch in batches[max(0, first - start // batch_size) :]:
                yield numbers[batch].tolist()
