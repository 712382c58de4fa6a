"""The laws of trace rules (L0 to L8, L11, L15 of the rule contract) for all eight primitives."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from braintrace import _etrace_op as ops

from . import cases
from .cases import ALL, FILLED, UNBATCHED, assert_close

every_case = pytest.mark.parametrize('case', ALL, ids=str)
every_filled_case = pytest.mark.parametrize('case', FILLED, ids=str)


@every_case
def test_every_rule_returns_the_keys_of_the_trainables(case):
    x, weights = case.draw()
    names = set(case.primitive.trainable_invars(case.params))
    d = case.draw_y(1)
    trace = cases.instant(case, x, d, weights)
    results = [cases.gradient(case, x, d, weights), trace, cases.transport(case, d, trace),
               cases.solve(case, d, trace, weights), cases.init(case, x, weights, 2)]
    assert set(weights) == names
    assert all(set(result) == names for result in results)


@every_case
def test_xy_to_dw_is_the_vjp_of_the_implementation(case):
    x, weights = case.draw()
    d = case.draw_y(1)
    assert_close(cases.gradient(case, x, d, weights), jax.vjp(lambda w: case.impl(x, w), weights)[1](d)[0])


@every_case
def test_carrying_a_trace_commutes_with_making_one(case):
    x, weights = case.draw()
    d, e = case.draw_y(1), case.draw_y(2)
    assert_close(cases.transport(case, d, cases.instant(case, x, e, weights)), cases.instant(case, x, d * e, weights))


@every_filled_case
def test_one_sample_of_a_trace_is_carried_as_the_batch_is(case):
    if not case.primitive.batched:
        pytest.skip('the op has no batch')
    x, weights = case.draw()
    d, e = case.draw_y(1), case.draw_y(2)
    trace = cases.instant(case, x, e, weights)
    sample = lambda tree: jax.tree.map(lambda a: a[-1], tree)
    assert_close(cases.transport(case, d[-1], sample(trace)), sample(cases.transport(case, d, trace)))


@every_filled_case
def test_leading_axes_of_a_trace_are_carried_along(case):
    x, weights = case.draw()
    d, e = case.draw_y(1), case.draw_y(2)
    trace = cases.instant(case, x, e, weights)
    several = {n: jnp.stack([t, 2 * t]) for n, t in trace.items()}
    once = cases.transport(case, d, trace)
    assert_close(cases.transport(case, d, several), {n: jnp.stack([t, 2 * t]) for n, t in once.items()})


@every_case
def test_yw_to_w_is_linear_in_the_trace_and_in_the_factor(case):
    x, weights = case.draw()
    d, f = case.draw_y(1), case.draw_y(2)
    t, u = cases.instant(case, x, case.draw_y(3), weights), cases.instant(case, x, case.draw_y(4), weights)
    add = lambda a, b: jax.tree.map(lambda a, b: 2 * a - 3 * b, a, b)
    assert_close(cases.transport(case, d, add(t, u)), add(cases.transport(case, d, t), cases.transport(case, d, u)))
    assert_close(cases.transport(case, 2 * d - 3 * f, t), add(cases.transport(case, d, t), cases.transport(case, f, t)))


@every_case
@pytest.mark.parametrize('num_state', [1, 3])
def test_the_empty_trace_has_the_shape_and_dtype_of_an_entry_with_states(case, num_state):
    x, weights = case.draw()
    entry, empty = cases.instant(case, x, case.draw_y(1), weights), cases.init(case, x, weights, num_state)
    for name, value in entry.items():
        assert empty[name].shape == (*value.shape, num_state)
        assert empty[name].dtype == value.dtype
        assert not empty[name].any()
    output = case.primitive.bound_rule('init_pp', case.params)(
        cases.variable(x), cases.variable(case.y), {n: cases.variable(w) for n, w in weights.items()}, num_state)
    assert output.shape == (*case.y.shape, num_state) and output.dtype == case.y.dtype and not output.any()


@every_case
def test_solving_an_entry_gives_the_vjp_of_the_implementation(case):
    x, weights = case.draw()
    signal, e = case.draw_y(1), case.draw_y(2)
    got = cases.solve(case, signal, cases.instant(case, x, e, weights), weights)
    assert_close(got, cases.gradient(case, x, signal * e, weights))


@every_filled_case
def test_several_states_are_mapped_outside_the_rules(case):
    x, weights = case.draw()
    e, signal = (jnp.stack([case.draw_y(i), case.draw_y(i + 1)], -1) for i in (1, 5))
    trace = jax.vmap(lambda e: cases.instant(case, x, e, weights), in_axes=-1, out_axes=-1)(e)
    assert jax.tree.map(jnp.shape, trace) == jax.tree.map(jnp.shape, cases.init(case, x, weights, 2))
    got = jax.vmap(lambda s, t: cases.solve(case, s, t, weights), in_axes=-1)(signal, trace)
    summed = {n: g.sum(0) for n, g in got.items()}
    assert_close(summed, cases.gradient(case, x, (signal * e).sum(-1), weights))


@every_filled_case
def test_an_entry_of_a_whole_batch_is_the_sum_over_its_samples(case):
    if not case.primitive.batched:
        pytest.skip('the op has no batch')
    x, weights = case.draw()
    d = case.draw_y(1)
    one = case.primitive.optional_rule('instant_drtrl') or case.primitive.rule('xy_to_dw')
    per_sample = cases.instant(case, x, d, weights)
    assert_close(one(x, d, weights, **case.params), {n: e.sum(0) for n, e in per_sample.items()})


@pytest.mark.parametrize('case', [c for c in ALL if c.primitive in UNBATCHED], ids=str)
def test_the_batched_form_is_the_stack_of_the_unbatched_ones(case):
    x, weights = case.draw()
    d, single = case.draw_y(1), UNBATCHED[case.primitive]
    row = cases.Case('row', single, case.x[1:], case.weights, case.params)
    if not len(x):
        return
    assert_close(case.call(x, weights), jnp.stack([row.call(xi, weights) for xi in x]))
    entries = [cases.instant(row, xi, di, weights) for xi, di in zip(x, d)]
    assert_close(cases.instant(case, x, d, weights), jax.tree.map(lambda *e: jnp.stack(e), *entries))


@pytest.mark.parametrize('case', cases.CONVS, ids=str)
def test_a_convolution_of_a_batch_is_that_of_batches_of_one(case):
    x, weights = case.draw()
    assert_close(case.call(x, weights), jnp.concatenate([case.call(xi[None], weights) for xi in x]))


@every_filled_case
def test_each_gradient_entry_is_linear_in_x_or_independent_of_it(case):
    if case.x is None:
        pytest.skip('the op has no x')
    x, weights = case.draw()
    z, _ = case.draw(7)
    d = case.draw_y(1)
    at = lambda x: cases.gradient(case, x, d, weights)
    for name, value in at(2 * x - 3 * z).items():
        expected = at(x)[name] if name == 'bias' else 2 * at(x)[name] - 3 * at(z)[name]
        assert_close(value, expected)


@every_filled_case
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16], ids=['float32', 'bfloat16'])
def test_a_dtype_goes_in_and_comes_out(case, dtype):
    x, weights = case.draw(dtype=dtype)
    d = case.draw_y(1, dtype)
    y = case.call(x, weights)
    trace = cases.instant(case, x, d, weights)
    results = [y, cases.gradient(case, x, d, weights), trace, cases.transport(case, d, trace),
               cases.solve(case, d, trace, weights), cases.init(case, x, weights, 1)]
    assert {leaf.dtype for leaf in jax.tree.leaves(results)} == {jnp.dtype(dtype)}
    x, weights = case.draw()
    np.testing.assert_allclose(y.astype(float), case.impl(x, weights), rtol=0.1, atol=0.2 if dtype == jnp.bfloat16 else 1e-5)


@every_filled_case
@pytest.mark.parametrize('bad', [jnp.nan, jnp.inf], ids=['nan', 'infinity'])
def test_a_number_that_is_not_finite_neither_crashes_nor_changes_shapes(case, bad):
    x, weights = case.draw()
    if case.x is None:
        weights = {'weight': jnp.full_like(weights['weight'], bad)}
    else:
        x = x.at[(0,) * x.ndim].set(bad)
    d = case.draw_y(1)
    trace = cases.instant(case, x, d, weights)
    assert case.call(x, weights).shape == case.y.shape
    assert jax.tree.map(jnp.shape, cases.solve(case, d, trace, weights)) == case.weights


@pytest.mark.parametrize('case', cases.CONVS, ids=str)
def test_a_bad_pixel_stays_in_the_receptive_fields_that_hold_it(case):
    x, weights = case.draw()
    at = (0,) * x.ndim
    touched = case.call(jnp.zeros_like(x).at[at].set(1.0), {n: jnp.ones_like(w) for n, w in weights.items()})
    base = case.call(jnp.zeros_like(x), {n: jnp.ones_like(w) for n, w in weights.items()})
    entry = cases.instant(case, x.at[at].set(jnp.nan), jnp.ones(case.y.shape), weights)['weight']
    y_axis = jax.lax.conv_dimension_numbers(x.shape, weights['weight'].shape, case.params.get('dimension_numbers')).out_spec
    assert y_axis[0] == 0
    bad = jnp.isnan(entry).any(tuple(range(x.ndim, entry.ndim)))
    np.testing.assert_array_equal(bad, touched != base)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_convolutions_keep_the_laws(data):
    draw = lambda low, high: data.draw(st.integers(low, high))
    rank, groups = draw(1, 2), draw(1, 2)
    sizes, window = [draw(2, 5) for _ in range(rank)], [draw(1, 3) for _ in range(rank)]
    strides, lhs, rhs = (tuple(draw(1, 3) for _ in range(rank)) for _ in range(3))
    pads = tuple((draw(3, 5), draw(3, 5)) for _ in range(rank))
    x, kernel = (draw(1, 2), groups * draw(1, 2), *sizes), (groups * draw(1, 2), 0, *window)
    kernel = (kernel[0], x[1] // groups, *window)
    case = cases.conv('random', x, kernel, kernel[0], bias=True, strides=strides, padding=pads, lhs_dilation=lhs,
                      rhs_dilation=rhs, feature_group_count=groups)
    x, weights = case.draw()
    d, e = case.draw_y(1), case.draw_y(2)
    trace = cases.instant(case, x, e, weights)
    assert_close(cases.transport(case, d, trace), cases.instant(case, x, d * e, weights))
    assert_close(cases.solve(case, d, trace, weights), cases.gradient(case, x, d * e, weights))


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(['dense', 'lora', 'sparse']), st.booleans(), st.booleans(), st.integers(1, 3), st.integers(1, 4),
       st.integers(1, 4), st.integers(1, 3))
def test_random_products_keep_the_laws(kind, batched, bias, batch, inputs, outputs, inner):
    lead = (batch,) if batched else ()
    make = {
        'dense': lambda: cases.dense('d', ops.etp_mm_p if batched else ops.etp_mv_p, lead, inputs, outputs, bias),
        'lora': lambda: cases.lora('l', ops.etp_lora_mm_p if batched else ops.etp_lora_mv_p, lead, inputs, inner, outputs, bias),
        'sparse': lambda: cases.sparse('s', ops.etp_sp_mm_p if batched else ops.etp_sp_mv_p, lead, inputs, outputs,
                                       min(inner, inputs * outputs), bias)}
    case = make[kind]()
    x, weights = case.draw()
    d, e = case.draw_y(1), case.draw_y(2)
    trace = cases.instant(case, x, e, weights)
    assert_close(cases.transport(case, d, trace), cases.instant(case, x, d * e, weights))
    assert_close(cases.solve(case, d, trace, weights), cases.gradient(case, x, d * e, weights))
