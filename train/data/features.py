"""Features of a frozen vision tower, kept on disk: a picture that was encoded before, by any run, is not encoded again.

In: a picture's pixels. Out: the output of tower and projector, in bf16, from a file of its own at DIR/(hash of their
weights)/(hash of the pixels).safetensors. `train/data/batches.py` looks pictures up while it makes a batch.

Runs may share a folder: files are written atomically and named by a hash of their inputs, so two processes that write
the same file write the same bytes. A file that cannot be read counts as missing and is written again.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from model.common import UserError, atomic_path
from model.paligemma import PaliGemma


@dataclass(frozen=True)
class FeatureCache:
    """The features of one vision tower: tensors (I, H) by the key of their picture."""

    folder: Path
    shape: tuple[int, int]

    @classmethod
    def open(cls, folder: str | Path, model: PaliGemma) -> "FeatureCache":
        """The cache of `model` under `folder`. Raises UserError if tower or projector are trained."""
        parts = {"vision_tower": model.vision_tower, "multi_modal_projector": model.multi_modal_projector}
        digest = hashlib.sha256(repr(model.config.vision).encode())
        for part, module in parts.items():
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    raise UserError(
                        f"--cache-features: {part}.{name} is trained, so that features change: leave the flag out, or "
                        "train the decoder alone"
                    )
                digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
                digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
        shape = (model.config.num_image_tokens, model.config.text.hidden_size)
        return cls(Path(folder) / digest.hexdigest()[:16], shape)

    @staticmethod
    def key(pixels: torch.Tensor) -> str:
        """The key of a picture: a hash of its pixels (3, R, R)."""
        return hashlib.sha256(pixels.contiguous().numpy()).hexdigest()[:32]

    def load(self, key: str) -> torch.Tensor | None:
        """Features (I, H) in bf16, or None if they are missing or unusable."""
        try:
            features = load_file(self._file(key))["features"]
        except (OSError, SafetensorError, KeyError):
            return None
        fits = features.shape == self.shape and features.dtype == torch.bfloat16
        return features if fits else None

    def save(self, key: str, features: torch.Tensor) -> None:
        """Write the features (I, H) of a picture, rounded to bf16."""
        with atomic_path(self._file(key), durable=False) as temporary:
            save_file({"features": features.to("cpu", torch.bfloat16).contiguous()}, temporary)

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"
