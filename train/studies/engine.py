"""The engine of all studies: cells on disk, the rate of each row, a fixed number of seeds, judged differences.

A *row* is one way to train a model. A *cell* is a row at one rate with one seed: its score on each example of each
measure, as JSON in a folder whose name is a hash of all that decides it, source included. So an interrupted study goes
on, and a change computes only the cells that it changes. A study is a `Study` and a command of three lines:

    flags → run: rates on the validation split, then all seeds on the test split → report.write
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import numpy as np
import torch

from eval.statistics import Estimate, estimate
from model.common import UserError
from train.run import Interrupted, lock_folder
from train.studies.options import StudyOptions, digest
from train.studies.pool import Job, compute_all
from train.studies.rules import TIE, TUNING_SEEDS, Measure, Prediction, best_rate, is_inside, judge, wider
from train.studies.source_hash import source_hash

MEAN = "mean"  # a column of the tables: of the measures in range, each with the same weight
UNUSABLE = -1e6  # below the mean of any other cells
Scores = dict[str, np.ndarray]  # by measure (seeds, examples), in percent or in the unit of the measure


# What a study supplies


@dataclass(frozen=True)
class Study:
    """All that one study is.

    make(job, folder, *folders): trains a cell in its folder, unless its model is there, and scores it: {"scores":
    {measure: [score, …]}, "facts": {…}}. Facts for the report: "parameters", "seconds" of training. folders: of the
    cells that it `needs`, such as an earlier stage. If it raises Diverged, the cell has no scores, and the fact
    "diverged" says why.
    key: what decides a cell beside its job and the source: base, data, settings.
    beside: by title of a table the controls of each row, whose scores are averaged. The first table is the primary one.
    rates: the first grid; () where each row fixes its rate, and no validation split exists.
    main: the measure of the main difference, which chooses the rates; MEAN: of all with `in_mean`.
    plain: rows that share a rate. usable(cell): whether a validation cell may choose a rate; a rate with one that may
    not, or that diverged, comes last.
    lengthen(changes, ratio): a control of the last table, trained so many times as long; None: no such controls.
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
    needs: Callable[[Job], Sequence[Job]] = lambda job: ()
    usable: Callable[[Mapping], bool] = lambda cell: True
    lengthen: Callable[[tuple, float], tuple] | None = None
    predictions: tuple[Prediction, ...] = ()
    more: Callable[["Run"], list] = lambda run: []

    @property
    def averaged(self) -> list[str]:
        return [name for name, measure in self.measures.items() if measure.in_mean]

    @property
    def columns(self) -> dict[str, Measure]:
        """Of a table of differences."""
        mean = {MEAN: Measure("mean of those in range", ())}
        return (mean if self.main == MEAN or len(self.averaged) > 1 else {}) | dict(self.measures)


# The run of a study


