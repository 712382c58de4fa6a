"""The doctor's numbers against derivatives written out by hand, and what it says."""

import dataclasses
import functools
import json
import math
from xml.etree import ElementTree

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, nn, rules, verify
from braintrace.errors import BraintraceWarning, OptionError
from tests.models.ops import _spike_jvp as spike
from tests.tiers import slow
from tests.verify import by_hand
from tests.verify.by_hand import NETWORKS, I, N, T


def squared(output, target):
    return 0.5 * jnp.sum((output - target) ** 2)


class Net(brainstate.nn.Module):
    """A cell of the library with the numbers of a network, and a plain readout."""

    def __init__(self, cell, gates, params):
        super().__init__()
        self.cell, self.readout = cell, brainstate.ParamState(params['out'])
        for name, (w, b) in gates.items():
            getattr(cell, name).weight.value = {
                'weight': jnp.asarray(params[w]),
                'bias': jnp.asarray(params[b]),
            }

    def update(self, x):
        return self.cell(x) @ self.readout.value


def stack_cell(p, c, x):
    h1 = 0.8 * c['h1'] + jnp.tanh(braintrace.matmul(jnp.concatenate([x, c['h1']]), p['one']))
    h2 = 0.9 * c['h2'] + jnp.tanh(braintrace.matmul(jnp.concatenate([h1, c['h2']]), p['two']))
    return h2 @ p['out'], {'h1': h1, 'h2': h2}


def lif_cell(p, v, x):
    z = spike(v - 0.5)
    v = 0.8 * v - z + braintrace.matmul(jnp.concatenate([x, z]), p['W'])
    return spike(v - 0.5) @ p['out'], v


GRU_PATHS = {
    k + g: f'cell/W{g}/weight/{name}' for g in 'zrh' for k, name in (('W', 'weight'), ('b', 'bias'))
}
CELLS = {
    'gru': (
        nn.GRUCell,
        {f'W{g}': (f'W{g}', f'b{g}') for g in 'zrh'},
        GRU_PATHS | {'out': 'readout'},
    ),
    'lstm': (
        nn.LSTMCell,
        {'W': ('W', 'b')},
        {'W': 'cell/W/weight/weight', 'b': 'cell/W/weight/bias', 'out': 'readout'},
    ),
}
FIRST = {
    'stack': (stack_cell, {'h1': np.zeros(N), 'h2': np.zeros(N)}),
    'lif': (lif_cell, np.zeros(N)),
}


def learner_of(name, rule='D_RTRL'):
    cell, gates, _ = CELLS[name]
    return braintrace.compile(Net(cell(I, N), gates, NETWORKS[name].params), rule, jnp.zeros(I))


@functools.cache
def diagnosis_of(name, **options) -> tuple[verify.Diagnosis, dict[str, str]]:
    """The diagnosis of a network under D_RTRL with these options, and the paths of its
    parameters; all tests share it.
    """
    net, (xs, ys) = NETWORKS[name], by_hand.data()
    if name in CELLS:
        return verify.diagnose(learner_of(name, rules.d_rtrl(**options)), xs, ys, squared), CELLS[
            name
        ][2]
    cell, carry = FIRST[name]
    online = functional.online(cell, rules.d_rtrl(**options))
    return verify.diagnose(online, xs, ys, squared, params=net.params, carry=carry), {
        k: k for k in net.params
    }


