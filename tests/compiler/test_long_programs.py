"""Steps of many equations: no analysis recurses along them, or follows a value once for each way to
it.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, rules
from tests.gradients.harness import assert_exact
from tests.precision import float64 as float64

B, I, N, T = 2, 3, 4, 3
RNG = np.random.default_rng(0)
P = {'w': RNG.normal(size=(I, N))}
H, XS, YS = np.zeros((B, N)), RNG.normal(size=(T, B, I)), RNG.normal(size=(T, B, N))
LONG = 1100  # more than Python recurses
OFTEN = 40  # a program of 2^40 equations


def drive(p, x):
    return braintrace.matmul(x, p['w'])


def long(y):
    for _ in range(LONG):
        y = -y
    return y


def doubled(y):
    """The sum of equal terms, again and again."""
    for _ in range(OFTEN):
        y = y + y
    return y * 0.5**OFTEN


def rolled(f):
    """The state moves behind all other equations."""
    return lambda p, h, x: 0.5 * jnp.roll(f(h), 1, -1) + drive(p, x)


def stacked(f):
    """Two states in one array, to which the equations are applied."""

    def transition(p, h, x):
        first = 0.9 * h[0] + drive(p, x)
        return f(jnp.stack([first, 0.5 * h[1] + first]))

    return transition


def padded(f):
    """Two states put together as a sum of padded rows."""
    row = lambda h, k: jnp.pad(h[None], ((k, 1 - k), (0, 0), (0, 0)))
    return lambda p, h, x: f(row(0.9 * h[0] + drive(p, x), 0) + row(h[0], 1))


def branch(f):
    """A weight that is a long function of a parameter, made inside of a branch."""
    taken = lambda p, h, x: 0.9 * h + braintrace.matmul(x, f(p['w']))
    return lambda p, h, x: jax.lax.cond(x.sum() > -99, taken, lambda p, h, x: 0.5 * h, p, h, x)


STEPS = {'rolled': rolled, 'stacked': stacked, 'padded': padded, 'branch': branch}


def compiled(transition, carry):
    def cell(p, h, x):
        h = transition(p, h, x)
        return h.reshape(-1)[:N], h

    learner = functional.online(cell, rules.d_rtrl())
    jax.eval_shape(learner.init, P, carry, XS[0])
    return learner


@pytest.mark.filterwarnings('ignore::braintrace.errors.BraintraceWarning')
@pytest.mark.parametrize('f', [long, doubled])
@pytest.mark.parametrize('name', STEPS)
def test_the_length_of_a_step_changes_nothing_of_what_is_found(name, f):
    carry = np.stack([H, H]) if name in ('stacked', 'padded') else H
    found, short = (compiled(STEPS[name](g), carry) for g in (f, lambda y: 1.0 * y))
    assert [d.kind for d in found.graph.findings] == [d.kind for d in short.graph.findings]
    assert found.report.exact == short.report.exact


@pytest.mark.slow
def test_a_parameter_that_meets_sums_of_equal_terms_has_its_gradient():
    """Its gradient is a sum over the steps of as many terms, of which each is summed once."""

    def cell(p, h, x):
        h = jnp.tanh(0.9 * h + drive(p, x))
        return h @ doubled(p['out']), h

    params = P | {'out': RNG.normal(size=(N, N))}
    assert_exact(cell, rules.d_rtrl(), params, H, XS, YS)
