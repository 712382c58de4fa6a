"""The formulas of ``signs`` and ``uoro`` in NumPy, with the signs that the key in a trace draws.

Both give gradients per step, like the oracles of ``tests.oracles``. ``resets`` is ``(flags,
carry0)``, flags ``(T, B)``. ``oracles.at_borders(case, traced.before, size)`` has the gradient of
windows that are exact inside.
"""

from typing import NamedTuple

import jax
import numpy as np

from tests.models.ops import NumpyOps
from tests.oracles import Probe, _factors, _pull_back, flat, jacobian, like, pick, real


class Traced(NamedTuple):
    """Gradients of each step; the carry before each step, and ``history(lam)`` there."""

    steps: object
    before: list


def balance(a, b):
    """``r`` with ``r^2 = b / a``, and ``1 / r``; both zero where a norm is."""
    if not (a > 0 and b > 0):
        return 0.0, 0.0
    return np.sqrt(b / a), np.sqrt(a / b)


def number_of_lanes(case):
    return len(case.xs[0]) if case.xs.ndim > 2 else 1


def lanes_of(shape, lanes):
    """The lane of each number of an array, flat."""
    return np.repeat(np.arange(lanes), int(np.prod(shape)) // lanes)


def drawn(key, shape):
    return np.asarray(jax.random.rademacher(key, shape, float))


def restarted(carry, t, resets):
    """The carry before step t, and the lanes that start again."""
    if resets is None or not resets[0][t].any():
        return carry, None
    flags, carry0 = resets
    fresh = flags[t]
    shaped = {k: fresh.reshape(-1, *[1] * (v.ndim - 1)) for k, v in carry.items()}
    return {k: np.where(shaped[k], carry0[k], v) for k, v in carry.items()}, fresh


def signs(case, seed=0, resets=None, scope='position'):
    """KF-RTRL: for each op and group two factors in each lane; with scope 'all' one group of all
    states, and no path is cut.
    """
    lanes = number_of_lanes(case)
    params, carry, key = case.params, dict(case.carry), jax.random.key(seed)
    cut, groups = NumpyOps('cut'), case.model.groups
    if scope == 'all':
        cut, groups = NumpyOps(), [sorted(carry)]
    rows = [np.concatenate([lanes_of(carry[s].shape, lanes) for s in g]) for g in groups]
    steps, before, slots = [], [], {}
    for t, (x, y) in enumerate(zip(case.xs, case.ys, strict=True)):
        carry, fresh = restarted(carry, t, resets)
        calls = _calls(case, params, carry, x)
        inputs, zeros = [x for x, _ in calls], [np.zeros(np.shape(op(x))) for x, op in calls]
        if scope == 'all':
            of_groups = [_whole(case, params, carry, x, zeros)]
        else:
            _, _, of_groups = _factors(case, params, carry, x, y)
        edges = np.cumsum([0, *map(np.size, zeros)])
        if fresh is not None:
            slots = {at: _without(fresh, rows[at[1]], *slot) for at, slot in slots.items()}

        def history(lam, slots=slots, carry=carry, x=x, inputs=inputs, edges=edges):
            """An op's gradient is linear in x but for the part that x = 0 leaves, of a bias."""
            total, silent = 0.0, [None if i is None else 0.0 * i for i in inputs]
            for g, names in enumerate(groups):
                given, sent, of_bias = list(inputs), np.zeros(edges[-1]), np.zeros(edges[-1])
                for (k, own), (ex, one, a) in slots.items():
                    if own == g:
                        mine = slice(edges[k], edges[k + 1])
                        given[k], sent[mine] = ex, flat(pick(lam, names)) @ a
                        of_bias[mine] = sent[mine] * np.repeat(one - 1, a.shape[1] // one.size)
                total = total + _pull_back(case, params, carry, x, given, sent)
                total = total + _pull_back(case, params, carry, x, silent, of_bias)
            return total

        before.append((carry, history))
        steps.append(_gradient(case, cut, params, carry, x, y, history))
        key, draw = jax.random.split(key)
        number = 0
        for k, given in enumerate(inputs):
            for g, (d, df, _) in enumerate(of_groups):
                now = df[:, edges[k] : edges[k + 1]]
                if now.any():
                    ex = 0.0 if given is None else 0.0 * np.real(given)
                    one = np.ones(1) if given is None else np.zeros(lanes)
                    old = slots.get((k, g), (ex, one, 0.0 * now))
                    biased = given is not None and _has_bias(case, params, carry, x, k)
                    own = drawn(jax.random.fold_in(draw, number), (2, lanes))
                    slots = {**slots, (k, g): _mixed(old, given, d, now, own, rows[g], biased)}
                    number += 1
        carry = real(case.run(NumpyOps(), params, carry, x)[1])
    return Traced(like(np.stack(steps), params), before)


def _calls(case, params, carry, x):
    """``(x, op)`` of every op of a step."""
    seen = Probe()
    case.run(seen, params, carry, x)
    return seen.calls


def _whole(case, params, carry, x, zeros):
    """One group: the derivatives of all new states by all old ones, and by all results of ops."""
    d = jacobian(lambda h: case.run(NumpyOps(), params, h, x)[1], carry)
    df = jacobian(lambda add: case.run(Probe(add_y=add), params, carry, x)[1], zeros)
    return d, df, None


def _has_bias(case, params, carry, x, k):
    """Whether an op's result moves with its weights where x is zero."""

    def result(params):
        given, op = _calls(case, params, carry, x)[k]
        return op(0.0 * given)

    return jacobian(result, params).any()


def _without(fresh, rows, ex, one, a):
    """The factors, zero in the flagged lanes; of an op without x every lane has columns of its
    own rows.
    """
    a = np.where(fresh[rows][:, None], 0.0, a)
    if np.ndim(ex):
        ex = np.where(fresh.reshape(-1, *[1] * (np.ndim(ex) - 1)), 0.0, ex)
        one = np.where(fresh, 0.0, one)
    return ex, one, a


def _mixed(old, given, d, now, own, rows, biased):
    """The factors after a step, lane by lane; x is 1 for a bias."""
    ex, one, a = old
    moved = d @ a
    if given is None:
        return ex, one, moved + now
    given, size = np.real(given), np.linalg.norm
    new_x, new_one, new_a = np.zeros(given.shape), np.zeros(len(one)), np.zeros_like(now)
    for b, (s1, s2) in enumerate(own.T):
        mine, lane = rows == b, b if own.shape[1] > 1 else slice(None)
        p, over_p = balance(np.hypot(size(ex[lane]), biased * one[b]), size(moved[mine]))
        r, over_r = balance(np.hypot(size(given[lane]), biased), size(now[mine]))
        new_x[lane] = s1 * p * ex[lane] + s2 * r * given[lane]
        new_one[b] = s1 * p * one[b] + s2 * r
        new_a[mine] = s1 * over_p * moved[mine] + s2 * over_r * now[mine]
    return new_x, new_one, new_a


def _gradient(case, ops, params, carry, x, y, history):
    """The same step, and the history of the derivative by the old states."""

    def loss(params, carry):
        return case.loss(case.run(ops, params, carry, x)[0], y)

    lam = like(jacobian(lambda h: loss(params, h), carry)[0], carry)
    return jacobian(lambda p: loss(p, carry), params)[0] + history(lam)


def sigmoid_slope(w):
    return np.exp(-w) / (1 + np.exp(-w)) ** 2


# By model and parameter the derivative of an op's weight by it, where that is not 1.
SLOPES = {
    'learned_decay': {'decay': sigmoid_slope, 'gain': np.exp},
    'conv1d': {'decay': sigmoid_slope},
}


def uoro(case, seed=0, pair='sample', resets=None):
    """UORO with all paths of the step; norms are those of the ops' weights."""
    lanes = number_of_lanes(case)
    params, carry, key = case.params, dict(case.carry), jax.random.key(seed)
    names = sorted(carry)
    rows = np.concatenate([lanes_of(carry[n].shape, lanes) for n in names])
    of_pairs = rows if pair == 'sample' else 0 * rows
    s, m = np.zeros(len(rows)), np.zeros((of_pairs.max() + 1, flat(params).size))
    ones, given = jax.tree.map(np.ones_like, params), SLOPES.get(case.model.name, {})
    slope = flat({k: given[k](params[k]) if k in given else v for k, v in ones.items()})
    steps, before = [], []
    for t, (x, y) in enumerate(zip(case.xs, case.ys, strict=True)):
        carry, fresh = restarted(carry, t, resets)
        if fresh is not None:
            s = np.where(fresh[rows], 0.0, s)
            m = np.where(fresh[:, None], 0.0, m) if pair == 'sample' else m * (not fresh.all())

        def history(lam, s=s, m=m):
            each = flat(lam) * s
            return sum(each[of_pairs == b].sum() * m[b] for b in range(len(m)))

        before.append((carry, history))
        steps.append(_gradient(case, NumpyOps(), params, carry, x, y, history))
        moved = jacobian(lambda h: case.run(NumpyOps(), params, h, x)[1], carry) @ s
        by_weights = jacobian(lambda p: case.run(NumpyOps(), p, carry, x)[1], params)
        key, draw = jax.random.split(key)
        signs_of = [drawn(jax.random.fold_in(draw, k), carry[n].shape) for k, n in enumerate(names)]
        v = flat(signs_of)
        s, m = s.copy(), m.copy()
        for b in range(len(m)):
            mine = of_pairs == b
            new = v[mine] @ by_weights[mine]
            r0, over_r0 = balance(np.linalg.norm(moved[mine]), np.linalg.norm(m[b] / slope))
            r1, over_r1 = balance(np.linalg.norm(v[mine]), np.linalg.norm(new / slope))
            s[mine] = r0 * moved[mine] + r1 * v[mine]
            m[b] = over_r0 * m[b] + over_r1 * new
        carry = real(case.run(NumpyOps(), params, carry, x)[1])
    return Traced(like(np.stack(steps), params), before)
