"""A step of a spiking network with millions of synapses, beside the same step written by hand.

python benchmarks/sparse.py [--synapses N] [--degree K] [--steps T] [--order row|column]
                            [--rules es,d] [--lanes B] [--json FILE]

The network: one sparse recurrent layer of leaky neurons with a synaptic current, and a dense
readout; a step gives the loss and the gradients. Beside it, in the same process and turn by turn:
ES_D_RTRL written by hand, by kernels of `numba` and `brainevent` where both are installed, else by
XLA; one pass over the synapses; one read and one write of D_RTRL's trace. Times are CPU
milliseconds, medians; the ratios are what counts.

A gradient of 40 MB is fresh memory at each step. glibc returns it to the system page by page, which
takes as long as computing it; `GLIBC_TUNABLES=glibc.malloc.hugetlb=1` asks for pages of 2 MB.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import braintrace
from braintrace import functional, rules

MEMBRANE, SYNAPSE, DECAY = float(np.exp(-1 / 20)), float(np.exp(-1 / 5)), 0.9
GAIN = 1 - MEMBRANE


@jax.custom_jvp
def spike(v):
    """1 where v is positive, with a triangle as its derivative."""
    return (v > 0).astype(v.dtype)


@spike.defjvp
def _spike_jvp(primals, tangents):
    (v,), (dot,) = primals, tangents
    return spike(v), 0.3 * jnp.maximum(0.0, 1 - jnp.abs(v)) * dot


class Network:
    """Sizes, places and numbers of one network; every neuron sends to ``degree`` others."""

    def __init__(self, neurons: int, degree: int, order: str = 'row', lanes: int = 0):
        self.neurons, self.entries, rng = neurons, neurons * degree, np.random.default_rng(0)
        columns = rng.integers(0, neurons, (neurons, degree), dtype=np.int32)
        columns.sort(1)
        rows, columns = np.repeat(np.arange(neurons, dtype=np.int32), degree), columns.ravel()
        if order == 'column':
            by_column = np.argsort(columns, kind='stable')
            rows, columns = rows[by_column], columns[by_column]
        self.structure = jax.tree.map(
            jnp.asarray, braintrace.SparseStructure(rows, columns, (neurons, neurons))
        )
        weights = rng.uniform(0.5, 1.5, self.entries).astype(np.float32) * 0.5 / np.sqrt(degree)
        self.weights = jnp.asarray(weights, jnp.float32)
        self.readout = jnp.asarray(rng.normal(size=(neurons, 2)) / np.sqrt(neurons), jnp.float32)
        shape = (lanes, neurons) if lanes else (neurons,)
        self.start = {
            'v': jnp.asarray(rng.uniform(0, 1, shape), jnp.float32),
            's': jnp.asarray(rng.uniform(0, 1, shape), jnp.float32),
            'z': jnp.zeros(shape),
        }
        self.input = jnp.asarray(rng.uniform(0, 0.12, shape), jnp.float32)

    @property
    def params(self):
        return {'w': self.weights, 'readout': self.readout, 'places': self.structure}


def cell(params, carry, x):
    y = braintrace.sparse_matmul(carry['z'], params['w'], sparse_mat=params['places'])
    s = SYNAPSE * carry['s'] + y
    kept = 1 - jax.lax.stop_gradient(carry['z'])  # a spike puts the membrane back
    v = MEMBRANE * carry['v'] * kept + GAIN * s + x
    z = spike(v - 1.0)
    return z @ params['readout'], {'v': v, 's': s, 'z': z}


def loss(output, target):
    return jnp.mean((output - target) ** 2)


# the step by hand ---------------------------------------------------------------------------------


GET = {'mode': 'promise_in_bounds', 'wrap_negative_indices': False}


def passes():
    """``forward(z, w, structure)`` and ``outer(x, d, structure)`` by XLA."""

    def forward(z, w, structure):
        products = z.at[structure.rows].get(**GET)[:, None] * w[:, None]
        zeros = jnp.zeros((structure.shape[1], 1), w.dtype)
        return zeros.at[structure.columns].add(products, **GET)[:, 0]

    def outer(x, d, structure):
        x, d = jax.lax.optimization_barrier((x, d))
        return x.at[structure.rows].get(**GET) * d.at[structure.columns].get(**GET)

    return forward, outer


def kernel_passes():
    """The same by kernels for entries sorted by row; None where a package is missing."""
    try:
        import brainevent
        import numba
    except ImportError:
        return None

    @numba.njit(fastmath=True)
    def product(z, w, columns, pointers, y):
        y[:] = 0
        for i in range(len(z)):
            if z[i] != 0:
                for k in range(pointers[i], pointers[i + 1]):
                    y[columns[k]] += z[i] * w[k]

    @numba.njit(fastmath=True)
    def gradient(x, d, columns, pointers, g):
        for i in range(len(x)):
            for k in range(pointers[i], pointers[i + 1]):
                g[k] = x[i] * d[columns[k]]

    def call(fn, size, *arrays):
        result = jax.ShapeDtypeStruct((size,), jnp.float32)
        return jax.tree.leaves(brainevent.numba_kernel(fn, outs=result)(*arrays))[0]

    def forward(z, w, structure):
        return call(product, structure.shape[1], z, w, structure.columns, structure.pointers)

    def outer(x, d, structure):
        return call(gradient, structure.size, x, d, structure.columns, structure.pointers)

    return forward, outer


def by_hand(forward, outer, params, carry, trace, x, target):
    """ES_D_RTRL's loss, gradients and next state; the recurrence through spikes is cut."""
    (v, s, z), (ex, ev, es, t) = (carry[n] for n in 'vsz'), trace
    new_s = SYNAPSE * s + forward(z, params['w'], params['places'])
    new_v = MEMBRANE * v * (1 - z) + GAIN * new_s + x
    new_z, slope = spike(new_v - 1.0), 0.3 * jnp.maximum(0.0, 1 - jnp.abs(new_v - 1.0))
    error = new_z @ params['readout'] - target
    to_output = 2 * error / error.size
    ex = DECAY * ex + z
    fs = DECAY * SYNAPSE * es + (1 - DECAY)
    fv = DECAY * (MEMBRANE * (1 - z) * ev + GAIN * SYNAPSE * es) + (1 - DECAY) * GAIN
    d = (params['readout'] @ to_output) * slope * fv / (1 - DECAY ** (t + 1.0))
    grads = {'w': outer(ex, d, params['places']), 'readout': new_z[:, None] * to_output}
    return (error**2).mean(), grads, ({'v': new_v, 's': new_s, 'z': new_z}, (ex, fv, fs, t + 1))


