"""Synthetic gradients at the ends of exact windows, against reverse mode and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional, rules
from braintrace.errors import OptionError, StructureError
from tests import models, oracles
from tests.compare import added, assert_close
from tests.gradients.harness import quick, start

RULE = rules.same_step()
K = 2
ROWS = 'leaky lstm_fused stored_spike conv1d gru adaptive_lif spiking_two'.split()


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name', ROWS)
def test_with_the_true_credit_the_gradient_is_that_of_bptt(name):
    """Of two windows, where the credit is a parameter: its error at zero is the true one."""
    case = models.case(name)
    learner, state = start(case, RULE)
    options = {'inside': 'exact', 'synthesizer': lambda credit, states: credit}
    run = quick(learner.sequence_grad(case.loss, len(case.xs) // 2, 'sum', **options))

    def gradients(credit):
        return run((case.params, credit), state, case.xs, case.ys)[0]

    groups = learner.graph.hidden_groups
    none = {g.name: np.zeros((*g.shape, g.num_state)) for g in groups}
    less, missing = gradients(none)
    with pytest.raises(AssertionError):
        assert_close(less, oracles.bptt(case), 1e-3)
    grads, off = gradients(jax.tree.map(lambda m: -m, missing))
    assert_close(grads, oracles.bptt(case), 1e-10)
    assert max(abs(o).max() for o in jax.tree.leaves(off)) < 1e-12


A = 0.8


def linear_case():
    """``h = A h' + x @ w`` with the loss ``sum(y h)``: every derivative is known in closed form."""
    rng = np.random.default_rng(3)
    xs, ys = rng.standard_normal((6, 3, 2)), rng.standard_normal((6, 3, 4))
    params, h = {'w': rng.standard_normal((2, 4))}, rng.standard_normal((3, 4))

    def cell(p, h, x):
        h = A * h + braintrace.matmul(x, p['w'])
        return h, h

    learner = functional.online(cell, RULE)
    state = learner.init(params, h, xs[0])
    (group,) = learner.graph.hidden_groups
    return learner, params, state, group.name, xs, ys


def loss(out, y):
    return (y * out).sum()


def window(s, w, h, xs, ys, first, last):
    """Of one window: the gradients of ``w`` and of the linear synthesizer, and the state behind."""
    end = h
    for x in xs:
        end = A * end + x @ w
    lam, dw = 0 * h if last else end @ s['w'] + s['b'], 0.0
    for x, y in zip(xs[::-1], ys[::-1], strict=True):
        lam = lam + y
        dw, lam = dw + x.T @ lam, A * lam
    off = (h @ s['w'] + s['b'] - lam) * (not first)
    return dw, {'w': h.T @ off, 'b': off.sum(0)}, end


def by_hand(s, w, h, xs, ys, rate=0.0):
    """The sums over all windows; with a ``rate`` the parameters after their updates."""
    dw, ds = 0.0, jax.tree.map(np.zeros_like, s)
    for k in range(0, len(xs), K):
        part = slice(k, k + K)
        of_w, of_s, h = window(s, w, h, xs[part], ys[part], k == 0, k + K == len(xs))
        dw, ds = dw + of_w, jax.tree.map(np.add, ds, of_s)
        w, s = w - rate * of_w, jax.tree.map(lambda p, g: p - rate * g, s, of_s)
    return (w, s) if rate else (dw, ds)


def test_the_synthesizer_learns_by_the_regression_of_a_linear_cell():
    learner, params, state, name, xs, ys = linear_case()
    rng, h = np.random.default_rng(4), np.asarray(state.carry)
    synthetic = braintrace.SyntheticGradient({name: (3, 4, 1)})
    start = synthetic.param_values()
    assert not any(p.any() for p in jax.tree.leaves(start))
    given = jax.tree.map(lambda p: rng.standard_normal(p.shape), start)
    options = {'inside': 'exact', 'synthesizer': synthetic.apply}
    run = quick(learner.sequence_grad(loss, K, 'sum', **options))
    (grads, found), *_ = run((params, given), state, xs, ys)
    assert_close((grads['w'], found[name]), by_hand(given[name], params['w'], h, xs, ys), 1e-10)
    # lanes that are reset between two windows owe nothing to each other
    flags = np.zeros((6, 3), bool)
    flags[2, 1] = True
    (grads, found), *_ = run((params, given), state, xs, ys, reset=(flags, 0 * h))
    parts = [
        [np.delete(a, 1, -2) for a in (h, xs, ys)],
        [np.zeros((1, 4)), xs[2:, 1:2], ys[2:, 1:2]],
        [h[1:2], xs[:2, 1:2], ys[:2, 1:2]],
    ]
    want = added([by_hand(given[name], params['w'], *part) for part in parts])
    assert_close((grads['w'], found[name]), want, 1e-10)


