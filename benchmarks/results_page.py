"""Make ``docs/results.md``, its pictures and README's "What it learns" from the records.

python benchmarks/results_page.py [records.json]
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from statistics import mean

import acting
import matplotlib
import matplotlib.pyplot as plt
from causes import PATH as CAUSES
from matplotlib.ticker import PercentFormatter
from results import CLIP, PATH, WAYS, Effort, Setting, settings
from rules_page import size
from tables import table

matplotlib.use('Agg')

HERE = Path(__file__).parent
DOCS = HERE.parent / 'docs'
PICTURES = DOCS / 'pictures'
README = HERE.parent / 'README.md'
SECTION = re.compile(r'(## What it learns\n\n[^|]*)\|.*?(?=\n\n)', re.DOTALL)
SHORT = {
    'BPTT': '#000000',
    'D_RTRL': '#0072B2',
    'truncated BPTT, 16': '#E69F00',
    'same step, RMSprop': '#999999',
}
SAME_STEP = tuple(way.name for way in WAYS if way.name.startswith('same step'))


TOLD = {  # tasks in README
    'evidence 7': 'evidence accumulation, 225 steps of 10 ms',
    'evidence 7, 1 ms': 'evidence accumulation, 2,250 steps of 1 ms',
    'match 2 among 2': 'delayed match to sample, 500 ms',
    'adding 200': 'adding problem, 200 steps',
    'copy 50': 'copy memory, delay of 50',
    'copy 200': 'copy memory, delay of 200',
    'digits by pixels': 'digits, pixel by pixel',
    'pattern': 'pattern generation',
    'drifting filter': 'a drifting stream, a million steps',
}


class Found:
    """The records, by setting and row."""

    def __init__(self, found: dict):
        self.versions = found.get('versions', {})
        self.rows = {(r['task'], r['net'], r['row']): r for r in found['records']}
        self.settings = settings()

    def of(self, setting: Setting) -> dict[str, dict]:
        """The rows of a setting that are there, by name."""
        keys = {way.name: (setting.task.name, setting.net, way.name) for way in setting.rows()}
        return {name: self.rows[key] for name, key in keys.items() if key in self.rows}

    def floor(self, setting: Setting) -> float:
        """The floor that was met when the rows were measured."""
        return next(iter(self.of(setting).values()))['floor']

    def learnt(self, setting: Setting) -> dict[str, dict]:
        return {name: row for name, row in self.of(setting).items() if 'scores' in row}


def good(setting: Setting, row: dict) -> bool:
    """Whether the mean of the seeds is as good as the aim."""
    return setting.task.reached(mean(row['scores']), setting.aim)


def heading(setting: Setting) -> str:
    return f'### {setting.task.name}: {setting.net}'


def budget(found: Found, setting: Setting) -> str:
    """What all rows of a setting have in common, in a sentence."""
    task = setting.task
    floor, aim = task.shown(found.floor(setting)), task.shown(setting.aim)
    if task.stream:
        text = f'A stream of {task.steps:,} steps, an update at each of them (or each window)'
    else:
        text = f'{task.steps} steps, {setting.updates} updates of {setting.batch} sequences'
        text += f', {setting.test} test sequences'
    decay = '' if task.stream else ', falling along a cosine'
    text += f'; learning rate {setting.rate:g}{decay}. Who knows nothing has {floor}; aim: {aim}.'
    return text


def of_setting(found: Found, setting: Setting) -> str:
    """The table of one task on one net."""
    task, rows = setting.task, []
    learnt = found.learnt(setting)
    beside = learnt.get('BPTT')
    for name, row in learnt.items():
        scores = sorted(row['scores'])
        span = f'{task.shown(scores[0])} to {task.shown(scores[-1])}'
        time = row['seconds'] / beside['seconds'] if beside else None
        costs = [f'{row["seconds"]:.0f}', time, f'{row["compile_seconds"]:.0f}']
        reached = 'yes' if good(setting, row) else 'no'
        shown = task.shown(mean(scores))
        rows.append([name, shown, span, reached, *costs, size(row['memory'])])
    head = ['row', 'mean of the seeds', 'seeds', 'aim reached', 'seconds', 'seconds / BPTT']
    text = table([*head, 'to compile', 'memory'], rows)
    refused = [(n, r['refused']) for n, r in found.of(setting).items() if 'refused' in r]
    return '\n\n'.join([text, *(f'{name} is refused: {why}' for name, why in refused)])


def tables(found: Found) -> str:
    return '\n\n'.join(
        '\n\n'.join([heading(s), budget(found, s), of_setting(found, s)])
        for s in found.settings
        if found.of(s)
    )


def best_of_same_step(setting: Setting, learnt: dict) -> str:
    """The name of the better row of the same step; '' where none is there."""
    sign = 1 if setting.task.metric == 'accuracy' else -1
    cheap = [n for n in SAME_STEP if n in learnt]
    return max(cheap, key=lambda n: sign * mean(learnt[n]['scores']), default='')


def summary(found: Found) -> str:
    """A row for each setting: what the same step reaches, what D_RTRL and BPTT reach."""
    rows = []
    for s in found.settings:
        learnt = found.learnt(s)
        if not learnt:
            continue
        shown = {n: s.task.shown(mean(r['scores'])) for n, r in learnt.items()}
        best = best_of_same_step(s, learnt)
        told = ['D_RTRL', 'D_RTRL, whole credit', 'ES_D_RTRL 0.9', 'BPTT']
        fails = 'no' if best and good(s, learnt[best]) else 'yes'
        floor, aim = s.task.shown(found.floor(s)), s.task.shown(s.aim)
        cells = [shown.get(n, '-') for n in told]
        rows.append([s.task.name, s.net, floor, aim, shown.get(best, '-'), fails, *cells])
    head = ['task', 'net', 'floor', 'aim', 'best same step', 'it fails']
    return table([*head, 'D_RTRL', 'whole credit', 'ES_D_RTRL 0.9', 'BPTT'], rows)


def state(found: Found) -> str:
    """What there is, and what is not there yet."""
    had = ', '.join(f'{name} {value}' for name, value in found.versions.items())
    count = sum(len(found.of(s)) for s in found.settings)
    wanted = sum(len(s.rows()) for s in found.settings)
    text = f'{count} rows of `make results` ({had}).'
    return text if count == wanted else f'{text} {wanted - count} are not measured yet.'


def load(found: Found) -> str:
    """How busy the machine was."""
    loads = sorted(row['load'] for row in found.rows.values())
    return f'{loads[len(loads) // 2]:.1f}' if loads else 'not known'


def causes() -> dict[str, str]:
    """The tables of ``causes.py``, by question."""
    kept = json.loads(CAUSES.read_text(encoding='utf-8'))
    return {f'why {name}': table(head, rows) for name, (head, *rows) in kept.items()}


def agents() -> list[dict]:
    """The records of ``acting.py``."""
    return json.loads(acting.PATH.read_text(encoding='utf-8'))['records']


def page(records: dict) -> str:
    """The page, from its template."""
    found, effort = Found(records), Effort()
    values = {f.__name__: f(found) for f in (tables, summary, state, load)}
    values['acting'] = acting.tables(agents())
    values |= causes() | {'seeds': str(len(effort.seeds)), 'clip': f'{CLIP:g}'}
    text = (HERE / 'results.in.md').read_text(encoding='utf-8')
    return re.sub(r'{{(.*?)}}', lambda m: values[m[1]], text)


def readme(text: str, records: dict) -> str:
    """Replace README's table of what is learnt: a row for each setting that the same step fails."""
    found, rows = Found(records), []
    for s in found.settings:
        learnt = found.learnt(s)
        if 'D_RTRL' in learnt and not good(s, learnt[best_of_same_step(s, learnt)]):
            shown = {n: s.task.shown(mean(r['scores'])) for n, r in learnt.items()}
            cells = [shown[best_of_same_step(s, learnt)], shown['D_RTRL'], shown.get('BPTT', '-')]
            name = TOLD.get(s.task.name, s.task.name)
            rows.append([name, s.net.split(',')[0], s.task.shown(found.floor(s)), *cells])
    made = table(['task', 'network', 'floor', 'same step', 'D_RTRL', 'BPTT'], rows)
    return SECTION.sub(lambda m: m[1] + made.strip(), text)


