"""Cells with complex states, most of them linear recurrent units (Orvieto et al. 2023).

They are beside the table of models: its oracles take derivatives by complex steps, which a cell
of complex numbers does not allow. Nothing is cut in these cells, so plain BPTT is their oracle.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

B, I, N, O, T = 2, 3, 4, 2, 6


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


H = draw(B, N) + 1j * draw(B, N, seed=1)
V = draw(B, N, seed=2)
SHAPES = {'nu': (N,), 'theta': (N,), 'gamma': (N,), 'b_re': (I, N), 'b_im': (I, N)}
SHAPES |= {'c_re': (N, O), 'c_im': (N, O), 'd': (I, O)}
PARAMS = {name: 0.6 * draw(*shape, seed=k) for k, (name, shape) in enumerate(SHAPES.items())}


def decay(ops, p):
    nu, theta = ops.element_wise(p['nu'], jnp.asarray), ops.element_wise(p['theta'], jnp.asarray)
    return jnp.exp(-jnp.exp(nu) + 1j * jnp.exp(theta))


def drive(ops, p, x):
    return ops.matmul(x, p['b_re']) + 1j * ops.matmul(x, p['b_im'])


def readout(p, h, x):
    return (h @ (p['c_re'] + 1j * p['c_im'])).real + x @ p['d']


def natural(ops, p, h, x):
    """As the paper writes it: every parameter is real."""
    gamma = jnp.exp(ops.element_wise(p['gamma'], jnp.asarray))
    h = decay(ops, p) * h + gamma * drive(ops, p, x)
    return readout(p, h, x), h


def complex_op(ops, p, h, x):
    """The input weight is one complex matrix of two real parameters, and so is an ETP readout."""
    h = decay(ops, p) * h + ops.matmul(x.astype(complex), p['b_re'] + 1j * p['b_im'])
    return ops.matmul(h, p['c_re'] + 1j * p['c_im']).real, h


def complex_parameters(ops, p, h, x):
    h = ops.element_wise(p['lam'], jnp.asarray) * h + ops.matmul(x, p['b'])
    return (h @ p['c']).real, h


def complex_input(ops, p, h, x):
    """Real weights and a complex input: y is complex, and its derivative by a weight is not."""
    h = decay(ops, p) * h + ops.matmul(x * (1 + 2j), p['b_re'])
    return readout(p, h, x), h


def modulus(ops, p, h, x):
    """Not holomorphic."""
    h = decay(ops, p) * h + drive(ops, p, x)
    h = h / (1 + jnp.abs(h))
    return readout(p, h, x), h


def conjugate(ops, p, h, x):
    """Not holomorphic, with complex results of complex weights."""
    h = decay(ops, p) * jnp.conj(h) + ops.matmul(x, p['b_re'] + 1j * p['b_im'])
    return readout(p, h, x), h


@jax.custom_jvp
def squash(z):
    return z / (1 + jnp.abs(z))


squash.defjvp(lambda primals, tangents: jax.jvp(lambda z: z / (1 + jnp.abs(z)), primals, tangents))


def own_rule(ops, p, h, x):
    """A function with a rule of its own, of which nothing is known."""
    h = squash(decay(ops, p) * h) + drive(ops, p, x)
    return readout(p, h, x), h


def real_reads_complex(ops, p, c, x):
    h = decay(ops, p) * c['h'] + drive(ops, p, x)
    v = 0.8 * c['v'] + h.real * h.imag
    return v @ p['c_re'] + (h @ p['c_im']).real, {'h': h, 'v': v}


def complex_reads_real(ops, p, c, x):
    v = 0.8 * c['v'] + jnp.tanh(ops.matmul(x, p['b_re']))
    h = decay(ops, p) * c['h'] + v * (1 + 2j) + ops.matmul(x, p['b_im'])
    return readout(p, h, x) + v @ p['c_im'], {'h': h, 'v': v}


def real_state(ops, p, v, x):
    """A real state reads complex results of ops, one of them at every lane."""
    z = ops.matmul(x, p['b_re'] + 1j * p['b_im'])
    v = decay(ops, p).real * v + jnp.abs(z * ops.element_wise(p['z'], jnp.asarray))
    return v @ p['c_re'], v


def turns(ops, p, h, x):
    """Three turns of a loop in each step."""

    def turn(h, _):
        return decay(ops, p) * h + jnp.tanh(ops.matmul(x, p['b_re'])), None

    h, _ = jax.lax.scan(turn, h, None, length=3)
    return readout(p, h, x), h


class Case(NamedTuple):
    cell: Any
    params: dict
    carry: Any
    states: int = 1  # of the one group
    trace: Any = complex

    def run(self, ops):
        return functools.partial(self.cell, ops)


def only(*names):
    return {name: PARAMS[name] for name in names}


LAM = 0.5 * draw(N) + 0.5j * draw(N, seed=3)
WEIGHTS = {'b': draw(I, N) + 1j * draw(I, N, seed=4), 'c': draw(N, O) + 1j * draw(N, O, seed=5)}
TWO = {'h': H, 'v': V}
LRU = ('nu', 'theta', 'b_re', 'b_im', 'c_re', 'c_im')
CASES = {
    'natural': Case(natural, PARAMS, H),
    'complex_op': Case(complex_op, only(*LRU), H),
    'complex_parameters': Case(complex_parameters, {'lam': LAM, **WEIGHTS}, H),
    'turns': Case(turns, only('nu', 'theta', 'b_re', 'c_re', 'c_im', 'd'), H),
    'complex_input': Case(
        complex_input, only('nu', 'theta', 'b_re', 'c_re', 'c_im', 'd'), H, 2, float
    ),
    'modulus': Case(modulus, only(*LRU, 'd'), H, 2, float),
    'conjugate': Case(conjugate, only(*LRU, 'd'), H, 2, None),
    'own_rule': Case(own_rule, only(*LRU, 'd'), H, 2, float),
    'real_reads_complex': Case(real_reads_complex, only(*LRU), TWO, 3, float),
    'complex_reads_real': Case(complex_reads_real, only(*LRU, 'd'), TWO, 3, float),
    'real_state': Case(real_state, only(*LRU[:5]) | {'z': LAM}, V, 1, None),
}
XS, YS = draw(T, B, I, seed=6), draw(T, B, O, seed=7)
