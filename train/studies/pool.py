"""Cells are computed in processes side by side, and written when they are finished.

A result is in its file, or it is not: a call that was killed goes on with what is missing. Each cell has one thread, so
that no result depends on the number of processes.
"""

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path

import torch

from model.common import write_text
from train.origin import provenance
from train.run import Interrupted


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
    if processes == 1:
        for number, call in enumerate(calls, 1):
            announce(number, len(calls), call[1], compute(*call))
    elif calls:
        pool = pool_of(processes)
        futures = {pool.submit(compute_or_end, *call): call[1] for call in calls}
        try:
            for number, done in enumerate(as_completed(futures), 1):
                announce(number, len(calls), futures[done], done.result())
        except BaseException:  # Ctrl-C, or a cell that failed: the others save what they have trained
            pool_of.cache_clear()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def compute(make: Callable[..., dict], job: Job, file: Path, needed: Sequence[Path]) -> float:
    """Make a cell and write its result, with what it was made by; returns its CPU seconds."""
    file.parent.mkdir(parents=True, exist_ok=True)
    started = time.process_time()
    result = make(job, file.parent, *needed)
    spent = time.process_time() - started
    write_text(file, json.dumps(asdict(job) | result | {"cpu_seconds": round(spent, 2)} | provenance()) + "\n")
    return spent


def compute_or_end(*call) -> float:
    """`compute`; a process that was told to end must not begin the next cell, which the pool has handed over."""
    try:
        return compute(*call)
    except Interrupted:
        os._exit(1)


def announce(number: int, total: int, job: Job, seconds: float) -> None:
    rate = f", rate {job.rate:g}" if job.rate else ""
    text = f"{number} of {total}: {job.row}{rate}, seed {job.seed}, {job.split}: {seconds:.0f} CPU seconds"
    print(text, file=sys.stderr, flush=True)


@cache
def pool_of(processes: int) -> ProcessPoolExecutor:
    """Processes that compute cells. They end with this one, however it ends."""
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
    wait([parent.sentinel])
    os._exit(1)
