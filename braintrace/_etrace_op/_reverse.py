"""Reverse rules that users write; they replace the rule derived from an implementation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

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


def with_reverse(name: str, impl: Callable, reverse: Reverse) -> Callable:
    """``impl`` with another reverse rule."""

    def call(*operands, **params):
        run = functools.partial(impl, **params)

        # The two functions that ``jax.custom_vjp`` asks for. What goes from one to the other is a
        # function, the pull-back, and the arrays that it reads, which are its leaves.
        def forward(*primals):
            values = [p.value for p in primals]
            required = tuple(bool(p.perturbed) for p in primals)

            def cotangents(backward: Callable, values, outputs, grads) -> list:
                found = backward(values, outputs, grads, params, required)
                return _checked(name, found, values, required)

            if reverse.backward is not None:
                outputs, pull = run(*values), functools.partial(cotangents, reverse.backward)
                return outputs, Partial(pull, values, outputs)
            outputs, backward = reverse.forward(values, params)
            expected = jax.eval_shape(run, *values)
            got, want = (
                [(a.shape, str(a.dtype)) for a in jax.tree.leaves(t)] for t in (outputs, expected)
            )
            if got != want:
                raise RuleContractError(
                    f'the forward of the reverse rule of {name!r} returned {got}, its '
                    f'implementation {want}.'
                )
            # The function ``backward`` closes over arrays, which are no leaves: it is traced here,
            # and they become the constants of its jaxpr.
            traced, found = jax.make_jaxpr(
                lambda grads: cotangents(backward, values, outputs, grads), return_shape=True
            )(outputs)
            jaxpr, consts = _jax.closed_jaxpr(traced)

            def pull(consts, grads):
                leaves = _jax.evaluate(jaxpr, consts, jax.tree.leaves(grads))
                return jax.tree.unflatten(jax.tree.structure(found), leaves)

            return outputs, Partial(pull, consts)

        def backward(pull: Partial, grads):
            is_symbolic = lambda x: isinstance(x, jax.custom_derivatives.SymbolicZero)
            filled = lambda x: jnp.zeros(x.shape, x.dtype) if is_symbolic(x) else x
            return tuple(pull(jax.tree.map(filled, grads, is_leaf=is_symbolic)))

        ruled = jax.custom_vjp(run)
        ruled.defvjp(forward, backward, symbolic_zeros=True)
        return ruled(*operands)

    return call


def _checked(name: str, cotangents, values, required: tuple[bool, ...]) -> list:
    """The cotangents, each of its input's shape and dtype, None where none is wanted."""
    if not isinstance(cotangents, list | tuple) or len(cotangents) != len(values):
        found = f'a {type(cotangents).__name__}'
        if isinstance(cotangents, list | tuple):
            found = f'{len(cotangents)} cotangents'
        raise RuleContractError(
            f'the reverse rule of {name!r} returned {found}; expected a list of {len(values)}, one '
            'for each input.'
        )
    of_inputs: list = []
    for i, (c, x, wanted) in enumerate(zip(cotangents, values, required, strict=True)):
        if not wanted:
            of_inputs.append(None)
            continue
        if c is None:
            raise RuleContractError(
                f'the reverse rule of {name!r} returned None for input {i}, whose cotangent is '
                'required.'
            )
        if jnp.shape(c) != jnp.shape(x):
            raise RuleContractError(
                f'the reverse rule of {name!r} returned shape {jnp.shape(c)} for input {i} of '
                f'shape {jnp.shape(x)}.'
            )
        # under ``shard_map``, sum over the shards that share the input
        shared = _jax.varying(c) - _jax.varying(x)
        of_inputs.append((jax.lax.psum(c, tuple(shared)) if shared else c).astype(x.dtype))
    return of_inputs
