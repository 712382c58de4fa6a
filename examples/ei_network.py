"""Excitatory and inhibitory neurons, wired at random, learn to say which side had more cues.

80 neurons excite all that they reach and 20 inhibit it (Dale's law); a synapse is at each fifth
place. Time constants are drawn from gamma distributions, one for each neuron, and learn with the
weights. The task is that of evidence.py with a shorter delay: 115 steps of 10 ms.
"""

from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import saiunit as u

from braintrace import compile as compile_model
from braintrace import evaluate, nn, rules, tasks

INPUTS, E, I, WIRED, RATE = 40, 80, 20, 0.2, 0.1  # spikes a step
SIGNS = np.where(np.arange(E + I) < E, 1.0, -1.0)[:, None]


class Network(brainstate.nn.Module):
    """Adaptive neurons, which see a fifth of the inputs and of each other."""

    def __init__(self, seed):
        super().__init__()
        rng = np.random.default_rng(seed)
        wires = rng.random((E + I, E + I)) < WIRED
        np.fill_diagonal(wires, False)
        strength = rng.gamma(2.0, 0.05, wires.shape) * np.where(SIGNS > 0, 1.0, E / I)
        matrix = u.sparse.CSR.fromdense(jnp.asarray(wires * strength * SIGNS, jnp.float32))
        self.wires = np.argwhere(wires)  # the places of the synapses, in their order
        self.seen = rng.random((INPUTS, E + I)) < WIRED
        strengths = jnp.asarray(rng.gamma(2.0, 0.3, self.seen.shape), jnp.float32)
        self.inputs = nn.SignedWLinear(INPUTS, E + I, w_init=strengths, w_mask=self.seen)
        self.recurrent = nn.SparseLinear(matrix, w_sign=SIGNS)
        constants = {'tau': gamma(2), 'tau_a': gamma(100), 'beta': 0.1, 'R': 2.0}
        self.neurons = nn.ALIF(E + I, **constants, V_th=0.6, learn=('tau', 'tau_a'))
        self.readout = nn.FilteredReadout(E + I, 2, tau=2.0)

    def update(self, x):
        current = self.inputs(x) + self.recurrent(self.neurons.get_spike())
        spikes = self.neurons(current)
        return self.readout(spikes), spikes


def gamma(mean):
    """Time constants, in steps, which differ from neuron to neuron."""
    return lambda shape: mean * brainstate.random.gamma(3.0, size=shape) / 3.0


def keeps_its_law(model):
    """Whether all synapses have the sign of their neuron, and are where there are wires."""
    matrix, seen = model.recurrent(jnp.eye(E + I)), model.inputs(jnp.eye(INPUTS))
    wired = np.zeros((E + I, E + I), bool)
    wired[tuple(model.wires.T)] = True
    signs = (matrix * SIGNS >= 0).all() and (seen >= 0).all()
    return bool(signs) and not np.any(matrix[~wired]) and not np.any(seen[~model.seen])


def penalty(spikes):
    """How far firing rates are from ten spikes a second."""
    return 0.02 * jnp.mean((spikes.mean(0) - RATE) ** 2)


def inside(learner, loss, xs, targets):
    """Of each step of a trial the traces of the recurrent synapses, ``(synapses, states)``, and the
    learning signals of their neurons in the same places.
    """
    online, params, carry = learner.pure()
    step, units = online.observed(loss), learner.model.wires[:, 1]

    def body(state, at):
        gradient, seen = step(params, state, *at)
        ((group, slots),) = seen.before['recurrent/weight/weight'].items()
        traces = jnp.stack(slots['weight'], -1)[0]
        signals = jnp.stack([jnp.zeros((1, E + I)) if c is None else c for c in seen.c[group]], -1)
        return gradient.state, (traces, signals[0, units])

    run = jax.jit(lambda state: jax.lax.scan(body, state, (xs, targets))[1])
    return run(online.init(params, carry, xs[0]))


def main(updates=200, batch=32, path=Path(__file__).parent / 'output' / 'ei_network.png'):
    """Learn, look at the law, draw, and return the share of right answers and whether it held."""
    task = tasks.evidence(cues=5, delay=250)
    adam = optax.adam(optax.cosine_decay_schedule(1e-2, updates))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)
    options = {'batch_size': batch, 'penalty': penalty, 'test': 10 * batch, 'progress': True}
    found = tasks.run(task, Network, rules.d_rtrl(), optimizer, updates, **options)
    print(found)
    xs, ys, mask = task.sample(jax.random.key(0), 1, 'test')
    brainstate.random.seed(0)  # as `run` does
    learner = compile_model(Network(0), rules.d_rtrl(), xs[0], batch_size=1)
    neurons = learner.model.neurons
    drawn = neurons.tau_a
    found.load_into(learner, 0)
    held = keeps_its_law(learner.model)
    print(f'signs and wires are those of the start: {held}')
    _, spikes = evaluate(learner, xs, ys, lambda outputs, ys: outputs)
    loss = lambda outputs, at: at[1] * task.loss(outputs[0], at[0])
    traces, signals = inside(learner, loss, xs, (ys, mask))
    most = jnp.abs((traces * signals).sum((0, 2))).argmax()  # of these the product says most

    figure, axes = plt.subplots(2, 2, figsize=(12, 7), layout='constrained')
    (training, trial), (synapse, constants) = axes
    training.plot(*zip(*[(done, score.mean()) for done, score in found.validation]), 'o-')
    training.axhline(task.floor, color='grey', linestyle=':')
    training.set(xlabel='updates', ylabel='share of right answers', ylim=(0.4, 1))
    fired = jnp.concatenate([xs, spikes], -1)[:, 0]
    colours = INPUTS * ['k'] + E * ['C3'] + I * ['C0']
    trial.eventplot([np.flatnonzero(s) / 100 for s in fired.T], colors=colours)
    trial.set(ylabel='inputs (black), E (red), I (blue)')
    time = np.arange(task.steps) / 100
    for k, name in enumerate(('V', 'a', 'f')):
        for values, style in ((traces, '-'), (signals, '--')):
            line = values[:, most, k] / (jnp.abs(values[:, most, k]).max() or 1.0)
            synapse.plot(time, line, f'C{k}{style}', label=name if style == '-' else None)
    synapse.set(ylabel='a synapse: traces, signals dashed (largest: 1)')
    synapse.legend(title='of the state')
    for axis in (trial, synapse):  # when the answer is asked for
        axis.axvspan(*(np.flatnonzero(mask)[[0, -1]] / 100), color='gold', alpha=0.3)
        axis.set(xlabel='time (s)', xlim=(0, time[-1]))
    constants.plot(drawn[:E] / 100, neurons.tau_a[:E] / 100, 'C3.', label='E')
    constants.plot(drawn[E:] / 100, neurons.tau_a[E:] / 100, 'C0.', label='I')
    constants.axline((1, 1), slope=1, color='grey', linestyle=':')
    constants.set(xlabel='adaptation, as drawn (s)', ylabel='as learnt (s)')
    constants.legend()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=150)
    return float(found.scores[0]), held


if __name__ == '__main__':
    main()
