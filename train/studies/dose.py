"""Study: do two attention maps help where noise limits one, and is it the second map that does?

The dose of noise is a cap of the logits.

    python -m train.compare --rows dose [--quick]

A soft cap c (Gemma 2's) bounds all logits to ±c, so that no weight of a map is more than e^2c times
another: the smaller c, the more attention a map has to leave on 15 distractors. Each cap is a study
with rates of its own, chosen on seeds that are not tested. The control is the mean of two plain
rows; what these differ by is what equal rows differ by. `plain + head norm` is `shared` with λ = 0:
A − λ·A = (1 − λ)·A, and the norm by head takes the factor away. `mean`, `gate`, `temperature` and
`sink` have one map and one part each of what a second one may do.

Twice: in the built task (`built.py`), where `best_of_one_map` is exact; and in the decoder of the
embedded base, with 4×4 needles. There attention was learned without a cap, and is lost with one:
the base first learns needles, every weight of its decoder, while the cap falls. Then rows learn by
LoRA under their cap. The place of a needle is not random, as classes are, so that an ideal reader
could tell it at any cap: the bound says nothing of it.
"""

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.data import scenes
from eval.report import interval_text, markdown_table
from model.attention import attention_modules
from model.paligemma import PaliGemma
from model.processor import Processor
from train.flags import flag, from_values, several
from train.model import load_base, make_optimizer, rules_of
from train.settings import Settings
from train.studies import built, report
from train.studies.cells import Job
from train.studies.engine import Run, Study, StudyOptions
from train.studies.rules import Measure
from train.studies.training import descend, facts_of, open_row, read_given
from weights.export import export_model
from weights.fingerprint import exact_fingerprint

CPU = torch.device("cpu")
CAPS = (None, 2.0, 1.0, 0.5, 0.25)
MILD = 1.0  # by the bound, nothing can be gained from here up
# caps of the base, BASE_STEPS each
FALLING = (None, None, 8.0, 5.6, 4.0, 2.8, 2.0, 1.4, 1.0, 0.7, 0.5, 0.35, 0.25)
LONGER = (None, 0.5)  # at these caps also TIMES the steps, but in a quick study
TIMES = 4
OTHERS = 15  # distractors
TUNING_SEEDS = (100, 101, 102)
PLAIN = ("plain", "plain again")
ROWS = {
    "plain": {"attention": "softmax"},
    # other initial values, the same examples
    "plain again": {"attention": "softmax", "drawn": 1000},
    "plain + head norm": {"attention": "shared", "one_map": True},
    "shared": {"attention": "shared"},
    "twin-small": {"attention": "twin", "mu": 0.25},
    "v2": {"attention": "v2", "exact": False},  # the published form
}
ROWS |= {kind: {"attention": kind} for kind in "dex difflora mean gate temperature sink".split()}
# Of each task below MILD, and why; from MILD up all are to be equivalent. Written before any row but
# plain was run at these caps; from difflora on, before those rows were, but after the others, of
# which none gained on needles
ONE_MAP = ("equivalent", "equivalent", "one map")
TWO_MAPS = ("better", "better", "a second map takes away what both have")
TWO_AGAIN = "two maps; on needles the others gained nothing"
# With e^c at the needle and e^-c elsewhere, o = f·(sum of all values) + (e^c - e^-c)/Z·(the needle's)
# with f = e^-c / Z, and the sum of all is n·Ū: λ = n·f leaves the needle alone
FLOOR = "λ = n·e^-c / Z leaves the needle alone; on needles two maps, which can do it too, did not"
PREDICTED = {
    "plain + head norm": ONE_MAP,
    "shared": ONE_MAP,
    "twin-small": TWO_MAPS,
    "v2": TWO_MAPS,
    "dex": ONE_MAP,
    "difflora": ("better", "equivalent", TWO_AGAIN),
    "mean": ("better", "equivalent", FLOOR),
    "gate": (
        "equivalent",
        "equivalent",
        "a positive factor of o, which changes no order of classes",
    ),
    "temperature": ("equivalent", "equivalent", "the cap bounds t·q too"),
    "sink": ("equivalent", "equivalent", "a positive factor of o that is nearly constant"),
}
CONTROL = "the mean of both plain rows"
# steps, and rates to try first
TASKS = {"built": (300, (0.01, 0.02, 0.04)), "needle": (50, (1.5e-3, 3e-3, 6e-3))}
TESTS = {"validation": 160, "test": 320}  # needles
POOL = 4096  # needles to learn from
BATCH = 32  # of a step
# rows on needles with rates of their own; the others take that of plain
TUNED = ("plain", "twin-small", "v2")
BASE = "base"  # a job, from which the rows of needles start
BASE_STEPS = 50
QUICK = {"tasks": ("built",), "seeds": 3, "rates": (0.02,)}
QUICK |= {"rows": (*PLAIN, "shared", "twin-small", "v2", "dex", "mean")}


