"""River's protocol over an online learner: its numbers by hand, its own checks, bad input."""

import copy
import pickle

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from river import checks, compose, drift, evaluate, metrics, preprocessing

import braintrace
from braintrace import nn, rules
from braintrace.adapters.river import OnlineClassifier, OnlineRegressor
from braintrace.errors import OptionError
from tests.tiers import nightly


def model(inputs, outputs):
    return brainstate.nn.Sequential(nn.MinGRUCell(inputs, 3), nn.Linear(3, outputs))


def leak(inputs, outputs):
    """Pure functions: leaking sums of tanh of a product, and a readout."""

    def cell(params, h, x):
        h = 0.8 * h + jnp.tanh(braintrace.matmul(x, params['in']))
        return h @ params['out'], h

    rng = np.random.default_rng(0)
    shapes = {'in': (inputs, 5), 'out': (5, outputs)}
    params = {k: jnp.asarray(rng.normal(size=s)) for k, s in shapes.items()}
    return cell, params, jnp.zeros((1, 5))


def stream(length: int, offset: float = 0.0):
    rng = np.random.default_rng(1)
    xs = rng.normal(size=(length, 2)) * [1.0, 30.0] + offset
    ys = 5 + 2 * np.roll(xs[:, 0] - offset, 1)
    return [({'b': x[1], 'a': x[0]}, float(y)) for x, y in zip(xs, ys, strict=True)]


def by_hand(samples, scale: bool, rate: float):
    """Predictions of :func:`leak`, by its own D_RTRL and SGD in NumPy and double precision: the
    scale is that of all numbers up to now.
    """
    _, params, _ = leak(2, 1)
    w, out = (np.asarray(params[k], float) for k in ('in', 'out'))
    h, trace, said = np.zeros(5), np.zeros((2, 5)), []
    rows, targets = [], []

    def scaled(numbers):
        std = np.std(numbers, 0)
        return np.mean(numbers, 0), np.where(std > 0, std, 1)

    for x, y in samples:
        rows.append([x['a'], x['b']])
        mean, std = scaled(rows) if scale else (0, 1)
        x = (np.array(rows[-1]) - mean) / std
        new = np.tanh(x @ w)
        h, trace = 0.8 * h + new, 0.8 * trace + x[:, None] * (1 - new**2)
        middle, wide = scaled(targets) if scale and targets else (0, 1)
        said.append(float(h @ out[:, 0]) * wide + middle)
        targets.append(y)
        middle, wide = scaled(targets) if scale else (0, 1)
        error = 2 * (h @ out[:, 0] - (y - middle) / wide)
        w, out = w - rate * error * out[:, 0] * trace, out - rate * error * h[:, None]
    return said


def taught(found, samples):
    """It, after these samples one by one."""
    for x, y in samples:
        found.learn_one(x, y)
    return found


def last(length: int, *offset):
    return stream(length, *offset)[-1][0]


@pytest.mark.parametrize('scale', [True, False])
@pytest.mark.parametrize('x64, close', [(False, 2e-4), (True, 1e-10)])
def test_predictions_are_those_of_the_formula(scale, x64, close):
    with jax.enable_x64(x64):
        found, said = OnlineRegressor(leak, optimizer=optax.sgd(0.01), scale=scale), []
        for x, y in stream(25):
            said.append(found.predict_one(x))
            found.learn_one(x, y)
        want = by_hand(stream(25), scale, 0.01)
    np.testing.assert_allclose(said, want, rtol=close, atol=close)


def test_numbers_far_from_zero_keep_their_digits():
    """Seconds since 1970 differ by less than single precision holds."""
    near, far = (
        taught(OnlineRegressor(leak), stream(20, *at)).predict_one(last(21, *at))
        for at in ((), (2.0**31,))
    )
    assert abs(near - far) < 1e-3


