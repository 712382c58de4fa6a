"""XLA's programs: buffers of the trace's size, and arrays inside the loop over a window."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import braintrace
from tests import xla
from tests.late import LATE

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
def train(**of_learner):
    (learner, state), optimizer = learner_of(**of_learner), optax.sgd(0.1)

    def run(state, params, opt_state, xs, ys):
        update = learner.sequence_update(loss, optimizer)
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
def own_loop():
    """A gradient and an update after each single step, as a user's own scan."""
    learner, state = learner_of(rule=LATE)

    def run(state, params, xs, ys):
        def step(kept, at):
            state, params = kept
            grads, _, _, state = learner.grad(loss)(params, state, *at)
            return (state, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)), None

        return lax.scan(step, (state, params), (xs, ys))[0]

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


def synapse(params, states, x):
    """The first state does not read the second one."""
    i, v = states
    i = 0.9 * i + braintrace.matmul(jnp.concatenate([x, jnp.tanh(v)], -1), params['w'])
    v = 0.8 * v + i
    return v @ params['out'], (i, v)


GIVEN = {'get-tuple-element', 'parameter'}


def of_the_traces_size(compiled):
    trace = f'f32[{TRACE}]'
    return {opcode for _, result, opcode in instructions(compiled) if result.startswith(trace)}


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize(
    ('cell', 'what'),
    [
        *((cell, what) for what in ('updates', 'kept') for cell in (coupled, unread)),
        (synapse, 'kept'),
    ],
)
def test_a_trace_of_two_states_is_never_copied(cell, what):
    """Not where steps that are pending between single steps are written first, either."""
    two = {'cell': cell, 'rule': LATE, 'states': 2}
    made = of_the_traces_size(train(**two) if what == 'updates' else gradient(None, **two)) - GIVEN
    assert made and 'copy' not in made


def gates(params, h, x):
    """Two gates in one product: the trace has each position of the state twice."""
    products = braintrace.matmul(jnp.concatenate([x, h], -1), params['w'])
    keep, new = jnp.split(products, 2, -1)
    h = jax.nn.sigmoid(keep) * h + jnp.tanh(new)
    return h @ params['out'], h


@pytest.mark.slow
def test_what_a_trace_of_gates_is_multiplied_by_is_not_gathered_for_each_of_its_numbers():
    learner = braintrace.functional.online(gates, braintrace.rules.d_rtrl())
    params, optimizer = {'w': jnp.ones((I + N, 2 * N)), 'out': jnp.ones((N, 2))}, optax.sgd(0.1)
    state = learner.init(params, jnp.zeros((B, N)), XS[0])

    def update(state, params, opt_state):
        return learner.sequence_update(loss, optimizer)(params, opt_state, state, XS, YS)

    text = optimised(update, state, params, optimizer.init(params)).as_text()
    trace = f'f32[{B},{I + N},{2 * N}]'
    fused = [c for c in re.split(r'\n}\n', text) if c.lstrip().startswith('%fused_computation')]
    passes = [c for c in fused if trace in c]
    assert passes and not any(f'f32[{B},2,{N}]' in c for c in passes)


def test_pending_steps_hold_no_zeros_that_the_structure_gives():
    _, state = learner_of(synapse, LATE, 2)
    (rows,) = state.trace['(pending)'].factors.d.values()
    assert [[x is not None for x in row] for row in rows] == [[True, False], [True, True]]


def instructions(compiled):
    """``(computation, result, opcode)`` of every instruction outside of fusions."""
    where = ''
    for line in compiled.as_text().splitlines():
        if line and not line.startswith(' ') and line.endswith('{'):
            where = line.split()[0]
        found = re.match(r'\s+(?:ROOT )?%\S+ = (\S+) ([\w-]+)\(', line)
        if found and 'fused_computation' not in where:
            yield where, *found.groups()


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize(
    'make',
    [train, lambda: train(rule=LATE), lambda: gradient(4), lambda: gradient(None), own_loop],
    ids=['train', 'train_late', 'window_4', 'whole', 'own'],
)
def test_there_is_one_buffer_of_the_traces_size_and_it_is_the_donated_one(make):
    compiled = make()
    memory, made = compiled.memory_analysis(), of_the_traces_size(compiled)
    trace_bytes = sum(e.nbytes for e in jax.tree.leaves(learner_of()[1].trace))
    assert memory.alias_size_in_bytes >= trace_bytes > memory.temp_size_in_bytes
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
    history = {where for where, result, op in rows if op in GIVEN and result.startswith(trace)}
    made = [
        (where, opcode)
        for where, result, opcode in rows
        if opcode not in GIVEN and result.startswith(trace if where in history else (weight, trace))
    ]
    assert len(history) == 1 and not made


