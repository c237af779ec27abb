"""Features of a frozen vision tower, kept on disk: a picture that was seen before, by any run, is not encoded again.

In: a picture's pixels. Out: what the tower and the projector make of them, in bf16, from a file of its own at DIR/(hash
of their weights)/(hash of the pixels).safetensors. Next: `train/data/batches.py` looks pictures up while it makes a
batch, `train/finetune.py` has the missing ones encoded.

Runs may share a folder: a file appears whole, under the name of what is in it, so two that write it write the same. One
that cannot be read is taken for missing, and written again.
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
    """The features of one tower: tensors (I, H) by the key of their picture."""

    folder: Path
    shape: tuple[int, int]

    @classmethod
    def open(cls, folder: str | Path, model: PaliGemma) -> "FeatureCache":
        """The cache of `model` under `folder`. Raises UserError if training would change what it keeps."""
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
        """The name of a picture, prepared as (3, R, R)."""
        return hashlib.sha256(pixels.contiguous().numpy()).hexdigest()[:32]

    def load(self, key: str) -> torch.Tensor | None:
        """Features (I, H) in bf16, or None if there are none that can be used."""
        try:
            features = load_file(self._file(key))["features"]
        except (OSError, SafetensorError, KeyError):
            return None
        fits = features.shape == self.shape and features.dtype == torch.bfloat16
        return features if fits else None

    def save(self, key: str, features: torch.Tensor) -> None:
        with atomic_path(self._file(key), durable=False) as temporary:
            save_file({"features": features.to("cpu", torch.bfloat16).contiguous()}, temporary)

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"
