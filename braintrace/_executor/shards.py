"""Learning inside ``jax.shard_map``: its types do not reach the equations of a learner.

With JAX's default ``check_vma=True`` the type of a value names the axes of the mesh along which it
may differ. A learner's equations were traced without such types, and its zeros have none, so a call
of a learner is one equation of its own there: typed as a whole, evaluated without types.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial

import jax
import jax.numpy as jnp

from .. import _jax

Axes = frozenset
_typed: ContextVar[bool] = ContextVar('values have types outside of the call', default=False)


def varying(tree) -> Axes:
    """The axes of a surrounding ``shard_map`` along which any leaf may differ."""
    if _jax.is_outermost():  # nothing surrounds it: a call from Python need not look at each leaf
        return frozenset()
    return frozenset().union(*map(_of_leaf, jax.tree.leaves(tree)))


def each(tree):
    """:func:`varying` of each leaf."""
    return jax.tree.map(_of_leaf, tree)


def spread(tree, axes: Axes):
    """A tree with a type that says that every leaf may differ along these axes."""
    if not axes:
        return tree

    def leaf(x):
        # only axes that the type does not name yet: pcast refuses the others
        missing = axes - _of_leaf(x) if _is_array(x) else None
        return jax.lax.pcast(x, tuple(sorted(missing)), to='varying') if missing else x

    return jax.tree.map(leaf, tree)


def _is_array(leaf) -> bool:
    return hasattr(leaf, 'dtype') and leaf.dtype != jax.dtypes.float0


def _of_leaf(leaf) -> Axes:
    return _jax.varying(leaf) if _is_array(leaf) else frozenset()


def axes_of(fn: Callable, axes: Axes, *args) -> Axes:
    """The axes along which ``fn(*args)`` may differ where the arguments may along ``axes``."""
    if not axes:
        return axes
    with _jax.checked(True):
        return varying(jax.eval_shape(lambda *args: fn(*spread(args, axes)), *args))


def share(axes: Axes, of_loss: Axes) -> float:
    """The part of a loss that belongs to each of the shards that have it in common."""
    return 1 / math.prod(jax.lax.axis_size(a) for a in axes - of_loss)


def summed_twice(loss: Callable, *args) -> list[str]:
    """The axes of a surrounding ``shard_map`` over which the derivative of ``loss(*args)`` is
    summed though no type says so: under ``check_vma=False``.

    There a sum over shards is a sum on the way back too: each shard then has the gradient of all
    their equal losses.
    """
    mesh = _jax.surrounding_mesh()
    if mesh is None or _typed.get() or _jax.is_checked():
        return []
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), args)

    def back(first, *rest):
        value, pull = jax.vjp(lambda first: loss(first, *rest), first)
        return value, pull(jnp.ones_like(value))

    # more collectives on the way back than forward: a sum is summed again
    there, both = (_jax.collective_axes(jax.make_jaxpr(fn)(*like)) for fn in (loss, back))
    return sorted(axis for axis in mesh.manual_axes if both[axis] > there[axis])


# one equation without types --------------------------------------------------------------


def without_types(fn: Callable) -> Callable:
    """``fn``, whose results may differ along all axes of a ``shard_map`` that an argument does."""

    def run(*args):
        axes = varying(args)
        return _call(lambda *args: ((fn(*args), axes),), axes, *args)[0] if axes else fn(*args)

    return run


def in_shards(body: Callable, *args) -> tuple:
    """The results of ``body(axes, *args)``, which returns pairs of a result and its axes.

    Along ``axes`` an argument may differ. The axes of a result are a set for all of it, or a tree
    like it.
    """
    axes = varying(args)
    if not axes:
        return tuple(result for result, _ in body(axes, *args))
    return jax.jit(lambda *args: _call(partial(body, axes), axes, *args))(*args)


def _call(body: Callable, axes: Axes, *args) -> tuple:
    """The results of ``body(*args)``, which returns pairs as for :func:`in_shards`, as one
    equation.
    """
    leaves, treedef = jax.tree.flatten(args)
    where = [k for k, x in enumerate(leaves) if _is_array(x)]
    found: list = []

    def flat(*values):
        full = list(leaves)
        for k, x in zip(where, values, strict=True):
            full[k] = x
        # results and their axes, which the types outside of the call name
        pairs = body(*jax.tree.unflatten(treedef, full))
        results = tuple(result for result, _ in pairs)
        own = [
            jax.tree.map(lambda _, a=a: a, r) if isinstance(a, frozenset) else a for r, a in pairs
        ]
        found[:] = jax.tree.structure(results), tuple(jax.tree.leaves(own))
        return jax.tree.leaves(results)

    token = _typed.set(True)
    try:
        with _jax.checked(False):
            # shapes and dtypes alone, without the axes that their types name
            plain = (
                jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(typed, 'weak_type', False))
                for x, typed in ((leaves[k], jax.typeof(leaves[k])) for k in where)
            )
            closed = jax.make_jaxpr(flat)(*plain)
    finally:
        _typed.reset(token)
    jaxpr, consts = _jax.closed_jaxpr(closed)
    operands = spread([*consts, *(leaves[k] for k in where)], axes)
    return jax.tree.unflatten(found[0], shards_p.bind(*operands, jaxpr=jaxpr, axes=found[1]))


shards_p = _jax.Primitive('braintrace_shards')
shards_p.multiple_results = True


@shards_p.def_effectful_abstract_eval
def _abstract(*avals, jaxpr, axes):
    results = zip(jaxpr.outvars, axes, strict=True)
    return [_jax.varying_along(v.aval, own) for v, own in results], jaxpr.effects


def _evaluate(*args, jaxpr, axes=None):
    with _jax.checked(False), _jax.named_axes_here():
        return _jax.evaluate_with(jaxpr, args)


def _lower(ctx, *args, jaxpr, axes):
    avals = [v.aval for v in (*jaxpr.constvars, *jaxpr.invars)]
    return _jax.mlir.lower_fun(_evaluate)(ctx.replace(avals_in=avals), *args, jaxpr=jaxpr)


def _batch(args, dims, *, jaxpr, axes):
    every = frozenset().union(*axes)

    def body(*args):
        results = jax.vmap(partial(_evaluate, jaxpr=jaxpr), in_axes=tuple(dims))(*args)
        return tuple(zip(results, axes, strict=True))

    return _call(body, every, *args), [0] * len(axes)


shards_p.def_impl(partial(_jax.apply_primitive, shards_p))
_jax.mlir.register_lowering(shards_p, _lower)
_jax.batching.primitive_batchers[shards_p] = _batch
