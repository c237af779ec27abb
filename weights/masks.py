"""The coder of masks from its file: big_vision's `vae-oid.npz`, or the small one beside the embedded
base, which `train/masks.py` makes."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from model.common import UserError, file_errors, shown
from model.masks import CODES, MaskCoder
from model.source import BUNDLED_FOLDER, EMBEDDED
from weights.load import open_tensors

BUNDLED_CODER = BUNDLED_FOLDER / "masks.safetensors"


def load_mask_coder(path: str | Path | None) -> MaskCoder | None:
    """The coder in a .safetensors, in an .npz without pickles, or "embedded", in eval mode; of
    None, none. Names are those of `vae-oid.npz`, widths those of its arrays. Raises UserError."""
    if path is None:
        return None
    if str(path) == EMBEDDED:
        path = BUNDLED_CODER
    try:
        arrays = read_arrays(Path(path))
        width = arrays["encoder.0.weight"].shape[0]
        codes, size = arrays["_vq_vae._embedding"].shape
        if codes != CODES:
            raise ValueError(f"{codes} codes, expected {CODES}")
        with torch.device("meta"):  # a width that the other arrays lack takes no memory
            coder = MaskCoder(width, size)
        named = {name: arrays[name] for name in coder.state_dict()}
        if not all(array.isfinite().all() for array in named.values()):
            raise ValueError("a number is not finite")
        coder.load_state_dict(named, assign=True)
    except UserError:
        raise
    except Exception as error:  # a damaged archive makes zipfile and numpy raise many classes
        raise UserError(
            f"{shown(path)} is no coder of masks: give big_vision's vae-oid.npz ({shown(error)})"
        ) from None
    return coder.eval()


def read_arrays(path: Path) -> dict[str, Tensor]:
    """All arrays of a file, in fp32."""
    if path.suffix != ".npz":
        tensors = open_tensors(path)
        return {name: tensors.get_tensor(name).float() for name in tensors.keys()}
    with file_errors(path), np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(array).float() for name, array in arrays.items()}
