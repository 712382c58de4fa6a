"""Four small networks with every derivative written out in NumPy, and the diagnosis that the doctor
should give.

A step gives ``h``, the numbers of all hidden states in one vector, and its derivatives:

* ``A``  ``dh/dh'`` along every path;
* ``D``  the part of A that carries the trace from step to step: each position by itself;
* ``C``  the part of A that the loss of a step sees: D, then every path through new states;
* ``F``  ``dh/dw`` within the step, and ``K`` the part of it that the trace takes; both are dicts by
         parameter, (hidden numbers, *shape).

The loss is ``0.5 |h[top] @ out - y|^2``, or of the spikes of ``h[top]``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

I, N, T, O = 2, 3, 12, 2


class Derivatives(NamedTuple):
    h: np.ndarray
    A: np.ndarray
    D: np.ndarray
    C: np.ndarray
    F: dict[str, np.ndarray]
    K: dict[str, np.ndarray]


class Network(NamedTuple):
    """``relations``: parameters that one op has, by the name of its trace; ``read`` and ``slope``:
    what the readout sees of h[top].
    """

    step: Callable
    params: dict[str, np.ndarray]
    h: np.ndarray
    top: slice
    relations: dict[str, tuple[str, ...]]
    read: Callable = lambda h: h
    slope: Callable = np.ones_like
    groups: tuple[str, ...] = ('h',)  # each has as many of the hidden numbers


class Expected(NamedTuple):
    cosine: dict[str, float]
    ratio: dict[str, float]
    dropped: dict[str, float]
    dropped_in: dict[str, np.ndarray]  # by hidden group
    norms: dict[str, np.ndarray]
    largest: dict[str, float]
    hidden: np.ndarray  # (T + 1, hidden numbers), the first state included


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def surrogate(v):
    return 1 / (1 + (2 * v) ** 2)


def outer(of_y, z):
    """``dh/dW`` from ``dh/dy`` for ``y = z @ W``."""
    return of_y[:, None, :] * z[None, :, None]


def gru(p, h, x):
    n = len(h)
    zx = np.concatenate([x, h])
    z, r = sigmoid(zx @ p['Wz'] + p['bz']), sigmoid(zx @ p['Wr'] + p['br'])
    zn = np.concatenate([x, r * h])
    g = np.tanh(zn @ p['Wh'] + p['bh'])
    of_z, of_g = np.diag((g - h) * z * (1 - z)), np.diag(z * (1 - g**2))
    of_r = of_g @ p['Wh'][I:].T @ np.diag(h * r * (1 - r))
    D = np.diag(1 - z)
    A = D + of_z @ p['Wz'][I:].T + of_g @ p['Wh'][I:].T @ np.diag(r) + of_r @ p['Wr'][I:].T
    K = {
        'Wz': outer(of_z, zx),
        'bz': of_z,
        'Wh': outer(of_g, zn),
        'bh': of_g,
        'Wr': np.zeros((n, I + n, n)),
        'br': np.zeros((n, n)),
    }
    return Derivatives((1 - z) * h + z * g, A, D, D, K | {'Wr': outer(of_r, zx), 'br': of_r}, K)


def lstm(p, s, x):
    """``s`` is c and then h."""
    n = len(s) // 2
    c, z = s[:n], np.concatenate([x, s[n:]])
    i, g, f, o = np.split(z @ p['W'] + p['b'], 4)
    i, g, f, o = sigmoid(i), np.tanh(g), sigmoid(f + 1), sigmoid(o)
    new = f * c + i * g
    t = np.tanh(new)
    c_of_y = np.concatenate(
        [np.diag(d) for d in (g * i * (1 - i), i * (1 - g**2), c * f * (1 - f), 0 * o)], 1
    )
    to_h = np.diag(o * (1 - t**2))
    h_of_y = to_h @ c_of_y
    h_of_y[:, 3 * n :] += np.diag(t * o * (1 - o))
    of_y, zero = np.concatenate([c_of_y, h_of_y]), np.zeros((n, n))
    D = np.block([[np.diag(f), zero], [to_h * f, zero]])
    A = D + np.concatenate([np.zeros((2 * n, n)), of_y @ p['W'][I:].T], 1)
    K = {'W': outer(of_y, z), 'b': of_y}
    return Derivatives(np.concatenate([new, o * t]), A, D, D, K, K)


def stack(p, s, x):
    """``h1 = 0.8 h1' + tanh([x, h1'] one)``, ``h2 = 0.9 h2' + tanh([h1, h2'] two)``."""
    n = len(s) // 2
    h1, h2 = s[:n], s[n:]
    z1 = np.concatenate([x, h1])
    a1 = np.tanh(z1 @ p['one'])
    new1 = 0.8 * h1 + a1
    z2 = np.concatenate([new1, h2])
    a2 = np.tanh(z2 @ p['two'])
    d1, d2, zero = np.diag(1 - a1**2), np.diag(1 - a2**2), np.zeros((n, n))
    up, within1, within2 = d2 @ p['two'][:n].T, d1 @ p['one'][I:].T, d2 @ p['two'][n:].T
    leak1, leak2 = 0.8 * np.eye(n), 0.9 * np.eye(n)
    D = np.block([[leak1, zero], [zero, leak2]])
    C = np.block([[leak1, zero], [up @ leak1, leak2]])
    A = np.block([[leak1 + within1, zero], [up @ (leak1 + within1), leak2 + within2]])
    F = {
        'one': outer(np.concatenate([d1, up @ d1]), z1),
        'two': outer(np.concatenate([zero, d2]), z2),
    }
    K = F | {'one': outer(np.concatenate([d1, zero]), z1)}
    return Derivatives(np.concatenate([new1, 0.9 * h2 + a2]), A, D, C, F, K)


def lif(p, v, x):
    """``v = 0.8 v' - s(v') + [x, s(v')] W`` with ``s`` the spike at a threshold of 0.5."""
    spike, slope = (v > 0.5) * 1.0, np.diag(surrogate(v - 0.5))
    z = np.concatenate([x, spike])
    D = 0.8 * np.eye(len(v)) - slope
    K = {'W': outer(np.eye(len(v)), z)}
    return Derivatives(0.8 * v - spike + z @ p['W'], D + p['W'][I:].T @ slope, D, D, K, K)


def draw(shapes: dict[str, tuple], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: 0.7 * rng.standard_normal(s) for k, s in shapes.items()}


def spiking_weights() -> dict[str, np.ndarray]:
    """Unit 0 gets nothing, unit 1 very much."""
    p = draw({'W': (I + N, N), 'out': (N, O)}, 4)
    p['W'][:, 0], p['W'][:I, 1] = 0.0, 3.0
    return p


GATE = {'W': (I + N, N), 'b': (N,)}
ALL = slice(None)
NETWORKS: dict[str, Network] = {
    'gru': Network(
        gru,
        draw({k + g: s for g in 'zrh' for k, s in GATE.items()} | {'out': (N, O)}, 1),
        np.zeros(N),
        ALL,
        {'Wz': ('Wz', 'bz'), 'Wh': ('Wh', 'bh')},
    ),
    'lstm': Network(
        lstm,
        draw({'W': (I + N, 4 * N), 'b': (4 * N,), 'out': (N, O)}, 2),
        np.zeros(2 * N),
        slice(N, None),
        {'W': ('W', 'b')},
    ),
    'stack': Network(
        stack,
        draw({'one': (I + N, N), 'two': (2 * N, N), 'out': (N, O)}, 3),
        np.zeros(2 * N),
        slice(N, None),
        {'one': ('one',), 'two': ('two',)},
        groups=('h1', 'h2'),
    ),
    'lif': Network(
        lif,
        spiking_weights(),
        np.zeros(N),
        ALL,
        {'W': ('W',)},
        lambda v: (v > 0.5) * 1.0,
        lambda v: surrogate(v - 0.5),
    ),
}


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return np.abs(rng.standard_normal((T, I))), rng.standard_normal((T, O))


def expected(net: Network) -> Expected:
    """Both gradients and both Jacobians, forward in time."""
    names = [k for k in net.params if k != 'out']
    h, hidden, xs_ys = net.h, [net.h], zip(*data(), strict=True)
    whole = {k: np.zeros((len(h), *net.params[k].shape)) for k in names}
    trace = {k: np.zeros_like(m) for k, m in whole.items()}
    online, exact = ({k: np.zeros_like(v) for k, v in net.params.items()} for _ in range(2))
    # of the past, by hidden number: kept, whole
    read = {k: np.zeros((2, len(h), *net.params[k].shape)) for k in names}
    norms: dict[str, list[Any]] = {key: [] for key in net.relations}
    for x, y in xs_ys:
        d = net.step(net.params, h, x)
        h = d.h
        hidden.append(h)
        wrong = net.read(h[net.top]) @ net.params['out'] - y
        to_h = np.zeros_like(h)
        to_h[net.top] = net.slope(h[net.top]) * (net.params['out'] @ wrong)
        for grads, jacobian, seen in ((online, trace, d.C), (exact, whole, d.A)):
            grads['out'] += np.outer(net.read(h[net.top]), wrong)
            for k in names:
                grads[k] += np.tensordot(to_h, d.F[k] + np.tensordot(seen, jacobian[k], 1), 1)
                part = 0 if grads is online else 1
                read[k][part] += np.einsum('i,ij,j...->j...', to_h, seen, jacobian[k])
        for k in names:
            whole[k] = d.F[k] + np.tensordot(d.A, whole[k], 1)
            trace[k] = d.K[k] + np.tensordot(d.D, trace[k], 1)
        for key, ks in net.relations.items():
            norms[key].append(np.sqrt(sum((trace[k] ** 2).sum() for k in ks)))
    kept, lost = {}, {}
    for k, r in read.items():
        held, whole_of = r.reshape(2, len(net.groups), -1, *net.params[k].shape).sum(2)
        for masses, a in ((kept, held), (lost, whole_of - held)):
            masses[k] = np.square(a).reshape(len(a), -1).sum(1)
    mass = {k: (kept[k] + lost[k]).sum() for k in names}
    return Expected(
        {
            k: float(np.sum(online[k] * w) / np.linalg.norm(online[k]) / np.linalg.norm(w))
            for k, w in exact.items()
        },
        {k: float(np.linalg.norm(online[k]) / np.linalg.norm(w)) for k, w in exact.items()},
        {k: lost[k].sum() / mass[k] for k in names} | {'out': 0.0},
        {k: lost[k] / mass[k] for k in names},
        {k: np.array(n) for k, n in norms.items()},
        {key: max(np.abs(trace[k]).max() for k in ks) for key, ks in net.relations.items()},
        np.stack(hidden),
    )
