"""Another framework's step as a receipt: the claims of a sidecar under the names of a receipt.

A sidecar has what an observer can see: parameters, optimizer state, traces and carry before and
after, ``x``, the slope ``psi`` of the output by the membrane, ``err`` and the learning signal.
``D``, ``D_f`` and the signals ``dh``, ``dy`` and ``c`` follow from those and the constants.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from .arrays import array_of, node, typed
from .bounds import exact
from .canonical import each_line, parse, spec_digest
from .errors import MAX_ELEMENTS, ReceiptError
from .optimizers import OPTIMIZERS
from .reconciler import Result, reconcile, reconcile_run
from .schema import FRAMEWORKS, ROLES, check

FORMAT = 'braintrace.sidecar/1'
STATES = {'rnn': ['h'], 'lif': ['V'], 'alif': ['V', 'a']}
SENT = {'rnn': 'h', 'lif': 'z', 'alif': 'z'}
CELL, READOUT = 'cell', 'readout'  # the relations and their groups
# The trainables of each relation: the roles of the parameters that it is put together from.
PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    CELL: {'weight': ('input', 'recurrent'), 'bias': ('bias',)},
    READOUT: {'weight': ('readout',), 'bias': ('readout_bias',)},
}
Array = np.ndarray
Entries = list[Array | None]


def import_sidecar(raw: bytes, framework: str) -> tuple[dict, Result]:
    """The receipt of one line of a sidecar and what the reconciler says of it.

    The line is hashed before it is parsed. The receipt is made of the claims as they are, also
    where the reconciler disagrees. Raises ``ReceiptError``: the codes of ``parse``; ``schema`` for
    what is no sidecar/1; ``framework`` for a sidecar of another framework; ``sidecar`` for parts
    that make no step.

    >>> import_sidecar(b'{}', 'caffe')
    Traceback (most recent call last):
    braintrace_receipts.errors.ReceiptError: 'caffe'; known are pytorch, jax, tensorflow
    """
    receipt = receipt_of(raw, framework)
    return receipt, reconcile(receipt)


def import_run(raw: bytes, framework: str) -> tuple[list[dict], Result]:
    """The receipts of a run of sidecars, one on each line, and the reconciler's word on the run.

    Each line is hashed with its LF, so that a run has the hashes of its lines as files.

    >>> try:
    ...     import_run(b'{}', 'pytorch')
    ... except ReceiptError as error:
    ...     print(error.code)
    schema
    """
    lines = io.BytesIO(raw).readlines()
    receipts = list(each_line(lines, lambda line: receipt_of(line, framework)))
    return receipts, reconcile_run(receipts)


def receipt_of(raw: bytes, framework: str) -> dict:
    """The receipt of one line of a sidecar."""
    source_hash = f'sha256:{hashlib.sha256(raw).hexdigest()}'
    if framework not in FRAMEWORKS:
        raise ReceiptError('framework', '', f'{framework!r}; known are {", ".join(FRAMEWORKS)}')
    sidecar = parse(raw)
    problems = check(sidecar, FORMAT)
    if problems:
        hint = f'{len(problems)} problems in all' if problems[1:] else ''
        raise ReceiptError('schema', problems[0].path, problems[0].message, hint)
    found = sidecar['framework']['name']
    if found != framework:
        raise ReceiptError(
            'framework', 'framework.name', f'a sidecar of {found}', f'import it as {found}'
        )
    try:
        with np.errstate(all='ignore'):
            return build(sidecar, source_hash, framework)
    except ReceiptError:
        raise
    except (ValueError, KeyError, IndexError, TypeError, ArithmeticError) as error:
        said = f'{type(error).__name__}: {error}'[:300]
        raise ReceiptError('sidecar', '', f'the parts make no step: {said}') from error


class Trainable(NamedTuple):
    """One trainable of a relation: its path, and its parts in the layout (in, out)."""

    relation: str
    slot: str
    path: str
    parts: list[dict]

    def joined(self, key: str, axis: int, of: Callable[[dict], Any] = lambda part: part) -> Array:
        """One array of all parts, one behind the other along the axis of what is read."""
        arrays = []
        for part in self.parts:
            value = array_of(named(of(part), key, self.path))
            turned = part['layout'] == 'out_in' and self.slot == 'weight' and key != 'x'
            arrays.append(np.swapaxes(value, -1, -2) if turned else value)
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis)


class Step(NamedTuple):
    """What the parts of a receipt are made from."""

    sidecar: dict
    trainables: list[Trainable]
    store: Callable[[Any], dict]
    store_trace: Callable[[Any], dict]

    def of(self, relation: str) -> list[Trainable]:
        """The trainables of a relation."""
        return [one for one in self.trainables if one.relation == relation]

    def stored(self, key: str) -> dict:
        """An array of each parameter."""
        return {one.path: self.store(one.joined(key, 0)) for one in self.trainables}

    @property
    def filtered(self) -> bool:
        """Whether the traces are filtered once more for a readout that leaks."""
        return self.sidecar['algorithm']['kappa'] > 0

    @property
    def leaky(self) -> bool:
        """Whether the readout carries a state."""
        return self.sidecar['readout'] == 'leaky'


def build(sidecar: dict, source_hash: str, framework: str) -> dict:
    """A receipt out of a sidecar that has the right structure."""
    numeric = sidecar['numeric']
    trace = 'float64' if numeric['trace_dtype'] == 'float64' else 'float32'
    step = Step(sidecar, list(trainables(sidecar)), storing(numeric['dtype']), storing(trace))
    D, D_f = derivatives(step)
    given = {key: sidecar[key] for key in ('run_id', 'step', 'every', 'numeric')}
    batch = ('lanes', 'reset', 't', 'inputs', 'targets')
    carries = {'carry_before': sidecar['carry_before']}
    carries |= {'initial': sidecar['initial']} if 'initial' in sidecar else {}
    receipt = {
        'schema': 'braintrace.receipt/1',
        **given,
        'spec_digest': '',
        'algorithm': algorithm_of(sidecar['algorithm']),
        'topology': topology_of(step),
        **{key: sidecar[key] for key in batch},
        'params_before': step.stored('before'),
        **carries,
        'factors': factors_of(step, D, D_f),
        'traces_before': traces_of(step, 'traces_before'),
        'traces_after': traces_of(step, 'traces_after'),
        'carry_after': sidecar['carry_after'],
        'outputs': sidecar['outputs'],
        'loss': sidecar['loss'],
        'signals': signals_of(step, D, D_f),
        'gradients': step.stored('gradient'),
        'optimizer': optimizer_of(step),
        'params_after': step.stored('after'),
        'source': {'framework': framework, 'version': sidecar['framework']['version']},
        'import_provenance': {
            'source_hash': source_hash,
            'format': FORMAT,
            'importer': f'import {framework}',
        },
        **{key: sidecar[key] for key in ('helper', 'labels') if key in sidecar},
    }
    receipt['spec_digest'] = spec_digest(receipt)
    return receipt


# -- names -----------------------------------------------------------------------------------------


def trainables(sidecar: dict) -> Iterable[Trainable]:
    """The parameters by relation; those for the inputs and for the recurrence make one weight."""
    by_role = {part['role']: part for part in sidecar['parameters']}
    if len(by_role) < len(sidecar['parameters']):
        raise ReceiptError('sidecar', 'parameters', 'a role stands twice')
    missing = {'recurrent', 'readout'} - set(by_role)
    if missing:
        raise ReceiptError(
            'sidecar', 'parameters', f'none is {min(missing)}', f'roles are {", ".join(ROLES)}'
        )
    for relation, slots in PARTS.items():
        for slot, roles in slots.items():
            parts = [by_role[role] for role in roles if role in by_role]
            if parts:
                path = '+'.join(part['name'] for part in parts)
                yield Trainable(relation, slot, path, parts)


def named(table: dict, key: str, path: str) -> Any:
    """An entry of a parameter, which the error names if it is missing."""
    if key not in table:
        raise ReceiptError('sidecar', path, f'{key} is missing')
    return table[key]


def storing(dtype: str) -> Callable[[Any], dict]:
    """How an array becomes a node of this dtype; what is not finite is refused."""

    def store(value: Any) -> dict:
        array = typed(value, dtype)
        if not np.isfinite(array).all():
            raise ReceiptError('sidecar', '', 'a number that follows from the parts is not finite')
        return node(array)

    return store


def algorithm_of(claimed: dict) -> dict:
    """e-prop is the diagonal rule whose traces have parameter size."""
    plain = {'name': 'D_RTRL', 'credit': 'cut', 'decay_x': None, 'decay_f': None}
    return {**plain, **claimed}


def topology_of(step: Step) -> dict:
    """Groups, relations, routes and roles of a known cell with a readout."""
    sidecar, cell = step.sidecar, step.sidecar['cell']
    positions = sidecar['psi']['after']['shape'][1:]
    outputs = sidecar['outputs']['shape'][1:]
    groups = [{'name': CELL, 'shape': positions, 'states': [*STATES[cell], *virtual(step)]}]
    groups += [{'name': READOUT, 'shape': outputs, 'states': ['o']}] if step.leaky else []
    ends = {CELL: [CELL], READOUT: [READOUT] if step.leaky else []}
    sources = {CELL: ['inputs', f'carry/{SENT[cell]}'], READOUT: None}
    relations = [
        {
            'name': name,
            'primitive': 'etp_mm',
            'params': {one.slot: one.path for one in step.of(name)},
            'groups': ends[name],
            'source': sources[name],
        }
        for name in PARTS
    ]
    kinds = {CELL: 'trace', READOUT: 'trace' if step.leaky else 'same-step'}
    carried = [*STATES[cell], *(['z'] if SENT[cell] == 'z' else []), *(['o'] if step.leaky else [])]
    return {
        'cell': cell,
        'readout': sidecar['readout'],
        'groups': groups,
        'relations': relations,
        'routes': {one.path: {'kind': kinds[one.relation]} for one in step.trainables},
        'roles': {'recurrent': CELL, 'readout': READOUT, **{name: name for name in carried}},
        'constants': sidecar['constants'],
    }


def virtual(step: Step) -> list[str]:
    """The state that a filter adds."""
    return ['(filter)'] if step.filtered else []


# -- derivatives and signals -----------------------------------------------------------------------


def slopes(step: Step, when: str) -> Entries:
    """The derivative of what the cell sends by each of its states."""
    cell, psi = step.sidecar['cell'], step.sidecar['psi']
    if when not in psi:
        raise ReceiptError('sidecar', f'psi.{when}', f'is missing: D of this {cell} needs it')
    slope = array_of(psi[when])
    if cell == 'rnn':
        return [np.ones_like(slope)]
    return [slope, -step.sidecar['constants']['beta'] * slope] if cell == 'alif' else [slope]


def derivatives(step: Step) -> tuple[list[Entries], Entries]:
    """``D`` and ``D_f`` of the cell's group, from the constants and the slopes at both steps."""
    cell, constants = step.sidecar['cell'], step.sidecar['constants']
    after = array_of(step.sidecar['psi']['after'])
    full = lambda value: np.full_like(after, value)
    if cell == 'rnn':
        D, D_f = [[full(constants['leak'])]], [after]
    else:
        passes = constants['reset_gradient']
        old = slopes(step, 'before') if passes or cell == 'alif' else []
        back: Entries = [-constants['theta'] * one if passes else None for one in old]
        keep = full(constants['alpha'])
        D, D_f = [[keep + back[0] if passes else keep, *back[1:]]], [full(1.0)]
        if cell == 'alif':
            D.append([old[0], constants['rho'] + old[1]])
            D_f.append(None)
    if not step.filtered:
        return D, D_f
    emits = slopes(step, 'after')
    columns = [list(column) for column in zip(*D)]
    row = [summed(emits, column) for column in columns]
    kappa = full(step.sidecar['algorithm']['kappa'])
    return [*([*one, None] for one in D), [*row, kappa]], [*D_f, summed(emits, D_f)]


