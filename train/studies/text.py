"""Study: is a differential language model, trained from random weights, better than a plain one of the same size?

    python -m train.compare --rows text                          two million parameters, three seeds, two cores
    python -m train.compare --rows text --preset small --tokens 2e9 --batch-size 64 --device cuda --text DIR

In: text, by default the source of Python's standard library, and the two tasks of `eval/text/tasks.py`. Out:
comparison.md, comparison.json and pictures, with 95 % intervals over seeds and examples. Models that learn from plain
text alone: likelihood by context, and by size and by tokens. Models that learn from the tasks too: likelihood by
context once more, needles, attention on the answer, examples in context.

Both kinds of attention have equal parameters to within 1 %, the same rows in the same order, and equal initial weights
where both have them. The same rates are tried for both, at the size of --preset, and chosen on the validation split of
the first seed; other sizes and numbers of tokens take them too. Differences are taken run by run, on the same examples
of the test split. `--scale 0.1 --seeds 1 --limit 10` is a trial of minutes, `--plan` only prints what the runs take.

A cell is one kind of attention, text, size, number of tokens, rate and seed, kept as a run folder that
`eval/text/measures.py` measures too. Cells are independent: `--processes` of them run side by side.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch

from eval.text.corpus import Corpus, find_corpus, kept_corpus, open_corpus
from eval.text.measures import DEPTHS, MEASURES, Scores, context_bins
from eval.text.tasks import WORDS
from model.common import UserError, write_text
from model.device import autocast_dtype
from model.differential import lambdas
from model.system_configs import TEXT_PRESETS, TextModelConfig
from train.cost import step_costs
from train.distributed import join_world
from train.flags import flag
from train.optim import count
from train.plan import PlanRow, plan_table
from train.recipes import GPUS
from train.studies import engine
from train.studies.engine import ScaledOptions, cell_folder, deciding, finish_cell, read_rates
from train.studies.rules import best_rate
from train.studies.text_report import KINDS, draw, to_markdown
from train.systems.text import TextOrder, TextSettings, check, learn, text_loss, validation_loss
from weights.checkpoint import empty_model
from weights.export import export_model

VERSION = 2  # of the code that decides a cell's result: raise it to compute all cells again

MIXTURES = {"text": {"needles": 0.0, "examples": 0.0}, "tasks": {}}  # what is learned: plain text, or the tasks too
MEASURED = {"text": ("nll",), "tasks": tuple(MEASURES)}
SHARES = (0.25, 0.5)  # of the tokens, for the loss by tokens
SIZES = ("0.2m", "0.3m")  # beside the default size, for the loss by size
AS_IN_TEXT = "as in train.text"
DEFAULTS = TextSettings(preset="0.6m", tokens=3e5, checkpoint_every=250)


@dataclass(frozen=True)
class TextOptions(ScaledOptions):
    """The flags of this study."""

    out: Path = flag(Path("runs/compare-text"), engine.OUT_HELP, metavar="DIR")
    rates: tuple[float, ...] = flag(
        (3e-3, 6e-3, 1.2e-2),
        "peak learning rates to try for both kinds (default: 3e-3,6e-3,1.2e-2)",
        type=read_rates,
        metavar="A,B,…",
    )
    search: float = flag(0.5, "share of the tokens that a rate is tried for", share=True, metavar="SHARE")
    limit: int = flag(100, "windows, tests of a kind, questions of a number", least=len(DEPTHS), metavar="N")
    threads: int = flag(torch.get_num_threads(), "CPU threads of all processes together", least=1, metavar="N")
    processes: int | None = flag(
        None, "cells side by side (default: 2 on a CPU of two cores or more, else 1)", least=1, metavar="N"
    )
    text: tuple[str, ...] = flag(
        (), "files or folders of plain text (default: Python's standard library)", nargs="*", metavar="PATH"
    )
    preset: str = flag(DEFAULTS.preset, AS_IN_TEXT, choices=list(TEXT_PRESETS))
    sizes: tuple[str, ...] = flag(
        (),
        "more presets, for the loss by size (default: 0.2m 0.3m, none for another --preset; published: 830m 1.4b 2.8b "
        "6.8b 13.1b)",
        nargs="*",
        choices=list(TEXT_PRESETS),
        metavar="PRESET",
    )
    tokens: float = flag(DEFAULTS.tokens, AS_IN_TEXT)
    length: int = flag(DEFAULTS.length, AS_IN_TEXT)
    batch_size: int = flag(DEFAULTS.batch_size, AS_IN_TEXT)
    accumulate: int = flag(DEFAULTS.accumulate, AS_IN_TEXT)
    device: str = flag(DEFAULTS.device, AS_IN_TEXT)
    plan: bool = flag(False, "train nothing: print what the runs take (memory, disk, hours)")
    gpu: str = flag("H100", "GPU of --plan", choices=list(GPUS))


def read_arguments(argv: Sequence[str] | None) -> tuple[TextOptions, TextSettings]:
    """The study's flags, and the settings of its runs. Raises UserError."""
    options = engine.read_options(TextOptions, "text", __doc__, argv)
    if not options.search > 0:
        raise UserError(f"--search is {options.search}, expected a share above 0")
    if not options.sizes and options.preset == DEFAULTS.preset:
        options = replace(options, sizes=SIZES)
    known = {field.name for field in fields(TextSettings)}
    given = {name: value for name, value in vars(options).items() if name in known}
    given |= {"tokens": options.tokens * options.scale, "corpus": str(options.out / "corpus")}
    settings = replace(DEFAULTS, **given)
    check(settings)
    for size in options.sizes:
        if TEXT_PRESETS[size].vocab_size != settings.vocab_size:
            raise UserError(
                f"--sizes {size}: has another vocabulary than --preset {options.preset}: losses would differ"
            )
    if options.processes is None:
        options = replace(options, processes=engine.default_processes(options.device, options.threads))
    return options, settings


