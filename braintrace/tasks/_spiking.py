"""Tasks with Poisson inputs, whose times are milliseconds: evidence accumulation, delayed match to
sample, pattern generation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..errors import OptionError
from ._task import Batch, Task, check_real, check_whole, judged

CUE, GAP, RECALL = 100, 50, 150  # milliseconds of a cue, of the gap before it, and of the answer
GROUP = 10  # inputs of a group that fires as one
ACTIVE, NOISE = 0.04, 0.01  # spikes a millisecond
LIKELY = 0.7  # the chance of each cue to appear on the side that is drawn for the sequence
UNITS, SHARE = 4 * GROUP, GROUP  # inputs that show stimuli, and those of them that show one
LENGTH, PHASE = 1000, 200  # milliseconds of a pattern, and of each group's turn
CLOCK, TICK = 4, 0.1  # inputs of such a group, and spikes a millisecond in its turn
HERTZ = (1, 2, 3, 5)


def steps_of(dt: float, **times: float) -> list[int]:
    """Steps of ``dt`` milliseconds in each of the named times, which it has to divide."""
    check_real('dt', dt)
    for name, time in times.items():
        if abs(time / dt - round(time / dt)) > 1e-6:
            raise OptionError(
                f'dt is {dt} ms, which does not divide a {name} of {time} ms; give one that does.'
            )
    return [round(time / dt) for time in times.values()]


def firing(key: Array, rates: Array, dt: float) -> Array:
    """1 where a Poisson process of these spikes a millisecond has one within ``dt``, else 0."""
    return jax.random.bernoulli(key, -jnp.expm1(-rates * dt)).astype(float)


def presented(dt: float, count: int, delay: float) -> tuple[Array, Array, Array]:
    """Of each step of a sequence: the number of its presentation, of ``count`` ones, whether it is
    shown, and whether, after the delay, the answer is asked for.
    """
    check_real('delay', delay)
    gap, cue, wait, answer = steps_of(dt, gap=GAP, cue=CUE, delay=delay, recall=RECALL)
    last = count * (gap + cue)
    times = jnp.arange(last + wait + answer)
    number = jnp.minimum(times // (gap + cue), count - 1)
    return number, (times < last) & (times % (gap + cue) >= gap), times >= last + wait


def evidence(dt: float = 10, cues: int = 7, delay: float = 1050) -> Task:
    """Evidence accumulation with spikes (Bellec et al., 2020, Nature Communications 11:3625, fig.
    4, after Morcos & Harvey, 2016).

    40 Poisson inputs in four groups of ten: left, right, recall, noise. Each of ``cues`` cues, an
    odd number, lasts 100 ms after a gap of 50 ms and lets the left or the right group fire, the
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
    if cues % 2 == 0:
        raise OptionError(f'cues is {cues}; give an odd number, so that one side has more.')
    number, shown, recall = presented(dt, cues, delay)
    steps = len(number)

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

    name = f'evidence {cues}' + ('' if dt == 10 else f', {dt:g} ms')
    return judged(name, (steps, 4 * GROUP, 2), draw, 'accuracy', 0.5, [1.0, 0.0])


