"""Ops of factories against the hand-written ones, and against backpropagation through time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u

import braintrace
from braintrace import kit
from braintrace._etrace_op import ETP_PRIMITIVES, SparseStructure
from braintrace.errors import (
    EtpDtypeError,
    EtpShapeError,
    OptionError,
    RuleContractError,
)
from tests.compare import assert_close, assert_moves
from tests.precision import float64 as float64
from tests.tiers import first, in_turn

from .learning import leaky, online, squared, through_time

BATCH, INPUTS, UNITS, RANK, STEPS = 3, 4, 5, 2, 4
RNG = np.random.default_rng(1)
STRUCTURE = SparseStructure(
    *np.divmod(RNG.choice(INPUTS * UNITS, 9, replace=False), UNITS), (INPUTS, UNITS)
)


@functools.cache
def made():
    """Every op once: a name can be registered only once."""
    low_rank = {
        'fn': lambda x, b, a, scale: scale * (x @ b @ a),
        'trainable': {'b': 1, 'a': 2},
        'static': ('scale',),
    }
    linear, product = kit.make_linear_op, lambda x, w: x @ w
    return {
        'dense': linear('made_dense', product),
        'dense effective': linear('made_dense_e', product, trace='effective'),
        'dense position': linear('made_dense_p', product, trace='position'),
        'swapped': linear('made_swapped', lambda w, x: w @ x, x=1, trainable={'weight': 0}),
        'sparse': linear(
            'made_sparse',
            lambda x, w: jnp.zeros(UNITS, w.dtype).at[STRUCTURE.columns].add(x[STRUCTURE.rows] * w),
        ),
        'low rank': linear('made_low_rank', trace='effective', **low_rank),
        'low rank position': linear('made_low_rank_p', trace='position', **low_rank),
        'low rank refused': linear('made_low_rank_r', trace='parameter', **low_rank),
        'conv of one channel': linear(
            'made_conv_l', lambda x, w: jnp.convolve(x, w, 'valid'), trace='position'
        ),
        'not linear': linear('made_not_linear', lambda x, w: x**2 @ w, trace='effective'),
        'small not linear': linear(
            'made_small', lambda x, w: 1e-9 * (jax.nn.relu(x) @ w), trace='effective'
        ),
        'small and mixed': linear(
            'made_small_p', lambda x, w: 1e-12 * (x @ w @ jnp.ones((UNITS, UNITS)))
        ),
        'transposed': linear('made_transposed', lambda x, w: x @ w.T),
        'pair': linear('made_pair', lambda x, w: (x @ w, x)),
        'heads': kit.make_einsum_op('made_heads', 'bhi,hio->bho', bias=True),
        'gain': kit.make_elementwise_op('made_gain', lambda x, w: x * jnp.tanh(w)),
        'turned gain': kit.make_elementwise_op('made_turned', lambda x, w: x * jnp.roll(w, 1)),
        'summed gain': kit.make_elementwise_op('made_summed', lambda x, w: x * w.sum()),
        'conv': kit.make_conv_op('made_conv', 1),
        'derived': kit.new_etp_primitive(
            braintrace.ETPPrimitiveSpec(
                'made_sum', lambda x, w: jnp.cumsum(x * w, -1), batched=True
            )
        ),
        'derived alone': kit.new_etp_primitive(
            braintrace.ETPPrimitiveSpec(
                'made_derived_alone', lambda w: jnp.cumsum(w**2, -1), x_invar_index=None
            )
        ),
    }


def draw(*shape):
    return RNG.normal(size=shape)


W, BIAS, B, A = draw(INPUTS, UNITS), draw(UNITS), draw(INPUTS, RANK), draw(RANK, UNITS)
LOW_RANK = {'b': B, 'a': A}


def dense(name):
    """With a bias, beside the hand-written product."""
    return (
        lambda p, x: made()[name](x, p['w'], bias=p['c']),
        lambda p, x: braintrace.matmul(x, p['w'], p['c']),
        {'w': W, 'c': BIAS},
        (BATCH, INPUTS),
    )


# name -> (op of a factory, the same by hand, parameters, shape of x)
PAIRS = {
    'dense': dense('dense'),
    'dense, one sample': (*dense('dense')[:3], (INPUTS,)),
    'dense effective': dense('dense effective'),
    'dense position': dense('dense position'),
    'mapped': (
        lambda p, x: jax.vmap(lambda row: made()['dense'](row, p['w'], bias=p['c']))(x),
        *dense('dense')[1:],
    ),
    'swapped': (
        lambda p, x: made()['swapped'](p['w'], x),
        lambda p, x: braintrace.matmul(x, p['w'].T),
        {'w': W.T},
        (BATCH, INPUTS),
    ),
    'sparse': (
        lambda p, x: made()['sparse'](x, p['w']),
        lambda p, x: braintrace.sparse_matmul(x, p['w'], sparse_mat=STRUCTURE),
        {'w': draw(9)},
        (BATCH, INPUTS),
    ),
    'low rank': (
        lambda p, x: made()['low rank'](x, p['b'], p['a'], bias=p['c'], scale=1.5),
        lambda p, x: braintrace.lora_matmul(x, p['b'], p['a'], alpha=1.5, bias=p['c']),
        LOW_RANK | {'c': BIAS},
        (BATCH, INPUTS),
    ),
    'low rank position': (
        lambda p, x: made()['low rank position'](x, p['b'], p['a'], scale=1.5),
        lambda p, x: braintrace.lora_matmul(x, p['b'], p['a'], alpha=1.5),
        LOW_RANK,
        (BATCH, INPUTS),
    ),
    'conv of one channel': (
        lambda p, x: made()['conv of one channel'](x, p['w']),
        lambda p, x: braintrace.conv(x[:, None], p['w'][None, None, ::-1], padding='VALID')[:, 0],
        {'w': draw(3)},
        (BATCH, 7),
    ),
    'heads': (
        lambda p, x: made()['heads'](x, p['w'], p['c']),
        lambda p, x: braintrace.grouped_matmul(x, p['w'], p['c']),
        {'w': draw(2, INPUTS, UNITS), 'c': draw(2, UNITS)},
        (BATCH, 2, INPUTS),
    ),
    'gain': (
        lambda p, x: made()['gain'](x, p['w']),
        lambda p, x: x * braintrace.element_wise(p['w'], jnp.tanh),
        {'w': BIAS},
        (BATCH, UNITS),
    ),
    'conv': (
        lambda p, x: made()['conv'](x, p['w'], p['c'], padding='VALID'),
        lambda p, x: braintrace.conv(x, p['w'], p['c'], padding='VALID'),
        {'w': draw(2, 3, 2), 'c': draw(2)},
        (BATCH, 3, 5),
    ),
}
PLAIN = {
    'derived': (
        lambda p, x: made()['derived'](x, p['w']),
        lambda p, x: jnp.cumsum(x * p['w'], -1),
        {'w': BIAS},
        (BATCH, UNITS),
    ),
    'derived alone': (
        lambda p, x: x + made()['derived alone'](p['w']),
        lambda p, x: x + jnp.cumsum(p['w'] ** 2),
        {'w': BIAS},
        (BATCH, UNITS),
    ),
}


def drawn(name):
    """The cells of a pair, and their data: parameters, the first state and inputs."""
    op, other, params, shape = (PAIRS | PLAIN)[name]
    params, xs = jax.tree.map(
        jnp.asarray, (params, np.random.default_rng(7).normal(size=(STEPS, *shape)))
    )
    h = jnp.zeros(jax.eval_shape(other, params, xs[0]).shape)
    return leaky(op), leaky(other), (params, h, xs)


@pytest.mark.tier(quick=0)
@in_turn(first('dense', 'derived', 'gain'), name=PAIRS | PLAIN, window=['steps', 3])
def test_d_rtrl_has_the_gradient_of_backpropagation_through_time(name, window):
    cell, other, data = drawn(name)
    assert_close(online(cell, *data, window=window), through_time(other, *data))


@pytest.mark.tier(quick=0)
@in_turn(first('dense'), name=[name for name in PAIRS if name != 'gain'])
def test_es_d_rtrl_has_the_gradient_of_the_hand_written_op(name):
    cell, by_hand, data = drawn(name)
    rule = braintrace.rules.es_d_rtrl(0.6)
    got = online(cell, *data, rule, 3)
    assert_close(got, online(by_hand, *data, rule, 3))
    assert_moves(got)


@pytest.mark.parametrize(
    ('name', 'shape'),
    [
        ('dense', (BATCH, INPUTS, UNITS)),
        ('sparse', (BATCH, 9)),
        ('dense effective', (BATCH, INPUTS, UNITS)),
        ('dense position', (BATCH, UNITS, INPUTS * UNITS)),
    ],
)
def test_a_parameter_trace_keeps_the_parameters_shape_and_no_more(name, shape):
    cell = leaky(lambda p, x: made()[name](x, p))
    w = jnp.asarray(draw(9) if name == 'sparse' else W)
    learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl())
    state = learner.init(w, jnp.zeros((BATCH, UNITS)), draw(BATCH, INPUTS))
    assert {leaf.shape for leaf in jax.tree.leaves(state.trace)} == {shape}


@pytest.mark.slow
def test_an_effective_trace_is_held_once_in_the_widest_dtype():
    cell = leaky(lambda p, x: made()['low rank'](x, p['b'], p['a'], scale=0.7), 0.5)
    params = {'b': jnp.asarray(B), 'a': jnp.asarray(A, jnp.float32)}
    h, xs = jnp.zeros((BATCH, UNITS)), jnp.asarray(draw(STEPS, BATCH, INPUTS))
    learner = braintrace.functional.online(cell, braintrace.rules.d_rtrl())
    trace = learner.init(params, h, xs[0]).trace
    assert sorted((leaf.size, leaf.dtype.name) for leaf in jax.tree.leaves(trace)) == [
        (0, 'float64'),
        (60, 'float64'),
    ]
    got = online(cell, params, h, xs, window=2, loss=squared)
    want = through_time(cell, params, h, xs, squared)
    assert {k: g.dtype for k, g in got.items()} == {k: w.dtype for k, w in params.items()}
    np.testing.assert_allclose(got['b'], want['b'], rtol=1e-10)
    np.testing.assert_allclose(got['a'], want['a'], rtol=1e-5)


def spec(**fields):
    return kit.new_etp_primitive(
        braintrace.ETPPrimitiveSpec('made_bad', lambda x, w: x @ w, **fields)
    )


def linear(**options):
    return kit.make_linear_op('made_bad', lambda x, w: x @ w, **options)


# error -> what it says of which call
REFUSED = {
    RuleContractError: {
        r"made_low_rank_r: entry \[.*\] of 'b' feeds several elements of y.*trace='effective'": (
            lambda: made()['low rank refused'](draw(INPUTS), B, A, scale=1.0)
        ),
        'made_not_linear: fn is not linear in x': lambda: made()['not linear'](draw(INPUTS), W),
        'made_small: fn is not linear in x': (
            lambda: made()['small not linear'](np.ones(INPUTS), np.ones((INPUTS, UNITS)))
        ),
        'made_small_p: .* feeds several elements of y': (
            lambda: made()['small and mixed'](np.ones(INPUTS), np.ones((INPUTS, UNITS)))
        ),
        'made_pair: fn returned a tuple, expected one array': (
            lambda: made()['pair'](draw(BATCH, INPUTS), W)
        ),
        "'made_dense' is registered already": lambda: kit.make_linear_op(
            'made_dense', lambda x, w: x @ w
        ),
        'made_turned: fn moves elements of the weight to other places': (
            lambda: made()['turned gain'](draw(2, 3), draw(3))
        ),
        "made_summed: entry .* of 'weight' feeds several elements": (
            lambda: made()['summed gain'](draw(2, 3), draw(3))
        ),
        "'made_bad': static is 'scale', expected a list": lambda: spec(static='scale'),
        "'made_bad': cases is 3, expected a list": lambda: spec(cases=3),
        "check of 'made_bad' is a int": lambda: spec(check=3),
        'expected an ETPPrimitiveSpec': lambda: kit.new_etp_primitive('made_bad'),
        "'made_bad' has solve_drtrl of a layout of its own": (
            lambda: spec(solve_drtrl=lambda: None)
        ),
    },
    OptionError: {
        'made_dense: 1 operands given, expected 2 by position: x, weight': (
            lambda: made()['dense'](draw(INPUTS))
        ),
        'made_swapped: 1 operands given, expected 2 by position: weight, x': (
            lambda: made()['swapped'](W)
        ),
        r"static parameters \[\] given, expected \['scale'\]": (
            lambda: made()['low rank'](draw(INPUTS), B, A)
        ),
        'a bias is expected': lambda: made()['heads'](draw(2, 2, INPUTS), draw(2, INPUTS, UNITS)),
        "trace is 'dense'; choose one of": lambda: linear(trace='dense'),
        'not the positions 0 to 1': lambda: linear(trainable={'w': 2}),
        "static='scale'.*a tuple of names": lambda: linear(static='scale'),
        r"trainable=\['w'\]": lambda: linear(trainable=['w']),
        'rank=-1': lambda: linear(rank=-1),
        "the equation is 'bi,io'": lambda: kit.make_einsum_op('made_bad', 'bi,io'),
        "a letter twice in 'bii'": lambda: kit.make_einsum_op('made_bad', 'bii,io->bo'),
        r"\['z'\] in y that no operand has": lambda: kit.make_einsum_op('made_bad', 'bi,io->bz'),
        'dims is 0': lambda: kit.make_conv_op('made_bad', 0),
        'no option stride; those of a convolution are strides, ': (
            lambda: made()['conv'](draw(2, 3, 5), draw(2, 3, 2), stride=2)
        ),
    },
    EtpShapeError: {
        r'made_dense: its function does not take operands float64\[5\], ': (
            lambda: made()['dense'](draw(INPUTS + 1), W)
        ),
        r'made_transposed: its function does not take operands float64\[4\], float64\[4, 5\]: ': (
            lambda: made()['transposed'](draw(BATCH, INPUTS), W)
        ),
        r'made_sum: its function does not take operands float64\[2, 3\], ': (
            lambda: made()['derived'](draw(2, 3), draw(4))
        ),
        'made_sum: its function does not take operands': (
            lambda: made()['derived'](draw(2, 3) * u.mV, draw(4))
        ),
        'made_sum: its function does not take operands .*missing 1 required': (
            lambda: made()['derived'](draw(2, 3))
        ),
        'made_dense: x has shape .* of rank 3': lambda: made()['dense'](draw(2, 3, INPUTS), W),
        r'made_dense: bias has shape \(2,\), expected \(5,\)': (
            lambda: made()['dense'](draw(INPUTS), W, bias=draw(2))
        ),
        "axis 'h'": lambda: made()['heads'](
            draw(2, 3, INPUTS), draw(2, INPUTS, UNITS), draw(2, UNITS)
        ),
        'one sample of x has the shape of the weight': lambda: made()['gain'](draw(2, 3), BIAS),
        'made_conv: kernel has shape': lambda: made()['conv'](draw(2, 3, 5, 5), draw(2, 3, 2, 2)),
    },
    EtpDtypeError: {
        'made_dense: weight has dtype int64': (
            lambda: made()['dense'](draw(INPUTS), W.astype(int))
        ),
        "static parameter 'scale' is a list, which has no hash": (
            lambda: made()['low rank'](draw(INPUTS), B, A, scale=[1.0])
        ),
        "static parameter 'scale' is a ndarray, which has no hash": (
            lambda: made()['low rank'](draw(INPUTS), B, A, scale=np.ones(2))
        ),
    },
}


@pytest.mark.tier(quick=25)
@pytest.mark.parametrize(
    ('error', 'found'), [(error, found) for error, calls in REFUSED.items() for found in calls]
)
def test_what_does_not_fit_is_refused(error, found):
    made()
    with pytest.raises(error, match=found):
        REFUSED[error][found]()
    assert 'made_bad' not in {p.name for p in ETP_PRIMITIVES}


@pytest.mark.slow
@pytest.mark.parametrize(
    'fn',
    [
        lambda x, w: x @ jnp.minimum(w, 0),
        lambda x, w: x @ jnp.clip(w, -0.3, 0.3),
        lambda x, w: 1e-9 * (x @ w),
    ],
    ids=['one sign', 'bounded', 'small'],
)
def test_places_are_found_where_the_weights_are_flat_or_small(registries_are_restored, fn):
    op = kit.make_linear_op('made_places', fn)
    h = jnp.zeros((BATCH, UNITS))
    xs = jnp.asarray(draw(STEPS, BATCH, INPUTS))
    data = {'w': jnp.asarray(W)}, h, xs
    got = online(leaky(lambda p, x: op(x, p['w'])), *data, window=2)
    assert_close(got, through_time(leaky(lambda p, x: fn(x, p['w'])), *data))


@pytest.mark.slow
def test_operands_may_be_complex(registries_are_restored):
    shapes = [jax.ShapeDtypeStruct(shape, complex) for shape in ((2, 3), (3, 4))]
    kit.assert_conformant(linear(cases=[(shapes, {})]))


@pytest.mark.slow
@pytest.mark.parametrize('conjugated, imaginary', [(False, 1j), (False, 0), (True, 1j)])
def test_a_complex_result(registries_are_restored, conjugated, imaginary):
    """Of real and of complex weights, also by an op that has no complex derivative."""

    def product(x, w):
        return x @ jnp.conj(w) if conjugated else x @ w

    def cell(op):
        def step(w, h, x):
            h = (0.8 + 0.1j) * h + op(x + 1j * x**2, w)
            return h.real + h.imag, h

        return step

    op = kit.make_linear_op('made_conjugated', product) if conjugated else braintrace.matmul
    h, xs, w = jnp.zeros((BATCH, UNITS), complex), draw(STEPS, BATCH, INPUTS), jnp.asarray(W)
    data = w + imaginary * w**2 if imaginary else w, h, jnp.asarray(xs)
    want = through_time(cell(product), *data, squared)
    for window in (2, 'steps'):
        assert_close(online(cell(op), *data, window=window, loss=squared), want)


@pytest.mark.parametrize(
    ('taken', 'make'),
    [
        ('made_half_sample', lambda: kit.make_linear_op('made_half', lambda x, w: x @ w)),
        ('made_half_sample', lambda: kit.make_elementwise_op('made_half', lambda x, w: x * w)),
        ('made_half_mv', lambda: kit.make_einsum_op('made_half', 'i,io->o')),
        (None, lambda: kit.make_linear_op('made_half', 3)),
        (None, lambda: kit.make_elementwise_op('made_half', 3)),
    ],
    ids=['linear', 'elementwise', 'einsum', 'no fn', 'no fn 2'],
)
def test_of_an_op_that_is_refused_nothing_is_registered(registries_are_restored, taken, make):
    if taken:
        braintrace.register_primitive(taken, lambda x, w: x * w)
    before = set(ETP_PRIMITIVES)
    found = 'registered already' if taken else "fn of 'made_half' is a int"
    with pytest.raises(RuleContractError, match=found):
        make()
    assert before == ETP_PRIMITIVES
