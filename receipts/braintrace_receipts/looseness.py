"""How wide bounds are beside what they are for: what is right by its bound alone is told.

A bound is proportional to the terms that made a number, so whoever chooses the data can make it
wide. A large number hides no small one: fields are judged whole and by row, column and lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .record import Record

LOOSE = 1e-2  # a bound of more than this share of what it is for is told
FREE = 5e-2  # of the way of a row, column or lane of a parameter, that may be off: this is told
QUARTER = 0.25  # of the numbers of a gradient, or of the steps of one of them, where nothing learns
FEW = 2.0  # times that one number may be wide in a run: by chance it is the small rest of its terms
LEARNED = (4, 14)  # rules of gradients; the later one counts all that the step may be off by
STATES = ('carry_after', 'outputs')  # fields of which each row, column and lane stands for itself


@dataclass
class Wide:
    """The bounds of a field in a record, not all of them tight, and the sizes of its numbers."""

    bound: np.ndarray
    size: np.ndarray

    @property
    def shares(self) -> np.ndarray:
        """Of each number, at most 1."""
        return np.minimum(1.0, self.bound / self.size)

    @property
    def free(self) -> np.ndarray:
        """The bounds of numbers that are wide."""
        return np.where(self.shares > LOOSE, self.bound, 0.0)


def _wide(stored, value, off: np.ndarray, tiny: float) -> Wide | None:
    """Bounds beside sizes, None where all are tight. What is zero and should be, or was below the
    smallest normal number, is not free.
    """
    value = np.abs(value)
    if np.all(LOOSE * value >= off):
        return None
    size = np.abs(stored)
    right = (size == 0) & (value <= tiny)
    found = Wide(off, np.where(right, np.inf, np.maximum(size, value)))
    return None if (found.shares <= LOOSE).all() else found


@dataclass
class Looseness:
    """``told``: the share by which a field may be off, by the tightest rule, at the worst record or
    over the run. ``wide`` are the bounds of the record at hand, None where all are tight; ``made``
    those of its gradients and traces, with all that the step may be off by before them; ``free``
    what the traces before a step may be off by.
    """

    told: dict[str, float] = field(default_factory=dict)
    wide: dict[str, Wide | None] = field(default_factory=dict)
    made: dict[str, Wide | None] = field(default_factory=dict)
    free: dict[str, np.ndarray] = field(default_factory=dict)
    learned: dict[tuple, Learned] = field(default_factory=dict)
    states: dict[tuple, np.ndarray] = field(default_factory=dict)  # shares added up over the run
    records: int = 0

    def weigh(self, rule: int, path: str, stored, value, bound: np.ndarray, tiny: float) -> None:
        """Keeps the tightest bound of each number beside its size."""
        made = rule in LEARNED and path.startswith(('gradients/', 'traces_after/'))
        if not made and self.wide.get(path, path) is None:
            return
        found = _wide(stored, value, bound, tiny)
        if made:
            self.made[path] = found
        before = self.wide.get(path, found)
        if found is None or before is None:
            self.wide[path] = None
        elif before.bound.shape == bound.shape:
            self.wide[path] = Wide(np.minimum(bound, before.bound), found.size)

    def end(self, r: Record, ku: float, tiny: float, updated: Callable, derived: Callable) -> None:
        """The bounds of a record are known. ``updated(path, terms)`` is what an optimiser makes of
        more terms of a gradient, None where that is not known; ``derived(terms)`` the values and
        bounds of a step where traces have terms.
        """
        self.records += 1
        for path, wide in self.wide.items():
            if wide is not None:
                self.tell(path, _share(path, wide))
                if path.startswith(STATES):
                    key = path, *wide.size.shape
                    self.states[key] = self.states.get(key, 0.0) + wide.shares
        goes_on = {
            path: np.where(_lanes(r.t > 0, free), free, 0.0)
            for path, free in self.free.items()
            if isinstance(stored := r.fields.get(path), np.ndarray) and stored.shape == free.shape
        }
        if any(free.any() for free in goes_on.values()):
            made = derived({path: free / ku for path, free in goes_on.items()})
            for path, (value, off) in made.items():
                if path in self.made and r.fields[path] is not None:
                    self.made[path] = _wide(r[path], value, off, tiny)
        self.free = {}
        for path, found in self.made.items():
            kind, _, name = path.partition('/')
            if kind == 'gradients':
                one = self.learned.setdefault((name, *r.shape(path)), Learned())
                one.take(r, name, found, ku, updated)
            elif found is not None:
                self.free[f'traces_before/{name}'] = found.free
        self.wide, self.made = {}, {}

    def tell(self, path: str, share: float) -> None:
        """A share above the threshold, at the worst record."""
        if not share <= LOOSE:
            self.told[path] = max(share, self.told.get(path, 0.0))

    def over_the_run(self) -> dict[str, float]:
        """All fields that are loose, the worst first."""
        for (name, *_), one in self.learned.items():
            self.tell(f'gradients/{name}', one.share())
        for (path, *_), shares in self.states.items():
            most = float(np.max(shares, initial=0.0))
            if most > max(FEW, QUARTER * self.records):
                self.tell(path, most / self.records)
        return dict(sorted(self.told.items(), key=lambda one: -one[1]))


class Learned:
    """What a run does with the gradients of a parameter that may be off: for each number the sum of
    its shares, and how far the updates of those steps may be off.
    """

    def __init__(self) -> None:
        self.steps = self.updates = 0
        self.shares: np.ndarray | float = 0.0
        self.sum: np.ndarray | float = 0.0  # what the gradient of a window may be off by so far
        self.way: np.ndarray | float = 0.0
        self.size: np.ndarray | float = 0.0

    def take(self, r: Record, name: str, found: Wide | None, ku: float, updated: Callable) -> None:
        """A record more."""
        self.steps += 1
        window = r.raw.get('window') or {'index': 0, 'weight': 1.0, 'divisor': 1.0}
        self.sum = self.sum if window['index'] else 0.0
        if found is not None:
            weight = abs(window['weight'] / (window['divisor'] or 1.0))
            self.shares, self.sum = self.shares + found.shares, self.sum + weight * found.free
        more = updated(name, self.sum / ku)
        if more is not None:
            self.updates += 1
            self.size = np.maximum(self.size, np.abs(r[f'params_after/{name}']))
            self.way = self.way + np.where(self.sum > 0, ku * more, 0.0)

    def share(self) -> float:
        """By row, column and as a whole, without the widest number: how far a parameter may be off
        as a share of its size, or how much of a gradient is free if no optimiser acts. A number by
        itself is told where it may be anything.
        """
        shares = np.asarray(self.shares, float)
        if self.updates:
            found = np.where(self.way > 0, np.minimum(1.0, self.way / self.size), 0.0)
            one, least, enough = found, 1.0, FREE
        else:
            found = shares / self.steps
            one, least, enough = shares, max(FEW, QUARTER * self.steps), QUARTER
        alone = float(np.max(found, initial=0.0)) if np.any(one >= least) else 0.0
        mean = mean_share(found, np.ones(found.shape, bool))
        return max(alone, mean if mean > enough else 0.0)


def _share(path: str, wide: Wide) -> float:
    """Of a field in a record."""
    there = np.isfinite(wide.size)
    bound, size = np.where(there, wide.bound, 0.0), np.where(there, wide.size, 0.0)
    share = _norm(bound) / max(_norm(size), 1e-300)
    if path.startswith(STATES):
        share = max(share, mean_share(np.where(there, wide.shares, 0.0), there))
    return share


def _norm(x: np.ndarray) -> float:
    """The root of the sum of squares."""
    flat = x.reshape(-1)
    return math.sqrt(flat @ flat)


def _lanes(flags: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Flags of lanes beside all that a lane has."""
    return flags.reshape((-1, *(1,) * (like.ndim - 1)))


def mean_share(shares: np.ndarray, there: np.ndarray) -> float:
    """The mean share of the worst row, column or lane, or of all, without the widest number."""
    found = 0.0
    for kept in [None, *range(shares.ndim)] if shares.ndim > 1 else [None][: shares.ndim]:
        others = tuple(axis for axis in range(shares.ndim) if axis != kept)
        rest = shares.sum(others) - shares.max(others, initial=0.0)
        found = max(found, float(np.max(rest / np.maximum(1, there.sum(others) - 1), initial=0.0)))
    return found
