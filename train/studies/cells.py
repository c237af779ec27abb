"""The cells of a study on disk: their names, and the processes that compute them side by side.

A result is in its file, or it is not: a call that was killed goes on with what is missing. Each
cell has one thread, so that no result depends on the number of processes.
"""

import ast
import inspect
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import torch

from model.common import short_hash, write_text
from train.loop import Diverged
from train.run import provenance

ROOT = Path(__file__).parents[2]
JUDGING = {Path(__file__).with_name(f"{n}.py") for n in ("engine", "rules", "report", "cells")}


@dataclass(frozen=True)
class Job:
    """A cell: a row with its changes, (name, value) pairs, at a rate and a seed. All of them name
    it."""

    row: str
    changes: tuple
    rate: float
    seed: int


def digest(*parts) -> str:
    """16 hexadecimal digits of what `parts` print as."""
    return short_hash(repr(parts))


def source_hash(make: Callable) -> str:
    """The hash of the file of `make`; what a `partial` binds is no source."""
    return hash_of(inspect.getfile(make.func if isinstance(make, partial) else make))


@cache
def hash_of(file: str) -> str:
    """A hash of the source that decides a cell, so that changed code never meets old cells.

    The file counts, and so do the project's files that it imports, and that those import in turn:
    all but comments, docstrings, and files that only judge.
    """
    waiting, texts = {Path(file)}, {}
    while waiting:
        path = waiting.pop()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value = ast.Constant(None)  # a docstring
            elif isinstance(node, ast.ImportFrom):  # of a module, or of names in one
                package = ROOT.joinpath(*f"{node.module}".split("."))
                files = {package / f"{alias.name}.py" for alias in node.names}
                files.add(package.with_suffix(".py"))
                waiting |= {path for path in files - JUDGING if path.is_file()}
        texts[path] = ast.dump(tree)
        waiting -= texts.keys()
    return digest(*(texts[path] for path in sorted(texts)))


def compute_all(calls: Sequence[tuple], processes: int) -> None:
    """`compute` with the arguments of each call, in so many processes; each result is a line on
    stderr."""
    run = map if processes == 1 else pool_of(processes).map
    try:
        for number, line in enumerate(run(compute, calls), 1):
            print(f"{number} of {len(calls)}: {line}", file=sys.stderr, flush=True)
    except BaseException:  # Ctrl-C, or a cell that failed; the others would compute to the end
        for process in multiprocessing.active_children() if processes > 1 else ():
            process.kill()
        raise


def compute(call: tuple[Callable[..., dict], Job, Path, Sequence[Path]]) -> str:
    """Make a cell and write its result, with what it was made by; returns its row and CPU seconds
    in words.

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
    record = asdict(job) | result | {"cpu_seconds": round(spent, 2)} | provenance()
    write_text(file, json.dumps(record) + "\n")
    rate = f", rate {job.rate:g}" if job.rate else ""
    return f"{job.row}{rate}, seed {job.seed}: {spent:.0f} CPU seconds"


@cache
def pool_of(processes: int) -> ProcessPoolExecutor:
    """Processes that compute cells."""
    return ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=prepare_process
    )


def prepare_process() -> None:
    torch.set_num_threads(1)
    os.setpgrp()  # Ctrl-C on a terminal reaches the first process alone, which ends the others
    # its progress bars would overwrite those of the others
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """A killed parent can tell its processes nothing: they would compute on, in a folder whose lock
    is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
