"""The laws of trace rules (L0 to L8, L11, L15 of the rule contract) for all eight primitives;
``tests/kit/test_random_shapes.py`` has them on random shapes.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.compare import assert_close

from . import cases
from .cases import ALL, FILLED, UNBATCHED, results, stack

every_case = pytest.mark.parametrize('case', ALL, ids=str)


def combine(a, b):
    return jax.tree.map(lambda a, b: 2 * a - 3 * b, a, b)


def pairs(case, x, weights, other_x, d, e, signals):
    """Both sides of each equation, by its name; one program for a case."""
    trace, other = cases.instant(case, x, e, weights), cases.instant(case, x, d, weights)
    transport = functools.partial(cases.transport, case)
    carried, other_carried = transport(d, trace), transport(d, other)
    found = cases.laws(case, x, weights, d, e) | {
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
    last, y = lambda tree: jax.tree.map(lambda a: a[-1], tree), case.call(x, weights)
    of_one = cases.transport(case, d[-1], last(trace))
    found = {'one sample is carried as the batch is': (of_one, last(carried))}
    if case.primitive not in UNBATCHED:
        batches = jnp.concatenate([case.call(xi[None], weights) for xi in x])
        return found | {'a batch is batches of one': (y, batches)}
    row = dataclasses.replace(case, primitive=UNBATCHED[case.primitive], x=case.x[1:])
    entries = stack([cases.instant(row, xi, di, weights) for xi, di in zip(x, d)])
    return found | {
        'a batch is a stack of rows': (y, jnp.stack([row.call(xi, weights) for xi in x])),
        'entries are those of rows': (cases.instant(case, x, d, weights), entries),
    }


@functools.cache
def program(case):
    return cases.compiled(functools.partial(pairs, case))


def arguments(case):
    x, weights, d, e = cases.arguments(case)
    return x, weights, case.draw(5)[0], d, e, jnp.stack([case.draw_y(3), case.draw_y(4)], -1)


@functools.cache
def both_sides(case):
    return program(case)(*arguments(case))


@every_case
def test_every_law_holds(case):
    got, expected = cases.sides(both_sides(case))
    assert_close(got, expected)


@pytest.mark.parametrize('case', FILLED, ids=str)
@pytest.mark.parametrize('bad', [np.nan, np.inf], ids=['nan', 'infinity'])
def test_a_number_that_is_not_finite_neither_crashes_nor_changes_shapes(case, bad):
    x, weights, *others = arguments(case)
    if case.x is None:
        weights = {'weight': jnp.full_like(weights['weight'], bad)}
    else:
        x = jnp.asarray(np.where(np.arange(x.size).reshape(x.shape) == 0, bad, x))
    got = program(case)(x, weights, *others)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, both_sides(case))


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
def test_results_have_the_keys_and_shapes_of_trainables_and_an_empty_trace_those_of_an_entry(
    case, num_state
):
    found = jax.eval_shape(lambda: results(case, num_state=num_state))
    names = set(case.primitive.trainable_invars(case.params))
    assert set(case.weights) == names and all(set(result) == names for result in found.values())
    shapes = jax.tree.map(jnp.shape, found)
    assert shapes['gradient'] == shapes['solved'] == case.weights
    assert shapes['empty'] == {n: (*e, num_state) for n, e in shapes['entry'].items()}
    assert {n: e.dtype for n, e in found['empty'].items()} == {
        n: e.dtype for n, e in found['entry'].items()
    }


@pytest.mark.tier(quick=10)
@every_case
def test_empty_traces_are_zero(case):
    x, weights = case.draw()
    output = cases.init(case, x, weights, 2, 'init_pp')
    assert output.shape == (*case.y.shape, 2) and output.dtype == case.y.dtype
    assert not any(np.any(leaf) for leaf in (output, *cases.init(case, x, weights, 2).values()))


@pytest.mark.parametrize(
    'case', [case for case in FILLED if not case.primitive.batched or case in cases.CONVS], ids=str
)
def test_the_empty_trace_follows_axes_that_the_hidden_state_adds_to_y(case):
    x, weights = case.draw()
    wide = lambda a: cases.variable(np.broadcast_to(a, (7, *a.shape)))
    init = case.primitive.bound_rule('init_drtrl', case.rule_params)
    variables = cases.variable(x), wide(case.draw_y(1)), {n: wide(w) for n, w in weights.items()}
    found = jax.eval_shape(lambda: init(*variables, 2))
    expected = jax.eval_shape(lambda: results(case, num_state=2))['empty']
    assert {n: e.shape for n, e in found.items()} == {n: (7, *e.shape) for n, e in expected.items()}


@pytest.mark.parametrize('case', cases.CONVS, ids=str)
def test_a_bad_pixel_stays_in_the_receptive_fields_that_hold_it(case):
    x, weights = (jax.tree.map(np.ones_like, a) for a in case.draw())
    first = np.arange(x.size).reshape(x.shape) == 0

    @cases.compiled
    def run(x, bad, weights):
        entry = cases.instant(case, bad, jnp.ones(case.y.shape), weights)['weight']
        holds = case.call(x, weights) != case.call(x + first, weights)
        return jnp.isnan(entry).any(tuple(range(x.ndim, entry.ndim))), holds

    assert_close(*run(x, np.where(first, np.nan, x), weights))


@pytest.mark.tier(quick=4)
@pytest.mark.parametrize('number', [2, 3])
@pytest.mark.parametrize('case', cases.CONVS, ids=str)
def test_each_group_of_samples_has_the_gradient_of_its_samples(case, number):
    """As devices that share the samples compute it."""
    case = dataclasses.replace(case, x=(6, *case.x[1:]))
    (x, weights), d = case.draw(), case.draw_y(1)
    groups = lambda a: a.reshape(number, -1, *a.shape[1:])

    @cases.compiled
    def run(x, d, weights):
        got = case.primitive.gradient_by_group(number, x, d, weights, **case.params)
        of = lambda x, d: jax.vjp(lambda w: case.impl(x, w), weights)[1](d)[0]
        return got, stack([of(*part) for part in zip(groups(x), groups(d))])

    assert_close(*run(x, d, weights))
