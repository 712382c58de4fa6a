"""The engine: a whole step out of parameters, carry, traces, inputs and targets alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .bounds import Num, constant, exact, total
from .cells import chained
from .equations import Equations
from .losses import LOSSES, divisor_of, softmax
from .optimizers import OPTIMIZERS
from .record import Record

# What stands before the step: fields of these names are all that the engine has.
GIVEN = (
    *('inputs', 'targets', 'params_before', 'carry_before', 'traces_before', 'loss/mask'),
    *('algorithm/feedback', 'optimizer/state_before', 'window/gradients'),
)


def before(given: Record) -> Record:
    """The record of what stands before the step, and nothing of what it made."""
    fields = {path: value for path, value in given.fields.items() if path.startswith(GIVEN)}
    if given.raw['loss']['name'] not in LOSSES:  # without a formula it counts as given
        fields['signals/err'] = given.fields['signals/err']
    return Record(given.raw, fields)


def derive_step(given: Record, spikes: np.ndarray | None = None) -> Derived:
    """Everything that a known cell makes in one step. ``given`` is read for what stands before the
    step; ``spikes`` replace those that the potential makes.
    """
    return Derived(before(given), spikes)


def derive_parts(given: Record) -> Derived:
    """The step with the spikes that it has."""
    roles = given.topology['roles']
    return derive_step(given, given[f'carry_after/{roles["z"]}'] if 'z' in roles else None)


class Derived:
    """One step: ``fields`` by path, and the ``margin`` of each spike above its threshold. A record
    is filled in causal order, and each equation reads what was put there before.
    """

    def __init__(self, record: Record, spikes: np.ndarray | None):
        self.r, self.by = record, Equations(record, False)
        self.fields: dict[str, Num | None] = {}
        self.leaky = record.topology['readout'] == 'leaky'
        self.recurrent, self.readout = self.by.relation('recurrent'), self.by.relation('readout')
        self.traced = [self.recurrent, self.readout] if self.leaky else [self.recurrent]
        self._forward(spikes)
        self._loss()
        self._signals()
        self._traces()
        self._gradients()
        self._optimizer()

    def _put(self, path: str, value: Any) -> None:
        """A field, or a list of fields."""
        if isinstance(value, list):
            for i, one in enumerate(value):
                self._put(f'{path}/{i}', one)
        else:
            self.fields[path] = self.r.kept[path,] = value
            self.r.fields[path] = None if value is None else value.value

    def _product(self, relation: Mapping, x: Num) -> Num:
        params = relation['params']
        y = x @ self.r.num(f'params_before/{params["weight"]}')
        return y + self.r.num(f'params_before/{params["bias"]}') if 'bias' in params else y

    def _forward(self, spikes: np.ndarray | None) -> None:
        r, cell, roles = self.r, self.by.cell, self.r.topology['roles']
        old = self.by.states('carry_before')
        x = exact(np.concatenate([r['inputs'], old[cell.output].value], -1), r.floor)
        new = cell.step(r.constants, old, self._product(self.recurrent, x))
        self.margin: Num | None = new.pop('margin', None)
        if spikes is not None:
            new['z'] = exact(spikes, r.floor)
        for role, value in new.items():
            self._put(f'carry_after/{roles[role]}', value)
        outputs = self._product(self.readout, new[cell.output])
        if self.leaky:
            kappa = constant(r.constants['kappa_out'], r.floor)
            outputs = kappa * r.num(f'carry_before/{roles["o"]}') + outputs
            self._put(f'carry_after/{roles["o"]}', outputs)
        self._put('outputs', outputs)
        for relation, read in ((self.recurrent, x), (self.readout, new[cell.output])):
            name, (group,) = relation['name'], relation['groups'] or ('',)
            self._put(f'factors/{name}/{group}/x', read)
            if group:
                D, D_f = self.by.formulas(name)
                self._put(f'factors/{name}/{group}/D_f', D_f)
                self._put(f'factors/{name}/{group}/D', D)

    def _loss(self) -> None:
        loss = self.r.raw['loss']
        if loss['name'] not in LOSSES:
            return
        self._put('loss/per_lane', self.by.lane_losses())
        self._put('loss/divisor', divisor_of(self.r.num('loss/mask'), loss['reduction']))
        self._put('loss/value', self.by.loss())
        if loss['name'] == 'softmax_ce':
            self._put('loss/probabilities', softmax(self.r.num('outputs')))
        self._put('signals/err', self.by.loss_slope())

    def _signals(self) -> None:
        err, name = self.r.num('signals/err'), self.recurrent['name']
        self._put(f'signals/dh/{self.by.group}', self.by.sent_back())
        (dy,) = chained(self.by.dh(self.by.group), [self.by.formulas(name)[1]])
        self._put(f'signals/dy/{name}', dy)
        self._put(f'signals/dy/{self.readout["name"]}', err)
        if self.leaky:
            self._put(f'signals/dh/{self.readout["groups"][0]}', [err])
        for relation in self.traced:
            (group,) = relation['groups']
            self._put(f'signals/c/{group}', self.by.old_signal(relation['name'], group))
        if self.r.factored:
            self._put('signals/correction', self.by.warm_up())

    def _traces(self) -> None:
        for relation in self.traced:
            name, (group,) = relation['name'], relation['groups']
            at = f'traces_after/{name}/{group}'
            if self.r.factored:
                new = self.by.factored(name, group)
                self._put(f'{at}/x', new['x'][0])
                self._put(f'{at}/f', new['f'])
                continue
            for slot, kept, fresh in self.by.trace(name, group, self.r.entries):
                self._put(f'{at}/{slot}', [total(pair) for pair in zip(kept, fresh, strict=True)])

    def _gradients(self) -> None:
        self.learned: dict[str, Num] = {}
        for relation in (self.recurrent, self.readout):
            grads = self.by.gradients(relation['name'])
            for slot, path in relation['params'].items():
                if not self.r.frozen(path):
                    before, one = self.learned.get(path), grads[slot]
                    self.learned[path] = one if before is None else before + one
                    self._put(f'gradients/{path}', self.learned[path])

    def _optimizer(self) -> None:
        r, raw = self.r, self.r.raw['optimizer']
        known = raw is None or raw['name'] in OPTIMIZERS
        for path in r.keys('params_before'):
            before = r.num(f'params_before/{path}')
            if path in self.learned and raw is not None and known:
                slots, update = self.by.updated(path)
                for slot, value in slots.items():
                    self._put(f'optimizer/state_after/{path}/{slot}', value)
                self._put(f'optimizer/updates/{path}', update)
                self._put(f'params_after/{path}', before + update)
            elif known or path not in self.learned:
                self._put(f'params_after/{path}', before)
