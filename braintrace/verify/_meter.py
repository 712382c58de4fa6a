"""A gradient meter: tangents along random directions, carried beside a network that learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import Penalised, functional
from .._signatures import does_not_fit, is_int
from ..errors import OptionError, StructureError
from ._forward import refused
from ._reading import Reading
from ._sequence import Leaves, is_float, one_step, scalar, split, split_floats


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeterState:
    """What a :class:`Meter` carries: arrays alone, so it goes through ``jit`` and into files.

    ``directions`` and their ``tangents`` have the axes (sets, directions) in front; of two sets the
    first is the elder, which is counted. ``age``: the steps that it is counted for; below zero it
    is none yet. ``sums``: the products that it saw, ``samples`` those of the lives that are over,
    ``number`` how many these are, ``ended`` the update in which each ended. ``carry``: the states
    at which the last update ended, ``updates`` their number; ``key`` draws the next directions.

    >>> import braintrace, jax, jax.numpy as jnp
    >>> cell = lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p['W']))
    >>> learner = braintrace.functional.online(cell)
    >>> meter = braintrace.verify.Meter(learner, lambda h, y: jnp.mean((h - y) ** 2))
    >>> metered = meter.init({'W': jnp.ones((2, 4))}, jnp.zeros((3, 4)), jax.random.key(0))
    >>> metered.directions[0].shape, metered.tangents[0].shape
    ((1, 4, 2, 4), (1, 4, 3, 4))
    """

    key: jax.Array
    directions: list
    tangents: list
    carry: list
    age: jax.Array
    sums: jax.Array
    samples: jax.Array
    ended: jax.Array
    number: jax.Array
    updates: jax.Array


@dataclass(frozen=True, eq=False)
class Meter:
    """How near the gradient of a learner is to the true one, measured while it learns.

    For a random direction v of parameters, with independent entries of mean 0 and variance 1, the
    tangent ``s = (df/dtheta) v + (df/dh) s'`` beside the hidden states gives ``<g, v>`` of the true
    gradient g: through every unit, layer and step since it began. With the learner's ``ghat``,
    ``E <g, v> <ghat, v> = <g, ghat>`` and ``E <g, v>^2 = |g|^2``. No step of the past is stored:
    the memory is that of ``directions x (parameters + states)``, twice that with ``memory``.

    Parameters
    ----------
    learner : OnlineLearner or ETraceLearner
        Whose gradients are measured; of the second its pure functions, ``learner.pure()``.
    loss_fn : function or tuple of functions
        ``loss(outputs, target)`` of one step, a real scalar, as the learner has it; several, as
        ``learner.heads`` has them: then the gradients are a tuple, and so are the readings.
    memory : int, optional
        None: each update starts again, as with sequences of their own, and the true gradient looks
        back to its first step. An int, for a stream, at least twice the steps of an update: every
        ``memory / 2`` steps a set of directions begins, which is counted as soon as the next one
        begins, so that the true gradient looks back over ``memory / 2`` to ``memory`` steps.
    directions : int
        Directions at once, by one ``vmap``.
    reduction : 'mean' or 'sum'
        As for the gradients that it is given.
    keep : int
        The number of last samples that readings are made of.

    Raises
    ------
    OptionError
        An option has another value.

    Notes
    -----
    Forward gradients: Baydin et al. (2022), "Gradients without backpropagation"; Silver et al.
    (2022), "Learning by directional gradient descent". Here they measure, and nothing learns by
    them.

    Examples
    --------
    >>> import braintrace, jax, jax.numpy as jnp
    >>> def cell(params, h, x):
    ...     h = jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['W']))
    ...     return h, h
    >>> learner = braintrace.functional.online(cell, braintrace.rules.rtrl())
    >>> params, h = {'W': jnp.ones((5, 3)) / 5}, jnp.zeros((1, 3))
    >>> loss = lambda out, y: jnp.mean((out - y) ** 2)
    >>> meter = braintrace.verify.Meter(learner, loss)
    >>> state, metered = learner.init(params, h, jnp.ones((1, 2))), meter.init(params, h)
    >>> gradient, update = jax.jit(learner.sequence_grad(loss)), jax.jit(meter.update)
    >>> for i in range(10):
    ...     xs = jax.random.normal(jax.random.key(i), (7, 1, 2))
    ...     grads = gradient(params, state, xs, xs[..., :1]).grads
    ...     metered = update(metered, params, h, xs, xs[..., :1], grads)
    >>> reading = meter.reading(metered)
    >>> print(reading.cosine)
    1.000 +- 0.000
    """

    learner: Any
    loss_fn: Callable | tuple[Callable, ...]
    memory: int | None = None
    directions: int = 4
    reduction: str = 'mean'
    keep: int = 4096

    def __post_init__(self):
        if hasattr(self.learner, 'pure'):
            object.__setattr__(self, 'learner', self.learner.pure()[0])
        if not isinstance(self.learner, functional.OnlineLearner):
            raise OptionError(
                f'learner is {self.learner!r}; give what `braintrace.functional.online` or '
                '`braintrace.compile` returned.'
            )
        losses = self._losses
        if not losses or any(not callable(f) or does_not_fit(f, 2) for f in losses):
            raise OptionError(
                f'loss_fn is {self.loss_fn!r}; give a function `loss(outputs, target)`, or a tuple '
                'of some.'
            )
        if self.memory is not None and not is_int(self.memory, 2):
            raise OptionError(
                f'memory is {self.memory!r}; give None, where each update starts again, or an int, '
                'at least 2: the steps that a direction lives.'
            )
        for name, least in (('directions', 1), ('keep', self.directions)):
            if not is_int(getattr(self, name), least):
                raise OptionError(f'{name} is {getattr(self, name)!r}; give an int >= {least}.')
        if self.reduction not in ('mean', 'sum'):
            raise OptionError(f"reduction is {self.reduction!r}; give 'mean' or 'sum'.")

    @property
    def _losses(self) -> tuple[Callable, ...]:
        return self.loss_fn if isinstance(self.loss_fn, tuple) else (self.loss_fn,)

    def _learned(self, params) -> Leaves:
        paths = list(functional.flatten_paths(params))
        return split(params, lambda i, p: is_float(p) and self.learner.trainable(paths[i], p))

    def init(self, params, carry, key: jax.Array | None = None) -> MeterState:
        """The state before the first update, for parameters and a carry like these (or an
        ``OnlineState``); ``key`` draws the directions, by default ``jax.random.key(0)``.
        """
        key, own = jax.random.split(jax.random.key(0) if key is None else key)
        weights, states = self._learned(params).values, split_floats(_carry_of(carry)).values
        several = (1 if self.memory is None else 2, self.directions)
        # a row is (aa, ab_p.., bb_p.., gg_p..): see `_reading.of_means`
        row = len(self._losses), 1 + 3 * len(weights)
        dtype = jnp.result_type(jnp.float32, *(jnp.real(p).dtype for p in weights))
        return MeterState(
            key=key,
            directions=_drawn(
                own, [jnp.zeros((*several, *jnp.shape(p)), p.dtype) for p in weights]
            ),
            tangents=[jnp.zeros((*several, *jnp.shape(h)), h.dtype) for h in states],
            carry=[jnp.full(jnp.shape(h), jnp.nan, h.dtype) for h in states],
            age=jnp.zeros((), int),
            sums=jnp.zeros((self.directions, *row), dtype),
            samples=jnp.zeros((self.keep, *row), dtype),
            ended=jnp.zeros(self.keep, int),
            number=jnp.zeros((), int),
            updates=jnp.zeros((), int),
        )

    def step(self, metered: MeterState, params, carry, inputs, targets, grads) -> MeterState:
        """:meth:`update` of one step, whose arrays have no time in front."""
        inputs, targets = jax.tree.map(lambda a: jnp.asarray(a)[None], (inputs, targets))
        return self.update(metered, params, carry, inputs, targets, grads)

    def update(
        self, metered: MeterState, params, carry, xs, ys, grads, mask=None, reset=None
    ) -> MeterState:
        """Take in the steps of one update, whose gradient by the rule is ``grads``.

        ``carry`` (or an ``OnlineState``) is before the first of these steps; ``xs``, ``ys``,
        ``mask`` and ``reset`` are as for :meth:`OnlineLearner.sequence_grad`. Where a sample is
        reset, its tangents are zero. With ``memory``, every update of the stream has to come: where
        the carry is not the one at which the last update ended, all directions start again.

        Raises
        ------
        StructureError
            The state, the carry or the gradients belong to another learner.
        OptionError
            ``memory`` is too short for the steps of an update.
        NotSupportedError
            The step or the loss has an op without forward mode; it says which.
        """
        carry, xs = _carry_of(carry), self.learner.taken(xs)
        length = jnp.shape(jax.tree.leaves(xs)[0])[0]
        half = 0 if self.memory is None else self.memory // 2
        if self.memory is not None and half < length:
            raise OptionError(
                f'memory is {self.memory} steps, and this update has {length}: give {2 * length} '
                'at least, or None, where each update starts again.'
            )
        found = self._gradients(metered, params, carry, grads)
        age, tangents = metered.age, metered.tangents
        if half:
            # A stream that goes on from elsewhere has no past: until its first set of directions
            # is the elder one, none is counted.
            pairs = zip(metered.carry, split_floats(carry).values, strict=True)
            same = jnp.array([_near(a, b) for a, b in pairs]).all()
            age = jnp.where(same, age, -half)
            tangents = [jnp.where(same, t, 0) for t in tangents]
        joined = lambda arrays: [a.reshape(-1, *a.shape[2:]) for a in arrays]  # noqa: E731
        a, tangents, end = self.along(
            params, carry, joined(metered.directions), joined(tangents), xs, ys, mask, reset
        )
        tangents = [t.reshape(old.shape) for t, old in zip(tangents, metered.tangents)]
        rows = _products(a[: self.directions], [d[0] for d in metered.directions], found)

        # Where the elder's life is over, its sums are samples, and the next set is the elder.
        counts, age, updates = age >= 0, age + length, metered.updates + 1
        over = age >= jnp.where(counts, half, 0)
        sums = jnp.where(counts, metered.sums + rows.astype(metered.sums.dtype), 0)
        at, done = (metered.number + jnp.arange(self.directions)) % self.keep, over & counts
        key, own = jax.random.split(metered.key)

        def moved_up() -> list:
            fresh = _drawn(own, [d[:1] for d in metered.directions])
            return [jnp.concatenate(p) for p in zip([d[1:] for d in metered.directions], fresh)]

        def put(old, new):
            return old.at[at].set(jnp.where(done, new, old[at]))

        return MeterState(
            key=key,
            directions=jax.lax.cond(over, moved_up, lambda: metered.directions),
            tangents=[
                jnp.where(over, jnp.concatenate([t[1:], jnp.zeros_like(t[:1])]), t)
                for t in tangents
            ],
            carry=split_floats(end).values,
            age=jnp.where(over, 0, age),
            sums=jnp.where(over, 0, sums),
            samples=put(metered.samples, sums),
            ended=put(metered.ended, updates),
            number=metered.number + done * self.directions,
            updates=updates,
        )

    def _gradients(self, metered: MeterState, params, carry, grads) -> list[list]:
        """The learned leaves of the gradient by each loss, if all fit the state."""
        grads = grads if isinstance(self.loss_fn, tuple) else (grads,)
        if not isinstance(grads, tuple) or len(grads) != len(self._losses):
            raise StructureError(
                f'grads are {type(grads).__name__}; give a tuple of one for each loss.'
            )
        weights, trees = self._learned(params), [jax.tree.leaves(each) for each in grads]
        found = [[leaves[i] for i in weights.places if i < len(leaves)] for leaves in trees]
        directions, states = metered.directions, split_floats(carry).values
        parts = [('params', weights.values, directions), ('carry', states, metered.tangents)]
        for what, leaves, own in [*parts, *(('grads', each, directions) for each in found)]:
            shapes, began = [jnp.shape(a) for a in leaves], [a.shape[2:] for a in own]
            if shapes != began:
                raise StructureError(
                    f'{what} have the shapes {shapes}, and this meter began with {began}: they '
                    'are those of another learner. Make a state with `meter.init(params, carry)`, '
                    'and give the gradient that the learner returned.'
                )
        return found

    def along(
        self, params, carry, directions: list, tangents: list, xs, ys, mask=None, reset=None
    ) -> tuple[jax.Array, list, Any]:
        """``<g, v>`` of each direction and loss, and tangents and carry at the end; directions and
        tangents are lists with the directions in front.
        """
        weights, length = self._learned(params), jnp.shape(jax.tree.leaves(xs)[0])[0]
        dtype = jnp.result_type(jnp.float32, *(jnp.real(p).dtype for p in weights.values))
        mask = jnp.ones(length, dtype) if mask is None else jnp.asarray(mask, dtype)
        penalty = 1.0
        if self.reduction == 'mean':
            total = mask.sum()
            mask, penalty = mask / jnp.where(total == 0, 1, total), 1 / length
        flags, carry0 = (None, None) if reset is None else reset

        def step(now, at):
            carry, tangents, sums = now
            x, y, weight, flag = at
            states = split_floats(carry)

            def run(values: list, states_: list):
                p, h = weights.rebuild(values), states.rebuild(states_)
                if flag is not None:
                    state = self.learner.init(p, h, *x)
                    h = functional.reset(state, flag, carry0, self.learner.hidden).carry
                outputs, new = one_step(self.learner.cell, p, h, x)
                losses = [_weighed(f(outputs, y), weight, penalty) for f in self._losses]
                return (jnp.stack(losses).astype(dtype), split_floats(new).values), new

            def push(v: list, s: list):
                _, pushed, new = jax.jvp(run, (weights.values, states.values), (v, s), has_aux=True)
                return *pushed, new

            try:
                losses, tangents, new = jax.vmap(push)(directions, tangents)
            except (TypeError, ValueError, NotImplementedError) as error:
                raise refused(run, (weights.values, states.values), error) from error
            # no value depends on a direction
            return (jax.tree.map(lambda a: a[0], new), tangents, sums + losses), None

        sums = jnp.zeros((len(directions[0]), len(self._losses)), dtype)
        at = (xs, ys, mask, flags)
        (end, tangents, sums), _ = jax.lax.scan(step, (carry, tangents, sums), at)
        return sums, tangents, end

    def sequence_update(self, optimizer, update_every: int = 1) -> Callable:
        """``(params, opt_state, state, metered, xs, ys, mask=None, reset=None) -> Trained,
        MeterState``: :meth:`OnlineLearner.sequence_update`, and every update metered.

        >>> import braintrace, jax, jax.numpy as jnp, optax
        >>> cell = lambda p, h, x: (h, 0.5 * h + braintrace.matmul(x, p['W']))
        >>> learner = braintrace.functional.online(cell)
        >>> loss = lambda h, y: jnp.mean((h - y) ** 2)
        >>> meter = braintrace.verify.Meter(learner, loss, memory=60)
        >>> params, h, xs = {'W': jnp.ones((2, 4))}, jnp.zeros((3, 4)), jnp.ones((900, 3, 2))
        >>> train, optimizer = jax.jit(meter.sequence_update(optax.sgd(1e-3), 2)), optax.sgd(1e-3)
        >>> state, metered = learner.init(params, h, xs[0]), meter.init(params, h)
        >>> trained, metered = train(
        ...     params, optimizer.init(params), state, metered, xs, jnp.zeros((900, 3, 4))
        ... )
        >>> print(meter.reading(metered).cosine)
        1.000 +- 0.000
        """
        if isinstance(self.loss_fn, tuple):
            raise OptionError('loss_fn is a tuple; sequence_update learns by one loss.')
        of_grads = lambda grads, state: grads  # noqa: E731
        learn = self.learner.sequence_update(
            self.loss_fn, optimizer, update_every, self.reduction, observe=of_grads
        )

        def run(params, opt_state, state, metered, xs, ys, mask=None, reset=None):
            flags, carry0 = (None, None) if reset is None else reset
            length = jnp.shape(jax.tree.leaves(xs)[0])[0]
            data = (xs, ys, mask if mask is None else jnp.asarray(mask), flags)

            def one(now, at):
                params, opt_state, state, metered = now
                xs, ys, mask, flags = at
                again = None if flags is None else (flags, carry0)
                found = learn(params, opt_state, state, xs, ys, mask, again)
                grads = jax.tree.map(lambda g: g[0], found.observed)
                metered = self.update(metered, params, state, xs, ys, grads, mask, again)
                return (found.params, found.opt_state, found.state, metered), found.losses

            whole = length // update_every
            blocks = jax.tree.map(
                lambda a: a[: whole * update_every].reshape(whole, update_every, *a.shape[1:]), data
            )
            now, losses = jax.lax.scan(one, (params, opt_state, state, metered), blocks)
            losses = losses.reshape(-1)
            if length % update_every:
                now, last = one(now, jax.tree.map(lambda a: a[whole * update_every :], data))
                losses = jnp.concatenate([losses, last])
            params, opt_state, state, metered = now
            return functional.Trained(params, losses, None, state, opt_state), metered

        return run

    def reading(self, metered: MeterState, params=None) -> Reading | tuple[Reading, ...]:
        """The :class:`Reading` of the last ``keep`` samples, for several losses a tuple of them.
        ``params``, of which shapes count alone, give parameters their names.
        """
        number, count = int(metered.number), len(metered.directions)
        order = np.arange(max(0, number - self.keep), number) % self.keep
        samples, ended = np.asarray(metered.samples)[order], np.asarray(metered.ended)[order]
        paths = [str(i) for i in range(count)]
        if params is not None:
            every = list(functional.flatten_paths(params))
            paths = ['/'.join(map(str, every[i])) for i in self._learned(params).places]
        if len(paths) != count:
            raise StructureError(
                f'params have {len(paths)} learned leaves, and this meter has {count}: it is that '
                'of another learner.'
            )
        back = 'the steps of an update'
        if self.memory is not None:
            back = f'{self.memory // 2} to {self.memory} steps'
        of_loss = [samples[:, i] for i in range(len(self._losses))]
        found = tuple(Reading.of(str(self.learner.rule), back, paths, s, ended) for s in of_loss)
        return found if isinstance(self.loss_fn, tuple) else found[0]


def _products(a: jax.Array, directions: list, grads: list[list]) -> jax.Array:
    """The row ``(aa, ab_p.., bb_p.., gg_p..)`` of each direction and loss, of ``a = <g, v>``."""
    of_weights, squares = [], []
    for v, *each in zip(directions, *grads, strict=True):
        v, g = (x.reshape(len(x), -1) for x in (v, jnp.stack(each)))
        # JAX's gradient by a complex number is the conjugate's: no conjugate here
        of_weights.append(jnp.matmul(v, g.T, precision='highest').real)
        squares.append((jnp.abs(g) ** 2).sum(-1))
    b, a = jnp.stack(of_weights, -1), a[..., None]
    gg = jnp.broadcast_to(jnp.stack(squares, -1), b.shape)
    return jnp.concatenate([a**2, a * b, b.sum(-1, keepdims=True) * b, gg], -1)


def _weighed(value, weight, penalty):
    """A step's part of the loss; a penalty is not masked."""
    if isinstance(value, Penalised):
        return _weighed(value.loss, weight, penalty) + penalty * scalar(value.penalty)
    return jnp.where(weight == 0, 0, weight * scalar(value))


def _drawn(key, like: list) -> list:
    """Entries of +1 or -1, for complex numbers in both parts: mean 0 and variance 1."""

    def signs(key, a):
        if jnp.iscomplexobj(a):
            return jax.lax.complex(*(signs(k, a.real) for k in jax.random.split(key)))
        return jax.random.rademacher(key, a.shape, a.dtype)

    return [signs(k, a) for k, a in zip(jax.random.split(key, len(like)), like)]


def _near(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether all is the same but for rounding, which differs from program to program."""
    return jnp.all(jnp.abs(a - b) <= jnp.finfo(a.dtype).eps ** 0.5 * (1 + jnp.abs(b)))


def _carry_of(carry):
    return carry.carry if isinstance(carry, functional.OnlineState) else carry
