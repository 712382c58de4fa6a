"""A linear recurrent unit reads handwritten digits pixel by pixel, and names them at the last one.

Its units do not read each other, so D_RTRL is back-propagation through time, forward in time.
"""

from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import braintrace
from braintrace import nn, rules, tasks

FEATURES, UNITS = 32, 64


class Network(brainstate.nn.Module):
    """An LRU behind fixed random features of the pixel, and one hidden layer."""

    def __init__(self):
        super().__init__()
        drawn = np.random.default_rng(0).normal(size=(2, FEATURES))
        self.features = jnp.asarray(drawn, jnp.float32)
        self.cell = nn.LRUCell(FEATURES, UNITS, r_min=0.8, r_max=0.996, max_phase=1.0)
        self.hidden = nn.Linear(FEATURES, UNITS)
        self.readout = nn.Linear(
            UNITS, 10, w_init=0.01 * brainstate.random.normal(size=(UNITS, 10))
        )

    def update(self, pixel):
        with_one = jnp.concatenate([pixel, jnp.ones_like(pixel)], -1)
        features = jax.nn.relu(with_one @ self.features)
        return self.readout(jax.nn.relu(self.hidden(self.cell(features))))


def main(updates=600, batch=50, path=Path(__file__).parent / 'output' / 'pixels.png'):
    """Learn, draw what the network says of some pictures, and return the share of test pictures
    that it names.
    """
    task = tasks.digits('pixels')
    adam = optax.adam(optax.cosine_decay_schedule(3e-3, updates))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)
    model = lambda seed: Network()
    found = tasks.run(
        task, model, rules.d_rtrl(), optimizer, updates, batch_size=batch, progress=True
    )
    print(found)
    xs, ys, _ = task.sample(jax.random.key(0), 6, 'test')
    learner = braintrace.compile(Network(), rules.d_rtrl(), xs[0], batch_size=6)
    found.load_into(learner, 0)
    logits = braintrace.evaluate(learner, xs, ys, lambda outputs, ys: outputs)
    figure, axes = plt.subplots(2, 6, figsize=(13, 4.5), layout='constrained')
    for i, (picture, sure) in enumerate(axes.T):
        picture.imshow(xs[:, i, 0].reshape(8, 8), cmap='gray_r')
        picture.set(xticks=[], yticks=[], title=f'a {ys[0, i]}')
        sure.bar(range(10), jax.nn.softmax(logits[-1, i]))
        sure.set(xticks=range(10), ylim=(0, 1), xlabel='digit')
    axes[1, 0].set_ylabel('probability, at the last pixel')
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    return float(found.scores[0])


if __name__ == '__main__':
    main()
