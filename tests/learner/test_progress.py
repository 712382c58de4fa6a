"""A function of progress: it sees each loss once and in order, costs nothing where it is left out,
and an exception of it is the user's.
"""

import contextlib
import io
import os
import sys

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional, tasks
from braintrace._windows import turns
from braintrace.errors import OptionError, StepFunctionError
from braintrace.tasks._loop import Loop
from tests.compare import assert_close

from .networks import BATCH, INPUTS, UNITS, Layer, compiled, data, loss_of, squared


class Read(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.readout = Layer(), braintrace.nn.Linear(UNITS, UNITS)

    def update(self, x):
        return self.readout(self.cell(x))


T, SGD = 23, optax.sgd(0.01)
cell = lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p['w']))


class Seen:
    """What a function of progress was called with."""

    def __init__(self):
        self.steps, self.losses = [], []

    def __call__(self, step, losses):
        self.steps.append(step)
        self.losses.append(losses)

    def check(self, losses, last=T):
        assert all(isinstance(step, int) for step in self.steps)
        assert self.steps == sorted(set(self.steps)) and self.steps[-1] == last
        np.testing.assert_array_equal(np.concatenate(self.losses, -1), losses)


def sequences():
    xs = jnp.resize(data()[0], (T, BATCH, INPUTS))
    return xs, jnp.ones((T, BATCH, UNITS))


def made():
    return compiled(model=Layer)


@pytest.mark.parametrize('options', [{}, {'window': 2}, {'has_aux': True, 'window': 4}])
def test_of_a_gradient_of_a_learner(options):
    (xs, ys), learner, seen = sequences(), made(), Seen()
    step_fn = loss_of(learner)
    if 'has_aux' in options:
        step_fn = lambda x, y: (squared(learner(x), y), x)
    found = learner.etrace_grad(xs, ys, step_fn=step_fn, progress=seen, **{'window': 2, **options})
    seen.check(found.losses)


@pytest.mark.parametrize('every', [1, 4])
def test_of_training_of_a_learner_which_compiles_once(every):
    (xs, ys), learner, traced = sequences(), made(), []

    def step_fn(x, y):
        traced.append(0)
        return squared(learner(x), y)

    options = {'step_fn': step_fn, 'optimizer': SGD, 'update_every': every}
    seen, again = Seen(), Seen()
    found = learner.etrace_train(xs, ys, progress=seen, **options)
    number = len(traced)
    seen.check(found.losses)
    found = learner.etrace_train(xs, ys, progress=lambda *at: again(*at), **options)
    again.check(found.losses)
    assert len(traced) == number


def pure():
    (xs, _), p = sequences(), {'w': jnp.ones((2, 2)) / 4}
    learner = functional.online(cell)
    state = learner.init(p, jnp.zeros((3, 2)), xs[0])
    return learner, p, state, xs, jnp.zeros((T, 3, 2))


@pytest.mark.parametrize('options', [{}, {'window': 3, 'inside': 'exact'}, {'keep_trace': False}])
def test_of_pure_functions(options):
    learner, p, state, xs, ys = pure()
    mask = jnp.where(jnp.arange(T) % 3, 1.0, 0.5)
    seen, options = Seen(), {'window': 2, **options}
    loss = lambda h, y: braintrace.Penalised(squared(h, y), jnp.sum(h**3))
    flags = (jnp.arange(T) == 9, jnp.ones((3, 2)))
    found = learner.sequence_grad(loss, progress=seen, **options)(p, state, xs, ys, mask, flags)
    seen.check(found.losses)
    want = learner.sequence_grad(loss, **options)(p, state, xs, ys, mask, flags)
    assert_close((found.grads, found.losses), (want.grads, want.losses))
    assert_close((found.state.carry, found.state.t), (want.state.carry, want.state.t))


LAST = {'mask': jnp.arange(T) == T - 1, 'update_every': T}


@pytest.mark.parametrize('train', [None, {'update_every': 7}, LAST], ids=['grad', '7', 'last'])
def test_a_line_shows_the_loss_that_counts_and_changes_no_number(train, capfd):
    def run(progress):
        learner = made()
        options = {'step_fn': loss_of(learner), 'progress': progress}
        if train is None:
            found = learner.etrace_grad(*sequences(), **options)
        else:
            found = learner.etrace_train(*sequences(), optimizer=SGD, **options, **train)
        return found, learner.save()

    got = run(True)
    line = capfd.readouterr().err
    assert f'{T}/{T} steps' in line
    assert train is not LAST or f'loss {float(got[0].losses[-1]):.4g},' in line
    assert_close(got, run(False))


