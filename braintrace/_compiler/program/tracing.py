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
from .leaves import abstract, check_arrays, describe_aval, leaves_of, path_name

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
    avals = [v.aval for v in jaxpr.invars[start : start + n_carry]]
    may = [a.dtype == np.uint32 and a.shape[-1:] in [(n,) for n in SIZES] for a in avals]
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


def _keys(jaxpr, results: Sequence[bool]) -> list[bool]:
    """Which inputs are taken for keys, or are moved to ``results`` that are."""
    found: set = set()

    def note(atoms: Sequence, keys: Sequence[bool]) -> None:
        chosen = (v for v, key in zip(atoms, keys, strict=True) if key)
        found.update(v for v in chosen if not isinstance(v, _jax.Literal))

    note(jaxpr.outvars, results)
    for eqn in reversed(jaxpr.eqns):
        does, outs = primitives.TABLE[eqn.primitive.name], [v in found for v in eqn.outvars]
        ins = [k in does.key_data for k in range(len(eqn.invars))]
        if any(outs) and (does.moves or does.passes or does.zeros == 'chosen'):
            ins = [v.aval.dtype == np.uint32 for v in eqn.invars]
        # a body reads the last operands, all that it has an input for
        for body in (_jax.closed_jaxpr(j)[0] for j in _jax.sub_jaxprs(eqn.params)):
            if len(body.outvars) == len(outs):
                inner = _of_body(eqn, body, outs)
                ahead = [False] * (len(ins) - len(inner))
                ins = [a or b for a, b in zip(ins, ahead + inner, strict=True)]
        note(eqn.invars, ins)
    return [v in found for v in jaxpr.invars]


def _of_body(eqn, body, outs: list[bool]) -> list[bool]:
    """The inputs of a body that are keys; what a loop carries may be one from the next turn on."""
    scan, loop = _jax.scan_parts(eqn), _jax.while_parts(eqn)
    carried = slice(0, 0) if loop is None else slice(loop.body_nconsts, None)
    if scan is not None:
        carried = slice(scan.num_consts, scan.num_consts + scan.num_carry)
    while True:
        inner = _keys(body, outs)
        back = inner[carried]
        turned = [a or b for a, b in zip(outs, back, strict=False)] + outs[len(back) :]
        if turned == outs:
            return inner
        outs = turned


# tracing ------------------------------------------------------------------------------------------


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
    given = {'params': params, 'carry': carry, 'inputs': tuple(inputs)}
    parts = (leaves_of(tree, name) for name, tree in given.items())
    keys, leaves, trees = zip(*parts, strict=True)
    avals = [[abstract(x) for x in each] for each in leaves]
    # what is known of the results once the cell was called
    n_outputs, out_tree, new_keys, new_tree = 0, None, (), None

    def step(*values):
        """The cell as a function of the leaves of all its arguments, one after the other."""
        nonlocal n_outputs, out_tree, new_keys, new_tree
        it = iter(values)
        args = [jax.tree.unflatten(t, [next(it) for _ in a]) for t, a in zip(trees, avals)]
        try:
            result = cell(*args[:2], *args[2])
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
        new_keys, new, new_tree = leaves_of(new_carry, 'the new carry')
        check_arrays(outputs, 'outputs')
        out_leaves, out_tree = jax.tree.flatten(outputs)
        n_outputs = len(out_leaves)
        new_leaves = (x if hasattr(x, 'dtype') else jnp.asarray(x) for x in new)
        return [*map(jnp.asarray, out_leaves), *new_leaves]

    jaxpr, consts = _jax.trace(step, *(a for part in avals for a in part))
    old = dict(zip(keys[1], avals[1], strict=True))
    new = dict(zip(new_keys, (v.aval for v in jaxpr.outvars[n_outputs:]), strict=True))
    _check_carry(old, new, new_tree == trees[1])
    raw = raw_keys(jaxpr, len(avals[1]), len(avals[0]))
    return Step(
        jaxpr=jaxpr,
        consts=consts,
        avals=tuple(avals),
        param_keys=keys[0],
        carry_keys=keys[1],
        n_outputs=n_outputs,
        trees={**dict(zip(given, trees)), 'outputs': out_tree},
        raw_keys=frozenset(keys[1][c] for c in raw),
    )


def _check_carry(old: dict, new: dict, same_tree: bool) -> None:
    """Of the old and the new carry the description of each leaf, by path."""
    lines = [f'  {path_name(n, "carry")}: missing in the new carry' for n in old if n not in new]
    lines += [f'  {path_name(n, "carry")}: added in the new carry' for n in new if n not in old]
    lines += [
        f'  {path_name(n, "carry")}: {describe_aval(old[n])} before the step, '
        f'{describe_aval(new[n])} after it'
        for n in old
        if n in new and (old[n].shape, old[n].dtype) != (new[n].shape, new[n].dtype)
    ]
    if not lines and not same_tree:
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
    jaxpr, *_ = _jax.opened(fn, (values, *args))
    # dead code elimination from the result back
    live = {v for v in jaxpr.outvars[:1] if not isinstance(v, _jax.Literal)}
    for eqn in reversed(jaxpr.eqns):
        if not live.isdisjoint(eqn.outvars):
            live.update(v for v in eqn.invars if not isinstance(v, _jax.Literal))
    treedef = jax.tree.structure((values, *args))
    slots = jax.tree.unflatten(treedef, [v in live for v in jaxpr.invars])[0]
    return [any(jax.tree.leaves(s)) for s in slots]


def is_holomorphic(fn: Callable, values: list, *args) -> bool:
    """Whether ``fn(values, *args)`` is known to be holomorphic in complex ``values``."""
    jaxpr, *_ = _jax.opened(fn, (values, *args))
    reads = {*jaxpr.invars[: len(values)]}
    for eqn in jaxpr.eqns:
        if any(not isinstance(v, _jax.Literal) and v in reads for v in eqn.invars):
            makes_real = any(is_inexact(v.aval) and not is_complex(v.aval) for v in eqn.outvars)
            if makes_real or not primitives.TABLE[eqn.primitive.name].holomorphic:
                return False
            reads.update(eqn.outvars)
    return True
