"""The engine against plain NumPy that shares no code with it."""

from __future__ import annotations

import numpy as np
import pytest

import making
import oracle
from braintrace_receipts.bounds import UNIT, exact
from braintrace_receipts.surrogates import SURROGATES, psi
from oracle import STEP, numbers, values

CELLS = ('rnn', 'lif', 'alif')
KINDS = {
    'plain': dict(),
    'linear': dict(readout='linear', loss='softmax_ce'),
    'sum': dict(reduction='sum', reset_gradient=False, surrogate='arctan'),
    'whole': dict(credit='whole', surrogate='fast_sigmoid'),
    'filter': dict(kappa=0.6, readout='linear', surrogate='triangle'),
    'whole-filter': dict(kappa=0.6, credit='whole'),
    'fixed': dict(feedback='fixed', surrogate='multi_gaussian'),
    'fixed-filter': dict(feedback='fixed', kappa=0.4, readout='linear'),
    'modulator': dict(feedback='modulator', credit='whole'),
}
ES = {
    'es': dict(),
    'es-linear': dict(readout='linear', loss='softmax_ce', surrogate='triangle'),
    'es-fixed': dict(feedback='fixed', reset_gradient=False),
}


def run_of(cell, **how):
    """Four steps with constant weights."""
    return making.run(cell, optimizer='none', steps=4, sizes=(2, 3, 2, 2), **how)


def close(found, want):
    np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-12)


def trace_of(record, relation, when='after'):
    return next(t for t in record[f'traces_{when}'] if t['relation'] == relation)['entries']


def part(entries, index, like):
    """An entry; None is zero."""
    return np.zeros(like) if entries[index] is None else numbers(entries[index])


@pytest.mark.parametrize('cell', CELLS)
@pytest.mark.parametrize('kind', KINDS)
def test_a_step_is_that_of_the_plain_cell(cell, kind):
    for record in run_of(cell, **KINDS[kind]):
        params, carry = values(record['params_before']), values(record['carry_before'])
        new, outputs, _, _ = oracle.step(record, params, carry)
        close(numbers(record['outputs']), outputs.real)
        assert set(new) == set(record['carry_after'])
        for name, value in new.items():
            close(numbers(record['carry_after'][name]), value.real)
        close(record['loss']['value'], oracle.loss(record, outputs.real))
        close(numbers(record['loss']['per_lane']), oracle.lane_losses(record, outputs.real))
        close(numbers(record['signals']['err']), oracle.error(record, outputs))
        D, D_f = oracle.jacobian(record)
        factor = record['factors'][0]
        for s, row in enumerate(D):
            close(part(factor['D_f'], s, D_f[s].shape), D_f[s])
            for r, one in enumerate(row):
                close(part(factor['D'][s], r, one.shape), one)


@pytest.mark.parametrize('cell', CELLS)
@pytest.mark.parametrize('kind', KINDS)
def test_traces_are_the_derivative_of_the_states(cell, kind):
    records = run_of(cell, **KINDS[kind])
    true, last = oracle.traces_of(records), records[-1]
    paths = {'recurrent': ('W', 'b'), 'readout': ('W_out', 'b_out')}
    for group in last['topology']['groups']:
        relation = 'recurrent' if group['name'] == 'hidden' else 'readout'
        entries = trace_of(last, relation)
        for slot, path in zip(('weight', 'bias'), paths[relation], strict=True):
            for s, state in enumerate(group['states']):
                own, want = entries[slot][s], true[state, path]
                found = np.zeros(0) if own is None else numbers(own)
                lanes, positions = want.shape[:2]
                dense = np.zeros(want.shape)
                for b in range(lanes):
                    for n in range(positions):
                        dense[b, n, ..., n] = found[b, ..., n] if found.size else 0.0
                close(dense, want)


@pytest.mark.parametrize('cell', CELLS)
@pytest.mark.parametrize('kind', [kind for kind in KINDS if 'credit' not in KINDS[kind]])
def test_the_sum_of_gradients_is_that_of_the_unrolled_net_with_the_cut(cell, kind):
    records = run_of(cell, **KINDS[kind])
    for path, want in oracle.unrolled(records).items():
        found = sum(numbers(record['gradients'][path]) for record in records)
        close(found, want)
        assert np.any(want)


