"""Ops made of a bare spec: several results, no input, and the checks a spec brings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import kit, rules
from braintrace._etrace_op import ETP_PRIMITIVES
from braintrace.errors import BraintraceError, BraintraceWarning, EtpShapeError, RuleContractError
from braintrace.kit import ETPPrimitiveSpec as Spec
from tests.precision import float64 as float64
from tests.tiers import first, in_turn

from .learning import leaky, online, squared, through_time

pytestmark = pytest.mark.usefixtures('registries_are_restored')
STEPS, BATCH, N = 6, 2, 3
RNG = np.random.default_rng(3)
XS = RNG.normal(size=(STEPS, BATCH, N))
W = RNG.normal(size=(N, N))
V = RNG.uniform(0.5, 1.5, size=N)
H = np.zeros((BATCH, N))


def check_learns(cell, w, window):
    """D_RTRL has the gradient of backpropagation through time."""
    w = jnp.asarray(w)
    got = online(cell, w, H, XS, window=window, loss=squared)
    np.testing.assert_allclose(got, through_time(cell, w, H, XS, squared), rtol=1e-10)


# several results ----------------------------------------------------------------------------------


def two():
    return kit.new_etp_primitive(
        Spec('t_two', lambda x, w: (x * w.sum(1), x @ w), batched=True, y_outvar_index=1)
    )


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('window', [None, 2])
def test_the_gradient_of_a_result_beside_y_is_that_of_its_step(window):
    op = two()

    def cell(w, h, x):
        beside, y = op(x, w)
        h = jnp.tanh(0.9 * h + y)
        return h + beside, h

    check_learns(cell, W, window)


@pytest.mark.slow
def test_a_result_beside_y_that_reaches_a_hidden_state_is_named():
    op = two()

    def cell(w, h, x):
        beside, y = op(x, w)
        h = jnp.tanh(0.9 * h + y + beside)
        return h, h

    said = r'has a trace, but not for its use in reduce_sum \[.*test_new_primitive.py:\d+'
    with pytest.warns(BraintraceWarning, match=said):
        online(cell, jnp.asarray(W), H, XS, loss=squared)
    policy = braintrace.Policy(strict=True)
    strict = braintrace.functional.online(cell, rules.d_rtrl(), policy=policy)
    with pytest.raises(BraintraceError, match='not for its use in reduce_sum'):
        strict.init(jnp.asarray(W), H, XS[0])


# no input -----------------------------------------------------------------------------------------

ALONE = {
    'turned': lambda w: w[::-1],
    'summed up': jnp.cumsum,
    'normalised': lambda w: w / w.sum(),
    'of a matrix': lambda w: (w @ w).sum(0),
}


def alone(name):
    """An op without an input, and the weights that it takes."""
    op = kit.new_etp_primitive(Spec('t_alone', ALONE[name], x_invar_index=None))
    return op, jnp.asarray(W if name == 'of a matrix' else V)


@pytest.mark.tier(quick=0)
@in_turn(first('turned'), name=ALONE, window=[None, 2, 'steps'])
def test_an_op_without_an_input_learns_where_y_lacks_the_batch(name, window):
    op, w = alone(name)
    check_learns(leaky(lambda w, x: x + op(w)), w, window)


@in_turn(first('turned'), name=ALONE, window=[None, 2, 'steps'])
def test_its_factors_are_those_of_the_same_function_before_element_wise(name, window):
    op, w = alone(name)
    got, want = (
        online(leaky(y), w, H, XS, rules.es_d_rtrl(0.8), window, squared)
        for y in (
            lambda w, x: x + op(w),
            lambda w, x: x + braintrace.element_wise(w, fn=ALONE[name]),
        )
    )
    np.testing.assert_allclose(got, want, rtol=1e-10)


@pytest.mark.slow
def test_a_result_without_an_input_may_be_broadcast_inside():
    op = kit.new_etp_primitive(
        Spec('t_alone', lambda w: jnp.cumsum(w)[:, None], x_invar_index=None)
    )

    def cell(w, h, x):
        h = jnp.tanh(0.9 * h + x[:, :1, None] + op(w))
        return h.sum(-1), h

    w, carry = jnp.asarray(V), jnp.zeros((BATCH, len(V), 2))
    learner = braintrace.functional.online(cell, rules.d_rtrl())
    state = learner.init(w, carry, XS[0])
    (relation,) = learner.graph.hidden_param_op_relations
    assert relation.coordinates[0].shape == (BATCH, 2, len(V), 1)
    args = w, carry, XS, jnp.ones(len(XS)), lambda h, y: (y * jnp.sin(h)).sum()
    grads, *_ = learner.sequence_grad(args[4], window=2, reduction='sum')(w, state, *args[2:4])
    want = braintrace.verify.bptt_gradients(cell, *args)
    np.testing.assert_allclose(grads, want, rtol=1e-10)


@in_turn(first((N,)), shape=[(N,), (BATCH, 1), (1, N), (BATCH, N)], window=[None, 2, 'steps'])
def test_an_op_that_passes_its_weight_on_may_be_broadcast_anywhere(shape, window):
    op = kit.new_etp_primitive(
        Spec('t_passed_on', lambda w: 1.0 * w, x_invar_index=None, gradient_enabled=True)
    )
    check_learns(leaky(lambda w, x: x + op(w)), RNG.normal(size=shape), window)


# what a spec checks -------------------------------------------------------------------------------


def test_operands_are_checked_before_the_implementation_sees_them():
    def check(avals, params):
        if avals[0].ndim != 2:
            raise EtpShapeError(f'x has {avals[0].ndim} axes, expected 2')

    impl, more = lambda x, w, *, power: x @ w**power, {'check': check, 'static': ('power',)}
    op = kit.new_etp_primitive(Spec('t_checked', impl, batched=True, **more))
    assert op(jnp.ones((2, 3)), jnp.ones((3, 4)), power=2).shape == (2, 4)
    for run in (op, jax.jit(op, static_argnames='power')):
        with pytest.raises(EtpShapeError, match='x has 1 axes, expected 2'):
            run(jnp.ones(3), jnp.ones((3, 4)), power=2)


@pytest.mark.parametrize(
    'name, value',
    # a part of a layout, no function, no reverse rule, no position
    [
        ('yw_to_w', lambda d, trace: trace),
        ('xy_to_dw', 3),
        ('reverse', print),
        ('x_invar_index', -1),
    ],
)
def test_what_is_refused_is_not_registered(name, value):
    with pytest.raises(RuleContractError, match='t_refused'):
        kit.new_etp_primitive(Spec('t_refused', lambda x, w: x @ w, **{name: value}))
    assert 't_refused' not in {primitive.name for primitive in ETP_PRIMITIVES}


def test_an_op_prints_its_rules_and_platforms():
    op = kit.new_etp_primitive(Spec('t_printed', lambda x, w: x @ w, batched=True))
    op.lowering['cpu'] = lambda x, w: x @ w
    assert repr(op) == (
        'EtpOp(ETPPrimitive(t_printed; batched; rules: yw_to_w, xy_to_dw, init_drtrl, init_pp, '
        'instant_drtrl, solve_drtrl; lowering on cpu))'
    )
