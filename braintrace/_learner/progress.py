"""Progress of a compiled loop on the terminal: steps a second, loss, time left."""
from __future__ import annotations

import sys
import time

import jax

__all__ = ['show_progress']

UPDATES = 100


class _Line:
    """One line on stderr: drawn over on a terminal, printed a few times elsewhere."""

    def __init__(self, length: int):
        self.length, self.start = length, time.monotonic()

    def __call__(self, step, loss) -> None:
        done, spent = int(step) + 1, time.monotonic() - self.start
        rate = done / max(spent, 1e-9)
        end = '\n' if done == self.length or not sys.stderr.isatty() else ''
        sys.stderr.write(f'\r{done}/{self.length} steps, {rate:.0f} steps/s, loss {float(loss):.4g}, '
                         f'{(self.length - done) / rate:.0f} s left{end}')
        sys.stderr.flush()


def show_progress(length: int):
    """A function ``(step, loss)`` that reports about a hundred times from inside a compiled loop."""
    line, every = _Line(length), max(1, length // UPDATES)

    def show(step: jax.Array, loss: jax.Array) -> None:
        due = (step % every == 0) | (step == length - 1)
        jax.lax.cond(due, lambda: jax.debug.callback(line, step, loss, ordered=False), lambda: None)
    return show


