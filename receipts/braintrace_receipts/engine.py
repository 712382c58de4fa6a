"""The engine: a whole step out of parameters, carry, traces, inputs and targets alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from .bounds import Num, constant, exact, total, warm_up
from .cells import CELLS, KnownCell, chained, columns, ones
from .losses import LOSSES, divisor_of, softmax
from .optimizers import OPTIMIZERS
from .primitives import Op
from .record import FILTER, Record

__all__ = [
    'Derived',
    'derive_parts',
    'derive_step',
    'd_rtrl_gradient',
    'es_gradient',
    'factored_after',
    'instant_of',
    'op_of',
    'recurrent_of',
]

Entries = list[Num | None]


@dataclass
class Derived:
    """The fields of a step by path, and how far each spike is above its threshold."""

    fields: dict[str, Num | None] = field(default_factory=dict)
    margin: Num | None = None

    def put(self, path: str, value) -> None:
        """A field, or a list of fields."""
        if isinstance(value, list):
            for i, one in enumerate(value):
                self.put(f'{path}/{i}', one)
        else:
            self.fields[path] = value


def derive_step(given: Record, spikes: np.ndarray | None = None) -> Derived:
    """Everything that a known cell makes in one step. ``given`` is read for what stands before the
    step; ``spikes`` replace those that the potential makes.
    """
    return _Step(given, spikes).derived


def derive_parts(given: Record) -> _Step:
    """The parts of a step with the spikes that it has."""
    spikes = given[f'carry_after/{given.topology["roles"]["z"]}'] if _spikes(given) else None
    return _Step(given, spikes)


def _spikes(given: Record) -> bool:
    return CELLS[given.topology['cell']].spikes


# the algebra of a step, for the engine and for the rules ------------------------------------------


def op_of(r: Record, relation: Mapping, rank: int = 1) -> Op:
    """The application of a relation, whose y has ``rank`` axes in one lane."""

    def weights(slot: str) -> Num:
        return r.num(f'params_before/{relation["params"][slot]}')

    return Op(relation['primitive'], relation.get('options', {}), weights, rank)


def recurrent_of(D: list[Entries], old: Entries, times: Callable = operator.mul) -> Entries:
    """``sum_r D_sr e'_r`` for each state; ``times``: the product of a D and an entry."""
    return [
        total(times(d, e) for d, e in zip(row, old, strict=True) if d is not None and e is not None)
        for row in D
    ]


def instant_of(op: Op, x: Num | None, D_f: Entries) -> dict[str, Entries]:
    """``D_f (x) x`` for each trainable and state."""
    per_state = [None if d is None else op.instant(x, d) for d in D_f]
    names = next((list(one) for one in per_state if one is not None), [])
    return {n: [None if one is None else one[n] for one in per_state] for n in names}


def factored_after(a_x: Num, a_f: Num, x: Num | None, D, D_f: Entries, old: dict[str, Entries]):
    """``ex = a_x ex' + x`` and ``ef = a_f D ef' + (1 - a_f) D_f``; no ex where there is no x."""
    moved = recurrent_of(D, old['f'])
    fresh = constant(1 - a_f.value, a_f.floor)
    f = [
        total((None if m is None else a_f * m, None if d is None else fresh * d))
        for m, d in zip(moved, D_f, strict=True)
    ]
    return {'f': f} if x is None else {'x': [a_x * old['x'][0] + x], 'f': f}


def d_rtrl_gradient(op: Op, x: Num | None, dy: Num, history) -> dict[str, Num]:
    """``sum_b x (x) dy + sum_b sum_s c_s e'_s``; ``history``: pairs of c and the entries of each
    group.
    """
    grads = {slot: op.gradient(slot, dy, one) for slot, one in op.instant(x, dy).items()}
    for slot in grads:
        for signals, entries in history:
            for c, e in zip(signals, entries.get(slot, []), strict=False):
                if c is not None and e is not None:
                    grads[slot] = grads[slot] + op.gradient(slot, c, op.carried(slot, c, e))
    return grads