def curve(ax, setting: Setting, row: dict, colour) -> None:
    """The mean of the seeds and their span, along the updates."""
    done = [at for at, _ in row['looks']]
    scores = [scores for _, scores in row['looks']]
    ax.plot(done, [mean(s) for s in scores], color=colour, label=row['row'])
    lows, highs = ([f(s) for s in scores] for f in (min, max))
    ax.fill_between(done, lows, highs, color=colour, alpha=0.15, linewidth=0)


def draw(found: Found, path: Path) -> None:
    """A panel for each setting: the score on validation data along the updates."""
    there = [s for s in found.settings if found.learnt(s)]
    count = max(len(there), 1)
    columns = min(3, count)
    lines = math.ceil(count / columns)
    inches = (4.4 * columns, 3.1 * lines + 0.5)
    figure, axes = plt.subplots(lines, columns, figsize=inches, layout='constrained', squeeze=False)
    colours = dict(zip((way.name for way in WAYS), plt.get_cmap('tab10').colors))
    handles = {}
    for ax, setting in zip(axes.flat, there):
        for name, row in found.learnt(setting).items():
            curve(ax, setting, row, colours[name])
        handles |= dict(zip(*ax.get_legend_handles_labels()[::-1]))
        ax.axhline(found.floor(setting), color='grey', linewidth=1, linestyle=':')
        ax.set_title(f'{setting.task.name}, {setting.net}', fontsize=9)
        ax.set_xlabel('steps' if setting.task.stream else 'updates', fontsize=8)
        ax.set_ylabel(setting.task.metric, fontsize=8)
        ax.set_yscale('linear' if setting.task.metric == 'accuracy' else 'log')
        ax.tick_params(labelsize=7)
    for ax in axes.flat[len(there) :]:
        ax.set_axis_off()
    ordered = [way.name for way in WAYS if way.name in handles]
    where = {'loc': 'outside lower center', 'ncols': 4, 'fontsize': 8}
    figure.legend([handles[name] for name in ordered], ordered, **where)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_first(found: Found, path: Path) -> None:
    """The first setting alone, by a few rows, for README."""
    setting = found.settings[0]
    figure, ax = plt.subplots(figsize=(6.4, 4), layout='constrained')
    for name, colour in SHORT.items():
        if name in found.learnt(setting):
            curve(ax, setting, found.learnt(setting)[name], colour)
    ax.axhline(found.floor(setting), color='grey', linewidth=1, linestyle=':')
    ax.set(xlabel='updates', ylabel='right answers', ylim=(0.4, 1.02))
    ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.set_title('evidence over two seconds, 100 spiking neurons', fontsize=11)
    figure.legend(loc='outside lower center', ncols=4, frameon=False, fontsize=9)
    ax.spines[['top', 'right']].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PATH
    records = json.loads(path.read_text(encoding='utf-8'))
    draw(Found(records), PICTURES / 'results.png')
    draw_first(Found(records), PICTURES / 'evidence.png')
    acting.draw(agents(), PICTURES / 'acting.png')
    (DOCS / 'results.md').write_text(page(records), encoding='utf-8')
    README.write_text(readme(README.read_text(encoding='utf-8'), records), encoding='utf-8')


if __name__ == '__main__':
    main()
