"""What a gradient meter has read: estimates with their errors, as plain data, a table, a figure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .._tables import Table, as_html, as_text
from .diagnosis import _figure, _plain

LARGE = 0.2  # an estimate with a larger error is not shown
LEAST = 20  # fewer samples do not tell their own error
POINTS = 20  # of the figure


class Estimate(NamedTuple):
    """A number (``value``), its standard error, and the number of samples that both come from.
    Where the error is larger than 0.2, it prints as "not yet": the number may be anything.

    >>> import braintrace
    >>> print(braintrace.verify.Estimate(0.913, 0.04, 300))
    0.913 +- 0.040
    >>> print(braintrace.verify.Estimate(0.913, 0.4, 12))
    not yet
    """

    value: float
    error: float
    samples: int

    @property
    def known(self) -> bool:
        """Whether the error is at most 0.2."""
        return self.error <= LARGE

    def __str__(self) -> str:
        return f'{self.value:.3f} +- {self.error:.3f}' if self.known else 'not yet'


class Samples(NamedTuple):
    """What each direction of each life saw, summed over its updates: with a = <g, v>, b = <ghat, v>
    and ``b_p`` the part of b that parameter p has, the products ``ab``, ``aa`` and ``bb`` of shape
    (n,), ``gg = |ghat|^2``, and by parameter, (n, P), ``ab_p``, ``bb_p`` and ``gg_p``.
    """

    ab: np.ndarray
    aa: np.ndarray
    bb: np.ndarray
    gg: np.ndarray
    ab_p: np.ndarray
    bb_p: np.ndarray
    gg_p: np.ndarray

    @classmethod
    def of(cls, rows: np.ndarray) -> Samples:
        """From rows ``(ab, aa, bb, gg, ab_p.., bb_p.., gg_p..)``."""
        rows = np.asarray(rows, float)
        return cls(*rows[:, :4].T, *np.split(rows[:, 4:], 3, axis=1))


def _estimate(value, influence: np.ndarray) -> Estimate:
    """``influence``: the first-order change of the value by each sample, of mean 0."""
    count = len(influence)
    if count < LEAST or not np.isfinite(value):
        return Estimate(float(value), math.inf, count)
    return Estimate(float(value), float(influence.std(ddof=1) / math.sqrt(count)), count)


def cosine_of(s: Samples) -> Estimate:
    """``E ab / sqrt(E aa E bb)``, the correlation of a and b: of every unbiased ratio of these
    means it has the least error, ``(1 - c^2) / sqrt(n)``, and none where the rule is exact.
    """
    with np.errstate(all='ignore'):
        aa, bb = s.aa.mean(), s.bb.mean()
        size = np.sqrt(aa * bb)
        c = s.ab.mean() / size
        return _estimate(c, s.ab / size - c / 2 * (s.aa / aa + s.bb / bb))


def ratio_of(s: Samples) -> Estimate:
    """``|ghat| / |g| = sqrt(E gg / E aa)``. Since ``|ghat|^2`` is known, ``E bb / E gg`` is 1, and
    its power ``c^2 / 2`` takes from the noise of ``E aa`` what b shares with a.
    """
    with np.errstate(all='ignore'):
        aa, bb, gg = s.aa.mean(), s.bb.mean(), s.gg.mean()
        shared = s.ab.mean() ** 2 / (aa * bb)
        ratio = np.sqrt(gg / aa) * (bb / gg) ** (shared / 2)
        by = s.gg / gg - s.aa / aa + shared * (s.bb / bb - s.gg / gg)
        return _estimate(ratio, ratio / 2 * by)


def factors_of(s: Samples) -> list[Estimate]:
    """``<g_p, ghat_p> / |ghat_p|^2`` of each parameter: by how much its step should be scaled.

    With f the factor of all parameters together, ``E (a - f b) b_p = <g_p - f ghat_p, ghat_p>``,
    whose noise is that of what is left of a, none where the rule is exact.
    """
    with np.errstate(all='ignore'):
        common = s.ab.mean() / s.bb.mean()
        rest, size = s.ab_p - common * s.bb_p, s.gg_p.mean(0)
        factors = common + rest.mean(0) / size
        by = (rest - (factors - common) * s.gg_p) / size
        return [_estimate(f, i) for f, i in zip(factors, by.T, strict=True)]


@dataclass(frozen=True, repr=False)
class Reading:
    """What :meth:`Meter.reading` returns: how near a rule's gradient is to the true one.

    ``cosine`` of the angle between both, ``ratio`` of lengths ``|ghat| / |g|``, and ``factors``:
    path -> the factor by which the step of this parameter should be scaled. Each is an
    :class:`Estimate` of the updates that were seen, weighed by their squared norms. ``looks_back``
    says which past the true gradient holds. ``curve``: pairs of the last update of a part and its
    cosine. Three standard errors hold the true number in nearly all readings.

    >>> import numpy as np, braintrace
    >>> from braintrace.verify import Estimate, Reading
    >>> print(Reading('d_rtrl()', 'an update', Estimate(0.5, 0.3, 8), Estimate(1, 0.1, 8), {}, ()))
    d_rtrl(): cosine to the true gradient not yet, length / true length 1.000 +- 0.100
    8 samples; the true gradient looks back over an update
    """

    rule: str
    looks_back: str
    cosine: Estimate
    ratio: Estimate
    factors: dict[str, Estimate]
    curve: tuple[tuple[int, Estimate], ...]

    @classmethod
    def of(cls, rule: str, looks_back: str, paths, rows, updates=()) -> Reading:
        """Of rows of :class:`Samples`, in order, and the update in which each ended."""
        if not (n := len(rows)):
            nothing = Estimate(math.nan, math.inf, 0)
            return cls(rule, looks_back, nothing, nothing, dict.fromkeys(paths, nothing), ())
        samples = Samples.of(rows)
        bounds = np.linspace(0, n, min(POINTS, n // LEAST) + 1).astype(int) if len(updates) else []
        curve = tuple(
            (int(updates[stop - 1]), cosine_of(Samples.of(rows[start:stop])))
            for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
        )
        factors = dict(zip(paths, factors_of(samples), strict=True))
        return cls(rule, looks_back, cosine_of(samples), ratio_of(samples), factors, curve)

    @property
    def samples(self) -> int:
        """The number of samples, one for each direction and life of it."""
        return self.cosine.samples

    def as_dict(self) -> dict:
        """Everything as dicts, lists, strings, numbers and None, as JSON has them. A number that is
        not yet known is None.
        """

        def plain(e: Estimate) -> dict:
            return {'value': e.value if e.known else None, 'error': e.error, 'samples': e.samples}

        return _plain(
            {
                'rule': self.rule,
                'looks_back': self.looks_back,
                'cosine': plain(self.cosine),
                'ratio': plain(self.ratio),
                'factors': {path: plain(e) for path, e in self.factors.items()},
                'curve': tuple((update, plain(e)) for update, e in self.curve),
            }
        )

    def _lines(self) -> list[str]:
        return [
            f'{self.rule}: cosine to the true gradient {self.cosine}, length / true length '
            f'{self.ratio}',
            f'{self.samples} samples; the true gradient looks back over {self.looks_back}',
        ]

    def _tables(self) -> list[Table]:
        rows = [(path, str(e)) for path, e in self.factors.items()]
        return [Table('its step should be scaled by', ('parameter', 'factor'), rows)]

    def __str__(self) -> str:
        return as_text(self._lines(), self._tables())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self._lines(), self._tables())

    def figure(self):
        """A matplotlib figure of the cosine over updates, with one standard error; a notebook shows
        it. Raises :class:`braintrace.errors.OptionError` without matplotlib.
        """
        figure = _figure(figsize=(6, 3), layout='constrained')
        axes = figure.subplots()
        known = [(update, e) for update, e in self.curve if e.known]
        axes.errorbar(
            [update for update, _ in known],
            [e.value for _, e in known],
            [e.error for _, e in known],
            marker='o',
            capsize=2,
        )
        axes.axhline(1, color='gray', linewidth=0.6)
        axes.set(xlabel='update', ylabel='cosine to the true gradient')
        axes.set_title(f'{self.rule}, {self.samples} samples', fontsize=9)
        return figure
