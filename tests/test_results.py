"""The leaderboard and the results train what they say, and their pages say what the records say."""

import json
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import braintrace
from braintrace import rules, tasks
from tests.benches import modules
from tests.compare import assert_close
from tests.functional.plain import drawn

ROOT = Path(__file__).resolve().parent.parent
MODULES = ('runner', 'rules', 'rules_page', 'results', 'results_page', 'acting')


@pytest.fixture(scope='module')
def board():
    """The modules of benchmarks/, which import one another by their plain names."""
    with modules(*MODULES) as found:
        yield found


# -- the leaderboard -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_row_is_trained_scored_and_compared_with_bptt(board):
    setting = board.rules.Setting(tasks.adding(4), 'GRU 16', 4, 3)
    effort = board.rules.Effort(rates=(1e-3, 1e-2), seeds=(1, 2), turns=1)
    found = board.rules.measured(setting, board.rules.NAMED['D_RTRL'], effort)
    assert found['rate'] in (1e-3, 1e-2) and set(found['validation']) == {'0.001', '0.01'}
    assert np.all(np.isfinite(found['scores'])) and len(set(found['scores'])) == 2
    assert 0.5 < found['cosine'][0] < 1 and found['time'] > 0
    assert found['bytes'] == 4 * (2 + 16 + 1) * 16 * 2 * 4  # batch, rows, units, two gates, float32
    refused = board.rules.Method('refused', lambda: rules.es_d_rtrl(2.0))
    assert 'OptionError' in board.rules.measured(setting, refused, effort)['refused']


@pytest.mark.slow
def test_a_stream_is_learnt_on_the_way(board):
    setting = board.rules.Setting(tasks.shifting_sine(64, shift_every=32), 'LRU 64', 1, 1)
    study = board.rules.Study(setting, board.rules.NAMED['exact windows of 8'])
    starts = jax.tree.map(lambda p: p[None], study.initial(0))
    scores, params = board.rules.judged(study, study, starts, (1e-2,), (0,), 'test')
    assert np.isfinite(scores).all()
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max() > 0, params, starts)
    assert all(jax.tree.leaves(moved))


def test_cut_reverse_mode_stops_at_its_borders(board):
    def cell(params, carry, x):
        carry = params * carry + x
        return carry, carry

    state = types.SimpleNamespace(carry=np.float32(0), replace=lambda carry: carry)
    xs, ones = np.ones(4, np.float32), np.ones(4, np.float32)
    at = np.float32(0.5), state, xs, xs, ones
    loss = lambda out, target: out
    whole, halves = (board.rules.reverse(cell, loss, cut)(*at)[0] for cut in (None, 2))
    # states 1, 1.5, 1.75, 1.875; derivatives 0, 1, 2, 2.75, and behind a border 1.5, 2.5
    assert whole * 4 == pytest.approx(0 + 1 + 2 + 2.75)
    assert halves * 4 == pytest.approx(0 + 1 + 1.5 + 2.5)


def test_a_run_that_was_cut_off_goes_on_and_says_what_it_ran_on(board, tmp_path):
    done, path = [], tmp_path / 'kept.json'

    def measured(name):
        done.append(name)
        if name == 'second' and done.count(name) == 1:
            raise KeyboardInterrupt
        return {'scores': [0.5], 'seconds': 1.0}

    rows = {('adding', 'GRU', n): (lambda n=n: measured(n)) for n in ('first', 'second', 'third')}
    given = types.SimpleNamespace(quick=False, again=False, only=('*',), output=path)
    with pytest.raises(KeyboardInterrupt):
        board.runner.measure(given, rows)
    board.runner.measure(given, rows)
    found = json.loads(path.read_text(encoding='utf-8'))
    assert done == ['first', 'second', 'second', 'third']
    assert [record['row'] for record in found['records']] == ['first', 'second', 'third']
    assert found['versions']['braintrace'] == braintrace.__version__
    given.only, given.again = ('*third',), True
    board.runner.measure(given, rows)
    assert done[4:] == ['third']


