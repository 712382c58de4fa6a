"""The live audit: D, what it leaves out, and gradients beside BPTT."""

from __future__ import annotations

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import braintrace
from braintrace import functional, rules, verify
from braintrace.receipts import Cell, audit
from braintrace.receipts._audit import _parameters
from tests.compare import assert_close

B, I, N, O, T = 2, 2, 3, 1, 4  # noqa: E741


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(list(shape)).normal(size=shape), jnp.float32)


def audited(cell, rule, **changes):
    params = cell.init(jax.random.key(0), I, N, O) | changes
    learner = functional.online(cell, rule)
    state = learner.init(params, cell.carry(params, B), drawn(B, I))
    return audit(learner, params, state, 2 * drawn(T, B, I), drawn(T, B, O))


@pytest.mark.slow
def test_without_recurrent_weights_nothing_is_left_out():
    w = drawn(I + N, N).at[I:].set(0)
    found = audited(Cell.rnn(0.5), rules.d_rtrl(), W=w)
    assert found.ok and found.relations[0].df_error < 1e-12
    assert found.groups[0].dropped < 1e-12
    assert min(row.cosine for row in found.parameters if row.path != 'W') > 1 - 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ('cell', 'rule'),
    [
        (Cell.alif(8.0, 0.4, 30.0, 0.3, reset_gradient=True), rules.es_d_rtrl(0.5)),
        (Cell.lif(8.0, 0.4, tau_out=4.0), rules.e_prop(0.7)),
    ],
    ids=['alif', 'filtered lif'],
)
def test_d_is_that_of_the_cell_and_the_rest_is_told(cell, rule):
    found = audited(cell, rule)
    assert found.ok and 0 < found.groups[0].dropped < 1
    assert found.relations[0].df_error < 1e-12
    assert 'Jacobian left out' in repr(found) and 'left out' in found._repr_html_()


@pytest.mark.slow
def test_jacobians_are_those_of_the_formula():
    with jax.enable_x64(True):
        cell = Cell.rnn(0.5)
        params = jax.tree.map(lambda p: p.astype(float), cell.init(jax.random.key(0), I, N, O))
        carry, x = {'h': drawn(B, N).astype(float)}, drawn(B, I).astype(float)
        learner = functional.online(cell)
        learner.init(params, carry, x)
        whole, kept = verify.hidden_jacobians(learner, params, carry, x)
        y = jnp.concatenate([x, carry['h']], -1) @ params['W'] + params['b']
        slope, eye = 1 - jnp.tanh(y) ** 2, jnp.eye(N)
        through = slope[:, :, None] * params['W'][I:].T[None]
        for found, one in ((whole, 0.5 * eye[None] + through), (kept, 0.5 * eye + 0 * through)):
            want = jnp.einsum('bnm,bc->bncm', one, jnp.eye(B))
            assert_close(found['h']['h'][:, :, 0, :, :, 0], want)
    with pytest.raises(braintrace.errors.OptionError, match='learner is list'):
        verify.hidden_jacobians([], params, carry, x)


def test_a_gradient_where_that_of_bptt_is_zero_is_infinitely_too_large():
    learner, some, none = SimpleNamespace(routes=['a', 'b', 'c']), np.ones(2), np.zeros(2)
    rows = _parameters(learner, [some, none, none], [none, some, none], 1)
    assert [row[1:] for row in rows] == [(0, math.inf), (0, 0), (1, 1)]


@pytest.mark.slow
def test_a_wrong_d_is_told(monkeypatch):
    def wrong(*args):
        whole, kept = verify.hidden_jacobians(*args)
        return whole, jax.tree.map(lambda a: 1.01 * a, kept)

    monkeypatch.setattr('braintrace.receipts._audit.hidden_jacobians', wrong)
    found = audited(Cell.rnn(0.5), rules.d_rtrl())
    assert not found.ok and 'NOT' in repr(found)
