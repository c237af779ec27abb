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
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from hashlib import sha256
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image

from eval.data import files, scenes
from eval.data.files import Places, check, find_picture, some, text_at
from eval.data.masks import checked_mask
from eval.data.pictures import GRID, SIDE, SQUARE
from eval.data.published import read_vqa
from eval.data.record import (
    PROMPT,
    Box,
    Detection,
    Picture,
    Record,
    Refusal,
    Turns,
    check_prompt,
    fill_prompt,
    gray_picture,
)
from model.common import UserError, quoted, read_bytes, read_json, shown
from model.turns import SLOT, check_turns

QUESTIONS_FILE = "v2_OpenEnded_mscoco_train2014_questions.json"
ANNOTATIONS_FILE = "v2_mscoco_train2014_annotations.json"
# in turn; without questions the model forgets how to answer them
EMBEDDED_TASKS = ("vqa", "n2o1", "vqa", "n2o2")
ROLES = ("human", "gpt")  # of LLaVA's conversations, in turn
# of messages, in these words
SPEAKERS = {"user": "human", "assistant": "gpt", "developer": "system"}
DIALOGUES = (
    ("conversations", "from", "value"),  # LLaVA's
    ("messages", "role", "content"),  # TRL's and ms-swift's
)
# Whether a turn is learned, in ms-swift, Axolotl, and OpenAI's files
MARKS = ("loss", "loss_scale", "loss_weight", "train", "training", "weight", "kto_tag")
# What else these and TRL learn from or show: media, boxes, tools, thoughts, preferences, parts
UNREAD = (
    "video|audio|objects|tools$|tool_calls|function|system.|instruction|history|chosen|rejected|"
    "mask|reasoning|thinking|train_detail"
)
UNNAMED = f"{UNREAD}|image|img|picture|photo"  # and where pictures are named elsewhere, or nowhere
# at the end of what a key has, a list or a record too; or a picture itself
FILE_NAME = re.compile(
    r"\.(jpe?g|jpe|jfif|png|webp|gif|bmp|tiff?|jp2|j2k|p[pgn]m|hei[cf]|avif)(\?\S+)?\s*['\]}]*$|"
    r"^data:image/|<PIL\.",
    re.IGNORECASE,
)
NUMBERED = "(image|img|picture|photo)[ _.-]?([0-9]|[ab]$)"  # keys of one picture of several
LAYOUTS = (
    '{"image", "prefix", "suffix"}, '
    '{"image", "conversations": [{"from": "human", "value"}, {"from": "gpt", …}]} or '
    '{"images", "messages": [{"role": "user", "content"}, {"role": "assistant", …}]}'
)
SOURCES = (
    "embedded, vqav2:DIR (official files), vqa:FILE (of TextVQA, VizWiz, GQA, DocVQA, "
    "InfographicVQA or ChartQA, with its answers), jsonl:FILE (lines or a list: image with prefix and "
    "suffix, LLaVA's "
    "conversations, or messages as TRL's and ms-swift's), csv:FILE (image,prefix,suffix), "
    "coco:FILE (boxes to detect), coco-masks:FILE (its masks)"
)


def read_data(
    source: str,
    images: str | Path | None = None,
    prompt: str = PROMPT,
    masks: str | Path | None = None,
) -> list[Record]:
    """The records of a source in files, see `SOURCES`. images: the folder of the pictures. prompt:
    of QUESTION_SOURCES. masks: the coder of masks, see `load_mask_coder`. Raises UserError, also
    for a file without any usable record."""
    kind, path = source_parts(source)
    if kind == "vqav2":
        return vqav2_records(path, images, prompt)
    if kind == "vqa":
        return vqav2_records(path.parent, images, prompt, (path.name, path.name))
    if kind == "coco-masks":
        return read_coco(path, images, open_coder(source, masks))
    return read_coco(path, images) if kind == "coco" else read_examples(path, images, kind)


def source_parts(source: str) -> tuple[str, Path]:
    """The kind of a source and its path. Raises UserError."""
    kind, _, path = source.partition(":")
    is_file = kind in ("vqav2", "vqa", "jsonl", "csv", "coco", "coco-masks") and path
    if source != "embedded" and not is_file:
        raise UserError(f"{quoted(source)} does not say what kind of data it is: give {SOURCES}")
    return kind, Path(path)


# Embedded scenes, and VQAv2


