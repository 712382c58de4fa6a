"""What a verifier's bound lets through, on honest float32 steps of common cells, and what it costs.

    OPENBLAS_NUM_THREADS=1 python benchmarks/receipts.py [bounds | costs]

Each net runs ``STEPS`` steps under ``receipts.capture``. Of the last step every field is compared
with what the rules derive in float64: the worst honest error in units of ``u sum|terms|``, the
share of nonzero entries that could be zero unseen, and how many entries are caught that are off by
5 %, for k = 64 and for a tolerance of {atol 1e-5, rtol 1e-3}. Costs are CPU time a step of
training, of recording and of verifying, the least of some runs. The tables go to
``benchmarks/results/receipts.json`` and into ``docs/explanation/receipts.md``.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
from tables import table

import braintrace
from braintrace import receipts
from braintrace_receipts import parse_run, reconcile, reconcile_run
from braintrace_receipts.bounds import UNIT
from braintrace_receipts.checks import Check, Gated, Limits
from braintrace_receipts.files import resolve_files
from braintrace_receipts.record import Record
from braintrace_receipts.rules import STEP_RULES

HERE = Path(__file__).parent
RESULTS = HERE / 'results' / 'receipts.json'
PAGE = HERE.parent / 'docs' / 'explanation' / 'receipts.md'
MARKS = '<!-- benchmarks/receipts.py: {} -->'
STEPS, K, ATOL, RTOL = 50, 64, 1e-5, 1e-3
PARTS = (27, 29)  # rules that compare a part of what rule 30 compares
U = UNIT['float32']
# cell, hidden units, lanes, factor of the loss; twice as many inputs as units
CASES = [
    ('rnn', 128, 32, 0.01),
    ('lif', 128, 32, 1.0),
    ('lif', 128, 32, 0.01),
    ('lif', 256, 64, 0.01),
    ('alif', 128, 32, 0.01),
]
COSTS = [(16, 2), (32, 2), (32, 8), (64, 8)]  # units and lanes of a LIF net, 8 inputs, Adam
RUN, REPEATS = 40, 5
SHOWN = {
    'carry_after/V': 'membrane',
    'outputs': 'outputs',
    'signals/err': 'error',
    'signals/dy': 'dL/dy',
    'traces_after': 'traces',
    'gradients': 'gradients',
    'optimizer/updates': 'updates of Adam',
    'params_after': 'parameters',
}


def recorded(cell: str, hidden: int, lanes: int, scale: float, folder: Path) -> dict:
    """The receipt of the last of some steps; targets are so near to the outputs that the error has
    this scale.
    """
    made = getattr(receipts.Cell, cell)(tau_out=20.0)
    learner, optimizer = braintrace.functional.online(made), optax.adam(1e-3)
    keys = jax.random.split(jax.random.key(0), 3)
    params = made.init(keys[0], 2 * hidden, hidden, 4)
    xs = 2 * jax.random.normal(keys[1], (STEPS, lanes, 2 * hidden))
    noise = jax.random.normal(keys[2], (STEPS, lanes, 4))
    state, opt = learner.init(params, made.carry(params, lanes), xs[0]), optimizer.init(params)
    recording = receipts.capture(learner, arrays='npz')
    file = folder / f'{cell}-{hidden}.jsonl'
    config = {'lr': 1e-3, 'b1': 0.9, 'b2': 0.999, 'eps': 1e-8}
    recorder = receipts.Recorder(
        file, recording, {'name': 'adam', 'config': config}, record_every=STEPS - 1
    )

    @jax.jit
    def step(params, opt, state, x, noise):
        outputs, _ = learner.step(params, state, x)
        y = outputs + scale * noise
        (grads, _, _, new), record = recording.grad(params, state, x, y)
        updates, after = optimizer.update(grads, opt, params)
        return y, record, updates, after, optax.apply_updates(params, updates), new

    for x, n in zip(xs, noise, strict=True):
        y, record, updates, after, moved, new = step(params, opt, state, x, n)
        recorder.write(params, state, x, y, record, updates, opt, after, moved)
        params, opt, state = moved, after, new
    last = parse_run(file.read_bytes())[-1]
    last = resolve_files(last, folder)
    return last


def least(steps: int, run) -> float:
    """CPU milliseconds of a step, the least of some runs."""
    found = []
    for _ in range(REPEATS):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return 1e3 * min(found) / steps


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

    train(), record()
    found = {name: least(RUN, run) for name, run in (('train', train), ('record', record))}
    found |= {'verify': least(RUN, verify), 'bytes': len(file.getvalue()) / RUN}
    return {'case': [units, lanes], **found}


def of_costs(rows: list[dict]) -> str:
    head = ['units, lanes', 'training', 'recording', 'verifying', 'a step in the file']
    body = [
        [
            '{}, {}'.format(*row['case']),
            f'{row["train"]:.2f} ms',
            *(f'{row[n]:.1f} ms ({row[n] / row["train"]:.0f} x)' for n in ('record', 'verify')),
            f'{row["bytes"] / 1e3:.0f} kB',
        ]
        for row in rows
    ]
    return table(head, body)


class Listener(Check):
    """Keeps every comparison of floats."""

    def close(self, path, stored, num, factors=()):
        if stored is not None and num is not None and self.rule not in PARTS:
            self.heard.append((self.rule, path, stored, num))
        return super().close(path, stored, num, factors)


def errors(receipt: dict) -> dict[str, dict]:
    """By field what was measured of its entries, each by the rule with the smallest bound."""
    record = Record(receipt)
    listener = Listener(partial(Limits.of, level='observer', allow=()))
    listener.heard, listener.limits = [], listener.limits_of(record)
    for number, rule in STEP_RULES:
        listener.rule = number
        with contextlib.suppress(Gated):
            rule(record, listener)
    by_path: dict[str, list] = {}
    for _, path, stored, num in listener.heard:
        if stored.shape == num.shape:
            terms = np.broadcast_to(num.terms, stored.shape)
            by_path.setdefault(path, []).append((stored, num.value, terms))
    parts: dict[str, list] = {}
    for path, found in by_path.items():
        name = next((shown for head, shown in SHOWN.items() if path.startswith(head)), None)
        if name is not None:
            tightest = np.argmin([terms for _, _, terms in found], 0)[None]
            chosen = [np.take_along_axis(np.stack(a), tightest, 0) for a in zip(*found)]
            parts.setdefault(name, []).append([np.ravel(a) for a in chosen])
    return {name: measured(*map(np.concatenate, zip(*p))) for name, p in parts.items()}


def measured(stored, value, terms) -> dict[str, float]:
    """Honest error, and what escapes, of nonzero entries."""
    some = stored != 0
    stored, value, terms = stored[some], value[some], terms[some]
    bound, size = K * U * terms, np.abs(stored)
    loose = np.maximum(ATOL, RTOL * size)
    with np.errstate(divide='ignore', invalid='ignore'):
        honest = np.nan_to_num(np.abs(stored - value) / (U * terms))
    caught = np.abs(1.05 * stored - value)
    return {
        'entries': int(some.sum()),
        'worst': float(honest.max()),
        'zeroed': float(np.mean(np.abs(value) <= bound)),
        'zeroed_atol': float(np.mean(size <= loose)),
        'caught': float(np.mean(caught > bound)),
        'caught_atol': float(np.mean(np.abs(caught) > loose)),
        'escapes_half': float(np.median(bound / size)),
        'escapes_most': float(np.quantile(bound / size, 0.999)),
    }


def percent(share: float) -> str:
    """A share with the digits that it needs; never a full 100 that is not one."""
    if share in (0.0, 1.0):
        return f'{100 * share:.0f} %'
    text = f'{100 * share:.4f}' if share < 1e-4 or share > 0.9999 else f'{100 * share:.2f}'
    return f'{text} %'


def of_gradients(rows: list[dict]) -> str:
    head = ['cell, N, B, loss times', 'worst honest error', 'zero unseen: atol/rtol', 'k = 64']
    head += ['5 % off is caught: atol/rtol', 'k = 64']
    body = []
    for row in rows:
        g = row['fields']['gradients']
        body.append(
            [
                '{}, {}, {}, {:g}'.format(*row['case']),
                f'{g["worst"]:.1f} u',
                percent(g['zeroed_atol']),
                percent(g['zeroed']),
                percent(g['caught_atol']),
                percent(g['caught']),
            ]
        )
    return table(head, body)


def of_fields(row: dict) -> str:
    head = ['field', 'worst honest error', 'escapes: half of the entries', '99.9 % of them']
    head += ['zero unseen', '5 % off is caught']
    body = [
        [
            name,
            f'{f["worst"]:.1f} u',
            f'a change of {f["escapes_half"]:.1e}',
            f'{f["escapes_most"]:.1e}',
            percent(f['zeroed']),
            percent(f['caught']),
        ]
        for name, f in row['fields'].items()
    ]
    return table(head, body)


def bounds() -> list[dict]:
    """What the bounds let through, of every case."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            receipt = recorded(*case, Path(folder))
            result = reconcile(receipt)
            row = {'case': case, 'verdict': result.verdict, 'loose': dict(result.loose)}
            rows.append({**row, 'fields': errors(receipt)})
            print(case, result.verdict, result.loose, file=sys.stderr)
    return rows


def main() -> None:
    """Measure what is asked for, keep the records, and put the tables into the page."""
    found = json.loads(RESULTS.read_text())
    for name in sys.argv[1:] or ('bounds', 'costs'):
        found[name] = bounds() if name == 'bounds' else [costs(*case) for case in COSTS]
        RESULTS.write_text(json.dumps(found, indent=1) + '\n')
    write_page(found)


def tables(found: dict) -> dict[str, str]:
    """The tables of the page."""
    small = {
        row['case'][0]: row for row in found['bounds'] if tuple(row['case'][1:]) == (128, 32, 0.01)
    }
    return {
        'gradients': of_gradients(found['bounds']),
        **{f'fields of {cell}': of_fields(small[cell]) for cell in ('lif', 'rnn')},
        'costs': of_costs(found['costs']),
    }


def write_page(found: dict) -> None:
    """Put the tables between their marks."""
    text = PAGE.read_text()
    for name, new in tables(found).items():
        mark, end = MARKS.format(name), MARKS.format(f'end of {name}')
        before, rest = text.split(mark)
        text = f'{before}{mark}\n{new}\n{end}{rest.split(end)[1]}'
    PAGE.write_text(text)


if __name__ == '__main__':
    main()
