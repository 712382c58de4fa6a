"""Tracing a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ... import _jax
from ...errors import CompileError, StructureError
from .. import primitives
from ..equations import is_complex, is_inexact
from .leaves import Leaves, abstract, check_arrays, describe_aval, leaves_of, path_name

# raw keys -----------------------------------------------------------------------------------------
#
# Which integers of the carry are random keys: those that a step takes for one.
#
# ``jax.random.PRNGKey`` makes plain numbers, two or four in the last axis. What they are shows
# where they are used.


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
    does = primitives.TABLE[eqn.primitive.name]
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


# tracing ------------------------------------------------------------------------------------------
#
# A step function, traced: its jaxpr, and the trees of the user's structures.


FRAMEWORKS = {'blox', 'brainstate', 'equinox', 'flax'}  # of which there are adapters


@dataclass(frozen=True)
class Step:
    """A traced step before it is flattened."""

    jaxpr: Any
    consts: list
    avals: tuple[list, ...]
    param_keys: tuple
    carry_keys: tuple
    n_outputs: int
    trees: dict[str, Any]
    raw_keys: frozenset[tuple[str, ...]]


def trace_step(cell: Callable, params, carry, inputs: tuple) -> Step:
    """Trace ``cell`` on shapes and dtypes."""
    parts = [
        leaves_of(params, 'params'),
        leaves_of(carry, 'carry'),
        leaves_of(tuple(inputs), 'inputs'),
    ]
    avals = [[abstract(x) for x in part.leaves] for part in parts]
    returned = _Returned()
    step = _flat_step(cell, parts, returned)
    jaxpr, consts = _jax.trace(step, *(a for part in avals for a in part))
    new_avals = [v.aval for v in jaxpr.outvars[returned.n_outputs :]]
    _check_carry(parts[1], avals[1], returned.carry, new_avals)
    trees = {n: p.tree for n, p in zip(('params', 'carry', 'inputs'), parts, strict=True)}
    return Step(
        jaxpr,
        consts,
        tuple(avals),
        parts[0].keys,
        parts[1].keys,
        returned.n_outputs,
        {**trees, 'outputs': returned.out_tree},
        frozenset(parts[1].keys[c] for c in raw_keys(jaxpr, len(avals[1]), len(avals[0]))),
    )


@dataclass
class _Returned:
    """The cell's result without its leaves: these are tracers."""

    out_tree: Any = None
    n_outputs: int = 0
    carry: Leaves = Leaves((), [], None)


def _flat_step(cell: Callable, parts: list[Leaves], returned: _Returned) -> Callable:
    """The cell as a function of the leaves of all its arguments, one after the other."""

    def step(*leaves):
        it = iter(leaves)
        args = [jax.tree.unflatten(p.tree, [next(it) for _ in p.leaves]) for p in parts]
        params, carry, inputs = args
        try:
            result = cell(params, carry, *inputs)
        except TypeError as e:
            if {c.__module__.split('.')[0] for c in type(cell).__mro__} & FRAMEWORKS:
                e.add_note(
                    f'A cell is called as cell(params, carry, *inputs), and {type(cell).__name__} '
                    'is a model: braintrace.adapters makes a cell, params and a carry of it.'
                )
            raise
        if not (isinstance(result, tuple) and len(result) == 2):
            array = 'one array' if hasattr(result, 'dtype') else f'a {type(result).__name__}'
            found = f'a tuple of {len(result)}' if isinstance(result, tuple) else array
            raise CompileError(f'the cell returned {found}; return a pair (outputs, new_carry).')
        outputs, new_carry = result
        new = leaves_of(new_carry, 'the new carry')
        returned.carry = new._replace(leaves=[])
        check_arrays(outputs, 'outputs')
        out_leaves, returned.out_tree = jax.tree.flatten(outputs)
        returned.n_outputs = len(out_leaves)
        new_leaves = (x if hasattr(x, 'dtype') else jnp.asarray(x) for x in new.leaves)
        return [*map(jnp.asarray, out_leaves), *new_leaves]

    return step


def _check_carry(before: Leaves, old_avals, after: Leaves, new_avals) -> None:
    old = dict(zip(before.keys, old_avals, strict=True))
    new = dict(zip(after.keys, new_avals, strict=True))
    lines = [f'  {path_name(n, "carry")}: missing in the new carry' for n in old if n not in new]
    lines += [f'  {path_name(n, "carry")}: added in the new carry' for n in new if n not in old]
    lines += [
        f'  {path_name(n, "carry")}: {describe_aval(old[n])} before the step, '
        f'{describe_aval(new[n])} after it'
        for n in old
        if n in new and (old[n].shape, old[n].dtype) != (new[n].shape, new[n].dtype)
    ]
    if not lines and after.tree != before.tree:
        lines = ['  same paths, but the tree (or a physical unit in it) differs']
    further = any(new[n].shape[1:] == old[n].shape for n in old if n in new and new[n].shape)
    if lines:
        raise StructureError(
            'a step must return a carry of the structure, shapes and dtypes that it got:\n'
            + '\n'.join(lines)
            + '\nCast or reshape the state inside the step, or initialise it with what the step '
            'returns.' + (' Of a whole sequence, give one step: `xs[0]`.' if further else '')
        )


def depends(fn: Callable, values: list, *args) -> list[bool]:
    """Whether the result of ``fn(values, *args)`` depends on each entry of ``values``."""
    leaves, treedef = jax.tree.flatten((values, *args))
    jaxpr, _ = _jax.opened(lambda *x: fn(*jax.tree.unflatten(treedef, x)), leaves)
    live = {v for v in jaxpr.outvars[:1] if not isinstance(v, _jax.Literal)}
    for eqn in reversed(jaxpr.eqns):
        if not live.isdisjoint(eqn.outvars):
            live.update(v for v in eqn.invars if not isinstance(v, _jax.Literal))
    slots = jax.tree.unflatten(treedef, [v in live for v in jaxpr.invars])[0]
    return [any(jax.tree.leaves(s)) for s in slots]


def is_holomorphic(fn: Callable, values: list, *args) -> bool:
    """Whether ``fn(values, *args)`` is known to be holomorphic in complex ``values``."""
    jaxpr, _ = _jax.opened(fn, (values, *args))
    reads = {*jaxpr.invars[: len(values)]}
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, _jax.Literal) and v in reads for v in eqn.invars):
            makes_real = any(is_inexact(v.aval) and not is_complex(v.aval) for v in eqn.outvars)
            if makes_real or not primitives.TABLE[eqn.primitive.name].holomorphic:
                return False
            reads.update(eqn.outvars)
    return True
