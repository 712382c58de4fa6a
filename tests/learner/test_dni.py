"""The learner of exact windows with a synthetic gradient at their ends."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace.errors import OptionError, StructureError
from tests.compare import assert_close

from .networks import BATCH, INPUTS, UNITS, Net, compiled, data, loss_of

WINDOWS = {'window': 2, 'inside': 'exact'}


def drawn():
    """A learner whose synthesizer gives credit from the first."""
    shapes = compiled('dni').group_signal_shapes()
    return compiled('dni', synthesizer=braintrace.SyntheticGradient(shapes, scale=0.5, seed=1))


@pytest.mark.slow
def test_without_credit_it_is_truncated_backpropagation():
    xs, ys = data()
    learner, other = compiled('dni'), compiled(braintrace.rules.same_step())
    assert learner.group_signal_shapes() == {'cell/h': (BATCH, UNITS, 1)}
    grads = learner.etrace_grad(xs, ys, step_fn=loss_of(learner), **WINDOWS).grads
    want = other.etrace_grad(xs, ys, step_fn=loss_of(other), **WINDOWS).grads
    assert_close(grads, want)
    given = drawn()
    got = given.etrace_grad(xs, ys, step_fn=loss_of(given), **WINDOWS).grads
    with pytest.raises(AssertionError):
        assert_close(got, want, 1e-3)


@pytest.mark.slow
def test_a_call_is_that_of_the_pure_functions():
    xs, ys = data()
    learner = drawn()
    online, params, carry = learner.pure()

    def loss(y, target):
        return 0.5 * jnp.sum((y - target) ** 2)

    run = online.sequence_grad(loss, synthesizer=learner.synthetic.apply, **WINDOWS)
    state = online.init(params, carry, xs[0])
    (want, _), *_ = run((params, learner.synthetic.value), state, xs, ys)
    assert_close(learner.etrace_grad(xs, ys, step_fn=loss_of(learner), **WINDOWS).grads, want)


@pytest.mark.slow
def test_training_moves_the_synthesizer_which_is_saved_and_restored():
    xs, ys = data()
    learner = compiled('dni')
    step_fn, optimizer, before = loss_of(learner), optax.adam(1e-2), learner.save()
    options = {'step_fn': step_fn, 'optimizer': optimizer, 'update_every': 2, 'inside': 'exact'}
    _, losses, _, _, opt_state, *_ = learner.etrace_train(xs, ys, **options)
    moved = jax.tree.leaves(learner.synthetic.value)
    assert all(np.isfinite(p).all() for p in moved) and any(p.any() for p in moved)
    _, again, *_ = learner.etrace_train(xs, ys, opt_state=opt_state, **options)
    assert np.isfinite(again).all()
    learner.restore(before)
    assert not any(p.any() for p in jax.tree.leaves(learner.synthetic.value))
    assert_close(learner.etrace_train(xs, ys, **options).losses, losses)


@pytest.mark.slow
def test_the_synthesizer_is_trained_alone():
    xs, ys = data()
    learner = compiled('dni')
    weights = jax.tree.map(jnp.copy, {k: p.value for k, p in learner.param_states.items()})
    for optimizer in (None, optax.sgd(0.01)):
        learner.attach_synthesizer(braintrace.SyntheticGradient(learner.group_signal_shapes()))
        norms = braintrace.train_synthetic_gradient(
            learner, xs, ys, step_fn=loss_of(learner), optimizer=optimizer, epochs=8
        )
        assert len(norms) == 8 and norms[-1] < norms[0]
    assert_close({k: p.value for k, p in learner.param_states.items()}, weights)


def test_calls_without_windows_and_other_synthesizers_are_refused():
    xs, ys = data()
    learner = compiled('dni')
    step_fn = loss_of(learner)
    with pytest.raises(OptionError, match="Give inside='exact' and a window"):
        learner.etrace_grad(xs, ys, step_fn=step_fn)
    with pytest.raises(OptionError, match="Give inside='exact'"):
        learner.etrace_train(xs, ys, step_fn=step_fn, optimizer=optax.sgd(0.1))
    with pytest.raises(OptionError, match='give a braintrace.SyntheticGradient'):
        braintrace.DNI(Net(), synthesizer=len)
    with pytest.raises(StructureError, match=r"for groups \{'h': \(2, 2\)\}"):
        learner.attach_synthesizer(braintrace.SyntheticGradient({'h': (2, 2)}))
    assert learner.synthesizer is None and learner.around.apply == learner.synthetic.apply
    for window, found in ((0, 'window is 0'), (None, 'int below'), (len(xs), 'int below')):
        with pytest.raises(OptionError, match=found):
            braintrace.train_synthetic_gradient(learner, xs, ys, step_fn=step_fn, window=window)
    with pytest.raises(OptionError, match='learner is D_RTRL'):
        braintrace.train_synthetic_gradient(compiled(), xs, ys, step_fn=step_fn)
    assert jnp.isfinite(learner(jnp.zeros((BATCH, INPUTS)))).all()
