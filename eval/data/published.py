"""Readers of published files: VQAv2, GQA, TextVQA, VizWiz and MMNeedle; and `read`, which all other
readers call.

In: files exactly as their authors publish them. Out: small frozen records; pictures stay paths
until they are opened. `read` calls the constructor of a format for each record. What that raises
becomes a `UserError` with the place.
"""

import contextlib
import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any

from model.common import (
    UserError,
    check_text,
    once,
    parse_json,
    quoted,
    read_bytes,
    read_json,
    read_text,
    shown,
)

PROMPT = "answer en {question}"  # the prompt of PaliGemma's authors
ABSENT = (-1, -1, -1)  # the place of a needle that is not in the haystack
WRONG = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    OSError,
    RecursionError,
    csv.Error,
)
# records with their places in a file: ":12" for a line, "[3]" in a list
Places = list[tuple[str, Any]]


def check_prompt(template: str) -> str:
    """The template. Raises UserError if the text {question} is not in it, or it is not UTF-8."""
    if "{question}" not in check_text(template):
        problem = f"must contain {{question}}, such as {PROMPT!r}"
        raise UserError(f"prompt template {quoted(template)}: {problem}")
    return template


def fill_prompt(template: str, question: str) -> str:
    """`template` with the question in place of the text {question}; other braces are text."""
    return template.replace("{question}", question)


# Files and records

# a file of answers is scored without the pictures
LOOKED_FOR = ContextVar("whether pictures are looked for", default=True)


def read(
    path: str | Path, make: Callable, records: Places | None = None, refuse: Callable | None = None
) -> list:
    """make(record) for each object of a JSON list or of JSON lines, or for `records` of the file.
    What `make` raises is a UserError with the place; with `refuse`, refuse(problem) stands in for
    the record. Raises UserError for a file without any good record."""
    made, problems = [], []
    for place, record in records_in(path) if records is None else records:
        try:
            if isinstance(record, bytes):
                record = json.loads(record, object_pairs_hook=once)
            made.append(make(record))
        except WRONG as error:
            problems.append(f"{shown(path)}{place}: {problem_of(error)}")
            if refuse is None:
                raise UserError(f"{problems[0]}: correct the record") from None
            made.append(refuse(problem_of(error)))
    if len(problems) < len(made):
        return made
    problem = "holds no records"
    if problems:
        problem = f"none of its {len(made)} records can be used: {problems[0]}"
    raise UserError(f"{shown(path)}: {problem}: check that this is the right file")


def records_in(path: str | Path) -> Places:
    """The records of a JSON list, or else the lines of a file that are not blank, as bytes. Raises
    UserError."""
    content = read_bytes(path).removeprefix(b"\xef\xbb\xbf")
    if content.lstrip().startswith(b"["):
        return placed(parse_json(content, shown(path)))
    places = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            places.append((f":{number}", line))
    return places


def placed(records: Iterable, where: str = "") -> Places:
    """The records of a list, with their places in it."""
    return [(f"{where}[{number}]", record) for number, record in enumerate(records)]


def rows_in(path: str | Path, delimiter: str = ",") -> Places:
    """The rows of a CSV or TSV file, as lists of texts. Raises UserError."""
    csv.field_size_limit(1 << 26)  # characters: MMBench's tables hold pictures
    lines = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=delimiter, strict=True)
    try:
        return [(f":{lines.line_num}", row) for row in lines if row]
    except csv.Error as error:
        remedy = "put a text with commas between quotes, and double each quote in it"
        raise UserError(f"{shown(path)}:{lines.line_num}: {error}: {remedy}") from None


@contextlib.contextmanager
def problems_at(path: str | Path) -> Iterator[None]:
    """Turn what the block raises about values of a file into a UserError that names the file."""
    try:
        yield
    except WRONG as error:
        problem = problem_of(error)
        raise UserError(f"{shown(path)}: {problem}: check that this is the right file") from None


