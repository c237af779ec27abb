"""Command-line flags from the fields of a dataclass, the check of their values, and the config.json
of a run.

In: a frozen dataclass whose fields are made by `flag`. Out: its instance, from a command line or
from a run folder.
"""

import dataclasses
import typing
from argparse import SUPPRESS, BooleanOptionalAction, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar

from model.common import Parser, UserError, quoted, read_json, shown

Settings = TypeVar("Settings")
MANY = 2**31 - 1  # the largest number of a flag without another limit
RUN_CONFIG = "config.json"


def flag(default: Any, help: str, *, least: float = -MANY, most: float = MANY, **argument) -> Any:
    """A dataclass field that is also a flag of the same name. least, most: the range of a number,
    ends included. argument: of `add_argument`, such as `choices`."""
    return dataclasses.field(
        default=default, metadata={"help": help, "range": (least, most), "argument": argument}
    )


def several(choices: Iterable[str], help: str, default: Iterable[str] = (), **argument) -> Any:
    """A flag of one or more of the `choices`; by default all of them."""
    choices = tuple(choices)
    return flag(tuple(default) or choices, help, choices=choices, nargs="+", **argument)


def flag_name(name: str) -> str:
    """The flag of the field `name`."""
    return "--" + name.rstrip("_").replace("_", "-")


@cache
def field_kind(settings: type, field: dataclasses.Field) -> type:
    """The type of a field's value, None apart: int, float, bool, str, Path, or tuple for several
    texts."""
    hint = typing.get_type_hints(settings)[field.name]
    if isinstance(hint, UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not NoneType)
    return typing.get_origin(hint) or hint


def given_flags(
    kinds: Sequence[type],
    program: str,
    doc: str | None,
    argv: Sequence[str] | None,
    groups: Mapping = {},
    recipes: Mapping[str, Mapping] = {},
    **more,
) -> dict:
    """The values that the command line of `program` gives; each field of the dataclasses `kinds` is
    a flag.
    groups: the fields of each group of --help. recipes: by name, other defaults that --help shows.
    more: arguments of the parser."""
    # the form prints the lines of a description as they are; all flags make a page of usage
    more |= {"formatter_class": RawDescriptionHelpFormatter, "usage": "%(prog)s [flags]"}
    parser = Parser(f"python -m {program}", description=doc, **more)
    titled = [
        (fields.split(), parser.add_argument_group(title)) for title, fields in groups.items()
    ]
    group_of = {name: group for names, group in titled for name in names}
    for field, kind in (
        (field, field_kind(of, field)) for of in kinds for field in dataclasses.fields(of)
    ):
        help, argument = field.metadata["help"], field.metadata["argument"]
        if "default" not in help and field.default not in (None, ()):
            help += f" (default: {field.default})"
        for name, values in recipes.items():
            if field.name in values:
                help += f"; {name}: {values[field.name]}"
        ways = {bool: {"action": BooleanOptionalAction}, tuple: {"action": "append"}}
        if {"nargs", "type"} & argument.keys():
            ways[tuple] = {"type": str}
        named = {"default": SUPPRESS, "help": help.replace("%", "%%"), "dest": field.name}
        named |= ways.get(kind, {"type": kind}) | argument
        group_of.get(field.name, parser).add_argument(flag_name(field.name), **named)
    return vars(parser.parse_args(argv))


def from_values(
    settings: type[Settings], values: Mapping[str, object], where: str = ""
) -> Settings:
    """An instance of the dataclass `settings`; lists, as argparse and JSON give them, become
    tuples.

    Raises UserError, with `where` before it, for the first value that has another type or is out of
    range.
    """
    made = settings(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
    )
    for field in dataclasses.fields(settings):
        value, kind, argument = (
            getattr(made, field.name),
            field_kind(settings, field),
            field.metadata["argument"],
        )
        if kind is Path or value is None and field.default is None or "type" in argument:
            continue  # which its own reader has checked
        (least, most), expected = field.metadata["range"], argument.get("choices") or kind.__name__
        if kind in (int, float):
            fits, expected = (
                type(value) in (int, kind) and least <= value <= most,
                f"{expected} from {least} to {most}",
            )
        elif kind is tuple:
            fits = type(value) is tuple and all(isinstance(text, str) for text in value)
        else:
            fits = type(value) is kind and value in argument.get("choices", (value,))
        if not fits:
            raise UserError(
                f"{where}{flag_name(field.name)} is {quoted(value)}, expected {expected}"
            )
    return made


@dataclasses.dataclass(frozen=True)
class RunArguments:
    """The flags of a run's folder, which are no settings."""

    out: Path | None = flag(None, "run folder to make (default: in runs/, with the next number)")
    resume: Path | None = flag(
        None, "go on with an interrupted run, with its own settings", metavar="RUN"
    )
    allow_changed: bool = flag(
        False, "with --resume: although the base, the data or a setting is not what it was"
    )


Arguments = TypeVar("Arguments", bound=RunArguments)


def read_run(
    program: str,
    description: str | None,
    settings: type[Settings],
    arguments: type[Arguments],
    argv: Sequence[str] | Mapping[str, object] | None,
    defaults: Callable[[dict], dict] = lambda given: {},
    **shown_by_help: Mapping,
) -> tuple[Settings, Arguments]:
    """The settings of a run, from its flags, in words or by name, or from the folder that is
    resumed, and other flags.

    defaults(flags): settings that take the place of the fields' defaults. shown_by_help: of
    `given_flags`. Raises UserError for flags that exclude each other, values out of range,
    and a folder that it has not written.
    """
    is_read = isinstance(argv, Mapping)
    given = (
        dict(argv)
        if is_read
        else given_flags((arguments, settings), program, description, argv, **shown_by_help)
    )
    names = [field.name for field in dataclasses.fields(arguments) if field.name in given]
    chosen = from_values(arguments, {name: given.pop(name) for name in names})
    if chosen.resume is None:
        return from_values(settings, {**defaults(given), **given}), chosen
    if chosen.out is not None or given.keys() - {"max_bad"}:
        raise UserError(
            "--resume goes on with the run's own settings: leave all flags but --max-bad out"
        )
    values, where = (
        read_json(chosen.resume / RUN_CONFIG),
        f"--resume {shown(chosen.resume)}: {RUN_CONFIG}",
    )
    if values.keys() != {field.name for field in dataclasses.fields(settings)}:
        raise UserError(
            f"{where} is not of this version of `python -m {program}`: give a folder that it has "
            "written"
        )
    return from_values(settings, values | given, f"{where}: "), chosen
