"""Study: does a language model forget text while it learns to see, and do the learners of WINGS keep it from that?

    python -m train.compare --rows wings

In: the embedded eye, and a small decoder that knows nothing but text: sums, copying, lookup and facts, those of
`eval/text/sentences.py`. Out: comparison.md, comparison.json and wings.png in --out: what is left of the text after
tuning on pictures alone, how well the pictures are read, and the attention shift, with 95 % intervals. Next: nothing;
these are the results.

The decoder is trained from nothing on text, once for each seed, and joined with the eye by a fresh projector. Every row
then learns from the same pictures in the same order: what is in each of the 16 cells, the picture in the middle of the
question. First the projector learns (and WINGS's visual learners), then what the row says. All that reads pictures here
reads causally. A row's rate in the second stage is, of a few, the lowest that reads the validation pictures of the
first seed about as well as the best. Two pairs of rows differ in nothing but the learners:

    wings     decoder, projector, learners and routers      against full, decoder and projector
    learners  projector, learners and routers               against lora, projector and as many parameters of LoRA
"""

import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch

from eval import figures, scenes
from eval.shift import GROUPS, measure, put_slot
from eval.statistics import bootstrap
from eval.text import sentences
from lora import adapter
from lora.adapter import DECODER_TARGETS
from model.common import write_text
from model.generate import generate
from model.paligemma import PaliGemma, initialize
from model.processor import Processor
from model.source import EMBEDDED
from model.system_configs import WingsConfig
from model.wings import Wings, attach, route
from train.data.batches import MicroBatch, collate
from train.data.records import Record
from train.distributed import join_world
from train.loop import LoopOptions, fit
from train.optim import Rule, count, make_adamw, parameter_groups
from train.signals import same_command_goes_on
from train.studies.attention import spell, stack, table
from train.studies.cells import cell, digest, study_arguments
from train.supervised import supervised_loss
from weights.export import export_model
from weights.fingerprint import exact_fingerprint
from weights.load import load_model

VERSION = 1  # of the code that decides a cell's result: raise it, and all cells are done again

# half of the text is lookup: it takes the longest to learn
TEXT = ("add", "lookup", "copy", "lookup", "fact", "lookup")
TEXT_STEPS, TEXT_ROWS, TEXT_RATE = 900, 48, 3e-3
STEPS, ROWS_A_STEP = (100, 320), 32  # of tuning in two stages
FIRST_RATE = 3e-3  # of the first stage
FACTOR = 5  # of the projector's rate in the second stage, against that of the decoder, where it learns: the paper's
MARGIN = 1.0  # points on the validation pictures that a lower rate may cost
RANK = 16  # of the learners
QUESTION = "What is in the image?"
PROJECTOR, VISUAL, LEARNERS = r"multi_modal_projector\..*", r".*\.visual\..*", r".*\.(visual|textual|router)\..*"


@dataclass(frozen=True)
class Row:
    """One way of tuning: with learners or not, whether the decoder learns in the second stage, and rates to try."""

    title: str
    learners: bool
    decoder: bool
    rates: tuple[float, ...]


ROWS = {
    "wings": Row("decoder, learners, routers", True, True, (5e-4, 1e-3)),
    "full": Row("decoder", False, True, (5e-4, 1e-3)),
    "learners": Row("learners, routers", True, False, (5e-3, 1e-2)),
    "lora": Row("LoRA", False, False, (3e-3, 6e-3)),
}
PAIRS = {"wings": "full", "learners": "lora"}


@dataclass(frozen=True)
class Bench:
    """What all cells share: where they are kept, the length of all training, and how much is asked."""

    out: Path
    scale: float
    limit: int
    processor: Processor
    eye: PaliGemma
    fingerprint: str

    def steps(self, count: int) -> int:
        return max(2, round(self.scale * count))


