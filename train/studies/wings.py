"""Study: does a language model forget text while it is tuned on pictures, and do the learners of WINGS prevent that?

    python -m train.compare --rows wings

In: the embedded vision tower, and a small decoder trained on text alone: sums, copying, lookup and facts, those of
`eval/text/sentences.py`. Out: comparison.md, comparison.json and wings.png in --out: what is left of the text after
tuning on pictures alone, how well the pictures are read, and the attention shift, with 95 % intervals.

The decoder is trained from random weights on text, once for each seed, and joined with the vision tower by a fresh
projector. Every row is then trained on the same pictures in the same order. The answer names what is in each of the 16
squares, and the picture is in the middle of the question. In the first stage the projector is trained (and WINGS's
visual learners), in the second what the row says. Attention is causal everywhere. The rate of a row in the second
stage is the lowest of those tried that reads the validation pictures of the first seed about as well as the best. Two
pairs of rows differ in nothing but the learners:

    wings     decoder, projector, learners and routers      against full, decoder and projector
    learners  projector, learners and routers               against lora, projector and as many parameters of LoRA
"""

import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch

from eval import scenes
from eval.records import Record
from eval.shift import Shift, measure, put_slot
from eval.statistics import correlation
from eval.text import sentences
from lora import adapter
from lora.adapter import DECODER_TARGETS
from model.paligemma import PaliGemma
from model.processor import Processor
from model.source import EMBEDDED
from model.system_configs import WingsConfig
from model.wings import Wings, attach, route
from train.data.batches import MicroBatch
from train.embedded import text as text_base
from train.embedded.text import keep, train_text_base
from train.flags import flag
from train.optim import Rule, count
from train.studies import engine
from train.studies.encoded import answer, encode_pictures, learn, prepare
from train.studies.engine import ScaledOptions, ScaledStudy, choose_rate, describe, difference, matching_rank
from train.studies.wings_report import draw, to_markdown
from train.validation import evaluating
from weights.fingerprint import exact_fingerprint
from weights.load import load_model

VERSION = 2  # of the code that decides a cell's result: raise it to compute all cells again

STEPS, ROWS_A_STEP = (100, 320), 32  # of tuning in two stages
CHECKPOINTS = 8  # of a run in the second stage at which text and attention are measured, besides its start
FIRST_RATE = 3e-3  # of the first stage
FACTOR = 5  # the projector's rate in the second stage over that of the decoder, if it is trained; from the paper
TRIED_ON = 0  # the seed on which rates are tried
MARGIN = 1.0  # points on the validation pictures that a lower rate may cost
RANK = 16  # of the learners
QUESTION = "What is in the image?"
PROJECTOR, VISUAL, LEARNERS = r"multi_modal_projector\..*", r".*\.visual\..*", r".*\.(visual|textual|router)\..*"


@dataclass(frozen=True)
class WingsOptions(ScaledOptions):
    """The flags of this study."""

    limit: int = flag(100, "questions of each text task, and pictures", least=1, metavar="N")
    out: Path = flag(Path("runs/compare-wings"), engine.OUT_HELP, metavar="DIR")


@dataclass(frozen=True)
class TuningRow:
    """One way of tuning: with learners or not, whether the decoder is trained in the second stage, rates to try."""

    title: str
    learners: bool
    decoder: bool
    rates: tuple[float, ...]


ROWS = {
    "wings": TuningRow("decoder, learners, routers", True, True, (5e-4, 1e-3)),
    "full": TuningRow("decoder", False, True, (5e-4, 1e-3)),
    "learners": TuningRow("learners, routers", True, False, (5e-3, 1e-2)),
    "lora": TuningRow("LoRA", False, False, (3e-3, 6e-3)),
}
PAIRS = {"wings": "full", "learners": "lora"}


@dataclass(frozen=True)
class WingsStudy(ScaledStudy):
    """base: the embedded model, whose vision tower all rows use."""

    processor: Processor
    base: PaliGemma


@lru_cache(maxsize=1)  # cells are computed seed by seed
def pictures_to_learn(study: WingsStudy, seed: int) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """The micro-batches of both stages."""
    first, second = (study.scaled(steps, 2) for steps in STEPS)
    dice, records = random.Random(f"slots/{seed}"), []
    for number in range((first + second) * ROWS_A_STEP):
        s = scenes.sample("scan", "train", number, seed)
        name = f"scan/{number}"
        records.append(Record(name, name, (lambda s=s: s.image,), ((put_slot(QUESTION, dice.random()), s.suffix),)))
    micros = prepare(records, study.processor, study.base.vision_tower, ROWS_A_STEP)
    return micros[:first], micros[first:]


