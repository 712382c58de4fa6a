"""One table of small models, each written once and run by the library and by every oracle."""

import functools

from tests.models import (
    control_flow,
    loops,
    maps,
    matrix_states,
    movement,
    ops,
    recurrent,
    spiking,
    stacks,
    weights,
)
from tests.models.model import Case, Model, T, cubic, make_case, squared

MODELS: dict[str, Model] = {
    m.name: m
    for part in (
        recurrent.MODELS,
        spiking.MODELS,
        weights.MODELS,
        movement.FIRST,
        stacks.MODELS,
        matrix_states.MODELS,
    )
    for m in part
}
PROGRAMS: dict[str, Model] = {
    m.name: m for part in (control_flow, loops, maps, movement) for m in part.MODELS
}


def names(table=MODELS, **flags) -> list[str]:
    """The rows of a table with these flags: ``names(exact=True)``."""
    return [
        name
        for name, m in table.items()
        if all(getattr(m, flag) == value for flag, value in flags.items())
    ]


@functools.cache
def case(name: str, loss=squared, steps: int = T, seed: int = 0) -> Case:
    """The one case of a row, so that the oracles of it are computed once."""
    return make_case((MODELS | PROGRAMS)[name], loss, steps, seed)


__all__ = [
    'MODELS',
    'PROGRAMS',
    'Case',
    'Model',
    'case',
    'control_flow',
    'cubic',
    'make_case',
    'names',
    'ops',
    'squared',
    'weights',
]
