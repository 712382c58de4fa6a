"""Spiking neurons learn to say on which side more cues appeared (Bellec et al., 2020, fig. 4).

Seven cues come within a second, and the answer is asked for a second later: 225 steps of 10 ms.
The adaptation of half of the neurons carries the memory.
"""

from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

from braintrace import compile as compile_model
from braintrace import evaluate, nn, rules, tasks

UNITS, TAU, TAU_A, TAU_OUT, RATE = 100, 2, 200, 2, 0.1  # steps; spikes a step


class Network(brainstate.nn.Module):
    """50 LIF and 50 ALIF neurons, which see the input and each other."""

    def __init__(self):
        super().__init__()
        left, adapts = np.exp(-1 / TAU), np.arange(UNITS) >= UNITS // 2
        beta = 1.7 * (1 - np.exp(-1 / TAU_A)) / (1 - left) * adapts
        weights = [brainstate.random.normal(size=(n, UNITS)) / n**0.5 for n in (40, UNITS)]
        self.map = nn.Linear(40 + UNITS, UNITS, w_init=jnp.concatenate(weights))
        self.units = nn.ALIF(UNITS, TAU, TAU_A, beta, R=1 / (1 - left), V_th=0.6)
        self.readout = nn.FilteredReadout(UNITS, 2, TAU_OUT)

    def update(self, x):
        spikes = self.units(self.map(jnp.concatenate([x, self.units.get_spike()], -1)))
        return self.readout(spikes), spikes


def penalty(spikes):
    """How far firing rates are from ten spikes a second."""
    return 0.02 * jnp.mean((spikes.mean(0) - RATE) ** 2)


def main(updates=300, batch=32, path=Path(__file__).parent / 'output' / 'evidence.png'):
    """Learn, draw the way and a trial, and return the share of right answers."""
    task = tasks.evidence(dt=10)
    adam = optax.adam(optax.cosine_decay_schedule(1e-2, updates))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)
    options = {'batch_size': batch, 'penalty': penalty, 'test': 10 * batch, 'progress': True}
    found = tasks.run(task, lambda seed: Network(), rules.d_rtrl(), optimizer, updates, **options)
    print(found)
    xs, ys, mask = task.sample(jax.random.key(0), 1, 'test')
    learner = compile_model(Network(), rules.d_rtrl(), xs[0], batch_size=1)
    found.load_into(learner, 0)
    logits, spikes = evaluate(learner, xs, ys, lambda outputs, ys: outputs)
    fired = jnp.concatenate([xs, spikes], -1)[:, 0]
    figure, axes = plt.subplots(1, 3, figsize=(14, 4), layout='constrained')
    axes[0].plot(*zip(*[(done, score.mean()) for done, score in found.validation]), 'o-')
    axes[0].axhline(task.floor, color='grey', linestyle=':')
    axes[0].set(xlabel='updates', ylabel='share of right answers', ylim=(0.4, 1))
    colours = 40 * ['k'] + 50 * ['C0'] + 50 * ['C3']
    axes[1].eventplot([np.flatnonzero(s) / 100 for s in fired.T], colors=colours)
    axes[1].set(xlabel='time (s)', ylabel='inputs (black), LIF (blue), ALIF (red)')
    axes[2].plot(np.arange(task.steps) / 100, jax.nn.softmax(logits[:, 0])[:, ys[0, 0]])
    for axis in axes[1:]:  # when the answer is asked for
        axis.axvspan(*(np.flatnonzero(mask)[[0, -1]] / 100), color='gold', alpha=0.3)
    axes[2].set(xlabel='time (s)', ylabel='probability of the right answer', ylim=(0, 1))
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    return float(found.scores[0])


if __name__ == '__main__':
    main()
