"""Exact windows with a synthetic gradient at their ends: the credit of later windows, learnt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._rules import Rule
from .._windows import Gradients, Sequence
from ..errors import OptionError, StructureError


class Borders(NamedTuple):
    """For each step whether one comes before it and after it in its call, and the reset flags of
    the next one.
    """

    before: jax.Array
    after: jax.Array
    flags: jax.Array | None


def bootstrapped(observed, apply: Callable, sequence: Sequence) -> tuple[Any, Sequence]:
    """A step under observation whose weights are pairs, with the parameters of ``apply(params,
    states) -> credit``, and the sequence for it.
    """
    if sequence.penalties is not None:
        raise OptionError(
            'the loss is Penalised, and a mask is given beside a synthesizer, whose credit is '
            'that of one sum of losses. Leave the mask out: return one loss, weighed by a '
            'sequence of your own.'
        )
    at, flags = jnp.arange(len(sequence.mask)), sequence.flags
    later = None if flags is None else jnp.roll(flags, -1, 0)
    borders = Borders(at > 0, at < len(sequence.mask) - 1, later)
    return Bootstrapped(observed, apply), sequence._replace(slices=(sequence.slices, borders))


@dataclass(frozen=True)
class Bootstrapped:
    """An observer of exact windows with the loss ``sum(stop(s(h_K)) h_K)`` at the end of each.

    Where a window follows, ``s`` stands for what its losses owe to ``h_K``; ``lam`` of that window
    is the target of ``s(h_K)``, half of the squared error its loss. Lanes that are reset between
    the two have neither.
    """

    step: Any
    apply: Callable

    @property
    def graph(self):
        return self.step.graph

    @property
    def rule(self):
        return self.step.rule

    def network(self, weights):
        return self.step.network(weights[0])

    def observe(self, weights, world, at: Sequence, carried=None):
        part = at._replace(slices=at.slices[0])
        return self.step.observe(weights[0], world, part, carried)

    def observe_together(self, weights, world, part: Sequence, keep: bool, carried):
        (weights, synthetic), (slices, borders) = weights, part.slices

        def credit(end):
            flags = None if borders.flags is None else borders.flags[-1]
            h = self._states(end, flags)
            s = self._credit(synthetic, jax.lax.stop_gradient(self._states(end)))
            owed = jax.tree.map(lambda s, h: (jax.lax.stop_gradient(s) * h).real.sum(), s, h)
            return jnp.where(borders.after[-1], sum(jax.tree.leaves(owed)), 0)

        inner = part._replace(slices=slices)
        seen = self.step.observe_together(weights, world, inner, keep, carried, credit)
        target = {name: jnp.stack(lam, -1) for name, lam in seen.lam.items()}

        def error(synthetic):
            off = jax.tree.map(jnp.subtract, self._credit(synthetic, self._states(world)), target)
            if part.flags is not None:
                off = self._unreset(world, part.flags[0], off)
            squares = sum((x * x.conj()).real.sum() for x in jax.tree.leaves(off))
            return jnp.where(borders.before[0], 0.5 * squares, 0)

        return seen._replace(direct=(seen.direct, jax.grad(error)(synthetic)))

    def _states(self, world, flags=None) -> dict[str, jax.Array]:
        world = world if flags is None else self.step.reset(world, flags)
        return self.step.states(world)

    def _unreset(self, world, flags, tree):
        """A tree like the states, zero in the lanes that are reset."""
        states = self._states(world)
        _, kept = jax.jvp(
            lambda h: self._states(self.step.with_states(world, h), flags), (states,), (tree,)
        )
        return kept

    def _credit(self, synthetic, states) -> dict[str, jax.Array]:
        """``apply``, held to return a tree like the states."""
        found = self.apply(synthetic, states)
        shapes = jax.tree.map(jnp.shape, (found, states), is_leaf=lambda x: hasattr(x, 'shape'))
        if shapes[0] != shapes[1]:
            raise StructureError(
                f'the synthesizer returned {shapes[0]}; give one credit for each state, a dict '
                f'group -> array: {shapes[1]}.'
            )
        return jax.tree.map(lambda s, h: jnp.asarray(s, h.dtype), found, states)

    def zeros(self, weights) -> Gradients:
        ops, direct = self.step.zeros(weights[0])
        return Gradients(ops, (direct, jax.tree.map(jnp.zeros_like, weights[1])))

    def reset(self, world, flags):
        return self.step.reset(world, flags)

    def total(self, weights, gradients: Gradients):
        ops, (direct, synthetic) = gradients
        return self.step.total(weights[0], Gradients(ops, direct)), synthetic

    def moves(self, weights):
        return self.step.moves(weights[0]), jax.tree.map(lambda _: True, weights[1])


def check_synthesizer(synthesizer, exact: bool, rule: Rule | None) -> None:
    """Refuse a synthetic gradient without windows to end, or beside a trace."""
    if synthesizer is None:
        return
    if not callable(synthesizer):
        raise OptionError(
            f'synthesizer is {synthesizer!r}; give a function `(params, states) -> credit`.'
        )
    if not exact:
        raise OptionError(
            "a synthesizer is given with inside='trace': it stands for the losses after an exact "
            "window. Give inside='exact' and a window."
        )
    if rule is not None and rule.traces:
        raise OptionError(
            f'a synthesizer is given beside the trace of {rule!r}: the same influence would count '
            'twice, from the past by the trace and to the future by the synthetic gradient. Make '
            'the learner with rules.same_step().'
        )


def split_weights(params, synthesizer) -> tuple:
    """``params`` and those of the synthesizer; the second is None where there is none."""
    if synthesizer is None:
        return params, None
    if not (isinstance(params, tuple) and len(params) == 2):
        raise StructureError(
            f'params is {type(params).__name__}; with a synthesizer it is the pair (params of the '
            'cell, params of the synthesizer).'
        )
    return params
