"""The cells of the study of WINGS: the decoder of text, both stages of tuning, and the measures of a model.

In: a `WingsStudy` and what decides a cell, see `train/studies/wings.py`. Out: the cell's result, and its model on disk.
"""

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from eval import scenes
from eval.records import Record
from eval.shift import Shift, laws_of_rows, put_slot
from eval.text import sentences
from lora import adapter
from lora.adapter import DECODER_TARGETS
from model.paligemma import PaliGemma
from model.processor import Processor
from model.system_configs import WingsConfig
from model.wings import Wings, attach, route
from train.data.batches import MicroBatch
from train.embedded import text as text_base
from train.embedded.text import keep, text_record, train_text_base
from train.optim import Rule, count
from train.studies.encoded import EncodedRecords, answer, encode_pictures, learn
from train.studies.engine import ScaledStudy, matching_rank
from train.validation import evaluating
from weights.load import load_model

ROWS_A_STEP = 32
FEATURES = "features.safetensors"  # of the training pictures
FRESH = 1 << 20  # the number of the first sentence that no decoder has been trained on
FIRST_RATE = 3e-3  # of the first stage
RATES = {"wings": 1e-3, "full": 1e-3, "learners": 1e-2, "lora": 6e-3}  # of the second stage, at factor 1
FACTOR = 5  # the projector's rate in the second stage over that of the decoder, if it is trained; from the paper
RANK = 16  # of the learners
QUESTION = "What is in the image?"
PROJECTOR, VISUAL, LEARNERS = r"multi_modal_projector\..*", r".*\.visual\..*", r".*\.(visual|textual|router)\..*"


@dataclass(frozen=True)
class TuningRow:
    """One way of tuning: with learners or not, and whether the decoder is trained in the second stage."""

    title: str
    learners: bool
    decoder: bool


ROWS = {
    "wings": TuningRow("decoder, learners, routers", True, True),
    "full": TuningRow("decoder", False, True),
    "learners": TuningRow("learners, routers", True, False),
    "lora": TuningRow("LoRA", False, False),
}


@dataclass(frozen=True, eq=False)
class Plan:
    """factors: of RATES, to try first. steps: of tuning in two stages. checkpoints: of a run in the second stage, at
    which it is measured. one_decoder: the text model of seed 0 serves all seeds. mixed: shares of text in the training
    of the second stage, for further rows."""

    rows: Sequence[str]
    factors: tuple[float, ...]
    steps: tuple[int, int]
    checkpoints: int
    one_decoder: bool
    mixed: tuple[float, ...] = ()


FULL = Plan(tuple(ROWS), (0.25, 0.5, 1.0), (100, 320), 8, False, (0.05, 0.2))
MIXED = ("wings", "full")  # the rows that are trained with text as well
# learners or LoRA alone do not learn the pictures in so few steps
QUICK = Plan(("wings", "full"), (1.0,), (100, 240), 3, True)


@dataclass(frozen=True)
class WingsStudy(ScaledStudy):
    """base: the embedded model, whose vision tower all rows use."""

    processor: Processor
    base: PaliGemma
    plan: Plan = FULL

    @property
    def steps(self) -> tuple[int, int]:
        """Of both stages."""
        first, second = (self.scaled(steps, 2) for steps in self.plan.steps)
        return first, second


def encode_training(study: WingsStudy, folder: Path) -> dict:
    """Encode the pictures that all seeds are trained on."""
    samples = [scenes.sample("scan", "train", number) for number in range(sum(study.steps) * ROWS_A_STEP)]
    features = encode_pictures([lambda s=s: s.image for s in samples], study.base.vision_tower)
    save_file({"features": features}, folder / FEATURES)
    return {}


@lru_cache(maxsize=1)  # cells are computed seed by seed
def pictures_to_learn(
    study: WingsStudy, pictures: Path, seed: int, text: float = 0.0
) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """The micro-batches of both stages, in the order of a seed. pictures: the folder of `encode_training`.

    text: the share of the second stage's rows that are sentences in place of pictures, evenly spread.
    """
    features, dice = load_file(pictures / FEATURES)["features"], random.Random(f"pictures/{seed}")
    records, first = [], study.steps[0] * ROWS_A_STEP
    for place, number in enumerate(dice.sample(range(len(features)), len(features))):
        s = scenes.sample("scan", "train", number)
        name = f"scan/{number}"
        record = Record(name, name, (lambda s=s: s.image,), ((put_slot(QUESTION, dice.random()), s.suffix),))
        if place >= first and int((place + 1) * text) > (sentence := int(place * text)):
            record = text_record(FRESH + sentence, seed, tuple(sentences.TASKS))
        records.append(record)
    numbers = {f"scan/{number}": number for number in range(len(features))}
    micros = EncodedRecords(records, features, numbers).in_order(study.processor, ROWS_A_STEP)
    return micros[: study.steps[0]], micros[study.steps[0] :]


