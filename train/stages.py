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
from train.optim import Rule
from weights.export import companions

if TYPE_CHECKING:
    from train.settings import Settings


@dataclass(frozen=True)
class Stage:
    """What learns in a stage: patterns of whole parameter names, and each one's factor of `--lr`.

    defaults: of the settings, for this stage; what the command line gives goes before.
    """

    rates: Mapping[str, float]
    defaults: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Architecture:
    """`open(settings, dtype, device)` makes the model of a stage: the first from a plain base, a later one from the
    model that the stage before has written. `stages` count from 1. `tokenizer` finds the tokenizer's file."""

    open: Callable[["Settings", torch.dtype, torch.device], PaliGemma]
    stages: Mapping[int, Stage]
    tokenizer: Callable[["Settings"], Path] = lambda settings: find_tokenizer(settings.base)


ARCHITECTURES: dict[str, Architecture] = {}


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


def stage_defaults(arch: str | None, stage: int | None) -> Mapping[str, object]:
    """The settings that a stage starts from; none without one, or for one that is not there."""
    stages = ARCHITECTURES[arch].stages if arch in ARCHITECTURES else {}
    return stages[stage].defaults if stage in stages else {}


def open_stage(
    settings: "Settings", dtype: torch.dtype, device: torch.device
) -> tuple[PaliGemma, list[Rule]]:
    """The model of a stage, and what of it learns. Raises UserError for a stage that its system does not have."""
    architecture = ARCHITECTURES[settings.arch]
    if settings.stage not in architecture.stages:
        raise UserError(f"--stage {settings.stage}: {settings.arch} has {', '.join(map(str, architecture.stages))}")
    model = architecture.open(settings, dtype, device)
    rates = architecture.stages[settings.stage].rates
    return model, [Rule(name, settings.lr * factor, settings.weight_decay) for name, factor in rates.items()]
