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

__all__ = ['MANY', 'NONE', 'backward', 'forward', 'has', 'identity', 'merge', 'nothing']

NONE, MANY = -1, -2
Labels = np.ndarray | None

LINEAR = {'neg', 'convert_element_type', 'copy', 'copy_p', 'real', 'imag', 'conj', 'reduce_precision', 'name', 'pvary', 'device_put',
          'add', 'sub', 'add_any', 'complex'}
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
    return labels is not None and bool((labels != NONE).any())


def merge(a: Labels, b: Labels) -> Labels:
    """Labels of a sum: equal or lone labels stay, different ones become ``MANY``."""
    if a is None or b is None:
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
    if source is not None:
        return [_scatter(labels, source, ins[0]), *[None] * (len(ins) - 1)]
    if name in OPAQUE:
        return [np.full(s, MANY) if w else None for s, w in zip(ins, wanted, strict=True)]
    return _by_own_rule(eqn, avals, out_labels, wanted)


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


def _by_own_rule(eqn: Equation, avals, out_labels, wanted) -> list[Labels]:
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
    got = iter(_run_linear(jaxpr, start))
    return [next(got) if w else None for w in wanted]


def _run_linear(jaxpr, start: list[Labels]) -> list[Labels]:
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], start, strict=True))

    def read(atom) -> Labels:
        return None if isinstance(atom, _jax.Literal) else env.get(atom)

    for eqn in jaxpr.eqns:
        labels = [read(a) for a in eqn.invars]
        if not any(map(has, labels)):
            continue
        inner = _jax.inlinable(eqn)
        if inner is not None:
            body, consts = _jax.closed_jaxpr(inner)
            outs = _run_linear(body, [None] * len(consts) + labels)
        else:
            flat = Equation(eqn.primitive, eqn.params, eqn.ctx, tuple(range(len(labels))),
                            tuple(range(len(labels), len(labels) + len(eqn.outvars))), '')
            outs = forward(flat, [v.aval for v in [*eqn.invars, *eqn.outvars]], labels, [None] * len(labels), linear=True)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(a) for a in jaxpr.outvars]


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
