"""Flags of the commands: the parser, whole numbers, and help that ends with the default. Needs no
torch."""

from argparse import (
    ArgumentParser,
    ArgumentTypeError,
    BooleanOptionalAction,
    RawDescriptionHelpFormatter,
)
from collections.abc import Callable
from typing import Any

from model.common import Parser


def whole(low: int, high: int = 10**9) -> Callable[[str], int]:
    """The type of a flag that takes a whole number in this range, for argparse."""

    def number(text: str) -> int:
        if not low <= int(text) <= high:
            raise ArgumentTypeError(f"{text} is not between {low} and {high}")
        return int(text)

    return number


positive = whole(1)
MASKS_HELP = "vae-oid.npz of big_vision, or embedded, the toy's"


def command_parser(name: str, doc: str | None) -> ArgumentParser:
    """The parser of `python -m name`, with the module's docstring as its help."""
    return Parser(f"python -m {name}", description=doc, formatter_class=RawDescriptionHelpFormatter)


def add_limit(parser: ArgumentParser, default: int) -> None:
    """--max-new-tokens."""
    limit = "limit of an answer's tokens"
    add_flag(parser, "--max-new-tokens", limit, default, type=positive, metavar="N")


def add_flag(
    parser: ArgumentParser,
    name: str,
    help: str,
    default: Any = None,
    **argument: Any,
) -> None:
    """A flag, whose help ends with its default unless it says one. A bool is a switch, --name or
    --no-name."""
    if isinstance(default, bool):
        argument["action"] = BooleanOptionalAction
    if default is not None and "(default" not in help:
        help += " (default: %(default)s)"
    parser.add_argument(name, default=default, help=help, **argument)
