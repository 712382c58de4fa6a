"""What of a learner stays the same from step to step, in the words of a receipt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .. import functional
from ..errors import NotSupportedError, OptionError, StructureError
from ._cells import Cell

FILTER = '(filter)'


@dataclass(frozen=True)
class Topology:
    """``algorithm`` and ``topology`` of a receipt; the names of the leaves of params and of the
    carry; ``orders``: of each group, where its states are in the learner; ``feedback``: the op
    that has weights of its own for the way back, or None.
    """

    algorithm: dict[str, Any]
    topology: dict[str, Any]
    params: tuple[str, ...]
    carry: tuple[str, ...]
    orders: dict[str, list[int]]
    feedback: str | None

    def learned(self, tree) -> dict[str, Any]:
        """The leaves of a tree like params by path, without those of frozen parameters."""
        pairs = zip(self.params, jax.tree.leaves(tree), strict=True)
        kinds = {path: route['kind'] for path, route in self.topology['routes'].items()}
        return {path: leaf for path, leaf in pairs if kinds[path] != 'frozen'}


def topology_of(learner, cell: Cell | None, roles: dict[str, str]) -> Topology:
    """The topology of a compiled learner; ``cell`` and ``roles`` as for ``capture``."""
    graph = learner.graph
    if graph.lanes is None:
        raise StructureError(
            'this learner has no lanes; a receipt has inputs (lanes, I). Give the carry and the '
            'inputs a batch axis, of size 1 for one sample.'
        )
    traced = {relation.key: relation for relation in graph.hidden_param_op_relations}
    relations = [_relation(op, traced.get(op.key), graph) for op in graph.ops if op.owned]
    groups = [_group(group) for group in graph.hidden_groups]
    trained = {path for path, route in learner.routes.items() if route.kind != 'frozen'}
    known = OPAQUE if cell is None else _known(cell, roles, groups, relations, trained)
    orders = {}
    for group in groups:
        orders[group['name']] = order = _order(group['states'], known['roles'])
        group['states'] = [group['states'][s] for s in order]
    topology = {
        'cell': known['cell'],
        'readout': known['readout'],
        'groups': groups,
        'relations': known.get('relations', relations),
        'routes': {
            path: {'kind': route.kind, 'reason': route.reason}
            for path, route in learner.routes.items()
        },
        'roles': known['roles'],
        'constants': known['constants'],
    }
    program = graph.program
    return Topology(
        _algorithm(learner.rule, graph),
        topology,
        tuple(program.param_names),
        tuple('/'.join(key) or 'carry' for key in program.leaf_keys),
        orders,
        _feedback(graph),
    )


def plain(name: str) -> str:
    """The name of an op or a group in a receipt, whose paths are joined by slashes."""
    return name.replace('/', '.')


OPAQUE: dict[str, Any] = {'cell': 'opaque', 'readout': None, 'roles': {}, 'constants': {}}


def _group(group) -> dict:
    states = [FILTER if p.startswith(FILTER) else p for p in group.paths]
    return {'name': plain(group.name), 'shape': list(group.shape[1:]), 'states': states}


def _order(states: list[str], roles: dict[str, str]) -> list[int]:
    """The states of a group as the engine orders them: by role, the filter behind them."""
    places = {name: place for place, name in enumerate(roles.values())}
    return sorted(range(len(states)), key=lambda s: places.get(states[s], len(places)))


def _relation(op, relation, graph) -> dict:
    program = graph.program
    place = {value: name for value, name in zip(program.params, program.param_names)}
    behind = {n: [program.param_names[i] for i in op.parameters[n]] for n in op.trainable}
    through = [n for n, v in op.trainable.items() if v not in place]
    found = {
        'name': plain(op.key),
        'primitive': op.primitive.name,
        'params': {n: place.get(v) or behind[n][0] for n, v in op.trainable.items()},
        'groups': [] if relation is None else [plain(group.name) for group in relation.groups],
        'source': None,
    }
    options = _static(op, program.constants)
    if through:
        options['through'] = through
        others = sorted({path for n in through for path in behind[n]} - {*found['params'].values()})
        options |= {'behind': others} if others else {}
    positions = {} if relation is None else _positions(relation, graph)
    options |= {'positions': positions} if positions else {}
    return {**found, 'options': options} if options else found


def _static(op, constants) -> dict:
    """The static parameters that formulas need; none where the structure of an op changes."""
    if op.repeats:
        raise NotSupportedError(
            f'op {op.key} ({op.where}) is in a loop; a receipt has one product for each step. '
            'Unroll the loop, or record another cell.'
        )
    known = {name: constants[v] for name, v in op.structure.items() if v in constants}
    if len(known) < len(op.structure):
        return {}
    x = None if op.x is None else op.x_aval.shape
    shapes = {name: aval.shape for name, aval in op.weight_avals.items()}
    return options_of(op.primitive.name, {**op.params, **known}, x, shapes)


def options_of(
    primitive: str, params: Mapping[str, Any], x: tuple | None, weights: Mapping[str, tuple]
) -> dict[str, Any]:
    """The ``options`` of a relation; ``params`` with the arrays of the structure, ``x`` and
    ``weights`` are shapes.

    >>> options_of('etp_lora_mm', {'alpha': 2.0, 'has_bias': False}, (4, 3), {})
    {'alpha': 2.0}
    """
    if primitive == 'etp_conv' and x is not None:
        return _conv(params, x, weights['weight'])
    if primitive in ('etp_sp_mm', 'etp_sp_mv'):
        indices = {name: np.asarray(params[name]).tolist() for name in ('rows', 'columns')}
        return {**indices, 'shape': list(params['shape'])}
    found = {name: params[name] for name in ('alpha', 'equation') if name in params}
    return {name: value for name, value in found.items() if isinstance(value, float | str)}


def _conv(params: Mapping[str, Any], x: tuple, kernel: tuple) -> dict[str, Any]:
    """With each default and each name of a padding or of a layout spelled out."""
    layout = jax.lax.conv_dimension_numbers(x, kernel, params['dimension_numbers'])
    window = [kernel[axis] for axis in layout.rhs_spec[2:]]
    strides, ones = params['strides'], (1,) * len(window)
    apart, taps = (params[name] or ones for name in ('lhs_dilation', 'rhs_dilation'))
    padding = params['padding']
    if isinstance(padding, str):
        sizes = [x[axis] for axis in layout.lhs_spec[2:]]
        reach = [(n - 1) * step + 1 for n, step in zip(window, taps, strict=True)]
        padding = jax.lax.padtype_to_pads(sizes, reach, strides, padding)
    return {
        'strides': list(strides),
        'padding': [[int(low), int(high)] for low, high in padding],
        'lhs_dilation': list(apart),
        'rhs_dilation': list(taps),
        'feature_group_count': params['feature_group_count'],
        'batch_group_count': params['batch_group_count'],
        'dimension_numbers': [list(axes) for axes in layout],
    }


def _positions(relation, graph) -> dict[str, list[int] | None]:
    """For each group whose states stand elsewhere than y: the flat position, in one lane, of every
    entry; None where lanes differ.
    """
    found: dict[str, list[int] | None] = {}
    for group, coords in zip(relation.groups, relation.coordinates, strict=True):
        if coords.positions is not None:
            size, lanes = math.prod(group.shape[1:]), graph.lanes
            places = np.asarray(coords.positions).reshape(lanes, -1)
            alike = (places - size * np.arange(lanes)[:, None] == places[0]).all()
            found[plain(group.name)] = places[0].clip(0).tolist() if alike else None
    return found


def _algorithm(rule, graph) -> dict:
    decays, kappa = getattr(rule, 'decays', (None, None)), rule.view.kappa_in(graph)
    if not all(isinstance(x, float | None) for x in (*decays, kappa)):
        raise NotSupportedError(
            f'{rule!r} has an array for a number, which may move, and a receipt holds one number '
            'for a run. Give a number of Python, such as 0.9.'
        )
    return {
        'name': rule.name,
        'credit': rule.credit,
        'decay_x': decays[0],
        'decay_f': decays[1],
        'kappa': kappa,
        'feedback': None,
    }


def _feedback(graph) -> str | None:
    """The op whose error goes back through weights of its own."""
    if graph.fading is not None:
        raise NotSupportedError(
            "feedback 'adaptive' changes at every step, and a receipt holds one B for a run. Use "
            "'random' or 'symmetric'."
        )
    if len(graph.feedback) > 1:
        raise NotSupportedError(
            f'the ops {sorted(graph.feedback)} have feedback weights, and a receipt holds one B. '
            'Name one op in `ops` of braintrace.Feedback.'
        )
    return next(map(plain, graph.feedback), None)


def _known(
    cell: Cell, given: dict[str, str], groups: list, relations: list, params: set[str]
) -> dict[str, Any]:
    """The part of the topology that says which cell it is, where its parts have these names."""
    parts = {'recurrent': 'W', 'readout': 'W_out'} | {state: state for state in cell.states}
    unknown = sorted(set(given) - set(parts))
    if unknown:
        raise OptionError(f'roles names {unknown}; a {cell.kind} cell has {sorted(parts)}.')
    roles = parts | given
    ops = {relation['name']: relation for relation in relations}
    of_weight = {relation['params'].get('weight'): relation['name'] for relation in relations}
    for part in ('recurrent', 'readout'):
        roles[part] = of_weight.get(roles[part], plain(roles[part]))
    missing = sorted({roles['recurrent'], roles['readout']} - set(ops))
    if missing:
        raise StructureError(
            f'cell: no op {missing}; the ops are {sorted(ops)}. Name them in `roles`, such as '
            "roles={'recurrent': 'W', 'readout': 'W_out'}."
        )
    both = {roles['recurrent'], roles['readout']}
    own = {path for name in both for path in ops[name]['params'].values()}
    if more := sorted(set(ops) - both) or sorted(params - own):
        kind = 'ops' if set(ops) - both else 'parameters'
        raise StructureError(
            f'cell: the {kind} {more} are no part of a cell of the kind {cell.kind}, which has one '
            'product, braintrace.matmul(concatenate([x, s], -1), W, bias=b), and a readout. Join '
            'two weights into one and give a bias to matmul, or leave `cell` out: then receipts '
            'are of an opaque cell.'
        )
    traced = [state for state in ('h', 'V', 'a') if state in cell.states]
    wanted = sorted([sorted(roles[s] for s in traced)] + ([[roles['o']]] if 'o' in roles else []))
    found = sorted(sorted(set(group['states']) - {FILTER}) for group in groups)
    if found != wanted:
        raise StructureError(
            f'cell: a {cell.kind} cell with a {cell.readout} readout has groups of the states '
            f'{wanted}; this learner has {found}. Map its names in `roles`, or leave `cell` out: '
            'then receipts are of an opaque cell.'
        )
    sent = roles['h' if cell.kind == 'rnn' else 'z']
    recurrent = {**ops[roles['recurrent']], 'source': ['inputs', f'carry/{sent}']}
    return {
        'cell': cell.kind,
        'readout': cell.readout,
        'roles': roles,
        'constants': dict(cell.constants),
        'relations': [recurrent, ops[roles['readout']]],
    }


def check_rule(learner: functional.OnlineLearner) -> None:
    """Refuse a rule that a receipt has no formulas for."""
    rule = learner.rule
    if rule is None or rule.name not in ('D_RTRL', 'ES_D_RTRL'):
        raise NotSupportedError(
            f'the rule is {None if rule is None else rule.name}; receipts are of '
            'braintrace.rules.d_rtrl(), es_d_rtrl(...) and e_prop(...).'
        )
    if rule.view.scope == 'own':
        raise NotSupportedError(
            "the rule has scope='own'; receipts are of scope='position', whose D has no part of an "
            'op.'
        )
