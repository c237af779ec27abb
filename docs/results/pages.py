"""The tables and figures of RESULTS.md, from the CSV files in this folder.

    python docs/results/pages.py

It writes a page beside each CSV, the figures, and in RESULTS.md every table between the comments
`<!-- NAME -->` and `<!-- end -->`.

A line of a CSV is a cell on one measure. Intervals are 95 % of Student's t over runs, paired by
seed; questions are the same for all rows. Of a row that was tried at several rates those runs count
that are the most. "mean" is of the measures of which plain rows are from 15 to 95 % of the way from
guessing to perfect, on the validation split.
"""

import csv
import json
import math
import re
import sys
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from PIL import Image

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from eval.figures import GRID, SERIES, SOFT, Canvas, save  # noqa: E402
from eval.report import interval_text, markdown_table  # noqa: E402
from model.attention import attention_modules, tapped  # noqa: E402
from model.common import write_text  # noqa: E402
from train.chart import line_chart  # noqa: E402
from train.estimates import Estimate, estimate  # noqa: E402
from train.studies import built, dose  # noqa: E402
from train.studies.attention import NOISE  # noqa: E402
from train.studies.rules import Measure, is_inside, judge  # noqa: E402
from weights.load import load_model  # noqa: E402

Scores = dict[tuple[str, str, str], dict[int, float]]  # percent by seed, of (study, row, measure)
GRAFTS = ("shared", "split", "twin-small", "v2", "dex")
LORA = "fine-tuned"
SIZES = ("LoRA r17", "LoRA r18", "LoRA r19", "LoRA r20")
BUDGETS = (100, 400, 1600)  # steps
EARLIER = ("plain + head norm", "shared", "twin-small", "v2", "dex")
CONTROLS = ("twin-small", "v2", "difflora", "mean", "gate", "temperature", "sink")
PLAIN_GRAFTS = (LORA, "LoRA r17", "LoRA r19", "LoRA r20")
# Of the pretrained language model, which learned from few facts or from prose
FEW = ("plain, few", "plain again, few")
PROSE = ("plain, prose", "plain again, prose")
REAL = "twin-small v2 dex mean gate temperature sink".split()
REAL_FREE = [f"{row} free" for row in ("twin-small", "v2", "mean")]
# The row or rows that each row is subtracted from, by file
BESIDE: dict[str, dict[str, tuple[str, ...]]] = {
    "scratch": {"split": ("plain",), "narrow": ("plain",)},
    "wings-quick": {"wings": ("full",)},
    "qmamba-quick": {"global": ("local",), "4 queries": ("local",), "16 queries": ("local",)},
    "text": {f"{kind}, 0.6m": ("plain, 0.6m",) for kind in ("differential", "wide")},
    "dose": dict.fromkeys(EARLIER, dose.PLAIN) | {"plain again": ("plain",)},
    "controls": dict.fromkeys(CONTROLS, dose.PLAIN) | {"plain again": ("plain",)},
    "grafts": dict.fromkeys(CONTROLS[1:], PLAIN_GRAFTS) | dict.fromkeys(PLAIN_GRAFTS[1:], (LORA,)),
    "real": {f"{row}, few": FEW for row in (*REAL, *REAL_FREE)}
    | {f"{row}, prose": PROSE for row in REAL}
    | {plain[1]: plain[:1] for plain in (FEW, PROSE)}
    | {f"{FEW[0]}, 1.15 × steps": FEW[:1]},
    "attention": dict.fromkeys(GRAFTS, (LORA, *SIZES)) | dict.fromkeys(SIZES, (LORA,)),
    **{f"budget-{steps}": dict.fromkeys(GRAFTS[2:], (LORA,)) for steps in BUDGETS},
}
# Of the measures of grafts, in percent; of VQA by the best answer to each question, no picture
GUESSING = {"VQA": 33.0, "n2o2": 25.0, "n3d8": 100 / 9, "n4o1": 6.25, "e16": 50.0}
DISTRACTORS = (0, 1, 3, 7, 11, 15)


