"""Kill a small fine-tuning run many times at random moments, half of them in a save, and look at what is left.

    python -m tests.killed_runs FOLDER --kills 50

Every child is a fork of this process, which has imported everything but used no threads: so a run starts in a fraction
of a second. Prints one JSON line: how many kills, at how many different steps, and whether the run that was killed so
often ended with the metrics of one that never was.
"""

import argparse
import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch._dynamo  # every optimizer imports it: once here, or for a second in each child
from safetensors import safe_open

from model.config import PRESETS
from tests.runs import metrics
from train import finetune, loop
from train.checkpoint import checkpoints

SMALL = replace(  # when files are written does not depend on the model
    PRESETS["tiny"],
    vision=replace(PRESETS["tiny"].vision, num_hidden_layers=1),
    text=replace(PRESETS["tiny"].text, num_hidden_layers=2),
)
RUN = [
    "--base",
    "tiny",
    "--data",
    "embedded",
    "--no-evaluate",
    "--batch-size",
    "2",
    "--samples",
    "60",
    "--steps",
    "8",
    "--dropout",
    "0.1",
    "--checkpoint-every",
    "1",
    "--measure-every",
    "5",
    "--device",
    "cpu",
]


def start(arguments: list[str], part: float | None = None) -> int:
    """Fork a child that runs `python -m train.finetune ARGUMENTS`, silently; its process id.

    It dies after this `part` of its second save, as the first one was timed: most of a run's time is spent elsewhere.
    """
    child = os.fork()
    if child:
        return child
    try:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        if part is not None:
            loop.save_checkpoint = dying(loop.save_checkpoint, part)
        finetune.main(arguments)
        os._exit(0)
    except BaseException:
        os._exit(1)


def dying(save: Callable[..., Path], part: float) -> Callable[..., Path]:
    """`save_checkpoint`, in which a timer ends the process: by a signal that nothing catches, as SIGKILL."""
    seconds: list[float] = []

    def timed(*args, **options) -> Path:
        began = time.perf_counter()
        if seconds:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, part * seconds[0]))
        folder = save(*args, **options)
        seconds.append(time.perf_counter() - began)
        return folder

    return timed


def look(run: Path) -> int:
    """Check that all that bears a checkpoint's name is whole; the newest step."""
    for folder in checkpoints(run):
        step = json.loads((folder / "state.json").read_text())["step"]
        assert folder.name == f"step-{step}", folder
        for name in ("trainable.safetensors", "optimizer.safetensors"):
            with safe_open(folder / name, "pt") as file:
                assert all(torch.isfinite(file.get_tensor(key)).all() for key in file.keys()), folder
    found = checkpoints(run)
    return int(found[-1].name.removeprefix("step-")) if found else 0


def kill_often(folder: Path, kills: int) -> dict:
    """How many kills, in how many runs, at which steps, and whether all ended with the metrics of a run without any."""
    torch.set_num_threads(1)
    PRESETS["tiny"] = SMALL
    whole = folder / "whole"
    began = time.perf_counter()
    assert os.waitstatus_to_exitcode(os.waitpid(start([*RUN, "--out", str(whole)]), 0)[1]) == 0
    length = time.perf_counter() - began
    dice, killed, steps, number, equal = random.Random(0), 0, set(), 0, []
    while killed < kills:
        number += 1
        run, last, ended = folder / f"run-{number}", 0, False
        while not ended:
            arguments = ["--resume", str(run)] if (run / "config.json").exists() else [*RUN, "--out", str(run)]
            in_save = killed < kills and dice.random() < 0.5
            child = start(arguments, dice.random() if in_save else None)
            if killed < kills and not in_save:
                time.sleep(dice.uniform(0, length))
                os.kill(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code in (0, -signal.SIGKILL, -signal.SIGALRM), f"exit code {code} of {arguments}"
            killed += code != 0
            ended = code == 0
            newest = look(run)
            assert newest >= last, f"{run}: step {last} was reached, {newest} is left"
            last = newest
            steps.add(newest)
        equal.append(metrics(run) == metrics(whole))
    return {"kills": killed, "runs": number, "steps": sorted(steps), "equal": all(equal)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.killed_runs", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    args = parser.parse_args()
    print(json.dumps(kill_often(args.folder, args.kills)))


if __name__ == "__main__":
    main()
