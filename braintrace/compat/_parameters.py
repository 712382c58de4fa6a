"""Parameters that were saved by the public package, loaded into the same models here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from ..errors import OptionError, StructureError
from ..nn import FilteredReadout, LSTMCell

GATES = ('Wi', 'Wg', 'Wf', 'Wo')  # in the order of LSTMCell's W


def load_public(module: brainstate.nn.Module, values: Mapping[tuple, Any]) -> None:
    """Set the parameters of ``module`` to those of the same model of the public package.

    ``values`` has the value of each parameter by its path, as that package has them::

        {path: jax.tree.map(np.asarray, state.value)
         for path, state in model.states(brainstate.ParamState).items()}

    Write them to a file there (``pickle``), since both packages have one name. Paths and shapes
    are the same but for

    - ``LSTMCell``: ``Wi``, ``Wg``, ``Wf`` and ``Wo`` become the four blocks of ``W``;
    - a ``FilteredReadout`` in the place of their ``LeakyRateReadout`` takes its array ``W`` as the
      ``weight`` of its map ``W``.

    Hidden states are not loaded. Numbers take the dtype of the module's own parameter.

    Raises
    ------
    OptionError
        ``values`` is no dict.
    StructureError
        A path is missing or left over, or a value has another shape, kind or unit; it names all of
        them, and nothing is changed.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.compat import load_public
    >>> from braintrace.nn import LSTMCell
    >>> gate = {'weight': jnp.ones((7, 4)), 'bias': jnp.ones(4)}
    >>> cell = LSTMCell(3, 4)
    >>> load_public(cell, {(name, 'weight'): gate for name in ('Wi', 'Wg', 'Wf', 'Wo')})
    >>> cell.W.weight.value['weight'].shape
    (7, 16)
    """
    if not isinstance(values, Mapping):
        raise OptionError(
            f'load_public: values is a {type(values).__name__}; give a dict with the value of each '
            'parameter by its path, a tuple.'
        )
    states = module.states(brainstate.ParamState)
    sources = find_sources(module, states)
    known = {path for source in sources.values() for path in source.parts}
    if strings := [path for path in values if isinstance(path, str)]:
        raise StructureError(
            f'load_public: the path {strings[0]!r} is a string; paths are tuples, as '
            f"('cell', 'Wf', 'weight')."
        )
    wrong = [f'{shown(path)} is missing' for path in known if path not in values]
    wrong += [f'{shown(path)} is left over' for path in values if path not in known]
    for source in sources.values():
        for path, like in source.parts.items():
            if path in values and described(values[path]) != described(like):
                found, expected = described(values[path]), described(like)
                wrong.append(f'{shown(path)} is {found}; expected {expected}')
    if wrong:
        raise StructureError(
            'load_public changed nothing, since these parameters do not fit the module '
            f'{type(module).__name__}:\n  '
            + '\n  '.join(sorted(wrong))
            + '\nMake it with the sizes and options of the saved model.'
        )
    for path, source in sources.items():
        new = source.join([values[part] for part in source.parts])
        states[path].value = jax.tree.map(cast, new, states[path].value, is_leaf=is_quantity)


class Source(NamedTuple):
    """What a parameter is made of."""

    parts: dict[tuple, Any]  # public path -> a value of the shape, kind and unit that it must have
    join: Callable[[list], Any]


def find_sources(module: Any, states: Mapping[tuple, Any]) -> dict[tuple, Source]:
    """What each parameter of the module, by its path, is made of."""
    found = {
        path: Source({path: state.value}, lambda new: new[0]) for path, state in states.items()
    }
    for path, node in module.nodes().items():
        own = (*path, 'W', 'weight')
        if isinstance(node, LSTMCell):
            quarter = jax.tree.map(lambda a: jnp.split(a, 4, -1)[0], node.W.weight.value)
            found[own] = Source({(*path, gate, 'weight'): quarter for gate in GATES}, side_by_side)
        elif isinstance(node, FilteredReadout) and 'bias' not in node.W.weight.value:
            weight = node.W.weight.value['weight']
            found[own] = Source({(*path, 'W'): weight}, lambda new: {'weight': new[0]})
    return found


def side_by_side(gates: list) -> Any:
    return jax.tree.map(lambda *blocks: jnp.concatenate(blocks, axis=-1), *gates)


def shown(path: Any) -> str:
    """A path with dots."""
    return '.'.join(map(str, path)) if isinstance(path, tuple) else repr(path)


def is_quantity(value: Any) -> bool:
    return isinstance(value, u.Quantity)


def is_whole(value: Any) -> bool:
    return isinstance(value, u.Quantity | brainstate.State)


def described(value: Any) -> Any:
    """Shape, kind and dimension of each array, as a tree of texts."""

    def one(leaf: Any) -> str:
        if not isinstance(leaf, jax.Array | np.ndarray | np.number | u.Quantity | float | int):
            return f'a {type(leaf).__name__}'
        kind = 'complex ' if jnp.iscomplexobj(u.get_magnitude(leaf)) else ''
        dim = u.get_unit(leaf).dim
        return f'{kind}{jnp.shape(leaf)}' + ('' if dim.is_dimensionless else f' in {dim}')

    return jax.tree.map(one, value, is_leaf=is_whole)


def cast(value: Any, like: Any) -> Any:
    """The number with the dtype, and the scale of the unit, of another."""
    if not is_quantity(like):
        return jnp.asarray(value, like.dtype)
    return u.Quantity(jnp.asarray(value.to_decimal(like.unit), like.dtype), unit=like.unit)
