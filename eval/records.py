"""Records: pictures, prompts and right answers, as training learns from them and evaluation asks them.

In: a source, such as `jsonl:FILE`, and which share of it to use. Out: a list of `Record`. Pictures are not opened here.
Tar shards of records are read by `train/data/shards.py`.
"""

import contextlib
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np
from PIL import ExifTags, Image

from eval import scenes
from eval.datasets import (
    PROMPT,
    annotations_of,
    check_prompt,
    fill_prompt,
    find_image,
    read_annotations,
    read_questions,
    real_path,
)
from eval.own_files import Box, Detection, Example, read_coco, read_examples
from eval.pictures import GRID, SIDE
from model.common import UserError, quoted, shown

QUESTIONS_FILE = "v2_OpenEnded_mscoco_train2014_questions.json"
ANNOTATIONS_FILE = "v2_mscoco_train2014_annotations.json"
# Tasks of the embedded data, taken in turn. Half are questions, or the model forgets how to answer them.
EMBEDDED_TASKS = ("vqa", "n2o1", "vqa", "n2o2")
gray_picture = partial(Image.new, "RGB", (64, 64), (127, 127, 127))  # of whatever size, a model sees the same

TURNED = 5  # EXIF orientations from here on exchange width and height
KINDS = ("vqav2", "jsonl", "coco", "shards")
SOURCES = (
    "embedded, vqav2:DIR (official files), jsonl:FILE (image with prefix and suffix, or LLaVA's conversations; lines "
    "or a list), coco:FILE (boxes to detect)"
)

Picture = Path | Callable[[], Image.Image | np.ndarray | BinaryIO]  # a file, or a function that draws or opens one


@dataclass(frozen=True)
class Record:
    """One example: pictures, then one or several turns of a prompt and its answer.

    name: unique, for messages. key: names the pictures; records with the same key share them, and their encoding.
    pictures: in the order in which they are shown; none for text alone. turns: (prompt, answer) pairs; `<image>` in a
    prompt marks the place of a picture. A record without turns stands for data that cannot be used: its picture raises
    the UserError that says why. answers: of the last turn where the data give several, one by each annotator.
    sampled: each epoch learns one of `answers`, drawn anew. detection: the objects to be found.
    """

    name: str
    key: str
    pictures: tuple[Picture, ...]
    turns: tuple[tuple[str, str], ...]
    answers: tuple[str, ...] = ()
    sampled: bool = False
    detection: Detection | None = None

    @property
    def prefix(self) -> str:
        """The prompt of the last turn."""
        return self.turns[-1][0] if self.turns else ""

    @property
    def suffix(self) -> str:
        """The answer of the last turn."""
        return self.turns[-1][1] if self.turns else ""


@dataclass(frozen=True)
class Refusal:
    """A picture that cannot be used: opening it raises UserError."""

    problem: str

    def __call__(self) -> NoReturn:
        raise UserError(self.problem)


def refused(name: str, key: str, problem: str) -> Record:
    """The record that stands for data that cannot be used, so that it is named, left out and counted."""
    return Record(name, key, (Refusal(problem),), ())


def blind(records: Sequence[Record]) -> list[Record]:
    """The records with every picture gray: a model that answers them as well does not use the pictures.

    All share one picture.
    """
    return [
        replace(record, key=f"gray {len(record.pictures)}", pictures=(gray_picture,) * len(record.pictures))
        if record.turns and record.pictures
        else record
        for record in records
    ]


def read_data(
    source: str,
    split: str = "all",
    *,
    images: str | Path | None = None,
    allow_outside: bool = False,
    prompt: str = PROMPT,
    sampled: bool = False,
    fraction: float = 1.0,
    validation: float = 0.0,
    seed: int = 0,
    tasks: Sequence[str] = EMBEDDED_TASKS,
    samples: int = 12000,
) -> list[Record]:
    """The records of `embedded`, `vqav2:DIR`, `jsonl:FILE` or `coco:FILE`.

    split: "train", "validation", or "all" of them. images, allow_outside: the folder of the pictures, and whether names
    may lead out of it. prompt: of VQAv2. sampled: each epoch learns one of several
    answers, drawn anew. fraction, validation, seed: see `split_records`. tasks, samples: of
    the embedded scenes. Raises UserError, also for a file without any record that can be used.
    """
    kind, path = source_parts(source)
    if kind == "embedded":
        return embedded_records(tasks, "train" if split == "all" else split, samples, seed)
    if kind == "vqav2":
        records = vqav2_records(path, prompt, sampled, images, allow_outside)
    elif kind == "jsonl":
        records = own_records(path, sampled, images, allow_outside)
    elif kind == "coco":
        records = own_records(path, sampled, images, allow_outside, read_coco)
    else:
        raise UserError(f"{source}: tar shards can be trained on, not asked: give what they were made of")
    return records if split == "all" else split_records(records, split, fraction, validation, seed)


def source_parts(source: str) -> tuple[str, Path]:
    """The kind of a source and its path. Raises UserError, with a proposal for what is no source."""
    kind, colon, path = source.partition(":")
    if source == "embedded" or kind in KINDS and path:
        return kind, Path(path)
    ending = Path(source).suffix.lower()
    kind = {".jsonl": "jsonl", ".json": "jsonl", ".tar": "shards"}.get(
        ending, "vqav2" if source and Path(source).is_dir() else ""
    )
    proposal = f"did you mean {kind}:{shown(source)}?" if kind else f"expected {SOURCES}"
    raise UserError(f"{quoted(source)} does not say what kind of data it is: {proposal}")


