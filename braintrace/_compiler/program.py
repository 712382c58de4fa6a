"""The step of a model as a flat program: values are integers, equations are records, calls are inlined."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._errors import CompileError, StructureError
from .._etrace_op import is_etp_primitive
from .split import Split

__all__ = ['BEGIN', 'ELEMENTWISE', 'END', 'Equation', 'Loop', 'Program', 'Region', 'Remat', 'Step', 'alive', 'check_arrays', 'depends',
           'describe_aval', 'holds_op', 'is_inexact', 'param_name', 'path_key', 'path_name', 'select', 'trace_step']

ELEMENTWISE = {
    'abs', 'acos', 'acosh', 'add', 'add_any', 'asin', 'asinh', 'atan', 'atan2', 'atanh', 'bessel_i0e', 'bessel_i1e', 'cbrt', 'ceil',
    'clamp', 'complex', 'conj', 'convert_element_type', 'copy', 'copy_p', 'cos', 'cosh', 'device_put', 'digamma', 'div', 'erf',
    'erf_inv', 'erfc', 'exp', 'exp2', 'expm1', 'floor', 'igamma', 'igammac', 'imag', 'integer_pow', 'lgamma', 'log', 'log1p', 'log2',
    'logistic', 'max', 'min', 'mul', 'name', 'neg', 'nextafter', 'one_minus_square', 'polygamma', 'pow', 'pvary', 'real',
    'reduce_precision', 'regularized_incomplete_beta', 'rem', 'round', 'rsqrt', 'select_n', 'sharding_constraint', 'sign', 'sin',
    'sinh', 'sqrt', 'square', 'sub', 'tan', 'tanh', 'zeta'}


@dataclass(frozen=True, eq=False)
class Remat:
    """A region that is recomputed in the backward pass, as ``jax.checkpoint`` asks."""
    policy: Any
    prevent_cse: Any


@dataclass(frozen=True, eq=False)
class Loop:
    """A region that runs ``length`` times.

    Two marker equations enclose it, slot by slot: ``BEGIN`` maps (initial carry, sequences) to (carry, slices), ``END`` maps
    (new carry, slices) to (last carry, sequences).
    """
    length: int
    reverse: bool
    unroll: Any
    num_carry: int
    where: str
    origin: Any


Region = Remat | Loop


@dataclass(frozen=True)
class Marker:
    """Stands where an equation has its primitive."""
    name: str


BEGIN, END = Marker('loop_begin'), Marker('loop_end')


@dataclass(frozen=True)
class Equation:
    """One primitive application; ``ins`` and ``outs`` are value numbers.

    ``scope``: the regions around it, outermost first. ``loop``: set on the two markers of a loop. ``conditional``: it stands in a
    branch. ``origin``: the jaxpr's equation, of control flow that is left as it is.
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

    def evaluate(self, args: Sequence) -> list:
        return _jax.bind(self.primitive, self.params, self.ctx, *args)

    def holds_op(self) -> bool:
        """Whether an ETP op stands inside a jaxpr that this equation carries."""
        return any(map(holds_op, _jax.sub_jaxprs(self.params)))

    @property
    def repeats(self) -> tuple[int, ...]:
        """The lengths of the loops around it."""
        return tuple(r.length for r in self.scope if isinstance(r, Loop))


def holds_op(jaxpr) -> bool:
    """Whether an ETP op stands in a jaxpr, at any depth."""
    jaxpr = getattr(jaxpr, 'jaxpr', jaxpr)
    return any(is_etp_primitive(e.primitive) or any(map(holds_op, _jax.sub_jaxprs(e.params))) for e in jaxpr.eqns)


