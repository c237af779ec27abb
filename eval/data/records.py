"""Records: pictures, prompts and right answers, as training learns from them and evaluation asks
them.

In: the embedded scenes, VQAv2's files, or your own: examples and conversations as JSON, CSV or from
Python, and COCO's boxes. Out: a list of `Record`. Pictures in files are not opened here. An entry
that cannot be used becomes a record that says why when it is opened.
"""

import itertools
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

from PIL import ExifTags, Image

from eval.data import published
from eval.data.published import PROMPT, check, find_picture, text
from model.common import UserError, quoted, read_bytes, read_json, shown
from model.turns import SLOT, check_turns

QUESTIONS_FILE = "v2_OpenEnded_mscoco_train2014_questions.json"
ANNOTATIONS_FILE = "v2_mscoco_train2014_annotations.json"
EMBEDDED_TASKS = (
    "vqa",
    "n2o1",
    "vqa",
    "n2o2",
)  # in turn; without questions the model forgets how to answer them
ROLES = ("human", "gpt")  # of LLaVA's conversations, in turn
# of messages, in these words
SPEAKERS = {"user": "human", "assistant": "gpt", "developer": "system"}
DIALOGUES = (
    ("conversations", "from", "value"),
    ("messages", "role", "content"),
)  # LLaVA's; TRL's and ms-swift's
# Whether a turn is learned, in ms-swift, Axolotl, and OpenAI's files
MARKS = ("loss", "loss_scale", "loss_weight", "train", "training", "weight", "kto_tag")
# What else these and TRL learn from or show: media, boxes, tools, thoughts, preferences, parts
UNREAD = (
    "video|audio|objects|tools$|tool_calls|function|system.|instruction|history|chosen|rejected|"
    "mask|reasoning|thinking|train_detail"
)
FILE_NAME = re.compile(r"\.(jpe?g|png|webp|gif|bmp|tiff?)$", re.IGNORECASE)
LAYOUTS = (
    '{"image", "prefix", "suffix"}, {"image", "conversations": [{"from": "human", "value"}, {"from": "gpt", …}]} or '
    '{"images", "messages": [{"role": "user", "content"}, {"role": "assistant", …}]}'
)
SOURCES = (
    "embedded, vqav2:DIR (official files), jsonl:FILE (lines or a list: image with prefix and "
    "suffix, LLaVA's "
    "conversations, or messages as TRL's and ms-swift's), csv:FILE (image,prefix,suffix), "
    "coco:FILE (boxes to detect)"
)
Picture = (
    Path | Image.Image | Callable[[], Any]
)  # a file, an image, or a function that draws or opens one
gray_picture = partial(
    Image.new, "RGB", (64, 64), (127, 127, 127)
)  # of whatever size, a model sees the same


