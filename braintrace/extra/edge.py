"""The program of one step in files: with arrays that have names, to run where Python is not."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._compiler import abstract, path_key, path_name
from .._jax import Tracer
from .._version import __version__
from ..errors import NotSupportedError, OptionError, StructureError
from .saving import as_like, descriptions, named_leaves, numbers_of, refused

FORMAT = 1  # of the files
PROGRAM, TEXT, ARRAYS, MANIFEST = 'step.jax', 'step.mlir', 'state.npz', 'manifest.json'


@dataclass(frozen=True, eq=False)
class Exported:
    """One step as a ``program`` over named arrays; :func:`export_step` makes it, :meth:`save`
    writes it, :func:`load_exported` reads it.

    - ``text``: the program as StableHLO, for the first platform
    - ``manifest``: names, shapes and dtypes of arguments and results, in their order, the bytes
      that are kept between calls, the learner's fingerprint, versions
    - ``arrays``: name -> array, of all that is kept, for the first call

    A result with the name of an argument is that argument of the next call. Random keys are their
    integers, quantities the numbers in the unit of the example.

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
    text: str
    manifest: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def __repr__(self) -> str:
        rows = self.manifest['arguments']
        given = [f'{r["name"]} {r["dtype"]}{r["shape"]}' for r in rows if not r['kept']]
        kept = self.manifest['bytes']['total']
        return f'Exported({self.manifest["kind"]}: {", ".join(given)}; {kept} bytes are kept)'

    @cached_property
    def _run(self) -> Callable:
        return jax.jit(self.program.call)

    def __call__(self, arrays: Mapping[str, Any], **inputs) -> tuple[dict, dict]:
        """``(arrays, **inputs) -> (arrays, results)``: one step by JAX; an input whose name is a
        path is given as ``**{'x/0': x}``. Raises :class:`braintrace.errors.StructureError` for
        another name, shape or dtype.
        """
        given = {**arrays, **inputs}
        found = descriptions(given, 'the call')
        wanted = {r['name']: f'{r["dtype"]}{r["shape"]}' for r in self.manifest['arguments']}
        if wrong := [
            f'{name} is {found.get(name, "missing")}, and has to be {wanted.get(name, "left out")}'
            for name in {**wanted, **found}
            if found.get(name) != wanted.get(name)
        ]:
            raise StructureError(
                f'the step does not take this: {"; ".join(wrong)}. Give the arrays of the call '
                'before, at first `exported.arrays`, and each input by its name. A program has one '
                'shape: for another one export the step with an example like it. Numbers of 64 '
                "bits need `jax.config.update('jax_enable_x64', True)`."
            )
        results = self._run(given)
        return {name: results.pop(name, array) for name, array in arrays.items()}, results

    def save(self, folder) -> None:
        """Write ``step.mlir`` (StableHLO), ``step.jax`` (``jax.export``; it needs flatbuffers, of
        the extra ``edge``), ``state.npz`` (two bytes for a bfloat16), and last ``manifest.json``;
        raises ``OSError`` where the folder can not be made.
        """
        folder, program = Path(folder), self.program.serialize()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)  # a folder that is half written has none
        (folder / PROGRAM).write_bytes(program)
        (folder / TEXT).write_text(self.text, encoding='utf-8')
        np.savez(folder / ARRAYS, **self.arrays)  # type: ignore[arg-type]
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
        return Exported(program, (folder / TEXT).read_text(encoding='utf-8'), manifest, arrays)


def exported(step: Callable, kept: Mapping, given: Mapping, platforms, about) -> Exported:
    """The program of ``step(**kept, **given) -> dict``: parts of the result that ``kept`` has too
    go on to the next call. Both are part -> tree; of ``given`` shapes are enough.
    """
    named = {part: _named(part, tree) for part, tree in {**kept, **given}.items()}
    avals = {
        name: _aval(name, leaf, part in kept)
        for part, (leaves, _) in named.items()
        for name, leaf in leaves.items()
    }
    texts = []
    for _ in range(2):

        def flat(values):
            trees = {
                part: treedef.unflatten([as_like(values[name], x) for name, x in leaves.items()])
                for part, (leaves, treedef) in named.items()
            }
            found = [_named(part, tree)[0] for part, tree in step(**trees).items()]
            return {name: numbers_of(leaf) for leaves in found for name, leaf in leaves.items()}

        jitted = jax.jit(flat, keep_unused=True)  # what the step does not read keeps its place
        texts.append(jitted.trace(avals).lower(lowering_platforms=tuple(platforms[:1])).as_text())
    if texts[0] != texts[1]:
        raise OptionError(
            'the step is another one each time that it is traced, as by an optimizer or a loss '
            'that counts in Python; the program would repeat one of them for ever. Keep the count '
            'in an array, as the state of optax.scale_by_schedule does.'
        )
    try:
        program = jax.export.export(jitted, platforms=platforms)(avals)
    except (NotImplementedError, ValueError) as error:
        raise NotSupportedError(
            'the step calls a function of this process, which no other process has: '
            'jax.debug.print, jax.pure_callback or io_callback, which have to leave cell, loss and '
            'optimizer, or a kernel of a sparse op by numba: export it where numba is not '
            f'installed. JAX says: {error!s:.150}'
        ) from error
    after = jax.tree.unflatten(program.out_tree, program.out_avals)
    arguments, results = _rows(avals), _rows(after)
    for row in results:
        for old in arguments:
            if row['name'] == old['name'] and row != old:
                raise StructureError(
                    f'before the step {old}, after it {row}: it can not go on from its own result. '
                    'Cast it in the cell, or in the optimizer.'
                )
    arrays = {
        name: np.asarray(numbers_of(leaf), avals[name].dtype)
        for part in kept
        for name, leaf in named[part][0].items()
    }
    sizes = {part: sum(arrays[name].nbytes for name in named[part][0]) for part in kept}
    manifest = {
        'format': FORMAT,
        'versions': {'braintrace': __version__, 'jax': jax.__version__},
        'platforms': list(platforms),
        'arguments': [{**row, 'kept': row['name'] in arrays} for row in arguments],
        'results': results,
        'donated': [k for k, row in enumerate(arguments) if row in results],
        'bytes': {**sizes, 'total': sum(sizes.values())},
        **about,
    }
    return Exported(program, texts[0], manifest, arrays)


def _named(part: str, tree) -> tuple[dict[str, Any], Any]:
    return named_leaves(tree, lambda path, leaf: path_name((part, *path_key(path))))


def _rows(avals: Mapping) -> list[dict[str, Any]]:
    found = sorted(avals.items())  # the order in which JAX takes a dict
    return [{'name': name, 'shape': list(x.shape), 'dtype': str(x.dtype)} for name, x in found]


def _aval(name: str, leaf, numbers_wanted: bool) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the numbers of a leaf."""
    array = u.get_magnitude(leaf)
    if numbers_wanted and isinstance(array, Tracer | jax.ShapeDtypeStruct):
        raise OptionError(
            f'{name} has no numbers, and the first call takes some: call export outside of jit, '
            'vmap and grad, with a state that `learner.init` made itself, without eval_shape.'
        )
    devices = getattr(getattr(array, 'sharding', None), 'device_set', ())
    if len(devices) > 1:
        raise OptionError(
            f'{name} lies on {len(devices)} devices; a program is exported for one. Bring it to '
            'one first: `jax.device_put(tree, jax.devices()[0])`, and of a module that is placed: '
            'restore `jax.device_get(learner.save())` in a learner that is not.'
        )
    with refused(f'{name} is no array of JAX'):
        aval = jax.eval_shape(numbers_of, abstract(array))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)  # no weak type
