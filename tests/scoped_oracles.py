"""Traces that keep some of the hidden numbers, in NumPy by complex steps; they share no code with
the library.

``e_q = keep_q * (J e_q' + D_f[:, q] (x) dy_q/dw)`` for each element q of each op's result, with the
whole derivative J of a step; the gradient of a step is its own derivative by the parameters plus
``sum_q < dL/dh', e_q' >``.
"""

import functools

import numpy as np

from tests.models.ops import NumpyOps
from tests.oracles import Probe, jacobian, like, real


@functools.cache
def _steps(case):
    """Of every step: J, D_f, dy/dw, dL/dh' and the step's own gradient."""
    found, carry, params = [], dict(case.carry), case.params
    for x, y in zip(case.xs, case.ys, strict=True):

        def loss(params, carry, x=x, y=y):
            return case.loss(case.run(NumpyOps(), params, carry, x)[0], y)

        seen = Probe()
        case.run(seen, params, carry, x)
        zeros = [np.zeros(np.shape(op(given))) for given, op in seen.calls]

        def fed(add, carry=carry, x=x):
            return case.run(Probe(add_y=add), params, carry, x)[1]

        def results(params, carry=carry, x=x, calls=seen.calls):
            probe = Probe()
            case.run(probe, params, carry, x)
            pairs = zip(probe.calls, calls, strict=True)
            return [op(real(given)) for (_, op), (given, _) in pairs]

        found.append(
            (
                jacobian(lambda h, x=x: case.run(NumpyOps(), params, h, x)[1], carry),
                jacobian(fed, zeros),
                jacobian(results, params),
                jacobian(lambda h, loss=loss: loss(params, h), carry)[0],
                jacobian(lambda p, loss=loss, carry=carry: loss(p, carry), params)[0],
            )
        )
        carry = real(case.run(NumpyOps(), params, carry, x)[1])
    return found


def patterns(case):
    """Which old numbers the new ones read, and which elements of results."""
    steps = _steps(case)
    return tuple(np.any([step[k] != 0 for step in steps], 0) for k in (0, 1))


def reach(case, n: int):
    """``(numbers, results)``: what each element of a result changes within n steps."""
    reads, kept = patterns(case)
    for _ in range(n - 1):
        kept = kept | (reads.astype(int) @ kept.astype(int) > 0)
    return kept


def scoped_recursion(case, keep=1.0, carries=1.0):
    """Per-step gradients of a trace of the numbers ``keep`` (numbers, results), moved by the
    entries ``carries`` of J.
    """
    params, grads, e = case.params, [], 0.0
    for j, df, dy, c, own in _steps(case):
        past = np.tensordot(c, e.sum(1), 1) if np.ndim(e) else 0.0
        grads.append(own + past)
        moved = np.tensordot(carries * j, e, 1) if np.ndim(e) else 0.0
        e = np.broadcast_to(keep, df.shape)[..., None] * (moved + df[..., None] * dy)
    return like(np.stack(grads), params)