@dataclass(frozen=True)
class Box:
    """An object in a picture: x and y of its upper left corner, in pixels. A crowd is not one
    object."""

    label: str
    x: float
    y: float
    width: float
    height: float
    area: float  # as annotated: of the object's outline, not of the box
    is_crowd: bool = False

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for what a file may hold that is no box."""
        label, *numbers, is_crowd = vars(self).values()
        is_sound = math.isfinite(sum(numbers)) and min(numbers[2:]) >= 0
        check(
            is_sound and isinstance(label, str) and is_crowd in (0, 1),
            f"{quoted(self, 200)}: a name, a number or is_crowd is none",
        )


@dataclass(frozen=True)
class Detection:
    """The objects of a picture of width × height pixels, those that are asked for."""

    width: int
    height: int
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Record:
    """One example: pictures, then one or several turns of a prompt and its answer.

    name: unique, for messages. key: names the pictures; records with the same key share them, and
    their encoding. pictures: in the order in which they are shown; none for text alone. turns:
    (prompt, answer) pairs; `<image>` in a prompt marks the place of a picture. A record without
    turns stands for data that cannot be used: its picture raises the UserError that says why.
    answers: of the last turn where the data give several, one by each annotator. sampled: each
    epoch learns one of `answers`, drawn anew. detection: the objects to be found. kind: of the
    question, for a line of a table.
    """

    name: str
    key: str
    pictures: tuple[Picture, ...]
    turns: tuple[tuple[str, str], ...]
    answers: tuple[str, ...] = ()
    sampled: bool = False
    detection: Detection | None = None
    kind: str = ""

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


def read_data(source: str, images: str | Path | None = None, prompt: str = PROMPT) -> list[Record]:
    """The records of a source in files, see `SOURCES`. images: the folder of the pictures. prompt:
    of VQAv2. Raises UserError, also for a file without any usable record."""
    kind, path = source_parts(source)
    if kind == "vqav2":
        return vqav2_records(path, images, prompt)
    return read_coco(path, images) if kind == "coco" else read_examples(path, images, kind)


def source_parts(source: str) -> tuple[str, Path]:
    """The kind of a source and its path. Raises UserError."""
    kind, _, path = source.partition(":")
    if source != "embedded" and not (kind in ("vqav2", "jsonl", "csv", "coco") and path):
        raise UserError(f"{quoted(source)} does not say what kind of data it is: give {SOURCES}")
    return kind, Path(path)


# Embedded scenes, and VQAv2


def embedded_records(
    tasks: Sequence[str] = EMBEDDED_TASKS, split: str = "train", count: int = 12000, seed: int = 0
) -> list[Record]:
    """`count` records of the embedded scenes, the tasks in turn; a task that is listed twice comes
    twice as often."""
    from eval.data import scenes

    drawn = {task: itertools.count() for task in tasks}
    asked = itertools.islice(itertools.cycle(tasks), count)
    return [
        sample_record(scenes.sample(task, split, next(drawn[task]), seed), split) for task in asked
    ]


def sample_record(s: Any, split: str) -> Record:
    """The record of a `scenes.Sample`, whose picture is rendered when needed. Boxes to `detect` are
    squares."""
    from eval.data.pictures import GRID, SIDE

    truth, side = None, SIDE // GRID
    if s.task == "detect":
        name = s.prefix.removeprefix("detect ")
        places = [
            divmod(number, GRID) for number, shown in enumerate(s.scene.squares) if shown == name
        ]
        boxes = tuple(Box(name, x * side, y * side, side, side, side * side) for y, x in places)
        truth = Detection(SIDE, SIDE, boxes)
    name, key = f"{s.task}/{split}/{s.question_id}", f"{s.task}/{s.image_id}"
    return Record(name, key, (s.scene.render,), ((s.prefix, s.suffix),), detection=truth)


def one_picture_records(source: str, limit: int, images: str | Path | None = None) -> list[Record]:
    """The first `limit` records with one picture, in the first turn, the only one that is kept; of
    each embedded scene one. Raises UserError if there are none."""
    from eval.data import scenes

    if source == "embedded":
        samples = [scenes.vqa_picture("test", n)[n % len(scenes.QUESTIONS)] for n in range(limit)]
        return [sample_record(sample, "test") for sample in samples]
    records = [r for r in read_data(source, images) if len(r.pictures) == 1 and r.turns]
    records = [r for r in records if not any(SLOT in prompt for prompt, _ in r.turns[1:])][:limit]
    if not records:
        raise UserError(f"--data {source}: no example has one picture: give some that have")
    return [
        replace(r, turns=r.turns[:1], answers=r.answers if len(r.turns) == 1 else ())
        for r in records
    ]


def vqav2_records(
    folder: Path, images: str | Path | None = None, prompt: str = PROMPT
) -> list[Record]:
    """Questions of VQAv2's train2014, in their official layout under `folder`; pictures there or
    under `images`. prompt: a template with {question}. The suffix is multiple_choice_answer. Raises
    UserError."""
    records, find = [], cache(partial(published.find_image, images or folder))
    published.check_prompt(prompt)
    for q in published.read_vqa(folder / QUESTIONS_FILE, folder / ANNOTATIONS_FILE)[1]:
        turn, answers = (
            (published.fill_prompt(prompt, q.question), q.answer),
            tuple(a["answer"] for a in q.answers),
        )
        records.append(Record(str(q.question_id), q.image, (find(q.image),), (turn,), answers))
    return records


# Your own: examples and conversations


def read_examples(
    path: str | Path, images: str | Path | None = None, kind: str = "jsonl"
) -> list[Record]:
    """The examples of JSON lines, a JSON list, or a CSV table (kind csv, or *.csv), whose first row
    names the columns. images: the folder of the pictures, by default the file's. Raises UserError
    for a file without any usable entry."""
    is_table = kind == "csv" or Path(path).suffix == ".csv"
    places = rows_of(path) if is_table else published.records_in(path)
    return read_records(path, partial(record_of, folder=images or Path(path).parent), places)


def rows_of(path: str | Path) -> published.Places:
    """The rows of a CSV table by column; an empty cell is absent, cells without a column are at
    None. Raises UserError for another header."""
    (_, names), *rows = published.rows_in(path) or [("", [])]
    named = Counter(filter(None, names))
    if not {"prefix", "suffix"} <= named.keys() or max(named.values()) > 1:
        problem = f"its columns are {quoted(names, 400)}"
        raise UserError(f"{shown(path)}: {problem}: expected image,prefix,suffix, each once")
    return [
        (place, {name: cell for name, cell in itertools.zip_longest(names, row) if cell})
        for place, row in rows
    ]


def name_of(picture: Picture) -> str:
    """The path of a picture; of an open one a fingerprint."""
    is_open = isinstance(picture, Image.Image)
    return (
        sha256(f"{picture.width} ".encode() + picture.tobytes()).hexdigest()
        if is_open
        else str(picture)
    )


def read_records(
    path: str | Path, make: Callable[[dict], Record], places: published.Places
) -> list[Record]:
    """The records of a file, with names by their places and keys by their pictures, also of what
    cannot be used."""
    records = published.read(
        path, make, places, lambda problem: Record("", "", (Refusal(problem),), ())
    )
    keys = ["\n".join(map(name_of, record.pictures)) for record in records]
    named = zip(records, keys, (place for place, _ in places), strict=True)
    return [
        replace(r, name=f"{Path(path).name}{place}", key=key or f"{path}{place}")
        for r, key, place in named
    ]


def record_of(example: Mapping, folder: str | Path = ".") -> Record:
    """The record of an example in one of `LAYOUTS`, still without name and key. A picture is a
    path, a relative one in `folder`, a Pillow image or an array, uint8 (height, width, 3).
    "answers", a list, may stand beside or instead of "suffix", which then is the most frequent.
    "type" is a kind of question. Raises LookupError, TypeError, ValueError.
    """
    check(None not in example, "more cells than columns: a text with a comma stands between quotes")
    pictures, (turns, answers) = picture_names(example), read_turns(example)
    check_turns(len(pictures), turns)
    pictures = tuple(picture_of(picture, folder) for picture in pictures)
    return Record("", "", pictures, turns, answers, kind=str(example.get("type") or ""))


def picture_of(picture: Any, folder: str | Path) -> Picture:
    """The file that a text or {"url"} names, or the RGB image of an image or an array. Raises
    ValueError."""
    from model.images import load_image

    picture = picture["url"] if isinstance(picture, Mapping) else picture
    is_path = isinstance(picture, str | PathLike)
    return (
        find_picture(folder, str(picture).removeprefix("file://"))
        if is_path
        else load_image(picture)
    )


def picture_names(record: Mapping) -> list[Any]:
    """A record's pictures in order: under "image" or "images", one or a list, or in parts of its
    messages. Raises ValueError, also for a key of nearly this name: the record would be asked
    without its picture."""
    named = [key for key in ("image", "images") if record.get(key) is not None]
    check_read(record, UNREAD if named else f"{UNREAD}|image|img|picture|photo")
    parts = [part for _, said in dialogue(record) if isinstance(said, list) for part in said]
    own = [
        part[k]
        for part in parts
        for k in ("image", "image_url", "url", "path")
        if part.get(k) is not None
    ]
    order = [part["index"] for part in parts if part.get("index") is not None]
    check(
        order == [*range(len(order))],
        "its messages show the pictures in another order than 'images'",
    )
    lists = [*(record[key] for key in named), *[own] * bool(own)]
    check(len(lists) < 2, "names its pictures in two places")
    files = [key for key, value in record.items() if FILE_NAME.search(str(value))]
    check(bool(lists or not files), f"{published.some(files)} is no 'image' or 'images': rename it")
    return list(lists[0]) if lists and isinstance(lists[0], list | tuple) else lists


def check_read(entry: Mapping, unread: str = UNREAD, role: str = ROLES[1]) -> None:
    """Raise ValueError if a record, or a turn of `role`, has something under an `unread` key, a
    pattern, or a mark that its answer is not learned, or its prompt is."""
    strange = [key for key in entry if re.match(unread, key, re.IGNORECASE) and entry[key]]
    strange += [key for key in MARKS if entry.get(key) not in (None, role == ROLES[1])]
    remedy = "each answer is learned, nothing else; 'image' or 'images' names the pictures"
    check(not strange, f"has {published.some(strange)}: {remedy}")


def dialogue(record: Mapping) -> list[tuple[str, Any]]:
    """(role, content) of each turn of a conversation, LLaVA's or messages; none where a record is
    no conversation. Raises as `check_read`."""
    said = []
    for key, role, content in DIALOGUES:
        for turn in record.get(key) or ():
            speaker = SPEAKERS.get(turn[role], turn[role])
            check_read(turn, role=speaker)
            said.append((speaker, turn[content]))
    return said


def read_turns(record: Mapping) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """The turns of a record, and all right answers of the last one where it gives several. System
    texts stand before the first prompt; a first turn of the model is left out, as in LLaVA. Raises
    LookupError, TypeError and ValueError for another layout."""
    answers = record.get("answers") or ()
    check(not isinstance(answers, str), "answers is a text, expected a list")
    answers = tuple(text({"answers": answer}, "answers") for answer in answers)
    layouts = [key for key in ("conversations", "messages", "prefix") if record.get(key)]
    check(len(layouts) < 2, f"has {published.some(layouts)}: give one of them")

    said = dialogue(record)
    if not said:
        check(
            "prefix" in record,
            f"has {published.some(list(record))}, which is none of the layouts {LAYOUTS}",
        )
        most = {"suffix": Counter(answers).most_common(1)[0][0]} if answers else {}
        said = list(
            zip(ROLES, (text(record, "prefix"), text(most | dict(record), "suffix")), strict=True)
        )
    system = [text_of(record.get("system") or "")]
    while said and said[0][0] == "system":
        system.append(text_of(said.pop(0)[1]))
    if said and said[0][0] == ROLES[1]:
        del said[0]
    takes_turns = len(said) > 0 and [role for role, _ in said] == list(ROLES) * (len(said) // 2)
    check(takes_turns, "human (user) and gpt (assistant) take turns, and the last one is gpt's")
    texts = [text_of(content) for _, content in said]
    texts[0] = "\n".join([*filter(None, system), texts[0]])
    return tuple(zip(texts[::2], texts[1::2], strict=True)), answers


def text_of(content: Any) -> str:
    """The text of a message, in which `<image>` stands for each picture among its parts. Raises
    ValueError."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    kinds = [part["type"] for part in parts]
    check(
        {"text", "image", "image_url"}.issuperset(kinds),
        f"has parts {published.some(kinds)}: give text and image",
    )
    return "".join(text(part, "text") if part["type"] == "text" else SLOT for part in parts)


