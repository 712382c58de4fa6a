"""Trace rules of primitives under ``jax.vmap``, over weights too: the laws, the layouts, and what a
loop over the lanes gives.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from braintrace import _etrace_op as ops
from braintrace.errors import RuleContractError
from tests.compare import assert_close
from tests.tiers import nightly, slow

from . import cases
from .cases import ALL, FILLED, primitives_in, results, stack

LANES = 2


class Placed(cases.Case):
    """A case with operands where its primitive has them, and with one of several outputs."""

    def operands(self, x, weights) -> list:
        places = {self.primitive.x_invar_index: x} | {
            index: weights[name]
            for name, index in self.primitive.trainable_invars(self.params).items()
        }
        operands = [places[index] for index in sorted(i for i in places if i is not None)]
        return [*operands, *self.structure.values()]

    def chosen(self, out):
        return out[self.primitive.y_outvar_index] if isinstance(out, tuple | list) else out

    def call(self, x, weights):
        return self.chosen(super().call(x, weights))

    def impl(self, x, weights):
        return self.chosen(super().impl(x, weights))


@dataclasses.dataclass(frozen=True, eq=False)
class Mapped(Placed):
    """A case under one more ``vmap``, and the case of one lane of it."""

    lane: cases.Case = None

    def has_axis(self, name: str) -> bool:
        return self.primitive.axes[self.primitive.trainable_invars(self.params)[name]] == 0

    def lanes(self, x, weights) -> list:
        """x and weights of each lane."""
        has_x = x is not None and self.primitive.axes[self.primitive.x_invar_index] == 0
        return [
            (x[i] if has_x else x, {n: w[i] if self.has_axis(n) else w for n, w in weights.items()})
            for i in range(LANES)
        ]


def mapped(case, axes) -> Mapped:
    name = f'{case.name} {"".join("-" if axis is None else "m" for axis in axes)}'
    axes = (*axes, *(None for _ in case.structure))
    primitive, invars = case.primitive.mapped(axes), case.primitive.trainable_invars(case.params)
    wide = lambda shape, index: (LANES, *shape) if axes[index] == 0 else shape
    x = None if case.x is None else wide(case.x, primitive.x_invar_index)
    weights = {n: wide(shape, invars[n]) for n, shape in case.weights.items()}
    return Mapped(name, primitive, x, weights, case.params, case.structure, case)


def combinations(case) -> list[Mapped]:
    """The case under every vmap that maps something."""
    choices = itertools.product((0, None), repeat=len(case.weights) + (case.x is not None))
    return [mapped(case, axes) for axes in choices if 0 in axes]


def some(case) -> list[Mapped]:
    """The case with everything mapped, weights alone, and one weight alone."""
    every = combinations(case)
    return [every[0], *[c for c in every if c.name.endswith((' -m', ' -mm', ' -mmm', ' --m'))]]


several = ops.register_primitive(
    'mapped_test_several',
    lambda a, x, b, *, power: (a * x + b, (a * x) ** power + b),
    x_invar_index=1,
    y_outvar_index=1,
    trainable_invars_fn=lambda params: {'a': 0, 'b': 2},
)
pair = ops.register_primitive(
    'mapped_test_pair',
    lambda gain, offset: gain * gain + offset,
    x_invar_index=None,
    trainable_invars_fn=lambda params: {'gain': 0, 'offset': 1},
)
for own in (several, pair):
    own.register_etp_rules(
        yw_to_w=lambda d, trace, **params: {n: d * e for n, e in trace.items()},
        init_drtrl=lambda x, y, weights, states: {
            n: jnp.zeros((*w.aval.shape, states), w.aval.dtype) for n, w in weights.items()
        },
        init_pp=lambda x, y, weights, states, *, power=None: jnp.zeros(
            (*y.aval.shape, states), y.aval.dtype
        ),
    )
several.register_xy_to_dw(
    lambda x, d, weights, *, power: {'a': power * (weights['a'] * x) ** (power - 1) * x * d, 'b': d}
)
pair.register_xy_to_dw(lambda x, d, weights: {'gain': 2 * weights['gain'] * d, 'offset': d})
SEVERAL = Placed('several outputs', several, (3,), {'a': (3,), 'b': (3,)}, {'power': 2})
PAIR = Placed('two weights, no x', pair, None, {'gain': (3,), 'offset': (3,)})

NAMED = {case.name: case for case in ALL}
mm, mv, lora = (NAMED[f'{name} with bias'] for name in ('mm', 'mv', 'lora_mv'))
lora_mm, sp_mv = NAMED['lora_mm batch of one, with bias'], NAMED['sp_mv with bias']
elemwise, conv = NAMED['elemwise'], NAMED['conv 1-D channels last']
sp_mm = NAMED['sp_mm by a dense product, with bias']
EVERY_PRIMITIVE = [mm, mv, elemwise, sp_mm, sp_mv, lora_mm, lora, conv, SEVERAL, PAIR]
ONCE = [c for case in EVERY_PRIMITIVE for c in combinations(case)]
TWICE = [
    mapped(mapped(case, inner), outer)
    for case, inner, outer in [
        (mm, (None, 0, 0), (None, 0, 0)),
        (mm, (0, 0, None), (None, 0, 0)),
        (mm, (None, 0, 0), (0, None, None)),
        (mv, (None, 0, 0), (0, None, None)),
        (mv, (None, 0, None), (0, None, None)),
        (mv, (0, None, None), (None, 0, None)),
        (mv, (0, None, None), (0, None, None)),
        (conv, (0, 0, None), (None, 0, None)),
        (conv, (None, 0, 0), (0, None, None)),
        (lora, (None, 0, None, 0), (None, None, 0, 0)),
        (PAIR, (0, None), (None, 0)),
        (SEVERAL, (0, None, 0), (None, 0, 0)),
    ]
]
THRICE = [mapped(TWICE[i], (0, None, None)) for i in (0, 3)]
REST = [c for case in ALL if case not in EVERY_PRIMITIVE for c in some(case)]


def table(found, quick, late):
    """A test for each case, slow outside of ``quick``, nightly where it is ``late``."""
    fast, last = {c.name for c in quick}, {c.name for c in late}
    mark = lambda c: () if c.name in fast else nightly if c.name in last else slow
    return pytest.mark.parametrize('case', [pytest.param(c, marks=mark(c)) for c in found], ids=str)


ALONE = [some(case)[0] for case in EVERY_PRIMITIVE]
every_case = table([*ONCE, *TWICE, *THRICE, *REST], [*ALONE, *TWICE[:4]], REST[1::2])


def by_loop(case, x, d, weights):
    """y, gradient and entry from the unmapped implementation and rules, lane by lane; d is an array
    or a list of lanes.
    """
    if not isinstance(case, Mapped):
        y, pull = jax.vjp(lambda w: case.impl(x, w), weights)
        return y, pull(d)[0], cases.instant(case, x, d, weights)
    each = zip(case.lanes(x, weights), d)
    found = [by_loop(case.lane, x, d, weights) for (x, weights), d in each]
    y, gradient, entry = (stack(part) for part in zip(*found))
    return y, {n: g if case.has_axis(n) else g.sum(0) for n, g in gradient.items()}, entry


def pairs(case, x, weights, d, e):
    """Both sides of each equation, by its name; one program for a case."""
    y, gradient, entry = by_loop(case, x, e, weights)
    return cases.laws(case, x, weights, d, e) | {
        'the primitive is its lanes': (case.call(x, weights), y),
        'a gradient is the sum of the lanes': (cases.gradient(case, x, e, weights), gradient),
        'an entry is the stack of the lanes': (cases.instant(case, x, e, weights), entry),
    }


@pytest.mark.tier(quick=5)
@every_case
def test_rules_of_a_mapped_primitive_keep_the_laws_and_are_those_of_its_lanes(case):
    run = cases.compiled(functools.partial(pairs, case))
    assert_close(*cases.sides(run(*cases.arguments(case))))


@every_case
def test_an_empty_trace_of_a_mapped_primitive_has_the_layout_of_an_entry(case):
    found = jax.eval_shape(lambda: results(case, num_state=3))
    shapes = {what: {n: e.shape for n, e in entry.items()} for what, entry in found.items()}
    assert shapes['empty'] == {n: (*shape, 3) for n, shape in shapes['entry'].items()}
    assert shapes['carried'] == shapes['entry']
    assert shapes['solved'] == shapes['gradient'] == case.weights
    output = jax.eval_shape(lambda: cases.init(case, *case.draw(), 3, 'init_pp'))
    assert output.shape == (*case.y.shape, 3)
    lane = jax.eval_shape(lambda: results(case.lane, num_state=3))
    assert shapes['empty'] == {n: (LANES, *e.shape) for n, e in lane['empty'].items()}


def test_mapping_a_mapped_primitive_over_x_alone_makes_a_batched_one():
    xs, weights = jnp.ones((4, 3)), jnp.ones((2, 3, 5))
    heads = jax.vmap(ops.matmul, (None, 0))
    jaxpr = jax.make_jaxpr(jax.vmap(heads, (0, None)))(xs, weights)
    (form,) = cases.etp_primitives(jaxpr)
    assert form.batched and form.root is ops.etp_mv_p
    assert form.originals() == [ops.etp_mv_p.mapped((None, 0)), ops.etp_mv_p]
    more = jax.make_jaxpr(jax.vmap(jax.vmap(heads, (0, None)), (0, None)))(xs[None], weights)
    assert [outer.original for outer in cases.etp_primitives(more)] == [form]


def loss(call, x, weights):
    return jnp.sum(jnp.sin(call(x, weights)))


@pytest.mark.tier(quick=8)
@pytest.mark.parametrize('case', FILLED, ids=str)
def test_vmap_binds_the_primitive_whose_rules_these_are(case):
    lanes = mapped(case, (0,) * (len(case.weights) + (case.x is not None)))
    x, weights = lanes.draw()
    over = jax.vmap(case.call, (None if x is None else 0, 0))
    assert_close(over(x, weights), lanes.call(x, weights))
    for fn in (over, jax.jit(over), jax.grad(functools.partial(loss, over), 1)):
        names = primitives_in(jax.make_jaxpr(fn)(x, weights))
        assert names.count(f'{case.primitive.name}_vmap') == 1


def gain():
    return unregistered(lambda x, w: x * w)


def unregistered(fn):
    one = lambda params: {'weight': 1}
    return ops.ETPPrimitive(ops.ETPPrimitiveSpec('etp_test', fn, trainable_invars_fn=one))


def test_rules_registered_after_mapping_are_found(registries_are_restored):
    primitive = gain()
    form = primitive.mapped((0, 0)).mapped((None, 0))
    assert all(form.optional_rule(slot) is None for slot in ops.RULE_SLOTS)
    primitive.register_xy_to_dw(lambda x, d, weights: {'weight': x * d})
    x, ones = jnp.full((2, 3), 2.0), jnp.ones((4, 2, 3))
    assert_close(form.bound_rule('xy_to_dw', {})(x, ones, {'weight': ones}), {'weight': 2 * ones})


def test_a_rule_is_registered_for_the_original_only():
    form = ops.etp_mm_p.mapped((0, 0))
    message = "'etp_mm_vmap' is 'etp_mm' under jax.vmap.*Register 'yw_to_w' there"
    for register in (form.register_yw_to_w, lambda rule: form.register_etp_rules(yw_to_w=rule)):
        with pytest.raises(RuleContractError, match=message):
            register(lambda d, trace: trace)
    assert not form.own_rules


def test_a_broken_rule_behind_a_mapped_primitive_is_named(registries_are_restored):
    primitive, d = gain(), jnp.ones((2, 3))
    primitive.register_yw_to_w(lambda d, trace: {'bias': d})
    carry = primitive.mapped((0, 0)).bound_rule('yw_to_w', {})
    with pytest.raises(RuleContractError, match=r"'yw_to_w' of 'etp_test' .* keys \['bias'\]"):
        carry(d, {'weight': d})


def test_the_number_of_outputs_of_an_original_is_known_from_its_mapped_form():
    primitive = unregistered(lambda x, w, *, several=True: (x * w, x) if several else x * w)
    jax.eval_shape(jax.vmap(primitive.bind), jnp.ones(2), jnp.ones(2))
    assert primitive.multiple_results and primitive.mapped((0, 0)).multiple_results
    with pytest.raises(RuleContractError, match='one array in one call and a tuple in another'):
        primitive.bind(jnp.ones(2), jnp.ones(2), several=False)
