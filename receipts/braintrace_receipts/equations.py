"""The equations of one step, written once: rules compare what they make of the fields of a receipt
with what it stores, the engine takes it as the next field of its own record.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from .bounds import Num, constant, total, warm_up
from .cells import CELLS, Entries, KnownCell, chained, columns, ones
from .losses import LOSSES
from .optimizers import OPTIMIZERS
from .primitives import FORMULAS, NoFormula, Op, told
from .record import FILTER, Record

Factors = tuple[list[Entries], Entries]  # D and D_f
Made = Iterable[tuple[str, Num | None, tuple[str, ...]]]  # a path, what is there, and of what
One = TypeVar('One', Num, Num | None)


def memo(method: Callable) -> Callable:
    """Keeps what a method makes of names: several equations ask for it."""

    @wraps(method)
    def kept(self, *names: str) -> Any:
        key = (method, self.stored, *names)
        if key not in self.r.kept:
            self.r.kept[key] = method(self, *names)
        return self.r.kept[key]

    return kept


def stored(r: Record) -> Equations:
    """The equations of the fields that a receipt stores."""
    return Equations(r, True)


def listed(path: str, entries: Iterable[Num | None], made_of: tuple[str, ...] = ()) -> Made:
    """A list of fields, one for each state."""
    for i, one in enumerate(entries):
        yield f'{path}/{i}', one, made_of


class Equations:
    """What follows from the fields of a record. Where they are ``stored``, a factor, a signal or a
    correction was rounded when it was made, and a compiler may make it again where it is used: it
    counts with the terms of its formula.
    """

    def __init__(self, r: Record, stored: bool):
        self.r, self.stored = r, stored

    def _made(self, one: One, formula: Num | None = None) -> One:
        """A stored number with the terms of its formula, or of size one where none is known."""
        if one is None or not self.stored:
            return one
        terms = 1 + np.abs(one.value) if formula is None else formula.terms + np.abs(one.value)
        return Num(one.value, terms, one.floor)

    # a known cell ---------------------------------------------------------------------------------

    @property
    def cell(self) -> KnownCell:
        return CELLS[self.r.topology['cell']]

    def relation(self, role: str) -> Mapping:
        """The relation that is ``'recurrent'`` or ``'readout'``."""
        return self.r.relations[self.r.topology['roles'][role]]

    @property
    def group(self) -> str:
        """The group of the cell's states."""
        return self.relation('recurrent')['groups'][0]

    @property
    def filtered(self) -> bool:
        """Whether a filter adds a state, of value zero, that readouts alone read."""
        return FILTER in self.r.groups[self.group]['states']

    def weight(self, role: str) -> Num:
        """The weight of the recurrence or of the readout."""
        return self.r.num(f'params_before/{self.relation(role)["params"]["weight"]}')

    @memo
    def slopes(self, when: str) -> Entries:
        """The derivative of the output by each state; a filter stands for the others."""
        slopes = self.cell.slopes(self.r.constants, self.states(when))
        if not self.filtered:
            return slopes
        like = next(one for one in slopes if one is not None)
        none: Entries = [None] * len(slopes)
        return [*none, ones(like)] if when == 'carry_after' else [*slopes, None]

    @memo
    def formulas(self, name: str) -> Factors:
        """D and D_f of a relation of a known cell."""
        r = self.r
        if name != self.relation('recurrent')['name']:
            like = r.num('outputs')
            return [[constant(r.constants['kappa_out'], r.floor).to(like.shape)]], [ones(like)]
        old, new = self.states('carry_before'), self.states('carry_after')
        D, D_f = self.cell.D(r.constants, old), self.cell.D_f(r.constants, old, new)
        if self.filtered:
            # the row of the filter: what a readout that leaks remembers of the output
            slopes = self.cell.slopes(r.constants, new)
            kappa = constant(r.algorithm['kappa'], r.floor).to(new[self.cell.output].shape)
            last = [*chained(slopes, columns(D)), kappa]
            D, D_f = [*([*row, None] for row in D), last], [*D_f, *chained(slopes, [D_f])]
        return D, D_f

    def states(self, when: str) -> dict[str, Num]:
        """The states ``'carry_before'`` or ``'carry_after'`` by role."""
        roles = self.r.topology['roles']
        return {role: self.r.num(f'{when}/{roles[role]}') for role in self.cell.roles}

    @memo
    def factors(self, name: str, group: str) -> Factors:
        """D and D_f of a relation and a group."""
        at = f'factors/{name}/{group}'
        D, D_f = self.r.matrix(f'{at}/D'), self.r.entries(f'{at}/D_f')
        if not self.r.known or not self.stored:
            return [[*map(self._made, row)] for row in D], [*map(self._made, D_f)]
        of_D, of_D_f = self.formulas(name)
        rows = [[*map(self._made, *both)] for both in zip(D, of_D, strict=True)]
        return rows, [*map(self._made, D_f, of_D_f)]

    # loss and signals -----------------------------------------------------------------------------

    def divisor(self) -> Num:
        """What the sum over the lanes is divided by, a number that is written in float64."""
        divisor = self.r.num('loss/divisor')
        return constant(divisor.value, self.r.floor) if self.stored else divisor

    def losses(self) -> Made:
        """The loss of each lane, and ``sum_b mask_b loss_b / divisor``."""
        r = self.r
        per_lane = LOSSES[r.raw['loss']['name']].per_lane
        yield 'loss/per_lane', per_lane(r.num('outputs'), r.num('targets')), ('outputs', 'targets')
        whole = (r.num('loss/mask') * r.num('loss/per_lane')).sum() / self.divisor()
        yield 'loss/value', whole, ('loss/per_lane', 'loss/mask', 'loss/divisor')

    @memo
    def loss_slope(self) -> Num:
        """The derivative of the loss by the outputs."""
        known = LOSSES[self.r.raw['loss']['name']]
        weight = self.r.num('loss/mask') / self.divisor()
        return known.slope(self.r.num('outputs'), self.r.num('targets')) * weight.reshape((-1, 1))

    def error(self) -> Num:
        """The error with the terms of its formula: a step may make it once more."""
        err = self.r.num('signals/err')
        if not self.stored:
            return err
        known = self.r.raw['loss']['name'] in LOSSES
        return Num(err.value, self.loss_slope().terms if known else np.abs(err.value), err.floor)

    @memo
    def sent_back(self) -> Entries:
        """``dh`` of a known cell: the error through the readout, through B, or a modulator."""
        feedback = self.r.algorithm['feedback']
        if feedback is not None and feedback['kind'] == 'modulator':
            sent = self.r.num('algorithm/feedback')
        else:
            own = feedback is None
            back = self.weight('readout') if own else self.r.num('algorithm/feedback')
            sent = self.r.num('signals/err') @ back.T
        return [None if e is None else sent * e for e in self.slopes('carry_after')]

    def learning_signals(self) -> Made:
        """``dh`` of a known cell, and of a readout that leaks, which has the error itself."""
        readout, own = self.relation('readout'), self.r.algorithm['feedback'] is None
        back = f'params_before/{readout["params"]["weight"]}' if own else 'algorithm/feedback'
        made_of = 'signals/err', back, 'carry_after'
        yield from listed(f'signals/dh/{self.group}', self.sent_back(), made_of)
        for group in readout['groups']:
            yield f'signals/dh/{group}/0', self.error(), ('signals/err',)

    @memo
    def dh(self, group: str) -> Entries:
        """The derivative of the loss by the new states of a group."""
        found = self.r.entries(f'signals/dh/{group}')
        if not self.stored:
            return found
        if not self.r.known or group != self.group:
            return [one and Num(one.value, abs(one.value), one.floor) for one in found]
        return [*map(self._made, found, self.sent_back())]

    def direct(self, name: str) -> Num | None:
        """A part of a signal that reaches the loss without passing a new state."""
        path = f'signals/direct/{name}'
        return self.r.num(path) if self.r.fields.get(path) is not None else None

    def sent_to(self, name: str) -> Entries:
        """``sum_s dh_s D_f_s`` of each group, summed over the positions that y feeds."""
        r, path, found = self.r, f'signals/dy/{name}', list[Num | None]()
        for group in r.relations[name]['groups']:
            dh = self.placed(name, group, self.dh(group))
            (one,) = chained(dh, [self.factors(name, group)[1]])
            if one is not None and not r.known and one.shape != r.shape(path):
                one = self.op(name).to_y(one)
            found.append(one)
        return found

    def signals(self, name: str) -> Made:
        """``dy`` of a relation: by its groups, or the error where a readout has none."""
        groups = self.r.relations[name]['groups']
        if groups:
            made = total((self.direct(f'dy/{name}'), *self.sent_to(name)))
            yield f'signals/dy/{name}', made, ('signals/dh', f'factors/{name}/{groups[0]}')
        elif self.r.known:
            yield f'signals/dy/{name}', self.error(), ('err',)

    def old_signal(self, name: str, group: str) -> Entries:
        """``c_r = sum_s dh_s D_sr``, and with whole credit what the recurrent weight sends."""
        r, found = self.r, chained(self.dh(group), columns(self.factors(name, group)[0]))
        if r.known and r.algorithm['credit'] == 'whole' and group == self.group:
            dy = r.num(f'signals/dy/{self.relation("recurrent")["name"]}')
            back = (dy @ self.weight('recurrent').T)[:, r['inputs'].shape[-1] :]
            pairs = zip(found, self.slopes('carry_before'), strict=True)
            found = [total((one, None if e is None else back * e)) for one, e in pairs]
        return found

    def old_signals(self) -> Made:
        """``c`` of each group, by the first relation that has it."""
        for group, name in {group: name for name, group in reversed(self.r.pairs)}.items():
            found = enumerate(self.old_signal(name, group))
            whole = (total((one, self.direct(f'c/{group}/{i}'))) for i, one in found)
            yield from listed(f'signals/c/{group}', whole, ('signals/dh', 'D'))

    # traces and gradients -------------------------------------------------------------------------

    def op(self, name: str) -> Op:
        """The application of a relation. Raises ``NoFormula`` where there is none."""
        relation = self.r.relations[name]

        def weights(slot: str) -> Num:
            return self.r.num(f'params_before/{relation["params"][slot]}')

        known = FORMULAS.get(relation['primitive'])
        rank = len(self.r.shape(f'signals/dy/{name}')) - (known is None or known.laned)
        op = Op(relation['primitive'], relation.get('options', {}), weights, rank)
        _ = op.formula  # it raises where there is none
        return op

    def placed(self, name: str, group: str, values: Entries) -> Entries:
        """Numbers at the positions of a group, gathered to those that a relation's y feeds."""
        r, at = self.r, f'factors/{name}/{group}/D_f'
        positions = r.relations[name].get('options', {}).get('positions', {})
        like = [one.shape for one in r.entries(at) if one is not None]
        if not like or group not in positions:
            return values
        if positions[group] is None:
            raise NoFormula(f'no positions of {name} in {group}')
        own = np.asarray(positions[group], int)
        flat = [one and one.reshape((one.shape[0], -1)) for one in values]
        return [one and one[:, own].reshape(like[0]) for one in flat]

    def at_y(self, name: str, group: str) -> Factors:
        """D and D_f at the positions of y."""
        D, D_f = self.factors(name, group)
        return [self.placed(name, group, row) for row in D], D_f

    def trace(self, name: str, group: str, old: Callable) -> list[tuple[str, Entries, Entries]]:
        """Of each slot what comes from the trace before, ``sum_r D_sr e'_r``, and what this step
        adds, ``D_f (x) x``; ``old(path)`` are the entries before.
        """
        op, (D, D_f) = self.op(name), self.at_y(name, group)
        per_state = [None if d is None else op.instant(self.r.x(name), d) for d in D_f]
        found = []
        for slot in self.r.relations[name]['params']:
            before = old(f'traces_before/{name}/{group}/{slot}')
            times = lambda d, e, slot=slot: op.carried(slot, d, e)
            fresh = [None if one is None else one.get(slot) for one in per_state]
            found.append((slot, _moved(D, before, times), fresh))
        return found

    def factored(self, name: str, group: str) -> Made:
        """``ex = a_x ex' + x`` and ``ef = a_f D ef' + (1 - a_f) D_f``; no ex without x."""
        r, at = self.r, f'factors/{name}/{group}'
        after, before = (f'traces_{when}/{name}/{group}' for when in ('after', 'before'))
        a_x, a_f = (constant(r.algorithm[key], r.floor) for key in ('decay_x', 'decay_f'))
        D, D_f = self.at_y(name, group)
        fresh, moved = constant(1 - a_f.value, r.floor), _moved(D, r.entries(f'{before}/f'))
        if r.x(name) is not None:
            ex = a_x * r.num(f'{before}/x') + self.op(name).read(r.x(name))
            yield f'{after}/x', ex, (f'{before}/x', f'{at}/x')
        ef = (
            total((None if m is None else a_f * m, None if d is None else fresh * d))
            for m, d in zip(moved, D_f, strict=True)
        )
        yield from listed(f'{after}/f', ef, (f'{before}/f', f'{at}/D', f'{at}/D_f'))

    def warm_up(self) -> Num:
        """``1 - a^(t+1)``."""
        return warm_up(self.r.algorithm['decay_f'], self.r.t + 1, self.r.floor)

    @memo
    def gradients(self) -> tuple[dict[str, Num], set[str]]:
        """The gradient of each parameter that ops alone use, all of which have a formula; and why
        others have none.
        """
        sums, missing, incomplete = dict[str, Num](), set[str](), set[str]()
        for name, relation in self.r.relations.items():
            found: dict[str, Num] = {}
            with told(missing):
                found = self.gradients_of(name)
            through = relation.get('options', {}).get('through', ())
            missing |= {f'{name}: {slot} is a function of its parameter' for slot in through}
            for slot, path in relation['params'].items():
                if slot in through or slot not in found:
                    incomplete.add(path)
                else:
                    sums[path] = sums[path] + found[slot] if path in sums else found[slot]
        return {path: one for path, one in sums.items() if path not in incomplete}, missing

    def gradients_of(self, name: str) -> dict[str, Num]:
        """The gradient of each weight of an op."""
        op, x, relation = self.op(name), self.r.x(name), self.r.relations[name]
        dy = self.r.num(f'signals/dy/{name}')
        if self.r.factored:
            return self._from_factors(name, op, x, dy)
        # sum_b x (x) dy + sum_b sum_s c_s e'_s
        grads = self.same_step(name, dy)
        for group in relation['groups']:
            signals = self.placed(name, group, self.r.entries(f'signals/c/{group}'))
            for slot in grads.keys() & relation['params'].keys():
                entries = self.r.entries(f'traces_before/{name}/{group}/{slot}')
                for c, e in zip(signals, entries, strict=False):
                    if c is not None and e is not None:
                        grads[slot] = grads[slot] + op.gradient(slot, c, op.carried(slot, c, e))
        return grads

    def _from_factors(self, name: str, op: Op, x, dy: Num) -> dict[str, Num]:
        """``sum_b ex (x) (dh . ef / correction)``, and the same-step part that misses h."""
        parts: list[tuple[Num | None, Num]] = []
        rest = dy
        corrected = self._made(self.r.num('signals/correction'), self.warm_up())
        for group in self.r.relations[name]['groups']:
            after, (_, D_f) = f'traces_after/{name}/{group}', self.factors(name, group)
            dh = self.placed(name, group, self.r.entries(f'signals/dh/{group}'))
            (sent,) = chained(dh, [self.r.entries(f'{after}/f')])
            (through,) = chained(dh, [D_f])
            if through is not None:
                rest = rest - op.to_y(through)
            if sent is not None:
                ex = None if x is None else self.r.num(f'{after}/x')
                ones = [1] * (len(sent.shape) - 1)
                parts.append((ex, sent / corrected.reshape((-1, *ones))))
        grads: dict[str, Num] = {}
        for read, d in (*parts, (x, rest)):
            for slot, one in op.instant(read, d).items():
                found = total((grads.get(slot), op.gradient(slot, d, one)))
                grads |= {slot: found} if found is not None else {}
        return grads

    def same_step(self, name: str, dy: Num) -> dict[str, Num]:
        """The gradient of an op at a cotangent of its result, without a trace."""
        op = self.op(name)
        made = op.instant(self.r.x(name), dy)
        return {slot: op.gradient(slot, dy, one) for slot, one in made.items()}

    # the optimiser --------------------------------------------------------------------------------

    def acted_on(self, path: str) -> str:
        """The field of the gradient that the optimiser takes: the window's in its last record."""
        ends_window = 'gradients' in (self.r.raw.get('window') or {})
        return f'window/gradients/{path}' if ends_window else f'gradients/{path}'

    def updated(self, path: str, more: Any = 0.0) -> tuple[dict[str, Num], Num]:
        """The new slots of a parameter and its update, by the formula of a known optimiser;
        ``more`` are terms of a gradient that is not taken as it stands.
        """
        r, raw = self.r, self.r.raw['optimizer']
        known, at = OPTIMIZERS[raw['name']], f'optimizer/state_before/{path}'
        slots = {slot: r.num(f'{at}/{slot}') for slot in known.slots}
        count, parameter = raw['state_before']['count'] or 0, r.num(f'params_before/{path}')
        taken = r.num(self.acted_on(path))
        gradient = Num(taken.value, taken.terms + more, taken.floor)
        return known.step(raw['config'], count, slots, gradient, parameter)


def _moved(D: list[Entries], old: Entries, times: Callable = operator.mul) -> Entries:
    """``sum_r D_sr e'_r`` for each state; ``times``: the product of a D and an entry."""
    return [
        total(times(d, e) for d, e in zip(row, old, strict=True) if d is not None and e is not None)
        for row in D
    ]
