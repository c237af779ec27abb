"""Study: does a language model forget text while it learns to read pictures, and do the learners of
WINGS prevent that?

    python -m train.reproduce wings [--quick]    in miniature: a decoder that knows text alone
    python -m train.reproduce wings --base google/siglip-so400m-patch14-384 \\
        --option language_model=Qwen/Qwen1.5-7B --stage-1-data jsonl:FILE --data jsonl:FILE
                                                 on models and data as the paper's

Zhang et al., "Wings: Learning Multimodal LLMs without Text-only Forgetting", NeurIPS 2024. Stage 1
trains the projector, and the visual learners of a row that has learners; stage 2 what `ROWS` says.
All rows of a seed learn the same pictures in the same order. In the second table the decoder is
frozen: learners, or LoRA of their size.

In miniature each seed has a decoder of its own (`train/systems/text_base.py`), and an answer names what
is in each of the 16 squares of an embedded scene. --rates are factors of --lr in stage 2. One at
which a tuning seed does not learn to read is not chosen. Every other flag is one of
`train.finetune` and holds for both stages of all rows. Missing: MMLU, MMMU and the like, which need
a large language model; interleaved pictures and text (IIT), whose questions are not public.
"""

import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from eval.data import scenes
from eval.data.records import Record
from eval.question import Question, question_of
from eval.report import interval_text, markdown_table
from eval.systems.shift import GROUPS, measure, put_slot
from lora import adapter
from model.device import choose_device
from model.processor import Processor
from model.source import EMBEDDED
from model.systems.wings import Wings, route
from train.data.sources import read_split
from train.estimates import estimate
from train.flags import several
from train.model import load_start, open_processor
from train.optim import parameter_count, trainable
from train.settings import Settings
from train.studies import engine, report
from train.studies.cells import Job
from train.studies.measures import Task, asking, training_records, vqa_task
from train.studies.rules import Measure, exact_interval
from train.studies.training import Tasks, ask_tasks, facts_of, key_of
from train.systems.studies.stages import StagedOptions, read_stages, train_stage
from train.systems.text_base import TASKS, make_text_base, sentence
from train.systems.wings import TEXT_BASE, WingsSettings

# patterns of parameter names
PROJECTOR = r"multi_modal_projector\..*"
LORA = r".*\.lora_[AB]\..*"
VISUAL = r".*\.visual\..*"
LEARNERS = r".*\.(visual|textual|router)\..*"
DECODER = r"language_model\.(?!.*\.(visual|textual|router)\.).*"
# What stage 2 trains, and the factors of its rate. 5 is the paper's. LoRA has the size of learners
# and routers.
ROWS = {
    "full": {PROJECTOR: 5.0, DECODER: 1.0},
    "visual": {PROJECTOR: 5.0, DECODER: 1.0, VISUAL: 1.0},
    "wings": {PROJECTOR: 5.0, DECODER: 1.0, LEARNERS: 1.0},
    "lora": {PROJECTOR: 6.0, LORA: 6.0},
    "learners": {PROJECTOR: 10.0, LEARNERS: 10.0},
}
BEFORE = "before"  # a job: the language model of a seed, from which all its rows start
TEXT, PICTURES, SHIFT = "text", "pictures", "shift"
QUESTION = "What is in the image?"  # of the miniature
READ = 0.9  # of the objects: a run that names fewer has not learned to read pictures
LOOKED_AT = 100  # pictures whose attention is measured
BESIDE = {
    "tuning without learners": {"wings": "full", "visual": "full"},
    "LoRA of as many parameters": {"learners": "lora"},
}
PREDICTIONS = (
    ("wings", TEXT, "better", "the paper's claim; an earlier run of this miniature could not tell"),
    ("visual", TEXT, "worse", "the paper's reason for textual learners"),
)
QUICK = {"rows": ("full", "wings"), "seeds": 3, "limit": 200, "rates": (1.0,)}


@dataclass(frozen=True)
class Options(StagedOptions, WingsSettings):
    rows: tuple[str, ...] = several(ROWS, "(default: all)")


