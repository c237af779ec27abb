"""The engine of all studies: cells on disk, the rate of each row, a fixed number of seeds, judged differences.

A *row* is one way to train a model. A *cell* is a row at one rate with one seed: its score on each example of each
measure, as JSON in a folder whose name is a hash of all that decides it, source included. So an interrupted study goes
on, and a change computes only the cells that it changes. A study is a `Study` and a command of three lines:

    read_options → run: rates on the validation split, then all seeds on the test split → report.write
"""

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np
import torch

from eval.statistics import Estimate, estimate
from model.common import UserError
from train.run import Interrupted, lock_folder
from train.studies.options import StudyOptions, digest
from train.studies.pool import Job, compute_all
from train.studies.rules import MARGIN, TIE, Prediction, best_rate, bracket, is_inside, judge
from train.studies.source_hash import source_hash

MEAN = "mean"  # of the measures in range, each with the same weight
UNUSABLE = -1e6  # below the mean of any other cells
Scores = dict[str, np.ndarray]  # by measure (seeds, examples), in percent or in the unit of the measure


# What a study supplies


@dataclass(frozen=True)
class Measure:
    """Examples of the test split that each cell is scored on.

    groups: the picture or document of each example. chance: the score of guessing in percent, None if unknown. unit:
    scores in "%" are from 0 to 1; others, such as "nats", are shown as they are. margin: the smallest difference of
    interest, in points or the unit. rungs: the difficulty of each example, if they differ. view: what is judged in
    place of paired differences (seeds, examples), such as their slope.
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
class Study:
    """All that one study is.

    make(job, folder, *folders): trains a cell in its folder, unless its model is there, and scores it: {"scores":
    {measure: [score, …]}, "facts": {…}}. Facts for the report: "parameters", "seconds" of training, "diverged" (why).
    folders: of the cells that it `needs`, such as an earlier stage.
    key: what decides a cell beside its job and the source: base, data, settings.
    beside: by title of a table the controls of each row, whose scores are averaged. The first table is the primary one.
    rates: the first grid; () where each row fixes its rate, and no validation split exists.
    main: the measure of the main difference, which chooses the rates; MEAN: of all with `in_mean`.
    plain: rows that share a rate. tuning_seeds: of the cells that choose the rates. usable(cell): whether a validation
    cell may do so; a rate with one that may not comes last.
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
    tuning_seeds: tuple[int, ...] = (0, 1, 2)
    needs: Callable[[Job], Sequence[Job]] = lambda job: ()
    usable: Callable[[Mapping], bool] = lambda cell: True
    lengthen: Callable[[tuple, float], tuple] | None = None
    predictions: tuple[Prediction, ...] = ()
    more: Callable[["Run"], list] = lambda run: []

    @property
    def averaged(self) -> list[str]:
        return [name for name, measure in self.measures.items() if measure.in_mean]

    @property
    def columns(self) -> list[str]:
        """Of a table of differences."""
        return [MEAN] * (self.main == MEAN or len(self.averaged) > 1) + list(self.measures)

    def margin(self, column: str) -> float:
        return MARGIN if column == MEAN else self.measures[column].margin

    def less_is_better(self, column: str) -> bool:
        return column != MEAN and self.measures[column].less_is_better


# The run of a study


