"""How a cell is trained and asked.

A cell that was interrupted after its training reads the last checkpoint, and is asked.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from eval.answer import ask_all
from eval.data.records import Record
from lora import adapter
from model.common import UserError
from model.device import choose_device
from model.differential import graft, variants_of
from model.paligemma import PaliGemma
from model.processor import Processor
from train.data.batches import Order
from train.distributed import World
from train.flags import flag, flag_name, given_flags
from train.loop import Diverged, LoopSettings
from train.model import open_model, open_processor, train_on
from train.optim import parameter_count, rate_factor, set_rates, trainable
from train.run import FREE, data_fingerprints
from train.settings import Settings
from train.studies.built import without_second_map
from train.studies.cells import digest
from train.studies.engine import StudyOptions
from train.studies.measures import Task, training_records
from weights.fingerprint import exact_fingerprint

# by every study; nothing is validated while its cells are trained
DECIDED = (
    "stage recipe full align seed threads evaluate eval_limit eval_data eval_every patience keep_best"
).split()
Tasks = Mapping[str, Mapping[str, Task]]  # by split and name


@dataclass(frozen=True)
class TuningOptions(StudyOptions, Settings):
    """The flags of a study that fine-tunes: the settings that all its rows start from."""

    def __post_init__(self):
        self.check()


@dataclass(frozen=True)
class NeedleOptions(TuningOptions):
    """Those of a study that also looks for needles."""

    coco: str | None = flag(
        None, "with --data on disk: folder of COCO val2014, for needle tests (default: none)"
    )
    captions: str | None = flag(
        None, "with --coco: MMNeedle's or COCO's caption file (default: none)"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.coco and self.is_embedded:
            remedy = "the embedded scenes have needle tests of their own"
            raise UserError(f"--coco goes with --data on disk: {remedy}")


def read_given(
    kind: type,
    argv: Sequence[str] | None,
    program: str,
    doc: str | None,
    quick: Mapping,
    decided: Collection[str] = (),
    defaults: Mapping = {},
) -> dict:
    """The flags on the command line, and the study's `defaults`, with --quick the values of
    `quick`, where they have none. Raises UserError for a setting that the study decides: one of
    DECIDED or `decided`."""
    hidden = {*DECIDED, *decided}
    given = given_flags(
        [kind],
        program,
        doc,
        argv,
        recipes={"here": defaults},
        hidden=hidden,
        allow_abbrev=False,
    )
    if refused := given.keys() & hidden:
        raise UserError(f"{flag_name(min(refused))}: the study decides that itself: leave it out")
    quick = quick if given.get("quick") else {}
    return {**defaults, **quick, **given}


def deciding(settings: LoopSettings, kind: type[LoopSettings] = Settings) -> dict:
    """The settings of `kind` that change what is learned."""
    names = [field.name for field in fields(kind) if field.name not in FREE]
    device = choose_device(settings.device).type  # which decides what dtypes "auto" stands for
    return {name: getattr(settings, name) for name in names} | {"device": device}


def train_and_ask(settings: Settings, tasks: Tasks, folder: Path) -> dict:
    """Train the adapter of a cell in its folder, and ask it."""
    model, optimizer = open_model(settings, choose_device(settings.device))
    processor, _ = open_processor(settings, model)
    records = training_records(settings)
    seconds = train_cell(model, optimizer, processor, records, settings, folder)
    adapter.save(model, folder, settings.base, settings.question_prompt)
    scores = ask_tasks(model, processor, settings, tasks, folder)
    return {"scores": scores, "facts": facts_of(model, seconds=seconds)}


def facts_of(model: Any, **more) -> dict:
    """What a report says of a trained model beside its scores."""
    return {"parameters": parameter_count(trainable(model).values()), **more}


def option_of(options: Mapping) -> tuple[str, ...]:
    """Options by name as --option takes them."""
    return tuple(f"{name}={json.dumps(value)}" for name, value in options.items())


def open_row(
    model: Any,
    settings: Settings,
    kind: str,
    one_map: bool = False,
    **options,
) -> tuple[Any, Optimizer]:
    """The model with the graft of a row and LoRA, changed in place, and its optimizer. one_map: λ
    is 0. options: of the variant."""
    if one_map:
        graft(model, kind, seed=settings.seed)
        for variant in variants_of(model).values():
            without_second_map(variant)
        kind = "softmax"  # no other graft
    settings = replace(settings, attention=kind, option=option_of(options))
    return open_model(settings, choose_device(settings.device), model)


def descend(
    model: Any,
    optimizer: Optimizer,
    losses: Iterable[torch.Tensor],
    steps: int,
    schedule: str = "cosine",
    warmup: float = 0.1,
) -> None:
    """A step down each of the losses, which are computed one by one. schedule, warmup: of
    `rate_factor`. Raises Diverged."""
    learned = trainable(model).values()
    for step, loss in enumerate(losses):
        if not loss.isfinite():
            raise Diverged(f"step {step}: the loss is {loss}")
        set_rates(optimizer, rate_factor(step, steps, warmup, schedule))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def train_cell(
    model, optimizer, processor, records: Sequence[Record], settings: Settings, folder: Path
) -> float:
    """Train in place, from the newest checkpoint in `folder` if there is one. Returns seconds."""
    world = World(0, 1, choose_device(settings.device))
    order = Order(records, processor, settings, world)
    return train_on(order, model, optimizer, settings, folder, world).seconds


def ask_tasks(
    model: PaliGemma, processor: Processor, settings: Settings, tasks: Tasks, folder: Path
) -> dict[str, dict]:
    """The score of each example, by split and task. On disk, where it may take hours, with a
    progress bar and a log. Raises UserError for a question that cannot be asked, such as one whose
    picture cannot be read."""
    scores = {split: {} for split in tasks}
    for split, of_split in tasks.items():
        for name, task in of_split.items():
            options = {}
            if not settings.is_embedded:
                log = folder / f"{split}-{name}.jsonl"
                options = {"progress": f"{task.title}, {split}", "log": log}
            answers = ask_all(model.eval(), processor, task.asks, **options)
            scores[split][name] = task.score(answers)
    return scores


def key_of(stages: Sequence[Settings], start: PaliGemma, tasks: Tasks) -> str:
    """What decides all cells beside their source: settings, data, questions, and the weights and
    configuration of the start."""
    decided = [deciding(settings) for settings in stages]
    data = [data_fingerprints(training_records(settings)) for settings in stages]
    questions = []
    for split, of_split in tasks.items():
        for name, task in of_split.items():
            for q in task.asks:
                questions.append((split, name, q.id, q.prefix, q.choices, q.before, q.truth))
    return digest(decided, exact_fingerprint(start), start.config, data, questions)
