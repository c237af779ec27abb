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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from eval import figures, scenes
from eval.records import Record
from eval.report import markdown_table
from eval.shift import GROUPS, measure, put_slot
from eval.text import sentences
from lora import adapter
from lora.adapter import DECODER_TARGETS
from model.paligemma import PaliGemma, initialize
from model.processor import Processor
from model.source import EMBEDDED
from model.system_configs import WingsConfig
from model.wings import Wings, attach, route
from train.data.batches import MicroBatch
from train.distributed import join_world
from train.flags import flag
from train.loop import LoopOptions, fit
from train.optim import Rule, count, make_adamw, parameter_groups
from train.studies import engine
from train.studies.encoded import EncodedOrder, answer, encode, encode_pictures, encoded_loss
from train.studies.engine import ScaledOptions, ScaledStudy, choose_rate, describe, difference, matching_rank, spell
from weights.export import export_model
from weights.fingerprint import exact_fingerprint
from weights.load import load_model

VERSION = 1  # of the code that decides a cell's result: raise it to compute all cells again

# half of the text is lookup: it takes the longest to learn
TEXT = ("add", "lookup", "copy", "lookup", "fact", "lookup")
TEXT_STEPS, TEXT_ROWS, TEXT_RATE = 900, 48, 3e-3
STEPS, ROWS_A_STEP = (100, 320), 32  # of tuning in two stages
FIRST_RATE = 3e-3  # of the first stage
FACTOR = 5  # the projector's rate in the second stage over that of the decoder, if it is trained; from the paper
MARGIN = 1.0  # points on the validation pictures that a lower rate may cost
RANK = 16  # of the learners
QUESTION = "What is in the image?"
PUBLISHED = (
    ("text-only forgetting, and learners against it", "in miniature: text tasks before and after pictures"),
    ("attention shift and text, over more than 100 models", "over the rows alone: one point a row"),
    ("LAWS before, in and after the picture", "as published, for each row"),
    ("text and multimodal benchmarks (MMLU, MMMU, …)", "missing: need a language model that can answer them"),
    ("interleaved pictures and text (IIT)", "missing: its questions are not public"),
)
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


def prepare(study: WingsStudy, records: Sequence[Record], rows: int) -> list[MicroBatch]:
    """Causal micro-batches of `rows` records, with features of the vision tower in place of pixels."""
    encoded = encode(records, study.base.vision_tower)
    starts = range(0, len(records), rows)
    return [encoded.batch(study.processor, range(len(records))[start : start + rows], causal=True) for start in starts]


def text_records(steps: int, seed: int) -> list[Record]:
    records = []
    for number in range(steps * TEXT_ROWS):
        s = sentences.sentence(TEXT[number % len(TEXT)], "train", number, seed)
        records.append(Record(f"{s.task}/{number}", f"{s.task}/{number}", (), ((s.prefix, s.suffix),)))
    return records


@lru_cache(maxsize=1)  # cells are computed seed by seed
def pictures_to_learn(study: WingsStudy, seed: int) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """The micro-batches of both stages."""
    first, second = (study.scaled(steps, 2) for steps in STEPS)
    dice, records = random.Random(f"slots/{seed}"), []
    for number in range((first + second) * ROWS_A_STEP):
        s = scenes.sample("scan", "train", number, seed)
        name = f"scan/{number}"
        records.append(Record(name, name, (lambda s=s: s.image,), ((put_slot(QUESTION, dice.random()), s.suffix),)))
    micros = prepare(study, records, ROWS_A_STEP)
    return micros[:first], micros[first:]


@lru_cache(maxsize=2)
def pictures_to_ask(study: WingsStudy, split: str) -> tuple[list[scenes.Sample], torch.Tensor]:
    """Samples of a split, and the features of their pictures."""
    samples = [scenes.sample("scan", split, number) for number in range(study.limit)]
    return samples, encode_pictures([lambda s=s: s.image for s in samples], study.base.vision_tower)


