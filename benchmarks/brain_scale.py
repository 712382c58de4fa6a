"""The network of examples/brain_scale.py: time and memory of learning beside the model alone.

python benchmarks/brain_scale.py [--sizes 100000,1000000] [--steps 1000] [--turns 7]
                                 [--only learning,memory,turns] [--json FILE]

Three kinds of rows, each in a process of its own: ``learning`` is the example with all its steps;
``memory`` builds the network and runs blocks of 20 steps of one way, and reads the highest memory
of the process; ``turns`` runs such blocks of all ways turn by turn in one process and takes
medians. What is measured is written over what the file holds of the same rows.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path

import brainstate
import jax
from runner import HERE, RESULTS, fresh, in_turn, keep, kept, versions

import braintrace

BLOCK = 20
WAYS = {  # name: rule, its options, and after how many steps the weights change (0: never)
    'model alone': (None, {}, 0),
    'ES_D_RTRL': ('ES_D_RTRL', {'decay_or_rank': 0.95}, BLOCK),
    'ES_D_RTRL, updates each step': ('ES_D_RTRL', {'decay_or_rank': 0.95}, 1),
    'D_RTRL': ('D_RTRL', {}, BLOCK),
    'D_RTRL, updates each step': ('D_RTRL', {}, 1),
}
SMALL = 300_000  # a network of more neurons has no row of D_RTRL, nor one of all steps


def example():
    """The module of the example."""
    path = HERE.parent / 'examples' / 'brain_scale.py'
    spec = importlib.util.spec_from_file_location('examples_brain_scale', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def memory() -> dict:
    """MiB: the highest of this process, that of the arrays of JAX now, and of a GPU the highest."""
    stats = jax.devices()[0].memory_stats() or {}
    found = {
        'peak': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        'arrays': sum(a.nbytes for a in jax.live_arrays()),
        'device peak': stats.get('peak_bytes_in_use'),
    }
    return {name: size / 2**20 for name, size in found.items() if size is not None}


class Way:
    """One way to run the network, by blocks of steps; ``times`` are pairs of wall and CPU ms."""

    def __init__(self, name: str, ours, network):
        rule, options, self.every = WAYS[name]
        self.currents, self.targets = ours.wave(ours.PERIOD)
        self.learner = braintrace.compile(network, rule, self.currents[0], **options)
        self.optimizer, self.opt_state = ours.optimizer_of(network.neurons.in_size[0]), None
        self.step = lambda current, target: ours.loss(self.learner(current), target)
        self.times: list[tuple[float, float]] = []

    def turn(self) -> None:
        first = BLOCK * len(self.times) % len(self.targets)
        currents, targets = (a[first : first + BLOCK] for a in (self.currents, self.targets))
        start = time.perf_counter(), time.process_time()
        if self.every:
            out = self.learner.etrace_train(
                *(currents, targets),
                step_fn=self.step,
                optimizer=self.optimizer,
                opt_state=self.opt_state,
                update_every=self.every,
            )
            self.opt_state = out.opt_state
        else:
            out = self.learner.etrace_evolve(currents)
        jax.block_until_ready(out)
        ends = time.perf_counter(), time.process_time()
        self.times.append(tuple(1e3 * (b - a) for a, b in zip(start, ends)))

    def measured(self) -> dict:
        """The first call compiles, the second one warms up."""
        wall, cpu = (statistics.median(each) / BLOCK for each in zip(*self.times[2:]))
        first = self.times[0]
        return {'ms': wall, 'cpu ms': cpu, 'first call s': first[0] / 1e3}


def learning(size: int, options) -> dict:
    """The example itself."""
    start = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        first, last = example().main(size, options.steps, Path(folder) / 'rates.png')
    spent = time.perf_counter() - start[0], time.process_time() - start[1]
    found = {'steps': options.steps, 'loss before': first, 'loss after': last}
    return found | dict(zip(('s', 'cpu s'), spent)) | {'memory': memory()}


def built_of(size: int) -> tuple:
    """The example, and its network."""
    ours = example()
    brainstate.environ.set(dt=1 * ours.ms)
    return ours, ours.Network(size)


def row_of_memory(size: int, options) -> dict:
    """The highest memory of one way."""
    ours, network = built_of(size)
    built = memory()
    way = Way(options.way, ours, network)
    for _ in range(5):
        way.turn()
    return {**way.measured(), 'built': built, 'memory': memory()}


def turns(size: int, options) -> dict:
    """Times of all ways, turn by turn."""
    ours, network = built_of(size)
    ways = {name: Way(name, ours, network) for name in ways_of(size)}
    in_turn({name: way.turn for name, way in ways.items()}, options.turns + 2)
    return {name: way.measured() for name, way in ways.items()}


def ways_of(size: int) -> list[str]:
    return [name for name in WAYS if not name.startswith('D_') or size <= SMALL]


KINDS = {'learning': learning, 'memory': row_of_memory, 'turns': turns}


def rows_of(size: int, kinds: list[str]):
    """The kind, the way and the name of each row."""
    for kind in kinds:
        if kind == 'memory':
            yield from ((kind, way, f'{size} {kind} {way}') for way in ways_of(size))
        elif kind != 'learning' or size <= SMALL:
            yield kind, '', f'{size} {kind}'


def measured(options) -> None:
    """All rows, each in a process of its own; the file is written after each."""
    found = {'rows': {}} | kept(options.json) | versions()
    for size in options.sizes:
        for kind, way, name in rows_of(size, options.only):
            counts = ['--steps', options.steps, '--turns', options.turns]
            row = fresh(
                *(Path(__file__).name, '--sizes', size, '--only', kind, '--way', way, '--alone'),
                *counts,
            )
            if 'error' in row:
                sys.exit(f'{name}: {row["error"]}')
            found['rows'][name] = row
            print(name, row, flush=True)
            keep(options.json, found)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {'type': lambda text: [int(size) for size in text.split(',')]}
    parser.add_argument('--sizes', **sizes, default=[100_000, 1_000_000])
    parser.add_argument('--steps', type=int, default=1000, help='steps of learning')
    parser.add_argument('--turns', type=int, default=10)
    parser.add_argument('--only', type=lambda text: text.split(','), default=list(KINDS))
    parser.add_argument('--json', type=Path, default=RESULTS / 'brain_scale.json')
    parser.add_argument('--way', default='', help=argparse.SUPPRESS)
    parser.add_argument('--alone', action='store_true', help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not options.alone:
        measured(options)
        return
    (size,), (kind,) = options.sizes, options.only
    print(json.dumps(KINDS[kind](size, options)))


if __name__ == '__main__':
    main()
