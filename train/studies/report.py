"""The report of any study: comparison.md, comparison.json, and comparison.csv, from which both can be made again.

Tables: accuracy of each row, each table of differences, the range of the measures, predictions, rates tried; then what
the study adds, and what limits it. Cells that diverged are in no line of the CSV.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence

import numpy as np

from eval.report import interval_text, markdown_table
from eval.statistics import estimate
from model.common import write_text
from train.studies.engine import Run
from train.studies.rules import FEWEST_SEEDS, check, share_of_range

ABOUT = (
    "Scores in % where no other unit is named, differences in points, paired by seed and example, with 95 % intervals "
    "of Student's t over seeds and groups of examples. Verdicts are Holm's over a table, the main difference by "
    "itself. Out of range: on the validation split the controls guess or are perfect."
)
# A line of the CSV is a cell on one measure, or one difficulty of it: `right` is the sum of the scores of `n` examples.
COLUMNS = "study row seed rate split measure rung n right cpu_seconds commit processor torch".split()


def lines_of(run: Run) -> list[list]:
    """All results that the report rests on. Seconds are those of the cell, on each of its lines."""
    lines = []
    for job in sorted(run.used, key=str):
        cell = run.used[job]
        for name, scores in cell["scores"].items():
            rungs = run.study.measures[name].rungs if job.split == "test" else ()
            for rung, right in by_rung(scores, rungs or [""] * len(scores)).items():
                place = [run.study.name, job.row, job.seed, job.rate, job.split, name, rung]
                lines.append([*place, len(right), float(np.sum(right)), *(cell[name] for name in COLUMNS[-4:])])
    return lines + [line for part in run.parts for line in lines_of(part)]


def by_rung(scores: Sequence[float], rungs: Sequence[str]) -> dict[str, list[float]]:
    """Scores by difficulty, in order of appearance."""
    return {rung: [s for s, other in zip(scores, rungs, strict=True) if other == rung] for rung in dict.fromkeys(rungs)}


# Tables


def accuracy_table(run: Run) -> list[str]:
    """Every row at its rate."""
    measures = run.study.measures
    body = [["guessing", "", "", "", *("" if m.chance is None else f"{m.chance:.1f}" for m in measures.values())]]
    for row, cells in run.cells.items():
        scores, rate = run.scores(row), run.rates[row]
        parameters = next((facts["parameters"] for facts in run.facts(row) if "parameters" in facts), 0)
        texts = [interval_text(estimate(scores[name], m.groups), m.digits) for name, m in measures.items()]
        known = [f"{parameters:,}" if parameters else "", f"{len(cells)}", f"{rate:g}" if rate else ""]
        body.append([row, *known, *texts])
    return markdown_table(["row", "parameters", "seeds", "rate", *(m.heading for m in measures.values())], body)


def rung_table(run: Run, name: str) -> list[str]:
    """The score of each row by difficulty; without rows for a measure that has one."""
    measure, body = run.study.measures[name], []
    for row in run.cells if measure.rungs else ():
        parts = by_rung(run.scores(row)[name].mean(0), measure.rungs)
        body.append([row, *(f"{np.mean(part):.{measure.digits}f}" for part in parts.values())])
    return markdown_table(["row", *dict.fromkeys(measure.rungs)], body)


def difference_table(run: Run, beside: Mapping[str, tuple[str, ...]], judged: Mapping[tuple, Mapping]) -> list[str]:
    """Those of `beside` that are judged: intervals, verdicts, and what an undecided one would have seen."""
    columns, body = run.study.columns, []
    for row in dict.fromkeys(row for row, _ in judged):
        texts = []
        for name, measure in columns.items():
            gap, digits = judged[row, name], measure.digits
            seen = f" (±{gap['visible']:.{digits}f} is visible)" if gap["verdict"] == "undecided" else ""
            texts.append(f"{interval_text(gap, digits, signed=True)} {gap['verdict']}{seen}")
        controls = beside[row]
        body.append([row, controls[0] if len(controls) == 1 else f"{len(controls)} rows", *texts])
    return markdown_table(["row", "beside", *(measure.heading for measure in columns.values())], body)


def range_table(run: Run, beside: Mapping[str, tuple[str, ...]]) -> list[str]:
    """How far the controls are from guessing and from 100 % on the validation split."""
    controls, body = list(dict.fromkeys(row for rows in beside.values() for row in rows)), []
    usable = run.in_range(controls)
    for name, measure in run.study.measures.items():
        if controls and measure.unit == "%" and all(name in run.validation.get(row, ()) for row in controls):
            chance = measure.chance or 0.0
            shares = [100 * share_of_range(run.validation[row][name], chance) for row in controls]
            share = f"{min(shares):.0f} to {max(shares):.0f}"
            body.append([measure.title, f"{chance:.1f}", share, "yes" if name in usable else "no"])
    return markdown_table(["measure", "guessing, %", "controls, % of the way to 100", "counts"], body)


def rate_table(run: Run) -> list[str]:
    """What the rates were chosen by, on the validation split; more is better."""
    body = []
    for row, tried in run.tried.items():
        scores = ", ".join(f"{rate:g}: {score:.4g}" for rate, score in tried.items())
        is_at_edge = len(tried) > 1 and run.rates[row] in (min(tried), max(tried))
        body.append([row, f"{run.rates[row]:g}", scores, "at the edge" * is_at_edge])
    return markdown_table(["row", "rate", "score by rate", ""], body)


def prediction_table(checked: Sequence[Mapping]) -> list[str]:
    """The predictions of `rules.check`."""
    head = ["row", "measure", "predicted", "found", "outcome", "reason given before"]
    keys = ["row", "measure", "verdict", "found", "outcome", "reason"]
    return markdown_table(head, [[prediction[key] for key in keys] for prediction in checked])


def limits(run: Run) -> list[str]:
    """What else a reader has to know: too few seeds, and runs that diverged."""
    few = f"- {run.seeds} seed(s): fewer than {FEWEST_SEEDS} decide nothing."
    failed = [(row, cell) for row, cells in run.cells.items() for cell in cells if "diverged" in cell["facts"]]
    texts = [f"- {row}, seed {cell['seed']}: {cell['facts']['diverged']}" for row, cell in failed]
    return [few] * (run.seeds < FEWEST_SEEDS) + texts


# The whole


def write(run: Run) -> str:
    """Write comparison.md, comparison.json and comparison.csv; returns the first."""
    study, tables = run.study, {title: run.table(beside) for title, beside in run.study.beside.items()}
    beside, judged = next(iter(study.beside.values()), {}), next(iter(tables.values()), {})
    checked = check(study.predictions, {place: gap["verdict"] for place, gap in judged.items()})
    sections = {"Scores": accuracy_table(run)}
    sections |= {f"Minus {name}": difference_table(run, study.beside[name], tables[name]) for name in tables}
    sections |= {measure.heading: rung_table(run, name) for name, measure in study.measures.items()}
    sections |= {"Range": range_table(run, beside), "Rates": rate_table(run), "Predictions": prediction_table(checked)}
    blocks = [f"# {study.title}", ABOUT]
    blocks += [block for title, lines in sections.items() if len(lines) > 2 for block in (f"## {title}", lines)]
    blocks += study.more(run)
    if lines := limits(run):
        blocks += ["## Limits", lines]
    cells = [cell for part in (run, *run.parts) for cell in part.used.values()]
    made_by = sorted({f"commit {cell['commit']}, {cell['processor']}, PyTorch {cell['torch']}" for cell in cells})
    seconds = round(sum(cell["cpu_seconds"] for cell in cells))
    blocks.append(f"Cells were made by {'; '.join(made_by)}: {seconds:,} CPU seconds, {run.seeds} seed(s).")
    summary = {"plan": study.plan, "made_by": made_by, "cpu_seconds": seconds, "seeds": run.seeds}
    summary["rates"] = {row: {"chosen": run.rates[row], "tried": run.tried.get(row, {})} for row in run.cells}
    summary |= {"validation": run.validation, "predictions": checked, "tables": {}}
    summary["rows"] = {row: {"facts": [cell["facts"] for cell in cells]} for row, cells in run.cells.items()}
    for title, table in tables.items():
        summary["tables"][title] = [{"row": row, "measure": name, **gap} for (row, name), gap in table.items()]
    text = "\n\n".join(block if isinstance(block, str) else "\n".join(block) for block in blocks) + "\n"
    csv.writer(table_of_cells := io.StringIO(), lineterminator="\n").writerows([COLUMNS, *lines_of(run)])
    write_text(run.out / "comparison.csv", table_of_cells.getvalue())
    write_text(run.out / "comparison.md", text)
    write_text(run.out / "comparison.json", json.dumps(summary, indent=1) + "\n")
    return text
