"""Trees of numbers compared: one rule and one contract for all tests.

A leaf agrees if no entry is further from the reference than ``relative`` times the largest entry of
the reference, or than ``absolute`` where that is more. A reference of zeros has no size of its own:
its largest entry counts as 1.
"""

import functools
import operator
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

RELATIVE = 1e-12  # of float64


class Difference(NamedTuple):
    """How far a leaf is from its reference: its worst entry, and the reference's largest one."""

    worst: float
    where: tuple[int, ...]
    size: float

    @property
    def relative(self) -> float:
        return self.worst / self.size


def assert_close(got, want, relative: float = RELATIVE, absolute: float = 0.0) -> None:
    """Raise unless structure, shapes and numbers agree: name each wrong leaf and its worst."""
    found = differences(got, want)
    wrong = {
        path: f'{d.worst:.2g} off at {list(d.where)}, {d.relative:.2g} of the largest entry '
        f'{d.size:.3g}; allowed {max(absolute, relative * d.size):.2g}'
        for path, d in found.items()
        if not d.worst <= max(absolute, relative * d.size)
    }
    if wrong:
        lines = [f'{path or "the array"}: {text}' for path, text in wrong.items()]
        right = sorted(set(found) - set(wrong))
        raise AssertionError('\n'.join(['the numbers differ', *lines, f'these agree: {right}']))


def assert_drawn_close(got, want) -> None:
    """The same for numbers that are drawn afresh at night: a sum of them may cancel."""
    assert_close(got, want, 1e-10)


def errors(got, want) -> dict[str, float]:
    """The largest error of each leaf, relative to the reference's largest entry."""
    return {path: d.relative for path, d in differences(got, want).items()}


def assert_same_kinds(got, want) -> None:
    """Raise unless every leaf has its reference's dtype."""
    kinds = [jax.tree.map(lambda a: np.asarray(a).dtype, as_dict(tree)) for tree in (got, want)]
    if kinds[0] != kinds[1]:
        raise AssertionError(f'the dtypes differ: {kinds[0]}, expected {kinds[1]}')


def assert_moves(tree) -> None:
    """Raise unless every leaf has an entry that is not zero: else a comparison shows nothing."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    still = [jax.tree_util.keystr(path) for path, g in leaves if not np.abs(g).max() > 1e-8]
    if still:
        raise AssertionError(f'no gradient for {still}')


def differences(got, want) -> dict[str, Difference]:
    got, want = as_dict(got), as_dict(want)
    structures = jax.tree.structure(got), jax.tree.structure(want)
    if structures[0] != structures[1]:
        raise AssertionError(f'the structure is {structures[0]}, expected {structures[1]}')
    pairs = zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(want), strict=True)
    found = {}
    for (path, a), b in pairs:
        name = jax.tree_util.keystr(path)
        found[name] = difference(name, np.asarray(a), np.asarray(b))
    return found


def difference(name: str, a: np.ndarray, b: np.ndarray) -> Difference:
    if a.shape != b.shape:
        raise AssertionError(f'{name or "the array"} has shape {a.shape}, expected {b.shape}')
    no_numbers = [x.dtype == jax.dtypes.float0 for x in (a, b)]  # the gradient of an integer
    if any(no_numbers) or not a.size:
        return Difference(0.0 if no_numbers[0] == no_numbers[1] else np.inf, (), 1.0)
    a, b = (x.astype(complex if np.iscomplexobj(x) else float) for x in (a, b))
    with np.errstate(invalid='ignore'):
        off = np.where(a == b, 0.0, np.abs(a - b))  # equal infinities agree, a NaN never does
    off = np.where(np.isnan(off), np.inf, off)
    where = np.unravel_index(off.argmax(), off.shape)
    return Difference(float(off.max()), tuple(map(int, where)), float(np.abs(b).max()) or 1.0)


def as_dict(tree):
    """Mappings of other types as plain dicts: a structure compares types."""
    return dict(tree) if isinstance(tree, Mapping) else tree


def at(steps, t):
    """Step ``t`` of per-step gradients."""
    return jax.tree.map(lambda g: g[t], steps)


def added(trees):
    return functools.reduce(lambda a, b: jax.tree.map(operator.add, a, b), trees)
