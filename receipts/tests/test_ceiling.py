"""How far a number may be off is the verifier's to say, and enough for honest float32 alone."""

from __future__ import annotations

import ast
import copy
from pathlib import Path

import numpy as np
import pytest

import braintrace_receipts as verifier
import making
from braintrace_receipts import reconcile, reconcile_run
from braintrace_receipts.bounds import UNIT, Num, exact, far
from braintrace_receipts.derivation import derive, results
from braintrace_receipts.engine import derive_step
from braintrace_receipts.equations import stored
from braintrace_receipts.losses import LOSSES
from braintrace_receipts.record import Record
from braintrace_receipts.schema import with_arrays
from making import array, numbers

FOLDER = Path(verifier.__file__).parent
F32 = np.float32


def asking(records, k):
    return [{**record, 'numeric': {**record['numeric'], 'k': k}} for record in records]


def off_by(record, units):
    """A record whose largest gradient is off by some units of roundoff of its dtype."""
    record = copy.deepcopy(record)
    node = record['gradients']['W']
    value = numbers(node)
    at = np.unravel_index(np.argmax(np.abs(value)), value.shape)
    value[at] *= 1 + units * UNIT[record['numeric']['dtype']]
    record['gradients']['W'] = array(value, node)
    return record


@pytest.mark.parametrize('dtype', ['float64', 'float32'])
def test_a_large_k_gives_the_same_verdict_and_is_told(dtype):
    run = making.run('lif', dtype=dtype)
    for records in (run, [run[0], off_by(run[1], 5000)]):
        found, asked = reconcile_run(records), reconcile_run(asking(records, 1e9))
        assert (asked.verdict, asked.failures) == (found.verdict, found.failures)
        assert asked.disclosures['[1].k'] == '1e+09 was asked for; the ceiling is 64'
    assert reconcile(asking(run, 1e9)[0], level='engine').disclosures['k'].endswith('is 8')
    assert not any(key.endswith('k') for key in reconcile_run(asking(run, 64.0)).disclosures)


def test_a_small_k_tightens():
    run = making.run('rnn', dtype='float32')
    for k, verdict in ((64.0, 'rederived'), (1e-3, 'failed')):
        assert reconcile_run(asking(run, k)).verdict == verdict
    (failure, *_) = reconcile_run(asking(run, 1e-3)).failures
    assert failure.delta > failure.bound
    strays = off_by(making.run('rnn')[0], 100)
    tight = reconcile(strays, level='engine')
    assert reconcile(strays).verdict == 'rederived' and tight.ok is False
    assert reconcile(asking([strays], 8.0)[0]).failures == tight.failures


def test_u_is_that_of_the_dtype_and_coarser_products_need_leave():
    single, double = (making.run('rnn', dtype=dtype)[1] for dtype in ('float32', 'float64'))
    assert not reconcile(off_by(double, 1e6)).ok  # 1e6 u of float64 are 1e-3 u of float32
    assert reconcile(off_by(single, 4)).ok and not reconcile(off_by(single, 4000)).ok
    for precision, allow, units in (('tf32', 'tf32', 2**13), ('bf16', 'bf16', 2**16)):
        coarse = off_by(single, 4 * units)
        coarse['numeric']['matmul_precision'] = precision
        alone = {f.rule for f in reconcile(coarse).failures}
        assert 4 in alone and 14 in alone
        allowed = reconcile(coarse, allow=(allow,))
        assert 4 not in {f.rule for f in allowed.failures}, allowed.failures
        other = {'tf32': 'bf16', 'bf16': 'tf32'}[allow]
        assert 4 in {f.rule for f in reconcile(coarse, allow=(other,)).failures}
        coarse['numeric']['matmul_precision'] = 'highest'
        assert 4 in {f.rule for f in reconcile(coarse, allow=('tf32', 'bf16')).failures}


