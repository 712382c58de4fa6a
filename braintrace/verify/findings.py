"""The sentences of a diagnosis: what is lost, where, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .. import Report
from .diagnosis import Activity, ParameterRow, TraceGrowth

NOTICED = 0.01  # a share of the history, or 1 - cosine, that is worth a sentence
SOON = 10_000  # steps to overflow
IDLE = 0.2  # share of silent or saturated units
ALIGNED, FACTOR = 0.9, 2  # a smaller cosine, or a larger ratio of norms, is far from BPTT
HISTORY = 'history of the gradient'  # the part that the losses read from the past
LISTED = 4  # parameters that one sentence gives numbers for

SHOWN = {
    ('spikes', 'silent'): ('they never spike', 'give them more input, or a lower threshold'),
    ('spikes', 'saturated'): (
        'they spike at more than half of all steps',
        'give them less input, or a higher threshold',
    ),
    ('states', 'silent'): (
        'their states stay at zero',
        'nothing reaches them; look at the weights before them, and at the units that these read',
    ),
    ('states', 'saturated'): (
        'their states are at a bound',
        'give them less input, or smaller weights',
    ),
}


def findings(
    report: Report,
    rows: tuple[ParameterRow, ...],
    growth: tuple[TraceGrowth, ...],
    activity: tuple[Activity, ...],
    not_measured: str,
    flat: tuple[str, ...],
) -> tuple[str, ...]:
    """The sentences on gradients, then the others; ``not_measured``: why no dropped share is known,
    or empty; ``flat``: the parameters without any gradient.
    """
    by_path = {row.path: row for row in rows}
    spiking = {a.group for a in activity if a.shown_by == 'spikes'}
    found = [
        *_far(rows),
        *_cuts(report, by_path, spiking),
        *_without_trace(report, by_path),
        *_rest(report, rows),
    ]
    if not found and not any(map(_differs, rows)):
        found = ['Every gradient is that of BPTT: no path is left out.']
    if flat:
        found.append(
            f'The gradient is zero in this window, by BPTT too: {", ".join(flat)}. On the way to '
            'the loss there is a weight of zero, a unit without a slope at its value, or what has '
            'none anywhere, as `v > threshold`: write `nn.surrogate.triangle()(v - threshold)`.'
        )
    if not_measured:
        found.append(f'What is dropped of the {HISTORY} is not measured: {not_measured}')
    return tuple([*found, *_growth(growth), *_activity(activity)])


def _far(rows: tuple[ParameterRow, ...]) -> Iterator[str]:
    """Traced parameters that learn in another direction, or at another rate, than with BPTT."""
    far = [
        row
        for row in rows
        if row.history == 'part'
        and not (row.cosine > ALIGNED and 1 / FACTOR < row.norm_ratio < FACTOR)
    ]
    texts = []
    for row in sorted(far, key=lambda row: row.cosine):
        lost = sorted(
            ((share, group) for group, share in row.dropped_by_group.items() if share > NOTICED),
            reverse=True,
        )
        where = ', '.join(f'{100 * share:.0f} % in {_shown(group)}' for share, group in lost)
        dropped = f'; dropped of the {HISTORY}: {where}' if where else ''
        texts.append(f'{row.path} ({_quality(row)}{dropped})')
    if texts:
        more = f', and {len(texts) - LISTED} more' if len(texts) > LISTED else ''
        listed = ', '.join(texts[:LISTED])
        yield f'Far from the gradient of BPTT, though with a trace: {listed}{more}.'


def _cuts(report: Report, rows: dict[str, ParameterRow], spiking: set[str]) -> Iterator[str]:
    """Where each group's past is cut: within the group, and on its way through other groups'
    states.
    """
    places: dict[tuple[str, tuple[str, ...]], list] = {}
    for cut in report.cuts:
        for group in cut.reads:
            ways = (group,) if group in cut.reaches else cut.reaches
            places.setdefault((group, ways), []).append(cut)
    members = {g.name: g.members for g in report.groups}
    leaky = {found.path: found for found in report.graph.found('leaky-readout')}
    for (group, ways), cuts in places.items():
        mine = [
            rows[p]
            for rel in report.relations
            if group in rel.groups
            for paths in rel.parameters.values()
            for p in paths
        ]
        at, here, others = _places(cuts), _shown(group), ' and '.join(map(_shown, ways))
        if not mine:
            continue
        if ways == (group,):
            yield (
                f'Units of {here} read each other at {at}; a trace holds what each unit remembers '
                f'by itself only.{_shares(mine, ways)} To lose nothing there, let each unit read '
                f'only itself from step to step{"" if group in spiking else ", as in MinGRUCell"}.'
            )
        elif ways:
            state = 'state' if sum(len(members[g]) for g in ways) == 1 else 'states'
            advice = (
                f'To lose less, let {others} forget sooner, let the loss see {here} directly, '
                "or take exact windows (inside='exact')."
            )
            if readouts := [leaky[cut.op] for cut in cuts if cut.op in leaky]:
                advice = readouts[0].row.advice
            yield (
                f'The temporal path of {here} through the {state} of {others} is lost at '
                f'{at}.{_shares(mine, ways)} {advice}'
            )
        else:
            yield (
                f'What {here} sends to later steps through {at} is in no trace. Make what carries '
                'it a hidden state of its shape.'
            )


def _shown(group: str) -> str:
    """The name of a group, which is that of its states; of many the first one's."""
    first, *others = group.split(',')
    return group if len(others) < 3 else f'{first} and {len(others)} more states'


