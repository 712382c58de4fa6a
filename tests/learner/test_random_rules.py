"""Learners whose trace holds random numbers: calls, resets, saving, mapping, units."""

import io

import brainstate
import jax
import jax.numpy as jnp
import pytest
import saiunit as u

import braintrace
from braintrace import functional, rules
from braintrace.errors import StructureError
from tests.compare import assert_close, errors

from .networks import BATCH, Net, by_steps, compiled, data, loss_of, squared

RULES = {
    'signs': rules.signs(seed=2),
    'uoro': rules.uoro(seed=2),
    'uoro_batch': rules.uoro('batch', 2),
}


def in_gate(*names):
    """These rules in the gate, all at night."""
    return pytest.mark.parametrize(
        'rule',
        [
            pytest.param(r, marks=pytest.mark.slow if n in names else pytest.mark.nightly, id=n)
            for n, r in RULES.items()
        ],
    )


TOLERANCE = 1e-4  # of float32


def reset_and_grad(learner, xs, ys, step_fn):
    learner.reset_state()
    return learner.etrace_grad(xs, ys, step_fn=step_fn).grads


@pytest.mark.slow
@in_gate('uoro')
def test_a_snapshot_holds_the_key(rule):
    xs, ys = data(4)
    learner = compiled(rule)
    step_fn = loss_of(learner)
    learner(xs[0])
    tree = learner.save()
    first = learner.etrace_grad(xs, ys, step_fn=step_fn).grads
    learner.restore(tree)
    assert_close(learner.etrace_grad(xs, ys, step_fn=step_fn).grads, first, 0.0)
    second, third = (reset_and_grad(learner, xs, ys, step_fn) for _ in range(2))
    assert max(errors(second, third).values()) > 1e-3  # the key goes on
    with pytest.raises(StructureError):
        compiled(rules.signs(seed=3)).restore(tree)


@pytest.mark.slow
@in_gate('signs', 'uoro')
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


class WithUnit(Net):
    """A membrane in millivolts before the cell."""

    def init_state(self, batch_size=None, **_):
        self.v = brainstate.HiddenState(jnp.zeros((batch_size, 2)) * u.mV)

    def update(self, x):
        self.v.value = 0.5 * self.v.value + x * u.mV
        return super().update(self.v.value / u.mV)


@pytest.mark.slow
@in_gate('signs')
def test_a_state_with_a_unit_is_followed_by_single_calls_as_by_sequences(rule):
    xs, ys = data(3)
    learner = compiled(rule, WithUnit)
    grads = learner.etrace_grad(xs, ys, step_fn=loss_of(learner), reduction='sum').grads
    assert_close(by_steps(compiled(rule, WithUnit), xs, ys), grads, TOLERANCE)


def cell(params, h, x):
    h = 0.8 * h + jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['W']))
    return h, h


def pure(rule):
    learner = functional.online(cell, rule)
    params, h, xs = {'W': jnp.full((5, 3), 0.2)}, jnp.zeros((2, 3)), data(4)[0][:, :2]
    return learner, params, learner.init(params, h, xs[0]), xs, jnp.zeros((4, 2, 3))


@in_gate('uoro')
def test_a_state_goes_into_a_file_and_lies_on_a_mesh(rule):
    learner, params, state, xs, ys = pure(rule)
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


@pytest.mark.slow
@in_gate('signs')
def test_mapped_states_share_the_key_unless_they_are_given_others(rule):
    learner, params, state, xs, ys = pure(rule)
    run = learner.sequence_grad(squared)
    two = jax.tree.map(lambda w: jnp.stack([w, w]), params)
    states = jax.vmap(lambda p: learner.init(p, state.carry, xs[0]))(two)
    first, second = jax.jit(jax.vmap(lambda p, s: run(p, s, xs, ys)[0]))(two, states)['W']
    assert_close(first, second, 0.0)
    keys = jax.random.split(jax.random.key(1), 2)
    others = states.replace(trace={**states.trace, '(key)': keys})
    first, second = jax.jit(jax.vmap(lambda p, s: run(p, s, xs, ys)[0]))(two, others)['W']
    assert errors(first, second)[''] > 1e-3
