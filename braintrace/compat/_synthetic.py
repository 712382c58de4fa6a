"""Exact windows with a synthetic gradient at their ends: the credit of later windows, learnt.

All of it is in the step function. Where a window follows, its last step has the further loss
``sum(stop(s(h)) h)``; the first step of the next one reads its states through :func:`border`, whose
backward pass trains ``s`` to give the derivative that comes there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import brainstate
import jax
import jax.numpy as jnp

from .._compiler import DEFAULT, Policy
from .._learner import ETraceLearner
from .._windows import (
    Penalised,
    Trained,
    check_mask,
    check_optimizer,
    divisor,
    length_of,
    penalty_of,
    task_loss,
)
from ..errors import OptionError, StructureError
from ..rules import same_step
from ._arguments import takes_public_arguments

PATH = ('synthetic',)  # of the synthesizer's parameters among the weights of a call


class SyntheticGradient:
    """The synthetic gradient of decoupled neural interfaces: for each group of states a linear map
    ``s(h) = h @ w + b`` to the credit of ``h``, the derivative of later losses by it.

    ``group_shapes``: group -> shape ``(*shape, S)``, the states of a group in the last axis.
    ``scale``: standard deviation of the first ``w`` times the square root of its rows, by default
    zero, no credit; ``seed`` draws it. ``lanes``: whether axis 0 is the batch, whose samples the
    map does not mix; by default so where there are three axes or more. Raises
    :class:`braintrace.errors.OptionError` for shapes that are none.

    Source: Jaderberg et al. 2017, "Decoupled neural interfaces using synthetic gradients" (ICML,
    arXiv 1608.05343).

    >>> import jax.numpy as jnp
    >>> from braintrace import compat
    >>> synthetic = compat.SyntheticGradient({'h': (3, 4, 1)})
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def border(apply: Callable, params, states, counts):
    """The states. Backwards, where a state ``counts``, the parameters get the gradient of half the
    squared distance between ``apply(params, states)`` and what comes.
    """
    return states


def _forward(apply, params, states, counts):
    return states, (params, states, counts)


def _backward(apply, kept, credit):
    params, states, counts = kept
    guess, pull = jax.vjp(lambda params: apply(params, states), params)
    off = jax.tree.map(lambda s, c, n: jnp.where(n, s - c, 0), guess, credit, counts)
    return *pull(off), credit, None


border.defvjp(_forward, _backward)


class Place(NamedTuple):
    """Of each step whether a window came before it and whether one follows, the lanes that are
    reset before it and after it (None: none is), and the weight of its credit.
    """

    begins: jax.Array
    ends: jax.Array
    reset: jax.Array | None
    reset_next: jax.Array | None
    weight: jax.Array


