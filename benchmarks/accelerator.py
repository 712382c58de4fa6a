"""Time and kernels on one accelerator: a gradient of a sequence beside BPTT, and training a step.

    python benchmarks/accelerator.py [--turns 7] [--rows lstm,256,256,100 ...] [--out FILE]

``benchmarks/performance_page.py`` puts the table of ``--out benchmarks/results/h100.json`` into
``docs/performance.md``.

Every column is one program under ``jax.jit``, with float32 products of full precision; columns of
a row take turns, the median counts. ``kernels`` are those that one call ran on the device, and
``busy_ms`` the time in which they ran, both from JAX's profiler. ``train`` is a gradient and an
update at each step; ``read and write`` is an array as large as the trace, read and written
``steps`` times in one program. The table goes to stdout and, as JSON, to FILE.
"""

from __future__ import annotations

import argparse
import glob
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from cells import Spec, loss_of
from columns import LINEAR
from runner import in_turn, keep, seconds
from worker import bptt, by_hand, online

import braintrace

ROWS = (
    ('gru', 256, 64, 200),
    ('lstm', 256, 256, 100),
    ('lif_syn', 200, 40, 100),
    ('alif', 100, 40, 100),
    ('rnn', 512, 512, 50),
    ('lru', 128, 10, 70),
    ('lru', 256, 64, 1000),
    ('mingru', 256, 64, 1000),
    ('lstm', 1024, 256, 100, 64),
)
STEP_BY_STEP = braintrace.Policy(linear_loops='sequential')
RULES = {
    'drop': (braintrace.rules.d_rtrl(), {'keep_trace': False}),
    'drop, step by step': (braintrace.rules.d_rtrl(), {'keep_trace': False}),
    'drop, one window': (braintrace.rules.d_rtrl(), {'keep_trace': False, 'window': None}),
    'kept': (braintrace.rules.d_rtrl(), {'keep_trace': True}),
    'es': (braintrace.rules.es_d_rtrl(0.9), {'keep_trace': False}),
}
PROFILED = 'bptt', 'drop', 'kept', 'train'


def columns(spec: Spec) -> dict:
    """``name -> (function, arguments, the ones it is given for good)`` of a network."""
    found = {
        'bptt': (*bptt(spec), ()),
        'bptt, unroll=4': (*bptt(spec, 4), ()),
        'by hand': (*by_hand(spec), ()),
    }
    if spec.kind in LINEAR:
        found['by hand, associative'] = (*by_hand(spec, associative=True), ())
    for name, (rule, options) in RULES.items():
        policy = STEP_BY_STEP if name.endswith('step by step') else braintrace.Policy()
        learner, given = online(spec, rule, policy=policy)
        found[name] = (learner.sequence_grad(loss_of, **options), given, (1,))
    optimizer = optax.sgd(1e-3)
    learner, (params, *others) = online(spec)
    run = learner.sequence_update(loss_of, optimizer)
    found['train'] = (run, (params, optimizer.init(params), *others), (2,))

    def read_and_write(e):
        return jax.lax.fori_loop(0, spec.steps, lambda _, e: e * 0.5 + 1.0, e)

    found['read and write'] = (read_and_write, (jnp.zeros(spec.trace_numbers),), (0,))
    return found


class Timed:
    """One column: compiled, run once to warm up, and timed call by call. What it donates is a copy
    made before the clock starts.
    """

    def __init__(self, run, args: tuple, donated: tuple):
        self.args, self.donated, self.seconds = args, donated, []
        self.run = jax.jit(run, donate_argnums=donated).lower(*args).compile()
        for _ in range(2):
            self.call()
        self.seconds.clear()

    def given(self) -> list:
        copies = [
            jax.tree.map(jnp.copy, a) if k in self.donated else a for k, a in enumerate(self.args)
        ]
        return jax.block_until_ready(copies)

    def call(self):
        args = self.given()
        self.seconds.append(seconds(lambda: self.run(*args)))

    def times(self) -> dict:
        return {
            'ms': statistics.median(self.seconds) * 1e3,
            'low': min(self.seconds) * 1e3,
            'temp_mib': self.run.memory_analysis().temp_size_in_bytes / 2**20,
        }

    def profiled(self) -> dict:
        """Kernels of a call on the device, and the milliseconds in which they ran."""
        args = self.given()
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                jax.block_until_ready(self.run(*args))
            files = glob.glob(f'{folder}/**/*.xplane.pb', recursive=True)
            planes = jax.profiler.ProfileData.from_file(files[0]).planes
            events = [
                event
                for plane in planes
                if plane.name.startswith('/device:GPU')
                for line in plane.lines
                if line.name.startswith('Stream')
                for event in line.events
            ]
        return {'kernels': len(events), 'busy_ms': sum(e.duration_ns for e in events) / 1e6}


def compiled(spec: Spec) -> tuple[dict, dict]:
    """The columns of a row, compiled side by side, and those that the device refuses, by name."""
    made, refused = {}, {}
    with ThreadPoolExecutor() as pool:
        jobs = {name: pool.submit(Timed, *column) for name, column in columns(spec).items()}
    for name, job in jobs.items():
        if error := job.exception():
            refused[name] = {'error': f'{type(error).__name__}: {error}'[:300]}
        else:
            made[name] = job.result()
    return made, refused


def told(spec: Spec, found: dict, table: dict, path: Path | None):
    """Print a row, and keep the table."""
    if path:
        keep(path, table)
    scan = found['bptt']['ms']
    print(f'\n{spec}', flush=True)
    for name, row in found.items():
        if 'error' in row:
            print(f'  {name:22s} {row["error"]}', flush=True)
            continue
        print(
            f'  {name:22s} {row["ms"]:9.3f} ms (low {row["low"]:.3f})  / bptt '
            f'{row["ms"] / scan:5.2f}  kernels {row.get("kernels", "-"):>6}  '
            f'busy {row.get("busy_ms", 0):8.3f}  temp {row["temp_mib"]:7.1f} MiB',
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--turns', type=int, default=7)
    parser.add_argument('--rows', nargs='+', help='kind,units,inputs,steps[,batch[,layers]]')
    parser.add_argument('--out', type=Path)
    args = parser.parse_args()
    jax.config.update('jax_default_matmul_precision', 'highest')
    rows = [(k, *map(int, n)) for k, *n in (r.split(',') for r in args.rows or ())] or ROWS
    device = jax.devices()[0]
    print(f'{device.device_kind}, jax {jax.__version__}', flush=True)
    table = {'device': device.device_kind, 'jax': jax.__version__, 'rows': []}
    kept = []
    for spec in [Spec(*row) for row in rows]:
        made, refused = compiled(spec)
        in_turn({name: timed.call for name, timed in made.items()}, args.turns)
        found = {name: timed.times() for name, timed in made.items()} | refused
        table['rows'].append({'spec': spec, 'times': found})
        kept.append(made)
        told(spec, found, table, args.out)
    for row, made in zip(table['rows'], kept):  # last, since a profiler may slow later calls
        for name in PROFILED:
            row['times'][name] |= made[name].profiled()
        told(row['spec'], row['times'], table, args.out)


if __name__ == '__main__':
    main()
