"""A spiking network moves by NIR to a simulator with other steps, and learns on there.

It was trained with steps of 1 ms and resets to zero. Where it comes to, a step is twice as long
and a spike subtracts the threshold: it says fewer of its seven patterns right. D_RTRL takes it from
there; the gradient of each step alone is beside it.
"""

import jax
import jax.numpy as jnp
import nir
import numpy as np
import optax

from braintrace import adapters, functional, rules

CLASSES, CHANNELS, UNITS, STEPS, BATCH = 7, 12, 32, 48, 32
THERE = {'dt': 2e-3, 'reset': 'subtract'}
RATES = 0.05 + 0.45 * jax.random.uniform(jax.random.key(0), (CLASSES, 6, CHANNELS)) ** 2

loss = lambda y, label: optax.softmax_cross_entropy_with_integer_labels(y, label).mean()


def graph():
    """Recurrent neurons below a leaky readout, with random weights."""
    rng = np.random.default_rng(0)

    def affine(n_out, n_in, scale):
        return nir.Affine(scale * rng.normal(size=(n_out, n_in)) / n_in**0.5, np.zeros(n_out))

    one, readout = np.ones(UNITS), np.ones(CLASSES)
    lif = nir.CubaLIF(5e-3 * one, 2e-2 * one, one, 0 * one, 0.3 * one, w_in=3 * one)
    nodes = {'input': nir.Input(np.array([CHANNELS])), 'output': nir.Output(np.array([CLASSES]))}
    nodes |= {'fc1': affine(UNITS, CHANNELS, 2), 'lif': lif, 'back': affine(UNITS, UNITS, 1)}
    nodes |= {'fc2': affine(CLASSES, UNITS, 2), 'li': nir.LI(2e-2 * readout, readout, 0 * readout)}
    way = ['input', 'fc1', 'lif', 'fc2', 'li', 'output']
    return nir.NIRGraph(nodes, [*zip(way, way[1:]), ('lif', 'back'), ('back', 'lif')])


def sample(key, batch, dt):
    """Spikes of steps of 1 ms, averaged over ``dt``, and their pattern, asked at the last step."""
    of_label, of_spikes = jax.random.split(key)
    labels = jax.random.randint(of_label, (batch,), 0, CLASSES)
    p = jnp.repeat(jnp.swapaxes(RATES[labels], 0, 1), STEPS // len(RATES[0]), 0)
    xs = jax.random.bernoulli(of_spikes, p).reshape(-1, round(dt * 1e3), batch, CHANNELS).mean(1)
    return xs, jnp.broadcast_to(labels, (len(xs), batch)), jnp.zeros(len(xs)).at[-1].set(1)


def score(graph, **where):
    """The share of 512 samples whose pattern has the largest potential in the end."""
    cell, params, carry = adapters.from_nir(graph, batch_size=512, **where)
    xs, ys, _ = sample(jax.random.key(1), 512, where['dt'])
    outputs = jax.lax.scan(lambda carry, x: cell(params, carry, x)[::-1], carry, xs)[1]
    return float((outputs[-1].argmax(-1) == ys[-1]).mean())


def learned(graph, rule, updates, rate, where, **options):
    """The graph after so many updates, each for 32 new samples."""
    cell, params, carry = adapters.from_nir(graph, batch_size=BATCH, surrogate='arctan', **where)
    learner, optimizer = functional.online(cell, rule), optax.adam(rate)
    start = learner.init(params, carry, sample(jax.random.key(0), BATCH, where['dt'])[0][0])
    gradient = learner.sequence_grad(loss, keep_trace=False, **options)

    def update(at, key):
        grads, *_ = gradient(at[0], start, *sample(key, BATCH, where['dt']))
        change, moments = optimizer.update(grads, at[1], at[0])
        return (optax.apply_updates(at[0], change), moments), None

    keys = jax.random.split(jax.random.key(2), updates)
    (params, _), _ = jax.jit(lambda at: jax.lax.scan(update, at, keys))(
        (params, optimizer.init(params))
    )
    return adapters.to_nir(graph, params)


def main(before=400, after=300):
    """Train, move, learn on, and return the scores of the table."""
    here = {'dt': 1e-3, 'reset': 'zero'}
    bptt = {'inside': 'exact', 'window': None}  # as other simulators train
    trained = learned(graph(), rules.d_rtrl(), before, 3e-3, here, **bptt)
    scores = {'trained, steps of 1 ms': score(trained, **here), 'moved': score(trained, **THERE)}
    for rule in (rules.d_rtrl(), rules.same_step()):
        new = learned(trained, rule, after, 1e-3, THERE)
        scores[f'moved, {after} updates of {rule.name}'] = score(new, **THERE)
    print('| network | right |\n|---|---|')
    print('\n'.join(f'| {name} | {share:.1%} |' for name, share in scores.items()))
    return [*scores.values()]


if __name__ == '__main__':
    main()
