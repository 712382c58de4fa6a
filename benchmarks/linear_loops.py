"""Backpropagation through time by hand where the state enters linearly: LRU and minGRU.

Outside of the loops stand the products, the gates, the readout and the weights' gradients; inside
of them, ``h = a * h + p`` forward and the same in reverse backward. ``associative`` runs both as
associative scans.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from cells import radius_of
from jax import Array
from jax.nn import sigmoid


def flat(x: Array) -> Array:
    """Merge time and batch into one axis of rows."""
    return x.reshape(-1, x.shape[-1])


def product(x: Array, w: Array) -> Array:
    return (flat(x) @ w).reshape(*x.shape[:-1], -1)


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


def behind(first: Array, rest: Array) -> Array:
    """The states before each step."""
    return jnp.concatenate([first[None], rest[:-1]])


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
