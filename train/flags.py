"""Command-line flags from the fields of a dataclass, the check of their values, and the config.json of a run.

In: a frozen dataclass whose fields are made by `flag`. Out: its instance, from a command line or from a run folder.
"""

import argparse
import dataclasses
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TypeVar

from model.common import Expected, UserError, quoted, read_json, shown
from train.recipes import GPUS

Settings = TypeVar("Settings")
MANY = 2**31 - 1  # the largest integer of a flag without another limit
RUN_CONFIG = "config.json"


def flag(
    default,
    help: str,
    choices: Sequence[str] | None = None,
    *,
    least: float | None = None,
    most: float | None = None,
    share: bool = False,
    **argument,
):
    """A dataclass field that is also a flag of the same name.

    least, most: the range of a number, both ends included. share: it is from 0 to 1. argument: more arguments of
    `add_argument`.
    """
    if choices is not None:
        argument["choices"] = list(choices)
    least, most = (0, 1) if share else (least, most)
    metadata = {"help": help, "least": least, "most": most, "choices": tuple(choices or ()), "argument": argument}
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(name: str) -> str:
    """The flag of the field `name`."""
    return "--" + name.rstrip("_").replace("_", "-")


class FlagParser(argparse.ArgumentParser):
    """A parser that prints the lines of its description as they are."""

    def __init__(self, **options):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)


def add_flags(parser: argparse.ArgumentParser, settings: type) -> None:
    """Add a flag for each field of the dataclass `settings`; one that is not given is absent from the result."""
    for field in dataclasses.fields(settings):
        help = field.metadata["help"]
        if "default" not in help:
            help += f" (default: {field.default})"
        arguments = {"default": argparse.SUPPRESS, "help": help.replace("%", "%%"), "dest": field.name}
        arguments |= field.metadata["argument"]
        kind = field_kind(settings, field)
        if kind is bool:
            arguments["action"] = argparse.BooleanOptionalAction
        else:
            arguments.setdefault("type", str if kind is list else kind)
        parser.add_argument(flag_name(field.name), **arguments)


def read_flags(options: type[Settings], program: str, description: str | None, argv: Sequence[str] | None) -> Settings:
    """The flags of a command that has no others. Raises UserError for values out of range."""
    parser = FlagParser(prog=f"python -m {program}", description=description)
    add_flags(parser, options)
    chosen = from_values(options, vars(parser.parse_args(argv)))
    check_ranges(chosen)
    return chosen


def field_kind(settings: type, field: dataclasses.Field) -> type:
    """The type of a field's value, None apart: int, float, bool, str, or list for a tuple of texts."""
    hint = typing.get_type_hints(settings)[field.name]
    if typing.get_origin(hint) is tuple:
        return list
    return next((one for one in typing.get_args(hint) if one is not NoneType), hint)


@dataclasses.dataclass(frozen=True)
class RunArguments:
    """Flags that are no settings. allow_changed: resume although the base, the data or a setting has changed."""

    out: Path | None = None
    resume: Path | None = None
    allow_changed: bool = False
    plan: bool = False
    gpu: str = "H100"
    gpus: int = 1
    show_batch: Path | None = None


def take_run_arguments(given: dict) -> RunArguments:
    """Take the flags that are no settings out of `given`. Raises UserError for flags that exclude each other."""
    names = [field.name for field in dataclasses.fields(RunArguments) if field.name in given]
    arguments = RunArguments(**{name: given.pop(name) for name in names})
    if arguments.resume is not None and (arguments.out is not None or given):
        raise UserError("--resume goes on with the run's own settings: leave the other flags out")
    if arguments.allow_changed and arguments.resume is None:
        raise UserError("--allow-changed goes with --resume: leave it out")
    if arguments.gpus < 1:
        raise UserError(f"--gpus {arguments.gpus}: expected 1 or more")
    return arguments


def add_run_flags(parser: argparse.ArgumentParser, folder: str) -> None:
    """Add the flags of a run folder. folder: what the help says of the default."""
    parser.add_argument("--out", type=Path, help=f"run folder to make (default: {folder}, or the next number)")
    parser.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on with an interrupted run, with its own settings"
    )
    parser.add_argument(
        "--allow-changed",
        action="store_true",
        help="with --resume: go on although the base, the data or a setting is not what it was",
    )


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Add what shows a run without training: --show-batch, --plan, and the GPUs that it counts with."""
    parser.add_argument(
        "--show-batch",
        type=Path,
        nargs="?",
        const=Path("batch.png"),
        metavar="FILE",
        help="train nothing: print the first batch as the model reads it, with what is learned marked, and write its "
        "pictures to a sheet (default: batch.png)",
    )
    parser.add_argument(
        "--plan",
        action="store_true",
        help="train nothing: open the data and the headers, and print what the run takes (memory, disk, hours)",
    )
    gpu, gpus = RunArguments.gpu, RunArguments.gpus
    parser.add_argument("--gpu", choices=list(GPUS), default=gpu, help=f"GPU of --plan (default: {gpu})")
    parser.add_argument("--gpus", type=int, default=gpus, help=f"number of them (default: {gpus})")


def from_values(settings: type[Settings], values: Mapping[str, object]) -> Settings:
    """An instance of the dataclass `settings`; lists, as argparse and JSON give them, become tuples."""
    return settings(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def check_ranges(settings, where: str = "") -> None:
    """Raise UserError, with `where` before it, for the first value that has another type or is out of range."""
    for field in dataclasses.fields(settings):
        value, kind, limits = getattr(settings, field.name), field_kind(type(settings), field), field.metadata
        if kind is Path or "type" in limits["argument"]:  # its own reader has checked it
            continue
        most = MANY if kind is int and limits["most"] is None else limits["most"]
        expected = Expected(kind, limits["least"], most, () if kind is list else limits["choices"])
        values = list(value) if isinstance(value, tuple) else value
        if value is None and field.default is None:
            continue
        if not expected.accepts(values) or kind is list and not all(isinstance(one, str) for one in value):
            raise UserError(f"{where}{flag_name(field.name)} is {quoted(value)}, expected {expected}")
        if kind is str and "\0" in value:
            raise UserError(f"{where}{flag_name(field.name)} is {quoted(value)}, expected a text without NUL")


def read_config(settings: type[Settings], run: Path, program: str) -> Settings:
    """The settings in the config.json of a run folder. Raises UserError if `program` has not written it as it is."""
    try:
        raw = read_json(run / RUN_CONFIG)
        if raw.keys() != {field.name for field in dataclasses.fields(settings)}:
            raise UserError(f"{RUN_CONFIG} has other settings than this version")
    except UserError as error:
        raise UserError(
            f"--resume {shown(run)}: no run folder of {program} ({error}): give the folder that it has written"
        ) from None
    chosen = from_values(settings, raw)
    check_ranges(chosen, f"--resume {shown(run)}: in {RUN_CONFIG}, ")
    return chosen
