"""The report of any study: comparison.md, comparison.json, and comparison.csv, from which both can
be made again.

Cells that diverged are in no line of the CSV.
"""

import csv
import io
import json
from collections.abc import Sequence

import numpy as np

from eval.report import interval_text, markdown_table
from model.common import write_text
from train.estimates import estimate
from train.studies.engine import Run
from train.studies.rules import FEWEST_SEEDS, TUNING_SEEDS, share_of_range

ABOUT = (
    "Scores in % where no other unit is named, differences in points, paired by seed and example, "
    "with 95 % intervals "
    "of Student's t over seeds and groups of examples. Verdicts are Holm's over a table, the main "
    "difference by "
    "itself. Out of range: on the validation split the controls guess or are perfect."
)
# A line of the CSV is a cell on one measure, or one difficulty of it: `right` is the sum of the
# scores of `n` examples.
COLUMNS = (
    "study row seed rate split measure rung n right cpu_seconds commit processor torch".split()
)


def lines_of(run: Run) -> list[list]:
    """All results that the report rests on. Seconds are those of the cell, on each of its lines."""
    lines = []
    for job in sorted(run.used, key=str):
        cell, place = run.used[job], [run.study.name, job.row, job.seed, job.rate]
        for split, name in [
            (split, name) for split, of_split in cell["scores"].items() for name in of_split
        ]:
            scores, rungs = (
                cell["scores"][split][name],
                run.study.measures[name].rungs if split == "test" else (),
            )
            for rung, right in by_rung(scores, rungs or [""] * len(scores)).items():
                numbers = [
                    len(right),
                    float(np.sum(right)),
                    *(cell[column] for column in COLUMNS[-4:]),
                ]
                lines.append([*place, split, name, rung, *numbers])
    return lines + [line for part in run.parts for line in lines_of(part)]


def by_rung(scores: Sequence[float], rungs: Sequence[str]) -> dict[str, list[float]]:
    """Scores by difficulty, in order of appearance."""
    return {
        rung: [s for s, other in zip(scores, rungs, strict=True) if other == rung]
        for rung in dict.fromkeys(rungs)
    }


def accuracy_table(run: Run) -> list[str]:
    """Every row at its rate."""
    measures = run.study.measures
    body = [
        [
            "guessing",
            "",
            "",
            "",
            *("" if m.chance is None else f"{m.chance:.1f}" for m in measures.values()),
        ]
    ]
    for row, cells in run.cells.items():
        scores, rate = run.scores(row), run.rates[row]
        parameters = next(
            (facts["parameters"] for facts in run.facts(row) if "parameters" in facts), 0
        )
        texts = [
            interval_text(estimate(scores[name], m.groups), m.digits)
            for name, m in measures.items()
        ]
        known = [
            f"{parameters:,}" if parameters else "",
            f"{len(cells)}",
            f"{rate:g}" if rate else "",
        ]
        body.append([row, *known, *texts])
    return markdown_table(
        ["row", "parameters", "seeds", "rate", *(m.title for m in measures.values())], body
    )


def difference_table(run: Run, title: str) -> list[str]:
    """Intervals, verdicts, and what an undecided difference would have seen."""
    columns, body = run.study.columns, []
    for row, controls in run.study.beside[title].items():
        texts = []
        for name, measure in columns.items():
            gap, digits = run.tables[title][row, name], measure.digits
            seen = (
                f" (±{gap['visible']:.{digits}f} is visible)"
                if gap["verdict"] == "undecided"
                else ""
            )
            texts.append(f"{interval_text(gap, digits, signed=True)} {gap['verdict']}{seen}")
        body.append([row, controls[0] if len(controls) == 1 else f"{len(controls)} rows", *texts])
    return markdown_table(["row", "beside", *(measure.title for measure in columns.values())], body)


def rung_table(run: Run, name: str) -> list[str]:
    """The score of each row by difficulty; without rows for a measure that has one."""
    measure, body = run.study.measures[name], []
    for row in run.cells if measure.rungs else ():
        parts = by_rung(run.scores(row)[name].mean(0), measure.rungs)
        body.append([row, *(f"{np.mean(part):.{measure.digits}f}" for part in parts.values())])
    return markdown_table(["row", *dict.fromkeys(measure.rungs)], body)