@dataclass(frozen=True)
class Program:
    """One step ``(params, carry, *inputs) -> (outputs, carry)`` as numbered values and flat equations.

    ``hidden`` holds positions in ``carry``; ``trainable`` positions in ``params``. ``constants`` maps a value number to its
    array. Trees rebuild the user's structures from flat leaves. ``leaf_keys``: the paths of the
    leaves of the cell's carry; ``splits``: for each of them the hidden states that it holds, None
    where it is one entry of ``carry`` as it is; empty if no leaf is split.
    """
    avals: tuple
    params: tuple[int, ...]
    carry: tuple[int, ...]
    inputs: tuple[int, ...]
    constants: dict[int, Any]
    equations: tuple[Equation, ...]
    outputs: tuple[int, ...]
    new_carry: tuple[int, ...]
    param_keys: tuple[tuple[str, ...], ...]
    carry_keys: tuple[tuple[str, ...], ...]
    hidden: tuple[int, ...]
    trainable: tuple[int, ...]
    trees: dict[str, Any]
    leaf_keys: tuple[tuple[str, ...], ...]
    splits: tuple[Split | None, ...] = ()

    def apart(self, leaves: Sequence) -> list:
        """The carry as the program has it, from the leaves that the cell has."""
        if not self.splits:
            return list(leaves)
        parts = [[x] if s is None else s.apart(x) for x, s in zip(leaves, self.splits, strict=True)]
        return [x for part in parts for x in part]

    def together(self, carry: Sequence) -> list:
        """The inverse of :meth:`apart`."""
        if not self.splits:
            return list(carry)
        parts = ([carry[c] for c in self.pieces(leaf)] for leaf in range(len(self.splits)))
        return [part[0] if s is None else s.together(part)
                for part, s in zip(parts, self.splits, strict=True)]

    def pieces(self, leaf: int) -> range:
        """The positions in the carry of what one leaf of the cell's carry holds."""
        if not self.splits:
            return range(leaf, leaf + 1)
        sizes = [1 if s is None else len(s.places) for s in self.splits[:leaf + 1]]
        return range(sum(sizes[:-1]), sum(sizes))

    def old_states(self, leaves: Sequence) -> list:
        """The hidden states in the leaves of the cell's carry."""
        carry = self.apart(leaves)
        return [carry[c] for c in self.hidden]

    def with_states(self, leaves: Sequence, hidden: Sequence) -> list:
        """The leaves of the cell's carry with other hidden states."""
        carry = self.apart(leaves)
        for c, h in zip(self.hidden, hidden, strict=True):
            carry[c] = h
        return self.together(carry)

    @cached_property
    def leaf_avals(self) -> list:
        """Shape and dtype of each leaf of the cell's carry."""
        return [self.avals[self.carry[self.pieces(leaf)[0]]] if s is None else s.aval
                for leaf, s in enumerate(self.splits or [None] * len(self.carry))]

    @cached_property
    def producer(self) -> dict[int, int]:
        """Which equation makes a value."""
        return {v: i for i, e in enumerate(self.equations) for v in e.outs}

    @cached_property
    def consumers(self) -> dict[int, list[int]]:
        """Which equations read a value, in program order."""
        found: dict[int, list[int]] = {}
        for i, eqn in enumerate(self.equations):
            for v in dict.fromkeys(eqn.ins):
                found.setdefault(v, []).append(i)
        return found

    @cached_property
    def begin_of(self) -> dict[int, int]:
        """The end marker of each loop -> its begin marker."""
        begins = {id(e.loop): i for i, e in enumerate(self.equations) if e.primitive is BEGIN}
        return {i: begins[id(e.loop)] for i, e in enumerate(self.equations) if e.primitive is END}

    @cached_property
    def end_of(self) -> dict[int, int]:
        """The begin marker of each loop -> its end marker."""
        return {b: e for e, b in self.begin_of.items()}

    def feedback(self, i: int) -> list[tuple[int, int]]:
        """For a marker: the carry of an iteration with what becomes it at the end of the iteration."""
        begin, end = self.equations[self.begin_of.get(i, i)], self.equations[self.end_of.get(i, i)]
        return list(zip(begin.outs, end.ins, strict=False))[:begin.loop.num_carry]

    def results(self, i: int, value: int) -> list[int]:
        """What depends on ``value`` through equation ``i``."""
        eqn = self.equations[i]
        if eqn.loop is None:
            return list(eqn.outs)
        found = [o for v, o in zip(eqn.ins, eqn.outs, strict=True) if v == value]
        return found + [first for first, last in self.feedback(i) if last == value and eqn.primitive is END]

    def operands(self, i: int, value: int) -> list[int]:
        """What ``value``, made by equation ``i``, depends on."""
        eqn = self.equations[i]
        if eqn.loop is None:
            return list(eqn.ins)
        found = [v for v, o in zip(eqn.ins, eqn.outs, strict=True) if o == value]
        return found + [last for first, last in self.feedback(i) if first == value and eqn.primitive is BEGIN]

    @cached_property
    def ops(self) -> tuple[int, ...]:
        """The equations that are ETP ops."""
        return tuple(i for i, e in enumerate(self.equations) if is_etp_primitive(e.primitive))

    @cached_property
    def blocks(self) -> frozenset[int]:
        """Equations that no gradient passes: ``stop_gradient``, and those that make integers or booleans only."""
        return frozenset(i for i, e in enumerate(self.equations) if e.loop is None and (
            e.primitive.name == 'stop_gradient' or not any(is_inexact(self.avals[o]) for o in e.outs)))

    @cached_property
    def op_set(self) -> frozenset[int]:
        return frozenset(self.ops)

    @cached_property
    def param_names(self) -> tuple[str, ...]:
        return tuple(path_name(k, 'params') for k in self.param_keys)

    @cached_property
    def carry_names(self) -> tuple[str, ...]:
        return tuple(path_name(k, 'carry') for k in self.carry_keys)


