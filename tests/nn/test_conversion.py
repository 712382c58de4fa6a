"""Parameters of the public package, made here by hand, in the same models of ours."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace import compat, nn
from braintrace.errors import OptionError, StructureError

RNG = np.random.default_rng(11)
GATES = {k: {'weight': RNG.normal(size=(7, 4)), 'bias': RNG.normal(size=4)} for k in 'igfo'}
SAVED = {
    **{('layers', 0, f'W{k}', 'weight'): value for k, value in GATES.items()},
    ('layers', 1, 'weight'): {'weight': RNG.normal(size=(4, 3)), 'bias': RNG.normal(size=3)},
    ('layers', 2, 'W'): RNG.normal(size=(3, 2)),
}


def logistic(a):
    return 1 / (1 + np.exp(-a))


def model():
    layers = nn.LSTMCell(3, 4), nn.Linear(4, 3), nn.LeakyRateReadout(3, 2, tau=4.0)
    return brainstate.nn.Sequential(*layers)


def test_a_model_computes_what_the_saved_one_did():
    ours = model()
    compat.load_public(ours, SAVED)
    brainstate.nn.init_all_states(ours)
    h, c, r = np.zeros(4), np.zeros(4), np.zeros(2)
    for x in RNG.normal(size=(3, 3)):
        i, g, f, o = (np.r_[x, h] @ v['weight'] + v['bias'] for v in GATES.values())
        c = logistic(f + 1) * c + logistic(i) * np.tanh(g)
        h = logistic(o) * np.tanh(c)
        linear = SAVED['layers', 1, 'weight']
        drive = (h @ linear['weight'] + linear['bias']) @ SAVED['layers', 2, 'W']
        r = np.exp(-1 / 4) * r + drive
        np.testing.assert_allclose(ours(jnp.asarray(x, 'float32')), r, rtol=1e-5, atol=1e-6)
    dtypes = {v.dtype for v in jax.tree.leaves([s.value for s in ours.parameters()])}
    assert dtypes == {jnp.dtype('float32')}, 'the dtype stays that of the module'


def refused(ours, values, *messages):
    before = {path: state.value for path, state in ours.states().items()}
    with pytest.raises(StructureError) as error:
        compat.load_public(ours, values)
    assert all(message in str(error.value) for message in messages), str(error.value)
    assert all(state.value is before[path] for path, state in ours.states().items())


def test_all_that_does_not_fit_is_named_and_nothing_changes():
    values = SAVED | {('extra', 'weight'): np.ones(2), ('layers', 2, 'W'): np.ones((3, 5))}
    del values['layers', 0, 'Wg', 'weight']
    of_layer = 'layers.2.W is (3, 5); expected (3, 2)'
    refused(model(), values, 'layers.0.Wg.weight is missing', 'extra.weight is left over', of_layer)


@pytest.mark.parametrize(
    'value, found',
    [
        (brainstate.ParamState(GATES['i']), 'is a ParamState; expected'),
        (np.ones(4), "is (4,); expected {'bias': '(4,)', 'weight': '(7, 4)'}"),
        ({'weight': np.ones((7, 4))}, "is {'weight': '(7, 4)'}"),
        ({'weight': 1j * np.ones((7, 4)), 'bias': np.ones(4)}, "'weight': 'complex (7, 4)'"),
        ({'weight': np.ones((7, 4)) * u.mV, 'bias': np.ones(4)}, "'weight': '(7, 4) in"),
    ],
)
def test_a_value_of_another_kind_is_refused(value, found):
    refused(model(), SAVED | {('layers', 0, 'Wi', 'weight'): value}, found)


def test_values_without_paths_are_refused():
    with pytest.raises(OptionError, match='values is a list'):
        compat.load_public(model(), list(SAVED.values()))


def test_units_are_converted():
    ours = nn.Linear(2, 2, w_init=jnp.ones((2, 2)) * u.mV, b_init=None)
    compat.load_public(ours, {('weight',): {'weight': np.full((2, 2), 0.003) * u.volt}})
    assert u.math.allclose(ours.weight.value['weight'], 3 * u.mV)
