"""How a cell of a system with stages is trained: its options, and a stage.

In: flags. Out: the settings of both stages, and a model that has learned one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eval.data.records import Record
from train.flags import flag, from_values
from train.model import make_optimizer, rules_of
from train.settings import Settings
from train.studies.training import TuningOptions, read_given, train_cell
from train.systems.stages import IDLE, StageSettings, stage_defaults


@dataclass(frozen=True)
class StagedOptions(TuningOptions, StageSettings):
    """The flags of these studies; those of a stage hold for both."""

    limit: int = flag(400, "questions of each measure", least=1)
    stage_1_data: str | None = flag(
        None, "data of stage 1 (default: that of --data)", metavar="SOURCE"
    )

    @property
    def first_rates(self) -> tuple[float, ...]:
        """To try first, as factors of --lr."""
        rates = (0.5, 1.0, 2.0) if self.is_embedded else (1.0,)
        return self.rates or rates


def read_stages(
    kind: type[StagedOptions],
    argv: Sequence[str] | None,
    doc: str | None,
    quick: Mapping,
) -> list:
    """The settings of both stages, of a kind of StagedOptions. Raises UserError."""
    given = read_given(kind, argv, f"train.reproduce {kind.NAME}", doc, quick, IDLE)
    stages = []
    for stage in (1, 2):
        defaults = stage_defaults(kind, stage, given) | {"stage": stage}
        stages.append(from_values(kind, defaults | given))
    first, second = stages
    if first.stage_1_data:
        first = replace(first, data=(first.stage_1_data,))
    return [first, replace(second, option=())]  # stage 1 decides the parts


def train_stage(
    model,
    processor,
    records: Sequence[Record],
    settings: Settings,
    factors: Mapping,
    folder: Path,
) -> float:
    """Train a stage in place, from the newest checkpoint in folder/stages if there is one. Returns
    seconds.

    factors: by pattern of parameter names, of the rate in `settings`.
    """
    run = folder / "stages" / f"{settings.stage}"
    run.mkdir(parents=True, exist_ok=True)
    model.set_checkpointing(settings.checkpointing)
    optimizer = make_optimizer(model, rules_of(model, settings, factors), settings)
    return train_cell(model, optimizer, processor, records, settings, run)
