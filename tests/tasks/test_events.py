"""Files of events are read as they were written, binned exactly, and refused where wrong."""

import functools
import gzip
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace.errors import OptionError, StructureError
from braintrace.tasks import events

h5py = pytest.importorskip('h5py')
KEY = jax.random.key(3)


def small(times=((0.0, 0.25, 1.5), (), (0.5, 0.5)), units=((0, 699, 5), (), (7, 7)), **more):
    """Three samples, the second one empty."""
    times = tuple(np.array(each, 'float16') for each in times)
    units = tuple(np.array(each, 'uint16') for each in units)
    values = {'labels': np.array([0, 2, 1]), 'speakers': np.array([4, 4, 5])} | more
    return events.Events(times, units, **values)


@functools.cache
def made():
    """One event of fifty, so that a bin of many channels holds them."""
    found = []
    for seed, n in enumerate((24, 8)):
        those = events.made_events(n, seed, 4)
        times, units = (tuple(part[::50] for part in all) for all in (those.times, those.units))
        found.append(events.Events(times, units, those.labels, those.speakers, those.source))
    return found


@functools.cache
def task(**options):
    return events.events_task(*made(), steps=20, groups=100, **options)


def test_a_file_is_read_as_it_was_written_bit_by_bit(tmp_path):
    for written in (small(), made()[0], small(speakers=None)):
        events.write_shd(tmp_path / 'file.h5', written)
        found = events.read_shd(tmp_path / 'file.h5')
        assert found.source == 'file.h5' and len(found) == len(written)
        for name in ('times', 'units'):
            for got, want in zip(getattr(found, name), getattr(written, name), strict=True):
                assert got.dtype == want.dtype and got.tobytes() == want.tobytes()
        for name in ('labels', 'speakers'):
            assert np.array_equal(getattr(found, name), getattr(written, name))


def test_an_empty_sample_is_kept_counted_and_all_zeros():
    assert str(small()) == 'events: 3 samples (1 empty), 5 events, 3 classes, 2 speakers'
    assert not small().bins(10)[:, 1].any()


