"""The state of an online learner, and functions of it that need no learner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

from .._compiler import describe_aval, param_name, path_key, path_name
from .._jax import is_key
from .._rules import counting, uncounted
from .._windows import Gradient, StepGradient, Trained, check_flags
from ..errors import StructureError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OnlineState:
    """All that an online learner carries from step to step, but parameters.

    - ``carry``: the cell's carry
    - ``trace``: a dict relation -> group -> slot of arrays
    - ``t``: the int32 count of trace steps since the last reset, ``(B,)`` where an op is batched,
      else ``()``; it stays at the largest int32 once it is there. Where it is 0 the trace counts as
      zero
    - ``laned`` (static): the paths, ``carry/...`` and ``trace/...``, of the arrays whose axis 0 is
      the lanes
    - ``lane_axes`` (static): path and axis of each array of the carry whose lanes are another axis
    - ``raw_keys`` (static): the paths in the carry of integers that the step takes for PRNG keys,
      as ``jax.random.PRNGKey`` makes them
    - ``key_counts`` (static): the paths in the carry of integers that the step folds into PRNG
      keys, and reads for nothing else
    - ``shared`` (static): of what samples share in the trace a phrase each; where there is any, all
      samples start again together

    >>> import braintrace, jax.numpy as jnp
    >>> cell = lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p['W']))
    >>> learner = braintrace.functional.online(cell)
    >>> state = learner.init({'W': jnp.ones((2, 4))}, jnp.zeros((3, 4)), jnp.ones((3, 2)))
    >>> state.carry.shape, state.t.tolist(), state.trace['W']['carry']['weight'][0].shape
    ((3, 4), [0, 0, 0], (3, 2, 4))
    """

    carry: Any
    trace: dict
    t: jax.Array
    laned: frozenset[str] = field(default=frozenset(), metadata={'static': True})
    lane_axes: tuple[tuple[str, int], ...] = field(default=(), metadata={'static': True})
    raw_keys: frozenset[tuple[str, ...]] = field(default=frozenset(), metadata={'static': True})
    key_counts: frozenset[tuple[str, ...]] = field(default=frozenset(), metadata={'static': True})
    shared: tuple[str, ...] = field(default=(), metadata={'static': True})

    def replace(self, **changes) -> OnlineState:
        """A copy with some fields changed."""
        return replace(self, **changes)


def put_back(flags: jax.Array, fresh, x, name: str, axis: int | None):
    """``fresh`` where a lane (along ``axis``, None: it is not known) is flagged, ``x`` elsewhere.

    ``name`` is the path of this hidden leaf.
    """
    fresh, x = (v if is_key(v) else jnp.asarray(v) for v in (fresh, x))
    # a value that would give the leaf another shape (shapes broadcast from behind) or dtype
    pairs = zip(fresh.shape[::-1], x.shape[::-1], strict=False)
    fits = fresh.ndim <= x.ndim and all(a in (1, b) for a, b in pairs)
    keys = is_key(fresh) or is_key(x)
    dtype = fresh.dtype if keys else jnp.result_type(fresh, x)
    if not fits or dtype != x.dtype:
        raise StructureError(
            f'hidden leaf {name} is {describe_aval(x)}, and carry0 has {describe_aval(fresh)} for '
            'it. Give a carry like the one that `init` got.'
        )
    if flags.ndim and axis is None:
        remedy = (
            'If all lanes share it, reset all of them at once (`learner.reset_state()`; one flag, '
            'or one flag a step), or let it go on: leave it out of `hidden` of functional.online '
            'and functional.reset; a brainstate model keeps it in a ShortTermState.'
        )
        if x.dtype == jnp.uint32 and x.shape[-1:] in ((2,), (4,)):
            remedy = f'If it is a PRNG key, let it go on. {remedy}'
        if x.shape[:1] == flags.shape:
            remedy = (
                f'If axis 0 is the batch, say so: braintrace.Policy(batched=({name!r},)). {remedy}'
            )
        elif x.ndim > 1 and flags.size in x.shape:
            remedy = f'If it is another axis than 0, put the batch first. {remedy}'
        raise StructureError(
            f'hidden leaf {name} ({describe_aval(x)}) can not start again in single lanes: the '
            f'step does not show which of its axes is the batch. {remedy}'
        )
    inner = (1,) * (x.ndim - (axis or 0) - 1) if flags.ndim else (1,) * x.ndim
    return jnp.where(flags.reshape(flags.shape + inner), fresh, x)


def batch_remedy(carry: dict[tuple[str, ...], Any], flags, t_shape: tuple[int, ...]) -> str:
    """What to do about flags for single samples where the step does not show the batch; ``carry``:
    path -> leaf.
    """
    size = getattr(flags, 'shape', ())[-1:]
    names = tuple(path_name(key) for key, x in carry.items() if jnp.shape(x)[:1] == size != ())
    if t_shape or not names:
        return ''
    return (
        ' Single samples can not start again: the step does not show which axis of its states is '
        f'the batch. If it is axis 0, say so: braintrace.Policy(batched={names!r}).'
    )


def check_apart(shared: tuple[str, ...], flags: jax.Array) -> None:
    """Refuse flags of single samples where samples share a trace."""
    if flags.ndim and shared:
        raise StructureError(
            f'single samples can not start again: {"; ".join(shared)}. Reset all of them at once '
            '(one flag, or one flag a step), or learn by braintrace.rules.d_rtrl().'
        )


def check_carry0(carry, carry0) -> None:
    """Refuse another tree than the carry's."""
    here: Any = jax.tree.structure(carry)
    if here != jax.tree.structure(carry0):
        names = [{path_name(p, 'carry') for p in flatten_paths(tree)} for tree in (carry, carry0)]
        raise StructureError(
            f'carry0 has another structure than the carry: missing {sorted(names[0] - names[1])}, '
            f'added {sorted(names[1] - names[0])}. Give a carry like the one that `init` got.'
        )


