"""Attention drawn over a picture: in one color how much each part gets, in two which of two maps gives it more.

In: a picture and weights by patch. Out: `PIL.Image`; `sheet` puts a scale with its unit under each.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from eval.figures import INK, PAPER, SERIES, SOFT, Canvas, wrap

MORE, LESS = SERIES[1], SERIES[0]  # color-blind readers can distinguish them
STRENGTH = 0.85  # opacity of full color


def overlay_attention(image: Image.Image, weights, limit: float | None = None, size: int | None = None) -> Image.Image:
    """`image` in pale grey under the attention `weights` (P, P): orange where positive, blue where negative.

    Full color stands for `limit`, by default the largest absolute weight; give the same to figures to be compared.
    Weights are interpolated linearly between patches, so that no weight is drawn that is outside of theirs. `size` is
    the longer side in pixels, by default the picture's.
    """
    weights = np.asarray(weights, dtype=np.float32)
    limit = limit or float(np.abs(weights).max()) or 1.0
    shrink = (size or max(image.size)) / max(image.size)
    width, height = (max(1, round(side * shrink)) for side in image.size)
    grey = np.asarray(image.convert("L").resize((width, height)), dtype=np.float32)[..., None]
    smooth = np.asarray(Image.fromarray(weights).resize((width, height), Image.Resampling.BILINEAR)) / limit
    opacity = np.clip(np.abs(smooth), 0, 1)[..., None] * STRENGTH
    color = np.where(smooth[..., None] > 0, MORE, LESS)
    blend = (0.5 * grey + 0.5 * 255) * (1 - opacity) + color * opacity
    return Image.fromarray(blend.round().astype(np.uint8))


class Panel(NamedTuple):
    """One map: weights (P, P) from 0 to 1, and the weight of full color. signed: it is a difference of maps, whose
    names are (first, second)."""

    name: str
    weights: np.ndarray
    limit: float
    note: str = ""
    signed: tuple[str, str] | None = None


def full_color(weights: np.ndarray, keys: int, signed: bool = False) -> float:
    """The weight of full color: the largest, but of `keys` keys at least an even share (of a difference a tenth of it),
    so that a map of nearly nothing is drawn as nothing."""
    return max(float(np.abs(weights).max()), (0.1 if signed else 1) / keys)


def sheet(image: Image.Image, panels: Sequence[Panel], columns: int, title: str, size: float = 220) -> Image.Image:
    """The maps over the picture in rows of `columns`, each with its name, its scale in percent of the attention, and
    its note; the picture itself stands before them."""
    gap, head, foot = 16, 22, 52
    tall = size * image.height / image.width
    rows = [panels[start : start + columns] for start in range(0, len(panels), columns)]
    canvas = Canvas(gap + (columns + 1) * (size + gap), 48 + len(rows) * (head + tall + foot), title)
    canvas.picture(gap, 48 + head, gap + size, 48 + head + tall, image)
    canvas.text(gap + size / 2, 48 + head / 2, "the picture", 13, SOFT, "mm")
    for row, of_row in enumerate(rows):
        for column, panel in enumerate(of_row, start=1):
            left, top = gap + column * (size + gap), 48 + head + row * (head + tall + foot)
            canvas.text(left + size / 2, top - head / 2, panel.name, 13, INK, "mm")
            drawn = overlay_attention(image, panel.weights, panel.limit, round(max(size, tall) * canvas.scale))
            canvas.picture(left, top, left + size, top + tall, drawn)
            _draw_scale(canvas, left, top + tall + 8, size, panel)
            canvas.text(left + size / 2, top + tall + 38, wrap(panel.note, size, 11.5, 1)[0], 11.5, INK, "mm")
    return canvas.finish()


def _draw_scale(canvas: Canvas, left: float, top: float, size: float, panel: Panel) -> None:
    """A bar of the colors of a panel, and the weights at its ends in percent."""
    low = -1 if panel.signed else 0
    steps = round(size)
    for step in range(steps):
        part = low + (1 - low) * (step + 0.5) / steps
        color = tuple(
            round(p + (c - p) * abs(part) * STRENGTH) for p, c in zip(PAPER, MORE if part > 0 else LESS, strict=True)
        )
        canvas.box(left + step, top, left + step + 1, top + 7, color)
    most = f"{100 * panel.limit:.2g}"
    first, second = panel.signed or ("", "")
    ends = (f"{second} more by {most} points", f"{first} more") if panel.signed else ("0", f"{most} % of the attention")
    for text, x, anchor in zip(ends, (left, left + size), ("lm", "rm"), strict=True):
        canvas.text(x, top + 16, text, 10.5, SOFT, anchor)
