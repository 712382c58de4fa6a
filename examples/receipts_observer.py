"""An observer of online learning in any framework: each step becomes a receipt.

It needs NumPy and `braintrace-receipts`, and nothing of braintrace. `before` and `after` stand
around a step and take copies; from the slope that the step used and the declared constants follow
the factors D and D_f and the signals of a receipt. It judges nothing. At the end stand the few
functions that PyTorch and JAX need.

    observer = Observer(
        open('run.jsonl', 'wb'), {'w': 'recurrent', 'w_out': 'readout'}, cell='lif',
        readout='leaky', constants={...}, optimizer=('sgd', {'lr': 0.1}), numeric=of_jax(params))
    for inputs, targets in data:
        observer.before(params, slots, carry, traces, inputs, targets)
        ...                                                    # the step
        observer.after(params, slots, carry, traces, gradients=..., x=..., psi=..., outputs=...,
                       per_lane=..., value=..., err=..., learning=...)

Symbols: V = alpha V' + y - theta z', z = H(V - theta), y = x @ W + b, x = [inputs, z'];
psi = dz/dV = surrogate((V - threshold) / theta) / theta; the readout is out @ W + b, or leaks with
kappa_out. Momentum's buffer adds up gradients, as in PyTorch and optax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

from braintrace_receipts import emit, node
from braintrace_receipts.bounds import exact
from braintrace_receipts.canonical import spec_digest
from braintrace_receipts.optimizers import OPTIMIZERS

STATES = {'rnn': ['h'], 'lif': ['V'], 'alif': ['V', 'a']}
CELL, READOUT = 'cell', 'readout'  # the relations and their groups
# The weights of each relation, and the roles of the parameters that each is put together from.
PARTS = {
    CELL: {'weight': ('input', 'recurrent'), 'bias': ('bias',)},
    READOUT: {'weight': ('readout',), 'bias': ('readout_bias',)},
}
ROLES = [role for slots in PARTS.values() for roles in slots.values() for role in roles]
Arrays = Mapping[str, Any]
Slots = tuple[int | None, Mapping[str, Arrays]]  # steps so far, and {slot: {parameter: array}}


class Observer:
    """Writes what a step read and made; ``before`` and ``after`` are around the step.

    ``parameters``: ``{name: role}`` of all that learn; the roles are ``input``, ``recurrent``,
    ``bias``, ``readout``, ``readout_bias``. Weights, gradients and traces of weights have the
    ``layout`` ``'in_out'``, or ``'out_in'`` as ``torch.nn.Linear``. ``constants``: those of the
    cell by the names of a receipt. ``optimizer``: its name and its numbers. ``numeric``: of
    :func:`of_jax` or :func:`of_torch`. ``kappa``: the filter of the traces, 0 for none.
    ``feedback``: a fixed array (hidden, outputs), or ``None`` for the readout's weight.
    ``initial``: the carry of a lane that is reset. Every ``every``-th step is written. ``array``
    makes an own NumPy copy of an array.
    """

    def __init__(
        self,
        file: BinaryIO,
        parameters: Mapping[str, str],
        *,
        cell: str,
        readout: str,
        constants: Mapping[str, Any],
        optimizer: tuple[str, Mapping[str, Any]],
        numeric: Mapping[str, Any],
        kappa: float = 0.0,
        feedback: Any = None,
        layout: str = 'in_out',
        loss: str = 'half_mse',
        reduction: str = 'mean',
        initial: Arrays | None = None,
        run_id: str = 'observed',
        every: int = 1,
        source: tuple[str, str] = ('jax', ''),
        array: Callable[[Any], np.ndarray] = np.array,
    ):
        roles = list(parameters.values())
        if not set(roles) <= set(ROLES) or len(set(roles)) < len(roles):
            raise ValueError(f'the roles are {roles}; each is one of {", ".join(ROLES)}, once')
        if not {'recurrent', 'readout'} <= set(roles):
            raise ValueError(f'the roles are {roles}; recurrent and readout are due')
        self.file, self.names = file, {role: name for name, role in parameters.items()}
        self.cell, self.leaky, self.constants = cell, readout == 'leaky', dict(constants)
        self.optimizer, self.numeric, self.kappa = optimizer, dict(numeric), float(kappa)
        self.turned, self.array, self.every, self.run_id = layout == 'out_in', array, every, run_id
        self.loss, self.source, self.step = (loss, reduction), source, 0
        self.feedback = None if feedback is None else array(feedback)
        self.initial = None if initial is None else self.copies(initial)
        self.t: np.ndarray | None = None
        self.seen: dict | None = None
        self.notes = {'observer': 'receipts_observer'}

    def copies(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """A copy of each: the step may change or donate what it is given."""
        return {name: self.array(value) for name, value in arrays.items()}

    def before(
        self,
        params: Arrays,
        slots: Slots,
        carry: Arrays,
        traces: Mapping[str, Arrays],
        inputs: Any,
        targets: Any,
        *,
        reset: Any = None,
    ) -> None:
        """Copies what is before the step; a reset of lanes was applied to carry and traces.

        ``traces``: ``{parameter: {state: array}}``, states ``V``, ``a``, ``h``, ``filter``, ``o``;
        (B, in, out) by the layout, (B, out) of a bias; an axis of length 1 means a repeated one.
        """
        if self.seen is not None:
            raise RuntimeError('before was called twice: after is between')
        count = len(inputs)
        flags = np.zeros(count, bool) if reset is None else np.asarray(self.array(reset), bool)
        if flags.any() and self.initial is None:
            raise ValueError('a lane is reset: give the carry that it starts from as initial')
        self.t = np.where(flags, 0, np.zeros(count, int) if self.t is None else self.t)
        self.seen = {
            'reset': flags,
            'inputs': self.array(inputs),
            'targets': self.array(targets),
            'carry': self.copies(carry),
            **self._state('before', params, slots, traces),
        }

    def after(
        self,
        params: Arrays,
        slots: Slots,
        carry: Arrays,
        traces: Mapping[str, Arrays],
        *,
        gradients: Arrays,
        x: Arrays,
        psi: Any,
        outputs: Any,
        per_lane: Any,
        value: Any,
        err: Any,
        learning: Any,
        updates: Arrays | None = None,
        psi_before: Any = None,
        probabilities: Any = None,
        mask: Any = None,
    ) -> None:
        """Copies what the step made and writes the receipt; call it behind the optimizer.

        ``x``: what each weight read, (B, in). ``psi``: dz/dV at the new membrane, of ``'rnn'``
        dh/dy; ``psi_before``: at the old one, which ``'alif'`` and ``reset_gradient`` need.
        ``err`` = dL/doutputs, ``learning`` = dL/dz, both with the mask and the mean in them.
        ``updates``: what was added, if not what the formula of the optimizer makes.
        """
        if self.seen is None:
            raise RuntimeError('after was called without before')
        seen, self.seen = self.seen, None
        given = dict(outputs=outputs, per_lane=per_lane, err=err, learning=learning, psi=psi)
        given |= dict(psi_before=psi_before, probabilities=probabilities)
        made = self.copies({name: one for name, one in given.items() if one is not None})
        made['mask'] = np.ones_like(made['per_lane']) if mask is None else self.array(mask)
        made |= {'value': float(value), 'carry': self.copies(carry)}
        seen |= self._state('after', params, slots, traces)
        seen |= {'gradient': self.copies(gradients), 'x': self.copies(x)}
        seen |= {} if updates is None else {'update': self.copies(updates)}
        if self.step % self.every == 0:
            self.file.write(emit(self._receipt(seen, made)))
        self.step, self.t = self.step + 1, self.t + 1

    def _state(self, when: str, params: Arrays, slots: Slots, traces) -> dict:
        count, kept = slots
        return {
            when: self.copies({name: params[name] for name in self.names.values()}),
            f'count_{when}': count,
            f'slots_{when}': {slot: self.copies(of) for slot, of in kept.items()},
            f'traces_{when}': {name: self.copies(of) for name, of in traces.items()},
        }

    # a receipt of what was seen -------------------------------------------------------------------

    def _receipt(self, seen: dict, made: dict) -> dict:
        weights = list(self._weights())
        D, D_f = self._derivatives(made)
        node_of = self._node
        batch = len(seen['inputs'])
        loss, reduction = self.loss
        shown = {'probabilities': made['probabilities']} if 'probabilities' in made else {}
        fixed = None
        if self.feedback is not None:
            fixed = {'kind': 'fixed', 'array': node_of(self.feedback)}
        rule = {'name': 'D_RTRL', 'credit': 'cut', 'decay_x': None, 'decay_f': None}
        receipt = {
            'schema': 'braintrace.receipt/1',
            'run_id': self.run_id,
            'step': self.step,
            'every': self.every,
            'spec_digest': '',
            'algorithm': {**rule, 'kappa': self.kappa, 'feedback': fixed},
            'numeric': self.numeric,
            'topology': self._topology(weights, made),
            'lanes': list(range(batch)),
            'reset': seen['reset'].tolist(),
            't': self.t.tolist(),
            'inputs': node_of(seen['inputs']),
            'targets': node_of(seen['targets']),
            'params_before': self._parameters(weights, seen['before']),
            'carry_before': self._nodes(seen['carry']),
            **({} if self.initial is None else {'initial': self._nodes(self.initial)}),
            'factors': self._factors(seen, made, D, D_f),
            'traces_before': self._traces(weights, seen, 'before'),
            'traces_after': self._traces(weights, seen, 'after'),
            'carry_after': self._nodes(made['carry']),
            'outputs': node_of(made['outputs']),
            'loss': {
                'name': loss,
                'reduction': reduction,
                'mask': node_of(made['mask']),
                'divisor': float(made['mask'].sum()) if reduction == 'mean' else 1.0,
                **self._nodes(shown),
                'per_lane': node_of(made['per_lane']),
                'value': made['value'],
            },
            'signals': self._signals(made, D, D_f),
            'gradients': self._parameters(weights, seen['gradient']),
            'optimizer': self._optimizer(weights, seen),
            'params_after': self._parameters(weights, seen['after']),
            'source': dict(zip(('framework', 'version'), self.source, strict=True)),
            'helper': self.notes,
        }
        receipt['spec_digest'] = spec_digest(receipt)
        return receipt

    def _node(self, value: Any) -> dict | None:
        if value is None:
            return None
        if not np.isfinite(value).all():
            raise ValueError('a number of this step is not finite: a receipt has finite numbers')
        return node(np.asarray(value, self.numeric['dtype']))

    def _nodes(self, arrays: Arrays) -> dict:
        return {name: self._node(value) for name, value in arrays.items()}

    def _weights(self) -> Iterator[tuple[str, str, list[str]]]:
        """Relation, slot, and names of the parameters that are there one behind the other."""
        for relation, slots in PARTS.items():
            for slot, roles in slots.items():
                names = [self.names[role] for role in roles if role in self.names]
                if names:
                    yield relation, slot, names

    def _whole(self, slot: str, names: list[str], arrays: Arrays) -> np.ndarray:
        """One array (in, out) or (out,) of the parameters of a slot."""
        turned = self.turned and slot == 'weight'
        own = [np.swapaxes(arrays[n], -1, -2) if turned else arrays[n] for n in names]
        return np.concatenate(own, -2) if len(own) > 1 else own[0]

    def _parameters(self, weights: list, arrays: Arrays) -> dict:
        return {
            '+'.join(names): self._node(self._whole(slot, names, arrays))
            for _, slot, names in weights
        }

    @property
    def _states(self) -> dict[str, list[str]]:
        """The traced states of each relation, by the names of the observer."""
        own = [*STATES[self.cell], *(['filter'] if self.kappa else [])]
        return {CELL: own, READOUT: ['o'] if self.leaky else []}

    def _topology(self, weights: list, made: dict) -> dict:
        sent = 'h' if self.cell == 'rnn' else 'z'
        groups, kinds = [], {}
        for name, like in ((CELL, made['psi']), (READOUT, made['outputs'])):
            states = ['(filter)' if s == 'filter' else s for s in self._states[name]]
            kinds[name] = 'trace' if states else 'same-step'
            if states:
                groups.append({'name': name, 'shape': list(like.shape[1:]), 'states': states})
        relations = [
            {
                'name': name,
                'primitive': 'etp_mm',
                'params': {slot: '+'.join(own) for r, slot, own in weights if r == name},
                'groups': [name] if self._states[name] else [],
                'source': ['inputs', f'carry/{sent}'] if name == CELL else None,
            }
            for name in PARTS
        ]
        return {
            'cell': self.cell,
            'readout': 'leaky' if self.leaky else 'linear',
            'groups': groups,
            'relations': relations,
            'routes': {'+'.join(own): {'kind': kinds[r]} for r, _, own in weights},
            'roles': {'recurrent': CELL, 'readout': READOUT, **{n: n for n in made['carry']}},
            'constants': self.constants,
        }

    def _slopes(self, slope: np.ndarray | None) -> list[np.ndarray]:
        """The derivative of what the cell sends by each of its states."""
        if slope is None:
            raise ValueError(f'psi_before is due: D of this {self.cell} needs it')
        if self.cell == 'rnn':
            return [np.ones_like(slope)]
        return [slope, -self.constants['beta'] * slope] if self.cell == 'alif' else [slope]

    def _derivatives(self, made: dict) -> tuple[list, list]:
        """``D`` and ``D_f`` of the cell's group, from the constants and both slopes."""
        c, psi = self.constants, made['psi']
        if self.cell == 'rnn':
            D, D_f = [[np.full_like(psi, c['leak'])]], [psi]
        else:
            needed = c['reset_gradient'] or self.cell == 'alif'
            old = self._slopes(made.get('psi_before')) if needed else []
            back = [-c['theta'] * one for one in old] if c['reset_gradient'] else [0.0, None]
            D, D_f = [[np.full_like(psi, c['alpha']) + back[0], *back[1 : len(old)]]], [1 + 0 * psi]
            if self.cell == 'alif':
                D, D_f = [*D, [old[0], c['rho'] + old[1]]], [*D_f, None]
        if not self.kappa:
            return D, D_f
        emits = self._slopes(psi)
        row = [summed(emits, column) for column in zip(*D, strict=True)]
        last = [*row, np.full_like(psi, self.kappa)]
        return [*([*one, None] for one in D), last], [*D_f, summed(emits, D_f)]

    def _readout_factors(self, made: dict) -> tuple[list, list]:
        if not self.leaky:
            return [], []
        like = made['outputs']
        return [[np.full_like(like, self.constants['kappa_out'])]], [np.ones_like(like)]

    def _factors(self, seen: dict, made: dict, D: list, D_f: list) -> list[dict]:
        found = []
        for name, own in ((CELL, (D, D_f)), (READOUT, self._readout_factors(made))):
            roles = PARTS[name]['weight']
            x = [seen['x'][self.names[role]] for role in roles if role in self.names]
            found.append(
                {
                    'relation': name,
                    'group': name if self._states[name] else None,
                    'x': self._node(np.concatenate(x, -1)),
                    'D_f': [self._node(one) for one in own[1]],
                    'D': [[self._node(one) for one in row] for row in own[0]],
                }
            )
        return found

    def _signals(self, made: dict, D: list, D_f: list) -> dict:
        """``dh`` of the learning signal, ``dy = dh D_f`` and ``c = dh D``; the readout's of err."""
        err, learning = made['err'], made['learning']
        if self.kappa:
            dh = [*([None] * len(STATES[self.cell])), learning]
        else:
            dh = [learning * one for one in self._slopes(made['psi'])]
        signals = {
            'err': self._node(err),
            'dh': {CELL: [self._node(one) for one in dh]},
            'dy': {CELL: self._node(summed(dh, D_f)), READOUT: self._node(err)},
            'c': {CELL: [self._node(summed(dh, column)) for column in zip(*D, strict=True)]},
        }
        if self.leaky:
            signals['dh'][READOUT] = [self._node(err)]
            signals['c'][READOUT] = [self._node(err * self.constants['kappa_out'])]
        return signals

    def _traces(self, weights: list, seen: dict, when: str) -> list[dict]:
        """The traces of each relation, with axes of length 1 repeated."""
        found, traces = [], seen[f'traces_{when}']
        for name, states in self._states.items():
            entries = {}
            for relation, slot, own in weights:
                if relation == name and states:
                    entries[slot] = [
                        self._node(self._whole(slot, own, self._repeated(traces, state, seen)))
                        for state in states
                    ]
            if states:
                found.append({'relation': name, 'group': name, 'entries': entries})
        return found

    def _repeated(self, traces: Mapping[str, Arrays], state: str, seen: dict) -> dict:
        batch = len(seen['inputs'])
        return {
            name: np.broadcast_to(of[state], (batch, *seen['before'][name].shape))
            for name, of in traces.items()
            if state in of
        }

    def _optimizer(self, weights: list, seen: dict) -> dict:
        name, config = self.optimizer
        states: dict[str, dict] = {}
        for when in ('before', 'after'):
            slots: dict[str, dict] = {'+'.join(own): {} for _, _, own in weights}
            for slot, arrays in seen[f'slots_{when}'].items():
                for path, value in self._parameters(weights, arrays).items():
                    slots[path][slot] = value
            states[f'state_{when}'] = {'count': seen[f'count_{when}'], 'slots': slots}
        updates = {}
        for _, slot, own in weights:
            updates['+'.join(own)] = self._node(self._update(slot, own, seen))
        return {'name': name, 'config': dict(config), **states, 'updates': updates}

    def _update(self, slot: str, names: list[str], seen: dict) -> np.ndarray:
        """What was added to a parameter: as told, else from its gradient and slots."""
        name, config = self.optimizer
        if 'update' in seen:
            return self._whole(slot, names, seen['update'])
        if name not in OPTIMIZERS:
            raise ValueError(f'{name!r} has no formula: give the updates')
        slots = {s: exact(self._whole(slot, names, a)) for s, a in seen['slots_before'].items()}
        gradient, before = (
            exact(self._whole(slot, names, seen[key])) for key in ('gradient', 'before')
        )
        count = seen['count_before'] or 0
        with np.errstate(all='ignore'):
            return OPTIMIZERS[name].step(config, count, slots, gradient, before)[1].value