@pytest.mark.parametrize(
    ('rate', 'length', 'most'),
    [(50, 200, 25), (1000, 10_000, 55), (1e5, 10**6, 55), (10, 10**4, 101)],
)
def test_a_line_is_renewed_a_few_times_a_second_and_at_most_a_hundred_times(
    rate, length, most, capfd, monkeypatch
):
    clock = [0.0]
    monkeypatch.setattr(turns.time, 'perf_counter', lambda: clock[0])
    line, shown = turns.Progress(length), (np.full(length, 0.5), None)
    for done in range(0, length + 1, length // 100):
        clock[0] = done / rate
        line.between(shown, done)
    said = capfd.readouterr().err
    assert 3 <= said.count('\n') <= most
    assert f'{length}/{length} steps, {rate:.0f} steps/s, loss 0.5, 0 s left' in said


def unread():
    """A stderr whose reader has left."""
    read, write = os.pipe()
    os.close(read)
    return open(write, 'w', buffering=1)


def closed():
    file = io.StringIO()
    file.close()
    return file


@pytest.mark.parametrize('stderr', [lambda: None, closed, unread])
def test_where_nobody_reads_it_nothing_is_shown_and_training_goes_on(stderr, monkeypatch, capsys):
    file = stderr()
    monkeypatch.setattr(sys, 'stderr', file)
    line = turns.Progress(10)
    for done in (0, 5, 10):
        line.between((np.full(10, 0.5), None), done)
    loop = Loop.__new__(Loop)
    loop.task = tasks.adding(4)
    loop._say('1/2 updates')
    assert capsys.readouterr().out == ''
    if file is not None:
        with contextlib.suppress(OSError):  # of what is still to be written
            file.close()


def test_an_exception_ends_the_call_and_what_was_learnt_is_kept():
    (xs, ys), learner = sequences(), made()
    before = learner.save()

    def stops(step, losses):
        raise ZeroDivisionError(f'enough after {step}')

    options = {'step_fn': loss_of(learner), 'progress': stops}
    for call in (
        lambda: learner.etrace_grad(xs, ys, window=2, **options),
        lambda: learner.etrace_train(xs, ys, optimizer=SGD, **options),
    ):
        with pytest.raises(ZeroDivisionError, match='enough after') as caught:
            call()
        assert len(caught.value.so_far.losses) > 0
    after = learner.save()
    assert not all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(after)))
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(after))
    learner.etrace_train(xs, ys, step_fn=loss_of(learner), optimizer=SGD)


def state_of_the_loss(learner, scale):
    scale.value = 0 * scale.value


def weight_that_is_kept(learner, scale):
    weight = learner.param_states['readout', 'weight']
    weight.value = jax.tree.map(lambda w: w / 2, weight.value)


def states_made_anew(learner, scale):
    brainstate.nn.init_all_states(learner, batch_size=BATCH)


def another_state_for_a_weight(learner, scale):
    layer = learner.model.cell
    layer.w = brainstate.ParamState(layer.w.value / 2)


@pytest.mark.parametrize(
    'change',
    [
        state_of_the_loss,
        weight_that_is_kept,
        pytest.param(states_made_anew, marks=pytest.mark.slow),
        pytest.param(another_state_for_a_weight, marks=pytest.mark.slow),
    ],
)
def test_whatever_it_changes_training_goes_on_from_there(change):
    xs, ys = sequences()

    def run(parts, progress=False):
        brainstate.random.seed(0)
        model = Read()
        learner = braintrace.compile(model, 'D_RTRL', xs[0], batch_size=BATCH)
        scale, opt_state = brainstate.ShortTermState(jnp.ones(())), None
        step_fn = lambda x, y: scale.value * squared(learner(x), y)
        of_cell = {k: p for k, p in learner.param_states.items() if k[0] == 'cell'}
        weights = of_cell if change is weight_that_is_kept else None
        options = {'step_fn': step_fn, 'optimizer': SGD, 'weights': weights}

        def between(step, losses):
            if progress and not seen:
                seen.append(step)
                change(learner, scale)

        for part in parts:
            if opt_state is not None:
                change(learner, scale)
            found = learner.etrace_train(
                xs[part], ys[part], progress=between, opt_state=opt_state, **options
            )
            opt_state = found.opt_state
        return learner.save()

    seen = []
    got = run([slice(None)], progress=True)
    assert seen[0] < T
    assert_close(got, run([slice(seen[0]), slice(seen[0], None)]))


def test_to_compile_in_it_is_refused():
    (xs, ys), learner = sequences(), made()
    options = {'step_fn': loss_of(learner), 'optimizer': SGD}
    again = lambda step, losses: learner.compile_graph(xs[0])
    with pytest.raises(StepFunctionError, match='compiled the learner again.*between two calls'):
        learner.etrace_train(xs, ys, progress=again, **options)


def test_inside_of_a_transformation_it_is_refused():
    learner, p, state, xs, ys = pure()
    grad = learner.sequence_grad(squared, 2, progress=print)
    train = learner.sequence_update(squared, SGD, progress=True)
    with pytest.raises(OptionError, match='it compiles itself'):
        jax.jit(grad)(p, state, xs, ys)
    with pytest.raises(OptionError, match='it compiles itself'):
        jax.vmap(lambda xs: train(p, SGD.init(p), state, xs, ys))(xs[None])


def test_between_two_calls_of_it_a_gradient_has_come_so_far():
    (xs, ys), learner, seen = sequences(), made(), []
    look = lambda step, losses: seen.append(int(learner.etrace.value['t'][0]) - step)
    learner.etrace_grad(xs, ys, step_fn=loss_of(learner), progress=look)
    assert len(seen) > 2 and not any(seen)


def test_what_is_no_progress_is_refused():
    pure = functional.online(cell)
    text = r'progress is .*; give True, False or a function `\(step, losses\)`'
    for wrong in (3, 'yes', None, lambda: None, lambda step: None):
        with pytest.raises(OptionError, match=text):
            pure.sequence_grad(squared, progress=wrong)
    with pytest.raises(OptionError, match='step, losses, observed'):
        observe = lambda grads, state: 0
        pure.sequence_update(squared, SGD, observe=observe, progress=lambda a, b: 0)
