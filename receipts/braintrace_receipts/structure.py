"""Rule 0: what the parts of a receipt say about each other, before any number is compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from .arrays import INLINE, is_sampled
from .bounds import room_for
from .cells import CELLS, READOUTS
from .errors import MAX_TOTAL, Problem
from .optimizers import OPTIMIZERS
from .primitives import FORMULAS
from .record import FILTER, Record, array_paths, elements_of
from .schema import MOST, check
from .shapes import shape_problems
from .surrogates import SURROGATES

Problems = Iterator[Problem]
Nodes = list[tuple[str, dict | None]]  # the arrays by path


def read(raw: Any) -> tuple[list[Problem], Record | None]:
    """What is wrong with any value, in order and at most 50 things, and the record of one that is
    right; each step needs the one before.
    """
    found = check(raw, 'braintrace.receipt/1')
    for of_names in (_names, _lanes, _keys):
        if not found:
            found = list(islice(of_names(raw), MOST))
    nodes = [] if found else array_paths(raw)
    with room_for(elements_of(nodes)):
        for of_nodes in (_paths, shape_problems, _places):
            if not found:
                found = list(islice(of_nodes(raw, nodes), MOST))
    if found:
        return found, None
    record = Record(raw)
    found = list(islice(_numbers(record), MOST))
    return found, None if found else record


def problems_of_config(raw: Mapping) -> list[Problem]:
    """Those of a configuration that its schema passed: names and lanes."""
    return [*_names(raw), *_lanes(raw)]


def _unless(holds: bool, path: str, message: str) -> Problems:
    if not holds:
        yield Problem(path, message)


def _sets(path: str, found, want) -> Problems:
    found, want = set(found), set(want)
    if found != want:
        said = [f'without {sorted(want - found)[:5]}'] if want - found else []
        more = sorted(found - want)[:5]
        said += [f'with {more}, which it should not have'] if more else []
        yield Problem(path, '; '.join(said))


# names --------------------------------------------------------------------------------------------


def _names(raw: Mapping) -> Problems:
    topology, algorithm = raw['topology'], raw['algorithm']
    groups = [group['name'] for group in topology['groups']]
    names = [relation['name'] for relation in topology['relations']]
    known_groups = set(groups)
    for what, found in (('groups', groups), ('relations', names)):
        yield from _unless(all(found), f'topology/{what}', 'a name that is empty')
        yield from _unless(
            len(set(found)) == len(found), f'topology/{what}', 'a name appears twice'
        )
    for i, relation in enumerate(topology['relations']):
        at = f'topology/relations/{i}'
        own = relation['groups']
        yield from _unless(known_groups.issuperset(own), f'{at}/groups', 'no such group')
        yield from _unless(len(set(own)) == len(own), f'{at}/groups', 'a group appears twice')
        for slot, path in relation['params'].items():
            known = path in raw['params_before']
            yield from _unless(known, f'{at}/params/{slot}', f'{path} is no parameter')
        for part in relation['source'] or ():
            kind, _, name = part.partition('/')
            known = part == 'inputs' or (kind in ('carry', 'new') and name in raw['carry_before'])
            yield from _unless(known, f'{at}/source', f'{part} is nothing that x can be')
    for i, group in enumerate(topology['groups']):
        for state in group['states']:
            known = state in raw['carry_before'] or state == FILTER
            yield from _unless(known, f'topology/groups/{i}/states', f'{state} is no state')
    yield from _decays(algorithm)
    if topology['cell'] == 'opaque':
        yield from _sets('topology/roles', topology['roles'], ())
        yield from _sets('topology/constants', topology['constants'], ())
    else:
        yield from _known_cell(raw, topology)


def _decays(algorithm: Mapping) -> Problems:
    factored = algorithm['name'] == 'ES_D_RTRL'
    for name in ('decay_x', 'decay_f'):
        right = (algorithm[name] is not None) == factored
        want = 'a decay in [0, 1)' if factored else 'null: D_RTRL has no decay'
        said = f'{algorithm[name]} where this is due: {want}'
        yield from _unless(right, f'algorithm/{name}', said)
    plain = algorithm['kappa'] == 0 and algorithm['credit'] == 'cut'
    yield from _unless(plain or not factored, 'algorithm', 'ES_D_RTRL has no filter and cut credit')


def _known_cell(raw: Mapping, topology: Mapping) -> Problems:
    cell, readout = CELLS[topology['cell']], topology['readout']
    if readout is None:
        yield Problem('topology/readout', 'a known cell has a readout, linear or leaky')
        return
    leaky = readout == 'leaky'
    roles, constants = topology['roles'], topology['constants']
    carried = (*cell.roles, 'o') if leaky else cell.roles
    wrong = list(_sets('topology/roles', roles, (*carried, 'recurrent', 'readout')))
    wrong += _sets('topology/constants', constants, {*cell.constants, *READOUTS[readout]})
    states = [roles.get(role) for role in carried]
    wrong += _unless(len(set(states)) == len(states), 'topology/roles', 'two roles for one state')
    both = roles.get('recurrent') != roles.get('readout')
    wrong += _unless(both, 'topology/roles', 'two roles for one relation')
    yield from wrong
    if wrong:
        return
    yield from _sets('carry_before', raw['carry_before'], (roles[role] for role in carried))
    relations = {relation['name']: relation for relation in topology['relations']}
    yield from _sets('topology/relations', relations, (roles['recurrent'], roles['readout']))
    surrogate = constants.get('surrogate')
    if surrogate is not None:
        at, known = 'topology/constants/surrogate', surrogate['name'] in SURROGATES
        yield from _unless(known, at, f'{surrogate["name"]}; known are {sorted(SURROGATES)}')
        if known:
            due = SURROGATES[surrogate['name']][1]
            yield from _sets(f'{at}/parameters', surrogate['parameters'], due)
    groups = {group['name']: group for group in topology['groups']}
    states = [roles[state] for state in cell.states]
    states += [FILTER] if raw['algorithm']['kappa'] else []
    for role, own in (('recurrent', states), ('readout', [roles['o']] if leaky else None)):
        relation = relations.get(roles[role])
        if relation is None:
            continue
        at = f'topology/relations/{roles[role]}'
        yield from _unless(relation['primitive'] == 'etp_mm', f'{at}/primitive', 'not etp_mm')
        yield from _unless('options' not in relation, f'{at}/options', 'etp_mm has none')
        slots = {'weight', 'bias'} if 'bias' in relation['params'] else {'weight'}
        yield from _sets(f'{at}/params', relation['params'], slots)
        if own is None:
            yield from _unless(not relation['groups'], f'{at}/groups', 'a linear readout has none')
        elif len(relation['groups']) != 1 or relation['groups'][0] not in groups:
            yield Problem(f'{at}/groups', 'not one group')
        else:
            found = groups[relation['groups'][0]]['states']
            yield from _unless(found == own, f'{at}/groups', f'states {found}, not {own}')


# lanes and keys -----------------------------------------------------------------------------------


def _lanes(raw: Mapping) -> Problems:
    lanes = len(raw['lanes'])
    yield from _unless(lanes > 0, 'lanes', 'no lane')
    yield from _unless(len(set(raw['lanes'])) == lanes, 'lanes', 'an id appears twice')
    for name in ('reset', 't'):
        yield from _unless(len(raw[name]) == lanes, name, f'{len(raw[name])} for {lanes} lanes')
    if any(raw['reset']):
        given = 'initial' in raw
        yield from _unless(given, 'initial', 'a lane was reset, and no initial carry is given')
    if 'initial' in raw:
        yield from _sets('initial', raw['initial'], raw['carry_before'])


def _keys(raw: Mapping) -> Problems:
    topology, signals = raw['topology'], raw['signals']
    groups = {group['name']: group for group in topology['groups']}
    relations = {relation['name']: relation for relation in topology['relations']}
    pairs = [(name, group) for name, one in relations.items() for group in one['groups']]
    alone = [(name, None) for name, one in relations.items() if not one['groups']]
    yield from _sets('carry_after', raw['carry_after'], raw['carry_before'])
    yield from _sets('params_after', raw['params_after'], raw['params_before'])
    yield from _listed('factors', raw['factors'], pairs + alone)
    for name in ('traces_before', 'traces_after'):
        yield from _listed(name, raw[name], pairs)
    related = [group for _, group in pairs]
    yield from _sets('signals/dy', signals['dy'], relations)
    for name in ('dh', 'c'):
        yield from _sets(f'signals/{name}', signals[name], related)
        for group, entries in signals[name].items():
            right = len(entries) == len(groups[group]['states']) if group in groups else True
            yield from _unless(right, f'signals/{name}/{group}', 'not one entry for each state')
    yield from _counts(raw, {name: len(group['states']) for name, group in groups.items()})
    factored = raw['algorithm']['name'] == 'ES_D_RTRL'
    has = 'correction' in signals
    yield from _unless(has == factored, 'signals/correction', 'it belongs to ES_D_RTRL alone')
    uses = raw['loss']['name'] == 'softmax_ce'
    right = uses == ('probabilities' in raw['loss'])
    yield from _unless(right, 'loss/probabilities', 'it belongs to softmax_ce alone')
    known = set(raw['params_before'])
    unknown = sorted(set(raw['gradients']) - known)[:5]
    yield from _unless(not unknown, 'gradients', f'no such parameters: {unknown}')
    window = raw.get('window') or {}
    if 'gradients' in window:
        last = window['index'] == window['length'] - 1
        yield from _unless(last, 'window/gradients', 'it belongs to the last record of a window')
        yield from _sets('window/gradients', window['gradients'], raw['gradients'])
    optimizer = raw['optimizer']
    if optimizer is not None:
        last = not window or 'gradients' in window
        yield from _unless(last, 'optimizer', 'it acts in the last record of a window alone')
        unknown = sorted(set(optimizer['updates']) - known)[:5]
        yield from _unless(not unknown, 'optimizer/updates', f'no such: {unknown}')
        yield from _optimizer(optimizer)


def _counts(raw: Mapping, states: Mapping) -> Problems:
    """An entry for each state of a group, and the same slots of a trace before and after."""
    for factor in raw['factors']:
        count = states.get(factor['group'], 0)
        lists = factor['D_f'], factor['D'], *factor['D']
        right = all(len(one) == count for one in lists)
        yield from _unless(right, f'factors/{factor["relation"]}', f'not {count} states')
    factored, slots = raw['algorithm']['name'] == 'ES_D_RTRL', {}
    due = {
        one['name']: {'f'} if factored else {*one['params']}
        for one in raw['topology']['relations']
        if factored or one['primitive'] in FORMULAS
    }
    for name in ('traces_before', 'traces_after'):
        for trace in raw[name]:
            relation, group, entries = (trace[key] for key in ('relation', 'group', 'entries'))
            at, count = f'{name}/{relation}/{group}', states.get(group, 0)
            for slot, entry in entries.items():
                right = not isinstance(entry, list) or len(entry) == count
                yield from _unless(right, f'{at}/{slot}', f'not {count} states')
            lacks = sorted(due.get(relation, set()) - entries.keys())
            yield from _unless(not lacks, at, f'without {lacks}')
            yield from _sets(at, entries, slots.setdefault((relation, group), entries))
    direct, signals = raw['signals'].get('direct', {}), raw['signals']
    for kind, found in direct.items():
        unknown = sorted(set(found) - set(signals[kind]))[:5]
        yield from _unless(not unknown, f'signals/direct/{kind}', f'no such: {unknown}')
    for group, entries in direct.get('c', {}).items():
        right = len(entries) == len(signals['c'].get(group, entries))
        yield from _unless(right, f'signals/direct/c/{group}', 'not one entry for each state')


def _optimizer(optimizer: Mapping) -> Problems:
    """The numbers of a known optimiser: those that it needs, and no other."""
    if optimizer['name'] not in OPTIMIZERS:
        return
    known, config = OPTIMIZERS[optimizer['name']], optimizer['config']
    yield from _sets('optimizer/config', set(config) - set(known.may), known.needs)


def _listed(name: str, found, want) -> Problems:
    pairs = [(one['relation'], one['group']) for one in found]
    yield from _unless(len(set(pairs)) == len(pairs), name, 'a relation and group appear twice')
    said = f'of {pairs[:5]}, and {list(want)[:5]} are due'
    yield from _unless(set(pairs) == set(want), name, said)


# shapes and numbers -------------------------------------------------------------------------------


def _paths(raw: Mapping, nodes: Nodes) -> Problems:
    """Each array has a path of its own, and all together are no more than may be."""
    counts = Counter(path for path, _ in nodes)
    twice = [path for path, count in counts.most_common(3) if count > 1]
    yield from _unless(not twice, 'topology', f'two names that make one path: {twice}')
    total = elements_of(nodes, sampled=True)
    said = f'{total:,} elements in all, more than {MAX_TOTAL:,}'
    yield from _unless(total <= MAX_TOTAL, '', said)


def _places(raw: Mapping, nodes: Nodes) -> Problems:
    """Where the numbers of each array are, and of which dtype."""
    dtype = raw['numeric']['dtype']
    for path, node in nodes:
        if node is None:
            continue
        if is_sampled(node):
            size = math.prod(node['shape'])
            small = f'a sample of {size} elements; up to {INLINE} are given whole'
            yield from _unless(size > INLINE, path, small)
        elif 'data' not in node:
            yield Problem(path, f'its numbers are in {node["file"]}, which was not read')
        elif not path.startswith(('inputs', 'params_before', 'params_after')):
            right = node['dtype'] == dtype or node['dtype'] not in ('float32', 'float64')
            yield from _unless(right, path, f'{node["dtype"]}, and numeric says {dtype}')


def _numbers(record: Record) -> Problems:
    """Spikes are 0 or 1."""
    spikes = record.topology['roles'].get('z')
    for path in (f'carry_before/{spikes}', f'carry_after/{spikes}'):
        if spikes is not None and not is_sampled(record.fields.get(path)):
            value = record.fields.get(path, np.zeros(0))
            right = bool(np.all((value == 0) | (value == 1)))
            yield from _unless(right, path, 'a spike that is neither 0 nor 1')
