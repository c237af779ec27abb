"""What describes a benchmark's command, `python -m eval.NAME`: its flags, its questions, its scorer. Needs no torch.

A new benchmark is one file like `eval/pope.py`: a `Command`, the part that differs, given to `eval/entry.py`.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from eval.data import PROMPT
from eval.question import Picture as Picture
from eval.question import Question as Ask
from eval.question import question_of as ask_of  # noqa: F401
from model.common import quoted, shown


class Report(NamedTuple):
    """What a command prints: `values` with --json, else `lines`. `files` are the names of the files it has written.

    scores: by measure, the score (0 to 1) of each question by its id, for the comparison of models. blind: the same of
    the model on gray pictures. pictures: by id, the name of the question's picture.
    """

    values: Mapping[str, Any]
    lines: Sequence[str]
    files: Sequence[str] = ()
    scores: Mapping[str, Mapping[str, float]] = {}
    blind: Mapping[str, Mapping[str, float]] = {}
    pictures: Mapping[str, str] = {}


@dataclass(frozen=True)
class Command:
    """What a benchmark adds to what all have in common.

    load: from the flags, its data, and the questions of each of its sets by name. finish: from the flags, the data, the
    answers of each set (None: could not be asked) and the `Session`, writes its files and returns the report. score:
    from the flags of the subcommand, the report; None: it has none. limit: the help and the default of --limit.
    compare: from the reports of several models, the values and the lines of their table; by default their `scores` are
    compared. reads_text: language models for text alone can be asked, since its questions have choices to be `scored`.
    """

    name: str
    doc: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    add_score_flags: Callable[[argparse.ArgumentParser], None] | None
    load: Callable[[argparse.Namespace], tuple[Any, dict[str, list[Ask]]]]
    finish: Callable[[argparse.Namespace, Any, dict[str, list[str | None]], Any], Report]
    score: Callable[[argparse.Namespace], Report] | None
    limit: tuple[str, int | None]
    max_new_tokens: int = 32
    compare: Callable[[Mapping[str, Report]], tuple[dict, list[str]]] | None = None
    reads_text: bool = False


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


def add_flag(parser: argparse.ArgumentParser, name: str, help: str, default: Any = None, **argument: Any) -> None:
    """A flag, whose help ends with its default unless it says one. A bool is a switch, --name or --no-name."""
    said = "%(default)s"
    if isinstance(default, bool):
        argument["action"], said = argparse.BooleanOptionalAction, name if default else f"--no-{name[2:]}"
    if default is not None and "(default" not in help:
        help += f" (default: {said})"
    parser.add_argument(name, default=default, help=help, **argument)


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--json", "print JSON only (default: a table)", False)


def add_prompt_flag(parser: argparse.ArgumentParser) -> None:
    help = f"prompt with {{question}} in it (default: that of the run's training, else {PROMPT!r})"
    add_flag(parser, "--prompt", help, metavar="TEMPLATE")


def print_report(report: Report, as_json: bool) -> None:
    for line in [json.dumps(report.values)] if as_json else report.lines:
        print(line if as_json else shown(line, 10_000))  # names from files may hold control characters
