"""A learner inside ``jax.shard_map``, as JAX checks it by default: the numbers of one device.

On one device here; two devices run the same in a process of their own.
"""

import contextlib
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import braintrace
from braintrace import functional, rules
from braintrace.errors import BraintraceWarning, StructureError
from tests import oracles
from tests.compare import errors
from tests.functional.plain import on_devices

B, I, N, T = 4, 2, 3, 3  # noqa: E741
RNG = np.random.default_rng(3)
XS, YS = RNG.normal(size=(T, B, I)), RNG.normal(size=(T, B, N))
SHAPES = {'w': (I + N, N), 'r': (I, N), 'out': (N, N)}
WEIGHTS = {name: RNG.normal(size=shape) for name, shape in SHAPES.items()}
MESH = jax.sharding.Mesh(np.array(jax.devices()), ('a',))
SPECS = {'mesh': MESH, 'in_specs': (P(), P(None, 'a'), P(None, 'a')), 'out_specs': P()}
mm = braintrace.matmul


def cell(p, c, x):
    """A gate behind a function of its weight, a custom rule, control flow, a counter, a key and a
    derived state.
    """
    r = jax.nn.relu(mm(x, 2 * p['r']))
    u = mm(jnp.concatenate([x, r * c['h']], -1), p['w']) - 0.5 * c['s']
    h, _ = lax.scan(lambda h, _: (0.9 * h + 0.1 * jnp.tanh(u), None), c['h'], None, length=12)
    new = {'h': h, 's': jnp.tanh(h), 'n': c['n'] + 1, 'key': jax.random.split(c['key'])[0]}
    return h @ p['out'], new


def carry(batch: int, key: int = 0):
    """Counters and keys lead by a batch axis, so that they can be cut along it."""
    zeros = jnp.zeros((batch, N))
    return {'h': zeros, 's': zeros, 'n': jnp.zeros((batch,), int), 'key': jax.random.key(key)}


def loss(out, y):
    return jnp.sum(jnp.sin(out - y))


def shared_loss(out, y):
    return lax.pmean(loss(out, y), 'a')


def penalised(out, y, across=lambda x: x):
    """A loss of each shard beside a penalty that they have in common."""
    return braintrace.Penalised(loss(out, y), across(jnp.sum(out**2)))


def params():
    return jax.tree.map(jnp.asarray, WEIGHTS)


LEARNERS = {
    name: functional.online(cell, rule)
    for name, rule in {'d_rtrl': rules.d_rtrl(), 'es_d_rtrl': rules.es_d_rtrl(0.8)}.items()
}


def over_the_sequence(learner, p, xs, ys, loss=loss):
    state = learner.init(p, carry(xs.shape[1]), xs[0])
    grads, losses, *_ = learner.sequence_grad(loss, window=2, reduction='sum')(p, state, xs, ys)
    return grads, losses.sum()


def step_by_step(learner, p, xs, ys, loss=loss):
    """In a scan, whose carry has one type."""

    def step(state, at):
        grads, value, _, state = learner.grad(loss)(p, state, *at)
        return state, (grads, value)

    grads, losses = lax.scan(step, learner.init(p, carry(xs.shape[1]), xs[0]), (xs, ys))[1]
    return jax.tree.map(lambda g: g.sum(0), grads), losses.sum()


def observed(learner, p, xs, ys, loss=loss):
    """A second step, whose values are shown."""
    _, state = learner.step(p, learner.init(p, carry(xs.shape[1]), xs[0]), xs[0])
    (grads, value, *_), _ = learner.observed(loss)(p, state, xs[1], ys[1])
    return grads, value


def through_steps(learner, p, xs, ys, across):
    """The derivative that JAX takes of steps, which it sums over the shards itself."""

    def total(p):
        def step(state, at):
            out, state = learner.step(p, state, at[0])
            return state, loss(out, at[1])

        return lax.scan(step, learner.init(p, carry(xs.shape[1]), xs[0]), (xs, ys))[1].sum()

    value, grads = jax.value_and_grad(total)(p)
    return grads, across(value)


def trained(learner, p, xs, ys, across):
    optimizer = optax.chain(optax.stateless(lambda g, _: across(g)), optax.adam(1e-1, eps=1e-3))
    state = learner.init(p, carry(xs.shape[1]), xs[0])
    train = learner.sequence_update(loss, optimizer, 2, reduction='sum')
    found = train(p, optimizer.init(p), state, xs, ys)
    return (found.params, found.opt_state), across(found.losses.sum())


def summed(tree):
    return lax.psum(tree, 'a')


def ways(learner, shards: bool) -> dict:
    """Ways to learn: functions of parameters and data of the whole batch, or of one shard of it."""
    across = summed if shards else lambda tree: tree
    penalty = partial(penalised, across=across)
    of_all = shared_loss if shards else lambda out, y: loss(out, y) / len(jax.devices())

    def shared(*data):
        grads, value = over_the_sequence(learner, *data, of_all)
        return across(grads), value

    return {
        'sequence': lambda *data: across(over_the_sequence(learner, *data)),
        'a loss shared by the shards': shared,
        'a penalty shared by the shards': (
            lambda *data: across(over_the_sequence(learner, *data, penalty))
        ),
        'a penalty shared by the shards, step by step': (
            lambda *data: across(step_by_step(learner, *data, penalty))
        ),
        'an observed step': lambda *data: across(observed(learner, *data, penalty)),
        'the derivative of steps': lambda *data: through_steps(learner, *data, across),
        'training': lambda *data: trained(learner, *data, across),
    }


