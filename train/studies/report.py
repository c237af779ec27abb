"""The report of any study: comparison.md, comparison.json, and comparison.csv, from which both can
be made again.

Cells that diverged are in no line of the CSV.
"""

import csv
import io
from collections.abc import Sequence

import numpy as np

from eval.bench import write_json
from eval.report import interval_text, markdown_table
from model.common import write_text
from train.estimates import estimate
from train.studies import engine
from train.studies.engine import Run
from train.studies.rules import FEWEST_SEEDS, TUNING_SEEDS, share_of_range

ABOUT = """\
Scores in % where no other unit is named, differences in points, paired by seed and example, with \
95 % intervals of Student's t over seeds and groups of examples. Verdicts are Holm's over a table, \
the main difference by itself. Out of range: on the validation split the controls guess or are \
perfect."""
# A line of the CSV is a cell on one measure, or one difficulty of it: `right` is the sum of the
# scores of `n` examples.
PLACE = "study row seed rate split measure rung n right".split()
MADE_BY = "cpu_seconds commit processor torch".split()
ORIGIN = "commit {commit}, {processor}, PyTorch {torch}"


def lines_of(run: Run) -> list[list]:
    """All results that the report rests on. Seconds are those of the cell, on each of its lines."""
    lines = []
    for job in sorted(run.used, key=str):
        cell = run.used[job]
        made_by = [cell[column] for column in MADE_BY]
        for split, of_split in cell["scores"].items():
            for name, scores in of_split.items():
                place = [run.study.name, job.row, job.seed, job.rate, split, name]
                rungs = run.study.measures[name].rungs if split == "test" else ()
                for rung, right in by_rung(scores, rungs).items():
                    lines.append([*place, rung, len(right), float(np.sum(right)), *made_by])
    for part in run.parts:
        lines += lines_of(part)
    return lines


def by_rung(scores: Sequence[float], rungs: Sequence[str]) -> dict[str, list[float]]:
    """Scores by difficulty, in order of appearance; all of them under "" where none is known."""
    parts = {}
    for rung, score in zip(rungs or [""] * len(scores), scores, strict=True):
        parts.setdefault(rung, []).append(score)
    return parts


def accuracy_table(run: Run) -> list[str]:
    """Every row at its rate."""
    measures = run.study.measures
    guessing = ["" if m.chance is None else f"{m.chance:.1f}" for m in measures.values()]
    body = [["guessing", "", "", "", *guessing]]
    for row, cells in run.cells.items():
        sizes = [facts["parameters"] for facts in run.facts(row) if "parameters" in facts]
        size = f"{sizes[0]:,}" if sizes else ""
        rate = f"{run.rates[row]:g}" if run.rates[row] else ""
        line = [row, size, f"{len(cells)}", rate]
        for name, scores in run.scores(row).items():
            measure = measures[name]
            line.append(interval_text(estimate(scores, measure.groups), measure.digits))
        body.append(line)
    titles = [measure.title for measure in measures.values()]
    return markdown_table(["row", "parameters", "seeds", "rate", *titles], body)


def difference_table(run: Run, title: str) -> list[str]:
    """Intervals, verdicts, and what an undecided difference would have seen."""
    columns = run.study.columns
    body = []
    for row, controls in run.study.beside[title].items():
        line = [row, controls[0] if len(controls) == 1 else f"{len(controls)} rows"]
        for name, measure in columns.items():
            gap = run.tables[title][row, name]
            text = f"{interval_text(gap, measure.digits, signed=True)} {gap['verdict']}"
            if gap["verdict"] == "undecided":
                text += f" (±{gap['visible']:.{measure.digits}f} is visible)"
            line.append(text)
        body.append(line)
    titles = [measure.title for measure in columns.values()]
    return markdown_table(["row", "beside", *titles], body)


def rung_table(run: Run, name: str) -> list[str]:
    """The score of each row by difficulty."""
    measure = run.study.measures[name]
    body = []
    for row in run.cells:
        parts = by_rung(run.scores(row)[name].mean(0), measure.rungs)
        means = [f"{np.mean(part):.{measure.digits}f}" for part in parts.values()]
        body.append([row, *means])
    return markdown_table(["row", *dict.fromkeys(measure.rungs)], body)


