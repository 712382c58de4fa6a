"""A learner with its compiled model and programs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from .._compiler import path_name
from ..functional import OnlineLearner
from .states import ModelStates
from .world import Path

__all__ = ['Bound']

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
