"""Figures: what they say is where it should be, in the color it should have; and how sure a mean is."""

import math

import numpy as np
import pytest
from PIL import Image, ImageFont

from eval import figures
from eval.overlay import Panel, full_color, overlay_attention, sheet
from eval.statistics import bootstrap
from model.common import UserError


def count(image, color, box=None):
    """Pixels of exactly `color` in `image`, or in the box (left, top, right, bottom) of it."""
    pixels = np.asarray(image.crop(box) if box else image)
    return int((pixels == color).all(axis=-1).sum())


# Heatmaps


def test_colors_grow_darker_with_accuracy():
    """A reader who sees no colors cannot order two cells."""
    shades = [figures.accuracy_color(v / 20) for v in range(21)]
    assert [shades[0], shades[10], shades[20]] == list(figures.ACCURACIES)
    light = [0.299 * r + 0.587 * g + 0.114 * b for r, g, b in shades]
    assert all(a > b + 3 for a, b in zip(light, light[1:], strict=False))


def cell_colors(image, grid):
    """The most frequent color of each cell of the first heatmap of `image`, from its published layout."""
    left, top, size = 54, 56, 236 / len(grid)
    result = []
    for row in range(len(grid)):
        for col in range(len(grid)):
            x, y = left + col * size, top + row * size
            box = (x + 0.1 * size, y + 0.1 * size, x + 0.9 * size, y + 0.9 * size)
            cell = image.crop([round(value * figures.DENSITY) for value in box])
            result.append(max(cell.getcolors(maxcolors=1 << 20))[1])
    return result


@pytest.mark.long
@pytest.mark.parametrize("side", [1, 2, 4, 8])
def test_heatmap_cells(side):
    """A cell has the color of another place, or rows and columns are swapped."""
    grid = [[(row * side + col) / side**2 for col in range(side)] for row in range(side)]
    assert cell_colors(figures.heatmaps({"x": grid}), grid) == [figures.accuracy_color(v) for row in grid for v in row]


def test_heatmap_writes_the_number_and_marks_missing_data():
    """A cell without its number cannot be compared; one without data must not look like 0 %."""
    low, high, none = (figures.heatmaps({"": [[value]]}) for value in (0.25, 0.26, math.nan))
    assert cell_colors(none, [[0]]) == [figures.GRID]
    assert count(low, figures.INK, (200, 200, 500, 500)) > 50  # the number in the middle
    assert count(low, figures.INK) != count(high, figures.INK)


def test_heatmaps_side_by_side_grow_to_the_right():
    """Three models share one scale: the first panel is the one of its own heatmap."""
    grids = {"a": [[0, 1], [1, 0]], "b": [[0.5] * 2] * 2, "c": [[1.0] * 4] * 4}
    row, one = figures.heatmaps(grids), figures.heatmaps({"a": grids["a"]})
    assert row.height == one.height and row.width > 2 * one.width
    assert cell_colors(row, grids["a"]) == cell_colors(one, grids["a"])
    best = figures.accuracy_color(1)
    assert count(row, best) > 2 * count(one, best)


def test_what_was_not_trained_is_grey():
    """A test that a model was never trained for looks like one that it failed."""
    grid = [[0.0, 1.0]] * 2
    row = figures.heatmaps({"seen": grid, "new": grid}, notes={"new": "not trained on"})
    one, noted = figures.heatmaps({"new": grid}), figures.heatmaps({"new": grid}, notes={"new": "not trained on"})
    assert cell_colors(row, grid) == cell_colors(one, grid) == [figures.accuracy_color(v) for v in (0, 1, 0, 1)]
    assert cell_colors(noted, grid) == [figures.GRID] * 4
    below_name = (0, 74, 2 * (54 + 236), 96)
    assert count(noted, figures.SOFT, below_name) > count(one, figures.SOFT, below_name) > 0


