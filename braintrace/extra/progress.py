"""The progress of a call over a sequence: lines on the terminal, or calls of a user's function."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from .._warnings import if_read
from .._windows import LINES

LINE_SECONDS = 0.2  # between two lines: one takes half a millisecond, which stays below 1 %


class Progress:
    """Progress over ``length`` steps: a line on stderr, drawn over on a terminal, one below the
    other elsewhere; or calls of a function ``progress(step, losses, *observed)``. ``every``: the
    steps of an observed row.
    """

    def __init__(self, length: int, progress: bool | Callable = True, every: int | None = None):
        self.length, self.every, self.start = length, every, 0.0
        self.function = progress if callable(progress) else None
        self.last = self.due = 0

    def tell(self, done, losses=None, mask=None, observed=None) -> np.int32:
        """A call, or a line, after so many steps; the last ones have shown this. Returns the step
        at which the next line is due; without losses time begins.
        """
        now, done = time.perf_counter(), int(done)
        if losses is None:
            self.start = now
            return np.int32(0)
        if self.function is not None:
            rows = jax.tree.map(np.asarray, observed)
            self.function(done, np.asarray(losses), *([rows] if self.every else []))
            return np.int32(0)
        # the weighed mean of the losses; where none counts, the plain one
        mask = np.where(np.any(mask), mask, 1)
        loss = np.where(mask == 0, 0, mask * np.asarray(losses)).sum() / mask.sum()
        # time left by the mean rate since the start
        rate = done / max(now - self.start, 1e-9)
        left = (self.length - done) / rate
        line = f'{done}/{self.length} steps, {rate:.0f} steps/s, loss {float(loss):.4g}'
        line += f', {left:.0f} s left'
        start, end = '', '\n'
        with if_read:
            if sys.stderr.isatty():
                start, end = '\r', '\n' if done == self.length else ''
            sys.stderr.write(f'{start}{line:<79}{end}' if start else line + end)
            sys.stderr.flush()
        return np.int32(min(done + rate * LINE_SECONDS, self.length))

    def between(self, shown: tuple, done: int, mask) -> None:
        """Tell between the turns of a loop what its first steps have shown, as far as it is new: a
        line where one is due, or a call.
        """
        if self.function is None and done < min(self.due, self.length):
            return
        (begin, self.last), every = (self.last, done), self.every or 1
        new = lambda tree, every: jax.tree.map(
            lambda a: np.asarray(a)[-(-begin // every) : -(-done // every)], tree
        )
        rows = new(shown[1], every) if self.every else None
        part: tuple = (*new((shown[0], mask), 1), rows) if done else ()
        self.due = max(int(self.tell(done, *part)), done + self.length // LINES)

    def inside(self, due: jax.Array, done: jax.Array, shown, mask) -> jax.Array:
        """Tell from inside of a compiled loop what some steps have shown: a line when ``done``
        reaches ``due``, or each time to a function; call it once with 0 and None before the loop.
        """
        args = (done,) if shown is None else (done, shown[0], mask)
        if self.every is not None and shown is not None:
            args = *args, shown[1]

        def tell():
            return io_callback(self.tell, jax.ShapeDtypeStruct((), jnp.int32), *args)

        if self.function is not None:
            return due if shown is None else tell()
        return jax.lax.cond((done >= due) | (done == self.length), tell, lambda: due)


class Told:
    """A function of progress that is called inside of a compiled loop: the first exception that it
    raises is kept, and it is called no more.
    """

    def __init__(self, function: Callable):
        self.function = function
        self.error: BaseException | None = None

    def __call__(self, *args) -> None:
        try:
            if self.error is None:
                self.function(*args)
        except BaseException as error:  # of any kind: it is raised where the loop has ended
            self.error = error