def embedded_records(
    tasks: Sequence[str] = EMBEDDED_TASKS,
    split: str = "train",
    count: int = 12000,
    seed: int = 0,
) -> list[Record]:
    """`count` records of the embedded scenes, the tasks in turn; a task that is listed twice comes
    twice as often."""
    drawn = Counter()
    records = []
    for task in itertools.islice(itertools.cycle(tasks), count):
        sample = scenes.sample(task, split, drawn[task], seed)
        drawn[task] += 1
        records.append(sample_record(sample, split))
    return records


def sample_record(s: scenes.Sample, split: str) -> Record:
    """The record of a `scenes.Sample`, whose picture is rendered when needed. Boxes to `detect` are
    squares."""
    truth = None
    if s.task == "detect":
        label = s.prefix.removeprefix("detect ")
        boxes = []
        for number, name in enumerate(s.scene.squares):
            if name == label:
                row, column = divmod(number, GRID)
                corner = column * SQUARE, row * SQUARE
                boxes.append(Box(label, *corner, SQUARE, SQUARE, SQUARE**2))
        truth = Detection(SIDE, SIDE, tuple(boxes))
    name = f"{s.task}/{split}/{s.question_id}"
    key = f"{s.task}/{s.image_id}"
    return Record(
        name,
        key,
        (s.scene.render,),
        ((s.prefix, s.suffix),),
        detection=truth,
    )


def one_picture_records(
    source: str,
    limit: int,
    images: str | Path | None = None,
    prompt: str = PROMPT,
) -> list[Record]:
    """The first `limit` records with one picture, in the first turn, the only one that is kept; of
    each embedded scene one. prompt: of questions of VQA. Raises UserError if there are none."""
    records = []
    if source == "embedded":
        for number in range(limit):
            sample = scenes.vqa_picture("test", number)[number % len(scenes.QUESTIONS)]
            records.append(sample_record(sample, "test"))
        return records
    for record in read_data(source, images, prompt):
        later = record.turns[1:]
        is_in_first = not any(SLOT in asked for asked, _ in later)
        if record.turns and len(record.pictures) == 1 and is_in_first:
            answers = () if later else record.answers
            records.append(replace(record, turns=record.turns[:1], answers=answers))
    if not records:
        raise UserError(f"--data {source}: no example has one picture: give some that have")
    return records[:limit]


def vqav2_records(
    folder: Path,
    images: str | Path | None = None,
    prompt: str = PROMPT,
    names: tuple[str, str] = (QUESTIONS_FILE, ANNOTATIONS_FILE),
) -> list[Record]:
    """Questions of VQAv2's train2014, or of a relative, in their official layout under `folder`;
    pictures there or under `images`. prompt: a template with {question}. names: of the questions'
    and the answers' file. The suffix is multiple_choice_answer, or the most frequent answer. Raises
    UserError, also for a question without an answer."""
    check_prompt(prompt)
    find = cache(partial(files.find_image, images or folder))
    _, asked = read_vqa(*(folder / name for name in names))
    records = []
    for q in asked:
        turn = fill_prompt(prompt, q.question), q.answer
        answers = tuple(answer["answer"] for answer in q.answers)
        records.append(Record(str(q.question_id), q.image, (find(q.image),), (turn,), answers))
    return records


# Your own: examples and conversations


def read_examples(
    path: str | Path,
    images: str | Path | None = None,
    kind: str = "jsonl",
) -> list[Record]:
    """The examples of JSON lines, a JSON list, or a CSV table (kind csv, or *.csv), whose first row
    names the columns. images: the folder of the pictures, by default the file's. Raises UserError
    for a file without any usable entry."""
    is_table = kind == "csv" or Path(path).suffix == ".csv"
    places = table_rows(path) if is_table else files.records_in(path)
    splits = {str(row.get("split")) for _, row in places if isinstance(row, dict)}
    if len(splits) > 1:
        raise UserError(
            f"{shown(path)}: has the splits {some(sorted(splits))}: give a file for each"
        )
    folder = images or Path(path).parent
    return read_records(path, partial(record_of, folder=folder), places)


