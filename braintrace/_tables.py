"""A few lines and titled tables below them, as aligned text and as HTML for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ['Table', 'as_html', 'as_text']

CELL = 'style="text-align:left;vertical-align:top;padding:2px 8px"'


class Table(NamedTuple):
    """A titled table of texts."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def as_text(lines: Sequence[str], tables: Sequence[Table]) -> str:
    """The lines, then each table that has rows, its columns aligned."""
    lines = list(lines)
    for table in filter(_has_rows, tables):
        widths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
        lines += ['', table.title]
        lines += [
            '  ' + '  '.join(map(str.ljust, row, widths)).rstrip()
            for row in (table.columns, *table.rows)
        ]
    return '\n'.join(lines)


def as_html(lines: Sequence[str], tables: Sequence[Table]) -> str:
    """The lines and tables as one ``div``; every text is escaped, long lines are wrapped."""
    parts = ['<div>', f'<pre style="white-space:pre-wrap">{html.escape(chr(10).join(lines))}</pre>']
    for table in filter(_has_rows, tables):
        head = ''.join(f'<th {CELL}>{html.escape(c)}</th>' for c in table.columns)
        body = ''.join(
            '<tr>' + ''.join(f'<td {CELL}>{html.escape(cell)}</td>' for cell in row) + '</tr>'
            for row in table.rows
        )
        parts += [
            f'<details open><summary>{html.escape(table.title)}</summary>',
            f'<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></details>',
        ]
    return ''.join([*parts, '</div>'])


def _has_rows(table: Table) -> bool:
    return bool(table.rows)
