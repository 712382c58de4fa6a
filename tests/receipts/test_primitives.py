"""The formulas of primitives, against the rules of each registered primitive in float64."""

from __future__ import annotations

import copy
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace._etrace_op import ETP_PRIMITIVE_SPECS, ETP_PRIMITIVES
from braintrace.kit._application import compiled
from braintrace.kit._cases import BUILT_IN, made
from braintrace.receipts._options import options_of
from braintrace.receipts.verifier import check, node, reconcile
from braintrace.receipts.verifier.arrays import sample_indices
from braintrace.receipts.verifier.bounds import exact, far
from braintrace.receipts.verifier.canonical import spec_digest
from braintrace.receipts.verifier.primitives import FORMULAS, NoFormula, Op

WITHOUT: dict[str, str] = {}  # primitive of the library -> why it has no formula
LANES, STATES, STEPS = 2, 2, 3
TRACES = {27, 29, 30}


def library():
    """The primitives that the library registers."""
    own = 'braintrace._etrace_op'
    return {
        p.name
        for p in ETP_PRIMITIVES
        if p.original is None and p.op is None and ETP_PRIMITIVE_SPECS[p].impl.__module__.startswith(own)
    }


def test_every_primitive_of_the_library_has_a_formula_or_a_reason():
    assert library() - set(FORMULAS) == set(WITHOUT)
    assert set(FORMULAS) <= library()


@functools.cache
def applications():
    """An application of each case of the library's ops, in float64."""
    found = []
    for op, cases in BUILT_IN.items():
        for case in cases:
            found += made(op, case).wide(True).applications()
    return found


with jax.enable_x64(True):
    APPLICATIONS = {f'{i}-{app.primitive.name}': app for i, app in enumerate(applications())}
EVERY = pytest.mark.parametrize('name', APPLICATIONS)


def test_every_formula_has_a_case():
    assert {app.primitive.name for app in APPLICATIONS.values()} == set(FORMULAS)


# a receipt of one op, by the library's rules ------------------------------------------------------


def sums(parts):
    return jax.tree.map(lambda *leaves: sum(leaves), *parts)