def row(name, scores, **more):
    fixed = {'task': 'adding 48', 'net': 'GRU 64', 'metric': 'mse', 'floor': 1 / 6, 'rate': 0.01}
    costs = {'time': 1.0, 'bytes': 1000, 'cosine': [1.0, None]}
    return fixed | costs | {'row': name, 'scores': scores} | more


def test_the_page_names_the_best_row_and_the_smallest_that_is_near(board):
    records = [
        row('BPTT', [0.01, 0.03]),
        row('same step, Adam', [0.16, 0.17], bytes=0),
        row('D_RTRL', [0.03, 0.03], bytes=2000, time=0.5),
        row('ES_D_RTRL 0.5', [0.035, 0.035], bytes=10),
        row('UORO', [0.3, 0.5]),
    ]
    found = board.rules_page.Board({'versions': {'jax': '1'}, 'records': records})
    gains = {record['row']: found.gain(record) for record in records}
    assert gains['BPTT'] == 1 and gains['UORO'] == 0
    assert gains['D_RTRL'] == pytest.approx((1 / 6 - 0.03) / (1 / 6 - 0.02))
    line = next(li for li in board.rules_page.choices(found).splitlines() if 'GRU 64' in li)
    assert line == '| adding 48 | GRU 64 | D_RTRL | 93% | ES_D_RTRL 0.5 | 90% |'
    assert '| D_RTRL | 1 | 1 | 1 | 93% | 0.5 | 2 |' in board.rules_page.summary(found)


def test_the_best_rate_is_one_whose_score_is_a_number(board):
    best = board.rules.best
    assert best((1, 2, 3), np.array([np.nan, 0.1, 0.2]), tasks.adding(20)) == 2
    assert best((1, 2, 3), np.array([np.nan, 0.1, 0.2]), tasks.digits()) == 3


def test_the_page_is_that_of_the_records_that_are_kept(board):
    found = json.loads(board.rules.PATH.read_text(encoding='utf-8'))
    page = (ROOT / 'docs' / 'rules.md').read_text(encoding='utf-8')
    assert board.rules_page.page(found) == page, 'run python benchmarks/rules_page.py'


# -- the results -----------------------------------------------------------------------------------


def todo(board):
    return [(s, way) for s in board.results.settings() for way in s.rows()]


