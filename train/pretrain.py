"""Make the embedded base from nothing: a PaliGemma of two million parameters, in minutes on two cores.

    python -m train.pretrain --out runs/tiny

In: the scenes of `eval/scenes.py` and their tokenizer. Out: a model folder in the published format, with
`pretraining.json` (accuracies, settings, the tokenizer's hash). `weights/tiny` is what this command writes.
`train/embedded/base.py` holds the losses and stages.

With `--text [PATH …]` it makes a language model of plain text instead; its own flags: `python -m train.text --help`.
"""

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from model.common import UserError, run_command
from train import text
from train.distributed import join_world, leave_world
from train.embedded.base import ALONE, make_base
from train.run_folder import check_empty


def run_process(rank: int, args: argparse.Namespace, port: int) -> None:
    """One of several processes on this machine; they find each other through the variables that torchrun sets."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": args.processes, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(args.threads)
    try:
        make_base(args.out, args.seed, args.scale, join_world("cpu"))
    finally:
        leave_world()


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if any(part.partition("=")[0] == "--text" for part in argv):
        text.main(argv)
        return
    parser = argparse.ArgumentParser(
        prog="python -m train.pretrain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/tiny"), help="folder to write (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and samples (default: %(default)s)")
    parser.add_argument(
        "--processes",
        type=int,
        default=2 if (os.cpu_count() or 1) > 1 else 1,
        help="processes that share every batch; for a small model they are faster than threads (default: %(default)s)",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each process (default: %(default)s)")
    parser.add_argument("--scale", type=float, default=1.0, help="length of all stages (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.scale <= 0:
        raise UserError(f"--scale is {args.scale}, expected a positive number")
    if not 1 <= args.processes <= 32 or args.threads < 1:
        raise UserError(f"--processes {args.processes} --threads {args.threads}: expected 1 to 32, and at least 1")
    check_empty(args.out)
    if args.processes == 1:
        torch.set_num_threads(args.threads)
        make_base(args.out, args.seed, args.scale, ALONE)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run_process, (args, port), args.processes)


if __name__ == "__main__":
    run_command(main)
