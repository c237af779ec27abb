"""Study: which choices of the Q-Mamba projector matter?

    python -m train.reproduce qmamba [--quick]           in miniature, on the embedded models and scenes
    python -m train.reproduce qmamba --base google/siglip-so400m-patch14-384 --option language_model=MAMBA \\
        --stage-1-data jsonl:FILE --data jsonl:FILE --tables 2 3 4       on models and data as the paper's

"Query-based Cross-Modal Projector Bolstering Mamba Multimodal LLM" (anonymous ACL submission). Rows are those of its
Table 1 (the number of queries, and projectors without any), Table 2 (local or global attention), Table 3 (the weights
of the connector) and Table 4 (the order in which a trained connector scans). Each is trained in the two stages of
`train/recipes.py`: its projector alone, then language model and projector. All rows of a seed learn the same pictures
in the same order and answer the same questions. Each model is in cells/…/model, for other benchmarks.

The trained connector is that of row `connector`, which has no queries: connector and linear projector before Mamba, as
in VL-Mamba, of the same seed. Table 4 trains nothing: models that were trained in both directions scan in one. --rates
are factors of --lr in both stages. Every other flag is one of `train.finetune` and holds for both stages of all rows.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch

from eval import scenes, vqa
from eval.question import Question
from eval.report import markdown_table
from model.paligemma import PaliGemma
from train.flags import flag
from train.loop import Diverged
from train.optim import count, trainable
from train.recipes import STAGES
from train.settings import Settings
from train.studies import engine, report
from train.studies.cells import StagedOptions, ask, key_of, learn, open_on_device, read_stages
from train.studies.engine import MEAN, Study
from train.studies.measures import Task, asking, training_records, vqa_task
from train.studies.pool import Job, once
from train.studies.rules import Prediction
from train.systems.open import open_processor, open_stage
from weights.export import export_model

TASKS = ("vqa", "locate", "count", "exist")  # of the embedded scenes


class Row(NamedTuple):
    """A row of the paper's `table`, beside another one.

    options: of the projector; queries may be "all" (one a feature) or "half" (of the default). trained: starts from the
    connector of row `connector`. order: the row `beside` is not trained again, but scans in this direction alone.
    """

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
    Prediction("global", MEAN, "worse", "the paper's Table 2"),
    Prediction("half the queries", MEAN, "worse", "the paper's Table 1: more queries do better"),
    Prediction("all queries", MEAN, "better", "the paper's Table 1"),
    Prediction("local", MEAN, "better", "the paper's Table 3"),
    Prediction("all queries, forward", MEAN, "equivalent", "the paper's Table 4: no harm"),
)
PUBLISHED = (
    ("Table 1: 128, 256, 512 and 729 queries", "half the queries, local, all queries: more do better"),
    ("Table 1: other Mamba models", "connector stands for VL-Mamba; missing: the weights of others"),
    ("Table 2 (VQAv2, GQA, VizWiz, TextVQA, POPE)", "global 73.12, 52.87, 49.09, 44.0, 85.1"),
    ("Tables 2 and 3", "local 75.01, 58.10, 50.53, 48.8, 86.9"),
    ("Table 3", "from scratch 74.22, 56.30, 53.12, 48.0, 86.4"),
    ("Table 4", "forward alone does not harm, and can help"),
)
QUICK = {"seeds": 3, "limit": 200, "rates": (1.0,), "tables": ("2", "3")}


@dataclass(frozen=True)
class Options(StagedOptions):
    """The flags of this study."""

    tables: tuple[str, ...] = flag(tuple("1234"), "of the paper (default: all)", choices="1234", nargs="+")


# Cells


def needs(job: Job) -> list[Job]:
    """The cell with the connector that a row starts from, or with the model that it asks in one direction."""
    row = ROWS[job.row]
    if row.order:
        return [replace(job, row=row.beside, changes=ROWS[row.beside])]
    return [replace(job, row="connector", changes=ROWS["connector"], rate=1.0)] if row.trained else []


def make(stages: Mapping[int, Settings], limit: int, job: Job, folder: Path, *needed: Path) -> dict:
    """Train a row in both stages, unless its model is there, and ask it the questions of a split."""
    row, tasks = ROWS[job.row], tasks_of(stages[2], job.split, limit)
    if needed and not (needed[0] / "model").exists():
        raise Diverged("the row that it starts from diverged")
    trained = needed[0] if row.order else folder
    facts = once(trained / "facts.json", lambda: train(stages, job, folder, *needed))
    settings = replace(stages[2], base=str(trained / "model"))
    model = open_on_device(settings)
    if row.order:
        model.multi_modal_projector.connector.order = row.order
    processor = open_processor(settings, model)[0]
    return {"scores": ask(model, processor, settings, tasks, folder), "facts": facts}


def train(stages: Mapping[int, Settings], job: Job, folder: Path, *donor: Path) -> dict:
    """Both stages, which leave the model in folder/model; returns facts."""
    seconds, model = 0.0, open_row(stages[1], ROWS[job.row], job.seed, *donor)
    processor, files = open_processor(stages[1], model)
    for stage, settings in stages.items():
        settings = replace(settings, seed=job.seed, lr=settings.lr * job.rate)
        records, factors = training_records(settings, Settings.seed), STAGES["qmamba"][stage].rates
        seconds += learn(model, processor, records, settings, factors, folder)
    shutil.rmtree(folder / "model", ignore_errors=True)  # of a study that was killed here
    export_model(model, folder / "model", companions=files)
    shutil.rmtree(folder / "stages")
    return {"parameters": count(trainable(model).values()), "seconds": seconds}


def open_row(settings: Settings, row: Row, seed: int, *donor: Path) -> PaliGemma:
    """The model of stage 1: a fresh projector, whose shared parts are those of the other rows of the seed."""
    options = settings.options | dict(row.options)
    options["connector_from"] = str(donor[0] / "model") if row.trained and donor else ""
    if options.get("queries") in ("all", "half"):
        sizes = open_stage(settings, torch.float32, torch.device("meta")).config
        is_all = options["queries"] == "all"
        options["queries"] = sizes.vision.num_image_tokens if is_all else max(1, sizes.projector.queries // 2)
    option = tuple(f"{name}={json.dumps(value)}" for name, value in options.items())
    return open_on_device(replace(settings, seed=seed, option=option))


# Measures


@cache
def tasks_of(settings: Settings, split: str, limit: int) -> dict[str, Task]:
    """Held-out questions: of data on disk, or of each task of the embedded scenes."""
    if not settings.is_embedded:
        return {"VQA": vqa_task(settings, split, limit)}
    return {name: scene_task(name, split, limit) for name in TASKS}


def scene_task(name: str, split: str, limit: int) -> Task:
    """One task of the embedded scenes. Guessing: the likeliest answer of training to the same words."""
    samples = [scenes.sample(name, split, number) for number in range(limit)]
    asks = [Question(str(n), str(s.image_id), s.scene.render, s.prefix) for n, s in enumerate(samples)]
    seen = [scenes.sample(name, "train", number) for number in range(2_000)]
    chance = vqa.guess_accuracy(vqa.of_samples(samples, "test"), vqa.of_samples(seen, "train"))["overall"]
    return asking(name, asks, [sample.suffix for sample in samples], chance=chance)


# The study


def study_of(stages: Mapping[int, Settings], options: Options) -> Study:
    beside = {name: (row.beside,) for name, row in ROWS.items() if str(row.table) in options.tables and row.beside}
    names = [name for name in ROWS if name in {*beside, *(control for (control,) in beside.values())}]
    is_embedded = stages[2].is_embedded
    return Study(
        name="qmamba",
        title=f"Q-Mamba: base {stages[1].base}, data {' '.join(stages[2].data)}",
        rows={name: ROWS[name] for name in names},
        make=partial(make, stages, options.limit),
        key=key_of(stages, options.limit),
        measures=tasks_of(stages[2], "test", options.limit),
        beside={"the row that the paper compares with": beside},
        rates=options.rates or ((0.5, 1.0, 2.0) if is_embedded else (1.0,)),
        plain=tuple(name for name in names if name.startswith("all queries")),  # one model, in three orders
        needs=needs,
        predictions=PREDICTIONS if is_embedded else (),
        more=lambda run: [
            "## The paper's experiments",
            markdown_table(["published", "figures, and rows here"], PUBLISHED),
        ],
    )


def main(argv: Sequence[str] | None = None) -> None:
    options, stages = read_stages(Options, "qmamba", argv, __doc__, QUICK)
    print(report.write(engine.run(study_of(stages, options), options)))
