"""A learner for each rule: shells over values, by class and by name, those of scripts of the public
package too.
"""

import inspect
import io
import pydoc

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import compat, functional, rules
from braintrace._learner.learners import LEARNERS, learner_named
from braintrace.errors import OptionError, StructureError
from tests.compare import assert_close, errors

from .networks import BATCH, INPUTS, UNITS, data, loss_of, squared


class Gated(brainstate.nn.Module):
    """A recurrent layer and a readout without a bias, which may leak."""

    def __init__(self, leaky=False):
        super().__init__()
        self.cell = braintrace.nn.GRUCell(INPUTS, UNITS)
        self.readout = braintrace.nn.Linear(UNITS, 2, b_init=None)
        if leaky:
            self.readout = braintrace.nn.LeakyRateReadout(UNITS, 2, tau=3.0)

    def update(self, x):
        return self.readout(self.cell(x))


FEEDBACK = braintrace.Feedback('random', seed=3)
# class, its options, the value that it stands for
SHELLS = [
    ('D_RTRL', {'credit': 'whole', 'scope': 'own'}, rules.d_rtrl(credit='whole', scope='own')),
    ('ES_D_RTRL', {'decay_or_rank': (0.9, 0.5)}, rules.es_d_rtrl((0.9, 0.5))),
    ('same_step', {}, rules.same_step()),
    ('SnAp', {}, rules.snap(2)),
    ('SnAp', {'n': 1}, rules.snap(1)),
    ('rtrl', {'keep': 2, 'seed': 1}, rules.rtrl(keep=2, seed=1)),
    ('UORO', {'seed': 4}, rules.uoro(seed=4)),
    ('EProp', {}, rules.e_prop()),
    ('EProp', {'feedback': FEEDBACK, 'kappa_filter_decay': 0.8}, rules.e_prop(0.8, FEEDBACK)),
    ('EProp', {'feedback': 'random', 'random_feedback_key': 3}, rules.e_prop(feedback=FEEDBACK)),
    ('rflo', {}, rules.rflo()),
    ('ottt', {'leak': 0.7}, rules.ottt(0.7)),
    ('otpe', {'leak': 0.7}, rules.otpe(0.7)),
    ('ostl', {}, rules.ostl()),
    ('ostl', {'recurrent': False}, rules.ostl(recurrent=False)),
    ('OSTLRecurrent', {}, rules.d_rtrl(scope='own')),
    ('OSTLFeedforward', {}, rules.es_d_rtrl(1e-6)),
    ('ThreeFactor', {}, rules.d_rtrl()),
]
IDS = ['-'.join([name, *options]) for name, options, _ in SHELLS]


def compiled_by(module, rule, leaky=False, **options):
    brainstate.random.seed(0)
    x = jnp.zeros((BATCH, INPUTS))
    return module.compile(Gated(leaky), rule, x, batch_size=BATCH, **options)


def compiled(rule, leaky=False, **options):
    public = isinstance(rule, str) and rule not in LEARNERS
    return compiled_by(compat if public else braintrace, rule, leaky, **options)


def class_of(name):
    return LEARNERS.get(name) or getattr(compat, name)


@pytest.mark.tier(quick=15)
@pytest.mark.parametrize('name, options, value', SHELLS, ids=IDS)
def test_a_shell_holds_the_value(name, options, value):
    learner = class_of(name)(Gated(), **options)
    assert learner.rule == value
    assert type(learner).__name__ == name and isinstance(learner, braintrace.ETraceLearner)


PRINTED = [
    *(value for *_, value in SHELLS),
    rules.d_rtrl(jnp.bfloat16),
    rules.rtrl('each'),
    rules.signs('all', seed=3),
    rules.uoro('batch'),
    rules.by_part({'a/*': rules.ottt(0.9), 'b': rules.same_step()}, rules.d_rtrl()),
]


@pytest.mark.parametrize('value', PRINTED, ids=repr)
def test_a_rule_prints_the_call_that_makes_it(value):
    names = {**vars(rules), 'Feedback': braintrace.Feedback}
    assert eval(repr(value), names) == value


def test_a_call_shows_what_is_not_as_by_default():
    assert repr(rules.snap(2)) == 'snap(2)'
    assert repr(rules.d_rtrl(credit='whole')) == "d_rtrl(credit='whole')"
    assert rules.e_prop(0.9).own_call == 'd_rtrl().filtered(0.9)'


