"""Layers without a state: parameters, units, signs. ``test_table.py`` has their values and
gradients, ``test_refused.py`` what they refuse.
"""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import nn
from braintrace.errors import OptionError
from tests.nn.rows.layers import Leaky

NORMAL = brainstate.nn.init.Normal
CONDUCTANCES, VOLTAGES = NORMAL(unit=u.siemens), NORMAL(unit=u.mV)
PLACES = np.array([0, 0, 2], np.int32), np.array([1, 4, 3], np.int32)


def sparse(data=(1.0, 2.0, 3.0), kind='COO'):
    data = data if isinstance(data, u.Quantity) else jnp.asarray(data)
    matrix = u.sparse.COO((data, *PLACES), shape=(3, 5))
    return matrix if kind == 'COO' else getattr(u.sparse, kind).fromdense(matrix.todense())


def shapes(layer):
    return {
        '.'.join(path): jax.tree.map(jnp.shape, state.value)
        for path, state in layer.states(brainstate.ParamState).items()
    }


class Own(brainstate.ParamState):
    pass


BIAS = {'b_init': NORMAL()}
DENSE = {'bias': (5,), 'weight': (3, 5)}
# How it is made, a sample of those that take any leading axes, and the shapes that the checkpoints
# of the public package hold at the path `weight`.
LAYERS = {
    'Linear': (lambda **o: nn.Linear(3, 5, **BIAS, **o), (3,), DENSE),
    'Linear, more axes': (lambda **o: nn.Linear((6, 3), (6, 5), **o), (3,), DENSE),
    'SignedWLinear': (lambda **o: nn.SignedWLinear(3, 5, w_sign=-1, **o), (3,), (3, 5)),
    'ScaledWSLinear': (lambda **o: nn.ScaledWSLinear(3, 5, **o), (3,), {**DENSE, 'gain': (1, 5)}),
    'no gain': (lambda **o: nn.ScaledWSLinear(3, 5, ws_gain=False, **o), (3,), DENSE),
    'SparseLinear': (lambda **o: nn.SparseLinear(sparse(), **o), (3,), {'weight': (3,)}),
    'SparseLinear, bias': (
        lambda **o: nn.SparseLinear(sparse(), 0.5, **o),
        (3,),
        {'bias': (5,), 'weight': (3,)},
    ),
    'LoRA': (
        lambda **o: nn.LoRA(3, 2, 5, lora_b_init=NORMAL(), **o),
        (3,),
        {'lora_a': (3, 2), 'lora_b': (2, 5)},
    ),
    'GroupedLinear': (
        lambda **o: nn.GroupedLinear(2, 3, 5, **BIAS, **o),
        (2, 3),
        {'bias': (2, 5), 'weight': (2, 3, 5)},
    ),
    'Embedding': (lambda **o: nn.Embedding(10, (4, 5), **o), None, (10, 4, 5)),
    'Conv1d': (lambda **o: nn.Conv1d((8, 4), 6, 3, groups=2, **o), None, {'weight': (3, 2, 6)}),
    'Conv2d': (
        lambda **o: nn.Conv2d((8, 9, 3), 4, (3, 2), b_init=0.0, **o),
        None,
        {'bias': (1, 1, 4), 'weight': (3, 2, 3, 4)},
    ),
    'Conv2d, channels first': (
        lambda **o: nn.Conv2d((3, 8, 9), 4, (3, 2), b_init=0.0, channel_first=True, **o),
        None,
        {'bias': (1, 4, 1, 1), 'weight': (3, 2, 3, 4)},
    ),
    'Conv3d': (
        lambda **o: nn.Conv3d((4, 5, 6, 3), 4, 3, b_init=0.0, **o),
        None,
        {'bias': (1, 1, 1, 4), 'weight': (3, 3, 3, 3, 4)},
    ),
}