def range_table(run: Run) -> list[str]:
    """How far the controls of the first table are from guessing and from 100 % on the validation
    split."""
    beside, body = next(iter(run.study.beside.values()), {}), []
    controls = list(dict.fromkeys(row for rows in beside.values() for row in rows))
    usable, validation = (
        run.in_range(controls),
        [run.validation(run.cells[row][:TUNING_SEEDS]) for row in controls],
    )
    for name, measure in run.study.measures.items():
        if controls and measure.is_share and name in validation[0]:
            shares = [100 * share_of_range(scores[name], measure.chance) for scores in validation]
            share = f"{min(shares):.0f} to {max(shares):.0f}"
            body.append(
                [
                    measure.title,
                    f"{measure.chance or 0.0:.1f}",
                    share,
                    "yes" if name in usable else "no",
                ]
            )
    return markdown_table(
        ["measure", "guessing, %", "controls, % of the way to 100", "counts"], body
    )


def rate_table(run: Run) -> list[str]:
    """What the rates were chosen by, on the validation split; more is better."""
    body = []
    for row, tried in run.tried.items():
        scores = ", ".join(f"{rate:g}: {score:.4g}" for rate, score in tried.items())
        is_at_edge = len(tried) > 1 and run.rates[row] in (min(tried), max(tried))
        body.append([row, f"{run.rates[row]:g}", scores, "at the edge" * is_at_edge])
    return markdown_table(["row", "rate", "score by rate", ""], body)


def prediction_table(run: Run) -> list[str]:
    """What was predicted beside the verdicts of the first table."""
    judged, body = next(iter(run.tables.values()), {}), []
    for row, measure, verdict, reason in run.study.predictions:
        if (row, measure) in judged:
            body.append([row, measure, verdict, judged[row, measure]["verdict"], reason])
    return markdown_table(["row", "measure", "predicted", "found", "reason given before"], body)


def sections(run: Run, heading: str = "##") -> list:
    """The tables that have lines, below their headings."""
    tables = {"Scores": accuracy_table(run)}
    tables |= {f"Minus {title}": difference_table(run, title) for title in run.tables}
    tables |= {measure.title: rung_table(run, name) for name, measure in run.study.measures.items()}
    tables |= {
        "Range": range_table(run),
        "Rates": rate_table(run),
        "Predictions": prediction_table(run),
    }
    return [
        block
        for title, lines in tables.items()
        if len(lines) > 2
        for block in (f"{heading} {title}", lines)
    ]


def write(run: Run) -> str:
    """Write comparison.md, comparison.json and comparison.csv; returns the first."""
    blocks = [f"# {run.study.title}", ABOUT, *sections(run), *run.study.more(run)]
    everything = [cell for part in (run, *run.parts) for cell in part.used.values()]
    made_by = sorted(
        {
            f"commit {cell['commit']}, {cell['processor']}, PyTorch {cell['torch']}"
            for cell in everything
        }
    )
    seconds = round(sum(cell["cpu_seconds"] for cell in everything))
    limits = [f"- {run.seeds} seed(s): fewer than {FEWEST_SEEDS} decide nothing."] * (
        run.seeds < FEWEST_SEEDS
    )
    cells = [
        cell for of_row in run.cells.values() for cell in of_row if "diverged" in cell["facts"]
    ]
    limits += [
        f"- {cell['row']}, seed {cell['seed']}: {cell['facts']['diverged']}" for cell in cells
    ]
    blocks += ["## Limits", limits] if limits else []
    blocks.append(
        f"Cells were made by {'; '.join(made_by)}: {seconds:,} CPU seconds, {run.seeds} seed(s)."
    )
    text = (
        "\n\n".join(block if isinstance(block, str) else "\n".join(block) for block in blocks)
        + "\n"
    )
    summary = {
        "made_by": made_by,
        "cpu_seconds": seconds,
        "seeds": run.seeds,
        "rates": {
            row: {"chosen": run.rates[row], "tried": run.tried.get(row, {})} for row in run.cells
        },
        "rows": {
            row: {"facts": [cell["facts"] for cell in of_row]} for row, of_row in run.cells.items()
        },
        "tables": {
            title: [{"row": row, "measure": name, **gap} for (row, name), gap in table.items()]
            for title, table in run.tables.items()
        },
    }
    csv.writer(table_of_cells := io.StringIO(), lineterminator="\n").writerows(
        [COLUMNS, *lines_of(run)]
    )
    write_text(run.out / "comparison.csv", table_of_cells.getvalue())
    write_text(run.out / "comparison.md", text)
    write_text(run.out / "comparison.json", json.dumps(summary, indent=1) + "\n")
    return text
