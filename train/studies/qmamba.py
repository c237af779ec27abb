"""Study: which choices of the Q-Mamba projector matter?

    python -m train.compare --rows qmamba [--quick]                in miniature, on the embedded models and scenes
    python -m train.reproduce qmamba --base google/siglip-so400m-patch14-384 --option language_model=MAMBA \\
        --stage-1-data jsonl:FILE --data jsonl:FILE --tables 2,3,4     as published; with --plan: what it takes

In: a vision tower, a Mamba and data, from which every row starts. Out: comparison.md, comparison.json, rows.png and
differences.png in --out: the paper's Table 2 (local or global attention), Table 3 (the connector's weights), Table 4
(the scan order), and of Table 1 the number of queries and projectors without any. Every other flag is one of
`train.finetune` and holds for both stages of all rows. `train/studies/qmamba_tables.py` has the rows.

Every row is trained in the two stages of `train/recipes.py`: its projector alone, then language model and projector.
All rows of a seed are trained on the same pictures in the same order, and answer the same questions. A difference is
that to the row it is compared with, example by example. Each model is in cells/…/model, for other benchmarks. On the
embedded scenes the tower encodes every picture once for all rows, and there is a transformer as well: it is first
trained on scenes in words until it knows what the embedded Mamba does (`train/studies/qmamba_language.py`). `--quick`
makes Table 2 and the first part of Table 1 there, of three seeds and half as long training. Range, seeds and verdicts
are those of `train/studies/rules.py`; the rates are the same for all rows.

The trained connector of Table 3 is that of row `connector`, which has no queries: connector and linear projector
before Mamba, as in VL-Mamba, of the same seed; --option connector_from=MODEL takes another. Table 4 takes models that
were trained in both directions and scans in one direction alone, as the paper does; nothing is trained for it.
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from eval.statistics import Estimate
from model.common import UserError, shown
from model.mamba import choose_kernel
from model.paligemma import PaliGemma, initialize
from model.processor import Processor
from model.qmamba import QMamba, set_scan_order
from model.source import EMBEDDED
from train.distributed import World, join_world
from train.flags import RunArguments, flag
from train.loop import LoopOptions, fit
from train.optim import count
from train.plan import plan, plan_table
from train.settings import Settings
from train.studies import attention_runs, engine, rules
from train.studies.attention_data import Measure, training_records, vqa_measure
from train.studies.attention_runs import OVERALL, Scores, gain
from train.studies.cells import read_flags_of_both
from train.studies.encoded import encoded_loss
from train.studies.engine import QuickOptions, ScaledOptions, ScaledStudy, deciding, describe_runs
from train.studies.qmamba_language import run_language, run_mamba
from train.studies.qmamba_scenes import embedded_measures, encoded_samples, shuffled, vision_tower
from train.studies.qmamba_tables import (
    CONTROL,
    ORDERS,
    PAPER,
    PAPER_TABLES,
    PREDICTIONS,
    QUICK_SCALE,
    QUICK_TABLES,
    SCENE_TABLES,
    SCENES,
    ProjectorRow,
    Table,
    draw,
    to_markdown,
)
from train.supervised import train_on
from train.systems.open import make_optimizer, open_processor, open_stage, stage_rules
from train.systems.qmamba import UNUSED, language_model, read_options
from weights.export import export_model
from weights.fingerprint import exact_fingerprint
from weights.load import load_mamba, load_siglip

VERSION = 3  # of the code that decides a cell's result: raise it to compute all cells again

STAGES = (1, 2)
DECIDED = (*"arch stage wings recipe full seed resume evaluate eval_limit show_batch cache_features".split(),)


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
    limit: int | None = flag(
        None, "questions of each task (default: 400 of the embedded scenes, else all that are held out)", least=1
    )
    tables: str = flag("1,2,3,4", "tables of the paper, comma-separated", metavar="N,…")
    stage_1_data: str | None = flag(None, "data of stage 1 (default: that of --data)", metavar="SOURCE")
    out: Path = flag(Path("runs/compare-qmamba"), engine.OUT_HELP, metavar="DIR")


@dataclass(frozen=True)
class QMambaStudy(ScaledStudy):
    """What all cells share. limit: questions of a measure. stages: the settings of each stage, of the first seed."""

    stages: dict[int, Settings]
    tables: dict[str, Table]
    world: World

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
            return embedded_measures(self.limit)
        return [benchmark(self.stages[2], self.limit)]

    def settings(self, stage: int, seed: int) -> Settings:
        """Those of `python -m train.finetune --arch qmamba`, but for the number of embedded samples."""
        own = replace(self.stages[stage], seed=seed)
        if not self.is_embedded:
            return own
        return replace(own, samples=self.scaled(own.samples, 32), checkpoint_every=10**9, measure_every=0)

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


def make_qmamba(study: QMambaStudy, row: ProjectorRow, seed: int) -> QMamba:
    """A fresh projector between the vision tower and the language model."""
    donor = run_row(study, row.connector, seed)["file"] if row.connector and study.trains_donor(row) else None
    settings = study.first_settings(row, seed, donor and str(study.out / donor))
    model = open_stage(settings, torch.float32, study.world.device)
    if study.is_embedded:
        model.vision_tower = vision_tower()
    model.set_checkpointing(settings.checkpointing)
    choose_kernel(model, settings.kernel, study.world.device)
    return model


def make_transformer(study: QMambaStudy, seed: int) -> PaliGemma:
    """A fresh linear projector between the embedded vision tower and a Gemma trained on the scenes in words."""
    model = initialize(PaliGemma(CONTROL), seed)
    model.vision_tower = vision_tower()
    model.language_model.load_state_dict(load_file(study.out / run_language(study)["file"]))
    return model


def run_row(study: QMambaStudy, name: str, seed: int) -> dict:
    """{"scores": by measure, "read": the same by scan order, "trainable", "accuracy", "cpu_seconds", "file"}.

    "file": the folder of the trained model, which the transformer does not have.
    """
    row, stages = study.all_rows[name], {stage: study.settings(stage, seed) for stage in STAGES}

    def work(folder: Path) -> dict:
        model = make_transformer(study, seed) if row.is_transformer else make_qmamba(study, row, seed)
        processor, files = open_processor(study.stages[1], model)
        for stage, settings in stages.items():
            seconds = learn(study, model, processor, settings, folder / f"{stage}")
        model.eval()
        trained = [p for name, p in model.named_parameters() if not name.startswith("vision_tower.")]
        result = {"trainable": count(trained), "seconds_a_step": seconds, "read": {}}
        if not row.is_transformer:
            shutil.rmtree(folder / "model", ignore_errors=True)  # of a study that was killed here
            export_model(model, folder / "model", companions=files)
            result["file"] = str((folder / "model").relative_to(study.out))

        def grade() -> dict[str, list[float]]:
            return {one.name: one.grade(model, processor, stages[2], folder) for one in study.measures}

        result["scores"] = scores = grade()
        for order in ORDERS if row.orders else ():
            set_scan_order(model, order)
            result["read"][order] = grade()
        for stage in STAGES:
            shutil.rmtree(folder / f"{stage}")
        asked = sum(map(len, scores.values()))
        return result | {"accuracy": 100 * sum(map(sum, scores.values())) / asked}

    settings = [deciding(one) for one in stages.values()]
    donor = study.all_rows[row.connector] if row.connector else None
    data = [training_records(one, study.stages[2].seed)[1] for one in stages.values()] if not study.is_embedded else []
    asked = [(one.name, one.examples) for one in study.measures]
    sizes = (CONTROL, run_language(study)["file"]) if row.is_transformer else ()
    parts = ("row", VERSION, study.fingerprint, row, donor, sizes, data, engine.digest(asked), settings)
    return study.finish(f"{name}, seed {seed}", parts, work)[0]


def learn(study: QMambaStudy, model: PaliGemma, processor: Processor, settings: Settings, folder: Path) -> float:
    """Train what the stage of `settings` trains, in place. Returns seconds a step."""
    optimizer = make_optimizer(model, stage_rules(settings), settings)
    folder.mkdir(exist_ok=True)
    if study.is_embedded:
        samples = encoded_samples(settings.samples, settings.seed, settings.stage)
        order = shuffled(samples, processor, settings.batch_size, settings.seed)
        progress = fit(model, optimizer, order, encoded_loss, LoopOptions.of(settings), folder, study.world)
        return progress["seconds"] / order.total
    records = training_records(settings, study.stages[2].seed)[0]
    progress = train_on(records, model, optimizer, processor, settings, folder, study.world)
    steps = len((folder / "metrics.jsonl").read_text().splitlines())
    return progress["seconds"] / max(1, steps)


LANGUAGE = "language"  # as a job: `run_language`


def run_job(study: QMambaStudy, job: tuple[str, int]) -> dict:
    name, seed = job
    return run_language(study) if name == LANGUAGE else run_row(study, name, seed)


def spell_job(job: tuple[str, int], result: dict) -> str:
    return f"{job[0]}, seed {job[1]}: {result['cpu_seconds']:.0f} CPU seconds"


def compute(study: QMambaStudy, wanted: Mapping[str, int], processes: int) -> dict[str, list[dict]]:
    """Cells by seed, of each row and of each row with one scan order; `processes` compute them side by side.

    wanted: seeds of each row.
    """
    rows = {name: study.all_rows[name] for name in wanted}
    late = [name for name, row in rows.items() if row.is_transformer or study.trains_donor(row)]
    jobs = [(name, seed) for seed in range(max(wanted.values())) for name in rows if seed < wanted[name]]
    if processes > 1:
        first = [job for job in jobs if job[0] not in late]
        first += [(LANGUAGE, 0)] if any(row.is_transformer for row in rows.values()) else []
        for some in (first, [job for job in jobs if job[0] in late]):
            engine.side_by_side(partial(run_job, study), some, processes, spell_job)
    cells = {job: run_job(study, job) for job in jobs}
    found = {}
    for name, seeds in wanted.items():
        found[name] = of_row = [cells[name, seed] for seed in range(seeds)]
        for order in of_row[0]["read"]:
            found[f"{name}, {order}"] = [cell | {"scores": cell["read"][order]} for cell in of_row]
    return found


def collect(study: QMambaStudy, seeds: int, most_seeds: int, processes: int = 1) -> dict[str, list[dict]]:
    """`compute` with as many seeds of each row as its tables need, by `rules.enough`."""
    wanted = dict.fromkeys(study.names, seeds)
    while True:
        found = compute(study, wanted, processes)
        scores, more = scores_of(study, found), set()
        for table in study.tables.values():
            gains = table_gains(study, table, scores).values()
            asked = {part for name in table.rows if (part := name.split(", ")[0]) in wanted}
            if not rules.enough([*gains], min(wanted[name] for name in asked), seeds, most_seeds):
                more |= asked | {name for one in asked if (name := study.all_rows[one].connector) in wanted}
        if not more:
            return found
        wanted = {name: min(most_seeds, number + (name in more)) for name, number in wanted.items()}


def scores_of(study: QMambaStudy, found: Mapping[str, Sequence[dict]]) -> dict[str, Scores]:
    """The answers of each row, in percent; "mean" is all of them."""
    by_row = {name: attention_runs.collect(cells) for name, cells in found.items()}
    every = [one.name for one in study.measures]
    return {
        name: {"mean": np.concatenate([scores[task] for task in every], axis=1), **scores}
        for name, scores in by_row.items()
    }


def table_gains(study: QMambaStudy, table: Table, scores: Mapping[str, Scores]) -> dict[tuple[str, str], Estimate]:
    """The differences of a table in the mean of all questions."""
    pairs = [(name, other) for name, other in table.rows.items() if other is not None]
    return {pair: gain(*(scores[name] for name in pair), OVERALL, study.measures) for pair in pairs}


def summarize(study: QMambaStudy, found: dict[str, list[dict]]) -> dict:
    """comparison.json. Accuracies are in percent; "mean" is over all measures."""
    scores, pictures = scores_of(study, found), {one.name: one.pictures for one in study.measures}
    groups = {"mean": sum(pictures.values(), []), **pictures}
    chance = {one.name: one.chance for one in study.measures if one.chance is not None}
    chance |= {"mean": sum(chance.values()) / len(chance)} if chance else {}
    rows = {
        name: {
            "trainable": cells[0]["trainable"],
            "seconds_a_step": cells[0].get("seconds_a_step"),
            "cpu_seconds": round(sum(cell["cpu_seconds"] for cell in cells)),
            "models": [cell["file"] for cell in cells if "file" in cell],
            "test": {measure: describe_runs(runs, groups[measure]) for measure, runs in scores[name].items()},
        }
        for name, cells in found.items()
    }
    differences = {}
    for table in study.tables.values():
        gains = table_gains(study, table, scores)
        inside = {pair: rules.is_inside(scores[pair[1]]["mean"].mean(), chance.get("mean", 0.0)) for pair in gains}
        seeds = {pair: min(len(scores[name]["mean"]) for name in pair) for pair in gains}
        judged = rules.judge(gains, inside, seeds=seeds)
        for pair in gains:
            one, other = (scores[name] for name in pair)
            of_pair = {m: engine.verdict(gain(one, other, m, study.measures)) for m in pictures}
            of_pair["mean"] = engine.verdict(gains[pair]) | judged[pair] | {"seeds": seeds[pair]}
            differences[" - ".join(pair)] = of_pair
    has_transformer = any(study.all_rows[name].is_transformer for name in study.names)
    language = run_language(study) if has_transformer else {}
    verdicts = {pair.split(" - ")[0]: {"mean": of["mean"]["verdict"]} for pair, of in differences.items()}
    return {
        "version": VERSION,
        "title": "Q-Mamba on the embedded scenes" if study.is_embedded else f"Q-Mamba on {study.stages[1].base}",
        "scale": study.scale,
        "seeds": list(range(max(map(len, found.values())))),
        "questions": {one.name: len(one.examples) for one in study.measures},
        "samples": {str(stage): study.settings(stage, 0).samples for stage in STAGES} if study.is_embedded else {},
        "data": {str(stage): " ".join(settings.data) for stage, settings in study.stages.items()},
        "tables": {title: asdict(table) for title, table in study.tables.items()},
        "settings": {str(stage): asdict(study.settings(stage, 0)) for stage in STAGES},
        "chance": chance,
        "rows": rows,
        "differences": differences,
        "predictions": rules.check(PREDICTIONS, verdicts) if study.is_embedded else [],
        "language": {"Mamba": run_mamba(study)["answer_tokens"], "transformer": language["answer_tokens"]}
        | {"scenes": language["scenes"]}
        if has_transformer
        else {},
    }


def read_arguments(argv: Sequence[str] | None) -> tuple[QMambaStudy, QMambaOptions, RunArguments]:
    """The study, its flags, and those of --plan. Raises UserError."""
    stages = {}
    for stage in STAGES:
        defaults = ("--arch", "qmamba", "--stage", str(stage))
        found = read_flags_of_both(QMambaOptions, argv, "train.reproduce qmamba", __doc__, DECIDED, defaults)
        options, stages[stage], given, arguments = found
    if options.stage_1_data:
        stages[1] = replace(stages[1], data=(options.stage_1_data,))
    stages[2] = replace(stages[2], option=())
    if "checkpointing" not in given and not stages[2].is_embedded:
        stages = {stage: replace(settings, checkpointing=True) for stage, settings in stages.items()}
    study = QMambaStudy(options.out, options.scale, options.limit, "", stages, {}, World(0, 1, torch.device("cpu")))
    tables = SCENE_TABLES if study.is_embedded else PAPER_TABLES
    if options.quick:
        study, tables = replace(study, scale=QUICK_SCALE * options.scale), QUICK_TABLES
    is_whole = study.is_embedded and not options.quick
    seeds = options.seeds or (rules.LEAST_SEEDS if is_whole else 3)
    options = replace(options, seeds=seeds, most_seeds=options.most_seeds or max(seeds, is_whole * rules.MOST_SEEDS))
    numbers = options.tables.split(",")
    if unknown := [number for number in numbers if number not in ("1", "2", "3", "4")]:
        raise UserError(f"--tables {shown(unknown[0])}: choose of 1, 2, 3, 4")
    if (study.scale != 1 or options.quick) and not study.is_embedded:
        raise UserError("--scale and --quick are of the embedded scenes: take --fraction or --steps")
    if study.is_embedded and options.limit is None:
        study = replace(study, limit=400)
    picked = {title: table for title, table in tables.items() if title.split()[1].rstrip(":") in numbers}
    torch.set_num_threads(options.threads)
    return replace(study, tables=picked), options, arguments


def print_plan(study: QMambaStudy, arguments: RunArguments) -> None:
    """What the stages of all rows would take; nothing is trained."""
    rows = []
    for name in study.names:
        row = study.all_rows[name]
        for stage in STAGES if not row.is_transformer else ():
            print(f"planning {name}, stage {stage}", file=sys.stderr, flush=True)
            first = study.first_settings(row, 0)
            start = open_stage(first, torch.float32, torch.device("meta"))
            processor = open_processor(first, start)[0]
            rows.append(plan(study.settings(stage, 0), f"{name}, {stage}", arguments.gpus, (start, processor)))
    print(plan_table(rows, arguments.gpu))


def main(argv: Sequence[str] | None = None) -> None:
    study, options, arguments = read_arguments(argv)
    if arguments.plan:
        print_plan(study, arguments)
        return
    world = join_world(study.stages[1].device)
    if world.size > 1:
        raise UserError("a study runs in one process: start it without torchrun")
    parts = load_mamba(language_model(study.stages[1])), load_siglip(study.stages[1].base)
    study = replace(study, fingerprint="".join(map(exact_fingerprint, parts)), world=world)
    processes = engine.default_processes("cpu", options.threads) if study.is_embedded else 1

    def find() -> dict:
        return summarize(study, collect(study, options.seeds, options.most_seeds, processes))

    engine.run_study(options.out, find, to_markdown, draw, processes=processes)