def es_gradient(op: Op, x: Num | None, dy: Num, groups) -> dict[str, Num]:
    """``sum_b ex (x) (dh . ef / correction)`` and the same-step part that misses the groups;
    ``groups``: of each ``(dh, D_f, ex, ef, correction)``.
    """
    parts: list[tuple[Num | None, Num]] = []
    rest: Num = dy
    for dh, D_f, ex, ef, corrected in groups:
        sent = total(s * e for s, e in zip(dh, ef, strict=True) if s is not None and e is not None)
        through = total(s * d for s, d in zip(dh, D_f, strict=True) if None not in (s, d))
        if through is not None:
            rest = rest - op.to_y(through)
        if sent is not None:
            parts.append((ex, sent / corrected.reshape((-1, *[1] * (sent.value.ndim - 1)))))
    grads: dict[str, Num] = {}
    for read, d in (*parts, (x, rest)):
        for slot, one in op.instant(read, d).items():
            found = total((grads.get(slot), op.gradient(slot, d, one)))
            grads |= {slot: found} if found is not None else {}
    return grads


class _Step:
    """The derivation of one step; ``derived`` has all of its fields."""

    def __init__(self, given: Record, spikes: np.ndarray | None):
        self.given, self.forced, self.derived = given, spikes, Derived()
        self.known: KnownCell = CELLS[given.topology['cell']]
        self.roles, self.constants = given.topology['roles'], given.constants
        self.recurrent = given.relations[self.roles['recurrent']]
        self.readout = given.relations[self.roles['readout']]
        self.group = self.recurrent['groups'][0]
        self.leaky = given.topology['readout'] == 'leaky'
        self._forward()
        self._signals()
        self._traces()
        self._gradients()
        self._optimizer()

    def number(self, value) -> Num:
        return constant(value, self.given.floor)

    def weight(self, relation: Mapping) -> Num:
        return self.given.num(f'params_before/{relation["params"]["weight"]}')

    def product(self, relation: Mapping, x: Num) -> Num:
        path = relation['params'].get('bias')
        y = x @ self.weight(relation)
        return y if path is None else y + self.given.num(f'params_before/{path}')

    # forwards -------------------------------------------------------------------------------------

    def _forward(self) -> None:
        given, known = self.given, self.known
        old = {role: given.num(f'carry_before/{self.roles[role]}') for role in known.roles}
        back = old[known.output].value
        self.x = exact(np.concatenate([given['inputs'], back], -1), given.floor)
        new = known.step(self.constants, old, self.product(self.recurrent, self.x))
        if known.spikes:
            self.derived.margin = new.pop('margin')
            if self.forced is not None:
                new['z'] = exact(self.forced, given.floor)
        for role, value in new.items():
            self.derived.put(f'carry_after/{self.roles[role]}', value)
        self.sent, self.emits = new[known.output], known.slopes(self.constants, new)
        self.emitted = known.slopes(self.constants, old)
        self.D = {self.group: known.D(self.constants, old)}
        self.D_f = {self.group: known.D_f(self.constants, old, new)}
        if FILTER in given.groups[self.group]['states']:
            self._filter()
        self._read_out()
        for relation in self.traced:
            self._factor(relation)
        if not self.leaky:
            self.derived.put(f'factors/{self.readout["name"]}//x', self.sent)

    def _filter(self) -> None:
        """One more state, whose value is zero: what a readout that leaks remembers of the output.
        Readouts read it alone.
        """
        D, D_f, emits = self.D[self.group], self.D_f[self.group], self.emits
        kappa = self.number(self.given.algorithm['kappa']).to(self.sent.shape)
        self.D[self.group] = [[*row, None] for row in D] + [[*chained(emits, columns(D)), kappa]]
        self.D_f[self.group] = [*D_f, *chained(emits, [D_f])]
        self.emits = [*[None] * len(emits), ones(self.sent)]
        self.emitted = [*self.emitted, None]

    def _read_out(self) -> None:
        self.outputs = self.product(self.readout, self.sent)
        if self.leaky:
            kappa = self.number(self.constants['kappa_out'])
            old = self.given.num(f'carry_before/{self.roles["o"]}')
            self.outputs = kappa * old + self.outputs
            self.derived.put(f'carry_after/{self.roles["o"]}', self.outputs)
            group = self.readout['groups'][0]
            self.D[group] = [[kappa.to(self.outputs.shape)]]
            self.D_f[group] = [ones(self.outputs)]
        self.derived.put('outputs', self.outputs)

    def same_step(self, relation: Mapping, dy: Num) -> dict[str, Num]:
        """The gradient of an op at a cotangent of its result."""
        return d_rtrl_gradient(op_of(self.given, relation), self.read(relation), dy, ())

    def read(self, relation: Mapping) -> Num:
        """What an op reads."""
        return self.x if relation is self.recurrent else self.sent

    @property
    def traced(self) -> list[Mapping]:
        return [self.recurrent, self.readout] if self.leaky else [self.recurrent]

    def _factor(self, relation: Mapping) -> None:
        (group,) = relation['groups']
        at = f'factors/{relation["name"]}/{group}'
        self.derived.put(f'{at}/x', self.read(relation))
        self.derived.put(f'{at}/D_f', self.D_f[group])
        self.derived.put(f'{at}/D', self.D[group])

    # signals --------------------------------------------------------------------------------------

    def _signals(self) -> None:
        given, group, D = self.given, self.group, self.D
        err = self._error()
        sent_back = self._sent_back(err)
        dh = [None if e is None else sent_back * e for e in self.emits]
        (dy,) = chained(dh, [self.D_f[group]])
        self.dh, self.dy = {group: dh}, {self.recurrent['name']: dy, self.readout['name']: err}
        if self.leaky:
            self.dh[self.readout['groups'][0]] = [err]
        self.c = {name: chained(of_group, columns(D[name])) for name, of_group in self.dh.items()}
        if given.algorithm['credit'] == 'whole':
            back = (dy @ self.weight(self.recurrent).T)[:, given['inputs'].shape[-1] :]
            for r, slope in enumerate(self.emitted):
                if slope is not None:
                    self.c[group][r] = total((self.c[group][r], back * slope))
        for name, found in (('dh', self.dh), ('dy', self.dy), ('c', self.c)):
            for key, value in found.items():
                self.derived.put(f'signals/{name}/{key}', value)
        if given.factored:
            decay = given.algorithm['decay_f']
            self.correction = warm_up(decay, given.t + 1, given.floor)
            self.derived.put('signals/correction', self.correction)

    def _error(self) -> Num:
        """The loss of each lane, in total, and its derivative by the outputs; where there is no
        formula, the one that is stored.
        """
        given, loss = self.given, self.given.raw['loss']
        if loss['name'] not in LOSSES:
            return given.num('signals/err')
        mask, targets = given.num('loss/mask'), given.num('targets')
        known = LOSSES[loss['name']]
        divisor = divisor_of(mask, loss['reduction'])
        per_lane = known.per_lane(self.outputs, targets)
        self.derived.put('loss/per_lane', per_lane)
        self.derived.put('loss/value', (mask * per_lane).sum() / divisor)
        self.derived.put('loss/divisor', divisor)
        if loss['name'] == 'softmax_ce':
            self.derived.put('loss/probabilities', softmax(self.outputs))
        err = known.slope(self.outputs, targets) * (mask / divisor).reshape((-1, 1))
        self.derived.put('signals/err', err)
        return err

    def _sent_back(self, err: Num) -> Num:
        """The error at the cell's output: through the readout, through B, or as a modulator."""
        feedback = self.given.algorithm['feedback']
        if feedback is None:
            return err @ self.weight(self.readout).T
        array = self.given.num('algorithm/feedback')
        return array if feedback['kind'] == 'modulator' else err @ array.T

    # traces, gradients, updates -------------------------------------------------------------------

    def _before(self, relation: Mapping) -> dict[str, Entries]:
        """The trace before the step, by slot."""
        given, at = self.given, f'traces_before/{relation["name"]}/{relation["groups"][0]}'
        if given.factored:
            return {'x': [given.num(f'{at}/x')], 'f': given.entries(f'{at}/f')}
        return {slot: given.entries(f'{at}/{slot}') for slot in relation['params']}

    def _traces(self) -> None:
        self.after: dict[str, dict[str, Entries]] = {}
        algorithm = self.given.algorithm
        for relation in self.traced:
            (group,), old, x = relation['groups'], self._before(relation), self.read(relation)
            D, D_f = self.D[group], self.D_f[group]
            name, at = relation['name'], f'traces_after/{relation["name"]}/{group}'
            if self.given.factored:
                a_x, a_f = (self.number(algorithm[key]) for key in ('decay_x', 'decay_f'))
                new = factored_after(a_x, a_f, x, D, D_f, old)
                self.derived.put(f'{at}/x', new['x'][0])
                self.derived.put(f'{at}/f', new['f'])
            else:
                op = op_of(self.given, relation)
                fresh, new = instant_of(op, x, D_f), {}
                for slot in relation['params']:
                    kept = recurrent_of(D, old[slot], partial(op.carried, slot))
                    new[slot] = [total(pair) for pair in zip(kept, fresh[slot], strict=True)]
                for slot, value in new.items():
                    self.derived.put(f'{at}/{slot}', value)
            self.after[name] = new

    def _gradients(self) -> None:
        self.gradients: dict[str, Num] = {}
        for relation in (self.recurrent, self.readout):
            name, op = relation['name'], op_of(self.given, relation)
            x = self.read(relation)
            dy, groups = self.dy[name], relation['groups']
            if self.given.factored:
                new = self.after.get(name, {})
                found = es_gradient(
                    op,
                    x,
                    dy,
                    [
                        (self.dh[g], self.D_f[g], new['x'][0], new['f'], self.correction)
                        for g in groups
                    ],
                )
            else:
                history = [(self.c[g], self._before(relation)) for g in groups]
                found = d_rtrl_gradient(op, x, dy, history)
            for slot, path in relation['params'].items():
                if not self.given.frozen(path):
                    whole = total((self.gradients.get(path), found[slot]))
                    self.gradients[path] = whole
                    self.derived.put(f'gradients/{path}', whole)

    @cached_property
    def moving(self) -> list[str]:
        """The parameters that the optimiser moves."""
        return list(self.gradients)

    def _optimizer(self) -> None:
        given, raw = self.given, self.given.raw['optimizer']
        known = raw is None or raw['name'] in OPTIMIZERS
        for path in given.keys('params_before'):
            if known or path not in self.moving:
                self.derived.put(f'params_after/{path}', given.num(f'params_before/{path}'))
        if raw is None or not known:
            return
        formula, config = OPTIMIZERS[raw['name']], raw['config']
        for path in self.moving:
            parameter = given.num(f'params_before/{path}')
            at = f'optimizer/state_before/{path}'
            slots = {slot: given.num(f'{at}/{slot}') for slot in formula.slots}
            count = raw['state_before']['count'] or 0
            new, update = formula.step(config, count, slots, self._acted_on(path), parameter)
            for slot, value in new.items():
                self.derived.put(f'optimizer/state_after/{path}/{slot}', value)
            self.derived.put(f'optimizer/updates/{path}', update)
            self.derived.put(f'params_after/{path}', parameter + update)

    def _acted_on(self, path: str) -> Num:
        """The gradient that the optimiser takes: of the step, or of the window that it ends."""
        window = self.given.raw.get('window')
        if window is None or 'gradients' not in window:
            return self.gradients[path]
        return self.given.num(f'window/gradients/{path}')
