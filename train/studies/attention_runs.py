"""The runs of the attention study: the rate of each row, its controls, its seeds, and paired differences.

In: a study (`train/studies/cells.py`), rows and flags. Out: a `RowResult` for each row and control.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from eval.statistics import Estimate, estimate, slope_scores
from train.optim import count, trainable
from train.settings import Settings
from train.studies import engine, rules
from train.studies.attention_data import DOSE, Measure, training_records
from train.studies.attention_rows import AttentionOptions
from train.studies.cells import PLAIN, FineTuningRow, FineTuningStudy, cell_settings, fine_tune, run_cell, run_cells
from train.supervised import make_order, ready, supervised_loss
from train.systems.open import open_model

OVERALL = "all"  # the mean over all measures but the doses
Scores = dict[str, np.ndarray]  # by measure, (seeds, examples), in percent


@dataclass
class RowResult:
    """A row's cells. validation: mean score (0..1) by rate. scores: by measure, (seeds, examples), in percent; common:
    the same at the common rate. control: as many parameters; timed: as much time."""

    row: FineTuningRow
    settings: Settings  # of the first seed, at the chosen rate
    trainable: int = 0
    validation: dict[float, float] = field(default_factory=dict)
    scores: Scores = field(default_factory=dict)
    common: Scores = field(default_factory=dict)
    control: "RowResult | None" = None
    timed: "RowResult | None" = None
    is_at_edge: bool = False  # its best rate is the lowest or the highest tried
    is_control: bool = False  # and not one of the rows that were asked for
    cells: list[dict] = field(default_factory=list)  # all, those of the validation split first

    @property
    def seeds(self) -> int:
        return len(next(iter(self.scores.values()), ()))


def collect(cells: Sequence[dict]) -> Scores:
    """By measure, the scores (seeds, examples) of cells, in percent."""
    return {name: 100 * np.array([cell["scores"][name] for cell in cells]) for name in cells[0]["scores"]}


def in_range(control: Scores, measures: Sequence[Measure]) -> list[Measure]:
    """The measures in which a row with these scores neither guesses nor is perfect; of unknown chance: 0 %."""
    return [m for m in measures if rules.is_inside(float(control[m.name].mean()), m.chance or 0.0)]


def overall(one: Scores, control: Scores, measures: Sequence[Measure]) -> Estimate:
    """The main difference: the mean over the measures that the control is in range of, or if there are none, of all."""
    usable = [m for m in in_range(control, measures) if m.name != DOSE]
    return gain(one, control, OVERALL, usable or measures)


def gain(one: Scores, other: Scores, measure: str, measures: Sequence[Measure]) -> Estimate:
    """One minus the other on a measure, paired: the same seeds and examples. Of OVERALL, each measure has the same
    weight; of DOSE, it is the change from no distractor to the most."""
    chosen = [m for m in measures if m.name == measure or measure == OVERALL and m.name != DOSE]
    size, parts, groups = sum(len(m.examples) for m in chosen), [], []
    for m in chosen:
        a, b = one[m.name], other[m.name]
        seeds = min(len(a), len(b))
        parts.append((a[:seeds] - b[:seeds]) * size / len(chosen) / len(m.examples))
        groups += [f"{m.name}/{picture}" for picture in m.pictures]
    if measure == DOSE:
        doses = np.array(chosen[0].labels)
        return estimate(slope_scores(doses / doses.max(), parts[0]), groups)
    return estimate(np.hstack(parts), groups)


# Rates


def first_rates(study: FineTuningStudy, rows: Sequence[FineTuningRow], options: AttentionOptions) -> list[float]:
    """The rates to try first, the same for all rows."""
    own = next((replace(study.base, **row.changes).lr for row in rows if row.is_trained), study.base.lr)
    return sorted(options.rates or [float(f"{own * factor:.3g}") for factor in (1, 2, 4)])


def tune(
    study: FineTuningStudy, results: Sequence[RowResult], rates: Sequence[float], options: AttentionOptions
) -> None:
    """Choose the rate of each row by the mean of three seeds on the validation split.

    Plain rows share the rate that is best for their mean: their ranks hardly differ, and a control whose own rate was
    chosen by chance makes a difference where there is none.
    """
    by_name = {result.row.name: result for result in results}

    def score(grid: Sequence[float]) -> rules.Scores:
        names = [
            (result.row, rate, seed, "validation")
            for seed in range(min(rules.TUNING_SEEDS, options.seeds))
            for rate in grid
            for result in results
        ]
        cells = run_cells(study, names)
        found = rules.mean_scores([(row.name, rate) for row, rate, *_ in names], map(mean_score, cells))
        for name, result in by_name.items():
            result.validation = found[name]
            result.cells = [cell for (row, *_), cell in zip(names, cells, strict=True) if row.name == name]
        plain = [result for result in results if not result.row.needs_control(result.settings)]
        shared = {rate: float(np.mean([result.validation[rate] for result in plain])) for rate in grid} if plain else {}
        return {name: shared if one in plain else one.validation for name, one in by_name.items()}

    scores = rules.bracket(rates, score) if options.grow else score(rates)
    for name, result in by_name.items():
        result.settings = cell_settings(study, result.row, rules.best_rate(scores[name]), 0)
        result.is_at_edge = bool(rules.edges({name: scores[name]}))


def mean_score(cell: dict) -> float:
    """The mean over measures (0..1)."""
    return float(np.mean([np.mean(scores) for scores in cell["scores"].values()]))


# Controls


def make_control(study: FineTuningStudy, result: RowResult) -> FineTuningRow:
    """Plain LoRA of the smallest rank with at least the row's trainable parameters, and the same alpha / r."""
    settings = result.settings
    rank = engine.matching_rank(study.processor.config, settings.targets, result.trainable)
    alpha = settings.alpha * rank / settings.r
    return FineTuningRow(f"LoRA r{rank}", result.row.changes | PLAIN | {"r": rank, "alpha": alpha})


