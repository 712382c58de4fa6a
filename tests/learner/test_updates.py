"""What `etrace_train` shows of each update, and what it leaves out, as `sequence_update` does."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braintrace.errors import NotFiniteError, OptionError
from tests.compare import assert_close
from tests.learner.networks import BATCH, INPUTS, STEPS, UNITS, Layer, compiled
from tests.precision import float64 as float64

K, LANE, RATE = 3, 1, 0.1
OPTIMIZER = optax.sgd(RATE)


def data():
    xs = np.random.default_rng(0).normal(size=(STEPS, BATCH, INPUTS))
    xs[K, LANE, 0] = np.nan
    return xs


def by_hand(xs):
    """D-RTRL of ``Layer`` with the loss ``mean(h**2)``: the weights, the states, the size of each
    gradient; the update of step K is left out, and its lane starts anew.
    """
    w, sizes = np.full((INPUTS, UNITS), 0.5), []
    h, e = np.zeros((BATCH, UNITS)), np.zeros((BATCH, INPUTS))
    for t, x in enumerate(xs):
        h, e = 0.8 * h + x @ w, 0.8 * e + x
        grad = np.einsum('bi,bo->io', e, 2 * h / h.size)
        sizes.append(np.sqrt((grad**2).sum()))
        if t == K:
            h[LANE], e[LANE] = 0, 0
        else:
            w = w - RATE * grad
    return w, h, sizes


def trained(progress=False, **options):
    learner = compiled(model=Layer)

    def step_fn(x):
        h = learner(x)
        return jnp.mean(h**2), h[0]

    def seen(grads, state):
        return optax.tree.norm(grads), state.carry['h',]

    given = {'step_fn': step_fn, 'optimizer': OPTIMIZER, 'has_aux': True, 'observe': seen}
    found = learner.etrace_train(jnp.asarray(data()), **given, progress=progress, **options)
    return learner, found


def test_an_update_that_is_not_finite_is_left_out_and_its_sample_starts_anew():
    w, h, sizes = by_hand(data())
    rows = []
    learner, found = trained(lambda *told: rows.append(told[2][0]), not_finite='reset')
    norms, states = found.observed
    assert_close((learner.model.w.value, learner.model.h.value), (w, h), 1e-12)
    np.testing.assert_allclose(norms, sizes, rtol=1e-12)
    assert_close(states[-1], h, 1e-12)
    np.testing.assert_allclose(np.concatenate(rows), sizes, rtol=1e-12)
    assert found.skipped.updates == 1 and found.skipped.samples.tolist() == [0, 1, 0]
    assert found.aux.shape == (STEPS, UNITS) and not np.isfinite(found.losses[K])


def test_it_raises_where_that_was_asked_and_keeps_what_was_learnt():
    with pytest.raises(NotFiniteError, match=r'sample 1 \(1 x\).*step 3') as told:
        trained(not_finite='raise')
    assert told.value.so_far.skipped.updates == 1


@pytest.mark.parametrize(
    'options, message',
    [
        ({'not_finite': 'skip'}, 'not_finite is .skip.'),
        ({'observe': 1}, 'observe is 1'),
        ({'observe': lambda grads: grads}, 'observe is .*too many'),
    ],
)
def test_other_options_are_refused(options, message):
    learner = compiled(model=Layer)
    with pytest.raises(OptionError, match=message):
        learner.etrace_train(
            data(), step_fn=lambda x: jnp.mean(learner(x)), optimizer=OPTIMIZER, **options
        )
