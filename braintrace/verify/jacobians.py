"""The Jacobian of one step's hidden states, whole and as a trace follows it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import ETraceGraph, functional
from ..errors import OptionError
from .cut import CutStep

stop = jax.lax.stop_gradient


def hidden_jacobians(learner: functional.OnlineLearner, params, carry, inputs):
    """``(whole, kept)``: the Jacobian of the new hidden states by the old ones in one step, each a
    dict new group -> old group -> array ``(*shape, S, *shape', S')``.

    ``whole`` is reverse mode through the learner's cell as it is written; in ``kept`` every op, and
    every equation in which one position reads another, reads constants, so that its blocks are the
    D of a trace on their diagonal and zero elsewhere. A filter's states have no part. Memory grows
    with the square of all hidden numbers. Raises :class:`braintrace.errors.OptionError` for another
    learner, :class:`braintrace.errors.NotSupportedError` as :func:`cut_bptt_gradients`.

    >>> import braintrace, jax.numpy as jnp
    >>> def cell(params, h, x):
    ...     h = 0.5 * h + braintrace.matmul(jnp.concatenate([x, h], -1), params['W'])
    ...     return h, h
    >>> learner = braintrace.functional.online(cell)
    >>> params, h, x = {'W': jnp.ones((3, 2))}, jnp.zeros((1, 2)), jnp.ones((1, 1))
    >>> _ = learner.init(params, h, x)
    >>> whole, kept = braintrace.verify.hidden_jacobians(learner, params, h, x)
    >>> whole['carry']['carry'][0, :, 0, 0, :, 0].tolist()
    [[1.5, 1.0], [1.0, 1.5]]
    >>> kept['carry']['carry'][0, :, 0, 0, :, 0].tolist()
    [[0.5, 0.0], [0.0, 0.5]]
    """
    if not isinstance(learner, functional.OnlineLearner):
        raise OptionError(
            f'learner is {type(learner).__name__}; give what braintrace.functional.online returned.'
        )
    inputs = learner.taken(inputs)
    graph = learner.compiled(params, carry, inputs).graph
    graph = graph if graph.seen is None else graph.seen[1]
    old, cut = _states(graph, carry), CutStep(graph)

    def of(step):
        return jax.jit(jax.jacrev(lambda old: _states(graph, step(_with(graph, carry, old)))))(old)

    whole = of(lambda carry: learner.cell(params, carry, *inputs)[1])
    return whole, of(lambda carry: cut.state_step(params, carry, inputs))


def _states(graph: ETraceGraph, carry) -> dict[str, jax.Array]:
    """The states of each group, side by side in the last axis."""
    parts = graph.program.apart(jax.tree.leaves(carry))
    return {g.name: jnp.stack([parts[s] for s in g.states], -1) for g in graph.hidden_groups}


def _with(graph: ETraceGraph, carry, old: dict[str, jax.Array]):
    """The carry with other states; a derived one keeps its value and moves with them."""
    program, derived, leaves = graph.program, graph.derived, jax.tree.leaves(carry)
    parts = program.apart(leaves)
    for group in graph.hidden_groups:
        for i, s in enumerate(group.states):
            parts[s] = old[group.name][..., i]
    values = program.constants | {v: parts[c] for v, c in derived.reads.items()}
    for i in derived.equations:
        eqn = program.equations[i]
        values.update(zip(eqn.outs, eqn.evaluate([values[v] for v in eqn.ins]), strict=True))
    for c in derived.states:
        made = values[program.new_carry[c]]
        parts[c] = stop(parts[c]) + (made - stop(made))
    return jax.tree.unflatten(jax.tree.structure(carry), program.together(parts))
