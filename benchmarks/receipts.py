"""What receipts cost: CPU time a step of training, of recording and of verifying.

    OPENBLAS_NUM_THREADS=1 python benchmarks/receipts.py

A small LIF net with Adam, all steps recorded; of each time the least of some runs. The table goes
to ``benchmarks/results/receipts.json`` and into ``docs/explanation/receipts.md``.
"""

from __future__ import annotations

import io
import sys
import time

import jax
import numpy as np
import optax
from printer import DOCS, listed
from runner import RESULTS, in_turn, keep, kept, seconds

import braintrace
from braintrace import receipts
from braintrace_receipts import parse_run, reconcile_run

PATH = RESULTS / 'receipts.json'
PAGE = DOCS / 'explanation' / 'receipts.md'
MARK, END = (
    '<!-- benchmarks/receipts.py: costs -->',
    '<!-- benchmarks/receipts.py: end of costs -->',
)
COSTS = [(16, 2), (32, 2), (32, 8), (64, 8)]  # units and lanes of a LIF net, 8 inputs, Adam
RUN, REPEATS = 40, 5


def costs(units: int, lanes: int) -> dict:
    """What a step of training, of recording and of verifying takes, and its bytes."""
    cell, optimizer = receipts.Cell.lif(tau=20.0, tau_out=10.0), optax.adam(1e-3)
    learner, keys = braintrace.functional.online(cell), jax.random.split(jax.random.key(0), 3)
    begin = cell.init(keys[0], 8, units, 2)
    xs = np.asarray(2 * jax.random.normal(keys[1], (RUN, lanes, 8)))
    ys = np.asarray(jax.random.normal(keys[2], (RUN, lanes, 2)))
    first = learner.init(begin, cell.carry(begin, lanes), xs[0])
    recording, file = receipts.capture(learner), io.BytesIO()
    config = {'lr': 1e-3, 'b1': 0.9, 'b2': 0.999, 'eps': 1e-8}
    gradient = learner.grad(lambda out, y: 0.5 * ((out - y) ** 2).sum() / lanes)

    def moved(params, opt, grads):
        updates, after = optimizer.update(grads, opt, params)
        return updates, after, optax.apply_updates(params, updates)

    @jax.jit
    def plain(params, opt, state, x, y):
        grads, _, _, new = gradient(params, state, x, y)
        return *moved(params, opt, grads)[1:], new

    @jax.jit
    def shown(params, opt, state, x, y):
        (grads, _, _, new), record = recording.grad(params, state, x, y)
        return record, *moved(params, opt, grads), new

    def train():
        params, opt, state = begin, optimizer.init(begin), first
        for x, y in zip(xs, ys, strict=True):
            opt, params, state = plain(params, opt, state, x, y)
        jax.block_until_ready(params)

    def record():
        file.seek(0)
        writer = receipts.Recorder(file, recording, {'name': 'adam', 'config': config})
        params, opt, state = begin, optimizer.init(begin), first
        for x, y in zip(xs, ys, strict=True):
            made, updates, after, new, later = shown(params, opt, state, x, y)
            writer.write(params, state, x, y, made, updates, opt, after, new)
            params, opt, state = new, after, later

    def verify():
        assert reconcile_run(iter(parse_run(file.getvalue()))).verdict == 'rederived'

    runs = {f.__name__: lambda f=f: seconds(f, time.process_time) for f in (train, record, verify)}
    times = in_turn(runs, REPEATS + 1)  # the first turn compiles
    least = {name: 1e3 * min(found[1:]) / RUN for name, found in times.items()}
    return {'case': [units, lanes], **least, 'bytes': len(file.getvalue()) / RUN}


def of_costs(rows: list[dict]) -> str:
    def beside_training(name: str):
        return lambda row: f'{row[name]:.1f} ms ({row[name] / row["train"]:.0f} x)'

    columns = {
        'units, lanes': lambda row: '{}, {}'.format(*row['case']),
        'training': lambda row: f'{row["train"]:.2f} ms',
        'recording': beside_training('record'),
        'verifying': beside_training('verify'),
        'a step in the file': lambda row: f'{row["bytes"] / 1e3:.0f} kB',
    }
    return listed(rows, columns)


def page(text: str, found: dict) -> str:
    """The page with the table between its marks."""
    before, rest = text.split(MARK)
    return f'{before}{MARK}\n{of_costs(found["costs"])}\n{END}{rest.split(END)[1]}'


def main() -> None:
    """Measure, keep the records, and put the table into the page; ``page`` does the last alone."""
    if sys.argv[1:] != ['page']:
        keep(PATH, {'costs': [costs(*case) for case in COSTS]})
    PAGE.write_text(page(PAGE.read_text(encoding='utf-8'), kept(PATH)), encoding='utf-8')


if __name__ == '__main__':
    main()
