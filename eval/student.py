"""Student's t distribution: its tail, and its quantiles. With t = √f·tan θ the density of θ is
proportional to cos^(f − 1) θ."""

import math

import numpy as np

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(100)


def t_tail(t: float, freedom: float) -> float:
    """P(T > t) of Student's t."""
    above = _area(math.atan2(abs(t), math.sqrt(freedom)), freedom) / _area(0.0, freedom) / 2
    return above if t >= 0 else 1 - above


def _area(start: float, freedom: float) -> float:
    """The integral of cos^(f − 1) θ from `start` ≥ 0 on, to where it has fallen to e⁻⁵⁰ of its first
    value, by Gauss and Legendre."""
    end = math.pi / 2
    if freedom > 1:
        end = math.acos(math.cos(start) * math.exp(-50 / (freedom - 1)))
    angles = start + (end - start) * (_NODES + 1) / 2
    return float(np.cos(angles) ** (freedom - 1) @ _WEIGHTS) * (end - start) / 2


def t_point(p: float, freedom: float) -> float:
    """The t with P(T > t) = p ≤ 0.5, by Newton's method: the tail is convex from 0 on, so a step
    back is rounding."""
    area = 2 * p * _area(0.0, freedom)
    angle, step = 0.0, 1.0
    while step > 1e-15:
        step = (_area(angle, freedom) - area) / math.cos(angle) ** (freedom - 1)
        angle += step
    return math.sqrt(freedom) * math.tan(angle)
