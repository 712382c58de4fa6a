"""Arrays that stand in an npz beside the receipt: read without pickle, checked, within the caps."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .array_kind import FILE
from .arrays import DTYPES, array_digest, elements
from .errors import MAX_DEPTH, MAX_ELEMENTS, ReceiptError
from .kinds import join

FILED = {'shape', 'dtype', 'sha256', 'file', 'key'}


def resolve_files(receipt: Any, folder: str | os.PathLike) -> Any:
    """The value with the numbers of its filed arrays beside their digests.

    Raises ``ReceiptError``: ``file`` for a name that is no bare one, a file that cannot be read or
    has another array, ``digest`` where the numbers are not those of ``sha256``.
    """
    return resolved(receipt, Path(folder), '', 0)


def write_files(receipt: Any, folder: str | os.PathLike) -> list[str]:
    """Writes the filed arrays that a value carries, a file for each name; returns the names."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for value in filed(receipt):
        shaped = np.asarray(value['data']).reshape(value['shape'])
        found.setdefault(value['file'], {})[value['key']] = shaped
    for name, arrays in found.items():
        with zipfile.ZipFile(Path(folder) / name, 'w') as archive:
            for key, array in arrays.items():
                with archive.open(f'{key}.npy', 'w', force_zip64=True) as stream:
                    np.lib.format.write_array(stream, array, allow_pickle=False)
    return list(found)


def filed(value: Any) -> Iterator[dict]:
    """The filed nodes of a value that carry their array."""
    if isinstance(value, dict):
        if FILED | {'data'} == set(value):
            yield value
        else:
            for part in value.values():
                yield from filed(part)
    elif isinstance(value, list):
        for part in value:
            yield from filed(part)


def resolved(value: Any, folder: Path, path: str, depth: int) -> Any:
    """A part of a value, resolved; what is nested too deeply stays for the schema to refuse."""
    if depth > MAX_DEPTH:
        return value
    if isinstance(value, dict):
        if FILED == set(value):
            return {**value, 'data': loaded(value, folder, path)}
        return {k: resolved(v, folder, join(path, k), depth + 1) for k, v in value.items()}
    if isinstance(value, list) and any(isinstance(part, dict | list) for part in value[:64]):
        return [resolved(v, folder, f'{path}[{i}]', depth + 1) for i, v in enumerate(value)]
    return value


def loaded(value: dict, folder: Path, path: str) -> np.ndarray:
    """The array that a filed node names."""
    name, key, shape, dtype = (value[part] for part in ('file', 'key', 'shape', 'dtype'))
    if next(FILE.problems(name, path), None) or not isinstance(key, str):
        raise ReceiptError('file', path, 'file is no bare name', 'put the npz beside the receipt')
    size = elements(shape)
    if size is None or size > MAX_ELEMENTS or not isinstance(dtype, str) or dtype not in DTYPES:
        raise ReceiptError('file', path, f'a shape or dtype of no array: {dtype!r:.40}')
    try:
        with zipfile.ZipFile(folder / name) as archive, archive.open(f'{key}.npy') as stream:
            array = read_array(stream, tuple(shape), np.dtype(dtype))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise ReceiptError('file', path, f'{name} and {key!r:.80}: {error}') from None
    if array_digest(array) != value['sha256']:
        raise ReceiptError('digest', path, f'{key!r:.80} of {name} has another sha256')
    return array


def read_array(stream: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The array of an ``npy`` stream, if its header says what the receipt says."""
    version = np.lib.format.read_magic(stream)
    if version not in {(1, 0), (2, 0)}:
        raise ValueError(f'version {version} of npy')
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    said, fortran, kind = read[version](stream)
    if said != shape or kind.name != dtype.name:
        raise ValueError(f'an array {kind.name}{said}, the receipt says {dtype.name}{shape}')
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    flat = np.frombuffer(stream.read(size), kind)
    return flat.reshape(shape, order='F' if fortran else 'C').astype(dtype, order='C')
