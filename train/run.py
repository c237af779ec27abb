"""The folder of a run: made when training starts, and locked while a process writes to it; and the end by a signal.

SIGTERM or Ctrl-C during training: the running step is finished, a checkpoint is written, the program ends.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from model.common import UserError, file_errors, shown, write_text
from train.checkpoint import checkpoints
from train.distributed import World
from train.flags import RUN_CONFIG, RunArguments

LOCK = ".lock"


class Interrupted(Exception):
    """A signal, its first argument, asked the run to end; the run has been saved."""

    def end_program(self, advice: str) -> None:
        """Print that the work is saved, with `advice`, and exit with the signal's code."""
        print(f"\nsaved; {advice}", file=sys.stderr)
        sys.exit(128 + self.args[0])


@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """SIGTERM and Ctrl-C are put into the yielded list instead of ending the process; a second signal ends it."""
    received: list[int] = []

    def handler(number, frame):
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = {}
    with contextlib.suppress(ValueError):  # not the main thread
        before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_empty(out: Path | None) -> None:
    """Raise UserError if `out` holds anything but hidden files, which a killed run may have left."""
    with file_errors(out or "."):
        if out is not None and out.exists() and not all(path.name.startswith(".") for path in out.iterdir()):
            raise UserError(f"--out {shown(out)}: not empty: choose another folder, or --resume it")


@contextlib.contextmanager
def run_folder(arguments: RunArguments, settings, stem: str, program: str, world: World) -> Iterator[Path]:
    """The folder of a run for the block, locked: the resumed one, or a new `--out` or runs/STEM-NUMBER.

    If the block raises UserError before anything is learned, the new folder is deleted. An interrupted block ends the
    program, with advice. Raises UserError if another process writes to the folder, if it is not empty, or if the
    processes do not share it.
    """
    run = lock = None
    if world.is_first:
        run = arguments.resume or _new_folder(arguments.out, stem)
        lock = lock_folder(run)
        if not arguments.resume:
            check_empty(run)
            write_text(run / RUN_CONFIG, json.dumps(dataclasses.asdict(settings), indent=1) + "\n")
    run = world.gather(run)[0]
    try:
        steps = world.gather([path.name for path in checkpoints(run)])
        if any(names != steps[0] for names in steps):  # each would begin at another step
            raise UserError(f"{shown(run)}: the processes see different checkpoints: give a folder that they share")
        yield run
    except Interrupted as interrupted:
        interrupted.end_program(f"go on with: python -m {program} --resume {run}")
    except UserError:
        metrics = run / "metrics.jsonl"
        if lock and not arguments.resume and not (metrics.exists() and '"loss"' in metrics.read_text()):
            for path in [run / LOCK, *run.glob("[!.]*")]:  # hidden files of others stay
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                run.rmdir()
        raise


def _new_folder(out: Path | None, stem: str) -> Path:
    """`out`, or runs/STEM-NUMBER with the next number."""
    with file_errors(out or "runs"):
        if out:
            out.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1) if out is None else ():
            with contextlib.suppress(FileExistsError):
                (run := Path("runs", f"{stem}-{number}")).mkdir(parents=True)
                break
    return out or run


def lock_folder(run: Path) -> IO:
    """An open file that holds the lock of `run`. A killed process loses its lock, and workers do not inherit it."""
    with file_errors(run):
        lock = (run / LOCK).open("w")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        lock.close()
        raise UserError(f"{shown(run)}: another process writes to this folder: wait, or choose another one") from None
    except OSError:  # a file system without locks
        pass
    return lock
