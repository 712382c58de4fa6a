"""A learner is saved as a flat dict of arrays, and goes back to it as often as is asked."""

import io
import signal

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace.errors import StructureError
from tests.compare import assert_close

from .networks import BATCH, UNITS, Net, by_steps, compiled, data, loss_of, refused, shared
from .test_calls import vectorised_by_map, vectorised_by_new_states


class Rich(Net):
    """Beside hidden states: noise, a count, a membrane with a unit, and two states in one."""

    def init_state(self, batch_size=None, **_):
        self.steps = brainstate.ShortTermState(0)
        self.v = brainstate.HiddenState(jnp.zeros(batch_size) * u.mV)
        self.pair = brainstate.HiddenGroupState(jnp.zeros((batch_size, 2)))

    def update(self, x):
        self.steps.value += 1
        self.v.value = 0.5 * self.v.value + x.sum(-1) * u.mV
        self.pair.set_value([self.pair.get_value(1), x[:, 0]])
        noise = 0.1 * brainstate.random.randn(*x.shape)
        return super().update(x + noise) + self.v.value[:, None] / u.mV


def test_one_snapshot_is_restored_again_and_again():
    xs, ys = data(3)
    learner = compiled()
    step_fn = loss_of(learner)
    learner(xs[0])
    tree = learner.save()
    before = jax.tree.map(np.asarray, tree)
    first = learner.etrace_grad(xs, ys, step_fn=step_fn).grads
    for _ in range(2):
        learner.restore(tree)
        assert_close(learner.save(), before, 0.0)
        assert_close(learner.etrace_grad(xs, ys, step_fn=step_fn).grads, first, 0.0)
    assert_close(tree, before, 0.0)


def test_a_file_brings_another_learner_to_the_same_numbers():
    xs, _ = data()
    learner, other = compiled(model=Rich), compiled(model=Rich)
    for x in xs[:2]:
        learner(x)
    file = io.BytesIO()
    np.savez(file, **learner.save())
    file.seek(0)
    outputs = [learner(x) for x in xs]

    brainstate.random.seed(5)
    for state in other.param_states.values():
        state.value = jax.tree.map(jnp.ones_like, state.value)
    other.restore(dict(np.load(file)))
    np.testing.assert_array_equal([other(x) for x in xs], outputs)
    assert_close(other.save(), learner.save(), 0.0)


def test_the_names_are_strings_and_every_entry_is_an_array():
    tree = compiled(model=Rich).save()
    assert all(isinstance(k, str) and isinstance(x, jax.Array) for k, x in tree.items())
    assert not any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) for x in tree.values())
    assert {
        'parameters/cell/Wz/weight/weight',
        'states/cell/h',
        'states/v [mV]',
        'states/pair',
        'states/steps',
        'initial/v [mV]',
        'etrace/t',
        'etrace/trace/cell/Wz/weight/weight/cell/h/bias/0',
        'rule',
    } < set(tree)
    assert [k for k in tree if k.startswith('states/~outside/RandomState')]
    assert bytes(np.asarray(tree['rule'])) == b'd_rtrl()'


def without(tree, name):
    return {k: x for k, x in tree.items() if k != name}


HALF = np.zeros((UNITS, 2), np.float32)


class Strange:
    """An array by its looks."""

    shape, dtype = (BATCH, UNITS), np.dtype(float)


class Other(Strange):
    def __array__(self, *_, **__):
        return np.ones(BATCH)


def text(content: bytes):
    return np.frombuffer(content, np.uint8)


def given_away():
    array = jnp.ones((BATCH, UNITS), float)
    array.delete()
    return array


def torn(tree) -> io.BytesIO:
    file = io.BytesIO()
    np.savez(file, **tree)
    whole = bytearray(file.getvalue())
    whole[300:340] = bytes(40)
    return io.BytesIO(whole)


def put(name, value):
    return lambda tree: {**tree, name: value}


def unread(name):
    return f"the entry '{name}' of the tree can not be read"


