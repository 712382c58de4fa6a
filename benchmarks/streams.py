"""What a stream costs: ``not_finite='reset'`` beside ``'keep'``, and losses that are read late.

    python benchmarks/streams.py        half a minute

RNN 64 and LRU 32, 16 lanes, chunks of 500 steps with an update at each. Of ``reset`` the seconds of
the processor count, turn by turn, and the median of the ratios; of 40 chunks from an iterator that
takes as long as a chunk, the seconds of the clock.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import braintrace
from braintrace import functional

LANES, INPUTS, STEPS, TURNS = 16, 16, 500, 60


def rnn(params, h, x):
    """Every unit reads all."""
    h = jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['w']))
    return h @ params['out'], h


def lru(params, h, x):
    """Each unit has a decay of its own."""
    decay = jax.nn.sigmoid(braintrace.element_wise(params['decay']))
    h = decay * h + braintrace.matmul(x, params['w'])
    return h @ params['out'], h


def seconds(call, *args) -> float:
    """Of the processor: others on the machine do not count."""
    begin = time.process_time()
    jax.block_until_ready(call(*args))
    return time.process_time() - begin


def read(learn, given, xs, ys, late: bool) -> float:
    """Seconds by the clock, over those of the iterator alone, where the losses are read late."""
    begin = time.perf_counter()
    jax.block_until_ready(learn(*given, xs, ys, jnp.ones(STEPS)))
    pause = time.perf_counter() - begin

    def source():
        for _ in range(40):
            time.sleep(pause)
            yield np.asarray(xs), np.asarray(ys)

    begin, before = time.perf_counter(), None
    for chunk in functional.chunks(source()):
        found = learn(*given, *chunk)
        given = found.params, found.opt_state, found.state
        jax.device_get(before if late else found.losses)
        before = found.losses
    jax.device_get(before)
    return (time.perf_counter() - begin) / (40 * pause)


def main():
    """Print two rows for each cell."""
    rng = np.random.default_rng(0)
    drawn = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    for cell, units in ((rnn, 64), (lru, 32)):
        inputs = INPUTS + units if cell is rnn else INPUTS
        params = {'w': drawn(inputs, units) / 9, 'out': drawn(units, 4) / 9}
        params |= {} if cell is rnn else {'decay': jnp.ones(units)}
        xs, ys, carry0 = (
            drawn(STEPS, LANES, INPUTS),
            drawn(STEPS, LANES, 4),
            jnp.zeros((LANES, units)),
        )
        learner, optimizer = functional.online(cell), optax.adam(1e-3)
        given = params, optimizer.init(params), learner.init(params, carry0, xs[0])
        loss = lambda y, target: jnp.mean((y - target) ** 2)
        keep, reset = (
            jax.jit(learner.sequence_update(loss, optimizer, not_finite=option))
            for option in ('keep', 'reset')
        )
        bad, anew = xs.at[10, 3].set(jnp.nan), (None, carry0)
        calls = {
            'keep': lambda: keep(*given, xs, ys),
            'reset': lambda: reset(*given, xs, ys, None, anew),
            'bad': lambda: reset(*given, bad, ys, None, anew),
        }
        rows = [[seconds(call) for call in calls.values()] for _ in range(TURNS + 1)]
        times = np.array(rows[1:])  # the first turn compiles
        _, resetting, spoiled = np.median(times / times[:, :1], axis=0)
        step = np.median(times[:, 0]) / STEPS * 1e6
        print(
            f'{cell.__name__} {units}: {step:.1f} us a step; reset {100 * (resetting - 1):+.1f} %, '
            f'a chunk with a NaN takes {spoiled:.1f} times as long'
        )
        keep(*given, xs, ys, jnp.ones(STEPS))
        times = [[read(keep, given, xs, ys, late) for late in (False, True)] for _ in range(5)]
        at_once, late = np.median(times, axis=0)
        print(f'  of the iterator alone: read at each chunk {at_once:.2f}, one late {late:.2f}')


if __name__ == '__main__':
    main()
