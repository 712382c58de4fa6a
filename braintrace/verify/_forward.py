"""Which equation of a function has no forward mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax

from .. import _jax
from ..errors import NotSupportedError
from ._sequence import split_floats


def refused(run: Callable, args: tuple, error: Exception) -> Exception:
    """What to raise where forward mode of ``run(*args)`` ended in this error: one that names the
    equation; what ``run`` itself raises comes first.
    """
    eqn, where = next(_culprits(jax.make_jaxpr(run)(*args).jaxpr), (None, ''))
    if eqn is None:
        return error
    inner = [_jax.closed_jaxpr(each)[0].debug_info.func_name for each in _inner(eqn)]
    of = f' of `{inner[0]}`' if inner else ''
    at = f' at {where}' if where else ''
    return NotSupportedError(
        f'the gradient meter pushes tangents forward, and the equation `{eqn.primitive.name}`{of}'
        f'{at} has no forward mode: {str(error).splitlines()[0]} Define its derivative by '
        '`jax.custom_jvp`, from which JAX makes reverse mode too, or compare with BPTT by '
        '`braintrace.verify.diagnose`.'
    )


def _culprits(jaxpr, outer: str = '') -> Iterator[tuple]:
    """The innermost equations that forward mode refuses, each with its place in the user's code."""
    for eqn in jaxpr.eqns:
        where = _jax.location(eqn.source_info) or outer
        # a function with a derivative of its own is one step of forward mode
        if eqn.primitive.name not in _jax.CUSTOM_CALLS and _inner(eqn):
            for each in _inner(eqn):
                yield from _culprits(_jax.closed_jaxpr(each)[0], where)
        elif not _pushes(eqn):
            yield eqn, where


def _inner(eqn) -> list:
    return _jax.sub_jaxprs(eqn.params)


def _pushes(eqn) -> bool:
    """Whether forward mode takes this equation; ``vmap`` meets one with a reverse mode alone."""

    def push(args):
        floats = split_floats(args)
        run = lambda values: _jax.bind(eqn, *floats.rebuild(values))  # noqa: E731
        one = lambda v: jax.jvp(run, (floats.values,), (v,))[1]  # noqa: E731
        return jax.vmap(one)([v[None] for v in floats.values]) if floats.values else ()

    try:
        jax.eval_shape(push, [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars])
    except (TypeError, ValueError, NotImplementedError):
        return False
    return True
