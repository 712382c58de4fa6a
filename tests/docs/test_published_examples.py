"""The published examples of ETP primitives; two wrong ones are corrected, zeros have dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import saiunit as u
from saiunit import sparse as ss

import braintrace
from braintrace import kit
from braintrace._etrace_op import (
    BATCHED_PRIMITIVES,
    ETP_PRIMITIVE_SPECS,
    ETP_PRIMITIVES,
    ETP_RULES_INIT_DRTRL,
    ETP_RULES_INIT_PP,
    ETP_RULES_XY_TO_DW,
    ETP_RULES_YW_TO_W,
    GRADIENT_ENABLED_PRIMITIVES,
)
from tests.compare import assert_close
from tests.etrace_op.cases import Case, init, instant, solve, transport

pytestmark = pytest.mark.usefixtures('registries_are_restored')
BUILT_IN = [
    'etp_conv',
    'etp_elemwise',
    'etp_lora_mm',
    'etp_lora_mv',
    'etp_mm',
    'etp_mv',
    'etp_sp_mm',
    'etp_sp_mv',
]


def test_matmul_takes_a_batch_a_vector_and_a_bias():
    x_batched, x_single, w, b = jnp.ones((4, 3)), jnp.ones(3), jnp.ones((3, 5)), jnp.zeros(5)
    assert braintrace.matmul(x_batched, w).shape == (4, 5)
    assert braintrace.matmul(x_single, w).shape == (5,)
    assert braintrace.matmul(x_batched, w, bias=b).shape == (4, 5)


def test_element_wise_takes_a_function():
    w_gate = jnp.array([0.5, -0.3, 0.8, 0.1])
    np.testing.assert_array_equal(braintrace.element_wise(w_gate), w_gate)
    np.testing.assert_allclose(
        braintrace.element_wise(w_gate, fn=jax.nn.sigmoid),
        [0.62245935, 0.4255575, 0.6899745, 0.5249792],
        rtol=1e-6,
    )
    np.testing.assert_array_equal(braintrace.element_wise(w_gate, fn=jnp.abs), jnp.abs(w_gate))


def test_conv_takes_one_and_two_spatial_axes():
    y = braintrace.conv(
        jnp.ones((2, 16, 3)),
        jnp.ones((4, 3, 8)),
        strides=(1,),
        padding='SAME',
        dimension_numbers=('NWC', 'WIO', 'NWC'),
    )
    assert y.shape == (2, 16, 8)
    y = braintrace.conv(
        jnp.ones((2, 32, 32, 3)),
        jnp.ones((3, 3, 3, 16)),
        strides=(1, 1),
        padding='SAME',
        dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
    )
    assert y.shape == (2, 32, 32, 16)


@pytest.mark.slow
def test_sparse_matmul_trains_the_data_of_a_matrix():
    dense_w = jnp.where(
        jax.random.uniform(jax.random.PRNGKey(0), (50, 50)) < 0.1,
        jax.random.normal(jax.random.PRNGKey(1), (50, 50)),
        0.0,
    )
    sparse_mat = ss.CSR.fromdense(dense_w)
    x = jnp.ones((4, 50))
    y = braintrace.sparse_matmul(x, sparse_mat.data, sparse_mat=sparse_mat)
    assert y.shape == (4, 50)
    np.testing.assert_allclose(y, x @ dense_w, rtol=1e-4, atol=1e-5)


def test_lora_matmul_scales_a_low_rank_product():
    B = jax.random.normal(jax.random.PRNGKey(0), (64, 4)) * 0.01
    A = jax.random.normal(jax.random.PRNGKey(1), (4, 32)) * 0.01
    x = jnp.ones((8, 64))
    y = braintrace.lora_matmul(x, B, A, alpha=2.0)
    assert y.shape == (8, 32)
    np.testing.assert_allclose(y, 2 * x @ B @ A, rtol=1e-5)


def test_quantities_pass_through():
    y = braintrace.matmul(
        jnp.ones((4, 3)) * u.volt, jnp.ones((3, 5)) * u.siemens, bias=jnp.zeros(5) * u.amp
    )
    np.testing.assert_array_equal(u.get_mantissa(y), np.full((4, 5), 3.0))
    assert u.get_unit(y) == u.amp


def test_jit_grad_and_per_sample_gradients():
    x, w, xs = jnp.ones((4, 3)), jnp.ones((3, 5)), jnp.ones((8, 4, 3))
    assert jax.jit(braintrace.matmul)(x, w).shape == (4, 5)
    of_weight = jax.grad(lambda w, x: jnp.sum(braintrace.matmul(x, w)))
    np.testing.assert_array_equal(of_weight(w, x), np.full((3, 5), 4.0))
    assert jax.vmap(of_weight, (None, 0))(w, xs).shape == (8, 3, 5)


def test_the_registries_list_the_eight_primitives():
    for table in (
        ETP_PRIMITIVES,
        ETP_RULES_YW_TO_W,
        ETP_RULES_XY_TO_DW,
        ETP_RULES_INIT_DRTRL,
        ETP_RULES_INIT_PP,
    ):
        found = sorted(p.name for p in table)
        assert [name for name in found if name in BUILT_IN] == BUILT_IN
    assert {p.name for p in BATCHED_PRIMITIVES} >= {
        'etp_conv',
        'etp_lora_mm',
        'etp_mm',
        'etp_sp_mm',
    }


def scaled_impl(*args, scale=1.0, has_bias=False):
    y = scale * (args[0] @ args[1])
    return y + args[2] if has_bias else y


def scaled_trainable_invars(params):
    return {'weight': 1, 'bias': 2} if params.get('has_bias', False) else {'weight': 1}


def scaled_yw_to_w(hidden_dim, trace, *, scale=1.0, has_bias=False):
    """``xy_to_dw`` has ``scale`` already; the published page multiplies by it twice."""
    out = {'weight': trace['weight'] * jnp.expand_dims(hidden_dim, axis=-2)}
    return out | ({'bias': trace['bias'] * hidden_dim} if has_bias else {})


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
    return braintrace.register_primitive_spec(
        braintrace.ETPPrimitiveSpec(
            name='etp_spec_demo',
            impl=scaled_impl,
            trainable_invars_fn=scaled_trainable_invars,
            x_invar_index=0,
            batched=True,
            **RULES,
        )
    )


@pytest.mark.parametrize('register', [by_class, by_spec])
def test_a_custom_primitive_binds_and_transforms(register):
    primitive = register()
    assert type(primitive) is braintrace.ETPPrimitive and str(primitive) == primitive.name
    assert all(
        primitive in table
        for table in (
            ETP_RULES_YW_TO_W,
            ETP_RULES_XY_TO_DW,
            ETP_RULES_INIT_DRTRL,
            ETP_RULES_INIT_PP,
        )
    )
    x, w = jnp.ones((4, 3)), jnp.ones((3, 5))
    call = lambda x, w: primitive.bind(x, w, scale=2.0, has_bias=False)
    np.testing.assert_allclose(call(x, w), 2.0 * (x @ w))
    np.testing.assert_allclose(
        primitive.bind(x, w, jnp.full(5, 0.1), scale=2.0, has_bias=True)[0],
        np.full(5, 6.1),
        rtol=1e-6,
    )
    np.testing.assert_allclose(jax.jit(call)(x, w), 2.0 * (x @ w))
    assert jax.grad(lambda w: jnp.sum(call(x, w)))(w).shape == (3, 5)
    assert jax.vmap(call, (0, None))(jnp.ones((8, 4, 3)), w).shape == (8, 4, 5)


def test_a_spec_is_recovered_from_its_primitive():
    primitive = by_spec()
    spec = braintrace.get_primitive_spec(primitive)
    assert spec is ETP_PRIMITIVE_SPECS[primitive] and spec.name == 'etp_spec_demo'
    assert spec.resolve_trainable_invars({'has_bias': False}) == {'weight': 1}
    assert spec.resolve_trainable_invars({'has_bias': True}) == {'weight': 1, 'bias': 2}


def law_sides(case):
    """Both sides of: carrying a trace commutes with making one."""
    x, weights = case.draw()
    d, e = case.draw_y(1), case.draw_y(2)
    return transport(case, d, instant(case, x, e, weights)), instant(case, x, d * e, weights)


def test_the_scaled_matmul_applies_its_scale_once():
    with jax.enable_x64(True):
        case = Case(
            'scaled',
            by_class(),
            (4, 3),
            {'weight': (3, 5), 'bias': (5,)},
            {'scale': 2.0, 'has_bias': True},
        )
        assert_close(*law_sides(case))
        case.primitive.register_yw_to_w(published_yw_to_w)
        got, expected = law_sides(case)
        assert_close(got['weight'], 2.0 * expected['weight'])


def test_the_short_example_works_with_rules_in_dicts():
    impl = lambda x, w, *, scale=1.0: scale * (x @ w)
    my_p = braintrace.register_primitive(
        'etp_my_op',
        impl,
        batched=True,
        trainable_invars_fn=lambda params: {'weight': 1},
        x_invar_index=0,
    )
    my_p.register_yw_to_w(
        lambda hidden, trace, **params: {'weight': trace['weight'] * hidden[..., None, :]}
    )

    def xy_to_dw(x, hidden, w, **params):
        return jax.vjp(lambda w_: impl(x, w_['weight'], **params), w)[1](hidden)[0]

    my_p.register_xy_to_dw(xy_to_dw)
    my_p.register_init_drtrl(
        lambda x_var, y_var, w, ns: {
            'weight': jnp.zeros((x_var.aval.shape[0], *w['weight'].aval.shape, ns))
        }
    )
    my_p.register_init_pp(
        lambda x_var, y_var, w, ns: jnp.zeros((*y_var.aval.shape, ns), dtype=y_var.aval.dtype)
    )
    x, w = jnp.ones((4, 3)), jnp.ones((3, 5))
    np.testing.assert_array_equal(my_p.bind(x, w, scale=0.5), np.full((4, 5), 1.5))
    np.testing.assert_array_equal(
        jax.grad(lambda w_: my_p.bind(x, w_, scale=0.5).sum())(w), np.full((3, 5), 2.0)
    )
    with jax.enable_x64(True):
        case = Case('short', my_p, (4, 3), {'weight': (3, 5)}, {'scale': 0.5})
        assert_close(*law_sides(case))
        x, weights = case.draw()
        trace = instant(case, x, case.draw_y(1), weights)
        assert init(case, x, weights, 2)['weight'].shape == (*trace['weight'].shape, 2)
        assert_close(
            solve(case, case.draw_y(2), trace, weights),
            {'weight': 0.5 * x.T @ (case.draw_y(1) * case.draw_y(2))},
        )


def test_the_bare_rules_of_the_short_example_are_told_of_the_dict_form():
    my_p = braintrace.register_primitive('etp_my_op', lambda x, w: x @ w, batched=True)
    my_p.register_yw_to_w(lambda hidden, trace, **params: trace * hidden[None, :])
    with pytest.raises(
        braintrace.errors.RuleContractError, match='dicts of arrays by trainable name'
    ):
        my_p.bound_rule('yw_to_w', {}, 'D_RTRL')(jnp.ones((4, 5)), {'weight': jnp.ones((4, 3, 5))})


def test_only_element_wise_is_gradient_enabled():
    assert [p.name for p in GRADIENT_ENABLED_PRIMITIVES if p.name in BUILT_IN] == ['etp_elemwise']


SCALED = [
    ([jnp.ones((4, 3)), jnp.ones((3, 5))], {'scale': 2.0, 'has_bias': False}),
    ([jnp.ones((4, 3)), jnp.ones((3, 5)), jnp.ones(5)], {'scale': 2.0, 'has_bias': True}),
]


@pytest.mark.tier(quick=0, one_in=2)
@pytest.mark.parametrize('register', [by_class, by_spec])
def test_the_scaled_matmul_keeps_every_law_once_it_is_corrected(register):
    primitive = register()
    kit.assert_conformant(primitive, SCALED)
    primitive.register_yw_to_w(published_yw_to_w)
    assert {row.law for row in kit.check(primitive, SCALED).of('fail')} >= {'L3', 'L9'}
