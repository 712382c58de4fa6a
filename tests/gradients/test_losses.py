"""A loss under a mask with a penalty beside it, against the oracles, which know of neither; and the
three-factor rule: a given signal in the place of the derivative of a loss.
"""

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
from tests.compare import added, assert_close
from tests.gradients.harness import over_sequence
from tests.models.model import squared

MASK = np.array([1.0, 0.0, 0.5, 0.0, 0.0, 0.0])
RULE = rules.d_rtrl()
ROWS = ['gru', 'spiking_two', 'lstm_fused']


def penalty(output, _=None):
    return (output**3 + output).sum()


def both(output, target):
    return braintrace.Penalised(squared(output, target), penalty(output))


def cases(name):
    """A row with its loss, with the penalty alone, and with both where targets are missing."""
    case = models.case(name)
    missing = (MASK == 0).reshape(-1, *(1,) * (case.ys.ndim - 1))
    ys = np.where(missing, np.nan, case.ys)
    loss = dataclasses.replace(case, loss=squared)
    return (
        loss,
        dataclasses.replace(loss, loss=penalty),
        dataclasses.replace(case, ys=ys, loss=both),
    )


WEIGHTS = {  # of the losses and of the penalties
    'sum': (MASK, np.ones(6)),
    'mean': (MASK / MASK.sum(), np.full(6, 1 / 6)),
}


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name', ROWS)
@pytest.mark.parametrize('reduction', ['mean', 'sum'])
def test_the_mask_weighs_the_loss_and_not_the_penalty(name, reduction):
    loss, alone, case = cases(name)
    grads, losses, *_ = over_sequence(case, RULE, 3, reduction=reduction, mask=MASK)
    parts = zip((loss, alone), WEIGHTS[reduction], strict=True)
    assert_close(grads, added([oracles.total(oracles.dense_recursion(c), w) for c, w in parts]))
    assert list(np.isnan(losses)) == list(MASK == 0)


# -- a modulator -----------------------------------------------------------------------------------


def linear(output, m):
    return (m * output).sum()


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name', ['leaky', 'minimal_rnn', 'gru', 'lora'])
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
