"""Checkpoints of a run: everything that the next step depends on. Random numbers are seeded at
every step.

`checkpoints/step-N/` has `trainable.safetensors`, `optimizer.safetensors` and `state.json`. Where
FSDP2 has sharded the parameters, a `shard-R-….safetensors` of each process takes the place of the
first two, so that no process holds a whole tensor. The same number of processes, with or without
FSDP2, resumes from either kind.

A checkpoint is written under another name, flushed to disk and renamed; a crash leaves the previous
one intact. By the digests in `manifest.json`, what is missing, changed or of another checkpoint is
refused. No pickles: torch's usual `.metadata` is one, so torch's safetensors writer puts the places
of parts into their own headers.
"""

import contextlib
import hashlib
import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from eval.data.files import problems_at
from model.common import UserError, file_errors, read_json, shown, sync_files, sync_folder
from train.distributed import World, is_sharded
from train.optim import optimized
from weights.load import open_tensors, save_tensors

STATE, MANIFEST = "state.json", "manifest.json"
BLOCK = 1 << 18  # bytes that are hashed at a time
# of a parameter: none, Adam's, Muon's
MOMENTS = (set(), {"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"})


@dataclass
class Result:
    """An evaluation. losses, answers, matches (exact match, 0 or 1): by held-out record, None where
    there is none. scores: "loss", "exact_match" and "vqa_accuracy" of all. tests: other accuracies
    for summary.json."""

    losses: list[float | None] = field(default_factory=list)
    answers: list[str | None] = field(default_factory=list)
    matches: list[float | None] = field(default_factory=list)
    scores: dict[str, float | None] = field(default_factory=dict)
    tests: dict = field(default_factory=dict)


@dataclass
class Best:
    """The evaluation with the best held-out score. since: evaluations after it."""

    step: int
    loss: float
    exact_match: float | None
    since: int = 0


@dataclass
class Progress:
    """What a run knows of itself beside its weights; every checkpoint stores it."""

    processes: int = 1
    aligned: int = 0  # steps of the alignment so far, before all updates
    step: int = 0  # updates so far
    samples: int = 0
    seconds: float = 0.0  # of training
    bad: list[str] = field(default_factory=list)  # a line for each unusable record
    empty_steps: int = 0  # without a usable record
    best: Best | None = None
    stopped: int | None = None  # the step of an early end
    results: dict[str, Result] = field(default_factory=dict)  # evaluations, by column of the table
    origin: dict | None = None  # see `train/run.py`
    scaler: dict | None = None  # the gradient scaler's state
    log: str = ""  # the digest of the lines of metrics.jsonl so far


# Writing


def save_checkpoint(
    run: Path,
    progress: Progress,
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    keep: int = 2,
) -> None:
    """Write `run/checkpoints/step-N`, and delete all but the newest `keep`. Every process must call
    it."""
    weights = {}
    moments = {}
    for name, parameter in optimized(optimizer).items():
        weights[name] = parameter.detach()
        moments |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}

    with atomic_folder(run / "checkpoints" / f"step-{progress.step}", world) as folder:
        if world.is_first:
            folder.mkdir(parents=True)
        world.barrier()  # the folder is there
        if is_sharded(model):
            import torch.distributed.checkpoint as dcp  # here: it takes a second

            writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
            try:
                dcp.save(weights | moments, storage_writer=writer)
            except dcp.api.CheckpointException as error:
                # the OSError of a full disk, in whichever process
                raise next(cause for cause, _ in error.failures.values()) from error
        elif world.is_first:
            save_tensors(weights, folder / "trainable.safetensors")
            save_tensors(moments, folder / "optimizer.safetensors")
        if world.is_first:
            (folder / STATE).write_text(json.dumps(asdict(progress)))
            digests = {file.name: file_digest(file) for file in sorted(folder.iterdir())}
            (folder / MANIFEST).write_text(json.dumps(digests, indent=1))
    if world.is_first:
        for old in checkpoints(run)[:-keep]:
            _discard(old)


