"""Readers of the published file formats: VQAv2 and its relatives, and POPE.

In: files exactly as their authors publish them. Out: small frozen records, checked; pictures stay paths until they are
opened. `eval/vqa.py` and `eval/pope.py` score answers to them; `train/` learns from them. `eval/needle_files.py` reads
MMNeedle's, `eval/own_files.py` a user's own.

A file that breaks its format is a `UserError` with its name, the line or record, and the remedy; nothing is skipped.
"""

import csv
import io
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from model.common import (
    Expected,
    UserError,
    file_errors,
    json_name,
    quoted,
    read_field,
    read_json,
    read_jsonl,
    read_text,
    shown,
)

TEXT = Expected(str)
NAME = Expected(str, 1, 1024)  # of a picture or a question
NUMBER = Expected(int, 0, 10**12 - 1)
LIST = Expected(list, 1)
MAX_VALUE = 64 << 20  # characters of a value in a table, which may be a picture: more is damage, or an attack

# Prompt templates

PROMPT = "answer en {question}"  # the prompt of PaliGemma's authors


def check_prompt(template: str) -> str:
    """The template. Raises UserError if the text {question} is not in it."""
    if "{question}" not in template:
        raise UserError(f"prompt template {quoted(template)}: must contain {{question}}, such as {PROMPT!r}")
    return template


def fill_prompt(template: str, question: str) -> str:
    """`template` with the question in place of the text {question}; other braces are text, nothing is expanded."""
    return template.replace("{question}", question)


# Records and ids


def records_of(value, where: str) -> list[tuple[str, dict]]:
    """The objects of a JSON list, each with its place. Raises UserError for anything else, and for an empty list."""
    if not isinstance(value, list) or not value:
        found = "an empty one" if value == [] else json_name(value)
        raise UserError(f"{where}: expected a list of records, found {found}: check that this is the right file")
    for number, record in enumerate(value):
        if not isinstance(record, dict):
            raise UserError(f"{where}[{number}]: expected an object, found {json_name(record)}: correct the record")
    return [(f"{where}[{number}]", record) for number, record in enumerate(value)]


def lines_of(path: str | Path) -> list[tuple[str, dict]]:
    """The objects of a JSON-lines file, each with its place. Raises UserError, also for a file without any."""
    records = list(read_jsonl(path))
    if not records:
        raise UserError(f"{shown(path)}: holds no records: each line must hold one JSON object")
    return records


def read_table(path: str | Path, delimiter: str = ",") -> list[tuple[str, list[str]]]:
    """The rows of a CSV file, or of one with another delimiter, each with its place. Raises UserError.

    Values that hold delimiters, quotes or newlines are in quotes; those of up to MAX_VALUE characters are read.
    """
    csv.field_size_limit(MAX_VALUE)
    lines, rows = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=delimiter), []
    try:
        for row in lines:
            rows += [(f"{shown(path)}:{lines.line_num}", row)] if row else []
    except csv.Error as error:
        raise UserError(f"{shown(path)}:{lines.line_num}: {error}: correct the file or download it again") from None
    return rows


def read_id(record: dict, name: str, where: str) -> int | str:
    """An id, which is a number or a text. Raises UserError."""
    return read_field(record, name, NAME if isinstance(record.get(name), str) else Expected(int), where)


def check_unique(ids: Iterable[int | str], where: str | Path) -> None:
    """Raise UserError that names the ids which occur more than once; 1 and "1" are the same id in a log or a result."""
    variants: dict[str, list[int | str]] = {}
    for id_ in ids:
        variants.setdefault(str(id_), []).append(id_)
    repeated = [id_ for same in variants.values() if len(same) > 1 for id_ in dict.fromkeys(same)]
    if repeated:
        count = sum(len(same) > 1 for same in variants.values())
        raise UserError(f"{shown(where)}: {count} duplicate id(s) ({some(repeated)}): keep one record of each")


def check_ids(found: Iterable, expected: Iterable, where: str | Path, against: str | Path) -> None:
    """Raise UserError that names missing and extra ids unless `found` and `expected` hold the same ones."""
    found, expected = dict.fromkeys(found), dict.fromkeys(expected)  # ordered sets
    wrong = {
        "missing": [id_ for id_ in expected if id_ not in found],
        "extra": [id_ for id_ in found if id_ not in expected],
    }
    parts = [f"{len(ids)} {word} id(s) ({some(ids)})" for word, ids in wrong.items() if ids]
    if parts:
        raise UserError(f"{shown(where)}: {' and '.join(parts)}: it must hold exactly the ids of {shown(against)}")


def some(ids: list) -> str:
    """The first few of `ids`, for a message."""
    return ", ".join(map(quoted, ids[:5])) + (", …" if len(ids) > 5 else "")


# Pictures


