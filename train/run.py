"""The folder of a run, locked while a process writes to it; its log; what it is made from; and its
end by a signal.

SIGTERM or Ctrl-C during training: the running step is finished, a checkpoint is written, the
program ends. Every checkpoint stores the origin of its run, settings and fingerprints of base and
data; a resumed run compares them.
"""

import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import torch

from eval import figures
from eval.data.records import Record
from eval.progress import Bar
from model.common import UserError, atomic_path, check_text, file_errors, quoted, shown, write_text
from model.device import processor_name
from train.chart import line_chart
from train.checkpoint import Progress, checkpoints, file_digest
from train.distributed import World
from train.flags import RUN_CONFIG, RunArguments, flag_name

LOCK = ".lock"
# settings that do not change what is learned
FREE = "workers device threads checkpoint_every keep evaluate eval_limit max_bad eval_every keep_best".split()


class Interrupted(KeyboardInterrupt):
    """A signal, its first argument, asked the run to end; within `fit` the run has been saved. No
    `except Exception`, as around a damaged picture, takes it for something else."""

    def end_program(self, advice: str) -> None:
        print(f"\ninterrupted: {advice}", file=sys.stderr)
        sys.exit(128 + self.args[0])


@contextmanager
def catch_signals(least: int = 2) -> Iterator[list[int]]:
    """SIGTERM and Ctrl-C are put into the yielded list instead of ending the process; the signal
    number `least` of the block raises Interrupted."""
    received = []

    def handler(number, frame):
        received.append(number)
        if len(received) >= least:
            raise Interrupted(number)

    before = {}
    with suppress(ValueError):  # not the main thread
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, handler)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# The folder


def check_empty(out: Path | None) -> None:
    """Raise UserError if `out` holds anything but a lock, which a killed run may have left."""
    if out is not None and out.exists() and {path.name for path in out.iterdir()} - {LOCK}:
        raise UserError(f"--out {shown(out)}: not empty: choose another folder, or --resume it")


def free_folder(stem: str) -> Path:
    """runs/STEM-NUMBER, with the first number that is free."""
    number = 1
    while Path("runs", f"{stem}-{number}").exists():
        number += 1
    return Path("runs", f"{stem}-{number}")


@contextmanager
def run_folder(
    arguments: RunArguments,
    settings: Any,
    world: World,
) -> Iterator[Path]:
    """The folder of a run for the block, locked: the resumed one, or a new `--out` or
    `free_folder`.

    settings: with the `stem` of its name and the `program` that resumes it. If the block raises
    before learned weights are written, the new folder is deleted. A signal ends the program, with
    advice. Raises UserError if another process writes to the folder, if it is not empty, and as
    `lock_folder`.
    """
    run = None
    if world.is_first:
        check_empty(arguments.out)
        run = arguments.resume or arguments.out or free_folder(settings.stem)
        with file_errors(check_text(str(run))):
            run.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(run)
        sweep(run)
        if arguments.resume:
            names = ["its beginning", *(path.name for path in checkpoints(run))]
            print(f"{shown(run)}: goes on from {names[-1]}", file=sys.stderr)
    try:
        if world.is_first and not arguments.resume:
            write_text(run / RUN_CONFIG, json.dumps(asdict(settings), indent=1) + "\n")
        run = world.gather(run)[0]
        with catch_signals(least=1):
            yield run
    except BaseException as error:
        is_kept = arguments.resume or not world.is_first or has_learned(run)
        if not is_kept:
            lock.close()
            shutil.rmtree(run, ignore_errors=True)
        if isinstance(error, Interrupted):
            advice = f"saved; go on with: python -m {settings.program} --resume {shown(run)}"
            error.end_program(advice if is_kept else "nothing was learned yet")
        raise


def lock_folder(run: Path) -> IO:
    """An open file that holds the lock of `run`. A killed process loses its lock, and workers do
    not inherit it. Raises UserError for a folder with links: what is written and deleted through
    them is not the run's."""
    with file_errors(run):
        if link := next((path for path in run.rglob("*") if path.is_symlink()), None):
            raise UserError(f"{shown(link)}: is a link: put what it leads to in its place")
        lock = (run / LOCK).open("a")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise UserError(
            f"{shown(run)}: another process writes to this folder: wait, or choose another one"
        ) from None
    except OSError:  # a file system without locks
        pass
    return lock


