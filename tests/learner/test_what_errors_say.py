"""What a call says that does not fit: found, where, what to do; and what a traceback shows."""

import copy
import importlib
import pickle
import traceback
import warnings
from pathlib import Path

import brainstate
import equinox
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import braintrace
from braintrace import errors, functional, nn, rules, tasks

from .networks import UNITS, Layer, compiled, data, loss_of, shared, squared

PACKAGE = str(Path(braintrace.__file__).parent)
X, P, H = jnp.zeros((4, 3)), {'w': jnp.ones((3, 5))}, jnp.zeros((4, 5))
gru, KEY = lambda: nn.GRUCell(3, 5), jax.random.key(0)
chain, narrow = brainstate.nn.Sequential, nn.Linear(4, 2)
cell = lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p['w']))
plain = lambda p, h, x: (h, h + x @ p['w'])
alone = lambda p, h, x: h + braintrace.matmul(x, p['w'])
loss = lambda out, y: out.sum()


def named(p, h, x):
    return cell(p, h, x)


learner = functional.online(cell)
SEQUENCE = jnp.zeros((6, 4, 3))


def made(*inputs, model=gru, rule='D_RTRL', **options):
    return lambda: braintrace.compile(model(), rule, *inputs, **options)


WHOLE = 'Of a whole sequence, give one step'
LACKS = 'missing a required argument: '
SAID = {
    rf'{WHOLE}: `xs\[0\]`. Other axes': made(SEQUENCE, batch_size=4),
    rf'state h of shape \(5,\).* {WHOLE}': made(SEQUENCE[:, 0]),
    f'sees one sample of it. {WHOLE}': made(SEQUENCE, batch_size=4, vmap=True),
    r'^Linear: the input has shape \(4, 5\)': (  # not what brainstate prints around it
        made(X, model=lambda: chain(chain(gru(), narrow)), batch_size=4)
    ),
    'It has 7 features, and the layer takes 3': made(jnp.zeros((4, 7)), batch_size=4),
    "no inputs are given.*example of one step's inputs.*compile": made(batch_size=4),
    'seed is 1.5; give an int': made(X, seed=1.5),
    "batchsize.*Did you mean 'batch_size'": made(X, batchsize=4),
    "Did you mean 'decay_or_rank'": made(X, rule='ES_D_RTRL', decay=0.9),
    r"snap needs n: .* name, `compile\(model, 'snap', x, n=...\)`": made(X, rule='snap'),
    'adapters.from_equinox': made(X, model=lambda: equinox.nn.GRUCell(3, 5, key=KEY)),
    'adapters.from_nnx': made(X, model=lambda: nnx.GRUCell(3, 5, rngs=nnx.Rngs(0))),
    'no brainstate.HiddenState that holds a value': made(X, model=lambda: nn.Linear(3, 5)),
    'no inputs are given.*init': lambda: learner.init(P, H),
    'returned one array; return a pair': lambda: functional.online(alone).init(P, H, X),
    f'step returns. {WHOLE}': lambda: functional.online(plain).init(P, H, SEQUENCE),
    rf'matmul: x has shape \(6, 4, 3\).* {WHOLE}': lambda: learner.init(P, H, SEQUENCE),
    rf'\(batch, 5, 2\). {WHOLE}': lambda: nn.Conv1d((5, 2), 3, 3)(jnp.zeros((6, 4, 5, 2))),
    rf"loss_fn\): {LACKS}'targets'.*\(params, state, inputs": lambda: learner.grad(loss)(P, X, X),
    rf"sequence_grad\(loss_fn\): {LACKS}'ys'": lambda: learner.sequence_grad(loss)(P, X, X),
    rf"heads\(\*losses\): {LACKS}'targets'": lambda: learner.heads(loss)(P, X, X),
    rf"observed\(loss_fn\): {LACKS}'targets'": lambda: learner.observed(loss)(P, X, X),
    r'ys, mask=None, reset=None\)`': lambda: learner.sequence_update(loss, optax.sgd(1))(P, X, X),
    r'loss_fn is called as `loss\(outputs, target\)`': lambda: learner.grad(lambda out: out.sum()),
    'no argument windw. Did you mean window': lambda: learner.sequence_grad(loss, windw=3),
    'no argument trace_dtyp. Did you mean trace_dtype': lambda: rules.d_rtrl(trace_dtyp=3),
    'no argument batch. Did you mean batch_size': lambda: tasks.run(1, 2, 3, 4, batch=3),
    'Policy: there is no argument lanes. Did you mean batched': lambda: braintrace.Policy(lanes=()),
    'GRUCell: there is no argument winit. Did you mean w_init': lambda: nn.GRUCell(3, 5, winit=0),
    'D_RTRL: .* argument credt. Did you mean credit': lambda: braintrace.D_RTRL(gru(), credt=1),
    'matmul: .* argument bia. Did you mean bias': lambda: braintrace.matmul(X, P['w'], bia=0),
}
SHORT = {'trace_dtype': jnp.bfloat16}
OPTIONS = [
    ("'d_rtlr'.*Did you mean 'D_RTRL'", made(X, rule='d_rtlr')),
    ('learner class', made(X, rule=3)),
    (r'an array of shape \[4, 3\].*compile\(model, rule, \*inputs\)', made('D_RTRL', rule=X)),
    (r'call it: `d_rtrl\(...\)`', made(X, rule=rules.d_rtrl)),
    ('small already; trace_dtype is for d_', lambda: rules.es_d_rtrl(0.9, **SHORT)),
    ('small already; trace_dtype is for d_', made(X, rule='ES_D_RTRL', decay_or_rank=0.9, **SHORT)),
    ('brainstate.nn.Module', lambda: braintrace.D_RTRL(3)),
    ('readout', lambda: shared().get_etrace_of('nope')),
    ("Did you mean 'cell/Wz/weight'", lambda: shared().get_etrace_of('cell/Wz')),
    (r'the class GRUCell; .* GRUCell\(...\) makes one', made(X, model=lambda: nn.GRUCell)),
    *(
        ('decay|rank', lambda v=v: braintrace.ES_D_RTRL(gru(), v))
        for v in (1.0, -0.1, 0, True, 'a', float('nan'))
    ),
    ('no argument every. Did you mean update_every', lambda: trained(every=2)),
    ('Losses always come back, as `.losses`', lambda: differentiated(return_value=True)),
    ('`import braintrace.compat` takes fast_solve', lambda: differentiated(fast_solve=True)),
]


