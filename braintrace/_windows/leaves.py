"""Leaves of pytrees: random keys, sizes, gradients that are zero or refused."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from .._compiler import abstract
from .._errors import NotSupportedError


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