def test_a_prediction_changes_nothing_and_rows_of_a_frame_follow_each_other():
    one, many = OnlineRegressor(model), OnlineRegressor(model)
    samples = stream(12)
    for x, y in samples:
        assert one.predict_one(x) == one.predict_one(x)
        one.learn_one(x, y)
    for part in (samples[:6], samples[6:]):
        many.learn_many([x for x, _ in part], [y for _, y in part])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), one.params, many.params)
    x = last(13)
    np.testing.assert_allclose(one.predict_one(x), many.predict_one(x), rtol=1e-4)


def test_labels_that_come_later_teach_the_same_and_questions_run_ahead():
    samples, now = stream(14), OnlineRegressor(leak)
    later = OnlineRegressor(leak, delayed=True)
    for x, y in samples[:6]:
        now.learn_one(x, y)
        later.predict_one(x)
        later.learn_one(x, y)
    frozen = copy.deepcopy(now)
    asked = [later.predict_one(x) for x, _ in samples[6:10]]
    # the state moves from question to question, as it does where nothing is learnt between them
    place, said = frozen._place, []
    carry, of = place.state.carry, place.of_features
    for x, _ in samples[6:10]:
        row = frozen._row(x)
        y, (carry, of) = frozen._forward(place.params, carry, of, place.of_targets, row)
        said.append(float(y[0]) + frozen._first_target)
    np.testing.assert_allclose(asked, said, rtol=1e-6)
    taught(now, samples[6:10])
    taught(later, samples[6:10])
    jax.tree.map(np.testing.assert_array_equal, now.params, later.params)
    assert now.predict_one(samples[10][0]) == later.predict_one(samples[10][0])


def test_a_copy_and_a_pickle_go_on_alike():
    labelled = [(x, k % 2) for k, (x, _) in enumerate(stream(10))]
    first = taught(OnlineClassifier(model), labelled[:8])
    others = copy.copy(first), copy.deepcopy(first), pickle.loads(pickle.dumps(first))
    want, *got = (
        taught(each, labelled[8:]).predict_proba_one(last(11)) for each in (first, *others)
    )
    assert got == [want] * 3
    assert first.clone().predict_proba_one(last(11)) == {}


def test_a_missing_feature_counts_as_its_mean():
    found = taught(OnlineRegressor(leak), stream(9))
    mean = np.mean([x['b'] for x, _ in stream(9)])
    told = found.predict_one({'a': 0.3, 'b': mean})
    np.testing.assert_allclose(found.predict_one({'a': 0.3}), told, rtol=1e-5)


def test_a_restart_forgets_the_sequence_and_not_what_was_learnt():
    found = taught(OnlineRegressor(leak, scale=False), stream(5))
    learnt = jax.tree.map(np.asarray, found.params)
    found.restart()
    expected = np.tanh(np.array([0.5, 2.0]) @ learnt['in']) @ learnt['out']
    np.testing.assert_allclose(found.predict_one({'a': 0.5, 'b': 2.0}), expected[0], rtol=1e-5)


def test_river_evaluates_it_and_a_drift_detector_stands_beside():
    """The label is whether the last two features agree: no model without memory can tell."""
    bits = np.random.default_rng(0).integers(0, 2, 1500)
    samples = [({'x': int(b)}, bool(a == b)) for a, b in zip(bits, bits[1:], strict=False)]
    found = OnlineClassifier(lambda i, o: brainstate.nn.Sequential(
        nn.GRUCell(i, 12), nn.Linear(12, o)), optimizer=optax.adam(2e-2))  # fmt: skip
    metric = evaluate.progressive_val_score(iter(samples), found, metrics.Accuracy())
    assert metric.get() > 0.8
    detector = drift.ADWIN()
    for x, y in samples[:50]:
        detector.update(float(found.predict_one(x) != y))
    piped = compose.Pipeline(preprocessing.StandardScaler(), OnlineClassifier(model))
    assert set(taught(piped, samples[:5]).predict_proba_one(samples[5][0])) == {True, False}


def test_a_call_that_changes_nothing_compiles_nothing():
    found, programs = OnlineRegressor(model, rules.es_d_rtrl(0.9)), []
    for x, y in stream(8):
        found.predict_one(x)
        found.learn_one(x, y)
        programs.append((found._forward._cache_size(), found._learn._cache_size()))
    assert set(programs[2:]) == {(1, 1)}


