"""What a verifier's bound lets through, on honest float32 steps of common cells.

    python benchmarks/receipts.py

Each net runs ``STEPS`` steps under ``receipts.capture``. Of the last step every field is compared
with what the rules derive in float64: the worst honest error in units of ``u sum|terms|``, the
share of nonzero entries that could be zero unseen, and how many entries are caught that are off by
5 %, for k = 64 and for a tolerance of {atol 1e-5, rtol 1e-3}. The table goes to
``benchmarks/results/receipts.json`` and into ``docs/explanation/receipts.md``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
from tables import table

import braintrace
from braintrace import receipts
from braintrace.receipts.verifier import parse_run, reconcile
from braintrace.receipts.verifier.bounds import UNIT
from braintrace.receipts.verifier.checks import Check, Gated, Limits
from braintrace.receipts.verifier.files import resolve_files
from braintrace.receipts.verifier.record import Record
from braintrace.receipts.verifier.rules import STEP_RULES

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
        file, recording, {'name': 'adam', 'config': config}, every=STEPS - 1
    )

    @jax.jit
    def step(params, opt, state, x, noise):
        outputs, _ = learner.step(params, state, x)
        y = outputs + scale * noise
        _, grads, new, record = recording.grad(params, state, x, y)
        updates, after = optimizer.update(grads, opt, params)
        return y, record, updates, after, optax.apply_updates(params, updates), new

    for x, n in zip(xs, noise, strict=True):
        y, record, updates, after, moved, new = step(params, opt, state, x, n)
        recorder.write(params, state, x, y, record, updates, opt, after, moved)
        params, opt, state = moved, after, new
    last = parse_run(file.read_bytes())[-1]
    last = resolve_files(last, folder)
    return last


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
    body = [
        [
            name,
            f'{f["worst"]:.1f} u',
            f'a change of {f["escapes_half"]:.1e}',
            f'{f["escapes_most"]:.1e}',
        ]
        for name, f in row['fields'].items()
    ]
    return table(head, body)


def main() -> None:
    """Measure every case, keep the records, and put the tables into the page."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            receipt = recorded(*case, Path(folder))
            result = reconcile(receipt)
            rows.append({'case': case, 'verdict': result.verdict, 'fields': errors(receipt)})
            print(case, result.verdict, rows[-1]['fields']['gradients'], file=sys.stderr)
    RESULTS.write_text(json.dumps(rows, indent=1) + '\n')
    write_page(rows)


def write_page(rows: list[dict]) -> None:
    """Put the tables between their marks."""
    text = PAGE.read_text()
    shown = next(row for row in rows if row['case'][0] == 'lif' and row['case'][3] == 0.01)
    for name, new in (('gradients', of_gradients(rows)), ('fields', of_fields(shown))):
        mark, end = MARKS.format(name), MARKS.format(f'end of {name}')
        before, rest = text.split(mark)
        text = f'{before}{mark}\n{new}\n{end}{rest.split(end)[1]}'
    PAGE.write_text(text)


if __name__ == '__main__':
    main()
