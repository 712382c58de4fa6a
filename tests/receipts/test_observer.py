"""The observer of examples/: trainings of other frameworks become receipts that hold."""

from __future__ import annotations

import ast
import functools
import io
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import receipts_observer
from receipts_observer import Observer, of_jax, optax_slots

from braintrace_receipts import check, emit, parse_run, reconcile, reconcile_run
from braintrace_receipts.reconciler import VERDICTS as RESULTS
from tests.receipts.foreign import Foreign
from tests.sources import ROOT, SOURCES

VERDICTS = ('verdict', 'pass', 'fail', 'verified', 'expected', 'consistent', 'reconcil', 'judge')


def test_the_observer_needs_no_braintrace_and_judges_nothing():
    tree = ast.parse((ROOT / 'examples' / 'receipts_observer.py').read_text(encoding='utf-8'))
    nodes = list(ast.walk(tree))
    imported = {alias.name for one in nodes if isinstance(one, ast.Import) for alias in one.names}
    imported |= {one.module for one in nodes if isinstance(one, ast.ImportFrom)}
    assert 'braintrace' not in {name.split('.')[0] for name in imported}
    texts = [getattr(one, 'value', None) for one in nodes if isinstance(one, ast.Constant)]
    keys = [text.lower() for text in texts if isinstance(text, str) and ' ' not in text]
    assert not [key for key in keys if any(word in key for word in VERDICTS)]


RECORDER = [
    one
    for one in SOURCES
    if one.floor == 'receipts' and not one.path.endswith(('__init__.py', '_audit.py'))
]


@pytest.mark.parametrize('source', RECORDER, ids=lambda one: one.path)
def test_the_recorder_has_no_word_for_a_verdict(source):
    """Its names and strings; a docstring may say who judges."""
    nodes, kinds = list(ast.walk(source.tree)), ast.Module | ast.ClassDef | ast.FunctionDef
    docs = [getattr(one.body[0], 'value', None) for one in nodes if isinstance(one, kinds)]
    constants = {one.value for one in nodes if isinstance(one, ast.Constant) and one not in docs}
    assert not constants & {*RESULTS, 'verdict', 'ok'}


# another framework --------------------------------------------------------------------------------

TRAININGS = [
    ('pytorch', {}, dict(dtype='float32', kappa=0.8, feedback='fixed', optimizer='adam')),
    ('jax', dict(tells_updates=True), dict(cell='alif', kappa=0.9, optimizer='adam')),
    ('tensorflow', dict(layout='in_out', split=False), dict(cell='rnn', readout='linear')),
    ('pytorch', {}, dict(cell='alif', dtype='float32', optimizer='nesterov', reset_gradient=False)),
    ('jax', {}, dict(readout='linear', optimizer='adamw')),
    ('tensorflow', {}, dict(cell='rnn', kappa=0.5, optimizer='momentum', loss='softmax_ce')),
]


@pytest.mark.parametrize(('framework', 'options', 'how'), TRAININGS)
def test_honest_training_is_derived_again(framework, options, how):
    receipts = Foreign(framework, **options).receipts(4, reset=(2,), **how)
    result = reconcile_run(receipts)
    assert (result.ok, result.verdict, result.failures) == (True, 'rederived', ())
    assert receipts[0]['source'] == {'framework': framework, 'version': '1.0'}


def test_the_layout_of_weights_changes_nothing():
    turned, straight = (Foreign(layout=layout).receipts(2)[1] for layout in ('out_in', 'in_out'))
    assert emit(turned) == emit(straight)


def off(*path):
    """A number of what the observer is told that is 5 % off."""

    def spoil(told):
        *at, last = path
        for key in at:
            told = told[key]
        told[last] = told[last].copy()
        told[last].reshape(-1)[1] = told[last].reshape(-1)[1] * 1.05 + 1e-3

    return spoil


WRONG = [  # what is wrong, and the rule that sees it first
    (off('gradients', 'input'), 4),
    (off('state', 0, 'input'), 6),
    (off('state', 3, 'input', 'V'), 29),
    (off('state', 1, 1, 'mu', 'input'), 22),
    (off('state', 1, 1, 'nu', 'input'), 23),
    (off('x', 'input'), 8),
]


@pytest.mark.parametrize(('spoil', 'rule'), WRONG, ids=[str(rule) for _, rule in WRONG])
def test_a_wrong_number_fails_and_the_receipt_is_made_all_the_same(spoil, rule):
    receipt = Foreign(spoil=spoil).receipts(1, 'alif', optimizer='adam')[0]
    result = reconcile(receipt)
    assert result.verdict == 'failed' and result.failures[0].rule == rule
    assert check(receipt, receipt['schema']) == []


def test_a_readout_trace_that_decays_as_the_membrane_is_found():
    """The readout's trace of another simulator was filtered with tau_mem in place of tau_out."""
    traces = [0.0]

    def faster(told):
        trace = told['state'][3]['readout']
        traces.append(trace['o'])
        trace['o'] = trace['o'] - 0.1 * traces[-2]

    result = reconcile(Foreign(spoil=faster).receipts(3)[2])
    assert result.verdict == 'failed' and result.failures[0].rule in {27, 30}


def test_what_makes_no_step_is_named():
    for options, said in (
        (dict(spoil=lambda told: told.pop('psi_before')), 'psi_before is due: D of this alif'),
        (dict(optimizer='lion'), "'lion' has no formula: give the updates"),
        (dict(spoil=lambda told: told['outputs'].fill(math.inf)), 'is not finite'),
    ):
        with pytest.raises(ValueError, match=said):
            Foreign(**options).receipts(1, 'alif')


