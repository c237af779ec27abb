"""Several processes on one CPU: the command starts copies of itself, and all split the rows of each micro-batch.

A small model's operations are too small for threads to divide. In: the command line of this process. Out: a `World`
that splits rows. The run is the same for any number of processes, up to the order of its sums and the masks of dropout.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from model.common import UserError, shown
from model.device import choose_device
from train.checkpoint import checkpoints, read_state
from train.distributed import World, join_world, leave_world
from train.settings import Settings, step_layout

MOST = 4  # processes by default
SMALL = 100e6  # bytes of weights: the operations of a larger model are large enough for threads
LEAST_ROWS = 8  # of a micro-batch on each process: fewer rows take hardly less time
LONG = 3000  # rows of a run: a process takes about five seconds to start
NOTICED = 10  # seconds within which a process that has closed its connections has ended
PLACE = "DMT_PROCESS"  # in the environment of a started process: its rank, their number, threads, and where they meet
INTERFACE = "GLOO_SOCKET_IFNAME"


def choose_processes(wanted: int | None, settings: Settings, model: nn.Module, resumed: Path | None = None) -> int:
    """The number of processes that split the rows of a run of `model`. 1 of `torchrun`.

    wanted: None is as many as the `resumed` run has had, for the same sums and masks of dropout; for a new one, as many
    as save time. Raises UserError for a number that cannot be had.
    """
    is_alone = not {PLACE, "WORLD_SIZE"} & os.environ.keys() and not dist.is_initialized()
    if wanted == 1 or not is_alone and wanted is None or PLACE in os.environ:
        return 1
    if not is_alone or settings.shard or choose_device(settings.device).type != "cpu":
        if wanted is not None:
            raise UserError(f"--processes {wanted}: they share a CPU; several GPUs and --shard take torchrun alone")
        return 1
    rows, micro_batches = step_layout(settings, 1)
    if wanted is not None:
        if wanted > rows:
            raise UserError(f"--processes {wanted}: a micro-batch has only {rows} rows for them, see --batch-size")
        return wanted
    if (before := processes_before(resumed)) is not None:
        return min(before, rows)
    trained = settings.steps * rows * micro_batches if settings.steps else settings.epochs * settings.samples
    is_long = trained >= LONG or not (settings.steps or settings.is_embedded)  # how much data there is is not known yet
    is_small = sum(parameter.nbytes for parameter in model.parameters()) <= SMALL
    if not (is_long and is_small) or sys.platform == "win32":  # where none of this has been tried
        return 1
    return max(1, min(MOST, torch.get_num_threads(), rows // LEAST_ROWS))


def processes_before(run: Path | None) -> int | None:
    """The number of processes that split the rows of `run` when its newest checkpoint was written; None: not known."""
    found = checkpoints(run) if run is not None else []
    progress = read_state(found[-1])["progress"] if found else {}
    numerics = progress.get("origin", {}).get("numerics") or {}  # an older version has not written it
    written = re.fullmatch(r"([1-9]\d{0,3}) processes", str(numerics.get("processes")))
    is_split = progress.get("processes", 1) == 1  # else `torchrun` has started them
    return int(written[1]) if written and is_split else None


@contextlib.contextmanager
def several(processes: int, device: str, arguments: Sequence[str] | None) -> Iterator[Callable[[], World]]:
    """Start the other processes; the block gets a function that waits for them and gives the `World` of this one.

    arguments: of the command, None: those of this program. Nothing of the others is printed, and they end with the
    block, or with this process. With 1 process it is a started one, of `torchrun`, or alone. Raises UserError if
    another process ends early.
    """
    place, threads, others = os.environ.get(PLACE), torch.get_num_threads(), []
    try:
        if place is not None:
            threading.Thread(target=_end_with_first, daemon=True).start()
            yield lambda: _meet_first(*place.split(" ", 3))
        elif processes == 1:
            yield lambda: join_world(device)
        else:
            share = max(1, threads // processes)
            torch.set_num_threads(share)
            words = sys.argv[1:] if arguments is None else arguments
            with tempfile.TemporaryDirectory() as folder:
                for rank in range(1, processes):
                    others.append(Other(rank, f"{rank} {processes} {share} {folder}/store", words, share))
                yield lambda: _meet_others(f"{folder}/store", others)
    except RuntimeError as error:
        ends = time.monotonic() + NOTICED
        while others and "gloo" in str(error) and time.monotonic() < ends:  # a process that ends closes its connections
            time.sleep(0.1)
            for other in others:
                if other.process.poll():
                    other.check()
        raise
    finally:
        leave_world()
        for other in others:
            other.end()
        torch.set_num_threads(threads)


class Other:
    """A process that runs this command too. It ends when its stdin is closed: also when this process is killed."""

    def __init__(self, rank: int, place: str, arguments: Sequence[str], threads: int):
        self.rank, self.errors = rank, tempfile.TemporaryFile()  # noqa: SIM115 (`end` closes it)
        paths = [str(Path(__file__).resolve().parents[1]), *filter(None, sys.path)]
        environment = {PLACE: place, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "train.finetune", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            env=os.environ | environment,
            start_new_session=True,  # Ctrl-C is for the first process, which tells the others at the end of a step
        )

    def check(self) -> None:
        """Raise UserError if it has ended."""
        if (code := self.process.poll()) is not None:
            self.errors.seek(0)
            lines = self.errors.read().decode(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "it printed no error")
            ended = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise UserError(
                f"process {self.rank + 1} {ended} ({shown(last)}): start the command again, or --resume its run; with "
                "--processes 1 there is no other process"
            )

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def _meet_others(file: str, others: Sequence[Other]) -> World:
    """Wait until all others are ready. Raises UserError if one ends before."""
    store = dist.FileStore(file, len(others) + 1)
    while not store.check([str(other.rank) for other in others]):
        for other in others:
            other.check()
        time.sleep(0.02)
    world = _world(store, 0, len(others) + 1)
    shutil.rmtree(Path(file).parent)  # all are connected: a process that is killed leaves nothing behind
    return world


def _meet_first(rank: str, size: str, threads: str, file: str) -> World:
    """Join the process that has started this one."""
    torch.set_num_threads(int(threads))
    store = dist.FileStore(file, int(size))
    store.set(rank, "ready")
    return _world(store, int(rank), int(size))


def _end_with_first() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def _world(store: dist.Store, rank: int, size: int) -> World:
    """Connect with the others, by the loopback alone: nothing listens to the network.

    They wait for each other for a day, since the first may train a text model before; one that ends is noticed at once.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    adds = loopback is not None and INTERFACE not in os.environ
    try:
        os.environ |= {INTERFACE: loopback} if adds else {}
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(days=1))
    finally:
        if adds:
            del os.environ[INTERFACE]
    dist.barrier()
    return World(rank, size, torch.device("cpu"), splits_rows=True)
