"""The figures in the texts of README and ``docs/performance.md``, taken from the results."""

from __future__ import annotations

from rows import PAIRS, SEVERAL

WINDOWS = ('public d_rtrl', 'public d_rtrl 2 windows', 'public d_rtrl 1 window')
DROPPED = (*WINDOWS, 'public d_rtrl 1 window, reset')
FACTORISED = ('public pp_prop', 'public pp_prop 1 window')
HAND = ('by hand', 'by hand, associative')  # with either kind of loop
OWN_LOOPS = ('public own loop', 'public own loop, fast_solve=False')


def ms(row: dict, *names: str) -> float | None:
    """Milliseconds a step of the fastest of these columns."""
    times = [row['times'].get(name, {}).get('median') for name in names]
    found = [t for t in times if t is not None]
    return min(found) / row['spec'][3] * 1e3 if found else None


def fastest(row: dict, names: tuple) -> str:
    """The name of the fastest of these columns."""
    return min((n for n in names if ms(row, n)), key=lambda n: ms(row, n), default='')


def ratio(row: dict, ours: tuple, theirs: tuple) -> float | None:
    a, b = ms(row, *ours), ms(row, *theirs)
    return a / b if a and b else None


def two(x: float) -> str:
    """A number in two digits."""
    return f'{float(f"{x:.2g}"):g}' if x < 10 else f'{x:.0f}'


def span(values) -> str:
    values = [v for v in values if v is not None]
    if not values:
        return '(not measured)'
    low, high = two(min(values)), two(max(values))
    return low if low == high else f'{low} to {high}'


def of(rows: list, ours: str, theirs, pair: str = PAIRS[0]) -> list:
    """The ratio in every row of a pair of environments."""
    theirs = theirs if isinstance(theirs, tuple) else (theirs,)
    return [ratio(row, (ours,), theirs) for row in rows if row['pair'] == pair]


def points(found: dict):
    """Every row of the plots once, with its size in words."""
    seen = set()
    for axis, letter, column in (
        ('units', 'N', 1),
        ('steps', 'T', 3),
        ('batch', 'B', 4),
        ('layers', 'layers', 5),
    ):
        for row in found['scaling'].get(axis, ()):
            spec = tuple(row['spec'])
            if spec not in seen:
                seen.add(spec)
                yield letter, spec[column], row


def slower(found: dict, ours: str, theirs: str) -> str:
    """The points of the plots at which ours takes longer, as 'N = 64, 2,048; B = 1'."""
    places: dict = {}
    for letter, size, row in points(found):
        if (r := ratio(row, (ours,), (theirs,))) and r > 1:
            places.setdefault(letter, []).append(f'{size:,}')
    named = [f'{letter} = ' + ', '.join(sizes) for letter, sizes in places.items()]
    return '; '.join(named) or 'nowhere'


def count(found: dict, ours: str, theirs: str) -> str:
    """At how many sizes of the plots, of the corners and of one core ours takes longer."""
    rows = [row for _, _, row in points(found)]
    rows += [row for each in found['corners'].values() for row in each]
    ratios = [ratio(row, (ours,), (theirs,)) for row in rows]
    return f'{sum(r > 1 for r in ratios if r)} of {sum(r is not None for r in ratios)}'


def name_of(spec) -> str:
    return f'{spec[0]} {spec[1]}'


def met(rows: list, ours: str, theirs, aim: float, pair: str = PAIRS[0]) -> str:
    """The networks in which this ratio is at most the aim."""
    theirs = theirs if isinstance(theirs, tuple) else (theirs,)
    ratios = {
        name_of(row['spec']): ratio(row, (ours,), theirs) for row in rows if row['pair'] == pair
    }
    if not ratios:
        return '(not measured)'
    return ', '.join(f'`{name}`' for name, r in ratios.items() if r and r <= aim) or 'none'


def each(rows: list, ours: str, theirs: str) -> str:
    """This ratio for every network, by name."""
    return ', '.join(
        f'`{name_of(row["spec"])}` {span([ratio(row, (ours,), (theirs,))])}' for row in rows
    )


def mebibytes(found: dict, rule: str, steps: int) -> str:
    return next(
        (
            f'{r["peak"] / 2**20:.0f}'
            for r in found['memory']
            if r['rule'] == rule and r['steps'] == steps and 'peak' in r
        ),
        '(not measured)',
    )


def version(found: dict, pair: str) -> str:
    return found['environments'].get(pair, {}).get('public', {}).get('braintrace', '(none)')


def lane(found: dict, pair: str) -> str:
    at = found['environments'].get(pair, {}).get('ours')
    return f'Python {at["python"]}, JAX {at["jax"]}' if at else '(not measured)'


def runs(found: dict) -> str:
    """Which parts are of which run, if there were several."""
    parts = sorted(found.keys() - {'runs', 'environments'})
    of_run: dict = {}
    for part in parts:
        of_run.setdefault(found.get('runs', {}).get(part, {}).get('run', 'earlier'), []).append(
            part
        )
    if len(of_run) < 2:
        return 'All figures are of one run.'
    each = '; '.join(f'{run}: {", ".join(names)}' for run, names in sorted(of_run.items()))
    return f'The figures are of several runs, so compare within a row only ({each}).'


