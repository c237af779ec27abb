"""The experiment of the differential PaliGemma paper (Li et al. 2025): five models, the choice of two, and needles.

    python -m train.reproduce paligemma                      the same plan in miniature, on the embedded base and scenes
    python -m train.reproduce paligemma --quick              and with a tenth of the samples
    python -m train.reproduce paligemma --base google/paligemma-3b-pt-224 --data vqav2:DIR --coco DIR --captions FILE
    python -m train.reproduce paligemma … --from paper-1=RUN part-2-with=RUN      finished runs in place of training
    python -m train.reproduce paligemma … --plan             memory, disk and hours of all runs; nothing is trained

Part 1 fine-tunes the five models of Table 1, recipes of `train/settings.py`, on 40 % of the training pictures. Of those
with and those without differential attention the one with the best VQA score is chosen. Part 2 fine-tunes these two on
all pictures. Needles are looked for in stitched pictures of 2×2, by the paper's prompt and its two questions. The
report has the paper's Table 1 (VQA), Table 2 (needles) and Figure 2 (needles by place) beside the published figures.

The paper's two models differ in more than attention. So a third one, `part-2-control`, learns beside: it has all
settings of the one with differential attention, but plain attention. Otherwise one seed and no controls, as published:
`train.compare` has both. What the paper leaves open is a setting of the recipes and a flag of `train.finetune`, such as
--optimizer, --schedule, --answers, and --diff-in, the towers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from eval.figures import heatmaps, save
from eval.report import markdown_table
from lora import adapter
from model.common import UserError, shown
from model.device import choose_device
from train.checkpoint import file_digest
from train.flags import flag, from_values
from train.model import load_base, open_processor
from train.plan import plan, plan_table
from train.recipes import RECIPES
from train.settings import GPUS
from train.studies import engine, report
from train.studies.cells import Job, digest
from train.studies.measures import VAL_FILES, coco_needles, scene_needles, trial_task, vqa_task
from train.studies.training import (
    NeedleOptions,
    Tasks,
    ask_tasks,
    deciding,
    key_of,
    read_given,
    train_and_ask,
)

# Table 1, %
VQA_SCORES = {
    "paper-1": 53.21,
    "paper-2": 51.91,
    "paper-3": 35.72,
    "paper-4": 33.91,
    "paper-5": 41.32,
}
WITHOUT, WITH = "part-2-without", "part-2-with"  # differential attention
CONTROL = "part-2-control"  # all settings of WITH, but plain attention
# Table 2: index accuracy, %
NEEDLE_SCORES = {"baseline": "28.75", WITHOUT: "30.42", WITH: "34.72", CONTROL: ""}
# chosen of these
PART_2 = {WITHOUT: ("paper-1", "paper-3"), WITH: ("paper-2", "paper-4", "paper-5")}
PART_2[CONTROL] = PART_2[WITH]
SHARE = 0.4  # of the pictures, in Part 1
# half of the miniature's samples ask for needles, since the embedded base has never seen their
# words
MINIATURE = {"samples": 4000, "tasks": "vqa,n2o1"}
QUICK = {"samples": 400}
DECIDED = ("fraction", "rates")  # by the recipes


@dataclass(frozen=True)
class Options(NeedleOptions):
    seeds: int = flag(1, "runs of each row", least=1, metavar="N")
    rows: tuple[str, ...] = flag(
        tuple(VQA_SCORES), "of Table 1 (default: all)", choices=[*VQA_SCORES], nargs="+"
    )
    from_: tuple[str, ...] = flag(
        (),
        "finished runs of the rows that they stand for (default: none)",
        nargs="+",
        metavar="ROW=RUN",
    )
    vqa_limit: int | None = flag(
        None, "VQA questions (default: all; 600 of the embedded scenes)", least=1, metavar="N"
    )
    needle_limit: int = flag(200, "needle tests, evenly over the places", least=4, metavar="N")
    scoring: str = flag(
        "official", "of VQA: VQAv2's own, or the paper's Eq. 8", choices=["official", "paper"]
    )
    plan: bool = flag(False, "train nothing: print what the runs take (memory, disk, hours)")
    gpu: str = flag("H100", "GPU of --plan", choices=list(GPUS))

    @property
    def finished(self) -> dict[str, Path]:
        """The runs of --from by row. Raises UserError."""
        runs = {}
        for text in self.from_:
            row, _, run = text.partition("=")
            runs[row] = Path(run)
            is_run = (runs[row] / adapter.CONFIG_FILE).is_file()
            if row not in (*self.rows, *PART_2) or not is_run:
                problem = f"--from {shown(f'{row}={runs[row]}')}: expected ROW=RUN"
                raise UserError(f"{problem}, a run with an adapter, for a row")
        return runs


def read_models(argv: Sequence[str]) -> dict[str, Options]:
    """The flags, and the settings of each model on all pictures; flags override recipes. Raises
    UserError."""
    given = read_given(Options, argv, "train.reproduce paligemma", __doc__, QUICK, DECIDED)
    models = {}
    for name in VQA_SCORES:
        values = MINIATURE | RECIPES[name] | {"fraction": 1.0} | given
        models[name] = from_values(Options, values)
    base = models["paper-1"]
    kind, _, folder = base.data[0].partition(":")
    if kind == "vqav2" and "validation" not in given and Path(folder, VAL_FILES[0]).exists():
        # val2014 is asked about
        models = {name: replace(model, validation=0.0) for name, model in models.items()}
    return models


def on_share(settings: Options) -> Options:
    """The settings of Part 1; an embedded sample has a picture of its own."""
    samples = max(1, round(SHARE * settings.samples)) if settings.is_embedded else settings.samples
    return replace(settings, fraction=SHARE, samples=samples)


def plain(settings: Options) -> Options:
    """The same settings, with plain attention."""
    return replace(settings, attention="softmax", option=())


def make(
    models: Mapping[str, Options],
    tasks: Tasks,
    job: Job,
    folder: Path,
    *part_1: Path,
) -> dict:
    """Train the adapter of a cell in its folder, and ask it. part_1: the cells of which Part 2
    trains the best."""
    base, name = models["paper-1"], job.row
    run = base.finished.get(name)
    if name == "baseline" or run:
        model = load_base(base, choose_device(base.device))
        if run:
            adapter.load(model, run)
        scores = ask_tasks(model, open_processor(base, model)[0], base, tasks, folder)
        return {"scores": scores, "facts": {"chosen": str(run or "")}}
    if part_1:
        cells = [json.loads((earlier / "cell.json").read_text()) for earlier in part_1]
        name = max(cells, key=vqa_of)["row"]
    settings = models[name] if part_1 else on_share(models[name])
    if job.row == CONTROL:
        settings = plain(settings)
    result = train_and_ask(replace(settings, seed=job.seed), tasks, folder)
    return result | {"facts": result["facts"] | {"chosen": name}}


def vqa_of(cell: dict) -> float:
    """The VQA score of a cell of Part 1, 0 if it diverged."""
    scores = cell["scores"]
    return float(np.mean(scores["test"]["VQA"])) if scores else 0.0


def study_of(models: Mapping[str, Options]) -> engine.Study:
    base = models["paper-1"]
    # 1. the rows; a finished run is named by its weights
    marks = {}
    for row, run in base.finished.items():
        names = adapter.CONFIG_FILE, adapter.TENSOR_FILE
        marks[row] = tuple(file_digest(run / name) for name in names)
    rows = {row: marks.get(row, ()) for row in ("baseline", *base.rows)}
    for row, names in PART_2.items():
        if row == CONTROL and row not in marks and WITH in marks:
            continue  # nobody knows the settings of a finished run
        part_1 = tuple((name, *rows[name]) for name in names if name in rows)
        if part_1:
            rows[row] = marks.get(row, part_1)

    # 2. what they are asked; needles where there are pictures for them
    limit = base.vqa_limit
    if limit is None and base.is_embedded:
        limit = 600
    tasks = {"VQA": vqa_task(base, "test", limit, base.scoring)}
    title, trials = "needles, 2×2", []
    if base.is_embedded:
        trials = scene_needles("n2o1", base.needle_limit)
    elif base.coco:
        title, trials = coco_needles(base.needle_limit, base.coco, base.captions)
    if trials:
        places = [f"row {t.places[0][1] + 1}, column {t.places[0][2] + 1}" for t in trials]
        tasks["needle"] = trial_task(title, trials, "paper", in_mean=False, rungs=places)
    asked = {"test": tasks}

    # 3. the study
    def needs(job: Job) -> list[Job]:
        names = [] if job.row in base.finished else PART_2.get(job.row, ())
        return [replace(job, row=name, changes=rows[name]) for name in names if name in rows]

    settings = [deciding(of_model) for of_model in models.values()]
    start = key_of([base], load_base(base, torch.device("cpu")), asked)
    beside = {}
    for row in (CONTROL, WITHOUT):
        if {row, WITH} <= rows.keys():
            beside[row] = {WITH: (row,)}
    return engine.Study(
        name="reproduce-paligemma",
        title=f"The differential PaliGemma experiment: base {base.base}, data {' '.join(base.data)}",
        rows=rows,
        make=partial(make, models, asked),
        key=digest(start, settings, base.scoring),
        measures=tasks,
        beside=beside,
        main="VQA",
        needs=needs,
        more=partial(blocks, models),
    )


def blocks(models: Mapping[str, Options], run: engine.Run) -> list:
    """The paper's tables and its figure beside ours, and what they confound."""
    models = {name: models[name] for name in models if name in run.cells}
    # 1. scores, and what was chosen
    scores = {}
    for row in run.cells:
        of_row = run.scores(row)
        scores[row] = {name: f"{each.mean():.2f}" for name, each in of_row.items()}
    chosen = {}
    for row in PART_2:
        if row in run.cells and run.facts(row):
            chosen[row] = ", ".join(dict.fromkeys(of["chosen"] for of in run.facts(row)))

    # 2. the paper's tables
    table_1, table_2 = [], []
    for name, of in models.items():
        line = [name, of.attention, of.feed_forward, f"{of.lr:g}", f"{of.r}/{of.alpha:g}"]
        line += [f"{of.weight_decay:g}", f"{VQA_SCORES[name]:.2f}", scores[name]["VQA"]]
        table_1.append(line)
    for row, score in NEEDLE_SCORES.items():
        if row in scores:
            needles = scores[row].get("needle", "")
            table_2.append([row, chosen.get(row, ""), score, needles, scores[row]["VQA"]])
    head = "model,attention,feed-forward,rate,rank/alpha,decay,the paper,here".split(",")
    tables = [
        "## Table 1: VQA after 40 % of the training pictures, %",
        markdown_table(head, table_1),
        "## Table 2: needles in 2×2, index accuracy in %, and VQA, after all pictures; chance 25",
        markdown_table(["model", "as", "needles, the paper", "here", "VQA, here"], table_2),
        "The paper chose paper-1 and paper-2. Their feed-forwards differ too, so that their scores "
        f"do not tell what attention does. Only `{CONTROL}` and `{WITH}` differ in attention alone.",
    ]
    if "needle" in run.study.measures:
        save(draw_needles(run), run.out / "figure-2.png")
        tables += ["## Figure 2: needles by the cell they lie in", "![Figure 2](figure-2.png)"]
    return tables


def draw_needles(run: engine.Run) -> Image.Image:
    """Figure 2: for each model the share of needles found, by row and column in the picture."""
    maps = {}
    for row in NEEDLE_SCORES:
        if row in run.cells:
            rungs = run.study.measures["needle"].rungs
            found = report.by_rung(run.scores(row)["needle"].mean(0) / 100, rungs)
            shares = [float(np.mean(found[place])) for place in sorted(found)]
            maps[row] = shares[:2], shares[2:]
    return heatmaps(maps, "Figure 2: needles found, by the cell they lie in, %")


def main(argv: Sequence[str]) -> None:
    models = read_models(argv)
    options = models["paper-1"]
    if options.plan:
        rows = [plan(on_share(models[name]), name) for name in options.rows]
        # which the paper chose for Part 2
        whole = [name for name in ("paper-1", "paper-2") if name in options.rows]
        rows += [plan(models[name], f"{name}, all pictures") for name in whole]
        if "paper-2" in whole:
            rows.append(plan(plain(models["paper-2"]), CONTROL))
        print(plan_table(rows, options.gpu))
    else:
        report.publish(study_of(models), options)