def _places(cuts: list) -> str:
    """The cuts, ops of one kind at one place together."""
    found: dict[tuple[str, str], list[str]] = {}
    for cut in cuts:
        ops = found.setdefault((cut.primitive or cut.what, cut.location), [])
        ops += [cut.op] if cut.op else []
    return ', '.join(
        f'{what}{f" ({_folded(ops)})" if ops else ""}{f" [{place}]" if place else ""}'
        for (what, place), ops in found.items()
    )


def _folded(paths: list[str]) -> str:
    """Paths that differ in one part only as one, ``cell/{Wz,Wr}/weight``; others one after
    another.
    """
    parts = list(zip(*(p.split('/') for p in paths), strict=False))
    differ = [k for k, part in enumerate(parts) if len(set(part)) > 1]
    if len(differ) != 1 or any(p.count('/') + 1 != len(parts) for p in paths):
        return ', '.join(dict.fromkeys(paths))
    return '/'.join(
        '{' + ','.join(part) + '}' if k in differ else part[0] for k, part in enumerate(parts)
    )


def _without_trace(report: Report, rows: dict[str, ParameterRow]) -> Iterator[str]:
    """Uses of a parameter, and whole parameters, that have no trace."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for row in report.parameters:
        uses = [left for left in row.left_out if left.kind in ('use', 'lost')]
        if row.history == 'part' and uses:
            yield (
                f'{row.path} has a trace, but not for {"; ".join(map(str, uses))}: '
                f'{_quality(rows[row.path])}. Apply every use of it with a '
                'braintrace op whose result reaches the state directly.'
            )
        if row.history == 'none':
            alike.setdefault((row.meaning, row.advice, row.location), []).append(
                f'{row.path} ({_quality(rows[row.path])})'
            )
    for (meaning, advice, location), paths in alike.items():
        place = f' [{location}]' if location else ''
        of = ', '.join(paths)
        yield (
            f'Only the current step is in the gradient of {of}{place}: {meaning}. {advice}'.strip()
        )


def _rest(report: Report, rows: tuple[ParameterRow, ...]) -> Iterator[str]:
    """The rule's own approximation, and gradients that differ with nothing known to be left out."""
    if report.approximation:
        worst = min((row for row in rows if row.route != 'frozen'), key=lambda row: row.cosine)
        own = ' (its error goes back through W)' if report.graph.feedback else ''
        yield (
            f'{report.rule}: {report.approximation}. The lowest cosine to BPTT{own} is '
            f'{worst.cosine:.3f}, of {worst.path}.'
        )
        return
    for row in rows:
        if not row.left_out and _differs(row):
            yield (
                f'{row.path} should have the whole gradient, but differs from BPTT: '
                f'{_quality(row)}. If the gradients are above the '
                'level of rounding, compare in float64, and report this.'
            )


def _growth(growth: tuple[TraceGrowth, ...]) -> Iterator[str]:
    for t in growth:
        if not math.isfinite(t.norms[-1]):
            yield (
                f'The trace of {t.relation} is not finite: find the first such step in '
                'trace_growth, and look at that step of the model.'
            )
        elif t.steps_left < SOON:
            yield (
                f'The trace of {t.relation} grew {t.growth:.3g}-fold over the last half of the '
                f'window: at this pace it overflows in about {t.steps_left:.0f} steps. Keep the '
                'derivative of each state by itself below 1, as a leak does.'
            )


def _activity(activity: tuple[Activity, ...]) -> Iterator[str]:
    for a in activity:
        for kind, share in (('silent', a.silent), ('saturated', a.saturated)):
            if share > IDLE:
                shown, advice = SHOWN[a.shown_by, kind]
                units = f'{100 * share:.0f} % of the units of {_shown(a.group)}'
                yield f'{units} are {kind} ({shown}): {advice}.'


def _shares(rows: list[ParameterRow], groups: tuple[str, ...]) -> str:
    """What the parameters lose in the states of some groups."""
    shares = {
        row.path: 100 * sum(row.dropped_by_group.get(g, 0) for g in groups)
        for row in rows
        if row.dropped is not None
    }
    if not shares:
        return ''
    most, *_, least = sorted(shares, key=lambda p: -shares[p]) * 2
    if len(shares) > 2:
        low, high = (f'{shares[path]:.0f}' for path in (least, most))
        if low == high:
            return f' Dropped there: {high} % of the {HISTORY}, of each parameter.'
        return f' Dropped there: {low} to {high} % of the {HISTORY}, most for {most}.'
    each = ', '.join(f'{share:.0f} % for {path}' for path, share in shares.items())
    return f' Dropped there of the {HISTORY}: {each}.'


def _differs(row: ParameterRow) -> bool:
    """Whether a parameter learns with another gradient than BPTT's."""
    return row.route != 'frozen' and not (
        row.cosine > 1 - NOTICED and abs(row.norm_ratio - 1) < NOTICED
    )


def _quality(row: ParameterRow) -> str:
    return f'cosine {row.cosine:.3f}, norm ratio {row.norm_ratio:.3g}'
