"""Which positions meet: labels of positions and the equations that move or merge them.

A label array has one integer per element: ``NONE``, a position, or ``MANY`` (several positions). ``backward`` carries the
labels of an equation's output cotangents to its input cotangents; ``forward`` carries labels from inputs to outputs. What is
not on the list gives ``MANY``.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .program import ELEMENTWISE, Equation, is_inexact

__all__ = ['MANY', 'NONE', 'along', 'backward', 'forward', 'has', 'identity', 'merge', 'nothing']

NONE, MANY = -1, -2
Labels = np.ndarray | None

LINEAR = {'neg', 'convert_element_type', 'copy', 'copy_p', 'real', 'imag', 'conj', 'reduce_precision', 'name', 'pvary', 'device_put',
          'sharding_constraint', 'add', 'sub', 'add_any', 'complex'}
REDUCTIONS = {'reduce_sum', 'reduce_max', 'reduce_min', 'reduce_prod'}
RESHAPES = {'reshape', 'squeeze', 'expand_dims'}
OPAQUE = {'dot_general', 'conv_general_dilated', 'cumsum', 'cumprod', 'cumlogsumexp', 'cummax', 'cummin', 'sort', 'while',
          'scan', 'cond'}


def identity(shape) -> np.ndarray:
    """Each element labelled with its own flat position."""
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)


def nothing(shape) -> np.ndarray:
    return np.full(shape, NONE, np.int64)


def has(labels: Labels) -> bool:
    """Whether any element carries a position; an array without elements counts as if it did, so that relations are found."""
    return labels is not None and (not labels.size or bool((labels != NONE).any()))


def merge(a: Labels, b: Labels) -> Labels:
    """Labels of a sum: equal or lone labels stay, different ones become ``MANY``."""
    if a is None or b is None or a is b:
        return b if a is None else a
    return np.where(a == NONE, b, np.where((b == NONE) | (a == b), a, MANY))


def _merge_axes(labels: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Merge along axes; an axis of size 1 is only a reshape."""
    axes = tuple(axes)
    big = np.iinfo(np.int64).max
    low = np.where(labels == NONE, big, labels).min(axis=axes, initial=big)
    high = labels.max(axis=axes, initial=NONE)
    many = (labels == MANY).any(axis=axes) | ((high != NONE) & (low != high))
    return np.where(many, MANY, high)


def _sliced(params: dict) -> tuple[slice, ...]:
    strides = params['strides'] or (1,) * len(params['start_indices'])
    return tuple(slice(a, b, s) for a, b, s in zip(params['start_indices'], params['limit_indices'], strides, strict=True))


def _splits(eqn: Equation, shapes) -> tuple[int, list[int]]:
    if eqn.primitive.name == 'split':
        return eqn.params['axis'], list(np.cumsum(eqn.params['sizes'])[:-1])
    axis = eqn.params['dimension']
    return axis, list(np.cumsum([s[axis] for s in shapes])[:-1])


def _pad(array: np.ndarray, config) -> np.ndarray:
    for axis, (low, high, interior) in enumerate(config):
        moved = np.moveaxis(array, axis, 0)
        n = moved.shape[0]
        size = n + max(n - 1, 0) * interior
        wide = np.full((max(low, 0) + size + max(high, 0), *moved.shape[1:]), NONE, array.dtype)
        wide[max(low, 0):max(low, 0) + size:interior + 1] = moved
        wide = wide[max(-low, 0):wide.shape[0] - max(-high, 0)]
        array = np.moveaxis(wide, 0, axis)
    return array


