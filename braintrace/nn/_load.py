"""Weights of the gated cells of other frameworks, in ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..errors import OptionError, StructureError
from ._cells import GRUCell
from ._linear import Linear
from ._lstm import LSTMCell


class Gate(NamedTuple):
    """One gate: its weights of x and of h, of shape (I, O) and (O, O), and what is added to the
    product of each, None for nothing.
    """

    x: np.ndarray
    h: np.ndarray
    x_bias: np.ndarray | None = None
    h_bias: np.ndarray | None = None

    def weight(self) -> np.ndarray:
        return np.concatenate([self.x, self.h])

    def bias(self) -> np.ndarray:
        return added(self.x_bias, self.x) + added(self.h_bias, self.h)


class Weights(NamedTuple):
    gates: dict[str, Gate]
    reset_after: bool | None = None  # of a GRU, where the weights tell


def load_weights(cell: GRUCell | LSTMCell, weights: Any, layout: str) -> None:
    r"""Set the parameters of ``cell`` to the weights that a GRU or an LSTM of another framework
    has.

    - ``'torch'``: ``state_dict()`` of a cell, or of a ``GRU`` or ``LSTM`` of one layer and
      direction;
    - ``'keras'``: ``layer.get_weights()``, which are kernel, recurrent kernel and bias;
    - ``'flax'``: the parameters of a cell of linen or NNX, a dict.

    In all three an open update gate of a GRU keeps the state, in ours it writes: its weights change
    their sign. The reset gate of PyTorch and Flax comes after the product, and that of Keras where
    the bias has two rows: the cell needs the same ``reset_after``. (Without a bias Keras' weights
    do not tell; then that of the cell counts.) The forget gate of :class:`LSTMCell` adds 1, which
    the loaded bias takes off. Two biases that are added become one. Activations are not loaded; the
    defaults of all four frameworks are the same.

    Parameters
    ----------
    cell : GRUCell or LSTMCell
        The cell, of the same sizes, with biases unless a GRU's weights have none.
    weights : dict or list of arrays
        Arrays of NumPy or what ``numpy.asarray`` takes, as ``tensor.detach().cpu()``.
    layout : str
        ``'torch'``, ``'keras'`` or ``'flax'``.

    Raises
    ------
    OptionError
        ``cell`` is no such cell, or ``layout`` none of these.
    StructureError
        An array is missing, left over or of another shape, or the cell cannot compute what these
        weights mean; nothing is changed.

    Examples
    --------
    >>> import numpy as np
    >>> from braintrace.nn import GRUCell, load_weights
    >>> names = ('weight_ih', 'weight_hh', 'bias_ih', 'bias_hh')
    >>> shapes = ((12, 3), (12, 4), (12,), (12,))
    >>> state_dict = {name: np.ones(shape) for name, shape in zip(names, shapes)}
    >>> cell = GRUCell(3, 4, reset_after=True)
    >>> load_weights(cell, state_dict, 'torch')
    >>> cell.Wz.weight.value['bias']
    Array([-2., -2., -2., -2.], dtype=float32)
    """
    if layout not in LAYOUTS:
        raise OptionError(f'load_weights: layout is {layout!r}; give one of {", ".join(LAYOUTS)}.')
    if isinstance(cell, GRUCell):
        parameters = of_gru(cell, LAYOUTS[layout](weights, 'gru', cell))
    elif isinstance(cell, LSTMCell):
        parameters = of_lstm(cell, LAYOUTS[layout](weights, 'lstm', cell))
    else:
        raise OptionError(
            f'load_weights: cell is a {type(cell).__name__}; give a GRUCell or an LSTMCell.'
        )
    values = {name: fitting(cell, name, *pair) for name, pair in parameters.items()}
    for name, value in values.items():
        getattr(cell, name).weight.value = value


# -- what the cells compute ------------------------------------------------------------------------


def of_gru(cell: GRUCell, weights: Weights) -> dict[str, tuple]:
    """Weight and bias of each map."""
    gates, after = weights
    if after is not None and after != cell.reset_after:
        where = 'after' if after else 'before'
        raise StructureError(
            f'load_weights: these weights are of a GRU whose reset gate comes {where} the product, '
            f'which no weights of GRUCell(reset_after={cell.reset_after}) give. Make the cell with '
            f'reset_after={after}.'
        )
    r, z, n = (gates[name] for name in 'rzn')
    maps = {'Wz': (-z.weight(), -z.bias()), 'Wr': (r.weight(), r.bias())}
    if cell.reset_after:
        of_h = n.h, added(n.h_bias, n.h)
        return maps | {'Wh': (n.x, added(n.x_bias, n.x)), 'Uh': of_h}
    return maps | {'Wh': (n.weight(), n.bias())}


def of_lstm(cell: LSTMCell, weights: Weights) -> dict[str, tuple]:
    """Weight and bias of its map, with the gates in our order."""
    gates = [weights.gates[name] for name in 'igfo']
    biases = [gate.bias() for gate in gates]
    biases[2] = biases[2] - 1  # the cell adds 1
    return {'W': (np.concatenate([g.weight() for g in gates], 1), np.concatenate(biases))}


def added(bias: np.ndarray | None, weight: np.ndarray) -> np.ndarray:
    return np.zeros(weight.shape[-1]) if bias is None else bias


def fitting(cell: GRUCell | LSTMCell, name: str, weight: np.ndarray, bias: np.ndarray) -> dict:
    """The value of a map's parameter, in the dtype that it has."""
    layer: Linear = getattr(cell, name)
    old = layer.weight.value
    if weight.shape != old['weight'].shape:
        raise StructureError(
            f'load_weights: {name} becomes {weight.shape}, but this cell, of {cell.num_in} inputs '
            f'and {cell.num_out} units, has {old["weight"].shape}. Make a cell of the sizes of '
            'these weights.'
        )
    if 'bias' not in old:
        if bias.any():
            raise StructureError(
                f'load_weights: {name} needs a bias, and the cell was made with b_init=None. Leave '
                'that out.'
            )
        return {'weight': jnp.asarray(weight, old['weight'].dtype)}
    value = {'weight': weight, 'bias': bias}
    return {key: jnp.asarray(value[key], old[key].dtype) for key in old}


