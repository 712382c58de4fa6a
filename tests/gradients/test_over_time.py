"""Gradients of what moves linearly, in the programs of a GPU, where it does so in associative
scans, and in those of a CPU, where powers of a decay that no step changes are found once: those of
backpropagation through time, and those of the loops step by step.
"""

import functools
import sys

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import _jax, functional, rules
from braintrace._executor import over_time
from braintrace._rules import pending
from tests import oracles
from tests.compare import assert_close, assert_moves
from tests.gradients.harness import quick
from tests.models.ops import _spike_jvp as spike
from tests.tiers import in_turn, none

B, I, N, T = 3, 4, 5, 7
RNG = np.random.default_rng(0)
XS, YS = RNG.normal(size=(T, B, I)), RNG.normal(size=(T, B, N))
PARAMS = {
    **{name: RNG.normal(size=(I, N)) / 2 for name in 'zvfi'},
    **{name: RNG.uniform(0.3, 0.9, N) for name in ('radius', 'angle')},
}
FLAGS = np.zeros((T, B), bool)
FLAGS[[2, 5], 0] = FLAGS[[3, 4], 1] = True
NEVER, MASK = np.zeros((T, B), bool), np.array([1.0, 0.0, 0.5, 1.0, 2.0, 1.5, 1.0])


def lru(ops, p, h, x):
    """A complex state as two real ones."""
    r, angle = ops.element_wise(p['radius']), ops.element_wise(p['angle'])
    a, b = r * jnp.cos(angle), r * jnp.sin(angle)
    re = a * h['re'] - b * h['im'] + ops.matmul(x, p['z'])
    im = b * h['re'] + a * h['im'] + ops.matmul(x, p['v'])
    return re * im, {'re': re, 'im': im}


def lru_complex(ops, p, h, x):
    lam = ops.element_wise(p['radius']) * jnp.exp(1j * ops.element_wise(p['angle']))
    h = lam * h['re'] + ops.matmul(x, p['z']) + 1j * ops.matmul(x, p['v'])
    return h.real * h.imag, {'re': h}


def mingru(ops, p, h, x):
    z = jax.nn.sigmoid(ops.matmul(x, p['z']))
    h = (1 - z) * h['re'] + z * ops.matmul(x, p['v'])
    return h, {'re': h}


def minlstm(ops, p, h, x):
    """Its output is in the carry, and no new state reads it."""
    f, i = (jax.nn.sigmoid(ops.matmul(x, p[name])) for name in 'fi')
    c = (f * h['im'] + i * ops.matmul(x, p['v'])) / (f + i)
    h = jnp.tanh(c) * ops.element_wise(p['radius'])
    return h, {'re': h, 'im': c}


def lif(ops, p, h, x):
    """A synapse and a membrane without recurrent weights: the spike alone is not linear."""
    i = 0.9 * h['im'] + ops.matmul(x, p['z'])
    v = 0.8 * h['re'] + i - spike(h['re'] - 1)
    return v, {'re': v, 'im': i}


def leak(ops, p, h, x):
    """A constant for each unit, which is learnt."""
    a = jax.nn.sigmoid(ops.element_wise(p['radius']))
    h = a * h['re'] + (1 - a) * ops.matmul(x, p['z'])
    return h, {'re': h}


def number(ops, p, h, x):
    """One leak for all units."""
    h = 0.8 * h['re'] + jnp.tanh(ops.matmul(x, p['z']))
    return h, {'re': h}


def of_lanes(ops, p, h, x):
    """Another leak for each lane."""
    h = jnp.linspace(0.5, 0.9, B)[:, None] * h['re'] + ops.matmul(x, p['z'])
    return h, {'re': h}


def one_way(ops, p, h, x):
    """A current that decays, and a membrane that no other state reads back."""
    i = jax.nn.sigmoid(ops.element_wise(p['radius'])) * h['im'] + ops.matmul(x, p['z'])
    v = jnp.exp(-jnp.exp(ops.element_wise(p['angle']))) * h['re'] + i
    return jnp.tanh(v), {'re': v, 'im': i}


