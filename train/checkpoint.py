"""Checkpoints of a run: everything that the next step depends on, written atomically.

In: the trained parameters, the optimizer, the gradient scaler, and the progress of the loop. Random numbers are seeded
at every step, so they have no state to save. Out: `checkpoints/step-N/` with `trainable.safetensors`,
`optimizer.safetensors` and `state.json`; or, where FSDP2 has sharded the parameters, in place of the first two one
`shard-R-….safetensors` for each process, with its part of every tensor (torch.distributed.checkpoint), so that no
process holds a whole one. Any number of processes, with or without FSDP2, resumes from either kind.

Atomic: a checkpoint is written under another name, flushed to disk and renamed; a crash leaves the previous one intact.
`manifest.json` has the step and a digest of each file: what is missing, changed or of another checkpoint is refused.
No pickles: torch's usual `.metadata` file is one, so the files carry the places of their parts in their own headers, as
torch's safetensors writer puts them there.
"""

import hashlib
import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from model.common import (
    Expected,
    UserError,
    file_errors,
    open_regular,
    read_field,
    read_json,
    shown,
    sync_files,
    sync_folder,
)
from train.distributed import World
from train.optim import trainable

FORMAT = 2  # of state.json: from 2 on there is a manifest
MANIFEST = "manifest.json"
_PROGRESS = {  # what the loop keeps, see `train/loop.py`
    "metrics_bytes": Expected(int, 0),
    "metrics_sha256": Expected(str),
    "bad": Expected(list),
    "seconds": Expected(float, 0),
    "samples": Expected(int, 0),
    "processes": Expected(int, 1),
    "empty_steps": Expected(int, 0),
    "origin": Expected(dict),
    "best": Expected(dict),
    "stopped": Expected(int, 1),
}


