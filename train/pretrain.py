"""Make the embedded base from nothing: a PaliGemma of two million parameters, in minutes on two cores.

    python -m train.pretrain --out runs/tiny

In: the scenes of `eval/scenes.py` and their tokenizer. Out: a model folder in the published format, with
`pretraining.json` (accuracies, settings, the tokenizer's hash). `weights/tiny` is what this command writes.
`train/embedded/base.py` holds the losses and stages.

With `--text [PATH …]` it makes a language model of plain text instead; its own flags: `python -m train.text --help`.
"""

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from model.common import run_command
from train import text
from train.distributed import join_world, leave_world
from train.embedded.base import ALONE, make_base
from train.flags import flag, read_flags
from train.run_folder import check_empty


@dataclass(frozen=True)
class PretrainOptions:
    """The flags of this command."""

    out: Path = flag(Path("runs/tiny"), "folder to write", metavar="DIR")
    seed: int = flag(0, "of weights and samples")
    processes: int = flag(
        2 if (os.cpu_count() or 1) > 1 else 1,
        "processes that share every batch; for a small model they are faster than threads",
        least=1,
        most=32,
    )
    threads: int = flag(1, "CPU threads of each process", least=1)
    scale: float = flag(1.0, "length of all stages", least=1e-6)


def run_process(rank: int, options: PretrainOptions, port: int) -> None:
    """One of several processes on this machine; they find each other through the variables that torchrun sets."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": options.processes, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(options.threads)
    try:
        make_base(options.out, options.seed, options.scale, join_world("cpu"))
    finally:
        leave_world()


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if any(part.partition("=")[0] == "--text" for part in argv):
        text.main(argv)
        return
    options = read_flags(PretrainOptions, "train.pretrain", __doc__, argv)
    check_empty(options.out)
    if options.processes == 1:
        torch.set_num_threads(options.threads)
        make_base(options.out, options.seed, options.scale, ALONE)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run_process, (options, port), options.processes)


if __name__ == "__main__":
    run_command(main)
