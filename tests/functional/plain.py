"""A small cell written in plain JAX, and its data."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, rules
from tests.tiers import slow

ROOT = Path(__file__).resolve().parents[2]
B, I, N, T = 2, 3, 4, 5  # noqa: E741
D_RTRL, ES = rules.d_rtrl(), rules.es_d_rtrl(0.7)
both_rules = pytest.mark.parametrize(
    'rule', [D_RTRL, pytest.param(ES, marks=slow)], ids=lambda rule: rule.name
)


def cell(p, h, x):
    """Leaky units with a bias, in front of a readout."""
    drive = braintrace.matmul(jnp.concatenate([x, h], -1), p['w'], p['b'])
    h = 0.6 * h + jnp.tanh(drive)
    return h @ p['out'], h


def loss(out, target):
    return ((out - target) ** 2).sum()


def sines(out, _=None):
    return jnp.sum(jnp.sin(out))


def drawn(*shape, seed: int = 0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


def params(seed: int = 0):
    shapes = {'w': (I + N, N), 'b': (N,), 'out': (N, 2)}
    return {name: drawn(*shape, seed=seed) for name, shape in shapes.items()}


def data():
    return drawn(T, B, I), drawn(T, B, 2)


def carry():
    return drawn(B, N)


def started(of=cell, rule=D_RTRL, **options):
    """A learner and its first state."""
    learner = functional.online(of, rule, **options)
    return learner, learner.init(params(), carry(), data()[0][0])


def shapes_of(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a)), tree)


def on_devices(file, number: int, **more):
    """What a file of tests prints where it is run on so many devices."""
    flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={number}'
    env = dict(os.environ, XLA_FLAGS=flags, JAX_PLATFORMS='cpu', PYTHONPATH=str(ROOT), **more)
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', file], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
