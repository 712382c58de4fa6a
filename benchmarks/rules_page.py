"""Make ``docs/rules.md`` and its picture from the records of ``rules.py``."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, median

import rules
from printer import DOCS, PICTURES, Records, figure, filled, folded, in_bytes, listed, look, table
from rules import BPTT, METHODS, PATH, Effort, Setting, settings
from runner import kept

PICTURE = PICTURES / 'rules.png'
COSTS = {  # what the picture calls them, and the numbers along their axes
    'bytes': ("bytes kept, as a share of BPTT's", (1e-3, 1e-2, 0.1, 1)),
    'time': ("time of a gradient, as a share of BPTT's", (0.7, 1, 2, 5, 10)),
}
LEAST = 1e-3  # where the picture puts a row that keeps nothing
CLOSE = 0.01  # gains that differ by less are drawn as equal
FAMILIES = {  # a row of each family, and what the picture calls the family
    'BPTT': 'BPTT',
    'truncated BPTT, 8': 'truncated BPTT',
    'same step, Adam': 'same step',
    'D_RTRL': 'a trace for each weight',
    'exact windows of 8': 'exact windows',
    'ES_D_RTRL 0.5': 'small traces',
    'signs': 'random traces',
}
MARGIN = 0.1  # a row beats the floor, or another row, by at least this share of the floor
NEAR = 0.9  # a row is as good as another one from this share of its gain on
SAME_STEP = tuple(m.name for m in METHODS if m.name.startswith('same step'))
OFFLINE = tuple(m.name for m in METHODS if m.cut or m.window) + (BPTT,)


class Board(Records):
    """The records, by setting and row."""

    def __init__(self, found: dict):
        self.settings = settings()
        super().__init__(found, 'make rules', list(rules.rows(self.settings)))

    def of(self, setting: Setting) -> list[dict]:
        """The rows of a setting that learnt, in order."""
        there = [self.rows.get((setting.task.name, setting.net, m.name), {}) for m in METHODS]
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
        rows = [r for s in self.settings for r in self.of(s) if r['row'] == name]
        return [row for row in rows if self.gain(row) is not None]


def beats(row: dict) -> bool:
    """Whether the mean of the seeds is better than the floor by the margin."""
    sign = 1 if row['metric'] == 'accuracy' else -1
    return sign * (mean(row['scores']) - row['floor']) > MARGIN * row['floor']


def shown(value: float, metric: str) -> str:
    return f'{100 * value:.1f} %' if metric == 'accuracy' else f'{value:.3g}'


def of_setting(board: Board, setting: Setting) -> str:
    """The table of one task on one net."""
    task = setting.task

    def cosine(row: dict, at: int) -> str:
        return '-' if row['cosine'][at] is None else f'{row["cosine"][at]:.2f}'

    columns = {
        'row': lambda row: row['row'],
        f'{task.metric}, mean': lambda row: shown(mean(row['scores']), task.metric),
        'each seed': lambda row: ', '.join(shown(score, task.metric) for score in row['scores']),
        f'floor {shown(task.floor, task.metric)}': lambda row: (
            'beaten' if beats(row) else '**not beaten**'
        ),
        'rate': lambda row: f'{row["rate"]:g}',
        'time': lambda row: row['time'],
        'bytes': lambda row: in_bytes(row['bytes']),
        'cosine, start': lambda row: cosine(row, 0),
        'end': lambda row: cosine(row, 1),
    }
    return listed(board.of(setting), columns)


def tables(board: Board) -> str:
    return '\n\n'.join(
        folded(f'{s.task.name}, {s.net}', of_setting(board, s))
        for s in board.settings
        if board.of(s)
    )


def of_settings(board: Board) -> str:
    columns = {
        'task': lambda s: s.task.name,
        'net': lambda s: s.net,
        'T': lambda s: str(s.task.steps),
        'batch': lambda s: str(s.batch),
        'updates': lambda s: 'along the stream' if s.task.stream else str(s.updates),
        'floor': lambda s: shown(s.task.floor, s.task.metric),
        'score': lambda s: s.task.metric,
    }
    return listed(board.settings, columns)


def summary(board: Board) -> str:
    """A row of the table over all settings."""
    columns = {
        'row': lambda at: at[0],
        'settings': lambda at: str(len(at[1])),
        'floor beaten': lambda at: str(sum(map(beats, at[1]))),
        'better than same step': lambda at: (
            '-' if at[0] in SAME_STEP else str(sum(ahead(board, row) for row in at[1]))
        ),
        'gain': lambda at: f'{median(map(board.gain, at[1])):.0%}',
        'time / BPTT': lambda at: median(board.share(row, 'time') for row in at[1]),
        'bytes / BPTT': lambda at: median(board.share(row, 'bytes') for row in at[1]),
    }
    each = [(method.name, board.all_of(method.name)) for method in METHODS]
    return listed([(name, found) for name, found in each if found], columns)


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
    for s in board.settings:
        found = [r for r in board.of(s) if r['row'] not in OFFLINE]
        if not found or board.gain(found[0]) is None:
            continue
        best = max(found, key=board.gain)
        near = [r for r in found if board.gain(r) >= NEAR * board.gain(best)]
        least = min(near, key=lambda r: (r['bytes'], -board.gain(r)))
        both = [[r['row'], f'{board.gain(r):.0%}'] for r in (best, least)]
        rows.append([s.task.name, s.net, *both[0], *both[1]])
    return table(head, rows)


def refused(board: Board) -> str:
    rows = [r for r in board.rows.values() if 'refused' in r]
    if not rows:
        return ''
    return 'Rows that were refused:\n\n' + table(
        ['task', 'net', 'row', 'refused because'],
        [[r['task'], r['net'], r['row'], r['refused'].replace('|', '/')] for r in rows],
    )


def first(board: Board) -> str:
    """The result in one sentence."""
    rows = {name: board.all_of(name) for name in ('D_RTRL', *SAME_STEP)}
    gain = {name: median(map(board.gain, found)) for name, found in rows.items() if found}
    same = max((name for name in gain if name in SAME_STEP), key=gain.get)
    share = median(board.share(row, 'bytes') for row in rows['D_RTRL'])
    optimizer = same.removeprefix('same step, ')
    return (
        f'Over {len(rows["D_RTRL"])} settings D_RTRL reaches a median of '
        f'{100 * gain["D_RTRL"]:.0f} % of the gain of BPTT, with {share:.2g} of its bytes; the '
        f'gradient of the current step alone ({optimizer}), which keeps nothing, reaches '
        f'{100 * gain[same]:.0f} %.'
    )


def page(found: dict) -> str:
    """The page, from its template."""
    board, effort = Board(found), Effort()
    parts = first, tables, summary, choices, refused, Records.state, Records.load
    values = {f.__name__: f(board) for f in parts} | {
        'settings': of_settings(board),
        'rates': ', '.join(f'{rate:g}' for rate in effort.rates),
        'seeds': str(len(effort.seeds)),
        'sgd': str(rules.SGD_FACTOR),
        'clip': f'{rules.CLIP:g}',
        'turns': str(effort.turns),
        'tested': str(rules.TESTED),
        'margin': f'{MARGIN:.0%}',
        'near': f'{NEAR:.0%}',
    }
    return filled('rules.in.md', values)


def medians(board: Board, what: str) -> dict[str, tuple[float, float]]:
    """A cost and the gain of each row that ran in at least half of the settings."""
    found = {method.name: board.all_of(method.name) for method in METHODS}
    enough = max(map(len, found.values())) / 2
    return {
        name: (
            max(median(board.share(r, what) for r in rows), LEAST),
            median(map(board.gain, rows)),
        )
        for name, rows in found.items()
        if rows and len(rows) >= enough
    }


def frontier(points: dict[str, tuple[float, float]]) -> dict[tuple[float, float], list[str]]:
    """The rows that no other one clearly beats in both cost and gain; neighbours share a place."""
    found: dict = {}
    for name, (cost, gain) in points.items():
        beaten = any(
            (c < 1.1 * cost and g > gain + CLOSE) or (c < 0.9 * cost and g > gain - CLOSE)
            for c, g in points.values()
        )
        near = [at for at in found if abs(at[1] - gain) < CLOSE and 0.9 < at[0] / cost < 1.1]
        if not beaten:
            found.setdefault(near[0] if near else (cost, gain), []).append(name)
    return found


def draw(board: Board, path: Path = PICTURE):
    """Gain against bytes and against time, both beside BPTT: the median of each row."""
    with figure(path, 2, 1, 7.6, sharey=True) as (drawn, axes):
        handles: dict = {}
        for ax, (what, (label, ticks)) in zip(axes, COSTS.items()):
            points = medians(board, what)
            for name, at in points.items():
                how = look(name)
                (handles[name],) = ax.plot(*at, how['marker'], color=how['color'], markersize=10)
            best = sorted(frontier(points).items())
            for number, (at, _) in enumerate(best, 1):
                ax.annotate(
                    str(number), at, (0, 8), textcoords='offset points', weight='bold', ha='center'
                )
            told = (f'{number}  {"; ".join(names)}' for number, (_, names) in enumerate(best, 1))
            ax.text(0.2, 0.14, 'best for its cost:\n' + '\n'.join(told), transform=ax.transAxes)
            ax.axhline(1, color='grey', linewidth=1, linestyle='--', zorder=0)
            ax.set(xscale='log', xlabel=label, ylabel='gain (0: floor, 1: BPTT)', ylim=(0, 1.12))
            ax.minorticks_off()
            ax.set_xticks(ticks, [f'{x:g}' if x > LEAST else 'none' for x in ticks])
        axes[0].set_xlim(LEAST / 2, 4)
        told = {text: handles[name] for name, text in FAMILIES.items() if name in handles}
        drawn.legend(told.values(), told.keys(), loc='outside lower center', ncols=2)


def main():
    found = kept(PATH)
    draw(Board(found))
    (DOCS / 'rules.md').write_text(page(found), encoding='utf-8')


if __name__ == '__main__':
    main()
