"""The Legendre memory unit, its matrices by SciPy."""

import brainstate
import numpy as np
import scipy.linalg

from braintrace import nn
from tests.nn.rows.cells import DRAWN, affine
from tests.nn.rows.row import Row

ORDER, THETA, MEMORIES = 3, 4.0, 2


def matrices(order, theta):
    """By the paper's equations 2 and 5, entry by entry."""
    A, B = np.zeros((order, order)), np.zeros(order)
    for i in range(order):
        B[i] = (2 * i + 1) * (-1) ** i
        for j in range(order):
            A[i, j] = (2 * i + 1) * (-1 if i < j else (-1) ** (i - j + 1))
    moved = scipy.linalg.expm(A / theta)
    return moved, np.linalg.solve(A, (moved - np.eye(order)) @ B)


def legendre(recurrent):
    A, B = matrices(ORDER, THETA)

    def step(ops, p, s, x):
        m = s['m']
        flat = lambda m: m.reshape(*m.shape[:-2], MEMORIES * ORDER)
        u = affine(ops, p['Ex.weight'], x)
        if recurrent:
            u = u + affine(ops, p['Eh.weight'], ops.cut(s['h']))
            u = u + affine(ops, p['Em.weight'], ops.cut(flat(m)))
        m = ops.new('m', m @ A.T + u[..., None] * B)
        read = [x, ops.cut(s['h']), flat(m)] if recurrent else [x, flat(m)]
        h = ops.tanh(affine(ops, p['W.weight'], *read))
        return (ops.new('h', h), {'h': h, 'm': m}) if recurrent else (h, {'m': m})

    return step


def cell(recurrent):
    made = nn.LMUCell(3, 5, ORDER, THETA, MEMORIES, recurrent, **DRAWN)
    if recurrent:
        w = made.Em.weight
        w.value = {'weight': brainstate.nn.init.Normal(0.3)(w.value['weight'].shape)}
    return made


ROWS = [
    Row('lmu_of_input', lambda: cell(False), legendre(False), exact=True),
    Row('lmu', lambda: cell(True), legendre(True), groups=(('m',), ('h',)), owner={'W.weight': 1}),
]
