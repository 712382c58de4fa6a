"""Units and dtypes of ops made by the kit: mantissas are bound, units multiply, what has no unit
says so.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

from braintrace import kit
from braintrace.errors import EtpUnitError
from braintrace.kit import ETPPrimitiveSpec as Spec

from .bad import shapes

pytestmark = pytest.mark.usefixtures('registries_are_restored')
RNG = np.random.default_rng(0)
X, W, BIAS = (jnp.asarray(RNG.normal(size=s), jnp.float32) for s in ((4, 3), (3, 5), (5,)))


def spec(impl=lambda x, w: x @ w, **fields):
    return kit.new_etp_primitive(Spec('t_spec', impl, batched=True, **fields))


def affine():
    layout = {'weight': 1, 'bias': 2}
    return spec(lambda x, w, b: x @ w + b, trainable_invars_fn=lambda params: layout)


@pytest.mark.parametrize(
    'make',
    [
        lambda: kit.make_linear_op('t_linear', lambda x, w: x @ w),
        spec,
        lambda: kit.make_einsum_op('t_einsum', 'bi,io->bo'),
    ],
    ids=['linear', 'spec', 'einsum'],
)
@pytest.mark.parametrize('run', [lambda f: f, jax.jit], ids=['eager', 'jit'])
def test_units_multiply(make, run):
    y = run(make())(X * u.mV, W * u.nS)
    assert y.unit.has_same_dim(u.pA)
    np.testing.assert_allclose(y.to_decimal(u.pA), X @ W, rtol=1e-5)


def test_one_operand_with_a_unit_is_enough_and_a_ratio_of_units_is_a_number():
    op = spec()
    np.testing.assert_allclose(op(X * u.mV, W).to_decimal(u.mV), X @ W, rtol=1e-5)
    ratio = op(X * u.mV, W / u.volt)
    np.testing.assert_allclose(ratio, X @ W * 1e-3, rtol=1e-5)
    assert isinstance(ratio, jax.Array)


def test_a_bias_of_a_spec_takes_the_unit_of_the_product():
    op = affine()
    y = op(X * u.mV, W * u.nS, BIAS * u.nA)
    np.testing.assert_allclose(y.to_decimal(u.pA), X @ W + 1e3 * BIAS, rtol=1e-5)
    with pytest.raises(EtpUnitError, match='t_spec: bias has unit mV, expected a unit like'):
        op(X * u.mV, W * u.nS, BIAS * u.mV)
    with pytest.raises(EtpUnitError, match='t_spec: bias has unit'):
        op(X * u.mV, W * u.nS, BIAS)


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize(
    'make',
    [
        lambda name, fn: kit.new_etp_primitive(Spec(name, fn, batched=True)),
        kit.make_elementwise_op,
        kit.make_linear_op,
    ],
    ids=['spec', 'elementwise', 'linear'],
)
def test_an_operand_to_which_the_op_is_not_proportional_has_no_unit(make):
    op, w = make('t_curved', lambda x, w: x * jnp.tanh(w)), W[:, 0]
    np.testing.assert_allclose(op(X * u.mV, w).to_decimal(u.mV), X * jnp.tanh(w), rtol=1e-5)
    with pytest.raises(
        EtpUnitError, match='t_curved: operand 1 has unit mV, and the op is not proportional to it'
    ):
        op(X, w * u.mV)
    report = kit.check(op, [(shapes((4, 3), (3,)), {})])
    assert report.ok and report.status('L11') == 'pass', str(report)


def test_a_sum_of_operands_is_proportional_to_none():
    with pytest.raises(EtpUnitError, match='t_spec: operand 0 has unit mV'):
        spec(lambda x, w: x + w)(X * u.mV, BIAS[:3] * u.mV)


def test_every_result_of_several_has_the_unit():
    op = spec(lambda x, w: ((x @ w).sum(0), x @ w), y_outvar_index=1)
    total, y = op(X * u.mV, W * u.nS)
    np.testing.assert_allclose(total.to_decimal(u.pA), (X @ W).sum(0), rtol=1e-5)
    np.testing.assert_allclose(y.to_decimal(u.pA), X @ W, rtol=1e-5)


def test_gradients_pass_through_the_units():
    op = affine()
    loss = lambda w: (op(X * u.mV, w * u.nS, BIAS * u.pA).to_decimal(u.pA) ** 2).sum()
    want = jax.grad(lambda w: ((X @ w + BIAS) ** 2).sum())(W)
    np.testing.assert_allclose(jax.grad(loss)(W), want, rtol=1e-5)


def test_a_dtype_that_jax_refuses_is_asked_of_no_op():
    """An FFT has no bfloat16; an op that turns it into another dtype is still refused."""

    def circulant(x, w):
        return jnp.fft.irfft(jnp.fft.rfft(x) * jnp.fft.rfft(w), w.shape[-1])

    wide = lambda x, w: circulant(x.astype(jnp.float32), w.astype(jnp.float32))
    for name, fn, found in (('t_plain', circulant, 'pass'), ('t_wide', wide, 'fail')):
        op = kit.make_linear_op(name, fn, trace='effective')
        report = kit.check(op, [(shapes((4, 6), (6,)), {})])
        assert report.status('L11') == found and report.ok == (found == 'pass'), str(report)
