"""A compiled step costs what one costs that an expert writes by hand."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import _jax, functional
from tests import xla
from tests.compare import assert_close

from .plain import D_RTRL, cell, loss

B, I, N = 8, 24, 32  # noqa: E741
pytestmark = pytest.mark.skipif(jax.default_backend() != 'cpu', reason='counted by another backend')


def setting():
    rng = np.random.default_rng(0)
    shapes = {'w': (I + N, N), 'b': (N,), 'out': (N, 2)}
    p = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}
    h, x, y = (jnp.asarray(rng.normal(size=(B, n)), jnp.float32) for n in (N, I, 2))
    return p, h, x, y


def by_hand(p, state, x, y):
    """The step, the gradient and the new trace of D-RTRL for ``plain.cell``."""
    h, (of_w, of_b), t = state
    z = jnp.concatenate([x, h], -1)
    a = jnp.tanh(z @ p['w'] + p['b'])
    new = 0.6 * h + a
    out = new @ p['out']
    d_out, df = 2 * (out - y), 1 - a**2
    dh = d_out @ p['out'].T
    old, dy = 0.6 * dh, dh * df
    grads = {
        'w': z.T @ dy + jnp.einsum('bo,bio->io', old, of_w),
        'b': dy.sum(0) + (old * of_b).sum(0),
        'out': new.T @ d_out,
    }
    trace = 0.6 * of_w + z[:, :, None] * df[:, None, :], 0.6 * of_b + df
    return (loss(out, y), out), grads, (new, trace, t + 1)


class Cost(NamedTuple):
    flops: float
    bytes: float
    aliased: int

    @classmethod
    def of(cls, fn, *args):
        """Of a program as users have it, with the state (its second argument) given away."""
        jitted = jax.jit(fn, donate_argnums=1, compiler_options=xla.AS_USERS_HAVE_IT)
        compiled = jitted.lower(*args).compile()
        found, memory = compiled.cost_analysis(), compiled.memory_analysis()
        return cls(found['flops'], found['bytes accessed'], memory.alias_size_in_bytes)


def empty(h):
    trace = jnp.zeros((B, I + N, N), jnp.float32), jnp.zeros((B, N), jnp.float32)
    return h, trace, jnp.zeros(B, jnp.int32)


def started(rule):
    p, h, x, y = setting()
    learner = functional.online(cell, rule)
    return learner, (p, learner.init(p, h, x), x, y), (p, empty(h), x, y)


def test_acting_costs_what_the_cell_costs():
    learner, (p, state, x, _), _ = started(None)
    own, plain = Cost.of(learner.step, p, state, x), Cost.of(cell, p, state.carry, x)
    assert own.flops <= 1.01 * plain.flops and own.bytes <= 1.01 * plain.bytes


@pytest.mark.slow
def test_a_step_moves_the_bytes_of_one_written_by_hand_and_copies_no_trace():
    learner, (p, state, x, y), (_, other, _, _) = started(D_RTRL)
    own = Cost.of(learner.step, p, state, x)
    plain = Cost.of(lambda p, s, x: by_hand(p, s, x, y)[::2], p, other, x)
    assert own.bytes <= 1.02 * plain.bytes and own.flops <= 1.3 * plain.flops
    assert own.aliased >= learner.memory().total  # the new state is written into the old one


@pytest.mark.slow
def test_a_gradient_costs_what_one_written_by_hand_costs():
    learner, given, by_formula = started(D_RTRL)
    own, plain = Cost.of(learner.grad(loss), *given), Cost.of(by_hand, *by_formula)
    assert own.bytes <= 1.02 * plain.bytes and own.flops <= 1.3 * plain.flops
    assert own.aliased >= learner.memory().total


@pytest.mark.slow
def test_what_is_written_by_hand_is_the_same():
    learner, (p, state, x, y), (_, other, _, _) = started(D_RTRL)
    step = jax.jit(learner.grad(loss))
    for k in range(3):
        grads, value, _, state = step(p, state, x * k, y)
        (wanted, _), by_formula, other = by_hand(p, other, x * k, y)
        assert_close((value, grads), (wanted, by_formula), 1e-5)


def equations(jaxpr) -> int:
    """The equations of a jaxpr and of all inside of it."""
    inner = (i for eqn in jaxpr.eqns for i in _jax.sub_jaxprs(eqn.params))
    return len(jaxpr.eqns) + sum(map(equations, inner))


def test_many_windows_are_one_program():
    learner, (p, state, x, y), _ = started(D_RTRL)

    def gradient(steps, **options):
        xs, ys = (jnp.stack([a * k for k in range(1, steps + 1)]) for a in (x, y))
        return learner.sequence_grad(loss, **options), (p, state, xs, ys)

    def traced(steps, **options):
        run, args = gradient(steps, window=3, **options)
        return equations(jax.make_jaxpr(run)(*args).jaxpr)

    one, several = traced(3), traced(12)
    assert several < 1.1 * one, (one, several)
    two, four = (traced(steps, keep_trace=False) for steps in (6, 12))
    assert four < 0.7 * two, (two, four)
    runs = [gradient(12, window=window, keep_trace=False) for window in (3, None)]
    assert_close(*(jax.jit(run)(*args)[0] for run, args in runs), 1e-5)


def test_a_step_outside_of_jit_is_one_program():
    p, h, x, _ = setting()
    learner = functional.online(cell, D_RTRL)
    step = jax.make_jaxpr(learner.step)(p, learner.init(p, h, x), x)
    assert [eqn.primitive.name for eqn in step.eqns] in (['jit'], ['pjit'])
