"""Your own data as records: examples and LLaVA's conversations as JSON, and COCO's boxes.

In: a file, and the folder of its pictures. Out: a `Record` for each of its entries; pictures are not opened.
`eval/records.py` chooses among all sources of records.
"""

import contextlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, NoReturn

import numpy as np
from PIL import ExifTags, Image

from eval.data import Places, check, check_unique, find_image, problems_at, read, records_in, some, text
from model.common import UserError, quoted, read_json, shown
from model.turns import SLOT, check_turns

ROLES = ("human", "gpt")  # of LLaVA's conversations, in turn
TURNED = 5  # EXIF orientations from here on exchange width and height
Picture = Path | Callable[[], Image.Image | np.ndarray | BinaryIO]  # a file, or a function that draws or opens one
Turns = tuple[tuple[str, str], ...]  # prompts with their answers


@dataclass(frozen=True)
class Box:
    """An object in a picture: x and y of its upper left corner, in pixels. A crowd is not one object."""

    label: str
    x: float
    y: float
    width: float
    height: float
    area: float  # as annotated: of the object's outline, not of the box
    is_crowd: bool = False


@dataclass(frozen=True)
class Detection:
    """The objects of a picture of width × height pixels, those that are asked for."""

    width: int
    height: int
    boxes: tuple[Box, ...]


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
    turns: Turns
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


def refused(problem: str) -> Record:
    """The record that stands for data that cannot be used, so that it is named, left out and counted."""
    return Record("", "", (Refusal(problem),), ())


Refuse = Callable[[str], Record] | None  # see `read`


def named(records: Sequence[Record], path: str | Path, places: Places) -> list[Record]:
    """The records of a file with names by their places, and keys by their pictures."""
    keys, file = ["\n".join(map(str, record.pictures)) if record.turns else "" for record in records], Path(path).name
    return [
        replace(record, name=f"{file}{place}", key=key or f"{path}{place}")
        for record, key, (place, _) in zip(records, keys, places, strict=True)
    ]


# Examples and conversations


def read_examples(path: str | Path, images: str | Path | None = None, refuse: Refuse = None) -> list[Record]:
    """{"image", "prefix", "suffix"} or LLaVA's {"image", "conversations"}, line by line or from a JSON list.

    "image" may be absent, for text alone, or a list of names, relative to `images`, by default the file's folder.
    "answers", a list, may stand beside or instead of "suffix", which then is the most frequent of them.
    Raises UserError, also for a picture that is absent.
    """
    folder, places = Path(images or Path(path).parent), records_in(path)

    def example(record: dict) -> Record:
        names, (turns, answers) = picture_names(record), read_turns(record)
        check_turns(len(names), turns)
        return Record("", "", tuple(find_picture(folder, name) for name in names), turns, answers)

    return named(read(path, example, places, refuse), path, places)


def picture_names(record: Mapping) -> list[str]:
    """The names of a record's pictures under "image": one, a list, or none. Raises ValueError.

    A key of nearly this name is a mistake: the record would be asked without its picture.
    """
    similar = [key for key in record if re.match("image|img|picture|photo", key, re.IGNORECASE)]
    if similar and "image" not in record:
        raise ValueError(f"has {some(similar)}, but no 'image', which names the pictures")
    names = record.get("image") or []
    return [text({"image": name}, "image") for name in (names if isinstance(names, list) else [names])]


def find_picture(folder: Path, name: str) -> Path:
    """The path of a picture. Raises ValueError if it is absent."""
    path = find_image(folder, name)
    if not path.is_file():
        raise ValueError(f"picture {quoted(name)} is not in {shown(folder)}, give its folder (--images DIR)")
    return path