# ---------------------------------------------------------------------------------------------------------------------
# What is learned, and what is asked
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """Micro-batches that were made beforehand, one a step: an order for the training loop."""

    micros: Sequence[MicroBatch]

    @property
    def total(self) -> int:
        return len(self.micros)

    def steps(self, first: int, workers: int, pin: bool) -> Iterator[list[MicroBatch]]:
        for micro in self.micros[first:]:
            yield [micro]


@torch.no_grad()
def prepare(bench: Bench, records: Sequence[Record], rows: int) -> list[MicroBatch]:
    """Micro-batches of `rows` records, causal. In place of pixels they have what the frozen eye makes of them."""
    micros = []
    for start in range(0, len(records), rows):
        micro = collate(records[start : start + rows], bench.processor)
        pixels = micro.batch.pixel_values
        features = bench.eye.vision_tower(pixels) if len(pixels) else pixels.new_zeros(0, *feature_shape(bench.eye))
        batch = replace(micro.batch, pixel_values=pixels[:0], token_type_ids=torch.ones_like(micro.batch.input_ids))
        micros.append(replace(micro, batch=batch, features=features))
    return micros


def feature_shape(eye: PaliGemma) -> tuple[int, int]:
    return eye.config.num_image_tokens, eye.config.vision.hidden_size


def projected_loss(model: PaliGemma, micro: MicroBatch) -> torch.Tensor:
    """The loss, from features of the eye that the projector has not seen yet."""
    return supervised_loss(model, replace(micro, features=model.multi_modal_projector(micro.features)))


def text_records(steps: int, seed: int) -> list[Record]:
    records = []
    for number in range(steps * TEXT_ROWS):
        s = sentences.sentence(TEXT[number % len(TEXT)], "train", number, seed)
        records.append(Record(f"{s.task}/{number}", f"{s.task}/{number}", None, s.prefix, s.suffix))
    return records


@lru_cache(maxsize=1)  # cells go seed by seed
def pictures_to_learn(bench: Bench, seed: int) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """The micro-batches of both stages."""
    first, second = map(bench.steps, STEPS)
    dice, records = random.Random(f"slots/{seed}"), []
    for number in range((first + second) * ROWS_A_STEP):
        s = scenes.sample("scan", "train", number, seed)
        name = f"scan/{number}"
        records.append(Record(name, name, lambda s=s: s.image, put_slot(QUESTION, dice.random()), s.suffix))
    micros = prepare(bench, records, ROWS_A_STEP)
    return micros[:first], micros[first:]


@torch.no_grad()
def answer(
    model: PaliGemma,
    processor: Processor,
    prompts: Sequence[str],
    features: torch.Tensor | None = None,
    max_new_tokens: int = 20,
    rows: int = 100,
) -> list[str]:
    """Answers to prompts, each with one picture's features of the eye (prompts, I, W), or to text alone."""
    model.eval()
    answers = []
    for start in range(0, len(prompts), rows):
        part = slice(start, start + rows)
        batch = processor.pad([processor.layout(int(features is not None), prompt) for prompt in prompts[part]])
        seen = None if features is None else model.multi_modal_projector(features[part])
        new = generate(
            model,
            batch.input_ids,
            None,
            torch.ones_like(batch.input_ids),
            batch.attention_mask,
            max_new_tokens,
            image_features=seen,
        )
        answers += [processor.decode(row) for row in new]
    return answers


def grade_text(bench: Bench, model: PaliGemma) -> dict[str, list[int]]:
    """Right or wrong, by task, for sentences of the test split."""
    grades = {}
    for task in sentences.TASKS:
        asked = [sentences.sentence(task, "test", number) for number in range(bench.limit)]
        told = answer(model, bench.processor, [s.prefix for s in asked])
        grades[task] = [int(said == s.suffix) for said, s in zip(told, asked, strict=True)]
    return grades


