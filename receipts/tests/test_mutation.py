"""Every number of a record matters: none can be changed by a little unseen."""

from __future__ import annotations

import pytest

import making
from braintrace_receipts import reconcile, reconcile_run
from making import get, places, put

# Models are tiny, and each number has an effect: all lanes of a reset start again, as the initial
# carry of a lane that was not reset has no meaning; and two records are on each side of it, as a
# lane's id and clock mean something only where the next record continues them.
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
    """``(place, new value)`` of each number of a record, changed by 1 % or more."""
    for at in places(record):
        value = get(record, at)
        if at in FREE or at[:1] in [(name,) for name in NOTES]:
            continue
        if type(value) is int:
            yield at, value + 1
        elif type(value) is float:
            news = (value * 1.01 + 1e-3, value * 1.05)  # near -0.1 the first changes nothing
            yield from ((at, new) for new in news if abs(new - value) > 0.009 * abs(value))


def survivors(records, i, chosen) -> list:
    """Changes that neither the record nor the run is refused for."""
    found = []
    for at, new in chosen:
        bad = put(records[i], at, new)
        result = reconcile(bad)
        if result.ok:
            result = reconcile_run([*records[:i], bad, *records[i + 1 :]])
        assert all(failure.path != 'internal' for failure in result.failures), result.failures
        found += [(i, at, get(records[i], at), new)] if result.ok else []
    return found


def made(run, cell, dtype):
    records = making.run(cell, dtype=dtype, sizes=(1, 2, 2, 2), **RUNS[run])
    assert reconcile_run(records).verdict == 'rederived'
    return records


def one_of_each(record):
    """A change of one number of each array, and of each number outside of them."""
    of_field: dict = {}
    for at, new in mutations(record):
        field = tuple(key for key in at if isinstance(key, str))
        of_field.setdefault(field, []).append((at, new))
    for i, found in enumerate(of_field.values()):
        yield found[i % len(found)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ('run', 'cell', 'dtype'),
    [(run, CELLS[i % 3], DTYPES[i % 2]) for i, run in enumerate(RUNS)],
)
def test_no_field_can_be_changed_unseen(run, cell, dtype):
    records = made(run, cell, dtype)
    i = len(records) // 2
    assert not survivors(records, i, one_of_each(records[i]))


@pytest.mark.nightly
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('cell', CELLS)
@pytest.mark.parametrize('run', RUNS)
def test_no_number_can_be_changed_unseen(run, cell, dtype):
    records = made(run, cell, dtype)
    for i, record in enumerate(records):
        assert not survivors(records, i, mutations(record))


def test_notes_and_the_asked_bound_are_the_only_numbers_without_effect():
    record = making.run('rnn', steps=1)[0]
    record |= {'labels': {'accuracy': '0.9'}, 'helper': {'seconds': '3'}}
    record['numeric']['k'] = 70.0
    changed = {'labels': {'accuracy': '0.1'}, 'helper': {}}
    numeric = {**record['numeric'], 'k': 1e9}
    assert reconcile({**record, **changed, 'numeric': numeric}).verdict == 'rederived'