def test_coarse_products_widen_nothing_that_no_product_makes():
    record = making.run('rnn', dtype='float32')[1]
    record['numeric']['matmul_precision'] = 'tf32'
    assert reconcile(record, allow=('tf32',)).ok
    node = record['params_after']['W']
    record['params_after']['W'] = array(numbers(node) * (1 + 2**-15), node)
    assert 6 in {f.rule for f in reconcile(record, allow=('tf32',)).failures}


def test_traces_in_bfloat16_need_leave():
    record = making.run('rnn', dtype='float32')[1]
    record['numeric']['trace_dtype'] = 'bfloat16'
    entries = record['traces_after'][0]['entries']
    value = numbers(entries['weight'][0])
    entries['weight'][0] = array(value * (1 + 2**-9), entries['weight'][0])
    assert {f.rule for f in reconcile(record).failures} == {14, 29, 30}
    assert reconcile(record, allow=('bf16',)).verdict == 'rederived'


def test_a_bound_that_is_no_finite_number_holds_nothing():
    for terms in (np.inf, np.nan):
        bad, _ = far(np.ones(3), Num(np.ones(3), np.full(3, terms)), 1.0)
        assert bad.all()
    for value in (np.inf, np.nan):
        bad, _ = far(np.array([value]), exact([value]), 1.0)
        assert bad.all()
    run = making.run('lif', surrogate='fast_sigmoid')
    for record in run:
        record['topology']['constants']['surrogate']['parameters']['slope'] = 1e300
    assert not reconcile_run(run).ok


def test_a_window_may_sum_gradients_that_are_rounded_anew():
    """A compiler may make a step's gradient again where it is summed: the terms of its formula
    count, and not its size.
    """
    run = making.run('rnn', window=2, reduction='sum')
    summed = run[1]['window']['gradients']
    for path, node in summed.items():
        steps = [stored(Record(one)).gradients()[0][path] for one in run]
        terms = sum(one['window']['weight'] * step.terms for one, step in zip(run, steps))
        summed[path] = array(numbers(node) + 50 * UNIT['float64'] * terms, node)
    making.updated(run[1])
    assert reconcile_run(run).ok, reconcile_run(run).failures[:2]


@pytest.mark.parametrize('classes', [10, 1000])
def test_the_bound_of_a_cross_entropy_grows_as_its_size_and_not_as_its_classes(classes):
    outputs, targets = exact(np.zeros((1, classes))), exact(np.eye(1, classes))
    loss = LOSSES['softmax_ce'].per_lane(outputs, targets)
    assert loss.value == pytest.approx(np.log(classes)) and loss.terms < 6 * loss.value


COMPARING = {'allclose', 'isclose', 'assert_allclose', 'assert_almost_equal', 'approx', 'spacing'}


def test_one_function_compares_with_a_tolerance():
    """``far``; elsewhere no ``abs(...)`` or difference is beside a ``<`` or ``>``."""
    found = []
    for path in sorted(FOLDER.glob('*.py')):
        for function in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                name = getattr(node, 'attr', getattr(node, 'id', ''))
                assert name not in COMPARING, (path.name, function.name, name)
                if isinstance(node, ast.Compare) and _measures(node):
                    found.append((path.stem, function.name))
    assert found == [('bounds', 'far')]


def _measures(node: ast.Compare) -> bool:
    """Whether a size or a difference is compared by order."""
    orders = any(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops)
    sides = [node.left, *node.comparators]
    return orders and any(
        _called(side) in ('abs', 'fabs', 'hypot')
        or isinstance(getattr(side, 'op', None), ast.Sub)
        or getattr(side, 'id', '') in ('bound', 'tolerance', 'delta', 'distance', 'excess')
        for side in sides
    )


def _called(side: ast.expr) -> str:
    """The name of the function that a side calls."""
    function = getattr(side, 'func', None)
    return getattr(function, 'attr', getattr(function, 'id', ''))


# honest float32 -----------------------------------------------------------------------------------


