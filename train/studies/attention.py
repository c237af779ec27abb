"""Study: is an attention variant better than plain LoRA with as many parameters, beyond chance?

    python -m train.compare                                  every variant, on the embedded base and scenes
    python -m train.compare --rows paper                     the five models of the paper's Table 1
    python -m train.compare --base google/paligemma-3b-pt-224 --data vqav2:DIR --coco DIR --captions FILE --rows twin

In: a base, data, and rows (what is trained). Out: comparison.md, comparison.json, figure2.png and differences.png: the
paper's Table 1 (VQA), Table 2 (needle) and Figure 2 (needle by place), with 95 % intervals. Every other flag is one of
`train.finetune` and holds for all rows. `train.reproduce paligemma` is the paper's own experiment, without controls.

Each row gets:
- A control: plain LoRA of the smallest rank that has at least as many trainable parameters. Rows may share one.
- Its own learning rate, chosen from a few on the first seed by the *validation* split. Only the chosen rates are
  evaluated on the test split.
- Several seeds, the same for a row and its control, and intervals of the difference on the same examples, over seeds
  and pictures.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from eval.needle import PROTOCOLS
from model.common import UserError
from train.flags import flag
from train.recipes import RECIPES
from train.settings import Settings
from train.studies import engine
from train.studies.attention_data import TASKS, Measure, make_measures
from train.studies.attention_report import draw, to_markdown
from train.studies.cells import (
    PLAIN,
    VERSION,
    FineTuningRow,
    FineTuningStudy,
    NeedleOptions,
    cell_settings,
    fine_tune,
    open_base,
    open_study,
    read_study,
    run_cell,
    without,
)
from train.studies.engine import StudyOptions, choose_rate, describe_runs, difference, matching_rank, read_rates

SAMPLES = 4_000  # of a run on the embedded scenes
# the paper's Table 1
VQA_SCORES = {"paper-1": 53.21, "paper-2": 51.91, "paper-3": 35.72, "paper-4": 33.91, "paper-5": 41.32}

# What `--rows` accepts, besides the names of rows. A new experiment is an entry here.
GROUPS: dict[str, tuple[FineTuningRow, ...]] = {
    "attention": (
        FineTuningRow("baseline", run=open_base),
        FineTuningRow("fine-tuned"),
        FineTuningRow("shared", {"attention": "shared"}),
        FineTuningRow("split", {"attention": "split"}),
        FineTuningRow("split-fresh", {"attention": "split", "option": ('rope_pairs="fresh"',)}),
        FineTuningRow("twin", {"attention": "twin"}),
        FineTuningRow("v2", {"attention": "v2"}),
        FineTuningRow("dex", {"attention": "dex"}),
    ),
    "feed-forward": (
        FineTuningRow("swiglu", {"feed_forward": "swiglu"}),
        FineTuningRow("swiglu-new", {"feed_forward": "swiglu-new"}),
    ),
    "paper": tuple(FineTuningRow(name, RECIPES[name], published=score) for name, score in VQA_SCORES.items()),
}


NAMES = "; ".join(f"{group}: {', '.join(row.name for row in rows)}" for group, rows in GROUPS.items())


@dataclass(frozen=True)
class AttentionOptions(NeedleOptions, StudyOptions):
    """The flags of the attention study, besides those of `train.finetune`."""

    rows: str = flag(
        "attention",
        f"rows, or groups of them ({NAMES}); or a study with flags of its own, which --rows NAME --help shows: wings, "
        "qmamba, text",
        metavar="NAME,…",
    )
    rates: tuple[float, ...] | None = flag(
        None,
        "peak learning rates to try (default: half of the row's own, itself, its double)",
        type=read_rates,
        metavar="A,B,…",
    )
    limit: int = flag(
        800,
        "VQA questions of the test split; half as many needle tests of each kind; half of both for validation",
        least=1,
        metavar="N",
    )
    protocol: str = flag(
        "paper",
        "of the needle tests: one-word answers, parsed strictly, or the likelier of the words",
        choices=PROTOCOLS[:2],
    )
    json: bool = flag(False, "print comparison.json instead of the tables (default: --no-json)")


def pick_rows(names: str, given: Collection[str] = ()) -> list[FineTuningRow]:
    """The rows that `--rows` names, comma-separated, each once; flags that are `given` hold for the paper's rows too.

    Raises UserError for an unknown name.
    """
    by_name = {row.name: row for rows in GROUPS.values() for row in rows}
    picked = {}
    for name in names.split(","):
        if name not in GROUPS and name not in by_name:
            raise UserError(f"--rows {name}: choose of {', '.join([*GROUPS, *by_name])}")
        picked |= {row.name: row for row in GROUPS.get(name, (by_name.get(name),))}
    return [replace(row, changes=without(row.changes, given)) for row in picked.values()]


@dataclass
class RowResult:
    """A row's cells. validation: mean score (0..1) by rate. scores: by measure, (seeds, examples), in percent."""

    row: FineTuningRow
    settings: Settings  # of the first seed, at the chosen rate
    trainable: int = 0
    validation: dict[float, float] = field(default_factory=dict)
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    control: "RowResult | None" = None
    is_control: bool = False  # and not one of the rows that were asked for
    cells: list[dict] = field(default_factory=list)  # all, those of other rates first

    def add_run(self, study: FineTuningStudy, seed: int) -> None:
        """Evaluate one more run on the test split."""
        cell = run_cell(study, self.row, self.settings.lr, seed, "test")
        self.cells.append(cell)
        for name, scores in cell["scores"].items():
            self.scores[name] = np.vstack([*self.scores.get(name, ()), 100 * np.array(scores)])

    def gain(self, measure: Measure) -> dict:
        """Row minus control, paired: the same seeds and examples."""
        return difference(self.scores[measure.name], self.control.scores[measure.name], measure.pictures)


