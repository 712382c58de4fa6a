"""Layers without a state: parameters, units, signs, and what they refuse.

``test_table.py`` has their values and gradients.
"""

import re

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import nn
from braintrace.errors import BraintraceError, EtpUnitError, OptionError

NORMAL = brainstate.nn.init.Normal
CONDUCTANCES, VOLTAGES = NORMAL(unit=u.siemens), NORMAL(unit=u.mV)
PLACES = np.array([0, 0, 2], np.int32), np.array([1, 4, 3], np.int32)


def sparse(data=(1.0, 2.0, 3.0), shape=(3, 5), kind='COO'):
    data = data if isinstance(data, u.Quantity) else jnp.asarray(data)
    matrix = u.sparse.COO((data, *PLACES), shape=shape)
    return matrix if kind == 'COO' else getattr(u.sparse, kind).fromdense(matrix.todense())


def shapes(layer):
    return {
        '.'.join(path): jax.tree.map(jnp.shape, state.value)
        for path, state in layer.states(brainstate.ParamState).items()
    }


# The paths and shapes that the checkpoints of the public package hold.
DENSE = {'bias': (5,), 'weight': (3, 5)}
LOADED = {
    'Linear': (lambda: nn.Linear(3, 5), DENSE),
    'Linear, more axes': (lambda: nn.Linear((6, 3), (6, 5)), DENSE),
    'SignedWLinear': (lambda: nn.SignedWLinear(3, 5), (3, 5)),
    'ScaledWSLinear': (lambda: nn.ScaledWSLinear(3, 5), {**DENSE, 'gain': (1, 5)}),
    'ScaledWSLinear, no gain': (lambda: nn.ScaledWSLinear(3, 5, ws_gain=False), DENSE),
    'SparseLinear': (lambda: nn.SparseLinear(sparse()), {'weight': (3,)}),
    'SparseLinear, bias': (lambda: nn.SparseLinear(sparse(), 0.0), {'bias': (5,), 'weight': (3,)}),
    'LoRA': (lambda: nn.LoRA(3, 2, 5), {'lora_a': (3, 2), 'lora_b': (2, 5)}),
    'GroupedLinear': (lambda: nn.GroupedLinear(2, 3, 5), {'bias': (2, 5), 'weight': (2, 3, 5)}),
    'Embedding': (lambda: nn.Embedding(10, (4, 5)), (10, 4, 5)),
    'Conv1d': (lambda: nn.Conv1d((8, 4), 6, 3, groups=2), {'weight': (3, 2, 6)}),
    'Conv2d': (
        lambda: nn.Conv2d((8, 9, 3), 4, (3, 2), b_init=0.0),
        {'bias': (1, 1, 4), 'weight': (3, 2, 3, 4)},
    ),
    'Conv2d, channels first': (
        lambda: nn.Conv2d((3, 8, 9), 4, (3, 2), b_init=0.0, channel_first=True),
        {'bias': (1, 4, 1, 1), 'weight': (3, 2, 3, 4)},
    ),
    'Conv3d': (
        lambda: nn.Conv3d((4, 5, 6, 3), 4, 3, b_init=0.0),
        {'bias': (1, 1, 1, 4), 'weight': (3, 3, 3, 3, 4)},
    ),
}


@pytest.mark.tier(quick=7)
@pytest.mark.parametrize('name', LOADED)
def test_parameters_have_the_paths_and_shapes_of_the_public_package(name):
    make, want = LOADED[name]
    assert shapes(make()) == {'weight': want}


def test_a_base_keeps_its_parameters_below_its_name():
    layer = nn.LoRA(3, 2, 5, base_module=nn.Linear(3, 5, b_init=None))
    assert shapes(layer) == {
        'base_module.weight': {'weight': (3, 5)},
        'weight': {'lora_a': (3, 2), 'lora_b': (2, 5)},
    }


class Own(brainstate.ParamState):
    pass


