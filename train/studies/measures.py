"""What fine-tuning studies train on, and what they ask: VQA by the official scorer, needles, and
own examples."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from eval import needle, vqa
from eval.data.haystacks import layout_of
from eval.data.mmneedle import NeedleTest
from eval.data.published import Annotation, read_vqa
from eval.data.records import ANNOTATIONS_FILE, QUESTIONS_FILE, Record
from eval.question import Question, question_of
from eval.vqa_scoring import SCORERS, record_scores
from model.common import UserError
from train.data.sources import read_split
from train.settings import Settings
from train.studies.rules import Measure

VAL_FILES = tuple(
    name.replace("train2014", "val2014") for name in (QUESTIONS_FILE, ANNOTATIONS_FILE)
)


def training_records(settings: Settings) -> Sequence[Record]:
    """The records that a cell is trained on.

    On the embedded scenes each seed draws its own. On disk all seeds use one split: otherwise one
    seed would train on pictures that another holds out. There, seeds differ in initial weights,
    order and dropout.
    """
    return read_split(settings if settings.is_embedded else replace(settings, seed=0))


@dataclass(frozen=True, kw_only=True)
class Task(Measure):
    """A measure that a model is asked. right(truth, answer): the score of an answer, 0 to 1.
    protocol: of needle tests, in place of that: a test is right if every needle in it is found."""

    asks: Sequence[Question]
    right: Callable[[Any, str], float] = eq
    protocol: str = ""

    def score(self, answers: Sequence) -> list[float]:
        """The scores of the examples, in order."""
        if self.protocol:
            benchmark = needle.Needle()
            benchmark.protocol = self.protocol
            return [float(sum(row.scores.values())) for row in benchmark.rows(self.asks, answers)]
        pairs = zip(self.asks, answers, strict=True)
        return [float(self.right(ask.truth, answer)) for ask, answer in pairs]


def asking(title: str, asks: Sequence[Question], right=eq, **more) -> Task:
    """A task in which each answer is scored by itself, by right(truth, answer). more: fields of a
    Measure."""
    return Task(title, [ask.key for ask in asks], asks=asks, right=right, **more)


def scene_needles(kind: str, tests: int, split: str = "test") -> list[NeedleTest]:
    """Needles of the embedded scenes; `tests` is rounded to whole turns over the places."""
    places = layout_of(kind)[0] ** 2
    return needle.embedded_tests(kind, -(-tests // places) * places, split)


@dataclass(frozen=True)
class Noisy:
    """A picture with Gaussian noise on every pixel, of a standard deviation in steps of 255. It is
    the same for the same seed; what it prints as names a cell."""

    picture: Callable[[], Image.Image]
    strength: float
    seed: int

    def __call__(self) -> Image.Image:
        pixels = np.asarray(self.picture(), dtype=float)
        noise = np.random.default_rng(self.seed).normal(0, self.strength, pixels.shape)
        return Image.fromarray((pixels + noise).round().clip(0, 255).astype(np.uint8))


def with_noise(tests: Sequence[NeedleTest], strength: float) -> list[NeedleTest]:
    """The tests with noise on their pictures."""
    noisy = []
    for seed, test in enumerate(tests):
        pictures = tuple(Noisy(picture, strength, seed) for picture in test.pictures)
        noisy.append(test._replace(pictures=pictures))
    return noisy


def coco_needles(tests: int, coco: str, captions: str | None) -> tuple[str, list[NeedleTest]]:
    """Title and trials of 2×2 needle tests on the pictures of COCO's val2014."""
    if captions is None:
        files = "MMNeedle's caption file, or COCO's captions_val2014.json"
        raise UserError(f"--coco needs --captions: {files}")
    return "MMNeedle 1_2_2", needle.drawn_tests(coco, captions, tests)


def trial_task(title: str, trials: Sequence[NeedleTest], protocol: str, **more) -> Task:
    """Needle tests of one kind. more: fields of a Measure."""
    groups = [str(trial.haystack) for trial in trials]
    chance = 100 / trials[0].side ** 2
    asks = needle.asks_of(trials, protocol)
    return Task(title, groups, chance, asks=asks, protocol=protocol, **more)


def vqa_task(settings: Settings, split: str, limit: int | None, scoring: str = "official") -> Task:
    """VQA on the embedded scenes, or `limit` questions on disk, drawn at random. Raises UserError
    if no pictures are held out."""
    if settings.is_embedded:
        assert limit is not None
        asks = vqa.embedded(limit, split)
        chance = vqa.guess_accuracy(asks)["overall"] if split == "test" else None
        return asking("VQA", asks, SCORERS[scoring], chance=chance)
    questions = held_out_questions(settings, split)
    if not questions:
        problem = f"--data {' '.join(settings.data)}: no pictures are left for the {split} split"
        raise UserError(f"{problem}: raise --validation above {settings.validation}")
    count = min(limit or len(questions), len(questions))
    chosen = random.Random(f"vqa/{split}").sample(range(len(questions)), count)
    asks = [questions[number] for number in sorted(chosen)]
    return asking("VQA", asks, partial(accuracy, scoring))


def held_out_questions(settings: Settings, split: str) -> list[Question]:
    """Questions about the pictures held out, one half for each split. Of a conversation the last
    answer is asked. If VQAv2's val2014 files are in the same folder, those are the test split."""
    kind, _, path = settings.data[0].partition(":")
    files = [Path(path, name) for name in VAL_FILES]
    if split == "test" and len(settings.data) == 1 and kind == "vqav2" and files[0].exists():
        _, asked = read_vqa(*files)
        return vqa.questions_of(asked, settings.images or path, settings.prompt)
    records = read_split(settings, "validation")
    pictures = sorted({record.key for record in records})
    first = 0 if split == "validation" else 1
    half = set(pictures[first::2])
    kept = [record for record in records if record.key in half]
    return [question_of(record, truth=replace(record, pictures=())) for record in kept]


def accuracy(scoring: str, truth: Annotation | Record, answer: str) -> float:
    """By `scoring` where enough people have answered, else exact match."""
    if isinstance(truth, Record):
        scores = record_scores(truth, answer, SCORERS[scoring])
        return scores.get("vqa_accuracy", scores["exact_match"])
    return SCORERS[scoring](truth, answer)
