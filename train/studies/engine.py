"""The engine of all studies: the rate of each row, a fixed number of seeds, cells on disk, judged
differences.

A *row* is one way to train a model. A *cell* is a row at one rate with one seed: its score on each
example of each measure, as JSON in a folder whose name is a hash of all that decides it, source
included. So an interrupted study goes on, and a change computes only the cells that it changes.
`report.write` writes down what `run` returns.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import IO

import numpy as np
import torch

from model.common import UserError, read_json
from train.estimates import Estimate, estimate
from train.flags import flag
from train.run import Interrupted, lock_folder
from train.studies.cells import Job, compute_all, digest, source_hash
from train.studies.rules import MOST_RATES, TIE, TUNING_SEEDS, Measure, is_inside, judge

MEAN = "mean"  # a column of the tables: of the measures in range, each with the same weight
UNUSABLE = -1e6  # below the mean of any other cells
# by measure (seeds, examples), in percent or in the unit of the measure
Scores = dict[str, np.ndarray]


@dataclass(frozen=True)
class StudyOptions:
    """The flags that all studies share; a study changes their defaults and adds more."""

    seeds: int = flag(10, "runs of each row", least=1, metavar="N")
    rates: tuple[float, ...] = flag(
        (), "to try first, one alone (default: the study's)", type=float, nargs="+"
    )
    jobs: int = flag(
        1 if torch.cuda.is_available() else torch.get_num_threads(), "cells side by side", least=1
    )
    quick: bool = flag(False, "a plan of at most ten minutes on two cores")
    out: Path | None = flag(
        None, "folder of results and cells (default: runs/STUDY)", metavar="DIR"
    )


@dataclass(frozen=True)
class Study:
    """make(job, folder, *folders): trains a cell in its folder and scores it: {"scores": {split:
    {measure: [score]}}, "facts": {…}}. folders: of the cells that it `needs`. Facts: "parameters",
    "seconds" of training, and "unusable", why its rate may not be chosen, and "ladders", by measure
    the validation scores from the easiest number on. A cell that raises Diverged has no scores, and
    the fact "diverged".

    key: what decides a cell beside its job and the source. beside: by title of a table the controls
    of each row, whose scores are averaged; the first table is the primary one. rates: the first
    grid; () where each row fixes its rate, and no validation split exists. main: the measure of the
    main difference, which chooses the rates; MEAN: of all with `in_mean`. tuning_seeds: that choose
    the rates. plain: rows that share a rate. tuned: rows whose rates are chosen, if not all; the
    others take that of plain ones. predictions: (row, column, verdict, reason), written before the
    study runs. lengthen: the name and value of the setting by which controls of the last table
    train longer, and how many times as long by row: fixed, since a ratio that is measured would
    choose the control. relative_margin: of what controls have above guessing, in place of the
    margins. more(run): blocks of the report that no other study has, each a text or a list of
    lines.
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
    tuning_seeds: Sequence[int] = range(TUNING_SEEDS)
    plain: tuple[str, ...] = ()
    tuned: tuple[str, ...] = ()
    needs: Callable[[Job], Sequence[Job]] = lambda job: ()
    lengthen: tuple[str, float, Mapping[str, float]] | None = None
    relative_margin: float | None = None
    predictions: tuple[tuple[str, str, str, str], ...] = ()
    more: Callable[["Run"], list] = lambda run: []

    @property
    def averaged(self) -> list[str]:
        return [name for name, measure in self.measures.items() if measure.in_mean]

    @property
    def columns(self) -> dict[str, Measure]:
        """Of a table of differences."""
        has_mean = self.main == MEAN or len(self.averaged) > 1
        mean = {MEAN: Measure("mean of those in range", ())} if has_mean else {}
        return mean | dict(self.measures)


