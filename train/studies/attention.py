"""Compare: is an attention variant better than plain LoRA with as many parameters, beyond chance?

    python -m train.compare                                  every variant, on the embedded base and scenes
    python -m train.compare --rows paper                     the five models of the paper's Table 1
    python -m train.compare --base google/paligemma-3b-pt-224 --data vqav2:DIR --coco DIR --captions FILE --rows twin

In: a base, data, and rows (what is trained). Out: comparison.md, comparison.json, figure2.png and differences.png: the
paper's Table 1 (VQA), Table 2 (needle) and Figure 2 (needle by place), with 95 % intervals. Every other flag is one of
`train.finetune` and holds for all rows. Next: nothing; these are the results.

What makes a difference believable, and is done for every row:
- A control: plain LoRA of the smallest rank that has at least as many trainable parameters. Rows may share one.
- Its own learning rate, of a few, chosen on the first seed by the *validation* split. The test split is asked only
  about the chosen ones.
- Several seeds, the same for a row and its control, and intervals of the difference on the same examples, over seeds
  and pictures.

A cell is one row, rate and seed. It lies in a folder named by a hash of all that decides it (settings, weights of the
base, data, version), so an interrupted comparison goes on, and a changed one does again only what has changed.
"""

import argparse
import dataclasses
import importlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from math import nan
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from eval import figures, needle, vqa
from eval.datasets import Annotation, Question
from eval.session import positive
from eval.statistics import Interval, bootstrap
from lora import adapter
from model.common import UserError, write_text
from model.paligemma import PaliGemma
from model.processor import Processor
from train.data import records as data
from train.data.records import Record
from train.data.sources import read_records
from train.distributed import World, join_world
from train.loop import Diverged
from train.optim import count, trainable
from train.recipes import RECIPES
from train.settings import Settings, parse
from train.signals import same_command_goes_on
from train.studies.cells import digest
from train.supervised import train_on
from train.systems.open import load_base, open_model
from weights.checkpoint import empty_model

VERSION = 1  # of the code that decides a cell's result: raise it, and all cells are done again

SAMPLES = 4_000  # of a run on the embedded scenes
# Needle tests of 2×2 with one object each saturate near 100 %. Harder: two objects, each shared with others; and 4×4.
# They are learned from all the same: without them the wording of two objects is learned far more slowly.
NEEDLES = {"n2o2": "2×2, two objects each", "n4o1": "4×4, one object each"}
TASKS = ("vqa", "n2o1", *NEEDLES)  # what is learned from the embedded scenes, each as often as another
PLAIN = {"attention": "softmax", "feed_forward": "mlp", "option": ()}

# ---------------------------------------------------------------------------------------------------------------------
# What is compared
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measure:
    """One column: examples with their truth, and how a model's answers to them are graded, each 0..1.

    `pictures` and `labels` (answer type, or place as (row, column)) are by example; `chance` is in percent, None where
    it is not known.
    """

    name: str
    title: str
    examples: list
    pictures: list[str]
    labels: list
    chance: float | None
    grade: Callable[[PaliGemma, Processor, Settings], list[float]]


@dataclass(frozen=True)
class Bench:
    """What all cells share. `base` are the plain settings; `measures` are by split, validation and test, VQA first."""

    base: Settings
    out: Path
    world: World
    processor: Processor
    fingerprint: str
    measures: dict[str, list[Measure]]
    protocol: str = "paper"


def open_base(settings: Settings, folder: Path, bench: Bench) -> PaliGemma:
    """The base, nothing of it trained."""
    return load_base(settings, bench.world.device).requires_grad_(False)


def fine_tune(settings: Settings, folder: Path, bench: Bench) -> PaliGemma:
    """The base with the adapter in `folder`, which is trained there if it is not there yet."""
    if (folder / adapter.CONFIG_FILE).exists():
        model = load_base(settings, bench.world.device)
        adapter.load(model, folder)
        return model
    model, optimizer = open_model(settings, bench.world.device)
    records, _ = training_records(bench, settings)
    train_on(records, model, optimizer, bench.processor, settings, folder, bench.world)
    adapter.save(model, folder, base=settings.base)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return model


