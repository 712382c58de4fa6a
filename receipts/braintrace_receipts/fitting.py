"""Whether the shapes and options of an application are those that its formulas take."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from .bounds import Num, exact
from .errors import MAX_ELEMENTS, Problem
from .primitives import FORMULAS, NoFormula, Op
from .record import below

__all__ = ['misfits']

Shapes = Mapping[str, tuple[int, ...]]


def misfits(raw: Mapping, shape: Shapes) -> Iterator[Problem]:
    """What does not fit the formulas of the primitives, which are tried without lanes."""
    known = Known(raw, shape)
    for relation in raw['topology']['relations']:
        if relation['primitive'] in FORMULAS:
            yield from _of_relation(known, relation)


class Known:
    """What the parts of a receipt have in common: shapes by path, and groups by name."""

    def __init__(self, raw: Mapping, shape: Shapes):
        self.shape, self.paths, self.lanes = shape, sorted(shape), len(raw['lanes'])
        self.groups = {group['name']: group for group in raw['topology']['groups']}
        self.factored = raw['algorithm']['name'] == 'ES_D_RTRL'

    def below(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """The shapes behind a prefix."""
        return {path: self.shape[path] for path in below(self.paths, prefix)}


def _of_relation(known: Known, relation: Mapping) -> Iterator[Problem]:
    name, primitive = relation['name'], relation['primitive']
    try:
        yield from _tried(known, relation)
    except NoFormula:
        return
    except Exception as error:  # an option may hold anything that the schema lets pass
        said = f'{type(error).__name__}: {error}'[:200]
        at = f'topology/relations/{name}'
        yield Problem(at, f'shapes or options that {primitive} does not have ({said})')


def _tried(known: Known, relation: Mapping) -> Iterator[Problem]:
    name, params, shape = relation['name'], relation['params'], known.shape
    options, laned = relation.get('options', {}), FORMULAS[relation['primitive']].laned
    dy = shape[f'signals/dy/{name}']
    for group in relation['groups'] or ['']:
        x = shape.get(f'factors/{name}/{group}/x')
        right = not laned or x is None or x[:1] == dy[:1] == (known.lanes,)
        yield from _same(f'factors/{name}/{group}/x', right, 'axis 0 is not the lanes')
    op = Op(
        relation['primitive'],
        options,
        lambda slot: _zeros(shape[f'params_before/{params[slot]}']),
        len(dy) - laned,
    )
    made = op.instant(_x(op, shape, name, relation['groups']), _zeros((0, *dy[laned:])))
    yield from _same(f'topology/relations/{name}/params', set(made) >= set(params), 'other slots')
    for slot in set(params) & set(made):
        small = math.prod(made[slot].shape[1:]) <= MAX_ELEMENTS
        yield from _same(f'signals/dy/{name}', small, 'too large together with x')
        if small and slot not in options.get('through', ()):
            found = op.gradient(slot, _zeros((0, *dy[laned:])), made[slot]).shape
            path = f'params_before/{params[slot]}'
            yield from _same(path, found == shape[path], f'{shape[path]}, and {found} is due')
    for group in relation['groups']:
        yield from _in_group(known, relation, op, known.groups[group])


def _in_group(known: Known, relation: Mapping, op: Op, group: Mapping) -> Iterator[Problem]:
    """The shapes of a trace, and positions that are those of the group."""
    name, lanes, shape = relation['name'], known.lanes, known.shape
    at, before = f'factors/{name}/{group["name"]}', f'traces_before/{name}/{group["name"]}'
    found = set(known.below(f'{at}/D_f').values())
    positions = relation.get('options', {}).get('positions', {}).get(group['name'])
    if positions is not None:
        yield from _same(at, len(found) < 2, 'D_f of several shapes')
        fit = all(len(positions) == math.prod(s[1:]) for s in found)
        fit = fit and max(positions, default=-1) < math.prod(group['shape'])
        yield from _same(f'topology/relations/{name}', fit, 'positions that are not in the group')
    for coords in found:
        d = _zeros((0, *coords[1:]))
        if known.factored:
            want = {'f': (lanes, *coords[1:])}
            x = shape.get(f'{before}/x')
            if x is not None:
                op.instant(_zeros((0, *x[1:])), d)
        else:
            made = op.instant(_x(op, shape, name, relation['groups']), d)
            want = {slot: (lanes, *e.shape[1:]) for slot, e in made.items()}
            want = {slot: want[slot] for slot in relation['params']}
        own = known.below(before)
        for path, stored in own.items():
            due = want.get(path[len(before) + 1 :].split('/')[0], stored)
            yield from _same(path, stored == due, f'{stored}, and {due} is due')
        slots = {path[len(before) + 1 :].split('/')[0] for path in own}
        yield from _same(before, not own or slots >= set(want), f'without {set(want) - slots}')


def _x(op: Op, shape: Shapes, name: str, groups: list) -> Num | None:
    """x without lanes, or None where the op reads nothing."""
    own = shape.get(f'factors/{name}/{groups[0] if groups else ""}/x')
    return None if own is None else _zeros((0, *own[1:]) if op.formula.laned else own)


def _zeros(shape: tuple[int, ...]) -> Num:
    return exact(np.zeros(shape))


def _same(path: str, holds: bool, message: str) -> Iterator[Problem]:
    if not holds:
        yield Problem(path, message)
