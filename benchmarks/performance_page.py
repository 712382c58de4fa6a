"""Make ``docs/performance.md``, its plots and README's "What it costs" from the results.

python benchmarks/performance_page.py [results.json]
"""

from __future__ import annotations

import re
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from columns import MAIN, OF_CELLS, ONE_STATE, SEQUENCES, SEVERAL, UPDATES
from figures import (
    DROPPED,
    FACTORISED,
    HAND,
    MEMORY,
    OWN_LOOPS,
    WINDOWS,
    fastest,
    figures,
    ms,
    points,
    ratio,
    ratios,
    rows_of,
    span,
    version,
)
from printer import (
    BLACK,
    BLUE,
    DOCS,
    GREY,
    PICTURES,
    PINK,
    README,
    VERMILLION,
    Look,
    figure,
    filled,
    listed,
    table,
)
from runner import RESULTS, kept

SECTION = re.compile(r'(?<=## What it costs\n\n).*?(?=\n+## )', re.DOTALL)


# columns of tables ------------------------------------------------------------------------------


def name_of(spec) -> str:
    """A network in words; the batch and the layers where they are not the usual ones."""
    batch, layers = [*spec, *(16, 1)[len(spec) - 4 :]][4:]
    more = (f', B {batch}' if batch != 16 else '') + (f', {layers} layers' if layers > 1 else '')
    return f'{spec[0]} {spec[1]} ({spec[2]} inputs, T {spec[3]}{more})'


def network(row) -> str:
    return name_of(row['spec'])


def cell(*names):
    """Milliseconds a step of the fastest of these results."""
    return lambda row: ms(row, *names)


def share(ours: str, theirs):
    """The time of ``ours`` over the fastest time of ``theirs``."""
    return lambda row: ratio(row, ours, theirs)


def headed(found: dict) -> dict:
    """The columns with which a row of a pair of environments starts."""
    lane = lambda row: found['environments'][row['pair']]['ours']['jax']
    return {'network': network, 'JAX': lane}


def versioned(found: dict) -> dict:
    """The same, and the version of the public package."""
    return headed(found) | {'version': lambda row: version(found, row['pair'])}


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


# the parts of the page --------------------------------------------------------------------------


def calls(columns, found) -> str:
    """A table of how each column is called."""
    versions = ', '.join(version(found, pair) for pair in found['environments'])
    return listed(
        columns,
        {
            'column': lambda c: c.name.removeprefix('public '),
            'package': lambda c: 'ours' if c.package == 'ours' else versions,
            'called as': lambda c: c.text,
            'inside': lambda c: 'nothing more' if c.call == 'as it is' else f'`{c.call}`',
        },
    )


def sequences(found) -> str:
    more = {
        'evolve / model': share('evaluation', 'bare model'),
        'least operations / drop': share('least operations', 'd_rtrl drop'),
        'least operations / trace': share('least operations', 'd_rtrl trace'),
    }
    return listed(found['sequences'], headed(found) | BESIDE | FACTORS | more)


def cells(found) -> str:
    more = {'associative, ms': cell('by hand, associative')}
    return listed(found['cells'], headed(found) | BESIDE | FACTORS | more)


def fixed(row: dict, carry: str) -> tuple:
    """The columns of the fixed windows in a row."""
    return tuple(n for n in row['times'] if n.startswith(carry + ' ') and not n.endswith(' auto'))


def auto(row: dict, carry: str) -> float | None:
    """``'auto'`` over the best fixed window; 1 where it chose that one, which is one program."""
    if fastest(row, fixed(row, carry)) == f'{carry} {row["chosen"][carry]}':
        return 1.0
    return ratio(row, f'{carry} auto', fixed(row, carry))


def windows(found) -> str:
    def of(carry: str) -> dict:
        best = lambda row: fastest(row, fixed(row, carry)).removeprefix(f'{carry} ')
        return {
            f'{carry}, best fixed, ms': lambda row: ms(row, *fixed(row, carry)),
            f'its window ({carry})': best,
            f"that of 'auto' ({carry})": lambda row: str(row['chosen'][carry]),
            f'auto / best ({carry})': lambda row: auto(row, carry),
        }

    return listed(found['windows'], {'network': network} | of('drop') | of('trace'))