def save_checkpoint(
    run: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: dict,
    scaler: torch.amp.GradScaler | None = None,
    keep: int = 2,
    write: bool = True,
) -> Path:
    """Write `run/checkpoints/step-N`, and delete all but the newest `keep`. progress: JSON data of the loop.

    Every process must call it: each writes its part of what FSDP2 has sharded, to a folder that all of them share. The
    process with `write` writes the rest.
    """
    weights, moments = dict(trainable(model)), _optimizer_tensors(optimizer)
    is_sharded = any(isinstance(tensor, DTensor) for tensor in weights.values())
    folder = run / "checkpoints" / f"step-{step}"
    temporary = folder.with_name(f".{folder.name}.partial")
    state = {
        "format": FORMAT,
        "step": step,
        "progress": progress,
        "scaler": scaler.state_dict() if scaler is not None else None,
    }
    try:
        with file_errors(run):
            if write:
                for leftover in folder.parent.glob(".step-*"):  # of a run that was killed
                    shutil.rmtree(leftover, ignore_errors=True)
                temporary.mkdir(parents=True)
            if is_sharded:
                dist.barrier()  # the folder is there
                _save_parts(weights | moments, temporary)
            if not write:
                return folder
            if not is_sharded:
                tensors = {name: tensor.detach() for name, tensor in weights.items()}
                save_file(tensors, temporary / "trainable.safetensors")
                save_file(moments, temporary / "optimizer.safetensors")
            (temporary / "state.json").write_text(json.dumps(state))
            _write_manifest(temporary, step)
    except BaseException:
        if write:  # a full disk: no partial file stays
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    replace_folder(temporary, folder)
    for old in checkpoints(run)[:-keep]:
        _discard(old)
    return folder


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [path for path in (run / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def read_state(folder: Path) -> dict:
    """The state of the loop: "step", "progress", "scaler". Raises UserError if it cannot be read."""
    try:
        state = read_json(folder / "state.json")
        for name, expected in {"step": Expected(int, 0), "progress": Expected(dict)}.items():
            read_field(state, name, expected, "state.json")
        if state.get("scaler") is not None:
            read_field(state, "scaler", Expected(dict), "state.json")
        for name, expected in _PROGRESS.items():
            read_field(state["progress"], name, expected, "state.json", default=None)
    except UserError as error:
        raise _refused(folder, str(error)) from None
    return state


def verify(folder: Path) -> None:
    """Raise UserError, naming what is wrong, unless the files of a checkpoint are those that were written.

    Of other files, only tensors matter, since all in the folder are read. A checkpoint of an older version has no
    manifest: it is accepted, and a line on stderr says so.
    """
    state = read_state(folder)
    if state["step"] != _step(folder):
        raise _refused(folder, f"holds step {state['step']}: its state.json was changed, or the folder renamed")
    if not (folder / MANIFEST).exists():
        if "format" in state:
            raise _refused(folder, f"{MANIFEST} is missing")
        print(f"{folder}: of an older version, without {MANIFEST}: its files are not checked", file=sys.stderr)
        return
    try:
        manifest = read_json(folder / MANIFEST)
        step = read_field(manifest, "step", Expected(int, 0), MANIFEST)
        expected = read_field(manifest, "files", Expected(dict), MANIFEST)
    except UserError as error:
        raise _refused(folder, str(error)) from None
    if step != _step(folder):
        raise _refused(folder, f"holds step {step}: the folder was renamed, or {MANIFEST} is of another checkpoint")
    found = {file.name for file in folder.iterdir()}
    for name in sorted(name for name in found - expected.keys() if name.endswith(".safetensors")):
        raise _refused(folder, f"{shown(name)} does not belong to it")
    for name in sorted(expected):
        if name not in found:
            raise _refused(folder, f"{shown(name)} is missing")
        if file_digest(folder / name) != expected[name]:
            raise _refused(folder, f"{name} has been changed, or is of another checkpoint")


def _refused(folder: Path, problem: str) -> UserError:
    """The error for a checkpoint that cannot be used; it offers the one before."""
    before = [path for path in checkpoints(folder.parent.parent) if _step(path) < _step(folder)]
    remedy = f"delete this folder to go on from {before[-1].name}" if before else "there is none before: start anew"
    return UserError(f"{shown(folder)}: {problem}: {remedy}")


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def file_digest(path: Path) -> str:
    """Size and SHA-256 of a file; of one above 1 GiB, of 1,024 evenly spaced blocks of 256 KiB."""
    size, block, blocks = path.stat().st_size, 1 << 18, 1 << 10
    starts = range(0, size, block) if size <= 1 << 30 else [n * (size - block) // (blocks - 1) for n in range(blocks)]
    digest = hashlib.sha256()
    with open_regular(path) as file:
        for start in starts:
            file.seek(start)
            digest.update(file.read(block))
    return f"{size} {digest.hexdigest()}"


def _write_manifest(folder: Path, step: int) -> None:
    """Write the manifest of the files in `folder`, and flush all of them to disk."""
    files = {file.name: file_digest(file) for file in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1))
    sync_files(folder)


def _save_parts(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write this process's parts of `tensors`. Raises the OSError of a full disk, of whichever process met it."""
    try:
        dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        raise next(cause for cause, _ in error.failures.values()) from error


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None
) -> dict:
    """Restore model, optimizer and scaler in place; returns the state of the loop, see `read_state`.

    Every process must call it, and reads its own part. Raises UserError if the checkpoint is damaged, or belongs to
    other parameters.
    """
    if not dist.is_initialized() or dist.get_rank() == 0:
        verify(folder)
    state, sizes, parameters = read_state(folder), _sizes(folder), trainable(model)
    moments = {name: size for name, size in sizes.items() if "/" in name}
    found = {name: size for name, size in sizes.items() if name not in moments}
    owners = {moment.rpartition("/")[0] for moment in moments}
    if found != {name: p.shape for name, p in parameters.items()} or not owners <= parameters.keys():
        raise UserError(f"{folder}: holds other parameters than this run trains: resume with the run's own settings")
    if state["step"] and not moments:  # of an older version, see `verify`
        raise _refused(folder, "optimizer.safetensors is missing")
    fused = {name: group.get("fused", False) for group in optimizer.param_groups for name in group["names"]}
    tensors: dict[str, torch.Tensor] = dict(parameters)
    for moment in moments:
        name, _, key = moment.rpartition("/")
        parameter = parameters[name]
        # optimizers count their steps on the CPU unless they are fused
        tensors[moment] = (
            torch.zeros((), device=parameter.device if fused[name] else "cpu")
            if key == "step"
            else torch.zeros_like(parameter, requires_grad=False)
        )
        optimizer.state[parameter][key] = tensors[moment]
    _fill(folder, tensors)
    if scaler is not None and state["scaler"]:
        scaler.load_state_dict(state["scaler"])
    return state


def _sizes(folder: Path) -> dict[str, torch.Size]:
    """The unsharded size of every tensor in the files of a checkpoint. Raises UserError if a part is missing."""
    try:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (OSError, SafetensorError) as error:
        raise _refused(folder, f"cannot be read ({shown(str(error))})") from None
    for name, tensor in metadata.items():
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise _refused(folder, f"a part of {name} is missing")
    return {name: tensor.size for name, tensor in metadata.items()}


def _fill(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill `tensors` in place from the files of a checkpoint; each process fills the part that it holds."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*in a single process")  # which is intended
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not dist.is_initialized())


def write_folder(write: Callable[[Path], None], folder: Path, world: World) -> None:
    """Write `folder` by `write`, which every process calls; its former content stays until the new one is whole."""
    temporary = folder.with_name(f".{folder.name}.partial")
    if world.is_first:
        shutil.rmtree(temporary, ignore_errors=True)
    world.barrier()
    write(temporary)
    if world.is_first:
        replace_folder(temporary, folder)
    world.barrier()


def replace_folder(temporary: Path, folder: Path) -> None:
    """Give a complete folder its name; one that has it already is deleted."""
    if folder.exists():  # the run was resumed from an older checkpoint and writes this step again
        _discard(folder)
    temporary.rename(folder)
    sync_folder(folder.parent)


def _discard(folder: Path) -> None:
    """Delete a folder, renamed first: a half-deleted one must not have the name of a complete one."""
    doomed = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": value
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
        for key, value in optimizer.state[parameter].items()
    }
