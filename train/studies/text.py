"""Study: is a differential language model, trained from random weights, better than a plain one of the same size?

    python -m train.compare --rows text                          two million parameters, three seeds, two cores
    python -m train.compare --rows text --preset small --tokens 2e9 --batch-size 64 --device cuda --text DIR

In: text, by default the source of Python's standard library, and the two tasks of `eval/text/tasks.py`. Out:
comparison.md, comparison.json and pictures, with 95 % intervals over seeds and examples: likelihood by context,
needles, attention on the answer, examples in context.

Both kinds of attention have equal parameters to within 1 %, the same rows in the same order, and equal initial weights
where both have them. The same rates are tried for both, and chosen on the validation split of the first seed.
Differences are taken run by run, on the same examples of the test split.

A cell is one kind of attention, rate and seed, kept as a run folder that `eval/text/measures.py` measures too. Cells
are independent: `--processes` of them run side by side.
"""

import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

import torch
from PIL import Image

from eval.report import markdown_table
from eval.text.corpus import open_corpus
from eval.text.measures import DEPTHS, MEASURES, Scores, by_label, chance, chart, table
from eval.text.tasks import WORDS
from model.common import UserError, write_text
from model.differential import lambdas
from model.system_configs import TEXT_PRESETS
from train.distributed import join_world
from train.flags import flag
from train.optim import count
from train.signals import Interrupted, catch_signals
from train.studies import engine
from train.studies.engine import ScaledOptions, cell_folder, choose_rate, deciding, finish_cell, read_rates
from train.systems.text import TextSettings, check, learn, validation_loss
from weights.export import export_model

VERSION = 1  # of the code that decides a cell's result: raise it to compute all cells again

KINDS = ("plain", "differential")
CLAIM = (
    "Published (Ye et al. 2024): equal loss with about 65 % of the parameters or of the tokens, at billions of "
    "parameters and up to a trillion tokens. What {:,} parameters do after {:,.0f} tokens neither confirms nor refutes "
    "that."
)
PUBLISHED = (
    ("language modelling, 3B and 1T tokens, downstream tasks", "missing: a base of that size is not trained here"),
    ("scaling by size and by tokens", "missing: one size and budget a call; `--preset` and `--tokens` take others"),
    ("likelihood by context", "as published, but the models have learned needles and examples too"),
    ("key information retrieval by needles, length and depth", "by needles and by depth; length is that of training"),
    ("attention to the answer and to noise", "as published"),
    ("examples in context, many-shot", "as published, on an invented task; 32 examples at most"),
    ("robustness to the examples' order", "as published: the best order minus the worst"),
    ("contextual hallucination", "missing: needs a model that summarises, and a judge"),
)
AS_IN_TEXT = "as in train.text"
DEFAULTS = TextSettings(tokens=1e6, checkpoint_every=250)


@dataclass(frozen=True)
class TextOptions(ScaledOptions):
    """The flags of this study."""

    out: Path = flag(Path("runs/compare-text"), engine.OUT_HELP, metavar="DIR")
    rates: tuple[float, ...] = flag(
        (1.5e-3, 3e-3, 6e-3),
        "peak learning rates to try for both kinds (default: 1.5e-3,3e-3,6e-3)",
        type=read_rates,
        metavar="A,B,…",
    )
    search: float = flag(1.0, "share of the tokens that a rate is tried for", share=True, metavar="SHARE")
    limit: int = flag(100, "windows, tests of a kind, questions of a number", least=len(DEPTHS), metavar="N")
    threads: int = flag(torch.get_num_threads(), "CPU threads of all processes together", least=1, metavar="N")
    processes: int | None = flag(
        None, "cells side by side (default: 2 on a CPU of two cores or more, else 1)", least=1, metavar="N"
    )
    text: tuple[str, ...] = flag(
        (), "files or folders of plain text (default: Python's standard library)", nargs="*", metavar="PATH"
    )
    preset: str = flag(DEFAULTS.preset, AS_IN_TEXT, choices=list(TEXT_PRESETS))
    tokens: float = flag(DEFAULTS.tokens, AS_IN_TEXT)
    length: int = flag(DEFAULTS.length, AS_IN_TEXT)
    batch_size: int = flag(DEFAULTS.batch_size, AS_IN_TEXT)
    accumulate: int = flag(DEFAULTS.accumulate, AS_IN_TEXT)
    device: str = flag(DEFAULTS.device, AS_IN_TEXT)


