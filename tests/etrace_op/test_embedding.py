"""``embedding`` against the product of one-hot vectors, in values, gradients, both rules, windows
and maps; and its errors.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace.errors import EtpDtypeError, EtpShapeError
from tests import oracles
from tests.compare import assert_close
from tests.gradients.harness import learn, learn_by_steps
from tests.late import LATE
from tests.tiers import first, in_turn, pairwise

ROWS, FEATURES, BATCH, STEPS = 7, 4, 3, 5
RNG = np.random.default_rng(0)
INDICES = RNG.integers(0, ROWS, (STEPS, BATCH))
TABLE = RNG.normal(size=(ROWS, FEATURES))


def hot(indices):
    return (jnp.arange(ROWS) == indices[..., None]).astype(float)


LANES = jnp.arange(1.0, 1 + BATCH)[:, None, None]


def lookups(of_table):
    """Ways to read a table by ``of_table(what stands for indices, table)``."""
    shared = jax.vmap(of_table, in_axes=(None, 0))
    return {
        'batch': of_table,
        'vmap over indices': lambda i, w: jax.vmap(of_table, in_axes=(0, None))(i, w),
        'a table for each lane': lambda i, w: jax.vmap(of_table)(i, w * LANES),
        'a table shared by groups': lambda i, w: shared(i, jnp.stack([w, 2 * w])).sum(0),
    }


# by index, and by the one-hot vectors that indices stand for
MINE, PRODUCT = lookups(braintrace.embedding), lookups(braintrace.matmul)
RULES = {
    'd_rtrl': braintrace.rules.d_rtrl(),
    'pending': LATE,
    'es': braintrace.rules.es_d_rtrl(0.7),
}


def cell_of(look_up):
    def cell(w, h, i):
        h = jnp.tanh(0.9 * h + look_up(i, w))
        return h, h

    return cell


def cubes(out, _):
    return jnp.sum(out**3)


def data(indices=INDICES, table=TABLE):
    lanes = indices.shape[1:]
    return jnp.asarray(table), jnp.zeros((*lanes, FEATURES)), indices, indices, cubes


def run(look_up, rule, window):
    if window == 'steps':
        return learn_by_steps(braintrace.functional.online(cell_of(look_up), rule), *data())
    return learn(cell_of(look_up), rule, *data(), window)[0]


@pytest.mark.tier(quick=0)
@pairwise(first('batch'), kind=MINE, rule=RULES, window=['steps', 2, None])
def test_it_learns_as_the_product_of_one_hot_vectors(kind, rule, window):
    of_hot = lambda i, w: PRODUCT[kind](hot(i), w)
    mine, product = (run(look_up, RULES[rule], window) for look_up in (MINE[kind], of_hot))
    np.testing.assert_allclose(mine, product, rtol=1e-11, atol=1e-12)
    assert abs(mine).min() > 0


def test_its_gradient_is_that_of_backpropagation_through_time():
    got = run(MINE['batch'], RULES['d_rtrl'], 2)
    assert_close(got, oracles.by_time(cell_of(lambda i, w: w[i]), *data()))


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('dtype', [np.int8, np.uint16, np.int32, np.int64])
def test_values_gradients_and_units(dtype):
    i = jnp.asarray(INDICES[0], dtype)
    rows = braintrace.embedding(i, TABLE * u.mV).to_decimal(u.mV)
    np.testing.assert_array_equal(rows, TABLE[INDICES[0]])
    row = braintrace.embedding(i[0], jnp.asarray(TABLE))
    np.testing.assert_array_equal(row, TABLE[INDICES[0, 0]])
    d = jnp.asarray(RNG.normal(size=(BATCH, FEATURES)))
    got = jax.grad(lambda w: jnp.sum(braintrace.embedding(i, w) * d))(jnp.asarray(TABLE))
    np.testing.assert_allclose(got, hot(INDICES[0]).T @ d, rtol=1e-12, atol=1e-15)


@pytest.mark.tier(quick=0)
@in_turn(first(np.int8), dtype=[np.int8, np.uint8, np.uint16, np.uint64], lanes=[(), (1,), (3,)])
def test_a_table_may_have_more_rows_than_the_type_of_the_indices_counts(dtype, lanes):
    xs, table = RNG.integers(0, 100, (STEPS, *lanes)), RNG.normal(size=(300, FEATURES))
    cell, rule = cell_of(braintrace.embedding), RULES['d_rtrl']
    kinds = (dtype, np.int32)
    assert_close(*(learn(cell, rule, *data(xs.astype(kind), table), 1)[0] for kind in kinds))
    rows = braintrace.embedding(jnp.asarray(xs[0], dtype), jnp.asarray(table))
    np.testing.assert_array_equal(rows, table[xs[0]])


def test_a_table_is_not_multiplied_with_one_hot_vectors():
    gradient = jax.grad(lambda w, i: braintrace.embedding(i, w).sum())
    text = str(jax.make_jaxpr(gradient)(jnp.asarray(TABLE), jnp.arange(3)))
    assert 'scatter' in text and 'dot_general' not in text


ZERO, RANGE = np.array([0]), r'indices go from 0 to 7, but the weight of shape \(7, 4\) has rows 0'


@pytest.mark.parametrize(
    ('indices', 'weight', 'error', 'found'),
    [
        (np.array([0, 7]), TABLE, EtpShapeError, f'{RANGE} to 6'),
        (np.array([-1, 2]), TABLE, EtpShapeError, 'indices go from -1 to 2'),
        (np.array([0.0]), TABLE, EtpDtypeError, 'dtype float64 and unit 1, expected plain int'),
        (np.array([True]), TABLE, EtpDtypeError, 'indices have dtype bool'),
        (np.zeros((2, 2), int), TABLE, EtpShapeError, r'indices has shape \(2, 2\) of rank 2'),
        (ZERO, TABLE[0], EtpShapeError, r'weight has shape \(4,\) of rank 1'),
        (ZERO, TABLE.astype(int), EtpDtypeError, 'dtype int64, which can not be trained'),
        ([0], TABLE, EtpDtypeError, 'indices is a list'),
    ],
    ids=str,
)
def test_operands_that_do_not_fit_are_refused(indices, weight, error, found):
    with pytest.raises(error, match=found):
        braintrace.embedding(indices, weight)


def test_an_unknown_index_out_of_range_gives_no_number():
    rows = jax.jit(braintrace.embedding)(jnp.array([-1, 0, 7]), jnp.asarray(TABLE))
    assert np.isnan(rows[0]).all() and np.isnan(rows[2]).all() and (rows[1] == TABLE[0]).all()


def test_indices_that_are_known_inside_of_jit_are_checked_there():
    known, look_up = jnp.array([2, 0]), jax.jit(lambda table: braintrace.embedding(known, table))
    np.testing.assert_array_equal(look_up(jnp.eye(3)), np.eye(3)[[2, 0]])
    with pytest.raises(EtpShapeError, match='rows 0 to 1'):
        look_up(jnp.eye(2))
