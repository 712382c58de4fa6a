"""Another framework's training, written once more in NumPy, as the observer sees it."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from receipts_observer import Observer, numeric

from braintrace_receipts import parse_run

I, N, O, B = 3, 4, 2, 3
DT, TAU, TAU_A, TAU_OUT, THETA, BETA = 1.0, 10.0, 25.0, 15.0, 0.6, 0.3
ALPHA, RHO, KAPPA_OUT = (math.exp(-DT / tau) for tau in (TAU, TAU_A, TAU_OUT))
LEAK = 0.7
ADAM = {'b1': 0.9, 'b2': 0.99, 'eps': 1e-8}
OPTIMIZERS = {
    'sgd': {'lr': 0.05},
    'momentum': {'lr': 0.05, 'momentum': 0.8, 'nesterov': True, 'weight_decay': 0.01},
    'adam': {'lr': 0.01, **ADAM},
    'adamw': {'lr': 0.01, **ADAM, 'weight_decay': 0.1},
}


@dataclass
class Foreign:
    """A framework that trains ``cell`` online; ``receipts(n)`` are those of its steps. ``spoil``
    changes what the observer is told behind a step.
    """

    framework: str = 'pytorch'
    cell: str = 'lif'
    readout: str = 'leaky'
    kappa: float = 0.0
    optimizer: str = 'adam'
    dtype: str = 'float64'
    layout: str = 'out_in'
    split: bool = True
    reset_gradient: bool = False
    fixed: bool = False
    loss: str = 'half_mse'
    tells_updates: bool = False
    spoil: Callable = lambda told: None
    p: dict = field(default_factory=dict)

    def __post_init__(self):
        draw = np.random.default_rng(7)
        normal = lambda *shape: draw.normal(size=shape).astype(self.dtype) * 0.5
        self.p = {'w': normal(I + N, N), 'b': normal(N), 'w_out': normal(N, O), 'b_out': normal(O)}
        self.B_out, self.draw = normal(N, O), draw
        self.names = {'rnn': ['h'], 'lif': ['V'], 'alif': ['V', 'a']}[self.cell]
        self.slots = {
            name: {slot: np.zeros_like(p) for slot in self.kept} for name, p in self.p.items()
        }
        self.count = 0
        self.restart()

    @property
    def kept(self):
        return {'sgd': [], 'momentum': ['trace']}.get(self.optimizer, ['mu', 'nu'])

    @property
    def sent(self):
        return 'h' if self.cell == 'rnn' else 'z'

    def restart(self):
        """Carry and traces of a new sequence."""
        carried = [*self.names, *(['z'] if self.sent == 'z' else [])]
        self.carry = {name: np.zeros((B, N), self.dtype) for name in carried}
        if self.readout == 'leaky':
            self.carry['o'] = np.zeros((B, O), self.dtype)
        states = [*self.names, *(['filter'] if self.kappa else [])]
        zeros = lambda *shape: np.zeros((B, *shape), self.dtype)
        self.e = {
            'w': {s: zeros(I + N, N) for s in states},
            'b': {s: zeros(N) for s in states},
        }
        out = ['o'] if self.readout == 'leaky' else []
        self.e |= {'w_out': {s: zeros(N, O) for s in out}, 'b_out': {s: zeros(O) for s in out}}

    # one step -------------------------------------------------------------------------------------

    def slope(self, s):
        """dz/dV: the slope of a fast sigmoid at (V - threshold) / theta, over theta."""
        above = s['V'] - THETA - (BETA * s['a'] if 'a' in s else 0)
        return 1 / (1 + 2.0 * np.abs(above / THETA)) ** 2 / THETA

    def cell_step(self, x):
        """The new carry, D by pairs of states, D_f by state, the slopes, and what is emitted."""
        old, y = self.carry, x @ self.p['w'] + self.p['b']
        if self.cell == 'rnn':
            new = {'h': LEAK * old['h'] + np.tanh(y)}
            return new, {'hh': LEAK}, {'h': 1 - np.tanh(y) ** 2}, (None, 1 - np.tanh(y) ** 2)
        new = {'V': ALPHA * old['V'] + y - THETA * old['z']}
        before = self.slope(old)
        back = THETA * before if self.reset_gradient else 0.0
        D = {'VV': ALPHA - back}
        if self.cell == 'alif':
            new['a'] = RHO * old['a'] + old['z']
            D |= {'Va': BETA * back, 'aV': before, 'aa': RHO - BETA * before}
        above = new['V'] - THETA - (BETA * new['a'] if self.cell == 'alif' else 0)
        new['z'] = (above > 0).astype(self.dtype)
        return new, D, {'V': 1.0}, (before, self.slope(new))

    def traced(self, e, x, D, D_f, emits):
        """The new traces of a weight or, where ``x`` is None, of a bias."""
        wide = lambda v: v[:, None] if x is not None and np.ndim(v) == 2 else v
        fresh = 1.0 if x is None else x[:, :, None]
        new = {}
        for s in self.names:
            new[s] = sum(wide(D[s + r]) * e[r] for r in self.names if s + r in D)
            new[s] = new[s] + wide(D_f[s]) * fresh if s in D_f else new[s]
        if self.kappa:
            new['filter'] = self.kappa * e['filter'] + sum(wide(emits[s]) * new[s] for s in emits)
        return {s: v.astype(self.dtype) for s, v in new.items()}

    def loss_of(self, outputs, targets):
        if self.loss == 'half_mse':
            return 0.5 * ((outputs - targets) ** 2).sum(-1), outputs - targets, {}
        odds = np.exp(outputs - outputs.max(-1, keepdims=True))
        p = odds / odds.sum(-1, keepdims=True)
        return -(targets * np.log(p)).sum(-1), p - targets, {'probabilities': p}

    def moved(self, name, g):
        """The new slots and the update of a parameter."""
        c, s = OPTIMIZERS[self.optimizer], self.slots[name]
        decay = c.get('weight_decay', 0.0) * self.p[name]
        if self.optimizer == 'sgd':
            return {}, -c['lr'] * g
        if self.optimizer == 'momentum':
            trace = g + decay + c['momentum'] * s['trace']
            return {'trace': trace}, -c['lr'] * (g + decay + c['momentum'] * trace)
        mu = c['b1'] * s['mu'] + (1 - c['b1']) * g
        nu = c['b2'] * s['nu'] + (1 - c['b2']) * g * g
        n = self.count + 1
        way = mu / (1 - c['b1'] ** n) / (np.sqrt(nu / (1 - c['b2'] ** n)) + c['eps'])
        return {'mu': mu, 'nu': nu}, -c['lr'] * (way + decay)

    def step(self, reset):
        """One step of training, observed."""
        inputs = self.draw.normal(size=(B, I)).astype(self.dtype)
        targets = np.eye(O, dtype=self.dtype)[self.draw.integers(0, O, B)]
        flags = np.full(B, reset)
        self.observer.before(*self.state(), inputs, targets, reset=flags)
        x = np.concatenate([inputs, self.carry[self.sent]], -1)
        new, D, D_f, (before, after) = self.cell_step(x)
        sent = new[self.sent]
        emits = {'h': np.ones((B, N))} if self.cell == 'rnn' else {'V': after, 'a': -BETA * after}
        emits = {s: emits[s] for s in self.names}
        e = {'w': self.traced(self.e['w'], x, D, D_f, emits)}
        e['b'] = self.traced(self.e['b'], None, D, D_f, emits)
        outputs = sent @ self.p['w_out'] + self.p['b_out']
        e |= {'w_out': {}, 'b_out': {}}
        if self.readout == 'leaky':
            outputs = new['o'] = KAPPA_OUT * self.carry['o'] + outputs
            e['w_out'] = {'o': KAPPA_OUT * self.e['w_out']['o'] + sent[:, :, None]}
            e['b_out'] = {'o': KAPPA_OUT * self.e['b_out']['o'] + 1.0}
        per_lane, err, extra = self.loss_of(outputs, targets)
        err = err / B
        learning = err @ (self.B_out if self.fixed else self.p['w_out']).T
        g = self.gradients(e, sent, err, learning, emits)
        updates = {}
        for name in self.p:
            self.slots[name], updates[name] = self.moved(name, g[name])
            self.p[name] = (self.p[name] + updates[name]).astype(self.dtype)
        self.carry, self.e, self.count = new, e, self.count + 1
        told = dict(gradients=self.parts(g), x=self.read(x, sent), psi=after, psi_before=before)
        told |= dict(outputs=outputs, per_lane=per_lane, value=per_lane.mean(), err=err)
        told |= dict(learning=learning, **extra, state=self.state())
        told |= {'updates': self.parts(updates)} if self.tells_updates else {}
        self.spoil(told)
        self.observer.after(*told.pop('state'), **told)

    def gradients(self, e, sent, err, learning, emits):
        if self.kappa:
            through = {'filter': learning}
        else:
            through = {s: learning * emits[s] for s in emits}
        g = {
            'w': sum((through[s][:, None] * e['w'][s]).sum(0) for s in through),
            'b': sum((through[s] * e['b'][s]).sum(0) for s in through),
        }
        if self.readout == 'linear':
            return {**g, 'w_out': sent.T @ err, 'b_out': err.sum(0)}
        out = e['w_out']['o'], e['b_out']['o']
        return {**g, 'w_out': (err[:, None] * out[0]).sum(0), 'b_out': (err * out[1]).sum(0)}

    def receipts(self, count, restart=0):
        """Receipts of consecutive steps, with a reset of all lanes before step ``restart``."""
        file = io.BytesIO()
        self.observer = self.observed(file)
        for number in range(count):
            reset = bool(restart) and number == restart
            if reset:
                self.restart()
            self.step(reset)
        return parse_run(file.getvalue())

    # what the observer is told --------------------------------------------------------------------

    def observed(self, file):
        return Observer(
            file,
            {role: role for role, *_ in self.roles},
            cell=self.cell,
            readout=self.readout,
            constants=self.constants(),
            optimizer=(self.optimizer, OPTIMIZERS.get(self.optimizer, {'lr': 0.1})),
            numeric=numeric(self.dtype, 'highest', 'cpu', False, ''),
            kappa=self.kappa,
            feedback=self.B_out if self.fixed else None,
            layout=self.layout,
            loss=self.loss,
            initial={name: np.zeros_like(v) for name, v in self.carry.items()},
            source=(self.framework, '1.0'),
        )

    @property
    def roles(self):
        """Roles, our names and rows; ``split`` parts the weight into those of inputs and spikes."""
        rows = {'input': slice(0, I), 'recurrent': slice(I, None)}
        rows = rows if self.split else {'recurrent': slice(None)}
        parts = [(role, 'w', rows[role]) for role in rows]
        return [
            *parts,
            ('bias', 'b', None),
            ('readout', 'w_out', None),
            ('readout_bias', 'b_out', None),
        ]

    def put(self, name, rows, value):
        value = value if rows is None else value[..., rows, :]
        turned = self.p[name].ndim == 2 and self.layout == 'out_in'
        return np.swapaxes(value, -1, -2) if turned else value

    def parts(self, arrays):
        return {role: self.put(name, rows, arrays[name]) for role, name, rows in self.roles}

    def read(self, x, sent):
        given = {'input': x[:, :I], 'recurrent': x[:, I:] if self.split else x, 'readout': sent}
        return {
            role: value for role, value in given.items() if role in {one for one, *_ in self.roles}
        }

    def state(self):
        """Parameters, slots, carry and traces."""
        kept = {s: {n: of[s] for n, of in self.slots.items()} for s in self.kept}
        count = self.count if 'mu' in self.kept else None
        slots = count, {slot: self.parts(arrays) for slot, arrays in kept.items()}
        traces = {
            role: {s: self.put(name, rows, v) for s, v in self.e[name].items()}
            for role, name, rows in self.roles
        }
        return self.parts(self.p), slots, self.carry, traces

    def constants(self):
        out = {'dt': DT, 'tau_out': TAU_OUT, 'kappa_out': KAPPA_OUT}
        out = out if self.readout == 'leaky' else {}
        if self.cell == 'rnn':
            return {'leak': LEAK, **out}
        own = {'dt': DT, 'tau': TAU, 'alpha': ALPHA, 'theta': THETA}
        own |= {'reset_gradient': self.reset_gradient}
        own |= {'surrogate': {'name': 'fast_sigmoid', 'parameters': {'slope': 2.0}}}
        own |= {'tau_a': TAU_A, 'rho': RHO, 'beta': BETA} if self.cell == 'alif' else {}
        return {**own, **out}
