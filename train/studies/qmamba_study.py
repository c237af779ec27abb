"""What all cells of the Q-Mamba study share: its flags, the settings of both stages, rows and measures.

In: the flags of `train.compare --rows qmamba`. Out: `QMambaStudy`, of which `train/studies/qmamba.py` makes cells.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from model.source import EMBEDDED
from train.distributed import World
from train.flags import flag
from train.settings import Settings
from train.studies import engine, rules
from train.studies.attention_data import Measure, vqa_measure
from train.studies.engine import QuickOptions, ScaledOptions, ScaledStudy, read_rates
from train.studies.qmamba_scenes import embedded_measures
from train.studies.qmamba_tables import PAPER, SCENES, ProjectorRow, Table
from train.systems.qmamba import UNUSED, read_options
from weights.load import load_siglip

STAGES = (1, 2)


@dataclass(frozen=True)
class QMambaOptions(QuickOptions, ScaledOptions):
    """The flags of this study, besides those of `train.finetune`."""

    seeds: int | None = flag(
        None,
        f"runs of a row, at least (default: {rules.LEAST_SEEDS}; 3 with --quick, or if data or models are given)",
        least=1,
        metavar="N",
    )
    most_seeds: int | None = flag(
        None,
        "of the rows of a table whose differences are not yet known to ±3 points (default: "
        f"{rules.MOST_SEEDS} of the embedded scenes, else --seeds)",
        least=1,
        metavar="N",
    )
    factors: tuple[float, ...] | None = flag(
        None,
        "of the recipe's rates, to try first for each row of the embedded scenes (default: 0.5,1,2; 1 with --quick)",
        type=read_rates,
        metavar="A,B,…",
    )
    limit: int | None = flag(
        None, "questions of each task (default: 400 of the embedded scenes, else all that are held out)", least=1
    )
    tables: str = flag("1,2,3,4", "tables of the paper, comma-separated", metavar="N,…")
    stage_1_data: str | None = flag(None, "data of stage 1 (default: that of --data)", metavar="SOURCE")
    out: Path = flag(Path("runs/compare-qmamba"), engine.OUT_HELP, metavar="DIR")


@dataclass(frozen=True)
class QMambaStudy(ScaledStudy):
    """What all cells share. limit: questions of a measure. stages: the settings of each stage, of the first seed.
    factors: of their rates, by row. split: of the embedded questions."""

    stages: dict[int, Settings]
    tables: dict[str, Table]
    world: World
    factors: Mapping[str, float] = field(default_factory=dict)
    split: str = "test"

    @property
    def is_embedded(self) -> bool:
        """Whether models and data are the embedded ones, whose pictures are encoded once."""
        return self.stages[1].base == EMBEDDED and all(settings.is_embedded for settings in self.stages.values())

    @property
    def all_rows(self) -> dict[str, ProjectorRow]:
        return SCENES if self.is_embedded else PAPER

    @property
    def names(self) -> list[str]:
        """The rows to train: those of the tables, and those whose connectors they start from, first."""
        asked = {name.split(", ")[0] for table in self.tables.values() for name in table.rows}
        donors = {row.connector for name, row in self.all_rows.items() if name in asked and self.trains_donor(row)}
        return [name for name in self.all_rows if name in asked | donors]

    def trains_donor(self, row: ProjectorRow) -> bool:
        """Whether the row starts from the connector of another one."""
        return row.connector is not None and "connector_from" not in self.stages[1].options

    @property
    def measures(self) -> list[Measure]:
        if self.is_embedded:
            return embedded_measures(self.limit, self.split)
        return [benchmark(self.stages[2], self.limit)]

    def settings(self, stage: int, seed: int, name: str = "") -> Settings:
        """Those of `python -m train.finetune --arch qmamba`, but for the rate of row `name` and the number of embedded
        samples."""
        own = replace(self.stages[stage], seed=seed)
        if not self.is_embedded:
            return own
        own = replace(own, samples=self.scaled(own.samples, 32), lr=own.lr * self.factor(name))
        return replace(own, checkpoint_every=10**9, measure_every=0)

    def factor(self, name: str | None) -> float:
        return self.factors.get(name or "", 1.0)

    def first_settings(self, row: ProjectorRow, seed: int, donor: str | None = None) -> Settings:
        """Those of stage 1 with the options of a row. donor: the model whose connector it starts from."""
        own = self.settings(1, seed)
        options = own.options | row.changes
        if row.connector is None:
            options.pop("connector_from", None)
        elif donor is not None:
            options["connector_from"] = donor
        for name in UNUSED.get(options.get("projector"), ()):
            options.pop(name, None)
        if options.get("queries") in QUERIES:
            options["queries"] = QUERIES[options["queries"]](own)
        return replace(own, option=tuple(f"{name}={json.dumps(value)}" for name, value in options.items()))


# numbers of queries that a row names
QUERIES: dict[object, Callable[[Settings], int]] = {
    "all": lambda settings: load_siglip(settings.base, device="meta").config.num_image_tokens,
    "half": lambda settings: max(1, read_options(settings)[1].queries // 2),
}


@lru_cache(maxsize=1)
def benchmark(settings: Settings, limit: int | None) -> Measure:
    """The questions held out of the data of stage 2."""
    return vqa_measure(settings, "test", limit)
