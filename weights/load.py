"""Models from checkpoints: names and shapes are compared with config.json before a tensor is read.

The model is in eval mode, its parameters trainable, and takes no more memory than its weights. What
files call a tensor is data in `weights/mapping.py`. Only safetensors and .npz without pickles are
opened.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from model import cpu
from model.common import UserError, file_errors, read_json, shown
from model.config import PRESETS, PaliGemmaConfig, VisionConfig, config_errors, require
from model.paligemma import PaliGemma, initialize
from model.registry import read_config, system_of
from model.siglip import Siglip
from model.source import local_path, preset_of, resolve
from weights import mapping
from weights.mapping import STORED_DTYPES, Entry
from weights.quantize import pack, replaceable

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PATTERNS = ["config.json", "generation_config.json", "model*.safetensors", INDEX_FILE, "*.npz"]
# rows of an embedding that a .npz lacks: transformers adds two, then rounds up to a multiple of 64
MAX_PADDING = 65


def kind_of(config: Any) -> tuple[type[nn.Module], mapping.Names]:
    """The class of a configuration, and the names in its files."""
    if type(config) is PaliGemmaConfig:
        return PaliGemma, mapping.PALIGEMMA_NAMES
    if type(config) is VisionConfig:
        return Siglip, mapping.SIGLIP_NAMES
    system = system_of(config.kind)
    assert system is not None, f"{config.kind} is in no table"
    return system.model, mapping.Names({mapping.OWN: system.prefixes}, system.aliases)


class _SkipInit(TorchFunctionMode):
    """Skip what nn.init does: on the meta device it would compute nothing, and import torch's
    compiler to do so."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__module__", None) == "torch.nn.init":
            return (kwargs or {}).get("tensor", args[0] if args else None)
        return func(*args, **(kwargs or {}))