def corners(found) -> str:
    each = [(row, '') for row in found['corners']['sizes']]
    each += [(row, ', one core') for row in found['corners']['one core']]
    each += [(row, '') for axis in found['scaling'].values() for row in axis]
    rows = {network(row) + where: row for row, where in each}
    pure = {f'functional {c} / scan': share(f'functional {c}', 'bptt') for c in ('drop', 'trace')}
    columns = {'network': lambda pair: pair[0]} | {
        name: lambda pair, column=column: column(pair[1])
        for name, column in (BESIDE | pure).items()
    }
    return listed(rows.items(), columns)


def peers(found) -> str:
    return listed(
        [row for row in (*found['sequences'], *found['cells']) if ms(row, *DROPPED, *FACTORISED)],
        {
            **versioned(found),
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
    return (1 + 2 / between) / 2 / ratio(row, 'etrace_train', MEMORY)


def updates(found) -> str:
    return listed(
        [row for row in found['updates'] if ms(row, MEMORY)],
        {
            'network': network,
            'read + write, ms': cell(MEMORY),
            '`etrace_train`, ms': cell('etrace_train'),
            'bfloat16': cell('bfloat16'),
            'train / read + write': share('etrace_train', MEMORY),
            'own loop / read + write': share('own loop', MEMORY),
            'least bytes / train': least_bytes,
        },
    )


def updates_beside(found) -> str:
    return listed(
        [row for row in found['updates'] if ms(row, *OWN_LOOPS)],
        {
            **versioned(found),
            '`etrace_train`, ms': cell('etrace_train'),
            'own loop, ms': cell('own loop'),
            'its own loop, ms': cell(*OWN_LOOPS),
            'train / it': share('etrace_train', OWN_LOOPS),
            'own loop / it': share('own loop', OWN_LOOPS),
        },
    )


def progress(found) -> str:
    return '; '.join(
        f'`{network(r)}` {r["times"]["on"]["low"] / r["times"]["off"]["low"] - 1:+.1%}'
        for r in found['progress']
    )


def precision(found) -> str:
    worst = lambda row: f'{max(row["errors"].values()):.2%}'
    return listed(found['precision'], {'network': network, 'error of the worst parameter': worst})


def once(found) -> str:
    def seconds(row, theirs):
        of = [t for name, t in row['seconds'].items() if name.startswith('public') == theirs]
        return min(of, default=None)

    def over(row):
        a, b = seconds(row, False), seconds(row, True)
        return a / b if a and b else None

    base, own = (
        statistics.median_high(r[name] for r in found['once']['import'])
        for name in ('brainstate', 'braintrace')
    )
    first = listed(
        found['once']['first'],
        {
            **headed(found),
            'rule': lambda row: row['rule'],
            'first call, s': lambda row: seconds(row, False),
            'version': lambda row: version(found, row['pair']),
            'its, s': lambda row: seconds(row, True),
            'ratio': over,
        },
    )
    by_steps = {'ms a call from Python': network, '`learner(x)`': cell('learner(x)')}
    return (
        f'{first}\n\nAim: 1.2. Importing `braintrace` after `brainstate` ({base:.2f} s) takes '
        f'{own:.2f} s more (median of {len(found["once"]["import"])}; aim 0.15 s).\n\n'
    ) + listed(found['once']['eager'], by_steps)


def memory(found) -> str:
    by = {(r['rule'], r['steps']): r for r in found['memory'] if 'peak' in r}
    rules = {'d_rtrl': 'D_RTRL', 'es_d_rtrl': 'ES_D_RTRL', 'bptt': 'BPTT'}
    peak = lambda r: f'{r["peak"] / 2**20:.0f}'
    shown = {'MiB': peak, 's': lambda r: r['seconds']}

    def column(rule, of):
        return lambda steps: of(by[rule, steps]) if (rule, steps) in by else None

    grown = ', '.join(
        f'{name} {(by[rule, 40_000]["peak"] - by[rule, 2000]["peak"]) / 1e6:+.0f} MB'
        for rule, name in rules.items()
        if {(rule, 40_000), (rule, 2000)} <= by.keys()
    )
    columns = {'steps': lambda steps: f'{steps:,}'}
    for unit, of in shown.items():
        columns |= {f'{unit} {name}': column(rule, of) for rule, name in rules.items()}
    return listed(sorted({steps for _, steps in by}), columns) + (
        f'\n\nFrom 2,000 to 40,000 steps: {grown} (aim: at most +40 MB). '
        'Seconds hold the compilation.'
    )


def stacks(found) -> str:
    """First calls of deep networks."""
    names = {'bptt': '`jax.grad` of a scan', 'kept': 'trace kept', 'dropped': 'trace dropped'}
    columns = {
        'network': lambda r: r['network'],
        'method': lambda r: names[r['method']],
        'analysis, s': lambda r: f'{r["init"]:.2f}' if 'init' in r else None,
        'tracing, s': lambda r: f'{r["tracing"] + r["lowering"]:.2f}',
        'XLA, s': lambda r: f'{r["compiling"]:.2f}',
        'XLA / BPTT': lambda r: f'{r["slower"]:.1f}',
        'operations': lambda r: f'{r["operations"]:.0f}',
        'instructions': lambda r: f'{r["instructions"]:.0f}',
        'instructions / BPTT': lambda r: f'{r["larger"]:.1f}',
        'temporary, MiB': lambda r: f'{r["temporary"] / 2**20:.0f}',
    }
    return listed(found['stacks'], columns)


def python(found) -> str:
    """The time of calls from Python, and what repeated use leaves behind."""
    calls, left = found['once']['calls'], found['once']['deleted']
    rows = [[name, f'{t:.0f}'] for name, t in calls.items() if not name.startswith('traces')]
    return table(['call', 'microseconds'], rows) + (
        f'\n\nNine lengths of a sequence in turn are traced '
        f'{calls["traces of the second epoch"]} times in their second epoch. Ten models that close '
        f'over 1 MiB each, trained and deleted, leave {left["10"] / 2**20:.0f} MiB.'
    )


def accelerator(found: dict) -> str:
    """The table of a run of ``accelerator.py``."""

    def over(name: str, other: str = 'bptt'):
        def column(row):
            a, b = (row['times'].get(n, {}).get('ms') for n in (name, other))
            return a and a / b

        return column

    def kernels(name: str):
        return lambda row: f'{row["times"][name]["kernels"] / row["spec"][3]:.1f}'

    columns = {
        'network': network,
        'scan, ms': lambda row: row['times']['bptt']['ms'],
        'drop / scan': over('drop'),
        'in one window / scan': over('drop, one window'),
        'trace / scan': over('kept'),
        'ES drop / scan': over('es'),
        'scan with `unroll=4` / scan': over('bptt, unroll=4'),
        'by hand / scan': over('by hand'),
        'by hand, associative / scan': over('by hand, associative'),
        'update every step / scan': over('train'),
        'kernels a step: scan': kernels('bptt'),
        'drop': kernels('drop'),
        'update': kernels('train'),
    }
    return listed(found['rows'], columns)


def brain_scale(found: dict) -> str:
    """The table of ``brain_scale.py``, and what the example learnt."""
    rows, learning = [], []
    for name, row in found['rows'].items():
        size, kind = name.split(' ', 1)
        for way, times in row.items() if kind == 'turns' else ():
            if once := found['rows'].get(f'{size} memory {way}'):
                share = times['cpu ms'] / row['model alone']['cpu ms']
                rows.append(times | {'size': int(size), 'way': way, 'memory': once, 'share': share})
        if kind == 'learning':
            learning.append(
                f'The example with {int(size):,} neurons took {row["s"]:.0f} s ({row["cpu s"]:.0f} '
                f'CPU s) for {row["steps"]:,} steps, two evaluations, compilation and picture, and '
                f'at most {row["memory"]["peak"] / 1024:.2f} GiB. Its loss over a period with the '
                f'weights as they are: {row["loss before"]:.3f} before, {row["loss after"]:.3f} '
                'after.'
            )
    columns = {
        'neurons, synapses': lambda r: f'{r["size"]:,}, {r["size"] // 10_000} million',
        'way': lambda r: r['way'],
        'CPU ms a step': lambda r: r['cpu ms'],
        'times the model alone': lambda r: r['share'],
        'wall ms a step': lambda r: r['ms'],
        'first call s': lambda r: r['memory']['first call s'],
        'peak GiB': lambda r: r['memory']['memory']['peak'] / 1024,
        'of it with the network built': lambda r: r['memory']['built']['peak'] / 1024,
        'arrays kept GiB': lambda r: r['memory']['memory']['arrays'] / 1024,
    }
    return '\n\n'.join([listed(rows, columns), *learning])


# the aims ---------------------------------------------------------------------------------------

LONG = 1000  # steps of the rows of linear loops


class Aim(NamedTuple):
    """``what`` against ``reference`` takes at most these ratios, the first of them first."""

    what: str
    reference: str
    limits: tuple
    found: list


def aims_beside_bptt(found: dict) -> list[Aim]:
    """The gradient of a sequence beside both references, in the oldest environments."""
    every_cell = rows_of(found, 'cells')
    several = [r for r in rows_of(found, 'cells', kinds=SEVERAL) if r['spec'][3] < LONG]
    long = [row for row in every_cell if row['spec'][3] >= LONG]
    one = [row for row in rows_of(found, 'sequences') if tuple(row['spec']) in MAIN]
    wide = [row for row in every_cell if tuple(row['spec'][:2]) == ('lstm', 256)]
    plots = [row for _, _, row in points(found)]
    scan, hand, drop, trace = '`jax.grad` of a scan', 'BPTT by hand', 'd_rtrl drop', 'd_rtrl trace'
    several_named = 'LSTM, ALIF, LIF with synapse, LRU, 100 to 256 units'
    return [
        Aim(f'{several_named}, trace dropped', scan, (0.8,), ratios(several, drop, 'bptt')),
        Aim(f'{several_named}, trace kept', scan, (1.2, 1.0), ratios(several, trace, 'bptt')),
        Aim('rnn, gru, trace dropped', hand, (0.8, 0.67), ratios(one, drop, HAND)),
        Aim('lstm 256, trace dropped', hand, (1.0,), ratios(wide, drop, HAND)),
        Aim('rnn, gru, lstm 256, trace kept', hand, (1.0,), ratios([*one, *wide], trace, HAND)),
        Aim('minGRU, LRU, T 1,000, trace dropped', scan, (0.8,), ratios(long, drop, 'bptt')),
        Aim('the same', hand, (1.0,), ratios(long, drop, HAND)),
        Aim('points of the plots, trace dropped', scan, (1.0,), ratios(plots, drop, 'bptt')),
    ]


def other_aims(found: dict) -> list[Aim]:
    both = [*found['sequences'], *found['cells']]
    one = rows_of(found, 'updates', kinds=ONE_STATE)
    two = rows_of(found, 'updates', kinds=SEVERAL)
    memory, train = 'one read and write of the trace', 'etrace_train'
    chosen = [auto(row, carry) for row in found['windows'] for carry in ('drop', 'trace')]
    eager = [ms(row, 'learner(x)') for row in found['once']['eager']]
    return [
        Aim('ES_D_RTRL', 'its `pp_prop`', (0.6,), ratios(both, 'es_d_rtrl trace', FACTORISED)),
        Aim('trace kept', 'its best window', (0.33,), ratios(both, 'd_rtrl trace', WINDOWS)),
        Aim('trace dropped', 'its best window', (0.33,), ratios(both, 'd_rtrl drop', DROPPED)),
        Aim('an update at each step, S = 1', memory, (2.5, 2.0), ratios(one, train, MEMORY)),
        Aim('an update at each step, S = 2', memory, (3.0,), ratios(two, train, MEMORY)),
        Aim('the same, own loop', memory, (3.0,), ratios(two, 'own loop', MEMORY)),
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

    each = [*aims_beside_bptt(found), *other_aims(found)]
    return table(['what', 'against', 'at most', 'found', 'reached by'], [row(a) for a in each])


# the picture ------------------------------------------------------------------------------------

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
OF_RULES = {'bptt': 'bptt', 'd_rtrl': 'd_rtrl drop', 'es_d_rtrl': 'es_d_rtrl trace'}
STEPS = (10, 1000, 100_000)


def lines(ax, name: str, at: list, **labels) -> None:
    text, how = LINES[name]
    ax.loglog(*zip(*at), label=text, **how._asdict())
    ax.set(**labels)


def plots(found) -> None:
    """Time a step along four sizes; time and memory of long sequences."""
    from matplotlib.ticker import LogLocator

    with figure(PICTURES / 'performance.png', 3, 2, 8.6) as (drawn, axes):
        for ax, (axis, column, label, ticks) in zip(axes.flat, AXES):
            for name in LINES:
                at = [(r['spec'][column], t) for r in found['scaling'][axis] if (t := ms(r, name))]
                lines(ax, name, at, xlabel=label, ylabel='ms a step')
            ax.set_xticks(ticks, [f'{x:,}' for x in ticks])
        drawn.legend(*axes[0, 0].get_legend_handles_labels(), loc='outside upper center', ncols=2)
        both = ('seconds', 1, 'seconds, all steps'), ('peak', 2**20, 'peak memory, MiB')
        for ax, (what, unit, label) in zip(axes[2], both):
            for rule, name in OF_RULES.items():
                rows = [r for r in found['memory'] if r['rule'] == rule and 'peak' in r]
                at = [(r['steps'], r[what] / unit) for r in rows]
                lines(ax, name, at, xlabel='steps (GRU of 64 units)', ylabel=label)
            ax.set_xticks(STEPS, [f'{x:,}' for x in STEPS])
        for ax in axes.flat:
            ax.minorticks_off()
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
            ax.yaxis.set_major_formatter('{x:,g}')


# the page ---------------------------------------------------------------------------------------

PARTS = {
    f.__name__.replace('_', ' '): f
    for f in (
        *(sequences, cells, windows, peers, updates, updates_beside, progress, precision, once),
        *(memory, stacks, python, corners, aims),
    )
}
MEASURED = {'environments', 'sequences', 'cells', 'windows', 'updates', 'progress', 'precision'}
MEASURED |= {'once', 'stacks', 'memory', 'scaling', 'corners'}
NAMED = {c.name for c in SEQUENCES}


def values_of(found: dict, machine: str) -> dict[str, str]:
    """What the placeholders of the templates stand for."""
    return (
        figures(found)
        | {name: make(found) for name, make in PARTS.items()}
        | {
            'calls of sequences': calls(SEQUENCES, found),
            'calls of updates': calls(UPDATES, found),
            'calls of cells': calls([c for c in OF_CELLS if c.name not in NAMED], found),
            'machine': machine,
            'accelerator': accelerator(kept(RESULTS / 'h100.json')),
            'brain scale': brain_scale(kept(RESULTS / 'brain_scale.json')),
        }
    )


def page(found: dict, machine: str) -> str:
    """The page."""
    return filled('performance.in.md', values_of(found, machine))


def readme(text: str, found: dict, machine: str) -> str:
    """Replace README's section on costs."""
    costs = filled('costs.in.md', values_of(found, machine))
    return SECTION.sub(lambda m: costs, text)


def main():
    path = ([Path(a) for a in sys.argv[1:]] or sorted(RESULTS.glob('*-cores*.json')))[0]
    found = kept(path)
    if missing := MEASURED - found.keys():
        sys.exit(f'{path} lacks {", ".join(sorted(missing))}: run performance.py --parts with them')
    plots(found)
    (DOCS / 'performance.md').write_text(page(found, path.stem), encoding='utf-8')
    made = readme(README.read_text(encoding='utf-8'), found, path.stem)
    README.write_text(made, encoding='utf-8')


if __name__ == '__main__':
    main()
