"""From a jaxpr to a flat program: calls are inlined, control flow becomes selects, copies or marked regions."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _jax
from .._errors import NotSupportedError
from .._etrace_op import is_etp_primitive
from .forward_mode import forward_derivative
from .policy import DEFAULT, Policy
from .program import BEGIN, ELEMENTWISE, END, Equation, Loop, Program, Region, Remat, Step, alive, is_inexact, select
from .unshard import unsharded

__all__ = ['Decisions', 'extending', 'flatten']

FOLD_LIMIT = 1 << 16


@dataclass
class Decisions:
    """How to lower control flow, by ``id`` of the jaxpr's equation; what was traced for it is kept, so that ids stay."""
    modes: dict[int, Any] = field(default_factory=dict)
    expansions: dict[tuple, tuple] = field(default_factory=dict)
    guarded: set[int] = field(default_factory=set)

    def update(self, found: dict[int, Any]) -> None:
        """Take over decisions; two uses of one loop share the operands that either must be differentiated for."""
        for key, mode in found.items():
            old = self.modes.get(key)
            self.modes[key] = mode | old if isinstance(mode, frozenset) and isinstance(old, frozenset) else mode


@dataclass
class _Branch:
    """A branch that is being lowered; ``taken`` is its predicate, joined with those around it.

    ``inside``: values that only reach outside values through a gate; ``made``: pure equations of the branch, by result.
    """
    taken: int
    inside: set[int] = field(default_factory=set)
    gated: dict[int, int] = field(default_factory=dict)
    made: dict[int, Equation] = field(default_factory=dict)


def _gate(taken, x):
    """x, whose cotangent is zero where the branch is not taken, whatever came back."""
    return jax.lax.select_n(taken, jax.lax.stop_gradient(x), x)


def _zero_unless(taken, x):
    return jax.lax.select_n(taken, jnp.zeros_like(x), x)


