"""Backpropagation through time as an expert writes it by hand, for the networks of ``cells.py``.

Values that do not depend on the previous state are one large product: the inputs' products, the
readout and the loss in the forward pass, every weight's gradient in the backward pass. The loops
over time hold the products with the recurrent weights alone, or, where the state enters linearly
(LRU and minGRU), no product: ``h = a * h + p`` forward and the same in reverse backward, which
``associative`` runs as associative scans.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from cells import (
    ADAPTATION,
    LEAK,
    SLOW,
    SYNAPSE,
    THRESHOLD,
    adapted,
    encoder,
    of_layer,
    radius_of,
    slope,
    spike,
)
from jax import Array
from jax.nn import sigmoid


def flat(x: Array) -> Array:
    """Merge time and batch into one axis of rows."""
    return x.reshape(-1, x.shape[-1])


def product(x: Array, w: Array) -> Array:
    return (flat(x) @ w).reshape(*x.shape[:-1], -1)


def behind(first: Array, rest: Array) -> Array:
    """The states before each step."""
    return jnp.concatenate([first[None], rest[:-1]])


# cells with recurrent weights -------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of layer; ``u`` are the recurrent weights of all its gates side by side.

    ``gates`` are the names of its weights. ``start(hidden)`` are the first states, that of the
    output in front. ``forward(u, h, p) -> (new states, kept)`` takes the old states and the
    products ``p`` of the input; the backward pass needs ``kept``. ``backward(u.T, h, kept, dh)``
    turns gradients of the new states into gradients of the products and of the old states.
    ``sources(h, kept)`` are the arrays with which each gate's recurrent weights are multiplied.
    """

    gates: str
    start: Any
    forward: Any
    backward: Any
    sources: Any = lambda h, kept: (h[0],)


def rnn_forward(u, h, p):
    v = jnp.tanh(p + h[0] @ u)
    return (0.8 * h[0] + v,), (v,)


def rnn_backward(ut, h, kept, dh):
    da = dh[0] * (1 - kept[0] * kept[0])
    return da, (0.8 * dh[0] + da @ ut,)


def gru_forward(u, h, p):
    h, two = h[0], 2 * u.shape[0]
    z, r = jnp.split(sigmoid(p[:, :two] + h @ u[:, :two]), 2, -1)
    v = jnp.tanh(p[:, two:] + (r * h) @ u[:, two:])
    return ((1 - z) * h + z * v,), (z, r, v)


def gru_backward(ut, h, kept, dh):
    (h,), (dh,), (z, r, v), two = h, dh, kept, 2 * ut.shape[1]
    dv = dh * z * (1 - v * v)
    drh = dv @ ut[two:]
    dzr = jnp.concatenate([dh * (v - h) * z * (1 - z), drh * h * r * (1 - r)], -1)
    return jnp.concatenate([dzr, dv], -1), (dh * (1 - z) + drh * r + dzr @ ut[:two],)


def lstm_forward(u, h, p):
    i, f, g, o = jnp.split(p + h[0] @ u, 4, -1)
    i, f, g, o = sigmoid(i), sigmoid(f), jnp.tanh(g), sigmoid(o)
    c = f * h[1] + i * g
    return (o * jnp.tanh(c), c), (i, f, g, o, c)


def lstm_backward(ut, h, kept, dh):
    i, f, g, o, c = kept
    v = jnp.tanh(c)
    dc = dh[1] + dh[0] * o * (1 - v * v)
    da = jnp.concatenate(
        [
            dc * g * i * (1 - i),
            dc * h[1] * f * (1 - f),
            dc * i * (1 - g * g),
            dh[0] * v * o * (1 - o),
        ],
        -1,
    )
    return da, (da @ ut, dc * f)


def alif_forward(u, h, p):
    s, v, a = h
    v = LEAK * v + p + s @ u - THRESHOLD * s
    a = SLOW * a + s
    return (adapted(v, a), v, a), (v, a)


