"""Make ``docs/performance.md``, its plots and README's "What it costs" from the results.

python benchmarks/report.py [results.json]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from aims import aims
from brain_scale_table import brain_scale
from columns import OF_CELLS, SEQUENCES, UPDATES
from figures import DROPPED, FACTORISED, OWN_LOOPS, WINDOWS, figures, ms, ratio, version
from tables import (
    FACTORS,
    RATIOS,
    TIMES,
    cell,
    cells,
    corners,
    device,
    headed,
    listed,
    name_of,
    share,
    table,
    windows,
)

HERE = Path(__file__).parent
DOCS = HERE.parent / 'docs'
README = HERE.parent / 'README.md'
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


def sequences(found) -> str:
    times = (
        headed('ms a step', found)
        | TIMES
        | FACTORS
        | {
            'model alone': cell('bare model'),
            '`etrace_evolve`': cell('evaluation'),
        }
    )
    ratios = (
        headed('ratio', found)
        | RATIOS
        | {
            'evolve / model': share('evaluation', 'bare model'),
            'least operations / drop': share('least operations', 'd_rtrl drop'),
            'least operations / trace': share('least operations', 'd_rtrl trace'),
        }
    )
    return (
        listed(found['sequences'], times)
        + '\n\n'
        + listed(found['sequences'], ratios)
        + '\n\nAims: drop / scan and trace / scan 1.0, evolve / model 1.05.'
    )


def peers(found) -> str:
    names = (*DROPPED, *FACTORISED)
    return listed(
        [row for row in (*found['sequences'], *found['cells']) if ms(row, *names)],
        {
            **headed('ms a step', found),
            'version': lambda row: version(found, row['pair']),
            **{f'its {name.removeprefix("public ")}': cell(name) for name in names},
            'our D_RTRL trace': cell('d_rtrl trace'),
            'our D_RTRL drop': cell('d_rtrl drop'),
            'our ES trace': cell('es_d_rtrl trace'),
            'trace / its best that keeps the trace': share('d_rtrl trace', WINDOWS),
            'drop / its best': share('d_rtrl drop', DROPPED),
            'ES / its best pp_prop': share('es_d_rtrl trace', FACTORISED),
        },
    )


def least_bytes(row) -> float | None:
    """The least share of a step for one read of the trace, and one write every few steps."""
    between = 4 if row['trace'] > 2**24 else 2
    return (1 + 2 / between) / 2 / ratio(row, ('etrace_train',), ('read and write of the trace',))


def updates(found) -> str:
    ours = {
        'ms a step': lambda row: name_of(row['spec']),
        'read + write of the trace': cell('read and write of the trace'),
        '`etrace_train`': cell('etrace_train'),
        'written every step': cell('written every 1'),
        **{f'every {k}': cell(f'written every {k}') for k in (2, 4, 8)},
        'bfloat16 trace': cell('bfloat16'),
        'train / read + write': share('etrace_train', 'read and write of the trace'),
        'own loop / read + write': share('own loop', 'read and write of the trace'),
        'least bytes / train': least_bytes,
    }
    both = {
        **headed('ms a step', found),
        '`etrace_train`': cell('etrace_train'),
        'own loop': cell('own loop'),
        'version': lambda row: version(found, row['pair']),
        'its own loop': cell(OWN_LOOPS[0]),
        'its own loop, `fast_solve=False`': cell(OWN_LOOPS[1]),
        'train / its faster': share('etrace_train', OWN_LOOPS),
        'own loop / its faster': share('own loop', OWN_LOOPS),
    }
    measured = [row for row in found['updates'] if ms(row, 'read and write of the trace')]
    return (
        listed(measured, ours)
        + '\n\n'
        + listed(found['updates'], both)
        + (
            '\n\nAims: 2.5 (then 2.0; 3.0 with two states) times one donated read and write of an '
            "array of the trace's size (`e * a + b`), whole step included; 0.12 of the public "
            "package's own loop."
        )
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
            'error of the gradient': lambda row: name_of(row['spec']),
            'worst parameter': lambda row: f'{max(row["errors"].values()):.2%}',
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
            **headed('first call, seconds', found),
            'rule': lambda row: row['rule'],
            'ours': lambda row: seconds(row, False),
            'version': lambda row: version(found, row['pair']),
            'its faster': lambda row: seconds(row, True),
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
    'bptt': ('jax.grad of a scan', 'k'),
    'by hand': ('BPTT by hand', '0.6'),
    'd_rtrl drop': ('D_RTRL, trace dropped', 'C0'),
    'd_rtrl trace': ('D_RTRL, trace kept', 'C1'),
    'es_d_rtrl trace': ('ES_D_RTRL', 'C2'),
    'etrace_train': ('D_RTRL, update every step', 'C3'),
}
AXES = (
    ('units', 1, 'units N (inputs N, B = 16)'),
    ('batch', 4, 'batch B (N = 128)'),
    ('layers', 5, 'layers (N = 128, B = 16)'),
    ('steps', 3, 'steps T (N = 128, B = 16)'),
)


def plots(found) -> None:
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(2, 3, figsize=(14, 7.5), layout='constrained')
    for ax, (axis, column, label) in zip(axes.flat, AXES):
        for name, (text, colour) in LINES.items():
            points = [(r['spec'][column], t) for r in found['scaling'][axis] if (t := ms(r, name))]
            ax.loglog(*zip(*points), 'o-', color=colour, label=text, base=2)
        ax.set(xlabel=label, ylabel='ms a step')
    axes[0, 0].legend(fontsize=8)
    for rule, line in {
        'bptt': 'bptt',
        'd_rtrl': 'd_rtrl drop',
        'es_d_rtrl': 'es_d_rtrl trace',
    }.items():
        for ax, what, unit in ((axes[1, 1], 'seconds', 1), (axes[1, 2], 'peak', 2**20)):
            points = [
                (r['steps'], r[what] / unit)
                for r in found['memory']
                if r['rule'] == rule and 'peak' in r
            ]
            ax.loglog(*zip(*points), 'o-', color=LINES[line][1])
    axes[1, 1].set(xlabel='steps T (gru 64, B = 16)', ylabel='seconds, compilation included')
    axes[1, 2].set(xlabel='steps T (gru 64, B = 16)', ylabel='peak memory of the process, MiB')
    fig.savefig(DOCS / 'pictures' / 'performance.png', dpi=110)


PARTS = {
    f.__name__: f
    for f in (
        *(sequences, cells, windows, peers, updates, progress, precision, once, memory),
        *(corners, device, aims),
    )
} | {'brain scale': brain_scale}
MEASURED = {'environments', 'sequences', 'cells', 'windows', 'updates', 'progress', 'precision'}
MEASURED |= {'once', 'memory', 'scaling', 'corners', 'device'}


NAMED = {c.name for c in SEQUENCES}


def filled(text: str, found: dict, machine: str) -> str:
    """Fill the placeholders of a text with the results."""
    values = figures(found) | {name: make(found) for name, make in PARTS.items()}
    values |= {
        'calls of sequences': calls(SEQUENCES, found),
        'calls of updates': calls(UPDATES, found),
        'calls of cells': calls([c for c in OF_CELLS if c.name not in NAMED], found),
        'machine': machine,
        'device name': found['environments']['oldest']['ours']['device'],
    }
    return re.sub(r'{{(.*?)}}', lambda m: values[m[1]], text)


def page(found: dict, machine: str) -> str:
    return filled((HERE / 'performance.in.md').read_text(encoding='utf-8'), found, machine)


def readme(text: str, found: dict, machine: str) -> str:
    """Replace README's section on costs."""
    costs = filled((HERE / 'costs.in.md').read_text(encoding='utf-8'), found, machine)
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
