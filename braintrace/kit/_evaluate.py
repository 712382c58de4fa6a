"""Evaluating the laws that compare numbers: equations, their two sides, and the findings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..errors import MissingRuleError
from ._application import Application, Draw, compiled

Sides = tuple[Any, Any]


class Part(NamedTuple):
    """One equation of a law: ``sides(app, draw)`` gives both sides, found and expected;
    ``skip(app)`` a reason why the law does not apply, or None.
    """

    law: str
    name: str
    sides: Callable[[Application, Draw], Sides]
    skip: Callable[[Application], str | None] = lambda app: None


class Finding(NamedTuple):
    """The outcome of one part of a law."""

    law: str
    status: str
    text: str = ''
    worst: float | None = None
    tolerance: float | None = None


def unless(
    condition: Callable[[Application], bool], reason: str
) -> Callable[[Application], str | None]:
    """A ``skip`` that gives the reason where the condition does not hold."""
    return lambda app: None if condition(app) else reason


def evaluate(
    app: Application, parts: Sequence[Part], draw: Draw, tolerances: dict[str, float]
) -> list[Finding]:
    """The findings of these parts. One program computes them all; if it raises, each part gets a
    program of its own.
    """
    reasons = {part: part.skip(app) for part in parts}
    asked = [part for part, reason in reasons.items() if reason is None]
    skipped = [
        Finding(part.law, 'not_applicable', reason)
        for part, reason in reasons.items()
        if reason is not None
    ]
    compared = [
        _compared(part, sides, tolerances.get(part.name, tolerances['default']))
        for part, sides in zip(asked, _both_sides(app, asked, draw), strict=True)
    ]
    return skipped + compared


def _both_sides(app: Application, parts: Sequence[Part], draw: Draw) -> list[Sides | Exception]:
    if not parts:
        return []
    try:
        return compiled(lambda draw: [part.sides(app, draw) for part in parts])(draw)
    except Exception as error:  # the op's code may raise anything; every failure becomes a row
        return [error] if len(parts) == 1 else [_both_sides(app, [part], draw)[0] for part in parts]


def _compared(part: Part, sides: Sides | Exception, tolerance: float) -> Finding:
    if isinstance(sides, MissingRuleError):
        return Finding(part.law, 'not_tested', str(sides))
    if isinstance(sides, Exception):
        return Finding(part.law, 'fail', f'{part.name}: {type(sides).__name__}: {sides}')
    worst, where = deviation(*sides)
    if worst <= tolerance:
        return Finding(part.law, 'pass', '', worst, tolerance)
    return Finding(part.law, 'fail', f'{part.name}{where}', worst, tolerance)


def deviation(got, expected) -> tuple[float, str]:
    """The largest deviation of a leaf, relative to the largest number expected in it, and its place
    in the tree; infinite if the trees differ in structure or shape.
    """
    found, wanted = str(jax.tree.structure(got)), str(jax.tree.structure(expected))
    if found != wanted:
        return np.inf, f': the structure {found} instead of {wanted}'
    worst, place = 0.0, ''
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(expected), strict=True
    ):
        a, b, name = np.asarray(a), np.asarray(b), jax.tree_util.keystr(path)
        if a.shape != b.shape:
            return np.inf, f'{name}: shape {a.shape} instead of {b.shape}'
        off = float(np.max(np.abs(a - b), initial=0) / (np.max(np.abs(b), initial=0) or 1))
        if not off <= worst:  # NaN is worse than any number
            worst, place = off if np.isfinite(off) else np.inf, name
    return worst, place