@dataclass(frozen=True)
class Row:
    """One line of the tables: changes of the base settings, and `run`, which trains or opens the model of a cell in a
    folder of its own. `published`: the paper's VQAv2 score."""

    name: str
    changes: dict = field(default_factory=dict)
    run: Callable[[Settings, Path, Bench], PaliGemma] = fine_tune
    published: float | None = None

    @property
    def is_trained(self) -> bool:
        return self.run is not open_base

    def needs_control(self, settings: Settings) -> bool:
        """Whether it is anything but plain LoRA."""
        plain = replace(settings, **PLAIN) == settings
        return self.is_trained and not (plain and self.run is fine_tune)


# What `--rows` takes, besides the names of rows. A new experiment is an entry here.
GROUPS: dict[str, tuple[Row, ...]] = {
    "attention": (
        Row("baseline", run=open_base),
        Row("fine-tuned"),
        Row("shared", {"attention": "shared"}),
        Row("split", {"attention": "split"}),
        Row("split-fresh", {"attention": "split", "option": ('rope_pairs="fresh"',)}),
        Row("twin", {"attention": "twin"}),
        Row("v2", {"attention": "v2"}),
        Row("dex", {"attention": "dex"}),
    ),
    "feed-forward": (Row("swiglu", {"feed_forward": "swiglu"}), Row("swiglu-new", {"feed_forward": "swiglu-new"})),
    "paper": tuple(
        Row(f"paper-{number}", RECIPES[f"paper-{number}"], published=score)
        for number, score in enumerate((53.21, 51.91, 35.72, 33.91, 41.32), start=1)
    ),
}


# What `--rows` takes alone: comparisons of other systems, each a module with a `main` and flags of its own.
STUDIES = {"wings": "train.studies.wings", "qmamba": "train.studies.qmamba", "text": "train.studies.text"}


def pick_rows(names: str) -> list[Row]:
    """The rows that `--rows` names, comma-separated, each once. Raises UserError for an unknown name."""
    by_name = {row.name: row for rows in GROUPS.values() for row in rows}
    picked = {}
    for name in names.split(","):
        if name not in GROUPS and name not in by_name:
            raise UserError(f"--rows {name}: choose of {', '.join([*GROUPS, *by_name])}")
        picked |= {row.name: row for row in GROUPS.get(name, (by_name.get(name),))}
    return list(picked.values())


# ---------------------------------------------------------------------------------------------------------------------
# What is asked
# ---------------------------------------------------------------------------------------------------------------------

VAL_FILES = tuple(name.replace("train2014", "val2014") for name in (data.QUESTIONS_FILE, data.ANNOTATIONS_FILE))


def vqa_measure(settings: Settings, split: str, limit: int) -> Measure:
    """VQA by the official scorer. On the embedded scenes their split. On disk the pictures held out from training, one
    half for each split; but where VQAv2's val2014 files lie beside, the test split is theirs."""
    kind, _, path = settings.data.partition(":")
    folder, chance = Path(path), None
    if settings.data == "embedded":
        benchmark, template = vqa.embedded(limit, split), vqa.PROMPT
        benchmark = benchmark._replace(pictures={name: cache(draw) for name, draw in benchmark.pictures.items()})
        chance = vqa.blind_embedded(limit)["overall"] if split == "test" else None
    elif kind == "vqav2" and split == "test" and (folder / VAL_FILES[0]).exists():
        benchmark, template = vqa.from_files(*(folder / name for name in VAL_FILES), folder, limit), None
    else:
        held_out = read_records(settings, "validation")
        pictures = sorted({record.key for record in held_out})
        half = set(pictures[0::2] if split == "validation" else pictures[1::2])
        held_out = [record for record in held_out if record.key in half][:limit]
        if not held_out:
            raise UserError(
                f"--data {settings.data}: no pictures are left for the {split} split: raise --validation "
                f"above {settings.validation}"
            )
        if kind == "vqav2":
            files, ids = (data.QUESTIONS_FILE, data.ANNOTATIONS_FILE), {record.name for record in held_out}
            benchmark, template = vqa.from_files(*(folder / name for name in files), folder, only=ids), None
        else:
            benchmark, template = exact_match(held_out), "{question}"

    def grade(model: PaliGemma, processor: Processor, settings: Settings) -> list[float]:
        answers = vqa.answer(model, processor, benchmark, template or settings.prompt, progress=bar(settings, "VQA"))
        return list(vqa.question_accuracies(benchmark.annotations, answers).values())

    examples = list(zip(benchmark.questions, benchmark.annotations, strict=True))
    pictures = [question.image for question in benchmark.questions]
    labels = [annotation.answer_type or "all" for annotation in benchmark.annotations]
    return Measure("VQA", "VQA", examples, pictures, labels, chance, grade)


