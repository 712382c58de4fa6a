"""What the minimal cut and the levels of a step buy: a gradient of a sequence with them, beside a
step in three plain parts, what stands before one loop, in it and behind it.

python benchmarks/parts.py

In the plain form a loop stores what later parts read of it, and nothing is computed again. Ratios
are medians of turns in which both run one after the other; below 1 the partition is faster.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from functools import partial
from unittest import mock

import jax
import numpy as np
from models import Spec, cell, data, initial, loss_of

from braintrace import functional, rules
from braintrace._executor import partition

TURNS = 9
SPECS = {
    'gru 256': Spec('gru', 256, 256, 100),
    'gru 256 x 2': Spec('gru', 256, 256, 100, layers=2),
    'lstm 256': Spec('lstm', 256, 256, 50),
    'lif_syn 200': Spec('lif_syn', 200, 200, 100),
    'mingru 256': Spec('mingru', 256, 256, 200),
    'lru 128': Spec('lru', 128, 128, 200),
    'rnn 64, one sample': Spec('rnn', 64, 64, 500, batch=1),
}


def compiled(spec: Spec, keep: bool, plain: bool):
    """A call of ``sequence_grad``, compiled, and the memory beside its arguments."""
    params, hidden = initial(spec)
    xs, ys = data(spec)
    learner = functional.online(partial(cell, spec), rules.d_rtrl())
    run = jax.jit(learner.sequence_grad(loss_of, keep_trace=keep, window=None))
    state = learner.init(params, hidden, xs[0])
    never = {'is_cheap': lambda eqn: False, 'opens_a_level': lambda eqn: False}
    with mock.patch.multiple(partition, **never) if plain else nullcontext():
        program = run.lower(params, state, xs, ys).compile()
    call = lambda: jax.block_until_ready(program(params, state, xs, ys))
    return call, program.memory_analysis().temp_size_in_bytes / 2**20, len(program.as_text())


def timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == '__main__':
    print(f'{"network":20} {"trace":8} {"time":>5}  MiB, plain  program, plain')
    for name, spec in SPECS.items():
        for keep in (False, True):
            ours, plain = (compiled(spec, keep, p) for p in (False, True))
            for call, *_ in (ours, plain):
                call()
            ratio = np.median([timed(ours[0]) / timed(plain[0]) for _ in range(TURNS)])
            size = ours[2] / plain[2]
            print(
                f'{name:20} {"kept" if keep else "dropped":8} {ratio:5.2f}  '
                f'{ours[1]:4.0f}, {plain[1]:4.0f}  {size:5.2f}',
                flush=True,
            )
