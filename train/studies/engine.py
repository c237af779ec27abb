"""The engine of all studies: cells on disk, the rate of each row, a fixed number of seeds, judged differences.

A *row* is one way to train a model. A *cell* is a row at one rate with one seed: its score on each example of each
measure, as JSON in a folder whose name is a hash of all that decides it, source included. So an interrupted study goes
on, and a change computes only the cells that it changes. A study is a `Study` (rows, how a cell is made, measures,
controls) and a command: read_options, run, report.write.

    flags → Study → tune: rates, on the validation split → finish: cells of the test split → table: judged differences
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from hashlib import sha256
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, TypeVar

import numpy as np
import torch

from eval.statistics import Estimate, estimate
from model.common import UserError, write_text
from train.flags import FlagParser, add_flags, check_ranges, flag, from_values
from train.origin import FREE, provenance
from train.run_folder import lock_folder
from train.settings import Settings, parse
from train.signals import Interrupted
from train.studies.rules import MARGIN, TIE, Prediction, best_rate, bracket, is_inside, judge
from train.studies.source_hash import source_hash

MEAN = "mean"  # of the measures in range, each with the same weight
Scores = dict[str, np.ndarray]  # by measure (seeds, examples), in percent or in the unit of the measure
Options = TypeVar("Options", bound="StudyOptions")


# Flags


def read_rates(text: str) -> tuple[float, ...]:
    """The value of a flag --rates. Raises ArgumentTypeError."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = (0.0,)
    if not min(rates) > 0:
        raise argparse.ArgumentTypeError(f"{text!r}, expected positive numbers such as 1e-3,3e-3")
    return rates


@dataclass(frozen=True)
class StudyOptions:
    """The flags that all studies share; a study changes their defaults and adds more."""

    seeds: int = flag(10, "runs of each row", least=1, metavar="N")
    rates: tuple[float, ...] | None = flag(
        None,
        "peak rates to try first; one is not searched for (default: the study's)",
        type=read_rates,
        metavar="A,B,…",
    )
    jobs: int = flag(
        1 if torch.cuda.is_available() else torch.get_num_threads(), "cells side by side", least=1, metavar="N"
    )
    quick: bool = flag(False, "a plan of at most ten minutes on two cores")
    out: Path | None = flag(None, "folder of results and cells (default: runs/STUDY)", metavar="DIR")


def read_options(
    kind: type[Options], argv: Sequence[str] | None, program: str, description: str | None, quick: Mapping[str, object]
) -> Options:
    """The flags of a study that fixes its settings. quick: other defaults with --quick. Raises UserError."""
    parser = FlagParser(prog=f"python -m {program}", description=description)
    add_flags(parser, kind)
    return _options_of(kind, vars(parser.parse_args(argv)), quick)


def read_with_settings(
    kind: type[Options],
    argv: Sequence[str] | None,
    program: str,
    description: str | None,
    quick: Mapping[str, object],
    *,
    decided: Sequence[str],
    defaults: Sequence[str],
    quick_defaults: Sequence[str] = (),
) -> tuple[Options, Settings]:
    """The flags of a study, and the settings that all rows start from: every other flag is one of `train.finetune`.

    decided: settings that the study decides itself. defaults, quick_defaults: flags of `train.finetune`. Raises
    UserError.
    """
    assert not {one.name for one in fields(kind)} & {one.name for one in fields(Settings)}, "a flag hides another"
    parser = FlagParser(
        prog=f"python -m {program}",
        description=description,
        allow_abbrev=False,
        epilog="All other flags are those of `python -m train.finetune`, such as --base, --data, --samples or "
        f"--device, with its defaults but for {' '.join(defaults)}.",
    )
    add_flags(parser, kind)
    known, rest = parser.parse_known_args(argv)
    for word in rest:
        name = word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        if word.startswith("--") and name in decided:
            raise UserError(f"{word}: the study decides that itself: `python -m {program} --help` lists its flags")
    options = _options_of(kind, vars(known), quick)
    return options, parse([*defaults, *(quick_defaults if options.quick else ()), *rest])[0]


