"""How a cell is trained and asked: the adapter of a base, or the stages of WINGS and Q-Mamba, and their flags.

In: settings, tasks (`train/studies/measures.py`) and a folder. Out: the cell's scores and facts, for the engine.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

from eval.answer import ask_all
from eval.records import Record
from lora import adapter
from model.common import UserError, shown
from model.device import choose_device
from model.mamba import choose_kernel
from model.paligemma import PaliGemma
from model.processor import Processor
from model.source import EMBEDDED
from train.distributed import World, join_world
from train.flags import flag
from train.optim import count, trainable
from train.settings import Settings
from train.studies.measures import Task, data_mark, training_records
from train.studies.options import StudyOptions, deciding, read_with_settings
from train.studies.pool import once
from train.supervised import make_order, train_on
from train.systems import open as systems
from train.systems.wings import TEXT_BASE
from weights.fingerprint import exact_fingerprint


@cache
def open_once(base: Settings) -> tuple[Processor, World]:
    """In each process."""
    world = join_world(base.device)
    return systems.open_processor(base, systems.load_base(base, torch.device("meta")))[0], world


def fine_tune(base: Settings, settings: Settings, tasks: Mapping[str, Task], folder: Path) -> dict:
    """Train the adapter of a cell in its folder, unless it is there, and ask it. base: what all cells share."""
    processor, world = open_once(base)

    def train() -> dict:
        model, optimizer = systems.open_model(settings, world.device)
        order = make_order(training_records(settings, base.seed), processor, settings, world)
        started = time.process_time()
        train_on(order, model, optimizer, settings, folder, world)
        adapter.save(model, folder, settings.base, settings.question_prompt)
        return {"parameters": count(trainable(model).values()), "seconds": time.process_time() - started}

    facts, model = once(folder / "facts.json", train), systems.load_base(settings, world.device)
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


# Stages


@dataclass(frozen=True)
class StagedOptions(StudyOptions):
    """The flags of these studies, besides those of `train.finetune`, which hold for both stages."""

    limit: int = flag(400, "questions of each measure", least=1)
    stage_1_data: str | None = flag(None, "data of stage 1 (default: that of --data)", metavar="SOURCE")


Options = TypeVar("Options", bound=StagedOptions)


def read_stages(
    kind: type[Options], arch: str, argv: Sequence[str] | None, description: str | None, quick: Mapping[str, object]
) -> tuple[Options, dict[int, Settings]]:
    """The flags of a study, and the settings of both stages of `arch`. Raises UserError."""
    stages, given = {}, (kind, argv, f"train.reproduce {arch}", description, quick)
    for stage in (1, 2):
        defaults = f"--arch {arch} --stage {stage}"
        options, stages[stage] = read_with_settings(*given, decided="recipe seed", defaults=defaults)
    if options.stage_1_data:
        stages[1] = replace(stages[1], data=(options.stage_1_data,))
    stages[2] = replace(stages[2], option=())  # stage 1 decides the parts
    return options, stages


def key_of(stages: Mapping[int, Settings], limit: int) -> str:
    """What decides all cells beside their source: settings, data, and the weights that stage 1 starts from."""
    settings = [(deciding(of_stage), data_mark(of_stage)) for of_stage in stages.values()]
    first = replace(stages[1], base=EMBEDDED) if stages[1].base == TEXT_BASE else stages[1]  # the cells train it
    return repr((settings, exact_fingerprint(systems.open_stage(first, torch.float32, torch.device("cpu"))), limit))


def open_on_device(settings: Settings) -> PaliGemma:
    """The model of a stage, on its device, with its kernel of the scan."""
    device = choose_device(settings.device)
    model = systems.open_stage(settings, systems.weights_dtype(settings, device), device).eval()
    choose_kernel(model, settings.kernel, device)
    return model


def learn(
    model: PaliGemma,
    processor: Processor,
    records: Sequence[Record],
    settings: Settings,
    factors: Mapping[str, float],
    folder: Path,
) -> float:
    """Train a stage in place, from the newest checkpoint in folder/stages if there is one. Returns seconds.

    factors: by pattern of parameter names, of the rate in `settings`.
    """
    run = folder / "stages" / f"{settings.stage}"
    run.mkdir(parents=True, exist_ok=True)
    model.set_checkpointing(settings.checkpointing)
    optimizer = systems.make_optimizer(model, systems.rules_of(model, settings, factors), settings)
    world = World(0, 1, choose_device(settings.device))
    order = make_order(records, processor, settings, world)
    progress = train_on(order, model, optimizer, settings, run, world)
    model.eval()
    return progress.seconds
