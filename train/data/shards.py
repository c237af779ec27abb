"""Records in tar shards, as in webdataset: `name.jpg` beside `name.json`, which holds {"prefix", "suffix"}.

In: tar files; a .json may hold a list, for several questions on one picture, and conversations, as a user's own file
(`eval/own_files.py`). Where a sample has several pictures, name.0.jpg, name.1.jpg, …, or none, an entry says which it
is about: "pictures": [0, 1]. Out: `Shards`, a sequence of records that `train/data/batches.py` accepts instead of a
list.

Beside each shard lies an index, written by `train/data/pack.py` or here: where every picture and text begins and how
long it is. So a record is read by its number; dividing an epoch between processes and workers, or resuming in the
middle, is arithmetic on numbers, and no record is lost or read twice. No part of a tar is unpacked, and names in it are
never used as paths. The order is shuffled in two steps, so that reads stay close together: the shards, then a buffer
of records.
"""

import hashlib
import os
import random
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from io import BytesIO
from itertools import chain, groupby, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tqdm import tqdm

from eval.datasets import some
from eval.own_files import read_turns
from eval.records import Record
from model.common import Expected, UserError, atomic_path, open_regular, parse_json, quoted, read_field, shown
from model.turns import check_marks
from train.data.batches import CHARACTERS, Planned

PICTURES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "ppm", "jp2")
# Columns of an index, one row for each record: the number of its sample, the number of its question in the sample,
# offset and size of its first picture and of its text in bytes (0: there is none, or more than one text), the number
# of its pictures, and of the characters in prompts and answers.
SAMPLE, QUESTION, PICTURE, PICTURE_SIZE, TEXT, TEXT_SIZE, PICTURE_COUNT, LENGTH = range(8)
BLOCK = tarfile.BLOCKSIZE
MAX_BYTES = 64 << 20  # of one picture or text: a larger size is damage, or an attack
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def expand(pattern: str) -> list[Path]:
    """The paths that a pattern with {first..last} stands for, with as many digits as `first`, as in a shell.

    Raises UserError for a range that is empty, or of a million numbers and more.
    """
    found = RANGE.search(pattern)
    if not found:
        return [Path(pattern)]
    first, last = int(found[1]), int(found[2])
    if not first <= last < first + 1_000_000:
        raise UserError(f"{pattern}: no range in {found[0]}: write {{first..last}}, such as {{000..127}}")
    before, after = pattern[: found.start()], pattern[found.end() :]
    return [path for number in range(first, last + 1) for path in expand(f"{before}{number:0{len(found[1])}}{after}")]


# The index of a shard


def index_of(shard: Path) -> np.ndarray:
    """The index (records, 8) int64 of a shard; if there is none that fits, it is made and written beside the shard.

    Raises UserError for a shard that is absent, compressed, damaged or cut short.
    """
    if not shard.is_file():
        raise UserError(f"{shard}: not found: check the path, and the range of numbers in it")
    _open.cache_clear()  # the file may have been replaced
    path = shard.with_suffix(".index.safetensors")
    with suppress(OSError, SafetensorError, KeyError, ValueError, TypeError):
        with open_regular(path):  # no pipe
            tensors = load_file(path)
        if _fits(tensors, shard):
            return tensors["records"]
    rows, end = build_index(shard)
    with suppress(UserError), atomic_path(path) as temporary:  # the folder may be read-only
        save_file(sealed(rows, np.array([shard.stat().st_size, end])), temporary)
    return rows


def sealed(rows: np.ndarray, size_and_end: np.ndarray) -> dict[str, np.ndarray]:
    """The tensors of an index: the records, what the shard must be like, and a hash of both."""
    digest = hashlib.sha256(rows.tobytes() + size_and_end.tobytes()).digest()
    return {"records": rows, "size_and_end": size_and_end, "sha256": np.frombuffer(digest, np.uint8).copy()}


def _fits(tensors: dict[str, np.ndarray], shard: Path) -> bool:
    """Whether these tensors are a whole, well-formed index of the shard as it is now."""
    rows, size_and_end, size = tensors["records"], tensors["size_and_end"], shard.stat().st_size
    if rows.dtype != np.int64 or rows.ndim != 2 or rows.shape[1] != LENGTH + 1:
        return False
    if size_and_end.dtype != np.int64 or size_and_end.shape != (2,) or size_and_end[0] != size:
        return False
    steps = np.diff(rows[:, SAMPLE], prepend=0)
    ends = rows[:, [PICTURE, TEXT]] + rows[:, [PICTURE_SIZE, TEXT_SIZE]]
    if not ((rows >= 0).all() and (ends >= 0).all() and (ends <= size).all() and np.isin(steps, (0, 1)).all()):
        return False
    # a lost row changes the hash; an appended member stands where the tar ended, even if the padded size is the same
    is_whole = np.array_equal(tensors["sha256"], sealed(rows, size_and_end)["sha256"])
    return is_whole and os.pread(_open(shard).fileno(), BLOCK, int(size_and_end[1])) == bytes(BLOCK)


