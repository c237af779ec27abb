"""Names that commands still read from here until they are benchmarks (`eval/bench.py`)."""

from pathlib import Path

from eval.data import PROMPT, check_prompt, check_unique, fill_prompt, find_images, read_table  # noqa: F401
from model.common import Expected, UserError, json_name, read_field, read_jsonl, shown

TEXT = Expected(str)
NAME = Expected(str, 1, 1024)  # of a picture or a question
LIST = Expected(list, 1)


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


def read_id(record: dict, name: str, where: str) -> int | str:
    """An id, which is a number or a text. Raises UserError."""
    return read_field(record, name, NAME if isinstance(record.get(name), str) else Expected(int), where)
