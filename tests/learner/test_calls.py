"""A learner called step by step, under every transformation."""

import copy

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import errors
from braintrace._learner.states import Tree
from braintrace.errors import NotCompiledError
from tests.compare import assert_close

from .networks import BATCH, INPUTS, UNITS, Layer, Net, by_steps, compiled, data, loss_of, squared

RULES = [braintrace.rules.d_rtrl(), braintrace.rules.es_d_rtrl(0.8)]


@pytest.fixture(params=RULES, ids=lambda r: r.name)
def rule(request):
    return request.param


def test_a_call_gives_what_the_model_gives():
    learner, plain = compiled(), compiled()
    for x in data()[0]:
        assert_close(learner(x), plain.model(x), 1e-13)
        assert_close(learner.model.cell.h.value, plain.model.cell.h.value, 1e-13)


@pytest.mark.tier(quick=1)
def test_a_sequence_gives_the_sum_of_the_steps(rule):
    xs, ys = data()
    learner, stepped = compiled(rule), compiled(rule)
    got = learner.etrace_grad(xs, ys, step_fn=loss_of(learner), reduction='sum').grads
    assert_close(got, by_steps(stepped, xs, ys))
    assert_close(learner.etrace.value, stepped.etrace.value)


LOOPS = {
    'for_loop': lambda loss, xs, ys: brainstate.transform.for_loop(loss, xs, ys).sum(),
    'python': lambda loss, xs, ys: sum(loss(x, y) for x, y in zip(xs, ys)),
}


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('loop', LOOPS)
def test_a_loss_summed_over_a_loop_in_one_grad_is_the_sum_of_online_gradients(loop, rule):
    xs, ys = data()
    learner, stepped = compiled(rule), compiled(rule)
    total = lambda: LOOPS[loop](loss_of(learner), xs, ys)
    got = brainstate.transform.jit(brainstate.transform.grad(total, learner.param_states))()
    assert_close(got, by_steps(stepped, xs, ys))


@pytest.mark.slow
def test_the_loss_may_read_the_new_hidden_state():
    x, y = data()[0][0], jnp.ones((BATCH, UNITS))
    learner, plain = compiled(), compiled()

    def gradient(owner, call):
        loss = lambda: (call(x), squared(owner.model.cell.h.value, y))[1]
        return brainstate.transform.grad(loss, owner.param_states)()

    assert_close(gradient(learner, learner), gradient(plain, plain.model))


def vectorised_by_new_states(rule):
    brainstate.random.seed(0)
    learner = braintrace.compile(Net(), rule, jnp.zeros(INPUTS))

    @brainstate.transform.vmap_new_states(state_tag='new', axis_size=BATCH)
    def initialise():
        brainstate.nn.init_all_states(learner.model)
        learner.compile_graph(jnp.zeros(INPUTS))

    initialise()
    return learner, brainstate.nn.Vmap(learner, vmap_states='new')


def vectorised_by_map(rule):
    learner = compiled(rule, batch=None)
    lanes = brainstate.nn.Map(learner, init_map_size=BATCH)
    lanes.init_all_states()
    return learner, lanes


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('vectorised', [vectorised_by_new_states, vectorised_by_map])
def test_a_vectorised_learner_equals_the_batched_one(rule, vectorised):
    xs, ys = data()
    learner, lanes = vectorised(rule)
    got = by_steps(lanes, xs, ys, learner.param_states)
    assert_close(got, by_steps(compiled(rule), xs, ys))


@pytest.mark.tier(quick=1)
def test_a_mapped_model_learns_like_a_batched_one(rule):
    (xs, ys), batched = data(), compiled(rule)
    brainstate.random.seed(0)
    lanes = brainstate.nn.Map(Net(), init_map_size=BATCH)
    lanes.init_all_states()
    learner = braintrace.ETraceLearner(lanes, rule)
    learner.compile_graph(xs[0])
    got = learner.etrace_grad(xs, ys, step_fn=loss_of(learner), reduction='sum').grads
    assert_close({k[1:]: g for k, g in got.items()}, by_steps(batched, xs, ys))
    losses, want = (
        one.etrace_train(xs, ys, step_fn=loss_of(one), optimizer=optax.sgd(0.01)).losses
        for one in (learner, batched)
    )
    assert_close(losses, want, 1e-10)


def test_one_trace_of_the_model_and_of_a_step_function_serves_a_whole_run():
    traced = {'model': 0, 'step': 0}

    class Counted(Net):
        def update(self, x):
            traced['model'] += 1
            return super().update(x)

    def step_fn(x, y):
        traced['step'] += 1
        return squared(learner(x), y)

    xs, ys = data()
    learner = compiled(model=Counted)
    before = traced['model']
    by_steps(learner, xs, ys)
    learner.etrace_grad(xs, ys, step_fn=step_fn)
    first = traced['step']
    for _ in range(2):
        learner.etrace_grad(xs, ys, step_fn=step_fn)
    assert traced == {'model': before, 'step': first}


@pytest.fixture
def compiled_programs():
    """The number of programs that XLA compiled, as a list that grows."""
    events = []

    def listen(name, duration, **_):
        if name.endswith('backend_compile_duration'):
            events.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def test_an_eager_call_is_one_program_and_compiles_nothing_anew(compiled_programs):
    xs, ys = map(list, data())
    learner = compiled()
    online, params, carry = learner.pure()
    step = jax.make_jaxpr(online.step)(params, online.init(params, carry, xs[0]), xs[0])
    assert [eqn.primitive.name for eqn in step.eqns] == ['jit']

    def gradient(x, y):
        return brainstate.transform.grad(lambda: squared(learner(x), y), learner.param_states)()

    del compiled_programs[:]
    learner(xs[0])
    assert len(compiled_programs) == 1
    gradient(xs[0], ys[0])
    before = len(compiled_programs)
    for x, y in zip(xs, ys):
        learner(x), gradient(x, y)
    assert len(compiled_programs) == before