def build_index(shard: Path) -> tuple[np.ndarray, int]:
    """The rows of a shard's index, from the tar alone, and the offset at which the tar ends.

    Raises UserError for a shard that is compressed, damaged or cut short.
    """
    rows, sample = [], 0
    remedy = "make or copy it again; shards are plain tars, not compressed ones"
    try:
        with tarfile.open(shard, "r:") as tar:
            for _, members in groupby(_files(tar), key=lambda member: _split(member.name)[0]):
                by_kind = {"picture": [], "text": []}
                for member in members:
                    ending = _split(member.name)[1]
                    kind = "text" if ending == "json" else "picture" if ending in PICTURES else None
                    if kind:
                        by_kind[kind].append((member.offset_data, member.size))
                if not any(by_kind.values()):  # a README
                    continue
                pictures, texts = by_kind.values()
                picture, text = pictures[0] if pictures else (0, 0), texts[0] if len(texts) == 1 else (0, 0)
                rows += [
                    (sample, number, *picture, *text, len(pictures), length)
                    for number, length in enumerate(_lengths(shard, *text))
                ]
                sample += 1
            end = tar.offset
        # tarfile stops without an error where it cannot read a header; a complete tar ends with empty blocks
        with shard.open("rb") as file:
            file.seek(end)
            if file.read(BLOCK) != bytes(BLOCK):
                raise UserError(f"{shard}: damaged or cut short at byte {end:,}: {remedy}")
    except UserError:
        raise
    except Exception as error:  # tarfile raises errors of many kinds on damaged files
        raise UserError(f"{shard}: cannot be read as a tar ({error}): {remedy}") from None
    return np.array(rows, dtype=np.int64).reshape(-1, LENGTH + 1), end


