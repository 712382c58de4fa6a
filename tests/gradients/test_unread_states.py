"""States that no new state reads position by position, such as the h of an LSTM: their traces are
there for whoever reads the old state itself, whatever program wrote them.
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import nn
from tests.compare import added, assert_close

STEPS = 22


# a loss that reads the old state itself -----------------------------------------------------------

XS = np.random.default_rng(0).standard_normal((STEPS, 2, 3))
WEIGHTS = np.random.default_rng(1).standard_normal((2, 4))


@pytest.fixture
def learner():
    with brainstate.environ.context(precision=64):
        brainstate.random.seed(0)
        cell = nn.LSTMCell(3, 4)
        return braintrace.compile(cell, 'D_RTRL', jnp.zeros((2, 3)), batch_size=2)


LOSSES = {
    'new': lambda old, model: WEIGHTS * model.h.value**2,
    'old': lambda old, model: WEIGHTS * old**2,
    'cell': lambda old, model: jnp.cos(model.c.value),
}


def gradient(learner, of, start, stop, window):
    def step_fn(x):
        old = learner.model.h.value
        learner(x)
        return jnp.sum(LOSSES[of](old, learner.model))

    xs = XS[start:stop]
    return learner.etrace_grad(xs, step_fn=step_fn, window=window, reduction='sum').grads


PROGRAMS = [  # the loss of the new state at step t is that of the old one at step t + 1
    [('old', 1, STEPS, None)],
    [('old', 1, STEPS, 1)],
    [('old', 1, STEPS, 10)],
    [('old', 1, 12, None), ('old', 12, STEPS, 4)],
]


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('program', PROGRAMS)
def test_the_old_h_of_an_lstm_in_a_loss_is_the_new_one_of_the_step_before(learner, program):
    want = gradient(learner, 'new', 0, STEPS - 1, None)
    learner.reset_state()
    gradient(learner, 'cell', 0, 1, None)
    assert_close(added([gradient(learner, *part) for part in program]), want)


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('before', [12, 3, 'steps'])
def test_a_program_reads_what_another_one_that_does_not_has_written(learner, before):
    """The trace of h is written by a loss of c alone, or by single steps, then read by a loss of
    the old h.
    """

    def forward(stop):
        if before == 'steps':
            for x in XS[:stop]:
                learner(x)
        else:
            gradient(learner, 'cell', 0, stop, before)

    forward(11)
    want = gradient(learner, 'new', 11, 12, None)
    learner.reset_state()
    forward(12)
    shown = learner.get_etrace_of(next(iter(learner.param_states)))
    assert all(np.any(e[..., s]) for e in jax.tree.leaves(shown) for s in range(2))
    assert_close(gradient(learner, 'old', 12, 13, None), want)