def test_the_loop_of_a_window_holds_the_product_with_the_state_alone():
    """One product forward, ``h @ W_h``; those of the inputs and of the readout are of all steps."""
    learner, state = learner_of()
    text = gradient_of_a_window(learner, PARAMS, state, XS, YS).as_text()
    products = re.findall(r'= f32\[([\d,]+)\]\S* dot\(', text)
    assert products.count(f'{B},{N}') == 1
    assert {f'{T * B},{N}', f'{T * B},2'} <= set(products)


@pytest.mark.tier(quick=0)
@pytest.mark.filterwarnings('ignore:parameter v reaches')
@pytest.mark.parametrize('jitted', [False, True], ids=['plain', 'inside_jit'])
def test_inside_a_window_the_gradient_of_a_plain_parameter_is_not_made_either(jitted):
    """``x @ v`` without an op, used in three ways: one product after the loop for each use."""
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w)) if jitted else lambda x, w: jnp.tanh(x @ w)

    def feedforward(params, h, x):
        z = layer(x, params['v']) + layer(x**2, -params['v'])
        return cell(params, h, layer(z, params['v'].T))

    learner = braintrace.functional.online(feedforward, braintrace.rules.d_rtrl())
    params = {**PARAMS, 'v': jnp.ones((I, 2 * I)) / I}
    state = learner.init(params, jnp.zeros((B, N)), XS[0])
    run = gradient_of_a_window(learner, params, state, XS, YS)
    loops = set(re.findall(r'body=(%[\w.-]+)', run.as_text()))
    made = [
        (where in loops, opcode)
        for where, result, opcode in instructions(run)
        if result.startswith((f'f32[{I},{2 * I}]', f'f32[{2 * I},{I}]'))
    ]
    inside, behind = ({opcode for at, opcode in made if at == where} for where in (True, False))
    assert not inside & {'dot', 'fusion', 'add', 'transpose', 'copy'} and behind & {'dot', 'fusion'}


@pytest.mark.parametrize('layout', [('NHWC', 'HWIO', 'NHWC'), ('NCHW', 'OIHW', 'NCHW')])
def test_in_a_loop_a_convolution_and_its_derivatives_stand_in_the_order_that_is_fast(layout):
    axes = lax.conv_dimension_numbers((1,) * 4, (1,) * 4, layout)
    xs = draw(T, *np.array([B, 3, 8, 8])[np.argsort(axes.lhs_spec)])
    kernel = draw(*np.array([5, 3, 3, 3])[np.argsort(axes.rhs_spec)])

    def run(kernel, xs, convolve):
        def step(total, x):
            y, pull = jax.vjp(convolve, kernel, x)
            return jax.tree.map(jnp.add, total, pull(jnp.tanh(y))), None

        return lax.scan(step, (kernel, xs[0]), xs)[0]

    def orders(convolve):
        text = optimised(functools.partial(run, convolve=convolve), kernel, xs).as_text()
        return re.findall(r' convolution\(.*dim_labels=(\S+?),? ', text)

    ours = orders(lambda k, x: braintrace.conv(x, k, dimension_numbers=layout))
    assert len(ours) == 3 and set(ours) == {'b01f_01io->b01f'}
    by_jax = lambda k, x: lax.conv_general_dilated(x, k, (1, 1), 'SAME', None, None, layout)
    assert len(set(orders(by_jax))) == 3


def dropped_window(rule):
    """The gradient of one window, and the state after it, in which no trace counts."""
    return gradient(None, keep_trace=False, rule=rule)


@pytest.mark.slow
def test_a_window_whose_trace_is_dropped_makes_no_array_of_its_size():
    """Also where single steps were pending beside it: what goes in comes out."""
    assert of_the_traces_size(dropped_window(LATE)) <= GIVEN
    assert 'fusion' in of_the_traces_size(gradient(None))


@pytest.mark.slow
def test_without_a_rule_a_window_has_no_loop_backwards():
    """What a step sends to each y is made for all steps at once."""

    def loops(rule):
        return len(re.findall(r' while\(', dropped_window(rule).as_text()))

    assert loops(None) == 1
    assert loops(braintrace.rules.d_rtrl()) > 1


def test_under_vmap_the_history_is_skipped_where_no_lane_has_a_past():
    learner, state = learner_of()
    run = jax.jit(jax.vmap(learner.sequence_grad(loss), (0, 0, None, None)))
    params, state = jax.tree.map(lambda a: jnp.stack([a, a]), (PARAMS, state))
    assert ' conditional(' in run.lower(params, state, XS, YS).compile().as_text()


def test_what_the_checks_look_for_is_found_where_it_is():
    """The same text holds a weight-sized product once the weights change at every step."""
    assert any(
        result.startswith(f'f32[{WEIGHT}]') and opcode in ('dot', 'fusion')
        for _, result, opcode in instructions(train())
    )