def summed(left: Entries, right: Entries) -> Array | None:
    """``sum_s left_s right_s``; ``None`` where each product is zero by structure."""
    products = [a * b for a, b in zip(left, right) if a is not None and b is not None]
    return sum(products[1:], products[0]) if products else None


def factors_of(step: Step, D: list[Entries], D_f: Entries) -> list[dict]:
    """What each relation read, with the derivatives of its group."""
    put = optional(step.store)
    xs = {name: step.store(step.of(name)[0].joined('x', -1)) for name in PARTS}
    out: list[dict] = [
        {
            'relation': CELL,
            'group': CELL,
            'x': xs[CELL],
            'D_f': [put(one) for one in D_f],
            'D': [[put(one) for one in row] for row in D],
        }
    ]
    leaky = readout_derivatives(step)
    group = READOUT if step.leaky else None
    ends = {'D_f': [put(one) for one in leaky[1]], 'D': [[put(v) for v in r] for r in leaky[0]]}
    return [*out, {'relation': READOUT, 'group': group, 'x': xs[READOUT], **ends}]


def readout_derivatives(step: Step) -> tuple[list[Entries], Entries]:
    """``D`` and ``D_f`` of a readout that leaks; nothing for one that does not."""
    if not step.leaky:
        return [], []
    like = array_of(step.sidecar['outputs'])
    return [[np.full_like(like, step.sidecar['constants']['kappa_out'])]], [np.ones_like(like)]


