"""The canonical bytes of a receipt, and what they refuse.

One JSON object on one line: UTF-8, no spaces, keys in the schema's order and those of a map sorted,
LF at the end, floats as their shortest round-trip decimals. ``emit(parse(emit(r))) == emit(r)``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from .errors import (
    MAX_DEPTH,
    MAX_ELEMENTS,
    MAX_INTEGER,
    MAX_LINE,
    MAX_NUMBERS,
    MAX_PARTS,
    MAX_RECORDS,
    ReceiptError,
)
from .schema import SCHEMAS, canonical, check

BINARY = {
    b'\x93NUMPY': ('an array file of NumPy', 'give the file of receipts, one JSON object a line'),
    b'PK\x03\x04': ('a zip or npz file', 'give the file of receipts that is beside it'),
    b'\x1f\x8b': ('a gzip file', 'unpack it: gunzip -c FILE | ... verify -'),
    b'\xff\xfe': ('UTF-16', 'write it in UTF-8'),
    b'\xef\xbb\xbf': ('UTF-8 with a byte order mark', 'write it without the mark'),
}


def emit(receipt: Mapping) -> bytes:
    """The canonical line of a receipt or a config; ``data`` may be arrays of NumPy.

    Raises ``ReceiptError`` for what JSON cannot say: a number that is not finite, another type.

    >>> emit({'step': 3, 'run_id': 'mine', 'schema': 'braintrace.receipt/1'})
    b'{"schema":"braintrace.receipt/1","run_id":"mine","step":3}\\n'
    """
    schema = receipt.get('schema') if isinstance(receipt, dict) else None
    if not isinstance(schema, str) or schema not in SCHEMAS:
        raise ReceiptError('schema', 'schema', f'one of {", ".join(SCHEMAS)} is due')
    try:
        return canonical_json(canonical(receipt, schema)) + b'\n'
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        first = next(iter(check(receipt, schema)), None)
        path, message = (first.path, first.message) if first else ('', str(error))
        raise ReceiptError('not-json', path, message) from error


def canonical_json(value: Any) -> bytes:
    """A JSON value without spaces, in UTF-8, keys as they stand."""
    text = json.dumps(value, separators=(',', ':'), ensure_ascii=False, allow_nan=False)
    return text.encode('utf-8')


def digest(receipt: Mapping) -> str:
    """``sha256:`` and the digest of the canonical bytes, without the field ``digests``.

    >>> receipt = {'schema': 'braintrace.receipt/1', 'step': 3}
    >>> digest(receipt) == digest({**receipt, 'digests': {}})
    True
    """
    bare = {key: value for key, value in receipt.items() if key != 'digests'}
    return f'sha256:{hashlib.sha256(emit(bare)).hexdigest()}'


def spec_digest(receipt: Mapping) -> str:
    """The digest of what stays the same in a run: groups, relations, routes, and the shapes of
    parameters, by path, and of carries, as ``carry/NAME``. Keys are sorted.
    """
    topology = receipt['topology']
    shapes = {path: value['shape'] for path, value in receipt['params_before'].items()}
    carry = receipt['carry_before']
    shapes |= {f'carry/{name}': value['shape'] for name, value in carry.items()}
    spec = {name: topology[name] for name in ('groups', 'relations', 'routes')}
    bare = json.dumps({**spec, 'shapes': shapes}, sort_keys=True, separators=(',', ':'))
    return f'sha256:{hashlib.sha256(bare.encode()).hexdigest()}'


# -- reading ---------------------------------------------------------------------------------------


def parse(raw: bytes | str) -> Any:
    """The JSON value of one line; its structure is not judged here.

    Raises ``ReceiptError`` for more than one line, for what is no JSON in UTF-8, duplicate keys,
    NaN and Infinity, integers of more than 64 bits, and beyond the caps.

    >>> parse('{"step": 3}')
    {'step': 3}
    """
    text = decoded(raw)
    if '\n' in text.removesuffix('\n'):
        raise ReceiptError(
            'lines', '', 'more than one line', 'a run has a line for each step: read it as a run'
        )
    try:
        value = json.loads(
            text,
            object_pairs_hook=unique,
            parse_int=integer,
            parse_float=finite,
            parse_constant=refused,
        )
    except RecursionError:
        raise too_deep() from None
    except json.JSONDecodeError as error:
        raise ReceiptError('not-json', '', f'no JSON: {error}') from None
    check_nesting(value)
    if '\\ud' in text or '\\uD' in text:
        try:
            canonical_json(value)  # UTF-8 has no halves of surrogate pairs
        except UnicodeEncodeError:
            said = 'half of a surrogate pair in a string'
            raise ReceiptError('not-utf8', '', said) from None
    return value


def parse_run(raw: bytes | str) -> list:
    """The values of a run, one for each line; empty lines are refused.

    Raises ``ReceiptError`` as :func:`parse` does, with the number of the line.

    >>> parse_run('{"step": 3}\\n{"step": 4}\\n')
    [{'step': 3}, {'step': 4}]
    """
    lines: list = raw.split(b'\n') if isinstance(raw, bytes) else raw.split('\n')
    if not lines[-1]:
        lines.pop()
    return list(each_line(lines, parse))


def each_line(lines: Iterable, read: Callable) -> Iterator:
    """What each line holds; a ``ReceiptError`` of ``read`` gets the number of its line."""
    i = 0
    for i, line in enumerate(lines, 1):
        if i > MAX_RECORDS:
            raise ReceiptError('too-large', '', f'more than {MAX_RECORDS} lines')
        try:
            yield read(line)
        except ReceiptError as error:
            raise ReceiptError(error.code, f'line {i}', str(error), error.hint) from error
    if not i:
        raise ReceiptError('empty', '', 'nothing to read')


def decoded(raw: Any) -> str:
    """The text of a line within the cap."""
    if not isinstance(raw, bytes | str):
        raise ReceiptError('not-json', '', f'a {type(raw).__name__} where bytes are due')
    for start, (kind, hint) in BINARY.items():
        if isinstance(raw, bytes) and raw.startswith(start):
            raise ReceiptError('not-json', '', f'this is {kind}', hint)
    if len(raw) > MAX_LINE:
        raise ReceiptError(
            'too-large', '', f'a line of {len(raw)} bytes, more than {MAX_LINE}', 'use npz files'
        )
    if not raw.strip():
        raise ReceiptError('empty', '', 'nothing to read')
    _refuse_many(raw)
    try:
        return raw if isinstance(raw, str) else raw.decode('utf-8')
    except UnicodeDecodeError as error:
        raise ReceiptError('not-utf8', '', f'no UTF-8 at byte {error.start}') from None


def _refuse_many(raw: bytes | str) -> None:
    """A value of Python takes up to thirty times the bytes of its text, so it is counted first."""
    marks: Any = (b'[', b'{', b'"', b',') if isinstance(raw, bytes) else ('[', '{', '"', ',')
    *parts, commas = map(raw.count, marks)
    if sum(parts) > MAX_PARTS or commas > MAX_NUMBERS:
        found = f'{commas:,} commas and {sum(parts):,} quotes, lists and objects'
        raise ReceiptError('too-large', '', f'a line of {found}', 'use npz files')


def unique(pairs: list[tuple[str, Any]]) -> dict:
    """An object whose keys differ."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ReceiptError('duplicate-key', twice[:60], 'the key appears twice in one object')
    return found


