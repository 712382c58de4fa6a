"""Trees of arrays by name: a state in one file and back, a learner as one flat dict and back."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import secrets
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from ._compiler import abstract, check_arrays, describe_aval, path_key, path_name
from ._errors import StructureError
from ._jax import is_key

File: TypeAlias = str | os.PathLike | BinaryIO

FORMAT = 1
HEADER = '~format'  # no path begins so: `~` is escaped in them
RULE = 'rule'  # the entry of a learner that holds its rule: the bytes of its text
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
    leaves = _leaves(state, _path_of)[0]
    header = {'format': FORMAT, 'leaves': {name: _describe(leaf) for name, leaf in leaves.items()}}
    entries = {HEADER: np.array(json.dumps(header))}
    for name, leaf in leaves.items():
        array = np.asarray(_numbers(leaf))
        # a dtype that NumPy has not itself is written as bytes
        known = array.dtype.isbuiltin == 1
        entries[name] = array if known else np.frombuffer(array.tobytes(), np.uint8)
    with _written(file) as stream, zipfile.ZipFile(stream, 'w') as archive:
        for name, array in entries.items():
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
    leaves, treedef = _leaves(like, _path_of)
    try:
        with zipfile.ZipFile(file) as archive:
            header = json.loads(str(_read(archive, HEADER)))
            if header['format'] > FORMAT:
                raise StructureError(
                    f'the file has format {header["format"]}, of a later braintrace; this one '
                    f'reads up to {FORMAT}.'
                )
            here = {name: _describe(leaf) for name, leaf in leaves.items()}
            wrong = _differences(header['leaves'], here, '  {}: {} in the file, {} in `like`')
            if wrong:
                raise StructureError(
                    f'the file holds another structure than `like`:\n{wrong}\nPass a state of the '
                    'same cell, rule, options, shapes and precision.'
                )
            new = [_placed(_read(archive, name), leaf) for name, leaf in leaves.items()]
    except (zipfile.BadZipFile, EOFError, KeyError, ValueError) as error:
        if isinstance(error, StructureError):
            raise
        name = file if isinstance(file, str | os.PathLike) else 'the file'
        raise StructureError(
            f'{name} is no file of `save_state`, or it is torn: {error}'
        ) from error
    return jax.tree.unflatten(treedef, new)


def _read(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f'{name}.npy') as entry:
        return np.lib.format.read_array(entry, allow_pickle=False)


def _path_of(path, leaf) -> str:
    return path_name(path_key(path))


def _describe(leaf) -> str:
    """Dtype (of a key its kind), shape and unit."""
    unit = f' {u.get_unit(leaf)}' if _is_quantity(leaf) else ''
    return describe_aval(abstract(u.get_magnitude(leaf))) + unit


def _placed(numbers: np.ndarray, like):
    """The numbers of a file as the leaf ``like`` holds its own, and where it holds them."""
    aval = abstract(u.get_magnitude(like))
    if not is_key(like) and np.dtype(aval.dtype).isbuiltin != 1:
        numbers = np.frombuffer(numbers.tobytes(), aval.dtype).reshape(aval.shape)
    sharding = getattr(u.get_magnitude(like), 'sharding', None)
    leaf = _like(jnp.asarray(numbers), like)
    named = isinstance(sharding, jax.sharding.NamedSharding)
    return jax.tree.map(lambda x: jax.device_put(x, sharding), leaf) if named else leaf


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
    # What processes that were killed had written; others may be writing theirs.
    for part in path.parent.glob(f'{glob.escape(path.name)}.????????.part'):
        with contextlib.suppress(OSError):
            if part.stat().st_mtime < time.time() - STALE:
                part.unlink()
    if os.name == 'posix':  # elsewhere a folder can not be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


# a learner ------------------------------------------------------------------------------------


def save(states: Mapping[tuple[str, ...], Any], rule) -> dict[str, jax.Array]:
    """Copies of all arrays that ``states`` (path -> state with a ``value``) hold, by name, and the
    rule.
    """
    leaves = _leaves({path: state.value for path, state in states.items()}, _entry)[0]
    tree = {name: jnp.array(_numbers(leaf)) for name, leaf in leaves.items()}
    return {**tree, RULE: jnp.array(np.frombuffer(repr(rule).encode(), np.uint8))}


def restore(states: Mapping[tuple[str, ...], Any], rule, tree: Mapping[str, Any]) -> None:
    """Copy a result of :func:`save` into ``states``; nothing changes where it does not fit."""
    if not isinstance(tree, Mapping):
        raise StructureError(
            f'the tree is {type(tree).__name__}; give the dict that `learner.save()` returned.'
        )

    def describe(x) -> str:
        if not hasattr(x, 'dtype') and isinstance(x, bool | int | float | complex):
            x = jnp.asarray(x)
        return describe_aval(x) if hasattr(x, 'shape') else type(x).__name__

    def text(entry) -> str:
        return bytes(np.asarray(entry, np.uint8)).decode(errors='replace')

    leaves, treedef = _leaves({path: state.value for path, state in states.items()}, _entry)
    wrong = _differences(
        {k: text(x) if k == RULE else describe(x) for k, x in tree.items()},
        {RULE: repr(rule), **{k: describe(_numbers(x)) for k, x in leaves.items()}},
        '  {}: {} when saved, {} here',
    )
    if wrong:
        raise StructureError(
            f'this tree does not fit the learner, which is as it was:\n{wrong}\nRestore into a '
            'learner of the same model, rule, batch size and precision. For another batch size, '
            'make the states so first: `brainstate.nn.init_all_states(model, batch_size=...)` and '
            '`learner.compile_graph(x)`.'
        )
    new = [_like(jnp.array(tree[name]), leaf) for name, leaf in leaves.items()]
    for path, value in jax.tree.unflatten(treedef, new).items():
        states[path].value = value


def _entry(path, leaf) -> str:
    """The name of an entry; a unit, or the kind of a random key, stands behind it in brackets."""
    kind = ''
    if _is_quantity(leaf):
        kind = f' [{u.get_unit(leaf)}]'
    elif is_key(leaf):
        kind = f' [{_kind(leaf)}]'
    return '/'.join(path_key(path)) + kind


# leaves ---------------------------------------------------------------------------------------


def _is_quantity(value) -> bool:
    return isinstance(value, u.Quantity)


def _leaves(tree, name: Callable) -> tuple[dict[str, Any], Any]:
    """``name(path, leaf)`` -> leaf, in the order of the tree, and its structure; a quantity is one
    leaf.
    """
    found, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_quantity)
    leaves = {name(path, leaf): leaf for path, leaf in found}
    if len(leaves) != len(found):
        raise StructureError(
            'two leaves have the same path once keys are written as strings. Give them different '
            'keys.'
        )
    return leaves, treedef


def _differences(saved: dict[str, str], here: dict[str, str], line: str) -> str:
    """A ``line`` for each name whose leaves are described differently; empty where none is."""
    return '\n'.join(
        line.format(name, saved.get(name, 'absent'), here.get(name, 'absent'))
        for name in {**here, **saved}
        if saved.get(name) != here.get(name)
    )


def _numbers(leaf):
    """A leaf without its unit; a random key as integers."""
    return jax.random.key_data(leaf) if is_key(leaf) else u.get_magnitude(leaf)


def _like(numbers, like):
    """Numbers as the leaf ``like`` holds its own: the inverse of :func:`_numbers`."""
    if is_key(like):
        return jax.random.wrap_key_data(numbers, impl=_kind(like))
    return u.Quantity(numbers, unit=u.get_unit(like)) if _is_quantity(like) else numbers


def _kind(key):
    """The kind of random keys, also of abstract ones, which tell it while they are traced."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), key)
    return found[0]
