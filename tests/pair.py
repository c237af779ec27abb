"""Two processes that run a command as under torchrun. They meet through a file, so no port has to
be free."""

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from tests.runs import spawn


def in_pair(main: Callable[[list[str]], None], *commands: str, meet: Path) -> None:
    """Run `main` on each command line in turn, words split at spaces, in two processes. meet: a
    folder for files."""
    spawn(_process, (main, commands, meet), nprocs=2)


def _process(
    rank: int, main: Callable[[list[str]], None], commands: tuple[str, ...], meet: Path
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    for number, command in enumerate(commands):
        dist.init_process_group(
            "gloo", init_method=f"file://{meet}/meet-{number}", rank=rank, world_size=2
        )
        main(command.split())
