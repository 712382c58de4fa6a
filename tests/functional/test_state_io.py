"""All that a stream needs to go on is the parameters and one state, which a file keeps."""

import io
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import saiunit as u

import braintrace
from braintrace import functional, rules
from braintrace.errors import StructureError
from tests.compare import assert_close
from tests.functional.plain import ROOT, loss
from tests.late import LATE

OPTIMIZER = optax.adam(1e-2)
RULES = {
    'pending': LATE,
    'bfloat16': rules.d_rtrl(trace_dtype=jnp.bfloat16),
    'es_d_rtrl': rules.es_d_rtrl(0.7),
}


def cell(p, c, x):
    """With noise, a count and a physical unit."""
    key, own = jax.random.split(c['key'])
    y = braintrace.matmul(jnp.concatenate([x, c['h']], -1), p['w'])
    h = 0.7 * c['h'] + jnp.tanh(y) + 0.1 * jax.random.normal(own, y.shape)
    return h, {'h': h, 'key': key, 'steps': c['steps'] + 1, 'v': 0.5 * c['v'] + x.sum() * u.mV}


def start(rule):
    learner = functional.online(cell, RULES[rule])
    p = {'w': jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), jnp.float32)}
    c = {'h': jnp.zeros((2, 3)), 'key': jax.random.key(0)}
    c |= {'steps': jnp.array(0), 'v': jnp.array(0.0) * u.mV}
    state = learner.init(p, c, jnp.zeros((2, 2)))
    return learner, {'params': p, 'optimizer': OPTIMIZER.init(p), 'state': state}


def go_on(learner, kept, first: int):
    """Five steps of a stream, each with an update; some may be pending in the state afterwards."""
    rng = np.random.default_rng(1)
    xs, ys = (jnp.asarray(rng.normal(size=(10, 2, n)), jnp.float32) for n in (2, 3))

    def step(kept, at):
        p, opt_state = kept['params'], kept['optimizer']
        grads, _, _, state = learner.grad(loss)(p, kept['state'], *at)
        updates, opt_state = OPTIMIZER.update(grads, opt_state)
        p = optax.apply_updates(p, updates)
        return {'params': p, 'optimizer': opt_state, 'state': state}, None

    part = slice(first, first + 5)
    return jax.jit(lambda *args: jax.lax.scan(step, *args)[0])(kept, (xs[part], ys[part]))


def numbers(kept):
    kept = jax.tree.map(lambda a: a, kept)
    key = jax.random.key_data(kept['state'].carry.pop('key'))
    return jax.tree.leaves((kept, key))


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('rule', RULES)
def test_a_stream_goes_on_from_a_file_bit_by_bit(rule, tmp_path):
    learner, kept = start(rule)
    middle = go_on(learner, kept, 0)
    functional.save_state(tmp_path / 'stream', middle)
    other, like = start(rule)
    loaded = functional.load_state(tmp_path / 'stream', jax.eval_shape(lambda: like))
    assert_close(numbers(loaded), numbers(middle), 0)
    assert loaded['state'].laned == middle['state'].laned
    got, want = (numbers(go_on(of, x, 5)) for of, x in ((other, loaded), (learner, middle)))
    assert_close(got, want, 0)


@pytest.mark.slow
def test_another_process_goes_on_bit_by_bit(tmp_path):
    learner, kept = start('pending')
    middle = go_on(learner, kept, 0)
    functional.save_state(tmp_path / 'middle', middle)
    env = dict(os.environ, PYTHONPATH=str(ROOT), JAX_DISABLE_MOST_OPTIMIZATIONS='1')
    code = f'from {__name__} import resume; resume({str(tmp_path)!r})'
    done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    got = functional.load_state(tmp_path / 'end', kept)
    assert_close(numbers(got), numbers(go_on(learner, middle, 5)), 0)


def resume(folder: str) -> None:
    """What the other process does."""
    learner, like = start('pending')
    loaded = functional.load_state(Path(folder) / 'middle', like)
    functional.save_state(Path(folder) / 'end', go_on(learner, loaded, 5))


@pytest.mark.slow
def test_every_dtype_and_every_name_comes_back():
    tree = {
        'bfloat16': jnp.arange(6.0).astype(jnp.bfloat16).reshape(2, 3),
        'float8': jnp.ones(2, jnp.float8_e4m3fn),
        'int4': jnp.arange(4).astype(jnp.int4),
        'bool': jnp.array(True),
        'complex': jnp.ones(2, complex) * 1j,
        'empty': jnp.zeros((0, 3)),
        'keys': jax.random.split(jax.random.key(3, impl='rbg')),
        'raw key': jax.random.PRNGKey(1),
        'unit': jnp.ones(2) * u.mV,
        'file': 3,
        '../~format': [jnp.ones(()), None],
        '': (2.5,),
    }
    file = io.BytesIO()
    functional.save_state(file, tree)
    back = functional.load_state(file, tree)
    assert back['unit'].unit == u.mV and jax.random.key_impl(back['keys']) == 'rbg'
    assert (jax.random.key_data(back.pop('keys')) == jax.random.key_data(tree.pop('keys'))).all()
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        want = jnp.asarray(want)
        assert got.dtype == want.dtype and (got == want).all()


def test_a_file_of_another_structure_is_refused_with_every_difference():
    file = io.BytesIO()
    functional.save_state(file, {'w': jnp.ones(2), 'v': jnp.ones(()) * u.mV, 'old': jnp.ones(1)})
    like = {'w': jnp.ones((2, 1)), 'v': jnp.ones(()) * u.volt, 'new': jax.random.key(0)}
    with pytest.raises(StructureError) as caught:
        functional.load_state(file, like)
    assert {line.strip() for line in str(caught.value).splitlines()[1:-1]} == {
        'w: float32[2] when saved, float32[2, 1] here',
        'v: float32[] mV when saved, float32[] V here',
        'old: float32[1] when saved, absent here',
        'new: absent when saved, key<fry>[] here',
    }
