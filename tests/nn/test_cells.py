"""The life of states, options and bad input; formulas and gradients are in ``test_table``."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace import compat, nn
from braintrace.errors import (
    EtpDtypeError,
    EtpShapeError,
    EtpUnitError,
    OptionError,
    StructureError,
)

NUM_IN, NUM_OUT, STEPS = 3, 5, 4
CELLS = {
    'vanilla': (nn.VanillaRNNCell, ('h',)),
    'gru': (nn.GRUCell, ('h',)),
    'lstm': (nn.LSTMCell, ('h', 'c')),
    'min_gru': (nn.MinGRUCell, ('h',)),
    'readout': (nn.FilteredReadout, ('f', 'g')),
}
SIZES = {'f': NUM_IN, 'g': 1}  # of a readout's states; those of cells: NUM_OUT


def logistic(a):
    return 1 / (1 + np.exp(-a))


def make(name, batch_size=None, **options):
    brainstate.random.seed(7)
    drawn = {
        'b_init': brainstate.nn.init.Normal(scale=0.3),
        'state_init': brainstate.nn.init.Normal(scale=0.5),
    }
    cell = CELLS[name][0](NUM_IN, NUM_OUT, **(drawn | options))
    cell.init_state(batch_size)
    return cell


def inputs(batch_size, seed=0):
    shape = (STEPS, NUM_IN) if batch_size is None else (STEPS, batch_size, NUM_IN)
    return jnp.asarray(
        np.random.default_rng(seed).normal(size=shape), dtype=brainstate.environ.dftype()
    )


@pytest.mark.parametrize('name', CELLS)
def test_states_are_hidden_states_and_weights_are_parameters(name):
    cell = make(name)
    assert set(cell.states(brainstate.HiddenState)) == {(s,) for s in CELLS[name][1]}
    others = [s for s in cell.states().values() if not isinstance(s, brainstate.HiddenState)]
    assert others and all(
        isinstance(s, brainstate.ParamState) and set(s.value) == {'weight', 'bias'} for s in others
    )


@pytest.mark.parametrize('name', CELLS)
def test_reset_brings_back_the_first_values_for_the_asked_batch(name):
    cell = make(name, None, state_init=0.25)
    first = cell.states(brainstate.HiddenState)
    cell(inputs(None)[0])
    values = {
        (n,): np.full(SIZES.get(n, NUM_OUT), 0.0 if n == 'g' else 0.25) for n in CELLS[name][1]
    }
    assert all(not np.array_equal(s.value, values[path]) for path, s in first.items())
    cell.reset_state()
    assert all(np.array_equal(s.value, values[path]) for path, s in first.items())
    cell.reset_state(batch_size=3)
    assert all(np.array_equal(s.value, np.stack(3 * [values[path]])) for path, s in first.items())
    assert cell.states(brainstate.HiddenState) == first, 'a reset keeps the state objects'


@pytest.mark.parametrize('name', CELLS)
def test_the_bias_may_be_left_out(name):
    cell = make(name, b_init=None)
    assert all(set(s.value) == {'weight'} for s in cell.states(brainstate.ParamState).values())
    assert cell(inputs(None)[0]).shape == (NUM_OUT,)


@pytest.mark.tier(quick=6)
@pytest.mark.parametrize('activation', ['softplus', jnp.sin])
@pytest.mark.parametrize('name', ['vanilla', 'gru', 'lstm', 'min_gru'])
def test_the_activation_counts(name, activation):
    x = inputs(None)[0]
    assert not np.allclose(make(name)(x), make(name, activation=activation)(x))


def test_each_gate_is_drawn_by_itself():
    """An orthogonal block of a fused weight has orthonormal columns; four gates drawn as one matrix
    would not.
    """
    orthogonal = brainstate.nn.init.Orthogonal()
    weight = np.asarray(nn.LSTMCell(NUM_IN, NUM_OUT, w_init=orthogonal).W.weight.value['weight'])
    assert weight.shape == (NUM_IN + NUM_OUT, 4 * NUM_OUT)
    for block in np.split(weight, 4, axis=1):
        np.testing.assert_allclose(block.T @ block, np.eye(NUM_OUT), atol=1e-5)
    assert not np.allclose(weight[:, :NUM_OUT], weight[:, NUM_OUT : 2 * NUM_OUT])


@pytest.mark.parametrize('name', CELLS)
@pytest.mark.parametrize(
    'x, error, words',
    [
        (jnp.ones(4), EtpShapeError, r'shape \(4,\); expected \(3,\) or \(batch, 3\)'),
        (jnp.ones((2, 2, 3)), EtpShapeError, 'jax.vmap'),
        ([1.0, 2.0, 3.0], EtpDtypeError, 'the input is a list'),
    ],
    ids=['features', 'axes', 'a list'],
)
def test_a_wrong_input_is_refused(name, x, error, words):
    with pytest.raises(error, match=words):
        make(name)(x)


@pytest.mark.parametrize('name', CELLS)
def test_a_step_before_init_state_is_refused(name):
    cell = CELLS[name][0](NUM_IN, NUM_OUT)
    with pytest.raises(StructureError, match='init_all_states'):
        cell(jnp.ones(3))
    with pytest.raises(StructureError, match='has no state'):
        cell.reset_state()


@pytest.mark.parametrize('name', CELLS)
def test_a_batch_that_the_states_do_not_have_is_refused_and_changes_nothing(name):
    cell = make(name)
    before = {path: s.value for path, s in cell.states().items()}
    with pytest.raises(StructureError, match=r'init_state\(batch_size=2\)'):
        cell(jnp.ones((2, 3)))
    assert all(s.value is before[path] for path, s in cell.states().items())


@pytest.mark.parametrize('name', CELLS)
@pytest.mark.parametrize('size', [0, -1, 2.5, True, (2, 3), '3'])
def test_a_size_that_is_not_one_positive_int_is_refused(name, size):
    with pytest.raises(OptionError, match='number of features'):
        CELLS[name][0](size, NUM_OUT)
    with pytest.raises(OptionError, match='number of features'):
        CELLS[name][0](NUM_IN, size)


@pytest.mark.parametrize('batch_size', [-1, 2.5, True, (2,)])
def test_a_batch_size_that_is_no_count_is_refused(batch_size):
    with pytest.raises(OptionError, match='batch_size'):
        nn.GRUCell(NUM_IN, NUM_OUT).init_state(batch_size)


PLAIN = [nn.GRUCell, nn.MinGRUCell, nn.S5Cell, nn.RTUCell, nn.GLACell, nn.MambaCell]


@pytest.mark.parametrize('cell', PLAIN)
def test_an_input_with_a_unit_is_refused_where_equations_take_numbers(cell):
    cell = cell(NUM_IN, NUM_OUT)
    cell.init_state()
    with pytest.raises(EtpUnitError, match=r'unit mV.*x.to_decimal\(saiunit.mV\)'):
        cell(jnp.ones(NUM_IN) * u.mV)


@pytest.mark.parametrize('activation', ['no_such_function', 3])
def test_an_activation_that_is_no_function_is_refused(activation):
    with pytest.raises(OptionError, match='activation'):
        nn.GRUCell(NUM_IN, NUM_OUT, activation=activation)


def test_the_plain_cell_takes_its_options_by_name():
    with pytest.raises(OptionError, match='positional'):
        nn.VanillaRNNCell(NUM_IN, NUM_OUT, brainstate.nn.init.ZeroInit())


GATED = {  # and the state that remembers
    'gru': (nn.GRUCell, 'h'),
    'mgu': (nn.MGUCell, 'h'),
    'cfn': (nn.CFNCell, 'h'),
    'minimal_rnn': (nn.MinimalRNNCell, 'h'),
    'mini_gru': (compat.MiniGRU, 'h'),
    'mini_lstm': (compat.MiniLSTM, 'h'),
    'lstm': (nn.LSTMCell, 'c'),
    'min_gru': (nn.MinGRUCell, 'h'),
    'min_lstm': (nn.MinLSTMCell, 'h'),
}


@pytest.mark.tier(quick=3)
@pytest.mark.parametrize('name', GATED)
def test_timescale_spreads_what_units_forget(name):
    """At first a unit keeps t / (1 + t) of its state, with t uniform in (low, high - 1)."""
    brainstate.random.seed(5)
    cls, state = GATED[name]
    cell = cls(2, 400, w_init=brainstate.nn.init.ZeroInit(), timescale=(3, 41), state_init=1e-3)
    cell.init_state()
    cell(jnp.zeros(2))
    kept = np.asarray(getattr(cell, state).value, float) / 1e-3
    times = kept / (1 - kept)
    assert 2.9 < times.min() < 4 and 39 < times.max() < 40.1
    np.testing.assert_allclose(times.mean(), 21.5, atol=1.5)


def test_what_an_input_gate_lets_in_is_what_the_forget_gate_drops():
    i, g, f, o = np.split(nn.LSTMCell(2, 7, timescale=(1, 50)).W.weight.value['bias'], 4)
    np.testing.assert_allclose(i, -(f + 1), rtol=1e-6)
    assert not g.any() and not o.any() and i.any()


NO_RANGES = [(1, 1.5), (0, 5), (5, 1), 7, (1, 2, 3), ('1', '9'), (1, float('inf')), (True, 9)]


@pytest.mark.parametrize('timescale', NO_RANGES)
def test_a_timescale_that_is_no_range_is_refused(timescale):
    with pytest.raises(OptionError, match='GRUCell: timescale is'):
        nn.GRUCell(2, 3, timescale=timescale)


def test_a_timescale_may_be_numbers_of_numpy():
    brainstate.random.seed(5)
    cell = nn.MinGRUCell(2, 3, timescale=(np.int64(2), np.float32(9)))
    values = jax.tree.leaves([state.value for state in cell.states().values()])
    assert all(np.isfinite(value).all() for value in values)


def test_a_timescale_needs_biases():
    with pytest.raises(OptionError, match='b_init is None'):
        nn.MinGRUCell(2, 3, b_init=None, timescale=(1, 9))


def test_uniform_gates_start_uniform():
    brainstate.random.seed(5)
    opened = np.sort(logistic(np.asarray(nn.URLSTMCell(2, 500).bias.value, float)))
    np.testing.assert_allclose(opened, np.linspace(0, 1, 500), atol=0.08)
    assert np.isfinite(nn.URLSTMCell(2, 1).bias.value).all()


def test_phi_may_be_a_function_or_a_module():
    learned = nn.MinimalRNNCell(3, 5, phi=nn.Linear(3, 5, b_init=None))
    assert ('phi', 'weight') in learned.states(brainstate.ParamState)
    cell = nn.MinimalRNNCell(3, 3, phi=jnp.tanh, w_init=brainstate.nn.init.ZeroInit())
    assert set(cell.states()) == {('W_u', 'weight')}
    cell.init_state()
    np.testing.assert_allclose(cell(jnp.ones(3)), np.tanh(1) / 2, rtol=1e-6)


def test_a_phi_that_does_not_fit_is_refused():
    cell = nn.MinimalRNNCell(3, 5, phi=jnp.tanh)
    cell.init_state()
    with pytest.raises(EtpShapeError, match=r'phi made \(3,\)'):
        cell(jnp.ones(3))
    with pytest.raises(OptionError, match="phi is 'tanh'"):
        nn.MinimalRNNCell(3, 5, phi='tanh')


def test_closed_gates_leave_finite_numbers():
    cell = nn.MinLSTMCell(1, 1, w_init=np.full((1, 3), -1e3), state_init=2.0)
    cell.init_state()
    np.testing.assert_allclose(cell(jnp.ones(1)), (2 - 1e3) / 2)
