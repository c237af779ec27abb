"""Masks as PaliGemma says them: after the four tokens of a box, 16 of <seg000> … <seg127>.

    mask in its box (64, 64) ── encoder ── 4 × 4 vectors ── nearest of 128 codes ── 16 numbers
    16 numbers ── their codes, 4 × 4 vectors ── decoder ── mask in its box (64, 64)

It is a VQ-VAE. Parameters have the names and shapes of big_vision's file `vae-oid.npz`.

Source: Ning et al., "All in Tokens", arXiv 2301.02229, and its code; big_vision,
pp/proj/paligemma/segmentation.py (encoder), evaluators/proj/paligemma/transfers/segmentation.py
(decoder).
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

SIDE = 64  # of a mask within its box
GRID = 4  # vectors a side
CODES = 128


class Residual(nn.Module):
    """x + net(x), for x (B, width, h, w)."""

    def __init__(self, width: int):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class Codebook(nn.Module):
    """The vectors (128, size) that the tokens stand for."""

    def __init__(self, size: int):
        super().__init__()
        self._embedding = nn.Parameter(torch.randn(CODES, size))

    def forward(self, codes: Tensor) -> Tensor:
        return self._embedding[codes]

    def nearest(self, vectors: Tensor) -> Tensor:
        """The numbers of the nearest codes (…,), of vectors (…, size)."""
        square = self._embedding.square().sum(-1)
        distance = square - 2 * vectors @ self._embedding.T  # but for |vector|², equal for all
        return distance.argmin(-1)


class MaskCoder(nn.Module):
    """Masks to codes and back. `width` is that of the first layer, 16 in the published file, and
    doubles with each halving of the side; `size` is that of a code, 512 there."""

    def __init__(self, width: int = 16, size: int = 512):
        super().__init__()
        inner = 8 * width
        self._vq_vae = Codebook(size)
        self.encoder = nn.Sequential(
            *halved(1, width),
            *halved(width, 2 * width),
            *halved(2 * width, 4 * width),
            *halved(4 * width, inner),
            Residual(inner),
            Residual(inner),
            nn.Conv2d(inner, size, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(size, inner, 1),
            nn.ReLU(),
            Residual(inner),
            Residual(inner),
            *doubled(inner, inner),
            *doubled(inner, 4 * width),
            *doubled(4 * width, 2 * width),
            *doubled(2 * width, width),
            nn.Conv2d(width, 1, 1),
        )

    def to_vectors(self, masks: Tensor) -> Tensor:
        """Masks (B, 64, 64) in [0, 1] to vectors (B, 16, size), in raster order."""
        grid = self.encoder(2 * masks[:, None] - 1)
        return grid.flatten(2).transpose(1, 2)

    def to_masks(self, vectors: Tensor) -> Tensor:
        """Vectors (B, 16, size) to masks (B, 64, 64), about -1 … 1."""
        grid = vectors.transpose(1, 2).unflatten(2, (GRID, GRID))
        return self.decoder(grid)[:, 0]

    def encode(self, masks: Tensor) -> Tensor:
        """Masks (B, 64, 64) in [0, 1] to codes (B, 16), each 0 … 127."""
        return self._vq_vae.nearest(self.to_vectors(masks))

    def decode(self, codes: Tensor) -> Tensor:
        """Codes (B, 16) to masks (B, 64, 64), about -1 … 1; the object is above 0."""
        return self.to_masks(self._vq_vae(codes))

    @torch.no_grad()
    def to_text(self, mask: np.ndarray, box: tuple[float, float, float, float]) -> str:
        """The 16 tokens of a mask (height, width) of truth values in its box (x1, y1, x2, y2) in
        pixels, which is rounded to whole ones, at least one each way."""
        height, width = mask.shape
        x1, y1, x2, y2 = (round(side) for side in box)
        left = min(max(x1, 0), width - 1)
        top = min(max(y1, 0), height - 1)
        cropped = crop(mask, (left, top, max(x2, left + 1), max(y2, top + 1)))
        codes = self.encode(cropped[None])[0]
        return "".join(f"<seg{code:03d}>" for code in codes.tolist())

    @torch.no_grad()
    def to_mask(
        self,
        codes: Sequence[int],
        box: tuple[float, float, float, float],
        width: int,
        height: int,
    ) -> np.ndarray:
        """What `paste` makes of 16 codes; without codes it is empty."""
        if not codes:
            return np.zeros((height, width), bool)
        decoded = self.decode(torch.tensor(codes)[None])[0]
        return paste(decoded, box, width, height)


def halved(before: int, after: int) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(before, after, 4, stride=2, padding=1), nn.ReLU()


def doubled(before: int, after: int) -> tuple[nn.Module, nn.Module]:
    return nn.ConvTranspose2d(before, after, 4, stride=2, padding=1), nn.ReLU()


def crop(mask: np.ndarray, box: tuple[int, int, int, int]) -> Tensor:
    """The part of a mask (height, width) of truth values within a box (x1, y1, x2, y2), in whole
    pixels, as (64, 64) in [0, 1]: bilinear, antialiased."""
    x1, y1, x2, y2 = box
    part = torch.from_numpy(mask[y1:y2, x1:x2].astype(np.float32))
    scaled = F.interpolate(part[None, None], (SIDE, SIDE), mode="bilinear", antialias=True)
    return scaled[0, 0]


def paste(
    decoded: Tensor, box: tuple[float, float, float, float], width: int, height: int
) -> np.ndarray:
    """A decoded mask (64, 64) in its box (x1, y1, x2, y2), in pixels of a picture, as truth values
    (height, width). A box without a whole pixel has none, as in big_vision."""
    mask = np.zeros((height, width), bool)
    x1, y1, x2, y2 = (int(side) for side in box)
    if x2 > x1 and y2 > y1:
        image = Image.fromarray(decoded.float().numpy())
        scaled = image.resize((x2 - x1, y2 - y1), Image.Resampling.BILINEAR)
        mask[y1:y2, x1:x2] = np.asarray(scaled) > 0
    return mask
