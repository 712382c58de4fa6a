"""The oracles against each other, without the library: all would have to share an error.

Rows of ``WIDE`` are compared in the gate, all rows at night: rows change rarely, and what changes
the library changes none of them.
"""

import jax
import numpy as np
import pytest

from tests import models, oracles
from tests.compare import assert_close, assert_moves, at, errors
from tests.gradients.rows import every_wide_first, wide_first

pytestmark = pytest.mark.slow  # they show nothing of the library
EVERY = models.MODELS | models.PROGRAMS
SMOOTH = 'leaky vector lstm lru op_between_states normalised sparse lora conv1d conv2d'.split()
SMOOTH += 'tail_relu tail_norm three_layers populations'.split()


def dense(case):
    return oracles.total(oracles.dense_recursion(case))


@every_wide_first(EVERY)
def test_the_oracles_of_a_row_agree_and_move_every_parameter(name):
    case, want = models.case(name), dense(models.case(name))
    assert_moves(want)
    assert_close(oracles.two_pass(case), want)
    if case.model.cut_bptt:
        assert_close(oracles.cut_bptt(case), want)
    if case.model.exact:
        assert_close(oracles.bptt(case), want)
    assert_close(oracles.total(oracles.es_recursion(case, 0.0)), oracles.same_step(case))
    assert_close(at(oracles.es_recursion(case, 0.7), 0), at(oracles.dense_recursion(case), 0))


@pytest.mark.parametrize('name', [*SMOOTH, *wide_first(models.names(models.PROGRAMS, smooth=True))])
def test_finite_differences_equal_plain_bptt(name):
    case = models.case(name, steps=2 if name in models.PROGRAMS else 3)
    assert_close(oracles.finite_differences(case), oracles.bptt(case), 1e-6)


# -- control flow and data movement ----------------------------------------------------------------


class Watched(models.ops.NumpyOps):
    """Notes which branches are taken, and that a loop turned."""

    def __init__(self):
        super().__init__()
        self.taken = {}

    def switch(self, index, fns, *args, per_lane=False):
        key = fns[0].__code__.co_firstlineno
        self.taken.setdefault(key, set(range(len(fns)))).discard(int(index))
        return super().switch(index, fns, *args, per_lane=per_lane)


@pytest.mark.parametrize(
    'name', [m.name for m in models.control_flow.BRANCHES if m.name != 'cond_constant']
)
def test_every_branch_of_a_row_is_taken(name):
    case, ops = models.case(name), Watched()
    carry = case.carry
    for x in case.xs:
        _, carry = case.run(ops, case.params, carry, x)
    assert ops.taken and not any(ops.taken.values())


@every_wide_first(models.PROGRAMS)
def test_one_step_of_a_program_is_plain_bptt(name):
    """What this step's weights send through inner turns to later ones is whole."""
    case = models.case(name, steps=1)
    assert_close(dense(case), oracles.bptt(case))


# -- negative controls: each choice of the oracle changes some number ------------------------------


CHOICES = {
    oracles.bptt: 'leaky gru lstm populations spiking_two roll mean',  # nothing is cut
    oracles.cut_bptt: (  # where an op follows an op, in a loop too
        'mgu minimal_rnn op_between_states one_op_two_groups tail_norm scan fori_loop scan_nested'
    ),
    oracles.same_step: 'leaky lstm synapse tail_flip two_layers',  # no history
}


@pytest.mark.parametrize(
    'name, other', [(name, oracle) for oracle, names in CHOICES.items() for name in names.split()]
)
def test_what_another_oracle_leaves_out_matters(name, other):
    case = models.case(name)
    assert max(errors(other(case), dense(case)).values()) > 1e-2


def test_a_transition_that_moves_positions_is_refused():
    def cell(ops, p, c, x):
        return c['h'], {'h': ops.tanh(0.5 * ops.flip(c['h']) + ops.matmul(x, p['w']))}

    case = models.make_case(models.Model('moving', cell, {'w': (3, 4)}))
    with pytest.raises(AssertionError, match='not position-wise'):
        oracles.dense_recursion(case)


def test_complex_steps_equal_jax_derivatives():
    """The NumPy namespace against JAX's, function by function."""
    numpy, jax_ops = models.ops.NumpyOps(), models.ops.JaxOps()
    at = np.random.default_rng(0).standard_normal((3, 4))
    names = 'tanh exp cos sin sigmoid softplus relu abs spike spike_by_vjp flip mean cumsum eased'
    for name in [*names.split(), 'eased_by_vjp', 'norm', 'logsumexp', 'highest']:
        fn, reference = getattr(numpy, name), getattr(jax_ops, name)
        want = jax.jacobian(reference)(at)
        np.testing.assert_allclose(
            oracles.jacobian(fn, at).reshape(want.shape), want, atol=1e-14, err_msg=name
        )
        np.testing.assert_allclose(np.real(fn(at)), reference(at), atol=1e-14, err_msg=name)
