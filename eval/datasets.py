"""Readers of the published file formats: VQAv2 and its relatives, MMNeedle, POPE, and a user's own JSONL.

In: files exactly as their authors publish them. Out: small frozen records, checked; pictures stay paths until they are
opened. `eval/vqa.py`, `eval/needle.py` and `eval/pope.py` score answers to them; `train/` learns from them.

A file that breaks its format is a `UserError` with its name, the line or record, and the remedy; nothing is skipped.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from dataclasses import field as field_of
from functools import lru_cache
from math import isqrt
from pathlib import Path

from model.common import UserError, file_errors, quoted, shown
from model.common import read_jsonl as iterate_jsonl

# ---------------------------------------------------------------------------------------------------------------------
# Prompt templates
# ---------------------------------------------------------------------------------------------------------------------

PROMPT = "answer en {question}"  # the prompt of PaliGemma's authors


def check_prompt(template: str) -> str:
    """The template. Raises UserError if the text {question} is not in it."""
    if "{question}" not in template:
        raise UserError(f"prompt template {quoted(template)}: must contain {{question}}, such as {PROMPT!r}")
    return template


def fill_prompt(template: str, question: str) -> str:
    """`template` with the question in place of the text {question}; other braces are text, nothing is expanded."""
    return template.replace("{question}", question)


# ---------------------------------------------------------------------------------------------------------------------
# JSON and JSON lines
# ---------------------------------------------------------------------------------------------------------------------


def read_json(path: str | Path):
    """The value in the JSON file at `path`. Raises UserError, with line and column, if it is absent or malformed."""
    try:
        return json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path}: not valid JSON at line {error.lineno}, column {error.colno} ({error.msg}): correct the file or "
            "download it again"
        ) from None


def read_jsonl(path: str | Path) -> list[tuple[str, dict]]:
    """The objects of a JSON-lines file, each with its place ("file:line"); LF or CRLF, blank lines are skipped.

    Raises UserError, with the line number, for a line that is not one JSON object.
    """
    records = []
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                f"{where}: not valid JSON ({error.msg} at column {error.colno}): each line must hold one JSON object"
            ) from None
        if not isinstance(record, dict):
            raise UserError(f"{where}: holds a JSON {_kind(record)}: each line must hold one JSON object")
        records.append((where, record))
    if not records:
        raise UserError(f"{path}: holds no records: each line must hold one JSON object")
    return records


def _read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: not found: check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text ({error}): check the path") from None


def records_of(value, where: str) -> list[tuple[str, dict]]:
    """The objects of a JSON list, each with its place. Raises UserError for anything else, and for an empty list."""
    if not isinstance(value, list) or not value:
        found = "an empty one" if value == [] else _kind(value)
        raise UserError(f"{where}: expected a list of records, found {found}: check that this is the right file")
    for number, record in enumerate(value):
        if not isinstance(record, dict):
            raise UserError(f"{where}[{number}]: expected an object, found {_kind(record)}: correct the record")
    return [(f"{where}[{number}]", record) for number, record in enumerate(value)]


def field(record: dict, name: str, kind: type | tuple[type, ...], where: str):
    """`record[name]`, which must be of `kind`. Raises UserError with the value found instead."""
    if name not in record:
        there = ", ".join(map(repr, record)) or "nothing"
        raise UserError(f"{where}: has no {name!r} (it has {there:.200}): add it to the record")
    if not isinstance(record[name], kind) or isinstance(record[name], bool):
        expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise UserError(f"{where}: {name!r} is {record[name]!r:.60}, expected {expected}: correct the record")
    return record[name]


def _kind(value) -> str:
    return "null" if value is None else type(value).__name__


def check_unique(ids: Iterable[Hashable], where: str | Path) -> None:
    """Raise UserError that names the ids which occur more than once."""
    repeated = [key for key, count in Counter(ids).items() if count > 1]
    if repeated:
        raise UserError(f"{where}: {len(repeated)} duplicate id(s) ({some(repeated)}): keep one record of each")


def check_ids(found: Iterable[Hashable], expected: Iterable[Hashable], where: str | Path, against: str | Path) -> None:
    """Raise UserError that names missing and extra ids unless `found` and `expected` hold the same ones."""
    found, expected = dict.fromkeys(found), dict.fromkeys(expected)  # ordered sets
    wrong = {
        "missing": [id_ for id_ in expected if id_ not in found],
        "extra": [id_ for id_ in found if id_ not in expected],
    }
    parts = [f"{len(ids)} {word} id(s) ({some(ids)})" for word, ids in wrong.items() if ids]
    if parts:
        raise UserError(f"{where}: {' and '.join(parts)}: it must hold exactly the ids of {against}")


def some(ids: list) -> str:
    """The first few of `ids`, for a message."""
    return ", ".join(map(repr, ids[:5])) + (", …" if len(ids) > 5 else "")


# ---------------------------------------------------------------------------------------------------------------------
# Pictures
# ---------------------------------------------------------------------------------------------------------------------


def inside(folder: str | Path, name: str, allow_outside: bool = False) -> Path:
    """The path of `name`, which a data set gives, in `folder`. Raises UserError where it leads outside.

    Absolute names, `..` and links may be used within the folder. allow_outside: they may lead anywhere.
    """
    if not name or "\0" in name or name.encode("utf-8", "replace") != name.encode("utf-8", "surrogatepass"):
        raise UserError(f"{quoted(name)} is no file name: correct the record")
    path = Path(folder, name)
    with file_errors(path):
        is_link = path.is_symlink() or path.name in ("", ".", "..")
        real = os.path.realpath(path) if is_link else os.path.join(_real_folder(path.parent), path.name)
        root = _real_folder(Path(folder))
    if not allow_outside and os.path.commonpath((root, real)) != root:
        raise UserError(
            f"{quoted(name)} is outside of {shown(folder)}: give the folder of the pictures (--images DIR), or "
            "--allow-outside if you trust the data"
        )
    return path


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


def check_images(names: Iterable[str], folder: str | Path, source: str | Path) -> None:
    """Raise UserError that names the first few pictures of `source` that are not in `folder`."""
    names = list(dict.fromkeys(names))
    absent = [name for name in names if not find_image(folder, name).is_file()]
    if absent:
        raise UserError(
            f"{source}: {len(absent)} of its {len(names)} pictures are not in {folder} ({some(absent)}): "
            "give the folder that holds them"
        )


# ---------------------------------------------------------------------------------------------------------------------
# A user's own examples
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """A training example: the suffix is the answer to the picture and the prefix. `line` is its place in the file."""

    image: Path
    prefix: str
    suffix: str
    line: int = field_of(default=0, compare=False)


def read_examples(
    path: str | Path,
    images: str | Path | None = None,
    allow_outside: bool = False,
    bad: Callable[[UserError], None] | None = None,
) -> list[Example]:
    """Read JSONL of {"image", "prefix", "suffix"}; image paths are relative to `images`, by default the file's folder.

    Raises UserError, with the line number, for a malformed line and for a picture that is absent or outside of the
    folder (see `inside`). Such errors are given to `bad` if there is one; a file without any sound line is an error.
    """
    folder, examples = Path(path).parent if images is None else Path(images), []
    for where, record in iterate_jsonl(path, bad):
        try:
            name, prefix, suffix = (field(record, key, str, where) for key in ("image", "prefix", "suffix"))
            try:
                image = find_image(folder, name, allow_outside)
            except UserError as error:
                raise UserError(f"{where}: picture {error}") from None
            if not image.is_file():
                raise UserError(
                    f"{where}: picture {quoted(name)} is not in {shown(folder)}: give the folder that holds it"
                )
        except UserError as error:
            if bad is None:
                raise
            bad(error)
        else:
            examples.append(Example(image, prefix, suffix, int(where.rpartition(":")[2])))
    if not examples and bad is None:
        raise UserError(f"{shown(path)}: holds no records: each line must hold one JSON object")
    return examples


# ---------------------------------------------------------------------------------------------------------------------
# VQAv2 and its relatives
# ---------------------------------------------------------------------------------------------------------------------


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


def read_questions(path: str | Path) -> list[Question]:
    """Questions of VQAv2, GQA, TextVQA or VizWiz. Raises UserError for another structure or an id that occurs twice."""
    value = read_json(path)
    subset = str(value.get("data_subtype", "")) if isinstance(value, dict) else ""
    questions = [
        Question(_question_id(record, where), _image_name(record, subset, where), field(record, "question", str, where))
        for where, record in _vqa_records(value, "questions", path)
    ]
    check_unique((q.question_id for q in questions), path)
    return questions


def read_question_ids(path: str | Path) -> list[int | str]:
    """Only the ids of `read_questions`, for scoring."""
    ids = [_question_id(record, where) for where, record in _vqa_records(read_json(path), "questions", path)]
    check_unique(ids, path)
    return ids


def read_annotations(path: str | Path) -> list[Annotation]:
    """Annotations of VQAv2, or of the one file that holds questions and answers in GQA, TextVQA and VizWiz.

    GQA's structural type splits into "open" (query) and "binary" (the others), as in its own evaluation.
    Raises UserError for another structure, a question without answers, or an id that occurs twice.
    """
    annotations = [_annotation(record, where) for where, record in _vqa_records(read_json(path), "annotations", path)]
    check_unique((a.question_id for a in annotations), path)
    return annotations


def _vqa_records(value, key: str, path: str | Path) -> list[tuple[str, dict]]:
    """The records of the four layouts: {key: […]}, TextVQA's {"data": […]}, VizWiz's […], GQA's {id: {…}}."""
    if isinstance(value, dict) and (key in value or "data" in value):
        name = key if key in value else "data"
        return records_of(value[name], f"{path}: {name}")
    if isinstance(value, list):
        return records_of(value, str(path))
    if isinstance(value, dict) and value and all(isinstance(v, dict) and "question" in v for v in value.values()):
        return [(f"{path}: {id_}", record | {"question_id": id_}) for id_, record in value.items()]
    raise UserError(f"{path}: holds no {key!r} list: expected the layout of VQAv2, GQA, TextVQA or VizWiz")


