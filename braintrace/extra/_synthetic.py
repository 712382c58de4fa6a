"""Exact windows with a synthetic gradient at their ends: the credit of later windows, learnt."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from .._compiler import ETraceGraph
from .._windows import AS_IT_IS, Around, Bordered, Gradients, Moment, Sequence
from ..errors import OptionError, StructureError


class SyntheticGradient:
    """The synthetic gradient of decoupled neural interfaces: for each group of states a linear map
    ``s(h) = h @ w + b`` to the credit of ``h``, the derivative of later losses by it.

    ``group_shapes``: group -> shape ``(*shape, S)``, the states of a group in the last axis.
    ``scale``: standard deviation of the first ``w`` times the square root of its rows, by default
    zero, no credit; ``seed`` draws it. ``lanes``: whether axis 0 is the batch, whose samples the
    map does not mix; by default so where there are three axes or more. Its ``apply`` is a
    ``synthesizer`` of ``sequence_grad`` and ``sequence_update``. Raises
    :class:`braintrace.errors.OptionError` for shapes that are none.

    Source: Jaderberg et al. 2017, "Decoupled neural interfaces using synthetic gradients" (ICML,
    arXiv 1608.05343).

    >>> import braintrace, jax.numpy as jnp
    >>> synthetic = braintrace.SyntheticGradient({'h': (3, 4, 1)})
    >>> params = synthetic.param_values()
    >>> params['h']['w'].shape, synthetic.apply(params, {'h': jnp.ones((3, 4, 1))})['h'].shape
    ((4, 4), (3, 4, 1))
    """

    def __init__(
        self,
        group_shapes: Mapping[Any, tuple[int, ...]],
        *,
        scale: float = 0.0,
        seed: int = 0,
        lanes: bool | None = None,
    ):
        for name, shape in group_shapes.items():
            if not (isinstance(shape, tuple) and shape and all(isinstance(n, int) for n in shape)):
                raise OptionError(
                    f'the shape of group {name!r} is {shape!r}; give a tuple of ints, the states '
                    'in the last axis, as `learner.group_signal_shapes()` does.'
                )
        self.group_shapes = dict(group_shapes)
        self.scale, self.seed, self.lanes = scale, seed, lanes

    def _rows(self, shape: tuple[int, ...]) -> int:
        lanes = len(shape) > 2 if self.lanes is None else self.lanes
        return math.prod(shape[1:] if lanes else shape)

    def param_values(self) -> dict[Any, dict[str, jax.Array]]:
        """The first parameters: group -> ``w`` and ``b``."""
        keys = jax.random.split(jax.random.key(self.seed), max(len(self.group_shapes), 1))
        params = {}
        for key, (name, shape) in zip(keys, self.group_shapes.items(), strict=False):
            n = self._rows(shape)
            w = jnp.zeros((n, n))
            if self.scale:
                w = self.scale / math.sqrt(n) * jax.random.normal(key, (n, n))
            params[name] = {'w': w, 'b': jnp.zeros(n)}
        return params

    def apply(self, params, states) -> dict[Any, jax.Array]:
        """The credit of each group of states, arrays of the same shapes."""

        def of(p, h):
            return (h.reshape(-1, p['b'].shape[0]) @ p['w'] + p['b']).reshape(h.shape)

        return {name: of(params[name], h) for name, h in states.items()}


def signal_shapes(graph: ETraceGraph) -> dict[str, tuple[int, ...]]:
    """Group -> shape of its states, ``(*shape, S)``."""
    return {g.name: (*g.shape, g.num_state) for g in graph.hidden_groups}


class Borders(NamedTuple):
    """For each step whether one comes before it and after it in its call, and the reset flags of
    the next one.
    """

    before: jax.Array
    after: jax.Array
    flags: jax.Array | None


class Bootstrap(Around):
    """Windows end with the credit of ``apply(params, states)``, and weights are pairs with its
    parameters. A learner has a ``model`` of the credit in its place, by default a linear one that
    starts at zero, with a state for these parameters.
    """

    def __init__(self, apply: Callable | None = None, model: SyntheticGradient | None = None):
        self.apply, self.model = apply, model

    def states(self, graph, state):
        shapes, model = signal_shapes(graph), self.model
        if model is None:
            model = SyntheticGradient(shapes, lanes=graph.lanes is not None)
        elif model.group_shapes != shapes:
            raise StructureError(
                f'the synthesizer is for groups {model.group_shapes}, and the model has {shapes}. '
                'Make it with `learner.group_signal_shapes()`.'
            )
        self.apply, self.state = model.apply, state(model.param_values())
        self.state.apply = model.apply
        return {'synthetic': self.state}

    def own(self, weights):
        if not (isinstance(weights, tuple) and len(weights) == 2):
            raise StructureError(
                f'params is {type(weights).__name__}; with a synthesizer it is the pair (params of '
                'the cell, params of the synthesizer).'
            )
        return weights[0]

    def with_own(self, values):
        return values, self.state.value

    def kept(self, learnt):
        self.state.value = learnt[1]
        return learnt[0]

    def observed(self, step, sequence):
        if sequence.penalties is not None:
            raise OptionError(
                'the loss is Penalised, and a mask is given beside a synthesizer, whose credit is '
                'that of one sum of losses. Leave the mask out: return one loss, weighed by a '
                'sequence of your own.'
            )
        at, flags = jnp.arange(len(sequence.mask)), sequence.flags
        later = None if flags is None else jnp.roll(flags, -1, 0)
        borders = Borders(at > 0, at < len(sequence.mask) - 1, later)
        return Bootstrapped(step, self.apply), sequence._replace(slices=(sequence.slices, borders))

    def check(self, exact, rule, not_finite='keep'):
        if not callable(self.apply):
            raise OptionError(
                f'synthesizer is {self.apply!r}; give a function `(params, states) -> credit`.'
            )
        if not exact:
            raise OptionError(
                "a synthesizer is given with inside='trace': it stands for the losses after an "
                "exact window. Give inside='exact' and a window."
            )
        if rule is not None and rule.traces:
            raise OptionError(
                f'a synthesizer is given beside the trace of {rule!r}: the same influence would '
                'count twice, from the past by the trace and to the future by the synthetic '
                'gradient. Make the learner with rules.same_step().'
            )
        if not_finite != 'keep':
            raise OptionError(
                f'not_finite is {not_finite!r} beside a synthesizer, which learns from all lanes '
                "together. Give 'keep'."
            )


def around(synthesizer: Callable | None) -> Around:
    """What a call with this argument puts around its observer."""
    return AS_IT_IS if synthesizer is None else Bootstrap(synthesizer)


@dataclass(frozen=True)
class Bootstrapped:
    """An observer of exact windows with the loss ``sum(stop(s(h_K)) h_K)`` at the end of each.

    Where a window follows, ``s`` stands for what its losses owe to ``h_K``; ``lam`` of that window
    is the target of ``s(h_K)``, half of the squared error its loss. Lanes that are reset between
    the two have neither.
    """

    step: Bordered
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
        lam = cast(dict[str, tuple[jax.Array, ...]], seen.signals.c)  # none is left out
        target = {name: jnp.stack(of_group, -1) for name, of_group in lam.items()}

        def error(synthetic):
            off = jax.tree.map(jnp.subtract, self._credit(synthetic, self._states(world)), target)
            if part.flags is not None:
                off = self._unreset(world, part.flags[0], off)
            squares = sum((x * x.conj()).real.sum() for x in jax.tree.leaves(off))
            return jnp.where(borders.before[0], 0.5 * squares, 0)

        return seen._replace(direct=(seen.direct, jax.grad(error)(synthetic)))

    def _states(self, world, flags=None) -> dict[str, jax.Array]:
        """The hidden states of each group, ``(*shape, S)``."""
        world = world if flags is None else self.step.reset(world, flags)
        of_state = dict(zip(self.graph.states, self.step.hidden(world), strict=True))
        groups = self.graph.hidden_groups
        return {g.name: jnp.stack([of_state[s] for s in g.states], -1) for g in groups}

    def _unreset(self, world, flags, tree):
        """A tree like the states, zero in the lanes that are reset."""
        groups = self.graph.hidden_groups

        def reset(states):
            of_state = {s: states[g.name][..., i] for g in groups for i, s in enumerate(g.states)}
            hidden = [of_state[s] for s in self.graph.states]
            return self._states(self.step.with_hidden(world, hidden), flags)

        _, kept = jax.jvp(reset, (self._states(world),), (tree,))
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

    def spoiled(self, moment: Moment, pending: Any) -> jax.Array:
        return self.step.spoiled(moment, pending)

    def total(self, weights, gradients: Gradients):
        ops, (direct, synthetic) = gradients
        return self.step.total(weights[0], Gradients(ops, direct)), synthetic

    def moves(self, weights):
        return self.step.moves(weights[0]), jax.tree.map(lambda _: True, weights[1])
