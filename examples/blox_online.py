"""A blox model learns online; its container of parameters is taken apart and put back.

The task is to say what came two steps before, in sixteen streams; without memory the error is 1.
"""

import blox as bx
import jax
import jax.numpy as jnp
import optax

import braintrace

UNITS, BATCH, STEPS, DELAY = 32, 16, 1500, 2


class Model(bx.Module):
    """A GRU and a readout."""

    def __init__(self, graph, rng):
        super().__init__(graph)
        self.gru = bx.GRU(graph.child('gru'), UNITS, rng)
        self.head = bx.Linear(graph.child('head'), 1, rng)

    def __call__(self, params, x, state):
        (y, state), params = self.gru(params, x, state)
        y, params = self.head(params, y)
        return (y, state), params


loss = lambda outputs, targets: jnp.mean((outputs - targets) ** 2)


def main():
    """Train, and return the error at the end."""
    xs = jax.random.rademacher(jax.random.key(0), (STEPS, BATCH, 1), dtype=jnp.float32)
    ys = jnp.roll(xs, DELAY, axis=0)

    graph = bx.Graph('net')
    rng = bx.Rng(graph.child('rng'))
    model = Model(graph.child('model'), rng)
    start, container = model.gru.initial_state(rng.seed(bx.Params(), seed=0), xs[0])
    _, container = model(container, xs[0], start)
    cell, params, carry = braintrace.adapters.from_blox(model, container, xs[0], carry=start)

    learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl(), mark='auto')
    optimizer = optax.adam(1e-2)
    learn = jax.jit(learner.sequence_update(loss, optimizer))
    state, opt_state = learner.init(params, carry, xs[0]), optimizer.init(params)
    params, losses, _, state, *_ = learn(params, opt_state, state, xs, ys)
    container = braintrace.adapters.to_blox(params, container)
    new = jax.random.rademacher(jax.random.key(2), xs.shape, dtype=jnp.float32)
    outputs = jax.lax.scan(lambda h, x: model(container, x, h)[0][::-1], start, new)[1]
    error = float(loss(outputs[DELAY:], new[:-DELAY]))
    print(f'blox: error {losses[:50].mean():.3f} at first, {error:.3f} on a new stream')
    return error


if __name__ == '__main__':
    main()
