"""The gradient of a sequence by reverse mode, by the full forward recursion and by differences of
the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from .._signatures import is_int, public
from ..errors import NotSupportedError, OptionError, StructureError
from ._sequence import checked, is_float, one_step, scalar, split_floats


def total_loss(cell: Callable, loss: Callable, params, carry, xs, ys):
    """The sum of the losses of a sequence."""

    def step(carry, at):
        x, y = at
        outputs, carry = one_step(cell, params, carry, x)
        return carry, scalar(loss(outputs, y))

    return jax.lax.scan(step, carry, (xs, ys))[1].sum()


@public('braintrace.verify.bptt_gradients')
def bptt_gradients(cell: Callable, params, carry, xs, ys, loss_fn: Callable):
    r"""The gradient of the summed losses by reverse mode through the whole sequence.

    .. math:: \frac{d}{dw} \sum_t L(o^t, y^t) \qquad o^t, c^t = \mathrm{cell}(w, c^{t-1}, x^t)

    ``cell(params, carry, *inputs) -> (outputs, carry)``; ``xs`` and ``ys`` are trees with time in
    axis 0, a plain tuple ``xs`` holds several inputs; ``loss_fn(outputs, target)`` returns a real
    scalar. Returns a tree like ``params`` (float0 for integers). Memory grows with the length of
    the sequence. Raises :class:`braintrace.errors.StructureError` for sequences of different
    lengths and for a carry that a step changes in structure,
    :class:`braintrace.errors.StepFunctionError` for a loss that is no scalar.

    Source: Werbos (1990), "Backpropagation through time: what it does and how to do it".

    >>> import braintrace, jax.numpy as jnp
    >>> cell = lambda params, h, x: (h, params['a'] * h + x)
    >>> loss = lambda output, target: output - target
    >>> args = {'a': 0.5}, jnp.array(1.), jnp.zeros(3), jnp.zeros(3)
    >>> grads = braintrace.verify.bptt_gradients(cell, *args, loss)
    >>> float(grads['a'])                                       # losses 1, a, a^2
    2.0
    """
    params, carry, xs, ys = checked(cell, params, carry, xs, ys, loss_fn)
    return jax.jit(jax.grad(lambda p: total_loss(cell, loss_fn, p, carry, xs, ys), allow_int=True))(
        params
    )


@public('braintrace.verify.dense_recursion_gradients')
def dense_recursion_gradients(cell: Callable, params, carry, xs, ys, loss_fn: Callable):
    r"""The same gradient by real-time recurrent learning: forward in time, with the Jacobian of the
    whole carry.

    .. math::
        M^t = \frac{dc^t}{dw} + \frac{dc^t}{dc^{t-1}} M^{t-1} \qquad
        \sum_t \frac{dL^t}{dw} + \frac{dL^t}{dc^{t-1}} M^{t-1}

    M has the shape (numbers in the carry, numbers in the parameters): for small cells. The
    derivatives of one step are taken row by row in reverse mode, so surrogate gradients of either
    kind are followed. Arguments and errors as for :func:`bptt_gradients`, which it equals;
    :class:`braintrace.errors.NotSupportedError` for complex numbers.

    Source: Williams & Zipser (1989), "A learning algorithm for continually running fully recurrent
    neural networks".

    >>> import braintrace, jax.numpy as jnp
    >>> cell = lambda params, h, x: (h, params['a'] * h + x)
    >>> loss = lambda output, target: output - target
    >>> args = {'a': 0.5}, jnp.array(1.), jnp.zeros(3), jnp.zeros(3)
    >>> grads = braintrace.verify.dense_recursion_gradients(cell, *args, loss)
    >>> float(grads['a'])
    2.0
    """
    params, carry, xs, ys = checked(cell, params, carry, xs, ys, loss_fn)
    _refuse_complex(params, carry)
    weights = split_floats(params)
    w, unravel_w = ravel_pytree(weights.values)
    states = split_floats(carry)
    c, unravel_c = ravel_pytree(states.values)

    def step(w, c, others, x):
        outputs, new = one_step(
            cell, weights.rebuild(unravel_w(w)), states.rebuild(unravel_c(c), others), x
        )
        return outputs, ravel_pytree(split_floats(new).values)[0], jax.tree.leaves(new)

    def advance(run, at):
        (total, c, m, others), (x, y) = run, at
        to_w, to_c = jax.grad(lambda w, c: scalar(loss_fn(step(w, c, others, x)[0], y)), (0, 1))(
            w, c
        )
        dw, dc = jax.jacrev(lambda w, c: step(w, c, others, x)[1], (0, 1))(w, c)
        _, new, others = step(w, c, others, x)
        return (total + to_w + to_c @ m, new, dw + dc @ m, others), None

    start = (
        jnp.zeros_like(w),
        c,
        jnp.zeros((c.size, w.size), jnp.result_type(c, w)),
        jax.tree.leaves(carry),
    )
    total = jax.jit(lambda start: jax.lax.scan(advance, start, (xs, ys))[0][0])(start)
    return _like(params, weights, unravel_w(total))


@public('braintrace.verify.finite_difference_gradients')
def finite_difference_gradients(
    cell: Callable,
    params,
    carry,
    xs,
    ys,
    loss_fn: Callable,
    *,
    eps: float = 1e-5,
    entries: int | None = None,
):
    """The same gradient by central differences: ``(L(w + eps e_i) - L(w - eps e_i)) / (2 eps)`` for
    every entry i.

    ``entries`` is the number of entries to measure, by default all; they are drawn at random,
    always the same ones, and the others are NaN. Each takes two runs of the sequence. The loss
    itself is measured, so a cell with surrogate gradients gets another result. Other arguments and
    errors as for :func:`bptt_gradients`; :class:`braintrace.errors.OptionError` unless
    ``jax_enable_x64`` is on, :class:`braintrace.errors.StructureError` for parameters or a carry
    that are not float64.

    >>> import braintrace, jax, jax.numpy as jnp
    >>> cell = lambda params, h, x: (h, params['a'] * h + x)
    >>> loss = lambda output, target: output - target
    >>> with jax.enable_x64(True):
    ...     args = {'a': jnp.array(0.5)}, jnp.array(1.), jnp.zeros(3), jnp.zeros(3)
    ...     round(float(braintrace.verify.finite_difference_gradients(cell, *args, loss)['a']), 6)
    2.0
    """
    params, carry, xs, ys = checked(cell, params, carry, xs, ys, loss_fn)
    _check_differences(params, carry, eps, entries)
    weights = split_floats(params)
    w, unravel = ravel_pytree(weights.values)
    chosen = np.arange(w.size)
    if entries is not None and entries < w.size:
        chosen = np.sort(np.random.default_rng(0).choice(w.size, entries, replace=False))

    def value(w):
        return total_loss(cell, loss_fn, weights.rebuild(unravel(w)), carry, xs, ys)

    def slope(i):
        return (value(w.at[i].add(eps)) - value(w.at[i].add(-eps))) / (2 * eps)

    slopes = jax.jit(lambda chosen: jax.lax.map(slope, chosen))(chosen)
    return _like(params, weights, unravel(jnp.full_like(w, jnp.nan).at[chosen].set(slopes)))


def _like(params, weights, grads: list):
    """Put the gradients of the float leaves in a tree like ``params``, float0 for the others."""
    none = [
        None if is_float(p) else np.zeros(jnp.shape(p), jax.dtypes.float0)
        for p in jax.tree.leaves(params)
    ]
    return weights.rebuild(grads, none)


def _refuse_complex(params, carry) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path({'params': params, 'carry': carry}):
        if jnp.iscomplexobj(leaf):
            raise NotSupportedError(
                f'{jax.tree_util.keystr(path)} is complex, and the dense recursion is one of real '
                'numbers. Use bptt_gradients, or keep real and imaginary part apart.'
            )


def _check_differences(params, carry, eps, entries) -> None:
    if jnp.result_type(float) != jnp.float64:
        raise OptionError(
            "differences of losses need float64: call jax.config.update('jax_enable_x64', True) "
            'first, and make the parameters and the carry in float64.'
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path({'params': params, 'carry': carry}):
        if is_float(leaf) and jnp.result_type(leaf) != jnp.float64:
            raise StructureError(
                f'{jax.tree_util.keystr(path)} is {jnp.result_type(leaf)}; differences of losses '
                'need float64.'
            )
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not eps > 0:
        raise OptionError(f'eps is {eps!r}; give a step > 0, such as 1e-5.')
    if entries is not None and not is_int(entries, 1):
        raise OptionError(f'entries is {entries!r}; give an int >= 1, or None for all.')
