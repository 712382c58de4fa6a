"""Draws `memory.svg`: the memory of one gradient of a sequence, against its length.

Nothing is run: XLA says for a compiled program which buffers it needs. `python
docs/pictures/memory.py [FILE]` needs matplotlib, and takes about two minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import brainstate
import jax
import jax.numpy as jnp
import matplotlib
from drawing import BLUE, FAINT, INK, ORANGE, save, style, target
from matplotlib.figure import Figure

import braintrace

BATCH, INPUTS, UNITS, OUTPUTS = 16, 16, 64, 8
LENGTHS = [10, 100, 1_000, 10_000, 100_000, 1_000_000]
MACHINE = 24  # GiB, a large desktop computer


class Network(brainstate.nn.Module):
    """A GRU that makes its input by itself, so that no data is in memory."""

    def __init__(self):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(INPUTS, UNITS)
        self.readout = braintrace.nn.Linear(UNITS, OUTPUTS)

    def update(self, t):
        key = jax.random.fold_in(jax.random.key(0), t)
        return self.readout(self.cell(jax.random.normal(key, (BATCH, INPUTS))))


def loss(output, _):
    return jnp.mean((output - 1) ** 2)


def mebibytes(function: Callable, *arguments) -> float:
    """What the compiled function allocates: its results, and all that it needs to make them."""
    found = jax.jit(function).lower(*arguments).compile().memory_analysis()
    return (found.temp_size_in_bytes + found.output_size_in_bytes) / 2**20


def backpropagation(cell: Callable, carry, checkpoints: bool) -> Callable:
    """Reverse mode through the whole sequence; with checkpoints, every state of one piece of it at
    a time, and of the others the first.
    """

    def total(params, ts):
        def step(carry, t):
            output, carry = cell(params, carry, t)
            return carry, loss(output, None)

        def piece(carry, ts):
            return jax.lax.scan(step, carry, ts)

        if not checkpoints:
            return jnp.mean(piece(carry, ts)[1])
        pieces = max(n for n in range(1, int(len(ts) ** 0.5) + 1) if len(ts) % n == 0)
        return jnp.mean(jax.lax.scan(jax.checkpoint(piece), carry, ts.reshape(pieces, -1))[1])

    return jax.grad(total)


def measure() -> dict[str, list[float]]:
    now = jnp.zeros((), jnp.int32)
    learner = braintrace.compile(Network(), 'D_RTRL', now, batch_size=BATCH)
    online, params, carry = learner.pure()
    state = jax.eval_shape(online.init, params, carry, now)
    whole, pieces = (backpropagation(online.cell, carry, each) for each in (False, True))
    found: dict[str, list[float]] = {'online': [], 'whole': [], 'pieces': []}
    for length in LENGTHS:
        ts = jax.ShapeDtypeStruct((length,), jnp.int32)
        found['online'].append(mebibytes(online.sequence_grad(loss), params, state, ts, None))
        found['whole'].append(mebibytes(whole, params, ts))
        found['pieces'].append(mebibytes(pieces, params, ts))
        print(length, *(f'{name} {row[-1]:.1f} MiB' for name, row in found.items()))
    return found


def draw(axes, found: dict[str, list[float]]) -> None:
    """For a width of four inches, which is what half of a page has: every letter is of 9 points."""
    fits = sum(size < MACHINE * 1024 for size in found['whole'])
    axes.axhline(MACHINE * 1024, color=FAINT, lw=0.8, ls=(0, (1, 2)))
    axes.text(10, MACHINE * 1024 * 1.3, f'a computer of {MACHINE} GiB', color=FAINT)
    axes.loglog(LENGTHS[:fits], found['whole'][:fits], 'o-', color=ORANGE, ms=5)
    axes.loglog(LENGTHS[fits - 1 :], found['whole'][fits - 1 :], '--', color=ORANGE)
    axes.loglog(LENGTHS[fits:], found['whole'][fits:], 'o', mfc='white', color=ORANGE, ms=5)
    axes.loglog(LENGTHS, found['pieces'], 's-', color=FAINT, ms=4, lw=1)
    axes.loglog(LENGTHS, found['online'], 'D-', color=BLUE, lw=2.2, ms=5)
    labels = {'va': 'center'}
    axes.text(5e3, 2500, 'backpropagation\nthrough time', color=ORANGE, ha='right', **labels)
    axes.text(3e3, 0.7, 'backpropagation\nwith checkpoints', color=FAINT, **labels)
    axes.text(10, 25, 'braintrace', color=BLUE, weight='bold', **labels)
    axes.set(xlim=(7, 1.6e6), ylim=(0.2, 2e5))
    axes.set_yticks([1, 10, 100, 1024, 10240, 102400])
    axes.set_yticklabels(['1 MiB', '10 MiB', '100 MiB', '1 GiB', '10 GiB', '100 GiB'])
    axes.set_xticks(LENGTHS, ['10', '100', '1,000', '10,000', '100,000', '1 million'])
    axes.set_xlabel('steps of the sequence', fontsize=9)
    axes.minorticks_off()
    axes.grid(axis='y', color=INK, alpha=0.08)
    axes.set_title('Memory of one gradient', loc='left', fontsize=10)


def main(arguments: list[str]) -> Path:
    found = measure()
    with style('memory'), matplotlib.rc_context({'font.size': 9}):
        figure = Figure(figsize=(4.1, 3.2), layout='constrained')
        draw(figure.subplots(), found)
        return save(figure, target(arguments, 'memory.svg'))


if __name__ == '__main__':
    print(main(sys.argv[1:]))
