"""Ten symbols are repeated after fifty blank steps; without any credit through time that fails.

The same network learns by D_RTRL and by the gradient of each step alone, with the same updates.
"""

from pathlib import Path

import brainstate
import matplotlib.pyplot as plt
import numpy as np
import optax

from braintrace import nn, rules, tasks


class Network(brainstate.nn.Module):
    """An LRU whose units forget within fifty to a thousand steps."""

    def __init__(self, task):
        super().__init__()
        ring = {'r_min': 0.98, 'r_max': 0.999, 'max_phase': 2 * np.pi}
        self.cell = nn.LRUCell(task.inputs, 96, **ring)
        self.readout = nn.Linear(task.inputs, task.outputs)

    def update(self, x):
        return self.readout(self.cell(x))


def main(delay=50, updates=400, path=Path(__file__).parent / 'output' / 'copy_memory.png'):
    """Learn by both rules, draw their ways, and return their cross-entropies."""
    task, scores = tasks.copy_memory(delay), {}
    figure, axis = plt.subplots(figsize=(6, 4), layout='constrained')
    for rule in (rules.d_rtrl(), rules.same_step()):
        adam = optax.adam(optax.cosine_decay_schedule(1e-2, updates))
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)
        model = lambda seed: Network(task)
        found = tasks.run(task, model, rule, optimizer, updates, batch_size=24, progress=True)
        print(found)
        axis.plot(found.losses[0], label=found.method)
        scores[rule.name] = float(found.scores[0])
    axis.axhline(task.floor, color='grey', linestyle=':', label='knows the times alone')
    axis.set(xlabel='updates', ylabel='cross-entropy (nats)', yscale='log')
    axis.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    return scores


if __name__ == '__main__':
    main()
