"""Study: which choices of the Q-Mamba projector matter?

    python -m train.reproduce qmamba [--quick]    in miniature, on the embedded models and scenes
    python -m train.reproduce qmamba --base google/siglip-so400m-patch14-384 \\
        --option language_model=MAMBA --stage-1-data jsonl:FILE --data jsonl:FILE --tables 2 3 4
                                                  on models and data as the paper's

"Query-based Cross-Modal Projector Bolstering Mamba Multimodal LLM" (Eom et al., Findings of EMNLP 2024). Rows
are those of its tables: the number of queries and projectors without any (1), local or global
attention (2), the weights of the connector (3), and the order in which a trained connector scans
(4). All rows of a seed learn the same pictures in the same order, in both stages; --rates are
factors of --lr. Each model is in cells/…/model.

The trained connector is that of row `connector`, as in VL-Mamba, of the same seed. Table 4 trains
nothing: models that were trained in both directions scan in one. Every other flag is one of
`train.finetune` and holds for both stages.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from eval import vqa
from eval.data import scenes
from eval.question import Question
from model.common import read_json
from model.device import choose_device
from model.paligemma import PaliGemma
from train.flags import several
from train.loop import Diverged
from train.model import load_start, open_processor
from train.settings import Settings
from train.studies import engine, report
from train.studies.cells import Job
from train.studies.engine import MEAN
from train.studies.measures import Task, asking, training_records, vqa_task
from train.studies.training import Tasks, ask_tasks, facts_of, key_of, option_of
from train.systems.qmamba import QMambaSettings
from train.systems.studies.stages import StagedOptions, read_stages, train_stage
from weights.export import export_model

TASKS = ("vqa", "locate", "count", "exist")  # of the embedded scenes


class Row(NamedTuple):
    """A row of the paper's `table`, beside another one. options: of the projector; queries may be
    "all" (one a feature) or "half" (of the default). trained: starts from the connector of row
    `connector`. order: the row `beside` is not trained again, but scans in this direction alone."""

    table: int
    beside: str
    options: tuple[tuple[str, object], ...] = ()
    trained: bool = False
    order: str = ""


ROWS = {
    "local": Row(3, "from scratch", trained=True),
    "from scratch": Row(3, ""),
    "global": Row(2, "local", (("local_attention", False),), trained=True),
    "half the queries": Row(1, "local", (("queries", "half"),), trained=True),
    "all queries": Row(1, "local", (("queries", "all"),), trained=True),
    "connector": Row(1, "local", (("projector", "connector"),)),
    "linear": Row(1, "local", (("projector", "linear"),)),
    "all queries, forward": Row(4, "all queries", order="forward"),
    "all queries, backward": Row(4, "all queries", order="backward"),
}
PREDICTIONS = (
    ("global", MEAN, "worse", "the paper's Table 2"),
    ("half the queries", MEAN, "worse", "the paper's Table 1: more queries do better"),
    ("all queries", MEAN, "better", "the paper's Table 1"),
    ("local", MEAN, "better", "the paper's Table 3"),
    ("all queries, forward", MEAN, "equivalent", "the paper's Table 4: no harm"),
)
RELATIVE_MARGIN = 0.1  # where the control knows little, 3 points would make anything equivalent
QUICK = {"seeds": 3, "limit": 200, "rates": (1.0,), "tables": ("2", "3")}


@dataclass(frozen=True)
class Options(StagedOptions, QMambaSettings):
    tables: tuple[str, ...] = several("1234", "of the paper (default: all)")


def needs(job: Job) -> list[Job]:
    """The cell with the connector that a row starts from, or with the model that it asks in one
    direction."""
    row = ROWS[job.row]
    if row.order:
        return [replace(job, row=row.beside, changes=ROWS[row.beside])]
    if row.trained:
        return [replace(job, row="connector", changes=ROWS["connector"], rate=1.0)]
    return []


def make(
    stages: Sequence[Options],
    tasks: Tasks,
    job: Job,
    folder: Path,
    *needed: Path,
) -> dict:
    """Train a row in both stages and leave the model in folder/model, or let a trained one scan in
    one direction."""
    row = ROWS[job.row]
    if needed and "diverged" in read_json(needed[0] / "cell.json")["facts"]:
        raise Diverged("the row that it starts from diverged")
    if row.order:
        settings = replace(stages[1], base=str(needed[0] / "model"))
        model = load_start(settings, choose_device(settings.device))
        model.multi_modal_projector.connector.order = row.order
        processor, _ = open_processor(settings, model)
        facts = read_json(needed[0] / "cell.json")["facts"]
        return {"scores": ask_tasks(model, processor, settings, tasks, folder), "facts": facts}
    # 1. both stages
    model = open_row(stages[0], row, job.seed, *needed)
    processor, files = open_processor(stages[0], model)
    seconds = 0.0
    for stage in stages:
        settings = replace(stage, seed=job.seed, lr=stage.lr * job.rate)
        factors = stage.STAGES[stage.stage].rates
        seconds += train_stage(
            model, processor, training_records(settings), settings, factors, folder
        )
    # 2. what it says
    scores = ask_tasks(model, processor, stages[1], tasks, folder)
    # 3. the model stays, for other rows
    shutil.rmtree(folder / "model", ignore_errors=True)  # of a study that was killed here
    export_model(model, folder / "model", companions=files)
    shutil.rmtree(folder / "stages")
    return {"scores": scores, "facts": facts_of(model, seconds=seconds)}


def open_row(settings: Settings, row: Row, seed: int, *donor: Path) -> PaliGemma:
    """The model of stage 1: a fresh projector, whose shared parts are those of the other rows of
    the seed."""
    options = settings.options | dict(row.options)
    options["connector_from"] = str(donor[0] / "model") if row.trained and donor else ""
    queries = options.get("queries")
    if queries in ("all", "half"):
        sizes = settings.open_stage(torch.float32, torch.device("meta")).config
        options["queries"] = sizes.vision.num_image_tokens
        if queries == "half":
            options["queries"] = max(1, sizes.projector.queries // 2)
    settings = replace(settings, seed=seed, option=option_of(options))
    return load_start(settings, choose_device(settings.device))


def tasks_of(options: Options, split: str) -> dict[str, Task]:
    if options.is_embedded:
        return {name: scene_task(name, split, options.limit) for name in TASKS}
    return {"VQA": vqa_task(options, split, options.limit)}


def scene_task(name: str, split: str, limit: int) -> Task:
    """One task of the embedded scenes. Guessing: the likeliest answer of training to the same
    words."""
    samples = [scenes.sample(name, split, number) for number in range(limit)]
    asks = []
    for n, s in enumerate(samples):
        asks.append(Question(n, str(s.image_id), s.scene.render, s.prefix, truth=s.suffix))
    seen = [scenes.sample(name, "train", number) for number in range(2_000)]
    test, train = vqa.of_samples(samples, "test"), vqa.of_samples(seen, "train")
    return asking(name, asks, chance=vqa.guess_accuracy(test, train)["overall"])


def study_of(stages: Sequence[Options]) -> engine.Study:
    first, options = stages
    beside, names = {}, set()
    for name, row in ROWS.items():
        if row.beside and str(row.table) in options.tables:
            beside[name] = (row.beside,)
            names |= {name, row.beside}
    rows = {name: row for name, row in ROWS.items() if name in names}
    tasks = {split: tasks_of(options, split) for split in ("validation", "test")}
    return engine.Study(
        name="qmamba",
        title=f"Q-Mamba: base {first.base}, data {' '.join(options.data)}",
        rows=rows,
        make=partial(make, stages, tasks),
        key=key_of(stages, first.open_stage(torch.float32, torch.device("cpu")), tasks),
        measures=tasks["test"],
        beside={"the row that the paper compares with": beside},
        rates=options.first_rates,
        # one model, in three orders
        plain=tuple(name for name in rows if name.startswith("all queries")),
        needs=needs,
        relative_margin=RELATIVE_MARGIN,
        predictions=PREDICTIONS if options.is_embedded else (),
    )


def main(argv: Sequence[str] | None = None) -> None:
    stages = read_stages(Options, argv, __doc__, QUICK)
    report.publish(study_of(stages), stages[1])
