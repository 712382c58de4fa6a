"""The only door to JAX's internals. Contract tests in ``tests/test_jax_contract.py`` pin what is relied on."""
from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import linear_util as _functions
from jax._src import source_info_util as _source
from jax._src.interpreters.batching import BatchTracer as _BatchTracer
from jax.core import Tracer
from jax.extend.core import Literal, Primitive
from jax.interpreters import ad, batching, mlir

__all__ = ['CondParts', 'DropVar', 'Literal', 'Primitive', 'RematParts', 'ScanParts', 'ShapedArray', 'ShardMapParts',
           'Tracer', 'WhileParts', 'WithoutMesh', 'ad', 'apply_primitive', 'at_location', 'batching',
           'bind', 'checked', 'closed_jaxpr', 'cond_parts', 'config_values', 'evaluate', 'hide_from_locations',
           'inlinable', 'is_custom_call', 'literal', 'location', 'mapped_axes', 'mlir',
           'named_axes_here', 'opened', 'remat_parts', 'scan_parts', 'shard_map_parts', 'sub_jaxprs',
           'surrounding_mesh', 'trace', 'varying', 'varying_along', 'while_parts', 'with_bodies', 'with_results']

CALLS = {'jit', 'pjit', 'closed_call', 'core_call'}
CUSTOM_CALLS = {'custom_jvp_call', 'custom_vjp_call'}
LATE_RULES = ('jvp_jaxpr_fun', 'fwd_jaxpr_thunk')
ShapedArray = jax.core.ShapedArray
DropVar = _core.DropVar


def apply_primitive(primitive: Primitive, *args, **params):
    """Run a primitive eagerly through its lowering, so that eager and jitted calls agree on every platform."""
    return _dispatch.apply_primitive(primitive, *args, **params)


def config_values() -> dict[str, Any]:
    """The flags of ``jax.config`` as the process has them, whatever a ``with`` block says here."""
    holders = jax.config._value_holders.items()
    return {name: holder.get_global() if isinstance(holder, _config.State) else holder.value
            for name, holder in holders}


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


LAYERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'nn') + os.sep
for _name in ('_etrace_op', '_learner', 'functional', '_compiler', '_executor', 'nn/_linear.py', 'nn/_base.py'):
    hide_from_locations(os.path.join(os.path.dirname(os.path.abspath(__file__)), *_name.split('/')))


def closed_jaxpr(closed) -> tuple[Any, list]:
    """The jaxpr and the constants of a call's body (one class since JAX 0.11, two before)."""
    return getattr(closed, 'jaxpr', closed), list(getattr(closed, 'consts', ()))


def evaluate(jaxpr, consts: list, args) -> list:
    """The results of a jaxpr."""
    return _core.eval_jaxpr(jaxpr, consts, *args)


def opened(fn, args) -> tuple[Any, list]:
    """Trace ``fn`` on arrays: ``(jaxpr, constants)`` without calls at its top level."""
    jaxpr, consts = closed_jaxpr(jax.make_jaxpr(fn)(*args))
    if not any(inlinable(eqn) for eqn in jaxpr.eqns):
        return jaxpr, consts

    return closed_jaxpr(jax.make_jaxpr(lambda *args: _evaluate_opened(jaxpr, consts, args))(*args))


def _evaluate_opened(jaxpr, consts, args) -> list:
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom):
        return literal(atom) if isinstance(atom, Literal) else env[atom]
    for eqn in jaxpr.eqns:
        ins, body = [read(v) for v in eqn.invars], inlinable(eqn)
        outs = bind(eqn.primitive, eqn.params, eqn.ctx, *ins) if body is None else _evaluate_opened(*closed_jaxpr(body), ins)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def with_results(jaxpr, outvars: list):
    """The same equations with other results."""
    return jaxpr.replace(outvars=outvars, debug_info=jaxpr.debug_info.with_unknown_names())


def inlinable(eqn):
    """The body of an equation that is only a call, else None."""
    if eqn.primitive.name not in CALLS:
        return None
    return eqn.params.get('jaxpr', eqn.params.get('call_jaxpr'))


def sub_jaxprs(params: dict) -> list:
    """The jaxprs that an equation holds in its parameters."""
    return list(_core.jaxprs_in_params(params))


class ScanParts(NamedTuple):
    """A ``scan``: operands ``[*consts, *init, *xs]``, results ``[*carry, *ys]``; the body's invars and outvars stand alike."""
    body: Any
    consts: list
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int | bool


