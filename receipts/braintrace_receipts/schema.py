"""The formats are the JSON Schemas of ``schemas/``; here is the checker of their keywords.

``check`` judges structure and types alone: keys, kinds of values, finite numbers, arrays that hold
what their shape says. What the names mean and which shapes fit each other is rule 0's.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from itertools import islice
from typing import Any

from .array_kind import canonical_array, number_problems
from .errors import (
    MAX_ELEMENTS,
    MAX_INTEGER,
    MAX_NAMES,
    Problem,
    described,
    is_finite,
    is_int,
    is_number,
    join,
)

Problems = Iterator[Problem]
MOST = 50  # problems that ``check`` tells
NULL = 'null'


def check(value: Any, schema: str) -> list[Problem]:
    """What is wrong with the structure of any value, first things first; empty if nothing is.

    >>> check(None, 'braintrace.receipt/1')
    [Problem(path='', message='null where an object is due')]
    """
    return list(islice(_problems(SCHEMAS[schema], value, ''), MOST))


def canonical(value: Any, schema: str) -> Any:
    """The value with its keys in order and its numbers as floats; what is wrong stays as it is."""
    return _ordered(SCHEMAS[schema], value)


# what is wrong ------------------------------------------------------------------------------------


def _problems(schema: dict, value: Any, path: str) -> Problems:
    if schema is ARRAY:
        yield from _array(value, path)
    elif 'anyOf' in schema:
        yield from _problems(_chosen(schema['anyOf'], value), value, path)
    elif schema.get('type') != NULL:
        yield from _CHECKS[schema.get('type', 'string')](schema, value, path)


def _chosen(options: list[dict], value: Any) -> dict:
    """The alternative that judges a value: null, the first whose due keys it has, or the last."""
    due = [one for one in options if one.get('type') != NULL]
    if value is None and len(due) < len(options):
        return {'type': NULL}
    for one in due[:-1]:
        if isinstance(value, dict) and value.keys() >= set(one['required']):
            return one
    return due[-1]


def _object(schema: dict, value: Any, path: str) -> Problems:
    """An object with the keys of the schema and no other, or with keys of the writer's choice."""
    if not isinstance(value, dict):
        yield Problem(path, f'{described(value)} where an object is due')
        return
    for name in schema.get('required', ()):
        if name not in value:
            yield Problem(join(path, name), 'is missing')
    known, others = schema.get('properties', {}), schema['additionalProperties']
    for name, part in value.items():
        own = known.get(name, others) if isinstance(name, str) else others
        if own is False:
            yield Problem(join(path, name), 'is no key of the schema')
            continue
        if own is others:
            yield from _string({}, name, f'{path} (a key)')
        yield from _problems(own, part, join(path, name))


def _array(value: Any, path: str) -> Problems:
    """An array: the keys of one of its forms, of which the first that is wrong is told; numbers."""
    if not isinstance(value, dict):
        yield Problem(path, f'{described(value)} where an array is due')
        return
    # the numbers of a file are in memory beside its name
    keys = value.keys() - {'data'} if 'file' in value else value.keys()
    heads = next((heads for due, heads in FORMS if keys == due), None)
    if heads is None:
        yield Problem(path, f'an array with the keys {described(list(value))}')
        return
    for key, part in heads:
        for first in _problems(part, value[key], f'{path}.{key}'):
            yield first
            return
    if (size := math.prod(value['shape'])) > MAX_ELEMENTS:
        said = f'{described(value["shape"])}: an array has at most {MAX_ELEMENTS} elements'
        yield Problem(join(path, 'shape'), said)
    else:
        yield from number_problems(value, size, path)


def _list(schema: dict, value: Any, path: str) -> Problems:
    if not isinstance(value, list):
        yield Problem(path, f'{described(value)} where a list is due')
    elif len(value) > schema['maxItems']:
        yield Problem(path, f'a list of {len(value)}, more than {schema["maxItems"]}')
    elif not _all_integers(schema['items'], value):
        for i, part in enumerate(value):
            yield from _problems(schema['items'], part, f'{path}[{i}]')


def _all_integers(schema: dict, values: list) -> bool:
    """Whether all values of a list are right integers; a long list is no loop."""
    if schema.get('type') != 'integer' or set(map(type, values)) != {int}:
        return False
    return schema.get('minimum', -MAX_INTEGER) <= min(values) and max(values) < MAX_INTEGER


def _string(schema: dict, value: Any, path: str) -> Problems:
    choices = [schema['const']] if 'const' in schema else schema.get('enum')
    most = schema.get('maxLength', MAX_NAMES)
    if not isinstance(value, str):
        yield Problem(path, f'{described(value)} where a string is due')
    elif len(value) > most:
        yield Problem(path, f'a text of {len(value)} letters, more than {most}')
    elif not value.isascii() and re.search('[\ud800-\udfff]', value):
        yield Problem(path, 'a string with half of a surrogate pair, which is no UTF-8')
    elif choices and value not in choices:
        yield Problem(path, f'{described(value)}; known are {", ".join(choices)}')
    elif 'pattern' in schema and not re.fullmatch(schema['pattern'], value):
        yield Problem(path, f'{described(value)} does not match {schema["pattern"]}')


def _integer(schema: dict, value: Any, path: str) -> Problems:
    least = schema.get('minimum', -MAX_INTEGER)
    if not is_int(value):
        yield Problem(path, f'{described(value)} where an integer is due')
    elif not least <= value < MAX_INTEGER:
        yield Problem(path, f'{described(value)} is out of range, which starts at {least}')


