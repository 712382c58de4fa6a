"""Delayed match to sample: is this the stimulus that was marked?"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..errors import OptionError
from ._spikes import ACTIVE, CUE, GAP, GROUP, NOISE, RECALL, firing, steps_of
from ._task import Batch, Task, accuracy, check_real, check_whole, entropy

UNITS, SHARE = 4 * GROUP, GROUP  # inputs that show stimuli, and those of them that show one


def match_to_sample(
    stimuli: int = 4, delay: float = 1000, dt: float = 10, distractors: int = 1, seed: int = 0
) -> Task:
    """Delayed match to sample with spikes, among distractors (after Miller et al., 1996, Journal of
    Neuroscience 16:5154; Poisson groups as in :func:`evidence`).

    70 Poisson inputs: 40 that show the stimuli, ten that mark the sample, ten that mark the test,
    ten of noise. A stimulus is ten of the 40, drawn by ``seed``. First come ``1 + distractors``
    different stimuli, 100 ms each behind gaps of 50 ms; one of them, at a random place, is marked:
    the sample. ``delay`` milliseconds after the last one the test is shown and marked for 150 ms,
    in which the answer is asked for: label 1 where it is the sample, in half of the sequences; else
    it is one of the distractors, each with equal chances (without any: another stimulus). Groups
    fire at 40 Hz while they are active, the noise at 10 Hz always, in steps of ``dt`` milliseconds.

    With distractors the label is independent of all stimuli and the test together, of the marked
    place and the test, and of the marked place and the stimuli: neither that the test was shown
    before, nor how long ago, tells anything. A sum of functions of single steps' inputs, such as a
    linear readout of leaky traces, can not have a cross-entropy below ln 2, and a readout of 800
    random rectified sums of such traces (50 ms, 1 s, 3 s) stays at 50 %; without distractors it has
    79 % of eight stimuli and 97 % of two. The score is the accuracy: ``floor = 1 / 2``.

    Raises :class:`braintrace.errors.OptionError` for fewer than two stimuli, for as many
    distractors as stimuli or more, and for a ``dt`` that does not divide 50 ms and the delay.

    >>> from braintrace import tasks
    >>> task = tasks.match_to_sample()
    >>> task.steps, task.inputs, task.outputs
    (145, 70, 2)
    """
    check_whole('stimuli', stimuli, 2)
    check_real('delay', delay)
    check_whole('distractors', distractors, 0)
    check_whole('seed', seed, 0)
    if distractors >= stimuli:
        raise OptionError(
            f'distractors is {distractors}, but only {stimuli - 1} of {stimuli} stimuli are left '
            'beside the sample; give fewer distractors or more stimuli.'
        )
    gap, cue, wait, answer = steps_of(dt, gap=GAP, cue=CUE, delay=delay, recall=RECALL)
    places = 1 + distractors
    steps = places * (gap + cue) + wait + answer
    times = jnp.arange(steps)[:, None]
    place = jnp.minimum(times // (gap + cue), places - 1)
    shown = (times < places * (gap + cue)) & (times % (gap + cue) >= gap)
    tested = times >= steps - answer
    patterns = jnp.asarray(drawn(stimuli, seed))

    def draw(key: Array, batch_size: int, part: str) -> Batch:
        of_order, of_rest, of_spikes = jax.random.split(key, 3)
        order = jax.random.uniform(of_order, (batch_size, stimuli)).argsort(-1)
        sample, label, other = chosen(of_rest, batch_size, places, stimuli)
        lane = jnp.arange(batch_size)
        now = jnp.where(tested, order[lane, other], order[lane, place])
        seen = (shown | tested)[..., None] * patterns[now]
        marks = [shown & (place == sample), jnp.broadcast_to(tested, now.shape)]
        noise = jnp.full((steps, batch_size, GROUP), NOISE)
        groups = [(ACTIVE * mark[..., None]).repeat(GROUP, -1) for mark in marks]
        xs = firing(of_spikes, jnp.concatenate([ACTIVE * seen, *groups, noise], -1), dt)
        return Batch(xs, jnp.broadcast_to(label, (steps, batch_size)), tested[:, 0].astype(float))

    def trivial(xs: Array) -> Array:
        return jnp.broadcast_to(jnp.array([1.0, 0.0]), (*xs.shape[:2], 2))

    name = f'match {stimuli} among {places}'
    sizes = steps, UNITS + 3 * GROUP, 2
    return Task(name, *sizes, draw, entropy, accuracy, 'accuracy', 0.5, trivial)


def drawn(stimuli: int, seed: int) -> np.ndarray:
    """The inputs of each stimulus (stimuli, UNITS), as 0 and 1, no two alike."""
    rng = np.random.default_rng(seed)
    found: dict[tuple, None] = {}
    while len(found) < stimuli:
        found[tuple(sorted(rng.choice(UNITS, SHARE, replace=False)))] = None
    patterns = np.zeros((stimuli, UNITS), np.float32)
    np.put_along_axis(patterns, np.array(list(found)), 1, 1)
    return patterns


def chosen(key: Array, batch: int, places: int, stimuli: int) -> tuple[Array, Array, Array]:
    """The place of the sample, whether the test matches it, and the place of the test."""
    of_sample, of_label, of_other = jax.random.split(key, 3)
    sample = jax.random.randint(of_sample, (batch,), 0, places)
    label = jax.random.bernoulli(of_label, shape=(batch,)).astype(int)
    pool = places if places > 1 else stimuli
    further = jax.random.randint(of_other, (batch,), 1, pool)
    return sample, label, (sample + (1 - label) * further) % pool
