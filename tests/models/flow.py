"""Control flow that a cell is written against once: plain Python for NumPy, JAX's own for reverse
mode and for the library.

What an op reads after other ops of the same step is a function of old states *and* of this step's
weights: only the path to the old states is cut. So state passes through a construct as a pair
``(live, read)``, of which ops and mixing equations read the second; ``twice`` makes the next pair.
The library gets one value, in both places.
"""

import contextlib

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec


class Flow:
    """What holds for every reading; ``_scan`` and ``_fori`` are the loops of the array library."""

    def twice(self, fn, live, read, groups=None):
        """The next pair: ``fn(live, read)`` is the model's value, ``fn(read, read)`` what an op
        reads of it.

        ``groups``: the names of the states of each group, where states are dicts; one group is read
        with the others live.
        """
        value = fn(live, read if self.reads == 'cut' else live)
        if self.reads != 'cut':
            return value, value
        if groups is None:
            return value, fn(read, read)
        apart = [fn(live | {k: read[k] for k in group}, read) for group in groups]
        return value, {k: new[k] for group, new in zip(groups, apart, strict=True) for k in group}

    def loop(
        self, body, live, read, xs=None, *, over=None, groups=None, length=None, reverse=False
    ):
        """``lax.scan`` with ``body(live, read, x) -> (live, y)``; returns the last ``live`` and the
        stacked ``y``.

        ``over`` is a pair (live, read) of states that have one slice for each turn; a body then
        gets ``(carry, slice)``.
        """

        def step(pair, at):
            x, slices = at
            whole = pair if slices is None else tuple(zip(pair, slices, strict=True))
            seen = []
            return self.twice(lambda h, r: _kept(body(h, r, x), seen), *whole, groups), seen[0]

        (live, _), ys = self._scan(step, (live, read), (xs, over), length, reverse)
        return live, ys

    def for_loop(self, n, body, live, read, groups=None):
        """``lax.fori_loop`` from 0 to ``n`` with ``body(i, live, read) -> live``."""
        return self._fori(
            n, lambda i, pair: self.twice(lambda h, r: body(i, h, r), *pair, groups), (live, read)
        )[0]

    def last(self, ys, state):
        """``ys`` of a loop whose last entry is the new value of a state."""
        return self.concatenate([ys[:-1], state[None]], 0)


def _kept(result, ys):
    """The state that a body returns; its output goes to a list, the live one first."""
    state, y = result
    ys.append(y)
    return state


class NumpyFlow(Flow):
    """Python's own statements. A branch not taken runs for the record of its ops alone, which see
    zeros there.
    """

    idle = False

    def cond(self, pred, yes, no, *args, per_lane=False):
        return self.switch(0 if pred else 1, (yes, no), *args, per_lane=per_lane)

    def switch(self, index, fns, *args, per_lane=False):
        """``per_lane``: under a ``vmap`` over the index, so that ops of every branch see their
        inputs.
        """
        index, result = min(max(int(index), 0), len(fns) - 1), None
        for k, fn in enumerate(fns):
            if k == index:
                result = fn(*args)
            elif hasattr(self, 'calls'):
                with self._idle(self.idle or not per_lane), np.errstate(all='ignore'):
                    fn(*args)
        return result

    @contextlib.contextmanager
    def _idle(self, idle):
        before, self.idle = self.idle, idle
        try:
            yield
        finally:
            self.idle = before

    def while_loop(self, test, body, value, most):
        """At most ``most`` turns, which reverse mode needs to know."""
        for _ in range(most):
            if not test(value):
                return value
            value = body(value)
        assert not test(value), f'more than {most} turns'
        return value

    def unchanged(self, fn, policy=None):
        return fn

    checkpoint = jit = custom = custom_by_vjp = shard = unchanged

    def vmap(self, fn, in_axes=0, out_axes=0):
        def mapped(*args):
            axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
            size = next(
                np.shape(leaf)[a]
                for arg, a in zip(args, axes, strict=True)
                if a is not None
                for leaf in jax.tree.leaves(arg)
            )
            results = [
                fn(*[_at(arg, a, k) for arg, a in zip(args, axes, strict=True)])
                for k in range(size)
            ]
            return jax.tree.map(lambda *leaves: np.stack(leaves, out_axes), *results)

        return mapped

    def _scan(self, step, carry, xs, length, reverse):
        n = length if length is not None else len(jax.tree.leaves(xs)[0])
        ys = [None] * n
        for k in reversed(range(n)) if reverse else range(n):
            carry, ys[k] = step(carry, _at(xs, 0, k))
        return carry, jax.tree.map(lambda *leaves: np.stack(leaves), *ys)

    def _fori(self, n, body, carry):
        for i in range(n):
            carry = body(i, carry)
        return carry


def _at(tree, axis, k):
    return tree if axis is None else jax.tree.map(lambda leaf: np.take(leaf, k, axis), tree)


class JaxFlow(Flow):
    """JAX's control flow; ``while`` runs a fixed number of turns, so that it has a reverse mode."""

    def cond(self, pred, yes, no, *args, per_lane=False):
        return jax.lax.cond(pred, yes, no, *args)

    def switch(self, index, fns, *args, per_lane=False):
        return jax.lax.switch(index, fns, *args)

    def while_loop(self, test, body, value, most):
        return jax.lax.fori_loop(
            0, most, lambda _, v: jax.lax.cond(test(v), body, lambda v: v, v), value
        )

    def checkpoint(self, fn, policy=None):
        return jax.checkpoint(fn, policy=policy)

    def jit(self, fn):
        return jax.jit(fn)

    def custom(self, fn):
        """``fn`` of explicit arguments as a ``custom_jvp`` with its true derivative."""
        custom = jax.custom_jvp(fn)
        custom.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
        return custom

    def custom_by_vjp(self, fn):
        custom = jax.custom_vjp(fn)
        custom.defvjp(lambda *args: jax.vjp(fn, *args), lambda pull, g: pull(g))
        return custom

    def shard(self, fn):
        return fn

    vmap = staticmethod(jax.vmap)

    def _scan(self, step, carry, xs, length, reverse):
        return jax.lax.scan(step, carry, xs, length, reverse)

    def _fori(self, n, body, carry):
        return jax.lax.fori_loop(0, n, body, carry)


class LibraryFlow(JaxFlow):
    """What a user writes: states pass once, ``while`` is ``while``, and lanes are sharded over one
    device.
    """

    def loop(
        self, body, live, read, xs=None, *, over=None, groups=None, length=None, reverse=False
    ):
        def step(carry, at):
            x, states = at
            whole = carry if states is None else (carry, states)
            return body(whole, whole, x)

        return jax.lax.scan(step, live, (xs, None if over is None else over[0]), length, reverse)

    def for_loop(self, n, body, live, read, groups=None):
        return jax.lax.fori_loop(0, n, lambda i, h: body(i, h, h), live)

    def last(self, ys, state):
        return ys

    def while_loop(self, test, body, value, most):
        return jax.lax.while_loop(test, body, value)

    def shard(self, fn):
        """``fn(replicated, *split)`` with its other arguments and its results split along axis
        0.
        """

        def sharded(replicated, *split):
            mesh, lanes = Mesh(np.array(jax.devices()[:1]), 'lanes'), PartitionSpec('lanes')
            specs = (PartitionSpec(), *(lanes for _ in split))
            return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=lanes)(replicated, *split)

        return sharded