def try_rates(study: FineTuningStudy, row: FineTuningRow, rates: Sequence[float] | None, seed: int) -> RowResult:
    """The row at its best rate. rates: None for half of the row's own rate, itself, and its double."""
    own = replace(study.base, **row.changes)
    rates = sorted(rates or [float(f"{own.lr * factor:.3g}") for factor in (0.5, 1, 2)])
    cells = {rate: run_cell(study, row, rate, seed, "validation") for rate in rates}
    validation = {
        rate: float(np.mean([np.mean(scores) for scores in cell["scores"].values()])) for rate, cell in cells.items()
    }
    settings = cell_settings(study, row, choose_rate(validation), seed)
    parameters = max(cell["trainable"] or 0 for cell in cells.values())
    return RowResult(row, settings, parameters, validation, cells=list(cells.values()))


def make_control(study: FineTuningStudy, result: RowResult) -> FineTuningRow:
    """Plain LoRA of the smallest rank with at least the row's trainable parameters, and the same alpha / r."""
    settings = result.settings
    rank = matching_rank(study.processor.config, settings.targets, result.trainable)
    alpha = settings.alpha * rank / settings.r
    return FineTuningRow(f"LoRA r{rank}", result.row.changes | PLAIN | {"r": rank, "alpha": alpha})


def compare(
    study: FineTuningStudy, rows: Sequence[FineTuningRow], seeds: Sequence[int], rates: Sequence[float] | None = None
) -> list[RowResult]:
    """Every row, then the controls: rates on the first seed by the validation split, then all seeds on the test split.

    Untrained rows come first: they cost little, and show at once which questions cannot be asked.
    """
    results = [RowResult(row, replace(study.base, **row.changes)) for row in rows if not row.is_trained]
    for result in results:
        result.add_run(study, seeds[0])
    results += [try_rates(study, row, rates, seeds[0]) for row in rows if row.is_trained]
    for result in [one for one in results if one.trainable and one.row.needs_control(one.settings)]:
        control = make_control(study, result)
        own = replace(study.base, **control.changes)
        equal = (o for o in results if o.row.run is fine_tune and replace(study.base, **o.row.changes) == own)
        result.control = next(equal, None)
        if result.control is None:
            if control.name in {other.row.name for other in results}:  # the same rank with other settings
                control = replace(control, name=f"{control.name}, {result.row.name}")
            result.control = replace(try_rates(study, control, rates, seeds[0]), is_control=True)
            results.append(result.control)
    for seed in seeds:
        for result in results:
            if result.row.is_trained:
                result.add_run(study, seed)
    return results