@dataclass
class Run:
    """tried: validation scores by row and rate. rates: the best ones, or those of another study.
    cells: by row, seed by seed. tables: judged differences by title. used: all results behind the
    report. parts: studies within."""

    study: Study
    out: Path
    jobs: int
    seeds: int
    lock: IO | None = None
    tried: dict[str, dict[float, float]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    cells: dict[str, list[dict]] = field(default_factory=dict)
    tables: dict[str, dict[tuple[str, str], dict]] = field(default_factory=dict)
    used: dict[Job, dict] = field(default_factory=dict)
    parts: list["Run"] = field(default_factory=list)

    def file(self, job: Job) -> Path:
        """Where the result of a job is, or will be; the other files of the cell are beside it."""
        name = digest(source_hash(self.study.make), self.study.key, job)
        return self.out / "cells" / name / "cell.json"

    def get(self, jobs: Sequence[Job]) -> list[dict]:
        """The results of jobs, in order; those not on disk are computed, `self.jobs` at a time."""
        # 1. what these cells are made from
        needs = {job: self.study.needs(job) for job in jobs}
        needed = dict.fromkeys(need for of_job in needs.values() for need in of_job)
        if needed:
            self.get(list(needed))
        # 2. the missing ones, seed by seed
        missing = [job for job in needs if not self.file(job).exists()]
        calls = []
        for job in sorted(missing, key=lambda job: job.seed):
            folders = [self.file(need).parent for need in needs[job]]
            calls.append((self.study.make, job, self.file(job), folders))
        compute_all(calls, self.jobs)
        # 3. all of them, from disk
        cells = [read_json(self.file(job)) for job in jobs]
        self.used |= zip(jobs, cells, strict=True)
        return cells

    def at_rates(
        self,
        rates: Mapping[str, float],
        seeds: Sequence[int],
    ) -> dict[str, list[dict]]:
        """The cells of rows at their rates, seed by seed."""
        jobs = []
        for row, rate in rates.items():
            jobs += [Job(row, self.study.rows[row], rate, seed) for seed in seeds]
        cells = iter(self.get(jobs))
        return {row: list(islice(cells, len(seeds))) for row in rates}

    def compute(self) -> None:
        """Choose the rates, then make the cells of all rows at them, and judge their
        differences."""
        self.rates = self.rates or dict.fromkeys(self.study.rows, 0.0)
        tuning_seeds = self.study.tuning_seeds[: self.seeds]
        if self.study.rates:
            self.tune(tuning_seeds)
        if self.study.lengthen:
            self.add_controls_by_time(*self.study.lengthen)
        self.cells = self.at_rates(self.rates, range(self.seeds))
        self.tables = {title: self.table(beside) for title, beside in self.study.beside.items()}

    def tune(self, seeds: Sequence[int]) -> None:
        """Choose the rate of each row: the lowest of those within a tie of the best on the
        validation split.

        The grid of all rows grows by factors of 2 until every row's best is inside; a single rate
        is not searched for. Plain rows share theirs: a rate that chance chose for one control makes
        a difference where there is none.
        """
        study = self.study
        rows = list(study.tuned or study.rows)
        shared = [row for row in study.plain if row in rows] or rows
        tie = TIE * study.columns[study.main].margin
        grid = []
        more = study.rates
        while more and len(grid) + len(more) <= MOST_RATES:
            # 1. every row at every rate
            grid = sorted([*grid, *more])
            self.tried = {row: {} for row in rows}
            for rate in grid:
                for row, cells in self.at_rates(dict.fromkeys(rows, rate), seeds).items():
                    self.tried[row][rate] = self.worth(cells)
            # 2. the lowest of the best ones
            plain = {}
            for rate in grid:
                plain[rate] = np.mean([self.tried[row][rate] for row in shared])
            for row in rows:
                scores = plain if row in study.plain else self.tried[row]
                least = max(scores.values()) - tie
                self.rates[row] = min(rate for rate in grid if scores[rate] >= least)
            # 3. further rates, where the best one is at an end
            best = self.rates.values() if len(grid) > 1 else ()
            more = []
            if grid[0] in best:
                more.append(grid[0] / 2)
            if grid[-1] in best:
                more.append(grid[-1] * 2)
            self.rates |= {row: self.rates[shared[0]] for row in study.rows if row not in rows}

    def worth(self, cells: Sequence[dict]) -> float:
        """What a rate is chosen by: the main measure of its cells on the validation split; more is
        better."""
        if any(cell["facts"].keys() & {"diverged", "unusable"} for cell in cells):
            return UNUSABLE
        main = self.study.main
        means = self.validation(cells)
        names = self.study.averaged if main == MEAN else [main]
        mean = np.mean([means[name] for name in means if name in names])
        return -mean if self.study.columns[main].less_is_better else mean

    def add_controls_by_time(
        self,
        setting: str,
        value: float,
        ratios: Mapping[str, float],
    ) -> None:
        """Controls of the last table that train as long as their rows."""
        *_, title = self.study.beside
        rows = dict(self.study.rows)
        beside = {}
        for row, (control, *_) in self.study.beside[title].items():
            name = control
            ratio = ratios.get(row)
            if ratio:
                name = f"{control}, {ratio} × steps"
                rows[name] = *rows[control], (setting, round(value * ratio))
                self.rates[name] = self.rates[control]
            beside[row] = (name,)
        tables = {**self.study.beside, f"{title}, trained as long": beside}
        self.study = replace(self.study, rows=rows, beside=tables)

    # Scores and differences

    def scores(self, row: str) -> Scores:
        """Of the cells of a row in the test split. A cell that diverged has the worst."""
        scores = {}
        for name, measure in self.study.measures.items():
            failed = {name: [measure.failed] * len(measure.groups)}
            of_cells = [cell["scores"].get("test", failed)[name] for cell in self.cells[row]]
            scores[name] = measure.scale * np.array(of_cells, dtype=float)
        return scores

    def validation(self, cells: Sequence[dict]) -> dict[str, float]:
        """The mean of each measure of the validation split over cells that did not diverge."""
        of_cells = [
            cell["scores"]["validation"] for cell in cells if "validation" in cell["scores"]
        ]
        means = {}
        for name in of_cells[0] if of_cells else ():
            scores = np.array([of_cell[name] for of_cell in of_cells])
            means[name] = (self.study.measures[name].scale * scores).mean()
        return means

    def facts(self, row: str) -> list[dict]:
        """Of the cells of a row that did not diverge."""
        return [cell["facts"] for cell in self.cells[row] if "diverged" not in cell["facts"]]

    def in_range(self, controls: Sequence[str]) -> list[str]:
        """The columns that can show a difference, by the controls' mean on the validation split; a
        measure that is no share, or that this split does not have, always can."""
        validation = [self.validation(self.cells[row][:TUNING_SEEDS]) for row in controls]
        usable = []
        for name, measure in self.study.measures.items():
            known = [scores[name] for scores in validation if name in scores]
            is_usable = not measure.is_share or not known
            if not is_usable:
                is_usable = is_inside(np.mean(known), measure.chance)
            if is_usable and self.falls(name, controls):
                usable.append(name)
        if any(name in usable for name in self.study.averaged):
            usable.append(MEAN)
        return usable

    def falls(self, name: str, controls: Sequence[str]) -> bool:
        """Whether the last number of a ladder is harder for the controls than the first, or the
        measure has none."""
        ladders = [of_cell.get("ladders", {}) for row in controls for of_cell in self.facts(row)]
        known = [of_cell[name] for of_cell in ladders if name in of_cell]
        if not known:
            return True
        ladder = np.mean(known, axis=0)
        return bool(ladder[-1] < ladder[0])

    def with_margins(self, controls: Sequence[str]) -> dict[str, Measure]:
        """The columns; if margins are relative, with that share of what the controls have above
        guessing."""
        if not self.study.relative_margin:
            return self.study.columns
        known = [self.validation(self.cells[row]) for row in controls]
        above = {}
        for name in known[0]:
            chance = self.study.measures[name].chance or 0.0
            above[name] = np.mean([means[name] for means in known]) - chance
        averaged = self.averaged_of(self.in_range(controls))
        above[MEAN] = np.mean([above[name] for name in averaged])
        columns = {}
        for name, column in self.study.columns.items():
            margin = max(0.0, self.study.relative_margin * above[name])
            columns[name] = replace(column, margin=margin)
        return columns

    def table(self, beside: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, str], dict]:
        """The judged differences, paired by seed and example, by (row, column); in MEAN each
        measure in range weighs the same. The main ones are a family of their own."""
        columns = self.with_margins(dict.fromkeys(chain(*beside.values())))
        # 1. the differences
        differences, inside = {}, set()
        for row, controls in beside.items():
            usable = self.in_range(controls)
            inside |= {(row, column) for column in usable}
            gaps = self.gaps(row, controls)
            for column in columns:
                names = self.averaged_of(usable) if column == MEAN else [column]
                differences[row, column] = self.difference(gaps, names)
        # 2. their verdicts, those of the main column apart
        table = {}
        for is_main in (True, False):
            family = {}
            for place, gap in differences.items():
                if (place[1] == self.study.main) == is_main:
                    family[place] = gap
            for place, judged in judge(family, inside, columns).items():
                table[place] = differences[place]._asdict() | judged
                if self.seeds == 1:  # which says nothing of other runs
                    table[place]["verdict"] = "one seed"
        return table

    def averaged_of(self, usable: Sequence[str]) -> list[str]:
        """The measures of MEAN: of those that are in it the `usable` ones, or else all."""
        names = [name for name in self.study.averaged if name in usable]
        return names or self.study.averaged

    def gaps(self, row: str, controls: Sequence[str]) -> Scores:
        """The scores of a row minus the mean of its controls'."""
        of_controls = [self.scores(control) for control in controls]
        gaps = {}
        for name, scores in self.scores(row).items():
            gaps[name] = scores - np.mean([of[name] for of in of_controls], axis=0)
        return gaps

    def difference(self, gaps: Scores, names: Sequence[str]) -> Estimate:
        """The mean gap of measures, each with the same weight whatever its number of examples."""
        groups, parts = [], []
        for name in names:
            groups += [f"{name}/{group}" for group in self.study.measures[name].groups]
        for name in names:
            weight = len(groups) / len(names) / gaps[name].shape[1]
            parts.append(gaps[name] * weight)
        return estimate(np.hstack(parts), groups)


def run(study: Study, options: StudyOptions) -> Run:
    """The whole study but its report. The folder stays locked while the result lives.

    Raises UserError if another process works in it, and for a rate that is not above 0.
    """
    if not all(0 < rate < math.inf for rate in study.rates):
        raise UserError(f"--rates {' '.join(map(str, study.rates))}: expected rates above 0")
    if options.quick:
        study = replace(study, name=f"{study.name}-quick")
    out = options.out or Path("runs", study.name)
    out.mkdir(parents=True, exist_ok=True)
    made = Run(study, out, options.jobs, options.seeds, lock_folder(out))
    torch.set_num_threads(1)  # so that a result does not depend on the number of jobs
    try:
        made.compute()
    except Interrupted as interrupted:
        interrupted.end_program("the same command goes on from here")
    return made
