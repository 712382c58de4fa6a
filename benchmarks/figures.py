"""The figures in the texts of README and ``docs/performance.md``, taken from the results."""

from __future__ import annotations

from columns import PAIRS, SEVERAL

WINDOWS = ('public d_rtrl', 'public d_rtrl 2 windows', 'public d_rtrl 1 window')
DROPPED = (*WINDOWS, 'public d_rtrl 1 window, reset')
FACTORISED = ('public pp_prop', 'public pp_prop 1 window')
HAND = ('by hand', 'by hand, associative')  # with either kind of loop
OWN_LOOPS = ('public own loop', 'public own loop, fast_solve=False')
MEMORY = 'read and write of the trace'


def ms(row: dict, *names: str) -> float | None:
    """Milliseconds a step of the fastest of these columns."""
    times = [row['times'].get(name, {}).get('median') for name in names]
    found = [t for t in times if t is not None]
    return min(found) / row['spec'][3] * 1e3 if found else None


def fastest(row: dict, names: tuple) -> str:
    """The name of the fastest of these columns."""
    return min((n for n in names if ms(row, n)), key=lambda n: ms(row, n), default='')


def ratio(row: dict, ours: str | tuple, theirs: str | tuple) -> float | None:
    """The time of the fastest of some columns over that of the fastest of others."""
    a, b = (ms(row, *((of,) if isinstance(of, str) else of)) for of in (ours, theirs))
    return a / b if a and b else None


def ratios(rows: list, ours: str | tuple, theirs: str | tuple) -> list:
    return [ratio(row, ours, theirs) for row in rows]


def two(x: float) -> str:
    """A number in two digits."""
    return f'{float(f"{x:.2g}"):g}' if x < 10 else f'{x:.0f}'


def span(values) -> str:
    values = [v for v in values if v is not None]
    if not values:
        return '(not measured)'
    low, high = two(min(values)), two(max(values))
    return low if low == high else f'{low} to {high}'


def rows_of(found: dict, part: str, pair: str = PAIRS[0], kinds: tuple = ()) -> list:
    """The rows of a part in a pair of environments, of some kinds of cells, by default of all."""
    rows = [row for row in found[part] if row['pair'] == pair]
    return [row for row in rows if not kinds or row['spec'][0] in kinds]


def points(found: dict):
    """Every row of the plots once, with its size in words."""
    seen = set()
    places = ('units', 'N', 1), ('steps', 'T', 3), ('batch', 'B', 4), ('layers', 'layers', 5)
    for axis, letter, column in places:
        for row in found['scaling'].get(axis, ()):
            spec = tuple(row['spec'])
            if spec not in seen:
                seen.add(spec)
                yield letter, spec[column], row


def slower(found: dict, ours: str, theirs: str) -> str:
    """The points of the plots at which ours takes longer, as 'N = 64, 2,048; B = 1'."""
    places: dict = {}
    for letter, size, row in points(found):
        if (r := ratio(row, ours, theirs)) and r > 1:
            places.setdefault(letter, []).append(f'{size:,}')
    named = [f'{letter} = ' + ', '.join(sizes) for letter, sizes in places.items()]
    return '; '.join(named) or 'nowhere'


def count(found: dict, ours: str, theirs: str) -> str:
    """At how many sizes of the plots, of the corners and of one core ours takes longer."""
    rows = [row for _, _, row in points(found)]
    rows += [row for each in found['corners'].values() for row in each]
    there = [r for r in ratios(rows, ours, theirs) if r is not None]
    return f'{sum(r > 1 for r in there)} of {len(there)}'


def short(row: dict) -> str:
    """A network by its cell and its units."""
    return f'`{row["spec"][0]} {row["spec"][1]}`'


def met(rows: list, ours: str, theirs: str | tuple, aim: float) -> str:
    """The networks in which this ratio is at most the aim."""
    if not rows:
        return '(not measured)'
    named = {short(row): ratio(row, ours, theirs) for row in rows}
    return ', '.join(name for name, r in named.items() if r and r <= aim) or 'none'


def mebibytes(found: dict, rule: str, steps: int) -> str:
    peaks = {(r['rule'], r['steps']): r['peak'] for r in found['memory'] if 'peak' in r}
    return f'{peaks[rule, steps] / 2**20:.0f}' if (rule, steps) in peaks else '(not measured)'