def gradient(learner, xs, ys, step_fn):
    """The gradient and the losses; a learner of ``compat`` returns them as it is asked."""
    public = {'return_value': True} if hasattr(learner, 'vjp_method') else {}
    return learner.etrace_grad(xs, ys, step_fn=step_fn, **public)[:2]


LEARN = (
    'SnAp-n',
    'UORO-seed',
    'rtrl-keep-seed',
    'EProp-feedback-kappa_filter_decay',
    'ottt-leak',
    'otpe-leak',
)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('shell', LEARN)
def test_a_shell_learns_as_its_value_does_and_is_reset_and_saved(shell):
    name, options, value = SHELLS[IDS.index(shell)]
    (xs, ys), leaky = data(), name == 'otpe' or 'kappa_filter_decay' in options
    learner, other = compiled(name, leaky, **options), compiled(value, leaky)
    saved, step_fn = learner.save(), loss_of(learner)
    grads, losses = gradient(learner, xs, ys, step_fn)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0, path
    assert_close(grads, gradient(other, xs, ys, loss_of(other))[0], 0.0)
    learner.restore(saved)
    assert_close(gradient(learner, xs, ys, step_fn)[0], grads, 1e-6)
    learner.reset_state()
    assert not learner.etrace.value['t'].any()
    new = learner.etrace_train(xs, ys, step_fn=step_fn, optimizer=optax.sgd(1e-2))
    new = new[0] if hasattr(learner, 'vjp_method') else new.losses
    assert np.isfinite(new).all() and new.shape == losses.shape


@pytest.mark.slow
def test_adaptive_feedback_counts_every_step_of_a_learner():
    rule = rules.e_prop(0.8, braintrace.Feedback('adaptive', decay=0.01))
    (xs, ys), learner = data(), compiled(rule, leaky=True)
    options = {'step_fn': loss_of(learner)}
    counted = lambda: int(learner.etrace.value['trace']['(feedback)'])
    learner(xs[0])
    learner.etrace_grad(xs, ys, window=3, **options)
    learner.reset_state()
    learner.reset_state(lanes=np.array([True, False, False]))
    learner.etrace_train(xs, ys, optimizer=optax.sgd(1e-3), **options)
    saved = learner.save()
    assert counted() == 1 + 2 * len(xs)
    learner(xs[0])
    learner.restore(saved)
    assert counted() == 1 + 2 * len(xs)


NAMES = {
    'd_rtrl': 'D_RTRL',
    'ES_D_RTRL': 'ES_D_RTRL',
    'esd_rtrl': 'ES_D_RTRL',
    'eprop': 'e_prop',
    'OSTL': 'ostl',
    'UORO': 'uoro',
    'SnAp': 'snap',
    'SameStep': 'same_step',
    'signs': 'signs',
}
PUBLIC = {
    'pp_prop': 'ES_D_RTRL',
    'ostl_recurrent': 'OSTLRecurrent',
    'OSTL_Feedforward': 'OSTLFeedforward',
    'RandomProjectionVjpAlgorithm': 'UORO',
    'ParamDimVjpAlgorithm': 'D_RTRL',
    'eprop': 'EProp',
    'snap': 'SnAp',
}


def test_compile_knows_every_name():
    assert {name: learner_named(name) for name in NAMES} == {
        n: LEARNERS[c] for n, c in NAMES.items()
    }
    for name, cls in PUBLIC.items():
        options = {'decay_or_rank': 0.9} if cls == 'ES_D_RTRL' else {}
        assert type(compiled_by(compat, name, **options)) is getattr(compat, cls), name


def test_help_and_signatures_show_the_arguments():
    class Own(braintrace.ES_D_RTRL):
        pass

    for cls, arguments in (
        (braintrace.ETraceLearner, ['rule']),
        (Own, ['decay_or_rank']),
        (compat.SnAp, ['n']),
        (compat.EProp, ['feedback', 'kappa_filter_decay', 'random_feedback_key']),
    ):
        shown = list(inspect.signature(cls).parameters)
        assert shown[: len(arguments) + 1] == ['model', *arguments]
    for name in [name for name, _, _ in SHELLS if name not in rules.__all__]:
        cls = class_of(name)
        text = pydoc.render_doc(cls)
        assert cls.__doc__.splitlines()[0] in text and 'policy' in text