@pytest.mark.tier(quick=7)
@pytest.mark.parametrize('name', LAYERS)
def test_parameters_are_those_of_the_public_package_in_the_class_of_the_users_choice(name):
    make, _, want = LAYERS[name]
    layer = make(param_type=Own)
    assert shapes(layer) == {'weight': want} and type(layer.weight) is Own
    with pytest.raises(OptionError, match=f'{type(layer).__name__}: param_type is <class .dict.>'):
        make(param_type=dict)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name', [name for name, (_, own, _) in LAYERS.items() if own])
def test_leading_axes_are_samples(name):
    make, own, _ = LAYERS[name]
    layer, x = make(), jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, *own)), np.float32)
    each = jnp.stack([layer(sample) for sample in x])
    np.testing.assert_allclose(layer(x), each, rtol=0, atol=1e-6)
    assert layer(x[0, 0]).shape == each.shape[2:]


def test_each_sample_keeps_a_trace_of_its_own_beside_other_leading_axes():
    """So lanes are samples: one alone can be reset."""
    model, x = Leaky(nn.Linear((4, 3), (4, 5))), jnp.ones((2, 4, 3))
    learner = braintrace.compile(model, 'd_rtrl', x, batch_size=2)
    learner(x)
    learner.reset_state(lanes=jnp.array([True, False]))
    (trace,) = learner.get_etrace_of(model.layer.weight).values()
    assert trace['weight'].shape == (2, 4, 3, 5, 1) and learner.report.exact
    assert not trace['weight'][0].any() and trace['weight'][1].all()


def gradient(layer, x):
    return brainstate.transform.grad(lambda: layer(x).sum(), layer.states(brainstate.ParamState))()


def test_a_step_through_zero_keeps_the_sign_of_a_synapse():
    signs, x = np.array([[1], [-1]]), jnp.eye(2)
    layer = nn.SignedWLinear(2, 3, w_sign=signs)
    step = brainstate.transform.jit(lambda: gradient(layer, x)[('weight',)])
    for _ in range(5):
        before = np.asarray(layer.weight.value)
        layer.weight.value = before - 3.0 * step()
        assert ((before > 0) != (np.asarray(layer.weight.value) > 0)).any()
        assert (signs * np.asarray(layer(x)) >= 0).all()
    layer = nn.SignedWLinear(2, 2, w_init=0.0, w_sign=signs)
    of_zero = gradient(layer, jnp.ones(2))[('weight',)]
    np.testing.assert_array_equal(of_zero, [[1.0, 1.0], [-1.0, -1.0]], 'a synapse of zero learns')


def test_signed_weights_may_be_given_and_are_excitatory_by_default():
    weight, signs = np.array([[1.0, 2.0], [-3.0, -0.0]], np.float32), np.array([[1], [-1]])
    layer = nn.SignedWLinear(2, 2, w_init=weight, w_sign=signs)
    np.testing.assert_array_equal(layer(jnp.eye(2)), weight)
    layer = nn.SignedWLinear(3, 5)
    assert (layer(jnp.eye(3)) > 0).all() and (layer.weight.value < 0).any()


def test_a_weight_without_variance_is_divided_by_the_root_of_eps():
    weight = 1.0 + 1e-3 * np.array([[1.0], [-1.0]], np.float32)
    layer = nn.ScaledWSLinear(2, 1, w_init=weight, b_init=None, ws_gain=False, eps=0.25)
    np.testing.assert_allclose(layer(jnp.eye(2)), [[2e-3], [-2e-3]], rtol=1e-3)


def test_a_padding_row_starts_at_zero_and_does_not_learn():
    layer = nn.Embedding(4, 3, padding_idx=2)
    assert not layer(jnp.array(2)).any()
    grad = gradient(layer, jnp.array([2, 1, 2]))[('weight',)]
    np.testing.assert_array_equal(grad, np.eye(4)[1][:, None] * np.ones(3))
    layer = nn.Embedding(4, 3, np.ones((4, 3), np.float32), padding_idx=2)
    np.testing.assert_array_equal(layer(jnp.array(2)), np.ones(3))
    assert not nn.Embedding(4, 3, 1.0, padding_idx=2)(jnp.array(2)).any()


