"""The places of sparse entries: operands of the program, constant in time, never literals."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import _jax, functional, rules
from braintrace._etrace_op import sparse as implementation
from braintrace.extra import _sparse_cpu as kernels_here
from tests import oracles
from tests.compare import assert_close
from tests.gradients.harness import learn, learn_by_steps
from tests.late import LATE
from tests.tiers import slow

pytestmark = pytest.mark.usefixtures('kernels')
IN, OUT, ENTRIES, STEPS = 9, 5, 14, 6
RULES = [rules.d_rtrl(), LATE, rules.es_d_rtrl(0.7)]


@pytest.fixture
def kernels(monkeypatch):
    """Sparse products by numba, which other tests of the gate leave out."""
    installed = importlib.util.find_spec('numba') is not None
    monkeypatch.setattr(kernels_here, '_has_numba', lambda: installed)


def places(seed: int, order: str = 'none') -> np.ndarray:
    """Rows and columns of entries, of which some repeat."""
    found = np.random.default_rng(seed).integers(0, [IN, OUT], (ENTRIES, 2))
    if order != 'none':
        found = found[np.argsort(found[:, int(order == 'column')], kind='stable')]
    return found.T


def structure(*args) -> braintrace.SparseStructure:
    return braintrace.SparseStructure(*places(*args), (IN, OUT))


def cell(params, h, x):
    y = braintrace.sparse_matmul(x, params['w'], sparse_mat=params['at'], bias=params['b'])
    h = jnp.tanh(0.8 * h + y)
    return h, h


def dense_cell(rows, columns):
    def run(params, h, x):
        matrix = jnp.zeros((IN, OUT)).at[rows, columns].add(params['w'])
        h = jnp.tanh(0.8 * h + braintrace.matmul(x, matrix, params['b']))
        return h, h

    return run


def loss(output, target):
    return jnp.sum((output - target) ** 2)


def sequence(lead, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape))
    params, h = {'w': draw(ENTRIES), 'b': draw(OUT)}, jnp.zeros((*lead, OUT))
    return params, h, draw(STEPS, *lead, IN), draw(STEPS, *lead, OUT)


@pytest.mark.slow
@pytest.mark.parametrize('lead', [(), (3,)], ids=['alone', 'batch'])
@pytest.mark.parametrize('rule', RULES, ids=['d_rtrl', 'd_rtrl pending', 'es_d_rtrl'])
def test_gradients_are_those_of_a_dense_matrix(rule, lead, monkeypatch):
    monkeypatch.setattr(implementation, 'DENSE_FROM', 100)
    with jax.enable_x64(True):
        params, h, xs, ys = sequence(lead)
        want = learn(dense_cell(*places(0)), rule, params, h, xs, ys, loss, window=3)[0]
        data = params | {'at': structure(0)}, h, xs, ys, loss
        grads, learner = learn(cell, rule, *data, window=3)
        for got in (grads, learn_by_steps(learner, *data)):
            assert_close({n: got[n] for n in 'wb'}, want)


@pytest.mark.slow
def test_one_program_serves_two_structures():
    params, h, xs, ys = sequence(())
    learner = functional.online(cell, rules.d_rtrl())
    step, found = jax.jit(learner.grad(loss)), []
    for seed in (0, 1):
        given = params | {'at': structure(seed)}
        state = learner.init(given, h, xs[0])
        found.append(step(given, state, xs[0], ys[0]).grads['w'])
    assert step._cache_size() == 1
    assert not np.allclose(*found)


@pytest.mark.slow
@pytest.mark.parametrize('source', ['input', 'carry', 'lanes'])
def test_places_that_change_have_no_trace_and_the_graph_says_so(source):
    def cell(params, carry, x):
        h, kept = carry
        at = {'input': x[1], 'carry': kept, 'lanes': None}[source]
        product = lambda at: braintrace.sparse_matmul(x[0], params['w'], sparse_mat=at)
        many = jax.tree.map(lambda a: jnp.stack([a, a]), structure(0))
        y = product(at) if at is not None else jax.vmap(product)(many)[0]
        h = jnp.tanh(0.8 * h + y)
        return h, (h, jax.tree.map(lambda a: a + 0, kept))

    params, h, xs, ys = sequence(())
    learner = functional.online(cell, rules.d_rtrl())
    x = (xs[0], structure(0))
    with pytest.warns(UserWarning, match='the places of the entries'):
        state = learner.init({'w': params['w']}, (h, structure(0)), x)
    assert learner.routes['w'].reason == 'input_dependent_weight'
    grads = learner.grad(loss)({'w': params['w']}, state, (x,), ys[0]).grads
    dense = functional.online(dense_cell(*places(0)), None)
    zero = {'w': params['w'], 'b': jnp.zeros(OUT)}
    wanted = dense.grad(loss)(zero, dense.init(zero, h, xs[0]), xs[0], ys[0]).grads
    assert_close(grads['w'], wanted['w'], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('order', ['none', 'row', 'column'])
@pytest.mark.parametrize('lead', [(), (3,)], ids=['alone', 'batch'])
def test_kernels_compute_what_xla_does(order, lead, monkeypatch):
    pytest.importorskip('numba')
    monkeypatch.setattr(implementation, 'DENSE_FROM', 100)
    with jax.enable_x64(True):
        params, _, xs, ys = sequence(lead)
        x, at = jnp.where(xs[0] > 0.5, xs[0], 0), structure(0, order)
        found = []
        for kernel in (kernels_here.kernel, lambda *_: None):
            monkeypatch.setattr(kernels_here, 'kernel', kernel)

            def run(w, x):  # traced again for each
                y = braintrace.sparse_matmul(x, w, sparse_mat=at)
                operands = at.rows, at.columns, at.pointers
                lane = implementation.entries_p.bind(
                    x.reshape(-1, IN)[:1], ys[0].reshape(-1, OUT)[:1], *operands, shape=at.shape
                )
                return y, lane

            compiled = jax.jit(run).lower(params['w'], x)
            found.append((compiled.compile()(params['w'], x), 'braintrace_' in compiled.as_text()))
    (by_kernel, called), (by_xla, not_called) = found
    assert called and not not_called
    assert_close(by_kernel, by_xla)


def coupled(product):
    """A cell whose states all read each other."""

    def cell(params, carry, x):
        y = product(params, x)
        inputs = [y] + [0.0] * (len(carry) - 1)
        new = [jnp.tanh(0.6 * h + 0.3 * carry[i - 1] + inputs[i]) for i, h in enumerate(carry)]
        return new[-1] + 0.5 * new[0], new

    return cell


def product(params, x):
    matrix = jnp.zeros((IN, OUT)).at[tuple(params['at'])].add(params['w'])
    return x @ matrix + params['b']


@pytest.mark.slow
@pytest.mark.parametrize(
    ('states', 'lead', 'order'),
    [(1, (3,), 'row'), (2, (), 'row'), (2, (3,), 'row'), (2, (3,), 'none'), (3, (), 'column')],
)
def test_kernels_of_the_trace_give_the_gradients_through_a_sequence(
    states, lead, order, monkeypatch
):
    pytest.importorskip('numba')
    monkeypatch.setattr(implementation, 'DENSE_FROM', 100)
    with jax.enable_x64(True):
        params, h, xs, ys = sequence(lead)
        xs = jnp.where(xs > 0.8, xs, 0)
        new = jnp.array([False, True, True]) if lead else jnp.array(True)
        starts = jnp.zeros((STEPS, *lead), bool).at[4].set(new)
        h = [0.3 + 0 * h] * states
        plain, reset = params | {'at': places(0, order)}, (starts, jax.tree.map(jnp.zeros_like, h))
        wanted = oracles.by_time(coupled(product), plain, h, xs, ys, loss, reset=reset)
        cell = coupled(
            lambda p, x: braintrace.sparse_matmul(x, p['w'], sparse_mat=p['at'], bias=p['b'])
        )
        learner = functional.online(cell, LATE)
        given = params | {'at': structure(0, order)}
        state = learner.init(given, h, xs[0])

        def run(*args):
            grads, _, _, state = learner.grad(loss)(*args)
            return state, grads  # the state gets the memory of the old one

        step = jax.jit(run, donate_argnums=1).lower(given, state, xs[0], ys[0]).compile()
        text, trace, found = step.as_text(), f'f64[{",".join(map(str, (*lead, ENTRIES)))}]', []
        assert 'braintrace_read' in text and ('braintrace_move' in text) == (states < 3)
        copies = [line for line in text.splitlines() if f'= {trace}' in line and ' copy(' in line]
        assert states == 3 or not copies
        for x, flags, y in zip(xs, starts, ys, strict=True):
            state = functional.reset(state, flags, reset[1])
            state, grads = step(given, state, x, y)
            found.append({n: grads[n] for n in 'wb'})
        assert_close(jax.tree.map(lambda *g: sum(g), *found), {n: wanted[n] for n in 'wb'})


@pytest.mark.parametrize(('lanes', 'entries'), [(3, 0), (0, 4)])
def test_a_trace_without_numbers_is_left_to_xla(lanes, entries, monkeypatch):
    pytest.importorskip('numba')
    monkeypatch.setattr(implementation, 'DENSE_FROM', 100)
    _, h, xs, _ = sequence((lanes,))
    at = braintrace.SparseStructure(*places(0)[:, :entries], (IN, OUT))
    params = {'w': jnp.ones(entries), 'b': jnp.ones(OUT), 'at': at}
    learner = functional.online(cell, LATE)
    state = learner.init(params, h, xs[0])
    shapes = jax.eval_shape(learner.grad(loss), params, state, xs[0], h).grads
    assert shapes['w'].shape == (entries,)


@pytest.mark.slow
def test_updates_leave_places_among_the_parameters_as_they_are():
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    with jax.enable_x64(True):
        params, h, xs, ys = sequence(())
        found = []
        for cells, given in (
            (cell, params | {'at': structure(0)}),
            (dense_cell(*places(0)), params),
        ):
            learner = functional.online(cells, rules.d_rtrl())
            state = learner.init(given, h, xs[0])
            train = jax.jit(learner.sequence_update(loss, optimizer))
            found.append(train(given, optimizer.init(given), state, xs, ys)[0])
    assert_close({n: found[0][n] for n in 'wb'}, found[1])
    assert_close(jax.tree.leaves(found[0]['at']), jax.tree.leaves(structure(0)))


@pytest.mark.parametrize(
    ('lanes', 'share'), [(5, 1.0), (8, 1.0), pytest.param(20, 1.0, marks=slow), (20, 0.1)]
)
def test_the_gradient_of_entries_over_lanes_is_that_of_a_dense_product(lanes, share):
    rng, (inputs, outputs, entries) = np.random.default_rng(lanes), (400, 300, 900)
    rows = np.sort(rng.integers(inputs, size=entries))
    columns = rng.integers(outputs, size=entries)
    places = braintrace.SparseStructure(rows, columns, (inputs, outputs))
    x = rng.normal(size=(lanes, inputs)) * (rng.random((lanes, inputs)) < share)
    d = rng.normal(size=(lanes, outputs))
    with jax.enable_x64(True):
        at = places.rows, places.columns, places.pointers
        bound = jax.jit(lambda x, d: implementation.entries_p.bind(x, d, *at, shape=places.shape))
        compiled = bound.lower(x, d).compile()
        found = compiled(x, d)
    on_cpu = _jax.platform_here() == 'cpu'
    kernels = on_cpu and kernels_here.kernel('dots', np.float64) is not None
    assert ('braintrace_dots' in compiled.as_text()) == (kernels and lanes >= 8)
    assert_close(found, (x.T @ d)[rows, columns])
