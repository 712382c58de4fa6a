"""From a jaxpr to a flat program: calls are inlined, control flow becomes selects, copies or marked
regions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ... import _jax
from ..._etrace_op import AUTOMATIC, is_etp_primitive
from ...errors import NotSupportedError
from ..equations import Equation, Remat, is_inexact
from ..policy import Policy
from .builder import Builder, marked_at_border, marked_operands, note
from .control_flow import (
    descended,
    forward_derivative,
    gate,
    guarded,
    peeled,
    selected,
    unrolled,
    while_taken,
)
from .leaves import select
from .program import Program, alive
from .tracing import Step

# by mode: ``fn(eqn, where)``, the plain function that an equation is; what is above the
# compiler registers its own
EXPANDED: dict[Any, Callable[[Any, str], Callable]] = {}


class Lowering:
    """Lowers single equations of a jaxpr: calls are inlined, control flow becomes what was decided.

    ``modes``: how to lower control flow, by the jaxpr's equation. ``expansions``: the functions
    traced for an equation. ``guarded``: loops that a branch guards already. All three are kept
    while the step is lowered again and again, with more decisions each time.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.modes: dict[Any, Any] = {}
        self.expansions: dict[tuple, tuple] = {}
        self.guarded: set = set()

    def decide(self, found: dict[Any, Any]) -> None:
        """Two uses of one ``while`` share the operands that either must be differentiated for."""
        for key, mode in found.items():
            old = self.modes.get(key)
            both = isinstance(mode, frozenset) and isinstance(old, frozenset)
            self.modes[key] = mode | old if both else mode

    def __call__(self, build: Builder, eqn, ins: list[int], where: str) -> list[int]:
        # calls are inlined, also the branch of a cond that is known
        call, again, branches = _jax.call_body(eqn), _jax.recomputed(eqn), _jax.cond_branches(eqn)
        if call is not None:
            keep = self.policy.checkpoint != 'inline'
            region = [Remat(*again)] if again is not None and keep else []
            with build.having(scope=(*build.scope, *region)):
                return build.call(*call, ins, where)
        if branches is not None and ins[0] in build.constants:
            branch, consts = branches[int(build.constants[ins[0]])]
            return build.call(branch, consts, ins[1:], where)
        # a loop that may not end is guarded first
        loop = _jax.while_parts(eqn)
        if build.branches and loop is not None and eqn not in self.guarded:
            guarded, ins = while_taken(loop), [build.branches[-1].taken, *ins]
            self.guarded.update(self.expansion(build, eqn, lambda: guarded, ins)[0].eqns)
            return self.expanded(build, eqn, lambda: guarded, ins, where)
        # control flow is lowered as it was decided, and kept as one equation before that
        mode = self.modes.get(eqn)
        if mode is None:
            return self.single(build, eqn, ins, where)
        scan = _jax.scan_parts(eqn)
        if mode == 'select' and branches is not None:
            return selected(build, branches, ins, where)
        if mode == 'unroll' and scan is not None:
            return unrolled(build, scan, ins, where)
        if mode == 'descend':
            return descended(build, eqn, scan, ins, where)
        if mode == 'peel':
            return peeled(build, eqn, scan, ins, where)
        if mode in EXPANDED:
            # what was inside keeps its own places
            jaxpr, consts = self.expansion(build, eqn, lambda: EXPANDED[mode](eqn, where), ins)
            return build.call(jaxpr, consts, ins, where)
        # a while loop, with the operands that it must be differentiated for
        with build.having(unmarked='while_loop'):
            return self.expanded(
                build, eqn, lambda: forward_derivative(eqn, where, mode), ins, where
            )

    def single(self, build: Builder, eqn, ins: list[int], where: str) -> list[int]:
        """An equation of its own, or the op that is put in its place."""
        op = is_etp_primitive(eqn.primitive)
        flat = Equation(
            eqn.primitive,
            eqn.params,
            eqn.ctx,
            tuple(ins),
            (),
            where,
            bool(eqn.effects),
            origin=eqn,
            marked=build.marking if op else '',
        )
        if op:
            outs, y = self.apply(build, flat, eqn.outvars), eqn.primitive.y_outvar_index
            if all(k == y or isinstance(v, _jax.DropVar) for k, v in enumerate(eqn.outvars)):
                return outs
            # an op's rules are about y alone, so plain equations make its other results
            plain = partial(eqn.primitive.impl_fn, **eqn.params)
            with build.having(unmarked=''):
                others = self.expanded(build, eqn, lambda: plain, ins, where)
            return [out if k == y else other for k, (out, other) in enumerate(zip(outs, others))]
        # an op is put where a function of parameters to mark meets a value that changes
        does, avals = flat.does, [build.avals[v] for v in ins]
        changes = flat.effects or any(v not in build.pure for v in ins)
        smooth = does.gradient and any(is_inexact(v.aval) for v in eqn.outvars)
        weights = [k for k, v in enumerate(ins) if v in build.owned] if changes and smooth else []
        if build.unmarked == '':
            weights = []
        if len(weights) == 1 and not build.unmarked and does.op in AUTOMATIC:
            replaced = AUTOMATIC[does.op](eqn.params, weights[0], avals)
            if replaced is not None:
                where = build.owned[ins[weights[0]]] or where
                with build.having(marking=eqn.primitive.name):
                    return self.expanded(build, eqn, lambda: replaced, ins, where, weights[0])
        if weights:
            flat = marked_operands(build, flat, weights, eqn.outvars)
        # a product that sums nothing is one of single elements
        elif does.apart is not None and changes and (apart := does.apart(eqn.params, avals)):
            return self.expanded(build, eqn, lambda: apart, ins, where)
        return self.apply(build, flat, eqn.outvars)

    def apply(self, build: Builder, eqn: Equation, outvars: Sequence) -> list[int]:
        """Append an equation, behind gates if it is in a branch."""
        avals = [v.aval for v in outvars]
        pure = not eqn.effects and all(v in build.pure for v in eqn.ins)
        op = is_etp_primitive(eqn.primitive)
        if build.branches and eqn.effects:
            raise NotSupportedError(
                f'{eqn.where}: {eqn.primitive.name} has a side effect inside a branch of cond that '
                'also holds an op or a path between hidden states: it would happen whichever '
                'branch is taken. Move it out of the branch.'
            )
        # functions of parameters alone need no gate until something of the branch reads them
        if build.branches and (op or not pure):
            eqn = guarded(build, eqn, op)
        if eqn.does.elementwise and eqn.does.gradient:
            eqn = build.widened(eqn, avals[0].shape)
        outs = build.append(eqn, avals)
        if pure:
            build.pure.update(outs)
        if not op:
            note(build, eqn, outs)
        if build.branches and pure and not op:
            made = replace(eqn, outs=tuple(outs))
            build.branches[-1].made.update(dict.fromkeys(outs, made))
        elif build.branches:
            build.inside(outs)
        if build.branches and op:
            y = eqn.primitive.y_outvar_index
            # who reads y reads it behind a gate: nothing comes back if the branch is not taken
            outs[y] = build.plain(gate, [build.branches[-1].taken, outs[y]], eqn.where)
            build.inside([outs[y]])
        return outs

    def expanded(
        self, build: Builder, eqn, make: Callable, ins: list[int], where: str, weight: int = -1
    ) -> list[int]:
        """Lower the function that replaces an equation, at the equation's place; ``weight``: the
        operand that an op has.
        """
        jaxpr, consts = self.expansion(build, eqn, make, ins, weight)
        with build.having(place=where):
            return build.call(jaxpr, consts, ins, where)

    def expansion(
        self, build: Builder, eqn, make: Callable, ins: list[int], weight: int = -1
    ) -> tuple[Any, list]:
        """``(jaxpr, constants)`` of the function that replaces an equation."""
        avals = [build.avals[v] for v in ins]
        shapes = tuple((a.shape, str(a.dtype)) for a in avals)
        key = eqn, self.modes.get(eqn), weight, shapes
        if key not in self.expansions:
            self.expansions[key] = _jax.trace(make(), *avals)
        return self.expansions[key]


