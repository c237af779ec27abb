"""Readers of a user's own data: examples and conversations as JSON, and COCO's boxes.

In: a file, and the folder of its pictures. Out: an `Example` for each record of the file, with the path of its
pictures, which are not opened. `eval/records.py` makes records of them.

A record that breaks its format is a `UserError` with its place in the file, and the remedy.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.datasets import LIST, NAME, TEXT, check_flat, check_unique, find_image, read_id, records_of
from model.common import Expected, UserError, json_name, open_regular, quoted, read_field, read_json, read_jsonl, shown
from model.turns import SLOT, check_turns

ROLES = ("human", "gpt")  # of LLaVA's conversations, in turn
NUMBER = Expected(float, -1e9, 1e9)
SIDE = Expected(int, 1, 1 << 24)  # of a picture, in pixels


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
class Example:
    """One record of a file; `place` says where in it, such as ":12" for a line or "[3]" for an entry of a list.

    turns: prompts with their answers; `<image>` in a prompt marks the place of a picture. answers: all that are right,
    of the last turn.
    """

    place: str
    pictures: tuple[Path, ...]
    turns: tuple[tuple[str, str], ...]
    answers: tuple[str, ...] = ()
    detection: Detection | None = None


Bad = Callable[[UserError], None]  # is given what is wrong with a record


def read_examples(
    path: str | Path, images: str | Path | None = None, allow_outside: bool = False, bad: Bad | None = None
) -> list[Example]:
    """Read {"image", "prefix", "suffix"} or LLaVA's {"image", "conversations"}, line by line or from a JSON list.

    "image" may be absent, for text alone, or a list of names, relative to `images`, by default the file's folder.
    "answers", a list, may stand beside or instead of "suffix", which then is the most frequent of them.

    Raises UserError, with its place, for a malformed record and for a picture that is absent or outside of the folder
    (see `inside`). Such errors are given to `bad` if there is one; a file without any sound record is an error.
    """
    folder, examples, found = Path(path).parent if images is None else Path(images), [], {}
    for where, record in _objects(path, bad):
        try:
            names = picture_names(record, where)
            turns, answers = read_turns(record, where)
            try:
                check_turns(len(names), turns)
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
            pictures = tuple(_picture(folder, name, allow_outside, where, found) for name in names)
        except UserError as error:
            if bad is None:
                raise
            bad(error)
        else:
            examples.append(Example(where.removeprefix(shown(path)), pictures, turns, answers))
    check_flat(found, path)
    if not examples and bad is None:
        raise UserError(f"{shown(path)}: holds no records: expected JSON objects, one on each line or in a list")
    return examples


def _objects(path: str | Path, bad: Bad | None) -> Iterator[tuple[str, dict]]:
    """The objects of a file with their places: a JSON list if it begins like one, else JSON lines."""
    with open_regular(path) as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start.startswith(b"["):
        yield from read_jsonl(path, bad)
        return
    for number, record in enumerate(read_json(path, list)):
        where = f"{shown(path)}[{number}]"
        if isinstance(record, dict):
            yield where, record
            continue
        error = UserError(f"{where}: expected an object, found {json_name(record)}: correct the record")
        if bad is None:
            raise error
        bad(error)


def picture_names(record: dict, where: str) -> list[str]:
    """The names of a record's pictures under "image": one, a list, or none. Raises UserError.

    A key of nearly this name is one, too: the record would be asked without its picture.
    """
    other = [key for key in record if re.match("image|img|picture|photo", key, re.IGNORECASE)]
    if other and "image" not in record:
        raise UserError(f"{where}: has {quoted(other[0])}, but no 'image', which names the pictures: rename it")
    given = record.get("image")
    names = given if isinstance(given, list) else [] if given is None else [given]
    return [read_field({"image": name}, "image", NAME, where) for name in names]


def _picture(folder: Path, name: str, allow_outside: bool, where: str, found: dict[str, Path]) -> Path:
    """The path of a picture, kept in `found` by its name. Raises UserError."""
    try:
        image = find_image(folder, name, allow_outside)
    except UserError as error:
        raise UserError(f"{where}: picture {error}") from None
    if not image.is_file():
        raise UserError(
            f"{where}: picture {quoted(name)} is not in {shown(folder)}: give the folder that holds it (--images DIR)"
        )
    found[name] = image
    return image


def read_turns(record: dict, where: str) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """The turns of a record, and all right answers of the last one where it gives several. Raises UserError."""
    if "conversations" in record:
        return _conversation(record, where), ()
    answers = read_field(record, "answers", LIST, where, default=[])
    for number, answer in enumerate(answers):
        read_field({"answers": answer}, "answers", TEXT, f"{where}: entry {number}")
    most = {"suffix": Counter(answers).most_common(1)[0][0]} if answers else {}
    prefix, suffix = (read_field(most | record, key, TEXT, where) for key in ("prefix", "suffix"))
    return ((prefix, suffix),), tuple(answers)


def _conversation(record: dict, where: str) -> tuple[tuple[str, str], ...]:
    """The turns of LLaVA's layout; a first one that is not from a human is left out, as there."""
    turns = read_field(record, "conversations", LIST, where)
    texts = []
    for number, turn in enumerate(turns):
        place = f"{where}: conversations[{number}]"
        if not isinstance(turn, dict):
            raise UserError(f"{place}: expected an object, found {json_name(turn)}: correct the record")
        speaker = read_field(turn, "from", TEXT, place)
        if not number and speaker != ROLES[0]:
            continue
        expected = ROLES[len(texts) % 2]
        if speaker != expected:
            raise UserError(f"{place}: from is {quoted(speaker)}, expected {expected!r}: human and gpt take turns")
        texts.append(read_field(turn, "value", TEXT, place))
        if speaker == ROLES[1] and SLOT in texts[-1]:
            raise UserError(f"{place}: {SLOT} in an answer: it marks the place of a picture in a prompt")
    if not texts or len(texts) % 2:
        raise UserError(f"{where}: conversations ends without an answer from gpt: correct the record")
    return tuple(zip(texts[::2], texts[1::2], strict=True))


