"""The report of the study of language models: its tables beside the published figures, what they show, the pictures.

In: comparison.json, as `train/studies/text.py` makes it. Out: Markdown and pictures.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from eval import figures
from eval.report import interval_text, markdown_table
from eval.statistics import Interval, bootstrap, estimate
from eval.text.measures import DEPTHS, Scores, by_label, chance, chart, table
from train.studies import engine, rules
from train.studies.attention_report import judged, positive_blocks, prediction_table

KINDS = ("plain", "differential")
MAIN = "mean of those in range"
CLAIM = (
    "Published (Ye et al. 2024): equal loss with about 65 % of the parameters or of the tokens, at billions of "
    "parameters and up to a trillion tokens. What {:,} parameters do after {:,.0f} tokens neither confirms nor refutes "
    "that."
)
# Ye et al. 2024, of 3B: Table 3 (by depth), plain and differential
ANSWER = (("0.03", "0.27"), ("0.03", "0.30"), ("0.03", "0.31"), ("0.07", "0.32"), ("0.09", "0.40"))
NOISE = (("0.51", "0.01"), ("0.54", "0.02"), ("0.52", "0.02"), ("0.49", "0.02"), ("0.49", "0.01"))
SCORES = {
    "attention": {100 * depth: scores for depth, scores in zip(DEPTHS, ANSWER, strict=True)},
    "attention-noise": {100 * depth: scores for depth, scores in zip(DEPTHS, NOISE, strict=True)},
}
SHARES = {"parameters": "62 % at 6.8B", "tokens": "64 % at 3B"}  # for equal loss
PUBLISHED = (
    ("language modelling, 3B and 1T tokens, downstream tasks", "missing: a base of that size is not trained here"),
    ("scaling by size, 830M to 13.1B", "in miniature, by `--sizes`; the published ones are presets, for GPUs"),
    ("scaling by tokens, 3B, up to 360B", "in miniature, a run for each number; published: checkpoints of one run"),
    ("likelihood by context, up to 64K", "as published, on plain text alone, up to the length of a row"),
    ("needles of several kinds, at 4K", "one of N at the length of a row; the models have learned such rows"),
    ("needles by depth and length, up to 64K", "by depth and number, as heat maps, at the length of a row"),
    ("attention to the answer and to noise", "as published"),
    ("many-shot learning in context: TREC, Banking-77, Clinc-150", "on an invented task, 64 examples at most"),
    ("robustness to the examples' order", "as published, at random; best minus worst of a question"),
    ("contextual hallucination", "missing: needs a model that summarises, and a judge"),
    ("activation outliers, attention in few bits", "missing: not built"),
    ("ablations of λ, norm and heads", "missing: `train.text` has no flags for them"),
)


def read_panels(summary: dict) -> dict[str, dict[str, list[Scores]]]:
    """The scores by panel and kind, a `Scores` for each seed."""
    return {
        name: {kind: [Scores(**run) for run in runs] for kind, runs in of_name.items()}
        for name, of_name in summary["panels"].items()
    }


def run_table(summary: dict) -> list[str]:
    """Rates, losses and λ."""
    body = []
    for row, runs in summary["rows"].items():
        rates = summary["rates"][row]
        tried = ", ".join(f"{rate}: {loss:.3f}" for rate, loss in rates["validation"].items())
        losses = ", ".join(f"{run['loss']:.3f}" for run in runs)
        each = zip(*(run["lambda"] for run in runs), strict=True)
        by_layer = ", ".join(f"{sum(values) / len(runs):.2f}" for values in each)
        body.append([row, f"{runs[0]['parameters']:,}", f"{rates['chosen']:g}", tried, losses, by_layer])
    losses = ["validation loss by rate", "validation loss by seed"]
    return markdown_table(["", "parameters", "rate", *losses, "λ by layer, mean over seeds"], body)


def judged_table(by_size: Mapping[str, Mapping]) -> list[str]:
    """Differential minus plain by size, with the verdicts."""
    names = next(iter(by_size.values()))
    units = {"loss": "loss, 0.01 nats less", MAIN: f"{MAIN}, points"}
    body = [[size, *(judged(of_size[name]) for name in names)] for size, of_size in by_size.items()]
    return markdown_table(["size", *(units.get(name, f"{name}, points") for name in names)], body)


def range_table(summary: dict) -> list[str]:
    """The difficulties, of which one is measured, and how far plain attention is from guessing and from 100 %."""
    body = []
    for size, rungs in summary["rungs"].items():
        for name, one in rungs.items():
            tried = ", ".join(f"{rung}: {score:.0f}" for rung, score in one["pilot"].items())
            share = 100 * rules.share_of_range(one["pilot"][str(one["chosen"])], one["chance"])
            inside = "yes" if one["inside"] else "no"
            body.append([size, name, tried, str(one["chosen"]), f"{one['chance']:.0f}", f"{share:.0f}", inside])
    head = ["size", "measure", "plain, % by number", "number", "guessing, %", "% of the way to 100", "measures"]
    return markdown_table(head, body)


def curves(summary: dict) -> dict[str, np.ndarray]:
    """By kind, the validation loss (seeds, points) of the first size in training; and "tokens" (points,)."""
    runs = {kind: [run["curve"] for run in summary["rows"][f"{kind}, {main_size(summary)}"]] for kind in KINDS}
    tokens = np.array(runs[KINDS[0]][0])[:, 0]
    return {kind: np.array(of_kind)[:, :, 1] for kind, of_kind in runs.items()} | {"tokens": tokens}


def curve_table(summary: dict) -> list[str]:
    """The loss over tokens."""
    found = curves(summary)
    body = []
    for number, tokens in enumerate(found["tokens"]):
        plain, ours = (found[kind][:, number] for kind in KINDS)
        gain = engine.spell(engine.verdict(estimate((ours - plain)[:, None])), 3)
        body.append([f"{tokens:,.0f}", f"{plain.mean():.3f}", f"{ours.mean():.3f}", gain])
    return markdown_table(["tokens", *KINDS, "difference"], body)


def main_size(summary: dict) -> str:
    return summary["settings"]["preset"]


# Scaling


def scaling_axes(summary: dict) -> list[str]:
    """What the loss can be drawn over: parameters only if there are several sizes."""
    return [axis for axis in SHARES if len(scaling_points(summary, axis)) > 1]


def scaling_points(summary: dict, axis: str) -> list[dict]:
    """The points of a curve, from small to large: by size with all tokens, or by tokens at one size."""
    points = summary["scaling"]
    same = "share" if axis == "parameters" else "preset"
    return sorted((p for p in points if p[same] == points[0][same]), key=lambda point: position(point, axis))


def position(point: dict, axis: str) -> float:
    return point["tokens"] if axis == "tokens" else sum(point["parameters"].values()) / len(KINDS)


def window_losses(point: dict) -> dict[str, np.ndarray]:
    """By kind, and under "difference", the loss (runs, windows)."""
    losses = {kind: np.array(point["losses"][kind]) for kind in KINDS}
    return losses | {"difference": losses["differential"] - losses["plain"]}


def scaling_table(summary: dict, axis: str) -> list[str]:
    body = []
    for point in scaling_points(summary, axis):
        losses = {name: bootstrap(values, point["documents"]) for name, values in window_losses(point).items()}
        verdict = engine.spell(engine.verdict(losses["difference"]), 3)
        size, tokens = f"{point['parameters']['plain']:,}", f"{point['tokens']:,}"
        body.append([size, tokens, *(interval_text(losses[kind], 3) for kind in KINDS), verdict])
    return markdown_table(["parameters", "tokens", *KINDS, "difference"], body)


def fit_share(points: Sequence[dict], axis: str, resamples: int = 4000) -> tuple[Interval, Interval]:
    """The share of parameters or tokens that gives differential attention the loss of plain attention, and the slope of
    the loss over their logarithm, each with its bootstrap interval over runs and documents.

    Losses are taken as lines over the logarithm, with a slope b for both: the gap g at the last point, from which all
    else would be extrapolated, is worth a factor of exp(−g/b); where the slope is not below 0, no factor is enough.
    """
    x = np.log([position(point, axis) for point in points])
    runs = min(len(of_kind) for point in points for of_kind in point["losses"].values())
    losses = np.array([[point["losses"][kind][:runs] for kind in KINDS] for point in points])  # (P, kinds, runs, W)
    document = np.unique(points[0]["documents"], return_inverse=True)[1]
    draw, number = np.random.default_rng(0), document.max() + 1
    by_run = draw.multinomial(runs, np.full(runs, 1 / runs), size=resamples)
    by_document = draw.multinomial(number, np.full(number, 1 / number), size=resamples)[:, document]
    by_run, by_document = (
        np.vstack([np.ones(counts.shape[1]), counts]) for counts in (by_run, by_document)
    )  # the whole first
    by_run, by_document = (counts / counts.sum(axis=1, keepdims=True) for counts in (by_run, by_document))
    means = np.einsum("br,pkrw,bw->bpk", by_run, losses, by_document, optimize=True)
    slope = means.mean(axis=2) @ (x - x.mean()) / np.square(x - x.mean()).sum()
    gap = means[:, -1, 1] - means[:, -1, 0]
    with np.errstate(all="ignore"):
        share = np.where(slope < -1e-9, np.exp(-gap / slope), np.where(gap > 0, np.inf, 0.0))
        return tuple(Interval(float(one[0]), *np.quantile(one[1:], (0.025, 0.975)).tolist()) for one in (share, slope))


def equal_loss(points: Sequence[dict], axis: str) -> str:
    """`fit_share` in a sentence; or why the losses support no share."""
    share, slope = fit_share(points, axis)
    if not slope.high < -1e-9:
        found = engine.spell(engine.verdict(slope), 3)
        return (
            f"The loss does not fall with {axis} ({found} nats for e times as many): no share for equal loss follows."
        )
    places = [position(point, axis) for point in points]
    span = max(places) / min(places)
    found = f"{100 * share.mean:.0f} % [{100 * share.low:.0f}, {100 * share.high:.0f}]"
    if max(share.high, 1 / share.low) > span:
        return (
            f"The gap is worth more than all {axis} tried, from the fewest to {span:.1f} times as many ({found}): no "
            "share for equal loss follows."
        )
    unsure = ", n.s." if share.low <= 1 <= share.high else ""
    return (
        f"For the loss at {places[-1]:,.0f} {axis} differential attention takes {found} of plain attention's {axis}"
        f"{unsure} (published: {SHARES[axis]}), by the slope of {len(points)} points from {places[0]:,.0f} on."
    )


def scaling_chart(summary: dict, axis: str) -> Image.Image:
    points = scaling_points(summary, axis)
    found = [{k: bootstrap(window_losses(p)[k], p["documents"]) for k in KINDS} for p in points]
    places = [position(point, axis) for point in points]
    lines = {kind: [(x, own[kind].mean) for x, own in zip(places, found, strict=True)] for kind in KINDS}
    bars = {kind: [(x, *own[kind][1:]) for x, own in zip(places, found, strict=True)] for kind in KINDS}
    return figures.line_chart(lines, f"loss by {axis}", axis, "nats a token", log_x=True, intervals=bars)


# The report


def conclusions(summary: dict) -> list[str]:
    """The verdicts in words, and what limits them."""
    sentences = []
    for size, of_size in summary["judged"].items():
        sentences.append(f"differential against plain, {size}: {rules.in_words(of_size, sizes=False)}.")
    sentences += rules.limits(summary["least_seeds"], summary["edges"])
    axes = scaling_axes(summary)
    return [*sentences, *(equal_loss(scaling_points(summary, axis), axis) for axis in axes)]


def to_markdown(summary: dict, out: Path) -> str:
    """comparison.md."""
    settings, rows, main = summary["settings"], summary["rows"], main_size(summary)
    plain, ours = (rows[f"{kind}, {main}"][0]["parameters"] for kind in KINDS)
    quick = " --quick: two sizes, short runs, no runs on shares of the tokens." if summary["quick"] else ""
    blocks = [
        f"{plain:,} parameters plain, {ours:,} differential ({100 * (ours / plain - 1):+.2f} %) of {main}; "
        f"{settings['tokens']:,.0f} tokens a run, rows of {settings['length']}; {summary['least_seeds']} seeds, of "
        f"{main} {summary['seeds']}; {summary['limit']} tests of each difficulty.{quick} "
        "Differences: differential minus plain, paired by seed and example, more is better, with 95 % intervals of "
        f"Student's t over seeds and examples. {rules.VERDICTS}",
        "## Table 1: each kind and size at its own rate",
        judged_table(summary["judged"]),
    ]
    for title, name in ("minus plain attention trained as long", "timed"), ("at plain attention's rate", "common"):
        if summary[name]:
            blocks += [f"## Differential attention {title}", judged_table(summary[name])]
    blocks += ["## Range of the measures (validation split)", range_table(summary)]
    blocks += ["## Predictions", prediction_table(summary["predictions"]), *positive_blocks(summary["positive"])]
    tuning = min(rules.TUNING_SEEDS, summary["least_seeds"])
    searched = f"Rates by the mean of {tuning} seeds, for {100 * summary['search']:.0f} % of the tokens."
    blocks += ["## Runs", searched, run_table(summary)]
    blocks += [f"## Loss over tokens, {main}, validation rows", "![curve](curve.png)", curve_table(summary)]
    blocks.append(
        f"Below: {main}, test split, 95 % bootstrap intervals over seeds and examples, n.s. where the interval of the "
        "difference holds 0. Chance: of one who repeats the value of any record."
    )
    for name, of_name in read_panels(summary).items():
        panel, by = next(iter(of_name.values()))[0], by_label(of_name)
        blocks += [f"## {panel.title}", f"![{name}]({name}.png)"]
        blocks.append(table(panel, by, chance(name, by), SCORES.get(name)))
    blocks += ["## Loss on windows of text by parameters and by tokens", "![scaling](scaling.png)"]
    blocks += [scaling_table(summary, axis) for axis in scaling_axes(summary)]
    folders = " ".join(str(out / run["folder"]) for kind in KINDS for run in rows[f"{kind}, {main}"])
    return engine.compose(
        "Differential against plain, from nothing",
        *blocks,
        conclusions=[*conclusions(summary), CLAIM.format(ours, settings["tokens"])],
        published=PUBLISHED,
        end=[f"Measure the runs again: `python -m eval.text all {folders}`"],
    )


def draw(summary: dict) -> dict[str, list[Image.Image]]:
    """A chart of each panel, by file name, of the loss over tokens, and of the losses by size and by tokens."""
    found = curves(summary)
    lines = {kind: list(zip(found["tokens"], found[kind].mean(axis=0), strict=True)) for kind in KINDS}
    pictures = {"curve.png": [figures.line_chart(lines, "loss over tokens", "tokens", "nats a token")]}
    for name, by in read_panels(summary).items():
        pictures[f"{name}.png"] = [chart(next(iter(by.values()))[0], by_label(by))]
    return pictures | {"scaling.png": [scaling_chart(summary, axis) for axis in scaling_axes(summary)]}