def test_a_frozen_table_is_no_parameter_and_needs_no_trace():
    layer = nn.Embedding(4, 3, freeze=True)
    (state,) = layer.states().values()
    assert not isinstance(state, brainstate.ParamState)
    rows = layer(jnp.array([3, 4, -1]))
    np.testing.assert_array_equal(rows[0], state.value[3])
    assert jnp.isnan(rows[1:]).all()
    assert 'etp' not in str(jax.make_jaxpr(layer)(jnp.array([3])))


CONVOLUTIONS = {
    'padding': (1, (8, 4), {'padding': 2}),
    'valid': (2, (7, 6, 2), {'padding': 'VALID', 'stride': (2, 1)}),
    'an int for each axis': (2, (7, 6, 2), {'padding': (1, 2)}),
    'dilations': (2, (7, 6, 2), {'lhs_dilation': 2, 'rhs_dilation': (1, 2), 'padding': 1}),
    'channels first': (2, (2, 7, 6), {'channel_first': True, 'stride': 2}),
    'three axes': (3, (3, 4, 3, 2), {'padding': [(1, 0), (0, 0), (2, 1)]}),
}


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name', CONVOLUTIONS)
def test_a_convolution_is_that_of_brainstate(name):
    rank, in_size, options = CONVOLUTIONS[name]
    options = {**options, 'b_init': NORMAL()}
    stock = getattr(brainstate.nn, f'Conv{rank}d')(in_size, 4, 3, **options)
    layer = getattr(nn, f'Conv{rank}d')(in_size, 4, 3, **options)
    layer.weight.value = stock.weight.value
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, *in_size)), np.float32)
    assert layer.out_size == stock.out_size
    np.testing.assert_allclose(layer(x), stock(x), rtol=0, atol=1e-5)


UNITS = {
    'ScaledWSLinear': (lambda: nn.ScaledWSLinear(3, 5, CONDUCTANCES, b_init=2.0 * u.ampere), (3,)),
    'SparseLinear': (lambda: nn.SparseLinear(sparse(np.ones(3) * u.siemens)), (2, 3)),
    'GroupedLinear': (lambda: nn.GroupedLinear(2, 3, 5, CONDUCTANCES, b_init=None), (2, 3)),
    'Conv1d': (lambda: nn.Conv1d((6, 3), 5, 3, w_init=CONDUCTANCES), (6, 3)),
    'LoRA': (lambda: nn.LoRA(3, 2, 5, kernel_init=CONDUCTANCES), (2, 3)),
    'Embedding': (lambda: nn.Embedding(4, 3, VOLTAGES, padding_idx=0), None),
}


@pytest.mark.tier(quick=2)
@pytest.mark.parametrize('name', UNITS)
def test_the_unit_of_the_result_is_the_product(name):
    make, shape = UNITS[name]
    y = make()(jnp.array([1, 2]) if shape is None else jnp.ones(shape) * u.mV)
    assert u.get_unit(y) == (u.mV if shape is None else u.mA)


def test_a_learner_holds_the_places_of_a_sparse_layer_without_a_copy():
    layer = nn.SparseLinear(sparse(kind='CSR'))
    model = brainstate.nn.Sequential(layer, nn.LIF(5))
    learner = braintrace.compile(model, 'ES_D_RTRL', jnp.ones(3), decay_or_rank=0.9)
    places = jax.tree.leaves(layer.structure)
    held = learner.structure.value
    assert held and all(any(own is place for place in places) for own in held)


def test_a_sparse_layer_can_be_made_inside_of_jit():
    matrix = sparse(kind='CSR')
    y = jax.jit(lambda x: nn.SparseLinear(matrix)(x))(jnp.array([1.0, 10.0, 100.0]))
    assert y.tolist() == [0.0, 1.0, 0.0, 300.0, 2.0]
