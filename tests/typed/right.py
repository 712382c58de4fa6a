"""What a user writes, with the type of each answer; ``tests/test_typing.py`` has it checked."""

from typing import assert_type

import jax
import jax.numpy as jnp
import optax

import braintrace
from braintrace import adapters, functional, rules, verify

x, model, other = jnp.zeros((3, 2)), braintrace.nn.GRUCell(2, 4), braintrace.nn.GRUCell(2, 4)
xs, ys = jnp.ones((5, 3, 2)), jnp.ones((5, 3, 4))

# a learner of a module
learner = braintrace.compile(model, 'D_RTRL', x, batch_size=3, seed=0)
assert_type(learner, braintrace.ETraceLearner)
assert_type(braintrace.compile(other, rules.d_rtrl(), x, batch_size=3), braintrace.ETraceLearner)
assert_type(braintrace.D_RTRL(model, credit='whole'), braintrace.D_RTRL)
assert_type(braintrace.ES_D_RTRL(model, 0.9), braintrace.ES_D_RTRL)
assert_type(learner(x), jax.Array)
assert_type(learner.update(x), jax.Array)
assert_type(learner.graph, braintrace.ETraceGraph)
assert_type(learner.report, braintrace.Report)
assert_type(learner.save(), dict[str, jax.Array])


def step_fn(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((learner(x) - y) ** 2)


found = learner.etrace_grad(xs, ys, step_fn=step_fn, window=None, keep_trace=False)
assert_type(found.losses, jax.Array)
grads, losses, aux, state = found
assert_type(losses, jax.Array)
assert_type(state, None)
trained = learner.etrace_train(xs, ys, step_fn=step_fn, optimizer=optax.adam(1e-2), update_every=2)
assert_type(trained.losses, jax.Array)
assert_type(trained.skipped, functional.Skipped | None)

# ops
assert_type(braintrace.matmul(x, jnp.ones((2, 4))), jax.Array)
assert_type(braintrace.element_wise(jnp.ones(4), jnp.tanh), jax.Array)
assert_type(braintrace.einsum('bi,io->bo', x, jnp.ones((2, 4))), jax.Array)
assert_type(braintrace.conv(jnp.ones((1, 5, 2)), jnp.ones((3, 5, 4)), strides=1), jax.Array)

# pure functions
Params = dict[str, jax.Array]


def cell(params: Params, h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    h = jnp.tanh(0.9 * h + braintrace.matmul(x, params['W']))
    return h, h


def loss_fn(outputs: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((outputs - target) ** 2)


params: Params = {'W': jnp.ones((2, 4))}
online = functional.online(cell, rules.d_rtrl())
assert_type(online, functional.OnlineLearner)
begin = online.init(params, jnp.zeros((3, 4)), x)
assert_type(begin, functional.OnlineState)
one = online.grad(loss_fn)(params, begin, x, ys[0])
assert_type(one, functional.StepGradient[Params, jax.Array, functional.OnlineState])
assert_type(one.grads, Params)
assert_type(one.state, functional.OnlineState)
heads = online.heads(loss_fn, loss_fn)(params, begin, x, ys[0])
assert_type(heads.grads, tuple[Params, ...])
whole = online.sequence_grad(loss_fn, reduction='sum')(params, begin, xs, ys)
assert_type(whole.grads, Params)
optimizer = optax.adam(1e-2)
update = online.sequence_update(loss_fn, optimizer, update_every=2, not_finite='reset')
end = update(params, optimizer.init(params), begin, xs, ys, None, (None, jnp.zeros((3, 4))))
assert_type(end, functional.Trained[Params, functional.OnlineState])
assert_type(end.params, Params)
assert_type(rules.rtrl(layers='each'), rules.Rule)
assert_type(online.report, braintrace.Report)
assert_type(verify.diagnose(learner, xs, ys, loss_fn), verify.Diagnosis)
carry: object = adapters.from_brainstate(model, x)[2]
