"""What the cells of fine-tuning studies do: train an adapter in the cell's folder, and ask a model its tasks.

In: settings, tasks (`train/studies/measures.py`) and a folder. Out: the cell's scores and facts, for the engine.
"""

import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from eval.answer import ask_all
from lora import adapter
from model.common import UserError, shown
from model.paligemma import PaliGemma
from model.processor import Processor
from train.distributed import World, join_world
from train.optim import count, trainable
from train.settings import Settings
from train.studies.measures import Task, training_records
from train.studies.pool import once
from train.supervised import make_order, train_on
from train.systems.open import load_base, open_model, open_processor


@cache
def open_once(base: Settings) -> tuple[Processor, World]:
    """In each process."""
    world = join_world(base.device)
    return open_processor(base, load_base(base, torch.device("meta")))[0], world


def fine_tune(base: Settings, settings: Settings, tasks: Mapping[str, Task], folder: Path) -> dict:
    """Train the adapter of a cell in its folder, unless it is there, and ask it. base: what all cells share."""
    processor, world = open_once(base)

    def train() -> dict:
        model, optimizer = open_model(settings, world.device)
        order = make_order(training_records(settings, base.seed), processor, settings, world)
        started = time.process_time()
        train_on(order, model, optimizer, settings, folder, world)
        adapter.save(model, folder, settings.base, settings.question_prompt)
        return {"parameters": count(trainable(model).values()), "seconds": time.process_time() - started}

    facts, model = once(folder / "facts.json", train), load_base(settings, world.device)
    adapter.load(model, folder)
    return {"scores": ask(model, processor, settings, tasks, folder), "facts": facts}


def ask(
    model: PaliGemma, processor: Processor, settings: Settings, tasks: Mapping[str, Task], folder: Path
) -> dict[str, list[float]]:
    """The score of each question, by task. On disk, where it may take hours, with a progress bar and a log.

    Names on stderr the first question that could not be asked; raises UserError if none of a task's could be.
    """
    scores = {}
    for name, task in tasks.items():
        left_out: dict[str, str] = {}
        long = {} if settings.is_embedded else {"progress": task.title, "log": folder / f"answers-{name}.jsonl"}
        answers = ask_all(model.eval(), processor, task.asks, left_out=left_out, **long)
        first = shown(next(iter(left_out.values()), ""))
        if len(left_out) == len(task.asks):
            raise UserError(f"none of the {len(task.asks)} questions can be asked: {first}")
        if left_out:
            print(f"{len(left_out)} questions count as wrong: {first} …", file=sys.stderr)
        scores[name] = task.score(answers)
    return scores
