"""Work that is done once: the results of a comparison's cells, kept in folders named by what decides them.

In: all that decides a result, and who computes it. Out: the result, from disk if it is there: an interrupted comparison
goes on, and a changed one does again only what has changed. Next: `train/studies/attention.py` and the studies beside
it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import torch
from tqdm import tqdm

from eval.session import positive
from model.common import UserError, write_text


def study_arguments(argv: Sequence[str] | None, name: str, doc: str, limit: int, of_limit: str) -> argparse.Namespace:
    """The flags of `train.compare --rows NAME`. Sets the threads; raises UserError for a scale that trains nothing."""
    parser = argparse.ArgumentParser(
        prog=f"python -m train.compare --rows {name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", choices=[name], default=name, help="this study (default: %(default)s)")
    parser.add_argument("--seeds", type=positive, default=3, metavar="N", help="runs of a row (default: %(default)s)")
    parser.add_argument("--limit", type=positive, default=limit, metavar="N", help=f"{of_limit} (default: %(default)s)")
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        metavar="X",
        help="length of all training against the default (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=positive,
        default=torch.get_num_threads(),
        metavar="N",
        help="CPU threads (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(f"runs/compare-{name}"),
        metavar="DIR",
        help="folder of results and cells; what it holds is not done again (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if not args.scale > 0:
        raise UserError(f"--scale is {args.scale}, expected a positive number")
    torch.set_num_threads(args.threads)
    return args


def digest(*parts) -> str:
    """A name for what `parts` print as."""
    return sha256(repr(parts).encode()).hexdigest()[:16]


def cell(out: Path, title: str, parts: tuple, work: Callable[[Path], dict]) -> dict:
    """What `work` returns for `parts`, as JSON in out/cells/(their hash)/result.json.

    `work` gets that folder, where it may keep a run's checkpoints and go on from them.
    """
    folder = out / "cells" / digest(*parts)
    file = folder / "result.json"
    if file.exists():
        return json.loads(file.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    result = work(folder)
    write_text(file, json.dumps(result) + "\n")
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in result.items() if isinstance(value, float))
    tqdm.write(f"{title}: {numbers}", file=sys.stderr)
    return json.loads(file.read_text())
