"""The trace of earlier decisions in reinforcement learning, and a step size that is bounded by it.

Beside the trace of a rule (what a weight did to the hidden state) TD(lambda) keeps a second one:
what a weight did to decisions whose outcome is still to come.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from .._compiler import describe_aval, is_inexact, param_name
from .._jax import Tracer
from .._public_names import lacking as _lacking
from ..errors import OptionError, StructureError

__all__ = ['Eligibility', 'eligibility', 'obgd']


class Eligibility(NamedTuple):
    """The functions that :func:`eligibility` returns.

    >>> from braintrace.tasks.agents import eligibility
    >>> eligibility(0.9)._fields
    ('init', 'update', 'weigh')
    """

    init: Callable
    update: Callable
    weigh: Callable


def eligibility(decay) -> Eligibility:
    """The eligibility trace of TD(lambda), ``z <- decay going_on z + g`` for each sample of a
    batch, and the update direction that TD errors make of it.

    ``decay``: discount times lambda, in [0, 1]; an array may be traced. For groups of parameters
    with lambdas of their own, a tree of them like ``params``. The functions are pure:

    - ``init(params, batch_size) -> z``, zeros ``(batch, *shape)`` for each leaf, so they take
      ``batch_size`` times the memory of the parameters.
    - ``update(z, grads, going_on) -> z``; ``grads`` are gradients of one head, or a weighted sum of
      those of several, by sample (``jax.vmap`` of :meth:`OnlineLearner.heads`); ``going_on``
      ``(batch,)`` is 0 where the step begins an episode, else 1.
    - ``weigh(z, delta) -> tree like params``: the mean over samples of ``delta z``, with ``delta``
      ``(batch,)``. It points uphill: hand its negative to an optimizer that descends.

    The TD error of step t, ``delta = r + discount v' - v``, is known when the value v' of the next
    observation is, so it weighs the z that has the gradients of step t and no later ones. Source:
    Sutton and Barto, Reinforcement Learning (2018), section 13.5.

    Raises :class:`braintrace.errors.OptionError` for a ``decay`` or ``batch_size`` out of range;
    the functions raise :class:`braintrace.errors.StructureError` for arrays that do not fit the
    trace, and for a decay that its dtype rounds to none: ``init`` of parameters in float32 makes a
    trace in float32.

    >>> import jax.numpy as jnp
    >>> from braintrace.tasks.agents import eligibility
    >>> z_of = eligibility(0.9)
    >>> z = z_of.init({'w': jnp.zeros(2)}, batch_size=3)
    >>> for going_on in (jnp.zeros(3), jnp.ones(3)):
    ...     z = z_of.update(z, {'w': jnp.ones((3, 2))}, going_on)
    >>> z['w'][0].tolist(), z_of.weigh(z, jnp.array([3.0, 0.0, 0.0]))['w'].tolist()
    ([1.899999976158142, 1.899999976158142], [1.899999976158142, 1.899999976158142])
    """
    for value in jax.tree.leaves(decay) or [decay]:
        if not _is_number(value, lambda x: 0 <= x <= 1):
            raise OptionError(
                f'decay is {value!r}; give discount times lambda, a number from 0 to 1.'
            )

    def init(params, batch_size: int):
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise OptionError(f'batch_size is {batch_size!r}; give an int above 0.')
        # the trace of an integer parameter stays 0
        zeros = lambda p: jnp.zeros((batch_size, *p.shape), p.dtype if is_inexact(p) else jnp.int8)
        return jax.tree.map(zeros, params)

    def update(z, grads, going_on):
        going_on = jnp.asarray(going_on, float)
        _check_batch(z, going_on, 'going_on')
        _check_grads(z, grads)
        single = jax.tree.structure(decay) == jax.tree.structure(0)
        decays = jax.tree.map(lambda _: decay, z) if single else decay
        _check_decays(z, decays)

        def added(e, g, decay):
            return (_rows(decay * going_on, e) * e + g).astype(e.dtype) if is_inexact(e) else e

        return jax.tree.map(added, z, grads, decays)

    def weigh(z, delta):
        delta = jnp.asarray(delta)
        _check_batch(z, delta, 'delta')
        return jax.tree.map(lambda e: _mean(delta, e), z)

    return Eligibility(init, update, weigh)


def obgd(rate: float = 1.0, kappa: float = 2.0):
    """Overshooting-bounded gradient descent, an optax transformation for updates at each step:
    ``update(z, state, params, delta=delta)`` returns the mean over samples of ``alpha delta z``
    with ``alpha = min(rate, 1 / (kappa max(|delta|, 1) |z|_1))``.

    ``z`` is an :func:`eligibility` trace of gradients that point uphill, ``delta`` ``(batch,)`` the
    TD errors. A larger ``kappa`` keeps steps further from overshooting what one sample asks for.
    Source: Elsayed, Vasan and Mahmood 2024 (arXiv:2410.14606), where the batch is 1; here each
    sample has a step size of its own.

    Raises :class:`braintrace.errors.OptionError` without optax or ``delta`` and for a ``rate`` or
    ``kappa`` that is not above 0, :class:`braintrace.errors.StructureError` for arrays that do not
    fit each other.

    >>> import jax.numpy as jnp, optax
    >>> from braintrace.tasks.agents import eligibility, obgd
    >>> params, z_of, optimizer = {'w': jnp.zeros(2)}, eligibility(0.9), obgd(1.0, kappa=2.0)
    >>> z = z_of.update(z_of.init(params, 1), {'w': jnp.ones((1, 2))}, jnp.zeros(1))
    >>> delta, state = jnp.array([3.0]), optimizer.init(params)
    >>> updates, state = optimizer.update(z, state, params, delta=delta)
    >>> optax.apply_updates(params, updates)['w'].tolist()  # 3 z / (2 * 3 * 2)
    [0.25, 0.25]
    """
    for name, value in (('rate', rate), ('kappa', kappa)):
        if not _is_number(value, lambda x: x > 0):
            raise OptionError(f'{name} is {value!r}; give a number above 0.')
    try:
        import optax
    except ImportError as error:
        raise OptionError('obgd is an optax transformation: `pip install optax`.') from error

    def update(z, state, params=None, *, delta=None, **others):
        if delta is None:
            raise OptionError('obgd needs the TD errors: `update(z, state, params, delta=delta)`.')
        delta = jnp.asarray(delta)
        _check_batch(z, delta, 'delta')
        # a sum of half-precision numbers would overflow, and one of integers is 0
        wide = jnp.result_type(delta, jnp.zeros(()))
        sizes = [jnp.abs(e).astype(wide) for e in jax.tree.leaves(z) if is_inexact(e)]
        size = sum(e.reshape(len(e), -1).sum(1) for e in sizes)
        bound = 1 / (kappa * jnp.maximum(jnp.abs(delta), 1) * size)
        alpha = jnp.minimum(rate, bound)  # where z is 0 the bound is infinite
        return jax.tree.map(lambda e: _mean(alpha * delta, e), z), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _is_number(value, holds: Callable) -> bool:
    """Whether a value is a scalar for which this holds; of a traced one it is not known."""
    if isinstance(value, Tracer):
        return value.ndim == 0
    number = isinstance(value, Real) or getattr(value, 'shape', None) == ()
    return number and not isinstance(value, bool) and bool(holds(value))


def _rows(weights, e):
    """One weight for each sample, along the axes of ``e``."""
    return weights.reshape(weights.shape + (1,) * (e.ndim - weights.ndim))


def _mean(weights, e):
    """The mean over samples of ``weights e``; of an integer parameter 0."""
    return (jnp.tensordot(weights, e, 1) / len(e)).astype(e.dtype) if is_inexact(e) else e[0]


def _check_batch(z, x, what: str) -> None:
    """Refuse weights that are not one for each sample."""
    leaves = jax.tree.leaves(z)
    batch = leaves[0].shape[:1] if leaves else ()
    if jnp.shape(x) != batch or not batch or any(e.shape[:1] != batch for e in leaves):
        shapes = [list(e.shape) for e in leaves]
        raise StructureError(
            f'{what} has shape {list(jnp.shape(x))}, and the trace {shapes}: give one number for '
            'each sample, and a trace whose axis 0 is these samples.'
        )


def _check_decays(z, decays) -> None:
    """Refuse another tree than the trace's, and a decay too near to 1 for the dtype of a leaf."""
    here: Any = jax.tree.structure(z)
    if here != jax.tree.structure(decays):
        raise StructureError(
            f'decay is {decays!r}, a tree of another structure than the trace. Give one number, or '
            'one for each leaf of the params that `init` got.'
        )
    for (path, e), decay in zip(
        jax.tree_util.tree_leaves_with_path(z), jax.tree.leaves(decays), strict=True
    ):
        if not is_inexact(e) or isinstance(decay, Tracer) or float(decay) == 1:
            continue
        if 1 - float(decay) < jnp.finfo(e.dtype).eps / 2:
            raise StructureError(
                f'the trace of {param_name(path)} is {describe_aval(e)}, which a decay of {decay} '
                'leaves as it is, because the product rounds to what was there. Give init '
                'parameters in float32.'
            )


def _check_grads(z, grads) -> None:
    here: Any = jax.tree.structure(z)
    if here != jax.tree.structure(grads):
        raise StructureError(
            'grads have another structure than the trace. Pass the gradients of one head, such as '
            '`heads(...).grads[0]`, for the params that `init` got.'
        )
    for (path, e), g in zip(
        jax.tree_util.tree_leaves_with_path(z), jax.tree.leaves(grads), strict=True
    ):
        if e.shape != jnp.shape(g):
            raise StructureError(
                f'the gradient of {param_name(path)} has shape {list(jnp.shape(g))}, its trace '
                f'{describe_aval(e)}. Gradients stay apart by sample: `jax.vmap` of heads of one.'
            )


if not TYPE_CHECKING:
    __getattr__ = _lacking(__name__, __all__)