def grade_pictures(bench: Bench, model: PaliGemma, split: str) -> list[float]:
    """For each picture of a split the share of its objects that are named in their place."""
    asked, features = pictures_to_ask(bench, split)
    told = answer(model, bench.processor, [put_slot(QUESTION)] * len(asked), features)
    grades = []
    for said, sample in zip(told, asked, strict=True):
        words = (said.split() + [""] * 16)[:16]
        hits = [word == name for word, name in zip(words, sample.suffix.split(), strict=True) if name != scenes.NONE]
        grades.append(sum(hits) / len(hits))
    return grades


@lru_cache(maxsize=2)
@torch.no_grad()
def pictures_to_ask(bench: Bench, split: str) -> tuple[list[scenes.Sample], torch.Tensor]:
    samples = [scenes.sample("scan", split, number) for number in range(bench.limit)]
    pixels = bench.processor([s.image for s in samples], [QUESTION] * len(samples)).pixel_values
    return samples, bench.eye.vision_tower(pixels)


# ---------------------------------------------------------------------------------------------------------------------
# Cells
# ---------------------------------------------------------------------------------------------------------------------


def learn(model: PaliGemma, rules: Sequence[Rule], micros: Sequence[MicroBatch], bench: Bench, run: Path) -> PaliGemma:
    """Train what `rules` name on the micro-batches, and go on where an interrupted run in `run` ended."""
    run.mkdir(parents=True, exist_ok=True)
    optimizer = make_adamw(parameter_groups(model, rules), (0.9, 0.98))
    options = LoopOptions(schedule="cosine", warmup=0.05, clip=1.0)
    fit(model, optimizer, Prepared(micros), projected_loss, options, run, join_world("cpu"))
    return model.eval()


def keep(model: PaliGemma, folder: Path) -> None:
    """Write `model` to folder/model, and forget the checkpoints of its training in folder/run."""
    shutil.rmtree(folder / "model", ignore_errors=True)
    export_model(model, folder / "model")
    shutil.rmtree(folder / "run")


def train_text(bench: Bench, seed: int, folder: Path) -> dict:
    """The decoder that knows text alone, beside the embedded eye."""
    started = time.process_time()
    model = initialize(PaliGemma(bench.eye.config), seed)
    model.vision_tower.load_state_dict(bench.eye.vision_tower.state_dict())
    micros = prepare(bench, text_records(bench.steps(TEXT_STEPS), seed), TEXT_ROWS)
    learn(model, [Rule(r"language_model\..*", TEXT_RATE, 1e-9)], micros, bench, folder / "run")
    keep(model, folder)
    return {"text": grade_text(bench, model), "cpu_seconds": time.process_time() - started}


def first_stage(bench: Bench, learners: bool, base: Path, seed: int, folder: Path) -> dict:
    """The projector, and visual learners if asked for, on the first pictures."""
    started, (micros, _) = time.process_time(), pictures_to_learn(bench, seed)
    model = load_model(base)
    if learners:
        model = attach(model, RANK, seed=seed)
    rule = Rule(f"{PROJECTOR}|{VISUAL}" if learners else PROJECTOR, FIRST_RATE, 1e-9)
    keep(learn(model, [rule], micros, bench, folder / "run"), folder)
    return {"cpu_seconds": time.process_time() - started}


def second_stage(bench: Bench, name: str, rate: float, base: Path, seed: int, folder: Path) -> dict:
    """What the row says, on the other pictures, and all that is measured after it."""
    started, row, (_, micros) = time.process_time(), ROWS[name], pictures_to_learn(bench, seed)
    model, what = load_model(base), r"language_model\..*"
    if row.learners:
        model, what = route(model, seed), what if row.decoder else LEARNERS
    elif not row.decoder:
        torch.manual_seed(seed)
        rank = lora_rank(model)
        adapter.inject(model, DECODER_TARGETS, rank, 2.0 * rank)
        what = r".*\.lora_[AB]\..*"
    rules = [Rule(PROJECTOR, FACTOR * rate if row.decoder else rate, 1e-8), Rule(what, rate, 1e-8)]
    learn(model, rules, micros, bench, folder / "run")
    shutil.rmtree(folder / "run")
    asked = [(sample.image, put_slot(QUESTION)) for sample in pictures_to_ask(bench, "test")[0]]
    looked = measure(model, bench.processor, asked, causal=True)
    return {
        "validation": 100 * float(np.mean(grade_pictures(bench, model, "validation"))),
        "text": grade_text(bench, model),
        "pictures": grade_pictures(bench, model, "test"),
        "shift": looked.each.tolist(),
        "laws": looked.shares.tolist(),
        "trained": count(p for p in model.parameters() if p.requires_grad),
        "cpu_seconds": time.process_time() - started,
    }


