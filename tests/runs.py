"""Runs of train.finetune in several tests: started as torchrun does, and what they have logged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from train import finetune
from train.distributed import World
from train.metrics import MEASURED

ROOT = Path(__file__).resolve().parents[1]
WORLD = World(0, 1, torch.device("cpu"))
QUICK = "--base tiny --no-evaluate --batch-size 2 --samples 60 --dropout 0.1 --measure-every 5 --device cpu".split()


def torchrun(processes: int, *arguments) -> None:
    """`train.finetune` on so many processes of one thread each; its error is shown if it fails."""
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", "-m", "train.finetune"]
    done = subprocess.run(
        [*launch, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl, without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in MEASURED} for line in lines]


def run(*arguments, out: Path) -> list[dict]:
    """A short run of train.finetune into `out`; its metrics."""
    finetune.main([*QUICK, *map(str, arguments), "--out", str(out)])
    return metrics(out)
