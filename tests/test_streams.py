"""Streams are learnt as told: rules, windows and baselines against plain NumPy."""

import brainstate
import jax
import numpy as np
import pytest

from tests.benches import modules

STEPS, RESTART, LANES, SEED, UNITS = 15, 6, 2, 3, 64


@pytest.fixture(scope='module')
def boards():
    with modules('streams', 'streams_page') as found:
        yield found


@pytest.fixture
def bench(boards):
    return boards.streams


@pytest.fixture
def page(boards):
    return boards.streams_page


def sized(bench):
    """A short stream of Henon with restarts, and what a run of it sees."""
    task = bench.published('Henon', RESTART, STEPS)
    key = jax.random.key(SEED)
    return task, *(np.asarray(a, float) for a in jax.jit(lambda k: task.sample(k, LANES))(key)[:2])


def by_hand(cell, readout, xs, ys, rule: str) -> np.ndarray:
    """The losses on the way of a tanh network that learns at each step by Adam, with the
    textbook's traces ``de h_k / d w_ij``: all of J, its diagonal, or a leak of 0.9 in its place.
    """
    theta, m, v = [*cell, *readout], [0.0] * 4, [0.0] * 4
    h, losses = np.zeros((LANES, UNITS)), []
    e = np.zeros((LANES, UNITS, 2 + UNITS, UNITS))  # of h_k, by the weights of [x, h, 1]
    eye = np.eye(UNITS)
    for t in range(STEPS):
        W, b, R, c = theta
        goes_on = xs[t, :, 1:]
        h, e = h * goes_on, e * goes_on[:, :, None, None]
        z = np.concatenate([xs[t, :, :1], h, np.ones((LANES, 1))], 1)
        new = np.tanh(z[:, :-1] @ W + b)
        slope = 1 - new**2
        J = slope[:, :, None] * W[1:].T  # (lane, new, old)
        now = np.einsum('ni,nk,kj->nkij', z, slope, eye)
        if rule == 'rtrl':
            e = np.stack([np.tensordot(J[n], e[n], 1) for n in range(LANES)]) + now
        error = 2 * (new @ R + c - ys[t]) / LANES
        back = error @ R.T
        losses.append(np.mean((new @ R + c - ys[t]) ** 2))
        if rule == 'snap':  # the last step of each path is exact
            older = np.einsum('nk,nkl->nl', back, J)
            g = np.einsum('nk,nkij->ij', back, now) + np.einsum('nl,nlij->ij', older, e)
            e = np.einsum('nkk,nkij->nkij', J, e) + now
        else:
            if rule == 'leak':
                e = 0.9 * e + now
            g = np.einsum('nk,nkij->ij', back, e)
        grads = [g[:-1], g[-1], new.T @ error, error.sum(0)]
        m = [0.9 * a + 0.1 * g for a, g in zip(m, grads)]
        v = [0.999 * a + 0.001 * g**2 for a, g in zip(v, grads)]
        first, second = 1 - 0.9 ** (t + 1), 1 - 0.999 ** (t + 1)
        theta = [
            p - 1e-3 * (a / first) / (np.sqrt(s / second) + 1e-8) for p, a, s in zip(theta, m, v)
        ]
        h = new
    return np.array(losses)


@pytest.mark.nightly
@pytest.mark.parametrize('row, rule', [('SnAp-1', 'snap'), ('RFLO', 'leak'), ('RTRL', 'rtrl')])
def test_a_published_setting_is_learnt_as_the_textbook_says(bench, row, rule):
    with jax.enable_x64(True), brainstate.environ.context(precision=64):
        task, xs, ys = sized(bench)
        way = next(way for way in bench.OURS if way.name == row)
        found = bench.learnt(task, way, bench.RATE, LANES, (SEED,))
        brainstate.random.seed(SEED)
        net = bench.BUILT[way.net](task).net
        net = getattr(net, 'net', net)
        layers = (layer.weight.value for layer in (net.cell.W, net.readout))
        weights = [[values[k] for k in ('weight', 'bias')] for values in layers]
        assert found.losses.dtype == weights[0][0].dtype == np.float64
        expected = by_hand(*weights, xs, ys, rule)
    np.testing.assert_allclose(found.losses[0], expected, rtol=1e-9)
    assert expected[-1] != pytest.approx(expected[0])


