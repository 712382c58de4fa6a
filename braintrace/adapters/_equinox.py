"""Equinox modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import OptionError, StructureError
from ._step import check_carry, check_inputs, check_step, missing_carry, missing_framework

CALL = (
    '`(outputs, carry) = model(*inputs, carry)` or `carry = model(*inputs, carry)`, of one sample '
    'unless batched=True'
)


def from_equinox(model, *inputs, carry=None, batched: bool = False) -> tuple[Callable, Any, Any]:
    """``(cell, params, carry)`` of an Equinox module that is called as ``model(*inputs, carry)``.

    The call returns ``(outputs, carry)``, or the new carry alone, which then is the output too, as
    in ``eqx.nn.GRUCell`` and ``LSTMCell``. ``inputs``: those of one step, arrays or their
    ``jax.ShapeDtypeStruct``. ``carry``: the state before the first step, by default zeros for these
    two cells. ``batched=True``: axis 0 of every input and of the carry is the batch, over which the
    model, written for one sample, is mapped.

    ``params`` is ``eqx.filter(model, eqx.is_inexact_array)``, and so are gradients:
    ``eqx.apply_updates(model, updates)`` and ``eqx.combine(params, model)`` lead back to a model.
    Raises :class:`braintrace.errors.OptionError` for another object or an unknown carry,
    :class:`braintrace.errors.CompileError` where the call fails,
    :class:`braintrace.errors.StructureError` where it returns no such carry.

    >>> import braintrace, equinox as eqx, jax, jax.numpy as jnp
    >>> model = eqx.nn.LSTMCell(2, 4, key=jax.random.key(0))
    >>> cell, params, carry = braintrace.adapters.from_equinox(
    ...     model, jnp.ones((3, 2)), batched=True
    ... )
    >>> outputs, carry = cell(params, carry, jnp.ones((3, 2)))
    >>> [h.shape for h in carry], params.weight_ih.shape
    ([(3, 4), (3, 4)], (16, 2))
    """
    try:
        import equinox as eqx
    except ImportError as e:
        raise missing_framework('equinox', e) from e
    if not isinstance(model, eqx.Module) or not callable(model):
        raise OptionError(f'model is {type(model).__name__}; give an Equinox module with __call__.')
    check_inputs(inputs)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    if carry is None:
        batch = jax.tree.leaves(inputs)[0].shape[:1] if batched else ()
        carry = _zeros(eqx, model, batch)

    def cell(params, carry, *inputs):
        def sample(carry, *inputs):
            return _as_pair(model, eqx.combine(params, static)(*inputs, carry), carry)

        return (jax.vmap(sample) if batched else sample)(carry, *inputs)

    check_step(model, CALL, cell, params, carry, *inputs)
    return cell, params, carry


def _zeros(eqx, model, batch: tuple):
    """The carry of a stock cell, of the dtype of its weights."""
    states = {eqx.nn.GRUCell: 1, eqx.nn.LSTMCell: 2}.get(type(model))
    if states is None:
        raise missing_carry(model, 'of Equinox only GRUCell and LSTMCell do')
    h = jnp.zeros((*batch, model.hidden_size), model.weight_hh.dtype)
    return h if states == 1 else (h, jnp.zeros_like(h))


def _as_pair(model, returned, carry):
    """``(outputs, carry)`` of what a call returned; it cannot be both, since no tree holds
    itself.
    """
    like = jax.tree.structure(carry)
    if jax.tree.structure(returned) == like:
        check_carry(model, CALL, carry, returned)
        return returned, returned
    if isinstance(returned, tuple) and len(returned) == 2:
        if jax.tree.structure(returned[1]) == like:
            check_carry(model, CALL, carry, returned[1])
            return returned
    raise StructureError(
        f'{type(model).__name__} returned {jax.tree.structure(returned)} for a carry {like}. '
        f'One step is the call {CALL}, and its carry keeps its tree.'
    )