H, JSON, NO_JSON = 'states/cell/h', 'fingerprint', 'its fingerprint can not be read'
CHANGES = [  # what is said, and what was done to the tree
    ('  states/cell/h: absent when saved, float64[3, 4] here', lambda t: without(t, H)),
    ('  states/u: float32[4, 2] when saved, absent here', put('states/u', HALF)),
    ('  etrace/t: int32[1] when saved, int32[3] here', put('etrace/t', np.ones(1, np.int32))),
    ('parameters/readout: float32[4, 2] when saved, float64', put('parameters/readout', HALF)),
    ('parameters/readout: str when saved', put('parameters/readout', 'none')),
    ('  rule: es_d_rtrl(0.9) when saved, d_rtrl()', put('rule', text(b'es_d_rtrl(0.9)'))),
    ('rule: absent when saved, d_rtrl', lambda t: without(t, 'rule')),
    (' when saved, d_rtrl() here', put('rule', np.full(3, -1))),
    (unread('rule'), put('rule', 'd_rtrl()')),
    (unread('rule'), put('rule', None)),
    ('the tree is list; give the dict that `learner.save()` returned', list),
    ('read it by `functional.load_state(file, like)`', put('~format', HALF)),
    (unread(JSON), put(JSON, object())),
    *((NO_JSON, put(JSON, text(t))) for t in (b'{', b'[' * 10**5, b'[1]', b'{"rule": 1}', b'null')),
    (unread(H), put(H, Strange())),
    (': it is float64[3]', put(H, Other())),
    (unread(H), put(H, jax.ShapeDtypeStruct((BATCH, UNITS), float))),
    ('Array has been deleted', lambda t: put(H, given_away())(t)),
    ('3: int64[] when saved, absent here', put(3, 4)),
    (
        'states/cell/h: float64[3, 4] mV when saved, float64[3, 4] here',
        lambda t: {k: u.Quantity(v, unit=u.mV) for k, v in t.items()},
    ),
    ("' of the tree can not be read", lambda t: np.load(torn(t))),
]


@pytest.mark.parametrize('said, change', CHANGES, ids=[said for said, _ in CHANGES])
def test_a_tree_that_does_not_fit_is_refused_by_the_name_of_the_entry_and_nothing_changes(
    said, change
):
    learner = shared()
    before = learner.save()
    with refused(StructureError, [said], learner):
        learner.restore(change({k: np.asarray(x) for k, x in before.items()}))
    assert_close(learner.save(), before, 0.0)


@pytest.mark.usefixtures('interruptible')
@pytest.mark.parametrize('at', [0, 1, -1])
def test_a_restore_that_is_cut_off_leaves_no_mixture(at, monkeypatch):
    learner = shared()
    before = learner.save()
    tree = {k: x if k in ('rule', 'fingerprint') else x + 1 for k, x in before.items()}
    at, written, write = at % len(learner._saved()), [], brainstate.State._write_value

    def stops(state, value):
        write(state, value)
        written.append(state)
        if len(written) == at + 1:
            stop()

    def fails():
        raise RuntimeError('a hook of a state')

    monkeypatch.setattr(brainstate.State, '_write_value', stops)
    stop = lambda: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        learner.restore(tree)
    assert_close(learner.save(), tree, 0.0)
    written.clear()
    stop = fails
    with pytest.raises(RuntimeError, match='a hook'):
        learner.restore(before)
    assert_close(learner.save(), tree, 0.0)
    monkeypatch.undo()
    learner.restore(before)


def test_a_unit_that_differs_is_refused():
    tree = compiled(model=Rich).save()
    tree['states/v [V]'] = tree.pop('states/v [mV]')
    with pytest.raises(StructureError, match=r'states/v \[mV\]: absent when saved'):
        compiled(model=Rich).restore(tree)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('vectorised', [vectorised_by_new_states, vectorised_by_map])
def test_every_lane_of_a_vectorised_learner_is_saved(vectorised):
    xs, ys = data()
    learner, lanes = vectorised(braintrace.rules.d_rtrl())
    lanes(xs[0])
    tree = learner.save()
    assert tree['etrace/t'].shape == (BATCH,) and tree['states/cell/h'].shape == (BATCH, UNITS)

    gradient = lambda: by_steps(lanes, xs[1:2], ys[1:2], learner.param_states)
    first = gradient()
    learner.restore(tree)
    assert_close(gradient(), first, 0.0)
