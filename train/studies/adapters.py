"""A cell of the studies that fine-tune a base: its adapter is trained, kept in the cell's folder, and asked.

In: settings, tasks (`train/studies/measures.py`) and a folder. Out: the cell's scores and facts, for the engine.
"""

import json
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from lora import adapter
from model.common import write_text
from model.paligemma import PaliGemma
from model.processor import Processor
from train.distributed import World, join_world
from train.loop import Diverged
from train.optim import count, trainable
from train.settings import Settings
from train.studies.measures import Task, training_records
from train.supervised import make_order, train_on
from train.systems.open import load_base, open_model, open_processor


@cache
def open_once(base: Settings) -> tuple[Processor, World]:
    """In each process."""
    world = join_world(base.device)
    return open_processor(base, load_base(base, torch.device("meta")))[0], world


def fine_tune(base: Settings, settings: Settings, tasks: Mapping[str, Task], folder: Path) -> dict:
    """Train the adapter of a cell in its folder, unless it is there, and ask it. base: what all cells share.

    A run whose loss is no longer finite scores 0.
    """
    (processor, world), file = open_once(base), folder / "facts.json"
    if file.exists():
        model = load_base(settings, world.device)
        adapter.load(model, folder)
    else:
        model, optimizer = open_model(settings, world.device)
        facts = {"parameters": count(trainable(model).values())}
        try:
            order = make_order(training_records(settings, base.seed), processor, settings, world)
            started = time.process_time()
            train_on(order, model, optimizer, settings, folder, world)
        except Diverged as error:
            scores = {name: [0.0] * len(task.groups) for name, task in tasks.items()}
            return {"scores": scores, "facts": facts | {"seconds": 1.0, "diverged": str(error)}}
        adapter.save(model, folder, settings.base, settings.question_prompt)
        write_text(file, json.dumps(facts | {"seconds": time.process_time() - started}) + "\n")
    return {"scores": ask(model, processor, settings, tasks, folder), "facts": json.loads(file.read_text())}


def ask(
    model: PaliGemma, processor: Processor, settings: Settings, tasks: Mapping[str, Task], folder: Path
) -> dict[str, list[float]]:
    """The score of each question, by task."""
    return {name: task.grade(model.eval(), processor, settings, folder) for name, task in tasks.items()}