def beside_a_gate(ops, p, h, x):
    """A group with a constant leak, and one whose gate reads the input."""
    slow = jax.nn.sigmoid(ops.element_wise(p['radius'])) * h['im'] + ops.matmul(x, p['z'])
    z = jax.nn.sigmoid(ops.matmul(x, p['f']))
    gated = (1 - z) * h['re'] + z * ops.matmul(x, p['v'])
    return slow * gated, {'re': gated, 'im': slow}


ORDER = minlstm, lru, mingru, number, lif, lru_complex, of_lanes, leak, one_way, beside_a_gate
CELLS = {f.__name__: f for f in ORDER}
FEW = 'minlstm', 'lru', 'mingru', 'lru_complex', 'lif'
HOW = 'cuda', 'cpu'
RULES = {'d_rtrl': rules.d_rtrl(), 'es_d_rtrl': rules.es_d_rtrl(0.8)}
NAMES = {'lru': 'radius angle z v', 'lru_complex': 'radius angle z v', 'mingru': 'z v'}
NAMES |= {'minlstm': 'radius f i v', 'lif': 'z', 'leak': 'radius z', 'number': 'z'}
NAMES |= {'of_lanes': 'z', 'one_way': 'radius angle z', 'beside_a_gate': 'radius z v f'}
TWO = 'minlstm', 'lru', 'lif', 'one_way', 'beside_a_gate'  # that have two states


ROUNDED = {
    'few bits': lambda h: jax.lax.reduce_precision(h, 5, 2),
    'eight bits': lambda h: h.astype(jnp.float8_e4m3fn).astype(h.dtype),
    'straight through': lambda h: h + jax.lax.stop_gradient(jnp.round(h, 1) - h),
    'round': lambda h: jnp.round(h, 1),
}


class Plain:
    """Ops without a trace."""

    matmul = staticmethod(jnp.matmul)
    element_wise = staticmethod(jnp.asarray)


def start(name):
    """Parameters, and states to begin with."""
    params = {key: PARAMS[key] for key in NAMES[name].split()}
    states = ['re', 'im'] if name in TWO else ['re']
    dtype = complex if name == 'lru_complex' else float
    return params, {key: np.full((B, N), 0.4, dtype) for key in states}


def loss(output, target):
    return jnp.sum((output - target) ** 2)


def online(name, rule):
    return functional.online(functools.partial(CELLS[name], braintrace), rule)


def fresh(carry):
    return jax.tree.map(lambda h: h / 2, carry)


def over_two_sequences(name, how, rule, window, keep):
    """Gradients of two sequences, the second one with resets and masks; its carry and losses."""
    params, h = start(name)
    learner = online(name, RULES[rule])
    state = learner.init(params, h, XS[0])
    run = quick(learner.sequence_grad(loss, window=window, keep_trace=keep, reduction='sum'))
    with _jax.as_if_on(how):
        first, _, _, state = run(params, state, XS, YS, np.ones(T), (NEVER, fresh(h)))
        grads, losses, _, state = run(params, state, XS, YS, MASK, (FLAGS, fresh(h)))
    return first, grads, state.carry, losses


def backpropagated(name, keep):
    """The same by reverse mode through plain scans."""
    (params, h), cell = start(name), functools.partial(CELLS[name], Plain)
    first = oracles.by_time(cell, params, h, XS, YS, loss)
    if keep:
        two = [np.concatenate(both) for both in ((XS, XS), (YS, YS), (NEVER, FLAGS))]
        weights, reset = np.concatenate([0 * MASK, MASK]), (two.pop(), fresh(h))
        return [first, oracles.by_time(cell, params, h, *two, loss, weights, reset)]
    then, _ = jax.lax.scan(lambda h, x: cell(params, h, x)[::-1], jax.tree.map(jnp.asarray, h), XS)
    return [first, oracles.by_time(cell, params, then, XS, YS, loss, MASK, (FLAGS, fresh(h)))]


@in_turn(
    lambda name, *_: name == 'mingru',
    name=CELLS,
    way=['cuda dropped', 'cpu dropped', 'cuda', 'cpu'],
    window=[4, 1, None],
)
def test_d_rtrl_is_backpropagation(name, way, window):
    how, keep = way.split()[0], 'dropped' not in way
    first, grads, *_ = over_two_sequences(name, how, 'd_rtrl', window, keep)
    assert_moves(grads)
    assert_close([first, grads], backpropagated(name, keep), relative=1e-11)