@dataclass(frozen=True)
class Job:
    """A cell to compute. limit: windows, and tests of each kind; 0 measures nothing but the validation loss."""

    out: Path
    settings: TextSettings
    limit: int

    @property
    def mixture(self) -> str:
        return "tasks" if self.settings.needles or self.settings.examples else "text"

    @property
    def title(self) -> str:
        own = self.settings
        about = f"{own.preset}, {own.attention}, {self.mixture}"
        return f"{about}, rate {own.lr:g}, seed {own.seed}, {own.tokens:,.0f} tokens"


def run_cell(job: Job) -> dict:
    """{"parameters", "loss" on validation, "lambda" by layer, "seconds", "cpu_seconds", "folder", "panels"}.

    panels: `Scores` by name, empty for a limit of 0.
    """
    settings = job.settings
    corpus = kept_corpus(Path(settings.corpus))  # `main` has prepared it

    def work(folder: Path) -> dict:
        write_text(folder / "config.json", json.dumps(asdict(settings), indent=1) + "\n")
        started = time.perf_counter()
        model, _ = learn(settings, corpus, folder, join_world(settings.device))
        result = {
            "parameters": count(model.parameters()),
            "tokens": settings.steps * settings.rows * settings.length,
            "loss": validation_loss(model, corpus, settings),
            "lambda": [value.item() for value in lambdas(model).values()],
            "folder": str(folder.relative_to(job.out)),
            "panels": {},
        }
        if job.limit:
            for name in MEASURED[job.mixture]:
                found = MEASURES[name](model, corpus, settings.length, job.limit)
                result["panels"] |= {name: scores._asdict() for name, scores in found.items()}
            shutil.rmtree(folder / "model", ignore_errors=True)
            export_model(model, folder / "model")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return result | {"seconds": time.perf_counter() - started}

    decide = deciding(settings) | {"text": corpus.digest, "corpus": ""}
    return finish_cell(cell_folder(job.out, VERSION, decide, job.limit) / "result.json", job.title, work)


