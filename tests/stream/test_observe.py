"""What is shown of each update: norms and the like, as arrays, without a callback."""

import jax
import jax.numpy as jnp
import optax
import pytest

from braintrace import functional
from tests.compare import assert_close
from tests.functional.plain import D_RTRL, N, cell, data, drawn, loss, params

OPTIMIZER = optax.sgd(0.01)


def norm(tree):
    return jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(tree)))


def seen(grads, state):
    return {'grad': norm(grads), 'h': state.carry[0], 't': state.t}


def run(jit, **options):
    learner, (xs, ys) = functional.online(cell, D_RTRL), data()
    given = params(), OPTIMIZER.init(params()), learner.init(params(), drawn(2, N), xs[0]), xs, ys
    learn = learner.sequence_update(loss, OPTIMIZER, **options)
    return (jax.jit(learn) if jit else learn)(*given)


@pytest.mark.slow
@pytest.mark.parametrize('jit', [True, False])
def test_there_is_a_row_for_each_update(jit):
    """T is 5: with ``update_every=2`` there are three updates, the last one of a single step."""
    p, losses, _, state, *_, shown = run(jit, update_every=2, observe=seen)
    plain = run(True, update_every=2)
    assert_close((p, losses), (plain.params, plain.losses), 1e-6)
    assert shown['grad'].shape == (3,) and shown['h'].shape == (3, N)
    assert shown['t'].tolist() == [[2, 2], [4, 4], [5, 5]]
    assert_close(shown['h'][-1], state.carry[0], 1e-6)
    xs, ys = data()
    learner = functional.online(cell, D_RTRL)
    first = learner.init(params(), drawn(2, N), xs[0])
    grads, *_ = learner.sequence_grad(loss)(params(), first, xs[:2], ys[:2])
    assert_close(shown['grad'][0], norm(grads), 1e-5)


@pytest.mark.slow
def test_a_row_is_kept_once_for_each_update_and_not_for_each_step():
    learner, length = functional.online(cell, D_RTRL), 40
    xs, ys = drawn(length, 2, 3), drawn(length, 2, 2)
    given = params(), OPTIMIZER.init(params()), learner.init(params(), drawn(2, N), xs[0]), xs, ys
    row = lambda grads, state: jnp.ones(1000) * norm(grads)
    learn = learner.sequence_update(loss, OPTIMIZER, update_every=20, observe=row)
    text = jax.jit(learn).lower(*given).as_text()
    assert '2x1000x' in text and '20x1000x' not in text and '40x1000x' not in text