def _options_of(kind: type[Options], given: dict, quick: Mapping[str, object]) -> Options:
    options = from_values(kind, {**(quick if given.get("quick") else {}), **given})
    check_ranges(options)
    return options


def deciding(settings) -> dict:
    """The fields of a dataclass of settings that change what is learned."""
    return {name: value for name, value in asdict(settings).items() if name not in FREE}


def digest(*parts) -> str:
    """16 hexadecimal digits of what `parts` print as."""
    return sha256(repr(parts).encode()).hexdigest()[:16]


# What a study supplies


@dataclass(frozen=True)
class Measure:
    """Examples of the test split that each cell is scored on.

    groups: the picture or document of each example, for intervals. chance: the score of guessing, in percent, where it
    is known. unit: in "%" a score is from 0 to 1; in another, such as "nats", it is shown as it is. margin: the
    smallest difference of interest, in points or that unit. rungs: the difficulty of each example, if they differ.
    view: what is compared in place of the scores (seeds, examples), such as a slope.
    """

    title: str
    groups: Sequence
    chance: float | None = None
    unit: str = "%"
    margin: float = MARGIN
    less_is_better: bool = False
    in_mean: bool = True
    rungs: Sequence[str] = ()
    view: Callable[[np.ndarray], np.ndarray] = lambda scores: scores

    @property
    def scale(self) -> float:
        return 100.0 if self.unit == "%" else 1.0


@dataclass(frozen=True)
class Job:
    """A cell, and the split that it is scored on. changes: of the row, (name, value) pairs; they name the cell too."""

    row: str
    changes: tuple
    rate: float
    seed: int
    split: str = "test"


@dataclass(frozen=True)
class Study:
    """All that one study is.

    name: of its default folder. rows: their changes, by name.
    make(job, folder, *folders): trains a cell in its folder unless its model is there, and scores it: {"scores":
    {measure: [score, …]}, "facts": {…}}. Facts are numbers of the cell: "parameters" and "seconds" of training, for the
    report; "diverged" says why a run failed. folders: of the cells that it `needs`, such as an earlier stage.
    key: what else decides a cell: base, data, settings. The source needs no mention, see `source_hash`.
    beside: by title of a table the controls of each row, whose scores are averaged. The first table is the primary one.
    rates: to try first, in increasing order; () where each row fixes its rate, so that no validation split is asked.
    main: the measure of the main difference, by which rates are chosen; MEAN of all with `in_mean`.
    plain: rows that share a rate. tuning_seeds: of the cells that choose the rates.
    lengthen(changes, ratio): of a control in the last table that trains so many times as long; None: no such controls.
    more(run): blocks of the report that no other study has, each a text or a list of lines.
    """

    name: str
    title: str
    rows: Mapping[str, tuple]
    make: Callable[..., dict]
    key: str
    measures: Mapping[str, Measure]
    beside: Mapping[str, Mapping[str, tuple[str, ...]]]
    rates: tuple[float, ...] = ()
    main: str = MEAN
    plain: tuple[str, ...] = ()
    tuning_seeds: tuple[int, ...] = (0, 1, 2)
    needs: Callable[[Job], Sequence[Job]] = lambda job: ()
    lengthen: Callable[[tuple, float], tuple] | None = None
    predictions: tuple[Prediction, ...] = ()
    more: Callable[["Run"], list] = lambda run: []


# The run of a study


