"""What one step of a learner was made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._compiler import abstract
from .._executor import axes_of, feedback_weights, in_shards, share
from .._rules import DRTRL, ESDRTRL, Window, by_pair, counting, numbers_of, uncounted
from .._windows import (
    Gradients,
    Penalised,
    StepGradient,
    counted,
    penalty_of,
    task_loss,
    zero_gradient,
)
from ..errors import OptionError


class Observed(NamedTuple):
    """The values that the gradient of one step is made of; :meth:`OnlineLearner.observed` returns
    it.

    S is the number of states of a group, in the order of the report; states that a filter adds
    are behind them. A prime marks the step before. None is a zero by structure, a quantity is
    its mantissa.

    - ``x``: op -> its input
    - ``d``: group -> S rows of S arrays ``dh_s/dh'_r``
    - ``df``: relation -> group -> S arrays ``dh_s/dy``
    - ``before``, ``after``: the trace around the step, relation -> group -> slots, all pending
      steps written, zero in lanes where t is 0. ``d_rtrl``: trainable -> S arrays; ``es_d_rtrl``:
      ``x``, and ``f`` with the states in its last axis
    - ``t``: the trace steps before this one
    - ``dy``: op -> ``dL/dy`` with the old states held constant
    - ``c``: group -> S arrays ``dL/dh'``, along the paths that the rule's credit follows
    - ``dh``: group -> S arrays ``dL/dh``, by paths from outside of the new states
    - ``feedback``: op -> the weights B that its error went back through

    >>> import braintrace, jax.numpy as jnp
    >>> cell = lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p['W']))
    >>> learner = braintrace.functional.online(cell)
    >>> params, h, x = {'W': jnp.ones((2, 4))}, jnp.zeros((3, 4)), jnp.ones((3, 2))
    >>> step = learner.observed(lambda h, y: jnp.sum(h - y))
    >>> *_, seen = step(params, learner.init(params, h, x), x, h)
    >>> seen.x['W'].shape, round(float(seen.d['carry'][0][0][0, 0]), 6)
    ((3, 2), 0.9)
    """

    x: dict[str, jax.Array]
    d: dict[str, tuple]
    df: dict[str, dict[str, tuple]]
    before: dict[str, dict[str, dict[str, Any]]]
    after: dict[str, dict[str, dict[str, Any]]]
    t: jax.Array
    dy: dict[str, jax.Array]
    c: dict[str, tuple]
    dh: dict[str, tuple]
    feedback: dict[str, dict[str, jax.Array]]


def observed_step(learner, loss_of: Callable) -> Callable:
    """``(params, state, inputs, targets) -> StepGradient, Observed``: all of it is made in one
    pass, so what is shown is what was used.
    """
    rule = learner.rule
    if not isinstance(rule, DRTRL | ESDRTRL):
        name = None if rule is None else rule.title
        raise OptionError(
            f'observed: the rule is {name}, which has no factors to show; give a learner with '
            'braintrace.rules.d_rtrl(), es_d_rtrl(...) or e_prop(...).'
        )

    def run(params, state, inputs, targets):
        inputs = learner.taken(inputs)
        learner.matching(params, state, inputs)
        found = in_shards(in_one_shard, params, state, inputs, targets)
        loss, outputs, grads, new, observed = found
        return StepGradient(grads, loss, outputs, new), observed

    def in_one_shard(axes, params, state, inputs, targets):
        """Each result and the axes of a surrounding ``shard_map`` along which it may differ."""
        compiled = learner.compiled(params, state.carry, inputs)
        graph, (leaves, treedef) = compiled.graph, jax.tree.flatten(params)
        program = compiled.program
        outputs = [abstract(program.avals[v]) for v in program.outputs]
        example = jax.tree.unflatten(program.trees['outputs'], outputs), targets
        of_loss = axes_of(lambda *args: task_loss(loss_of(*args)), axes, *example)
        of_penalty = axes_of(lambda *args: penalty_of(loss_of(*args)), axes, *example)
        carry, xs = jax.tree.leaves(state.carry), jax.tree.leaves(inputs)
        trace, count = uncounted(state.trace)

        def step(cell, given, carry):
            replaced = dict(zip(graph.direct, given, strict=True))
            now = [replaced.get(i, p) for i, p in enumerate(leaves)]
            outputs, new = cell(now, carry, xs)
            outputs = jax.tree.unflatten(program.trees['outputs'], outputs)
            value = loss_of(outputs, targets)
            own = share(axes, of_loss) * task_loss(value)
            if isinstance(value, Penalised):
                own += share(axes, of_penalty) * value.penalty
            return own, (task_loss(value), outputs, new)

        def observe(compiled):
            """The step, by the signals of a compiled form of it."""
            given, held = [leaves[i] for i in graph.direct], compiled.held
            seen = compiled.observe(step, given, carry, held, count, (trace, state.t))
            return seen, *compiled.signals(seen.pull, jnp.ones_like(seen.result))

        # Signals along every path say nothing of new states alone: those come from a second pass.
        whole, probed = rule.credit == 'whole', partial(type(compiled), graph, probes=True)
        seen, direct, signals = observe(compiled if whole else probed(rule))
        cut = replace(rule, credit='cut') if isinstance(rule, DRTRL) else rule
        l = observe(probed(cut))[-1].l if whole else signals.l

        # The gradient and the new state, as a step of the learner makes them.
        loss, outputs, new_carry = seen.aux
        network = compiled.network(leaves, seen.weights)
        after = _made_once(rule.update(network, trace, seen.factors, state.t), state.t)
        window = Window.of_step(seen.factors, signals, state.t)
        ops = rule.gradient(network, trace, after, window)
        gradients = Gradients(ops, dict(zip(graph.direct, direct, strict=True)))
        found = compiled.total([*leaves, *compiled.held], gradients)
        grads = [found[i] if i in found else zero_gradient(p) for i, p in enumerate(leaves)]
        new = state.replace(
            carry=jax.tree.unflatten(jax.tree.structure(state.carry), new_carry),
            trace=counting(after, counted(count)),
            t=counted(state.t),
        )
        observed = Observed(
            *seen.factors,
            decoded(compiled, leaves, state.trace, state.t),
            decoded(compiled, leaves, new.trace, new.t),
            state.t,
            signals.dy,
            signals.c,
            {g: tuple(l[g][..., s] for s in range(l[g].shape[-1])) for g in l},
            feedback_weights(graph, program.constants, seen.weights, count),
        )
        rest = outputs, jax.tree.unflatten(treedef, grads), new, observed
        return (loss, of_loss), *((x, axes) for x in rest)

    return run


def _made_once(tree, t: jax.Array):
    """The same arrays, as results of a loop of one turn: XLA drops a barrier on CPU before it
    fuses, and a trace that is made a second time inside of a fusion may differ in its last bit.
    """
    once = jnp.minimum(jnp.max(t, initial=0) + 1, 1)
    return jax.lax.fori_loop(0, once, lambda _, same: jax.lax.optimization_barrier(same), tree)


def decoded(compiled: Any, params: list, carried, t: jax.Array) -> dict:
    """The numbers of a trace with nothing pending, zero in lanes that have no past."""
    # fused with nothing else, the numbers after a step are those before the next one, to the bit
    carried, params, t = jax.lax.optimization_barrier((uncounted(carried)[0], params, t))
    written = jax.lax.optimization_barrier(compiled.written(params, carried, t))

    rule = compiled.rule
    return by_pair(compiled.graph, lambda pair: numbers_of(rule, pair, pair.of(written), t > 0))
