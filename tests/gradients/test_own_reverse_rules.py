"""Functions with a reverse rule of the user's own: a trace holds derivatives, so where such a rule
is not linear in what comes back the report says that something is lost.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import Policy, nn, rules
from braintrace.errors import UntracedParameterError
from tests import oracles
from tests.compare import assert_close, assert_moves, errors
from tests.gradients.harness import learn, of_shapes
from tests.models import squared

D_RTRL, RTRL = rules.d_rtrl(), rules.rtrl()
WIDE = [RTRL, rules.snap(2), rules.signs('all'), rules.uoro()]
P = {'w': np.array([[0.3, -0.5]]), 'out': np.array([[0.9, -0.4], [0.2, 0.7]])}
H = np.zeros((1, 2))
XS, YS = np.ones((5, 1, 1)), np.ones((5, 1, 2))


def own(rule):
    """The identity with another reverse rule ``(x, g) -> cotangent``."""

    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, x), lambda x, g: (rule(x, g),))
    return same


def halved(g):
    return jax.lax.while_loop(lambda g: jnp.abs(g).max() > 0.1, lambda g: 0.5 * g, g)


def turned(x, g):
    return jax.lax.scan(lambda g, _: (g * jnp.cos(x), None), g, None, length=3)[0]


clip = own(lambda x, g: jnp.clip(g, -0.1, 0.1))
# each bends what comes back, also where a choice between numbers does
BENT = {
    'clip': clip,
    'clip in a checkpoint': jax.checkpoint(clip),
    'large ones dropped': own(lambda x, g: jnp.where(jnp.abs(g) > 0.1, 0.0, g)),
    'small ones dropped': own(lambda x, g: g * (jnp.abs(g) > 0.1)),
    'normalised': own(lambda x, g: g / jnp.linalg.norm(g)),
    'halved until small': own(lambda x, g: halved(g)),
    'by the largest': own(lambda x, g: g * (jnp.argmax(g) + 1)),
    'its side alone': own(lambda x, g: 0.1 * (g > 0.0)),
    'something added': own(lambda x, g: g + 0.5),
    'a number in its place': own(lambda x, g: jnp.ones_like(g)),
    'decay of what it reads': own(lambda x, g: g + 0.1 * x),
    'one entry set': own(lambda x, g: g.at[..., 0].set(0.2)),
    'another number in a branch': own(
        lambda x, g: jax.lax.cond(x.sum() > 0, lambda: g, lambda: 0.5 + 0.0 * g)
    ),
    'in a branch': own(lambda x, g: jax.lax.cond(g.sum() > 0.1, lambda: g, lambda: 0.5 * g)),
}
STRAIGHT = {
    'surrogate': own(lambda x, g: g / (1.0 + jnp.abs(x)) * jnp.where(x > 0, 0.5, 1.0)),
    'finite': own(lambda x, g: jnp.where(jnp.isfinite(g), g, 0.0)),
    'loop': own(turned),
    'one entry dropped': own(lambda x, g: g.at[..., 0].set(0.0)),
    'a branch without': own(
        lambda x, g: jax.lax.cond(x.sum() > 0, lambda: g, lambda: jnp.zeros_like(g))
    ),
}
MATRIX = own(lambda x, g: jnp.cumsum(g @ jnp.ones((2, 2)), 1)[:, ::-1].at[:, 0].add(g[:, 1]))


def near(v):
    return jnp.abs(v) < 1


ZEROS = np.zeros((1, 2))
# ways in which surrogates are written, ``(x, g) -> cotangent``
WAYS = {
    'where 0': lambda v, g: jnp.where(near(v), g, 0),
    'where 0.0': lambda v, g: jnp.where(near(v), g, 0.0),
    'where False': lambda v, g: jnp.where(near(v), g, False),
    'where 0 first': lambda v, g: jnp.where(~near(v), 0, g),
    'where a zero of NumPy': lambda v, g: jnp.where(near(v), g, np.int32(0)),
    'where an array of 0': lambda v, g: jnp.where(near(v), g, jnp.array(0)),
    'where zeros like it': lambda v, g: jnp.where(near(v), g, jnp.zeros_like(g)),
    'where integer zeros': lambda v, g: jnp.where(near(v), g, jnp.zeros(v.shape, int)),
    'where zeros of the closure': lambda v, g: jnp.where(near(v), g, ZEROS),
    'where integer zeros of the closure': lambda v, g: jnp.where(near(v), g, ZEROS.astype(int)),
    'where False of the closure': lambda v, g: jnp.where(near(v), g, ZEROS.astype(bool)),
    'where a zero is repeated': lambda v, g: jnp.where(near(v), g, jnp.broadcast_to(0, g.shape)),
    'where nothing of it': lambda v, g: jnp.where(near(v), g, 0 * g),
    'lax.select': lambda v, g: jax.lax.select(near(v), g, jnp.zeros_like(g)),
    'lax.select of cast zeros': lambda v, g: jax.lax.select(
        near(v), g, jnp.zeros(v.shape, int).astype(g.dtype)
    ),
    'jnp.select': lambda v, g: jnp.select([jnp.abs(v) < 0.3, near(v)], [g, 0.5 * g], default=0),
    'piecewise': lambda v, g: g * jnp.piecewise(v, [near(v)], [1, 0]),
    'times bool': lambda v, g: g * near(v),
    'bool times': lambda v, g: near(v) * g,
    'times integers': lambda v, g: g * near(v).astype(int),
    'times a choice of integers': lambda v, g: g * (jnp.where(near(v), 4, 0) // 2),
    'triangle': lambda v, g: g * jnp.maximum(0, 1 - jnp.abs(v)),
    'clip of the potential': lambda v, g: g * jnp.clip(1 - jnp.abs(v), 0, 1),
    'less what is far': lambda v, g: g - jnp.where(near(v), 0, g),
    'set to 0': lambda v, g: (g * near(v)).at[:, 0].set(0),
    'put together': lambda v, g: jnp.concatenate([jnp.zeros((1, 1), int), g[:, 1:]], 1),
    'jit in a jit': lambda v, g: jax.jit(
        lambda g, z: jax.jit(lambda z: jnp.where(near(v), g, z))(z)
    )(g, 0),
    'vmap': jax.vmap(jax.vmap(lambda v, g: jnp.where(near(v), g, 0))),
    'einsum': lambda v, g: jnp.einsum('bi,bi->bi', g, near(v).astype(g.dtype)),
    'branch': lambda v, g: jax.lax.cond(
        v.sum() > -9, lambda g: jnp.where(near(v), g, 0), lambda g: jnp.zeros_like(g), g
    ),
    'switch': lambda v, g: jax.lax.switch(
        (v.sum() > 0).astype(int), [lambda g: g * near(v), lambda g: jnp.where(near(v), g, 0)], g
    ),
    'loop': lambda v, g: jax.lax.fori_loop(
        0, 3, lambda i, a: a + jnp.where(near(v), g, 0) * (i == 1), jnp.zeros_like(g)
    ),
    'integers in a while loop': lambda v, g: (
        g * near(v) * jax.lax.while_loop(lambda i: i < 3, lambda i: i + 1, 0)
    ),
    'stopped': lambda v, g: jax.lax.stop_gradient(jnp.where(near(v), g, 0)),
    'no number at all': lambda v, g: jnp.where(jnp.isnan(g), 0, g) * near(v),
}
OF_COTANGENTS = {'stopped', 'no number at all'}  # which reverse mode can not turn round


def fires(v):
    return (v > 0).astype(v.dtype)


def by_vjp(rule):
    spike = jax.custom_vjp(fires)
    spike.defvjp(lambda v: (fires(v), v), lambda v, g: (rule(v, g),))
    return spike


def by_jvp(rule):
    spike = jax.custom_jvp(fires)
    spike.defjvp(lambda v, t: (fires(*v), rule(*v, *t)))
    return spike


def with_counts(integers, of_integers):
    """A function that reads integers too, and what its rule returns for them."""

    @jax.custom_vjp
    def spike(v, k):
        return fires(v) * k

    def backward(saved, g):
        v, k = saved
        return jnp.where(near(v), g, 0) * k, of_integers(k)

    spike.defvjp(lambda v, k: (spike(v, k), (v, k)), backward)
    return lambda v: spike(v, integers(v))


def no_tangent(k):
    return np.zeros(k.shape, jax.dtypes.float0)


SPIKES = {
    **{f'{name}, vjp': by_vjp(rule) for name, rule in WAYS.items()},
    **{f'{name}, jvp': by_jvp(rule) for name, rule in WAYS.items() if name not in OF_COTANGENTS},
    'an integer': with_counts(lambda v: jnp.arange(1, 3), lambda k: None),
    'an integer of float0': with_counts(lambda v: jnp.arange(1, 3), no_tangent),
    'an integer of the state': with_counts(lambda v: (v > 0.1).astype(int) + 1, no_tangent),
    'a bool of the state': with_counts(lambda v: v > 0.1, lambda k: None),
}


PARTS = 6


@pytest.mark.slow
@pytest.mark.parametrize('part', range(PARTS))
def test_a_surrogate_keeps_the_whole_history_however_it_is_written(part):
    """Layers side by side in one cell, each with a surrogate of its own."""
    names = list(SPIKES)[part::PARTS]

    def cell(p, c, x):
        c = {n: 0.9 * v + x @ p[n]['w'] - 0.3 * SPIKES[n](v - 0.3) for n, v in c.items()}
        return jnp.stack([v @ p[n]['out'] for n, v in c.items()]), c

    ys = np.ones((5, len(names), 1, 2))
    data = dict.fromkeys(names, P), dict.fromkeys(names, H), XS, ys
    got, learner = learn(cell, D_RTRL, *data, window=2, mark='auto')
    assert not [row.path for row in learner.report.parameters if row.left_out]
    assert learner.report.exact
    assert_close(got, oracles.by_time(cell, *data, squared))


def at_the_state(f):
    return cell_of(lambda p, h, x: f(0.9 * h) + x @ p['w'])


def at_the_result(f):
    return cell_of(lambda p, h, x: 0.9 * h + f(x @ p['w']))


def at_the_weight(f):
    return cell_of(lambda p, h, x: 0.9 * h + x @ f(p['w']))


def cell_of(drive, readout=lambda y: y):
    def cell(p, h, x):
        h = jnp.tanh(drive(p, h, x))
        return readout(h @ p['out']), h

    return cell


def compiled(cell, rule):
    return of_shapes(cell, rule, P, H, XS[0], mark='auto')[0]


def gradients(cell, rule):
    """The learner's gradient, and that of reverse mode through the whole sequence."""
    data = P, H, XS, YS
    got, _ = learn(cell, rule, *data, window=2, mark='auto')
    return got, oracles.by_time(cell, *data, squared)


