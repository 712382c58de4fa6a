"""The formulas of primitives, against the rules of each registered primitive in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace._etrace_op import ETP_PRIMITIVE_SPECS, ETP_PRIMITIVES
from braintrace.kit._application import compiled
from braintrace.kit._cases import BUILT_IN, made, matmul, shape
from braintrace.receipts._topology import options_of
from braintrace_receipts import check, node, parse_run, reconcile
from braintrace_receipts.bounds import exact, far
from braintrace_receipts.canonical import spec_digest
from braintrace_receipts.primitives import FORMULAS, Op
from golden import generate

WITHOUT: dict[str, str] = {}  # primitive of the library -> why it has no formula
LANES, STATES = 2, 2
TRACES = {27, 29, 30}


def library():
    """The primitives that the library registers; other tests register more."""
    own = 'braintrace._etrace_op'
    return {
        p.name
        for p in ETP_PRIMITIVES
        if p in ETP_PRIMITIVE_SPECS
        and p.original is None
        and p.op is None
        and ETP_PRIMITIVE_SPECS[p].impl.__module__.startswith(own)
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


def named(primitive):
    """The first application of a primitive."""
    return next(n for n, app in APPLICATIONS.items() if app.primitive.name == primitive)


def test_every_formula_has_a_case():
    assert {app.primitive.name for app in APPLICATIONS.values()} == set(FORMULAS)


# a receipt of one op, by the library's rules ------------------------------------------------------


def sums(parts):
    return jax.tree.map(lambda *leaves: sum(leaves), *parts)


class Made:
    """One step of one op in a group of two states, whose numbers are drawn."""

    decay, t = 0.6, 3

    def __init__(self, app, factored=False, positions=None):
        self.app, self.factored, self.positions = app, factored, positions
        self.rng, self.operands = np.random.default_rng(0), app.draw(0).operands
        y = app.y_aval.shape
        self.shape = (y[0] if app.batched else LANES, *y[app.batched :])
        self.group = self.shape if positions is None else (*self.shape[:1], 1 + max(positions))
        pairs = range(STATES)
        self.given = {
            'D': [[self.drawn(self.group) for _ in pairs] for _ in pairs],
            'D_f': [self.drawn(self.shape) for _ in pairs],
            'dh': [self.drawn(self.group) for _ in pairs],
            'direct': self.drawn(y),
            'old': self.before(),
        }
        self.made = jax.tree.map(np.asarray, compiled(self.step)(self.given))

    def drawn(self, shape):
        return self.rng.standard_normal(shape)

    def placed(self, value):
        """Numbers of the group where y stands."""
        return value if self.positions is None else value[:, np.array(self.positions)]

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
        c = [sum(dh[s] * D[s][r] for s in range(STATES)) for r in range(STATES)]
        D, dh, at_y = jax.tree.map(self.placed, (D, dh, c))
        inside = sum(a * b for a, b in zip(dh, D_f))
        dy = given['direct'] + (inside if self.app.batched else inside.sum(0))
        new, parts = (self.es if self.factored else self.d_rtrl)(D, D_f, dh, old, dy, at_y)
        return {'dy': dy, 'c': c, 'new': new, 'gradients': sums(parts)}

    def d_rtrl(self, D, D_f, dh, old, dy, c):
        app = self.app
        new = [
            sums([self.entry(q), *(self.by_lane(app.carried, d, e) for d, e in zip(row, old))])
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
        rest = app.gradient(self.operands, jnp.asarray(self.given['direct']))
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
        own = options_of(app.primitive.name, app.rule_params, x, weights)
        return own if self.positions is None else own | {'positions': {'g': self.positions}}

    def trace(self, value):
        if self.factored:
            entries = {k: list(map(node, v)) if k == 'f' else node(v) for k, v in value.items()}
        else:
            entries = {slot: [node(e[slot]) for e in value] for slot in value[0]}
        return [{'relation': 'op', 'group': 'g', 'entries': entries}]

    def topology(self):
        slots, relation = self.app.invars, {'name': 'op', 'groups': ['g'], 'source': None}
        relation |= {'primitive': self.app.primitive.name, 'options': self.options()}
        return {
            'cell': 'opaque',
            'readout': None,
            'groups': [{'name': 'g', 'shape': list(self.group[1:]), 'states': ['a', 'b']}],
            'relations': [relation | {'params': {slot: slot for slot in slots}}],
            'routes': {path: {'kind': 'trace'} for path in slots},
            'roles': {},
            'constants': {},
        }

    def signals(self):
        given, made = self.given, self.made
        own = {
            'err': node(np.ones((self.group[0], 1))),
            'dh': {'g': list(map(node, given['dh']))},
            'dy': {'op': node(made['dy'])},
            'c': {'g': list(map(node, made['c']))},
            'direct': {'dy': {'op': node(given['direct'])}, 'c': {}},
        }
        correction = np.full(self.group[0], 1 - self.decay ** (self.t + 1))
        return own | ({'correction': node(correction)} if self.factored else {})

    def receipt(self):
        app, lanes, given, made = self.app, self.group[0], self.given, self.made
        weights = {slot: node(np.asarray(w)) for slot, w in app.weights(self.operands).items()}
        carry = {name: node(np.zeros(self.group)) for name in 'ab'}
        ones, column = node(np.ones(lanes)), node(np.ones((lanes, 1)))
        x, each = app.x(self.operands), functools.partial(jax.tree.map, node)
        factor = {'relation': 'op', 'group': 'g', 'x': None if x is None else node(x)}
        loss = {'name': 'own', 'reduction': 'sum', 'divisor': 1.0, 'value': 1.0}
        base = parse_run(generate('rnn', 1))[0]
        receipt = base | {
            'numeric': base['numeric'] | {'dtype': 'float64', 'trace_dtype': 'float64'},
            'topology': self.topology(),
            'lanes': list(range(lanes)),
            'reset': [False] * lanes,
            't': [self.t] * lanes,
            **dict.fromkeys(('inputs', 'targets', 'outputs'), column),
            **dict.fromkeys(('params_before', 'params_after'), weights),
            **dict.fromkeys(('carry_before', 'carry_after'), carry),
            'factors': [factor | {'D_f': each(given['D_f']), 'D': each(given['D'])}],
            'traces_before': self.trace(given['old']),
            'traces_after': self.trace(made['new']),
            'loss': loss | {'mask': ones, 'per_lane': ones},
            'signals': self.signals(),
            'gradients': each({slot: made['gradients'][slot] for slot in weights}),
            'optimizer': None,
        }
        if self.factored:
            decays = {'name': 'ES_D_RTRL', 'decay_x': self.decay, 'decay_f': self.decay}
            receipt['algorithm'] = receipt['algorithm'] | decays
        return receipt | {'spec_digest': spec_digest(receipt)}


def receipt_of(name, **how):
    with jax.enable_x64(True):
        return Made(APPLICATIONS[name], **how).receipt()


def without_gates(result):
    """Whether the rules of traces, of signals and of gradients compared all there is."""
    return not {f'rule {n} in part' for n in (3, 4, 28, *TRACES)} & set(result.disclosures)


@EVERY
def test_traces_and_gradients_are_those_of_the_primitives_own_rules(name):
    receipt = receipt_of(name)
    assert check(receipt, 'braintrace.receipt/1') == []
    result = reconcile(receipt)
    assert result.failures == () and result.verdict == 'consistent'
    assert {3, 4, 30} <= set(result.rules_evaluated) and without_gates(result)
    entries = receipt['traces_after'][0]['entries']
    for values in [*receipt['gradients'].values(), *(states[0] for states in entries.values())]:
        values |= node(values['data'] * (1 + 1e-9))
    off = {failure.rule for failure in reconcile(receipt).failures}
    has = any(g['data'].size for g in receipt['gradients'].values())
    assert ({4, 30} if has else set()) <= off <= {4, *TRACES}


@EVERY
def test_factored_gradients_are_those_of_the_primitives_own_rules(name):
    result = reconcile(receipt_of(name, factored=True))
    assert result.failures == () and without_gates(result)
    assert {3, 4, 28} <= set(result.rules_evaluated)


# where y is in a group ------------------------------------------------------------------------


def test_numbers_are_gathered_to_where_y_stands_in_its_group():
    for factored in (False, True):
        receipt = receipt_of(named('etp_mm'), factored=factored, positions=[2, 0, 0, 1, 2])
        result = reconcile(receipt)
        assert result.failures == () and without_gates(result)
        assert {3, 4, 28 if factored else 30} <= set(result.rules_evaluated)
        options = receipt['topology']['relations'][0]['options']
        options['positions'] = {'g': None}
        gated = {**reconcile(receipt).gated_off, **reconcile(receipt).disclosures}
        assert gated[4] == 'no positions of op in g'
        for wrong in ({'g': [0, 1]}, {'g': [0, 0, 0, 1, 3]}, {}):
            options['positions'] = wrong
            result = reconcile(receipt)
            assert result.verdict == 'malformed' and result.failures[0].path != 'internal'


@pytest.mark.parametrize('primitive', ['etp_mm', 'etp_mv', 'etp_conv', 'etp_elemwise'])
def test_an_entry_for_each_position_that_an_element_of_y_feeds(primitive):
    app = APPLICATIONS[named(primitive)]
    rng, y = np.random.default_rng(1), app.y_aval.shape
    laned = app.batched
    d = exact(rng.standard_normal((*y[:laned], 3, *y[laned:])))
    with jax.enable_x64(True):
        made = Made(app)
    weights = {slot: exact(w) for slot, w in app.weights(made.operands).items()}
    op = Op(primitive, made.options(), weights.get, len(y) - laned)
    x = app.x(made.operands)
    x = None if x is None else exact(x)
    whole = op.instant(x, d)
    for k in range(3):
        one = (slice(None), k) if laned else (k,)
        part = op.instant(x, d[one])
        for slot in app.invars:
            assert np.array_equal(whole[slot].value[one], part[slot].value)
            assert part[slot].shape == made.given['old'][0][slot].shape[not laned :]
    same = op.instant(x, op.to_y(d))
    for slot in app.invars:
        total, own = op.gradient(slot, d, whole[slot]), op.gradient(slot, op.to_y(d), same[slot])
        assert not far(total.value, own, 64 * 2.0**-53)[0].any()


# what no formula covers ---------------------------------------------------------------------------


def gates(receipt):
    result = reconcile(receipt)
    assert result.failures == () and result.verdict == 'consistent'
    said = {n: result.disclosures.get(f'rule {n} in part') for n in (4, *TRACES)}
    return {n: result.gated_off.get(n, reason) for n, reason in said.items()}


def changed(primitive, /, without=(), **change):
    """A receipt of a primitive with another relation or other options."""
    receipt = receipt_of(named(primitive))
    relation = receipt['topology']['relations'][0]
    relation |= {key: change.pop(key) for key in ('primitive', 'params') if key in change}
    options = relation['options'] | change
    relation['options'] = {name: options[name] for name in options if name not in without}
    return receipt | {'spec_digest': spec_digest(receipt)}


UNCOVERED = [
    ('etp_mm', {'primitive': 'etp_new'}, 'etp_new'),
    ('etp_conv', {'batch_group_count': 2}, 'etp_conv with batch groups'),
    (
        'etp_conv',
        {'dimension_numbers': [[1, 0, 2], [0, 1, 2], [0, 1, 2]]},
        'etp_conv with its batch behind another axis',
    ),
    (
        'etp_lora_mm',
        {'through': ['lora_b']},
        'etp_lora_mm whose lora_b is a function of its parameter',
    ),
    ('etp_einsum_mm', {'equation': 'hi,hio->h'}, 'etp_einsum_mm and y of 2 axes in a lane'),
    ('etp_lora_mm', {'without': {'alpha'}}, 'etp_lora_mm without its option alpha'),
    ('etp_sp_mm', {'without': {'rows'}}, 'etp_sp_mm without its option rows'),
]


@pytest.mark.parametrize(('primitive', 'change', 'reason'), UNCOVERED)
def test_what_no_formula_covers_is_gated_off_and_says_why(primitive, change, reason):
    found = gates(changed(primitive, **change))
    assert {found[n] for n in TRACES} == {f'no formula: {reason}'} and reason in found[4]


@pytest.mark.parametrize('primitive', ['etp_mm', 'etp_elemwise'])
def test_a_weight_that_is_a_function_of_its_parameter_has_a_trace_and_no_gradient(primitive):
    receipt = changed(primitive, through=['weight'])
    receipt['gradients']['weight']['data'] = receipt['gradients']['weight']['data'] * 2
    found = gates(receipt)
    assert 'op: weight is a function of its parameter' in found[4]
    assert {found[n] for n in (27, 30)} <= {None, 'nothing to compare'}
    trace = receipt['traces_after'][0]['entries']['weight'][0]
    trace['data'] = trace['data'] + 1
    assert 30 in {failure.rule for failure in reconcile(receipt).failures}


def test_a_padding_entry_of_a_sparse_matrix_stays_zero():
    op = Op('etp_sp_mm', {'rows': [0, 2], 'columns': [1, 2], 'shape': [2, 2]}, {}.get)
    x, d = exact(np.ones((1, 2))), exact(np.ones((1, 2)))
    assert op.instant(x, d)['weight'].value.tolist() == [[1.0, 0.0]]
    assert op.carried('weight', d, exact(np.ones((1, 2)))).value.tolist() == [[1.0, 0.0]]


WRONG = [
    ('etp_sp_mm', {'columns': [9] * 7}),
    ('etp_sp_mm', {'rows': [0]}),
    ('etp_einsum_mm', {'equation': 'hi,hio'}),
    ('etp_conv', {'strides': []}),
    ('etp_conv', {'feature_group_count': 5}),
    ('etp_conv', {'dimension_numbers': [[0, 1], [0, 1, 2], [0, 1, 2]]}),
    ('etp_lora_mm', {'params': {'lora_b': 'lora_a', 'lora_a': 'lora_b', 'bias': 'bias'}}),
    ('etp_mm', {'params': {'weight': 'bias'}}),
    ('etp_mv', {'params': {'kernel': 'weight'}}),
]


@pytest.mark.parametrize(('primitive', 'change'), WRONG)
def test_what_a_primitive_does_not_take_is_never_accepted(primitive, change):
    result = reconcile(changed(primitive, **change))
    assert all(failure.path != 'internal' for failure in result.failures)
    assert not result.ok or 4 in result.gated_off


# samples of traces --------------------------------------------------------------------------------


def sampled(receipt, more=True):
    """The receipt with a sample of each trace; before the step also at the places after it."""
    entries = {k: receipt[k][0]['entries']['weight'] for k in ('traces_after', 'traces_before')}
    for s in range(STATES):
        after = node(entries['traces_after'][s]['data'], arrays='sample')
        entries['traces_after'][s] = after
    every = {i for one in entries['traces_after'] for i, _ in one['sample']} if more else ()
    for s in range(STATES):
        before = entries['traces_before'][s]['data']
        entries['traces_before'][s] = node(before, arrays='sample', also=every)
    return receipt


@pytest.fixture
def wide():
    """A receipt whose traces have more than 4096 entries."""
    with jax.enable_x64(True):
        case = made(matmul, ([shape(4, 64), shape(64, 32)], {})).wide(True)
        return Made(case.applications()[0]).receipt()


def test_a_sampled_trace_is_compared_where_the_sample_before_tells(wide):
    receipt = sampled(wide)
    assert check(receipt, 'braintrace.receipt/1') == []
    result = reconcile(receipt)
    assert result.failures == () and result.rules_evaluated[30] == STATES * 256
    assert result.gated_off[27].startswith('sampled: traces_before/op/g/weight')
    pair = receipt['traces_after'][0]['entries']['weight'][1]['sample'][17]
    pair[1] *= 1 + 1e-9
    (failure,) = reconcile(receipt).failures
    assert failure.rule == 30 and failure.path == 'traces_after/op/g/weight/1[17]'


def test_a_sampled_trace_is_not_compared_where_the_sample_before_tells_other_entries(wide):
    result = reconcile(sampled(wide, more=False))
    assert result.failures == () and 30 not in result.rules_evaluated
    assert result.gated_off[30].startswith('sampled: traces_after/op/g/weight/0')


def test_a_sample_has_all_that_the_digest_decides_in_order(wide):
    receipt = sampled(wide)
    sample = receipt['traces_before'][0]['entries']['weight'][0]['sample']
    assert len(sample) > 256
    for wrong in (sample[::-1], sample[1:], [*sample, sample[-1]], [*sample, [8192, 0.0]]):
        receipt['traces_before'][0]['entries']['weight'][0]['sample'] = wrong
        (problem,) = check(receipt, 'braintrace.receipt/1')
        assert 'sha256 decides' in problem.message
