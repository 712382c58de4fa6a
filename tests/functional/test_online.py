"""The pure core: states, routes, memory, errors, and its behaviour under transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, rules
from braintrace.errors import NotCompiledError, StructureError
from tests.compare import assert_close
from tests.precision import float64 as float64

from . import plain
from .plain import B, I, N, drawn, loss

FLOATS, T = ('w', 'b', 'out'), 6
CARRY = {'h': np.zeros((B, N)), 'count': np.array(0)}
RULES = [rules.d_rtrl(), rules.es_d_rtrl(0.7)]


def cell(p, c, x):
    h = 0.5 * c['h'] + jnp.tanh(braintrace.matmul(jnp.concatenate([x, c['h']], -1), p['w'], p['b']))
    return h @ p['out'], {'h': h, 'count': c['count'] + 1}


def setting():
    carry = {'h': drawn(B, N), 'count': jnp.array(0)}
    return plain.params() | {'steps': jnp.arange(3)}, carry, drawn(T, B, I), drawn(T, B, 2)


def floats(tree):
    """Without the integers, which have no gradient."""
    return {name: tree[name] for name in FLOATS}


def started(rule=RULES[0], **options):
    params, carry, xs, ys = setting()
    learner = functional.online(cell, rule, **options)
    return learner, params, learner.init(params, carry, xs[0]), xs, ys


@functools.cache
def shared():
    """One learner for calls that are refused."""
    return started()


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('rule', [*RULES, None], ids=str)
def test_grad_is_jax_grad_of_a_loss_on_the_outputs_of_step(rule):
    learner, params, state, xs, ys = started(rule)
    grads, value, out, new = learner.grad(loss)(params, state, xs[0], ys[0])
    want = jax.grad(lambda p: loss(learner.step(p, state, xs[0])[0], ys[0]), allow_int=True)(params)
    assert_close(grads, want)
    assert value == loss(out, ys[0])
    assert grads['steps'].dtype == jax.dtypes.float0
    assert_close(new, learner.step(params, state, xs[0])[1])


def test_inputs_get_their_exact_same_step_gradient():
    learner, params, state, xs, ys = started()
    online = jax.grad(lambda x: loss(learner.step(params, state, x)[0], ys[0]))(xs[0])
    assert_close(online, jax.grad(lambda x: loss(cell(params, state.carry, x)[0], ys[0]))(xs[0]))


def test_jitted_equals_eager_and_a_second_call_does_not_trace_the_cell():
    traced = []

    def counted(p, c, x):
        traced.append(1)
        return cell(p, c, x)

    params, carry, xs, ys = setting()
    learner = functional.online(counted, RULES[0])
    state = learner.init(params, carry, xs[0])
    run = learner.grad(loss)
    assert_close(jax.jit(run)(params, state, xs[0], ys[0]), run(params, state, xs[0], ys[0]))
    assert len(traced) == 1


@pytest.mark.slow
@pytest.mark.parametrize('rule', RULES, ids=str)
def test_mapped_lanes_equal_the_batch(rule):
    learner, params, state, xs, ys = started(rule)
    want, *_ = jax.jit(learner.sequence_grad(loss, reduction='sum'))(params, state, xs, ys)
    single = functional.online(cell, rule)
    lanes = jax.vmap(lambda h, x: single.init(params, {'h': h, 'count': jnp.array(0)}, x))(
        state.carry['h'], xs[0]
    )
    run = jax.jit(jax.vmap(single.sequence_grad(loss, reduction='sum'), in_axes=(None, 0, 1, 1)))
    got, *_ = run(params, lanes, xs, ys)
    assert_close(jax.tree.map(lambda g: g.sum(0), floats(got)), floats(want), 1e-11)


def test_forward_mode_over_step_is_refused_by_jax():
    learner, params, state, xs, _ = started()
    with pytest.raises(TypeError, match='custom_vjp'):
        jax.jvp(lambda x: learner.step(params, state, x)[0], (xs[0],), (xs[0],))


def test_routes_partition_and_combine():
    learner, params, *_ = started()
    kinds = {'w': 'trace', 'b': 'trace', 'out': 'same-step', 'steps': 'frozen'}
    assert {k: r.kind for k, r in learner.routes.items()} == kinds
    parts = functional.partition(params, learner)
    names = [sorted(k for k, v in part.items() if v is not None) for part in parts]
    assert names == [['b', 'w'], ['out'], ['steps']]
    assert_close(functional.combine(*parts), params)


def test_what_is_not_trainable_gets_zero_and_what_is_not_hidden_no_trace():
    learner, params, state, xs, ys = started(
        trainable=lambda path, leaf: path != ('w',), hidden=lambda path, leaf: path == ('h',)
    )
    grads, *_ = jax.jit(learner.sequence_grad(loss))(params, state, xs, ys)
    assert (grads['w'] == 0).all() and jnp.abs(grads['b']).max() > 0
    assert set(state.trace['b']['h']) == {'weight', 'bias'}


def test_memory_lists_the_whole_state_and_allocates_nothing():
    big = functional.online(cell, RULES[0])
    shape = lambda *axes: jax.ShapeDtypeStruct(axes, jnp.float32)
    params = {'w': shape(100_000, 99_000), 'b': shape(99_000), 'out': shape(99_000, 2)}
    carry = {'h': shape(8, 99_000), 'count': shape()}
    state = jax.eval_shape(big.init, params, carry, shape(8, 1000))
    memory = big.memory()
    assert memory.total == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) > 3e11
    assert ('trace/w/h/weight/0', (8, 100_000, 99_000)) in [row[:2] for row in memory.rows]


def not_the_count(path, leaf):
    return path != ('count',)


def test_reset_starts_flagged_lanes_anew():
    learner, params, state, xs, ys = started()
    carry0 = {'h': jnp.zeros((B, N)), 'count': jnp.array(9)}
    moved = jax.jit(learner.sequence_grad(loss))(params, state, xs, ys).state
    again = functional.reset(moved, jnp.array([True, False]), carry0, hidden=not_the_count)
    assert again.t.tolist() == [0, T] and int(again.carry['count']) == T
    for new, old in (
        (again.carry['h'], moved.carry['h']),
        (again.trace['w']['h']['weight'][0], moved.trace['w']['h']['weight'][0]),
    ):
        assert (new[0] == 0).all()
        assert_close(new[1], old[1])
    with pytest.raises(ValueError, match=r'bool of shape \[\] or \[2\]'):
        functional.reset(moved, jnp.zeros(3, bool), carry0)


@pytest.mark.parametrize(
    'change, words',
    [
        (lambda state: state.carry, 'OnlineState'),
        (lambda state: None, 'state is NoneType'),
        (lambda state: state.replace(trace={}), 'trace of this state'),
    ],
)
@pytest.mark.parametrize('call', ['step', 'grad', 'vjp'])
def test_what_is_no_state_of_this_learner_is_refused(call, change, words):
    learner, params, state, xs, ys = shared()
    calls = {'step': learner.step, 'vjp': learner.vjp, 'grad': learner.grad(loss)}
    with pytest.raises(StructureError, match=words):
        calls[call](params, change(state), xs[0], *([ys[0]] if call == 'grad' else []))


@pytest.mark.parametrize(
    'options, given, words',
    [
        ({'window': 0}, {}, 'window is 0'),
        ({'reduction': 'max'}, {}, "reduction is 'max'"),
        ({'loss_fn': lambda o, t: o}, {}, 'one real scalar'),
        ({}, {'ys': np.ones((2, B, 2))}, 'unequal lengths'),
        ({}, {'mask': np.ones(2)}, 'mask'),
        ({}, {'reset': (np.ones(2, bool), CARRY)}, r'\[6\] or \[6, 2\]'),
    ],
)
def test_bad_calls_over_a_sequence_are_refused(options, given, words):
    learner, params, state, xs, ys = shared()
    given = {'ys': ys, **given}
    with pytest.raises(ValueError, match=words):
        learner.sequence_grad(**{'loss_fn': loss, **options})(params, state, xs, **given)


def test_a_description_before_init_says_how_to_get_one():
    learner = functional.online(cell, RULES[0])
    for use in (
        lambda: learner.graph,
        lambda: learner.routes,
        learner.memory,
        lambda: learner.partition_specs({}),
    ):
        with pytest.raises(NotCompiledError, match='eval_shape'):
            use()
