"""Which integers of the carry are random keys: those that a step takes for one.

``jax.random.PRNGKey`` makes plain numbers, two or four in the last axis. What they are shows where
they are used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ... import _jax
from .. import primitives

SIZES = 2, 4  # the numbers of a key: threefry, rbg


def raw_keys(jaxpr, n_carry: int, start: int) -> list[int]:
    """The positions in the carry, which is ``n_carry`` inputs from ``start`` on and the last
    outputs of a step.
    """
    may = [_may_be_keys(v.aval) for v in jaxpr.invars[start : start + n_carry]]
    keys = [False] * n_carry
    while any(may):
        # what becomes a key of the next step is one
        results = [False] * (len(jaxpr.outvars) - n_carry) + keys
        found = _keys(jaxpr, results)[start : start + n_carry]
        new = [k or m and f for k, m, f in zip(keys, may, found, strict=True)]
        if new == keys:
            break
        keys = new
    return [c for c, key in enumerate(keys) if key]


def _may_be_keys(aval) -> bool:
    return aval.dtype == np.uint32 and aval.shape[-1:] in [(n,) for n in SIZES]


def _keys(jaxpr, results: Sequence[bool]) -> list[bool]:
    """Which inputs are taken for keys, or are moved to ``results`` that are."""
    found = {v for v, key in zip(jaxpr.outvars, results, strict=True) if key and _is_var(v)}
    for eqn in reversed(jaxpr.eqns):
        ins = _operands(eqn, [v in found for v in eqn.outvars])
        found.update(v for v, key in zip(eqn.invars, ins, strict=True) if key and _is_var(v))
    return [v in found for v in jaxpr.invars]


def _is_var(atom) -> bool:
    return not isinstance(atom, _jax.Literal)


def _operands(eqn, outs: list[bool]) -> list[bool]:
    """Which operands of an equation are keys."""
    does = primitives.of(eqn)
    ins = [k in does.key_data for k in range(len(eqn.invars))]
    if any(outs) and (does.moves or does.passes or does.zeros == 'chosen'):
        ins = [_may_move(v.aval) for v in eqn.invars]
    # a body reads the last operands, all that it has an input for
    for body in map(_jax.closed_jaxpr, _jax.sub_jaxprs(eqn.params)):
        ins = [a or b for a, b in zip(ins, _of_body(eqn, body[0], outs), strict=True)]
    return ins


def _may_move(aval) -> bool:
    return aval.dtype == np.uint32


def _of_body(eqn, body, outs: list[bool]) -> list[bool]:
    n, carried = len(eqn.invars), _carried(eqn)
    if len(body.outvars) != len(outs):
        return [False] * n
    while True:
        inner = _keys(body, outs)
        back = inner[carried] if carried is not None else []
        turned = [a or b for a, b in zip(outs, back, strict=False)] + outs[len(back) :]
        if turned == outs:
            return [False] * (n - len(inner)) + inner
        outs = turned


def _carried(eqn) -> slice | None:
    """The inputs of a loop's body that its results become in the next turn."""
    scan, loop = _jax.scan_parts(eqn), _jax.while_parts(eqn)
    if scan is not None:
        return slice(scan.num_consts, scan.num_consts + scan.num_carry)
    return None if loop is None else slice(loop.body_nconsts, None)
