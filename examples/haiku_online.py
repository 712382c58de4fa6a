"""A Haiku model learns online: Haiku needs no adapter, two lines make the cell.

The task is to say what came two steps before, for sixteen streams at once, with an update at every
step. A model without memory has an error of 1, the variance of the targets.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import braintrace

UNITS, BATCH, STEPS, DELAY = 32, 16, 1500, 2


def model(x, h):
    """A GRU and a readout."""
    y, h = hk.GRU(UNITS)(x, h)
    return hk.Linear(1)(y), h


loss = lambda outputs, targets: jnp.mean((outputs - targets) ** 2)


def main():
    """Train, and return the error at the end."""
    xs = jax.random.rademacher(jax.random.key(0), (STEPS, BATCH, 1), dtype=jnp.float32)
    ys = jnp.roll(xs, DELAY, axis=0)

    step, h = hk.without_apply_rng(hk.transform(model)), jnp.zeros((BATCH, UNITS))
    params = step.init(jax.random.key(1), xs[0], h)

    def cell(params, h, x):
        return step.apply(params, x, h)

    learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl(), mark='auto')
    optimizer = optax.adam(1e-2)
    learn = jax.jit(learner.sequence_update(loss, optimizer))
    state, opt_state = learner.init(params, h, xs[0]), optimizer.init(params)
    params, losses, _, state, *_ = learn(params, opt_state, state, xs, ys)
    error = float(losses[-200:].mean())
    print(f'Haiku: error {losses[:50].mean():.3f} at first, {error:.3f} after {STEPS} steps')
    return error


if __name__ == '__main__':
    main()
