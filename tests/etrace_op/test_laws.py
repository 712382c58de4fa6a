"""The laws of trace rules (L0 to L8, L11, L15 of the rule contract) for all eight primitives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braintrace import _etrace_op as ops
from tests.compare import assert_close

from . import cases
from .cases import ALL, FILLED, UNBATCHED

every_case = pytest.mark.parametrize('case', ALL, ids=str)
every_filled_case = pytest.mark.parametrize('case', FILLED, ids=str)
batched_cases = pytest.mark.parametrize(
    'case', [case for case in FILLED if case.primitive.batched], ids=str
)


def combine(a, b):
    return jax.tree.map(lambda a, b: 2 * a - 3 * b, a, b)


def stack(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def pairs(case, x, weights, other_x, d, e, signals):
    """Both sides of each equation, by its name; one program for a case."""
    trace, other = cases.instant(case, x, e, weights), cases.instant(case, x, d, weights)
    transport = functools.partial(cases.transport, case)
    carried, other_carried = transport(d, trace), transport(d, other)
    found = {
        'a gradient is the vjp': (
            cases.gradient(case, x, d, weights),
            jax.vjp(lambda w: case.impl(x, w), weights)[1](d)[0],
        ),
        'carrying commutes with making': (carried, cases.instant(case, x, d * e, weights)),
        'solving gives the vjp': (
            cases.solve(case, d, trace, weights),
            cases.gradient(case, x, d * e, weights),
        ),
        'linear in the trace': (
            transport(d, combine(trace, other)),
            combine(carried, other_carried),
        ),
        'linear in the factor': (
            transport(combine(d, e), trace),
            combine(carried, transport(e, trace)),
        ),
        'leading axes are carried along': (
            transport(d, stack([trace, other])),
            stack([carried, other_carried]),
        ),
        'states are mapped outside': states(case, x, weights, d, e, signals),
    }
    if case.x is not None:
        found['linear in x, or independent of it'] = linear_in_x(case, x, other_x, d, weights)
    if case.primitive.batched:
        one = case.primitive.optional_rule('instant_drtrl') or case.primitive.rule('xy_to_dw')
        found['a whole batch is summed'] = (
            one(x, e, weights, **case.rule_params),
            {n: t.sum(0) for n, t in trace.items()},
        )
    if case.primitive.batched and len(x):
        found |= sample_by_sample(case, x, weights, d, trace, carried)
    return found


def states(case, x, weights, d, e, signals):
    factors = jnp.stack([d, e], -1)
    trace = jax.vmap(lambda e: cases.instant(case, x, e, weights), in_axes=-1, out_axes=-1)(factors)
    got = jax.vmap(lambda s, t: cases.solve(case, s, t, weights), in_axes=-1)(signals, trace)
    return {n: g.sum(0) for n, g in got.items()}, cases.gradient(
        case, x, (signals * factors).sum(-1), weights
    )


def linear_in_x(case, x, z, d, weights):
    at, a, b = (cases.gradient(case, x, d, weights) for x in (combine(x, z), x, z))
    return at, {n: a[n] if n == 'bias' else combine(a[n], b[n]) for n in a}


def sample_by_sample(case, x, weights, d, trace, carried):
    last = lambda tree: jax.tree.map(lambda a: a[-1], tree)
    found = {
        'one sample is carried as the batch is': (
            cases.transport(case, d[-1], last(trace)),
            last(carried),
        )
    }
    if case.primitive not in UNBATCHED:
        return found | {
            'a batch is batches of one': (
                case.call(x, weights),
                jnp.concatenate([case.call(xi[None], weights) for xi in x]),
            )
        }
    row = cases.Case(
        'row', UNBATCHED[case.primitive], case.x[1:], case.weights, case.params, case.structure
    )
    return found | {
        'a batch is a stack of rows': (
            case.call(x, weights),
            jnp.stack([row.call(xi, weights) for xi in x]),
        ),
        'entries are those of rows': (
            cases.instant(case, x, d, weights),
            stack([cases.instant(row, xi, di, weights) for xi, di in zip(x, d)]),
        ),
    }


@functools.cache
def program(case):
    return cases.compiled(functools.partial(pairs, case))


def arguments(case):
    signals = jnp.stack([case.draw_y(3), case.draw_y(4)], -1)
    return (*case.draw(), case.draw(5)[0], case.draw_y(1), case.draw_y(2), signals)


@functools.cache
def both_sides(case):
    return program(case)(*arguments(case))


def holds(case, law):
    assert_close(*both_sides(case)[law])


@pytest.mark.tier(quick=3, one_in=4)
@every_case
def test_xy_to_dw_is_the_vjp_of_the_implementation(case):
    holds(case, 'a gradient is the vjp')


@pytest.mark.tier(quick=7, one_in=2)
@every_case
def test_carrying_a_trace_commutes_with_making_one(case):
    holds(case, 'carrying commutes with making')


@every_case
def test_solving_an_entry_gives_the_vjp_of_the_implementation(case):
    holds(case, 'solving gives the vjp')


@every_case
def test_yw_to_w_is_linear_in_the_trace_and_in_the_factor(case):
    holds(case, 'linear in the trace')
    holds(case, 'linear in the factor')


@every_case
def test_leading_axes_of_a_trace_are_carried_along(case):
    holds(case, 'leading axes are carried along')


@every_case
def test_several_states_are_mapped_outside_the_rules(case):
    holds(case, 'states are mapped outside')


@pytest.mark.parametrize('case', [case for case in ALL if case.x is not None], ids=str)
def test_each_gradient_entry_is_linear_in_x_or_independent_of_it(case):
    holds(case, 'linear in x, or independent of it')


@batched_cases
def test_an_entry_of_a_whole_batch_is_the_sum_over_its_samples(case):
    holds(case, 'a whole batch is summed')


@batched_cases
def test_one_sample_of_a_trace_is_carried_as_the_batch_is(case):
    holds(case, 'one sample is carried as the batch is')


@batched_cases
def test_the_batched_form_is_the_stack_of_the_unbatched_ones(case):
    if case.primitive in UNBATCHED:
        holds(case, 'a batch is a stack of rows')
        holds(case, 'entries are those of rows')
    else:
        holds(case, 'a batch is batches of one')


@every_filled_case
@pytest.mark.parametrize('bad', [np.nan, np.inf], ids=['nan', 'infinity'])
def test_a_number_that_is_not_finite_neither_crashes_nor_changes_shapes(case, bad):
    x, weights, *others = arguments(case)
    if case.x is None:
        weights = {'weight': jnp.full_like(weights['weight'], bad)}
    else:
        x = jnp.asarray(np.where(np.arange(x.size).reshape(x.shape) == 0, bad, x))
    got = program(case)(x, weights, *others)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, both_sides(case))


def results(case, dtype=None, num_state=1):
    """Everything that the rules return, to be traced for shapes and dtypes."""
    x, weights = case.draw(dtype=dtype)
    d = case.draw_y(1, dtype)
    trace = cases.instant(case, x, d, weights)
    return {
        'gradient': cases.gradient(case, x, d, weights),
        'entry': trace,
        'carried': cases.transport(case, d, trace),
        'solved': cases.solve(case, d, trace, weights),
        'empty': cases.init(case, x, weights, num_state),
    }


@every_case
def test_every_rule_returns_the_keys_of_the_trainables(case):
    names = set(case.primitive.trainable_invars(case.params))
    assert set(case.weights) == names
    assert all(set(result) == names for result in jax.eval_shape(lambda: results(case)).values())


@pytest.mark.tier(quick=72)
@every_case
@pytest.mark.parametrize(
    'dtype', [jnp.float64, jnp.float32, jnp.bfloat16], ids=['float64', 'float32', 'bfloat16']
)
def test_a_dtype_goes_in_and_comes_out(case, dtype):
    found = jax.eval_shape(lambda: (results(case, dtype), case.call(*case.draw(dtype=dtype))))
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(dtype)}


@every_case
@pytest.mark.parametrize('num_state', [1, 3])
def test_the_empty_trace_has_the_shape_and_dtype_of_an_entry_with_states(case, num_state):
    found = jax.eval_shape(lambda: results(case, num_state=num_state))
    assert {n: (e.shape, e.dtype) for n, e in found['empty'].items()} == {
        n: ((*e.shape, num_state), e.dtype) for n, e in found['entry'].items()
    }
    assert (
        jax.tree.map(jnp.shape, found['gradient'])
        == jax.tree.map(jnp.shape, found['solved'])
        == case.weights
    )


@pytest.mark.tier(quick=10, one_in=2)
@every_case
def test_empty_traces_are_zero(case):
    x, weights = case.draw()
    output = case.primitive.bound_rule('init_pp', case.rule_params)(
        cases.variable(x),
        cases.variable(case.y),
        {n: cases.variable(w) for n, w in weights.items()},
        2,
    )
    assert output.shape == (*case.y.shape, 2) and output.dtype == case.y.dtype
    assert not any(np.any(leaf) for leaf in (output, *cases.init(case, x, weights, 2).values()))


@pytest.mark.parametrize(
    'case', [case for case in FILLED if not case.primitive.batched or case in cases.CONVS], ids=str
)
def test_the_empty_trace_follows_axes_that_the_hidden_state_adds_to_y(case):
    x, weights = case.draw()
    wide = lambda a: cases.variable(np.broadcast_to(a, (7, *a.shape)))
    found = case.primitive.bound_rule('init_drtrl', case.rule_params)(
        cases.variable(x), wide(case.draw_y(1)), {n: wide(w) for n, w in weights.items()}, 2
    )
    expected = jax.eval_shape(lambda: results(case, num_state=2))['empty']
    assert {n: e.shape for n, e in found.items()} == {n: (7, *e.shape) for n, e in expected.items()}


@pytest.mark.parametrize('case', cases.CONVS, ids=str)
def test_a_bad_pixel_stays_in_the_receptive_fields_that_hold_it(case):
    x, weights = (jax.tree.map(np.ones_like, a) for a in case.draw())
    first = np.arange(x.size).reshape(x.shape) == 0

    @cases.compiled
    def run(x, bad, weights):
        entry = cases.instant(case, bad, jnp.ones(case.y.shape), weights)['weight']
        return jnp.isnan(entry).any(tuple(range(x.ndim, entry.ndim))), case.call(
            x, weights
        ) != case.call(x + first, weights)

    assert_close(*run(x, np.where(first, np.nan, x), weights))


random_shapes = settings(max_examples=8)


def keeps_the_laws(case):
    x, weights = case.draw()
    d, e = case.draw_y(1), case.draw_y(2)

    @cases.compiled
    def run(x, weights, d, e):
        trace = cases.instant(case, x, e, weights)
        return (
            (cases.transport(case, d, trace), cases.solve(case, d, trace, weights)),
            (cases.instant(case, x, d * e, weights), cases.gradient(case, x, d * e, weights)),
        )

    assert_close(*run(x, weights, d, e), absolute=1e-12)


@pytest.mark.slow
@pytest.mark.drawn
@random_shapes
@given(st.data())
def test_random_convolutions_keep_the_laws(data):
    draw = lambda low, high: data.draw(st.integers(low, high))
    rank, groups = draw(1, 2), draw(1, 2)
    sizes, window = [draw(2, 5) for _ in range(rank)], [draw(1, 3) for _ in range(rank)]
    strides, lhs, rhs = (tuple(draw(1, 3) for _ in range(rank)) for _ in range(3))
    pads = tuple((draw(3, 5), draw(3, 5)) for _ in range(rank))
    channels, outputs = groups * draw(1, 2), groups * draw(1, 2)
    keeps_the_laws(
        cases.conv(
            'random',
            (draw(1, 2), channels, *sizes),
            (outputs, channels // groups, *window),
            outputs,
            bias=True,
            strides=strides,
            padding=pads,
            lhs_dilation=lhs,
            rhs_dilation=rhs,
            feature_group_count=groups,
        )
    )


@pytest.mark.slow
@pytest.mark.drawn
@random_shapes
@given(
    st.sampled_from(['dense', 'lora', 'sparse']),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_random_products_keep_the_laws(kind, batched, bias, batch, inputs, outputs, inner):
    lead = (batch,) if batched else ()
    mm, lora_mm, sp_mm = (
        (ops.etp_mm_p, ops.etp_lora_mm_p, ops.etp_sp_mm_p)
        if batched
        else (ops.etp_mv_p, ops.etp_lora_mv_p, ops.etp_sp_mv_p)
    )
    make = {
        'dense': lambda: cases.dense('d', mm, lead, inputs, outputs, bias),
        'lora': lambda: cases.lora('l', lora_mm, lead, inputs, inner, outputs, bias),
        'sparse': lambda: cases.sparse(
            's', sp_mm, lead, inputs, outputs, min(inner, inputs * outputs), bias
        ),
    }
    keeps_the_laws(make[kind]())
