"""Exact windows with a synthetic gradient at their ends, against reverse mode and by hand."""

import copy

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import compat
from braintrace.errors import OptionError, StructureError
from tests.compare import added, assert_close

from .networks import BATCH, INPUTS, UNITS, Layer, Net, data, loss_of

K = 2
WINDOWS = {'window': K, 'inside': 'exact'}


def compiled(rule='dni', model=Net, **options):
    brainstate.random.seed(0)
    return compat.compile(model(), rule, jnp.zeros((BATCH, INPUTS)), batch_size=BATCH, **options)


def drawn():
    """A learner whose synthesizer gives credit from the first."""
    shapes = compiled().group_signal_shapes()
    return compiled(synthesizer=compat.SyntheticGradient(shapes, scale=0.5, seed=1))


class StoredSpike(Layer):
    """A leaky layer that reads its own output of the step before, which is a state too."""

    def init_state(self, *args, **kwargs):
        super().init_state()
        self.spike = brainstate.HiddenState(jnp.zeros((self.batch, UNITS)))

    def update(self, x):
        self.h.value = 0.8 * self.h.value - 0.3 * self.spike.value + self.drive(x)
        self.spike.value = jnp.tanh(self.h.value)
        return self.spike.value[:, :2]


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('model', [StoredSpike, Net])
def test_with_the_true_credit_the_gradient_is_that_of_bptt(model):
    """Of two windows, where the credit is a parameter: its error at zero is the true one."""
    xs, ys = data(6)
    learner = compiled(model=model)
    shapes = learner.group_signal_shapes()
    learner.attach_synthesizer(compat.SyntheticGradient(shapes, lanes=False))
    step_fn, options = loss_of(learner), {'keep_trace': False, 'inside': 'exact'}

    def gradients(size):
        learner.reset_state()
        return learner._gradients((xs, ys), step_fn, size, 'sum', dict(options))

    want = gradients(None)[0].grads
    less, missing = gradients(3)
    with pytest.raises(AssertionError):
        assert_close(less.grads, want, 1e-3)
    learner.synthetic.value = jax.tree.map(lambda new, p: new - p, learner.synthetic.value, missing)
    for of_group in learner.synthetic.value.values():
        of_group['w'] = 0 * of_group['w']
    learner.synthetic.value = dict(learner.synthetic.value)
    found, off = gradients(3)
    assert_close(found.grads, want, 1e-5)
    assert max(abs(o['b']).max() for o in off.values()) < 1e-5


A = 0.8  # the leak of `Layer`, whose loss is here `sum(y h)`: every derivative is in closed form


def linear():
    rng = np.random.default_rng(3)
    xs, ys = rng.standard_normal((6, BATCH, INPUTS)), rng.standard_normal((6, BATCH, UNITS))
    learner = compiled(model=lambda: Layer(rng.standard_normal((INPUTS, UNITS))))
    learner.model.h.value = jnp.asarray(rng.standard_normal((BATCH, UNITS)))
    (name,) = learner.group_signal_shapes()
    drawn = lambda p: jnp.asarray(rng.standard_normal(p.shape))
    learner.synthetic.value = jax.tree.map(drawn, learner.synthetic.value)
    return learner, lambda x, y: (y * learner(x)).sum(), name, xs, ys


def window(s, w, h, xs, ys, first, last):
    """Of one window: the gradients of ``w`` and of the linear synthesizer, and the state behind."""
    end = h
    for x in xs:
        end = A * end + x @ w
    lam, dw = 0 * h if last else end @ s['w'] + s['b'], 0.0
    for x, y in zip(xs[::-1], ys[::-1], strict=True):
        lam = lam + y
        dw, lam = dw + x.T @ lam, A * lam
    off = (h @ s['w'] + s['b'] - lam) * (not first)
    return dw, {'w': h.T @ off, 'b': off.sum(0)}, end


def by_hand(s, w, h, xs, ys, rate=0.0):
    """The sums over all windows; with a ``rate`` the parameters after their updates."""
    dw, ds = 0.0, jax.tree.map(np.zeros_like, s)
    for k in range(0, len(xs), K):
        part = slice(k, k + K)
        of_w, of_s, h = window(s, w, h, xs[part], ys[part], k == 0, k + K == len(xs))
        dw, ds = dw + of_w, jax.tree.map(np.add, ds, of_s)
        w, s = w - rate * of_w, jax.tree.map(lambda p, g: p - rate * g, s, of_s)
    return (w, s) if rate else (dw, ds)