def test_random_feedback_is_drawn_from_a_key():
    key = jax.random.key(7)
    first = compat.EProp(Gated(), 'random', random_feedback_key=key)
    assert first.rule == compat.EProp(Gated(), 'random', random_feedback_key=key).rule
    other = compat.EProp(Gated(), 'random', random_feedback_key=jax.random.key(8))
    assert first.rule != other.rule
    with pytest.raises(OptionError, match='random_feedback_key is given and feedback'):
        compat.EProp(Gated(), random_feedback_key=key)


def test_the_gradient_of_a_step_is_the_modulator_times_the_trace():
    learner = compat.compile(
        braintrace.nn.VanillaRNNCell(2, 3), 'three_factor', jnp.zeros((2, 2)), batch_size=2, seed=0
    )
    assert isinstance(learner, compat.ThreeFactor)
    reward = jnp.array([0.5, -2.0])  # one for each lane
    for x in jnp.array([[[1.0, -1], [2, 0.5]], [[0.1, 1], [-1, 2]]]):
        grads = brainstate.transform.grad(
            lambda x=x: braintrace.modulated(reward, learner(x)), learner.param_states
        )()
    ((path, value),) = grads.items()
    ((_, slots),) = learner.get_etrace_of(path).items()
    want = {k: jnp.einsum('b,b...->...', reward, e[..., 0]) for k, e in slots.items()}
    assert_close(value, {k: want[k] for k in value}, 1e-6)


def test_a_modulator_has_no_exact_windows():
    learner = compiled('three_factor')
    xs, ys = data()
    with pytest.raises(OptionError, match="inside is 'exact' for ThreeFactor"):
        learner.etrace_grad(xs, ys, step_fn=loss_of(learner), window=2, inside='exact')


# -- rules whose trace holds random numbers --------------------------------------------------------

SIGNS, UORO = rules.signs(seed=2), rules.uoro(seed=2)


@pytest.mark.slow
def test_a_snapshot_holds_the_key():
    (xs, ys), learner = data(4), compiled(UORO)
    gradient = lambda: learner.etrace_grad(xs, ys, step_fn=loss_of(learner)).grads
    learner(xs[0])
    tree = learner.save()
    first = gradient()
    learner.restore(tree)
    assert_close(gradient(), first, 0.0)
    learner.reset_state()
    second = gradient()
    learner.reset_state()
    assert max(errors(second, gradient()).values()) > 1e-3  # the key goes on
    with pytest.raises(StructureError):
        compiled(rules.signs(seed=3)).restore(tree)


@pytest.mark.slow
@pytest.mark.parametrize('rule', [SIGNS, UORO, rules.uoro('batch', 2)], ids=str)
def test_lanes_are_reset_and_the_trace_of_a_parameter_is_shown(rule):
    xs, _ = data(3)
    learner = compiled(rule)
    for x in xs:
        learner(x)
    learner.reset_state(lanes=jnp.array([True, False, False]))
    assert learner.etrace.value['t'].tolist() == [0, 3, 3]
    traces = learner.get_etrace_of('cell/Wz/weight')
    assert traces
    for slots in traces.values():
        for slot in slots.values():
            if slot.shape[:1] == (BATCH,):
                assert not slot[0].any() and slot[1].any()
    text = str(learner.report)
    assert rule.name in text and 'unbiased' in text


@pytest.mark.slow
def test_a_state_with_a_key_goes_into_a_file_and_lies_on_a_mesh():
    def cell(params, h, x):
        h = 0.8 * h + jnp.tanh(braintrace.matmul(jnp.concatenate([x, h], -1), params['W']))
        return h, h

    learner, params = functional.online(cell, UORO), {'W': jnp.full((5, 3), 0.2)}
    xs, ys = data(4)[0][:, :2], jnp.zeros((4, 2, 3))
    run = jax.jit(learner.sequence_grad(squared))
    state = run(params, learner.init(params, ys[0], xs[0]), xs, ys).state
    file = io.BytesIO()
    functional.save_state(file, state)
    file.seek(0)
    back = functional.load_state(file, jax.eval_shape(lambda: state))
    assert_close(run(params, back, xs, ys)[0], run(params, state, xs, ys)[0], 0.0)
    assert learner.memory().total > 0
    specs = learner.partition_specs({'W': None}, batch_axis='data')
    assert jax.tree.structure(specs.trace) == jax.tree.structure(state.trace)


