"""Rules that keep nothing pending: the gradient of a step alone, and traces that move within each
step of the loop over time.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final

import jax
import jax.numpy as jnp

from .._executor import Vector, dense
from ..errors import RuleContractError
from .contraction import add_gradients, same_step
from .layout import Pair, by_op, by_pair, chances, dithered, pairs, where_lanes
from .rule import Network, OpGradients, PendsWhole, PositionWise, Trace, WritesAtOnce

Slots = dict[str, jax.Array]  # of one pair, by names that the rule chooses


@dataclass(frozen=True, repr=False)
class NoHistory(WritesAtOnce, PositionWise, PendsWhole):
    """SnAp-0: the same-step gradient alone, without a trace; ``rule=None`` means the same."""

    name: ClassVar[str] = 'same_step'
    made_by: ClassVar[str] = 'same_step'
    traces: ClassVar[bool] = False
    credit = 'cut'
    approximation = 'there is no trace: every gradient holds the current step only'
    remembers = False

    def widened(self, graph):
        return graph

    def init(self, graph):
        return {}

    def update(self, network, trace, factors, t):
        return trace

    def gradient(self, network, before, after, step):
        _, _, signals = step.steps.all
        return same_step(network.graph, step.x, signals.dy, network.weights)

    def window(self, network, trace, pending, window, keep):
        return self.gradient(network, trace, trace, window), None

    def with_history(self, network, grads, trace, pending, lam, t, reset):
        return grads

    def advance(self, network, trace, pending, window):
        return None

    def close(self, network, trace, pending, t, read):
        return trace


class Stepwise(WritesAtOnce):
    """A rule whose trace a loop over time carries; it adds up the gradients of the steps."""

    remembers = True

    @abstractmethod
    def history(
        self, network: Network, trace: Trace, lam: dict[str, Vector], t: jax.Array
    ) -> OpGradients:
        """``< lam, e >``: what derivatives of losses by the states before a step send through the
        trace. An op to which nothing is sent may be left out.
        """

    @final
    def gradient(self, network, before, after, step):
        _, _, signals = step.steps.at(0)
        dy = jax.tree.map(lambda a: a[None], signals.dy)
        grads = same_step(network.graph, step.x, dy, network.weights)
        return add_gradients(grads, self.history(network, before, signals.c, step.first))


class StepRule(Stepwise, PositionWise):
    r"""A learning rule of one's own, made of three functions of arrays: the empty trace, the trace
    after a step, and the gradient that is read from it.

    .. math:: \frac{dL^t}{dw} = \frac{\partial L^t}{\partial y^t} \frac{\partial y^t}{\partial w}
              + \mathrm{read}(e^{t-1}, \frac{\partial L^t}{\partial h^{t-1}})

    The first term is made for you. A subclass is a frozen dataclass, whose fields are its options;
    a number among them may be an array, also a traced one.
    ``name`` and the phrase ``approximation`` are in the report; the second says what the rule
    leaves out (empty: nothing). ``view`` is that of every :class:`Rule`. The three functions are
    asked for each ``pair`` of an op and a group of S hidden states that it feeds; ``pair.op`` and
    ``pair.group`` describe them. At each position of the op's result y, shape ``(*coords,)``, stand
    the derivatives

    - ``d`` ``(*coords, S, S)``: of new state s by old state r;
    - ``df`` ``(*coords, S)``: of new state s by y;
    - ``lam`` ``(*coords, S)``: of the loss by the states before the step.

    ``start(pair)`` returns ``e``, a dict of arrays of zeros. ``step(pair, e, x, d, df)`` returns e
    after a step with the op's input ``x`` (None: it has none, as ``pair.op.x_aval`` says). After a
    reset the e that it gets is zero, an array whose axis 0 is the batch in the samples that were
    reset; single samples are not reset beside an array without it. An axis 0 as long as the batch
    is taken for it, so put something else in another axis. ``read(pair, e, lam)`` returns the
    gradient of each weight of the op, by the names and in the shapes of
    ``pair.op.weight_avals``; zeros for one without a history. In both ``pair.weights`` has the op's
    weights of this step, by the same names. An op in a loop of the step has an
    axis for the turns in front of x and df. Where an element of y feeds several positions of the
    states, as a weight of a neuron does in each sample, ``coords`` has ``pair.coords.added`` axes
    more than y, in front of its axis ``pair.coords.axis``.

    Raises :class:`braintrace.errors.RuleContractError`, when the step is compiled, for other names
    and shapes, and where one of the three raises. The tutorial "A learning rule of your own" makes
    a rule and checks it.

    >>> import dataclasses, braintrace, jax.numpy as jnp
    >>> @dataclasses.dataclass(frozen=True, repr=False)
    ... class LeakyTrace(braintrace.rules.StepRule):
    ...     leak: float = 0.9
    ...     name, approximation = 'LEAKY', 'every state forgets at one rate'
    ...
    ...     def start(self, pair):
    ...         return {'e': jnp.zeros((*pair.op.x_aval.shape, pair.op.y_aval.shape[-1]))}
    ...
    ...     def step(self, pair, e, x, d, df):
    ...         return {'e': self.leak * e['e'] + jnp.einsum('bi,bj->bij', x, df[..., 0])}
    ...
    ...     def read(self, pair, e, lam):
    ...         return {'weight': jnp.einsum('bij,bj->ij', e['e'], lam[..., 0])}
    >>> def cell(params, h, x):
    ...     h = 0.9 * h + braintrace.matmul(x, params['W'])
    ...     return h, h
    >>> params, h, xs, ys = {'W': jnp.ones((2, 3))}, *map(jnp.ones, [(4, 3), (5, 4, 2), (5, 4, 3)])
    >>> grads = []
    >>> for rule in LeakyTrace(0.9), braintrace.rules.d_rtrl():
    ...     learner = braintrace.functional.online(cell, rule)
    ...     gradient = learner.sequence_grad(lambda out, y: ((out - y) ** 2).mean())
    ...     grads += [gradient(params, learner.init(params, h, xs[0]), xs, ys).grads['W']]
    >>> bool(jnp.allclose(*grads))
    True
    """

    credit = 'cut'

    @abstractmethod
    def start(self, pair: Pair) -> Slots:
        """The trace of a pair before the first step: zeros."""

    @abstractmethod
    def step(self, pair: Pair, e: Slots, x: Any, d: jax.Array, df: jax.Array) -> Slots:
        """The trace of a pair after a step."""

    @abstractmethod
    def read(self, pair: Pair, e: Slots, lam: jax.Array) -> Slots:
        """What derivatives of a loss by the states send through the trace to the op's weights."""

    @final
    def widened(self, graph):
        return graph

    @final
    def init(self, graph):
        def one(pair: Pair) -> Slots:
            e = self._asked('start', pair)
            named = isinstance(e, dict) and e
            if not (named and all(hasattr(slot, 'shape') for slot in e.values())):
                raise self._broken('start', pair, f'returned {e!r:.80}; a dict of arrays is due')
            # the other two are tried here, before anything runs
            op, states = pair.op, (*pair.coords.shape, pair.group.num_state)
            number = partial(jax.ShapeDtypeStruct, dtype=pair.group.dtype)
            x = None
            if op.x is not None:
                x = jax.ShapeDtypeStruct((*op.repeats, *op.x_aval.shape), op.x_aval.dtype)
            d, df = number((*states, states[-1])), number((*op.repeats, *states))
            after = self._asked('step', pair, e, x, d, df)
            self._check('step', pair, after, e)
            found = self._asked('read', pair, e, number(states))
            if isinstance(found, dict) and (left := op.weight_avals.keys() - found.keys()):
                raise self._broken(
                    'read',
                    pair,
                    f'returned {sorted(found)} and left out {sorted(left)}, which would have no '
                    'history. Return a gradient for each name in pair.op.weight_avals, zeros for '
                    'one without a history',
                )
            self._check('read', pair, found, op.weight_avals)
            return jax.tree.map(jnp.asarray, e)

        return by_pair(graph, one)

    def _asked(self, method: str, pair: Pair, *args):
        """What a method returns for such arrays."""
        ask = getattr(self, method)
        try:
            if not args:
                return ask(pair)
            with_weights = lambda weights, *args: ask(pair._replace(weights=weights), *args)
            return jax.eval_shape(with_weights, pair.op.weight_avals, *args)
        except Exception as error:
            hint = ''
            if pair.op.x is None:
                hint = (
                    '. This op has no input: pair.op.x_aval is None, and step gets None for x. '
                    'Handle it there, or compute it by plain jax.numpy, which has no trace'
                )
            what = f'raised {type(error).__name__}: {error}{hint}'
            raise self._broken(method, pair, what) from error

    @final
    def update(self, network, trace, factors, t):
        def one(pair: Pair) -> Slots:
            # the derivatives as plain arrays: a zero by structure is a zero
            old, x = pair.of(trace), factors.x.get(pair.relation.key)
            d = self._dense(pair, pair.gathered(factors.d))
            df = self._dense(pair, pair.of(factors.df), pair.op.repeats)
            own = pair._replace(weights=network.weights[pair.relation.key])
            found = self.step(own, _past(pair, old, t), x, d, df)
            chance = chances(t.sum(), t.sum())
            return {name: dithered(found[name], e.dtype, chance) for name, e in old.items()}

        return by_pair(network.graph, one)

    @final
    def history(self, network, trace, lam, t):
        def one(pair: Pair) -> Slots:
            # a trace that a reset ended counts as zero, whatever it holds
            past = _past(pair, pair.of(trace), t)
            own = pair._replace(weights=network.weights[pair.relation.key])
            return self.read(own, past, self._dense(pair, pair.gathered(lam)))

        return by_op(pairs(network.graph), one)

    @staticmethod
    def _dense(pair: Pair, tree, front: tuple[int, ...] = ()) -> jax.Array:
        """Values at the coordinates of a pair as one array, zeros by structure as numbers."""
        return dense(tree, (*front, *pair.coords.shape), pair.group.dtype)

    def _check(self, method: str, pair: Pair, found, like: Slots) -> None:
        """Refuse arrays with other names or shapes."""
        wanted = {name: jnp.shape(e) for name, e in like.items()}
        shapes = {n: jnp.shape(e) for n, e in found.items()} if isinstance(found, dict) else found
        if shapes != wanted:
            raise self._broken(method, pair, f'returned {shapes!r:.200}, where {wanted} is due')

    def _broken(self, method: str, pair: Pair, what: str) -> RuleContractError:
        return RuleContractError(
            f'{pair.op.where}: {type(self).__name__}.{method}, for {pair.relation.key} '
            f'({pair.op.primitive.name}) and {pair.group.name}, {what}.'
        )


def _past(pair: Pair, slots: Slots, t: jax.Array) -> Slots:
    """Slots that are zero where there was no step, in single lanes where axis 0 is the batch."""
    return {n: where_lanes(t > 0, by_lane(pair, e, t.shape), e) for n, e in slots.items()}


def by_lane(pair: Pair, e: Any, lanes: tuple[int, ...]) -> bool:
    """Whether axis 0 of a slot is the batch of so many samples."""
    return pair.laned and e.shape[:1] == lanes
