"""The experiment of the differential PaliGemma paper (Li et al. 2024): five models, the choice of two, and needles.

    python -m train.reproduce paligemma                      the same plan in miniature, on the embedded base and scenes
    python -m train.reproduce paligemma --quick              and with a tenth of the samples
    python -m train.reproduce paligemma --base google/paligemma-3b-pt-224 --data vqav2:DIR --coco DIR --captions FILE
    python -m train.reproduce paligemma … --from paper-1=RUN paper-1-full=RUN     finished runs in place of training
    python -m train.reproduce paligemma … --plan             memory, disk and hours of all runs; nothing is trained

In: a base and data. Out: the report of `train/studies/report.py`, with the paper's Table 1 (VQA) and Table 2 (needles)
beside the published figures, and what the paper leaves open.

Part 1 fine-tunes the five models of Table 1, recipes of `train/recipes.py`, on 40 % of the training pictures. Of those
with and those without differential attention the one with the best VQA score is chosen. Part 2 fine-tunes these two on
all pictures. Needles are looked for in stitched pictures of 2×2, by the paper's prompt and its two questions.

One seed and no controls, as published: `train.compare` has both.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch

from eval.report import markdown_table
from lora import adapter
from model.common import UserError, shown
from train.checkpoint import file_digest
from train.flags import flag, flag_name
from train.plan import plan, plan_table
from train.recipes import GPUS
from train.settings import Settings
from train.studies import engine, report
from train.studies.adapters import ask, fine_tune, open_once
from train.studies.engine import Run, Study
from train.studies.measures import VAL_FILES, Task, coco_needles, data_mark, needle_task, trial_task, vqa_task
from train.studies.options import StudyOptions, deciding, read_with_settings
from train.studies.pool import Job
from train.systems.open import load_base

VQA_SCORES = {"paper-1": 53.21, "paper-2": 51.91, "paper-3": 35.72, "paper-4": 33.91, "paper-5": 41.32}  # Table 1, %
WITHOUT, WITH = "part-2-without", "part-2-with"  # differential attention
NEEDLE_SCORES = {"baseline": 28.75, WITHOUT: 30.42, WITH: 34.72}  # Table 2: index accuracy, %
PART_2 = {WITHOUT: ("paper-1", "paper-3"), WITH: ("paper-2", "paper-4", "paper-5")}  # chosen of these
SHARE = 0.4  # of the pictures, in Part 1
DECIDED = "fraction full resume allow_changed evaluate eval_limit eval_data arch stage show_batch".split()
# half of the miniature's samples ask for needles, since the embedded base has never seen their words
MINIATURE = ("--samples", "4000", "--tasks", "vqa,n2o1")
# what the paper leaves open, or says in two ways: subject, its words, source of the default, setting
OPEN = (
    ("where attention is replaced", "“both Siglip and Gemma”", "the paper", "diff_in"),
    ("optimizer", "“the Adam optimizer”, and a weight decay", "the paper", "optimizer"),
    ("rows of a step", "“a batch size of 4”, rate / batch = 1e-4", "the paper", "step_batch"),
    ("second momentum", "nothing", "the authors' code", "beta2"),
    ("schedule", "nothing", "the authors' code", "schedule"),
    ("warm-up steps", "nothing", "the authors' code", "warmup"),
    ("largest gradient norm", "nothing", "this project", "clip"),
    ("LoRA dropout", "nothing", "the authors' code", "dropout"),
    ("projections with LoRA; none in SigLIP", "nothing", "the authors' code", "targets"),
    ("answer to learn", "nothing", "the authors' code", "answers"),
    ("words of a question", "nothing; its code: the bare question in evaluation", "this project", "prompt"),
    ("epochs", "one for Part 2, nothing for Part 1", "the paper", "epochs"),
    ("pictures held out", "nothing; its code asks about training pictures", "this project", "validation"),
    ("weights", "nothing", "this project", "dtype"),
    ("matrix products", "nothing; its code: bf16", "this project", "autocast"),
)
FIXED = (
    "Without a flag: SwiGLU replaces the decoder's MLP, with int(8/3·d) hidden units drawn at random (Eq. 7); λ's "
    "vectors are drawn from N(0, 0.1), the norms' gains start at 1, layers count from 1; the original differential "
    "attention splits the heads' dimensions, each half with a RoPE of its own. The authors' code draws the gains from "
    "N(0, 0.1), counts layers from 0, and freezes λ and the gains when it adds LoRA: here they are trained."
)


@dataclass(frozen=True)
class Options(StudyOptions):
    """The flags of this study, besides those of `train.finetune`."""

    seeds: int = flag(1, "runs of each row", least=1, metavar="N")
    rows: str = flag(",".join(VQA_SCORES), "models of Table 1, comma-separated (default: all)", metavar="NAME,…")
    from_: tuple[str, ...] = flag(
        (), "finished runs of the rows that they stand for (default: none)", nargs="+", metavar="ROW=RUN"
    )
    vqa_limit: int | None = flag(None, "VQA questions (default: all; 600 of the embedded scenes)", least=1, metavar="N")
    needle_limit: int = flag(200, "needle tests, evenly over the places", least=4, metavar="N")
    scoring: str = flag("official", "of VQA: VQAv2's own, or the paper's Eq. 8", choices=["official", "paper"])
    coco: str | None = flag(None, "with --data on disk: folder of COCO val2014, for needle tests (default: none)")
    captions: str | None = flag(None, "with --coco: MMNeedle's or COCO's caption file (default: none)")
    plan: bool = flag(False, "train nothing: print what the runs take (memory, disk, hours)")
    gpu: str = flag("H100", "GPU of --plan", choices=list(GPUS))
    gpus: int = flag(1, "number of them", least=1)


def read_arguments(argv: Sequence[str]) -> tuple[Options, dict[str, Settings]]:
    """The study's flags, and the settings of each model on all pictures; flags override recipes. Raises UserError."""
    settings: dict[str, Settings] = {}
    for name in VQA_SCORES:
        options, settings[name] = read_with_settings(
            Options,
            [*argv, "--recipe", name],
            "train.reproduce paligemma",
            __doc__,
            {},
            decided=DECIDED,
            defaults=MINIATURE,
            quick_defaults=("--samples", "400"),
        )
    names = options.rows.split(",")
    if unknown := [name for name in names if name not in VQA_SCORES]:
        raise UserError(f"--rows {shown(unknown[0])}: choose of {', '.join(VQA_SCORES)}")
    base = settings[names[0]]
    if options.coco and base.is_embedded:
        raise UserError("--coco goes with --data on disk: the embedded scenes have needle tests of their own")
    kind, _, folder = base.data[0].partition(":")
    held_out = base.validation
    if kind == "vqav2" and held_out == Settings.validation and Path(folder, VAL_FILES[0]).exists():
        held_out = 0.0  # val2014 is asked about
    whole = {"fraction": 1.0, "validation": held_out, "measure_every": 0}
    return options, {name: replace(settings[name], **whole) for name in names}