def figures(found: dict) -> dict:
    """Each figure of the two texts, by the name of its placeholder."""
    values = beside_bptt(found) | {'runs': runs(found)}
    for pair in PAIRS:
        values |= beside_public(found, pair)
    return values | of_this_package(found)


def beside_bptt(found: dict) -> dict:
    """Our methods over BPTT, by ``jax.grad`` of a scan and by hand."""
    rows = found['sequences']
    values = {'hand scan': span(of(found['sequences'], 'by hand', 'bptt'))}
    for key, reference in (('scan', 'bptt'), ('hand', 'by hand')):
        for mode in ('drop', 'trace'):
            ours = f'd_rtrl {mode}'
            values |= {
                f'{mode} {key}': span(of(rows, ours, reference)),
                f'latest {mode} {key}': span(of(rows, ours, reference, PAIRS[1])),
                f'slower {mode} {key}': slower(found, ours, reference),
                f'count {mode} {key}': count(found, ours, reference),
            } | of_cells(found, mode, key, ours)
    return values | {'several hand scan': several_by_hand(found)}


def several(found: dict, ours: str, theirs: tuple) -> list:
    """A ratio in every row of cells of several states."""
    rows = [r for r in found['cells'] if r['pair'] == PAIRS[0] and r['spec'][0] in SEVERAL]
    return [ratio(row, (ours,), theirs) for row in rows]


def several_by_hand(found: dict) -> str:
    rows = [r for r in found['cells'] if r['pair'] == PAIRS[0] and r['spec'][0] in SEVERAL]
    return span(ratio(row, HAND, ('bptt',)) for row in rows)


def of_cells(found: dict, mode: str, key: str, ours: str) -> dict:
    """The ratio to a reference in cells of several states, in minGRU and behind an encoder."""
    theirs = ('bptt',) if key == 'scan' else HAND
    values = {f'several {mode} {key}': span(several(found, ours, theirs))}
    for kind in ('mingru', 'conv_lstm'):
        rows = [row for row in found['cells'] if row['spec'][0] == kind]
        values[f'{kind} {mode} {key}'] = span(ratio(row, (ours,), theirs) for row in rows)
    return values


def beside_public(found: dict, pair: str) -> dict:
    """Our methods over the public package's methods, in a pair of environments."""
    rows, updates = found['sequences'], found['updates']
    return {
        f'{pair} version': version(found, pair),
        f'{pair} lane': lane(found, pair),
        f'{pair} drop peer': span(of(rows, 'd_rtrl drop', DROPPED, pair)),
        f'{pair} trace peer': span(of(rows, 'd_rtrl trace', WINDOWS, pair)),
        f'{pair} es peer': span(of(rows, 'es_d_rtrl trace', FACTORISED, pair)),
        f'{pair} loop peer': span(of(updates, 'own loop', OWN_LOOPS, pair)),
        f'{pair} train peer': span(of(updates, 'etrace_train', OWN_LOOPS, pair)),
        f'{pair} loop met': met(updates, 'own loop', OWN_LOOPS, 0.12, pair),
        f'{pair} train met': met(updates, 'etrace_train', OWN_LOOPS, 0.12, pair),
    }


def of_this_package(found: dict) -> dict:
    """Our calls beside each other and beside a read and write of the trace, and memory."""
    rows, updates = found['sequences'], found['updates']
    gradients = [row for row in rows if row['pair'] == PAIRS[0]]
    learning = [row for row in updates if row['pair'] == PAIRS[0]]
    simple = [row for row in learning if row['spec'][0] not in SEVERAL]
    twice = [row for row in learning if row['spec'][0] in SEVERAL]
    whole = [ms(row, 'd_rtrl drop') for row in gradients]
    memory = 'read and write of the trace'
    return {
        'drop jit': span(of(rows, 'd_rtrl drop, in jit', 'd_rtrl drop')),
        'trace jit': span(of(rows, 'd_rtrl trace, in jit', 'd_rtrl trace')),
        'train read and write': span(of(simple, 'etrace_train', memory)),
        'train of two states': span(of(twice, 'etrace_train', memory)),
        'train whole': span(
            ms(row, 'etrace_train') / w if w else None for row, w in zip(simple, whole)
        ),
        'met 2.5': met(simple, 'etrace_train', memory, 2.5),
        'met 2': met(simple, 'etrace_train', memory, 2.0),
        'met 3': met(twice, 'etrace_train', memory, 3.0),
        'bfloat16': each(simple, 'bfloat16', 'etrace_train'),
        'MiB million': mebibytes(found, 'd_rtrl', 1_000_000),
        'MiB thousand': mebibytes(found, 'd_rtrl', 1000),
        'MiB bptt': mebibytes(found, 'bptt', 100_000),
    }
