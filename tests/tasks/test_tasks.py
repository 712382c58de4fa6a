"""Each task draws what it says, its trivial learner scores its floor, and bad arguments are
refused.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import OptionError, tasks
from braintrace.tasks import _digits

KEY = jax.random.key(3)
# the task, the sequences of a batch whose trivial score is the floor, and how near
TASKS = {
    'copy': (lambda: tasks.copy_memory(20), 32, 1e-5),
    'adding': (lambda: tasks.adding(20), 4000, 0.02),
    'evidence': (lambda: tasks.evidence(dt=50, delay=100), 4000, 0.05),
    'rows': (lambda: tasks.digits(), 300, 1e-6),
    'pixels': (lambda: tasks.digits('pixels'), 300, 1e-6),
    'sine': (lambda: tasks.shifting_sine(300, every=30), 400, 0.05),
}
each = pytest.mark.parametrize('name', TASKS)


@each
def test_a_batch_has_the_shapes_that_the_task_says(name):
    task = TASKS[name][0]()
    xs, ys, mask = jax.jit(lambda key: task.sample(key, 5))(KEY)
    assert xs.shape == (task.steps, 5, task.inputs) and mask.shape == (task.steps,)
    if task.metric == 'mse':
        assert ys.shape == (task.steps, 5, task.outputs)
    else:
        assert ys.shape == (task.steps, 5) and 0 <= int(ys.min()) <= int(ys.max()) < task.outputs
    assert bool(jnp.all(mask >= 0)) and float(mask.sum()) > 0


@each
def test_the_trivial_learner_scores_the_floor(name):
    make, batch, near = TASKS[name]
    task = make()
    xs, ys, mask = jax.jit(lambda: task.sample(KEY, batch, 'test'))()
    outputs = task.trivial(xs)
    assert outputs.shape == (task.steps, batch, task.outputs)
    assert float(task.score(outputs, ys, mask)) == pytest.approx(task.floor, rel=near)


@each
def test_a_key_draws_one_batch_for_each_part(name):
    task = TASKS[name][0]()
    draw = jax.jit(lambda part: task.sample(KEY, 4, part).xs, static_argnums=0)
    one, other, again = draw('train'), draw('test'), task.sample(KEY, 4).xs
    assert np.allclose(one, again, atol=1e-5) and not np.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize('name', ['copy', 'adding', 'sine'])
def test_the_score_is_the_weighed_mean_of_the_loss(name):
    task = TASKS[name][0]()
    xs, ys, mask = task.sample(KEY, 4)
    outputs = jax.random.normal(KEY, (task.steps, 4, task.outputs))
    losses = [float(task.loss(o, y)) for o, y in zip(outputs, ys)]
    wanted = np.average(losses, weights=mask)
    assert float(task.score(outputs, ys, mask)) == pytest.approx(wanted, rel=1e-5)


def test_accuracy_is_that_of_the_mean_output_of_the_masked_steps():
    score, ys = TASKS['evidence'][0]().score, jnp.array([[1, 0]] * 3)
    outputs = jnp.array([[[9, 0], [0, 9]], [[0, 1], [3, 2]], [[0, 1], [0, 2]]], float)
    assert score(outputs, ys, jnp.array([0, 1, 1])) == 0.5
    assert score(outputs, ys, jnp.array([0, 1, 0])) == 1


def test_beaten_is_better_in_the_direction_of_the_metric():
    digits, adding = tasks.digits(), tasks.adding(20)
    assert digits.beaten_by(0.12) and not digits.beaten_by(0.105, margin=0.1)
    assert adding.beaten_by(0.1) and not adding.beaten_by(0.16, margin=0.1)
    assert not adding.beaten_by(float('nan')) and not digits.beaten_by(float('nan'))


def test_copy_shows_symbols_and_asks_for_them_after_the_marker():
    task = tasks.copy_memory(5, length=3, symbols=4)
    xs, ys, mask = task.sample(KEY, 1000)
    seen = np.asarray(xs.argmax(-1))
    assert np.array_equal(xs.sum(-1), np.ones(seen.shape))
    assert np.all(seen[3:7] == 4) and np.all(seen[7] == 5) and np.all(seen[8:] == 4)
    assert np.array_equal(ys[-3:], seen[:3]) and np.all(ys[:-3] == 4) and np.all(mask == 1)
    assert np.bincount(seen[:3].ravel()) / 3000 == pytest.approx(1 / 4, abs=0.03)


def test_adding_marks_a_number_in_each_half():
    xs, ys, mask = tasks.adding(21).sample(KEY, 500)
    numbers, marks = np.asarray(xs[..., 0]), np.asarray(xs[..., 1])
    assert set(np.unique(marks)) == {0, 1}
    assert np.all(marks[:10].sum(0) == 1) and np.all(marks[10:].sum(0) == 1)
    assert np.allclose(ys[-1, :, 0], (numbers * marks).sum(0), atol=1e-6)
    assert numbers.mean() == pytest.approx(0.5, abs=0.02) and numbers.min() >= 0
    assert np.flatnonzero(mask).tolist() == [20]


def test_evidence_has_the_cues_and_the_rates_of_its_source():
    task = tasks.evidence(dt=10, delay=250)
    xs, ys, mask = (np.asarray(a) for a in jax.jit(lambda: task.sample(KEY, 400))())
    left, right, recall, noise = xs.reshape(task.steps, 400, 4, 10).transpose(2, 0, 1, 3)
    cues = [slice(15 * c + 5, 15 * c + 15) for c in range(7)]
    counts = np.stack([(right - left)[cue].sum((0, 2)) for cue in cues])
    assert np.mean(ys[0] == ((counts > 0).sum(0) > 3)) > 0.99  # a cue may be silent by chance
    assert np.all(ys == ys[0]) and np.flatnonzero(mask).tolist() == list(range(130, 145))
    shown = np.concatenate([left[cue] + right[cue] for cue in cues])
    assert shown.mean() == pytest.approx(1 - np.exp(-0.4), abs=0.01)
    assert recall[130:].mean() == pytest.approx(1 - np.exp(-0.4), abs=0.01)
    assert noise.mean() == pytest.approx(1 - np.exp(-0.1), abs=0.01)
    assert recall[:130].sum() == left[105:].sum() == right[105:].sum() == left[:5].sum() == 0
    assert np.mean((counts > 0) == ys[:1]) == pytest.approx(0.71, abs=0.03)  # binomial, majority
    assert ys[0].mean() == pytest.approx(0.5, abs=0.08)


def test_a_sine_keeps_its_frequency_until_it_shifts():
    xs, ys, mask = tasks.shifting_sine(90, every=30, periods=(10, 20)).sample(KEY, 50)
    xs = np.asarray(xs[..., 0], float)
    assert np.array_equal(xs[1:], np.asarray(ys)[:-1, :, 0]) and np.abs(xs).max() <= 1
    assert np.flatnonzero(mask)[0] == 45
    twice_cos = (xs[2:] * xs[1:-1] + xs[:-2] * xs[1:-1]) / xs[1:-1] ** 2
    sure = np.abs(xs[1:-1]) > 0.3
    omega = np.arccos(np.clip(twice_cos / 2, -1, 1))
    assert 2 * np.pi / 20.5 < omega[:28][sure[:28]].min() < omega[:28][sure[:28]].max() < 0.64
    for lane in range(50):
        inside = [omega[a : a + 27, lane][sure[a : a + 27, lane]] for a in (0, 30, 60)]
        assert all(np.ptp(block) < 1e-3 for block in inside)
        assert abs(inside[0][0] - inside[1][0]) > 1e-4


def test_digits_are_held_out_and_balanced():
    parts = _digits.images()
    assert {part: len(labels) for part, (_, labels) in parts.items()} == {
        'train': 1197,
        'validation': 300,
        'test': 300,
    }
    for part in ('validation', 'test'):
        assert np.bincount(parts[part][1]).tolist() == [30] * 10
    assert len(np.unique(np.concatenate([x for x, _ in parts.values()]), axis=0)) == 1797
    rows, pixels = tasks.digits().sample(KEY, 300, 'test'), tasks.digits('pixels')
    same = pixels.sample(KEY, 300, 'test')
    assert np.array_equal(rows.xs.swapaxes(0, 1).reshape(300, 64), same.xs[..., 0].T)
    assert len(np.unique(same.xs[..., 0].T, axis=0)) == 300 and same.xs.max() == 1


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch):
    _digits.images.cache_clear()
    monkeypatch.setitem(sys.modules, 'sklearn.datasets', None)
    with pytest.raises(ImportError, match=r'scikit-learn.*pip install'):
        tasks.digits()


REFUSED = {
    'batch': lambda: tasks.adding(20).sample(KEY, 0),
    'part': lambda: tasks.adding(20).sample(KEY, 1, 'all'),
    'delay': lambda: tasks.copy_memory(0),
    'length': lambda: tasks.copy_memory(5, length=2.5),
    'symbols': lambda: tasks.copy_memory(5, symbols=1),
    'steps': lambda: tasks.adding(1),
    'an odd number': lambda: tasks.evidence(cues=6),
    'divide a gap of 50 ms': lambda: tasks.evidence(dt=20),
    'divide a delay of 255 ms': lambda: tasks.evidence(delay=255),
    'dt is True': lambda: tasks.evidence(dt=True),
    "'rows' or 'pixels'": lambda: tasks.digits('columns'),
    'the test part has 300': lambda: tasks.digits().sample(KEY, 301, 'test'),
    'every': lambda: tasks.shifting_sine(10, every=0),
    'periods': lambda: tasks.shifting_sine(periods=8),
    'shortest period': lambda: tasks.shifting_sine(periods=(1, 8)),
    'longest period': lambda: tasks.shifting_sine(periods=(8, 8)),
}


@pytest.mark.parametrize('words', REFUSED)
def test_bad_arguments_are_refused(words):
    with pytest.raises(OptionError, match=words):
        REFUSED[words]()
