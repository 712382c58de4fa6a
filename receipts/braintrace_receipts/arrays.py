"""Array nodes: an array as JSON, with its numbers, with a digest and a file, or with a sample.

An inline node is ``{"shape", "dtype", "data"}``; a filed one ``{"shape", "dtype", "sha256", "file",
"key"}``, and ``data`` once it is loaded; a sampled one ``{"shape", "dtype", "sha256", "sample"}``.
In memory ``data`` may be an array of NumPy. A digest is that of the little-endian bytes, C order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeGuard

import numpy as np

from .errors import MAX_ELEMENTS, ReceiptError

DTYPES = ('float32', 'float64', 'int32', 'int64', 'bool')
INLINE = 4096  # larger arrays go to a file or are sampled
SAMPLES = 256


def node(
    array: Any,
    name: str = '',
    *,
    arrays: str = 'inline',
    file: str = '',
    also: Iterable[int] = (),
) -> dict:
    """The node of an array: ``arrays`` says what becomes of more than 4096 elements.

    ``'inline'`` keeps the numbers, ``'npz'`` names ``file`` and the key ``name`` in it and keeps
    the array for ``write_files``, ``'sample'`` keeps 256 elements, those at the flat indices
    ``also``, and a digest.

    >>> node(np.float32([[0.1, -0.0]]), 'inputs')['shape']
    [1, 2]
    """
    value = np.asarray(array)
    if value.dtype.name not in DTYPES:
        raise ReceiptError(
            'dtype', name, f'an array of {value.dtype.name}', f'use one of {", ".join(DTYPES)}'
        )
    if value.size > MAX_ELEMENTS:
        raise ReceiptError(
            'too-large',
            name,
            f'{value.size} elements, more than {MAX_ELEMENTS}',
            'record fewer lanes or a smaller network: no verifier would read it',
        )
    value = np.ascontiguousarray(value).reshape(value.shape)
    head = {'shape': list(value.shape), 'dtype': value.dtype.name}
    if arrays == 'inline' or value.size <= INLINE:
        return {**head, 'data': value}
    digest = array_digest(value)
    if arrays == 'npz':
        return {**head, 'sha256': digest, 'file': file, 'key': name, 'data': value}
    if arrays != 'sample':
        raise ReceiptError('arrays', name, f'arrays={arrays!r}', "use 'inline', 'npz' or 'sample'")
    indices = sorted({*sample_indices(digest, value.size), *also})
    flat = decimals(value.reshape(-1)[indices], value.dtype.name)
    return {**head, 'sha256': digest, 'sample': [[i, v] for i, v in zip(indices, flat)]}


def array_of(value: Mapping) -> np.ndarray:
    """The array of a node that ``check`` passed: floats in float64, integers and bools as they are.

    Raises ``ReceiptError``: ``sampled`` for a sample, ``unresolved`` where the file is not loaded.

    >>> array_of({'shape': [2], 'dtype': 'float32', 'data': [0.5, -0.0]})
    array([ 0.5, -0. ])
    """
    if 'data' not in value:
        code = 'sampled' if 'sample' in value else 'unresolved'
        raise ReceiptError(code, '', f'an array whose numbers are not here ({code})')
    flat = typed(value['data'], value['dtype']).reshape(value['shape'])
    return flat.astype(np.float64) if flat.dtype.kind == 'f' else flat


def is_sampled(value: Any) -> TypeGuard[dict]:
    """Whether a node has a sample in place of its numbers."""
    return isinstance(value, dict) and 'sample' in value


def samples_of(value: Mapping) -> tuple[np.ndarray, np.ndarray]:
    """The flat indices of a sampled node and the values there."""
    indices = np.array([pair[0] for pair in value['sample']], np.int64)
    values = typed([pair[1] for pair in value['sample']], value['dtype'])
    return indices, values.astype(np.float64) if values.dtype.kind == 'f' else values


def sample_indices(digest: str, size: int) -> list[int]:
    """256 flat indices, ascending, that the digest of the array decides; all of a smaller array.

    The ``i``-th draw is ``sha256(digest bytes + i as 8 bytes, little-endian)``: its first 8 bytes
    as a little-endian integer, modulo ``size``. Draws go on until 256 are distinct.
    """
    if size <= SAMPLES:
        return list(range(size))
    seed, drawn, i = bytes.fromhex(digest), set[int](), 0
    while len(drawn) < SAMPLES:
        found = hashlib.sha256(seed + i.to_bytes(8, 'little')).digest()
        drawn.add(int.from_bytes(found[:8], 'little') % size)
        i += 1
    return sorted(drawn)


def array_digest(value: np.ndarray) -> str:
    """sha256 in hex of the little-endian bytes in C order."""
    little = value.dtype.newbyteorder('<')
    return hashlib.sha256(np.ascontiguousarray(value, little).tobytes()).hexdigest()


def typed(data: Any, dtype: str) -> np.ndarray:
    """Numbers as an array of ``dtype``; a float32 beyond its range becomes infinite."""
    with np.errstate(over='ignore'):
        if dtype == 'float32':
            return np.asarray(data, np.float64).astype(np.float32)
        return np.asarray(data, dtype)


def decimals(data: Any, dtype: str) -> list:
    """The flat numbers as JSON has them: each the shortest decimal that gives the element back."""
    flat = typed(data, dtype).reshape(-1)
    if dtype != 'float32':
        return flat.tolist()
    return list(_short(flat.tobytes()) if flat.size <= INLINE else _shortest(flat))


def _shortest(flat: np.ndarray) -> list[float]:
    bits, places = np.unique(flat.view(np.int32), return_inverse=True)  # -0.0 and 0.0 differ
    own = bits.view(np.float32)
    short = np.array([float(text) for text in own.astype(str)], np.float64)
    with np.errstate(over='ignore'):
        kept = short.astype(np.float32) == own
    return np.where(kept, short, own.astype(np.float64))[places].tolist()


@lru_cache(256)
def _short(raw: bytes) -> list[float]:
    """Those of small arrays are kept: what ends one step of a run begins the next."""
    return _shortest(np.frombuffer(raw, np.float32))
