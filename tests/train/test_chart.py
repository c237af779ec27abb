"""The chart of a run's losses: points are where the axes say, marks are round numbers."""

import math

import numpy as np
import pytest

from eval import figures
from tests.files import json_lines
from tests.runs import refused
from train import chart


def where(image, color=figures.SERIES[0]):
    """(x, y) in points of the pixels of `color`, sorted by x."""
    y, x = np.nonzero((np.asarray(image) == color).all(axis=-1))
    return sorted(zip(x / figures.DENSITY, y / figures.DENSITY, strict=True))


MARKS = """[1, 1499, [0, 500, 1000, 1500]]
[-1.9, 2.7, [-2, -1, 0, 1, 2, 3]]
[0, 4e-4, [0, 1e-4, 2e-4, 3e-4, 4e-4]]"""


@pytest.mark.parametrize("low, high, marks", json_lines(MARKS))
def test_marks_are_round_numbers_that_enclose_the_data(low, high, marks):
    """Breaks when a tick reads 0.30000000000000004, or the data leave the axis."""
    assert chart.axis([low, high], 0, 1)[0] == pytest.approx(marks)
    spelled = {
        3 * 0.1: "0.3",
        1500: "1500",
        20000: "20k",
        1.5e6: "1.5M",
        1e-5: "1e-5",
        -0.2: "-0.2",
    }
    assert [chart.spell_number(value) for value in spelled] == [*spelled.values()]


def test_chart_puts_points_where_the_axes_say():
    """Breaks when the y axis is upside down, a curve is not where its points are, a run of 320
    steps ends before the axis does, or a NaN is drawn."""
    points = where(chart.line_chart({"loss": [(0, 0), (10, 5)]}))
    assert points[0] == pytest.approx((66, 348), abs=2)
    assert points[-1] == pytest.approx((658, 18), abs=2)
    steps = [(step, step) for step in range(320)]
    assert where(chart.line_chart({"loss": steps}))[-1][0] == pytest.approx(658, abs=2)
    assert chart.axis([0, 319], 0, 319, tight=True)[0] == [0, 100, 200, 300]
    curve = where(chart.line_chart({"a": [(0, 0), (5, 3), (10, 4)]}))
    middle = [y for x, y in curve if abs(x - (66 + 658) / 2) < 1]
    assert np.mean(middle) == pytest.approx(348 - 330 * 3 / 4, abs=2)
    whole, gap = ([(0, 1), (1, y), (2, y), (3, 3)] for y in (2, math.nan))
    drawn = [len(where(chart.line_chart({"a": points}))) for points in (whole, gap)]
    assert 0 < drawn[1] < drawn[0] / 3
    refused(lambda: chart.line_chart({"a": [(0, math.nan)]}, "Loss"), "'Loss'")