@pytest.mark.nightly
def test_the_quick_form_trains_and_keeps_nothing(board, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(board.results, 'CACHE', tmp_path / 'cache')
    short = [setting._replace(updates=2) for setting in board.results.quick()]
    monkeypatch.setattr(board.results, 'quick', lambda: short)
    asked = ['results.py', '--quick', '--output', str(tmp_path / 'r.json')]
    monkeypatch.setattr(sys, 'argv', asked)
    board.results.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + sum(len(s.rows()) for s in short)
    assert not (tmp_path / 'r.json').exists() and 'refused' not in ''.join(lines)


def test_the_page_and_readme_are_those_of_the_records_that_are_kept(board):
    kept = json.loads(board.results.PATH.read_text(encoding='utf-8'))
    names = {(s.task.name, s.net, way.name) for s, way in todo(board)}
    assert {(r['task'], r['net'], r['row']) for r in kept['records']} == names
    page, readme = (ROOT / name for name in ('docs/results.md', 'README.md'))
    told = 'run python benchmarks/results_page.py'
    assert page.read_text(encoding='utf-8') == board.results_page.page(kept), told
    text = readme.read_text(encoding='utf-8')
    assert text == board.results_page.readme(text, kept), told


def test_agents_have_their_rows_and_a_picture(board, tmp_path):
    acting = board.acting
    kept = json.loads(acting.PATH.read_text(encoding='utf-8'))['records']
    wanted = {key for s in acting.settings() for key in acting.keys(s)}
    assert {(r['task'], r['net'], r['row']) for r in kept} == wanted | {acting.STEPS}
    assert all(len(r['scores']) == len(acting.SEEDS) for r in kept if r['task'] != acting.STEPS[0])
    assert acting.tables(kept).count(':::{dropdown} ') == len(acting.settings())
    acting.draw(kept, tmp_path / 'acting.png')
    assert (tmp_path / 'acting.png').stat().st_size > 10_000


@pytest.mark.nightly
def test_an_agent_is_measured_in_the_quick_form(board, monkeypatch, tmp_path, capsys):
    at = str(tmp_path / 'r.json')
    monkeypatch.setattr(sys, 'argv', ['acting.py', '--quick', '--output', at])
    board.acting.main()
    row = 'chain 20 with 3 distractors, batch of 8, 8,000 steps | RTU | actor-critic, D_RTRL: '
    assert row in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize('rolling', [True, False], ids=['rolling', 'chunked'])
def test_windows_are_reverse_mode_through_their_steps(board, rolling):
    """Beside it: reverse mode in JAX alone from the state before the window."""

    def cell(p, h, x):
        h = jax.numpy.tanh(braintrace.matmul(x, p['w']) + braintrace.matmul(h, p['r']))
        return (h @ p['q'],), h

    p = {'w': drawn(2, 3), 'r': drawn(3, 3, seed=1), 'q': drawn(3, 2, seed=2)}
    start, xs = drawn(3, seed=3), drawn(7, 2, seed=4)
    learner = braintrace.functional.online(cell)
    learner.init(p, start, xs[0])
    windows = board.acting.Windows(learner, 3, rolling)
    state = windows.init(p, windows.carry(start, xs[0]), xs[0])
    states = [start]
    for t, x in enumerate(xs):
        (q,), pull, state = windows.vjp(p, state, x)
        begin = max(t - 2, 0) if rolling else t // 3 * 3

        def last(p, begin=begin, t=t):
            h = states[begin]
            for x in xs[begin : t + 1]:
                h = jax.numpy.tanh(x @ p['w'] + h @ p['r'])
            return (h @ p['q'])[1], h

        (value, h), want = jax.value_and_grad(last, has_aux=True)(p)
        states.append(h)
        np.testing.assert_allclose(q[1], value, rtol=1e-5)
        assert_close(pull((jax.numpy.array([0.0, 1.0]),)), want, 1e-4, 1e-6)


def test_a_prediction_is_compared_with_the_return_that_followed(board):
    rewards = np.array([0.0, 1.0, 0.0, 2.0, 0.0, 0.0, 4.0, 0.0])
    values = np.linspace(0, 1, 8)
    returns = [sum(0.5**k * r for k, r in enumerate(rewards[t:])) for t in range(8)]
    rows = board.acting.Rows(rewards[:, None], None, None, values[:, None])
    want = np.mean((values - returns)[:6] ** 2)
    assert float(board.acting.off(0.5, rows)) == pytest.approx(want)


# -- the cosines of rows ---------------------------------------------------------------------------


def test_the_column_of_cosines_shows_no_number_that_is_not_known(board):
    shown = board.results_page.cosine
    assert shown({'cosines': [[0.981, 0.01], [0.5, 0.3], [-0.1, 0.02]]}) == '0.98, not yet, -0.10'
    assert shown({'cosines': None}) == shown({}) == '-'


@pytest.mark.nightly
def test_the_cosines_of_a_row_are_one_where_its_rule_is_exact(board):
    task, results = tasks.adding(4), board.results
    setting = results.Setting(task, 'minLSTM 32', 4, 1e-2, 8, 0.1)
    ways = [w for w in results.WAYS if w.name in ('same step, Adam', 'D_RTRL', 'BPTT')]
    same_step, exact, bptt = (results.cosines(setting, way, 1) for way in ways)
    assert bptt is None
    assert np.array(exact)[:, 0] == pytest.approx(1, abs=1e-5)
    assert all(value < 0.99 for value, _ in same_step)
