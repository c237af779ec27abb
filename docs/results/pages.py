"""The tables and figures of RESULTS.md, from the CSV files in this folder: `python docs/results/pages.py`.

A line of a CSV is a cell on one measure. Intervals are 95 % of Student's t over runs, paired by seed; questions are the
same for all. Of a row that was tried at several rates those runs count that are the most.
"""

import csv
import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from eval.figures import GRID, SERIES, SOFT, Canvas, save  # noqa: E402
from eval.report import interval_text, markdown_table  # noqa: E402
from model.common import write_text  # noqa: E402
from train.chart import line_chart  # noqa: E402
from train.estimates import Estimate, estimate  # noqa: E402
from train.studies import built, dose  # noqa: E402

Scores = dict[tuple[str, str, str], dict[int, float]]  # percent by seed, of (study, row, measure)
# The row or rows that each row is subtracted from, by file
BESIDE: dict[str, dict[str, tuple[str, ...]]] = {
    "scratch": {"split": ("plain",), "narrow": ("plain",)},
    "wings-quick": {"wings": ("full",)},
    "qmamba-quick": {"global": ("local",), "4 queries": ("local",), "16 queries": ("local",)},
    "dose": {row: dose.PLAIN for row in dose.ROWS if row not in dose.PLAIN} | {"plain again": ("plain",)},
}
CHANCE = 6.25  # of a 4×4 needle, in percent
DISTRACTORS = (0, 1, 3, 7, 11, 15)


def read(name: str) -> Scores:
    """The scores of a file on the test split, without the runs that chose the rates; rungs as measure/rung as well."""
    with (HERE / f"{name}.csv").open(encoding="utf-8", newline="") as text:
        lines = [line for line in csv.DictReader(text) if line["split"] == "test"]
    lines = [line for line in lines if int(line["seed"]) not in dose.TUNING_SEEDS]
    places = {(line["study"], line["row"], line["rate"], line["seed"]) for line in lines}
    counts = Counter((study, row, rate) for study, row, rate, _ in places)
    sums: dict = defaultdict(lambda: defaultdict(lambda: np.zeros(2)))
    for line in lines:
        study, row = line["study"], line["row"]
        if line["rate"] == max(
            (rate for s, r, rate in counts if (s, r) == (study, row)), key=lambda x: counts[study, row, x]
        ):
            rung = [f"{line['measure']}/{line['rung']}"] if line["rung"] else []
            for measure in (line["measure"], *rung):
                sums[study, row, measure][int(line["seed"])] += float(line["right"]), float(line["n"])
    return {place: {seed: 100 * right / n for seed, (right, n) in sorted(of.items())} for place, of in sums.items()}


def gap(scores: Scores, study: str, row: str, controls: tuple[str, ...], measure: str) -> Estimate:
    """A row minus the mean of its controls, over the seeds that all of them have."""
    of_row, of_controls = scores[study, row, measure], [scores[study, name, measure] for name in controls]
    seeds = [seed for seed in of_row if all(seed in of for of in of_controls)]
    return estimate([[of_row[seed] - np.mean([of[seed] for of in of_controls])] for seed in seeds])


def tables(name: str) -> str:
    """All scores of a file, and all differences."""
    scores, blocks = read(name), [f"# {name}", " ".join(line for line in (__doc__ or "").split("\n\n")[1].splitlines())]
    for study in dict.fromkeys(place[0] for place in scores):
        rows = list(dict.fromkeys(row for s, row, _ in scores if s == study))
        measures = list(dict.fromkeys(m for s, _, m in scores if s == study))
        body = []
        for row in rows:
            known = [scores.get((study, row, measure), {}) for measure in measures]
            body.append([row, f"{len(known[0])}", *(f"{np.mean([*of.values()]):.1f}" if of else "" for of in known)])
        blocks += [f"## {study}", "\n".join(markdown_table(["%", "runs", *measures], body))]
        body = []
        for row, controls in BESIDE[name].items():
            if row in rows:
                gaps = [gap(scores, study, row, controls, measure) for measure in measures]
                body.append([row, " and ".join(controls), *(interval_text(g, 1, signed=True) for g in gaps)])
        blocks.append("\n".join(markdown_table(["points", "minus", *measures], body)))
    return "\n\n".join(blocks) + "\n"


