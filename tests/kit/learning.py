"""The gradient of a cell over a sequence, whose targets its losses do not read."""

import jax
import jax.numpy as jnp

from braintrace import functional, rules, verify


def squared(out, _):
    return jnp.sum(out**2)


def cubed(out, _):
    return jnp.sum(out**3)


def leaky(op, decay=0.8):
    """The cell ``h = tanh(decay h' + op(params, x))``."""

    def step(params, h, x):
        h = jnp.tanh(decay * h + op(params, x))
        return h, h

    return step


def online(cell, params, h, xs, rule=None, window=None, loss=cubed):
    """The sum of the gradients of all steps, by windows of so many or by single ``'steps'``."""
    learner = functional.online(cell, rule or rules.d_rtrl())
    state = learner.init(params, h, xs[0])
    if window != 'steps':
        run = jax.jit(learner.sequence_grad(loss, window=window, reduction='sum'))
        return run(params, state, xs, xs)[0]
    total, step = jax.tree.map(jnp.zeros_like, params), jax.jit(learner.grad(loss))
    for x in xs:
        grads, _, _, state = step(params, state, x, x)
        total = jax.tree.map(jnp.add, total, grads)
    return total


def through_time(cell, params, h, xs, loss=cubed):
    """The same by backpropagation."""
    return verify.bptt_gradients(cell, params, h, xs, xs, loss)
