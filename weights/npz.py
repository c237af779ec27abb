"""big_vision's .npz of PaliGemma: a zip of arrays with the layers stacked, read one layer at a
time.

Names and axes are data in `weights/mapping.py` (https://github.com/google-research/big_vision).
Pickled arrays are refused.
"""

import contextlib
import zipfile
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from model.common import UserError, shown
from weights.mapping import STORED_DTYPES, Entry, big_vision_rules, is_stacked

# numpy has no bfloat16: files hold raw bytes
_DTYPES = {"<f8": "F64", "<f4": "F32", "<f2": "F16", "|V2": "BF16"}
_TREE = "params/"  # the weights; a training checkpoint holds other trees too


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """The archive, and the arrays of its weights by key, without "params/" and ".npy"."""
    try:
        with zipfile.ZipFile(path) as archive:
            members, weights = {}, {}
            for info in archive.infolist():
                key = info.filename.removesuffix(".npy")
                members[key] = info
                if key.startswith(_TREE):
                    weights[key.removeprefix(_TREE)] = info
            yield archive, weights or members
    # a damaged archive makes zipfile and numpy raise errors of many classes
    except Exception as error:
        raise UserError(
            f"{path}: no .npz that can be read ({shown(error)}): download the file again"
        ) from None


def _read_header(array: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and dtype of an array. Raises ValueError for what is not a plain array."""
    read = np.lib.format.read_array_header_2_0
    if np.lib.format.read_magic(array) == (1, 0):
        read = np.lib.format.read_array_header_1_0
    shape, fortran, dtype = read(array)
    if dtype.hasobject or fortran and len(shape) > 1:
        raise ValueError(
            "a pickled array, or one in Fortran order: save it with numpy.ascontiguousarray"
        )
    return shape, dtype


def read_headers(path: Path) -> dict[str, Entry]:
    """What the file holds by our names, arrays of no such name by their keys; no array is read.
    Raises UserError."""
    entries = {}
    with _opened(path) as (archive, members):
        rules = big_vision_rules(members)
        for key, member in members.items():
            with archive.open(member) as array:
                shape, dtype = _read_header(array)
                if member.file_size != (end := array.tell() + dtype.itemsize * prod(shape)):
                    raise ValueError(f"{key} has {member.file_size} bytes instead of {end}")
            layers = shape[0] if is_stacked(key) and shape else 1
            for template, rule in rules.get(key, {key: lambda w: w}).items():
                try:
                    given = tuple(rule(torch.empty(shape[is_stacked(key) :], device="meta")).shape)
                except (RuntimeError, IndexError):  # not even the right number of axes
                    given = shape
                entry = Entry(path, given, _DTYPES.get(dtype.str, str(dtype.str)))
                for layer in range(min(layers, 1000)):
                    entries[template.format(layer)] = entry
    return entries


def read_npz(
    path: Path,
    wanted: Mapping[str, Tensor],
    device: Any,
) -> dict[str, Tensor]:
    """The parameters by our names, with the shapes and dtypes of `wanted`. Beside them, memory
    holds one layer.

    The embedding in the file lacks rows that no text uses, as of `<image>`: here they are the mean
    of the others.
    """
    filled = {name: torch.empty_like(like, device=device) for name, like in wanted.items()}
    with _opened(path) as (archive, members):
        for key, templates in big_vision_rules(members).items():
            with archive.open(members[key]) as array:
                shape, dtype = _read_header(array)
                of_layer = shape[is_stacked(key) :]
                for layer in range(shape[0] if is_stacked(key) else 1):
                    buffer = bytearray(dtype.itemsize * prod(of_layer))
                    array.readinto(buffer)
                    stored = torch.frombuffer(buffer, dtype=STORED_DTYPES[_DTYPES[dtype.str]])
                    stored = stored.view(of_layer)
                    for template, rule in templates.items():
                        target, values = filled[template.format(layer)], rule(stored)
                        target[: len(values)] = values.to(device)
                        if len(values) < len(target):
                            total = sum(rows.double().sum(0) for rows in values.split(4096))
                            target[len(values) :] = (total / len(values)).to(target)
    return filled
