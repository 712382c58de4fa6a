"""Runs the library on a case."""

import functools

import jax
import numpy as np
import pytest

import braintrace
from braintrace import functional
from tests import oracles
from tests.gradients.rows import crossed
from tests.models.library import LibraryOps

PROGRAMS = 500  # so many are kept, which is all that one file compiles


def ragged(names, *others):
    """Of six steps: each row with a full window and a rest, and with one of the others in turn.

    Of the others, each second round is at night.
    """
    marks = [pytest.mark.slow, pytest.mark.nightly]
    return pytest.mark.parametrize(
        'name, window',
        [
            *[(n, 4) for n in names],
            *[
                pytest.param(*row, marks=marks[i // len(others) % 2])
                for i, row in enumerate(crossed(names, others))
            ],
        ],
    )


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
