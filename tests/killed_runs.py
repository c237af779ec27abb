"""Kill a small fine-tuning run many times at random moments, half of them in a save, and look at
what is left.

Every child is a fork of this process, which imports everything but uses no threads, and so starts
at once.
"""

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
from tests.files import read_json
from tests.runs import QUICK, metrics, words
from train import finetune, loop
from train.checkpoint import checkpoints

TINY = PRESETS["tiny"]  # when files are written does not depend on the model
SMALL = replace(
    TINY,
    vision=replace(TINY.vision, num_hidden_layers=1),
    text=replace(TINY.text, num_hidden_layers=2),
)
RUN = f"{QUICK} --steps 8 --checkpoint-every 1"


def start(arguments: str, part: float | None = None) -> int:
    """Fork a child that runs `python -m train.finetune ARGUMENTS`, silently; its process id. With
    `part` it dies after this part of its second save, as the first one was timed."""
    child = os.fork()
    if child:
        return child
    try:
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        if part is not None:
            loop.save_checkpoint = dying(loop.save_checkpoint, part)
        finetune.main(words(arguments))
        os._exit(0)
    except BaseException:
        os._exit(1)


def dying(save: Callable[..., Path], part: float) -> Callable[..., Path]:
    """`save_checkpoint`, in which a timer ends the process: by a signal that nothing catches, as
    SIGKILL."""
    seconds: list[float] = []

    def timed(*args, **options) -> Path:
        began = time.perf_counter()
        if seconds:
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, part * seconds[0]))
        folder = save(*args, **options)
        seconds.append(time.perf_counter() - began)
        return folder

    return timed


def newest_step(run: Path) -> int:
    """The step of the newest checkpoint; whatever bears a checkpoint's name is whole."""
    for folder in checkpoints(run):
        assert read_json(folder / "state.json")["step"] == int(folder.name.removeprefix("step-"))
        for name in ("trainable.safetensors", "optimizer.safetensors"):
            with safe_open(folder / name, "pt") as file:
                assert all(torch.isfinite(file.get_tensor(key)).all() for key in file.keys()), (
                    folder
                )
    return max((int(folder.name.removeprefix("step-")) for folder in checkpoints(run)), default=0)


def kill_often(folder: Path, kills: int) -> tuple[set[int], bool]:
    """The steps at which runs died, and whether all ended with the metrics of a run without any
    kill."""
    torch.set_num_threads(1)
    PRESETS["tiny"] = SMALL
    began = time.perf_counter()
    assert os.waitpid(start(f"{RUN} --out {folder}/whole"), 0)[1] == 0
    length = time.perf_counter() - began
    dice = random.Random(0)
    number = 0
    killed = 0
    steps = set()
    equal = True
    while killed < kills:
        number = number + 1
        last = 0
        code = -1
        run = folder / f"run-{number}"
        while code:
            arguments = (
                f"--resume {run}" if (run / "config.json").exists() else f"{RUN} --out {run}"
            )
            dies = killed < kills
            in_save = dice.random() < 0.5
            child = start(arguments, dice.random() if dies and in_save else None)
            if dies and not in_save:
                time.sleep(dice.uniform(0, length))
                os.kill(child, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code in (0, -signal.SIGKILL, -signal.SIGALRM), f"exit code {code} of {arguments}"
            killed += code != 0
            newest = newest_step(run)
            assert newest >= last, f"{run}: step {last} was reached, {newest} is left"
            last = newest
            steps.add(last)
        equal &= metrics(run) == metrics(folder / "whole")
    return steps, equal
