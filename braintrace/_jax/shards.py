"""``shard_map``: the parts of its equation, and its body without the mesh."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import linear_util as _functions

from .evaluation import CUSTOM_CALLS, ShapedArray, closed_jaxpr, sub_jaxprs

LATE_RULES = ('jvp_jaxpr_fun', 'fwd_jaxpr_thunk')


class ShardMapParts(NamedTuple):
    """A ``shard_map``: global operands and results, each with a ``PartitionSpec``; the body reads
    and returns blocks, cut along the ``manual_axes`` of the mesh.
    """

    body: Any
    consts: list
    mesh: Any
    in_specs: tuple
    out_specs: tuple
    manual_axes: frozenset
    check_vma: bool

    @property
    def sizes(self) -> dict[str, int]:
        """The axes that the body is mapped over, in the order of the mesh."""
        return {axis: size for axis, size in self.mesh.shape.items() if axis in self.manual_axes}

    def named_axes(self):
        """The context in which collectives over these axes can be traced."""
        return _core.extend_axis_env_nd(list(self.sizes.items()))

    def manual_mesh(self):
        """The context that holds the mesh as the body sees it."""
        manual = {axis: jax.sharding.AxisType.Manual for axis in self.manual_axes}
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh.update_axis_types(manual))


def shard_map_parts(eqn) -> ShardMapParts | None:
    if eqn.primitive.name != 'shard_map':
        return None
    params = eqn.params
    return ShardMapParts(
        *closed_jaxpr(params['jaxpr']),
        params['mesh'],
        tuple(params['in_specs']),
        tuple(params['out_specs']),
        frozenset(params['newly_manual_axes']),
        params['check_vma'],
    )


class WithoutMesh(NamedTuple):
    """The context of an equation from inside a ``shard_map``, with the evaluator's mesh."""

    ctx: Any

    @property
    @contextlib.contextmanager
    def manager(self):
        here = jax.sharding.get_abstract_mesh()
        with self.ctx.manager, jax.sharding.use_abstract_mesh(here):
            yield


def with_bodies(eqn, parts: ShardMapParts, evaluate: Callable) -> dict:
    """The parameters of an equation from inside a ``shard_map``, each jaxpr traced again by
    ``evaluate(body, consts, args)``.

    Values lose the mesh axes along which they vary, and shardings over that mesh go. The rules of a
    custom call follow when they are asked for.
    """

    def replaced(value):
        # a placement over the mesh says nothing about a value of the batch
        if isinstance(value, jax.sharding.NamedSharding):
            return None
        if type(value) is tuple:
            return tuple(map(replaced, value))
        if not hasattr(value, 'eqns') or not all(
            isinstance(v.aval, ShapedArray) for v in closed_jaxpr(value)[0].invars
        ):
            return value
        new = _retraced(*closed_jaxpr(value), parts, evaluate)
        return new if isinstance(new, type(value)) else new.jaxpr

    params = {name: replaced(value) for name, value in eqn.params.items()}
    if eqn.primitive.name in CUSTOM_CALLS:
        # rules that are traced later: they are wrapped, and traced again then
        for name in params.keys() & LATE_RULES:
            params[name] = _wrapped(_late_rule, params[name], parts, evaluate)
        for name in params.keys() & {'bwd'}:
            params[name] = _wrapped(_backward, params[name], parts)
    return params


def _retraced(body, consts, parts: ShardMapParts, evaluate: Callable):
    # types without the mesh, which the body's own have
    binders = [*body.constvars, *body.invars][len(consts) :]
    avals = [
        jax.ShapeDtypeStruct(
            v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, 'weak_type', False)
        )
        for v in binders
    ]
    with _core.eval_context(), parts.named_axes():
        return jax.make_jaxpr(lambda *args: evaluate(body, consts, args))(*avals)


def _wrapped(fn: Callable, rule, *args):
    return _functions.wrap_init(functools.partial(fn, rule, *args), debug_info=rule.debug_info)


def _late_rule(rule, parts: ShardMapParts, evaluate: Callable, *zeros):
    """A derivative rule is made with the types of the body, and traced again without them."""
    with parts.named_axes(), parts.manual_mesh(), _config._check_vma(parts.check_vma):
        body, consts, *rest = rule.call_wrapped(*zeros)
    return *closed_jaxpr(_retraced(body, list(consts), parts, evaluate)), *rest


def _backward(rule, parts: ShardMapParts, *args):
    """The values lack the types of the body, so their check is off."""
    with parts.named_axes(), parts.manual_mesh(), _config.disable_bwd_checks(True):
        return rule.call_wrapped(*args)


def varying(value) -> frozenset:
    """The named axes of a surrounding ``shard_map`` along which a value may differ."""
    return frozenset(getattr(getattr(jax.typeof(value), 'manual_axis_type', None), 'varying', ()))


def checked(on: bool):
    """The context in which types name the axes that values vary along."""
    return _config._check_vma(on)


def is_checked() -> bool:
    """Whether types name the axes that values vary along."""
    return bool(_config._check_vma.value)


def collective_axes(closed) -> Counter:
    """How many equations of a jaxpr, also of those inside, act across each named axis."""
    found: Counter = Counter()
    for eqn in closed_jaxpr(closed)[0].eqns:
        named = eqn.params.get('axes', eqn.params.get('axis_name', ()))
        found.update(a for a in (named if isinstance(named, tuple) else (named,)) if type(a) is str)
        for inner in sub_jaxprs(eqn.params):
            found += collective_axes(inner)
    return found


def varying_along(aval, axes: frozenset):
    """A type that names the axes along which a value may differ."""
    sharding = jax.NamedSharding(jax.sharding.get_abstract_mesh(), jax.P(*[None] * aval.ndim))
    return aval.update(sharding=sharding, manual_axis_type=_core.ManualAxisType(varying=axes))


def named_axes_here():
    """The context to trace collectives over the axes of a surrounding ``shard_map`` in."""
    mesh = jax.sharding.get_abstract_mesh()
    return _core.extend_axis_env_nd([(a, mesh.shape[a]) for a in mesh.manual_axes])


def surrounding_mesh():
    """The mesh of a surrounding ``shard_map``; equations traced there keep it."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.manual_axes else None
