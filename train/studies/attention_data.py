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

from eval import needle, scenes, vqa
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

# What is asked of the embedded scenes besides VQA: by measure the difficulties to choose from, from easy to hard.
# Needle tests are named as in eval/scenes.py (n4d7: 4×4, 7 distractors). e8: is it there, among 8 different objects?
LADDERS = {
    "2×2": ("n2o1", "n2o2"),
    "3×3": ("n3d2", "n3d5", "n3d8"),
    "4×4": ("n4d3", "n4d7", "n4o1"),
    "existence": ("e4", "e8", "e12", "e16"),
}
HARDEST = tuple(ladder[-1] for ladder in LADDERS.values())
DOSES = (0, 1, 3, 7, 11, 15)  # distractors of the 4×4 needle, for the slope of accuracy
DOSE = "dose"
# The training tasks, in equal parts. The needle tasks are part of it, since the wording of two objects is learned far
# more slowly without them.
TASKS = ("vqa", "n2o1", "n2o2", "n4o1")
VAL_FILES = tuple(name.replace("train2014", "val2014") for name in (QUESTIONS_FILE, ANNOTATIONS_FILE))


def training_records(settings: Settings, shared_seed: int) -> tuple[Sequence[Record], str]:
    """The records that a cell is trained on, and their hash.

    On the embedded scenes each seed draws its own. On disk all seeds use the pictures of `shared_seed`: otherwise one
    seed would train on pictures that another holds out. There, seeds differ in initialisation, order and dropout.
    """
    return _training_records(_kept(settings, shared_seed))


def training_mark(settings: Settings, shared_seed: int) -> str:
    """The hash of `training_records` alone."""
    kept = _kept(settings, shared_seed)
    return _embedded_mark(kept) if settings.is_embedded else _training_records(kept)[1]


def _kept(settings: Settings, shared_seed: int) -> Settings:
    """The settings that decide the records, and no others."""
    names = "data eval_data samples tasks fraction validation prompt answers images allow_outside shuffle_buffer"
    seed = settings.seed if settings.is_embedded else shared_seed
    return Settings(seed=seed, **{name: getattr(settings, name) for name in names.split()})


@lru_cache(maxsize=100)
def _embedded_mark(settings: Settings) -> str:
    return _training_records(settings)[1]


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


def make_measures(settings: Settings, split: str, limit: int, options, rungs: Sequence[str] = HARDEST) -> list[Measure]:
    """All measures of a split: `limit` VQA questions, and half as many of each other kind, evenly over places.

    rungs: difficulties on the embedded scenes, whose test split also has the doses. With data on disk only the test
    split has needle tests, and only with --coco.
    """
    measures, tests = [vqa_measure(settings, split, limit)], max(1, limit // 32) * 16
    if settings.is_embedded:
        measures += [embedded_measure(rung, tests, options.protocol, split) for rung in rungs]
        measures += [dose_measure(tests, options.protocol)] * (split == "test")
    elif options.coco and split == "test":
        measures += coco_needles(settings, options, tests, options.protocol)
    return measures


def title_of(rung: str) -> str:
    """A difficulty in words."""
    if rung.startswith("e"):
        return f"is it there, among {rung[1:]}"
    n, objects, distractors = scenes.layout_of(rung)
    full = "" if distractors == n**2 - 1 else f", {distractors} distractors"
    return f"{n}×{n}, {'two objects' if objects == 2 else 'one object'} each{full}"


def embedded_measure(rung: str, tests: int, protocol: str, split: str = "test") -> Measure:
    """A measure on the embedded scenes, each picture drawn once; `tests` is rounded to whole turns over the places."""
    if rung.startswith("e"):
        return existence_measure(int(rung[1:]), tests, split, protocol)
    places = scenes.layout_of(rung)[0] ** 2
    trials = needle.embedded_trials(rung, -(-tests // places) * places, split=split)
    return needle_measure(rung, drawn_once(trials), protocol)


def drawn_once(trials: Sequence[needle.Trial]) -> list[needle.Trial]:
    return [trial._replace(pictures=cache(trial.pictures)) for trial in trials]


def existence_measure(objects: int, questions: int, split: str, protocol: str) -> Measure:
    """POPE's questions about pictures with so many different objects; half of the answers are yes.

    To a free answer, short runs tell a place in so full a picture, as to a needle's question.
    """
    benchmark = vqa.of_samples(scenes.pope("random", split, -(-questions // 6), objects=objects), f"{split}/e{objects}")
    words = ("yes", "no") if protocol == "constrained" else ()
    return question_measure(f"e{objects}", title_of(f"e{objects}"), benchmark, 50.0, words=words)


def dose_measure(tests: int, protocol: str) -> Measure:
    """4×4 needles of the test split by the number of distractors, their label."""
    each = max(16, tests // 3 // 16 * 16)
    trials = [t for dose in DOSES for t in needle.embedded_trials(f"n4d{dose}", each)]
    labels = [dose for dose in DOSES for _ in range(each)]
    measure = needle_measure(DOSE, drawn_once(trials), protocol)
    pictures = [f"{dose}/{picture}" for dose, picture in zip(labels, measure.pictures, strict=True)]
    return replace(measure, title="4×4 by the number of distractors", pictures=pictures, labels=labels)


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
    if not settings.is_embedded:
        benchmark, template = held_out_vqa(settings, split, limit)
        return question_measure("VQA", "VQA", benchmark, None, template, scoring)
    chance = vqa.blind_embedded(limit)["overall"] if split == "test" else None
    return question_measure("VQA", "VQA", vqa.embedded(limit, split), chance, vqa.PROMPT, scoring)


def question_measure(
    name: str,
    title: str,
    benchmark: vqa.Benchmark,
    chance: float | None,
    template: str | None = vqa.PROMPT,
    scoring: str = "official",
    words: tuple[str, ...] = (),
) -> Measure:
    """Questions about pictures, each drawn once where they are drawn; template: None for that of the settings.

    words: the likeliest of them is the answer; none: the answer is free."""
    drawn = {key: cache(picture) if callable(picture) else picture for key, picture in benchmark.pictures.items()}
    benchmark = benchmark._replace(pictures=drawn)
    if words:
        benchmark = benchmark._replace(asks=[replace(ask, choices=words) for ask in vqa.asks_of(benchmark)])

    def grade(model: PaliGemma, processor: Processor, settings: Settings, folder: Path) -> list[float]:
        options = asking(settings, name, folder)
        said = vqa.answer(model, processor, benchmark, template or settings.prompt, **options)
        answers = {question.question_id: said.get(question.question_id, "") for question in benchmark.questions}
        report_left_out(options["left_out"], len(answers))
        return list(vqa.question_accuracies(benchmark.annotations, answers, scoring).values())

    examples = list(zip(benchmark.questions, benchmark.annotations, strict=True))
    if any(ask.before for ask in benchmark.asks):  # turns before the question
        examples = [(*example, ask.before) for example, ask in zip(examples, benchmark.asks, strict=True)]
    if scoring != "official":  # it decides the scores
        examples = [(scoring, *example) for example in examples]
    if words:
        examples = [(words, *example) for example in examples]
    pictures = [question.image for question in benchmark.questions]
    labels = [annotation.answer_type or "all" for annotation in benchmark.annotations]
    return Measure(name, title, examples, pictures, labels, chance, grade)


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
    title = title_of(name) if name.startswith("n") else f"MMNeedle {name}"
    chance = 100 / tests[0].side ** 2
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