class Made:
    """One step of one op in a group of two states, whose numbers are drawn."""

    decay, t = 0.6, 3

    def __init__(self, name, factored=False):
        self.app, self.factored = APPLICATIONS[name], factored
        app = self.app
        self.rng, self.operands = np.random.default_rng(0), app.draw(0).operands
        y = app.y_aval.shape
        self.shape = (y[0] if app.batched else LANES, *y[app.batched :])
        one, pairs = functools.partial(self.drawn, self.shape), range(STATES)
        self.given = {
            'D': [[one() for _ in pairs] for _ in pairs],
            'D_f': [one() for _ in pairs],
            'dh': [one() for _ in pairs],
            'direct': self.drawn(y),
            'old': self.before(),
        }
        self.made = jax.tree.map(np.asarray, compiled(self.step)(self.given))

    def drawn(self, shape):
        return self.rng.standard_normal(shape)

    def x(self):
        """x as a factor of the trace has it."""
        x, own = self.app.x(self.operands), self.app.primitive.represent
        return x if own is None else own(x, self.app.weights(self.operands))

    def before(self):
        if not self.factored:
            like = jax.eval_shape(self.entry, np.zeros(self.shape))
            return [{n: self.drawn(e.shape) for n, e in like.items()} for _ in range(STATES)]
        f = [self.drawn(self.shape) for _ in range(STATES)]
        if self.app.x_aval is None:
            return {'f': f}
        lead = () if self.app.batched else self.shape[:1]
        return {'x': self.drawn((*lead, *self.x().shape)), 'f': f}

    def by_lane(self, fn, *args):
        return fn(*args) if self.app.batched else jax.vmap(fn)(*args)

    def entry(self, d):
        return self.by_lane(lambda d: self.app.entry(self.operands, d), d)

    def summed(self, fn, *args):
        """A gradient, summed over lanes."""
        if self.app.batched:
            return fn(*args)
        return jax.tree.map(lambda g: g.sum(0), jax.vmap(fn)(*args))

    def step(self, given):
        D, D_f, dh, old = (given[name] for name in ('D', 'D_f', 'dh', 'old'))
        inside = sum(a * b for a, b in zip(dh, D_f))
        dy = given['direct'] + (inside if self.app.batched else inside.sum(0))
        c = [sum(dh[s] * D[s][r] for s in range(STATES)) for r in range(STATES)]
        new, parts = (self.es if self.factored else self.d_rtrl)(D, D_f, dh, old, dy, c)
        return {'dy': dy, 'c': c, 'new': new, 'gradients': sums(parts)}

    def d_rtrl(self, D, D_f, dh, old, dy, c):
        app = self.app
        new = [
            sums(
                [self.entry(q), *(self.by_lane(app.carried, d, e) for d, e in zip(row, old))]
            )
            for row, q in zip(D, D_f)
        ]
        solve = lambda c, e: app.solved(c, e, self.operands)
        past = [self.summed(solve, *pair) for pair in zip(c, old)]
        return new, [app.gradient(self.operands, dy), *past]

    def es(self, D, D_f, dh, old, dy, c):
        app, a = self.app, self.decay
        moved = [sum(d * f for d, f in zip(row, old['f'])) for row in D]
        f = [a * m + (1 - a) * q for m, q in zip(moved, D_f)]
        sent = sum(a * b for a, b in zip(dh, f)) / (1 - a ** (self.t + 1))
        rest = app.gradient(self.operands, dy - dy + self.given['direct'])
        if 'x' not in old:
            first = self.summed(lambda d: app.gradient(self.operands, d), sent)
            return {'f': f}, [first, rest]
        ex = a * old['x'] + self.x()
        first = self.summed(lambda x, d: app.gradient(self.operands, d, x), ex, sent)
        return {'x': ex, 'f': f}, [first, rest]

    # as a receipt -----------------------------------------------------------------------------

    def options(self):
        app = self.app
        weights = {slot: w.shape for slot, w in app.weights(app.avals).items()}
        x = None if app.x_aval is None else app.x_aval.shape
        return options_of(app.primitive, app.rule_params, x, weights)

    def trace(self, value):
        if self.factored:
            entries = {k: list(map(node, v)) if k == 'f' else node(v) for k, v in value.items()}
        else:
            entries = {slot: [node(e[slot]) for e in value] for slot in value[0]}
        return [{'relation': 'op', 'group': 'g', 'entries': entries}]

    def receipt(self):
        app, lanes, given, made = self.app, self.shape[0], self.given, self.made
        params = {slot: np.asarray(w) for slot, w in app.weights(self.operands).items()}
        nodes = {slot: node(w) for slot, w in params.items()}
        carry = {name: node(np.zeros(self.shape)) for name in 'ab'}
        ones, column = node(np.ones(lanes)), node(np.ones((lanes, 1)))
        relation = {
            'name': 'op',
            'primitive': app.primitive.name,
            'params': {slot: slot for slot in params},
            'groups': ['g'],
            'source': None,
            'options': self.options(),
        }
        decay = self.decay if self.factored else None
        x, each = app.x(self.operands), functools.partial(jax.tree.map, node)
        signals = {
            'err': column,
            'dh': {'g': each(given['dh'])},
            'dy': {'op': node(made['dy'])},
            'c': {'g': each(made['c'])},
            'direct': {'dy': {'op': node(given['direct'])}, 'c': {}},
        }
        if self.factored:
            signals['correction'] = node(np.full(lanes, 1 - decay ** (self.t + 1)))
        factor = {'x': None if x is None else node(x), 'D_f': each(given['D_f'])}
        receipt = {
            'schema': 'braintrace.receipt/1',
            'run_id': 'op',
            'step': 0,
            'every': 1,
            'algorithm': {
                'name': 'ES_D_RTRL' if self.factored else 'D_RTRL',
                'credit': 'cut',
                'decay_x': decay,
                'decay_f': decay,
                'kappa': 0.0,
                'feedback': None,
            },
            'numeric': {
                'dtype': 'float64',
                'trace_dtype': 'float64',
                'matmul_precision': 'highest',
                'device': 'cpu',
                'k': None,
            },
            'topology': {
                'cell': 'opaque',
                'readout': None,
                'groups': [{'name': 'g', 'shape': list(self.shape[1:]), 'states': ['a', 'b']}],
                'relations': [relation],
                'routes': {path: {'kind': 'trace'} for path in params},
                'roles': {},
                'constants': {},
            },
            'lanes': list(range(lanes)),
            'reset': [False] * lanes,
            't': [self.t] * lanes,
            'inputs': column,
            'targets': column,
            'params_before': nodes,
            'carry_before': carry,
            'factors': [{'relation': 'op', 'group': 'g', **factor, 'D': each(given['D'])}],
            'traces_before': self.trace(given['old']),
            'traces_after': self.trace(made['new']),
            'carry_after': carry,
            'outputs': column,
            'loss': {
                'name': 'own',
                'reduction': 'sum',
                'mask': ones,
                'divisor': 1.0,
                'per_lane': ones,
                'value': 1.0,
            },
            'signals': signals,
            'gradients': each({slot: made['gradients'][slot] for slot in params}),
            'optimizer': None,
            'params_after': nodes,
        }
        return receipt | {'spec_digest': spec_digest(receipt)}


def receipt_of(name, factored=False):
    with jax.enable_x64(True):
        return Made(name, factored).receipt()


def rules(result):
    return set(result.rules_evaluated)


@EVERY
def test_traces_and_gradients_are_those_of_the_primitives_own_rules(name):
    receipt = receipt_of(name)
    assert check(receipt, 'braintrace.receipt/1') == []
    result = reconcile(receipt)
    assert result.failures == () and result.verdict == 'consistent'
    assert {3, 4, 30} <= rules(result)
    assert not [key for key in result.disclosures if 'in part' in key]
    wrong = copy.deepcopy(receipt)
    for values in wrong['traces_after'][0]['entries'].values():
        values[0]['data'] = values[0]['data'] * (1 + 1e-9)
    for value in wrong['gradients'].values():
        value['data'] = value['data'] * (1 + 1e-9)
    off = {failure.rule for failure in reconcile(wrong).failures}
    assert off == ({4, 30} if np.size(receipt['gradients']['weight' if 'weight' in wrong['gradients'] else 'lora_b']['data']) else set())


@EVERY
def test_factored_gradients_are_those_of_the_primitives_own_rules(name):
    result = reconcile(receipt_of(name, factored=True))
    assert result.failures == () and {3, 4, 28} <= rules(result)
