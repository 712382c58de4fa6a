"""The three-factor rule: a given signal in the place of the derivative of a loss."""

import dataclasses

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import rules
from braintrace.errors import StructureError
from tests import models, oracles
from tests.compare import assert_close
from tests.gradients.harness import over_sequence
from tests.tiers import slow

RULE = rules.d_rtrl()
ROWS = ['leaky', *(pytest.param(n, marks=slow) for n in ('minimal_rnn', 'gru', 'lora'))]


def linear(output, m):
    return (m * output).sum()


@pytest.mark.tier(quick=2)
@pytest.mark.parametrize('name', ROWS)
def test_a_modulator_is_the_linear_loss(name):
    case = models.case(name, linear)
    ours = dataclasses.replace(case, loss=lambda output, m: braintrace.modulated(m, output))
    grads, losses, *_ = over_sequence(ours, RULE, None)
    assert_close(grads, oracles.total(oracles.dense_recursion(case)), 1e-10)
    assert losses.shape == (len(case.xs),)


H = jnp.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    'm, want',
    [
        (2, 30.0),
        (0.5 * u.mV, 7.5),
        (jnp.array([1.0, -1]), -9.0),
        (jnp.array([[1.0, 0, 0]]), 3.0),
        (jnp.ones((2, 3)), 15.0),
    ],
)
def test_modulators_have_the_leading_axes_or_broadcast(m, want):
    assert float(braintrace.modulated(m, H)) == want
    assert float(braintrace.modulated(m, H * u.mV)) == want
    numbers = np.asarray(u.get_magnitude(m), float)
    numbers = numbers.reshape(*numbers.shape, *[1] * (2 - numbers.ndim))
    grad = jax.grad(lambda h: braintrace.modulated(m, h))(H)
    assert_close(grad, np.broadcast_to(numbers, H.shape), 1e-6)


def test_no_gradient_passes_through_the_modulator():
    grad = jax.grad(lambda h: braintrace.modulated(h**2, h))(H)
    assert_close(grad, H**2, 1e-6)


@pytest.mark.parametrize(
    'm, h, found',
    [
        (jnp.ones(3), H, r'm has shape \[3\] and h \[2, 3\]'),
        (jnp.ones((3, 2)), H, r'm has shape \[3, 2\] and h \[2, 3\]'),
        (jnp.ones((1, 2, 3)), H, r'm has shape \[1, 2, 3\] and h \[2, 3\]'),
        (jnp.ones(2, int), H, r'm is int\d+\[2\]; give real floats'),
        (True, H, 'm is a bool'),
        (None, H, 'm is a NoneType'),
        (1.0, H.astype(bool), r'h is bool\[2, 3\]'),
        (1.0, H.astype(complex), 'h is complex.*imaginary'),
        (1.0, brainstate.HiddenState(H), 'h is a HiddenState; .*`.value`'),
    ],
)
def test_other_shapes_and_types_are_refused(m, h, found):
    with pytest.raises(StructureError, match=found):
        braintrace.modulated(m, h)
