"""A batch that lies on several devices: each holds its lanes' part of the trace, and what they
exchange is the gradient.

    python examples/sharded.py

It takes the GPUs or TPUs that there are, and else eight devices that the CPU stands for.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import braintrace
from braintrace import functional, rules

BATCH, INPUTS, UNITS, STEPS = 16, 8, 32, 50


def cell(params, h, x):
    """A vanilla RNN with a readout."""
    h = jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['w'], params['b']))
    return h @ params['out'], h


def loss(y, target):
    """The loss of one step."""
    return jnp.mean((y - target) ** 2)


def main(rounds: int = 5) -> list[float]:
    """Train on all devices; the mean loss of each round."""
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ('data',), axis_types=automatic)
    everywhere, lanes = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, 'data'))
    w, out = jax.random.split(jax.random.key(0))
    params = {
        'w': jax.random.normal(w, (INPUTS + UNITS, UNITS)) / (INPUTS + UNITS) ** 0.5,
        'b': jnp.zeros(UNITS),
        'out': jax.random.normal(out, (UNITS, 1)) / UNITS**0.5,
    }
    xs = jax.random.normal(jax.random.key(1), (STEPS, BATCH, INPUTS))
    ys = xs[..., :1] / 2  # the mean of the last two inputs
    ys = ys.at[1:].add(ys[:-1])

    learner, optimizer = functional.online(cell, rules.d_rtrl()), optax.adam(1e-2)
    h = jnp.zeros((BATCH, UNITS))
    jax.eval_shape(learner.init, params, h, xs[0])  # compiles, allocates nothing
    whole = dict.fromkeys(params, P())
    specs = learner.partition_specs(whole, batch_axis='data', mesh=mesh)
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    params, (xs, ys) = jax.device_put(params, everywhere), jax.device_put((xs, ys), lanes)
    state = jax.jit(learner.init, out_shardings=places)(params, h, xs[0])
    opt_state = optimizer.init(params)
    train = jax.jit(
        learner.sequence_update(loss, optimizer, update_every=2),
        out_shardings=functional.Trained(None, None, None, places, None),
        donate_argnums=2,
    )
    print(learner.report.at(BATCH, param_specs=whole, batch_axis='data', mesh=mesh).share)
    means = []
    for _ in range(rounds):
        params, losses, _, state, opt_state, *_ = train(params, opt_state, state, xs, ys)
        means.append(float(losses.mean()))
        print(f'mean loss {means[-1]:.4f}')
    (trace,) = state.trace['w'].values()
    part = trace['weight'][0].addressable_shards[0].data
    print(f'the trace: {trace["weight"][0].shape}, of it on each device: {part.shape}')
    return means


if __name__ == '__main__':
    jax.config.update('jax_num_cpu_devices', 8)
    main()
