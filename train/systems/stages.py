"""A run of one stage of a system that is trained in stages: WINGS, Q-Mamba.

In: flags, those of `train.finetune` and the number of the stage. Out: a run folder with a whole
model; a later stage starts from that of the one before, --base RUN/model. A system is a subclass of
`StageSettings` with its `STAGES`, how it opens its model, and where its tokenizer is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from model.common import UserError, shown
from model.paligemma import PaliGemma
from model.processor import Processor, processor_for
from model.tokenizer import find_tokenizer, load_tokenizer
from train.flags import flag, flag_name
from train.model import learning_rules, load_start, open_processor, rules_of, weights_dtype
from train.optim import Rule
from train.settings import EMBEDDED_DATA, GROUPS, Arguments, Settings, parse, recipe_values

# what stages do not read: of grafts, of LoRA's own form, and of another way of training
IDLE = set(
    "attention feed_forward diff_in targets alpha dropout full align new_tower quantize scalar_lr".split()
)
ONE_EPOCH = {
    "epochs": 1,
    "schedule": "cosine",
    "warmup": 0.03,
    "clip": 1.0,
    "batch_size": 16,
    "beta2": 0.999,
}


class StageRecipe(NamedTuple):
    """What a stage trains: patterns of whole parameter names, and for each the factor of `--lr`."""

    rates: Mapping[str, float]
    # settings of this stage; flags of the command line override them
    defaults: Mapping[str, object] = {}
    # overrides for the embedded data, where the parts are a thousand times smaller and there are a
    # hundred times fewer pictures
    embedded: Mapping[str, object] = {}


@dataclass(frozen=True)
class StageSettings(Settings):
    """The settings of a run of one stage."""

    NAME: ClassVar[str] = ""
    STAGES: ClassVar[Mapping[int, StageRecipe]] = {}

    stage: int = flag(1, "its stage; 2 starts from the model of stage 1, --base RUN/model")

    is_grafted = False
    writes_model = True

    @property
    def program(self) -> str:
        return f"train.systems.{self.NAME}"

    @property
    def command(self) -> list[str]:
        return [*super().command, "--stage", str(self.stage)]

    @property
    def stem(self) -> str:
        return f"{self.NAME}-stage{self.stage}"

    @property
    def subject(self) -> str:
        return f"{self.NAME}, stage {self.stage}"

    def options_of(self, known: Mapping[str, object]) -> dict[str, object]:
        """`options`. Raises UserError for a name that is not `known`, or a value of another type
        than the known one."""
        for name, value in self.options.items():
            if name not in known or type(value) is not type(known[name]):
                raise UserError(
                    f"--option {name}={value}: expected one of {shown(dict(known), 400)}, of its "
                    "type"
                )
        return self.options

    def open_stage(self, dtype: torch.dtype, device: torch.device) -> Any:
        """The model of the stage, the first from a plain base, a later one from that of the stage
        before. Raises UserError."""
        raise NotImplementedError

    def tokenizer_source(self) -> str:
        """The source of its tokenizer."""
        raise NotImplementedError

    def check(self) -> None:
        if self.stage not in self.STAGES:
            stages = " or ".join(map(str, self.STAGES))
            raise UserError(f"--stage {self.stage}: expected {stages}")
        super().check()


def stage_defaults(kind: type[StageSettings], stage: int, given: Mapping) -> dict[str, object]:
    """The settings of a stage, on the embedded data or on those of the `given` flags; empty where
    there is no such stage."""
    recipe = kind.STAGES.get(stage, StageRecipe({}))
    is_embedded = tuple(given.get("data", EMBEDDED_DATA)) == EMBEDDED_DATA
    return {**recipe.defaults, **(recipe.embedded if is_embedded else {})}


@load_start.register
def _(settings: StageSettings, device: torch.device) -> PaliGemma:
    if settings.option and settings.stage != 1:
        raise UserError(f"--option {settings.option[0]}: stage 1 has decided that: leave it out")
    return settings.open_stage(weights_dtype(settings, device), device)


@learning_rules.register
def _(settings: StageSettings, model: PaliGemma) -> list[Rule]:
    return rules_of(model, settings, settings.STAGES[settings.stage].rates)


@open_processor.register
def _(settings: StageSettings, model: PaliGemma) -> tuple[Processor, list[Path]]:
    file = find_tokenizer(settings.tokenizer_source())
    processor = processor_for(model.config, load_tokenizer(file), max_length=settings.max_length)
    return processor, [*file.parent.glob("tokenizer.[jm]*")]


def parse_stage(
    kind: type[StageSettings],
    argv: Sequence[str] | Mapping | None,
    doc: str | None = None,
) -> tuple[StageSettings, Arguments]:
    """The settings and the run folder of the flags of a system, in words or by name."""

    def defaults(given: dict) -> dict:
        if idle := sorted(given.keys() & IDLE):
            raise UserError(f"{flag_name(idle[0])}: a stage does not read it: leave it out")
        of_stage = stage_defaults(kind, given.get("stage", 1), given)
        values = of_stage | recipe_values(given.get("recipe", ""), given)
        return {name: value for name, value in values.items() if name not in IDLE}

    groups = {**GROUPS, "model": f"stage {GROUPS['model']}"}
    recipes = {}
    for stage, of_stage in kind.STAGES.items():
        recipes[f"stage {stage}"] = of_stage.defaults
        recipes[f"stage {stage}, embedded"] = of_stage.embedded
    return parse(
        argv,
        doc,
        kind,
        f"train.systems.{kind.NAME}",
        defaults,
        groups=groups,
        recipes=recipes,
        hidden=IDLE,
    )
