"""Reverse rules that users write; they replace the rule derived from an implementation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .. import _jax
from ..errors import RuleContractError


@dataclasses.dataclass(frozen=True)
class Reverse:
    """A reverse rule in one of the two forms of :func:`rule_reverse`; the other one is None."""

    backward: Callable | None
    forward: Callable | None


def rule_reverse(backward: Callable | None = None, *, forward: Callable | None = None) -> Reverse:
    """Make a reverse rule for the field ``reverse`` of an ``ETPPrimitiveSpec``, which replaces the
    rule derived from ``impl``. Give one of two forms.

    ``backward(inputs, outputs, grads, params, required) -> cotangents``: one for each input, None
    where ``required`` is False. ``forward(inputs, params) -> (outputs, backward)`` makes a
    ``backward`` of the same five arguments, which may use values of the forward pass. Inputs and
    cotangents are lists; outputs and grads have the structure that ``impl`` returns. Forward mode
    through such an op raises.

    Raises ``RuleContractError`` for both or neither.

    >>> import jax, jax.numpy as jnp
    >>> from braintrace import kit
    >>> def backward(inputs, outputs, grads, params, required):
    ...     return [None, 1 / (1 + jnp.exp(-inputs[1])) * inputs[0] * grads]
    >>> op = kit.new_etp_primitive(kit.ETPPrimitiveSpec(
    ...     'doc_softplus_gain',
    ...     lambda x, w: x * jax.nn.softplus(w),
    ...     reverse=kit.rule_reverse(backward)))
    >>> jax.grad(lambda w: op(jnp.ones(2), w).sum())(jnp.zeros(2))
    Array([0.5, 0.5], dtype=float32)
    """
    if (backward is None) == (forward is None):
        raise RuleContractError(
            'rule_reverse takes exactly one of backward and forward; '
            f'{"both" if backward else "neither"} given.'
        )
    if not callable(backward or forward):
        raise RuleContractError(f'rule_reverse: {backward or forward!r} is no function.')
    return Reverse(backward, forward)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Residuals:
    """The part of the residuals that is no array: which cotangents are wanted, and for the form
    ``forward`` its traced ``backward`` with the structure of the result.
    """

    required: tuple[bool, ...]
    jaxpr: Any = None
    treedef: Any = None


def with_reverse(name: str, impl: Callable, reverse: Reverse) -> Callable:
    """``impl`` with another reverse rule."""

    def call(*operands, **params):
        rule = _CustomRule(name, impl, reverse, params)
        run = functools.partial(impl, **params)
        ruled = jax.custom_vjp(run)
        ruled.defvjp(rule.forward, rule.backward, symbolic_zeros=True)
        return ruled(*operands)

    return call


@dataclasses.dataclass(frozen=True)
class _CustomRule:
    """A reverse rule in the form that ``jax.custom_vjp`` asks for, for one call of an op."""

    name: str
    impl: Callable
    reverse: Reverse
    params: dict[str, Any]

    def forward(self, *primals):
        values, required = [p.value for p in primals], tuple(bool(p.perturbed) for p in primals)
        if self.reverse.forward is None:
            outputs = self.impl(*values, **self.params)
            return outputs, (Residuals(required), values, outputs)
        outputs, backward = self.reverse.forward(values, self.params)
        expected = jax.eval_shape(functools.partial(self.impl, **self.params), *values)
        _check_like(self.name, outputs, expected)
        # The function ``backward`` is no array, so residuals can not hold it: it is traced here,
        # and its jaxpr and the arrays that it closes over are kept.
        treedefs = []

        def flat(grads):
            found = backward(values, outputs, grads, self.params, required)
            cotangents = _checked(self.name, found, values, required)
            leaves, treedef = jax.tree.flatten(cotangents)
            treedefs.append(treedef)
            return leaves

        jaxpr, consts = _jax.closed_jaxpr(jax.make_jaxpr(flat)(outputs))
        return outputs, (Residuals(required, jaxpr, treedefs[0]), consts, None)

    def backward(self, residuals, grads):
        kept, values, outputs = residuals
        grads = jax.tree.map(_instantiated, grads, is_leaf=_is_symbolic)
        if kept.jaxpr is not None:
            leaves = _jax.evaluate(kept.jaxpr, values, jax.tree.leaves(grads))
            return tuple(jax.tree.unflatten(kept.treedef, leaves))
        found = self.reverse.backward(values, outputs, grads, self.params, kept.required)
        return tuple(_checked(self.name, found, values, kept.required))


def _is_symbolic(x) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


def _instantiated(x):
    return jnp.zeros(x.shape, x.dtype) if _is_symbolic(x) else x


def _checked(name: str, cotangents, values, required: tuple[bool, ...]) -> list:
    """The cotangents, each of its input's shape and dtype, None where none is wanted."""
    if not isinstance(cotangents, list | tuple) or len(cotangents) != len(values):
        found = (
            f'{len(cotangents)} cotangents'
            if isinstance(cotangents, list | tuple)
            else f'a {type(cotangents).__name__}'
        )
        raise RuleContractError(
            f'the reverse rule of {name!r} returned {found}; expected a list of {len(values)}, one '
            'for each input.'
        )
    for i, (c, x, wanted) in enumerate(zip(cotangents, values, required, strict=True)):
        if wanted and c is None:
            raise RuleContractError(
                f'the reverse rule of {name!r} returned None for input {i}, whose cotangent is '
                'required.'
            )
        if wanted and jnp.shape(c) != jnp.shape(x):
            raise RuleContractError(
                f'the reverse rule of {name!r} returned shape {jnp.shape(c)} for input {i} of '
                f'shape {jnp.shape(x)}.'
            )
    return [
        _of_type(c, x) if wanted else None
        for c, x, wanted in zip(cotangents, values, required, strict=True)
    ]


def _of_type(cotangent, x):
    """Cast a cotangent to its input's dtype; under ``shard_map``, sum it over the shards that share
    the input.
    """
    shared = _jax.varying(cotangent) - _jax.varying(x)
    return (jax.lax.psum(cotangent, tuple(shared)) if shared else cotangent).astype(x.dtype)


def _check_like(name: str, outputs, expected) -> None:
    found, want = (
        [(a.shape, str(a.dtype)) for a in jax.tree.leaves(t)] for t in (outputs, expected)
    )
    if found != want:
        raise RuleContractError(
            f'the forward of the reverse rule of {name!r} returned {found}, its implementation '
            f'{want}.'
        )