def add_controls(study: FineTuningStudy, results: list[RowResult], rate: float) -> None:
    """Give each row that is not plain LoRA its control, and add those that are not rows themselves."""
    trained = [result for result in results if result.row.is_trained]
    cells = run_cells(study, [(r.row, rate, 0, "validation") for r in trained])
    for result, cell in zip(trained, cells, strict=True):
        result.cells, result.trainable = [cell], cell["trainable"] or 0
        if cell["diverged"]:  # it has a control all the same
            settings = cell_settings(study, result.row, rate, 0)
            result.trainable = count(trainable(open_model(settings, study.world.device)[0]).values())
    for result in [one for one in trained if one.trainable and one.row.needs_control(one.settings)]:
        control = make_control(study, result)
        own = replace(study.base, **control.changes)
        equal = (o for o in results if o.row.run is fine_tune and replace(study.base, **o.row.changes) == own)
        result.control = next(equal, None)
        if result.control is None:
            if control.name in {other.row.name for other in results}:  # the same rank with other settings
                control = replace(control, name=f"{control.name}, {result.row.name}")
            (cell,) = run_cells(study, [(control, rate, 0, "validation")])
            result.control = RowResult(control, own, cell["trainable"] or 0, is_control=True, cells=[cell])
            results.append(result.control)


def add_timed_controls(study: FineTuningStudy, results: list[RowResult]) -> None:
    """Give each row a control that trains as long: its control, at its rate, on more samples."""
    for result in [one for one in results if one.control]:
        result.timed = add_timed_control(result.control, round(step_ratio(study, result), 1), results)


def add_timed_control(control: RowResult, ratio: float, results: list[RowResult]) -> RowResult:
    """A control that trains `ratio` times as long, one of `results`; the control itself if that is no longer."""
    if ratio <= 1:
        return control
    samples = {"samples": round(control.settings.samples * ratio)}
    row = replace(control.row, name=f"{control.row.name}, {ratio} × steps", changes=control.row.changes | samples)
    timed = next((one for one in results if one.row.name == row.name), None)
    if timed is None:
        timed = RowResult(row, replace(control.settings, **samples), control.trainable, is_control=True)
        results.append(timed)
    return timed


def paired_ratio(steps: Sequence[tuple[Callable[[], torch.Tensor], torch.optim.Optimizer]], rounds: int = 12) -> float:
    """The CPU time of the first of two training steps, each a loss and its optimizer, in that of the second: the median
    of paired steps."""
    ratios = []
    for _ in range(rounds):
        spent = []
        for loss, optimizer in steps:
            started = time.process_time()
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            spent.append(time.process_time() - started)
        ratios.append(spent[0] / spent[1])
    return statistics.median(ratios)


def peers(control: RowResult, results: Sequence[RowResult]) -> list[RowResult]:
    """The rows of plain LoRA that differ from a control in nothing but the rank, with itself; none if it is alone."""

    def but_rank(one: RowResult) -> Settings:
        return replace(one.settings, r=1, alpha=1.0)

    plain = [one for one in results if one.row.is_trained and not one.row.needs_control(one.settings)]
    found = [one for one in plain if but_rank(one) == but_rank(control)]
    return found if len(found) > 1 else []