def integer(text: str) -> int:
    """An integer of 64 bits."""
    if len(text) > 20 or not -MAX_INTEGER <= int(text) < MAX_INTEGER:
        raise ReceiptError('integer', '', f'the integer {text[:24]}... has more than 64 bits')
    return int(text)


def finite(text: str) -> float:
    """A decimal within the range of float64."""
    value = float(text)
    if math.isinf(value):
        raise ReceiptError('not-finite', '', f'{text[:24]} is beyond the range of float64')
    return value


def refused(text: str) -> Any:
    """NaN and the infinities are no JSON."""
    raise ReceiptError('not-finite', '', f'{text} is no JSON: a receipt has finite numbers')


def too_deep() -> ReceiptError:
    """The error of a value that is nested too deeply."""
    return ReceiptError('depth', '', f'nested more deeply than {MAX_DEPTH}')


def check_nesting(value: Any) -> None:
    """Refuses what is nested too deeply, and lists that are too long."""
    level = [value]
    for _ in range(MAX_DEPTH):
        parts: list = []
        for one in level:
            if isinstance(one, dict):
                parts += one.values()
            elif isinstance(one, list):
                if len(one) > MAX_ELEMENTS:
                    raise ReceiptError(
                        'too-large', '', f'a list of {len(one)}, more than {MAX_ELEMENTS}'
                    )
                parts += [part for part in one if isinstance(part, dict | list)]
        level = [part for part in parts if isinstance(part, dict | list)]
        if not level:
            return
    raise too_deep()