# measuring ----------------------------------------------------------------------------------------


class Timed:
    """A compiled step ``(state, ...) -> (state, loss, gradients)``, its state and its times. The
    state comes first: a gradient with the shape of a trace would be given the trace's memory.
    """

    def __init__(self, name, step, params, state, *rest):
        self.name, self.state, self.times, self.losses = name, state, [], []
        start, cpu = time.perf_counter(), time.process_time()
        lowered = jax.jit(step, donate_argnums=1).lower(params, state, *rest)
        self.run = lowered.compile()
        self.compile_s = time.perf_counter() - start, time.process_time() - cpu
        self.characters = len(lowered.as_text())
        self.memory = self.run.memory_analysis().temp_size_in_bytes
        self.arguments = params, rest

    def turn(self):
        params, rest = self.arguments
        start = time.process_time()
        self.state, loss, grads = jax.block_until_ready(self.run(params, self.state, *rest))
        self.times.append(1e3 * (time.process_time() - start))
        self.losses.append((float(loss), float(jnp.linalg.norm(grads['w']))))

    @property
    def ms(self):
        return statistics.median(self.times[1:])

    @property
    def mean_ms(self):
        """Over all steps: one in several writes a trace."""
        return statistics.mean(self.times[1:])


def learner_of(name, rule, network: Network, target):
    learner = functional.online(cell, rule)
    state = learner.init(network.params, network.start, network.input)
    grad = learner.grad(loss)

    def step(params, state, x, target):
        grads, value, _, state = grad(params, state, x, target)
        return state, value, {n: grads[n] for n in ('w', 'readout')}

    return Timed(name, step, network.params, state, network.input, target)


