"""What newcomers expect of the learner of a pure cell: a step at once, names, files, optimisers."""

import io
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional, rules, verify
from braintrace.errors import OptionError, StepFunctionError, StructureError

T, B = 6, 2
W = jax.random.normal(jax.random.key(1), (5, 3)) / 2
XS = jax.random.normal(jax.random.key(2), (T, B, 2))
YS = jax.random.normal(jax.random.key(3), (T, B, 3))
CARRY = jnp.zeros((B, 3))


def cell(params, h, x):
    h = h / 2 + jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['w']))
    return h, h


def loss(h, y):
    return jnp.mean((h - y) ** 2)


def test_a_process_that_loads_a_state_steps_without_init():
    old = functional.online(cell, rules.d_rtrl())
    params, state = {'w': W}, old.init({'w': W}, CARRY, XS[0])
    _, state = old.step(params, state, XS[0])
    new = functional.online(cell, rules.d_rtrl())
    want, got = (each.grad(loss)(params, state, XS[1], YS[1]) for each in (old, new))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(StructureError, match='learner.init'):
        new.step(params, state, jnp.ones((B, 1)))


def test_a_file_is_compared_with_a_fresh_learner_at_its_first_call():
    own, params, file = functional.online(cell, rules.d_rtrl()), {'w': W}, io.BytesIO()
    state = own.init(params, CARRY, XS[0])
    functional.save_state(file, state, own)
    like = jax.eval_shape(lambda: state)

    def load(of, compile_first):
        learner = functional.online(of, rules.d_rtrl())
        if compile_first:
            learner.init(params, CARRY, XS[0])
        file.seek(0)
        return learner, functional.load_state(file, like, learner)

    def halved(params, h, x):
        h, out = cell(params, h, x)
        return h / 4, out

    for compile_first in (True, False):
        learner, loaded = load(cell, compile_first)
        learner.step(params, learner.step(params, loaded, XS[0])[1], XS[0])
    with pytest.raises(StructureError, match='another learner'):
        load(halved, True)
    wrong, loaded = load(halved, False)
    for _ in range(2):
        with pytest.raises(StructureError, match='another learner'):
            wrong.step(params, loaded, XS[0])


def test_a_rule_has_a_name_and_what_is_none_is_refused():
    for name in ('d_rtrl', 'D_RTRL', 'same_step', 'e_prop', 'rtrl'):
        assert functional.online(cell, name).rule == getattr(rules, name.lower())()
    for name, words in (
        ('es_d_rtrl', r'rules\.es_d_rtrl\(decay_or_rank\)'),
        ('d_rtl', "Did you mean 'd_rtrl'"),
    ):
        with pytest.raises(OptionError, match=words):
            functional.online(cell, name)


@pytest.mark.parametrize('reduction', ['mean', 'sum'])
def test_an_optimizer_gets_the_loss_of_its_update(reduction):
    """The learning rate is the loss: two updates of three steps, one of them masked."""

    def update(grads, state, params=None, *, value, **extra):
        return jax.tree.map(lambda g: -value * g, grads), value

    optimizer = optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)
    learner = functional.online(cell, rules.d_rtrl())
    params, mask, ys = {'w': W}, jnp.array([1, 2, 0, 1, 1, 1]), YS.at[2].set(jnp.nan)
    state = learner.init(params, CARRY, XS[0])
    train = learner.sequence_update(loss, optimizer, update_every=3, reduction=reduction)
    found = jax.jit(train)(params, optimizer.init(params), state, XS, ys, mask)
    gradient = jax.jit(learner.sequence_grad(loss, reduction=reduction))
    for part in (slice(0, 3), slice(3, 6)):
        one = gradient(params, state, XS[part], ys[part], mask[part])
        value = jnp.nansum(mask[part] * one.losses)
        value = value / mask[part].sum() if reduction == 'mean' else value
        params, state = {'w': params['w'] - value * one.grads['w']}, one.state
    np.testing.assert_allclose(found.params['w'], params['w'], rtol=2e-5)
    np.testing.assert_allclose(found.opt_state, value, rtol=2e-5)


def training(optimizer):
    """A learner's call that trains it."""
    learner = braintrace.compile(braintrace.nn.MinGRUCell(2, 3), 'D_RTRL', XS[0], batch_size=B)
    step_fn = lambda x, y: loss(learner(x), y)  # noqa: E731
    return partial(learner.etrace_train, XS, YS, step_fn=step_fn, optimizer=optimizer)


def test_a_plateau_lowers_the_learning_rate_of_a_learner():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=1.0)
    found = training(optax.chain(optax.sgd(0.1), plateau))()
    assert float(found.opt_state[-1].scale) < 1


def test_training_again_without_the_optimizers_state_is_told_once():
    train = training(optax.adam(1e-3))
    train(opt_state=train().opt_state)
    with pytest.warns(braintrace.errors.BraintraceWarning, match='opt_state=found.opt_state'):
        train()
    train()