def bar(settings: Settings, name: str) -> str | None:
    """The title of a progress bar where one is worth its line: the embedded questions take seconds."""
    return None if settings.data == "embedded" else name


def exact_match(records: Sequence[Record]) -> vqa.Benchmark:
    """A user's own examples as a benchmark: the official scorer takes ten equal answers literally."""
    return vqa.Benchmark(
        [Question(r.name, r.key, r.prefix) for r in records],
        [Annotation(r.name, tuple({"answer": r.suffix, "answer_id": i} for i in range(10)), r.suffix) for r in records],
        {r.key: r.picture for r in records},
    )


def needle_measure(name: str, trials: Sequence[needle.Trial], protocol: str) -> Measure:
    """Needle tests of one kind: a test is right if all that is asked about it is."""

    def grade(model: PaliGemma, processor: Processor, settings: Settings) -> list[float]:
        answers = needle.answer(model, processor, trials, protocol, progress=bar(settings, name))
        records = [
            needle.response_record(trial.test, needle.respond(trial.test, said, protocol))
            for trial, said in zip(trials, answers, strict=True)
        ]
        return [float(needle.judge(record)[2]) for record in records]

    tests = [trial.test for trial in trials]
    pictures = [str(test.haystack) for test in tests]
    examples, places = [(protocol, test) for test in tests], [test.places[0][1:] for test in tests]
    title, chance = NEEDLES.get(name, f"MMNeedle {name}"), 100 / tests[0].side ** 2
    return Measure(name, title, examples, pictures, places, chance, grade)


