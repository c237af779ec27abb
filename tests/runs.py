"""Runs of train.finetune that tests start, alone or under torchrun, and what they log."""

import csv
import os
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from model.common import UserError
from tests.files import read_json, read_lines
from train import finetune
from train.distributed import World
from train.run import MEASURED
from train.settings import parse

WORLD = World(0, 1, torch.device("cpu"))
QUICK = "--base tiny --no-evaluate --batch-size 2 --samples 60 --dropout 0.1 --device cpu"

SERVER = get_context(
    "forkserver"
)  # imports everything once, and starts no thread: its children start at once
SERVER.set_forkserver_preload(["tests.runs", "torch._dynamo"])
spawn = partial(
    torch.multiprocessing.start_processes, start_method="forkserver"
)  # as torch.multiprocessing.spawn

SCRIPT = "import torch\nfrom train import finetune\ntorch.set_num_threads(1)\nfinetune.main()\n"


def words(*arguments) -> list[str]:
    """A command line, split at spaces."""
    return " ".join(map(str, arguments)).split()


def refused(call: Callable[[], object], *parts: str) -> str:
    """The message of the UserError that `call` raises: one line that holds all parts, such as a
    file name or a flag."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message
    return message


def refuses(command, flags: str, *parts: str) -> None:
    """A command takes no such flags: its message, one line, holds all parts."""
    refused(lambda: command.main(words(flags)), *parts)


def train(*arguments) -> None:
    """The command train.finetune."""
    finetune.main(words(*arguments))


def run(*arguments, out: Path) -> list[dict]:
    """A short run of train.finetune into `out`; its metrics."""
    train(QUICK, *arguments, "--out", out)
    return metrics(out)


def metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl, without what depends on the clock."""
    lines = read_lines(folder / "metrics.jsonl")
    for line in lines:
        for name in MEASURED:
            line.pop(name, None)
    return lines


def read_cells(file: Path) -> list[SimpleNamespace]:
    """The lines of a study's comparison.csv: Python writes floats so that they are read as they
    were."""
    kinds = {"seed": int, "n": int, "rate": float, "right": float, "cpu_seconds": float}
    cells = []
    with file.open(encoding="utf-8", newline="") as text:
        for row in csv.DictReader(text):
            values = {name: kinds.get(name, str)(value) for name, value in row.items()}
            cells.append(SimpleNamespace(**values))
    return cells


def cells_in(out: Path) -> dict[str, tuple[Path, dict]]:
    """Of each row of a study the folder of a cell, and what it holds."""
    cells = {file.parent: read_json(file) for file in out.glob("cells/*/cell.json")}
    return {cell["row"]: (folder, cell) for folder, cell in cells.items()}


def times_in(out: Path) -> dict[Path, int]:
    """When each file of a study's cells was written."""
    return {file: file.stat().st_mtime_ns for file in out.glob("cells/*/*")}


def assert_same_tensors(ours, theirs) -> None:
    """Both hold the same names, and each tensor of ours is theirs to the bit, in its dtype."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def torchrun(processes: int, *arguments) -> None:
    """`train.finetune` under torchrun itself, on so many processes of one thread each; their errors
    if it fails."""
    from torch.distributed.run import main

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, OMP_NUM_THREADS="1"):
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        flags = f"--standalone --nproc-per-node={processes} --start-method=forkserver --redirects=3 --log-dir={folder}"
        try:
            main([*words(flags, "--run-path", script), *words(*arguments)])
        except Exception as error:
            raise AssertionError(
                *(file.read_text()[-3000:] for file in Path(folder).rglob("stderr.log"))
            ) from error
        finally:
            for number, handler in handlers.items():  # torchrun replaces them
                signal.signal(number, handler)


def settings_of(*flags: object):
    """The settings of a run of `train.finetune`."""
    return parse(words(*flags))[0]


def stage_settings(system: str, *flags: object):
    """The settings of a run of `train.systems.wings` or `train.systems.qmamba`."""
    from train.systems.qmamba import QMambaSettings
    from train.systems.stages import parse_stage
    from train.systems.wings import WingsSettings

    return parse_stage({"wings": WingsSettings, "qmamba": QMambaSettings}[system], words(*flags))[0]
