"""The gradient of a convolution by groups of samples, as devices that share them compute it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace._etrace_op import etp_conv_p
from tests.compare import assert_close

CASES = {
    'plain': ((6, 3, 9), (4, 3, 3), dict(strides=(1,), padding='SAME')),
    'strided': ((6, 4, 9), (6, 2, 3), dict(strides=(2,), padding='VALID', feature_group_count=2)),
    'dilated': (
        (6, 2, 7, 5),
        (4, 2, 3, 2),
        dict(strides=(1, 2), padding=((2, 1), (0, 3)), lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
    ),
    'channels last': (
        (6, 7, 5, 4),
        (3, 2, 2, 6),
        dict(
            strides=(2, 1),
            padding='SAME_LOWER',
            feature_group_count=2,
            dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
        ),
    ),
}


@pytest.mark.parametrize('number', [2, 3])
@pytest.mark.parametrize('name', CASES)
def test_each_group_has_the_gradient_of_its_samples(name, number):
    of_x, of_kernel, options = CASES[name]
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x, kernel = (jnp.asarray(rng.standard_normal(s)) for s in (of_x, of_kernel))

        def reference(kernel, x):
            given = {'window_strides': options['strides']}
            given |= {k: v for k, v in options.items() if k != 'strides'}
            return jax.lax.conv_general_dilated(x, kernel, **given)

        y = reference(kernel, x)
        d = jnp.asarray(rng.standard_normal(y.shape))
        got = etp_conv_p.gradient_by_group(
            number, x, d, {'weight': kernel, 'bias': jnp.zeros(1)}, has_bias=True, **options
        )
        features = (options.get('dimension_numbers') or ('', '', 'NC'))[2].index('C')
        for k in range(number):
            part = slice(k * 6 // number, (k + 1) * 6 // number)
            pull = jax.vjp(lambda w, part=part: reference(w, x[part]), kernel)[1]
            want = d[part].sum(tuple(a for a in range(d.ndim) if a != features))
            assert_close(got['weight'][k], pull(d[part])[0], 1e-12)
            assert_close(got['bias'][k], want, 1e-12)
