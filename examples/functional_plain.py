"""A GRU as a plain function learns handwritten digits online, a row of pixels at a step.

The class is asked for after the last row; a readout of that row alone gets about half of them.
"""

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits
from sklearn.utils import shuffle

import braintrace

TRAIN, ROWS, PIXELS, UNITS, CLASSES, BATCH, UPDATES = 1397, 8, 8, 48, 10, 32, 200


def gru(params, h, row):
    """A GRU and a readout."""
    rz = jnp.concatenate([row, h], -1) @ params['rz'] + params['rz_bias']
    r, z = jnp.split(jax.nn.sigmoid(rz), 2, -1)
    n = jnp.tanh(jnp.concatenate([row, r * h], -1) @ params['n'] + params['n_bias'])
    h = (1 - z) * h + z * n
    return h @ params['readout'], h


loss = lambda logits, labels: optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main():
    """Train, and return the share of test digits that are right."""
    images, labels = map(jnp.asarray, shuffle(*load_digits(return_X_y=True), random_state=0))
    rows = (images.reshape(-1, ROWS, PIXELS) / 16).swapaxes(0, 1)
    shapes = {'rz': (PIXELS + UNITS, 2 * UNITS), 'n': (PIXELS + UNITS, UNITS)}
    shapes |= {'rz_bias': (2 * UNITS,), 'n_bias': (UNITS,), 'readout': (UNITS, CLASSES)}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(0), len(shapes))))
    params = {k: 0.1 * jax.random.normal(keys[k], shape) for k, shape in shapes.items()}
    learner = braintrace.functional.online(gru, braintrace.rules.d_rtrl(), mark='auto')
    start = learner.init(params, jnp.zeros((BATCH, UNITS)), rows[0, :BATCH])
    gradient = learner.sequence_grad(loss, keep_trace=False)
    optimizer, last = optax.adam(1e-2), jnp.arange(ROWS) == ROWS - 1

    def update(values, batch):
        (params, opt_state), targets = values, jnp.tile(labels[batch], (ROWS, 1))
        grads, losses, *_ = gradient(params, start, rows[:, batch], targets, mask=last)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), losses[-1]

    batches = jax.random.choice(jax.random.key(1), TRAIN, (UPDATES, BATCH))
    params = jax.lax.scan(update, (params, optimizer.init(params)), batches)[0][0]
    h = jnp.zeros((len(labels) - TRAIN, UNITS))
    for row in rows[:, TRAIN:]:
        logits, h = gru(params, h, row)
    accuracy = float((logits.argmax(-1) == labels[TRAIN:]).mean())
    print(f'plain function: {100 * accuracy:.1f} % of the test digits right')
    return accuracy


if __name__ == '__main__':
    main()
