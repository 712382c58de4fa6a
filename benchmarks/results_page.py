"""Make ``docs/results.md``, its pictures and README's "What it learns" from the records."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean

import acting
import streams
import streams_page
from matplotlib.ticker import EngFormatter, MaxNLocator
from printer import (
    DOCS,
    PICTURES,
    README,
    Records,
    figure,
    filled,
    folded,
    in_bytes,
    listed,
    look,
    table,
)
from results import CLIP, PATH, SEEDS, WAYS, Setting, settings
from runner import kept

SECTION = re.compile(r'(## What it learns\n\n[^|]*)\|.*?(?=\n\n)', re.DOTALL)
SAME_STEP = tuple(way.name for way in WAYS if way.name.startswith('same step'))
COMPARED = ('D_RTRL', 'BPTT')
FIRST = ('evidence 7', 'adding 200', 'drifting filter', 'Mackey-Glass 17, 6 ahead')
FEW = ('BPTT', 'truncated BPTT, 16', *SAME_STEP, 'D_RTRL', 'ES_D_RTRL 0.9')  # of the first picture
SHORT = ('BPTT', 'truncated BPTT, 16', 'same step, RMSprop', 'D_RTRL')  # of README's

TOLD = {  # tasks in words
    'evidence 7': 'evidence accumulation, 225 steps of 10 ms',
    'evidence 7, 1 ms': 'evidence accumulation, 2,250 steps of 1 ms',
    'match 2 among 2': 'delayed match to sample, 500 ms',
    'adding 200': 'adding problem, 200 steps',
    'copy 50': 'copy memory, delay of 50',
    'copy 200': 'copy memory, delay of 200',
    'digits by pixels': 'digits, pixel by pixel',
    'characters 100': 'the next character, 100 steps',
    'pattern': 'pattern generation',
    'drifting filter': 'a drifting stream, a million steps',
    'Mackey-Glass 17, 6 ahead': 'the Mackey-Glass series, a stream of 10,000 steps',
}


class Found(Records):
    """The records, by setting and row."""

    def __init__(self, found: dict):
        self.settings = settings()
        wanted = [(s.task.name, s.net, way.name) for s in self.settings for way in s.rows()]
        super().__init__(found, 'make results', wanted)

    def of(self, setting: Setting) -> dict[str, dict]:
        """The rows of a setting that are there, by name."""
        keys = {way.name: (setting.task.name, setting.net, way.name) for way in setting.rows()}
        return {name: self.rows[key] for name, key in keys.items() if key in self.rows}

    def floor(self, setting: Setting) -> float:
        """The floor that was met when the rows were measured."""
        return next(iter(self.of(setting).values()))['floor']

    def learnt(self, setting: Setting) -> dict[str, dict]:
        return {name: row for name, row in self.of(setting).items() if 'scores' in row}

    def compared(self, setting: Setting) -> dict[str, dict]:
        """The better row of the same step, and those of D_RTRL and BPTT."""
        learnt, sign = self.learnt(setting), 1 if setting.task.metric == 'accuracy' else -1
        cheap = [learnt[name] for name in SAME_STEP if name in learnt]
        best = {'same step': max(cheap, key=lambda r: sign * mean(r['scores']))} if cheap else {}
        return best | {name: learnt[name] for name in COMPARED if name in learnt}

    def there(self) -> list[Setting]:
        """The settings of which something is measured."""
        return [setting for setting in self.settings if self.learnt(setting)]


def good(setting: Setting, row: dict) -> bool:
    """Whether the mean of the seeds is as good as the aim."""
    return setting.task.reached(mean(row['scores']), setting.aim)


def told(setting: Setting) -> str:
    return TOLD.get(setting.task.name, setting.task.name)


def budget(found: Found, setting: Setting) -> str:
    """What all rows of a setting have in common, in a sentence."""
    task = setting.task
    floor, aim = task.shown(found.floor(setting)), task.shown(setting.aim)
    if task.stream:
        text = f'A stream of {task.steps:,} steps, an update at each of them (or each window)'
    else:
        text = f'{task.steps:,} steps, {setting.updates:,} updates of {setting.batch} sequences'
        text += f', {setting.test} test sequences'
    decay = '' if task.stream else ', falling along a cosine'
    return f'{text}; learning rate {setting.rate:g}{decay}. Floor {floor}, aim {aim}.'


def of_setting(found: Found, setting: Setting) -> str:
    """The table of one task on one net."""
    task, learnt = setting.task, found.learnt(setting)
    bptt = learnt.get('BPTT', {}).get('seconds')
    columns = {
        'row': lambda row: row['row'],
        'mean': lambda row: task.shown(mean(row['scores'])),
        'seeds': lambda row: ' to '.join(task.shown(f(row['scores'])) for f in (min, max)),
        'aim reached': lambda row: 'yes' if good(setting, row) else 'no',
        'cosine': cosine,
        'seconds': lambda row: f'{row["seconds"]:.0f}',
        'seconds / BPTT': lambda row: row['seconds'] / bptt if bptt else None,
        'to compile': lambda row: f'{row["compile_seconds"]:.0f}',
        'memory': lambda row: in_bytes(row['memory']),
    }
    refused = [(n, r['refused']) for n, r in found.of(setting).items() if 'refused' in r]
    told = [f'{name} is refused: {why}' for name, why in refused]
    return '\n\n'.join([listed(learnt.values(), columns), *told])


def cosine(row: dict) -> str:
    """Those of the gradient before training, in its middle and at its end."""
    told = (
        'not yet' if error > 0.2 else f'{value:.2f}' for value, error in row.get('cosines') or ()
    )
    return ', '.join(told) or '-'


def tables(found: Found) -> str:
    return '\n\n'.join(
        folded(f'{told(s)}: {s.net}', budget(found, s), of_setting(found, s))
        for s in found.settings
        if found.of(s)
    )


def columns(found: Found) -> dict:
    """What the tables say of a setting."""

    def score(name: str):
        def column(s: Setting) -> str:
            row = found.compared(s).get(name)
            return s.task.shown(mean(row['scores'])) if row else '-'

        return column

    return {
        'task': told,
        'network': lambda s: s.net.split(',')[0],
        'floor': lambda s: s.task.shown(found.floor(s)),
        'aim': lambda s: s.task.shown(s.aim),
        **{name: score(name) for name in ('same step', *COMPARED)},
        'aim reached by': lambda s: ', '.join(reached(found, s)) or 'none',
    }


def reached(found: Found, setting: Setting) -> list[str]:
    """The rows that are compared, of which the mean is as good as the aim."""
    return [name for name, row in found.compared(setting).items() if good(setting, row)]


def summary(found: Found) -> str:
    """A row for each setting: what the same step reaches, what D_RTRL and BPTT reach."""
    return listed(found.there(), columns(found))


def ways(found: Found) -> str:
    """The means of all rows of all settings."""
    rows = []
    for s in found.there():
        shown = {n: s.task.shown(mean(r['scores'])) for n, r in found.learnt(s).items()}
        rows.append([told(s), *(shown.get(way.name, '-') for way in WAYS)])
    return folded('Every rule on every task', table(['task', *(way.name for way in WAYS)], rows))


def first(found: Found) -> str:
    """The result in one sentence."""
    each = [reached(found, s) for s in found.there()]
    hard = [names for names in each if 'same step' not in names]
    return (
        f'On {len(hard)} of {len(each)} tasks the gradient of the current step alone misses the '
        f'aim; D_RTRL, which learns online, reaches it on {sum("D_RTRL" in r for r in hard)} of '
        f'these {len(hard)}.'
    )


def baseline(found: Found) -> str:
    """How far the same step is ahead of D_RTRL on the series of Mackey and Glass."""
    rows = next((found.compared(s) for s in found.settings if s.task.name == FIRST[-1]), {})
    if not {'same step', 'D_RTRL'} <= rows.keys():
        return '(not measured)'
    return f'{mean(rows["D_RTRL"]["scores"]) / mean(rows["same step"]["scores"]):.1f}'


def agents() -> list[dict]:
    """The records of ``acting.py``."""
    return kept(acting.PATH)['records']


def page(records: dict) -> str:
    """The page, from its template."""
    found = Found(records)
    parts = first, baseline, summary, ways, tables, Records.state, Records.load
    values = {f.__name__: f(found) for f in parts} | {'seeds': str(len(SEEDS))}
    values |= {'acting': acting.tables(agents()), 'acting summary': acting.summary(agents())}
    values |= streams_page.page(kept(streams.PATH)['records'])
    values |= {f.__name__: f(agents()) for f in (acting.step_time, acting.grid)}
    return filled('results.in.md', values | {'clip': f'{CLIP:g}'})


def readme(text: str, records: dict) -> str:
    """Replace README's table of what is learnt: a row for each setting that the same step fails."""
    found = Found(records)
    rows = [s for s in found.there() if 'same step' not in reached(found, s)]
    kinds = {n: c for n, c in columns(found).items() if not n.startswith('aim')}
    return SECTION.sub(lambda m: m[1] + listed(rows, kinds), text)


