"""Evidence accumulation: on which side did more cues appear?"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from ..errors import OptionError
from ._spikes import ACTIVE, CUE, GAP, GROUP, NOISE, RECALL, firing, steps_of
from ._task import Batch, Task, accuracy, check_real, check_whole, entropy

LIKELY = 0.7  # the chance of each cue to appear on the side that is drawn for the sequence


def evidence(dt: float = 10, cues: int = 7, delay: float = 1050) -> Task:
    """Evidence accumulation with spikes (Bellec et al., 2020, Nature Communications 11:3625, fig.
    4, after Morcos & Harvey, 2016).

    40 Poisson inputs in four groups of ten: left, right, recall, noise. Each of ``cues`` cues, an
    odd number, lasts 100 ms behind a gap of 50 ms and lets the left or the right group fire, the
    side drawn for the sequence with a chance of 0.7; ``delay`` milliseconds after the last one the
    recall group fires for 150 ms, in which the answer is asked for. Groups fire at 40 Hz while they
    are active and not at all otherwise, the noise at 10 Hz always. An input of a step of ``dt``
    milliseconds is 1 where a Poisson process has a spike within it, with the chance ``1 - exp(-rate
    dt)``. The label is 1 if more cues were on the right. The score is the accuracy; both labels are
    equally frequent: ``floor = 1 / 2``.

    Raises :class:`braintrace.errors.OptionError` for an even number of cues and for a ``dt`` that
    does not divide 50 ms and the delay.

    >>> from braintrace import tasks
    >>> task = tasks.evidence(dt=10)
    >>> task.steps, task.inputs, task.outputs
    (225, 40, 2)
    """
    check_whole('cues', cues)
    check_real('delay', delay)
    if cues % 2 == 0:
        raise OptionError(f'cues is {cues}; give an odd number, so that one side has more.')
    gap, cue, wait, answer = steps_of(dt, gap=GAP, cue=CUE, delay=delay, recall=RECALL)
    steps = cues * (gap + cue) + wait + answer
    times = jnp.arange(steps)
    number = jnp.minimum(times // (gap + cue), cues - 1)
    shown = (times < cues * (gap + cue)) & (times % (gap + cue) >= gap)
    recall = times >= steps - answer

    def draw(key: Array, batch_size: int, part: str) -> Batch:
        of_side, of_cues, of_spikes = jax.random.split(key, 3)
        likely = jnp.where(jax.random.bernoulli(of_side, shape=(batch_size,)), LIKELY, 1 - LIKELY)
        right = jax.random.bernoulli(of_cues, likely, (cues, batch_size))
        label = (2 * right.sum(0) > cues).astype(int)
        side = right[number]
        active = jnp.broadcast_to(shown[:, None], side.shape)
        asked = jnp.broadcast_to(recall[:, None], side.shape)
        noise = jnp.full(side.shape, NOISE)
        groups = [ACTIVE * (active & ~side), ACTIVE * (active & side), ACTIVE * asked, noise]
        rates = jnp.stack(groups, -1).repeat(GROUP, -1)
        xs = firing(of_spikes, rates, dt)
        return Batch(xs, jnp.broadcast_to(label, (steps, batch_size)), recall.astype(float))

    def trivial(xs: Array) -> Array:
        return jnp.broadcast_to(jnp.array([1.0, 0.0]), (*xs.shape[:2], 2))

    name = f'evidence {cues}' + ('' if dt == 10 else f', {dt:g} ms')
    sizes = steps, 4 * GROUP, 2
    return Task(name, *sizes, draw, entropy, accuracy, 'accuracy', 0.5, trivial)
