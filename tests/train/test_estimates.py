"""Intervals and tests of differences between runs, against the values of SciPy and statsmodels."""

import math

import numpy as np
import pytest

from eval.student import t_point, t_tail
from train.estimates import Estimate, estimate
from train.studies.rules import difference_p, equivalence_p, holm, visible

# scipy.stats.t.sf(t, f), t.ppf(p, f) of SciPy
TAILS = {
    (2.5, 3.7): 0.03591101145591339,
    (6, 40): 2.3632275663940903e-07,
    (0.5, 1): 0.35241638234956685,
}
QUANTILES = {(0.975, 4): 2.7764451051977934, (0.8, 11.5): 0.8740039681813458}


def test_student_is_scipys():
    """Breaks when a p or the width of an interval is that of another distribution."""
    for (t, freedom), expected in TAILS.items():
        assert t_tail(t, freedom) == pytest.approx(expected, rel=1e-9)
        assert t_tail(t, freedom) + t_tail(-t, freedom) == pytest.approx(1)
    for (probability, freedom), expected in QUANTILES.items():
        assert t_point(1 - probability, freedom) == pytest.approx(expected, rel=1e-9)


def test_one_run_is_a_t_test():
    """Breaks when the mean of one run's examples has another interval, p or equivalence than the
    textbook's."""
    found = estimate([3, 1, 4, 1, 5, 9, 2, 6])  # scipy.stats.ttest_1samp(…, 0)
    assert found.mean == 3.875
    assert found.freedom == pytest.approx(7)
    assert (found.low, found.high) == pytest.approx((1.577300, 6.172700), abs=1e-6)
    assert difference_p(found) == pytest.approx(0.005270757241602, rel=1e-9)
    assert equivalence_p(found, 6) == pytest.approx(t_tail((6 - 3.875) / found.error, 7))
    assert equivalence_p(found, 3) > 0.5  # the mean itself is outside
    assert equivalence_p(found._replace(mean=-3.875), 6) == equivalence_p(found, 6)
    exact = estimate([[2.0, 2.0], [2.0, 2.0]])
    assert exact[:3] == (2, 2, 2)
    assert difference_p(exact) == 0
    assert equivalence_p(exact, 3) == 0
    assert equivalence_p(exact, 1) == 1
    for alone in (estimate([[4.0]]), estimate([4.0, 5.0], [*"aa"])):  # which says nothing of others
        assert (alone.low, alone.high) == (-math.inf, math.inf)
        assert difference_p(alone) == 1


def test_components_of_variance_by_hand():
    """Breaks when runs are counted as examples, a picture's questions are parted, or noise counts
    as a difference between examples."""
    # runs differ by 20, examples do not: error = 10, one degree of freedom, t = 12.706
    found = estimate([[0.0] * 100, [20.0] * 100])
    assert (found.mean, found.error, found.freedom) == pytest.approx((10, 10, 1))
    assert found.high == pytest.approx(10 + 127.06, abs=0.01)
    # three groups of one mean each, (0, 30, 60): error = 30 / √3, two degrees, however many
    # examples they have
    for each in (1, 50):
        found = estimate(
            np.repeat([[0.0, 30.0, 60.0]] * 4, each, axis=1), np.repeat(["a", "b", "c"], each)
        )
        assert (found.mean, found.error, found.freedom) == pytest.approx((30, 30 / 3**0.5, 2))
    # mean squares: of runs 6, of examples 24, of the rest 2, which is taken off the examples'
    found = estimate([[1.0, 2.0, 6.0], [3.0, 2.0, 10.0]])
    assert (found.mean, found.error, found.freedom) == pytest.approx((4, 1, 1))
    assert (found.shared_error, found.shared_freedom) == pytest.approx(((22 / 6) ** 0.5, 2))
    # a group of three and one of one: the mean is that of the examples
    assert estimate([[1.0, 1.0, 1.0, 5.0]], "a a a b".split()).mean == 2
    with pytest.raises(ValueError, match="not finite"):
        estimate([[1.0, np.nan]])


def test_few_runs_that_are_alike_by_chance_decide_nothing():
    """Breaks when the degrees of freedom of examples serve for runs too: p-values below 0.002 are
    then too many."""
    runs = np.array([[4.0], [5], [6], [5], [5]])
    examples = np.linspace(-20, 20, 41)
    found = estimate(runs + examples)
    of_runs = math.sqrt(0.5 / 5)
    of_examples = math.sqrt(143.5 / 41)  # variances 0.5 and 143.5
    half = math.hypot(
        2.7764451051977934 * of_runs, 2.0210753903062715 * of_examples
    )  # scipy.stats.t.ppf(0.975, …)
    assert (found.low, found.high) == pytest.approx((5 - half, 5 + half))
    assert found.reach(difference_p(found) / 2) == pytest.approx(found.mean)
    assert visible(found, 4) == pytest.approx(found.reach(0.025 / 4) + found.reach(0.2))
    levels = estimate(
        runs + 0.01 * examples
    )  # with 4 degrees of freedom, not with those of examples
    assert difference_p(levels) == pytest.approx(
        2 * t_tail(levels.mean / levels.error, 4), rel=0.02
    )
    # a quantile far out, of many degrees of freedom
    assert t_tail(5.76, 1011) == pytest.approx(5.57765187438078e-09, rel=1e-9)  # scipy.stats.t.sf
    assert t_point(5.543025e-09, 1011) == pytest.approx(5.761085609711959, rel=1e-9)  # t.isf
    found = Estimate(-27.69, -30.65, -24.73, 0.9125, 9, 1.0831, 1011)
    half = math.hypot(
        0.9125 * t_point(difference_p(found) / 2, 9),
        1.0831 * t_point(difference_p(found) / 2, 1011),
    )
    assert 0 < difference_p(found) < 1e-7
    assert half == pytest.approx(27.69, rel=1e-6)


def test_holm_and_what_could_be_seen():
    """Breaks when many comparisons find something by their number, or a table claims more power
    than it has."""
    # statsmodels.stats.multitest.multipletests(…, method="holm")
    assert holm([0.01, 0.04, 0.03, 0.005, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.025, 0.5])
    found = estimate(np.arange(25.0))
    assert visible(found) == pytest.approx(
        found.error * (2.063899 + 0.856855), rel=1e-5
    )  # t of 24 degrees
    assert visible(found, tests=5) == pytest.approx(found.error * (2.796940 + 0.856855), rel=1e-5)
