"""Records in tar shards, as in webdataset: `name.jpg` beside `name.json`, which holds {"prefix",
"suffix"}.

In: tar files. A .json may hold a list, for several questions on one picture, and conversations, as
a user's own file (`eval/records.py`). A sample with other than one picture, name.0.jpg, name.1.jpg,
…, says in each entry which of them it shows: "pictures": [0, 1]. Out: `Shards`, a sequence of
records that `train/data/batches.py` accepts as a list.

An index beside each shard says where each picture and text begins: processes share an epoch, and a
run resumes in its middle, by the numbers of records. No name in a tar is used as a path.
"""

import os
import random
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO
from itertools import chain, groupby, islice
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tqdm import tqdm

from eval.data import WRONG, problem_of, some
from eval.records import Record, Refusal, read_turns
from model.common import UserError, atomic_path, parse_json, shown
from train.data.batches import CHARACTERS, plan_epoch

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm", ".jp2")
# Columns of an index, a row for each record: numbers of its sample and of its question in the
# sample; offset and size of the text in bytes; the sample's first picture in the table of pictures,
# and their number; characters of the turns.
SAMPLE, QUESTION, TEXT, TEXT_SIZE, PICTURE, PICTURE_COUNT, LENGTH = range(7)
BLOCK = tarfile.BLOCKSIZE


def expand(pattern: str) -> list[Path]:
    """The paths of a pattern, which may have one range {first..last}; numbers have as many digits
    as `first`. Raises UserError for several ranges, and for numbers of more than six digits."""
    before, *ranges = re.split(r"\{(\d+)\.\.(\d+)\}", pattern)
    if not ranges:
        return [Path(pattern)]
    first, last, after, *more = ranges
    if more or max(len(first), len(last)) > 6:
        raise UserError(
            f"{shown(pattern)}: expected one range {{first..last}}, of numbers below a million"
        )
    return [
        Path(f"{before}{number:0{len(first)}}{after}")
        for number in range(int(first), int(last) + 1)
    ]


def index_of(shard: Path) -> dict[str, np.ndarray]:
    """The index of a shard, see `build_index`; where none is as new and for its size, it is made
    and written beside."""
    path = shard.with_suffix(".index.safetensors")
    with suppress(OSError, SafetensorError, KeyError):
        index, tar = load_file(path), shard.stat()
        rows, is_new = (
            index["records"],
            index["tar"][0] == tar.st_size and path.stat().st_mtime_ns >= tar.st_mtime_ns,
        )
        is_sound = (
            rows.dtype == np.int64
            and rows.shape[1:] == (7,)
            and index["pictures"].shape[1:] == (2,)
        )
        if (
            is_new
            and is_sound
            and (rows >= 0).all()
            and rows[:, SAMPLE].max(initial=0) <= len(rows)
        ):
            return index
    index = build_index(shard)
    with suppress(UserError), atomic_path(path) as temporary:  # the folder may be read-only
        save_file(index, temporary)
    return index


def build_index(shard: Path) -> dict[str, np.ndarray]:
    """The index of a shard, int64: "records" (records, 7), the columns above; "pictures" (pictures,
    2), offset and size of each in bytes; "tar" (1,), bytes of the file. Raises UserError for a
    shard that is compressed or cut short."""
    records, pictures, sample = [], [], 0
    try:
        with tarfile.open(shard, "r:") as tar, shard.open("rb") as file:
            for key, group in groupby(
                filter(tarfile.TarInfo.isreg, tar), key=lambda member: key_of(member.name)
            ):
                members = [
                    (Path(member.name).suffix.lower(), (member.offset_data, member.size))
                    for member in group
                ]
                shows, texts = (
                    [place for end, place in members if end in ends]
                    for ends in (PICTURES, (".json",))
                )
                if not key or not shows + texts:  # hidden files, a README
                    continue
                text = (texts if len(texts) == 1 else shows + texts)[
                    0
                ]  # reading a picture as JSON says what is wrong
                entries = [None]
                with suppress(
                    UserError
                ):  # a damaged record counts, and is reported when it is read
                    entries = entries_of(os.pread(file.fileno(), text[1], text[0])) or entries
                for question, entry in enumerate(entries):
                    length = 0
                    with suppress(*WRONG):
                        length = sum(map(len, chain(*read_turns(entry)[0])))
                    records.append((sample, question, *text, len(pictures), len(shows), length))
                pictures += shows
                sample += 1
            if os.pread(file.fileno(), BLOCK, tar.offset) != bytes(BLOCK):
                raise EOFError(
                    f"it ends at byte {tar.offset:,}"
                )  # tarfile stops in silence at a damaged header
    except Exception as error:  # tarfile raises errors of many kinds on damaged files
        problem = (
            f"no whole tar, or a compressed one ({error}): make or copy it again, uncompressed"
        )
        raise UserError(f"{shard}: {problem}") from None
    columns, places = (
        np.array(rows, dtype=np.int64).reshape(-1, n) for rows, n in ((records, 7), (pictures, 2))
    )
    return {"records": columns, "pictures": places, "tar": np.array([shard.stat().st_size])}