def grade_text(study: WingsStudy, model: PaliGemma) -> dict[str, list[int]]:
    """Right or wrong, by task, for sentences of the test split."""
    grades = {}
    for task in sentences.TASKS:
        asked = [sentences.sentence(task, "test", number) for number in range(study.limit)]
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


def learn(
    study: WingsStudy, model: PaliGemma, rules: Sequence[Rule], micros: Sequence[MicroBatch], folder: Path
) -> PaliGemma:
    """Train what `rules` name on the micro-batches; an interrupted run in folder/run goes on."""
    run = folder / "run"
    run.mkdir(parents=True, exist_ok=True)
    optimizer = make_adamw(parameter_groups(model, rules), (0.9, 0.98))
    order = EncodedOrder(len(micros), micros.__getitem__)
    options = LoopOptions(schedule="cosine", warmup=0.05, clip=1.0)
    fit(model, optimizer, order, encoded_loss, options, run, join_world("cpu"))
    return model.eval()


def keep(model: PaliGemma, folder: Path) -> None:
    """Write `model` to folder/model, and delete the checkpoints of its training."""
    shutil.rmtree(folder / "model", ignore_errors=True)
    export_model(model, folder / "model")
    shutil.rmtree(folder / "run")


def train_text(study: WingsStudy, seed: int, folder: Path) -> dict:
    """The decoder trained on text alone, beside the embedded vision tower."""
    model = initialize(PaliGemma(study.base.config), seed)
    model.vision_tower.load_state_dict(study.base.vision_tower.state_dict())
    micros = prepare(study, text_records(study.scaled(TEXT_STEPS, 2), seed), TEXT_ROWS)
    keep(learn(study, model, [Rule(r"language_model\..*", TEXT_RATE, 1e-9)], micros, folder), folder)
    return {"text": grade_text(study, model)}


def first_stage(study: WingsStudy, learners: bool, base: Path, seed: int, folder: Path) -> dict:
    """Train the projector, and visual learners if asked for, on the first pictures."""
    model, (micros, _) = load_model(base), pictures_to_learn(study, seed)
    if learners:
        model = attach(model, RANK, seed=seed)
    rule = Rule(f"{PROJECTOR}|{VISUAL}" if learners else PROJECTOR, FIRST_RATE, 1e-9)
    keep(learn(study, model, [rule], micros, folder), folder)
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
    learn(study, model, rules, micros, folder)
    shutil.rmtree(folder / "run")
    asked = [(sample.image, put_slot(QUESTION)) for sample in pictures_to_ask(study, "test")[0]]
    attention = measure(model, study.processor, asked, causal=True)
    return {
        "validation": 100 * float(np.mean(grade_pictures(study, model, "validation"))),
        "text": grade_text(study, model),
        "pictures": grade_pictures(study, model, "test"),
        "shift": attention.each.tolist(),
        "laws": attention.shares.tolist(),
        "trained": count(p for p in model.parameters() if p.requires_grad),
    }


def lora_rank(model: PaliGemma) -> int:
    """The smallest rank of LoRA with at least as many parameters as the learners and routers."""
    with torch.device("meta"):
        with_learners = Wings(WingsConfig.beside(model.config, rank=RANK))
    return matching_rank(model.config, DECODER_TARGETS, count(with_learners.parameters()) - count(model.parameters()))


@dataclass(frozen=True)
class WingsResults:
    """Cells by seed: of the text-only decoders, and of each row at its chosen rate; validation by row and rate."""

    before: list[dict]
    rows: dict[str, list[dict]]
    rates: dict[str, float]
    validation: dict[str, dict[float, float]]
    cpu_seconds: float


