"""Every JAX transformation of a bound primitive equals that of its implementation, and leaves the
primitive in sight.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import _etrace_op as ops
from tests.compare import assert_close

from . import cases
from .cases import FILLED, etp_primitives, primitives_in

# Other cases take the same paths through JAX as these.
SAME_PATHS = {'mm', 'mm batch of one', 'mv', 'elemwise scalar', 'lora_mm', 'lora_mv', 'sp_mv'}
SAME_PATHS |= {'conv 1-D', 'conv 1-D batch of one', 'conv 3-D', 'conv 2-D depthwise'}
SAME_PATHS |= {'sp_mm with repeated entries'}

every_case = pytest.mark.parametrize('case', FILLED, ids=str)
with_x = pytest.mark.parametrize('case', [case for case in FILLED if case.x is not None], ids=str)


def loss(call, x, weights):
    return jnp.sum(jnp.sin(call(x, weights)))


def transformed(case, call, args, many, tangents):
    """The results of every transformation of ``call(x, weights)``; ``many`` are arguments with an
    axis of three in front.
    """
    of_weights = lambda w: call(args[0], w)
    gradient = jax.grad(functools.partial(loss, call), argnums=1)
    last = jax.tree.map(lambda a: jnp.moveaxis(a, 0, -1), many)
    twice = jax.vmap(jax.vmap(call, (None, 0)), (None, 1))
    more = jax.tree.map(lambda w: jnp.stack([w, 2 * w], 1), many[1])
    found = {
        'call': call(*args),
        'jit': jax.jit(call)(*args),
        'grad': gradient(*args),
        'jvp': jax.jvp(of_weights, args[1:], tangents[1:]),
        'vjp': jax.vjp(of_weights, args[1])[1](call(*args)),
        'forward over reverse': jax.jvp(lambda w: gradient(args[0], w), args[1:], tangents[1:]),
        'remat': jax.grad(jax.checkpoint(functools.partial(loss, call)), argnums=1)(*args),
        'vmap over weights': jax.vmap(call, (None, 0))(args[0], many[1]),
        'vmap over everything': jax.vmap(call)(*many),
        'vmap over the last axis': jax.vmap(call, in_axes=-1, out_axes=-1)(*last),
        'vmap of vmap': twice(args[0], more),
        'vmap of grad': jax.vmap(gradient)(*many),
        'grad of vmap': jax.grad(lambda w: jnp.sum(jnp.sin(jax.vmap(call)(many[0], w))))(many[1]),
        'scan': jax.lax.scan(lambda c, a: (c, call(*a)), None, many)[1],
    }
    return found if case.x is None else found | through_x(call, args, many, tangents)


def through_x(call, args, many, tangents):
    (x, weights), of_x, over_x = args, lambda x: call(x, args[1]), jax.vmap(call, (0, None))
    gradient = jax.grad(functools.partial(loss, call))
    bias_free = {n: jnp.zeros_like(w) if n == 'bias' else w for n, w in weights.items()}
    linear = lambda x: call(x, bias_free) - call(jnp.zeros_like(x), bias_free)
    return {
        'grad of x': gradient(x, weights),
        'jvp of both': jax.jvp(call, args, tangents),
        'linear transpose': jax.linear_transpose(linear, x)(call(*args)),
        'vmap over x': jax.vmap(of_x)(many[0]),
        'vmap over the last axis of x': jax.vmap(of_x, -1, -1)(jnp.moveaxis(many[0], 0, -1)),
        'vmap of vmap over x': jax.vmap(jax.vmap(of_x), 1)(jnp.stack([many[0], 2 * many[0]], 1)),
        'grad of vmap over x': jax.grad(functools.partial(loss, over_x), 1)(many[0], weights),
        'vmap over x of grad': jax.vmap(gradient, (0, None))(many[0], weights),
    }


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('case', [case for case in FILLED if case.name not in SAME_PATHS], ids=str)
def test_every_transformation_of_the_primitive_is_that_of_the_implementation(case):
    args, tangents = case.draw(0), case.draw(1)
    many = jax.tree.map(lambda *a: jnp.stack(a), *(case.draw(seed) for seed in (2, 3, 4)))

    @cases.compiled
    def run(args, many, tangents):
        return [transformed(case, call, args, many, tangents) for call in (case.call, case.impl)]

    assert_close(*run(args, many, tangents))


@pytest.mark.tier(quick=8)
@every_case
def test_an_eager_call_equals_a_jitted_one(case):
    args = case.draw()
    expected = cases.compiled(case.impl)(*args)
    assert_close(case.call(*args), expected)
    with jax.disable_jit():
        assert_close(case.call(*args), expected)


@every_case
def test_the_jaxpr_shows_the_primitive_once_also_under_differentiation(case):
    args = case.draw()
    name = case.primitive.name
    for fn in (
        case.call,
        jax.grad(functools.partial(loss, case.call), argnums=1),
        jax.jit(case.call),
        lambda *a: jax.jvp(case.call, a, a),
        jax.checkpoint(case.call),
    ):
        assert primitives_in(jax.make_jaxpr(fn)(*args)).count(name) == 1


@pytest.mark.tier(quick=16)
@with_x
def test_mapping_x_alone_keeps_the_primitive_or_takes_its_batched_form(case):
    x, weights = case.draw()
    expected = (case.primitive.batched_form or case.primitive).name
    xs = jnp.stack([x, x, x])

    def bound(fn, xs):
        names = primitives_in(jax.make_jaxpr(fn)(xs, weights))
        return [name for name in names if name.startswith('etp_')]

    for fn in (case.call, jax.grad(functools.partial(loss, case.call), argnums=1)):
        twice = jax.vmap(jax.vmap(fn, (1, None)), (0, None))
        assert bound(jax.vmap(fn, (0, None)), xs) == [expected]
        assert bound(twice, jnp.stack([xs, xs], 2)) == [expected]


def test_a_derived_primitive_is_mapped_again():
    weights = jnp.ones((2, 4, 3, 5))
    twice = jax.vmap(jax.vmap(lambda w: ops.matmul(jnp.ones((6, 3)), w)))
    (outer,) = etp_primitives(jax.make_jaxpr(twice)(weights))
    assert outer.axes == outer.original.axes == (None, 0)
    assert outer.original.original is ops.etp_mm_p
    assert jax.eval_shape(twice, weights).shape == (2, 4, 6, 5)


def test_a_convolution_that_mixes_samples_is_not_folded():
    call = lambda x, k: ops.conv(x, k, batch_group_count=2)
    xs = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 2, 5)))
    kernel = jnp.ones((6, 2, 3))
    over = jax.vmap(call, (0, None))
    assert 'etp_conv_vmap' in primitives_in(jax.make_jaxpr(over)(xs, kernel))
    assert_close(over(xs, kernel), jnp.stack([call(x, kernel) for x in xs]))


@pytest.mark.parametrize('spec', [('i', None, None), (None, 'i', None)])
def test_an_explicitly_sharded_axis_stays_sharded_when_x_is_mapped(spec):
    with jax.set_mesh(jax.make_mesh((1,), ('i',), axis_types=(jax.sharding.AxisType.Explicit,))):
        x = jax.device_put(np.arange(12.0).reshape(2, 2, 3), jax.P(*spec))
        w = jax.device_put(np.ones((3, 4)), jax.P(None, None))
        y = jax.vmap(ops.matmul, (0, None))(x, w)
        assert jax.typeof(y).sharding.spec == jax.P(*spec)
        assert_close(np.asarray(y), np.asarray(x) @ np.ones((3, 4)))


def test_an_integer_operand_has_no_tangent():
    spikes, w = jnp.arange(6).reshape(2, 3), jnp.ones((3, 4))
    no_tangent = np.zeros((2, 3), jax.dtypes.float0)
    y, dy = jax.jvp(ops.etp_mm_p.bind, (spikes, w), (no_tangent, w))
    assert_close(dy, y)
    of_spikes = jax.grad(lambda x: ops.matmul(x, w).sum(), allow_int=True)(spikes)
    assert of_spikes.dtype == jax.dtypes.float0


def test_a_weak_type_stays_weak():
    weak = jnp.asarray(1.0)
    for y in (weak, ops.element_wise(weak), jax.jit(ops.element_wise)(weak)):
        assert y.weak_type


def test_structures_of_one_form_share_one_program_and_are_no_literals():
    a, b = (
        ops.SparseStructure([0, 1, 2, 2], columns, (3, 4))
        for columns in ([0, 1, 2, 3], [3, 1, 2, 0])
    )
    outer = jax.jit(lambda x, w, s: ops.sparse_matmul(x, w, sparse_mat=s))
    x, w = jnp.arange(1.0, 4.0), jnp.arange(1.0, 5.0)
    for structure in (a, b):
        dense = np.zeros((3, 4))
        dense[structure.rows, structure.columns] = w
        assert_close(outer(x, w, structure), x @ dense)
    assert outer._cache_size() == 1
    assert not outer.trace(x, w, a).jaxpr.consts