# COCO's boxes


def read_coco(path: str | Path, images: str | Path | None = None) -> list[Record]:
    """COCO's detection annotations: one record for each picture with an object, `detect a ; b` and
    its boxes. Crowds are not part of the answer, but of `detection`. Pictures are in the order of
    their ids, which in COCO's scorer decides between boxes of one score. Raises UserError."""
    value, folder, objects = read_json(path), Path(images or Path(path).parent), defaultdict(list)
    with published.problems_at(path):
        labels = {
            entry["id"]: " ".join(text(entry, "name").split()) for entry in value["categories"]
        }
        strange = [label for label in labels.values() if not label or set(";<>") & set(label)]
        check(
            not strange,
            f"names {published.some(strange)}: ; < > stand between the names of an answer",
        )
        for part in ("categories", "images"):
            published.check_unique((entry["id"] for entry in value[part]), path)
        for entry in value["annotations"]:
            objects[entry["image_id"]].append(entry)
        lost = objects.keys() - {entry["id"] for entry in value["images"]}
        check(
            not lost, f"annotations are of pictures that are not listed: {published.some([*lost])}"
        )
        places = [(f":images[{number}]", entry) for number, entry in enumerate(value["images"])]
        places = [
            pair
            for pair in places
            if not all(entry.get("iscrowd") == 1 for entry in objects[pair[1]["id"]])
        ]
        places.sort(key=lambda pair: pair[1]["id"])

    def detection(entry: dict) -> Record:
        size, boxes = (entry["width"], entry["height"]), []
        for annotated in objects[entry["id"]]:
            category, (x, y, width, height) = annotated["category_id"], annotated["bbox"]
            check(category in labels, f"category_id {quoted(category)} is not among the categories")
            is_within = (
                min(x + width, y + height) >= 0
                and x <= size[0] < math.inf
                and y <= size[1] < math.inf
            )
            check(
                is_within,
                f"bbox {quoted(annotated['bbox'])} is outside of the picture, {size[0]}×{size[1]} "
                "pixels",
            )
            area = annotated.get("area", width * height)
            is_crowd = annotated.get("iscrowd") or False
            boxes.append(Box(labels[category], x, y, width, height, area, is_crowd))
        truth, path = Detection(*size, tuple(boxes)), find_picture(folder, text(entry, "file_name"))
        with (
            suppress(OSError, SyntaxError, Image.DecompressionBombError),
            Image.open(path) as image,
        ):  # says so later
            is_turned = (
                image.format == "JPEG" and image.getexif().get(ExifTags.Base.Orientation, 1) > 4
            )  # by 90°
            check(
                not is_turned or image.size != size or size == size[::-1],
                f"{path} is turned by EXIF, its boxes not",
            )
        return Record(
            "", "", (path,), (detection_turn(truth, list(labels.values())),), detection=truth
        )

    records = read_records(path, detection, places)
    boxes = [
        (box, record.detection)
        for record in records
        if record.detection
        for box in record.detection.boxes
    ]
    are_shares = all(max(box.x, box.y, box.width, box.height) <= 1 for box, _ in boxes)
    reach_out = any(
        box.x + box.width > of.width + 1 or box.y + box.height > of.height + 1 for box, of in boxes
    )
    if (
        are_shares
        or reach_out
        and all(box.width >= box.x and box.height >= box.y for box, _ in boxes)
    ):
        unit = "shares of the sides" if are_shares else "[x1, y1, x2, y2]"
        raise UserError(f"{shown(path)}: boxes are {unit}: give [x, y, width, height] in pixels")
    return records


