"""Which equation of a step has no forward mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from ..errors import NotSupportedError


def check_forward_mode(run: Callable, *args) -> None:
    """Refuse ``run(*args)`` where forward mode fails, and say at which equation."""

    try:
        _push(run, args)
    except (TypeError, ValueError, NotImplementedError) as e:
        closed = jax.make_jaxpr(run)(*args)  # raises what the step itself raises
        culprit = next(_culprits(closed.jaxpr), None)
        if culprit is None:
            raise
        name = culprit.primitive.name
        raise NotSupportedError(
            f'the gradient meter pushes tangents forward, and the equation `{name}`'
            f'{_function_of(culprit)} of the step or its loss has no forward mode: '
            f'{str(e).splitlines()[0]} Define its derivative by `jax.custom_jvp`, from which JAX '
            'makes reverse mode too, or compare with BPTT by `braintrace.verify.diagnose`.'
        ) from e


def _push(run: Callable, args, *fixed) -> None:
    """Abstractly, along one direction; ``vmap`` meets an op with a reverse mode alone."""

    def push(args, tangents, fixed):
        one = lambda t: jax.jvp(lambda *args: run(*args, *fixed), args, t)[1]  # noqa: E731
        return jax.vmap(one)(tangents)

    tangents = jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape), a.dtype), args)
    jax.eval_shape(push, args, tangents, fixed)


def _culprits(jaxpr) -> Iterator:
    """The innermost equations that forward mode refuses."""
    for eqn in jaxpr.eqns:
        name, inner = eqn.primitive.name, list(_inner(eqn))
        if name.startswith('custom_vjp') or not (inner or _pushes(eqn)):
            yield eqn
        elif not name.startswith('custom_jvp'):  # what has its own forward mode
            for below in inner:
                yield from _culprits(below)


def _pushes(eqn) -> bool:
    """Whether forward mode takes this equation."""
    moves = [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.invars]
    given = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]

    def of_floats(floats, others):
        floats, others = iter(floats), iter(others)
        values = [next(floats if moving else others) for moving in moves]
        return eqn.primitive.bind(*values, **eqn.params)

    try:
        others = [a for a, moving in zip(given, moves) if not moving]
        _push(of_floats, ([a for a, moving in zip(given, moves) if moving],), others)
    except (TypeError, ValueError, NotImplementedError):
        return False
    return True


def _inner(eqn) -> Iterator:
    """The jaxprs among an equation's params."""
    for value in eqn.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            each = getattr(each, 'jaxpr', each)
            if hasattr(each, 'eqns'):
                yield each


def _function_of(eqn) -> str:
    """The name of the function with an own derivative, where the equation tells it."""
    name = eqn.params.get('name')
    for sub in _inner(eqn):
        name = name or getattr(sub.debug_info, 'func_name', None)
    return f' of `{name}`' if name else ''