def run_cells(jobs: Sequence[Job], processes: int) -> list[dict]:
    """`run_cell` of each job, side by side."""

    def spell_cell(job: Job, cell: dict) -> str:
        return f"{job.title}: validation loss {cell['loss']:.4f} ({cell['cpu_seconds']:.0f} CPU seconds)"

    return engine.side_by_side(run_cell, jobs, processes, spell_cell)


Row = tuple[str, str]  # a mixture and a kind of attention
Point = tuple[str, float]  # a size and a share of the tokens


def make_job(options: TextOptions, settings: TextSettings, row: Row, limit: int, **changes) -> Job:
    return Job(options.out, replace(settings, attention=row[1], **MIXTURES[row[0]], **changes), limit)


def search_rates(
    options: TextOptions, settings: TextSettings, spent: dict[Job, float]
) -> dict[Row, dict[float, float]]:
    """The validation loss of each row by rate, on the first seed; none if there is only one rate."""
    tried: dict[Row, dict[float, float]] = {row: {} for row in product(MIXTURES, KINDS)}
    if len(options.rates) > 1:
        limit = options.limit if options.search == 1 else 0  # a run with all tokens is a result too
        search = list(product(options.rates, tried))
        short = {"tokens": settings.tokens * options.search, "seed": 0}
        jobs = [make_job(options, settings, row, limit, lr=rate, **short) for rate, row in search]
        for job, (rate, row), cell in zip(jobs, search, run_cells(jobs, options.processes), strict=True):
            tried[row][rate] = cell["loss"]
            spent[job] = cell["cpu_seconds"]
    return tried


def compare(options: TextOptions, settings: TextSettings) -> dict:
    """Search rates, train and measure. Returns comparison.json."""
    spent: dict[Job, float] = {}
    tried = search_rates(options, settings, spent)
    best = {
        row: best_rate({rate: -loss for rate, loss in losses.items()}, margin=0) if losses else options.rates[0]
        for row, losses in tried.items()
    }
    main: Point = (settings.preset, 1.0)
    points = [main, *((size, 1.0) for size in options.sizes if size != settings.preset)]
    points += [(settings.preset, share) for share in SHARES]
    wanted = [(row, point) for row in tried for point in (points if row[0] == "text" else points[:1])]
    every = [(*key, seed) for key in wanted for seed in range(options.seeds)]
    jobs = [
        make_job(
            options, settings, row, options.limit, lr=best[row], seed=seed, preset=size, tokens=share * settings.tokens
        )
        for row, (size, share), seed in every
    ]
    found: dict[tuple[Row, Point], list[dict]] = {key: [] for key in wanted}
    for job, (row, point, _), cell in zip(jobs, every, run_cells(jobs, options.processes), strict=True):
        found[row, point].append(cell)
        spent[job] = cell["cpu_seconds"]
    return {
        "settings": asdict(settings),
        "seeds": options.seeds,
        "limit": options.limit,
        "search": options.search,
        "rates": {
            name_of(row): {"chosen": best[row], "validation": {f"{rate:g}": loss for rate, loss in losses.items()}}
            for row, losses in tried.items()
        },
        "rows": {name_of(row): [without_panels(cell) for cell in found[row, main]] for row in tried},
        "cpu_seconds": round(sum(spent.values())),
        "scaling": [
            scaling_point(point, {kind: found[("text", kind), point] for kind in KINDS}, settings) for point in points
        ],
        "panels": {
            "nll-tasks" if (mixture, name) == ("tasks", "nll") else name: {
                kind: [cell["panels"][name] for cell in found[(mixture, kind), main]] for kind in KINDS
            }
            for mixture in MIXTURES
            for name in found[(mixture, KINDS[0]), main][0]["panels"]
        },
    }