def signals_of(step: Step, D: list[Entries], D_f: Entries) -> dict:
    """``dh`` of the learning signal, ``dy = dh D_f`` and ``c = dh D``; the readout's of ``err``."""
    claimed, put = step.sidecar['signals'], optional(step.store)
    err, learning = array_of(claimed['err']), array_of(claimed['learning'])
    if step.filtered:
        dh: Entries = [*([None] * len(STATES[step.sidecar['cell']])), learning]
    else:
        dh = [learning * one for one in slopes(step, 'after')]
    back = [summed(dh, list(column)) for column in zip(*D)]
    signals = {
        'err': step.store(err),
        'dh': {CELL: [put(one) for one in dh]},
        'dy': {CELL: put(summed(dh, D_f)), READOUT: step.store(err)},
        'c': {CELL: [put(one) for one in back]},
    }
    if step.leaky:
        ((kept,),), _ = readout_derivatives(step)
        signals['dh'][READOUT] = [step.store(err)]
        signals['c'][READOUT] = [step.store(err * kept)]
    return signals


def optional(store: Callable[[Any], dict]) -> Callable[[Any], dict | None]:
    """``None`` stays."""
    return lambda value: None if value is None else store(value)


# -- traces and the optimizer ----------------------------------------------------------------------


def traces_of(step: Step, when: str) -> list[dict]:
    """The traces of each relation, with axes of length 1 repeated."""
    states = {CELL: [*STATES[step.sidecar['cell']], *(['filter'] if step.filtered else [])]}
    states |= {READOUT: ['o']} if step.leaky else {}
    out = []
    for relation, names in states.items():
        entries = {}
        for one in step.of(relation):
            shape = (len(step.sidecar['lanes']), *one.joined('before', 0).shape)
            if math.prod(shape) > MAX_ELEMENTS:
                raise ReceiptError('too-large', one.path, f'traces {shape}, repeated as they are')
            entries[one.slot] = [
                step.store_trace(np.broadcast_to(trace_of(one, when, name), shape))
                for name in names
            ]
        out.append({'relation': relation, 'group': relation, 'entries': entries})
    return out


