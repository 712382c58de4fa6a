"""A third factor, such as a reward, as a loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import saiunit as u

from ._errors import StructureError


def modulated(m, h) -> jax.Array:
    """The three-factor rule as a loss: ``sum(m * h)`` with a constant ``m``, whose online gradient
    by D_RTRL is the modulator times the trace, ``dw = sum(m . e)``.

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
    h = _numbers('h', h)
    m = _numbers('m', float(m) if type(m) is int else m)
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


def _numbers(name: str, value) -> jax.Array:
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