def name_of(row: Row) -> str:
    return f"{row[1]}, {row[0]}"


def without_panels(cell: dict) -> dict:
    return {name: value for name, value in cell.items() if name != "panels"}


def scaling_point(point: tuple[str, float], runs: dict[str, list[dict]], settings: TextSettings) -> dict:
    """A size and a share of the tokens: the loss of each window of each run, and the documents of the windows."""
    bins = context_bins(settings.length)
    widths = [(last - first) / settings.length for first, last in bins]
    scores = {kind: [Scores(**cell["panels"]["nll"]) for cell in cells] for kind, cells in runs.items()}
    return {
        "preset": point[0],
        "share": point[1],
        "parameters": {kind: cells[0]["parameters"] for kind, cells in runs.items()},
        "tokens": runs["plain"][0]["tokens"],
        "losses": {
            kind: [(np.reshape(one.values, (-1, len(bins))) @ widths).tolist() for one in own]
            for kind, own in scores.items()
        },
        "documents": scores["plain"][0].groups[:: len(bins)],
    }


def plan_rows(options: TextOptions, settings: TextSettings, corpus: Corpus) -> list[PlanRow]:
    """What a run of each size takes: tasks and tokens change no step."""
    rows = []
    batch = TextOrder(corpus, replace(settings, **MIXTURES["text"])).batch(0)
    autocast = autocast_dtype(settings.autocast, torch.device("cuda" if options.device == "auto" else options.device))
    shown = [f"⟦{text}⟧" for text in corpus.tokenizer.decode(batch.targets[:2].tolist())]
    for size, kind in product(dict.fromkeys((settings.preset, *options.sizes)), KINDS):
        model = empty_model(TextModelConfig.of(TEXT_PRESETS[size], kind == "differential"))
        parameters = count(model.parameters())
        costs = step_costs(model, batch, autocast, settings.accumulate > 1, text_loss)
        rows.append(
            PlanRow(
                name=f"{size}, {kind}",
                gpus=1,
                parameters=parameters,
                trainable=parameters,
                rows=settings.batch_size,
                step_rows=settings.rows,
                samples=settings.steps * settings.rows,
                steps=settings.steps,
                tokens=settings.steps * settings.rows * settings.length,
                plain=costs[0],
                checkpointed=costs[1],
                disk=4 * parameters,  # checkpoints are deleted when a cell is finished
                flops=costs[0].flops * settings.accumulate * settings.steps,
                batch=tuple(shown),
                left_out=(),
            )
        )
    return rows


def print_plan(options: TextOptions, settings: TextSettings) -> None:
    with tempfile.TemporaryDirectory() as folder:
        corpus = find_corpus(Path(settings.corpus)) or open_corpus(
            Path(folder), settings.text, settings.vocab_size, WORDS
        )
        print(plan_table(plan_rows(options, settings, corpus), options.gpu))
    search = len(options.rates) * len(MIXTURES) * options.search if len(options.rates) > 1 else 0
    print(
        f"\nOf {settings.preset} each kind has {search + options.seeds * (len(MIXTURES) + sum(SHARES)):g} such runs "
        f"(rates, seeds, plain text and tasks, shares of the tokens), of another size {options.seeds}. Several GPUs: "
        "torchrun -m train.text, for one run each."
    )


def main(argv: Sequence[str] | None = None) -> None:
    options, settings = read_arguments(argv)
    if options.plan:
        print_plan(options, settings)
        return
    corpus = open_corpus(Path(settings.corpus), settings.text, settings.vocab_size, WORDS)
    print(f"{len(corpus.ids['train']):,} tokens of text to learn from", file=sys.stderr)
    workers = f"{options.processes} processes"
    write = partial(to_markdown, out=options.out)
    engine.run_study(options.out, lambda: compare(options, settings), write, draw, workers=workers, indent=None)