def range_table(run: Run) -> list[str]:
    """How far the controls of the first table are from guessing and from 100 % on the validation
    split."""
    beside = next(iter(run.study.beside.values()), {})
    controls = list(dict.fromkeys(row for rows in beside.values() for row in rows))
    usable = run.in_range(controls)
    validation = [run.validation(run.cells[row][:TUNING_SEEDS]) for row in controls]
    body = []
    for name, measure in run.study.measures.items():
        known = [scores[name] for scores in validation if name in scores]
        if known and measure.is_share:
            shares = [100 * share_of_range(score, measure.chance) for score in known]
            share = f"{min(shares):.0f} to {max(shares):.0f}"
            counts = "yes" if name in usable else "no"
            body.append([measure.title, f"{measure.chance or 0.0:.1f}", share, counts])
    head = ["measure", "guessing, %", "controls, % of the way to 100", "counts"]
    return markdown_table(head, body)


def rate_table(run: Run) -> list[str]:
    """What the rates were chosen by, on the validation split; more is better."""
    body = []
    for row, tried in run.tried.items():
        scores = ", ".join(f"{rate:g}: {score:.4g}" for rate, score in tried.items())
        chosen = run.rates[row]
        is_at_edge = len(tried) > 1 and chosen in (min(tried), max(tried))
        body.append([row, f"{chosen:g}", scores, "at the edge" if is_at_edge else ""])
    return markdown_table(["row", "rate", "score by rate", ""], body)


def prediction_table(run: Run) -> list[str]:
    """What was predicted beside the verdicts of the first table."""
    judged = next(iter(run.tables.values()), {})
    body = []
    for row, measure, verdict, reason in run.study.predictions:
        if (row, measure) in judged:
            body.append([row, measure, verdict, judged[row, measure]["verdict"], reason])
    return markdown_table(["row", "measure", "predicted", "found", "reason given before"], body)


def sections(run: Run, heading: str = "##") -> list:
    """The tables that have lines, below their headings."""
    tables = {"Scores": accuracy_table(run)}
    for title in run.tables:
        tables[f"Minus {title}"] = difference_table(run, title)
    for name, measure in run.study.measures.items():
        if measure.rungs:
            tables[measure.title] = rung_table(run, name)
    tables["Range"] = range_table(run)
    tables["Rates"] = rate_table(run)
    tables["Predictions"] = prediction_table(run)
    blocks = []
    for title, lines in tables.items():
        if len(lines) > 2:
            blocks += [f"{heading} {title}", lines]
    return blocks


def limits_of(run: Run) -> list[str]:
    """Too few seeds, and the cells that diverged."""
    limits = []
    if run.seeds < FEWEST_SEEDS:
        limits.append(f"- {run.seeds} seed(s): fewer than {FEWEST_SEEDS} decide nothing.")
    for cells in run.cells.values():
        for cell in cells:
            if "diverged" in cell["facts"]:
                limits.append(f"- {cell['row']}, seed {cell['seed']}: {cell['facts']['diverged']}")
    return limits


def write(run: Run) -> str:
    """Write comparison.md, comparison.json and comparison.csv; returns the first."""
    # 1. the text
    blocks = [f"# {run.study.title}", ABOUT, *sections(run), *run.study.more(run)]
    limits = limits_of(run)
    if limits:
        blocks += ["## Limits", limits]
    cells = {}  # several parts may need one
    for part in (run, *run.parts):
        cells |= {part.file(job): cell for job, cell in part.used.items()}
    seconds = round(sum(cell["cpu_seconds"] for cell in cells.values()))
    made_by = sorted({ORIGIN.format_map(cell) for cell in cells.values()})
    origins = "; ".join(made_by)
    cost = f"{seconds:,} CPU seconds, {run.seeds} seed(s)"
    blocks.append(f"Cells were made by {origins}: {cost}.")
    texts = [block if isinstance(block, str) else "\n".join(block) for block in blocks]
    text = "\n\n".join(texts) + "\n"
    # 2. the numbers
    summary = {"made_by": made_by, "cpu_seconds": seconds, "seeds": run.seeds}
    summary |= {"rates": {}, "rows": {}, "tables": {}}
    for row, of_row in run.cells.items():
        summary["rates"][row] = {"chosen": run.rates[row], "tried": run.tried.get(row, {})}
        summary["rows"][row] = {"facts": [cell["facts"] for cell in of_row]}
    for title, table in run.tables.items():
        lines = [{"row": row, "measure": name, **gap} for (row, name), gap in table.items()]
        summary["tables"][title] = lines
    # 3. the cells
    sheet = io.StringIO()
    csv.writer(sheet, lineterminator="\n").writerows([PLACE + MADE_BY, *lines_of(run)])
    write_text(run.out / "comparison.csv", sheet.getvalue())
    write_text(run.out / "comparison.md", text)
    write_json(run.out / "comparison.json", summary)
    return text


def publish(study: engine.Study, options: engine.StudyOptions) -> None:
    """Run a whole study, and print its report."""
    print(write(engine.run(study, options)))
