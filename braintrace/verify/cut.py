"""The gradient that D_RTRL computes, by reverse mode through the sequence with the cut paths held
constant.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from .. import ETraceGraph, functional, report
from .._signatures import public
from ..errors import NotSupportedError, OptionError
from ._sequence import checked, first_values, scalar

stop = jax.lax.stop_gradient


class CutStep:
    """One step of a compiled graph, evaluated equation by equation, with gradients along the paths
    that D_RTRL keeps.

    ``loss_step`` is for gradients within the step: an equation that is recurrent for a group reads
    the group's old states as constants. ``state_step`` is for gradients that go on to later steps:
    every op and every mixing equation reads constants, and parameters enter as the weights of ops
    that have a trace.
    """

    def __init__(self, graph: ETraceGraph):
        self.graph, self.program = graph, graph.program
        _check(graph)
        self.group_of = {c: g for g, group in enumerate(graph.hidden_groups) for c in group.carried}
        self.cuts = {op.equation for op in graph.ops} | set(graph.mixing)
        self.traced = {
            rel.op.equation: set(rel.op.trainable.values())
            for rel in graph.hidden_param_op_relations
        }
        self.variants = self._variants()

    def _variants(self) -> list[int]:
        """The sets of groups, as bit sets, such that some value is read with the old states of
        these groups as constants.
        """
        found = {0}
        while True:
            more = found | {a | self.graph.recurrent[i] for a in found for i in self.cuts}
            if more == found:
                return sorted(found)
            found = more

    def _leaves(self, params, carry, x) -> dict:
        """The values that a step starts with, by number; parameters that are not trained are
        constants.
        """
        program = self.program
        frozen = {v for i, v in enumerate(program.params) if i not in program.trainable}
        values = first_values(program, params, program.apart(jax.tree.leaves(carry)), x)
        return {v: stop(a) if v in frozen else a for v, a in values.items()}

    def loss_step(self, params, carry, x):
        """The outputs of a step."""
        program, start = self.program, self._leaves(params, carry, x)
        new = {
            program.new_carry[c] for c in program.hidden if program.new_carry[c] in program.producer
        }
        old = {program.carry[c]: 1 << g for c, g in self.group_of.items()}
        values = {
            s: {v: stop(a) if old.get(v, 0) & s else a for v, a in start.items()}
            for s in self.variants
        }
        # Each value exists in several variants: in variant s the old states of the groups in s are
        # constants. A recurrent equation reads the variant in which its own groups are; new states
        # are read in variant 0, since every path through them is kept.
        for i, eqn in enumerate(program.equations):
            for s in self.variants:
                read = values[s | self.graph.recurrent[i]] if i in self.cuts else values[s]
                args = [values[0][v] if v in new else read[v] for v in eqn.ins]
                values[s].update(zip(eqn.outs, eqn.evaluate(args), strict=True))
        return jax.tree.unflatten(program.trees['outputs'], [values[0][v] for v in program.outputs])

    def state_step(self, params, carry, x):
        """The new carry of a step."""
        program, live = self.program, self._leaves(params, carry, x)
        # Two sets of values: ``values`` pass gradients to the old states alone, ``live`` to the
        # parameters too, which the ops with a trace read as their weights.
        values = {v: a if v in program.carry else stop(a) for v, a in live.items()}
        for i, eqn in enumerate(program.equations):
            args = [stop(values[v]) if i in self.cuts else values[v] for v in eqn.ins]
            args = [
                live[v] if v in self.traced.get(i, ()) else a
                for v, a in zip(eqn.ins, args, strict=True)
            ]
            live.update(zip(eqn.outs, eqn.evaluate([live[v] for v in eqn.ins]), strict=True))
            values.update(zip(eqn.outs, eqn.evaluate(args), strict=True))
        new = [
            values[v] if c in program.hidden else stop(values[v])
            for c, v in enumerate(program.new_carry)
        ]
        return jax.tree.unflatten(program.trees['carry'], program.together(new))

    def hidden(self, carry) -> list:
        """The hidden states of a carry, group by group."""
        states = self.program.apart(jax.tree.leaves(carry))
        return [states[c] for group in self.graph.hidden_groups for c in group.carried]


def _check(graph: ETraceGraph) -> None:
    """Refuse loops, and paths between groups that the trace lacks: the cut can not leave them
    out.
    """
    loop = next((e for e in graph.program.equations if e.loop is not None), None)
    if loop is not None:
        raise NotSupportedError(
            f'the step has a loop that is not unrolled [{loop.where}]; the cut is defined equation '
            'by equation. Compile with a larger braintrace.Policy(unroll=...).'
        )
    keys = {op.key for op in graph.ops}
    wrong = [
        (found.kind, found.path)
        for found in graph.diagnostics
        if found.kind == 'cross-group' or (found.kind == 'lost-relation' and found.path in keys)
    ]
    for row in report(graph).diagnostics if wrong else ():
        if (row.kind, row.path) in wrong:
            raise NotSupportedError(
                f'{row.message} [{row.location}]: such a path is no part of the trace, and '
                'reverse mode has no way to leave it out.'
            )


@public('braintrace.verify.cut_bptt_gradients')
def cut_bptt_gradients(
    cell: Callable, params, carry, xs, ys, loss_fn: Callable, *, graph: ETraceGraph | None = None
):
    r"""The gradient that D_RTRL computes, by reverse mode through the whole sequence.

    .. math::
        \sum_t \frac{dL^t}{dw} + \frac{dL^t}{dh^{t-1}} e^{t-1} \qquad
        e^t = D^t e^{t-1} + \frac{dh^t}{dw}

    In ``dL^t/dh^{t-1}`` an op, or an equation that lets one position read another, reads the old
    states of every group whose new states it leads to as constants; in ``D^t`` and ``dh^t/dw`` it
    reads constants only. Every other path is kept. ``graph``, the graph of a compiled learner, says
    where the cuts are; by default ``cell`` is compiled with all of its carry as hidden states. No
    code of the learning rules is used.

    Other arguments and errors as for :func:`bptt_gradients`; :class:`braintrace.errors.OptionError`
    for another ``graph``, :class:`braintrace.errors.NotSupportedError` for a step with a loop that
    is not unrolled, or in which states of different shapes read each other by plain paths.

    Source: ``docs/design.md``, "The identity".

    >>> import braintrace, jax.numpy as jnp
    >>> def cell(params, h, x):
    ...     h = 0.5 * h + braintrace.matmul(jnp.concatenate([x, h]), params['W'])
    ...     return h.sum(), h
    >>> args = {'W': jnp.ones((3, 2))}, jnp.zeros(2), jnp.ones((2, 1)), jnp.zeros(2)
    >>> loss = lambda output, target: output - target
    >>> braintrace.verify.cut_bptt_gradients(cell, *args, loss)['W'][0].tolist()  # 1 + (1 + 0.5)
    [2.5, 2.5]
    >>> braintrace.verify.bptt_gradients(cell, *args, loss)['W'][0].tolist()  # 2 more by h @ W
    [4.5, 4.5]
    """
    params, carry, xs, ys = checked(cell, params, carry, xs, ys, loss_fn)
    if graph is None:
        online = functional.online(cell, None)
        online.init(params, carry, *jax.tree.map(lambda a: a[0], xs))
        graph = online.graph
    elif not isinstance(graph, ETraceGraph):
        raise OptionError(
            f'graph is {type(graph).__name__}; give the `graph` of a compiled learner.'
        )
    cut = CutStep(graph)

    def total(params):
        def step(carry, at):
            x, y = at
            value = scalar(loss_fn(cut.loss_step(params, carry, x), y))
            return cut.state_step(params, carry, x), value

        return jax.lax.scan(step, carry, (xs, ys))[1].sum()

    return jax.jit(jax.grad(total, allow_int=True))(params)
