"""Write a model to a folder that transformers opens: config.json and safetensors in one of the published dialects.

In: a plain `PaliGemma`, or a run of train.finetune, or a source and perhaps an adapter to merge. Out: a folder that is
complete or absent, written piece by piece from the memory of the model. transformers' AutoModelForImageTextToText and
AutoProcessor open it and answer as `weights.load.load_model` does; README.md is its model card.

    python -m weights.export runs/RUN OUT          a run, its adapter merged
    python -m weights.export SRC OUT [--dialect A] [--dtype bf16] [--max-shard-gb 5] [--adapter RUN --merge]
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lora import adapter
from lora.files import CONFIG_FILE, TENSOR_FILE, read_config
from model.common import (
    UserError,
    file_errors,
    quoted,
    read_json,
    run_command,
    shown,
    sync_files,
    sync_folder,
    write_text,
)
from model.config import PaliGemmaConfig
from model.device import DTYPES
from model.differential import KINDS, fold
from model.paligemma import PaliGemma
from model.source import EMBEDDED, local_path, preset_of, resolve
from weights.card import model_card
from weights.checkpoint import empty_model, examine, read_model
from weights.mapping import DIALECTS, dialect_names
from weights.processor_files import processor_files
from weights.registry import is_published, names_of
from weights.streaming import CHUNK_BYTES, STORED_DTYPES, byte_size, require_finite, write_checkpoint

# files of the tokenizer, the processor and generation, copied unchanged
COMPANIONS = [
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
]


def export_model(
    model: PaliGemma,
    folder: str | Path,
    *,
    dialect: str = "A",
    dtype: torch.dtype | None = None,
    max_shard_gb: float = 5,
    companions: Iterable[Path] = (),
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write `model` to `folder`, which appears when everything is in it.

    dialect: a key of `weights.mapping.DIALECTS`, for a PaliGemma; other models have our own names. dtype: of all
    tensors; None keeps the model's. max_shard_gb: largest size of a file in 10⁹ bytes. companions: files to copy.
    texts: more files, by name. Merged LoRA is written as the merged weights.
    Raises UserError for a folder that exists and is not empty, a disk too small, a value that is not finite in the
    dtype, and a model that the published format cannot express: unmerged adapters, other attention or feed-forward.
    """
    folder = Path(folder)
    if dialect not in DIALECTS:
        raise UserError(f"dialect is {dialect!r}, expected one of {', '.join(DIALECTS)}")
    if not 0 < max_shard_gb < math.inf:
        raise UserError(f"max_shard_gb is {max_shard_gb}, expected a number above 0")
    require_new(folder)
    tensors = plain_tensors(model)
    names = dialect_names(tensors, dialect_of(model.config, dialect))
    specs = {name: (dtype or tensors[ours].dtype, tuple(tensors[ours].shape)) for name, ours in names.items()}

    def chunks(name: str) -> Iterator[torch.Tensor]:
        for chunk in tensors[names[name]].reshape(-1).split(CHUNK_BYTES // 8):
            out = chunk.to("cpu", specs[name][0])
            require_finite(name, out, chunk, "the model has diverged or is damaged, and is not exported")
            yield out

    with new_folder(folder) as temporary:
        size, free = sum(byte_size(*spec) for spec in specs.values()), shutil.disk_usage(temporary).free
        if size > free:
            raise UserError(f"{folder}: the tensors take {size:,} bytes, {free:,} are free: make room, or see --dtype")
        write_checkpoint(temporary, specs, chunks, split_by_size(specs, max_shard_gb * 1e9))
        for file in companions:
            shutil.copyfile(file, temporary / file.name)
        for name, text in (texts or {}).items():
            (temporary / name).write_text(text, encoding="utf-8")
        # older versions of transformers read torch_dtype only, newer ones both
        config = model.config.to_dict() | {"torch_dtype": str(next(iter(specs.values()))[0]).removeprefix("torch.")}
        write_text(temporary / "config.json", json.dumps(config, indent=2) + "\n")


def dialect_of(config: Any, dialect: str) -> str:
    """The names that a model is written under: `dialect` is a PaliGemma's, other models have one."""
    known = names_of(config).dialects
    return dialect if dialect in known else known[0]


def require_new(folder: Path) -> None:
    """Raise UserError for a folder that exists and is not empty."""
    with file_errors(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder}: exists and is not empty: give a new folder")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder, flushed to disk and renamed to `folder` if the block succeeds, else removed."""
    with file_errors(folder):
        temporary = folder.absolute().parent / f".{folder.name}-{os.getpid()}.partial"
        temporary.mkdir(parents=True)
        try:
            yield temporary
            sync_files(temporary)
            if folder.exists():  # it is empty; only POSIX can rename onto it
                folder.rmdir()
            temporary.rename(folder)
            sync_folder(folder.absolute().parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def plain_tensors(model: PaliGemma) -> dict[str, torch.Tensor]:
    """The parameters of `model` under the names of a plain model, with merged LoRA in the weights.

    Raises UserError, which names the layer, for a model that computes anything else.
    """
    layers = adapter.lora_layers(model)
    if unmerged := [path for path, layer in layers.items() if not layer.merged]:
        raise UserError(f"{unmerged[0]}: carries an unmerged adapter: merge it first (lora.adapter.merge, or --merge)")
    if is_published(model.config) and (layer := model.config.vision.feature_layer) is not None:
        raise UserError(f"feature_layer is {layer}: the published format reads the last layer of the tower")
    plain = empty_model(model.config)
    kinds = {path: kind for path, kind in _kinds(model).items() if not path.startswith(tuple(f"{p}." for p in layers))}
    kinds |= {path: _kinds(layer.base_layer)[""] for path, layer in layers.items()}
    expected = _kinds(plain)
    for path in sorted(kinds.keys() | expected.keys()):
        if kinds.get(path) != expected.get(path):
            raise UserError(
                f"{path or 'the model'}: is {kinds.get(path, 'absent')}, where a PaliGemma has "
                f"{expected.get(path, 'nothing')}: the published format cannot express it; fold the variant if it can "
                "be (model.differential.fold), else keep the base and its adapter"
            )
    state = {name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items()}
    return {name: state[name] for name in plain.state_dict()}


def _kinds(model: nn.Module) -> dict[str, str]:
    """The class of the module at each path, with the activation of a feed-forward."""
    return {
        path: " ".join(filter(None, (type(module).__name__, getattr(module, "activation", ""))))
        for path, module in model.named_modules()
    }


def companions(source: str | Path, revision: str | None = None) -> list[Path]:
    """The files of `COMPANIONS` that the model `source` has."""
    path = local_path(source)
    if preset_of(source):
        source = EMBEDDED  # presets use its tokenizer
    folder = path.parent if path.is_file() else resolve(source, COMPANIONS, revision)
    return [folder / name for name in COMPANIONS if (folder / name).is_file()]


def split_by_size(specs: dict[str, tuple[torch.dtype, tuple[int, ...]]], limit: float) -> list[list[str]]:
    """The names in order, in groups of at most `limit` bytes. A tensor larger than that has a group of its own."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        if groups[-1] and filled + byte_size(*spec) > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += byte_size(*spec)
    return groups


@dataclass(frozen=True)
class Origin:
    """What is exported: a checkpoint, an adapter to merge into it, the run that trained either, and that run's base."""

    source: str
    base: str
    update: Path | None = None
    run: Path | None = None


def locate(source: str, update: Path | None = None) -> Origin:
    """What `source` names: a run's folder, its model/, or a checkpoint. update: an adapter for it.

    Raises UserError for an adapter that plain weights cannot express, or that names no base.
    """
    folder = local_path(source)
    if update is None and (folder / CONFIG_FILE).is_file():
        update, base = folder, adapter.base_of(folder)
        if base is None:
            raise UserError(f"{shown(folder)}: names no base: export its base, with this as --adapter and --merge")
        source = base
    if update is not None:
        check_foldable(update)
        return Origin(source, source, update, run_of(update) or update)
    if (folder / "model" / "config.json").is_file():  # which `--full` writes
        folder = folder / "model"
        source = str(folder)
    run = run_of(folder)
    return Origin(source, source if run is None else str(read_json(run / "config.json").get("base", source)), run=run)


def run_of(folder: Path) -> Path | None:
    """The run that `folder` is model/ or best/ of."""
    run = folder.absolute().parent
    return run if folder.name in ("model", "best") and (run / "config.json").is_file() else None


def check_foldable(run: Path) -> None:
    """Raise UserError for an adapter whose grafts have no plain weights."""
    plain = [name for name, kind in KINDS.items() if kind.foldable]
    for call in read_config(run).get("differential", []):
        kind, feed_forward = call.get("kind"), call.get("feed_forward", "mlp")
        if kind not in plain or feed_forward == "swiglu-new":
            what = f"attention {quoted(kind)}" if kind not in plain else f"feed-forward {quoted(feed_forward)}"
            raise UserError(
                f"{shown(run)}: {what} cannot become plain weights ({' and '.join(plain)} can): hand on its "
                f"{CONFIG_FILE} and {TENSOR_FILE}, which this project puts on the base (lora.adapter.load, --adapter)"
            )


def beside(config: PaliGemmaConfig, card: str, files: list[Path]) -> dict[str, str]:
    """The texts beside the weights: the model card, and what AutoProcessor needs and `files` do not have."""
    names = {file.name: file for file in files}
    texts = {"README.md": card} | processor_files(config, None)
    try:
        if not names.keys() & {"tokenizer.model", "tokenizer.json"}:
            raise UserError("the source has no tokenizer")
        if "tokenizer.json" not in names:
            texts |= processor_files(config, names["tokenizer.model"])
    except UserError as error:
        print(f"AutoProcessor will not open it: {error}", file=sys.stderr)
    if "processor_config.json" in names:
        texts.pop("preprocessor_config.json", None)
    return {name: text for name, text in texts.items() if name not in names}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a model as safetensors that transformers opens.")
    parser.add_argument("source", metavar="SRC", help="a run, folder, hub id, .npz, or 'embedded'")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to make")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id (default: its main branch)")
    parser.add_argument(
        "--dialect",
        choices=DIALECTS,
        default="A",
        help="names of the tensors: A as on the hub since 2024, opened by old and new transformers; B as modules of "
        "4.52, C as those of 5, D as 5 saves them: older versions leave their towers random (default: A)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the tensors (default: as in the source)")
    parser.add_argument("--max-shard-gb", type=float, default=5, help="size of a file in 10^9 bytes (default: 5)")
    parser.add_argument("--adapter", metavar="RUN", type=Path, help="adapter folder to load onto SRC (default: none)")
    parser.add_argument(
        "--merge",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="merge the adapter into the weights, the only way to export it (default: no)",
    )
    args = parser.parse_args(argv)
    if args.merge != (args.adapter is not None):
        raise UserError("--adapter and --merge go together: an unmerged adapter is exchanged as its own folder")
    origin = locate(args.source, args.adapter)
    checkpoint = examine(origin.source, args.revision)
    stored = {entry.dtype for entry in checkpoint.entries.values()}
    dtype = STORED_DTYPES.get(stored.pop(), torch.float32) if len(stored) == 1 else torch.float32
    wanted = DTYPES.get(args.dtype, dtype)
    if origin.update is not None:  # merging rounds once; else nothing is cast before it is written
        dtype = torch.promote_types(dtype, wanted)
    model = read_model(checkpoint, dtype)
    count = sum(parameter.numel() for parameter in model.parameters())
    if origin.update is not None:
        adapter.load(model, origin.update)
        adapter.merge(model)
        fold(model)
    files = companions(origin.source, args.revision)
    texts = {}
    if is_published(model.config):
        texts = beside(model.config, model_card(model.config, count, args.out.name, origin.base, origin.run), files)
    export_model(
        model,
        args.out,
        dialect=args.dialect,
        dtype=wanted,
        max_shard_gb=args.max_shard_gb,
        companions=files,
        texts=texts,
    )
    size = sum(file.stat().st_size for file in args.out.iterdir())
    print(f"{args.out}: dialect {dialect_of(model.config, args.dialect)}, {size:,} bytes")


if __name__ == "__main__":
    run_command(main)
