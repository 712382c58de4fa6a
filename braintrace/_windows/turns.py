"""A loop over time in Python: compiled turns of about half a second, between which Ctrl-C is
handled and progress is told.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import is_key
from .._warnings import if_read

SECONDS = 0.5  # of a turn
GROWTH = 16  # of the next turn at most: the first ones are too short to be measured well
LINES = 100  # of progress at most
LINE_SECONDS = 0.2  # between two lines: one takes half a millisecond, which stays below 1 %


class Turns:
    """The blocks of one compiled loop, in turns; how many make a turn is measured, and remembered.

    SIGINT is handled between two turns, so that nothing is half done.
    """

    def __init__(self, number: int):
        self.number, self.size = number, 0

    def run(self, program: Callable, carry, write: Callable, show: Callable | None = None) -> tuple:
        """``carry = program(carry, start, stop)`` until all blocks are done or the handler of a
        signal raises; then ``write(carry)``. ``show(carry, done)`` is called after each turn.

        Returns ``(carry, done, error)`` after ``done`` blocks: all of them, if there is no error.
        """
        first, error, done = not self.size, None, 0
        if first and self.number > 1:
            try:  # no block: it compiles, and a signal that comes meanwhile need not wait
                carry = jax.block_until_ready(_allowed(program, carry, 0, 0))
            except KeyboardInterrupt as stop:
                if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(carry)):
                    raise
                return carry, 0, stop
        self.size = max(self.size, 1)
        with nullcontext() if first and self.number == 1 else held() as pending:
            if show is not None:
                show(carry, 0)
            while done < self.number and error is None:
                # a turn as long as the last ones say that SECONDS take
                size, begin = min(self.size, self.number - done), time.perf_counter()
                carry = _allowed(program, carry, done, done + size)
                done += size
                if done < self.number or show is not None:
                    jax.block_until_ready(carry)
                    wanted = size * SECONDS / max(time.perf_counter() - begin, 1e-9)
                    self.size = int(min(max(wanted, 1), GROWTH * size))
                try:
                    if show is not None:
                        show(carry, done)
                except BaseException as failed:  # of a user's function: what was learnt is kept
                    error = failed
                error = error or (pending and pending())
            write(carry)
            error = error or (pending and pending())
        return carry, done, error


class Progress:
    """Progress over ``length`` steps: a line on stderr, drawn over on a terminal, one below the
    other elsewhere; or calls of a function ``progress(step, losses, *observed)``. ``mask``: the
    weights of the losses; ``every``: the steps of an observed row.
    """

    def __init__(self, length: int, progress: bool | Callable = True, mask=None, every=None):
        self.length, self.every, self.start = length, every, 0.0
        self.mask = np.ones(length) if mask is None else np.asarray(mask)
        self.function = progress if callable(progress) else None
        self.last = self.due = 0

    def between(self, shown: tuple, done: int) -> None:
        """Tell what the first ``done`` steps have shown, as far as it is new: a line where one is
        due, or a call. Time begins before the first step.
        """
        now, begin = time.perf_counter(), self.last
        if not done:
            self.start = now
            return
        if self.function is None and done < min(self.due, self.length):
            return
        self.last = done
        losses = np.asarray(shown[0])[begin:done]
        if self.function is not None:
            every, rows = self.every or 1, []
            if self.every:
                of_rows = slice(-(-begin // every), -(-done // every))
                rows = [jax.tree.map(lambda a: np.asarray(a)[of_rows], shown[1])]
            self.function(done, losses, *rows)
            return
        # the weighed mean of the losses; where none counts, the plain one
        mask = self.mask[begin:done]
        mask = np.where(np.any(mask), mask, 1)
        loss = np.where(mask == 0, 0, mask * losses).sum() / mask.sum()
        # time left by the mean rate since the start
        rate = done / max(now - self.start, 1e-9)
        left = (self.length - done) / rate
        self.due = done + max(int(rate * LINE_SECONDS), self.length // LINES)
        line = f'{done}/{self.length} steps, {rate:.0f} steps/s, loss {float(loss):.4g}'
        line += f', {left:.0f} s left'
        start, end = '', '\n'
        with if_read:
            if sys.stderr.isatty():
                start, end = '\r', '\n' if done == self.length else ''
            sys.stderr.write(f'{start}{line:<79}{end}' if start else line + end)
            sys.stderr.flush()


def _allowed(program: Callable, *args):
    """A turn, whose bounds no guard of transfers forbids."""
    with jax.transfer_guard_host_to_device('allow'):
        return program(*args)


@contextmanager
def held() -> Iterator[Callable[[], BaseException | None]]:
    """SIGINT waits inside the block; the function that it gives lets the handler run, and returns
    what that raised.
    """
    # Python lets the main thread alone change handlers
    handler, came = signal.getsignal(signal.SIGINT), []
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def pending() -> BaseException | None:
        try:
            while came:
                handler(*came.pop())
        except BaseException as error:  # of any kind: it is raised again where all is written
            return error
        return None

    signal.signal(signal.SIGINT, lambda *signal: came.append(signal))
    try:
        yield pending
    finally:
        signal.signal(signal.SIGINT, handler)
    while came:
        handler(*came.pop())


def bounds(start: int, stop: int) -> np.ndarray:
    """The bounds of a turn as an array."""
    return np.array((start, stop), np.int32)


def buffers(shapes, length: int):
    """Arrays for what ``length`` steps show, each of which shows arrays of some shapes."""

    def empty(a):
        shape = length, *a.shape
        return jax.lax.full(shape, 0, a.dtype) if is_key(a) else np.zeros(shape, a.dtype)

    return jax.tree.map(empty, shapes)


def strong(tree):
    """A tree without weak types, as a loop gives it back: another type would compile again."""
    return jax.tree.map(
        lambda x: jax.lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else x,
        jax.tree.map(jnp.asarray, tree),
    )


def cut(shown, steps: int):
    """What the first steps have shown."""
    return jax.tree.map(lambda a: a if len(a) == steps else a[:steps], shown)


def with_so_far(error: BaseException, so_far, steps: int, length: int) -> BaseException:
    """An error that ends a run, with what the call would have returned after these steps."""
    error.so_far = so_far  # type: ignore[attr-defined]
    error.add_note(
        f'The run was stopped after {steps} of {length} steps; all that it changes is as it was '
        'then. What the call returns stands for these steps in `so_far` of this exception (of the '
        'last one: `sys.last_value.so_far`).'
    )
    return error
