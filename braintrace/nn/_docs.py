"""Docstrings in which a class says what is its own, and its bases what holds for all of a kind."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import ClassVar

SECTION = re.compile(r'^(Parameters|Attributes|Raises|Examples)\n-+\n', re.MULTILINE)
PACKAGE = __name__.rpartition('.')[0]

Entries = dict[tuple[str, ...], str]  # the names that an entry describes -> the entry


class Documented:
    """A base whose subclasses show in their docstrings, with what they say themselves, the
    entries of ``shared_docs`` of their bases: parameters that their constructors take, attributes,
    errors, and an example where they have none.

    ``{name}`` and ``{states}`` in an entry stand for the names of the class and of its states.
    """

    shared_docs: ClassVar[str] = """
    Parameters
    ----------
    name : str, optional
        Name of the module.
    param_type : class derived from brainstate.ParamState
        Class of the parameter.
    """

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if 'shared_docs' in vars(cls) or not (cls.__doc__ and cls.__module__.startswith(PACKAGE)):
            return  # a base; a class of a user, who describes it
        names = getattr(cls, 'state_names', ())
        states = f'state{"s" * (len(names) > 1)} {" and ".join(f"``{name}``" for name in names)}'
        shared = (vars(kind).get('shared_docs', '') for kind in cls.__mro__)
        cls.__doc__ = completed(cls.__doc__, shared, list(inspect.signature(cls).parameters))
        cls.__doc__ = cls.__doc__.replace('{name}', cls.__name__).replace('{states}', states)


def completed(own: str, shared: Iterable[str], arguments: list[str]) -> str:
    """The docstring ``own`` with the entries that ``shared`` has besides, the nearest first."""
    head, sections = parsed(own)
    for text in shared:
        for title, entries in parsed(text)[1].items():
            here = sections.setdefault(title, {})
            told = {name for names in here for name in names}
            wanted = set(arguments) if title == 'Parameters' else {n for ns in entries for n in ns}
            for names, entry in entries.items():
                left = tuple(name for name in names if name in wanted - told)
                if left:
                    here[left] = entry.replace(', '.join(names), ', '.join(left), 1)
    order = {name: k for k, name in enumerate(arguments)}
    named = sections.get('Parameters', {}).items()
    sections['Parameters'] = dict(sorted(named, key=lambda row: order.get(row[0][0], -1)))
    parts = [head]
    for title in ('Parameters', 'Attributes', 'Raises', 'Examples'):
        if rows := list(sections.get(title, {}).values()):
            parts.append('\n'.join([title, '-' * len(title), *rows]))
    return '\n\n'.join(parts)


def parsed(docstring: str) -> tuple[str, dict[str, Entries]]:
    """What is before the sections of numpydoc, and the entries of each."""
    head, *parts = SECTION.split(inspect.cleandoc(docstring))
    sections: dict[str, Entries] = {}
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        each = [body] if title == 'Examples' else re.split(r'\n(?=\S)', body.strip())
        named = ((title,) if title == 'Examples' else named_by(entry) for entry in each)
        sections[title] = dict(zip(named, map(str.strip, each), strict=True))
    return head.strip(), sections


def named_by(entry: str) -> tuple[str, ...]:
    return tuple(entry.splitlines()[0].partition(' : ')[0].split(', '))
