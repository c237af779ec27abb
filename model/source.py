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
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:  # too long, no such user
        raise UserError(f"{shown(source)}: not a path that can be opened ({shown(str(error))}): check it") from None
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
    folder = local_path(source)
    if folder.is_dir() or source == EMBEDDED:
        if revision is not None:
            raise UserError(f"{shown(source)}: is a folder, revision {revision!r} belongs to a hub id: leave it out")
        return folder if folder.is_dir() else BUNDLED_FOLDER
    hub_id = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
    if not isinstance(source, str) or not hub_id.fullmatch(source) or folder.exists():
        raise UserError(
            f"{shown(source)}: no such folder: give a model's folder, {EMBEDDED!r}, a preset of model/config.py, or a "
            "hub id such as google/paligemma-3b-pt-224"
        )
    import huggingface_hub  # slow to import, and not needed for folders
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(source, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError:  # a subclass of RepositoryNotFoundError, so it comes first
        page = f"https://huggingface.co/{source}"
        problem = f"its licence is not accepted: accept it at {page}, then set HF_TOKEN or run `hf auth login`"
    except errors.RepositoryNotFoundError:
        problem = "neither a folder here nor a model on the hub that you may see: check it, or set HF_TOKEN"
    except errors.RevisionNotFoundError:
        problem = f"no revision {revision!r}: choose a branch, tag or commit of it"
    except errors.LocalEntryNotFoundError:
        problem = "neither a folder here nor in the cache, and the hub cannot be reached: give a model's folder"
    except Exception as error:  # the exceptions of the HTTP library differ between versions of huggingface_hub
        reason = shown(f"{type(error).__name__}: {error}".splitlines()[0])
        problem = f"the download failed ({reason}): run again to resume it, or give a model folder"
    raise UserError(f"{source}: {problem}")