def test_bins_count_each_event_before_the_end_in_its_step_and_group():
    one = made()[0][:3]
    for steps, seconds, groups in ((30, 1.4, 7), (13, 0.7, 700)):
        found = one.bins(steps, seconds, groups)
        want = np.zeros((steps, 3, 700 // groups), int)
        for sample, (times, units) in enumerate(zip(one.times, one.units)):
            for time, unit in zip(times.tolist(), units.tolist()):
                if time < seconds:
                    want[int(time * steps / seconds), sample, unit // groups] += 1
        assert found.dtype == 'uint8' and np.array_equal(found, want)
    assert small().bins(3, 1.5, 700).sum() == 4  # what comes at the end is left out


def test_a_split_holds_out_whole_speakers_or_a_share_of_the_samples():
    whole = made()[0]
    for by, share in (('speaker', 0.3), ('sample', 0.25)):
        rest, held = whole.split(by, share, key=KEY)
        again = whole.split(by, share, key=KEY)[1]
        assert np.array_equal(held.labels, again.labels) and len(rest) + len(held) == len(whole)
        kept = {times.tobytes() for part in (rest, held) for times in part.times}
        assert len(kept) == len(whole)
        if by == 'speaker':
            assert held.speakers.size and not {*rest.speakers} & {*held.speakers}
            assert len({*held.speakers}) == round(0.3 * len({*whole.speakers}))
        else:
            assert len(held) == 6


def test_some_samples_are_chosen_by_a_slice_by_numbers_and_by_a_mask():
    assert small()[1:].labels.tolist() == [2, 1] and small()[2].units[0].tolist() == [7, 7]
    assert small()[np.array([2, 0])].speakers.tolist() == [5, 4]
    assert small()[np.array([True, False, True])].labels.tolist() == [0, 1]


def test_a_task_draws_each_sample_with_its_label_from_its_part():
    drawn = task()
    rest, held = made()[0].split(key=jax.random.key(0))
    for part, those in {'train': rest, 'validation': held, 'test': made()[1]}.items():
        xs, ys, mask = drawn.sample(KEY, len(those), part)
        want = {
            (counts.tobytes(), int(label))
            for counts, label in zip(those.bins(20, groups=100).swapaxes(0, 1), those.labels)
        }
        lanes = np.asarray(xs.swapaxes(0, 1)).astype('uint8')
        assert want == {(lane.tobytes(), int(label)) for lane, label in zip(lanes, ys[0])}
        assert np.all(ys == ys[0]) and np.allclose(mask, np.arange(1, 21) / 20)
        assert xs.dtype == 'float32'
    assert (drawn.steps, drawn.inputs, drawn.outputs) == (20, 7, 4)
    outputs = drawn.trivial(xs)
    assert outputs.shape == (20, 8, 4) and drawn.score(outputs, ys, mask) == drawn.floor == 0.25


def test_a_validation_part_may_be_given_and_a_file_without_speakers_is_split_by_samples():
    train, test = made()
    given = events.events_task(train, test[:4], test[4:], steps=5, groups=700)
    assert given.sample(KEY, 24).xs.shape == (5, 24, 1)
    bare = events.Events(train.times, train.units, train.labels)
    assert events.events_task(bare, test, steps=5, groups=700).sample(KEY, 22).ys.shape == (5, 22)


def test_augmenting_moves_a_sample_and_blends_it_with_others_of_its_class():
    labels = jnp.array([0, 1, 0, 2])
    xs = jnp.arange(1.0, 5.0)[:, None] + 10 * jnp.arange(6.0) + jnp.zeros((50, 4, 6))
    ways = [events.augment(*each) for each in ((0, 0.0), (2, 0.0), (0, 1.0))]
    changed = jax.jit(lambda key: [way(key, xs, labels) for way in ways])(jax.random.key(0))
    same, moved, blended = map(np.asarray, changed)
    assert np.array_equal(same, xs)
    assert np.array_equal(moved, np.broadcast_to(moved[0], moved.shape))  # the same at all steps
    for lane, row in enumerate(moved[0]):
        padded = np.pad(np.asarray(xs[0, lane]), 2)
        assert any(np.array_equal(row, padded[k : k + 6]) for k in range(5))
    assert not np.array_equal(moved, xs)
    of = [{*np.unique(blended[:, lane] % 10)} for lane in range(4)]
    assert of[0] | of[2] == {1.0, 3.0} and of[1] == {2.0} and of[3] == {4.0}
    assert {1.0, 3.0} in of  # one of the two met the other
    mixed = blended[:, of.index({1.0, 3.0})] % 10 == 3
    assert 0.4 < mixed.mean() < 0.6 and mixed.mean(0).std() > 0 and mixed.mean(1).std() > 0


def test_only_batches_of_training_are_augmented():
    changed, plain = task(augment=lambda key, xs, labels: xs + 1), task()
    for part, difference in (('train', 1), ('test', 0)):
        one, other = (each.sample(KEY, 2, part).xs for each in (changed, plain))
        assert np.all(one - other == difference)


def test_without_h5py_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'h5py', None)
    with pytest.raises(ImportError, match='pip install h5py'):
        events.read_shd('shd_train.h5')


def zipped(path):
    with zipfile.ZipFile(path, 'w') as file:
        file.writestr('shd.h5', 'any')


def holding(name, value):
    def write(path):
        with h5py.File(path, 'w') as file:
            file[name] = value

    return write


def cut(path):
    events.write_shd(path, small())
    path.write_bytes(path.read_bytes()[:-1000])


def unlike(**changes):
    """A file whose arrays do not fit each other."""

    def write(path):
        events.write_shd(path, small())
        with h5py.File(path, 'a') as file:
            for name, value in changes.items():
                del file[name]
                file[name] = value

    return write


FILES = {
    'is a gzip file; unpack it': lambda path: path.write_bytes(gzip.compress(b'any')),
    'is a zip file; unpack it': zipped,
    'bad.h5 has no spikes/times; it has frames, frames/x': holding('frames/x', [1]),
    'spikes/times holds float64': holding('spikes/times', np.zeros((2, 3))),
    'bad.h5 is cut off, or no HDF5 file': cut,
    'no HDF5 file': lambda path: path.write_text('<html>'),
    r'bad.h5: .* of \[3, 3, 2, 3\] samples': unlike(labels=[0, 1]),
    'bad.h5: labels are no array of class numbers': unlike(labels=[0, 1, -1]),
}


@pytest.mark.parametrize('words', FILES)
def test_a_bad_file_is_refused(words, tmp_path):
    FILES[words](tmp_path / 'bad.h5')
    with pytest.raises(StructureError, match=words):
        events.read_shd(tmp_path / 'bad.h5')


@pytest.mark.parametrize('name', ['missing.h5', '.'])
def test_a_path_without_a_file_is_refused(name, tmp_path):
    with pytest.raises(FileNotFoundError, match='there is no file .*; give an unpacked file'):
        events.read_shd(tmp_path / name)


def sample(times, units):
    return lambda: small(((0.1,), (0.1,), times), ((1,), (1,), units))


def of_parts(test, *validation):
    return events.events_task(made()[0], test, *validation)


BAD = {
    'events, sample 2: a time of 250; are these milliseconds': sample((0.5, 250), (1, 2)),
    'sample 2: a time of -0.5; times are seconds from 0 on': sample((-0.5, 0.5), (1, 2)),
    'sample 2: a time of nan': sample((0.5, np.nan), (1, 2)),
    'sample 2: unit 700; units are the channels 0 to 699': sample((0.5, 0.5), (1, 700)),
    'sample 2: 2 times and 1 units': sample((0.5, 0.5), (1,)),
    'labels and speakers of .* samples': lambda: small(speakers=np.array([1, 2])),
    'labels are no array of class': lambda: small(labels=np.array([0.0, 1.0, 2.0])),
    'has no samples': lambda: small()[:0],
    'unit -1': lambda: events.Events((np.zeros(1),), (np.array([-1]),), np.array([0])),
    'unit 0.5': lambda: events.Events((np.zeros(1),), (np.array([0.5]),), np.array([0])),
}
REFUSED = {
    'groups is 3, which does not divide 700; give one of 1, 2, 4, 5': lambda: small().bins(9, 1, 3),
    'sample 2: 300 events in a bin, which uint8 does not hold': (
        lambda: small(((), (), 300 * (0.1,)), ((), (), 300 * (1,))).bins(5)
    ),
    'which bool does not hold': lambda: small().bins(5, dtype=bool),
    'seconds is 0': lambda: small().bins(5, 0),
    'seconds is 1400; are these milliseconds': lambda: small().bins(5, 1400),
    "give 'speaker' or 'sample'": lambda: small().split('label', key=KEY),
    'share is 0': lambda: small().split(share=0, key=KEY),
    'has 2 speakers, too few': lambda: small().split(share=0.9, key=KEY),
    'test is str; give Events, as of read_shd': lambda: events.events_task(small(), 'test.h5'),
    'has 0 speakers': lambda: small(speakers=None).split(key=KEY),
    'test part .made 0. and the train part .made 0. share a sample': lambda: of_parts(made()[0]),
    'test part .made 1. and the validation part': lambda: of_parts(made()[1], made()[1][:2]),
    'the test part .made 2. has the label 8; train ends at 3': (
        lambda: of_parts(events.made_events(9, 2, 9))
    ),
    'the test part has 8 samples': lambda: task().sample(KEY, 9, 'test'),
    'shift is -1': lambda: events.augment(-1),
    'blend is 1.5': lambda: events.augment(blend=1.5),
}


@pytest.mark.parametrize('words', BAD | REFUSED)
def test_bad_events_and_bad_arguments_are_refused(words):
    with pytest.raises(StructureError if words in BAD else OptionError, match=words):
        (BAD | REFUSED)[words]()
