"""The report of the study of WINGS: its tables, its conclusions in words, and its picture.

In: comparison.json. Out: comparison.md and wings.png.
"""

from collections.abc import Mapping

from PIL import Image

from eval import figures
from eval.report import markdown_table
from eval.shift import GROUPS
from eval.text import sentences
from train.studies import engine, rules
from train.studies.engine import spell
from train.studies.wings_front import MAIN_LEVEL

PUBLISHED = (
    ("text-only forgetting, and learners against it", "in miniature: text tasks before and after pictures"),
    ("attention shift and text, over more than 100 models", "over every checkpoint of all runs, above"),
    ("LAWS before, in and after the picture", "as published, for each row, above"),
    ("text and multimodal benchmarks (MMLU, MMMU, …)", "missing: need a language model that can answer them"),
    ("interleaved pictures and text (IIT)", "missing: its questions are not public"),
)


def to_markdown(summary: dict) -> str:
    """comparison.md."""
    rows, (first, second) = summary["rows"], summary["steps"]
    head = ["row", "trained in stage 2", "parameters", "rate", "text, %", "change"]
    head += [*sentences.TASKS, "pictures, %", "attention shift"]
    body = [["before", "", "", "", *measured(summary["before"], changed=False)]]
    body += [[f"after stage 1: {name}", "", "", "", *measured(cell)] for name, cell in summary["stage_1"].items()]
    body += [
        [name, row["trains"], f"{row['trained']:,}", f"{row['rate']:g}", *measured(row)] for name, row in rows.items()
    ]
    pairs = [
        [f"{name} - {row['control']}", *(spell(row["difference"][what]) for what in ("text", "pictures", "shift"))]
        for name, row in rows.items()
        if "control" in row
    ]
    decoder = "each with a decoder of its own that has learned text alone"
    if summary["quick"]:
        decoder = (
            "all with one decoder that has learned text alone, so that intervals know nothing of how decoders differ"
        )
    return engine.compose(
        "Text-only forgetting: tuned on pictures with and without WINGS's learners",
        f"{len(summary['seeds'])} seed(s), {decoder}; "
        f"{summary['limit']} questions of each text task and as many pictures of the test split. Text: answers right "
        "in every letter. Pictures: objects named in their place. In brackets: 95 % intervals over seeds and "
        "questions, of differences by Student's t, else by bootstrap. `*`: the interval excludes 0; n.s.: it does not. "
        f"Stage 1 took {first} steps, stage 2 {second}.",
        markdown_table(head, body),
        "## The learners against the same without them",
        markdown_table(["pair", "text, points", "pictures, points", "attention shift"], pairs),
        "## Text that is left where both have read equally many of the pictures",
        f"Where a run first reads so many of the pictures, by a straight line between its {summary['per_run']} "
        f"checkpoints. A row has the rate that keeps most text at {MAIN_LEVEL} %, mean of up to {rules.TUNING_SEEDS} "
        "seeds, on an eighth of the questions; the table has another eighth. Verdicts are corrected for the number of "
        "differences in a table (Holm). Where not all seeds get there, the difference is that of the seeds in which "
        "both do, without a verdict: runs that learn badly are left out of it.",
        levels_table(rows),
        *engine.sections(("The same, both rows at the control's factor of the rates", levels_table(summary["common"]))),
        "## LAWS, % of all attention, before and after the second stage",
        laws_table(rows),
        "## Attention shift and the loss of text",
        shift_table(summary),
        "![results](wings.png)",
        conclusions=conclusions(summary),
        published=PUBLISHED,
    )


def measured(cell: Mapping, changed: bool = True) -> list[str]:
    """The columns of the measures. changed: whether it comes after the text model."""
    tasks = (f"{accuracy:.0f}" for accuracy in cell["by_task"].values())
    change = spell(cell["change"]) if changed else ""
    return [spell(cell["text"]), change, *tasks, spell(cell["pictures"]), spell(cell["shift"]) if changed else ""]


def levels_table(rows: Mapping[str, dict]) -> list[str]:
    """Text at equal accuracy on pictures, of every row and its control."""
    body = []
    for name, row in rows.items():
        for level, found in row.get("at_levels", {}).items():
            cells = [spell(found[what]) if what in found else "" for what in ("text", "control", "difference")]
            own, other = found["reached"]
            verdict = found.get("verdict", f"reached by {own} and {other} of {found['seeds']} seeds")
            seen = f"{found['visible']:.1f}" if "visible" in found else ""
            body.append([f"{name} - {row['control']}", f"{level} %", *cells, verdict, seen])
    head = ["pair", "pictures", "text, %", "of the control", "difference, points", "verdict", "could be seen"]
    return markdown_table(head, body) if body else []