def _source_map(eqn: Equation, shapes, known) -> np.ndarray | None:
    """For pure data movement of one operand: the flat source of each output element (``NONE``: a constant), else None."""
    name, p = eqn.primitive.name, eqn.params
    ids = identity(shapes[0])
    if name in RESHAPES:
        return ids if p.get('dimensions') is None or name != 'reshape' else None
    if name == 'transpose':
        return np.transpose(ids, p['permutation'])
    if name == 'rev':
        return np.flip(ids, p['dimensions'])
    if name == 'slice':
        return ids[_sliced(p)]
    if name == 'pad':
        return _pad(ids, p['padding_config'])
    if name == 'broadcast_in_dim':
        full = [1] * len(p['shape'])
        for axis, n in zip(p['broadcast_dimensions'], shapes[0], strict=True):
            full[axis] = n
        return np.broadcast_to(ids.reshape(full), p['shape'])
    if name in ('dynamic_slice', 'gather') and all(k is not None for k in known[1:]):
        with jax.ensure_compile_time_eval():
            moved, = eqn.evaluate([jnp.asarray(ids + 1, jnp.int32), *known[1:]])
        return np.asarray(moved).astype(np.int64) - 1
    return None


UPDATES = {'scatter-add', 'scatter-sub', 'scatter-mul'}
WRITES = {'scatter': (0, 2), 'dynamic_update_slice': (0, 1)}
MOVES = {'stack', 'unstack', 'tile'}


def _moved_slots(eqn: Equation, known) -> tuple[int, ...] | None:
    """For data movement of several operands, or to several results: the operands that are moved; None if that is not known."""
    slots = WRITES.get(eqn.primitive.name, tuple(range(len(known))) if eqn.primitive.name in MOVES else None)
    return slots if slots is None or all(k is not None for i, k in enumerate(known) if i not in slots) else None


def _sources(eqn: Equation, shapes, known, slots) -> list[np.ndarray]:
    """The source of each element of each result, counted through the moved operands one after the other."""
    args, start = list(known), 0
    with jax.ensure_compile_time_eval():
        for i in slots:
            ids = identity(shapes[i])
            args[i] = jnp.asarray(ids + start, jnp.int32)
            start += ids.size
        return [np.asarray(o).astype(np.int64) for o in eqn.evaluate(args)]


def _joined(labels: Sequence[Labels], shapes) -> np.ndarray:
    return np.concatenate([(nothing(s) if lab is None else lab).reshape(-1) for lab, s in zip(labels, shapes, strict=True)])


def _shapes(eqn: Equation, avals) -> tuple[list, list]:
    return [avals[i].shape for i in eqn.ins], [avals[o].shape for o in eqn.outs]


def backward(eqn: Equation, avals, out_labels: Sequence[Labels], known: Sequence, relevant: Sequence[bool]) -> list[Labels]:
    """Labels of the input cotangents; ``known`` holds constant inputs, ``relevant`` says which inputs are asked for."""
    ins, outs = _shapes(eqn, avals)
    name = eqn.primitive.name
    wanted = [r and is_inexact(avals[i]) for i, r in zip(eqn.ins, relevant, strict=True)]
    if not any(wanted) or not any(map(has, out_labels)) or name in ('stop_gradient', 'zeros_like'):
        return [None] * len(ins)
    labels = out_labels[0] if len(outs) == 1 else None
    if name in ELEMENTWISE:
        return [labels if w else None for w in wanted]
    if name == 'optimization_barrier':
        return [lab if w else None for lab, w in zip(out_labels, wanted, strict=True)]
    if name == 'concatenate':
        axis, cuts = _splits(eqn, ins)
        return [part if w else None for part, w in zip(np.split(labels, cuts, axis), wanted, strict=True)]
    if name == 'split':
        parts = [nothing(s) if lab is None else lab for lab, s in zip(out_labels, outs, strict=True)]
        return [np.concatenate(parts, eqn.params['axis'])]
    if name in REDUCTIONS:
        axes = eqn.params['axes']
        return [np.broadcast_to(np.expand_dims(labels, axes), ins[0])]
    source = _source_map(eqn, ins, known) if wanted[0] and not any(wanted[1:]) and labels is not None else None
    if source is not None and not labels.size and identity(ins[0]).size and name == 'broadcast_in_dim':
        return [np.full(ins[0], MANY), *[None] * (len(ins) - 1)]      # over an empty batch as over any other
    if source is not None:
        return [_scatter(labels, source, ins[0]), *[None] * (len(ins) - 1)]
    if name in OPAQUE:
        return [np.full(s, MANY) if w else None for s, w in zip(ins, wanted, strict=True)]
    slots = _moved_slots(eqn, known)
    if slots is not None:
        sizes = [identity(ins[i]).size for i in slots]
        source = np.concatenate([o.reshape(-1) for o in _sources(eqn, ins, known, slots)])
        parts = np.split(_scatter(_joined(out_labels, outs), source, (sum(sizes),)), np.cumsum(sizes)[:-1])
        moved = {i: part.reshape(ins[i]) for i, part in zip(slots, parts, strict=True)}
        return [moved.get(i) if w else None for i, w in enumerate(wanted)]
    return _by_own_rule(eqn, avals, out_labels, known, wanted)


