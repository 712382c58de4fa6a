"""The rules, each with its formula in NumPy: ``(case, resets) -> gradients of each step``."""

import functools

import numpy as np

from braintrace.rules import d_rtrl, es_d_rtrl, rtrl, signs, snap, uoro
from tests import models, oracles
from tests.gradients import random_traces
from tests.gradients.harness import restarts
from tests.late import LATE
from tests.oracles import dense_recursion, es_recursion
from tests.scoped_oracles import reach, scoped_recursion

SEED = 3


def by(oracle, **options):
    """The formula of an oracle, which knows no resets."""

    def steps(case, resets=None):
        each = functools.partial(oracle, **options)
        return each(case) if resets is None else oracles.restarted(each, case, *resets)

    return steps


TRACES = {  # of rules with random signs
    'signs': random_traces.signs,
    'signs_all': functools.partial(random_traces.signs, scope='all'),
    'uoro': random_traces.uoro,
    'uoro_batch': functools.partial(random_traces.uoro, pair='batch'),
}


def drawn(rule):
    """The same of a rule with random signs."""
    return lambda case, resets=None: TRACES[rule](case, SEED, resets=resets).steps


@functools.cache
def of_two_steps(case):
    return scoped_recursion(case, reach(case, 2))


RULES = {
    'd_rtrl': (d_rtrl(), by(dense_recursion)),
    'pending': (LATE, by(dense_recursion)),
    'whole': (d_rtrl(credit='whole'), by(dense_recursion, credit='whole')),
    'own': (d_rtrl(scope='own'), by(dense_recursion, own=True)),
    'own whole': (
        d_rtrl(scope='own', credit='whole'),
        by(dense_recursion, credit='whole', own=True),
    ),
    'es_d_rtrl': (es_d_rtrl(0.8), by(es_recursion, decay=0.8)),
    'no decay': (es_d_rtrl(0.0), by(es_recursion, decay=0.0)),
    'two decays': (es_d_rtrl((0.9, 0.4)), by(es_recursion, decay=(0.9, 0.4))),
    'input decay': (es_d_rtrl((0.8, 0.0)), by(es_recursion, decay=(0.8, 0.0))),
    'snap': (snap(2), by(of_two_steps)),
    'rtrl': (rtrl(), by(scoped_recursion)),
    'signs': (signs(seed=SEED), drawn('signs')),
    'signs_all': (signs('all', SEED), drawn('signs_all')),
    'uoro': (uoro(seed=SEED), drawn('uoro')),
    'uoro_batch': (uoro('batch', SEED), drawn('uoro_batch')),
}
RANDOM = tuple(TRACES)


@functools.cache
def formula(name, rule, reset=False):
    case = models.case(name)
    return RULES[rule][1](case, restarts(case) if reset else None)


@functools.cache
def forward(name):
    """``(outputs, losses, last carry)`` of the plain model."""
    case, found = models.case(name), []
    carry = case.carry
    for x, y in zip(case.xs, case.ys, strict=True):
        output, carry = oracles.real(case.run(models.ops.NumpyOps(), case.params, carry, x))
        found.append((output, case.loss(output, y)))
    return *map(np.stack, zip(*found, strict=True)), carry


# Wide rules, each on models in which it has entries of its own.
SCOPED = [('conv1d', 'snap'), ('gru', 'rtrl'), ('sparse', 'snap'), ('lora', 'rtrl')]
SCOPED += [('learned_decay', 'rtrl')]
