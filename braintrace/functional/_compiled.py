"""One shape signature of a cell: its graph, its executor and the differentiable step on flat leaves."""
from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler import ETraceGraph, abstract, is_inexact, path_name
from .._errors import NotSupportedError
from .._executor import Executor, Factors, Signals, stopped, without_types
from .._rules import Rule, same_step
from ._state import counted, flatten_paths, put_back

__all__ = ['Compiled', 'first_order', 'signature', 'zero_gradient']


def signature(trees) -> tuple:
    leaves, treedef = jax.tree.flatten(trees)
    avals = [abstract(x) for x in leaves]
    return treedef, tuple((a.shape, a.dtype) for a in avals)


class Compiled:
    """One shape signature: graph, executor and the differentiable step on flat leaves."""

    def __init__(self, graph: ETraceGraph, rule: Rule | None):
        self.graph, self.rule, self.program = graph, rule, graph.program
        self.executor = Executor(graph, probes=rule is not None and rule.probes)
        step = jax.custom_vjp(without_types(self._primal))
        step.defvjp(without_types(self._forward), without_types(self._backward))
        self.step = jax.jit(step)

    @property
    def t_shape(self) -> tuple[int, ...]:
        return () if self.graph.lanes is None else (self.graph.lanes,)

    def init(self) -> tuple[dict, jax.Array]:
        """The empty trace and t, made by one program."""
        return jax.jit(self._init)()

    def _init(self):
        t = jnp.zeros(self.t_shape, jnp.int32)
        return {} if self.rule is None else self.rule.carried(self.graph, self.rule.init(self.graph), t), t

    @cached_property
    def _lane_axes(self) -> dict[str, int]:
        """The axis of each leaf of the carry that is the lanes."""
        program, found = self.program, {}
        for leaf, key in enumerate(program.leaf_keys):
            split = program.splits[leaf] if program.splits else None
            axis = 0 if split is None else split.lane_axis()
            if axis is not None and self.graph.laned.issuperset(program.pieces(leaf)):
                found[path_name(('carry', *key))] = axis
        return found

    @property
    def lane_axes(self) -> tuple[tuple[str, int], ...]:
        """Paths of the leaves of the carry of which an axis after 0 is the lanes, and that axis."""
        return tuple((path, axis) for path, axis in self._lane_axes.items() if axis)

    @cached_property
    def laned(self) -> frozenset[str]:
        """Paths of the arrays of the carry and the trace whose axis 0 is the lanes."""
        found = {path for path, axis in self._lane_axes.items() if axis == 0}
        trace = {} if self.graph.lanes is None else jax.eval_shape(self.init)[0]
        for rel in self.graph.hidden_param_op_relations:
            for group, coords in zip(rel.groups, rel.coordinates, strict=True):
                slots = trace.get(rel.key, {}).get(group.name, {})
                if coords.has_lanes(self.graph.lanes_of(group)) and not rel.op.repeats:
                    found |= {path_name(('trace', rel.key, group.name, *key)) for key, e in flatten_paths(slots).items()
                              if e.shape[:1] == (self.graph.lanes,)}
        return frozenset(found)

    @cached_property
    def state_signature(self) -> tuple:
        """Structure and shapes of trace and t."""
        return signature(jax.eval_shape(self.init))

    def restarted(self, fresh: list, hidden: Callable, carry: list, flags: jax.Array) -> list:
        """The leaves of the carry with the hidden ones, of whatever dtype, put back in flagged lanes."""
        program, laned = self.program, self.graph.laned
        leaves = enumerate(zip(program.leaf_keys, carry, strict=True))
        chosen = [c for leaf, (key, x) in leaves if hidden(key, x) for c in program.pieces(leaf)]
        new, start = program.apart(carry), program.apart(fresh)
        for c in chosen:
            new[c] = put_back(flags, start[c], new[c], program.carry_names[c], c in laned)
        return program.together(new)

    def factors(self, params, weights, carry, inputs, xs) -> Factors:
        """The factors of one step, as constants."""
        return stopped(Factors(xs, *self.executor.d_factors(params, weights, carry, inputs)))

    def _primal(self, params, carry, trace, t, inputs):
        executor = self.executor
        weights = executor.op_weights(params)
        outputs, new_carry, xs = executor.forward(params, weights, carry, inputs, executor.zero_probes())
        if self.rule is not None:
            factors = self.factors(params, weights, carry, inputs, xs)
            trace = self.rule.update(self.graph, trace, factors, weights, t)
        return outputs, new_carry, trace, counted(t)

    def observe(self, params, weights, carry, inputs, of_outputs: Callable):
        """One step with everything that a gradient needs.

        ``of_outputs(outputs, new_carry)`` is the differentiated result. Returns it with ``new_carry``, the factors and its
        pull-back to direct parameters, inexact inputs, old hidden states and probes.
        """
        program, executor, inexact = self.program, self.executor, self._inexact_inputs

        def run(direct, some_inputs, hidden, probes):
            full, ins, old = list(params), list(inputs), program.with_states(carry, hidden)
            given = (full, self.graph.direct, direct), (ins, inexact, some_inputs)
            for where, slots, values in given:
                for i, x in zip(slots, values, strict=True):
                    where[i] = x
            outputs, new_carry, xs = executor.forward(full, weights, old, ins, probes)
            return of_outputs(outputs, new_carry), (new_carry, xs)

        args = ([params[i] for i in self.graph.direct], [inputs[i] for i in inexact],
                program.old_states(carry),
                executor.zero_probes())
        result, pull, (new_carry, xs) = jax.vjp(run, *args, has_aux=True)
        factors = self.factors(params, weights, carry, inputs, xs) if self.rule is not None else Factors(xs, {}, {})
        return result, new_carry, factors, pull

    @property
    def _inexact_inputs(self) -> list[int]:
        return [i for i, v in enumerate(self.program.inputs) if is_inexact(self.program.avals[v])]

    def signals(self, to_hidden, to_probes) -> Signals:
        """Cotangents of old hidden states and probes, sorted by op and group."""
        return self.executor.signals(to_probes, dict(zip(self.program.hidden, to_hidden, strict=True)))

    def _forward(self, params, carry, trace, t, inputs):
        params, carry, inputs = first_order((params, carry, inputs))
        weights = self.executor.op_weights(params)
        (outputs, new_carry), _, factors, pull = self.observe(params, weights, carry, inputs, lambda *results: results)
        new = trace if self.rule is None else self.rule.update(self.graph, trace, factors, weights, t)
        return (outputs, new_carry, new, counted(t)), (pull, params, weights, factors, trace, new, t)

    def _backward(self, residuals, cotangents):
        pull, params, weights, factors, trace, new, t = residuals
        direct, to_inputs, *rest = pull(tuple(cotangents[:2]))
        signals, to_inputs = self.signals(*rest), dict(zip(self._inexact_inputs, to_inputs, strict=True))
        if self.rule is None:
            ops = same_step(self.graph, *jax.tree.map(lambda a: a[None], (factors.x, signals.dy)), weights)
        else:
            ops = self.rule.gradient(self.graph, trace, new, factors, signals, weights, t)
        grads = self.total(params, ops, direct)
        return ([grads.get(i) for i in range(len(params))], None, None, None,
                [to_inputs.get(i) for i in range(len(self.program.inputs))])

    def total(self, params, ops, direct) -> dict[int, Any]:
        """Gradient of each trainable parameter, by position: what passes ops, pulled back once, plus what does not."""
        grads = self.executor.pull_back(params, ops)
        for i, g in zip(self.graph.direct, direct, strict=True):
            grads[i] = g + grads[i] if i in grads else g
        return grads

    def gradient_tree(self, params, grads: dict[int, Any]):
        """Gradients by position as a tree like the parameters; zeros (float0 for integers) for frozen ones."""
        leaves = [grads[i] if i in grads else zero_gradient(p) for i, p in enumerate(params)]
        return jax.tree.unflatten(self.program.trees['params'], leaves)


@jax.custom_vjp
def first_order(tree):
    """What online gradients are made from: a derivative of these with respect to it is refused."""
    return tree


def _refuse_second(tree):
    raise NotSupportedError('a derivative of an online gradient was asked for, but the trace holds first derivatives only: it would '
                            'be wrong. For second derivatives differentiate the cell itself through time (verify.bptt_gradients).')


first_order.defvjp(_refuse_second, lambda _, cotangents: (cotangents,))


def zero_gradient(p):
    """Zeros like an inexact parameter, float0 zeros for another."""
    dtype = jnp.result_type(p)
    return jnp.zeros(jnp.shape(p), dtype) if jnp.issubdtype(dtype, jnp.inexact) else np.zeros(jnp.shape(p), jax.dtypes.float0)
