"""The doctor's numbers against derivatives written out by hand, and what it says."""

import dataclasses
import functools
import json
import math
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import nn, rules, verify
from braintrace.errors import OptionError
from braintrace.verify.findings import _shares, _shown
from tests import models
from tests.compare import assert_close
from tests.late import LATE
from tests.models.library import LibraryOps
from tests.models.model import B, I, N, O, squared
from tests.verify.asked import diagnosed, row_of, said
from tests.verify.expected import expected

T = 8
CASES = ['gru', 'lstm_fused', 'two_layers', 'lif_recurrent']
RNG = np.random.default_rng(0)
DATA = np.abs(RNG.standard_normal((T, I))), RNG.standard_normal((T, O))


class Net(brainstate.nn.Module):
    """A gated cell and a plain readout."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(I, N)
        self.readout = brainstate.ParamState(jnp.asarray(RNG.standard_normal((N, O))))

    def update(self, x):
        return self.cell(x) @ self.readout.value


def learner_of(rule='D_RTRL'):
    return braintrace.compile(Net(), rule, jnp.zeros(I), seed=0)


def cell_of(case):
    return functools.partial(case.model.cell, LibraryOps())


@functools.cache
def diagnosis_of(name, rule=None) -> verify.Diagnosis:
    """The diagnosis of a case under D_RTRL; all tests share it."""
    case = models.case(name, steps=T)
    return diagnosed(cell_of(case), case.xs, case.ys, case.params, dict(case.carry), rule)


def check_numbers(row, want):
    numbers = [row.cosine, row.norm_ratio, row.dropped]
    by_parameter = want.cosine, want.ratio, want.dropped
    assert_close(numbers, [of[row.path] for of in by_parameter], 1e-9, 1e-12)


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('name', CASES)
def test_the_numbers_are_those_of_the_oracle(name):
    case, got = models.case(name, steps=T), diagnosis_of(name)
    want = expected(case)
    params = dict(zip(want.cosine, jax.tree.leaves(case.params), strict=True))
    assert {row.path for row in got.rows} == set(params)
    traced = {path for path, squares in want.squares.items() if squares.any()}
    # only the op reads an LSTM's h, behind the cut, so the trace has none of it
    states = 1 if name == 'lstm_fused' else len(case.model.groups[0])
    for row in got.rows:
        assert row.shape == params[row.path].shape
        check_numbers(row, want)
        assert row.route == ('trace' if row.path in traced else 'same-step')
        size = 8 * B * states * params[row.path].size
        assert row.trace_bytes == (size if row.path in traced else 0)
    growth = {t.relation.partition('#')[0]: t for t in got.trace_growth}
    assert set(growth) == {path for path in traced if path.endswith('w')}
    for path, t in growth.items():
        own = [p for p in traced if p.rpartition('/')[0] == path.rpartition('/')[0]]
        norms = np.sqrt(sum(want.squares[p] for p in own))
        assert_close(np.array(t.norms), norms, 1e-10)
        assert t.growth == pytest.approx(norms[-1] / norms[T - 1 - 2 * (T // 4)], rel=1e-10)
        assert t.largest == pytest.approx(max(want.largest[p] for p in own), rel=1e-10)
        assert t.limit == np.finfo(np.float64).max


@pytest.mark.slow
def test_a_step_that_is_not_yet_written_into_the_trace_counts():
    got, want = diagnosis_of('two_layers', LATE), diagnosis_of('two_layers')
    for a, b in zip(got.trace_growth, want.trace_growth, strict=True):
        assert_close(np.array(a.norms), np.array(b.norms))
    cosines = [np.array([row.cosine for row in found.rows]) for found in (got, want)]
    assert_close(*cosines)


@pytest.mark.slow
def test_a_stack_loses_the_temporal_path_through_the_upper_layer():
    got = diagnosis_of('two_layers')
    lost = expected(models.case('two_layers', steps=T)).dropped_in['one/w']
    assert row_of(got, 'one/w').dropped_by_group == pytest.approx({'h1': lost[0], 'h2': lost[1]})
    text = said(got, 'The temporal path of h1 through the state of h2 is lost at etp_mm (two/w) [')
    assert 'library.py' in text and 'Dropped there of the history of the gradient: ' in text
    assert f'{100 * lost[1]:.0f} % for one/w' in text and lost[1] > 0.01
    assert text.endswith(
        'To lose less, let h2 forget sooner, let the loss see h1 directly, or take exact windows '
        "(inside='exact')."
    )


@pytest.mark.slow
def test_states_in_one_array_are_diagnosed_one_by_one():
    case = models.case('two_equal_layers', steps=T // 2)

    def stacked(p, c, x):
        output, new = cell_of(case)(p, {'h1': c['h'][0], 'h2': c['h'][1]}, x)
        return output, {'h': jnp.stack([new['h1'], new['h2']])}

    want, carry = expected(case), {'h': np.stack([case.carry['h1'], case.carry['h2']])}
    got = diagnosed(stacked, case.xs, case.ys, case.params, carry)
    for row in got.rows:
        check_numbers(row, want)
    lost = dict(zip(('h/0', 'h/1'), want.dropped_in['one/w'], strict=True))
    assert row_of(got, 'one/w').dropped_by_group == pytest.approx(lost)


@pytest.mark.slow
def test_the_unit_of_a_state_has_no_say():
    def cell_in(v_unit, r_unit):
        def cell(p, c, x):
            y = braintrace.matmul(jnp.concatenate([x, c['v'] / v_unit], -1), p['W'])
            v = 0.9 * c['v'] + v_unit * jnp.tanh(y)
            a = 0.5 * c['a'] + 0.2 * c['v'] / v_unit
            r = 0.8 * c['r'] + r_unit * braintrace.matmul(v / v_unit, p['U'])
            return r / r_unit, {'v': v, 'a': a, 'r': r}

        return cell

    rng = np.random.default_rng(3)
    first = {'v': jnp.zeros((2, N)), 'a': jnp.zeros((2, N)), 'r': jnp.zeros((2, 2))}
    params = {'W': rng.standard_normal((I + N, N)), 'U': rng.standard_normal((N, 2))}
    data = rng.standard_normal((8, 2, I)), rng.standard_normal((8, 2, 2)), params, first
    want, got = (diagnosed(cell_in(*units), *data) for units in ((1.0, 1.0), (1e-3, 1e3)))
    assert 0.1 < want.rows[1].dropped < 0.9
    for a, b in zip(got.rows, want.rows, strict=True):
        for name in ('cosine', 'norm_ratio', 'dropped', 'dropped_by_group'):
            assert getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-9)
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
    got = diagnosed(cell, jnp.ones((40, 1)), jnp.zeros((40, 1)), params, carry)
    v = r = exact = online = kept = whole = in_v = in_r = 0.0
    for _ in range(40):
        v = 0.01 * v + 1
        r = 0.99 * r + v
        in_v, in_r = in_v + r * 0.01 * kept, in_r + r * 0.99 * whole
        now = 1 + 0.01 * kept
        whole, kept = 0.99 * whole + now, now
        exact, online = exact + r * whole, online + r * now
    lost, row = in_r**2 / (in_v**2 + in_r**2), row_of(got, 'W')
    assert row.norm_ratio == pytest.approx(online / exact) and row.norm_ratio < 0.1
    assert row.dropped_by_group == pytest.approx({'v': 0, 'r': lost})
    assert got.findings[0] == (
        'Far from the gradient of BPTT, though with a trace: W (cosine 1.000, norm ratio '
        f'{row.norm_ratio:.3g}; dropped of the history of the gradient: {100 * lost:.0f} % in r).'
    )
    text = said(got, 'The temporal path of v through the state of r is lost')
    assert 'FilteredReadout' in text and "e_prop(kappa='auto')" in text


def test_shares_that_are_alike_and_groups_of_many_states_are_told_shortly():
    lost = [SimpleNamespace(path=p, dropped=0.5, dropped_by_group={'h': 0.99}) for p in 'abc']
    assert _shares(lost, ('h',)) == (
        ' Dropped there: 99 % of the history of the gradient, of each parameter.'
    )
    lost[1].dropped_by_group = {'h': 0.5}
    assert '50 to 99 % of the history of the gradient, most for' in _shares(lost, ('h',))
    assert _shown('V,a') == 'V,a' and _shown('V,a,b,c,d') == 'V and 4 more states'


class Deep(brainstate.nn.Module):
    """An embedding below a GRU and a cell without gates."""

    def __init__(self):
        super().__init__()
        self.table = brainstate.ParamState(jnp.ones((5, 4)))
        self.lower, self.upper = nn.GRUCell(4, 8), nn.VanillaRNNCell(8, 8)

    def update(self, x):
        return self.upper(self.lower(braintrace.embedding(x, self.table.value)))


@pytest.mark.slow
def test_what_is_lost_is_named_with_its_places_and_advice_that_fits():
    brainstate.random.seed(2)
    learner = braintrace.compile(Deep(), 'D_RTRL', jnp.zeros(2, int), batch_size=2)
    xs, ys = np.arange(12).reshape(6, 2) % 5, np.zeros((6, 2, 8))
    got = verify.diagnose(learner, xs, ys, squared)
    assert said(got, 'Only the current step is in the gradient of table ').endswith(
        "Take exact windows (window=K, inside='exact'), which hold the history of K steps. "
        'For a trace, keep its result in a hidden state that the other op reads.'
    )
    reset = said(got, 'Only the current step is in the gradient of lower/Wr/weight/bias (cosine ')
    assert 'lower/Wr/weight/weight (cosine ' in reset and 'reaches hidden states only' in reset
    assert reset.endswith(
        'Apply its result after the other op, as in h = tanh(op1(x) + gate * op2(h)), take exact '
        "windows (window=K, inside='exact'), which hold the history of K steps, or accept this."
    )
    mixed = said(got, 'Units of lower/h read each other at etp_mm ')
    assert '(lower/{Wz,Wr,Wh}/weight/weight) [' in mixed and mixed.count('test_diagnose.py') == 1
    assert 'most for lower/W' in mixed and 'as in MinGRUCell' in mixed
    assert len(mixed) - len(mixed.partition('[')[2].partition(']')[0]) < 330
    through = said(got, 'The temporal path of lower/h through the state of upper/h ')
    assert 'etp_mm (upper/W/weight/weight) [' in through
    assert through.endswith("or take exact windows (inside='exact').")
    assert not any('at every step' in text for text in got.findings)


def test_silent_and_saturated_units_are_counted_by_their_states():
    params = {'W': jnp.diag(jnp.array([0.0, 9.0, 1.0])), 'a': jnp.array([0.5, 0.5, 0.5])}

    def cell(p, c, x):
        h = jnp.tanh(braintrace.matmul(x, p['W']) + p['a'] * c['h'])
        return h, {'h': h, 'sum': c['sum'] + h[:, :2]}

    carry = {'h': jnp.zeros((2, 3)), 'sum': jnp.ones((2, 2))}
    got = diagnosed(cell, jnp.ones((6, 2, 3)), jnp.ones((6, 2, 3)), params, carry)
    states = {a.group: a for a in got.activity}
    assert (states['h'].silent, states['h'].saturated) == (1 / 3, 1 / 3)
    assert (states['sum'].silent, states['sum'].saturated) == (0, 0)
    assert got.silent == got.saturated == {'h': 1 / 3, 'sum': 0}


@pytest.mark.slow
def test_a_trace_that_runs_away_is_told_with_the_steps_that_are_left():
    def cell(p, c, x):
        c = {k: leak * c[k] + braintrace.matmul(x, p[k]) for k, leak in LEAKS.items()}
        return c['runs'] + c['stays'], c

    LEAKS = {'runs': 2.0, 'stays': 0.9}
    data, params = (jnp.ones((24, 1)), jnp.zeros((24, 1))), dict.fromkeys(LEAKS, jnp.ones((1, 1)))
    carry = dict.fromkeys(LEAKS, jnp.zeros(1))
    got = diagnosed(cell, *data, params, carry, loss=lambda h, y: h.sum())
    growth = {path: t for t in got.trace_growth for path in LEAKS if t.relation.startswith(path)}
    assert growth['runs'].largest == growth['runs'].norms[-1] == 2**24 - 1
    assert growth['runs'].steps_left == pytest.approx(1024 - 24, abs=0.1)
    assert growth['stays'].steps_left == math.inf
    (text,) = [text for text in got.findings if 'overflows' in text]
    assert 'overflows in about 1000 steps' in text and 'runs' in text and 'stays' not in text


@pytest.mark.slow
def test_es_d_rtrl_is_diagnosed_with_what_it_leaves_out_everywhere():
    got = verify.diagnose(learner_of(rules.es_d_rtrl(0.9)), *DATA, squared)
    assert said(got, 'ES_D_RTRL: an input factor and an output factor')
    assert row_of(got, 'cell/Wz/weight/weight').cosine < 0.999
    assert row_of(got, 'readout').cosine == pytest.approx(1)


class Forgets(type(rules.d_rtrl())):
    """D_RTRL whose trace does not last."""

    def window(self, network, trace, pending, window, keep):
        def without_d(row):
            d, *rest = window.steps.open(row)
            return jax.tree.map(jnp.zeros_like, d), *rest

        steps = window.steps._replace(open=without_d)
        return super().window(network, trace, pending, window._replace(steps=steps), keep)


def test_a_wrong_rule_is_noticed():
    """All is forgotten here: the output reads what the input was two steps ago."""

    def cell(p, c, x):
        a, b = 0.9 * c['a'] + braintrace.matmul(x, p['W']), 0.9 * c['b'] + c['a']
        late = 0.9 * c['late'] + c['b']
        return late, {'a': a, 'b': b, 'late': late}

    params, carry = {'W': jnp.ones((I, N))}, dict.fromkeys(('a', 'b', 'late'), jnp.zeros(N))
    got = diagnosed(cell, DATA[0], jnp.zeros((T, N)), params, carry, Forgets())
    (row,) = got.rows
    assert (row.history, row.cosine, row.norm_ratio) == ('whole', 0, 0)
    assert got.findings[0].startswith(
        'W should have the whole gradient, but differs from BPTT: cosine '
    )


@pytest.mark.slow
def test_the_share_is_that_of_the_window_and_stored_traces_are_read():
    units, stored = 12, jnp.bfloat16
    rng = np.random.default_rng(0)
    params = {'W': rng.standard_normal((I + units, units)) / 4, 'a': rng.uniform(0.5, 0.9, units)}

    def cell(p, h, x):
        h = p['a'] * h + jnp.tanh(braintrace.matmul(jnp.concatenate([x, h]), p['W']))
        return h, h

    rule, trained = rules.d_rtrl(trace_dtype=stored), lambda path, leaf: path[0] == 'W'
    xs = rng.standard_normal((4, I))
    data = xs, np.zeros((4, units)), params, np.zeros(units), rule
    got = diagnosed(cell, *data, steps=3, trainable=trained)
    row = row_of(got, 'W')
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
    assert growth.norms[-1] == pytest.approx(np.linalg.norm(kept), rel=1e-2)
    assert growth.limit == float(jnp.finfo(stored).max)


@pytest.mark.slow
def test_a_use_without_a_trace_and_a_plain_weight_are_told():
    def cell(p, h, x):
        h = jax.nn.sigmoid(p['leak']) * h + jnp.tanh(braintrace.matmul(x, p['W'])) + 0.1 * p['W'][0]
        return h, h

    params = {'W': jnp.ones((2, 3)) / 3, 'leak': jnp.ones(3)}
    data = jnp.ones((5, 1, 2)), jnp.ones((5, 1, 3))
    got = diagnosed(cell, *data, params, jnp.zeros((1, 3)))
    assert said(got, 'W has a trace, but not for its use in ')
    text = said(got, 'Only the current step is in the gradient of leak (cosine ')
    assert 'Apply it with a braintrace op' in text
    assert row_of(got, 'leak').dropped == 1 and 0 < row_of(got, 'W').dropped < 1


def test_complex_states_are_diagnosed_without_the_dropped_share():
    def cell(p, c, x):
        z = (0.5 + 0.6j) * c + braintrace.matmul(x, p['W'])
        return z.real, z

    params, carry = {'W': jnp.full((2, 3), 1 + 2j)}, jnp.zeros((1, 3), complex)
    got = diagnosed(cell, jnp.ones((5, 1, 2), complex), jnp.ones((5, 1, 3)), params, carry)
    (row,) = got.rows
    assert (row.cosine, row.norm_ratio, row.dropped) == (pytest.approx(1), pytest.approx(1), None)
    (text,) = got.findings[1:]
    share = 'What is dropped of the history of the gradient is not measured'
    assert text == f'{share}: a hidden state is complex.' and '?' in str(got)


def test_where_a_loop_hides_the_equations_the_share_is_unknown_and_the_rest_is_told():
    def cell(p, h, x):
        def turn(h, _):
            return 0.9 * h + 0.1 * jnp.tanh(braintrace.matmul(x, p['W'])), None

        h = jax.lax.scan(turn, h, None, length=4)[0]
        return h, h

    data = jnp.ones((5, 1, 2)), jnp.ones((5, 1, 3)), {'W': jnp.ones((2, 3))}, jnp.zeros((1, 3))
    got = diagnosed(cell, *data, policy=braintrace.Policy(unroll=0))
    (row,) = got.rows
    assert row.dropped is None and row.cosine == pytest.approx(1)
    assert any('not measured: the step has a loop' in text for text in got.findings)
    assert '?' in str(got)


def snapshot(learner):
    states = {**learner.model.states(), 'trace': learner.etrace}
    return jax.tree.map(np.asarray, {str(k): s.value for k, s in states.items()})


@pytest.mark.slow
def test_it_starts_from_the_present_states_and_leaves_learner_and_model_as_they_are():
    learner, (xs, ys) = learner_of(), DATA
    fresh = verify.diagnose(learner, xs, ys, squared)
    learner.etrace_evolve(xs)
    before = snapshot(learner)
    first = verify.diagnose(learner, xs, ys, squared)
    after = snapshot(learner)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(after)))
    assert np.asarray(before['trace']['t']).max() == T
    assert first.rows != fresh.rows, 'it starts from the present states'
    learner.etrace_grad(xs, ys, step_fn=lambda x, y: squared(learner(x), y))


@pytest.mark.slow
def test_a_diagnosis_prints_and_is_plain_data():
    got = diagnosis_of('two_layers')
    shown = str(got)
    assert shown.startswith(f'D_RTRL over {T} step(s): ') and repr(got) == shown
    for word in ('norm ratio', 'steps to overflow', 'saturated', '- The temporal path of h1'):
        assert word in shown
    plain = json.loads(json.dumps(got.as_dict(), allow_nan=False))
    assert plain['rows'][0]['path'] == 'one/b' and plain['trace_growth'][0]['steps_left'] is None
    assert plain['steps'] == T and set(plain) == {f.name for f in dataclasses.fields(got)}
    assert got.ms_per_step > 0 and got.bptt_ms_per_step > 0


@pytest.mark.slow
def test_a_notebook_shows_the_same_as_tables():
    got = diagnosis_of('two_layers')
    shown = dataclasses.replace(got, findings=('a < b & c',))._repr_html_()
    tree = ElementTree.fromstring(shown.replace('<details open>', '<details>'))
    tables = tree.findall('.//table')
    assert 'a &lt; b &amp; c' in shown and len(tables) == 3
    for table, rows in zip(tables, (got.rows, got.trace_growth, got.activity), strict=True):
        assert len(table.findall('tbody/tr')) == len(rows)
    cells = [cell.text for cell in tables[0].findall('tbody/tr/td')]
    row = got.rows[0]
    assert {'one/b', f'{row.cosine:.4f}', f'{100 * row.dropped:.1f} %'} <= {*cells}


@pytest.mark.slow
def test_the_figure_has_a_panel_for_each_number(monkeypatch):
    pytest.importorskip('matplotlib')
    got = diagnosis_of('two_layers')
    axes = got.figure().axes
    assert len(axes) == 4 and len(axes[3].lines) == len(got.trace_growth)
    bars = [bar.get_width() for bar in axes[0].patches]
    assert sorted(bars) == sorted(row.cosine for row in got.rows)
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    with pytest.raises(OptionError, match='pip install matplotlib'):
        got.figure()


# -- under every kind of learning rule -------------------------------------------------------------


def leaky_cell(params, h, x):
    h = 0.6 * h + 0.4 * jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['w']))
    return h, h


def with_readout(params, h, x):
    h, _ = leaky_cell(params, h, x)
    return braintrace.matmul(h, params['out']), h


def told(rule, cell=leaky_cell):
    rng = np.random.default_rng(0)
    params = {'w': rng.standard_normal((5, 3)), 'out': rng.standard_normal((3, 3))}
    xs, ys = rng.standard_normal((2, 4, 2, 3))
    found = diagnosed(cell, xs[..., :2], ys, params, np.zeros((2, 3)), rule)
    return '\n'.join(found.findings), row_of(found, 'w')


def test_of_a_rule_without_a_trace_all_history_is_dropped():
    found, row = told(rules.same_step())
    assert row.dropped == 1 and 'there is no trace' in found


@pytest.mark.slow
@pytest.mark.parametrize('rule', [rules.uoro(), rules.signs('all')], ids=['uoro', 'signs'])
def test_of_a_random_rule_its_estimate_is_told_and_no_defect(rule):
    found, _ = told(rule)
    assert found.count('a random estimate') == 1 and 'The lowest cosine' in found
    assert 'should have the whole gradient' not in found


@pytest.mark.slow
def test_with_feedback_the_weights_of_the_oracle_are_told():
    found, row = told(rules.rflo(), with_readout)
    assert row.dropped is None and 'BPTT (its error goes back through W) is' in found


@pytest.mark.slow
def test_what_a_rule_drops_is_its_own():
    assert told(rules.rtrl())[1].dropped == 0
    found, row = told(rules.d_rtrl(scope='own'))
    assert row.dropped is None and 'is not measured: D_RTRL follows paths between' in found
    cut, whole = (told(rules.d_rtrl(credit=c))[1].dropped for c in ('cut', 'whole'))
    assert 0 < whole < 1 and abs(whole - cut) > 1e-3


class Gated(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = (nn.GRUCell(2, 4), nn.LeakyRateReadout(4, 3, tau=5.0))

    def update(self, x):
        return self.out(self.cell(x))


@pytest.mark.parametrize(
    'rule', [rules.rtrl(), rules.uoro(), rules.signs('all'), rules.d_rtrl(scope='own')]
)
def test_the_report_of_a_graph_shows_it_as_the_rule_sees_it(rule):
    model, x = Gated(), jnp.zeros((3, 2))
    brainstate.nn.init_all_states(model, batch_size=3)
    graph = braintrace.compile_etrace_graph(model, x)
    wanted, seen = braintrace.report(graph, rule), rule.scoped(graph)
    assert braintrace.report(seen, rule).as_dict() == wanted.as_dict()
    other = rules.d_rtrl()
    assert braintrace.report(seen, other).as_dict() == braintrace.report(graph, other).as_dict()
    trace = jax.eval_shape(lambda: rule.init(seen))
    relations = [trace[rel.key] for rel in seen.hidden_param_op_relations]
    assert wanted.memory == sum(e.size * e.dtype.itemsize for e in jax.tree.leaves(relations))


def test_parameters_that_no_loss_can_move_are_named():
    def cell(params, v, x):
        v = 0.9 * v + braintrace.matmul(x, params['w'])
        return jnp.where(v > 0.5, 1.0, 0.0) + params['b'], v

    params, v = {'w': jnp.ones((2, 3)), 'b': jnp.zeros(3)}, jnp.zeros((4, 3))
    xs = jnp.ones((6, 4, 2))
    loss = lambda y, target: jnp.mean(y * target)
    found = diagnosed(cell, xs, xs[..., :1], params, v, loss=loss)
    assert any('by BPTT too: w. On' in text for text in found.findings)
