"""The arguments of calls over a sequence, and their leaves; a refusal tells the remedy."""

from __future__ import annotations

import difflib
import math
from collections.abc import Hashable
from numbers import Integral

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler import ETraceGraph, abstract, describe_aval, param_name
from .._errors import NotSupportedError, OptionError, StructureError
from .._rules import MOST_PENDING, Rule

REDUCTIONS = ('mean', 'sum')
LOSS_OUTPUTS = ('per_step', 'masked', 'scalar')
INSIDES = ('trace', 'exact')  # of the gradient inside a window
CARRIES = ('trace', 'drop')  # of the trace at the end of a sequence
NOT_FINITE = ('keep', 'skip', 'raise')  # what to do with a lane that is not finite


def check_choice(name: str, value, allowed) -> None:
    """Refuse a value that is none of the allowed ones."""
    if not any(value is a or (isinstance(value, str) and value == a) for a in allowed):
        choices = ' or '.join(map(repr, allowed))
        raise OptionError(f'{name} is {value!r}; choose {choices}.{did_you_mean(value, allowed)}')


def did_you_mean(value, allowed) -> str:
    """A sentence that names the nearest of the allowed strings; empty where none is near."""
    names = {a.lower(): a for a in allowed if isinstance(a, str)}
    near = difflib.get_close_matches(str(value).lower(), names, 1)
    return f' Did you mean {names[near[0]]!r}?' if near else ''


def length_of(*trees) -> int:
    """The common length of axis 0 of every leaf."""
    leaves = [
        (jax.tree_util.keystr(p), jnp.shape(x))
        for p, x in jax.tree_util.tree_flatten_with_path(trees)[0]
    ]
    if not leaves:
        raise StructureError('there is no sequence: give at least one array with time in axis 0.')
    scalars = [name for name, shape in leaves if not shape]
    if scalars:
        raise StructureError(
            f'sequence leaf {scalars[0]} is a scalar; time must be axis 0 of every leaf.'
        )
    lengths = {name: shape[0] for name, shape in leaves}
    if len(set(lengths.values())) > 1:
        raise StructureError(
            f'sequences have unequal lengths: {lengths}, where [0] is the first sequence (xs) and '
            '[1] the second (ys). Time is axis 0 of every leaf.'
        )
    if leaves[0][1][0] == 0:
        raise StructureError('the sequences are empty (length 0); give at least one step.')
    return leaves[0][1][0]


def check_mask(mask, length: int) -> jax.Array:
    """The mask as an array ``(T,)``, ones where none is given."""
    if mask is None:
        return jnp.ones(length)
    mask = _array(mask)
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


def weighed(losses: jax.Array, mask, output: str, reduction: str) -> jax.Array:
    """The losses of a sequence as ``loss_output`` asks for them."""
    if output == 'per_step':
        return losses
    weights = check_mask(mask, len(losses))
    masked = jnp.where(weights == 0, 0, losses * weights)
    if output == 'masked':
        return masked
    return masked.sum() / (weights.sum() if reduction == 'mean' else 1)


def _array(x):
    return np.asarray(x) if isinstance(x, str) else jnp.asarray(x)


def check_flags(what: str, flags, length: int, t_shape: tuple[int, ...]) -> jax.Array:
    """Reset flags as bool of shape ``(T,)`` or ``(T, B)``; ``what`` begins the message."""
    flags = _array(flags)
    if flags.dtype != bool or flags.shape not in ((length,), (length, *t_shape)):
        raise StructureError(
            f'{what} {flags.dtype}{list(flags.shape)}; give bool of shape [{length}] or '
            f'{[length, *t_shape]}.'
        )
    return flags


def check_window(window, budget: int | None) -> None:
    """Refuse a window that is no size, and a budget that is no number of bytes."""
    if budget is not None and not _is_count(budget):
        raise OptionError(f'memory_budget is {budget!r}; give a number of bytes >= 1, or None.')
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


def choose_delay(write_every, every, graph: ETraceGraph, rule: Rule) -> int:
    """The number of updates between two writes of the trace: as asked (in steps), or as the rule
    chooses.
    """
    for name, value in (('update_every', every), ('write_every', write_every)):
        left_out = value is None and name == 'write_every'
        if not left_out and not _is_count(value):
            raise OptionError(f'{name} is {value!r}; give a number of steps >= 1.')
    if write_every is not None and (write_every % every or write_every // every > MOST_PENDING):
        raise OptionError(
            f'write_every is {write_every}; give a multiple of the {every} steps between updates, '
            f'at most {MOST_PENDING} times as many.'
        )
    return rule.delay(graph, int(every), None if write_every is None else int(write_every // every))


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
    avals = [x if isinstance(x, jax.Array) else abstract(x) for x in leaves]  # each eager call asks
    return treedef, tuple((a.shape, a.dtype) for a in avals)


def tree_bytes(tree) -> int:
    """Bytes of all leaves."""
    return sum(math.prod(jnp.shape(x)) * jnp.result_type(x).itemsize for x in jax.tree.leaves(tree))


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