@pytest.mark.parametrize('mask', [None, np.array([1.0, 0.5, 2, 0, 1, 1])])
def test_the_synthesizer_learns_by_the_regression_of_a_linear_cell(mask):
    learner, step_fn, name, xs, ys = linear()
    w, h = (np.asarray(state.value) for state in (learner.model.w, learner.model.h))
    s, weighed = jax.tree.map(np.asarray, learner.synthetic.value[name]), ys
    options, total = {'inside': 'exact'}, 6
    if mask is not None:
        options['mask'], weighed, total = mask, mask[:, None, None] * ys, mask.sum()
    for reduction, scale in (('sum', 1), ('mean', total)):
        learner.model.h.value = jnp.asarray(h)
        found, off = learner._gradients((xs, ys), step_fn, K, reduction, dict(options))
        want = jax.tree.map(lambda g, d=scale: g / d, by_hand(s, w, h, xs, weighed))
        assert_close((found.grads[('w',)], off[name]), want, 1e-5)
    if mask is not None:
        return
    # lanes that are reset between two windows owe nothing to each other
    flags = np.zeros((6, BATCH), bool)
    flags[2, 1] = True
    learner.model.h.value = jnp.asarray(h)
    found, off = learner._gradients((xs, ys), step_fn, K, 'sum', {**options, 'reset': flags})
    parts = [
        [np.delete(a, 1, -2) for a in (h, xs, ys)],
        [np.zeros((1, UNITS)), xs[2:, 1:2], ys[2:, 1:2]],
        [h[1:2], xs[:2, 1:2], ys[:2, 1:2]],
    ]
    want = added([by_hand(s, w, *part) for part in parts])
    assert_close((found.grads[('w',)], off[name]), want, 1e-5)


def test_updates_along_a_sequence_move_the_synthesizer_too_which_is_saved_and_restored():
    learner, step_fn, name, xs, ys = linear()
    begin, saved = jax.tree.map(np.asarray, learner.synthetic.value[name]), learner.save()
    want = by_hand(
        begin, *(np.asarray(s.value) for s in (learner.model.w, learner.model.h)), xs, ys, 0.01
    )
    options = {'update_every': K, 'inside': 'exact', 'reduction': 'sum'}
    for _ in range(2):
        learner.restore(saved)
        learner.etrace_train(xs, ys, step_fn=step_fn, optimizer=optax.sgd(0.01), **options)
        assert_close((learner.model.w.value, learner.synthetic.value[name]), want, 1e-5)


@pytest.mark.slow
def test_without_credit_it_is_truncated_backpropagation():
    xs, ys = data()
    learner, other = compiled(), compiled(braintrace.rules.same_step())
    assert learner.group_signal_shapes() == {'cell/h': (BATCH, UNITS, 1)}
    grads = learner.etrace_grad(xs, ys, step_fn=loss_of(learner), **WINDOWS)
    want = other.etrace_grad(xs, ys, step_fn=loss_of(other), **WINDOWS)
    assert_close(grads, want)
    given = drawn()
    got, losses = given.etrace_grad(xs, ys, step_fn=loss_of(given), return_value=True, **WINDOWS)
    assert losses.shape == (len(xs),)
    with pytest.raises(AssertionError):
        assert_close(got, want, 1e-3)


def test_a_copy_learns_with_a_synthesizer_of_its_own():
    xs, ys = data()
    learner = drawn()
    step_fn = loss_of(learner)
    learner.etrace_grad(xs, ys, step_fn=step_fn, **WINDOWS)
    other = copy.deepcopy(learner)
    other.compile_graph(xs[0])
    before = jax.tree.map(jnp.copy, learner.synthetic.value)
    compat.train_synthetic_gradient(other, xs, ys, step_fn=loss_of(other), window=K)
    assert_close(learner.synthetic.value, before)


@pytest.mark.slow
def test_the_synthesizer_is_trained_alone():
    xs, ys = data()
    learner = compiled()
    weights = jax.tree.map(jnp.copy, {k: p.value for k, p in learner.param_states.items()})
    for optimizer in (None, optax.sgd(0.01)):
        learner.attach_synthesizer(compat.SyntheticGradient(learner.group_signal_shapes()))
        norms = compat.train_synthetic_gradient(
            learner, xs, ys, step_fn=loss_of(learner), optimizer=optimizer, epochs=8
        )
        assert len(norms) == 8 and norms[-1] < norms[0]
    assert_close({k: p.value for k, p in learner.param_states.items()}, weights)


def test_calls_without_windows_and_other_synthesizers_are_refused():
    xs, ys = data()
    learner = compiled()
    step_fn = loss_of(learner)
    with pytest.raises(OptionError, match="Give inside='exact' and a window"):
        learner.etrace_grad(xs, ys, step_fn=step_fn, inside='trace')
    with pytest.raises(OptionError, match="Give inside='exact'"):
        learner.etrace_train(xs, ys, step_fn=step_fn, optimizer=optax.sgd(0.1))
    with pytest.raises(OptionError, match='give a braintrace.compat.SyntheticGradient'):
        compat.DNI(Net(), synthesizer=len)
    with pytest.raises(OptionError, match=r"the shape of group 'h' is 4; give a tuple"):
        compat.SyntheticGradient({'h': 4})
    with pytest.raises(StructureError, match=r"for groups \{'h': \(2, 2\)\}"):
        learner.attach_synthesizer(compat.SyntheticGradient({'h': (2, 2)}))
    assert learner.synthesizer is None
    for window, found in ((0, 'window is 0'), (None, 'int below'), (len(xs), 'int below')):
        with pytest.raises(OptionError, match=found):
            compat.train_synthetic_gradient(learner, xs, ys, step_fn=step_fn, window=window)
    with pytest.raises(OptionError, match='learner is D_RTRL'):
        compat.train_synthetic_gradient(compiled('D_RTRL'), xs, ys, step_fn=step_fn)
    assert jnp.isfinite(learner(jnp.zeros((BATCH, INPUTS)))).all()
