"""What a task is: batches, the loss of a step, a score, and the floor that a learner must beat."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._compiler import depends
from .._signatures import is_int
from .._warnings import tell
from ..errors import OptionError, StructureError

PARTS = ('train', 'validation', 'test')
Part = Literal['train', 'validation', 'test']
METRICS = ('accuracy', 'nats', 'mse')


class Batch(NamedTuple):
    """Sequences with time in axis 0: inputs ``xs`` (T, B, I), targets ``ys`` (T, B), class numbers,
    or (T, B, O), floats, and ``mask`` (T,), the weight of each step's loss.

    >>> import jax
    >>> from braintrace import tasks
    >>> xs, ys, mask = tasks.adding(4).sample(jax.random.key(0), 32)
    >>> xs.shape, ys.shape, mask.tolist()
    ((4, 32, 2), (4, 32, 1), [0.0, 0.0, 0.0, 1.0])
    """

    xs: Array
    ys: Array
    mask: Array


@dataclass(frozen=True)
class Task:
    """A task, as a value: ``sample`` draws batches, ``loss`` and ``score`` judge outputs.

    ``steps`` T, ``inputs`` I and ``outputs`` O are the sizes of a sequence, its inputs and its
    outputs. ``loss(output, target)`` is the mean over the batch of the loss of one step, of ``(B,
    O)`` and of one row of ``ys``. ``score(outputs, ys, mask)`` takes all steps and is in the unit
    ``metric``: ``'accuracy'``, which is better where it is higher, ``'nats'`` or ``'mse'``.
    ``floor`` is the expected score of ``trivial``, a function from ``xs`` to outputs that knows
    nothing of what a learner has to keep in memory; None where nobody needs it. ``stream`` tells
    that a sequence is a piece of one stream, along which parameters are updated while it goes on.
    ``draw(key, batch_size, part)`` is what :meth:`sample` calls; it is compiled, so all that it
    draws comes from the key by ``jax.random``.

    Raises :class:`braintrace.errors.OptionError` for another metric.

    >>> import jax
    >>> from braintrace import tasks
    >>> task = tasks.adding(50)
    >>> batch = task.sample(jax.random.key(0), 32)
    >>> batch.xs.shape, batch.ys.shape, batch.mask.shape
    ((50, 32, 2), (50, 32, 1), (50,))
    >>> round(task.floor, 4), task.beaten_by(0.01)
    (0.1667, True)
    """

    name: str
    steps: int
    inputs: int
    outputs: int
    draw: Callable[[Array, int, str], Batch]
    loss: Callable[[Array, Array], Array]
    score: Callable[[Array, Array, Array], Array]
    metric: str
    floor: float
    trivial: Callable[[Array], Array] | None = None
    stream: bool = False

    def __post_init__(self):
        if self.metric not in METRICS:
            choices = ', '.join(map(repr, METRICS))
            raise OptionError(f'metric is {self.metric!r}; give one of {choices}.')

    def __str__(self) -> str:
        sizes = f'{self.steps} steps, {self.inputs} inputs, {self.outputs} outputs'
        return f'{self.name}: {sizes}, floor {self.shown(self.floor)}'

    def sample(self, key: Array, batch_size: int, part: Part = 'train') -> Batch:
        """``batch_size`` sequences of one of ``PARTS``, a pure function of the key.

        One key draws other sequences for each part. Raises :class:`braintrace.errors.OptionError`
        for another part and for a number of sequences that is no positive int.
        """
        check_whole('batch_size', batch_size)
        if part not in PARTS:
            raise OptionError(f'part is {part!r}; give one of {", ".join(map(repr, PARTS))}.')
        return self.draw(jax.random.fold_in(key, PARTS.index(part)), batch_size, part)

    def beaten_by(self, score: float, margin: float = 0.0) -> bool:
        """Whether a score is better than the floor by more than a share ``margin`` of the floor."""
        gain = score - self.floor if self.metric == 'accuracy' else self.floor - score
        return bool(gain > margin * self.floor)

    def reached(self, scores, aim: float) -> bool:
        """Whether each of some scores is at least as good as ``aim``."""
        good = scores >= aim if self.metric == 'accuracy' else scores <= aim
        return bool(np.all(good))

    def shown(self, score: float) -> str:
        """A score as text."""
        return f'{100 * score:.1f} %' if self.metric == 'accuracy' else f'{score:.3g} {self.metric}'


def entropy(logits: Array, labels: Array) -> Array:
    """The mean cross-entropy, in nats, of logits (..., classes) and labels (...)."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -chosen.mean()


