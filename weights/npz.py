"""big_vision's .npz of PaliGemma: a zip of arrays with the layers stacked, read one layer at a time.

In: a file as Google published it (https://github.com/google-research/big_vision). Out: filled parameters. Names and
axes are data in `weights/mapping.py`. Pickled arrays are refused.
"""

import zipfile
import zlib
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import nn

from model.common import UserError, open_regular, shown
from weights.mapping import EMBEDDING_KEY, big_vision_rules, is_stacked
from weights.streaming import STORED_DTYPES, Comparison, Entry, require_finite

NPZ = "big_vision"  # the name of this dialect
_DTYPES = {"<f8": "F64", "<f4": "F32", "<f2": "F16", "|V2": "BF16"}  # numpy has no bfloat16: files hold it as raw bytes
_ROWS = 4096
_MAX_PADDING = 65  # transformers' conversion adds two rows, then rounds up to a multiple of 64
_TREE = "params/"  # the weights; a training checkpoint holds other trees too


def read_npz(path: Path) -> dict[str, Entry]:
    """The arrays of the model by key, without "params/"; no array is read. Byte ranges are those within a zip member.

    Raises UserError for a damaged file and for a pickled array.
    """
    entries = {}
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            for key, member in _members(archive).items():
                with archive.open(member) as array:
                    shape, dtype = _read_array_header(array)
                    start, end = array.tell(), array.tell() + dtype.itemsize * prod(shape)
                if member.file_size != end:
                    raise ValueError(f"{shown(key)} has {member.file_size} bytes instead of {end}")
                entries[key] = Entry(path, _DTYPES.get(dtype.str, str(dtype)), shape, start, end)
    except UserError:
        raise
    except Exception as error:  # a damaged archive makes zipfile and numpy raise errors of many classes
        raise UserError(f"{path}: no .npz that can be read ({shown(str(error))}): download the file again") from None
    return entries


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The arrays of the weights by key, without "params/" and ".npy". Raises ValueError if a name occurs twice."""
    members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    if len(members) < len(archive.infolist()):
        raise ValueError("a name occurs twice")
    weights = {key.removeprefix(_TREE): info for key, info in members.items() if key.startswith(_TREE)}
    return weights or members


def _read_array_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"array format {version}")
    reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = reader(file)
    if dtype.hasobject:
        raise ValueError("a pickled array, which could run any code and is not opened")
    if fortran and len(shape) > 1:
        raise ValueError("an array in Fortran order, save it with numpy.ascontiguousarray")
    return shape, dtype


def compare_npz(entries: Mapping[str, Entry], wanted: Mapping[str, tuple[int, ...]]) -> Comparison:
    """How the arrays cover the parameters `wanted`, {name: shape}. The map gives the first parameter of each array."""
    rules = big_vision_rules(wanted)
    name_map, misshaped = {}, []
    missing = set(wanted)
    for key in (key for key in entries if key in rules):
        layers = rules[key]
        missing.difference_update(*layers)
        name_map[key] = name = next(iter(layers[0]))
        shape = entries[key].shape if is_stacked(key) else (1, *entries[key].shape)
        if key == EMBEDDING_KEY and len(shape) == 3 and 0 < wanted[name][0] - shape[1] <= _MAX_PADDING:
            shape = (1, wanted[name][0], shape[2])
        try:
            results = {n: tuple(rule(torch.empty(shape[1:], device="meta")).shape) for n, rule in layers[0].items()}
        except (RuntimeError, IndexError):  # not even the right number of axes
            results = {}
        if shape[:1] != (len(layers),) or results != {n: wanted[n] for n in layers[0]}:
            times = f" of {len(layers)} layers" if is_stacked(key) else ""
            misshaped.append(f"{key} is {entries[key].shape}, expected to give {name} {wanted[name]}{times}")
    return Comparison(name_map, sorted(missing), sorted(entries.keys() - rules.keys()), misshaped)


def stream_npz_into(
    model: nn.Module, entries: Mapping[str, Entry], name_map: Mapping[str, str], device: torch.device | str = "cpu"
) -> None:
    """`weights.streaming.stream_into` for the arrays of a .npz. Beside the model, memory holds one layer of one array.

    The embedding in the file lacks the rows of `<image>` and of the padding of the vocabulary. transformers' conversion
    draws them around the mean of the others (with 1e-5 of their variance, unseeded); here they are that mean. No text
    uses them.
    """
    wanted = model.state_dict()
    filled = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device=device) for name, tensor in wanted.items()}
    rules = big_vision_rules(wanted)
    path = next(iter(entries.values())).path
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = _members(archive)
            for key in name_map:
                with archive.open(members[key]) as array:
                    array.read(entries[key].start)
                    if key == EMBEDDING_KEY:
                        _fill_embedding(filled[name_map[key]], array, key, entries[key])
                        continue
                    shape = entries[key].shape[is_stacked(key) :]
                    for layer in rules[key]:
                        stored = _read_array(array, entries[key].dtype, shape)
                        for name, rule in layer.items():
                            filled[name].copy_(rule(stored))
                            require_finite(f"{path}: {key}", filled[name], stored)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path}: damaged ({error}): download the file again") from None
    model.load_state_dict(filled, assign=True)


def _fill_embedding(target: torch.Tensor, file: IO[bytes], key: str, entry: Entry) -> None:
    """Copy the rows of the file, and fill the rows that it lacks with their mean."""
    rows, width = entry.shape
    total = torch.zeros(width, dtype=torch.float64)
    for start in range(0, rows, _ROWS):
        chunk = _read_array(file, entry.dtype, (min(_ROWS, rows - start), width))
        target[start : start + len(chunk)] = chunk.to(target.device)
        require_finite(f"{entry.path}: {key}", target[start : start + len(chunk)], chunk)
        total += chunk.double().sum(0)
    target[rows:] = (total / rows).to(target)


def _read_array(file: IO[bytes], dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The next array of a zip member."""
    buffer = bytearray(STORED_DTYPES[dtype].itemsize * prod(shape))
    view = memoryview(buffer)
    while view:
        count = file.readinto(view)
        if not count:
            raise EOFError("an array ends early")
        view = view[count:]
    return torch.frombuffer(buffer, dtype=STORED_DTYPES[dtype]).view(shape)
