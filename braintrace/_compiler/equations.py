"""One equation of a step: what it is, how it moves elements, which positions meet in it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, overload

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._etrace_op import is_etp_primitive
from . import primitives
from .primitives import NONE

# an equation --------------------------------------------------------------------------------------
#
# An equation of the flat program, and the regions (loops, checkpoints) that equations are in.


class Remat:
    """A region that is recomputed in the backward pass, as ``jax.checkpoint`` asks."""

    def __init__(self, policy, prevent_cse):
        self.policy, self.prevent_cse = policy, prevent_cse


@dataclass(frozen=True, eq=False)
class Loop:
    """A region that runs ``length`` times.

    Two marker equations enclose it, slot by slot: ``BEGIN`` maps (initial carry, sequences) to
    (carry, slices), ``END`` maps (new carry, slices) to (last carry, sequences).
    """

    length: int
    reverse: bool
    unroll: Any
    num_carry: int
    where: str
    origin: Any


Region = Remat | Loop


# the primitives of the two marker equations, which no jaxpr has
BEGIN, END = _jax.Primitive('loop_begin'), _jax.Primitive('loop_end')


@dataclass(frozen=True)
class Equation:
    """One primitive application; ``ins`` and ``outs`` are value numbers.

    ``scope``: the regions around it, outermost first. ``loop``: set on the two markers of a loop.
    ``conditional``: it is in a branch. ``origin``: the jaxpr's equation. ``marked``: the name
    of the primitive in whose place this op was put automatically; ``unmarked``: why no op was put
    here, where a function of parameters to mark meets a value that changes. ``extra``: it makes a
    path of the trace beside those of the step; its value changes nothing, and in a pass in which
    nothing is cut, where it would count a path twice, it reads constants.
    """

    primitive: Any
    params: dict
    ctx: Any
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    where: str
    effects: bool = False
    scope: tuple[Region, ...] = ()
    loop: Loop | None = None
    conditional: bool = False
    origin: Any = None
    marked: str = ''
    unmarked: str = ''
    extra: bool = False

    @property
    def does(self) -> primitives.Properties:
        return primitives.TABLE[self.primitive.name]

    def evaluate(self, args: Sequence) -> list:
        return _jax.bind(self, *args)

    def holds_op(self) -> bool:
        return any(map(holds_op, _jax.sub_jaxprs(self.params)))

    @property
    def repeats(self) -> tuple[int, ...]:
        return tuple(r.length for r in self.scope if isinstance(r, Loop))


def holds_op(jaxpr) -> bool:
    """Whether an ETP op is in a jaxpr, at any depth."""
    jaxpr = getattr(jaxpr, 'jaxpr', jaxpr)
    return any(
        is_etp_primitive(e.primitive) or any(map(holds_op, _jax.sub_jaxprs(e.params)))
        for e in jaxpr.eqns
    )


def is_inexact(aval) -> bool:
    """Whether gradients exist for a value's dtype."""
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def is_complex(aval) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.complexfloating)


# what is linear -----------------------------------------------------------------------------------
#
# Whether a jaxpr is linear in some of its inputs, by what the table knows of each equation.


class Bent(Exception):
    """An equation is not linear, or not known to be."""


# what a value is, if the flagged inputs are changed: a number of its own, zero, linear in them
CONSTANT, ZERO, LINEAR = range(3)


def is_linear(jaxpr, consts: Sequence, flags: Sequence[bool]) -> bool:
    """Whether the results are linear in the flagged inputs together: zero where these are."""
    try:
        kinds = _through(jaxpr, consts, [LINEAR if flag else CONSTANT for flag in flags])
    except Bent:
        return False
    return not any(
        kind == CONSTANT and is_inexact(v.aval)
        for kind, v in zip(kinds, jaxpr.outvars, strict=True)
    )


def _through(jaxpr, consts: Sequence, kinds: Sequence[int]) -> list[int]:
    """The kinds of the results."""
    of_literal = lambda atom: _of_number(_jax.literal(atom))
    return _jax.walk(jaxpr, map(_of_number, consts), kinds, _equation, of_literal)