def lora_rank(model: PaliGemma) -> int:
    """The smallest rank of LoRA with at least as many parameters as the learners and routers."""
    with torch.device("meta"):
        with_learners, one = Wings(WingsConfig.beside(model.config, rank=RANK)), PaliGemma(model.config)
        adapter.inject(one, DECODER_TARGETS, 1, 2.0)
    wanted = count(with_learners.parameters()) - count(model.parameters())
    return math.ceil(wanted / count(p for p in one.parameters() if p.requires_grad))


@dataclass(frozen=True)
class Found:
    """Results by seed: of the text-only decoders, and of each row at its chosen rate; validation by row and rate."""

    before: list[dict]
    rows: dict[str, list[dict]]
    rates: dict[str, float]
    validation: dict[str, dict[float, float]]
    cpu_seconds: float


def collect(bench: Bench, seeds: Sequence[int]) -> Found:
    """All cells, from disk where they are there. Rates are tried on the first seed."""
    seconds: dict[str, float] = {}

    def kept(title: str, parts: tuple, work: Callable[[Path], dict]) -> tuple[dict, Path]:
        """The result of a cell, and its model's folder."""
        result = cell(bench.out, title, parts, work)
        seconds[digest(*parts)] = result["cpu_seconds"]
        return result, bench.out / "cells" / digest(*parts) / "model"

    def text(seed: int) -> tuple[tuple, dict, Path]:
        parts = (
            "wings",
            VERSION,
            bench.scale,
            bench.limit,
            bench.fingerprint,
            seed,
            TEXT,
            TEXT_STEPS,
            TEXT_ROWS,
            TEXT_RATE,
        )
        return parts, *kept(f"text, seed {seed}", parts, partial(train_text, bench, seed))

    def tuned(name: str, rate: float, seed: int) -> dict:
        parts, _, base = text(seed)
        learners = ROWS[name].learners
        parts += (learners, STEPS, ROWS_A_STEP, FIRST_RATE, RANK, QUESTION)
        _, start = kept(
            f"stage 1 {'with' if learners else 'without'} learners, seed {seed}",
            parts,
            partial(first_stage, bench, learners, base, seed),
        )
        return kept(
            f"{name}, rate {rate:g}, seed {seed}",
            (*parts, name, rate, FACTOR),
            partial(second_stage, bench, name, rate, start, seed),
        )[0]

    tried = {name: {rate: tuned(name, rate, seeds[0]) for rate in row.rates} for name, row in ROWS.items()}
    validation = {
        name: {rate: result["validation"] for rate, result in of_row.items()} for name, of_row in tried.items()
    }
    rates = {name: choose(of_row) for name, of_row in validation.items()}
    rows = {name: [tried[name][rate]] for name, rate in rates.items()}
    for seed in seeds[1:]:
        for name, rate in rates.items():
            rows[name].append(tuned(name, rate, seed))
    return Found([text(seed)[1] for seed in seeds], rows, rates, validation, sum(seconds.values()))


def choose(validation: dict[float, float]) -> float:
    """The lowest rate whose accuracy on the validation pictures is within MARGIN of the best."""
    return min(rate for rate, accuracy in validation.items() if accuracy >= max(validation.values()) - MARGIN)