def has_learned(run: Path) -> bool:
    """Whether a run has learned weights, at least of its alignment."""
    log = run / "metrics.jsonl"
    has_weights = checkpoints(run) or (run / "best").exists()
    return bool(has_weights) and (not log.exists() or '"loss"' in log.read_text())


def sweep(run: Path) -> None:
    """Delete what a killed process was writing into a run."""
    for path in run.glob(".*"):
        if path.suffix == ".partial":  # of `atomic_folder`
            shutil.rmtree(path)
        elif re.search(r"-[0-9a-f]{8}\.\w+$", path.name):  # of `atomic_path`
            path.unlink()


# The log

# Fields that differ from run to run: seconds of training so far, evaluations included; samples and
# supervised tokens a second, of the step alone; peak memory so far in MiB, of the first process
MEASURED = ("seconds", "samples_per_second", "tokens_per_second", "peak_memory")


class Log:
    """The metrics, the progress bar and the clock of a run; only the first process writes.

    progress: of the run, with the seconds of training, those before it was resumed included. Lines
    of steps after its checkpoint are deleted. Raises UserError if those before are not what they
    were.
    """

    def __init__(self, run: Path, total: int, progress: Progress, world: World):
        self.progress = progress
        self.device = world.device
        self.samples = progress.samples  # before the step that runs
        self.written = time.perf_counter()
        self.started = self.written - progress.seconds
        self.values = {}  # beside the bar
        self.bar = Bar(
            total=total,
            initial=progress.step,
            desc="training",
            unit="step",
            disable=not world.is_first,
        )
        self.path = run / "metrics.jsonl"
        self.file = None
        if world.is_first:
            self._take_back()
            self.file = self.path.open("a", buffering=1)  # the system gets each line at once

    def _take_back(self) -> None:
        """Delete the lines of steps after the checkpoint."""
        step = self.progress.step
        lines = self.path.read_bytes().splitlines(keepends=True) if step else []
        with atomic_path(self.path) as temporary:
            temporary.write_bytes(b"".join(lines[:step]))
            if step and file_digest(temporary) != self.progress.log:
                raise UserError(
                    f"{shown(self.path)}: a line before step {step} is lost or changed: put the run's "
                    "own file back"
                )

    def speed(self, tokens: int) -> dict[str, float]:
        """The fields MEASURED of a step with so many supervised tokens, which ends now."""
        now = time.perf_counter()
        took = now - self.written
        values = (
            now - self.started,
            (self.progress.samples - self.samples) / took,
            tokens / took,
            peak_bytes(self.device) / 2**20,
        )
        return {name: round(value, 3) for name, value in zip(MEASURED, values, strict=True)}

    def write(self, record: dict) -> None:
        """Write the metrics of one step, and update the seconds of `progress`. Raises UserError if
        the disk is full."""
        self.progress.seconds = time.perf_counter() - self.started
        if self.file:
            with file_errors(self.path):
                self.file.write(json.dumps(record) + "\n")
            units = {"loss": "", "held_out_loss": "", "exact_match": " %", "AP": " %"}
            for name, unit in units.items():
                if name in record:
                    self.values[name] = f"{record[name]:.3f}{unit}"
            speed = f"{self.progress.samples / self.progress.seconds:.0f}/s"
            self.bar.set_postfix(self.values, refresh=False, samples=speed)
            self.bar.update()
        self.samples = self.progress.samples
        self.go_on()

    def go_on(self) -> None:
        """The next step begins: what was done since the last one is no part of its speed."""
        self.written = time.perf_counter()

    def sync(self) -> None:
        """Flush the metrics to disk, for the checkpoint that follows."""
        if self.file:
            with file_errors(self.path):
                os.fsync(self.file.fileno())
            self.progress.log = file_digest(self.path)

    def close(self) -> None:
        """End the bar and the file."""
        self.bar.close()
        if self.file:
            self.file.close()


