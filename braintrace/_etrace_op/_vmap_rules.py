"""Trace rules of a primitive under ``jax.vmap``, derived from the rules of its original.

The trace of a mapped primitive has the mapped axis in front of the original's layout. So has the
trace of a trainable that all lanes share, since the lanes' entries differ; its gradient is the sum
over the axis, so its trace does not have the parameter's layout. The same holds for an original
with a batch, whose batch axis stays behind the mapped one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp


def derived_rule(form, slot: str) -> Callable | None:
    """Derive the rule in ``slot`` of a mapped primitive.

    The answer is None where the original lacks the rule, and for ``instant_drtrl`` and
    ``solve_drtrl`` where the trace has the parameter's layout.
    """
    sources, make = _DERIVED[slot]
    if slot in ('instant_drtrl', 'solve_drtrl') and not _has_own_layout(form):
        return None
    if all(form.root.optional_rule(source) is None for source in sources):
        return None
    return partial(make, form)


def by_lane(primitive, fn: Callable, params: dict, axis: int = 0) -> Callable:
    """Map ``fn(x, d, weights)`` of the root as ``ETPPrimitive.by_lane`` says."""
    if primitive.original is not None:
        return _over_axis(primitive, by_lane(primitive.original, fn, params, axis), params, axis)
    if not primitive.batched:
        return fn

    def one(x, d, weights):
        return fn(*jax.tree.map(lambda a: jnp.expand_dims(a, axis), (x, d)), weights)

    return jax.vmap(one, in_axes=(axis, axis, None))


def _weight_axes(form, params: dict) -> dict[str, int | None]:
    return {name: form.axes[index] for name, index in form.trainable_invars(params).items()}


def _over_axis(form, fn: Callable, params: dict, axis: int = 0) -> Callable:
    """Map ``fn(x, d, weights)`` over the mapped axis of ``form``. It is ``axis`` of d, and of x if
    x is mapped.
    """
    has_axis = form.x_invar_index is not None and form.axes[form.x_invar_index] is not None
    return jax.vmap(fn, in_axes=(axis if has_axis else None, axis, _weight_axes(form, params)))


def _shares_a_trainable(form) -> bool:
    axes = form.axes[: len(form.axes) - len(form.structure)]
    return any(axis is None for operand, axis in enumerate(axes) if operand != form.x_invar_index)


def _has_own_layout(primitive) -> bool:
    """Whether the trace of one sample has another layout than the parameter's."""
    if primitive.original is None:
        return any(
            primitive.optional_rule(slot) is not None for slot in ('instant_drtrl', 'solve_drtrl')
        )
    original = primitive.original
    return (
        _has_own_layout(original)
        or original.batched
        or (not primitive.batched and _shares_a_trainable(primitive))
    )


def _sum_shared(form, params: dict, values: dict) -> dict:
    """Sum the mapped axis of the trainables that all lanes share."""
    axes = _weight_axes(form, params)
    return {name: value.sum(0) if axes[name] is None else value for name, value in values.items()}


def _yw_to_w(form, hidden_dim, trace, /, **params):
    return jax.vmap(form.original.bound_rule('yw_to_w', params))(hidden_dim, trace)


def _xy_to_dw(form, x, hidden_dim, weights, /, **params):
    if not _shares_a_trainable(form):
        return _over_axis(form, form.original.bound_rule('xy_to_dw', params), params)(
            x, hidden_dim, weights
        )

    # The reverse rule of the implementation sums over the mapped axis in one contraction. A sum
    # over the lanes' results takes six times as long (CPU, 16 lanes, 256 wide).
    def forward(weights):
        operands = {form.x_invar_index: x} if form.x_invar_index is not None else {}
        operands |= {index: weights[name] for name, index in form.trainable_invars(params).items()}
        static, in_order = dict(params), [operands[index] for index in sorted(operands)]
        structure = [static.pop(name) for name in form.structure]
        out = form.impl_fn(*in_order, *structure, **static)
        return out[form.y_outvar_index] if isinstance(out, tuple | list) else out

    return jax.vjp(forward, weights)[1](hidden_dim)[0]


def _instant(form, x, hidden_dim, weights, /, **params):
    own = form.root.optional_rule('instant_drtrl') is not None
    entry = by_lane(
        form, form.root.bound_rule('instant_drtrl' if own else 'xy_to_dw', params), params
    )(x, hidden_dim, weights)
    return {name: value.sum(0) for name, value in entry.items()} if form.batched else entry


def _solve(form, signal, trace, weights, /, **params):
    original, one = form.original, partial(_plain_solve, form.original, params)
    if original.optional_rule('solve_drtrl') is not None:
        one = original.bound_rule('solve_drtrl', params)
    solved = jax.vmap(one, in_axes=(0, 0, _weight_axes(form, params)))(signal, trace, weights)
    return _sum_shared(form, params, solved)


def _plain_solve(primitive, params: dict, signal, trace, weights):
    """The gradient from a trace of the parameter's layout; a batched primitive has a trace for each
    sample, and sums.
    """
    scaled = primitive.bound_rule('yw_to_w', params)(signal, trace)
    return {name: value.sum(0) if primitive.batched else value for name, value in scaled.items()}


def _init_drtrl(form, x_var, y_var, weight_vars, num_hidden_state, /, **params):
    zeros = form.original.bound_rule('init_drtrl', params)(
        *_of_one_lane(form, params, x_var, y_var, weight_vars), num_hidden_state
    )
    return {
        name: jnp.broadcast_to(value, (y_var.aval.shape[0], *value.shape))
        for name, value in zeros.items()
    }


def _init_pp(form, x_var, y_var, weight_vars, num_hidden_state, /, **params):
    zeros = form.original.bound_rule('init_pp', params)(
        *_of_one_lane(form, params, x_var, y_var, weight_vars), num_hidden_state
    )
    return jnp.broadcast_to(zeros, (y_var.aval.shape[0], *zeros.shape))


def _of_one_lane(form, params: dict, x_var, y_var, weight_vars: dict) -> tuple:
    """The variables of the original, without the mapped axis."""
    axes = _weight_axes(form, params)
    has_axis = x_var is not None and form.axes[form.x_invar_index] is not None
    weights = {
        name: var if axes[name] is None else _without_axis(var) for name, var in weight_vars.items()
    }
    return _without_axis(x_var) if has_axis else x_var, _without_axis(y_var), weights


def _without_axis(var) -> SimpleNamespace:
    return SimpleNamespace(aval=jax.ShapeDtypeStruct(var.aval.shape[1:], var.aval.dtype))


# slot -> (rules, of which the original must have at least one; the function that derives the rule)
_DERIVED: dict[str, tuple[tuple[str, ...], Callable]] = {
    'yw_to_w': (('yw_to_w',), _yw_to_w),
    'xy_to_dw': (('xy_to_dw',), _xy_to_dw),
    'init_drtrl': (('init_drtrl',), _init_drtrl),
    'init_pp': (('init_pp',), _init_pp),
    'instant_drtrl': (('instant_drtrl', 'xy_to_dw'), _instant),
    'solve_drtrl': (('solve_drtrl', 'yw_to_w'), _solve),
}