def table_rows(path: str | Path) -> Places:
    """The rows of a CSV table by column; an empty cell is absent, cells without a column are at
    None. Raises UserError for another header."""
    (_, names), *rows = files.rows_in(path) or [("", [])]
    named = Counter(filter(None, names))
    if not {"prefix", "suffix"} <= named.keys() or max(named.values()) > 1:
        problem = f"its columns are {quoted(names, 400)}"
        raise UserError(f"{shown(path)}: {problem}: expected image,prefix,suffix, each once")
    places = []
    for place, row in rows:
        cells = itertools.zip_longest(names, row)
        places.append((place, {name: cell for name, cell in cells if cell}))
    return places


def name_of(picture: Picture) -> str:
    """The path of a picture; of an open one a fingerprint."""
    if not isinstance(picture, Image.Image):
        return str(picture)
    return sha256(f"{picture.width} ".encode() + picture.tobytes()).hexdigest()


def read_records(
    path: str | Path,
    make: Callable[[dict], Record],
    places: Places,
) -> list[Record]:
    """The records of a file, with names by their places and keys by their pictures, also of what
    cannot be used."""

    def refuse(problem: str) -> Record:
        return Record("", "", (Refusal(problem),), ())

    records = []
    made = files.read(path, make, places, refuse)
    for (place, _), record in zip(places, made, strict=True):
        key = "\n".join(map(name_of, record.pictures)) or f"{path}{place}"
        records.append(replace(record, name=f"{Path(path).name}{place}", key=key))
    return records


def record_of(example: Mapping, folder: str | Path = ".") -> Record:
    """The record of an example in one of `LAYOUTS`, still without name and key. A picture is a
    path, a relative one in `folder`, a Pillow image or an array, uint8 (height, width, 3).
    "answers", a list, may stand beside or instead of "suffix", which then is the most frequent.
    "type" is a kind of question. Raises LookupError, TypeError, ValueError.
    """
    check(None not in example, "more cells than columns: a text with a comma stands between quotes")
    names = picture_names(example)
    turns, answers = read_turns(example)
    is_marked = example.get("video") and "<video>" in str(turns)
    check(not is_marked, "write <image> for each frame, or leave <video> out of the text")
    check_turns(len(names), turns)
    pictures = tuple(picture_of(name, folder) for name in names)
    kind = example.get("type")
    kind = "" if kind is None else str(kind)
    return Record("", "", pictures, turns, answers, kind=kind)


def picture_of(picture: Any, folder: str | Path) -> Picture:
    """The file that a text or {"url"} names, or the RGB image of an image or an array. Raises
    ValueError."""
    from model.images import load_image

    if isinstance(picture, Mapping):
        picture = picture["url"]
    if isinstance(picture, str | PathLike):
        return find_picture(folder, str(picture).removeprefix("file://"))
    return load_image(picture)


def picture_names(record: Mapping) -> list[Any]:
    """A record's pictures in order: under "image" or "images", one or a list, under "video" a list
    of frames, or in parts of its messages. Raises ValueError, also for a key of nearly this name:
    the record would be asked without its picture."""
    # an empty list is none, as tables of one schema have it
    named = [
        key
        for key in ("image", "images")
        if record.get(key) is not None and str(record[key]) != "[]"
    ]
    others = dict(record)
    frames = record.get("video")
    if isinstance(frames, list) and frames:
        named.append("video")
        del others["video"]
    check_read(others, UNREAD if named else UNNAMED)
    # 1. the parts of its messages that show a picture
    in_parts = []
    order = []
    for _, said in dialogue(record):
        for part in said if isinstance(said, list) else ():
            values = [part.get(key) for key in ("image", "image_url", "url", "path")]
            in_parts += [value for value in values if value is not None]
            if part.get("index") is not None:
                order.append(part["index"])
    in_order = order == list(range(len(order)))
    check(in_order, "its messages show the pictures in another order than 'images'")
    # 2. the one place that names them
    lists = [record[key] for key in named]
    if in_parts:
        lists.append(in_parts)
    check(len(lists) < 2, "names its pictures in two places")
    misnamed = []
    for key, value in record.items():
        if lists and not re.match(NUMBERED, key):  # of other keys it may be the same picture
            continue
        text = str(value)
        is_said = key in ("conversations", "messages")  # where Qwen-VL names pictures
        if "</img>" in text or not is_said and FILE_NAME.search(text):
            misnamed.append(key)
    check(not misnamed, f"{some(misnamed)} names a picture: give it under 'image' or 'images'")
    if lists and isinstance(lists[0], list | tuple):
        return list(lists[0])
    return lists