def inside(folder: str | Path, name: str, allow_outside: bool = False) -> Path:
    """The path of `name`, which a data set gives, in `folder`. Raises UserError where it leads outside.

    Absolute names, `..` and links may be used within the folder. allow_outside: they may lead anywhere.
    """
    if not name or "\0" in name or name.encode("utf-8", "replace") != name.encode("utf-8", "surrogatepass"):
        raise UserError(f"{quoted(name)} is no file name: correct the record")
    path = Path(folder, name)
    with file_errors(path):
        real, root = real_path(path), _real_folder(Path(folder).absolute())
    if not allow_outside and os.path.commonpath((root, real)) != root:
        raise UserError(
            f"{quoted(name)} is outside of {shown(folder)}: give the folder of the pictures (--images DIR), or "
            "--allow-outside if you trust the data"
        )
    return path


def real_path(path: Path) -> str:
    """The one name of a file that has several, by links or `..`."""
    is_link = path.is_symlink() or path.name in ("", ".", "..")
    return os.path.realpath(path) if is_link else os.path.join(_real_folder(path.parent.absolute()), path.name)


@lru_cache(maxsize=4096)
def _real_folder(folder: Path) -> str:
    return os.path.realpath(folder)


def find_image(folder: str | Path, name: str, allow_outside: bool = False) -> Path:
    """The path of the picture `name`, such as val2014/COCO_val2014_….jpg: under `folder`, or flat in it.

    Raises UserError for a name that leads outside of `folder`, see `inside`.
    """
    path = inside(folder, name, allow_outside)
    flat = Path(folder, path.name)
    with file_errors(path):
        return inside(folder, path.name, allow_outside) if not path.exists() and flat.exists() else path


def check_flat(found: Mapping[str, Path], source: str | Path) -> None:
    """Raise UserError if two pictures of the file `source`, in folders of their own, were found as one flat file."""
    names: dict[Path, str] = {}
    for name, path in found.items():
        folders = {Path(other).parent for other in (name, names.setdefault(path, name))} - {Path()}
        if len(folders) > 1:
            both = some([names[path], name])
            raise UserError(
                f"{shown(source)}: its pictures {both} would both be {shown(path)}: give the folder above theirs "
                "(--images DIR)"
            )


def find_images(
    names: Iterable[str], folder: str | Path, source: str | Path, allow_outside: bool = False
) -> dict[str, Path]:
    """The path of each picture of the file `source`. Raises UserError that names the first few not in `folder`."""
    try:
        paths = {name: find_image(folder, name, allow_outside) for name in dict.fromkeys(names)}
    except UserError as error:
        raise UserError(f"{shown(source)}: {error}") from None
    check_flat(paths, source)
    absent = [name for name, path in paths.items() if not path.is_file()]
    if absent:
        raise UserError(
            f"{shown(source)}: {len(absent)} of its {len(paths)} pictures are not in {shown(folder)} ({some(absent)}): "
            "give the folder that holds them (--images DIR)"
        )
    return paths


# VQAv2 and its relatives


@dataclass(frozen=True)
class Question:
    """One question on one picture; `image` is relative to the folder of pictures."""

    question_id: int | str
    image: str
    question: str


@dataclass(frozen=True)
class Annotation:
    """`answers` as published, one object per annotator, and `answer`, the most frequent one."""

    question_id: int | str
    answers: tuple[dict, ...]
    answer: str
    answer_type: str | None = None
    question_type: str | None = None
    balanced: bool = True  # GQA scores only its balanced questions
    answerable: int | None = None  # 0 or 1, of VizWiz


def read_questions(path: str | Path) -> list[Question]:
    """Questions of VQAv2, GQA, TextVQA or VizWiz. Raises UserError for another structure or an id that occurs twice."""
    value = read_json(path, object)
    subset = read_field(value, "data_subtype", TEXT, shown(path), default="") if isinstance(value, dict) else ""
    questions = []
    for where, record in _vqa_records(value, "questions", path)[1]:
        text = read_field(record, "question", TEXT, where)
        questions.append(Question(_question_id(record, where), _image_name(record, subset, where), text))
    check_unique((q.question_id for q in questions), path)
    return questions


def read_annotations(path: str | Path) -> list[Annotation]:
    """Annotations of VQAv2, or of the one file that holds questions and answers in GQA, TextVQA and VizWiz.

    GQA's structural type splits into "open" (query) and "binary" (the others), as in its own evaluation.
    Raises UserError for another structure, a question without answers, or an id that occurs twice.
    """
    return read_layout(path)[1]


def read_layout(path: str | Path) -> tuple[str, list[Annotation]]:
    """The scoring that belongs to the layout of the file (official, textvqa, vizwiz or gqa), and its annotations.

    A file with one answer per question can only be scored by exact match, as GQA is; one whose answers have no ids only
    by position, as TextVQA is. Raises UserError.
    """
    value = read_json(path, object)
    one_file = isinstance(value, dict) and "annotations" not in value and _holds_answers(value.get("questions"))
    layout, records = _vqa_records(value, "questions" if one_file else "annotations", path)
    annotations = [_annotation(record, where) for where, record in records]
    check_unique((a.question_id for a in annotations), path)
    if all(len(a.answers) == 1 for a in annotations):
        layout = "gqa"
    elif layout == "official" and not any("answer_id" in answer for a in annotations for answer in a.answers):
        layout = "textvqa"
    return layout, annotations


