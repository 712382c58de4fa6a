"""A tree of arrays in one file and back, of one process or of several."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import secrets
import shutil
import stat
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import jax
import numpy as np
import saiunit as u
from jax.experimental import multihost_utils

from .._compiler import abstract, check_arrays, path_key, path_name
from .._jax import is_key
from .._warnings import tell
from ..errors import OptionError, StructureError
from .saving import (
    FILE,
    FINGERPRINT,
    PARTS,
    check_fingerprint,
    descriptions,
    differences,
    named_leaves,
    numbers_of,
    placed,
    refused,
)

try:
    import fcntl
except ImportError:  # Windows, where no file is removed that is open
    fcntl = None  # type: ignore[assignment]

File: TypeAlias = str | os.PathLike | BinaryIO

FORMAT = 3  # the only one that is read
TEXT = re.compile(r'uint8\[(\d+)\]')  # how a text of any length is described
LARGEST = 2**22  # bytes of a header; a list of members has less than twice as many
PIECE = 2**18  # bytes that are read at once, so that a cache holds them
STALE = 3600  # seconds after which nobody writes into a part any more


def save_state(file: File, state: Any, learner=None) -> None:
    """Write a state, or any tree of arrays, to a path or a binary file, as npz.

    With ``learner``, compiled, the file says which learner it is of (its ``fingerprint()``). A file
    at a path is replaced in one go, when the new one is whole, and keeps its mode: whoever is
    interrupted finds the old one. Whoever is killed leaves a part behind,
    ``NAME.<host>-<hex>.part``, which the next save of the same file removes. Every dtype, typed
    PRNG keys and physical units are kept. Where several processes hold parts of an array, all of
    them call it with the same path: the first one writes the whole, and all wait for it; where they
    hold other numbers of what each has whole, all warn. See :func:`load_state`.

    Raises :class:`braintrace.errors.OptionError` for a path that is no regular file,
    :class:`braintrace.errors.StructureError` for leaves that are no arrays or have one path, and
    for processes with other learners or versions, :class:`braintrace.errors.NotCompiledError` for a
    learner that is not compiled, and ``OSError`` where the file can not be written, in every
    process.

    >>> import io, jax, jax.numpy as jnp
    >>> from braintrace.functional import load_state, save_state
    >>> tree = {'w': jnp.ones(2, jnp.bfloat16), 'key': jax.random.key(0)}
    >>> file = io.BytesIO()
    >>> save_state(file, tree)
    >>> _ = file.seek(0)
    >>> load_state(file, tree)['w'].dtype
    dtype(bfloat16)
    """
    check_arrays(state, 'the state')
    leaves = named_leaves(state, _path_of)[0]
    here = descriptions(leaves, 'a state')
    about = {} if learner is None else {'fingerprint': learner.fingerprint()}
    alone = all(map(_is_here, leaves.values()))
    if not alone:
        _check_alike(about.get('fingerprint'), {'leaves': here})
    arrays = {name: _whole(name, leaf) for name, leaf in leaves.items()}
    data = {name: array.reshape(-1).view(np.uint8).data for name, array in arrays.items()}
    if not alone and (wrong := _unlike({name: zlib.crc32(x) for name, x in data.items()})):
        tell(f'{wrong}, though all should hold the same numbers; those of process 0 are saved.')

    def write():
        with _written(file) as stream, zipfile.ZipFile(stream, 'w') as archive:
            rows = {}  # they bind each name to the content of its member
            for name, array in arrays.items():
                start = _start(array.dtype, array.shape)
                rows[name] = here[name], _add(archive, f'{name}.npy', start, data[name])
            header = json.dumps({'format': FORMAT, **about, 'leaves': rows}).encode()
            if len(header) > LARGEST:
                raise StructureError(
                    f'names and fingerprint take {len(header)} bytes, more than {LARGEST}. Save '
                    'without `learner=`, or fewer arrays.'
                )
            _add(archive, FILE, header)

    if alone:
        write()
    else:  # process 0 writes, the others wait for it
        _in_all(lambda: write() if jax.process_index() == 0 else None, 'write')


def _add(archive: zipfile.ZipFile, member: str, *content) -> int:
    """Write a member; returns its checksum."""
    with archive.open(member, 'w', force_zip64=True) as entry:
        for part in content:
            entry.write(part)
    return archive.getinfo(member).CRC


def load_state(file: File, like: Any, learner=None) -> Any:
    """The tree that :func:`save_state` wrote, in the structure of ``like``.

    ``like`` is a tree of the same structure, or its ``jax.eval_shape``; where its leaves have a
    ``NamedSharding``, the arrays get it; every process of a mesh reads its parts. Raises
    :class:`braintrace.errors.StructureError`, with every path that is missing, added or of another
    shape or dtype, and for a file that is none, torn or changed; no more is read than ``like``
    says. With ``learner``, also for a file of another cell, rule or option, with every difference
    (:func:`structure_diff`); other versions are warned of. A learner that has compiled nothing is
    compared when it compiles, at its first call. All processes of a mesh call it, also where no
    file is there yet: ``FileNotFoundError`` comes in all or in none, and nobody goes on where one
    can not read it or has another learner.

    >>> import io, jax, jax.numpy as jnp
    >>> from braintrace.functional import load_state, save_state
    >>> file = io.BytesIO()
    >>> save_state(file, {'w': jnp.arange(3)})
    >>> _ = file.seek(0)
    >>> load_state(file, jax.eval_shape(lambda: {'w': jnp.arange(3)}))['w'].tolist()
    [0, 1, 2]
    """
    leaves, treedef = named_leaves(like, _path_of)
    here = descriptions(leaves, '`like`')
    fresh = hasattr(learner, 'expect') and not learner.is_compiled
    fingerprint = None if learner is None or fresh else learner.fingerprint()
    check = _checked_later(learner) if fresh else partial(_checked, fingerprint)
    if all(map(_is_here, leaves.values())):
        numbers, _ = _read(file, leaves, here, check)
    else:
        path = _path(file)
        there = path is None or os.path.exists(path)
        _check_alike(fingerprint, {'whether it sees the file': there})
        numbers, content = _in_all(lambda: _read(file, leaves, here, check), 'read')
        _check_alike(fingerprint, {'the content of the file': content})
    return jax.tree.unflatten(treedef, map(placed, numbers, leaves.values()))


def _checked(fingerprint: Mapping | None, saved: Any) -> None:
    """Refuse the file of another learner than the one with this fingerprint."""
    if fingerprint is not None:
        check_fingerprint(
            saved,
            fingerprint,
            'Make the learner as it was when the file was written. For its parameters alone, '
            'load the file without `learner=`, into a tree like the one that was saved, and '
            'take them out of it.',
        )


def _checked_later(learner) -> Callable:
    """The same at the first call of a learner that has compiled nothing yet."""
    return lambda saved: learner.expect(lambda found: _checked(found, saved))


def _read(
    file: File, leaves: Mapping, here: Mapping[str, str], check: Callable
) -> tuple[list[np.ndarray], int]:
    """The numbers of the leaves that are described ``here``, and a checksum of the whole file;
    ``check`` gets the fingerprint that it holds.
    """
    path = _path(file)
    what = f'{path or "the file"} is no file of `save_state`, or it is torn'
    with contextlib.ExitStack() as stack:
        stream = file if path is None else stack.enter_context(open(path, 'rb', opener=_regular))
        stack.enter_context(refused(what))
        archive = stack.enter_context(zipfile.ZipFile(_Bounded(stream)))
        if FILE not in archive.namelist():
            raise StructureError(f'{what}, or of an earlier braintrace: it has no {FILE!r}.')
        with refused(f'{what}: its header, {FILE!r}'):
            text = bytes(_content(archive.getinfo(FILE), archive))
            header = json.loads(text)
            if header['format'] != FORMAT:
                raise StructureError(
                    f'the file has format {header["format"]!r:.20}, of another braintrace; this '
                    f'one reads {FORMAT}.'
                )
            rows = {name: (str(told), crc) for name, (told, crc) in header['leaves'].items()}
        check(header.get('fingerprint'))
        there = {name: told for name, (told, _) in rows.items()}
        avals = {name: _stored(leaf) for name, leaf in leaves.items()}
        texts = {}
        for name in here.keys() & there.keys():
            wanted, found = (TEXT.fullmatch(x[name]) for x in (here, there))
            # it may have another length: who reads it judges
            if name.split('/')[-1] == FINGERPRINT and wanted and found and int(found[1]) <= LARGEST:
                texts[name] = there[name]
                avals[name] = jax.ShapeDtypeStruct((int(found[1]),), np.uint8)
        if wrong := differences(there, {**here, **texts}):
            raise StructureError(
                f'the file holds another structure than `like`:\n{wrong}\nPass a state of the '
                'same cell, rule, options, shapes and precision.'
            )
        numbers = []
        for name, aval in avals.items():
            with refused(f'{what}: {name!r}'):
                info, dtype = archive.getinfo(f'{name}.npy'), np.dtype(aval.dtype)
                if info.CRC != rows[name][1]:
                    raise ValueError('what is there is not what was saved under this name')
                size = math.prod(aval.shape) * dtype.itemsize
                data = _content(info, archive, _start(dtype, aval.shape), size)
                data = data.view(dtype) if dtype.kind != 'b' else data != 0
                numbers.append(data.reshape(aval.shape))
    return numbers, zlib.crc32(text)


def _start(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """How the npy of an array begins; a dtype that NumPy has not itself is written as bytes."""
    if dtype.isbuiltin != 1:
        dtype, shape = np.dtype(np.uint8), (math.prod(shape) * dtype.itemsize,)
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape}, }}"
    text = f'{text:<{-(-(len(text) + 11) // 64) * 64 - 11}}\n'
    return b'\x93NUMPY\x01\x00' + len(text).to_bytes(2, 'little') + text.encode()


def _content(info, archive, start: bytes = b'', size: int | None = None) -> np.ndarray:
    """The bytes of a member, of a header at most; or so many after such a start."""
    size = min(info.file_size, LARGEST) if size is None else size
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError('it is compressed')
    if info.file_size != len(start) + size:
        raise ValueError(f'it has {info.file_size} bytes, where {len(start) + size} are wanted')
    data = np.empty(size, np.uint8)
    with archive.open(info) as entry:
        if entry.read(len(start)) != start:
            raise ValueError('its dtype or shape is not what the header of the file says')
        for at in range(0, size, PIECE):
            if entry.readinto(part := data[at : at + PIECE]) != part.size:
                raise EOFError('it ends too soon')
    return data


class _Bounded:
    """A file of which one read brings a bounded number of bytes, whatever the file says."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def read(self, size: int = -1) -> bytes:
        return self.stream.read(2 * LARGEST if size < 0 else min(size, 2 * LARGEST))


