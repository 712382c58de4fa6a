"""The published example of an ETP primitive of one's own; its wrong rule is corrected."""

import jax
import jax.numpy as jnp
import pytest

import braintrace
from braintrace import kit

pytestmark = pytest.mark.usefixtures('registries_are_restored')


def scaled_impl(*args, scale=1.0, has_bias=False):
    y = scale * (args[0] @ args[1])
    return y + args[2] if has_bias else y


def scaled_trainable_invars(params):
    return {'weight': 1, 'bias': 2} if params.get('has_bias', False) else {'weight': 1}


def scaled_yw_to_w(hidden_dim, trace, *, scale=1.0, has_bias=False):
    """``xy_to_dw`` has ``scale`` already; the published page multiplies by it twice."""
    return published_yw_to_w(hidden_dim, trace, has_bias=has_bias)


def published_yw_to_w(hidden_dim, trace, *, scale=1.0, has_bias=False):
    out = {'weight': trace['weight'] * jnp.expand_dims(hidden_dim, axis=-2) * scale}
    return out | ({'bias': trace['bias'] * hidden_dim} if has_bias else {})


def scaled_xy_to_dw(x, hidden_dim, weights, *, scale=1.0, has_bias=False):
    def forward(w):
        y = scale * (x @ w['weight'])
        return y + w['bias'] if has_bias else y

    return jax.vjp(forward, weights)[1](hidden_dim)[0]


def scaled_init_drtrl(x_var, y_var, weight_vars, num_hidden_state):
    batch = x_var.aval.shape[0]
    return {
        name: jnp.zeros((batch, *var.aval.shape, num_hidden_state), var.aval.dtype)
        for name, var in weight_vars.items()
    }


def scaled_init_pp(x_var, y_var, weight_vars, num_hidden_state):
    return jnp.zeros((*y_var.aval.shape, num_hidden_state), dtype=y_var.aval.dtype)


RULES = dict(
    yw_to_w=scaled_yw_to_w,
    xy_to_dw=scaled_xy_to_dw,
    init_drtrl=scaled_init_drtrl,
    init_pp=scaled_init_pp,
)


def by_class():
    primitive = braintrace.register_primitive(
        'etp_scaled_mm', scaled_impl, batched=True, trainable_invars_fn=scaled_trainable_invars
    )
    primitive.register_etp_rules(**RULES)
    return primitive


def by_spec():
    fields = {'trainable_invars_fn': scaled_trainable_invars, 'x_invar_index': 0, **RULES}
    return braintrace.register_primitive_spec(
        braintrace.ETPPrimitiveSpec(name='etp_spec_demo', impl=scaled_impl, batched=True, **fields)
    )


SCALED = [
    ([jnp.ones((4, 3)), jnp.ones((3, 5))], {'scale': 2.0, 'has_bias': False}),
    ([jnp.ones((4, 3)), jnp.ones((3, 5)), jnp.ones(5)], {'scale': 2.0, 'has_bias': True}),
]


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('register', [by_class, by_spec])
def test_the_scaled_matmul_keeps_every_law_once_it_is_corrected(register):
    primitive = register()
    assert type(primitive) is braintrace.ETPPrimitive
    kit.assert_conformant(primitive, SCALED)
    primitive.register_yw_to_w(published_yw_to_w)
    assert {row.law for row in kit.check(primitive, SCALED).of('fail')} >= {'L3', 'L9'}
