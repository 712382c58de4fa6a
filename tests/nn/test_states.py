"""The life of the states of cells, neurons, synapses and readouts: first values, steps, resets, and
inputs that do not fit them.
"""

import re

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace import nn
from braintrace.errors import (
    EtpDtypeError,
    EtpShapeError,
    EtpUnitError,
    OptionError,
    StructureError,
)

IN, OUT, UNITS = (3,), (5,), (2, 4)


def cell(kind, *states):
    return lambda: kind(3, 5, state_init=0.25), IN, {state: (0.25, OUT) for state in states}


def neuron(kind, options=None, **first):
    """All states of a unit move in three steps with a strong input."""
    firsts = {'V': 0.25, 'refractory': 0} | first
    make = lambda: kind(UNITS, tau=2.0, tau_ref=3, V_init=0.25, **(options or {}))
    return make, UNITS, {state: (value, UNITS) for state, value in firsts.items()}


# how it is made, the shape of a sample, the first value and the shape of each state
STATEFUL = {
    'vanilla': cell(nn.VanillaRNNCell, 'h'),
    'lstm': cell(nn.LSTMCell, 'h', 'c'),
    'lru': cell(nn.LRUCell, 'h_re', 'h_im'),
    'lmu': (
        lambda: nn.LMUCell(3, 5, 2, 4.0, state_init=0.25),
        IN,
        {'h': (0.25, OUT), 'm': (0.25, (1, 2))},
    ),
    'filtered': (
        lambda: nn.FilteredReadout(3, 5, b_init=0.5, state_init=0.25),
        IN,
        {'f': (0.25, IN), 'g': (0, (1,))},
    ),
    'leaky_rate': (lambda: nn.LeakyRateReadout(3, 5, tau=5.0, r_init=0.25), IN, {'r': (0.25, OUT)}),
    'LIF': neuron(nn.LIF),
    'ALIF': neuron(nn.ALIF, a=0),
    'AdLIF': neuron(nn.AdLIF, w=0),
    'BRF': (
        lambda: nn.BRF(UNITS, 2.0, tau=4.0, V_init=0.25),
        UNITS,
        {'V': (0.25, UNITS), 'V_im': (0, UNITS), 'q': (0, UNITS)},
    ),
    'GIF': neuron(nn.GIF, {'a': 0.1, 'A1': 1.0, 'A2': 1.0}, V_th=1, I1=0, I2=0),
    'dual': (
        lambda: nn.DualExpon(UNITS, g_init=0.5),
        UNITS,
        {'g_decay': (0.5, UNITS), 'g_rise': (0.5, UNITS)},
    ),
    'delay': (lambda: nn.Delay(3, 2, line_init=0.25), IN, {'line': (0.25, (3, 3))}),
    'depressed': (lambda: nn.STP(3, tau_f=None), IN, {'x': (1, IN)}),
}
rows = pytest.mark.parametrize('name', STATEFUL)


def values(states):
    return {path[0]: np.asarray(state.value) for path, state in states.items()}


@pytest.mark.tier(quick=6)
@rows
@pytest.mark.parametrize('batch_size', [None, 3])
def test_states_have_their_shapes_and_a_reset_brings_back_their_first_values(name, batch_size):
    make, own, states = STATEFUL[name]
    module, lead = make(), () if batch_size is None else (batch_size,)
    module.init_state(batch_size)
    hidden = module.states(brainstate.HiddenState)
    first = values(hidden)
    assert set(first) == set(states) and module.in_size == own
    for state, (value, shape) in states.items():
        np.testing.assert_array_equal(first[state], np.full((*lead, *shape), value))
        assert first[state].dtype == ('int32' if state == 'refractory' else 'float32')
    step = brainstate.transform.jit(module)
    for _ in range(3):
        assert step(jnp.full((*lead, *own), 9.0)).dtype == 'float32'
    for state, value in values(hidden).items():
        assert value.shape == first[state].shape and value.dtype == first[state].dtype
        assert not np.array_equal(value, first[state])
    for size in (batch_size, 2):
        module.reset_state(size)
        for state, (value, shape) in states.items():
            want = np.full(shape if size is None else (size, *shape), value)
            np.testing.assert_array_equal(hidden[(state,)].value, want)
    assert module.states(brainstate.HiddenState) == hidden, 'a reset keeps the state objects'


@rows
def test_a_step_that_does_not_fit_is_refused_and_changes_nothing(name):
    make, own, _ = STATEFUL[name]
    module = make()
    with pytest.raises(StructureError, match='init_all_states'):
        module(jnp.ones(own))
    with pytest.raises(StructureError, match='has no state'):
        module.reset_state()
    module.init_state()
    before = {path: state.value for path, state in module.states().items()}
    wide = (*own[:-1], own[-1] + 1)
    for x, error, words in (
        (jnp.ones(wide), EtpShapeError, re.escape(f'shape {wide}; expected {own} or (batch, ')),
        (jnp.ones((2, 2, *own)), EtpShapeError, 'jax.vmap'),
        ([1.0, 2.0, 3.0], EtpDtypeError, 'the input is a list'),
        (jnp.ones((2, *own)), StructureError, r'init_state\(batch_size=2\)'),
    ):
        with pytest.raises(error, match=words):
            module(x)
    assert all(state.value is before[path] for path, state in module.states().items())


def test_a_batch_size_that_is_no_count_is_refused():
    for batch_size in (-1, 2.5, True, (2,)):
        with pytest.raises(OptionError, match='batch_size'):
            nn.GRUCell(3, 5).init_state(batch_size)


SIZED = [nn.VanillaRNNCell, nn.GRUCell, nn.LSTMCell, nn.MinGRUCell, nn.CTRNNCell]
SIZED += [nn.FilteredReadout, nn.LeakyRateReadout, nn.LeakySpikeReadout]


@pytest.mark.parametrize('kind', SIZED)
def test_a_size_that_is_not_one_positive_int_is_refused(kind):
    for size in (0, -1, 2.5, True, (2, 3), '3'):
        for name, given in (('in_size', (size, 5)), ('out_size', (3, size))):
            with pytest.raises(
                OptionError, match=f'{kind.__name__}: {name} is .*number of features'
            ):
                kind(*given)


PLAIN = [nn.GRUCell, nn.LTCCell, nn.MinGRUCell, nn.S5Cell, nn.RTUCell, nn.GLACell, nn.DeltaNetCell]
PLAIN += [nn.MambaCell]


@pytest.mark.parametrize('kind', PLAIN)
def test_an_input_with_a_unit_is_refused_where_equations_take_numbers(kind):
    module = kind(3, 5)
    module.init_state()
    with pytest.raises(EtpUnitError, match=r'unit mV.*x.to_decimal\(saiunit.mV\)'):
        module(jnp.ones(3) * u.mV)
