"""The cells that the engine knows: one step of each, with its derivatives at each position.

Each reads ``x = [inputs, its output of the step before]`` and makes ``y = x @ W + b``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from .bounds import Num, constant, exact, total
from .surrogates import psi

Entries = list[Num | None]
States = dict[str, Num]


class KnownCell(NamedTuple):
    """A cell by its formulas; None is a zero by structure.

    ``states`` are those of its group, ``output`` the role of what it sends on, ``roles`` all that
    it carries, ``constants`` the names of its numbers.
    ``step(constants, old, y) -> new``, with the distance to the threshold as ``margin`` where the
    output is a spike; ``slopes(constants, states)``: the derivative of the output by each state;
    ``D(constants, old)`` and ``D_f(constants, old, new)``: rows ``dh_s/dh'_r`` and ``dh_s/dy``.
    """

    states: tuple[str, ...]
    output: str
    roles: tuple[str, ...]
    constants: tuple[str, ...]
    step: Callable[[Mapping, States, Num], States]
    slopes: Callable[[Mapping, States], Entries]
    D: Callable[[Mapping, States], list[Entries]]
    D_f: Callable[[Mapping, States, States], Entries]

    @property
    def spikes(self) -> bool:
        """Whether its output is a spike."""
        return self.output == 'z'


def ones(like: Num) -> Num:
    """Ones of a shape."""
    return exact(np.ones(like.shape), like.floor)


def columns(rows: list[Entries]) -> list[Entries]:
    """The columns of a matrix that is given by rows."""
    return [list(column) for column in zip(*rows, strict=True)]


def chained(slopes: Entries, columns: list[Entries]) -> Entries:
    """``sum_s slope_s column_s`` for each column."""
    return [
        total(e * d for e, d in zip(slopes, column, strict=True) if e is not None and d is not None)
        for column in columns
    ]


# rnn: h = leak h' + tanh(y) -----------------------------------------------------------------------


def _rnn_step(constants, old, y):
    leak = constant(constants['leak'], y.floor)
    return {'h': leak * old['h'] + y.map(np.tanh, lambda y: 1 - np.tanh(y) ** 2)}


def _rnn_D(constants, old):
    leak = constant(constants['leak'], old['h'].floor)
    return [[leak.to(old['h'].shape)]]


def _rnn_D_f(constants, old, new):
    fresh = new['h'] - constant(constants['leak'], old['h'].floor) * old['h']
    return [1 - fresh * fresh]


# lif: V = alpha V' + y - theta z'      alif: a = rho a' + z' raises the threshold by beta a -------


def _margin(constants, states):
    """How far the potential is above its threshold."""
    floor = states['V'].floor
    above = states['V'] - constant(constants['theta'], floor)
    return above - constant(constants['beta'], floor) * states['a'] if 'a' in states else above


def _spiking_step(constants, old, y):
    alpha, theta = (constant(constants[name], y.floor) for name in ('alpha', 'theta'))
    new = {'V': alpha * old['V'] + y - theta * old['z']}
    if 'a' in old:
        new['a'] = constant(constants['rho'], y.floor) * old['a'] + old['z']
    margin = _margin(constants, new)
    return {**new, 'margin': margin, 'z': exact(margin.value > 0, y.floor)}


def _spiking_slopes(constants, states):
    floor = states['V'].floor
    theta = constant(constants['theta'], floor)
    slope = psi(constants['surrogate'], _margin(constants, states) / theta) / theta
    return [slope, -(constant(constants['beta'], floor) * slope)] if 'a' in states else [slope]


def _spiking_D(constants, old):
    shape, floor = old['V'].shape, old['V'].floor
    slopes = _spiking_slopes(constants, old)
    back: Entries = [None] * len(slopes)
    if constants['reset_gradient']:
        back = [-(constant(constants['theta'], floor) * slope) for slope in slopes]
    D = [[total((constant(constants['alpha'], floor).to(shape), back[0])), *back[1:]]]
    if 'a' in old:
        rho = constant(constants['rho'], floor).to(shape)
        D.append([slopes[0], rho + slopes[1]])
    return D


def _spiking_D_f(constants, old, new):
    return [ones(new['V']), None] if 'a' in new else [ones(new['V'])]


SPIKING = ('dt', 'tau', 'alpha', 'theta', 'reset_gradient', 'surrogate')
FORMULAS = (_spiking_step, _spiking_slopes, _spiking_D, _spiking_D_f)
CELLS = {
    'rnn': KnownCell(
        ('h',),
        'h',
        ('h',),
        ('leak',),
        _rnn_step,
        lambda constants, states: [ones(states['h'])],
        _rnn_D,
        _rnn_D_f,
    ),
    'lif': KnownCell(('V',), 'z', ('V', 'z'), SPIKING, *FORMULAS),
    'alif': KnownCell(
        ('V', 'a'), 'z', ('V', 'a', 'z'), (*SPIKING, 'tau_a', 'rho', 'beta'), *FORMULAS
    ),
}
READOUTS = {'linear': (), 'leaky': ('dt', 'tau_out', 'kappa_out')}
