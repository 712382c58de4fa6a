"""What a step function returns: a loss, a penalty beside it, a third factor as a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import saiunit as u

from .._errors import StepFunctionError, StructureError


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


def penalty_of(value):
    """The penalty beside a loss, or None."""
    return value.penalty if isinstance(value, Penalised) else None


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


def modulated(m, h) -> jax.Array:
    """The three-factor rule as a loss: ``sum(m * h)`` with a constant ``m``, whose online gradient
    by D_RTRL is the modulator times the trace, ``dw = <m, e>``.

    Return it from a step function, or add it to a loss. The modulator ``m`` (a reward, a prediction
    error, a learning signal of one's own) takes the place of the derivative of a loss by ``h``; no
    gradient passes through it. Parameters without a trace get their same-step gradient of this
    sum. ``grads`` point uphill of ``m``: to follow a reward, negate it or the updates.

    ``h``: a hidden state or an output of the step, a real float array or a Quantity. ``m``: a
    number, an array with the leading axes of ``h`` (one for each lane is ``(B,)``), or one of the
    rank of ``h`` that broadcasts to it, or a Quantity. Of units the numbers count: the loss is a
    number, ``m`` and ``h`` each in its own unit. Raises :class:`braintrace.StructureError` for
    other shapes and types.

    Source: Fremaux and Gerstner 2016, "Neuromodulated spike-timing-dependent plasticity, and theory
    of three-factor learning rules", Front. Neural Circuits 9:85.

    >>> import braintrace, jax.numpy as jnp
    >>> model = braintrace.nn.GRUCell(2, 4)
    >>> learner = braintrace.compile(model, 'three_factor', jnp.zeros((3, 2)), batch_size=3)
    >>> def step_fn(x, reward):  # reward: one for each of the 3 samples
    ...     return braintrace.modulated(-reward, learner(x))
    >>> xs, rewards = jnp.ones((5, 3, 2)), jnp.ones((5, 3))
    >>> len(learner.etrace_grad(xs, rewards, step_fn=step_fn, reduction='sum'))
    3
    """
    h = _floats('h', h)
    m = _floats('m', float(m) if type(m) is int else m)
    leading, fits = h.shape[: m.ndim] == m.shape, True
    if not leading:
        ones = zip(m.shape, h.shape, strict=False)
        fits = m.ndim == h.ndim and all(a in (1, b) for a, b in ones)
    if not fits:
        raise StructureError(
            f'modulated: m has shape {list(m.shape)} and h {list(h.shape)}; give m as a number, '
            'with the leading axes of h (one number for each lane), or with the rank of h and '
            'axes that are 1 or those of h.'
        )
    if leading:
        m = m.reshape(*m.shape, *[1] * (h.ndim - m.ndim))
    return jnp.sum(jax.lax.stop_gradient(m) * h)


def _floats(name: str, value) -> jax.Array:
    """The numbers of an array or a Quantity, if they are real floats."""
    mantissa = u.get_magnitude(value) if isinstance(value, u.Quantity) else value
    if not (isinstance(mantissa, float) or hasattr(mantissa, 'dtype')):
        raise StructureError(
            f'modulated: {name} is a {type(value).__name__}; give an array of floats (of a state '
            'its `.value`).'
        )
    if not jnp.issubdtype(jnp.result_type(mantissa), jnp.floating):
        raise StructureError(
            f'modulated: {name} is {jnp.result_type(mantissa)}{list(jnp.shape(mantissa))}; give '
            'real floats, such as `m.astype(float)`; of a complex state its real or imaginary '
            'part.'
        )
    return jnp.asarray(mantissa)
