"""Rows and cells of the studies that fine-tune a base: what is trained, how, and its scores on fixed measures.

In: plain settings of the base, the changes of a row, a rate and a seed. Out: a cell, the JSON result of one run on the
measures of one split. Its folder is named by a hash of the settings that decide the result, the weights of the base,
the data and the version. So an interrupted study goes on, and a change computes only the affected cells again.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from lora import adapter
from model.common import UserError, write_text
from model.paligemma import PaliGemma
from model.processor import Processor
from train.distributed import World, join_world
from train.loop import Diverged
from train.optim import count, trainable
from train.origin import FREE
from train.settings import Settings
from train.studies import engine
from train.studies.attention_data import Measure, training_records
from train.studies.engine import cell_folder, digest
from train.supervised import train_on
from train.systems.open import load_base, open_model, open_processor

VERSION = 2  # of the code that decides a cell's result: raise it to compute all cells again

PLAIN = {"attention": "softmax", "feed_forward": "mlp", "option": ()}


@dataclass(frozen=True)
class FineTuningStudy:
    """What all cells share. base: the plain settings. measures: by split, such as validation and test, VQA first."""

    base: Settings
    out: Path
    world: World
    processor: Processor
    fingerprint: str
    measures: dict[str, list[Measure]]
    protocol: str = "paper"


def open_study(base: Settings, out: Path, measures: dict[str, list[Measure]], protocol: str) -> FineTuningStudy:
    """A study of the base that `base` names. Raises UserError under torchrun."""
    world = join_world(base.device)
    if world.size > 1:
        raise UserError("a study runs in one process: start it without torchrun")
    model = load_base(base, world.device)
    processor = open_processor(base, model)[0]
    return FineTuningStudy(base, out, world, processor, adapter.fingerprint(model), measures, protocol)


def open_base(settings: Settings, folder: Path, study: FineTuningStudy) -> PaliGemma:
    """The base, untrained."""
    return load_base(settings, study.world.device).requires_grad_(False)


def fine_tune(settings: Settings, folder: Path, study: FineTuningStudy) -> PaliGemma:
    """The base with the adapter in `folder`, which is trained if it is absent."""
    if (folder / adapter.CONFIG_FILE).exists():
        model = load_base(settings, study.world.device)
        adapter.load(model, folder)
        return model
    model, optimizer = open_model(settings, study.world.device)
    records, _ = training_records(settings, study.base.seed)
    train_on(records, model, optimizer, study.processor, settings, folder, study.world)
    adapter.save(model, folder, settings.base, settings.question_prompt)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return model


@dataclass(frozen=True)
class FineTuningRow:
    """One line of the tables: changes of the base settings, and how its model is made.

    run: trains or opens the model of a cell in the cell's folder. published: the paper's VQAv2 score.
    """

    name: str
    changes: dict = field(default_factory=dict)
    run: Callable[[Settings, Path, FineTuningStudy], PaliGemma] = fine_tune
    published: float | None = None

    @property
    def is_trained(self) -> bool:
        return self.run is not open_base

    def needs_control(self, settings: Settings) -> bool:
        """Whether it is anything but plain LoRA."""
        plain = replace(settings, **PLAIN) == settings
        return self.is_trained and not (plain and self.run is fine_tune)


def cell_settings(study: FineTuningStudy, row: FineTuningRow, rate: float, seed: int) -> Settings:
    return replace(study.base, **(row.changes | {"lr": rate, "seed": seed}))


def run_cell(study: FineTuningStudy, row: FineTuningRow, rate: float, seed: int, split: str) -> dict:
    """{"scores": of each example by measure, "trainable", "diverged", "cpu_seconds", "file"}, on one split.

    A run whose loss is no longer finite scores 0, and "diverged" says where it happened.
    """
    settings = cell_settings(study, row, rate, seed)
    trained_on = training_records(settings, study.base.seed)[1] if row.is_trained else ""
    decide = {name: value for name, value in asdict(settings).items() if name not in FREE}
    folder = cell_folder(study.out, VERSION, study.fingerprint, row.run.__qualname__, trained_on, decide)
    measures = study.measures[split]
    file = folder / f"{split}-{digest([(measure.name, measure.examples) for measure in measures])}.json"

    def work(folder: Path) -> dict:
        write_text(folder / "config.json", json.dumps(asdict(settings), indent=1) + "\n")
        result = {
            "scores": {measure.name: [0.0] * len(measure.examples) for measure in measures},
            "trainable": None,
            "diverged": None,
            "file": str(file.relative_to(study.out)),
        }
        try:
            model = row.run(settings, folder, study).eval()
            result["trainable"] = count(trainable(model).values())
            result["scores"] = {measure.name: measure.grade(model, study.processor, settings) for measure in measures}
        except Diverged as error:
            result["diverged"] = str(error)
        return result

    def spell_result(result: dict) -> str:
        accuracies = ", ".join(f"{name} {100 * np.mean(scores):.1f} %" for name, scores in result["scores"].items())
        return f"{split} {accuracies} ({result['cpu_seconds']:.0f} CPU seconds)"

    title = f"{row.name}, rate {rate:g}, seed {seed}" if row.is_trained else row.name
    return engine.finish_cell(file, title, work, spell_result)
