"""What a run was made from: fingerprints of its base and data, and its settings, compared when it is resumed; and the
commit, processor and PyTorch that a published result was made with.

In: settings, the opened model, and the records. Out: a JSON object that every checkpoint stores in its progress.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from eval.records import Record
from model.common import UserError, quoted, shown
from model.device import autocast_of, numerics, processor_name
from train.checkpoint import Progress, file_digest
from train.data.shards import Shards
from train.distributed import World
from train.flags import flag_name

# settings that do not change what is learned
FREE = {"workers", "device", "checkpoint_every", "keep", "evaluate", "eval_limit", "measure_every", "max_bad"}
FREE |= {"eval_every", "keep_best", "kernel"}
PICTURES = 2048  # whose content is read


def origin_of(settings, fingerprints: Mapping[str, str], world: World, dtype: torch.dtype) -> dict:
    """The settings, a dataclass; the fingerprints of what they name, such as {"base": …, "pictures": …}; and what this
    machine makes of them: device, processor, threads, processes, autocast, and the dtype of the weights."""
    with autocast_of(settings.autocast, world.device):
        resolved = numerics(world.device) | {"dtype": str(dtype), "processes": f"{world.size} processes"}
    return {"settings": asdict(settings), "fingerprints": dict(fingerprints), "numerics": resolved}


def data_fingerprints(records: Sequence[Record]) -> dict[str, str]:
    """Fingerprints of the records and of their pictures.

    They cover all texts and the size of every picture's file; of up to 2,048 files, evenly spread, also the first and
    the last 256 KiB. Pictures that are drawn have no file.
    """
    texts = hashlib.sha256()
    if isinstance(records, Shards):
        texts.update(records.rows.tobytes())
        return {"records": texts.hexdigest()[:16], "pictures": _files_fingerprint(records.paths)}
    for r in records:
        parts = (r.name, r.key, r.prefix, r.suffix, r.answers if r.sampled else (), *r.turns[:-1])
        texts.update(repr(parts).encode("utf-8", "surrogatepass"))
    paths = {picture for r in records for picture in r.pictures if isinstance(picture, Path)}
    return {"records": f"{len(records)} {texts.hexdigest()[:16]}", "pictures": _files_fingerprint(sorted(paths))}


def _files_fingerprint(paths: Sequence[Path]) -> str:
    """A hash of the sizes of files, in order, and of the ends of some. A file that cannot be read counts as empty."""
    digest = hashlib.sha256()
    chosen = set(np.linspace(0, len(paths) - 1, min(PICTURES, len(paths))).astype(int).tolist())
    for number, path in enumerate(paths):
        try:
            of_file = file_digest(path, 2) if number in chosen else path.stat().st_size
        except OSError:
            of_file = "none"
        digest.update(f"{of_file}\n".encode())
    return f"{len(paths)} {digest.hexdigest()[:16]}"


def check_resume(run: Path, progress: Progress, origin: dict, allow_changed: bool) -> None:
    """Raise UserError if the checkpoint of `progress` has another origin, naming what has changed.

    With `allow_changed`, and for what changes the losses by rounding only, print the change on stderr instead.
    """
    before, now = progress.origin, json.loads(json.dumps(origin))  # tuples become lists, as in a checkpoint
    for name, new in now["numerics"].items():
        if (old := before["numerics"].get(name)) != new:
            print(f"{run}: {name}: {old} before, {new} now: losses may differ by rounding", file=sys.stderr)
    old, changes = before["settings"], []
    for name, new in now["settings"].items():
        if name not in FREE and old[name] != new:
            changes.append(f"{flag_name(name)} is {quoted(new)}, was {quoted(old[name])}")
    changes += [f"the {name}" for name, new in now["fingerprints"].items() if before["fingerprints"].get(name) != new]
    message = f"changed since step {progress.step}: {'; '.join(changes)}"
    if changes and not allow_changed:
        raise UserError(f"--resume {shown(run)}: {message}: undo that, or add --allow-changed")
    if changes:
        print(f"{run}: allowed: {message}", file=sys.stderr)


def provenance() -> dict[str, str]:
    """The commit, the processor and the version of PyTorch that a result was made with.

    A commit has "+" if files differ from it; it is "no commit" where the code has none.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # or it is installed in another repository's folder
        commit = git("rev-parse", "--short=10", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.SubprocessError):
        commit = "no commit"
    return {"commit": commit, "processor": processor_name(), "torch": torch.__version__}
