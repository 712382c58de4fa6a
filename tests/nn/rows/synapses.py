"""Synapses and projections, each with the neurons behind it."""

import brainstate
import jax.numpy as jnp
import numpy as np
import saiunit as u

from braintrace import nn
from tests.models.ops import JaxOps
from tests.nn.rows.row import Row

DRAWN = brainstate.nn.init.Normal(scale=0.5)
SPIKE = JaxOps().spike
SIGNS = jnp.array([[1], [1], [-1]])


class Feed(brainstate.nn.Module):
    """A projection of the input to leaky neurons."""

    def __init__(self, projection, **neurons):
        super().__init__()
        self.projection = projection
        self.neurons = nn.LIF(5, tau=6.0, spk_fun=SPIKE, **{'V_init': DRAWN} | neurons)

    def update(self, x):
        spikes = self.neurons(self.projection(x, self.neurons.V.value))
        return spikes + self.neurons.V.value / self.neurons.V_th


class Balanced(brainstate.nn.Module):
    """Three excitatory and two inhibitory neurons, which all project to all."""

    def __init__(self):
        super().__init__()
        size = {'w_init': brainstate.nn.init.Normal(scale=0.7)}
        start = {'g_init': brainstate.nn.init.Uniform(0.1, 0.6)}
        high = brainstate.nn.init.Uniform(0.8, 1.6)  # so that both kinds fire
        self.neurons = nn.LIF(5, tau=6.0, spk_fun=SPIKE, V_init=high)
        self.exc, self.inh = (
            nn.Projection(nn.SignedWLinear(n, 5, **size), nn.Expon(5, tau=tau, **start), nn.COBA(E))
            for n, tau, E in ((6, 2.0, 3.0), (2, 4.0, -1.0))
        )

    def update(self, x):
        spikes, V = self.neurons.get_spike(), self.neurons.V.value
        exc = jnp.concatenate([x, spikes[..., :3]], -1)
        return self.neurons(self.exc(exc, V) + self.inh(spikes[..., 3:], V))


class Facilitated(brainstate.nn.Module):
    """Neurons that excite each other through plastic synapses."""

    def __init__(self):
        super().__init__()
        self.neurons = nn.LIF(4, tau=6.0, spk_fun=SPIKE, V_init=DRAWN)
        self.input = nn.Linear(3, 4)
        self.own = nn.Projection(
            nn.Linear(4, 4), nn.Expon(4, tau=3.0), stp=nn.STP(4, U=0.4, tau_f=8.0, tau_d=5.0)
        )

    def update(self, x):
        return self.neurons(3.0 * (self.input(x) + self.own(self.neurons.get_spike())))


def lif(ops, V, current, scale=1.0):
    """Spikes and potential of ``nn.LIF`` with a threshold of ``scale``."""
    V = V - scale * ops.spike(V / scale - 1.0)
    left = np.exp(-1.0 / 6.0)
    V = ops.new('neurons.V', left * V + (1.0 - left) * current)
    return ops.spike(V / scale - 1.0), V


def current_based(ops, p, s, x):
    linear = p['projection.comm.weight']
    y = ops.matmul(x, linear['weight'], linear['bias'])
    g = ops.new('projection.syn.g', np.exp(-1.0 / 4.0) * s['projection.syn.g'] + y)
    spikes, V = lif(ops, s['neurons.V'], 2.0 * ops.within('projection.syn.g', g))
    return spikes + V, {'projection.syn.g': g, 'neurons.V': V}


def dual(ops, p, s, x):
    """In mS, mV and uA; the currents of 5 kOhm."""
    weight = p['projection.comm.weight']
    y = ops.matmul(x, ops.abs(weight) * np.asarray(SIGNS))
    names = decay, rise = 'projection.syn.g_decay', 'projection.syn.g_rise'
    d, r = (
        ops.new(name, np.exp(-0.5 / tau) * s[name] + y)
        for name, tau in zip(names, (5.0, 2.0), strict=True)
    )
    top = 5.0 / 3.0 * np.log(5.0 / 2.0) * 2.0  # the time of the peak
    norm = np.exp(-top / 5.0) - np.exp(-top / 2.0)
    g = (ops.within(decay, d) - ops.within(rise, r)) / norm
    spikes, V = lif(ops, s['neurons.V'], 5.0 * 4.0 * g, scale=15.0)
    return spikes + V / 15.0, {decay: d, rise: r, 'neurons.V': V}


