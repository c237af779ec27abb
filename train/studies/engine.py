"""The engine of the studies: finished cells, the choice of a rate, paired intervals, conclusions, and the report.

A *row* is one way to train a model. A *cell* is the result of one row at one learning rate with one seed. A *measure*
scores the answers of a model to fixed examples. Every study takes the same steps:

1. `read_options`: its flags.
2. `finish_cell`: cells are computed, or read from disk where they are finished.
3. `describe`, `difference`: intervals over seeds and examples, paired for a row and its control.
4. `train/studies/rules.py`: rates, seeds and verdicts.
5. `conclude`, `compose`, `run_study`: the differences in words, comparison.md, comparison.json and the pictures.

A study supplies its rows, its measures, and how a cell is trained.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from eval import figures
from eval.report import difference_text, interval_text, markdown_table
from eval.statistics import Estimate, Interval, bootstrap, estimate
from lora import adapter
from model.common import UserError, write_text
from model.config import PaliGemmaConfig
from train.flags import flag, read_flags
from train.optim import count, trainable
from train.origin import FREE, provenance
from train.signals import Interrupted, catch_signals, same_command_goes_on
from train.studies import rules
from weights.checkpoint import empty_model

OUT_HELP = "folder of results and cells; what it holds is not done again"


@dataclass(frozen=True)
class StudyOptions:
    """The flags that all studies share; a study changes their defaults and adds its own."""

    seeds: int = flag(3, "runs of a row", least=1, metavar="N")
    limit: int = flag(100, "examples of a measure", least=1, metavar="N")
    out: Path = flag(Path("runs/compare"), OUT_HELP, metavar="DIR")


@dataclass(frozen=True)
class ScaledOptions(StudyOptions):
    """The flags of a study that fixes its own training settings."""

    scale: float = flag(1.0, "factor of the length of all training", least=1e-6, metavar="X")
    threads: int = flag(torch.get_num_threads(), "CPU threads", least=1, metavar="N")


@dataclass(frozen=True)
class QuickOptions:
    """The flags of a study that has a plan of minutes beside the whole one. Raises UserError for both at once.

    `full` names the default and changes nothing.
    """

    quick: bool = flag(False, "a plan of at most ten minutes on two cores; the report says what it leaves out")
    full: bool = flag(False, "the whole plan, which is also the default: up to 90 minutes on two cores")

    def __post_init__(self):
        if self.quick and self.full:
            raise UserError("--quick and --full exclude each other: give one")


@dataclass(frozen=True)
class PlannedOptions(QuickOptions):
    """The flags of a study by all of `train/studies/rules.py`."""

    processes: int | None = flag(
        None, "cells side by side (default: 2 on a CPU of two cores or more, else 1)", least=1, metavar="N"
    )
    positive: bool = flag(True, "the positive control, a minute")


@dataclass(frozen=True)
class SeededOptions(PlannedOptions, StudyOptions):
    """The flags of a study that chooses the seeds and the rate of each row by these rules."""

    seeds: int = flag(rules.LEAST_SEEDS, "runs of a row, at least", least=1, metavar="N")
    most_seeds: int = flag(
        rules.MOST_SEEDS, "runs of a row whose main difference is not yet known to ±3 points", least=1
    )
    grow: bool = flag(True, "try more rates until the best of every row is inside the grid")


Options = TypeVar("Options", bound=ScaledOptions)
Job = TypeVar("Job")  # what makes a cell, in another process perhaps


def read_options(options: type[Options], name: str, description: str | None, argv: Sequence[str] | None) -> Options:
    """The flags of `train.compare --rows NAME`, --rows apart. Sets the CPU threads. Raises UserError."""
    chosen = read_flags(options, f"train.compare --rows {name}", description, argv)
    torch.set_num_threads(chosen.threads)
    return chosen


def with_seeds(options, is_whole: bool):
    """The options of a study with its numbers of seeds; where none is given, those of the rules, of a part of it 3."""
    seeds = options.seeds or (rules.LEAST_SEEDS if is_whole else 3)
    most = options.most_seeds or (rules.MOST_SEEDS if is_whole else seeds)
    return replace(options, seeds=seeds, most_seeds=max(seeds, most))


def read_rates(text: str) -> tuple[float, ...]:
    """The value of a flag --rates. Raises ArgumentTypeError."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [0.0]
    if not min(rates) > 0:
        raise argparse.ArgumentTypeError(f"{text!r}, expected positive numbers such as 1e-3,3e-3")
    return tuple(rates)