def _path(file: File) -> Path | None:
    """A path, or None for a file that is open."""
    if hasattr(file, 'read') or hasattr(file, 'write'):
        return None
    text = os.fspath(file) if isinstance(file, str | os.PathLike) else None
    if not isinstance(text, str) or '\0' in text:
        raise OptionError(f'file is {file!r}; give a path without NUL, or an open binary file.')
    return Path(text)


def _regular(path: str, flags: int) -> int:
    """Open a regular file; of a pipe nobody waits for the other end."""
    found = os.open(path, flags | getattr(os, 'O_NONBLOCK', 0))
    if stat.S_ISREG(os.fstat(found).st_mode):
        return found
    os.close(found)
    raise OptionError(f'{path} is no regular file, so it can not be read.')


@contextlib.contextmanager
def _written(file: File) -> Iterator[BinaryIO]:
    """The file to write into; a path is replaced when all is on the disk."""
    path = _path(file)
    if path is None:
        yield file  # type: ignore[misc]  # it has no path
        return
    path = Path(os.path.realpath(path))  # of a link its target is replaced
    is_new = not path.exists()
    if not (is_new or path.is_file()):
        raise OptionError(f'{path} is there and no regular file, so it can not be replaced.')
    # the name of the part tells which file it is of, and where that is written
    name, host = path.name[:50], re.sub(r'[^A-Za-z0-9.]', '_', platform.node())[-24:]
    tag = f'{zlib.crc32(os.fsencode(path.name)):08x}'
    part = re.compile(rf'{re.escape(name)}\.(?P<host>.*)-{tag}[0-9a-f]{{8}}\.part')
    _remove_leftovers(path.parent, part, host)
    new = path
    try:
        with contextlib.ExitStack() as stack:
            while new == path or not new.exists():  # it may be taken for a leftover before the lock
                new = path.with_name(f'{name}.{host}-{tag}{secrets.token_hex(4)}.part')
                opener = partial(os.open, mode=0o666 if is_new else 0o600)
                stream = stack.enter_context(open(new, 'xb', opener=opener))
                _lock(stream)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            with contextlib.suppress(OSError):  # not every disk has modes
                shutil.copymode(path, new)
            if fcntl is not None:
                new.replace(path)
        if fcntl is None:
            new.replace(path)
    except OSError as error:
        there = '' if path.parent.is_dir() else f' The folder {path.parent} is not there.'
        raise OSError(
            error.errno,
            f'{error.strerror}: nothing was saved, an earlier file is as it was.{there}',
            str(path),
        ) from error
    finally:
        if new != path:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not every folder can be opened, nor every one flushed
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _remove_leftovers(folder: Path, part: re.Pattern, host: str) -> None:
    """The parts that killed processes left: of this host at once, else after an hour."""
    with contextlib.suppress(OSError):
        for found in filter(None, map(part.fullmatch, os.listdir(folder))):
            left = folder / found[0]
            with contextlib.suppress(OSError), left.open('r+b') as stream:
                gone = _lock(stream, wait=False) and found['host'] == host
                if gone or left.stat().st_mtime < time.time() - STALE:
                    left.unlink()