class Clock(nn.Linear):
    """A layer that reads the time."""

    def update(self, x):
        return super().update(x) + brainstate.environ.get('t')


BAD = {
    'a word': (lambda m: m.learn_one({'a': 1.0, 'b': 'red'}, 1.0), "'b' is 'red'.*OneHotEncoder"),
    'no number': (lambda m: m.predict_one({'a': np.nan, 'b': 1.0}), "'a' is nan.*leave this"),
    'no target': (lambda m: m.learn_one({'a': 1.0, 'b': 1.0}, None), 'the target is None.*leave'),
    'digits in a word': (lambda m: m.predict_one({'a': '3', 'b': 1.0}), "'a' is '3'.*Encoder"),
    'a square too large': (lambda m: m.predict_one({'a': 1e20, 'b': 1.0}), "'a' is 1e.20.*1e.18"),
    'too large for a float': (lambda m: m.learn_one({'a': 1.0}, 10**400), 'the target is 1000'),
    'two rows, one target': (lambda m: m.learn_many(2 * [{'a': 1.0}], [1.0]), '2 rows and y 1:'),
    'a new feature': (lambda m: m.learn_one({'a': 1.0, 'c': 1.0}, 1.0), "'c' was not in the first"),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_samples_are_refused_and_change_nothing(name):
    call, message = BAD[name]
    found = OnlineRegressor(leak)
    found.learn_one({'a': 1.0, 'b': 2.0}, 1.0)
    before = found._place
    with pytest.raises(OptionError, match=message):
        call(found)
    assert found._place is before


def test_bad_models_and_labels_are_refused():
    with pytest.raises(OptionError, match='no features'):
        OnlineRegressor(leak).predict_one({})
    reads_time = lambda i, o: brainstate.nn.Sequential(nn.GRUCell(i, 3), Clock(3, o))
    with brainstate.environ.context(dt=1.0, t=0.0), pytest.raises(OptionError, match=r"\['t'\]"):
        OnlineRegressor(reads_time).predict_one({'a': 1.0})
    for kind, size in ((OnlineRegressor, 3), (OnlineClassifier, 1)):
        with pytest.raises(OptionError, match=rf'returns \[1, {size}\], and has to return'):
            kind(lambda i, o, size=size: leak(i, size)).learn_one({'a': 1.0}, 1.0)
    found = taught(OnlineClassifier(leak), [({'a': 1.0}, label) for label in 'ab'])
    with pytest.raises(OptionError, match='3 labels.*num_classes is 2'):
        found.learn_one({'a': 1.0}, 'c')
    assert set(found.predict_proba_one({'a': 1.0})) == {'a', 'b'}


def test_the_largest_numbers_leave_a_network_that_answers():
    numbers = (0.0, 1.0), (1.0, -1e18), (1e18, 1e18), (-1e18, 2.0), (1.0, 1.0)
    found = taught(OnlineRegressor(leak), [({'a': x}, y) for x, y in numbers])
    assert np.isfinite(found.predict_one({'a': 1.0}))


@pytest.mark.parametrize('label', [[1], np.array(1), np.nan])
def test_a_sample_that_is_refused_makes_no_network(label):
    """Its features would be those of all samples; no rows are no sample either."""
    for found, bad in ((OnlineClassifier(leak), label), (OnlineRegressor(leak), None)):
        with pytest.raises(OptionError, match='a label is|the target is'):
            found.learn_one({'a': 1.0}, bad)
        found.learn_many([], [])
        assert found.params is None
        found.learn_one({'b': 1.0}, 1)


def of_river():
    for made in (OnlineRegressor(model), OnlineClassifier(model, num_classes=10)):
        skipped = made._unit_test_skips()
        for k, check in enumerate(checks.yield_checks(made)):
            name = getattr(check, '__name__', None) or check.func.__name__
            if name not in skipped:
                yield pytest.param(made, check, id=f'{type(made).__name__}-{name}-{k}')


@nightly
@pytest.mark.parametrize('made, check', list(of_river()))
def test_river_s_own_checks(made, check):
    check(made.clone())
