"""The report of the study of bases pretrained from nothing: comparison.json, comparison.md and the curves.

In: the rows' results and what their training has logged. Out: a summary, Markdown and a picture.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image

from eval import figures
from eval.report import markdown_table
from eval.statistics import estimate
from train.studies import attention_report, engine, rules
from train.studies.attention_report import (
    accuracy_table,
    conclusions,
    counts_of,
    difference_table,
    dose_table,
    judged,
    positive_blocks,
    prediction_table,
    range_table,
)
from train.studies.attention_runs import RowResult
from train.studies.cells import FineTuningStudy

Curves = Mapping[str, Sequence[Mapping[str, Mapping[str, list]]]]  # by row, of each seed, by phase
Shares = Mapping[str, Sequence[Mapping[str, list[dict[str, float]]]]]  # by row, of each seed, by kind of needle
LOOKED_AT = ("n4d3", "n4o1")
SHARE = 0.1  # the smallest difference of interest between shares of attention, as a share of plain attention's
LOOKS = ("answer on needle", "answer on distractors", "name on needle", "name on distractors")
CLAIM = (
    "Published (Ye et al. 2024): less loss at equal size, better retrieval, less attention on noise, in language "
    "models of billions of parameters. Two million that see pictures neither confirm nor refute that."
)


def summarize(
    study: FineTuningStudy,
    results: Sequence[RowResult],
    of_rows: Mapping[str, tuple],
    predictions: Sequence[rules.Prediction],
) -> dict:
    """comparison.json. Accuracies are in percent. of_rows: `Curves` and `Shares` of each row."""
    attention = summarize_shares({row: shares for row, (_, shares) in of_rows.items()})
    curves = summarize_curves({row: curves for row, (curves, _) in of_rows.items()})
    summary = attention_report.summarize(study, results, predictions, attention["difference"])
    return summary | {"curves": curves, "attention": attention}


def summarize_shares(shares: Shares) -> dict[str, dict]:
    """Shares of the attention, the mean over layers: by row the mean of the seeds, and of all but the first row the
    judged difference to it, over seeds. Less on distractors is better; equivalent is what differs by less than SHARE of
    the first row's."""
    by_row = {
        row: {
            f"{look}, {kind}": np.array([[np.mean([layer[look] for layer in run[kind]])] for run in runs])
            for kind in LOOKED_AT
            for look in LOOKS
        }
        for row, runs in shares.items()
    }
    first, *others = by_row
    found: dict = {
        "mean": {row: {name: float(one.mean()) for name, one in of_row.items()} for row, of_row in by_row.items()}
    }
    found["difference"] = {}
    for row in others:
        seeds = min(len(shares[row]), len(shares[first]))
        gains = {name: estimate(one[:seeds] - by_row[first][name][:seeds]) for name, one in by_row[row].items()}
        less = [name for name in gains if " on distractors" in name]
        margins = {name: SHARE * float(of_first.mean()) for name, of_first in by_row[first].items()}
        judgements = rules.judge(gains, seeds=dict.fromkeys(gains, seeds), less_is_better=less, margins=margins)
        found["difference"][row] = {name: engine.verdict(one) | judgements[name] for name, one in gains.items()}
    return found


def share_table(attention: Mapping[str, dict]) -> list[str]:
    """Where the attention of the answer, and of the caption's name, goes."""
    first, body = next(iter(attention["mean"])), []
    for name, mean in attention["mean"][first].items():
        gaps = [judged(of_row[name]) for of_row in attention["difference"].values()]
        body.append([name, f"{mean:.1f}", *gaps])
    return markdown_table(["share, %", first, *(f"{row} − {first}" for row in attention["difference"])], body)