def digest(*parts) -> str:
    """A short hash of what `parts` print as: the names of cells on disk depend on it."""
    return sha256(repr(parts).encode()).hexdigest()[:16]


def deciding(settings) -> dict:
    """The fields of a dataclass of settings that change what is learned."""
    return {name: value for name, value in asdict(settings).items() if name not in FREE}


def cell_folder(out: Path, *parts) -> Path:
    """The folder of the cell that `parts` decide. It also holds the checkpoints of an interrupted run."""
    return out / "cells" / digest(*parts)


USED: set[Path] = set()  # the folders of all cells that a study has finished or read
REPORTED = [0.0]  # the CPU seconds of this process that results, or files of what was interrupted, account for


def cpu_time() -> float:
    """The CPU seconds of this process, and of those that it has started and that have ended, such as `--workers`."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def finish_cell(
    file: Path, title: str, work: Callable[[Path], dict], spell_result: Callable[[dict], str] | None = None
) -> dict:
    """The JSON result in `file`. If the file is absent, `work(folder)` makes it, and `title` and result go to stderr.

    "cpu_seconds" is added to it, with those of calls that were interrupted, without those of cells that `work` finishes
    in turn. An interrupted study goes on, since its finished cells are read.
    """
    USED.add(file.parent)
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        spent = file.with_suffix(".seconds")
        before, started = float(spent.read_text()) if spent.exists() else 0.0, cpu_time() - REPORTED[0]

        def seconds() -> float:
            own = cpu_time() - REPORTED[0] - started
            REPORTED[0] += own
            return before + own

        try:
            result = work(file.parent)
        except BaseException:
            write_text(spent, f"{seconds()}\n")
            raise
        result["cpu_seconds"] = round(seconds(), 2)
        write_text(file, json.dumps(result) + "\n")
        spent.unlink(missing_ok=True)
        tqdm.write(f"{title}: {(spell_result or _spell_numbers)(result)}", file=sys.stderr)
    return json.loads(file.read_text())


def seconds_in(folders: Collection[Path]) -> float:
    """The CPU seconds of all results in the folders of cells, each once.

    Those of splits and questions that are no longer asked count too: the first result of a cell has the seconds of its
    training.
    """
    files = [file for folder in folders for file in folder.glob("*.json") if not file.name.startswith(".")]
    return sum(json.loads(file.read_text()).get("cpu_seconds", 0.0) for file in files)


def _spell_numbers(result: dict) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in result.items() if isinstance(value, float))


@dataclass(frozen=True)
class ScaledStudy:
    """What all cells of a study with `ScaledOptions` share. fingerprint: of the weights that it starts from."""

    out: Path
    scale: float
    limit: int
    fingerprint: str

    def scaled(self, number: int, least: int) -> int:
        """A number of steps or samples, scaled, and at least `least`."""
        return max(least, round(self.scale * number))

    def finish(self, title: str, parts: tuple, work: Callable[[Path], dict]) -> tuple[dict, Path]:
        """The result of the cell that `parts` decide, and its folder."""
        folder = cell_folder(self.out, *parts)
        return finish_cell(folder / "result.json", title, work), folder


def prepare_process(threads: int) -> None:
    """Set up a process that computes cells: its progress bars would overwrite those of the others, and a signal ends a
    cell that is not in training too, so that its seconds are kept."""

    def interrupt(number: int, frame) -> None:
        raise Interrupted(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
    torch.set_num_threads(threads)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115


ENDED: list[Interrupted] = []  # in a process that computes cells: the signal that has ended one


def work_unless_ended(work: Callable[[Job], dict], job: Job) -> dict:
    """`work(job)`. After a signal no other job is begun: the pool hands them over in advance."""
    if ENDED:
        raise ENDED[0]
    try:
        return work(job)
    except Interrupted as interrupted:
        ENDED.append(interrupted)
        raise


def side_by_side(
    work: Callable[[Job], dict], jobs: Sequence[Job], processes: int, spell_result: Callable[[Job, dict], str]
) -> list[dict]:
    """`work` of each job, a cell each, in so many processes; each new result is a line on stderr.

    A signal ends them all after their running steps, as `Interrupted`.
    """
    if processes > 1 and jobs:
        _compute_ahead(work, jobs, processes, spell_result)
    return [work(job) for job in jobs]  # of other processes: read


def _compute_ahead(
    work: Callable[[Job], dict], jobs: Sequence[Job], processes: int, spell_result: Callable[[Job, dict], str]
) -> None:
    threads = max(1, torch.get_num_threads() // processes)
    spawn = multiprocessing.get_context("spawn")
    with (
        catch_signals() as stop,
        ProcessPoolExecutor(processes, mp_context=spawn, initializer=prepare_process, initargs=(threads,)) as pool,
    ):
        waiting = running = {pool.submit(work_unless_ended, work, job): job for job in jobs}
        try:
            while waiting:
                ended, waiting = wait(waiting, timeout=1, return_when=FIRST_COMPLETED)
                for done in ended:
                    print(spell_result(running[done], done.result()), file=sys.stderr, flush=True)
                if stop:
                    raise Interrupted(stop[0])
        except BaseException:  # the other processes save what they have
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def default_processes(device: str, threads: int | None = None) -> int:
    """Cells side by side: 2 on a CPU of two cores or more, else 1."""
    on_cpu = device == "cpu" or device == "auto" and not torch.cuda.is_available()
    return min(2, threads or torch.get_num_threads()) if on_cpu else 1


def matching_rank(config: PaliGemmaConfig, targets: str, parameters: int) -> int:
    """The smallest rank of plain LoRA on `targets` with at least as many trainable `parameters`."""
    model = empty_model(config)
    adapter.inject(model, targets, 1, 1.0)
    return -(-parameters // count(trainable(model).values()))


def describe(scores, groups: Sequence | None = None) -> dict:
    """{"mean", "low", "high"} of scores (seeds, examples): 95 % bootstrap over seeds and groups of examples."""
    return bootstrap(scores, groups)._asdict()


def describe_runs(scores: np.ndarray, groups: Sequence | None = None) -> dict:
    """The same with "by_seed", the mean of each seed."""
    return describe(scores, groups) | {"by_seed": scores.mean(axis=1).tolist()}


def difference(scores, control, groups: Sequence | None = None) -> dict:
    """The estimate of row minus control, paired by seed and example, and whether it is "significant"."""
    return verdict(estimate(scores - control, groups))


def verdict(gain: Interval | Estimate) -> dict:
    """The interval of a difference, and whether it is "significant": 0 is outside."""
    return gain._asdict() | {"significant": gain.significant}


def spell(interval: Mapping, digits: int = 2) -> str:
    """`12.34 [11.00, 13.70]`; a difference with signs and `*` or `n.s.`, such as `+0.30 [-1.10, +1.70] n.s.`."""
    if "significant" in interval:
        return difference_text(interval, interval["significant"], digits)
    return interval_text(interval, digits)


def chart(intervals: Mapping[str, Mapping], title: str, label: str, reference: tuple[str, float] | None = None):
    """A picture with one line per interval."""
    points = [(name, *(one[end] for end in ("mean", "low", "high"))) for name, one in intervals.items()]
    return figures.interval_chart(points, title, label, reference=reference)


def conclude(differences: Mapping[str, Mapping[str, Mapping]], seeds: int) -> list[str]:
    """What the differences show, and what they do not, in sentences.

    differences: by pair ("row against control") and measure, as `difference` gives them; more is better.
    """
    sentences = []
    for pair, by_measure in differences.items():
        parts = [
            f"{'better' if gain['mean'] > 0 else 'worse'} in {name} ({spell(gain)})"
            for name, gain in by_measure.items()
            if gain["significant"]
        ]
        same = [name for name, gain in by_measure.items() if not gain["significant"]]
        parts += [f"no significant difference in {', '.join(same)}"] if same else []
        sentences.append(f"{pair}: {'; '.join(parts)}.")
    verdicts = [gain["significant"] for by_measure in differences.values() for gain in by_measure.values()]
    if verdicts:
        sentences.append(
            f"Significant differences: {sum(verdicts)} of {len(verdicts)}. If nothing differed at all, "
            f"about {0.05 * len(verdicts):.1f} of them would still seem to."
        )
    if seeds == 1:
        sentences.append("One seed: the intervals know nothing of how runs differ, so no difference may be believed.")
    elif seeds < 10:
        sentences.append(f"{seeds} seeds are few: bootstrap intervals, which resample them, are rather too narrow.")
    return sentences


def compose(
    title: str,
    *blocks: str | Sequence[str],
    conclusions: Sequence[str],
    published: Sequence[tuple[str, str]] = (),
    end: Sequence[str] = (),
) -> str:
    """comparison.md: `blocks` are paragraphs, or lists of lines such as a table; then the conclusions, and `end`.

    published: each experiment of the paper, and where it is here, or why it is missing.
    """
    paragraphs = [block if isinstance(block, str) else "\n".join(block) for block in blocks if block]
    paragraphs += ["## In words", "\n".join(f"- {sentence}" for sentence in conclusions)]
    if published:
        paragraphs += ["## The paper's experiments", "\n".join(markdown_table(["published", "here"], published))]
    return "\n\n".join([f"# {title}", *paragraphs, *end]) + "\n"


def sections(*parts: tuple[str, Sequence[str]]) -> list[str | Sequence[str]]:
    """The blocks of tables with their titles; without those that are empty."""
    return [block for title, table in parts if table for block in (f"## {title}", table)]


def made_by(summary: Mapping) -> str:
    """What a report was made with."""
    seeds = summary.get("seeds", 1)
    return (
        f"Commit {summary['commit']}, {summary['processor']}, PyTorch {summary['torch']}, "
        f"{summary['cpu_seconds']:,} CPU seconds, {seeds if isinstance(seeds, int) else len(seeds)} seed(s)."
    )


def tables_of(text: str) -> list[list[str]]:
    """The tables of a Markdown text, as lines."""
    lines = [line if line.startswith("|") else "" for line in text.splitlines()]
    return [list(table) for is_table, table in groupby(lines, bool) if is_table]


def quotable(summary: Mapping, report: str) -> dict:
    """quoted.json: tables and text of a report, without its commands, which name folders, and what they were made with.
    RESULTS.md quotes no other."""
    words = [line for line in report.splitlines() if line and not line.startswith(("|", "#", "!")) and "`" not in line]
    return {"made_by": made_by(summary), "tables": tables_of(report), "words": words}


def run_study(
    out: Path,
    find: Callable[[], dict],
    write: Callable[[dict], str],
    draw: Callable[[dict], Mapping[str, Sequence[Image.Image]]],
    *,
    name: str = "comparison",
    processes: int = 1,
    indent: int | None = 1,
    print_json: bool = False,
) -> None:
    """Find a study's results, write NAME.md, NAME.json and the pictures to its folder, and print the report.

    find() is the content of NAME.json but for "cpu_seconds", write(it) that of NAME.md, draw(it) by file name the parts
    of each picture.
    """
    started = time.perf_counter()
    USED.clear()
    with same_command_goes_on():
        summary = find() | provenance() | {"cpu_seconds": round(seconds_in(USED))}
    report, pictures = f"{write(summary)}\n{made_by(summary)}\n", draw(summary)
    write_text(out / f"{name}.json", json.dumps(summary, indent=indent) + "\n")
    write_text(out / f"{name}.md", report)
    write_text(out / "quoted.json", json.dumps(quotable(summary, report), indent=1, ensure_ascii=False) + "\n")
    for file, parts in pictures.items():
        figures.save(figures.stack(parts), out / file)
    if print_json:
        print(json.dumps(summary))
        return
    workers = f"{processes} processes" if processes > 1 else f"{torch.get_num_threads()} threads"
    files = ", ".join([f"{name}.md", f"{name}.json", "quoted.json", *pictures])
    print(
        f"{report}\n{summary['cpu_seconds']:,} CPU seconds for all cells; this call "
        f"{time.perf_counter() - started:,.0f} s on {workers}; in {out}: {files}, cells/"
    )