def make_measures(settings: Settings, split: str, limit: int, args: argparse.Namespace) -> list[Measure]:
    """All columns of a split: `limit` VQA questions, and half as many needle tests of each kind, every place as often
    as another. On disk only the test split has needles, and only with --coco."""
    measures = [vqa_measure(settings, split, limit)]
    tests = max(1, limit // 32) * 16  # a multiple of the places of both kinds
    if settings.data == "embedded":
        for kind in NEEDLES:
            trials = [
                trial._replace(pictures=cache(trial.pictures))
                for trial in needle.embedded_trials(kind, tests, split=split)
            ]
            measures.append(needle_measure(kind, trials, args.protocol))
    elif args.coco and split == "test":
        wanted = argparse.Namespace(
            **vars(args) | {"limit": tests, "pictures": 1, "side": 2, "needles": 1, "negatives": False, "seed": 42}
        )
        for name, trials in needle.coco_trials(wanted).items():
            measures.append(needle_measure(name, trials, args.protocol))
    return measures


# ---------------------------------------------------------------------------------------------------------------------
# Cells
# ---------------------------------------------------------------------------------------------------------------------


def training_records(bench: Bench, settings: Settings) -> tuple[list[Record], str]:
    """What a cell learns from, and a hash of it.

    On the embedded scenes each seed draws its own. On disk all seeds learn from the same pictures, or what one seed
    holds out another would learn from; they differ in initialisation, order and dropout.
    """
    kept = ("base", "data", "samples", "fraction", "validation", "prompt", "answers")
    seed = settings.seed if settings.data == "embedded" else bench.base.seed
    return _training_records(Settings(seed=seed, **{name: getattr(settings, name) for name in kept}))


@lru_cache(maxsize=1)  # a seed's pictures: cells go seed by seed
def _training_records(settings: Settings) -> tuple[list[Record], str]:
    if settings.data == "embedded":
        drawn: dict[str, Callable] = {}
        records = [
            replace(record, picture=drawn.setdefault(record.key, cache(record.picture)))
            for record in data.embedded_records(TASKS, "train", settings.samples, settings.seed)
        ]
    else:
        records = read_records(settings)
    return records, digest([(record.name, record.prefix, record.suffix) for record in records])


def cell_settings(bench: Bench, row: Row, rate: float, seed: int) -> Settings:
    return replace(bench.base, **(row.changes | {"lr": rate, "seed": seed}))


def run_cell(bench: Bench, row: Row, rate: float, seed: int, split: str) -> dict:
    """{"scores": accuracy of each example by measure, "trainable", "diverged", "cpu_seconds", "file"}, from disk if it
    is there.

    A run whose loss is no longer finite answers nothing: it scores 0, and "diverged" says where.
    """
    settings = cell_settings(bench, row, rate, seed)
    learned = training_records(bench, settings)[1] if row.is_trained else ""
    key = digest(VERSION, bench.fingerprint, row.run.__qualname__, learned, dataclasses.asdict(settings))
    folder, measures = bench.out / "cells" / key, bench.measures[split]
    file = folder / f"{split}-{digest([(measure.name, measure.examples) for measure in measures])}.json"
    if file.exists():
        return json.loads(file.read_text())
    write_text(folder / "config.json", json.dumps(dataclasses.asdict(settings), indent=1) + "\n")
    started = time.process_time()
    result = {
        "scores": {measure.name: [0.0] * len(measure.examples) for measure in measures},
        "trainable": None,
        "diverged": None,
        "file": str(file.relative_to(bench.out)),
    }
    try:
        model = row.run(settings, folder, bench).eval()
        result["trainable"] = count(trainable(model).values())
        result["scores"] = {measure.name: measure.grade(model, bench.processor, settings) for measure in measures}
    except Diverged as error:
        result["diverged"] = str(error)
    result["cpu_seconds"] = round(time.process_time() - started, 2)
    write_text(file, json.dumps(result) + "\n")
    accuracies = ", ".join(f"{name} {100 * np.mean(scores):.1f} %" for name, scores in result["scores"].items())
    at = f", rate {rate:g}, seed {seed}" if row.is_trained else ""
    tqdm.write(f"{row.name}{at}: {split} {accuracies} ({result['cpu_seconds']:.0f} CPU seconds)", file=sys.stderr)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# The comparison
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Line:
    """A row's results. `validation` is the mean accuracy (0..1) over measures by rate, `scores` (seeds, examples)."""

    row: Row
    settings: Settings  # of the first seed, at the chosen rate
    trainable: int = 0
    validation: dict[float, float] = field(default_factory=dict)
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    control: "Line | None" = None
    is_control: bool = False
    cells: list[dict] = field(default_factory=list)  # all, those of the sweep first


def choose_rate(bench: Bench, row: Row, rates: Sequence[float] | None, seed: int) -> Line:
    """The row at the rate with the best validation accuracy on one seed, the smallest of equals.

    rates: None for half of the row's own rate, itself, and its double.
    """
    own = replace(bench.base, **row.changes)
    rates = sorted(rates or [float(f"{own.lr * factor:.3g}") for factor in (0.5, 1, 2)])
    cells = {rate: run_cell(bench, row, rate, seed, "validation") for rate in rates}
    validation = {
        rate: float(np.mean([np.mean(scores) for scores in cell["scores"].values()])) for rate, cell in cells.items()
    }
    best = max(validation, key=validation.get)
    learning = max(cell["trainable"] or 0 for cell in cells.values())
    return Line(row, cell_settings(bench, row, best, seed), learning, validation, cells=list(cells.values()))


def lora_parameters(bench: Bench, settings: Settings) -> int:
    """Trainable parameters that plain LoRA has for each rank."""
    model = empty_model(bench.processor.config)
    adapter.inject(model, settings.targets, 1, 1.0)
    return count(trainable(model).values())


def make_control(bench: Bench, line: Line) -> Row:
    """Plain LoRA of the smallest rank with at least the line's trainable parameters, and the same alpha / r."""
    settings = line.settings
    rank = -(-line.trainable // lora_parameters(bench, settings))
    alpha = settings.alpha * rank / settings.r
    return Row(f"LoRA r{rank}", line.row.changes | PLAIN | {"r": rank, "alpha": alpha})


def compare(
    bench: Bench, rows: Sequence[Row], seeds: Sequence[int], rates: Sequence[float] | None = None
) -> list[Line]:
    """Every row, then the controls: rates on the first seed by the validation split, then all seeds on the test split.

    What is not trained comes first, for it costs little and finds what cannot be asked.
    """
    lines = [Line(row, replace(bench.base, **row.changes)) for row in rows if not row.is_trained]
    for line in lines:
        add_run(bench, line, seeds[0])
    lines += [choose_rate(bench, row, rates, seeds[0]) for row in rows if row.is_trained]
    for line in [line for line in lines if line.trainable and line.row.needs_control(line.settings)]:
        control = make_control(bench, line)
        own = replace(bench.base, **control.changes)
        line.control = next(
            (
                other
                for other in lines
                if other.row.run is fine_tune and replace(bench.base, **other.row.changes) == own
            ),
            None,
        )
        if line.control is None:
            if control.name in {other.row.name for other in lines}:  # the same rank with other settings
                control = replace(control, name=f"{control.name}, {line.row.name}")
            line.control = replace(choose_rate(bench, control, rates, seeds[0]), is_control=True)
            lines.append(line.control)
    for seed in seeds:
        for line in lines:
            if line.row.is_trained:
                add_run(bench, line, seed)
    return lines


def add_run(bench: Bench, line: Line, seed: int) -> None:
    """Ask the test split, and add what comes out as one more run."""
    cell = run_cell(bench, line.row, line.settings.lr, seed, "test")
    line.cells.append(cell)
    for name, scores in cell["scores"].items():
        line.scores[name] = np.vstack([*line.scores.get(name, ()), scores])


def difference(line: Line, measure: Measure) -> Interval:
    """Row minus control in percentage points, paired: the same examples, and the same seeds."""
    gain = line.scores[measure.name] - line.control.scores[measure.name]
    return bootstrap(100 * gain, measure.pictures)


# ---------------------------------------------------------------------------------------------------------------------
# What came out
# ---------------------------------------------------------------------------------------------------------------------


def by_label(line: Line, measure: Measure) -> dict[object, float]:
    """Mean accuracy (0..1) over seeds and the examples of a label."""
    found = {label: [] for label in measure.labels}
    for label, value in zip(measure.labels, line.scores[measure.name].mean(axis=0), strict=True):
        found[label].append(value)
    return {label: float(np.mean(values)) for label, values in found.items()}


def summarize(bench: Bench, lines: Sequence[Line], seeds: Sequence[int]) -> dict:
    """comparison.json: everything that the tables say, and what they leave out. Accuracies are in percent."""
    measures = bench.measures["test"]
    rows = []
    for line in lines:
        row = {
            "name": line.row.name,
            "trainable": line.trainable,
            "published": line.row.published,
            "settings": dataclasses.asdict(line.settings) if line.row.is_trained else None,
            "validation": {f"{rate:g}": round(100 * value, 2) for rate, value in line.validation.items()},
            "cells": [cell["file"] for cell in line.cells],
            "diverged": [cell["diverged"] for cell in line.cells if cell["diverged"]],
            "test": {},
        }
        for m in measures:
            scores = 100 * line.scores[m.name]
            by = {str(label): 100 * mean for label, mean in by_label(line, m).items()}
            interval = bootstrap(scores, m.pictures)._asdict()
            row["test"][m.name] = interval | {"by_seed": scores.mean(axis=1).tolist(), "by": by}
        if line.control:
            row |= {"control": line.control.row.name, "control_trainable": line.control.trainable, "difference": {}}
            for m in measures:
                gain = difference(line, m)
                row["difference"][m.name] = gain._asdict() | {"significant": gain.significant}
        rows.append(row)
    return {
        "base": bench.base.base,
        "fingerprint": bench.fingerprint,
        "data": bench.base.data,
        "version": VERSION,
        "settings": dataclasses.asdict(bench.base),
        "seeds": list(seeds),
        "protocol": bench.protocol,
        "measures": [{"name": m.name, "title": m.title, "chance": m.chance} for m in measures],
        "examples": {split: {m.name: len(m.examples) for m in of_split} for split, of_split in bench.measures.items()},
        "cpu_seconds": round(sum({c["file"]: c["cpu_seconds"] for line in lines for c in line.cells}.values())),
        "rows": rows,
    }


def spell(interval: dict) -> str:
    """`12.34 [11.00, 13.70]`; a difference with signs and a verdict, `+0.30 [-1.10, +1.70] n.s.` or `… *`."""
    sign = "+" if "significant" in interval else ""
    mark = {True: " *", False: " n.s.", None: ""}[interval.get("significant")]
    return "{:{s}.2f} [{:{s}.2f}, {:{s}.2f}]".format(*(interval[n] for n in ("mean", "low", "high")), s=sign) + mark


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, aligned for a terminal too: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    rule = ["-" * width + (":" if at else "") for at, width in enumerate(widths)]
    lines = [
        "| "
        + " | ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        + " |"
        for row in (head, *body)
    ]
    return [lines[0], "|-" + "|-".join(part if at else part + "-" for at, part in enumerate(rule)) + "|", *lines[1:]]


def tell(summary: dict) -> str:
    """comparison.md: the tables, and what follows from them."""
    rows, settings, seeds = summary["rows"], summary["settings"], summary["seeds"]
    vqa_title, *needles = measures = {measure["name"]: measure for measure in summary["measures"]}
    size = f"{settings['samples']:,} samples" if summary["data"] == "embedded" else f"{settings['epochs']} epoch(s)"
    counts = {
        split: ", ".join(f"{n:,} of {name}" for name, n in summary["examples"][split].items())
        for split in ("validation", "test")
    }
    lines = [
        f"# Comparison: base {summary['base']}, data {summary['data']}",
        "",
        f"{len(seeds)} seed(s), {size} a run. The rate of each row is the best of those tried on seed {seeds[0]}, by "
        f"the validation split (examples: {counts['validation']}). Below is the test split ({counts['test']}). In "
        "brackets: 95 % bootstrap intervals over seeds and pictures. A difference is that to the control, plain LoRA "
        "of at least as many trainable parameters, in percentage points, on the same examples and seeds. `*`: its "
        "interval excludes 0; n.s.: it does not, the difference is not significant.",
        "",
        "## Table 1: VQA, official scorer, accuracy in %",
        "",
    ]

    def against(row: dict, name: str) -> str:
        return spell(row["difference"][name]) if "control" in row else ""

    kinds = list(rows[0]["test"][vqa_title]["by"])
    head = ["row", "parameters", "rate", "VQA", *kinds, "control", "difference"]
    body = [
        [
            row["name"],
            f"{row['trainable']:,}",
            f"{row['settings']['lr']:g}" if row["settings"] else "",
            spell(row["test"][vqa_title]),
            *(f"{row['test'][vqa_title]['by'][kind]:.2f}" for kind in kinds),
            row.get("control", ""),
            against(row, vqa_title),
        ]
        for row in rows
    ]
    if any(row["published"] for row in rows):
        head.append("the paper, VQAv2")
        body = [[*cells, str(row["published"] or "")] for cells, row in zip(body, rows, strict=True)]
    if (chance := measures[vqa_title]["chance"]) is not None:
        body.insert(0, ["best guess, no picture", "", "", f"{chance:.2f}", *[""] * len(head[4:])])
    lines += table(head, body)
    if needles:
        protocol = summary["protocol"]
        lines += ["", f"## Table 2: needle, index accuracy (row and column right) in %, protocol {protocol}", ""]
        head, body = ["row", "control"], [["chance", ""], *([row["name"], row.get("control", "")] for row in rows)]
        for name in needles:
            head += [measures[name]["title"], "difference"]
            column = [(spell(row["test"][name]), against(row, name)) for row in rows]
            body = [
                [*cells, *more]
                for cells, more in zip(body, [(f"{measures[name]['chance']:.2f}", ""), *column], strict=True)
            ]
        lines += [*table(head, body), "", "## Figure 2: needle by place", "", "![accuracy by place](figure2.png)"]
    return "\n".join([*lines, "", "## In words", "", *(f"- {sentence}" for sentence in conclude(summary)), ""])


def conclude(summary: dict) -> list[str]:
    """What may be said of the differences, and what may not."""
    rows, seeds, sentences = summary["rows"], len(summary["seeds"]), []
    for row in rows:
        if "control" not in row:
            continue
        parts = [
            f"{'better' if gain['mean'] > 0 else 'worse'} in {name} ({spell(gain)})"
            for name, gain in row["difference"].items()
            if gain["significant"]
        ]
        same = [name for name, gain in row["difference"].items() if not gain["significant"]]
        if same:
            parts.append(f"no significant difference in {', '.join(same)}")
        sentences.append(
            f"{row['name']} ({row['trainable']:,} parameters) against {row['control']} "
            f"({row['control_trainable']:,}): {'; '.join(parts)}."
        )
    verdicts = [gain["significant"] for row in rows for gain in row.get("difference", {}).values()]
    if verdicts:
        sentences.append(
            f"Significant differences: {sum(verdicts)} of {len(verdicts)}. If nothing differed at all, "
            f"about {0.05 * len(verdicts):.1f} of them would still seem to."
        )
    if seeds == 1:
        sentences.append("One seed: the intervals know nothing of how runs differ, so no difference may be believed.")
    elif seeds < 10:
        sentences.append(f"{seeds} seeds are few: intervals that resample them are rather too narrow than too wide.")
    edges = [
        row["name"]
        for row in rows
        if len(tried := list(row["validation"])) > 1 and f"{row['settings']['lr']:g}" in (tried[0], tried[-1])
    ]
    if edges:
        sentences.append(
            "The best rate is the lowest or the highest tried, and a better one may lie beyond, for: "
            f"{', '.join(edges)}."
        )
    below = [
        f"{row['name']} in {test['name']}"
        for row in rows
        if row["settings"] is None
        for test in summary["measures"][1:]
        if row["test"][test["name"]]["mean"] < test["chance"]
    ]
    if below:
        sentences.append(
            f"Below chance: {', '.join(below)}. A model that never saw a question's wording gives other "
            "answers than its words; `--protocol constrained` compares those alone."
        )
    sentences += [f"{row['name']}: a run diverged and scores 0: {why}" for row in rows for why in row["diverged"]]
    return sentences


def grid(line: Line, measure: Measure) -> list[list[float]]:
    """Accuracy (0..1) by the needle's row and column, mean over seeds."""
    cells = by_label(line, measure)
    side = 1 + max(max(place) for place in cells)
    return [[cells.get((row, column), nan) for column in range(side)] for row in range(side)]


def draw(bench: Bench, lines: Sequence[Line]) -> list[str]:
    """Write the figures, and return their names.

    Figure 2 has the rows that need no control, baseline and plain LoRA, and of the others the best on the validation
    split: choosing by what is drawn would flatter it.
    """
    measures, files = bench.measures["test"], {}
    others = [line for line in lines if line.control]
    shown = [line for line in lines if not line.control and not line.is_control]
    if others:
        best = max(others, key=lambda line: max(line.validation.values()))
        shown = [*(shown or [best.control]), best]
        files["differences.png"] = [
            figures.interval_chart(
                [(f"{line.row.name} - {line.control.row.name}", *difference(line, measure)) for line in others],
                measure.title,
                "accuracy, row minus control (plain LoRA), percentage points",
                reference=("no difference", 0.0),
            )
            for measure in measures
        ]
    if len(measures) > 1:
        files["figure2.png"] = [
            figures.heatmaps({line.row.name: grid(line, measure) for line in shown}, f"needle, {measure.title}")
            for measure in measures[1:]
        ]
    for name, pictures in files.items():
        figures.save(stack(pictures), bench.out / name)
    return list(files)


def stack(pictures: Sequence[Image.Image]) -> Image.Image:
    """Pictures one below the other."""
    sheet = Image.new("RGB", (max(p.width for p in pictures), sum(p.height for p in pictures)), figures.PAPER)
    top = 0
    for picture in pictures:
        sheet.paste(picture, (0, top))
        top += picture.height
    return sheet


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------

DECIDED = ("attention", "feed-forward", "option", "tasks", "lr", "seed", "full", "resume", "evaluate", "eval-limit")


def read_rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [0.0]
    if min(rates) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}, expected positive numbers such as 1e-3,3e-3")
    return rates


def read_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Settings]:
    """The command's own flags, and the settings that all rows start from."""
    parser = argparse.ArgumentParser(
        prog="python -m train.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="All other flags are those of `python -m train.finetune`, such as --base, --data, "
        f"--recipe, --samples, --r or --device, with its defaults but for --samples {SAMPLES}.",
    )
    names = "; ".join(f"{group}: {', '.join(row.name for row in rows)}" for group, rows in GROUPS.items())
    names += f"; or one of {', '.join(STUDIES)}, whose own flags --rows NAME --help shows"
    parser.add_argument(
        "--rows",
        default="attention",
        metavar="NAME,…",
        help=f"rows, or groups of them ({names}) (default: %(default)s)",
    )
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="runs of a row (default: %(default)s)")
    parser.add_argument(
        "--rates",
        type=read_rates,
        metavar="A,B,…",
        help="peak learning rates to try (default: half of the row's own, itself, its double)",
    )
    parser.add_argument(
        "--limit",
        type=positive,
        default=800,
        metavar="N",
        help="VQA questions of the test split; half as many needle tests of each kind; half of both "
        "for validation (default: %(default)s)",
    )
    parser.add_argument(
        "--protocol",
        choices=needle.PROTOCOLS[:2],
        default="paper",
        help="of the needle tests: one-word answers, parsed strictly, or the likelier of the words "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--coco",
        metavar="DIR",
        help="with --data on disk: folder of COCO val2014 pictures, for 2×2 needle tests (default: no needle tests)",
    )
    parser.add_argument("--captions", metavar="FILE", help="with --coco: MMNeedle's or COCO's caption file")
    parser.add_argument(
        "--metadata", metavar="DIR", help="with --coco: folder of MMNeedle's own tests (default: drawn anew)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/compare"),
        metavar="DIR",
        help="folder of results and cells; what it holds is not done again (default: %(default)s)",
    )
    parser.add_argument(
        "--json",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="print comparison.json instead of the tables (default: --no-json)",
    )
    args, rest = parser.parse_known_args(argv)
    for flag in rest:
        if flag.startswith("--") and flag.partition("=")[0].removeprefix("--").removeprefix("no-") in DECIDED:
            raise UserError(f"{flag}: a comparison decides that itself: choose with --rows, --rates, --seeds, --limit")
    settings = parse(["--samples", str(SAMPLES), *rest])[0]
    if settings.full:
        raise UserError("--recipe paligemma trains every weight, but rows are compared with LoRA: take another recipe")
    if args.coco and settings.data == "embedded":
        raise UserError("--coco goes with --data on disk: the embedded scenes have needle tests of their own")
    return args, replace(settings, **PLAIN)