class DNI(ETraceLearner):
    """Online learning by reverse mode in windows, with a synthetic gradient for what comes later:
    decoupled neural interfaces in time.

    At the end of each window but the last one of a call the loss ``sum(s(h_K) h_K)`` stands for the
    losses of later windows, with ``s(h_K)`` constant; ``s`` learns the derivative that the next
    window sends to its first states, in :meth:`~braintrace.ETraceLearner.etrace_train` together
    with the weights, by the same optimizer, or alone by
    :func:`braintrace.compat.train_synthetic_gradient`. Give ``inside='exact'`` and to
    :meth:`~braintrace.ETraceLearner.etrace_grad` a window. With the true credit it is
    back-propagation through time, with none the truncated one; nothing is kept between calls.

    ``synthesizer``: a :class:`braintrace.compat.SyntheticGradient` or None for a linear one that
    starts at zero; its parameters are ``learner.synthetic.value``. Other arguments as for
    :class:`braintrace.D_RTRL`. Raises :class:`braintrace.errors.OptionError` for another value of
    ``synthesizer``.

    Source: Jaderberg et al. 2017, "Decoupled neural interfaces using synthetic gradients" (ICML,
    arXiv 1608.05343).

    >>> import braintrace, jax.numpy as jnp
    >>> from braintrace import compat
    >>> x, model = jnp.ones((3, 2)), braintrace.nn.GRUCell(2, 4)
    >>> learner = compat.compile(model, 'dni', x, batch_size=3)
    >>> def step_fn(x):
    ...     return jnp.mean(learner(x) ** 2)
    >>> xs = jnp.ones((6, 3, 2))
    >>> len(learner.etrace_grad(xs, step_fn=step_fn, window=2, inside='exact'))
    3
    """

    def __init__(
        self,
        model: brainstate.nn.Module,
        synthesizer: SyntheticGradient | None = None,
        *,
        policy: Policy = DEFAULT,
        mark: str | Callable | None = None,
    ):
        super().__init__(model, same_step(), policy=policy, mark=mark)
        self.synthesizer = _checked(synthesizer)
        # one for each step function, since a new one compiles again
        self._with_credit = functools.lru_cache(maxsize=16)(_with_credit)

    def compile_graph(self, *inputs):
        """As of every learner; the synthesizer starts with its first parameters."""
        graph = super().compile_graph(*inputs)
        self.attach_synthesizer(self.synthesizer)
        return graph

    def group_signal_shapes(self) -> dict[str, tuple[int, ...]]:
        """Group -> shape of its states, ``(*shape, S)``, as a synthesizer sees them."""
        return {g.name: (*g.shape, g.num_state) for g in self.graph.hidden_groups}

    def attach_synthesizer(self, synthesizer: SyntheticGradient | None) -> None:
        """Take another synthesizer, with its first parameters."""
        synthesizer = _checked(synthesizer)
        if self._own() is not None:
            shapes, model = self.group_signal_shapes(), synthesizer
            if model is None:
                model = SyntheticGradient(shapes, lanes=self.graph.lanes is not None)
            elif model.group_shapes != shapes:
                raise StructureError(
                    f'the synthesizer is for groups {model.group_shapes}, and the model has '
                    f'{shapes}. Make it with `learner.group_signal_shapes()`.'
                )
            self._apply = model.apply
            self.synthetic = brainstate.ParamState(model.param_values())
            self._with_credit.cache_clear()
        self.synthesizer = synthesizer

    def _saved(self):
        return {**super()._saved(), PATH: self.synthetic}

    def etrace_grad(self, *sequences, step_fn, window='auto', reduction='mean', **options):
        """As of every learner, in exact windows; the gradient of the synthesizer goes to its own
        training.
        """
        found, _ = self._gradients(sequences, step_fn, window, reduction, options)
        return found

    def _gradients(self, sequences: tuple, step_fn, window, reduction: Any, options: dict):
        """What ``etrace_grad`` returns, and the gradient of the synthesizer."""
        places = self._places(sequences, window, reduction, None, options)
        weights = options.pop('weights', None) or self.param_states
        found = super().etrace_grad(
            places,
            *sequences,
            step_fn=self._with_credit(self._compiled(), step_fn, options.get('has_aux', False)),
            window=window,
            reduction=reduction,
            weights={**weights, PATH: self.synthetic},
            **options,
        )
        grads = dict(found.grads)
        of_synthetic = grads.pop(PATH)
        return found._replace(grads=grads), of_synthetic

    def etrace_train(
        self, *sequences, step_fn, update_every=1, reduction='mean', weights=None, **options
    ) -> Trained:
        """As of every learner, in exact windows; the optimizer moves the synthesizer too."""
        places = self._places(sequences, update_every, reduction, update_every, options)
        return super().etrace_train(
            places,
            *sequences,
            step_fn=self._with_credit(self._compiled(), step_fn, options.get('has_aux', False)),
            update_every=update_every,
            reduction=reduction,
            weights={**(weights or self.param_states), PATH: self.synthetic},
            **options,
        )

    def _places(self, sequences, window, reduction: str, divided_by, options: dict) -> Place:
        """The place of each step in the windows of a call, whose gradient is divided by the mask of
        so many steps; None: of all.
        """
        if options.get('inside') != 'exact':
            raise OptionError(
                'a synthetic gradient stands for the losses after an exact window. Give '
                "inside='exact' and a window."
            )
        length = length_of(*sequences)
        size = window if isinstance(window, int) and 0 < window < length else length
        t, reset, weight = jnp.arange(length), options.get('reset'), jnp.ones(length)
        if options.get('mask') is not None and reduction == 'mean':
            # as a penalty it would count for each step, and the losses by their mask
            mask, size_of = check_mask(options['mask'], length), divided_by or length
            parts = [mask[k : k + size_of] for k in range(0, length, size_of)]
            weight = jnp.concatenate([jnp.full(len(p), len(p) / divisor(p)) for p in parts])
        later = None if reset is None else jnp.roll(jnp.asarray(reset), -1, 0)
        ends = ((t + 1) % size == 0) & (t < length - 1)
        return Place((t % size == 0) & (t > 0), ends, reset, later, weight)

    def _credit(self, params, states) -> dict[str, jax.Array]:
        found = self._apply(params, states)
        return jax.tree.map(lambda s, h: jnp.asarray(s, h.dtype), found, states)

    def _carry(self) -> tuple:
        """The executor of the step, the world, and the leaves of the carry there."""
        bound = self._compiled()
        return bound.core.first, bound.states.now(), bound.states.values()[1]

    def _states(self) -> dict[str, jax.Array]:
        """The hidden states of each group as they are now, ``(*shape, S)``."""
        compiled, _, carry = self._carry()
        states = compiled.executor.old_states(jax.tree.leaves(carry))
        of_state = dict(zip(self.graph.states, states, strict=True))
        groups = self.graph.hidden_groups
        return {g.name: jnp.stack([of_state[s] for s in g.states], -1) for g in groups}

    def _put(self, states: dict[str, jax.Array]) -> None:
        """The inverse; what is derived of these states follows them."""
        compiled, world, carry = self._carry()
        groups, (leaves, tree) = self.graph.hidden_groups, jax.tree.flatten(carry)
        of_state = {s: states[g.name][..., i] for g in groups for i, s in enumerate(g.states)}
        new = compiled.executor.with_states(leaves, [of_state[s] for s in self.graph.states])
        world.write(jax.tree.unflatten(tree, new))

    def _counts(self, states, where, reset) -> dict[str, jax.Array]:
        """Where states are at a border and are not reset there, as bool of their shapes."""
        found = {}
        for group in self.graph.hidden_groups:
            h, counts = states[group.name], where
            if reset is not None:
                axis = self.graph.batch_axes.get(group.states[0], 0)
                kept = ~reset.reshape(reset.shape + (1,) * (reset.ndim * (h.ndim - axis - 1)))
                counts = where & kept
            found[group.name] = jnp.broadcast_to(counts, h.shape)
        return found


