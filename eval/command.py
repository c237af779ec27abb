"""Flags of the commands: the parser, whole numbers, and help that ends with the default. Needs no torch."""

import argparse
from collections.abc import Callable
from typing import Any

from model.common import quoted


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
