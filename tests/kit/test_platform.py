"""Lowerings and trace kernels by platform: a Pallas kernel for the trace, run by its interpreter on
a CPU.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import braintrace
from braintrace.errors import RuleContractError
from braintrace.kit import make_linear_op
from tests.compare import assert_close
from tests.precision import float64 as float64

from .learning import online

INTERPRETED = jax.default_backend() == 'cpu'
RNG = np.random.default_rng(2)
B, I, N, T = 3, 4, 5, 6


def fused(d, e, d_f, x):
    """``d e + d_f (x) x`` for each sample, in one pass over the trace."""

    def kernel(d_ref, e_ref, f_ref, x_ref, out_ref):
        out_ref[...] = (
            d_ref[...][:, None] * e_ref[...] + x_ref[...][:, :, None] * f_ref[...][:, None]
        )

    lanes, rows, columns = e.shape
    spec = lambda *block: pl.BlockSpec((1, *block), lambda b: (b, *[0] * len(block)))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(e.shape, e.dtype),
        grid=(lanes,),
        in_specs=[spec(columns), spec(rows, columns), spec(columns), spec(rows)],
        out_specs=spec(rows, columns),
        input_output_aliases={1: 0},
        interpret=INTERPRETED,
    )(d, e, d_f, x)


calls = []


def trace_kernel(d, trace, d_f, x, weights, *, places, has_bias):
    calls.append(trace['weight'].shape)
    new = {'weight': fused(d[..., 0, 0], trace['weight'][..., 0], d_f[..., 0], x)[..., None]}
    return new | ({'bias': d[..., 0] * trace['bias'] + d_f} if has_bias else {})


@functools.cache
def ops():
    """Named alike: the default, one with a kernel for the trace, one with a lowering that counts,
    one whose lowering is wrong.
    """
    plain, kernel, lowered, wrong = (
        make_linear_op(f't_platform_{k}', lambda x, w: x @ w) for k in range(4)
    )
    for platform in ('cpu', 'cuda'):
        kernel.trace_kernel[platform] = trace_kernel
        lowered.lowering[platform] = lambda x, w, *bias, places, has_bias: (
            jnp.einsum('bi,io->bo', x, w) + (bias[0] if has_bias else 0)
        )
        wrong.lowering[platform] = lambda x, w, *bias, places, has_bias: (x @ w)[:, :2]
    return {'plain': plain, 'kernel': kernel, 'lowered': lowered, 'wrong': wrong}


def learn(op, window, **options):
    rng = np.random.default_rng(3)
    params = {'w': rng.normal(size=(I + N, N)) / 3, 'b': rng.normal(size=N)}
    params, xs = jax.tree.map(jnp.asarray, (params, rng.normal(size=(T, B, I))))

    def cell(p, h, x):
        h = jnp.tanh(0.7 * h + op(jnp.concatenate([x, h], -1), p['w'], bias=p['b']))
        return h, h

    rule = braintrace.rules.d_rtrl(**options)
    return online(cell, params, jnp.zeros((B, N)), xs, rule, window)


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('window', ['steps', 1, 4])
def test_a_trace_kernel_gives_the_gradients_of_the_default(window):
    del calls[:]
    assert_close(learn(ops()['kernel'], window), learn(ops()['plain'], window))
    assert (set(calls) == {(B, I + N, N, 1)}) == (window in ('steps', 1))


@pytest.mark.slow
def test_a_trace_of_another_dtype_passes_through_the_kernel():
    narrow = lambda name: learn(ops()[name], 'steps', trace_dtype=jnp.float32)
    got = narrow('kernel')
    assert_close(got, narrow('plain'))
    with pytest.raises(AssertionError, match='the numbers differ'):  # rounded between the steps
        assert_close(got, learn(ops()['kernel'], 'steps'))


@pytest.mark.parametrize('run', [lambda f: f, jax.jit], ids=['eager', 'jit'])
def test_a_lowering_takes_the_place_of_the_implementation(run):
    x, w, b = (jnp.asarray(RNG.normal(size=s)) for s in ((B, I), (I, N), (N,)))
    op = ops()['lowered']
    assert_close(run(lambda x, w, b: op(x, w, bias=b))(x, w, b), x @ w + b)
    assert_close(run(jax.vmap(op))(x[None], w[None])[0], x @ w)
    mapped = jax.jit(jax.vmap(op, in_axes=(0, None))).lower(x[None], w)
    assert 'dot_general' in mapped.as_text()
    got, want = (jax.grad(lambda w, f=f: f(x, w).sum())(w) for f in (run(op), jnp.matmul))
    assert_close(got, want)


@pytest.mark.parametrize('run', [lambda f: f, jax.jit], ids=['eager', 'jit'])
def test_a_lowering_of_another_shape_is_refused(run):
    x, w = jnp.ones((B, I)), jnp.ones((I, N))
    said = r"the lowering of 't_platform_3' on 'cpu' returned .*\(3, 2\).*its implementation"
    with pytest.raises(RuleContractError, match=said):
        run(lambda x, w: ops()['wrong'](x, w))(x, w)


RETURNED = {
    'shape': lambda e: {'weight': e[..., 0]},
    'keys': lambda e: {'weight': e, 'more': e},
    'bare': lambda e: e,
    'nothing': lambda e: None,
}


@pytest.mark.parametrize('what', RETURNED)
def test_a_kernel_that_returns_another_trace_is_refused(registries_are_restored, what):
    op = make_linear_op('t_platform_wrong', lambda x, w: x @ w)
    op.trace_kernel['cpu'] = lambda d, trace, *more, **params: RETURNED[what](trace['weight'])
    said = 'a trace kernel of t_platform_wrong must return a trace like the one given'
    with pytest.raises(RuleContractError, match=said):
        learn(op, 'steps')


@pytest.mark.parametrize(
    ('table', 'platform', 'fn', 'found'),
    [
        ('lowering', 'metal', len, "no platform 'metal'; choose one of cpu, cuda, rocm, tpu, or"),
        ('trace_kernel', 'cpu', 3, 'is a int, expected a function'),
    ],
)
def test_a_table_refuses_what_it_does_not_know(table, platform, fn, found):
    known = getattr(ops()['plain'], table)
    for call in (
        lambda: known.__setitem__(platform, fn),
        lambda: known.update({platform: fn}),
        lambda: known.setdefault(platform, fn),
    ):
        with pytest.raises(RuleContractError, match=found):
            call()


def test_an_op_prints_its_platforms():
    assert 'trace kernel on cpu, cuda' in repr(ops()['kernel'])
    assert 'lowering on cpu, cuda' in repr(ops()['lowered'])


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('run', [lambda f: f, jax.jit], ids=['eager', 'jit'])
def test_a_lowering_counts_from_when_it_is_given(run, registries_are_restored):
    op = make_linear_op('t_platform_late', lambda x, w: x @ w)
    x, w = jnp.ones((B, I)), jnp.ones((I, N))
    call = run(lambda x, w: op(x, w))
    np.testing.assert_array_equal(call(x, w), x @ w)
    op.lowering['cpu'] = lambda x, w, *, places, has_bias: 100 * (x @ w)
    np.testing.assert_array_equal(call(x, w), 100 * (x @ w))


def test_gpu_stands_for_both_of_its_kinds(registries_are_restored):
    op = make_linear_op('t_platform_gpu', lambda x, w: x @ w)
    op.lowering['gpu'] = op.trace_kernel['gpu'] = len
    assert list(op.lowering) == list(op.trace_kernel) == ['cuda', 'rocm']