def version(found: dict, pair: str) -> str:
    return found['environments'].get(pair, {}).get('public', {}).get('braintrace', '(none)')


def lane(found: dict, pair: str) -> str:
    at = found['environments'].get(pair, {}).get('ours')
    return f'Python {at["python"]}, JAX {at["jax"]}' if at else '(not measured)'


def runs(found: dict) -> str:
    """Which parts are of which run, if there were several."""
    of_run: dict = {}
    for part in sorted(found.keys() - {'runs', 'environments'}):
        run = found.get('runs', {}).get(part, {}).get('run', 'earlier')
        of_run.setdefault(run, []).append(part)
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
    oldest, latest = (rows_of(found, 'sequences', pair) for pair in PAIRS)
    several = rows_of(found, 'cells', kinds=SEVERAL)
    values = {
        'hand scan': span(ratios(oldest, 'by hand', 'bptt')),
        'several hand scan': span(ratios(several, HAND, 'bptt')),
    }
    for key, reference, either in (('scan', 'bptt', 'bptt'), ('hand', 'by hand', HAND)):
        for mode in ('drop', 'trace'):
            ours = f'd_rtrl {mode}'
            values |= {
                f'{mode} {key}': span(ratios(oldest, ours, reference)),
                f'latest {mode} {key}': span(ratios(latest, ours, reference)),
                f'slower {mode} {key}': slower(found, ours, reference),
                f'several {mode} {key}': span(ratios(several, ours, either)),
            }
        values[f'count drop {key}'] = count(found, 'd_rtrl drop', reference)
        for kind in ('mingru', 'conv_lstm'):
            rows = rows_of(found, 'cells', kinds=(kind,))
            values[f'{kind} drop {key}'] = span(ratios(rows, 'd_rtrl drop', either))
    return values


def beside_public(found: dict, pair: str) -> dict:
    """Our methods over the public package's methods, in a pair of environments."""
    rows, updates = rows_of(found, 'sequences', pair), rows_of(found, 'updates', pair)
    return {
        f'{pair} version': version(found, pair),
        f'{pair} lane': lane(found, pair),
        f'{pair} drop peer': span(ratios(rows, 'd_rtrl drop', DROPPED)),
        f'{pair} trace peer': span(ratios(rows, 'd_rtrl trace', WINDOWS)),
        f'{pair} es peer': span(ratios(rows, 'es_d_rtrl trace', FACTORISED)),
        f'{pair} loop met': met(updates, 'own loop', OWN_LOOPS, 0.12),
        f'{pair} train met': met(updates, 'etrace_train', OWN_LOOPS, 0.12),
    }


def of_this_package(found: dict) -> dict:
    """Our calls beside each other and beside a read and write of the trace, and memory."""
    gradients, learning = rows_of(found, 'sequences'), rows_of(found, 'updates')
    simple = [row for row in learning if row['spec'][0] not in SEVERAL]
    twice = [row for row in learning if row['spec'][0] in SEVERAL]
    pairs = zip(simple, gradients)
    online = [ms(a, 'etrace_train') / w for a, b in pairs if (w := ms(b, 'd_rtrl drop'))]
    rounded = [(short(row), span([ratio(row, 'bfloat16', 'etrace_train')])) for row in simple]
    return {
        'drop jit': span(ratios(gradients, 'd_rtrl drop, in jit', 'd_rtrl drop')),
        'trace jit': span(ratios(gradients, 'd_rtrl trace, in jit', 'd_rtrl trace')),
        'train whole': span(online),
        'met 2.5': met(simple, 'etrace_train', MEMORY, 2.5),
        'met 2': met(simple, 'etrace_train', MEMORY, 2.0),
        'met 3': met(twice, 'etrace_train', MEMORY, 3.0),
        'bfloat16': ', '.join(f'{name} {times}' for name, times in rounded),
        'MiB million': mebibytes(found, 'd_rtrl', 1_000_000),
        'MiB thousand': mebibytes(found, 'd_rtrl', 1000),
        'MiB bptt': mebibytes(found, 'bptt', 100_000),
    }