def trained(**options):
    shared().etrace_train(*data(), step_fn=squared, optimizer=optax.sgd(0.1), **options)


def differentiated(**options):
    shared().etrace_grad(*data(), step_fn=squared, **options)


@pytest.mark.parametrize('said, call', OPTIONS, ids=[said for said, _ in OPTIONS])
def test_an_option_that_does_not_fit_is_refused(said, call):
    with pytest.raises(errors.OptionError, match=said):
        call()


def test_states_that_are_not_made_yet_are_refused():
    with pytest.raises(errors.BraintraceError, match='init_all_states'):
        braintrace.D_RTRL(gru()).compile_graph(X)


@pytest.mark.parametrize('said', SAID)
def test_a_call_that_does_not_fit_says_what_to_do(said):
    with pytest.raises(errors.BraintraceError, match=said):
        SAID[said]()


@pytest.mark.parametrize(
    'module, wrong, near',
    [
        ('braintrace', 'evalute', 'evaluate'),
        ('braintrace.nn', 'RNNCell', 'CTRNNCell'),
        ('braintrace.nn', 'LSTM', 'LSTMCell'),
        ('braintrace.rules', 'drtrl', 'd_rtrl'),
        ('braintrace.functional', 'onlin', 'online'),
        ('braintrace.tasks', 'add', 'adding'),
        ('braintrace.adapters', 'from_flx', 'from_blox'),
        ('braintrace.verify', 'bptt', 'bptt_gradients'),
        ('braintrace.errors', 'OptionErr', 'OptionError'),
        ('braintrace.receipts', 'record', 'Record'),
        ('braintrace.kit', 'chek', 'check'),
        ('braintrace.nn.surrogate', 'Sigmod', 'sigmoid'),
        ('braintrace.tasks.events', 'shd', 'read_shd'),
        ('braintrace.tasks.environments', 'CartPol', 'cartpole'),
    ],
)
def test_each_public_module_names_the_nearest_of_its_names(module, wrong, near):
    with pytest.raises(AttributeError, match=f"'{wrong}'. Did you mean {near}"):
        getattr(importlib.import_module(module), wrong)


def test_a_name_of_another_module_is_found_there():
    for name, place in (('gradient', 'functional.Gradient'), ('d_rtrl', 'rules.d_rtrl')):
        with pytest.raises(AttributeError, match=f'It is `braintrace.{place}`'):
            getattr(braintrace, name)


