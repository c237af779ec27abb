"""Cells are computed in processes side by side, and written when they are finished.

A result is in its file, or it is not: a call that was killed goes on with what is missing. Each cell has one thread, so
that no result depends on the number of processes. All processes end with the first, however it ends.
"""

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from model.common import write_text
from train.loop import Diverged
from train.run import provenance


@dataclass(frozen=True)
class Job:
    """A cell, and the split that it is scored on. changes: the row's (name, value) pairs; they name the cell too."""

    row: str
    changes: tuple
    rate: float
    seed: int
    split: str = "test"


def compute_all(calls: Sequence[tuple], processes: int) -> None:
    """`compute` with the arguments of each call, in so many processes; each result is a line on stderr."""
    run = map if processes == 1 else pool_of(processes).map
    try:
        for number, line in enumerate(run(compute, calls), 1):
            print(f"{number} of {len(calls)}: {line}", file=sys.stderr, flush=True)
    except BaseException:  # Ctrl-C, or a cell that failed; the others would compute to the end
        for process in multiprocessing.active_children() if processes > 1 else ():
            process.kill()
        raise


def compute(call: tuple[Callable[..., dict], Job, Path, Sequence[Path]]) -> str:
    """Make a cell and write its result, with what it was made by; returns its row and CPU seconds in words.

    A run whose loss is no longer finite has no scores; the study goes on.
    """
    make, job, file, needed = call
    file.parent.mkdir(parents=True, exist_ok=True)
    started = time.process_time()
    try:
        result = make(job, file.parent, *needed)
    except Diverged as error:
        result = {"scores": {}, "facts": {"diverged": str(error)}}
    spent = time.process_time() - started
    write_text(file, json.dumps(asdict(job) | result | {"cpu_seconds": round(spent, 2)} | provenance()) + "\n")
    rate = f", rate {job.rate:g}" if job.rate else ""
    return f"{job.row}{rate}, seed {job.seed}, {job.split}: {spent:.0f} CPU seconds"


def once(file: Path, train: Callable[[], dict]) -> dict:
    """What `train` returns, as JSON in `file`; from there if it is there already."""
    if not file.exists():
        write_text(file, json.dumps(train()) + "\n")
    return json.loads(file.read_text())


@cache
def pool_of(processes: int) -> ProcessPoolExecutor:
    """Processes that compute cells."""
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=prepare_process)


def prepare_process() -> None:
    torch.set_num_threads(1)
    os.setpgrp()  # Ctrl-C on a terminal reaches the first process alone, which ends the others
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  its progress bars would overwrite those of the others
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """A killed parent can tell its processes nothing: they would compute on, in a folder whose lock is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
