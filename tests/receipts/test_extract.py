"""The observers: one file each, no judgement, and the one in JAX on a training with donation."""

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
from observers import jax_online
from observers.jax_online import TraceDumper

from braintrace_receipts.canonical import parse
from braintrace_receipts.sidecar import import_run
from tests.sources import ROOT

FOLDER = ROOT / 'examples' / 'observers'
ALLOWED = {'torch_eprop': {'torch', 'numpy'}, 'jax_online': {'jax', 'numpy'}}
VERDICTS = ('verdict', 'pass', 'fail', 'verified', 'expected', 'consistent', 'reconcil', 'judge')


@pytest.mark.parametrize('name', ALLOWED)
def test_an_observer_stands_alone_and_judges_nothing(name):
    text = (FOLDER / f'{name}.py').read_text(encoding='utf-8')
    tree = ast.parse(text)
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split('.')[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            modules.add(node.module.split('.')[0])
    standard = {'__future__', 'collections', 'hashlib', 'json', 'math', 're', 'typing'}
    assert modules - standard == ALLOWED[name]
    keys = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ' ' not in node.value
    ]
    assert not [key for key in keys if any(word in key.lower() for word in VERDICTS)]


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


def dumper(file=None, **options):
    given = dict(
        parameters={'w': 'recurrent', 'w_out': 'readout'},
        cell='rnn',
        readout='linear',
        constants=CONSTANTS,
        optimizer=('adam', ADAM),
    )
    return TraceDumper(file or io.StringIO(), **(given | options))


def test_a_jitted_step_that_donates_is_derived_again():
    file = io.StringIO()
    seen = dumper(file)
    state = start()
    draw = np.random.default_rng(1)
    data = draw.normal(size=(3, B, I + O)).astype(np.float32)
    seen.trace(step, *state, data[0, :, :I], data[0, :, I:])
    for one in data:
        inputs, targets = one[:, :I], one[:, I:]
        seen.before(*state, inputs, targets)
        *state, made = step(*state, inputs, targets)
        seen.after(*state, **made)
    raw = file.getvalue().encode()
    receipts, result = import_run(raw, 'jax')
    assert (result.verdict, result.failures) == ('rederived', ())
    notes = receipts[0]['helper']
    assert notes['jaxpr'].startswith('sha256:') and notes['observer'] == 'jax_online'
    assert parse(raw.splitlines()[2])['optimizer']['count_after'] == 3


def test_the_digest_of_a_jaxpr_names_the_computation():
    state, inputs, targets = start(), np.ones((B, I), np.float32), np.ones((B, O), np.float32)
    notes = []
    for function in (step, step, lambda *given: step(*given)[2]):
        seen = dumper()
        seen.trace(function, *state, inputs, targets)
        notes.append(seen.helper['jaxpr'])
    assert notes[0] == notes[1] != notes[2]


def test_tf32_is_refused_off_the_cpu(monkeypatch):
    monkeypatch.setattr(jax_online.jax, 'default_backend', lambda: 'gpu')
    params = start()[0]
    with pytest.raises(ValueError, match='as TF32 with 11 bits'):
        jax_online.numeric(params, params, False)
    assert jax_online.numeric(params, params, True)['matmul_precision'] == 'tf32'
    with jax.default_matmul_precision('highest'):
        assert jax_online.numeric(params, params, False)['matmul_precision'] == 'highest'


def test_a_number_that_is_not_finite_is_named():
    for value in (float('nan'), np.array([1.0, np.inf])):
        with pytest.raises(ValueError, match=r'parameters\[0\]\.after is not finite'):
            jax_online.encoded({'parameters': [{'after': value}]})


def test_wrong_use_of_the_observer_is_told():
    params, opt_state, carry, traces = start()
    ones = np.ones((B, I), np.float32)
    with pytest.raises(ValueError, match="the role 'W' is not known"):
        dumper(parameters={'w': 'W'})
    with pytest.raises(ValueError, match="'lion'"):
        dumper(optimizer=('lion', {}))
    with pytest.raises(ValueError, match="opt_state has no 'trace'"):
        dumper(optimizer=('momentum', {})).before(params, opt_state, carry, traces, ones, ones)
    with pytest.raises(ValueError, match='a lane is reset'):
        dumper().before(params, opt_state, carry, traces, ones, ones, reset=[True, False])
    seen = dumper()
    seen.before(params, opt_state, carry, traces, ones, ones)
    with pytest.raises(RuntimeError, match='before was called twice'):
        seen.before(params, opt_state, carry, traces, ones, ones)
