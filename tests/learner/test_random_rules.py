"""Learners whose trace holds random numbers: calls, resets, saving, mapping, units."""

import io

import jax
import jax.numpy as jnp
import pytest

import braintrace
from braintrace import functional, rules
from braintrace.errors import StructureError
from tests.compare import assert_close, errors

from .networks import BATCH, compiled, data, loss_of, squared

SIGNS, UORO = rules.signs(seed=2), rules.uoro(seed=2)
pytestmark = pytest.mark.slow


def test_a_snapshot_holds_the_key():
    (xs, ys), learner = data(4), compiled(UORO)
    gradient = lambda: learner.etrace_grad(xs, ys, step_fn=loss_of(learner)).grads
    learner(xs[0])
    tree = learner.save()
    first = gradient()
    learner.restore(tree)
    assert_close(gradient(), first, 0.0)
    learner.reset_state()
    second = gradient()
    learner.reset_state()
    assert max(errors(second, gradient()).values()) > 1e-3  # the key goes on
    with pytest.raises(StructureError):
        compiled(rules.signs(seed=3)).restore(tree)


@pytest.mark.parametrize('rule', [SIGNS, UORO, rules.uoro('batch', 2)], ids=str)
def test_lanes_are_reset_and_the_trace_of_a_parameter_is_shown(rule):
    xs, _ = data(3)
    learner = compiled(rule)
    for x in xs:
        learner(x)
    learner.reset_state(lanes=jnp.array([True, False, False]))
    assert learner.etrace.value['t'].tolist() == [0, 3, 3]
    traces = learner.get_etrace_of('cell/Wz/weight')
    assert traces
    for slots in traces.values():
        for slot in slots.values():
            if slot.shape[:1] == (BATCH,):
                assert not slot[0].any() and slot[1].any()
    text = str(learner.report)
    assert rule.name in text and 'unbiased' in text


def cell(params, h, x):
    h = 0.8 * h + jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['W']))
    return h, h


def pure(rule):
    learner = functional.online(cell, rule)
    params, h, xs = {'W': jnp.full((5, 3), 0.2)}, jnp.zeros((2, 3)), data(4)[0][:, :2]
    return learner, params, learner.init(params, h, xs[0]), xs, jnp.zeros((4, 2, 3))


def test_a_state_goes_into_a_file_and_lies_on_a_mesh():
    learner, params, state, xs, ys = pure(UORO)
    run = jax.jit(learner.sequence_grad(squared))
    _, _, _, state = run(params, state, xs, ys)
    file = io.BytesIO()
    functional.save_state(file, state)
    file.seek(0)
    back = functional.load_state(file, jax.eval_shape(lambda: state))
    assert_close(run(params, back, xs, ys)[0], run(params, state, xs, ys)[0], 0.0)
    assert learner.memory().total > 0
    specs = learner.partition_specs({'W': None}, batch_axis='data')
    assert jax.tree.structure(specs.trace) == jax.tree.structure(state.trace)