@pytest.mark.slow
def test_updates_along_a_sequence_move_the_synthesizer_too():
    learner, params, state, name, xs, ys = linear_case()
    synthetic = braintrace.SyntheticGradient({name: (3, 4, 1)}, scale=0.5)
    optimizer, options = optax.sgd(0.01), {'inside': 'exact', 'synthesizer': synthetic.apply}
    learnt = params, synthetic.param_values()
    run = quick(learner.sequence_update(loss, optimizer, K, 'sum', **options))
    got, losses, *_ = run(learnt, optimizer.init(learnt), state, xs, ys)
    first = jax.tree.map(np.asarray, learnt[1][name])
    want = by_hand(first, params['w'], np.asarray(state.carry), xs, ys, 0.01)
    assert_close((got[0]['w'], got[1][name]), want, 1e-10)
    assert losses.shape == (6,)


@pytest.mark.slow
def test_learnt_credit_is_nearer_to_bptt_than_none():
    """A rotation, of which the loss sees one axis: half of the credit comes in later windows."""
    rng = np.random.default_rng(0)
    turn = 0.95 * np.array([[np.cos(1), np.sin(1)], [-np.sin(1), np.cos(1)]])
    params, h = {'w': rng.standard_normal((2, 2)) / 2, 'u': turn}, np.zeros((8, 2))

    def cell(p, h, x):
        h = braintrace.matmul(x, p['w']) + braintrace.matmul(h, p['u'])
        return h[:, :1], h

    def draw():
        return rng.standard_normal((24, 8, 2)), np.zeros((24, 8, 1))

    learner = functional.online(cell, RULE)
    state = learner.init(params, h, draw()[0][0])
    (name,) = [g.name for g in learner.graph.hidden_groups]
    synthetic = braintrace.SyntheticGradient({name: (8, 2, 1)})
    options = {'inside': 'exact'}
    run = quick(learner.sequence_grad(models.squared, K, synthesizer=synthetic.apply, **options))
    whole = quick(learner.sequence_grad(models.squared, None, **options))

    def cosine(s):
        xs, ys = draw()
        (a, _), *_ = run((params, s), state, xs, ys)
        b, *_ = whole(params, state, xs, ys)
        a, b = (np.concatenate([np.ravel(g[k]) for k in ('w', 'u')]) for g in (a, b))
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    s, optimizer = synthetic.param_values(), optax.adam(0.05)
    before, moments = np.mean([cosine(s) for _ in range(5)]), optimizer.init(s)
    for _ in range(100):
        (_, grads), *_ = run((params, s), state, *draw())
        updates, moments = optimizer.update(grads, moments)
        s = optax.apply_updates(s, updates)
    after = np.mean([cosine(s) for _ in range(5)])
    assert before < 0.93 and after > 0.98, (before, after)


TWICE = r'd_rtrl\(\).*twice.*rules.same_step\(\)'


def test_a_synthesizer_beside_a_trace_wrong_params_and_wrong_credit_are_refused():
    learner, params, state, _, xs, ys = linear_case()
    online = functional.online(learner.cell, rules.d_rtrl())
    options = {'inside': 'exact', 'synthesizer': len}
    for of, found in (
        (lambda: online.sequence_update(loss, optax.sgd(0.1), K, **options), TWICE),
        (lambda: online.sequence_grad(loss, K, keep_trace=False, **options), TWICE),
        (
            lambda: learner.sequence_grad(loss, K, inside='trace', synthesizer=len),
            "with inside='trace'.*Give inside='exact'",
        ),
        (
            lambda: learner.sequence_grad(loss, K, inside='exact', synthesizer=3),
            'synthesizer is 3; give a function',
        ),
    ):
        with pytest.raises(OptionError, match=found):
            of()
    options = {'window': K, 'inside': 'exact'}
    run = learner.sequence_grad(loss, synthesizer=lambda s, h: {'h': jnp.zeros(3)}, **options)
    with pytest.raises(StructureError, match='params is dict; with a synthesizer'):
        run(params, state, xs, ys)
    with pytest.raises(StructureError, match=r"the synthesizer returned \{'h': \(3,\)"):
        run((params, 1.0), state, xs, ys)
    with pytest.raises(OptionError, match=r"the shape of group 'h' is 4; give a tuple"):
        braintrace.SyntheticGradient({'h': 4})
