"""``learner.observed``: every value that a step's gradient is made of, beside plain formulas in
NumPy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import functional, rules
from braintrace.errors import OptionError
from tests.compare import assert_close
from tests.late import LATE
from tests.models.model import squared as loss
from tests.precision import float64 as float64

B, I, N, O, T = 2, 3, 4, 2, 4  # noqa: E741
ALPHA, RHO, BETA, THETA, KAPPA = 0.9, 0.95, 0.2, 0.5, 0.7
RNG = np.random.default_rng(3)
PARAMS = {'W': RNG.normal(size=(I + N, N)), 'b': RNG.normal(size=N), 'out': RNG.normal(size=(N, O))}
XS, YS = 2 * RNG.normal(size=(T, B, I)), RNG.normal(size=(T, B, O))
CARRY = {'V': np.zeros((B, N)), 'a': np.zeros((B, N)), 'z': np.zeros((B, N)), 'o': np.zeros((B, O))}


@jax.custom_jvp
def spike(x):
    return (x > 0).astype(x.dtype)


def psi(x):
    return (1 + 2 * abs(x)) ** -2


spike.defjvp(lambda at, d: (spike(at[0]), psi(at[0]) * d[0]))


def cell(p, c, x):
    """Adaptive units with a detached reset in front of a leaky readout."""
    y = braintrace.matmul(jnp.concatenate([x, c['z']], -1), p['W'], p['b'])
    v = ALPHA * c['V'] + y - THETA * jax.lax.stop_gradient(c['z'])
    a = RHO * c['a'] + c['z']
    z = spike((v - THETA - BETA * a) / THETA)
    o = KAPPA * c['o'] + braintrace.matmul(z, p['out'])
    return o, {'V': v, 'a': a, 'z': z, 'o': o}


def slopes(c):
    """dz/dV and dz/da."""
    slope = psi((c['V'] - THETA - BETA * c['a']) / THETA) / THETA
    return [slope, -BETA * slope]


def observed(rule, steps=T, **options):
    """What each of some steps was made of, and the carry around it."""
    learner = functional.online(cell, rule, **options)
    state, found = learner.init(PARAMS, CARRY, XS[0]), []
    step = jax.jit(learner.observed(loss))
    for x, y in zip(XS[:steps], YS, strict=False):
        (grads, _, out, new), seen = step(PARAMS, state, x, y)
        found.append((state.carry, new.carry, np.asarray(out - y), grads, seen))
        state = new
    return found


def group_of(seen):
    return next(name for name in seen.d if 'V' in name)


def transition(before, after, filtered):
    """D and D_f of the units' group."""
    old, new = slopes(before), slopes(after)
    zero, one = np.zeros((B, N)), np.ones((B, N))
    d = [[ALPHA * one, zero], [old[0], RHO + old[1]]]
    df = [one, zero]
    if filtered:
        row = [new[0] * d[0][r] + new[1] * d[1][r] for r in range(2)]
        d = [[*d[0], zero], [*d[1], zero], [*row, KAPPA * one]]
        df = [*df, new[0] * df[0]]
    return d, df


def dense(vector):
    return [np.zeros((B, N)) if v is None else np.asarray(v) for v in vector]


def moved(d, e):
    """``sum_r D_sr e_r``, for entries with more axes behind the lanes."""
    return [
        sum(x.reshape(B, *[1] * (y.ndim - 2), N) * y for x, y in zip(row, e, strict=True))
        for row in d
    ]


