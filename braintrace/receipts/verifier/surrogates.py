"""Slopes that stand in for the derivative of a spike.

Each function returns the slope, a bound of its own derivative, and the size of its terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from .bounds import Num

__all__ = ['SURROGATES', 'psi']


def _logistic(x):
    """``1 / (1 + exp(-x))``, with all digits also where it is small."""
    small = np.exp(-np.abs(x))
    return np.where(x < 0, small, 1.0) / (1 + small)


def _triangle(u, width, height):
    far = np.abs(u) / width
    return height * np.maximum(0.0, 1 - far), np.full_like(u, height / width), height * (1 + far)


def _sigmoid(u, slope):
    s = _logistic(slope * u)
    value = slope * s * _logistic(-slope * u)
    return value, slope * value, value


def _arctan(u, slope):
    c = math.pi / 2 * slope
    below = 1 + (c * u) ** 2
    value = slope / 2 / below
    return value, slope * c**2 * np.abs(u) / below**2, value


def _fast_sigmoid(u, slope):
    below = 1 + slope * np.abs(u)
    value = below**-2.0
    return value, 2 * slope / below**3, value


def _multi_gaussian(u, width, scale, height):
    def gauss(centre, deviation):
        z = (u - centre) / deviation
        value = np.exp(-0.5 * z**2) / (deviation * math.sqrt(2 * math.pi))
        return value, np.abs(z) / deviation * value

    middle, steep = gauss(0.0, width)
    wide = [gauss(centre, scale * width) for centre in (-width, width)]
    wings = height * sum(value for value, _ in wide)
    steep = (1 + height) * steep + height * sum(slope for _, slope in wide)
    return (1 + height) * middle - wings, steep, (1 + height) * middle + wings


SURROGATES: dict[str, tuple[Callable, tuple[str, ...]]] = {
    'triangle': (_triangle, ('width', 'height')),
    'sigmoid': (_sigmoid, ('slope',)),
    'arctan': (_arctan, ('slope',)),
    'fast_sigmoid': (_fast_sigmoid, ('slope',)),
    'multi_gaussian': (_multi_gaussian, ('width', 'scale', 'height')),
}


def psi(surrogate: dict, u: Num) -> Num:
    """The slope at ``u``; its parameters are constants, rounded before they are used."""
    function, names = SURROGATES[surrogate['name']]
    value, steep, size = function(u.value, *(surrogate['parameters'][name] for name in names))
    return Num(value, steep * (u.terms + np.abs(u.value)) + 2 * size + u.floor, u.floor)
