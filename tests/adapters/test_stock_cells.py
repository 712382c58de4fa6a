"""Cells as their frameworks ship them learn online, with the gradients of plain functions."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from tests.adapters import cells, plain
from tests.compare import assert_close
from tests.tiers import first, in_turn, none

T, BATCH = 3, 2


class Row(NamedTuple):
    framework: Callable
    cell: str

    @property
    def name(self) -> str:
        return f'{self.framework.__name__}-{self.cell}'


TWINS = [Row(*row) for row in cells.TWINS]
OTHERS = [
    Row(cells.nnx, 'SimpleCell'),
    *(Row(cells.linen, name) for name in ('SimpleCell', 'MGUCell')),
    Row(cells.haiku, 'VanillaRNN'),
    *(Row(cells.brainstate, name) for name in ('ValinaRNNCell', 'MGUCell', 'URLSTMCell')),
]
SHAPES = ['batch', 'sample']


def stream(shape):
    """Inputs and targets."""
    rng = np.random.default_rng(0)
    lanes = (BATCH,) if shape == 'batch' else ()
    return (
        jnp.asarray(rng.normal(size=(T, *lanes, width))) for width in (cells.INPUTS, cells.UNITS)
    )


@pytest.mark.tier(quick=0)
@in_turn(none, row=TWINS, shape=SHAPES)
def test_a_stock_cell_has_the_gradient_of_its_plain_twin(row, shape):
    xs, ys = stream('batch' if row.framework is cells.blox else shape)  # blox asks for a batch
    taken = row.framework(row.cell, xs[0])
    grads, losses, learner = cells.learned(*taken[:3], xs, ys)
    assert {route.kind for route in learner.routes.values()} == {'trace'}
    twin, carry = taken.layout(taken.params), cells.start(taken.step, xs[0])
    want = plain.online_gradient(taken.step, twin, carry, xs, ys)
    assert_close(taken.layout(grads), want)
    assert_close(losses[0], plain.loss(taken.step(twin, carry, xs[0]), ys[0]))


@in_turn(first(OTHERS[0]), row=OTHERS, shape=SHAPES)
def test_the_other_stock_cells_learn_with_traces(row, shape):
    xs, ys = stream(shape)
    *_, learner = cells.learned(*row.framework(row.cell, xs[0])[:3], xs, ys)
    assert {route.kind for route in learner.routes.values()} == {'trace'}
