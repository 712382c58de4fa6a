"""Resets of single lanes put back states of any dtype; lanes are not guessed from lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional, rules
from braintrace.errors import OptionError, StructureError
from tests import oracles
from tests.compare import assert_close
from tests.functional.plain import sines
from tests.precision import float64 as float64

B = N = 3  # as many units as samples: a length does not tell one from the other
INPUTS, T = 2, 6
RNG = np.random.default_rng(7)
XS = RNG.normal(size=(T, B, INPUTS))
PARAMS = {'w': RNG.normal(size=(INPUTS + N, N))}


def drive(p, h, x):
    return jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), p['w']))


def refractory(p, c, x):
    """States of floats, integers and booleans, and a clock of each sample that allows spikes."""
    silent = (c['rest'] > 0) | (c['clock'][:, None] % 4 == 3)
    v = jnp.where(silent, 0.0, 0.9 * c['v'] + drive(p, c['v'], x))
    spike = v > 0.3
    rest = jnp.where(spike & ~c['spike'], 2, jnp.maximum(c['rest'] - 1, 0))
    return v, {'v': v, 'rest': rest, 'spike': spike, 'clock': c['clock'] + 1}


START = {
    'v': np.full((B, N), 0.1),
    'rest': np.ones((B, N), np.int32),
    'spike': np.zeros((B, N), bool),
    'clock': np.arange(B),
}
FLAGS = np.zeros((T, B), bool)
FLAGS[2, 0] = FLAGS[4, 1] = FLAGS[4, 2] = True


def lane_by_lane():
    """Each stretch of each lane between resets, from the start: outputs per (time, lane)."""
    found = np.zeros((T, B, N))
    for lane in range(B):
        edges = [0, *np.flatnonzero(FLAGS[:, lane]), T]
        for a, b in zip(edges, edges[1:], strict=False):
            h = {k: jnp.asarray(v[lane : lane + 1]) for k, v in START.items()}
            for t in range(a, b):
                out, h = refractory(PARAMS, h, XS[t, lane : lane + 1])
                found[t, lane] = out[0]
    return found


def by_single_steps(learner, carry, state):
    losses, restart, step = [], jax.jit(functional.reset), jax.jit(learner.step)
    for t in range(T):
        state = restart(state, FLAGS[t], carry)
        out, state = step(PARAMS, state, XS[t])
        losses.append(sines(out, None))
    return np.array(losses), state


def by_sequence_grad(learner, carry, state):
    run = jax.jit(learner.sequence_grad(sines, window=4))
    found = run(PARAMS, state, XS, XS, reset=(FLAGS, carry))
    return found.losses, found.state


def by_sequence_update(learner, carry, state):
    run, given = (
        jax.jit(learner.sequence_update(sines, optax.sgd(0.0), update_every=2)),
        (FLAGS, carry),
    )
    found = run(PARAMS, optax.sgd(0.0).init(PARAMS), state, XS, XS, reset=given)
    return found.losses, found.state


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('way', [by_single_steps, by_sequence_grad, by_sequence_update])
def test_integer_and_boolean_states_start_anew_with_their_lane(way):
    learner, carry = functional.online(refractory), jax.tree.map(jnp.asarray, START)
    losses, state = way(learner, carry, learner.init(PARAMS, carry, XS[0]))
    np.testing.assert_allclose(losses, np.sin(lane_by_lane()).sum((1, 2)), atol=1e-12)
    assert state.carry['clock'].tolist() == [4, 3, 4] and state.t.tolist() == [4, 2, 2]


def shared(p, c, x):
    """A threshold that all samples share, as wide as the batch."""
    h = 0.8 * c['h'] + drive(p, c['h'], x) - 0.1 * c['th']
    return h, {'h': h, 'th': 0.9 * c['th'] + 0.1 * h.mean(0)}


def counted(p, c, x):
    """A count that meets nothing: the step does not show what its axis is."""
    h = 0.8 * c['h'] + drive(p, c['h'], x)
    return h, {'h': h, 'count': c['count'] + 1}


def clocked(p, c, x):
    h = 0.8 * c['h'] + drive(p, c['h'], x) * (c['clock'] % 2)
    return h, {'h': h, 'clock': c['clock'] + 1}


H = np.zeros((B, N))


def by_time(cell, params, first, xs, flags):
    """The gradient of all losses, where lanes start again at the flags."""
    return oracles.by_time(cell, params, first, xs, xs, sines, reset=(flags, first))


UNKNOWN = {
    'th': (shared, np.zeros(N), ['float64[3]', "Policy(batched=('th',))", 'all lanes share']),
    'count': (counted, np.zeros(B, int), ['int64[3]', "Policy(batched=('count',))"]),
    'clock': (clocked, np.zeros((), int), ['int64[]', 'learner.reset_state()', 'ShortTermState']),
}


@pytest.mark.parametrize('name', UNKNOWN)
@pytest.mark.filterwarnings('ignore::braintrace.errors.BraintraceWarning')
def test_a_state_without_known_lanes_is_not_reset_in_some_lanes(name):
    cell, first, words = UNKNOWN[name]
    learner, carry = functional.online(cell), {'h': H, name: first}
    state = learner.init(PARAMS, carry, XS[0])
    for reset in (
        lambda: functional.reset(state, FLAGS[2], carry),
        lambda: learner.sequence_grad(sines)(PARAMS, state, XS, XS, reset=(FLAGS, carry)),
    ):
        with pytest.raises(StructureError) as error:
            reset()
        assert all(word in str(error.value) for word in (name, *words)), str(error.value)
    with pytest.raises(StructureError, match=r'int64\[2\].*For indices: jnp.zeros\(3, bool\)'):
        functional.reset(state, jnp.array([0, 1]), carry)
    _, moved = learner.step(PARAMS, state, XS[0])
    jax.tree.map(np.testing.assert_array_equal, functional.reset(moved, True, carry).carry, carry)


def test_the_policy_says_where_lanes_are():
    policy, carry = braintrace.Policy(batched=('count',)), {'h': H, 'count': jnp.zeros(B, int)}
    learner = functional.online(counted, policy=policy)
    _, state = learner.step(PARAMS, learner.init(PARAMS, carry, XS[0]), XS[0])
    assert functional.reset(state, FLAGS[2], carry).carry['count'].tolist() == [0, 1, 1]
    for lanes, words in (
        (('counts',), "'counts', which is no leaf"),
        (('h', 'clock'), 'name states whose axis 0 is the batch'),
    ):
        learner = functional.online(clocked, policy=braintrace.Policy(batched=lanes))
        with pytest.raises(OptionError, match=words):
            learner.init(PARAMS, {'h': H, 'clock': jnp.zeros((), int)}, XS[0])
    with pytest.raises(OptionError, match='tuple of paths'):
        braintrace.Policy(batched='count')


def gated(p, h, x):
    """Decays alone learn: one number for each unit, and no op has a batch."""
    h = jax.nn.sigmoid(braintrace.element_wise(p['w'])) * h + x.sum(-1, keepdims=True)
    return h, h


def grown(p, h, x):
    """An op of two patches of each sample alone."""
    patches = jnp.concatenate([x, 2 * x], -1).reshape(-1, INPUTS)
    h = 0.8 * h + braintrace.matmul(patches, p['w']).reshape(B, 2, N).sum(1)
    return h @ p['o'], h


def patched(p, h, x):
    """The same, and an op of samples."""
    _, h = grown(p, h, x)
    return braintrace.matmul(h, p['o']), h


BATCHES = {
    'gated': (gated, {'w': np.zeros(N)}, True),
    'patched': (patched, {'w': PARAMS['w'][:INPUTS], 'o': PARAMS['w'][-N:]}, False),
    'grown': (grown, {'w': PARAMS['w'][:INPUTS], 'o': PARAMS['w'][-N:]}, True),
}


@pytest.mark.parametrize('name', BATCHES)
@pytest.mark.filterwarnings('ignore::braintrace.errors.BraintraceWarning')
def test_the_batch_is_found_or_the_advice_for_it_works(name):
    cell, params, told = BATCHES[name]
    carry = {'h': H + 0.1}

    def step(p, c, x):
        out, h = cell(p, c['h'], x)
        return out, {'h': h}

    def started(**options):
        learner = functional.online(step, **options)
        return learner, learner.init(params, carry, XS[0])

    def at_once(learner, state):
        functional.reset(state, FLAGS[2], carry)

    def gradient(learner, state):
        run = jax.jit(learner.sequence_grad(sines, reduction='sum', window=4))
        return run(params, state, XS, XS, reset=(FLAGS, carry)).grads

    for way in (at_once, gradient) if told else ():
        with pytest.raises(StructureError, match=r"braintrace.Policy\(batched=\('h',\)\)"):
            way(*started())
    learner, state = started(policy=braintrace.Policy(batched=('h',))) if told else started()
    at_once(learner, state)
    assert_close(gradient(learner, state), by_time(cell, params, carry['h'], XS, FLAGS))


@pytest.mark.parametrize('window', [4, 12])
def test_windows_write_the_samples_that_an_op_folds_into_its_rows(window):
    """Twelve steps are written lane by lane on a CPU, four at once."""
    xs, flags = jnp.tile(XS, (4, 1, 1)), jnp.zeros((24, B), bool)
    flags = flags.at[[5, 14, 17], [0, 1, 2]].set(True)
    _, params, _ = BATCHES['patched']
    learner = functional.online(patched)
    run = jax.jit(learner.sequence_grad(sines, reduction='sum', window=window))
    found = run(params, learner.init(params, H, xs[0]), xs, xs, reset=(flags, H)).grads
    assert_close(found, by_time(patched, params, H, xs, flags))


def test_an_axis_of_a_mesh_for_a_batch_that_is_not_known_is_refused():
    learner = functional.online(gated)
    learner.init({'w': jnp.zeros(N)}, jnp.asarray(H), XS[0])
    with pytest.raises(OptionError, match=r"batch_axis is 'data'.*Policy\(batched="):
        learner.partition_specs(batch_axis='data')


def many_ways(p, c, x):
    """States whose lanes go through data movement, products, calls, loops and branches."""
    v = 0.9 * c['v'] + drive(p, c['v'], x)
    turned = jnp.transpose(
        c['turned'] + jnp.transpose(v.reshape(B, 1, N)[:, 0])[::-1].T.astype(int)
    )[::-1].T
    most = jnp.maximum(c['most'], jnp.argmax(v, -1))
    energy = jnp.einsum('bi,bi->b', v, v) > c['energy']
    looped = jax.lax.fori_loop(0, 3, lambda i, n: n + (v > i).sum(-1), c['looped'])
    scanned = jax.lax.scan(
        lambda n, row: (jnp.maximum(n, (row > 0).astype(int)), n), c['scanned'], v.T
    )[0]
    branch = jax.lax.cond(x.sum() > 0, lambda n: n + 1, lambda n: n, c['branch']) + (v[:, 0] > 0)
    called = jax.jit(lambda n: jnp.where(v[:, 0] > 0, n, 0))(c['called'])
    picked = c['picked'] + jnp.take_along_axis(v, most[:, None], 1)[:, 0].astype(int)
    new = {'v': v, 'turned': turned, 'most': most, 'energy': energy, 'looped': looped}
    return v, new | {'scanned': scanned, 'branch': branch, 'called': called, 'picked': picked}


def lanes_of(cell, carry):
    """The names of the states whose lanes are known."""
    learner = functional.online(cell)
    learner.init(PARAMS, carry, XS[0])
    return {learner.graph.program.carry_names[c] for c in learner.graph.laned}


def test_lanes_are_followed_through_whatever_moves_them():
    names = 'most looped scanned branch called picked'.split()
    carry = {'v': H, 'turned': jnp.zeros((B, N), int), 'energy': jnp.zeros(B, bool)}
    carry |= {name: jnp.zeros(B, int) for name in names}
    assert lanes_of(many_ways, carry) == set(carry)


def test_two_uses_of_one_function_do_not_make_features_lanes():
    """A threshold for each unit and a state of each sample share one compiled function."""
    clip = jax.jit(lambda n: jnp.minimum(n, 5))

    def cell(p, c, x):
        v = 0.9 * c['v'] + drive(p, c['v'], x)
        ones = jnp.ones(N, int)
        rest = clip(c['rest'] + (v.sum(-1) > 0) + ones)
        level = clip(c['level'] + (v.sum(0) > 0) + ones)
        return v, {'v': v, 'rest': rest, 'level': level}

    carry = {'v': H, 'rest': jnp.zeros(B, int), 'level': jnp.zeros(N, int)}
    assert lanes_of(cell, carry) == {'v', 'rest'}


@pytest.mark.slow
@pytest.mark.parametrize('rule', [rules.d_rtrl(), rules.es_d_rtrl(0.7)], ids=lambda r: r.name)
def test_the_step_count_stays_at_the_largest_number(rule):
    def cell(p, h, x):
        h = 0.8 * h + drive(p, h, x)
        return h, h

    learner, most = functional.online(cell, rule), np.iinfo(np.int32).max
    _, state = learner.step(PARAMS, learner.init(PARAMS, H, XS[0]), XS[0])
    late, last = (state.replace(t=jnp.full(B, n, np.int32)) for n in (10_000, most))
    run = jax.jit(learner.sequence_grad(sines, window=2))
    found, want = run(PARAMS, last, XS, XS), run(PARAMS, late, XS, XS)
    assert found.state.t.tolist() == learner.step(PARAMS, last, XS[0])[1].t.tolist() == [most] * B
    assert_close(found.grads, want.grads, 1e-10)
