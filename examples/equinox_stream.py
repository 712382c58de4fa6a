"""An Equinox model learns from a stream, one sample and one update at a time.

The task is to say what came two steps before; without memory the error is 1.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import braintrace

UNITS, STEPS, DELAY = 32, 4000, 2


class Model(eqx.Module):
    """A GRU and a readout, for one sample."""

    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, key):
        of_cell, of_head = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(1, UNITS, key=of_cell)
        self.head = eqx.nn.Linear(UNITS, 1, key=of_head)

    def __call__(self, x, h):
        h = self.cell(x, h)
        return self.head(h), h


loss = lambda output, target: jnp.sum((output - target) ** 2)


def main():
    """Train, and return the error at the end."""
    xs = jax.random.rademacher(jax.random.key(0), (STEPS, 1), dtype=jnp.float32)
    ys = jnp.roll(xs, DELAY, axis=0)

    model = Model(jax.random.key(1))
    cell, params, h = braintrace.adapters.from_equinox(model, xs[0], carry=jnp.zeros(UNITS))
    learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl(), mark='auto')
    optimizer = optax.adam(3e-3)
    learn = jax.jit(learner.sequence_update(loss, optimizer), donate_argnums=2)
    state, opt_state = learner.init(params, h, xs[0]), optimizer.init(params)
    for part in jnp.split(jnp.arange(STEPS), 4):  # the state goes on
        given = params, opt_state, state, xs[part], ys[part]
        params, losses, _, state, opt_state, *_ = learn(*given)
        print(f'{part[-1] + 1:5} steps: error {losses.mean():.3f}')

    model = eqx.combine(params, model)
    h = state.carry
    for x in xs[:3]:
        output, h = model(x, h)
    print(f'the model again: {output[0]:.2f} for {xs[0, 0]:.0f} two steps before')
    return float(losses.mean())


if __name__ == '__main__':
    main()
