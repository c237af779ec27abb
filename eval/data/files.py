"""Files and the records in them: JSON lists, JSON lines, tables, and the pictures that they name.

In: a path, and the constructor of a format. Out: what it makes of each record. What it raises
becomes a `UserError` with the place.
"""

import contextlib
import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from model.common import UserError, once, parse_json, quoted, read_bytes, read_text, shown

# what a constructor raises about a wrong value
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
# a file of answers is scored without the pictures
LOOKED_FOR = ContextVar("whether pictures are looked for", default=True)


# Records


def read(
    path: str | Path,
    make: Callable,
    records: Places | None = None,
    refuse: Callable | None = None,
) -> list:
    """make(record) for each object of a JSON list or of JSON lines, or for `records` of the file.
    What `make` raises is a UserError with the place; with `refuse`, refuse(problem) stands in for
    the record. Raises UserError for a file without any good record."""
    made = []
    problems = []
    for place, record in records_in(path) if records is None else records:
        try:
            if isinstance(record, bytes):
                record = json.loads(record, object_pairs_hook=once)
            made.append(make(record))
        except WRONG as error:
            problem = problem_of(error)
            problems.append(f"{shown(path)}{place}: {problem}")
            if refuse is None:
                raise UserError(f"{problems[0]}: correct the record") from None
            made.append(refuse(problem))
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
    lines = enumerate(content.split(b"\n"), 1)
    return [(f":{number}", line) for number, line in lines if line.strip()]


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
        raise UserError(
            f"{shown(path)}:{lines.line_num}: {error}: put a text with commas between quotes, and "
            "double each quote in it"
        ) from None


@contextlib.contextmanager
def problems_at(path: str | Path) -> Iterator[None]:
    """Turn what the block raises about values of a file into a UserError that names the file."""
    try:
        yield
    except WRONG as error:
        raise UserError(
            f"{shown(path)}: {problem_of(error)}: check that this is the right file"
        ) from None


def problem_of(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"{quoted(error.args[0])} is missing"
    return shown(error, 500)


# Values


def check(is_right: bool, problem: str) -> None:
    if not is_right:
        raise ValueError(problem)


def text_at(record: Mapping, name: str) -> str:
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
    repeated = [id_ for id_, count in Counter(map(str, ids)).items() if count > 1]
    if repeated:
        raise UserError(
            f"{shown(where)}: {len(repeated)} duplicate id(s) ({some(repeated)}): keep one record of "
            "each"
        )


def some(ids: Sequence) -> str:
    """The first few of `ids`, for a message."""
    names = [quoted(id_) for id_ in ids[:5]]
    if len(ids) > 5:
        names.append("…")
    return ", ".join(names)


# Pictures


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
        raise UserError(
            f"picture {quoted(name)} is not in {shown(folder)}: give its folder (--images DIR)"
        )
    return path