@dataclass
class Run:
    """A study while it runs.

    tried: validation scores by row and rate. rates: the best ones. validation: scores by row and measure at these.
    cells: of the test split by row, seed by seed. tables: judged differences by title. used: all results behind the
    report. parts: studies within.
    """

    study: Study
    out: Path
    jobs: int
    seeds: int
    lock: IO | None = None
    tried: dict[str, dict[float, float]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    validation: dict[str, dict[str, float]] = field(default_factory=dict)
    cells: dict[str, list[dict]] = field(default_factory=dict)
    tables: dict[str, dict[tuple[str, str], dict]] = field(default_factory=dict)
    used: dict[Job, dict] = field(default_factory=dict)
    parts: list["Run"] = field(default_factory=list)

    def file(self, job: Job) -> Path:
        """Where the result of a job is, or will be. Both splits are in the folder of the cell."""
        name = digest(source_hash(self.study.make), self.study.key, replace(job, split=""))
        return self.out / "cells" / name / f"{job.split}.json"

    def get(self, jobs: Sequence[Job]) -> list[dict]:
        """The results of jobs of one split, in order; those not on disk are computed, `self.jobs` at a time."""
        assert len({job.split for job in jobs}) <= 1, "two processes would train one cell at once"
        needs = {job: list(self.study.needs(job)) for job in jobs}
        if needed := list(dict.fromkeys(need for of_job in needs.values() for need in of_job)):
            self.get(needed)
        missing = sorted((job for job in needs if not self.file(job).exists()), key=lambda job: job.seed)
        folders = {job: [self.file(need).parent for need in needs[job]] for job in missing}
        compute_all([(self.study.make, job, self.file(job), folders[job]) for job in missing], self.jobs)
        cells = [json.loads(self.file(job).read_text()) for job in jobs]
        self.used |= zip(jobs, cells, strict=True)
        return cells

    def at_rates(self, rates: Mapping[str, float], seeds: Sequence[int], split: str = "test") -> dict[str, list[dict]]:
        """The cells of rows at their rates, seed by seed."""
        rows = self.study.rows
        cells = iter(
            self.get([Job(row, rows[row], rate, seed, split) for row, rate in rates.items() for seed in seeds])
        )
        return {row: [next(cells) for _ in seeds] for row in rates}

    # Rates and cells

    @property
    def tuning_seeds(self) -> range:
        return range(min(TUNING_SEEDS, self.seeds))

    def tune(self) -> None:
        """Choose the rate of each row: the best on the validation split, mean over seeds. Plain rows share theirs:
        a rate that chance chose for one control makes a difference where there is none."""
        study, rows, grid, more = self.study, list(self.study.rows), [], list(self.study.rates)
        tie = TIE * study.columns[study.main].margin
        while more:
            grid = sorted([*grid, *more])
            cells = {rate: self.at_rates(dict.fromkeys(rows, rate), self.tuning_seeds, "validation") for rate in grid}
            self.tried = {row: {rate: self.worth(cells[rate][row]) for rate in grid} for row in rows}
            plain = {rate: float(np.mean([self.tried[row][rate] for row in study.plain or rows])) for rate in grid}
            scores = {row: plain if row in study.plain else self.tried[row] for row in rows}
            self.rates = {row: best_rate(scores[row], tie) for row in rows}
            more = wider(grid, self.rates.values())

    def worth(self, cells: Sequence[dict]) -> float:
        """What a rate is chosen by: the main measure of its cells; more is better."""
        main, averaged = self.study.main, self.study.averaged
        if not all("diverged" not in cell["facts"] and self.study.usable(cell) for cell in cells):
            return UNUSABLE
        names = averaged if main == MEAN else [main]
        mean = np.mean([scores.mean() for name, scores in self.scores_of(cells).items() if name in names])
        return -float(mean) if self.study.columns[main].less_is_better else float(mean)

    def add_controls_by_time(self, lengthen: Callable[[tuple, float], tuple]) -> None:
        """Controls of the last table that train as long as their rows, by the median seconds of the tuning seeds."""
        (title, table), rows, beside = list(self.study.beside.items())[-1], dict(self.study.rows), {}
        cells = self.at_rates(self.rates, self.tuning_seeds, "validation")
        seconds = {row: statistics.median(cell["facts"].get("seconds", 1.0) for cell in cells[row]) for row in cells}
        for row, (control, *_) in table.items():
            ratio = round(seconds[row] / seconds[control], 1)
            name = f"{control}, {ratio} × steps" if ratio > 1 else control
            if ratio > 1:
                rows[name], self.rates[name] = lengthen(rows[control], ratio), self.rates[control]
            beside[row] = (name,)
        self.study = replace(self.study, rows=rows, beside={**self.study.beside, f"{title}, trained as long": beside})

    def compute(self) -> None:
        """Choose the rates, then make the cells of all rows at them, and judge their differences."""
        self.rates = dict.fromkeys(self.study.rows, 0.0)
        if self.study.rates:
            self.tune()
        if self.study.lengthen:
            self.add_controls_by_time(self.study.lengthen)
        self.cells = self.at_rates(self.rates, range(self.seeds))
        if self.study.rates:
            for row, cells in self.at_rates(self.rates, self.tuning_seeds, "validation").items():
                self.validation[row] = {name: float(scores.mean()) for name, scores in self.scores_of(cells).items()}
        self.tables = {title: self.table(beside) for title, beside in self.study.beside.items()}

    # Differences

    def scores(self, row: str) -> Scores:
        """Of the cells of a row in the test split."""
        return self.scores_of(self.cells[row])

    def scores_of(self, cells: Sequence[Mapping]) -> Scores:
        """Of cells of one split, on the measures that it has."""
        measures = self.study.measures
        sizes = {name: len(scores) for cell in cells for name, scores in cell["scores"].items()}
        sizes = sizes or {name: len(measure.groups) for name, measure in measures.items()}  # all diverged
        failed = {name: [measures[name].failed] * size for name, size in sizes.items()}
        of_cells = {name: [cell["scores"].get(name, failed[name]) for cell in cells] for name in sizes}
        return {name: measures[name].scale * np.array(scores, dtype=float) for name, scores in of_cells.items()}

    def facts(self, row: str) -> list[dict]:
        """Of the cells of a row that did not diverge."""
        return [cell["facts"] for cell in self.cells[row] if "diverged" not in cell["facts"]]

    def in_range(self, controls: Sequence[str]) -> list[str]:
        """The columns that can show a difference, by the controls' mean on the validation split; a measure that is no
        share, or that this split does not have, always can."""
        usable = []
        for name, measure in self.study.measures.items():
            known = [self.validation[row][name] for row in controls if name in self.validation.get(row, ())]
            if not measure.is_share or not known or is_inside(float(np.mean(known)), measure.chance):
                usable.append(name)
        return usable + [MEAN] * any(name in usable for name in self.study.averaged)

    def difference(self, gaps: Scores, column: str, usable: Sequence[str]) -> Estimate:
        """Of scores that are paired by seed and example. MEAN: each usable measure weighs the same."""
        measures, averaged = self.study.measures, self.study.averaged
        chosen = [column] if column != MEAN else [name for name in averaged if name in usable] or averaged
        size, parts, groups = sum(len(measures[name].groups) for name in chosen), [], []
        for name in chosen:
            parts.append(measures[name].view(gaps[name] * size / len(chosen) / gaps[name].shape[1]))
            groups += [f"{name}/{group}" for group in measures[name].groups]
        return estimate(np.hstack(parts), groups)

    def table(self, beside: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, str], dict]:
        """The judged differences of a table by (row, column), beside the mean of the controls, seed by seed and example
        by example; the main ones are a family of their own."""
        columns, differences, inside = self.study.columns, {}, set()
        for row, controls in beside.items():
            usable, of_controls = self.in_range(controls), [self.scores(control) for control in controls]
            gaps = {name: s - np.mean([of[name] for of in of_controls], axis=0) for name, s in self.scores(row).items()}
            differences |= {(row, name): self.difference(gaps, name, usable) for name in columns}
            inside |= {(row, name) for name in usable}
        table = {}
        for is_main in (True, False):
            family = {place: gap for place, gap in differences.items() if (place[1] == self.study.main) == is_main}
            for place, judged in judge(family, inside, columns).items():
                one_seed = {"verdict": "one seed"} if self.seeds == 1 else {}  # says nothing of other runs
                table[place] = differences[place]._asdict() | judged | one_seed
        return table


def run(study: Study, options: StudyOptions) -> Run:
    """The whole study but its report. The folder stays locked while the result lives.

    Raises UserError if another process works in the folder, or if it has the report of another study or plan.
    """
    study = replace(study, name=study.name + "-quick" * options.quick)
    out = options.out or Path("runs", study.name)
    out.mkdir(parents=True, exist_ok=True)
    made = Run(study, out, options.jobs, options.seeds, lock_folder(out))
    report = out / "comparison.json"
    if report.exists() and json.loads(report.read_text())["plan"] != [study.name, digest(study.key)]:
        raise UserError(f"--out {out}: has the report of another study or plan: choose another folder")
    torch.set_num_threads(1)  # so that a result does not depend on the number of jobs
    try:
        made.compute()
    except Interrupted as interrupted:
        interrupted.end_program("the same command goes on from here")
    return made
