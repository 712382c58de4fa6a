"""Every JAX rule of an ETP primitive, derived from its ``impl``."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from .._jax import ad, apply_primitive, batching, lower_alone, mlir
from ..errors import RuleContractError


def derive_jax_rules(primitive) -> None:
    """Give ``primitive`` abstract evaluation, eager evaluation, lowering, JVP, transpose and
    batching.
    """
    primitive.def_abstract_eval(partial(_abstract_eval, primitive))
    primitive.def_impl(partial(apply_primitive, primitive))
    mlir.register_lowering(
        primitive, mlir.lower_fun(partial(_call_flat, primitive), multiple_results=True)
    )
    ad.primitive_jvps[primitive] = partial(_jvp, primitive)
    ad.primitive_transposes[primitive] = partial(_transpose, primitive)
    batching.primitive_batchers[primitive] = partial(_batch, primitive)


def lower_on(primitive, platform: str, fn) -> None:
    """Lower ``primitive`` on a platform by ``fn``, which must return the shapes and dtypes of
    ``impl``.
    """

    def call(*args, **params) -> tuple:
        out = fn(*args, **params)
        out = tuple(out) if _is_several(out) else (out,)
        want = jax.eval_shape(partial(_call_flat, primitive, **params), *args)
        found = [(jnp.shape(a), jnp.result_type(a)) for a in out]
        if found != [(a.shape, a.dtype) for a in want]:
            raise RuleContractError(
                f'the lowering of {primitive.name!r} on {platform!r} returned {found}; its '
                f'implementation returns {[(a.shape, str(a.dtype)) for a in want]}.'
            )
        return out

    lower_alone(primitive, platform, call, partial(_call_flat, primitive))


def _is_several(out) -> bool:
    return isinstance(out, tuple | list)


def _call_flat(primitive, *args, **params) -> tuple:
    out = primitive.impl_fn(*args, **params)
    return tuple(out) if _is_several(out) else (out,)


def _with(args, where, values) -> list:
    """Copy ``args`` and put ``values`` at the indices ``where``."""
    merged = list(args)
    for index, value in zip(where, values):
        merged[index] = value
    return merged


def _abstract_eval(primitive, *avals, **params):
    jaxpr, shape = jax.make_jaxpr(partial(primitive.impl_fn, **params), return_shape=True)(*avals)
    several = _is_several(shape)
    if not all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in (shape if several else [shape])):
        raise RuleContractError(
            f'the implementation of {primitive.name!r} returned {shape}; expected an array or a '
            'flat tuple of arrays.'
        )
    forms = [primitive, *primitive.originals()]
    if any(form._several not in (None, several) for form in forms):
        raise RuleContractError(
            f'the implementation of {primitive.name!r} returned one array in one call and a tuple '
            'in another.'
        )
    # The first abstract evaluation comes before any use of the answer. An original whose mapped
    # form alone is called has no evaluation of its own, so it is told here too.
    for form in forms:
        form._several = form.multiple_results = several
    return list(jaxpr.out_avals) if several else jaxpr.out_avals[0]


def _jvp(primitive, primals, tangents, **params):
    """Bind the primitive for the primal output, so that differentiation leaves it in the jaxpr, and
    take the tangent from ``impl``.
    """
    out = primitive.bind(*primals, **params)
    live = [
        i
        for i, tangent in enumerate(tangents)
        if type(tangent) is not ad.Zero and tangent.dtype != jax.dtypes.float0
    ]

    def of_live(*values):
        return _call_flat(primitive, *_with(primals, live, values), **params)

    _, out_dots = jax.jvp(of_live, [primals[i] for i in live], [tangents[i] for i in live])
    out_dots = [_symbolic(out_dot) for out_dot in out_dots]
    return (out, out_dots) if primitive.multiple_results else (out, out_dots[0])


def _symbolic(tangent):
    return ad.Zero(jax.typeof(tangent)) if tangent.dtype == jax.dtypes.float0 else tangent


def _transpose(primitive, cotangents, *args, **params):
    unknown = [i for i, arg in enumerate(args) if ad.is_undefined_primal(arg)]

    def linear(*values):
        return _call_flat(primitive, *_with(args, unknown, values), **params)

    cotangents = cotangents if primitive.multiple_results else [cotangents]
    cotangents = tuple(ad.instantiate_zeros(cotangent) for cotangent in cotangents)
    pull = jax.linear_transpose(linear, *(args[i].aval for i in unknown))
    return _with([None] * len(args), unknown, pull(cotangents))


def _batch(primitive, args, dims, **params):
    # Over x alone the primitive keeps its identity, where it declares how: by a form for batches,
    # or by folding the mapped axis into the batch axis. Any other mapping binds a mapped form.
    x = primitive.x_invar_index
    if [i for i, dim in enumerate(dims) if dim is not None] == [x]:
        if primitive.batched_form is not None:
            x_front = jnp.moveaxis(args[x], dims[x], 0)
            return primitive.batched_form.bind(*_with(args, [x], [x_front]), **params), 0
        axes = primitive.fold_axes(params) if primitive.fold_axes else None
        if axes is not None:
            return _fold(primitive, args, dims[x], axes, params)
    fronted = [arg if dim is None else jnp.moveaxis(arg, dim, 0) for arg, dim in zip(args, dims)]
    out = primitive.mapped(None if dim is None else 0 for dim in dims).bind(*fronted, **params)
    return (out, [0] * len(out)) if _is_several(out) else (out, 0)


def _fold(primitive, args, dim, axes, params):
    """Merge x's mapped axis into its batch axis, bind, and split y's axis again.

    The mapped axis goes in front of the batch axis, or behind it where the batch is sharded, since
    an explicitly sharded axis stays outermost.
    """
    where, (x_axis, y_axis) = primitive.x_invar_index, axes
    batch_axis = x_axis if dim > x_axis else x_axis + 1
    inside = int(jax.typeof(args[where]).sharding.spec[batch_axis] is not None)
    x = jnp.moveaxis(args[where], dim, x_axis + inside)
    sizes = x.shape[x_axis : x_axis + 2]
    merged = x.reshape(*x.shape[:x_axis], sizes[0] * sizes[1], *x.shape[x_axis + 2 :])
    y = primitive.bind(*_with(args, [where], [merged]), **params)
    return y.reshape(*y.shape[:y_axis], *sizes, *y.shape[y_axis + 1 :]), y_axis + inside
