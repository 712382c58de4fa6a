"""Trees of arrays by name: a state in one file and back, a learner as one flat dict and back."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import platform
import re
import secrets
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u
from jax.experimental import multihost_utils

from .._compiler import (
    DEFAULT,
    abstract,
    check_arrays,
    describe_aval,
    listing,
    path_key,
    path_name,
)
from .._jax import is_key
from .._version import __version__
from .._warnings import tell
from ..errors import OptionError, StructureError

File: TypeAlias = str | os.PathLike | BinaryIO

FORMAT = 2  # 1 had no fingerprint
HEADER = '~format'  # no path begins so: `~` is escaped in them
RULE = 'rule'  # the entry of a learner that holds its rule: the bytes of its text
FINGERPRINT = 'fingerprint'  # the one that holds its fingerprint
STALE = 3600  # seconds after which nobody writes into a part any more
TOKEN = secrets.token_hex(4)  # of this process: a later one may have its number
PART = re.compile(r'\.(?P<host>[^/]*)-(?P<pid>\d+)-(?P<token>[0-9a-f]{8})[0-9a-f]{4}\.part$')


# what a learner is ----------------------------------------------------------------------------


def fingerprint(graph, rule, state) -> dict[str, Any]:
    """What a compiled learner is, as plain text; ``state`` is its state, of shapes."""

    program = graph.program
    params = zip(program.param_names, program.params, strict=True)
    options = {k: v for k, v in vars(graph.policy).items() if v != getattr(DEFAULT, k)}
    trace = rows(state.trace, 'trace')
    return {
        'layout': FORMAT,
        'versions': {'braintrace': __version__, 'jax': jax.__version__},
        'rule': repr(rule),
        # what a function of the user chose stands in the ops and the step
        'options': {k: 'a function' if callable(v) else str(v) for k, v in options.items()},
        'parameters': {
            name: f'{describe_aval(program.avals[v])} {graph.routes[name].kind}'
            for name, v in params
        },
        'carry': rows(state.carry, 'carry'),
        'trace': {name: _told('trace', text) for name, text in trace.items()},
        'ops': {
            r.key: f'{r.primitive.name} to {", ".join(g.name for g in r.groups)}'
            for r in graph.hidden_param_op_relations
        },
        'step': listing(program),
    }


def rows(tree, bare: str) -> dict[str, str]:
    """Path of each leaf (``bare`` where the tree is one) -> dtype and shape."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path_name(path_key(path), bare): describe_aval(leaf) for path, leaf in leaves}


def structure_diff(saved: Mapping, here: Mapping) -> list[str]:
    """A line for each difference of two fingerprints (:meth:`OnlineLearner.fingerprint`); empty
    where a state of the one goes on in the other.

    Versions are left out. The equations of the step count where the versions of JAX are equal,
    since each writes them in its own way; of those that differ the first is shown.

    >>> from braintrace.functional import structure_diff
    >>> structure_diff({'rule': 'es_d_rtrl(0.9)', 'carry': {}}, {'rule': 'd_rtrl()', 'carry': {}})
    ['rule: es_d_rtrl(0.9) when saved, d_rtrl() here']
    """
    jaxes = [one.get('versions', {}).get('jax') for one in (saved, here)]
    left_out = {'versions'} | ({'step'} if jaxes[0] != jaxes[1] else set())
    lines = []

    def compare(path: str, a, b) -> None:
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            for key in {**b, **a}:
                name = f'{path}/{key}' if path else key
                compare(name, a.get(key, 'absent'), b.get(key, 'absent'))
        elif isinstance(a, list) and isinstance(b, list):
            pairs = enumerate(zip_longest(a, b, fillvalue='absent'))
            wrong = [(i, x, y) for i, (x, y) in pairs if x != y]
            for i, x, y in wrong[:1]:
                more = f' (and {len(wrong) - 1} more)' if wrong[1:] else ''
                lines.append(f'{path}/{i}: {x} when saved, {y} here{more}')
        elif a != b:
            lines.append(f'{path}: {a} when saved, {b} here')

    compare('', *({k: v for k, v in x.items() if k not in left_out} for x in (saved, here)))
    return lines


def _check_fingerprint(saved: Mapping | None, here: Mapping, advice: str) -> None:
    """Refuse another learner; of other versions it is told."""
    if saved is None:
        tell(
            'the file does not say which learner it is of, so arrays alone were compared: it was '
            'written without `learner=`, or by an earlier braintrace.'
        )
        return
    if wrong := structure_diff(saved, here):
        raise StructureError('\n  '.join(['this is of another learner:', *wrong]) + f'\n{advice}')
    old, new = saved['versions'], here['versions']
    if old != new:
        pairs = [f'{k} {old.get(k)} there, {new[k]} here' for k in new if old.get(k) != new[k]]
        tell(f'it was saved by other versions: {", ".join(pairs)}. The last digits may differ.')


# a file ---------------------------------------------------------------------------------------


