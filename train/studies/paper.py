"""The experiment of the differential PaliGemma paper as published: its five models, its choice of two, its needles.

    python -m train.reproduce paligemma                      the same plan in miniature, on the embedded base and scenes
    python -m train.reproduce paligemma --base google/paligemma-3b-pt-224 --data vqav2:DIR --coco DIR --captions FILE
    python -m train.reproduce paligemma … --from RUN…        runs of train.finetune in place of training
    python -m train.reproduce paligemma … --plan             memory, disk and hours of all runs; nothing is trained

In: a base and data. Out: reproduction.md and reproduction.json with the paper's Table 1 (VQA), Table 2 and Figure 2
(needles) beside the published figures, time, tokens and memory of each run, what the paper leaves open, and
figure2.png and learning.png. Every other flag is one of `train.finetune` and holds for all runs.

Part 1 fine-tunes the five models of Table 1 on 40 % of the training pictures. Of those with and those without
differential attention the one with the best VQA score is chosen. Part 2 fine-tunes these two on all pictures. The base
and the two of Part 2 look for needles: 200 stitched pictures of 2×2, the paper's prompt and its two questions.

One seed and no controls, as published: `train.compare` has both. A cell is one run, so the same command goes on.
"""

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from eval.records import Record
from lora import adapter
from lora.files import read_tensors
from model.common import UserError, read_json, shown
from train.data.sources import read_records
from train.flags import RUN_CONFIG, RunArguments, flag
from train.plan import PlanRow, plan, plan_table
from train.recipes import RECIPES
from train.settings import Settings
from train.show_batch import show_batch
from train.studies import engine
from train.studies.attention_data import VAL_FILES, Measure, coco_needles, embedded_measure, vqa_measure
from train.studies.attention_report import by_label
from train.studies.attention_rows import VQA_SCORES
from train.studies.cells import (
    FACTS,
    FineTuningRow,
    FineTuningStudy,
    NeedleOptions,
    open_base,
    open_study,
    read_study,
    run_cell,
    without,
)
from train.studies.engine import describe, difference
from train.studies.paper_report import OPEN, draw, to_markdown

METRICS = "metrics.jsonl"
NEEDLE_SCORES = {"baseline": 28.75, "without": 30.42, "with": 34.72}  # differential attention
NAMES = ("baseline", *VQA_SCORES)
# of the miniature: half of its samples ask for needles, since the embedded base has never seen their words
MINIATURE = ("--samples", "4000", "--tasks", "vqa,n2o1")
TABLE_1 = ("attention", "feed_forward", "option", "lr", "r", "alpha", "weight_decay")  # what makes its rows differ
DECIDED = (*TABLE_1, *"fraction full resume evaluate eval_limit eval_data arch stage wings recipe".split())


@dataclass(frozen=True)
class PaperOptions(NeedleOptions):
    """The flags of this study, besides those of `train.finetune`."""

    rows: str = flag(",".join(NAMES), "models to take part, comma-separated (default: all)", metavar="NAME,…")
    from_: tuple[str, ...] = flag(
        (),
        "finished runs in place of training: their settings say which model and part they are, or NAME=RUN does, and "
        "NAME-full=RUN for Part 2 (default: none)",
        nargs="+",
        metavar="RUN",
    )
    vqa_limit: int | None = flag(
        None, "VQA questions, drawn at random (default: all; 600 of the embedded scenes)", least=1, metavar="N"
    )
    needle_limit: int = flag(200, "needle tests, evenly over the places", least=4, metavar="N")
    scoring: str = flag("official", "of VQA: VQAv2's own, or the paper's Eq. 8", choices=["official", "paper"])
    out: Path = flag(Path("runs/reproduce-paligemma"), engine.OUT_HELP, metavar="DIR")


def make_row(name: str, base: Settings, given: Collection[str], whole: bool) -> FineTuningRow:
    """A model of Table 1 on its share of the data, or on the `whole`; flags that are `given` override its recipe."""
    if name == "baseline":
        return FineTuningRow(name, run=open_base)
    changes = RECIPES[name]
    share = 1.0 if whole else changes["fraction"]
    changes = without(changes, given) | {"fraction": share}
    if base.is_embedded and not whole:  # each sample has a picture of its own
        changes["samples"] = max(1, round(share * base.samples))
    return FineTuningRow(f"{name}-full" if whole else name, changes, published=VQA_SCORES[name])


