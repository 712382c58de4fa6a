"""Time and memory of online learning: this package, BPTT and the public package, turn by turn.

    python benchmarks/performance.py --public P --latest L --public-latest Q      (make bench)
    python benchmarks/performance.py --parts sequences updates      some parts, ours and BPTT alone

P, L and Q are interpreters. P has a public version of braintrace, beside our package under the
interpreter that runs this. L is our newest lane, and Q has a public version beside L. The results
go to ``benchmarks/results/<machine>.json``, from which ``benchmarks/performance_page.py`` makes
``docs/performance.md``.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time

import columns as tables
from cells import Spec
from columns import MAIN, PAIRS, Column, chosen, named, windows_of
from runner import RESULTS, Worker, fresh, in_turn, keep, kept

SLOW, TURNS = 0.5, 3  # a run of more than SLOW seconds takes part in TURNS turns only
STACKS = {
    'gru': 'GRU 256',
    'lstm4': 'LSTM 128, 4 layers',
    'mingru16': 'minGRU 128, 16 layers',
    'mamba': 'Mamba block 64 x 16',
}
METHODS = ('bptt', 'kept', 'dropped')
ONE_THREAD = {'XLA_FLAGS': '--xla_cpu_multi_thread_eigen=false', 'JAX_PLATFORMS': 'cpu'}


def timed(workers: dict, columns, spec, repeats: int) -> dict:
    """Seconds of each column, by name. In every turn each column runs once."""
    times, errors = {}, {}
    of = {c.name: workers[c.package] for c in columns if c.package in workers}
    for c in columns:
        if c.name in of:
            own = c.network(spec)
            made = of[c.name].ask(make=c.name, task=c.task, call=c.call, spec=own, **c.arguments)
            if 'error' in made:
                errors[c.name] = made['error']
            else:
                times[c.name] = []
    for turn in range(repeats):
        for name in [n for n in times if turn < TURNS or statistics.median(times[n]) < SLOW]:
            answer = of[name].ask(time=name)
            if 'error' in answer:
                errors[name] = answer['error']
                del times[name]
            else:
                times[name].append(answer['seconds'])
    for worker in workers.values():
        worker.ask(forget=True)
    found = {
        name: {'median': statistics.median(t), 'low': min(t), 'high': max(t)}
        for name, t in times.items()
    }
    show(found, errors, spec)
    return found | {name: {'error': text} for name, text in errors.items()}


def show(found: dict, errors: dict, spec):
    print(f'  {spec}', flush=True)
    for name, row in found.items():
        print(f'    {name:28s} {row["median"] / spec[3] * 1e3:9.3f} ms a step', flush=True)
    for name, text in errors.items():
        print(f'    {name}: {text}', flush=True)


def everywhere(pairs: dict, specs, columns, repeats: int) -> list:
    """Rows of networks, in each pair of environments."""
    rows = []
    for pair, workers in pairs.items():
        for spec in specs:
            picked = chosen(columns, spec[0], pair != PAIRS[0])
            if pair == PAIRS[0] or any(c.package == 'public' for c in picked):
                times = timed(workers, picked, spec, repeats)
                rows.append({'spec': spec, 'pair': pair, 'times': times})
    return rows


def measure_environments(pairs, repeats):
    """The versions on which every process runs."""
    return {
        pair: {name: worker.ask(versions=True) for name, worker in workers.items()}
        for pair, workers in pairs.items()
    }


def measure_sequences(pairs, repeats):
    """A gradient of a whole sequence."""
    return everywhere(pairs, MAIN, tables.SEQUENCES, repeats)


def measure_cells(pairs, repeats):
    """The same for cells that people use."""
    return everywhere(pairs, tables.CELLS, tables.OF_CELLS, repeats)


def measure_windows(pairs, repeats):
    """``window='auto'`` beside fixed windows, and the window that it chooses."""
    specs, worker = (*MAIN, *tables.CELLS), ours(pairs)
    rows = of_ours(pairs, specs, lambda spec: windows_of(spec[3]), min(repeats, TURNS))
    for row in rows:
        chosen = {c: worker.once('window', c, *row['spec'])['window'] for c in ('drop', 'trace')}
        row['chosen'] = {c: None if k == row['spec'][3] else k for c, k in chosen.items()}
    return rows


def measure_updates(pairs, repeats):
    """A gradient and a weight update at every step."""
    rows = everywhere(pairs, tables.UPDATED, tables.UPDATES, repeats)
    return [row | {'trace': 4 * Spec(*row['spec']).trace_numbers} for row in rows]


def ours(pairs) -> Worker:
    return pairs[PAIRS[0]]['ours']


def of_ours(pairs, specs, columns_of, repeats: int) -> list:
    """Rows of networks in our package alone."""
    workers = {'ours': ours(pairs)}
    return [
        {'spec': spec, 'times': timed(workers, columns_of(spec), spec, repeats)} for spec in specs
    ]


def measure_progress(pairs, repeats):
    """``etrace_train`` with and without a line of progress, in turn."""
    columns = [
        Column(name, 'ours', 'train', 'as it is', '', {'progress': on})
        for name, on in (('off', False), ('on', True))
    ]
    specs = ('rnn', 64, 64, 10_000), ('rnn', 256, 256, 1000)
    return of_ours(pairs, specs, lambda spec: columns, repeats)


def measure_scaling(pairs, repeats):
    """Time a step against units, steps, batch and layers."""
    return {
        axis: of_ours(pairs, specs, lambda spec: tables.SCALING, min(repeats, TURNS))
        for axis, specs in tables.POINTS.items()
    }


def measure_corners(pairs, repeats):
    """Short, narrow, wide and deep networks of gates, and some on one core."""
    worker = Worker(ours(pairs).python, True, one_core=True)
    alone = {PAIRS[0]: {'ours': worker}}
    few, columns = min(repeats, 5), lambda spec: tables.REFERENCES
    found = {
        'sizes': of_ours(pairs, tables.CORNERS, columns, few),
        'one core': of_ours(alone, tables.ONE_CORE, columns, few),
    }
    worker.close()
    return found


def measure_precision(pairs, repeats):
    """The accuracy of traces in bfloat16."""
    return [{'spec': spec, **ours(pairs).once('precision', *spec)} for spec in MAIN]


def measure_stacks(pairs, repeats):
    """First calls of deep networks: medians, and XLA's time over that of `jax.grad`."""
    rows = []
    for name, text in STACKS.items():
        calls = {m: lambda m=m: ours(pairs).once('compile', name, m, **ONE_THREAD) for m in METHODS}
        each = in_turn(calls, min(repeats, TURNS))
        for method, found in each.items():
            row = {what: statistics.median(f[what] for f in found) for what in found[0]}
            slower = [f['compiling'] / b['compiling'] for f, b in zip(found, each['bptt'])]
            larger = row['instructions'] / each['bptt'][0]['instructions']
            row |= {'slower': statistics.median(slower), 'larger': larger}
            rows.append({'network': text, 'method': method, **row})
            print(f'    {rows[-1]}', flush=True)
    return rows


