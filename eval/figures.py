"""Figures, drawn with Pillow alone: heatmaps, contact sheets, boxes; `train/chart.py` draws curves.

In: numbers and pictures. Out: `PIL.Image` in RGB, on white: one file is legible on light and on
dark pages. Lengths are in points, of `DENSITY` pixels. A canvas is drawn `SMOOTH` times finer,
since Pillow does not smooth edges of shapes.
"""

import math
import re
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from model.boxes import Said
from model.common import UserError, atomic_path, shown

DENSITY = 2  # pixels of a point
SMOOTH = 2
INK = (34, 34, 34)
SOFT = (110, 110, 110)
GRID = (226, 226, 226)
PAPER = (255, 255, 255)
# Okabe and Ito's palette, which color-blind readers can distinguish, and a brown
_SERIES = "#0072b2 #d55e00 #009e73 #cc79a7 #56b4e9 #e69f00 #5a5a5a #784212"
SERIES = tuple(map(ImageColor.getrgb, _SERIES.split()))
HIT = SERIES[2]
MISS = SERIES[1]
# of accuracy 0, 1/2 and 1: ever darker, also without color
ACCURACIES = ((255, 247, 200), (102, 190, 186), (18, 78, 138))

Color = tuple[int, ...]
Point = tuple[float, float]


def check_name(path: str | Path) -> None:
    """Raise UserError for a file name without an image suffix."""
    if Path(path).suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise UserError(f"{shown(path)}: a figure's name must end in .png, .jpg or .webp")


def save(figure: Image.Image, path: str | Path) -> None:
    """Write `figure` to `path`, atomically. Raises UserError."""
    check_name(path)
    with atomic_path(path) as temporary:
        figure.save(temporary)


# Drawing


