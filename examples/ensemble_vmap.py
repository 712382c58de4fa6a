"""Eight seeds and learning rates of one model learn online as one program, by `jax.vmap`.

The task is to say what came two steps before. A model without memory has an error of 1, the
variance of the targets.
"""

import jax
import jax.numpy as jnp
import optax

import braintrace

UNITS, STEPS, DELAY = 32, 3000, 2


def cell(params, h, x):
    """A minimal gated unit that forgets by its own gate."""
    y = jnp.concatenate([x, h]) @ params['W'] + params['bias']
    u, z = jnp.split(y, 2)
    h = h + jax.nn.sigmoid(z) * (jnp.tanh(u) - h)
    return h @ params['readout'], h


loss = lambda output, target: jnp.sum((output - target) ** 2)


def main():
    """Train all, and return the smallest error."""
    xs = jax.random.rademacher(jax.random.key(0), (STEPS, 1), dtype=jnp.float32)
    ys = jnp.roll(xs, DELAY, axis=0)
    learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl(), mark='auto')
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)
    learn = learner.sequence_update(loss, optimizer)

    def run(key, rate):
        of_w, of_readout = jax.random.split(key)
        params = {
            'W': 0.2 * jax.random.normal(of_w, (1 + UNITS, 2 * UNITS)),
            'bias': jnp.zeros(2 * UNITS),
            'readout': 0.2 * jax.random.normal(of_readout, (UNITS, 1)),
        }
        state, opt_state = learner.init(params, jnp.zeros(UNITS), xs[0]), optimizer.init(params)
        opt_state.hyperparams['learning_rate'] = rate
        _, losses, *_ = learn(params, opt_state, state, xs, ys)
        return losses[-500:].mean()

    keys, rates = jax.random.split(jax.random.key(1), 8), jnp.geomspace(1e-4, 1e-2, 8)
    errors = jax.jit(jax.vmap(run))(keys, rates)
    for rate, error in zip(rates, errors):
        print(f'learning rate {rate:.4f}: error {error:.3f}')
    return float(errors.min())


if __name__ == '__main__':
    main()