def step_ratio(study: FineTuningStudy, result: RowResult) -> float:
    """The CPU time of a row's training step in that of its control's, measured once."""
    both = [replace(settings, samples=64, lr=1e-3) for settings in (result.settings, result.control.settings)]
    folder = engine.cell_folder(study.out, "step", study.fingerprint, *map(engine.deciding, both))

    def work(folder) -> dict:
        order = make_order(training_records(both[0], study.base.seed)[0], study.processor, both[0], study.world)
        (micro,) = next(iter(order.steps(0)))
        steps = []
        for settings in both:
            model, optimizer = open_model(settings, study.world.device)
            own = ready(micro, model, study.processor, study.world.device)
            steps.append((partial(supervised_loss, model, own), optimizer))
        return {"ratio": paired_ratio(steps)}

    return engine.finish_cell(folder / "step.json", f"{result.row.name}, a step", work)["ratio"]


# The whole


def compare(study: FineTuningStudy, rows: Sequence[FineTuningRow], options: AttentionOptions) -> list[RowResult]:
    """Every row, then the controls: rates by the validation split, then as many seeds as needed on the test split.

    Untrained rows come first: they cost little, and show at once which questions cannot be asked.
    """
    results = [RowResult(row, replace(study.base, **row.changes)) for row in rows]
    for result in results:
        if not result.row.is_trained:
            result.cells = [run_cell(study, result.row, result.settings.lr, 0, "test")]
            result.scores = collect(result.cells)
    rates = first_rates(study, rows, options)
    add_controls(study, results, rates[0])
    trained = [result for result in results if result.row.is_trained]
    if trained:
        announce(trained, rates, options)
        tune(study, trained, rates, options)
        if options.timed and study.base.is_embedded:
            add_timed_controls(study, results)
        test(study, [result for result in results if result.row.is_trained], options)
        test_common_rate(study, trained, options)
    return results


def announce(results: Sequence[RowResult], rates: Sequence[float], options: AttentionOptions) -> None:
    """Print what the study takes at least, by its first cells."""
    each = statistics.mean(cell["cpu_seconds"] for result in results for cell in result.cells)
    tuning = min(rules.TUNING_SEEDS, options.seeds)
    runs = len(results) * (len(rates) * tuning + options.seeds - tuning)
    print(
        f"{len(results)} rows and controls: {runs} runs of about {each:.0f} CPU seconds, {runs * each:,.0f} in all, "
        "and more where rates or seeds are added",
        file=sys.stderr,
    )


def test(study: FineTuningStudy, results: Sequence[RowResult], options: AttentionOptions) -> None:
    """Run each row at its rate on the test split with as many seeds as it needs, and what stands beside it."""
    active, count = list(results), options.seeds
    while active:
        names = [(r.row, r.settings.lr, seed, "test") for seed in range(count) for r in active]
        cells = dict(zip([(row.name, seed) for row, _, seed, _ in names], run_cells(study, names), strict=True))
        for result in active:
            own = [cells[result.row.name, seed] for seed in range(count)]
            result.cells += own[result.seeds :]
            result.scores = collect(own)
        unsure = [
            one
            for one in active
            if one.control
            and not rules.enough(
                [overall(one.scores, one.control.scores, study.measures["test"])],
                count,
                options.seeds,
                max(options.seeds, options.most_seeds),
            )
        ]
        beside = [(row, row.control, row.timed, *peers(row.control, active)) for row in unsure]
        wanted = {one.row.name for rows in beside for one in rows if one}
        active, count = [one for one in active if one.row.name in wanted], count + 1


def test_common_rate(study: FineTuningStudy, results: Sequence[RowResult], options: AttentionOptions) -> None:
    """Run all rows at the rate of the first plain one, with the seeds that have chosen the rates."""
    plain = next((one for one in results if one.is_control or not one.row.needs_control(one.settings)), None)
    if plain and any(one.control for one in results):
        rate, seeds = plain.settings.lr, range(min(rules.TUNING_SEEDS, options.seeds))
        names = [(one.row, rate, seed, "test") for seed in seeds for one in results]
        cells = list(zip(names, run_cells(study, names), strict=True))
        for result in results:
            result.common = collect([cell for (row, *_), cell in cells if row.name == result.row.name])
            if result.settings.lr != rate:
                result.cells += [cell for (row, *_), cell in cells if row.name == result.row.name]
