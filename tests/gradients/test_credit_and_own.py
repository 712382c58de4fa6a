"""D_RTRL with the whole credit, and with the ops' own diagonals, against the oracles."""

import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, rules, verify
from braintrace.errors import NotSupportedError, OptionError
from tests import models, oracles
from tests.compare import added, assert_drawn_close, differences
from tests.gradients.harness import by_steps, other_carry, over_sequence
from tests.gradients.rows import every_wide_first
from tests.oracles import dense_recursion as dense
from tests.tiers import slow

pytestmark = pytest.mark.drawn
WHOLE = rules.d_rtrl(credit='whole')
OWN = rules.d_rtrl(scope='own')
SNAP = rules.d_rtrl(scope='own', credit='whole')
# cells in which one op stands between the old states and the new ones
SINGLE = ['leaky', 'lstm', 'lstm_fused', 'spiking_two', 'lora', 'sparse', 'conv1d', 'adaptive_lif']


@pytest.mark.tier(quick=1, one_in=4)
@every_wide_first()
def test_the_whole_credit_gives_the_dense_recursion_with_nothing_cut_in_the_loss(name):
    case = models.case(name)
    grads = over_sequence(case, WHOLE, 4)[0]
    assert_drawn_close(grads, oracles.total(dense(case, 'whole')))


@pytest.mark.tier(quick=1, one_in=6)
@pytest.mark.parametrize('name', [*SINGLE[:3], *(pytest.param(n, marks=slow) for n in SINGLE[3:])])
@pytest.mark.parametrize('rule', [pytest.param(OWN, marks=slow), SNAP], ids=['cut', 'whole'])
def test_the_own_diagonal_is_the_diagonal_of_the_derivative(name, rule):
    case = models.case(name)
    want = oracles.total(dense(case, rule.credit, own=True))
    assert_drawn_close(over_sequence(case, rule, 4)[0], want)


@pytest.mark.tier(quick=1, one_in=4)
@pytest.mark.parametrize('rule', [WHOLE, OWN, SNAP], ids=['whole', 'own', 'snap'])
@pytest.mark.parametrize(
    'name', ['gru', *(pytest.param(n, marks=slow) for n in ('lstm_fused', 'spiking_three'))]
)
def test_single_steps_and_windows_give_one_set_of_numbers(name, rule):
    case = models.case(name)
    steps = [grads for _, _, grads in by_steps(case, rule)]
    for window in (1, 4):
        got = over_sequence(case, rule, window)[0]
        assert_drawn_close(got, added(steps))


@pytest.mark.slow
@pytest.mark.parametrize('rule', [WHOLE, SNAP], ids=['whole', 'snap'])
def test_a_reset_of_some_lanes_is_a_restart_of_those_lanes(rule):
    case = models.case('lstm_fused')
    carry0, flags = other_carry(case), np.zeros((len(case.xs), 2), bool)
    flags[[2, 4], 0] = flags[[1, 2], 1] = True
    want = oracles.restarted(lambda part: dense(part, 'whole', rule is SNAP), case, flags, carry0)
    grads, *_ = over_sequence(case, rule, 3, reset=(flags, carry0))
    assert_drawn_close(grads, oracles.total(want))


@pytest.mark.slow
def test_each_option_changes_some_number():
    case = models.case('lstm_fused')
    got = [over_sequence(case, rule, 4)[0] for rule in (None, WHOLE, OWN, SNAP)]
    got[0] = over_sequence(case, rules.d_rtrl(), 4)[0]
    for i, a in enumerate(got):
        assert all(differences(a, b) for b in got[:i])


@pytest.mark.slow
def test_a_layer_of_one_unit_is_exact_with_its_own_diagonal():
    """Of one hidden number the own diagonal is the whole derivative."""

    def cell(params, h, x):
        h = jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['w']))
        return h, h

    rng = np.random.default_rng(0)
    params, carry = {'w': rng.standard_normal((3, 1))}, np.zeros((2, 1))
    xs, ys = rng.standard_normal((9, 2, 2)), rng.standard_normal((9, 2, 1))

    def loss(output, y):
        return ((output - y) ** 2).sum()

    learner = functional.online(cell, OWN)
    run = learner.sequence_grad(loss, reduction='sum')
    grads, *_ = run(params, learner.init(params, carry, xs[0]), xs, ys)
    want = verify.bptt_gradients(cell, params, carry, xs, ys, loss)
    np.testing.assert_allclose(grads['w'], want['w'], rtol=1e-10)


def test_an_op_that_is_not_linear_in_its_input_has_no_own_diagonal(registries_are_restored):
    name = 'squared_input'
    op = braintrace.register_primitive(name, lambda x, w: (x**2) @ w, batched=True)

    def cell(params, h, x):
        return (new := jnp.tanh(op(h, params['w']) + x)), new

    learner = functional.online(cell, OWN)
    with pytest.raises(NotSupportedError, match='is not linear in its input'):
        learner.init({'w': jnp.ones((3, 3))}, jnp.zeros((1, 3)), jnp.ones((1, 3)))


@pytest.mark.parametrize(
    'options, said',
    [
        ({'credit': 'half'}, "credit is 'half'; choose 'cut' or 'whole'"),
        ({'scope': 'reach'}, "scope is 'reach'; choose 'position' or 'own'"),
    ],
)
def test_unknown_options_are_refused(options, said):
    with pytest.raises(OptionError, match=said):
        rules.d_rtrl(**options)
