"""The report of the attention study: comparison.json, comparison.md, Figure 2 and the chart of all differences.

In: the results of all rows (`train/studies/attention_runs.py`). Out: a summary, Markdown and pictures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import nan

import numpy as np
from PIL import Image

from eval import figures
from eval.report import markdown_table
from eval.statistics import estimate, slope_scores
from train.studies import attention_mechanism, engine, rules
from train.studies.attention_data import DOSE, Measure
from train.studies.attention_rows import PREDICTIONS
from train.studies.attention_runs import OVERALL, RowResult, Scores, gain, in_range, overall, peers
from train.studies.cells import VERSION, FineTuningStudy
from train.studies.engine import describe_runs, spell


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
        "seeds": result.seeds,
        "test": {},
    }
    for m in measures:
        scores = result.scores[m.name]
        summary["test"][m.name] = describe_runs(scores, m.pictures) | {"by": by_label(scores, m.labels)}
        if m.name == DOSE:
            doses = np.array(m.labels)
            summary["slope"] = engine.verdict(estimate(slope_scores(doses / doses.max(), scores), m.pictures))
    for name, control in (("control", result.control), ("timed", result.timed)):
        if control:
            summary[name], summary[f"{name}_trainable"] = control.row.name, control.trainable
    return summary


def mean_scores(results: Sequence[RowResult]) -> Scores:
    """The mean of the scores of some rows, run by run and example by example."""
    runs = min(one.seeds for one in results)
    return {name: np.mean([one.scores[name][:runs] for one in results], axis=0) for name in results[0].scores}


def add_differences(rows: Sequence[dict], results: Sequence[RowResult], measures: Sequence[Measure]) -> None:
    """Put the judged differences of all rows to their controls into the rows of the summary."""
    others = [m for m in measures if m.name != DOSE]
    names = [m.name for m in measures] + [OVERALL] * (len(others) > 1)
    pools = {one.row.name: peers(one.control, results) if one.control else [] for one in results}
    for row in rows:
        if ranks := sorted(one.settings.r for one in pools[row["name"]]):
            row["pooled"] = f"{len(ranks)} rows, r {ranks[0]} to {ranks[-1]}"
    for key, find in (
        ("difference", lambda one: one.control and (one.scores, one.control.scores)),
        ("difference_timed", lambda one: one.timed and (one.scores, one.timed.scores)),
        ("difference_pooled", lambda one: pools[one.row.name] and (one.scores, mean_scores(pools[one.row.name]))),
        ("difference_common", lambda one: one.control and one.common and (one.common, one.control.common)),
    ):
        found, inside = {}, {}
        for result, (own, theirs) in [(one, pair) for one in results if (pair := find(one))]:
            usable = {m.name for m in in_range(theirs, measures)}
            for name in names:
                place, is_all = (result.row.name, name), name == OVERALL
                inside[place] = bool(usable - {DOSE}) if is_all else name in usable
                found[place] = overall(own, theirs, measures) if is_all else gain(own, theirs, name, measures)
        seeds, judged = {row["name"]: row["seeds"] for row in rows}, {}
        for is_all in (True, False):  # the main differences are a family of their own
            family = {place: one for place, one in found.items() if (place[1] == OVERALL) == is_all}
            judged |= rules.judge(family, inside, seeds={place: seeds[place[0]] for place in family})
        for row in rows:
            for place in [one for one in found if one[0] == row["name"]]:
                row.setdefault(key, {})[place[1]] = engine.verdict(found[place]) | judged[place]


def summarize(
    study: FineTuningStudy,
    results: Sequence[RowResult],
    predictions: Sequence[rules.Prediction] = PREDICTIONS,
    more: Mapping[str, Mapping[str, Mapping]] | None = None,
) -> dict:
    """comparison.json: all numbers of the report, and more. Accuracies are in percent.

    more: judged differences by row that are predicted too.
    """
    measures = study.measures["test"]
    rows = [summarize_row(result, measures) for result in results]
    add_differences(rows, results, measures)
    judged_of = {row["name"]: {**row.get("difference", {}), **(more or {}).get(row["name"], {})} for row in rows}
    verdicts = {row: {name: one["verdict"] for name, one in of_row.items()} for row, of_row in judged_of.items()}
    return {
        "base": study.base.base,
        "fingerprint": study.fingerprint,
        "data": " ".join(study.base.data),
        "version": VERSION,
        "settings": asdict(study.base),
        "seeds": list(range(max(result.seeds for result in results))),
        "protocol": study.protocol,
        "measures": [
            {"name": m.name, "title": m.title, "chance": m.chance, "by_place": isinstance(m.labels[0], tuple)}
            for m in measures
        ],
        "examples": {split: {m.name: len(m.examples) for m in of_split} for split, of_split in study.measures.items()},
        "rows": rows,
        "edges": [one.row.name for one in results if one.is_at_edge],
        "predictions": rules.check(predictions, verdicts),
    }


# Markdown


def accuracy_table(summary: dict) -> list[str]:
    """Table 1: every row at its own rate."""
    measures = [one for one in summary["measures"] if one["name"] != DOSE]
    head = ["row", "parameters", "seeds", "rate", *(one["title"] for one in measures)]
    body = [
        [
            row["name"],
            f"{row['trainable']:,}",
            str(row["seeds"]),
            f"{row['settings']['lr']:g}" if row["settings"] else "",
            *(spell(row["test"][one["name"]], 1) for one in measures),
        ]
        for row in summary["rows"]
    ]
    if any(row["published"] for row in summary["rows"]):
        head.append("the paper, VQAv2")
        body = [[*cells, str(row["published"] or "")] for cells, row in zip(body, summary["rows"], strict=True)]
    if all(one["chance"] is not None for one in measures):
        chances = [f"{one['chance']:.1f}" for one in measures]
        body.insert(0, ["best guess, no picture", *[""] * 3, *chances, *[""] * (len(head) - 4 - len(measures))])
    return markdown_table(head, body)


def difference_table(summary: dict, key: str = "difference", control: str = "control") -> list[str]:
    """The differences of all rows to a control, with their verdicts; a table without rows is empty."""
    rows = [row for row in summary["rows"] if key in row]
    if not rows:
        return []
    names = [name for name in rows[0][key] if name != DOSE]
    titles = {one["name"]: one["title"] for one in summary["measures"]} | {OVERALL: "mean of those in range"}
    body = [[row["name"], row[control], *(judged(row[key][name]) for name in names)] for row in rows]
    return markdown_table(["row", "control", *(titles[name] for name in names)], body)


def judged(one: Mapping, digits: int = 1) -> str:
    """A difference, its interval and its verdict."""
    mean, low, high = (f"{one[end]:+.{digits}f}" for end in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}] {one['verdict']}"


def dose_table(summary: dict) -> list[str]:
    """Accuracy by the number of distractors, and the change from none to the most."""
    rows = [row for row in summary["rows"] if DOSE in row["test"]]
    if not rows:
        return []
    doses = list(rows[0]["test"][DOSE]["by"])
    body = [
        [
            row["name"],
            *(f"{row['test'][DOSE]['by'][dose]:.1f}" for dose in doses),
            spell({end: row["slope"][end] for end in ("mean", "low", "high")}, 1),
            judged(row["difference"][DOSE]) if DOSE in row.get("difference", ()) else "",
        ]
        for row in rows
    ]
    return markdown_table(["distractors", *doses, f"slope, 0 to {doses[-1]}", "slope, row − control"], body)


def range_table(summary: dict) -> list[str]:
    """How far the controls are from guessing and from 100 %, and what else was tried."""
    controls = {row["control"] for row in summary["rows"] if "control" in row}
    rows = [row for row in summary["rows"] if row["name"] in controls]
    pilots = {one["chosen"]: one["pilot"] for one in summary.get("ladders", {}).values()}
    body = []
    for one in summary["measures"]:
        if one["name"] != DOSE and rows and one["chance"] is not None:
            means = [row["test"][one["name"]]["mean"] for row in rows]
            shares = [100 * rules.share_of_range(mean, one["chance"]) for mean in means]
            inside = all(rules.is_inside(mean, one["chance"]) for mean in means)
            pilot = ", ".join(f"{rung} {score:.0f}" for rung, score in pilots.get(one["name"], {}).items())
            share = f"{min(shares):.0f} to {max(shares):.0f}"
            body.append([one["title"], f"{one['chance']:.1f}", share, "yes" if inside else "no", pilot])
    head = ["measure", "guessing, %", "controls, % of the way to 100", "measures", "plain row on validation, %"]
    return markdown_table(head, body) if body else []


def prediction_table(predictions: Sequence[Mapping]) -> list[str]:
    body = [
        [
            one["row"] if one["measure"] == OVERALL else f"{one['row']}: {one['measure']}",
            *(one[key] for key in ("verdict", "found", "outcome", "reason")),
        ]
        for one in predictions
    ]
    return markdown_table(["row", "predicted", "found", "prediction", "reason given before"], body) if body else []


def positive_blocks(positive: Mapping | None) -> list:
    """The positive control."""
    if positive is None:
        return []
    body = [
        [kind, f"{row['rate']:g}", spell(row, 1), judged(positive["differences"][kind]) if kind != "softmax" else ""]
        for kind, row in positive["rows"].items()
    ]
    return [
        "## Positive control: the built task (train/studies/built.py)",
        f"The best that one bounded map can do is {positive['best_of_one_map']:.1f} %; two maps can reach 100 %. "
        f"{positive['seeds']} seeds.",
        markdown_table(["attention", "rate", "accuracy, %", "minus softmax"], body),
        prediction_table(positive["predictions"]),
    ]


def counts_of(summary: dict) -> dict[str, str]:
    """By split, the numbers of examples in words."""
    examples = summary["examples"].items()
    return {split: ", ".join(f"{n:,} of {name}" for name, n in of_split.items()) for split, of_split in examples}


def to_markdown(summary: dict) -> str:
    """comparison.md."""
    settings = summary["settings"]
    size = f"{settings['samples']:,} samples" if summary["data"] == "embedded" else f"{settings['epochs']} epoch(s)"
    counts = counts_of(summary)
    blocks = [
        f"{size} a run. Rates by the mean of up to {rules.TUNING_SEEDS} seeds on the validation split, of all plain "
        f"rows together (examples: {counts['validation']}); below is the test split ({counts['test']}), needles by "
        f"protocol {summary['protocol']}. Accuracies in %, with 95 % bootstrap intervals over seeds and pictures; "
        "differences in points, paired by seed and example, with 95 % intervals of Student's t over seeds and "
        f"pictures. {rules.VERDICTS}",
        *engine.sections(
            ("Table 1: accuracy at each row's rate", accuracy_table(summary)),
            ("Table 2: minus plain LoRA with at least as many parameters", difference_table(summary)),
            ("Table 3: minus plain LoRA trained as long", difference_table(summary, "difference_timed", "timed")),
            ("Table 4: as Table 2, all rows at one rate", difference_table(summary, "difference_common")),
            (
                "Table 5: minus the mean of all plain rows, which is known better than that of one",
                difference_table(summary, "difference_pooled", "pooled"),
            ),
            ("Noise dose: 4×4 needle by the number of distractors, %", dose_table(summary)),
            ("Range of the measures", range_table(summary)),
            ("Predictions", prediction_table(summary["predictions"])),
        ),
    ]
    if any(one["by_place"] for one in summary["measures"]):
        blocks += ["## Figure 2: needle by place", "![accuracy by place](figure2.png)"]
    title = f"Comparison: base {summary['base']}, data {summary['data']}"
    blocks += [*positive_blocks(summary.get("positive")), *attention_mechanism.to_markdown(summary.get("mechanism"))]
    return engine.compose(title, *blocks, conclusions=conclusions(summary))


def conclusions(summary: dict) -> list[str]:
    """The verdicts in words, and what limits them."""
    titles = {one["name"]: one["title"] for one in summary["measures"]}
    titles |= {OVERALL: "the mean of those in range", DOSE: "the slope over distractors"}
    sentences = []
    for row in summary["rows"]:
        if "difference" in row:
            words = rules.in_words({titles[name]: one for name, one in row["difference"].items()})
            sentences.append(
                f"{row['name']} ({row['trainable']:,} parameters) against {row['control']} "
                f"({row['control_trainable']:,}): {words}."
            )
    seeds = [row["seeds"] for row in summary["rows"] if "difference" in row] or [len(summary["seeds"])]
    sentences += rules.limits(min(seeds), summary["edges"])
    below = [
        f"{row['name']} in {test['name']}"
        for row in summary["rows"]
        if row["settings"] is None
        for test in summary["measures"][1:]
        if test["chance"] is not None and row["test"][test["name"]]["mean"] < test["chance"]
    ]
    if below and summary["protocol"] == "paper":
        sentences.append(
            f"Below chance: {', '.join(below)}. A model that never saw a question's wording gives other "
            "answers than its words; `--protocol constrained` compares those alone."
        )
    return sentences + [
        f"{row['name']}: a run diverged and scores 0: {why}" for row in summary["rows"] for why in row["diverged"]
    ]


def grid(by_place: Mapping[str, float]) -> list[list[float]]:
    """Accuracy (0..1) by the needle's row and column, from accuracies in percent by "(row, column)"."""
    accuracies = {tuple(map(int, place.strip("()").split(","))): value for place, value in by_place.items()}
    side = 1 + max(map(max, accuracies))
    return [[accuracies.get((row, column), nan) / 100 for column in range(side)] for row in range(side)]


def draw(summary: dict) -> dict[str, list[Image.Image]]:
    """The pictures by file name.

    Figure 2 shows the requested rows without a control, and of the others the best on the validation split: a choice
    by the accuracy that is drawn would be biased.
    """
    rows, pictures = {row["name"]: row for row in summary["rows"]}, {}
    measures = [m for m in summary["measures"] if m["name"] != DOSE]
    placed = [m for m in summary["measures"] if m["by_place"]]
    others = [row for row in rows.values() if "control" in row]
    shown = [row for row in rows.values() if "control" not in row and not row["is_control"]]
    if others:
        best = max(others, key=lambda row: max(row["validation"].values()))
        shown = [*(shown or [rows[best["control"]]]), best]
        pictures["differences.png"] = [
            engine.chart(
                {f"{row['name']} - {row['control']}": row["difference"][measure["name"]] for row in others},
                measure["title"],
                "accuracy, row minus control (plain LoRA), percentage points",
                ("no difference", 0.0),
            )
            for measure in measures
        ]
    if placed:
        pictures["figure2.png"] = [
            figures.heatmaps(
                {row["name"]: grid(row["test"][measure["name"]]["by"]) for row in shown}, f"needle, {measure['title']}"
            )
            for measure in placed
        ]
    return pictures
