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
makes Table 2 and the first part of Table 1 there, of three seeds and half as long training, at the rates of the recipe.
Range, rates, seeds and verdicts are those of `train/studies/rules.py`: on the embedded scenes each row has a factor of
both stages' rates, by the mean of three seeds on validation scenes after the whole training.

The trained connector of Table 3 is that of row `connector`, which has no queries: connector and linear projector
before Mamba, as in VL-Mamba, of the same seed; --option connector_from=MODEL takes another. Table 4 takes models that
were trained in both directions and scans in one direction alone, as the paper does; nothing is trained for it.
"""

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from model.common import UserError, shown
from model.mamba import choose_kernel
from model.paligemma import PaliGemma, initialize
from model.processor import Processor
from model.qmamba import QMamba, set_scan_order
from train.distributed import World, join_world
from train.flags import RunArguments
from train.loop import LoopOptions, fit
from train.optim import count
from train.plan import plan, plan_table
from train.settings import Settings
from train.studies import engine, rules
from train.studies.attention_data import training_records
from train.studies.cells import read_flags_of_both
from train.studies.encoded import encoded_loss
from train.studies.engine import deciding, describe_runs
from train.studies.qmamba_language import run_language, run_mamba
from train.studies.qmamba_scenes import encoded_samples, shuffled, vision_tower
from train.studies.qmamba_study import STAGES, QMambaOptions, QMambaStudy
from train.studies.qmamba_tables import (
    CONTROL,
    ORDERS,
    PAPER_TABLES,
    PREDICTIONS,
    QUICK_SCALE,
    QUICK_TABLES,
    SCENE_TABLES,
    ProjectorRow,
    draw,
    judge_tables,
    scores_of,
    table_gains,
    to_markdown,
)
from train.supervised import train_on
from train.systems.open import make_optimizer, open_processor, open_stage, stage_rules
from train.systems.qmamba import language_model
from weights.export import export_model
from weights.fingerprint import exact_fingerprint
from weights.load import load_mamba, load_siglip

VERSION = 3  # of the code that decides a cell's result: raise it to compute all cells again

DECIDED = (*"arch stage wings recipe seed resume evaluate eval_limit show_batch cache_features".split(),)


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
    row, stages = study.all_rows[name], {stage: study.settings(stage, seed, name) for stage in STAGES}

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
        for order in ORDERS if row.orders and study.split == "test" else ():
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
    parts += (study.factor(row.connector),) if study.factor(row.connector) != 1 else ()
    return study.finish(spell_row(study, name, seed), parts, work)[0]


def spell_row(study: QMambaStudy, name: str, seed: int) -> str:
    return f"{name}, seed {seed}, rates × {study.factor(name):g}"


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


LANGUAGE = "language"  # as the row of a job: `run_language`


class Job(NamedTuple):
    """A cell. factor: of the rates of the row alone, where it is tried; else all rows have those of the study."""

    row: str
    seed: int
    factor: float | None = None

    def of(self, study: QMambaStudy) -> QMambaStudy:
        return study if self.factor is None else replace(study, factors={self.row: self.factor})


def run_job(study: QMambaStudy, job: Job) -> dict:
    return run_language(study) if job.row == LANGUAGE else run_row(job.of(study), job.row, job.seed)


def spell_job(study: QMambaStudy, job: Job, result: dict) -> str:
    return f"{spell_row(job.of(study), job.row, job.seed)}: {result['cpu_seconds']:.0f} CPU seconds"


def run_jobs(study: QMambaStudy, jobs: Sequence[Job], processes: int) -> list[dict]:
    """The cells of jobs; `processes` compute them side by side, after those that others start from."""
    rows = {name: study.all_rows[name] for name in dict.fromkeys(job.row for job in jobs)}
    late = [name for name, row in rows.items() if row.is_transformer or study.trains_donor(row)]
    if processes > 1:
        donors = [
            Job(donor, job.seed, None if job.factor is None else 1.0)
            for job in jobs
            if job.row in late and (donor := rows[job.row].connector)
        ]
        language = [Job(LANGUAGE, 0)] if any(row.is_transformer for row in rows.values()) else []
        first = dict.fromkeys([*donors, *language, *(job for job in jobs if job.row not in late)])
        for some in (list(first), [job for job in jobs if job.row in late]):
            engine.side_by_side(partial(run_job, study), some, processes, partial(spell_job, study))
    return [run_job(study, job) for job in jobs]


def tune(study: QMambaStudy, options: QMambaOptions, processes: int) -> rules.Scores:
    """The accuracies on validation scenes, by row and factor of the rates: the mean over seeds."""
    on_validation = replace(study, split="validation")
    seeds = range(min(rules.TUNING_SEEDS, options.seeds or 1))

    def score(factors: Sequence[float]) -> rules.Scores:
        jobs = [Job(name, seed, factor) for seed in seeds for factor in factors for name in study.names]
        cells = run_jobs(on_validation, jobs, processes)
        names = [(job.row, job.factor) for job in jobs]
        return rules.mean_scores(names, (cell["accuracy"] / 100 for cell in cells))

    return rules.bracket(options.factors or (1.0,), score)


def compute(study: QMambaStudy, wanted: Mapping[str, int], processes: int) -> dict[str, list[dict]]:
    """Cells by seed, of each row and of each row with one scan order; `processes` compute them side by side.

    wanted: seeds of each row.
    """
    jobs = [Job(name, seed) for seed in range(max(wanted.values())) for name in wanted if seed < wanted[name]]
    cells = dict(zip(jobs, run_jobs(study, jobs, processes), strict=True))
    found = {}
    for name, seeds in wanted.items():
        found[name] = of_row = [cells[Job(name, seed)] for seed in range(seeds)]
        for order in of_row[0]["read"]:
            found[f"{name}, {order}"] = [cell | {"scores": cell["read"][order]} for cell in of_row]
    return found


def collect(study: QMambaStudy, seeds: int, most_seeds: int, processes: int = 1) -> dict[str, list[dict]]:
    """`compute` with as many seeds of each row as its tables need, by `rules.enough`."""
    wanted = dict.fromkeys(study.names, seeds)
    while True:
        found = compute(study, wanted, processes)
        scores, more = scores_of(study.measures, found), set()
        for table in study.tables.values():
            gains = table_gains(study.measures, table, scores).values()
            asked = {part for name in table.rows if (part := name.split(", ")[0]) in wanted}
            if not rules.enough([*gains], min(wanted[name] for name in asked), seeds, most_seeds):
                more |= asked | {name for one in asked if (name := study.all_rows[one].connector) in wanted}
        if not more:
            return found
        wanted = {name: min(most_seeds, number + (name in more)) for name, number in wanted.items()}


def compare(study: QMambaStudy, options: QMambaOptions, processes: int) -> dict:
    """Find the rates and train all rows at theirs, and at those of the control. Returns comparison.json."""
    factors = options.factors or (1.0,)
    tried = tune(study, options, processes) if len(factors) > 1 else dict.fromkeys(study.names, {factors[0]: 0.0})
    own = replace(study, factors={name: rules.best_rate(of_row) for name, of_row in tried.items()})
    summary = summarize(own, collect(own, options.seeds or 1, options.most_seeds or 1, processes))
    common = {}
    if len(set(own.factors.values())) > 1:
        same = replace(study, factors=dict.fromkeys(study.names, own.factor(study.names[0])))
        seeds = min(rules.TUNING_SEEDS, options.seeds or 1)
        scores = scores_of(study.measures, compute(same, dict.fromkeys(study.names, seeds), processes))
        common = judge_tables(study.measures, study.tables, scores, summary["chance"])
    rates = {
        name: {"factor": own.factor(name), "validation": {f"{factor:g}": 100 * one for factor, one in of_row.items()}}
        for name, of_row in tried.items()
        if len(of_row) > 1
    }
    return summary | {"rates": rates, "edges": rules.edges(tried), "common": common}


def summarize(study: QMambaStudy, found: dict[str, list[dict]]) -> dict:
    """comparison.json. Accuracies are in percent; "mean" is over all measures."""
    scores, pictures = scores_of(study.measures, found), {one.name: one.pictures for one in study.measures}
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
    differences = judge_tables(study.measures, study.tables, scores, chance)
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
    options = engine.with_seeds(options, is_whole)
    if options.factors and not study.is_embedded:
        raise UserError("--factors is of the embedded scenes: with data of your own give --lr")
    if options.factors is None and is_whole:
        options = replace(options, factors=(0.5, 1.0, 2.0))
    numbers = options.tables.split(",")
    if unknown := [number for number in numbers if number not in ("1", "2", "3", "4")]:
        raise UserError(f"--tables {shown(unknown[0])}: choose of 1, 2, 3, 4")
    if (study.scale != 1 or options.quick or options.full) and not study.is_embedded:
        raise UserError("--scale, --quick and --full are of the embedded scenes: take --fraction or --steps")
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

    engine.run_study(options.out, lambda: compare(study, options, processes), to_markdown, draw, processes=processes)