def on_share(settings: Settings) -> Settings:
    """The settings of Part 1; an embedded sample has a picture of its own."""
    samples = max(1, round(SHARE * settings.samples)) if settings.is_embedded else settings.samples
    return replace(settings, fraction=SHARE, samples=samples)


def finished_runs(options: Options, rows: Collection[str]) -> dict[str, Path]:
    """The runs of --from by row. Raises UserError."""
    runs = {}
    for text in options.from_:
        row, _, folder = text.partition("=")
        if row not in rows or not Path(folder, adapter.CONFIG_FILE).is_file():
            raise UserError(
                f"--from {shown(text)}: expected ROW=RUN, a run with an adapter for one of {', '.join(rows)}"
            )
        runs[row] = Path(folder)
    return runs


# Cells


@cache
def tasks_of(options: Options, base: Settings) -> dict[str, Task]:
    """VQA, and needles where there are pictures for them."""
    limit = options.vqa_limit or (600 if base.is_embedded else None)
    tasks = {"VQA": vqa_task(base, "test", limit, options.scoring)}
    if base.is_embedded:
        tasks["needle"] = needle_task("n2o1", options.needle_limit, "paper")
    elif options.coco:
        title, trials = coco_needles(base, options.needle_limit, options.coco, options.captions)
        tasks["needle"] = trial_task(title, trials, "paper")
    if needle := tasks.get("needle"):
        tasks["needle"] = replace(needle, in_mean=False, rungs=needle.labels)  # Figure 2: by place
    return tasks


def make(
    options: Options,
    models: Mapping[str, Settings],
    finished: Mapping[str, Path],
    job: Job,
    folder: Path,
    *part_1: Path,
) -> dict:
    """Train the adapter of a cell in its folder, unless it is there, and ask it VQA and needles.

    part_1: the cells of which Part 2 trains the best on all pictures. A run whose loss is no longer finite scores 0.
    """
    base, name, facts = next(iter(models.values())), job.row, {}
    tasks = tasks_of(options, base)
    if part_1:
        cells = [json.loads((earlier / "test.json").read_text()) for earlier in part_1]
        name = facts["chosen"] = max(cells, key=lambda cell: np.mean(cell["scores"]["VQA"]))["row"]
    settings = replace(models[name] if part_1 else on_share(models.get(name, base)), seed=base.seed + job.seed)
    if job.row not in ("baseline", *finished):
        result = fine_tune(base, settings, tasks, folder)
        return result | {"facts": result["facts"] | facts}
    processor, world = open_once(base)
    model = load_base(settings, world.device)
    if run := finished.get(job.row):
        adapter.load(model, run)
        facts["chosen"] = str(run)
    return {"scores": ask(model, processor, settings, tasks, folder), "facts": facts}


