"""What rules write into: comparisons, failures, what was gated off, what is only told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .bounds import TINY, UNIT, Num, exact, far
from .looseness import Looseness
from .record import Record

CEILINGS = {'engine': 8.0, 'observer': 64.0}  # the largest k: a receipt may ask for less alone
PLAIN = frozenset((5, 6, 7, 21, 22, 23, 24, 33, 34))  # rules of what no product makes
MOST = 50  # failures that are kept


class Gated(Exception):
    """A rule has nothing to compare in this receipt; the reason is the argument."""


class Idle(Gated):
    """A rule whose subject this record does not have: where others have it, nothing is left out."""


@dataclass(frozen=True)
class Failure:
    """A comparison that did not hold: what is stored, what it should be, and by how much.

    ``delta`` and ``bound`` are those of the worst element, whose index ends ``path``; ``count``
    elements are off. ``factors`` are the fields that the value was made of; ``hint`` says what to
    look at.

    >>> Failure(4, 'gradients/W[0, 1]', 2.1, 2.0, hint='it is 1.05 times what it should be').rule
    4
    """

    rule: int
    path: str
    stored: Any
    recomputed: Any
    delta: float | None = None
    bound: float | None = None
    factors: tuple[str, ...] = ()
    hint: str = ''
    count: int = 1


@dataclass(frozen=True)
class Limits:
    """How far a stored number may be off: ``k`` times the unit roundoff of its format."""

    k: float
    unit: float
    trace: float  # the unit roundoff of stored traces
    plain: float  # that of what no product makes
    tiny: float  # the smallest normal number

    @classmethod
    def of(cls, record: Record, level: str, allow: Iterable[str]) -> Limits:
        """The verifier's ceiling, tightened by the receipt's own k."""
        numeric, allowed = record.raw['numeric'], set(allow)
        asked, plain = numeric['k'], UNIT[record.dtype]
        unit = plain
        k = CEILINGS[level] if asked is None else min(asked, CEILINGS[level])
        for name, made_by in (('tf32', 'tf32'), ('bf16', 'bfloat16')):
            if numeric['matmul_precision'] == name and name in allowed:
                unit = max(unit, UNIT[made_by])
        stored = numeric['trace_dtype']
        rounded = UNIT[stored] if stored != 'bfloat16' or 'bf16' in allowed else unit
        return cls(k, unit, max(unit, rounded), plain, TINY[record.dtype])

    def of_path(self, path: str, rule: int) -> float:
        """``k u`` of a field, as a rule looks at it."""
        own = self.plain if rule in PLAIN else self.unit
        return self.k * (self.trace if path.startswith('traces_') else own)


@dataclass
class Check:
    """The findings of a verification; ``rule`` is the one at work, ``at`` the place of the record
    in its run, ``limits`` those of the record at hand. ``failures`` are the first ones of steps,
    ``between`` those of rules between records; ``failed`` counts all of them.

    ``loose``: how far fields may be off, as a share of their size.
    """

    limits_of: Callable[[Record], Limits]
    limits: Limits = field(init=False, repr=False)
    at: str = ''
    rule: int = 0
    of_run: bool = False
    counts: Counter = field(default_factory=Counter)
    failed: Counter = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    between: list[Failure] = field(default_factory=list)
    loose: Looseness = field(default_factory=Looseness)
    gated: dict[int, str] = field(default_factory=dict)
    idle: dict[int, str] = field(default_factory=dict)
    disclosures: dict[str, Any] = field(default_factory=dict)
    ties: int = 0
    key: bytes | None = None
    ended: bool = False  # the signature says that the record at hand is the last

    def begin(self, record: Record, at: str) -> None:
        """Turns to a record."""
        self.at, self.limits = at, self.limits_of(record)

    def close(
        self, path: str, stored: np.ndarray | None, num: Num | None, factors: Iterable[str] = ()
    ) -> bool:
        """Whether a stored array is within its bound; None is a zero by structure."""
        if num is None:
            if stored is None:
                self.counts[self.rule] += 1
                return True
            num = exact(np.zeros(np.shape(stored)))
        if stored is None:
            stored = np.zeros(num.shape)
        self.counts[self.rule] += max(1, np.size(stored))
        if np.shape(stored) != num.shape:
            self.fail(path, list(np.shape(stored)), list(num.shape), 'the shapes differ')
            return False
        bad, bound = far(stored, num, self.limits.of_path(path, self.rule))
        self.loose.weigh(self.rule, path, stored, num.value, bound, self.limits.tiny)
        if not bad.any():
            return True
        self._tell(path, stored, num.value, bad, bound, tuple(factors))
        return False

    def same(self, path: str, stored: Any, want: Any, factors: Iterable[str] = ()) -> bool:
        """Whether two arrays are equal bit for bit."""
        a, b = np.asarray(stored), np.asarray(want)
        self.counts[self.rule] += max(1, a.size)
        if a.shape != b.shape:
            self.fail(path, list(a.shape), list(b.shape), 'the shapes differ')
            return False
        bad = (a != b) | (np.signbit(a) != np.signbit(b) if a.dtype.kind == 'f' else False)
        if not np.any(bad):
            return True
        self._tell(path, a, b, np.asarray(bad), np.zeros(a.shape), tuple(factors))
        return False

    def true(self, path: str, holds: bool, stored: Any, want: Any, hint: str = '') -> bool:
        """One yes or no."""
        self.counts[self.rule] += 1
        if not holds:
            self.fail(path, stored, want, hint)
        return bool(holds)

    def fail(self, path: str, stored: Any, want: Any, hint: str = '', **more) -> None:
        """A failure of the rule at work."""
        self.failed[self.rule] += 1
        kept = self.between if self.of_run else self.failures
        if len(kept) < MOST:
            kept.append(Failure(self.rule, f'{self.at}{path}', stored, want, hint=hint, **more))

    def tell(self, name: str, value: Any) -> None:
        """Something that decides nothing."""
        self.disclosures[f'{self.at}{name}'] = value

    def _tell(self, path, stored, value, bad, bound, factors) -> None:
        count = int(np.count_nonzero(bad))
        with np.errstate(all='ignore'):
            delta = np.abs(stored.astype(float) - value.astype(float))
            excess = np.where(bad, np.nan_to_num(delta / np.maximum(bound, 1e-300), nan=np.inf), -1)
        worst = np.unravel_index(int(np.argmax(excess)), bad.shape) if bad.ndim else ()
        index = f'[{", ".join(map(str, worst))}]' if worst else ''
        self.fail(
            f'{path}{index}',
            _plain(stored[worst]),
            _plain(value[worst]),
            _hint(stored[worst], value[worst]),
            delta=float(delta[worst]),
            bound=float(bound[worst]),
            factors=factors,
            count=count,
        )


def _plain(x) -> Any:
    return x.item() if hasattr(x, 'item') else x


def _hint(stored, value) -> str:
    """What a wrong number looks like."""
    stored, value = float(stored), float(value)
    if value == 0 or not np.isfinite(value) or not np.isfinite(stored):
        return ''
    ratio = stored / value
    if stored == 0:
        return 'it is zero'
    if round(ratio, 3) == -1:
        return 'its sign is flipped'
    return f'it is {ratio:.4g} times what it should be'
