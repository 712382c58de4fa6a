"""The kind of an array node: its keys, its numbers, its digest and its sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .arrays import DTYPES, array_digest, decimals, elements, sample_indices, typed
from .errors import MAX_ELEMENTS, MAX_INTEGER
from .kinds import (
    Flag,
    Kind,
    List,
    Number,
    Problem,
    Problems,
    Text,
    Whole,
    described,
    is_int,
    join,
)

DIGEST = Text(pattern='[0-9a-f]{64}')
FILE = Text(pattern=r'[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}')
SCALARS: dict[str, Kind] = {'f': Number(), 'i': Whole(), 'b': Flag()}
FITS: dict[str, set[type]] = {'f': {float, int}, 'i': {int}, 'b': {bool}}
PLACES = (  # the keys of a node behind its shape and its dtype
    ('data',),
    ('sha256', 'file', 'key'),
    ('sha256', 'file', 'key', 'data'),  # loaded, in memory alone
    ('sha256', 'sample'),
)


@dataclass(frozen=True)
class Array(Kind):
    """An array node."""

    dtypes: tuple[str, ...] = field(default=DTYPES)

    def problems(self, value: Any, path: str) -> Problems:
        if not isinstance(value, dict):
            yield Problem(path, f'{described(value)} where an array is due')
            return
        size, dtype = elements(value.get('shape')), value.get('dtype')
        if size is None or size > MAX_ELEMENTS:
            yield Problem(
                join(path, 'shape'),
                f'{described(value.get("shape"))} where a list of sizes is due, at most '
                f'{MAX_ELEMENTS} elements together',
            )
        elif not isinstance(dtype, str) or dtype not in self.dtypes:
            known = ', '.join(self.dtypes)
            yield Problem(join(path, 'dtype'), f'{described(dtype)}; known are {known}')
        elif not any({'shape', 'dtype', *keys} == set(value) for keys in PLACES):
            yield Problem(path, f'an array with the keys {described(list(value))}')
        else:
            yield from self.parts(value, size, path)

    def parts(self, value: dict, size: int, path: str) -> Problems:
        """What is wrong with the parts of a node that has the right keys."""
        for key, kind in {'sha256': DIGEST, 'file': FILE, 'key': Text()}.items():
            if key in value and (found := list(kind.problems(value[key], join(path, key)))):
                yield from found
                return
        if 'data' in value:
            yield from data_problems(value, size, join(path, 'data'))
        if 'sample' in value:
            yield from sample_problems(value, size, join(path, 'sample'))

    def canonical(self, value: Any) -> Any:
        if not isinstance(value, dict) or not {'shape', 'dtype'} <= set(value):
            return value
        out = {'shape': value['shape'], 'dtype': value['dtype']}
        if 'data' in value and 'file' not in value:
            out['data'] = canonical_data(value['data'], value['dtype'])
        for key in ('sha256', 'file', 'key'):
            out |= {key: value[key]} if key in value else {}
        if 'sample' in value:
            out['sample'] = canonical_sample(value['sample'], value['dtype'])
        return out

    def schema(self) -> dict:
        return {'$ref': '#/$defs/array'}


def array_schema() -> dict:
    """The JSON Schema of an array node as it stands in a file."""
    head = {'shape': List(Whole(0), 8).schema(), 'dtype': Text(choices=DTYPES).schema()}
    scalar = {'type': ['number', 'boolean']}
    pair = {'type': 'array', 'prefixItems': [Whole(0).schema(), scalar], 'items': False}
    parts = {
        'data': {'type': 'array', 'items': scalar, 'maxItems': MAX_ELEMENTS},
        'sha256': DIGEST.schema(),
        'file': FILE.schema(),
        'key': Text().schema(),
        'sample': {'type': 'array', 'items': pair},
    }
    forms = [{**head, **{key: parts[key] for key in keys}} for keys in PLACES if keys[3:] == ()]
    closed = {'type': 'object', 'additionalProperties': False}
    return {'anyOf': [{**closed, 'properties': one, 'required': list(one)} for one in forms]}


# -- the numbers of a node -------------------------------------------------------------------------


def data_problems(value: dict, size: int, path: str) -> Problems:
    """A list of numbers, or an array of NumPy, of the right length and dtype and all finite."""
    data, dtype = value['data'], value['dtype']
    if isinstance(data, np.ndarray):
        if data.dtype.name != dtype or data.size != size:
            yield Problem(path, f'an array {data.dtype.name}{data.shape} in a node of {dtype}')
            return
    elif not isinstance(data, list) or 'file' in value:
        yield Problem(path, f'{described(data)} where a list of numbers is due')
        return
    elif len(data) != size:
        yield Problem(path, f'{len(data)} numbers where the shape asks for {size}')
        return
    elif found := next(scalar_problems(data, dtype, path), None):
        yield found
        return
    flat = typed(data, dtype).reshape(-1)
    if flat.dtype.kind == 'f' and not (fine := np.isfinite(flat)).all():
        yield Problem(f'{path}[{int(np.argmin(fine))}]', 'is not finite')
    elif 'sha256' in value and array_digest(flat) != value['sha256']:
        yield Problem(path, 'these are not the numbers of sha256')


def scalar_problems(data: list, dtype: str, path: str) -> Problems:
    """Elements of a list that are no numbers of the dtype."""
    kind = np.dtype(dtype).kind
    fits = FITS[kind]
    if set(map(type, data)) <= fits:
        if kind == 'b' or (kind == 'f' and int not in map(type, data)):
            return
        limit = 2**31 if dtype == 'int32' else MAX_INTEGER
        wrong = [i for i, v in enumerate(data) if type(v) is int and not -limit <= v < limit]
        if wrong:
            yield Problem(f'{path}[{wrong[0]}]', f'{described(data[wrong[0]])} is no {dtype}')
        return
    i = next(i for i, part in enumerate(data) if type(part) not in fits)
    found = next(SCALARS[kind].problems(data[i], f'{path}[{i}]'), None)
    yield found or Problem(f'{path}[{i}]', f'{described(data[i])} is no plain number of JSON')


def sample_problems(value: dict, size: int, path: str) -> Problems:
    """A sample: pairs at the indices that the digest decides, and perhaps others, with finite
    numbers.
    """
    pairs = value['sample']
    fine = isinstance(pairs, list) and all(type(p) is list and len(p) == 2 for p in pairs)
    if not fine:
        yield Problem(path, f'{described(pairs)} where a list of [index, value] is due')
        return
    indices = [pair[0] for pair in pairs]
    whole = all(is_int(i) and 0 <= i < size for i in indices)
    if not whole or indices != sorted({*indices, *sample_indices(value['sha256'], size)}):
        yield Problem(path, 'the indices are not those that sha256 decides, in order')
        return
    flat = [pair[1] for pair in pairs]
    yield from data_problems({'data': flat, 'dtype': value['dtype']}, len(flat), path)


def canonical_data(data: Any, dtype: Any) -> Any:
    """Numbers as the shortest decimals; what is no list of numbers stays."""
    if dtype not in DTYPES:
        return data
    try:
        return decimals(data, dtype)
    except (TypeError, ValueError, OverflowError):
        return data


def canonical_sample(pairs: Any, dtype: Any) -> Any:
    """A sample with the shortest decimals; what is no sample stays."""
    try:
        values = canonical_data([pair[1] for pair in pairs], dtype)
        return [[pair[0], v] for pair, v in zip(pairs, values)]
    except (TypeError, IndexError, KeyError):
        return pairs
