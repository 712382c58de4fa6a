"""Eight devices: what moves between them, where arrays lie, and the numbers of one device."""

import functools

import pytest

from tests.devices.cells import CELLS, B, I, N, O, T
from tests.devices.programs import CALLS, LAYOUTS, Row, run_tests_of

ROOM = 1.1
# The leak of an LRU is no product: three parts of its gradient are summed, each as large as it is.
GATE = [
    Row('rnn'),
    Row('lstm', call='updates'),
    Row('sparse_lif', call='step'),
    Row('alif', platform='cuda'),
    Row('conv'),
    Row('lru'),
    Row('rnn', 'delayed', call='delayed'),
    Row('rnn', 'delayed', call='delayed', axes='explicit'),
    Row('lstm_apart', layout='both'),
]
NIGHT = [
    *(Row(cell, rule, call=call) for cell in CELLS for rule in ('d_rtrl', 'es_d_rtrl')
      for call in ('step', 'window', 'updates')),
    *(Row(cell, layout=layout) for cell in ('rnn', 'gru', 'lstm', 'lstm_apart', 'lru')
      for layout in ('units', 'both')),
    *(Row(cell, call=call, platform='cuda') for cell in CELLS for call in ('step', 'updates')),
    *(Row('rnn', rule, call=call, axes='explicit') for rule in ('d_rtrl', 'es_d_rtrl')
      for call in ('step', 'window', 'updates')),
    Row('rnn', call='exact'),
    *(Row(cell, call=call, layout='one') for cell in CELLS for call in ('step', 'window')),
]  # fmt: skip


def bound(row: Row, found: dict) -> float:
    """The bytes that a call may move."""
    ops = {k: s for k, s in CELLS[row.cell].shapes.items() if len(s) == 2 and k != 'out'}
    factors = found['bytes'] * T * B * sum(i + o for i, o in (*ops.values(), (I, N)))
    if row.layout == 'units':
        return 3 * factors
    room = ROOM * (found['weights'] + (factors if row.layout == 'both' else 0))
    if row.call == 'exact':  # the window and what is before it, and plain weights at each step
        return 2 * room + found['bytes'] * T * N * O
    if row.cell == 'lru' and row.rule == 'd_rtrl':
        room += 2 * CALLS[row.call] * found['bytes'] * N
    return room


def check(rows: list[Row]):
    for row, found in zip(rows, run_tests_of(rows, x64=True), strict=True):
        assert found['error'] < 1e-11, (row, found['error'])
        assert found['moved'] <= bound(row, found), (row, found['moved'], found['collectives'])
        largest = max((size for _, size, *_ in found['collectives']), default=0)
        if row.layout == 'lanes':
            assert found['trace'] * 8 == found['whole trace'], (row, found)
        if row.layout != 'lanes' and row.call == 'window':
            assert largest < found['whole trace'] / 2, (row, found['collectives'])
            # beside the gradient nothing moves that has a weight's shape, which a trace has too
            parts = LAYOUTS[row.layout][1]
            of_weights = [s for s in CELLS[row.cell].shapes.values() if s[0] == I + N]
            weights = [[i, o // n] for i, o in of_weights for n in (1, parts)]
            for opcode, _, _, shapes in found['collectives']:
                moved = [sorted(shape[-2:]) for shape in shapes if opcode != 'all-reduce']
                assert not any(sorted(w) in moved for w in weights), (row, opcode, shapes)


@pytest.mark.slow
def test_only_the_gradient_moves_between_devices_that_share_the_lanes():
    check(GATE)


@functools.cache
def parts(size: int = 12):
    return [NIGHT[i : i + size] for i in range(0, len(NIGHT), size)]


@pytest.mark.nightly
@pytest.mark.parametrize('part', range(len(parts())))
def test_every_cell_and_call_moves_no_more(part):
    check(parts()[part])