# -- what the frameworks have ----------------------------------------------------------------------


def of_torch(weights: Any, kind: str, cell: Any) -> Weights:
    """``weight_ih`` has shape (gates O, I): rows r, z, n or i, f, g, o."""
    dict_of(weights, 'torch')
    given = {name.removesuffix('_l0'): value for name, value in weights.items()}
    kernels, biases = ('weight_ih', 'weight_hh'), ('bias_ih', 'bias_hh')
    expect(given, kernels if kernels[0] in given and len(given) == 2 else (*kernels, *biases))
    x, h = (array(name, given[name], 2).T for name in kernels)
    rows = [array(name, given[name], 1) if name in given else None for name in biases]
    return Weights(split('rzn' if kind == 'gru' else 'ifgo', x, h, *rows), True)


def of_keras(weights: Any, kind: str, cell: Any) -> Weights:
    """Columns z, r, n or i, f, g, o; the bias of a GRU may have a row for each product."""
    if not isinstance(weights, list | tuple) or len(weights) not in (2, 3):
        raise StructureError(
            "load_weights: layout='keras' takes the list of `layer.get_weights()`: kernel, "
            f'recurrent kernel and bias; got {described(weights)}.'
        )
    x, h = array('kernel', weights[0], 2), array('recurrent_kernel', weights[1], 2)
    order = 'zrn' if kind == 'gru' else 'ifgo'
    if len(weights) == 2:
        return Weights(split(order, x, h))
    bias = np.asarray(weights[2])
    rows = tuple(bias) if bias.ndim == 2 and len(bias) == 2 and kind == 'gru' else (bias, None)
    return Weights(split(order, x, h, *rows), rows[1] is not None)


def of_flax(weights: Any, kind: str, cell: Any) -> Weights:
    """A layer for each gate and product, or (NNX) one for each product: columns r, z, n or i, f, g,
    o.
    """
    dict_of(weights, 'flax')
    weights = weights.get('params', weights)
    order = 'rzn' if kind == 'gru' else 'ifgo'
    given = {str(name).rstrip('_'): layer for name, layer in weights.items()}
    if 'dense_i' in given:
        expect(given, ('dense_i', 'dense_h'))
        (x, x_bias), (h, h_bias) = (dense(name, given[name]) for name in ('dense_i', 'dense_h'))
        return Weights(split(order, x, h, x_bias, h_bias), True)
    expect(given, [side + name for side in 'ih' for name in order])
    layers = {name: dense(name, layer) for name, layer in given.items()}
    gates = {}
    for name in order:
        (x, x_bias), (h, h_bias) = layers[f'i{name}'], layers[f'h{name}']
        gates[name] = Gate(x, h, x_bias, h_bias)
    return Weights(gates, True)


LAYOUTS: dict[str, Callable[[Any, str, Any], Weights]] = {
    'torch': of_torch,
    'keras': of_keras,
    'flax': of_flax,
}


def split(order: str, x: np.ndarray, h: np.ndarray, *biases: np.ndarray | None) -> dict[str, Gate]:
    """The gates side by side in the last axis."""
    for what, value in zip(('weight of x', 'weight of h', 'bias', 'bias'), (x, h, *biases)):
        if value is not None and value.shape[-1] != len(order) * len(h):
            raise StructureError(
                f'load_weights: the {what} has {value.shape[-1]} numbers for each input, and '
                f'{len(order)} gates of {len(h)} units have {len(order) * len(h)}.'
            )
    parts = [
        [None] * len(order) if value is None else np.split(value, len(order), -1)
        for value in (x, h, *biases)
    ]
    return {name: Gate(*own) for name, *own in zip(order, *parts)}


def dense(name: str, layer: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """Kernel and bias of a layer of Flax."""
    if not isinstance(layer, Mapping) or 'kernel' not in layer:
        raise StructureError(f'load_weights: {name} has no kernel: {described(layer)}.')
    bias = layer.get('bias')
    bias = None if bias is None else array(f'{name}/bias', bias, 1)
    return array(f'{name}/kernel', layer['kernel'], 2), bias


def array(name: str, value: Any, ndim: int) -> np.ndarray:
    found = np.asarray(value)
    if found.ndim != ndim or not jnp.issubdtype(found.dtype, jnp.floating):
        raise StructureError(
            f'load_weights: {name} has shape {found.shape} and dtype {found.dtype}; expected an '
            f'array of floats with {ndim} axes.'
        )
    return found


def dict_of(weights: Any, layout: str) -> None:
    if not isinstance(weights, Mapping):
        raise StructureError(
            f'load_weights: layout={layout!r} takes a dict of arrays; got {described(weights)}.'
        )


def expect(given: Mapping, names: Any) -> None:
    missing, more = [n for n in names if n not in given], [n for n in given if n not in names]
    if missing or more:
        raise StructureError(
            f'load_weights: expected {", ".join(names)}; missing: {", ".join(missing) or "none"}; '
            f'left over: {", ".join(map(str, more)) or "none"}. Give one cell of one layer and '
            'direction.'
        )


def described(value: Any) -> str:
    size = f' of {len(value)}' if isinstance(value, list | tuple | Mapping) else ''
    return f'a {type(value).__name__}{size}'
