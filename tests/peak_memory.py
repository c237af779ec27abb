"""What loading a checkpoint takes, measured in a process that does nothing else."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from tests.runs import SERVER
from train.run import peak_bytes
from weights.load import load_model


def in_own_process(function: Callable, *arguments):
    """What `function(*arguments)` returns in a new process, which a server forks that has read
    nothing but modules."""
    with ProcessPoolExecutor(1, SERVER) as pool:
        return pool.submit(function, *arguments).result()


def load_peak(folder: Path, dtype: torch.dtype, quantize: str | None = None) -> tuple[int, int]:
    """Bytes of the peak while loading, beyond what the imports took, and bytes of the weights."""
    torch.set_num_threads(1)
    # the code that loads is no part of the peak: a system may have put it out of memory while the
    # server waited
    load_model("embedded", dtype=dtype, quantize=quantize)
    before = peak_bytes()
    model = load_model(folder, dtype=dtype, quantize=quantize)
    return peak_bytes() - before, sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