def read(name: str, split: str = "test") -> Scores:
    """The scores of a file on a split, without the runs that chose the rates; rungs as measure/rung
    as well, and of grafts the mean."""
    # 1. the lines of the rates with the most runs
    with (HERE / f"{name}.csv").open(encoding="utf-8", newline="") as text:
        lines = [line for line in csv.DictReader(text) if line["split"] == split]
    lines = [line for line in lines if int(line["seed"]) not in dose.TUNING_SEEDS]
    rates = main_rates(lines)
    lines = [line for line in lines if line["rate"] == rates[line["study"], line["row"]]]
    # 2. right answers and examples, by seed
    sums: dict = defaultdict(lambda: defaultdict(lambda: np.zeros(2)))
    for line in lines:
        measures = [line["measure"]]
        if line["rung"]:
            measures.append(f"{line['measure']}/{line['rung']}")
        for measure in measures:
            of_seeds = sums[line["study"], line["row"], measure]
            of_seeds[int(line["seed"])] += float(line["right"]), float(line["n"])
    # 3. percent
    scores: Scores = {}
    for place, of_seeds in sums.items():
        scores[place] = {seed: 100 * right / n for seed, (right, n) in sorted(of_seeds.items())}
    if split == "test" and name.startswith(("attention", "budget", "grafts")):
        add_means(scores, in_range(read(name, "validation")))
    return scores


def main_rates(lines: list[dict]) -> dict[tuple[str, str], str]:
    """The rate of each study and row that the most seeds have."""
    places = {(line["study"], line["row"], line["rate"], line["seed"]) for line in lines}
    counts = Counter((study, row, rate) for study, row, rate, _ in places)
    rates: dict[tuple[str, str], str] = {}
    for study, row, rate in counts:
        best = rates.get((study, row))
        if best is None or counts[study, row, rate] > counts[study, row, best]:
            rates[study, row] = rate
    return rates


def add_means(scores: Scores, measures: list[str]) -> None:
    """Add the mean of these measures to the scores of every row."""
    for study, row in dict.fromkeys(place[:2] for place in scores) if measures else ():
        known = [scores[study, row, measure] for measure in measures]
        scores[study, row, "mean"] = {}
        for seed in known[0]:
            scores[study, row, "mean"][seed] = float(np.mean([of[seed] for of in known]))


def in_range(scores: Scores) -> list[str]:
    """The measures of grafts that can show a difference."""
    measures = []
    for measure, guess in GUESSING.items():
        means = []
        for (_, row, name), of_seeds in scores.items():
            if name == measure and row in (LORA, *SIZES):
                means.append(mean(of_seeds))
        if is_inside(float(np.mean(means)), guess):
            measures.append(measure)
    return measures


def mean(by_seed: dict[int, float]) -> float:
    return float(np.mean([*by_seed.values()]))


def gap(scores: Scores, study: str, row: str, controls: tuple[str, ...], measure: str) -> Estimate:
    """A row minus the mean of its controls, over the seeds that all of them have."""
    of_row = scores[study, row, measure]
    of_controls = [scores[study, name, measure] for name in controls]
    gaps = []
    for seed in of_row:
        if all(seed in of for of in of_controls):
            gaps.append([of_row[seed] - np.mean([of[seed] for of in of_controls])])
    return estimate(gaps)