def scan_parts(eqn) -> ScanParts | None:
    """What a ``scan`` equation holds, else None."""
    if eqn.primitive.name != 'scan':
        return None
    params = eqn.params
    if 'ft_in' in params:
        num_consts, num_carry, _ = map(len, params['ft_in'].unpack())
    else:
        num_consts, num_carry = params['num_consts'], params['num_carry']
    return ScanParts(*closed_jaxpr(params['jaxpr']), num_consts, num_carry, params['length'], params['reverse'], params['unroll'])


class WhileParts(NamedTuple):
    """A ``while``: operands ``[*cond consts, *body consts, *carry]``; each inner jaxpr reads its own consts, then the carry."""
    cond: Any
    cond_consts: list
    cond_nconsts: int
    body: Any
    body_consts: list
    body_nconsts: int


def while_parts(eqn) -> WhileParts | None:
    """What a ``while`` equation holds, else None."""
    if eqn.primitive.name != 'while':
        return None
    params = eqn.params
    return WhileParts(*closed_jaxpr(params['cond_jaxpr']), params['cond_nconsts'],
                      *closed_jaxpr(params['body_jaxpr']), params['body_nconsts'])


class CondParts(NamedTuple):
    """A ``cond``: operands ``[index, *ops]``; every branch, a pair ``(jaxpr, consts)``, reads all of ``ops``."""
    branches: list[tuple[Any, list]]


def cond_parts(eqn) -> CondParts | None:
    """What a ``cond`` or ``switch`` equation holds, else None."""
    return CondParts([closed_jaxpr(b) for b in eqn.params['branches']]) if eqn.primitive.name == 'cond' else None


class RematParts(NamedTuple):
    """A ``jax.checkpoint``: the operands are the body's invars."""
    body: Any
    consts: list
    policy: Any
    prevent_cse: Any


def remat_parts(eqn) -> RematParts | None:
    """What the equation of a ``jax.checkpoint`` holds, else None."""
    if eqn.primitive.name != 'remat2':
        return None
    return RematParts(*closed_jaxpr(eqn.params['jaxpr']), eqn.params['policy'], eqn.params['prevent_cse'])


class ShardMapParts(NamedTuple):
    """A ``shard_map``: global operands and results; the body reads and returns blocks, cut along the ``manual_axes`` of the mesh."""
    body: Any
    consts: list
    mesh: Any
    in_specs: tuple
    out_specs: tuple
    manual_axes: frozenset
    check_vma: bool

    @property
    def sizes(self) -> dict[str, int]:
        """The axes that the body is mapped over, in the order of the mesh."""
        return {axis: size for axis, size in self.mesh.shape.items() if axis in self.manual_axes}

    def named_axes(self):
        """The context in which collectives over these axes can be traced."""
        return _core.extend_axis_env_nd(list(self.sizes.items()))

    def manual_mesh(self):
        """The context that holds the mesh as the body sees it."""
        manual = {axis: jax.sharding.AxisType.Manual for axis in self.manual_axes}
        return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh.update_axis_types(manual))


def shard_map_parts(eqn) -> ShardMapParts | None:
    """What a ``shard_map`` equation holds, else None; the specs are a ``PartitionSpec`` for each operand and each result."""
    if eqn.primitive.name != 'shard_map':
        return None
    params = eqn.params
    return ShardMapParts(*closed_jaxpr(params['jaxpr']), params['mesh'], tuple(params['in_specs']), tuple(params['out_specs']),
                         frozenset(params['newly_manual_axes']), params['check_vma'])


def is_custom_call(eqn) -> bool:
    """Whether an equation applies a function that brings its own derivative rule; its body is ``params['call_jaxpr']``."""
    return eqn.primitive.name in CUSTOM_CALLS


class WithoutMesh(NamedTuple):
    """The context of an equation from inside a ``shard_map``, but with the mesh of whoever evaluates it."""
    ctx: Any

    @property
    @contextlib.contextmanager
    def manager(self):
        here = jax.sharding.get_abstract_mesh()
        with self.ctx.manager, jax.sharding.use_abstract_mesh(here):
            yield


