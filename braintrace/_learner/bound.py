"""A learner with its compiled model and programs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import brainstate
import numpy as np
import saiunit as u

from .._compiler import path_name
from .._errors import StructureError
from .._jax import Tracer
from ..functional import OnlineLearner
from .states import ModelStates
from .world import Path

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
