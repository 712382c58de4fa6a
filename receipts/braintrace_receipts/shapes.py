"""Which shapes fit each other, as tables of paths and axes.

An axis is a number, or a letter that stands for one number in the whole receipt: ``B`` lanes, ``I``
inputs, ``N`` units, ``O`` outputs; ``I+N`` is the sum of two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from .cells import CELLS
from .errors import Problem
from .fitting import misfits
from .losses import LOSSES
from .optimizers import OPTIMIZERS
from .record import below

__all__ = ['shape_problems']

Shapes = Mapping[str, tuple[int, ...]]
Due = Iterator[tuple[str, tuple]]
# Fields that have the shape of another one.
ALIKE = [
    (re.compile(pattern), other)
    for pattern, other in (
        ('(?:gradients|params_after|window/gradients|optimizer/updates)/(.*)', r'params_before/\1'),
        ('(?:initial|carry_after)/(.*)', r'carry_before/\1'),
        ('traces_after/(.*)', r'traces_before/\1'),
        ('signals/direct/(.*)', r'signals/\1'),
        ('signals/err|loss/probabilities', 'outputs'),
        ('loss/per_lane', 'loss/mask'),
    )
]
SLOT = re.compile('optimizer/state_(?:before|after)/(.*)/[^/]*'), r'params_before/\1'
OF_LANES = ('inputs', 'targets', 'outputs', 'signals', 'loss', 'factors')


def shape_problems(raw: Mapping, shape: Shapes) -> Iterator[Problem]:
    """What is wrong with the shapes of a receipt, whose keys are right."""
    lanes, opaque = len(raw['lanes']), raw['topology']['cell'] == 'opaque'
    known_slots = (raw['optimizer'] or {}).get('name') in OPTIMIZERS
    alike = [*ALIKE, *([SLOT] if known_slots else [])]
    if raw['loss']['name'] in LOSSES or not opaque:
        alike.append((re.compile('targets'), 'outputs'))
    for path, found in shape.items():
        for pattern, other in alike:
            if match := pattern.fullmatch(path):
                want = shape.get(match.expand(other), found)
                if want != found:
                    said = f'{found}, and {match.expand(other)} has {want}'
                    yield Problem(path, said)
        laned = opaque or path.split('/')[0] not in OF_LANES or found[:1] == (lanes,)
        laned = laned and (not path.startswith('traces_') or found[:1] == (lanes,))
        if not laned:
            yield Problem(path, f'{found}: axis 0 is not the {lanes} lanes')
    axes = {'B': lanes}
    for path, want in (*_by_group(raw, shape), *_of_loss(raw), *_of_cell(raw)):
        yield from _fits(shape, path, want, axes)
    yield from misfits(raw, shape)


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
