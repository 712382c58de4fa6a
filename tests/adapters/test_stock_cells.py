"""Cells as their frameworks ship them learn online, with the gradients of plain functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import functional, rules, verify
from tests.adapters import cells, plain
from tests.compare import assert_close

T, BATCH = 4, 2
TWINS = [
    (cells.written, 'gru'),
    (cells.written, 'gru_reset_first'),
    (cells.written, 'lstm'),
    (cells.equinox, 'GRUCell'),
    (cells.equinox, 'LSTMCell'),
    (cells.nnx, 'GRUCell'),
    (cells.nnx, 'LSTMCell'),
    (cells.nnx, 'OptimizedLSTMCell'),
    (cells.linen, 'GRUCell'),
    (cells.linen, 'LSTMCell'),
    (cells.linen, 'OptimizedLSTMCell'),
    (cells.haiku, 'GRU'),
    (cells.haiku, 'LSTM'),
    (cells.blox, 'GRU'),
    (cells.blox, 'LSTM'),
    (cells.brainstate, 'GRUCell'),
    (cells.brainstate, 'LSTMCell'),
]
OTHERS = [
    (cells.nnx, 'SimpleCell'),
    (cells.linen, 'SimpleCell'),
    (cells.linen, 'MGUCell'),
    (cells.haiku, 'VanillaRNN'),
    (cells.brainstate, 'ValinaRNNCell'),
    (cells.brainstate, 'MGUCell'),
    (cells.brainstate, 'URLSTMCell'),
]


def named(rows):
    return [pytest.param(*row, id=f'{row[0].__name__}-{row[1]}') for row in rows]


def stream(batched):
    """Inputs and targets; blox asks for a batch."""
    rng = np.random.default_rng(0)
    lanes = (BATCH,) if batched else ()
    return (
        jnp.asarray(rng.normal(size=(T, *lanes, width))) for width in (cells.INPUTS, cells.UNITS)
    )


def learned(taken, xs, ys):
    """The online gradient with automatic marking, which is that of the cut graph."""
    learner = functional.online(taken.cell, rules.d_rtrl(), mark='auto')
    state = learner.init(taken.params, taken.carry, xs[0])
    assert {route.kind for route in learner.routes.values()} == {'trace'}
    grad = learner.sequence_grad(plain.loss, reduction='sum')
    grads, state, losses = grad(taken.params, state, xs, ys)
    assert jax.tree.structure(grads) == jax.tree.structure(taken.params)
    cut = verify.cut_bptt_gradients(
        taken.cell, taken.params, taken.carry, xs, ys, plain.loss, graph=learner.graph
    )
    assert_close(jax.tree.leaves(grads), jax.tree.leaves(cut))
    return grads, losses


@pytest.mark.parametrize('batched', [True, False], ids=['batch', 'sample'])
@pytest.mark.parametrize(('framework', 'name'), named(TWINS))
def test_a_stock_cell_has_the_gradient_of_its_plain_twin(framework, name, batched):
    if not batched and framework is cells.blox:
        pytest.skip('a blox module asks for a batch')
    xs, ys = stream(batched)
    taken = framework(name, xs[0])
    grads, losses = learned(taken, xs, ys)
    twin, carry = taken.layout(taken.params), cells.start(taken.step, xs[0])
    want = plain.online_gradient(taken.step, twin, carry, xs, ys)
    assert_close(taken.layout(grads), want)
    assert_close(losses[0], plain.loss(taken.step(twin, carry, xs[0]), ys[0]))


@pytest.mark.parametrize('batched', [True, False], ids=['batch', 'sample'])
@pytest.mark.parametrize(('framework', 'name'), named(OTHERS))
def test_the_other_stock_cells_learn_with_traces(framework, name, batched):
    xs, ys = stream(batched)
    learned(framework(name, xs[0]), xs, ys)
