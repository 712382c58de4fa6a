"""D_RTRL: where it is exact, what a loss may read, means, pending steps, the whole credit and the
ops' own diagonals. ``test_rules.py`` compares it with its formula.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional
from braintrace.errors import NotSupportedError
from braintrace.rules import d_rtrl
from tests import models, oracles
from tests.compare import added, assert_drawn_close, at
from tests.gradients.harness import MASK, by_steps, over_sequence, quick, start, step_program
from tests.gradients.rows import FEW
from tests.late import LATE
from tests.oracles import dense_recursion as dense

pytestmark = pytest.mark.drawn
RULE, PENDING = d_rtrl(), LATE
OWN, SNAP = d_rtrl(scope='own'), d_rtrl(scope='own', credit='whole')


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name', FEW)
def test_single_steps_before_a_sequence_and_after_it(name):
    case, got = models.case(name), []
    (learner, state), step = start(case, PENDING), step_program(case, PENDING)
    for t in (0, 1):
        grads, _, _, state = step(case.params, state, case.xs[t], case.ys[t])
        got.append(grads)
    grads, _, _, state = quick(learner.sequence_grad(case.loss, window=None, reduction='sum'))(
        case.params, state, case.xs[2:4], case.ys[2:4]
    )
    assert_drawn_close(added([*got, grads]), added([at(dense(case), t) for t in range(4)]))
    for t in (4, 5):
        grads, _, _, state = step(case.params, state, case.xs[t], case.ys[t])
        assert_drawn_close(grads, at(dense(case), t))


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name', models.names(exact=True))
def test_it_is_bptt_where_nothing_is_cut(name):
    case = models.case(name, models.cubic)
    assert_drawn_close(over_sequence(case, RULE, 3)[0], oracles.bptt(case))


@pytest.mark.slow
@pytest.mark.parametrize('mask', [MASK, None, 0.0 * MASK], ids=['some', 'all', 'none'])
def test_mean_divides_by_the_sum_of_the_mask(mask):
    case, weights = models.case('lstm'), np.ones(6) if mask is None else mask
    grads, *_ = over_sequence(case, RULE, 3, reduction='mean', mask=mask)
    assert_drawn_close(grads, oracles.total(dense(case), weights / (weights.sum() or 1)))


# -- the whole credit, and the ops' own diagonals --------------------------------------------------


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('rule', [OWN, SNAP], ids=['own', 'own whole'])
@pytest.mark.parametrize('name', ['gru', 'spiking_three'])
def test_where_diagonals_have_no_formula_single_steps_and_windows_agree(name, rule):
    case = models.case(name)
    steps = added([grads for _, _, grads in by_steps(case, rule)])
    for window in (1, 3):
        assert_drawn_close(over_sequence(case, rule, window)[0], steps)


def test_an_op_that_is_not_linear_in_its_input_has_no_own_diagonal(registries_are_restored):
    op = braintrace.register_primitive('squared_input', lambda x, w: (x**2) @ w, batched=True)

    def cell(params, h, x):
        return (new := jnp.tanh(op(h, params['w']) + x)), new

    with pytest.raises(NotSupportedError, match='is not linear in its input'):
        functional.online(cell, OWN).init(
            {'w': jnp.ones((3, 3))}, jnp.zeros((1, 3)), jnp.ones((1, 3))
        )
