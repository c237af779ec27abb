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
from train.checkpoint import Progress
from train.data.shards import Shards
from train.data.sources import Mixture
from train.distributed import World
from train.flags import flag_name

# settings that do not change what is learned
FREE = {"workers", "device", "checkpoint_every", "keep", "evaluate", "eval_limit", "measure_every", "max_bad"}
FREE |= {"eval_every", "keep_best", "kernel"}
PICTURES = 2048  # whose content is read
BLOCK = 1 << 16  # bytes read at either end of a file


def origin_of(settings, fingerprints: Mapping[str, str], world: World, dtype: torch.dtype) -> dict:
    """The settings, a dataclass, the fingerprints of what they name, such as {"base": …, "pictures": …}, and what they
    were resolved to on this machine: device, processor, threads, processes, autocast, and the dtype of the weights."""
    with autocast_of(settings.autocast, world.device):
        resolved = numerics(world.device) | {"dtype": str(dtype), "processes": f"{world.size} processes"}
    return {"settings": asdict(settings), "fingerprints": dict(fingerprints), "numerics": resolved}


def data_fingerprints(records: Sequence[Record]) -> dict[str, str]:
    """Fingerprints of the records and of their pictures.

    All texts, and the size of every picture's file, are part of it; of up to 2,048 files, evenly spread, also the first
    and the last 64 KiB. Pictures that are drawn have no file.
    """
    if isinstance(records, Mixture):
        parts = [data_fingerprints(part) for part in records.parts]
        return {name: " + ".join(part[name] for part in parts) for name in ("records", "pictures")}
    if isinstance(records, Shards):
        return {"records": _hash(records.rows.tobytes()), "pictures": _files_fingerprint(records.paths)}
    texts = hashlib.sha256()
    for r in records:
        parts = (r.name, r.key, r.prefix, r.suffix, r.answers if r.sampled else (), *r.turns[:-1])
        texts.update(repr(parts).encode("utf-8", "surrogatepass"))
    paths = dict.fromkeys(picture for r in records for picture in r.pictures if isinstance(picture, Path))
    return {"records": f"{len(records)} {texts.hexdigest()[:16]}", "pictures": _files_fingerprint(sorted(paths))}


def _files_fingerprint(paths: Sequence[Path]) -> str:
    """A hash of the sizes of files, in order, and of the ends of some. One that cannot be read counts as empty."""
    digest = hashlib.sha256()
    chosen = set(np.linspace(0, len(paths) - 1, min(PICTURES, len(paths))).astype(int).tolist())
    for number, path in enumerate(paths):
        try:
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            if number in chosen:
                with path.open("rb") as file:
                    digest.update(file.read(BLOCK))
                    file.seek(max(0, size - BLOCK))
                    digest.update(file.read(BLOCK))
        except OSError:
            digest.update(b"-")
    return f"{len(paths)} {digest.hexdigest()[:16]}"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def check_resume(run: Path, progress: Progress, origin: dict, allow_changed: bool) -> None:
    """Raise UserError if the checkpoint that `progress` is of has another origin, naming what has changed.

    With `allow_changed`, and for what changes the losses by rounding only, print the change on stderr instead.
    """
    before = progress.origin
    assert before is not None
    for name, now in origin["numerics"].items():
        if (old := before["numerics"].get(name)) != now:
            masks = " and masks of dropout" if name == "processes" and origin["settings"].get("dropout") else ""
            print(f"{run}: {name}: {old} before, {now} now: losses may differ by rounding{masks}", file=sys.stderr)
    old, new = before["settings"], json.loads(json.dumps(origin["settings"]))  # tuples became lists
    changes = [
        f"{flag_name(name)} is {quoted(new[name])}, was {quoted(old.get(name))}"
        for name in new
        if name not in FREE and old.get(name) != new[name]
    ]
    old, new = before["fingerprints"], origin["fingerprints"]
    changes += [f"the {name}" for name in new if old.get(name) != new[name]]
    if changes and not allow_changed:
        raise UserError(
            f"--resume {shown(run)}: changed since step {progress.step}: {'; '.join(changes)}: undo that, or add "
            "--allow-changed"
        )
    for change in changes:
        print(f"{run}: changed, and allowed: {change}", file=sys.stderr)


def commit_of_code() -> str:
    """The commit of this repository, with "+" if files differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # or it is installed in another one's folder
        return git("rev-parse", "--short=10", "HEAD") + "+" * bool(git("status", "--porcelain", "-uno"))
    except (OSError, subprocess.SubprocessError):
        return "no commit"


def provenance() -> dict[str, str]:
    """The commit, the processor and the version of PyTorch that a result was made with."""
    return {"commit": commit_of_code(), "processor": processor_name(), "torch": torch.__version__}
