"""Make ``docs/performance.md``, its plots and README's "What it costs" from the results.

python benchmarks/report.py [results.json]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import first_calls
from aims import aims
from brain_scale_table import brain_scale
from columns import OF_CELLS, SEQUENCES, UPDATES
from figures import DROPPED, FACTORISED, OWN_LOOPS, WINDOWS, figures, ms, ratio, version
from pages import (
    BLACK,
    BLUE,
    DOCS,
    GREY,
    HERE,
    PICTURES,
    PINK,
    README,
    VERMILLION,
    Look,
    figure,
    filled,
)
from tables import (
    cell,
    cells,
    corners,
    device,
    headed,
    listed,
    name_of,
    on_an_accelerator,
    sequences,
    share,
    table,
    windows,
)

H100 = HERE / 'results' / 'h100.json'
SECTION = re.compile(r'(?<=## What it costs\n\n).*?(?=\n+## )', re.DOTALL)


def calls(columns, found) -> str:
    """A table of how each column is called."""
    versions = ', '.join(version(found, pair) for pair in found['environments'])
    return table(
        ['column', 'package', 'called as', 'inside'],
        [
            [
                c.name.removeprefix('public '),
                'ours' if c.package == 'ours' else versions,
                c.text,
                'nothing more' if c.call == 'as it is' else f'`{c.call}`',
            ]
            for c in columns
        ],
    )


def peers(found) -> str:
    return listed(
        [row for row in (*found['sequences'], *found['cells']) if ms(row, *DROPPED, *FACTORISED)],
        {
            **headed('network', found),
            'version': lambda row: version(found, row['pair']),
            'its d_rtrl by steps, ms': cell('public d_rtrl'),
            'its best that keeps the trace, ms': cell(*WINDOWS),
            'ours / it': share('d_rtrl trace', WINDOWS),
            'its best, ms': cell(*DROPPED),
            'ours, dropped / it': share('d_rtrl drop', DROPPED),
            'its best pp_prop, ms': cell(*FACTORISED),
            'our ES / it': share('es_d_rtrl trace', FACTORISED),
        },
    )


def least_bytes(row) -> float | None:
    """The least share of a step for one read of the trace, and one write every few steps."""
    between = 4 if row['trace'] > 2**24 else 2
    return (1 + 2 / between) / 2 / ratio(row, ('etrace_train',), ('read and write of the trace',))


def updates(found) -> str:
    return listed(
        [row for row in found['updates'] if ms(row, 'read and write of the trace')],
        {
            'network': lambda row: name_of(row['spec']),
            'read + write, ms': cell('read and write of the trace'),
            '`etrace_train`, ms': cell('etrace_train'),
            **{f'written every {k}': cell(f'written every {k}') for k in (1, 2, 4, 8)},
            'bfloat16': cell('bfloat16'),
            'train / read + write': share('etrace_train', 'read and write of the trace'),
            'own loop / read + write': share('own loop', 'read and write of the trace'),
            'least bytes / train': least_bytes,
        },
    )


def updates_beside(found) -> str:
    return listed(
        [row for row in found['updates'] if ms(row, *OWN_LOOPS)],
        {
            **headed('network', found),
            'version': lambda row: version(found, row['pair']),
            '`etrace_train`, ms': cell('etrace_train'),
            'own loop, ms': cell('own loop'),
            'its own loop, ms': cell(*OWN_LOOPS),
            'train / it': share('etrace_train', OWN_LOOPS),
            'own loop / it': share('own loop', OWN_LOOPS),
        },
    )


def progress(found) -> str:
    return '; '.join(
        f'`{name_of(r["spec"])}` {r["times"]["on"]["low"] / r["times"]["off"]["low"] - 1:+.1%}'
        for r in found['progress']
    )


def precision(found) -> str:
    return listed(
        found['precision'],
        {
            'network': lambda row: name_of(row['spec']),
            'error of the worst parameter': lambda row: f'{max(row["errors"].values()):.2%}',
        },
    )


def once(found) -> str:
    def seconds(row, theirs):
        return min(
            (t for name, t in row['seconds'].items() if name.startswith('public') == theirs),
            default=None,
        )

    def over(row):
        a, b = seconds(row, False), seconds(row, True)
        return a / b if a and b else None

    imports = sorted(r['braintrace'] for r in found['once']['import'])
    base = sorted(r['brainstate'] for r in found['once']['import'])
    return listed(
        found['once']['first'],
        {
            **headed('network', found),
            'rule': lambda row: row['rule'],
            'first call, s': lambda row: seconds(row, False),
            'version': lambda row: version(found, row['pair']),
            'its, s': lambda row: seconds(row, True),
            'ratio': over,
        },
    ) + (
        f'\n\nAim: 1.2. Importing `braintrace` after `brainstate` ({base[len(base) // 2]:.2f} s) '
        f'takes {imports[len(imports) // 2]:.2f} s more (median of {len(imports)}; aim 0.15 s).\n\n'
        + listed(
            found['once']['eager'],
            {
                'ms a call from Python': lambda row: name_of(row['spec']),
                '`learner(x)`': cell('learner(x)'),
            },
        )
    )


def memory(found) -> str:
    by = {(r['rule'], r['steps']): r for r in found['memory'] if 'peak' in r}
    rules = {'d_rtrl': 'D_RTRL', 'es_d_rtrl': 'ES_D_RTRL', 'bptt': 'BPTT'}

    def peak(rule, steps):
        return f'{by[rule, steps]["peak"] / 2**20:.0f}' if (rule, steps) in by else None

    def seconds(rule, steps):
        return by[rule, steps]['seconds'] if (rule, steps) in by else None

    grown = ', '.join(
        f'{name} {(by[rule, 40_000]["peak"] - by[rule, 2000]["peak"]) / 1e6:+.0f} MB'
        for rule, name in rules.items()
        if {(rule, 40_000), (rule, 2000)} <= by.keys()
    )
    columns = {
        'steps': lambda t: f'{t:,}',
        **{f'MiB {name}': lambda t, rule=rule: peak(rule, t) for rule, name in rules.items()},
        **{f's {name}': lambda t, rule=rule: seconds(rule, t) for rule, name in rules.items()},
    }
    return listed(sorted({steps for _, steps in by}), columns) + (
        f'\n\nFrom 2,000 to 40,000 steps: {grown} (aim: at most +40 MB). '
        'Seconds hold the compilation.'
    )


LINES = {
    'bptt': ('jax.grad of a scan', Look(BLACK, 's')),
    'by hand': ('BPTT by hand', Look(GREY, 'D', '--')),
    'd_rtrl drop': ('D_RTRL, trace dropped', Look(BLUE, 'o')),
    'd_rtrl trace': ('D_RTRL, trace kept', Look(BLUE, 'o', '--')),
    'es_d_rtrl trace': ('ES_D_RTRL', Look(PINK, 'X')),
    'etrace_train': ('D_RTRL, update every step', Look(VERMILLION, '*', ':')),
}
AXES = (  # the axis of a panel, its place in a row's spec, its label and the numbers along it
    ('units', 1, 'units (batch of 16)', (64, 256, 1024)),
    ('batch', 4, 'batch (128 units)', (1, 4, 16, 64, 256)),
    ('layers', 5, 'layers of 128 units', (1, 2, 4, 8)),
    ('steps', 3, 'steps (128 units)', (10, 100, 1000, 10_000)),
)
LONG = {'bptt': 'bptt', 'd_rtrl': 'd_rtrl drop', 'es_d_rtrl': 'es_d_rtrl trace'}
STEPS = (10, 1000, 100_000)


def lines(ax, name: str, points: list, **labels) -> None:
    text, how = LINES[name]
    ax.loglog(*zip(*points), label=text, **how._asdict())
    ax.set(**labels)


def plots(found) -> None:
    """Time a step along four sizes; time and memory of long sequences."""
    from matplotlib.ticker import LogLocator

    with figure(PICTURES / 'performance.png', 3, 2, 8.6) as (drawn, axes):
        for ax, (axis, column, label, ticks) in zip(axes.flat, AXES):
            for name in LINES:
                points = [
                    (r['spec'][column], t) for r in found['scaling'][axis] if (t := ms(r, name))
                ]
                lines(ax, name, points, xlabel=label, ylabel='ms a step')
            ax.set_xticks(ticks, [f'{x:,}' for x in ticks])
        drawn.legend(*axes[0, 0].get_legend_handles_labels(), loc='outside lower center', ncols=2)
        both = ('seconds', 1, 'seconds, all steps'), ('peak', 2**20, 'peak memory, MiB')
        for ax, (what, unit, label) in zip(axes[2], both):
            for rule, name in LONG.items():
                rows = [r for r in found['memory'] if r['rule'] == rule and 'peak' in r]
                points = [(r['steps'], r[what] / unit) for r in rows]
                lines(ax, name, points, xlabel='steps (GRU of 64 units)', ylabel=label)
            ax.set_xticks(STEPS, [f'{x:,}' for x in STEPS])
        for ax in axes.flat:
            ax.minorticks_off()
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
            ax.yaxis.set_major_formatter('{x:,g}')


def stacks(found) -> str:
    return first_calls.page(found['stacks'])


def python(found) -> str:
    """The time of calls from Python, and what repeated use leaves behind."""
    calls, left = found['once']['calls'], found['once']['deleted']
    rows = [(name, f'{t:.0f}') for name, t in calls.items() if not name.startswith('traces')]
    return table(['call', 'microseconds'], [list(row) for row in rows]) + (
        f'\n\nNine lengths of a sequence in turn are traced '
        f'{calls["traces of the second epoch"]} times in their second epoch. Ten models that close '
        f'over 1 MiB each, trained and deleted, leave {left["10"] / 2**20:.0f} MiB.'
    )


PARTS = {
    f.__name__: f
    for f in (
        *(sequences, cells, windows, peers, updates, progress, precision, once, memory),
        *(stacks, python),
        *(corners, device, aims),
    )
} | {'brain scale': brain_scale, 'updates beside': updates_beside}
MEASURED = {'environments', 'sequences', 'cells', 'windows', 'updates', 'progress', 'precision'}
MEASURED |= {'once', 'stacks', 'memory', 'scaling', 'corners', 'device'}


NAMED = {c.name for c in SEQUENCES}


def values_of(found: dict, machine: str) -> dict[str, str]:
    """What the placeholders of the templates stand for."""
    h100 = json.loads(H100.read_text(encoding='utf-8'))
    shares = [row['times']['drop']['ms'] / row['times']['bptt']['ms'] for row in h100['rows']]
    return (
        figures(found)
        | {name: make(found) for name, make in PARTS.items()}
        | {
            'calls of sequences': calls(SEQUENCES, found),
            'calls of updates': calls(UPDATES, found),
            'calls of cells': calls([c for c in OF_CELLS if c.name not in NAMED], found),
            'machine': machine,
            'accelerator': on_an_accelerator(h100),
            'h100 drop scan': f'{min(shares):.2f} to {max(shares):.2f}',
            'device name': found['environments']['oldest']['ours']['device'],
        }
    )


def page(found: dict, machine: str) -> str:
    """The page, whose summary is the table of README."""
    values = values_of(found, machine)
    costs = filled('costs.in.md', values).split('\n\n')[1]
    return filled('performance.in.md', values | {'costs': costs})


def readme(text: str, found: dict, machine: str) -> str:
    """Replace README's section on costs."""
    costs = filled('costs.in.md', values_of(found, machine))
    return SECTION.sub(lambda m: costs, text)


def main():
    path = ([Path(a) for a in sys.argv[1:]] or sorted((HERE / 'results').glob('*-cores*.json')))[0]
    found = json.loads(path.read_text(encoding='utf-8'))
    if missing := MEASURED - found.keys():
        sys.exit(f'{path} lacks {", ".join(sorted(missing))}: run performance.py --parts with them')
    plots(found)
    (DOCS / 'performance.md').write_text(page(found, path.stem), encoding='utf-8')
    made = readme(README.read_text(encoding='utf-8'), found, path.stem)
    README.write_text(made, encoding='utf-8')


if __name__ == '__main__':
    main()