def summarize_curves(curves: Curves) -> dict[str, dict]:
    """By phase: the steps; by row the mean loss and λ by layer; and of all but the first row the difference to it, with
    an interval that is not corrected for their number."""
    first, found = next(iter(curves)), {}
    for phase in curves[first][0]:
        steps = curves[first][0][phase]["step"]
        losses = {row: np.array([run[phase]["loss"] for run in runs]) for row, runs in curves.items()}
        of_phase: dict = {"step": steps, "loss": {row: one.mean((0, 2)).tolist() for row, one in losses.items()}}
        of_phase["lambda"] = {
            row: np.mean([run[phase]["lambda"] for run in runs], axis=0).tolist() for row, runs in curves.items()
        }
        for row in [row for row in curves if row != first]:
            seeds = min(len(losses[row]), len(losses[first]))
            gaps = losses[row][:seeds] - losses[first][:seeds]
            gains = {step: estimate(gaps[:, number]) for number, step in enumerate(steps)}
            of_phase.setdefault("difference", {})[row] = [engine.verdict(one) for one in gains.values()]
        found[phase] = of_phase
    return found


def curve_table(curves: Mapping[str, dict], first: str) -> list[str]:
    """The loss of held-out questions by step, and the difference of each row to the first."""
    body = []
    for phase, one in curves.items():
        for number, step in enumerate(one["step"]):
            gaps = [engine.spell(of_row[number], 3) for of_row in one["difference"].values()]
            body.append([phase, f"{step}", f"{one['loss'][first][number]:.3f}", *gaps])
    rows = next(iter(curves.values()))["difference"]
    return markdown_table(["phase", "step", first, *(f"{row} − {first}" for row in rows)], body)


def lambda_table(curves: Mapping[str, dict]) -> list[str]:
    """λ by layer over training, its mean over seeds."""
    body = [
        [row, phase, f"{step}", *(f"{value:.3f}" for value in values)]
        for row in next(iter(curves.values()))["lambda"]
        for phase, one in curves.items()
        for step, values in zip(one["step"], one["lambda"][row], strict=True)
        if values
    ]
    layers = len(body[0]) - 3 if body else 0
    return markdown_table(["row", "phase", "step", *(f"layer {n + 1}" for n in range(layers))], body) if body else []


def to_markdown(summary: dict) -> str:
    """comparison.md."""
    counts, samples, plain = counts_of(summary), summary["settings"]["samples"], summary["rows"][0]["name"]
    blocks = [
        f"{samples:,} questions of pretraining and half as many of tuning a run, of random weights; rows of "
        f"a seed begin with the same weights and learn the same questions in the same order. Rates by the mean of up "
        f"to {rules.TUNING_SEEDS} seeds on the validation split ({counts['validation']}); below is the test split "
        f"({counts['test']}). Accuracies in %, with 95 % bootstrap intervals over seeds and pictures; differences in "
        f"points, paired by seed and example, with 95 % intervals of Student's t. {rules.VERDICTS}",
        *engine.sections(
            ("Table 1: accuracy after tuning, at each row's rate", accuracy_table(summary)),
            ("Table 2: minus plain, of as many parameters", difference_table(summary)),
            ("Table 3: minus plain, trained as long", difference_table(summary, "difference_timed", "timed")),
            ("Table 4: as Table 2, all rows at one rate", difference_table(summary, "difference_common")),
            ("4×4 needle by the number of distractors, %; more than 3 were never trained on", dose_table(summary)),
            (
                "Attention on the needle and on all distractors (less is better), mean over layers; equivalent: within "
                f"{100 * SHARE:g} % of plain's",
                share_table(summary["attention"]),
            ),
            ("Loss of held-out questions, nats a token", curve_table(summary["curves"], plain)),
            ("λ by layer", lambda_table(summary["curves"])),
            ("Range of the measures", range_table(summary)),
            ("Predictions", prediction_table(summary["predictions"])),
        ),
        "![loss](curves.png)",
        *positive_blocks(summary.get("positive")),
    ]
    words = [*conclusions(summary), CLAIM]
    return engine.compose("A base with differential attention, from nothing", *blocks, conclusions=words)


def draw(summary: dict) -> dict[str, list[Image.Image]]:
    """The curves of both phases."""
    charts = [
        figures.line_chart(
            {row: list(zip(one["step"], losses, strict=True)) for row, losses in one["loss"].items()},
            f"held-out questions of {phase}",
            "step",
            "nats a token",
        )
        for phase, one in summary["curves"].items()
    ]
    return {"curves.png": charts}
