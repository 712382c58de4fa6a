"""Decays that are the same at every step and for every lane: the gradient through a trace that a
window wrote is that of reverse mode through both sequences.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, rules
from tests import oracles
from tests.compare import assert_close
from tests.gradients.harness import quick
from tests.models import squared

B, I, N, T = 3, 2, 4, 5
RNG = np.random.default_rng(0)
PARAMS = {
    name: RNG.normal(size=shape)
    for name, shape in {'w': (I, N), 'u': (I, N), 'g': (I, N), 'a': (N,), 'b': (N,)}.items()
}


def leak(p, h, x):
    """One leak a unit, learnt."""
    a = jax.nn.sigmoid(braintrace.element_wise(p['a']))
    h = a * h + (1 - a) * braintrace.matmul(x, p['w'])
    return h, h


def number(p, h, x):
    """One leak for all units."""
    h = 0.8 * h + jnp.tanh(braintrace.matmul(x, p['w']))
    return h, h


def of_lanes(p, h, x):
    """Another leak for each lane."""
    h = jnp.linspace(0.5, 0.9, B)[:, None] * h + braintrace.matmul(x, p['w'])
    return h, h


def rotation(p, h, x):
    r, t = (braintrace.element_wise(p[name]) for name in 'ab')
    r = jax.nn.sigmoid(r)
    a, b, re, im = r * jnp.cos(t), r * jnp.sin(t), *h
    new = (
        a * re - b * im + braintrace.matmul(x, p['w']),
        b * re + a * im + braintrace.matmul(x, p['u']),
    )
    return jnp.concatenate(new, -1), new


def one_way(p, h, x):
    """A current that decays, and a membrane that no other state reads back."""
    current, membrane = h
    a, b = (braintrace.element_wise(p[name]) for name in 'ab')
    current = jax.nn.sigmoid(a) * current + braintrace.matmul(x, p['w'])
    membrane = jnp.exp(-jnp.exp(b)) * membrane + current
    return jnp.tanh(membrane), (current, membrane)


def beside_a_gate(p, h, x):
    """A group with a constant leak, and one whose gate reads the input."""
    slow, gated = h
    slow = jax.nn.sigmoid(braintrace.element_wise(p['a'])) * slow + braintrace.matmul(x, p['w'])
    z = jax.nn.sigmoid(braintrace.matmul(x, p['g']))
    gated = (1 - z) * gated + z * braintrace.matmul(x, p['u'])
    return slow * gated, (slow, gated)


def complex_leak(p, h, x):
    a, b = (braintrace.element_wise(p[name]) for name in 'ab')
    h = jnp.exp(-jnp.exp(a) + 1j * b) * h + braintrace.matmul(x, p['w'])
    return h.real + 2 * h.imag, h


CELLS = {
    'leak': (leak, 1),
    'number': (number, 1),
    'of_lanes': (of_lanes, 1),
    'rotation': (rotation, 2),
    'one_way': (one_way, 2),
    'beside_a_gate': (beside_a_gate, 2),
    'complex': (complex_leak, 1),
}


def setting(name):
    step, states = CELLS[name]
    dtype = complex if name == 'complex' else float
    first = tuple(jnp.asarray(RNG.normal(size=(B, N)), dtype) for _ in range(states))
    first = first if states > 1 else first[0]
    xs = jnp.asarray(RNG.normal(size=(2 * T, B, I)))
    width = jax.eval_shape(step, PARAMS, first, xs[0])[0].shape
    return step, first, xs, jnp.asarray(RNG.normal(size=(2 * T, *width)))


@pytest.mark.tier(quick=2)
@pytest.mark.parametrize('resets', [False, True])
@pytest.mark.parametrize('name', CELLS)
def test_a_trace_that_a_window_wrote_has_the_whole_past(name, resets):
    step, first, xs, ys = setting(name)
    online = functional.online(step, rules.d_rtrl())
    flags, counts = np.zeros((2 * T, B), bool), np.arange(2 * T) >= T
    flags[2, 0] = flags[T + 1, 1] = resets
    given = lambda part: {'reset': (flags[part], first)} if resets else {}
    before, after = slice(0, T), slice(T, 2 * T)
    run = quick(online.sequence_grad(squared, reduction='sum'))
    state = online.init(PARAMS, first, xs[0])
    state = run(PARAMS, state, xs[before], ys[before], **given(before))[3]
    want = oracles.by_time(step, PARAMS, first, xs, ys, squared, counts, (flags, first))
    for window in (None, 2):
        run = quick(online.sequence_grad(squared, reduction='sum', window=window))
        got = run(PARAMS, state, xs[after], ys[after], **given(after))[0]
        assert_close(got, want, 1e-10)
