"""A checkpoint into a model: found, examined whole, and only then read.

In: a folder, a hub id, the bundled base, a preset's name, or a big_vision .npz. Out: `PaliGemma`, or another model of
`weights/registry.py`, in eval mode, in the dtype and on the device asked for, in no more memory than its weights. Needs
config.json and the tensors, no tokenizer. Only safetensors and .npz without pickles are ever opened.
Next: `model/generate.py`, `lora/adapter.py`.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from model.common import UserError
from model.config import PRESETS, PaliGemmaConfig
from model.paligemma import PaliGemma, initialize
from model.source import resolve
from model.system_configs import read_config
from weights.mamba import load_mamba as load_mamba  # the loader of text alone
from weights.mapping import DIALECTS, EMBEDDING, HEADS, OWN, detect_dialect, dialect_names
from weights.npz import NPZ, compare_npz, read_npz, stream_npz_into
from weights.registry import build, is_published
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

PATTERNS = ["config.json", "model*.safetensors", INDEX_FILE, "*.npz"]
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def load_model(
    source: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> PaliGemma:
    """The model of `source` in eval mode, its parameters trainable.

    source: a folder, a hub id at `revision`, "embedded", a preset's name (random weights; a folder of that name comes
    first), or a .npz file. On a CPU, tensors of that dtype are views of the file: see `weights.streaming.stream_into`.
    Everything that is wrong with the names, shapes, dtypes and files is found before a tensor is read, and told in one
    UserError. The head is the embedding: a stored `lm_head` must equal it, or a UserError says so (transformers would
    warn and untie the two, a model that this code does not have).
    """
    if str(source) in PRESETS and not Path(source).is_dir():
        return initialize(empty_model(PRESETS[str(source)], dtype).to_empty(device=device))
    checkpoint = examine(source, revision)
    if checkpoint.problems:
        raise UserError(in_one_line(checkpoint.folder, checkpoint.problems))
    model = empty_model(checkpoint.config, dtype)
    stream = stream_npz_into if checkpoint.dialect == NPZ else stream_into
    stream(model, checkpoint.entries, checkpoint.comparison.name_map, device)
    return model


class _SkipInit(TorchFunctionMode):
    """Skip what nn.init does: on the meta device it would compute nothing, and import torch's compiler to do so."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def empty_model(config: PaliGemmaConfig, dtype: torch.dtype = torch.float32) -> PaliGemma:
    """The model on the meta device: names, shapes and dtype without memory."""
    with torch.device("meta"), _SkipInit():
        return build(config).to(dtype).eval()


@dataclass
class Checkpoint:
    """What a source holds, known from its headers alone."""

    folder: Path
    entries: dict[str, Entry]  # by the name in the file
    problems: list[str]  # all that is wrong, a line each with its remedy
    config: PaliGemmaConfig | None = None
    dialect: str | None = None  # a key of weights.mapping.DIALECTS, or NPZ
    comparison: Comparison | None = None  # None where a broken config.json or file leaves nothing to compare


def examine(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Read config.json and the headers of `source` and compare them; no tensor is read.

    Raises UserError where there is nothing to examine: no such folder, or no tensors in a format that is opened.
    """
    path = Path(source).expanduser()
    if str(source) in PRESETS and not path.is_dir():
        raise UserError(f"{source}: is a preset of random weights, without files: give a folder or a hub id")
    npz = path if path.suffix == ".npz" and path.is_file() else None
    folder = npz.parent if npz else resolve(source, PATTERNS, revision)
    if npz is None and not (folder / SINGLE_FILE).exists() and not (folder / INDEX_FILE).exists():
        npz = _only_npz(folder)
    if npz is not None:
        return _examine_npz(npz)

    entries, unreadable, problems = find_tensors(folder)
    checkpoint = Checkpoint(folder, entries, problems)
    wanted = _read_config(checkpoint)
    names = entries.keys() | unreadable
    if not names and not problems:
        problems.append(f"{folder / SINGLE_FILE}: holds no tensors: download it again")
    if not wanted or not names:
        return checkpoint
    if not is_published(checkpoint.config):
        checkpoint.dialect = OWN
        checkpoint.comparison = compare(entries, unreadable, dialect_names(wanted, OWN), wanted)
        problems += checkpoint.comparison.problems(folder, entries)
        return checkpoint
    checkpoint.dialect = detect_dialect(names, wanted)
    if checkpoint.dialect is None:
        problems.append(f"{folder}: no tensor has a name of PaliGemma's ({shorten(names)}): choose such a checkpoint")
        return checkpoint
    meant = dialect_names(wanted, checkpoint.dialect) | dict.fromkeys(HEADS, EMBEDDING)
    comparison = checkpoint.comparison = compare(entries, unreadable, meant, wanted)
    for other in DIALECTS:
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
    return checkpoint


def _examine_npz(npz: Path) -> Checkpoint:
    """An .npz has its config.json beside it, or else the sizes of a preset."""
    checkpoint = Checkpoint(npz.parent, read_npz(npz), [], dialect=NPZ)
    if (npz.parent / "config.json").exists():
        if wanted := _read_config(checkpoint):
            checkpoint.comparison = compare_npz(checkpoint.entries, wanted)
            checkpoint.problems += checkpoint.comparison.problems(npz, checkpoint.entries)
        return checkpoint
    for config in PRESETS.values():
        comparison = compare_npz(checkpoint.entries, _shapes(config))
        if not comparison.problems(npz, checkpoint.entries):
            checkpoint.config, checkpoint.comparison = config, comparison
            return checkpoint
    checkpoint.problems.append(f"{npz}: its arrays fit no preset of model/config.py: write a config.json beside it")
    return checkpoint


def _read_config(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Set the config of `checkpoint` and return the shapes that it asks for, or note why there are none."""
    path = checkpoint.folder / "config.json"
    try:
        checkpoint.config = read_config(path)
        return _shapes(checkpoint.config)
    except UserError as error:
        checkpoint.problems.insert(0, str(error))
    except (RuntimeError, MemoryError, OverflowError) as error:
        checkpoint.problems.insert(0, f"{path}: impossible sizes ({error}): download the file again")
    return {}


def _shapes(config: PaliGemmaConfig) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in empty_model(config).state_dict().items()}


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
            f"{folder}: {shorten(pickles)} can run any code when opened, and is not: if you trust it, load it with "
            "transformers and save it again with save_pretrained, which writes safetensors"
        )
    if list(folder.glob("model-*.safetensors")):
        raise UserError(f"{folder}: holds shards, but no {INDEX_FILE}: download that too")
    if (folder / "adapter_config.json").exists():
        raise UserError(f"{folder}: holds an adapter, expected a model: give its base, and this as --adapter")
    raise UserError(f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE} nor an .npz: give a model's own folder")