def detection_turn(detection: Detection, order: list[str]) -> tuple[str, str]:
    """PaliGemma's prompt and answer: `detect a ; b`, and `<locY1><locX1><locY2><locX2> a ; …`.
    Boxes go by class in this `order`, then from top to bottom and left to right. A coordinate v, a
    share of the side, is the bin round(1023·v), within 0 … 1023 (big_vision,
    pp/proj/paligemma/segmentation.py)."""
    boxes = sorted(
        (b for b in detection.boxes if not b.is_crowd),
        key=lambda b: (order.index(b.label), b.y, b.x),
    )
    parts = []
    for box in boxes:
        y1, y2 = (v / detection.height for v in (box.y, box.y + box.height))
        x1, x2 = (v / detection.width for v in (box.x, box.x + box.width))
        places = (min(max(round(1023 * v), 0), 1023) for v in (y1, x1, y2, x2))
        parts.append("".join(f"<loc{place:04d}>" for place in places) + f" {box.label}")
    return "detect " + " ; ".join(dict.fromkeys(box.label for box in boxes)), " ; ".join(parts)


# Splits, and pictures in gray


def split_records(
    records: Sequence[Record], split: str, fraction: float, validation: float, seed: int = 0
) -> list[Record]:
    """The records of the split "train" or "validation": all records of a picture are in the same
    one. The share `validation` of the pictures is held out; the share `fraction` of the others is
    used (the paper's Part 1: 0.4). Records with several pictures are kept together with all other
    records of these. Records that cannot be used are in "train"."""
    groups = groups_of(records)
    names = sorted(set(groups.values()))
    random.Random(f"split/{seed}").shuffle(names)
    held_out = round(len(names) * validation)
    used = held_out + round((len(names) - held_out) * fraction)
    chosen = set(names[:held_out] if split == "validation" else names[held_out:used])
    return [r for r in records if (groups[r.name] in chosen if r.turns else split == "train")]


