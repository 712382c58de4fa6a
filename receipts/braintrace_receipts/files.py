"""Arrays that are in an npz beside the receipt: read without pickle, checked, within the caps."""

from __future__ import annotations

import os
import stat
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from .arrays import array_digest
from .errors import MAX_TOTAL, ReceiptError
from .record import array_paths, elements_of
from .schema import check

FILED = {'shape', 'dtype', 'sha256', 'file', 'key', 'data'}
MAX_DIRECTORY = 2**20  # bytes of the table of contents of an npz
UNREADABLE = (
    OSError,
    KeyError,
    ValueError,
    zipfile.BadZipFile,
    NotImplementedError,
    RuntimeError,
    EOFError,
)


def resolve_files(
    receipt: Any, folder: str | os.PathLike, seen: set[tuple[str, str]] | None = None
) -> Any:
    """The receipt, into which the numbers of its filed arrays are put, beside their digests.

    A value that its schema refuses stays as it is. ``seen`` has the arrays of the run that were
    read: each is in one place. Raises ``ReceiptError``: ``file`` for a file that cannot be read
    or has another array, ``digest`` where the numbers are not those of ``sha256``.
    """
    if check(receipt, 'braintrace.receipt/1'):
        return receipt
    nodes = array_paths(receipt)
    if elements_of(nodes, sampled=True) > MAX_TOTAL:
        return receipt  # which is then refused for that
    with ExitStack() as stack:
        archives: dict[str, zipfile.ZipFile] = {}
        for path, node in nodes:
            if node is None or 'file' not in node or 'data' in node:
                continue
            name, key = node['file'], node['key']
            if seen is not None:
                _once(seen, name, key, path)
            try:
                if name not in archives:
                    archives[name] = _opened(Path(folder) / name, stack)
                node['data'] = _read(archives[name], node)
            except UNREADABLE as error:
                said = f'{name} and {key!r:.80}: {error}'[:300]
                raise ReceiptError('file', path, said, 'put the npz beside the receipt') from None
            if array_digest(node['data']) != node['sha256']:
                raise ReceiptError('digest', path, f'{key!r:.80} of {name} has another sha256')
    return receipt


def write_files(receipt: Any, folder: str | os.PathLike) -> list[str]:
    """Writes the filed arrays that a receipt carries, a file for each name; returns the names."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for _, value in array_paths(receipt):
        if value is not None and FILED == set(value):
            shaped = np.asarray(value['data']).reshape(value['shape'])
            found.setdefault(value['file'], {})[value['key']] = shaped
    for name, arrays in found.items():
        with zipfile.ZipFile(Path(folder) / name, 'w') as archive:
            for key, array in arrays.items():
                with archive.open(f'{key}.npy', 'w', force_zip64=True) as stream:
                    np.lib.format.write_array(stream, array, allow_pickle=False)
    return list(found)


def _once(seen: set[tuple[str, str]], name: str, key: str, path: str) -> None:
    if (name, key) in seen:
        raise ReceiptError('file', path, f'{key!r:.80} of {name} is in two places of the run')
    seen.add((name, key))


def _opened(path: Path, stack: ExitStack) -> zipfile.ZipFile:
    """An npz that is a regular file, opened once, whose table of contents is no larger than it may
    be and whose arrays lie one behind the other.
    """
    flags = (getattr(os, name, 0) for name in ('O_NOFOLLOW', 'O_NONBLOCK', 'O_CLOEXEC', 'O_BINARY'))
    stream = stack.enter_context(os.fdopen(os.open(path, os.O_RDONLY | sum(flags)), 'rb'))
    about = os.fstat(stream.fileno())
    if not stat.S_ISREG(about.st_mode):
        raise ValueError('no regular file, but a pipe or a folder')
    stream.seek(max(0, about.st_size - 42))
    tail = stream.read(42)
    large, size = tail[:4] == b'PK\x06\x07', int.from_bytes(tail[-10:-6], 'little')
    if tail[-22:-18] != b'PK\x05\x06' or large or size > MAX_DIRECTORY:
        raise ValueError('no plain npz, or one of too many arrays: write one for each step')
    archive, end = stack.enter_context(zipfile.ZipFile(stream)), 0
    for member in sorted(archive.infolist(), key=lambda one: one.header_offset):
        if member.header_offset < end:
            raise ValueError('its arrays overlap')
        end = member.header_offset + member.compress_size
    return archive


def _read(archive: zipfile.ZipFile, node: dict) -> np.ndarray:
    """The array that a node names, if its header says what the node says."""
    member = archive.getinfo(f'{node["key"]}.npy')
    if member.compress_type != zipfile.ZIP_STORED:
        raise ValueError('it is compressed; write it by numpy.savez')
    shape, dtype = tuple(node['shape']), np.dtype(node['dtype'])
    with archive.open(member) as stream:
        if np.lib.format.read_magic(stream) != (1, 0):  # 2.0 has headers of up to 4 GB
            raise ValueError('no npy of version 1.0')
        said, fortran, kind = np.lib.format.read_array_header_1_0(stream)
        if said != shape or kind.name != dtype.name:
            raise ValueError(f'an array {kind.name}{said}, the receipt says {dtype.name}{shape}')
        flat = np.frombuffer(stream.read(int(np.prod(shape, dtype=np.int64)) * kind.itemsize), kind)
    return flat.reshape(shape, order='F' if fortran else 'C').astype(dtype, order='C')
