"""Which shapes fit each other, as tables of paths and axes.

An axis is a number, or a letter that stands for one number in the whole receipt: ``B`` lanes, ``I``
inputs, ``N`` units, ``O`` outputs; ``I+N`` is the sum of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from .bounds import Num, exact
from .cells import CELLS
from .errors import MAX_ELEMENTS, Problem
from .losses import LOSSES
from .optimizers import OPTIMIZERS
from .primitives import FORMULAS, NoFormula, Op
from .record import below

Shapes = Mapping[str, tuple[int, ...]]
Due = Iterator[tuple[str, tuple]]
# Fields that have the shape of another one, by the beginnings of both paths.
ALIKE = {
    'gradients/': 'params_before/',
    'params_after/': 'params_before/',
    'window/gradients/': 'params_before/',
    'optimizer/updates/': 'params_before/',
    'initial/': 'carry_before/',
    'carry_after/': 'carry_before/',
    'traces_after/': 'traces_before/',
    'signals/direct/': 'signals/',
    'signals/err': 'outputs',
    'loss/probabilities': 'outputs',
    'loss/per_lane': 'loss/mask',
}
SLOTS = 'optimizer/state_before/', 'optimizer/state_after/'  # of a parameter, before its last slash
OF_LANES = ('inputs', 'targets', 'outputs', 'signals', 'loss', 'factors')


def shape_problems(raw: Mapping, nodes: list[tuple[str, dict | None]]) -> Iterator[Problem]:
    """What is wrong with the shapes of the arrays of a receipt, whose keys are right."""
    shape = {path: tuple(node['shape']) for path, node in nodes if node is not None}
    lanes, opaque = len(raw['lanes']), raw['topology']['cell'] == 'opaque'
    alike = dict(ALIKE)
    if (raw['optimizer'] or {}).get('name') in OPTIMIZERS:
        alike |= dict.fromkeys(SLOTS, 'params_before/')
    if raw['loss']['name'] in LOSSES or not opaque:
        alike['targets'] = 'outputs'
    for path, found in shape.items():
        for head, other in alike.items():
            if path.startswith(head):
                own = path.rpartition('/')[0] if head in SLOTS else path
                like = other + own.removeprefix(head)
                want = shape.get(like, found)
                if want != found:
                    yield Problem(path, f'{found}, and {like} has {want}')
        laned = opaque or path.split('/')[0] not in OF_LANES or found[:1] == (lanes,)
        laned = laned and (not path.startswith('traces_') or found[:1] == (lanes,))
        if not laned:
            yield Problem(path, f'{found}: axis 0 is not the {lanes} lanes')
    axes = {'B': lanes}
    for path, want in (*_by_group(raw, shape), *_of_loss(raw), *_of_cell(raw)):
        yield from _fits(shape, path, want, axes)
    groups, paths = {group['name']: group for group in raw['topology']['groups']}, sorted(shape)
    for relation in raw['topology']['relations']:
        for end in relation['groups']:
            yield from _of_positions(shape, relation, groups[end], lanes, paths)
        if relation['primitive'] in FORMULAS:
            yield from _misfits(raw, shape, relation, paths)


def _fits(shape: Shapes, path: str, want: tuple, axes: dict[str, int]) -> Iterator[Problem]:
    """Whether a field has its axes; a letter that is met for the first time gets its number."""
    if path not in shape:
        return
    found, due = shape[path], []
    for i, axis in enumerate(want):
        if isinstance(axis, str) and '+' in axis:
            axis = sum(axes.get(one, 0) for one in axis.split('+'))
        elif isinstance(axis, str):
            axis = axes.setdefault(axis, found[i] if i < len(found) else -1)
        due.append(axis)
    if found != tuple(due):
        said = ', '.join(map(str, want))
        yield Problem(path, f'{found}, and ({said}) = {tuple(due)} is due')


def _by_group(raw: Mapping, shape: Shapes) -> Due:
    """States, factors and signals, at the positions of their group."""
    groups = {group['name']: group for group in raw['topology']['groups']}
    relations, paths = raw['topology']['relations'], sorted(shape)
    for name, group in groups.items():
        want = ('B', *group['shape'])
        yield from ((f'carry_before/{state}', want) for state in group['states'])
        for kind in ('dh', 'c'):
            states = range(len(raw['signals'][kind].get(name, ())))
            yield from ((f'signals/{kind}/{name}/{i}', want) for i in states)
    for relation in relations:
        moved = relation.get('options', {}).get('positions', {})
        for group in relation['groups']:
            at, want = f'factors/{relation["name"]}/{group}', ('B', *groups[group]['shape'])
            own = below(paths, f'{at}/D')
            own += [] if group in moved else below(paths, f'{at}/D_f')
            yield from ((path, want) for path in own)
    yield 'signals/correction', ('B',)


def _of_loss(raw: Mapping) -> Due:
    """What the formula of a known loss needs."""
    if raw['loss']['name'] in LOSSES:
        yield 'outputs', ('B', 'O')
        yield 'loss/mask', ('B',)


def _of_cell(raw: Mapping) -> Due:
    """What the formulas of a known cell need: they are then free of surprises."""
    topology = raw['topology']
    if topology['cell'] == 'opaque':
        return
    roles = topology['roles']
    relations = {relation['name']: relation for relation in topology['relations']}
    yield 'inputs', ('B', 'I')
    yield 'outputs', ('B', 'O')
    yield f'carry_before/{roles[CELLS[topology["cell"]].output]}', ('B', 'N')
    yield f'carry_before/{roles.get("o")}', ('B', 'O')
    for role, x, y in (('recurrent', 'I+N', 'N'), ('readout', 'N', 'O')):
        params = relations[roles[role]]['params']
        yield f'params_before/{params["weight"]}', (x, y)
        yield f'params_before/{params.get("bias")}', (y,)
    feedback = raw['algorithm']['feedback']
    if feedback is not None:
        yield 'algorithm/feedback', ('B', 'N') if feedback['kind'] == 'modulator' else ('N', 'O')
    yield 'loss/mask', ('B',)


# what the formulas of the primitives take: they are tried without lanes ---------------------------


def _of_positions(
    shape: Shapes, relation: Mapping, group: Mapping, lanes: int, paths: list[str]
) -> Iterator[Problem]:
    """Where a relation's y feeds other positions than its own, there is one for each of D_f's."""
    name, end = relation['name'], group['name']
    positions = relation.get('options', {}).get('positions', {}).get(end)
    if positions is not None:
        D_f = {shape[path] for path in below(paths, f'factors/{name}/{end}/D_f')}
        yield from _same(f'factors/{name}/{end}', len(D_f) < 2, 'D_f of several shapes')
        fit = all((lanes, len(positions)) == (*one[:1], math.prod(one[1:])) for one in D_f)
        fit = fit and max(positions, default=-1) < math.prod(group['shape'])
        said = 'positions that are not in the group'
        yield from _same(f'topology/relations/{name}', fit, said)


def _misfits(raw: Mapping, shape: Shapes, relation: Mapping, *of_all) -> Iterator[Problem]:
    name, primitive = relation['name'], relation['primitive']
    try:
        yield from _tried(raw, shape, relation, *of_all)
    except NoFormula:
        return
    except Exception as error:  # an option may hold anything that the schema lets pass
        said = f'{type(error).__name__}: {error}'[:200]
        at = f'topology/relations/{name}'
        yield Problem(at, f'shapes or options that {primitive} does not have ({said})')


def _tried(raw: Mapping, shape: Shapes, relation: Mapping, paths: list[str]) -> Iterator[Problem]:
    name, params, ends = relation['name'], relation['params'], relation['groups']
    options, laned = relation.get('options', {}), FORMULAS[relation['primitive']].laned
    dy, xs = shape[f'signals/dy/{name}'], [f'factors/{name}/{end}/x' for end in ends or ['']]
    for path in xs:
        read = shape.get(path)
        right = not laned or read is None or read[:1] == dy[:1] == (len(raw['lanes']),)
        yield from _same(path, right, 'axis 0 is not the lanes')
    weights = lambda slot: _zeros(shape[f'params_before/{params[slot]}'])
    op, own = Op(relation['primitive'], options, weights, len(dy) - laned), shape.get(xs[0])
    x = None if own is None else _zeros((0, *own[1:]) if laned else own)
    made = op.instant(x, _zeros((0, *dy[laned:])))
    yield from _same(f'topology/relations/{name}/params', set(made) >= set(params), 'other slots')
    for slot in set(params) & set(made):
        small = math.prod(made[slot].shape[1:]) <= MAX_ELEMENTS
        yield from _same(f'signals/dy/{name}', small, 'too large together with x')
        if small and slot not in options.get('through', ()):
            found = op.gradient(slot, _zeros((0, *dy[laned:])), made[slot]).shape
            path = f'params_before/{params[slot]}'
            yield from _same(path, found == shape[path], f'{shape[path]}, and {found} is due')
    for end in ends:
        D_f = {shape[path] for path in below(paths, f'factors/{name}/{end}/D_f')}
        fit = all(one[len(one) - op.rank :] == dy[laned:] for one in D_f)
        yield from _same(f'factors/{name}/{end}', fit, f'D_f {D_f} where y has {dy}')
        before = f'traces_before/{name}/{end}'
        own_trace = {path: shape[path] for path in below(paths, before)}
        for coords in D_f:
            yield from _of_trace(raw, relation, op, x, coords, before, own_trace)


def _of_trace(
    raw: Mapping, relation: Mapping, op: Op, x: Num | None, coords: tuple, before: str, own: Shapes
) -> Iterator[Problem]:
    """The shapes of a trace whose numbers are at these coordinates of y."""
    lanes, d = len(raw['lanes']), _zeros((0, *coords[1:]))
    if raw['algorithm']['name'] == 'ES_D_RTRL':
        want = {'f': (lanes, *coords[1:])}
        if f'{before}/x' in own:
            op.instant(_zeros((0, *own[f'{before}/x'][1:])), d)
    else:
        made = op.instant(x, d)
        want = {slot: (lanes, *made[slot].shape[1:]) for slot in relation['params']}
    for path, found in own.items():
        due = want.get(path[len(before) + 1 :].split('/')[0], found)
        yield from _same(path, found == due, f'{found}, and {due} is due')


def _zeros(shape: tuple[int, ...]) -> Num:
    return exact(np.zeros(shape))


def _same(path: str, holds: bool, message: str) -> Iterator[Problem]:
    if not holds:
        yield Problem(path, message)
