"""Meshes whose axes are explicit, and devices that do not fit each other.

With ``AxisType.Explicit`` a type says where an array lies. A learner's equations were traced
without such types, and its zeros have none: they run under automatic axes, and results are typed as
the arguments that they take the place of.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import jax

from .. import _jax
from .._compiler import abstract
from ..errors import StructureError
from ..extra.sharding import sharding_of
from ._state import OnlineState


@contextlib.contextmanager
def without_explicit_axes():
    """The surrounding mesh with automatic axes, where its axes are part of types: a step is traced
    so.
    """
    if not is_explicit():
        yield
        return
    mesh = jax.sharding.get_abstract_mesh()
    automatic = dict.fromkeys(mesh.axis_names, jax.sharding.AxisType.Auto)
    with jax.sharding.use_abstract_mesh(mesh.update_axis_types(automatic)):
        yield


def is_explicit() -> bool:
    return bool(jax.sharding.get_abstract_mesh().explicit_axes)


def untyped(tree):
    """The shapes of a tree, where types say where its arrays lie; else the tree."""
    if not is_explicit():
        return tree
    return jax.tree.map(lambda a: abstract(a) if isinstance(a, jax.Array) else a, tree)


def types_of(tree):
    """The ``PartitionSpec`` of each array."""
    return jax.tree.map(lambda a: jax.typeof(a).sharding.spec, tree)


def in_automatic_axes(run: Callable, types: Callable) -> Callable:
    """``run(*args)``, whose results ``types(*args)`` says the specs of, under explicit axes."""

    one = jax.sharding.SingleDeviceSharding

    @functools.wraps(run)
    def call(*args):
        if is_explicit():
            return jax.sharding.auto_axes(run, out_sharding=types(*args))(*args)
        # arrays whose types name a mesh are refused outside of it: there JAX types no result
        for a in jax.tree.leaves(args):
            if not isinstance(a, jax.Array):
                continue
            if not isinstance(a, _jax.Tracer) and isinstance(a.sharding, one):
                continue
            mesh = jax.typeof(a).sharding.mesh
            if mesh.explicit_axes:
                raise StructureError(
                    f'an argument lies on a mesh {dict(mesh.shape)} with explicit axes, and the '
                    'call runs outside of it. Run it inside of `with jax.set_mesh(mesh):`, or make '
                    'the mesh with `axis_types=(jax.sharding.AxisType.Auto,) * len(names)`.'
                )
        return run(*args)

    return call


def check_devices(params, state) -> None:
    """Refuse what is no state, and one on other devices than params, of which JAX names none."""
    if not isinstance(state, OnlineState):
        raise StructureError(
            f'state is {type(state).__name__}; pass the OnlineState that `init` or `step` returned.'
        )
    first = next(iter(jax.tree.leaves(params)), None)
    traced = any(isinstance(x, _jax.Tracer) for x in (first, state.t))
    own, other = (None if traced else sharding_of(x) for x in (first, state.t))
    if own is not None and other is not None and own.device_set != other.device_set:
        meshes = [f'{dict(place.mesh.shape)} of {len(place.device_set)}' for place in (own, other)]
        raise StructureError(
            f'params lie on a mesh {meshes[0]} devices, and the state on another one, {meshes[1]}. '
            'Put both on one mesh with `jax.device_put`, by the specs of `partition_specs`.'
        )