def make(
    stages: Sequence[Options],
    tasks: Tasks,
    job: Job,
    folder: Path,
    *before: Path,
) -> dict:
    """Train a row in both stages, and ask it. Learners that are not trained add exactly 0.

    The cell of the language model has no scores of a row; what it knows of text is in its facts.
    """
    first, second = (replace(settings, seed=job.seed) for settings in stages)
    if job.row == BEFORE:
        text = {"test": {TEXT: tasks["test"][TEXT]}}
        model, processor = open_first(first, folder)
        return {"scores": {}, "facts": ask_tasks(model, processor, first, text, folder)["test"]}
    # 1. stage 1
    model, processor = open_first(first, before[0])
    factors = dict(job.changes)
    first_factors = {PROJECTOR: 1.0}
    if factors.keys() & {VISUAL, LEARNERS}:
        first_factors[VISUAL] = 1.0
    seconds = train_stage(model, processor, pictures_to_learn(first), first, first_factors, folder)
    # 2. stage 2
    if LEARNERS in factors:
        model = route(model, job.seed)
    if LORA in factors:
        rank = lora_rank(model)
        torch.manual_seed(job.seed)  # LoRA's A is drawn here
        adapter.inject(model, adapter.DECODER_TARGETS, rank, 2.0 * rank)
    second = replace(second, lr=second.lr * job.rate)
    seconds += train_stage(model, processor, pictures_to_learn(second), second, factors, folder)
    # 3. what it says, and what it looks at; those pictures are held out from every seed
    scores = ask_tasks(model, processor, second, tasks, folder)
    looks = [(record.pictures[0], put_slot(record.prefix)) for record in looked_at(second)]
    shift = measure(model, processor, looks)
    # a flat curve has no correlation
    scores["test"][SHIFT] = np.nan_to_num(shift.each, nan=1.0).tolist()
    shutil.rmtree(folder / "stages")
    facts = facts_of(model, seconds=seconds, laws=shift.shares.tolist())
    if second.is_embedded and np.mean(scores["validation"][PICTURES]) < READ:
        facts["unusable"] = "it has not learned to read pictures"
    return {"scores": scores, "facts": facts}


def open_first(settings: Settings, before: Path) -> tuple[Wings, Processor]:
    """The model of stage 1. The decoder of the miniature is trained in the folder `before`, unless
    it is there."""
    if settings.base == TEXT_BASE and "language_model" not in settings.options:
        make_text_base(settings.seed, before / "model")
        settings = replace(settings, base=str(before / "model"))
    model = load_start(settings, choose_device(settings.device))
    return model, open_processor(settings, model)[0]