def split_records(
    records: Sequence[Record], split: str, fraction: float, validation: float, seed: int = 0
) -> list[Record]:
    """The records of the split "train" or "validation": all records of a picture are in the same one.

    The share `validation` of the pictures is held out; the share `fraction` of the others is used (the paper's Part 1:
    0.4). Records with several pictures are kept together with all other records of these. Records that cannot be used
    are in "train".
    """
    groups = groups_of(records)
    names = sorted(set(groups.values()))
    random.Random(f"split/{seed}").shuffle(names)
    held_out = round(len(names) * validation)
    if split == "validation":
        chosen = set(names[:held_out])
    else:
        chosen = set(names[held_out : held_out + round((len(names) - held_out) * fraction)])
    return [r for r in records if (groups[r.name] in chosen if r.turns else split == "train")]


def groups_of(records: Sequence[Record]) -> dict[str, str]:
    """The group of each record that can be used, by name: the smallest key of records with pictures in common."""
    leader: dict[str, str] = {}  # of each key and picture, one that stands for its group, or leads to it

    def find(name: str) -> str:
        while leader.setdefault(name, name) != name:
            leader[name] = name = leader[leader[name]]
        return name

    usable, smallest = [r for r in records if r.turns], {}
    files = {picture for record in usable for picture in record.pictures if isinstance(picture, Path)}
    files = {picture: f"file {real_path(picture)}" for picture in files}
    for record in usable:
        for picture in record.pictures:
            if picture in files:
                leader[find(files[picture])] = find(f"key {record.key}")
    for record in usable:
        group = find(f"key {record.key}")
        smallest[group] = min(smallest.get(group, record.key), record.key)
    return {record.name: smallest[find(f"key {record.key}")] for record in usable}


# Embedded scenes


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
    found = None if s.task != "detect" else Detection(SIDE, SIDE, tuple(_squares(s.suffix)))
    return Record(name, key, (s.scene.render,), ((s.prefix, s.suffix),), detection=found)


def _squares(suffix: str) -> Iterator[Box]:
    """The squares of the grid that an answer to `detect` names."""
    side = SIDE // GRID
    for part in suffix.split(" ; "):
        y, x = (int(number) * GRID // 1024 * side for number in re.findall(r"<loc(\d{4})>", part)[:2])
        yield Box(part.rpartition("> ")[2], x, y, side, side, side * side)


# Files


def vqav2_records(
    folder: Path, prompt: str, sampled: bool = False, images: str | Path | None = None, allow_outside: bool = False
) -> list[Record]:
    """Questions of VQAv2's train2014, in their official layout under `folder`; pictures there or under `images`.

    prompt: a template with {question}. The suffix is multiple_choice_answer; with `sampled`, one of the ten answers,
    drawn anew in each epoch. Raises UserError for files that are absent, and for a question without an annotation.
    """
    check_prompt(prompt)
    files = folder / QUESTIONS_FILE, folder / ANNOTATIONS_FILE
    questions, annotations = read_questions(files[0]), read_annotations(files[1])
    pictures = {name: _find(images or folder, name, allow_outside) for name in {q.image for q in questions}}
    return [
        Record(
            str(q.question_id),
            q.image,
            (pictures[q.image],),
            ((fill_prompt(prompt, q.question), a.answer),),
            tuple(given["answer"] for given in a.answers),
            sampled,
        )
        for q, a in zip(questions, annotations_of(questions, annotations, *files), strict=True)
    ]


def _find(folder: str | Path, name: str, allow_outside: bool) -> Picture:
    """The path of a picture; where its name leads outside, a function that says so when the picture is opened."""
    try:
        return find_image(folder, name, allow_outside)
    except UserError as error:
        return Refusal(f"picture {error}")


def own_records(
    path: Path,
    sampled: bool = False,
    images: str | Path | None = None,
    allow_outside: bool = False,
    read: Callable[..., list[Example]] = read_examples,
) -> list[Record]:
    """The records of a user's own file, see eval/own_files.py. One that cannot be used says so when it is opened.

    Raises UserError for a file without any sound record.
    """
    bad: list[UserError] = []
    examples = read(path, images, allow_outside, bad.append)
    if not examples:
        problem = f"none of its {len(bad)} records can be used: {bad[0]}" if bad else "holds no records"
        raise UserError(f"{shown(path)}: {problem}")
    records = []
    for e in examples:
        key = "\n".join(map(str, e.pictures)) or f"{path}{e.place}"
        record = Record(f"{path.name}{e.place}", key, e.pictures, e.turns, e.answers, sampled, e.detection)
        records.append(upright(record))
    for error in bad:
        place, _, problem = str(error).removeprefix(shown(path)).partition(": ")
        records.append(refused(f"{path.name}{place}", f"{path}{place}", problem))
    return records


def upright(record: Record) -> Record:
    """The record; refused if its boxes are those of a picture as it is stored, which EXIF turns by 90°."""
    for path in record.pictures if record.detection else ():
        # what cannot be opened says so later; a PNG whose header has no EXIF would be decoded to look for one
        with contextlib.suppress(Exception), Image.open(path) as image:
            (width, height), annotated = image.size, (record.detection.width, record.detection.height)
            if width == height or annotated != image.size or image.format == "PNG" and "exif" not in image.info:
                continue
            if image.getexif().get(ExifTags.Base.Orientation, 1) >= TURNED:
                problem = f"has boxes for {width}×{height} pixels, but EXIF turns it to {height}×{width}"
                return refused(record.name, record.key, f"{shown(path)}: {problem}: save it upright, annotate that")
    return record