def flatten(step: Step, lowering: Lowering, trainable: Callable, hidden: Callable) -> Program:
    """The flat program of a traced step."""
    build, policy = Builder(lowering), lowering.policy
    numbers = [[build.new(a) for a in part] for part in step.avals]
    build.pure.update(numbers[0])
    learned = select(trainable, step.param_keys, step.avals[0])
    # the parameters to mark: none, all that are trained, or those that the policy chooses
    to_mark = None if policy.mark is None else learned
    if callable(policy.mark):
        keys, avals = step.param_keys, step.avals[0]
        to_mark = tuple(i for i in learned if policy.mark(keys[i], avals[i]))
    build.owned.update({numbers[0][i]: '' for i in to_mark or ()})
    ins = [n for part in numbers for n in part]
    outs = build.call(step.jaxpr, step.consts, ins, 'an unknown place')
    states = select(hidden, step.carry_keys, step.avals[1])
    for k in (step.n_outputs + c for c in states):
        outs[k] = marked_at_border(build, outs[k], 'the new carry', 'new state')
    return Program(
        avals=tuple(build.avals),
        params=tuple(numbers[0]),
        carry=tuple(numbers[1]),
        inputs=tuple(numbers[2]),
        constants=build.constants,
        equations=alive(build.bodies[0], outs),
        outputs=tuple(outs[: step.n_outputs]),
        new_carry=tuple(outs[step.n_outputs :]),
        param_keys=step.param_keys,
        carry_keys=step.carry_keys,
        leaf_keys=step.carry_keys,
        splits=(None,) * len(step.carry_keys),
        hidden=states,
        trainable=learned,
        trees=step.trees,
        to_mark=to_mark,
        raw_keys=step.raw_keys,
    )
