"""Pull-backs (the linear functions that ``jax.vjp`` returns) and the zeros in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import is_complex
from .dataflow import Reads, body_of, dependence


class Uncut(NamedTuple):
    """The linear maps of a step in which nothing is cut.

    ``new``: the new hidden states; ``pull``: cotangents of these -> those of the old ones, and of
    each y; ``along(op)``: tangents of its y -> new hidden states by their place in the carry.
    """

    new: list
    pull: Callable
    along: Callable

    def push(self, old: list) -> list:
        """Tangents of the old hidden states -> those of the new ones, by transposing ``pull``: a
        function with a derivative rule of its own has no forward mode.
        """
        none = [jnp.zeros_like(h) for h in self.new]
        return jax.vjp(lambda v: self.pull(v)[0], none)[1](old)[0]


class PullBack:
    """A pull-back, traced once for cotangents like these.

    ``reads``: for each of its results the numbers of the cotangent's leaves that it depends on, by
    the equations. A result that depends on none is zero for every cotangent. A call with
    ``counts``, a bool, leaves the first leaf out where it is false: what depends on it alone need
    not be a number then.
    """

    def __init__(self, pull: Callable, cotangent):
        leaves, treedef = jax.tree.flatten(cotangent)
        # float0 cotangents (of integers) are no arrays that a function can be traced for
        self._arrays = [k for k, x in enumerate(leaves) if x.dtype != jax.dtypes.float0]

        def of_arrays(*values):
            whole = list(leaves)
            for k, x in zip(self._arrays, values, strict=True):
                whole[k] = x
            return pull(jax.tree.unflatten(treedef, whole))

        # the pull-back as equations: which cotangents each result reads is asked of these
        arrays = [leaves[k] for k in self._arrays]
        self._jaxpr, self._consts, shapes = _jax.opened(of_arrays, arrays)
        self._results = jax.tree.structure(shapes)
        self._sets = [frozenset({k}) for k in self._arrays]
        reads = dependence(self._jaxpr, self._sets, inside=True)
        self.reads = jax.tree.unflatten(self._results, [reads(v) for v in self._jaxpr.outvars])

    def __call__(self, cotangent, counts: jax.Array | None = None):
        leaves = jax.tree.leaves(cotangent)
        arrays = [leaves[k] for k in self._arrays]
        if counts is None:
            results = _jax.evaluate(self._jaxpr, self._consts, arrays)
        else:
            # the first leaf, the cotangent of the loss, is gated along the way
            given = self._jaxpr, self._consts, arrays, self._sets
            results = _gated(*given, self._sets[0], counts)
        return jax.tree.unflatten(self._results, results)


def _gated(
    jaxpr, consts: list, args: list, sets: list[Reads], first: Reads, counts: jax.Array
) -> list:
    """The results of a jaxpr on inputs that depend on these ``sets``, in which what depends on
    ``first`` alone becomes zero, unless it ``counts``, where it meets other values and where it
    ends. A zero cotangent would not do: zero times what is not a number is none.
    """
    reads = dependence(jaxpr, sets, inside=True)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def value(v, alone: bool):
        x = _jax.literal(v) if isinstance(v, _jax.Literal) else env[v]
        gated = not alone and reads(v) == first
        return jnp.where(counts, x, jnp.zeros_like(x)) if gated else x

    for eqn in jaxpr.eqns:
        # what depends on the loss alone stays as it is until it meets another value
        alone = all(reads(v) == first for v in eqn.outvars)
        call = body_of(eqn)
        ins = [value(v, alone or call is not None) for v in eqn.invars]
        if call is not None:
            outs = _gated(*call, ins, [reads(v) for v in eqn.invars], first, counts)
        else:
            outs = _jax.bind(eqn, *ins)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [value(v, False) for v in jaxpr.outvars]


def completed(pull: PullBack, new: list, chosen: set[int], to_y: dict) -> dict:
    """The rows ``to_y`` of D_f, those of a complex state by a real y completed.

    A pull-back to real numbers gives ``Re(u D_f)``: ``to_y`` is that of ones, and ``u = -i`` gives
    the imaginary part.
    """
    of_complex = {k for k in chosen if is_complex(new[k])}
    own = {key for key, y in to_y.items() if not is_complex(y) and of_complex & pull.reads[1][key]}
    if not own:
        return to_y
    # a second pull-back, with the cotangent turned by -i
    turned = pull([jnp.full_like(h, -1j if k in of_complex else 0) for k, h in enumerate(new)])[1]
    return to_y | {key: as_complex(to_y[key], turned[key]) for key in own}


def as_complex(real: jax.Array, imaginary: jax.Array) -> jax.Array:
    wide = jnp.promote_types(real.dtype, jnp.float32)
    return jax.lax.complex(real.astype(wide), imaginary.astype(wide))