def _of_number(x) -> int:
    """The kind of a constant; a zero of any type makes a zero of a float."""
    known = not isinstance(x, _jax.Tracer) and not _jax.is_key(x)
    return ZERO if known and not np.any(x) else CONSTANT


def _equation(eqn, ins: list[int]) -> list[int]:
    """The kinds of an equation's results; calls, loops and branches are entered."""
    call, scan, branches = _jax.call_body(eqn), _jax.scan_parts(eqn), _jax.cond_branches(eqn)
    avals = [v.aval for v in eqn.outvars]
    if eqn.primitive.name in _jax.CUSTOM_CALLS:
        call = _jax.closed_jaxpr(eqn.params['call_jaxpr'])
    if call is not None:
        return _through(*call, ins)
    if scan is not None:
        # followed until what its carry is stays
        consts, carry, xs = scan.split(ins)
        while True:
            outs = _through(scan.body, scan.consts, [*consts, *carry, *xs])
            new = [_either(*kinds) for kinds in zip(avals, carry, outs)]
            if new == carry:
                return [*carry, *outs[scan.num_carry :]]
            carry = new
    if branches is not None and ins[0] != LINEAR:
        each = [_through(*branch, ins[1:]) for branch in branches]
        return [_either(*kinds) for kinds in zip(avals, *each, strict=True)]
    if primitives.TABLE[eqn.primitive.name].passes:
        return ins
    # an equation without a body
    varying, zero = [k == LINEAR for k in ins], [k == ZERO for k in ins]
    smooth = any(map(is_inexact, avals))
    if not any(varying):
        stays_zero = any(zero) and _straight(eqn, zero, zero)
        return [ZERO if stays_zero else CONSTANT] * len(avals)
    if _asks_if_finite(eqn):
        return [CONSTANT] * len(avals)
    # a choice between numbers, made of what was flagged, is not linear
    chooses = any(k and not is_inexact(v.aval) for v, k in zip(eqn.invars, varying, strict=True))
    if smooth and (chooses or not _straight(eqn, varying, zero)):
        raise Bent
    return [LINEAR] * len(avals)


def _asks_if_finite(eqn) -> bool:
    """Whether an equation asks if a number is finite, or one at all: between finite numbers that
    decides nothing.
    """
    name, ins = eqn.primitive.name, eqn.invars
    return name == 'is_finite' or name == 'ne' and ins[0] is ins[1]


def _either(aval, *kinds: int) -> int:
    """What a value is that is one of several."""
    if LINEAR in kinds and CONSTANT in kinds and is_inexact(aval):
        raise Bent
    return LINEAR if LINEAR in kinds else min(kinds)


def _straight(eqn, varying: list[bool], zero: list[bool]) -> bool:
    """Whether the results are linear in the varying operands, and nothing is added to these but
    zeros.
    """

    def together(varying: list[bool]) -> bool:
        does = primitives.TABLE[eqn.primitive.name]
        if does.linear is not None:
            return does.linear(varying)
        operands = None if does.moves is None else does.moves.operands
        moved = range(len(ins)) if operands is None else operands
        only_moved = all(k in moved for k, flag in enumerate(varying) if flag)
        return does.retypes or does.moves is not None and only_moved

    # integers that are no numbers of the result choose or count
    ins, own = eqn.invars, eqn.outvars[0].aval.dtype
    others = [
        k
        for k, v in enumerate(ins)
        if (is_inexact(v.aval) or v.aval.dtype == own) and not varying[k]
    ]
    # a function that is linear in one more operand as well is a sum of both
    added = (k for k in others if not zero[k])
    return together(varying) and not any(
        together([*varying[:k], True, *varying[k + 1 :]]) for k in added
    )


