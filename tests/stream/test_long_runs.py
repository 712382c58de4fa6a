"""A million steps leave nothing behind, and fifty kills change no bit of what comes after them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braintrace import functional
from tests import memory
from tests.functional.plain import D_RTRL, B, I, N, cell, drawn, loss, params
from tests.test_examples import load


@pytest.mark.nightly
@pytest.mark.skipif(not memory.resident_bytes(), reason='the system does not tell it by a file')
def test_a_million_steps_in_2000_chunks_grow_by_less_than_5_mb_after_the_first_100():
    learner, optimizer, carry0 = functional.online(cell, D_RTRL), optax.adam(1e-3), drawn(B, N)
    largest = lambda grads, state: jnp.abs(grads['w']).max()
    update = learner.sequence_update(loss, optimizer, not_finite='reset', observe=largest)
    learn = jax.jit(update, donate_argnums=2)
    run = [params(), optimizer.init(params()), learner.init(params(), carry0, jnp.ones((B, I)))]

    def source():
        rng = np.random.default_rng(0)
        for k in range(2000):
            xs, ys = rng.normal(size=(500, B, I)), rng.normal(size=(500, B, 2))
            xs[k % 500, k % B] = np.nan if k % 50 == 0 else 0
            yield xs, ys

    mean, at_first = None, 0
    for k, (xs, ys, mask) in enumerate(functional.chunks(source())):
        found = learn(*run, xs, ys, mask, (None, carry0))
        run, mean = [found.params, found.opt_state, found.state], jnp.nanmean(found.losses)
        if k == 100:
            at_first = memory.resident_bytes()
    assert int(run[2].t.max()) > 10**4 and mean > 0
    assert memory.resident_bytes() - at_first < 5 * 10**6


# -- killed at random moments ----------------------------------------------------------------------


@pytest.fixture(autouse=True)
def compiled_once(tmp_path_factory, monkeypatch):
    """The processes find each other's programs: compiling is most of what each costs."""
    folder = tmp_path_factory.mktemp('compiled')
    monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(folder))
    monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
    monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '-1')


@pytest.mark.nightly
def test_fifty_kills_leave_no_trace(capsys):
    assert load('stream_for_months').kill(50, 400, seed=1)
    assert capsys.readouterr().out.count('killed after chunk') == 50
