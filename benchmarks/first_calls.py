"""What a first call costs: tracing and XLA's compilation of the gradient of a sequence, beside
`jax.grad` of a scan over the same step.

    python benchmarks/first_calls.py                     prints the table
    python benchmarks/first_calls.py --turns 5           the median of five processes each
    python benchmarks/first_calls.py one lstm4 kept      one measurement, as JSON

Seconds are those of the processor on one thread, each measurement in a process of its own, methods
in turn. Operations are those of the program that JAX gives to XLA, instructions those of what XLA
makes of it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

NETWORKS = {
    'gru': 'GRU 256',
    'lstm4': 'LSTM 128, 4 layers',
    'mingru16': 'minGRU 128, 16 layers',
    'mamba': 'Mamba block 64 x 16',
}
METHODS = ('bptt', 'kept', 'dropped')
SINGLE = '--xla_cpu_multi_thread_eigen=false'


def network(name: str):
    """``(step, params, hidden, xs, ys)`` of a network."""
    import functools

    import brainstate
    import jax.numpy as jnp
    from models import Spec, cell, data, initial

    import braintrace

    specs = {
        'gru': Spec('gru', 256, 64, 100),
        'lstm4': Spec('lstm', 128, 128, 100, 16, 4),
        'mingru16': Spec('mingru', 128, 128, 100, 16, 16),
    }
    if name in specs:
        spec = specs[name]
        return functools.partial(cell, spec), *initial(spec), *data(spec)

    brainstate.random.seed(0)
    model = brainstate.nn.Sequential(
        braintrace.nn.MambaCell(64, state_size=16), braintrace.nn.Linear(64, 10)
    )
    xs, ys = jnp.ones((100, 16, 64)), jnp.ones((100, 16, 10))
    learner = braintrace.compile(model, 'D_RTRL', xs[0], batch_size=16)
    online, params, hidden = learner.pure()
    return online.cell, params, hidden, xs, ys


def one(name: str, method: str) -> dict:
    """The first call of one method, in this process."""
    import jax
    import jax.numpy as jnp
    from models import loss_of

    import braintrace

    step, params, hidden, xs, ys = network(name)
    found = {}

    def timed(what: str, fn):
        start = time.process_time()
        result = fn()
        found[what] = time.process_time() - start
        return result

    jax.block_until_ready(jnp.ones(3) + 1)
    if method == 'bptt':

        def loss(params, hidden, xs, ys):
            def body(hidden, at):
                y, hidden = step(params, hidden, at[0])
                return hidden, loss_of(y, at[1])

            return jnp.mean(jax.lax.scan(body, hidden, (xs, ys))[1])

        gradient, args = jax.grad(loss), (params, hidden, xs, ys)
    else:
        online = braintrace.functional.online(step, braintrace.rules.d_rtrl())
        state = timed('init', lambda: online.init(params, hidden, xs[0]))
        gradient = online.sequence_grad(loss_of, keep_trace=method == 'kept')
        args = (params, state, xs, ys)
    traced = timed('tracing', lambda: jax.jit(gradient).trace(*args))
    lowered = timed('lowering', traced.lower)
    compiled = timed('compiling', lowered.compile)
    text = compiled.as_text()
    found['operations'] = lowered.as_text().count(' = ')
    found['instructions'] = sum(' = ' in line for line in text.splitlines())
    found['temporary'] = compiled.memory_analysis().temp_size_in_bytes
    return found


def measured(name: str, method: str) -> dict:
    """:func:`one` in a process of its own."""
    environment = {**os.environ, 'XLA_FLAGS': SINGLE, 'JAX_PLATFORMS': 'cpu'}
    call = [sys.executable, __file__, 'one', name, method]
    done = subprocess.run(call, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--turns', type=int, default=3)
    parser.add_argument('--networks', nargs='*', default=list(NETWORKS))
    given = parser.parse_args()
    print(
        '| network | method | init s | tracing s | XLA s | XLA / BPTT | operations | instructions '
        '| / BPTT | temporary MiB |\n|---|---|---|---|---|---|---|---|---|---|'
    )
    for name in given.networks:
        turns = [{m: measured(name, m) for m in METHODS} for _ in range(given.turns)]
        for method in METHODS:
            median = {
                what: statistics.median(turn[method][what] for turn in turns)
                for what in turns[0][method]
            }
            slower = statistics.median(
                t[method]['compiling'] / t['bptt']['compiling'] for t in turns
            )
            larger = median['instructions'] / turns[0]['bptt']['instructions']
            cells = (
                NETWORKS[name],
                method,
                f'{median.get("init", 0):.2f}',
                f'{median["tracing"] + median["lowering"]:.2f}',
                f'{median["compiling"]:.2f}',
                f'{statistics.median(slower):.1f}',
                f'{median["operations"]:.0f}',
                f'{median["instructions"]:.0f}',
                f'{larger:.1f}',
                f'{median["temporary"] / 2**20:.1f}',
            )
            print('| ' + ' | '.join(cells) + ' |', flush=True)


if __name__ == '__main__':
    if sys.argv[1:2] == ['one']:
        print(json.dumps(one(*sys.argv[2:])))
    else:
        main()
