"""Registration: where rules live, what is refused with which words, and that nothing is half
registered.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from braintrace import _etrace_op as ops
from braintrace.errors import MissingRuleError, NotSupportedError, RuleContractError
from tests.compare import assert_close

from . import cases

FAMILIES = ('conv', 'elemwise', 'lora_mm', 'lora_mv', 'mm', 'mv', 'sp_mm', 'sp_mv')
BUILT_IN = {f'etp_{name}' for name in FAMILIES}
pytestmark = pytest.mark.usefixtures('registries_are_restored')


def impl(x, w, *bias, has_bias=False):
    return x @ w + bias[0] if has_bias else x @ w


def rule(*args, **params):
    return {'weight': jnp.zeros(())}


SPEC = ops.ETPPrimitiveSpec(
    'etp_test', impl, rule, rule, rule, rule, lambda params: {'weight': 1}, batched=True
)


def names(table):
    """Names of the built-in primitives in a table, and of those that a test here registered."""
    found = {primitive.name for primitive in table}
    return {name for name in found if name in BUILT_IN or name.startswith('etp_test')}


def test_the_eight_primitives_and_what_they_declare():
    every = ops.ETP_PRIMITIVES
    assert names(every) == BUILT_IN
    batched = {'etp_conv', 'etp_mm', 'etp_lora_mm', 'etp_sp_mm'}
    assert names(ops.BATCHED_PRIMITIVES) == names(p for p in every if p.batched) == batched
    assert names(p for p in every if p.gradient_enabled) == {'etp_elemwise'}
    assert names(ops.ETP_PRIMITIVE_SPECS) == BUILT_IN
    published = ops.ETP_RULES_YW_TO_W, ops.ETP_RULES_XY_TO_DW, ops.ETP_RULES_INIT_DRTRL
    for table in (*published, ops.ETP_RULES_INIT_PP):
        assert names(table) == names(table.keys()) == BUILT_IN and len(table) >= len(BUILT_IN)
    own = {'etp_conv', 'etp_lora_mm', 'etp_lora_mv'}
    assert names(ops.RULE_SLOTS['instant_drtrl']) == names(ops.RULE_SLOTS['solve_drtrl']) == own


def test_a_primitive_prints_its_name_and_its_rules():
    primitive = ops.register_primitive('etp_test', impl, batched=True)
    assert str(primitive) == primitive.name == 'etp_test'
    assert repr(primitive) == (
        'ETPPrimitive(etp_test; batched; rules: none; '
        'missing: yw_to_w, xy_to_dw, init_drtrl, init_pp)'
    )
    primitive.register_yw_to_w(rule)
    assert 'rules: yw_to_w; missing: xy_to_dw' in repr(primitive)
    assert repr(primitive.mapped((0, None))) == (
        'ETPPrimitive(etp_test_vmap; batched; etp_test mapped over (0, None); rules: yw_to_w, '
        'solve_drtrl)'
    )


def test_class_style_registration_fills_the_set_and_defaults():
    primitive = ops.register_primitive('etp_test', impl)
    assert isinstance(primitive, ops.ETPPrimitive) and ops.is_etp_primitive(primitive)
    assert primitive.trainable_invars({}) == {'weight': 1} and primitive.impl_fn is impl
    assert not primitive.batched and not primitive.gradient_enabled
    assert primitive.x_invar_index == primitive.y_outvar_index == 0
    flags = {'batched': True, 'gradient_enabled': True, 'x_invar_index': None}
    flagged = ops.register_primitive('etp_test_2', impl, **flags)
    assert {name: getattr(flagged, name) for name in flags} == flags
    assert flagged in ops.BATCHED_PRIMITIVES and not ops.is_etp_primitive(jax.lax.add_p)


@pytest.mark.parametrize(('slot', 'registry'), ops.RULE_SLOTS.items())
def test_each_slot_has_a_method_that_returns_the_rule_and_one_registry(slot, registry):
    primitive = ops.register_primitive('etp_test', impl)
    assert primitive.optional_rule(slot) is None
    assert getattr(primitive, f'register_{slot}')(rule) is rule
    assert registry[primitive] is primitive.rule(slot) is primitive.optional_rule(slot) is rule
    primitive.register_etp_rules(**{slot: None})
    assert primitive.rule(slot) is rule, 'None leaves a slot alone'
    del primitive.own_rules[slot]
    assert primitive not in registry and primitive.optional_rule(slot) is None


@pytest.mark.parametrize(
    ('bad', 'message'),
    [
        (
            {'yw_to_dw': rule},
            "'etp_test': no rule slot is called 'yw_to_dw'. The slots are yw_to_w",
        ),
        ({'xy_to_dw': 3}, "the rule 'xy_to_dw' of 'etp_test' is a int, expected a function"),
    ],
)
def test_a_refused_rule_registers_none_of_those_beside_it(bad, message):
    primitive = ops.register_primitive('etp_test', impl)
    with pytest.raises(RuleContractError, match=message):
        primitive.register_etp_rules(yw_to_w=rule, **bad)
    assert not any(primitive.optional_rule(slot) for slot in ops.RULE_SLOTS)


def test_a_missing_rule_names_primitive_rule_and_algorithm():
    primitive = ops.register_primitive('etp_test', impl)
    message = r"'etp_test' has no rule 'init_pp', which ES_D_RTRL needs.*register_init_pp"
    with pytest.raises(MissingRuleError, match=message) as caught:
        primitive.rule('init_pp', 'ES_D_RTRL')
    error = caught.value
    assert (error.op, error.rule, error.algorithm) == ('etp_test', 'init_pp', 'ES_D_RTRL')
    with pytest.raises(MissingRuleError, match="'etp_test' has no rule"):
        primitive.mapped((0, 0)).rule('init_pp', 'ES_D_RTRL')


def registered(name='etp_test', fn=impl, **options):
    return lambda: ops.register_primitive(name, fn, **options)


def of_spec(**changes):
    return lambda: ops.register_primitive_spec(dataclasses.replace(SPEC, **changes))


REFUSED = [  # a call, and what it says
    (registered('etp_mm'), 'registered already. Choose another name, or keep the primitive'),
    (registered(''), "needs a name, found ''"),
    (registered(3), 'needs a name, found 3'),
    (registered(fn=None), "the implementation of 'etp_test' is a NoneType"),
    (registered(trainable_invars_fn={}), "trainable_invars_fn of 'etp_test' is a dict"),
    (registered(x_invar_index=-1), 'x_invar_index .* is -1, expected an integer >= 0 or None'),
    (registered(y_outvar_index=None), 'y_outvar_index .* is None, expected an integer >= 0'),
    (of_spec(yw_to_w=None), "the spec of 'etp_test' lacks yw_to_w. A spec needs yw_to_w, xy_to_dw"),
    (of_spec(init_drtrl=3, solve_drtrl='a'), "the rule 'init_drtrl' of 'etp_test' is a int"),
    (of_spec(name='etp_mv'), "'etp_mv' is registered already"),
    (of_spec(impl=3), 'the implementation'),
    (
        lambda: ops.register_primitive_spec(ops.ETPPrimitiveSpec('etp_test', impl)),
        'lacks yw_to_w, xy_to_dw, init_drtrl, init_pp, trainable_invars_fn',
    ),
    (
        lambda: ops.ETPPrimitiveSpec(name='etp_test', impl=impl, yw_to_dw=rule),
        "has no field 'yw_to_dw'. Its fields are name, impl, yw_to_w",
    ),
    (lambda: ops.register_primitive_spec({}), 'expected an ETPPrimitiveSpec, found a dict'),
    (lambda: ops.get_primitive_spec(jax.lax.add_p), "'add' is not an ETP primitive"),
    (
        lambda: dataclasses.replace(SPEC, trainable_invars_fn=None).resolve_trainable_invars({}),
        'lacks|no trainable_invars_fn',
    ),
    (lambda: ops.etp_mm_p.register_yw_to_w(None), "the rule 'yw_to_w' of 'etp_mm' is a NoneType"),
    (lambda: ops.etp_mm_p.rule('init'), "no rule slot is called 'init'"),
    (lambda: ops.etp_mm_p.optional_rule('init'), "no rule slot is called 'init'"),
]


@pytest.mark.parametrize(('call', 'message'), REFUSED)
def test_what_is_malformed_is_refused_and_nothing_is_registered(call, message):
    with pytest.raises(RuleContractError, match=message):
        call()
    tables = ops.ETP_PRIMITIVES, ops.ETP_RULES_YW_TO_W, ops.ETP_PRIMITIVE_SPECS
    assert all(names(table) == BUILT_IN for table in tables)


@pytest.mark.parametrize(
    'invars', [{}, None, {'weight': 'a'}, {'weight': -1}, {1: 1}, {'a': 1, 'b': 1}, ['weight']]
)
def test_a_layout_that_is_no_dict_of_distinct_indices_is_refused(invars):
    primitive = ops.register_primitive('etp_test', impl, trainable_invars_fn=lambda params: invars)
    message = "trainable_invars_fn of 'etp_test' returned .* expected a dict"
    with pytest.raises(RuleContractError, match=message):
        primitive.trainable_invars({})


def test_a_spec_registers_everything_that_it_says():
    more = dict(instant_drtrl=rule, solve_drtrl=rule, gradient_enabled=True)
    primitive = ops.register_primitive_spec(dataclasses.replace(SPEC, **more))
    assert all(primitive.rule(slot) is rule for slot in ops.RULE_SLOTS)
    assert primitive in ops.ETP_PRIMITIVES and primitive.batched and primitive.gradient_enabled
    assert ops.get_primitive_spec(primitive) is ops.ETP_PRIMITIVE_SPECS[primitive]


def test_asking_for_a_spec_that_is_not_there_says_why():
    message = "'etp_test' was registered without a spec; `register_primitive_spec"
    with pytest.raises(RuleContractError, match=message):
        ops.get_primitive_spec(ops.register_primitive('etp_test', impl))


def with_rule(slot, fn):
    primitive = ops.register_primitive('etp_test', impl, batched=True)
    primitive.register_etp_rules(**{slot: fn})
    return primitive.bound_rule(slot, {'has_bias': False}, 'D_RTRL')


D, TRACE = jnp.ones((4, 5)), {'weight': jnp.ones((4, 3, 5))}


NO_DICTS = {
    'other keys': (
        lambda: with_rule('yw_to_w', lambda d, trace, **_: {'bias': d})(D, TRACE),
        r"'yw_to_w' of 'etp_test' returned the keys \['bias'\].*\{'weight': array\}",
    ),
    'takes bare arrays': (
        lambda: with_rule('yw_to_w', lambda d, trace, **_: trace * d[None, :])(D, TRACE),
        "'yw_to_w' of 'etp_test' failed with TypeError.*dicts of arrays by trainable name",
    ),
    'returns a bare array': (
        lambda: with_rule('init_drtrl', lambda x, y, w, n: jnp.zeros(n))(None, None, {}, 1),
        "'init_drtrl' of 'etp_test' returned a .*dicts of arrays",
    ),
}


@pytest.mark.parametrize('name', NO_DICTS)
def test_a_rule_that_is_not_in_dict_form_is_told_of_it_when_it_is_called(name):
    call, message = NO_DICTS[name]
    with pytest.raises(RuleContractError, match=message):
        call()


@pytest.mark.parametrize('result', [jnp.zeros((4, 5)), {'weight': 0}])
def test_an_output_trace_of_another_shape_is_refused(result):
    y = cases.variable(jnp.ones((4, 5)))
    message = r"'init_pp' of 'etp_test' returned .*expected one array of zeros of shape \(4, 5, 2\)"
    with pytest.raises(RuleContractError, match=message):
        with_rule('init_pp', lambda x, y, w, n: result)(None, y, {}, 2)


@pytest.mark.tier(quick=2)
@pytest.mark.parametrize(
    ('init', 'seen'),
    [
        (lambda x, y, w, n: {'weight': None}, None),
        (lambda x, y, w, n, *, has_bias=None: {'weight': has_bias}, False),
        (lambda x, y, w, n, **params: {'weight': params}, {'has_bias': False}),
    ],
)
def test_an_init_rule_gets_the_parameters_that_it_declares(init, seen):
    assert with_rule('init_drtrl', init)(None, None, {}, 1) == {'weight': seen}


def test_an_error_of_the_library_inside_a_rule_passes_through():
    case = cases.conv('grouped', (2, 3, 5), (4, 3, 3), 4, batch_group_count=2)
    x, weights = case.draw()
    assert case.call(x, weights).shape == (1, 4, 5)
    message = 'batch_group_count=2 mixes samples.*feature_group_count'
    with pytest.raises(NotSupportedError, match=message):
        cases.init(case, x, weights, 1)
    with pytest.raises(NotSupportedError, match='batch_group_count=2'):
        cases.instant(case, x, x, weights)
    behind = cases.conv('behind', (3, 5, 2), (4, 3, 3), 4, dimension_numbers=('CHN', 'OIH', 'CHN'))
    message = 'put the batch after another axis.*braintrace.conv'
    with pytest.raises(NotSupportedError, match=message):
        cases.init(behind, *behind.draw(), 1)


def two(x, w):
    return x @ w, (x @ w).sum(-1), (x @ w) > 0


def test_an_implementation_may_return_several_outputs():
    primitive = ops.register_primitive('etp_test', two, batched=True)
    x, w = np.ones((4, 3)), np.arange(15.0).reshape(3, 5)
    for call in (primitive.bind, jax.jit(primitive.bind)):
        assert_close(tuple(call(x, w)), two(x, w))
    assert_close(jax.grad(lambda w: primitive.bind(x, w)[1].sum())(w), np.full((3, 5), 4.0))
    mapped = jax.vmap(primitive.bind)(np.stack([x, 2 * x]), np.stack([w, w]))
    assert_close([m[1] for m in mapped], list(two(2 * x, w)))
    assert jax.jvp(lambda w: primitive.bind(x, w), (w,), (w,))[1][2].dtype == jax.dtypes.float0
    with pytest.raises(TypeError):
        primitive.bind(x)


def test_an_output_that_is_neither_array_nor_flat_tuple_is_refused():
    primitive = ops.register_primitive('etp_test', lambda x: {'y': x})
    message = "implementation of 'etp_test' returned .*expected an array or a flat tuple"
    with pytest.raises(RuleContractError, match=message):
        primitive.bind(jnp.ones(3))
    wavering = ops.register_primitive('etp_test_2', lambda x, *, several: (x, x) if several else x)
    wavering.bind(jnp.ones(3), several=False)
    with pytest.raises(RuleContractError, match='one array in one call and a tuple in another'):
        wavering.bind(jnp.ones(3), several=True)