def _question_id(record: dict, where: str) -> int | str:
    # VizWiz has one question per picture and no other id
    name = "image" if "image" in record and "question_id" not in record else "question_id"
    return field(record, name, (int, str), where)


def _image_name(record: dict, subset: str, where: str) -> str:
    if "image" in record:  # VizWiz, or a user's file with the name
        return field(record, "image", str, where)
    if "imageId" in record:  # GQA
        return f"{record['imageId']}.jpg"
    image_id = field(record, "image_id", (int, str), where)
    if isinstance(image_id, str) or not subset:  # TextVQA
        return f"{image_id}.jpg"
    subset = subset.replace("test-dev", "test")  # two sets of questions on the same pictures
    return f"{subset}/COCO_{subset}_{image_id:012d}.jpg"


def _annotation(record: dict, where: str) -> Annotation:
    kinds = record.get("types")
    if isinstance(kinds, dict):  # GQA
        answer, structural = field(record, "answer", str, where), field(kinds, "structural", str, f"{where}: types")
        return Annotation(
            _question_id(record, where),
            ({"answer": answer},),
            answer,
            "open" if structural == "query" else "binary",
            structural,
            balanced=bool(record.get("isBalanced", True)),
        )
    # TextVQA lists bare strings
    answers = tuple({"answer": a} if isinstance(a, str) else a for a in field(record, "answers", list, where))
    if not answers or not all(isinstance(a, dict) and isinstance(a.get("answer"), str) for a in answers):
        raise UserError(f"{where}: 'answers' must list one {{'answer': text}} an annotator, and at least one")
    most = Counter(given["answer"] for given in answers).most_common(1)[0][0]
    said, answer_type, question_type = (
        field(record, name, str, where) if name in record else None
        for name in ("multiple_choice_answer", "answer_type", "question_type")
    )
    return Annotation(_question_id(record, where), answers, most if said is None else said, answer_type, question_type)


