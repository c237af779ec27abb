"""A checkpoint of any kind: found, compared with its config.json, and only then read into a model.

In: a folder, a hub id, the embedded base, or a big_vision .npz. Out: what it holds and what is wrong with it
(`examine`), or the model (`open_checkpoint`). How the kinds of models differ is data: `weights/registry.py`. Only
safetensors and .npz without pickles are ever opened.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lora import adapter
from model.common import UserError, file_errors
from model.config import PRESETS
from model.source import local_path, preset_of, resolve
from model.system_configs import read_config
from weights.mapping import detect_dialect, dialect_names
from weights.npz import NPZ, compare_npz, read_npz, stream_npz_into
from weights.quantized import stream_quantized
from weights.registry import build, is_published, names_of
from weights.streaming import (
    INDEX_FILE,
    SINGLE_FILE,
    Comparison,
    Entry,
    compare,
    find_tensors,
    in_one_line,
    shorten,
    stream_into,
)

PATTERNS = ["config.json", "generation_config.json", "model*.safetensors", INDEX_FILE, "*.npz"]
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass
class Checkpoint:
    """What a source holds, known from its headers alone."""

    folder: Path
    entries: dict[str, Entry]  # by the name in the file
    problems: list[str]  # all that is wrong, a line each with its remedy
    config: Any = None  # a configuration of weights.registry.KINDS
    model: Any = None  # of that configuration, on the meta device in fp32
    dialect: str | None = None  # of weights.mapping, or NPZ
    comparison: Comparison | None = None  # None where a broken config.json or file leaves nothing to compare


def open_checkpoint(
    source: str | Path,
    dtype: torch.dtype,
    device: torch.device | str,
    revision: str | None = None,
    read: Callable[[Path], Any] = read_config,
    quantize: str | None = None,
) -> Any:
    """The model of `source` in eval mode, its parameters trainable.

    read: reads config.json, and so decides which kind of model is expected. quantize: as for `read_model`.
    """
    return read_model(examine(source, revision, read), dtype, device, quantize)


def read_model(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str = "cpu", quantize: str | None = None
) -> Any:
    """The model of an examined checkpoint, see `open_checkpoint`.

    On a CPU, tensors of the dtype asked for are views of the file, see `weights.streaming.stream_into`. Everything that
    is wrong with names, shapes, dtypes and files is reported in one UserError, before a tensor is read. quantize: a
    key of `lora.quantize.KINDS`; the model is then quantized while it is read (that of a .npz, afterwards).
    """
    if checkpoint.problems:
        raise UserError(in_one_line(checkpoint.folder, checkpoint.problems))
    assert checkpoint.comparison is not None, "a checkpoint without problems has been compared"
    model = checkpoint.model.to(dtype)
    files = checkpoint.entries, checkpoint.comparison.name_map, device
    if torch.device(device).type == "meta":
        return quantized(model, quantize)
    if checkpoint.dialect == NPZ:
        stream_npz_into(model, *files)
        return quantized(model, quantize)
    if quantize is None:
        stream_into(model, *files)
    else:
        stream_quantized(model, quantize, *files)
    return model


def quantized(model: Any, kind: str | None) -> Any:
    """`model`, all of its layers quantized to `kind`; None leaves them as they are."""
    if kind is not None:
        adapter.quantize(model, kind, head=True)
    return model


def examine(source: str | Path, revision: str | None = None, read: Callable[[Path], Any] = read_config) -> Checkpoint:
    """Read config.json and the headers of `source` and compare them; no tensor is read.

    Raises UserError where there is nothing to examine: no such folder, or no tensors in a format that is opened.
    """
    path = local_path(source)
    if preset_of(source):
        raise UserError(f"{source}: is a preset of random weights, without files: give a folder or a hub id")
    if path.suffix == ".npz" and path.is_file():
        return _examine_npz(path, read)
    with file_errors(source):
        folder = resolve(source, PATTERNS, revision)
        if not (folder / SINGLE_FILE).exists() and not (folder / INDEX_FILE).exists():
            return _examine_npz(_only_npz(folder), read)
        entries, unreadable, problems = find_tensors(folder)
    checkpoint = Checkpoint(folder, entries, problems)
    wanted = _read_config(checkpoint, read)
    if not entries and not unreadable and not problems:
        problems.append(f"{folder / SINGLE_FILE}: holds no tensors: download it again")
    if wanted and (entries or unreadable):
        _compare(checkpoint, unreadable, wanted)
    return checkpoint


def _compare(checkpoint: Checkpoint, unreadable: set[str], wanted: dict[str, tuple[int, ...]]) -> None:
    """Set the dialect and the comparison of `checkpoint`, and add to its problems. wanted: our names and shapes."""
    folder, problems, kind = checkpoint.folder, checkpoint.problems, names_of(checkpoint.config)
    entries = {name: entry for name, entry in checkpoint.entries.items() if not name.startswith(kind.ignored)}
    names = entries.keys() | unreadable
    checkpoint.entries, checkpoint.dialect = entries, detect_dialect(names, wanted, kind.dialects)
    if checkpoint.dialect is None:
        problems.append(f"{folder}: no tensor has a name of PaliGemma's ({shorten(names)}): choose such a checkpoint")
        return
    expected = kind.aliases | dialect_names(wanted, checkpoint.dialect)
    comparison = checkpoint.comparison = compare(entries, unreadable, expected, wanted)
    for other in kind.dialects:
        strays = dialect_names(comparison.missing, other)
        strays = {name: ours for name, ours in strays.items() if name in comparison.unexpected}
        if strays:
            problems.append(
                f"{folder}: most names are of dialect {checkpoint.dialect}, {len(strays)} of {other} "
                f"({shorten(strays)}): take all files from one revision"
            )
        comparison.missing = [name for name in comparison.missing if name not in strays.values()]
        comparison.unexpected = [name for name in comparison.unexpected if name not in strays]
    problems += comparison.problems(folder, entries)


def _examine_npz(npz: Path, read: Callable[[Path], Any]) -> Checkpoint:
    """big_vision's arrays of a PaliGemma, with config.json beside them or else the sizes of a preset."""
    checkpoint = Checkpoint(npz.parent, read_npz(npz), [], dialect=NPZ)
    if (npz.parent / "config.json").exists() or read is not read_config:
        wanted = _read_config(checkpoint, read)
        if wanted and not is_published(checkpoint.config):
            checkpoint.problems.append(
                f"{npz}: holds a PaliGemma, but config.json is of another model: remove one of them"
            )
        elif wanted:
            checkpoint.comparison = compare_npz(checkpoint.entries, wanted)
            checkpoint.problems += checkpoint.comparison.problems(npz, checkpoint.entries)
        return checkpoint
    for config in PRESETS.values():
        comparison = compare_npz(checkpoint.entries, _shapes_of_preset(config))
        if not comparison.problems(npz, checkpoint.entries):
            checkpoint.config, checkpoint.model, checkpoint.comparison = config, empty_model(config), comparison
            return checkpoint
    checkpoint.problems.append(f"{npz}: its arrays fit no preset of model/config.py: write a config.json beside it")
    return checkpoint