def test_a_sequence_is_scaled_by_what_came_until_then(bench, monkeypatch):
    x = np.random.default_rng(0).normal(5, 3, (50, 2))
    monkeypatch.setitem(bench.FILES, 'whole', lambda: x)
    monkeypatch.setitem(bench.FILES, 'cut', lambda: np.concatenate([x[:30], x[30:] + 100]))
    (xs, ys), (cut_xs, cut_ys) = map(bench.sequence, ('whole', 'cut'))
    t = 20
    mean, std = x[: t + 1].mean(0), x[: t + 1].std(0)
    np.testing.assert_allclose(xs[t], (x[t] - mean) / std)
    np.testing.assert_allclose(ys[t], (x[t + 1] - mean) / std)
    np.testing.assert_array_equal(xs[:30], cut_xs[:30])
    assert np.abs(cut_ys[29] - ys[29]).min() > 1 and cut_ys.max() == bench.FARTHEST


def test_the_mean_of_what_came_so_far_scores_one(bench):
    ys = np.random.default_rng(0).normal(size=(40, 3))
    losses = np.stack([(ys**2).mean(1), (ys**2).mean(1) / 4])
    losses[:, :4] = 1e6  # the first tenth does not count
    np.testing.assert_allclose(bench.normalised(losses, ys), [1, 0.25])


def test_a_reservoir_is_read_out_by_least_squares_of_all_that_came(bench, monkeypatch):
    for name, value in {'RESERVOIR': 5, 'FORGETS': 1.0, 'RIDGE': 0.1}.items():
        monkeypatch.setattr(bench, name, value)
    rng = np.random.default_rng(1)
    xs, ys, seed = rng.normal(size=(30, 2)), rng.normal(size=(30, 3)), 4
    drawn = np.random.default_rng(seed)
    W, into = drawn.normal(size=(5, 5)), drawn.uniform(-1, 1, (2, 5))
    W *= bench.RADIUS / np.abs(np.linalg.eigvals(W)).max()
    h, rows = np.zeros(5), []
    for x in xs:
        h = np.tanh(h @ W + x @ into)
        rows.append([*h, *x, 1])
    Z = np.array(rows)
    expected = []
    for t in range(30):
        readout = np.linalg.solve(Z[:t].T @ Z[:t] + 0.1 * np.eye(8), Z[:t].T @ ys[:t])
        expected.append(((ys[t] - Z[t] @ readout) ** 2).mean())
    np.testing.assert_allclose(bench.reservoir(xs, ys, (seed,))[0], expected, rtol=1e-8)


@pytest.mark.nightly
def test_a_rolling_window_of_one_step_is_the_gradient_of_the_same_step(bench, monkeypatch):
    monkeypatch.setitem(bench.FILES, 'short', lambda: np.random.default_rng(0).normal(size=(13, 1)))
    task, (xs, ys) = bench.forecast('short'), bench.sequence('short')
    way = bench.Way('same step', 'GRU 64, alone', bench.rules.same_step)
    found = bench.learnt(task, way, bench.RATE, 1, (1, 2)).losses
    ones = np.asarray(bench.rolling('GRU 64', xs, ys, (1, 2), 1))
    np.testing.assert_allclose(ones, found, rtol=1e-5)
    longer = np.asarray(bench.rolling('GRU 64', xs, ys, (1, 2), 4))
    assert not np.allclose(longer[:, -1], found[:, -1], rtol=1e-5)


def test_a_file_that_is_not_there_is_told(bench):
    with pytest.raises(bench.Missing, match='pip install no_such_package'):
        bench.bundled('no_such_package', 'a.csv')
    with pytest.raises(bench.Missing, match='numpy has no a.csv here'):
        bench.bundled('numpy', 'a.csv')
    record = bench.recorded(lambda: bench.bundled('numpy', 'a.csv'))
    assert record['refused'] == 'numpy has no a.csv here' and len(record['commit']) == 12


def test_restarts_begin_at_zero(bench):
    task = bench.published('Henon', 4, 12)
    xs, ys, mask = task.sample(jax.random.key(0), 2)
    assert xs[:, 0, 1].tolist() == [0, 1, 1, 1] * 3 and mask.tolist() == [0] * 10 + [1, 1]
    np.testing.assert_array_equal(xs[1:, :, 0], ys[:-1, :, 0])


def test_many_tests_at_once_are_told_by_holm(page):
    np.testing.assert_allclose(page.holm([0.01, 0.04, 0.03, 0.5]), [0.04, 0.09, 0.09, 0.5])


def test_a_published_figure_is_met_within_both_deviations(page):
    assert page.within((1.0, 0.1, 1.19, 0.1)) and not page.within((1.0, 0.1, 1.21, 0.1))
    alone = {'task': 'Henon', 'net': page.PLAIN, 'row': 'RTRL', 'scores': [0.006]}
    assert page.pairs([alone]) == {('Henon', 'RTRL'): (0.006, 0.001, 0.0052, 0.001)}
    assert '`Henon | tanh 64 | RTRL`' not in page.streams_missing([alone])
    assert '`Henon | tanh 64 | SnAp-1`' in page.streams_missing([alone])
