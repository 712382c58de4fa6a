"""What JAX's transformations make of an ETP primitive: its JAX rules, derived from ``impl``, and
the trace rules of its form under ``jax.vmap``, derived from those of the original.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from .._jax import ad, apply_primitive, batching, lower_alone, mlir
from ..errors import RuleContractError

# JAX rules ----------------------------------------------------------------------------------------


def derive_jax_rules(primitive) -> None:
    """Give ``primitive`` abstract evaluation, eager evaluation, lowering, JVP, transpose and
    batching.
    """
    call = partial(_call_flat, primitive)

    def abstract_eval(*avals, **params):
        traced = jax.make_jaxpr(partial(primitive.impl_fn, **params), return_shape=True)
        jaxpr, shape = traced(*avals)
        several = _is_several(shape)
        leaves = shape if several else [shape]
        if not all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            raise RuleContractError(
                f'the implementation of {primitive.name!r} returned {shape}; expected an array or '
                'a flat tuple of arrays.'
            )
        forms = [primitive, *primitive.originals()]
        if any(form._several not in (None, several) for form in forms):
            raise RuleContractError(
                f'the implementation of {primitive.name!r} returned one array in one call and a '
                'tuple in another.'
            )
        # The first abstract evaluation comes before any use of the answer. An original whose mapped
        # form alone is called has no evaluation of its own, so it is set here too.
        for form in forms:
            form._several = form.multiple_results = several
        return list(jaxpr.out_avals) if several else jaxpr.out_avals[0]

    def jvp(primals, tangents, **params):
        # The primal output is bound, so that differentiation leaves the primitive in the jaxpr; the
        # tangent comes from ``impl``.
        out = primitive.bind(*primals, **params)
        float0 = jax.dtypes.float0
        live = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero and t.dtype != float0]

        def of_live(*values):
            return call(*_with(primals, live, values), **params)

        _, out_dots = jax.jvp(of_live, [primals[i] for i in live], [tangents[i] for i in live])
        out_dots = [ad.Zero(jax.typeof(t)) if t.dtype == float0 else t for t in out_dots]
        return (out, out_dots) if primitive.multiple_results else (out, out_dots[0])

    def transpose(cotangents, *args, **params):
        unknown = [i for i, arg in enumerate(args) if ad.is_undefined_primal(arg)]

        def linear(*values):
            return call(*_with(args, unknown, values), **params)

        cotangents = cotangents if primitive.multiple_results else [cotangents]
        cotangents = tuple(ad.instantiate_zeros(cotangent) for cotangent in cotangents)

        # as its own derivative, since JAX transposes no function that has one defined
        def moved(*values):
            return jax.jvp(linear, tuple(map(jnp.zeros_like, values)), values)[1]

        pull = jax.linear_transpose(moved, *(args[i].aval for i in unknown))
        return _with([None] * len(args), unknown, pull(cotangents))

    primitive.def_abstract_eval(abstract_eval)
    primitive.def_impl(partial(apply_primitive, primitive))
    mlir.register_lowering(primitive, mlir.lower_fun(call, multiple_results=True))
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
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
    """Merge x's mapped axis into its batch axis, bind, and split y's axis again."""
    where, (x_axis, y_axis) = primitive.x_invar_index, axes
    # The mapped axis goes before the batch axis, or after it where the batch is sharded,
    # since an explicitly sharded axis stays outermost.
    batch_axis = x_axis if dim > x_axis else x_axis + 1
    inside = int(jax.typeof(args[where]).sharding.spec[batch_axis] is not None)
    x = jnp.moveaxis(args[where], dim, x_axis + inside)
    sizes = x.shape[x_axis : x_axis + 2]
    merged = x.reshape(*x.shape[:x_axis], sizes[0] * sizes[1], *x.shape[x_axis + 2 :])
    y = primitive.bind(*_with(args, [where], [merged]), **params)
    return y.reshape(*y.shape[:y_axis], *sizes, *y.shape[y_axis + 1 :]), y_axis + inside


# trace rules under vmap ---------------------------------------------------------------------------
#
# The trace of a mapped primitive has the mapped axis in front of the original's layout. So has the
# trace of a trainable that mapped samples share, since their entries differ; its gradient is the
# sum over the axis, so its trace does not have the parameter's layout. The same holds for an
# original with a batch, whose batch axis stays after the mapped one.


def derived_rule(form, slot: str) -> Callable | None:
    """The rule in ``slot`` of a mapped primitive. It is None where the original lacks the rule, and
    for ``instant_drtrl`` and ``solve_drtrl`` where the trace has the parameter's layout.
    """
    sources, make = _DERIVED[slot]
    if slot in ('instant_drtrl', 'solve_drtrl') and not _has_own_layout(form):
        return None
    if all(form.root.optional_rule(source) is None for source in sources):
        return None
    return partial(make, form)


def of_weights(spec, impl: Callable) -> Callable:
    """``impl`` as ``(x, weights, **params) -> y``, by the places of operands that the spec has."""

    def call(x, weights, **params):
        operands = {} if spec.x_invar_index is None else {spec.x_invar_index: x}
        invars = spec.trainable_invars_fn(params)
        operands |= {index: weights[name] for name, index in invars.items()}
        structure = [params.pop(name) for name in spec.structure]
        out = impl(*(operands[i] for i in sorted(operands)), *structure, **params)
        return out[spec.y_outvar_index] if _is_several(out) else out

    return call


def over_axis(form, fn: Callable, params: dict, axis: int = 0) -> Callable:
    """Map ``fn(x, d, weights)`` over the mapped axis of ``form``. It is ``axis`` of d, and of x if
    x is mapped.
    """
    has_axis = form.x_invar_index is not None and form.axes[form.x_invar_index] is not None
    return jax.vmap(fn, in_axes=(axis if has_axis else None, axis, _weight_axes(form, params)))


def _weight_axes(form, params: dict) -> dict[str, int | None]:
    return {name: form.axes[index] for name, index in form.trainable_invars(params).items()}


def _shares_a_trainable(form) -> bool:
    axes = form.axes[: len(form.axes) - len(form.structure)]
    return any(axis is None for operand, axis in enumerate(axes) if operand != form.x_invar_index)


def _has_own_layout(primitive) -> bool:
    """Whether the trace of one sample has another layout than the parameter's."""
    original = primitive.original
    if original is None:
        own = ('instant_drtrl', 'solve_drtrl')
        return any(primitive.optional_rule(slot) is not None for slot in own)
    shares = not primitive.batched and _shares_a_trainable(primitive)
    return _has_own_layout(original) or original.batched or shares


