"""Study: does a language model forget text while it learns to read pictures, and do the learners of WINGS prevent that?

    python -m train.reproduce wings [--quick]            in miniature: a decoder that knows text alone, embedded scenes
    python -m train.reproduce wings --base google/siglip-so400m-patch14-384 --option language_model=Qwen/Qwen1.5-7B \\
        --stage-1-data jsonl:FILE --data jsonl:FILE      on models and data as the paper's

Zhang et al., "Wings: Learning Multimodal LLMs without Text-only Forgetting", NeurIPS 2024. Every row starts from one
language model and vision tower. Stage 1 trains the projector, and the visual learners of a row that has them; stage 2
what the row says. All rows of a seed learn the same pictures in the same order. Measures: text alone
(`eval/text/sentences.py`), pictures, and the attention shift (`eval/shift.py`). The first table is the paper's claim:
text that is kept with learners and without. In the second the decoder is frozen: learners, or LoRA of their size.

In miniature each seed has a decoder of its own (`train/embedded/text.py`), and an answer names what is in each of the
16 squares. --rates are factors of --lr in stage 2. One at which a tuning seed does not learn to read is not chosen.
Every other flag is one of `train.finetune` and holds for both stages of all rows.
"""

import json
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from eval import scenes
from eval.command import Ask, ask_of
from eval.records import Record
from eval.report import interval_text, markdown_table
from eval.run import ask_all
from eval.shift import measure, put_slot
from eval.statistics import estimate
from eval.text.sentences import TASKS, sentence
from lora import adapter
from lora.adapter import DECODER_TARGETS
from model.common import UserError, write_text
from model.device import choose_device
from model.paligemma import PaliGemma
from model.processor import Processor
from model.wings import Wings, route
from train.data.sources import read_records
from train.embedded.text import make_text_base
from train.flags import flag
from train.loop import Diverged
from train.optim import Rule, count, matching, trainable
from train.settings import Settings
from train.studies import engine, report
from train.studies.engine import Measure, Run, Study
from train.studies.measures import training_records, vqa_task
from train.studies.pool import Job
from train.studies.rules import Prediction
from train.studies.stages import StagedOptions, key_of, learn, read_stages
from train.systems.open import open_processor, open_stage, weights_dtype
from train.systems.wings import TEXT_BASE

PROJECTOR, LORA = r"multi_modal_projector\..*", r".*\.lora_[AB]\..*"
LEARNERS, DECODER = r".*\.(visual|textual|router)\..*", r"language_model\.(?!.*\.(visual|textual|router)\.).*"
QUESTION = "What is in the image?"  # of the miniature
READ = 0.9  # of the objects: a run that names fewer has not learned to read pictures
BEFORE = "before"  # as the row of a job: the language model before it sees a picture
TEXT, PICTURES, SHIFT, SPLITS = "text", "pictures", "shift", ("validation", "test")
LOOKED_AT = 100  # pictures whose attention is measured


@dataclass(frozen=True)
class Row:
    """learners: "none", "visual", or "routed" for both kinds with routers. decoder: "trained", "frozen", or "lora" with
    as many parameters as learners and routers have. rate: of stage 2, over --lr."""

    learners: str
    decoder: str
    rate: float = 1.0

    def factors(self, stage: int) -> dict[str, float]:
        """By pattern of names what is trained, and the factor of its rate. The projector's 5 is the paper's."""
        learners = {} if self.learners == "none" else {LEARNERS: 1.0}
        if stage == 1 or self.decoder == "frozen":
            return {PROJECTOR: 1.0} | learners
        return {PROJECTOR: 1.0, LORA: 1.0} if self.decoder == "lora" else {PROJECTOR: 5.0, DECODER: 1.0} | learners


ROWS = {
    "full": Row("none", "trained"),
    "visual": Row("visual", "trained"),
    "wings": Row("routed", "trained"),
    "lora": Row("none", "lora", 6.0),
    "learners": Row("routed", "frozen", 10.0),
}
BESIDE = {
    "tuning without learners": {"wings": "full", "visual": "full"},
    "LoRA of as many parameters": {"learners": "lora"},
}
PREDICTIONS = (
    Prediction("wings", TEXT, "better", "the paper's claim; an earlier run of this miniature could not tell"),
    Prediction("visual", TEXT, "worse", "the paper's reason for textual learners"),
)
PUBLISHED = (
    ("text-only forgetting; learners against it, and beside LoRA", "both tables"),
    ("LAWS before, in and after the picture", "as published, for each row"),
    ("attention shift and text, over more than 100 models", "the shift of each row; missing: so many models"),
    ("MMLU, MMMU and other benchmarks", "missing: a language model that can answer them is needed"),
    ("interleaved pictures and text (IIT)", "missing: its questions are not public"),
)
QUICK = {"rows": "full,wings", "seeds": 3, "limit": 200, "rates": (1.0,)}


@dataclass(frozen=True)
class Options(StagedOptions):
    """The flags of this study."""

    rows: str = flag(",".join(ROWS), f"of {', '.join(ROWS)}", metavar="NAME,…")