@dataclass
class Run:
    """A study while it runs. tried: validation scores by row and rate, more is better. validation: by row and measure,
    at the chosen rates. cells: of the test split by row, seed by seed. used: every result that the report rests on."""

    study: Study
    out: Path
    jobs: int = 1
    seeds: int = 10
    lock: IO | None = None
    tried: dict[str, dict[float, float]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    validation: dict[str, dict[str, float]] = field(default_factory=dict)
    cells: dict[str, list[dict]] = field(default_factory=dict)
    used: dict[Path, Job] = field(default_factory=dict)
    parts: list["Run"] = field(default_factory=list)  # studies within it, such as a positive control

    @cached_property
    def code(self) -> str:
        return source_hash(self.study.make)

    def file(self, job: Job) -> Path:
        """Where the result of a job is, or will be. Both splits are in the folder of the cell."""
        name = digest(self.code, self.study.key, replace(job, split=""))
        return self.out / "cells" / name / f"{job.split}.json"

    def get(self, jobs: Sequence[Job]) -> list[dict]:
        """The results of jobs of one split, in order; those not on disk are computed, `self.jobs` at a time."""
        assert len({job.split for job in jobs}) <= 1, "two processes would train one cell at once"
        needs = {job: list(self.study.needs(job)) for job in jobs}
        if needed := list(dict.fromkeys(need for of_job in needs.values() for need in of_job)):
            self.get(needed)
        missing = [job for job in needs if not self.file(job).exists()]
        calls = {
            job: (self.study.make, job, self.file(job), [self.file(need).parent for need in needs[job]])
            for job in missing
        }
        if self.jobs == 1:
            for number, call in enumerate(calls.values(), 1):
                announce(number, len(missing), call[1], compute(*call))
        elif missing:
            compute_side_by_side(calls, self.jobs)
        self.used |= {self.file(job): job for job in jobs}
        return [json.loads(self.file(job).read_text()) for job in jobs]

    def job(self, row: str, seed: int, split: str = "test", rate: float | None = None) -> Job:
        """A cell of a row, at its chosen rate if none is given."""
        return Job(row, self.study.rows[row], self.rates[row] if rate is None else rate, seed, split)

    # Rates and cells

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        return self.study.tuning_seeds[: self.seeds]

    def score(self, cell: Mapping) -> float:
        """By which a rate is chosen: the main measure; more is better."""
        main, measures = self.study.main, self.study.measures
        names = [name for name in cell["scores"] if name == main or main == MEAN and measures[name].in_mean]
        sign = -1 if main != MEAN and measures[main].less_is_better else 1
        return sign * float(np.mean([measures[name].scale * np.mean(cell["scores"][name]) for name in names]))

    @property
    def tie(self) -> float:
        """In the unit of `score`."""
        return TIE * (MARGIN if self.study.main == MEAN else self.study.measures[self.study.main].margin)

    def tune(self) -> None:
        """Choose the rate of each row: the best on the validation split, mean over seeds. Plain rows share theirs:
        a rate that chance chose for one control makes a difference where there is none."""
        rows = list(self.study.rows)

        def score(grid: Sequence[float]) -> dict[str, dict[float, float]]:
            names = [(row, rate, seed) for seed in self.tuning_seeds for rate in grid for row in rows]
            jobs = [self.job(row, seed, "validation", rate) for row, rate, seed in names]
            scores = dict(zip(names, map(self.score, self.get(jobs)), strict=True))
            self.tried = {
                row: {rate: float(np.mean([scores[row, rate, seed] for seed in self.tuning_seeds])) for rate in grid}
                for row in rows
            }
            plain = {rate: float(np.mean([self.tried[row][rate] for row in self.study.plain or rows])) for rate in grid}
            return {row: plain if row in self.study.plain else self.tried[row] for row in rows}

        scores = bracket(self.study.rates, score, self.tie)
        self.rates = {row: best_rate(of_row, self.tie) for row, of_row in scores.items()}

    def add_controls_by_time(self) -> None:
        """Controls of the last table that train as long as their rows, by the median seconds of the tuning seeds."""
        if self.study.lengthen is None:
            return
        title, table = list(self.study.beside.items())[-1]
        rows, beside = dict(self.study.rows), {}
        for row, (control, *_) in table.items():
            ratio = round(self.seconds(row) / self.seconds(control), 1)
            beside[row] = (control,)
            if ratio > 1:
                name = f"{control}, {ratio} × steps"
                rows[name], self.rates[name] = self.study.lengthen(rows[control], ratio), self.rates[control]
                beside[row] = (name,)
        self.study = replace(self.study, rows=rows, beside={**self.study.beside, f"{title}, trained as long": beside})

    def seconds(self, row: str) -> float:
        """Of the training of a row at its rate."""
        cells = self.get([self.job(row, seed, "validation") for seed in self.tuning_seeds])
        return statistics.median(cell["facts"]["seconds"] for cell in cells)

    def finish(self) -> None:
        """All rows at their rates: the range of the measures on the validation split, and the test split."""
        names = [(row, seed) for seed in range(self.seeds) for row in self.study.rows]
        cells = dict(zip(names, self.get([self.job(*name) for name in names]), strict=True))
        self.cells = {row: [cells[row, seed] for seed in range(self.seeds)] for row in self.study.rows}
        if self.study.rates:
            for row in self.study.rows:
                of_row = self.get([self.job(row, seed, "validation") for seed in self.tuning_seeds])
                self.validation[row] = {
                    name: self.study.measures[name].scale * float(np.mean([cell["scores"][name] for cell in of_row]))
                    for name in of_row[0]["scores"]
                }

    def part(self, study: Study, seeds: int) -> "Run":
        """A smaller study in the same folder, computed; its cells are in the same CSV."""
        part = Run(study, self.out, self.jobs, seeds)
        part.tune()
        part.finish()
        self.parts.append(part)
        return part

    # Differences

    def scores(self, row: str, cells: Sequence[Mapping] | None = None) -> Scores:
        """Of the cells of a row in the test split, or of others."""
        cells = self.cells[row] if cells is None else cells
        return {
            name: measure.scale * np.array([cell["scores"][name] for cell in cells], dtype=float)
            for name, measure in self.study.measures.items()
        }

    def mean_scores(self, rows: Sequence[str]) -> Scores:
        """Of the rows together, seed by seed and example by example."""
        of_rows = [self.scores(row) for row in rows]
        return {name: np.mean([scores[name] for scores in of_rows], axis=0) for name in self.study.measures}

    @property
    def names(self) -> list[str]:
        """The columns of a table of differences, the mean first where there is one."""
        averaged = [name for name, measure in self.study.measures.items() if measure.in_mean]
        return [MEAN] * (self.study.main == MEAN or len(averaged) > 1) + list(self.study.measures)

    def in_range(self, controls: Sequence[str]) -> list[str]:
        """The measures that can show a difference, by the controls' mean on the validation split; a measure in another
        unit than percent, or that this split does not have, always can."""
        usable = []
        for name, measure in self.study.measures.items():
            known = [self.validation[row][name] for row in controls if name in self.validation.get(row, ())]
            if measure.unit != "%" or not known or is_inside(float(np.mean(known)), measure.chance):
                usable.append(name)
        return usable

    def difference(self, scores: Scores, control: Scores, name: str, usable: Sequence[str]) -> Estimate:
        """Scores minus those of the control, paired by seed and example. MEAN: each usable measure weighs the same."""
        measures = self.study.measures
        averaged = [each for each in measures if measures[each].in_mean]
        chosen = [name] if name != MEAN else [each for each in averaged if each in usable] or averaged
        size, parts, groups = sum(len(measures[each].groups) for each in chosen), [], []
        for each in chosen:
            seeds = min(len(scores[each]), len(control[each]))
            gap = measures[each].view(scores[each][:seeds]) - measures[each].view(control[each][:seeds])
            parts.append(gap * size / len(chosen) / gap.shape[1])
            groups += [f"{each}/{group}" for group in measures[each].groups]
        return estimate(np.hstack(parts), groups)

    def table(
        self, beside: Mapping[str, tuple[str, ...]], at: Mapping[str, Scores] | None = None
    ) -> dict[tuple[str, str], dict]:
        """The judged differences of a table by (row, measure); the main ones are a family of their own.

        at: scores of rows in place of those at their rates.
        """
        measures, differences, inside = self.study.measures, {}, set()
        for row, controls in beside.items():
            scores, control = at[row] if at else self.scores(row), self.mean_scores(controls)
            usable = self.in_range(controls)
            for name in self.names:
                differences[row, name] = self.difference(scores, control, name, usable)
                is_usable = any(measures[each].in_mean for each in usable) if name == MEAN else name in usable
                inside |= {(row, name)} if is_usable else set()
        margins = {place: MARGIN if place[1] == MEAN else measures[place[1]].margin for place in differences}
        less = {place for place in differences if place[1] != MEAN and measures[place[1]].less_is_better}
        judged = {}
        for is_main in (True, False):
            family = {place: one for place, one in differences.items() if (place[1] == self.study.main) == is_main}
            judged |= judge(family, inside, margins, less)
        if self.seeds == 1:  # says nothing of other runs
            judged = {place: one | {"verdict": "one seed"} for place, one in judged.items()}
        return {place: differences[place]._asdict() | judged[place] for place in differences}

    def at_one_rate(self) -> dict[tuple[str, str], dict]:
        """The first table once more, rows at their controls' rate, on the tuning seeds; of rows whose rate differs."""
        table = next(iter(self.study.beside.values()))
        moved = {row: controls for row, controls in table.items() if self.rates[row] != self.rates[controls[0]]}
        at = {}
        for row, (control, *_) in moved.items():
            jobs = [self.job(row, seed, rate=self.rates[control]) for seed in self.tuning_seeds]
            at[row] = self.scores(row, self.get(jobs))
        return self.table(moved, at) if moved else {}


def run(study: Study, options: StudyOptions) -> Run:
    """The whole study but its report. The folder stays locked while the result lives.

    Raises UserError if another process works in the folder, or if it has the report of another study or plan.
    """
    study = replace(study, name=study.name + "-quick" * options.quick)
    out = options.out or Path("runs", study.name)
    out.mkdir(parents=True, exist_ok=True)
    made = Run(study, out, options.jobs, options.seeds, lock_folder(out))
    report = out / "comparison.json"
    if report.exists() and json.loads(report.read_text())["plan"] != plan_of(study):
        raise UserError(f"--out {out}: has the report of another study or plan: choose another folder")
    torch.set_num_threads(1)  # so that a result does not depend on the number of jobs
    try:
        if study.rates:
            made.tune()
            made.add_controls_by_time()
        else:
            made.rates = dict.fromkeys(study.rows, 0.0)
        made.finish()
    except Interrupted as interrupted:
        print("\nsaved; the same command goes on from here", file=sys.stderr)
        sys.exit(128 + interrupted.args[0])
    return made


def plan_of(study: Study) -> list[str]:
    """What two reports in one folder must share: the study, quick or not, its base, data and settings."""
    return [study.name, digest(study.key)]


# Cells


def compute(make: Callable[..., dict], job: Job, file: Path, needed: Sequence[Path]) -> float:
    """Make a cell and write its result, with what it was made by; returns its CPU seconds."""
    file.parent.mkdir(parents=True, exist_ok=True)
    started = time.process_time()
    result = make(job, file.parent, *needed)
    spent = time.process_time() - started
    result = asdict(job) | result | {"cpu_seconds": round(spent, 2)} | provenance()
    write_text(file, json.dumps(result) + "\n")
    return spent


@cache
def pool_of(processes: int) -> ProcessPoolExecutor:
    """Processes that compute cells. They end with this one, however it ends."""
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=prepare_process)