def peak_bytes(device: torch.device | str = "cpu") -> int:
    """The peak memory of this process: on the GPU, or resident, including mapped files."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        status = Path("/proc/self/status").read_text()
        if found := re.search(r"VmHWM:\s+(\d+)", status):
            return int(found[1]) * 1024
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


def read_metrics(run: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def draw_loss(run: Path) -> None:
    """Write `loss.png`: the loss of every step, its running mean, and the loss on held-out
    examples."""
    records = read_metrics(run)
    losses = [(record["step"], record["loss"]) for record in records if "loss" in record]
    width = max(1, len(losses) // 50)
    means = []
    for end, (step, _) in enumerate(losses, 1):
        last = [loss for _, loss in losses[max(0, end - width) : end]]
        means.append((step, sum(last) / len(last)))
    lines = {"each step": losses, f"mean of {width}": means}
    held_out = [(r["step"], r["held_out_loss"]) for r in records if "held_out_loss" in r]
    if held_out:
        lines["held-out"] = held_out
    chart = line_chart(
        lines,
        f"{run.name}: loss",
        "step",
        "nats a token",
        pale=["each step"],
        marked=["held-out"],
    )
    figures.save(chart, run / "loss.png")


# What a run is made from


def data_fingerprints(records: Sequence[Record]) -> dict[str, str]:
    """Fingerprints of all texts, and of the pictures' files: the size of each, and of every n-th,
    some 1,024 to 2,047, also the first and the last 256 KiB."""
    texts, pictures = sha256(), sha256()
    paths = set()
    for record in records:
        answers = record.answers if record.sampled else ()
        text = repr((record.name, record.key, record.turns, answers))
        texts.update(text.encode("utf-8", "surrogatepass"))
        paths |= {picture for picture in record.pictures if isinstance(picture, Path)}
    every = max(1, len(paths) // 1024)
    for number, path in enumerate(sorted(paths)):
        entry = "none"
        if path.is_file():
            is_sampled = number % every == 0
            entry = file_digest(path, 2) if is_sampled else path.stat().st_size
        pictures.update(f"{entry}\n".encode())
    return {"records": texts.hexdigest()[:16], "pictures": pictures.hexdigest()[:16]}


def set_origin(
    run: Path,
    progress: Progress,
    settings: Any,
    fingerprints: Mapping[str, str],
    allow_changed: bool,
) -> None:
    """Store in `progress` what the run is made from: its settings, and fingerprints such as
    {"base": …}.

    Raises UserError if its checkpoint has another origin, naming what has changed; with
    `allow_changed` it is printed, and scores of another base or other data are forgotten, as is
    the early end that they caused.
    """
    decided = {name: value for name, value in asdict(settings).items() if name not in FREE}
    origin = {flag_name(name): value for name, value in decided.items()}
    origin |= {f"the {name}": fingerprint for name, fingerprint in fingerprints.items()}
    origin = json.loads(json.dumps(origin))  # as a checkpoint has it
    changes = []
    before = origin if progress.origin is None else progress.origin
    for name, new in origin.items():
        old = before.get(name)
        if new != old:
            changes.append(f"{name} is {quoted(new)}, was {quoted(old)}")
            if name.startswith("the "):
                progress.results.clear()
                progress.best = None
                progress.stopped = None
    progress.origin = origin
    message = f"{shown(run)}: changed since step {progress.step}: {'; '.join(changes)}"
    if changes and not allow_changed:
        raise UserError(f"--resume {message}: undo that, or add --allow-changed")
    if changes:
        print(f"{message}: allowed", file=sys.stderr)


def provenance() -> dict[str, str]:
    """The commit ("+" if files differ from it), the processor and the version of PyTorch that made
    a result."""
    command = ["git", "describe", "--always", "--exclude=*", "--abbrev=10", "--dirty=+"]
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
        commit = done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = "no commit"
    return {"commit": commit, "processor": processor_name(), "torch": torch.__version__}