# Charts


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0, 1500, [0, 500, 1000, 1500]),
        (1, 1499, [0, 500, 1000, 1500]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.5, 4.7, [0, 1, 2, 3, 4, 5]),
        (-1.9, 2.7, [-2, -1, 0, 1, 2, 3]),
        (3.21, 3.24, [3.21, 3.215, 3.22, 3.225, 3.23, 3.235, 3.24]),
        (0, 4e-4, [0, 1e-4, 2e-4, 3e-4, 4e-4]),
        (20, 60, [20, 30, 40, 50, 60]),
    ],
)
def test_linear_marks_by_hand(low, high, marks):
    """Ticks are round numbers that enclose the data."""
    assert figures.linear_marks(low, high) == pytest.approx(marks)


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (1, 1e6, [1, 100, 1e4, 1e6]),
        (0.9, 1100, [1, 10, 100, 1000]),
        (4.9e-4, 5.1e-3, [5e-4, 1e-3, 2e-3, 5e-3]),
        (3.05, 3.45, [3.1, 3.2, 3.3, 3.4]),
    ],
)
def test_log_marks_by_hand(low, high, marks):
    """A log axis has powers of ten, or round numbers where it holds none."""
    assert figures.log_marks(low, high) == pytest.approx(marks)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (3 * 0.1, "0.3"),
        (1500, "1500"),
        (20000, "20k"),
        (1.5e6, "1.5M"),
        (2e9, "2G"),
        (4e-4, "0.0004"),
        (1e-5, "1e-5"),
        (2.5e-5, "2.5e-5"),
        (-0.2, "-0.2"),
        (-20000, "-20k"),
    ],
)
def test_numbers_are_spelled_short(value, text):
    """A tick reads 0.30000000000000004."""
    assert figures.spell_number(value) == text


def where(image, color):
    """(x, y) in points of the pixels of `color`, sorted by x."""
    y, x = np.nonzero((np.asarray(image) == color).all(axis=-1))
    return sorted(zip(x / figures.DENSITY, y / figures.DENSITY, strict=True))


def test_line_chart_puts_points_where_the_axes_say():
    """The y axis is upside down, or a series leaves the plot: from the lower left to the upper right corner."""
    found = where(figures.line_chart({"loss": [(0, 0), (10, 5)]}, width=400, height=300), figures.SERIES[0])
    (x0, y0), (x1, y1) = found[0], found[-1]
    assert (x0, y0) == pytest.approx((66, 300 - 52), abs=2) and (x1, y1) == pytest.approx((400 - 22, 18), abs=2)


def test_log_chart_is_straight_for_an_exponential():
    """log_y draws the wrong scale: an exponential is a line on it, whose middle is halfway up."""
    points = [(x, math.exp(x)) for x in range(11)]
    found = where(figures.line_chart({"a": points}, log_y=True), figures.SERIES[0])
    (x0, y0), (x1, y1) = found[0], found[-1]
    middle = [y for x, y in found if abs(x - (x0 + x1) / 2) < 0.6]
    assert np.mean(middle) == pytest.approx((y0 + y1) / 2, abs=2)


def test_gaps_and_lone_points():
    """A NaN loss is drawn as a number, bridged, or ends in a traceback; zero has no place on a log axis."""
    whole = figures.line_chart({"a": [(0, 1), (1, 2), (2, 2), (3, 3)], "b": [(1, 1)]})
    gap = figures.line_chart({"a": [(0, 1), (1, math.nan), (2, math.inf), (3, 3)], "b": [(1, 1)]})
    assert 0 < count(gap, figures.SERIES[0]) < count(whole, figures.SERIES[0]) / 3
    assert count(gap, figures.SERIES[1]) > 10
    figures.line_chart({"a": [(0, 1), (1, 0), (2, 5)]}, log_x=True, log_y=True)
    figures.line_chart({"a": [(3, 2)]})
    with pytest.raises(UserError, match="'Loss': no series"):
        figures.line_chart({"a": [(0, math.nan)]}, "Loss")
    with pytest.raises(UserError, match="no series"):
        figures.line_chart({})


def test_interval_chart_orders_left_to_right():
    """An estimate stands outside its interval, or at the wrong place of the axis."""
    image = figures.interval_chart([("a", 25.0, 20.0, 30.0), ("b", 55.0, 50.0, 60.0)], reference=("chance", 25))
    found = where(image, figures.SERIES[0])
    a, b = ([x for x, y in found if low < y < low + 30] for low in (36, 66))
    assert max(a) < min(b)
    unit = (max(b) - min(a)) / 40  # from 20 to 60
    assert max(a) - min(a) == pytest.approx(10 * unit, abs=2) and min(b) - min(a) == pytest.approx(30 * unit, abs=2)
    assert count(image, figures.SOFT) > 20
    with pytest.raises(UserError, match="no rows"):
        figures.interval_chart([])


