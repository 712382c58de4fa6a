"""States that a model keeps side by side in one array: the gradients are those of the oracles, which keep each by itself."""
from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from tests import models, oracles
from tests.gradients.compare import assert_close, at
from tests.gradients.harness import quick
from tests.models.library import LibraryOps

RULES = {'D_RTRL': braintrace.rules.d_rtrl(), 'ES_D_RTRL': braintrace.rules.es_d_rtrl(0.8)}
FLAGS = np.zeros((models.make_case.__defaults__[1], 2), bool)
FLAGS[2, 0] = FLAGS[4, 1] = True


def written(parts):
    """Row by row into an array of zeros."""
    whole = jnp.zeros((len(parts), *parts[0].shape))
    for k, part in enumerate(parts):
        whole = whole.at[k].set(part)
    return whole


def columns(whole, sizes):
    return jnp.split(whole, np.cumsum(sizes)[:-1], -1)


LAYOUTS = {      # name: (put together, take apart with the last sizes)
    'rows': (jnp.stack, lambda whole, sizes: list(whole)),
    'middle axis': (lambda parts: jnp.stack(parts, 1), lambda whole, sizes: [whole[:, k] for k in range(len(sizes))]),
    'last axis': (lambda parts: jnp.stack(parts, -1), lambda whole, sizes: [whole[..., k] for k in range(len(sizes))]),
    'features': (lambda parts: jnp.concatenate(parts, -1), columns),
    'written rows': (written, lambda whole, sizes: [whole[k] for k in range(len(sizes))]),
    'interleaved': (lambda parts: jnp.stack(parts, -1).reshape(len(parts[0]), -1),
                    lambda whole, sizes: [whole[:, k::len(sizes)] for k in range(len(sizes))]),
}
ROWS = [('two_equal_layers', 'rows'), ('three_layers', 'features'), ('lstm_gru', 'features'), ('lstm', 'middle axis'),
        ('spiking_three', 'features'), ('op_between_states', 'interleaved'), ('equal_populations', 'written rows')]
MORE = [('two_equal_layers', layout) for layout in LAYOUTS if layout != 'rows'] + [
    ('lstm', 'features'), ('lru', 'last axis'), ('lstm_reading_cell', 'rows'), ('two_layers', 'features'), ('state_sum', 'rows')]
EVERY = [*ROWS, *(pytest.param(*row, marks=pytest.mark.slow) for row in MORE)]


@functools.cache
def stacked(name, layout, rule):
    """The case, a learner of it that keeps all of its states in one array, and the array of a carry."""
    case = models.case(name)
    names, (join, part) = list(case.carry), LAYOUTS[layout]
    sizes = [case.carry[n].shape[-1] for n in names]

    def pack(carry):
        return {'all': join([jnp.asarray(carry[n]) for n in names])}

    def cell(params, carry, x):
        output, new = case.model.cell(LibraryOps(), params, dict(zip(names, part(carry['all'], sizes), strict=True)), x)
        return output, pack(new)
    return case, braintrace.functional.online(cell, RULES[rule]), pack


def oracle(case, rule):
    return oracles.dense_recursion(case) if rule == 'D_RTRL' else oracles.es_recursion(case, 0.8)


def gradient(name, layout, rule, window, **options):
    case, learner, pack = stacked(name, layout, rule)
    run = quick(learner.sequence_grad(case.loss, window=window, reduction='sum'))
    return run(case.params, learner.init(case.params, pack(case.carry), case.xs[0]), case.xs, case.ys, **options)[0]


@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('name, layout', EVERY)
def test_the_gradient_is_that_of_the_oracle(name, layout, rule):
    case = models.case(name)
    assert_close(gradient(name, layout, rule, 4), oracles.total(oracle(case, rule)))
    groups = stacked(name, layout, rule)[1].graph.hidden_groups
    assert sorted(g.num_state for g in groups) == sorted(len(g) for g in case.model.groups)


@pytest.mark.parametrize('rule', RULES)
def test_each_step_gives_the_gradient_of_the_oracle(rule):
    case, learner, pack = stacked('two_equal_layers', 'rows', rule)
    state, step = learner.init(case.params, pack(case.carry), case.xs[0]), quick(learner.grad(case.loss))
    for t, (x, y) in enumerate(zip(case.xs, case.ys, strict=True)):
        _, grads, state = step(case.params, state, x, y)
        assert_close(grads, at(oracle(case, rule), t))
    assert state.carry['all'].shape == (2, *case.carry['h1'].shape)


@pytest.mark.parametrize('layout', ['rows', 'features'])
def test_single_lanes_start_anew_along_the_axis_that_they_have_in_the_array(layout):
    case, learner, pack = stacked('two_equal_layers', layout, 'D_RTRL')
    start = learner.init(case.params, pack(case.carry), case.xs[0])
    want = oracles.restarted(oracles.dense_recursion, case, FLAGS, case.carry)
    got = gradient('two_equal_layers', layout, 'D_RTRL', 4, reset=(FLAGS, pack(case.carry)))
    assert_close(got, oracles.total(want))
    moved = start.replace(carry={'all': start.carry['all'] + 1.})
    again = braintrace.functional.reset(moved, np.array([True, False]), start.carry)
    parts = LAYOUTS[layout][1](again.carry['all'] - start.carry['all'], [case.carry['h1'].shape[-1]] * 2)
    for part in parts:
        want = np.stack([np.zeros(part.shape[1:]), np.ones(part.shape[1:])])
        np.testing.assert_allclose(part, want, atol=1e-15)
