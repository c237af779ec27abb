"""What the attention study trains on, and what it asks.

In: the settings of the base, a split, and the study's flags. Out: training records with their hash, and the measures
of a split: VQA by the official scorer, and needle tests.
"""

import argparse
import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

from eval import needle, vqa
from eval.command import ask_of
from eval.datasets import Annotation, Question, read_questions
from eval.records import ANNOTATIONS_FILE, QUESTIONS_FILE, Record
from eval.vqa_data import truths_of
from eval.vqa_scoring import ANNOTATORS
from model.common import UserError, shown
from model.paligemma import PaliGemma
from model.processor import Processor
from train.data.sources import read_records
from train.settings import Settings
from train.studies.engine import digest

# Needle tests of 2×2 with one object per tile saturate near 100 %. These are harder: two objects per tile, each of
# which other tiles share, and 4×4.
NEEDLES = {"n2o2": "2×2, two objects each", "n4o1": "4×4, one object each"}
# The training tasks, in equal parts. The needle tasks are part of it, since the wording of two objects is learned far
# more slowly without them.
TASKS = ("vqa", "n2o1", *NEEDLES)
VAL_FILES = tuple(name.replace("train2014", "val2014") for name in (QUESTIONS_FILE, ANNOTATIONS_FILE))


def training_records(settings: Settings, shared_seed: int) -> tuple[Sequence[Record], str]:
    """The records that a cell is trained on, and their hash.

    On the embedded scenes each seed draws its own. On disk all seeds use the pictures of `shared_seed`: otherwise one
    seed would train on pictures that another holds out. There, seeds differ in initialisation, order and dropout.
    """
    kept = "data eval_data samples tasks fraction validation prompt answers images allow_outside shuffle_buffer"
    seed = settings.seed if settings.is_embedded else shared_seed
    return _training_records(Settings(seed=seed, **{name: getattr(settings, name) for name in kept.split()}))


@lru_cache(maxsize=1)  # the records of one seed: cells are computed seed by seed
def _training_records(settings: Settings) -> tuple[Sequence[Record], str]:
    if settings.is_embedded:
        drawn: dict[str, Callable] = {}
        records = [
            replace(record, pictures=(drawn.setdefault(record.key, cache(record.pictures[0])),))
            for record in read_records(settings)
        ]
    else:
        records = read_records(settings)
    return records, digest([_deciding(record) for record in _readable(records)])


def _deciding(record: Record) -> tuple:
    """What is learned from a record, for the hash: pictures by the names of their files."""
    files = tuple(picture.name for picture in record.pictures if isinstance(picture, Path))
    more = (record.turns[:-1], record.answers, files)
    return (record.name, record.prefix, record.suffix, *([more] if any(more) else []))


def _readable(records: Sequence[Record]) -> Iterator[Record]:
    """The records but for damaged ones of tar shards, which training leaves out and names."""
    for number in range(len(records)):
        with contextlib.suppress(UserError):
            yield records[number]


@dataclass(frozen=True)
class Measure:
    """Examples with their truth; `grade` scores a model's answers to them, each from 0 to 1, and logs them in a folder.

    pictures, labels: of each example; a label is the answer type of a question, or the place (row, column) of a
    needle. chance: the score of guessing in percent, None where it is not known.
    """

    name: str
    title: str
    examples: list
    pictures: list[str]
    labels: list
    chance: float | None
    grade: Callable[[PaliGemma, Processor, Settings, Path], list[float]]