def test_sequences_of_nine_lengths_compile_nothing_in_a_second_epoch(compiled_programs):
    xs = np.concatenate([data()[0]] * 2)
    ys, learner = np.zeros((*xs.shape[:2], UNITS)), compiled(model=Layer)
    step_fn, lengths = loss_of(learner), range(2, 11)
    for _ in range(2):
        before = len(compiled_programs)
        for length in lengths:
            learner.etrace_grad(xs[:length], ys[:length], step_fn=step_fn)
    assert len(compiled_programs) == before


def test_a_copy_that_shares_the_model_learns_as_the_learner_does():
    xs, ys = data()
    learner, other = compiled(), compiled()
    copied = copy.copy(learner)
    got = copied.etrace_grad(xs, ys, step_fn=loss_of(copied)).grads
    assert_close(got, other.etrace_grad(xs, ys, step_fn=loss_of(other)).grads)
    assert_close(learner.etrace.value, other.etrace.value)


def test_a_deep_copy_is_compiled_anew_and_leaves_the_learner_as_it_was():
    xs, ys = data()
    learner = compiled()
    copied, before = copy.deepcopy(learner), learner.save()
    assert 'not compiled' in repr(copied)
    with pytest.raises(NotCompiledError):
        copied(xs[0])
    copied.compile_graph(xs[0])
    got = copied.etrace_grad(xs, ys, step_fn=loss_of(copied)).grads
    assert_close(learner.save(), before)
    assert_close(got, learner.etrace_grad(xs, ys, step_fn=loss_of(learner)).grads)


def test_a_seed_of_compile_draws_the_states_and_leaves_the_generators_as_they_were():
    class Drawn(Net):
        def init_state(self, *args, **kwargs):
            self.start = brainstate.HiddenState(brainstate.random.randn(BATCH, 2))

        def update(self, x):
            return super().update(x) + self.start.value

    def drawn(seed):
        start = compiled(model=Drawn, seed=seed).model.start.value
        return float(start[0, 0]), float(brainstate.random.rand()), np.random.rand()

    (one, *after), (again, *_), (other, *later) = drawn(7), drawn(7), drawn(8)
    assert one == again != other and after == later


class Walked(brainstate.nn.Module):
    """Two layers in a list, one in a dict."""

    def __init__(self):
        super().__init__()
        self.layers = [braintrace.nn.Linear(2, 2), braintrace.nn.GRUCell(2, 2)]
        self.named = {'last': braintrace.nn.Linear(2, 2)}

    def update(self, x):
        for layer in (*self.layers, *self.named.values()):
            x = layer(x)
        return x


@pytest.fixture
def walks(monkeypatch):
    """How often the states of a module were looked up, in a list."""
    number, states = [0], brainstate.nn.Module.states

    def counted(self, *filters):
        number[0] += 1
        return states(self, *filters)

    monkeypatch.setattr(brainstate.nn.Module, 'states', counted)
    return number


ONES = np.ones((3, 2))


def walked():
    model = Walked()
    learner = braintrace.compile(model, 'D_RTRL', ONES, batch_size=3)
    learner(ONES)
    return model, learner


def test_states_are_looked_up_again_only_where_the_tree_has_changed(walks):
    learner, xs = walked()[1], jnp.ones((2, 3, 2))
    step_fn = lambda x: jnp.mean(learner(x) ** 2)  # noqa: E731
    first = learner.etrace_grad(xs, step_fn=step_fn).grads
    before = walks[0]
    for _ in range(3):
        learner(ONES)
        learner.etrace_grad(xs, step_fn=step_fn)
    assert walks[0] == before
    assert list(first) == list(learner.param_states)


NEW = {
    'attribute': lambda model, new: setattr(model, 'layers', [new, model.layers[1]]),
    'list': lambda model, new: model.layers.__setitem__(0, new),
    'dict': lambda model, new: model.named.update(last=new),
    'inside': lambda model, new: setattr(model.layers[0], 'weight', new.weight),
}
GONE = {
    'attribute': lambda model: delattr(model, 'named'),
    'list': lambda model: model.layers.pop(),
    'dict': lambda model: model.named.clear(),
}


def test_a_state_in_a_place_of_another_one_is_found_and_one_that_is_gone_is_missed():
    model, learner = walked()
    for put in NEW.values():
        put(model, braintrace.nn.Linear(2, 2))
        learner.reset_state()
        expected = model(ONES)
        learner.reset_state()
        assert_close(learner(ONES), expected, 1e-6)
    for take in GONE.values():
        layers, named = [*model.layers], {**model.named}
        take(model)
        with pytest.raises(errors.StructureError, match='missing now'):
            learner(ONES)
        model.layers, model.named = layers, named


def test_of_a_container_that_is_not_known_every_call_looks_the_states_up(walks):
    model = Walked()
    model.named = jax.tree_util.Partial(model.named['last'].update)
    tree = Tree(model)
    for _ in range(3):
        tree.states()
    assert walks[0] == 3


def test_a_model_that_answers_by_itself_is_asked_at_each_call():
    class Own(Walked):
        shown = True

        def states(self, *filters):
            return super().states(*filters) if Own.shown else {}

    tree = Tree(Own())
    assert tree.states()
    Own.shown = False
    assert not tree.states()
