"""Labels that go back through an equation, from the cotangents of its results to its operands'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ... import _jax
from .equation import Equation, is_inexact
from .forward import through_linear
from .labels import Labels, has, identity, joined, many, transposed
from .linearity import is_linear
from .moves import moved, moved_operands


def backward(
    eqn: Equation, avals, out_labels: Sequence[Labels], known: Sequence, relevant: Sequence[bool]
) -> list[Labels]:
    """Labels of the operands' cotangents.

    ``known`` holds constant operands; ``relevant`` says which operands to label.
    """
    ins, does = [avals[v].shape for v in eqn.ins], eqn.does
    wanted = [r and is_inexact(avals[v]) for v, r in zip(eqn.ins, relevant, strict=True)]
    if not any(wanted) or not any(map(has, out_labels)) or not does.gradient:
        return [None] * len(ins)
    # element by element: the cotangent of every operand has the labels of the result's
    if does.elementwise:
        return [out_labels[0] if w else None for w in wanted]
    if does.passes:
        return [lab if w else None for lab, w in zip(out_labels, wanted, strict=True)]
    # a reduction hands its one cotangent to all that it read
    if does.reduces:
        return [np.broadcast_to(np.expand_dims(out_labels[0], eqn.params['axes']), ins[0])]
    if does.mixes:
        return [many(s) if w else None for s, w in zip(ins, wanted, strict=True)]
    # movement: an element gets the labels of all places that it went to
    operands = moved_operands(eqn)
    if operands and not any(w for k, w in enumerate(wanted) if k not in operands):
        found = _moved_back(eqn, avals, out_labels, known, operands)
        if found is not None:
            return [found.get(k) if w else None for k, w in enumerate(wanted)]
    return _by_own_rule(eqn, avals, out_labels, known, wanted)


def _moved_back(eqn: Equation, avals, out_labels, known, operands) -> dict[int, np.ndarray] | None:
    """Labels of the moved operands, or None where the indices are not known."""
    shapes = {k: avals[eqn.ins[k]].shape for k in operands}
    arriving = joined(out_labels, [avals[o].shape for o in eqn.outs])
    if eqn.does.moves.back is not None:
        found = eqn.does.moves.back(arriving, eqn.params, list(shapes.values()))
        return dict(zip(operands, found, strict=True))
    sizes = [int(np.prod(s)) for s in shapes.values()]
    starts = np.cumsum([0, *sizes])
    # the elements of all moved operands are numbered one after the other
    numbers: list = [None] * len(eqn.ins)
    for k, start in zip(operands, starts, strict=False):
        numbers[k] = identity(shapes[k]) + start
    sources = moved(eqn, numbers, known)
    if sources is None:
        return None
    labels = np.concatenate([lab.reshape(-1) for lab in arriving])
    if eqn.does.repeats and not labels.size and starts[-1]:
        # repeated no times, as over an empty batch: the answer is as for any other batch
        return {k: many(s) for k, s in shapes.items()}
    source = np.concatenate([s.reshape(-1) for s in sources])
    parts = np.split(transposed(labels, source, (starts[-1],)), starts[1:-1])
    return {k: part.reshape(shapes[k]) for k, part in zip(operands, parts, strict=True)}


def _by_own_rule(eqn: Equation, avals, out_labels, known, wanted) -> list[Labels]:
    """Follow the labels through the equation's own reverse rule."""
    jaxpr, n = _reverse_rule(eqn, avals, wanted)
    if _jax.holds_call(eqn, {'custom_vjp_call'}) and not _is_linear_behind(jaxpr, n):
        return [many(avals[v].shape) if w else None for v, w in zip(eqn.ins, wanted, strict=True)]
    start: list[Labels] = [None] * n
    start += [lab for o, lab in zip(eqn.outs, out_labels, strict=True) if is_inexact(avals[o])]
    got = iter(through_linear(jaxpr, start, dict(zip(jaxpr.invars, known, strict=False))))
    return [next(got) if w else None for w in wanted]


def has_linear_rule(eqn: Equation, avals) -> bool:
    """Whether the equation's reverse rule is known to be linear in the cotangents, as that of a
    user's own need not be.
    """
    return _is_linear_behind(*_reverse_rule(eqn, avals, [is_inexact(avals[v]) for v in eqn.ins]))


def _is_linear_behind(jaxpr, n: int) -> bool:
    """Whether a jaxpr is linear in its inputs behind the first ``n``."""
    return is_linear(jaxpr, [False] * n + [True] * (len(jaxpr.invars) - n))


def _reverse_rule(eqn: Equation, avals, wanted: Sequence[bool]) -> tuple[Any, int]:
    """``[*operands, *cotangents] -> cotangents of the wanted operands`` as a jaxpr, and the number
    of its operands.
    """

    def pull(primals, cotangents):
        def of_wanted(chosen):
            it = iter(chosen)
            outs = eqn.evaluate(
                [next(it) if w else p for w, p in zip(wanted, primals, strict=True)]
            )
            return [o for o in outs if is_inexact(o)]

        chosen = [p for p, w in zip(primals, wanted, strict=True) if w]
        return jax.vjp(of_wanted, chosen)[1](cotangents)[0]

    values = [*eqn.ins, *(o for o in eqn.outs if is_inexact(avals[o]))]
    shapes = (jax.ShapeDtypeStruct(avals[v].shape, avals[v].dtype) for v in values)
    n = len(eqn.ins)
    jaxpr, _ = _jax.trace(lambda *flat: pull(flat[:n], list(flat[n:])), *shapes)
    return jaxpr, n