def check_read(entry: Mapping, unread: str = UNREAD, role: str = ROLES[1]) -> None:
    """Raise ValueError if a record, or a turn of `role`, has something under an `unread` key, a
    pattern, or a mark that its answer is not learned, or its prompt is."""
    is_learned = role == ROLES[1]
    named = [key for key in entry if re.match(unread, key, re.IGNORECASE)]
    strange = [key for key in named if entry[key]]  # others may be arrays, neither true nor false
    strange += [key for key in MARKS if entry.get(key) not in (None, is_learned)]
    if entry.get("label") is False:  # of ms-swift: a bad answer
        strange.append("label")
    remedy = "each answer is learned, nothing else; 'image' names pictures, a list 'video' frames"
    check(not strange, f"has {some(strange)}: {remedy}")


def dialogue(record: Mapping) -> list[tuple[str, Any]]:
    """(role, content) of each turn of a conversation, LLaVA's or messages; none where a record is
    no conversation. Raises as `check_read`."""
    said = []
    for key, role, content in DIALOGUES:
        for turn in record.get(key) or ():
            speaker = SPEAKERS.get(turn[role], turn[role])
            check_read(turn, UNNAMED, speaker)
            said.append((speaker, turn[content]))
    return said


def read_turns(record: Mapping) -> tuple[Turns, tuple[str, ...]]:
    """The turns of a record, and all right answers of the last one where it gives several. System
    texts stand before the first prompt; a first turn of the model is left out, as in LLaVA. Raises
    LookupError, TypeError and ValueError for another layout."""
    answers = record.get("answers") or ()
    check(not isinstance(answers, str), "answers is a text, expected a list")
    answers = tuple(text_at({"answers": answer}, "answers") for answer in answers)
    layouts = [key for key in ("conversations", "messages", "prefix") if record.get(key)]
    check(len(layouts) < 2, f"has {some(layouts)}: give one of them")

    # 1. who says what
    said = dialogue(record)
    if not said:
        keys = some(list(record))
        check("prefix" in record, f"has {keys}, which is none of the layouts {LAYOUTS}")
        known = dict(record)
        if answers:
            known.setdefault("suffix", Counter(answers).most_common(1)[0][0])
        texts = text_at(record, "prefix"), text_at(known, "suffix")
        said = list(zip(ROLES, texts, strict=True))
    # 2. system texts belong to the first prompt
    system = [message_text(record.get("system") or "")]
    while said and said[0][0] == "system":
        system.append(message_text(said.pop(0)[1]))
    if said and said[0][0] == ROLES[1]:
        del said[0]
    # 3. pairs of a prompt and its answer
    roles = [role for role, _ in said]
    takes_turns = roles and roles == [*ROLES] * (len(roles) // 2)
    check(takes_turns, "human (user) and gpt (assistant) take turns, and the last one is gpt's")
    texts = [message_text(content) for _, content in said]
    texts[0] = "\n".join([*filter(None, system), texts[0]])
    turns = zip(texts[::2], texts[1::2], strict=True)
    return tuple(turns), answers


def message_text(content: Any) -> str:
    """The text of a message, in which `<image>` stands for each picture among its parts. Raises
    ValueError."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    kinds = [part["type"] for part in parts]
    is_known = {"text", "image", "image_url"}.issuperset(kinds)
    check(is_known, f"has parts {some(kinds)}: give text and image")
    texts = [text_at(part, "text") if part["type"] == "text" else SLOT for part in parts]
    return "".join(texts)


# COCO's boxes and masks


def open_coder(source: str, masks: str | Path | None) -> Any:
    """The coder of masks. Raises UserError where none is given."""
    from weights.masks import load_mask_coder

    if masks is None:
        remedy = "give --masks FILE, big_vision's vae-oid.npz, or embedded for the toy"
        problem = f"{shown(source)}: a coder makes tokens of masks"
        raise UserError(f"{problem}: {remedy} (train.finetune, eval.detect)")
    return load_mask_coder(masks)


def read_coco(
    path: str | Path, images: str | Path | None = None, coder: Any = None
) -> list[Record]:
    """COCO's detection annotations: one record for each picture with an object, `detect a ; b` and
    its boxes; with a `MaskCoder` one for each class in it, `segment a`, its boxes and masks. Crowds
    are not part of the answer, but of `detection`. Pictures are in the order of their ids, which in
    COCO's scorer decides between boxes of one score. Raises UserError."""
    value = read_json(path)
    folder = Path(images or Path(path).parent)
    # 1. names, and objects by picture
    objects = defaultdict(list)
    places = []
    with files.problems_at(path):
        labels = {}
        for entry in value["categories"]:
            labels[entry["id"]] = " ".join(text_at(entry, "name").split())
        strange = [label for label in labels.values() if not label or set(";<>") & set(label)]
        remedy = "; < > stand between the names of an answer"
        check(not strange, f"names {some(strange)}: {remedy}")
        for part in ("categories", "images"):
            files.check_unique((entry["id"] for entry in value[part]), path)
        for entry in value["annotations"]:
            objects[entry["image_id"]].append(entry)
        lost = objects.keys() - {entry["id"] for entry in value["images"]}
        check(not lost, f"annotations are of pictures that are not listed: {some([*lost])}")
        for place, entry in files.placed(value["images"], ":images"):
            asked = defaultdict(list)
            for annotated in objects[entry["id"]]:
                name = labels.get(annotated.get("category_id")) if coder else ""
                asked[f"{place} {name}".strip()].append(annotated)
            for where, together in asked.items():
                if not all(annotated.get("iscrowd") == 1 for annotated in together):
                    places.append((where, (entry, together)))
        places.sort(key=lambda pair: pair[1][0]["id"])

    def detection(asked: tuple[dict, list]) -> Record:
        entry, there = asked
        width, height = entry["width"], entry["height"]
        boxes = [box_of(annotated, labels, width, height, bool(coder)) for annotated in there]
        texts = [mask_text(box, coder, width, height) for box in boxes]
        truth = Detection(width, height, tuple(boxes))
        file = find_picture(folder, text_at(entry, "file_name"))
        check_upright(file, width, height)
        turn = detection_turn(truth, list(labels.values()), texts)
        return Record("", "", (file,), (turn,), detection=truth)

    # 2. the records
    tell_of_crowds(path, value["annotations"])
    records = read_records(path, detection, places)
    check_unit(path, [record.detection for record in records if record.detection])
    return records


def box_of(
    annotated: Mapping,
    labels: Mapping,
    width: int,
    height: int,
    has_mask: bool = False,
) -> Box:
    """An object of a picture of width × height pixels. Raises LookupError, TypeError and
    ValueError."""
    category = annotated["category_id"]
    x, y, across, down = annotated["bbox"]
    check(category in labels, f"category_id {quoted(category)} is not among the categories")
    is_within = min(x + across, y + down) >= 0
    is_within = is_within and x <= width < math.inf and y <= height < math.inf
    outside = f"is outside of the picture, {width}×{height} pixels"
    check(is_within, f"bbox {quoted(annotated['bbox'])} {outside}")
    area = annotated.get("area", across * down)
    is_crowd = annotated.get("iscrowd") or False
    outline = annotated["segmentation"] if has_mask else None
    return Box(labels[category], x, y, across, down, area, is_crowd, outline)


def tell_of_crowds(path: str | Path, annotations: Sequence[dict]) -> None:
    """Say how many objects are crowds: of COCO 1 %, of CVAT's masks all."""
    crowds = [annotated for annotated in annotations if annotated.get("iscrowd")]
    if crowds:
        print(
            f"{shown(path)}: {len(crowds)} of {len(annotations)} objects are crowds, not learned",
            file=sys.stderr,
        )


def mask_text(box: Box, coder: Any, width: int, height: int) -> str:
    """The tokens of an object's mask, without a coder none. Raises as `checked_mask`."""
    if coder is None:
        return ""
    mask = checked_mask(box, height, width)
    return coder.to_text(mask, (box.x, box.y, box.x + box.width, box.y + box.height))


def check_upright(file: Path, width: int, height: int) -> None:
    """Raise ValueError for a picture that EXIF turns by 90°, away from its boxes."""
    seen = width, height
    with suppress(Exception), Image.open(file) as image:  # what is unreadable says so later
        seen = image.size
        may_turn = image.format != "TIFF"  # which is turned as it is opened
        if image.format == "PNG":  # it may stand behind the pixels, which take long to decode
            content = file.read_bytes().lower()
            may_turn = b"exif" in content or b"orientation" in content
        if may_turn and image.getexif().get(ExifTags.Base.Orientation, 1) > 4:
            seen = seen[::-1]
    is_turned = (width - height) * (seen[0] - seen[1]) < 0  # it may be smaller than annotated
    check(not is_turned, f"{file} is turned by EXIF, its boxes not")


def check_unit(path: str | Path, detections: Sequence[Detection]) -> None:
    """Raise UserError where boxes are no [x, y, width, height] in pixels."""
    rows = []
    for detection in detections:
        for box in detection.boxes:
            rows.append((box.x, box.y, box.width, box.height, detection.width, detection.height))
    sides = np.array(rows, np.float64).reshape(-1, 3, 2)
    corner, size, picture = sides.transpose(1, 0, 2)
    are_shares = (sides[:, :2] <= 1).all()
    are_corners = (size >= corner).all()
    reach_out = (corner + size > picture + 1).any()
    if are_shares or (reach_out and are_corners):
        unit = "shares of the sides" if are_shares else "[x1, y1, x2, y2]"
        raise UserError(f"{shown(path)}: boxes are {unit}: give [x, y, width, height] in pixels")


def detection_turn(detection: Detection, order: list[str], texts: Sequence[str]) -> tuple[str, str]:
    """PaliGemma's prompt and answer: `detect a ; b`, and `<locY1><locX1><locY2><locX2> a ; …`; with
    `texts`, the tokens of masks, `segment a`, and `<locY1><locX1><locY2><locX2><seg…> a ; …`. Boxes
    go by class in this `order`, then from top to bottom and left to right. A coordinate v, a share
    of the side, is the bin round(1023·v), within 0 … 1023 (big_vision,
    pp/proj/paligemma/segmentation.py)."""
    pairs = zip(detection.boxes, texts, strict=True)
    said = [(box, text) for box, text in pairs if not box.is_crowd]

    def place(pair: tuple[Box, str]) -> tuple:
        box, _ = pair
        return order.index(box.label), box.y, box.x

    parts = []
    for box, text in sorted(said, key=place):
        shares = (
            box.y / detection.height,
            box.x / detection.width,
            (box.y + box.height) / detection.height,
            (box.x + box.width) / detection.width,
        )
        places = [min(max(round(1023 * share), 0), 1023) for share in shares]
        where = "".join(f"<loc{place:04d}>" for place in places)
        parts.append(f"{where}{text} {box.label}")
    labels = sorted({box.label for box, _ in said}, key=order.index)
    task = "segment" if any(texts) else "detect"
    return f"{task} " + " ; ".join(labels), " ; ".join(parts)


# Splits, and pictures in gray


def split_records(
    records: Sequence[Record],
    split: str,
    fraction: float,
    validation: float,
    seed: int = 0,
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
    chosen = set(names[held_out:used])
    if split == "validation":
        chosen = set(names[:held_out])

    def is_kept(record: Record) -> bool:
        return groups[record.name] in chosen if record.turns else split == "train"

    return list(filter(is_kept, records))


def groups_of(records: Sequence[Record]) -> dict[str, str]:
    """The group of each record that can be used, by name: the smallest key of records with pictures
    in common, whatever their names, or of the same text without one."""
    usable = [record for record in records if record.turns]
    # of each key and each picture, a smaller one of its group, or itself
    root = {}

    def find(link: tuple) -> tuple:
        while root.setdefault(link, link) != link:
            root[link] = root[root[link]]
            link = root[link]
        return link

    for record, pictures in zip(usable, contents_of(usable), strict=True):
        links = [("", record.key)] + [("picture", content) for content in pictures]
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
    count = Counter(sizes.values())
    contents = {}
    for file, size in sizes.items():
        contents[file] = str(size)
        if count[size] > 1:
            with suppress(UserError):
                contents[file] = sha256(read_bytes(file)).hexdigest()

    def content(picture: Picture) -> str:
        return contents.get(picture) or getattr(picture, "digest", "")

    found = []
    for record in records:
        texts = map(content, record.pictures) if record.pictures else [repr(record.turns)]
        found.append({*texts} - {""})
    return found


def blind(records: Sequence[Record]) -> list[Record]:
    """The records with every picture gray, one for all: a model that answers them as well does not
    use the pictures."""
    made = []
    for record in records:
        count = len(record.pictures)
        if record.turns and count:
            record = replace(record, key=f"gray {count}", pictures=(gray_picture,) * count)
        made.append(record)
    return made
