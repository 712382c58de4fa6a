"""Every module of the table against its formula: values, and gradients by reverse mode."""

import brainstate
import jax
import numpy as np
import pytest

import braintrace
from tests import oracles
from tests.compare import assert_close, assert_moves
from tests.models.ops import NumpyOps
from tests.nn.rows import ROWS, bare, built, case_of, plain, values
from tests.precision import float64_models as float64_models
from tests.tiers import nightly, slow

# The gate has each row with one batch size, every other row with its second one.
QUICK = ('vanilla', 'gru', 'mgu', 'lstm', 'min_gru', 'lru')
PAIRS = [
    pytest.param(
        row,
        size,
        id=f'{row.name}-{size}',
        marks=nightly if i else [] if row.name in QUICK else slow,
    )
    for number, row in enumerate(ROWS.values())
    for i, size in enumerate(row.batches[:: -1 if number % 2 else 1])
]
cases = pytest.mark.parametrize('row, batch_size', PAIRS)


@pytest.mark.tier(quick=4)
@cases
def test_steps_and_online_gradients_are_those_of_the_formula(row, batch_size):
    with brainstate.environ.context(**row.context):
        module = built(row, batch_size)
        case = case_of(row, module, batch_size)
        learner = braintrace.D_RTRL(module)
        learner.compile_graph(row.given(case.xs[0]))

        def step(x, y):
            output = bare(learner(x))
            return case.loss(output, y), output

        found = learner.etrace_grad(
            row.given(case.xs), case.ys, step_fn=step, window=3, reduction='sum', has_aux=True
        )
        states = case.carry
        for x, output in zip(case.xs, found.aux, strict=True):
            want, states = jax.tree.map(np.real, row.formula(NumpyOps(), case.params, states, x))
            assert_close(output, want)
        assert_close(values(module, brainstate.HiddenState), states)
    got = {'.'.join(map(str, path)): plain(g) for path, g in found.grads.items()}
    assert_moves(got)
    inexact = oracles.cut_bptt if row.cut_bptt else oracles.two_pass
    assert_close(got, (oracles.bptt if row.exact else inexact)(case), 1e-10)
    assert learner.report.exact == row.exact