def _with_credit(bound, step_fn: Callable, has_aux: bool) -> Callable:
    """The step function of a learner, with the credit of the states behind it as a penalty."""
    learner = bound.owner

    def step(place: Place, *slices):
        h = learner._states()
        counts = learner._counts(h, place.begins, place.reset)
        learner._put(border(learner._credit, learner.synthetic.value, h, counts))
        loss, aux = step_fn(*slices) if has_aux else (step_fn(*slices), None)
        h = learner._states()
        s = learner._credit(*jax.lax.stop_gradient((learner.synthetic.value, h)))
        counts = learner._counts(h, place.ends, place.reset_next)
        owed = jax.tree.map(lambda s, h, n: jnp.where(n, s * h, 0).real.sum(), s, h, counts)
        penalty = place.weight * sum(jax.tree.leaves(owed))
        if (own := penalty_of(loss)) is not None:
            penalty += own
        loss = Penalised(task_loss(loss), penalty)
        return (loss, aux) if has_aux else loss

    return step


def _checked(synthesizer):
    if synthesizer is not None and not isinstance(synthesizer, SyntheticGradient):
        raise OptionError(
            f'synthesizer is {synthesizer!r}; give a braintrace.compat.SyntheticGradient or None.'
        )
    return synthesizer


@takes_public_arguments
def train_synthetic_gradient(
    learner: DNI,
    *sequences,
    step_fn: Callable,
    window: int = 1,
    optimizer=None,
    lr: float = 0.01,
    epochs: int = 1,
    reset: bool = True,
) -> list[float]:
    """Train the synthesizer of a :class:`braintrace.compat.DNI` on a sequence, weights constant;
    the norms of its gradients.

    ``sequences`` and ``step_fn`` as for ``learner.etrace_grad``. Each of the ``epochs`` is one
    update by the ``optimizer`` (an ``optax.GradientTransformation``, by default plain descent with
    the rate ``lr``) over the whole sequence in exact windows, after a reset, where ``reset``.
    Raises :class:`braintrace.errors.OptionError` for a ``window`` that no other one follows, and
    :class:`braintrace.errors.StructureError` for sequences of different lengths.

    >>> import braintrace, jax.numpy as jnp
    >>> from braintrace import compat
    >>> x, model = jnp.ones((3, 2)), braintrace.nn.GRUCell(2, 4)
    >>> learner = compat.compile(model, 'dni', x, batch_size=3, seed=0)
    >>> def step_fn(x):
    ...     return jnp.sum(learner(x) ** 2)
    >>> xs = jnp.ones((6, 3, 2))
    >>> norms = compat.train_synthetic_gradient(learner, xs, step_fn=step_fn, epochs=20)
    >>> norms[-1] < norms[0]
    True
    """
    if not isinstance(learner, DNI):
        raise OptionError(f'learner is {type(learner).__name__}; give a braintrace.compat.DNI.')
    if optimizer is not None:
        check_optimizer(optimizer)
    if window is None or window >= length_of(*sequences):
        raise OptionError(
            f'window is {window}, the whole sequence: the synthesizer learns where one window '
            'follows another. Give an int below the number of steps.'
        )
    moments = None if optimizer is None else optimizer.init(learner.synthetic.value)
    options, norms = {'inside': 'exact', 'keep_trace': False}, []
    for _ in range(epochs):
        if reset:
            learner.reset_state()
        _, grads = learner._gradients(sequences, step_fn, window, 'mean', dict(options))
        updates = jax.tree.map(lambda g: -lr * g, grads)
        if optimizer is not None:
            updates, moments = optimizer.update(grads, moments, learner.synthetic.value)
        learner.synthetic.value = jax.tree.map(jnp.add, learner.synthetic.value, updates)
        norms.append(float(sum((g**2).sum() for g in jax.tree.leaves(grads)) ** 0.5))
    return norms