def _scatter(labels: np.ndarray, source: np.ndarray, shape) -> np.ndarray:
    """Transpose of data movement: each source merges the labels of the elements that it went to."""
    big = np.iinfo(np.int64).max
    size = int(np.prod(shape))
    flat, where = labels.reshape(-1), source.reshape(-1)
    used = (where != NONE) & (flat != NONE)
    flat, where = flat[used], where[used]
    low, high, many = np.full(size, big), np.full(size, NONE), np.zeros(size, bool)
    np.minimum.at(low, where, np.where(flat == MANY, big, flat))
    np.maximum.at(high, where, flat)
    np.logical_or.at(many, where, flat == MANY)
    return np.where(many | ((high != NONE) & (low != high)), MANY, high).reshape(shape)


def _by_own_rule(eqn: Equation, avals, out_labels, known, wanted) -> list[Labels]:
    """Trace the equation's own reverse rule and follow the labels of its cotangents through that."""
    def pull(primals, cotangents):
        def of_wanted(chosen):
            it = iter(chosen)
            outs = eqn.evaluate([next(it) if w else p for w, p in zip(wanted, primals, strict=True)])
            return [o for o in outs if is_inexact(o)]
        return jax.vjp(of_wanted, [p for p, w in zip(primals, wanted, strict=True) if w])[1](cotangents)[0]

    primals = [jax.ShapeDtypeStruct(avals[i].shape, avals[i].dtype) for i in eqn.ins]
    inexact = [(avals[o], lab) for o, lab in zip(eqn.outs, out_labels, strict=True) if is_inexact(avals[o])]
    cotangents = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a, _ in inexact]
    jaxpr, consts = _jax.trace(lambda *flat: pull(flat[:len(primals)], list(flat[len(primals):])), *primals, *cotangents)
    start = [None] * (len(consts) + len(primals)) + [lab for _, lab in inexact]
    got = iter(_run_linear(jaxpr, start, dict(zip(jaxpr.invars, known, strict=False))))
    return [next(got) if w else None for w in wanted]


def _run_linear(jaxpr, start: list[Labels], known: dict | None = None) -> list[Labels]:
    """Labels of the results; ``known`` holds the arrays of constant inputs, from which indices are worked out."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], start, strict=True))
    known = {v: k for v, k in (known or {}).items() if k is not None}

    def read(atom) -> Labels:
        return None if isinstance(atom, _jax.Literal) else env.get(atom)

    for eqn in jaxpr.eqns:
        labels = [read(a) for a in eqn.invars]
        values = [a.val if isinstance(a, _jax.Literal) else known.get(a) for a in eqn.invars]
        inner, loop = _jax.inlinable(eqn), _jax.while_parts(eqn)
        if not any(map(has, labels)):
            known.update(zip(eqn.outvars, _indices(eqn, values), strict=False))
        elif inner is not None:
            body, consts = _jax.closed_jaxpr(inner)
            got = _run_linear(body, [None] * len(consts) + labels, dict(zip(body.invars, values, strict=True)))
            env.update(zip(eqn.outvars, got, strict=True))
        elif loop is not None:
            env.update(zip(eqn.outvars, _run_while(loop, labels), strict=True))
        else:
            flat = Equation(eqn.primitive, eqn.params, eqn.ctx, tuple(range(len(labels))),
                            tuple(range(len(labels), len(labels) + len(eqn.outvars))), '')
            outs = forward(flat, [v.aval for v in [*eqn.invars, *eqn.outvars]], labels, values, linear=True)
            env.update(zip(eqn.outvars, outs, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _indices(eqn, values: Sequence) -> list:
    """The results of an integer equation of known values, else nothing."""
    plain = all(isinstance(v.aval.dtype, np.dtype) and not is_inexact(v.aval) for v in eqn.outvars)
    if not eqn.outvars or not plain or eqn.effects or any(v is None for v in values):
        return []
    with jax.ensure_compile_time_eval():
        return list(map(np.asarray, _jax.bind(eqn.primitive, eqn.params, eqn.ctx, *values)))


def _run_while(loop, labels: list[Labels]) -> list[Labels]:
    """Labels of a loop's carry, followed until nothing changes."""
    consts = [None] * len(loop.body_consts) + labels[loop.cond_nconsts:loop.cond_nconsts + loop.body_nconsts]
    carry = labels[loop.cond_nconsts + loop.body_nconsts:]
    while True:
        new = [merge(a, b) for a, b in zip(carry, _run_linear(loop.body, [*consts, *carry]), strict=True)]
        if all((a is None) == (b is None) and (a is None or (a == b).all()) for a, b in zip(carry, new, strict=True)):
            return new
        carry = new


