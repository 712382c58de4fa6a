"""River's protocol, ``learn_one`` and ``predict_one``, over a network that learns online.

>>> from braintrace.adapters import river
>>> river.__all__
['OnlineClassifier', 'OnlineRegressor']
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._learner import compile as compile_learner
from .._learner import drawn
from ..errors import OptionError
from ..functional import online
from ._step import missing_framework

try:
    from river import base
except ImportError as error:
    raise missing_framework('river', error) from error

__all__ = ['OnlineClassifier', 'OnlineRegressor']

LARGEST = 1e18  # feature or target


class Moments(NamedTuple):
    """How many numbers came so far, their mean and their variance (Welford 1962)."""

    count: Any
    mean: Any
    variance: Any

    @classmethod
    def none(cls, size: int) -> Moments:
        return cls(jnp.zeros((), jnp.int32), jnp.zeros(size), jnp.zeros(size))

    def including(self, x) -> Moments:
        count, off = self.count + 1, x - self.mean
        mean = self.mean + off / count
        variance = self.variance + (off * (x - mean) - self.variance) / count
        return Moments(count, mean, variance)

    @property
    def std(self):
        """The standard deviation; 1 where all numbers were the same."""
        return jnp.where(self.variance > 0, jnp.sqrt(self.variance), 1.0)


class Place(NamedTuple):
    """How far a stream is: what the network learnt and remembers, and the scale of its numbers."""

    params: Any
    opt_state: Any
    state: Any
    of_features: Moments
    of_targets: Moments


class _Online:
    """What both estimators share. Numbers are told from those of the first sample, so that single
    precision holds them; NaN is a feature that is missing.
    """

    _place: Any = None  # a `Place`
    _ahead: tuple | None = None  # of the questions that wait for their answers: carry and moments
    _waiting = 0
    _outputs: Any
    _loss: Callable
    _said: Callable
    _asked: Callable
    _take: Callable

    def __init__(
        self,
        model: Callable,
        rule: Any = 'd_rtrl',
        optimizer: Any = None,
        scale: bool = True,
        delayed: bool = False,
        seed: int = 0,
    ):
        self.model, self.rule, self.optimizer = model, rule, optimizer
        self.scale, self.delayed, self.seed = scale, delayed, seed

    def __getstate__(self) -> dict:
        """A copy, or a pickle, compiles again, and owns the state that its updates write over."""
        return {k: v for k, v in vars(self).items() if k not in {'learner', '_forward', '_learn'}}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        if self._place is not None:
            own = jax.tree.map(jnp.copy, self._place.state)
            self._place = self._place._replace(state=own)
            self._compile()

    def _unit_test_skips(self) -> set[str]:
        """Of River's checks: a network has no default, and a fixed number of inputs."""
        return {
            'check_init_has_default_params_for_tests',
            'check_emerging_features',
            'check_disappearing_features',
        }

    # the network ----------------------------------------------------------------------------------

    def _begin(self, x: Mapping) -> None:
        """Make the network, for the features of the first sample."""
        if not x:
            raise OptionError('the first sample has no features; a network needs one at least.')
        self._features = {name: k for k, name in enumerate(sorted(x, key=str))}
        first = np.array([_number(x[name], name) for name in self._features])
        self._first = first if self.scale else np.zeros_like(first)
        self._first_target: float | None = None
        optimizer, params, self._carry0 = self._compile()
        state = self.learner.init(params, self._carry0, self._example)
        moments = Moments.none(len(self._first)), Moments.none(1)
        self._place = Place(params, optimizer.init(params), state, *moments)

    def _compile(self) -> tuple:
        """Make the programs, and return the optimiser, the first parameters and the first carry."""
        self._example = jnp.zeros((1, len(self._first)))
        made = drawn(lambda: self.model(len(self._first), self._outputs), self.seed)
        if isinstance(made, tuple):
            cell, params, carry = made
            self.learner = online(cell, self.rule)
        else:
            learner = compile_learner(made, self.rule, self._example, batch_size=1)
            self.learner, params, carry = learner.pure()
            if read := learner.with_environment(self._example[None], 1)[1:]:
                raise OptionError(
                    f'the model reads {list(read[0])} of brainstate.environ at each step, which '
                    'samples do not bring: keep it in a state of the model.'
                )
        said, _ = jax.eval_shape(self.learner.cell, params, carry, self._example)
        if getattr(said, 'shape', None) != (1, self._outputs):
            shapes = jax.tree.map(lambda x: list(x.shape), said)
            raise OptionError(
                f'the model returns {shapes}, and has to return an array of shape '
                f'[1, {self._outputs}], as model(inputs, outputs={self._outputs}) asks.'
            )
        optimizer = self.optimizer
        if optimizer is None:
            import optax

            optimizer = optax.adam(1e-3)
        update = self.learner.sequence_update(self._loss, optimizer)

        def scaled(of: Moments, row):
            row = jnp.where(jnp.isnan(row), of.mean, row)
            if not self.scale:
                return of, row[None]
            of = of.including(row)
            return of, ((row - of.mean) / of.std)[None]

        def forward(params, carry, of_features, of_targets, row):
            of_features, inputs = scaled(of_features, row)
            outputs, carry = self.learner.cell(params, carry, inputs)
            return self._said(outputs[0], of_targets), (carry, of_features)

        def learn(params, opt_state, state, of_features, of_targets, rows, targets):
            of_features, inputs = jax.lax.scan(scaled, of_features, rows)
            of_targets, targets = self._asked(of_targets, targets, scaled)
            found = update(params, opt_state, state, inputs, targets)
            return Place(found.params, found.opt_state, found.state, of_features, of_targets)

        self._forward, self._learn = jax.jit(forward), jax.jit(learn, donate_argnums=2)
        return optimizer, params, carry

    @property
    def params(self) -> Any:
        """What the network learnt; None before the first sample."""
        return self._place and self._place.params

    def restart(self) -> None:
        """Begin another sequence: forget what came so far, but not what was learnt."""
        self._ahead, self._waiting = None, 0
        if self._place is not None:
            state = self.learner.init(self._place.params, self._carry0, self._example)
            self._place = self._place._replace(state=state)

    # samples --------------------------------------------------------------------------------------

    def _row(self, x: Mapping) -> np.ndarray:
        """The features in their order."""
        if self._place is None:
            self._begin(x)
        row = np.full(len(self._first), np.nan)
        try:
            for name, value in x.items():
                row[self._features[name]] = _number(value, name)
        except KeyError:
            raise OptionError(
                f'the feature {name!r} was not in the first sample, for which the network was '
                f'made: {list(self._features)}. Give all of them there, absent ones as 0: '
                'OneHotEncoder takes the categories.'
            ) from None
        return (row - self._first).astype(self._example.dtype)

    def _predicted(self, x: Mapping) -> np.ndarray:
        """What the network says to a sample, before it learns of it."""
        row, place = self._row(x), self._place
        carry, of_features = self._ahead or (place.state.carry, place.of_features)
        said, ahead = self._forward(place.params, carry, of_features, place.of_targets, row)
        if self.delayed:
            self._ahead, self._waiting = ahead, self._waiting + 1
        return np.asarray(said)

    def _learnt(self, rows: list[np.ndarray], targets: np.ndarray) -> None:
        """An update after each of some samples that follow each other."""
        self._place = self._learn(*self._place, np.array(rows), targets)
        self._waiting = max(self._waiting - len(rows), 0)
        if not self._waiting:
            self._ahead = None

    def learn_one(self, x: dict, y) -> None:
        """A step and an update."""
        self._take([x], [y])

    def learn_many(self, X, y) -> None:
        """A step and an update for each row of a data frame, or dict of a list, in one program."""
        xs, ys = X.to_dict('records') if hasattr(X, 'to_dict') else list(X), list(y)
        if len(xs) != len(ys):
            raise OptionError(f'X has {len(xs)} rows and y {len(ys)}: give one y for each row.')
        if xs:
            self._take(xs, ys)


