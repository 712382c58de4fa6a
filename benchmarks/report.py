"""Make ``docs/performance.md`` and its plots of what ``performance.py`` measured.

    python benchmarks/report.py [results.json]
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
DOCS = HERE.parent / 'docs'


def name_of(spec) -> str:
    return f'{spec[0]} {spec[1]} ({spec[2]} inputs, T {spec[3]})'


def ms(row, name) -> float | None:
    times = row['times'].get(name, {})
    return times['median'] / row['spec'][3] * 1e3 if 'median' in times else None


def table(head: list[str], rows: list[list]) -> str:
    def text(x):
        return '' if x is None else x if isinstance(x, str) else f'{x:.3g}'
    lines = [head, ['---'] * len(head), *[[text(x) for x in row] for row in rows]]
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def trace_bytes(spec) -> int:
    kind, units, inputs, _, *more = spec
    return 4 * (more or [16])[0] * (inputs + units) * units * (3 if kind == 'gru' else 1)


def ratio(a, b):
    return a / b if a and b else None


def best_chunk(row):
    chunks = [ms(row, name) for name in row['times'] if name.startswith('public d_rtrl chunk')]
    return min((c for c in chunks if c), default=None)


def sequences(rows) -> str:
    one, two = [], []
    for row in rows:
        of = lambda name, row=row: ms(row, name)
        one.append([name_of(row['spec']), of('bptt'), of('d_rtrl drop'), of('d_rtrl trace'), of('es_d_rtrl drop'), of('es_d_rtrl trace'),
                    of('bare model'), of('evaluation'), of('public d_rtrl'), best_chunk(row), of('public pp_prop')])
        two.append([name_of(row['spec']), ratio(of('d_rtrl drop'), of('bptt')), ratio(of('d_rtrl trace'), of('bptt')),
                    ratio(of('d_rtrl drop'), of('public d_rtrl')), ratio(of('d_rtrl trace'), of('public d_rtrl')),
                    ratio(of('d_rtrl drop'), best_chunk(row)), ratio(of('es_d_rtrl drop'), of('public pp_prop')),
                    ratio(of('evaluation'), of('bare model')), ratio(of('least operations'), of('d_rtrl drop')),
                    ratio(of('least operations'), of('d_rtrl trace'))])
    return (table(['ms a step', 'BPTT', 'D_RTRL drop', 'D_RTRL trace', 'ES drop', 'ES trace', 'model alone', '`etrace_evolve`',
                   '0.2.6 D_RTRL', '0.2.6 best chunk', '0.2.6 pp_prop'], one) + '\n\n'
            + table(['ratio', 'drop / BPTT', 'trace / BPTT', 'drop / 0.2.6', 'trace / 0.2.6', 'drop / 0.2.6 best chunk',
                     'ES / 0.2.6 pp_prop', 'evolve / model', 'least operations / drop', 'least operations / trace'], two)
            + '\n\nAims: 1.0, 1.0, 1/12 = 0.083 (256) and 1/30 = 0.033 (512), the same, 0.6, 0.6, 1.05.')


def updates(rows) -> str:
    one = []
    for row in rows:
        of = lambda name, row=row: ms(row, name)
        rw, between = of('read and write of the trace'), 4 if trace_bytes(row['spec']) > 2 ** 24 else 2
        one.append([name_of(row['spec']), rw, of('etrace_train'), *[of(f'written every {k}') for k in (1, 2, 4, 8)], of('own loop'),
                    of('public own loop'), ratio(of('etrace_train'), rw), ratio(of('etrace_train'), of('public own loop')),
                    ratio(of('own loop'), of('public own loop')), of('bfloat16'),
                    ratio(rw * (1 + 2 / between) / 2, of('etrace_train'))])
    return table(['ms a step', 'read + write of the trace', '`etrace_train`', 'written every step', 'every 2', 'every 4', 'every 8',
                  'own loop', '0.2.6 own loop', 'train / read + write', 'train / 0.2.6', 'own loop / 0.2.6', 'bfloat16 trace',
                  'least bytes / train'], one) + (
        '\n\nAims: 3.0 (then 2.0) times one donated read and write of an array of the trace\'s size (`e * a + b`), whole step included; '
        '0.12 of 0.2.6.')


def progress(rows) -> str:
    return '; '.join(f'`{name_of(r["spec"])}` {r["times"]["on"]["low"] / r["times"]["off"]["low"] - 1:+.1%}' for r in rows)


def precision(rows) -> str:
    return table(['error of the gradient', 'worst parameter'], [
        [name_of(r['spec']), f'{max(r["errors"].values()):.2%}'] for r in rows])


def once(found) -> str:
    rows = [[name_of(r['spec']), r['rule'], r['ours'], r.get('public'), ratio(r['ours'], r.get('public'))] for r in found['first']]
    imports = sorted(r['braintrace'] for r in found['import'])
    base = sorted(r['brainstate'] for r in found['import'])
    return table(['first call, seconds', 'rule', 'ours', '0.2.6', 'ratio'], rows) + (
        f'\n\nAim: 1.2. Importing `braintrace` after `brainstate` ({base[len(base) // 2]:.2f} s) takes '
        f'{imports[len(imports) // 2]:.2f} s more (median of {len(imports)}; aim 0.15 s).')


def memory(rows) -> str:
    lengths = sorted({r['steps'] for r in rows})
    by = {(r['rule'], r['steps']): r for r in rows if 'peak' in r}
    rules = ('d_rtrl', 'es_d_rtrl', 'bptt')
    body = [[f'{t:,}', *[by[r, t]['peak'] / 2 ** 20 if (r, t) in by else None for r in rules],
             *[by[r, t]['seconds'] if (r, t) in by else None for r in rules]] for t in lengths]
    growth = {r: (by[r, 40_000]['peak'] - by[r, 2000]['peak']) / 1e6 for r in rules if (r, 40_000) in by and (r, 2000) in by}
    grown = ', '.join(f'{r} {g:+.0f} MB' for r, g in growth.items())
    body = [[f'{x:.0f}' if isinstance(x, float) and 1 <= i <= 3 else x for i, x in enumerate(row)] for row in body]
    return table(['steps', 'MiB D_RTRL', 'MiB ES_D_RTRL', 'MiB BPTT', 's D_RTRL', 's ES_D_RTRL', 's BPTT'], body) + (
        f'\n\nFrom 2,000 to 40,000 steps: {grown} (aim: at most +40 MB). Seconds hold the compilation.')


def plots(found) -> None:
    fig, axes = plt.subplots(2, 3, figsize=(14, 7.5), layout='constrained')
    names = {'bptt': ('BPTT', 'k'), 'd_rtrl drop': ('D_RTRL, trace dropped', 'C0'), 'd_rtrl trace': ('D_RTRL, trace kept', 'C1'),
             'es_d_rtrl trace': ('ES_D_RTRL', 'C2'), 'etrace_train': ('D_RTRL, update every step', 'C3')}
    for ax, (axis, column, label) in zip(axes.flat, (('units', 1, 'units N (inputs N, B = 16)'), ('batch', 4, 'batch B (N = 128)'),
                                                     ('layers', 5, 'layers (N = 128, B = 16)'), ('steps', 3, 'steps T (N = 128, B = 16)')),
                                          strict=False):
        for name, (text, colour) in names.items():
            points = [(r['spec'][column], ms(r, name)) for r in found['scaling'][axis] if ms(r, name)]
            ax.loglog(*zip(*points, strict=True), 'o-', color=colour, label=text, base=2)
        ax.set(xlabel=label, ylabel='ms a step')
    axes[0, 0].legend(fontsize=8)
    for rule, (text, colour) in {'bptt': names['bptt'], 'd_rtrl': ('D_RTRL', 'C0'), 'es_d_rtrl': ('ES_D_RTRL', 'C2')}.items():
        for ax, what, unit in ((axes[1, 1], 'seconds', 1), (axes[1, 2], 'peak', 2 ** 20)):
            points = [(r['steps'], r[what] / unit) for r in found['memory'] if r['rule'] == rule and 'peak' in r]
            ax.loglog(*zip(*points, strict=True), 'o-', color=colour, label=text)
    axes[1, 1].set(xlabel='steps T (gru 64, B = 16)', ylabel='seconds, compilation included')
    axes[1, 2].set(xlabel='steps T (gru 64, B = 16)', ylabel='peak memory of the process, MiB')
    fig.savefig(DOCS / 'performance.png', dpi=110)


def main():
    files = [Path(a) for a in sys.argv[1:]] or sorted((HERE / 'results').glob('*.json'))
    text = (HERE / 'performance.in.md').read_text()
    path = files[0]
    found = json.loads(path.read_text())
    parts = {'sequences': sequences, 'updates': updates, 'progress': progress, 'precision': precision, 'once': once, 'memory': memory}
    for name, make in parts.items():
        text = text.replace('{{' + name + '}}', make(found[name]) if name in found else '(not measured)')
    if {'scaling', 'memory'} <= found.keys():
        plots(found)
    (DOCS / 'performance.md').write_text(text.replace('{{machine}}', path.stem))


if __name__ == '__main__':
    main()
