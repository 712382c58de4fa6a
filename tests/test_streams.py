"""Streams are learnt as told: rules, windows and baselines against plain NumPy."""

import brainstate
import jax
import numpy as np
import pytest

from tests.benches import modules

STEPS, RESTART, LANES, SEED, UNITS = 15, 6, 2, 3, 64


@pytest.fixture(scope='module')
def bench():
    with modules('streams') as found:
        yield found.streams


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


@pytest.mark.slow
@pytest.mark.parametrize('row, rule', [('SnAp-1', 'snap'), ('RFLO', 'leak'), ('RTRL', 'rtrl')])
def test_a_published_setting_is_learnt_as_the_textbook_says(bench, row, rule):
    with jax.enable_x64(True), brainstate.environ.context(precision=64):
        task, xs, ys = sized(bench)
        way = next(way for way in bench.OURS if way.name == row)
        found = bench.learnt(task, way, bench.RATE, LANES, (SEED,))
        brainstate.random.seed(SEED)
        net = bench.BUILT[way.net](task).net
        net = getattr(net, 'net', net)
        weights = [
            [layer.weight.value[k] for k in ('weight', 'bias')]
            for layer in (net.cell.W, net.readout)
        ]
        assert found.losses.dtype == weights[0][0].dtype == np.float64
        expected = by_hand(*weights, xs, ys, rule)
    np.testing.assert_allclose(found.losses[0], expected, rtol=1e-9)
    assert expected[-1] != pytest.approx(expected[0])
