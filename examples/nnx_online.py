"""A Flax NNX model learns handwritten digits online, a row of pixels at a step.

The class is asked for after the last row; a readout of that row alone gets about half of them.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.utils import shuffle

import braintrace

TRAIN, ROWS, PIXELS, UNITS, CLASSES, BATCH, UPDATES = 1397, 8, 8, 48, 10, 32, 200


class Model(nnx.Module):
    """A GRU and a readout."""

    def __init__(self, rngs):
        self.cell = nnx.GRUCell(PIXELS, UNITS, rngs=rngs)
        self.head = nnx.Linear(UNITS, CLASSES, rngs=rngs)

    def __call__(self, h, row):
        h, y = self.cell(h, row)
        return h, self.head(y)


loss = lambda logits, labels: optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main():
    """Train, and return the share of test digits that are right."""
    images, labels = map(jnp.asarray, shuffle(*load_digits(return_X_y=True), random_state=0))
    rows = (images.reshape(-1, ROWS, PIXELS) / 16).swapaxes(0, 1)

    model, h = Model(nnx.Rngs(0)), jnp.zeros((BATCH, UNITS))
    cell, params, h = braintrace.adapters.from_nnx(model, rows[0, :BATCH], carry=h)
    learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl(), mark='auto')
    start = learner.init(params, h, rows[0, :BATCH])
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    gradient = jax.jit(learner.sequence_grad(loss, keep_trace=False))
    last = jnp.arange(ROWS) == ROWS - 1
    for batch in jax.random.choice(jax.random.key(1), TRAIN, (UPDATES, BATCH)):
        targets, params = jnp.tile(labels[batch], (ROWS, 1)), nnx.state(model, nnx.Param)
        grads, losses, *_ = gradient(params, start, rows[:, batch], targets, mask=last)
        optimizer.update(model, grads)  # the gradients are an nnx.State, as of nnx.grad

    h = jnp.zeros((len(labels) - TRAIN, UNITS))
    for row in rows[:, TRAIN:]:
        h, logits = model(h, row)
    accuracy = float((logits.argmax(-1) == labels[TRAIN:]).mean())
    print(f'Flax NNX: {100 * accuracy:.1f} % of the test digits right')
    return accuracy


if __name__ == '__main__':
    main()
