"""The kinds of values that a schema's tables are made of.

Each kind finds what is wrong with a value without ever raising, puts a value into canonical form,
and says the same as a JSON Schema.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import MAX_INTEGER, MAX_NAMES


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where, and what."""

    path: str
    message: str


Problems = Iterator[Problem]


class Kind(ABC):
    """A kind of JSON value."""

    @abstractmethod
    def problems(self, value: Any, path: str) -> Problems:
        """What is wrong with a value of any type."""

    @abstractmethod
    def canonical(self, value: Any) -> Any:
        """The value with its keys in order; a value of another kind as it is."""

    @abstractmethod
    def schema(self) -> dict:
        """The JSON Schema of this kind."""


class Leaf(Kind):
    """A value that has no parts."""

    def canonical(self, value: Any) -> Any:
        return value


@dataclass(frozen=True)
class Text(Leaf):
    """A string: one of ``choices``, or one that matches ``pattern`` as a whole, if given."""

    choices: tuple[str, ...] = ()
    pattern: str = ''
    most: int = MAX_NAMES

    def problems(self, value: Any, path: str) -> Problems:
        if not isinstance(value, str):
            yield Problem(path, f'{described(value)} where a string is due')
        elif len(value) > self.most:
            yield Problem(path, f'a text of {len(value)} letters, more than {self.most}')
        elif not value.isascii() and re.search('[\ud800-\udfff]', value):
            yield Problem(path, 'a string with half of a surrogate pair, which is no UTF-8')
        elif self.choices and value not in self.choices:
            yield Problem(path, f'{described(value)}; known are {", ".join(self.choices)}')
        elif self.pattern and not re.fullmatch(self.pattern, value):
            yield Problem(path, f'{described(value)} does not match {self.pattern}')

    def schema(self) -> dict:
        if len(self.choices) == 1:
            return {'const': self.choices[0]}
        if self.choices:
            return {'enum': list(self.choices)}
        pattern = {'pattern': f'^{self.pattern}$'} if self.pattern else {}
        return {'type': 'string', **pattern}


@dataclass(frozen=True)
class Flag(Leaf):
    """``true`` or ``false``."""

    def problems(self, value: Any, path: str) -> Problems:
        if not isinstance(value, bool):
            yield Problem(path, f'{described(value)} where true or false is due')

    def schema(self) -> dict:
        return {'type': 'boolean'}


@dataclass(frozen=True)
class Whole(Leaf):
    """An integer of 64 bits from ``least`` on."""

    least: int = -MAX_INTEGER

    def problems(self, value: Any, path: str) -> Problems:
        if not is_int(value):
            yield Problem(path, f'{described(value)} where an integer is due')
        elif not self.least <= value < MAX_INTEGER:
            yield Problem(path, f'{described(value)} is out of range, which starts at {self.least}')

    def takes(self, values: list) -> bool:
        """Whether all values of a list are right; a long list is no loop."""
        plain = set(map(type, values)) == {int}
        return plain and self.least <= min(values) and max(values) < MAX_INTEGER

    def schema(self) -> dict:
        return {'type': 'integer', 'minimum': self.least, 'exclusiveMaximum': MAX_INTEGER}


@dataclass(frozen=True)
class Number(Kind):
    """A finite number, canonical as a float."""

    def problems(self, value: Any, path: str) -> Problems:
        if not is_number(value):
            yield Problem(path, f'{described(value)} where a number is due')
        elif not is_finite(value):
            yield Problem(path, f'{described(value)} is not finite')

    def canonical(self, value: Any) -> Any:
        return float(value) if is_number(value) and is_finite(value) else value

    def schema(self) -> dict:
        return {'type': 'number'}


@dataclass(frozen=True)
class Maybe(Kind):
    """Another kind, or ``null``."""

    kind: Kind

    def problems(self, value: Any, path: str) -> Problems:
        if value is not None:
            yield from self.kind.problems(value, path)

    def canonical(self, value: Any) -> Any:
        return self.kind.canonical(value)

    def schema(self) -> dict:
        return {'anyOf': [self.kind.schema(), {'type': 'null'}]}