@dataclass(frozen=True)
class Options(StudyOptions):
    seeds: int = flag(6, "runs of each row", least=1, metavar="N")
    rows: tuple[str, ...] = several(ROWS, "(default: all)")
    tasks: tuple[str, ...] = several(TASKS, "(default: both)")
    caps: tuple[str, ...] = several(map(str, CAPS), "of the logits")


# Needles


@cache
def needles(split: str, count: int) -> tuple:
    """Rows of 4×4 needles and the features of their pictures, which no row changes."""
    model = load_base(Settings(device="cpu"), CPU)
    processor = Processor.from_source("embedded")
    samples = [scenes.sample("n4o1", split, number) for number in range(count)]
    pixels = torch.stack([processor.pixels(sample.scene.render()) for sample in samples])
    with torch.no_grad():
        features = torch.cat([model.encode_images(part) for part in pixels.split(64)])
    rows = [processor.row_of(1, [(sample.prefix, sample.suffix)]) for sample in samples]
    return processor.pad(rows), features


def answers(model: PaliGemma, split: str, count: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (rows, 5, V) and tokens (rows, 5) of "row R column C" and the end, each after the
    right ones before."""
    batch, features = needles(split, count)
    ids = batch.input_ids[rows]
    known = ids, None, batch.token_type_ids[rows], batch.attention_mask[rows]
    logits = model(*known, image_features=features[rows], positions_to_keep=6)
    return logits[:, :-1], ids[:, -5:]


@torch.no_grad()
def found(model: PaliGemma, split: str) -> list[float]:
    """Of each needle of a split 1 where row and column are both the likeliest word."""
    scores = []
    for rows in torch.arange(TESTS[split]).split(64):
        logits, tokens = answers(model, split, TESTS[split], rows)
        right = logits.argmax(-1) == tokens
        scores += (right[:, 1] & right[:, 3]).float().tolist()
    return scores


def cap_logits(model: PaliGemma, cap: float | None) -> None:
    for attention in attention_modules(model.language_model).values():
        attention.softcap = cap


def learn(
    model: PaliGemma, optimizer: torch.optim.Optimizer, steps: int, schedule: str, seed: int
) -> None:
    """Steps on needles, in an order of the seed."""
    shuffled = torch.randperm(POOL, generator=torch.Generator().manual_seed(seed))
    order = shuffled.repeat(math.ceil(steps * BATCH / POOL))

    def losses() -> Iterator[Tensor]:
        for rows in order[: steps * BATCH].split(BATCH):
            logits, tokens = answers(model, "train", POOL, rows)
            yield F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    descend(model, optimizer, losses(), steps, schedule)


def make_base(folder: Path) -> dict:
    """Train the decoder of the embedded base on needles while the cap falls; folder/CAP is the base
    under a cap."""
    settings = Settings(device="cpu", attention="softmax", full=True, optimizer="muon", lr=0.005)
    model = load_base(settings, CPU).requires_grad_(False)
    rules = rules_of(model, settings, {r"language_model\..*": 1.0})
    optimizer = make_optimizer(model, rules, settings)
    known = {}
    for number, cap in enumerate(FALLING):
        cap_logits(model, cap)
        learn(model.train(), optimizer, BASE_STEPS, "constant", number)
        if cap in CAPS:
            shutil.rmtree(folder / str(cap), ignore_errors=True)
            export_model(model, folder / str(cap))
            known[str(cap)] = found(model.eval(), "validation")
    return {"scores": {"validation": known}, "facts": {}}


def needs(job: Job) -> list[Job]:
    """Rows on needles start from the base."""
    is_on_needles = ("task", "needle") in job.changes
    return [Job(BASE, (), 0.0, 0)] if is_on_needles else []


def make(job: Job, folder: Path, *base: Path) -> dict:
    """The base, or a row of either task."""
    if job.row == BASE:
        return make_base(folder)
    changes = dict(job.changes)
    if changes.pop("task") == "built":
        return built.train(job.rate, job.seed, **changes)
    return train(base[0], job.rate, job.seed, **changes)


def train(
    base: Path,
    rate: float,
    seed: int,
    attention: str,
    cap: float | None,
    steps: int,
    drawn=0,
    **graft,
) -> dict:
    """A row on needles: it starts from the base under its cap, and learns by LoRA. graft: of
    `open_row`."""
    settings = Settings(base=str(base / str(cap)), device="cpu", lr=rate, seed=seed + drawn)
    model = load_base(settings, CPU)
    cap_logits(model, cap)
    if attention == "softmax":
        settings = replace(settings, r=20, alpha=40.0)  # as many parameters as the largest row
    model, optimizer = open_row(model, settings, attention, **graft)
    learn(model.train(), optimizer, steps, "cosine", seed)
    scores = {split: {"needle": found(model.eval(), split)} for split in TESTS}
    return {"scores": scores, "facts": facts_of(model)}


# The studies, one for each dose


def doses_of(options: Options) -> list[tuple[str, float | None, int]]:
    """Task, cap, and how many times the steps; the first needles choose the rates of all."""
    caps = [None if cap == "None" else float(cap) for cap in options.caps]
    doses = [(task, cap, 1) for task in options.tasks for cap in caps]
    longer = [] if options.quick else [cap for cap in caps if cap in LONGER]
    return doses + [(task, cap, TIMES) for task in options.tasks for cap in longer]


def study_of(options: Options, task: str, cap: float | None, times: int) -> Study:
    steps, rates = TASKS[task]
    dose = {"task": task, "cap": cap, "steps": times * steps}
    # the same questions for all: intervals are of runs alone
    if task == "built":
        dose["others"] = OTHERS
        measure = Measure(task, [0] * built.TESTS, 100 / built.CLASSES)
        key = ""
        tuned = ()
    else:
        measure = Measure(task, [0] * TESTS["test"], 100 / 16)
        key = exact_fingerprint(load_base(Settings(device="cpu"), CPU))
        tuned = tuple(row for row in TUNED if row in options.rows)
    plain = tuple(row for row in options.rows if row in PLAIN)
    variants = [row for row in options.rows if row not in PLAIN]
    predictions = []
    for row in variants:
        *by_task, reason = PREDICTED[row]
        verdict = dict(zip(TASKS, by_task, strict=True))[task]
        if not cap or cap >= MILD:
            verdict = "equivalent"
        predictions.append((row, task, verdict, reason))
    # what equal rows differ by
    chance = {plain[-1]: plain[:1]}
    return Study(
        name=f"dose, {task}, cap {cap}, {times} x",
        title="Two attention maps at a dose of noise",
        rows={row: tuple((dose | ROWS[row]).items()) for row in options.rows},
        make=make,
        key=key,
        measures={task: measure},
        beside={CONTROL: dict.fromkeys(variants, plain), "plain, A/A": chance},
        rates=options.rates or rates,
        main=task,
        tuning_seeds=TUNING_SEEDS,
        plain=plain,
        tuned=tuned,
        needs=needs,
        predictions=tuple(predictions),
    )


def compute_doses(options: Options, first: Run) -> dict:
    """The runs by (task, times), and by cap; all but the first are computed here, as its parts.
    Longer runs take the rates of shorter ones, and needles of all caps those of the first, whose
    cells take the most time."""
    runs, rates = {}, {}
    for task, cap, times in doses_of(options):
        run = first
        place = (task, cap) if task == "built" else task
        if runs:
            run = Run(study_of(options, task, cap, times), first.out, first.jobs, first.seeds)
            if place in rates:
                run.rates = rates[place]
                run.study = replace(run.study, rates=())
            run.compute()
            first.parts.append(run)
        rates[place] = run.rates
        runs.setdefault((task, times), {})[cap] = run
    return runs


def blocks(options: Options, first: Run) -> list:
    """A table of each task."""
    tables = []
    for (task, times), by_cap in compute_doses(options, first).items():
        # 1. the controls, and differences by cap and row
        head, controls = ["row"], ["plain: right answers"]
        gaps = {}
        for cap, run in by_cap.items():
            head.append(f"cap {cap}")
            controls.append(f"{run.scores('plain')[task].mean():.1f} %")
            gaps[cap] = {
                row: gap for table in run.tables.values() for (row, _), gap in table.items()
            }
        # 2. a line a row
        body = [controls]
        for row in next(iter(gaps.values())):
            of_row = [of_cap[row] for of_cap in gaps.values()]
            texts = [f"{interval_text(gap, 1, signed=True)} {gap['verdict']}" for gap in of_row]
            body.append([row, *texts])
        title = f"{task}, {times} × steps"
        tables += [f"## {title}", markdown_table(head, body)]
    return tables


def main(argv: Sequence[str] | None = None) -> None:
    given = read_given(Options, argv, "train.compare --rows dose", __doc__, QUICK)
    options = from_values(Options, given)
    first = replace(study_of(options, *doses_of(options)[0]), more=partial(blocks, options))
    report.publish(first, options)
