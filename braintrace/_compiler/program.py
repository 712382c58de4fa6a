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
from .._errors import CompileError, NotSupportedError, StructureError
from .._etrace_op import is_etp_primitive

__all__ = ['ELEMENTWISE', 'Equation', 'Program', 'check_arrays', 'depends', 'describe_aval', 'is_inexact', 'path_key',
           'path_name', 'trace_step']

FOLD_LIMIT = 1 << 16
ELEMENTWISE = {
    'abs', 'acos', 'acosh', 'add', 'add_any', 'asin', 'asinh', 'atan', 'atan2', 'atanh', 'cbrt', 'ceil', 'clamp', 'complex', 'conj',
    'convert_element_type', 'copy', 'copy_p', 'cos', 'cosh', 'device_put', 'digamma', 'div', 'erf', 'erf_inv', 'erfc', 'exp', 'exp2',
    'expm1', 'floor', 'igamma', 'imag', 'integer_pow', 'lgamma', 'log', 'log1p', 'logistic', 'max', 'min', 'mul', 'name', 'neg',
    'nextafter', 'polygamma', 'pow', 'pvary', 'real', 'reduce_precision', 'rem', 'round', 'rsqrt', 'select_n', 'sign', 'sin', 'sinh',
    'sqrt', 'square', 'sub', 'tan', 'tanh'}


@dataclass(frozen=True)
class Equation:
    """One primitive application; ``ins`` and ``outs`` are value numbers."""
    primitive: Any
    params: dict
    ctx: Any
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    where: str
    effects: bool = False

    def evaluate(self, args: Sequence) -> list:
        return _jax.bind(self.primitive, self.params, self.ctx, *args)

    def holds_op(self) -> bool:
        """Whether an ETP op stands inside a jaxpr that this equation carries."""
        return any(_holds_op(j) for j in _jax.sub_jaxprs(self.params))


def _holds_op(jaxpr) -> bool:
    jaxpr = getattr(jaxpr, 'jaxpr', jaxpr)
    return any(is_etp_primitive(e.primitive) or any(_holds_op(j) for j in _jax.sub_jaxprs(e.params)) for e in jaxpr.eqns)


@dataclass(frozen=True)
class Program:
    """One step ``(params, carry, *inputs) -> (outputs, carry)`` as numbered values and flat equations.

    ``hidden`` holds positions in ``carry``; ``trainable`` positions in ``params``. ``constants`` maps a value number to its
    array. Trees rebuild the user's structures from flat leaves.
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
    def ops(self) -> tuple[int, ...]:
        """The equations that are ETP ops."""
        return tuple(i for i, e in enumerate(self.equations) if is_etp_primitive(e.primitive))

    @property
    def param_names(self) -> tuple[str, ...]:
        return tuple(map(path_name, self.param_keys))

    @property
    def carry_names(self) -> tuple[str, ...]:
        return tuple(map(path_name, self.carry_keys))


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


def path_name(key: tuple[str, ...]) -> str:
    """The printed form of a path: parts joined by ``/``, ``.`` for a bare array."""
    return '/'.join(_escape(p) for p in key) or '.'


def _flatten(tree, what: str):
    with_paths, treedef = jax.tree_util.tree_flatten_with_path(tree)
    keys = tuple(path_key(p) for p, _ in with_paths)
    if len(set(keys)) != len(keys):
        twice = sorted({path_name(k) for k in keys if keys.count(k) > 1})
        raise StructureError(f'two leaves of {what} have the same path: {twice}. Give them different keys.')
    check_arrays(tree, what)
    return keys, [leaf for _, leaf in with_paths], treedef


def check_arrays(tree, what: str) -> None:
    """Refuse leaves that are no arrays or numbers."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not hasattr(leaf, 'dtype') and not isinstance(leaf, bool | int | float | complex):
            raise StructureError(f'{what} leaf {path_name(path_key(path))!r} is {type(leaf).__name__}, not an array. '
                                 f'Keep Python objects out of {what}, or close over them.')


def abstract(leaf):
    """The shape and dtype of a leaf, never the leaf itself: an outer transformation is not seen."""
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct | _jax.ShapedArray) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, 'weak_type', False))