def read_arguments(argv: Sequence[str] | None) -> tuple[TextOptions, TextSettings]:
    """The study's flags, and the settings of its runs. Raises UserError."""
    options = engine.read_options(TextOptions, "text", __doc__, argv)
    if not options.search > 0:
        raise UserError(f"--search is {options.search}, expected a share above 0")
    known = {field.name for field in fields(TextSettings)}
    given = {name: value for name, value in vars(options).items() if name in known}
    given |= {"tokens": options.tokens * options.scale, "corpus": str(options.out / "corpus")}
    settings = replace(DEFAULTS, **given)
    check(settings)
    if options.processes is None:
        on_cpu = options.device == "cpu" or options.device == "auto" and not torch.cuda.is_available()
        options = replace(options, processes=min(2, options.threads) if on_cpu else 1)
    return options, settings


@dataclass(frozen=True)
class Job:
    """A cell to compute. limit: tests of each kind; 0 measures nothing but the validation loss."""

    out: Path
    settings: TextSettings
    limit: int

    @property
    def title(self) -> str:
        own = self.settings
        return f"{own.attention}, rate {own.lr:g}, seed {own.seed}, {own.tokens:,.0f} tokens"


def run_cell(job: Job) -> dict:
    """{"parameters", "loss" on validation, "lambda" by layer, "seconds", "cpu_seconds", "folder", "panels"}.

    panels: `Scores` by name, empty for a limit of 0.
    """
    settings = job.settings
    corpus = open_corpus(Path(settings.corpus), settings.text, settings.vocab_size, WORDS)

    def work(folder: Path) -> dict:
        write_text(folder / "config.json", json.dumps(asdict(settings), indent=1) + "\n")
        started = time.perf_counter()
        model, _ = learn(settings, corpus, folder, join_world(settings.device))
        result = {
            "parameters": count(model.parameters()),
            "loss": validation_loss(model, corpus, settings),
            "lambda": [value.item() for value in lambdas(model).values()],
            "folder": str(folder.relative_to(job.out)),
            "panels": {},
        }
        if job.limit:
            for measure in MEASURES.values():
                found = measure(model, corpus, settings.length, job.limit)
                result["panels"] |= {name: scores._asdict() for name, scores in found.items()}
            shutil.rmtree(folder / "model", ignore_errors=True)
            export_model(model, folder / "model")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return result | {"seconds": time.perf_counter() - started}

    decide = deciding(settings) | {"text": corpus.digest, "corpus": ""}
    return finish_cell(cell_folder(job.out, VERSION, decide, job.limit) / "result.json", job.title, work)


