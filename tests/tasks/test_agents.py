"""The trace of decisions is the sum that defines it, and bounded steps have the published size."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional
from braintrace.errors import OptionError, StructureError
from braintrace.tasks.agents import eligibility, obgd
from tests.compare import assert_close
from tests.functional.plain import drawn
from tests.precision import float64 as float64

B, T = 3, 50
pytestmark = pytest.mark.usefixtures('float64')


def params():
    return {'w': drawn(2, 4), 'b': drawn(4), 'places': jnp.arange(2)}


def grads(*shape):
    return {
        'w': drawn(*shape, B, 2, 4),
        'b': drawn(*shape, B, 4, seed=1),
        'places': np.zeros((*shape, B, 2), jax.dtypes.float0),
    }


def test_the_trace_is_the_sum_over_the_episode_until_now():
    z_of, every = eligibility(0.9), grads(T)
    going_on = jnp.ones((T, B)).at[jnp.array([7, 20, 41]), jnp.array([0, 1, 0])].set(0)
    z = z_of.init(params(), B)
    update, weigh = jax.jit(z_of.update), jax.jit(z_of.weigh)
    for t in range(T):
        z = update(z, jax.tree.map(lambda g, t=t: g[t], every), going_on[t])
    begun = [max([0, *np.flatnonzero(going_on[:, b] == 0)]) for b in range(B)]
    assert begun == [41, 20, 0]
    delta = drawn(B)
    for name in ('w', 'b'):
        of_sample = [
            sum(0.9 ** (T - 1 - s) * every[name][s, b] for s in range(begun[b], T))
            for b in range(B)
        ]
        np.testing.assert_allclose(z[name], np.stack(of_sample), atol=1e-10)
        want = sum(float(d) * e for d, e in zip(delta, of_sample, strict=True)) / B
        np.testing.assert_allclose(weigh(z, delta)[name], want, atol=1e-10)


def exact(p, h, x):
    a = braintrace.element_wise(p['a'], jax.nn.sigmoid)
    h = a * h + jnp.tanh(braintrace.matmul(x, p['w']))
    return h @ p['out'], h


def test_what_td_errors_weigh_along_episodes_is_the_gradient_of_their_advantages():
    """With weights held still the two views of TD(lambda) are one (Sutton and Barto, 12.2): the
    other one here is reverse mode through the episodes, in JAX alone.
    """
    steps, discount, fading = 12, 0.95, 0.8
    p = {'a': drawn(4), 'w': drawn(2, 4), 'out': drawn(4, 2)}
    xs, rewards, start = drawn(steps, B, 2), drawn(steps, B, seed=2), drawn(B, 4)
    ended = jnp.zeros((steps, B), bool).at[jnp.array([4, 8]), jnp.array([0, 2])].set(True)
    decision = lambda y, _: jnp.sin(y[0]) + 0.5 * y[1]

    learner, z_of = functional.online(exact), eligibility(discount * fading)
    state, z = jax.vmap(learner.init, (None, 0, 0))(p, start, xs[0]), z_of.init(p, B)
    heads = jax.jit(jax.vmap(learner.heads(decision), (None, 0, 0, 0)))
    found, values, going_on = jax.tree.map(jnp.zeros_like, p), [], jnp.zeros(B)
    for t in range(steps):
        (g,), _, y, state = heads(p, state, xs[t], xs[t])
        values.append(y[:, 1])
        if t:
            delta = rewards[t - 1] + discount * going_on * values[t] - values[t - 1]
            found = jax.tree.map(jnp.add, found, z_of.weigh(z, delta))
        z = z_of.update(z, g, going_on)
        state, going_on = jax.vmap(functional.reset)(state, ended[t], start), 1.0 - ended[t]

    advantage, later = [], np.zeros(B)
    for t in reversed(range(steps - 1)):
        on = np.where(ended[t], 0.0, 1.0)
        later = (
            rewards[t] + discount * on * values[t + 1] - values[t] + discount * fading * on * later
        )
        advantage.insert(0, later)

    def gain(p):
        h, total = start, 0.0
        for t in range(steps - 1):
            h = jax.nn.sigmoid(p['a']) * h + jnp.tanh(xs[t] @ p['w'])
            y = h @ p['out']
            total += jnp.mean(advantage[t] * (jnp.sin(y[:, 0]) + 0.5 * y[:, 1]))
            h = jnp.where(ended[t][:, None], start, h)
        return total

    assert_close(found, jax.grad(gain)(p))


def test_a_bounded_step_is_that_of_the_paper_for_each_sample():
    z_of, rate, kappa = eligibility(0.9), 0.7, 2.0
    z = z_of.update(z_of.init(params(), B), grads(), jnp.ones(B))
    sizes = jnp.array([1e-3, 1, 0])
    scaled = lambda e: e if e.dtype == bool else e * sizes.reshape(-1, *(1,) * (e.ndim - 1))
    z = jax.tree.map(scaled, z)
    delta, optimizer = jnp.array([0.5, -3.0, 2.0]), obgd(rate, kappa)
    updates, _ = optimizer.update(z, optimizer.init(params()), params(), delta=delta)
    want = {'w': 0.0, 'b': 0.0}
    for b in range(B):
        of_sample = {name: np.asarray(z[name][b]) for name in want}
        size = sum(np.abs(e).sum() for e in of_sample.values())
        bounded = rate * kappa * max(abs(float(delta[b])), 1) * size
        alpha = min(rate / bounded, rate) if size else rate
        want = {n: want[n] + alpha * float(delta[b]) * of_sample[n] / B for n in want}
    assert_close({name: updates[name] for name in want}, want)
    after = optax.apply_updates(params(), updates)
    assert (after['places'] == params()['places']).all()


def test_a_bounded_step_is_part_of_a_chain_of_optax():
    z_of = eligibility(0.5)
    z = z_of.update(z_of.init(params(), B), grads(), jnp.ones(B))
    chain = optax.chain(obgd(), optax.scale(2.0))
    updates, _ = chain.update(z, chain.init(params()), params(), delta=jnp.ones(B))
    alone, _ = obgd().update(z, obgd().init(params()), delta=jnp.ones(B))
    assert_close(updates['w'], 2 * alone['w'])


@pytest.mark.parametrize('dtype', ['int32', 'float16', 'bfloat16', 'float32'])
def test_a_bounded_step_is_that_of_the_paper_in_any_dtype(dtype):
    """The size of z, 409600, is above the largest float16, and the step below its resolution."""
    z = {'w': jnp.full((1, 4096), 100, 'float16' if dtype == 'float16' else 'float32')}
    updates, _ = obgd(1.0, 2.0).update(z, None, delta=jnp.array([3], dtype))
    np.testing.assert_allclose(updates['w'], 3 * 100 / (2 * 3 * 409600), rtol=2e-3)


def test_a_trace_in_bfloat16_fades_by_its_decay_and_not_by_the_nearest_bfloat16():
    held = {'w': jnp.full((1, 2), 256, jnp.bfloat16)}
    z = eligibility(0.983).update(held, {'w': jnp.zeros((1, 2))}, jnp.ones(1, jnp.bfloat16))
    assert z['w'].dtype == jnp.bfloat16 and z['w'].tolist() == [[252, 252]]  # of 251.6
    text = r'trace of w is bfloat16.*a decay of 0.999.*float32'
    for decay in (0.999, jnp.float32(0.999)):
        with pytest.raises(StructureError, match=text):
            jax.jit(eligibility(decay).update)(held, held, jnp.ones(1))
    assert eligibility(1.0).update(held, held, jnp.ones(1))['w'].tolist() == [[512, 512]]


OPTIONS = {  # what is said -> what is asked
    'from 0 to 1': lambda: eligibility(1.5),
    "decay is 'a'": lambda: eligibility('a'),
    'rate is 0.0': lambda: obgd(0.0),
    'kappa is -1': lambda: obgd(1.0, -1),
    'batch_size is 0': lambda: eligibility(0.9).init(params(), 0),
    'delta=delta': lambda: obgd().update({'w': jnp.ones((2, 3))}, None),
}
STRUCTURES = {
    r'going_on has shape \[2\], and the trace \[\[3': lambda: updated(going_on=jnp.ones(2)),
    'gradient of b.*jax.vmap': lambda: updated(params()),
    'structure': lambda: updated({'w': drawn(B, 2, 4)}),
    r'delta has shape \[3, 1\]': lambda: stepped((B, 2), (B, 1)),
    'axis 0 is these samples': lambda: stepped((4,), (B,)),
    r"decay is \{'w': 0.9\}, a tree of another structure": lambda: updated(decay={'w': 0.9}),
    r'delta has shape \[\]': lambda: eligibility(0.9).weigh(updated(), jnp.ones(())),
}


def stepped(z, delta):
    return obgd().update({'w': jnp.ones(z)}, 0, delta=jnp.ones(delta))


def updated(given=None, going_on=None, decay=0.9):
    z_of, going_on = eligibility(decay), jnp.ones(B) if going_on is None else going_on
    return z_of.update(z_of.init(params(), B), given or grads(), going_on)


@pytest.mark.parametrize('words', OPTIONS | STRUCTURES)
def test_what_does_not_fit_is_refused(words):
    with pytest.raises(OptionError if words in OPTIONS else StructureError, match=words):
        (OPTIONS | STRUCTURES)[words]()