class Spiking:
    """A net of LIF neurons and a leaky readout, each number rounded to float32 as it is made."""

    def __init__(self, config, rng):
        constants = config['topology']['constants']
        self.config = config
        self.constants = {k: F32(v) for k, v in constants.items() if type(v) is float}
        self.slope = F32(constants['surrogate']['parameters']['slope'])
        self.weights = {k: numbers(v).astype(F32) for k, v in config['params_before'].items()}
        self.carry = {k: numbers(v).astype(F32) for k, v in config['carry_before'].items()}
        lanes, hidden = self.carry['V'].shape
        width, out = self.weights['W'].shape[0], self.weights['W_out'].shape[1]
        self.traces = {
            'recurrent': [np.zeros((lanes, width, hidden), F32), np.zeros((lanes, hidden), F32)],
            'readout': [np.zeros((lanes, hidden, out), F32), np.zeros((lanes, out), F32)],
        }
        self.rng, self.lanes, self.inputs = rng, lanes, width - hidden

    def psi(self, u):
        small = np.exp(-np.abs(self.slope * u))
        return self.slope * (F32(1) / (F32(1) + small)) * (small / (F32(1) + small))

    def step(self, weight):
        """One step with new data: the arrays of its receipt by path."""
        c, w, old = self.constants, self.weights, self.carry
        theta, one = c['theta'], F32(1)
        x_in = self.rng.standard_normal((self.lanes, self.inputs)).astype(F32)
        target = self.rng.standard_normal((self.lanes, w['W_out'].shape[1])).astype(F32)
        mask = np.full(self.lanes, F32(weight) / F32(self.lanes))
        x = np.concatenate([x_in, old['z']], 1)
        V = c['alpha'] * old['V'] + (x @ w['W'] + w['b']) - theta * old['z']
        z = (V > theta).astype(F32)
        o = c['kappa_out'] * old['o'] + (z @ w['W_out'] + w['b_out'])
        D = c['alpha'] - theta * (self.psi((old['V'] - theta) / theta) / theta)
        per_lane = F32(0.5) * np.sum((o - target) ** 2, -1, dtype=F32)
        err = (o - target) * mask[:, None]
        dh = (err @ w['W_out'].T) * (self.psi((V - theta) / theta) / theta)
        kappa, self.carry = np.full(o.shape, c['kappa_out'], F32), {'V': V, 'z': z, 'o': o}
        fields = {'inputs': x_in, 'targets': target, 'outputs': o, 'signals/err': err}
        fields |= {'loss/mask': mask, 'loss/per_lane': per_lane}
        for name in old:
            fields |= {f'carry_before/{name}': old[name], f'carry_after/{name}': self.carry[name]}
        for name, group, paths, read, keep, sent in (
            ('recurrent', 'hidden', ('W', 'b'), x, D, dh),
            ('readout', 'output', ('W_out', 'b_out'), z, kappa, err),
        ):
            (we, be), back = self.traces[name], sent * keep
            after = [keep[:, None] * we + read[:, :, None], keep * be + one]
            fields |= {
                f'factors/{name}/{group}/x': read,
                f'factors/{name}/{group}/D_f/0': np.ones_like(keep),
                f'factors/{name}/{group}/D/0/0': keep,
                f'signals/dh/{group}/0': sent,
                f'signals/c/{group}/0': back,
                f'signals/dy/{name}': sent,
                f'gradients/{paths[0]}': read.T @ sent + np.sum(back[:, None] * we, 0, dtype=F32),
                f'gradients/{paths[1]}': np.sum(sent, 0, dtype=F32) + np.sum(back * be, 0),
            }
            for when, entries in (('before', self.traces[name]), ('after', after)):
                for slot, entry in zip(('weight', 'bias'), entries):
                    fields[f'traces_{when}/{name}/{group}/{slot}/0'] = entry
            self.traces[name] = after
        return fields

    def receipt(self, fields, t):
        """The float32 numbers in the places of a derived receipt."""
        record = derive(self.config | making.drawn(self.config, self.rng))
        record = with_arrays(record, lambda path, old: verifier.node(fields.get(path, old['data'])))
        value = np.sum(fields['loss/mask'] * fields['loss/per_lane'], dtype=F32)
        record['loss']['value'] = float(value)
        return making.plain(record | {'t': [t] * self.lanes})


