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

from tables import listed

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


def alone(name: str, method: str) -> dict:
    """:func:`one` in a process of its own."""
    environment = {**os.environ, 'XLA_FLAGS': SINGLE, 'JAX_PLATFORMS': 'cpu'}
    call = [sys.executable, __file__, 'one', name, method]
    done = subprocess.run(call, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measured(networks=tuple(NETWORKS), turns: int = 3) -> list[dict]:
    """A row for each network and method: medians, and XLA's time over that of BPTT."""
    rows = []
    for name in networks:
        each = [{m: alone(name, m) for m in METHODS} for _ in range(turns)]
        for method in METHODS:
            found = [turn[method] for turn in each]
            row = {what: statistics.median(f[what] for f in found) for what in found[0]}
            slower = [turn[method]['compiling'] / turn['bptt']['compiling'] for turn in each]
            larger = row['instructions'] / each[0]['bptt']['instructions']
            row |= {'slower': statistics.median(slower), 'larger': larger}
            rows.append({'network': NETWORKS[name], 'method': method, **row})
            print(f'    {rows[-1]}', file=sys.stderr, flush=True)
    return rows


def page(rows: list[dict]) -> str:
    """The table of some rows."""
    names = {'bptt': '`jax.grad` of a scan', 'kept': 'trace kept', 'dropped': 'trace dropped'}
    columns = {
        'network': lambda r: r['network'],
        'method': lambda r: names[r['method']],
        'analysis, s': lambda r: f'{r["init"]:.2f}' if 'init' in r else None,
        'tracing, s': lambda r: f'{r["tracing"] + r["lowering"]:.2f}',
        'XLA, s': lambda r: f'{r["compiling"]:.2f}',
        'XLA / BPTT': lambda r: f'{r["slower"]:.1f}',
        'operations': lambda r: f'{r["operations"]:.0f}',
        'instructions': lambda r: f'{r["instructions"]:.0f}',
        'instructions / BPTT': lambda r: f'{r["larger"]:.1f}',
        'temporary, MiB': lambda r: f'{r["temporary"] / 2**20:.0f}',
    }
    return listed(rows, columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--turns', type=int, default=3)
    parser.add_argument('--networks', nargs='*', default=list(NETWORKS), choices=list(NETWORKS))
    given = parser.parse_args()
    print(page(measured(given.networks, given.turns)))


if __name__ == '__main__':
    if sys.argv[1:2] == ['one']:
        print(json.dumps(one(*sys.argv[2:])))
    else:
        main()
