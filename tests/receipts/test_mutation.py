"""Every number of a record matters: none can be changed by a little unseen."""

from __future__ import annotations

import numpy as np
import pytest

from braintrace.receipts.verifier import reconcile, reconcile_run
from tests import tiers
from tests.receipts import making
from tests.receipts.making import get, places, put

# Models are tiny, and each number has an effect: all lanes of a reset start anew, as the initial carry
# of a lane that was not reset has no meaning; and records stand on both sides of it, as a lane's id and
# clock mean something only where the next record continues them.
RUNS = {
    'sgd': dict(optimizer='sgd'),
    'momentum': dict(optimizer='momentum', readout='linear'),
    'nesterov-window': dict(optimizer='nesterov', window=2),
    'adam-decay': dict(optimizer='adam-decay', credit='whole'),
    'adamw-frozen': dict(optimizer='adamw', frozen=('b',)),
    'es': dict(algorithm='ES_D_RTRL', loss='softmax_ce'),
    'es-reset': dict(algorithm='ES_D_RTRL', reset=(2,), steps=4, reduction='sum'),
    'whole-filter': dict(credit='whole', kappa=0.6, readout='linear', loss='softmax_ce'),
    'reset-filter': dict(kappa=0.6, reset=(2,), steps=4),
    'fixed': dict(feedback='fixed', optimizer='sgd-decay', surrogate='fast_sigmoid'),
    'modulator-window': dict(feedback='modulator', window=2, surrogate='arctan'),
    'no-optimizer': dict(optimizer='none', reset_gradient=False, surrogate='multi_gaussian'),
}
CELLS, DTYPES = ('rnn', 'lif', 'alif'), ('float64', 'float32')
FREE = {('numeric', 'k')}  # it may tighten a bound and never loosens one
NOTES = ('labels', 'helper')


def mutations(record):
    """``(place, new value)`` of each number of a record, changed by a little."""
    for at in places(record):
        value = get(record, at)
        if at in FREE or at[:1] in [(name,) for name in NOTES]:
            continue
        if type(value) is int:
            yield at, value + 1
        elif type(value) is float:
            yield from ((at, new) for new in (value * 1.01 + 1e-3, value * 1.05) if new != value)


def survives(records, i, bad) -> bool:
    """Whether neither the record nor the run is refused."""
    found = reconcile(bad)
    if found.ok:
        found = reconcile_run([*records[:i], bad, *records[i + 1 :]])
    assert all(failure.path != 'internal' for failure in found.failures), found.failures
    return found.ok


def few(run, cell, dtype):
    return (run, cell, dtype) == ('nothing', 'lif', 'float64')


@tiers.in_turn(few, run=RUNS, cell=CELLS, dtype=DTYPES)
def test_no_number_can_be_changed_unseen(run, cell, dtype):
    records = making.run(cell, dtype=dtype, sizes=(1, 2, 2, 2), **RUNS[run])
    assert reconcile_run(records).verdict == 'rederived'
    for i in range(len(records)):
        found = [
            (at, get(records[i], at), new)
            for at, new in mutations(records[i])
            if survives(records, i, put(records[i], at, new))
        ]
        assert not found, (i, found[:5])