def squared(outputs: Array, targets: Array) -> Array:
    """The mean squared error."""
    return jnp.mean((outputs - targets) ** 2)


def over_steps(loss: Callable) -> Callable:
    """The score that is the mean of a loss over the steps, weighed by the mask."""

    def score(outputs: Array, ys: Array, mask: Array) -> Array:
        return jnp.average(jax.vmap(loss)(outputs, ys), weights=mask)

    return score


def accuracy(outputs: Array, ys: Array, mask: Array) -> Array:
    """The share of sequences of one label whose class has the largest mean logit in the masked
    steps.
    """
    label = ys[jnp.argmax(mask)]
    return jnp.mean(jnp.average(outputs, 0, weights=mask).argmax(-1) == label)


def judged(
    name: str,
    sizes: tuple[int, int, int],
    draw: Callable[[Array, int, str], Batch],
    metric: str,
    floor: float,
    trivial: Callable[[Array], Array] | Any,
    stream: bool = False,
) -> Task:
    """A task of ``sizes`` steps, inputs, outputs with the loss and the score of its metric.
    ``trivial`` is a function, or the outputs of each sample: ``(O,)`` at a step, or ``(T, 1, O)``.
    """
    loss = squared if metric == 'mse' else entropy
    score = accuracy if metric == 'accuracy' else over_steps(loss)

    def always(xs: Array) -> Array:
        return jnp.broadcast_to(jnp.asarray(trivial, xs.dtype), (*xs.shape[:2], sizes[2]))

    guess = trivial if callable(trivial) else always
    return Task(name, *sizes, draw, loss, score, metric, floor, guess, stream)


def different(key: Array, batch_size: int, labels: Sized, part: str, what: str) -> Array:
    """The numbers of a batch in which no sample comes twice; ``what`` samples are, as errors tell
    it.
    """
    if batch_size > len(labels):
        raise OptionError(
            f'batch_size is {batch_size}, but the {part} part has {len(labels)} {what}.'
        )
    return jax.random.choice(key, len(labels), (batch_size,), replace=False)


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Refuse what is no int of at least ``least``."""
    if not is_int(value, least):
        raise OptionError(f'{name} is {value!r}; give an int of at least {least}.')


def check_real(name: str, value: object, above: float = 0.0) -> None:
    """Refuse what is no finite number above ``above``."""
    real = float(value) if isinstance(value, Real) and not isinstance(value, bool) else above
    if not above < real < float('inf'):
        raise OptionError(f'{name} is {value!r}; give a number above {above:g}.')


def check_draw(task: Task, batch: int) -> None:
    """Refuse a task that draws other shapes than it says, and warn of one that its key does not
    move.
    """
    found = jax.eval_shape(lambda: task.sample(jax.random.key(0), batch))
    if not isinstance(found, Batch):
        raise StructureError(
            f'{task.name} draws {type(found).__name__}; draw(key, batch_size, part) returns a '
            'braintrace.tasks.Batch(xs, ys, mask).'
        )
    shapes = {name: jnp.shape(value) for name, value in found._asdict().items()}
    wanted = {'xs': (task.steps, batch, task.inputs), 'ys': (task.steps, batch)}
    wanted['mask'] = (task.steps,)
    for name, shape in wanted.items():
        if shapes[name] != (shape if name != 'ys' else shape + shapes[name][2:]):
            raise StructureError(
                f'{task.name} draws {name} {list(shapes[name])}, and its sizes say {list(shape)}: '
                'steps, batch, inputs.'
            )
    key = jax.random.key(0)
    moves = (
        depends(lambda keys, name=name: getattr(task.draw(keys[0], batch, PARTS[0]), name), [key])
        for name in ('xs', 'ys')
    )
    if not any(moved for (moved,) in moves):
        tell(
            f'{task.name} draws one batch, whatever the key: draw(key, batch_size, part) is '
            'compiled, so its random numbers have to come from the key, by jax.random.'
        )