class _Flattener:
    """Numbers values and appends equations; one list of equations for each open loop."""

    def __init__(self, policy: Policy, decisions: Decisions):
        self.policy, self.decisions = policy, decisions
        self.avals: list = []
        self.depth: list[int] = []
        self.constants: dict[int, Any] = {}
        self.pure: set[int] = set()
        self.bodies: list[list[Equation]] = [[]]
        self.scope: tuple[Region, ...] = ()
        self.branches: list[_Branch] = []

    # values ---------------------------------------------------------------------------------------

    def new(self, aval, depth: int | None = None) -> int:
        self.avals.append(aval)
        self.depth.append(len(self.bodies) - 1 if depth is None else depth)
        return len(self.avals) - 1

    def constant(self, value, aval=None) -> int:
        number = self.new(aval if aval is not None else jax.typeof(value), 0)
        self.constants[number] = value
        self.pure.add(number)
        return number

    def impure(self, values: Sequence[int]) -> None:
        """Note that these values stand behind the gates of every open branch."""
        for branch in self.branches:
            branch.inside.update(values)

    # equations ------------------------------------------------------------------------------------

    def run(self, jaxpr, args: Sequence[int], outer: str, fixed: bool = False) -> list[int]:
        """Lower a jaxpr; ``outer`` is the place of equations that know none of their own, or of all if ``fixed``."""
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

        def read(atom) -> int:
            return self.constant(atom.val, atom.aval) if isinstance(atom, _jax.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            where = outer if fixed else _jax.location(eqn.source_info) or outer
            env.update(zip(eqn.outvars, self.equation(eqn, [read(a) for a in eqn.invars], where, fixed), strict=True))
        return [read(a) for a in jaxpr.outvars]

    def call(self, jaxpr, consts, ins: Sequence[int], outer: str, fixed: bool = False) -> list[int]:
        return self.run(jaxpr, [*map(self.constant, consts), *ins], outer, fixed)

    def traced(self, fn: Callable, ins: Sequence[int], where: str) -> list[int]:
        """Lower a Python function of these values."""
        jaxpr, consts = _jax.trace(fn, *(self.avals[v] for v in ins))
        return self.call(jaxpr, consts, ins, where, fixed=True)

    def plain(self, fn: Callable, ins: Sequence[int], where: str) -> int:
        """Lower a function of one result, outside of any branch."""
        branches, self.branches = self.branches, []
        out, = self.traced(fn, ins, where)
        self.branches = branches
        return out

    def equation(self, eqn, ins: list[int], where: str, fixed: bool) -> list[int]:
        body = _jax.inlinable(eqn)
        if body is not None:
            return self.call(*_jax.closed_jaxpr(body), ins, where, fixed)
        remat, scan, cond = _jax.remat_parts(eqn), _jax.scan_parts(eqn), _jax.cond_parts(eqn)
        if remat is not None:
            region = () if self.policy.checkpoint == 'inline' else (Remat(remat.policy, remat.prevent_cse),)
            with self.within(*region):
                return self.call(remat.body, remat.consts, ins, where, fixed)
        if cond is not None and ins[0] in self.constants:
            return self.call(*cond.branches[int(self.constants[ins[0]])], ins[1:], where, fixed)
        if self.branches and _jax.while_parts(eqn) is not None and id(eqn) not in self.decisions.guarded:
            return self.guarded_loop(eqn, ins, where)
        decision = self.decisions.modes.get(id(eqn))
        if decision == 'select':
            return self.cond(cond, ins, where, fixed)
        if decision == 'unroll':
            return self.unrolled(scan, ins, where, fixed)
        if decision == 'descend':
            return self.loop(eqn, scan, ins, where, fixed)
        if decision == 'peel':
            return self.peeled(eqn, scan, ins, where, fixed)
        if isinstance(decision, frozenset):
            return self.expanded(eqn, lambda: forward_derivative(eqn, where, decision), ins, where, True)
        if decision == 'vmap':
            return self.expanded(eqn, lambda: unsharded(Equation(eqn.primitive, eqn.params, eqn.ctx, (), (), where)), ins, where, fixed)
        outs = self.apply(Equation(eqn.primitive, eqn.params, eqn.ctx, tuple(ins), (), where, bool(eqn.effects), origin=eqn),
                          [v.aval for v in eqn.outvars])
        return self.beside_y(eqn, ins, outs, where) if is_etp_primitive(eqn.primitive) else outs

    def beside_y(self, eqn, ins: list[int], outs: list[int], where: str) -> list[int]:
        """The results of an op that it has beside y, made by plain equations: its rules are about y alone."""
        y = eqn.primitive.y_outvar_index
        if all(k == y or isinstance(v, _jax.DropVar) for k, v in enumerate(eqn.outvars)):
            return outs
        plain = self.expanded(eqn, lambda: partial(eqn.primitive.impl_fn, **eqn.params), ins, where, True)
        return [out if k == y else other for k, (out, other) in enumerate(zip(outs, plain, strict=True))]

    def expanded(self, eqn, make: Callable, ins: list[int], where: str, fixed: bool, guarding: bool = False) -> list[int]:
        """Lower the function that stands for an equation."""
        key = id(eqn), self.decisions.modes.get(id(eqn)), tuple((self.avals[v].shape, str(self.avals[v].dtype)) for v in ins)
        if key not in self.decisions.expansions:
            self.decisions.expansions[key] = _jax.trace(make(), *(self.avals[v] for v in ins))
        jaxpr, consts = self.decisions.expansions[key]
        if guarding:
            self.decisions.guarded.update(map(id, jaxpr.eqns))
        return self.call(jaxpr, consts, ins, where, fixed)

    def guarded_loop(self, eqn, ins: list[int], where: str) -> list[int]:
        """A ``while`` in a branch, which must not run, perhaps forever, where the branch is not taken."""
        parts = _jax.while_parts(eqn)
        body_at = parts.cond_nconsts
        start = body_at + parts.body_nconsts

        def run(taken, *args):
            def lanes(carry):       # one flag for each lane of a loop under vmap
                return _jax.evaluate(parts.cond, parts.cond_consts, [*args[:body_at], *carry])[0]

            def go_on(carry):
                return jnp.logical_and(taken, jnp.any(lanes(carry)))

            def body(carry):
                flags, new = lanes(carry), _jax.evaluate(parts.body, parts.body_consts, [*args[body_at:start], *carry])
                return tuple(jnp.where(flags.reshape(flags.shape + (1,) * (n.ndim - flags.ndim)), n, o) if flags.ndim else n
                             for n, o in zip(new, carry, strict=True))
            return list(jax.lax.while_loop(go_on, body, tuple(args[start:])))

        return self.expanded(eqn, lambda: run, [self.branches[-1].taken, *ins], where, True, guarding=True)

    def apply(self, eqn: Equation, avals: Sequence) -> list[int]:
        pure = not eqn.effects and all(v in self.pure for v in eqn.ins)
        op = is_etp_primitive(eqn.primitive)
        if self.branches and eqn.effects:
            raise NotSupportedError(f'{eqn.where}: {eqn.primitive.name} has a side effect inside a branch of cond that also holds an op or '
                                    'a path between hidden states: it would happen whichever branch is taken. Move it out of the branch.')
        if self.branches and (op or not pure):
            eqn = replace(eqn, ins=self.guarded(eqn, op), conditional=True)
        if eqn.primitive.name in ELEMENTWISE:
            eqn = replace(eqn, ins=tuple(self.widen(v, eqn, avals[0].shape) for v in eqn.ins))
        outs = self.append(eqn, avals)
        if pure:
            self.pure.update(outs)
        if self.branches and pure and not op:
            self.branches[-1].made.update(dict.fromkeys(outs, replace(eqn, outs=tuple(outs))))
        elif self.branches:
            self.impure(outs)
        if self.branches and op:
            y = eqn.primitive.y_outvar_index
            outs[y] = self.plain(_gate, [self.branches[-1].taken, outs[y]], eqn.where)
            self.impure([outs[y]])
        return outs

    def append(self, eqn: Equation, avals: Sequence) -> list[int]:
        """Give an equation its results and its place; what no iteration changes goes before the loop."""
        here = len(self.bodies) - 1
        depth = here if eqn.effects or eqn.loop is not None else max((self.depth[v] for v in eqn.ins), default=0)
        outs = [self.new(a, depth) for a in avals]
        eqn = replace(eqn, outs=tuple(outs), scope=self.scope if depth == here else self.scope[:self.loop_at(depth)])
        if not self.fold(eqn):
            self.bodies[depth].append(eqn)
        return outs

    def loop_at(self, depth: int) -> int:
        """Where the loop inside ``depth`` others stands in the scope."""
        return [k for k, r in enumerate(self.scope) if isinstance(r, Loop)][depth]

    def widen(self, value: int, eqn: Equation, shape) -> int:
        """Make the implicit broadcast of an element-wise operand an equation of its own, so that it can be cut alone."""
        aval = self.avals[value]
        if aval.shape == shape or value in self.constants or not is_inexact(aval):
            return value
        params = dict(shape=shape, broadcast_dimensions=tuple(range(len(aval.shape))), sharding=None)
        wide, = self.append(Equation(jax.lax.broadcast_in_dim_p, params, eqn.ctx, (value,), (), eqn.where), [aval.update(shape=shape)])
        if value in self.pure:
            self.pure.add(wide)
        return wide

    def fold(self, eqn: Equation) -> bool:
        """Evaluate small integer equations of constants, so that static indices are known."""
        if not eqn.outs or eqn.effects or eqn.loop is not None or not all(i in self.constants for i in eqn.ins):
            return False
        plain = all(isinstance(self.avals[v].dtype, np.dtype) for v in (*eqn.ins, *eqn.outs))
        if not plain or any(is_inexact(self.avals[o]) or self.avals[o].size > FOLD_LIMIT for o in eqn.outs):
            return False
        with jax.ensure_compile_time_eval():
            values = eqn.evaluate([self.constants[i] for i in eqn.ins])
        self.constants.update({o: np.asarray(v) for o, v in zip(eqn.outs, values, strict=True)})
        return True

    @contextmanager
    def within(self, *regions: Region):
        before, self.scope = self.scope, (*self.scope, *regions)
        yield
        self.scope = before

    # branches -------------------------------------------------------------------------------------

    def cond(self, parts, ins: list[int], where: str, fixed: bool) -> list[int]:
        """Every branch, each behind gates, then a select: what a branch not taken computes reaches no gradient."""
        index, operands = ins[0], ins[1:]
        results = []
        for k, (body, consts) in enumerate(parts.branches):
            around = [b.taken for b in self.branches[-1:]]
            taken = self.plain(lambda i, *a, k=k: jnp.logical_and(i == k, *a) if a else i == k, [index, *around], where)
            self.branches.append(_Branch(taken))
            results.append(list(map(self.gated, self.call(body, consts, operands, where, fixed))))
            self.branches.pop()
        rows = list(zip(*results, strict=True))      # equal rows are one value: a state that is an output as well stays that state
        made = {cases: self.traced(jax.lax.select_n, [index, *cases], where)[0] if len(set(cases)) > 1 else cases[0]
                for cases in dict.fromkeys(rows)}
        return [made[cases] for cases in rows]

    def guarded(self, eqn: Equation, op: bool) -> tuple[int, ...]:
        """Operands behind the gates of the innermost branch; an op keeps its pure weights and reads zeros if not taken."""
        if not op:
            return tuple(map(self.gated, eqn.ins))
        weights = set(eqn.primitive.trainable_invars_fn(eqn.params).values())
        ins = [v if k in weights and v in self.pure else self.gated(v) for k, v in enumerate(eqn.ins)]
        x = eqn.primitive.x_invar_index
        if x is not None:
            ins[x] = self.plain(_zero_unless, [self.branches[-1].taken, ins[x]], eqn.where)
        return tuple(ins)

    def gated(self, value: int) -> int:
        """A value as an equation of the innermost branch reads it."""
        branch = self.branches[-1]
        if value in branch.inside or value in self.constants or not is_inexact(self.avals[value]):
            return value
        if value not in branch.gated:
            made = next((b.made[value] for b in self.branches if value in b.made), None)
            if made is None:
                keys: tuple[int, ...] = (value,)
                outs = [self.plain(_gate, [branch.taken, value], '')]
            else:
                keys = made.outs
                outs = self.append(replace(made, ins=tuple(map(self.gated, made.ins)), conditional=True), [self.avals[o] for o in keys])
            self.impure(outs)
            branch.gated.update(zip(keys, outs, strict=True))
        return branch.gated[value]

    # loops ----------------------------------------------------------------------------------------

    def unrolled(self, parts, ins: list[int], where: str, fixed: bool) -> list[int]:
        consts, carry, xs = _scan_operands(parts, ins)
        rows: dict[int, list[int]] = {}
        for t in reversed(range(parts.length)) if parts.reverse else range(parts.length):
            slices = [self.traced(lambda a, t=t: jax.lax.index_in_dim(a, t, keepdims=False), [x], where)[0] for x in xs]
            outs = self.call(parts.body, parts.consts, [*consts, *carry, *slices], where, fixed)
            carry, rows[t] = outs[:parts.num_carry], outs[parts.num_carry:]
        columns = zip(*(rows[t] for t in range(parts.length)), strict=True)
        if not rows:
            empty = [v.aval for v in parts.body.outvars[parts.num_carry:]]
            return [*carry, *(self.constant(jnp.zeros((0, *a.shape), a.dtype)) for a in empty)]
        return [*carry, *(self.traced(lambda *rows: jnp.stack(rows), column, where)[0] for column in columns)]

    def peeled(self, eqn, parts, ins: list[int], where: str, fixed: bool) -> list[int]:
        """A loop without its last iteration, then that iteration: what it reads of the last carry is the new state."""
        consts, init, xs = _scan_operands(parts, ins)
        n, first = parts.length - 1, int(parts.reverse)
        most = [self.traced(lambda a: jax.lax.slice_in_dim(a, first, first + n), [x], where)[0] for x in xs]
        last = [self.traced(lambda a: jax.lax.index_in_dim(a, 0 if first else n, keepdims=False), [x], where)[0] for x in xs]
        outs = self.loop(eqn, parts._replace(length=n), [*consts, *init, *most], where, fixed)
        ends = self.call(parts.body, parts.consts, [*consts, *outs[:parts.num_carry], *last], where, fixed)

        def join(rows, row):
            return jnp.concatenate([row[None], rows] if first else [rows, row[None]])
        rows = zip(outs[parts.num_carry:], ends[parts.num_carry:], strict=True)
        return [*ends[:parts.num_carry], *(self.traced(join, pair, where)[0] for pair in rows)]

    def loop(self, eqn, parts, ins: list[int], where: str, fixed: bool) -> list[int]:
        consts, init, xs = _scan_operands(parts, ins)
        if self.branches:
            init, xs = list(map(self.gated, init)), list(map(self.gated, xs))
        depth, invars = len(self.bodies), parts.body.invars[len(consts):]
        inner = [self.new(v.aval, depth) for v in invars]
        self.impure(inner)
        region = Loop(parts.length, parts.reverse, parts.unroll, len(init), where, eqn)
        self.bodies.append([])
        with self.within(region):
            outs = self.call(parts.body, parts.consts, [*consts, *inner], where, fixed)
            if self.branches:
                outs = list(map(self.gated, outs))
        body = self.bodies.pop()
        here, marker = self.bodies[-1], Equation(BEGIN, {}, None, (), (), where, scope=self.scope, loop=region)
        results = [self.new(v.aval if k < len(init) else v.aval.update(shape=(parts.length, *v.aval.shape)))
                   for k, v in enumerate(parts.body.outvars)]
        self.impure(results)
        here += [replace(marker, ins=(*init, *xs), outs=tuple(inner)), *body, replace(marker, primitive=END, ins=tuple(outs),
                                                                                  outs=tuple(results))]
        return self.with_last_rows(region, outs, results, where)

    def with_last_rows(self, region: Loop, outs: list[int], results: list[int], where: str) -> list[int]:
        """A sequence of a loop's carry ends in its last carry: who reads that row reads the new state, as if unrolled."""
        carry = dict(zip(outs[:region.num_carry], results, strict=False))

        def put(rows, last):
            return jnp.concatenate([last[None], rows[1:]] if region.reverse else [rows[:-1], last[None]])
        return [self.traced(put, [r, carry[o]], where)[0] if k >= region.num_carry and o in carry else r
                for k, (o, r) in enumerate(zip(outs, results, strict=True))]


def _scan_operands(parts, ins: list[int]) -> tuple[list[int], list[int], list[int]]:
    split = parts.num_consts, parts.num_consts + parts.num_carry
    return ins[:split[0]], ins[split[0]:split[1]], ins[split[1]:]


def flatten(step: Step, policy: Policy, decisions: Decisions, trainable: Callable, hidden: Callable) -> Program:
    """The flat program of a traced step, with control flow lowered as decided so far."""
    flat = _Flattener(policy, decisions)
    numbers = [[flat.new(a) for a in part] for part in step.avals]
    flat.pure.update(numbers[0])
    outs = flat.call(step.jaxpr, step.consts, [n for part in numbers for n in part], 'an unknown place')
    return Program(
        avals=tuple(flat.avals), params=tuple(numbers[0]), carry=tuple(numbers[1]), inputs=tuple(numbers[2]),
        constants=flat.constants, equations=alive(flat.bodies[0], outs), outputs=tuple(outs[:step.n_outputs]),
        new_carry=tuple(outs[step.n_outputs:]), param_keys=step.param_keys, carry_keys=step.carry_keys,
        leaf_keys=step.carry_keys,
        hidden=select(hidden, step.carry_keys, step.avals[1]), trainable=select(trainable, step.param_keys, step.avals[0]),
        trees=step.trees)


def extending(program: Program) -> _Flattener:
    """What makes equations of a program's values; it holds no equation yet."""
    flat = _Flattener(DEFAULT, Decisions())
    flat.avals, flat.depth = list(program.avals), [0] * len(program.avals)
    flat.constants = dict(program.constants)
    return flat
