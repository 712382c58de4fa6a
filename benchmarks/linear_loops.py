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


def mingru(p: dict, hidden: dict, x: Array, lowest: bool, associative: bool):
    """The outputs, and a function from their gradient to those of parameters and inputs."""
    weights = jnp.concatenate([p['z'], p['h']], -1)
    z, v = jnp.split(product(x, weights), 2, -1)
    z = sigmoid(z)
    h = run(1 - z, z * v, hidden['state'], associative)

    def pull(dy):
        # the step after multiplies the gradient with its own gate
        later = jnp.concatenate([1 - z[1:], jnp.zeros_like(z[:1])])
        g = run(later, dy, jnp.zeros_like(dy[0]), associative, reverse=True)
        dz = g * (v - behind(hidden['state'], h)) * z * (1 - z)
        d = jnp.concatenate([dz, g * z], -1)
        of_z, of_h = jnp.split(flat(x).T @ flat(d), 2, -1)
        return {'z': of_z, 'h': of_h}, None if lowest else product(d, weights.T)

    return h, pull


def rotated(a: Array, b: Array, p: tuple, h: tuple, reverse: bool = False) -> tuple:
    """All states of ``h = (a + ib) h + p`` in real and imaginary parts."""

    def step(h, p):
        h = a * h[0] - b * h[1] + p[0], b * h[0] + a * h[1] + p[1]
        return h, h

    return jax.lax.scan(step, h, p, reverse=reverse)[1]


def turned(a: Array, b: Array, p: tuple, h: tuple, associative: bool, reverse: bool = False):
    if not associative:
        return rotated(a, b, p, h, reverse)
    z = run(a + 1j * b, p[0] + 1j * p[1], h[0] + 1j * h[1], True, reverse)
    return z.real, z.imag


def pair_loop(a: Array, b: Array, weights: Array, h: tuple, x: Array, associative: bool):
    """The outputs of an LRU, and a function from their gradient to those of a, b, the weights and
    the products.
    """
    re, im = turned(a, b, tuple(jnp.split(product(x, weights), 2, -1)), h, associative)

    def pull(dy):
        zero = jnp.zeros_like(h[0])
        given = tuple(jnp.split(dy, 2, -1))
        g, q = turned(a, -b, given, (zero, zero), associative, reverse=True)
        old_re, old_im = behind(h[0], re), behind(h[1], im)
        da = (g * old_re + q * old_im).sum((0, 1))
        db = (q * old_re - g * old_im).sum((0, 1))
        d = jnp.concatenate([g, q], -1)
        return da, db, jnp.split(flat(x).T @ flat(d), 2, -1), d

    return jnp.concatenate([re, im], -1), pull


def lru(p: dict, hidden: dict, x: Array, lowest: bool, associative: bool):
    """The outputs, and a function from their gradient to those of parameters and inputs."""
    weights = jnp.concatenate([p['b_re'], p['b_im']], -1)

    def parts(nu, theta):
        r, angle = radius_of(nu), jnp.exp(theta)
        return r * jnp.cos(angle), r * jnp.sin(angle)

    (a, b), of_parts = jax.vjp(parts, p['nu'], p['theta'])
    y, of_loop = pair_loop(a, b, weights, (hidden['re'], hidden['im']), x, associative)

    def pull(dy):
        da, db, of_weights, d = of_loop(dy)
        values = *of_parts((da, db)), *of_weights
        dx = None if lowest else product(d, weights.T)
        return dict(zip(('nu', 'theta', 'b_re', 'b_im'), values)), dx

    return y, pull


def lru_complex(p: dict, hidden: dict, x: Array, lowest: bool, associative: bool):
    """The same of complex parameters; JAX's gradient of a real loss is the conjugate one."""
    weights = jnp.concatenate([p['b'].real, p['b'].imag], -1)
    h = hidden['state'].real, hidden['state'].imag
    y, of_loop = pair_loop(p['lam'].real, p['lam'].imag, weights, h, x, associative)

    def pull(dy):
        da, db, (re, im), d = of_loop(dy)
        dx = None if lowest else product(d, weights.T)
        return {'lam': da - 1j * db, 'b': re - 1j * im}, dx

    return y, pull


LINEAR = {'lru': lru, 'lru_complex': lru_complex, 'mingru': mingru}