def _files(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The regular files of a tar: no links, folders or devices."""
    for member in tar:
        if member.size < 0:
            raise tarfile.ReadError(f"a member of {member.size} bytes")
        if member.isreg() and member.sparse is None and _split(member.name)[0]:
            yield member


def _split(name: str) -> tuple[str, str]:
    """A member's name as key and ending: the key ends at the file name's first dot, as in webdataset."""
    folder, slash, file = name.rpartition("/")
    stem = file.partition(".")[0]
    return (folder + slash + stem if stem else ""), file.rpartition(".")[2].lower()


def _lengths(shard: Path, offset: int, size: int) -> list[int]:
    """The characters of each question in a text; a damaged text counts as one, and is reported when it is read."""
    try:
        value = parse_json(read_member(shard, offset, size)[1], "")
    except UserError:
        return [0]
    entries = value if isinstance(value, list) and value else [value]
    lengths = []
    for entry in entries:
        try:
            lengths.append(sum(map(len, chain(*read_turns(entry, "")[0]))) if isinstance(entry, dict) else 0)
        except UserError:
            lengths.append(0)
    return lengths


# One record


@lru_cache(maxsize=64)
def _open(shard: Path) -> BinaryIO:
    return shard.open("rb", buffering=0)


def read_member(shard: Path, offset: int, size: int) -> tuple[str, bytes]:
    """Name and bytes of the member whose content begins at `offset`. Raises UserError if there is no such member."""
    if size > MAX_BYTES:
        raise UserError(f"{shard}: a member of {size:,} bytes, expected at most {MAX_BYTES:,}: make the shard again")
    try:
        # pread: a worker shares the file and its position with the process that it was forked from
        raw = os.pread(_open(shard).fileno(), BLOCK + size, offset - BLOCK)
        member = tarfile.TarInfo.frombuf(raw[:BLOCK], "utf-8", "surrogateescape")
        if member.size != size or len(raw) != BLOCK + size:
            raise tarfile.HeaderError("another size")
    except (OSError, tarfile.HeaderError) as error:
        index = shard.with_suffix(".index.safetensors").name
        raise UserError(
            f"{shard}: no member of {size:,} bytes at byte {offset:,} ({error}): "
            f"delete {index} if the shard is not the one it was made for"
        ) from None
    return shown(member.name, 1000), raw[BLOCK:]


def open_picture(shard: Path, offset: int, size: int, number: int = 0) -> BytesIO:
    """Picture `number` of a sample whose first is at `offset`, as a file in memory, with a `name` for messages."""
    if number:  # a header may take several blocks, and other members may stand between two pictures
        try:
            with shard.open("rb") as whole:  # not the file that is shared: tarfile moves its position
                whole.seek(offset + -(-size // BLOCK) * BLOCK)
                with tarfile.open(fileobj=whole, mode="r:") as tar:
                    pictures = (member for member in _files(tar) if _split(member.name)[1] in PICTURES)
                    member = next(islice(pictures, number - 1, None))
        except Exception as error:  # tarfile raises errors of many kinds on damaged files
            raise UserError(f"{shard}: no picture after byte {offset:,} ({error}): make the shard again") from None
        offset, size = member.offset_data, member.size
    name, raw = read_member(shard, offset, size)
    file = BytesIO(raw)
    file.name = f"{shard}: {name}"
    return file


class Shards(Planned):
    """The records of tar shards by number, each read when it is needed; 64 bytes of memory for each record.

    split, fraction, validation: as for other data on disk, by sample: all questions of one are in the same split.
    buffer: how many records are shuffled together. sampled: each epoch draws one of "answers" ("choices" in older
    shards).
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
        absent = [str(path) for path in self.paths if not path.is_file()]
        if absent:
            raise UserError(
                f"{pattern}: {len(absent)} of {len(self.paths)} shards are not there ({some(absent)}): check the path "
                "and the range"
            )
        # each process begins at another shard, so that all processes make missing indices together
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        numbers = list(range(len(self.paths)))
        turn = rank * len(numbers) // size
        rows = {
            number: index_of(self.paths[number])
            for number in tqdm(numbers[turn:] + numbers[:turn], "indices of shards", delay=2, disable=rank > 0)
        }
        parts, samples = [], 0
        for number in numbers:
            part = rows.pop(number)
            count = int(part[-1, SAMPLE]) + 1 if len(part) else 0
            held_out, used = np.random.default_rng((seed, number)).random((2, count))[:, part[:, SAMPLE]]
            keep = held_out < validation if split == "validation" else (held_out >= validation) & (used < fraction)
            part[:, SAMPLE] += samples
            samples += count
            parts.append(part[keep])
        self.ends = np.cumsum([len(part) for part in parts])
        self.rows = np.concatenate(parts)
        self.samples = len(self.rows)  # of an epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Record:
        """The record `index`. Raises UserError, naming shard and member, for a damaged one."""
        shard = self.paths[int(np.searchsorted(self.ends, index, side="right"))]
        sample, question, picture, picture_size, text, text_size, count, _ = self.rows[index].tolist()
        if not text:
            name = _split(read_member(shard, picture, picture_size)[0])[0] if picture else f"sample {sample}"
            raise UserError(f"{shard}: {name}: has not one picture and one .json: make the shard again")
        name, raw = read_member(shard, text, text_size)
        where = f"{shard}: {name}"
        value = parse_json(raw, where)
        entries = value if isinstance(value, list) else [value]
        entry = entries[question] if question < len(entries) else None
        if not isinstance(entry, dict):
            raise UserError(f'{where}: expected {{"prefix", "suffix"}}, or a list of such: make the shard again')
        shown_ones = read_field(entry, "pictures", Expected(list), where, default=[0])
        if "pictures" not in entry and count != 1:
            raise UserError(f"{where}: has not one picture and one .json: make the shard again")
        if not all(number in range(count) for number in shown_ones):
            raise UserError(f"{where}: is about pictures {quoted(shown_ones)} of {count}: make the shard again")
        turns, answers = read_turns({"answers": entry["choices"]} | entry if "choices" in entry else entry, where)
        check_marks(len(shown_ones), turns)
        pictures = tuple(partial(open_picture, shard, picture, picture_size, number) for number in shown_ones)
        stem = (
            _split(name)[0] if len(name.encode()) < 100 else f"{_split(name)[0]} ({sample})"
        )  # longer ones are cut off
        name = entry["name"] if isinstance(entry.get("name"), str) else f"{shard.name}/{stem}[{question}]"
        return Record(name, f"{shard}: {sample} {shown_ones}", pictures, turns, answers, self.sampled)

    def order(self, seed: int | str, epoch: int) -> np.ndarray:
        """The numbers of all records, those of a shard together, the shards shuffled."""
        shards = list(range(len(self.paths)))
        random.Random(f"shards/{seed}/{epoch}").shuffle(shards)
        begins = self.ends - np.diff(self.ends, prepend=0)
        return np.concatenate([np.arange(begins[shard], self.ends[shard]) for shard in shards])

    def describe(self, numbers: Sequence[int], picture_tokens: int = 0) -> tuple[list[int], list[int]]:
        """The samples of records, which stand for their pictures, and their approximate lengths in tokens.

        picture_tokens: of each picture of the sample but one, as `Order` counts.
        """
        rows = self.rows[numbers]
        lengths = rows[:, LENGTH] // CHARACTERS + (rows[:, PICTURE_COUNT] - 1) * picture_tokens
        return rows[:, SAMPLE].tolist(), lengths.tolist()
