"""Pull-backs (the linear functions that ``jax.vjp`` returns) and the zeros in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from .. import _jax

__all__ = ['PullBack', 'Uncut']

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