# Figures


def draw_doses() -> None:
    """The difference to the plain rows over the cap, by task and steps."""
    scores, found = read("dose"), defaultdict(dict)
    for study in dict.fromkeys(place[0] for place in scores):
        task, cap, times = re.fullmatch(r"dose, (\w+), cap ([\w.]+), (\d) x", study).groups()  # pyright: ignore
        known = {row: beside for row, beside in BESIDE["dose"].items() if (study, row, task) in scores}
        gaps = {row: gap(scores, study, row, beside, task) for row, beside in known.items()}
        found[task, times][None if cap == "None" else float(cap)] = {row: g._asdict() for row, g in gaps.items()}
    for (task, times), by_cap in found.items():
        title = f"{'Built task' if task == 'built' else 'Needle in the embedded base'}, {times} x the steps"
        save(dose.draw_gaps(title, by_cap), HERE / f"dose-{task}-{times}.png")


def kept(scores: Scores, row: str) -> list[tuple[int, float]]:
    """What is left of the score of a row without distractors, above guessing, by their number; in percent."""
    means = [np.mean([*scores["scratch", row, f"dose/{number}"].values()]) - CHANCE for number in DISTRACTORS]
    return [(number, 100 * float(mean / means[0])) for number, mean in zip(DISTRACTORS, means, strict=True)]


def draw_distractors() -> None:
    scores = read("scratch")
    lines = {row: kept(scores, row) for row in ("plain", "split", "narrow")}
    labels = "Needles from nothing: what distractors leave", "distractors", "% of the score without, above guessing"
    save(line_chart(lines, *labels, marked=lines), HERE / "distractors.png")


def draw_seeds() -> None:
    """Each run of WINGS' quick study as a dot: text kept and pictures read."""
    scores, sheet = read("wings-quick"), Canvas(520, 330, "WINGS, quick: every run")
    for number, row in enumerate(("full", "wings")):
        text, pictures = scores["wings", row, "text"], scores["wings", row, "pictures"]
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


def draw_forest() -> None:
    """The grafts of commit 531252b minus the mean of five plain rows, which themselves lie within the band."""
    report = json.loads((HERE / "attention-full.json").read_text(encoding="utf-8"))
    (pooled,) = [t for t in report["tables"] if "5 rows, r 16 to 20" in t[2] and "in range" in t[0]]
    numbers = [re.findall(r"[+-][\d.]+", line.split("|")[-2]) for line in pooled[2:]]
    rows = {line.split("|")[1].strip(): list(map(float, n)) for line, n in zip(pooled[2:], numbers, strict=True)}
    sheet, left, wide = Canvas(600, 90 + 24 * len(rows), "Grafts minus the mean of five plain rows, points"), 150, 11.0
    at = lambda value: left + wide * (value + 34)  # noqa: E731
    bottom = 62 + 24 * len(rows)
    sheet.box(at(-1.5), 50, at(1.7), bottom, fill=(222, 235, 247))  # the plain rows: 66.1 to 69.3, mean 67.6
    for mark in range(-30, 6, 5):
        sheet.line([(at(mark), 50), (at(mark), bottom)], SOFT if mark == 0 else GRID, 0.7)
        sheet.text(at(mark), bottom + 14, f"{mark}", 11, SOFT, "mm")
    for number, (row, (mean, low, high)) in enumerate(rows.items()):
        y = 66 + 24 * number
        sheet.text(left - 20, y, row, 12, anchor="rm")
        sheet.line([(at(low), y), (at(high), y)], SERIES[0], 2)
        sheet.dot(at(mean), y, 4, SERIES[0])
    save(sheet.finish(), HERE / "grafts.png")


if __name__ == "__main__":
    for name in BESIDE:
        write_text(HERE / f"{name}.md", tables(name))
    draw_doses()
    draw_distractors()
    draw_seeds()
    draw_forest()
    save(built.draw_bound(dose.head_bounds(), dose.OTHERS), HERE / "bound.png")
