"""What depends on what by structure, against derivatives where these are not zero by chance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import rules
from braintrace.extra._wide.dependence import Linear, Numbers, dependence
from braintrace.extra._wide.scopes import coloured
from tests import models
from tests.gradients.harness import learner_of

MASK = np.triu(np.ones((4, 4)))
ONE = jax.ShapeDtypeStruct((4,), np.float32)
MATRIX = jax.ShapeDtypeStruct((4, 4), np.float32)


def scanned(w, v):
    def turn(v, x):
        return jnp.roll(v, 1) * x, v.sum()

    return jax.lax.scan(turn, v, w[:2])


def barrier(w, v):
    w, v = jax.lax.optimization_barrier((w, v))
    return w[0] * v


FUNCTIONS = {
    # name -> (a function of unknown numbers w, linear in v; what each result reads)
    'mask': (lambda w, v: (w * MASK) @ v, MASK),
    'stopped': (lambda w, v: jax.lax.stop_gradient(w * MASK) @ v, MASK),
    'function_of_mask': (lambda w, v: jnp.tanh(w * MASK).T @ v, MASK.T),
    'no_cancellation': (lambda w, v: w[0] * v - w[0] * v[::-1], np.eye(4) + np.eye(4)[::-1]),
    'chosen': (lambda w, v: jnp.where(jnp.arange(4) < 2, v, 0), np.diag([1, 1, 0, 0])),
    'chosen_when_it_runs': (
        lambda w, v: jnp.where(w[0] > 0, v, v[::-1]),
        np.eye(4) + np.eye(4)[::-1],
    ),
    'slice_somewhere': (
        lambda w, v: jax.lax.dynamic_slice(v, (w[0, 0].astype(int),), (2,)),
        np.ones((2, 4)),
    ),
    'put_somewhere': (
        lambda w, v: jax.lax.dynamic_update_slice(jnp.zeros(4), v[:1], (w[0, 0].astype(int),)),
        np.eye(4)[[0, 0, 0, 0]],
    ),
    'indices': (lambda w, v: v[np.array([2, 0])], np.eye(4)[[2, 0]]),
    'branches': (
        lambda w, v: jax.lax.cond(w[0, 0] > 0, lambda v: v[:2], lambda v: 0 * v[2:], v),
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


def by_colours_and_by_rows(case, missing=()):
    """J of the first lane by the colours of the step, and by a pull-back for each number; some
    entries of the pattern are left out.
    """
    learner = learner_of(case, rules.rtrl())
    learner.init(case.params, case.carry, case.xs[0])
    compiled, params = learner.first, jax.tree.leaves(case.params)
    found = dependence(compiled.graph)
    for entry in missing:
        found.reads[entry] = False
    colours = coloured((found.reads, found.reads), (found.feeds, found.feeds), found.laned)
    carry, x = jax.tree.leaves(dict(case.carry)), jax.tree.leaves(case.xs[0])
    executor = compiled.executor
    uncut, numbers = (
        executor.uncut(params, executor.op_weights(params), carry, x),
        Numbers.of(compiled.graph),
    )

    def rows(ones):
        old, _ = jax.vmap(uncut.pull)([jnp.asarray(u) for u in numbers.split(ones)])
        return np.asarray(numbers.joined(old))[:, 0]

    one_each = rows(np.eye(len(colours)))
    together = rows(np.eye(colours.max() + 1)[:, colours])[colours]
    return np.where(found.reads, together, 0), one_each, found, colours


@pytest.mark.slow
def test_colours_give_the_dense_derivative_and_a_missing_entry_is_seen():
    case = models.case('conv1d')
    got, want, found, colours = by_colours_and_by_rows(case)
    assert colours.max() + 1 < len(colours) and not found.reads.all()
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(found.reads, want != 0)
    gone = tuple(np.argwhere(found.reads)[3])
    got, want, _, _ = by_colours_and_by_rows(case, [gone])
    assert abs(got - want).max() > 1e-3