# labels of elements -------------------------------------------------------------------------------
#
# Which positions the elements of a value have to do with, as labels that travel through equations.
#
# A label array has an integer for each element of a value: the position of some source (a hidden
# state, or the result of an op) that the element depends on, or that depends on it.
#
# - ``NONE``: no position;
# - a number from 0: this one position, counted flat;
# - ``MANY``: several positions, or an unknown number of them.
#
# ``None`` in place of an array says ``NONE`` for all elements. :func:`backward` takes labels from
# the cotangents of an equation's results to those of its operands, :func:`forward` from operands to
# results. Both are one pattern of sparsity: that of the equation's Jacobian, with one entry in a
# row.


MANY = -2
Labels = np.ndarray | None
BIG = np.iinfo(np.int64).max

# ---- the algebra of labels ----


def identity(shape) -> np.ndarray:
    """Each element has its own flat position."""
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)


def nothing(shape) -> np.ndarray:
    return np.full(shape, NONE, np.int64)


def many(shape) -> np.ndarray:
    return np.full(shape, MANY, np.int64)


def has(labels: Labels) -> TypeGuard[np.ndarray]:
    """Whether any element has a position. An array without elements counts, so that relations are
    found.
    """
    return labels is not None and (not labels.size or bool((labels != NONE).any()))


def meet(labels: Labels) -> bool:
    return labels is not None and bool((labels == MANY).any())


@overload
def merge(a: Labels, b: np.ndarray) -> np.ndarray: ...
@overload
def merge(a: Labels, b: Labels) -> Labels: ...
def merge(a: Labels, b: Labels) -> Labels:
    """Labels of a sum: different ones become ``MANY``."""
    if a is None or b is None or a is b:
        return b if a is None else a
    return np.where(a == NONE, b, np.where((b == NONE) | (a == b), a, MANY))


def disagree(a: Labels, b: Labels) -> bool:
    """Whether some element has different positions in two arrays, or several in one of them."""
    return meet(merge(a, b))


def in_place(labels: np.ndarray) -> bool:
    """Whether every element has its own position, or none."""
    return not disagree(labels, identity(labels.shape))