@pytest.mark.parametrize('one', [True, False], ids=['one input', 'two inputs'])
def test_a_tuple_is_what_the_cell_takes_also_before_init(one):
    """An observation of two arrays, as environments give it."""

    def joined(p, h, a, b):
        h = 0.5 * h + braintrace.matmul(jnp.concatenate([a, b], -1), p)
        return h, h

    cell = (lambda p, h, x: joined(p, h, *x)) if one else joined
    p, xs, ys, first = jnp.ones((5, 3)) / 3, (XS, YS), YS, (XS[0], YS[0])
    fresh, known = functional.online(cell), functional.online(cell)
    state = known.init(p, CARRY, *((first,) if one else first))
    want = verify.bptt_gradients(cell, p, CARRY, xs, ys, loss) / T
    of_step = jax.grad(lambda p: loss(joined(p, CARRY, *first)[0], ys[0]))(p)
    for learner in fresh, known:
        single = learner.grad(loss)(p, state, first, ys[0]).grads
        np.testing.assert_allclose(single, of_step, 1e-5)
        whole = jax.jit(learner.sequence_grad(loss))(p, state, xs, ys).grads
        np.testing.assert_allclose(whole, want, 1e-5, 1e-7)


def test_what_a_loss_returns_beside_itself_comes_back_along_a_sequence():
    learner, params, optimizer = functional.online(cell), {'w': W}, optax.sgd(0.1)
    state = learner.init(params, CARRY, XS[0])
    plain = lambda h, x: (h := h / 2 + jnp.tanh(jnp.concatenate([x, h], -1) @ W), h)
    _, want = jax.lax.scan(plain, CARRY, XS)
    both = lambda out, y: (loss(out, y), out)  # noqa: E731
    alone = jax.jit(learner.sequence_grad(loss))(params, state, XS, YS)
    for progress in (False, lambda step, losses: None):
        call = learner.sequence_grad(both, has_aux=True, progress=progress)
        found = call(params, state, XS, YS)
        np.testing.assert_allclose(found.aux, want, atol=1e-6)
        np.testing.assert_allclose(found.grads['w'], alone.grads['w'], atol=1e-6)
    assert alone.aux is None
    update = learner.sequence_update(both, optimizer, update_every=T, has_aux=True)
    found = jax.jit(update)(params, optimizer.init(params), state, XS, YS)
    np.testing.assert_allclose(found.aux, want, atol=1e-6)
    with pytest.raises(StepFunctionError, match=r'has_aux=True, but loss_fn.*\(loss, aux\)'):
        learner.sequence_grad(loss, has_aux=True)(params, state, XS, YS)


def test_a_rule_is_shown_as_the_call_that_made_it_and_saved_as_what_it_is():
    rule = rules.e_prop(0.9, 'random')
    same = rules.d_rtrl().filtered(0.9).with_feedback(braintrace.Feedback('random'))
    assert rule == same and hash(rule) == hash(same) and rule.own_call == repr(same)
    for made, shown in (
        (rule, "e_prop(kappa=0.9, feedback='random')"),
        (rules.rflo(), 'rflo()'),
        (rules.otpe(0.5), 'otpe(0.5)'),
        (rules.ostl(False), 'ostl(recurrent=False)'),
        (rules.e_prop(0.9).filtered(0.5), 'd_rtrl().filtered(0.5)'),
    ):
        assert repr(made) == shown
    assert {'trace_dtype', 'filtered'} <= set(dir(rules.d_rtrl())) and 'view' not in dir(rule)
    learner = functional.online(cell, rules.e_prop())
    jax.eval_shape(learner.init, {'w': W}, CARRY, XS[0])
    assert 'e_prop()' in repr(learner) and str(learner.report).startswith('e_prop(): ')
    assert learner.fingerprint()['rule'] == 'd_rtrl()'


def named(**groups):
    """A learner of two populations."""

    def two(params, carry, x):
        return None, {k: cell({'w': params[k]}, carry[k], x)[1] for k in carry}

    policy = braintrace.Policy(groups=groups)
    learner = functional.online(two, policy=policy)
    params, carry = {'exc': W, 'inh': 2 * W}, {'exc': CARRY, 'inh': CARRY + 1}
    return learner, jax.eval_shape(learner.init, params, carry, XS[0])


def test_groups_have_the_names_that_they_were_given():
    learner, state = named(excitatory='exc')
    assert [group.name for group in learner.graph.hidden_groups] == ['excitatory', 'inh']
    assert list(state.trace['exc']) == ['excitatory'] and 'excitatory' in str(learner.report)
    assert hash(learner.policy) == hash(braintrace.Policy(groups={'excitatory': 'exc'}))
    for groups, message in (
        ({'a': 'exec'}, r"groups names 'exec'.*\['exc', 'inh'\]"),
        ({'inh': 'exc'}, "groups has 'inh' for several groups"),
        ({'a,b': 'exc'}, 'names without a comma'),
    ):
        with pytest.raises(OptionError, match=message):
            named(**groups)
