"""A Flax linen model learns online: linen needs no adapter, one line makes the cell.

The task is to say what came two steps before, for sixteen streams at once, with an update at every
step. A model without memory has an error of 1, the variance of the targets.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import braintrace

UNITS, BATCH, STEPS, DELAY = 32, 16, 1500, 2


class Model(nn.Module):
    """An LSTM and a readout."""

    @nn.compact
    def __call__(self, carry, x):
        carry, y = nn.OptimizedLSTMCell(UNITS)(carry, x)
        return carry, nn.Dense(1)(y)


loss = lambda outputs, targets: jnp.mean((outputs - targets) ** 2)


def main():
    """Train, and return the error at the end."""
    xs = jax.random.rademacher(jax.random.key(0), (STEPS, BATCH, 1), dtype=jnp.float32)
    ys = jnp.roll(xs, DELAY, axis=0)

    module, key = Model(), jax.random.key(1)
    carry = nn.OptimizedLSTMCell(UNITS).initialize_carry(key, xs[0].shape)
    params = module.init(key, carry, xs[0])

    def cell(params, carry, x):
        return module.apply(params, carry, x)[::-1]  # linen returns (carry, outputs)

    learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl(), mark='auto')
    optimizer = optax.adam(1e-2)
    learn = jax.jit(learner.sequence_update(loss, optimizer))
    state, opt_state = learner.init(params, carry, xs[0]), optimizer.init(params)
    params, losses, _, state, *_ = learn(params, opt_state, state, xs, ys)
    error = float(losses[-200:].mean())
    print(f'linen: error {losses[:50].mean():.3f} at first, {error:.3f} after {STEPS} steps')
    return error


if __name__ == '__main__':
    main()