def find_runs(folders: Sequence[str], names: Collection[str]) -> dict[str, Path]:
    """The runs of `--from` by the name of the row that each stands for. Raises UserError for a run of no row."""
    found: dict[str, Path] = {}
    for text in folders:
        name, equals, folder = text.rpartition("=")
        run = Path(folder)
        if not (run / adapter.CONFIG_FILE).is_file():
            raise UserError(
                f"--from {shown(text)}: holds no {adapter.CONFIG_FILE}: give a finished run with an adapter"
            )
        name = name if equals else _row_of(run)
        if name.removesuffix("-full") not in VQA_SCORES or name not in names and not name.endswith("-full"):
            raise UserError(f"--from {shown(text)}: {shown(name)} takes no part: choose of {', '.join(names)}")
        if name in found:
            raise UserError(f"--from {shown(text)}: {found[name]} is {name} already: give one run of each")
        found[name] = run
    return found


def _row_of(run: Path) -> str:
    """The row whose settings a run has."""
    settings = stored_settings(run)
    for name in VQA_SCORES:
        recipe = Settings(**RECIPES[name])
        if all(settings.get(field) == getattr(recipe, field) for field in TABLE_1):
            return name if settings.get("fraction") == recipe.fraction else f"{name}-full"
    own = ", ".join(f"{field} {settings.get(field)}" for field in TABLE_1)
    raise UserError(f"--from {shown(run)}: {own}: this is no model of Table 1: say which it stands for, paper-1={run}")


def stored_settings(run: Path) -> dict[str, object]:
    """What a run says of its training; of an adapter without a run, its prompt."""
    stored = read_json(run / (RUN_CONFIG if (run / RUN_CONFIG).is_file() else adapter.CONFIG_FILE))
    names = (*TABLE_1, "fraction", *(setting for *_, setting in OPEN))
    return {
        name: tuple(stored[name]) if isinstance(stored[name], list) else stored[name]
        for name in names
        if stored.get(name) is not None
    }


def check_bases(runs: Mapping[str, Path], study: FineTuningStudy) -> None:
    """Raise UserError for a run that was trained on another base."""
    for run in runs.values():
        if read_tensors(run)[1].get("base_fingerprint", study.fingerprint) != study.fingerprint:
            raise UserError(f"--from {shown(run)}: trained on another base than --base {study.base.base}: leave it out")


def make_measures(base: Settings, options: PaperOptions) -> dict[str, list[Measure]]:
    """VQA, and the needles: on the embedded scenes, on COCO's pictures, or none."""
    limit = options.vqa_limit or (600 if base.is_embedded else None)
    needles = [embedded_measure("n2o1", options.needle_limit, "paper")] if base.is_embedded else []
    if options.coco:
        needles = coco_needles(base, options, options.needle_limit, "paper")
    return {"vqa": [vqa_measure(base, "test", limit, options.scoring)], "needles": needles}


@dataclass(frozen=True)
class Call:
    """What the command line asks for. given: the names of settings that it gives. runs: by row, those of --from."""

    options: PaperOptions
    base: Settings
    given: set[str]
    runs: dict[str, Path]
    arguments: RunArguments