# Cells


def needs(job: Job) -> list[Job]:
    """The language model of a seed is a cell, from which those of all its rows start."""
    return [] if job.row == BEFORE else [Job(BEFORE, (), 0.0, job.seed)]


def make(stages: Mapping[int, Settings], sizes: Mapping[str, int], job: Job, folder: Path, *before: Path) -> dict:
    """Train a row in both stages, unless that is done, and give its scores on a split. sizes: examples by measure.

    The cell of the language model has no scores of a row; what it knows of text is in its facts. A run whose loss is no
    longer finite scores 0.
    """
    if job.row == BEFORE:
        model, processor = open_first(stages[1], job.seed, folder)
        return {"scores": {}, "facts": {TEXT: grade_text(model, processor, "test", sizes[TEXT])}}
    done = folder / "done.json"
    if not done.exists():
        try:
            cell = train(stages, sizes[TEXT], job, folder, before[0])
        except Diverged as error:
            scores = {name: [0.0] * size for name, size in sizes.items()}
            cell = {"scores": dict.fromkeys(SPLITS, scores), "facts": {"diverged": str(error)}}
        write_text(done, json.dumps(cell))
    cell = json.loads(done.read_text())
    return {"scores": cell["scores"][job.split], "facts": cell["facts"]}


def open_first(settings: Settings, seed: int, before: Path) -> tuple[Wings, Processor]:
    """The model of stage 1. The decoder of the miniature is trained in the folder `before`, unless it is there."""
    settings = replace(settings, seed=seed)
    if settings.base == TEXT_BASE and "language_model" not in settings.options:
        make_text_base(seed, before / "model")
        settings = replace(settings, base=str(before / "model"))
    device = choose_device(settings.device)
    model = open_stage(settings, weights_dtype(settings, device), device).eval()
    assert isinstance(model, Wings)
    return model, open_processor(settings, model)[0]


def train(stages: Mapping[int, Settings], limit: int, job: Job, folder: Path, before: Path) -> dict:
    """Both stages: the "scores" of each split, and "facts". Learners that are not trained add exactly 0."""
    row = Row(**dict(job.changes))
    (model, processor), seconds = open_first(stages[1], job.seed, before), 0.0
    for stage, settings in stages.items():
        settings = replace(settings, seed=job.seed)
        if stage == 2:
            settings = replace(settings, lr=settings.lr * row.rate * job.rate)
            model = route(model, job.seed) if row.learners == "routed" else model
        if stage == 2 and row.decoder == "lora":
            rank = lora_rank(model)
            torch.manual_seed(job.seed)  # LoRA's A is drawn here
            adapter.inject(model, DECODER_TARGETS, rank, 2.0 * rank)
        rules = [
            Rule(matching(model, pattern), settings.lr * factor, settings.weight_decay)
            for pattern, factor in row.factors(stage).items()
        ]
        records = pictures_to_learn(settings, stages[stage].seed)
        seconds += learn(model, processor, records, rules, settings, folder / f"{stage}")
    scores: dict[str, dict] = {split: {TEXT: grade_text(model, processor, split, limit)} for split in SPLITS}
    for split in SPLITS:
        scores[split][PICTURES] = grade_pictures(model, processor, settings, split, limit, folder)
    shift = measure(model, processor, [(r.pictures[0], put_slot(r.prefix)) for r in looked_at(settings)])
    scores["test"][SHIFT] = np.nan_to_num(shift.each, nan=1.0).tolist()  # a flat curve has no correlation
    facts = {"parameters": count(trainable(model).values()), "seconds": seconds, "laws": shift.shares.tolist()}
    for stage in stages:
        shutil.rmtree(folder / f"{stage}")
    return {"scores": scores, "facts": facts}


