"""A GRU and an LSTM as plain functions, and their online gradient by reverse mode, which shares no
code with the library.

``params``: ``W`` of shape ``(inputs + units, gates * units)``, rows for the input first, ``b`` for
the gates, and for some GRUs ``bn``. Gates are in the order r, z, n or i, f, g, o.

``seen`` is applied to the old state where a product reads it, ``fed`` to all that a product reads.
The gradient of a step sees its weights, but the old state in products as a constant; the trace
follows the states position by position, with all that products read as constants.
"""

import jax
import jax.numpy as jnp

same, constant = (lambda a: a), jax.lax.stop_gradient
sigmoid = jax.nn.sigmoid


def gru(p, carry, x, seen=same, fed=same):
    """The reset gate acts on the product with the old state."""
    (h,) = carry
    n_in = x.shape[-1]
    xi = fed(x) @ p['W'][:n_in] + p['b']
    xr, xz, xn = jnp.split(xi, 3, -1)
    hr, hz, hn = jnp.split(fed(seen(h)) @ p['W'][n_in:], 3, -1)
    r, z = sigmoid(xr + hr), sigmoid(xz + hz)
    n = jnp.tanh(xn + r * (hn + p.get('bn', 0.0)))
    return ((1 - z) * n + z * h,)


def gru_reset_first(p, carry, x, seen=same, fed=same):
    """The reset gate acts on the old state before the product."""
    (h,) = carry
    units = h.shape[-1]
    rz = fed(jnp.concatenate([x, seen(h)], -1)) @ p['W'][:, : 2 * units] + p['b'][: 2 * units]
    r, z = jnp.split(sigmoid(rz), 2, -1)
    read = fed(jnp.concatenate([x, r * seen(h)], -1))
    n = jnp.tanh(read @ p['W'][:, 2 * units :] + p['b'][2 * units :])
    return ((1 - z) * n + z * h,)


def lstm(p, carry, x, seen=same, fed=same, forget=0.0):
    h, c = carry
    y = fed(jnp.concatenate([x, seen(h)], -1)) @ p['W'] + p['b']
    i, f, g, o = jnp.split(y, 4, -1)
    c = sigmoid(f + forget) * c + sigmoid(i) * jnp.tanh(g)
    return sigmoid(o) * jnp.tanh(c), c


def lstm_forgetting_late(p, carry, x, **options):
    """Its forget gate is opened by 1 more than its bias says."""
    return lstm(p, carry, x, forget=1.0, **options)


def loss(outputs, target):
    """Of the first array of the outputs, the visible state."""
    return jnp.sum((jax.tree.leaves(outputs)[0] - target) ** 2)


def online_gradient(step, params, carry, xs, ys):
    """The sum of all steps' gradients, losses on the first state."""

    def total(params):
        old, losses = carry, 0.0
        for x, y in zip(xs, ys):
            losses += loss(step(params, old, x, seen=constant), y)
            old = step(params, old, x, fed=constant)
        return losses

    return jax.jit(jax.grad(total))(params)