class OnlineRegressor(_Online, base.Regressor):
    """A River regressor: a network that learns after each sample from the squared error.

    The samples are one sequence. ``predict_one(x)`` says what the network expects and changes
    nothing; ``learn_one(x, y)`` makes its step and one update, and ``learn_many`` does so for each
    row of a data frame. :meth:`restart` begins another sequence.

    - ``model(inputs, outputs)`` makes a ``brainstate.nn.Module``, or ``(cell, params, carry)`` of
      pure functions for a batch of one (:mod:`braintrace.adapters`), at the first sample. The
      features of that one are those of all samples; later a missing one counts as its mean.
    - ``rule``: a value of :mod:`braintrace.rules`, or its name. ``optimizer``: an optax
      transformation; None: Adam with 1e-3.
    - ``scale``: features and targets are standardised by the mean and variance so far.
    - ``delayed``: labels come after further questions, in the order of these, as in
      ``progressive_val_score(delay=...)``. Then ``predict_one`` moves a state that runs ahead of
      the one that learns.
    - ``seed``: of the first parameters.

    Raises :class:`braintrace.errors.OptionError` for a feature or a target that is no number up to
    1e18, for a new feature, and for a model of other outputs.

    >>> import optax
    >>> from braintrace import nn
    >>> from braintrace.adapters.river import OnlineRegressor
    >>> make = lambda inputs, outputs: nn.LeakyRateReadout(inputs, outputs, tau=1.0)
    >>> model = OnlineRegressor(make, optimizer=optax.adam(0.1))
    >>> for k in range(300):
    ...     model.learn_one({'x': k % 2}, 3.0 + k % 2)
    >>> round(model.predict_one({'x': 0}))
    3
    """

    _outputs = 1

    @staticmethod
    def _loss(outputs, targets):
        return jnp.mean((outputs - targets) ** 2)

    def _said(self, outputs, of: Moments):
        return outputs * of.std + of.mean if self.scale else outputs

    def _asked(self, of: Moments, targets, scaled: Callable) -> tuple:
        return jax.lax.scan(scaled, of, targets)

    def predict_one(self, x: dict) -> float:
        """What the network expects of the next sample."""
        return float(self._predicted(x)[0]) + (self._first_target or 0.0)

    def _take(self, xs: list, ys: list) -> None:
        targets = [_number(y) for y in ys]
        rows = [self._row(x) for x in xs]
        if self._first_target is None:
            self._first_target = targets[0] if self.scale else 0.0
        targets = [y - self._first_target for y in targets]
        self._learnt(rows, np.array(targets, self._example.dtype)[:, None])