# ---------------------------------------------------------------------------------------------------------------------
# MMNeedle
# ---------------------------------------------------------------------------------------------------------------------

ABSENT = (-1, -1, -1)


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


def read_needle_tests(metadata: str | Path, annotations: str | Path, captions: str | Path) -> list[NeedleTest]:
    """Tests from MMNeedle's `N_N.json`, `annotations_M_N_N.json` (K > 1: `K_annotations_…`) and a caption file.

    Raises UserError where the files contradict: a stitched picture or caption that is absent, a place outside the grid.
    """
    grids, names = _read_grids(metadata), read_captions(captions)
    tests = []
    for where, record in records_of(read_json(annotations), str(annotations)):
        stitched = [Path(name).name for name in field(record, "image_ids", list, where)]
        unknown = [name for name in stitched if name not in grids]
        if unknown or not stitched:
            raise UserError(f"{where}: image_ids ({some(unknown)}) not in {metadata}: take the metadata of the same N")
        columns = [field(record, name, (int, list), where) for name in ("index", "row", "col")]
        targets = field(record, "target", (str, list), where)
        if isinstance(targets, str):
            columns, targets = [[column] for column in columns], [targets]
        if any(not isinstance(column, list) or len(column) != len(targets) for column in columns):
            raise UserError(f"{where}: index, row, col and target differ in length: one of each for every needle")
        uncaptioned = [name for name in targets if Path(name).name not in names]
        if uncaptioned:
            raise UserError(f"{where}: {captions} has no caption for {some(uncaptioned)}: take the captions of val2014")
        test = NeedleTest(
            id=field(record, "id", int, where),
            haystack=tuple(grids[name] for name in stitched),
            places=tuple(zip(*columns, strict=True)),
            targets=tuple(targets),
            captions=tuple(names[Path(name).name] for name in targets),
        )
        _check_places(test, where)
        tests.append(test)
    check_unique((test.id for test in tests), annotations)
    return tests


