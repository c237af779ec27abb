"""What fine-tuning studies train on, and what they ask: VQA by the official scorer, needles, and existence.

In: the settings of a base and its data, and a split. Out: training records, and the tasks of the split. On the embedded
scenes the difficulties are constants, at which plain LoRA neither guesses nor is perfect; a report's range table says
whether they still are. On disk: held-out VQA, and with --coco needle tests on COCO's pictures.
"""

import argparse
import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from operator import eq
from pathlib import Path

import numpy as np

from eval import needle, scenes, vqa
from eval.data import Annotation, read_questions
from eval.question import Question, question_of
from eval.records import ANNOTATIONS_FILE, QUESTIONS_FILE, Record
from eval.statistics import slope_scores
from eval.vqa_scoring import ANNOTATORS, SCORERS, truths_of
from model.common import UserError
from train.data.sources import read_records
from train.run import data_fingerprints
from train.settings import Settings
from train.studies.options import digest
from train.studies.rules import TUNING_SEEDS, Measure

# eval/scenes.py names them: n4d7 is a 4×4 needle with 7 distractors, o1 and o2 are full pictures. e16: POPE's question
# about one of 16 objects.
NEEDLES = {"n2o2": "2×2, two objects each", "n3d8": "3×3, one object each", "n4o1": "4×4, one object each"}
EXISTENCE = 16
DOSES = (0, 1, 3, 7, 11, 15)  # distractors of a 4×4 needle, for the slope of accuracy
VAL_FILES = tuple(name.replace("train2014", "val2014") for name in (QUESTIONS_FILE, ANNOTATIONS_FILE))


# Training


def training_records(settings: Settings, shared_seed: int) -> Sequence[Record]:
    """The records that a cell is trained on.

    On the embedded scenes each seed draws its own. On disk all seeds use the split of `shared_seed`: otherwise one seed
    would train on pictures that another holds out. There, seeds differ in initial weights, order and dropout.
    """
    names = "data eval_data samples tasks fraction validation prompt answers images shuffle_buffer"
    seed = settings.seed if settings.is_embedded else shared_seed
    return _training_records(Settings(seed=seed, **{name: getattr(settings, name) for name in names.split()}))


@lru_cache(maxsize=TUNING_SEEDS)  # cells are computed seed by seed
def _training_records(settings: Settings) -> Sequence[Record]:
    records = read_records(settings)
    if not settings.is_embedded:
        return records
    drawn_once = {record.key: (cache(record.pictures[0]),) for record in records}
    return [replace(record, pictures=drawn_once[record.key]) for record in records]


def data_mark(settings: Settings) -> str:
    """A hash of the data on disk, for the names of cells; of embedded data the source and the settings decide."""
    return "" if settings.is_embedded else digest(data_fingerprints(training_records(settings, settings.seed)))


# Tasks


@dataclass(frozen=True)
class Task(Measure):
    """A measure that a model is asked, see `task_of`.

    score(answers): of each example, from 0 to 1; the answer None is wrong. labels: the "(row, column)" of each needle.
    mark: a hash of questions and right answers.
    """

    asks: Sequence[Question] = ()
    score: Callable[[Sequence[str | None]], list[float]] = lambda answers: []
    labels: Sequence[str] = ()
    mark: str = ""


def task_of(title: str, asks: Sequence[Question], score: Callable, groups: Sequence, truths: object, **more) -> Task:
    """A task whose pictures are drawn once, where they are drawn. more: fields of a Task."""
    drawn_once = {ask.key: cache(ask.picture) if callable(ask.picture) else ask.picture for ask in asks}
    mark = digest(truths, [(ask.id, ask.prefix, ask.choices, ask.before) for ask in asks])
    asks = [replace(ask, picture=drawn_once[ask.key]) for ask in asks]
    return Task(title, groups, asks=asks, score=score, mark=mark, **more)


def asking(
    title: str, asks: Sequence[Question], truths: Sequence[str], right: Callable[[str, str], float] = eq, **more
) -> Task:
    """A task in which each answer is scored by itself, by right(answer, truth)."""

    def score(answers: Sequence[str | None]) -> list[float]:
        return [float(right(answer or "", truth)) for answer, truth in zip(answers, truths, strict=True)]

    return task_of(title, asks, score, [ask.key for ask in asks], truths, **more)