@pytest.mark.tier(quick=2)
@pytest.mark.parametrize(
    'rule',
    [rules.d_rtrl(), rules.e_prop(KAPPA, 'random'), rules.d_rtrl(credit='whole'), LATE],
    ids=str,
)
def test_factors_traces_and_signals_of_d_rtrl_are_the_formulas(rule):
    filtered, e = bool(rule.view.kappa), None
    for t, (before, after, err, grads, seen) in enumerate(observed(rule)):
        name, x = group_of(seen), np.concatenate([XS[t], before['z']], -1)
        d, df = transition(before, after, filtered)
        assert_close(seen.x['W'], x)
        assert_close([dense(row) for row in seen.d[name]], d)
        assert_close(dense(seen.df['W'][name]), df)
        e = [np.zeros((B, I + N, N)) for _ in df] if e is None else e
        assert_close(list(seen.before['W'][name]['weight']), e, absolute=1e-14)
        new = [m + np.einsum('bi,bn->bin', x, f) for m, f in zip(moved(d, e), df, strict=True)]
        assert_close(list(seen.after['W'][name]['weight']), new)
        back = err @ np.asarray(seen.feedback['out']['weight'] if filtered else PARAMS['out']).T
        dh = [0 * back, 0 * back, back] if filtered else [back * s for s in slopes(after)]
        assert_close(dense(seen.dh[name]), dh)
        dy = sum(g * f for g, f in zip(dh, df, strict=True))
        assert_close(seen.dy['W'], dy)
        c = [sum(dh[s] * d[s][r] for s in range(len(d))) for r in range(len(d))]
        if rule.credit == 'whole':
            through = (dy @ PARAMS['W'].T)[:, I:]
            c = [c[r] + through * s for r, s in enumerate(slopes(before))]
        assert_close(dense(seen.c[name]), c)
        total = x.T @ dy + sum(np.einsum('bn,bin->in', *pair) for pair in zip(c, e, strict=True))
        assert_close(grads['W'], total)
        assert seen.t.tolist() == [t] * B
        e = new


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('decays', [(0.8, 0.6), 0.7])
def test_factors_and_traces_of_es_d_rtrl_are_the_formulas(decays):
    rule = rules.es_d_rtrl(decays)
    (a_x, a_f), ex, ef = rule.decays, np.zeros((B, I + N)), [np.zeros((B, N))] * 2
    for t, (before, after, err, grads, seen) in enumerate(observed(rule)):
        name, x = group_of(seen), np.concatenate([XS[t], before['z']], -1)
        d, df = transition(before, after, False)
        ex = a_x * ex + x
        ef = [a_f * m + (1 - a_f) * f for m, f in zip(moved(d, ef), df, strict=True)]
        assert_close(seen.after['W'][name]['x'], ex)
        assert_close([seen.after['W'][name]['f'][..., s] for s in range(2)], ef)
        dh = [(err @ PARAMS['out'].T) * s for s in slopes(after)]
        assert_close(dense(seen.dh[name]), dh)
        sent = sum(g * f for g, f in zip(dh, ef, strict=True)) / (1 - a_f ** (t + 1))
        assert_close(grads['W'], ex.T @ sent)
        assert_close(grads['b'], sent.sum(0))


def test_the_other_results_are_those_of_grad():
    learner = functional.online(cell)
    state = learner.init(PARAMS, CARRY, XS[0])
    want = jax.jit(learner.grad(loss))(PARAMS, state, XS[0], YS[0])
    assert_close(jax.jit(learner.observed(loss))(PARAMS, state, XS[0], YS[0])[0], want)


def test_pending_steps_are_written_in_and_neighbours_agree_to_the_bit():
    found = observed(LATE)
    for (*_, one), (*_, other) in zip(found, found[1:], strict=False):
        assert_close(other.before, one.after, relative=0)


@pytest.mark.slow
def test_a_lane_that_starts_anew_has_no_trace():
    learner = functional.online(cell)
    state = learner.init(PARAMS, CARRY, XS[0])
    step = jax.jit(learner.observed(loss))
    (*_, state), _ = step(PARAMS, state, XS[0], YS[0])
    state = functional.reset(state, np.array([True, False]), CARRY)
    _, seen = step(PARAMS, state, XS[1], YS[1])
    (e, _) = seen.before['W'][group_of(seen)]['weight']
    assert not e[0].any() and e[1].any() and seen.t.tolist() == [0, 1]
    assert_close(learner.traces(PARAMS, state)['W'], seen.before['W'], relative=0)


@pytest.mark.slow
def test_quantities_are_shown_as_mantissas():
    def with_units(p, h, x):
        h = 0.9 * h + braintrace.matmul(x, p)
        return h, h

    learner, w = functional.online(with_units), np.ones((I, N)) * u.mV
    state = learner.init(w, np.zeros((B, N)) * u.mV, XS[0])
    observe = learner.observed(lambda h, y: jnp.sum((h / u.mV) ** 2))
    _, seen = observe(w, state, XS[0], YS[0])
    leaves = jax.tree.leaves(seen, is_leaf=lambda x: isinstance(x, u.Quantity))
    assert leaves and not any(isinstance(leaf, u.Quantity) for leaf in leaves)


@pytest.mark.parametrize('rule', [None, rules.rtrl()], ids=str)
def test_a_rule_without_such_factors_is_refused(rule):
    with pytest.raises(OptionError, match='give a learner with braintrace.rules.d_rtrl'):
        functional.online(cell, rule).observed(loss)
