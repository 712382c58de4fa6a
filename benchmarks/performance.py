"""Time and memory of online learning: this package, BPTT and the public package 0.2.6, turn by turn.

    python benchmarks/performance.py --public .venv-public/bin/python        everything (make bench)
    python benchmarks/performance.py --parts main updates                    some parts; without --public, ours and BPTT alone

Writes ``benchmarks/results/<machine>.json``; ``benchmarks/report.py`` makes ``docs/performance.md`` of it.
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
MAIN = (('rnn', 256, 256, 100), ('rnn', 512, 512, 50), ('gru', 256, 64, 200))
CHUNKS = (5, 10, 25, 50, 100, 200)


class Worker:
    """A process of ``worker.py`` under one interpreter."""

    def __init__(self, python: str):
        self.python = python
        env = {'JAX_PLATFORMS': os.environ.get('JAX_PLATFORMS', ''), **os.environ}
        self.process = subprocess.Popen([python, str(HERE / 'worker.py')], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True, env=env)

    def ask(self, **message) -> dict:
        self.process.stdin.write(json.dumps(message) + '\n')
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return json.loads(line) if line else {'error': 'the process ended'}

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def in_turn(workers: dict, tasks: dict, repeats: int) -> dict:
    """Medians of the seconds of each task ``name -> (worker, task, arguments)``, one run of each in every turn."""
    times, errors = {}, {}
    for name, (worker, task, arguments) in tasks.items():
        if worker not in workers:
            continue
        answer = workers[worker].ask(make=name, task=task, **arguments)
        if 'error' in answer:
            errors[name] = answer['error']
            print(f'    {name}: {answer["error"]}', flush=True)
        else:
            times[name] = []
    for _ in range(repeats):
        for name in times:
            times[name].append(workers[tasks[name][0]].ask(time=name)['seconds'])
    for worker in workers.values():
        worker.ask(forget=True)
    return {name: {'median': statistics.median(t), 'low': min(t), 'high': max(t)} for name, t in times.items()} | {
        name: {'error': text} for name, text in errors.items()}


def shown(results: dict, steps: int):
    for name, row in results.items():
        if 'error' not in row:
            print(f'    {name:28s} {row["median"] / steps * 1e3:9.3f} ms a step', flush=True)


def measure_sequences(workers, repeats):
    """A gradient of a whole sequence."""
    rows = []
    for spec in MAIN:
        s = {'spec': spec}
        tasks = {
            'bptt': ('ours', 'bptt', s),
            'd_rtrl drop': ('ours', 'grad', {**s, 'carry': 'drop'}),
            'd_rtrl trace': ('ours', 'grad', {**s, 'carry': 'trace'}),
            'es_d_rtrl drop': ('ours', 'grad', {**s, 'rule': 'es_d_rtrl', 'carry': 'drop'}),
            'es_d_rtrl trace': ('ours', 'grad', {**s, 'rule': 'es_d_rtrl', 'carry': 'trace'}),
            'bare model': ('ours', 'bare', s),
            'evaluation': ('ours', 'evolve', s),
            'least operations': ('ours', 'product', s),
            'public d_rtrl': ('public', 'grad', s),
            'public pp_prop': ('public', 'grad', {**s, 'rule': 'es_d_rtrl'}),
            **{f'public d_rtrl chunk {c}': ('public', 'grad', {**s, 'options': {'vjp_method': 'multi-step'}, 'chunk_size': c})
               for c in CHUNKS if c <= spec[3]},
        }
        print(f'  {spec}', flush=True)
        rows.append({'spec': spec, 'times': in_turn(workers, tasks, repeats)})
        shown(rows[-1]['times'], spec[3])
    return rows


def measure_updates(workers, repeats):
    """A gradient and a weight update at every step."""
    rows = []
    for spec in MAIN:
        s = {'spec': spec}
        tasks = {
            'read and write of the trace': ('ours', 'read_and_write', s),
            'etrace_train': ('ours', 'train', s),
            **{f'written every {k}': ('ours', 'train', {**s, 'write_every': k}) for k in (1, 2, 4, 8)},
            'bfloat16': ('ours', 'train', {**s, 'options': {'trace_dtype': 'bfloat16'}}),
            'own loop': ('ours', 'own_loop', s),
            'public own loop': ('public', 'own_loop', s),
        }
        print(f'  {spec}', flush=True)
        rows.append({'spec': spec, 'times': in_turn(workers, tasks, repeats)})
        shown(rows[-1]['times'], spec[3])
    return rows


def measure_progress(workers, repeats):
    """``etrace_train`` with and without a line of progress, in turn."""
    rows = []
    for spec in (('rnn', 64, 64, 20_000), ('rnn', 256, 256, 2000)):
        tasks = {name: ('ours', 'train', {'spec': spec, 'progress': on}) for name, on in (('off', False), ('on', True))}
        rows.append({'spec': spec, 'times': in_turn({'ours': workers['ours']}, tasks, repeats)})
        shown(rows[-1]['times'], spec[3])
    return rows


def measure_scaling(workers, repeats):
    """Time a step against units, steps, batch and layers."""
    steps = {64: 200, 128: 200, 256: 100, 512: 50, 1024: 20, 2048: 10}
    specs = {'units': [('rnn', n, n, t, 16, 1) for n, t in steps.items()],
             'steps': [('rnn', 128, 128, t, 16, 1) for t in (10, 30, 100, 300, 1000, 3000, 10_000)],
             'batch': [('rnn', 128, 128, 100, b, 1) for b in (1, 4, 16, 64, 256)],
             'layers': [('rnn', 128, 128, 100, 16, k) for k in (1, 2, 4, 8)]}
    found = {}
    for axis, each in specs.items():
        found[axis] = []
        for spec in each:
            s = {'spec': spec}
            tasks = {'bptt': ('ours', 'bptt', s), 'd_rtrl drop': ('ours', 'grad', {**s, 'carry': 'drop'}),
                     'd_rtrl trace': ('ours', 'grad', {**s, 'carry': 'trace'}),
                     'es_d_rtrl trace': ('ours', 'grad', {**s, 'rule': 'es_d_rtrl'}), 'etrace_train': ('ours', 'train', s)}
            print(f'  {axis} {spec}', flush=True)
            found[axis].append({'spec': spec, 'times': in_turn({'ours': workers['ours']}, tasks, max(3, repeats // 3))})
            shown(found[axis][-1]['times'], spec[3])
    return found


def measure_precision(workers, repeats):
    """What traces in bfloat16 cost in accuracy."""
    return [{'spec': spec, **once(sys.executable, 'precision', *spec)} for spec in MAIN]


def once(python: str, *args) -> dict:
    done = subprocess.run([python, str(HERE / 'once.py'), *map(str, args)], capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {'error': done.stderr[-300:]}


def measure_memory(workers, repeats):
    """Peak memory of a process and its time, against the length of the sequence."""
    rows = []
    for rule, lengths in (('d_rtrl', (10, 100, 1000, 2000, 10_000, 40_000, 100_000, 1_000_000)),
                          ('es_d_rtrl', (10, 100, 1000, 2000, 10_000, 40_000, 100_000, 1_000_000)),
                          ('bptt', (10, 100, 1000, 2000, 10_000, 40_000, 100_000))):
        for steps in lengths:
            rows.append({'rule': rule, 'steps': steps, **once(sys.executable, 'memory', rule, steps)})
            print(f'    {rows[-1]}', flush=True)
    return rows


def measure_once(workers, repeats):
    """First calls, ours and the public package's in turn, and the time of importing."""
    found = {'import': [once(sys.executable, 'import') for _ in range(5)], 'first': []}
    pythons = {'ours': sys.executable} | ({'public': workers['public'].python} if 'public' in workers else {})
    for spec in MAIN:
        for rule in ('d_rtrl', 'es_d_rtrl'):
            times = {name: [] for name in pythons}
            for _ in range(3):
                for name, python in pythons.items():
                    times[name].append(once(python, 'first', rule, *spec)['seconds'])
            found['first'].append({'spec': spec, 'rule': rule, **{name: statistics.median(t) for name, t in times.items()}})
            print(f'    {found["first"][-1]}', flush=True)
    return found


PARTS = {'sequences': measure_sequences, 'updates': measure_updates, 'progress': measure_progress, 'precision': measure_precision,
         'once': measure_once, 'memory': measure_memory, 'scaling': measure_scaling}


def machine() -> str:
    return os.environ.get('BENCH_MACHINE') or f'{platform.system().lower()}-{platform.machine()}-{os.cpu_count()}-cores'


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--public', help='the Python of a virtual environment with braintrace==0.2.6')
    parser.add_argument('--parts', nargs='+', choices=list(PARTS), default=list(PARTS))
    parser.add_argument('--repeats', type=int, default=9)
    args = parser.parse_args()
    workers = {'ours': Worker(sys.executable)} | ({'public': Worker(args.public)} if args.public else {})
    path = HERE / 'results' / f'{machine()}.json'
    found = json.loads(path.read_text()) if path.exists() else {}
    for part in args.parts:
        print(part, flush=True)
        found[part] = PARTS[part](workers, args.repeats)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + '\n')
    for worker in workers.values():
        worker.close()


if __name__ == '__main__':
    main()
