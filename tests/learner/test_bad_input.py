"""Bad input is refused with what was found, where, and what to do; nothing changes."""

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace.errors import (
    CompileError,
    MissingRuleError,
    NotCompiledError,
    OptionError,
    StepFunctionError,
    StructureError,
)
from tests.compare import assert_close
from tests.registries import registries_are_restored as registries_are_restored

from .networks import (
    BATCH,
    INPUTS,
    STEPS,
    UNITS,
    Layer,
    Net,
    compiled,
    loss_of,
    refused,
    shared,
    squared,
)

X = jax.ShapeDtypeStruct((BATCH, INPUTS), jnp.float64)
XS, YS = np.ones((STEPS, BATCH, INPUTS)), np.ones((STEPS, BATCH, 2))


class Plain(Layer):
    def drive(self, x):
        return x @ self.w.value


class Growing(Layer):
    def update(self, x):
        self.h.value = jnp.concatenate([self.h.value, self.drive(x)], -1)
        return self.h.value


class Widening(Layer):
    def update(self, x):
        self.h.value = (self.h.value + self.drive(x)).astype(jnp.float32)
        return self.h.value


class Memoryless(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = braintrace.nn.Linear(INPUTS, UNITS)

    def update(self, x):
        return self.linear(x)


def initialised(model):
    brainstate.nn.init_all_states(model, batch_size=BATCH)
    return model


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize(
    'model, error, words',
    [
        (Plain, CompileError, ['no ETP op', 'braintrace.matmul']),
        (Memoryless, CompileError, ['no hidden state', 'HiddenState']),
        (Growing, StructureError, ['h: float64[3, 4] before the step, float64[3, 8] after']),
        (Widening, StructureError, ['float32']),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else '',
)
def test_a_model_that_can_not_be_compiled_is_refused_and_left_as_it_was(model, error, words):
    model = initialised(model())
    with refused(error, words, model):
        braintrace.D_RTRL(model).compile_graph(X)


def test_a_learner_that_is_not_compiled_says_so():
    learner = braintrace.D_RTRL(initialised(Net()))
    for use in (
        lambda: learner(XS[0]),
        lambda: learner.graph,
        lambda: learner.report,
        lambda: learner.restore({}),
        lambda: learner.get_etrace_of(('readout',)),
        lambda: learner.etrace_evolve(XS),
        lambda: braintrace.evaluate(learner, XS, YS, squared),
        learner.save,
        learner.reset_state,
    ):
        with pytest.raises(NotCompiledError, match='compile_graph'):
            use()


@pytest.mark.parametrize(
    'call, words',
    [
        (lambda: shared()(np.zeros((5, INPUTS))), ['[3, 2] when compiled', 'float64[5, 2] now']),
        (lambda: shared()(np.zeros((BATCH, 9))), ['float64[3, 9] now']),
        (lambda: shared()(np.zeros((BATCH, INPUTS), np.float32)), ['float32[3, 2] now']),
        (lambda: shared()(np.zeros((BATCH, INPUTS), np.int32)), ['int32[3, 2] now']),
        (lambda: shared().etrace_evolve(XS, YS), ['inputs 1: absent when compiled']),
        (lambda: shared().etrace_evolve(XS, YS, trace=False), ['inputs 1: absent when compiled']),
    ],
)
def test_another_input_than_compiled_is_refused(call, words):
    with refused(StructureError, ['inputs', 'compile', *words], shared()):
        call()


def test_another_batch_is_served_as_the_message_says():
    learner = compiled()
    x, first = jnp.ones((5, INPUTS)), '`brainstate.nn.init_all_states(model, batch_size=5)`'
    with refused(StructureError, [f'{first} and `learner.compile_graph(x)`'], learner):
        learner(x)
    with refused(StructureError, [first], learner):
        learner.compile_graph(x)
    brainstate.nn.init_all_states(learner.model, batch_size=5)
    learner.compile_graph(x)
    assert learner(x).shape == (5, 2)


def test_a_hidden_state_of_another_shape_is_refused_and_a_new_object_is_found():
    learner = compiled()
    h = learner.model.cell.h.value
    learner.model.cell.h = brainstate.HiddenState(h + 1)
    learner(jnp.ones((BATCH, INPUTS)))
    learner.model.cell.h = brainstate.HiddenState(jnp.zeros((BATCH + 1, UNITS)))
    with pytest.raises(
        StructureError, match=r'carry cell/h: float64\[3, 4\] when compiled, float64\[4, 4\] now'
    ):
        learner(jnp.ones((BATCH, INPUTS)))
    del learner.model.cell.h
    with pytest.raises(StructureError, match=r"\['cell/h'\].*missing now"):
        learner(jnp.ones((BATCH, INPUTS)))


GAIN = brainstate.ParamState(jnp.ones(2))
GRAD = [
    ((XS[:0], YS[:0]), {}, ['empty']),
    ((XS, YS[:4]), {}, ['unequal', '7', '4']),
    ((), {}, ['no sequence']),
    ((XS, 1.0), {}, ['scalar']),
    ((XS, YS), {'mask': jnp.ones(5)}, ['mask', '[5]', '[7]']),
    ((XS, YS), {'mask': jnp.ones((STEPS, BATCH))}, ['mask', '[7, 3]']),
    ((XS, YS), {'mask': [None] * STEPS}, ['mask is [None', 'one array']),
    ((XS, YS), {'reset': (None, 1)}, ['reset is (None, 1)', 'one array']),
    ((XS, YS), {'reset': jnp.ones((5, BATCH), bool)}, ['reset', '[5, 3]', '[7, 3]']),
    ((XS, YS), {'reset': jnp.ones((STEPS, BATCH))}, ['reset', 'float', 'bool']),
    ((XS, YS), {'window': 0}, ['window is 0']),
    ((XS, YS), {'window': 'all'}, ["window is 'all'"]),
    ((XS, YS), {'keep_trace': 'keep'}, ["keep_trace is 'keep'", 'False']),
    ((XS, YS), {'reduction': 'max'}, ["reduction is 'max'"]),
    ((XS, YS), {'has_aux': 2}, ['has_aux is 2']),
    ((XS, YS), {'step_fn': None}, ['step_fn is None']),
    ((XS, YS), {'weights': {'a': 1}}, ['weights', "'a'"]),
    ((XS, YS), {'weights': {}}, ['weights is empty']),
    ((XS, YS), {'weights': {('a',): GAIN, 'extra': GAIN}}, ['have no order', "('extra',)"]),
]
TRAIN = [
    ({'optimizer': 0.1}, ['optimizer is a float', 'optax']),
    ({'update_every': 0}, ['update_every is 0']),
    ({'update_every': True}, ['update_every is True']),
    ({'progress': 1}, ['progress is 1']),
    ({'opt_state': optax.sgd(0.1, momentum=0.9).init({})}, ['opt_state does not belong']),
    ({'not_finite': 'skip'}, ["not_finite is 'skip'"]),
    ({'observe': 1}, ['observe is 1']),
    ({'observe': lambda grads: grads}, ['observe is', 'too many']),
]


@pytest.mark.parametrize(
    'call, sequences, options, words',
    [('etrace_grad', *row) for row in GRAD]
    + [('etrace_train', (XS, YS), {'optimizer': optax.sgd(0.1), **o}, w) for o, w in TRAIN],
)
def test_bad_arguments_of_a_sequence_are_refused(call, sequences, options, words):
    with refused(ValueError, words, shared()):
        getattr(shared(), call)(*sequences, **{'step_fn': loss_of(shared()), **options})


def written(learner, x, y):
    learner.model.readout.value = learner.model.readout.value * 0.9
    return squared(learner(x), y)


TRANSFORMED = ['inside a transformation', 'of its own']
BODIES = {
    'twice': (lambda learner, x, y: squared(learner(x) + learner(x), y), ['twice', 'once']),
    'never': (
        lambda learner, x, y: x.sum(),
        ['did not call', 'learner(x)', '`step_fn(float64[3, 2], float64[3, 2])`'],
    ),
    'a loss': (
        lambda learner, x, y: x - y[:2],
        [
            'failed before it called the learner: sub got incompatible shapes',
            'lambda x, target: loss(learner(x), target)',
            '`loss(output, target)` of the output is',
        ],
    ),
    'not scalar': (lambda learner, x, y: learner(x), ['float64[3, 2]', 'scalar']),
    'integer': (lambda learner, x, y: (learner(x) > 0).sum(), ['int', 'scalar']),
    'tuple': (lambda learner, x, y: (learner(x).sum(), 1.0), ['tuple', 'has_aux=True']),
    'written': (written, ['ParamState']),
    'jit': (lambda learner, x, y: jax.jit(learner)(x).sum(), TRANSFORMED),
    'vmap': (lambda learner, x, y: jax.vmap(learner)(x[None]).sum(), TRANSFORMED),
    'cond': (
        lambda learner, x, y: jax.lax.cond(x.sum() > 0, lambda: learner(x), lambda: 0 * x).sum(),
        TRANSFORMED,
    ),
    'checkpoint': (
        lambda learner, x, y: brainstate.transform.checkpoint(learner)(x).sum(),
        TRANSFORMED,
    ),
    'grad': (lambda learner, x, y: jax.grad(lambda x: learner(x).sum())(x).sum(), TRANSFORMED),
}


@pytest.mark.tier(quick=8)
@pytest.mark.parametrize('case', BODIES)
def test_a_step_function_that_breaks_its_contract_is_refused(case):
    learner, (body, words) = shared(), BODIES[case]
    with refused(StepFunctionError, words, learner):
        learner.etrace_grad(XS, YS, step_fn=lambda x, y: body(learner, x, y))


def test_a_step_function_of_another_kind_is_refused():
    learner = shared()
    with refused(StepFunctionError, ['return (loss, aux)'], learner):
        learner.etrace_grad(XS, YS, step_fn=loss_of(learner), has_aux=True)
    with refused(StepFunctionError, ['is the learner; give a function that computes'], learner):
        learner.etrace_grad(XS, YS, step_fn=learner)


def test_a_step_function_that_fails_of_itself_keeps_its_error():
    learner = compiled()
    missing = 'it called the learner: .* missing 1 required positional'
    with pytest.raises(StepFunctionError, match=missing) as caught:
        learner.etrace_grad(XS, YS, step_fn=lambda x, y, z: squared(learner(x), y))
    assert type(caught.value.__cause__) is TypeError
    step_fn = lambda x, y: jax.jit(jnp.sin)(squared(learner(x), y))
    learner.etrace_grad(XS, YS, step_fn=step_fn)
    with pytest.raises(TypeError, match='sub got incompatible shapes'):
        learner.etrace_grad(XS, YS, step_fn=lambda x, y: learner(x) - y[:2])


def test_a_step_function_in_the_place_of_a_loss_is_named():
    learner = compiled()
    online, params, carry = learner.pure()
    state, step_fn, optimizer = online.init(params, carry, XS[0]), loss_of(learner), optax.sgd(0.1)
    train = online.sequence_update(step_fn, optimizer)
    named = ['called the learner', '`loss(outputs, target) -> scalar`', 'etrace_grad']
    for call in (
        lambda: braintrace.verify.diagnose(learner, XS, YS, step_fn),
        lambda: online.grad(step_fn)(params, state, XS[0], YS[0]),
        lambda: online.sequence_grad(step_fn)(params, state, XS, YS),
        lambda: train(params, optimizer.init(params), state, XS, YS),
    ):
        with refused(StepFunctionError, named, learner):
            call()
    with pytest.raises(OptionError, match='loss_fn is None'):
        online.sequence_grad(None)


class Fragile(Net):
    broken = False

    def update(self, x):
        out = super().update(x)
        if self.broken:
            raise RuntimeError('sensor unplugged')
        return out


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize(
    'use',
    [
        lambda learner: learner.compile_graph(XS[0]),
        lambda learner: learner.etrace_evolve(XS, trace=False),
        lambda learner: learner.etrace_grad(
            XS, YS, step_fn=lambda x, y: squared(learner(x), learner.model(x))
        ),
    ],
    ids=['compile', 'evolve', 'grad'],
)
def test_an_exception_in_the_model_leaves_every_state_as_it_was_and_the_learner_usable(use):
    learner, healthy = compiled(model=Fragile), compiled(model=Fragile)
    learner.model.broken = True
    with refused(RuntimeError, ['sensor unplugged'], learner):
        use(learner)
    learner.model.broken = False
    assert_close(
        learner.etrace_grad(XS, YS, step_fn=loss_of(learner)).grads,
        healthy.etrace_grad(XS, YS, step_fn=loss_of(healthy)).grads,
    )


def test_a_primitive_without_a_needed_rule_is_refused_when_the_learner_is_compiled(
    registries_are_restored,
):
    name = 'etp_test_half_registered'
    half = braintrace.register_primitive(name, lambda x, w: x @ w, batched=True)
    half.register_xy_to_dw(lambda x, d, weights: {'weight': x.T @ d})

    class Half(Layer):
        def update(self, x):
            self.h.value = jnp.tanh(0.5 * self.h.value + half.bind(x, self.w.value))
            return self.h.value

    for learner, rule in (
        (braintrace.D_RTRL(initialised(Half())), 'yw_to_w'),
        (braintrace.ES_D_RTRL(initialised(Half()), 0.9), 'init_pp'),
    ):
        with pytest.raises(MissingRuleError, match=type(learner).__name__) as caught:
            learner.compile_graph(X)
        error = caught.value
        assert (error.op, error.rule, error.algorithm) == (name, rule, type(learner).__name__)
