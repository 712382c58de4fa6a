"""What the package relies on in JAX's internals, one test each, so that a new release breaks a named test first."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from braintrace import _jax

X = jnp.arange(12.).reshape(3, 4)


def equations(fn, *args):
    jaxpr, _ = _jax.trace(fn, *args)
    return jaxpr.eqns


def test_trace_splits_constants_from_the_jaxpr():
    captured = jnp.arange(4.) * 2
    jaxpr, consts = _jax.trace(lambda x: x + captured, X)
    assert len(jaxpr.constvars) == len(consts) and len(jaxpr.invars) == 1


def test_tracing_does_not_see_an_outer_transformation():
    shapes = []

    def outer(x):
        jaxpr, _ = _jax.trace(jnp.sin, jax.ShapeDtypeStruct(x.shape, x.dtype))
        shapes.append(jaxpr.invars[0].aval.shape)
        return x
    jax.vmap(jax.jit(outer))(X)
    assert shapes == [(4,)]


def test_a_jitted_call_holds_its_body_where_inlining_looks_for_it():
    eqn, = equations(jax.jit(lambda x: jnp.sin(x) * 2), X)
    body, consts = _jax.closed_jaxpr(_jax.inlinable(eqn))
    assert [e.primitive.name for e in body.eqns] == ['sin', 'mul'] and consts == []


@pytest.mark.parametrize('fn', [jnp.sin, jax.nn.relu, jax.nn.softmax, lambda x: jnp.roll(x, 1), lambda x: x[:2],
                                jax.custom_vjp(lambda x: x * 2)], ids=['jit', 'custom_jvp', 'softmax', 'roll', 'slice', 'custom_vjp'])
def test_an_equation_evaluates_to_what_jax_computes(fn):
    if isinstance(fn, jax.custom_vjp):
        fn.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))
    env = {}
    jaxpr, _ = _jax.trace(fn, X)
    env[jaxpr.invars[0]] = X
    for eqn in jaxpr.eqns:
        args = [a.val if isinstance(a, _jax.Literal) else env[a] for a in eqn.invars]
        env.update(zip(eqn.outvars, _jax.bind(eqn.primitive, eqn.params, eqn.ctx, *args)))
    assert (env[jaxpr.outvars[0]] == fn(X)).all()


def test_the_place_of_an_equation_is_this_file():
    eqn, = equations(lambda x: jnp.sin(x), X)
    assert 'test_jax_contract.py:' in _jax.location(eqn.source_info)


@pytest.mark.parametrize('fn, name, params', [
    (lambda x: x[1:, ::2], 'slice', {'start_indices', 'limit_indices', 'strides'}),
    (lambda x: x.T, 'transpose', {'permutation'}), (lambda x: x[::-1], 'rev', {'dimensions'}),
    (lambda x: x.reshape(2, 6), 'reshape', {'new_sizes', 'dimensions'}), (lambda x: x.sum(0), 'reduce_sum', {'axes'}),
    (lambda x: jax.lax.pad(x, 0., [(1, 0, 0), (0, 1, 0)]), 'pad', {'padding_config'}),
    (lambda x: jnp.broadcast_to(x[:, None], (3, 2, 4)), 'broadcast_in_dim', {'shape', 'broadcast_dimensions'}),
    (lambda x: jnp.concatenate([x, x]), 'concatenate', {'dimension'}), (lambda x: jnp.split(x, 2, 1)[0], 'split', {'sizes', 'axis'}),
])
def test_data_movement_has_the_parameters_that_labels_read(fn, name, params):
    eqn = next(e for e in equations(fn, X) if e.primitive.name == name)
    assert params <= set(eqn.params)


@pytest.mark.parametrize('fn, name', [
    (lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)[0], 'scan'),
    (lambda x: jax.lax.while_loop(lambda c: c.sum() < 0, jnp.sin, x), 'while'),
    (lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), 'cond'), (jax.checkpoint(jnp.sin), 'remat2')])
def test_control_flow_holds_its_bodies_in_its_parameters(fn, name):
    eqn = next(e for e in equations(fn, X) if e.primitive.name == name)
    inner = [e.primitive.name for j in _jax.sub_jaxprs(eqn.params) for e in _jax.closed_jaxpr(j)[0].eqns]
    assert 'sin' in inner


def test_stop_gradient_and_select_are_primitives():
    names = {e.primitive.name for e in equations(lambda x: jax.lax.stop_gradient(jax.lax.select(x > 0, x, -x)), X)}
    assert {'stop_gradient', 'select_n'} <= names
