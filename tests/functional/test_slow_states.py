"""Traces of states that forget slowly, where products or traces have 16 bits.

A number that decays by less than its last digit stands still when it is rounded to the nearest. The
oracle is backpropagation through time in float32, and for rules that estimate, their own gradient.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

import braintrace
from braintrace import functional, rules
from tests import oracles
from tests.tiers import first, pairwise

B, I, N, T = 2, 3, 4, 1000  # noqa: E741
F32, BF16, F16 = jnp.float32, jnp.bfloat16, jnp.float16
KEYS = jax.random.split(jax.random.key(0), 6)
XS = jax.random.uniform(KEYS[0], (T, B, I))
PARAMS = {
    'w': 0.5 * jax.random.normal(KEYS[1], (I, N)),
    'b': 0.1 * jax.random.normal(KEYS[2], (N,)),
    'gain': jax.random.normal(KEYS[3], (N,)),
    'table': 0.5 * jax.random.normal(KEYS[4], (2, N)),
}
START, MASK = jnp.zeros((B, N)), jnp.float32(jnp.arange(T) == T - 1)
RULES = {
    'd_rtrl': rules.d_rtrl(),
    'rtrl': rules.rtrl(),
    'snap': rules.snap(2),
    'es_d_rtrl': rules.es_d_rtrl(0.999),
    'uoro': rules.uoro(),
    'signs': rules.signs(),
}


def cell(keep, compute, params, h, x):
    """Rates that leak; products are made in ``compute``, states and weights are float32."""
    p, x = jax.tree.map(lambda a: a.astype(compute), (params, x))
    y = braintrace.matmul(x, p['w'], p['b'])
    y += braintrace.element_wise(p['gain']) * jnp.cos(x[:, :1])
    y += braintrace.embedding((x[:, 1] > 0.5).astype(int), p['table'])
    h = keep * h + (1 - keep) * jnp.tanh(y.astype(F32))
    return h, h


def loss(h, _):
    return jnp.mean((h - 1) ** 2)


@functools.cache
def last(keep, compute, rule, window, inside='trace'):
    """The gradient of the last step's loss, and the dtypes of the trace."""
    learner = functional.online(functools.partial(cell, keep, compute), rule)
    state = learner.init(PARAMS, START, XS[0])
    gradient = learner.sequence_grad(loss, window=window, reduction='sum', inside=inside)
    dtypes = {
        e.dtype for e in jax.tree.leaves(state.trace) if jnp.issubdtype(e.dtype, jnp.floating)
    }
    return jax.jit(gradient)(PARAMS, state, XS, XS, MASK).grads, dtypes, learner.report


@functools.cache
def by_time(keep):
    return oracles.by_time(functools.partial(cell, keep, F32), PARAMS, START, XS, XS, loss, MASK)


def off(got, want):
    norm = jnp.linalg.norm
    return {name: float(norm(got[name] - g) / norm(g)) for name, g in want.items()}


@pairwise(first('d_rtrl', 1), rule=RULES, window=[1, None], keep=[0.999, 0.9999])
def test_products_in_bfloat16_leave_a_trace_in_float32(rule, window, keep):
    """Without history the gradient is off by 99 %, with a trace in bfloat16 by more than 40 %."""
    got, dtypes, report = last(keep, BF16, RULES[rule], window)
    assert dtypes == {jnp.dtype(F32)}
    assert report.exact == (rule in ('d_rtrl', 'rtrl', 'snap'))
    want = by_time(keep) if report.exact else last(keep, F32, RULES[rule], window)[0]
    # random signs and their scales take up the rounding of each step
    most = 0.05 if rule in ('uoro', 'signs') else 0.012
    assert max(off(got, want).values()) < most, off(got, want)


@pytest.mark.slow
def test_an_exact_window_reads_and_writes_the_same_trace():
    got, *_ = last(0.999, BF16, RULES['d_rtrl'], 5, 'exact')
    assert max(off(got, by_time(0.999)).values()) < 0.005


@pytest.mark.slow
def test_the_filter_of_a_readout_keeps_its_rate_where_the_readout_reads_bfloat16():
    """Rounded to bfloat16, 0.995 would be 0.996, and remember a quarter longer."""

    def layers(params, carry, x):
        h, o = carry
        h = 0.9 * h + 0.1 * jnp.tanh(braintrace.matmul(x, params['w']))
        read = braintrace.matmul(h.astype(BF16), params['table'].T.astype(BF16))
        o = 0.995 * o + 0.005 * read.astype(F32)
        return o, (h, o)

    start, params = (START, jnp.zeros((B, 2))), {name: PARAMS[name] for name in ('w', 'table')}
    want = oracles.by_time(layers, params, start, XS, XS, loss, MASK)
    learner = functional.online(layers, rules.d_rtrl().filtered(0.995))
    gradient = jax.jit(learner.sequence_grad(loss, window=7, reduction='sum'))
    got = gradient(params, learner.init(params, start, XS[0]), XS, XS, MASK).grads
    assert max(off(got, want).values()) < 0.01


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize(('dtype', 'most'), [(BF16, 0.06), (F16, 0.02)], ids=['bf16', 'f16'])
def test_a_trace_of_sixteen_bits_is_right_on_average_and_the_report_says_how_far_off(dtype, most):
    rule = rules.d_rtrl(trace_dtype=dtype)
    got, _, report = last(0.999, F32, rule, 1)
    want = by_time(0.999)
    assert max(off(got, want).values()) < most
    along = {name: float(jnp.vdot(got[name], g) / jnp.vdot(g, g)) for name, g in want.items()}
    assert all(abs(a - 1) < most / 3 for a in along.values()), along
    assert not report.exact and f'by {most:.0%}'.replace('%', ' %') in str(report)
    assert all(row.history == 'whole' for row in report.parameters)
