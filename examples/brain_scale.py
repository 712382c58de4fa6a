"""100,000 spiking neurons learn with 10 million synapses, online, to fire group by group."""

import sys
from pathlib import Path

import brainstate
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import saiunit as u

import braintrace
from braintrace.nn import CUBA, LIF, Expon, Projection, SparseLinear

DEGREE, GROUPS, PERIOD, EVERY, mV, ms, pA = 100, 8, 200, 20, u.mV, u.ms, u.pA


def synapses(rng, sources, targets, current):
    """Each source sends to ``DEGREE`` random targets. Entries in the order of the sources let a
    product read those that fire, and no others.
    """
    to = np.sort(rng.integers(targets, size=(sources, DEGREE), dtype=np.int32)).ravel()
    weights = 2 * current.mantissa * rng.random(to.size, dtype=np.float32) * current.unit
    first = np.arange(sources + 1, dtype=np.int32) * DEGREE
    return SparseLinear(u.sparse.CSR((weights, to, first), shape=(sources, targets)))


class Network(brainstate.nn.Module):
    """Four in five neurons excite, one inhibits. Weights of the inhibition count as negative."""

    def __init__(self, size):
        super().__init__()
        rng, self.excitatory = np.random.default_rng(0), 4 * size // 5
        exc = synapses(rng, self.excitatory, size, 3 * pA)
        inh = synapses(rng, size - self.excitatory, size, 3 * pA)
        self.exc = Projection(exc, Expon(size, tau=5 * ms, g_init=0 * pA))
        self.inh = Projection(inh, Expon(size, tau=10 * ms, g_init=0 * pA), CUBA(-1.0))
        volts = {'V_th': -50 * mV, 'V_rest': -65 * mV, 'V_reset': -65 * mV}
        self.neurons = LIF(size, tau=20 * ms, R=100 * u.Mohm, **volts)
        self.bias = jnp.asarray(rng.normal(120, 60, size), 'float32') * pA

    def update(self, current):
        """One step; ``current`` goes to each excitatory group. Returns the rates of the groups."""
        E, spikes = self.excitatory, self.neurons.get_spike()
        drive = self.bias.at[:E].add(u.math.tile(current, E // GROUPS))
        spikes = self.neurons(drive + self.exc(spikes[:E]) + self.inh(spikes[E:]))
        return spikes[:E].reshape(-1, GROUPS).mean(0) / brainstate.environ.get_dt()


def wave(steps):
    """The current into the even groups, and the rates that all groups have to follow."""
    phase = np.arange(steps)[:, None] / PERIOD - (group := np.arange(GROUPS)) / GROUPS
    bump = np.maximum(np.cos(2 * np.pi * phase) + 0.2, 0)
    return 80 * (2 * bump - 1) * (group % 2 == 0) * pA, 30 * bump * u.Hz


loss = lambda rates, targets: (((rates - targets) / (30 * u.Hz)) ** 2).mean()  # in (30 Hz)^2


def optimizer_of(size):
    """Momentum; no weight becomes negative, so no synapse changes its sign."""
    return optax.chain(optax.sgd(200 * size, momentum=0.9), optax.keep_params_nonnegative())


def main(size=100_000, steps=1000, path=Path(__file__).parent / 'output' / 'brain_scale.png'):
    """Learn, draw the rates, and return the loss of a period before learning and of one after."""
    if size % (5 * GROUPS) or steps % EVERY or steps < 2 * PERIOD:
        sys.exit(f'size: a multiple of {5 * GROUPS}; steps: one of {EVERY}, at least {2 * PERIOD}')
    brainstate.environ.set(dt=1 * ms)
    currents, targets = wave(steps)
    learner = braintrace.compile(Network(size), 'ES_D_RTRL', currents[0], decay_or_rank=0.95)
    step = lambda current, target: loss(learner(current), target)
    period = lambda: learner.etrace_evolve(currents[: 2 * PERIOD])[PERIOD:]  # behind the onset
    options = {'optimizer': optimizer_of(size), 'update_every': EVERY, 'progress': True}
    before = period()
    losses = learner.etrace_train(currents, targets, step_fn=step, **options).losses
    after = period()
    first, last = (float(loss(rates, targets[:PERIOD])) for rates in (before, after))
    print(f'{size:,} neurons: the loss is {first:.3f} before learning, {last:.3f} after it')
    draw({'before learning': before, 'after it': after, 'target': targets[:PERIOD]}, losses, path)
    return first, last


def draw(rates, losses, path):
    """The loss, and rates of all groups over a period."""
    figure, axes = plt.subplots(1, 4, figsize=(14, 3), layout='constrained')
    axes[0].plot(np.arange(0, len(losses), EVERY), losses.reshape(-1, EVERY).mean(1))
    axes[0].set(xlabel='time (ms)', ylabel='loss', ylim=0)
    for axis, (name, each) in zip(axes[1:], rates.items()):
        shown = axis.imshow(each.to_decimal(u.Hz).T, aspect='auto', vmin=0, vmax=40)
        axis.set(title=name, xlabel='time (ms)', ylabel='group')
    figure.colorbar(shown, label='rate (Hz)')
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == '__main__':
    main(*map(int, sys.argv[1:]))
