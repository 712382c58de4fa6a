"""Calls that a type checker has to find, one in each line that ends with ``# wrong``."""

import jax
import jax.numpy as jnp
import optax

import braintrace
from braintrace import functional, rules

x, model = jnp.zeros((3, 2)), braintrace.nn.GRUCell(2, 4)
xs, ys = jnp.ones((5, 3, 2)), jnp.ones((5, 3, 4))
learner = braintrace.compile(model, 'D_RTRL', x, batch_size=3)
online = functional.online(lambda params, h, x: (h, h), rules.d_rtrl())


def step_fn(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((learner(x) - y) ** 2)


def loss_fn(outputs: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((outputs - target) ** 2)


state = online.init({'W': x}, x, x)
braintrace.compile(model, 3, x)  # wrong
braintrace.D_RTRL(model, credit='all')  # wrong
braintrace.ES_D_RTRL(model)  # wrong
braintrace.nn.GRUCell(2, 4, w_int=None)  # wrong
learner.etrace_grad(xs, ys)  # wrong
learner.etrace_grad(xs, ys, step_fn=3)  # wrong
learner.etrace_grad(xs, ys, step_fn=step_fn, inside='bptt')  # wrong
learner.etrace_grad(xs, ys, step_fn=step_fn, windows=3)  # wrong
print(learner.etrace_grad(xs, ys, step_fn=step_fn).loss)  # wrong
learner.etrace_train(xs, ys, step_fn=step_fn, optimizer='adam')  # wrong
learner.etrace_train(xs, ys, step_fn=step_fn, optimizer=optax.sgd(1.0), every=2)  # wrong
braintrace.matmul(x)  # wrong
rules.d_rtrl(scope='everything')  # wrong
rules.e_prop(feedback='symmetrical')  # wrong
online.sequence_grad(loss_fn, reduction='average')  # wrong
online.sequence_update(loss_fn)  # wrong
online.sequence_update(loss_fn, 0.1)  # wrong
online.grad(loss_fn)({'W': x}, x, xs)  # wrong
online.sequence_grad(loss_fn)({'W': x}, state, xs)  # wrong
functional.online(3)  # wrong
