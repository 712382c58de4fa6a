"""What a step reads of ``brainstate.environ``: inputs of the step, or a part of what is compiled.

The time ``t``, the number ``i`` of a step, and all arrays are inputs: each call reads them anew.
Another value, such as ``dt``, ``fit`` or ``precision``, stands in the compiled step, and a call at
another one is refused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._compiler import abstract
from .._jax import Tracer, is_key
from ..errors import StepFunctionError, StructureError

INDEX, TIME, STEP = brainstate.environ.I, brainstate.environ.T, brainstate.environ.DT
CLOCK = INDEX, TIME
ABSENT = object()  # the value of a key that is not set
NUMBERS = int | float | np.number | np.ndarray | jax.Array
READING = threading.RLock()  # `brainstate.environ.get` is replaced for one of several threads


@contextlib.contextmanager
def reads() -> Iterator[dict[str, Any]]:
    """The keys that this thread reads inside the block, with their values: those of the environment
    around it, not what the block sets itself.
    """
    environ, found, thread = brainstate.environ, {}, threading.get_ident()
    with READING:
        get, around = environ.get, environ.all()

        def watched(key, *args, **more):
            mine = more.get('env') is None and threading.get_ident() == thread
            try:
                value = get(key, *args, **more)
            except KeyError:
                value = ABSENT
                raise
            finally:
                if mine and (value is around[key] if key in around else key not in environ.all()):
                    found.setdefault(key, value)
            return value

        environ.get = watched
        try:
            yield found
        finally:
            environ.get = get


def token(value) -> tuple:
    """What makes two values the same: their numbers, where they are known."""
    leaves, tree = jax.tree.flatten(value)
    return tree, *map(_Token, leaves)


class _Token:
    """A value that can be a key: arrays by their numbers, what is hidden by identity."""

    def __init__(self, value):
        self.value = value
        by_numbers = isinstance(value, jax.Array | np.ndarray | np.generic)
        if by_numbers and not isinstance(value, Tracer) and not is_key(value):
            array = np.asarray(value)
            self.key: Any = (array.shape, str(array.dtype), array.tobytes())
        else:
            plain = isinstance(value, bool | int | float | complex | str)
            self.key = (type(value), value) if plain else None

    def __eq__(self, other):
        return self.key == other.key and (self.key is not None or self.value is other.value)

    def __hash__(self):
        return hash(self.key)


def _same(then, now) -> bool:
    """Whether two values are the same, up to rounding; what a transformation hides is."""
    if then is now or token(then) == token(now):
        return True
    leaves = jax.tree.leaves((then, now))
    if any(isinstance(x, Tracer) for x in leaves):
        return True
    if isinstance(then, bool) or not all(isinstance(x, NUMBERS) for x in leaves):
        return False
    if u.get_dim(then) != u.get_dim(now):
        return False
    with jax.ensure_compile_time_eval():
        numbers = (u.get_magnitude(u.Quantity(x).in_unit(u.get_unit(then))) for x in (then, now))
        some, others = map(np.asarray, numbers)
    return some.shape == others.shape and np.allclose(some, others, rtol=1e-6, atol=0)


def _is_input(key: str, value) -> bool:
    leaves = jax.tree.leaves(value)
    arrays = bool(leaves) and all(isinstance(x, jax.Array | np.ndarray) for x in leaves)
    return key in CLOCK or (key != STEP and arrays)


def _as_input(value, like=None):
    """A value as arrays, in the unit and the precision of what it is to be ``like``."""
    if isinstance(value, u.Quantity):
        if like is not None and u.get_dim(value) == u.get_dim(like):
            value = value.in_unit(u.get_unit(like))
        if jnp.issubdtype(jnp.result_type(value.mantissa), jnp.integer):  # a time is no index
            value = value.astype(brainstate.environ.dftype())
    arrays = jax.tree.map(lambda x: x if is_key(x) else jnp.asarray(x), value)
    if like is None or jax.tree.structure(arrays) != jax.tree.structure(like):
        return arrays

    def leaf(x, like):
        kinds = (jnp.integer, jnp.floating)
        same = any(all(jnp.issubdtype(a.dtype, kind) for a in (x, like)) for kind in kinds)
        return x.astype(like.dtype) if same else x

    return jax.tree.map(leaf, arrays, like)


# The values of a loop over time, which are the same at all of its steps.
LOOP: ContextVar[Mapping[str, Any] | None] = ContextVar('around a loop over time', default=None)


@contextlib.contextmanager
def within(values: Mapping[str, Any], length: int) -> Iterator[None]:
    """The environment has these values inside the block, around a loop over so many steps."""
    held = LOOP.set(values if length > 1 else {})
    try:
        with brainstate.environ.context(**values):
            yield
    finally:
        LOOP.reset(held)


class Environment:
    """What one step reads: ``static`` values by key, and ``inputs``, of which shapes are known."""

    def __init__(self, found: Mapping[str, Any], may_vary: bool = True):
        varies = {key for key, value in found.items() if may_vary and _is_input(key, value)}
        self.inputs = {k: jax.tree.map(abstract, _as_input(found[k])) for k in sorted(varies)}
        self.static = {key: value for key, value in found.items() if key not in varies}
        every = brainstate.environ.all().items()
        self._others = {k: v for k, v in every if k not in varies and not _is_input(k, v)}

    @contextlib.contextmanager
    def completed(self, **values) -> Iterator[None]:
        """The environment with these values, where what is not set is as it was when compiled."""
        now = brainstate.environ.all()
        kept = {key: value for key, value in self._others.items() if key not in now}
        with brainstate.environ.context(**{**kept, **values}):
            yield

    def check(self, *keys: str) -> None:
        """Refuse another value than the compiled one, of all static keys or of some; what is not
        set is as compiled.
        """
        for key, then in self.static.items():
            if keys and key not in keys:
                continue
            now = brainstate.environ.get(key, default=then)
            if not _same(then, now):
                alone = (
                    ''
                    if key == STEP
                    else ' `braintrace.evaluate` and `etrace_evolve(..., '
                    'trace=False)` run the model itself, in the environment as it is.'
                )
                raise StructureError(
                    f'the step was compiled with {key} = {_shown(then)}, and the environment has '
                    f'{key} = {_shown(now)} now. Go back to that {key}, or compile again '
                    f'(learner.compile_graph(x)).{alone}'
                )

    def present(self) -> dict[str, Any]:
        """The inputs as they are now, those that are set."""
        now = {key: brainstate.environ.get(key, default=ABSENT) for key in self.inputs}
        return {k: _as_input(x, self.inputs[k]) for k, x in now.items() if x is not ABSENT}

    def values(self) -> tuple:
        """What stands behind the inputs of the step: a dict of all that it reads, or nothing."""
        held = LOOP.get() or {}
        for key in self.inputs:
            now = brainstate.environ.get(key, default=ABSENT)
            if now is ABSENT:
                raise StructureError(
                    f'the step reads {key!r} of brainstate.environ, which is not set here. Call '
                    f'the learner inside of `with brainstate.environ.context({key}=...):`.'
                )
            if key in CLOCK and now is held.get(key):
                raise StepFunctionError(
                    f'the step reads {key!r} of brainstate.environ, and it would be the same at '
                    f'all steps of the sequence. Give a sequence of its values, and set it in '
                    f'step_fn: `def step_fn({key}, x): with brainstate.environ.context('
                    f'{key}={key}): return loss(learner(x))`.'
                )
        return (self.present(),) if self.inputs else ()


def _shown(value) -> str:
    with jax.ensure_compile_time_eval():
        return 'nothing' if value is ABSENT else str(value)
