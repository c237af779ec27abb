"""Study: is a base that is pretrained with differential attention better than its plain twin?

    python -m train.compare --rows scratch              three rows, five to ten seeds: 45 to 90 minutes on two cores
    python -m train.compare --rows scratch --quick      two rows at one rate: ten minutes

In: the embedded scenes. Out: comparison.md, comparison.json and curves.png. No weight is a pretrained one. Rows:
- plain: the decoder of the embedded base, 4 heads of 64 on one key head.
- narrow: 8 heads of 32 on two key heads, the twin of Ye et al. (2024, 2.2): a map of `split` is a head of it.
- split: Differential Transformer, 4 heads with two maps of 32 each, λ and a norm by head. 768 parameters more.

All three have weights of equal shapes, and begin with the same ones, bit for bit: the vision tower, the projector and
the embeddings are those that the patches of a seed's own pictures have taught (each patch against the words for its
object and its place; the decoder has no part in it), the decoder's are random. Then every row learns the same rows in
the same order: decoder, projector and embeddings, the tower stays. First questions (`PRETRAINING`), on pictures of up
to 5 objects; then needles (`TUNING`) with up to 3 distractors: a picture with more of them is never trained on.

The rules are those of `train/studies/rules.py`. One rate serves both phases of a row. A second control of `split` is
`plain`, trained as long; the positive control is `train/studies/built.py`, learned by `split`. PREDICTIONS were written
before the study was run.
"""

import json
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eval import scenes
from eval.needle import PROTOCOLS
from eval.records import Record, sample_record
from model.common import atomic_path, write_text
from model.config import PRESETS
from model.differential import graft, lambdas
from model.paligemma import PaliGemma, initialize
from model.processor import Processor
from model.source import EMBEDDED
from train.embedded.base import ALONE, PretrainingStage, pretrain
from train.flags import flag, read_flags
from train.loop import LoopOptions, fit
from train.optim import MuonAdamW, Rule, parameter_groups
from train.settings import Settings
from train.studies import built, engine, rules
from train.studies.attention_data import make_measures
from train.studies.attention_maps import ask, measure_layers
from train.studies.attention_runs import (
    RowResult,
    add_timed_control,
    collect,
    paired_ratio,
    test,
    test_common_rate,
    tune,
)
from train.studies.cells import (
    FACTS,
    CellName,
    FineTuningRow,
    FineTuningStudy,
    cell_file,
    cell_settings,
    run_ahead,
    run_cells,
)
from train.studies.encoded import EncodedOrder, EncodedRecords, encode, encoded_loss, projected
from train.studies.engine import SeededOptions, read_rates
from train.studies.rules import Prediction
from train.studies.scratch_report import LOOKED_AT, LOOKS, draw, summarize, to_markdown
from train.supervised import row_losses
from weights.export import export_model
from weights.load import load_model

ROWS_A_STEP = 32
SIGHT = PretrainingStage(5_000, {"locate": 1.0}, 0.01, answer_weight=0.0, alignment_weight=1.0)
PRETRAINING = {"vqa": 3.0, "locate": 0.3, "vertical": 0.5, "horizontal": 0.5, "exist": 0.3, "cell": 1.5}
TUNING = {"vqa": 1.0, "n2o1": 1.0, "n2o2": 1.0, "n3d2": 0.5, "n4d0": 0.5, "n4d1": 0.5, "n4d3": 1.0}
PHASES = {"pretraining": (PRETRAINING, 1.0, 1.0), "tuning": (TUNING, 0.5, 0.5)}  # shares of samples and of the rate
LADDERS = {  # difficulties from easy to hard, as in attention_data.LADDERS: pretraining is short, so easier ones too
    "2×2": ("n2d1", "n2o1", "n2o2"),
    "3×3": ("n3d0", "n3d2", "n3d5", "n3d8"),
    "4×4": ("n4d1", "n4d3", "n4d7", "n4o1"),
    "existence": ("e4", "e8", "e12"),
}
TRAINED = r"(language_model|multi_modal_projector)\..*"
MARKS, HELD_OUT = 6, 192  # of the curve of a run: points, questions
RECIPE = repr((1, SIGHT, PHASES, MARKS, HELD_OUT, ROWS_A_STEP))
SAMPLES = 15_000
QUICK = {"samples": 7_200, "rates": (0.01,), "limit": 192, "grow": False, "positive": False}