def is_inexact(aval) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def describe_aval(aval) -> str:
    """Dtype and shape, as in messages."""
    return f'{aval.dtype}{list(aval.shape)}'


def _escape(part: str) -> str:
    return part.replace('~', '~0').replace('/', '~1')


def path_key(path) -> tuple[str, ...]:
    """A pytree key path as a tuple of strings; a key that is itself a tuple counts as several parts."""
    parts: list[str] = []
    for key in path:
        value = next((getattr(key, n) for n in ('key', 'name', 'idx') if hasattr(key, n)), key)
        parts.extend(map(str, value if isinstance(value, tuple) else (value,)))
    return tuple(parts)


def path_name(key: tuple[str, ...], bare: str = '.') -> str:
    """The printed form of a path: parts joined by ``/``; ``bare`` where the tree is one array."""
    return '/'.join(_escape(p) for p in key) or bare


def param_name(path) -> str:
    """The name of a parameter at a pytree key path."""
    return path_name(path_key(path), 'params')


def _flatten(tree, what: str):
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    keys = tuple(path_key(p) for p, _ in with_paths)
    if len(set(keys)) != len(keys):
        twice = sorted({path_name(k, what) for k in keys if keys.count(k) > 1})
        raise StructureError(f'two leaves of {what} have the same path: {twice}. Give them different keys.')
    check_arrays(tree, what)
    return keys, [leaf for _, leaf in with_paths], treedef


def check_arrays(tree, what: str) -> None:
    """Refuse leaves that are no arrays or numbers."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not hasattr(leaf, 'dtype') and not isinstance(leaf, bool | int | float | complex):
            raise StructureError(f'{what} leaf {path_name(path_key(path), what)!r} is {type(leaf).__name__}, not an array. '
                                 f'Keep Python objects out of {what}, or close over them.')


def abstract(leaf):
    """The shape and dtype of a leaf, never the leaf itself: an outer transformation is not seen."""
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct | _jax.ShapedArray) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, 'weak_type', False))


@dataclass
class _Traced:
    out_tree: Any = None
    carry_tree: Any = None
    carry_names: tuple = ()
    n_outputs: int = 0
    inputs_tree: Any = field(default=None)


def _flat_step(cell: Callable, trees, got: _Traced):
    params_tree, carry_tree, inputs_tree = trees
    sizes = np.cumsum([params_tree.num_leaves, carry_tree.num_leaves])

    def step(*leaves):
        params, carry, inputs = (jax.tree.unflatten(t, part) for t, part in zip(
            trees, (leaves[:sizes[0]], leaves[sizes[0]:sizes[1]], leaves[sizes[1]:]), strict=True))
        result = cell(params, carry, *inputs)
        if not (isinstance(result, tuple) and len(result) == 2):
            found = f'a tuple of {len(result)}' if isinstance(result, tuple) else type(result).__name__
            raise CompileError(f'the cell returned {found}; return a pair (outputs, new_carry).')
        outputs, new_carry = result
        got.carry_names, new_leaves, got.carry_tree = _flatten(new_carry, 'the new carry')
        check_arrays(outputs, 'outputs')
        out_leaves, got.out_tree = jax.tree.flatten(outputs)
        got.n_outputs = len(out_leaves)
        return [*map(jnp.asarray, out_leaves), *(x if hasattr(x, 'dtype') else jnp.asarray(x) for x in new_leaves)]

    return step


def _check_carry(names, avals, new_names, new_avals, same_tree: bool) -> None:
    old, new = dict(zip(names, avals, strict=True)), dict(zip(new_names, new_avals, strict=True))
    lines = [f'  {path_name(n, "carry")}: missing in the new carry' for n in old if n not in new]
    lines += [f'  {path_name(n, "carry")}: added in the new carry' for n in new if n not in old]
    lines += [f'  {path_name(n, "carry")}: {describe_aval(old[n])} before the step, {describe_aval(new[n])} after it' for n in old
              if n in new and (old[n].shape, old[n].dtype) != (new[n].shape, new[n].dtype)]
    if not lines and not same_tree:
        lines = ['  same paths, but the tree (or a physical unit in it) differs']
    if lines:
        raise StructureError('a step must return a carry of the structure, shapes and dtypes that it got:\n' + '\n'.join(lines)
                             + '\nCast or reshape the state inside the step, or initialise it with what the step returns.')


@dataclass(frozen=True)
class Step:
    """A traced step before it is flattened: the jaxpr with what rebuilds the user's structures."""
    jaxpr: Any
    consts: list
    avals: tuple[list, list, list]
    param_keys: tuple
    carry_keys: tuple
    n_outputs: int
    trees: dict[str, Any]