def make_measures(settings: Settings, split: str, limit: int, options) -> list[Measure]:
    """All measures of a split: `limit` VQA questions, and half as many needle tests of each kind, evenly over places.

    With data on disk only the test split has needle tests, and only with --coco.
    """
    measures = [vqa_measure(settings, split, limit)]
    tests = max(1, limit // 32) * 16  # a multiple of the number of places of both kinds
    if settings.is_embedded:
        measures += [embedded_needles(kind, tests, options.protocol, split) for kind in NEEDLES]
    elif options.coco and split == "test":
        measures += coco_needles(settings, options, tests, options.protocol)
    return measures


def embedded_needles(kind: str, tests: int, protocol: str, split: str = "test") -> Measure:
    """Needle tests of one kind on the embedded scenes, each picture drawn once."""
    trials = needle.embedded_trials(kind, tests, split=split)
    return needle_measure(kind, [trial._replace(pictures=cache(trial.pictures)) for trial in trials], protocol)


def coco_needles(settings: Settings, options, tests: int, protocol: str) -> list[Measure]:
    """Needle tests of 2×2 on COCO's pictures; `options` has the flags --coco, --captions and --metadata."""
    drawn = {"limit": tests, "pictures": 1, "side": 2, "needles": 1, "negatives": False, "seed": 42}
    drawn["allow_outside"] = settings.allow_outside
    found = needle.coco_trials(argparse.Namespace(**vars(options) | drawn))
    return [needle_measure(name, trials, protocol) for name, trials in found.items()]


def vqa_measure(settings: Settings, split: str, limit: int | None, scoring: str = "official") -> Measure:
    """VQA on the embedded scenes or on disk. Raises UserError if no pictures are held out.

    A question whose picture cannot be read counts as answered wrongly.
    """
    chance, template = None, vqa.PROMPT
    if settings.is_embedded:
        benchmark = vqa.embedded(limit, split)
        benchmark = benchmark._replace(pictures={name: cache(draw) for name, draw in benchmark.pictures.items()})
        chance = vqa.blind_embedded(limit)["overall"] if split == "test" else None
    else:
        benchmark, template = held_out_vqa(settings, split, limit)

    def grade(model: PaliGemma, processor: Processor, settings: Settings, folder: Path) -> list[float]:
        options = asking(settings, "VQA", folder)
        said = vqa.answer(model, processor, benchmark, template or settings.prompt, **options)
        answers = {question.question_id: said.get(question.question_id, "") for question in benchmark.questions}
        report_left_out(options["left_out"], len(answers))
        return list(vqa.question_accuracies(benchmark.annotations, answers, scoring).values())

    examples = list(zip(benchmark.questions, benchmark.annotations, strict=True))
    if any(ask.before for ask in benchmark.asks):  # turns before the question
        examples = [(*example, ask.before) for example, ask in zip(examples, benchmark.asks, strict=True)]
    if scoring != "official":  # it decides the scores
        examples = [(scoring, *example) for example in examples]
    pictures = [question.image for question in benchmark.questions]
    labels = [annotation.answer_type or "all" for annotation in benchmark.annotations]
    return Measure("VQA", "VQA", examples, pictures, labels, chance, grade)


def held_out_vqa(settings: Settings, split: str, limit: int | None) -> tuple[vqa.Benchmark, str | None]:
    """`limit` questions on disk, drawn at random, and their prompt, None for that of the settings.

    They are about the pictures held out from training, one half for each split. If VQAv2's val2014 files are in the
    same folder, those are the test split. Raises UserError if no pictures are held out.
    """
    kind, _, path = settings.data[0].partition(":") if len(settings.data) == 1 else ("mixture", "", "")
    folder, files, held_out = Path(path), (QUESTIONS_FILE, ANNOTATIONS_FILE), []
    if kind == "vqav2" and split == "test" and (folder / VAL_FILES[0]).exists():
        files, names = VAL_FILES, [str(question.question_id) for question in read_questions(folder / VAL_FILES[0])]
    else:
        held_out = _held_out(settings)
        pictures = sorted({record.key for record in held_out})
        half = set(pictures[0::2] if split == "validation" else pictures[1::2])
        names = [record.name for record in held_out if record.key in half]
    if not names:
        raise UserError(
            f"--data {' '.join(settings.data)}: no pictures are left for the {split} split: raise --validation "
            f"above {settings.validation}"
        )
    chosen = set(names if limit is None else random.Random(f"vqa/{split}").sample(names, min(limit, len(names))))
    if kind == "vqav2":
        paths, images = [folder / name for name in files], settings.images or folder
        return vqa.from_files(*paths, images, only=chosen, allow_outside=settings.allow_outside), None
    return benchmark_of([record for record in held_out if record.name in chosen]), "{question}"


@lru_cache(maxsize=1)  # both splits
def _held_out(settings: Settings) -> Sequence[Record]:
    return list(_readable(read_records(settings, "validation")))


def benchmark_of(records: Sequence[Record]) -> vqa.Benchmark:
    """A user's own examples as a benchmark; of a conversation the last answer is asked.

    Answers by ANNOTATORS or more people are scored as VQAv2's. Of fewer each is right: it counts as given by ten; if
    there is only one, the official scorer does not normalise it.
    """
    questions, annotations = [], []
    for r in records:
        given = r.answers if len(r.answers) >= ANNOTATORS else truths_of(r) * 10
        answers = tuple({"answer": answer, "answer_id": number} for number, answer in enumerate(given))
        questions.append(Question(r.name, r.key, r.prefix))
        annotations.append(Annotation(r.name, answers, r.suffix))
    return vqa.Benchmark(questions, annotations, {}, asks=[ask_of(r) for r in records])


def needle_measure(name: str, trials: Sequence[needle.Trial], protocol: str) -> Measure:
    """Needle tests of one kind: a test is right if every needle in it is found."""

    def grade(model: PaliGemma, processor: Processor, settings: Settings, folder: Path) -> list[float]:
        options = asking(settings, name, folder)
        answers = needle.answer(model, processor, trials, protocol, **options)
        report_left_out(options["left_out"], sum(map(len, answers)))
        records = needle.responses_of(trials, answers, protocol)
        return [float((needle.judge(record) or (False,) * 3)[2]) for record in records]

    tests = [trial.test for trial in trials]
    pictures = [str(test.haystack) for test in tests]
    examples, places = [(protocol, test) for test in tests], [test.places[0][1:] for test in tests]
    title, chance = NEEDLES.get(name, f"MMNeedle {name}"), 100 / tests[0].side ** 2
    return Measure(name, title, examples, pictures, places, chance, grade)


def asking(settings: Settings, name: str, folder: Path) -> dict:
    """Options of `ask_all`. Answers about data on disk, which may take hours, have a progress bar and a log."""
    if settings.is_embedded:
        return {"left_out": {}}
    return {"left_out": {}, "progress": name, "log": folder / f"answers-{name}.jsonl"}


def report_left_out(left_out: dict[str, str], asked: int) -> None:
    """Name on stderr the first of the questions that could not be asked; if these are all, raise UserError."""
    if left_out:
        if len(left_out) == asked:
            raise UserError(f"none of the {asked} questions can be asked: {shown(next(iter(left_out.values())))}")
        print(f"{len(left_out)} questions count as wrong: {shown(next(iter(left_out.values())))} …", file=sys.stderr)