@lru_cache(maxsize=2)
def pictures_to_ask(study: WingsStudy, split: str) -> tuple[list[scenes.Sample], torch.Tensor]:
    """Samples of a split, and the features of their pictures."""
    samples = [scenes.sample("scan", split, number) for number in range(study.limit)]
    return samples, encode_pictures([lambda s=s: s.image for s in samples], study.base.vision_tower)


def grade_text(study: WingsStudy, model: PaliGemma, most: int | None = None) -> dict[str, list[int]]:
    """Right or wrong, by task, for sentences of the test split: `most` of each, by default the study's limit."""
    grades = {}
    for task in sentences.TASKS:
        asked = [sentences.sentence(task, "test", number) for number in range(most or study.limit)]
        answers = answer(model, study.processor, [s.prefix for s in asked])
        grades[task] = [int(given == s.suffix) for given, s in zip(answers, asked, strict=True)]
    return grades


def grade_pictures(study: WingsStudy, model: PaliGemma, split: str) -> list[float]:
    """For each picture of a split, the share of its objects that are named in their place."""
    asked, features = pictures_to_ask(study, split)
    grades = []
    answers = answer(model, study.processor, [put_slot(QUESTION)] * len(asked), features)
    for given, sample in zip(answers, asked, strict=True):
        words = (given.split() + [""] * 16)[:16]
        hits = [word == name for word, name in zip(words, sample.suffix.split(), strict=True) if name != scenes.NONE]
        grades.append(sum(hits) / len(hits))
    return grades


def train_text(study: WingsStudy, seed: int, folder: Path) -> dict:
    """The decoder trained on text alone, beside the embedded vision tower."""
    model = train_text_base(study.base, study.processor, study.scaled(text_base.STEPS, 2), seed, folder / "run")
    keep(model, folder)
    return {"text": grade_text(study, model), "pictures": grade_pictures(study, model, "test")}


def first_stage(study: WingsStudy, learners: bool, base: Path, seed: int, folder: Path) -> dict:
    """Train the projector, and visual learners if asked for, on the first pictures."""
    model, (micros, _) = load_model(base), pictures_to_learn(study, seed)
    if learners:
        model = attach(model, RANK, seed=seed)
    rule = Rule(f"{PROJECTOR}|{VISUAL}" if learners else PROJECTOR, FIRST_RATE, 1e-9)
    learn(model, [rule], micros, folder / "run")
    keep(model, folder)
    return {}


