"""Ctrl-C: a run stops after a block, all that it changes is that of one update, and it goes on."""

import os
import signal

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional, rules, tasks
from braintrace._windows import turns
from tests.compare import assert_close

from .networks import Net, compiled, data, squared

SGD, LATE, STEPS = optax.sgd(0.01), 20, 40


pytestmark = pytest.mark.usefixtures('interruptible')


@pytest.fixture(autouse=True)
def block_by_block(monkeypatch):
    """Each block is a turn, so that what is done at a signal does not hang on the clock."""
    monkeypatch.setattr(turns, 'SECONDS', 0.0)


def armed(x, *, at):
    """An input, at one of which SIGINT comes while the compiled loop runs."""

    def send(x):
        if at and np.max(x) > 100:
            os.kill(os.getpid(), signal.SIGINT)
            at.clear()
        return np.minimum(x, 1).astype(x.dtype)

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(send, like, x, vmap_method='broadcast_all')


def sequence():
    xs, ys = data(STEPS)
    return xs.at[LATE].set(1000.0), ys


def after_a_signal(call):
    """The exception of a call that was stopped."""
    with pytest.raises(KeyboardInterrupt) as caught:
        call()
    assert f'of {STEPS} steps' in caught.value.__notes__[0]
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize('progress', [False, True])
def test_a_learner_that_is_stopped_is_that_of_a_shorter_sequence(progress, capfd):
    xs, ys = sequence()
    stopped, other = compiled(), compiled()
    options = {'optimizer': SGD, 'update_every': 3}

    def trained(learner, length, at, **more):
        step_fn = lambda x, y: squared(learner(armed(x, at=at)), y)
        return learner.etrace_train(xs[:length], ys[:length], step_fn=step_fn, **options, **more)

    error = after_a_signal(lambda: trained(stopped, STEPS, [1], progress=progress))
    _, losses, *_ = error.so_far
    assert LATE < len(losses) < STEPS and len(losses) % 3 == 0
    _, wanted, *_ = trained(other, len(losses), [])
    assert_close((losses, stopped.save()), (wanted, other.save()), 0)
    assert (f'/{STEPS} steps, ' in capfd.readouterr().err) is progress


def cell(p, h, x, at):
    h = jnp.tanh(braintrace.matmul(jnp.concatenate([armed(x, at=at), h], -1), p['w']))
    return h, h


def test_pure_updates_that_are_stopped_are_those_of_a_shorter_sequence():
    (xs, _), at = sequence(), [1]
    learner = functional.online(lambda p, h, x: cell(p, h, x, at), rules.d_rtrl())
    p, h, ys = {'w': jnp.ones((4, 2)) / 4}, jnp.zeros((3, 2)), jnp.zeros((STEPS, 3, 2))
    learn, state = learner.sequence_update(squared, SGD, progress=True), learner.init(p, h, xs[0])
    error = after_a_signal(lambda: learn(p, SGD.init(p), state, xs, ys))
    done = len(error.so_far.losses)
    assert LATE < done < STEPS
    assert_close(error.so_far, learn(p, SGD.init(p), state, xs[:done], ys[:done]), 0)


def test_an_evaluation_that_is_stopped_changes_nothing():
    class Armed(Net):
        def update(self, x):
            return super().update(armed(x, at=at))

    at, (xs, ys) = [], sequence()
    learner = compiled(model=Armed)
    before = learner.save()
    at.append(1)
    with pytest.raises(KeyboardInterrupt):
        braintrace.evaluate(learner, xs, ys, squared)
    assert_close(learner.save(), before, 0)
    assert jnp.isfinite(braintrace.evaluate(learner, xs, ys, squared))


@pytest.mark.slow
def test_a_run_on_a_task_that_is_stopped_has_the_parameters_so_far():
    class Readout(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.readout = braintrace.nn.Linear(2, 1)

        def update(self, x):
            return self.readout(armed(x + 1000.0, at=at))

    at = []
    run = lambda: tasks.run(
        tasks.adding(4), lambda seed: Readout(), None, SGD, 60, batch_size=2, test=2
    )
    at.append(1)
    with pytest.raises(KeyboardInterrupt) as caught:
        run()
    params, losses = caught.value.so_far
    assert 0 < losses.shape[1] < 60 and jax.tree.leaves(params)[0].shape[0] == 1


@pytest.mark.slow
def test_a_handler_that_does_not_raise_lets_the_run_go_on():
    (xs, ys), came, learner = sequence(), [], compiled()
    step_fn = lambda x, y: squared(learner(armed(x, at=[1])), y)
    handler = signal.signal(signal.SIGINT, lambda *signal: came.append(signal))
    try:
        _, losses, *_ = learner.etrace_train(xs, ys, step_fn=step_fn, optimizer=SGD)
        assert len(losses) == STEPS and len(came) >= 1
        assert signal.getsignal(signal.SIGINT) != handler
    finally:
        signal.signal(signal.SIGINT, handler)


def test_a_turn_takes_half_a_second_of_the_clock_also_where_blocks_become_slower(monkeypatch):
    """By a clock that goes on by the blocks, as users wait for the end of a turn."""
    clock, sizes = [0.0], []
    monkeypatch.setattr(turns, 'SECONDS', 0.5)
    monkeypatch.setattr(turns.time, 'perf_counter', lambda: clock[0])

    def program(carry, start, stop):
        sizes.append(stop - start)
        clock[0] += (stop - start) * (2**-10 if start < 2000 else 2**-6)
        return carry

    turns.Turns(3000).run(program, (), lambda carry: None)
    compiled, fast, slow = [0], [1, 16, 256] + [512] * 4, [512] + [32] * 5 + [7]
    assert sizes == compiled + fast + slow
