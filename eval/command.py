"""What describes a benchmark's command, `python -m eval.NAME`: its flags, its questions, its scorer. Needs no torch.

A new benchmark is one file like `eval/pope.py`: a `Command`, the part that differs, given to `eval/entry.py`.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from eval.datasets import PROMPT, check_prompt, fill_prompt
from model.common import quoted, shown


@dataclass(frozen=True)
class Ask:
    """One question. `picture` is a path, an image, or a function that returns one or a list of them; questions with the
    same `key` share it. With `choices` the answer is the likeliest of them, else it is decoded greedily."""

    id: str
    key: str
    picture: Path | Image.Image | Callable[[], Image.Image | list[Image.Image]]
    prefix: str
    choices: tuple[str, ...] = ()


class Report(NamedTuple):
    """What a command prints: `values` with --json, else `lines`. `files` are the names of the files it has written."""

    values: Mapping[str, Any]
    lines: Sequence[str]
    files: Sequence[str] = ()


@dataclass(frozen=True)
class Command:
    """What a benchmark adds to what all have in common.

    load: from the flags, its data, and the questions of each of its sets by name. finish: from the flags, the data, the
    answers of each set (None: could not be asked), the output folder and the model's title, writes its files and
    returns the report. score: from the flags of the subcommand, the report. limit: the help and the default of --limit.
    """

    name: str
    doc: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    add_score_flags: Callable[[argparse.ArgumentParser], None]
    load: Callable[[argparse.Namespace], tuple[Any, dict[str, list[Ask]]]]
    finish: Callable[[argparse.Namespace, Any, dict[str, list[str | None]], Path, str], Report]
    score: Callable[[argparse.Namespace], Report]
    limit: tuple[str, int | None]
    max_new_tokens: int = 32


def whole(low: int, high: int = 10**9) -> Callable[[str], int]:
    """The type of a flag that takes a whole number in this range, for argparse."""

    def read(text: str) -> int:
        if len(text) > 20 or not text.lstrip("-").isdecimal() or not low <= int(text) <= high:
            most = "on" if high == 10**9 else f"to {high}"
            raise argparse.ArgumentTypeError(f"{quoted(text)}, expected a whole number from {low} {most}")
        return int(text)

    return read


positive = whole(1)


def command_parser(name: str, doc: str) -> argparse.ArgumentParser:
    """The parser of `python -m name`, with the module's docstring as its help."""
    return argparse.ArgumentParser(
        prog=f"python -m {name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action=argparse.BooleanOptionalAction, default=False, help="print JSON only (default: a table)"
    )


def add_prompt_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt",
        metavar="TEMPLATE",
        help=f"prompt with {{question}} in it (default: that of the run's training, else {PROMPT!r})",
    )


def print_report(report: Report, as_json: bool) -> None:
    for line in [json.dumps(report.values)] if as_json else report.lines:
        print(line if as_json else shown(line, 10_000))  # names from files may hold control characters


def make_asks(questions: Iterable[tuple[int | str, str, str]], pictures: Mapping, template: str) -> list[Ask]:
    """The `Ask`s of (id, name of the picture, question) triples; `pictures` has the pictures by name.

    Raises UserError for a template without {question}.
    """
    check_prompt(template)
    return [Ask(str(id_), name, pictures[name], fill_prompt(template, text)) for id_, name, text in questions]
