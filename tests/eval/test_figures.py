"""Figures: what they say is where it should be, in the color it should have."""

import numpy as np
import pytest
from PIL import Image, ImageFont

from eval import figures

GREY = Image.new("RGB", (80, 40), (128, 128, 128))


def count(image, color):
    """Pixels of exactly `color`."""
    return int((np.asarray(image) == color).all(axis=-1).sum())


def test_heatmap_cells():
    """Breaks when a cell has the color of another place, or one without data looks like 0 %."""
    values = np.linspace(0, 1, 16)
    colors = list(map(figures.accuracy_color, values))
    colors[9] = figures.GRID
    values[9] = np.nan
    grid = values.reshape(4, 4).tolist()
    sheet = figures.heatmaps({"x": grid, "y": grid})
    for number, color in enumerate(colors):  # the first cell is at (54, 56), each is 59 points wide
        x = 108 + 118 * (number % 4)
        y = 112 + 118 * (number // 4)
        assert max(sheet.crop((x + 4, y + 4, x + 114, y + 114)).getcolors(1 << 20))[1] == color
    light = [0.299 * r + 0.587 * g + 0.114 * b for r, g, b in colors if (r, g, b) != figures.GRID]
    assert light == sorted(light, reverse=True)  # ever darker, also without color


def test_contact_sheet_frames_hits_and_misses():
    """Breaks when a hit is framed as a miss, or a picture is lost."""
    sheet = figures.contact_sheet([GREY] * 2, ["one", "two"], [True, False])
    # 180 points wide, half as high
    assert count(sheet, (128, 128, 128)) == pytest.approx(2 * 360 * 180, rel=0.05)
    middle = sheet.width // 2
    left, right = sheet.crop((0, 0, middle, sheet.height)), sheet.crop((middle, 0, *sheet.size))
    assert count(left, figures.HIT) > 500 < count(right, figures.MISS)
    assert not count(left, figures.MISS) + count(right, figures.HIT)


def test_boxes_are_drawn_at_their_pixels_in_the_color_of_their_class():
    """Breaks when boxes are shifted or swapped, the picture's size changes, two boxes of a class
    differ in color, or two classes do not."""
    grey = 128, 128, 128
    boxes = [(100, 200, 300, 400), (10, 50, 90, 90), (110, 50, 190, 90), (310, 50, 390, 90)]
    labels = "cat dog dog cat".split()
    image = figures.draw_boxes(Image.new("RGB", (640, 480), grey), boxes, labels, width=4)
    assert image.size == (640, 480)
    assert image.getpixel((200, 300)) == image.getpixel((320, 300)) == grey
    for at in ((100, 300), (299, 300), (200, 200), (200, 399)):
        assert np.abs(np.subtract(image.getpixel(at), figures.SERIES[0])).max() < 90, at
    # the label, above the box
    assert count(image.crop((100, 170, 160, 198)), figures.SERIES[0]) > 100
    colors = [image.getpixel((left + 40, 89)) for left, *_ in boxes[1:]]
    assert colors[0] == colors[1] != colors[2]


def test_text_is_printable_and_cut_where_it_does_not_fit():
    """Breaks when accents, dashes or λ come out as empty boxes, or a long caption runs into its
    neighbor."""
    text = figures.printable("café – naïve — 4×4, λ ≥ ½ °, 猫 “x”…\n\tÅ−1·±")
    font = ImageFont.load_default(20)
    assert text == "cafe - naive - 4x4, lambda >= 1⁄2 °, ? “x”... A-1·±"
    assert bytes(font.getmask("\ufff0")) not in {bytes(font.getmask(letter)) for letter in text}
    assert figures.wrap("", 100, 12, 3) == [""]
    assert figures.wrap("a short one", 500, 12, 3) == ["a short one"]
    for text in ("a caption, much too long for the lines that it is given", "Donaudampfer" * 4):
        broken = figures.wrap(text, 80, 12, 2)
        assert broken[-1].endswith("...")
        assert all(figures.text_width(line, 12) <= 80 for line in broken)