def curve(ax, row: dict) -> None:
    """The mean of the seeds and their span, along the updates."""
    done = [at for at, _ in row['looks']]
    scores = [scores for _, scores in row['looks']]
    how = look(row['row'])
    ax.plot(done, [mean(s) for s in scores], label=row['row'], markevery=0.2, **how)
    lows, highs = ([f(s) for s in scores] for f in (min, max))
    ax.fill_between(done, lows, highs, color=how['color'], alpha=0.12, linewidth=0)


def panel(ax, found: Found, setting: Setting, names: tuple) -> None:
    """The score on validation data along the updates, by these rows."""
    for name, row in found.learnt(setting).items():
        if name in names:
            curve(ax, row)
    ax.axhline(found.floor(setting), color='grey', linewidth=1, linestyle=':')
    task, _, detail = told(setting).partition(', ')
    ax.set_title(f'{task}\n{detail or setting.net.split(",")[0]}')
    ax.set(xlabel='steps' if setting.task.stream else 'updates', ylabel=setting.task.metric)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(EngFormatter(sep=''))
    if setting.task.metric == 'accuracy':
        ax.yaxis.set_major_formatter('{x:.0%}')
    elif ax.dataLim.ymin < found.floor(setting) / 5:
        ax.set_yscale('log')


def draw(found: Found, path: Path, chosen: list[Setting], names: tuple) -> None:
    """A panel for each of these settings, in two columns, and a legend of their rows."""
    there = [s for s in chosen if found.learnt(s)]
    lines = -(-len(there) // 2)
    with figure(path, lines, 2, 2.75 * lines + 0.8, squeeze=False) as (drawn, axes):
        handles: dict = {}
        for ax, setting in zip(axes.flat, there):
            panel(ax, found, setting, names)
            handles |= dict(zip(*ax.get_legend_handles_labels()[::-1]))
        for ax in axes.flat[len(there) :]:
            ax.set_axis_off()
        ordered = [way.name for way in WAYS if way.name in handles]
        drawn.legend([handles[n] for n in ordered], ordered, loc='outside lower center', ncols=2)


def draw_first(found: Found, path: Path) -> None:
    """The first setting by a few rows, for README and the front page: half as wide."""
    with figure(path, 1, 1, 3.8, width=4.5) as (drawn, ax):
        panel(ax, found, found.settings[0], SHORT)
        ax.set(ylabel='right answers', ylim=(0.4, 1.02))
        ax.set_title('evidence over two seconds')
        drawn.legend(loc='outside lower center', ncols=2)


def main():
    records = kept(PATH)
    found = Found(records)
    top, rest = (
        [s for s in found.settings if (s.task.name in FIRST) == on] for on in (True, False)
    )
    draw(found, PICTURES / 'results.png', top, FEW)
    draw(found, PICTURES / 'results_more.png', rest, tuple(way.name for way in WAYS))
    draw_first(found, PICTURES / 'evidence.png')
    acting.draw(agents(), PICTURES / 'acting.png')
    streams_page.draw(kept(streams.PATH)['records'], PICTURES / 'streams.png')
    (DOCS / 'results.md').write_text(page(records), encoding='utf-8')
    README.write_text(readme(README.read_text(encoding='utf-8'), records), encoding='utf-8')


if __name__ == '__main__':
    main()