def merge_axes(labels: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Merge along axes; an axis of size 1 is only a reshape."""
    axes = tuple(axes)
    low = np.where(labels == NONE, BIG, labels).min(axis=axes, initial=BIG)
    high = labels.max(axis=axes, initial=NONE)
    several = (labels == MANY).any(axis=axes) | ((high != NONE) & (low != high))
    return np.where(several, MANY, high)


def transposed(labels: np.ndarray, source: np.ndarray, shape) -> np.ndarray:
    """The transpose of moving elements: each source merges the labels of the elements that came
    from it.

    ``source`` has the flat source of each element, or ``NONE``.
    """
    size = int(np.prod(shape))
    flat, where = labels.reshape(-1), source.reshape(-1)
    used = (where != NONE) & (flat != NONE)
    flat, where = flat[used], where[used]
    found = np.full(size, NONE, np.int64)
    if np.bincount(where, minlength=1).max() <= 1:  # each source went to one element at most
        found[where] = flat
        return found.reshape(shape)
    # The positions of a source are one where the lowest is the highest. MANY counts as infinite for
    # the lowest, so that it does not pass for a position, and is noted apart.
    low, several = np.full(size, BIG), np.zeros(size, bool)
    np.minimum.at(low, where, np.where(flat == MANY, BIG, flat))
    np.maximum.at(found, where, flat)
    np.logical_or.at(several, where, flat == MANY)
    return np.where(several | ((found != NONE) & (low != found)), MANY, found).reshape(shape)


def joined(labels: Sequence[Labels], shapes: Sequence) -> list[np.ndarray]:
    return [nothing(s) if lab is None else lab for lab, s in zip(labels, shapes, strict=True)]


# ---- movement: where each element of an equation's results comes from ----


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
    moves, operands = eqn.does.moves, moved_operands(eqn)
    if moves is None:
        return None
    if moves.by is not None:
        return moves.by([arrays[k] for k in operands], eqn.params)
    indices = (known[k] for k in range(len(eqn.ins)) if k not in operands)
    # an update that computes (`x.at[i].apply(f)`) is a scatter as well, but moves nothing
    if any(i is None for i in indices) or eqn.params.get('update_jaxpr') is not None:
        return None
    # evaluate the equation on consecutive numbers, then look up the element behind each number
    args, start = list(known), 0
    for k in operands:
        size = arrays[k].size
        args[k] = np.arange(start, start + size, dtype=np.int32).reshape(arrays[k].shape)
        start += size
    with jax.ensure_compile_time_eval():
        found = [np.asarray(o) for o in eqn.evaluate(args)]
    # reads out of bounds are filled with a number that no element has
    padded = np.concatenate([*(arrays[k].reshape(-1) for k in operands), [NONE]])
    return [padded[np.where((o >= 0) & (o < start), o, start)] for o in found]


def sources(eqn: Equation, avals, known: Sequence) -> tuple[list[np.ndarray], np.ndarray] | None:
    """For each element of the results the number of the element that was moved there, and the first
    number of each moved operand: their elements are numbered one operand after the other.
    """
    operands = moved_operands(eqn)
    shapes = [avals[eqn.ins[k]].shape for k in operands]
    starts = np.cumsum([0, *(int(np.prod(s)) for s in shapes)])
    numbers: list = [None] * len(eqn.ins)
    for k, shape, start in zip(operands, shapes, starts, strict=False):
        numbers[k] = identity(shape) + start
    found = moved(eqn, numbers, known)
    return None if found is None else ([s.reshape(-1) for s in found], starts)


# ---- backward: from the cotangents of an equation's results to its operands' ----


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
    if does.reduces and has(out_labels[0]):
        return [np.broadcast_to(np.expand_dims(out_labels[0], eqn.params['axes']), ins[0])]
    # a product of which each element of an operand is in one term goes back as an outer product
    if does.mixes and does.apart is None:
        return [many(s) if w else None for s, w in zip(ins, wanted, strict=True)]
    # movement: an element gets the labels of all places that it went to
    operands = moved_operands(eqn)
    by_index = any(w for k, w in enumerate(wanted) if k not in operands)
    if operands and not by_index and (places := sources(eqn, avals, known)) is not None:
        shapes = [ins[k] for k in operands]
        source, starts = np.concatenate(places[0]), places[1]
        arriving = joined(out_labels, [avals[o].shape for o in eqn.outs])
        labels = np.concatenate([lab.reshape(-1) for lab in arriving])
        parts = np.split(transposed(labels, source, (starts[-1],)), starts[1:-1])
        found = [part.reshape(s) for part, s in zip(parts, shapes, strict=True)]
        if does.repeats and not labels.size and starts[-1]:
            # repeated no times, as over an empty batch: as for any other batch
            found = [many(s) for s in shapes]
        of = dict(zip(operands, found, strict=True))
        return [of.get(k) if w else None for k, w in enumerate(wanted)]
    # anything else by its own reverse rule, whose equations are followed
    jaxpr, *rest = _reverse_rule(eqn, avals, wanted)
    if _jax.holds_call(eqn, {'custom_vjp_call'}) and not is_linear(jaxpr, *rest):
        return [many(s) if w else None for s, w in zip(ins, wanted, strict=True)]
    start: list[Labels] = [None] * len(ins)
    start += [lab for o, lab in zip(eqn.outs, out_labels, strict=True) if is_inexact(avals[o])]
    got = iter(through_linear(jaxpr, start, dict(zip(jaxpr.invars, known, strict=False))))
    return [next(got) if w else None for w in wanted]


def reads(eqn: Equation, avals, k: int) -> dict[int, Labels]:
    """For each result, by its value, the element of operand ``k`` that each of its elements reads,
    by the transpose of a reverse rule of the user's own; empty where there is none.
    """
    results = [o for o in eqn.outs if is_inexact(avals[o])]
    if not _jax.holds_call(eqn) or is_bent(eqn, avals):
        return {}
    jaxpr, consts, _ = _reverse_rule(eqn, avals, [j == k for j in range(len(eqn.ins))])
    shaped = lambda v: jax.ShapeDtypeStruct(avals[v].shape, avals[v].dtype)

    def push(*operands):
        *primals, tangent = operands
        pull = lambda *cotangents: _jax.evaluate(jaxpr, consts, (*primals, *cotangents))[0]
        return jax.linear_transpose(pull, *map(shaped, results))(tangent)

    try:
        found = along(push, [*map(shaped, eqn.ins)], shaped(eqn.ins[k]))
    except NotImplementedError:  # an equation of the rule has no transpose
        return {}
    return dict(zip(results, found, strict=True))


def is_bent(eqn: Equation, avals) -> bool:
    """Whether the equation has a reverse rule of the user's own that is not known to be linear in
    the cotangents.
    """
    wanted = [is_inexact(avals[v]) for v in eqn.ins]
    own = _jax.holds_call(eqn, {'custom_vjp_call'})
    return own and not is_linear(*_reverse_rule(eqn, avals, wanted))


def rounds(eqn: Equation) -> bool:
    """Whether the equation rounds values to a few bits, and what comes back through it as well."""
    return eqn.does.rounds is not None and eqn.does.rounds(eqn.params)


def _reverse_rule(eqn: Equation, avals, wanted: Sequence[bool]) -> tuple[Any, list, list[bool]]:
    """``[*operands, *cotangents] -> cotangents of the wanted operands`` as a jaxpr, its constants,
    and which of its inputs are cotangents.
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

    n, smooth = len(eqn.ins), [o for o in eqn.outs if is_inexact(avals[o])]
    values = (avals[v] for v in (*eqn.ins, *smooth))
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in values]
    jaxpr, consts = _jax.trace(lambda *flat: pull(flat[:n], list(flat[n:])), *shapes)
    return jaxpr, consts, [False] * n + [True] * len(smooth)