def named_study(argv: Sequence[str]) -> str | None:
    """The module of the study that --rows names, if it names one."""
    chosen = [value for flag, value in zip(argv, argv[1:], strict=False) if flag == "--rows"]
    chosen += [flag.removeprefix("--rows=") for flag in argv if flag.startswith("--rows=")]
    return STUDIES.get(chosen[-1]) if chosen else None


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if study := named_study(argv):
        importlib.import_module(study).main(argv)
        return
    args, base = read_arguments(argv)
    rows, started = pick_rows(args.rows), time.perf_counter()
    world = join_world(base.device)
    if world.size > 1:
        raise UserError("a comparison runs in one process: start it without torchrun")
    processor = Processor.from_source(base.base, draft=base.data != "embedded")
    fingerprint = adapter.fingerprint(load_base(base, world.device))
    limits = {"validation": max(1, args.limit // 2), "test": args.limit}
    measures = {split: make_measures(base, split, limit, args) for split, limit in limits.items()}
    bench = Bench(base, args.out, world, processor, fingerprint, measures, args.protocol)
    with same_command_goes_on():
        lines = compare(bench, rows, range(args.seeds), args.rates)
    summary = summarize(bench, lines, range(args.seeds))
    text = tell(summary)
    write_text(args.out / "comparison.json", json.dumps(summary, indent=1) + "\n")
    write_text(args.out / "comparison.md", text)
    files = ["comparison.md", "comparison.json", *draw(bench, lines)]
    if args.json:
        print(json.dumps(summary))
        return
    print(text)
    seconds = time.perf_counter() - started
    print(
        f"{summary['cpu_seconds']:,} CPU seconds for all cells; this call {seconds:,.0f} s on "
        f"{torch.get_num_threads()} threads; in {args.out}: {', '.join(files)}, cells/"
    )
