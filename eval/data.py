"""Readers of published files: VQAv2, GQA, TextVQA, VizWiz, POPE and MMNeedle.

In: files exactly as their authors publish them. Out: small frozen records; pictures stay paths until they are opened.
`read` calls the constructor of a format for each record. What that raises about a value becomes a `UserError` with the
place in the file. `eval/records.py` reads your own examples in the same way.
"""

import contextlib
import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any

from model.common import UserError, file_errors, parse_json, quoted, read_json, read_text, shown

PROMPT = "answer en {question}"  # the prompt of PaliGemma's authors
ABSENT = (-1, -1, -1)  # the place of a needle that is not in the haystack
WRONG = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError, RecursionError, csv.Error)
Places = list[tuple[str, Any]]  # records with their places in a file: ":12" for a line, "[3]" in a list


def check_prompt(template: str) -> str:
    """The template. Raises UserError if the text {question} is not in it."""
    if "{question}" not in template:
        raise UserError(f"prompt template {quoted(template)}: must contain {{question}}, such as {PROMPT!r}")
    return template


def fill_prompt(template: str, question: str) -> str:
    """`template` with the question in place of the text {question}; other braces are text."""
    return template.replace("{question}", question)


# Files and records


def read(
    path: str | Path,
    make: Callable[[dict], Any],
    records: Places | None = None,
    refuse: Callable[[str], Any] | None = None,
) -> list:
    """make(record) for each object of a JSON list or of JSON lines, or for `records` of the file.

    What `make` raises is a UserError with the place; with `refuse`, refuse(problem) stands in for the record.
    Raises UserError for a file without any good record.
    """
    made, problems = [], []
    for place, record in records_in(path) if records is None else records:
        try:
            record = json.loads(record) if isinstance(record, bytes) else record
            check(isinstance(record, dict), f"expected an object, found {type(record).__name__}")
            made.append(make(record))
        except WRONG as error:
            problems.append(f"{shown(path)}{place}: {problem_of(error)}")
            if refuse is None:
                raise UserError(f"{problems[0]}: correct the record") from None
            made.append(refuse(problem_of(error)))
    if len(problems) == len(made):
        problem = f"none of its {len(made)} records can be used: {problems[0]}" if problems else "holds no records"
        raise UserError(f"{shown(path)}: {problem}: check that this is the right file")
    return made