def read_turns(record: Mapping) -> tuple[Turns, tuple[str, ...]]:
    """The turns of a record, and all right answers of the last one where it gives several.

    Of LLaVA's conversations a first turn that is not from a human is left out, as there. Raises LookupError, TypeError
    and ValueError for another layout.
    """
    if "conversations" in record:
        said = record["conversations"]
        said = said[said[0]["from"] != ROLES[0] :]
        speakers, texts = [turn["from"] for turn in said], [text(turn, "value") for turn in said]
        takes_turns = len(said) > 1 and speakers == list(ROLES) * (len(said) // 2)
        check(takes_turns, "conversations: human and gpt take turns, and the last one is gpt's")
        check(SLOT not in "".join(texts[1::2]), f"{SLOT} in an answer: it marks the place of a picture in a prompt")
        return tuple(zip(texts[::2], texts[1::2], strict=True)), ()
    answers = tuple(text({"answers": answer}, "answers") for answer in record.get("answers", ()))
    most = {"suffix": Counter(answers).most_common(1)[0][0]} if answers else {}
    return ((text(record, "prefix"), text(most | record, "suffix")),), answers


# COCO's boxes


def read_coco(path: str | Path, images: str | Path | None = None, refuse: Refuse = None) -> list[Record]:
    """COCO's detection annotations: one record for each picture with an object, `detect a ; b` and its boxes.

    The prompt names all classes that the picture has, in the order of the file; the answer has the boxes in the same
    order, and those of a class from top to bottom and left to right. Crowds are not part of it, but of `detection`.
    Pictures are in the order of their ids, which in COCO's scorer decides between boxes of one score. Raises UserError.
    """
    value, folder, objects = read_json(path), Path(images or Path(path).parent), defaultdict(list)
    with problems_at(path):
        labels = {entry["id"]: " ".join(text(entry, "name").split()) for entry in value["categories"]}
        strange = [label for label in labels.values() if not label or set(";<>") & set(label)]
        check(not strange, f"names {some(strange)}: ; < > stand between the names of an answer")
        for entry in value["annotations"]:
            objects[entry["image_id"]].append(entry)
        for part in ("categories", "images"):
            check_unique((entry["id"] for entry in value[part]), part)
        pictures = [(f":images[{number}]", entry) for number, entry in enumerate(value["images"])]
        pictures = [pair for pair in pictures if not all(entry.get("iscrowd") for entry in objects[pair[1]["id"]])]
        pictures.sort(key=lambda pair: pair[1]["id"])

    def detection(entry: dict) -> Record:
        width, height = entry["width"], entry["height"]
        boxes = tuple(box_of(annotation, labels, width, height) for annotation in objects[entry["id"]])
        picture, truth = find_picture(folder, text(entry, "file_name")), Detection(width, height, boxes)
        check_upright(picture, width, height)
        return Record("", "", (picture,), (detection_turn(truth, list(labels.values())),), detection=truth)

    records = read(path, detection, pictures, refuse)
    check_units([record.detection for record in records if record.detection], path)
    return named(records, path, pictures)


def box_of(entry: Mapping, labels: Mapping, of_width: int, of_height: int) -> Box:
    """The box of an annotation, in a picture of that size. Raises LookupError, TypeError and ValueError."""
    check(entry["category_id"] in labels, f"category_id {quoted(entry['category_id'])} is not among the categories")
    x, y, width, height = entry["bbox"]
    area = entry.get("area", width * height)
    is_within = min(width, height, x + width, y + height) >= 0 and x <= of_width and y <= of_height
    is_within = is_within and math.isfinite(width + height + area) and min(of_width, of_height) > 0
    check(is_within, f"bbox {quoted(entry['bbox'])} is outside of the picture, {of_width}×{of_height} pixels")
    return Box(labels[entry["category_id"]], x, y, width, height, area, bool(entry.get("iscrowd", 0)))


def check_upright(path: Path, width: int, height: int) -> None:
    """Raise ValueError if the boxes are those of a picture as it is stored, which EXIF turns by 90°."""
    # what cannot be opened says so later; a PNG whose header has no EXIF would be decoded to look for one
    with contextlib.suppress(OSError, SyntaxError, Image.DecompressionBombError), Image.open(path) as image:
        if image.size == (width, height) != (height, width) and (image.format != "PNG" or "exif" in image.info):
            is_turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= TURNED
            check(not is_turned, f"{shown(path)} has boxes for {width}×{height} pixels, but EXIF turns it")


def check_units(detections: Sequence[Detection], path: str | Path) -> None:
    """Raise UserError if the boxes of a file cannot all be [x, y, width, height] in pixels: each by itself can."""
    sized = [(box, of) for of in detections if min(of.width, of.height) > 1 for box in of.boxes]
    are_shares = bool(sized) and all(max(box.x, box.y, box.width, box.height) <= 1 for box, _ in sized)
    are_outside = any(box.x + box.width > of.width + 1 or box.y + box.height > of.height + 1 for box, of in sized)
    if are_shares or are_outside and all(box.width >= box.x and box.height >= box.y for box, _ in sized):
        unit = "shares of the sides" if are_shares else "[x1, y1, x2, y2]"
        raise UserError(f"{shown(path)}: boxes are {unit}: give [x, y, width, height] in pixels")


def detection_turn(detection: Detection, order: list[str]) -> tuple[str, str]:
    """PaliGemma's prompt and answer: `detect a ; b`, and `<locY1><locX1><locY2><locX2> a ; …`.

    A coordinate v, a share of the side, is the bin round(1023·v), within 0 … 1023 (big_vision,
    pp/proj/paligemma/segmentation.py). order: of the classes.
    """
    boxes = sorted((b for b in detection.boxes if not b.is_crowd), key=lambda b: (order.index(b.label), b.y, b.x))
    parts = []
    for box in boxes:
        y1, y2 = (v / detection.height for v in (box.y, box.y + box.height))
        x1, x2 = (v / detection.width for v in (box.x, box.x + box.width))
        places = (min(max(round(1023 * v), 0), 1023) for v in (y1, x1, y2, x2))
        parts.append("".join(f"<loc{place:04d}>" for place in places) + f" {box.label}")
    return "detect " + " ; ".join(dict.fromkeys(box.label for box in boxes)), " ; ".join(parts)