@in_turn(none, name=FEW, window=[None, 4])
def test_es_d_rtrl_gives_the_numbers_of_its_loop(name, window):
    each = (over_two_sequences(name, how, 'es_d_rtrl', window, True) for how in HOW)
    assert_close(*each, relative=1e-12)


@pytest.mark.parametrize(
    ('name', 'shape'), [('number', (1, 1)), ('of_lanes', (B, 1)), ('leak', (1, N))]
)
def test_powers_of_a_decay_that_no_step_changes_are_found_once(name, shape, monkeypatch):
    found, moves = [], pending._moves_once
    monkeypatch.setattr(pending, '_moves_once', lambda *a: found.append(moves(*a)) or found[-1])
    (params, h), learner = start(name), online(name, RULES['d_rtrl'])
    state = learner.init(params, h, XS[0])
    jax.eval_shape(learner.sequence_grad(loss), params, state, XS, YS)
    assert {x.shape for d in found[0].values() for x in jax.tree.leaves(d)} == {shape}


def instructions(name, rule, linear):
    """How many the compiled program of a CPU has."""
    return lowered(name, 'cpu', rule, linear).compile().as_text().count(' = ')


def loops(name, how, rule, linear='auto'):
    """The number of loops in a compiled gradient."""
    return lowered(name, how, rule, linear).as_text().count('stablehlo.while')


def lowered(name, how, rule, linear):
    params, h = start(name)
    cell = functools.partial(CELLS[name], braintrace)
    policy = braintrace.Policy(linear_loops=linear)
    learner = functional.online(cell, RULES[rule], policy=policy)
    run = learner.sequence_grad(loss, window=None, keep_trace=False)
    state = learner.init(params, h, XS[0])
    with _jax.as_if_on(how):
        return jax.jit(lambda *at: run(params, state, *at, reset=(FLAGS, h))).lower(XS, YS)


@in_turn(lambda name, rule: name == 'lru', name=FEW, rule=RULES)
def test_on_a_cpu_the_program_is_that_of_plain_scans(name, rule):
    assert len(set(instructions(name, rule, linear) for linear in ('auto', 'sequential'))) == 1


@in_turn(lambda name, rule: name == 'lru', name=['lru', 'lif'], rule=RULES)
def test_no_loop_over_time_is_left_but_that_of_the_spike(name, rule):
    assert loops(name, 'cuda', rule) == (name == 'lif')
    assert loops(name, 'cuda', rule, 'sequential') == 2


