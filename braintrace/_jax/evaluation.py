"""Jaxprs and primitives: tracing, evaluating, and the parts of an equation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import jax
import numpy as np
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src.interpreters.batching import BatchTracer as _BatchTracer
from jax.extend.core import Literal, Primitive

CALLS = {'jit', 'pjit', 'closed_call', 'core_call'}
# of functions that bring their own derivative rule; the body is `params['call_jaxpr']`
CUSTOM_CALLS = {'custom_jvp_call', 'custom_vjp_call'}
ShapedArray = jax.core.ShapedArray
DropVar = _core.DropVar


def apply_primitive(primitive: Primitive, *args, **params):
    """Run a primitive eagerly through its lowering, so that eager and jitted calls agree."""
    return _dispatch.apply_primitive(primitive, *args, **params)


def config_values() -> dict[str, Any]:
    """The flags of ``jax.config`` of the whole process, outside of any ``with`` block."""
    holders = jax.config._value_holders.items()
    return {
        name: holder.get_global() if isinstance(holder, _config.State) else holder.value
        for name, holder in holders
    }


def promoted(*dtypes):
    """Their common dtype, also where ``jax_numpy_dtype_promotion`` lets users mix none."""
    with jax.numpy_dtype_promotion('standard'):
        return jax.numpy.result_type(*dtypes)


def wide(dtype):
    """The dtype in which numbers of some dtype are summed: that of single precision at least."""
    return jax.numpy.dtype(dtype if jax.numpy.finfo(dtype).bits >= 32 else jax.numpy.float32)


def current_trace():
    """What operations are done by here: another object inside each transformation."""
    return _core.trace_ctx.trace


def is_outermost() -> bool:
    """Whether no transformation surrounds the call."""
    return _core.trace_ctx.is_top_level()


def trace(fn, *avals) -> tuple[Any, list]:
    """Trace ``fn`` on flat abstract values, away from any outer transformation: ``(jaxpr,
    constants)``.
    """
    with _core.eval_context():
        closed = jax.make_jaxpr(fn)(*avals)
    return getattr(closed, 'jaxpr', closed), list(closed.consts)


def called(fn, *args):
    """``fn`` on arrays, away from any outer transformation."""
    with _core.eval_context():
        return fn(*args)


def bind(eqn, *args, params: dict | None = None, ctx=None) -> list:
    """Evaluate one equation on ``args``, perhaps with other parameters or in another context;
    always returns a list.

    An equation may be evaluated in several passes: each has a key of its own where
    ``jax_debug_key_reuse`` counts how often one is used.
    """
    if jax.config.jax_debug_key_reuse:  # type: ignore[attr-defined]
        args = tuple(jax.random.clone(x) if is_key(x) else x for x in args)
    primitive = eqn.primitive
    got = primitive.get_bind_params(eqn.params if params is None else params)
    subfuns, bind_params = got if isinstance(got, tuple) else ((), got)
    with (ctx or eqn.ctx).manager:
        out = primitive.bind(*subfuns, *args, **bind_params)
    return list(out) if primitive.multiple_results else [out]


def is_key(x) -> bool:
    """Whether a value holds typed random keys."""
    return hasattr(x, 'dtype') and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def closed_jaxpr(closed) -> tuple[Any, list]:
    """The jaxpr and the constants of a call's body (one class since JAX 0.11, two before)."""
    return getattr(closed, 'jaxpr', closed), list(getattr(closed, 'consts', ()))


def evaluate(jaxpr, consts: list, args) -> list:
    return _core.eval_jaxpr(jaxpr, consts, *args)


def evaluate_with(jaxpr, args) -> list:
    """The results of a jaxpr on ``[*constants, *operands]``."""
    number = len(jaxpr.constvars)
    return evaluate(jaxpr, list(args[:number]), args[number:])


def evaluate_into(env: MutableMapping, equations: Iterable) -> None:
    """Evaluate equations in order: they read variables in ``env``, and write into it."""
    for eqn in equations:
        ins = [literal(v) if isinstance(v, Literal) else env[v] for v in eqn.invars]
        env.update(zip(eqn.outvars, bind(eqn, *ins), strict=True))


def walk(jaxpr, consts, args, step: Callable, of_literal: Callable | None = None) -> list:
    """The results of a jaxpr, each equation evaluated by ``step(eqn, operands) -> results``;
    ``of_literal(atom)`` makes the operand of a literal, by default its number.
    """
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    of_literal = of_literal or literal

    def read(atom):
        return of_literal(atom) if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        outs = step(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def opened(fn, args) -> tuple[Any, list, Any]:
    """Trace ``fn`` on trees of arrays: ``(jaxpr, constants, shapes)``, without calls at the top
    level of the jaxpr, and with the shapes of the results as ``fn`` returns them.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    jaxpr, consts = closed_jaxpr(closed)
    if any(inlinable(eqn) for eqn in jaxpr.eqns):
        again = jax.make_jaxpr(lambda *leaves: _evaluate_opened(jaxpr, consts, leaves))
        return *closed_jaxpr(again(*jax.tree.leaves(args))), shapes
    return jaxpr, consts, shapes


def _evaluate_opened(jaxpr, consts, args) -> list:
    def step(eqn, ins: list) -> list:
        body = inlinable(eqn)
        if body is not None:
            return _evaluate_opened(*closed_jaxpr(body), ins)
        return bind(eqn, *ins)

    return walk(jaxpr, consts, args, step)


def inlinable(eqn):
    """The body of an equation that is only a call, else None."""
    if eqn.primitive.name not in CALLS:
        return None
    return eqn.params.get('jaxpr', eqn.params.get('call_jaxpr'))


def holds_call(eqn, names=CUSTOM_CALLS) -> bool:
    """Whether a function that brings its own derivative rule is in an equation, at any depth;
    ``names``: of the primitives that call it.
    """
    inner = (e for j in sub_jaxprs(eqn.params) for e in closed_jaxpr(j)[0].eqns)
    return eqn.primitive.name in names or any(holds_call(e, names) for e in inner)


def is_mutable(aval) -> bool:
    """Whether a value is a reference to a mutable array."""
    return hasattr(aval, 'inner_aval')


def sub_jaxprs(params: dict) -> list:
    return list(_core.jaxprs_in_params(params))


def literal(atom):
    """The value of a literal, without the mesh that its type remembers."""
    return atom.val.view() if isinstance(atom.val, np.ndarray) else atom.val


def mapped_axes(value) -> set:
    """The named axes of surrounding ``jax.vmap`` calls along which a value is mapped."""
    axes = set()
    while isinstance(value, _BatchTracer):
        if value.batch_dim is not None:
            axes.add(value._trace.axis_data.name)
        value = value.val
    return axes
