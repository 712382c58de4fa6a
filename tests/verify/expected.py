"""The diagnosis that the doctor should give of a case of ``tests.models``: both gradients and both
histories forward in time in NumPy, by complex steps.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np

from tests.models.ops import NumpyOps
from tests.oracles import flat, jacobian, like, pick, real, transition


class Expected(NamedTuple):
    """By parameter."""

    cosine: dict[str, float]
    ratio: dict[str, float]
    dropped: dict[str, float]
    dropped_in: dict[str, np.ndarray]  # by hidden group
    squares: dict[str, np.ndarray]  # of the trace, summed, after each step
    largest: dict[str, float]  # entry of the last trace


@functools.cache
def expected(case) -> Expected:
    params, groups, carry = case.params, case.model.groups, dict(case.carry)
    live, cut, constant = NumpyOps(), NumpyOps('cut'), NumpyOps('constant')
    size = flat(carry).size, flat(params).size
    rows = [flat(pick(like(np.arange(size[0]), carry), g)) for g in groups]
    trace, whole, traces = np.zeros(size), np.zeros(size), []
    online, exact = np.zeros(size[1]), np.zeros(size[1])
    kept, every = (np.zeros((len(groups), size[1])) for _ in range(2))
    for x, y in zip(case.xs, case.ys, strict=True):
        # The loss of a step reads the past by the trace along the paths that a trace keeps, and by
        # the derivative of all states along every path.
        for ops, past, gradient, read in (
            (cut, trace, online, kept),
            (live, whole, exact, every),
        ):

            def loss(params, carry, ops=ops, x=x, y=y):
                return case.loss(case.run(ops, params, carry, x)[0], y)

            to_h = jacobian(lambda c: loss(params, c), carry)[0]
            gradient += jacobian(lambda p: loss(p, carry), params)[0] + to_h @ past
            read += [to_h[at] @ past[at] for at in rows]

        def states(ops, params, carry, x=x):
            return case.run(ops, params, carry, x)[1]

        by_w = jacobian(lambda p: states(live, p, carry), params)
        whole[:] = by_w + jacobian(lambda c: states(live, params, c), carry) @ whole
        for g, at in zip(groups, rows, strict=True):
            fresh = jacobian(lambda p: pick(states(constant, p, carry), g), params)
            trace[at] = transition(case, constant, params, carry, x, g) @ trace[at] + fresh
        carry = real(states(live, params, carry))
        traces.append(trace.copy())

    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = ['/'.join(key.key for key in path) for path, _ in leaves]
    ends = np.cumsum([np.size(leaf) for _, leaf in leaves])[:-1]

    def by_name(array, reduce):
        return dict(zip(names, map(reduce, np.split(array, ends, -1)), strict=True))

    norms = [by_name(g, np.linalg.norm) for g in (online, exact)]
    angle, lost = by_name(online * exact, np.sum), by_name((every - kept) ** 2, lambda a: a.sum(1))
    mass = by_name((every - kept) ** 2 + kept**2, lambda a: a.sum() or 1.0)
    return Expected(
        {n: angle[n] / (norms[0][n] * norms[1][n]) for n in names},
        {n: norms[0][n] / norms[1][n] for n in names},
        {n: lost[n].sum() / mass[n] for n in names},
        {n: lost[n] / mass[n] for n in names},
        by_name(np.array(traces) ** 2, lambda a: a.sum((1, 2))),
        by_name(np.abs(trace), np.max),
    )
