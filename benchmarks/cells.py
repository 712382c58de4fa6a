"""The networks of the benchmarks of speed: cells as people write them, in names that every
``braintrace`` package has.

``traced[0]`` counts the runs of a step in Python; a compiled call does not raise it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

import braintrace

OUTPUTS = 10
FRAME = 28  # rows and columns of a picture
traced = [0]
THRESHOLD, LEAK, SLOW, SYNAPSE, ADAPTATION = 1.0, 0.95, 0.98, 0.9, 0.2


class Cell(NamedTuple):
    """A kind of cell.

    ``weights(rng, inputs, units)`` draws its parameters. ``step(p, h, x) -> (y, new states)`` takes
    one step. ``states`` names the hidden states with their dtype. y is ``wide`` times as wide as
    the units. ``traced`` numbers are in the D-RTRL trace for each weight and sample: one for each
    state, but a stored spike, which the other new states tell.
    """

    weights: Callable
    step: Callable
    states: dict
    wide: int = 1
    traced: int = 1


def dense(rng, rows, columns):
    return rng.normal(size=(rows, columns)) / np.sqrt(rows)


def joint(width, name='w'):
    """One matrix for inputs and recurrence, ``width`` times as wide as the units."""
    return lambda rng, inputs, units: {name: dense(rng, inputs + units, width * units)}


def with_state(x, h):
    return jnp.concatenate([x, h], -1)


def rnn(p, h, x):
    h = 0.8 * h['state'] + jnp.tanh(braintrace.matmul(with_state(x, h['state']), p['w']))
    return h, {'state': h}


def gru_weights(rng, inputs, units):
    return {gate: dense(rng, inputs + units, units) for gate in 'zrh'}


def gru(p, h, x):
    h = h['state']
    xh = with_state(x, h)
    z = jax.nn.sigmoid(braintrace.matmul(xh, p['z']))
    r = jax.nn.sigmoid(braintrace.matmul(xh, p['r']))
    h = (1 - z) * h + z * jnp.tanh(braintrace.matmul(with_state(x, r * h), p['h']))
    return h, {'state': h}


def lstm(p, h, x):
    products = braintrace.matmul(with_state(x, h['state']), p['w'])
    return lstm_of(jnp.split(products, 4, -1), h)


def gates_apart(rng, inputs, units):
    return {gate: dense(rng, inputs + units, units) for gate in 'ifgo'}


def lstm_apart(p, h, x):
    """One op for each gate: the public package gives no gradient to a product that is split."""
    xh = with_state(x, h['state'])
    return lstm_of([braintrace.matmul(xh, p[gate]) for gate in 'ifgo'], h)


def lstm_of(products, h):
    i, f, g, o = products
    c = jax.nn.sigmoid(f) * h['memory'] + jax.nn.sigmoid(i) * jnp.tanh(g)
    y = jax.nn.sigmoid(o) * jnp.tanh(c)
    return y, {'state': y, 'memory': c}


def encoder(p, x):
    """Features of pictures ``(..., pixels)`` by two convolutions with a stride of two."""
    y = x.reshape(-1, FRAME, FRAME, 1)
    for name in ('conv_a', 'conv_b'):
        y = braintrace.conv(y, p[name], strides=2, dimension_numbers=('NHWC', 'HWIO', 'NHWC'))
        y = jax.nn.relu(y)
    return y.reshape(*x.shape[:-1], -1)


def conv_lstm_weights(rng, inputs, units):
    features = (FRAME // 4) ** 2 * 16
    return {
        'conv_a': rng.normal(size=(3, 3, 1, 8)) / 3,
        'conv_b': rng.normal(size=(3, 3, 8, 16)) / 8,
        'w': dense(rng, features + units, 4 * units),
    }


def conv_lstm(p, h, x):
    return lstm(p, h, encoder(p, x))


@jax.custom_jvp
def spike(v):
    """1 where v is above zero; its surrogate derivative is ``slope``."""
    return (v > 0).astype(v.dtype)


def slope(v):
    return 0.3 * jnp.maximum(1 - jnp.abs(v), 0)


spike.defjvp(lambda v, dv: (spike(v[0]), slope(v[0]) * dv[0]))


def adapted(v, a):
    """The spike of a membrane whose threshold adapts."""
    return spike(v - THRESHOLD - ADAPTATION * a)


def alif(p, h, x):
    v, a = h['membrane'], h['adaptation']
    s = adapted(v, a)
    v = LEAK * v + braintrace.matmul(with_state(x, s), p['w']) - THRESHOLD * s
    a = SLOW * a + s
    return adapted(v, a), {'membrane': v, 'adaptation': a}


def alif3(p, h, x):
    s = h['spike']
    v = LEAK * h['membrane'] + braintrace.matmul(with_state(x, s), p['w']) - THRESHOLD * s
    a = SLOW * h['adaptation'] + s
    s = adapted(v, a)
    return s, {'membrane': v, 'adaptation': a, 'spike': s}


def lif_syn(p, h, x):
    s = spike(h['membrane'] - THRESHOLD)
    i = SYNAPSE * h['current'] + braintrace.matmul(with_state(x, s), p['w'])
    v = LEAK * h['membrane'] + i - THRESHOLD * s
    return spike(v - THRESHOLD), {'current': i, 'membrane': v}


def lru_weights(rng, inputs, units):
    radius, angle = rng.uniform(0.9, 0.99, units), rng.uniform(0.1, 3.0, units)
    return {
        'nu': np.log(-np.log(radius)),
        'theta': np.log(angle),
        'b_re': dense(rng, inputs, units),
        'b_im': dense(rng, inputs, units),
    }


def radius_of(nu):
    return jnp.exp(-jnp.exp(nu))


def lru(p, h, x):
    """A complex state as two real ones."""
    r, angle = braintrace.element_wise(p['nu']), braintrace.element_wise(p['theta'])
    r, angle = radius_of(r), jnp.exp(angle)
    a, b, re, im = r * jnp.cos(angle), r * jnp.sin(angle), h['re'], h['im']
    new = {
        're': a * re - b * im + braintrace.matmul(x, p['b_re']),
        'im': b * re + a * im + braintrace.matmul(x, p['b_im']),
    }
    return jnp.concatenate([new['re'], new['im']], -1), new


def lru_complex_weights(rng, inputs, units):
    p = lru_weights(rng, inputs, units)
    return {
        'lam': np.exp(-np.exp(p['nu']) + 1j * np.exp(p['theta'])),
        'b': p['b_re'] + 1j * p['b_im'],
    }


def lru_complex(p, h, x):
    """One complex state with complex parameters."""
    u = braintrace.matmul(x.astype(p['b'].dtype), p['b'])
    z = braintrace.element_wise(p['lam']) * h['state'] + u
    return jnp.concatenate([z.real, z.imag], -1), {'state': z}


def mingru_weights(rng, inputs, units):
    return {gate: dense(rng, inputs, units) for gate in 'zh'}


def mingru(p, h, x):
    z = jax.nn.sigmoid(braintrace.matmul(x, p['z']))
    h = (1 - z) * h['state'] + z * braintrace.matmul(x, p['h'])
    return h, {'state': h}


def real(*names):
    return dict.fromkeys(names, 'float32')


CELLS = {
    'rnn': Cell(joint(1), rnn, real('state')),
    'gru': Cell(gru_weights, gru, real('state')),
    'lstm': Cell(joint(4), lstm, real('state', 'memory'), traced=2),
    'lstm_apart': Cell(gates_apart, lstm_apart, real('state', 'memory'), traced=2),
    'conv_lstm': Cell(conv_lstm_weights, conv_lstm, real('state', 'memory'), traced=2),
    'alif': Cell(joint(1), alif, real('membrane', 'adaptation'), traced=2),
    'alif3': Cell(joint(1), alif3, real('membrane', 'adaptation', 'spike'), traced=2),
    'lif_syn': Cell(joint(1), lif_syn, real('current', 'membrane'), traced=2),
    'lru': Cell(lru_weights, lru, real('re', 'im'), wide=2, traced=2),
    'lru_complex': Cell(lru_complex_weights, lru_complex, {'state': 'complex64'}, wide=2, traced=2),
    'mingru': Cell(mingru_weights, mingru, real('state')),
}


class Spec(NamedTuple):
    """A network and its data. ``kind`` is a key of ``CELLS``."""

    kind: str
    units: int
    inputs: int
    steps: int
    batch: int = 16
    layers: int = 1

    @property
    def cell(self) -> Cell:
        return CELLS[self.kind]

    @property
    def states(self) -> list[str]:
        return [f'{s}{k}' for k in range(self.layers) for s in self.cell.states]

    @property
    def weights(self) -> int:
        """Numbers in the parameters of all layers; the readout is none of them."""
        params = initial(self)[0]
        return sum(w.size for name, w in params.items() if name != 'out')

    @property
    def trace_numbers(self) -> int:
        """Numbers in the D-RTRL trace of all layers."""
        return self.batch * self.weights * self.cell.traced

    @property
    def operations(self) -> int:
        """The operations of the forward products and of the weight gradient, which every method
        needs, of a cell of real products.
        """
        return 4 * self.batch * self.weights * self.steps


def initial(spec: Spec, seed: int = 0):
    """Parameters and hidden states, each by name."""
    rng = np.random.default_rng(seed)

    def single(w):
        return jnp.asarray(w, jnp.complex64 if np.iscomplexobj(w) else jnp.float32)

    params, hidden, cell, inputs = {}, {}, spec.cell, spec.inputs
    for k in range(spec.layers):
        for name, w in cell.weights(rng, inputs, spec.units).items():
            params[f'{name}{k}'] = single(w)
        for name, dtype in cell.states.items():
            hidden[f'{name}{k}'] = jnp.zeros((spec.batch, spec.units), dtype)
        inputs = cell.wide * spec.units
    params['out'] = single(rng.normal(size=(inputs, OUTPUTS)) / np.sqrt(inputs))
    return params, hidden


def of_layer(names, values: dict, k: int) -> dict:
    """The values of layer k, without its number in their names."""
    return {name: values[f'{name}{k}'] for name in names}


def cell(spec: Spec, params: dict, hidden: dict, x):
    """One step as a pure function: ``(y, hidden)``."""
    traced[0] += 1
    new = {}
    for k in range(spec.layers):
        number = re.compile(rf'(\D+){k}')
        p = {found[1]: w for name, w in params.items() if (found := number.fullmatch(name))}
        x, at = spec.cell.step(p, of_layer(spec.cell.states, hidden, k), x)
        new |= {f'{name}{k}': h for name, h in at.items()}
    return x @ params['out'], new


class Network(brainstate.nn.Module):
    """The same network as a module."""

    def __init__(self, spec: Spec):
        super().__init__()
        self.spec = spec
        params, hidden = initial(spec)
        self.names = list(params), list(hidden)
        for values, kind in ((params, brainstate.ParamState), (hidden, brainstate.HiddenState)):
            for name, value in values.items():
                setattr(self, name, kind(value))

    def update(self, x):
        params, hidden = (
            {name: getattr(self, name).value for name in names} for names in self.names
        )
        y, new = cell(self.spec, params, hidden, x)
        for name, value in new.items():
            getattr(self, name).value = value
        return y


def data(spec: Spec, seed: int = 1):
    """Inputs and targets, time in front."""
    rng = np.random.default_rng(seed)
    return (
        jnp.asarray(rng.normal(size=(spec.steps, spec.batch, spec.inputs)), jnp.float32),
        jnp.asarray(rng.normal(size=(spec.steps, spec.batch, OUTPUTS)), jnp.float32),
    )


def loss_of(y, target):
    """Mean squared error of one step."""
    return jnp.mean((y - target) ** 2)


def loss_over(step: Callable, params, hidden, xs, ys, draw: Callable | None = None, unroll=1):
    """The mean loss of a sequence by ``step(params, hidden, x) -> (y, hidden)`` in a scan, whose
    inputs and targets ``draw`` may make inside of it.
    """

    def body(hidden, at):
        x, target = draw(*at) if draw else at
        y, hidden = step(params, hidden, x)
        return hidden, loss_of(y, target)

    return jnp.mean(jax.lax.scan(body, hidden, (xs, ys), unroll=unroll)[1])