def laws_table(rows: Mapping[str, dict]) -> list[str]:
    """LAWS of each row by group and layer: in the model that the second stage starts from → after it."""
    body = [
        [name if not number else "", group]
        + [f"{old[number]:.1f} → {new[number]:.1f}" for old, new in zip(*both, strict=True)]
        for name, row in rows.items()
        for both in [(row["laws_percent_before"], row["laws_percent"])]
        for number, group in enumerate(GROUPS)
    ]
    return markdown_table(["row", "LAWS of", *(f"layer {n}" for n in range(1, len(body[0]) - 1))], body)


def shift_table(summary: dict) -> list[str]:
    """The correlation of attention shift with the loss of text, beside the paper's."""
    rho = summary["correlation"]
    here = f"{len(summary['checkpoints'])} checkpoints of {summary['runs']} runs of stage 2"
    found = "not defined: one of them never changes, or one seed" if rho is None else spell(rho)
    body = [
        ["models", "more than 100 multimodal language models", here],
        ["correlation of attention shift with the loss of text", "positive (a figure without a number)", found],
    ]
    return markdown_table(["", "published", "here"], body)


def conclusions(summary: dict) -> list[str]:
    """The differences in words, and what limits them."""
    rows = summary["rows"]
    differences = {
        f"{name} against {row['control']}": {what: row["difference"][what] for what in ("text", "pictures")}
        for name, row in rows.items()
        if "control" in row
    }
    lines = engine.conclude(differences, len(summary["seeds"]))
    lines += [
        "{row} against {}: text where both have read {measure} % of the pictures was predicted to be {verdict} "
        "({reason}); found: {found}, prediction {outcome}.".format(rows[one["row"]]["control"], **one)
        for one in summary["predictions"]
    ]
    tried = "; ".join(
        f"{name} "
        + ", ".join(f"{rate} ({text:.1f}, {row['validation'][rate]:.1f})" for rate, text in row["kept"].items())
        for name, row in rows.items()
        if " text" not in name
    )
    lines.append(
        f"Rates tried, with the text kept at {MAIN_LEVEL} % of the pictures (0 for a seed that does not read so many) "
        f"and the validation pictures read at the end, in %: {tried}."
    )
    lines += rules.limits(len(summary["seeds"]), summary["edges"])
    if summary["quick"]:
        lines.append("This is the quick plan: one pair of rows at one rate, in shorter runs than those of the whole.")
    if summary["correlation"] is not None:
        lines.append(
            "The correlation is the mean of those of each seed's checkpoints, with a 95 % interval of Student's t over "
            "seeds, since all runs of a seed start from one decoder. Text and shift of a checkpoint are measured on a "
            "quarter of the questions."
        )
    if flat := sum(row["flat"] for row in rows.values()):
        lines.append(f"{flat} prompts have no correlation of LAWS, since a curve is flat; they count as 1.")
    lines.append(
        "Four layers are few points for a correlation, and a decoder of a million parameters is no language "
        "model: this tries the claim's mechanism, not its size."
    )
    return lines


def draw(summary: dict) -> dict[str, list[Image.Image]]:
    """wings.png: text, pictures and shift of each row, and its LAWS."""
    rows = summary["rows"]
    before = ("before", summary["before"]["text"]["mean"])
    charts = [
        engine.chart({name: row[what] for name, row in rows.items()}, title, label, reference)
        for what, title, label, reference in (
            ("text", "Text after tuning on pictures", "right answers, %", before),
            ("pictures", "Pictures", "objects named in their place, %", None),
            ("shift", "Attention shift", "1 - correlation of LAWS before and after the picture", None),
        )
    ]
    groups = {name: [(p["shift"], p["lost"]) for p in summary["checkpoints"] if p["row"] == name] for name in rows}
    axes = "attention shift", "points of text lost"
    charts.append(figures.line_chart(groups, "Every checkpoint", *axes, marked=groups, lines=False))
    fronts: dict[str, list[tuple[float, float]]] = {}
    for point in summary["checkpoints"]:
        fronts.setdefault(f"{point['row']}, {point['rate']:g}", []).append((point["pictures"], -point["lost"]))
    axes = "pictures read, %", "points of text, against before"
    charts.append(figures.line_chart(fronts, "Text against pictures, by rate", *axes, marked=fronts, lines=False))
    for name, row in rows.items():
        curves = zip(GROUPS, zip(*row["laws_percent"], strict=True), strict=True)
        lines = {group: list(enumerate(curve, start=1)) for group, curve in curves}
        charts.append(figures.line_chart(lines, f"{name}: LAWS", "layer", "% of all attention", height=260))
    return {"wings.png": charts}