# ---- forward: which positions each element of an equation's results reads ----


def forward(eqn, labels: Sequence[Labels], known: Sequence) -> list[Labels]:
    """Labels of the results of a jaxpr's equation; one that is not linear in the labelled operands
    gets ``MANY``.

    ``known`` holds constant operands.
    """
    does, arriving = primitives.TABLE[eqn.primitive.name], [has(lab) for lab in labels]
    ins, outs = ([v.aval.shape for v in vs] for vs in (eqn.invars, eqn.outvars))
    straight = does.linear is not None and does.linear(arriving)
    # no label arrives, or no number that depends on it leaves
    leaves = (does.gradient or straight) and any(is_inexact(v.aval) for v in eqn.outvars)
    if not any(arriving) or not leaves:
        return [None] * len(outs)
    # element by element: an element reads what the same element of any operand reads
    if does.elementwise and straight:
        total = None
        for lab in labels:
            total = merge(total, None if lab is None else np.broadcast_to(lab, outs[0]))
        return [total]
    if does.passes:
        return list(labels)
    # a reduction reads everything along its axes
    if does.reduces and straight and has(labels[0]):
        return [merge_axes(labels[0], eqn.params['axes'])]
    # movement takes labels with it, if it is not the indices that are labelled
    flat = Equation(eqn.primitive, eqn.params, eqn.ctx, tuple(range(len(ins))), (), '')
    operands = moved_operands(flat)
    if operands and not any(a for k, a in enumerate(arriving) if k not in operands):
        places = moved(flat, joined(labels, ins), known)
        if places is not None:
            return list(places)
    # an update by constants leaves the positions of the array where they are
    if does.updates and straight and not arriving[2]:
        return [labels[0]]
    return [many(s) for s in outs]


# ---- through a jaxpr that is linear in what is labelled ----


def along(fn: Callable, primals: Sequence, tangent) -> list[Labels]:
    """Which elements of a tangent the results of ``fn(*primals, tangent)`` read; it is linear in
    it.
    """
    jaxpr, _ = _jax.trace(fn, *primals, tangent)
    return through_linear(jaxpr, [None] * len(primals) + [identity(tangent.shape)])


