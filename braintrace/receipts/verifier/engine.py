"""The engine: a whole step out of parameters, carry, traces, inputs and targets alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .bounds import Num, constant, exact, total
from .cells import CELLS, CellStep, filtered, matrix_times
from .losses import LOSSES, softmax
from .optimizers import OPTIMIZERS
from .primitives import FORMULAS
from .record import FILTER, Record

__all__ = [
    'Derived',
    'correction',
    'derive_step',
    'd_rtrl_gradient',
    'es_gradient',
    'factored_after',
    'instant_of',
    'recurrent_of',
]

Entries = list[Num | None]


@dataclass
class Derived:
    """The fields of a step by path; ``margin`` and ``spikes`` of a cell that spikes."""

    fields: dict[str, Num | None] = field(default_factory=dict)
    margin: Num | None = None
    spikes: str | None = None

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


# the algebra of a step, for the engine and for the rules ------------------------------------------


def recurrent_of(D: list[Entries], old: Entries) -> Entries:
    """``sum_r D_sr e'_r`` for each state; ``D_sr`` gets the axes of the entry that it lacks."""
    return [
        total(
            _like(d, e) * e for d, e in zip(row, old, strict=True) if d is not None and e is not None
        )
        for row in D
    ]


def _like(d: Num, e: Num) -> Num:
    """``d`` with an axis behind the lanes for each that an entry has more."""
    more = e.value.ndim - d.value.ndim
    return d.reshape((d.shape[0], *[1] * more, *d.shape[1:])) if more > 0 else d


def instant_of(primitive: str, x: Num, D_f: Entries) -> dict[str, Entries]:
    """``D_f (x) x`` for each trainable and state."""
    per_state = [None if d is None else FORMULAS[primitive](x, d) for d in D_f]
    names = next((list(one) for one in per_state if one is not None), [])
    return {n: [None if one is None else one[n] for one in per_state] for n in names}


def factored_after(a_x: Num, a_f: Num, x: Num, D, D_f: Entries, old: dict[str, Entries]):
    """``ex = a_x ex' + x`` and ``ef = a_f D ef' + (1 - a_f) D_f``."""
    moved = recurrent_of(D, old['f'])
    fresh = constant(1 - a_f.value, x.floor)
    f = [
        total((None if m is None else a_f * m, None if d is None else fresh * d))
        for m, d in zip(moved, D_f, strict=True)
    ]
    return {'x': [a_x * old['x'][0] + x], 'f': f}


def d_rtrl_gradient(primitive: str, x: Num, dy: Num, history) -> dict[str, Num]:
    """``sum_b x (x) dy + sum_b sum_s c_s e'_s``; ``history``: pairs of c and the entries of each
    group.
    """
    grads = {name: one.sum(0) for name, one in FORMULAS[primitive](x, dy).items()}
    for name in grads:
        for signals, entries in history:
            for c, e in zip(signals, entries.get(name, []), strict=False):
                if c is not None and e is not None:
                    grads[name] = grads[name] + (_like(c, e) * e).sum(0)
    return grads


def es_gradient(primitive: str, x: Num, dy: Num, groups) -> dict[str, Num]:
    """``sum_b ex (x) (dh . ef / correction)`` and the same-step part that misses the groups;
    ``groups``: of each ``(dh, D_f, ex, ef, correction)``.
    """
    grads: dict[str, Num] = {}
    rest: Num | None = dy
    for dh, D_f, ex, ef, corrected in groups:
        sent = total(s * e for s, e in zip(dh, ef, strict=True) if s is not None and e is not None)
        through = total(s * d for s, d in zip(dh, D_f, strict=True) if None not in (s, d))
        if through is not None:
            rest = rest - through
        if sent is not None:
            sent = sent / corrected.reshape((-1, *[1] * (sent.value.ndim - 1)))
            for name, one in FORMULAS[primitive](ex, sent).items():
                grads[name] = total((grads.get(name), one.sum(0)))
    for name, one in FORMULAS[primitive](x, rest).items():
        grads[name] = total((grads.get(name), one.sum(0)))
    return grads


