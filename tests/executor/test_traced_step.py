"""A step by its parts gives what a loop over the whole step gives, each equation where it costs
least.
"""

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace
from braintrace import _jax
from braintrace._executor import TracedStep, even, traced_step
from tests.compare import assert_close
from tests.precision import float64  # noqa: F401

B, I, N, T = 3, 4, 5, 7
RNG = np.random.default_rng(0)


def draw(*shape):
    return jnp.asarray(RNG.normal(size=shape))


SHAPES = {'x': (I, N), 'xh': (I + N, N), 'gates': (I + N, 4 * N), 'h': (N, N)}


def weights():
    return {name: draw(*shape) / 2 for name, shape in SHAPES.items()}


def rnn(w, h, x):
    h = 0.8 * h + jnp.tanh(jnp.concatenate([x, h], -1) @ w['xh'])
    return h, h


def by_op(w, h, x):
    h = 0.8 * h + jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), w['xh']))
    return h, h


def lstm(w, hc, x):
    i, f, g, o = jnp.split(jnp.concatenate([x, hc[0]], -1) @ w['gates'], 4, -1)
    c = jax.nn.sigmoid(f) * hc[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def layers(w, hs, x):
    """The second layer reads the new state of the first, and writes to nobody below it."""
    one = jnp.tanh(hs[0] @ w['h'] + x @ w['x'])
    two = jnp.tanh(hs[1] @ w['h'] + one @ w['h'])
    return (one, two), two


def linear(w, h, x):
    z = jax.nn.sigmoid(x @ w['x'])
    h = (1 - z) * h + z * jnp.tanh(x @ w['x'])
    return h, h


def delay(w, hs, x):
    return (x @ w['x'], hs[0], hs[1] * 0 + 1), hs[1] + hs[2]


def random(w, state, x):
    key, h = state
    key, sub = jax.random.split(key)
    keep = jax.random.bernoulli(sub, 0.7, h.shape)
    h = jnp.tanh(jnp.where(keep, h, 0) @ w['h'] + x @ w['x'])
    return (key, h), h


def branch(w, h, x):
    h = lax.cond(x[0, 0] > 0, lambda h: jnp.tanh(h @ w['h']), lambda h: h / 2, h) + x @ w['x']
    y = lax.cond(h[0, 0] > 0, lambda h: jnp.log(h[0, 0]), lambda h: 1.0, h)
    return h, h * y


def zeros(w, h, x):
    """Numbers that are equal and not the same."""
    return h / 2 + x @ w['x'], jnp.copysign(h, 0.0) + 3 * jnp.copysign(h, -0.0)


def constant(w, h, x):
    return h, h * 2 + x @ w['x']


def leaks(w, h, x):
    """Constants of a unit and of a lane, repeated alone, together, twice, and as numbers."""
    leak = jax.nn.sigmoid(w['x'][0] * 2)
    whole = jnp.exp(-jnp.broadcast_to(leak, h.shape)) * jnp.ones_like(h)
    lanes = jnp.broadcast_to(w['h'][:B, :1], h.shape) + 1
    both = jnp.where(whole > 0.6, whole * lanes, jnp.zeros_like(h)) + leak[None] * whole
    twice = jnp.broadcast_to(jnp.tanh(jnp.broadcast_to(leak, (1, N))), h.shape)
    halves = jnp.full_like(h, 0.5) * jnp.full_like(h, -0.5)
    h = whole * h + both * twice + halves + x @ w['x']
    return h, h * whole


H = np.full((B, N), 0.1)
KEYS = {f'random_{kind}': jax.random.key(1, impl=kind) for kind in ('rbg', 'unsafe_rbg')}
STEPS = {
    'leaks': (leaks, H),
    'rnn': (rnn, H),
    'by_op': (by_op, H),
    'lstm': (lstm, (H, H)),
    'layers': (layers, (H, H)),
    'linear': (linear, H),
    'delay': (delay, (H, H, H)),
    'random': (random, (jax.random.key(1), H)),
    **{name: (random, (key, H)) for name, key in KEYS.items()},
    'zeros': (zeros, H),
    'branch': (branch, H),
    'constant': (constant, H),
}


def step_and_state(name):
    step, state = STEPS[name]
    return step, jax.tree.map(jnp.asarray, state)


def parts_of(step):
    """``step`` as :class:`TracedStep` takes it: a term by a product, one of another kind."""

    def run(w, state, x):
        new, y = step(w, state, x)
        terms = {'product': y.T @ y, 'sum': y.sum(0), 'wide': jnp.outer(y[0], y[1])}
        return new, terms, y, (y * x[:, :1], x)

    return run


def expected(step, w, state, xs, counts):
    """The same by a loop over the whole step."""

    def body(state, at):
        x, counted = at
        state, terms, shown, opened = parts_of(step)(w, state, x)
        return state, (jax.tree.map(lambda a: jnp.where(counted, a, 0), terms), shown, opened)

    state, (terms, shown, opened) = lax.scan(body, state, (xs, counts))
    return state, jax.tree.map(lambda a: a.sum(0), terms), shown, opened


@pytest.mark.tier(quick=5)
@pytest.mark.parametrize('length', [1, T])
@pytest.mark.parametrize('size', ['whole', 'blocks'])
@pytest.mark.parametrize('name', STEPS)
def test_the_parts_give_what_the_whole_step_gives(name, size, length, monkeypatch):
    step, state = step_and_state(name)
    w, xs = weights(), draw(length, B, I)
    counts = jnp.arange(length) % 3 != 1
    if size == 'blocks':  # of three steps, and one is left
        monkeypatch.setattr(traced_step, 'most_steps', lambda bytes_of_one: 3)
    traced = TracedStep(parts_of(step), w, state, xs[0])
    state_, terms, shown, steps = jax.jit(
        lambda *args: (*(got := traced.loop(*args, length, counts))[:3], got[3].all)
    )(w, state, xs)
    wanted = expected(step, w, state, xs, counts)
    for got, want in zip((state_, terms, shown, steps), wanted, strict=True):
        got, want = (jax.tree.map(numbers, tree) for tree in (got, want))
        assert_close(got, want, relative=1e-12, absolute=1e-14)


def numbers(a):
    return jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a


def loops_of(step, state):
    """The names of the equations in each loop."""
    traced = TracedStep(parts_of(step), weights(), state, draw(B, I))
    return [[eqn.primitive.name for eqn in loop.equations] for loop in traced.parts.loops]


def test_a_loop_holds_the_products_with_its_state_alone():
    """Layers run one after another, and the product between them is outside."""
    for name, number in (('rnn', 1), ('by_op', 1), ('lstm', 1), ('layers', 2)):
        loops = loops_of(*step_and_state(name))
        assert [loop.count('dot_general') for loop in loops] == [1] * number
        assert not any('concatenate' in loop for loop in loops)
    (equations,) = loops_of(*step_and_state('linear'))
    assert not {'dot_general', 'logistic', 'tanh'}.intersection(equations)


def test_a_loop_reads_no_constant_of_a_lanes_size():
    """A leak of each unit is repeated for the lanes inside of the loop."""

    def step(w, h, x):
        leak = jnp.exp(-jnp.exp(w['x'][0]))
        h = jnp.sqrt(1 - jnp.broadcast_to(leak, h.shape) ** 2) * h + x @ w['x']
        return h, (), h, leak * jnp.ones_like(h)

    w, xs = weights(), draw(T, B, I)
    traced = TracedStep(step, w, draw(B, N), xs[0])
    made = jax.make_jaxpr(lambda w, h, xs: traced.loop(w, h, xs, T)[:3])(w, draw(B, N), xs)
    (scan,) = (e for e in jaxpr_equations(made.jaxpr) if e.primitive.name == 'scan')
    given = [v.aval.shape for v in _jax.scan_parts(scan).split(scan.invars)[0]]
    assert given and (B, N) not in given


def jaxpr_equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in _jax.sub_jaxprs(eqn.params):
            yield from jaxpr_equations(_jax.closed_jaxpr(inner)[0])


def test_what_no_state_needs_is_stored_as_little_as_possible():
    """Derivatives of gates follow from the gates."""

    def step(w, hc, x):
        new, h = lstm(w, hc, x)
        return new, (), (), jax.grad(lambda hc: jnp.sum(lstm(w, hc, x)[0][1]))(hc)[1] * 3 + h

    traced = TracedStep(step, weights(), step_and_state('lstm')[1], draw(B, I))
    assert traced.row_bytes <= 5 * B * N * 8


def test_gates_of_a_sum_of_very_many_terms_wait_for_the_carry_alone():
    """However long the sum is, its products with inputs are outside of the loop."""

    def step(w, h, x):
        gates, drive = h @ w['gates'][I:], x @ w['gates'][:I]
        for _ in range(1100):
            gates = gates + drive
        i, f, g, o = jnp.split(gates, 4, -1)
        h = jnp.tanh(i + f) * jax.nn.sigmoid(g - o)
        return h, (), h, ()

    traced = TracedStep(step, weights(), jnp.ones((B, N)), draw(B, I))
    (loop,) = traced.parts.loops
    assert [eqn.primitive.name for eqn in loop.equations].count('dot_general') == 1


def test_a_product_that_a_sum_reads_in_many_ways_is_made_once():
    def step(w, h, x):
        total = x.T @ h
        for _ in range(6):
            total = total + total[::-1]
        return h + x @ w['x'], total, (), ()

    w, h, xs = weights(), draw(B, N), draw(T, B, I)
    traced = TracedStep(step, w, h, xs[0])
    made = jax.make_jaxpr(lambda w, h, xs: traced.loop(w, h, xs, T)[1])(w, h, xs)
    products = [e for e in jaxpr_equations(made.jaxpr) if e.primitive.name == 'dot_general']
    assert len(products) == 2  # that of the sum, and ``x @ w``


def test_each_effect_happens_as_often_as_it_is_written():
    calls = []

    def counted(_):
        calls.append(0)
        return np.float64(len(calls))

    def step(w, h, x):
        like = jax.ShapeDtypeStruct((), jnp.float64)
        u, v = (jax.experimental.io_callback(counted, like, 1.0, ordered=True) for _ in 'uv')
        return h + u - v, (), u, v

    w, xs, first = weights(), draw(T, B, I), jnp.zeros((B, N))
    traced = TracedStep(step, w, first, xs[0])
    state, u, v = jax.jit(lambda *args: (*(got := traced.loop(*args, T))[:1], got[2], got[3].all))(
        w, first, xs
    )
    assert len(calls) == 2 * T
    assert_close(state, jnp.full((B, N), -T))
    assert_close((u, v), (jnp.arange(1.0, 2 * T, 2), jnp.arange(2.0, 2 * T + 1, 2)))


def test_a_differentiable_loop_keeps_the_rules_of_its_functions():
    @jax.custom_jvp
    def spike(v):
        return (v > 0).astype(v.dtype)

    spike.defjvp(lambda primals, tangents: (spike(*primals), 3.0 * tangents[0]))

    def step(w, h, x):
        h = 0.5 * h + spike(x @ w['x'])
        return h, (), h, ()

    w, xs, first = weights(), draw(T, B, I), jnp.ones((B, N))

    def total(w, loop):
        return loop(w).sum()

    traced = TracedStep(step, w, first, xs[0], differentiable=True)
    got = jax.grad(total)(w, lambda w: traced.loop(w, first, xs, T)[2])
    want = jax.grad(total)(w, lambda w: lax.scan(lambda h, x: step(w, h, x)[::2], first, xs)[1])
    assert jnp.any(want['x'] != 0)
    assert_close(got, want)


def test_parts_are_even_where_that_does_not_double_their_number():
    assert [even(12, 5), even(13, 5), even(7, 100), even(100, 32)] == [4, 5, 7, 25]
