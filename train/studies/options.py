"""The flags of a study: those that all studies share, and where a study fine-tunes, those of `train.finetune`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import torch

from model.common import UserError
from train.flags import FlagParser, add_flags, flag, from_values
from train.run import FREE
from train.settings import Settings, parse

Options = TypeVar("Options", bound="StudyOptions")
# flags of `train.finetune` that no study has
DECIDED = "arch stage resume allow_changed plan gpu gpus show_batch evaluate eval_limit eval_data".split()


def read_rates(text: str) -> tuple[float, ...]:
    """The value of a flag --rates. Raises ValueError, which argparse reports, for one that is not above 0."""
    rates = tuple(float(part) for part in text.split(","))
    if not all(0 < rate <= 1e6 for rate in rates):
        raise ValueError(text)
    return rates


@dataclass(frozen=True)
class StudyOptions:
    """The flags that all studies share; a study changes their defaults and adds more."""

    seeds: int = flag(10, "runs of each row", least=1, metavar="N")
    rates: tuple[float, ...] | None = flag(
        None, "peak rates A,B,… to try first; one is not searched for (default: the study's)", type=read_rates
    )
    jobs: int = flag(1 if torch.cuda.is_available() else torch.get_num_threads(), "cells side by side", least=1)
    quick: bool = flag(False, "a plan of at most ten minutes on two cores")
    out: Path | None = flag(None, "folder of results and cells (default: runs/STUDY)", metavar="DIR")


def read_with_settings(
    kind: type[Options],
    argv: Sequence[str] | None,
    program: str,
    description: str | None,
    quick: Mapping[str, object],
    *,
    decided: str,
    defaults: str,
    quick_defaults: str = "",
) -> tuple[Options, Settings]:
    """The flags of a study, and the settings that all rows start from: every other flag is one of `train.finetune`.

    decided: settings that the study decides, beside DECIDED. defaults, quick_defaults: flags of `train.finetune`.
    Raises UserError.
    """
    about = f"Other flags: those of `python -m train.finetune`, with other defaults: {defaults}."
    parser = FlagParser(prog=f"python -m {program}", description=description, allow_abbrev=False, epilog=about)
    add_flags(parser, kind)
    known, rest = parser.parse_known_args(argv)
    options = from_values(kind, {**(quick if getattr(known, "quick", False) else {}), **vars(known)})
    for word in rest:
        name = word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_")
        if word.startswith("--") and name in (*DECIDED, *decided.split()):
            raise UserError(f"{word}: the study decides that itself: `python -m {program} --help` lists its flags")
    settings = parse([*defaults.split(), *(quick_defaults.split() if options.quick else ()), *rest])[0]
    return options, settings


def deciding(settings) -> dict:
    """The fields of a dataclass of settings that change what is learned."""
    return {name: value for name, value in asdict(settings).items() if name not in FREE}


def digest(*parts) -> str:
    """16 hexadecimal digits of what `parts` print as."""
    return sha256(repr(parts).encode()).hexdigest()[:16]
