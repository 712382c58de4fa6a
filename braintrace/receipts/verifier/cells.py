"""The cells that the engine knows: one step of each, with its derivatives at each position.

Each reads ``x = [inputs, its output of the step before]`` and makes ``y = x @ W + b``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from .bounds import Num, constant, exact, total
from .surrogates import psi

__all__ = ['CELLS', 'READOUTS', 'CellStep', 'KnownCell', 'filtered', 'matrix_times']

Entries = list[Num | None]


class CellStep(NamedTuple):
    """The result of a step. ``D[s][r]`` is ``dh_s/dh'_r``, ``D_f[s]`` is ``dh_s/dy``; None is a
    zero by structure.

    ``new``: the new states by role. ``emits`` and ``emitted``: the derivative of the new output by
    new states, and of the old output by old ones. ``margin``: of a spike, how far it is above its
    threshold, and the value by which the spikes stand there.
    """

    new: dict[str, Num]
    D: list[Entries]
    D_f: Entries
    emits: Entries
    emitted: Entries
    margin: Num | None = None


class KnownCell(NamedTuple):
    """``states`` are those of its group, ``output`` the role of what it sends on, ``derived``
    whether this is a spike; ``step(constants, old, y, spikes) -> CellStep``.
    """

    states: tuple[str, ...]
    output: str
    roles: tuple[str, ...]
    constants: tuple[str, ...]
    step: Callable[[Mapping, dict[str, Num], Num, np.ndarray | None], CellStep]


def matrix_times(x: Num, weight: Num, bias: Num | None) -> Num:
    """``x @ W + b``."""
    y = x @ weight
    return y if bias is None else y + bias


def _rnn(constants, old, y, spikes):
    leak = constant(constants['leak'], y.floor)
    new = y.map(np.tanh, lambda y: 1 - np.tanh(y) ** 2)
    one = exact(np.ones(y.shape), y.floor)
    h = leak * old['h'] + new
    return CellStep({'h': h}, [[leak.to(y.shape)]], [1 - new * new], [one], [one])


def _spiking(constants, old, y, spikes, adapts: bool):
    theta, alpha = (constant(constants[name], y.floor) for name in ('theta', 'alpha'))
    beta = constant(constants['beta'], y.floor) if adapts else None
    one = exact(np.ones(y.shape), y.floor)

    def margin_of(potential: Num, adaptation: Num | None) -> Num:
        above = potential - theta
        return above if adaptation is None else above - beta * adaptation

    def slopes(margin: Num) -> Entries:
        slope = psi(constants['surrogate'], margin / theta) / theta
        return [slope, -(beta * slope)] if adapts else [slope]

    potential = alpha * old['V'] + y - theta * old['z']
    adaptation = constant(constants['rho'], y.floor) * old['a'] + old['z'] if adapts else None
    margin, before = margin_of(potential, adaptation), margin_of(old['V'], old.get('a'))
    z = (margin.value > 0).astype(float) if spikes is None else spikes
    new = {'V': potential, 'z': exact(z, y.floor)}
    emitted = slopes(before)
    back: Entries = [None] * len(emitted)
    if constants['reset_gradient']:
        back = [-(theta * slope) for slope in emitted]
    D = [[total((alpha.to(y.shape), back[0])), *back[1:]]]
    if adapts:
        new['a'] = adaptation
        rho = constant(constants['rho'], y.floor).to(y.shape)
        D.append([emitted[0], total((rho, emitted[1]))])
    D_f = [one, None] if adapts else [one]
    return CellStep(new, D, D_f, slopes(margin), emitted, margin)


def _lif(constants, old, y, spikes):
    return _spiking(constants, old, y, spikes, adapts=False)


def _alif(constants, old, y, spikes):
    return _spiking(constants, old, y, spikes, adapts=True)


def filtered(step: CellStep, kappa: Num, shape: tuple[int, ...]) -> CellStep:
    """The step with one more state behind the others, whose value is zero: what a readout that
    leaks with ``kappa`` remembers of the output. Readouts read it alone.
    """
    size = len(step.emits)

    def through(column: Entries) -> Num | None:
        pairs = zip(step.emits, column, strict=True)
        return total(e * d for e, d in pairs if e is not None and d is not None)

    columns = [through([step.D[s][r] for s in range(size)]) for r in range(size)]
    D = [[*row, None] for row in step.D] + [[*columns, kappa.to(shape)]]
    one = exact(np.ones(shape), kappa.floor)
    emits: Entries = [None] * size
    return step._replace(
        D=D, D_f=[*step.D_f, through(step.D_f)], emits=[*emits, one], emitted=[*step.emitted, None]
    )


SPIKING = ('dt', 'tau', 'alpha', 'theta', 'reset_gradient', 'surrogate')
CELLS = {
    'rnn': KnownCell(('h',), 'h', ('h',), ('leak',), _rnn),
    'lif': KnownCell(('V',), 'z', ('V', 'z'), SPIKING, _lif),
    'alif': KnownCell(
        ('V', 'a'), 'z', ('V', 'a', 'z'), (*SPIKING, 'tau_a', 'rho', 'beta'), _alif
    ),
}
READOUTS = {'linear': (), 'leaky': ('dt', 'tau_out', 'kappa_out')}
