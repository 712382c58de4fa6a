"""Training in pieces: compiled programs, their costs, and looks at the scores between them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np

from .._warnings import if_read
from .._windows import Turns, with_so_far
from ._task import Part
from ._training import At, Training

PIECES = 20  # where somebody looks
MOST = 100  # updates of a stream in a block


class Loop:
    """Training in pieces of equal size but the last, twenty at most."""

    def __init__(self, training: Training, made: list, seeds: tuple, length: int, progress: bool):
        self.training, self.task, self.length = training, training.task, length
        self.made = made  # parameters and carry of each seed
        self.seeds = jnp.asarray(seeds)
        options = training.options
        self.unit = (options.window or options.every or 1) if self.task.stream else 1
        self.size = -(-length // (PIECES * self.unit)) * self.unit
        self.progress = progress
        self.seconds = self.compile_seconds = 0.0
        self.memory = 0
        self.programs: dict[tuple[int, int], tuple[Callable, Turns]] = {}

    def pieces(self, first) -> Iterator[tuple[int, At, np.ndarray]]:
        """``(updates that were made, the place then, losses)`` after each piece, of inputs like
        ``first``.
        """
        keys = jax.vmap(jax.random.key)(self.seeds)
        at = jax.jit(jax.vmap(self.training.start, (0, 0, 0, None)))(*self.made, self.seeds, first)
        data = keys  # an update draws its sequences by its seed's key; a stream is drawn at once
        if self.task.stream:
            batch = self.training.options.batch
            data = jax.jit(jax.vmap(lambda key: self.task.sample(key, batch)[:2]))(keys)
        part = min(self.size, MOST * self.unit) if self.task.stream else 1
        found = []
        for start in range(0, self.length, self.size):
            done, stop = start, min(start + self.size, self.length)
            for size in (part, (stop - start) % part):
                number = (stop - done) // size if size else 0
                if number:
                    at, losses = self._blocks(size, number, at, data, done, found)
                    done += number * size
                    found.append(losses)
            yield stop, at, np.concatenate(found, 1)[:, start:]

    def _blocks(self, size: int, number: int, at: At, data, first: int, found: list):
        """The place after some blocks of ``size`` updates or steps, and their losses."""
        losses = jnp.zeros((len(self.seeds), number * size))
        if (size, number) not in self.programs:
            self.programs[size, number] = self._compiled(size, at, losses, data), Turns(number)
        program, turns = self.programs[size, number]
        begin = time.perf_counter()
        (at, losses), done, error = turns.run(
            lambda now, start, stop: program(*now, data, first, start, stop),
            (at, losses),
            lambda now: None,
        )
        at, losses = jax.block_until_ready((at, losses))
        self.seconds += time.perf_counter() - begin
        if error is not None:
            told = np.concatenate([*found, np.asarray(losses)[:, : done * size]], 1)
            raise with_so_far(error, (at.params, told), told.shape[1], self.length)
        return at, np.asarray(losses)

    def _compiled(self, size: int, at: At, losses, data) -> Callable:
        if self.progress:
            self._say(f'compiling for {len(self.seeds)} seed(s)')
        begin = time.perf_counter()
        each = jax.vmap(partial(self._turn, size), (0, 0, 0, None, None, None))
        program = jax.jit(each, donate_argnums=(0, 1)).lower(at, losses, data, 0, 0, 0).compile()
        self.compile_seconds += time.perf_counter() - begin
        if (found := program.memory_analysis()) is not None:
            self.memory = max(self.memory, found.temp_size_in_bytes // len(self.seeds))
        return program

    def _turn(self, size: int, at: At, losses, data, first, start, stop):
        """The blocks from ``start`` to ``stop`` after the step or update ``first``."""

        def block(k, now):
            at, losses = now
            number = first + k * size
            if self.task.stream:
                xs, ys = (jax.lax.dynamic_slice_in_dim(a, number, size) for a in data)
                at, found = self.training.learn(at, xs, ys)
            else:
                at, found = self.training.update(at, jax.random.fold_in(data, number))
            found = found.reshape(size).astype(losses.dtype)
            return at, jax.lax.dynamic_update_slice_in_dim(losses, found, k * size, 0)

        return jax.lax.fori_loop(start, stop, block, (at, losses))

    @cached_property
    def _score(self) -> Callable:
        score = jax.vmap(self.training.score, (0, 0, None, None, None))
        return jax.jit(score, static_argnums=(3, 4))

    def scores(self, params, part: Part, sequences: int) -> np.ndarray:
        """The score of each seed, on sequences that are the same for all."""
        return np.asarray(self._score(params, self.made[1], jax.random.key(0), part, sequences))

    def on_the_way(self, losses: np.ndarray) -> np.ndarray:
        """The score of each seed along a stream."""
        mask = np.asarray(self.task.sample(jax.random.key(0), 1).mask)
        return np.average(losses, axis=1, weights=mask)

    def show(self, done: int, losses: np.ndarray, scores: np.ndarray | None) -> None:
        """A line on stderr."""
        unit = 'steps' if self.task.stream else 'updates'
        line = f'{done}/{self.length} {unit}, loss {losses.mean():.4g}'
        if scores is not None:
            line += f', validation {self.task.shown(float(scores.mean()))}'
        left = (self.length - done) * self.seconds / done
        self._say(f'{line}, {left:.0f} s left')

    def _say(self, line: str) -> None:
        with if_read:
            sys.stderr.write(f'{self.task.name}: {line}\n')
            sys.stderr.flush()
