"""XLA's programs: buffers of the trace's size, and arrays inside the loop over a window."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from tests import xla

B, N, I, T = 16, 96, 40, 12
WEIGHT, TRACE = f'{I + N},{N}', f'{B},{I + N},{N}'
pytestmark = pytest.mark.skipif(
    jax.default_backend() != 'cpu', reason='the text of another backend differs'
)


def cell(params, h, x):
    h = 0.8 * h + jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['w']))
    return h @ params['out'], h


def loss(y, target):
    return jnp.mean((y - target) ** 2)


def draw(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


D_RTRL = braintrace.rules.d_rtrl()
PARAMS = {'w': draw(I + N, N), 'out': draw(N, 2)}
XS, YS = jnp.ones((T, B, I)), jnp.ones((T, B, 2))


@functools.cache
def learner_of(cell=cell, rule=D_RTRL, states=1):
    """A learner and its first state."""
    learner, h = braintrace.functional.online(cell, rule), jnp.zeros((B, N))
    return learner, learner.init(PARAMS, h if states == 1 else (h,) * states, XS[0])


def optimised(fn, *args):
    """A program with every optimisation of XLA, as users have it; these tests are compiled
    without.
    """
    jitted = jax.jit(fn, donate_argnums=0, compiler_options=xla.AS_USERS_HAVE_IT)
    return jitted.lower(*args).compile()


@functools.cache
def train(write_every, **of_learner):
    (learner, state), optimizer = learner_of(**of_learner), optax.sgd(0.1)

    def run(state, params, opt_state, xs, ys):
        update = learner.sequence_update(loss, optimizer, write_every=write_every)
        return update(params, opt_state, state, xs, ys)

    return optimised(run, state, PARAMS, optimizer.init(PARAMS), XS, YS)


@functools.cache
def gradient(window, keep_trace=True, **of_learner):
    learner, state = learner_of(**of_learner)

    def run(state, params, xs, ys):
        grad = learner.sequence_grad(loss, window=window, keep_trace=keep_trace)
        return grad(params, state, xs, ys)

    return optimised(run, state, PARAMS, XS, YS)


@functools.cache
def own_loop(write_every):
    """A gradient and an update after each single step, as a user's own scan."""
    learner, state = learner_of(rule=braintrace.rules.d_rtrl(write_every=write_every))

    def run(state, params, xs, ys):
        def step(kept, at):
            state, params = kept
            grads, _, _, state = learner.grad(loss)(params, state, *at)
            return (state, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)), None

        return jax.lax.scan(step, (state, params), (xs, ys))[0]

    return optimised(run, state, PARAMS, XS, YS)


def coupled(params, states, x):
    """Each state reads both, as a membrane and its adaptation do."""
    v, a = states
    y = braintrace.matmul(jnp.concatenate([x, v], -1), params['w'])
    v, a = 0.8 * v - 0.3 * a + jnp.tanh(y), 0.9 * a + 0.1 * jnp.tanh(v)
    return v @ params['out'], (v, a)


def unread(params, states, x):
    """The second state is read by no new state but through the op, as the h of an LSTM is."""
    c, h = states
    c = 0.8 * c + jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['w']))
    return jnp.tanh(c) @ params['out'], (c, jnp.tanh(c))


@pytest.mark.tier(quick=0, one_in=2)
@pytest.mark.parametrize('what', ['updates', 'kept'])
@pytest.mark.parametrize('cell', [coupled, unread])
def test_a_trace_of_two_states_is_never_copied(cell, what):
    """Not where steps that are pending between single steps are written first, either."""
    two = {'cell': cell, 'rule': braintrace.rules.d_rtrl(write_every=2), 'states': 2}
    made = of_the_traces_size(train(1, **two) if what == 'updates' else gradient(None, **two))
    assert made - GIVEN and 'copy' not in made


def instructions(compiled):
    """``(computation, result, opcode)`` of every instruction outside of fusions."""
    where = ''
    for line in compiled.as_text().splitlines():
        if line and not line.startswith(' ') and line.endswith('{'):
            where = line.split()[0]
        found = re.match(r'\s+(?:ROOT )?%\S+ = (\S+) ([\w-]+)\(', line)
        if found and 'fused_computation' not in where:
            yield where, *found.groups()


