"""The engine: a whole step out of parameters, carry, traces, inputs and targets alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .bounds import Num, constant, exact, total
from .equations import Equations, Made, listed
from .losses import LOSSES, divisor_of, softmax
from .optimizers import OPTIMIZERS
from .record import Record

# What is before the step: fields of these names are all that the engine has.
GIVEN = (
    *('inputs', 'targets', 'params_before', 'carry_before', 'traces_before', 'loss/mask'),
    *('algorithm/feedback', 'optimizer/state_before', 'window/gradients'),
)


def before(given: Record) -> Record:
    """The record of what is before the step, and nothing of what it made."""
    fields = {path: value for path, value in given.fields.items() if path.startswith(GIVEN)}
    if given.raw['loss']['name'] not in LOSSES:  # without a formula it counts as given
        fields['signals/err'] = given.fields['signals/err']
    return Record(given.raw, fields)


def derive_step(given: Record, spikes: np.ndarray | None = None) -> Derived:
    """Everything that a known cell makes in one step. ``given`` is read for what is before the
    step; ``spikes`` replace those that the potential makes.
    """
    return Derived(before(given), spikes)


def derive_parts(given: Record, off: Mapping[str, np.ndarray] | None = None) -> Derived:
    """The step with the spikes that it has; ``off`` are terms of fields that are not exact."""
    record, roles = before(given), given.topology['roles']
    for path, terms in (off or {}).items():
        record.kept[path,] = Num(record[path], terms, record.floor)
    return Derived(record, given[f'carry_after/{roles["z"]}'] if 'z' in roles else None)


class Derived:
    """One step: ``fields`` by path, and the ``margin`` of each spike above its threshold. A record
    is filled in causal order, and each equation reads what was put there before.
    """

    def __init__(self, record: Record, spikes: np.ndarray | None):
        self.r, self.by = record, Equations(record, False)
        self.fields: dict[str, Num | None] = {}
        self._forward(spikes)
        if record.raw['loss']['name'] in LOSSES:
            self._loss()
        self._take(self.by.learning_signals())
        for name in record.relations:
            self._take(self.by.signals(name))
        self._take(self.by.old_signals())
        self._traces()
        for path, gradient in self.by.gradients()[0].items():
            if not record.frozen(path):
                self._put(f'gradients/{path}', gradient)
        self._optimizer()

    def _put(self, path: str, value: Num | None) -> None:
        self.fields[path] = self.r.kept[path,] = value
        self.r.fields[path] = None if value is None else value.value

    def _take(self, made: Made) -> None:
        """Fields as equations make them, each before the next one is made."""
        for path, value, _ in made:
            self._put(path, value)

    def _product(self, relation: Mapping, x: Num) -> Num:
        params = relation['params']
        y = x @ self.r.num(f'params_before/{params["weight"]}')
        return y + self.r.num(f'params_before/{params["bias"]}') if 'bias' in params else y

    def _forward(self, spikes: np.ndarray | None) -> None:
        r, cell, roles = self.r, self.by.cell, self.r.topology['roles']
        recurrent, readout = self.by.relation('recurrent'), self.by.relation('readout')
        old = self.by.states('carry_before')
        x = exact(np.concatenate([r['inputs'], old[cell.output].value], -1), r.floor)
        new = cell.step(r.constants, old, self._product(recurrent, x))
        self.margin: Num | None = new.pop('margin', None)
        if spikes is not None:
            new['z'] = exact(spikes, r.floor)
        for role, value in new.items():
            self._put(f'carry_after/{roles[role]}', value)
        outputs = self._product(readout, new[cell.output])
        if readout['groups']:  # it leaks
            kappa = constant(r.constants['kappa_out'], r.floor)
            outputs = kappa * r.num(f'carry_before/{roles["o"]}') + outputs
            self._put(f'carry_after/{roles["o"]}', outputs)
        self._put('outputs', outputs)
        for relation, read in ((recurrent, x), (readout, new[cell.output])):
            name, (group,) = relation['name'], relation['groups'] or ('',)
            self._put(f'factors/{name}/{group}/x', read)
            if group:
                D, D_f = self.by.formulas(name)
                self._take(listed(f'factors/{name}/{group}/D_f', D_f))
                for i, row in enumerate(D):
                    self._take(listed(f'factors/{name}/{group}/D/{i}', row))

    def _loss(self) -> None:
        loss = self.r.raw['loss']
        self._put('loss/divisor', divisor_of(self.r.num('loss/mask'), loss['reduction']))
        self._take(self.by.losses())
        if loss['name'] == 'softmax_ce':
            self._put('loss/probabilities', softmax(self.r.num('outputs')))
        self._put('signals/err', self.by.loss_slope())

    def _traces(self) -> None:
        if self.r.factored:
            self._put('signals/correction', self.by.warm_up())
        for name, group in self.r.pairs:
            if self.r.factored:
                self._take(self.by.factored(name, group))
                continue
            for slot, *parts in self.by.trace(name, group, self.r.entries):
                made = map(total, zip(*parts, strict=True))
                self._take(listed(f'traces_after/{name}/{group}/{slot}', made))

    def _optimizer(self) -> None:
        r, raw = self.r, self.r.raw['optimizer']
        known = raw is None or raw['name'] in OPTIMIZERS
        for path in r.keys('params_before'):
            before, learned = r.num(f'params_before/{path}'), f'gradients/{path}' in self.fields
            if learned and raw is not None and known:
                slots, update = self.by.updated(path)
                for slot, value in slots.items():
                    self._put(f'optimizer/state_after/{path}/{slot}', value)
                self._put(f'optimizer/updates/{path}', update)
                self._put(f'params_after/{path}', before + update)
            elif known or not learned:
                self._put(f'params_after/{path}', before)