def tables(name: str) -> str:
    """All scores of a file, and all differences."""
    scores = read(name)
    about = (__doc__ or "").split("\n\n")[-1]
    blocks = [f"# {name}", " ".join(about.splitlines())]
    for study in dict.fromkeys(place[0] for place in scores):
        rows = list(dict.fromkeys(row for s, row, _ in scores if s == study))
        measures = list(dict.fromkeys(m for s, _, m in scores if s == study))
        # 1. scores
        body = []
        for row in rows:
            known = [scores.get((study, row, measure), {}) for measure in measures]
            means = [f"{mean(of):.1f}" if of else "" for of in known]
            body.append([row, f"{len(known[0])}", *means])
        lines = markdown_table(["%", "runs", *measures], body)
        blocks += [f"## {study}", "\n".join(lines)]
        # 2. differences
        body = []
        for row, controls in BESIDE[name].items():
            if row in rows:
                title = f"all {len(controls)} plain rows"
                if len(controls) < 3:
                    title = " and ".join(controls)
                gaps = [gap(scores, study, row, controls, measure) for measure in measures]
                body.append([row, title, *(interval_text(g, 1, signed=True) for g in gaps)])
        blocks.append("\n".join(markdown_table(["points", "minus", *measures], body)))
    return "\n\n".join(blocks) + "\n"


# Figures


def draw_doses(name: str) -> None:
    """The difference to the plain rows over the cap, by task and steps."""
    scores = read(name)
    found: dict = defaultdict(dict)
    for study in dict.fromkeys(place[0] for place in scores):
        # pyright: ignore
        task, cap, times = re.fullmatch(r"dose, (\w+), cap ([\w.]+), (\d) x", study).groups()
        gaps = {}
        for row, beside in BESIDE[name].items():
            if (study, row, task) in scores:
                gaps[row] = gap(scores, study, row, beside, task)._asdict()
        found[task, times][None if cap == "None" else float(cap)] = gaps
    for (task, times), by_cap in found.items():
        if len(by_cap) > 2 or name == "dose" and len(by_cap) > 1:
            where = "Built task" if task == "built" else "Needle in the embedded base"
            picture = draw_gaps(f"{where}, {times} x the steps", by_cap)
            save(picture, HERE / f"{name}-{task}-{times}.png")


def draw_gaps(title: str, by_cap: dict) -> Image.Image:
    """Differences to the plain rows over the cap, with intervals; `plain again` is the difference
    of equal rows. by_cap: of each cap the differences by row."""
    rows = next(iter(by_cap.values()))
    lines, bars = {}, {}
    for row in rows:
        places = [(math.log2(cap or 4.0), gaps[row]) for cap, gaps in by_cap.items()]
        lines[row] = sorted((x, gap["mean"]) for x, gap in places)
        bars[row] = [(x, gap["low"], gap["high"]) for x, gap in places]
    labels = title, "cap of the logits, on a scale of logarithms", "points beside plain rows"
    names = {math.log2(cap): f"{cap:g}" for cap in by_cap if cap}
    if None in by_cap:
        names[math.log2(4.0)] = "none"
    return line_chart(lines, *labels, marked=rows, bars=bars, x_names=names)


@torch.no_grad()
def head_bounds() -> list[float]:
    """Of each head of the base's decoder half of what the logit of the needle's patch has above the
    mean of the 15 others', at the word where that is largest; the mean over 64 needles. A map
    bounded to ±c has at most c."""
    model = load_model("embedded").eval()
    count = 64
    numbers = torch.arange(count)
    batch, _ = dose.needles("validation", count)
    # 1. the weights of all layers
    weights = []
    attentions = attention_modules(model.language_model).values()
    with tapped(dict.fromkeys(attentions, weights.append)):
        dose.answers(model, "validation", count, numbers)
    # 2. where the patches are, and what does not look at them
    image = batch.input_ids == model.config.image_token_id
    patches = image.nonzero()[:, 1].view(count, 1, 1, 16)
    hidden = (image | (batch.attention_mask == 0) | (batch.token_type_ids > 0))[:, None]
    # 3. the gap of each head
    bounds = []
    for of_layer in weights:  # (B, N, S, S); logarithms of weights differ as logits do
        logits = of_layer.clamp(min=1e-38).log()
        logits = logits.gather(3, patches.expand(*logits.shape[:3], 16))
        needle = logits[numbers, :, :, numbers % 16]  # needles take the places in turn
        gaps = (needle - (logits.sum(-1) - needle) / dose.OTHERS) / 2
        bounds += gaps.masked_fill(hidden, -math.inf).amax(-1).mean(0).tolist()
    return bounds