def summed(left: list, right: Any) -> np.ndarray | None:
    """``sum_s left_s right_s``; ``None`` where each product is zero by structure."""
    products = [a * b for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    return sum(products[1:], products[0]) if products else None


def numeric(dtype: str, precision: str, device: str, allow_tf32: bool, remedy: str) -> dict:
    """How a step rounds; products with fewer bits are refused unless they are allowed."""
    if dtype not in ('float32', 'float64'):
        raise ValueError(f'parameters of {dtype}: float32 and float64 are observed')
    if precision != 'highest' and not allow_tf32:
        raise ValueError(
            f'products of float32 are made in {precision}, as TF32 with 11 bits: call {remedy}, or '
            'pass allow_tf32=True'
        )
    return {
        'dtype': dtype,
        'trace_dtype': dtype,
        'matmul_precision': precision,
        'device': device,
        'k': None,
    }


# PyTorch: array=lambda tensor: tensor.detach().cpu().numpy().copy() ------------------------------


def of_torch(parameter: Any, allow_tf32: bool = False) -> dict:
    """``numeric`` of a step in PyTorch."""
    import torch

    dtype = str(parameter.dtype).removeprefix('torch.')
    asked = torch.get_float32_matmul_precision() if dtype == 'float32' else 'highest'
    precision = {'highest': 'highest', 'high': 'tf32', 'medium': 'bf16'}[asked]
    remedy = "torch.set_float32_matmul_precision('highest')"
    return numeric(dtype, precision, str(parameter.device), allow_tf32, remedy)


TORCH_SLOTS = {
    'sgd': {},
    'momentum': {'trace': 'momentum_buffer'},
    'adam': {'mu': 'exp_avg', 'nu': 'exp_avg_sq'},
    'adamw': {'mu': 'exp_avg', 'nu': 'exp_avg_sq'},
}


def torch_slots(optimizer: Any, named: Mapping[str, Any]) -> Slots:
    """What an optimizer of PyTorch keeps; ``named``: its parameters, all of them."""
    moved = [p for group in optimizer.param_groups for p in group['params']]
    if len(moved) != len(named) or {*map(id, moved)} != {*map(id, named.values())}:
        raise ValueError(
            f'the optimizer moves {len(moved)} parameters and {len(named)} are named: name those '
            'of the optimizer and no others'
        )
    kinds, kept = TORCH_SLOTS[torch_optimizer(optimizer)[0]], {}
    states = {name: optimizer.state.get(p, {}) for name, p in named.items()}
    for slot, key in kinds.items():
        kept[slot] = {
            name: 0 * named[name] if state.get(key) is None else state[key]
            for name, state in states.items()
        }
    counts = {int(state.get('step', 0)) for state in states.values()}
    if len(counts) > 1:
        raise ValueError(f'the parameters have seen {sorted(counts)} steps; one count is known')
    return counts.pop() if 'mu' in kinds else None, kept


def torch_optimizer(optimizer: Any) -> tuple[str, dict]:
    """The optimizer's name and numbers as a receipt has them; the groups of parameters agree."""
    groups = [{k: v for k, v in g.items() if k != 'params'} for g in optimizer.param_groups]
    if any(group != groups[0] for group in groups):
        raise ValueError('the groups of parameters have different settings; one is known')
    group, kind = groups[0], type(optimizer).__name__
    for flag in ('dampening', 'maximize', 'amsgrad'):
        if group.get(flag):
            raise ValueError(f'{flag}={group[flag]!r} has no formula in a receipt')
    config = {'lr': float(group['lr'])}
    decay = {'weight_decay': float(group.get('weight_decay', 0.0))}
    if kind == 'SGD':
        if not group['momentum']:
            return 'sgd', {**config, **decay}
        momentum = {'momentum': float(group['momentum']), 'nesterov': bool(group['nesterov'])}
        return 'momentum', {**config, **momentum, **decay}
    if kind not in ('Adam', 'AdamW'):
        raise ValueError(f'{kind}: SGD, Adam and AdamW are observed')
    decoupled = kind == 'AdamW' or group.get('decoupled_weight_decay')
    b1, b2 = map(float, group['betas'])
    moments = {'b1': b1, 'b2': b2, 'eps': float(group['eps'])}
    return 'adamw' if decoupled else 'adam', {**config, **moments, **decay}


# JAX ----------------------------------------------------------------------------------------------


def of_jax(parameter: Any, allow_tf32: bool = False) -> dict:
    """``numeric`` of a step in JAX."""
    import jax

    platform, option = jax.default_backend(), 'jax_default_matmul_precision'
    full = platform == 'cpu' or getattr(jax.config, option) in ('highest', 'float32')
    precision = 'highest' if full or str(parameter.dtype) != 'float32' else 'tf32'
    remedy = f"jax.config.update({option!r}, 'highest')"
    return numeric(str(parameter.dtype), precision, platform, allow_tf32, remedy)


def optax_slots(state: Any) -> Slots:
    """What an optimizer of optax keeps: its count, trace, mu and nu, wherever they stand."""
    found = dict(_fields(state))
    count = int(found['count']) if 'mu' in found else None
    return count, {slot: found[slot] for slot in ('trace', 'mu', 'nu') if slot in found}


def _fields(state: Any) -> Iterator[tuple[str, Any]]:
    for name, value in getattr(state, '_asdict', dict)().items():
        yield from [(name, value)] if name in ('count', 'trace', 'mu', 'nu') else _fields(value)
    if isinstance(state, tuple | list) and not hasattr(state, '_asdict'):
        for part in state:
            yield from _fields(part)
