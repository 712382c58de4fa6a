"""Whole models of each framework: layers, readouts, variables that move; the way back, and
optimisers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import adapters, functional, rules
from tests.adapters import cells
from tests.adapters.cells import INPUTS, UNITS, learned
from tests.adapters.plain import loss
from tests.compare import assert_close

T, BATCH, OUTPUTS = 3, 2, 2


@pytest.fixture
def xs():
    return jnp.asarray(np.random.default_rng(0).normal(size=(T, BATCH, INPUTS)))


@pytest.fixture
def ys():
    return jnp.asarray(np.random.default_rng(1).normal(size=(T, BATCH, OUTPUTS)))


def traced(learner):
    return {path for path, route in learner.routes.items() if route.kind == 'trace'}


@pytest.mark.slow
def test_an_equinox_model_of_two_layers_and_a_head(xs, ys):
    eqx = pytest.importorskip('equinox')

    class Net(eqx.Module):
        lower: eqx.nn.GRUCell
        upper: eqx.nn.GRUCell
        head: eqx.nn.Linear
        scale: int

        def __call__(self, x, carry):
            lower = self.lower(x, carry[0])
            upper = self.upper(lower, carry[1])
            return self.scale * self.head(upper), (lower, upper)

    a, b, c = jax.random.split(jax.random.key(0), 3)
    model = Net(
        eqx.nn.GRUCell(INPUTS, UNITS, key=a),
        eqx.nn.GRUCell(UNITS, UNITS, key=b),
        eqx.nn.Linear(UNITS, OUTPUTS, key=c),
        2,
    )
    zeros = jnp.zeros((BATCH, UNITS))
    adapted = adapters.from_equinox(model, xs[0], carry=(zeros, zeros), batched=True)
    grads, _, learner = learned(*adapted, xs, ys)
    assert {path.split('/')[0] for path in traced(learner)} == {'lower', 'upper'}
    assert learner.routes['head/weight'].kind == 'same-step'
    assert jax.tree.structure(grads) == jax.tree.structure(eqx.filter(model, eqx.is_inexact_array))
    moved = eqx.apply_updates(model, grads)
    assert_close(moved.lower.weight_hh, model.lower.weight_hh + grads.lower.weight_hh)
    assert moved(xs[0, 0], (zeros[0], zeros[0]))[0].shape == (OUTPUTS,)


def nnx_net(nnx, rate=0.0):
    class Net(nnx.Module):
        def __init__(self, rngs):
            options = {'dtype': float, 'param_dtype': float, 'rngs': rngs}
            self.lower = nnx.SimpleCell(INPUTS, UNITS, **options)
            self.upper = nnx.SimpleCell(UNITS, UNITS, **options)
            self.head = nnx.Linear(UNITS, OUTPUTS, **options)
            self.dropout = nnx.Dropout(rate, rngs=rngs if rate else None)
            self.gain = nnx.Variable(jnp.asarray(2.0))  # no parameter: stays as it is

        def __call__(self, carry, x):
            lower, y = self.lower(carry[0], x)
            upper, y = self.upper(carry[1], y)
            return (lower, upper), self.gain * self.head(self.dropout(y))

    zeros = jnp.zeros((BATCH, UNITS))
    return Net(nnx.Rngs(0)), (zeros, zeros)


@pytest.mark.slow
def test_an_nnx_model_of_two_layers_and_a_head(xs, ys):
    nnx = pytest.importorskip('flax.nnx')
    model, start = nnx_net(nnx)
    cell, params, carry = adapters.from_nnx(model, xs[0], carry=start)
    grads, _, learner = learned(cell, params, carry, xs, ys)
    assert {path.split('/')[0] for path in traced(learner)} == {'lower', 'upper'}
    assert jax.tree.structure(grads) == jax.tree.structure(nnx.state(model, nnx.Param))
    before = model.lower.dense_h.kernel[...]
    nnx.update(model, jax.tree.map(jnp.add, params, grads))
    assert_close(model.lower.dense_h.kernel[...], before + grads['lower']['dense_h']['kernel'][...])


def test_variables_of_nnx_that_a_step_writes_are_carried(xs):
    nnx = pytest.importorskip('flax.nnx')
    model, start = nnx_net(nnx, rate=0.5)
    cell, params, (carry, variables) = adapters.from_nnx(model, xs[0], carry=start)
    (count,) = jax.tree.leaves(variables)  # the count of dropout's keys, and not the gain
    assert count == 0
    first, (_, moved) = cell(params, (carry, variables), xs[0])
    again, _ = cell(params, (carry, variables), xs[0])
    other, _ = cell(params, (carry, moved), xs[0])
    assert jax.tree.leaves(moved) == [1]
    assert_close(first, again)
    assert not np.allclose(first, other)


@pytest.mark.slow
def test_samples_of_an_nnx_model_with_dropout_start_anew(xs, ys):
    nnx = pytest.importorskip('flax.nnx')
    model, start = nnx_net(nnx, rate=0.5)
    cell, params, carry = adapters.from_nnx(model, xs[0], carry=start)
    flags = np.array([[False, False], [True, False], [False, True]])
    learner = functional.online(cell, rules.d_rtrl(), mark='auto')
    state = learner.init(params, carry, xs[0])
    gradient = learner.sequence_grad(loss, T, inside='exact', reduction='sum')
    got = jax.jit(gradient)(params, state, xs, ys, reset=(flags, carry))

    def total(params):
        hidden, random = carry
        losses = []
        for x, y, flag in zip(xs, ys, flags):
            hidden = jax.tree.map(lambda h: jnp.where(flag[:, None], 0, h), hidden)
            out, (hidden, random) = cell(params, (hidden, random), x)
            losses.append(loss(out, y))
        return jnp.stack(losses).sum(), (losses, random)

    want, (losses, random) = jax.grad(total, has_aux=True)(params)
    assert_close(jax.tree.leaves(got.grads), jax.tree.leaves(want))
    assert_close(got.losses, jnp.stack(losses))
    assert jax.tree.leaves(got.state.carry[1]) == jax.tree.leaves(random) == [T]


@pytest.mark.slow
def test_a_blox_model_with_a_head_and_its_random_numbers(xs, ys):
    bx = pytest.importorskip('blox')

    class Net(bx.Module):
        def __init__(self, graph, rng):
            super().__init__(graph)
            self.gru = bx.GRU(graph.child('gru'), UNITS, rng)
            self.dropout = bx.Dropout(graph.child('dropout'), 0.5, rng)
            self.head = bx.Linear(graph.child('head'), OUTPUTS, rng)

        def __call__(self, params, x, state):
            (h, state), params = self.gru(params, x, state)
            h, params = self.dropout(params, h, is_training=True)
            y, params = self.head(params, h)
            return (y, state), params

    graph = bx.Graph('model')
    rng = bx.Rng(graph.child('rng'))
    model = Net(graph.child('net'), rng)
    start, container = model.gru.initial_state(rng.seed(bx.Params(), seed=0), xs[0])
    _, container = model(container, xs[0], start)
    container = jax.tree.map(lambda a: a.astype(float) if a.dtype == 'float32' else a, container)
    start = jax.tree.map(lambda a: a.astype(float), start)
    cell, params, carry = adapters.from_blox(model, container, xs[0], carry=start)
    assert list(carry[1]) == [('model', 'rng', 'counter')]
    grads, _, learner = learned(cell, params, carry, xs, ys)
    assert set(learner.routes) == {'/'.join(path) for path in params}
    assert {path.split('/')[1] for path in traced(learner)} == {'net'}
    assert learner.routes['model/net/head/kernel'].kind == 'same-step'
    new = adapters.to_blox(jax.tree.map(jnp.add, params, grads), container)
    assert isinstance(new, bx.Params) and new.is_locked == container.is_locked
    moved = adapters.from_blox(model, new, xs[0], carry=start)[1]
    assert_close(moved, jax.tree.map(jnp.add, params, grads))


@pytest.mark.slow
def test_a_brainstate_model_of_stock_layers_learns_as_the_learner_does(xs, ys):
    import brainstate

    layers = brainstate.nn.GRUCell(INPUTS, UNITS), brainstate.nn.ValinaRNNCell(UNITS, UNITS)
    model = brainstate.nn.Sequential(*layers, brainstate.nn.Linear(UNITS, OUTPUTS))
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    grads, _, online = learned(*adapters.from_brainstate(model, xs[0]), xs, ys)
    assert {path.split('/')[1] for path in traced(online)} == {'0', '1'}
    learner = braintrace.D_RTRL(model, mark='auto')
    learner.compile_graph(xs[0])
    own = learner.etrace_grad(
        xs, ys, step_fn=lambda x, y: loss(learner(x), y), reduction='sum'
    ).grads
    assert_close(jax.tree.leaves(own), jax.tree.leaves(grads))


# -- optax as it is: parameters and gradients in the form of the framework -------------------------


def matrices(params):
    """A mask: weight matrices, and no biases."""
    return jax.tree.map(lambda a: a.ndim > 1, params)


def kinds(params):
    return jax.tree.map(lambda a: 'matrix' if a.ndim > 1 else 'bias', params)


OPTIMIZERS = {
    'adamw with a decay mask': lambda: optax.adamw(1e-2, weight_decay=0.1, mask=matrices),
    'clipping': lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    'a schedule': lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 6)),
    'multi_transform': lambda: optax.multi_transform(
        {'matrix': optax.sgd(0.1), 'bias': optax.set_to_zero()}, kinds
    ),
    'inject_hyperparams': lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    'MultiSteps': lambda: optax.MultiSteps(
        optax.adam(1e-2), every_k_schedule=2
    ).gradient_transformation(),
}


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_an_optimizer_of_optax_takes_the_gradients_as_they_are(name, xs):
    """``sequence_update`` does what a loop of single updates does."""
    ys = jnp.asarray(np.random.default_rng(1).normal(size=(T, BATCH, UNITS)))
    cell, params, carry, *_ = cells.nnx('GRUCell', xs[0])
    optimizer = OPTIMIZERS[name]()
    learner = functional.online(cell, rules.d_rtrl(), mark='auto')
    start = params, optimizer.init(params), learner.init(params, carry, xs[0])
    update = jax.jit(learner.sequence_update(loss, optimizer))
    got, losses, _, _, opt_state, *_ = update(*start, xs, ys)

    @jax.jit
    def step(params, opt_state, state, x, y):
        grads, _, _, state = learner.grad(loss)(params, state, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, state

    want = start
    for x, y in zip(xs, ys):
        want = step(*want, x, y)
    assert_close((got, opt_state), want[:2])
    stays = [bool(jnp.all(a == b)) for a, b in zip(*map(jax.tree.leaves, (got, params)))]
    frozen = [kind == 'bias' for kind in jax.tree.leaves(kinds(params))]
    assert stays == (frozen if name == 'multi_transform' else [False] * len(stays))
