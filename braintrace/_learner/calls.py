"""What a call of a learner computes: its own step, or an observed one; what it warns of."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import brainstate
import jax
import numpy as np
import saiunit as u

from .. import _jax
from .._compiler import path_name
from .._errors import StepFunctionError, StructureError
from .._jax import Tracer
from .._warnings import tell
from ..functional import OnlineLearner
from .states import CARRY, ModelStates, Path, Role, innermost

KEPT = 8  # programs of a learner


@dataclass(frozen=True, eq=False)
class Bound:
    """A learner (``owner``, with states ``etrace``, ``initial`` and ``structure``) and its compiled
    model.
    """

    owner: Any
    core: OnlineLearner
    states: ModelStates
    programs: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict)

    def program(self, key: Hashable, make: Callable):
        """The compiled program for a key, made where there is none or its states are gone."""
        if key not in self.programs or self.programs[key].touched.stale():
            self.programs[key] = make()
            while len(self.programs) > KEPT:
                self.programs.popitem(last=False)
        return self.programs[key]

    def in_time(self) -> Bound:
        """Itself, if the environment's ``dt`` is that of the compiled step."""
        compiled, now = self.states.dt, brainstate.environ.get('dt', default=None)
        if compiled is not None and now is not None and not _equal(compiled, now):
            raise StructureError(
                f'the step was compiled with dt = {compiled}, and the environment has dt = {now} '
                'now. Go back to that dt, or compile again (learner.compile_graph(x)).'
            )
        return self

    def held(self) -> list:
        """The constants that the compiled step takes as arguments."""
        return self.owner.structure.value

    def initial(self) -> dict[Path, Any]:
        """The hidden states that a reset puts back."""
        saved = self.owner.initial.value
        return {path: saved[path_name(path)] for path in self.states.hidden}

    def empty_trace(self) -> dict[str, Any]:
        """The value of an ``ETraceState`` before the first step."""
        trace, t = self.core.first.init()
        return {'trace': trace, 't': t}


def _equal(a: Any, b: Any) -> bool:
    """Whether two steps of time are the same, as far as their numbers are known."""
    if u.get_dim(a) != u.get_dim(b):
        return False
    first, second = (u.get_magnitude(u.Quantity(t).in_unit(u.get_unit(a))) for t in (a, b))
    known = not isinstance(first, Tracer) and not isinstance(second, Tracer)
    return not known or bool(np.allclose(first, second, rtol=1e-6, atol=0))


# Pairs of a learner and the function that computes its call (None: it runs), the innermost last.
SUBSTITUTES: ContextVar[tuple[tuple[Any, Callable | None], ...]] = ContextVar(
    'functions in the place of learners', default=()
)


@contextmanager
def substituted(learner, call: Callable | None) -> Iterator[None]:
    """Compute calls of ``learner`` by ``call(*inputs)`` inside the block; None: run them."""
    token = SUBSTITUTES.set((*SUBSTITUTES.get(), (learner, call)))
    try:
        yield
    finally:
        SUBSTITUTES.reset(token)


def substitute(learner) -> Callable | None:
    """The function in the place of this learner here; None: it runs."""
    return next((call for of, call in reversed(SUBSTITUTES.get()) if of is learner), None)


class ObservedCall:
    """The one call of a learner in an observed step: the model's states go through ``cell(params,
    carry, inputs) -> (outputs, carry)``, on lists of leaves.
    """

    def __init__(self, bound: Bound, cell: Callable):
        self.bound, self.cell, self.made = bound, cell, False
        self.trace = _jax.current_trace()

    def __call__(self, *inputs):
        if _jax.current_trace() is not self.trace:
            raise StepFunctionError(
                'step_fn calls the learner inside a transformation (jit, grad, vmap, cond, scan, '
                'checkpoint, ...) of its own, out of which the factors of the step can not be '
                'read. Call `y = learner(x)` in step_fn itself, and transform what stands before '
                'and after it. (Samples are the batch of the model, several steps a longer '
                'sequence; `mask` leaves the loss of a step out.)'
            )
        if self.made:
            raise StepFunctionError(
                'step_fn called the learner twice in one step. Call it once, and use its output as '
                'often as you like.'
            )
        world = self.bound.states.now()
        params, carry = world.read(Role.WEIGHT), world.read(*CARRY)
        trees = self.bound.core.compiled(params, carry, inputs).program.trees
        outputs, new = self.cell(*map(jax.tree.leaves, (params, carry, inputs)))
        self.made = True
        world.write(jax.tree.unflatten(trees['carry'], new))
        return jax.tree.unflatten(trees['outputs'], outputs)


OLD = (
    'the loss reads hidden state {names} before it calls the learner, and to a gradient around '
    'single calls that old value is a constant: its history is missing. If the loss depends on it, '
    'take the gradient with etrace_grad, where it is whole.'
)
TWICE = (
    'the learner is called more than once in one gradient. Each call is a step of time, the '
    'gradient is the sum over these steps, and the trace of each is kept until it is taken. '
    'etrace_grad takes a sequence in constant memory.'
)


class Notices:
    """The notices of one learner; each is given once."""

    def __init__(self) -> None:
        self.given: set[str] = set()
        self.called_in: weakref.ref | None = None

    def of_call(self, states: ModelStates) -> Callable:
        """A function to pass the results of a call through, which warns where they are
        differentiated.

        Ask before the call reads any state.
        """
        function = innermost()
        if function is None:
            return lambda results: results
        again = self.called_in is not None and self.called_in() is function
        self.called_in = weakref.ref(function)
        text = TWICE if again else self._of_old_states(states, function)
        return (
            partial(_told, self, text)
            if text and text not in self.given
            else lambda results: results
        )

    def _of_old_states(self, states: ModelStates, function: brainstate.StateTraceStack) -> str:
        touched = zip(function.states, function.been_writen, strict=True)
        read = {state for state, written in touched if not written}
        found = states.lookup() if read else {}
        names = [path_name(p) for p in states.hidden if p in found and found[p] in read]
        return OLD.format(names=', '.join(names)) if names else ''

    def give(self, text: str) -> None:
        if text not in self.given:
            self.given.add(text)
            tell(text)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _told(notices: Notices, text: str, results):
    return results


def _forward(notices: Notices, text: str, results):
    notices.give(text)
    return results, None


_told.defvjp(_forward, lambda notices, text, _, cotangents: (cotangents,))