@pytest.fixture(scope='module')
def spiking():
    """Step 50 of a net of 32 neurons and 16 lanes whose loss is scaled by 1e-2."""
    sizes = (64, 32, 4, 16)
    config = making.first('lif', dtype='float32', optimizer='none', sizes=sizes, reduction='sum')
    rng = np.random.default_rng(3)
    weight = (rng.standard_normal((96, 32)) / 8).astype(F32)
    config['params_before']['W'] = verifier.node(weight)
    config['params_before']['b'] = verifier.node(np.full(32, 0.05, F32))
    net = Spiking(config, rng)
    for _ in range(50):
        net.step(0.01)
    record = net.receipt(net.step(0.01), 50)
    rate = np.mean(net.carry['z'])
    assert 0.02 < rate < 0.9, rate
    return record


def test_honest_float32_of_a_spiking_net_passes(spiking):
    found = reconcile(spiking)
    assert found.verdict == 'rederived' and found.ties == 0, found.failures[:3]


@pytest.mark.parametrize('path', ['W', 'W_out', 'b'])
def test_five_percent_in_a_gradient_are_seen_in_nearly_every_entry(spiking, path):
    value = numbers(spiking['gradients'][path])
    nonzero = np.count_nonzero(value)
    assert nonzero > 0.6 * value.size
    gradients = {**spiking['gradients'], path: array(value * 1.05, spiking['gradients'][path])}
    found = reconcile({**spiking, 'gradients': gradients})
    seen = [f for f in found.failures if f.rule == 4 and f.path.startswith(f'gradients/{path}[')]
    assert seen and seen[0].count >= 0.999 * nonzero
    lost = np.where(np.arange(value.size).reshape(value.shape) % 2, value, 0)
    gradients |= {path: array(lost, gradients[path])}
    found = reconcile({**spiking, 'gradients': gradients})
    (seen,) = [f for f in found.failures if f.rule == 4]
    assert seen.count >= 0.999 * np.count_nonzero(lost != value)


# spikes -------------------------------------------------------------------------------------------


def at_threshold(distance):
    """A step in which one potential is ``distance`` above its threshold, and the same step by a
    machine that saw the other spike there.
    """
    (record,) = making.run('lif', dtype='float32', optimizer='none', steps=1)
    constants, carry = record['topology']['constants'], record['carry_before']
    old, new = (numbers(record[f'carry_{when}']['V']) for when in ('before', 'after'))
    missing = constants['theta'] + distance - new[0, 0]
    old[0, 0] += missing / constants['alpha']
    good = making.remade(record, carry_before={**carry, 'V': array(old, carry['V'])})
    other = copy.deepcopy(good)
    spikes = numbers(good['carry_after']['z'])
    spikes[0, 0] = 1 - spikes[0, 0]
    other |= results(good, derive_step(Record(good), spikes).fields)
    return good, making.plain(other)


@pytest.mark.parametrize('sign', [1, -1])
def test_a_spike_at_its_threshold_is_a_tie_and_another_is_not(sign):
    good, other = at_threshold(sign * 1e-7)
    assert reconcile(good).verdict == 'rederived'
    found = reconcile(other)
    assert found.verdict == 'rederived' and reconcile(good).ties + found.ties == 1
    good, other = at_threshold(sign * 1e-2)
    assert reconcile(good).ties == 0
    found = reconcile(other)
    assert found.ties == 0 and [f.path for f in found.failures if f.rule == 14][0] == (
        'carry_after/z[0, 0]'
    )
    assert 'threshold' in next(f.hint for f in found.failures if f.rule == 14)
