"""What a call over a sequence is given and returns: losses, options, masks, flags, and their
checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._compiler import abstract, describe_aval, param_name
from .._executor import share, varying
from .._public_names import nearest
from .._signatures import does_not_fit
from ..errors import (
    NotFiniteError,
    NotSupportedError,
    OptionError,
    StepFunctionError,
    StructureError,
)

# answers ------------------------------------------------------------------------------------------


Grads = TypeVar('Grads')
Losses = TypeVar('Losses')
State = TypeVar('State')


class StepGradient(NamedTuple, Generic[Grads, Losses, State]):
    """What every call that takes the gradient of one step returns.

    - ``grads``: a tree like params; of ``heads`` a tuple of one for each loss
    - ``loss``: a scalar; of ``heads`` a tuple of one for each loss. A penalty
      (:class:`braintrace.Penalised`) is no part of it
    - ``outputs``: those of the cell
    - ``state``: the :class:`braintrace.functional.OnlineState` after the step

    >>> import braintrace
    >>> braintrace.functional.StepGradient._fields
    ('grads', 'loss', 'outputs', 'state')
    """

    grads: Grads
    loss: Losses
    outputs: Any
    state: State


class Gradient(NamedTuple, Generic[Grads, State]):
    """What every call that takes the gradient of a sequence returns.

    - ``grads``: a tree like params
    - ``losses``: those of the steps, ``(T,)``; a penalty (:class:`braintrace.Penalised`) is no part
      of them
    - ``aux``: with ``has_aux`` what the loss or step function returned beside its loss, time in
      front; else None. Outputs are not kept: they would be T of them
    - ``state``: the :class:`braintrace.functional.OnlineState` after the call; None of a learner,
      which keeps it itself

    >>> import braintrace
    >>> braintrace.functional.Gradient._fields
    ('grads', 'losses', 'aux', 'state')
    """

    grads: Grads
    losses: jax.Array
    aux: Any
    state: State


class Skipped(NamedTuple):
    """What ``not_finite='reset'`` did in a call, as int32.

    - ``updates``: how many were left out
    - ``samples``: how often each started again, of the shape of ``state.t``

    >>> import braintrace
    >>> braintrace.functional.Skipped._fields
    ('updates', 'samples')
    """

    updates: jax.Array
    samples: jax.Array

    @classmethod
    def none(cls, t: jax.Array) -> Skipped:
        """The counts before the first step; ``t`` is that of the state."""
        return cls((0 * t).sum(dtype=jnp.int32), 0 * t)

    def error(self, losses: jax.Array) -> NotFiniteError | None:
        """What ``not_finite='raise'`` raises after steps with these losses; None if nothing was
        skipped.
        """
        updates, samples = jax.device_get(self)
        counts = [f'sample {k} ({n} x)' for k, n in enumerate(samples.reshape(-1)) if n]
        if not (updates or counts):
            return None
        counts = counts if samples.ndim else [f'the state ({samples} x)']
        # where to look first
        bad = jnp.flatnonzero(~jnp.isfinite(losses))
        first = ''
        if len(bad):
            first = f' The first loss that is not finite is that of step {int(bad[0])}.'
        return NotFiniteError(
            f'{updates} update(s) were not finite and were left out; started again, with an empty '
            f"trace: {', '.join(counts) or 'nothing'}.{first} It is what not_finite='reset' does; "
            'look at the data of these steps.'
        )


class Trained(NamedTuple, Generic[Grads, State]):
    """What every call that changes parameters returns.

    - ``params``: the new parameters; None of a learner, which writes them into its model
    - ``losses``, ``aux`` and ``state``: as in :class:`Gradient`
    - ``opt_state``: of the optimiser, to go on from
    - ``skipped``: a :class:`Skipped`, what ``not_finite='reset'`` left out; else None
    - ``observed``: what ``observe`` returned after each update, stacked; else None

    >>> import braintrace
    >>> braintrace.functional.Trained._fields
    ('params', 'losses', 'aux', 'state', 'opt_state', 'skipped', 'observed')
    """

    params: Grads
    losses: jax.Array
    aux: Any
    state: State
    opt_state: Any
    skipped: Skipped | None = None
    observed: Any = None


# the optimiser -----------------------------------------------------------------------------------


class Optimizer(Protocol):
    """What an ``optax.GradientTransformation`` is to a type checker."""

    @property
    def init(self) -> Callable: ...

    @property
    def update(self) -> Callable: ...


# losses -------------------------------------------------------------------------------------------
#
# What a step function returns: a loss, a penalty beside it, a third factor as a loss.


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

    ``loss`` and ``penalty`` are real scalars; raises :class:`braintrace.errors.StepFunctionError`
    at the call for others.

    >>> import braintrace, jax.numpy as jnp
    >>> model = braintrace.nn.GRUCell(2, 4)
    >>> learner = braintrace.compile(model, 'D_RTRL', jnp.zeros((3, 2)), batch_size=3)
    >>> def step_fn(x, y):
    ...     h = learner(x)
    ...     return braintrace.Penalised(jnp.mean((h - y) ** 2), 0.1 * jnp.mean(h**2))
    >>> xs, ys = jnp.ones((5, 3, 2)), jnp.full((5, 3, 4), jnp.nan).at[4].set(1)
    >>> recall = jnp.array([0, 0, 0, 0, 1])
    >>> grads = learner.etrace_grad(xs, ys, step_fn=step_fn, mask=recall).grads
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
    """The loss, with a penalty beside it. Of the two the shards of a ``shard_map`` may have one in
    common: then each of them has its part of that.
    """
    if not isinstance(value, Penalised):
        return value
    axes = varying(value)
    parts = value.loss, value.penalty
    loss, penalty = (x * share(axes, varying(x)) if axes else x for x in parts)
    return loss + penalty


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
    number, ``m`` and ``h`` each in its own unit. Raises :class:`braintrace.errors.StructureError`
    for other shapes and types.

    Source: Fremaux and Gerstner 2016, "Neuromodulated spike-timing-dependent plasticity, and theory
    of three-factor learning rules", Front. Neural Circuits 9:85.

    >>> import braintrace, jax.numpy as jnp
    >>> model = braintrace.nn.GRUCell(2, 4)
    >>> learner = braintrace.compile(model, 'd_rtrl', jnp.zeros((3, 2)), batch_size=3)
    >>> def step_fn(x, reward):  # reward: one for each of the 3 samples
    ...     return braintrace.modulated(-reward, learner(x))
    >>> xs, rewards = jnp.ones((5, 3, 2)), jnp.ones((5, 3))
    >>> len(learner.etrace_grad(xs, rewards, step_fn=step_fn, reduction='sum').grads)
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


# arguments and their checks -----------------------------------------------------------------------
#
# The arguments of calls over a sequence, and their leaves; a refusal tells the remedy.


REDUCTIONS = ('mean', 'sum')
INSIDES = ('trace', 'exact')  # of the gradient inside a window
NOT_FINITE = ('keep', 'reset', 'raise')  # what to do with numbers that are not finite


def check_choice(name: str, value, allowed) -> None:
    """Refuse a value that is none of the allowed ones."""
    if not any(value is a or (isinstance(value, str) and value == a) for a in allowed):
        choices = ' or '.join(map(repr, allowed))
        raise OptionError(f'{name} is {value!r}; choose {choices}.{did_you_mean(value, allowed)}')


def did_you_mean(value, allowed) -> str:
    """A sentence that names the nearest of the allowed strings; empty where none is near."""
    near = nearest(str(value), (a for a in allowed if isinstance(a, str)))
    return f' Did you mean {near!r}?' if near else ''


def length_of(*trees) -> int:
    """The common length of axis 0 of every leaf."""
    lengths: dict[str, int] = {}
    for path, x in jax.tree_util.tree_flatten_with_path(trees)[0]:
        name, shape = jax.tree_util.keystr(path), jnp.shape(x)
        if not shape:
            raise StructureError(
                f'sequence leaf {name} is a scalar; time must be axis 0 of every leaf.'
            )
        lengths[name] = shape[0]
    if not lengths:
        raise StructureError('there is no sequence: give at least one array with time in axis 0.')
    length, *others = dict.fromkeys(lengths.values())
    if others:
        raise StructureError(
            f'sequences have unequal lengths: {lengths}, where [0] is the first sequence (xs) and '
            '[1] the second (ys). Time is axis 0 of every leaf.'
        )
    if length == 0:
        raise StructureError('the sequences are empty (length 0); give at least one step.')
    return length


def check_mask(mask, length: int) -> jax.Array:
    """The mask as an array ``(T,)``, ones where none is given."""
    if mask is None:
        return jnp.ones(length)
    mask = _array('mask is', mask)
    if mask.shape != (length,) or not (
        mask.dtype == bool or jnp.issubdtype(mask.dtype, jnp.number)
    ):
        raise StructureError(
            f'mask is {mask.dtype}{list(mask.shape)}; give one weight for each of the {length} '
            f'steps: [{length}].'
        )
    return mask.astype(jnp.result_type(float))


def divisor(mask: jax.Array) -> jax.Array:
    """What a mean over weighed steps is divided by: the sum of the weights, 1 where it is 0."""
    total = mask.sum()
    return jnp.where(total == 0, 1, total)


def _array(what: str, x):
    try:
        return np.asarray(x) if isinstance(x, str) else jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise StructureError(f'{what} {x!r:.80}; give one array.') from error


def check_flags(
    what: str, flags, shapes: Collection[tuple[int, ...]], remedy: str = ''
) -> jax.Array:
    """Reset flags as bool of one of the shapes; ``what`` and ``remedy`` are of the message."""
    flags = _array(what, flags)
    if flags.dtype != bool or flags.shape not in shapes:
        wanted = ' or '.join(dict.fromkeys(str(list(shape)) for shape in shapes))
        raise StructureError(
            f'{what} {flags.dtype}{list(flags.shape)}; give bool of shape {wanted}.{remedy}'
        )
    return flags


def check_window(window) -> None:
    """Refuse a window that is no size."""
    named = window is None or (isinstance(window, str) and window == 'auto')
    if not named and not _is_count(window):
        raise OptionError(
            f"window is {window!r}; give an int >= 1, 'auto', or None for the whole sequence."
        )


def check_inside(inside, window) -> bool:
    """Whether windows are exact; their length is then the user's choice, since it changes the
    gradient.
    """
    check_choice('inside', inside, INSIDES)
    if inside == 'exact' and isinstance(window, str):
        raise OptionError(
            f"window is {window!r} with inside='exact', where its length changes the gradient: "
            'give an int >= 1, or None for the whole sequence.'
        )
    return inside == 'exact'


def _is_count(value) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def check_updates(every) -> None:
    """Raise where the steps between updates are no count."""
    if not _is_count(every):
        raise OptionError(f'update_every is {every!r}; give a number of steps >= 1.')


def check_progress(progress, observes: bool = False) -> None:
    """Refuse what is no bool and no function of a step and its losses, beside what is observed."""
    if isinstance(progress, bool):
        return
    number, names = (3, 'step, losses, observed') if observes else (2, 'step, losses')
    problem = does_not_fit(progress, number) if callable(progress) else repr(progress)
    if problem:
        raise OptionError(f'progress is {problem}; give True, False or a function `({names})`.')


def check_observe(observe) -> None:
    """Refuse what is no function of the gradients and the state of an update."""
    problem = does_not_fit(observe, 2) if callable(observe) else repr(observe)
    if observe is not None and problem:
        raise OptionError(f'observe is {problem}; give a function `(grads, state) -> tree`.')


def check_optimizer(optimizer) -> None:
    """Refuse an optimizer that is no ``optax.GradientTransformation``."""
    callables = callable(getattr(optimizer, 'init', None)) and callable(
        getattr(optimizer, 'update', None)
    )
    if not (callables and isinstance(optimizer, Hashable)):
        raise OptionError(
            f'optimizer is a {type(optimizer).__name__}; give an optax.GradientTransformation, '
            'such as optax.adam(1e-3).'
        )


def takes_value(optimizer) -> bool:
    """Whether an optimizer's ``update`` takes the loss as ``value=``, as optax calls it."""
    known = inspect.signature(optimizer.update).parameters.values()
    return any(p.name == 'value' or p.kind is p.VAR_KEYWORD for p in known)