def no_key(path, leaf) -> bool:
    """The default of ``hidden``: every leaf but PRNG keys."""
    return not is_key(leaf)


def goes_on(hidden: Callable, random: frozenset) -> Callable:
    """``(path, leaf) -> bool``: whether a reset leaves a leaf as it is; by default the integers at
    the paths ``random``, which are keys or count keys, do so too.
    """
    return lambda path, leaf: not hidden(path, leaf) or (hidden is no_key and path in random)


def reset(state: OnlineState, flags, carry0, hidden=no_key) -> OnlineState:
    """Start flagged lanes again: their hidden carry, of any dtype, from ``carry0``, trace zero,
    ``t`` zero.

    Parameters
    ----------
    state, carry0 : OnlineState, tree
        The state, and a carry like its own.
    flags : bool, of shape () or (B,)
        The lanes that start again.
    hidden : function
        ``(path, leaf) -> bool``; by default all leaves but PRNG keys, which go on, also those that
        :func:`jax.random.PRNGKey` makes, and counters that are folded into keys.

    Raises
    ------
    StructureError
        Flags or ``carry0`` have another structure, shape or dtype, or flags of single lanes meet a
        hidden leaf whose lanes are not known, or a trace that samples share.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from braintrace.functional import OnlineState, reset
    >>> h, t, laned = jnp.ones((2, 3)), jnp.array([4, 4]), frozenset({'carry/h'})
    >>> state = OnlineState({'h': h}, {}, t, laned=laned)
    >>> reset(state, jnp.array([True, False]), {'h': jnp.zeros((2, 3))}).t.tolist()
    [0, 4]
    """
    axes, t = {**dict.fromkeys(state.laned, 0), **dict(state.lane_axes)}, state.t
    remedy = batch_remedy(flatten_paths(state.carry), flags, t.shape)
    if t.ndim:
        remedy = f' For indices: jnp.zeros({t.shape[0]}, bool).at[indices].set(True).'
    flags = check_flags('reset flags are', flags, ((), t.shape), remedy)
    check_apart(state.shared, flags)
    check_carry0(state.carry, carry0)
    stays = goes_on(hidden, state.raw_keys | state.key_counts)

    def leaf(path, x, fresh):
        key = path_key(path)
        if stays(key, x):
            return x
        return put_back(flags, fresh, x, path_name(key), axes.get(path_name(('carry', *key))))

    trace, count = uncounted(state.trace)

    def entry(path, e):
        if is_key(e):  # random numbers go on
            return e
        known = not flags.ndim or path_name(('trace', *path_key(path))) in state.laned
        return put_back(flags, jnp.zeros((), e.dtype), e, '', 0) if known else e

    return state.replace(
        carry=jax.tree_util.tree_map_with_path(leaf, state.carry, carry0),
        trace=counting(jax.tree_util.tree_map_with_path(entry, trace), count),
        t=jnp.where(flags, 0, t),
    )