def problem_of(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"{quoted(error.args[0])} is missing"
    return shown(str(error), 500)


def check(is_right: bool, problem: str) -> None:
    if not is_right:
        raise ValueError(problem)


def text(record: Mapping, name: str) -> str:
    """record[name]. Raises KeyError, and ValueError for another type."""
    value = record[name]
    check(isinstance(value, str), f"{name} is {quoted(value)}, expected a text")
    value.encode()  # half of a surrogate pair has no code: ValueError
    return value


def id_of(record: Mapping) -> int | str:
    """The id of a question. VizWiz has one question per picture and no other id."""
    has_name = "image" in record and "question_id" not in record
    value = record["image" if has_name else "question_id"]
    check(isinstance(value, int | str), f"the id is {quoted(value)}, expected a number or a text")
    return value


def check_unique(ids: Iterable[int | str], where: str | Path) -> None:
    """Raise UserError that names the ids which occur more than once; 1 and "1" are the same id in a
    log or a result."""
    counts = Counter(map(str, ids))
    repeated = [id_ for id_, count in counts.items() if count > 1]
    if repeated:
        problem = f"{len(repeated)} duplicate id(s) ({some(repeated)}): keep one record of each"
        raise UserError(f"{shown(where)}: {problem}")


def some(ids: Sequence) -> str:
    """The first few of `ids`, for a message."""
    names = [quoted(id_) for id_ in ids[:5]]
    if len(ids) > 5:
        names.append("…")
    return ", ".join(names)


def find_image(folder: str | Path, name: str) -> Path:
    """The path of a picture in `folder`. COCO's, such as val2014/COCO_val2014_….jpg, may lie flat
    in it."""
    path = Path(folder, name)
    flat = Path(folder, path.name)
    is_flat = path.name.startswith("COCO_") and not path.exists() and flat.exists()
    return flat if is_flat else path


def find_picture(folder: str | Path, name: str) -> Path:
    """The path of a picture. Raises UserError if it is looked for and absent."""
    path = find_image(folder, name)
    if LOOKED_FOR.get() and not path.is_file():
        problem = f"picture {quoted(name)} is not in {shown(folder)}"
        raise UserError(f"{problem}: give its folder (--images DIR)")
    return path


# VQAv2 and its relatives


@dataclass(frozen=True)
class Annotation:
    """A question and its answers as published."""

    question_id: int | str
    answers: tuple[dict, ...] = ()  # an object for each annotator, of a test split none
    answer: str = ""  # the most frequent one
    answer_type: str | None = None  # such as yes/no, number, other
    question_type: str | None = None  # such as its first words
    balanced: bool = True  # GQA scores only its balanced questions
    answerable: int | None = None  # 0 or 1, of VizWiz
    question: str = ""
    image: str = ""  # the name of the picture in its folder


def read_vqa(
    questions: str | Path, annotations: str | Path | None = None
) -> tuple[str, list[Annotation]]:
    """Questions of VQAv2, GQA, TextVQA or VizWiz, and the scoring that fits: official, textvqa,
    vizwiz or gqa. annotations: by default the same file; if it holds no answers, there are none. A
    file with one answer per question can only be scored by exact match, as GQA is; one whose
    answers have no ids only by position, as TextVQA is. Raises UserError, also for an id that
    occurs twice and for a question without its annotation."""
    source = annotations or questions
    _, subset, asked = records_of(questions, "questions")
    layout, _, answered = records_of(source, "annotations")
    truths = {truth.question_id: truth for truth in read(source, annotation, answered)}

    def question(record: dict) -> Annotation:
        truth = truths.get(id_of(record), Annotation(id_of(record)))
        if annotations and not truth.answers:
            raise ValueError(f"question {quoted(truth.question_id)} has no answers in {source}")
        return replace(truth, question=text(record, "question"), image=image_of(record, subset))

    made = read(questions, question, asked)
    for path, records in ((questions, asked), (source, answered)):
        check_unique((id_of(record) for _, record in records), path)
    answers = [answer for one in made for answer in one.answers]
    if all(len(one.answers) == 1 for one in made):
        layout = "gqa"
    elif layout == "official" and not any("answer_id" in answer for answer in answers):
        layout = "textvqa"
    return layout, made


def records_of(path: str | Path, key: str) -> tuple[str, str, Places]:
    """Scoring, COCO's subset, and records of {key: […]}, TextVQA's {"data": […]}, VizWiz's […] or
    GQA's {id: {…}}."""
    value = read_json(path, object)
    with problems_at(path):
        if isinstance(value, list):
            return "vizwiz", "", placed(value)
        subset = text({"data_subtype": ""} | value, "data_subtype")
        for part, layout in ((key, "official"), ("questions", "official"), ("data", "textvqa")):
            if part in value:
                return layout, subset, placed(value[part], f": {part}")
        places = []
        for id_, record in value.items():
            places.append((f": {shown(id_)}", record | {"question_id": id_}))
        return "gqa", "", places


def image_of(record: Mapping, subset: str) -> str:
    """The name of a question's picture."""
    if "image" in record:  # VizWiz, or a user's file with the name
        return text(record, "image")
    image_id = record["imageId" if "imageId" in record else "image_id"]  # GQA, or the others
    if not subset or isinstance(image_id, str):  # TextVQA, GQA
        return f"{image_id}.jpg"
    subset = subset.replace("test-dev", "test")  # two sets of questions on the same pictures
    return f"{subset}/COCO_{subset}_{image_id:012d}.jpg"


def annotation(record: dict) -> Annotation:
    if "answer" in record:  # GQA
        answer = text(record, "answer")
        # its own evaluation splits structural types into open (query) and binary (the others)
        structural = text(record["types"], "structural")
        kind = "open" if structural == "query" else "binary"
        balanced = record.get("isBalanced", True)
        answers = ({"answer": answer},)
        return Annotation(id_of(record), answers, answer, kind, structural, balanced)
    if "answers" not in record:
        return Annotation(id_of(record))
    check(isinstance(record["answers"], list), "answers is no list")
    answers = []
    for answer in record["answers"]:  # TextVQA: bare texts
        answers.append({"answer": answer} if isinstance(answer, str) else answer)
    counts = Counter(text(answer, "answer") for answer in answers)
    most = counts.most_common(1)[0][0]
    answer = text({"multiple_choice_answer": most} | record, "multiple_choice_answer")
    named = [name for name in ("answer_type", "question_type") if name in record]
    types = {name: text(record, name) for name in named}
    answerable = record.get("answerable")
    check(answerable in (None, 0, 1), "answerable is neither 0 nor 1")
    return Annotation(id_of(record), tuple(answers), answer, answerable=answerable, **types)


# MMNeedle


@dataclass(frozen=True)
class NeedleTest:
    """M haystack pictures of N×N sub-images, and the K needles to find in them."""

    id: int
    haystack: tuple[tuple[str, ...], ...]  # of each picture, its N² sub-images' names, row-major
    places: tuple[tuple[int, int, int], ...]  # (index, row, col) of each needle, or `ABSENT`
    targets: tuple[str, ...]  # the needles' own pictures
    captions: tuple[str, ...]  # the needles' descriptions
    pictures: tuple[Callable, ...] = ()  # functions that give the M pictures
    files: tuple[Path, ...] = ()  # those that these functions read

    @property
    def side(self) -> int:
        """N, the sub-images along each side of a stitched picture."""
        return isqrt(len(self.haystack[0]))


def read_captions(path: str | Path) -> dict[str, str]:
    """Caption by file name, from {name: caption} or COCO's captions_val2014.json; the last one
    listed counts."""
    value = read_json(path)
    with problems_at(path):
        if "annotations" not in value:
            return {name: text(value, name) for name in value}
        last = {record["image_id"]: text(record, "caption") for record in value["annotations"]}
        named = {}
        for record in value["images"]:
            if record["id"] in last:
                named[text(record, "file_name")] = last[record["id"]]
        return named


def read_needle_tests(
    metadata: str | Path, annotations: str | Path, captions: str | Path
) -> list[NeedleTest]:
    """Tests from MMNeedle's `N_N.json`, `annotations_M_N_N.json` (K > 1: `K_annotations_…`) and a
    caption file. Raises UserError, also where the files contradict each other."""
    # 1. the sub-images of each picture
    described = read_captions(captions)
    stitched = read_json(metadata)
    grids = {}
    with problems_at(metadata):
        for name, images in stitched.items():
            side = range(isqrt(len(images)))
            grids[name] = tuple(text(images, f"{row}_{col}") for row in side for col in side)
            is_square = 0 < len(images) == len(side) ** 2
            check(is_square, f"{quoted(name)} is no square of sub-images")

    def listed(value) -> list:
        return value if isinstance(value, list) else [value]

    def test(record: dict) -> NeedleTest:
        haystack = tuple(grids[Path(name).name] for name in listed(record["image_ids"]))
        targets = tuple(listed(record["target"]))
        names = {}
        for index, grid in enumerate(haystack):
            for at, name in enumerate(grid):
                row, column = divmod(at, isqrt(len(grid)))
                names[index, row, column] = name
        axes = [listed(record[key]) for key in ("index", "row", "col")]
        places = tuple(zip(*axes, strict=True))
        for place, target in zip(places, targets, strict=True):
            is_whole = {*map(type, place)} == {int}
            check(is_whole, f"index, row, col are {quoted(place)}, expected whole numbers")
            if place == ABSENT:
                is_there = target not in names.values()
            else:
                is_there = names.get(place) == target
            remedy = "take metadata and annotations of one release"
            check(is_there, f"{quoted(target)} is not at {place}, {remedy}")
            has_caption = Path(target).name in described
            check(has_caption, f"{shown(captions)} lacks a caption of {quoted(target)}")
        id_ = record["id"]
        check(type(id_) is int, f"id is {quoted(id_)}, expected a number")
        of_targets = tuple(described[Path(target).name] for target in targets)
        return NeedleTest(id_, haystack, places, targets, of_targets)

    # 2. the tests, which are to agree with them
    tests = read(annotations, test)
    check_unique((test.id for test in tests), annotations)
    return tests
