"""States that move linearly run as associative scans, with the numbers of the loop step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace._executor import MOST_COUPLED, TracedStep, blocks
from tests.compare import assert_close
from tests.executor.test_traced_step import (
    STEPS,
    B,
    I,
    N,
    T,
    draw,
    expected,
    numbers,
    parts_of,
    weights,
)
from tests.precision import float64  # noqa: F401

A, TURN = np.linspace(0.3, 0.95, N), np.linspace(0.1, 2.0, N)


def minlstm(w, hc, x):
    f, i = jax.nn.sigmoid(x @ w['x']), jax.nn.sigmoid(x @ w['x'] / 2)
    c = (f * hc[1] + i * jnp.tanh(x @ w['x'])) / (f + i)
    h = jnp.tanh(c)
    return (h, c), h


def lru(w, z, x):
    a, b, u = A * np.cos(TURN), A * np.sin(TURN), x @ w['x']
    new = a * z[0] - b * z[1] + u, b * z[0] + a * z[1] - u / 2
    return new, new[0] * new[1]


def lru_complex(w, z, x):
    z = A * np.exp(1j * TURN) * z + x @ w['x']
    return z, z.real * z.imag


def through_complex(w, z, x):
    """Two real states that are turned as one complex number."""
    both = jax.lax.complex(*z) * (A * np.exp(1j * TURN)) + x @ w['x']
    return (both.real, both.imag), both.imag


def with_resets(w, z, x):
    z = tuple(jnp.where(x[:, :1] > 0, h, 0.5) for h in z)
    return lru(w, z, x)


def of_a_gate(w, hs, x):
    """A linear state behind a nonlinear one, and one behind that."""
    h = jnp.tanh(hs[0] * x[:, :1])
    one = jax.nn.sigmoid(h) * hs[1] + h
    two = jnp.tanh(hs[2]) * one + 0.5
    return (h, one, two), one * two


def swapped(w, hs, x):
    return (hs[1], 0.5 * hs[0] + x @ w['x']), hs[0]


LINEAR = {
    **{name: STEPS[name] for name in ('linear', 'delay', 'zeros')},
    'lru': (lru, lambda h: (h, -h)),
    'lru_complex': (lru_complex, lambda h: h * (1 + 2j)),
    'through_complex': (through_complex, lambda h: (h, -h)),
    'minlstm': (minlstm, lambda h: (h, h)),
    'swapped': (swapped, lambda h: (h, -h)),
    'with_resets': (with_resets, lambda h: (h, -h)),
}
ALSO = {'of_a_gate': (of_a_gate, lambda h: (h, h, h)), 'random': STEPS['random']}
ALL = LINEAR | ALSO


def traced(name):
    step, of = ALL[name]
    state = of(jnp.full((B, N), 0.1))
    w, x = weights(), draw(B, I)
    return step, state, w, TracedStep(parts_of(step), w, state, x, associative=True)


@pytest.mark.tier(quick=2, one_in=2)
@pytest.mark.parametrize('length', [1, T])
@pytest.mark.parametrize('size', ['whole', 'blocks'])
@pytest.mark.parametrize('name', ALL)
def test_a_linear_loop_gives_what_the_loop_step_by_step_gives(name, size, length, monkeypatch):
    if size == 'blocks':  # of three steps, and one is left
        monkeypatch.setattr(blocks, 'most_steps', lambda bytes_of_one: 3)
    step, state, w, by_parts = traced(name)
    xs, counts = draw(length, B, I), jnp.arange(length) % 3 != 1
    got = jax.jit(lambda *args: (*(r := by_parts.loop(*args, length, counts))[:3], r[3].all))(
        w, state, xs
    )
    wanted = expected(step, w, state, xs, counts)
    got, wanted = (jax.tree.map(numbers, tree) for tree in (got, wanted))
    assert_close(got, wanted, relative=1e-12, absolute=1e-14)


def linear_carries(step, state):
    """The carries of each linear loop."""
    by_parts = TracedStep(parts_of(step), weights(), state, draw(B, I), associative=True)
    return [loop.carries for loop in by_parts.parts.loops if loop.linear]


@pytest.mark.parametrize('name', LINEAR)
def test_a_linear_step_has_no_other_loop(name):
    step, of = LINEAR[name]
    state = of(jnp.full((B, N), 0.1))
    found = [k for carries in linear_carries(step, state) for k in carries]
    assert sorted(found) == list(range(len(jax.tree.leaves(state))))


def test_a_linear_state_beside_others_has_a_loop_of_its_own():
    step, state = ALSO['of_a_gate'][0], (jnp.ones((B, N)),) * 3
    assert linear_carries(step, state) == [(1,)]


NOT_LINEAR = {
    'a product of states': lambda h, x: h * h,
    'a power': lambda h, x: h**2,
    'a quotient': lambda h, x: x / h,
    'a choice by the state': lambda h, x: jnp.where(h > 0, h, 2 * h),
    'a bound': lambda h, x: jnp.minimum(h, 1.0),
    'a sum over positions': lambda h, x: h + h.sum(-1, keepdims=True),
    'neighbours': lambda h, x: jnp.roll(h, 1, -1) + x,
    'another precision': lambda h, x: (h.astype(jnp.float32) * 0.5).astype(h.dtype) + x,
    'fewer digits': lambda h, x: jax.lax.reduce_precision(h, 8, 7) + x,
    'an integer on the way': lambda h, x: h.astype(int).astype(h.dtype) / 2 + x,
    'a conjugate': lambda h, x: jnp.conj(h + 1j * x) * 0.5,
    'a part of a complex state': lambda h, x: h.real * (0.5 + 1j) + x,
    'an integer': lambda h, x: 3 * h + 1,
}
KINDS = {'a conjugate': complex, 'a part of a complex state': complex, 'an integer': int}


@pytest.mark.parametrize('name', NOT_LINEAR)
def test_what_is_not_proved_linear_runs_step_by_step(name):
    def step(w, h, x):
        h = NOT_LINEAR[name](h, x @ w['x'])
        return h, h

    state = jnp.ones((B, N), KINDS.get(name, float))
    assert linear_carries(step, state) == []


def test_a_product_of_two_states_runs_step_by_step():
    def step(w, hs, x):
        return (hs[0] * hs[1], 0.5 * hs[1] + 0.1 * hs[0]), hs[0]

    assert linear_carries(step, (jnp.ones((B, N)),) * 2) == []


def test_many_coupled_states_run_step_by_step():
    def ring(w, hs, x):
        return (*(0.5 * h for h in hs[1:]), hs[0] + x @ w['x']), hs[0]

    assert linear_carries(ring, (jnp.ones((B, N)),) * MOST_COUPLED) == [tuple(range(MOST_COUPLED))]
    assert linear_carries(ring, (jnp.ones((B, N)),) * (MOST_COUPLED + 1)) == []


@pytest.mark.parametrize(
    'how, backend, found',
    [
        ('auto', 'cpu', False),
        ('auto', 'gpu', True),
        ('sequential', 'gpu', False),
        ('associative', 'cpu', True),
    ],
)
def test_a_policy_says_which_way_and_auto_asks_the_backend(how, backend, found, monkeypatch):
    monkeypatch.setattr(jax, 'default_backend', lambda: backend)
    assert braintrace.Policy(linear_loops=how).associative is found


def test_another_way_is_refused():
    with pytest.raises(braintrace.OptionError, match="linear_loops is 'fast'; choose one of"):
        braintrace.Policy(linear_loops='fast')