def differences(name: str, *chosen: str) -> dict[str, float]:
    """The largest relative difference between all devices and one, for each way of learning."""
    one, each, found = ways(LEARNERS[name], False), ways(LEARNERS[name], True), {}
    for way in chosen or one:
        got = jax.jit(jax.shard_map(each[way], **SPECS))(params(), XS, YS)
        found[way] = max(errors(got, jax.jit(one[way])(params(), XS, YS)).values())
    return found


@pytest.mark.slow
def test_a_learner_in_a_shard_map_of_one_device_is_that_of_no_shard_map():
    with jax.enable_x64(True):
        found = differences('d_rtrl', 'the derivative of steps')
        assert max(found.values()) < 1e-12


@pytest.mark.parametrize('checked', [True, False])
@pytest.mark.parametrize('call', ['sequence_grad', 'sequence_update', 'grad', 'heads', 'observed'])
def test_a_loss_that_is_summed_once_more_behind_the_call_is_refused(call, checked):
    learner, optimizer = functional.online(cell, rules.d_rtrl()), optax.sgd(1e-2)

    def run(loss, p, xs, ys):
        state = learner.init(p, carry(xs.shape[1]), xs[0])
        if call == 'sequence_update':
            return learner.sequence_update(loss, optimizer)(p, optimizer.init(p), state, xs, ys)[0]
        one = (xs, ys) if call == 'sequence_grad' else (xs[0], ys[0])
        found = getattr(learner, call)(loss)(p, state, *one)
        return (found[0] if call == 'observed' else found).grads

    def counted(out, y):
        """Every shard knows how many samples all have: that is no sum of losses."""
        return loss(out, y) / lax.psum(jnp.float32(len(y)), 'a')

    def traced(loss):
        each = lambda *args: jax.tree.map(lambda g: g[None], run(loss, *args))
        specs = SPECS | {'out_specs': P('a'), 'check_vma': checked}
        return jax.eval_shape(jax.shard_map(each, **specs), params(), XS, YS)

    traced(counted)
    refused = pytest.raises(StructureError, match=r"over the shards of \['a'\]")
    with contextlib.nullcontext() if checked else refused:
        traced(shared_loss)


SHOWN = {
    'graph': lambda learner: learner.graph,
    'routes': lambda learner: learner.routes,
    'report': lambda learner: learner.report,
    'memory': lambda learner: learner.memory(),
    'partition_specs': lambda learner: learner.partition_specs(dict.fromkeys(SHAPES)),
}


@pytest.mark.parametrize('what', SHOWN)
def test_what_is_shown_of_the_shapes_outside_is_told_where_it_runs_inside_too(what, recwarn):
    learner, p = functional.online(cell, rules.d_rtrl()), params()
    init = lambda p, x: learner.init(p, carry(len(x)), x).t
    jax.eval_shape(init, p, XS[0])
    SHOWN[what](learner)
    assert not recwarn.list
    inside = jax.shard_map(init, mesh=MESH, in_specs=(P(), P('a')), out_specs=P('a'))
    jax.eval_shape(inside, p, XS[0, :2])
    with pytest.warns(BraintraceWarning, match=f'`{what}` is that of the shapes that'):
        SHOWN[what](learner)


def test_the_gradient_of_one_shard_is_not_taken_for_that_of_all():
    own = jax.shard_map(lambda *a: over_the_sequence(LEARNERS['d_rtrl'], *a)[0], **SPECS)
    with pytest.raises(ValueError, match='out_specs'):
        jax.eval_shape(own, params(), XS, YS)


@pytest.mark.slow
def test_arrays_that_a_cell_closes_over_are_those_of_one_device():
    mask = np.tri(I, N)

    def masked(p, h, x):
        h = 0.8 * h + jnp.tanh(x @ (p['r'] * jnp.asarray(mask)))
        return h, h

    def gradient(p, xs, ys):
        learner = functional.online(masked, rules.rtrl(), mark='auto')
        state = learner.init(p, jnp.zeros((xs.shape[1], N)), xs[0])
        return summed(learner.sequence_grad(loss, reduction='sum')(p, state, xs, ys)[0])

    with jax.enable_x64(True):
        p, xs, ys = {'r': jnp.asarray(WEIGHTS['r'])}, jnp.asarray(XS), jnp.asarray(YS)
        got = jax.jit(jax.shard_map(gradient, **SPECS))(p, xs, ys)
        want = oracles.by_time(masked, p, np.zeros((B, N)), xs, ys, loss)
        assert max(errors(got, want).values()) < 1e-12


@pytest.mark.slow
def test_two_devices_learn_what_one_does():
    found = on_devices(__file__, 2)
    assert len(found) == 8 and max(found.values()) < 1e-10, found


if __name__ == '__main__':
    jax.config.update('jax_enable_x64', True)
    other = differences('es_d_rtrl', 'sequence')['sequence']
    print(json.dumps(differences('d_rtrl') | {'es_d_rtrl': other}))
