"""States side by side in one array: the gradients of the oracles, which keep each by itself."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, rules
from braintrace.errors import BraintraceWarning, UntracedParameterError
from tests import models, oracles
from tests.compare import assert_close
from tests.gradients.harness import FLAGS, learn, of_shapes, quick
from tests.models.library import LibraryOps
from tests.models.model import B, N, O
from tests.models.stacks import leaky_layer, weights

RULES = {'D_RTRL': rules.d_rtrl(), 'ES_D_RTRL': rules.es_d_rtrl(0.8)}


def written(parts):
    """Row by row into an array of zeros."""
    whole = jnp.zeros((len(parts), *parts[0].shape))
    for k, part in enumerate(parts):
        whole = whole.at[k].set(part)
    return whole


def columns(whole, sizes):
    return jnp.split(whole, np.cumsum(sizes)[:-1], -1)


LAYOUTS = {  # name: (put together, take apart with the last sizes)
    'rows': (jnp.stack, lambda whole, sizes: list(whole)),
    'middle axis': (
        lambda parts: jnp.stack(parts, 1),
        lambda whole, sizes: [whole[:, k] for k in range(len(sizes))],
    ),
    'last axis': (
        lambda parts: jnp.stack(parts, -1),
        lambda whole, sizes: [whole[..., k] for k in range(len(sizes))],
    ),
    'features': (lambda parts: jnp.concatenate(parts, -1), columns),
    'written rows': (written, lambda whole, sizes: [whole[k] for k in range(len(sizes))]),
    'interleaved': (
        lambda parts: jnp.stack(parts, -1).reshape(len(parts[0]), -1),
        lambda whole, sizes: [whole[:, k :: len(sizes)] for k in range(len(sizes))],
    ),
}
ROWS = [
    ('two_equal_layers', 'rows'),
    ('three_layers', 'features'),
    ('lstm_gru', 'features'),
    ('lstm', 'middle axis'),
    ('spiking_three', 'features'),
    ('op_between_states', 'interleaved'),
    ('equal_populations', 'written rows'),
    *(('two_equal_layers', layout) for layout in LAYOUTS if layout != 'rows'),
    ('lstm', 'features'),
    ('lru', 'last axis'),
    ('lstm_reading_cell', 'rows'),
    ('two_layers', 'features'),
    ('state_sum', 'rows'),
    ('move_parts', 'features'),
    ('stored_spike', 'features'),
]


def stacked(name, layout):
    """The data of a case with all of its states in one array, the cell that keeps them so, and the
    array of a carry.
    """
    case = models.case(name)
    names, (join, part) = list(case.carry), LAYOUTS[layout]
    sizes = [case.carry[n].shape[-1] for n in names]

    def pack(carry):
        return {'all': join([jnp.asarray(carry[n]) for n in names])}

    def cell(params, carry, x):
        states = dict(zip(names, part(carry['all'], sizes), strict=True))
        output, new = case.model.cell(LibraryOps(), params, states, x)
        return output, pack(new)

    return (case.params, pack(case.carry), case.xs, case.ys, case.loss), cell, pack


@functools.cache
def oracle(case, rule):
    return oracles.dense_recursion(case) if rule == 'D_RTRL' else oracles.es_recursion(case, 0.8)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name, layout, rule', [(*row, rule) for row in ROWS for rule in RULES])
def test_the_gradient_is_that_of_the_oracle(name, layout, rule):
    case, (data, cell, _) = models.case(name), stacked(name, layout)
    got, learner = learn(cell, RULES[rule], *data, window=3)
    assert_close(got, oracles.total(oracle(case, rule)))
    groups = learner.graph.hidden_groups
    assert sorted(len(g.carried) for g in groups) == sorted(len(g) for g in case.model.groups)


LAYERS = ('one', 'two', 'three')


def equal_layers(ops, p, c, x):
    """Three layers of one kind, each with a state of its own; the output reads all of them."""
    new, total = {}, 0.0
    for name in LAYERS:
        x = new[name] = ops.new(name, leaky_layer(ops, p[name], c[name], x, 0.8))
        total = x + 0.5 * total
    return ops.dot(total, p['out']), new


EQUAL = models.make_case(
    models.Model(
        'equal_layers',
        equal_layers,
        {name: weights(N, N) for name in LAYERS} | {'out': (N, O)},
        dict.fromkeys(LAYERS, (B, N)),
        (B, N),
        groups=tuple((name,) for name in LAYERS),
    )
)


def one_layer(p, k, h, x):
    return leaky_layer(LibraryOps(), {'w': p['w'][k], 'b': p['b'][k]}, h, x, 0.8)


def layer(x, at):
    h, w, b = at
    h = leaky_layer(LibraryOps(), {'w': w, 'b': b}, h, x, 0.8)
    return h, h


def by_scan(p, h, x):
    return jax.lax.scan(layer, x, (h, p['w'], p['b']))[1]


def by_scan_downwards(p, h, x):
    """The layers are in the array from the last to the first, and so are the weights."""
    flipped = (h[::-1], p['w'][::-1], p['b'][::-1])
    return jax.lax.scan(layer, x, flipped, reverse=True)[1][::-1]


def by_fori_loop(p, h, x):
    def layer(k, carry):
        h, x = carry
        x = one_layer(p, k, h[k], x)
        return h.at[k].set(x), x

    return jax.lax.fori_loop(0, len(LAYERS), layer, (h, x))[0]


def in_place(p, h, x):
    for k in range(len(LAYERS)):
        x = one_layer(p, k, h[k], x)
        h = h.at[k].set(x)
    return h


def recomputed(p, h, x):
    new = []
    for k in range(len(LAYERS)):
        x = jax.checkpoint(one_layer, static_argnums=1)(p, k, h[k], x)
        new.append(x)
    return jnp.array(new)


WAYS = (by_scan, by_fori_loop, by_scan_downwards, in_place, recomputed)


@pytest.mark.tier(quick=3)
@pytest.mark.parametrize('layers, rule', itertools.product(WAYS, RULES))
def test_layers_with_stacked_weights_and_one_state(layers, rule):
    def cell(params, carry, x):
        stack = {
            'w': jnp.stack([params[n]['w'] for n in LAYERS]),
            'b': jnp.stack([params[n]['b'] for n in LAYERS]),
        }
        h = layers(stack, carry['h'], x)
        total = 0.0
        for k in range(len(LAYERS)):
            total = h[k] + 0.5 * total
        return total @ params['out'], {'h': h}

    carry = {'h': np.stack([EQUAL.carry[n] for n in LAYERS])}
    data = EQUAL.params, carry, EQUAL.xs, EQUAL.ys, EQUAL.loss
    grads, learner = learn(cell, RULES[rule], *data, window=3)
    assert_close(grads, oracles.total(oracle(EQUAL, rule)))
    assert not learner.graph.diagnostics


PAIR = LAYERS[:2]


def filtered_layers(ops, p, c, x):
    """Two layers, and a filter of what each of them was; the output reads the filters too."""
    new = {}
    for name in PAIR:
        x = new[name] = ops.new(name, leaky_layer(ops, p[name], c[name], x, 0.8))
    for name in PAIR:
        of = f'of {name}'
        new[of] = ops.new(of, 0.7 * c[of] + ops.tanh(c[name]))
        x = x + new[of]
    return ops.dot(x, p['out']), new


FILTERED = models.make_case(
    models.Model(
        'filtered_layers',
        filtered_layers,
        {name: weights(N, N) for name in PAIR} | {'out': (N, O)},
        dict.fromkeys([*PAIR, *(f'of {name}' for name in PAIR)], (B, N)),
        (B, N),
        groups=tuple((name, f'of {name}') for name in PAIR),
    )
)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('rule', RULES)
def test_an_array_that_no_step_takes_apart_goes_with_the_rows_that_it_reads(rule):
    def cell(p, c, x):
        new = []
        for name, h in zip(PAIR, c['h'], strict=True):
            x = leaky_layer(LibraryOps(), p[name], h, x, 0.8)
            new.append(x)
        filters = 0.7 * c['f'] + jnp.tanh(c['h'])
        return (x + filters.sum(0)) @ p['out'], {'h': jnp.stack(new), 'f': filters}

    own = FILTERED.carry
    carry = {'h': np.stack([own[n] for n in PAIR]), 'f': np.stack([own[f'of {n}'] for n in PAIR])}
    data = FILTERED.params, carry, FILTERED.xs, FILTERED.ys, FILTERED.loss
    assert_close(learn(cell, RULES[rule], *data)[0], oracles.total(oracle(FILTERED, rule)))


@pytest.mark.slow
@pytest.mark.parametrize('layout', ['rows', 'features'])
def test_single_lanes_start_anew_along_the_axis_that_they_have_in_the_array(layout):
    case, (data, cell, pack) = models.case('two_equal_layers'), stacked('two_equal_layers', layout)
    want = oracles.restarted(oracles.dense_recursion, case, FLAGS, case.carry)
    given = {'reset': (FLAGS, pack(case.carry))}
    got, learner = learn(cell, RULES['D_RTRL'], *data, window=3, given=given)
    assert_close(got, oracles.total(want))
    start = learner.init(*data[:2], case.xs[0])
    moved = start.replace(carry={'all': start.carry['all'] + 1.0})
    again = functional.reset(moved, np.array([True, False]), start.carry)
    parts = LAYOUTS[layout][1](
        again.carry['all'] - start.carry['all'], [case.carry['h1'].shape[-1]] * 2
    )
    for part in parts:
        want = np.stack([np.zeros(part.shape[1:]), np.ones(part.shape[1:])])
        np.testing.assert_allclose(part, want, atol=1e-15)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize(
    'shape', [(N // 2, 2), None], ids=['another shape', 'another order of axes']
)
def test_a_state_that_is_kept_in_another_layout_is_the_value_that_is_kept(shape):
    """Readers of that value read the new state: without it ES-D-RTRL has no signal."""
    case = models.case('leaky')

    def kept(h):
        return h.T if shape is None else h.reshape(-1, *shape)

    def cell(params, carry, x):
        h = carry['h'].T if shape is None else carry['h'].reshape(-1, N)
        output, new = case.model.cell(LibraryOps(), params, {'h': h}, x)
        return output, {'h': kept(new['h'])}

    data = case.params, {'h': kept(case.carry['h'])}, case.xs, case.ys, case.loss
    grads, _ = learn(cell, RULES['ES_D_RTRL'], *data, window=3)
    assert_close(grads, oracles.total(oracle(case, 'ES_D_RTRL')))


# -- rows that move through the array ----------------------------------------------------------

LINES = {
    'stack': lambda z, h: jnp.stack([z, h[0], h[1]]),
    'concatenate': lambda z, h: jnp.concatenate([z[None], h[:-1]]),
    'cut off': lambda z, h: jnp.concatenate([z[None], h])[:3],
    'roll': lambda z, h: jnp.roll(h, 1, 0).at[0].set(z),
}
LINE_W = np.random.default_rng(5).standard_normal((N, N)) / 2
LINE_X = np.random.default_rng(6).standard_normal((6, B, N))
LINE_H = np.random.default_rng(7).standard_normal((3, B, N))


def line_cell(move):
    """A leaky unit and what it was one and two steps ago; the output reads both ends."""

    def cell(w, h, x):
        z = 0.9 * h[0] + jnp.tanh(braintrace.matmul(x, w)) - 0.2 * h[2]
        new = move(z, h)
        return new[0] + jnp.sin(new[2]), new

    return cell


def half_square(y, _):
    return 0.5 * jnp.sum(y**2)


def line(name, rule):
    """The gradient of a line, and its learner."""
    move = (lambda z, h: (z, h[0], h[1])) if name == 'tuple' else LINES[name]
    start = jax.tree.map(jnp.asarray, tuple(LINE_H) if name == 'tuple' else LINE_H)
    data = LINE_W, start, LINE_X, LINE_X, half_square
    return learn(line_cell(move), RULES[rule], *data, window=3)


def line_by_hand():
    """Backpropagation through time of the line, without the library."""

    def cell(w, line, x):
        z = 0.9 * line[0] + jnp.tanh(x @ w) - 0.2 * line[2]
        return z + jnp.sin(line[1]), (z, *line[:2])

    return oracles.by_time(cell, LINE_W, tuple(LINE_H), LINE_X, LINE_X, half_square)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('rule', RULES)
@pytest.mark.parametrize('name', LINES)
def test_rows_that_move_are_states_of_one_group(name, rule):
    want = line_by_hand() if rule == 'D_RTRL' else line('tuple', rule)[0]
    got, learner = line(name, rule)
    assert_close(got, want, 1e-10)
    (group,) = learner.graph.hidden_groups
    assert group.name == '0,1,2' and group.shape == (B, N) and not learner.graph.diagnostics


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('rule', RULES)
def test_a_line_step_by_step_and_its_lanes(rule):
    got = {}
    for name in ('roll', 'tuple'):
        learner, start = line(name, rule)[1], tuple(LINE_H) if name == 'tuple' else LINE_H
        first = learner.init(LINE_W, jax.tree.map(jnp.asarray, start), LINE_X[0])
        state, step, grads = first, quick(learner.grad(half_square)), []
        for x in LINE_X[:4]:
            g, _, _, state = step(LINE_W, state, x, x)
            grads.append(g)
        state = functional.reset(state, np.array([True, False]), first.carry)
        grads.append(step(LINE_W, state, x, x).grads)
        got[name] = np.stack(grads), np.stack(list(state.carry))
    assert_close(got['roll'], got['tuple'], 1e-10)
    assert_close(got['roll'][1][:, 0], LINE_H[:, 0], 0)


# -- what is not settled is named --------------------------------------------------------------


def shifted(p, h, x):
    """Rows decay while they move through the array and two layers write theirs."""
    a = one_layer(p, 0, h[2], x)
    b = one_layer(p, 1, h[3], a)
    return b, jnp.concatenate([0.5 * h[2:], a[None], b[None]])


def rolled(p, h, x):
    """A row is added to what has moved."""
    h = jnp.roll(h, 1, 0).at[0].set(0.0).at[0].add(jnp.tanh(braintrace.matmul(x, p['w'][0, :N])))
    return h[-1], h


def in_a_loop(p, h, x):
    """A loop that is descended carries the array whole."""

    def turn(h, _):
        a = one_layer(p, 0, h[0], x)
        b = one_layer(p, 1, h[1], a)
        return jnp.stack([a, b]), None

    h = jax.lax.scan(turn, h, None, length=12)[0]
    return h[1], h


@pytest.mark.tier(quick=2)
@pytest.mark.parametrize(
    'cell, rows, place',
    [
        (shifted, 4, 'library.py'),
        (rolled, 3, 'test_stacked_states.py'),
        (in_a_loop, 2, 'library.py'),
    ],
)
def test_states_that_are_not_taken_apart_are_named_with_their_place(cell, rows, place):
    params = {'w': jnp.ones((2, 2 * N, N)), 'b': jnp.ones((2, N))}
    start = params, {'h': jnp.ones((rows, B, N))}, jnp.ones((B, N))

    def step(p, c, x):
        y, new = cell(p, c['h'], x)
        return y, {'h': new}

    learner = functional.online(step, RULES['D_RTRL'])
    with pytest.warns(BraintraceWarning, match='h holds several states'):
        learner.init(*start)
    (note,) = (d for d in learner.report.diagnostics if d.kind == 'stacked-state')
    assert note.path == 'h' and place in note.location and 'of its own' in note.message
    with pytest.raises(UntracedParameterError, match='h holds several states'):
        functional.online(step, RULES['D_RTRL'], policy=braintrace.Policy(strict=True)).init(*start)


def test_a_state_that_is_put_together_for_no_reader_is_one_state():
    """An op that reads all and makes all: two groups would hold its trace twice."""

    def cell(w, h, x):
        y = braintrace.matmul(jnp.concatenate([x, h], -1), w)
        h = jnp.concatenate([0.5 * h[:, :2] + jnp.tanh(y[:, :2]), 0.9 * h[:, 2:] + y[:, 2:]], -1)
        return h, h

    learner = functional.online(cell, RULES['D_RTRL'])
    learner.init(jnp.ones((N + 4, 4)), jnp.ones((B, 4)), jnp.ones((B, N)))
    (group,) = learner.graph.hidden_groups
    assert group.shape == (B, 4)


TOGETHER = {  # ways to put two layers into one array that no state is taken apart for
    'a slice of more': lambda a, b: jnp.concatenate([a[None], a[None], b[None]])[1:],
    'other order': lambda a, b: jnp.stack([b, a])[np.array([1, 0])],
    'a padded row': lambda a, b: jnp.pad(jnp.stack([a, b]), ((0, 1), (0, 0), (0, 0))),
    'added to zeros': lambda a, b: jnp.zeros((2, *a.shape)).at[0].add(a).at[1].add(b),
    'a sum of padded rows': (
        lambda a, b: (
            jnp.pad(a[None], ((0, 1), (0, 0), (0, 0))) + jnp.pad(b[None], ((1, 0), (0, 0), (0, 0)))
        )
    ),
}


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('way', TOGETHER)
def test_what_is_put_together_otherwise_is_whole_or_named(way):
    join = TOGETHER[way]

    def cell(p, h, x):
        a = 0.8 * h[0] + braintrace.matmul(x, p['one'])
        b = 0.7 * h[1] + braintrace.matmul(jnp.tanh(a), p['two'])
        return b, join(a, b)

    rng = np.random.default_rng(3)
    params = {'one': rng.normal(size=(3, N)), 'two': rng.normal(size=(N, N))}
    xs = rng.normal(size=(5, B, 3))
    first = join(np.zeros((B, N)), np.zeros((B, N)))
    data = params, first, xs, xs, half_square
    _, told = of_shapes(cell, rules.d_rtrl(), params, first, xs[0])
    (got, learner), want = learn(cell, rules.d_rtrl(), *data), oracles.by_time(cell, *data)
    named = any(d.kind == 'stacked-state' for d in learner.graph.diagnostics)
    assert named == bool(told)
    assert named or all(np.allclose(got[k], want[k], rtol=1e-10) for k in got)
