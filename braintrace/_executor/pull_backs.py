"""Pull-backs (the linear functions that ``jax.vjp`` returns) and the zeros in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .. import _jax
from .._compiler import is_complex

__all__ = ['PullBack', 'Uncut', 'as_complex', 'completed']

CALLS = {'jit', 'pjit', 'closed_call', 'remat', 'remat2', 'checkpoint'}
Read = frozenset[int]


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
    the equations. A result that depends on none is zero for every cotangent.
    """

    def __init__(self, pull: Callable, cotangent):
        leaves, self._treedef = jax.tree.flatten(cotangent)
        # float0 cotangents (of integers) are no arrays that a function can be traced for
        self._arrays = [k for k, x in enumerate(leaves) if x.dtype != jax.dtypes.float0]
        found: list = []

        def flat(*values):
            results, treedef = jax.tree.flatten(pull(self._whole(leaves, values)))
            found[:] = [treedef]
            return results

        self._jaxpr, self._consts = _jax.opened(flat, [leaves[k] for k in self._arrays])
        self._results = found[0]
        sets = [frozenset({k}) for k in self._arrays]
        self.reads = jax.tree.unflatten(self._results, _reads(self._jaxpr, sets))

    def _whole(self, leaves: list, values):
        """A cotangent with new values of its arrays."""
        new = list(leaves)
        for k, x in zip(self._arrays, values, strict=True):
            new[k] = x
        return jax.tree.unflatten(self._treedef, new)

    def __call__(self, cotangent):
        leaves = jax.tree.leaves(cotangent)
        arrays = [leaves[k] for k in self._arrays]
        return jax.tree.unflatten(self._results, _jax.evaluate(self._jaxpr, self._consts, arrays))


def _reads(jaxpr, sets: list[Read]) -> list[Read]:
    """For each result of a jaxpr, the union of the sets of the inputs that it depends on."""
    found = dict(zip(jaxpr.invars, sets, strict=True))
    none: Read = frozenset()

    def of(v) -> Read:
        return none if isinstance(v, _jax.Literal) else found.get(v, none)

    for eqn in jaxpr.eqns:
        ins = [of(v) for v in eqn.invars]
        if eqn.primitive.name in CALLS and 'jaxpr' in eqn.params:
            outs = _reads(_jax.closed_jaxpr(eqn.params['jaxpr'])[0], ins)
        else:  # any other equation: each result may depend on all that it reads
            outs = [none.union(*ins)] * len(eqn.outvars)
        found.update(zip(eqn.outvars, outs, strict=True))
    return [of(v) for v in jaxpr.outvars]


def completed(pull: PullBack, new: list, chosen: set[int], to_y: dict) -> dict:
    """The rows ``to_y`` of D_f, those of a complex state by a real y completed.

    A pull-back to real numbers gives ``Re(u D_f)``: ``to_y`` is that of ones, and ``u = -i`` gives
    the imaginary part.
    """
    of_complex = {k for k in chosen if is_complex(new[k])}
    own = {key for key, y in to_y.items() if not is_complex(y) and of_complex & pull.reads[1][key]}
    if not own:
        return to_y
    turned = pull([jnp.full_like(h, -1j if k in of_complex else 0) for k, h in enumerate(new)])[1]
    return to_y | {key: as_complex(to_y[key], turned[key]) for key in own}


def as_complex(real: jax.Array, imaginary: jax.Array) -> jax.Array:
    wide = jnp.promote_types(real.dtype, jnp.float32)
    return jax.lax.complex(real.astype(wide), imaginary.astype(wide))