def second_stage(study: WingsStudy, name: str, rate: float, base: Path, seed: int, folder: Path) -> dict:
    """Train what the row says on the other pictures, and measure."""
    row, (_, micros) = ROWS[name], pictures_to_learn(study, seed)
    model, pattern = load_model(base), r"language_model\..*"
    if row.learners:
        model, pattern = route(model, seed), pattern if row.decoder else LEARNERS
    elif not row.decoder:
        torch.manual_seed(seed)
        rank = lora_rank(model)
        adapter.inject(model, DECODER_TARGETS, rank, 2.0 * rank)
        pattern = r".*\.lora_[AB]\..*"
    rules = [Rule(PROJECTOR, FACTOR * rate if row.decoder else rate, 1e-8), Rule(pattern, rate, 1e-8)]
    course = [measure_checkpoint(study, model, 0)]

    def watch(step: int, progress: dict) -> dict:
        if step % -(-len(micros) // CHECKPOINTS) == 0 or step == len(micros):
            progress.setdefault("course", []).append(measure_checkpoint(study, model, step))
        return {}

    course += learn(model, rules, micros, folder / "run", watch)["course"]
    shutil.rmtree(folder / "run")
    attention = attend(study, model, study.limit)
    return {
        "validation": 100 * float(np.mean(grade_pictures(study, model, "validation"))),
        "text": grade_text(study, model),
        "pictures": grade_pictures(study, model, "test"),
        "shift": attention.each.tolist(),
        "laws": attention.shares.tolist(),
        "trained": count(p for p in model.parameters() if p.requires_grad),
        "course": course,
    }


def attend(study: WingsStudy, model: PaliGemma, most: int) -> Shift:
    """LAWS on test pictures, each in the middle of the question."""
    asked = [(sample.image, put_slot(QUESTION)) for sample in pictures_to_ask(study, "test")[0][:most]]
    return measure(model, study.processor, asked, causal=True)


def measure_checkpoint(study: WingsStudy, model: PaliGemma, step: int) -> dict:
    """Text in percent, attention shift and LAWS after a step of the second stage, on a quarter of the questions."""
    most = quarter(study)
    with evaluating(model, torch.device("cpu")):
        attention = attend(study, model, most)
        grades = grade_text(study, model, most)
    shift = float(np.nan_to_num(attention.each, nan=1.0).mean())
    return {"step": step, "text": mean_of(grades), "shift": shift, "laws": attention.shares.tolist()}


def quarter(study: WingsStudy) -> int:
    return max(1, study.limit // 4)


def mean_of(grades: dict[str, list[int]], most: int | None = None) -> float:
    """Percent right of the first `most` sentences of each task."""
    return 100 * float(np.mean([of_task[:most] for of_task in grades.values()]))


def lora_rank(model: PaliGemma) -> int:
    """The smallest rank of LoRA with at least as many parameters as the learners and routers."""
    with torch.device("meta"):
        with_learners = Wings(WingsConfig.beside(model.config, rank=RANK))
    return matching_rank(model.config, DECODER_TARGETS, count(with_learners.parameters()) - count(model.parameters()))


@dataclass(frozen=True)
class WingsResults:
    """Cells: of the text-only decoders by seed, and of each row by rate and seed; the rate that is chosen for a row."""

    before: list[dict]
    runs: dict[tuple[str, float, int], dict]
    rates: dict[str, float]
    cpu_seconds: float

    def of_row(self, name: str) -> list[dict]:
        """The cells of a row at its rate, by seed."""
        return [cell for (row, rate, _), cell in self.runs.items() if (row, rate) == (name, self.rates[name])]


class Cells:
    """The cells of a study by what decides them: computed, or read from disk where they are finished."""

    def __init__(self, options: WingsOptions):
        base, processor = load_model(EMBEDDED), Processor.from_source(EMBEDDED)
        fingerprint = exact_fingerprint(base)
        self.study = WingsStudy(options.out, options.scale, options.limit, fingerprint, processor, base)
        self.seconds: dict[Path, float] = {}

    def finish(self, title: str, parts: tuple, work: Callable[[Path], dict]) -> tuple[tuple, dict, Path]:
        """`parts`, which decide a cell, its result, and the folder of its model."""
        result, folder = self.study.finish(title, parts, work)
        self.seconds[folder] = result["cpu_seconds"]
        return parts, result, folder / "model"

    def text(self, seed: int) -> tuple[tuple, dict, Path]:
        study = self.study
        parts = ("wings", VERSION, study.scale, study.limit, study.fingerprint, seed, *text_base.RECIPE)
        return self.finish(f"text, seed {seed}", parts, partial(train_text, study, seed))

    def first(self, learners: bool, seed: int) -> tuple[tuple, dict, Path]:
        """The first stage."""
        parts, _, base = self.text(seed)
        parts += (learners, STEPS, ROWS_A_STEP, FIRST_RATE, RANK, QUESTION)
        title = f"stage 1 {'with' if learners else 'without'} learners, seed {seed}"
        return self.finish(title, parts, partial(first_stage, self.study, learners, base, seed))

    def tuned(self, name: str, rate: float, seed: int) -> tuple[tuple, dict, Path]:
        """The second stage of a row."""
        parts, _, start = self.first(ROWS[name].learners, seed)
        parts += (name, rate, FACTOR, CHECKPOINTS)
        work = partial(second_stage, self.study, name, rate, start, seed)
        return self.finish(f"{name}, rate {rate:g}, seed {seed}", parts, work)

    def get(self, kind: str, *arguments) -> dict:
        """The result of a cell, `kind` "text", "first" or "tuned"."""
        return {"text": self.text, "first": self.first, "tuned": self.tuned}[kind](*arguments)[1]


def spell_job(job: tuple, result: dict) -> str:
    return f"{' '.join(map(str, job))}: {result['cpu_seconds']:.0f} CPU seconds"


open_cells = lru_cache(maxsize=1)(Cells)  # once in each process


def compute(options: WingsOptions, job: tuple) -> dict:
    return open_cells(options).get(*job)


def collect(options: WingsOptions, cells: Cells, processes: int) -> WingsResults:
    """All cells. Those that do not need each other are computed side by side."""

    def finish(jobs: Sequence[tuple]) -> list[dict]:
        if processes > 1:
            engine.side_by_side(partial(compute, options), jobs, processes, spell_job)
        return [cells.get(*job) for job in jobs]

    seeds = range(options.seeds)
    before = finish([("text", seed) for seed in seeds])
    finish([("first", learners, seed) for seed in seeds for learners in (True, False)])
    tried = [(name, rate, TRIED_ON) for name, row in ROWS.items() for rate in row.rates]
    runs = dict(zip(tried, finish([("tuned", *run) for run in tried]), strict=True))
    rates = {name: choose_rate(validation(runs, name), MARGIN) for name in ROWS}
    others = [(name, rate, seed) for seed in seeds if seed != TRIED_ON for name, rate in rates.items()]
    runs |= zip(others, finish([("tuned", *run) for run in others]), strict=True)
    return WingsResults(before, runs, rates, sum(cells.seconds.values()))


def validation(runs: Mapping[tuple[str, float, int], dict], name: str) -> dict[float, float]:
    """Percent of the validation pictures, by the rates that were tried for a row."""
    return {rate: cell["validation"] for (row, rate, seed), cell in runs.items() if (row, seed) == (name, TRIED_ON)}


def pooled(cells: Sequence[dict]) -> np.ndarray:
    """Right or wrong (seeds, sentences), in percent, one task after the other."""
    return 100 * np.array([[grade for grades in cell["text"].values() for grade in grades] for cell in cells])


def checkpoints(study: WingsStudy, results: WingsResults) -> list[dict]:
    """Every checkpoint of the second stage: its attention shift, and the points of text that it has lost."""
    known = [mean_of(cell["text"], quarter(study)) for cell in results.before]
    return [
        {"row": name, "rate": rate, "seed": seed, "step": one["step"], "shift": one["shift"]}
        | {"lost": known[seed] - one["text"]}
        for (name, rate, seed), cell in results.runs.items()
        for one in cell["course"][1:]  # runs share their starts
    ]


def by_task(cells: Sequence[dict]) -> dict[str, float]:
    return {task: 100 * float(np.mean([cell["text"][task] for cell in cells])) for task in sentences.TASKS}


def summarize(study: WingsStudy, results: WingsResults, seeds: Sequence[int]) -> dict:
    """comparison.json."""
    rows, scores, before = {}, {}, pooled(results.before)
    for name, rate in results.rates.items():
        cells = results.of_row(name)
        shift = np.array([cell["shift"] for cell in cells], dtype=float)
        scores[name] = {
            "text": pooled(cells),
            "pictures": 100 * np.array([cell["pictures"] for cell in cells]),
            "shift": np.nan_to_num(shift, nan=1.0),
        }
        rows[name] = {what: describe(values) for what, values in scores[name].items()} | {
            "change": difference(scores[name]["text"], before),
            "by_task": by_task(cells),
            "trains": ROWS[name].title,
            "trained": cells[0]["trained"],
            "rate": rate,
            "validation": {f"{rate:g}": accuracy for rate, accuracy in validation(results.runs, name).items()},
            "laws_percent": np.mean([cell["laws"] for cell in cells], axis=0).tolist(),
            "laws_percent_before": np.mean([cell["course"][0]["laws"] for cell in cells], axis=0).tolist(),
            "flat": int(np.isnan(shift).sum()),
        }
    for name, control in PAIRS.items():
        gains = {what: difference(scores[name][what], scores[control][what]) for what in scores[name]}
        rows[name] |= {"control": control, "difference": gains}
    points = checkpoints(study, results)
    run = [f"{one['row']} {one['rate']} {one['seed']}" for one in points]
    rho = correlation([one["shift"] for one in points], [one["lost"] for one in points], run)
    pictures = 100 * np.array([cell["pictures"] for cell in results.before])
    return {
        "seeds": list(seeds),
        "scale": study.scale,
        "limit": study.limit,
        "steps": STEPS,
        "rank": RANK,
        "cpu_seconds": round(results.cpu_seconds),
        "rows": rows,
        "before": {"text": describe(before), "pictures": describe(pictures), "by_task": by_task(results.before)},
        "runs": len(set(run)),
        "checkpoints": points,
        "correlation": rho and engine.verdict(rho),
    }


def main(argv: Sequence[str] | None = None) -> None:
    options = engine.read_options(WingsOptions, "wings", __doc__, argv)
    cells, processes = Cells(options), min(2, options.threads)

    def find() -> dict:
        return summarize(cells.study, collect(options, cells, processes), range(options.seeds))

    engine.run_study(options.out, find, to_markdown, draw, workers=f"{processes} processes")