def trace_of(one: Trainable, when: str, state: str) -> Array:
    """The trace of a trainable for a state: (B, in, out), or (B, out) of a bias."""
    lone = one._replace(parts=one.parts[:1])
    first = lone.joined(state, 1, lambda part: part[when])
    if len(one.parts) == 1:
        return first
    rest = one._replace(parts=one.parts[1:])
    pieces = [first, rest.joined(state, 1, lambda part: part[when])]
    wide = max(piece.shape[-1] for piece in pieces)
    return np.concatenate(
        [np.broadcast_to(piece, (*piece.shape[:-1], wide)) for piece in pieces], 1
    )


def optimizer_of(step: Step) -> dict | None:
    """The optimizer with its state by path; an update that was not seen is computed."""
    claimed = step.sidecar['optimizer']
    if claimed is None:
        return None
    states = {
        f'state_{when}': {
            'count': claimed[f'count_{when}'],
            'slots': {one.path: slots_of(step, one, f'slots_{when}') for one in step.trainables},
        }
        for when in ('before', 'after')
    }
    updates = {one.path: step.store(update_of(claimed, one)) for one in step.trainables}
    return {'name': claimed['name'], 'config': claimed['config'], **states, 'updates': updates}


def slots_of(step: Step, one: Trainable, when: str) -> dict:
    """The arrays that the optimizer keeps for a parameter."""
    names = one.parts[0][when]
    return {name: step.store(one.joined(name, 0, lambda part: part[when])) for name in names}


def update_of(claimed: dict, one: Trainable) -> Array:
    """What was added to a parameter: as the framework says, else from its gradient and slots."""
    if all('update' in part for part in one.parts):
        return one.joined('update', 0)
    if claimed['name'] not in OPTIMIZERS:
        raise ReceiptError(
            'sidecar', one.path, f'no update, and no formula for {claimed["name"]!r:.40}'
        )
    known = OPTIMIZERS[claimed['name']]
    slots = {
        name: exact(one.joined(name, 0, lambda part: part['slots_before'])) for name in known.slots
    }
    values = (exact(one.joined(key, 0)) for key in ('gradient', 'before'))
    return known.step(claimed['config'], claimed['count_before'] or 0, slots, *values)[1].value
