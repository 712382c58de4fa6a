"""Warnings of the history that a gradient around single calls of a learner leaves out."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import brainstate
import jax

from .._compiler import path_name
from .._warnings import tell
from .states import ModelStates
from .world import innermost

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
