"""Runs the library on a case, or on a cell of plain JAX."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np

import braintrace
from braintrace import functional
from braintrace.errors import BraintraceWarning
from tests import oracles
from tests.compare import assert_close
from tests.models import squared
from tests.models.library import LibraryOps

MASK = np.array([1.0, 0.0, 0.5, 1.0, 2.0, 1.5])
FLAGS = np.zeros((6, 2), bool)
FLAGS[[2, 4], 0] = FLAGS[[1, 2], 1] = True
PROGRAMS = 500  # so many are kept, which is all that one file compiles


def learner_of(case, rule, unroll=None):
    """The one learner of a case; ``unroll``: turns of a loop to unroll, None: the default."""
    return _learner(case, rule, unroll)


@functools.cache
def _learner(case, rule, unroll):
    options = {} if unroll is None else {'policy': braintrace.Policy(unroll=unroll)}
    return functional.online(functools.partial(case.model.cell, LibraryOps()), rule, **options)


def start(case, rule, unroll=None):
    """A learner and its first state."""
    learner = learner_of(case, rule, unroll)
    return learner, learner.init(case.params, case.carry, case.xs[0])


def quick(fn):
    return jax.jit(fn, compiler_options=oracles.QUICK)


@functools.lru_cache(PROGRAMS)
def step_program(case, rule):
    """``learner.grad`` of a case, compiled once for all tests of a process that step through it."""
    return quick(learner_of(case, rule).grad(case.loss))


@functools.lru_cache(PROGRAMS)
def _sequence_program(case, rule, unroll, window, reduction):
    return quick(
        learner_of(case, rule, unroll).sequence_grad(case.loss, window=window, reduction=reduction)
    )


def over_sequence(
    case, rule, window=1, steps=slice(None), state=None, reduction='sum', unroll=None, **options
):
    """``(grads, state, losses)`` of ``sequence_grad`` over these steps, from ``state`` on."""
    first = start(case, rule, unroll)[1]
    run = _sequence_program(case, rule, unroll, window, reduction)
    return run(
        case.params, first if state is None else state, case.xs[steps], case.ys[steps], **options
    )


def by_steps(case, rule):
    """``(loss, output, grads)`` of every step, from ``learner.grad``."""
    state, step = start(case, rule)[1], step_program(case, rule)
    for x, y in zip(case.xs, case.ys, strict=True):
        grads, loss, output, state = step(case.params, state, x, y)
        yield loss, output, grads


def other_carry(case, seed=5):
    """Another carry of the same shapes, to reset to."""
    rng = np.random.default_rng(seed)
    return {k: 0.5 * rng.standard_normal(v.shape) for k, v in case.carry.items()}


def restarts(case):
    """``(flags, carry)``: the lanes of a case that start again, and where."""
    return FLAGS, other_carry(case)


def learn(cell, rule, params, carry, xs, ys, loss=squared, window=None, given=None, **options):
    """``(gradient, learner)`` of a sequence, by a learner that is made for it and warns of nothing;
    ``given``: a mask and resets.
    """
    learner = functional.online(cell, rule, **options)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', BraintraceWarning)
        state = learner.init(params, carry, jax.tree.map(lambda x: x[0], xs))
    run = quick(learner.sequence_grad(loss, window=window, reduction='sum'))
    return run(params, state, xs, ys, **(given or {}))[0], learner


def of_shapes(cell, rule, params, carry, x, **options):
    """``(learner, warnings)`` of a cell that is compiled for these shapes, and computes nothing."""
    learner = functional.online(cell, rule, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always', BraintraceWarning)
        jax.eval_shape(learner.init, params, carry, x)
    return learner, [str(each.message) for each in told]


def assert_exact(cell, rule, params, carry, xs, ys, loss=squared, window=None, **options):
    """The learner of a cell, whose gradient is that of reverse mode through all steps."""
    data = params, carry, xs, ys, loss
    got, learner = learn(cell, rule, *data, window, **options)
    assert_close(got, oracles.by_time(cell, *data))
    return learner


def updated_by_time(cell, params, carry, xs, ys, rate, loss=squared, every=1):
    """Parameters after the updates along a sequence, each by the gradient of reverse mode: that of
    the weights at all earlier steps, moved together.
    """
    length, nothing, used = len(xs), jax.tree.map(np.zeros_like, params), []

    def total(moved, of_step, counts):
        def step(c, at):
            p, x, y, count = at
            output, c = cell(jax.tree.map(jnp.add, p, moved), c, x)
            return c, count * loss(output, y)

        first = jax.tree.map(jnp.asarray, carry)
        return jax.lax.scan(step, first, (of_step, xs, ys, counts))[1].sum()

    gradient = quick(jax.grad(total))
    for start in range(0, length, every):
        used += [params] * every
        of_step = jax.tree.map(lambda *ps: np.stack(ps), *used, *[params] * (length - len(used)))
        counts = np.isin(np.arange(length), range(start, start + every)) * 1.0
        grads = gradient(nothing, of_step, counts)
        params = jax.tree.map(lambda p, g: np.asarray(p - rate * g), params, grads)
    return params


def learn_by_steps(learner, params, carry, xs, ys, loss=squared):
    """The sum of the gradients of single steps."""
    state, grad, found = learner.init(params, carry, xs[0]), quick(learner.grad(loss)), []
    for x, y in zip(xs, ys, strict=True):
        grads, _, _, state = grad(params, state, x, y)
        found.append(grads)
    no_numbers = jax.dtypes.float0  # the gradient of an integer
    return jax.tree.map(lambda *g: g[0] if g[0].dtype == no_numbers else sum(g), *found)
