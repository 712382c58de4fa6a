"""What one step of a learner was made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._errors import OptionError
from .._executor import feedback_weights
from .._rules import DRTRL, ESDRTRL, by_pair, read, uncounted, where_lanes
from .._windows import total_loss
from ._compiled import Compiled
from ._loss import as_inputs

__all__ = ['Observed', 'decoded', 'observed_step']


class Observed(NamedTuple):
    """The values that the gradient of one step is made of; :meth:`OnlineLearner.observed` returns
    it.

    S is the number of states of a group, in the order of the report; states that a filter adds stand
    behind them. A prime marks the step before. None is a zero by structure, a quantity is its
    mantissa.

    - ``x``: op -> its input
    - ``d``: group -> S rows of S arrays ``dh_s/dh'_r``
    - ``df``: relation -> group -> S arrays ``dh_s/dy``
    - ``before``, ``after``: the trace around the step, relation -> group -> slots, all pending steps
      written, zero in lanes where t is 0. ``d_rtrl``: trainable -> S arrays; ``es_d_rtrl``: ``x``,
      and ``f`` with the states in its last axis
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
    >>> float(seen.d['carry'][0][0][0, 0]), float(seen.dh['carry'][0][0, 0])
    (0.9..., 0.0)
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


def observed_step(learner, loss_of: Callable, gradient: Callable) -> Callable:
    """``gradient`` of a learner's loss, and the :class:`Observed` values beside its results."""
    if not isinstance(learner.rule, DRTRL | ESDRTRL):
        name = None if learner.rule is None else learner.rule.name
        raise OptionError(
            f'observed: the rule is {name}, which has no factors to show; give a learner with '
            'braintrace.rules.d_rtrl(), es_d_rtrl(...) or e_prop(...).'
        )

    def run(params, state, inputs, targets):
        result = gradient(params, state, inputs, targets)
        compiled = learner.compiled(params, state.carry, as_inputs(inputs))
        seen = _Step(compiled, params, state, as_inputs(inputs), loss_of, targets)
        return *result, seen.observed(result[-1])

    return run


class _Step(NamedTuple):
    """One step of a compiled cell, and its loss."""

    compiled: Compiled
    params: Any
    state: Any
    inputs: tuple
    loss_of: Callable
    targets: Any

    def observed(self, new) -> Observed:
        """The values of this step, after which the learner has the state ``new``."""
        compiled, rule, t = self.compiled, self.compiled.rule, self.state.t
        leaves = jax.tree.leaves(self.params)
        factors, signals = self._pass(compiled)
        probing = replace(rule, credit='cut') if isinstance(rule, DRTRL) else rule
        _, others = self._pass(Compiled(compiled.graph, probing, probes=True))
        _, count = uncounted(self.state.trace)
        constants, weights = compiled.program.constants, compiled.executor.op_weights(leaves)
        return Observed(
            factors.x,
            factors.d,
            factors.df,
            decoded(compiled, leaves, self.state.trace, t),
            decoded(compiled, leaves, new.trace, new.t),
            t,
            signals.dy,
            signals.c,
            {g: tuple(l[..., s] for s in range(l.shape[-1])) for g, l in others.l.items()},
            feedback_weights(compiled.graph, constants, weights, count),
        )

    def _pass(self, compiled: Compiled):
        """The factors and signals of this step."""
        params, carry, inputs = map(
            jax.tree.leaves, (self.params, self.state.carry, self.inputs)
        )
        trace, count = uncounted(self.state.trace)

        def step(cell, given, carry):
            outputs, _ = cell(params, carry, inputs)
            outputs = jax.tree.unflatten(compiled.program.trees['outputs'], outputs)
            return total_loss(self.loss_of(outputs, self.targets)), None

        seen = compiled.observe(step, [], carry, [], count, (trace, self.state.t))
        *_, signals = compiled.signals(seen.pull, jnp.ones_like(seen.result))
        return seen.factors, signals


def decoded(compiled: Compiled, params: list, carried, t: jax.Array) -> dict:
    """The numbers of a trace with nothing pending, zero in lanes that have no past."""
    # fused with nothing else, the numbers after a step are those before the next one, to the bit
    carried, params, t = jax.lax.optimization_barrier((uncounted(carried)[0], params, t))
    written = jax.lax.optimization_barrier(compiled.written(params, carried, t))

    def one(pair):
        front = len(pair.op.repeats)
        return jax.tree.map(
            lambda e: where_lanes(t > 0, pair.laned, read(e), front), pair.of(written)
        )

    return by_pair(compiled.graph, one)
