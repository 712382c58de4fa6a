"""e-prop in PyTorch, observed: each step of training becomes a line that someone else can check.

A recurrent network of leaky integrate-and-fire neurons with a leaky readout and random feedback
learns three waves, weights by Adam at every step (Bellec et al. 2020, equations 4 and 24 to 28).
The lines are on stdout:

    python examples/receipts_torch_eprop.py | braintrace-receipts verify -
"""

from __future__ import annotations

import argparse
import math
import sys

import torch
from receipts_observer import Observer, of_torch, torch_optimizer, torch_slots

INPUTS, NEURONS, OUTPUTS, LANES = 8, 16, 3, 4
DT, TAU, TAU_OUT, THETA = 1.0, 20.0, 20.0, 1.0
ALPHA, KAPPA = math.exp(-DT / TAU), math.exp(-DT / TAU_OUT)
HEIGHT = 0.3
CONSTANTS = {
    'dt': DT,
    'tau': TAU,
    'alpha': ALPHA,
    'theta': THETA,
    'reset_gradient': False,
    'surrogate': {'name': 'triangle', 'parameters': {'width': 1.0, 'height': HEIGHT}},
    'tau_out': TAU_OUT,
    'kappa_out': KAPPA,
}


def array(tensor: torch.Tensor):
    """A copy in NumPy that shares no storage: the next step changes tensors in place."""
    return tensor.detach().cpu().numpy().copy()


def network(seed: int) -> dict[str, torch.Tensor]:
    """Weights as ``torch.nn.Linear`` has them, (out, in), and the feedback (hidden, outputs)."""
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape, scale: torch.randn(*shape, generator=draw) * scale
    weights = {
        'w_in': normal(NEURONS, INPUTS, scale=1 / math.sqrt(INPUTS)),
        'w_rec': normal(NEURONS, NEURONS, scale=0.5 / math.sqrt(NEURONS)),
        'bias': torch.full((NEURONS,), 0.05),
        'w_out': normal(OUTPUTS, NEURONS, scale=0.2 / math.sqrt(NEURONS)),
        'b_out': torch.zeros(OUTPUTS),
    }
    return {**weights, 'feedback': normal(NEURONS, OUTPUTS, scale=1 / math.sqrt(NEURONS))}