class _Flattener:
    """Inlines nested calls and numbers every value."""

    def __init__(self):
        self.avals: list = []
        self.equations: list[Equation] = []
        self.constants: dict[int, Any] = {}

    def new(self, aval) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def constant(self, value, aval=None) -> int:
        number = self.new(aval if aval is not None else jax.typeof(value))
        self.constants[number] = value
        return number

    def run(self, jaxpr, args: Sequence[int], outer: str) -> list[int]:
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

        def read(atom) -> int:
            return self.constant(atom.val, atom.aval) if isinstance(atom, _jax.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            ins = [read(a) for a in eqn.invars]
            env.update(zip(eqn.outvars, self.equation(eqn, ins, outer), strict=True))
        return [read(a) for a in jaxpr.outvars]

    def equation(self, eqn, ins: list[int], outer: str) -> list[int]:
        where, body = _jax.location(eqn.source_info) or outer, _jax.inlinable(eqn)
        if body is not None:
            return self.call(*_jax.closed_jaxpr(body), ins, where)
        if eqn.primitive.name in ELEMENTWISE:
            ins = [self.widen(i, eqn, where) for i in ins]
        outs = [self.new(v.aval) for v in eqn.outvars]
        flat = Equation(eqn.primitive, eqn.params, eqn.ctx, tuple(ins), tuple(outs), where, bool(eqn.effects))
        if not self.fold(flat):
            self.equations.append(flat)
        return outs

    def widen(self, value: int, eqn, where: str) -> int:
        """Make the implicit broadcast of an element-wise operand an equation of its own, so that it can be cut alone."""
        aval, shape = self.avals[value], eqn.outvars[0].aval.shape
        if aval.shape == shape or value in self.constants or not is_inexact(aval):
            return value
        out = self.new(aval.update(shape=shape))
        params = dict(shape=shape, broadcast_dimensions=tuple(range(len(aval.shape))), sharding=None)
        self.equations.append(Equation(jax.lax.broadcast_in_dim_p, params, eqn.ctx, (value,), (out,), where))
        return out

    def call(self, jaxpr, consts, ins: list[int], outer: str) -> list[int]:
        """Inline a jaxpr; ``outer`` is the place of the call, for equations that know none of their own."""
        return self.run(jaxpr, [*map(self.constant, consts), *ins], outer)

    def fold(self, eqn: Equation) -> bool:
        """Evaluate small integer equations of constants, so that static indices are known."""
        if not eqn.outs or eqn.effects or not all(i in self.constants for i in eqn.ins):
            return False
        plain = all(isinstance(self.avals[v].dtype, np.dtype) for v in (*eqn.ins, *eqn.outs))
        if not plain or any(is_inexact(self.avals[o]) or self.avals[o].size > FOLD_LIMIT for o in eqn.outs):
            return False
        with jax.ensure_compile_time_eval():
            values = eqn.evaluate([self.constants[i] for i in eqn.ins])
        self.constants.update({o: np.asarray(v) for o, v in zip(eqn.outs, values, strict=True)})
        return True


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
            raise CompileError(f'the cell returned {type(result).__name__}; return a pair (outputs, new_carry).')
        outputs, new_carry = result
        got.carry_names, new_leaves, got.carry_tree = _flatten(new_carry, 'the new carry')
        out_leaves, got.out_tree = jax.tree.flatten(outputs)
        got.n_outputs = len(out_leaves)
        return [*map(jnp.asarray, out_leaves), *(x if hasattr(x, 'dtype') else jnp.asarray(x) for x in new_leaves)]

    return step


def _check_carry(names, avals, new_names, new_avals, same_tree: bool) -> None:
    old, new = dict(zip(names, avals, strict=True)), dict(zip(new_names, new_avals, strict=True))
    lines = [f'  {path_name(n)}: missing in the new carry' for n in old if n not in new]
    lines += [f'  {path_name(n)}: added in the new carry' for n in new if n not in old]
    lines += [f'  {path_name(n)}: {describe_aval(old[n])} before the step, {describe_aval(new[n])} after it' for n in old
              if n in new and (old[n].shape, old[n].dtype) != (new[n].shape, new[n].dtype)]
    if not lines and not same_tree:
        lines = ['  same paths, but the tree (or a physical unit in it) differs']
    if lines:
        raise StructureError('a step must return a carry of the structure, shapes and dtypes that it got:\n' + '\n'.join(lines)
                             + '\nCast or reshape the state inside the step, or initialise it with what the step returns.')


def trace_step(cell: Callable, params, carry, inputs: tuple, *, trainable: Callable, hidden: Callable) -> Program:
    """Trace ``cell`` on shapes and dtypes and flatten it.

    ``trainable`` and ``hidden`` are predicates ``(path, leaf) -> bool``; only leaves of inexact dtype are asked.
    """
    param_keys, param_leaves, params_tree = _flatten(params, 'params')
    carry_keys, carry_leaves, carry_tree = _flatten(carry, 'carry')
    _, input_leaves, inputs_tree = _flatten(tuple(inputs), 'inputs')
    got, groups = _Traced(), (param_leaves, carry_leaves, input_leaves)
    avals = [[abstract(leaf) for leaf in leaves] for leaves in groups]
    step = _flat_step(cell, (params_tree, carry_tree, inputs_tree), got)
    jaxpr, consts = _jax.trace(step, *(a for part in avals for a in part))
    flat = _Flattener()
    numbers = [[flat.new(a) for a in part] for part in avals]
    outs = flat.call(jaxpr, consts, [n for part in numbers for n in part], 'an unknown place')
    _check_carry(carry_keys, avals[1], got.carry_names, [flat.avals[o] for o in outs[got.n_outputs:]],
                 got.carry_tree == carry_tree)
    equations = _alive(flat.equations, outs)
    _refuse_derived_ops(equations)
    _refuse_nested_ops(equations, {outs[got.n_outputs + c] for c in _select(hidden, carry_keys, avals[1])})
    return Program(
        avals=tuple(flat.avals), params=tuple(numbers[0]), carry=tuple(numbers[1]), inputs=tuple(numbers[2]),
        constants=flat.constants, equations=equations, outputs=tuple(outs[:got.n_outputs]), new_carry=tuple(outs[got.n_outputs:]),
        param_keys=param_keys, carry_keys=carry_keys, hidden=_select(hidden, carry_keys, avals[1]),
        trainable=_select(trainable, param_keys, avals[0]),
        trees=dict(params=params_tree, carry=carry_tree, inputs=inputs_tree, outputs=got.out_tree))


def _alive(equations: Sequence[Equation], results: Sequence[int]) -> tuple[Equation, ...]:
    """Equations that lead to a result or have a side effect."""
    wanted, kept = set(results), []
    for eqn in reversed(equations):
        if eqn.effects or not wanted.isdisjoint(eqn.outs):
            kept.append(eqn)
            wanted.update(eqn.ins)
    return tuple(reversed(kept))


def _select(predicate, names, avals) -> tuple[int, ...]:
    return tuple(i for i, (n, a) in enumerate(zip(names, avals, strict=True)) if is_inexact(a) and predicate(n, a))


def _refuse_nested_ops(equations: Sequence[Equation], hidden: set[int]) -> None:
    """Refuse an op inside another equation's jaxpr that leads to a new hidden state: its trace would be lost."""
    wanted = set(hidden)
    for eqn in reversed(equations):
        if not wanted.isdisjoint(eqn.outs):
            wanted.update(eqn.ins)
            if eqn.holds_op():
                raise NotSupportedError(
                    f'{eqn.where}: an ETP op stands inside {eqn.primitive.name} on the way to a hidden state, where its trace would be '
                    'lost. Write this part as straight-line code (jnp.where instead of cond, an unrolled loop instead of scan).')


def _refuse_derived_ops(equations) -> None:
    for eqn in equations:
        if is_etp_primitive(eqn.primitive) and getattr(eqn.primitive, 'original', None) is not None:
            raise NotSupportedError(
                f'{eqn.where}: {eqn.primitive.original} is mapped by jax.vmap over its weights inside the step. Write the op on '
                'one batch, or map the compiled learner instead (jax.vmap around it).')


def depends(fn: Callable, values: list, *args) -> list[bool]:
    """Whether the result of ``fn(values, *args)`` depends on each entry of ``values``, by the equations of its jaxpr."""
    jaxpr = _jax.closed_jaxpr(jax.make_jaxpr(fn)(values, *args))[0]
    live = {v for v in jaxpr.outvars[:1] if not isinstance(v, _jax.Literal)}
    for eqn in reversed(jaxpr.eqns):
        if not live.isdisjoint(eqn.outvars):
            live.update(v for v in eqn.invars if not isinstance(v, _jax.Literal))
    slots = jax.tree.unflatten(jax.tree.structure((values, *args)), [v in live for v in jaxpr.invars])[0]
    return [any(jax.tree.leaves(s)) for s in slots]
