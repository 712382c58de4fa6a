"""The aims of speed, and what the results say about each of them."""

from __future__ import annotations

from typing import NamedTuple

from figures import DROPPED, FACTORISED, HAND, WINDOWS, ms, points, ratio, span
from rows import MAIN, ONE_STATE, SEVERAL
from tables import auto, table

LONG = 1000  # steps of the rows of linear loops


class Aim(NamedTuple):
    """``what`` against ``reference`` takes at most these ratios, the first of them first."""

    what: str
    reference: str
    limits: tuple
    found: list


def ratios(rows, ours: str, theirs) -> list:
    theirs = theirs if isinstance(theirs, tuple) else (theirs,)
    return [ratio(row, (ours,), theirs) for row in rows]


def beside_bptt(found: dict) -> list[Aim]:
    """The gradient of a sequence beside both references, in the oldest environments."""
    sequences, cells = (
        [row for row in found[part] if row['pair'] == 'oldest'] for part in ('sequences', 'cells')
    )
    several = [r for r in cells if r['spec'][0] in SEVERAL and r['spec'][3] < LONG]
    long = [row for row in cells if row['spec'][3] >= LONG]
    one = [row for row in sequences if tuple(row['spec']) in MAIN]
    wide = [row for row in cells if row['spec'][:2] in (('lstm', 256), ['lstm', 256])]
    scan, hand, drop, trace = '`jax.grad` of a scan', 'BPTT by hand', 'd_rtrl drop', 'd_rtrl trace'
    several_named = 'LSTM, ALIF, LIF with synapse, LRU, 100 to 256 units'
    every = [row for _, _, row in points(found)]
    return [
        Aim(f'{several_named}, trace dropped', scan, (0.8,), ratios(several, drop, 'bptt')),
        Aim(f'{several_named}, trace kept', scan, (1.2, 1.0), ratios(several, trace, 'bptt')),
        Aim('rnn, gru, trace dropped', hand, (0.8, 0.67), ratios(one, drop, HAND)),
        Aim('lstm 256, trace dropped', hand, (1.0,), ratios(wide, drop, HAND)),
        Aim('rnn, gru, lstm 256, trace kept', hand, (1.0,), ratios([*one, *wide], trace, HAND)),
        Aim('minGRU, LRU, T 1,000, trace dropped', scan, (0.8,), ratios(long, drop, 'bptt')),
        Aim('the same', hand, (1.0,), ratios(long, drop, HAND)),
        Aim('points of the plots, trace dropped', scan, (1.0,), ratios(every, drop, 'bptt')),
    ]


def others(found: dict) -> list[Aim]:
    both = [*found['sequences'], *found['cells']]
    updates = [row for row in found['updates'] if row['pair'] == 'oldest']
    one = [row for row in updates if row['spec'][0] in ONE_STATE]
    two = [row for row in updates if row['spec'][0] not in ONE_STATE]
    memory = 'one read and write of the trace', 'etrace_train', 'read and write of the trace'
    chosen = [auto(row, carry) for row in found['windows'] for carry in ('drop', 'trace')]
    eager = [ms(row, 'learner(x)') for row in found['once']['eager']]
    return [
        Aim('ES_D_RTRL', 'its `pp_prop`', (0.6,), ratios(both, 'es_d_rtrl trace', FACTORISED)),
        Aim('trace kept', 'its best window', (0.33,), ratios(both, 'd_rtrl trace', WINDOWS)),
        Aim('trace dropped', 'its best window', (0.33,), ratios(both, 'd_rtrl drop', DROPPED)),
        Aim('an update at each step, S = 1', memory[0], (2.5, 2.0), ratios(one, *memory[1:])),
        Aim('an update at each step, S = 2', memory[0], (3.0,), ratios(two, *memory[1:])),
        Aim('the same, own loop', memory[0], (3.0,), ratios(two, 'own loop', memory[2])),
        Aim("`window='auto'`", 'the best fixed window', (1.1,), chosen),
        Aim('`learner(x)` from Python, GRU 64', '1 ms', (1.0,), eager),
    ]


def aims(found: dict) -> str:
    """A table of the aims: the spread of what was found, and how many rows reach each limit."""

    def row(aim: Aim) -> list[str]:
        values = [v for v in aim.found if v is not None]
        limits = ', then '.join(f'{limit:.2f}' for limit in aim.limits)
        met = ', '.join(str(sum(v <= limit for v in values)) for limit in aim.limits)
        return [aim.what, aim.reference, limits, span(values), f'{met} of {len(values)}']

    each = [*beside_bptt(found), *others(found)]
    return table(['what', 'against', 'at most', 'found', 'reached by'], [row(a) for a in each])