def check_updatable(params) -> None:
    """Refuse leaves that no optimiser can change."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise StructureError(
                f'parameter {param_name(path)} is {describe_aval(abstract(leaf))}, which no '
                'optimiser can change. Keep it out of the parameters: pass it with the inputs, or '
                'close over it.'
            )


def check_opt_state(optimizer, values, opt_state) -> None:
    """Refuse the state of another optimiser or of other weights."""
    if _shapes(jax.eval_shape(optimizer.init, values)) != _shapes(opt_state):
        raise StructureError(
            'opt_state does not belong to this optimizer and these weights. Pass what an earlier '
            'call returned, or `optimizer.init` of the weights.'
        )


def _shapes(tree) -> tuple:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [jnp.shape(x) for x in leaves]


def signature(trees) -> tuple:
    """Structure, shapes and dtypes."""
    leaves, treedef = jax.tree.flatten(trees)
    found = []
    for x in leaves:  # each eager call asks
        aval = x if isinstance(x, jax.Array) else abstract(x)
        found.append((aval.shape, aval.dtype))
    return treedef, tuple(found)


def zero_gradient(p):
    """Zeros like an inexact parameter, float0 zeros for another."""
    dtype = jnp.result_type(p)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.zeros(jnp.shape(p), dtype)
    return np.zeros(jnp.shape(p), jax.dtypes.float0)


@jax.custom_vjp
def first_order(tree):
    """The same tree; a derivative of an online gradient with respect to it is refused."""
    return tree


def _refuse_second(tree):
    raise NotSupportedError(
        'a derivative of an online gradient was asked for, but the trace holds first derivatives '
        'only: it would be wrong. For second derivatives differentiate the cell itself through '
        'time (verify.bptt_gradients).'
    )


first_order.defvjp(_refuse_second, lambda _, cotangents: (cotangents,))