def empty_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a configuration on the meta device, in eval mode: names, shapes and dtype
    without memory."""
    cpu.check_ways()
    with torch.device("meta"), _SkipInit():
        return kind_of(config)[0](config).to(dtype).eval()


@dataclass
class Checkpoint:
    """What a source holds, known from its headers alone."""

    folder: Path
    entries: dict[str, Entry]  # by the name in the file
    model: Any  # of its configuration, on the meta device
    dialect: str  # of `weights.mapping`
    names: dict[str, str]  # {the file's name: ours}
    problems: list[str]  # each tensor that does not fit

    def check(self) -> None:
        """Raise UserError for the problems."""
        if self.problems:
            count, listed = len(self.problems), "; ".join(self.problems[:8])
            raise UserError(
                f"{self.folder}: {count} tensors do not fit config.json: {listed}: take all files "
                "from one model"
            )


def open_tensors(path: Path) -> Any:
    """The safetensors file `path`, mapped: `keys`, `get_slice`, `get_tensor`, `metadata`. Raises
    UserError."""
    try:
        with file_errors(path):
            return safe_open(path, "pt")
    except SafetensorError as error:
        raise UserError(
            f"{shown(path)}: no whole safetensors file ({shown(error)}): download it again"
        ) from None


def save_tensors(
    tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file with the permissions of any new file: the package gives it to its
    owner alone."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata)
    path.chmod(mode)


def find_files(folder: Path) -> list[Path]:
    """model.safetensors, or the files that its index names, or an .npz. Raises UserError, also for
    both of the former."""
    index, is_single = folder / INDEX_FILE, (folder / SINGLE_FILE).is_file()
    if index.is_file():
        with config_errors(index):
            names = {Path(file).name for file in read_json(index)["weight_map"].values()}
            problem = f"names no file, or others than the {SINGLE_FILE} beside it"
            require(names and (not is_single or names == {SINGLE_FILE}), problem)
        return [folder / name for name in sorted(names)]
    if is_single:
        return [folder / SINGLE_FILE]
    arrays = list(folder.glob("*.npz"))
    if len(arrays) == 1:
        return arrays
    raise UserError(
        f"{folder}: holds neither {SINGLE_FILE} nor {INDEX_FILE} nor one .npz: give a model's own "
        "folder, not an adapter, a run or pickles"
    )


def read_headers(file: Path) -> dict[str, Entry]:
    """The tensors of a file by name; none is read. Raises UserError."""
    if file.suffix == ".npz":
        from weights import npz  # for a reader of this file, only where there is one

        return npz.read_headers(file)
    opened = open_tensors(file)
    entries = {}
    for name in opened.keys():  # noqa: SIM118
        part = opened.get_slice(name)
        entries[name] = Entry(file, tuple(part.get_shape()), part.get_dtype())
    return entries


def examine(
    source: str | Path,
    revision: str | None = None,
    read: Callable[[Path], Any] = read_config,
) -> Checkpoint:
    """Compare the names, shapes and dtypes in the files of `source` with its config.json; no tensor
    is read.

    read: reads config.json, and so decides which kind of model is expected. Raises UserError for a
    file that cannot be.
    """
    path = local_path(source)
    files = [path]
    if path.suffix != ".npz" or not path.is_file():
        files = find_files(resolve(source, PATTERNS, revision))
    folder, entries = files[0].parent, {}
    for file in files:
        found = read_headers(file)
        if twice := entries.keys() & found.keys():
            raise UserError(f"{file}: {min(twice)} is in another file, too: delete the older")
        entries |= found
    config = folder / "config.json"
    if files[0].suffix != ".npz" or config.exists():
        return compare(folder, entries, read(config))
    for preset in PRESETS.values():
        checkpoint = compare(folder, entries, preset)
        if not checkpoint.problems:
            return checkpoint
    raise UserError(
        f"{files[0]}: its arrays fit no preset of model/config.py: write a config.json beside it"
    )


def compare(folder: Path, entries: dict[str, Entry], config: Any) -> Checkpoint:
    """The checkpoint of these tensors, and what does not fit the model of this configuration."""
    try:
        model, naming = empty_model(config), kind_of(config)[1]
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        raise UserError(
            f"{folder / 'config.json'}: impossible sizes ({shown(error)}): download it again"
        ) from None
    entries = {name: entry for name, entry in entries.items() if not naming.ignores(name)}
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    # 1. the dialect of most names
    is_array = any(entry.path.suffix == ".npz" for entry in entries.values())
    dialects = {mapping.NPZ: mapping.SAME} if is_array else naming.dialects
    spellings = {d: mapping.dialect_names(expected, dialects[d]) for d in dialects}
    dialect = max(dialects, key=lambda name: len(spellings[name].keys() & entries.keys()))
    allowed = {**naming.aliases, **spellings[dialect]}
    names = {name: allowed[name] for name in entries if name in allowed}
    # 2. what does not fit
    problems = [f"missing {name}" for name in sorted(expected.keys() - names.values())]
    problems += [f"unexpected {shown(name)}" for name in sorted(entries.keys() - allowed.keys())]
    for name, entry in entries.items():
        ours = names.get(name, "")
        shape = expected.get(ours, entry.shape)
        fits = entry.shape == shape
        if is_array and ours == mapping.EMBEDDING and entry.shape[1:] == shape[1:]:
            fits = 0 <= shape[0] - entry.shape[0] <= MAX_PADDING
        if not fits or entry.dtype not in STORED_DTYPES:
            problems.append(
                f"{shown(name)} is {entry.dtype} {entry.shape}, expected floats {shape}"
            )
    return Checkpoint(folder, entries, model, dialect, names, problems)


def read_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    quantize: str | None = None,
) -> Any:
    """The model of an examined checkpoint. On a CPU a tensor of this dtype is a private view of its
    file.

    quantize: a key of `weights.quantize.KINDS`; a matrix is then packed as soon as it is read, so that
    whole weights are never all in memory. Raises UserError for the checkpoint's problems, and where
    a stored head differs from the embedding that it is tied to.
    """
    checkpoint.check()
    model, entries, names = checkpoint.model.to(dtype), checkpoint.entries, checkpoint.names
    layers = replaceable(model, quantize, head=True)
    # 1. no tensor at all, or an .npz
    is_meta = torch.device(device).type == "meta"
    if is_meta or checkpoint.dialect == mapping.NPZ:
        if not is_meta:
            from weights import npz

            path = next(iter(entries.values())).path
            model.load_state_dict(npz.read_npz(path, model.state_dict(), device), assign=True)
        return pack(model, quantize, layers)
    # 2. tensor by tensor, the largest while little else is in memory
    first = {}  # {our name: the file's name that came first for it}
    filled = {}  # {our name: its tensor}
    files = {}  # {path: the open file}
    for name in sorted(names, key=lambda name: -prod(entries[name].shape)):
        ours, file = names[name], entries[name].path
        if file not in files:
            files[file] = open_tensors(file)
        stored = files[file].get_tensor(name)
        path = ours.removesuffix(".weight")
        if first.setdefault(ours, name) != name:
            other = open_tensors(entries[first[ours]].path).get_tensor(first[ours])
            pairs = zip(stored.split(4096), other.split(4096), strict=True)
            if not all(torch.equal(a.to(dtype), b.to(dtype)) for a, b in pairs):
                raise UserError(
                    f"{file}: {name} differs from {first[ours]}, but this model ties the two: save "
                    "it so"
                )
        elif path in layers:
            module, packed = layers.pop(path)
            module.weight = nn.Parameter(stored, requires_grad=False)
            model.set_submodule(path, packed(module, dtype, device).train(module.training))
        else:
            filled[ours] = stored.to(device, dtype)
        if filled.get(ours) is not stored:
            del files[file]  # unmaps what was copied: mapped pages count as memory of the process
    # 3. all that is not packed yet
    model.load_state_dict(filled, strict=quantize is None, assign=True)
    return pack(model, quantize, {})


def load_model(
    source: str | Path,
    *,
    dtype=torch.float32,
    device="cpu",
    revision: str | None = None,
    quantize: str | None = None,
) -> PaliGemma:
    """The model of `source`, of the class that `kind_of` has for its config.json.

    source: a folder, a hub id at `revision`, "embedded", a preset's name (random weights; a folder
    of that name comes first), or a .npz file. On the device "meta" no tensor is read. Raises as
    `examine` and `read_model`.
    """
    preset = preset_of(source)
    if preset is None:
        return read_model(examine(source, revision), dtype, device, quantize)
    model = empty_model(preset, dtype)
    if torch.device(device).type != "meta":
        system = system_of(preset.kind)
        fill = system.initialize if system and system.initialize else initialize
        fill(model.to_empty(device=device))
    return pack(model, quantize, replaceable(model, quantize, head=True))


def load_system(
    source: str | Path,
    kind: str,
    dtype=torch.float32,
    device="cpu",
) -> Any:
    """The model of `source`, which must be of a kind of `model/registry.py`, under the
    names of transformers where it has such a model."""
    system = system_of(kind)
    assert system is not None, f"{kind} is in no table"
    return read_model(examine(source, read=system.config.from_file), dtype, device)


def load_text(source: str | Path, dtype=torch.float32, device="cpu") -> Any:
    """The published language model of `source`, under the names of transformers."""
    return load_system(source, "language", dtype, device)


def load_siglip(source: str | Path, dtype=torch.float32, device="cpu") -> Siglip:
    """The vision tower of `source`: of transformers' SiglipModel, or of a PaliGemma. The pooling
    head is left out."""
    if not preset_of(source) and local_path(source).suffix != ".npz":
        raw = read_json(resolve(source, ["config.json"]) / "config.json")
        if raw.get("model_type") in ("siglip", "siglip_vision_model"):
            return read_model(examine(source, read=VisionConfig.from_file), dtype, device)
    model = load_model(source, dtype=dtype, device=device)
    if not isinstance(model, PaliGemma):
        raise UserError(
            f"{source}: a language model for text alone has no vision tower: give a SigLIP, a "
            "PaliGemma"
        )
    return model.vision_tower
