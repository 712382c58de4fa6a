"""What people read: the table of a verdict, and that of the rules."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .checks import Failure
from .reconciler import Result
from .rules import RULES, Rule

MOST = {'failures': 12, 'notes': 8}
COLORS = {'green': 32, 'red': 31, 'yellow': 33, 'dim': 2, 'bold': 1}
MEANING = {
    'rederived': (
        'every step was derived again from its parameters, carry, traces, inputs and targets, and '
        'all numbers agree: the arithmetic is right, which says nothing of where the data are from'
    ),
    'consistent': 'all stored numbers agree with each other, but no engine derived them: {why}',
    'skipped': 'a part was left out, as the receipt itself says: {why}',
    'failed': '{count} found; the first rule that fails is nearest to the cause',
    'malformed': 'this is no receipt: {why}',
}


def counted(number: int, noun: str) -> str:
    """``1 tie``, ``1,200 ties``."""
    return f'{number:,} {noun}{"" if number == 1 else "s"}'


def plain(text: Any) -> str:
    """Text on one line, without what could steer a terminal: a receipt may come from anyone."""
    return ''.join(c if c.isprintable() else '?' for c in ' '.join(str(text).split()))


class Page:
    """Text for a stream: as wide as its terminal, at least 80, and coloured on a terminal alone."""

    def __init__(self, stream: Any):
        terminal = bool(getattr(stream, 'isatty', lambda: False)())
        self.colored = terminal and not os.environ.get('NO_COLOR')
        self.width = max(80, shutil.get_terminal_size((100, 24)).columns)

    def paint(self, color: str, text: str) -> str:
        """The text in a colour, where there are colours."""
        return f'\x1b[{COLORS[color]}m{text}\x1b[0m' if self.colored else text

    def cut(self, text: str, used: int = 0) -> str:
        """One line that fits into what is left of the width."""
        line, room = plain(text), self.width - used
        return line if len(line) <= room else f'{line[: room - 3]}...'

    def wrapped(self, head: str, text: str) -> str:
        """A paragraph that hangs behind its head."""
        lines = textwrap.wrap(plain(text), self.width - len(head)) or ['']
        return '\n'.join([head + lines[0], *(' ' * len(head) + line for line in lines[1:])])

    # a verdict ------------------------------------------------------------------------------------

    def verdict(self, result: Result, passed: bool, refused: Sequence[str] = ()) -> str:
        """The rules, what failed, what else is to know, and the verdict."""
        parts = [self._rules_of(result)]
        parts += [self._failure(one) for one in result.failures[: MOST['failures']]]
        count = sum(result.failed.values())
        if count > MOST['failures']:
            more = count - MOST['failures']
            parts.append(f'... and {more:,} more failures; --json has the first 50')
        notes = self._notes(result)
        parts += [notes] if notes else []
        return '\n\n'.join([*parts, self.conclusion(result, passed, refused)]) + '\n'

    def conclusion(self, result: Result, passed: bool, refused: Sequence[str] = ()) -> str:
        """The verdict, and what it means in one sentence."""
        why = '; '.join(refused) if passed else ''
        why = why or result.gated_off.get(14) or result.disclosures.get('rule 14 in part') or ''
        if result.verdict == 'malformed':
            why = f'{result.failures[0].path}: {result.failures[0].hint}'
        said = MEANING[result.verdict].format(
            why=why, count=counted(sum(result.failed.values()), 'failure')
        )
        if refused:
            said = f'{said}. Not accepted: {"; ".join(refused)}'
        head = f'{"PASS" if passed else "FAIL"} {result.verdict}: '
        text = self.wrapped(head, f'{said}.')
        painted = self.paint('green' if passed else 'red', head[:-2])
        return painted + text[len(head) - 2 :]

    def _rules_of(self, result: Result) -> str:
        lines = [self.paint('bold', f'{"R":>2}  {"rule":<19}  finding')]
        for number, rule in RULES.items():
            said, color = f'gated off: {result.gated_off.get(number, "")}', 'dim'
            if number in result.rules_evaluated:
                said, color = counted(result.rules_evaluated[number], 'comparison'), ''
                said = f'held      {said}'
            if result.failed.get(number):
                places = counted(result.failed[number], 'place')
                said, color = f'{said.replace("held  ", "FAILED", 1)}, {places}', 'red'
            line = self.cut(said, 25)
            lines.append(
                f'{number:>2}  {rule.title:<19}  {self.paint(color, line) if color else line}'
            )
        return '\n'.join(lines)

    def _failure(self, one: Failure) -> str:
        record = re.match(r'\[(\d+)\]\.?', one.path)
        place = one.path[record.end() :] if record else one.path
        at = f'record [{record[1]}], ' if record else ''
        elements = f' ({counted(one.count, "element")})' if one.count > 1 else ''
        title = f'R{one.rule} {RULES[one.rule].title}: '
        rows = {
            'stored': _short(one.stored),
            'recomputed': _short(one.recomputed),
            'off by': _size(one),
            'made of': ', '.join(one.factors),
            'hint': one.hint,
        }
        lines = [self.cut(f'{title}{at}{place or "the receipt"}{elements}')]
        lines[0] = self.paint('red', lines[0])
        return '\n'.join(
            [
                *lines,
                *(f'    {name:<11} {self.cut(said, 16)}' for name, said in rows.items() if said),
            ]
        )

    def _notes(self, result: Result) -> str:
        ties = counted(result.ties, 'spike')
        tied = [f'{ties} too near to the threshold to tell (ties)'] if result.ties else []
        loose = [f'loose: {path} {share:.2g}' for path, share in result.loose.items()]
        notes = [*tied, *loose, *_joined(result.disclosures)]
        lines = [f'  {self.cut(note, 2)}' for note in notes[: MOST['notes']]]
        more = len(notes) - MOST['notes']
        lines += [f'  ... and {more} more'] if more > 0 else []
        return '\n'.join(['told, and deciding nothing:', *lines]) if lines else ''

    # other tables ---------------------------------------------------------------------------------

    def rules(self) -> str:
        """The table of rules."""
        lines = [self.paint('bold', f'{"R":>2}  {"rule":<19}  {"family":<10}  formula')]
        for rule in RULES.values():
            head = f'{rule.number:>2}  {rule.title:<19}  {rule.family:<10}  '
            lines.append(self.wrapped(head, rule.formula))
        return '\n'.join(lines) + '\n'

    def explained(self, rule: Rule) -> str:
        """All that there is to say about a rule."""
        rows = {
            'rule': f'{rule.number}, {rule.title} ({rule.family})',
            'means': rule.means,
            'formula': rule.formula,
            'needs': rule.needs or 'nothing more than a receipt',
            'real defect': rule.defect,
            'if it fails': rule.look,
        }
        return '\n'.join(self.wrapped(f'{name:<12} ', said) for name, said in rows.items()) + '\n'


def _joined(disclosures: Mapping[str, Any]) -> list[str]:
    """What is told of each record of a run in one line: the range of its numbers."""
    found: dict[str, list] = {}
    for name, value in disclosures.items():
        found.setdefault(re.sub(r'^\[\d+\]\.', '', name), []).append(value)
    lines = []
    for name, values in found.items():
        if all(isinstance(value, float) for value in values):
            low, high = f'{min(values):.4g}', f'{max(values):.4g}'
            said = low if low == high else f'{low} to {high}'
        else:
            said = '; '.join(dict.fromkeys(map(str, values)))
        many = f' ({counted(len(values), "record")})' if len(values) > 1 else ''
        lines.append(f'{name}: {said}{many}')
    return lines


def _short(value: Any, most: int = 60) -> str:
    """A value on one line; an empty string for none."""
    if value is None:
        return ''
    if isinstance(value, Mapping):
        text = f'an object with {", ".join(map(str, value))}'
    elif isinstance(value, Iterable) and not isinstance(value, str):
        text = f'[{", ".join(map(str, value))}]'
    else:
        text = value if isinstance(value, str) else repr(value)
    text = plain(text[: most + 1])
    return text if len(text) <= most else f'{text[: most - 3]}...'


def _size(one: Failure) -> str:
    if one.delta is None:
        return ''
    if not one.bound:
        return f'{one.delta:.3g}, where the two must be equal bit for bit'
    return f'{one.delta:.3g}, {one.delta / one.bound:.3g} times its bound of {one.bound:.3g}'