@dataclass
class Run:
    """A study while it runs. tried: validation scores by row and rate. validation: by row and measure, at the chosen
    rates. cells: of the test split by row, seed by seed. used: all results behind the report. parts: studies within."""

    study: Study
    out: Path
    jobs: int
    seeds: int
    lock: IO | None = None
    tried: dict[str, dict[float, float]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    validation: dict[str, dict[str, float]] = field(default_factory=dict)
    cells: dict[str, list[dict]] = field(default_factory=dict)
    used: dict[Path, Job] = field(default_factory=dict)
    parts: list["Run"] = field(default_factory=list)

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
        compute_all(
            [
                (self.study.make, job, self.file(job), [self.file(need).parent for need in of_job])
                for job, of_job in needs.items()
                if not self.file(job).exists()
            ],
            self.jobs,
        )
        self.used |= {self.file(job): job for job in jobs}
        return [json.loads(self.file(job).read_text()) for job in jobs]

    def job(self, row: str, seed: int, split: str = "test", rate: float | None = None) -> Job:
        """A cell of a row, at its chosen rate if none is given."""
        return Job(row, self.study.rows[row], self.rates[row] if rate is None else rate, seed, split)

    # Rates and cells

    @property
    def tuning_seeds(self) -> tuple[int, ...]:
        return self.study.tuning_seeds[: self.seeds]

    def tune(self) -> None:
        """Choose the rate of each row: the best on the validation split, mean over seeds. Plain rows share theirs:
        a rate that chance chose for one control makes a difference where there is none."""
        study, rows = self.study, list(self.study.rows)
        sign, tie = -1 if study.less_is_better(study.main) else 1, TIE * study.margin(study.main)

        def score(grid: Sequence[float]) -> dict[str, dict[float, float]]:
            jobs = [
                self.job(row, seed, "validation", rate) for seed in self.tuning_seeds for rate in grid for row in rows
            ]
            cells = dict(zip(jobs, self.get(jobs), strict=True))
            self.tried = {row: dict.fromkeys(grid, 0.0) for row in rows}
            for job, cell in cells.items():
                names = [n for n in cell["scores"] if n == study.main or study.main == MEAN and n in study.averaged]
                mean = np.mean([study.measures[name].scale * np.mean(cell["scores"][name]) for name in names])
                score_of_cell = sign * float(mean) if study.usable(cell) else UNUSABLE
                self.tried[job.row][job.rate] += score_of_cell / len(self.tuning_seeds)
            plain = {rate: float(np.mean([self.tried[row][rate] for row in study.plain or rows])) for rate in grid}
            return {row: plain if row in study.plain else self.tried[row] for row in rows}

        scores = bracket(study.rates, score, tie)
        self.rates = {row: best_rate(of_row, tie) for row, of_row in scores.items()}

    def add_controls_by_time(self) -> None:
        """Controls of the last table that train as long as their rows, by the median seconds of the tuning seeds."""
        (title, table), lengthen = list(self.study.beside.items())[-1], self.study.lengthen
        assert lengthen is not None
        rows, beside, seconds = dict(self.study.rows), {}, {}
        for row in dict.fromkeys([*table, *(control for control, *_ in table.values())]):
            cells = self.get([self.job(row, seed, "validation") for seed in self.tuning_seeds])
            seconds[row] = statistics.median(cell["facts"]["seconds"] for cell in cells)
        for row, (control, *_) in table.items():
            ratio = round(seconds[row] / seconds[control], 1)
            name = f"{control}, {ratio} × steps" if ratio > 1 else control
            if ratio > 1:
                rows[name], self.rates[name] = lengthen(rows[control], ratio), self.rates[control]
            beside[row] = (name,)
        self.study = replace(self.study, rows=rows, beside={**self.study.beside, f"{title}, trained as long": beside})

    def finish(self) -> None:
        """All rows at their rates: the test split, and the means of the validation split."""
        rows, measures = self.study.rows, self.study.measures
        jobs = [self.job(row, seed) for seed in range(self.seeds) for row in rows]
        cells = dict(zip(jobs, self.get(jobs), strict=True))
        self.cells = {row: [cells[job] for job in jobs if job.row == row] for row in rows}
        for row in rows if self.study.rates else ():
            of_row = self.get([self.job(row, seed, "validation") for seed in self.tuning_seeds])
            self.validation[row] = {
                name: measures[name].scale * float(np.mean([cell["scores"][name] for cell in of_row]))
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

    def in_range(self, controls: Sequence[str]) -> list[str]:
        """The measures that can show a difference, by the controls' mean on the validation split; a measure in another
        unit than percent, or that this split does not have, always can."""
        usable = []
        for name, measure in self.study.measures.items():
            known = [self.validation[row][name] for row in controls if name in self.validation.get(row, ())]
            if measure.unit != "%" or not known or is_inside(float(np.mean(known)), measure.chance):
                usable.append(name)
        return usable

    def difference(self, scores: Scores, control: Scores, column: str, usable: Sequence[str]) -> Estimate:
        """Scores minus those of the control, paired by seed and example. MEAN: each usable measure weighs the same."""
        measures, averaged = self.study.measures, self.study.averaged
        chosen = [column] if column != MEAN else [name for name in averaged if name in usable] or averaged
        size, parts, groups = sum(len(measures[name].groups) for name in chosen), [], []
        for name in chosen:
            seeds, view = min(len(scores[name]), len(control[name])), measures[name].view
            gap = scores[name][:seeds] - control[name][:seeds]
            parts.append(view(gap * size / len(chosen) / gap.shape[1]))
            groups += [f"{name}/{group}" for group in measures[name].groups]
        return estimate(np.hstack(parts), groups)

    def table(
        self, beside: Mapping[str, tuple[str, ...]], at: Mapping[str, Scores] | None = None
    ) -> dict[tuple[str, str], dict]:
        """The judged differences of a table by (row, column); the main ones are a family of their own.

        at: scores of rows in place of those at their rates.
        """
        study, differences, inside = self.study, {}, set()
        for row, controls in beside.items():
            scores, control = at[row] if at else self.scores(row), self.mean_scores(controls)
            usable = self.in_range(controls)
            for column in study.columns:
                differences[row, column] = self.difference(scores, control, column, usable)
                if set(study.averaged) & set(usable) if column == MEAN else column in usable:
                    inside.add((row, column))
        margins = {place: study.margin(place[1]) for place in differences}
        less, judged = {place for place in differences if study.less_is_better(place[1])}, {}
        for is_main in (True, False):
            family = {place: gap for place, gap in differences.items() if (place[1] == study.main) == is_main}
            judged |= judge(family, inside, margins, less)
        if self.seeds == 1:  # says nothing of other runs
            judged = {place: verdict | {"verdict": "one seed"} for place, verdict in judged.items()}
        return {place: differences[place]._asdict() | judged[place] for place in differences}

    def at_one_rate(self) -> dict[tuple[str, str], dict]:
        """The first table once more, rows at their controls' rate, on the tuning seeds; of rows whose rate differs."""
        table = next(iter(self.study.beside.values()))
        at = {}
        for row, (control, *_) in table.items():
            if (rate := self.rates[control]) != self.rates[row]:
                at[row] = self.scores(row, self.get([self.job(row, seed, rate=rate) for seed in self.tuning_seeds]))
        return self.table({row: table[row] for row in at}, at)


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
        else:
            made.rates = dict.fromkeys(study.rows, 0.0)
        if study.lengthen:
            made.add_controls_by_time()
        made.finish()
    except Interrupted as interrupted:
        print("\nsaved; the same command goes on from here", file=sys.stderr)
        sys.exit(128 + interrupted.args[0])
    return made


def plan_of(study: Study) -> list[str]:
    """What two reports in one folder share: the study, quick or not, its base, data and settings."""
    return [study.name, digest(study.key)]
