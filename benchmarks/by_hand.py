"""Backpropagation through time as an expert writes it by hand, for the networks of ``models.py``.

Values that do not depend on the previous state are one large product: the inputs' products, the
readout and the loss in the forward pass, every weight's gradient in the backward pass. The loops
over time hold the products with the recurrent weights alone. Nothing of ``braintrace`` is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.nn import sigmoid


class Kind(NamedTuple):
    """A kind of layer; ``u`` are the recurrent weights of all its gates side by side.

    ``gates`` are the names of its weights. ``forward(u, h, p) -> (new states, kept)`` takes the old
    states and the products ``p`` of the input; the backward pass needs ``kept``.
    ``backward(u.T, h, kept, dh)`` turns gradients of the new states into gradients of the products
    and of the old states. ``sources(h, kept)`` are the arrays with which each gate's recurrent
    weights are multiplied.
    """

    gates: str
    states: tuple
    forward: Any
    backward: Any
    sources: Any


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


KINDS = {
    'rnn': Kind('w', ('state',), rnn_forward, rnn_backward, lambda h, kept: (h[0],)),
    'gru': Kind(
        'zrh', ('state',), gru_forward, gru_backward, lambda h, kept: (h[0], h[0], kept[1] * h[0])
    ),
    'lstm': Kind('w', ('state', 'memory'), lstm_forward, lstm_backward, lambda h, kept: (h[0],)),
}


def flat(x: Array) -> Array:
    """Merge time and batch into one axis of rows."""
    return x.reshape(-1, x.shape[-1])


def forward(kind: Kind, weights: Array, h: tuple, x: Array):
    """The outputs of a layer at all steps, and the arrays that its backward pass needs."""
    width = x.shape[-1]
    w, u = weights[:width], weights[width:]
    products = (flat(x) @ w).reshape(*x.shape[:2], -1)

    def step(h, p):
        new, kept = kind.forward(u, h, p)
        return new, (new, kept)

    _, (new, kept) = jax.lax.scan(step, h, products)
    old = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest[:-1]]), h, new)
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
    gates = []
    for i, source in enumerate(kind.sources(old, kept)):
        at = slice(i * share, (i + 1) * share)
        gates.append(jnp.concatenate([of_inputs[:, at], flat(source).T @ flat(d[..., at])]))
    return gates, None if lowest else (flat(d) @ w.T).reshape(x.shape)


def gradient(name: str, layers: int, params: dict, hidden: dict, xs: Array, ys: Array) -> dict:
    """The gradient of the mean over time of each step's mean squared error, by parameter."""
    kind, stored, x = KINDS[name], [], xs
    for k in range(layers):
        weights = jnp.concatenate([params[f'{gate}{k}'] for gate in kind.gates], -1)
        x, each = forward(kind, weights, tuple(hidden[f'{s}{k}'] for s in kind.states), x)
        stored.append(each)
    signal = 2 / ys.size * (flat(x) @ params['out'] - flat(ys))
    grads = {'out': flat(x).T @ signal}
    dy = (signal @ params['out'].T).reshape(x.shape)
    for k in reversed(range(layers)):
        gates, dy = backward(kind, stored[k], dy, lowest=k == 0)
        grads |= {f'{gate}{k}': g for gate, g in zip(kind.gates, gates)}
    return grads
