"""Checkpoints of a run: everything that the next step depends on, written atomically.

In: the trained parameters, the optimizer, the gradient scaler, and the progress of the loop. Random numbers are seeded
at every step, so they have no state to save. Out: `checkpoints/step-N/` with `trainable.safetensors`,
`optimizer.safetensors` and `state.json`; or, where FSDP2 has sharded the parameters, in place of the first two one
`shard-R-….safetensors` for each process, with its part of every tensor (torch.distributed.checkpoint), so that no
process holds a whole one. Any number of processes, with or without FSDP2, resumes from either kind.

Atomic: a checkpoint is written under another name, flushed to disk and renamed; a crash leaves the previous one intact.
No pickles: torch's usual `.metadata` file is one, so the files carry the places of their parts in their own headers, as
torch's safetensors writer puts them there.
"""

import json
import os
import re
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from model.common import UserError, sync_folder
from train.optim import trainable


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
    if write:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    if is_sharded:
        dist.barrier()  # the folder is there
        dcp.save(weights | moments, storage_writer=HuggingFaceStorageWriter(str(temporary), save_distributed=True))
    if not write:
        return folder
    if not is_sharded:
        save_file({name: tensor.detach() for name, tensor in weights.items()}, temporary / "trainable.safetensors")
        save_file(moments, temporary / "optimizer.safetensors")
    state = {"step": step, "progress": progress, "scaler": scaler.state_dict() if scaler is not None else None}
    (temporary / "state.json").write_text(json.dumps(state))
    for file in temporary.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    sync_folder(temporary)
    if folder.exists():  # the run was resumed from an older checkpoint and writes this step again
        _discard(folder)
    temporary.rename(folder)
    sync_folder(folder.parent)
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
        return json.loads((folder / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: cannot be read ({error}): delete it to resume from the one before") from None


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None
) -> dict:
    """Restore model, optimizer and scaler in place; returns the state of the loop, see `read_state`.

    Every process must call it, and reads its own part. Raises UserError if the checkpoint is damaged, or belongs to
    other parameters.
    """
    state, sizes, parameters = read_state(folder), _sizes(folder), trainable(model)
    moments = {name: size for name, size in sizes.items() if "/" in name}
    found = {name: size for name, size in sizes.items() if name not in moments}
    owners = {moment.rpartition("/")[0] for moment in moments}
    if found != {name: p.shape for name, p in parameters.items()} or not owners <= parameters.keys():
        raise UserError(f"{folder}: holds other parameters than this run trains: resume with the run's own settings")
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


def load_weights(folder: Path, model: nn.Module) -> None:
    """Load the trained weights of a checkpoint, without its optimizer, into a `model` that is not sharded.

    Raises UserError if the model lacks one of these parameters.
    """
    sizes, parameters = _sizes(folder), dict(model.named_parameters())
    found = {name: parameters.get(name) for name in sizes if "/" not in name}
    if any(parameter is None or parameter.shape != sizes[name] for name, parameter in found.items()):
        raise UserError(f"{folder}: holds other parameters than this model has: take the checkpoint's own base")
    _fill(folder, found, alone=True)


def _sizes(folder: Path) -> dict[str, torch.Size]:
    """The unsharded size of every tensor in the files of a checkpoint. Raises UserError if a part is missing."""
    try:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: cannot be read ({error}): delete it to resume from the one before") from None
    for name, tensor in metadata.items():
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise UserError(f"{folder}: a part of {name} is missing: copy all files of the checkpoint")
    return {name: tensor.size for name, tensor in metadata.items()}


def _fill(folder: Path, tensors: dict[str, torch.Tensor], alone: bool = False) -> None:
    """Fill `tensors` in place from the files of a checkpoint; each process fills the part that it holds."""
    alone = alone or not dist.is_initialized()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*in a single process")  # which is intended
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=alone)


def _discard(folder: Path) -> None:
    """Delete a checkpoint, renamed first: a half-deleted one must not have the name of a complete one."""
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