# COCO's boxes


def read_coco(
    path: str | Path, images: str | Path | None = None, allow_outside: bool = False, bad: Bad | None = None
) -> list[Example]:
    """Read COCO's detection annotations: one example for each picture with an object, `detect a ; b` and its boxes.

    The prompt names all classes that the picture has, in the order of their ids; the answer has the boxes in the same
    order, and those of a class from top to bottom and left to right. Crowds are not part of it, but of `detection`.
    Pictures without any object that could be asked for are left out. Raises UserError, also for boxes that cannot be
    [x, y, width, height] in pixels; errors of a picture, and objects of pictures that are not listed, go to `bad`.
    """
    value = read_json(path)
    name = shown(path)
    folder = Path(path).parent if images is None else Path(images)
    categories, entries = (_entries(value, key, name) for key in ("categories", "images"))
    for objects in (categories, entries):
        check_unique((entry["id"] for _, entry in objects if "id" in entry), path)
    labels = {}
    for where, entry in categories:
        label = labels[read_id(entry, "id", where)] = " ".join(read_field(entry, "name", NAME, where).split())
        if not label or set(";<>") & set(label):
            problem = "but ; < > stand between the names of prompts and answers: rename it"
            raise UserError(f"{where}: name is {quoted(entry['name'])}, {problem}")
    of_image: dict[int | str, list[tuple[str, dict]]] = defaultdict(list)
    for where, entry in _entries(value, "annotations", name):
        of_image[read_id(entry, "image_id", where)].append((where, entry))
    examples, found, listed = [], {}, set()
    for where, entry in entries:
        try:
            id_ = read_id(entry, "id", where)
            listed.add(id_)
            width, height = (read_field(entry, side, SIDE, where) for side in ("width", "height"))
            boxes = [_box(annotation, labels, place, width, height) for place, annotation in of_image[id_]]
            if all(box.is_crowd for box in boxes):
                continue
            picture = _picture(folder, read_field(entry, "file_name", NAME, where), allow_outside, where, found)
        except UserError as error:
            if bad is None:
                raise
            bad(error)
        else:
            detection = Detection(width, height, tuple(boxes))
            order = list(labels.values())
            turn = detection_turn(detection, order)
            examples.append((id_, Example(where.removeprefix(name), (picture,), (turn,), (), detection)))
    check_flat(found, path)
    _check_units([example.detection for _, example in examples], name)
    if stray := [place for id_, boxes in of_image.items() if id_ not in listed for place, _ in boxes]:
        error = UserError(f"{stray[0]}: image_id is not among the images, as of {len(stray)} annotation(s): list it")
        if bad is None:
            raise error
        bad(error)
    # in COCO's order of pictures, which decides between boxes of one score
    return [example for _, example in sorted(examples, key=lambda pair: (isinstance(pair[0], str), pair[0]))]


