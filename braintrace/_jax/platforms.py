"""Code of its own for a platform, where one device runs the program alone.

A kernel and a loop over samples know nothing of devices that share an array: XLA would move the
array to where the loop is. How many devices a program has is known when it is lowered, not before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial

import jax
from jax._src import sharding_impls as _shardings
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .evaluation import apply_primitive, closed_jaxpr, evaluate, evaluate_with

_as_if: ContextVar[str | None] = ContextVar('platform', default=None)
# inside of a choice: the platform whose code is traced, and those that have code of their own
_inside: ContextVar[tuple[str | None, frozenset[str]]]
_inside = ContextVar('inside', default=(None, frozenset()))
SHARED = 'shared'  # several devices share the program: no platform has code of its own


@contextlib.contextmanager
def as_if_on(platform: str):
    """What is traced here for the first time is the program of a platform that need not be there,
    as of ``'cuda'``; it runs here too.
    """
    token = _as_if.set(platform)
    try:
        yield
    finally:
        _as_if.reset(token)


def platform_here() -> str:
    """The platform that a choice at tracing is made for."""
    return _as_if.get() or jax.default_backend()


def platform_dependent(*args, default: Callable, **own: Callable):
    """``jax.lax.platform_dependent``, and ``default`` in a program that several devices share.

    What is inside of a choice is traced for the platforms that are left there.
    """
    if _as_if.get() is not None:
        return own.get(platform_here(), default)(*args)
    # inside of another choice: platforms that it has for itself can not come here
    here, others = _inside.get()
    own = {name: fn for name, fn in own.items() if name not in others}
    if here is not None or not own:
        return own.get(here or '', default)(*args)
    shared = _within(default, (SHARED, others))
    # each platform's own code serves one device; a shared program takes the default
    chosen = {n: alone_or(_within(fn, (n, others)), shared) for n, fn in own.items()}
    left = _within(default, (None, others | own.keys()))
    return jax.lax.platform_dependent(*args, default=left, **chosen)


def _within(fn: Callable, place: tuple[str | None, frozenset[str]]) -> Callable:
    """``fn``, traced at this place."""

    def run(*args):
        token = _inside.set(place)
        try:
            return fn(*args)
        finally:
            _inside.reset(token)

    return run


def alone_or(alone: Callable, shared: Callable) -> Callable:
    """``alone`` where one device runs the program, or each device a part of its own, as inside of
    ``jax.shard_map``; ``shared`` where the compiler shares it among several.

    Both must return arrays of the same shapes and dtypes. A process that sees one device traces
    ``alone`` only.
    """
    if jax.device_count() == 1:
        return alone

    def run(*args):
        # both are traced here, since the lowering that chooses has no trace to add to
        closed, shapes = jax.make_jaxpr(alone, return_shape=True)(*args)
        (first, consts), (second, more) = map(closed_jaxpr, (closed, jax.make_jaxpr(shared)(*args)))
        out = alone_p.bind(*consts, *more, *jax.tree.leaves(args), jaxprs=(first, second))
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return run


alone_p = Primitive('braintrace_alone')
alone_p.multiple_results = True


@alone_p.def_effectful_abstract_eval
def _abstract(*avals, jaxprs):
    return [v.aval for v in jaxprs[0].outvars], jaxprs[0].effects | jaxprs[1].effects


def _evaluate(which: int, *args, jaxprs):
    numbers = [len(jaxpr.constvars) for jaxpr in jaxprs]
    consts = args[: sum(numbers)]
    consts = consts[: numbers[0]] if which == 0 else consts[numbers[0] :]
    return evaluate(jaxprs[which], list(consts), args[sum(numbers) :])


def is_alone(context) -> bool:
    """Whether the compiler shares nothing among devices in a program with this axis context."""
    if isinstance(context, _shardings.ShardingContext):
        return context.num_devices == 1
    if isinstance(context, _shardings.SPMDAxisContext):
        # axes that a shard_map maps over are not shared by the compiler
        shared = set(context.mesh.axis_names) - set(context.manual_axes)
        return all(context.mesh.shape[axis] == 1 for axis in shared)
    return True


def _lower(ctx, *args, **params):
    which = 0 if is_alone(ctx.module_context.axis_context) else 1
    return mlir.lower_fun(partial(_evaluate, which, **params))(ctx, *args)


def _batch(args, dims, **params):
    both = (jax.vmap(partial(_evaluate, k, **params), in_axes=tuple(dims)) for k in (0, 1))
    out = alone_or(*both)(*args)
    return out, [0] * len(out)


alone_p.def_impl(partial(apply_primitive, alone_p))
mlir.register_lowering(alone_p, _lower)
batching.primitive_batchers[alone_p] = _batch


PARALLEL = 'cuda', 'rocm', 'tpu'  # where the launch of a small kernel costs more than it computes
by_platform_p = Primitive('braintrace_by_platform')
by_platform_p.multiple_results = True


def by_platform(jaxpr, args: list, parallel: Callable) -> list:
    """The results of a jaxpr of ``[*constants, *operands]``; lowered for a GPU or a TPU those of
    ``parallel(jaxpr, args)``, which is traced there alone. Its derivatives are those of the jaxpr.
    """
    on = _as_if.get()
    return by_platform_p.bind(*args, jaxpr=jaxpr, parallel=parallel, on=on)


def _lowered(platform: str | None, ctx, *args, jaxpr, parallel, on):
    run = parallel if (on or platform) in PARALLEL else evaluate_with
    return mlir.lower_fun(lambda *args: run(jaxpr, args))(ctx, *args)


def _batch_of_both(args, dims, *, jaxpr, parallel, on):
    mapped = jax.vmap(lambda *args: evaluate_with(jaxpr, args), in_axes=tuple(dims))
    batched, consts = closed_jaxpr(jax.make_jaxpr(mapped)(*args))
    out = by_platform_p.bind(*consts, *args, jaxpr=batched, parallel=parallel, on=on)
    return out, [0] * len(out)


def _derivative(primals, tangents, *, jaxpr, **_):
    moves = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(lambda *args: evaluate_with(jaxpr, args), tuple(primals), moves)


@by_platform_p.def_effectful_abstract_eval
def _types(*avals, jaxpr, **_):
    return [v.aval for v in jaxpr.outvars], jaxpr.effects


by_platform_p.def_impl(partial(apply_primitive, by_platform_p))
mlir.register_lowering(by_platform_p, partial(_lowered, None))
for _name in PARALLEL:
    mlir.register_lowering(by_platform_p, partial(_lowered, _name), platform=_name)
batching.primitive_batchers[by_platform_p] = _batch_of_both
ad.primitive_jvps[by_platform_p] = _derivative


def lower_alone(primitive: Primitive, platform: str, alone: Callable, shared: Callable) -> None:
    """Lower ``primitive`` on a platform as :func:`alone_or` chooses."""

    def lower(ctx, *args, **params):
        own = _as_if.get() is None and is_alone(ctx.module_context.axis_context)
        fn = alone if own else shared
        return mlir.lower_fun(fn, multiple_results=True)(ctx, *args, **params)

    mlir.register_lowering(primitive, lower, platform=platform)