def along(fn: Callable, primals: Sequence, tangent) -> list[Labels]:
    """Which elements of a tangent the results of ``fn(*primals, tangent)``, linear in it, read."""
    jaxpr, consts = _jax.trace(fn, *primals, tangent)
    return _run_linear(jaxpr, [None] * (len(consts) + len(primals)) + [identity(tangent.shape)])


def _is_linear(name: str, labels: Sequence[Labels]) -> bool:
    """Whether an element-wise equation is linear in its labelled inputs."""
    carrying = [has(lab) for lab in labels]
    if name == 'mul':
        return sum(carrying) == 1
    if name in ('div', 'select_n'):
        return name == 'div' and not carrying[1] or name == 'select_n' and not carrying[0]
    return name in LINEAR


def forward(eqn: Equation, avals, labels: Sequence[Labels], known: Sequence, *, linear: bool,
            smooth: Callable[[Equation], bool] = lambda eqn: False) -> list[Labels]:
    """Labels of the outputs: positions that each element reads. ``linear`` refuses what is not linear in labelled inputs."""
    ins, outs = _shapes(eqn, avals)
    name = eqn.primitive.name
    if not any(map(has, labels)) or name == 'stop_gradient' or not any(is_inexact(avals[o]) for o in eqn.outs):
        return [None] * len(outs)
    if name in ELEMENTWISE or smooth(eqn):
        if linear and not _is_linear(name, labels):
            return [np.full(s, MANY) for s in outs]
        return [_elementwise(labels if name != 'select_n' else labels[1:], s) for s in outs]
    if name == 'concatenate':
        return [np.concatenate([nothing(s) if lab is None else lab for lab, s in zip(labels, ins, strict=True)],
                               eqn.params['dimension'])]
    if name == 'split':
        axis, cuts = _splits(eqn, ins)
        return list(np.split(labels[0], cuts, axis))
    if name == 'reduce_sum' or name in REDUCTIONS and not linear:
        return [_merge_axes(labels[0], eqn.params['axes'])]
    slots = _moved_slots(eqn, known)
    if slots is not None and not any(has(lab) for i, lab in enumerate(labels) if i not in slots):
        joined = _joined([labels[i] for i in slots], [ins[i] for i in slots])
        return [joined[source] for source in _sources(eqn, ins, known, slots)]
    if name in UPDATES and not has(labels[2]):
        return [labels[0]]
    source = _source_map(eqn, ins, known) if has(labels[0]) and not any(map(has, labels[1:])) else None
    if source is not None:
        moved = np.append(labels[0].reshape(-1), NONE)[source]
        return [moved.reshape(outs[0])]
    return [np.full(s, MANY) for s in outs]


def _elementwise(labels: Sequence[Labels], shape) -> Labels:
    merged = None
    for lab in labels:
        if lab is not None:
            merged = merge(merged, np.broadcast_to(lab, shape))
    return merged