def prepare_process(threads: int) -> None:
    """Set up a process that computes cells: its progress bars would overwrite those of the others."""
    torch.set_num_threads(threads)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def run_cells(jobs: Sequence[Job], processes: int) -> list[dict]:
    """`run_cell` of each job, side by side. A signal ends them all after their running steps, as `Interrupted`."""
    if processes == 1:
        return [run_cell(job) for job in jobs]
    threads = max(1, torch.get_num_threads() // processes)
    spawn = multiprocessing.get_context("spawn")
    with (
        catch_signals() as stop,
        ProcessPoolExecutor(processes, mp_context=spawn, initializer=prepare_process, initargs=(threads,)) as pool,
    ):
        waiting = running = {pool.submit(run_cell, job): job for job in jobs}
        try:
            while waiting:
                ended, waiting = wait(waiting, timeout=1, return_when=FIRST_COMPLETED)
                for done in ended:
                    result = done.result()
                    loss, seconds = f"{result['loss']:.4f}", f"{result['cpu_seconds']:.0f} CPU seconds"
                    print(f"{running[done].title}: validation loss {loss} ({seconds})", file=sys.stderr, flush=True)
                if stop:
                    raise Interrupted(stop[0])
        except BaseException:  # the other processes save what they have
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
        return [done.result() for done in running]


def compare(options: TextOptions, settings: TextSettings) -> dict:
    """Search rates, train and measure. Returns comparison.json."""
    rates, search = options.rates, options.search
    tried: dict[str, dict[float, float]] = {kind: {} for kind in KINDS}
    spent = {}
    if len(rates) > 1:
        short = replace(settings, tokens=settings.tokens * search, seed=0)
        limit = options.limit if search == 1 else 0  # a run with all tokens is a result too
        jobs = [Job(options.out, replace(short, attention=kind, lr=rate), limit) for rate in rates for kind in KINDS]
        for job, cell in zip(jobs, run_cells(jobs, options.processes), strict=True):
            tried[job.settings.attention][job.settings.lr] = cell["loss"]
            spent[job] = cell["cpu_seconds"]
    best = {
        kind: choose_rate({rate: -loss for rate, loss in losses.items()}) if losses else rates[0]
        for kind, losses in tried.items()
    }
    jobs = [
        Job(options.out, replace(settings, attention=kind, lr=best[kind], seed=seed), options.limit)
        for seed in range(options.seeds)
        for kind in KINDS
    ]
    rows: dict[str, list[dict]] = {kind: [] for kind in KINDS}
    for job, cell in zip(jobs, run_cells(jobs, options.processes), strict=True):
        rows[job.settings.attention].append(cell)
        spent[job] = cell["cpu_seconds"]
    return {
        "settings": asdict(settings),
        "seeds": options.seeds,
        "limit": options.limit,
        "search": search,
        "rates": {
            kind: {"chosen": best[kind], "validation": {f"{rate:g}": loss for rate, loss in losses.items()}}
            for kind, losses in tried.items()
        },
        "rows": {
            kind: [{name: value for name, value in cell.items() if name != "panels"} for cell in cells]
            for kind, cells in rows.items()
        },
        "cpu_seconds": round(sum(spent.values())),
        "panels": {
            name: {kind: [cell["panels"][name] for cell in cells] for kind, cells in rows.items()}
            for name in rows["plain"][0]["panels"]
        },
    }


def panels(summary: dict) -> dict[str, dict[str, list[Scores]]]:
    """The scores by panel and kind, a `Scores` for each seed."""
    return {
        name: {kind: [Scores(**run) for run in runs] for kind, runs in found.items()}
        for name, found in summary["panels"].items()
    }


def run_table(summary: dict) -> list[str]:
    """Rates, losses and λ."""
    body = []
    for kind, runs in summary["rows"].items():
        rates = summary["rates"][kind]
        tried = ", ".join(f"{rate}: {loss:.3f}" for rate, loss in rates["validation"].items())
        losses = ", ".join(f"{run['loss']:.3f}" for run in runs)
        each = zip(*(run["lambda"] for run in runs), strict=True)
        by_layer = ", ".join(f"{sum(values) / len(runs):.2f}" for values in each)
        body.append([kind, f"{rates['chosen']:g}", tried, losses, by_layer])
    losses = ["validation loss by rate", "validation loss by seed"]
    return markdown_table(["", "rate", *losses, "λ by layer, mean over seeds"], body)


def to_markdown(summary: dict, out: Path) -> str:
    """comparison.md."""
    settings, rows, seeds = summary["settings"], summary["rows"], summary["seeds"]
    plain, ours = (rows[kind][0]["parameters"] for kind in KINDS)
    blocks = [
        f"{plain:,} parameters plain, {ours:,} differential ({100 * (ours / plain - 1):+.2f} %); "
        f"{settings['tokens']:,.0f} tokens a run, rows of {settings['length']}; {seeds} seeds; "
        f"{summary['limit']} tests of each kind; "
        f"{summary['cpu_seconds']:,} CPU seconds. In brackets: 95 % intervals over seeds and examples; difference: "
        "differential minus plain on the same examples, n.s. where the interval holds 0. Chance: of one who repeats "
        "any answer that the text shows.",
        run_table(summary),
    ]
    tried = {kind: (rates["chosen"], list(rates["validation"])) for kind, rates in summary["rates"].items()}
    if tried["plain"][1]:
        blocks.append(f"Rates were tried on the first seed, for {100 * summary['search']:.0f} % of the tokens.")
    gains, lower_is_better = {}, set()
    for name, found in panels(summary).items():
        panel, by = next(iter(found.values()))[0], by_label(found)
        blocks += [f"## {panel.title}", f"![{name}]({name}.png)", table(panel, by, chance(name))]
        gains[panel.title] = engine.verdict(by["all"]["difference"])
        if panel.better < 0:
            lower_is_better.add(panel.title)
    rates = {kind: (float(f"{chosen:g}"), list(map(float, of_kind))) for kind, (chosen, of_kind) in tried.items()}
    pair = {"differential against plain": gains}
    sentences = engine.conclude(pair, seeds, rates, lower_is_better=lower_is_better, digits=3)
    folders = " ".join(str(out / run["folder"]) for kind in KINDS for run in rows[kind])
    return engine.compose(
        "Differential against plain, from nothing",
        *blocks,
        conclusions=[*sentences, CLAIM.format(ours, settings["tokens"])],
        published=PUBLISHED,
        end=[f"Measure the runs again: `python -m eval.text all {folders}`"],
    )


def draw(summary: dict) -> dict[str, list[Image.Image]]:
    """A chart of each panel, by file name."""
    found = panels(summary)
    return {f"{name}.png": [chart(next(iter(by.values()))[0], by_label(by))] for name, by in found.items()}


def main(argv: Sequence[str] | None = None) -> None:
    options, settings = read_arguments(argv)
    corpus = open_corpus(Path(settings.corpus), settings.text, settings.vocab_size, WORDS)
    print(f"{len(corpus.ids['train']):,} tokens of text to learn from", file=sys.stderr)
    workers = f"{options.processes} processes"
    write = partial(to_markdown, out=options.out)
    engine.run_study(options.out, lambda: compare(options, settings), write, draw, workers=workers, indent=None)