def draw_bound(heads: list[float]) -> Image.Image:
    """The best of one map over the cap and the number of others, beside guessing; heads by their
    caps are dots on the axis."""
    exponents = [step / 4 for step in range(-8, 14)]
    lines = {}
    for n in (15, 63, 255, 1023):
        lines[f"{n} others"] = [(x, built.best_of_one_map(2**x, n, 20_000)) for x in exponents]
    lines["guessing"] = [(x, 100 / built.CLASSES) for x in exponents]
    lines["heads of the base"] = []
    for cap in heads:
        lines["heads of the base"] += [(math.log2(cap), 0.0), (math.nan, 0.0)]  # not a line
    labels = "Best accuracy of one map", "its logits are within ± this", "right answers, %"
    names = {math.log2(cap): f"{cap:g}" for cap in (0.25, 0.5, 1, 2, 4, 8)}
    return line_chart(lines, *labels, x_names=names)


def kept(scores: Scores, row: str) -> list[tuple[int, float]]:
    """What is left of the score of a row without distractors, above guessing, by their number; in
    percent."""
    means = []
    for number in DISTRACTORS:
        means.append(mean(scores["scratch", row, f"dose/{number}"]) - GUESSING["n4o1"])
    shares = [100 * (share / means[0]) for share in means]
    return list(zip(DISTRACTORS, shares, strict=True))


def draw_distractors() -> None:
    scores = read("scratch")
    lines = {row: kept(scores, row) for row in ("plain", "split", "narrow")}
    title = "Needles from nothing: what distractors leave"
    labels = title, "distractors", "% of the score without, above guessing"
    save(line_chart(lines, *labels, marked=lines), HERE / "distractors.png")


def draw_seeds() -> None:
    """Each run of WINGS' quick study as a dot: text kept and pictures read."""
    scores = read("wings-quick")
    sheet = Canvas(520, 330, "WINGS, quick: every run")
    for number, row in enumerate(("full", "wings")):
        text = scores["wings", row, "text"]
        pictures = scores["wings", row, "pictures"]
        for seed in text:
            sheet.dot(70 + 4.2 * pictures[seed], 280 - 2.3 * text[seed], 5, SERIES[number])
        sheet.text(400, 230 + 20 * number, row, 12, SERIES[number], "lm")
    for mark in range(0, 101, 20):
        sheet.text(62, 280 - 2.3 * mark, f"{mark}", 11, SOFT, "rm")
        sheet.text(70 + 4.2 * mark, 292, f"{mark}", 11, SOFT, "mm")
        sheet.line([(70, 280 - 2.3 * mark), (490, 280 - 2.3 * mark)], GRID, 0.5)
    sheet.text(280, 314, "pictures read, %")
    sheet.upright(20, 160, "text kept, %")
    save(sheet.finish(), HERE / "seeds.png")


def draw_intervals(
    title: str, gaps: dict[str, Estimate], file: str, band: tuple[float, float] | None = None
) -> None:
    """A line for each difference with its interval, in points. band: what equal rows differ by."""
    # 1. the axis
    sheet = Canvas(600, 90 + 24 * len(gaps), title)
    left, bottom = 170, 62 + 24 * len(gaps)
    lowest = 5 * math.floor(min(gap.low for gap in gaps.values()) / 5)
    highest = 5 * math.ceil(max(gap.high for gap in gaps.values()) / 5)

    def at(value: float) -> float:
        return left + (580 - left) * (value - lowest) / (highest - lowest)

    if band:
        sheet.box(at(band[0]), 50, at(band[1]), bottom, fill=(222, 235, 247))
        sheet.text(580, 36, "shaded: the plain rows themselves", 11, SOFT, "rm")
    for mark in range(lowest, highest + 1, 5):
        sheet.line([(at(mark), 50), (at(mark), bottom)], SOFT if mark == 0 else GRID, 0.7)
        sheet.text(at(mark), bottom + 14, f"{mark}", 11, SOFT, "mm")
    # 2. the intervals
    for number, (row, gap) in enumerate(gaps.items()):
        y = 66 + 24 * number
        sheet.text(left - 12, y, row, 12, anchor="rm")
        sheet.line([(at(gap.low), y), (at(gap.high), y)], SERIES[0], 2)
        sheet.dot(at(gap.mean), y, 4, SERIES[0])
    save(sheet.finish(), HERE / file)