def _yw_to_w(form, hidden_dim, trace, /, **params):
    return jax.vmap(form.original.bound_rule('yw_to_w', params))(hidden_dim, trace)


def _xy_to_dw(form, x, hidden_dim, weights, /, **params):
    if not _shares_a_trainable(form):
        one = form.original.bound_rule('xy_to_dw', params)
        return over_axis(form, one, params)(x, hidden_dim, weights)
    # The reverse rule of the implementation sums over the mapped axis in one contraction. A sum
    # over the samples' results takes six times as long (CPU, 16 samples, 256 wide).
    forward = of_weights(form.spec, form.impl_fn)
    return jax.vjp(lambda weights: forward(x, weights, **params), weights)[1](hidden_dim)[0]


def _instant(form, x, hidden_dim, weights, /, **params):
    own = form.root.optional_rule('instant_drtrl') is not None
    of_sample = form.root.bound_rule('instant_drtrl' if own else 'xy_to_dw', params)
    entry = form.by_sample(of_sample, params)(x, hidden_dim, weights)
    return {name: value.sum(0) for name, value in entry.items()} if form.batched else entry


def _solve(form, signal, trace, weights, /, **params):
    original, axes = form.original, _weight_axes(form, params)

    def from_parameter_layout(signal, trace, weights):
        # a batched original has a trace for each sample, and its gradient is their sum
        scaled = original.bound_rule('yw_to_w', params)(signal, trace)
        return {name: value.sum(0) if original.batched else value for name, value in scaled.items()}

    one = from_parameter_layout
    if original.optional_rule('solve_drtrl') is not None:
        one = original.bound_rule('solve_drtrl', params)
    solved = jax.vmap(one, in_axes=(0, 0, axes))(signal, trace, weights)
    # a trainable that all mapped samples share has the sum of their gradients
    return {name: value.sum(0) if axes[name] is None else value for name, value in solved.items()}


def _init(slot, form, x_var, y_var, weight_vars, num_hidden_state, /, **params):
    def unmapped(var, axis):
        """The variable of the original, without the mapped axis."""
        if var is None or axis is None:
            return var
        return SimpleNamespace(aval=jax.ShapeDtypeStruct(var.aval.shape[1:], var.aval.dtype))

    axes, size = _weight_axes(form, params), y_var.aval.shape[0]
    x = None if x_var is None else unmapped(x_var, form.axes[form.x_invar_index])
    weights = {name: unmapped(var, axes[name]) for name, var in weight_vars.items()}
    zeros = form.original.bound_rule(slot, params)(x, unmapped(y_var, 0), weights, num_hidden_state)
    wide = lambda value: jnp.broadcast_to(value, (size, *value.shape))
    return wide(zeros) if slot == 'init_pp' else {n: wide(z) for n, z in zeros.items()}


# slot -> (rules, of which the original must have at least one; the function that derives the rule)
_DERIVED: dict[str, tuple[tuple[str, ...], Callable]] = {
    'yw_to_w': (('yw_to_w',), _yw_to_w),
    'xy_to_dw': (('xy_to_dw',), _xy_to_dw),
    'init_drtrl': (('init_drtrl',), partial(_init, 'init_drtrl')),
    'init_pp': (('init_pp',), partial(_init, 'init_pp')),
    'instant_drtrl': (('instant_drtrl', 'xy_to_dw'), _instant),
    'solve_drtrl': (('solve_drtrl', 'yw_to_w'), _solve),
}
