"""Slopes that stand in for the derivative of a spike.

Each function returns the slope, a bound of its own derivative, the size of its terms, and the
largest value that the slope has anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .bounds import Num, most_terms

NEAR = 2.0**-8  # of the terms: a potential may lie so much nearer, where a kink is steeper


def _logistic(x):
    """``1 / (1 + exp(-x))``, with all digits also where it is small."""
    small = np.exp(-np.abs(x))
    return np.where(x < 0, small, 1.0) / (1 + small)


def _triangle(u, width, height):
    far = np.abs(u) / width
    steep = np.where(far < 1, height / width, 0.0)
    return height * np.maximum(0.0, 1 - far), steep, height * np.minimum(1 + far, 2.0), height


def _sigmoid(u, slope):
    s = _logistic(slope * u)
    value = slope * s * _logistic(-slope * u)
    return value, slope * value, value, slope / 4


def _arctan(u, slope):
    c = math.pi / 2 * slope
    below = 1 + (c * u) ** 2
    value = slope / 2 / below
    return value, slope * c**2 * np.abs(u) / below**2, value, slope / 2


def _fast_sigmoid(u, slope):
    below = 1 + slope * np.abs(u)
    value = below**-2.0
    return value, 2 * slope / below**3, value, 1.0


def _multi_gaussian(u, width, scale, height):
    def gauss(centre, deviation):
        z = (u - centre) / deviation
        value = np.exp(-0.5 * z**2) / (deviation * math.sqrt(2 * math.pi))
        return value, np.abs(z) / deviation * value

    middle, steep = gauss(0.0, width)
    wide = [gauss(centre, scale * width) for centre in (-width, width)]
    wings = height * sum(value for value, _ in wide)
    steep = (1 + height) * steep + height * sum(slope for _, slope in wide)
    top = (1 + height) / (width * math.sqrt(2 * math.pi))
    return (1 + height) * middle - wings, steep, (1 + height) * middle + wings, top


SURROGATES: dict[str, tuple[Callable, tuple[str, ...]]] = {
    'triangle': (_triangle, ('width', 'height')),
    'sigmoid': (_sigmoid, ('slope',)),
    'arctan': (_arctan, ('slope',)),
    'fast_sigmoid': (_fast_sigmoid, ('slope',)),
    'multi_gaussian': (_multi_gaussian, ('width', 'scale', 'height')),
}


def psi(surrogate: dict, u: Num) -> Num:
    """The slope at ``u``; its parameters are constants, rounded before they are used. However
    steep it is, it is no further off than its largest value.
    """
    function, names = SURROGATES[surrogate['name']]
    parameters = [surrogate['parameters'][name] for name in names]
    distance, off = np.abs(u.value), u.terms + np.abs(u.value)
    value, _, size, top = function(u.value, *parameters)
    _, steep, *_ = function(np.maximum(distance - NEAR * off, 0.0), *parameters)
    carried = np.minimum(steep * off, most_terms(top, u.floor))
    return Num(value, carried + 2 * size + u.floor, u.floor)