def draw_grafts() -> None:
    """Grafts minus the mean of all plain rows, with the band of these; and each pair of plain
    rows."""
    scores = read("attention")
    plain = (LORA, *SIZES)
    means = [mean(scores["attention", row, "mean"]) for row in plain]
    middle = float(np.mean(means))
    band = min(means) - middle, max(means) - middle
    gaps = {row: gap(scores, "attention", row, plain, "mean") for row in GRAFTS}
    draw_intervals("Grafts minus the mean of five plain rows, points", gaps, "grafts.png", band)
    pairs = {}
    for a, b in combinations(plain, 2):
        pairs[f"{a} - {b}"] = gap(scores, "attention", a, (b,), "mean")
    draw_intervals("A/A: plain rows minus each other, points", pairs, "calibration.png")


def draw_budget() -> None:
    """Grafts minus plain LoRA over the steps of a run."""
    lines, bars = defaultdict(list), defaultdict(list)
    for steps in BUDGETS:
        scores = read(f"budget-{steps}")
        x = math.log2(steps / 100)
        for row in GRAFTS[2:]:
            of_row = gap(scores, "attention", row, (LORA,), "mean")
            lines[row].append((x, of_row.mean))
            bars[row].append((x, of_row.low, of_row.high))
    title = "Grafts minus plain LoRA by the length of a run"
    labels = title, "steps, on a scale of logarithms", "mean, points"
    names = {math.log2(steps / 100): f"{steps}" for steps in BUDGETS}
    picture = line_chart(lines, *labels, marked=lines, bars=bars, x_names=names)
    save(picture, HERE / "budget.png")


def draw_text() -> None:
    """Right answers of the language models by the number of examples in context, on the validation
    split."""
    report = json.loads((HERE / "text.json").read_text(encoding="utf-8"))
    lines, bars = defaultdict(list), defaultdict(list)
    for row in report["rows"]:
        if "×" in row:
            continue
        ladders = [of_run["ladders"]["examples"] for of_run in report["rows"][row]["facts"]]
        for n, values in enumerate(np.transpose(ladders)):
            of_row = estimate(100 * values[:, None])
            lines[row].append((math.log2(4 << n), of_row.mean))
            bars[row].append((math.log2(4 << n), of_row.low, of_row.high))
    title = "Language models: right answers after examples"
    labels = title, "examples in context, on a scale of logarithms", "right answers, %"
    names = {x: f"{2**x:.0f}" for points in lines.values() for x, _ in points}
    picture = line_chart(lines, *labels, marked=lines, bars=bars, x_names=names)
    save(picture, HERE / "text.png")


# The tables of RESULTS.md

# what a head gives
HEADS = {
    "twin-small": "o₁ + μ·(o₁ − o₂), μ = 0.25",
    "v2": "o₁ − σ(w·x + b)·o₂",
    "difflora": "o₁ − λ·o₂, λ from 0.1",
    "mean": "o − λ·Ū, Ū the mean of the values in sight",
    "gate": "o·2σ(w·x)",
    "temperature": "o of t·q",
    "sink": "o·σ(logsumexp(s) − b), s the logits",
    "plain + head norm": "norm(o)·(1 − λ₀)",
    "shared": "norm((1 − λ)·o)·(1 − λ₀), the source's",
    "dex": "o − λ·o·W",
}