def correction(decay: float, t: np.ndarray, floor: float) -> Num:
    """``1 - a^(t+1)`` for each lane."""
    power = float(decay) ** (t + 1.0)
    return Num(1 - power, (t + 2) * power + np.abs(1 - power), floor)


class _Step:
    """The derivation of one step; ``derived`` has all of its fields."""

    def __init__(self, given: Record, spikes: np.ndarray | None):
        self.given, self.forced, self.derived = given, spikes, Derived()
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

    def role(self, name: str) -> str:
        return self.roles[name]

    def weight(self, relation: Mapping) -> Num:
        return self.given.num(f'params_before/{relation["params"]["weight"]}')

    def product(self, relation: Mapping, x: Num) -> Num:
        path = relation['params'].get('bias')
        bias = None if path is None else self.given.num(f'params_before/{path}')
        return matrix_times(x, self.weight(relation), bias)

    # forwards -------------------------------------------------------------------------------------

    def _forward(self) -> None:
        given, known = self.given, CELLS[self.given.topology['cell']]
        old = {role: given.num(f'carry_before/{self.role(role)}') for role in known.roles}
        inputs = given.num('inputs')
        back = old[known.output]
        self.x = exact(np.concatenate([inputs.value, back.value], -1), given.floor)
        y = self.product(self.recurrent, self.x)
        step = known.step(self.constants, old, y, self.forced)
        self.derived.margin = step.margin
        if step.margin is not None:
            self.derived.spikes = f'carry_after/{self.role("z")}'
        for role, value in step.new.items():
            self.derived.put(f'carry_after/{self.role(role)}', value)
        if FILTER in given.groups[self.group]['states']:
            step = filtered(step, self.number(given.algorithm['kappa']), y.shape)
        self.step: CellStep = step
        self.sent = step.new[known.output]
        out = self.product(self.readout, self.sent)
        if self.leaky:
            self.kappa_out = self.number(self.constants['kappa_out'])
            out = self.kappa_out * given.num(f'carry_before/{self.role("o")}') + out
            self.derived.put(f'carry_after/{self.role("o")}', out)
        self.outputs = out
        self.derived.put('outputs', out)
        self._factor(self.recurrent, self.x, step.D, step.D_f)
        if self.leaky:
            one = exact(np.ones(out.shape), given.floor)
            self._factor(self.readout, self.sent, [[self.kappa_out.to(out.shape)]], [one])
        else:
            self.derived.put(f'factors/{self.readout["name"]}//x', self.sent)

    def _factor(self, relation: Mapping, x: Num, D: list[Entries], D_f: Entries) -> None:
        at = f'factors/{relation["name"]}/{relation["groups"][0]}'
        self.derived.put(f'{at}/x', x)
        self.derived.put(f'{at}/D_f', D_f)
        self.derived.put(f'{at}/D', D)

    # signals --------------------------------------------------------------------------------------

    def _signals(self) -> None:
        given, step = self.given, self.step
        err = self._error()
        sent_back = self._sent_back(err)
        dh = [None if e is None else sent_back * e for e in step.emits]
        dy = total(s * d for s, d in zip(dh, step.D_f, strict=True) if None not in (s, d))
        c = _through(dh, step.D)
        if given.algorithm['credit'] == 'whole':
            width = given['inputs'].shape[-1]
            back = (dy @ self.weight(self.recurrent).T)[:, width:]
            for r, slope in enumerate(step.emitted):
                if slope is not None:
                    c[r] = total((c[r], back * slope))
        self.dh, self.dy, self.c = {self.group: dh}, {self.recurrent['name']: dy}, {self.group: c}
        self.dy[self.readout['name']] = err
        if self.leaky:
            group = self.readout['groups'][0]
            self.dh[group], self.c[group] = [err], [err * self.kappa_out]
        for name, found in (('dh', self.dh), ('dy', self.dy), ('c', self.c)):
            for key, value in found.items():
                self.derived.put(f'signals/{name}/{key}', value)
        if given.factored:
            decay = given.algorithm['decay_f']
            self.correction = correction(decay, given.t, given.floor)
            self.derived.put('signals/correction', self.correction)

    def _error(self) -> Num:
        """The loss of each lane, in total, and its derivative by the outputs."""
        given, loss = self.given, self.given.raw['loss']
        mask, targets = given.num('loss/mask'), given.num('targets')
        known = LOSSES[loss['name']]
        divisor = mask.sum() if loss['reduction'] == 'mean' else self.number(1.0)
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

    def _of(self, relation: Mapping):
        if relation is self.recurrent:
            return self.x, self.step.D, self.step.D_f
        one = exact(np.ones(self.outputs.shape), self.given.floor)
        return self.sent, [[self.kappa_out.to(self.outputs.shape)]], [one]

    def _traced(self) -> list[Mapping]:
        return [self.recurrent, self.readout] if self.leaky else [self.recurrent]

    def _traces(self) -> None:
        self.after: dict[str, dict[str, Entries]] = {}
        algorithm = self.given.algorithm
        for relation in self._traced():
            old, (x, D, D_f) = self._before(relation), self._of(relation)
            name, at = relation['name'], f'traces_after/{relation["name"]}/{relation["groups"][0]}'
            if self.given.factored:
                decays = (self.number(algorithm[key]) for key in ('decay_x', 'decay_f'))
                new = factored_after(*decays, x, D, D_f, old)
                self.derived.put(f'{at}/x', new['x'][0])
                self.derived.put(f'{at}/f', new['f'])
            else:
                fresh = instant_of(relation['primitive'], x, D_f)
                new = {
                    slot: [
                        total(pair)
                        for pair in zip(recurrent_of(D, old[slot]), fresh[slot], strict=True)
                    ]
                    for slot in relation['params']
                }
                for slot, value in new.items():
                    self.derived.put(f'{at}/{slot}', value)
            self.after[name] = new

    def _gradients(self) -> None:
        self.gradients: dict[str, Num] = {}
        for relation in (self.recurrent, self.readout):
            name, primitive = relation['name'], relation['primitive']
            x = self.x if relation is self.recurrent else self.sent
            dy, groups = self.dy[name], relation['groups']
            if self.given.factored:
                new = self.after.get(name, {})
                found = es_gradient(
                    primitive,
                    x,
                    dy,
                    [
                        (self.dh[g], self._of(relation)[2], new['x'][0], new['f'], self.correction)
                        for g in groups
                    ],
                )
            else:
                history = [(self.c[g], self._before(relation)) for g in groups]
                found = d_rtrl_gradient(primitive, x, dy, history)
            for slot, path in relation['params'].items():
                if self.given.topology['routes'][path]['kind'] != 'frozen':
                    self.gradients[path] = found[slot]
                    self.derived.put(f'gradients/{path}', found[slot])

    @cached_property
    def moving(self) -> list[str]:
        """The parameters that the optimiser moves."""
        return list(self.gradients)

    def _optimizer(self) -> None:
        given, raw = self.given, self.given.raw['optimizer']
        for path in given.keys('params_before'):
            self.derived.put(f'params_after/{path}', given.num(f'params_before/{path}'))
        if raw is None or raw['name'] not in OPTIMIZERS:
            return
        known, config = OPTIMIZERS[raw['name']], raw['config']
        for path in self.moving:
            parameter = given.num(f'params_before/{path}')
            at = f'optimizer/state_before/{path}'
            slots = {slot: given.num(f'{at}/{slot}') for slot in known.slots}
            count = raw['state_before']['count'] or 0
            new, update = known.step(config, count, slots, self._acted_on(path), parameter)
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


def _through(dh: Entries, D: list[Entries]) -> Entries:
    """``sum_s dh_s D_sr`` for each old state r."""
    size = len(D)
    return [
        total(
            dh[s] * D[s][r] for s in range(size) if dh[s] is not None and D[s][r] is not None
        )
        for r in range(size)
    ]
