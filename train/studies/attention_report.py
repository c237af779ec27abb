"""The report of the attention study: comparison.md, Figure 2 and the chart of all differences.

In: comparison.json, as `train/studies/attention.py` makes it. Out: Markdown and pictures.
"""

from collections.abc import Mapping
from math import nan

from PIL import Image

from eval import figures
from eval.report import markdown_table
from train.studies import engine
from train.studies.engine import spell


def vqa_table(summary: dict) -> list[str]:
    """Table 1."""
    rows, vqa = summary["rows"], summary["measures"][0]
    name, chance = vqa["name"], vqa["chance"]
    kinds = list(rows[0]["test"][name]["by"])
    head = ["row", "parameters", "rate", "VQA", *kinds, "control", "difference"]
    body = [
        [
            row["name"],
            f"{row['trainable']:,}",
            f"{row['settings']['lr']:g}" if row["settings"] else "",
            spell(row["test"][name]),
            *(f"{row['test'][name]['by'][kind]:.2f}" for kind in kinds),
            row.get("control", ""),
            spell(row["difference"][name]) if "control" in row else "",
        ]
        for row in rows
    ]
    if any(row["published"] for row in rows):
        head.append("the paper, VQAv2")
        body = [[*cells, str(row["published"] or "")] for cells, row in zip(body, rows, strict=True)]
    if chance is not None:
        body.insert(0, ["best guess, no picture", "", "", f"{chance:.2f}", *[""] * len(head[4:])])
    return markdown_table(head, body)


def needle_table(summary: dict) -> list[str]:
    """Table 2."""
    needles = summary["measures"][1:]
    head = ["row", "control", *(title for measure in needles for title in (measure["title"], "difference"))]
    body = [["chance", "", *(cell for measure in needles for cell in (f"{measure['chance']:.2f}", ""))]]
    for row in summary["rows"]:
        cells = [row["name"], row.get("control", "")]
        for measure in needles:
            name = measure["name"]
            cells += [spell(row["test"][name]), spell(row["difference"][name]) if "control" in row else ""]
        body.append(cells)
    return markdown_table(head, body)


def to_markdown(summary: dict) -> str:
    """comparison.md."""
    settings, seeds = summary["settings"], summary["seeds"]
    size = f"{settings['samples']:,} samples" if summary["data"] == "embedded" else f"{settings['epochs']} epoch(s)"
    counts = {
        split: ", ".join(f"{n:,} of {name}" for name, n in of_split.items())
        for split, of_split in summary["examples"].items()
    }
    blocks = [
        f"{len(seeds)} seed(s), {size} a run. The rate of each row is the best of those tried on seed {seeds[0]}, by "
        f"the validation split (examples: {counts['validation']}). Below is the test split ({counts['test']}). In "
        "brackets: 95 % bootstrap intervals over seeds and pictures. A difference is that to the control, plain LoRA "
        "of at least as many trainable parameters, in percentage points, on the same examples and seeds. `*`: its "
        "interval excludes 0; n.s.: it does not, the difference is not significant.",
        "## Table 1: VQA, official scorer, accuracy in %",
        vqa_table(summary),
    ]
    if summary["measures"][1:]:
        blocks += [
            f"## Table 2: needle, index accuracy (row and column right) in %, protocol {summary['protocol']}",
            needle_table(summary),
            "## Figure 2: needle by place",
            "![accuracy by place](figure2.png)",
        ]
    title = f"Comparison: base {summary['base']}, data {summary['data']}"
    return engine.compose(title, *blocks, conclusions=conclusions(summary))


def conclusions(summary: dict) -> list[str]:
    """The differences in words, and what limits them."""
    rows = summary["rows"]
    differences = {
        f"{row['name']} ({row['trainable']:,} parameters) against {row['control']} ({row['control_trainable']:,})": row[
            "difference"
        ]
        for row in rows
        if "control" in row
    }
    rates = {
        row["name"]: (float(f"{row['settings']['lr']:g}"), [float(rate) for rate in row["validation"]])
        for row in rows
        if row["validation"]
    }
    sentences = engine.conclude(differences, len(summary["seeds"]), rates)
    below = [
        f"{row['name']} in {test['name']}"
        for row in rows
        if row["settings"] is None
        for test in summary["measures"][1:]
        if row["test"][test["name"]]["mean"] < test["chance"]
    ]
    if below:
        sentences.append(
            f"Below chance: {', '.join(below)}. A model that never saw a question's wording gives other "
            "answers than its words; `--protocol constrained` compares those alone."
        )
    return sentences + [f"{row['name']}: a run diverged and scores 0: {why}" for row in rows for why in row["diverged"]]


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
    rows, measures, pictures = {row["name"]: row for row in summary["rows"]}, summary["measures"], {}
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
    if len(measures) > 1:
        pictures["figure2.png"] = [
            figures.heatmaps(
                {row["name"]: grid(row["test"][measure["name"]]["by"]) for row in shown}, f"needle, {measure['title']}"
            )
            for measure in measures[1:]
        ]
    return pictures
