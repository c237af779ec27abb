"""Where a model's files come from: a folder, the base model in this repository, or the Hugging Face hub.

In: a source, as every command's `--model` takes it. Out: a folder on this disk, from which `model/processor.py` reads
config.json and tokenizer.model, and `weights/load.py` the tensors.
"""

import re
from pathlib import Path

from model.common import UserError, shown
from model.config import PRESETS, PaliGemmaConfig
from model.system_configs import QMAMBA_PRESETS, QMambaConfig

EMBEDDED = "embedded"  # the name of the base model in this repository
BUNDLED_FOLDER = Path(__file__).resolve().parent.parent / "weights" / "tiny"


def local_path(source: str | Path) -> Path:
    """`source` as a path, with ~ expanded. Raises UserError for a path that the system cannot look up."""
    try:
        path = Path(source).expanduser()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # a hub id, or a name that the caller reports
    except (OSError, ValueError, RuntimeError) as error:  # too long, a loop, a zero byte, no such user
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{shown(source)}: not a path that can be opened ({reason}): check it") from None
    return path


def preset_of(source: str | Path) -> PaliGemmaConfig | QMambaConfig | None:
    """The preset that `source` names; None for anything else, such as a folder of that name."""
    return None if local_path(source).is_dir() else (PRESETS | QMAMBA_PRESETS).get(str(source))


def resolve(source: str | Path, patterns: list[str], revision: str | None = None) -> Path:
    """The folder of the model `source`: a folder as it is, the bundled base, or a download from the hub.

    source: a folder, `embedded`, or a hub id "owner/name"; if a folder has such a name, it is taken. patterns: the file
    names (with * as wildcard) to download from the hub at `revision` (branch, tag or commit); an interrupted download
    is continued. The caller checks which of the files exist. Raises UserError.
    """
    name, folder = shown(source), local_path(source)
    if folder.is_dir() or source == EMBEDDED:
        if revision is not None:
            raise UserError(f"{name}: revision {revision!r} belongs to a hub id, but this is a folder: leave it out")
        if folder.is_dir():
            return folder
        if not BUNDLED_FOLDER.is_dir():
            raise UserError(f"{BUNDLED_FOLDER}: the bundled base is missing: clone the repository again")
        return BUNDLED_FOLDER
    if folder.exists():
        raise UserError(f"{name}: is a file, expected a folder: give the folder that holds it ({shown(folder.parent)})")
    if not isinstance(source, str) or not re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", source, re.ASCII):
        raise UserError(
            f"{name}: no such folder: give a model folder, {EMBEDDED!r}, a preset of model/config.py, or a hub id "
            "such as google/paligemma-3b-pt-224"
        )
    return _download(source, patterns, revision)


def _download(repo_id: str, patterns: list[str], revision: str | None) -> Path:
    import huggingface_hub  # slow to import, and not needed for folders
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repo_id}"
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError:  # a subclass of RepositoryNotFoundError, so it comes first
        problem = f"its licence is not accepted: accept it at {page}, then set HF_TOKEN or run `hf auth login`"
    except errors.RepositoryNotFoundError:
        problem = (
            "neither a folder here nor a model on the hub that you may see: check the spelling; "
            "for a private model set HF_TOKEN or run `hf auth login`"
        )
    except errors.RevisionNotFoundError:
        problem = f"no revision {revision!r}: choose a branch, tag or commit listed at {page}/tree/main"
    except errors.HFValidationError as error:
        problem = f"no valid hub id ({_first_line(error)}): check the spelling"
    except errors.LocalEntryNotFoundError:
        problem = (
            "neither a folder here nor in the download cache, and the hub cannot be reached: connect to the network, "
            "unset HF_HUB_OFFLINE, or give a model folder"
        )
    except Exception as error:  # the exceptions of the HTTP library differ between versions of huggingface_hub
        problem = f"the download failed ({_first_line(error)}): run again to resume it, or give a model folder"
    raise UserError(f"{repo_id}: {problem}")


def _first_line(error: Exception) -> str:
    return shown(f"{type(error).__name__}: {error}".splitlines()[0])