def start() -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Carry and traces of a new sequence. The trace of V is the same for every neuron."""
    widths = {'w_in': INPUTS, 'w_rec': NEURONS}
    carry = {name: torch.zeros(LANES, NEURONS) for name in ('V', 'z')}
    traces = {
        name: {'V': torch.zeros(LANES, 1, n), 'filter': torch.zeros(LANES, NEURONS, n)}
        for name, n in widths.items()
    }
    traces['bias'] = {'V': torch.zeros(LANES, 1), 'filter': torch.zeros(LANES, NEURONS)}
    traces['w_out'] = {'o': torch.zeros(LANES, 1, NEURONS)}
    traces['b_out'] = {'o': torch.zeros(LANES, 1)}
    return {**carry, 'o': torch.zeros(LANES, OUTPUTS)}, traces


def forward(p, carry, inputs):
    """The new carry and the slope of the spikes by the membrane."""
    y = inputs @ p['w_in'].T + carry['z'] @ p['w_rec'].T + p['bias']
    V = ALPHA * carry['V'] + y - THETA * carry['z']
    z = (V > THETA).to(V.dtype)
    o = KAPPA * carry['o'] + z @ p['w_out'].T + p['b_out']
    psi = HEIGHT * torch.clamp(1 - torch.abs(V - THETA) / THETA, min=0) / THETA
    return {'V': V, 'z': z, 'o': o}, psi


def traced(traces, x, psi):
    """Eligibility: what V remembers of each input, times psi, filtered as the readout leaks."""
    new = {}
    for name, seen in (('w_in', x['w_in']), ('w_rec', x['w_rec']), ('bias', None)):
        weight = seen is not None
        V = ALPHA * traces[name]['V'] + (seen[:, None, :] if weight else 1.0)
        fresh = psi[:, :, None] * V if weight else psi * V
        new[name] = {'V': V, 'filter': KAPPA * traces[name]['filter'] + fresh}
    new['w_out'] = {'o': KAPPA * traces['w_out']['o'] + x['w_out'][:, None, :]}
    new['b_out'] = {'o': KAPPA * traces['b_out']['o'] + 1.0}
    return new


def gradients(traces, err, learning):
    """Learning signal times trace, summed over the lanes."""
    found = {
        name: (learning[:, :, None] * traces[name]['filter']).sum(0) for name in ('w_in', 'w_rec')
    }
    found['bias'] = (learning * traces['bias']['filter']).sum(0)
    found['w_out'] = (err[:, :, None] * traces['w_out']['o']).sum(0)
    found['b_out'] = (err * traces['b_out']['o']).sum(0)
    return found


def sequence(length: int, seed: int):
    """Random spikes in, three waves out; the same in each sequence."""
    draw = torch.Generator().manual_seed(seed)
    spikes = (torch.rand(length, LANES, INPUTS, generator=draw) < 0.3).float()
    time = torch.arange(length, dtype=torch.float32)[:, None] / length
    waves = torch.sin(2 * math.pi * time * torch.arange(1.0, OUTPUTS + 1))
    return spikes, waves[:, None, :].expand(length, LANES, OUTPUTS).contiguous()


def train(file, sequences=2, length=4, seed=0, optimizer=None, every=1) -> list[float]:
    """Trains with a weight update at each step, writes each ``every``-th, returns the losses."""
    drawn = network(seed)
    feedback = drawn.pop('feedback')
    p = {name: torch.nn.Parameter(weight) for name, weight in drawn.items()}
    make = optimizer or (lambda weights: torch.optim.Adam(weights, lr=1e-3))
    moved = make(list(p.values()))
    roles = ('input', 'recurrent', 'bias', 'readout', 'readout_bias')
    observer = Observer(
        file,
        dict(zip(p, roles, strict=True)),
        cell='lif',
        readout='leaky',
        layout='out_in',
        constants=CONSTANTS,
        optimizer=torch_optimizer(moved),
        numeric=of_torch(p['w_in']),
        source=('pytorch', torch.__version__),
        array=array,
        kappa=KAPPA,
        feedback=feedback,
        initial=start()[0],
        run_id=f'torch-eprop-{seed}',
        every=every,
    )
    losses = []
    for i in range(sequences):
        carry, traces = start()
        for t, (inputs, targets) in enumerate(zip(*sequence(length, seed))):
            first = torch.full((LANES,), t == 0 and i > 0)
            observer.before(p, torch_slots(moved, p), carry, traces, inputs, targets, reset=first)
            with torch.no_grad():
                x = {'w_in': inputs, 'w_rec': carry['z']}
                carry, psi = forward(p, carry, inputs)
                x['w_out'] = carry['z']
                traces = traced(traces, x, psi)
                missed = carry['o'] - targets
                per_lane = 0.5 * (missed**2).sum(-1)
                err = missed / LANES
                learning = err @ feedback.T
                for name, gradient in gradients(traces, err, learning).items():
                    p[name].grad = gradient
            moved.step()
            value = per_lane.mean()
            observer.after(
                p,
                torch_slots(moved, p),
                carry,
                traces,
                gradients={name: parameter.grad for name, parameter in p.items()},
                x=x,
                psi=psi,
                outputs=carry['o'],
                per_lane=per_lane,
                value=value,
                err=err,
                learning=learning,
            )
            losses.append(float(value))
    return losses


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--sequences', type=int, default=2)
    parser.add_argument('--length', type=int, default=4)
    parser.add_argument('--seed', type=int, default=0)
    chosen = parser.parse_args()
    train(sys.stdout.buffer, chosen.sequences, chosen.length, chosen.seed)