GIVEN = {'get-tuple-element', 'parameter'}


def of_the_traces_size(compiled):
    """The opcodes of what is as large as the trace."""
    rows = instructions(compiled)
    return {opcode for _, result, opcode in rows if result.startswith(f'f32[{TRACE}]')}


@pytest.mark.tier(quick=0, one_in=2)
@pytest.mark.parametrize(
    'make, size',
    [*((train, k) for k in (1, 2, 4)), (gradient, 4), (gradient, None), (own_loop, 2)],
)
def test_there_is_one_buffer_of_the_traces_size_and_it_is_the_donated_one(make, size):
    compiled = make(size)
    memory = compiled.memory_analysis()
    trace_bytes = sum(e.nbytes for e in jax.tree.leaves(learner_of()[1].trace))
    assert memory.alias_size_in_bytes >= trace_bytes > memory.temp_size_in_bytes
    made = of_the_traces_size(compiled)
    moves = {'copy', 'transpose', 'broadcast', 'concatenate', 'convert', 'dot'}
    assert 'fusion' in made and not made & moves


def gradient_of_a_window(learner, *args):
    """The gradient alone: nobody asks for the trace."""
    run = learner.sequence_grad(loss, window=None)
    return optimised(lambda *args: run(*args)[0], *args)


def test_inside_a_window_nothing_of_the_weights_size_is_made():
    """Nobody asks for the trace, so all loops are over steps, beside the one that reads the history
    lane by lane.
    """
    learner, state = learner_of()
    compiled = gradient_of_a_window(learner, PARAMS, state, XS, YS)
    loops = set(re.findall(r'body=(%[\w.-]+)', compiled.as_text()))
    rows = [row for row in instructions(compiled) if row[0] in loops]
    assert loops and any(opcode == 'fusion' for _, _, opcode in rows)
    trace, weight = f'f32[{TRACE}]', f'f32[{WEIGHT}]'
    history = {loop for loop, result, op in rows if op in GIVEN and result.startswith(trace)}
    made = [(loop, result) for loop, result, opcode in rows if opcode not in GIVEN]
    assert len(history) == 1 and not any(result.startswith(trace) for _, result in made)
    assert {loop for loop, result in made if result.startswith(weight)} <= history


def test_the_loop_of_a_window_holds_the_product_with_the_state_alone():
    """One product forward, ``h @ W_h``; those of the inputs and of the readout are of all steps."""
    learner, state = learner_of()
    text = gradient_of_a_window(learner, PARAMS, state, XS, YS).as_text()
    products = re.findall(r'= f32\[([\d,]+)\]\S* dot\(', text)
    assert products.count(f'{B},{N}') == 1
    assert {f'{T * B},{N}', f'{T * B},2'} <= set(products)


@pytest.mark.slow
def test_a_window_whose_trace_is_dropped_makes_no_array_of_its_size():
    """Also where single steps were pending beside it: what goes in comes out."""
    rule = braintrace.rules.d_rtrl(write_every=4)
    assert of_the_traces_size(gradient(None, keep_trace=False, rule=rule)) <= GIVEN
    assert 'fusion' in of_the_traces_size(gradient(None))


def test_under_vmap_the_history_is_skipped_where_no_lane_has_a_past():
    learner, state = learner_of()
    run = jax.jit(jax.vmap(learner.sequence_grad(loss), (0, 0, None, None)))
    params, state = jax.tree.map(lambda a: jnp.stack([a, a]), (PARAMS, state))
    assert ' conditional(' in run.lower(params, state, XS, YS).compile().as_text()


def test_what_the_checks_look_for_is_found_where_it_is():
    """The same text holds a weight-sized product once the weights change at every step."""
    rows = instructions(train(1))
    assert {'dot', 'fusion'} & {op for _, result, op in rows if result.startswith(f'f32[{WEIGHT}]')}