def alif_backward(ut, h, kept, dh):
    (ds, dv, da), (v, a) = dh, kept
    ds = ds * slope(v - THRESHOLD - ADAPTATION * a)
    dv, da = dv + ds, da - ADAPTATION * ds
    return dv, (dv @ ut - THRESHOLD * dv + da, LEAK * dv, SLOW * da)


def lif_syn_forward(u, h, p):
    s, i, v = h
    i = SYNAPSE * i + p + s @ u
    v = LEAK * v + i - THRESHOLD * s
    return (spike(v - THRESHOLD), i, v), (v,)


def lif_syn_backward(ut, h, kept, dh):
    ds, di, dv = dh
    dv = dv + ds * slope(kept[0] - THRESHOLD)
    di = di + dv
    return di, (di @ ut - THRESHOLD * dv, SYNAPSE * di, LEAK * dv)


def alif_start(h):
    v, a = h['membrane'], h['adaptation']
    return h.get('spike', adapted(v, a)), v, a


def lif_syn_start(h):
    return spike(h['membrane'] - THRESHOLD), h['current'], h['membrane']


def one_state(h):
    return (h['state'],)


def gru_sources(h, kept):
    return h[0], h[0], kept[1] * h[0]


LSTM = Kind('w', lambda h: (h['state'], h['memory']), lstm_forward, lstm_backward)
ALIF = Kind('w', alif_start, alif_forward, alif_backward)
KINDS = {
    'rnn': Kind('w', one_state, rnn_forward, rnn_backward),
    'gru': Kind('zrh', one_state, gru_forward, gru_backward, gru_sources),
    'lstm': LSTM,
    'conv_lstm': LSTM,
    'alif': ALIF,
    'alif3': ALIF,
    'lif_syn': Kind('w', lif_syn_start, lif_syn_forward, lif_syn_backward),
}


def forward(kind: Kind, weights: Array, h: tuple, x: Array):
    """The outputs of a layer at all steps, and the arrays that its backward pass needs."""
    width = x.shape[-1]
    w, u = weights[:width], weights[width:]

    def step(h, p):
        new, kept = kind.forward(u, h, p)
        return new, (new, kept)

    _, (new, kept) = jax.lax.scan(step, h, product(x, w))
    old = jax.tree.map(behind, h, new)
    return new[0], (x, w, u, old, kept)


def backward(kind: Kind, stored: tuple, dy: Array, lowest: bool):
    """The gradients of each gate and of the layer's inputs, from the gradient of its outputs."""
    x, w, u, old, kept = stored
    ut = jax.lax.optimization_barrier(u.T)  # transposed once, not at every step

    def step(dh, at):
        h, kept, from_above = at
        d, dh = kind.backward(ut, h, kept, (dh[0] + from_above, *dh[1:]))
        return dh, d

    last = jax.tree.map(lambda h: jnp.zeros_like(h[0]), old)
    _, d = jax.lax.scan(step, last, (old, kept, dy), reverse=True)
    of_inputs, share = flat(x).T @ flat(d), d.shape[-1] // len(kind.gates)
    gates = {}
    for i, (gate, source) in enumerate(zip(kind.gates, kind.sources(old, kept))):
        at = slice(i * share, (i + 1) * share)
        gates[gate] = jnp.concatenate([of_inputs[:, at], flat(source).T @ flat(d[..., at])])
    return gates, None if lowest else product(d, w.T)


def recurrent(name: str, p: dict, hidden: dict, x: Array, lowest: bool):
    """The outputs of a layer, and a function from their gradients to those of its parameters and of
    its inputs.
    """
    kind, of_pictures = KINDS[name], None
    if name == 'conv_lstm':
        kernels = {n: p[n] for n in ('conv_a', 'conv_b')}
        x, of_pictures = jax.vjp(lambda kernels: encoder(kernels, x), kernels)
    weights = jnp.concatenate([p[gate] for gate in kind.gates], -1)
    y, stored = forward(kind, weights, kind.start(hidden), x)

    def pull(dy):
        grads, dx = backward(kind, stored, *dy, lowest and not of_pictures)
        return (grads | of_pictures(dx)[0], None) if of_pictures else (grads, dx)

    return (y,), pull


