"""Records: what is learned, read from the embedded scenes, VQAv2's official files, or a user's JSON lines.

In: a folder or file, and which share of it to use. Out: a list of `Record`. Pictures are not opened here.
Tar shards of records are read by `train/data/shards.py`.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, NoReturn

from PIL import Image

from eval import scenes
from eval.datasets import check_prompt, fill_prompt, find_image, read_annotations, read_examples, read_questions
from model.common import UserError, shown
from train.recipes import EMBEDDED_TASKS

QUESTIONS_FILE = "v2_OpenEnded_mscoco_train2014_questions.json"
ANNOTATIONS_FILE = "v2_mscoco_train2014_annotations.json"


@dataclass(frozen=True)
class Record:
    """One example: after the picture and the prefix, the model learns to say the suffix.

    name: unique, for messages. key: names the picture; records with the same key share it. picture: a path, a function
    that returns an image or an open file, or None for text alone. choices: if not empty, the suffix is drawn from them
    anew in each epoch.
    """

    name: str
    key: str
    picture: Path | Callable[[], Image.Image | BinaryIO] | None
    prefix: str
    suffix: str
    choices: tuple[str, ...] = ()


def embedded_records(
    tasks: Sequence[str] = EMBEDDED_TASKS, split: str = "train", count: int = 12000, seed: int = 0
) -> list[Record]:
    """`count` records of the embedded scenes, the tasks in turn; a task that is listed twice comes twice as often."""
    drawn: dict[str, int] = defaultdict(int)
    records = []
    for number in range(count):
        task = tasks[number % len(tasks)]
        records.append(sample_record(scenes.sample(task, split, drawn[task], seed), split))
        drawn[task] += 1
    return records


def sample_record(s: scenes.Sample, split: str) -> Record:
    """The record of one sample of the embedded scenes; its picture is rendered when it is needed."""
    name, key = f"{s.task}/{split}/{s.question_id}", f"{s.task}/{s.image_id}"
    return Record(name, key, partial(_render, s.scene), s.prefix, s.suffix)


def _render(scene: scenes.Scene) -> Image.Image:
    return Image.fromarray(scene.render())


def vqav2_records(
    folder: Path,
    prompt: str,
    split: str = "train",
    fraction: float = 1.0,
    validation: float = 0.0,
    seed: int = 0,
    sampled: bool = False,
    images: Path | None = None,
    allow_outside: bool = False,
) -> list[Record]:
    """Questions of VQAv2's train2014, in their official layout under `folder`; pictures there or under `images`.

    prompt: a template with {question}. The suffix is multiple_choice_answer; with `sampled`, one of the ten answers,
    drawn anew in each epoch. The share `validation` of the pictures is held out by image id (split "validation"); the
    share `fraction` of the others is used (the paper's Part 1: 0.4). Raises UserError for files that are absent, and
    for a question without an annotation.
    """
    check_prompt(prompt)
    questions = read_questions(folder / QUESTIONS_FILE)
    annotations = {a.question_id: a for a in read_annotations(folder / ANNOTATIONS_FILE)}
    missing = [q.question_id for q in questions if q.question_id not in annotations]
    if missing:
        raise UserError(
            f"{folder}: {len(missing)} questions have no annotation (first: {missing[0]}): "
            "take both files of one release"
        )
    chosen = _pictures_of_split([q.image for q in questions], split, fraction, validation, seed)
    pictures = {name: _find(images or folder, name, allow_outside) for name in chosen}
    return [
        Record(
            str(q.question_id),
            q.image,
            pictures[q.image],
            fill_prompt(prompt, q.question),
            annotations[q.question_id].answer,
            tuple(a["answer"] for a in annotations[q.question_id].answers) if sampled else (),
        )
        for q in questions
        if q.image in chosen
    ]


def jsonl_records(
    path: Path,
    split: str = "train",
    fraction: float = 1.0,
    validation: float = 0.0,
    seed: int = 0,
    images: Path | None = None,
    allow_outside: bool = False,
) -> list[Record]:
    """A user's own {"image", "prefix", "suffix"} lines, split by picture as VQAv2 is.

    A line that cannot be used is a record of the train split that raises UserError when its picture is opened, so that
    it is named, left out and counted. Raises UserError for a file without any sound line.
    """
    bad: list[UserError] = []
    examples = read_examples(path, images, allow_outside, bad.append)
    if not examples:
        first = f": {bad[0]}" if bad else ", each must hold one JSON object"
        raise UserError(f"{shown(path)}: none of its {len(bad)} lines can be used{first}")
    chosen = _pictures_of_split([str(e.image) for e in examples], split, fraction, validation, seed)
    records = [
        Record(f"{path.name}:{e.line}", str(e.image), e.image, e.prefix, e.suffix)
        for e in examples
        if str(e.image) in chosen
    ]
    for error in bad if split == "train" else ():
        line, _, problem = str(error).removeprefix(f"{shown(path)}:").partition(": ")
        records.append(Record(f"{path.name}:{line}", f"{path}:{line}", partial(_refuse, problem), "", ""))
    return records


def _refuse(problem: str) -> NoReturn:
    raise UserError(problem)


def _find(folder: Path, name: str, allow_outside: bool) -> Path | Callable[[], NoReturn]:
    """The path of a picture; where its name leads outside, a function that says so when the picture is opened."""
    try:
        return find_image(folder, name, allow_outside)
    except UserError as error:
        return partial(_refuse, f"picture {error}")


def _pictures_of_split(names: Sequence[str], split: str, fraction: float, validation: float, seed: int) -> set[str]:
    """The pictures of a split: all questions of one picture are in the same split."""
    pictures = sorted(set(names))
    random.Random(f"split/{seed}").shuffle(pictures)
    held_out = round(len(pictures) * validation)
    if split == "validation":
        return set(pictures[:held_out])
    return set(pictures[held_out : held_out + max(1, round((len(pictures) - held_out) * fraction))])