WITH_TYPE = {
    'Linear': lambda kind: nn.Linear(3, 5, param_type=kind),
    'SignedWLinear': lambda kind: nn.SignedWLinear(3, 5, param_type=kind),
    'ScaledWSLinear': lambda kind: nn.ScaledWSLinear(3, 5, param_type=kind),
    'SparseLinear': lambda kind: nn.SparseLinear(sparse(), param_type=kind),
    'LoRA': lambda kind: nn.LoRA(3, 2, 5, param_type=kind),
    'GroupedLinear': lambda kind: nn.GroupedLinear(2, 3, 5, param_type=kind),
    'Embedding': lambda kind: nn.Embedding(6, 5, param_type=kind),
    'Conv1d': lambda kind: nn.Conv1d((8, 3), 5, 3, param_type=kind),
}


@pytest.mark.parametrize('name', WITH_TYPE)
def test_the_class_of_the_parameter_is_the_users_choice(name):
    assert type(WITH_TYPE[name](Own).weight) is Own
    with pytest.raises(OptionError, match=f'{name}: param_type is <class .dict.>'):
        WITH_TYPE[name](dict)


# leading axes -------------------------------------------------------------------------------------

LEADING = {
    'Linear': (lambda: nn.Linear(3, 5, b_init=NORMAL()), (3,)),
    'SignedWLinear': (lambda: nn.SignedWLinear(3, 5, w_sign=-1), (3,)),
    'SparseLinear': (lambda: nn.SparseLinear(sparse(), 0.5), (3,)),
    'LoRA': (lambda: nn.LoRA(3, 2, 5, lora_b_init=NORMAL()), (3,)),
    'GroupedLinear': (lambda: nn.GroupedLinear(2, 3, 5, b_init=NORMAL()), (2, 3)),
}


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name', LEADING)
def test_leading_axes_are_samples(name):
    make, own = LEADING[name]
    layer, x = make(), jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, *own)), np.float32)
    each = jnp.stack([layer(sample) for sample in x])
    np.testing.assert_allclose(layer(x), each, rtol=0, atol=1e-6)
    assert layer(x[0, 0]).shape == each.shape[2:]


def test_indices_may_have_any_shape():
    layer, indices = nn.Embedding(6, (2, 3)), jnp.array([[0, 5, 1], [2, 2, 4]])
    np.testing.assert_array_equal(layer(indices), np.asarray(layer.weight.value)[indices])


# dense layers -----------------------------------------------------------------------------------


def test_values_may_be_given_as_arrays():
    weight, bias = np.ones((3, 4), np.float32), np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(
        nn.Linear(3, 4, w_init=weight, b_init=bias)(jnp.ones(3)), 3 + bias
    )


