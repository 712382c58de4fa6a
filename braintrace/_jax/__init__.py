"""The only door to JAX's internals, pinned by ``tests/test_jax_contract.py``."""

from jax.core import Tracer
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, mlir

from .control_flow import (
    ScanParts,
    WhileParts,
    call_body,
    cond_branches,
    recomputed,
    scan_parts,
    while_parts,
)
from .evaluation import (
    CUSTOM_CALLS,
    DropVar,
    ShapedArray,
    apply_primitive,
    bind,
    called,
    closed_jaxpr,
    config_values,
    current_trace,
    evaluate,
    evaluate_into,
    evaluate_with,
    holds_call,
    inlinable,
    is_key,
    is_mutable,
    is_outermost,
    literal,
    mapped_axes,
    opened,
    promoted,
    sub_jaxprs,
    trace,
    walk,
    wide,
)
from .places import (
    at_location,
    hide_from_locations,
    location,
)
from .platforms import (
    alone_or,
    as_if_on,
    by_platform,
    lower_alone,
    platform_dependent,
    platform_here,
)
from .shards import (
    ShardMapParts,
    WithoutMesh,
    checked,
    collective_axes,
    is_checked,
    named_axes_here,
    shard_map_parts,
    surrounding_mesh,
    varying,
    varying_along,
    with_bodies,
)