def lora_rank(model: Wings) -> int:
    """The smallest rank of LoRA with at least as many parameters as the learners and routers."""
    with torch.device("meta"):
        routed, plain = (Wings(replace(model.config, routed=routed)) for routed in (True, False))
    learners = count(p for name, p in routed.named_parameters() if re.fullmatch(LEARNERS, name))
    adapter.inject(plain, DECODER_TARGETS, 1, 1.0)
    return -(-learners // count(trainable(plain).values()))


# Data and measures


def pictures_to_learn(settings: Settings, shared_seed: int) -> Sequence[Record]:
    """Data on disk as it is; scenes with the picture at a random place in the question."""
    if not settings.is_embedded:
        return training_records(settings, shared_seed)
    dice, first = random.Random(f"places/{settings.seed}/{settings.stage}"), 10_000_000 * (settings.stage or 0)
    return [scene("train", first + n, dice.random(), settings.seed) for n in range(settings.samples)]


def scene(split: str, number: int, place: float = 0.5, seed: int = 0) -> Record:
    """All squares of an embedded scene. place: of the picture, as a share of the question's words."""
    sample = scenes.sample("scan", split, number, seed)
    turn = put_slot(QUESTION, place), sample.suffix
    return Record(f"scan/{number}", f"scan/{number}", (sample.scene.render,), (turn,))


def looked_at(settings: Settings) -> list[Record]:
    """Held-out records with a picture each, whose attention is measured."""
    if settings.is_embedded:
        return [scene("test", number) for number in range(LOOKED_AT)]
    return list(islice((r for r in read_records(settings, "validation") if len(r.pictures) == 1), LOOKED_AT))


def grade_text(model: PaliGemma, processor: Processor, split: str, limit: int) -> list[float]:
    """Right (1) or wrong (0) for `limit` sentences without a picture, the text tasks in turn."""
    asked = [sentence([*TASKS][n % len(TASKS)], split, n // len(TASKS)) for n in range(limit)]
    asks = [Ask(f"{number}", f"text {number}", (), s.prefix) for number, s in enumerate(asked)]
    return [float(answer == s.suffix) for answer, s in zip(ask_all(model, processor, asks), asked, strict=True)]


def grade_pictures(
    model: PaliGemma, processor: Processor, settings: Settings, split: str, limit: int, folder: Path
) -> list[float]:
    """VQA accuracy of held-out questions; of scenes the share of the objects that the answer names."""
    if not settings.is_embedded:
        return vqa_task(settings, split, limit).grade(model, processor, settings, folder)
    records = [scene(split, number) for number in range(limit)]
    answers = ask_all(model, processor, [ask_of(record) for record in records])
    return [share_named(answer or "", record.suffix) for answer, record in zip(answers, records, strict=True)]


def share_named(answer: str, squares: str) -> float:
    """The share of the objects in `squares` that `answer` has in the same place; empty squares do not count."""
    words = answer.split()
    right = [words[n : n + 1] == [name] for n, name in enumerate(squares.split()) if name != scenes.NONE]
    return sum(right) / len(right)


def has_read(cell: Mapping) -> bool:
    return float(np.mean(cell["scores"][PICTURES])) >= READ


# The study


def study_of(stages: Mapping[int, Settings], options: Options) -> Study:
    """Raises UserError for an unknown row."""
    names, limit, is_embedded = options.rows.split(","), options.limit, stages[2].is_embedded
    if unknown := [name for name in names if name not in ROWS]:
        raise UserError(f"--rows {unknown[0]}: choose of {', '.join(ROWS)}")
    beside = {
        title: {row: (control,) for row, control in table.items() if {row, control} <= {*names}}
        for title, table in BESIDE.items()
    }
    numbers = [f"{number}" for number in range(limit)]
    pictures = numbers if is_embedded else vqa_task(stages[2], "test", limit).groups
    shown, less = [record.key for record in looked_at(stages[2])], {"margin": 0.1, "less_is_better": True}
    measures = {
        TEXT: Measure("text alone", numbers, rungs=[[*TASKS][n % len(TASKS)] for n in range(limit)]),
        PICTURES: Measure("pictures", pictures, in_mean=False),
        SHIFT: Measure("attention shift", shown, unit="0 to 2", in_mean=False, **less),
    }
    return Study(
        name="wings",
        title=f"WINGS: base {stages[1].base}, data {' '.join(stages[2].data)}",
        rows={name: tuple(vars(ROWS[name]).items()) for name in names},
        make=partial(make, stages, {name: len(one.groups) for name, one in measures.items()}),
        key=key_of(stages, limit),
        measures=measures,
        main=TEXT,
        beside={title: table for title, table in beside.items() if table},
        rates=options.rates or ((0.5, 1.0, 2.0) if is_embedded else (1.0,)),
        needs=needs,
        usable=has_read if is_embedded else lambda cell: True,
        predictions=PREDICTIONS,
        more=more,
    )


def more(run: Run) -> list:
    """Text beside that of the language model before, LAWS by layer, and what the paper published."""
    before = run.get([Job(BEFORE, (), 0.0, seed) for seed in range(run.seeds)])
    known = 100 * np.array([cell["facts"][TEXT] for cell in before])
    kept = {row: estimate(run.scores(row)[TEXT] - known) for row in run.cells}
    facts = {row: [cell["facts"] for cell in cells] for row, cells in run.cells.items()}
    laws = {
        row: np.mean([one["laws"] for one in of_row], axis=0) for row, of_row in facts.items() if "laws" in of_row[0]
    }
    layers = [[row, *(" / ".join(f"{x:.0f}" for x in layer) for layer in of_row)] for row, of_row in laws.items()]
    head = ["row", *(f"layer {number}" for number in range(1, len(next(iter(laws.values()), ())) + 1))]
    body = [[row, interval_text(change, 1, signed=True)] for row, change in kept.items()]
    return report.sections(
        ("Text alone, change in points", markdown_table(["row", f"{known.mean():.1f} % before"], body)),
        ("LAWS of text before, picture, text after, % of the attention", markdown_table(head, layers)),
        ("The paper's experiments", markdown_table(["published", "here"], PUBLISHED)),
    )


def main(argv: Sequence[str] | None = None) -> None:
    options, stages = read_stages(Options, "wings", argv, __doc__, QUICK)
    print(report.write(engine.run(study_of(stages, options), options)))
