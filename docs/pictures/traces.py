"""Draws `traces.svg`: the eligibility traces of three weights of a spiking neuron, as they grow.

A run of a layer of adaptive neurons. `python docs/pictures/traces.py [FILE]` needs matplotlib.
"""

from __future__ import annotations

import sys
from pathlib import Path

import brainstate
import jax.numpy as jnp
import numpy as np
from drawing import BLUE, FAINT, GREEN, INK, ORANGE, save, style, target
from matplotlib.figure import Figure

import braintrace

STEPS, COLOURS = 240, (BLUE, ORANGE, GREEN)
BURSTS = ((10, 60), (80, 130), (150, 200))  # when each input is active


class Layer(brainstate.nn.Module):
    """Three inputs, one neuron whose threshold rises with each of its spikes."""

    def __init__(self):
        super().__init__()
        self.drive = braintrace.nn.Linear(3, 1, w_init=jnp.full((3, 1), 0.42), b_init=None)
        self.neurons = braintrace.nn.ALIF(1, tau=8.0, tau_a=80.0, beta=0.15, R=8.0)

    def update(self, x):
        return self.neurons(self.drive(x))


def inputs() -> np.ndarray:
    """Spikes, each input in its burst."""
    rng = np.random.default_rng(3)
    found = np.zeros((STEPS, 1, 3), np.float32)
    for k, (start, stop) in enumerate(BURSTS):
        found[start:stop, 0, k] = rng.random(stop - start) < 0.35
    return found


def run() -> dict[str, np.ndarray]:
    """Spikes, states and traces at every step."""
    xs = inputs()
    learner = braintrace.compile(Layer(), 'D_RTRL', jnp.asarray(xs[0]), batch_size=1)
    neurons, weight = learner.model.neurons, learner.model.drive.weight
    found: dict[str, list] = {'V': [], 'a': [], 'out': [], 'e': []}
    for x in xs:
        found['out'].append(learner(jnp.asarray(x))[0, 0])
        found['V'].append(neurons.V.value[0, 0])
        found['a'].append(neurons.a.value[0, 0])
        ((_, entries),) = learner.get_etrace_of(weight).items()
        found['e'].append(np.asarray(entries['weight'])[0, :, 0])
    return {'in': xs[:, 0]} | {name: np.asarray(values) for name, values in found.items()}


def draw(figure: Figure, found: dict[str, np.ndarray]) -> None:
    heights = [1, 1.6, 1.6, 1.6]
    spikes, states, of_v, of_a = figure.subplots(4, 1, sharex=True, height_ratios=heights)
    for k, colour in enumerate(COLOURS):
        times = np.flatnonzero(found['in'][:, k])
        spikes.vlines(times, 2 - k + 0.1, 2 - k + 0.9, color=colour, lw=1.4)
        of_v.plot(found['e'][:, k, 0], color=colour)
        of_a.plot(found['e'][:, k, 1], color=colour)
    spikes.set_yticks([2.5, 1.5, 0.5], ['input 1', 'input 2', 'input 3'])
    spikes.set(ylim=(0, 3))
    states.plot(found['V'], color=INK, lw=1.2, label='potential V')
    states.plot(1 + 0.15 * found['a'], color=FAINT, lw=1.2, ls='--', label='threshold')
    times = np.flatnonzero(found['out'])
    states.plot(times, np.full(len(times), 2.4), '|', color=INK, ms=7, label='spikes')
    states.legend(frameon=False, ncols=3, loc='upper left', fontsize=8.5, borderaxespad=0)
    states.set_ylim(top=3.6)
    titles = {
        'the inputs': spikes,
        'the neuron': states,
        'traces of the potential, dV/dw': of_v,
        'traces of the adaptation, da/dw': of_a,
    }
    for title, axes in titles.items():
        axes.set_title(title, loc='left', fontsize=10)
        for start, _ in BURSTS:
            axes.axvline(start, color=FAINT, lw=0.5, ls=':')
    of_a.set(xlabel='step', xlim=(0, STEPS))


def main(arguments: list[str]) -> Path:
    found = run()
    with style('traces'):
        figure = Figure(figsize=(7.2, 6.4), layout='constrained')
        draw(figure, found)
        return save(figure, target(arguments, 'traces.svg'))


if __name__ == '__main__':
    print(main(sys.argv[1:]))
