"""A network of E and I neurons learns online which of four input groups fired 100 ms before."""

from pathlib import Path

import brainstate
import matplotlib.pyplot as plt
import numpy as np
import optax
import saiunit as u

import braintrace
from braintrace.nn import COBA, LIF, Expon, FilteredReadout, Projection, SignedWLinear

IN, E, I, TRIALS, STEPS, BATCH, mV, ms = 40, 80, 20, 20, 200, 16, u.mV, u.ms
entropy = optax.softmax_cross_entropy_with_integer_labels


class Network(brainstate.nn.Module):
    """Conductances, in units of the leak, never change their sign (Dale's law)."""

    def __init__(self):
        super().__init__()
        exc, inh = SignedWLinear(IN + E, E + I, w_init=0.005), SignedWLinear(I, E + I)
        self.exc = Projection(exc, Expon(E + I, tau=50 * ms), COBA(E=0 * mV))
        self.inh = Projection(inh, Expon(E + I, tau=10 * ms), COBA(E=-80 * mV))
        self.neurons = LIF(E + I, 20 * ms, V_th=-50 * mV, V_rest=-65 * mV, V_reset=-65 * mV)
        self.readout = FilteredReadout(E + I, 4, tau=20 * ms)

    def update(self, x):
        V, fired = self.neurons.V.value, u.math.concatenate([x, self.neurons.get_spike()], -1)
        spikes = self.neurons(self.exc(fired[:, :-I], V) + self.inh(fired[:, -I:], V))
        return self.readout(spikes), u.math.concatenate([x, spikes], -1)


def main(path=Path(__file__).parent / 'output' / 'spikes.png'):
    """Learn, draw the last trial of each cue, and return the shares of right answers."""
    brainstate.environ.set(dt=1 * ms)
    brainstate.random.seed(0)
    rng, time, adam = np.random.default_rng(0), np.arange(TRIALS * STEPS) % STEPS, optax.adam(3e-4)
    cues = rng.integers(4, size=(TRIALS, BATCH)).repeat(STEPS, 0)
    rates = 0.01 + 0.4 * (np.arange(IN) // 10 == cues[..., None]) * (time < 50)[:, None, None]
    xs = (rng.random(rates.shape) < rates).astype('float32')  # (step, sample, input)
    learner = braintrace.compile(Network(), 'D_RTRL', xs[0], batch_size=BATCH)
    step = lambda x, cue: (entropy((out := learner(x))[0], cue).mean(), out)
    options = {'update_every': STEPS, 'mask': time >= 150, 'reset': time == 0, 'has_aux': True}
    seen = learner.etrace_train(xs, cues, step_fn=step, optimizer=adam, **options).aux
    first, *_, last = (seen[0].argmax(-1) == cues).mean(-1)[STEPS - 1 :: STEPS]
    print(f'{first:.0%} of the answers are right at first, {last:.0%} at last')
    shown = np.concatenate([seen[1][-STEPS:, np.argmax(cues[-1] == cue)] for cue in range(4)])
    plt.figure(figsize=(9, 5))
    plt.eventplot([s.nonzero()[0] for s in shown.T], colors=IN * ['k'] + E * ['C3'] + I * ['C0'])
    plt.gca().set(xlabel='time (ms)', ylabel='inputs (black), E (red) and I (blue) neurons')
    path.parent.mkdir(exist_ok=True)
    plt.savefig(path, dpi=150, bbox_inches='tight')
    return float(first), float(last)


if __name__ == '__main__':
    main()
