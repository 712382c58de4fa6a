"""The rows of the leaderboard: ways to a gradient, each with its optimiser."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from nets import TAU_OUT

from braintrace import rules
from braintrace.functional import Gradient

GRU, SMALL, SPIKING, SPARSE = 'GRU 64', 'GRU 16', 'LIF + ALIF 100', 'sparse 32'
OPTIMIZERS = {
    'Adam': optax.adam,
    'RMSprop': lambda rate: optax.rmsprop(rate, decay=0.99),
    'SGD': lambda rate: optax.sgd(SGD_FACTOR * rate),
}
SGD_FACTOR = 30  # SGD takes larger rates: its steps are not divided by the gradient's size


class Method(NamedTuple):
    """A row: ``rule`` makes a value of :mod:`braintrace.rules`; None: reverse mode through
    ``cut`` steps at a time, all if that is None.

    ``window``: exact windows of that many steps over the rule. ``leaky``: the readout of the
    spiking net is filtered behind its weights. ``nets``: only there, by default on all.
    """

    name: str
    rule: Callable | None = None
    optimizer: str = 'Adam'
    cut: int | None = None
    window: int | None = None
    leaky: bool = False
    nets: tuple = ()


def e_prop(feedback: str) -> Callable:
    return lambda: rules.e_prop(math.exp(-1 / TAU_OUT), feedback)


BPTT = 'BPTT'
METHODS = (
    Method(BPTT),
    Method('truncated BPTT, 8', cut=8),
    Method('truncated BPTT, 32', cut=32),
    *(
        Method(f'same step, {optimizer}', lambda: rules.same_step(), optimizer)
        for optimizer in ('SGD', 'RMSprop', 'Adam')
    ),
    Method('D_RTRL', lambda: rules.d_rtrl()),
    Method('D_RTRL, whole credit', lambda: rules.d_rtrl(credit='whole')),
    Method('SnAp-1', lambda: rules.snap(1)),
    Method('SnAp-2', lambda: rules.snap(2), nets=(SPARSE,)),
    Method('RTRL', lambda: rules.rtrl(), nets=(SMALL,)),
    Method('ES_D_RTRL 0.5', lambda: rules.es_d_rtrl(0.5)),
    Method('ES_D_RTRL 0.9', lambda: rules.es_d_rtrl(0.9)),
    Method('signs', lambda: rules.signs()),
    Method('UORO', lambda: rules.uoro(), nets=(GRU, SMALL, SPIKING)),
    *(
        Method(name, e_prop(feedback), leaky=True, nets=(SPIKING,))
        for name, feedback in (('e-prop', 'symmetric'), ('e-prop, random feedback', 'random'))
    ),
    Method('exact windows of 8', lambda: rules.d_rtrl(), window=8),
    Method('exact windows of 16', lambda: rules.d_rtrl(), window=16),
)
NAMED = {method.name: method for method in METHODS}


def applies(method: Method, net: str, steps: int) -> bool:
    """Whether the row belongs to a net, and its windows are shorter than the whole sequence."""
    longest = max(method.cut or 0, method.window or 0)
    return (not method.nets or net in method.nets) and longest < steps


def gradient(method: Method, online, loss: Callable, keep_trace: bool = False) -> Callable:
    """``(params, state, xs, ys, mask) -> Gradient`` over a sequence."""
    if method.rule is None:
        return reverse(online.cell, loss, method.cut)
    if method.window:  # their trace is read at the borders, so it is kept
        return online.sequence_grad(loss, window=method.window, inside='exact', keep_trace=True)
    return online.sequence_grad(loss, keep_trace=keep_trace)


def reverse(cell: Callable, loss: Callable, cut: int | None) -> Callable:
    """Reverse mode of the whole loop; with ``cut`` no gradient passes a border of ``cut`` steps."""

    def run(params, state, xs, ys, mask):
        def total(params):
            def step(carry, at):
                t, x, y = at
                if cut and cut < len(xs):
                    carry = jax.tree.map(
                        lambda c: jnp.where(t % cut == 0, jax.lax.stop_gradient(c), c), carry
                    )
                outputs, carry = cell(params, carry, x)
                return carry, loss(outputs, y)

            carry, losses = jax.lax.scan(step, state.carry, (jnp.arange(len(xs)), xs, ys))
            return jnp.average(losses, weights=mask), (losses, carry)

        grads, (losses, carry) = jax.grad(total, has_aux=True)(params)
        return Gradient(grads, losses, None, state.replace(carry=carry))

    return run
