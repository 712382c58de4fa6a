"""Flax NNX modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ..errors import CompileError, OptionError, StructureError
from ._step import check_carry, check_inputs, check_step, missing_carry, missing_framework

CALL = '`carry, outputs = model(carry, *inputs)`'


def from_nnx(model, *inputs, carry=None) -> tuple[Callable, Any, Any]:
    """``(cell, params, carry)`` of a Flax NNX module that is called as ``carry, outputs =
    model(carry, *inputs)``, as the cells of ``flax.nnx`` are; of an ``nnx.RNN`` its cell is taken.

    ``inputs``: those of one step, arrays or their ``jax.ShapeDtypeStruct``, with or without a
    batch. ``carry``: the state before the first step, by default
    ``model.initialize_carry(inputs[0].shape, nnx.Rngs(0))``, of an ``nnx.RNN`` with its own
    ``rngs``. Where a step changes variables of the model (counters of dropout, running means), they
    are carried too: the carry is then ``(carry, variables)``.

    How an ``nnx.RNN`` lays out and unrolls a sequence is no matter of a step. Where it reads from
    the end, gives each step weights of its own, or all steps the same random numbers, it is no loop
    over its cell and is refused, as ``nnx.Bidirectional`` is.

    ``params`` is the ``nnx.State`` of the ``nnx.Param``, and so are gradients: ``nnx.update(model,
    params)`` puts them back. Raises :class:`braintrace.errors.OptionError` for another object, such
    a loop, or an unknown carry, :class:`braintrace.errors.CompileError` where the call fails or
    writes parameters, :class:`braintrace.errors.StructureError` where it returns no pair.

    >>> import braintrace, jax.numpy as jnp
    >>> from flax import nnx
    >>> model = nnx.GRUCell(2, 4, rngs=nnx.Rngs(0))
    >>> cell, params, carry = braintrace.adapters.from_nnx(model, jnp.ones((3, 2)))
    >>> outputs, carry = cell(params, carry, jnp.ones((3, 2)))
    >>> nnx.update(model, params)
    >>> carry.shape, params['dense_h']['kernel'].shape
    ((3, 4), (4, 12))
    """
    try:
        from flax import nnx
    except ImportError as e:
        raise missing_framework('flax', e) from e
    if not isinstance(model, nnx.Module) or not callable(model):
        raise OptionError(f'model is {type(model).__name__}; give a Flax NNX module with __call__.')
    check_inputs(inputs)
    model, rngs = _one_step(nnx, model)
    if carry is None:
        if not hasattr(model, 'initialize_carry'):
            raise missing_carry(model, 'it has no method initialize_carry')
        carry = model.initialize_carry(jax.tree.leaves(inputs)[0].shape, rngs)

    def in_changed(path, variable):
        return path in changed

    changed = _changed(nnx, model, carry, inputs)
    graph, *states = nnx.split(model, nnx.Param, in_changed, ...)
    params, moving, constant = _copied(states)

    def cell(params, carry, *inputs):
        carry, variables = carry if changed else (carry, moving)
        running = nnx.merge(graph, *_copied((params, variables, constant)))
        carry, outputs = _as_pair(running, running(carry, *inputs), carry)
        _, _, variables, _ = nnx.split(running, nnx.Param, in_changed, ...)
        return outputs, (carry, variables) if changed else carry

    return cell, params, (carry, moving) if changed else carry


def _one_step(nnx, model) -> tuple:
    """The cell of an ``nnx.RNN``, another module itself, and the keys of its first carry."""
    if isinstance(model, nnx.Bidirectional):
        raise OptionError(
            'nnx.Bidirectional reads a sequence from its end too, and a learner that goes on with '
            'each step has not seen the end. Adapt a cell that reads forward: '
            'model.forward_rnn.cell.'
        )
    if not isinstance(model, nnx.RNN):
        return model, nnx.Rngs(0)
    why = None
    if model.reverse:
        why = 'reverse=True: it reads a sequence from its end'
    elif model.broadcast_rngs not in (None, False, ()):
        why = 'broadcast_rngs: all its steps draw the same random numbers'
    elif any(  # parameters are constant in any case
        axis is not nnx.Carry and (which, axis) != (nnx.Param, None)
        for which, axis in model.state_axes.items()
    ):
        why = 'state_axes by which variables are not handed from step to step'
    elif type(model).__call__ is not nnx.RNN.__call__:
        why = 'a __call__ of its own'
    if why is not None:
        raise OptionError(
            f'{type(model).__name__} has {why}. Steps of its cell, one after another, do something '
            'else; if you want these, give model.cell.'
        )
    return model.cell, nnx.Rngs(0) if model.rngs is None else nnx.clone(model.rngs)


def _changed(nnx, model, carry, inputs: tuple) -> set:
    """The paths of the variables that a step writes."""
    graph, *states = nnx.split(model, nnx.Param, ...)
    changed: set = set()

    def step(states, carry, inputs):
        running = nnx.merge(graph, *states)
        before = [_values(nnx, state) for state in nnx.split(running, nnx.Param, ...)[1:]]
        _as_pair(running, running(carry, *inputs), carry)
        after = [_values(nnx, state) for state in nnx.split(running, nnx.Param, ...)[1:]]
        written = [
            {path for path in old if any(a is not b for a, b in zip(old[path], new[path]))}
            for old, new in zip(before, after)
        ]
        if written[0]:
            names = sorted('/'.join(map(str, path)) for path in written[0])
            raise CompileError(
                f'the step writes the parameters {names}, but parameters are constant in a step. '
                'Keep what changes there in another kind of nnx.Variable.'
            )
        changed.update(written[1])

    check_step(model, CALL, step, states, carry, inputs)
    return changed


def _copied(states):
    """The same arrays in variables of their own: a module writes into those that it is made of."""
    return jax.tree.map(lambda array: array, states)


def _values(nnx, state) -> dict:
    """Path -> arrays."""
    return {path: jax.tree.leaves(variable) for path, variable in nnx.to_flat_state(state)}


def _as_pair(model, returned, carry):
    if isinstance(returned, tuple) and len(returned) == 2:
        check_carry(model, CALL, carry, returned[0])
        return returned
    raise StructureError(
        f'{type(model).__name__} returned {jax.tree.structure(returned)}. One step is the call '
        f'{CALL}: return a pair, the new carry first.'
    )
