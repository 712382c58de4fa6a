"""Pages, tables and pictures of results: templates, parts that are folded, and the look of each
family of rules.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

HERE = Path(__file__).parent
DOCS = HERE.parent / 'docs'
PICTURES = DOCS / 'pictures'
README = HERE.parent / 'README.md'

# Okabe and Ito's colours, which people with any colour vision can tell apart.
BLACK, GREY, BLUE, SKY, ORANGE = '#000000', '#767676', '#0072B2', '#56B4E9', '#E69F00'
PINK, GREEN, VERMILLION = '#CC79A7', '#009E73', '#D55E00'
WIDTH = 6.4  # inches, which a page shows as about 700 pixels and a telephone as 380
STYLE = {
    'font.size': 11,
    'axes.titlesize': 11,
    'axes.labelsize': 11,
    'xtick.labelsize': 10,
    'ytick.labelsize': 10,
    'legend.fontsize': 10,
    'legend.frameon': False,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'lines.markersize': 6,
}


class Look(NamedTuple):
    """How a row is drawn: the colour and the marker are those of its family."""

    color: str
    marker: str
    linestyle: str = '-'
    linewidth: float = 1.5
    zorder: float = 2


LOOKS = {  # by the beginning of a row's name
    'truncated BPTT': Look(GREY, 'D', '--'),
    'rolling': Look(GREY, 'D', '--'),
    'BPTT': Look(BLACK, 's', linewidth=3, zorder=1),  # lies under what is as good
    'whole episodes': Look(BLACK, 's', linewidth=3, zorder=1),
    'same step, RMSprop': Look(ORANGE, 'v', '--'),
    'same step': Look(ORANGE, 'v'),
    'ES_D_RTRL': Look(PINK, 'X'),
    'D_RTRL, whole credit': Look(BLUE, 'o', '--'),
    'D_RTRL': Look(BLUE, 'o'),
    'SnAp': Look(BLUE, 'o'),
    'RTRL': Look(BLUE, 'o'),
    'exact windows': Look(SKY, 'P', '-.'),
    'signs': Look(GREEN, '^'),
    'UORO': Look(GREEN, '^'),
    'e-prop': Look(VERMILLION, '*'),
}


def look(name: str) -> dict:
    """Colour, marker and line of a row, as matplotlib takes them."""
    return next(found for start, found in LOOKS.items() if name.startswith(start))._asdict()


@contextlib.contextmanager
def figure(
    path: Path, lines: int, columns: int, height: float, width: float = WIDTH, **how
) -> Iterator[tuple]:
    """A figure and its panels, in the size in which a page shows it; saved at the end."""
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        size = (width, height)
        drawn, axes = plt.subplots(lines, columns, figsize=size, layout='constrained', **how)
        yield drawn, axes
        drawn.savefig(path, dpi=200, metadata={'Software': None})
        plt.close(drawn)


def table(head: list[str], rows: list[list]) -> str:
    def text(x):
        return '' if x is None else x if isinstance(x, str) else f'{x:.3g}'

    lines = [head, ['---'] * len(head), *[[text(x) for x in row] for row in rows]]
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def listed(rows, columns: dict) -> str:
    """A table of functions of a row, by their headings."""
    return table(list(columns), [[column(row) for column in columns.values()] for row in rows])


def in_bytes(count: float) -> str:
    return f'{count / 2**10:.3g} KiB' if count < 2**20 else f'{count / 2**20:.3g} MiB'


def folded(title: str, *parts: str) -> str:
    """A part of a page that its reader opens."""
    return '\n\n'.join([f':::{{dropdown}} {title}', *parts, ':::'])


def filled(template: str, values: dict[str, str]) -> str:
    """A template of this folder with a value for each ``{{name}}``."""
    text = (HERE / template).read_text(encoding='utf-8')
    return re.sub(r'{{(.*?)}}', lambda m: values[m[1]], text)


def by_name(records: list[dict]) -> dict[tuple[str, str, str], dict]:
    """Records by their task, net and row."""
    return {(r['task'], r['net'], r['row']): r for r in records}


class Records:
    """The records of a program, by task, net and row; ``wanted`` are all that there should be."""

    def __init__(self, found: dict, target: str, wanted: list[tuple[str, str, str]]):
        self.versions, self.target = found.get('versions', {}), target
        self.rows = by_name(found['records'])
        self.missing = [name for name in wanted if name not in self.rows]

    def state(self) -> str:
        """What there is, and what is not there yet."""
        had = ', '.join(f'{name} {value}' for name, value in self.versions.items())
        text = f'{len(self.rows)} rows of `{self.target}` ({had}).'
        if not self.missing:
            return text + ' No row is missing.'
        return f'{text} {len(self.missing)} rows are not measured yet; `{self.target}` adds them.'

    def load(self) -> str:
        """How busy the machine was: programs that ran or waited, for each core."""
        loads = [r['load'] for r in self.rows.values() if 'load' in r]
        unknown = len(self.rows) - len(loads)
        text = f'{median(loads):.1f}' if loads else 'not recorded'
        return text + (f' ({unknown} rows do not tell)' if loads and unknown else '')