def _only_npz(folder: Path) -> Path:
    """The one .npz of a folder without safetensors. Raises UserError that says what the folder holds instead."""
    found = sorted(folder.glob("*.npz"))
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{folder}: holds several .npz files ({shorten(f.name for f in found)}): give the path of one")
    pickles = [file.name for file in folder.iterdir() if file.suffix in _PICKLES]
    if pickles:
        raise UserError(
            f"{folder}: {shorten(pickles)} can run any code when opened, and is not: take a model that comes as "
            "safetensors (Mamba: those whose name ends in -hf, such as state-spaces/mamba-130m-hf), or write a "
            f"pytorch_model.bin as such: python -m weights.convert {folder} OUT, which runs nothing in it"
        )
    if list(folder.glob("model-*.safetensors")):
        raise UserError(f"{folder}: holds parts of a model, but no {INDEX_FILE}: download that too")
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder}: holds an adapter, expected a model: give its base, and this as --adapter")
    if (folder / "checkpoints").is_dir():
        raise UserError(f"{folder}: a run that has not ended: go on with python -m train.finetune --resume {folder}")
    raise UserError(f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE} nor an .npz: give a model's own folder")


def _read_config(checkpoint: Checkpoint, read: Callable[[Path], Any]) -> dict[str, tuple[int, ...]]:
    """Set the config of `checkpoint` and return the shapes that it asks for, or note why there are none."""
    path = checkpoint.folder / "config.json"
    try:
        checkpoint.config = read(path)
        checkpoint.model = empty_model(checkpoint.config)
        return _shapes(checkpoint.model)
    except UserError as error:
        checkpoint.problems.insert(0, str(error))
    except (RuntimeError, MemoryError, OverflowError) as error:
        checkpoint.problems.insert(0, f"{path}: impossible sizes ({error}): download the file again")
    return {}


@lru_cache(maxsize=16)
def _shapes_of_preset(config: Any) -> dict[str, tuple[int, ...]]:
    return _shapes(empty_model(config))


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


class _SkipInit(TorchFunctionMode):
    """Skip what nn.init does: on the meta device it would compute nothing, and import torch's compiler to do so."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def empty_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a configuration on the meta device, in eval mode: names, shapes and dtype without memory."""
    with torch.device("meta"), _SkipInit():
        return build(config).to(dtype).eval()