def depressed(ops, p, s, x):
    linear, name = p['projection.comm.weight'], 'projection.stp.x'
    resources = 1.0 - np.exp(-1.0 / 5.0) * (1.0 - s[name])
    used = 0.4 * resources * x
    y = ops.matmul(used, linear['weight'], linear['bias'])
    g = ops.new('projection.syn.g', np.exp(-1.0 / 4.0) * s['projection.syn.g'] + y)
    drive = ops.within('projection.syn.g', g) * (2.0 - s['neurons.V'])
    spikes, V = lif(ops, s['neurons.V'], drive)
    return spikes + V, {name: resources - used, 'projection.syn.g': g, 'neurons.V': V}


def balanced(ops, p, s, x):
    V, (g_e, g_i) = s['neurons.V'], (s['exc.syn.g'], s['inh.syn.g'])
    fired = ops.spike(ops.cut(V) - 1.0)
    exc = ops.matmul(ops.concatenate([x, fired[..., :3]]), ops.abs(p['exc.comm.weight']))
    inh = ops.matmul(fired[..., 3:], ops.abs(p['inh.comm.weight']))
    g_e = ops.new('exc.syn.g', np.exp(-1.0 / 2.0) * g_e + exc)
    g_i = ops.new('inh.syn.g', np.exp(-1.0 / 4.0) * g_i + inh)
    current = ops.within('exc.syn.g', g_e) * (3.0 - V) + ops.within('inh.syn.g', g_i) * (-1.0 - V)
    spikes, V = lif(ops, V, current)
    return spikes, {'exc.syn.g': g_e, 'inh.syn.g': g_i, 'neurons.V': V}


def facilitated(ops, p, s, x):
    V, used, resources, g = (s[n] for n in ('neurons.V', 'own.stp.u', 'own.stp.x', 'own.syn.g'))
    fired = ops.spike(V - 1.0)
    used, resources = np.exp(-1.0 / 8.0) * used, 1.0 - np.exp(-1.0 / 5.0) * (1.0 - resources)
    used = ops.new('own.stp.u', used + 0.4 * (1.0 - used) * fired)
    left = ops.new('own.stp.x', resources * (1.0 - ops.within('own.stp.u', used) * fired))
    read = used * ops.cut(resources) * ops.spike(ops.cut(V) - 1.0)
    own, first = p['own.comm.weight'], p['input.weight']
    y = ops.matmul(read, own['weight'], own['bias'])
    g = ops.new('own.syn.g', np.exp(-1.0 / 3.0) * g + y)
    drive = ops.matmul(x, first['weight'], first['bias']) + ops.within('own.syn.g', g)
    spikes, V = lif(ops, V, 3.0 * drive)
    return spikes, {'own.stp.u': used, 'own.stp.x': left, 'own.syn.g': g, 'neurons.V': V}


def in_units():
    weights = nn.SignedWLinear(3, 5, w_init=1.5 * SIGNS * jnp.ones((3, 5)) * u.mS, w_sign=SIGNS)
    first = brainstate.nn.init.Normal(scale=0.5, unit=u.mS)
    synapses = nn.DualExpon(5, 5.0 * u.ms, 2.0 * u.ms, first)
    potentials = {'V_th': 15.0, 'V_rest': 0.0, 'V_reset': 0.0, 'V_init': 4.0}
    volts = {name: value * u.mV for name, value in potentials.items()}
    projection = nn.Projection(weights, synapses, nn.CUBA(4.0 * u.mV))
    return Feed(projection, R=5.0 * u.kohm, **volts)


ROWS = [
    Row(
        'expon_cuba',
        lambda: Feed(nn.Projection(nn.Linear(3, 5), nn.Expon(5, 4.0, DRAWN), nn.CUBA(scale=2.0))),
        current_based,
        exact=True,
    ),
    Row('dual_in_units', in_units, dual, exact=True, context={'dt': 0.5 * u.ms}),
    Row(
        'depression',
        lambda: Feed(
            nn.Projection(
                nn.Linear(3, 5),
                nn.Expon(5, 4.0, DRAWN),
                nn.COBA(E=2.0),
                nn.STP(3, U=0.4, tau_f=None, tau_d=5.0),
            )
        ),
        depressed,
        draw=lambda rng, shape: rng.random(shape),
        groups=(('projection.stp.x',), ('projection.syn.g', 'neurons.V')),
        owner={'projection.comm.weight': 1},
        exact=True,
    ),
    Row('balanced_coba', Balanced, balanced),
    Row('facilitation', Facilitated, facilitated, cut_bptt=False),
]