def test_an_optimizer_without_a_formula_is_consistent_at_most():
    receipts = Foreign(tells_updates=True, optimizer='lion').receipts(1)
    assert reconcile(receipts[0]).verdict == 'consistent'


def test_repeated_axes_stand_for_the_same_numbers():
    def shortened(told):
        one = lambda v: v[..., :1] if (v == v[..., :1]).all() else v
        told['state'][3].update({n: jax.tree.map(one, t) for n, t in told['state'][3].items()})

    straight = functools.partial(Foreign, layout='in_out')
    whole, short = (make().receipts(1)[0] for make in (straight, lambda: straight(spoil=shortened)))
    assert emit(whole) == emit(short)


# a jitted step of JAX that donates its arguments --------------------------------------------------

B, I, N, O = 2, 3, 4, 2
LEAK = 0.6
CONSTANTS = {'leak': LEAK}
ADAM = {'lr': 0.01, 'b1': 0.9, 'b2': 0.999, 'eps': 1e-8}


@functools.partial(jax.jit, donate_argnums=(0, 1, 2, 3))
def step(params, opt_state, carry, traces, inputs, targets):
    """One step of a tanh network with a linear readout, trained online."""
    x = jnp.concatenate([inputs, carry['h']], -1)
    slope = 1 - jnp.tanh(x @ params['w']) ** 2
    h = LEAK * carry['h'] + jnp.tanh(x @ params['w'])
    trace = LEAK * traces['w']['h'] + x[:, :, None] * slope[:, None]
    outputs = h @ params['w_out']
    err = (outputs - targets) / B
    learning = err @ params['w_out'].T
    gradients = {'w': (learning[:, None] * trace).sum(0), 'w_out': h.T @ err}
    updates, opt_state = TRANSFORM.update(gradients, opt_state, params)
    per_lane = 0.5 * ((outputs - targets) ** 2).sum(-1)
    seen = dict(x={'w': x, 'w_out': h}, psi=slope, outputs=outputs, err=err, learning=learning)
    seen |= dict(per_lane=per_lane, value=per_lane.mean(), gradients=gradients, updates=updates)
    params = optax.apply_updates(params, updates)
    return params, opt_state, {'h': h}, {'w': {'h': trace}}, seen


TRANSFORM = optax.adam(0.01)


def start():
    draw = np.random.default_rng(0)
    params = {
        'w': jnp.asarray(draw.normal(size=(I + N, N)) / math.sqrt(N), jnp.float32),
        'w_out': jnp.asarray(draw.normal(size=(N, O)), jnp.float32),
    }
    carry = {'h': jnp.zeros((B, N), jnp.float32)}
    traces = {'w': {'h': jnp.zeros((B, I + N, N), jnp.float32)}}
    return params, TRANSFORM.init(params), carry, traces


def observer(file=None, **options):
    given = dict(
        parameters={'w': 'recurrent', 'w_out': 'readout'},
        cell='rnn',
        readout='linear',
        constants=CONSTANTS,
        optimizer=('adam', ADAM),
        numeric=of_jax(start()[0]['w']),
    )
    return Observer(file or io.BytesIO(), **(given | options))


def told(params, opt_state, carry, traces):
    return params, optax_slots(opt_state), carry, traces


def test_a_jitted_step_that_donates_is_derived_again():
    file = io.BytesIO()
    seen = observer(file)
    state = start()
    draw = np.random.default_rng(1)
    data = draw.normal(size=(3, B, I + O)).astype(np.float32)
    for one in data:
        inputs, targets = one[:, :I], one[:, I:]
        seen.before(*told(*state), inputs, targets)
        *state, made = step(*state, inputs, targets)
        seen.after(*told(*state), **made)
    receipts = parse_run(file.getvalue())
    result = reconcile_run(receipts)
    assert (result.verdict, result.failures) == ('rederived', ())
    assert receipts[2]['optimizer']['state_after']['count'] == 3


def test_tf32_is_refused_off_the_cpu(monkeypatch):
    weight = start()[0]['w']
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    with pytest.raises(ValueError, match='as TF32 with 11 bits'):
        of_jax(weight)
    assert of_jax(weight, allow_tf32=True)['matmul_precision'] == 'tf32'
    with jax.default_matmul_precision('highest'):
        assert of_jax(weight)['matmul_precision'] == 'highest'


def test_wrong_use_of_the_observer_is_told():
    state, ones = told(*start()), np.ones((B, I), np.float32)
    for parameters, said in (
        ({'w': 'W'}, 'each is one of input, recurrent'),
        ({'w': 'recurrent', 'v': 'recurrent'}, 'once'),
        ({'w': 'recurrent'}, 'recurrent and readout are due'),
    ):
        with pytest.raises(ValueError, match=said):
            observer(parameters=parameters)
    with pytest.raises(ValueError, match='a lane is reset'):
        observer().before(*state, ones, ones, reset=[True, False])
    seen = observer()
    seen.before(*state, ones, ones)
    with pytest.raises(RuntimeError, match='before was called twice'):
        seen.before(*state, ones, ones)
    made = dict(x={}, psi=ones, outputs=ones, per_lane=ones, value=0.0, err=ones, learning=ones)
    with pytest.raises(RuntimeError, match='after was called without before'):
        observer().after(*state, gradients={}, **made)
    with pytest.raises(ValueError, match='float16: float32 and float64'):
        receipts_observer.numeric('float16', 'highest', 'cpu', False, '')
