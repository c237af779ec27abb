"""Records: pictures, prompts and right answers, as training learns from them and evaluation asks them.

In: a source, such as `jsonl:FILE`, and which share of it to use. Out: a list of `Record`. Pictures are not opened here.
Tar shards of records are read by `train/data/shards.py`.
"""

import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from os.path import realpath
from pathlib import Path

from PIL import Image

from eval import scenes
from eval.data import PROMPT, annotations_of, check_prompt, fill_prompt, find_image, read_layout, read_questions
from eval.own_files import Box, Detection, Record, read_coco, read_examples, refused
from eval.pictures import GRID, SIDE
from model.common import UserError, quoted

QUESTIONS_FILE = "v2_OpenEnded_mscoco_train2014_questions.json"
ANNOTATIONS_FILE = "v2_mscoco_train2014_annotations.json"
# Tasks of the embedded data, taken in turn. Half are questions, or the model forgets how to answer them.
EMBEDDED_TASKS = ("vqa", "n2o1", "vqa", "n2o2")
gray_picture = partial(Image.new, "RGB", (64, 64), (127, 127, 127))  # of whatever size, a model sees the same

KINDS = ("vqav2", "jsonl", "coco", "shards")
SOURCES = (
    "embedded, vqav2:DIR (official files), jsonl:FILE (image with prefix and suffix, or LLaVA's conversations; lines "
    "or a list), coco:FILE (boxes to detect)"
)


def read_data(
    source: str,
    split: str = "all",
    *,
    images: str | Path | None = None,
    prompt: str = PROMPT,
    sampled: bool = False,
    fraction: float = 1.0,
    validation: float = 0.0,
    seed: int = 0,
    tasks: Sequence[str] = EMBEDDED_TASKS,
    samples: int = 12000,
) -> list[Record]:
    """The records of `embedded`, `vqav2:DIR`, `jsonl:FILE` or `coco:FILE`.

    split: "train", "validation", or "all" of them. images: the folder of the pictures. prompt: of VQAv2. sampled: each
    epoch learns one of several answers, drawn anew. fraction, validation, seed: see `split_records`. tasks, samples: of
    the embedded scenes. Raises UserError, also for a file without any record that can be used.
    """
    kind, path = source_parts(source)
    if kind == "shards":
        raise UserError(f"{source}: tar shards can be trained on, not asked: give what they were made of")
    if kind == "embedded":
        return embedded_records(tasks, "train" if split == "all" else split, samples, seed)
    if kind == "vqav2":
        records = vqav2_records(path, prompt, sampled, images)
    else:
        records = own_records(path, sampled, images, read_coco if kind == "coco" else read_examples)
    return records if split == "all" else split_records(records, split, fraction, validation, seed)


def source_parts(source: str) -> tuple[str, Path]:
    """The kind of a source and its path. Raises UserError."""
    kind, _, path = source.partition(":")
    if source != "embedded" and not (kind in KINDS and path):
        raise UserError(f"{quoted(source)} does not say what kind of data it is: give {SOURCES}")
    return kind, Path(path)


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
    truth = Detection(SIDE, SIDE, tuple(squares(s.suffix))) if s.task == "detect" else None
    name, key = f"{s.task}/{split}/{s.question_id}", f"{s.task}/{s.image_id}"
    return Record(name, key, (s.scene.render,), ((s.prefix, s.suffix),), detection=truth)


def squares(suffix: str) -> Iterator[Box]:
    """The squares of the grid that an answer to `detect` names."""
    side = SIDE // GRID
    for part in suffix.split(" ; "):
        y, x = (int(number) * GRID // 1024 * side for number in re.findall(r"<loc(\d{4})>", part)[:2])
        yield Box(part.rpartition("> ")[2], x, y, side, side, side * side)


def vqav2_records(folder: Path, prompt: str, sampled: bool = False, images: str | Path | None = None) -> list[Record]:
    """Questions of VQAv2's train2014, in their official layout under `folder`; pictures there or under `images`.

    prompt: a template with {question}. The suffix is multiple_choice_answer; with `sampled`, one of the ten answers,
    drawn anew in each epoch. Raises UserError for files that are absent, and for a question without an annotation.
    """
    check_prompt(prompt)
    files = folder / QUESTIONS_FILE, folder / ANNOTATIONS_FILE
    questions, records = read_questions(files[0]), []
    pictures = {name: find_image(images or folder, name) for name in {q.image for q in questions}}
    for q, truth in zip(questions, annotations_of(questions, read_layout(files[1])[1], *files), strict=True):
        turn, answers = (fill_prompt(prompt, q.question), truth.answer), tuple(a["answer"] for a in truth.answers)
        records.append(Record(str(q.question_id), q.image, (pictures[q.image],), (turn,), answers, sampled))
    return records


def own_records(
    path: Path,
    sampled: bool = False,
    images: str | Path | None = None,
    read: Callable[..., list[Record]] = read_examples,
) -> list[Record]:
    """The records of a user's own file; one that cannot be used says so when it is opened. Raises UserError for a file
    without any that can."""
    return [replace(record, sampled=sampled) for record in read(path, images, refused)]


# Splits, and pictures in gray


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
    used = held_out + round((len(names) - held_out) * fraction)
    chosen = set(names[:held_out] if split == "validation" else names[held_out:used])
    return [r for r in records if (groups[r.name] in chosen if r.turns else split == "train")]


def groups_of(records: Sequence[Record]) -> dict[str, str]:
    """The group of each record that can be used, by name: the smallest key of records with pictures in common."""
    leader: dict[str, str] = {}  # of each key and picture, one that stands for its group, or leads to it

    def find(name: str) -> str:
        while leader.setdefault(name, name) != name:
            leader[name] = name = leader[leader[name]]
        return name

    usable, smallest = [record for record in records if record.turns], {}
    files = {picture for record in usable for picture in record.pictures if isinstance(picture, Path)}
    files = {picture: f"file {realpath(picture)}" for picture in files}  # a picture may have several names
    for record in usable:
        for picture in record.pictures:
            if picture in files:
                leader[find(files[picture])] = find(f"key {record.key}")
    for record in usable:
        group = find(f"key {record.key}")
        smallest[group] = min(smallest.get(group, record.key), record.key)
    return {record.name: smallest[find(f"key {record.key}")] for record in usable}


def blind(records: Sequence[Record]) -> list[Record]:
    """The records with every picture gray, one for all: a model that answers them as well does not use the pictures."""
    return [
        replace(record, key=f"gray {len(record.pictures)}", pictures=(gray_picture,) * len(record.pictures))
        if record.turns and record.pictures
        else record
        for record in records
    ]
