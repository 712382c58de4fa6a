"""The time of analysing a step, by the number of layers and by the number of equations in a layer.

    python benchmarks/compile_time.py            prints the table
    python benchmarks/compile_time.py --check    exits with 1 if 100 LSTM layers take 3 s or more,
                                                 or if the growth is not linear

The time is process time on one core: JAX traces the step, then our analysis makes the graph and the
evaluation plans. The analysis traces once more inside; that share is subtracted. XLA is not called.
"""

from __future__ import annotations

import argparse
import sys
import time

import jax
import jax.numpy as jnp

import braintrace
from braintrace._compiler import analyse
from braintrace._compiler.program.tracing import trace_step
from braintrace._executor import Executor

BATCH, UNITS = 16, 64
LAYERS = (12, 25, 50, 100, 200)
EQUATIONS = (50, 100, 200, 500, 1000)


def shape(*axes):
    return jax.ShapeDtypeStruct(axes, jnp.float32)


def lstm_stack(layers: int):
    """A stack of LSTM cells, each one fused op, as one step."""

    def cell(params, carry, x):
        new = {}
        for k in range(layers):
            h, c = carry[f'h{k}'], carry[f'c{k}']
            xh, w, b = jnp.concatenate([x, h], -1), params[f'w{k}'], params[f'b{k}']
            i, f, g, o = jnp.split(braintrace.matmul(xh, w, b), 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            x = jax.nn.sigmoid(o) * jnp.tanh(c)
            new[f'h{k}'], new[f'c{k}'] = x, c
        return x, new

    params = {f'w{k}': shape(2 * UNITS, 4 * UNITS) for k in range(layers)} | {
        f'b{k}': shape(4 * UNITS) for k in range(layers)
    }
    carry = {f'{s}{k}': shape(BATCH, UNITS) for k in range(layers) for s in 'hc'}
    return cell, params, carry, shape(BATCH, UNITS)


def long_layers(equations: int, layers: int = 10):
    """Ten layers with about this many equations each, between op and state and inside the
    recurrence.
    """

    def cell(params, carry, x):
        new = {}
        for k in range(layers):
            y, h = braintrace.matmul(x, params[f'w{k}']), carry[f'h{k}']
            for _ in range(equations // 5):
                y = jnp.tanh(y) * 0.9
                h = h + 0.1 * jnp.sin(h)
            x = new[f'h{k}'] = h + y
        return x, new

    params = {f'w{k}': shape(UNITS, UNITS) for k in range(layers)}
    carry = {f'h{k}': shape(BATCH, UNITS) for k in range(layers)}
    return cell, params, carry, shape(BATCH, UNITS)


def measure(cell, params, carry, x) -> tuple[int, float, float]:
    """(equations, seconds of tracing, seconds of analysis), each the best of three."""
    traced, analysed = [], []
    for _ in range(3):
        start = time.process_time()
        trace_step(cell, params, carry, (x,))
        middle = time.process_time()
        executor = Executor(analyse(cell, params, carry, (x,)), probes=True)
        assert executor.plan and executor.d_plan
        traced.append(middle - start)
        analysed.append(time.process_time() - middle)
    return len(executor.program.equations), min(traced), min(analysed) - min(traced)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--check', action='store_true', help='exit with 1 unless the aims are met')
    check, met = parser.parse_args().check, True
    measure(*lstm_stack(2))
    for title, make, sizes in (
        ('LSTM layers', lstm_stack, LAYERS),
        ('equations a layer (10 layers)', long_layers, EQUATIONS),
    ):
        print(
            f'\n| {title} | equations | tracing (s) | analysis (s) | analysis, µs an equation '
            '|\n|---|---|---|---|---|'
        )
        costs = []
        for n in sizes:
            count, traced, analysed = measure(*make(n))
            costs.append(analysed / count * 1e6)
            print(
                f'| {n} | {count} | {traced:.3f} | {analysed:.3f} | {costs[-1]:.0f} |', flush=True
            )
            met &= not (make is lstm_stack and n == 100 and analysed >= 3)
        met &= costs[-1] < 3 * costs[0]
    return 0 if met or not check else 1


if __name__ == '__main__':
    sys.exit(main())
