"""safetensors files read into a model's parameters, and written, one chunk at a time.

In: paths and names (their meaning is data in `weights/mapping.py`). Out: filled parameters, or files.
The format (https://github.com/huggingface/safetensors#format) is eight bytes of header length, a JSON header of
{name: dtype, shape, byte range}, and the bytes of the tensors. A tensor that keeps its dtype on the CPU is a view of
the mapped file. A tensor that is cast or moved to a device is mapped one chunk at a time: mapped pages count as memory
of the process, so casting a whole 12 GB file to bf16 would hold both copies.
"""

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import nn

from model.common import UserError, file_errors, open_regular, parse_json, quoted, read_json, shown, write_text

# what a checkpoint of weights may hold; quantised and integer tensors are refused by name
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
CHUNK_BYTES = 16 << 20
READERS = 2  # one converts while the other waits for the disk
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_FILES, _MAX_AXES = 10_000, 8  # of an index, of a tensor
_MAX_PROBLEMS = 8  # that one error lists


@dataclass(frozen=True)
class Entry:
    """One tensor in a file: its dtype as the file names it, its shape, and its byte range in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file by name; no tensor is read.

    Raises UserError for a file that is truncated or too long, a header that is not JSON or names a tensor twice, and
    byte ranges that overlap, leave gaps, or disagree with dtype and shape.
    """
    remedy = "download or save the file again"
    with file_errors(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise UserError(f"{path}: truncated, or no safetensors file: {remedy}")
        header = parse_json(file.read(length), f"{path}: damaged header", unique_keys=True)
    try:
        header.pop("__metadata__", None)
        entries = {name: _entry(path, 8 + length, **fields) for name, fields in header.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: damaged header ({shown(str(error))}): {remedy}") from None

    position = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            raise UserError(
                f"{path}: damaged header ({quoted(name)} overlaps another tensor or leaves a gap): {remedy}"
            )
        position = entry.end
    if size < position:
        raise UserError(f"{path}: truncated, {position - size:,} of {position:,} bytes are missing: {remedy}")
    if size > position:
        raise UserError(f"{path}: {size - position:,} bytes follow the last tensor: {remedy}")
    return entries


def find_tensors(folder: Path) -> tuple[dict[str, Entry], set[str], list[str]]:
    """The tensors of a folder's model.safetensors, or of the weight files that its index names.

    Returns them by name, the names that an unreadable file should hold, and what is wrong, a line each. An index may
    name files of its folder only (or, in the hub's download cache, links to the blobs of that model).
    """
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.exists() and index.exists():
        return {}, set(), [f"{folder}: holds both {SINGLE_FILE} and {INDEX_FILE}: remove one of them"]
    if not index.exists():
        try:
            return read_header(single), set(), []
        except UserError as error:
            return {}, set(), [str(error)]

    try:
        weight_map = read_json(index, unique_keys=True).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise UserError(f"{index}: weight_map must give a file name for each tensor: download the file again")
        promises: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            promises.setdefault(file, set()).add(name)
        if not 1 <= len(promises) <= _MAX_FILES:
            raise UserError(f"{index}: names {len(promises)} files, expected 1 to {_MAX_FILES}: download it again")
    except UserError as error:
        return {}, set(), [str(error)]
    entries, unreadable, problems = {}, set(), []
    for file, promised in sorted(promises.items()):
        try:
            held = read_header(in_folder(folder, file, index))
        except UserError as error:
            unreadable |= promised
            problems.append(str(error))
            continue
        for names, what in (
            (promised - held.keys(), f"lacks what {index.name} places there"),
            (held.keys() - promised, f"holds what {index.name} does not place there"),
        ):
            if names:
                where = folder / shown(file)
                problems.append(f"{where}: {what} ({shorten(names)}): download the index and the files again")
        unreadable |= promised - held.keys()
        entries |= {name: entry for name, entry in held.items() if name in promised}
    return entries, unreadable, problems


def in_folder(folder: Path, file: str, index: Path) -> Path:
    """The path of a file that an `index` names. Raises UserError for one outside of the index's folder."""
    home = folder.resolve()
    homes = [home]
    if home.parent.name == "snapshots":  # the hub's cache links from <model>/snapshots/<commit> to <model>/blobs
        homes.append(home.parents[1] / "blobs")
    try:
        target = (home / file).resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, a zero byte
        homes = []
    if "\\" in file or not any(target.is_relative_to(home) for home in homes):
        problem = f"names {quoted(file)}, a file outside its folder"
        raise UserError(f"{index}: {problem}: take the checkpoint from its publisher")
    return folder / file


@dataclass
class Comparison:
    """How the tensors of a checkpoint cover a model's parameters."""

    name_map: dict[str, str]  # the file's name: ours
    missing: list[str]  # ours
    unexpected: list[str]  # the file's
    misshaped: list[str]  # "name is (2, 3), expected (3, 2)"

    def problems(self, where: Path, entries: Mapping[str, Entry]) -> list[str]:
        """What is wrong, a line each, including tensors that are not floating point."""
        remedy = "the files are incomplete or config.json is another model's: take all of them from one place"
        strange = [
            f"{name} is {shown(entry.dtype)}" for name, entry in entries.items() if entry.dtype not in STORED_DTYPES
        ]
        found = (
            (self.missing, "missing", remedy),
            (self.unexpected, "unexpected", remedy),
            (self.misshaped, "of other sizes than config.json says", remedy),
            (strange, f"not in {', '.join(STORED_DTYPES)}", "quantised checkpoints are not read: take the original"),
        )
        return [f"{where}: tensors {what}, {len(names)}: {shorten(names)}: {do}" for names, what, do in found if names]


def compare(
    entries: Mapping[str, Entry],
    unreadable: Iterable[str],
    allowed: Mapping[str, str],
    wanted: Mapping[str, tuple[int, ...]],
) -> Comparison:
    """Compare files with a model. allowed: {name that a file may use: ours}. wanted: our names and shapes."""
    name_map = {name: allowed[name] for name in entries if name in allowed}
    promised = {*name_map.values(), *(allowed[name] for name in unreadable if name in allowed)}
    return Comparison(
        name_map,
        missing=[name for name in wanted if name not in promised],
        unexpected=[name for name in entries if name not in allowed],
        misshaped=[
            f"{name} is {entries[name].shape}, expected {wanted[ours]}"
            for name, ours in name_map.items()
            if entries[name].shape != wanted[ours]
        ],
    )


def in_one_line(where: Path, problems: list[str]) -> str:
    """All problems of a checkpoint as the text of one UserError."""
    if len(problems) == 1:
        return problems[0]
    numbered = "; ".join(f"({number}) {problem}" for number, problem in enumerate(problems[:_MAX_PROBLEMS], 1))
    return f"{where}: {len(problems)} problems: {numbered}"


def shorten(names: Iterable[str], limit: int = 4) -> str:
    """The first few of many names, and how many more."""
    names = sorted(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(shown(name) for name in names[:limit]) + rest


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _entry(path: Path, base: int, *, dtype: str, shape: list[int], data_offsets: list[int]) -> Entry:
    start, end = data_offsets
    if not isinstance(dtype, str) or len(shape) > _MAX_AXES or not all(_is_size(n) for n in (*shape, start, end)):
        given = ", ".join(map(quoted, (dtype, shape, data_offsets)))
        raise ValueError(f"impossible dtype, shape or byte range {given}")
    if start > end or dtype in STORED_DTYPES and end - start != prod(shape) * STORED_DTYPES[dtype].itemsize:
        raise ValueError(f"{end - start} bytes for {dtype} of shape {shape}")
    return Entry(path, dtype, tuple(shape), base + start, base + end)


def stream_into(
    model: nn.Module, entries: Mapping[str, Entry], name_map: Mapping[str, str], device: torch.device | str = "cpu"
) -> None:
    """Fill `model`, built on the meta device in its final dtype, from safetensors files; its tensors are on `device`.

    entries: tensors in files by name, as `read_header` returns them. name_map: {their name: the model's}, with every
    parameter and persistent buffer that is still on the meta device; shapes must agree. A CPU tensor that needs no cast
    is a private view of the mapped file: the system reads its pages when they are first used and copies them when they
    are written. So the file may be replaced while the model lives, but not changed in place. All other tensors are
    copied in chunks, and memory holds one chunk a reader beside the model. Where several tensors map to one parameter
    (a tied head and the embedding), the first fills it and the others must equal it.
    Every value is checked to be finite in the model's dtype, which reads each file once. Raises UserError if a value is
    not, or tied tensors differ; the model is then unchanged.
    """
    device = torch.device(device)
    filled: dict[str, torch.Tensor] = {}
    first: dict[str, str] = {}  # our name: the tensor that fills it
    copied, viewed, tied = [], [], []
    wanted = model.state_dict()
    there = {name: tensor for name, tensor in wanted.items() if not tensor.is_meta}
    for name, entry in sorted(entries.items(), key=lambda item: (str(item[1].path), item[1].start)):
        target = name_map[name]
        dtype, shape = wanted[target].dtype, wanted[target].shape
        assert shape == entry.shape, f"{name}: shapes are compared before anything is read"
        if first.setdefault(target, name) != name:
            tied.append((name, entry, filled[target].view(-1)))
        elif device.type == "cpu" and dtype == STORED_DTYPES[entry.dtype]:
            filled[target] = view(entry, 0, shape.numel()).view(shape)
            viewed.append((name, entry, filled[target].view(-1)))
        else:
            filled[target] = torch.empty(shape, dtype=dtype, device=device)
            copied.append((name, entry, filled[target].view(-1)))

    def copy_chunk(name: str, entry: Entry, start: int, end: int, target: torch.Tensor) -> None:
        stored = view(entry, start, end)
        target.copy_(stored.to(device))
        require_finite(f"{entry.path}: {name}", target, stored)

    def check_chunk(name: str, entry: Entry, start: int, end: int, target: torch.Tensor) -> None:
        require_finite(f"{entry.path}: {name}", target, target)

    def compare_chunk(name: str, entry: Entry, start: int, end: int, target: torch.Tensor) -> None:
        if not torch.equal(view(entry, start, end).to(device, target.dtype), target):
            raise UserError(untied(entry, name, first[name_map[name]]))

    with ThreadPoolExecutor(READERS) as pool:
        for run, tensors in ((copy_chunk, copied), (check_chunk, viewed), (compare_chunk, tied)):
            for _ in pool.map(lambda job, run=run: run(*job), _chunks(tensors)):
                pass
    model.load_state_dict(there | filled, assign=True)


def read_rows(name: str, entry: Entry, dtype: torch.dtype, device: torch.device, rows: int) -> Iterator[torch.Tensor]:
    """The matrix of an entry in `dtype` on `device`, `rows` of it at a time. Raises UserError if it is not finite."""
    height, width = entry.shape
    for start in range(0, height, rows):
        stored = view(entry, start * width, min(start + rows, height) * width)
        piece = stored.to(device, dtype)
        require_finite(f"{entry.path}: {name}", piece, stored)
        yield piece.view(-1, width)


def untied(entry: Entry, name: str, first: str) -> str:
    """What is wrong where `name` is not equal to the tensor `first`."""
    return (
        f"{entry.path}: {name} differs from {first}, but this model ties the two and cannot hold a head of its own: "
        "save the checkpoint with tied weights"
    )


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite. One pass without a temporary tensor: aminmax keeps a NaN."""
    return not tensor.numel() or all(math.isfinite(value) for value in torch.stack(tensor.aminmax()).tolist())


def require_finite(
    where: str,
    values: torch.Tensor,
    stored: torch.Tensor,
    remedy: str = "download the file again, or take an earlier checkpoint",
) -> None:
    """Raise UserError unless all `values` are finite. stored: the same values before they were cast."""
    if is_finite(values):
        return
    if is_finite(stored):
        dtype = str(values.dtype).removeprefix("torch.")
        raise UserError(f"{where} holds values beyond the range of {dtype}: choose another dtype")
    raise UserError(f"{where} holds NaN or infinity: {remedy}")


def _chunks(tensors: Iterable[tuple]) -> Iterator[tuple]:
    """Pieces of at most CHUNK_BYTES: (name, entry, first element, last element + 1, that part of the flat target)."""
    for name, entry, flat in tensors:
        step = CHUNK_BYTES // STORED_DTYPES[entry.dtype].itemsize
        for start in range(0, flat.numel(), step):
            end = min(start + step, flat.numel())
            yield name, entry, start, end, flat[start:end]


def view(entry: Entry, start: int = 0, end: int | None = None) -> torch.Tensor:
    """Elements start to end of a tensor as a private view of its file: writing to it changes memory only."""
    dtype, end = STORED_DTYPES[entry.dtype], prod(entry.shape) if end is None else end
    if start == end:
        return torch.empty(0, dtype=dtype)
    begin, length = entry.start + start * dtype.itemsize, (end - start) * dtype.itemsize
    margin = begin % mmap.ALLOCATIONGRANULARITY  # maps begin at whole pages
    with file_errors(entry.path), open_regular(entry.path) as file:
        if os.fstat(file.fileno()).st_size < entry.end:
            raise UserError(f"{entry.path}: has become shorter while it was read: load it again")
        pages = mmap.mmap(file.fileno(), margin + length, access=mmap.ACCESS_COPY, offset=begin - margin)
    raw = torch.frombuffer(pages, dtype=torch.uint8, count=length, offset=margin)
    aligned = raw if begin % dtype.itemsize == 0 else raw.clone()
    return aligned.view(dtype)


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    chunks: Callable[[str], Iterable[torch.Tensor]],
    parts: list[list[str]],
) -> None:
    """Write tensors to `folder` as model.safetensors, or as several files with the index that transformers reads.

    tensors: dtype and shape by name. chunks: yields the elements of a tensor in order, as flat pieces of that dtype.
    parts: the names in each file. Memory holds one piece at a time.
    """
    files = (
        [SINGLE_FILE]
        if len(parts) == 1
        else [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    )
    for file, names in zip(files, parts, strict=True):
        names = sorted(names, key=lambda name: -tensors[name][0].itemsize)  # every tensor is then aligned
        header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name in names:
            dtype, shape = tensors[name]
            end = position + byte_size(dtype, shape)
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
            position = end
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(raw).to_bytes(8, "little") + raw)
            for name in names:
                for chunk in chunks(name):
                    out.write(chunk.contiguous().view(torch.uint8).numpy().data)
            assert out.tell() == 8 + len(raw) + position, f"{file}: chunks and shapes disagree"
    if len(parts) > 1:
        total = sum(byte_size(*spec) for spec in tensors.values())
        weight_map = {name: file for file, names in zip(files, parts, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_text(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")


def byte_size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * prod(shape)