@contextlib.contextmanager
def atomic_folder(folder: Path, world: World) -> Iterator[Path]:
    """A name for the block to write a folder to, in all processes; it becomes `folder` once it is
    whole, and the former content stays until then. Raises UserError for a full disk, and then
    nothing is left."""
    temporary = folder.with_name(f".{folder.name}.partial")
    if world.is_first:
        for leftover in folder.parent.glob(".*.partial"):  # of a run that was killed
            shutil.rmtree(leftover, ignore_errors=True)
    world.barrier()
    try:
        with file_errors(folder):
            yield temporary
            if world.is_first:
                sync_files(temporary)
    except BaseException:
        if world.is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if world.is_first:
        # of an evaluation before, or the run was resumed from an older checkpoint
        if folder.exists():
            _discard(folder)
        temporary.rename(folder)
        sync_folder(folder.parent)
    world.barrier()


def _discard(folder: Path) -> None:
    """Delete a folder, renamed first: a half-deleted one must not have the name of a complete
    one."""
    shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.old.partial")))


# Reading


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    folders = [path for path in (run / "checkpoints").glob("step-*") if path.name[5:].isdecimal()]
    return sorted(folders, key=lambda folder: int(folder.name[5:]))


def newest_progress(run: Path) -> Progress | None:
    """The progress of the newest checkpoint of `run`; None without any. Raises UserError, naming
    the checkpoint before, if its files are not those that were written."""
    folders = checkpoints(run)
    if not folders:
        return None
    folder = folders.pop()
    written = read_json(folder / MANIFEST)
    present = {}
    for file in folder.iterdir():
        if file.suffix in (".json", ".safetensors") and file.name != MANIFEST:
            present[file.name] = file_digest(file)
    both = written.keys() | present.keys()
    names = sorted(name for name in both if written.get(name) != present.get(name))
    if names:
        remedy = "there is none before: start anew"
        if folders:
            remedy = f"delete this folder to go on from {folders[-1].name}"
        raise UserError(
            f"{shown(folder)}: {', '.join(names)}: missing, changed, or of another checkpoint: {remedy}"
        )
    with problems_at(folder / STATE):
        progress = Progress(**read_json(folder / STATE))
        progress.best = progress.best and Best(**progress.best)
        progress.results = {name: Result(**result) for name, result in progress.results.items()}
    return progress


def load_checkpoint(run: Path, progress: Progress, optimizer: Optimizer) -> None:
    """Restore an optimizer and its parameters in place from the checkpoint of `progress`; every
    process must call it. Raises UserError if it belongs to other parameters, or is not whole."""
    import torch.distributed.checkpoint as dcp  # here: it takes a second

    # 1. the sizes of what is there
    folder = run / "checkpoints" / f"step-{progress.step}"
    for file in folder.glob("*.safetensors"):
        open_tensors(file)  # raises for what is none, whatever the manifest says
    reader = dcp.HuggingFaceStorageReader(str(folder))
    stored = reader.read_metadata().state_dict_metadata
    sizes = {name: tensor.size for name, tensor in stored.items()}

    # 2. room for it
    parameters = optimized(optimizer)
    fused = {}
    for group in optimizer.param_groups:
        fused |= dict.fromkeys(group["names"], group.get("fused", False))
    optimizer.state.clear()
    tensors = dict(parameters)
    for moment in sizes:
        name, _, kind = moment.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None:
            continue
        if kind == "step":
            device = parameter.device if fused[name] else "cpu"  # where its optimizer counts
            value = torch.zeros((), device=device)
        else:
            value = torch.zeros_like(parameter, requires_grad=False)
        tensors[moment] = optimizer.state[parameter][kind] = value

    # 3. its values
    is_whole = all({*optimizer.state[parameter]} in MOMENTS for parameter in parameters.values())
    if not is_whole or sizes != {name: tensor.shape for name, tensor in tensors.items()}:
        raise UserError(
            f"{folder}: holds other parameters than this run trains, or not all of them: start anew"
        )
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*in a single process")  # which is intended
        dcp.load(tensors, storage_reader=reader, no_dist=not dist.is_initialized())


def file_digest(path: Path, most: int = 1024) -> str:
    """Size and SHA-256 of a file. Of a file with more than `most` blocks of 256 KiB, `most` evenly
    spaced blocks are hashed."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    count = min(most, -(-size // BLOCK))
    with path.open("rb") as file:
        for number in range(count):
            file.seek(number * max(0, size - BLOCK) // max(1, count - 1))
            digest.update(file.read(BLOCK))
    return f"{size} {digest.hexdigest()}"