def save_state(file: File, state: Any, learner=None) -> None:
    """Write a state, or any tree of arrays, to a path or a binary file, as npz.

    With ``learner``, compiled, the file says which learner it is of (its ``fingerprint()``). A file
    at a path is replaced in one go, when the new one is whole: whoever is interrupted finds the old
    one. Whoever is killed leaves a part behind, ``NAME.<host>-<pid>-<hex>.part``, which the next
    save of the same file removes. Every dtype, typed PRNG keys and physical units are kept. Where
    several processes hold parts of an array, all of them call it with the same path: the first one
    writes the whole, and all wait for it. See :func:`load_state`.

    Raises :class:`braintrace.errors.OptionError` for a path that is no regular file,
    :class:`braintrace.errors.StructureError` for leaves that are no arrays or have one path,
    :class:`braintrace.errors.NotCompiledError` for a learner that is not compiled, and ``OSError``
    where the file can not be written, in every process.

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
    if learner is not None:
        header['fingerprint'] = learner.fingerprint()
    entries = {HEADER: np.array(json.dumps(header))}
    for name, leaf in leaves.items():
        array = _whole(_numbers(leaf))
        # a dtype that NumPy has not itself is written as bytes
        known = array.dtype.isbuiltin == 1
        entries[name] = array if known else np.frombuffer(array.tobytes(), np.uint8)

    def write():
        with _written(file) as stream, zipfile.ZipFile(stream, 'w') as archive:
            for name, array in entries.items():
                with archive.open(f'{name}.npy', 'w', force_zip64=True) as entry:
                    np.lib.format.write_array(entry, array, allow_pickle=False)

    if all(map(_is_here, leaves.values())):
        write()
        return
    # process 0 writes, the others wait for it; an error of it is that of all
    error = None
    if jax.process_index() == 0:
        try:
            write()
        except (OSError, OptionError) as found:
            error = found
    done = multihost_utils.broadcast_one_to_all(np.int32(error is None))
    if error is not None:
        raise error
    if not done:
        raise OSError('process 0 could not write the file; its error says why.')


def _is_here(leaf) -> bool:
    """Whether the devices of this process hold an array."""
    return getattr(u.get_magnitude(leaf), 'is_fully_addressable', True)


def _whole(array) -> np.ndarray:
    """The numbers of an array, of which every process may hold a part."""
    if _is_here(array):
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def load_state(file: File, like: Any, learner=None) -> Any:
    """The tree that :func:`save_state` wrote, in the structure of ``like``.

    ``like`` is a tree of the same structure, or its ``jax.eval_shape``; where its leaves have a
    ``NamedSharding``, the arrays get it; every process of a mesh reads its parts. Raises
    :class:`braintrace.errors.StructureError`, with every path that is missing, added or of another
    shape or dtype, and for a file that is none or torn. With ``learner``, compiled, also for a file
    of another cell, rule or option, with every difference (:func:`structure_diff`); other versions
    are warned of.

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
            if learner is not None:
                _check_fingerprint(
                    header.get('fingerprint'),
                    learner.fingerprint(),
                    'Make the learner as it was when the file was written. For its parameters '
                    'alone, load the file without `learner=`, into a tree like the one that was '
                    'saved, and take them out of it.',
                )
            # a text may have another length, and an earlier format lacks some: who reads it judges
            texts = {name for name in leaves if name.split('/')[-1] == FINGERPRINT}
            here = {name: _describe(leaf) for name, leaf in leaves.items() if name not in texts}
            there = {name: text for name, text in header['leaves'].items() if name not in texts}
            wrong = _differences(there, here)
            if wrong:
                raise StructureError(
                    f'the file holds another structure than `like`:\n{wrong}\nPass a state of the '
                    'same cell, rule, options, shapes and precision.'
                )
            new = [
                _placed(_read(archive, name), leaf)
                if name in header['leaves']
                else jnp.zeros(0, jnp.uint8)
                for name, leaf in leaves.items()
            ]
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
    # an array that was placed goes there again; a part of it, where others have the rest
    sharding = getattr(u.get_magnitude(like), 'sharding', None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return _like(jnp.asarray(numbers), like)
    if not sharding.is_fully_addressable:
        of_shard = lambda at: np.asarray(numbers[at])  # noqa: E731
        return _like(jax.make_array_from_callback(numbers.shape, sharding, of_shard), like)
    leaf = _like(jnp.asarray(numbers), like)
    return jax.tree.map(lambda x: jax.device_put(x, sharding), leaf)


@contextlib.contextmanager
def _written(file: File) -> Iterator[BinaryIO]:
    """The file to write into; a path is replaced when all is on the disk."""
    if not isinstance(file, str | os.PathLike):
        yield file
        return
    path = Path(os.path.realpath(file))  # of a link its target is replaced
    if path.exists() and not path.is_file():
        raise OptionError(f'{path} is there and no regular file, so it can not be replaced.')
    # the name of the part tells which process writes it, so that leftovers are known
    host = re.sub(r'[^\w.]', '_', platform.node())
    _remove_leftovers(path, host)
    own = f'{host}-{os.getpid()}-{TOKEN}{secrets.token_hex(2)}'
    new = path.with_name(f'{path.name}.{own}.part')
    try:
        with new.open('xb') as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(path)
    except OSError as error:
        there = '' if path.parent.is_dir() else f' The folder {path.parent} is not there.'
        raise OSError(
            error.errno,
            f'{error.strerror}: nothing was saved, an earlier file is as it was.{there}',
            str(path),
        ) from error
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
    if os.name == 'posix':  # elsewhere a folder can not be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _remove_leftovers(path: Path, host: str) -> None:
    """The parts that killed processes left of a file: of this host at once, else after an hour."""
    for part in path.parent.glob(f'{glob.escape(path.name)}.*.part'):
        name = PART.match(part.name[len(path.name) :])
        own = name if name is not None and name['host'] == host else None
        with contextlib.suppress(OSError):
            gone = own is not None and not _may_write(int(own['pid']), own['token'])
            if gone or part.stat().st_mtime < time.time() - STALE:
                part.unlink()


def _may_write(pid: int, token: str) -> bool:
    """Whether a process of this host may still write into a part."""
    if pid == os.getpid():
        return token == TOKEN
    if os.name == 'posix':  # elsewhere this would be a signal
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # of another user
            pass
    return True


# a learner ------------------------------------------------------------------------------------


def save(states: Mapping[tuple[str, ...], Any], rule, of: Mapping) -> dict[str, jax.Array]:
    """Copies of all arrays that ``states`` (path -> state with a ``value``) hold, by name, the rule
    and the fingerprint ``of`` the learner.
    """
    leaves = _leaves({path: state.value for path, state in states.items()}, _entry)[0]
    tree = {name: jnp.array(_numbers(leaf)) for name, leaf in leaves.items()}
    texts = {RULE: repr(rule), FINGERPRINT: json.dumps(of)}
    return {**tree, **{k: jnp.array(np.frombuffer(x.encode(), np.uint8)) for k, x in texts.items()}}


def restore(
    states: Mapping[tuple[str, ...], Any], rule, of: Mapping, tree: Mapping[str, Any]
) -> None:
    """Copy a result of :func:`save` into ``states``; nothing changes where it does not fit."""
    if not isinstance(tree, Mapping):
        raise StructureError(
            f'the tree is {type(tree).__name__}; give the dict that `learner.save()` returned.'
        )
    if HEADER in tree:
        raise StructureError(
            'the tree is a file of `functional.save_state`: read it by '
            '`functional.load_state(file, like)`. `restore` takes what `learner.save()` returned.'
        )

    def describe(x) -> str:
        if not hasattr(x, 'dtype') and isinstance(x, bool | int | float | complex):
            x = jnp.asarray(x)
        return describe_aval(x) if hasattr(x, 'shape') else type(x).__name__

    def text(entry) -> str:
        return bytes(np.asarray(entry, np.uint8)).decode(errors='replace')

    leaves, treedef = _leaves({path: state.value for path, state in states.items()}, _entry)
    saved = text(tree.get(FINGERPRINT, ()))
    wrong = _differences(
        {k: text(x) if k == RULE else describe(x) for k, x in tree.items() if k != FINGERPRINT},
        {RULE: repr(rule), **{k: describe(_numbers(x)) for k, x in leaves.items()}},
    )
    if wrong:
        raise StructureError(
            f'this tree does not fit the learner, which is as it was:\n{wrong}\nRestore into a '
            'learner of the same model, rule, batch size and precision. For another batch size, '
            'make the states so first: `brainstate.nn.init_all_states(model, batch_size=...)` and '
            '`learner.compile_graph(x)`.'
        )
    if saved:  # earlier versions kept none
        _check_fingerprint(
            json.loads(saved),
            of,
            'The learner is as it was. Make its model as it was when saved, or take the parameters '
            f'alone: leave {FINGERPRINT!r} out of the tree.',
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
        kind = f' [{kind_of_key(leaf)}]'
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


def _differences(saved: dict[str, str], here: dict[str, str]) -> str:
    """A line for each name whose leaves are described differently; empty where none is."""
    told = ({name: _told(name, text) for name, text in x.items()} for x in (saved, here))
    return '\n'.join(f'  {line}' for line in structure_diff(*told))


def _told(name: str, text: str) -> str:
    """The description of a leaf; a trace in bfloat16 is kept as its bits."""
    return text.replace('uint16', 'bfloat16') if 'trace' in name.split('/') else text


def _numbers(leaf):
    """A leaf without its unit; a random key as integers."""
    return jax.random.key_data(leaf) if is_key(leaf) else u.get_magnitude(leaf)


def _like(numbers, like):
    """Numbers as the leaf ``like`` holds its own: the inverse of :func:`_numbers`."""
    if is_key(like):
        return jax.random.wrap_key_data(numbers, impl=kind_of_key(like))
    return u.Quantity(numbers, unit=u.get_unit(like)) if _is_quantity(like) else numbers


def kind_of_key(key):
    """The kind of random keys, also of abstract ones, which tell it while they are traced."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), key)
    return found[0]
