"""Each task draws what it says, its trivial learner scores its floor, and bad arguments are
refused.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import tasks
from braintrace.errors import OptionError
from braintrace.tasks import _data, _spiking, _streams
from tests.tiers import slow

KEY = jax.random.key(3)
# the task, the sequences of a batch whose trivial score is the floor, and how near
TASKS = {
    'copy': (lambda: tasks.copy_memory(20), 32, 1e-5),
    'adding': (lambda: tasks.adding(20), 4000, 0.02),
    'evidence': (lambda: tasks.evidence(dt=50, delay=100), 4000, 0.05),
    'rows': (lambda: tasks.digits(), 300, 1e-6),
    'pixels': (lambda: tasks.digits('pixels'), 300, 1e-6),
    'spikes': (lambda: tasks.digits('spikes'), 300, 1e-6),
    'sine': (lambda: tasks.shifting_sine(300, shift_every=30), 400, 0.05),
    'filter': (lambda: tasks.drifting_filter(300, period=100), 400, 0.05),
    'mackey': (lambda: tasks.mackey_glass(300), 400, 0.05),
    'match': (lambda: tasks.match_to_sample(4, delay=100, dt=50, distractors=2), 4000, 0.05),
    'pattern': (lambda: tasks.pattern_generation(dt=20, outputs=2), 5, 1e-5),
    'characters': (lambda: tasks.characters(20), 3000, 0.01),
}
each = pytest.mark.parametrize('name', TASKS)
QUICK = ('copy', 'adding', 'evidence', 'rows', 'pixels', 'sine')


@pytest.mark.tier(quick=2)
@each
def test_a_batch_has_its_shapes_and_the_trivial_learner_scores_the_floor(name):
    make, batch, near = TASKS[name]
    task = make()
    xs, ys, mask = jax.jit(lambda key: task.sample(key, batch, 'test'))(KEY)
    assert xs.shape == (task.steps, batch, task.inputs) and mask.shape == (task.steps,)
    if task.metric == 'mse':
        assert ys.shape == (task.steps, batch, task.outputs)
    else:
        assert ys.shape == (task.steps, batch)
        assert 0 <= int(ys.min()) <= int(ys.max()) < task.outputs
    assert bool(jnp.all(mask >= 0)) and float(mask.sum()) > 0
    outputs = task.trivial(xs)
    assert outputs.shape == (task.steps, batch, task.outputs)
    assert float(task.score(outputs, ys, mask)) == pytest.approx(task.floor, rel=near)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize(
    'name', [name if name in QUICK else pytest.param(name, marks=slow) for name in TASKS]
)
def test_a_key_draws_one_batch_for_each_part(name):
    task = TASKS[name][0]()
    one, other = jax.jit(lambda: [task.sample(KEY, 4, part).xs for part in ('train', 'test')])()
    again = jax.jit(lambda key: task.sample(key, 4).xs)(KEY)
    assert np.allclose(one, again, atol=1e-5) and not np.allclose(one, other, atol=1e-5)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('name', ['copy', 'adding', 'sine', 'characters'])
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


@pytest.mark.slow
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


@functools.cache
def match_counts(places, stimuli=8):
    """Spikes (places + 1, B, 70) of a batch while each stimulus and the test are shown, labels."""
    task = tasks.match_to_sample(stimuli, delay=100, dt=50, distractors=places - 1)
    xs, ys, mask = (np.asarray(a) for a in jax.jit(lambda: task.sample(KEY, 4000))())
    assert len(xs) == 3 * places + 5 and np.all(ys == ys[0])
    assert np.flatnonzero(mask).tolist() == list(range(len(xs) - 3, len(xs)))
    shown = [xs[3 * place + 1 : 3 * place + 3] for place in range(places)]
    assert np.concatenate([xs[: 3 * places : 3], xs[-5:-3]])[..., :60].sum() == 0
    assert xs[..., 60:].mean() == pytest.approx(1 - np.exp(-0.5), abs=0.01)
    return np.stack([those.sum(0) for those in (*shown, xs[-3:])]), ys[0]


def test_match_asks_for_the_marked_stimulus():
    counts, label = match_counts(3)
    patterns = _spiking.drawn(8, 0)
    assert np.all(patterns.sum(1) == 10) and len(np.unique(patterns, axis=0)) == 8
    *shown, test = (counts[..., :40] @ patterns.T).argmax(-1)
    marked = counts[..., 40:60].reshape(4, 4000, 2, 10).any(-1)
    assert np.all(marked[:3, :, 0].sum(0) == 1) and np.all(marked[3] == [0, 1])
    sample, place = marked[:3, :, 0].argmax(0), (np.array(shown) == test).argmax(0)
    assert np.all(np.diff(np.sort(shown, 0), axis=0) > 0)
    assert np.array_equal(label, place == sample)
    for where in (sample, place):  # neither tells the label
        assert np.bincount(where) / 4000 == pytest.approx([1 / 3] * 3, abs=0.03)
        assert [label[where == k].mean() for k in range(3)] == pytest.approx([0.5] * 3, abs=0.05)


def test_match_is_at_chance_for_a_sum_over_what_was_shown():
    counts, label = match_counts(3)
    features = np.concatenate([*counts, np.ones((4000, 1))], -1)
    weights = np.linalg.lstsq(features[:2000], label[:2000] - 0.5, rcond=None)[0]
    guess = features[2000:] @ weights
    assert np.mean((guess > 0) == label[2000:]) == pytest.approx(0.5, abs=0.04)


@pytest.mark.slow
def test_match_without_distractors_tests_another_stimulus():
    counts, label = match_counts(1, 2)
    shown, test = (counts[..., :40] @ _spiking.drawn(2, 0).T).argmax(-1)
    assert np.array_equal(shown == test, label) and label.mean() == pytest.approx(0.5, abs=0.03)


def test_a_pattern_is_the_same_in_all_sequences_under_noise():
    task = tasks.pattern_generation(dt=10, outputs=3)
    xs, ys, _ = (np.asarray(a, float) for a in task.sample(KEY, 200, 'test'))
    assert np.array_equal(ys, np.broadcast_to(task.sample(KEY, 1).ys, ys.shape))
    assert np.allclose(ys.mean(0), 0, atol=1e-6) and np.allclose(ys.var(0), 1, atol=1e-5)
    power = np.abs(np.fft.rfft(ys[:, 0], axis=0))
    assert np.all(power[[1, 2, 3, 5]] > 1) and np.delete(power, [1, 2, 3, 5], 0).max() < 1e-4
    rates = xs.reshape(5, 20, 200, 5, 4).mean((1, 2, 4))
    wanted = 1 - np.exp(-0.1 - 0.9 * np.eye(5))
    assert np.allclose(rates, wanted, atol=0.02)
    assert not np.allclose(ys, tasks.pattern_generation(dt=10, outputs=3, seed=1).sample(KEY, 1).ys)


def test_mackey_glass_solves_its_equation():
    drawn = np.array([[0.1, 0.9], [0.3, 0.8]])
    past = _streams.history(np, drawn, 17)
    fine = 100
    times = np.arange(-17 * fine, 1)[:, None] / fine
    found = [*(0.9 + (0.1 + 0.3 * drawn[0]) * np.sin(2 * np.pi * ((times + 17) / 50 + drawn[1])))]
    assert np.allclose(past, found[:: fine // 10])
    for _ in range(60 * fine):  # Heun's method
        flow = [0.2 * late / (1 + late**10) for late in found[-1 - 17 * fine :][:2]]
        slope = flow[0] - 0.1 * found[-1]
        end = flow[1] - 0.1 * (found[-1] + slope / fine)
        found.append(found[-1] + (slope + end) / 2 / fine)
    series = []
    for _ in range(4):
        past = _streams.later(np, past)
        series.append(past[10::10])
    assert np.allclose(np.concatenate(series)[:60], found[18 * fine :: fine], atol=5e-4)


def test_mackey_glass_is_scaled_and_asks_for_what_comes():
    assert tasks.mackey_glass(12).sample(KEY, 1).xs.shape == (12, 1, 1)  # 18 steps are two turns
    draw = jax.jit(lambda: tasks.mackey_glass(400, ahead=5).sample(KEY, 100))
    xs, ys, mask = (np.asarray(a) for a in draw())
    assert np.array_equal(xs[5:], ys[:-5]) and np.flatnonzero(mask)[0] == 200
    assert xs.mean() == pytest.approx(0, abs=0.03) and xs.var() == pytest.approx(1, abs=0.04)
    assert np.abs(np.diff(xs[..., 0], axis=0)).max() < 0.6
    assert np.unique(xs[0]).size == 100


def test_a_filter_turns_in_a_plane_and_keeps_its_phase():
    steps, period, last = 300_000, 1000, 400
    xs, ys, mask = (np.asarray(a) for a in tasks.drifting_filter(steps, 6, period).sample(KEY, 1))
    assert xs.shape == ys.shape == (steps, 1, 1) and np.flatnonzero(mask)[0] == steps // 2
    x, y = xs[-last - 6 :, 0, 0].astype(float), ys[-last:, 0, 0]
    past = np.stack([x[6 - k : 6 - k + last] for k in range(1, 7)], 1)
    angle = (2 * np.pi * np.arange(steps - last, steps) / period)[:, None]
    features = np.concatenate([np.cos(angle) * past, np.sin(angle) * past], 1)
    plane, residual = np.linalg.lstsq(features, y, rcond=None)[:2]
    assert residual / last < 1e-10
    plane = plane.reshape(2, 6)
    assert np.allclose(plane @ plane.T, np.eye(2), atol=1e-5)
    assert xs.mean() == pytest.approx(0, abs=0.01) and xs.var() == pytest.approx(1, abs=0.01)


def test_characters_are_a_text_whose_parts_are_apart():
    task = tasks.characters(60)
    letters = np.array([*_data.ALPHABET, '\x7f'])
    parts = {part: ''.join(letters[codes]) for part, codes in _data.text().items()}
    assert 'This is a' in parts['train'] and parts['train'].count('  ') < 5
    for part in tasks.PARTS:
        xs, ys, mask = (np.asarray(a) for a in task.sample(KEY, 20, part))
        codes = xs.argmax(-1)
        assert np.array_equal(codes[1:], ys[:-1]) and np.all(xs.sum(-1) == 1) and np.all(mask == 1)
        pieces = [''.join(letters[lane]) for lane in codes.T]
        others = [text for name, text in parts.items() if name != part]
        assert all(piece in parts[part] for piece in pieces)
        assert sum(piece in text for piece in pieces for text in others) <= 2  # lines of tables
    sizes = np.array([len(parts[part]) for part in tasks.PARTS])
    assert sizes / sizes.sum() == pytest.approx([0.8, 0.1, 0.1], abs=0.02)


def test_a_sine_keeps_its_frequency_until_it_shifts():
    xs, ys, mask = tasks.shifting_sine(90, shift_every=30, periods=(10, 20)).sample(KEY, 50)
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
    parts = _data.images()
    sizes = {'train': 1197, 'validation': 300, 'test': 300}
    assert {part: len(labels) for part, (_, labels) in parts.items()} == sizes
    for part in ('validation', 'test'):
        assert np.bincount(parts[part][1]).tolist() == [30] * 10
    assert len(np.unique(np.concatenate([x for x, _ in parts.values()]), axis=0)) == 1797
    rows, pixels = tasks.digits().sample(KEY, 300, 'test'), tasks.digits('pixels')
    same = pixels.sample(KEY, 300, 'test')
    assert np.array_equal(rows.xs.swapaxes(0, 1).reshape(300, 64), same.xs[..., 0].T)
    assert len(np.unique(same.xs[..., 0].T, axis=0)) == 300 and same.xs.max() == 1


def test_digits_by_spikes_show_row_after_row_and_then_nothing():
    task = tasks.digits('spikes')
    xs, ys, mask = (np.asarray(a) for a in jax.jit(lambda: task.sample(KEY, 300, 'test'))())
    rows, labels, _ = tasks.digits().sample(KEY, 300, 'test')
    assert np.array_equal(ys[-1], labels[-1]) and xs[160:].sum() == 0
    assert np.flatnonzero(mask).tolist() == list(range(160, 180))
    counts = xs[:160].reshape(8, 20, 300, 8, 5).mean((1, 4))
    wanted = 1 - np.exp(-0.1 * np.asarray(rows))
    assert np.abs(counts - wanted).max() < 0.2
    assert np.allclose(counts.mean(1), wanted.mean(1), atol=0.01)


@pytest.mark.parametrize(
    'read, module, make, words',
    [
        (_data.images, 'sklearn.datasets', tasks.digits, r'scikit-learn.*pip install'),
        (_data.text, 'pydoc_data.topics', tasks.characters, r'pydoc_data.*install'),
    ],
)
def test_what_is_not_there_is_to_be_installed(monkeypatch, read, module, make, words):
    read.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=words):
        make()


REFUSED = {
    'batch': lambda: tasks.adding(20).sample(KEY, 0),
    'part': lambda: tasks.adding(20).sample(KEY, 1, 'all'),
    'delay': lambda: tasks.copy_memory(0),
    'symbols': lambda: tasks.copy_memory(5, symbols=1),
    'steps': lambda: tasks.adding(1),
    'an odd number': lambda: tasks.evidence(cues=6),
    'divide a gap of 50 ms': lambda: tasks.evidence(dt=20),
    'divide a delay of 255 ms': lambda: tasks.evidence(delay=255),
    'dt is True': lambda: tasks.evidence(dt=True),
    "'rows', 'pixels' or 'spikes'": lambda: tasks.digits('columns'),
    'the test part has 300': lambda: tasks.digits().sample(KEY, 301, 'test'),
    'periods': lambda: tasks.shifting_sine(periods=8),
    'shortest period': lambda: tasks.shifting_sine(periods=(1, 8)),
    'longest period': lambda: tasks.shifting_sine(periods=(8, 8)),
    'stimuli is 1': lambda: tasks.match_to_sample(1),
    'only 3 of 4 stimuli': lambda: tasks.match_to_sample(4, distractors=4),
    'seed is -1': lambda: tasks.match_to_sample(seed=-1),
    'divide a turn of 200 ms': lambda: tasks.pattern_generation(dt=30),
    'tau is 10': lambda: tasks.mackey_glass(tau=10),
    'taps is 1': lambda: tasks.drifting_filter(taps=1),
    'period is 0.5': lambda: tasks.drifting_filter(period=0.5),
    'steps is 0': lambda: tasks.characters(0),
    'the shortest part has': lambda: tasks.characters(10**6),
}


@pytest.mark.parametrize('words', REFUSED)
def test_bad_arguments_are_refused(words):
    with pytest.raises(OptionError, match=words):
        REFUSED[words]()
