"""The rows of the Q-Mamba study and the tables of the paper that they make, on the embedded scenes and as published.

In: cells of `train/studies/qmamba.py`, which trains the rows. Out: judged differences, comparison.md, rows.png,
differences.png.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from PIL import Image

from eval.report import markdown_table
from eval.statistics import Estimate
from model.config import PRESETS
from train.studies import attention_runs, engine, rules
from train.studies.attention_data import Measure
from train.studies.attention_report import judged, prediction_table
from train.studies.attention_runs import OVERALL, Scores, gain
from train.studies.engine import spell
from train.studies.rules import Prediction

# a transformer that, with its projector, has as many parameters as row `local` of the embedded scenes
CONTROL = replace(PRESETS["tiny"], text=replace(PRESETS["tiny"].text, num_hidden_layers=2, intermediate_size=496))
ORDERS = ("forward", "backward")  # single scan directions in which a trained row is evaluated once more


@dataclass(frozen=True)
class ProjectorRow:
    """A trained model. changes: of the projector's configuration. connector: the row whose trained connector it starts
    from. orders: whether it is asked in single scan directions too."""

    changes: Mapping[str, object] = field(default_factory=dict)
    connector: str | None = None
    orders: bool = False
    is_transformer: bool = False


@dataclass(frozen=True)
class Table:
    """What the paper reports, and rows with the row that each is compared with."""

    published: str
    rows: Mapping[str, str | None]


_CONNECTOR = ProjectorRow({"projector": "connector"})

SCENES: dict[str, ProjectorRow] = {
    "local": ProjectorRow(),
    "global": ProjectorRow({"local_attention": False}),
    "4 queries": ProjectorRow({"queries": 4}),
    "16 queries": ProjectorRow({"queries": 16}),
    "connector": _CONNECTOR,
    "trained connector": ProjectorRow(connector="connector", orders=True),
    "transformer": ProjectorRow(is_transformer=True),
}
# The paper's rows of Tables 2 and 4 start from a trained connector, too. Its 729 queries are all features.
PAPER: dict[str, ProjectorRow] = {
    "connector": _CONNECTOR,
    "local": ProjectorRow(connector="connector"),
    "global": ProjectorRow({"local_attention": False}, "connector"),
    "from scratch": ProjectorRow(),
    "all queries": ProjectorRow({"queries": "all"}, "connector", orders=True),
    "half the queries": ProjectorRow({"queries": "half"}, "connector"),
    "linear": ProjectorRow({"projector": "linear"}),
}


def _orders(row: str) -> dict[str, str | None]:
    return {row: None, **{f"{row}, {order}": row for order in ORDERS}}


_TABLE_1, _TABLE_2 = "Table 1: the number of queries", "Table 2: who may see whom"
_TABLE_3, _TABLE_4 = "Table 3: the connector's weights", "Table 4: the order in which a trained connector reads"
_WITHOUT, _QUERIES = "Table 1: projectors without queries", f"{_TABLE_1}, of 16 features"
_MORE, _SCORES = "The paper: more queries do better, with falling returns.", "VQAv2, GQA, VizWiz, TextVQA, POPE"
_LOCAL = "75.01, 58.10, 50.53, 48.8, 86.9"
_READ = "The paper: trained in both directions, reading forward alone does not harm, and can help."

SCENE_TABLES = {
    _TABLE_2: Table("The paper: global 73.12, local 75.01 on VQAv2.", {"global": "local", "local": None}),
    _QUERIES: Table(_MORE, {"4 queries": "local", "local": None, "16 queries": "local"}),
    _TABLE_3: Table(
        "The paper: from scratch 74.22, from a trained VL-Mamba 75.01 on VQAv2.",
        {"local": None, "trained connector": "local"},
    ),
    _TABLE_4: Table(_READ, _orders("trained connector")),
    f"{_WITHOUT}, of 16 features each": Table("", {"local": None, "connector": "local", "transformer": "local"}),
}
QUICK_TABLES = {title: SCENE_TABLES[title] for title in (_TABLE_2, _QUERIES)}  # of --quick, with its
QUICK_SCALE = 0.5  # share of the training
PAPER_TABLES = {
    _TABLE_1: Table(_MORE, {"half the queries": "local", "local": None, "all queries": "local"}),
    _WITHOUT: Table("", {"local": None, "connector": "local", "linear": "local"}),
    _TABLE_2: Table(
        f"The paper ({_SCORES}): global 73.12, 52.87, 49.09, 44.0, 85.1; local {_LOCAL}.",
        {"global": "local", "local": None},
    ),
    _TABLE_3: Table(
        f"The paper ({_SCORES}): from scratch 74.22, 56.30, 53.12, 48.0, 86.4; from a trained VL-Mamba {_LOCAL}.",
        {"from scratch": None, "local": "from scratch"},
    ),
    _TABLE_4: Table(_READ, _orders("all queries")),
}

# of the mean, before the study was run by these rules; an earlier run of three seeds had seen no gain of the paper's
PREDICTIONS = (
    Prediction("global", "mean", "worse", "the paper's Table 2"),
    Prediction("4 queries", "mean", "worse", "the paper's Table 1: fewer queries are worse"),
    Prediction("16 queries", "mean", "better", "the paper's Table 1; the earlier run had them worse"),
    Prediction("trained connector", "mean", "better", "the paper's Table 3"),
    Prediction("trained connector, forward", "mean", "equivalent", "the paper's Table 4: no harm"),
    Prediction("transformer", "mean", "better", "its attention sees all features in each layer"),
)

PUBLISHED = (
    ("Table 1: other Mamba models on six benchmarks", "missing: needs their weights"),
    ("Table 1: 128 to 729 queries", "4, 8 and 16 of 16 features of the scenes; elsewhere half as many, as given, all"),
    ("Table 1: seconds of a fine-tuning step", "in all tables, stage 2, on this machine"),
    ("Tables 2 and 3", "as published; the connector is trained here, as row `connector`, or given"),
    ("Table 4", "as published: trained in both directions, read in one"),
    ("GQA, VizWiz, TextVQA, POPE, MMBench", "not asked here: give the models' folders to those benchmarks"),
)


def scores_of(measures: Sequence[Measure], found: Mapping[str, Sequence[dict]]) -> dict[str, Scores]:
    """The answers of each row, in percent; "mean" is all of them."""
    by_row = {name: attention_runs.collect(cells) for name, cells in found.items()}
    every = [one.name for one in measures]
    return {
        name: {"mean": np.concatenate([scores[task] for task in every], axis=1), **scores}
        for name, scores in by_row.items()
    }


def table_gains(
    measures: Sequence[Measure], table: Table, scores: Mapping[str, Scores]
) -> dict[tuple[str, str], Estimate]:
    """The differences of a table in the mean of all questions."""
    pairs = [(name, other) for name, other in table.rows.items() if other is not None]
    return {pair: gain(*(scores[name] for name in pair), OVERALL, measures) for pair in pairs}


def judge_tables(
    measures: Sequence[Measure], tables: Mapping[str, Table], scores: Mapping[str, Scores], chance: Mapping[str, float]
) -> dict[str, dict]:
    """By pair of rows and measure, the difference and its verdict: of the mean of all questions by table, of tasks over
    all tables. Tasks that a row gains and loses add up to nothing in the mean."""
    differences, by_task, measurable, seeds = {}, {}, {}, {}
    for table in tables.values():
        gains = table_gains(measures, table, scores)
        inside = {pair: rules.is_inside(scores[pair[1]]["mean"].mean(), chance.get("mean", 0.0)) for pair in gains}
        runs = {pair: min(len(scores[name]["mean"]) for name in pair) for pair in gains}
        judged = rules.judge(gains, inside, seeds=runs)
        for pair in gains:
            differences[pair] = {"mean": engine.verdict(gains[pair]) | judged[pair] | {"seeds": runs[pair]}}
            for task in (m.name for m in measures):
                by_task[pair, task] = gain(*(scores[name] for name in pair), task, measures)
                seeds[pair, task] = runs[pair]
                control = scores[pair[1]][task].mean()
                measurable[pair, task] = rules.is_inside(control, chance.get(task, 0.0))
    for (pair, task), one in rules.judge(by_task, measurable, seeds=seeds).items():
        differences[pair][task] = engine.verdict(by_task[pair, task]) | one
    return {" - ".join(pair): of_pair for pair, of_pair in differences.items()}


def task_table(summary: dict) -> list[str]:
    """Each pair of rows by task."""
    tasks = list(summary["questions"])
    body = [[pair, *(judged(of_pair[task]) for task in tasks)] for pair, of_pair in summary["differences"].items()]
    return markdown_table(["pair", *tasks], body) if len(tasks) > 1 else []


def to_markdown(summary: dict) -> str:
    """comparison.md."""
    tasks, chance = summary["questions"], summary["chance"]
    measures = ["mean", *tasks] if len(tasks) > 1 else list(tasks)
    data = [f"{samples:,} samples of {summary['data'][stage]}" for stage, samples in summary["samples"].items()]
    learned = ", then ".join(data or summary["data"].values())
    blocks = [
        f"Up to {len(summary['seeds'])} seed(s); trained on {learned}; {sum(tasks.values()):,} questions held out, "
        "answers in %, and in brackets 95 % bootstrap intervals over seeds and pictures. A difference is in percentage "
        f"points, on the same examples and seeds, with an interval by Student's t. {rules.VERDICTS} In brackets behind "
        "it: the true difference that 80 % of such studies would have seen."
        + " Guess: the likeliest answer to the question, without a picture."
        * bool(chance)
    ]
    for title, table in summary["tables"].items():
        body = [["guess", "", "", "", *(f"{chance[measure]:.1f}" for measure in measures), ""]] if chance else []
        for name, other in table["rows"].items():
            row = summary["rows"][name]
            first, *others = measures
            cells = [spell(row["test"][first]), *(f"{row['test'][task]['mean']:.1f}" for task in others)]
            gain = spell_gain(summary["differences"][f"{name} - {other}"]["mean"], other) if other else ""
            seconds = "" if row["seconds_a_step"] is None else f"{row['seconds_a_step']:.2g}"
            body.append(
                [name, f"{row['trainable']:,}", str(len(row["test"]["mean"]["by_seed"])), seconds, *cells, gain]
            )
        head = ["row", "parameters", "seeds", "s a step", *measures, "difference of the mean"]
        blocks += [f"## {title}", table["published"], markdown_table(head, body)]
    pairs = [[pair, spell_gain(of["mean"])] for pair, of in summary["common"].items()]
    blocks += engine.sections(
        ("By task, points", task_table(summary)),
        (
            "All rows at the rates of the first",
            markdown_table(["pair", "difference of the mean"], pairs) if pairs else [],
        ),
        ("Factor of the rates of both stages, and % right on validation scenes", rate_table(summary["rates"])),
    )
    if summary["predictions"]:
        blocks += ["## Predictions", prediction_table(summary["predictions"])]
    models = [
        f"- {name}: {', '.join(row['models'])}"
        for name, row in summary["rows"].items()
        if row["models"] and ", " not in name
    ]
    blocks += ["## Models, for other benchmarks", models]
    return engine.compose(summary["title"], *blocks, conclusions=conclusions(summary), published=PUBLISHED)


def rate_table(rates: Mapping[str, Mapping]) -> list[str]:
    """The factors that were tried for each row, and the one that it has."""
    body = [
        [name, f"{one['factor']:g}", ", ".join(f"{factor}: {value:.1f}" for factor, value in one["validation"].items())]
        for name, one in rates.items()
    ]
    return markdown_table(["row", "factor", "by factor"], body) if body else []


def spell_gain(one: Mapping, other: str = "") -> str:
    """A judged difference, to the row `other`."""
    return f"{judged(one)}{f', beside {other}' * bool(other)} (±{one['visible']:.1f})"


def conclusions(summary: dict) -> list[str]:
    """The differences in words, and what limits them."""
    sentences = [
        f"{pair.replace(' - ', ' against ')}: {judged(of['mean'])}, {of['mean']['seeds']} seeds."
        for pair, of in summary["differences"].items()
    ]
    fewest = min((of["mean"]["seeds"] for of in summary["differences"].values()), default=len(summary["seeds"]))
    sentences += rules.limits(fewest, summary["edges"])
    if summary["language"]:
        sentences.append(
            "Asked about scenes in words, before they saw a picture, the embedded Mamba had {Mamba:.1f} % of the "
            "answers' tokens right, the transformer, of {scenes:,} of them, {transformer:.1f} %.".format(
                **summary["language"]
            )
        )
    guess = summary["chance"].get("mean")
    for name, row in summary["rows"].items():
        if guess is not None and row["test"]["mean"]["low"] <= guess:
            sentences.append(f"{name} cannot be told from guessing without a picture ({guess:.1f} %).")
    if summary["scale"] < 1:
        sentences.append(f"Training was {summary['scale']:g} times as long as in the whole study.")
    if not summary["rates"]:
        sentences.append(
            "All rows share the rates of the stages; those of the embedded models were found on row `local`."
        )
    return sentences


def draw(summary: dict) -> dict[str, list[Image.Image]]:
    """rows.png and differences.png."""
    rows, chance, label = summary["rows"], summary["chance"], "difference, percentage points"
    gains = {pair: of["mean"] for pair, of in summary["differences"].items()}
    return {
        "rows.png": [
            engine.chart(
                {name: row["test"][measure] for name, row in rows.items()},
                "all questions" if measure == "mean" else measure,
                "answers, %",
                ("guess without a picture", chance[measure]) if chance else None,
            )
            for measure in ("mean", *summary["questions"])
        ],
        "differences.png": [engine.chart(gains, "all questions", label, ("no difference", 0.0))],
    }