def trace_step(cell: Callable, params, carry, inputs: tuple) -> Step:
    """Trace ``cell`` on shapes and dtypes."""
    param_keys, param_leaves, params_tree = _flatten(params, 'params')
    carry_keys, carry_leaves, carry_tree = _flatten(carry, 'carry')
    _, input_leaves, inputs_tree = _flatten(tuple(inputs), 'inputs')
    got = _Traced()
    avals = [abstract(x) for x in param_leaves], [abstract(x) for x in carry_leaves], [abstract(x) for x in input_leaves]
    step = _flat_step(cell, (params_tree, carry_tree, inputs_tree), got)
    jaxpr, consts = _jax.trace(step, *(a for part in avals for a in part))
    _check_carry(carry_keys, avals[1], got.carry_names, [v.aval for v in jaxpr.outvars[got.n_outputs:]], got.carry_tree == carry_tree)
    trees = dict(params=params_tree, carry=carry_tree, inputs=inputs_tree, outputs=got.out_tree)
    return Step(jaxpr, consts, avals, param_keys, carry_keys, got.n_outputs, trees)


def alive(equations: Sequence[Equation], results: Sequence[int]) -> tuple[Equation, ...]:
    """Equations that lead to a result or have a side effect, and the loops around those."""
    wanted, kept, loops = set(results), [], set()
    for eqn in equations:
        if eqn.effects:
            loops.update(id(r) for r in eqn.scope)
    for eqn in reversed(equations):
        if eqn.effects or not wanted.isdisjoint(eqn.outs) or id(eqn.loop) in loops:
            kept.append(eqn)
            wanted.update(eqn.ins)
            if eqn.loop is not None:
                loops.add(id(eqn.loop))
    return tuple(reversed(kept))


def select(predicate, names, avals) -> tuple[int, ...]:
    """Positions of the leaves of inexact dtype that a predicate ``(path, leaf) -> bool`` chooses."""
    return tuple(i for i, (n, a) in enumerate(zip(names, avals, strict=True)) if is_inexact(a) and predicate(n, a))


def depends(fn: Callable, values: list, *args) -> list[bool]:
    """Whether the result of ``fn(values, *args)`` depends on each entry of ``values``, by the equations of its jaxpr."""
    jaxpr = _jax.closed_jaxpr(jax.make_jaxpr(fn)(values, *args))[0]
    live = {v for v in jaxpr.outvars[:1] if not isinstance(v, _jax.Literal)}
    for eqn in reversed(jaxpr.eqns):
        if not live.isdisjoint(eqn.outvars):
            live.update(v for v in eqn.invars if not isinstance(v, _jax.Literal))
    slots = jax.tree.unflatten(jax.tree.structure((values, *args)), [v in live for v in jaxpr.invars])[0]
    return [any(jax.tree.leaves(s)) for s in slots]