# cells whose state enters linearly --------------------------------------------------------------


def joined(one, two):
    """Two steps ``h -> a h + p`` of a linear recurrence as one."""
    return one[0] * two[0], two[0] * one[1] + two[1]


def run(a: Array, p: Array, h: Array, associative: bool, reverse: bool = False) -> Array:
    """All states of ``h = a * h + p``; ``a`` is one array for all steps, or one for each."""
    each = a.ndim == p.ndim
    if associative:
        a = a if each else jnp.broadcast_to(a, p.shape)
        end = -1 if reverse else 0
        p = p.at[end].add(a[end] * h)
        return jax.lax.associative_scan(joined, (a, p), reverse=reverse)[1]

    def step(h, at):
        h = (at[0] * h + at[1]) if each else (a * h + at)
        return h, h

    return jax.lax.scan(step, h, (a, p) if each else p, reverse=reverse)[1]


def gated_back(z: Array, v: Array, old: Array, dy: Array, associative: bool):
    """The gradients of both products of a minGRU, from those of its states."""

    def apart(g, z, v, old):
        return g * (v - old) * z * (1 - z), g * z

    zero = jnp.zeros_like(dy[0])
    if associative:
        # the step after multiplies the gradient with its own gate
        later = jnp.concatenate([1 - z[1:], zero[None]])
        return apart(run(later, dy, zero, True, reverse=True), z, v, old)

    def step(g, at):
        z, v, old, dy = at
        g = g + dy
        return g * (1 - z), apart(g, z, v, old)

    return jax.lax.scan(step, zero, (z, v, old, dy), reverse=True)[1]


def mingru(p: dict, hidden: dict, x: Array, associative: bool):
    """The outputs, and a function from their gradients to those of parameters and inputs."""
    z, v, first = sigmoid(product(x, p['z'])), product(x, p['h']), hidden['state']
    h = run(1 - z, z * v, first, associative)

    def pull(dy):
        dz, dv = gated_back(z, v, behind(first, h), *dy, associative)
        grads = {'z': flat(x).T @ flat(dz), 'h': flat(x).T @ flat(dv)}
        return grads, product(dz, p['z'].T) + product(dv, p['h'].T)

    return (h,), pull


def turned(a: Array, b: Array, p: tuple, h: tuple, associative: bool) -> tuple:
    """All states of ``h = (a + ib) h + p`` in real and imaginary parts."""
    if associative:
        z = run(a + 1j * b, p[0] + 1j * p[1], h[0] + 1j * h[1], True)
        return z.real, z.imag

    def step(h, p):
        h = a * h[0] - b * h[1] + p[0], b * h[0] + a * h[1] + p[1]
        return h, h

    return jax.lax.scan(step, h, p)[1]


def turned_back(a: Array, b: Array, dy: tuple, states: tuple, h: tuple, associative: bool):
    """The gradients of a, of b and of the products, from those of the states."""
    zero = jnp.zeros_like(h[0])
    if associative:
        g, q = z = turned_in_reverse(a, b, dy)
        old_re, old_im = behind(h[0], states[0]), behind(h[1], states[1])
        return (g * old_re + q * old_im).sum((0, 1)), (q * old_re - g * old_im).sum((0, 1)), z

    def step(carry, at):
        (g, q, da, db), (dre, dim, re, im) = carry, at
        # g and q are those of the step after, which read these states
        da, db = da + g * re + q * im, db + q * re - g * im
        g, q = a * g + b * q + dre, a * q - b * g + dim
        return (g, q, da, db), (g, q)

    (g, q, da, db), z = jax.lax.scan(step, (zero,) * 4, (*dy, *states), reverse=True)
    da, db = da + g * h[0] + q * h[1], db + q * h[0] - g * h[1]
    return da.sum(0), db.sum(0), z


