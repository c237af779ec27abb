"""Where a model's files come from: a folder, the base model in this repository, or the Hugging Face
hub.

In: a source, as every command's `--model` takes it. Out: a folder on this disk.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.common import UserError, shown
from model.registry import preset_of_name

EMBEDDED = "embedded"  # the name of the base model in this repository
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
BUNDLED_FOLDER = Path(__file__).resolve().parent.parent / "weights" / "tiny"


def local_path(source: str | Path) -> Path:
    """`source` as a path, with ~ expanded. Raises UserError for a path that the system cannot look
    up."""
    try:
        path = Path(source).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, no such user
        raise UserError(
            f"{shown(source)}: not a path that can be opened ({shown(error)}): check it"
        ) from None
    return path


def own_file(file: Path) -> Path:
    """`file`, if it is to be handed on. Raises UserError for a link that leads out of its folder,
    other than into the blobs of the hub's cache: whoever made it may mean a private file."""
    folder = file.parent.resolve()
    if file.resolve().parent not in (folder, folder.parent.parent / "blobs"):
        raise UserError(f"{shown(file)}: is a link out of its folder: copy what is to be handed on")
    return file


def preset_of(source: str | Path) -> Any:
    """The preset that `source` names; None for anything else, such as a folder of that name."""
    if local_path(source).is_dir():
        return None
    return preset_of_name(str(source))


def resolve(
    source: str | Path,
    patterns: Sequence[str],
    revision: str | None = None,
) -> Path:
    """The folder of a model: `source` itself, the bundled base for `embedded`, or a download of the
    hub's "owner/name".

    patterns: the file names (with * as wildcard) to download at `revision` (branch, tag or commit);
    an interrupted download is continued. The caller checks which of the files exist. Raises
    UserError.
    """
    folder = local_path(source)
    if folder.is_dir() or source == EMBEDDED:
        if revision is not None:
            raise UserError(
                f"--revision {shown(revision)} belongs to a hub id, {shown(source)} is a folder: "
                "leave it out"
            )
        return folder if folder.is_dir() else BUNDLED_FOLDER
    if not HUB_ID.fullmatch(str(source)) or folder.exists():
        raise UserError(
            f"{shown(source)}: no such folder: give a model's folder, 'embedded', a preset of "
            "model/config.py, or a hub id such as owner/name"
        )
    import huggingface_hub  # slow to import, and not needed for folders

    try:
        return Path(
            huggingface_hub.snapshot_download(
                str(source), revision=revision, allow_patterns=list(patterns)
            )
        )
    # of several libraries; the hub's own say whether a licence or a token is missing
    except Exception as error:
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{source}: neither a folder here nor downloaded from the hub: {shown(problem, 600)}"
        ) from None