def collect(study: WingsStudy, seeds: Sequence[int]) -> WingsResults:
    """All cells, from disk where they are finished. Rates are tried on the first seed."""
    seconds: dict[Path, float] = {}

    def finish(title: str, parts: tuple, work: Callable[[Path], dict]) -> tuple[dict, Path]:
        """The result of a cell, and the folder of its model."""
        result, folder = study.finish(title, parts, work)
        seconds[folder] = result["cpu_seconds"]
        return result, folder / "model"

    def text(seed: int) -> tuple[tuple, dict, Path]:
        decides = (study.scale, study.limit, study.fingerprint, seed, TEXT, TEXT_STEPS, TEXT_ROWS, TEXT_RATE)
        parts = ("wings", VERSION, *decides)
        return parts, *finish(f"text, seed {seed}", parts, partial(train_text, study, seed))

    def tuned(name: str, rate: float, seed: int) -> dict:
        parts, _, base = text(seed)
        learners = ROWS[name].learners
        parts += (learners, STEPS, ROWS_A_STEP, FIRST_RATE, RANK, QUESTION)
        title = f"stage 1 {'with' if learners else 'without'} learners, seed {seed}"
        _, start = finish(title, parts, partial(first_stage, study, learners, base, seed))
        work = partial(second_stage, study, name, rate, start, seed)
        return finish(f"{name}, rate {rate:g}, seed {seed}", (*parts, name, rate, FACTOR), work)[0]

    tried = {name: {rate: tuned(name, rate, seeds[0]) for rate in row.rates} for name, row in ROWS.items()}
    validation = {name: {rate: cell["validation"] for rate, cell in cells.items()} for name, cells in tried.items()}
    rates = {name: choose_rate(by_rate, MARGIN) for name, by_rate in validation.items()}
    rows = {name: [tried[name][rate]] for name, rate in rates.items()}
    for seed in seeds[1:]:
        for name, rate in rates.items():
            rows[name].append(tuned(name, rate, seed))
    return WingsResults([text(seed)[1] for seed in seeds], rows, rates, validation, sum(seconds.values()))


def pooled(cells: Sequence[dict]) -> np.ndarray:
    """Right or wrong (seeds, sentences), in percent, one task after the other."""
    return 100 * np.array([[grade for grades in cell["text"].values() for grade in grades] for cell in cells])


def by_task(cells: Sequence[dict]) -> dict[str, float]:
    return {task: 100 * float(np.mean([cell["text"][task] for cell in cells])) for task in sentences.TASKS}


def summarize(study: WingsStudy, results: WingsResults, seeds: Sequence[int]) -> dict:
    """comparison.json."""
    rows, scores, before = {}, {}, pooled(results.before)
    for name, cells in results.rows.items():
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
            "rate": results.rates[name],
            "validation": {f"{rate:g}": accuracy for rate, accuracy in results.validation[name].items()},
            "laws_percent": np.mean([cell["laws"] for cell in cells], axis=0).tolist(),
            "flat": int(np.isnan(shift).sum()),
        }
    for name, control in PAIRS.items():
        gains = {what: difference(scores[name][what], scores[control][what]) for what in scores[name]}
        rows[name] |= {"control": control, "difference": gains}
    return {
        "seeds": list(seeds),
        "scale": study.scale,
        "limit": study.limit,
        "steps": STEPS,
        "rank": RANK,
        "cpu_seconds": round(results.cpu_seconds),
        "rows": rows,
        "before": {"text": describe(before), "by_task": by_task(results.before)},
    }


