"""What a gradient meter has read: estimates with their errors, as plain data, a table, a figure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .._tables import Table
from ._shown import Shown, empty_figure

LARGE = 0.2  # an estimate with a larger error is not shown
LEAST = 20  # fewer samples do not tell their own error
POINTS = 20  # of the curve


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

    def as_dict(self) -> dict:
        """A dict of the three, in which a number that is not yet known is None."""
        error = self.error if math.isfinite(self.error) else None
        value = self.value if self.known else None
        return {'value': value, 'error': error, 'samples': self.samples}


def of_means(means: np.ndarray) -> np.ndarray:
    """The cosine, the ratio of lengths and the factor of each parameter, of the means of the
    products ``aa, ab_p.., bb_p.., gg_p..`` along the last axis: ``a = <g, v>``, ``b = <ghat, v>``,
    and of each parameter p ``ab_p = a b_p``, ``bb_p = b b_p``, ``gg_p = |ghat_p|^2``.
    """
    aa, (ab_p, bb_p, gg_p) = means[..., 0], np.split(means[..., 1:], 3, axis=-1)
    ab, bb, gg = (each.sum(-1) for each in (ab_p, bb_p, gg_p))
    # The correlation of a and b: of every unbiased ratio of these means it has the least error,
    # (1 - c^2) / sqrt(n), and none where the rule is exact.
    cosine = ab / np.sqrt(aa * bb)
    # |ghat|^2 is known, so E bb / E gg is 1, and its power c^2 / 2 takes from the noise of E aa
    # what b shares with a.
    ratio = np.sqrt(gg / aa) * (bb / gg) ** (cosine**2 / 2)
    # With f the factor of all parameters together, E (a - f b) b_p = <g_p - f ghat_p, ghat_p>,
    # whose noise is that of what is left of a.
    common = (ab / bb)[..., None]
    factors = common + (ab_p - common * bb_p) / gg_p
    return np.concatenate([cosine[..., None], ratio[..., None], factors], -1)


def estimates(rows: np.ndarray) -> list[Estimate]:
    """:func:`of_means` of samples, with the error of the jackknife: how far each number moves as
    one sample after the other is left out (Efron and Stein 1981, "The jackknife estimate of
    variance").
    """
    rows = np.asarray(rows, float)
    count, total = len(rows), rows.sum(0)
    with np.errstate(all='ignore'):
        values = of_means(total / count)
        errors = np.full(values.shape, np.inf)
        if count >= LEAST:
            without_one = of_means((total - rows) / (count - 1))
            errors = math.sqrt(count - 1) * without_one.std(0)
    errors = np.where(np.isfinite(values) & np.isfinite(errors), errors, np.inf)
    return [Estimate(*pair, count) for pair in zip(values.tolist(), errors.tolist(), strict=True)]


@dataclass(frozen=True, repr=False)
class Reading(Shown):
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
    def of(cls, rule: str, looks_back: str, paths, rows: np.ndarray, updates: np.ndarray):
        """Of samples in order, and the update in which each ended."""
        cosine, ratio, *factors = estimates(rows)
        parts = np.array_split(np.arange(len(rows)), max(1, min(POINTS, len(rows) // LEAST)))
        curve = tuple((int(updates[i[-1]]), estimates(rows[i])[0]) for i in parts if i.size)
        return cls(rule, looks_back, cosine, ratio, dict(zip(paths, factors, strict=True)), curve)

    @property
    def samples(self) -> int:
        """The number of samples, one for each direction and life of it."""
        return self.cosine.samples

    def _lines(self) -> list[str]:
        return [
            f'{self.rule}: cosine to the true gradient {self.cosine}, length / true length '
            f'{self.ratio}',
            f'{self.samples} samples; the true gradient looks back over {self.looks_back}',
        ]

    def _tables(self) -> list[Table]:
        rows = [(path, str(e)) for path, e in self.factors.items()]
        return [Table('its step should be scaled by', ('parameter', 'factor'), rows)]

    def figure(self):
        """A matplotlib figure of the cosine over updates, with one standard error; a notebook shows
        it. Raises :class:`braintrace.errors.OptionError` without matplotlib.
        """
        figure = empty_figure(figsize=(6, 3), layout='constrained')
        axes = figure.subplots()
        known = [(update, *e[:2]) for update, e in self.curve if e.known]
        axes.errorbar(*np.reshape(known, (-1, 3)).T, marker='o', capsize=2)
        axes.axhline(1, color='gray', linewidth=0.6)
        axes.set(xlabel='update', ylabel='cosine to the true gradient')
        axes.set_title(f'{self.rule}, {self.samples} samples', fontsize=9)
        return figure
