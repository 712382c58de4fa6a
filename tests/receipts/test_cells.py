"""The known cells in JAX: their slopes, and what they refuse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import braintrace
from braintrace.nn import surrogate
from braintrace.receipts import Cell
from tests.compare import assert_close
from tests.precision import float64 as float64

SLOPES = {
    'triangle': {'width': 1.5, 'height': 0.4},
    'sigmoid': {'slope': 3.0},
    'arctan': {'slope': 2.5},
    'multi_gaussian': {'width': 0.5, 'scale': 6.0, 'height': 0.15},
}


@pytest.mark.parametrize('name', SLOPES)
def test_a_slope_is_that_of_its_name(name):
    cell = Cell.lif(theta=0.8, surrogate={'name': name, 'parameters': SLOPES[name]})
    params = {'W': jnp.zeros((2, 1)), 'W_out': jnp.ones((1, 1))}
    spike = getattr(surrogate, name)(**SLOPES[name])

    def after(v):
        carry = {'V': v * jnp.ones((1, 1)), 'z': jnp.zeros((1, 1))}
        return cell(params, carry, jnp.zeros((1, 1)))[0].sum()

    for v in (0.3, 0.9, 1.4):
        alpha = cell.constants['alpha']
        want = jax.grad(lambda v: spike((alpha * v - 0.8) / 0.8))(v)
        assert_close(jax.grad(after)(v), want)
        assert float(after(v)) == float(alpha * v > 0.8)


@pytest.mark.parametrize(
    ('make', 'said'),
    [
        (lambda: Cell.rnn(-0.1), 'leak is -0.1'),
        (lambda: Cell.lif(theta=0.0), 'theta is 0.0'),
        (lambda: Cell.lif(tau=float('nan')), 'tau nan'),
        (lambda: Cell.alif(beta='much'), "beta is 'much'"),
        (lambda: Cell.rnn(tau_out=0.0), 'tau 0.0'),
        (lambda: Cell.lif(surrogate={'name': 'relu', 'parameters': {}}), 'give a name and its'),
        (lambda: Cell.lif(surrogate={'name': 'arctan', 'parameters': {}}), 'give a name and its'),
    ],
)
def test_a_bad_constant_is_refused(make, said):
    with pytest.raises(braintrace.errors.OptionError, match=said):
        make()


@pytest.mark.parametrize('make', [lambda: Cell.rnn(1.0), lambda: Cell.lif(1e20)])
def test_a_decay_that_is_not_below_one_is_refused(make):
    with pytest.raises(braintrace.errors.OptionError, match='a decay is below 1'):
        make()
