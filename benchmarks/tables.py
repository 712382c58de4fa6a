"""Tables of the page out of rows of results."""

from __future__ import annotations

from figures import HAND, fastest, ms, ratio


def name_of(spec) -> str:
    """A network in words; the batch and the layers where they are not the usual ones."""
    batch, layers = [*spec, *(16, 1)[len(spec) - 4 :]][4:]
    more = (f', B {batch}' if batch != 16 else '') + (f', {layers} layers' if layers > 1 else '')
    return f'{spec[0]} {spec[1]} ({spec[2]} inputs, T {spec[3]}{more})'


def table(head: list[str], rows: list[list]) -> str:
    def text(x):
        return '' if x is None else x if isinstance(x, str) else f'{x:.3g}'

    lines = [head, ['---'] * len(head), *[[text(x) for x in row] for row in rows]]
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def listed(rows, columns: dict) -> str:
    """A table of functions of a row, by their headings."""
    return table(list(columns), [[column(row) for column in columns.values()] for row in rows])


def cell(*names):
    """A column of the page: milliseconds a step of the fastest of these results."""
    return lambda row: ms(row, *names)


def share(ours: str, theirs):
    """A column of the page: the time of ``ours`` over the fastest time of ``theirs``."""
    return lambda row: ratio(row, (ours,), theirs if isinstance(theirs, tuple) else (theirs,))


def headed(first: str, found: dict) -> dict:
    """The columns with which a row of a pair of environments starts."""
    return {
        first: lambda row: name_of(row['spec']),
        'JAX': lambda row: found['environments'][row['pair']]['ours']['jax'],
    }


BESIDE = {
    'scan, ms': cell('bptt'),
    'by hand, ms': cell(*HAND),
    'drop / scan': share('d_rtrl drop', 'bptt'),
    'trace / scan': share('d_rtrl trace', 'bptt'),
    'drop / by hand': share('d_rtrl drop', HAND),
    'trace / by hand': share('d_rtrl trace', HAND),
}
FACTORS = {
    'ES drop / scan': share('es_d_rtrl drop', 'bptt'),
    'ES trace / scan': share('es_d_rtrl trace', 'bptt'),
}


def sequences(found) -> str:
    more = {
        'evolve / model': share('evaluation', 'bare model'),
        'least operations / drop': share('least operations', 'd_rtrl drop'),
        'least operations / trace': share('least operations', 'd_rtrl trace'),
    }
    return listed(found['sequences'], headed('network', found) | BESIDE | FACTORS | more)


def cells(found) -> str:
    more = {'associative, ms': cell('by hand, associative')}
    return listed(found['cells'], headed('network', found) | BESIDE | FACTORS | more)


def fixed(row: dict, carry: str) -> tuple:
    """The columns of the fixed windows in a row."""
    return tuple(n for n in row['times'] if n.startswith(carry + ' ') and not n.endswith(' auto'))


def windows(found) -> str:
    columns = {'network': lambda row: name_of(row['spec'])}
    for carry in ('drop', 'trace'):
        columns |= {
            f'{carry}, best fixed, ms': lambda row, carry=carry: ms(row, *fixed(row, carry)),
            f'its window ({carry})': lambda row, carry=carry: fastest(
                row, fixed(row, carry)
            ).removeprefix(f'{carry} '),
            f"that of 'auto' ({carry})": lambda row, carry=carry: str(row['chosen'][carry]),
            f'auto / best ({carry})': lambda row, carry=carry: auto(row, carry),
        }
    return listed(found['windows'], columns)


def auto(row: dict, carry: str) -> float | None:
    """``'auto'`` over the best fixed window; 1 where it chose that one, which is one program."""
    if fastest(row, fixed(row, carry)) == f'{carry} {row["chosen"][carry]}':
        return 1.0
    return ratio(row, (f'{carry} auto',), fixed(row, carry))


def corners(found) -> str:
    each = [(row, '') for row in found['corners']['sizes']]
    each += [(row, ', one core') for row in found['corners']['one core']]
    each += [(row, '') for axis in found['scaling'].values() for row in axis]
    rows = {name_of(row['spec']) + where: row for row, where in each}
    pure = {
        f'functional {carry} / scan': share(f'functional {carry}', 'bptt')
        for carry in ('drop', 'trace')
    }
    columns = {'network': lambda pair: pair[0]} | {
        name: lambda pair, column=column: column(pair[1])
        for name, column in (BESIDE | pure).items()
    }
    return listed(rows.items(), columns)


def device(found) -> str:
    """Rates of every column, and their shares of the copy's and of the product's."""
    rows = [
        (row, name, times)
        for row in found['device']
        for name, times in row['times'].items()
        if 'flops' in times
    ]

    def rate(what, name=None):
        def column(each):
            row, _, times = each
            times = row['times'][name] if name else times
            return times[what] / times['median']

        return column

    gigabytes, operations = rate('bytes'), rate('flops')
    copied, multiplied = rate('bytes', 'copy'), rate('flops', 'product')
    return listed(
        rows,
        {
            'rate': lambda each: name_of(each[0]['spec']),
            'column': lambda each: each[1],
            'GB a second': lambda each: gigabytes(each) / 1e9,
            'GFlop a second': lambda each: operations(each) / 1e9,
            'bytes / copy': lambda each: gigabytes(each) / copied(each),
            'operations / product': lambda each: operations(each) / multiplied(each),
        },
    )


def on_an_accelerator(found: dict) -> str:
    """The table of a run of ``accelerator.py``."""

    def times(row, name: str):
        return row['times'].get(name, {}).get('ms')

    def over(row, name: str, other: str):
        return times(row, name) and times(row, name) / times(row, other)

    def kernels(row, name: str) -> str:
        return f'{row["times"][name]["kernels"] / row["spec"][3]:.1f}'

    columns = {
        'network': lambda row: name_of(row['spec']),
        'scan, ms': lambda row: times(row, 'bptt'),
        'drop / scan': lambda row: over(row, 'drop', 'bptt'),
        'in one window / scan': lambda row: over(row, 'drop, one window', 'bptt'),
        'trace / scan': lambda row: over(row, 'kept', 'bptt'),
        'ES drop / scan': lambda row: over(row, 'es', 'bptt'),
        'scan with `unroll=4` / scan': lambda row: over(row, 'bptt, unroll=4', 'bptt'),
        'by hand / scan': lambda row: over(row, 'by hand', 'bptt'),
        'by hand, associative / scan': lambda row: over(row, 'by hand, associative', 'bptt'),
        'update every step / scan': lambda row: over(row, 'train', 'bptt'),
        'kernels a step: scan': lambda row: kernels(row, 'bptt'),
        'drop': lambda row: kernels(row, 'drop'),
        'update': lambda row: kernels(row, 'train'),
    }
    return listed(found['rows'], columns)
