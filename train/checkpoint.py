"""Checkpoints of a run: everything that the next step depends on, written atomically.

In: the trained parameters, the optimizer, the gradient scaler, and the progress of the loop. Random numbers are seeded
at every step, so they have no state to save. Out: `checkpoints/step-N/` with `trainable.safetensors`,
`optimizer.safetensors` and `state.json`; or, where FSDP2 has sharded the parameters, in place of the first two one
`shard-R-….safetensors` for each process, with its part of every tensor (torch.distributed.checkpoint), so that no
process holds a whole one. Any number of processes, with or without FSDP2, resumes from either kind.

Atomic: a checkpoint is written under another name, flushed to disk and renamed; a crash leaves the previous one intact.
`manifest.json` has a digest of each file: what is missing, changed or of another checkpoint is refused. No pickles:
torch's usual `.metadata` file is one, so torch's safetensors writer puts the places of parts into their own headers.
"""

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
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

from model.common import UserError, file_errors, read_json, shown, sync_files, sync_folder
from train.distributed import World
from train.optim import trainable

STATE, MANIFEST = "state.json", "manifest.json"
WHOLE, SAMPLED_BLOCKS = 1 << 30, 1 << 10  # bytes up to which a file is read whole; blocks of a larger one
BLOCK = 1 << 18  # bytes


@dataclass
class Best:
    """The evaluation with the best held-out score. since: evaluations after it."""

    step: int
    loss: float
    exact_match: float | None
    since: int = 0


@dataclass
class Progress:
    """What a run knows of itself beside its weights; every checkpoint stores it.

    processes: that the run began with. step: updates so far. samples, seconds: learned from, of training. bad: a line
    for each unusable record. empty_steps: steps without a usable record. stopped: the step of an early end. results:
    evaluations before training, by column of the table. origin: see `train/origin.py`. scaler: the state of the
    gradient scaler.
    """

    processes: int = 1
    step: int = 0
    samples: int = 0
    seconds: float = 0.0
    bad: list[str] = field(default_factory=list)
    empty_steps: int = 0
    best: Best | None = None
    stopped: int | None = None
    results: dict[str, dict] = field(default_factory=dict)
    origin: dict | None = None
    scaler: dict | None = None

    @classmethod
    def read(cls, folder: Path) -> "Progress":
        """The progress in the checkpoint `folder`. Raises UserError for a file of another version."""
        try:
            progress = cls(**read_json(folder / STATE))
            progress.best = progress.best and Best(**progress.best)
        except (TypeError, UserError) as error:
            raise _refused(folder, str(error)) from None
        return progress


# Writing


def save_checkpoint(
    run: Path,
    progress: Progress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None = None,
    keep: int = 2,
    write: bool = True,
) -> Path:
    """Write `run/checkpoints/step-N`, and delete all but the newest `keep`.

    Every process must call it: each writes its part of what FSDP2 has sharded, to a folder that all of them share. The
    process with `write` writes the rest.
    """
    weights, moments = dict(trainable(model)), _optimizer_tensors(optimizer)
    progress.scaler = scaler.state_dict() if scaler is not None else None
    is_sharded = any(isinstance(tensor, DTensor) for tensor in weights.values())
    folder = run / "checkpoints" / f"step-{progress.step}"
    temporary = folder.with_name(f".{folder.name}.partial")
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
            (temporary / STATE).write_text(json.dumps(asdict(progress)))
            digests = {file.name: file_digest(file) for file in sorted(temporary.iterdir())}
            (temporary / MANIFEST).write_text(json.dumps(digests, indent=1))
            sync_files(temporary)
    except BaseException:
        if write:  # a full disk: no partial file stays
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    replace_folder(temporary, folder)
    for old in checkpoints(run)[:-keep]:
        _discard(old)
    return folder


def _save_parts(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write this process's parts of `tensors`. Raises the OSError of a full disk, of whichever process met it."""
    try:
        dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        raise next(cause for cause, _ in error.failures.values()) from error


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{key}": value
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
        for key, value in optimizer.state[parameter].items()
    }


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


# Reading


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    folders = [path for path in (run / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(folders, key=_step)


def newest_progress(run: Path) -> Progress | None:
    """The progress of the newest checkpoint of `run`; None without any.

    Raises UserError, naming what is wrong, unless the files of the checkpoint are those that were written. Of other
    files in the folder only tensors matter, since all of them are read.
    """
    if not (folders := checkpoints(run)):
        return None
    folder = folders[-1]
    try:
        digests = read_json(folder / MANIFEST)
    except UserError as error:
        raise _refused(folder, str(error)) from None
    present = {file.name for file in folder.iterdir()}
    for name in sorted(name for name in present - digests.keys() if name.endswith(".safetensors")):
        raise _refused(folder, f"{shown(name)} does not belong to it")
    for name in sorted(digests.keys() | {STATE}):
        if name not in present:
            raise _refused(folder, f"{shown(name)} is missing")
        if file_digest(folder / name) != digests.get(name):
            raise _refused(folder, f"{shown(name)} has been changed, or is of another checkpoint")
    progress = Progress.read(folder)
    if progress.step != _step(folder):
        raise _refused(folder, f"holds step {progress.step}: the folder was renamed")
    return progress


def load_checkpoint(
    run: Path,
    progress: Progress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None = None,
) -> None:
    """Restore model, optimizer and scaler in place from the checkpoint of `progress`, see `newest_progress`.

    Every process must call it, and reads its own part. Raises UserError if it belongs to other parameters.
    """
    folder = run / "checkpoints" / f"step-{progress.step}"
    sizes, parameters = _sizes(folder), trainable(model)
    moments = {name: size for name, size in sizes.items() if "/" in name}
    weights = {name: size for name, size in sizes.items() if name not in moments}
    owners = {moment.rpartition("/")[0] for moment in moments}
    if weights != {name: p.shape for name, p in parameters.items()} or not owners <= parameters.keys():
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
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*in a single process")  # which is intended
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not dist.is_initialized())
    if scaler is not None and progress.scaler:
        scaler.load_state_dict(progress.scaler)


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


def _refused(folder: Path, problem: str) -> UserError:
    """The error for a checkpoint that cannot be used; it offers the one before."""
    before = [path for path in checkpoints(folder.parent.parent) if _step(path) < _step(folder)]
    remedy = f"delete this folder to go on from {before[-1].name}" if before else "there is none before: start anew"
    return UserError(f"{shown(folder)}: {problem}: {remedy}")


def _step(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def file_digest(path: Path) -> str:
    """Size and SHA-256 of a file; of one above 1 GiB, of 1,024 evenly spaced blocks of 256 KiB."""
    size, last = path.stat().st_size, SAMPLED_BLOCKS - 1
    starts = range(0, size, BLOCK) if size <= WHOLE else [n * (size - BLOCK) // last for n in range(SAMPLED_BLOCKS)]
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for start in starts:
            file.seek(start)
            digest.update(file.read(BLOCK))
    return f"{size} {digest.hexdigest()}"