def by_label(scores: np.ndarray, labels: Sequence) -> dict[str, float]:
    """Mean of scores (seeds, examples) over seeds and the examples of a label."""
    means, found = scores.mean(axis=0), {str(label): [] for label in labels}
    for label, mean in zip(labels, means, strict=True):
        found[str(label)].append(mean)
    return {label: float(np.mean(values)) for label, values in found.items()}


def summarize_row(result: RowResult, measures: Sequence[Measure]) -> dict:
    summary = {
        "name": result.row.name,
        "trainable": result.trainable,
        "published": result.row.published,
        "is_control": result.is_control,
        "settings": asdict(result.settings) if result.row.is_trained else None,
        "validation": {f"{rate:g}": round(100 * value, 2) for rate, value in result.validation.items()},
        "cells": [cell["file"] for cell in result.cells],
        "diverged": [cell["diverged"] for cell in result.cells if cell["diverged"]],
        "test": {},
    }
    for m in measures:
        scores = result.scores[m.name]
        summary["test"][m.name] = describe_runs(scores, m.pictures) | {"by": by_label(scores, m.labels)}
    if result.control:
        summary["control"], summary["control_trainable"] = result.control.row.name, result.control.trainable
        summary["difference"] = {m.name: result.gain(m) for m in measures}
    return summary


def summarize(study: FineTuningStudy, results: Sequence[RowResult], seeds: Sequence[int]) -> dict:
    """comparison.json: all numbers of the report, and more. Accuracies are in percent."""
    cells = {cell["file"]: cell for result in results for cell in result.cells}
    return {
        "base": study.base.base,
        "fingerprint": study.fingerprint,
        "data": " ".join(study.base.data),
        "version": VERSION,
        "settings": asdict(study.base),
        "seeds": list(seeds),
        "protocol": study.protocol,
        "measures": [{"name": m.name, "title": m.title, "chance": m.chance} for m in study.measures["test"]],
        "examples": {split: {m.name: len(m.examples) for m in of_split} for split, of_split in study.measures.items()},
        "cpu_seconds": round(sum(cell["cpu_seconds"] for cell in cells.values())),
        "rows": [summarize_row(result, study.measures["test"]) for result in results],
    }


DECIDED = (*"attention feed_forward option tasks lr seed full arch stage wings".split(),)
DECIDED += ("resume", "plan", "show_batch", "evaluate", "eval_limit", "eval_data")


def read_arguments(argv: Sequence[str] | None) -> tuple[list[FineTuningRow], AttentionOptions, Settings]:
    """The rows, the study's flags, and the settings that all rows start from. Raises UserError."""
    defaults = ("--samples", str(SAMPLES))
    options, base, given, _ = read_study(AttentionOptions, argv, "train.compare", __doc__, DECIDED, defaults)
    if base.full:
        raise UserError("--recipe paligemma trains every weight, but rows are compared with LoRA: take another recipe")
    return pick_rows(options.rows, given), options, replace(base, tasks=",".join(TASKS))


def main(argv: Sequence[str] | None = None) -> None:
    rows, options, base = read_arguments(argv)
    seeds = range(options.seeds)
    limits = {"validation": max(1, options.limit // 2), "test": options.limit}
    measures = {split: make_measures(base, split, limit, options) for split, limit in limits.items()}
    study = open_study(base, options.out, measures, options.protocol)

    def find() -> dict:
        return summarize(study, compare(study, rows, seeds, options.rates), seeds)

    engine.run_study(options.out, find, to_markdown, draw, print_json=options.json)