def turned_in_reverse(a: Array, b: Array, dy: tuple) -> tuple:
    z = dy[0] + 1j * dy[1]
    z = run(a - 1j * b, z, jnp.zeros_like(z[0]), True, reverse=True)
    return z.real, z.imag


def pair_loop(a: Array, b: Array, weights: tuple, h: tuple, x: Array, associative: bool):
    """Both parts of the states of an LRU, and a function from their gradients to those of a, b, the
    weights and the inputs.
    """
    states = turned(a, b, tuple(product(x, w) for w in weights), h, associative)

    def pull(dy):
        da, db, d = turned_back(a, b, dy, states, h, associative)
        of_weights = [flat(x).T @ flat(part) for part in d]
        return da, db, of_weights, sum(product(part, w.T) for part, w in zip(d, weights))

    return states, pull


def lru(p: dict, hidden: dict, x: Array, associative: bool):
    """The outputs, and a function from their gradients to those of parameters and inputs."""

    def parts(nu, theta):
        r, angle = radius_of(nu), jnp.exp(theta)
        return r * jnp.cos(angle), r * jnp.sin(angle)

    (a, b), of_parts = jax.vjp(parts, p['nu'], p['theta'])
    weights, h = (p['b_re'], p['b_im']), (hidden['re'], hidden['im'])
    y, of_loop = pair_loop(a, b, weights, h, x, associative)

    def pull(dy):
        da, db, of_weights, dx = of_loop(dy)
        return dict(zip(('nu', 'theta', 'b_re', 'b_im'), (*of_parts((da, db)), *of_weights))), dx

    return y, pull


def lru_complex(p: dict, hidden: dict, x: Array, associative: bool):
    """The same of complex parameters; JAX's gradient of a real loss is the conjugate one."""
    weights, h = (p['b'].real, p['b'].imag), (hidden['state'].real, hidden['state'].imag)
    y, of_loop = pair_loop(p['lam'].real, p['lam'].imag, weights, h, x, associative)

    def pull(dy):
        da, db, (re, im), dx = of_loop(dy)
        return {'lam': da - 1j * db, 'b': re - 1j * im}, dx

    return y, pull


LINEAR = {'lru': lru, 'lru_complex': lru_complex, 'mingru': mingru}


# a whole network --------------------------------------------------------------------------------


def gradient(spec, params: dict, hidden: dict, xs: Array, ys: Array, associative=False) -> dict:
    """The gradient of the mean over time of each step's mean squared error, by parameter."""
    pulls, x, names = [], (xs,), {n[:-1] for n in params if n[-1].isdigit()}
    for k in range(spec.layers):
        given = of_layer(names, params, k), of_layer(spec.cell.states, hidden, k)
        below = x[0] if len(x) == 1 else jnp.concatenate(x, -1)
        if spec.kind in LINEAR:
            x, pull = LINEAR[spec.kind](*given, below, associative)
        else:
            x, pull = recurrent(spec.kind, *given, below, k == 0)
        pulls.append(pull)
    out = jnp.split(params['out'], len(x))
    signal = 2 / ys.size * (sum(flat(part) @ w for part, w in zip(x, out)) - flat(ys))
    grads = {'out': jnp.concatenate([flat(part).T @ signal for part in x])}
    dy = [(signal @ w.T).reshape(part.shape) for part, w in zip(x, out)]
    for k in reversed(range(spec.layers)):
        of_k, dx = pulls[k](tuple(dy))
        grads |= {f'{name}{k}': g for name, g in of_k.items()}
        dy = [] if k == 0 else jnp.split(dx, len(dy), -1)
    return grads
