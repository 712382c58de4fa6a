"""Gradients of multi-step windows, as a script of the public package takes them, in float64.

    python benchmarks/public_windows.py

It runs in an environment with the public package (`.venv-public`) and with this one, where it takes
`braintrace.compat`; both print a row for each rule and window, with the sum of the gradient's
absolute values.
"""

from __future__ import annotations

import contextlib

import brainstate
import jax.numpy as jnp
import numpy as np

import braintrace

with contextlib.suppress(ImportError):
    import braintrace.compat

RULES = {'D_RTRL': {}, 'pp_prop': {'decay_or_rank': 0.9}}
WINDOWS = None, 2, 4, 8


class Net(brainstate.nn.Module):
    """A vanilla RNN whose weights are the same in both packages."""

    def __init__(self):
        super().__init__()
        self.cell = braintrace.nn.ValinaRNNCell(3, 4)
        weight = np.random.default_rng(0).normal(size=(7, 4)) / 2
        self.cell.W.weight.value = {'weight': jnp.asarray(weight), 'bias': jnp.zeros(4)}

    def update(self, x):
        return self.cell(x)


def size_of(rule: str, window: int | None, **options) -> float:
    """The sum of the absolute values of a gradient over eight steps."""
    xs, ys = jnp.asarray(np.random.default_rng(1).normal(size=(8, 2, 3))), jnp.ones((8, 2, 4))
    learner = braintrace.compile(
        Net(), rule, xs[0], batch_size=2, vjp_method='multi-step', **options
    )

    def step_fn(x, y):
        if window is None:
            return ((learner(x) - y) ** 2).sum()
        return ((learner(braintrace.MultiStepData(x)) - y) ** 2).sum((1, 2))

    grads = learner.etrace_grad(xs, ys, step_fn=step_fn, chunk_size=window, reduction='sum')
    return float(sum(np.abs(leaf).sum() for value in grads.values() for leaf in value.values()))


def main() -> list[str]:
    """A row for each rule and window."""
    brainstate.environ.set(precision=64)
    return [
        f'{rule:8} chunk_size {window}: {size_of(rule, window, **options):.10f}'
        for rule, options in RULES.items()
        for window in WINDOWS
    ]


if __name__ == '__main__':
    print(braintrace.__version__, *main(), sep='\n')