def records_in(path: str | Path) -> Places:
    """The records of a JSON list, or else the lines of a file that are not blank, as bytes. Raises UserError."""
    with file_errors(path):
        content = Path(path).read_bytes()
    if content.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return [(f"[{number}]", record) for number, record in enumerate(parse_json(content, shown(path)))]
    return [(f":{number}", line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]


def read_table(path: str | Path, delimiter: str = ",") -> list[tuple[str, list[str]]]:
    """The rows of a CSV or TSV file, each with its place. Raises UserError."""
    csv.field_size_limit(1 << 26)  # characters: MMBench's tables hold pictures
    lines = csv.reader(io.StringIO(read_text(path), newline=""), delimiter=delimiter)
    with problems_at(path):
        return [(f"{shown(path)}:{lines.line_num}", row) for row in lines if row]


@contextlib.contextmanager
def problems_at(path: str | Path) -> Iterator[None]:
    """Turn what the block raises about values of a file into a UserError that names the file."""
    try:
        yield
    except WRONG as error:
        raise UserError(f"{shown(path)}: {problem_of(error)}: check that this is the right file") from None


def problem_of(error: BaseException) -> str:
    return f"{quoted(error.args[0])} is missing" if isinstance(error, KeyError) else shown(str(error), 500)


def check(is_right: bool, problem: str) -> None:
    if not is_right:
        raise ValueError(problem)


def text(record: Mapping, name: str) -> str:
    """record[name]. Raises KeyError, and ValueError for another type."""
    value = record[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {quoted(value)}, expected a text")
    return value


def id_of(record: Mapping) -> int | str:
    """The id of a question. VizWiz has one question per picture and no other id."""
    name = "image" if "image" in record and "question_id" not in record else "question_id"
    value = record[name]
    if not isinstance(value, int | str):
        raise ValueError(f"{name} is {quoted(value)}, expected a number or a text")
    return value


def check_unique(ids: Iterable[int | str], where: str | Path) -> None:
    """Raise UserError that names the ids which occur more than once; 1 and "1" are the same id in a log or a result."""
    ids = list(ids)
    counts = Counter(map(str, ids))
    if repeated := list({str(id_): id_ for id_ in ids if counts[str(id_)] > 1}.values()):
        raise UserError(f"{shown(where)}: {len(repeated)} duplicate id(s) ({some(repeated)}): keep one record of each")


def some(ids: Sequence) -> str:
    """The first few of `ids`, for a message."""
    return ", ".join(map(quoted, ids[:5])) + (", …" if len(ids) > 5 else "")


# Pictures


def find_image(folder: str | Path, name: str) -> Path:
    """The path of a picture in `folder`. COCO's, such as val2014/COCO_val2014_….jpg, may lie flat in it."""
    path = Path(folder, name)
    is_flat = path.name.startswith("COCO_") and not path.exists() and Path(folder, path.name).exists()
    return Path(folder, path.name) if is_flat else path


def find_images(names: Iterable[str], folder: str | Path, source: str | Path) -> dict[str, Path]:
    """The path of each picture of the file `source`. Raises UserError that names the first few not in `folder`."""
    with problems_at(source):
        paths = {name: find_image(folder, name) for name in dict.fromkeys(names)}
        if absent := [name for name, path in paths.items() if not path.is_file()]:
            problem = f"{len(absent)} of its {len(paths)} pictures are not in {shown(folder)} ({some(absent)})"
            raise FileNotFoundError(f"{problem}, give the folder that holds them (--images DIR)")
    return paths


# VQAv2 and its relatives


@dataclass(frozen=True)
class Question:
    """One question on one picture; `image` is relative to the folder of pictures."""

    question_id: int | str
    image: str
    question: str


@dataclass(frozen=True)
class PopeQuestion(Question):
    """Is the object in the picture? `label` is "yes" or "no"."""

    label: str


@dataclass(frozen=True)
class Annotation:
    """`answers` as published, one object per annotator, `answer`, the most frequent one, and their `question`."""

    question_id: int | str
    answers: tuple[dict, ...]
    answer: str
    answer_type: str | None = None
    question_type: str | None = None
    balanced: bool = True  # GQA scores only its balanced questions
    answerable: int | None = None  # 0 or 1, of VizWiz
    question: str = ""


def read_questions(path: str | Path) -> list[Question]:
    """Questions of VQAv2, GQA, TextVQA or VizWiz. Raises UserError, also for an id that occurs twice."""
    _, subset, records = vqa_records(path, "questions")
    questions = read(path, lambda r: Question(id_of(r), image_of(r, subset), text(r, "question")), records)
    check_unique((q.question_id for q in questions), path)
    return questions


def read_layout(path: str | Path) -> tuple[str, list[Annotation]]:
    """The scoring that belongs to a file of answers (official, textvqa, vizwiz or gqa), and its annotations.

    A file with one answer per question can only be scored by exact match, as GQA is; one whose answers have no ids only
    by position, as TextVQA is. Raises UserError, also for an id that occurs twice.
    """
    layout, _, records = vqa_records(path, "annotations")
    annotations = read(path, annotation, records)
    check_unique((a.question_id for a in annotations), path)
    if all(len(a.answers) == 1 for a in annotations):
        layout = "gqa"
    elif layout == "official" and not any("answer_id" in answer for a in annotations for answer in a.answers):
        layout = "textvqa"
    return layout, annotations


def holds_answers(path: str | Path) -> bool:
    """Whether a file of questions has their answers too, as GQA's, TextVQA's and VizWiz's. Raises UserError."""
    return any({"answers", "answer"} & set(record) for _, record in vqa_records(path, "questions")[2])


def annotations_of(
    questions: Sequence[Question], annotations: Iterable[Annotation], asked_in: str | Path, answered_in: str | Path
) -> list[Annotation]:
    """The annotation of each question, in their order. Raises UserError that names the questions without one."""
    by_id = {a.question_id: a for a in annotations}
    if bare := [q.question_id for q in questions if q.question_id not in by_id]:
        problem = f"{len(bare)} question(s) of {shown(asked_in)} have no annotation ({some(bare)})"
        raise UserError(f"{shown(answered_in)}: {problem}: take the annotations of the same split")
    return [replace(by_id[q.question_id], question=q.question) for q in questions]


def vqa_records(path: str | Path, key: str) -> tuple[str, str, Places]:
    """Scoring, COCO's subset, and records of {key: […]}, TextVQA's {"data": […]}, VizWiz's […] or GQA's {id: {…}}."""
    value = read_json(path, object)
    with problems_at(path):
        if isinstance(value, list):
            return "vizwiz", "", [(f"[{number}]", record) for number, record in enumerate(value)]
        subset = text({"data_subtype": ""} | value, "data_subtype")
        for part, layout in ((key, "official"), ("questions", "official"), ("data", "textvqa")):
            if part in value:
                return layout, subset, [(f": {part}[{number}]", record) for number, record in enumerate(value[part])]
        check(all("question" in record for record in value.values()), "expected VQAv2's, GQA's, TextVQA's or VizWiz's")
        return "gqa", "", [(f": {shown(id_)}", record | {"question_id": id_}) for id_, record in value.items()]


def image_of(record: Mapping, subset: str) -> str:
    """The name of a question's picture."""
    if "image" in record:  # VizWiz, or a user's file with the name
        return text(record, "image")
    image_id = record["imageId" if "imageId" in record else "image_id"]  # GQA, or the others
    if isinstance(image_id, str) and Path(image_id).suffix.lower() in (".jpg", ".jpeg", ".png", ".webp"):
        return image_id  # VizWiz in VQAv2's layout
    if isinstance(image_id, str) or not subset:  # TextVQA, GQA
        return f"{image_id}.jpg"
    subset = subset.replace("test-dev", "test")  # two sets of questions on the same pictures
    return f"{subset}/COCO_{subset}_{image_id:012d}.jpg"


def annotation(record: Mapping) -> Annotation:
    if "types" in record:  # GQA's own evaluation splits structural types into open (query) and binary (the others)
        answer, structural = text(record, "answer"), text(record["types"], "structural")
        kinds = "open" if structural == "query" else "binary", structural
        return Annotation(id_of(record), ({"answer": answer},), answer, *kinds, record.get("isBalanced", True))
    answers = tuple({"answer": a} if isinstance(a, str) else a for a in record["answers"])  # TextVQA: bare texts
    check(bool(answers), "answers is empty")
    most = Counter(text(answer, "answer") for answer in answers).most_common(1)[0][0]
    answer = text({"multiple_choice_answer": most} | record, "multiple_choice_answer")
    kinds = [text(record, name) if name in record else None for name in ("answer_type", "question_type")]
    check(record.get("answerable") in (0, 1, None), "answerable is neither 0 nor 1")
    return Annotation(id_of(record), answers, answer, *kinds, answerable=record.get("answerable"))


def read_pope(path: str | Path) -> list[PopeQuestion]:
    """POPE's JSONL of {"question_id", "image", "text", "label"}, LF or CRLF. Raises UserError with the line number."""

    def question(record: dict) -> PopeQuestion:
        check(record["label"] in ("yes", "no"), f"label is {quoted(record['label'])}, expected yes or no")
        return PopeQuestion(id_of(record), text(record, "image"), text(record, "text"), record["label"])

    questions = read(path, question)
    check_unique((q.question_id for q in questions), path)
    return questions


# MMNeedle


@dataclass(frozen=True)
class NeedleTest:
    """M haystack pictures of N×N sub-images, and the K needles to find in them.

    `haystack` holds, for each of the M pictures, its N² sub-images' names, row-major; `places` the (index, row, col) of
    each needle, counted from 0, or `ABSENT`; `targets` and `captions` the needles' own pictures and their descriptions.
    """

    id: int
    haystack: tuple[tuple[str, ...], ...]
    places: tuple[tuple[int, int, int], ...]
    targets: tuple[str, ...]
    captions: tuple[str, ...]

    @property
    def side(self) -> int:
        """N, the sub-images along each side of a stitched picture."""
        return isqrt(len(self.haystack[0]))


def read_captions(path: str | Path) -> dict[str, str]:
    """Caption by file name, from {name: caption} or COCO's captions_val2014.json; the last one listed counts."""
    value = read_json(path)
    with problems_at(path):
        if "annotations" not in value:
            return {name: text(value, name) for name in value}
        last = {record["image_id"]: text(record, "caption") for record in value["annotations"]}
        return {text(record, "file_name"): last[record["id"]] for record in value["images"] if record["id"] in last}


def read_needle_tests(metadata: str | Path, annotations: str | Path, captions: str | Path) -> list[NeedleTest]:
    """Tests from MMNeedle's `N_N.json`, `annotations_M_N_N.json` (K > 1: `K_annotations_…`) and a caption file.

    Raises UserError, also where the files contradict each other.
    """
    described, grids = read_captions(captions), {}
    stitched = read_json(metadata)
    with problems_at(metadata):
        for name, images in stitched.items():
            order = [f"{row}_{col}" for row in range(isqrt(len(images))) for col in range(isqrt(len(images)))]
            check(set(order) == set(images) != set(), f"{quoted(name)} is no square of sub-images")
            grids[name] = tuple(text(images, place) for place in order)

    def listed(value: Any) -> list:
        return value if isinstance(value, list) else [value]

    def test(record: dict) -> NeedleTest:
        names, targets = ([Path(name).name for name in listed(record[key])] for key in ("image_ids", "target"))
        check(bool(names) and grids.keys() >= {*names}, f"image_ids {some(names)} are not all in {shown(metadata)}")
        check(described.keys() >= {*targets}, f"{shown(captions)} lacks a caption of {some(targets)}")
        haystack, places = tuple(grids[name] for name in names), {}
        for index, grid in enumerate(haystack):
            places |= {(index, *divmod(at, isqrt(len(grid)))): name for at, name in enumerate(grid)}
        needles = list(zip(*(listed(record[key]) for key in ("index", "row", "col", "target")), strict=True))
        for *place, target in needles:
            is_there = target not in places.values() if tuple(place) == ABSENT else places.get(tuple(place)) == target
            check(is_there, f"{quoted(target)} is not at {place}, take metadata and annotations of one release")
        check(isinstance(record["id"], int), f"id is {quoted(record['id'])}, expected a number")
        spots, paths = tuple(needle[:3] for needle in needles), tuple(needle[3] for needle in needles)
        return NeedleTest(record["id"], haystack, spots, paths, tuple(described[name] for name in targets))

    tests = read(annotations, test)
    check_unique((test.id for test in tests), annotations)
    return tests