def key_of(name: str) -> str:
    """The key of a member: its name up to the first dot of the file's, as in webdataset; a hidden
    file has none."""
    match = re.match(r"((?:.*/)?[^./]+)[^/]*\Z", name, re.DOTALL)
    return match[1] if match else ""


def entries_of(content: bytes) -> list:
    """The questions in a sample's .json. Raises UserError if it is damaged."""
    value = parse_json(content, ".json")
    return value if isinstance(value, list) else [value]


def read_member(shard: Path, offset: int, size: int) -> BytesIO:
    """The member whose content begins at `offset`, in memory, with a `name` for messages. Raises
    UserError."""
    try:
        with shard.open("rb") as file:
            file.seek(offset - BLOCK)
            member = tarfile.TarInfo.frombuf(file.read(BLOCK), "utf-8", "surrogateescape")
            content = BytesIO(file.read(size))
    except (OSError, tarfile.HeaderError) as error:
        raise UserError(
            f"{shard}: no member at byte {offset:,} ({error}): delete its .index.safetensors"
        ) from None
    content.name = f"{shard.name}/{shown(member.name, 1000)}"
    return content


class Shards(Sequence):
    """The records of tar shards by number, each read when it is needed. split, fraction,
    validation: by sample, as for other data on disk. buffer: how many records are shuffled
    together. Raises UserError."""

    def __init__(
        self,
        *patterns: str,
        split="train",
        fraction=1.0,
        validation=0.0,
        seed=0,
        buffer=10_000,
        sampled=False,
    ):
        self.paths, self.buffer, self.sampled = [*chain(*map(expand, patterns))], buffer, sampled
        absent = [*islice((str(path) for path in self.paths if not path.is_file()), 6)]
        if absent or not self.paths:
            raise UserError(
                f"{' '.join(patterns)}: not found ({some(absent)}): check {{first..last}}"
            )
        self.pictures, rows, samples = [], [], 0
        for number, path in enumerate(tqdm(self.paths, "indices of shards", delay=2)):
            index = index_of(path)
            part = index["records"]
            count = int(part[:, SAMPLE].max(initial=-1)) + 1
            held_out, used = np.random.default_rng((seed, number)).random((2, count))[
                :, part[:, SAMPLE]
            ]
            keep = (
                held_out < validation
                if split == "validation"
                else (held_out >= validation) & (used < fraction)
            )
            part[:, SAMPLE] += samples
            rows.append(part[keep])
            self.pictures.append(index["pictures"])
            samples += count
        self.rows, self.ends = np.concatenate(rows), np.cumsum(list(map(len, rows)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Record:
        """The record `index`; a damaged one raises UserError when its picture is opened."""
        number = int(np.searchsorted(self.ends, index, side="right"))
        shard, (sample, question, text, size, first, count, _) = (
            self.paths[number],
            self.rows[index].tolist(),
        )
        name = f"{shard.name}[{sample}]"
        try:
            file = read_member(shard, text, size)
            name = f"{key_of(file.name)}[{question}] ({sample})"  # a tar header cuts long names
            entry = entries_of(file.read())[question]
            places = self.pictures[number][first : first + count].tolist()
            chosen = entry.get("pictures", [0] if count == 1 else None)
            pictures = tuple(partial(read_member, shard, *places[place]) for place in chosen)
            turns, answers = read_turns(entry)
            name = entry["name"] if isinstance(entry.get("name"), str) else name
            kind = str(entry.get("type") or "")
            return Record(
                name,
                f"{shard}: {sample} {chosen}",
                pictures,
                turns,
                answers,
                self.sampled,
                kind=kind,
            )
        except WRONG as error:
            expected = (
                'one picture and one .json of {"prefix", "suffix"}, or of "pictures" beside them'
            )
            problem = f"{problem_of(error)}; expected {expected}: make the shard again"
            return Record(name, name, (Refusal(problem),), ())

    def plan(
        self,
        batch_size: int,
        seed: int,
        epoch: int,
        per_picture: int = 1,
        first: int = 0,
        picture_tokens: int = 0,
    ) -> Iterator[list[int]]:
        """The micro-batches of an epoch from number `first` on: of shuffled shards, by `plan_epoch`
        within a window of `buffer` records. All but the last have `batch_size` records."""
        parts = np.split(np.arange(len(self)), self.ends[:-1])
        random.Random(f"shards/{seed}/{epoch}").shuffle(parts)
        order, window = np.concatenate(parts), batch_size * max(1, self.buffer // batch_size)
        for start in range(first * batch_size // window * window, len(order), window):
            numbers = order[start : start + window]
            rows = self.rows[numbers]
            lengths = rows[:, LENGTH] // CHARACTERS + (rows[:, PICTURE_COUNT] - 1) * picture_tokens
            given = (
                rows[:, SAMPLE].tolist(),
                lengths.tolist(),
                batch_size,
                f"{seed}/{start}",
                epoch,
                per_picture,
            )
            for batch in plan_epoch(*given)[max(0, first - start // batch_size) :]:
                yield numbers[batch].tolist()
