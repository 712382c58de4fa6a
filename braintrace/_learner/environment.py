"""What a step reads of ``brainstate.environ``: inputs of the step, or a part of what is compiled.

The time ``t``, the number ``i`` of a step, and all arrays are inputs: each call reads them again.
Another value, such as ``dt``, ``fit`` or ``precision``, is in the compiled step, and a call at
another one is refused.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import saiunit as u

from .._compiler import abstract, describe_aval
from .._jax import Tracer, is_key
from ..errors import StepFunctionError, StructureError

INDEX, TIME, STEP = brainstate.environ.I, brainstate.environ.T, brainstate.environ.DT
CLOCK = INDEX, TIME
ABSENT = object()  # the value of a key that is not set
NUMBERS = int | float | np.number | np.ndarray | jax.Array


class _Watched(defaultdict):
    """What contexts set in this thread, as brainstate keeps it; ``note`` hears of what is read."""

    def __init__(self, contexts: Mapping, note: Callable):
        super().__init__(list, contexts)
        self.note = note

    def __contains__(self, key):  # asked by `environ.get`, however it is imported
        self.note(key)
        return super().__contains__(key)

    def items(self):  # asked by `environ.all`, which this module and each new context call too
        if sys._getframe(2).f_globals['__name__'] not in (__name__, brainstate.environ.__name__):
            for key in brainstate.environ.all():
                self.note(key)
        return super().items()


@contextlib.contextmanager
def reads() -> Iterator[dict[str, Any]]:
    """The keys that this thread reads inside the block, with their values (``ABSENT``: it is not
    set): those of the environment around it, not what the block sets itself.
    """
    state = brainstate.environ._ENV_STATE
    own = getattr(state, '_local', state)  # local to a thread; the state itself in brainstate 0.5
    contexts, around, found = state.contexts, brainstate.environ.all(), {}

    def note(key):
        values = state.contexts.get(key)
        value = values[-1] if values else state.settings.get(key, ABSENT)
        if value is around.get(key, ABSENT):
            found.setdefault(key, value)
        if isinstance(contexts, _Watched):
            contexts.note(key)

    own.contexts = _Watched(contexts, note)
    try:
        yield found
    finally:
        own.contexts = contexts


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
    return value is not ABSENT and (key in CLOCK or (key != STEP and arrays))


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


def _fitted(key: str, value, like):
    """A value as the arrays that it is to be ``like``, but of any shape."""
    try:
        now = _as_input(value, like)
    except TypeError:  # JAX holds no such value
        now = None
    wanted: Any = jax.tree.structure(like)
    if jax.tree.structure(now) != wanted:
        raise StructureError(
            f'the step was compiled for {key} = {_shown(like)} of brainstate.environ, which has '
            f'{key} = {_shown(value)} now. Give an array like that one, or compile again '
            '(learner.compile_graph(x)).'
        )
    return now


def remedy(key: str) -> str:
    """What to do where the environment has no value for what a sequence reads of it."""
    missing = STEP if key == TIME else key
    why = "'dt' is not set, by which time goes on. " if key == TIME else ''
    return f'{why}Call it inside of `with brainstate.environ.context({missing}=...):`.'


def clock(length: int | None = None) -> dict[str, Any]:
    """The number and the time of a step, from those of the environment or zero on; of all steps of
    a sequence with a ``length``.
    """
    get = brainstate.environ.get
    step = get(STEP, default=None)
    steps = 0 if length is None else jnp.arange(length)
    found = {INDEX: get(INDEX, default=0) + steps}
    if step is not None:
        found[TIME] = get(TIME, default=0 * step) + steps * step
    return found


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
                some, others = _shown(then), _shown(now)
                others += ' of other numbers' if some == others else ''
                raise StructureError(
                    f'the step was compiled with {key} = {some}, and the environment has '
                    f'{key} = {others} now. Go back to that {key}, or compile again '
                    f'(learner.compile_graph(x)).{alone}'
                )

    def present(self) -> dict[str, Any]:
        """The inputs as they are now, those that are set."""
        now = {key: brainstate.environ.get(key, default=ABSENT) for key in self.inputs}
        return {k: _fitted(k, x, self.inputs[k]) for k, x in now.items() if x is not ABSENT}

    def along(self, length: int) -> tuple[dict, dict]:
        """What is the same at all steps of a sequence, and the number and the time of each one."""
        with self.completed():  # with the `dt` that was compiled
            times, read = clock(length), self.present()
        found = {key: (times if key in CLOCK else read).get(key) for key in self.inputs}
        for key in (key for key, value in found.items() if value is None):
            raise StructureError(f'the step reads {key!r} of brainstate.environ. {remedy(key)}')
        own = {key: found.pop(key) for key in CLOCK if key in found}
        return found, {key: _as_input(x, self.inputs[key]) for key, x in own.items()}

    def values(self) -> tuple:
        """What is behind the inputs of the step: a dict of all that it reads, or nothing."""
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
    """A value as messages show it: single numbers, and the kinds of arrays."""

    def leaf(x):
        numbers, unit = u.get_magnitude(x), u.get_unit(x)
        known = isinstance(numbers, jax.Array | np.ndarray) and not is_key(numbers)
        if not hasattr(numbers, 'shape') or (known and not numbers.shape):
            return x
        return describe_aval(numbers) + (f' {unit}' if isinstance(x, u.Quantity) else '')

    if value is ABSENT or isinstance(value, str):
        return 'nothing' if value is ABSENT else repr(value)
    with jax.ensure_compile_time_eval():
        return str(jax.tree.map(leaf, value, is_leaf=lambda x: isinstance(x, u.Quantity)))