@dataclass(frozen=True)
class Reproduction:
    """The study, and what was asked for."""

    study: FineTuningStudy
    call: Call

    def row(self, name: str, whole: bool = False) -> FineTuningRow:
        row = make_row(name, self.study.base, self.call.given, whole)
        if (run := self.call.runs.get(row.name)) is None:
            return row
        return replace(row, finished=run, changes=row.changes | stored_settings(run))

    def result(self, row: FineTuningRow, split: str) -> dict:
        """The content of reproduction.json about a row on a split."""
        base = self.study.base
        cell = run_cell(self.study, row, row.changes.get("lr", base.lr), base.seed, split)
        measure = self.study.measures[split][0]
        scores = 100 * np.array([cell["scores"][measure.name]])
        if split == "needles":  # as published, a mean over the places, not over the tests
            scores = scores * place_weights(measure.labels)
        return {
            "name": row.name,
            "published": row.published,
            "settings": asdict(replace(base, **row.changes)) if row.is_trained else None,
            "trainable": cell["trainable"],
            "diverged": cell["diverged"],
            "score": describe(scores, measure.pictures),
            "by": by_label(100 * np.array([cell["scores"][measure.name]]), measure.labels),
            "run": self.facts(row, cell),
            "scores": scores,
        }

    def facts(self, row: FineTuningRow, cell: dict) -> dict:
        """Where a run is, what its training took, and its loss by examples seen."""
        folder = row.finished or (self.study.out / cell["file"]).parent
        facts = {"folder": str(folder), "cpu_seconds": cell["cpu_seconds"], "curve": []}
        for name in (FACTS, "summary.json"):  # of a cell, and of a run of train.finetune
            if (folder / name).is_file():
                found = read_json(folder / name)
                facts |= {key: found[key] for key in ("seconds", "samples", "tokens", "peak_bytes") if key in found}
        if (folder / METRICS).is_file() and facts.get("samples"):
            records = map(json.loads, (folder / METRICS).read_text().splitlines())
            losses = [record["loss"] for record in records if "loss" in record]
            facts |= {"steps": len(losses), "curve": smooth(losses, facts["samples"] / len(losses))}
        return facts


def smooth(losses: Sequence[float], each: float, points: int = 40) -> list[tuple[float, float]]:
    """(examples seen, mean loss since the point before), at most `points` of them; `each`: examples of a step."""
    parts = np.array_split(np.array(losses), min(points, len(losses)))
    ends = np.cumsum([len(part) for part in parts])
    return [(round(end * each), float(part.mean())) for end, part in zip(ends, parts, strict=True)]


def place_weights(labels: Sequence) -> np.ndarray:
    """Weights of tests with which their mean is the unweighted mean over places."""
    places, numbers = np.unique([str(label) for label in labels], return_inverse=True)
    return (len(labels) / len(places) / np.bincount(numbers))[numbers]


def reproduce(work: Reproduction) -> dict:
    """Both parts and the needles. Returns reproduction.json."""
    names = work.call.options.rows.split(",")
    baseline = [work.result(work.row("baseline"), "vqa")] if "baseline" in names else []
    part_1 = [work.result(work.row(name), "vqa") for name in names if name != "baseline"]
    kinds, runs = {kind_of(result["name"]) for result in part_1}, work.call.runs
    given = [name for name in VQA_SCORES if f"{name}-full" in runs]
    # of a kind that Part 1 lacks, finished runs of Part 2 are compared
    part_2 = [work.result(work.row(name, whole=True), "vqa") for name in given if kind_of(name) not in kinds]
    chosen = choose([*part_1, *part_2])
    for name in given:
        if (better := chosen[kind_of(name)]) != name:
            print(f"--from {shown(runs[f'{name}-full'])}: left out: {better} scores better", file=sys.stderr)
    part_2 = {kind: work.result(work.row(name, whole=True), "vqa") for kind, name in chosen.items()}
    needles = {}
    if work.study.measures["needles"]:
        rows = {"baseline": work.row("baseline")} if baseline else {}
        rows |= {kind: work.row(name, whole=True) for kind, name in chosen.items()}
        needles = {kind: work.result(row, "needles") for kind, row in rows.items()}
    gains = {}
    for split, found in (("VQA", part_2), ("needles", needles)):
        if {"with", "without"} <= found.keys():
            pictures = work.study.measures["vqa" if split == "VQA" else "needles"][0].pictures
            gains[split] = difference(found["with"]["scores"], found["without"]["scores"], pictures)
    results = [*baseline, *part_1, *part_2.values(), *needles.values()]
    for result in results:
        del result["scores"]
    study = work.study
    return {
        "base": study.base.base,
        "fingerprint": study.fingerprint,
        "data": " ".join(study.base.data),
        "device": str(study.world.device),
        "scoring": work.call.options.scoring,
        "examples": {split: len(of[0].examples) if of else 0 for split, of in study.measures.items()},
        "chance": study.measures["vqa"][0].chance,
        "baseline": baseline,
        "part_1": part_1,
        "chosen": chosen,
        "part_2": part_2,
        "needles": {kind: result | {"published": NEEDLE_SCORES[kind]} for kind, result in needles.items()},
        "differences": gains,
        "from": {name: str(run) for name, run in runs.items()},
    }


