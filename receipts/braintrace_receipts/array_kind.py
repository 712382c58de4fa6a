"""The numbers of array nodes that come from a file: of their dtype, finite, those of the digest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .arrays import DTYPES, array_digest, decimals, sample_indices, typed
from .errors import MAX_INTEGER, Problem, described, is_int, join

FITS: dict[str, set[type]] = {'f': {float, int}, 'i': {int}, 'b': {bool}}
DUE = {'f': 'a number', 'i': 'an integer', 'b': 'true or false'}
Problems = Iterator[Problem]


def number_problems(value: Any, size: int, path: str) -> Problems:
    """What is wrong with the numbers of a node whose other keys are right."""
    if 'data' in value:
        yield from _data_problems(value, size, join(path, 'data'))
    if 'sample' in value:
        yield from _sample_problems(value, size, join(path, 'sample'))


def canonical_array(value: Any) -> Any:
    """A node with its keys in order and the shortest decimals; what is none stays."""
    if not isinstance(value, dict) or not {'shape', 'dtype'} <= set(value):
        return value
    keys = ('shape', 'dtype', 'data', 'sha256', 'file', 'key', 'sample')
    out = {key: value[key] for key in keys if key in value}
    if 'file' in out:
        out.pop('data', None)  # it was loaded
    if 'data' in out:
        out['data'] = _canonical_data(out['data'], out['dtype'])
    if 'sample' in out:
        out['sample'] = _canonical_sample(out['sample'], out['dtype'])
    return out


def _data_problems(value: dict, size: int, path: str) -> Problems:
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
    elif found := next(_scalar_problems(data, dtype, path), None):
        yield found
        return
    flat = typed(data, dtype).reshape(-1)
    if flat.dtype.kind == 'f' and not (fine := np.isfinite(flat)).all():
        yield Problem(f'{path}[{int(np.argmin(fine))}]', 'is not finite')
    elif 'sha256' in value and array_digest(flat) != value['sha256']:
        yield Problem(path, 'these are not the numbers of sha256')


def _scalar_problems(data: list, dtype: str, path: str) -> Problems:
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
    yield Problem(f'{path}[{i}]', f'{described(data[i])} where {DUE[kind]} is due')


def _sample_problems(value: dict, size: int, path: str) -> Problems:
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
    yield from _data_problems({'data': flat, 'dtype': value['dtype']}, len(flat), path)


def _canonical_data(data: Any, dtype: Any) -> Any:
    """Numbers as the shortest decimals; what is no list of numbers stays."""
    if dtype not in DTYPES:
        return data
    try:
        return decimals(data, dtype)
    except (TypeError, ValueError, OverflowError):
        return data


def _canonical_sample(pairs: Any, dtype: Any) -> Any:
    """A sample with the shortest decimals; what is no sample stays."""
    try:
        values = _canonical_data([pair[1] for pair in pairs], dtype)
        return [[pair[0], v] for pair, v in zip(pairs, values)]
    except (TypeError, IndexError, KeyError):
        return pairs
