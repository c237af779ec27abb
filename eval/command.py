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
THREADS = "of PyTorch on the CPU (default: OMP_NUM_THREADS, if set; else all cores, but 2 for a small model)"
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


def add_model_flags(parser: ArgumentParser, many: bool = False) -> None:
    """--model, --adapter and how they compute. many: several models and adapters may be given."""
    repeated = {"action": "append"} if many else {}
    again = "; again to compare" if many else ""
    source = (
        f"a folder, hub id, preset or `embedded`{again} (default: the base of the adapter, else "
        "`embedded`)"
    )
    add_flag(parser, "--model", source, metavar="SRC", **repeated)
    run = (
        f"a run, or any folder with a PEFT adapter, or `none`{again} (default: without --model, "
        "the newest run on the embedded base; for its scenes the newest on them)"
    )
    add_flag(parser, "--adapter", run, metavar="RUN", **repeated)
    bits = f"hold the weights in 8 or 4 bits{again}"
    add_flag(parser, "--quantize", bits, choices=["none", "int8", "nf4"], **repeated)
    dtype = "of the weights (default: bf16 on CUDA or in few bits, else fp32)"
    add_flag(parser, "--dtype", dtype, choices=["fp32", "bf16", "fp16"])
    add_flag(parser, "--device", "cpu, cuda, mps, … (default: cuda or mps if there is one)", "auto")
    add_flag(parser, "--threads", THREADS, type=whole(1, 1024), metavar="N")
    limit = "limit of a prompt's tokens, pictures too"
    add_flag(parser, "--max-length", limit, 8192, type=positive, metavar="N")