def kind_of(name: str) -> str:
    """Whether a model of Table 1 is one "without" or "with" differential attention."""
    return "without" if RECIPES[name.removesuffix("-full")]["attention"] == "softmax" else "with"


def choose(results: Sequence[dict]) -> dict[str, str]:
    """The name of the best model "without" and "with" differential attention."""
    best: dict[str, str] = {}
    for result in sorted(results, key=lambda one: -one["score"]["mean"]):
        best.setdefault(kind_of(result["name"]), result["name"].removesuffix("-full"))
    return {kind: best[kind] for kind in ("without", "with") if kind in best}


def read_arguments(argv: Sequence[str] | None) -> Call:
    """Raises UserError for flags that make no sense, and for runs that are not there."""
    given = read_study(PaperOptions, argv, "train.reproduce paligemma", __doc__, DECIDED, MINIATURE)
    options, base, names, arguments = given
    rows = options.rows.split(",")
    if unknown := [name for name in rows if name not in NAMES]:
        raise UserError(f"--rows {shown(unknown[0])}: choose of {', '.join(NAMES)}")
    kind, _, folder = base.data[0].partition(":")
    if kind == "vqav2" and "validation" not in names and Path(folder, VAL_FILES[0]).exists():
        base = replace(base, validation=0.0)  # val2014 is asked about: no training picture is held out
    return Call(options, base, names, find_runs(options.from_, rows), arguments)


def planned_rows(call: Call) -> list[FineTuningRow]:
    """The models of Part 1."""
    names = [name for name in call.options.rows.split(",") if name != "baseline"]
    return [make_row(name, call.base, call.given, whole=False) for name in names]


def print_plan(call: Call, measures: dict[str, list[Measure]]) -> None:
    """What the runs would take, those of Part 2 for the models that the paper chose; nothing is trained."""
    planned: dict[str, PlanRow] = {}
    known: dict[str, list[Record]] = {}
    for row in planned_rows(call):
        print(f"planning {row.name}", file=sys.stderr, flush=True)
        planned[row.name] = plan(replace(call.base, **row.changes), row.name, call.arguments.gpus, known=known)
    for name in planned.keys() & {"paper-1", "paper-2"}:
        row = make_row(name, call.base, call.given, whole=True)
        planned[row.name] = on_more(planned[name], row.name, replace(call.base, **row.changes), known)
    rows = [planned[name] for name in sorted(planned) if name not in call.runs]
    asked = {split: len(of_split[0].examples) if of_split else 0 for split, of_split in measures.items()}
    if rows:
        print(plan_table(rows, call.arguments.gpu))
    print(f"\n{asked['vqa']:,} VQA questions to each model, {asked['needles']:,} needle tests to three of them.")


def on_more(row: PlanRow, name: str, settings: Settings, known: dict[str, list[Record]]) -> PlanRow:
    """The plan of the same model on the data of `settings`: its step is the same."""
    records = len(read_records(settings, known=known))
    steps = settings.steps or settings.epochs * -(-records // row.step_rows)
    samples = min(steps * row.step_rows, settings.epochs * records)
    more = samples / row.samples
    return replace(
        row, name=name, samples=samples, steps=steps, tokens=round(more * row.tokens), flops=more * row.flops
    )


def main(argv: Sequence[str] | None = None) -> None:
    call = read_arguments(argv)
    measures = make_measures(call.base, call.options)  # bad files are reported before a large model is read
    if sheet := call.arguments.show_batch:
        row = next(iter(planned_rows(call)), make_row("paper-1", call.base, call.given, whole=False))
        for line in show_batch(replace(call.base, **row.changes), sheet):
            print(shown(line, 10_000))
    if call.arguments.plan:
        print_plan(call, measures)
    if call.arguments.plan or sheet:
        return
    study = open_study(call.base, call.options.out, measures)
    check_bases(call.runs, study)
    find = partial(reproduce, Reproduction(study, call))
    engine.run_study(call.options.out, find, to_markdown, draw, name="reproduction")