def test_messages_show_an_array_by_its_shape_and_its_range_or_ends():
    long = jnp.linspace(5, 6, 80)
    for call in (
        lambda: functional.online({'W': jnp.ones((30, 30)), 'b': long}),
        lambda: functional.online(cell, long),
        lambda: nn.LIF(80, tau=-long),
    ):
        with pytest.raises(errors.OptionError, match=r' \.\.\. |\(80,\) from -6 to -5') as caught:
            call()
        assert len(str(caught.value)) < 300


def frames(call) -> list[str]:
    """The files of a traceback, its own call left out."""
    try:
        call()
    except Exception as error:
        return [frame.filename for frame in traceback.extract_tb(error.__traceback__)][1:]
    raise AssertionError('it did not fail')


def test_a_traceback_shows_the_frames_of_the_user_alone():
    (xs, ys), learner = data(), compiled()

    def broken(x, y):
        learner(x)
        raise ZeroDivisionError('mine')

    def run():
        learner.etrace_grad(xs, ys, step_fn=broken)

    def contract():  # a StepFunctionError
        learner.etrace_grad(xs, ys, step_fn=lambda x, y: learner(x))

    def unknown():
        learner.etrace_train(xs, ys, step_fn=squared, optimizer=None, every=2)

    def constructor():
        nn.LIF(3, spk_fun='relu')

    for call, own in ((run, 2), (contract, 1), (unknown, 1), (constructor, 1)):
        shown = frames(call)
        assert shown.count(__file__) == own and not any(PACKAGE in file for file in shown), shown
    jax.config.update('jax_traceback_filtering', 'off')
    try:
        for call in (run, contract):
            assert sum(PACKAGE in file for file in frames(call)) > 5
    finally:
        jax.config.update('jax_traceback_filtering', 'auto')


@pytest.mark.slow
def test_functions_that_are_made_anew_are_told_once_and_other_shapes_are_not():
    xs, learner = data()[0], compiled(model=Layer)
    ys = jnp.zeros((*xs.shape[:2], UNITS))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for length in (2, 3, 4):
            learner.etrace_grad(xs[:length], ys[:length], step_fn=loss_of(learner), window=length)
        once = lambda x, y: squared(learner(x), y)
        for weight in (1, 2):  # two functions that are defined once, and three optimizers
            twice = lambda x, y: weight * squared(learner(x), y)  # noqa: B023
            for step_fn in (once, twice):
                learner.etrace_grad(xs, ys, step_fn=step_fn)
        for make in (optax.sgd, optax.adam, optax.rmsprop):
            learner.etrace_train(xs, ys, step_fn=once, optimizer=make(0.1))
    with pytest.warns(errors.BraintraceWarning, match='third time.*new object') as seen:
        for _ in range(4):
            learner.etrace_grad(xs, ys, step_fn=lambda x, y: squared(learner(x), y))
    assert len(seen) == 1
    with pytest.warns(errors.BraintraceWarning, match='third time'):
        for _ in range(3):
            options = {'step_fn': loss_of(learner), 'optimizer': optax.sgd(0.1)}
            learner.etrace_train(xs, ys, **options)
    with pytest.warns(errors.BraintraceWarning, match='third time'):
        for _ in range(3):
            learner.etrace_evolve(xs, step_fn=lambda x: learner(x))


def test_completion_shows_what_users_call():
    shown = {name for name in dir(shared()) if not name.startswith('_')}
    assert shown == {
        *('compile_graph', 'etrace', 'etrace_evolve', 'etrace_grad', 'etrace_train', 'export'),
        'fingerprint',
        *('get_etrace_of', 'graph', 'model', 'param_states', 'partition_specs', 'place', 'policy'),
        *('pure', 'report', 'reset_state', 'restore', 'rule', 'save', 'states', 'with_environment'),
    }
    rule = {name for name in dir(rules.d_rtrl()) if not name.startswith('_')}
    own = {'trace_dtype', 'credit'}
    assert rule == own | {'approximation', 'filtered', 'name', 'remembers', 'with_feedback'}


def test_a_learner_says_why_it_is_not_pickled_and_a_pure_one_is():
    with pytest.raises(errors.NotSupportedError, match=r'Pickle `learner.save\(\)`'):
        pickle.dumps(shared())
    own = functional.online(named)
    state = own.init(P, H, X)
    for other in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert 'not compiled' in repr(other) and 'not compiled' not in repr(own)
        other.init(P, H, X)
        assert other.step(P, pickle.loads(pickle.dumps(state)), X)


def test_a_function_is_pickled_by_its_name_and_one_that_a_call_makes_is_named_by_the_call():
    assert pickle.loads(pickle.dumps(rules.d_rtrl)) is rules.d_rtrl
    assert '<function learner.grad(loss_fn) at' in repr(learner.grad(loss))
