"""Progress of a compiled loop on the terminal: steps a second, loss, time left."""

from __future__ import annotations

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

LINES = 100  # at most

SECONDS = 0.2  # between two lines: one takes half a millisecond, which stays below 1 %


class _Line:
    """One line on stderr: drawn over on a terminal, one below the other elsewhere.

    A call returns the step at which the next line is due.
    """

    def __init__(self, length: int):
        self.length, self.start = length, 0.0

    def __call__(self, done, loss) -> np.int32:
        now, done = time.perf_counter(), int(done)
        if not done:
            self.start = now
            return np.int32(0)
        rate = done / max(now - self.start, 1e-9)
        left = (self.length - done) / rate
        line = f'{done}/{self.length} steps, {rate:.0f} steps/s, loss {float(loss):.4g}'
        line += f', {left:.0f} s left'
        start, end = '', '\n'
        if sys.stderr.isatty():
            start, end = '\r', '\n' if done == self.length else ''
        sys.stderr.write(f'{start}{line:<79}{end}' if start else line + end)
        sys.stderr.flush()
        return np.int32(min(done + rate * SECONDS, self.length))


class Lines:
    """Lines between the turns of a loop over steps with such a mask."""

    def __init__(self, length: int, mask):
        self.length, self.line = length, _Line(length)
        self.mask = np.ones(length) if mask is None else np.asarray(mask)
        self.last = self.due = 0

    def __call__(self, losses: jax.Array, done: int) -> None:
        """A line, where one is due after so many steps."""
        if done < min(self.due, self.length):
            return
        new = slice(self.last, done)
        loss = shown_loss(np.asarray(losses)[new], self.mask[new], np) if done else 0.0
        self.due = max(int(self.line(done, loss)), done + self.length // LINES)
        self.last = done


def shown_loss(losses, mask, of=jnp):
    """The weighed mean of some losses; where none counts, the plain one."""
    mask = of.where(mask.any(), mask, 1)
    return of.where(mask == 0, 0, mask * losses).sum() / mask.sum()


def show_progress(length: int):
    """``(due, done, loss) -> due``: report from inside a compiled loop when ``done`` reaches
    ``due``; call it once with 0 before the loop.
    """
    line = _Line(length)

    def show(due: jax.Array, done: jax.Array, loss: jax.Array) -> jax.Array:
        def report():
            return io_callback(line, jax.ShapeDtypeStruct((), jnp.int32), done, loss)

        return jax.lax.cond((done >= due) | (done == length), report, lambda: due)

    return show
