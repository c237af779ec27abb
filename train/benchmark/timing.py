"""How the benchmark measures: sides in turns, ratios within a round, and the peak memory of a process.

In: one function for each side. Out: `Measurement`s, and tables of them.
"""

import gc
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from multiprocessing import get_context

import torch

from eval.report import interval_text, markdown_table
from model import cpu
from model.common import UserError, keep_memory
from model.device import processor_name
from model.linear import linear

OURS, COMPILED, THEIRS = "ours", "ours, compiled", "transformers"
TOO_LARGE = "out of memory"


@dataclass
class Measurement:
    """One piece of work, done by every side once in each round.

    seconds: by side, one number for each round; none for a side that ran out of memory. against: the side to which
    ratios are taken. peak: bytes by side, each in a process of its own. notes: other results by side, as text.
    """

    section: str
    work: str
    seconds: dict[str, list[float]]
    against: str = THEIRS
    peak: dict[str, int] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def median(self, side: str) -> float:
        return statistics.median(self.seconds[side]) if self.seconds[side] else math.nan

    def ratio(self, side: str) -> tuple[float, float, float] | None:
        """Median and quartiles over the rounds of side / `against`; None if that side was not measured."""
        if side == self.against or not self.seconds.get(self.against) or not self.seconds[side]:
            return None
        ratios = [a / b for a, b in zip(self.seconds[side], self.seconds[self.against], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return middle, low, high

    def to_dict(self) -> dict:
        sides = {}
        for side, seconds in self.seconds.items():
            ratio = self.ratio(side)
            sides[side] = {
                "median_s": self.median(side) if seconds else None,
                "seconds": seconds,
                "peak_bytes": self.peak.get(side),
                "ratio": ratio and ratio[0],
                "ratio_quartiles": ratio and list(ratio[1:]),
                "peak_ratio": self.peak_ratio(side),
                "note": self.note(side),
            }
        return {"section": self.section, "work": self.work, "against": self.against, "sides": sides}

    def note(self, side: str) -> str | None:
        """The note of a side, or that it ran out of memory."""
        return self.notes.get(side) if self.seconds[side] else TOO_LARGE

    def peak_ratio(self, side: str) -> float | None:
        other = self.peak.get(self.against)
        return self.peak[side] / other if side != self.against and side in self.peak and other else None


def take_turns(
    sides: Mapping[str, Callable[[], object]], rounds: int, device: torch.device | str = "cpu", warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of each side in each of `rounds`, after `warmup` rounds that do not count.

    A temporary slowdown of the machine affects all sides of a round, so ratios are taken within a round. Every other
    round runs backwards, so that no side always follows the same one. A side that runs out of memory has no seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    left = list(sides)
    for number in range(-warmup, rounds):
        for name in left[:] if number % 2 == 0 else left[::-1]:
            synchronize(device)
            started = time.perf_counter()
            try:
                sides[name]()
                synchronize(device)
            except torch.OutOfMemoryError:
                left.remove(name)
                seconds[name] = []
                continue
            if number >= 0:
                seconds[name].append(time.perf_counter() - started)
        free_memory()
    return seconds


def free_memory() -> None:
    """Give back what is no longer used, to the GPU too: other processes need it."""
    gc.collect()
    torch.cuda.empty_cache()


def synchronize(device: torch.device | str) -> None:
    """Wait for the work on a GPU."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def in_own_process(function: Callable, *arguments):
    """What `function(*arguments)` returns in a new process. Raises UserError if it fails there.

    Both must be picklable. The process imports only the module of `function`, and its output is thrown away. A GPU's
    OutOfMemoryError is raised as it is.
    """
    try:
        with ProcessPoolExecutor(1, get_context("spawn"), initializer=_start_child) as pool:
            return pool.submit(function, *arguments).result()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the child's own, or BrokenProcessPool where the system has killed it
        last = (str(error).strip().splitlines() or [""])[-1]
        raise UserError(f"{function.__name__}, in a process of its own: {type(error).__name__}: {last}") from None


def _start_child() -> None:
    keep_memory()  # as in every command
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)


# Limits of the device


@cache
def limits_of(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """FLOP/s of matrix products, and bytes a second of a GPU's copies or a CPU's reads: the most that was measured.

    On a CPU the products are those of its fastest path, whichever is in use: none can have a share above 100 %.
    """
    if device.type == "cpu":
        peaks = []
        for path in ("onednn", "torch"):  # "mkl" multiplies as "torch"
            with cpu.using(path):
                peaks.append(matmul_peak(device, dtype, 2048, rounds=5))
        return max(peaks), read_bandwidth()
    return matmul_peak(device, dtype), copy_bandwidth(device)


@torch.no_grad()
def matmul_peak(device: torch.device, dtype: torch.dtype, size: int = 8192, rounds: int = 10) -> float:
    """FLOP/s of the best of some products of two square matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / min(take_turns({"": lambda: linear(a, b)}, rounds, device, warmup=3)[""])


def copy_bandwidth(device: torch.device, size: int = 1 << 30) -> float:
    """Bytes a second, read and written, of the best of ten copies."""
    a, b = (torch.zeros(size, device=device, dtype=torch.uint8) for _ in range(2))
    return 2 * size / min(take_turns({"": lambda: b.copy_(a)}, 10, device, warmup=3)[""])


def read_bandwidth(size: int = 1 << 28) -> float:
    """Bytes a second of the best of ten sums over more memory than a cache holds."""
    a = torch.zeros(size // 4)
    return size / min(take_turns({"": a.sum}, 10, warmup=3)[""])


# Tables


def table(measurements: Iterable[Measurement]) -> str:
    """Markdown, a line for each side of each measurement."""
    lines = []
    for measured in measurements:
        for side in measured.seconds:
            ratio, peak, of_peak = measured.ratio(side), measured.peak.get(side), measured.peak_ratio(side)
            lines.append(
                (
                    measured.work,
                    side,
                    spell_seconds(measured.median(side)) if measured.seconds[side] else "",
                    "" if ratio is None else interval_text(ratio),
                    "" if peak is None else f"{peak / 2**20:,.0f} MiB",
                    "" if of_peak is None else f"{of_peak:.2f}",
                    measured.note(side) or "",
                )
            )
    return "\n".join(markdown_table(("work", "side", "median", "time ÷", "memory, peak", "memory ÷", ""), lines))


def spell_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def machine(device: torch.device) -> str:
    """The processor, its threads and memory, and the GPU."""
    memory = ""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    capability = torch.backends.cpu.get_cpu_capability()
    cores = f"{os.cpu_count()} cores ({capability}, products by {cpu.path})"
    text = f"{processor_name()}, {cores}, {torch.get_num_threads()} threads{memory}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        text += f"; {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return text


def versions() -> str:
    """The versions of Python and of what is compared."""
    found = [f"python {platform.python_version()}"]
    for package in ("torch", "transformers", "peft"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return ", ".join(found)


def today() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
