"""The report of the study of language models: its tables beside the published figures, what they show, the pictures.

In: comparison.json, as `train/studies/text.py` makes it. Out: Markdown and pictures.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from eval import figures
from eval.report import interval_text, markdown_table
from eval.statistics import Interval, bootstrap
from eval.text.measures import DEPTHS, PANELS, Scores, by_label, chance, chart, table
from train.studies import engine

KINDS = ("plain", "differential")
CLAIM = (
    "Published (Ye et al. 2024): equal loss with about 65 % of the parameters or of the tokens, at billions of "
    "parameters and up to a trillion tokens. What {:,} parameters do after {:,.0f} tokens neither confirms nor refutes "
    "that."
)
# Ye et al. 2024, of 3B: Table 2 (4K tokens) and Table 3 (by depth), plain and differential
ANSWER = (("0.03", "0.27"), ("0.03", "0.30"), ("0.03", "0.31"), ("0.07", "0.32"), ("0.09", "0.40"))
NOISE = (("0.51", "0.01"), ("0.54", "0.02"), ("0.52", "0.02"), ("0.49", "0.02"), ("0.49", "0.01"))
SCORES = {
    "needle": {"1/1": ("1.00", "1.00"), "2/2": ("0.85", "0.92"), "4/2": ("0.62", "0.84"), "6/2": ("0.55", "0.85")},
    "attention": {100 * depth: scores for depth, scores in zip(DEPTHS, ANSWER, strict=True)},
    "attention-noise": {100 * depth: scores for depth, scores in zip(DEPTHS, NOISE, strict=True)},
}
SHARES = {"parameters": "62 % at 6.8B", "tokens": "64 % at 3B"}  # for equal loss
PUBLISHED = (
    ("language modelling, 3B and 1T tokens, downstream tasks", "missing: a base of that size is not trained here"),
    ("scaling by size, 830M to 13.1B", "in miniature, by `--sizes`; the published ones are presets, for GPUs"),
    ("scaling by tokens, 3B, up to 360B", "in miniature, a run for each number; published: checkpoints of one run"),
    ("likelihood by context, up to 64K", "as published, on plain text alone, up to the length of a row"),
    (
        "needles of several kinds, at 4K",
        "at the length of a row; the models have learned needles, in a row of their own",
    ),
    ("needles by depth and length, up to 64K", "as published, as heat maps, up to the length of a row"),
    ("attention to the answer and to noise", "as published"),
    ("many-shot learning in context: TREC, Banking-77, Clinc-150", "on an invented task, 32 examples at most"),
    (
        "robustness to the examples' order",
        "as published, at random and classes in turn; best minus worst of a question",
    ),
    ("contextual hallucination", "missing: needs a model that summarises, and a judge"),
    ("activation outliers, attention in few bits", "missing: not built"),
    ("ablations of λ, norm and heads", "missing: `train.text` has no flags for them"),
)
RETRIEVAL = ("needle", "examples")  # whose other panels measure nothing where these are at chance


def read_panels(summary: dict) -> dict[str, dict[str, list[Scores]]]:
    """The scores by panel and kind, a `Scores` for each seed."""
    found = {
        name: {kind: [Scores(**run) for run in runs] for kind, runs in of_name.items()}
        for name, of_name in summary["panels"].items()
    }
    for scores in found.get("nll-tasks", {}).values():
        scores[:] = [one._replace(title=f"{one.title}, where tasks were learned too") for one in scores]
    return found


def run_table(summary: dict) -> list[str]:
    """Rates, losses and λ."""
    body = []
    for row, runs in summary["rows"].items():
        rates = summary["rates"][row]
        tried = ", ".join(f"{rate}: {loss:.3f}" for rate, loss in rates["validation"].items())
        losses = ", ".join(f"{run['loss']:.3f}" for run in runs)
        each = zip(*(run["lambda"] for run in runs), strict=True)
        by_layer = ", ".join(f"{sum(values) / len(runs):.2f}" for values in each)
        body.append([row, f"{rates['chosen']:g}", tried, losses, by_layer])
    losses = ["validation loss by rate", "validation loss by seed"]
    return markdown_table(["", "rate", *losses, "λ by layer, mean over seeds"], body)


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


def equal_loss(points: Sequence[dict], axis: str) -> str:
    """What share of parameters or tokens gives differential attention the loss of plain attention, in a sentence; or
    why the losses support no share.

    Both losses are taken as lines over the logarithm, with a common slope b: a gap g between them is worth a factor of
    exp(−g/b). Its interval is that of the gap.
    """
    x = np.log([position(point, axis) for point in points])
    losses = [window_losses(point) for point in points]
    means = np.array([(own["plain"] + own["differential"]) / 2 for own in losses])  # (points, runs, windows)
    weights = (x - x.mean()) / np.square(x - x.mean()).sum()
    slope = bootstrap(np.tensordot(weights, means, 1), points[0]["documents"])
    gap = bootstrap(np.mean([own["difference"] for own in losses], axis=0), points[0]["documents"])
    if slope.high >= -1e-9:
        found = engine.spell(engine.verdict(slope), 3)
        return (
            f"The loss does not fall with {axis} ({found} nats for e times as many): no share for equal loss follows."
        )
    share = Interval(*sorted(math.exp(-end / slope.mean) for end in gap))
    share = Interval(math.exp(-gap.mean / slope.mean), share[0], share[2])
    span = math.exp(x.max() - x.min())
    if max(share.high, 1 / share.low) > span:
        return (
            f"The gap of {engine.spell(engine.verdict(gap), 3)} nats is worth more than all {axis} tried, from the "
            f"fewest to {span:.1f} times as many: no share for equal loss follows."
        )
    unsure = "" if gap.significant else ", n.s."
    return (
        f"For equal loss differential attention takes {100 * share.mean:.0f} % [{100 * share.low:.0f}, "
        f"{100 * share.high:.0f}] of plain attention's {axis}{unsure} (published: {SHARES[axis]})."
    )


def scaling_chart(summary: dict, axis: str) -> Image.Image:
    points = scaling_points(summary, axis)
    found = [{k: bootstrap(window_losses(p)[k], p["documents"]) for k in KINDS} for p in points]
    places = [position(point, axis) for point in points]
    lines = {kind: [(x, own[kind].mean) for x, own in zip(places, found, strict=True)] for kind in KINDS}
    bars = {kind: [(x, *own[kind][1:]) for x, own in zip(places, found, strict=True)] for kind in KINDS}
    return figures.line_chart(lines, f"loss by {axis}", axis, "nats a token", log_x=True, intervals=bars)


# The report


def at_chance(found: Mapping[str, Mapping[str, Sequence[Scores]]]) -> dict[str, str]:
    """For each of RETRIEVAL in which no kind is above chance anywhere, a sentence that says so."""
    sentences = {}
    for name in RETRIEVAL:
        by = by_label(found[name]) if name in found else {}
        chances = {label: value for label, value in chance(name).items() if label in by and value < 1}
        if chances and not any(by[label][kind].low > value for label, value in chances.items() for kind in KINDS):
            each = "; ".join(
                f"{label}: {by[label]['plain'].mean:.2f} plain, {by[label]['differential'].mean:.2f} differential, "
                f"chance {value:.2f}"
                for label, value in chances.items()
            )
            title = found[name]["plain"][0].title
            sentences[name] = f"Neither kind is above chance in {title} ({each}): these panels measure nothing here."
    return sentences


def to_markdown(summary: dict, out: Path) -> str:
    """comparison.md."""
    settings, rows, seeds = summary["settings"], summary["rows"], summary["seeds"]
    plain, ours = (rows[f"{kind}, text"][0]["parameters"] for kind in KINDS)
    blocks = [
        f"{plain:,} parameters plain, {ours:,} differential ({100 * (ours / plain - 1):+.2f} %); "
        f"{settings['tokens']:,.0f} tokens a run, rows of {settings['length']}; {seeds} seeds; "
        f"{summary['limit']} tests of each kind; "
        f"{summary['cpu_seconds']:,} CPU seconds. In brackets: 95 % intervals over seeds and examples; difference: "
        "differential minus plain on the same examples, n.s. where the interval holds 0. Chance: of one who repeats "
        "any answer that the text shows. Rows named text have learned from plain text alone, rows named tasks from "
        "needles and examples too.",
        run_table(summary),
    ]
    tried = {row: (rates["chosen"], list(rates["validation"])) for row, rates in summary["rates"].items()}
    if tried["plain, text"][1]:
        blocks.append(f"Rates were tried on the first seed, for {100 * summary['search']:.0f} % of the tokens.")
    found = read_panels(summary)
    gains, lower_is_better, chances = {}, set(), at_chance(found)
    nothing = {panel for name in chances for panel in PANELS[name]}
    for name, of_name in found.items():
        panel, by = next(iter(of_name.values()))[0], by_label(of_name)
        blocks += [f"## {panel.title}", f"![{name}]({name}.png)"]
        blocks.append(table(panel, by, chance(name, by), SCORES.get(name)))
        if name not in nothing:
            gains[panel.title] = engine.verdict(by["all"]["difference"])
            lower_is_better |= {panel.title} if panel.better < 0 else set()
    blocks += ["## loss on the windows by parameters and by tokens, plain text alone", "![scaling](scaling.png)"]
    axes = scaling_axes(summary)
    blocks += [scaling_table(summary, axis) for axis in axes]
    rates = {row: (float(f"{chosen:g}"), list(map(float, of_row))) for row, (chosen, of_row) in tried.items()}
    pair = {"differential against plain": gains}
    sentences = engine.conclude(pair, seeds, rates, lower_is_better=lower_is_better, digits=3)
    sentences += [*chances.values(), *(equal_loss(scaling_points(summary, axis), axis) for axis in axes)]
    folders = {
        mixture: " ".join(str(out / run["folder"]) for kind in KINDS for run in rows[f"{kind}, {mixture}"])
        for mixture in ("text", "tasks")
    }
    return engine.compose(
        "Differential against plain, from nothing",
        *blocks,
        conclusions=[*sentences, CLAIM.format(ours, settings["tokens"])],
        published=PUBLISHED,
        end=[
            f"Measure the runs again: `python -m eval.text nll {folders['text']}`",
            f"`python -m eval.text all {folders['tasks']}`",
        ],
    )


def draw(summary: dict) -> dict[str, list[Image.Image]]:
    """A chart of each panel, by file name, and of the losses by size and by tokens."""
    pictures = {}
    for name, by in read_panels(summary).items():
        pictures[f"{name}.png"] = [chart(next(iter(by.values()))[0], by_label(by))]
    return pictures | {"scaling.png": [scaling_chart(summary, axis) for axis in scaling_axes(summary)]}