def read_captions(path: str | Path) -> dict[str, str]:
    """Caption by file name, from {name: caption} or COCO's captions_val2014.json; the last one listed counts.

    Raises UserError for another structure.
    """
    value = read_json(path)
    if isinstance(value, dict) and "annotations" in value:
        last = {
            field(record, "image_id", int, where): field(record, "caption", str, where)
            for where, record in records_of(value["annotations"], f"{path}: annotations")
        }
        return {
            field(record, "file_name", str, where): last[record["id"]]
            for where, record in records_of(value.get("images"), f"{path}: images")
            if record.get("id") in last
        }
    if isinstance(value, dict) and value and all(isinstance(caption, str) for caption in value.values()):
        return value
    raise UserError(f"{path}: expected {{file name: caption}}, or COCO's captions file with 'images' and 'annotations'")


def _read_grids(path: str | Path) -> dict[str, tuple[str, ...]]:
    """Sub-images, row-major, of each stitched picture in MMNeedle's {"stitched.jpg": {"row_col": "picture.jpg"}}."""
    value, grids = read_json(path), {}
    for name, images in value.items() if isinstance(value, dict) else ():
        side = isqrt(len(images)) if isinstance(images, dict) else 0
        order = [f"{row}_{col}" for row in range(side) for col in range(side)]
        if not side or set(order) != set(images):
            raise UserError(f"{path}: {name!r} is no square of 'row_col' names: download the file again")
        grids[name] = tuple(field(images, place, str, f"{path}: {name}") for place in order)
    if not grids or len({len(names) for names in grids.values()}) != 1:
        raise UserError(f"{path}: expected {{stitched picture: {{'row_col': picture}}}}, all of one size")
    return grids


def _check_places(test: NeedleTest, where: str) -> None:
    remedy = "take metadata and annotations of the same N and release"
    for place, target in zip(test.places, test.targets, strict=True):
        index, row, col = place
        if place == ABSENT:
            if any(target in names for names in test.haystack):
                raise UserError(f"{where}: {target!r} is given as absent but is in the haystack: {remedy}")
        elif not (0 <= index < len(test.haystack) and 0 <= row < test.side and 0 <= col < test.side):
            size = f"{len(test.haystack)} picture(s) of {test.side} by {test.side}"
            raise UserError(f"{where}: place {place} is outside {size}: {remedy}")
        elif test.haystack[index][row * test.side + col] != target:
            raise UserError(f"{where}: {target!r} is not at its place {place}: {remedy}")


# ---------------------------------------------------------------------------------------------------------------------
# POPE
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PopeQuestion:
    """Is the object in the picture? `label` is "yes" or "no"."""

    question_id: int | str
    image: str
    text: str
    label: str


def read_pope(path: str | Path) -> list[PopeQuestion]:
    """Read POPE's JSONL of {"question_id", "image", "text", "label"}, LF or CRLF.

    Raises UserError, with the line number, for a malformed line, another label, or an id that occurs twice.
    """
    questions = []
    for where, record in read_jsonl(path):
        label = field(record, "label", str, where)
        if label not in ("yes", "no"):
            raise UserError(f"{where}: label is {label!r}, expected 'yes' or 'no': correct the line")
        image, text = field(record, "image", str, where), field(record, "text", str, where)
        questions.append(PopeQuestion(field(record, "question_id", (int, str), where), image, text, label))
    check_unique((q.question_id for q in questions), path)
    return questions
