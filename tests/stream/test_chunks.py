"""Chunks of any iterator: one program for all, and what was learnt stays when it ends badly."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from braintrace import functional
from braintrace.errors import OptionError, StructureError
from tests.compare import assert_close
from tests.functional.plain import D_RTRL, B, I, N, cell, drawn, loss, params

OPTIMIZER, STEPS = optax.sgd(0.01), 6


def generated(number=3, last=STEPS):
    rng = np.random.default_rng(0)
    for k in range(number):
        steps = last if k == number - 1 else STEPS
        yield rng.normal(size=(steps, B, I)), rng.normal(size=(steps, B, 2))


def started():
    learner = functional.online(cell, D_RTRL)
    learn = jax.jit(learner.sequence_update(loss, OPTIMIZER), donate_argnums=2)
    p = params()
    return learn, (p, OPTIMIZER.init(p), learner.init(p, drawn(B, N), jnp.ones((B, I))))


def learnt(found):
    return found.params, found.opt_state, found.state


def test_a_shorter_chunk_is_filled_up_and_nothing_compiles_anew():
    learn, run = started()
    for k, (xs, ys, mask) in enumerate(functional.chunks(generated(last=2))):
        before = run[0]
        run, steps = learnt(learn(*run, xs, ys, mask)), 2 if k == 2 else STEPS
        assert xs.shape == (STEPS, B, I)
        assert mask.tolist() == [1.0] * steps + [0.0] * (STEPS - steps)
    assert learn._cache_size() == 1
    # the weights are those after the two steps: a gradient of zero moves nothing here
    learn, other = started()
    for xs, ys in generated(last=2):
        other = learnt(learn(*other, jnp.asarray(xs), jnp.asarray(ys)))
    assert_close(run[0], other[0], 1e-6)
    assert not jnp.array_equal(before['w'], run[0]['w'])


def test_what_was_learnt_before_an_error_is_there_and_the_error_goes_on(tmp_path):
    class Broken(Exception):
        pass

    def breaks():
        yield from generated(2)
        raise Broken('the sensor is gone')

    learn, run = started()
    source, done = breaks(), 0
    with pytest.raises(Broken, match='the sensor is gone'):
        try:
            for xs, ys, mask in functional.chunks(source):
                run = learnt(learn(*run, xs, ys, mask))
                done += 1
        finally:
            functional.save_state(tmp_path / 'run.npz', {'run': run, 'done': jnp.array(done)})
    learn, other = started()
    like = jax.eval_shape(lambda: {'run': started()[1], 'done': jnp.array(0)})
    kept = functional.load_state(tmp_path / 'run.npz', like)
    assert int(kept['done']) == 2
    for xs, ys, mask in functional.chunks(generated(2)):
        other = learnt(learn(*other, xs, ys, mask))
    assert_close(jax.tree.leaves(kept['run']), jax.tree.leaves(other), 0)


def test_it_is_never_ahead_of_what_it_gave():
    """So the position of the iterator may be saved with what was learnt."""
    given = []

    def source():
        for k, pair in enumerate(generated()):
            given.append(k)
            yield pair

    for k, _ in enumerate(functional.chunks(source())):
        assert given == list(range(k + 1))


@pytest.mark.parametrize(
    'source, words',
    [
        ([np.ones((3, 2))], 'chunk 0 is a ndarray; an iterator gives pairs'),
        ([{'x': 1, 'y': 2}], 'chunk 0 is a dict; an iterator gives pairs'),
        ([(np.ones(3), np.ones(2))], 'sequences have unequal lengths'),
        ([(np.ones(0), np.ones(0))], 'the sequences are empty'),
        ([(np.ones(3), np.ones(3)), (np.ones(4), np.ones(4))], 'chunk 1 has 4 steps, more than 3'),
        (
            [(np.ones(3), np.ones(3)), (np.ones((3, 1)), np.ones(3, int))],
            r'(?s)chunk 1 .*xs/.: float32\[3\] at first, float32\[3, 1\] here.*ys/.: float32',
        ),
    ],
    ids=['an array', 'a dict', 'lengths', 'empty', 'longer', 'shapes'],
)
def test_what_does_not_fit_is_refused_with_its_number(source, words):
    with pytest.raises(StructureError, match=words):
        list(functional.chunks(iter(source)))


def test_arguments_are_checked():
    with pytest.raises(OptionError, match='source is a int; give an iterator'):
        next(functional.chunks(3))
    with pytest.raises(OptionError, match='length is 0; give a number of steps'):
        next(functional.chunks(generated(), length=0))


def test_any_iterator_will_do():
    assert len(list(functional.chunks(iter(list(generated(2))), length=8))) == 2
    grain = pytest.importorskip('grain')
    pairs = list(generated(3))
    iterator = iter(grain.MapDataset.source(pairs).to_iter_dataset())
    source = functional.chunks(iterator)
    next(source)
    position, second = iterator.get_state(), next(source)
    iterator.set_state(position)
    assert_close(next(functional.chunks(iterator)).xs, second.xs, 0)


def test_a_buffer_that_is_filled_again_and_again_gives_the_chunks_as_they_were():
    """JAX takes an aligned array of NumPy as it lies."""

    def source(buffer):
        for k in range(3):
            buffer[:] = k
            yield buffer, buffer[:, :1]

    raw = np.empty(64 * 64 + 16, np.float32)
    at = (-raw.ctypes.data % 64) // 4
    aligned = raw[at : at + 64 * 64].reshape(64, 64)
    kept = [xs for xs, _, _ in functional.chunks(source(aligned))]
    assert [float(xs.mean()) for xs in kept] == [0, 1, 2]
