"""A state, or any tree of arrays, in one file, and back."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import secrets
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._compiler import abstract, check_arrays, describe_aval, path_key, path_name
from .._errors import StructureError
from .._jax import is_key

File: TypeAlias = str | os.PathLike | BinaryIO

FORMAT = 1
HEADER = '~format'  # no path begins so: `~` is escaped in them
STALE = 3600  # seconds after which nobody writes into a part any more


def save_state(file: File, state: Any) -> None:
    """Write a state, or any tree of arrays, to a path or a binary file, as npz.

    A file at a path is replaced in one go, when the new one is whole: whoever is interrupted finds
    the old one. Whoever is killed leaves a part behind, ``NAME.<hex>.part``, which the first save
    of the same file an hour later removes. Every dtype, typed PRNG keys and physical units are
    kept. Arrays have to be on this process's devices. See :func:`load_state`.

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
    leaves = _leaves(state)[0]
    header = {'format': FORMAT, 'leaves': {name: _describe(leaf) for name, leaf in leaves.items()}}
    entries = {name: _bytes(leaf) for name, leaf in leaves.items()}
    with _written(file) as stream, zipfile.ZipFile(stream, 'w') as archive:
        for name, array in {HEADER: np.array(json.dumps(header)), **entries}.items():
            with archive.open(f'{name}.npy', 'w', force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


def load_state(file: File, like: Any) -> Any:
    """The tree that :func:`save_state` wrote, in the structure of ``like``.

    ``like`` is a tree of the same structure, or its ``jax.eval_shape``; where its leaves have a
    ``NamedSharding``, the arrays get it. Raises :class:`braintrace.StructureError`, with every
    path that is missing, added or of another shape or dtype, and for a file that is none or torn.
    That the cell, its rule and its options are those of the file is not seen where all arrays are
    alike.

    >>> import io, jax, jax.numpy as jnp
    >>> from braintrace.functional import load_state, save_state
    >>> file = io.BytesIO()
    >>> save_state(file, {'w': jnp.arange(3)})
    >>> _ = file.seek(0)
    >>> load_state(file, jax.eval_shape(lambda: {'w': jnp.arange(3)}))['w'].tolist()
    [0, 1, 2]
    """
    leaves, treedef = _leaves(like)
    try:
        with zipfile.ZipFile(file) as archive:
            _check({name: _describe(leaf) for name, leaf in leaves.items()}, _header(archive))
            new = [_leaf(_read(archive, name), leaf) for name, leaf in leaves.items()]
    except (zipfile.BadZipFile, EOFError, KeyError, ValueError) as error:
        if isinstance(error, StructureError):
            raise
        raise StructureError(
            f'{_name(file)} is no file of `save_state`, or it is torn: {error}'
        ) from error
    return jax.tree.unflatten(treedef, new)


def _name(file: File) -> str:
    return str(file) if isinstance(file, str | os.PathLike) else 'the file'


@contextlib.contextmanager
def _written(file: File) -> Iterator[BinaryIO]:
    """The file to write into; a path is replaced when all is on the disk."""
    if not isinstance(file, str | os.PathLike):
        yield file
        return
    path = Path(file)
    new = path.with_name(f'{path.name}.{secrets.token_hex(4)}.part')
    try:
        with new.open('xb') as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    _remove_stale(path)
    if os.name == 'posix':  # elsewhere a folder can not be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _remove_stale(path: Path) -> None:
    """Remove what processes that were killed had written; others may be writing theirs."""
    for part in path.parent.glob(f'{glob.escape(path.name)}.????????.part'):
        with contextlib.suppress(OSError):
            if part.stat().st_mtime < time.time() - STALE:
                part.unlink()


# leaves ---------------------------------------------------------------------------------------


def _is_quantity(value) -> bool:
    return isinstance(value, u.Quantity)


def _leaves(tree) -> tuple[dict[str, Any], Any]:
    """Name -> leaf, in the order of the tree, and its structure; a quantity is one leaf."""
    found, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_quantity)
    leaves = {path_name(path_key(path)): leaf for path, leaf in found}
    if len(leaves) != len(found):
        raise StructureError(
            'two leaves have the same path once keys are written as strings. Give them different '
            'keys.'
        )
    return leaves, treedef


def _describe(leaf) -> str:
    """Dtype (of a key its kind), shape and unit."""
    unit = f' {u.get_unit(leaf)}' if _is_quantity(leaf) else ''
    return describe_aval(abstract(u.get_magnitude(leaf))) + unit


def _bytes(leaf) -> np.ndarray:
    """The numbers of a leaf; those of a dtype that NumPy has not itself as bytes."""
    array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else u.get_magnitude(leaf))
    return array if array.dtype.isbuiltin == 1 else np.frombuffer(array.tobytes(), np.uint8)


def _leaf(numbers: np.ndarray, like):
    """The inverse of :func:`_bytes`, for a leaf like this one."""
    if is_key(like):
        return _placed(jax.random.wrap_key_data(jnp.asarray(numbers), impl=_kind(like)), like)
    aval = abstract(u.get_magnitude(like))
    if np.dtype(aval.dtype).isbuiltin != 1:
        numbers = np.frombuffer(numbers.tobytes(), aval.dtype).reshape(aval.shape)
    if _is_quantity(like):
        return u.Quantity(_placed(jnp.asarray(numbers), like.mantissa), unit=u.get_unit(like))
    return _placed(jnp.asarray(numbers), like)


def _kind(key):
    """The kind of random keys, also of abstract ones, which tell it while they are traced."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), key)
    return found[0]


def _placed(array: jax.Array, like) -> jax.Array:
    sharding = getattr(like, 'sharding', None)
    named = isinstance(sharding, jax.sharding.NamedSharding)
    return jax.device_put(array, sharding) if named else array


def _read(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f'{name}.npy') as entry:
        return np.lib.format.read_array(entry, allow_pickle=False)


def _header(archive: zipfile.ZipFile) -> dict[str, str]:
    """What the leaves of a file are, by name."""
    header = json.loads(str(_read(archive, HEADER)))
    if header['format'] > FORMAT:
        raise StructureError(
            f'the file has format {header["format"]}, of a later braintrace; this one reads up to '
            f'{FORMAT}.'
        )
    return header['leaves']


def _check(here: dict[str, str], saved: dict[str, str]) -> None:
    wrong = [
        f'  {name}: {saved.get(name, "absent")} in the file, {here.get(name, "absent")} in `like`'
        for name in {**here, **saved}
        if saved.get(name) != here.get(name)
    ]
    if wrong:
        raise StructureError(
            'the file holds another structure than `like`:\n' + '\n'.join(wrong) + '\nPass a state '
            'of the same cell, rule, options, shapes and precision.'
        )