# -- the axes of the public package ----------------------------------------------------------------

Config = compat.ETraceConfig
IO = {'trace_factorization': 'io_factorized', 'decay': 0.9}
CONFIGURED = [
    ({}, rules.d_rtrl()),
    ({'recurrence_scope': 'coupled'}, rules.d_rtrl(scope='own')),
    ({'recurrence_scope': 'sparse_n', 'sparse_n': 3}, rules.snap(3)),
    ({'temporal_recursion': 'none'}, rules.same_step()),
    (IO, rules.es_d_rtrl(0.9)),
    ({**IO, 'decay': (0.9, 0.5)}, rules.es_d_rtrl((0.9, 0.5))),
    ({**IO, 'temporal_recursion': ('scalar_leak', 'none')}, rules.ottt(0.9)),
    ({'trace_factorization': 'random_projection', 'recurrence_scope': 'coupled'}, rules.uoro()),
    ({'learning_signal': 'modulatory'}, rules.d_rtrl()),
    (
        {'learning_signal': 'random_feedback'},
        rules.d_rtrl().with_feedback(braintrace.Feedback('random')),
    ),
    ({'trace_filter': 'kappa', 'kappa': 0.8}, rules.d_rtrl().filtered(0.8)),
]


@pytest.mark.parametrize('axes, value', CONFIGURED)
def test_six_axes_are_a_rule(axes, value):
    assert Config(**axes) == value


@pytest.mark.parametrize(
    'axes, found',
    [
        ({'trace_factorization': 'per_weight'}, "trace_factorization is 'per_weight'; choose"),
        ({'temporal_recursion': 'leak'}, "temporal_recursion is 'leak'; choose"),
        ({'temporal_recursion': 'scalar_leak'}, r'nearest is `braintrace.rules.d_rtrl\(\)`'),
        ({**IO, 'temporal_recursion': 'scalar_leak'}, r'nearest is `braintrace.rules.ottt\(leak\)'),
        (
            {**IO, 'recurrence_scope': 'coupled'},
            r"recurrence_scope is 'coupled' with 'io_factorized'.*es_d_rtrl\(decay\)",
        ),
        ({'trace_factorization': 'random_projection'}, r'nearest is `braintrace.rules.uoro\(\)`'),
        ({'trace_factorization': 'io_factorized'}, 'decay is None'),
        ({'recurrence_scope': 'sparse_n'}, 'sparse_n is None'),
        ({'trace_filter': 'kappa'}, 'kappa is None'),
        ({'kappa': 0.5}, "kappa is 0.5 with trace_filter='none', which reads none: leave it out"),
        ({'sparse_n': 2}, "sparse_n is 2 with recurrence_scope='diagonal'"),
        ({'decay': 0.9}, "decay is 0.9 with trace_factorization='per_param'"),
        ({**IO, 'decay': (0.9, 0.8, 0.7)}, r'the decays are \(0.9, 0.8, 0.7\)'),
        ({'learning_signal': 'bootstrapped'}, 'Use `braintrace.compat.DNI`'),
        ({'update_schedule': 'window', 'window_size': 4}, '`update_every` to'),
    ],
)
def test_axes_without_a_counterpart_name_the_nearest_value(axes, found):
    with pytest.raises(OptionError, match=found):
        Config(**axes)


def test_fixed_feedback_and_the_filter_are_there():
    feedback = compat.FixedRandomFeedback(2, UNITS, jax.random.key(1), init_scale=0.5)
    error = jnp.ones((BATCH, 2))
    assert_close(feedback.project(error), error @ feedback.B, 1e-6)
    trace = compat.KappaFilter(jnp.zeros(2), 0.9)
    shown = [trace.update(x) for x in (jnp.ones(2), jnp.ones(2), jnp.zeros(2))]
    assert_close(jnp.stack(shown)[:, 0], np.array([0.1, 0.19, 0.171]), 1e-6)
