"""Labels of positions against real derivatives: the non-zero entries of Jacobians."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace._compiler import equations as lb
from braintrace._compiler.analysis.pairs import DPass, WayBack
from braintrace._compiler.equations import backward
from braintrace._compiler.policy import Policy
from braintrace._compiler.program.flatten import Lowering, flatten
from braintrace._compiler.program.tracing import trace_step
from tests.precision import float64 as float64

X = np.random.default_rng(0).uniform(0.3, 0.9, (3, 4))


@jax.custom_jvp
def spike(v):
    return (v > 0.5).astype(v.dtype)


@spike.defjvp
def _spike_jvp(primals, tangents):
    return spike(primals[0]), tangents[0] / (1 + primals[0] ** 2)


def with_backward(backward):
    """``2 v``, whose cotangent goes through ``backward(v, g)``."""
    fn = jax.custom_vjp(lambda v: v * 2)
    fn.defvjp(lambda v: (v * 2, v), lambda v, g: (backward(v, g),))
    return fn


FUNCTIONS = {
    'tanh': jnp.tanh,
    'reshape': lambda x: x.reshape(2, 6),
    'transpose': lambda x: x.T,
    'reverse': lambda x: x[::-1, ::-1],
    'slice': lambda x: x[1:, ::2],
    'one column': lambda x: x[:, 1],
    'split and join': lambda x: jnp.concatenate([x[:, 2:], x[:, :2]], -1),
    'roll': lambda x: jnp.roll(x, 1, 0),
    'pad': lambda x: jnp.pad(x, ((1, 0), (0, 2))),
    'interior pad': lambda x: jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 1, 2), (-1, 0, 0)]),
    'gather': lambda x: x[:, jnp.array([2, 0, 2])],
    'broadcast': lambda x: jnp.broadcast_to(x[:, None], (3, 2, 4)),
    'tile': lambda x: jnp.tile(x, (1, 2)),
    'sum': lambda x: x.sum(-1),
    'mean subtracted': lambda x: x - x.mean(-1, keepdims=True),
    'where': lambda x: jnp.where(x > 0.5, x, x * x),
    'predicate only': lambda x: jnp.where(x.mean() > 0, jnp.ones(4), 0 * x[0]),
    'spike': spike,
    'relu': jax.nn.relu,
    'scaled backward': with_backward(lambda v, g: g * v),
    'rolled backward': with_backward(lambda v, g: jnp.roll(g, 1, -1)),
    'stopped norm': lambda x: x / jax.lax.stop_gradient(jnp.linalg.norm(x)),
    'squeeze': lambda x: x[:, None, :1].squeeze(1),
    'stack': lambda x: jnp.stack([x, x[::-1]]),
    'clip': lambda x: jnp.clip(x, 0.1, 0.8),
    'softmax': lambda x: jax.nn.softmax(x),
    'cumsum': lambda x: jnp.cumsum(x, -1),
    'dot': lambda x: x @ jnp.ones((4, 2)),
    'max': lambda x: x.max(-1),
    'sorted': jnp.sort,
}


def program_of(step, carry, inputs):
    step = trace_step(step, {}, carry, inputs)
    return flatten(step, Lowering(Policy()), lambda *_: True, lambda *_: True)


def followed(fn, x):
    """Labels of the input's cotangent, followed backwards through ``fn`` from its own positions."""
    program = program_of(lambda p, c, x: (fn(x), c), {}, (x,))
    known = program.constants
    labels = {program.outputs[0]: lb.identity(program.avals[program.outputs[0]].shape)}
    for eqn in reversed(program.equations):
        got = backward(
            eqn,
            program.avals,
            [labels.get(o) for o in eqn.outs],
            [known.get(i) for i in eqn.ins],
            [i not in known for i in eqn.ins],
        )
        for i, lab in zip(eqn.ins, got):
            if lab is not None:
                labels[i] = lb.merge(labels.get(i), lab)
    return labels.get(program.inputs[0], lb.nothing(x.shape))


SPREADING = {'softmax', 'cumsum', 'dot', 'sorted', 'mean subtracted', 'broadcast', 'tile', 'stack'}
MERGING = {'max', 'sum', 'gather'}  # which may be followed or called mixing
COMBINING = {'softmax', 'cumsum', 'dot', 'sorted', 'mean subtracted'}


@pytest.mark.tier(quick=5)
@pytest.mark.parametrize('name', FUNCTIONS)
def test_a_single_label_is_the_one_output_that_depends_on_the_element(name):
    """What moves elements alone is never called mixing, what spreads one is."""
    fn = FUNCTIONS[name]
    labels = followed(fn, X).reshape(-1)
    jacobian = np.asarray(jax.jacrev(fn)(jnp.asarray(X))).reshape(-1, X.size)
    for element, label in enumerate(labels):
        reached, told = set(np.nonzero(jacobian[:, element])[0]), {label} - {lb.NONE}
        assert label == lb.MANY or reached <= told, (element, label, reached)
    assert name in MERGING or (labels == lb.MANY).any() == (name in SPREADING)


@pytest.mark.tier(quick=5)
@pytest.mark.parametrize('name', FUNCTIONS)
def test_the_pairs_on_the_way_back_are_the_elements_that_a_result_depends_on(name):
    fn = FUNCTIONS[name]
    program = program_of(lambda p, c: (fn(c), c), X, ())
    d_pass = DPass(program)
    way = WayBack(d_pass, program.outputs[0], d_pass.depends[program.carry[0]])
    pairs = way.found.get(program.carry[0], np.arange(0))
    told = {divmod(pair, way.size) for pair in pairs.tolist()}
    jacobian = np.asarray(jax.jacrev(fn)(jnp.asarray(X))).reshape(-1, X.size)
    missing = {(e, r) for r, e in np.argwhere(jacobian).tolist()} - told
    assert all(way.lost[result] for _, result in missing)
    assert bool(missing) == (name in COMBINING)


def test_a_backward_that_is_not_linear_in_its_cotangent_is_mixing():
    clipped = with_backward(lambda v, g: jnp.clip(g, -1, 1))
    assert (followed(clipped, X) == lb.MANY).all()


def test_merge_keeps_equal_and_lone_labels():
    a, b = np.array([lb.NONE, 1, 2, lb.MANY, lb.NONE]), np.array([3, 1, 4, 0, lb.NONE])
    assert lb.merge(a, b).tolist() == [3, 1, lb.MANY, lb.MANY, lb.NONE]
    assert lb.merge(None, b) is b
