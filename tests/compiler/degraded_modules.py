"""Modules of brainstate that are refused or degraded, a row each as in ``degraded.py``."""

import brainstate
import jax.numpy as jnp

import braintrace
from tests.compiler.degraded import fixed, mixing, no_relation, not_etp_op, routes_of
from tests.compiler.refused import COMPILE, PARAMS, H, N, Note, Row

MODULES: list[Row] = []


def module(*notes: Note, **options):
    """Add a module to the table; ``error`` and ``words`` where it is refused."""

    def register(cls):
        routes = {'routes': routes_of(notes)}
        MODULES.append(Row(cls.__name__, cls, {}, cls, notes=notes, **routes | options))
        return cls

    return register


class Leaky(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = brainstate.ParamState(jnp.asarray(PARAMS['w']))
        self.part = self.make_part()

    def make_part(self):
        return None

    def init_state(self, batch_size=None, **_):
        self.h = brainstate.HiddenState(jnp.asarray(H))

    def drive(self, x):
        return braintrace.matmul(x, self.w.value)


@module(
    mixing('reduce_sum, spread by'),
    *(not_etp_op(f'part/weight/{name}') for name in ('scale', 'bias')),
)
class LayerNorm(Leaky):
    def make_part(self):
        return brainstate.nn.LayerNorm((N,))

    def update(self, x):
        self.h.value = self.part(self.h.value) + self.drive(x)  # here
        return self.h.value


@module(
    Note('lost-relation', 'warning', ('parameter w', 'd', 'ShortTermState'), 'w'),
    no_relation(),
    routes={'w': 'not_hidden'},
    fails=dict.fromkeys(
        ('record', 'strict'),
        'the gradient is zero, without a record of the state that is not hidden',
    ),
)
class DelayLine(Leaky):
    def init_state(self, batch_size=None, **_):
        super().init_state()
        self.d = brainstate.ShortTermState(jnp.asarray(H))

    def update(self, x):
        self.h.value = 0.8 * self.h.value + self.d.value
        self.d.value = self.drive(x)  # here
        return self.h.value


@module(fixed(), fixed('state part', path='part'))
class WeightsThatAreNoParameters(Leaky):
    def make_part(self):
        return brainstate.LongTermState(jnp.asarray(PARAMS['u']))

    def update(self, x):
        drives = [braintrace.matmul(x, w) for w in (PARAMS['u'], self.part.value)]  # here
        self.h.value = 0.8 * self.h.value + self.drive(x) + sum(drives)
        return self.h.value


@module(error=COMPILE, words=("writes the parameters ['w']", 'brainstate.ShortTermState'), at=None)
class WritingParameters(Leaky):
    def update(self, x):
        self.h.value = 0.8 * self.h.value + self.drive(x)
        self.w.value = 0.9 * self.w.value
        return self.h.value