@dataclass(frozen=True)
class ScratchOptions(SeededOptions):
    """The flags of this study."""

    out: Path = flag(Path("runs/compare-scratch"), engine.OUT_HELP, metavar="DIR")
    samples: int = flag(SAMPLES, "of pretraining; half as many of tuning", least=1, metavar="N")
    rates: tuple[float, ...] = flag(
        (0.005, 0.01, 0.02),
        "peak learning rates of Muon to try first (default: 0.005,0.01,0.02)",
        type=read_rates,
        metavar="A,B,…",
    )
    limit: int = flag(384, "VQA questions of the test split; half as many of each other kind", least=1, metavar="N")
    protocol: str = flag("constrained", "of the needle tests, as in the attention study", choices=PROTOCOLS[:2])


# What is learned


def question(task: str, split: str, index: int, seed: int) -> scenes.Sample:
    """Sample number `index` of a task of the scenes, or of any kind of needle."""
    if not task.startswith("n"):
        return scenes.sample(task, split, index, seed)
    each = 2 if scenes.layout_of(task)[0] == 2 else 1
    return scenes.needle(task, split, index // each, seed).samples()[index % each]


def draw_records(tasks: Mapping[str, float], split: str, count: int, seed: int) -> list[Record]:
    """`count` questions of the tasks, by their shares."""
    dice, drawn, records = random.Random(f"scratch/{split}/{seed}"), dict.fromkeys(tasks, 0), []
    for task in dice.choices(list(tasks), list(tasks.values()), k=count):
        records.append(sample_record(question(task, split, drawn[task], seed), split))
        drawn[task] += 1
    return records


@lru_cache(maxsize=4)  # cells are computed seed by seed
def encoded(sight: Path, phase: str, split: str, count: int, seed: int) -> EncodedRecords:
    """The questions of a phase, with their pictures as the vision tower in `sight` encodes them."""
    return encode(draw_records(PHASES[phase][0], split, count, seed), load_model(sight).vision_tower)


def sight_of(out: Path, seed: int) -> Path:
    """The folder of the model that all rows of a seed start from: its patches are named, its decoder is random."""
    folder = engine.cell_folder(out, "sight", RECIPE, seed)

    def work(folder: Path) -> dict:
        model = initialize(PaliGemma(PRESETS["tiny"]), seed, position_std=0.5)
        pretrain(model, Processor.from_source(EMBEDDED), seed, ROWS_A_STEP, stages=(SIGHT,))
        shutil.rmtree(folder / "model", ignore_errors=True)
        export_model(model, folder / "model")
        return {}

    engine.finish_cell(folder / "sight.json", f"vision tower, seed {seed}", work)
    return folder / "model"


def start(settings: Settings, sight: Path) -> PaliGemma:
    """The untrained model of a row: the weights in `sight`, in the row's kind of decoder."""
    model = load_model(sight)
    if settings.option == NARROW:
        text = model.config.text
        heads = {"num_attention_heads": 2 * text.num_attention_heads, "head_dim": text.head_dim // 2}
        text = replace(text, **heads, num_key_value_heads=2 * text.num_key_value_heads)
        weights, model = model.state_dict(), PaliGemma(replace(model.config, text=text))
        model.load_state_dict(weights)
    if settings.attention != "softmax":
        graft(model, settings.attention, rope_pairs="fresh", seed=settings.seed)
    return model


def from_nothing(settings: Settings, folder: Path, study: FineTuningStudy) -> PaliGemma:
    """The model of a cell after both phases, trained in `folder` unless it is there; an interrupted run goes on."""
    sight, file = sight_of(study.out, settings.seed), folder / "model.safetensors"
    model = start(settings, sight)
    if not file.exists():
        facts = {name: learn(model, name, settings, folder, study.processor, sight) for name in PHASES}
        write_text(folder / FACTS, json.dumps(facts) + "\n")
        with atomic_path(file) as temporary:  # a part of it would end each further call
            save_file(model.state_dict(), temporary)
    for name in PHASES:
        shutil.rmtree(folder / name, ignore_errors=True)
    parameter_groups(model, [Rule(TRAINED, settings.lr)])
    model.load_state_dict(load_file(file))
    return model


def learn(
    model: PaliGemma, phase: str, settings: Settings, folder: Path, processor: Processor, sight: Path
) -> dict[str, list]:
    """Train `model` in place. Returns its curve: steps, losses of the held-out questions, and λ by layer, at MARKS."""
    _, share, rate = PHASES[phase]
    steps = max(MARKS, round(settings.samples * share) // ROWS_A_STEP)
    marks = {round(steps * mark / MARKS) for mark in range(1, MARKS + 1)}

    def batch(step: int):
        records = encoded(sight, phase, "train", steps * ROWS_A_STEP, settings.seed)
        return records.batch(processor, range(step * ROWS_A_STEP, (step + 1) * ROWS_A_STEP))

    def watch(step: int, progress: dict) -> dict:
        if step in marks:
            curve = progress.setdefault("curve", {"step": [], "loss": [], "lambda": []})
            curve["step"].append(step)
            curve["loss"].append(held_out(model, encoded(sight, phase, "validation", HELD_OUT, 0), processor))
            curve["lambda"].append([float(value.mean()) for value in lambdas(model).values()])
        return {}

    optimizer = make_optimizer(model, settings.lr * rate)
    (run := folder / phase).mkdir(exist_ok=True)
    options = LoopOptions(warmup=0.05, seed=settings.seed, checkpoint_every=100)
    order = EncodedOrder(steps, batch)
    return fit(model, optimizer, order, encoded_loss, options, run, ALONE, validate=watch)["curve"]


def make_optimizer(model: PaliGemma, rate: float) -> MuonAdamW:
    """The optimizer of both phases; all but TRAINED is frozen."""
    return MuonAdamW(parameter_groups(model, [Rule(TRAINED, rate)]), (0.9, 0.98), 0.1)


@torch.no_grad()
def held_out(model: PaliGemma, asked: EncodedRecords, processor: Processor) -> list[float]:
    """The loss of each question, in nats a token of its answer."""
    model.eval()
    losses = []
    for first in range(0, len(asked.records), 64):
        micro = asked.batch(processor, range(first, min(first + 64, len(asked.records))))
        by_row = row_losses(model, projected(model, micro))
        losses += (by_row / (micro.targets != -100).sum(1)).tolist()
    model.train()
    return [round(loss, 5) for loss in losses]


# The whole

# Against plain, before the study was run, but for a pilot of the plain row
PREDICTIONS = (
    Prediction("split", "VQA", "equivalent", "at small scale others found no gain but in training loss"),
    Prediction("split", "dose", "better", "the published claim: a second map cancels what distractors have in common"),
    Prediction("split", "answer on needle, n4o1", "better", "the published claim, of 15 distractors"),
    Prediction("split", "all", "equivalent", "gain on many distractors, nothing elsewhere"),
    Prediction("narrow", "all", "equivalent", "equal weights, cut into other heads"),
)
NARROW = ("heads=narrow",)
ROWS = (
    FineTuningRow("plain", run=from_nothing, recipe=RECIPE),
    FineTuningRow("split", {"attention": "split"}, run=from_nothing, recipe=RECIPE),
    FineTuningRow("narrow", {"option": NARROW}, run=from_nothing, recipe=RECIPE),
)


@lru_cache(maxsize=2)
def open_for(options: ScratchOptions, rungs: tuple[str, ...] = ()) -> FineTuningStudy:
    """The study; on the validation split with all difficulties, on the test split with `rungs`."""
    base = Settings(attention="softmax", samples=options.samples, batch_size=ROWS_A_STEP, optimizer="muon")
    every = tuple(rung for ladder in LADDERS.values() for rung in ladder)
    measures = {"validation": make_measures(base, "validation", max(1, options.limit // 2), options, every)}
    if rungs:
        measures["test"] = make_measures(base, "test", options.limit, options, rungs)
    study = FineTuningStudy(
        base, options.out, ALONE, Processor.from_source(EMBEDDED), "nothing", measures, options.protocol
    )
    if options.processes == 1:
        return study

    def ahead(names: Sequence[CellName]) -> None:
        seeds = [(options.out, seed) for seed in sorted({seed for _, _, seed, _ in names})]
        engine.side_by_side(make_sight, seeds, options.processes, lambda job, _: f"vision tower, seed {job[1]}")
        run_ahead(partial(open_for, options, rungs), options.processes, names)

    return replace(study, ahead=ahead)


def make_sight(job: tuple) -> dict:
    """A seed's vision tower, in a process of its own."""
    return {"folder": str(sight_of(*job))}


def compare(options: ScratchOptions) -> tuple[FineTuningStudy, list[RowResult], dict[str, dict]]:
    """All rows: rates and difficulties by the validation split, then as many seeds as needed on the test split.

    `narrow`, a second control, has the rate of `plain`.
    """
    study = open_for(options)
    plain, *others = results = [RowResult(row, replace(study.base, **row.changes)) for row in ROWS]
    plain.is_control = True
    for one in others:
        one.control = plain
    tune(study, results[:2], options.rates, options)
    ladders = choose_rungs(study, plain, min(rules.TUNING_SEEDS, options.seeds))
    study = open_for(options, tuple(one["chosen"] for one in ladders.values()))
    if options.quick:
        results = results[:2]
    else:
        others[1].settings = replace(others[1].settings, lr=plain.settings.lr)
        others[0].timed = add_timed_control(plain, step_ratio(study, others[0]), results)
    test(study, results, options)
    test_common_rate(study, results, options)
    for one in results:
        one.trainable = one.cells[-1]["trainable"] or 0
    return study, results, ladders


def choose_rungs(study: FineTuningStudy, plain: RowResult, seeds: int) -> dict[str, dict]:
    """The difficulty of each ladder at which `plain`, at its rate, is neither lost nor perfect on validation."""
    names = [(plain.row, plain.settings.lr, seed, "validation") for seed in range(seeds)]
    scores = {name: float(values.mean()) for name, values in collect(run_cells(study, names)).items()}
    return rules.choose_rungs(LADDERS, scores, {m.name: m.chance or 0.0 for m in study.measures["validation"]})


def step_ratio(study: FineTuningStudy, result: RowResult) -> float:
    """The CPU time of a row's training step in that of its control's, measured once, to a tenth."""

    def work(folder: Path) -> dict:
        sight, steps = sight_of(study.out, 0), []
        micro = encoded(sight, "pretraining", "validation", ROWS_A_STEP, 0).batch(study.processor, range(ROWS_A_STEP))
        for settings in (result.settings, result.control.settings):
            model = start(settings, sight)
            steps.append((partial(encoded_loss, model, micro), make_optimizer(model, 1e-4)))
        return {"ratio": paired_ratio(steps)}

    file = engine.cell_folder(study.out, "step", RECIPE) / "step.json"
    return round(engine.finish_cell(file, "a step of split and of plain", work)["ratio"], 1)


def curves(study: FineTuningStudy, result: RowResult) -> list[dict]:
    """By seed, what `learn` returns of each phase; empty where a run has diverged."""
    names = [(result.row, result.settings.lr, seed, "test") for seed in range(result.seeds)]
    files = [cell_file(study, *name).parent / FACTS for name in names]
    return [json.loads(file.read_text()) for file in files] if all(file.exists() for file in files) else []


def shares(study: FineTuningStudy, result: RowResult) -> list[dict]:
    """By seed and kind of needle, the shares of the attention of each layer that LOOKS names, in percent."""
    found = []
    for seed in range(result.seeds):
        settings = cell_settings(study, result.row, result.settings.lr, seed)

        def work(folder: Path, settings: Settings = settings) -> dict:
            model = from_nothing(settings, folder, study).eval()
            asked = {kind: ask(kind, study.processor, study.world.device) for kind in LOOKED_AT}
            layers = {kind: measure_layers(model, one) for kind, one in asked.items()}
            return {kind: [{n: 100 * layer[n] for n in LOOKS} for layer in of_kind] for kind, of_kind in layers.items()}

        file = cell_file(study, result.row, result.settings.lr, seed, "test").with_name("attention.json")
        found.append(engine.finish_cell(file, f"attention, {result.row.name}, seed {seed}", work))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    options = read_flags(ScratchOptions, "train.compare --rows scratch", __doc__, argv)
    if options.quick:
        options = replace(options, **QUICK, most_seeds=options.seeds)
    options = replace(options, processes=options.processes or engine.default_processes("cpu"))

    def find() -> dict:
        study, results, ladders = compare(options)
        equal = [(one, curves(study, one)) for one in results if one.settings.samples == options.samples]
        of_rows = {one.row.name: (found, shares(study, one)) for one, found in equal if found}
        summary = summarize(study, results, of_rows, PREDICTIONS) | {"ladders": ladders}
        for seed in summary["seeds"]:
            sight_of(options.out, seed)  # so that its seconds count, also where all cells were there
        positive = built.find(options.out, options.processes, built.ORIGINAL) if options.positive else None
        return summary | {"positive": positive}

    engine.run_study(options.out, find, to_markdown, draw, processes=options.processes)
