"""Which results of a linear program depend on which of its operands, by structure.

The program is evaluated on the numbers 0 and 1 with every sign a plus, so that nothing cancels: a
result is then not zero exactly where a path leads to it. Values that do not depend on a linear
operand are coefficients: what is made of constants alone keeps its zeros, and so do products and
movements of it; all other coefficients count as ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._compiler import is_inexact, properties_of

MOST = 2**24  # numbers of an intermediate result that are kept at once

KNOWN, ZEROS, ANY, LINEAR = range(4)  # constants, known zeros, nothing known, linear
INDEXED = 'taken', 'put', 'indexed'  # what they read is known where their indices are
EVALUATED = {'product', 'moved', 'chosen', *INDEXED}


class _Pattern(NamedTuple):
    kind: int
    array: Any = None  # numbers of a constant, else 0 and 1; None: nothing known

    def pattern(self, aval):
        """0 where the value is zero by structure, else 1."""
        if self.array is None:
            return jnp.ones(aval.shape, aval.dtype)
        return _ones(self.array, aval) if is_inexact(aval) else self.array


def _ones(x, aval):
    return jnp.broadcast_to(x != 0, aval.shape).astype(aval.dtype)


class Linear:
    """A function ``fn(*unknown, *linear)`` of flat arrays, linear in the last ones.

    ``unknown`` and ``linear``: their shapes.
    """

    def __init__(self, fn: Callable, unknown: list, linear: list):
        self.jaxpr, self.consts = _jax.called(_jax.opened, fn, [*unknown, *linear])
        self.unknown = len(unknown)
        sizes = [math.prod(v.aval.shape) for eqn in self.jaxpr.eqns for v in eqn.outvars]
        self._chunk = max(1, MOST // max(sizes, default=1))

    def depends(self, basis: list[np.ndarray], seen: Callable | None = None) -> Any:
        """For each row of the linear operands which elements of the results depend on its ones.

        ``seen(eqn, arrays, results)`` may look at each linear equation; its findings come back.
        """
        found = []

        def run(consts, rows):
            return jax.vmap(functools.partial(self._one, consts, seen))(rows)

        run = jax.jit(run, compiler_options={'xla_backend_optimization_level': 0})
        for k in range(0, len(basis[0]), self._chunk):
            rows = [b[k : k + self._chunk] for b in basis]
            found.append(jax.tree.map(np.asarray, _jax.called(run, self.consts, rows)))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

    def _one(self, consts, seen, rows):
        values = [_Pattern(ANY)] * self.unknown + [
            _Pattern(LINEAR, r.astype(v.aval.dtype))
            for v, r in zip(self.jaxpr.invars[self.unknown :], rows, strict=True)
        ]
        findings: list = []
        look = None if seen is None else lambda *at: findings.append(seen(*at))
        outs = _evaluate(self.jaxpr, [_Pattern(KNOWN, c) for c in consts], values, look)
        if seen is not None:
            return findings
        return [
            v.array != 0 if v.kind == LINEAR else jnp.zeros(o.aval.shape, bool)
            for v, o in zip(outs, self.jaxpr.outvars, strict=True)
        ]


def _evaluate(jaxpr, consts: list[_Pattern], args: list[_Pattern], look) -> list[_Pattern]:
    def known(atom) -> _Pattern:
        return _Pattern(KNOWN, _jax.literal(atom))

    return _jax.walk(jaxpr, consts, args, lambda eqn, ins: _equation(eqn, ins, look), known)


def _equation(eqn, ins: list[_Pattern], look) -> list[_Pattern]:
    kind = max((v.kind for v in ins), default=KNOWN)
    if kind == KNOWN:
        found = _jax.bind(eqn.primitive, eqn.params, eqn.ctx, *(v.array for v in ins))
        return [_Pattern(KNOWN, x) for x in found]
    if properties_of(eqn).passes:
        return ins
    inner = _inside(eqn, ins, look)
    if inner is not None:
        return inner
    numbers = all(is_inexact(v.aval) for v in eqn.outvars)  # no keys, which are not compared with 0
    arrays = _positive(eqn, ins) if numbers or kind == LINEAR else None
    if kind == LINEAR:
        arrays = _everything(eqn, ins) if arrays is None else arrays
        if look is not None:
            look(eqn, [v.array if v.kind == LINEAR else None for v in ins], arrays)
        return [_Pattern(LINEAR, x) for x in arrays]
    if arrays is None:
        return [_Pattern(ANY)] * len(eqn.outvars)
    return [_Pattern(ZEROS, x) for x in arrays]


def _inside(eqn, ins: list[_Pattern], look) -> list[_Pattern] | None:
    """The results of an equation that has a body."""
    call, remat = _jax.inlinable(eqn), _jax.remat_parts(eqn)
    if call is not None:
        return _called(_jax.closed_jaxpr(call), ins, look)
    if remat is not None:
        return _called((remat.body, remat.consts), ins, look)
    scan, branches = _jax.scan_parts(eqn), _jax.cond_branches(eqn)
    if scan is not None:
        return _scanned(scan, [v.aval for v in eqn.outvars], ins, look)
    if branches is None:
        return None
    found = [_called(branch, ins[1:], look) for branch in branches]
    return [_joined(v.aval, each) for v, each in zip(eqn.outvars, zip(*found), strict=True)]


def _called(body: tuple, ins: list[_Pattern], look) -> list[_Pattern]:
    jaxpr, consts = body
    return _evaluate(jaxpr, [_Pattern(KNOWN, c) for c in consts], ins, look)


def _joined(aval, values) -> _Pattern:
    """What may be any of some values."""
    kind = max(ZEROS, *(v.kind for v in values))
    if not is_inexact(aval) or (kind != LINEAR and any(v.array is None for v in values)):
        return _Pattern(ANY)
    return _Pattern(kind, _ones(sum(_part(v, aval, kind) for v in values), aval))


def _part(v: _Pattern, aval, kind: int):
    """A value among others; a constant of a linear sum is a zero."""
    if kind == LINEAR and v.kind != LINEAR:
        return jnp.zeros(aval.shape, aval.dtype)
    return v.pattern(aval)


def _scanned(scan: _jax.ScanParts, avals: list, ins: list[_Pattern], look) -> list[_Pattern]:
    """A loop, turn after turn."""
    consts, carry, xs = scan.split(ins)
    turns, rows = range(scan.length), []
    for t in reversed(turns) if scan.reverse else turns:
        at = [v if v.array is None else v._replace(array=v.array[t]) for v in xs]
        outs = _called((scan.body, scan.consts), [*consts, *carry, *at], look)
        carry, row = outs[: scan.num_carry], outs[scan.num_carry :]
        rows.append(row)
    rows = rows[::-1] if scan.reverse else rows
    sequences = zip(avals[scan.num_carry :], zip(*rows), strict=True)
    return [*carry, *(_stacked(aval, each) for aval, each in sequences)]


def _stacked(aval, values) -> _Pattern:
    """Values of one turn after the other as a sequence."""
    row = jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype)
    kind = max(ZEROS, *(v.kind for v in values))
    if not is_inexact(row) or (kind != LINEAR and any(v.array is None for v in values)):
        return _Pattern(ANY)
    return _Pattern(kind, jnp.stack([_part(v, row, kind) for v in values]))


def _everything(eqn, ins: list[_Pattern]) -> list:
    """Of a primitive that is not known, every result reads every linear operand."""
    some = jnp.stack([(v.array != 0).any() for v in ins if v.kind == LINEAR]).any()
    return [jnp.broadcast_to(some, v.aval.shape).astype(v.aval.dtype) for v in eqn.outvars]


def _positive(eqn, ins: list[_Pattern]) -> list | None:
    """The results on numbers that are not negative; None for a primitive that is not known."""
    kind, outs = properties_of(eqn).zeros, [v.aval for v in eqn.outvars]
    known = all(v.kind == KNOWN for v in ins[_indices(kind)])
    linear = kind != 'product' and any(v.kind == LINEAR for v in ins)
    # a sum of a linear value and another one is linear where that is zero
    patterns = [
        _part(v, x.aval, LINEAR) if linear and is_inexact(x.aval) else v.pattern(x.aval)
        for v, x in zip(ins, eqn.invars, strict=True)
    ]
    if kind == 'same':
        return [_ones(x, out) for x, out in zip(patterns, outs, strict=True)]
    if kind == 'sum' or (kind == 'chosen' and not known):
        several = patterns if kind == 'sum' else patterns[1:]
        return [_ones(sum(abs(x) for x in several), outs[0])]
    if kind == 'first':
        return [_ones(patterns[0], outs[0])]
    if kind in ('taken', 'put') and not known:
        return [_somewhere(patterns[: 1 + (kind == 'put')], outs[0])]
    if kind not in EVALUATED or not known:
        return None
    found = _jax.bind(eqn.primitive, eqn.params, eqn.ctx, *patterns)
    return [_ones(x, out) for x, out in zip(found, outs, strict=True)]


def _indices(kind: str) -> slice:
    """The operands that name places."""
    if kind in ('taken', 'put'):
        return slice(1 + (kind == 'put'), None)
    return {'chosen': slice(1), 'indexed': slice(1, 2)}.get(kind, slice(0))


def _somewhere(patterns: list, out):
    """A slice, taken or put, that begins somewhere: along the axes that it does not fill,
    anywhere.
    """
    whole, part = patterns[0].shape, patterns[1].shape if patterns[1:] else out.shape
    axes = tuple(k for k, n in enumerate(part) if n < whole[k])
    *beside, moving = patterns
    return _ones(sum(beside) + moving.sum(axes, keepdims=True), out)