@pytest.mark.parametrize('cell', CELLS)
@pytest.mark.parametrize('kind', KINDS)
def test_a_gradient_moves_the_old_states_by_their_traces(cell, kind):
    """One step in which each old state moves with a parameter as its trace says; credit ``whole``
    also goes through the recurrent op.
    """
    record = run_of(cell, **KINDS[kind])[-1]
    whole = record['algorithm']['credit'] == 'whole'
    params, before = values(record['params_before']), values(record['carry_before'])
    for path, at, moved in oracle.directions(params):
        carry, r = dict(before), None
        for group in record['topology']['groups']:
            relation = 'recurrent' if group['name'] == 'hidden' else 'readout'
            own = ('W', 'b') if relation == 'recurrent' else ('W_out', 'b_out')
            if path not in own:
                continue
            slot = 'weight' if path == own[0] else 'bias'
            for s, state in enumerate(group['states']):
                shape = (len(record['lanes']), *group['shape'])
                entry = trace_of(record, relation, 'before')[slot][s]
                motion = np.zeros(shape)
                if entry is not None:
                    motion[:, at[-1]] = numbers(entry)[(slice(None), *at)]
                if state == '(filter)':
                    r = motion * STEP
                else:
                    carry[state] = carry[state] + 1j * STEP * motion
        _, outputs, read, _ = oracle.step(record, moved, carry, whole=whole, r=r)
        want = oracle.derivative(record, outputs, read, path in ('W', 'b'))
        close(numbers(record['gradients'][path])[at], want)


@pytest.mark.parametrize('cell', CELLS)
@pytest.mark.parametrize('kind', ES)
def test_factored_traces_and_their_gradient(cell, kind):
    """``ex = a ex' + x``, ``ef = a D ef' + (1 - a) D_f``, and the gradient, number by number."""
    records = run_of(cell, algorithm='ES_D_RTRL', **ES[kind])
    a_x, a_f = (records[0]['algorithm'][name] for name in ('decay_x', 'decay_f'))
    lanes, width, hidden = 2, 5, 3
    ex, ef = np.zeros((lanes, width)), None
    for t, record in enumerate(records):
        carry, params = values(record['carry_before']), values(record['params_before'])
        D, D_f = oracle.jacobian(record)
        states = range(len(D_f))
        ef = np.zeros((len(D_f), lanes, hidden)) if ef is None else ef
        x = np.concatenate([numbers(record['inputs']), oracle.old_output(record, carry).real], 1)
        ex = a_x * ex + x
        ef = np.array(
            [a_f * sum(D[s][r] * ef[r] for r in states) + (1 - a_f) * D_f[s] for s in states]
        )
        entries = trace_of(record, 'recurrent')
        close(numbers(entries['x']), ex)
        for s in states:
            close(part(entries['f'], s, ef[s].shape), ef[s])
        # the signal of each new state: how the loss moves with the cell's output, times its slope
        new, outputs, _, _ = oracle.step(record, params, carry)
        feedback, err = record['algorithm']['feedback'], oracle.error(record, outputs)
        weight = params['W_out'].real if feedback is None else numbers(feedback['array'])
        signal = err @ weight.T
        slopes = _slopes(record, new)
        corrected = 1 - a_f ** (t + 1)
        grad, bias = np.zeros((width, hidden)), np.zeros(hidden)
        for b in range(lanes):
            for n in range(hidden):
                sent = sum(signal[b, n] * slopes[s][b, n] * ef[s, b, n] for s in states)
                grad[:, n] += ex[b] * sent / corrected
                bias[n] += sent / corrected
        close(numbers(record['gradients']['W']), grad)
        close(numbers(record['gradients']['b']), bias)


def _slopes(record, new):
    """The derivative of the new output by each new state."""
    topology = record['topology']
    if topology['cell'] == 'rnn':
        return [np.ones(new['h'].shape)]
    c = topology['constants']
    u = new['V'].real - c['theta']
    if 'a' in new:
        u = u - c['beta'] * new['a'].real
    psi = oracle.spike(c, u + 1j * STEP).imag / STEP
    return [psi, -c['beta'] * psi] if 'a' in new else [psi]


@pytest.mark.parametrize('name', making.SURROGATES)
def test_a_surrogate_has_all_its_digits_far_from_the_threshold(name):
    """Against the same formula in more digits than float64 has: half of the tightest bound."""
    parameters = making.SURROGATES[name]
    u = np.linspace(-40, 40, 2001)
    found = psi({'name': name, 'parameters': parameters}, exact(u))
    true = np.array([oracle.surrogate(name, parameters, one) for one in np.longdouble(u)])
    assert np.all(np.abs(found.value - true) <= 4 * UNIT['float64'] * found.terms)


@pytest.mark.parametrize('name', making.SURROGATES)
def test_a_surrogate_is_nowhere_steeper_than_its_bound(name):
    function, names = SURROGATES[name]
    u = np.linspace(-4, 4, 8001)
    value, steep, *_ = function(u, *(making.SURROGATES[name][one] for one in names))
    rise = np.abs(np.diff(value)) / np.diff(u)
    assert np.all(rise <= 1.01 * np.maximum(steep[1:], steep[:-1]) + 1e-12)
