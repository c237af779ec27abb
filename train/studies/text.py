"""Compare: is a differential language model, trained from nothing, better than a plain one of the same size?

    python -m train.compare --rows text                          two million parameters, three seeds, two cores
    python -m train.compare --rows text --preset small --tokens 2e9 --batch-size 64 --device cuda --text DIR

In: text, by default the source of Python's standard library, and the two tasks of `eval/text/tasks.py`. Out:
comparison.md, comparison.json and pictures, with 95 % intervals over seeds and examples: likelihood by context,
needles, attention on the answer, examples in context. Next: nothing; these are the results.

What makes a difference believable: equal parameters to within 1 %; the same rows in the same order, and the same
weights at the start wherever both have them; the same rates tried for both, chosen on the validation split of the first
seed; several seeds, and differences run by run on the same examples of the test split.

A cell is one kind of attention, rate and seed, kept as a run folder that `eval/text/measures.py` measures too; an
interrupted comparison goes on. Cells are independent: `--processes` of them run side by side.
"""

import argparse
import dataclasses
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import torch

from eval import figures
from eval.report import interval_text
from eval.text.corpus import open_corpus
from eval.text.measures import MEASURES, Scores, by_label, chance, chart, table
from eval.text.tasks import WORDS
from model.common import UserError, write_text
from model.differential import lambdas
from model.system_configs import TEXT_PRESETS
from train.distributed import join_world
from train.optim import count
from train.signals import Interrupted, catch_signals, same_command_goes_on
from train.studies.cells import cell
from train.systems.text import TextSettings, check, learn, validation_loss
from weights.export import export_model

VERSION = 1  # of the code that decides a cell's result: raise it, and all cells are done again

KINDS = ("plain", "differential")
CLAIM = (
    "Published (Ye et al. 2024): equal loss with about 65 % of the parameters or of the tokens, at billions of "
    "parameters and up to a trillion tokens. What {:,} parameters do after {:,.0f} tokens neither confirms nor refutes "
    "that."
)


def run_cell(out: Path, settings: TextSettings, limit: int) -> dict:
    """{"parameters", "loss" on validation, "lambda" by layer, "seconds", "folder", "panels": {name: Scores}} of a run;
    without panels for a `limit` of 0."""
    corpus = open_corpus(Path(settings.corpus), settings.text, settings.vocab_size, WORDS)

    def work(folder: Path) -> dict:
        write_text(folder / "config.json", json.dumps(dataclasses.asdict(settings), indent=1) + "\n")
        started, cpu = time.perf_counter(), time.process_time()
        model, _ = learn(settings, corpus, folder, join_world(settings.device))
        result = {
            "parameters": count(model.parameters()),
            "loss": validation_loss(model, corpus, settings),
            "lambda": [value.item() for value in lambdas(model).values()],
            "folder": str(folder.relative_to(out)),
            "panels": {},
        }
        if limit:
            for measure in MEASURES.values():
                found = measure(model, corpus, settings.length, limit)
                result["panels"] |= {name: scores._asdict() for name, scores in found.items()}
            shutil.rmtree(folder / "model", ignore_errors=True)
            export_model(model, folder / "model")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        return result | {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}

    decides = dataclasses.asdict(settings) | {"text": corpus.digest, "corpus": "", "checkpoint_every": 0}
    title = f"{settings.attention}, rate {settings.lr:g}, seed {settings.seed}, {settings.tokens:,.0f} tokens"
    return cell(out, title, (VERSION, decides, limit), work)


