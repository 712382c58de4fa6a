"""What several heads cost: one call of ``heads`` with three losses beside ``grad`` of their sum.

    python benchmarks/heads.py

Both are jitted and called turn by turn; printed is the median of the ratios of their times, with
the gradients by sample beside the same number.
"""

from __future__ import annotations

import time
from statistics import median

import brainstate
import jax
import jax.numpy as jnp
from tables import table

import braintrace
from braintrace import nn, rules

BATCH, INPUTS, UNITS, TURNS = 16, 64, 256, 60
NETS = {
    'GRU': lambda: nn.GRUCell(INPUTS, UNITS),
    'LRU': lambda: nn.LRUCell(INPUTS, UNITS),
    'LIF': lambda: brainstate.nn.Sequential(nn.Linear(INPUTS, UNITS), nn.LIF(UNITS, 5.0)),
}
LOSSES = (
    lambda y, t: jnp.mean(jnp.sin(y[..., :2]) * t),
    lambda y, t: jnp.mean((y[..., 2:4] - t) ** 2),
    lambda y, t: jnp.mean(jnp.tanh(y[..., 4:6])),
)


def timed(call) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def ratios(net: str) -> list[float]:
    """``heads`` and ``heads`` by sample, each over ``grad``."""
    brainstate.random.seed(0)
    x, y = jnp.ones((BATCH, INPUTS)), jnp.ones((BATCH, 2))
    made = braintrace.compile(NETS[net](), rules.d_rtrl(), x, batch_size=BATCH)
    learner, params, carry = made.pure()
    state = learner.init(params, carry, x)
    of_sum = learner.grad(lambda o, t: sum(loss(o, t) for loss in LOSSES))
    calls = [of_sum, learner.heads(*LOSSES), learner.heads(*LOSSES, per_sample=True)]
    calls = [jax.jit(call) for call in calls]
    for call in calls:
        jax.block_until_ready(call(params, state, x, y))
    turns = [[timed(lambda c=c: c(params, state, x, y)) for c in calls] for _ in range(TURNS)]
    return [median(turn[k] / turn[0] for turn in turns) for k in (1, 2)]


def main():
    rows = [[net, *(f'{ratio:.2f}' for ratio in ratios(net))] for net in NETS]
    print(table(['net', 'heads / grad of the sum', 'heads by sample / grad of the sum'], rows))


if __name__ == '__main__':
    main()