def with_bodies(eqn, parts: ShardMapParts, evaluate: Callable) -> dict:
    """The parameters of an equation from inside a ``shard_map``, each jaxpr traced anew as ``evaluate(body, consts, args)`` does it.

    Values lose the mesh axes along which they vary, and shardings over that mesh go. The rules of a custom call follow when they are
    asked for.
    """
    def replaced(value):
        if isinstance(value, jax.sharding.NamedSharding):
            return None
        if type(value) is tuple:
            return tuple(map(replaced, value))
        if not hasattr(value, 'eqns') or not all(isinstance(v.aval, ShapedArray) for v in closed_jaxpr(value)[0].invars):
            return value
        new = _retraced(*closed_jaxpr(value), parts, evaluate)
        return new if isinstance(new, type(value)) else new.jaxpr

    params = {name: replaced(value) for name, value in eqn.params.items()}
    if is_custom_call(eqn):
        for name in params.keys() & LATE_RULES:
            params[name] = _wrapped(_late_rule, params[name], parts, evaluate)
        for name in params.keys() & {'bwd'}:
            params[name] = _wrapped(_backward, params[name], parts)
    return params


def _retraced(body, consts, parts: ShardMapParts, evaluate: Callable):
    binders = [*body.constvars, *body.invars][len(consts):]
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, 'weak_type', False)) for v in binders]
    with _core.eval_context(), parts.named_axes():
        return jax.make_jaxpr(lambda *args: evaluate(body, consts, args))(*avals)


def _wrapped(fn: Callable, rule, *args):
    return _functions.wrap_init(functools.partial(fn, rule, *args), debug_info=rule.debug_info)


def _late_rule(rule, parts: ShardMapParts, evaluate: Callable, *zeros):
    """The jaxpr of a derivative rule: made with the types of the body, traced anew without them."""
    with parts.named_axes(), parts.manual_mesh(), _config._check_vma(parts.check_vma):
        body, consts, *rest = rule.call_wrapped(*zeros)
    return *closed_jaxpr(_retraced(body, list(consts), parts, evaluate)), *rest


def _backward(rule, parts: ShardMapParts, *args):
    """A backward rule on values without the types of the body, which is why their check is off."""
    with parts.named_axes(), parts.manual_mesh(), _config.disable_bwd_checks(True):
        return rule.call_wrapped(*args)


def literal(atom):
    """The value of a literal, without the mesh that its type remembers."""
    return atom.val.view() if isinstance(atom.val, np.ndarray) else atom.val


def varying(value) -> frozenset:
    """The named axes of a surrounding ``shard_map`` along which a value may differ."""
    return frozenset(getattr(getattr(jax.typeof(value), 'manual_axis_type', None), 'varying', ()))


def checked(on: bool):
    """The context in which types name the axes of a ``shard_map`` that values vary along."""
    return _config._check_vma(on)


def varying_along(aval, axes: frozenset):
    """A type that names the axes of a surrounding ``shard_map`` along which a value may differ."""
    sharding = jax.NamedSharding(jax.sharding.get_abstract_mesh(), jax.P(*[None] * aval.ndim))
    return aval.update(sharding=sharding, manual_axis_type=_core.ManualAxisType(varying=axes))


def named_axes_here():
    """The context to trace collectives over the axes of a surrounding ``shard_map`` in."""
    mesh = jax.sharding.get_abstract_mesh()
    return _core.extend_axis_env_nd([(a, mesh.shape[a]) for a in mesh.manual_axes])


def surrounding_mesh():
    """The mesh of a surrounding ``shard_map``, which what is traced there keeps; None outside."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if mesh.manual_axes else None


def mapped_axes(value) -> set:
    """The named axes of the surrounding ``jax.vmap`` calls along which a value is mapped."""
    axes = set()
    while isinstance(value, _BatchTracer):
        if value.batch_dim is not None:
            axes.add(value._trace.axis_data.name)
        value = value.val
    return axes


@functools.lru_cache(maxsize=4096)
def _describe(traceback) -> str:
    frames = list(_source.user_frames(traceback))
    frame = next((f for f in frames if not f.file_name.startswith(LAYERS)), frames[0] if frames else None)
    return '' if frame is None else f'{frame.file_name}:{frame.start_line} ({frame.function_name})'


def location(source_info) -> str:
    """``file:line (function)`` of the user's code that made an equation (behind the layers of ``nn``), empty if unknown."""
    return _describe(source_info.traceback)


def at_location(source_info):
    """The context in which new equations name the place of this one."""
    return _source.user_context(source_info.traceback)