def judged(
    name: str, study: str, measure: str, guess: float, control: tuple[str, ...]
) -> dict[str, dict]:
    """The differences to these plain rows, of the rows that stand beside them, with their verdicts
    by the rules of all studies, Holm's over them."""
    scores = read(name)
    known = read(name, "validation")
    gaps = {}
    for row, beside in BESIDE[name].items():
        if beside == control:
            gaps[row, measure] = gap(scores, study, row, control, measure)
    shares = [mean(known[study, row, measure]) for row in control if (study, row, measure) in known]
    # "mean" is of measures in range
    inside = list(gaps) if not shares or is_inside(float(np.mean(shares)), guess) else []
    verdicts = judge(gaps, inside, {measure: Measure(measure, ())})
    found = {}
    for place, of_row in gaps.items():
        found[place[0]] = of_row._asdict() | verdicts[place]
    return found


def doses(task: str, guess: float) -> str:
    """The rows of the controls' run; in the built task those of the earlier one too, whose plain rows
    came out the same."""
    studies = [f"dose, {task}, cap {cap}, 1 x" for cap in (0.5, 0.25)]
    scores = read("controls")
    middles = [np.mean([mean(scores[s, row, task]) for row in dose.PLAIN]) for s in studies]
    body = [["**plain**, right answers, %", "o", *(f"{of:.1f}" for of in middles), ""]]
    parts = [("controls", CONTROLS)]
    if task == "built":
        parts.append(("dose", ("plain + head norm", "shared", "dex")))
    for name, others in parts:
        tables = [judged(name, study, task, guess, dose.PLAIN) for study in studies]
        for row in others:
            texts = [interval_text(table[row], 1, signed=True) for table in tables]
            verdicts = " and ".join(dict.fromkeys(table[row]["verdict"] for table in tables))
            seen = [of[row]["visible"] for of in tables if of[row]["verdict"] == "undecided"]
            if seen:
                verdicts += f" (visible from {max(seen):.1f})"
            body.append([f"`{row}`", HEADS[row], *texts, verdicts])
    gaps = [gap(scores, study, "plain again", ("plain",), task) for study in studies]
    texts = [interval_text(of_study._asdict(), 1, signed=True) for of_study in gaps]
    body.append(["A/A: `plain again` − `plain`", "", *texts, ""])
    runs = len(scores[studies[0], dose.PLAIN[0], task])
    head = [f"minus plain, points, {runs} runs", "a head gives", "c = 0.5", "c = 0.25", "verdict"]
    if task != "built":  # heads are named once
        head.pop(1)
        for line in body:
            line.pop(1)
    return "\n".join(markdown_table(head, body))


ANGLES = """# The angles between two branches

Cosines of their gradients on 64 needles, the mean of six or seven runs and four layers with the least and the
most: *learning* by the queries, *input* by the input of a layer. How: [branches.py](branches.py).

{}

Back to [RESULTS.md](../../RESULTS.md).
"""


def branches() -> str:
    """The two cosines of branches.csv, the mean over layers and runs, with the least and the most;
    rows that are alike share a line."""
    found = defaultdict(lambda: defaultdict(list))
    with (HERE / "branches.csv").open(encoding="utf-8", newline="") as text:
        for line in csv.DictReader(text):
            for kind in ("learning", "input"):
                if line[kind]:
                    found[line["row"], line["state"]][kind].append(float(line[kind]))
    rows = defaultdict(list)
    for (row, state), kinds in found.items():
        texts = []
        for kind in ("learning", "input"):
            known = kinds.get(kind)
            text = "–"
            if known:
                text = f"{np.mean(known):+.2f} ({min(known):+.2f} to {max(known):+.2f})"
            texts.append(text)
        rows[(state, *texts)].append(f"`{row}`")
    body = [[", ".join(names), *place] for place, names in rows.items()]
    return "\n".join(markdown_table(["row", "when", "learning", "input"], body))