def flatten_paths(tree) -> dict[tuple[str, ...], Any]:
    """A pytree, ``tree``, as a flat dict from path tuples to leaves.

    Raises :class:`braintrace.errors.StructureError` where two leaves have one path.

    >>> from braintrace.functional import flatten_paths
    >>> flatten_paths({'a': {'w': 1}, 'b': 2})
    {('a', 'w'): 1, ('b',): 2}
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    flat = {path_key(p): leaf for p, leaf in leaves}
    if len(flat) != len(leaves):
        raise StructureError(
            'two leaves have the same path once keys are written as strings. Give them different '
            'keys.'
        )
    return flat


def unflatten_paths(paths: dict, like):
    """The inverse of :func:`flatten_paths`: ``paths`` in the structure of ``like``.

    Raises :class:`braintrace.errors.StructureError` where these have other paths.

    >>> from braintrace.functional import unflatten_paths
    >>> unflatten_paths({('a', 'w'): 1, ('b',): 2}, {'a': {'w': 0}, 'b': 0})
    {'a': {'w': 1}, 'b': 2}
    """
    expected = flatten_paths(like)
    if set(expected) != set(paths):
        raise StructureError(
            f'paths differ: missing {sorted(set(expected) - set(paths))}, added '
            f'{sorted(set(paths) - set(expected))}.'
        )
    return jax.tree_util.tree_map_with_path(lambda p, _: paths[path_key(p)], like)


def partition(params, learner) -> tuple:
    """``(traced, same_step, frozen)``: trees like ``params`` with None where a leaf has another
    route; :func:`combine` puts them together again.

    ``params``: those of ``learner``, a compiled :class:`OnlineLearner`. Raises
    :class:`braintrace.errors.NotCompiledError` for one that is not, ``KeyError`` for other params.

    >>> import braintrace, jax.numpy as jnp
    >>> from braintrace.functional import online, partition
    >>> def cell(p, h, x):
    ...     h = 0.9 * h + braintrace.matmul(x, p['in'])
    ...     return h @ p['out'], h
    >>> params, learner = {'in': jnp.ones((2, 4)), 'out': jnp.ones((4, 1))}, online(cell)
    >>> state = learner.init(params, jnp.zeros((3, 4)), jnp.ones((3, 2)))
    >>> traced, same_step, frozen = partition(params, learner)
    >>> [[name for name, p in part.items() if p is not None] for part in (traced, same_step)]
    [['in'], ['out']]
    """
    routes = learner.routes

    def part(kind):
        return jax.tree_util.tree_map_with_path(
            lambda p, x: x if routes[param_name(p)].kind == kind else None, params
        )

    return part('trace'), part('same-step'), part('frozen')


def combine(*parts):
    """One tree from parts of the same structure that hold None where a leaf is in another part (see
    :func:`partition`); ``ValueError`` for parts of different structures.

    >>> from braintrace.functional import combine
    >>> combine({'a': 1, 'b': None}, {'a': None, 'b': 2})
    {'a': 1, 'b': 2}
    """

    def first(*leaves):
        return next((leaf for leaf in leaves if leaf is not None), None)

    return jax.tree.map(first, *parts, is_leaf=lambda x: x is None)


def fold_lane(state: OnlineState, axis_name: str | int | jax.Array) -> OnlineState:
    """Fold the index along the mapped axis ``axis_name``, or this number, into every PRNG key of
    the carry of ``state``, so that lanes draw different numbers.

    >>> import jax, jax.numpy as jnp
    >>> from braintrace.functional import OnlineState, fold_lane
    >>> state = OnlineState({'key': jax.random.key(0)}, {}, jnp.array(0))
    >>> keys = jax.vmap(lambda _: fold_lane(state, 'i').carry['key'], axis_name='i')(jnp.arange(2))
    >>> bool((jax.random.key_data(keys)[0] != jax.random.key_data(keys)[1]).any())
    True
    """

    lane = jax.lax.axis_index(axis_name) if isinstance(axis_name, str) else axis_name

    def leaf(path, x):
        if not is_key(x) and path_key(path) not in state.raw_keys:
            return x
        fold = partial(jax.random.fold_in, data=lane)
        for _ in range(x.ndim - (not is_key(x))):  # of several keys each
            fold = jax.vmap(fold)
        return fold(x)

    return state.replace(carry=jax.tree_util.tree_map_with_path(leaf, state.carry))


# the types of the functions that a learner makes

Params = TypeVar('Params')


class GradientOfStep(Protocol):
    """What ``learner.grad(loss_fn)`` is."""

    def __call__(
        self, params: Params, state: OnlineState, inputs: Any, targets: Any
    ) -> StepGradient[Params, jax.Array, OnlineState]: ...


class GradientsOfHeads(Protocol):
    """What ``learner.heads(*losses)`` is."""

    def __call__(
        self, params: Params, state: OnlineState, inputs: Any, targets: Any
    ) -> StepGradient[tuple[Params, ...], tuple[jax.Array, ...], OnlineState]: ...


class GradientOfSequence(Protocol):
    """What ``learner.sequence_grad(loss_fn)`` is."""

    def __call__(
        self,
        params: Params,
        state: OnlineState,
        xs: Any,
        ys: Any,
        mask: Any = None,
        reset: tuple | None = None,
    ) -> Gradient[Params, OnlineState]: ...


class UpdateOfSequence(Protocol):
    """What ``learner.sequence_update(loss_fn, optimizer)`` is."""

    def __call__(
        self,
        params: Params,
        opt_state: Any,
        state: OnlineState,
        xs: Any,
        ys: Any,
        mask: Any = None,
        reset: tuple | None = None,
    ) -> Trained[Params, OnlineState]: ...
