"""Arrays of integers moved like the elements of an equation: where each element of its results
comes from.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from ..primitives import NONE
from .equation import Equation


def moved_operands(eqn: Equation) -> tuple[int, ...]:
    """The positions of the operands whose elements an equation moves."""
    moves = eqn.does.moves
    if moves is None:
        return ()
    return tuple(range(len(eqn.ins))) if moves.operands is None else moves.operands


def moved(eqn: Equation, arrays: Sequence, known: Sequence) -> list[np.ndarray] | None:
    """Integer arrays in the places that the elements of the moved operands go to.

    Only ``arrays`` of moved operands are read. ``known``: the constant operands, as indices. An
    element that comes from nowhere is ``NONE``. Returns None where the equation computes, or its
    indices are not known.
    """
    moves = eqn.does.moves
    if moves is None:
        return None
    operands = moved_operands(eqn)
    if moves.by is not None:
        return moves.by([arrays[k] for k in operands], eqn.params)
    indices = (known[k] for k in range(len(eqn.ins)) if k not in operands)
    # an update that computes (`x.at[i].apply(f)`) is a scatter as well, but moves nothing
    if any(i is None for i in indices) or eqn.params.get('update_jaxpr') is not None:
        return None
    return _evaluated(eqn, [arrays[k] for k in operands], operands, known)


def _evaluated(eqn: Equation, arrays, operands, known) -> list[np.ndarray]:
    """Evaluate the equation on consecutive numbers, then look up the element behind each number."""
    flat = np.concatenate([a.reshape(-1) for a in arrays])
    args, start = list(known), 0
    for k, a in zip(operands, arrays, strict=True):
        args[k] = np.arange(start, start + a.size, dtype=np.int32).reshape(a.shape)
        start += a.size
    with jax.ensure_compile_time_eval():
        found = [np.asarray(o) for o in eqn.evaluate(args)]
    # reads out of bounds are filled with a number that no element has
    padded = np.append(flat, NONE)
    return [padded[np.where((o >= 0) & (o < start), o, start)] for o in found]
