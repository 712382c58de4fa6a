"""The cells that a verifier can run again, as steps in JAX."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from .. import matmul
from ..errors import OptionError

TRIANGLE = {'name': 'triangle', 'parameters': {'width': 1.0, 'height': 0.3}}
STATES = {'rnn': ('h',), 'lif': ('V', 'z'), 'alif': ('V', 'a', 'z')}


def _triangle(x, width, height):
    return height * jnp.maximum(0.0, 1.0 - jnp.abs(x) / width)


def _sigmoid(x, slope):
    return slope * jax.nn.sigmoid(slope * x) * jax.nn.sigmoid(-slope * x)


def _arctan(x, slope):
    return slope / 2 / (1 + (math.pi / 2 * slope * x) ** 2)


def _fast_sigmoid(x, slope):
    return (1 + slope * jnp.abs(x)) ** -2


def _multi_gaussian(x, width, scale, height):
    def gauss(centre, deviation):
        z = (x - centre) / deviation
        return jnp.exp(-0.5 * z**2) / (deviation * math.sqrt(2 * math.pi))

    wide = gauss(width, scale * width) + gauss(-width, scale * width)
    return (1 + height) * gauss(0.0, width) - height * wide


SLOPES: dict[str, tuple[Callable, tuple[str, ...]]] = {
    'triangle': (_triangle, ('width', 'height')),
    'sigmoid': (_sigmoid, ('slope',)),
    'arctan': (_arctan, ('slope',)),
    'fast_sigmoid': (_fast_sigmoid, ('slope',)),
    'multi_gaussian': (_multi_gaussian, ('width', 'scale', 'height')),
}


@dataclass(frozen=True)
class Cell:
    r"""One of the cells that the verifier of a receipt derives by itself:
    ``cell(params, carry, x) -> (outputs, carry)``.

    It stands for a learner's cell, or declares what a function of your own computes
    (:func:`capture`). With ``y = [x, s'] @ W + b``, s what the cell sends on and a prime for the
    step before:

    .. math::
        \text{rnn}:\quad & h = \mathrm{leak}\,h' + \tanh(y), \quad s = h \\
        \text{lif}:\quad & V = \alpha V' + y - \theta z', \quad z = H(V - \theta), \quad s = z \\
        \text{alif}:\quad & V, z \text{ as lif with the threshold } \theta + \beta a, \quad
        a = \rho a' + z'

    :math:`\alpha = e^{-dt/\tau}`, :math:`\rho = e^{-dt/\tau_a}`; the derivative of H is
    :math:`\psi((V - \text{threshold})/\theta)`. ``outputs = s @ W_out + b_out``, or with
    ``tau_out`` the leaky :math:`o = e^{-dt/\tau_{out}} o' + s\,W_{out} + b_{out}`. Params ``W``
    (I + N, N), ``b`` (N,), ``W_out`` (N, O), ``b_out`` (O,), the biases optional; the carry is a
    dict of the states.

    Make one by :meth:`rnn`, :meth:`lif` or :meth:`alif`, which choose its ``kind`` and its
    ``constants``. Raises :class:`braintrace.errors.OptionError` for a constant out of range or an
    unknown surrogate; a call raises as :func:`braintrace.matmul` does.

    >>> import jax, jax.numpy as jnp
    >>> cell = Cell.lif(tau=20.0)
    >>> params = cell.init(jax.random.key(0), 3, 4, 2)
    >>> outputs, carry = cell(params, cell.carry(params, 5), jnp.ones((5, 3)))
    >>> outputs.shape, sorted(carry)
    ((5, 2), ['V', 'z'])
    """

    kind: str
    constants: dict[str, Any] = field(hash=False)

    def __post_init__(self) -> None:
        for name, value in self.constants.items():
            least = name not in ('leak', 'beta')
            if name not in ('surrogate', 'reset_gradient') and not (
                _is_number(value) and (value > 0 if least else value >= 0)
            ):
                bound = 'above 0' if least else 'from 0 on'
                raise OptionError(f'{name} is {value!r}; give a number {bound}.')
            if name in ('leak', 'alpha', 'rho', 'kappa_out') and value >= 1:
                raise OptionError(
                    f'{name} is {value!r}, and a decay is below 1. Give a smaller leak or tau.'
                )
        if self.kind != 'rnn':
            _spike_of(self.constants['surrogate'])

    @classmethod
    def rnn(cls, leak: float = 0.9, *, tau_out: float | None = None, dt: float = 1.0) -> Cell:
        """``h = leak h' + tanh(y)``.

        >>> Cell.rnn(0.5).constants
        {'leak': 0.5}
        """
        return cls('rnn', {'leak': leak} | _leak_of_readout(tau_out, dt))

    @classmethod
    def lif(
        cls,
        tau: float = 20.0,
        theta: float = 1.0,
        *,
        dt: float = 1.0,
        surrogate: dict = TRIANGLE,
        reset_gradient: bool = False,
        tau_out: float | None = None,
    ) -> Cell:
        """Leaky integrate-and-fire units; ``reset_gradient``: whether the reset ``theta z'`` passes
        a derivative. ``surrogate``: ``{'name', 'parameters'}``, a name of
        :mod:`braintrace.nn.surrogate` or ``'fast_sigmoid'``, ``(1 + slope |x|)^-2``.

        >>> sorted(Cell.lif().constants)
        ['alpha', 'dt', 'reset_gradient', 'surrogate', 'tau', 'theta']
        """
        found: dict = {'dt': dt, 'tau': tau, 'alpha': _decay(dt, tau), 'theta': theta}
        found |= {'reset_gradient': bool(reset_gradient), 'surrogate': surrogate}
        return cls('lif', found | _leak_of_readout(tau_out, dt))

    @classmethod
    def alif(
        cls,
        tau: float = 20.0,
        theta: float = 1.0,
        tau_a: float = 200.0,
        beta: float = 0.2,
        **options,
    ) -> Cell:
        """Units whose threshold ``theta + beta a`` adapts; options as for :meth:`lif`.

        >>> Cell.alif(beta=0.1).constants['beta']
        0.1
        """
        found = cls.lif(tau, theta, **options).constants
        adapted = {'tau_a': tau_a, 'rho': _decay(found['dt'], tau_a), 'beta': beta}
        return cls('alif', found | adapted)

    @property
    def readout(self) -> str:
        """``'linear'`` or ``'leaky'``."""
        return 'leaky' if 'kappa_out' in self.constants else 'linear'

    @property
    def states(self) -> tuple[str, ...]:
        """The names of its states, as roles."""
        return STATES[self.kind] + (('o',) if self.readout == 'leaky' else ())

    def init(self, key: jax.Array, inputs: int, hidden: int, outputs: int, bias: bool = True):
        """Normal weights with variance 1 / fan-in, zero biases, in JAX's default float.

        >>> import jax
        >>> sorted(Cell.rnn().init(jax.random.key(0), 3, 4, 2))
        ['W', 'W_out', 'b', 'b_out']
        """
        keys = jax.random.split(key)
        shapes = {'W': (inputs + hidden, hidden), 'W_out': (hidden, outputs)}
        params = {
            name: jax.random.normal(k, shape) / math.sqrt(shape[0])
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        zeros = {'b': jnp.zeros(hidden), 'b_out': jnp.zeros(outputs)} if bias else {}
        return params | zeros

    def carry(self, params, batch_size: int) -> dict[str, jax.Array]:
        """The carry of zeros for these parameters.

        >>> import jax
        >>> cell = Cell.rnn()
        >>> cell.carry(cell.init(jax.random.key(0), 3, 4, 2), 5)['h'].shape
        (5, 4)
        """
        hidden, out = params['W_out'].shape
        dtype = params['W_out'].dtype
        return {s: jnp.zeros((batch_size, out if s == 'o' else hidden), dtype) for s in self.states}

    def __call__(self, params, carry, x):
        """One step."""
        of, sent = self.constants, 'h' if self.kind == 'rnn' else 'z'
        old = carry[sent]
        y = matmul(jnp.concatenate([x, old], -1), params['W'], params.get('b'))
        if self.kind == 'rnn':
            new = {'h': of['leak'] * old + jnp.tanh(y)}
        else:
            reset = old if of['reset_gradient'] else jax.lax.stop_gradient(old)
            new = {'V': of['alpha'] * carry['V'] + y - of['theta'] * reset}
            above = new['V'] - of['theta']
            if self.kind == 'alif':
                new['a'] = of['rho'] * carry['a'] + old
                above = above - of['beta'] * new['a']
            new['z'] = _spike_of(of['surrogate'])(above / of['theta'])
        outputs = matmul(new[sent], params['W_out'], params.get('b_out'))
        if self.readout == 'leaky':
            new['o'] = outputs = of['kappa_out'] * carry['o'] + outputs
        return outputs, new


def _spike_of(surrogate: dict) -> Callable:
    """The spike function with this slope; both read ``x``, the share of the way to threshold."""
    name, parameters = surrogate['name'], surrogate['parameters']
    slope, known = SLOPES.get(name, (None, ()))
    if (
        slope is None
        or set(parameters) != set(known)
        or not all(map(_is_number, parameters.values()))
    ):
        found = ', '.join(f'{n} {list(names)}' for n, (_, names) in SLOPES.items())
        raise OptionError(f'surrogate is {surrogate!r}; give a name and its parameters: {found}.')

    @jax.custom_jvp
    def spike(x):
        return (x > 0).astype(x.dtype)

    @spike.defjvp
    def _(at, moved):
        return spike(*at), slope(*at, **parameters).astype(at[0].dtype) * moved[0]

    return spike


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _decay(dt: float, tau: float) -> float:
    if not (_is_number(dt) and _is_number(tau) and dt > 0 and tau > 0):
        raise OptionError(f'dt is {dt!r} and tau {tau!r}; give two numbers above 0.')
    return math.exp(-dt / tau)


def _leak_of_readout(tau: float | None, dt: float) -> dict[str, float]:
    return {} if tau is None else {'dt': dt, 'tau_out': tau, 'kappa_out': _decay(dt, tau)}
