"""An alternative reverse rule of an implementation."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from .._errors import RuleContractError

__all__ = ['Reverse', 'rule_reverse', 'with_reverse']


@dataclasses.dataclass(frozen=True)
class Reverse:
    """What :func:`rule_reverse` returns: one of the two forms."""
    backward: Callable | None
    forward: Callable | None


def rule_reverse(backward: Callable | None = None, *, forward: Callable | None = None) -> Reverse:
    """A reverse rule for the field ``reverse`` of an ``ETPPrimitiveSpec``, in the place of the one derived from ``impl``; give one form.

    ``backward(inputs, outputs, grads, params, required) -> cotangents``: one for each input, None where ``required`` is False.
    ``forward(inputs, params, required) -> (outputs, backward)`` with ``backward(grads) -> cotangents`` keeps what it likes from the
    forward pass. Inputs and cotangents are lists, outputs and grads what ``impl`` returns. Forward mode through the op raises then.

    Raises ``RuleContractError`` for both or neither.

    >>> import jax, jax.numpy as jnp
    >>> from braintrace import kit
    >>> def backward(inputs, outputs, grads, params, required):
    ...     return [None, 1 / (1 + jnp.exp(-inputs[1])) * inputs[0] * grads]
    >>> op = kit.new_etp_primitive(kit.ETPPrimitiveSpec(
    ...     'doc_softplus_gain', lambda x, w: x * jax.nn.softplus(w), reverse=kit.rule_reverse(backward)))
    >>> jax.grad(lambda w: op(jnp.ones(2), w).sum())(jnp.zeros(2))
    Array([0.5, 0.5], dtype=float32)
    """
    if (backward is None) == (forward is None):
        raise RuleContractError(f'rule_reverse takes exactly one of backward and forward; {"both" if backward else "neither"} given.')
    if not callable(backward or forward):
        raise RuleContractError(f'rule_reverse: {backward or forward!r} is no function.')
    return Reverse(backward, forward)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """What a backward pass must know beside arrays: which cotangents are wanted, and a traced ``backward`` with its result's structure."""
    required: tuple[bool, ...]
    jaxpr: Any = None
    treedef: Any = None


def with_reverse(name: str, impl: Callable, reverse: Reverse) -> Callable:
    """``impl`` with another reverse rule."""
    def call(*operands, **params):
        def run(*operands):
            return impl(*operands, **params)

        def forward(*primals):
            values, required = [p.value for p in primals], tuple(bool(p.perturbed) for p in primals)
            if reverse.forward is None:
                outputs = run(*values)
                return outputs, (Kept(required), values, outputs)
            outputs, backward = reverse.forward(values, params, required)
            _check_like(name, outputs, jax.eval_shape(run, *values))
            treedefs = []

            def flat(grads):
                leaves, treedef = jax.tree.flatten(_checked(name, backward(grads), values, required))
                treedefs.append(treedef)
                return leaves
            jaxpr, consts = _jax.closed_jaxpr(jax.make_jaxpr(flat)(outputs))
            return outputs, (Kept(required, jaxpr, treedefs[0]), consts, None)

        def backward(residuals, grads):
            kept, values, outputs = residuals
            grads = jax.tree.map(_instantiated, grads, is_leaf=_is_symbolic)
            if kept.jaxpr is None:
                return tuple(_checked(name, reverse.backward(values, outputs, grads, params, kept.required), values, kept.required))
            return tuple(jax.tree.unflatten(kept.treedef, _jax.evaluate(kept.jaxpr, values, jax.tree.leaves(grads))))

        ruled = jax.custom_vjp(run)
        ruled.defvjp(forward, backward, symbolic_zeros=True)
        return ruled(*operands)
    return call


def _is_symbolic(x) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


def _instantiated(x):
    return jnp.zeros(x.shape, x.dtype) if _is_symbolic(x) else x


def _checked(name: str, cotangents, values, required: tuple[bool, ...]) -> list:
    """Cotangents by input, each of its input's shape, None where none is wanted."""
    if not isinstance(cotangents, list | tuple) or len(cotangents) != len(values):
        found = f'{len(cotangents)} cotangents' if isinstance(cotangents, list | tuple) else f'a {type(cotangents).__name__}'
        raise RuleContractError(f'the reverse rule of {name!r} returned {found}; expected a list of {len(values)}, one for each input.')
    for i, (c, x, wanted) in enumerate(zip(cotangents, values, required, strict=True)):
        if wanted and c is None:
            raise RuleContractError(f'the reverse rule of {name!r} returned None for input {i}, whose cotangent is required.')
        if wanted and jnp.shape(c) != jnp.shape(x):
            raise RuleContractError(f'the reverse rule of {name!r} returned shape {jnp.shape(c)} for input {i} of shape {jnp.shape(x)}.')
    return [_of_type(c, x) if wanted else None for c, x, wanted in zip(cotangents, values, required, strict=True)]


def _of_type(cotangent, x):
    """In the dtype of an input, and under ``shard_map`` summed over the shards that share it."""
    shared = _jax.varying(cotangent) - _jax.varying(x)
    return (jax.lax.psum(cotangent, tuple(shared)) if shared else cotangent).astype(x.dtype)


def _check_like(name: str, outputs, expected) -> None:
    found, want = ([(a.shape, str(a.dtype)) for a in jax.tree.leaves(t)] for t in (outputs, expected))
    if found != want:
        raise RuleContractError(f'the forward of the reverse rule of {name!r} returned {found}, its implementation {want}.')
