"""The only door to JAX's internals. Contract tests in ``tests/test_jax_contract.py`` pin what is relied on."""
from __future__ import annotations

import functools
import os
from typing import Any

import jax
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import source_info_util as _source
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, mlir

__all__ = ['DropVar', 'Literal', 'Primitive', 'ShapedArray', 'ad', 'apply_primitive', 'batching', 'bind', 'closed_jaxpr',
           'hide_from_locations', 'inlinable', 'location', 'mlir',
           'sub_jaxprs', 'trace']

CALLS = {'jit', 'pjit', 'closed_call', 'core_call'}
ShapedArray = jax.core.ShapedArray
DropVar = _core.DropVar


def apply_primitive(primitive: Primitive, *args, **params):
    """Run a primitive eagerly through its lowering, so that eager and jitted calls agree on every platform."""
    return _dispatch.apply_primitive(primitive, *args, **params)


def trace(fn, *avals) -> tuple[Any, list]:
    """Trace ``fn`` on flat abstract values, away from any outer transformation: ``(jaxpr, constants)``."""
    with _core.eval_context():
        closed = jax.make_jaxpr(fn)(*avals)
    return getattr(closed, 'jaxpr', closed), list(closed.consts)


def bind(primitive: Primitive, params: dict, ctx, *args) -> list:
    """Evaluate one equation on ``args`` and return the list of its outputs."""
    subfuns, bind_params = get_bind_params(primitive, params)
    with ctx.manager:
        out = primitive.bind(*subfuns, *args, **bind_params)
    return list(out) if primitive.multiple_results else [out]


def get_bind_params(primitive: Primitive, params: dict):
    got = primitive.get_bind_params(params)
    return got if isinstance(got, tuple) else ((), got)


def hide_from_locations(path: str) -> None:
    """Leave files under a path out of the places that :func:`location` names."""
    _source.register_exclusion(path)


for _name in ('_etrace_op', '_learner', 'functional', '_compiler', '_executor'):
    hide_from_locations(os.path.join(os.path.dirname(os.path.abspath(__file__)), _name) + os.sep)


def closed_jaxpr(closed) -> tuple[Any, list]:
    """The jaxpr and the constants of a call's body (one class since JAX 0.11, two before)."""
    return getattr(closed, 'jaxpr', closed), list(getattr(closed, 'consts', ()))


def inlinable(eqn):
    """The body of an equation that is only a call, else None."""
    if eqn.primitive.name not in CALLS:
        return None
    return eqn.params.get('jaxpr', eqn.params.get('call_jaxpr'))


def sub_jaxprs(params: dict) -> list:
    """The jaxprs that an equation holds in its parameters."""
    return list(_core.jaxprs_in_params(params))


@functools.lru_cache(maxsize=4096)
def _describe(traceback) -> str:
    frame = _source.user_frame(traceback)
    return '' if frame is None else f'{frame.file_name}:{frame.start_line} ({frame.function_name})'


def location(source_info) -> str:
    """``file:line (function)`` of the user's code that made an equation, empty if unknown."""
    return _describe(source_info.traceback)
