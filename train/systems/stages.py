"""Models that are trained in stages, each of which lets other parts learn, at rates of their own.

In: the settings of a run with `--arch` and `--stage`. Out: the model of that stage, and the rules for its optimizer.
A new system is an entry of ARCHITECTURES. Next: `train/finetune.py` trains it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from model.common import UserError
from model.paligemma import PaliGemma
from model.wings import Wings, attach, route
from train.optim import Rule
from train.systems import qmamba
from weights.export import companions
from weights.load import load_model

if TYPE_CHECKING:
    from train.settings import Settings


@dataclass(frozen=True)
class Stage:
    """What learns in a stage: patterns of whole parameter names, and each one's factor of `--lr`.

    defaults: of the settings, for this stage; what the command line gives goes before. embedded: those that the
    embedded scenes take instead, where parts a thousand times smaller learn from a hundred times fewer pictures.
    """

    rates: Mapping[str, float]
    defaults: Mapping[str, object] = field(default_factory=dict)
    embedded: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Architecture:
    """`open(settings, dtype, device)` makes the model of a stage: the first from a plain base, a later one from the
    model that the stage before has written. `stages` count from 1. `tokenizer` finds the tokenizer's file."""

    open: Callable[["Settings", torch.dtype, torch.device], PaliGemma]
    stages: Mapping[int, Stage]
    tokenizer: Callable[["Settings"], Path] = lambda settings: find_tokenizer(settings.base)


def open_wings(settings: "Settings", dtype: torch.dtype, device: torch.device) -> Wings:
    """Stage 1: a base with visual learners. Stage 2: what stage 1 made of it, with textual ones and routers."""
    base = load_model(settings.base, dtype=dtype, device=device)
    if settings.stage == 1:
        return attach(base, settings.r, seed=settings.seed)
    if type(base) is not Wings or base.config.routed:
        raise UserError(
            f"--stage 2: {settings.base} is no model of stage 1: train one with --wings --stage 1, and give --base "
            "RUN/model"
        )
    return route(base, settings.seed)


# WINGS: the rates and decays of the paper's two stages, each of one epoch. It gives a range for the first rate.
_WINGS = {"r": 64, "epochs": 1, "schedule": "cosine", "warmup": 0.03, "clip": 1.0, "batch_size": 16, "beta2": 0.999}
# Q-Mamba: the paper's rates and batches, one epoch a stage; weights in fp32, products in bf16 on a GPU
_QMAMBA = {
    "optimizer": "radam",
    "epochs": 1,
    "schedule": "cosine",
    "warmup": 0.03,
    "clip": 1.0,
    "batch_size": 16,
    "beta2": 0.999,
    "weight_decay": 0.0,
    "dtype": "fp32",
}
_TINY = {"batch_size": 32, "accumulate": 1, "tasks": "vqa,locate,count,exist"}
ARCHITECTURES: dict[str, Architecture] = {
    "wings": Architecture(
        open_wings,
        {
            1: Stage(
                {r"multi_modal_projector\..*|.*\.visual\..*": 1.0},
                _WINGS | {"lr": 2e-4, "weight_decay": 1e-9, "accumulate": 16},
                {"batch_size": 32, "accumulate": 1, "r": 16, "lr": 3e-3, "samples": 3200},
            ),
            2: Stage(
                {r"multi_modal_projector\..*": 5.0, r"language_model\..*": 1.0},
                _WINGS | {"lr": 2e-6, "weight_decay": 1e-8, "accumulate": 4},
                {"batch_size": 32, "accumulate": 1, "lr": 5e-4, "samples": 9600},
            ),
        },
    ),
    "qmamba": Architecture(
        qmamba.open_qmamba,
        {
            1: Stage(
                {r"multi_modal_projector\..*": 1.0},
                _QMAMBA | {"lr": 1e-4, "accumulate": 16},
                _TINY | {"lr": 1e-2, "samples": 2000},
            ),
            2: Stage(
                {r"multi_modal_projector\..*|language_model\..*": 1.0},
                _QMAMBA | {"lr": 2e-5, "accumulate": 8},
                _TINY | {"lr": 6e-3, "samples": 10000},
            ),
        },
        lambda settings: find_tokenizer(qmamba.language_model(settings)),
    ),
}


def find_tokenizer(source: str) -> Path:
    """The file of the tokenizer that belongs to a model."""
    names = ("tokenizer.model", "tokenizer.json")
    found = {file.name: file for file in companions(source)}
    if not found.keys() & set(names):
        raise UserError(f"{source}: has no {' or '.join(names)}: copy it from the model that this one was made from")
    return next(found[name] for name in names if name in found)


def stage_tokenizer(settings: "Settings") -> Path:
    """The file of the tokenizer of a stage's model."""
    return ARCHITECTURES[settings.arch].tokenizer(settings)


def stage_defaults(arch: str | None, stage: int | None, data: str) -> Mapping[str, object]:
    """The settings that a stage starts from on `data`; none without one, or for one that is not there."""
    stages = ARCHITECTURES[arch].stages if arch in ARCHITECTURES else {}
    if stage not in stages:
        return {}
    return stages[stage].defaults | (stages[stage].embedded if data == "embedded" else {})


def open_stage(settings: "Settings", dtype: torch.dtype, device: torch.device) -> tuple[PaliGemma, list[Rule]]:
    """The model of a stage, and what of it learns. Raises UserError for a stage that its system does not have."""
    architecture = ARCHITECTURES[settings.arch]
    if settings.stage not in architecture.stages:
        raise UserError(f"--stage {settings.stage}: {settings.arch} has {', '.join(map(str, architecture.stages))}")
    model = architecture.open(settings, dtype, device)
    rates = architecture.stages[settings.stage].rates
    return model, [Rule(name, settings.lr * factor, settings.weight_decay) for name, factor in rates.items()]