# Pictures

GREY = Image.new("RGB", (80, 40), (128, 128, 128))


def test_contact_sheet_frames_hits_and_misses():
    """A hit is framed as a miss, or a picture is lost."""
    sheet = figures.contact_sheet([GREY] * 3, ["one", "two", "three"], [True, False, None], columns=2)
    assert count(sheet, (128, 128, 128)) == pytest.approx(3 * 360 * 180, rel=0.02)  # 180 points wide, half as high
    left, right = (sheet.crop((x, 0, x + sheet.width // 2, sheet.height // 2)) for x in (0, sheet.width // 2))
    assert count(left, figures.HIT) > 500 and count(left, figures.MISS) == 0
    assert count(right, figures.MISS) > 500 and count(right, figures.HIT) == 0
    assert count(figures.contact_sheet([GREY]), (128, 128, 128)) > 60000
    with pytest.raises(UserError, match="no pictures"):
        figures.contact_sheet([])


def test_boxes_are_drawn_at_their_pixels():
    """Boxes are shifted or swapped, or the picture's size changes."""
    picture = Image.new("RGB", (640, 480), (128, 128, 128))
    image = figures.draw_boxes(picture, [(100, 200, 300, 400)], ["cat"])
    assert image.size == picture.size and picture.getpixel((100, 300)) == (128, 128, 128)
    for at in ((100, 300), (299, 300), (200, 200), (200, 399)):
        assert np.abs(np.subtract(image.getpixel(at), figures.SERIES[0])).max() < 90, at
    assert image.getpixel((200, 300)) == image.getpixel((320, 300)) == (128, 128, 128)
    assert count(image, figures.SERIES[0], (100, 170, 160, 199)) > 100  # the label, above the box


def test_overlay_colors_sign_and_place():
    """The attention map is mirrored, a negative weight looks positive, or figures to be compared differ in scale."""
    weights = np.zeros((8, 8))
    weights[1, 6], weights[6, 1] = 1, -1  # row 1, column 6: upper right
    image = overlay_attention(GREY, weights, size=160)
    assert image.size == (160, 80)
    orange, blue = image.getpixel((130, 15)), image.getpixel((30, 65))
    assert orange[0] > orange[2] + 80 and blue[2] > blue[0] + 80
    plain = image.getpixel((80, 40))
    assert max(plain) == min(plain)
    weak = overlay_attention(GREY, weights, limit=4, size=160).getpixel((130, 15))
    assert weak[0] - weak[2] < (orange[0] - orange[2]) / 2
    assert overlay_attention(GREY, np.zeros((4, 4))).getpixel((0, 0)) == plain


def test_overlay_draws_no_weight_that_is_not_there():
    """Between a patch of much attention and its neighbors of none a negative one is drawn, as attention cannot be."""
    weights = np.random.default_rng(0).random((4, 4)) ** 8  # a few large ones
    pixels = np.asarray(overlay_attention(GREY, weights, size=320)).astype(int)
    assert (pixels[..., 2] <= pixels[..., 0]).all()


def test_a_map_of_nearly_nothing_is_drawn_as_nothing():
    """0.04 % of the attention fills the picture with color, as if all of it were there."""
    assert full_color(np.full((4, 4), 4e-4), keys=25) == 1 / 25
    assert full_color(np.full((4, 4), -0.02), keys=25, signed=True) == pytest.approx(0.02)


def test_attention_sheet_has_a_scale_under_each_map():
    """A color stands for no number, or a signed scale is drawn where nothing can be negative."""
    first = Panel("A1", np.eye(2), 1.0)
    one = sheet(GREY, [first], 1, "")
    both = sheet(GREY, [first, Panel("A1 - A2", np.eye(2) - 0.5, 1.0, signed=("A1", "A2"))], 2, "")
    scale = [round(figures.DENSITY * value) for value in (48 + 22 + 110 + 9, 48 + 22 + 110 + 14)]  # top, bottom
    for image, colors in ((one, {"orange"}), (both, {"orange", "blue"})):
        bar = np.asarray(image).astype(int)[scale[0] : scale[1], round(figures.DENSITY * 252) :]
        found = {"orange"} if (bar[..., 0] - bar[..., 2]).max() > 120 else set()
        assert found | ({"blue"} if (bar[..., 2] - bar[..., 0]).max() > 120 else set()) == colors


def test_text_is_printable_in_the_builtin_font():
    """Accents, dashes or λ of a caption or a model's name come out as empty boxes."""
    font = ImageFont.load_default(20)
    missing = bytes(font.getmask("\ufff0"))
    text = figures.printable("café – naïve — 4×4, λ ≥ ½ °, 猫 “x”…\n\tÅ−1·±")
    assert text == "cafe - naive - 4x4, lambda >= 1⁄2 °, ? “x”... A-1·±"
    assert not any(bytes(font.getmask(letter)) == missing for letter in text if letter != " ")


def test_wrap_cuts_what_does_not_fit():
    """A long caption runs into its neighbor."""
    assert figures.wrap("", 100, 12, 3) == [""]
    assert figures.wrap("a short one", 500, 12, 3) == ["a short one"]
    broken = figures.wrap("a caption that is much too long for the lines that it is given", 80, 12, 2)
    assert len(broken) == 2 and broken[-1].endswith("...")
    assert all(figures.text_width(line, 12) <= 80 for line in broken)
    assert figures.wrap("Donaudampfschifffahrt", 40, 12, 2)[-1].endswith("...")


def test_save(tmp_path):
    """A figure is half written, or an ending that Pillow does not know ends in a traceback."""
    figures.save(GREY, tmp_path / "deep/a.png")
    assert Image.open(tmp_path / "deep/a.png").size == GREY.size
    with pytest.raises(UserError, match=r"a.txt: a figure's name must end in .png"):
        figures.save(GREY, tmp_path / "a.txt")


# Intervals


def test_interval_of_a_proportion():
    """The interval is not the 95 % one: for 400 coins it is p ± 1.96 · sqrt(p (1 - p) / n) to within a tenth."""
    scores = np.arange(400) < 120
    mean, low, high = bootstrap(scores)
    half = 1.96 * math.sqrt(0.3 * 0.7 / 400)
    assert mean == pytest.approx(0.3)
    assert (mean - low, high - mean) == pytest.approx((half, half), rel=0.1)
    noise = np.sin(np.arange(50))
    assert bootstrap(noise) == bootstrap(noise) != bootstrap(noise, seed=1)


def test_grouped_examples_stay_together():
    """Five questions on one picture with one fate are one observation, not five: the interval must not shrink."""
    scores = np.arange(100) % 10 < 3
    pictures = [f"picture {n // 5}" for n in range(500)]
    one, together, apart = bootstrap(scores), bootstrap(np.repeat(scores, 5), pictures), bootstrap(np.repeat(scores, 5))
    assert together.high - together.low == pytest.approx(one.high - one.low, rel=0.1)
    assert apart.high - apart.low < 0.6 * (one.high - one.low)


def test_unequal_groups_weigh_by_their_examples():
    """The mean of group means is not the mean: 9 right in one group and 1 wrong in the other lies between 0 and 1."""
    interval = bootstrap([1] * 9 + [0], [0] * 9 + [1])
    assert interval.mean == 0.9 and (interval.low, interval.high) == (0, 1)


def test_runs_are_resampled_too():
    """Seeds that disagree by 20 points are taken for a sure result because the examples are many."""
    rows = np.stack([np.full(1000, value) for value in (0.4, 0.5, 0.6)])
    interval = bootstrap(rows)
    assert interval.mean == pytest.approx(0.5)
    assert (interval.low, interval.high) == pytest.approx((0.4, 0.6), abs=0.035)


def test_significance_of_paired_differences():
    """A difference that the interval cannot tell from 0 is called significant; pairing must cancel what both share."""
    hard = np.arange(300) % 2
    better = hard.copy()
    better[np.flatnonzero(hard == 0)[:15]] = 1
    assert bootstrap(better - hard).significant and bootstrap(hard - better).significant
    assert not bootstrap(hard - hard[::-1]).significant
    assert not bootstrap(np.zeros(10)).significant
