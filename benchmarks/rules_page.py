"""Make ``docs/rules.md`` and its picture from the records of ``rules.py``.

python benchmarks/rules_page.py [records.json]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import mean, median

from learning import CLIP, TESTED, Effort
from methods import BPTT, METHODS, SGD_FACTOR
from rules import PATH, named, settings, todo
from tables import table

HERE = Path(__file__).parent
DOCS = HERE.parent / 'docs'
PICTURE = DOCS / 'pictures' / 'rules.png'
MARGIN = 0.1  # a row beats the floor, or another row, by at least this share of the floor
NEAR = 0.9  # a row is as good as another one from this share of its gain on
SAME_STEP = tuple(m.name for m in METHODS if m.name.startswith('same step'))
OFFLINE = tuple(m.name for m in METHODS if m.cut or m.window) + (BPTT,)


class Board:
    """The records, by setting and row."""

    def __init__(self, found: dict):
        self.versions = found.get('versions', {})
        self.rows = {(r['task'], r['net'], r['row']): r for r in found['records']}
        every = [named(*row) for row in todo(settings())]
        self.missing = [name for name in every if name not in self.rows]
        self.places = [(s.task, s.net, s) for s in settings()]

    def of(self, task, net: str) -> list[dict]:
        """The rows of a setting that learnt, in order."""
        there = [self.rows.get((task.name, net, m.name), {}) for m in METHODS]
        return [row for row in there if 'scores' in row]

    def gain(self, row: dict) -> float | None:
        """The share of BPTT's way from the floor that the mean of the seeds went, not below 0."""
        reference = self.rows.get((row['task'], row['net'], BPTT), {})
        if 'scores' not in reference:
            return None
        way = mean(reference['scores']) - row['floor']
        went = (mean(row['scores']) - row['floor']) / way
        return max(went, 0.0) if went == went else 0.0

    def share(self, row: dict, what: str) -> float:
        """A cost beside that of BPTT."""
        return row[what] / self.rows[row['task'], row['net'], BPTT][what]

    def all_of(self, name: str) -> list[dict]:
        """The records of one row of the table, over the settings whose BPTT is there."""
        rows = [r for t, n, _ in self.places for r in self.of(t, n) if r['row'] == name]
        return [row for row in rows if self.gain(row) is not None]


def beats(row: dict) -> bool:
    """Whether the mean of the seeds is better than the floor by the margin."""
    sign = 1 if row['metric'] == 'accuracy' else -1
    return sign * (mean(row['scores']) - row['floor']) > MARGIN * row['floor']


def shown(value: float, metric: str) -> str:
    return f'{100 * value:.1f} %' if metric == 'accuracy' else f'{value:.3g}'


def size(count: float) -> str:
    return f'{count / 2**10:.3g} KiB' if count < 2**20 else f'{count / 2**20:.3g} MiB'


def cosines(row: dict) -> list[str]:
    return ['-' if c is None else f'{c:.2f}' for c in row['cosine']]


def of_setting(board: Board, task, net: str) -> str:
    """The table of one task on one net."""
    rows = [
        [
            row['row'],
            shown(mean(row['scores']), task.metric),
            ', '.join(shown(score, task.metric) for score in row['scores']),
            'beaten' if beats(row) else '**not beaten**',
            f'{row["rate"]:g}',
            row['time'],
            size(row['bytes']),
            *cosines(row),
        ]
        for row in board.of(task, net)
    ]
    floor = f'floor {shown(task.floor, task.metric)}'
    head = ['row', f'{task.metric}, mean', 'each seed', floor, 'rate', 'time', 'bytes']
    return table([*head, 'cosine, start', 'end'], rows)


def tables(board: Board) -> str:
    parts = [
        f'### {task.name}, {net}\n\n{of_setting(board, task, net)}'
        for task, net, _ in board.places
        if board.of(task, net)
    ]
    return '\n\n'.join(parts)


def of_settings(board: Board) -> str:
    head = ['task', 'net', 'T', 'batch', 'updates', 'floor', 'score']
    rows = [
        [
            task.name,
            net,
            str(task.steps),
            str(setting.batch),
            'along the stream' if task.stream else str(setting.updates),
            shown(task.floor, task.metric),
            task.metric,
        ]
        for task, net, setting in board.places
    ]
    return table(head, rows)


def summary(board: Board) -> str:
    """A row of the table over all settings."""
    head = ['row', 'settings', 'floor beaten', 'better than same step', 'gain']
    rows = []
    for method in METHODS:
        if not (found := board.all_of(method.name)):
            continue
        better = [row for row in found if ahead(board, row)]
        rows.append(
            [
                method.name,
                str(len(found)),
                str(sum(map(beats, found))),
                '-' if method.name in SAME_STEP else str(len(better)),
                f'{median(map(board.gain, found)):.0%}',
                median(board.share(row, 'time') for row in found),
                median(board.share(row, 'bytes') for row in found),
            ]
        )
    return table([*head, 'time / BPTT', 'bytes / BPTT'], rows)