@dataclass(frozen=True)
class List(Kind):
    """A list of one kind with at most ``most`` elements."""

    kind: Kind
    most: int = 100_000

    def problems(self, value: Any, path: str) -> Problems:
        if not isinstance(value, list):
            yield Problem(path, f'{described(value)} where a list is due')
        elif len(value) > self.most:
            yield Problem(path, f'a list of {len(value)}, more than {self.most}')
        elif not (isinstance(self.kind, Whole) and self.kind.takes(value)):
            for i, part in enumerate(value):
                yield from self.kind.problems(part, f'{path}[{i}]')

    def canonical(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [self.kind.canonical(part) for part in value]

    def schema(self) -> dict:
        return {'type': 'array', 'items': self.kind.schema(), 'maxItems': self.most}


@dataclass(frozen=True)
class Table(Kind):
    """An object with keys of the writer's choice; they are sorted."""

    kind: Kind

    def problems(self, value: Any, path: str) -> Problems:
        if not isinstance(value, dict):
            yield Problem(path, f'{described(value)} where an object is due')
            return
        for key, part in value.items():
            yield from Text().problems(key, f'{path} (a key)')
            yield from self.kind.problems(part, join(path, key))

    def canonical(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: self.kind.canonical(value[key]) for key in sorted(value, key=str)}

    def schema(self) -> dict:
        return {'type': 'object', 'additionalProperties': self.kind.schema()}


class Fields(Kind):
    """An object with these keys, in this order, and no other; ``name?`` may be absent."""

    def __init__(self, fields: Mapping[str, Kind]):
        self.kinds = {name.removesuffix('?'): kind for name, kind in fields.items()}
        self.due = [name for name in fields if not name.endswith('?')]

    def problems(self, value: Any, path: str) -> Problems:
        if not isinstance(value, dict):
            yield Problem(path, f'{described(value)} where an object is due')
            return
        for name in self.due:
            if name not in value:
                yield Problem(join(path, name), 'is missing')
        for name, part in value.items():
            if not isinstance(name, str) or name not in self.kinds:
                yield Problem(join(path, name), 'is no key of the schema')
            else:
                yield from self.kinds[name].problems(part, join(path, name))

    def canonical(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = [name for name in self.kinds if name in value]
        other = sorted((name for name in value if name not in self.kinds), key=str)
        return {name: self.kinds[name].canonical(value[name]) for name in known} | {
            name: value[name] for name in other
        }

    def schema(self) -> dict:
        return {
            'type': 'object',
            'properties': {name: kind.schema() for name, kind in self.kinds.items()},
            'required': self.due,
            'additionalProperties': False,
        }


@dataclass(frozen=True)
class ByKeys(Kind):
    """``fields`` where the value has all of its keys, else ``other``."""

    fields: Fields
    other: Kind

    def chosen(self, value: Any) -> Kind:
        """The kind that judges this value."""
        has = isinstance(value, dict) and all(name in value for name in self.fields.due)
        return self.fields if has else self.other

    def problems(self, value: Any, path: str) -> Problems:
        yield from self.chosen(value).problems(value, path)

    def canonical(self, value: Any) -> Any:
        return self.chosen(value).canonical(value)

    def schema(self) -> dict:
        return {'anyOf': [self.fields.schema(), self.other.schema()]}


# -- words -----------------------------------------------------------------------------------------


def is_int(value: Any) -> bool:
    """An integer, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """An integer or a float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Finite, and no integer that is too large for a float."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def join(path: str, key: Any) -> str:
    """``path.key``, also for a key that is no string."""
    name = key if isinstance(key, str) else f'({described(key)})'
    return f'{path}.{name}' if path else name


def described(value: Any) -> str:
    """A value in a few words, whatever it is."""
    if value is None or isinstance(value, bool):
        return {None: 'null', True: 'true', False: 'false'}[value]
    if isinstance(value, int) and value.bit_length() > 64:
        return f'an integer of {value.bit_length()} bits'
    if isinstance(value, int | float):
        return f'{value!r}'
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + '...')
    if isinstance(value, list) and all(isinstance(part, str) for part in value[:9]):
        return f'[{", ".join(described(part) for part in value[:8])}]'
    if isinstance(value, list | tuple | dict):
        return f'{"an object" if isinstance(value, dict) else "a list"} of {len(value)}'
    return f'a {type(value).__name__}'