class Canvas:
    """A white sheet of `width`×`height` points, its title on top; `finish` gives the picture."""

    def __init__(self, width: float, height: float, title: str = ""):
        self.scale = DENSITY * SMOOTH
        self.image = Image.new("RGB", self._px(width, height), PAPER)
        self.draw = ImageDraw.Draw(self.image)
        self.text(width / 2, 22, title, 16)

    def _px(self, *points: float) -> tuple[int, ...]:
        return tuple(round(value * self.scale) for value in points)

    def line(
        self,
        points: Sequence[Point],
        color: Color = INK,
        width: float = 1.0,
    ) -> None:
        corners = [self._px(*point) for point in points]
        self.draw.line(corners, color, *self._px(width), joint="curve")

    def box(
        self,
        *sides: float,
        fill: Color | None = None,
        outline: Color | None = None,
        width: float = 1.0,
    ) -> None:
        """sides: left, top, right, bottom."""
        self.draw.rectangle(self._px(*sides), fill, outline, *self._px(width))

    def dot(self, x: float, y: float, radius: float, color: Color) -> None:
        self.draw.ellipse(self._px(x - radius, y - radius, x + radius, y + radius), color)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 12,
        color: Color = INK,
        anchor: str = "mm",
    ) -> None:
        """Text at (x, y); `anchor` is Pillow's: l, m or r, then a(scender), m or d(escender)."""
        self.draw.text(
            self._px(x, y),
            printable(text),
            color,
            _font(*self._px(size)),
            anchor,
        )

    def upright(self, x: float, y: float, text: str, size: float = 12) -> None:
        """Text centered at (x, y), turned by 90 degrees to read upward."""
        font = ImageFont.TransposedFont(_font(*self._px(size)), Image.Transpose.ROTATE_90)
        _, _, wide, high = font.getbbox(printable(text))
        x, y = self._px(x, y)
        self.draw.text((x - wide // 2, y - high // 2), printable(text), INK, font)

    def picture(self, *sides: float, image: Image.Image) -> None:
        """sides: as of `box`."""
        left, top, right, bottom = self._px(*sides)
        size = right - left, bottom - top
        resized = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
        self.image.paste(resized, (left, top))

    def finish(self) -> Image.Image:
        return self.image.reduce(SMOOTH)


_font = lru_cache(ImageFont.load_default)  # by its size in pixels
_SPELLED = str.maketrans(
    {"–": "-", "—": "-", "−": "-", "×": "x", "λ": "lambda", "≥": ">=", "≤": "<="}
)


def printable(text: str) -> str:
    """`text` in the glyphs of Pillow's built-in font: accents dropped, a few signs in ASCII, all
    others "?"."""
    spelled = " ".join(text.split()).translate(_SPELLED)
    signs = unicodedata.normalize("NFKD", spelled)
    bare = "".join(sign for sign in signs if not unicodedata.combining(sign))
    return re.sub("[^\x00-\x7f±·°⁄‘’“”]", "?", bare)


def text_width(text: str, size: float) -> float:
    """Width of `text` in points."""
    return _font(round(size * 100)).getlength(printable(text)) / 100


def wrap(text: str, width: float, size: float, lines: int) -> list[str]:
    """`text` broken into at most `lines` lines of `width` points, "..." where it is cut."""
    text = printable(text)
    for letters in range(max(4, int(4 * width / size)), 3, -1):
        broken = textwrap.wrap(text, letters, max_lines=lines, placeholder="...") or [""]
        if max(text_width(line, size) for line in broken) <= width:
            break
    return broken


# Heatmaps


def accuracy_color(accuracy: float) -> Color:
    """From pale yellow at 0 over teal at one half to dark blue at 1."""
    levels = zip(*ACCURACIES, strict=True)
    return tuple(round(np.interp(accuracy, (0, 0.5, 1), of)) for of in levels)


def _ink_on(color: Color) -> Color:
    luminance = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]
    return INK if luminance > 140 else PAPER


def heatmaps(grids: Mapping[str, Sequence[Sequence[float]]], title="") -> Image.Image:
    """Accuracy (0..1) by row and column of a needle, in grids side by side, the percentage in each
    cell (NaN: no data); each grid with its name and its mean over cells."""
    side, gap = 236, 56
    left, bottom = 54, 50
    top = 84 if title else 56
    sheet = Canvas(left + len(grids) * (side + gap), top + side + bottom, title)
    for number, (name, grid) in enumerate(grids.items()):
        x0 = left + number * (side + gap)
        middle = x0 + side / 2
        # 1. its name and mean
        sheet.text(middle, top - 34, wrap(name, side + gap - 8, 15, 1)[0], 15)
        cells = [value for row in grid for value in row if not math.isnan(value)]
        if cells:
            mean = 100 * sum(cells) / len(cells)
            sheet.text(middle, top - 14, f"mean accuracy {mean:.2f} %", 12, SOFT)
        # 2. its cells
        high = side / len(grid)
        wide = side / len(grid[0])
        for row, values in enumerate(grid):
            y = top + row * high
            sheet.text(
                x0 - 8,
                top + (row + 0.5) * high,
                str(row + 1),
                11,
                SOFT,
                "rm",
            )
            for col, value in enumerate(values):
                color = GRID
                label = "-"
                if not math.isnan(value):
                    color = accuracy_color(value)
                    label = f"{100 * value:.1f}"
                x = x0 + col * wide
                sheet.box(x, y, x + wide, y + high, fill=color, outline=PAPER)
                size = min(22, 0.3 * high + 3)
                sheet.text(x + wide / 2, y + high / 2, label, size, _ink_on(color))
        # 3. its columns
        for col in range(len(grid[0])):
            sheet.text(
                x0 + (col + 0.5) * wide,
                top + side + 12,
                str(col + 1),
                11,
                SOFT,
            )
        sheet.text(middle, top + side + 32, "column of the needle")
    sheet.upright(20, top + side / 2, "row of the needle")
    return sheet.finish()


# Pictures


def contact_sheet(
    images: Sequence[Image.Image],
    captions: Sequence[str],
    hits: Sequence | None = None,
    *,
    title="",
    size=180,
    lines=3,
) -> Image.Image:
    """Pictures in rows of four, their longer side `size` points, their captions below in at most
    `lines` lines. A green frame marks a hit, an orange one a miss; None has no frame."""
    # 1. what each cell holds
    gap = 14
    text = 11.5
    line_height = text + 4
    broken = []
    for caption in captions:
        parts = [wrap(part, size, text, lines) for part in caption.splitlines()]
        broken.append(sum(parts, [])[:lines])
    sizes = []
    for image in images:
        longer = max(image.size)
        sizes.append((image.width * size / longer, image.height * size / longer))
    # 2. an empty sheet
    columns = min(4, len(images))
    tall = max(high for _, high in sizes)
    below = max(map(len, broken)) * line_height + 6
    step = tall + below + gap
    top = 42 if title else gap
    rows = math.ceil(len(images) / columns)
    sheet = Canvas(gap + columns * (size + gap), top + rows * step, title)
    # 3. the cells
    cells = zip(images, sizes, broken, hits or [None] * len(images), strict=True)
    for number, (image, (wide, high), caption, hit) in enumerate(cells):
        row, col = divmod(number, columns)
        y = top + row * step
        left = gap + col * (size + gap) + (size - wide) / 2
        upper = y + (tall - high) / 2
        right = left + wide
        lower = upper + high
        if hit is not None:
            color = HIT if hit else MISS
            sheet.box(left - 4, upper - 4, right + 4, lower + 4, fill=color)
        sheet.picture(left, upper, right, lower, image=image)
        if hit is not None:  # what the color of the frame says, without color
            sheet.box(right - 22, upper - 4, right + 4, upper + 9, fill=color)
            sheet.text(right - 9, upper + 2, "hit" if hit else "miss", 9, PAPER)
        for line, words in enumerate(caption):
            sheet.text(left + wide / 2, y + tall + 12 + line * line_height, words, text)
    return sheet.finish()


def colors_of(labels: Sequence[str], colors: Sequence[Color] = SERIES) -> list[Color]:
    """A color for each label, one for equal ones, `colors` in turn."""
    kinds = list(dict.fromkeys(labels))
    return [colors[kinds.index(label) % len(colors)] for label in labels]


def draw_masks(
    image: Image.Image, masks: Sequence[np.ndarray], colors: Sequence[Color]
) -> Image.Image:
    """A copy of `image` with masks (height, width), which may have another size than it, each in
    its half-transparent color."""
    for mask, color in zip(masks, colors, strict=True):
        tinted = Image.blend(image, Image.new("RGB", image.size, color), 0.5)
        image = Image.composite(tinted, image, Image.fromarray(mask).resize(image.size))
    return image


def draw_objects(image: Image.Image, objects: Sequence[Said], coder: Any) -> Image.Image:
    """A copy of `image` with the boxes of an answer's objects, and with their masks where there is
    a `MaskCoder`. A small picture is enlarged."""
    labels = [said.label for said in objects]
    if coder:
        masks = [coder.to_mask(said.codes, said.box, *image.size) for said in objects]
        image = draw_masks(image, masks, colors_of(labels))
    return draw_boxes(image, [said.box for said in objects], labels, least=448)


def draw_boxes(
    image: Image.Image,
    boxes: Sequence[tuple],
    labels: Sequence[str] = (),
    *,
    colors=SERIES,
    width=1.5,
    least=1,
) -> Image.Image:
    """A copy of `image` with boxes (left, top, right, bottom), in its own pixels, and their labels.
    Lines are `width` points wide in a picture of 640 pixels, and in proportion in others. A picture
    whose longer side is shorter than `least` pixels is enlarged by a whole factor. colors: of the
    labels, in turn."""
    scale = max(1, round(least / max(image.size)))
    image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    points = max(image.size) / 640  # a picture of 640 px has one point a pixel
    size = image.width / DENSITY, image.height / DENSITY
    sheet = Canvas(*size)
    sheet.picture(0, 0, *size, image=image)
    labels = labels or [""] * len(boxes)
    for box, label, color in zip(boxes, labels, colors_of(labels, colors), strict=True):
        left, top, right, bottom = (value * scale / DENSITY for value in box)
        sheet.box(left, top, right, bottom, outline=color, width=width * points)
        if label:
            size = 7.5 * points
            pad = 2 * points
            high = size + 2 * pad
            # above the box, or in it at the picture's edge
            base = top if top >= high else top + high
            right = left + text_width(label, size) + 2 * pad
            sheet.box(left, base - high, right, base, fill=color)
            sheet.text(
                left + pad,
                base - high / 2,
                label,
                size,
                _ink_on(color),
                "lm",
            )
    return sheet.finish()