RANGE = {
    'minimum': (operator.ge, 'from'),
    'exclusiveMinimum': (operator.gt, 'above'),
    'exclusiveMaximum': (operator.lt, 'below'),
}


def _number(schema: dict, value: Any, path: str) -> Problems:
    if not is_number(value):
        yield Problem(path, f'{described(value)} where a number is due')
    elif not is_finite(value):
        yield Problem(path, f'{described(value)} is not finite')
    else:
        for keyword, (holds, side) in RANGE.items():
            if keyword in schema and not holds(value, schema[keyword]):
                said = f'{described(value)} where a number {side} {schema[keyword]} is due'
                yield Problem(path, said)


def _flag(schema: dict, value: Any, path: str) -> Problems:
    if not isinstance(value, bool):
        yield Problem(path, f'{described(value)} where true or false is due')


_CHECKS = {
    'object': _object,
    'array': _list,
    'string': _string,
    'integer': _integer,
    'number': _number,
    'boolean': _flag,
}

# in canonical form --------------------------------------------------------------------------------


def _ordered(schema: dict, value: Any) -> Any:
    if schema is ARRAY:
        return canonical_array(value)
    if 'anyOf' in schema:
        return _ordered(_chosen(schema['anyOf'], value), value)
    kind = schema.get('type')
    if kind == 'number':
        return float(value) if is_number(value) and is_finite(value) else value
    if kind == 'array' and isinstance(value, list):
        return [_ordered(schema['items'], part) for part in value]
    if kind != 'object' or not isinstance(value, dict):
        return value
    # the keys of the schema in its order, and behind them all others sorted
    known, others = schema.get('properties', {}), schema['additionalProperties']
    rest = sorted((name for name in value if name not in known), key=str)
    found = {name: _ordered(own, value[name]) for name, own in known.items() if name in value}
    return found | {name: _ordered(others or {}, value[name]) for name in rest}


# the schemas --------------------------------------------------------------------------------------


def _inlined(part: Any, defs: dict) -> Any:
    """A part of a schema with what its references stand for."""
    if isinstance(part, list):
        return [_inlined(one, defs) for one in part]
    if not isinstance(part, dict):
        return part
    if '$ref' in part:
        return defs[part['$ref'].rpartition('/')[2]]
    return {key: _inlined(one, defs) for key, one in part.items()}


def _read(name: str) -> dict:
    return json.loads(files(__package__).joinpath('schemas', name).read_text('utf-8'))


def _defined(receipt: dict) -> dict:
    """The definitions by name; each is made of those before it."""
    defs: dict = {}
    for name, part in receipt['$defs'].items():
        defs[name] = _inlined(part, defs)
    return defs


_FILES = {f'braintrace.{name}/1': _read(f'{name}-1.json') for name in ('receipt', 'config')}
_DEFS = _defined(_FILES['braintrace.receipt/1'])
ARRAY = _DEFS['array']  # its numbers have a checker of their own
NUMBERS = ('data', 'sample')
FORMS = [
    ({*parts}, [(key, part) for key, part in parts.items() if key not in NUMBERS])
    for parts in (one['properties'] for one in ARRAY['anyOf'])
]
SCHEMAS: dict[str, dict] = {
    name: {key: _inlined(part, _DEFS) for key, part in schema.items() if key != '$defs'}
    for name, schema in _FILES.items()
}

# where arrays stand -------------------------------------------------------------------------------


def _with_arrays(schema: dict) -> dict | None:
    """The part of a schema in which arrays stand."""
    if not schema or schema is ARRAY:
        return schema or None
    if 'anyOf' in schema:
        parts = [_with_arrays(one) for one in schema['anyOf']]
        both = zip(parts, schema['anyOf'], strict=True)
        return {'anyOf': [part or one for part, one in both]} if any(parts) else None
    inner = {key: _with_arrays(schema.get(key) or {}) for key in ('items', 'additionalProperties')}
    known = {name: _with_arrays(one) for name, one in schema.get('properties', {}).items()}
    inner['properties'] = {name: one for name, one in known.items() if one}
    return {**schema, **inner} if any(inner.values()) else None


_ARRAYS = _with_arrays(SCHEMAS['braintrace.receipt/1']) or {}
UNNAMED = ('array', 'entries', 'slots')  # keys of the format that are no part of a path


def with_arrays(value: Any, change: Callable[[str, Any], Any]) -> Any:
    """A receipt, or a part of one by its keys, in which ``change(path, value)`` stands for each
    array and for each null in the place of one.
    """
    return _changed(_ARRAYS, value, '', change)


def _changed(schema: dict, value: Any, path: str, change: Callable) -> Any:
    if schema is ARRAY:
        return change(path, value)
    if 'anyOf' in schema:
        if value is None:
            return change(path, None) if ARRAY in schema['anyOf'] else None
        return _changed(_chosen(schema['anyOf'], value), value, path, change)
    if isinstance(value, list) and schema.get('items'):
        items = schema['items']
        named = 'relation' in items.get('required', ())
        ends = (f'{v["relation"]}/{v["group"] or ""}' if named else i for i, v in enumerate(value))
        parts = zip(ends, value, strict=True)
        return [_changed(items, part, f'{path}/{end}', change) for end, part in parts]
    if not isinstance(value, dict):
        return value
    known, others, found = schema.get('properties', {}), schema.get('additionalProperties'), {}
    for name, part in value.items():
        own = known.get(name) or others
        at = path if name in known and name in UNNAMED else f'{path}/{name}' if path else name
        found[name] = _changed(own, part, at, change) if own else part
    return found
