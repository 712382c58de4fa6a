"""Plain parameters of a sequence: whatever they are used in, the sum over a window is that of
reverse mode through the whole sequence.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import rules
from tests import oracles
from tests.gradients.harness import learn
from tests.precision import float64 as float64
from tests.tiers import first, in_turn

T, B, N = 5, 3, 16
RNG = np.random.default_rng(3)
MASK = RNG.integers(0, 2, (N, N))


def uses(h, v, x):
    """Ways to read a plain ``(N, N)`` matrix; each gives ``(B, N)``."""
    return {
        'product': lambda: h @ v,
        'transposed': lambda: h @ v.T,
        'twice': lambda: jnp.tanh(h @ v) @ v,
        'negated': lambda: h @ -v,
        'in jit': lambda: jax.jit(lambda a, w: jnp.tanh(a @ w))(h, v),
        'in two jits': lambda: jax.jit(lambda a, w: jax.jit(jnp.matmul)(a, w) ** 2)(h, v),
        'of an input': lambda: jnp.tanh(x @ v) * h,
        'einsum': lambda: jnp.einsum('bi,oi->bo', h, v),
        'heads': lambda: jnp.einsum(
            'bgi,gio->bgo', h.reshape(B, 4, 4), v.reshape(4, 4, 16)[:, :, :4]
        ).reshape(B, N),
        'reshaped': lambda: jnp.einsum('bgi,gio->bo', h.reshape(B, 4, 4), v.reshape(4, 4, 16)),
        'masked': lambda: h @ (v * MASK),
        'product and more': lambda: h @ v + v[0] * h + jnp.sum(v**2),
        'in a loop': lambda: jax.lax.scan(lambda a, _: (jnp.tanh(a @ v), None), h, None, 2)[0],
        'in a branch': lambda: jax.lax.cond(x[0, 0] > 0, lambda: h @ v, lambda: 2 * h @ v.T),
        'in a map': lambda: jax.vmap(lambda row: row @ v)(h),
        'in remat': lambda: jax.checkpoint(lambda a: jnp.sin(a @ v))(h),
        'of a vector': lambda: jnp.broadcast_to(h[0] @ v, (B, N)),
        'low precision': lambda: (h.astype(jnp.float32) @ v.astype(jnp.float32)).astype(h.dtype),
        'by a constant': lambda: jnp.ones((B, N)) @ v * h,
        'unused': lambda: h,
    }


def cell(matmul, use):
    def step(params, h, x):
        h = jnp.tanh(matmul(jnp.concatenate([x, h], -1), params['w']))
        return uses(h, params['v'], x)[use](), h

    return step


def loss(out, y):
    return jnp.mean((out - y) ** 2)


@pytest.mark.tier(quick=1)
@in_turn(
    first('einsum', 'in a branch', 'in a loop', 'product', 'unused'),
    use=sorted(uses(None, None, None)),
    window=[2, 1, None],
)
def test_a_plain_readout_has_the_gradient_of_reverse_mode(use, window):
    params = {'w': RNG.normal(size=(2 * N, N)) / 4, 'v': RNG.normal(size=(N, N)) / 4}
    data = np.zeros((B, N)), RNG.normal(size=(T, B, N)), RNG.normal(size=(T, B, N)), loss
    want = oracles.by_time(cell(jnp.matmul, use), params, *data)['v']
    got, _ = learn(cell(braintrace.matmul, use), rules.d_rtrl(), params, *data, window)
    size = (1e-6 if use == 'low precision' else 1e-12) * max(1, abs(want).max())
    np.testing.assert_allclose(got['v'], want, rtol=0, atol=size)
    assert use == 'unused' or abs(want).max() > 1e-3