# ---------------------------------------------------------------------------------------------------------------------
# What is told
# ---------------------------------------------------------------------------------------------------------------------


def pooled(results: Sequence[dict]) -> np.ndarray:
    """Right or wrong (seeds, sentences), in percent, the tasks one after the other."""
    return 100 * np.array([[grade for grades in result["text"].values() for grade in grades] for result in results])


def interval(scores, is_difference: bool = False) -> dict:
    found = bootstrap(scores)
    return found._asdict() | ({"significant": found.significant} if is_difference else {})


def summarize(bench: Bench, found: Found, seeds: Sequence[int]) -> dict:
    """Everything in comparison.json."""

    def by_task(results: Sequence[dict]) -> dict[str, float]:
        return {task: 100 * float(np.mean([result["text"][task] for result in results])) for task in sentences.TASKS}

    rows, scores, before = {}, {}, pooled(found.before)
    for name, results in found.rows.items():
        shift = np.array([result["shift"] for result in results], dtype=float)
        scores[name] = {
            "text": pooled(results),
            "pictures": 100 * np.array([result["pictures"] for result in results]),
            "shift": np.nan_to_num(shift, nan=1.0),
        }
        rows[name] = {what: interval(values) for what, values in scores[name].items()} | {
            "change": interval(scores[name]["text"] - before, True),
            "by_task": by_task(results),
            "trains": ROWS[name].title,
            "trained": results[0]["trained"],
            "rate": found.rates[name],
            "validation": {f"{rate:g}": accuracy for rate, accuracy in found.validation[name].items()},
            "laws_percent": np.mean([result["laws"] for result in results], axis=0).tolist(),
            "flat": int(np.isnan(shift).sum()),
        }
    for name, control in PAIRS.items():
        rows[name] |= {
            "control": control,
            "difference": {what: interval(scores[name][what] - scores[control][what], True) for what in scores[name]},
        }
    return {
        "seeds": list(seeds),
        "scale": bench.scale,
        "limit": bench.limit,
        "steps": STEPS,
        "rank": RANK,
        "cpu_seconds": round(found.cpu_seconds),
        "rows": rows,
        "before": {"text": interval(before), "by_task": by_task(found.before)},
    }


def tell(summary: dict) -> str:
    """comparison.md: the table, the differences, and what follows from them."""
    rows, before = summary["rows"], summary["before"]
    seeds = len(summary["seeds"])
    lines = [
        "# Text-only forgetting: tuned on pictures with and without WINGS's learners",
        "",
        f"{seeds} seed(s), each with a decoder of its own that has learned text alone; {summary['limit']} questions of "
        "each text task and as many pictures of the test split. Text: answers right in every letter. Pictures: objects "
        "named in their place. In brackets: 95 % bootstrap intervals over seeds and questions. `*`: the interval "
        "excludes 0; n.s.: it does not.",
        "",
    ]
    head = [
        "row",
        "trained in stage 2",
        "parameters",
        "rate",
        "text, %",
        "change",
        *sentences.TASKS,
        "pictures, %",
        "attention shift",
    ]
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
    lines += [*table(head, body), "", "## The learners against the same without them", ""]
    body = [
        [f"{name} - {row['control']}", *(spell(row["difference"][what]) for what in ("text", "pictures", "shift"))]
        for name, row in rows.items()
        if "control" in row
    ]
    lines += table(["pair", "text, points", "pictures, points", "attention shift"], body)
    return "\n".join(
        [
            *lines,
            "",
            "![results](wings.png)",
            "",
            "## In words",
            "",
            *(f"- {sentence}" for sentence in conclude(summary)),
            "",
        ]
    )