def _entries(value: dict, key: str, name: str) -> list[tuple[str, dict]]:
    entries = read_field(value, key, Expected(list), name, remedy="give a file of COCO's instances")
    return records_of(entries, f"{name}:{key}") if entries else []


def _box(entry: dict, labels: dict, where: str, of_width: int, of_height: int) -> Box:
    """The box of an annotation of a picture of that size. Raises UserError."""
    label = labels.get(read_id(entry, "category_id", where))
    if label is None:
        raise UserError(f"{where}: category_id {quoted(entry['category_id'])} is not among the categories")
    corner = read_field(entry, "bbox", Expected(list, 4, 4), where)
    x, y, width, height = (read_field({"bbox": side}, "bbox", NUMBER, where) for side in corner)
    if width < 0 or height < 0:
        raise UserError(f"{where}: bbox is {quoted(corner)}, expected [x, y, width, height] of at least 0")
    if x > of_width or y > of_height or x + width < 0 or y + height < 0:
        raise UserError(f"{where}: bbox {quoted(corner)} is outside of the picture, {of_width}×{of_height} pixels")
    area = read_field(entry, "area", NUMBER, where, default=width * height)
    crowd = read_field(entry, "iscrowd", Expected(int, choices=(0, 1)), where, default=0)
    return Box(label, x, y, width, height, area, bool(crowd))


def _check_units(detections: Sequence[Detection], name: str) -> None:
    """Raise UserError if the boxes of a file cannot all be [x, y, width, height] in pixels: each by itself can."""
    sized = [(box, of) for of in detections if min(of.width, of.height) > 1 for box in of.boxes]
    if sized and all(max(box.x, box.y, box.width, box.height) <= 1 for box, _ in sized):
        raise UserError(f"{name}: every bbox lies within 0 to 1, as if in shares of the sides: give pixels")
    are_outside = any(box.x + box.width > of.width + 1 or box.y + box.height > of.height + 1 for box, of in sized)
    if are_outside and all(box.width >= box.x and box.height >= box.y for box, _ in sized):
        problem = "and the third and fourth number are never less than the first two, as in [x1, y1, x2, y2]"
        raise UserError(f"{name}: boxes reach out of their pictures, {problem}: give [x, y, width, height]")


def detection_turn(detection: Detection, order: list[str]) -> tuple[str, str]:
    """PaliGemma's prompt and answer: `detect a ; b`, and `<locY1><locX1><locY2><locX2> a ; …`.

    A coordinate v, a share of the side, is the bin round(1023·v), within 0 … 1023 (big_vision,
    pp/proj/paligemma/segmentation.py). order: of the classes.
    """
    boxes = sorted(
        (box for box in detection.boxes if not box.is_crowd), key=lambda box: (order.index(box.label), box.y, box.x)
    )
    parts = []
    for box in boxes:
        y1, y2 = (v / detection.height for v in (box.y, box.y + box.height))
        x1, x2 = (v / detection.width for v in (box.x, box.x + box.width))
        places = (min(max(round(1023 * v), 0), 1023) for v in (y1, x1, y2, x2))
        parts.append("".join(f"<loc{place:04d}>" for place in places) + f" {box.label}")
    return "detect " + " ; ".join(dict.fromkeys(box.label for box in boxes)), " ; ".join(parts)
