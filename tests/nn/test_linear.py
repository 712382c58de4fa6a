"""The dense layer."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import nn


@pytest.mark.parametrize('shape', [(3,), (2, 3), (0, 3), (2, 5, 3), (2, 1, 4, 3)])
def test_it_is_the_affine_map(shape):
    layer = nn.Linear(3, 4, b_init=brainstate.nn.init.Normal(scale=1.0))
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    value = jax.tree.map(np.asarray, layer.weight.value)
    np.testing.assert_allclose(
        layer(jnp.asarray(x)), x @ value['weight'] + value['bias'], rtol=0, atol=1e-6
    )


def test_its_weight_is_applied_by_an_etp_op():
    layer = nn.Linear(3, 4)
    for x, op in [(jnp.ones(3), 'etp_mv'), (jnp.ones((2, 3)), 'etp_mm')]:
        assert op in str(jax.make_jaxpr(layer)(x))


def test_a_mask_silences_weights_and_their_gradients():
    mask = np.zeros((3, 4), np.float32)
    mask[0] = 1
    layer = nn.Linear(3, 4, w_mask=mask, b_init=None)
    x = jnp.arange(1.0, 4.0)
    np.testing.assert_allclose(layer(x), np.asarray(layer.weight.value['weight'])[0], rtol=1e-6)
    grads = brainstate.transform.grad(lambda: layer(x).sum(), layer.states(brainstate.ParamState))()
    np.testing.assert_array_equal(grads[('weight',)]['weight'], mask)


def test_units_go_through():
    layer = nn.Linear(
        3, 4, w_init=brainstate.nn.init.Normal(scale=1.0, unit=u.siemens), b_init=None
    )
    assert u.get_unit(layer(jnp.ones(3) * u.mV)).dim == u.ampere.dim


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


@pytest.mark.parametrize('x', [jnp.ones(2), jnp.ones((2, 2, 4)), jnp.asarray(1.0)])
def test_a_wrong_shape_is_refused(x):
    with pytest.raises(braintrace.errors.EtpShapeError, match=r'expected \(\.\.\., 3\)'):
        nn.Linear(3, 4)(x)


@pytest.mark.parametrize('size', [0, (2, 0), (), None])
def test_a_wrong_size_is_refused(size):
    with pytest.raises(braintrace.errors.OptionError, match='number of features'):
        nn.Linear(size, 4)


def test_the_leading_sizes_of_both_sides_are_the_same():
    layer = nn.Linear((64, 3), (64, 4))
    assert (layer.in_size, layer.out_size) == ((64, 3), (64, 4))
    assert nn.Linear((3,), 4).in_size == (3,)
    with pytest.raises(braintrace.errors.OptionError, match=r'\(64, 3\) and out_size \(32, 4\)'):
        nn.Linear((64, 3), (32, 4))