def match_to_sample(
    stimuli: int = 4, delay: float = 1000, dt: float = 10, distractors: int = 1, seed: int = 0
) -> Task:
    """Delayed match to sample with spikes, among distractors (after Miller et al., 1996, Journal of
    Neuroscience 16:5154; Poisson groups as in :func:`evidence`).

    70 Poisson inputs: 40 that show the stimuli, ten that mark the sample, ten that mark the test,
    ten of noise. A stimulus is ten of the 40, drawn by ``seed``. First come ``1 + distractors``
    different stimuli, 100 ms each after gaps of 50 ms; one of them, at a random place, is marked:
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
    check_whole('distractors', distractors, 0)
    check_whole('seed', seed, 0)
    if distractors >= stimuli:
        raise OptionError(
            f'distractors is {distractors}, but only {stimuli - 1} of {stimuli} stimuli are left '
            'next to the sample; give fewer distractors or more stimuli.'
        )
    places = 1 + distractors
    place, shown, tested = (of_step[:, None] for of_step in presented(dt, places, delay))
    steps = len(place)
    patterns = jnp.asarray(drawn(stimuli, seed))

    def draw(key: Array, batch_size: int, part: str) -> Batch:
        of_order, of_rest, of_spikes = jax.random.split(key, 3)
        order = jax.random.uniform(of_order, (batch_size, stimuli)).argsort(-1)
        sample, label, other = chosen(of_rest, batch_size, places, stimuli)
        sample_number = jnp.arange(batch_size)
        now = jnp.where(tested, order[sample_number, other], order[sample_number, place])
        seen = (shown | tested)[..., None] * patterns[now]
        marks = [shown & (place == sample), jnp.broadcast_to(tested, now.shape)]
        noise = jnp.full((steps, batch_size, GROUP), NOISE)
        groups = [(ACTIVE * mark[..., None]).repeat(GROUP, -1) for mark in marks]
        xs = firing(of_spikes, jnp.concatenate([ACTIVE * seen, *groups, noise], -1), dt)
        return Batch(xs, jnp.broadcast_to(label, (steps, batch_size)), tested[:, 0].astype(float))

    name, sizes = f'match {stimuli} among {places}', (steps, UNITS + 3 * GROUP, 2)
    return judged(name, sizes, draw, 'accuracy', 0.5, [1.0, 0.0])


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


def pattern_generation(dt: float = 5, outputs: int = 1, seed: int = 0) -> Task:
    """Generate one fixed pattern, a task like one that e-prop was shown on (Bellec et al., 2020,
    Nature Communications 11:3625); its numbers are our own choice.

    Each of the ``outputs`` is asked for a sum of sines of 1, 2, 3 and 5 Hz over one second, with
    amplitudes uniform in [0.5, 2] and phases uniform in [0, 2 pi], drawn once by ``seed`` for all
    sequences and parts and scaled to a mean of 0 and a variance of 1. The input is a clock: five
    groups of four Poisson inputs fire one after the other at 100 Hz, 200 ms each; all others fire
    at 10 Hz, here, so that sequences differ. An input of a step of ``dt`` milliseconds is 1 where a
    Poisson process has a spike within it. The score is the mean squared error, in units of the
    target's variance. Who always says the mean, 0, has ``floor = 1``.

    Raises :class:`braintrace.errors.OptionError` for a ``dt`` that does not divide 200 ms, and for
    ``outputs`` or a ``seed`` that are no such numbers.

    >>> from braintrace import tasks
    >>> task = tasks.pattern_generation()
    >>> task.steps, task.inputs, task.outputs
    (200, 20, 1)
    """
    check_whole('outputs', outputs)
    check_whole('seed', seed, 0)
    (turn,) = steps_of(dt, turn=PHASE)
    groups = LENGTH // PHASE
    steps = groups * turn
    target = jnp.asarray(pattern(steps, outputs, seed))
    clock = jax.nn.one_hot(jnp.arange(steps) // turn, groups).repeat(CLOCK, -1)
    rates = NOISE + (TICK - NOISE) * clock

    def draw(key: Array, batch_size: int, part: str) -> Batch:
        xs = firing(key, jnp.broadcast_to(rates[:, None], (steps, batch_size, groups * CLOCK)), dt)
        ys = jnp.broadcast_to(target[:, None], (steps, batch_size, outputs))
        return Batch(xs, ys, jnp.ones(steps))

    sizes = steps, groups * CLOCK, outputs
    return judged('pattern', sizes, draw, 'mse', 1.0, [0.0] * outputs)


def pattern(steps: int, outputs: int, seed: int) -> np.ndarray:
    """The target (steps, outputs)."""
    rng = np.random.default_rng(seed)
    size = rng.uniform(0.5, 2, (len(HERTZ), outputs))
    phase = rng.uniform(0, 2 * np.pi, (len(HERTZ), outputs))
    angle = 2 * np.pi * np.arange(steps)[:, None] / steps * HERTZ
    waves = (size * np.sin(angle[..., None] + phase)).sum(1)
    return ((waves - waves.mean(0)) / waves.std(0)).astype(np.float32)