def rows_beside(
    name: str, study: str, titles: dict[str, str], guess: float, plain: tuple[str, ...], about: str
) -> list[list[str]]:
    """Rows minus these plain ones, by measure and its title; the verdicts are those of the first
    measure. The first line is the head."""
    # 1. the plain rows
    scores = read(name)
    middles = []
    for measure in titles:
        middles.append(np.mean([mean(scores[study, row, measure]) for row in plain]))
    body = [["**plain**", *(f"{middle:.1f}" for middle in middles), ""]]
    main = next(iter(titles))
    runs = len(scores[study, plain[0], main])
    # 2. the others
    tables = [judged(name, study, measure, guess, plain) for measure in titles]
    for row, first in tables[0].items():
        texts = [interval_text(table[row], 1, signed=True) for table in tables]
        verdict = first["verdict"]
        if verdict == "undecided":
            verdict += f" (visible from {first['visible']:.1f})"
        title = f"`{row.partition(', ')[0]}`"
        of_row = len(scores[study, row, main])
        if of_row < runs:
            title += f", {of_row} runs"
        body.append([title, *texts, verdict])
    # 3. the first plain row that is beside another
    row, beside = next((row, of) for row, of in BESIDE[name].items() if row in plain)
    gaps = [gap(scores, study, row, beside, measure) for measure in titles]
    texts = [interval_text(of_row._asdict(), 1, signed=True) for of_row in gaps]
    pair = [known.partition(", ")[0] for known in (row, *beside)]
    body.append([f"A/A: {' − '.join(pair)}", *texts, ""])
    verdict = f"verdict, {titles[main].partition(',')[0]}"
    return [[f"{about}, {runs} runs", *titles.values(), verdict], *body]


def grafts() -> str:
    """The controls as grafts: the mean of five measures, and needles under noise on the pixels."""
    titles = {"mean": "five measures, %"}
    titles |= {f"n4o1, noise {strength}": f"noise {strength}, %" for strength in NOISE}
    guess = GUESSING["n4o1"]
    about = "minus four plain rows"
    head, *body = rows_beside("grafts", "attention", titles, guess, PLAIN_GRAFTS, about)
    return "\n".join(markdown_table(head, body))


def real() -> str:
    """Rows on a pretrained language model that learned from few facts, and beside them from
    prose."""
    titles = {
        "exact": "many facts, %",
        "quiet": "few facts, %",
        "signal": "log(asked ÷ others), /100",
        "loss": "loss, nats/100",
    }
    cells = "real", "compare-real"
    about = "minus two plain rows"
    head, *few = rows_beside(*cells, titles, 0.0, FEW, about)
    (runs, *more), *prose = rows_beside(*cells, {"exact": "after prose, %"}, 0.0, PROSE, "")
    more[0] += runs
    by_row = {row: rest for row, *rest in prose}
    body = [[*line, *by_row.get(line[0], ["", ""])] for line in few]
    return "\n".join(markdown_table([*head, *more], body))


TABLES = {
    "grafts": grafts,
    "built": lambda: doses("built", 12.5),
    "needle": lambda: doses("needle", 6.25),
    "real": real,
}


def fill(page: str) -> str:
    """A page with the tables between its comments."""
    for name, table in TABLES.items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert mark and end, f"RESULTS.md has no place for the table {name}"
        text = re.sub(r"(?<=[ \[(])-(?=\d)", "−", table())
        page = "".join([before, mark, text, "\n", end, after])
    return page


if __name__ == "__main__":
    page = HERE.parents[1] / "RESULTS.md"
    write_text(page, fill(page.read_text(encoding="utf-8")))
    for name in BESIDE:
        if (HERE / f"{name}.csv").exists():
            write_text(HERE / f"{name}.md", tables(name))
    write_text(HERE / "angles.md", ANGLES.format(branches()))
    draw_doses("dose")
    draw_doses("controls")
    draw_distractors()
    draw_seeds()
    draw_grafts()
    draw_budget()
    draw_text()
    save(draw_bound(head_bounds()), HERE / "bound.png")
