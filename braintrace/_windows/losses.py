"""What a loss function returns of a step: a loss, or a loss and a penalty beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import saiunit as u

from .._errors import StepFunctionError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Penalised:
    r"""A loss of a step and a penalty beside it, which the mask does not weigh: a rate penalty at
    all steps, a task's loss where its target is known.

    A loss or step function returns it in the place of its loss, with ``has_aux`` as
    ``(Penalised(loss, penalty), aux)``. The gradient is that of

    .. math:: \frac{\sum_t m_t\, L_t}{\sum_t m_t} + \frac{1}{T} \sum_t P_t

    with mask m, loss L and penalty P, over the T steps of the call, or of each update (where its
    mask is zero, of the penalty alone); with ``reduction='sum'`` of :math:`\sum_t m_t L_t + P_t`.
    Without a mask it is that of ``loss + penalty``. Where the mask is 0, the loss need not be a
    number, unless one ``scan``, ``cond`` or function with a derivative rule of its own makes it
    together with the penalty. The losses that come back are the losses alone.

    ``loss`` and ``penalty`` are real scalars; raises :class:`braintrace.StepFunctionError` at the
    call for others, and :class:`braintrace.OptionError` for a mask beside a synthetic gradient.

    >>> import braintrace, jax.numpy as jnp
    >>> model = braintrace.nn.GRUCell(2, 4)
    >>> learner = braintrace.compile(model, 'D_RTRL', jnp.zeros((3, 2)), batch_size=3)
    >>> def step_fn(x, y):
    ...     h = learner(x)
    ...     return braintrace.Penalised(jnp.mean((h - y) ** 2), 0.1 * jnp.mean(h**2))
    >>> xs, ys = jnp.ones((5, 3, 2)), jnp.full((5, 3, 4), jnp.nan).at[4].set(1)
    >>> recall = jnp.array([0, 0, 0, 0, 1])
    >>> grads = learner.etrace_grad(xs, ys, step_fn=step_fn, mask=recall)
    >>> all(bool(jnp.isfinite(g).all()) for gs in grads.values() for g in gs.values())
    True
    """

    loss: Any
    penalty: Any


def task_loss(value):
    """The loss, without a penalty beside it."""
    return value.loss if isinstance(value, Penalised) else value


def total_loss(value):
    """The loss, with a penalty beside it."""
    return value.loss + value.penalty if isinstance(value, Penalised) else value


def check_loss(value, what: str):
    """The loss, if it is a real scalar, or two of them; ``what`` names the function that returned
    it.
    """
    if not isinstance(value, Penalised):
        return _scalar(value, f'{what} returned')
    loss = _scalar(value.loss, f'{what} returned Penalised with the loss')
    penalty = _scalar(value.penalty, f'{what} returned Penalised with the penalty')
    return Penalised(jnp.asarray(loss), jnp.asarray(penalty))


def _scalar(value, found: str):
    remedy = 'return one real scalar, such as a mean.'
    if isinstance(value, u.Quantity):
        raise StepFunctionError(
            f'{found} a quantity in {value.unit}; divide it by a unit: {remedy}'
        )
    if not hasattr(value, 'dtype') and not isinstance(value, int | float):
        raise StepFunctionError(f'{found} {type(value).__name__}; {remedy}')
    if jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise StepFunctionError(
            f'{found} {jnp.result_type(value)}{list(jnp.shape(value))}; {remedy}'
        )
    return value