def embedded_tasks(split: str, limit: int, protocol: str) -> dict[str, Task]:
    """`limit` VQA questions and half as many of each other kind, evenly over places; doses in the test split alone."""
    tests = max(1, limit // 32) * 16
    tasks = {"VQA": vqa_task(Settings(), split, limit)}
    tasks |= {kind: needle_task(kind, tests, protocol, split) for kind in NEEDLES}
    tasks["e16"] = existence_task(tests, protocol, split)
    return tasks | ({"dose": dose_task(tests, protocol)} if split == "test" else {})


def disk_tasks(settings: Settings, split: str, limit: int, protocol: str, coco: str | None, captions: str | None):
    """Held-out VQA questions, and 2×2 needles on COCO's pictures; the splits share no needle test."""
    tasks = {"VQA": vqa_task(settings, split, limit)}
    if coco:
        tests = max(1, limit // 32) * 16
        title, trials = coco_needles(settings, 2 * tests, coco, captions)
        tasks["needle"] = trial_task(title, trials[0 if split == "test" else 1 :: 2], protocol)
    return tasks


def needle_task(kind: str, tests: int, protocol: str, split: str = "test") -> Task:
    """Needles of the embedded scenes; `tests` is rounded to whole turns over the places."""
    places = scenes.layout_of(kind)[0] ** 2
    trials = needle.embedded_trials(kind, -(-tests // places) * places, split=split)
    return trial_task(NEEDLES.get(kind, kind), trials, protocol)


def dose_task(tests: int, protocol: str) -> Task:
    """4×4 needles by the number of distractors. A difference is one of slopes, from no distractor to the most."""
    each = max(16, tests // 3 // 16 * 16)
    trials = [trial for dose in DOSES for trial in needle.embedded_trials(f"n4d{dose}", each)]
    doses = [dose for dose in DOSES for _ in range(each)]
    task = trial_task("4×4 by distractors", trials, protocol)
    groups = [f"{dose}/{picture}" for dose, picture in zip(doses, task.groups, strict=True)]
    view = partial(slope_scores, np.array(doses) / max(doses))
    return replace(task, groups=groups, in_mean=False, rungs=[str(dose) for dose in doses], view=view)


def coco_needles(
    settings: Settings, tests: int, coco: str, captions: str | None, metadata: str | None = None
) -> tuple[str, list[needle.Trial]]:
    """Title and trials of 2×2 needle tests on the pictures of COCO's val2014."""
    flags = {"limit": tests, "pictures": 1, "side": 2, "needles": 1, "negatives": False, "seed": 42}
    flags |= {"coco": coco, "captions": captions, "metadata": metadata}
    ((name, trials),) = needle.coco_trials(argparse.Namespace(**flags)).items()
    return f"MMNeedle {name}", trials


def trial_task(title: str, trials: Sequence[needle.Trial], protocol: str) -> Task:
    """Needle tests of one kind: a test is right if every needle in it is found."""

    def score(answers: Sequence[str | None]) -> list[float]:
        return [float(sum(row.scores.values())) for row in needle.rows_of(asks, answers, protocol)]

    tests = [trial.test for trial in trials]
    labels, groups = [str(test.places[0][1:]) for test in tests], [str(test.haystack) for test in tests]
    asks = needle.asks_of(trials, protocol)
    return task_of(title, asks, score, groups, (protocol, tests), chance=100 / tests[0].side ** 2, labels=labels)


def existence_task(questions: int, protocol: str, split: str) -> Task:
    """POPE's questions about pictures with `EXISTENCE` different objects; half of the answers are yes.

    By the protocol "constrained" the likelier word is the answer: in free answers about so full a picture a model says
    a place after short training, as to a needle's question.
    """
    samples = scenes.pope("random", split, -(-questions // 6), objects=EXISTENCE)
    words = ("yes", "no") if protocol == "constrained" else ()
    asks = [replace(question, choices=words) for question in vqa.of_samples(samples, f"{split}/e{EXISTENCE}")]
    return question_task(f"is it there, among {EXISTENCE}", asks, 50.0)


def vqa_task(settings: Settings, split: str, limit: int | None, scoring: str = "official") -> Task:
    """VQA on the embedded scenes or on disk. Raises UserError if no pictures are held out."""
    if settings.is_embedded:
        assert limit is not None
        chance = vqa.guess_embedded(limit)["overall"] if split == "test" else None
        return question_task("VQA", vqa.embedded(limit, split), chance, scoring)
    return question_task("VQA", held_out_vqa(settings, split, limit), None, scoring)


def question_task(title: str, asks: Sequence[Question], chance: float | None, scoring: str = "official") -> Task:
    """Questions about pictures, whose truth is an `Annotation`. One whose picture cannot be read is wrong."""
    truths = [question.truth for question in asks]

    def score(answers: Sequence[str | None]) -> list[float]:
        return [SCORERS[scoring](truth, answer or "") for answer, truth in zip(answers, truths, strict=True)]

    return task_of(title, asks, score, [question.key for question in asks], (scoring, truths), chance=chance)


# Held-out questions on disk


def held_out_vqa(settings: Settings, split: str, limit: int | None) -> list[Question]:
    """`limit` questions on disk, drawn at random.

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
        return vqa.from_files(*paths, images, settings.prompt, only=chosen)[0]
    return own_questions([record for record in held_out if record.name in chosen])


@lru_cache(maxsize=1)  # both splits
def _held_out(settings: Settings) -> Sequence[Record]:
    """Without damaged ones of tar shards, which training leaves out and names."""
    records, readable = read_records(settings, "validation"), []
    for number in range(len(records)):
        with contextlib.suppress(UserError):
            readable.append(records[number])
    return readable


def own_questions(records: Sequence[Record]) -> list[Question]:
    """The questions of a user's records; of a conversation the last answer is asked.

    Answers by ANNOTATORS or more people are scored as VQAv2's. Of fewer each is right: it counts as given by ten; if
    there is only one, the official scorer does not normalise it.
    """
    questions = []
    for record in records:
        given = record.answers if len(record.answers) >= ANNOTATORS else truths_of(record) * 10
        answers = tuple({"answer": answer, "answer_id": number} for number, answer in enumerate(given))
        questions.append(question_of(record, truth=Annotation(record.name, answers, record.suffix)))
    return questions
