"""A gradient meter: tangents along random directions, carried beside a network that learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import Penalised, functional
from .._signatures import does_not_fit, is_int
from ..errors import OptionError, StructureError
from ._forward import check_forward_mode
from ._reading import Reading
from ._sequence import Leaves, is_float, one_step, scalar, split_floats


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeterState:
    """What a :class:`Meter` carries: arrays alone, so it goes through ``jit`` and into files.

    ``directions`` and their ``tangents`` have the axes (sets, directions) in front, ``age`` is the
    number of steps that each set has lived, ``whole`` whether it is counted in the second half of
    this life, ``sums`` what it saw there; ``samples``, ``ended`` and ``number`` are lives that are
    over. ``carry`` are the states at which the last update ended, ``updates`` their number, and
    ``key`` draws the next directions.

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
    whole: jax.Array
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
        None: each update starts anew, as with sequences of their own, and the true gradient looks
        back to its first step. An int, for a stream: two staggered sets of directions live for so
        many steps, and are counted in the second half of it, so that the true gradient looks back
        over ``memory / 2`` to ``memory`` steps. At least twice the steps of an update.
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
        learner = self.learner
        if not isinstance(learner, functional.OnlineLearner):
            if not hasattr(learner, 'pure'):
                raise OptionError(
                    f'learner is {learner!r}; give what `braintrace.functional.online` or '
                    '`braintrace.compile` returned.'
                )
            object.__setattr__(self, 'learner', learner.pure()[0])
        for loss in self._losses:
            if not callable(loss) or does_not_fit(loss, 2):
                raise OptionError(f'loss_fn is {loss!r}; give a function `loss(outputs, target)`.')
        if not self._losses:
            raise OptionError('loss_fn is an empty tuple; give a loss at least.')
        if self.memory is not None and not is_int(self.memory, 2):
            raise OptionError(
                f'memory is {self.memory!r}; give None, where each update starts anew, or an int, '
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

    def _chosen(self, params) -> list[tuple[int, str, Any]]:
        """Place among all leaves, path and value of what is learned."""
        items = enumerate(functional.flatten_paths(params).items())
        return [
            (i, '/'.join(map(str, path)), leaf)
            for i, (path, leaf) in items
            if is_float(leaf) and self.learner.trainable(path, leaf)
        ]

    # a life of directions -------------------------------------------------------------------------

    def init(self, params, carry, key: jax.Array | None = None) -> MeterState:
        """The state before the first update, for parameters and a carry like these (or an
        ``OnlineState``); ``key`` draws the directions, by default ``jax.random.key(0)``.
        """
        carry = _carry_of(carry)
        chosen = [leaf for _, _, leaf in self._chosen(params)]
        floats = split_floats(carry).values
        sets, number, losses = 1 if self.memory is None else 2, self.directions, len(self._losses)
        several = (sets, number)
        columns = 4 + 3 * len(chosen)
        dtype = jnp.result_type(jnp.float32, *(jnp.real(p).dtype for p in chosen))
        return MeterState(
            key=jax.random.key(0) if key is None else key,
            directions=[jnp.zeros((*several, *jnp.shape(p)), p.dtype) for p in chosen],
            tangents=[jnp.zeros((*several, *jnp.shape(h)), h.dtype) for h in floats],
            carry=[jnp.full(jnp.shape(h), jnp.nan, h.dtype) for h in floats],
            age=jnp.zeros(sets, int),
            whole=jnp.zeros(sets, bool),
            sums=jnp.zeros((*several, losses, columns), dtype),
            samples=jnp.zeros((self.keep, losses, columns), dtype),
            ended=jnp.zeros(self.keep, int),
            number=jnp.zeros((), int),
            updates=jnp.zeros((), int),
        )

    def step(self, metered: MeterState, params, carry, inputs, targets, grads) -> MeterState:
        """:meth:`update` of one step, whose arrays have no time in front."""
        one = partial(jax.tree.map, lambda a: jnp.asarray(a)[None])
        return self.update(metered, params, carry, one(inputs), one(targets), grads)

    def update(
        self, metered: MeterState, params, carry, xs, ys, grads, mask=None, reset=None
    ) -> MeterState:
        """Take in the steps of one update, whose gradient by the rule is ``grads``.

        ``carry`` (or an ``OnlineState``) stands before the first of these steps; ``xs``, ``ys``,
        ``mask`` and ``reset`` are as for :meth:`OnlineLearner.sequence_grad`. Where a sample is
        reset, its tangents are zero. With ``memory``, every update of the stream has to come: where
        the carry is not the one at which the last update ended, all directions start anew.

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
        found = _gradients(grads, self._losses)
        places, _, chosen = zip(*self._chosen(params), strict=True)
        _check_fits(metered, chosen, split_floats(carry).values, found, places)
        length = jnp.shape(jax.tree.leaves(xs)[0])[0]
        if self.memory is not None and self.memory < 2 * length:
            raise OptionError(
                f'memory is {self.memory} steps, and this update has {length}: give {2 * length} '
                'at least, or None, where each update starts anew.'
            )
        metered = self._begin(metered, split_floats(carry).values)
        flat = jax.tree.map(_joined, (metered.directions, metered.tangents))
        of_losses, tangents, end = self.along(params, carry, flat[0], flat[1], xs, ys, mask, reset)
        a = of_losses.reshape(metered.sums.shape[:3])
        rows = jax.vmap(jax.vmap(partial(_row, places, found)))(a, metered.directions)
        counts = metered.whole & (metered.age >= (self.memory or 0) // 2)
        metered = replace(
            metered,
            tangents=[t.reshape(m.shape) for t, m in zip(tangents, metered.tangents)],
            carry=split_floats(end).values,
            age=metered.age + length,
            sums=metered.sums + jnp.where(_over(counts, rows), rows, 0).astype(metered.sums.dtype),
            updates=metered.updates + 1,
        )
        return self._end(metered)

    def _begin(self, metered: MeterState, carry: list) -> MeterState:
        """With new directions for the sets whose life is over; all where the stream is another."""
        whole = jnp.ones(len(metered.age), bool)
        old, age = metered.age >= (self.memory or 0), jnp.zeros_like(metered.age)
        if self.memory is not None:
            same = jnp.array([_near(a, b) for a, b in zip(metered.carry, carry)]).all()
            # the second set's first life begins in the middle, so half of it is not counted
            whole = jnp.where(same, whole, jnp.array([True, False]))
            age = jnp.where(same, age, jnp.array([0, self.memory // 2]))
            old |= ~same

        def renewed(key):
            keys = jax.random.split(key, len(metered.directions))
            drawn = [_signs(k, d) for k, d in zip(keys, metered.directions)]
            return [jnp.where(_over(old, d), new, d) for d, new in zip(metered.directions, drawn)]

        key, own = jax.random.split(metered.key)
        return replace(
            metered,
            key=key,
            directions=jax.lax.cond(old.any(), renewed, lambda _: metered.directions, own),
            tangents=[jnp.where(_over(old, t), 0, t) for t in metered.tangents],
            age=jnp.where(old, age, metered.age),
            whole=jnp.where(old, whole, metered.whole),
            sums=jnp.where(_over(old, metered.sums), 0, metered.sums),
        )

    def _end(self, metered: MeterState) -> MeterState:
        """The samples of sets whose life is over, kept."""
        samples, ended, number = metered.samples, metered.ended, metered.number
        for done, rows in zip(metered.whole & (metered.age >= (self.memory or 0)), metered.sums):
            at = (number + jnp.arange(self.directions)) % self.keep
            samples = jnp.where(done, samples.at[at].set(rows), samples)
            ended = jnp.where(done, ended.at[at].set(metered.updates), ended)
            number = number + done * self.directions
        return replace(metered, samples=samples, ended=ended, number=number)

    def along(
        self, params, carry, directions: list, tangents: list, xs, ys, mask=None, reset=None
    ) -> tuple[jax.Array, list, Any]:
        """``<g, v>`` of each direction and loss, and tangents and carry at the end; directions and
        tangents are lists with the directions in front.
        """
        values, chosen = split_floats(params), self._chosen(params)
        spread = {i: v for (i, *_), v in zip(chosen, directions, strict=True)}
        number = directions[0].shape[:1]
        full = [
            spread.get(i, jnp.zeros((*number, *jnp.shape(leaf)), leaf.dtype))
            for i, leaf in enumerate(jax.tree.leaves(params))
            if is_float(leaf)
        ]
        length = jnp.shape(jax.tree.leaves(xs)[0])[0]
        weights = jnp.ones(length) if mask is None else jnp.asarray(mask)
        penalty = 1.0
        if self.reduction == 'mean':
            total = weights.sum()
            weights, penalty = weights / jnp.where(total == 0, 1, total), 1 / length
        flags, carry0 = (None, None) if reset is None else reset

        def step(now, at):
            carry, tangents, sums = now
            x, y, weight, flag = at
            if flag is not None:
                carry, tangents = self._restarted(params, carry, carry0, tangents, flag, x)
            states = split_floats(carry)

            def run(params, states_):
                outputs, new = one_step(
                    self.learner.cell, values.rebuild(params), states.rebuild(states_), x
                )
                losses = jnp.stack([_weighed(f(outputs, y), weight, penalty) for f in self._losses])
                return losses, split_floats(new).values

            def push(v, s):
                return jax.jvp(run, (values.values, states.values), (v, s))[1]

            check_forward_mode(run, values.values, states.values)
            of_losses, tangents = jax.vmap(push)(full, tangents)
            new = one_step(self.learner.cell, params, carry, x)[1]
            return (new, tangents, sums + of_losses), None

        dtype = jnp.result_type(jnp.float32, *(jnp.real(v).dtype for v in values.values))
        sums = jnp.zeros((*number, len(self._losses)), dtype)
        at = (xs, ys, weights.astype(dtype), flags)
        (end, tangents, sums), _ = jax.lax.scan(step, (carry, tangents, sums), at)
        return sums, tangents, end

    def _restarted(self, params, carry, carry0, tangents: list, flag, x) -> tuple[Any, list]:
        """The carry with flagged samples from ``carry0``, and tangents that are zero there."""
        like = jax.eval_shape(self.learner.init, params, carry, *x)
        trace, t = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (like.trace, like.t))
        state = like.replace(carry=carry, trace=trace, t=t)
        put_back = partial(functional.reset, flags=flag, hidden=self.learner.hidden)
        floats: Leaves = split_floats(carry)
        zeros = floats.rebuild([jnp.zeros_like(v) for v in floats.values])

        def of_one(tangents):
            tangents = state.replace(carry=floats.rebuild(tangents))
            return split_floats(put_back(tangents, carry0=zeros).carry).values

        return put_back(state, carry0=carry0).carry, jax.vmap(of_one)(tangents)

    # along a sequence -----------------------------------------------------------------------------

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
        if len(self._losses) > 1:
            raise OptionError('this meter has several losses; sequence_update learns by one.')
        if not is_int(update_every, 1):
            raise OptionError(f'update_every is {update_every!r}; give an int >= 1.')
        learn = self.learner.sequence_update(
            self._losses[0],
            optimizer,
            update_every,
            reduction=self.reduction,
            observe=lambda grads, state: grads,
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
            trained = functional.Trained(params, losses, None, state, opt_state)
            return trained, metered

        return run

    # what it says ---------------------------------------------------------------------------------

    def reading(self, metered: MeterState, params=None) -> Reading | tuple[Reading, ...]:
        """The :class:`Reading` of the last ``keep`` samples, for several losses a tuple of them.
        ``params``, of which shapes count alone, give parameters their names.
        """
        number, keep = int(metered.number), len(metered.ended)
        order = np.arange(max(0, number - keep), number) % keep
        samples, ended = np.asarray(metered.samples)[order], np.asarray(metered.ended)[order]
        count = len(metered.directions)
        paths = (
            [str(i) for i in range(count)]
            if params is None
            else [path for _, path, _ in self._chosen(params)]
        )
        if len(paths) != count:
            raise StructureError(
                f'params have {len(paths)} learned leaves, and this meter has {count}: it is that '
                'of another learner.'
            )
        back = 'the steps of an update'
        if self.memory is not None:
            back = f'{self.memory // 2} to {self.memory} steps'
        rule = str(self.learner.rule)
        readings = [
            Reading.of(rule, back, paths, samples[:, i], ended) for i in range(len(self._losses))
        ]
        return tuple(readings) if isinstance(self.loss_fn, tuple) else readings[0]


def _row(places, found: list, a: jax.Array, direction: list) -> jax.Array:
    """The products of one direction, for each loss."""
    rows = []
    for value, grads in zip(a, found):
        # JAX's gradient by a complex number is the conjugate's: no conjugate here
        own = [grads[i] for i in places]
        b = jnp.stack([jnp.sum(g * v).real for g, v in zip(own, direction)])
        gg = jnp.stack([jnp.sum(jnp.abs(g) ** 2) for g in own])
        total = b.sum()
        whole = jnp.stack([value * total, value**2, total**2, gg.sum()])
        rows.append(jnp.concatenate([whole, value * b, total * b, gg]))
    return jnp.stack(rows)


def _weighed(value, weight, penalty):
    """A step's part of the loss; a penalty is not masked."""
    if isinstance(value, Penalised):
        return _weighed(value.loss, weight, penalty) + penalty * scalar(value.penalty)
    return jnp.where(weight == 0, 0, weight * scalar(value))


def _signs(key, like: jax.Array) -> jax.Array:
    """Entries of +1 or -1, for complex numbers in both parts: mean 0 and variance 1."""
    if jnp.iscomplexobj(like):
        real, imaginary = (_signs(k, like.real) for k in jax.random.split(key))
        return jax.lax.complex(real, imaginary)
    return jax.random.rademacher(key, like.shape, like.dtype)


def _near(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether all is the same but for rounding, which differs from program to program."""
    return jnp.all(jnp.abs(a - b) <= jnp.finfo(a.dtype).eps ** 0.5 * (1 + jnp.abs(b)))


def _over(flags: jax.Array, array: jax.Array) -> jax.Array:
    return flags.reshape(-1, *[1] * (array.ndim - 1))


def _joined(array: jax.Array) -> jax.Array:
    return array.reshape(-1, *array.shape[2:])


def _carry_of(carry):
    return carry.carry if isinstance(carry, functional.OnlineState) else carry


def _gradients(grads, losses: tuple) -> list[list]:
    """The leaves of the gradient by each loss."""
    if len(losses) == 1:
        alone = isinstance(grads, tuple) and len(grads) == 1
        return [jax.tree.leaves(grads[0] if alone else grads)]
    if not (isinstance(grads, tuple) and len(grads) == len(losses)):
        raise StructureError(f'grads are {type(grads).__name__}; give one for each loss, a tuple.')
    return [jax.tree.leaves(one) for one in grads]


def _check_fits(
    metered: MeterState, chosen: tuple, carry: list, found: list, places: tuple
) -> None:
    """Refuse what belongs to another learner."""
    own = [[d.shape[2:] for d in part] for part in (metered.directions, metered.tangents)]
    given = [[jnp.shape(a) for a in part] for part in (chosen, carry)]
    for what, mine, yours in zip(('params', 'carry'), own, given):
        if mine != yours:
            raise StructureError(
                f'this meter began with {what} of shapes {mine} and is given {yours}: it is that '
                'of another learner. Make a state with `meter.init(params, carry)`.'
            )
    for leaves in found:
        shapes = [jnp.shape(leaves[i]) for i in places if i < len(leaves)]
        if shapes != own[0]:
            raise StructureError(
                f'grads have the shapes {shapes}, and the learned parameters {own[0]}: give the '
                'gradient that this learner returned, a tree like params.'
            )
