"""Why a row of the attention study is better or worse than its control: a part of the study's report.

In: the finished cells of all rows, whose adapters are opened again. Out: the measures of
`train/studies/attention_maps.py` before and after training, a JSON file in the folder of each cell; tables with
intervals over seeds; and whether the HYPOTHESES hold.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eval import scenes
from eval.report import markdown_table
from eval.statistics import Estimate, estimate, holm
from lora import adapter
from model.differential import variants_of
from model.paligemma import PaliGemma
from train.studies import engine
from train.studies.attention_maps import KEYS, TESTS, ask, find_needles, measure_layers, second_map_left
from train.studies.attention_runs import RowResult
from train.studies.cells import FineTuningStudy, cell_file, open_finished
from train.systems.open import load_base, open_model

MECHANISM = 1  # the version of the measures: raise it to compute them again
LEFT = ("0", "0.25", "0.5", "1")  # parts of the second map that are left in a trained model
# What could explain a row that loses: each a number that is above 0 where it holds
HYPOTHESES = {
    "noise": "without its second map a trained model finds more needles, points",
    "cancels": "of what is on objects, more is on the needle than in its first map, points, from the name",
    "copies": "the updates of both branches resemble each other, cosine",
    "amplifies": "q and k are changed more than the control's, beside the other weights: times, minus 1",
    "learns less": "the loss of the last fifth of training is above the control's, nats a token",
    "moves less": "the other weights are changed less than the control's, % of its ‖ΔW‖/‖W‖",
}
LOOKS = (*(f"answer on {key}" for key in KEYS), "name on needle", "name on distractors", "negative")
FORMS = ("entropy", "rank", "cosine", "cka", "sum", "distance")
MOVES = ("update", "second update", "update cosine", "whole update", "other update")


class Measured(NamedTuple):
    """The measures of a row before training, and of the cells of its seeds."""

    before: dict
    after: list[dict]


def find(study: FineTuningStudy, results: Sequence[RowResult]) -> dict | None:
    """The part of comparison.json; None without embedded scenes, in which alone it is known where needles are."""
    if not study.base.is_embedded:
        return None
    kinds = tuple(m.name for m in study.measures["test"] if m.name[:1] == "n") or ("n4o1",)
    controls = {one.row.name: one.control.row.name for one in results if one.control}
    return {"kinds": kinds, "rows": summarize(measure_rows(study, results, kinds), controls)}


# Cells


def measure_rows(study: FineTuningStudy, results: Sequence[RowResult], kinds: Sequence[str]) -> dict[str, Measured]:
    """Every row with trained adapters, by name. What is there is not computed again."""
    device = study.world.device

    def finish(folder: Path, title: str, open_one: Callable[[], PaliGemma], run: Path | None = None) -> dict:
        file = folder / f"mechanism-{engine.digest(MECHANISM, TESTS, kinds)}.json"

        def work(_: Path) -> dict:
            found = measure_model(open_one().eval(), {kind: ask(kind, study.processor, device) for kind in kinds})
            return found | (training_of(run) if run else {})

        return engine.finish_cell(file, f"{title}, mechanism", work, lambda cell: f"{cell['cpu_seconds']} CPU seconds")

    def before(result: RowResult) -> dict:
        settings = replace(result.settings, seed=0)
        if not settings.is_grafted:
            folder = engine.cell_folder(study.out, "mechanism", study.fingerprint)
            return finish(folder, "before training", lambda: load_base(study.base, device))
        folder = engine.cell_folder(study.out, "mechanism", study.fingerprint, engine.deciding(settings))
        return finish(folder, f"{result.row.name}, before training", lambda: open_model(settings, device)[0])

    rows = {}
    for result in [one for one in results if one.row.is_trained]:
        after = []
        for seed in range(result.seeds):
            own = cell_file(study, result.row, result.settings.lr, seed, "test").parent
            run = result.row.finished or own
            if (run / adapter.CONFIG_FILE).exists():  # a run that has diverged has none
                opened = partial(open_finished, result.settings, run, study)
                after.append({"seed": seed} | finish(own, f"{result.row.name}, seed {seed}", opened, run))
        if after:
            rows[result.row.name] = Measured(before(result), after)
    return rows


def measure_model(model: PaliGemma, asked: Mapping) -> dict:
    """{"layers": measures of each, on the kind with the most places; "found": needles by part of the second map}."""
    found = {}
    for left in LEFT if variants_of(model) else LEFT[-1:]:
        with second_map_left(model, float(left)):
            found[left] = {kind: find_needles(model, one) for kind, one in asked.items()}
    return {"layers": measure_layers(model, asked[hardest(list(asked))]), "found": found}


def hardest(kinds: Sequence[str]) -> str:
    return max(kinds, key=scenes.layout_of)


def training_of(run: Path) -> dict:
    """{"loss": mean of the last fifth of a run's steps, "weights": mean weight of the second map at logged steps}."""
    if not (file := run / "metrics.jsonl").exists():
        return {}
    records = [json.loads(line) for line in file.read_text().splitlines()]
    last = [record["loss"] for record in records[-max(1, len(records) // 5) :]]
    logged = {r["step"]: float(np.mean(np.hstack(list(r["lambda"].values())))) for r in records if "lambda" in r}
    return {"loss": float(np.mean(last)), "weights": logged}


# Numbers


def summarize(measured: Mapping[str, Measured], controls: Mapping[str, str]) -> dict[str, dict]:
    """By row: means over layers, and by layer, before and after; needles found; the hypotheses."""
    rows = {name: summarize_row(row) for name, row in measured.items()}
    numbers = {
        (name, hypothesis): one
        for name, row in measured.items()
        for hypothesis, one in weigh(row, measured.get(controls.get(name, ""))).items()
    }
    # one seed, or one that a control has too, says nothing
    several = {place: one for place, one in numbers.items() if rows[place[0]]["seeds"] > 1 and one.error > 0}
    p_values = dict(zip(several, holm([one.p for one in several.values()]), strict=True))
    for (name, hypothesis), one in numbers.items():
        p = p_values.get((name, hypothesis), 1.0)
        verdict = "open" if p >= 0.05 else "yes" if one.mean > 0 else "no"
        rows[name]["hypotheses"][hypothesis] = one._asdict() | {"p": p, "verdict": verdict}
    return rows


def summarize_row(row: Measured) -> dict:
    names = [list(layer) for layer in row.after[0]["layers"]]
    return {
        "seeds": len(row.after),
        "before": row.before["layers"],
        "by_layer": [
            {name: float(np.mean([cell["layers"][number][name] for cell in row.after])) for name in of_layer}
            for number, of_layer in enumerate(names)
        ],
        "after": {name: estimate([mean_of(cell, name) for cell in row.after])._asdict() for name in names[0]},
        "found": {left: estimate(100 * hits(row, left))._asdict() for left in row.after[0]["found"]},
        "weights": row.after[0].get("weights", {}),
        "hypotheses": {},
    }


def hits(row: Measured, left: str) -> np.ndarray:
    """(seeds, tests of all kinds), 0 or 1."""
    return np.array([sum(cell["found"][left].values(), []) for cell in row.after])


def mean_of(cell: Mapping, name: str) -> float:
    """A measure of a cell, the mean over its layers."""
    return float(np.mean([layer[name] for layer in cell["layers"]]))


def on_needle(cell: Mapping, of_map: str = "") -> float:
    """Of the attention from the name on objects, in percent what is on the needle."""
    needle, others = (mean_of(cell, f"{of_map}name on {key}") for key in KEYS[:2])
    return 100 * needle / (needle + others)


def weigh(row: Measured, control: Measured | None) -> dict[str, Estimate]:
    """The number of each hypothesis that can be asked of a row, over its seeds, paired with the control's."""
    found, layer = {}, row.after[0]["layers"][0]
    if "0" in row.after[0]["found"]:
        found["noise"] = 100 * (hits(row, "0") - hits(row, "1"))
    if "A1 name on needle" in layer:
        found["cancels"] = [on_needle(cell) - on_needle(cell, "A1 ") for cell in row.after]
    if "update cosine" in layer:
        found["copies"] = [mean_of(cell, "update cosine") for cell in row.after]
    theirs = {cell["seed"]: cell for cell in control.after} if control else {}
    pairs = [(cell, theirs[cell["seed"]]) for cell in row.after if cell["seed"] in theirs]
    if pairs and all(mean_of(cell, name) for pair in pairs for cell in pair for name in ("update", "other update")):

        def ratios(measure: Callable[[dict], float]) -> np.ndarray:
            return np.array([measure(own) / measure(other) for own, other in pairs])

        found["amplifies"] = ratios(lambda cell: mean_of(cell, "whole update") / mean_of(cell, "other update")) - 1
        found["moves less"] = 100 - 100 * ratios(lambda cell: mean_of(cell, "other update"))
    if pairs and all("loss" in cell for pair in pairs for cell in pair):
        found["learns less"] = [own["loss"] - other["loss"] for own, other in pairs]
    return {name: estimate(values) for name, values in found.items()}


# Markdown


def spell(one: Mapping[str, float] | float | None, digits: int = 1, factor: float = 1) -> str:
    """`12.3 ± 0.4`: an interval of Student's t is symmetric."""
    if one is None:
        return ""
    parts = (one,) if isinstance(one, float) else (one["mean"], one["high"] - one["mean"])
    return " ± ".join(f"{factor * part:.{digits}f}" for part in parts)


def change(row: Mapping, name: str) -> str:
    """A measure before → after training."""
    if name not in row["after"]:
        return ""
    return f"{mean_of({'layers': row['before']}, name):.2f} → {spell(row['after'][name], 2)}"


def judged(row: Mapping, name: str) -> str:
    """The number of a hypothesis, and whether it holds."""
    one = row["hypotheses"].get(name)
    return f"{spell(one, 2)} {one['verdict']}" if one else ""


def weights_of(row: Mapping) -> dict[str, str]:
    """By layer, and by step where it was logged."""
    layers = enumerate(zip(row["before"], row["by_layer"], strict=True), 1)
    found = {f"layer {number}": f"{a['weight']:.2f} → {b['weight']:.2f}" for number, (a, b) in layers}
    return found | {"by step": ", ".join(f"{step}: {value:.2f}" for step, value in row["weights"].items())}


def looks_of(rows: Mapping[str, Mapping]) -> dict[str, dict]:
    """The shares of LOOKS before training, and of each row's effective map, and A₁ and A₂ of two."""
    before = next((row["before"] for row in rows.values() if "A1 name on needle" not in row["before"][0]), None)
    found: dict[str, dict] = {"before": {name: mean_of({"layers": before}, name) for name in LOOKS}} if before else {}
    for name, row in rows.items():
        for which in ("", "A1 ", "A2 "):
            if f"{which}name on needle" in row["after"]:
                found[f"{name}, {which}".strip(", ")] = {key: row["after"].get(which + key) for key in LOOKS}
    return found


def to_markdown(summary: Mapping | None) -> list:
    """The blocks of comparison.md."""
    if not summary or not summary["rows"]:
        return []
    rows: Mapping[str, Mapping] = summary["rows"]
    weights = {name: weights_of(row) for name, row in rows.items() if "weight" in row["after"]}
    tables = (  # title, columns, rows, and what is in a cell
        (
            "Where the effective map, and each of two, looks, %",
            LOOKS,
            looks_of(rows),
            lambda r, c: spell(r[c], factor=100),
        ),
        ("Maps and heads, before → after", FORMS, rows, change),
        ("Updates", MOVES, rows, lambda row, column: spell(row["after"].get(column), 3)),
        ("Weight of the second map, before → after", [*next(iter(weights.values()), ())], weights, lambda r, c: r[c]),
        (
            "Needles found with a part of the second map, %",
            LEFT,
            {name: row for name, row in rows.items() if len(row["found"]) > 1},
            lambda row, column: spell(row["found"][column]),
        ),
        ("What explains it", tuple(HYPOTHESES), {n: row for n, row in rows.items() if row["hypotheses"]}, judged),
    )
    blocks: list = [
        "## Mechanism",
        f"Of needles {hardest(summary['kinds'])} in the test split, those found of {', '.join(summary['kinds'])}; "
        "train/studies/attention_maps.py defines all measures. Means over layers, heads, questions and seeds, ± half "
        "of the 95 % interval over seeds. What could explain a difference, each a number above 0 where it holds (Holm "
        f"over the table): {'; '.join(f'{name}: {meaning}' for name, meaning in HYPOTHESES.items())}.",
    ]
    for title, columns, of_table, cell in tables:
        if of_table:
            body = [[name, *(cell(row, column) for column in columns)] for name, row in of_table.items()]
            blocks += [f"### {title}", markdown_table(["row", *columns], body)]
    return blocks
