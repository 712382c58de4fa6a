"""blox modules (PyPI ``jax-blox``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ..errors import CompileError, OptionError, StructureError
from ._step import check_carry, check_inputs, check_step, missing_carry, missing_framework

CALL = '`(outputs, carry), params = model(params, *inputs, carry)`'


def from_blox(model, params, *inputs, carry=None) -> tuple[Callable, dict, Any]:
    """``(cell, params, carry)`` of a blox module that is called as ``(outputs, carry), params =
    model(params, *inputs, carry)``, as the recurrent modules of blox are.

    ``params``: the initialised ``bx.Params``. ``inputs``: those of one step, with the batch that
    blox asks for. ``carry``: the state before the first step, by default
    ``model.initial_state(params, *inputs)``. Where a step changes parameters that are not trainable
    (counters of random numbers, running means), they are carried too: the carry is then
    ``(carry, {path: value})``.

    The container of blox has no names for leaves, so the params that come back, and gradients, are
    a dict of its own paths and values; :func:`to_blox` makes a container of it. Raises
    :class:`braintrace.errors.OptionError` for other objects,
    :class:`braintrace.errors.CompileError` where the call fails or writes trainable parameters,
    :class:`braintrace.errors.StructureError` where it returns something else.

    >>> import blox as bx, braintrace, jax.numpy as jnp
    >>> graph, x = bx.Graph('net'), jnp.ones((3, 2))
    >>> rng = bx.Rng(graph.child('rng'))
    >>> model = bx.GRU(graph.child('gru'), 4, rng)
    >>> container = rng.seed(bx.Params(), seed=0)
    >>> start, container = model.initial_state(container, x)
    >>> _, container = model(container, x, start)
    >>> cell, params, carry = braintrace.adapters.from_blox(model, container.locked(), x)
    >>> outputs, carry = cell(params, carry, x)
    >>> carry.hidden.shape, all(path[:2] == ('net', 'gru') for path in params)
    ((3, 4), True)
    """
    try:
        import blox as bx
    except ImportError as e:
        raise missing_framework('jax-blox', e) from e
    if not isinstance(model, bx.Module) or not isinstance(params, bx.Params):
        raise OptionError(
            f'model is {type(model).__name__} and params {type(params).__name__}; give a '
            'bx.Module and its bx.Params.'
        )
    check_inputs(inputs)
    container = params.locked()
    if carry is None:
        if not hasattr(model, 'initial_state'):
            raise missing_carry(model, 'it has no method initial_state')
        carry, _ = model.initial_state(container, *inputs)
    values = _values(container)
    trainable = set(container.split()[0].keys())
    changed = _changed(model, container, values, carry, inputs)
    if spoiled := sorted('/'.join(path) for path in trainable & changed):
        raise CompileError(
            f'the step writes the parameters {spoiled}, which are trainable, but parameters are '
            'constant in a step. Make what changes there not trainable.'
        )

    def cell(params, carry, *inputs):
        carry, moving = carry if changed else (carry, {})
        before = to_blox({**params, **moving}, container)
        (outputs, carry), after = _checked(model, model(before, *inputs, carry))
        moving = {path: value for path, value in _values(after).items() if path in changed}
        return outputs, (carry, moving) if changed else carry

    params = {path: values[path] for path in values if path in trainable}
    moving = {path: values[path] for path in values if path in changed}
    return cell, params, (carry, moving) if changed else carry


def to_blox(values, params):
    """The container ``params`` with other values: a ``bx.Params``, locked or not as it was.

    ``values``: a dict path -> value, as :func:`from_blox` returns and training changes it; paths
    that it does not hold keep their values. Raises :class:`braintrace.errors.StructureError` for a
    path that the container does not have.

    >>> import blox as bx, braintrace, jax.numpy as jnp
    >>> graph = bx.Graph('net')
    >>> rng = bx.Rng(graph.child('rng'))
    >>> model = bx.Linear(graph.child('out'), 2, rng)
    >>> _, container = model(rng.seed(bx.Params(), seed=0), jnp.ones((1, 3)))
    >>> new = braintrace.adapters.to_blox({('net', 'out', 'bias'): jnp.ones(2)}, container)
    >>> model(new, jnp.zeros((1, 3)))[0].tolist()
    [[1.0, 1.0]]
    """
    old = _values(params)
    if strange := sorted('/'.join(map(str, path)) for path in set(values) - set(old)):
        raise StructureError(f'the container has no parameters {strange}; it has {sorted(old)}.')
    # Both are dicts by path, whose leaves JAX sorts alike.
    leaves = jax.tree.leaves({**old, **values})
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def _values(container) -> dict:
    """Path -> value."""
    return {path: param.value for path, param in container.items()}


def _changed(model, container, values: dict, carry, inputs: tuple) -> set:
    """The paths of the parameters that a step writes."""
    changed: set = set()

    def step(values, carry, inputs):
        (_, new), after = _checked(model, model(to_blox(values, container), *inputs, carry))
        check_carry(model, CALL, carry, new)
        new = {path: jax.tree.leaves(value) for path, value in _values(after).items()}
        for path, value in values.items():
            if any(a is not b for a, b in zip(jax.tree.leaves(value), new[path])):
                changed.add(path)

    check_step(model, CALL, step, values, carry, inputs)
    return changed


def _checked(model, returned):
    if isinstance(returned, tuple) and len(returned) == 2:
        if isinstance(returned[0], tuple) and len(returned[0]) == 2:
            return returned
    raise StructureError(
        f'{type(model).__name__} returned {jax.tree.structure(returned)}. One step is the call '
        f'{CALL}.'
    )