def compute_side_by_side(calls: Mapping[Job, tuple], processes: int) -> None:
    pool = pool_of(processes)
    futures = {pool.submit(compute_or_end, *call): job for job, call in calls.items()}
    try:
        for number, done in enumerate(as_completed(futures), 1):
            announce(number, len(futures), futures[done], done.result())
    except BaseException:  # Ctrl-C, or a cell that failed: the others save what they have trained
        pool_of.cache_clear()
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        raise


def prepare_process() -> None:
    """Set up a process that computes cells."""
    torch.set_num_threads(1)
    os.setpgrp()  # Ctrl-C on a terminal reaches the first process alone, which ends the others
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  its progress bars would overwrite those of the others
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """A killed parent can tell its processes nothing: they would compute on, in a folder whose lock is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def compute_or_end(*call) -> float:
    """`compute`; a process that was told to end must not begin the next cell, which the pool has handed over."""
    try:
        return compute(*call)
    except Interrupted:
        os._exit(1)


def announce(number: int, total: int, job: Job, seconds: float) -> None:
    rate = f", rate {job.rate:g}" if job.rate else ""
    text = f"{number} of {total}: {job.row}{rate}, seed {job.seed}, {job.split}: {seconds:.0f} CPU seconds"
    print(text, file=sys.stderr, flush=True)