def lora_rank(model: Wings) -> int:
    """The smallest rank of LoRA with at least as many parameters as the learners and routers."""
    with torch.device("meta"):
        routed = Wings(replace(model.config, routed=True))
        plain = Wings(replace(model.config, routed=False))
    learners = parameter_count(
        p for name, p in routed.named_parameters() if re.fullmatch(LEARNERS, name)
    )
    adapter.inject(plain, adapter.DECODER_TARGETS, 1, 1.0)
    return -(-learners // parameter_count(trainable(plain).values()))


def pictures_to_learn(settings: Options) -> Sequence[Record]:
    """Data on disk as it is; scenes with the picture at a random place in the question."""
    if not settings.is_embedded:
        return training_records(settings)
    seed = settings.seed
    dice = random.Random(f"places/{seed}/{settings.stage}")
    first = 10_000_000 * settings.stage
    return [scene("train", first + n, dice.random(), seed) for n in range(settings.samples)]


def scene(split: str, number: int, place: float = 0.5, seed: int = 0) -> Record:
    """All squares of an embedded scene. place: of the picture, as a share of the question's
    words."""
    sample = scenes.sample("scan", split, number, seed)
    turn = put_slot(QUESTION, place), sample.suffix
    return Record(f"scan/{number}", f"scan/{number}", (sample.scene.render,), (turn,))


def looked_at(settings: Settings) -> list[Record]:
    """Held-out records with a picture each, whose attention is measured."""
    if settings.is_embedded:
        return [scene("test", number) for number in range(LOOKED_AT)]
    records = read_split(replace(settings, seed=0), "validation")  # as `training_records`
    return [record for record in records if len(record.pictures) == 1][:LOOKED_AT]


def tasks_of(options: Options, split: str) -> dict[str, Task]:
    """Text, and held-out questions about pictures; of scenes the share of the objects that the
    answer names."""
    kinds = [TASKS[n % len(TASKS)] for n in range(options.limit)]
    asks = []
    for n, kind in enumerate(kinds):
        prompt, answer = sentence(kind, split, n // len(TASKS))
        asks.append(Question(n, f"{n}", (), prompt, truth=answer))
    tasks = {TEXT: asking("text alone", asks, rungs=kinds)}
    if not options.is_embedded:
        pictures = vqa_task(options, split, options.limit)
        return tasks | {PICTURES: replace(pictures, in_mean=False)}
    records = [scene(split, n) for n in range(options.limit)]
    asks = [question_of(record, truth=record.suffix) for record in records]
    return tasks | {PICTURES: asking("pictures", asks, share_named, in_mean=False)}


def share_named(squares: str, answer: str) -> float:
    """The share of the objects in `squares` that `answer` has in the same place; empty squares do
    not count."""
    words = answer.split()
    right = []
    for n, name in enumerate(squares.split()):
        if name != scenes.NONE:
            right.append(words[n : n + 1] == [name])
    return sum(right) / len(right)


def study_of(stages: Sequence[Options]) -> engine.Study:
    first, options = stages
    beside = {}
    for title, table in BESIDE.items():
        for row, control in table.items():
            if {row, control} <= {*options.rows}:
                beside.setdefault(title, {})[row] = (control,)
    tasks = {split: tasks_of(options, split) for split in ("validation", "test")}
    start = first
    if first.base == TEXT_BASE:  # the cells train it
        start = replace(first, base=EMBEDDED)
    shift = Measure(
        "attention shift, 0 to 2",
        [record.key for record in looked_at(options)],
        is_share=False,
        margin=0.1,
        less_is_better=True,
        in_mean=False,
        failed=1.0,
    )
    return engine.Study(
        name="wings",
        title=f"WINGS: base {first.base}, data {' '.join(options.data)}",
        rows={name: tuple(ROWS[name].items()) for name in options.rows},
        make=partial(make, stages, tasks),
        key=key_of(stages, start.open_stage(torch.float32, torch.device("cpu")), tasks),
        measures={**tasks["test"], SHIFT: shift},
        main=TEXT,
        beside=beside,
        rates=options.first_rates,
        needs=lambda job: [] if job.row == BEFORE else [Job(BEFORE, (), 0.0, job.seed)],
        predictions=PREDICTIONS,
        more=blocks,
    )


def blocks(run: engine.Run) -> list:
    """Text beside that of the language model before, and LAWS by layer, as the paper shows them."""
    before = run.get([Job(BEFORE, (), 0.0, seed) for seed in range(run.seeds)])
    known = 100 * np.array([cell["facts"][TEXT] for cell in before])
    kept, laws = [], []
    for row in run.cells:
        # 1. text, and how many runs read pictures
        scores = run.scores(row)
        change = interval_text(estimate(scores[TEXT] - known), 1, signed=True)
        median = f"{np.median(scores[TEXT].mean(1)):.1f}"
        readers = (scores[PICTURES].mean(1) >= 100 * READ).sum()
        low, high = exact_interval(readers, run.seeds)
        reads = f"{readers} of {run.seeds}, {100 * low:.0f} to {100 * high:.0f} %"
        kept.append([row, change, median, reads])
        # 2. the attention to each group, by layer
        shares = [of_cell["laws"] for of_cell in run.facts(row)]
        if shares:
            line = [row]
            for by_layer in np.mean(shares, axis=0).T:
                line.append(" ".join(f"{share:.0f}" for share in by_layer))
            laws.append(line)
    readers = f"runs that read {100 * READ:.0f} % of the pictures"
    kept = markdown_table(["row", f"{known.mean():.1f} % before", "median, %", readers], kept)
    laws = markdown_table(["row", *GROUPS], laws)
    return ["## Text alone, change in points", kept, "## LAWS by layer, % of the attention", laws]


def main(argv: Sequence[str] | None = None) -> None:
    stages = read_stages(Options, argv, __doc__, QUICK)
    report.publish(study_of(stages), stages[1])