class OnlineClassifier(_Online, base.Classifier):
    """A River classifier: as :class:`OnlineRegressor`, from the cross-entropy, with an output for
    each of ``num_classes`` labels, which take their places as they are first seen.

    ``predict_proba_one(x)`` gives the probabilities of the labels that were seen.

    Raises :class:`braintrace.errors.OptionError` also for a label more than ``num_classes``, and
    for one that is NaN or has no hash.

    >>> from braintrace import nn
    >>> from braintrace.adapters.river import OnlineClassifier
    >>> make = lambda inputs, outputs: nn.LeakyRateReadout(inputs, outputs, tau=1.0)
    >>> model = OnlineClassifier(make)
    >>> for k in range(400):
    ...     model.learn_one({'x': k % 2}, 'odd' if k % 2 else 'even')
    >>> model.predict_one({'x': 0})
    'even'
    """

    def __init__(
        self,
        model: Callable,
        rule: Any = 'd_rtrl',
        optimizer: Any = None,
        scale: bool = True,
        delayed: bool = False,
        seed: int = 0,
        num_classes: int = 2,
    ):
        super().__init__(model, rule, optimizer, scale, delayed, seed)
        self.num_classes = num_classes
        self._labels: dict[Hashable, int] = {}

    @property
    def _outputs(self) -> int:
        return self.num_classes

    @property
    def _multiclass(self) -> bool:
        return True

    @staticmethod
    def _loss(outputs, targets):
        chosen = jnp.take_along_axis(outputs, targets[:, None], -1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(outputs, -1) - chosen)

    def _said(self, outputs, of: Moments):
        return outputs

    def _asked(self, of: Moments, targets, scaled: Callable) -> tuple:
        return of, targets

    def predict_proba_one(self, x: dict, **kwargs: Any) -> dict:
        """Label -> probability; empty before the first label."""
        said = self._predicted(x)[: len(self._labels)].astype(float)
        if not said.size:
            return {}
        shares = np.exp(said - said.max())
        return dict(zip(self._labels, (shares / shares.sum()).tolist(), strict=True))

    def _take(self, xs: list, ys: list) -> None:
        labels = dict(self._labels)
        for y in ys:
            if not isinstance(y, Hashable) or y != y:
                raise OptionError(f'a label is {y!r}; give a word, a number or a tuple of these.')
            labels.setdefault(y, len(labels))
        if len(labels) > self.num_classes:
            raise OptionError(
                f'there are {len(labels)} labels, {list(labels)[:8]}, and num_classes is '
                f'{self.num_classes}: give as many as there will be.'
            )
        rows = [self._row(x) for x in xs]
        self._learnt(rows, np.array([labels[y] for y in ys], np.int32)[:, None])
        self._labels = labels


def _number(x, name=None) -> float:
    """A feature or, without a name, a target as a float, whose square single precision holds."""
    try:
        value = math.nan if isinstance(x, str) else float(x)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not abs(value) <= LARGEST:
        what, remedy = 'the target', 'leave the sample out; OnlineClassifier takes words'
        if name is not None:
            what = repr(name)
            remedy = 'put river.preprocessing.StandardScaler in front, or scale it yourself'
            if isinstance(x, str):
                remedy = 'put river.preprocessing.OneHotEncoder in front'
            elif x is None or x != x:
                remedy = 'leave this feature out, which then counts as its mean so far'
        raise OptionError(
            f'{what} is {x!r}, and has to be a number from {-LARGEST:g} to {LARGEST:g}: {remedy}.'
        )
    return value
