"""Recorded spikes as tasks: files of the Spiking Heidelberg Digits and Spiking Speech Commands
(Cramer et al., 2022, IEEE TNNLS 33:2744), 700 channels of a model of the inner ear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .._public_names import lacking as _lacking
from ..errors import OptionError, StructureError
from ._task import Batch, Task, check_real, check_whole, different, judged

__all__ = ['Events', 'augment', 'events_task', 'made_events', 'read_shd', 'write_shd']

CHANNELS, SECONDS = 700, 1.4
LONGEST = 10  # seconds; what is longer was measured in another unit
PACKED = {b'PK': 'zip', b'\x1f\x8b': 'gzip'}  # by the first two bytes


@dataclass(frozen=True, eq=False, repr=False)
class Events:
    """Samples of spikes: of each its ``times`` in seconds, its ``units``, the channels 0 to 699
    that fired then, its label, and its speaker where there are any. A sample without events is
    kept. ``events[chosen]`` has some samples, by a slice, by numbers or by a mask.

    Raises :class:`braintrace.errors.StructureError` with the place of what is no such sample.

    >>> from braintrace.tasks import events
    >>> events.made_events(40, seed=1)[:20]
    made 1: 20 samples (0 empty), 136,290 events, 18 classes, 11 speakers
    """

    times: tuple[np.ndarray, ...]
    units: tuple[np.ndarray, ...]
    labels: np.ndarray
    speakers: np.ndarray | None = None
    source: str = 'events'

    def __post_init__(self):
        each = self.times, self.units, self.labels, self.speakers
        sizes = [len(those) for those in each if those is not None]
        if len({*sizes}) > 1:
            found = f'times, units, labels and speakers of {sizes} samples'
            raise StructureError(f'{self.source}: {found}; each sample has one of each.')
        if not len(self.times):
            raise StructureError(f'{self.source} has no samples.')
        kind = getattr(self.labels, 'dtype', np.dtype(object)).kind
        if kind not in 'iu' or self.labels.min() < 0:
            raise StructureError(f'{self.source}: labels are no array of class numbers from 0 on.')
        for i, (times, units) in enumerate(zip(self.times, self.units)):
            if wrong := _wrong(times, units):
                raise StructureError(f'{self.source}, sample {i}: {wrong}')

    def __len__(self) -> int:
        return len(self.times)

    def __getitem__(self, chosen) -> Events:
        at = np.atleast_1d(np.arange(len(self))[chosen])
        times, units = (tuple(each[i] for i in at) for each in (self.times, self.units))
        speakers = None if self.speakers is None else self.speakers[at]
        return Events(times, units, self.labels[at], speakers, self.source)

    def __repr__(self) -> str:
        sizes = [len(times) for times in self.times]
        told = f'{len(self):,} samples ({sizes.count(0)} empty), {sum(sizes):,} events'
        speakers = '' if self.speakers is None else f', {len(np.unique(self.speakers))} speakers'
        return f'{self.source}: {told}, {self.classes} classes{speakers}'

    @property
    def classes(self) -> int:
        """One more than the largest label."""
        return int(self.labels.max()) + 1

    def bins(
        self, steps: int, seconds: float = SECONDS, groups: int = 1, dtype='uint8'
    ) -> np.ndarray:
        """Numbers of events ``(steps, samples, 700 // groups)``, of ``groups`` neighbouring
        channels together; what comes at ``seconds`` or later is left out.

        Raises :class:`braintrace.errors.OptionError` where ``groups`` does not divide 700, and
        where ``dtype`` does not hold a number.

        >>> from braintrace.tasks import events
        >>> counts = events.made_events(3).bins(100, groups=5)
        >>> counts.shape, counts.dtype
        ((100, 3, 140), dtype('uint8'))
        """
        check_whole('steps', steps)
        check_real('seconds', seconds)
        check_whole('groups', groups)
        if seconds > LONGEST:
            raise OptionError(f'seconds is {seconds}; are these milliseconds? Give seconds.')
        if CHANNELS % groups:
            fit = ', '.join(str(n) for n in range(1, CHANNELS + 1) if CHANNELS % n == 0)
            raise OptionError(f'groups is {groups}, which does not divide 700; give one of {fit}.')
        width = CHANNELS // groups
        found = np.zeros((steps, len(self), width), dtype)
        for i, (times, units) in enumerate(zip(self.times, self.units)):
            step = (times.astype(float) * steps / seconds).astype(int)
            place = (step * width + units // groups)[step < steps]
            counts = np.bincount(place, minlength=steps * width).reshape(steps, width)
            found[:, i] = counts
            if (found[:, i] != counts).any():
                raise OptionError(
                    f'{self.source}, sample {i}: {counts.max()} events in a bin, which '
                    f'{found.dtype} does not hold; give more steps, smaller groups or a wider '
                    'dtype.'
                )
        return found

    def split(
        self, by: str = 'speaker', share: float = 0.1, *, key: Array
    ) -> tuple[Events, Events]:
        """``(rest, held)``: all samples of a share of the speakers, at least one, are held out, or
        a share of the samples (``by='sample'``), drawn by ``key``.

        Raises :class:`braintrace.errors.OptionError` where too few are there.

        >>> import jax
        >>> from braintrace.tasks import events
        >>> rest, held = events.made_events(60).split(key=jax.random.key(0))
        >>> len(rest) + len(held), {*rest.speakers} & {*held.speakers}
        (60, set())
        """
        if by not in ('speaker', 'sample'):
            raise OptionError(f"by is {by!r}; give 'speaker' or 'sample'.")
        check_real('share', share)
        of = self.speakers if by == 'speaker' else np.arange(len(self))
        names = np.unique(of) if of is not None else np.zeros(0)
        count = max(1, round(share * len(names)))
        if of is None or count >= len(names):
            raise OptionError(
                f'{self.source} has {len(names)} {by}s, too few to hold {share} of them out: give '
                "a smaller share, or by='sample'."
            )
        held = np.isin(of, names[jax.random.permutation(key, len(names))[:count]])
        return self[~held], self[held]


def _wrong(times: np.ndarray, units: np.ndarray) -> str:
    """What is wrong with a sample, if anything is."""
    if len(times) != len(units):
        return f'{len(times)} times and {len(units)} units; each event has one of both.'
    least, most = float(times.min(initial=0)), float(times.max(initial=0))
    if not (least >= 0 and most < float('inf')):
        return f'a time of {most if least == 0 else least}; times are seconds from 0 on.'
    if most > LONGEST:
        return f'a time of {most:g}; are these milliseconds? Times are seconds.'
    if strange := [*units[(units < 0) | (units >= CHANNELS) | (units % 1 != 0)]]:
        return f'unit {strange[0]}; units are the channels 0 to {CHANNELS - 1}.'
    return ''


def read_shd(path: str | Path) -> Events:
    """The events of an unpacked HDF5 file of SHD or SSC; needs h5py
    (``braintrace-online[events]``).

    Raises ``FileNotFoundError``, an ``ImportError`` without h5py, and
    :class:`braintrace.errors.StructureError` for a file that is packed, cut off, or of another
    format.

    >>> from braintrace.tasks import events
    >>> events.read_shd('shd_train.h5.gz')
    Traceback (most recent call last):
    FileNotFoundError: there is no file shd_train.h5.gz; give an unpacked file of SHD or SSC.
    """
    path, h5py = Path(path), _h5py()
    if not path.is_file():
        raise FileNotFoundError(f'there is no file {path}; give an unpacked file of SHD or SSC.')
    with path.open('rb') as raw:
        packed = PACKED.get(raw.read(2))
    if packed:
        raise StructureError(f'{path} is a {packed} file; unpack it first.')
    try:
        with h5py.File(path, 'r') as file:
            times, units, labels, speakers = _arrays(file, path)
        return Events(times, units, labels, speakers, path.name)
    except OSError as error:
        raise StructureError(
            f'{path} is cut off, or no HDF5 file; fetch it again. h5py says: {error}'
        ) from error


def _arrays(file, path: Path) -> Iterator:
    """Times, units, labels and speakers."""
    for name in ('spikes/times', 'spikes/units', 'labels'):
        if name not in file:
            there: list[str] = []
            file.visit(there.append)
            raise StructureError(f'{path} has no {name}; it has {", ".join(there) or "nothing"}.')
        if (file[name].dtype.kind == 'O') != (name != 'labels'):
            raise StructureError(f'{path}: {name} holds {file[name].dtype}, unlike SHD.')
        yield file[name][:] if name == 'labels' else tuple(file[name][:])
    yield file['extra/speaker'][:] if 'extra/speaker' in file else None


def _h5py():
    try:
        import h5py
    except ImportError as error:
        raise ImportError('files of events need h5py; run `pip install h5py`.') from error
    return h5py


def write_shd(path: str | Path, events: Events) -> None:
    """Write events as a file that :func:`read_shd` reads.

    >>> import pathlib, tempfile
    >>> from braintrace.tasks import events
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, 'small.h5')
    ...     events.write_shd(file, events.made_events(3))
    ...     events.read_shd(file)
    small.h5: 3 samples (0 empty), 15,650 events, 3 classes, 2 speakers
    """
    h5py = _h5py()
    with h5py.File(path, 'w') as file:
        for name, parts in (('times', events.times), ('units', events.units)):
            kind = h5py.vlen_dtype(parts[0].dtype)
            those = file.create_dataset(f'spikes/{name}', (len(parts),), kind)
            for i, part in enumerate(parts):
                those[i] = part
        file['labels'] = events.labels
        if events.speakers is not None:
            file['extra/speaker'] = events.speakers


def made_events(samples: int, seed: int = 0, classes: int = 20) -> Events:
    """Events in the shapes and dtypes of SHD that nobody recorded, for tests: a class is eight
    ridges of 3,000 to 10,000 events, the same for all seeds.

    >>> from braintrace.tasks import events
    >>> made = events.made_events(3)
    >>> made.times[0].dtype, made.units[0].dtype, made.labels.dtype
    (dtype('float16'), dtype('uint16'), dtype('uint16'))
    """
    check_whole('samples', samples)
    ridges = np.random.default_rng(0).random((classes, 8, 2))
    rng = np.random.default_rng([1, seed])
    labels = rng.permutation(np.arange(samples) % classes).astype('uint16')
    times, units = [], []
    for label in labels:
        at, channel = ridges[label][rng.integers(0, 8, rng.integers(3000, 10000))].T
        at = (at + 0.06 * rng.normal(size=at.shape)) % 1 * rng.uniform(0.6, 1.2)
        channel = np.floor(CHANNELS * channel + 25 * rng.normal(size=at.shape)) % CHANNELS
        order = np.argsort(at)
        times.append(at[order].astype('float16'))
        units.append(channel[order].astype('uint16'))
    speakers = rng.integers(0, 12, samples).astype('uint16')
    return Events(tuple(times), tuple(units), labels, speakers, f'made {seed}')


def augment(shift: int = 8, blend: float = 0.5) -> Callable[[Array, Array, Array], Array]:
    """``(key, xs, labels) -> xs`` for batches ``(T, B, I)`` of training: each sample is moved by up
    to ``shift`` inputs, the same at all steps, and with a chance of ``blend`` each of its bins is
    that of another sample of its class in the batch with a chance of one half (after Nowotny et
    al., 2022, arXiv 2212.01232).

    >>> import jax, jax.numpy as jnp
    >>> from braintrace.tasks import events
    >>> xs, labels = jnp.ones((3, 2, 5)), jnp.array([0, 1])
    >>> events.augment(shift=1, blend=0.0)(jax.random.key(2), xs, labels)[0].tolist()
    [[1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0, 1.0]]
    """
    check_whole('shift', shift, 0)
    if not 0 <= blend <= 1:
        raise OptionError(f'blend is {blend!r}; give a chance from 0 to 1.')

    def augmented(key: Array, xs: Array, labels: Array) -> Array:
        of_other, of_sample, of_bin, of_shift = jax.random.split(key, 4)
        batch, inputs = xs.shape[1:]
        same = jnp.where(labels[:, None] == labels, 0.0, -jnp.inf)
        other = xs[:, jax.random.categorical(of_other, same)]
        blended = jax.random.bernoulli(of_sample, blend, (batch, 1))
        xs = jnp.where(blended & jax.random.bernoulli(of_bin, 0.5, xs.shape), other, xs)
        padded = jnp.pad(xs, ((0, 0), (0, 0), (shift, shift)))
        start = jax.random.randint(of_shift, (batch,), 0, 2 * shift + 1)
        moved = jax.vmap(jax.lax.dynamic_slice_in_dim, (1, 0, None, None), 1)
        return moved(padded, start, inputs, 1)

    return augmented


def events_task(
    train: Events,
    test: Events,
    validation: Events | None = None,
    *,
    steps: int = 100,
    seconds: float = SECONDS,
    groups: int = 5,
    dtype='uint8',
    augment: Callable | None = None,
) -> Task:
    """Which class is a sample of? Asked at each step, at later ones with more weight.

    ``steps``, ``seconds``, ``groups`` and ``dtype``, in which data are kept, are those of
    :meth:`Events.bins`; inputs are these numbers as floats. The validation part is ``validation``,
    or one tenth of ``train``, of its speakers where it has any. ``augment(key, xs, labels) -> xs``
    changes batches of training. A batch has no sample twice. The score is the accuracy, ``floor``
    that of who always says the commonest class of ``train``.

    Raises :class:`braintrace.errors.OptionError` for parts that share a sample, for a label that
    ``train`` has not, and for a batch that is larger than its part.

    >>> from braintrace.tasks import events
    >>> train, test = events.made_events(40), events.made_events(20, seed=1)
    >>> print(events.events_task(train, test, steps=50, groups=10))
    events: 50 steps, 70 inputs, 20 outputs, floor 5.0 %
    """
    for name, part in (('train', train), ('test', test), ('validation', validation)):
        if not isinstance(part, Events) and (part is not None or name != 'validation'):
            raise OptionError(f'{name} is {type(part).__name__}; give Events, as of read_shd.')
    if validation is None:
        by = 'sample' if train.speakers is None else 'speaker'
        train, validation = train.split(by, key=jax.random.key(0))
    parts = {'train': train, 'validation': validation, 'test': test}
    _check_apart(parts)
    arrays = {
        name: (those.bins(steps, seconds, groups, dtype), those.labels.astype('int32'))
        for name, those in parts.items()
    }

    def draw(key: Array, batch_size: int, part: str) -> Batch:
        counts, labels = arrays[part]
        of_choice, of_change = jax.random.split(key)
        chosen = different(of_choice, batch_size, labels, part, 'samples')
        xs = jnp.asarray(counts)[:, chosen].astype(float)
        chosen_labels = jnp.asarray(labels)[chosen]
        if augment is not None and part == 'train':
            xs = augment(of_change, xs, chosen_labels)
        ys = jnp.broadcast_to(chosen_labels, (steps, batch_size))
        return Batch(xs, ys, jnp.arange(1, steps + 1) / steps)

    common = int(np.bincount(train.labels).argmax())
    said = jax.nn.one_hot(common, train.classes)
    sizes = steps, CHANNELS // groups, train.classes
    floor = float(np.mean(test.labels == common))
    return judged('events', sizes, draw, 'accuracy', floor, said)


def _check_apart(parts: dict[str, Events]) -> None:
    """Refuse parts with samples in common, and labels that the training part has not."""
    seen: dict[int, str] = {}
    for name, those in parts.items():
        who, most = f'the {name} part ({those.source})', parts['train'].classes - 1
        if those.classes - 1 > most:
            raise OptionError(f'{who} has the label {those.classes - 1}; train ends at {most}.')
        for i, sample in enumerate(zip(those.times, those.units)):
            other = seen.setdefault(hash(tuple(part.tobytes() for part in sample)), name)
            if other != name and len(sample[0]):
                raise OptionError(
                    f'{who} and the {other} part ({parts[other].source}) share a sample, number '
                    f'{i} of {name}; give another file, or other samples.'
                )


if not TYPE_CHECKING:
    __getattr__ = _lacking(__name__, __all__)