@lru_cache(maxsize=2)
def pictures_to_ask(study: WingsStudy, split: str) -> tuple[list[scenes.Sample], torch.Tensor]:
    """Samples of a split, and the features of their pictures."""
    samples = [scenes.sample("scan", split, number) for number in range(study.limit)]
    return samples, encode_pictures([lambda s=s: s.image for s in samples], study.base.vision_tower)


def grade_text(study: WingsStudy, model: PaliGemma, most: int | None = None) -> dict[str, list[int]]:
    """Right or wrong, by task, for sentences of the test split: `most` of each, by default the study's limit."""
    numbers = range(most or study.limit)
    asked = [sentences.sentence(task, "test", number) for task in sentences.TASKS for number in numbers]
    answers = answer(model, study.processor, [s.prefix for s in asked])
    grades: dict[str, list[int]] = {task: [] for task in sentences.TASKS}
    for given, s in zip(answers, asked, strict=True):
        grades[s.task].append(int(given == s.suffix))
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


def attend(study: WingsStudy, model: PaliGemma, most: int) -> Shift:
    """LAWS on test pictures, each in the middle of the question."""
    features = pictures_to_ask(study, "test")[1][:most]
    batch = study.processor.pad([study.processor.layout(1, put_slot(QUESTION))] * len(features))
    laws = laws_of_rows(
        model,
        "the test pictures",
        batch.input_ids,
        pixel_values=None,
        image_features=model.multi_modal_projector(features),
        token_type_ids=torch.ones_like(batch.input_ids),
    )
    return Shift(laws, np.full(len(laws), batch.input_ids.shape[1]))


def grade(study: WingsStudy, model: PaliGemma) -> dict:
    """All measures of a model on the test split."""
    with evaluating(model, torch.device("cpu")):
        attention = attend(study, model, study.limit)
        text, pictures = grade_text(study, model), grade_pictures(study, model, "test")
    shift, laws = attention.each.tolist(), attention.shares.tolist()
    return {"text": text, "pictures": pictures, "shift": shift, "laws": laws}


def train_text(study: WingsStudy, seed: int, folder: Path) -> dict:
    """The decoder trained on text alone, beside the embedded vision tower."""
    model = train_text_base(study.base, study.processor, study.scaled(text_base.STEPS, 2), seed, folder / "run")
    return grade_and_keep(study, model, folder)


def first_stage(study: WingsStudy, learners: bool, base: Path, pictures: Path, seed: int, folder: Path) -> dict:
    """Train the projector, and visual learners if asked for, on the first pictures."""
    model, (micros, _) = load_model(base), pictures_to_learn(study, pictures, seed)
    if learners:
        model = attach(model, RANK, seed=seed)
    rule = Rule(f"{PROJECTOR}|{VISUAL}" if learners else PROJECTOR, FIRST_RATE, 1e-9)
    learn(model, [rule], micros, folder / "run")
    return grade_and_keep(study, model, folder)


def grade_and_keep(study: WingsStudy, model: PaliGemma, folder: Path) -> dict:
    """`grade`; then the model is written to `folder`, and its checkpoints, by which a study goes on, are deleted."""
    found = grade(study, model)
    keep(model, folder)
    return found


def second_stage(
    study: WingsStudy, name: str, rate: float, text: float, base: Path, pictures: Path, seed: int, folder: Path
) -> dict:
    """Train what the row says on the other pictures, and measure. text: the share of text that takes their place."""
    row, (_, micros) = ROWS[name], pictures_to_learn(study, pictures, seed, text)
    model, pattern = load_model(base), r"language_model\..*"
    if row.learners:
        model, pattern = route(model, seed), pattern if row.decoder else LEARNERS
    elif not row.decoder:
        torch.manual_seed(seed)
        rank = lora_rank(model)
        adapter.inject(model, DECODER_TARGETS, rank, 2.0 * rank)
        pattern = r".*\.lora_[AB]\..*"
    rules = [Rule(PROJECTOR, FACTOR * rate if row.decoder else rate, 1e-8), Rule(pattern, rate, 1e-8)]

    def watch(step: int, progress: dict) -> dict:
        if step % -(-len(micros) // study.plan.checkpoints) == 0 or step == len(micros):
            progress.setdefault("course", []).append(measure_checkpoint(study, model, step))
        return {}

    course = learn(model, rules, micros, folder / "run", watch)["course"]
    found = {
        "validation": 100 * float(np.mean(grade_pictures(study, model, "validation"))),
        "trained": count(p for p in model.parameters() if p.requires_grad),
        "course": course,
        **grade(study, model),
    }
    shutil.rmtree(folder / "run")  # last: by it an interrupted study goes on
    return found


def measure_checkpoint(study: WingsStudy, model: PaliGemma, step: int) -> dict:
    """Text on a quarter of the questions, pictures, the attention shift and LAWS after a step."""
    most = quarter(study)
    with evaluating(model, torch.device("cpu")):
        attention = attend(study, model, most)
        text, pictures = grade_text(study, model, most), grade_pictures(study, model, "test")
    shift = float(np.nan_to_num(attention.each, nan=1.0).mean())
    return {"step": step, "text": text, "pictures": pictures, "shift": shift, "laws": attention.shares.tolist()}


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