def measure_memory(pairs, repeats):
    """Peak memory of a process and its time, against the length of the sequence."""
    rows = []
    for rule, longest in (('d_rtrl', 1_000_000), ('es_d_rtrl', 100_000), ('bptt', 100_000)):
        for steps in (10, 100, 1000, 2000, 10_000, 40_000, 100_000, 1_000_000):
            if steps <= longest:
                measured = ours(pairs).once('memory', rule, steps)
                rows.append({'rule': rule, 'steps': steps, **measured})
                print(f'    {rows[-1]}', flush=True)
    return rows


def measure_once(pairs, repeats):
    """First calls, ours and the public package's in turn, the time of importing, calls of the
    learner from Python, and what deleted models leave.
    """
    found = {'import': [fresh('imports.py') for _ in range(5)], 'first': []}
    found |= {what: ours(pairs).once(what) for what in ('calls', 'deleted')}
    found['eager'] = of_ours(pairs, tables.CALLED_BY_STEPS, lambda spec: (tables.EAGER,), repeats)
    for pair, workers in pairs.items():
        for spec in (MAIN[0], MAIN[2]) if pair == PAIRS[0] else (MAIN[0],):
            for rule, names in tables.FIRST.items():
                seconds = first_of(workers, names, spec, min(repeats, TURNS))
                row = {'spec': spec, 'pair': pair, 'rule': rule, 'seconds': seconds}
                found['first'].append(row)
                print(f'    {row}', flush=True)
    return found


def first_of(workers: dict, names: tuple, spec, turns: int) -> dict:
    """Median seconds of the first call of each column, in fresh processes that take turns."""
    of = {name: workers[named(name).package] for name in names if named(name).package in workers}
    calls = {n: lambda n=n, w=w: w.once('first', n, *spec).get('seconds') for n, w in of.items()}
    times = in_turn(calls, turns)
    return {name: statistics.median(t) for name, t in times.items() if None not in t}


MEASURES = (
    *(measure_environments, measure_sequences, measure_cells, measure_windows, measure_updates),
    *(measure_progress, measure_precision, measure_once, measure_stacks, measure_memory),
    *(measure_scaling, measure_corners),
)
PARTS = {measure.__name__.removeprefix('measure_'): measure for measure in MEASURES}


def machine() -> str:
    here = f'{platform.system().lower()}-{platform.machine()}-{os.cpu_count()}-cores'
    return os.environ.get('BENCH_MACHINE') or here


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ('--public', '--latest', '--public-latest'):
        parser.add_argument(name, help='a Python, as above')
    parser.add_argument('--parts', nargs='+', choices=list(PARTS), default=list(PARTS))
    parser.add_argument('--repeats', type=int, default=9)
    args = parser.parse_args()
    pythons = {
        PAIRS[0]: {'ours': sys.executable, 'public': args.public},
        PAIRS[1]: {'ours': args.latest, 'public': args.public_latest},
    }
    pairs = {
        pair: {name: Worker(python, name == 'ours') for name, python in each.items() if python}
        for pair, each in pythons.items()
        if each['ours']
    }
    path = RESULTS / f'{machine()}.json'
    found = kept(path)
    begun = time.strftime('%Y-%m-%d %H:%M', time.gmtime())
    for part in args.parts:
        print(part, flush=True)
        start = time.perf_counter()
        found[part] = PARTS[part](pairs, args.repeats)
        seconds = round(time.perf_counter() - start)
        found.setdefault('runs', {})[part] = {'run': begun, 'seconds': seconds}
        print(f'{part}: {seconds} s', flush=True)
        keep(path, found)
    for worker in (worker for workers in pairs.values() for worker in workers.values()):
        worker.close()


if __name__ == '__main__':
    main()