def ahead(board: Board, row: dict) -> bool:
    """Whether a row is better than every row of the same step, by the margin."""
    same = [board.rows.get((row['task'], row['net'], name), {}) for name in SAME_STEP]
    sign = 1 if row['metric'] == 'accuracy' else -1
    best = max((sign * mean(r['scores']) for r in same if 'scores' in r), default=sign * 0)
    return sign * mean(row['scores']) - best > MARGIN * row['floor']


def choices(board: Board) -> str:
    """For each setting the best row that runs step by step, and the smallest that is near it."""
    head = ['task', 'net', 'best step by step', 'its gain', 'smallest that is near', 'its gain']
    rows = []
    for task, net, _ in board.places:
        found = [r for r in board.of(task, net) if r['row'] not in OFFLINE]
        if not found or board.gain(found[0]) is None:
            continue
        best = max(found, key=board.gain)
        near = [r for r in found if board.gain(r) >= NEAR * board.gain(best)]
        least = min(near, key=lambda r: (r['bytes'], -board.gain(r)))
        both = [[r['row'], f'{board.gain(r):.0%}'] for r in (best, least)]
        rows.append([task.name, net, *both[0], *both[1]])
    return table(head, rows)


def refused(board: Board) -> str:
    rows = [r for r in board.rows.values() if 'refused' in r]
    if not rows:
        return 'No row was refused.'
    return table(
        ['task', 'net', 'row', 'refused because'],
        [[r['task'], r['net'], r['row'], r['refused'].replace('|', '/')] for r in rows],
    )


def state(board: Board) -> str:
    """What there is, and what is not there yet."""
    had = ', '.join(f'{name} {value}' for name, value in board.versions.items())
    text = f'{len(board.rows)} rows of `make rules` ({had}).'
    if not board.missing:
        return text + ' No row is missing.'
    return f'{text} {len(board.missing)} rows are not measured yet; `make rules` adds them.'


def load(board: Board) -> str:
    """How busy the machine was: programs that ran or waited, for each core."""
    loads = [r['load'] for r in board.rows.values() if 'load' in r]
    unknown = len(board.rows) - len(loads)
    text = f'{median(loads):.1f}' if loads else 'not recorded'
    return text + (f' ({unknown} rows do not tell)' if loads and unknown else '')


def page(found: dict) -> str:
    """The page, from its template."""
    board, effort = Board(found), Effort()
    values = {f.__name__: f(board) for f in (tables, summary, choices, refused, state, load)}
    values |= {
        'settings': of_settings(board),
        'rates': ', '.join(f'{rate:g}' for rate in effort.rates),
        'seeds': str(len(effort.seeds)),
        'sgd': str(SGD_FACTOR),
        'clip': f'{CLIP:g}',
        'turns': str(effort.turns),
        'tested': str(TESTED),
        'margin': f'{MARGIN:.0%}',
        'near': f'{NEAR:.0%}',
    }
    text = (HERE / 'rules.in.md').read_text(encoding='utf-8')
    return re.sub(r'{{(.*?)}}', lambda m: values[m[1]], text)


def name_points(ax, told: list) -> None:
    """The names of points at the right edge, from high to low, each with a line to its point."""
    told = sorted(told, key=lambda point: -point[1])
    for number, (x, y, name) in enumerate(told):
        height = 0.98 - 0.96 * number / max(len(told) - 1, 1)
        ax.annotate(
            name,
            (x, y),
            (1.03, height),
            textcoords='axes fraction',
            fontsize=8,
            va='center',
            arrowprops={'arrowstyle': '-', 'color': 'grey', 'linewidth': 0.6, 'relpos': (0, 0.5)},
        )


def draw(board: Board, path: Path = PICTURE):
    """Quality against bytes and against time, each beside BPTT: a point for each setting, and the
    median of the row with its name.
    """
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(9, 11), layout='constrained', sharey=True)
    colours = plt.get_cmap('tab20').colors
    for ax, what in zip(axes, ('bytes', 'time')):
        told = []
        for colour, method in zip(colours, METHODS):
            found = board.all_of(method.name)
            at = [(max(board.share(r, what), 1e-3), min(board.gain(r), 1.5)) for r in found]
            if not at:
                continue
            ax.scatter(*zip(*at), s=9, color=colour, alpha=0.5)
            middle = [median(values) for values in zip(*at)]
            ax.scatter(*middle, s=70, color=colour, edgecolor='black')
            told.append((*middle, method.name))
        name_points(ax, told)
        ax.axhline(0, color='grey', linewidth=1)
        ax.axhline(1, color='grey', linewidth=1, linestyle='--')
        ax.set(xscale='log', xlabel=f'{what} beside BPTT', ylabel='gain: 0 is the floor, 1 is BPTT')
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main():
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else PATH
    found = json.loads(path.read_text(encoding='utf-8'))
    draw(Board(found))
    (DOCS / 'rules.md').write_text(page(found), encoding='utf-8')


if __name__ == '__main__':
    main()
