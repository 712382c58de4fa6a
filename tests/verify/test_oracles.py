"""The public oracles against those of the tests, which share no code with them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, rules, verify
from braintrace.errors import NotSupportedError
from tests import models, oracles
from tests.compare import assert_close
from tests.gradients.harness import over_sequence
from tests.gradients.rows import wide_first
from tests.models.library import LibraryOps

pytestmark = pytest.mark.filterwarnings('ignore::braintrace.errors.BraintraceWarning')


def arguments(case):
    cell = functools.partial(case.model.cell, LibraryOps())
    return cell, case.params, dict(case.carry), case.xs, case.ys, case.loss


SOME = 'leaky gru lstm_fused adaptive_lif lif_by_vjp stored_spike two_layers vector'.split()


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name', SOME)
def test_bptt_and_the_dense_recursion_are_the_gradient(name):
    case = models.case(name)
    want = oracles.bptt(case)
    assert_close(verify.bptt_gradients(*arguments(case)), want)
    assert_close(verify.dense_recursion_gradients(*arguments(case)), want)


def test_a_penalty_counts_beside_the_loss():
    case = models.case('leaky')
    both = lambda output, y: braintrace.Penalised(case.loss(output, y), (output**3).sum())
    added = dataclasses.replace(case, loss=lambda o, y: case.loss(o, y) + (o**3).sum())
    assert_close(verify.bptt_gradients(*arguments(case)[:-1], both), oracles.bptt(added))


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name', ['gru', 'two_layers'])
def test_differences_of_the_loss_are_the_gradient_of_a_smooth_cell(name):
    case = models.case(name)
    assert_close(verify.finite_difference_gradients(*arguments(case)), oracles.bptt(case), 1e-7)


def test_some_entries_are_measured_and_the_others_are_nan():
    case = models.case('leaky')
    got, want = verify.finite_difference_gradients(*arguments(case), entries=5), oracles.bptt(case)
    measured = jax.tree.map(lambda g: ~np.isnan(g), got)
    assert sum(m.sum() for m in jax.tree.leaves(measured)) == 5
    for g, w, m in zip(*map(jax.tree.leaves, (got, want, measured))):
        np.testing.assert_allclose(np.asarray(g)[m], w[m], rtol=1e-6)


QUICK = ['broadcast', 'cond', 'cond_log_of_negative', 'vmap_weights']
REFUSED = ['while_mixing', 'while_mixing_tail']
DEGRADED = ['vmap_cond']  # without a trace, see tests/gradients/test_control_flow.py
OTHERS = [n for n in models.PROGRAMS if n not in {*QUICK, *REFUSED, *DEGRADED}]


@pytest.mark.tier(quick=2)
@pytest.mark.parametrize('name', wide_first([*models.MODELS, *QUICK, *OTHERS]))
def test_cut_bptt_is_what_d_rtrl_computes(name):
    case = models.case(name)
    assert_close(
        verify.cut_bptt_gradients(*arguments(case)), oracles.total(oracles.dense_recursion(case))
    )


@pytest.mark.slow
@pytest.mark.parametrize('name', REFUSED)
def test_what_is_not_cut_at_an_equation_is_refused(name):
    with pytest.raises(NotSupportedError):
        verify.cut_bptt_gradients(*arguments(models.case(name)))


@pytest.mark.slow
@pytest.mark.parametrize('name', DEGRADED)
def test_cut_bptt_is_what_d_rtrl_computes_where_weights_have_no_trace(name):
    case = models.case(name)
    want = over_sequence(case, rules.d_rtrl())[0]
    assert_close(verify.cut_bptt_gradients(*arguments(case)), want)


def test_the_cut_takes_its_places_from_a_compiled_learner():
    case = models.case('gru')
    cell, params, carry, xs, ys, loss = arguments(case)
    online = functional.online(cell, rules.d_rtrl(), trainable=lambda path, leaf: path[0] != 'out')
    online.init(params, carry, xs[0])
    got = verify.cut_bptt_gradients(cell, params, carry, xs, ys, loss, graph=online.graph)
    want = oracles.total(oracles.dense_recursion(case))
    assert not got.pop('out').any() and want.pop('out').any()
    assert_close(got, want)


def counting(params, carry, x, scale):
    """Integers in the parameters and in the carry, a key, and two inputs."""
    noise = 0.1 * jax.random.normal(jax.random.fold_in(carry['key'], carry['n']), carry['h'].shape)
    y = braintrace.matmul(jnp.concatenate([x, carry['h']]), params['w'])
    h = jnp.tanh(y) * scale + 0.5 * carry['h'] + noise + params['shift']
    return h, {'h': h, 'n': carry['n'] + 1, 'key': carry['key']}


@pytest.mark.slow
def test_integers_keys_and_several_inputs():
    params = {'w': jnp.ones((5, 3)) / 5, 'shift': jnp.arange(3)}
    carry = {'h': jnp.zeros(3), 'n': jnp.array(0), 'key': jax.random.key(1)}
    xs, loss = (jnp.ones((4, 2)), jnp.arange(1.0, 5.0)), lambda h, y: ((h - y) ** 2).sum()
    args = counting, params, carry, xs, jnp.zeros((4, 3)), loss
    want = verify.bptt_gradients(*args)
    assert want['shift'].dtype == jax.dtypes.float0
    for oracle in (
        verify.dense_recursion_gradients,
        functools.partial(verify.finite_difference_gradients, eps=1e-5),
    ):
        got = oracle(*args)
        assert got['shift'].dtype == jax.dtypes.float0
        np.testing.assert_allclose(got['w'], want['w'], rtol=1e-6)
    online = functional.online(counting, rules.d_rtrl())
    state = online.init(params, carry, *jax.tree.map(lambda a: a[0], args[3]))
    grads, *_ = online.sequence_grad(args[5], reduction='sum')(params, state, args[3], args[4])
    np.testing.assert_allclose(verify.cut_bptt_gradients(*args)['w'], grads['w'], rtol=1e-10)