@pytest.mark.tier(quick=0, one_in=4)
@pytest.mark.parametrize('name', NETWORKS)
def test_the_numbers_are_those_computed_by_hand(name):
    net, want = NETWORKS[name], by_hand.expected(NETWORKS[name])
    got, paths = diagnosis_of(name)
    rows = {row.path: row for row in got.rows}
    assert set(rows) == set(paths.values())
    for k, path in paths.items():
        row = rows[path]
        assert row.shape == net.params[k].shape
        np.testing.assert_allclose(
            [row.cosine, row.norm_ratio, row.dropped],
            [want.cosine[k], want.ratio[k], want.dropped[k]],
            rtol=1e-9,
            atol=1e-12,
            err_msg=k,
        )
        traced = [key for key, ks in net.relations.items() if k in ks]
        states = 2 if name == 'lstm' else 1
        assert row.route == ('trace' if traced else 'same-step')
        assert row.trace_bytes == (8 * states * net.params[k].size if traced else 0)
    growth = {t.relation.partition('#')[0]: t for t in got.trace_growth}
    assert set(growth) == {paths[key] for key in net.relations}
    for key, norms in want.norms.items():
        t = growth[paths[key]]
        np.testing.assert_allclose(t.norms, norms, rtol=1e-10)
        np.testing.assert_allclose(
            [t.growth, t.largest],
            [norms[-1] / norms[T - 1 - 2 * (T // 4)], want.largest[key]],
            rtol=1e-10,
        )
        assert t.limit == np.finfo(np.float64).max


@pytest.mark.slow
@pytest.mark.parametrize('name', ['stack', pytest.param('lstm', marks=slow)])
def test_steps_that_are_not_yet_written_into_the_trace_count(name):
    got, (want, _) = diagnosis_of(name, write_every=5)[0], diagnosis_of(name)
    for a, b in zip(got.trace_growth, want.trace_growth, strict=True):
        np.testing.assert_allclose(a.norms, b.norms, rtol=1e-12)
    assert [row.cosine for row in got.rows] == pytest.approx(
        [row.cosine for row in want.rows], rel=1e-12
    )


@pytest.mark.slow
def test_a_stack_loses_the_temporal_path_through_the_upper_layer():
    got, _ = diagnosis_of('stack')
    rows = {row.path: row for row in got.rows}
    lost = by_hand.expected(NETWORKS['stack']).dropped_in['one']
    assert rows['one'].dropped_by_group == pytest.approx({'h1': lost[0], 'h2': lost[1]})
    (said,) = [text for text in got.findings if 'through the state of' in text]
    assert said.startswith(
        'The temporal path of h1 through the state of h2 is lost at etp_mv (two) ['
    )
    share = f'Dropped there of the history of the gradient: {100 * lost[1]:.0f} % for one.'
    assert 'test_diagnose.py' in said and share in said
    assert said.endswith(
        'To lose less, let h2 forget sooner, let the loss see h1 directly, or take exact windows '
        "(inside='exact')."
    )
    assert lost[1] > 0.1


@pytest.mark.slow
def test_states_in_one_array_are_diagnosed_one_by_one():
    def stacked(p, c, x):
        output, new = stack_cell(p, {'h1': c['h'][0], 'h2': c['h'][1]}, x)
        return output, {'h': jnp.stack([new['h1'], new['h2']])}

    net, want = NETWORKS['stack'], by_hand.expected(NETWORKS['stack'])
    online = functional.online(stacked, rules.d_rtrl())
    got = verify.diagnose(
        online, *by_hand.data(), squared, params=net.params, carry={'h': np.zeros((2, N))}
    )
    for row in got.rows:
        np.testing.assert_allclose(
            [row.cosine, row.norm_ratio, row.dropped],
            [d[row.path] for d in (want.cosine, want.ratio, want.dropped)],
            rtol=1e-9,
            atol=1e-12,
        )
    lost = dict(zip(('h/0', 'h/1'), want.dropped_in['one'], strict=True))
    assert got.rows[[row.path for row in got.rows].index('one')].dropped_by_group == pytest.approx(
        lost
    )


@pytest.mark.slow
def test_what_a_gru_loses_is_named_with_its_places():
    got, _ = diagnosis_of('gru')
    (reset,) = [
        text
        for text in got.findings
        if text.startswith('Only the current step is in the gradient of ')
    ]
    (mixed,) = [text for text in got.findings if text.startswith('Units of cell/h read each other')]
    assert (
        'cell/Wr/weight/bias (cosine ' in reset
        and 'cell/Wr/weight/weight (cosine ' in reset
        and 'reaches hidden states only' in reset
    )
    assert (
        'read each other at etp_mv (cell/{Wz,Wr,Wh}/weight/weight) [' in mixed
        and mixed.count('test_diagnose.py') == 1
    )
    assert 'as in MinGRUCell' in mixed
    assert reset.endswith(
        'Apply its result behind the other op, as in h = tanh(op1(x) + gate * op2(h)), take exact '
        "windows (window=K, inside='exact'), which hold the history of K steps, or accept this."
    )


@pytest.mark.slow
@pytest.mark.parametrize('scale', [1e-3, pytest.param(1e3, marks=slow)])
def test_the_unit_of_a_state_has_no_say(scale):
    def cell_in(unit):
        def cell(p, c, x):
            v = 0.9 * c['v'] + unit * jnp.tanh(
                braintrace.matmul(jnp.concatenate([x, c['v'] / unit], -1), p['W'])
            )
            a = 0.5 * c['a'] + 0.2 * c['v'] / unit
            r = 0.8 * c['r'] + braintrace.matmul(v / unit, p['U'])
            return r, {'v': v, 'a': a, 'r': r}

        return cell

    rng = np.random.default_rng(3)
    first = {'v': jnp.zeros((2, N)), 'a': jnp.zeros((2, N)), 'r': jnp.zeros((2, 2))}
    params = {'W': rng.standard_normal((I + N, N)), 'U': rng.standard_normal((N, 2))}
    data = rng.standard_normal((8, 2, I)), rng.standard_normal((8, 2, 2)), squared
    want, got = (
        verify.diagnose(
            functional.online(cell_in(unit), rules.d_rtrl()), *data, params=params, carry=first
        )
        for unit in (1.0, scale)
    )
    assert 0.1 < want.rows[1].dropped < 0.9
    for a, b in zip(got.rows, want.rows, strict=True):
        np.testing.assert_allclose(
            [a.cosine, a.norm_ratio, a.dropped, *a.dropped_by_group.values()],
            [b.cosine, b.norm_ratio, b.dropped, *b.dropped_by_group.values()],
            rtol=1e-9,
        )
    assert got.silent == want.silent


@pytest.mark.slow
def test_a_traced_parameter_whose_gradient_is_far_off_is_told_with_where_it_loses():
    """``v = a v + W x`` and ``r = 0.99 r + U v``: v forgets at once, and most of what W does stays
    in r.
    """

    def cell(p, c, x):
        v = 0.01 * c['v'] + braintrace.matmul(x, p['W'])
        r = 0.99 * c['r'] + braintrace.matmul(v, p['U'])
        return r, {'v': v, 'r': r}

    params = {'W': jnp.ones((1, 1)), 'U': jnp.ones((1, 1))}
    carry = {'v': jnp.zeros(1), 'r': jnp.zeros(1)}
    got = verify.diagnose(
        functional.online(cell, rules.d_rtrl()),
        jnp.ones((40, 1)),
        jnp.zeros((40, 1)),
        squared,
        params=params,
        carry=carry,
    )
    v, r, exact, online, kept, whole, in_v, in_r = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for _ in range(40):
        v = 0.01 * v + 1
        r = 0.99 * r + v
        in_v, in_r = in_v + r * 0.01 * kept, in_r + r * 0.99 * whole
        now = 1 + 0.01 * kept
        whole, kept = 0.99 * whole + now, now
        exact, online = exact + r * whole, online + r * now
    in_v, in_r = in_v**2, in_r**2
    row = {row.path: row for row in got.rows}['W']
    assert row.norm_ratio == pytest.approx(online / exact) and row.norm_ratio < 0.1
    assert row.dropped_by_group == pytest.approx({'v': 0, 'r': in_r / (in_v + in_r)})
    assert got.findings[0] == (
        'Far from the gradient of BPTT, though with a trace: W (cosine 1.000, norm ratio '
        f'{row.norm_ratio:.3g}; dropped of the history of the gradient: '
        f'{100 * in_r / (in_v + in_r):.0f} % in r).'
    )


class Filtered(brainstate.nn.Module):
    """A cell, weights, and a leaky filter behind these."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.MinGRUCell(I, 16), nn.Linear(16, 2)

    def init_state(self, batch_size=None, **kwargs):
        self.r = brainstate.HiddenState(jnp.zeros((batch_size, 2)))

    def update(self, x):
        self.r.value = 0.95 * self.r.value + self.out(self.cell(x))
        return self.r.value


@pytest.mark.slow
def test_the_share_of_a_small_filter_that_the_loss_reads_is_large():
    """Two numbers of eighteen hold nearly all that the loss reads of the past."""
    learner = braintrace.compile(Filtered(), 'D_RTRL', jnp.zeros((2, I)), batch_size=2, seed=0)
    xs = np.random.default_rng(0).standard_normal((20, 2, I))
    got = verify.diagnose(learner, xs, np.ones((20, 2, 2)), squared)
    row = {row.path: row for row in got.rows}['cell/W/weight/weight']
    assert row.norm_ratio < 0.4 and row.dropped_by_group['r'] == row.dropped > 0.8
    lost = 'The temporal path of cell/h through the state of r is lost'
    (said,) = [text for text in got.findings if lost in text]
    assert f'{100 * row.dropped:.0f} %' in said and 'of the history of the gradient' in said


class Deep(brainstate.nn.Module):
    """An embedding below two GRUs."""

    def __init__(self):
        super().__init__()
        self.table = brainstate.ParamState(jnp.ones((5, 4)))
        self.lower, self.upper = nn.GRUCell(4, 8), nn.GRUCell(8, 8)

    def update(self, x):
        return self.upper(self.lower(braintrace.embedding(x, self.table.value)))


@pytest.mark.slow
def test_advice_is_short_and_fits_what_was_found():
    learner = braintrace.compile(Deep(), 'D_RTRL', jnp.zeros(2, int), batch_size=2)
    found = verify.diagnose(
        learner, np.arange(12).reshape(6, 2) % 5, np.zeros((6, 2, 8)), squared
    ).findings
    (table,) = [
        text
        for text in found
        if text.startswith('Only the current step is in the gradient of table ')
    ]
    assert table.endswith(
        "Take exact windows (window=K, inside='exact'), which hold the history of K steps. "
        'For a trace, keep its result in a hidden state that the other op reads.'
    )
    (through,) = [
        text
        for text in found
        if text.startswith('The temporal path of lower/h through the state of upper/h ')
    ]
    assert (
        through.count('.py') == 1
        and 'etp_mm (upper/{Wz,Wr,Wh}/weight/weight) [' in through
        and 'most for lower/W' in through
    )
    assert through.endswith("or take exact windows (inside='exact').")
    assert len(through) - len(through.partition('[')[2].partition(']')[0]) < 330
    assert not any('at every step' in text for text in found)


@pytest.mark.slow
def test_groups_of_several_states_are_told_in_the_plural_and_spiking_ones_without_a_gru():
    def cell(p, c, x):
        v = 0.9 * c['v'] - c['z'] + braintrace.matmul(jnp.concatenate([x, c['z']], -1), p['W'])
        a = 0.9 * c['a'] + c['z']
        z = spike(v - 1 - 0.1 * a)
        r = 0.9 * c['r'] + braintrace.matmul(z, p['U'])
        return r, {'v': v, 'a': a, 'z': z, 'r': r, 'u': 0.9 * c['u'] + braintrace.matmul(r, p['L'])}

    params = {'W': jnp.ones((I + N, N)), 'U': jnp.ones((N, 2)), 'L': jnp.ones((2, 1))}
    carry = {
        'v': jnp.zeros((1, N)),
        'a': jnp.zeros((1, N)),
        'z': jnp.zeros((1, N)),
        'r': jnp.zeros((1, 2)),
        'u': jnp.zeros((1, 1)),
    }
    found = verify.diagnose(
        functional.online(cell, rules.d_rtrl()),
        jnp.ones((6, 1, I)),
        jnp.zeros((6, 1, 2)),
        squared,
        params=params,
        carry=carry,
    ).findings
    (mixed,) = [
        text for text in found if text.startswith('Units of a,v read each other at etp_mm (W) [')
    ]
    assert mixed.endswith('let each unit read only itself from step to step.')
    paths = [
        text for text in found if text.startswith('The temporal path of a,v through the state')
    ]
    assert paths and all(
        ('the states of r and u is' in text) == (' r and u ' in text) for text in paths
    )


@pytest.mark.slow
def test_silent_and_saturated_neurons_are_counted_by_their_spikes():
    got, _ = diagnosis_of('lif')
    rates = (by_hand.expected(NETWORKS['lif']).hidden[:-1] > 0.5).mean(0)
    assert rates[0] == 0 and rates[1] > 0.5
    (active,) = got.activity
    assert (active.shown_by, active.units, active.silent, active.saturated) == (
        'spikes',
        N,
        np.mean(rates == 0),
        np.mean(rates > 0.5),
    )
    assert got.silent == {active.group: active.silent} and got.saturated == {
        active.group: active.saturated
    }
    assert any('are silent' in text for text in got.findings)


def test_silent_and_saturated_units_are_counted_by_their_states():
    params = {'W': jnp.diag(jnp.array([0.0, 9.0, 1.0])), 'a': jnp.array([0.5, 0.5, 0.5])}

    def cell(p, c, x):
        h = jnp.tanh(braintrace.matmul(x, p['W']) + p['a'] * c['h'])
        return h, {'h': h, 'sum': c['sum'] + h[:, :2]}

    online = functional.online(cell, rules.d_rtrl())
    carry = {'h': jnp.zeros((2, 3)), 'sum': jnp.ones((2, 2))}
    with pytest.warns(BraintraceWarning):
        got = verify.diagnose(
            online, jnp.ones((6, 2, 3)), jnp.ones((6, 2, 3)), squared, params=params, carry=carry
        )
    states = {a.group: a for a in got.activity}
    assert (states['h'].silent, states['h'].saturated) == (1 / 3, 1 / 3)
    assert (states['sum'].silent, states['sum'].saturated) == (0, 0)


@pytest.mark.slow
def test_a_trace_that_runs_away_is_told_with_the_steps_that_are_left():
    def cell(p, h, x):
        h = 2.0 * h + braintrace.matmul(x, p['W'])
        return h, h

    online = functional.online(cell, rules.d_rtrl())
    params = {'W': jnp.ones((1, 1))}
    args = jnp.ones((24, 1)), jnp.zeros((24, 1)), lambda h, y: h.sum()
    got = verify.diagnose(online, *args, params=params, carry=jnp.zeros(1))
    (growth,) = got.trace_growth
    assert growth.largest == growth.norms[-1] == 2**24 - 1
    assert growth.steps_left == pytest.approx(1024 - 24, abs=0.1)
    assert any('overflows in about 1000 steps' in text for text in got.findings)
    leaky = verify.diagnose(
        functional.online(
            lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p['W'])), rules.d_rtrl()
        ),
        *args,
        params=params,
        carry=jnp.zeros(1),
    )
    assert leaky.trace_growth[0].steps_left == math.inf and not any(
        'overflows' in text for text in leaky.findings
    )


@pytest.mark.slow
def test_es_d_rtrl_is_diagnosed_with_what_it_leaves_out_everywhere():
    xs, ys = by_hand.data()
    got = verify.diagnose(learner_of('gru', rules.es_d_rtrl(0.9)), xs, ys, squared)
    assert any(
        text.startswith('ES_D_RTRL: an input factor and an output factor') for text in got.findings
    )
    by_path = {row.path: row for row in got.rows}
    assert by_path['cell/Wz/weight/weight'].cosine < 0.999 and by_path[
        'readout'
    ].cosine == pytest.approx(1)


class Forgets(type(rules.d_rtrl())):
    """D_RTRL whose trace does not last."""

    def window(self, network, trace, pending, window, keep):
        def without_d(row):
            d, *rest = window.steps.open(row)
            return jax.tree.map(jnp.zeros_like, d), *rest

        steps = window.steps._replace(open=without_d)
        return super().window(network, trace, pending, window._replace(steps=steps), keep)


def test_a_wrong_rule_is_noticed():
    def cell(p, h, x):
        h = 0.9 * h + braintrace.matmul(x, p['W'])
        return h, h

    online, xs = functional.online(cell, Forgets()), by_hand.data()[0]
    got = verify.diagnose(
        online, xs, jnp.zeros((T, N)), squared, params={'W': jnp.ones((I, N))}, carry=jnp.zeros(N)
    )
    assert got.rows[0].history == 'whole' and got.rows[0].norm_ratio < 0.5
    assert got.findings[0].startswith(
        'W should have the whole gradient, but differs from BPTT: cosine '
    )


@pytest.mark.slow
@pytest.mark.parametrize('dtype', [None, jnp.bfloat16])
def test_the_share_is_that_of_the_window_and_stored_traces_are_read(dtype):
    units = 12
    rng = np.random.default_rng(0)
    params = {'W': rng.standard_normal((I + units, units)) / 4, 'a': rng.uniform(0.5, 0.9, units)}

    def cell(p, h, x):
        h = p['a'] * h + jnp.tanh(braintrace.matmul(jnp.concatenate([x, h]), p['W']))
        return h, h

    online = functional.online(
        cell, rules.d_rtrl(trace_dtype=dtype), trainable=lambda path, leaf: path[0] == 'W'
    )
    xs = rng.standard_normal((4, I))
    got = verify.diagnose(
        online, xs, np.zeros((4, units)), squared, params=params, carry=np.zeros(units), steps=3
    )
    row = {row.path: row for row in got.rows}['W']
    assert not any(text.startswith('a ') for text in got.findings)  # frozen
    whole, kept = np.zeros((units, I + units, units)), np.zeros((I + units, units))
    h, eye = np.zeros(units), np.eye(units)
    read, read_kept = 0, 0
    for x in xs[:3]:
        z = np.concatenate([x, h])
        a = np.tanh(z @ params['W'])
        h = params['a'] * h + a
        A = np.diag(params['a']) + (1 - a**2)[:, None] * params['W'][I:].T
        read, read_kept = read + np.tensordot(h @ A, whole, 1), read_kept + h * params['a'] * kept
        whole = np.tensordot(A, whole, 1) + z[:, None] * (eye * (1 - a**2))[:, None, :]
        kept = params['a'] * kept + np.outer(z, 1 - a**2)
    lost, held = ((read - read_kept) ** 2).sum(), (read_kept**2).sum()
    assert row.dropped == pytest.approx(lost / (lost + held))
    (growth,) = got.trace_growth
    assert growth.norms[-1] == pytest.approx(
        np.linalg.norm(kept), rel=1e-12 if dtype is None else 1e-2
    )
    assert growth.limit == (
        np.finfo(np.float64).max if dtype is None else float(jnp.finfo(jnp.bfloat16).max)
    )


@pytest.mark.slow
def test_a_use_without_a_trace_and_a_plain_weight_are_told():
    def cell(p, h, x):
        h = jax.nn.sigmoid(p['leak']) * h + jnp.tanh(braintrace.matmul(x, p['W'])) + 0.1 * p['W'][0]
        return h, h

    online = functional.online(cell, rules.d_rtrl())
    params = {'W': jnp.ones((2, 3)) / 3, 'leak': jnp.ones(3)}
    with pytest.warns(BraintraceWarning):
        got = verify.diagnose(
            online,
            *(jnp.ones((5, 1, n)) for n in (2, 3)),
            squared,
            params=params,
            carry=jnp.zeros((1, 3)),
        )
    assert any(text.startswith('W has a trace, but not for its use in ') for text in got.findings)
    (said,) = [
        text
        for text in got.findings
        if text.startswith('Only the current step is in the gradient of leak (cosine ')
    ]
    assert 'Apply it with a braintrace op' in said
    rows = {row.path: row for row in got.rows}
    assert rows['leak'].dropped == 1 and 0 < rows['W'].dropped < 1


def test_complex_states_are_diagnosed_without_the_dropped_share():
    def cell(p, c, x):
        z = (0.5 + 0.6j) * c + braintrace.matmul(x, p['W'])
        return z.real, z

    online = functional.online(cell, rules.d_rtrl())
    params, carry = {'W': jnp.full((2, 3), 1 + 2j)}, jnp.zeros((1, 3), complex)
    got = verify.diagnose(
        online,
        jnp.ones((5, 1, 2), complex),
        jnp.ones((5, 1, 3)),
        squared,
        params=params,
        carry=carry,
    )
    (row,) = got.rows
    assert (row.cosine, row.norm_ratio, row.dropped) == (pytest.approx(1), pytest.approx(1), None)
    (said,) = got.findings[1:]
    share = 'What is dropped of the history of the gradient is not measured'
    assert said == f'{share}: a hidden state is complex.' and '?' in str(got)


def test_where_a_loop_hides_the_equations_the_share_is_unknown_and_the_rest_is_told():
    def cell(p, h, x):
        def turn(h, _):
            return 0.9 * h + 0.1 * jnp.tanh(braintrace.matmul(x, p['W'])), None

        h = jax.lax.scan(turn, h, None, length=4)[0]
        return h, h

    online = functional.online(cell, rules.d_rtrl(), policy=braintrace.Policy(unroll=0))
    params, carry = {'W': jnp.ones((2, 3))}, jnp.zeros((1, 3))
    got = verify.diagnose(
        online, jnp.ones((5, 1, 2)), jnp.ones((5, 1, 3)), squared, params=params, carry=carry
    )
    (row,) = got.rows
    assert row.dropped is None and row.cosine == pytest.approx(1)
    assert any(
        'is not measured: the step has a loop' in text for text in got.findings
    ) and '?' in str(got)


def snapshot(learner):
    states = {**learner.model.states(), 'trace': learner.etrace}
    return jax.tree.map(np.asarray, {str(k): s.value for k, s in states.items()})


@pytest.mark.slow
def test_it_starts_from_the_present_states_and_leaves_learner_and_model_as_they_are():
    learner, (xs, ys) = learner_of('gru'), by_hand.data()
    learner.etrace_evolve(xs)
    before = snapshot(learner)
    first = verify.diagnose(learner, xs, ys, squared)
    after = snapshot(learner)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert all(
        np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after))
    )
    assert np.asarray(before['trace']['t']).max() == T
    assert verify.diagnose(learner, xs, ys, squared).rows == first.rows
    assert first.rows != diagnosis_of('gru')[0].rows, 'it starts from the present states'
    learner.etrace_grad(xs, ys, step_fn=lambda x, y: squared(learner(x), y))


@pytest.mark.slow
def test_a_diagnosis_prints_and_is_plain_data():
    got, _ = diagnosis_of('stack')
    shown = str(got)
    assert shown.startswith(f'D_RTRL over {T} step(s): ') and repr(got) == shown
    assert all(
        word in shown
        for word in ('norm ratio', 'steps to overflow', 'saturated', '- The temporal path of h1')
    )
    plain = json.loads(json.dumps(got.as_dict(), allow_nan=False))
    assert plain['rows'][0]['path'] == 'one' and plain['trace_growth'][0]['steps_left'] is None
    assert plain['steps'] == T and set(plain) == {f.name for f in dataclasses.fields(got)}
    assert got.ms_per_step > 0 and got.bptt_ms_per_step > 0


@pytest.mark.slow
def test_a_notebook_shows_the_same_as_tables():
    got, _ = diagnosis_of('stack')
    shown = dataclasses.replace(got, findings=('a < b & c',))._repr_html_()
    tables = ElementTree.fromstring(shown.replace('<details open>', '<details>')).findall(
        './/table'
    )
    assert 'a &lt; b &amp; c' in shown and len(tables) == 3
    for table, rows in zip(tables, (got.rows, got.trace_growth, got.activity), strict=True):
        assert len(table.findall('tbody/tr')) == len(rows)
    cells = [cell.text for cell in tables[0].findall('tbody/tr/td')]
    assert (
        'one' in cells
        and f'{got.rows[0].cosine:.4f}' in cells
        and f'{100 * got.rows[0].dropped:.1f} %' in cells
    )


@pytest.mark.slow
def test_the_figure_has_a_panel_for_each_number(monkeypatch):
    pytest.importorskip('matplotlib')
    got, _ = diagnosis_of('stack')
    axes = got.figure().axes
    assert len(axes) == 4 and len(axes[3].lines) == len(got.trace_growth)
    assert sorted(bar.get_width() for bar in axes[0].patches) == sorted(
        row.cosine for row in got.rows
    )
    monkeypatch.setitem(__import__('sys').modules, 'matplotlib.figure', None)
    with pytest.raises(OptionError, match='pip install matplotlib'):
        got.figure()
