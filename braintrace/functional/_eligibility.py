"""The trace of earlier decisions in reinforcement learning, and a step size that is bounded by it.

Beside the trace of a rule (what a weight did to the hidden state) TD(lambda) keeps a second one:
what a weight did to decisions whose outcome is still to come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._compiler import describe_aval, is_inexact, param_name
from .._errors import OptionError, StructureError
from .._jax import Tracer
from .._rules import anywhere
from .._warnings import tell


class Eligibility(NamedTuple):
    """The functions that :func:`eligibility` returns.

    >>> from braintrace.functional import eligibility
    >>> eligibility(0.9)._fields
    ('init', 'update', 'weigh')
    """

    init: Callable
    update: Callable
    weigh: Callable


class EligibilityState(NamedTuple):
    """``trace``: a tree like params with the batch in front; ``steps``: how often it was updated.

    >>> import jax.numpy as jnp
    >>> from braintrace.functional import eligibility
    >>> z = eligibility(0.9).init({'w': jnp.zeros(2)}, batch=3)
    >>> z.trace['w'].shape, int(z.steps)
    ((3, 2), 0)
    """

    trace: Any
    steps: jax.Array


def eligibility(decay) -> Eligibility:
    """The eligibility trace of TD(lambda), ``z <- decay going_on z + g`` for each sample of a
    batch, and the update direction that TD errors make of it.

    ``decay``: discount times lambda, in [0, 1]; an array may be traced. The functions are pure:

    - ``init(params, batch) -> z``, zeros ``(batch, *shape)`` for each leaf of params, so ``batch``
      times their memory.
    - ``update(z, grads, going_on) -> z``; ``grads`` are gradients of one head, or a weighted sum of
      those of several, by sample (:meth:`OnlineLearner.heads`, ``per_sample=True``); ``going_on``
      ``(batch,)`` is 0 where the step begins an episode, else 1.
    - ``weigh(z, delta) -> tree like params``: the mean over samples of ``delta z``, with ``delta``
      ``(batch,)``. It points uphill: hand its negative to an optimizer that descends. A ``delta``
      that is not finite is told once, with the step.

    The TD error of step t, ``delta = r + discount v' - v``, is known when the value v' of the next
    observation is, so it weighs the z that has the gradients of step t and no later ones. Source:
    Sutton and Barto, Reinforcement Learning (2018), section 13.5.

    >>> import jax.numpy as jnp
    >>> from braintrace.functional import eligibility
    >>> z_of = eligibility(0.9)
    >>> z = z_of.init({'w': jnp.zeros(2)}, batch=3)
    >>> for going_on in (jnp.zeros(3), jnp.ones(3)):
    ...     z = z_of.update(z, {'w': jnp.ones((3, 2))}, going_on)
    >>> z.trace['w'][0].tolist(), z_of.weigh(z, jnp.array([3.0, 0.0, 0.0]))['w'].tolist()
    ([1.899999976158142, 1.899999976158142], [1.899999976158142, 1.899999976158142])
    """
    if not isinstance(decay, Tracer) and not 0 <= decay <= 1:
        raise OptionError(f'decay is {decay!r}; give discount times lambda, a number from 0 to 1.')
    told: list[int] = []

    def init(params, batch: int) -> EligibilityState:
        zeros = lambda p: jnp.zeros((batch, *jnp.shape(p)), p.dtype if is_inexact(p) else bool)
        return EligibilityState(jax.tree.map(zeros, params), jnp.zeros((), jnp.int32))

    def update(z: EligibilityState, grads, going_on) -> EligibilityState:
        _check_batch(z, going_on, 'going_on')
        _check_grads(z, grads)
        keep = decay * jnp.asarray(going_on)
        added = lambda e, g: _rows(keep, e) * e + g if is_inexact(e) else e
        return EligibilityState(jax.tree.map(added, z.trace, grads), z.steps + 1)

    def tell_once(delta, steps):
        if not told:
            told.append(int(steps))
            tell(
                f'the TD error of step {int(steps)} is not finite: {delta.tolist()}; so are the '
                'weights after it. Look at rewards and values there, lower the step size, or clip '
                'the gradients.'
            )

    def weigh(z: EligibilityState, delta):
        _check_batch(z, delta, 'delta')
        jax.lax.cond(
            anywhere(~jnp.isfinite(delta)),
            lambda: jax.debug.callback(tell_once, delta, z.steps),
            lambda: None,
        )
        return jax.tree.map(lambda e: _mean(delta, e), z.trace)

    return Eligibility(init, update, weigh)


def obgd(rate: float = 1.0, kappa: float = 2.0):
    """Overshooting-bounded gradient descent, an optax transformation for updates at each step:
    ``update(z.trace, state, params, delta=delta)`` returns the mean over samples of
    ``alpha delta z`` with ``alpha = min(rate, 1 / (kappa max(|delta|, 1) |z|_1))``.

    ``z`` is an :func:`eligibility` trace of gradients that point uphill, ``delta`` ``(batch,)`` the
    TD errors. A larger ``kappa`` keeps steps further from overshooting what one sample asks for.
    Source: Elsayed, Vasan and Mahmood 2024 (arXiv:2410.14606), where the batch is 1; here each
    sample has a step size of its own. Needs optax.

    >>> import jax.numpy as jnp, optax
    >>> from braintrace.functional import eligibility, obgd
    >>> params, z_of, optimizer = {'w': jnp.zeros(2)}, eligibility(0.9), obgd(1.0, kappa=2.0)
    >>> z = z_of.update(z_of.init(params, 1), {'w': jnp.ones((1, 2))}, jnp.zeros(1))
    >>> delta, state = jnp.array([3.0]), optimizer.init(params)
    >>> updates, state = optimizer.update(z.trace, state, params, delta=delta)
    >>> optax.apply_updates(params, updates)['w'].tolist()  # 3 z / (2 * 3 * 2)
    [0.25, 0.25]
    """
    for name, value in (('rate', rate), ('kappa', kappa)):
        if not isinstance(value, Tracer) and not value > 0:
            raise OptionError(f'{name} is {value!r}; give a number above 0.')
    try:
        import optax
    except ImportError as error:
        raise OptionError('obgd is an optax transformation: `pip install optax`.') from error

    def update(z, state, params=None, *, delta=None, **others):
        if delta is None:
            raise OptionError('obgd needs the TD errors: `update(z, state, params, delta=delta)`.')
        leaves = [e for e in jax.tree.leaves(z) if is_inexact(e)]
        size = sum(jnp.abs(e).reshape(len(e), -1).sum(1) for e in leaves)
        bound = 1 / (kappa * jnp.maximum(jnp.abs(delta), 1) * size)
        step = delta * jnp.minimum(rate, bound)  # where z is 0 the bound is infinite
        return jax.tree.map(lambda e: _mean(step, e), z), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _rows(weights, e):
    """One weight for each sample, along the axes of ``e``."""
    return weights.reshape(weights.shape + (1,) * (e.ndim - weights.ndim)).astype(e.dtype)


def _mean(weights, e):
    """The mean over samples of ``weights e``; an integer parameter, kept as bool, has none."""
    return jnp.tensordot(weights.astype(e.dtype), e, 1) / len(e) if is_inexact(e) else e[0]


def _check_batch(z: EligibilityState, x, what: str) -> None:
    """Refuse weights that are not one for each sample."""
    batch = jax.tree.leaves(z.trace)[0].shape[:1]
    if jnp.shape(x) != batch:
        raise StructureError(
            f'{what} has shape {list(jnp.shape(x))}; give one for each of {batch[0]} samples, '
            f'shape {list(batch)}.'
        )


def _check_grads(z: EligibilityState, grads) -> None:
    here: Any = jax.tree.structure(z.trace)
    if here != jax.tree.structure(grads):
        raise StructureError(
            'grads have another structure than the trace. Pass the gradients of one head, such as '
            '`heads(...).grads[0]`, for the params that `init` got.'
        )
    for (path, e), g in zip(
        jax.tree_util.tree_leaves_with_path(z.trace), jax.tree.leaves(grads), strict=True
    ):
        if e.shape != jnp.shape(g):
            raise StructureError(
                f'the gradient of {param_name(path)} has shape {list(jnp.shape(g))}, its trace '
                f'{describe_aval(e)}. Gradients stay apart by sample: `per_sample=True` of heads.'
            )
