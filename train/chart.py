"""A chart of named series as lines, drawn on a `Canvas` of `eval/figures.py`.

In: series of (x, y). Out: a `PIL.Image` in RGB, on white. Lengths are in points.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from PIL import Image

from eval.figures import GRID, SERIES, Canvas, Point, text_width
from model.config import require

WIDTH, HEIGHT = 680, 400


def spell_number(value: float) -> str:
    """The text of an axis mark: 0.3, 1e-5, 1500, 20k, 1.5M."""
    for unit, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, 1e4):
            return f"{value / unit:g}{sign}"
    return f"{value:g}".replace("e-0", "e-")


def axis(
    values: Sequence[float], start: float, end: float, tight: bool = False
) -> tuple[list[float], Callable[[float], float]]:
    """The marks to print, and from data to points: about six round marks, 1, 2 or 5 × 10^k apart.
    The axis ends at marks or, if it is tight, where the values do."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(factor for factor in (1, 2, 5, 10) if factor * unit >= rough * (1 - 1e-9))
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    marks = [step * number for number in range(first, last + 1)]
    if tight:
        marks = [mark for mark in marks if low <= mark <= high]
    else:
        low, high = marks[0], marks[-1]
    return marks, lambda value: start + (value - low) / (high - low) * (end - start)


def line_chart(
    series: Mapping[str, Sequence[Point]],
    title="",
    x_label="",
    y_label="",
    *,
    pale=(),
    marked=(),
    bars=(),
    x_names: Mapping[float, str] | None = None,
) -> Image.Image:
    """Named series of (x, y) as lines, a single point as a dot; those named in `pale` are thin,
    those in `marked` have a dot at each point. bars: of some series, intervals (x, low, high) to
    draw upright; the series then stand side by side. x_names: the marks of that axis. Points that
    are not finite break the line. Raises UserError if no point is left."""

    drawn = [point for points in series.values() for point in points if is_finite(point)]
    require(drawn, f"nothing to draw in {title or 'the chart'!r}: no series has a finite point")
    # 1. the frame, with room for the names
    legend = 0
    if len(series) > 1:
        legend = max(text_width(name, 12) for name in series) + 34
    left, right, bottom = 66, WIDTH - 22 - legend, HEIGHT - 52
    top = 46 if title else 18
    sheet = Canvas(WIDTH, HEIGHT)
    sheet.text((left + right) / 2, 22, title, 16)
    sheet.text((left + right) / 2, HEIGHT - 14, x_label, 13)
    sheet.upright(16, (top + bottom) / 2, y_label, 13)

    # 2. the axes
    bars = dict(bars)
    ends = [end for of_series in bars.values() for _, *both in of_series for end in both]
    y_marks, to_y = axis([y for _, y in drawn] + ends, bottom, top)
    for mark in y_marks:
        sheet.line([(left, to_y(mark)), (right, to_y(mark))], GRID)
        sheet.text(left - 8, to_y(mark), spell_number(mark), anchor="rm")
    margin = 2.5 * len(series) if bars else 0.0
    x_marks, to_x = axis([x for x, _ in drawn], left + margin, right - margin, tight=True)
    if all(float(x).is_integer() for x, _ in drawn):  # as layers or steps: no mark between
        x_marks = [mark for mark in x_marks if abs(mark - round(mark)) <= 1e-9]
    names = x_names or {mark: spell_number(mark) for mark in x_marks}
    draw_marks(sheet, names, to_x, bottom)
    sheet.line([(left, top), (left, bottom), (right, bottom)])

    # 3. the series
    for number, (name, points) in enumerate(series.items()):
        color = SERIES[number % len(SERIES)]
        thick = 2.0
        if name in pale:
            color = tuple(round(0.35 * part + 0.65 * 255) for part in color)
            thick = 1.0
        shift = 5 * (number - (len(series) - 1) / 2) if bars else 0.0
        draw_series(sheet, points, to_x, to_y, color, thick, name in marked, shift)
        for x, low, high in bars.get(name, ()):
            x = to_x(x) + shift
            sheet.line([(x, to_y(low)), (x, to_y(high))], color)
        if legend:
            y = top + 10 + 20 * number
            sheet.line([(right + 14, y), (right + 34, y)], color, 2.5)
            sheet.text(right + 40, y, name, anchor="lm")
    return sheet.finish()


def draw_marks(sheet: Canvas, names: Mapping[float, str], to_x, bottom: float) -> None:
    """The marks of the axis below, and their names."""
    for mark, name in names.items():
        x = to_x(mark)
        sheet.line([(x, bottom), (x, bottom + 5)])
        sheet.text(x, bottom + 15, name)


def is_finite(point: Point) -> bool:
    return all(map(math.isfinite, point))


def draw_series(
    sheet: Canvas,
    points: Sequence[Point],
    to_x,
    to_y,
    color,
    thick,
    has_dots,
    shift: float,
) -> None:
    """A line through the points, broken where one is not finite; a single point is a dot. shift: to
    the right."""
    for is_visible, group in groupby(points, is_finite):
        if not is_visible:
            continue
        line = [(to_x(x) + shift, to_y(y)) for x, y in group]
        if len(line) > 1:
            sheet.line(line, color, thick)
        if len(line) == 1 or has_dots:
            for point in line:
                sheet.dot(*point, 3, color)
