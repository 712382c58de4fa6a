"""What depends on what by structure, against derivatives where these are not zero by chance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from braintrace.extra._wide.dependence import Linear

MASK = np.triu(np.ones((4, 4)))
ONE = jax.ShapeDtypeStruct((4,), np.float32)
MATRIX = jax.ShapeDtypeStruct((4, 4), np.float32)


def scanned(w, v):
    def turn(v, x):
        return jnp.roll(v, 1) * x, v.sum()

    return lax.scan(turn, v, w[:2])


def barrier(w, v):
    w, v = lax.optimization_barrier((w, v))
    return w[0] * v


FUNCTIONS = {
    # name -> (a function of unknown numbers w, linear in v; what each result reads)
    'mask': (lambda w, v: (w * MASK) @ v, MASK),
    'stopped': (lambda w, v: lax.stop_gradient(w * MASK) @ v, MASK),
    'function_of_mask': (lambda w, v: jnp.tanh(w * MASK).T @ v, MASK.T),
    'no_cancellation': (lambda w, v: w[0] * v - w[0] * v[::-1], np.eye(4) + np.eye(4)[::-1]),
    'chosen': (lambda w, v: jnp.where(jnp.arange(4) < 2, v, 0), np.diag([1, 1, 0, 0])),
    'chosen_when_it_runs': (
        lambda w, v: jnp.where(w[0] > 0, v, v[::-1]),
        np.eye(4) + np.eye(4)[::-1],
    ),
    'slice_somewhere': (
        lambda w, v: lax.dynamic_slice(v, (w[0, 0].astype(int),), (2,)),
        np.ones((2, 4)),
    ),
    'put_somewhere': (
        lambda w, v: lax.dynamic_update_slice(jnp.zeros(4), v[:1], (w[0, 0].astype(int),)),
        np.eye(4)[[0, 0, 0, 0]],
    ),
    'indices': (lambda w, v: v[np.array([2, 0])], np.eye(4)[[2, 0]]),
    'branches': (
        lambda w, v: lax.cond(w[0, 0] > 0, lambda v: v[:2], lambda v: 0 * v[2:], v),
        np.eye(4)[:2],
    ),
    'loop': (lambda w, v: scanned(w, v)[0], np.roll(np.eye(4), 2, 0)),
    'barrier': (barrier, np.eye(4)),
    'recomputed': (lambda w, v: jax.checkpoint(lambda v: (w * MASK) @ v)(v), MASK),
    'unknown': (lambda w, v: jnp.fft.fft(v * w[0]).real, np.ones((4, 4))),
    'zero': (lambda w, v: jnp.zeros(3), np.zeros((3, 4))),
}


@pytest.mark.parametrize('name', FUNCTIONS)
def test_a_result_reads_what_a_path_leads_from(name):
    fn, want = FUNCTIONS[name]
    linear = Linear(lambda w, v: [fn(w, v)], [MATRIX], [ONE])
    (found,) = linear.depends([np.eye(4)])
    np.testing.assert_array_equal(found.T, want > 0)