def annotations_of(
    questions: Iterable[Question], annotations: Iterable[Annotation], asked_in: str | Path, answered_in: str | Path
) -> list[Annotation]:
    """The annotation of each question, in their order. Raises UserError that names the questions without one."""
    by_id, questions = {a.question_id: a for a in annotations}, list(questions)
    bare = [q.question_id for q in questions if q.question_id not in by_id]
    if bare:
        raise UserError(
            f"{answered_in}: {len(bare)} question(s) of {asked_in} have no annotation ({some(bare)}): take the "
            "annotations of the same split"
        )
    return [by_id[q.question_id] for q in questions]


def holds_answers(path: str | Path) -> bool:
    """Whether a file of questions has their answers too, as GQA's, TextVQA's and VizWiz's. Raises UserError."""
    return _holds_answers([record for _, record in _vqa_records(read_json(path, object), "questions", path)[1]])


def _holds_answers(records) -> bool:
    records = records if isinstance(records, list) else []
    return any("answers" in record or "answer" in record for record in records if isinstance(record, dict))


def _vqa_records(value, key: str, path: str | Path) -> tuple[str, list[tuple[str, dict]]]:
    """The scoring of a layout and its records: {key: […]}, TextVQA's {"data": […]}, VizWiz's […], GQA's {id: {…}}."""
    name = shown(path)
    for part, layout in ((key, "official"), ("data", "textvqa")):
        if isinstance(value, dict) and part in value:
            return layout, records_of(value[part], f"{name}: {part}")
    if isinstance(value, list):
        return "vizwiz", records_of(value, name)
    if isinstance(value, dict) and value and all(isinstance(v, dict) and "question" in v for v in value.values()):
        return "gqa", [(f"{name}: {shown(id_)}", record | {"question_id": id_}) for id_, record in value.items()]
    raise UserError(f"{name}: holds no {key!r} list: expected the layout of VQAv2, GQA, TextVQA or VizWiz")


def _question_id(record: dict, where: str) -> int | str:
    # VizWiz has one question per picture and no other id
    return read_id(record, "image" if "image" in record and "question_id" not in record else "question_id", where)


def _image_name(record: dict, subset: str, where: str) -> str:
    if "image" in record:  # VizWiz, or a user's file with the name
        return read_field(record, "image", NAME, where)
    name = "imageId" if "imageId" in record else "image_id"  # GQA, or the others
    image_id = read_field(record, name, NAME if isinstance(record.get(name), str) else NUMBER, where)
    if isinstance(image_id, str) and Path(image_id).suffix.lower() in (".jpg", ".jpeg", ".png", ".webp"):
        return image_id  # VizWiz in VQAv2's layout
    if isinstance(image_id, str) or not subset or name == "imageId":  # TextVQA, GQA
        return f"{image_id}.jpg"
    subset = subset.replace("test-dev", "test")  # two sets of questions on the same pictures
    return f"{subset}/COCO_{subset}_{image_id:012d}.jpg"


def _annotation(record: dict, where: str) -> Annotation:
    id_ = _question_id(record, where)
    if isinstance(kinds := record.get("types"), dict):  # GQA
        answer, structural = read_field(record, "answer", TEXT, where), read_field(kinds, "structural", NAME, where)
        kind = "open" if structural == "query" else "binary"
        balanced = read_field(record, "isBalanced", Expected(bool), where, default=True)
        return Annotation(id_, ({"answer": answer},), answer, kind, structural, balanced=balanced)
    # TextVQA lists bare strings
    given = [{"answer": a} if isinstance(a, str) else a for a in read_field(record, "answers", LIST, where)]
    for place, answer in records_of(given, f"{where}: answers"):
        read_field(answer, "answer", TEXT, place)
    said, answer_type, question_type = (
        read_field(record, name, TEXT, where, default=None)
        for name in ("multiple_choice_answer", "answer_type", "question_type")
    )
    answerable = read_field(record, "answerable", Expected(int, choices=(0, 1)), where, default=None)
    if said is None:
        said = Counter(answer["answer"] for answer in given).most_common(1)[0][0]
    return Annotation(id_, tuple(given), said, answer_type, question_type, answerable=answerable)


# POPE


@dataclass(frozen=True)
class PopeQuestion(Question):
    """Is the object in the picture? `label` is "yes" or "no"."""

    label: str


def read_pope(path: str | Path) -> list[PopeQuestion]:
    """Read POPE's JSONL of {"question_id", "image", "text", "label"}, LF or CRLF.

    Raises UserError, with the line number, for a malformed line, another label, or an id that occurs twice.
    """
    questions = []
    for where, record in lines_of(path):
        label = read_field(record, "label", Expected(str, choices=("yes", "no")), where)
        image, text = read_field(record, "image", NAME, where), read_field(record, "text", TEXT, where)
        questions.append(PopeQuestion(read_id(record, "question_id", where), image, text, label))
    check_unique((q.question_id for q in questions), path)
    return questions