@pytest.mark.parametrize('name', BENT)
def test_a_rule_that_is_not_linear_is_told_of_by_every_rule_of_a_trace(name):
    assert not compiled(at_the_state(BENT[name]), D_RTRL).report.exact
    assert not compiled(at_the_state(BENT[name]), RTRL).report.exact


@pytest.mark.parametrize('rule', WIDE, ids=lambda rule: rule.name)
@pytest.mark.parametrize('place', [at_the_state, at_the_result, at_the_weight])
def test_a_clip_is_named_wherever_it_stands_and_strict_refuses_it(place, rule):
    learner = compiled(place(clip), rule)
    rows = {row.path: row for row in learner.report.parameters}
    assert rows['w'].history == 'part'
    assert any('linear' in left.text for left in rows['w'].left_out)
    assert [d.kind for d in learner.graph.diagnostics if d.level == 'warning'] == ['nonlinear-rule']
    with pytest.raises(UntracedParameterError, match='not known to be linear'):
        of_shapes(place(clip), rule, P, H, XS[0], mark='auto', policy=Policy(strict=True))


def test_a_clip_in_the_recurrence_is_what_a_trace_cannot_hold():
    got, want = gradients(at_the_state(clip), RTRL)
    found = errors(got, want)
    assert found["['w']"] > 1e-3
    assert found["['out']"] < 1e-12


