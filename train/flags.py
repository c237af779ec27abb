"""Command-line flags from the fields of a dataclass, the check of their values, and the config.json of a run.

In: a frozen dataclass whose fields are made by `flag`. Out: its instance, from a command line or from a run folder.
"""

import argparse
import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import TypeVar

from model.common import UserError

Settings = TypeVar("Settings")


def flag(
    default,
    help: str,
    choices: Sequence[str] | None = None,
    *,
    least: float | None = None,
    share: bool = False,
    **argument,
):
    """A dataclass field that is also a flag of the same name.

    least: the smallest valid value. share: the value must be from 0 to 1. argument: more arguments of `add_argument`.
    """
    if choices is not None:
        argument["choices"] = list(choices)
    metadata = {"help": help, "least": least, "share": share, "argument": argument}
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(name: str) -> str:
    """The flag of the field `name`."""
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser, settings: type) -> None:
    """Add a flag for each field of the dataclass `settings`; one that is not given is absent from the result."""
    hints = typing.get_type_hints(settings)
    for field in dataclasses.fields(settings):
        help = field.metadata["help"]
        if "default" not in help:
            help += f" (default: {field.default})"
        arguments = {"default": argparse.SUPPRESS, "help": help.replace("%", "%%"), **field.metadata["argument"]}
        kind = hints[field.name]
        kind = next((one for one in typing.get_args(kind) if one not in (NoneType, ...)), kind)
        if kind is bool:
            arguments["action"] = argparse.BooleanOptionalAction
        else:
            arguments.setdefault("type", kind)
        parser.add_argument(flag_name(field.name), **arguments)


def add_run_flags(parser: argparse.ArgumentParser, folder: str) -> None:
    """Add --out and --resume. folder: what the help says of the default run folder."""
    parser.add_argument("--out", type=Path, help=f"run folder to make (default: {folder}, or the next number)")
    parser.add_argument(
        "--resume", type=Path, metavar="RUN", help="go on with an interrupted run, with its own settings"
    )


def from_values(settings: type[Settings], values: Mapping[str, object]) -> Settings:
    """An instance of the dataclass `settings`; lists, as argparse and JSON give them, become tuples."""
    return settings(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def check_ranges(settings) -> None:
    """Raise UserError for the first value that is outside of its field's range."""
    for field in dataclasses.fields(settings):
        name, value = flag_name(field.name), getattr(settings, field.name)
        least = field.metadata["least"]
        if least is not None and value is not None and not value >= least:
            raise UserError(f"{name} is {value}, expected at least {least}")
        if field.metadata["share"] and not 0 <= value <= 1:
            raise UserError(f"{name} is {value}, expected a share from 0 to 1")


def read_config(settings: type[Settings], run: Path, program: str) -> Settings:
    """The settings in the config.json of a run folder. Raises UserError if `run` is not a run folder of `program`."""
    try:
        return from_values(settings, json.loads((run / "config.json").read_text()))
    except (OSError, json.JSONDecodeError, TypeError, AttributeError) as error:
        raise UserError(
            f"--resume {run}: no run folder of {program} ({error}): give the folder that it has written"
        ) from None