def test_each_sample_keeps_a_trace_of_its_own_beside_other_leading_axes():
    """So lanes are samples: one alone can be reset."""

    class Leaky(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear((4, 3), (4, 5))
            self.h = brainstate.HiddenState(jnp.zeros((2, 4, 5)))

        def update(self, x):
            self.h.value = 0.5 * self.h.value + self.layer(x)
            return self.h.value

    model = Leaky()
    learner = braintrace.D_RTRL(model)
    learner.compile_graph(jnp.ones((2, 4, 3)))
    learner(jnp.ones((2, 4, 3)))
    learner.reset_state(lanes=jnp.array([True, False]))
    (trace,) = learner.get_etrace_of(model.layer.weight).values()
    assert trace['weight'].shape == (2, 4, 3, 5, 1) and learner.report.exact
    assert not trace['weight'][0].any() and trace['weight'][1].all()


# signs --------------------------------------------------------------------------------------------


def gradient(layer, x):
    return brainstate.transform.grad(lambda: layer(x).sum(), layer.states(brainstate.ParamState))()


def test_a_step_through_zero_keeps_the_sign_of_a_synapse():
    signs = np.array([[1], [-1]])
    layer, x = nn.SignedWLinear(2, 3, w_sign=signs), jnp.eye(2)
    step = brainstate.transform.jit(lambda: gradient(layer, x)[('weight',)])
    for _ in range(5):
        before = np.asarray(layer.weight.value)
        layer.weight.value = before - 3.0 * step()
        assert ((before > 0) != (np.asarray(layer.weight.value) > 0)).any()
        assert (signs * np.asarray(layer(x)) >= 0).all()


def test_a_synapse_of_zero_can_learn():
    layer = nn.SignedWLinear(2, 2, w_init=0.0, w_sign=np.array([[1], [-1]]))
    np.testing.assert_array_equal(
        gradient(layer, jnp.ones(2))[('weight',)], [[1.0, 1.0], [-1.0, -1.0]]
    )


def test_all_synapses_are_excitatory_by_default():
    layer = nn.SignedWLinear(3, 5)
    assert (layer(jnp.eye(3)) > 0).all() and (layer.weight.value < 0).any()


def test_signed_weights_may_be_given():
    weight, signs = np.array([[1.0, 2.0], [-3.0, -0.0]], np.float32), np.array([[1], [-1]])
    layer = nn.SignedWLinear(2, 2, w_init=weight, w_sign=signs)
    np.testing.assert_array_equal(layer(jnp.eye(2)), weight)


@pytest.mark.parametrize(
    'options, words',
    [
        ({'w_sign': np.array([[1, 1, 0], [1, 2, 1]])}, r'w_sign is 0 at \(0, 2\) of the weight'),
        ({'w_sign': np.array([[1], [-0.5]])}, r'w_sign is -0.5 at \(1, 0\) of the weight'),
        ({'w_sign': np.array([[1], [np.nan]])}, r'w_sign is nan at \(1, 0\)'),
        ({'w_sign': np.ones(2)}, r'w_sign has shape \(2,\); give the shape \(2, 1\)'),
        ({'w_sign': 'minus'}, 'w_sign is a str'),
        ({'w_init': np.array([[1.0, 2, 3], [4, -5, -6]])}, r'-5.0 at \(1, 1\), where w_sign is \+'),
        (
            {'w_init': np.ones((2, 3)) * u.siemens, 'w_sign': np.array([[1], [-1]])},
            r'w_init is 1.0 at \(1, 0\), where w_sign is -1. Give weights of that sign',
        ),
    ],
)
def test_wrong_signs_are_refused_with_their_place(options, words):
    with pytest.raises(OptionError, match=f'SignedWLinear: .*{words}'):
        nn.SignedWLinear(2, 3, **options)


# standardised weights -----------------------------------------------------------------------------


def test_a_weight_without_variance_is_divided_by_the_root_of_eps():
    weight = 1.0 + 1e-3 * np.array([[1.0], [-1.0]], np.float32)
    layer = nn.ScaledWSLinear(2, 1, w_init=weight, b_init=None, ws_gain=False, eps=0.25)
    np.testing.assert_allclose(layer(jnp.eye(2)), [[2e-3], [-2e-3]], rtol=1e-3)


# low rank -----------------------------------------------------------------------------------------


def test_an_adapter_starts_with_its_base_and_its_second_factor_learns_first():
    base = nn.Linear(3, 5)
    layer, x = nn.LoRA(3, 2, 5, base_module=base), jnp.ones((4, 3))
    np.testing.assert_array_equal(layer(x), base(x))
    first = gradient(layer, x)[('weight',)]
    assert not first['lora_a'].any() and first['lora_b'].all()
    layer.weight.value = jax.tree.map(lambda w, g: w - 0.1 * g, layer.weight.value, first)
    assert gradient(layer, x)[('weight',)]['lora_a'].all()


# tables -------------------------------------------------------------------------------------------


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


# convolutions -------------------------------------------------------------------------------------

CONVOLUTIONS = {
    'padding': (1, (8, 4), {'padding': 2}),
    'a pair': (1, (8, 4), {'padding': (1, 2)}),
    'valid': (2, (7, 6, 2), {'padding': 'VALID', 'stride': (2, 1)}),
    'an int for each axis': (2, (7, 6, 2), {'padding': (1, 2)}),
    'dilations': (2, (7, 6, 2), {'lhs_dilation': 2, 'rhs_dilation': (1, 2), 'padding': 1}),
    'groups': (2, (7, 6, 4), {'groups': 2}),
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


# units --------------------------------------------------------------------------------------------

WITH_UNITS = {
    'Linear': (lambda **b: nn.Linear(3, 5, CONDUCTANCES, **b), (4, 2, 3)),
    'ScaledWSLinear': (lambda **b: nn.ScaledWSLinear(3, 5, CONDUCTANCES, **b), (3,)),
    'SparseLinear': (lambda **b: nn.SparseLinear(sparse(np.ones(3) * u.siemens), **b), (2, 3)),
    'GroupedLinear': (lambda **b: nn.GroupedLinear(2, 3, 5, CONDUCTANCES, **b), (2, 3)),
    'Conv1d': (lambda **b: nn.Conv1d((6, 3), 5, 3, w_init=CONDUCTANCES, **b), (6, 3)),
}


@pytest.mark.tier(quick=2)
@pytest.mark.parametrize('name', WITH_UNITS)
def test_the_unit_of_the_result_is_the_product(name):
    make, shape = WITH_UNITS[name]
    x = jnp.ones(shape) * u.mV
    for bias in (None, 2.0 * u.ampere):
        assert u.get_unit(make(b_init=bias)(x)) == u.mA
    with pytest.raises(EtpUnitError, match='bias has unit mV, expected a unit like mA'):
        make(b_init=VOLTAGES)(x)


def test_units_go_through_the_layers_without_a_bias():
    x = jnp.ones((2, 3)) * u.mV
    assert u.get_unit(nn.SignedWLinear(3, 5, CONDUCTANCES, -1)(x)) == u.mA
    assert u.get_unit(nn.LoRA(3, 2, 5, kernel_init=CONDUCTANCES)(x)) == u.mA
    assert u.get_unit(nn.Embedding(4, 3, VOLTAGES, padding_idx=0)(jnp.array([[1, 2]]))) == u.mV


# what is refused ----------------------------------------------------------------------------------

ones = jnp.ones
REFUSED = {
    'sizes that differ': (
        lambda: nn.Linear((6, 3), (5, 4)),
        r'OptionError: Linear: in_size is \(6, 3\) and out_size \(5, 4\); .*out_size=\(6, 4\)',
    ),
    'one size alone': (lambda: nn.SignedWLinear(3, (6, 4)), r'in_size is 3 and out_size \(6, 4\)'),
    'no size': (lambda: nn.Linear(None, 4), 'OptionError: .*number of features'),
    'a size of zero': (lambda: nn.Linear((3, 0), 4), r'OptionError: Linear: in_size is \(3, 0\)'),
    'a mask': (lambda: nn.Linear(3, 4, w_mask=ones((3, 3))), r'w_mask has shape \(3, 3\)'),
    'a weight': (lambda: nn.Linear(3, 4, w_init=ones(4)), r'w_init has shape \(4,\), expected'),
    'a name for a weight': (lambda: nn.Linear(3, 4, w_init='zeros'), 'w_init is a str; give an'),
    'features': (lambda: nn.Linear(3, 4)(ones((2, 2, 4))), r'EtpShapeError: .*expected \(..., 3\)'),
    'one input': (lambda: nn.ScaledWSLinear((4, 1), (4, 2)), 'at least 2 inputs'),
    'no eps': (lambda: nn.ScaledWSLinear(3, 2, eps=0), 'OptionError: ScaledWSLinear: eps is 0'),
    'a dense matrix': (lambda: nn.SparseLinear(np.ones((3, 5))), 'EtpDtypeError: .*fromdense'),
    'places alone': (
        lambda: nn.SparseLinear(braintrace.SparseStructure(*PLACES, (3, 5))),
        'EtpDtypeError: SparseLinear: the data of spar_mat, a SparseStructure',
    ),
    'integers': (lambda: nn.SparseLinear(sparse([1, 2, 3])), 'have dtype int32'),
    'a sparse size': (lambda: nn.SparseLinear(sparse(), in_size=(3, 4)), 'reads 3 features'),
    'sparse features': (lambda: nn.SparseLinear(sparse())(ones(5)), r'expected \(..., 3\)'),
    'a rank': (lambda: nn.LoRA(3, 0, 4), 'OptionError: LoRA: lora_rank is 0'),
    'a size of LoRA': (lambda: nn.LoRA(3, 2, 4, in_size=(2, 4)), r'\(2, 4\) and in_features 3'),
    'no module': (lambda: nn.LoRA(3, 2, 4, base_module=jnp.sin), 'base_module is a'),
    'a base of another size': (
        lambda: nn.LoRA(3, 2, 4, base_module=nn.Linear(3, 1))(ones(3)),
        r'EtpShapeError: LoRA: base_module gives shape \(1,\) and the product \(4,\)',
    ),
    'a base of another unit': (
        lambda: nn.LoRA(3, 2, 4, base_module=nn.Linear(3, 4, b_init=None), lora_b_init=VOLTAGES)(
            ones(3)
        ),
        'EtpUnitError: LoRA: base_module gives unit 1 and the product mV',
    ),
    'groups': (lambda: nn.GroupedLinear(2.0, 3, 4), 'num_groups is 2.0'),
    'grouped features': (lambda: nn.GroupedLinear(2, 3, 4)(ones(6)), r'expected \(..., 2, 3\)'),
    'no row': (lambda: nn.Embedding(6, 3, padding_idx=6), 'give a row from 0 to 5'),
    'a word for a table': (lambda: nn.Embedding(6, 3, freeze='no'), "freeze is 'no'; give True"),
    'a norm': (lambda: nn.Embedding(6, 3, max_norm=1.0), 'no argument max_norm. Leave it out'),
    'a scale': (lambda: nn.Embedding(6, 3, scale_grad_by_freq=True), 'scale_grad_by_freq'),
    'no integers': (lambda: nn.Embedding(6, 3)(ones(2)), 'EtpDtypeError: .*float32; give integers'),
    'no array': (lambda: nn.Embedding(6, 3)([1, 2]), 'EtpDtypeError: .*is a list'),
    'an index': (lambda: nn.Embedding(6, 3)(jnp.array(6)), 'EtpShapeError: .*rows 0 to 5'),
    'a rank of images': (lambda: nn.Conv2d((8, 3), 4, 3), r'3 sizes in the order \(\*spatial'),
    'channels in groups': (lambda: nn.Conv1d((8, 3), 4, 3, groups=2), '3 input channels do not'),
    'results in groups': (lambda: nn.Conv1d((8, 4), 3, 3, groups=2), '3 output channels do not'),
    'a kernel': (lambda: nn.Conv1d((8, 3), 4, (3, 3)), r'kernel_size is \(3, 3\)'),
    'a word for a switch': (
        lambda: nn.Conv1d((8, 3), 4, 3, channel_first='no'),
        "OptionError: Conv1d: channel_first is 'no'; give True or False",
    ),
    'a stride': (lambda: nn.Conv2d((8, 8, 3), 4, 3, stride=0), 'stride is 0; give an int'),
    'a padding': (lambda: nn.Conv2d((8, 8, 3), 4, 3, padding=(1, 2, 3)), 'padding is'),
    'a name of a padding': (lambda: nn.Conv1d((8, 3), 4, 3, padding='FULL'), "padding is 'FULL'"),
    'a name and a dilation': (
        lambda: nn.Conv1d((8, 3), 4, 3, lhs_dilation=2),
        r"OptionError: .*'SAME' and lhs_dilation \(2,\); .*give 1 pair",
    ),
    'an empty result': (
        lambda: nn.Conv1d((2, 3), 4, 3, padding='VALID'),
        r'OptionError: Conv1d: in_size \(2, 3\) gives a result of shape \(0, 4\)',
    ),
    'an image': (
        lambda: nn.Conv1d((8, 3), 4, 3)(ones((9, 3))),
        r'EtpShapeError: Conv1d: .*\(9, 3\); expected \(8, 3\) or \(batch, 8, 3\)',
    ),
}


@pytest.mark.tier(quick=24)
@pytest.mark.parametrize('name', REFUSED)
def test_it_is_refused_with_what_was_found(name):
    call, words = REFUSED[name]
    with pytest.raises(BraintraceError) as error:
        call()
    text = f'{type(error.value).__name__}: {error.value}'
    assert re.search(words, text), text


def test_a_learner_holds_the_places_of_a_sparse_layer_without_a_copy():
    class Network(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.SparseLinear(sparse(kind='CSR'))
            self.units = nn.LIF(5)

        def update(self, x):
            return self.units(self.layer(x))

    model = Network()
    learner = braintrace.compile(model, 'ES_D_RTRL', jnp.ones(3), decay_or_rank=0.9)
    places = jax.tree.leaves(model.layer.structure)
    held = learner.structure.value
    assert held and all(any(own is place for place in places) for own in held)


def test_a_sparse_layer_can_be_made_inside_of_jit():
    matrix = sparse(kind='CSR')
    y = jax.jit(lambda x: nn.SparseLinear(matrix)(x))(jnp.array([1.0, 10.0, 100.0]))
    assert y.tolist() == [0.0, 1.0, 0.0, 300.0, 2.0]