def test_a_learner_evaluates_by_the_same_scan_and_its_outputs_have_derivatives():
    class Leaky(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = brainstate.ParamState(jnp.asarray(PARAMS['z']))
            self.h = brainstate.HiddenState(jnp.full((B, N), 0.4))

        def update(self, x):
            self.h.value = 0.9 * self.h.value + braintrace.matmul(x, self.w.value)
            return self.h.value

    seen = []
    for how in HOW:
        learner = braintrace.D_RTRL(Leaky())
        learner.compile_graph(XS[0])
        model = learner.model
        with _jax.as_if_on(how):
            of = lambda xs: jnp.sum(learner.etrace_evolve(xs, trace=False) ** 2)  # noqa: E731
            grads = brainstate.transform.grad(of, learner.states(brainstate.ParamState))
            model.h.value = jnp.full((B, N), 0.4)
            slopes = grads(XS)
            model.h.value = jnp.full((B, N), 0.4)
            seen.append((learner.etrace_evolve(XS, trace=False), slopes))
    assert_close(*seen, relative=1e-12)


@in_turn(none, name=['mingru', 'lru'], rule=RULES)
def test_what_a_reset_ends_need_not_be_a_number(name, rule):
    """States, trace and losses behind it are those of numbers in front of it."""
    params, h = start(name)
    learner, found = online(name, RULES[rule]), []
    run = quick(learner.sequence_grad(loss, window=None))
    flags, spoilt = np.zeros((T, B), bool), XS.copy()
    flags[3, 0], spoilt[1, 0] = True, np.nan
    for xs in (spoilt, XS):
        state = learner.init(params, h, XS[0])
        with _jax.as_if_on('cuda'):
            _, losses, _, state = run(params, state, xs, YS, np.ones(T), (flags, fresh(h)))
        found.append({'trace': state.trace, 'carry': state.carry, 'losses': losses[3:]})
    assert_close(*found)


@pytest.mark.slow
def test_products_of_many_steps_may_overflow_where_no_loss_counts():
    """A chaotic unit, of whose derivatives a product over 2,000 steps overflows in float64."""

    def cell(p, h, x):
        h = 3.9 * h * (1 - h) + 1e-3 * jnp.tanh(braintrace.matmul(x, p['z']))
        h = jnp.clip(h, 0.01, 0.99)
        return h, h

    length, loss = 2000, lambda h, _: jnp.mean(h**2)
    xs, h = RNG.normal(size=(length, B, I)), jnp.full((B, N), 0.3)
    params, mask = {'z': PARAMS['z']}, np.float64(np.arange(length) < 5)
    learner = functional.online(cell, rules.d_rtrl())
    run = jax.jit(learner.sequence_grad(loss, window=None, keep_trace=False, reduction='sum'))
    state = learner.init(params, h, xs[0])
    with _jax.as_if_on('cuda'):
        got = run(params, state, xs, xs, mask).grads
    want = oracles.by_time(cell, params, h, xs[:5], xs[:5], loss)
    assert_close(got, want, relative=1e-9)


@pytest.mark.parametrize('length, reverse', [(1, False), (2, True), (3, False), (3, True)])
def test_a_loop_of_any_kind_is_the_scan_that_it_replaces(length, reverse):
    """Linear carries before, behind and beside others, sums, a carry that nothing reads, integers,
    one that is shown, and outputs of all.
    """

    def step(carry, at):
        a, b, c, total, square, turned, unread, count, shown = carry
        x, k = at
        new_a = jnp.where(k > 0, 0.5 * a + x, 0)
        new_b = jnp.tanh(b + a)
        new_c = new_b * c - 0.3 * x
        sums = total + new_c, 0.3 * square * square + x, 0.4 * jnp.conj(turned) + 1j * x
        carry = new_a, new_b, new_c, *sums, x * 2, count + k, shown + a
        return carry, (a, new_c, new_b * count, square, turned, shown)

    rng = np.random.default_rng(0)
    xs = rng.normal(size=(length, B, N)), np.arange(length) % 3
    drawn = lambda: rng.normal(size=(B, N))
    init = *(drawn() for _ in range(5)), drawn() + 1j * drawn(), drawn(), 3, drawn()
    init, xs = jax.tree.map(jnp.asarray, (init, xs))
    want = jax.lax.scan(step, init, xs, reverse=reverse)
    with _jax.as_if_on('cuda'):
        program = jax.jit(lambda init, xs: over_time(step, init, xs, reverse=reverse))
        mapped = jax.jit(jax.vmap(lambda init, xs: over_time(step, init, xs, reverse=reverse)))
        assert_close(program(init, xs), want, relative=1e-12)
        twice = jax.tree.map(lambda a: jnp.stack([a, a]), (init, xs))
        assert_close(jax.tree.map(lambda a: a[1], mapped(*twice)), want, relative=1e-12)
        grad = lambda loop: jax.grad(lambda x: loop(step, init, (x, xs[1]))[1][1].sum())(xs[0])
        assert_close(grad(over_time), grad(jax.lax.scan), relative=1e-12)


@pytest.mark.parametrize('rounded', ROUNDED)
def test_a_state_that_is_rounded_at_each_step_is_rounded_on_a_gpu_too(rounded):
    def step(h, x):
        h = ROUNDED[rounded](0.9 * h + x)
        return h, h

    init, xs = jnp.zeros((B, N)), RNG.normal(size=(30, B, N))
    with _jax.as_if_on('cuda'):
        got = jax.jit(lambda init, xs: over_time(step, init, xs))(init, xs)
    for a, b in zip(got, jax.lax.scan(step, init, xs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_more_than_a_platform_holds_goes_step_by_step(monkeypatch):
    module = sys.modules[over_time.__module__]
    monkeypatch.setattr(module, 'MOST_BYTES', 100)
    assert loops('lru', 'cuda', 'd_rtrl') == 2
