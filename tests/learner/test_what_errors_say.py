"""What a call says that does not fit: found, where, what to do; and what a traceback shows."""

import importlib
import traceback
import warnings
from pathlib import Path

import equinox
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import braintrace
from braintrace import errors, functional, nn, rules, tasks

from .networks import compiled, data, loss_of, squared

PACKAGE = str(Path(braintrace.__file__).parent)
X, P, H = jnp.zeros((4, 3)), {'w': jnp.ones((3, 5))}, jnp.zeros((4, 5))
gru = lambda: nn.GRUCell(3, 5)
cell = lambda p, h, x: (h, 0.9 * h + braintrace.matmul(x, p['w']))
alone = lambda p, h, x: h + braintrace.matmul(x, p['w'])
loss = lambda out, y: out.sum()
learner = functional.online(cell)
SAID = {
    r'One step of a sequence is `xs\[0\]`': lambda: braintrace.compile(
        gru(), 'D_RTRL', jnp.zeros((6, 4, 3)), batch_size=4
    ),
    r'features are \(7,\), and the layer takes \(3,\)': lambda: braintrace.compile(
        gru(), 'D_RTRL', jnp.zeros((4, 7)), batch_size=4
    ),
    "no inputs are given.*example of one step's inputs.*compile": lambda: braintrace.compile(
        gru(), 'D_RTRL', batch_size=4
    ),
    'no inputs are given.*init': lambda: learner.init(P, H),
    'adapters.from_equinox': lambda: braintrace.compile(
        equinox.nn.GRUCell(3, 5, key=jax.random.key(0)), 'D_RTRL', X
    ),
    'adapters.from_nnx': lambda: braintrace.compile(
        nnx.GRUCell(3, 5, rngs=nnx.Rngs(0)), 'D_RTRL', X
    ),
    'no brainstate.HiddenState that holds a value': lambda: braintrace.compile(
        nn.Linear(3, 5), 'D_RTRL', X
    ),
    'returned one array; return a pair': lambda: functional.online(alone).init(P, H, X),
    r"loss_fn\): missing a required argument: 'targets'.*\(params, state, inputs, targets\)": (
        lambda: learner.grad(loss)(P, X, X)
    ),
    r"sequence_grad\(loss_fn\): missing a required argument: 'ys'": lambda: learner.sequence_grad(
        loss
    )(P, X, X),
    'no argument windw. Did you mean window': lambda: learner.sequence_grad(loss, windw=3),
    'no argument trace_dtyp. Did you mean trace_dtype': lambda: rules.d_rtrl(trace_dtyp=3),
    'no argument batch. Did you mean batch_size': lambda: tasks.run(1, 2, 3, 4, batch=3),
    'no argument carry. Did you mean keep_trace': lambda: learner.sequence_grad(loss, carry=1),
}


@pytest.mark.parametrize('said', SAID)
def test_a_call_that_does_not_fit_says_what_to_do(said):
    with pytest.raises(errors.BraintraceError, match=said):
        SAID[said]()


def test_arguments_of_a_learner_have_a_nearest_name():
    (xs, ys), learner = data(), compiled()
    with pytest.raises(errors.OptionError, match='no argument every. Did you mean update_every'):
        learner.etrace_train(xs, ys, step_fn=squared, optimizer=optax.sgd(0.1), every=2)
    with pytest.raises(errors.OptionError, match='Losses always come back, as `.losses`'):
        learner.etrace_grad(xs, ys, step_fn=squared, return_value=True)
    with pytest.raises(errors.OptionError, match='`import braintrace.compat` takes fast_solve'):
        learner.etrace_grad(xs, ys, step_fn=squared, fast_solve=True)


@pytest.mark.parametrize(
    'module, wrong, near',
    [
        ('braintrace', 'evalute', 'evaluate'),
        ('braintrace.nn', 'RNNCell', 'MinimalRNNCell'),
        ('braintrace.rules', 'drtrl', 'd_rtrl'),
        ('braintrace.functional', 'onlin', 'online'),
        ('braintrace.tasks', 'add', 'adding'),
        ('braintrace.adapters', 'from_flx', 'from_blox'),
        ('braintrace.verify', 'bptt', 'bptt_gradients'),
        ('braintrace.errors', 'OptionErr', 'OptionError'),
        ('braintrace.receipts', 'record', 'Record'),
        ('braintrace.kit', 'chek', 'check'),
    ],
)
def test_each_public_module_names_the_nearest_of_its_names(module, wrong, near):
    with pytest.raises(AttributeError, match=f"'{wrong}'. Did you mean {near}"):
        getattr(importlib.import_module(module), wrong)


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

    shown = frames(run)
    assert shown.count(__file__) == 2 and not any(PACKAGE in file for file in shown)
    jax.config.update('jax_traceback_filtering', 'off')
    try:
        assert sum(PACKAGE in file for file in frames(run)) > 5
    finally:
        jax.config.update('jax_traceback_filtering', 'auto')


def test_functions_that_are_made_anew_are_told_once_and_other_shapes_are_not():
    (xs, ys), learner = data(), compiled()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        for length in (2, 3, 4, 5):
            learner.etrace_grad(xs[:length], ys[:length], step_fn=loss_of(learner))
            learner.etrace_grad(xs, ys, step_fn=loss_of(learner), window=length)
    with pytest.warns(errors.BraintraceWarning, match='third time.*new object') as seen:
        for _ in range(5):
            step_fn = lambda x, y: squared(learner(x), y)
            learner.etrace_grad(xs, ys, step_fn=step_fn)
    assert len(seen) == 1
    with pytest.warns(errors.BraintraceWarning, match='third time'):
        for _ in range(3):
            options = {'step_fn': loss_of(learner), 'optimizer': optax.sgd(0.1)}
            learner.etrace_train(xs, ys, **options)


def test_completion_shows_what_users_call():
    shown = {name for name in dir(compiled()) if not name.startswith('_')}
    assert shown == {
        *('compile_graph', 'etrace_evolve', 'etrace_grad', 'etrace_train', 'fingerprint'),
        *('get_etrace_of', 'graph', 'model', 'param_states', 'partition_specs', 'place', 'policy'),
        *('pure', 'report', 'reset_state', 'restore', 'rule', 'save', 'states', 'synthesizer'),
    }
    rule = {name for name in dir(rules.d_rtrl()) if not name.startswith('_')}
    own = {'trace_dtype', 'write_every', 'credit'}
    assert rule == own | {'approximation', 'filtered', 'name', 'remembers', 'with_feedback'}