def to_markdown(summary: dict) -> str:
    """comparison.md."""
    rows, before = summary["rows"], summary["before"]
    head = ["row", "trained in stage 2", "parameters", "rate", "text, %", "change"]
    head += [*sentences.TASKS, "pictures, %", "attention shift"]
    tasks = (f"{accuracy:.0f}" for accuracy in before["by_task"].values())
    body = [["before", "", "", "", spell(before["text"]), "", *tasks, "", ""]]
    body += [
        [
            name,
            row["trains"],
            f"{row['trained']:,}",
            f"{row['rate']:g}",
            spell(row["text"]),
            spell(row["change"]),
            *(f"{value:.0f}" for value in row["by_task"].values()),
            spell(row["pictures"]),
            spell(row["shift"]),
        ]
        for name, row in rows.items()
    ]
    pairs = [
        [f"{name} - {row['control']}", *(spell(row["difference"][what]) for what in ("text", "pictures", "shift"))]
        for name, row in rows.items()
        if "control" in row
    ]
    return engine.compose(
        "Text-only forgetting: tuned on pictures with and without WINGS's learners",
        f"{len(summary['seeds'])} seed(s), each with a decoder of its own that has learned text alone; "
        f"{summary['limit']} questions of each text task and as many pictures of the test split. Text: answers right "
        "in every letter. Pictures: objects named in their place. In brackets: 95 % bootstrap intervals over seeds and "
        "questions. `*`: the interval excludes 0; n.s.: it does not.",
        markdown_table(head, body),
        "## The learners against the same without them",
        markdown_table(["pair", "text, points", "pictures, points", "attention shift"], pairs),
        "![results](wings.png)",
        conclusions=conclusions(summary),
        published=PUBLISHED,
    )


def conclusions(summary: dict) -> list[str]:
    """The differences in words, and what limits them."""
    rows = summary["rows"]
    differences = {
        f"{name} against {row['control']}": {what: row["difference"][what] for what in ("text", "pictures")}
        for name, row in rows.items()
        if "control" in row
    }
    lines = engine.conclude(differences, len(summary["seeds"]))
    tried = "; ".join(
        f"{name} " + ", ".join(f"{rate} ({accuracy:.1f})" for rate, accuracy in row["validation"].items())
        for name, row in rows.items()
    )
    lines.append(f"Rates tried, with the validation pictures read in %: {tried}.")
    shifts = [row["shift"]["mean"] for row in rows.values()]
    texts = [row["text"]["mean"] for row in rows.values()]
    if len(set(shifts)) > 1 and len(set(texts)) > 1:
        rho = float(np.corrcoef(shifts, texts)[0, 1])
        lines.append(
            f"Over the {len(rows)} rows, attention shift and what is left of the text correlate with {rho:+.2f}; the "
            "paper finds that a larger shift goes with less text."
        )
    if flat := sum(row["flat"] for row in rows.values()):
        lines.append(f"{flat} prompts have no correlation of LAWS, since a curve is flat; they count as 1.")
    lines.append(
        "Four layers are few points for a correlation, and a decoder of a million parameters is no language "
        "model: this tries the claim's mechanism, not its size."
    )
    return lines


def draw(summary: dict) -> dict[str, list[Image.Image]]:
    """wings.png: text, pictures and shift of each row, and its LAWS."""
    rows = summary["rows"]
    before = ("before", summary["before"]["text"]["mean"])
    charts = [
        engine.chart({name: row[what] for name, row in rows.items()}, title, label, reference)
        for what, title, label, reference in (
            ("text", "Text after tuning on pictures", "right answers, %", before),
            ("pictures", "Pictures", "objects named in their place, %", None),
            ("shift", "Attention shift", "1 - correlation of LAWS before and after the picture", None),
        )
    ]
    for name, row in rows.items():
        curves = zip(GROUPS, zip(*row["laws_percent"], strict=True), strict=True)
        lines = {group: list(enumerate(curve, start=1)) for group, curve in curves}
        charts.append(figures.line_chart(lines, f"{name}: LAWS", "layer", "% of all attention", height=260))
    return {"wings.png": charts}


def main(argv: Sequence[str] | None = None) -> None:
    options = engine.read_options(WingsOptions, "wings", __doc__, argv)
    base, seeds = load_model(EMBEDDED), range(options.seeds)
    fingerprint = exact_fingerprint(base)
    processor = Processor.from_source(EMBEDDED)
    study = WingsStudy(options.out, options.scale, options.limit, fingerprint, processor, base)
    engine.run_study(options.out, lambda: summarize(study, collect(study, seeds), seeds), to_markdown, draw)