def hand_step(name, forward, outer, network: Network, target):
    def step(params, state, x, target):
        loss, grads, state = by_hand(forward, outer, params, *state, x, target)
        return state, loss, grads

    n = network.neurons
    carry = jax.tree.map(jnp.copy, network.start)
    trace = *(jnp.zeros(n) for _ in range(3)), jnp.int32(0)
    return Timed(name, step, network.params, (carry, trace), network.input, target)


def floor_of(network: Network, trace):
    """Milliseconds of a pass over the synapses (gather, gather, write), and of one read and one
    write of a trace, in order and in place.
    """
    x = jnp.ones(network.neurons)
    outer = jax.jit(passes()[1])
    trace = [e for e in jax.tree.leaves(trace) if e.shape[-1:] == (network.entries,)]
    move = jax.jit(lambda trace: [0.9 * e + 0.1 for e in trace], donate_argnums=0)
    found: dict = {'pass': [], 'read and write of a trace': []}
    for _ in range(15):
        start = time.process_time()
        jax.block_until_ready(outer(x, x, network.structure))
        found['pass'].append(1e3 * (time.process_time() - start))
        start = time.process_time()
        trace = jax.block_until_ready(move(trace))
        found['read and write of a trace'].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(each[1:]) for name, each in found.items()}


def measured(options) -> dict:
    """All rows and ratios of one network."""
    sizes = options.synapses // options.degree, options.degree
    network = Network(*sizes, options.order, options.lanes)
    target, of = jnp.full(2, 0.5), {}
    by_xla, by_kernel = passes(), kernel_passes() if options.order == 'row' else None
    hand, steps = by_kernel or by_xla, []
    if not options.lanes:
        steps.append(hand_step('by hand', *hand, network, target))
    if 'es' in options.rules:
        steps.append(learner_of('ES_D_RTRL', rules.es_d_rtrl(DECAY), network, target))
    if 'd' in options.rules:
        steps.append(learner_of('D_RTRL', rules.d_rtrl(), network, target))
    for _ in range(options.steps):
        for step in steps:
            step.turn()
    floor = floor_of(network, steps[-1].state.trace if 'd' in options.rules else ())
    for step in steps:
        of[step.name] = {
            'cpu_ms': step.ms,
            'mean_cpu_ms': step.mean_ms,
            'compile: seconds, CPU seconds': step.compile_s,
            'characters of the program': step.characters,
            'temporary_mib': step.memory / 2**20,
            'loss, norm of gradient': step.losses[-1],
        }
    ratios = {}
    if 'ES_D_RTRL' in of:
        if 'by hand' in of:
            ratios['ES_D_RTRL / by hand'] = of['ES_D_RTRL']['cpu_ms'] / of['by hand']['cpu_ms']
        ratios['ES_D_RTRL / pass'] = of['ES_D_RTRL']['cpu_ms'] / floor['pass']
    if 'D_RTRL' in of:
        ratios['D_RTRL / read and write of its trace'] = (
            of['D_RTRL']['mean_cpu_ms'] / floor['read and write of a trace']
        )
    return {
        'synapses': network.entries,
        'order': options.order,
        'lanes': options.lanes,
        'kernels': by_kernel is not None,
        'peak_mib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        'floor_cpu_ms': floor,
        'steps': of,
        'ratios': ratios,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--synapses', type=int, default=10_000_000)
    parser.add_argument('--degree', type=int, default=100)
    parser.add_argument('--steps', type=int, default=9)
    parser.add_argument('--order', choices=['row', 'column'], default='row')
    parser.add_argument('--rules', type=lambda text: text.split(','), default=['es', 'd'])
    parser.add_argument('--lanes', type=int, default=0, help='a batch; no step by hand then')
    parser.add_argument('--json', help='a file for the numbers')
    options = parser.parse_args()
    found = measured(options)
    print(json.dumps(found, indent=1))
    if options.json:
        with open(options.json, 'w') as file:
            json.dump(found, file, indent=1)


if __name__ == '__main__':
    main()