@pytest.mark.parametrize('name', STRAIGHT)
def test_a_rule_that_is_linear_stays_exact(name):
    assert compiled(at_the_state(STRAIGHT[name]), RTRL).report.exact
    assert compiled(at_the_weight(STRAIGHT[name]), D_RTRL).report.exact


def test_a_linear_rule_that_mixes_positions_is_exact_where_a_trace_keeps_them_all():
    assert compiled(at_the_state(MATRIX), RTRL).report.exact
    assert not compiled(at_the_state(MATRIX), D_RTRL).report.exact


@pytest.mark.slow
@pytest.mark.parametrize('rule', [D_RTRL, RTRL], ids=lambda rule: rule.name)
def test_a_linear_rule_in_the_recurrence_has_the_gradient_of_reverse_mode(rule):
    cell = at_the_state(own(lambda x, g: 0.7 * g / (1.0 + jnp.abs(x))))
    assert_close(*gradients(cell, rule))


def test_a_clip_behind_the_state_takes_nothing_of_the_history():
    cell = cell_of(lambda p, h, x: 0.9 * h + x @ p['w'], clip)
    assert compiled(cell, RTRL).report.exact
    assert_close(*gradients(cell, RTRL))


# -- weights that are rounded in the forward pass --------------------------------------------------


def spiking(params, carry, x, product=jnp.matmul):
    """Two states behind the weights: a synapse, and a membrane that fires."""
    current, potential = carry
    current = 0.8 * current + product(x, params['w'])
    fired = nn.surrogate.triangle()(potential - 1.0)
    potential = 0.9 * potential * (1 - fired) + current
    return jnp.tanh(potential) @ params['out'], (current, potential)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('bits', [4, 8])
def test_the_trace_of_a_rounded_weight_is_that_of_the_network_with_that_weight(bits):
    """Straight through: backpropagation at the rounded weights, without any rounding."""
    rng, step = np.random.default_rng(0), 2.0 ** (1 - bits)
    params = {'w': rng.normal(size=(5, 3)), 'out': rng.normal(size=(3, 2))}
    data = (
        (np.zeros((2, 3)),) * 2,
        (rng.random((12, 2, 5)) < 0.5) * 1.0,
        rng.normal(size=(12, 2, 2)),
    )

    def cell(params, carry, x):
        w = params['w']
        rounded = w + jax.lax.stop_gradient(jnp.round(w / step) * step - w)
        return spiking(params | {'w': rounded}, carry, x, braintrace.matmul)

    got, _ = learn(cell, D_RTRL, params, *data, window=4)
    there = params | {'w': np.round(params['w'] / step) * step}
    assert np.abs(there['w'] - params['w']).max() > step / 4
    want = oracles.by_time(spiking, there, *data, squared)
    assert_moves(want)
    assert_close(got, want)