def _lock(stream: BinaryIO, wait: bool = True) -> bool:
    """Hold a part while it is open; False where the disk or the system knows no such locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # somebody writes into it
        raise
    except OSError:
        return False
    return True


# several processes ------------------------------------------------------------------------------


def _is_here(leaf) -> bool:
    """Whether the devices of this process hold an array, or are to hold it."""
    sharding = getattr(u.get_magnitude(leaf), 'sharding', None)
    return sharding is None or sharding.is_fully_addressable


def _whole(name: str, leaf) -> np.ndarray:
    """The numbers of a leaf, of which every process may hold a part, as JAX has them."""
    numbers = numbers_of(leaf)
    if not _is_here(leaf):
        numbers = multihost_utils.process_allgather(numbers, tiled=True)
    numbers = np.asarray(numbers)
    found = numbers.astype(_stored(leaf).dtype, copy=False)
    if found.dtype.kind in 'iu' and found is not numbers and (found != numbers).any():
        raise StructureError(
            f'the leaf {name!r} holds numbers that {found.dtype} has not. Switch `jax_enable_x64` '
            'on, or save smaller ones.'
        )
    return found


def _in_all(do: Callable, what: str):
    """What ``do`` gives here, if it raises in no process; an error in each, if in one."""
    result = error = None
    try:
        result = do()
    except Exception as found:  # it is raised when all know of it
        error = found
    failed = multihost_utils.process_allgather(np.int32(error is not None))
    if error is not None:
        raise error
    if failed.any():
        raise OSError(f'process {failed.argmax()} could not {what} the file; its error says why.')
    return result


def _check_alike(fingerprint: Mapping | None, others: dict[str, Any]) -> None:
    """Refuse processes with other learners, or with other values of these names."""
    if wrong := _unlike({k: (fingerprint or {}).get(k) for k in PARTS} | others):
        raise StructureError(
            f'{wrong}, so nothing is replaced. Run one program with the same versions in '
            'all, and a file that all see; `learner.fingerprint()` has what differs.'
        )


def _unlike(here: Mapping[str, Any]) -> str:
    """The first process that is not like process 0, and in what; empty where all are alike."""
    digests = [zlib.crc32(json.dumps(x, sort_keys=True).encode()) for x in here.values()]
    found = multihost_utils.process_allgather(np.array(digests, np.uint32))
    for k, wrong in enumerate(found != found[0]):
        if wrong.any():
            names = ', '.join(name for name, other in zip(here, wrong, strict=True) if other)
            return f'process {k} differs from process 0 in: {names}'
    return ''


def _stored(leaf) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the numbers of a leaf in a file."""
    numbers = u.get_magnitude(leaf)
    return jax.eval_shape(jax.random.key_data, numbers) if is_key(leaf) else abstract(numbers)


def _path_of(path, leaf) -> str:
    return path_name(path_key(path))
