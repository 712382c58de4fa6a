"""The program of one step in files: with arrays that have names, to run where Python is not."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler import path_key, path_name
from .._jax import Tracer
from .._version import __version__
from ..errors import NotSupportedError, OptionError, StructureError
from .saving import as_like, named_leaves, numbers_of, refused

FORMAT = 1  # of the files
PROGRAM, TEXT, ARRAYS, MANIFEST = 'step.jax', 'step.mlir', 'state.npz', 'manifest.json'
LOCATION = re.compile(r' loc\((?:"(?:[^"\\]|\\.)*"|#loc\d*|unknown)\)|^#loc.*\n', re.MULTILINE)
# IREE 3.13 takes the hint and overwrites what it still reads: numbers of a step are wrong then
ALIAS = re.compile(r' \{tf\.aliasing_output = \d+ : i32\}')


@dataclass(frozen=True, eq=False)
class Exported:
    """One step as a ``program`` over named arrays; :func:`export_step` makes it, :meth:`save`
    writes it (:class:`braintrace.errors.OptionError` where a file is in the way),
    :func:`load_exported` reads it.

    - ``manifest``: names, shapes and dtypes of arguments and results, in their order, the bytes
      that are kept between calls, the learner's fingerprint, versions
    - ``arrays``: name -> array, of all that is kept, for the first call

    A result with the name of an argument is that argument of the next call. Random keys are their
    integers.

    >>> import jax.numpy as jnp, braintrace
    >>> from braintrace import functional
    >>> cell = lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p['W']))
    >>> learner, params, x = functional.online(cell), {'W': jnp.ones((2, 4))}, jnp.ones((1, 2))
    >>> state = learner.init(params, jnp.zeros((1, 4)), x)
    >>> step = functional.export_step(learner, None, params, state, x)
    >>> arrays, results = step(step.arrays, x=x)
    >>> list(arrays), results['outputs'].shape
    (['params/W', 'carry'], (1, 4))
    """

    program: jax.export.Exported
    manifest: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def __repr__(self) -> str:
        rows = self.manifest['arguments']
        given = [f'{r["name"]} {r["dtype"]}{r["shape"]}' for r in rows if not r['kept']]
        kept = self.manifest['bytes']['total']
        return f'Exported({self.manifest["kind"]}: {", ".join(given)}; {kept} bytes are kept)'

    @cached_property
    def text(self) -> str:
        """The program as StableHLO, without places in the source and hints of aliases."""
        return ALIAS.sub('', LOCATION.sub('', self.program.mlir_module()))

    @cached_property
    def _run(self) -> Callable:
        return jax.jit(self.program.call)

    def __call__(self, arrays: Mapping[str, Any], **inputs) -> tuple[dict, dict]:
        """``(arrays, **inputs) -> (arrays, results)``: one step by JAX; an input whose name is a
        path is given as ``**{'x/0': x}``. Raises :class:`braintrace.errors.StructureError` for
        another name, shape or dtype.
        """
        given = {**arrays, **inputs}
        rows = {row['name']: row for row in self.manifest['arguments']}
        if wrong := sorted(given.keys() ^ rows.keys()):
            raise StructureError(
                f'the step takes {list(rows)}; missing or unknown: {wrong}. Give the arrays of the '
                'call before, at first `exported.arrays`, and each input by its name.'
            )
        for name, row in rows.items():
            found = f'{jnp.result_type(given[name])}{list(jnp.shape(given[name]))}'
            if found != (wanted := f'{row["dtype"]}{row["shape"]}'):
                raise StructureError(
                    f'{name} is {found}; the program was made for {wanted}, and has no other '
                    'shapes. Convert it, or export the step again with an example like it.'
                )
        found = self._run(*(given[name] for name in rows))
        results = dict(zip((row['name'] for row in self.manifest['results']), found, strict=True))
        return {name: results.pop(name, array) for name, array in arrays.items()}, results

    def save(self, folder) -> None:
        """Write ``step.mlir`` (StableHLO), ``step.jax`` (``jax.export``; it needs flatbuffers, of
        the extra ``edge``), ``state.npz`` (two bytes for a bfloat16), and last ``manifest.json``.
        Raises :class:`braintrace.errors.OptionError` where ``folder`` is a file.
        """
        folder = Path(folder)
        if folder.exists() and not folder.is_dir():
            raise OptionError(f'{folder} is there and no folder. Give the path of a folder.')
        program = self.program.serialize()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)  # files that are torn have none
        (folder / PROGRAM).write_bytes(program)
        (folder / TEXT).write_text(self.text, encoding='utf-8')
        with open(folder / ARRAYS, 'wb') as stream:
            np.savez(stream, **self.arrays)  # type: ignore[arg-type]
        sums = {name: zlib.crc32((folder / name).read_bytes()) for name in (PROGRAM, TEXT, ARRAYS)}
        manifest = json.dumps({**self.manifest, 'crc32': sums}, indent=1)
        (folder / MANIFEST).write_text(manifest, encoding='utf-8')


def load_exported(folder) -> Exported:
    """What :meth:`Exported.save` wrote to ``folder``; the how-to page *Learning without Python*
    has a loader for where this package is not.

    Raises :class:`braintrace.errors.StructureError` for files that are missing, torn, changed or of
    another format.

    >>> import tempfile, jax.numpy as jnp, braintrace
    >>> from braintrace import functional
    >>> cell = lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p['W']))
    >>> learner, params, x = functional.online(cell), {'W': jnp.ones((2, 4))}, jnp.ones((1, 2))
    >>> state, folder = learner.init(params, jnp.zeros((1, 4)), x), tempfile.mkdtemp()
    >>> functional.export_step(learner, None, params, state, x).save(folder)
    >>> functional.load_exported(folder)
    Exported(inference: x float32[1, 2]; 48 bytes are kept)
    """
    folder = Path(folder)
    with refused(f'{folder} holds no whole step of `Exported.save`'):
        manifest = json.loads((folder / MANIFEST).read_text(encoding='utf-8'))
        if manifest['format'] != FORMAT:
            raise ValueError(f'format {manifest["format"]!r}; this braintrace reads {FORMAT}')
        for name, crc in manifest.pop('crc32').items():
            if zlib.crc32((folder / name).read_bytes()) != crc:
                raise ValueError(f'{name} is not what was saved')
        dtypes = {row['name']: jnp.dtype(row['dtype']) for row in manifest['arguments']}
        with np.load(folder / ARRAYS) as kept:
            arrays = {name: kept[name].view(dtypes[name]) for name in kept}
        program = jax.export.deserialize(bytearray((folder / PROGRAM).read_bytes()))
    return Exported(program, manifest, arrays)


def exported(step: Callable, kept: Mapping, given: Mapping, platforms, about) -> Exported:
    """The program of ``step(**kept, **given) -> dict``: parts of the result that ``kept`` has too
    go on to the next call. Both are part -> tree; of ``given`` shapes are enough.
    """
    named = {}
    for part, tree in {**kept, **given}.items():
        named[part] = named_leaves(tree, partial(_name, part))
        for name, leaf in named[part][0].items():
            _check(name, leaf, numbers_wanted=part in kept)
    leaves = {name: leaf for found, _ in named.values() for name, leaf in found.items()}
    results: dict[str, Any] = {}

    def flat(*numbers):
        values = dict(zip(leaves, map(as_like, numbers, leaves.values()), strict=True))
        trees = {
            part: jax.tree.unflatten(treedef, [values[name] for name in found])
            for part, (found, treedef) in named.items()
        }
        for part, tree in step(**trees).items():
            results.update(named_leaves(tree, partial(_name, part))[0])
        return tuple(map(numbers_of, results.values()))

    avals = [jax.eval_shape(numbers_of, leaf) for leaf in leaves.values()]
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]  # no weak types
    goes_on = {part for part in kept if part != 'params' or about['kind'] == 'learning'}
    donated = [k for k, name in enumerate(leaves) if name.split('/')[0] in goes_on]
    # an argument that the step does not read keeps its place
    jitted = jax.jit(flat, keep_unused=True, donate_argnums=donated)
    rows = {name: _row(name, aval) for name, aval in zip(leaves, avals, strict=True)}
    after = [_row(*pair) for pair in zip(results, jax.eval_shape(jitted, *avals))]
    for row in after:
        if row['name'] in rows and row != (old := rows[row['name']]):
            raise StructureError(
                f'before the step {old}, after it {row}: it can not go on from its own result. '
                'Cast it in the cell, or in the optimizer.'
            )
    try:
        program = jax.export.export(jitted, platforms=list(platforms))(*avals)
    except (NotImplementedError, ValueError) as error:
        raise NotSupportedError(
            'the step calls a function of this process, which no other process has: '
            'jax.debug.print, jax.pure_callback or io_callback, which have to leave cell, loss and '
            'optimizer, or a kernel of a sparse op by numba: export it where numba is not '
            f'installed. JAX says: {error!s:.150}'
        ) from error
    first = {
        part: {k: np.asarray(numbers_of(x)) for k, x in named[part][0].items()} for part in kept
    }
    sizes = {part: sum(x.nbytes for x in found.values()) for part, found in first.items()}
    manifest = {
        'format': FORMAT,
        'versions': {'braintrace': __version__, 'jax': jax.__version__},
        'platforms': list(platforms),
        'arguments': [{**row, 'kept': k.split('/')[0] in kept} for k, row in rows.items()],
        'results': after,
        'donated': donated,
        'bytes': {**sizes, 'total': sum(sizes.values())},
        'custom_calls': sorted(set(re.findall(r'custom_call @(\w+)', program.mlir_module()))),
        **about,
    }
    return Exported(program, manifest, {k: x for found in first.values() for k, x in found.items()})


def _name(part: str, path, leaf) -> str:
    return path_name((part, *path_key(path)))


def _row(name: str, aval) -> dict[str, Any]:
    return {'name': name, 'shape': list(aval.shape), 'dtype': str(aval.dtype)}


def _check(name: str, leaf, numbers_wanted: bool) -> None:
    if not hasattr(leaf, 'dtype'):
        raise StructureError(
            f'{name} is {leaf!r:.40}, a {type(leaf).__name__}: a program keeps arrays alone. Make '
            'it an array: `jax.tree.map(jax.numpy.asarray, tree)`.'
        )
    if isinstance(leaf, Tracer):
        raise OptionError(f'{name} is traced: call export outside of jit, vmap and grad.')
    if numbers_wanted and isinstance(leaf, jax.ShapeDtypeStruct):
        raise OptionError(
            f'{name} is a shape, and the first call takes numbers: make the state by '
            '`learner.init` itself, without eval_shape.'
        )
    devices = getattr(getattr(leaf, 'sharding', None), 'device_set', ())
    if len(devices) > 1:
        raise OptionError(
            f'{name} lies on {len(devices)} devices; a program is exported for one. Bring it to '
            'one first: `jax.device_put(tree, jax.devices()[0])`.'
        )
