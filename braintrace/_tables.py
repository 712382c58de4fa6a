"""A few lines and titled tables below them, as aligned text and as HTML for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

# The colours of the page act, light or dark; where a table is too wide it scrolls by itself.
LINE = 'border:0;border-bottom:1px solid rgba(128,128,128,0.3)'
CELL = f'text-align:left;vertical-align:top;padding:3px 16px 3px 0;{LINE}'
SHORT = 32  # what is not longer stays on one line
LINES = 'white-space:pre-wrap;font:inherit;margin:0;padding:0;border:0;background:none'
TITLE = 'cursor:pointer;font-weight:600;margin-top:0.8em'
TABLE = 'border-collapse:collapse;border:0;margin:0;width:auto'


class Table(NamedTuple):
    """A titled table of texts."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def as_text(lines: Sequence[str], tables: Sequence[Table]) -> str:
    """The lines, then each table that has rows, its columns aligned."""
    lines = list(lines)
    for table in [each for each in tables if each.rows]:
        widths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
        lines += ['', table.title]
        lines += [
            '  ' + '  '.join(map(str.ljust, row, widths)).rstrip()
            for row in (table.columns, *table.rows)
        ]
    return '\n'.join(lines)


def as_html(lines: Sequence[str], tables: Sequence[Table]) -> str:
    """The lines and tables as one ``div``; every text is escaped, long lines are wrapped."""
    text = html.escape('\n'.join(lines))
    parts = ['<div style="font-size:90%">', f'<pre style="{LINES}">{text}</pre>']
    for table in [each for each in tables if each.rows]:
        head = ''.join(_cell('th', text) for text in table.columns)
        body = ''.join(
            '<tr>' + ''.join(_cell('td', text) for text in row) + '</tr>' for row in table.rows
        )
        parts += [
            f'<details open><summary style="{TITLE}">{html.escape(table.title)}</summary>',
            f'<div style="overflow-x:auto"><table style="{TABLE}">',
            f'<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>',
        ]
    return ''.join([*parts, '</div>'])


def _cell(tag: str, text: str) -> str:
    wrap = ';white-space:nowrap' if len(text) <= SHORT else ''
    return f'<{tag} style="{CELL}{wrap}">{html.escape(text)}</{tag}>'