def quiet(threads: int) -> None:
    """Prepare a process that computes cells: its bars would overwrite those of the others."""
    torch.set_num_threads(threads)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def run_cells(jobs: Sequence[tuple[Path, TextSettings, int]], processes: int) -> list[dict]:
    """`run_cell` of each job, side by side. A signal ends them all after their running steps, as `Interrupted`."""
    if processes == 1:
        return [run_cell(*job) for job in jobs]
    threads = max(1, torch.get_num_threads() // processes)
    spawn = multiprocessing.get_context("spawn")
    with (
        catch_signals() as stop,
        ProcessPoolExecutor(processes, mp_context=spawn, initializer=quiet, initargs=(threads,)) as pool,
    ):
        waiting = running = {pool.submit(run_cell, *job): job for job in jobs}
        try:
            while waiting:
                ended, waiting = wait(waiting, timeout=1, return_when=FIRST_COMPLETED)
                for done in ended:
                    (_, own, _), result = running[done], done.result()
                    print(
                        f"{own.attention}, rate {own.lr:g}, seed {own.seed}, {own.tokens:,.0f} tokens: validation "
                        f"loss {result['loss']:.4f} ({result['cpu_seconds']:.0f} CPU seconds)",
                        file=sys.stderr,
                        flush=True,
                    )
                if stop:
                    raise Interrupted(stop[0])
        except BaseException:  # the others save what they have
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise
        return [done.result() for done in running]


def compare(
    settings: TextSettings, out: Path, seeds: int, rates: Sequence[float], search: float, limit: int, processes: int
) -> dict:
    """Search rates, train and measure; everything that the report says, as JSON."""
    short = replace(settings, tokens=settings.tokens * search)
    measured = limit if search == 1 else 0  # a whole run is a result
    jobs = [(out, replace(short, attention=kind, lr=rate, seed=0), measured) for rate in rates for kind in KINDS]
    tried: dict[str, dict[float, float]] = {kind: {} for kind in KINDS}
    spent = 0.0
    if len(rates) > 1:
        for (_, own, _), result in zip(jobs, run_cells(jobs, processes), strict=True):
            tried[own.attention][own.lr] = result["loss"]
            spent += result["cpu_seconds"]
    best = {kind: min(losses, key=losses.get) if (losses := tried[kind]) else rates[0] for kind in KINDS}
    jobs = [
        (out, replace(settings, attention=kind, lr=best[kind], seed=seed), limit)
        for seed in range(seeds)
        for kind in KINDS
    ]
    results = run_cells(jobs, processes)
    if search == 1:
        spent -= sum(result["cpu_seconds"] for (_, own, _), result in zip(jobs, results, strict=True) if own.seed == 0)
    by_kind = {
        kind: [result for (_, own, _), result in zip(jobs, results, strict=True) if own.attention == kind]
        for kind in KINDS
    }
    return {
        "settings": dataclasses.asdict(settings),
        "seeds": seeds,
        "limit": limit,
        "search": search,
        "rates": {
            kind: {"chosen": best[kind], "validation": {f"{rate:g}": loss for rate, loss in tried[kind].items()}}
            for kind in KINDS
        },
        "rows": {
            kind: [{name: value for name, value in run.items() if name != "panels"} for run in runs]
            for kind, runs in by_kind.items()
        },
        "cpu_seconds": round(spent + sum(result["cpu_seconds"] for result in results)),
        "panels": {
            name: {kind: [run["panels"][name] for run in runs] for kind, runs in by_kind.items()}
            for name in results[0]["panels"]
        },
    }


def tell(summary: dict, out: Path) -> str:
    """comparison.md."""
    settings, rows, seeds = summary["settings"], summary["rows"], summary["seeds"]
    plain, ours = (rows[kind][0]["parameters"] for kind in KINDS)
    lines = [
        "# Differential against plain, from nothing",
        "",
        f"{plain:,} parameters plain, {ours:,} differential ({100 * (ours / plain - 1):+.2f} %); "
        f"{settings['tokens']:,.0f} tokens a run, rows of {settings['length']}; {seeds} seeds; "
        f"{summary['limit']} tests of each kind; "
        f"{summary['cpu_seconds']:,} CPU seconds. In brackets: 95 % intervals over seeds and examples; difference: "
        "differential minus plain on the same examples, n.s. where the interval holds 0. Chance: of one who repeats "
        "any answer that the text shows.",
        "",
        "| | rate | validation loss by rate | validation loss by seed | λ by layer, mean over seeds |",
        "|---|---:|---|---|---|",
    ]
    for kind in KINDS:
        rates = ", ".join(f"{rate}: {loss:.3f}" for rate, loss in summary["rates"][kind]["validation"].items())
        losses = ", ".join(f"{run['loss']:.3f}" for run in rows[kind])
        each = zip(*(run["lambda"] for run in rows[kind]), strict=True)
        by_layer = ", ".join(f"{sum(values) / seeds:.2f}" for values in each)
        lines.append(f"| {kind} | {summary['rates'][kind]['chosen']:g} | {rates} | {losses} | {by_layer} |")
    if summary["rates"]["plain"]["validation"]:
        lines += ["", f"Rates were tried on the first seed, for {100 * summary['search']:.0f} % of the tokens."]
    sentences = []
    for name, found in panels(summary).items():
        panel, by = next(iter(found.values()))[0], by_label(found)
        lines += ["", f"## {panel.title}", "", f"![{name}]({name}.png)", "", *table(panel, by, chance(name))]
        gain = by["all"]["difference"]
        word = "no significant difference"
        if gain.significant:
            word = "better" if gain.mean * panel.better > 0 else "worse"
        sentences.append(f"{panel.title}: differential against plain {interval_text(gain, 3, signed=True)}: {word}.")
    lines += ["", "## In words", "", *(f"- {sentence}" for sentence in sentences)]
    if seeds < 10:
        lines.append(f"- {seeds} seeds are few: intervals that resample them are rather too narrow than too wide.")
    edges = [
        kind
        for kind in KINDS
        if len(tried := summary["rates"][kind]["validation"]) > 1
        and f"{summary['rates'][kind]['chosen']:g}" in (min(tried, key=float), max(tried, key=float))
    ]
    if edges:
        lines.append(
            f"- The best rate is the lowest or the highest tried, and a better one may lie beyond, for: "
            f"{', '.join(edges)}."
        )
    folders = " ".join(str(out / run["folder"]) for kind in KINDS for run in rows[kind])
    lines += [
        f"- {CLAIM.format(ours, settings['tokens'])}",
        "",
        f"Measure the runs again: `python -m eval.text all {folders}`",
        "",
    ]
    return "\n".join(lines)


def panels(summary: dict) -> dict[str, dict[str, list[Scores]]]:
    return {
        name: {kind: [Scores(**run) for run in runs] for kind, runs in found.items()}
        for name, found in summary["panels"].items()
    }


def read_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, TextSettings]:
    defaults = TextSettings(tokens=1e6, checkpoint_every=250)
    parser = argparse.ArgumentParser(
        prog="python -m train.compare --rows text",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", choices=["text"], default="text", help="this comparison")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/compare-text"),
        metavar="DIR",
        help="folder of results; what it holds is not done again (default: %(default)s)",
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of a kind (default: %(default)s)")
    parser.add_argument(
        "--rates",
        default="1.5e-3,3e-3,6e-3",
        metavar="A,B,…",
        help="peak learning rates to try for both kinds (default: %(default)s)",
    )
    parser.add_argument(
        "--search",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="share of the tokens that a rate is tried for (default: %(default)s)",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=100,
        metavar="N",
        help="windows, tests of a kind, questions of a number (default: %(default)s)",
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the tokens (default: %(default)s)")
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="cells side by side (default: 2 on a CPU of two cores or more, else 1)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        metavar="N",
        help="CPU threads of all processes together (default: %(default)s)",
    )
    parser.add_argument(
        "--text",
        nargs="*",
        default=[],
        metavar="PATH",
        help="files or folders of plain text (default: Python's standard library)",
    )
    for name, kind in (
        ("preset", str),
        ("tokens", float),
        ("length", int),
        ("batch_size", int),
        ("accumulate", int),
        ("device", str),
    ):
        value = getattr(defaults, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=value,
            dest=name,
            choices=list(TEXT_PRESETS) if name == "preset" else None,
            help="as in train.text (default: %(default)s)",
        )
    args = parser.parse_args(argv)
    try:
        args.rates = [float(rate) for rate in args.rates.split(",")]
    except ValueError:
        args.rates = [0.0]
    if min(args.rates) <= 0:
        raise UserError("--rates: expected positive numbers such as 1.5e-3,3e-3")
    for name, least in (("seeds", 1), ("limit", 5), ("threads", 1)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} is {getattr(args, name)}, expected at least {least}")
    if args.scale <= 0 or not 0 < args.search <= 1:
        raise UserError(f"--scale {args.scale} --search {args.search}: expected more than 0, and a share up to 1")
    settings = replace(
        defaults,
        text=tuple(args.text),
        corpus=str(args.out / "corpus"),
        preset=args.preset,
        length=args.length,
        tokens=args.tokens * args.scale,
        batch_size=args.batch_size,
        accumulate=args.accumulate,
        device=args.device,
    )
    check(settings)
    if args.processes is None:
        on_cpu = args.device == "cpu" or args.device == "auto" and not torch.cuda.is_available()
        args.processes = min(2, args.threads) if on_cpu else 1
    return args, settings


def main(argv: Sequence[str] | None = None) -> None:
    args, settings = read_arguments(argv)
    started = time.perf_counter()
    torch.set_num_threads(args.threads)
    corpus = open_corpus(Path(settings.corpus), settings.text, settings.vocab_size, WORDS)
    print(f"{len(corpus.ids['train']):,} tokens of text to learn from", file=sys.stderr)
    with same_command_goes_on():
        summary = compare(settings, args.out, args.seeds, args.rates, args.search, args.limit, args.processes)
    text = tell(summary, args.out)
    files = ["comparison.md", "comparison.json"]
    for name, found in panels(summary).items():
        figures.save(chart(next(iter(found.values()))[0], by_label(found)), args.out / f"{name}.png")
        files.append(f"{name}.png")
    write_text(args.out / "comparison.json", json.dumps(summary) + "\n")
    write_text(args.out / "comparison.md", text)
    print(text)
    seconds = time.perf_counter() - started
    print(
        f"{summary['cpu_seconds']:,} CPU seconds for all cells; this call {seconds:,.0f} s with {args.processes} "
        f"processes; in {args.out}: {', '.join(files)}, cells/"
    )