def conclude(summary: dict) -> list[str]:
    """What may be said of the claim, and what may not."""
    told = []
    for name, row in summary["rows"].items():
        if "control" not in row:
            continue
        text, pictures = row["difference"]["text"], row["difference"]["pictures"]
        verdict = (
            ("keeps more of the text" if text["mean"] > 0 else "keeps less of the text")
            if text["significant"]
            else "keeps no more and no less of the text"
        )
        also = "reads pictures better" if pictures["mean"] > 0 else "reads pictures worse"
        also = also if pictures["significant"] else "reads pictures no differently"
        told.append(f"{name} {verdict} than {row['control']} ({spell(text)} points), and {also} ({spell(pictures)}).")
    tried = "; ".join(
        f"{name} " + ", ".join(f"{rate} ({accuracy:.1f})" for rate, accuracy in row["validation"].items())
        for name, row in summary["rows"].items()
    )
    told.append(f"Rates tried, with the validation pictures read in %: {tried}.")
    shifts = {name: row["shift"]["mean"] for name, row in summary["rows"].items()}
    texts = {name: row["text"]["mean"] for name, row in summary["rows"].items()}
    if len(set(shifts.values())) > 1 and len(set(texts.values())) > 1:
        rho = float(np.corrcoef(list(shifts.values()), list(texts.values()))[0, 1])
        told.append(
            f"Over the {len(shifts)} rows, attention shift and what is left of the text correlate with "
            f"{rho:+.2f}; the paper finds that a larger shift goes with less text."
        )
    if flat := sum(row["flat"] for row in summary["rows"].values()):
        told.append(f"{flat} prompts have no correlation of LAWS, since a curve is flat; they count as 1.")
    told.append(
        "Four layers are few points for a correlation, and a decoder of a million parameters is no language "
        "model: this tries the claim's mechanism, not its size."
    )
    if len(summary["seeds"]) < 10:
        told.append(f"{len(summary['seeds'])} seed(s) are few: the intervals are rather too narrow than too wide.")
    return told


def draw(summary: dict, out: Path) -> str:
    """wings.png: text, pictures and shift of each row, and its LAWS. Returns the name."""
    rows = summary["rows"]

    def chart(what: str, title: str, label: str, reference: tuple[str, float] | None = None):
        points = [(name, *(row[what][part] for part in ("mean", "low", "high"))) for name, row in rows.items()]
        return figures.interval_chart(points, title, label, reference=reference)

    before = ("before", summary["before"]["text"]["mean"])
    sheets = [
        chart("text", "Text after tuning on pictures", "right answers, %", before),
        chart("pictures", "Pictures", "objects named in their place, %"),
        chart("shift", "Attention shift", "1 - correlation of LAWS before and after the picture"),
    ]
    for name, row in rows.items():
        curves = zip(GROUPS, zip(*row["laws_percent"], strict=True), strict=True)
        lines = {group: list(enumerate(curve, start=1)) for group, curve in curves}
        sheets.append(figures.line_chart(lines, f"{name}: LAWS", "layer", "% of all attention", height=260))
    figures.save(stack(sheets), out / "wings.png")
    return "wings.png"


def main(argv: Sequence[str] | None = None) -> None:
    args = study_arguments(argv, "wings", __doc__, 100, "questions of each text task, and pictures")
    started, eye = time.perf_counter(), load_model(EMBEDDED)
    bench = Bench(args.out, args.scale, args.limit, Processor.from_source(EMBEDDED), eye, exact_fingerprint(eye))
    with same_command_goes_on():
        found = collect(bench, range(args.seeds))
    summary = summarize(bench, found, range(args.seeds))
    text = tell(summary)
    write_text(args.out / "comparison.json", json.dumps(summary, indent=1) + "\n")
    write_text(args.out / "comparison.md", text)
    files = ["comparison.md", "comparison.json", draw(summary, args.out)]
    print(text)
    print(
        f"{summary['cpu_seconds']:,} CPU seconds for all cells; this call {time.perf_counter() - started:,.0f} s on "
        f"{args.threads} threads; in {args.out}: {', '.join(files)}, cells/"
    )
