"""Command-line flags from the fields of a dataclass, the check of their values, and the config.json
of a run.

In: a frozen dataclass whose fields are made by `flag`. Out: its instance, from a command line or
from a run folder.
"""

import dataclasses
from argparse import SUPPRESS, BooleanOptionalAction, RawDescriptionHelpFormatter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from model.common import Parser, UserError, quoted, read_json, shown

AnySettings = TypeVar("AnySettings")
MANY = 2**31 - 1  # the largest number of a flag without another limit
RUN_CONFIG = "config.json"


def flag(
    default: Any,
    help: str,
    *,
    least: float = -MANY,
    most: float = MANY,
    **argument,
) -> Any:
    """A dataclass field that is also a flag of the same name. least, most: the range of a number,
    ends included. argument: of `add_argument`, such as `choices`."""
    return dataclasses.field(
        default=default, metadata={"help": help, "range": (least, most), "argument": argument}
    )


def several(
    choices: Iterable[str],
    help: str,
    default: Iterable[str] = (),
    **argument,
) -> Any:
    """A flag of one or more of the `choices`; by default all of them."""
    choices = tuple(choices)
    return flag(
        tuple(default) or choices,
        help,
        choices=choices,
        nargs="+",
        **argument,
    )


def flag_name(name: str) -> str:
    """The flag of the field `name`."""
    return "--" + name.rstrip("_").replace("_", "-")


@cache
def field_kind(settings: type, field: dataclasses.Field) -> type:
    """The type of a field's value, without None: int, float, bool, str, Path, or tuple for several
    texts."""
    hint = get_type_hints(settings)[field.name]
    if isinstance(hint, UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not NoneType)
    return get_origin(hint) or hint


def given_flags(
    owners: Sequence[type],
    program: str,
    doc: str | None,
    argv: Sequence[str] | None,
    groups: Mapping[str, str] = {},
    recipes: Mapping[str, Mapping] = {},
    hidden: Collection[str] = (),
    **more,
) -> dict:
    """The values that the command line of `program` gives; each field of the dataclasses `owners`
    is a flag.

    groups: the fields of each group of --help. recipes: by name, other defaults that --help shows.
    hidden: fields that it leaves out. more: arguments of the parser.
    """
    parser = Parser(
        f"python -m {program}",
        description=doc,
        formatter_class=RawDescriptionHelpFormatter,  # which keeps the lines of a description
        usage="%(prog)s [flags]",  # all of them are a page
        **more,
    )
    group_of = {}
    for title, names in groups.items():
        group_of |= dict.fromkeys(names.split(), parser.add_argument_group(title))
    for owner in owners:
        for field in dataclasses.fields(owner):
            group = group_of.get(field.name, parser)
            options = argument_of(owner, field, recipes)
            if field.name in hidden:
                options["help"] = SUPPRESS
            group.add_argument(flag_name(field.name), **options)
    return vars(parser.parse_args(argv))


def argument_of(
    owner: type,
    field: dataclasses.Field,
    recipes: Mapping[str, Mapping],
) -> dict:
    """The arguments of `add_argument` for a field of the dataclass `owner`."""
    # 1. what --help says
    help = field.metadata["help"]
    if "default" not in help and field.default not in (None, ()):
        help += f" (default: {field.default})"
    for name, values in recipes.items():
        if field.name in values:
            help += f"; {name}: {values[field.name]}"

    # 2. how a value is read
    given = field.metadata["argument"]
    kind = field_kind(owner, field)
    if kind is bool:
        options = {"action": BooleanOptionalAction}
    elif kind is not tuple:
        options = {"type": kind}
    elif {"nargs", "type"} & given.keys():
        options = {"type": str}
    else:
        options = {"action": "append"}
    options |= {"default": SUPPRESS, "help": help.replace("%", "%%"), "dest": field.name}
    return options | given


def from_values(
    settings: type[AnySettings],
    values: Mapping[str, object],
    where: str = "",
) -> AnySettings:
    """An instance of the dataclass `settings`; lists, as argparse and JSON give them, become
    tuples.

    Raises UserError, with `where` before it, for the first value that has another type or is out of
    range.
    """
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    made = settings(**{**values, **lists})
    for field in dataclasses.fields(settings):
        value = getattr(made, field.name)
        kind = field_kind(settings, field)
        argument = field.metadata["argument"]
        is_absent = value is None and field.default is None
        if is_absent or kind is Path or "type" in argument:
            continue  # its own reader has checked it
        choices = argument.get("choices")
        expected = choices or kind.__name__
        if kind in (int, float):
            least, most = field.metadata["range"]
            expected = f"{expected} from {least} to {most}"
            fits = type(value) in (int, kind) and least <= value <= most
        elif kind is tuple:
            fits = isinstance(value, tuple) and all(isinstance(text, str) for text in value)
        else:
            fits = type(value) is kind and (choices is None or value in choices)
        if not fits:
            name = flag_name(field.name)
            raise UserError(f"{where}{name} is {quoted(value)}, expected {expected}")
    return made


@dataclasses.dataclass(frozen=True)
class RunArguments:
    """The flags of a run's folder, which are no settings."""

    out: Path | None = flag(None, "run folder to make (default: in runs/, with the next number)")
    resume: Path | None = flag(
        None, "go on with an interrupted run, with its own settings", metavar="RUN"
    )
    allow_changed: bool = flag(
        False,
        "with --resume: although the base, the data or a setting is not what it was; of other data "
        "others are held out, also such as were learned",
    )


AnyArguments = TypeVar("AnyArguments", bound=RunArguments)


def read_run(
    program: str,
    description: str | None,
    settings: type[AnySettings],
    arguments: type[AnyArguments],
    argv: Sequence[str] | Mapping[str, object] | None,
    defaults: Callable[[dict], dict] = lambda given: {},
    **shown_by_help: Mapping,
) -> tuple[AnySettings, AnyArguments]:
    """The settings of a run, from its flags, in words or by name, or from the folder that is
    resumed, and other flags.

    defaults(flags): settings that take the place of the fields' defaults. shown_by_help: of
    `given_flags`. Raises UserError for flags that exclude each other, values out of range, an
    unknown name, and a folder that it has not written.
    """
    # 1. the flags
    names = {field.name for field in dataclasses.fields(settings)}
    of_arguments = {field.name for field in dataclasses.fields(arguments)}
    if isinstance(argv, Mapping):
        check_names(argv, names | of_arguments)
        given = dict(argv)
    else:
        given = given_flags([arguments, settings], program, description, argv, **shown_by_help)
    chosen = {name: given.pop(name) for name in of_arguments & given.keys()}
    chosen = from_values(arguments, chosen)
    if chosen.resume is None:
        return from_values(settings, {**defaults(given), **given}), chosen

    # 2. the settings of the run that goes on
    if chosen.out is not None or given.keys() - {"max_bad"}:
        raise UserError(
            "--resume goes on with the run's own settings: leave all flags but --max-bad out"
        )
    values = read_json(chosen.resume / RUN_CONFIG)
    where = f"--resume {shown(chosen.resume)}: {RUN_CONFIG}"
    if values.keys() != names:
        raise UserError(
            f"{where} is not of this version of `python -m {program}`: give a folder that it has "
            "written"
        )
    return from_values(settings, values | given, f"{where}: "), chosen


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UserError, with the nearest one, for a name that is not `known`."""
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1) or ["--help of the command"]
            raise UserError(f"{name}: no setting has this name: see {near[0]}")