def groups_of(records: Sequence[Record]) -> dict[str, str]:
    """The group of each record that can be used, by name: the smallest key of records with pictures
    in common, whatever their names, or of the same text without one."""
    usable = [record for record in records if record.turns]
    root: dict[
        tuple, tuple
    ] = {}  # of each key and each picture, a smaller one of its group, or itself

    def find(link: tuple) -> tuple:
        while root.setdefault(link, link) != link:
            root[link] = link = root[root[link]]
        return link

    for record, pictures in zip(usable, contents_of(usable), strict=True):
        links = [("", record.key), *(("picture", content) for content in pictures)]
        first, *others = sorted({find(link) for link in links})
        root |= dict.fromkeys(others, first)
    return {record.name: find(("", record.key))[1] for record in usable}


def contents_of(records: Sequence[Record]) -> list[set[str]]:
    """What the pictures of each record hold: of a file its size, and a digest where several have
    this size; of one in memory its digest. Drawn and absent ones are left out. Of a record without
    pictures its text."""
    sizes = {}
    for file in {picture for record in records for picture in record.pictures}:
        with suppress(OSError, AttributeError):  # absent, or no file
            sizes[file] = file.stat().st_size
    count, contents = Counter(sizes.values()), {}
    for file, size in sizes.items():
        contents[file] = str(size)
        if count[size] > 1:
            with suppress(UserError):
                contents[file] = sha256(read_bytes(file)).hexdigest()

    def content(picture: Picture) -> str:
        return contents.get(picture) or getattr(picture, "digest", "")

    return [{*map(content, r.pictures)} - {""} if r.pictures else {repr(r.turns)} for r in records]


def blind(records: Sequence[Record]) -> list[Record]:
    """The records with every picture gray, one for all: a model that answers them as well does not
    use the pictures."""
    counts = zip(
        records, [len(record.pictures) if record.turns else 0 for record in records], strict=True
    )
    return [
        replace(r, key=f"gray {n}", pictures=(gray_picture,) * n) if n else r for r, n in counts
    ]
