"""Runs of train.finetune in several tests: started as torchrun does, and what they have logged."""

import json
import os
import signal
import socket
import tempfile
from collections.abc import Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest.mock import patch

import torch

from model.common import run_command
from train import finetune
from train.distributed import World
from train.metrics import MEASURED

WORLD = World(0, 1, torch.device("cpu"))
QUICK = "--base tiny --no-evaluate --batch-size 2 --samples 60 --dropout 0.1 --measure-every 5 --device cpu".split()


SERVER = get_context("forkserver")  # has imported everything once, and with no thread: its children start at once
SERVER.set_forkserver_preload(["tests.runs", "torch._dynamo"])
spawn = partial(torch.multiprocessing.start_processes, start_method="forkserver")  # as torch.multiprocessing.spawn


def start(arguments: Sequence, errors: Path, **environment: str) -> ForkServerProcess:
    """A process that runs `python -m train.finetune ARGUMENTS` on one thread; its stderr goes to the file `errors`."""
    process = SERVER.Process(target=_run, args=([*map(str, arguments)], errors, environment), daemon=True)
    process.start()
    return process


def _run(arguments: list[str], errors: Path, environment: dict[str, str]) -> None:
    for stream, file in ((1, os.devnull), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
    os.environ |= environment
    torch.set_num_threads(1)
    run_command(partial(finetune.main, arguments))


FINE_TUNE = """
import torch
from model.common import run_command
from train import finetune
torch.set_num_threads(1)
run_command(finetune.main)
"""


def torchrun(processes: int, *arguments) -> None:
    """`train.finetune` under torchrun itself, on so many processes of one thread each; its error if it fails.

    They are forked from `SERVER`: torchrun would start Python and import everything once more for each.
    """
    from torch.distributed.run import main

    ours = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, OMP_NUM_THREADS="1"):
        script = Path(folder, "script.py")
        script.write_text(FINE_TUNE)
        flags = f"--standalone --nproc-per-node={processes} --start-method=forkserver --redirects=3 --log-dir={folder}"
        try:
            main([*flags.split(), "--run-path", str(script), *map(str, arguments)])
        except Exception as error:
            raise AssertionError(*(file.read_text()[-3000:] for file in Path(folder).rglob("stderr.log"))) from error
        finally:
            for number, handler in ours.items():  # torchrun has taken them
                signal.signal(number, handler)


def in_processes(count: int, *arguments) -> None:
    """As `torchrun`, which imports everything once more in each process, but in a fraction of the time."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        running = {}
        for rank in map(str, range(count)):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(count), "MASTER_PORT": port}
            one = start(arguments, Path(folder, rank), MASTER_ADDR="127.0.0.1", **place)
            running[one.sentinel] = one
        failed = False
        while running and not failed:
            ended = [running.pop(sentinel) for sentinel in wait(list(running), timeout=300)]
            failed = not ended or any(one.exitcode for one in ended)
        for one in running.values():
            one.kill()
        assert not failed, "\n".join(file.read_text()[-3000:] for file in sorted(Path(folder).iterdir()))


def metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl, without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in MEASURED} for line in lines]


def run(*arguments, out: Path) -> list[dict]:
    """A short run of train.finetune into `out`; its metrics."""
    finetune.main([*QUICK, *map(str, arguments), "--out", str(out)])
    return metrics(out)
