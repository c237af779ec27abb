"""Work that is done once: the results of a comparison's cells, kept in folders named by what decides them.

In: all that decides a result, and who computes it. Out: the result, from disk if it is there: an interrupted comparison
goes on, and a changed one does again only what has changed. Next: `train/compare.py` and the studies beside it.
"""

import json
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from tqdm import tqdm

from model.common import write_text


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