def study_of(options: Options, models: Mapping[str, Settings]) -> Study:
    base = next(iter(models.values()))
    parts = {row: [name for name in names if name in models] for row, names in PART_2.items()}
    parts = {row: names for row, names in parts.items() if names}
    finished = finished_runs(options, [*models, *parts])
    rows: dict[str, tuple] = {"baseline": ()} | {name: decides(on_share(own)) for name, own in models.items()}
    rows |= {row: tuple((name, decides(models[name])) for name in names) for row, names in parts.items()}
    rows |= {row: (*rows[row], ("run", file_digest(run / adapter.TENSOR_FILE))) for row, run in finished.items()}
    tasks = tasks_of(options, base)

    def needs(job: Job) -> list[Job]:
        names = [] if job.row in finished else parts.get(job.row, [])
        return [replace(job, row=name, changes=rows[name]) for name in names]

    marks = [task.mark for task in tasks.values()]
    fingerprint = adapter.fingerprint(load_base(base, torch.device("cpu")))
    return Study(
        name="reproduce-paligemma",
        title=f"The differential PaliGemma experiment: base {base.base}, data {' '.join(base.data)}",
        rows=rows,
        make=partial(make, options, models, finished),
        key=repr((fingerprint, data_mark(base), marks)),
        measures=tasks,
        beside={"without differential attention": {WITH: (WITHOUT,)}} if len(parts) == 2 else {},
        main="VQA",
        needs=needs,
        more=partial(blocks, options, models),
    )


def decides(settings: Settings) -> tuple:
    return tuple(deciding(settings).items())


# The report


def blocks(options: Options, models: Mapping[str, Settings], run: Run) -> list:
    """The paper's tables beside ours, what agrees, and what the paper leaves open."""
    scores = {row: {name: f"{each.mean():.2f}" for name, each in run.scores(row).items()} for row in run.cells}
    means = {name: float(scores[name]["VQA"]) for name in models}

    head = ["model", "attention", "feed-forward", "rate", "rank/alpha", "decay", "the paper", "here"]
    table_1 = []
    for name, own in models.items():
        numbers = [f"{own.lr:g}", f"{own.r}/{own.alpha:g}", f"{own.weight_decay:g}", f"{VQA_SCORES[name]:.2f}"]
        table_1.append([name, own.attention, own.feed_forward, *numbers, scores[name]["VQA"]])
    chosen = {row: run.cells[row][0]["facts"].get("chosen", "") for row in run.cells if row in PART_2}
    table_2 = [
        [row, chosen.get(row, ""), f"{published:.2f}", scores[row]["needle"], scores[row]["VQA"]]
        for row, published in NEEDLE_SCORES.items()
        if row in scores and "needle" in run.study.measures
    ]
    order, published = (" > ".join(sorted(models, key=of.__getitem__, reverse=True)) for of in (means, VQA_SCORES))
    words = [f"Table 1 here: {order}; the paper: {published}."]
    words.append(f"Part 2: {' and '.join(chosen.values())}; the paper: paper-1 and paper-2.")
    if next(iter(models.values())).is_embedded:
        words.append("A miniature: a base of two million parameters neither confirms nor refutes the paper's numbers.")
    settings = [[*words_of, spell(models, setting), source, flag_name(setting)] for *words_of, source, setting in OPEN]
    scoring = ["scoring", "“the official VQAv2 scoring method”, and Eq. 8", options.scoring, "the paper", "--scoring"]
    return [
        "## Table 1: VQA after 40 % of the training pictures, %",
        markdown_table(head, table_1),
        *report.sections(
            (
                "Table 2: needles in 2×2, index accuracy in %, and VQA, after all pictures; chance 25",
                markdown_table(["model", "as", "needles, the paper", "here", "VQA, here"], table_2) if table_2 else [],
            )
        ),
        " ".join(words),
        "## What the paper leaves open",
        markdown_table(["open", "the paper", "here", "source of the default", "flag"], [*settings, scoring]),
        FIXED,
    ]


def spell(models: Mapping[str, Settings], setting: str) -> str:
    """The values of a setting, of all models."""
    values = dict.fromkeys(getattr(own, setting) for own in models.values())
    return ", ".join(f"`{value}`".replace("|", "\\|") if isinstance(value, str) else f"{value:g}" for value in values)


def print_plan(options: Options, models: Mapping[str, Settings]) -> None:
    """What the runs take, those of Part 2 for the models that the paper chose."""
    rows = [plan(on_share(own), name, gpus=options.gpus) for name, own in models.items()]
    whole = [name for name in ("paper-1", "paper-2") if name in models]
    rows += [plan(models[name], f"{name}, all pictures", gpus=options.gpus) for name in whole]
    print(plan_table(rows, options.gpu))


def main(argv: Sequence[str]) -> None:
    options, models = read_arguments(argv)
    if options.plan:
        print_plan(options, models)
    else:
        print(report.write(engine.run(study_of(options, models), options)))
