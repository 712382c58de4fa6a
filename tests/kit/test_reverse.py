"""Alternative reverse rules: both forms under every transformation, the required masks, and what is
refused.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import braintrace
from braintrace import ETPPrimitiveSpec
from braintrace._etrace_op import new_etp_primitive, rule_reverse, whole_impl
from braintrace.errors import RuleContractError
from tests.compare import assert_close

from .learning import leaky, online

RNG = np.random.default_rng(4)
B, I, R, N, T = 2, 3, 2, 4, 3
seen = []


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield
    del seen[:]


def low_rank(x, b, a, *, scale):
    return scale * (x @ b @ a)


def cotangents(x, b, a, kept, d, required):
    """Those that are required, and None for the others; ``kept`` is ``x @ b``."""
    seen.append(required)
    return [
        (d @ a.T) @ b.T if required[0] else None,
        x.T @ (d @ a.T) if required[1] else None,
        kept.T @ d if required[2] else None,
    ]


def backward(inputs, outputs, grads, params, required):
    assert outputs.shape == grads.shape
    x, b, _ = inputs
    return cotangents(*inputs, x @ b, params['scale'] * grads, required)


def forward(inputs, params):
    """Keeps ``x @ b``; the closure takes what the plain form takes."""
    (x, b, a), scale = inputs, params['scale']
    kept = x @ b

    def pull(inputs, outputs, grads, params, required):
        assert outputs.shape == grads.shape and params == {'scale': scale}
        return cotangents(x, b, a, kept, scale * grads, required)

    return scale * (kept @ a), pull


INVARS = {'b': 1, 'a': 2}


@functools.cache
def ops():
    spec = functools.partial(
        ETPPrimitiveSpec,
        impl=low_rank,
        trainable_invars_fn=lambda params: INVARS,
        batched=True,
        static=('scale',),
    )
    return {
        'default': new_etp_primitive(spec('t_reverse_0')),
        'backward': new_etp_primitive(spec('t_reverse_1', reverse=rule_reverse(backward))),
        'forward': new_etp_primitive(spec('t_reverse_2', reverse=rule_reverse(forward=forward))),
    }


def arguments():
    return [
        jnp.asarray(np.random.default_rng(6).normal(size=shape))
        for shape in ((B, I), (I, R), (R, N))
    ]


def sharded(op, x, b, a):
    mesh = jax.make_mesh((1,), ('i',), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(op, mesh=mesh, in_specs=(P('i'), P(), P()), out_specs=P('i'))(x, b, a)


both = lambda a: jnp.stack([a, 2 * a])
USES = {
    'plain': lambda op, x, b, a: op(x, b, a),
    'jit': lambda op, x, b, a: jax.jit(op)(x, b, a),
    'vmap over x': lambda op, x, b, a: jax.vmap(lambda x: op(x, b, a))(both(x)),
    'vmap over weights': lambda op, x, b, a: jax.vmap(lambda b, a: op(x, b, a))(both(b), both(a)),
    'checkpoint': lambda op, x, b, a: jax.checkpoint(op)(x, b, a),
    'scan': lambda op, x, b, a: jax.lax.scan(lambda _, x: (_, op(x, b, a)), None, both(x))[1],
    'shard_map': sharded,
}


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('use', USES)
@pytest.mark.parametrize('form', ['backward', 'forward'])
def test_the_gradients_are_those_of_the_implementation(form, use):
    def gradient(op):
        loss = lambda *args: jnp.sum(USES[use](functools.partial(op, scale=1.5), *args) ** 2)
        return jax.grad(loss, (0, 1, 2))(*arguments())

    assert_close(gradient(ops()[form]), gradient(ops()['default']))
    assert seen


@pytest.mark.parametrize('form', ['backward', 'forward'])
@pytest.mark.parametrize('wanted', [(0,), (1,), (2,), (0, 2)])
def test_only_what_is_required_is_asked_for(form, wanted):
    args = arguments()
    loss = lambda *args: jnp.sum(ops()[form](*args, scale=2.0) ** 2)
    got = jax.grad(loss, wanted)(*args)
    want = jax.grad(lambda *args: jnp.sum(low_rank(*args, scale=2.0) ** 2), wanted)(*args)
    assert_close(got, want)
    assert set(seen) == {tuple(i in wanted for i in range(3))}


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize(
    'rule',
    [braintrace.rules.d_rtrl(), braintrace.rules.es_d_rtrl(0.5)],
    ids=['d_rtrl', 'es_d_rtrl'],
)
@pytest.mark.parametrize('form', ['backward', 'forward'])
def test_it_learns_online_as_with_the_derived_rule(form, rule):
    xs, (_, b, a) = jnp.asarray(RNG.normal(size=(T, B, I))), arguments()
    data = {'b': b, 'a': a}, jnp.zeros((B, N)), xs, rule, 2

    def learned(op):
        return online(leaky(lambda p, x: op(x, p['b'], p['a'], scale=1.5)), *data)

    assert_close(learned(ops()[form]), learned(ops()['default']), 1e-11)
    assert seen


def test_forward_mode_raises():
    args = arguments()
    with pytest.raises(TypeError, match='forward-mode'):
        jax.jvp(lambda b: ops()['backward'](args[0], b, args[2], scale=1.0), args[1:2], args[1:2])


def gradient_by(**reverse):
    spec = ETPPrimitiveSpec(
        't_reverse_bad', low_rank, trainable_invars_fn=lambda params: INVARS, batched=True
    )
    impl = whole_impl(dataclasses.replace(spec, reverse=rule_reverse(**reverse)))
    return jax.grad(lambda *args: jnp.sum(impl(*args, scale=1.0)), (0, 1, 2))(*arguments())


@pytest.mark.parametrize(
    ('returned', 'found'),
    [
        (lambda inputs, grads: [None] * 3, 'None for input 0, whose cotangent is required'),
        (lambda inputs, grads: inputs[:2], '2 cotangents; expected a list of 3'),
        (lambda inputs, grads: grads, 'a .*; expected a list of 3'),
        (lambda inputs, grads: inputs[::-1], r'shape \(2, 4\) for input 0 of shape \(2, 3\)'),
    ],
)
def test_a_rule_that_breaks_its_contract_is_named(returned, found):
    backward = lambda inputs, outputs, grads, params, required: returned(inputs, grads)
    with pytest.raises(RuleContractError, match=f"rule of 't_reverse_bad' returned {found}"):
        gradient_by(backward=backward)


def test_a_forward_pass_with_another_value_is_named():
    found = r"rule of 't_reverse_bad' returned \[\(\(2, 3\), 'float64'\)\], its implementation"
    with pytest.raises(RuleContractError, match=found):
        gradient_by(forward=lambda inputs, params: (inputs[0], None))


@pytest.mark.parametrize(
    'call', [lambda: rule_reverse(), lambda: rule_reverse(backward, forward=forward)]
)
def test_exactly_one_form_is_given(call):
    with pytest.raises(ValueError, match='rule_reverse takes exactly one of backward and forward'):
        call()
