"""Outputs of snnTorch and Norse beside those of their own exported NIR graphs: `make nir`.

    python benchmarks/nir_others.py [FOLDER]

FOLDER: that of the NIR repository's published graphs, `paper/` with its files `lif_norse.nir` and
`lif_norse.csv`, where there is one. What is not installed is said, and left out.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from braintrace import adapters

NOTES = """
Where outputs differ, the simulator does not do what its graph says:
- snnTorch, reset_delay=True (its default): a spike resets the potential one step later.
- Norse, LIFCell: an input adds to the current at once, and the potential reads it before it decays;
  in its graph (w_in = 1) the current relaxes towards the input.
Norse's `to_nir` divides its argument `dt` by inverse time constants; dt=1 gives seconds."""

STEPS, BATCH, INPUTS, UNITS, OUTPUTS = 200, 4, 6, 20, 5


def ours(graph, xs, **options):
    """Outputs and the carry of each step."""
    cell, params, carry = adapters.from_nir(graph, batch_size=xs.shape[1], **options)

    def step(carry, x):
        y, carry = cell(params, carry, x)
        return carry, (y, carry)

    return jax.jit(lambda c: jax.lax.scan(step, c, jnp.asarray(xs)))(carry)[1]


def shown(name, options, got, want):
    """A row: how many spikes differ, or how far potentials are apart."""
    spiking = set(np.unique(want)) <= {0.0, 1.0}
    differ = int((got != want).sum()) if spiking else float(np.abs(got - want).max())
    found = f'{differ:,} of {want.size:,} outputs differ' if spiking else f'{differ:.1e} apart'
    much = f'{int(want.sum())} spikes' if spiking else f'up to {np.abs(want).max():.2f}'
    print(f'| {name} | {", ".join(f"{k}={v}" for k, v in options.items())} | {much} | {found} |')


def inputs():
    return (np.random.default_rng(0).random((STEPS, BATCH, INPUTS)) < 0.3).astype(np.float32)


def of_snntorch():
    import snntorch
    import torch
    from snntorch.export_nir import export_to_nir

    def full(n, value):
        return torch.full((n,), value)

    def leaky(n, **options):
        return snntorch.Leaky(full(n, 0.9), threshold=full(n, 1.0), **options)

    def synaptic(n, **options):
        return snntorch.Synaptic(full(n, 0.8), full(n, 0.9), threshold=full(n, 5.0), **options)

    def recurrent(n, **options):
        options |= {'linear_features': n}
        return snntorch.RSynaptic(full(n, 0.8), full(n, 0.9), threshold=full(n, 1.0), **options)

    for kind, reset, delay in (
        (leaky, 'subtract', False),
        (leaky, 'zero', False),
        (leaky, 'subtract', True),
        (synaptic, 'subtract', False),
        (recurrent, 'none', True),
        (recurrent, 'subtract', True),  # without the delay it fails in snnTorch 1.0.0
    ):
        torch.manual_seed(0)
        options = {'reset_mechanism': reset, 'init_hidden': True, 'reset_delay': delay}
        net = torch.nn.Sequential(
            torch.nn.Linear(INPUTS, UNITS),
            kind(UNITS, **options),
            torch.nn.Linear(UNITS, OUTPUTS),
            kind(OUTPUTS, **options),
        )
        graph = export_to_nir(net, torch.zeros(1, INPUTS), ignore_dims=[0])
        for layer in net:
            getattr(layer, 'reset_mem', lambda: None)()
        with torch.no_grad():
            want = np.array([net(torch.tensor(x)).numpy() for x in inputs()])
        said = {'dt': 1e-4, 'reset': 'zero' if reset == 'zero' else 'subtract'}
        if reset == 'none':  # what is subtracted is the threshold less v_reset
            for node in graph.nodes.values():
                node.v_reset = getattr(node, 'v_threshold', None)
        shown(f'snnTorch {kind.__name__}, reset {reset}, reset_delay={delay}', said,
              np.asarray(ours(graph, inputs(), **said)[0]), want)  # fmt: skip


def of_norse():
    import norse.torch as norse
    import torch

    def full(n, value):
        return torch.full((n,), value)

    def box(n):
        p = norse.LIFBoxParameters(full(n, 100.0), full(n, 0.0), full(n, 0.05), full(n, 0.0))
        return norse.LIFBoxCell(p)

    def readout(n):
        return norse.LIBoxCell(norse.LIBoxParameters(full(n, 100.0), full(n, 0.0)))

    def current(n):
        p = norse.LIFParameters(
            full(n, 200.0), full(n, 100.0), full(n, 0.0), full(n, 0.1), full(n, 0.0)
        )
        return norse.LIFCell(p)

    for first, last in ((box, box), (box, readout), (current, current)):
        torch.manual_seed(0)
        layers = torch.nn.Linear(INPUTS, UNITS), first(UNITS), torch.nn.Linear(UNITS, OUTPUTS)
        net = norse.SequentialState(*layers, last(OUTPUTS))
        graph = norse.to_nir(net, torch.zeros(INPUTS), dt=1.0)  # tau is dt over its inverse
        state, want = None, []
        with torch.no_grad():
            for x in inputs():
                y, state = net(torch.tensor(x), state)
                want.append(y.numpy())
        said = {'dt': 1e-3, 'reset': 'zero'}
        shown(f'Norse {first.__name__} -> {last.__name__}', said,
              np.asarray(ours(graph, inputs(), **said)[0]), np.array(want))  # fmt: skip


def published(folder: Path):
    """Norse's run of one neuron over 1,000 steps of 0.1 ms: input, potential, spike."""
    table = np.loadtxt(folder / 'lif_norse.csv', delimiter=',', dtype=np.float32)
    said = {'dt': 1e-4, 'reset': 'zero'}
    z, carry = ours(folder / 'lif_norse.nir', table[:, :1, None], **said)
    shown('published lif_norse, spikes', said, np.ravel(z), table[:, 2])
    (v,) = (own['v'] for own in carry.values())
    shown('published lif_norse, potential', said, np.ravel(v), table[:, 1])


def main(arguments):
    warnings.simplefilter('ignore')
    print('| network | read with | it gives | beside it |\n|---|---|---|---|')
    for compare in (of_snntorch, of_norse):
        try:
            compare()
        except ImportError as error:
            print(f'| {compare.__name__.removeprefix("of_")} | not compared: {error} | | |')
    if arguments:
        published(Path(arguments[0]))
    else:
        print('| published graphs | not compared: no folder is given | | |')
    print(NOTES)


if __name__ == '__main__':
    main(sys.argv[1:])