def through_linear(jaxpr, start: list[Labels], known: dict | None = None) -> list[Labels]:
    """Labels of the results of a jaxpr that is linear in its labelled inputs.

    ``known`` holds constant inputs, from which indices are computed.
    """
    env = dict(zip(jaxpr.invars, start, strict=True))
    chosen: set = set()  # integers and booleans made of labelled values
    known = {v: k for v, k in (known or {}).items() if k is not None}

    def read(atom) -> Labels:
        return None if isinstance(atom, _jax.Literal) else env.get(atom)

    for eqn in jaxpr.eqns:
        labels = [read(a) for a in eqn.invars]
        values = [a.val if isinstance(a, _jax.Literal) else known.get(a) for a in eqn.invars]
        discrete = any(a in chosen for a in eqn.invars if not isinstance(a, _jax.Literal))
        if discrete or any(map(has, labels)):
            if not _asks_if_finite(eqn):
                chosen.update(o for o in eqn.outvars if not is_inexact(o.aval))
            outs: list[Labels] = [many(o.aval.shape) for o in eqn.outvars]
            outs = outs if discrete else _step(eqn, labels, values)
            env.update(zip(eqn.outvars, outs, strict=True))
            continue
        # indices that are made of constants are known, as far as they are plain numbers
        avals = [v.aval for v in eqn.outvars]
        plain = all(isinstance(a.dtype, np.dtype) and not is_inexact(a) for a in avals)
        if avals and plain and not eqn.effects and all(v is not None for v in values):
            with jax.ensure_compile_time_eval():
                found = _jax.bind(eqn, *values)
            known.update(zip(eqn.outvars, map(np.asarray, found), strict=False))
    return [read(a) for a in jaxpr.outvars]


def _step(eqn, labels: list[Labels], values: list) -> list[Labels]:
    """Labels through one equation of a jaxpr; calls, branches and loops are entered."""
    inner, loop = _jax.inlinable(eqn), _jax.while_parts(eqn)
    scan, branches = _jax.scan_parts(eqn), _jax.cond_branches(eqn)
    avals, does = [v.aval for v in eqn.invars], primitives.TABLE[eqn.primitive.name]
    if inner is not None:
        body, _ = _jax.closed_jaxpr(inner)
        known = dict(zip(body.invars, values, strict=True))
        return through_linear(body, labels, known)
    if branches is not None and not has(labels[0]):
        each = (through_linear(branch, labels[1:]) for branch, _ in branches)
        return [functools.reduce(merge, found) for found in zip(*each, strict=True)]
    if scan is not None:
        # all turns are taken together
        consts, carry, xs = scan.split(labels)
        rows = [None if lab is None else merge_axes(lab, (0,)) for lab in xs]
        body = lambda carry: through_linear(scan.body, [*consts, *carry, *rows])
        carry = _settled(body, carry)
        ys = zip(body(carry), eqn.outvars, strict=True)
        return carry + [
            None if lab is None else np.broadcast_to(lab, o.aval.shape)
            for lab, o in [*ys][scan.num_carry :]
        ]
    # a product that sums nothing is one of single elements
    if does.apart is not None and (apart := does.apart(eqn.params, avals)):
        return through_linear(_jax.trace(apart, *avals)[0], labels)
    if loop is None:
        return forward(eqn, labels, values)
    # a while loop
    _, operands, carry = loop.split(labels)
    asked = {v for eqn in loop.cond.eqns for v in eqn.invars if not isinstance(v, _jax.Literal)}
    new = _settled(lambda carry: through_linear(loop.body, [*operands, *carry]), carry)
    own = zip(loop.cond.invars[loop.cond_nconsts :], new, strict=True)
    if any(v in asked and has(lab) for v, lab in own):  # what is labelled ends the loop
        return [many(o.aval.shape) for o in loop.body.outvars]
    return new


def _settled(body: Callable, carry: Sequence[Labels]) -> list[Labels]:
    """The labels of a loop's carry, followed until nothing changes."""
    while True:
        new = [merge(a, b) for a, b in zip(carry, body(carry))]
        if all(
            a is b or a is not None and b is not None and bool((a == b).all())
            for a, b in zip(carry, new, strict=True)
        ):
            return new
        carry = new
