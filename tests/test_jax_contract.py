"""The package's needs of JAX's internals, one test each: a new release breaks a named test."""

import functools
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src import sharding_impls as _shardings
from jax.sharding import PartitionSpec as P

import braintrace
from braintrace import _jax
from braintrace._jax.places import hidden_files
from braintrace._jax.platforms import is_alone
from braintrace._rules import entries

X = jnp.arange(12.0).reshape(3, 4)


def equations(fn, *args):
    jaxpr, _ = _jax.trace(fn, *args)
    return jaxpr.eqns


def test_trace_splits_constants_from_the_jaxpr():
    captured = jnp.arange(4.0) * 2
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


TRANSFORMS = {
    'jit': jax.jit,
    'vmap': jax.vmap,
    'grad': jax.grad,
    'checkpoint': jax.checkpoint,
    'cond': lambda f: lambda x: lax.cond(x > 0, f, f, x),
    'scan': lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, 2),
}


@pytest.mark.parametrize('name', TRANSFORMS)
def test_each_transformation_has_a_trace_of_its_own(name):
    seen = []
    assert _jax.is_outermost()

    def inner(x):
        assert not _jax.is_outermost()
        seen.append(_jax.current_trace())
        return x.sum()

    def outer(x):
        seen.append(_jax.current_trace())
        jax.named_call(inner, name='same')(x)
        return TRANSFORMS[name](inner)(x)

    jax.make_jaxpr(outer)(jnp.ones(3) if name == 'vmap' else jnp.ones(()))
    assert seen[0] is seen[1] and all(trace is not seen[0] for trace in seen[2:]) and seen[2:]


def test_flags_are_read_outside_of_with_blocks():
    outside = _jax.config_values()
    assert outside == dict(jax.config.values)
    with jax.enable_x64(not outside['jax_enable_x64']):
        assert _jax.config_values() == outside != dict(jax.config.values)


def test_a_jitted_call_holds_its_body_where_inlining_looks_for_it():
    (eqn,) = equations(jax.jit(lambda x: jnp.sin(x) * 2), X)
    body, consts = _jax.closed_jaxpr(_jax.inlinable(eqn))
    assert [e.primitive.name for e in body.eqns] == ['sin', 'mul'] and consts == []


@pytest.mark.parametrize(
    'fn',
    [
        jnp.sin,
        jax.nn.relu,
        jax.nn.softmax,
        lambda x: jnp.roll(x, 1),
        lambda x: x[:2],
        jax.custom_vjp(lambda x: x * 2),
    ],
    ids=['jit', 'custom_jvp', 'softmax', 'roll', 'slice', 'custom_vjp'],
)
def test_an_equation_evaluates_to_what_jax_computes(fn):
    if isinstance(fn, jax.custom_vjp):
        fn.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))
    (found,) = _jax.walk(*_jax.trace(fn, X), [X], lambda eqn, ins: _jax.bind(eqn, *ins))
    assert (found == fn(X)).all()


def test_the_place_of_an_equation_is_this_file():
    (eqn,) = equations(lambda x: jnp.sin(x), X)
    assert 'test_jax_contract.py:' in _jax.location(eqn.source_info)


def test_places_skip_every_file_of_the_package_but_the_cells():
    package = Path(braintrace.__file__).absolute().parent
    hidden = hidden_files()
    assert all(path.exists() for path in hidden)
    shown = {
        path.relative_to(package).as_posix()
        for path in package.rglob('*.py')
        if not any(str(path).startswith(str(entry)) for entry in hidden)
    }
    assert {name.split('/')[0] for name in shown} == {'nn'}
    assert 'nn/_cells.py' in shown and 'nn/_linear.py' not in shown


@pytest.mark.parametrize(
    'fn, name',
    [
        (lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)[0], 'scan'),
        (lambda x: lax.while_loop(lambda c: c.sum() < 0, jnp.sin, x), 'while'),
        (lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), 'cond'),
        (jax.checkpoint(jnp.sin), 'remat2'),
    ],
)
def test_control_flow_holds_its_bodies_in_its_parameters(fn, name):
    eqn = next(e for e in equations(fn, X) if e.primitive.name == name)
    inner = [
        e.primitive.name for j in _jax.sub_jaxprs(eqn.params) for e in _jax.closed_jaxpr(j)[0].eqns
    ]
    assert 'sin' in inner


def test_stop_gradient_and_select_are_primitives():
    eqns = equations(lambda x: lax.stop_gradient(lax.select(x > 0, x, -x)), X)
    assert {'stop_gradient', 'select_n'} <= {e.primitive.name for e in eqns}


def the(name, fn, *args):
    (found,) = (e for e in equations(fn, *args) if e.primitive.name == name)
    return found


def closed_over(fn, *args):
    """A call's body that holds constants, as custom rules and old transformations leave it."""
    closed = jax.make_jaxpr(fn)(*args)
    assert closed.consts
    return closed


def evaluate(body, consts, *args):
    return jax.core.eval_jaxpr(body, consts, *args)


def by_hand(parts, operands):
    """A scan as a loop over the body, in the order that ``ScanParts`` states."""
    k, n = parts.num_consts, parts.num_carry
    consts, carry, xs = operands[:k], operands[k : k + n], operands[k + n :]
    ys = []
    for i in range(parts.length)[:: -1 if parts.reverse else 1]:
        out = evaluate(parts.body, parts.consts, *consts, *carry, *(x[i] for x in xs))
        carry, ys = out[:n], [*ys, out[n:]]
    stacked = [jnp.stack(y[::-1] if parts.reverse else y) for y in zip(*ys)]
    return [*carry, *stacked]


def check(eqn, parts, run):
    """The equation on ramp operands equals ``run`` on its parts."""

    def operand(a):
        ramp = lambda aval: jnp.arange(1.0, aval.size + 1).reshape(aval.shape) / 7
        return a.val if isinstance(a, _jax.Literal) else ramp(a.aval).astype(a.aval.dtype)

    operands = [operand(a) for a in eqn.invars]
    for got, want in zip(run(parts, operands), _jax.bind(eqn, *operands), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def scanned(reverse):
    def step(a, b, carry, x):
        first, second = carry
        return (first * a + x[0], second - b.sum()), (first * 3, x[1] + second)

    return lambda a, b, first, second, xs: lax.scan(
        lambda c, x: step(a, b, c, x), (first, second), xs, reverse=reverse, unroll=2
    )


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('reverse', [False, True])
def test_a_scan_has_its_constants_then_its_carry_then_what_it_runs_over(reverse):
    a, b, xs = jnp.arange(3.0), jnp.arange(2.0), (jnp.ones((5, 3)), jnp.ones((5,)))
    eqn = the('scan', scanned(reverse), a, b, a + 1, jnp.float32(2), xs)
    parts = _jax.scan_parts(eqn)
    assert parts[1:] == ([], 2, 2, 5, reverse, 2)
    assert [v.aval.shape for v in parts.body.invars] == [(3,), (2,), (3,), (), (3,), ()]
    assert [v.aval.shape for v in parts.body.outvars] == [(3,), (), (3,), ()]
    check(eqn, parts, by_hand)


def test_a_differentiated_scan_keeps_that_order():
    def total(a, x):
        return lax.scan(lambda c, y: (jnp.sin(c * a * y), c), a, x)[0].sum()

    a, x = jnp.arange(1.0, 4.0), jnp.ones((4, 3)) / 2
    (call,) = equations(jax.jit(jax.grad(total)), a, x)
    body, _ = _jax.closed_jaxpr(_jax.inlinable(call))
    scans = [e for e in body.eqns if e.primitive.name == 'scan']
    assert [_jax.scan_parts(e).reverse for e in scans] == [False, True]
    for eqn in scans:
        check(eqn, _jax.scan_parts(eqn), by_hand)


def test_the_constants_of_a_body_are_apart_from_its_operands():
    captured = jnp.arange(4.0) * 2
    body, consts = _jax.closed_jaxpr(closed_over(lambda x, y: x + captured * y, X, X))
    assert len(body.constvars) == len(consts) == 1 and len(body.invars) == 2
    (out,) = evaluate(body, consts, X, X + 1)
    assert (out == X + captured * (X + 1)).all()


def test_a_while_has_the_constants_of_its_condition_then_of_its_body_then_the_carry():
    def loop(limit, by, one, two):
        turn = lambda c: (c[0] + by.sum(), c[1] * by[0])
        return lax.while_loop(lambda c: c[0].sum() < limit[0], turn, (one, two))

    eqn = the('while', loop, *(jnp.ones(n) for n in (1, 2, 3, 4)))
    parts = _jax.while_parts(eqn)
    assert (parts.cond_nconsts, parts.body_nconsts) == (1, 1)
    assert (parts.cond_consts, parts.body_consts) == ([], [])
    sizes = [[v.aval.size for v in of.invars] for of in (eqn, parts.cond, parts.body)]
    assert sizes == [[1, 2, 3, 4], [1, 3, 4], [2, 3, 4]]
    assert [v.aval.dtype for v in parts.cond.outvars] == [bool]

    def run(parts, operands):
        carry = operands[2:]
        while evaluate(parts.cond, parts.cond_consts, operands[0], *carry)[0]:
            carry = evaluate(parts.body, parts.body_consts, operands[1], *carry)
        return carry

    check(eqn, parts, run)


@pytest.mark.parametrize('index', range(3))
def test_a_switch_has_its_index_then_what_every_branch_reads(index):
    def choose(i, x, y):
        each = [lambda a: (a + y, a), lambda a: (a, a * y), lambda a: (y * 3, y)]
        return lax.switch(i, each, x)

    eqn = the('cond', choose, index, X, X)
    branches = _jax.cond_branches(eqn)
    assert eqn.invars[0].aval.dtype == jnp.int32 and eqn.invars[0].aval.shape == ()
    assert [(len(body.invars), consts) for body, consts in branches] == [(2, [])] * 3
    expected = _jax.bind(eqn, jnp.int32(index), X + 1, X + 2)
    got = evaluate(*branches[index], X + 1, X + 2)
    assert all((a == b).all() for a, b in zip(got, expected, strict=True))


def test_a_cond_lists_its_false_branch_first():
    eqn = the('cond', lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), X)
    names = [[e.primitive.name for e in body.eqns] for body, _ in _jax.cond_branches(eqn)]
    assert eqn.invars[0].aval.dtype == jnp.int32 and names == [['cos'], ['sin']]


def test_a_checkpoint_has_its_operands_in_the_order_of_its_body():
    policy = jax.checkpoint_policies.dots_saveable
    product = jax.checkpoint(lambda x, y: (x @ y, x), policy=policy, prevent_cse=False)
    eqn = the('remat2', product, X, X.T + 1)
    body, consts = _jax.call_body(eqn)
    assert _jax.recomputed(eqn) == (policy, False) and consts == []
    check(eqn, body, lambda body, operands: evaluate(body, consts, *operands))


def test_a_custom_vmap_that_none_surrounds_is_a_call():
    product = jax.custom_batching.sequential_vmap(lambda x, y: jnp.sin(x) @ y)
    eqn = the('custom_vmap_call', product, X, X.T + 1)
    body, consts = _jax.call_body(eqn)
    check(eqn, body, lambda body, operands: evaluate(body, consts, *operands))


MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ('a', 'b'))


@pytest.mark.parametrize('check_vma', [False, True])
def test_a_shard_map_has_a_spec_for_each_operand_and_each_result(check_vma):
    captured, specs = jnp.arange(4.0), (P('a'), P(('a', 'b'), None))
    fn = jax.shard_map(
        lambda x, y: (x['k'] + y + captured, lax.psum(y, ('a', 'b'))),
        mesh=MESH,
        check_vma=check_vma,
        in_specs=specs,
        out_specs=(P(('a', 'b')), P()),
    )
    eqn = the('shard_map', lambda x, y: fn({'k': x}, y), X, X + 1)
    parts = _jax.shard_map_parts(eqn)
    assert parts.consts == [] and parts.check_vma is check_vma
    assert parts.mesh.shape == {'a': 1, 'b': 1} and parts.manual_axes == {'a', 'b'}
    assert parts.in_specs[-2:] == specs and parts.out_specs == (P(('a', 'b')), P())
    assert len(parts.in_specs) == len(parts.body.invars) == len(eqn.invars)


def test_a_shard_map_names_the_axes_that_it_maps():
    fn = jax.shard_map(jnp.sin, mesh=MESH, in_specs=P('a'), out_specs=P('a'), axis_names={'a'})
    assert _jax.shard_map_parts(the('shard_map', fn, X)).manual_axes == {'a'}


def inside_a_shard_map(fn):
    """Parts and body equations of a ``shard_map`` along ``a`` of an abstract mesh of four."""
    mesh = jax.sharding.AbstractMesh((4,), ('a',), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P('a'), out_specs=P('a'))
    parts = _jax.shard_map_parts(the('shard_map', mapped, jnp.ones((8, 3))))
    return parts, parts.body.eqns


def test_an_abstract_mesh_names_the_axes_and_the_sizes_of_a_shard_map():
    parts, _ = inside_a_shard_map(jnp.sin)
    assert parts.sizes == {'a': 4}
    with parts.named_axes():
        assert lax.axis_size('a') == 4
    with parts.manual_mesh():
        assert jax.sharding.get_abstract_mesh().manual_axes == ('a',)


def test_the_types_of_a_shard_map_are_kept_by_these_primitives():
    def body(x):
        whole = lax.all_gather(x, 'a', to='invarying')
        return lax.pcast(lax.psum(x, 'a'), 'a', to='varying') + whole.sum(0)

    eqns = {e.primitive.name: e for e in inside_a_shard_map(body)[1]}
    assert set(eqns) == {'psum_invariant', 'pvary', 'all_gather_invariant', 'reduce_sum', 'add'}
    assert eqns['psum_invariant'].params == {'axes': ('a',)}
    read = {'all_gather_dimension', 'axis_name', 'tiled'}
    assert read <= set(eqns['all_gather_invariant'].params)


def plainly(body, consts, args):
    """The body of a ``shard_map`` without its types."""

    def step(eqn, ins):
        if eqn.primitive.name == 'pvary':
            return ins
        params = _jax.with_bodies(eqn, PARTS, plainly)
        return _jax.bind(eqn, *ins, params=params, ctx=_jax.WithoutMesh(eqn.ctx))

    return _jax.walk(body, consts, args, step)


PARTS = inside_a_shard_map(jnp.sin)[0]


def test_values_from_inside_a_shard_map_keep_neither_its_mesh_nor_its_types():
    def body(x):
        scanned = lax.scan(lambda c, row: (c + row + jnp.zeros(3), None), x[0] * 2, x)[0]
        return jax.checkpoint(jnp.sin)(x) + scanned + jnp.zeros((2, 3))

    parts, _ = inside_a_shard_map(body)
    jaxpr, _ = _jax.trace(lambda x: plainly(parts.body, [], [x]), jnp.ones((2, 3)))
    assert {e.primitive.name for e in jaxpr.eqns} >= {'scan', 'remat2', 'broadcast_in_dim'}
    inner = (e for eqn in jaxpr.eqns for j in _jax.sub_jaxprs(eqn.params) for e in j.eqns)
    for eqn in [*jaxpr.eqns, *inner]:
        assert eqn.ctx.cur_abstract_mesh.empty
        assert all(v.aval.sharding.mesh.empty and not v.aval.mat.varying for v in eqn.outvars)


@pytest.mark.parametrize('kind', ['jvp', 'vjp'])
def test_the_rules_of_a_custom_call_follow_when_they_are_asked_for(kind):
    zeros = lambda x: jnp.zeros((2, 3), x.dtype)
    own = getattr(jax, f'custom_{kind}')(jnp.sin)
    if kind == 'jvp':
        own.defjvp(lambda p, t: (own(p[0]), 3 * t[0] + zeros(p[0])))
    else:
        own.defvjp(lambda x: (jnp.sin(x), x + zeros(x)), lambda x, g: (3 * g + 0 * x,))
    parts, (eqn,) = inside_a_shard_map(own)
    params = _jax.with_bodies(eqn, parts, plainly)
    late = params['jvp_jaxpr_fun' if kind == 'jvp' else 'fwd_jaxpr_thunk']
    body, consts, *rest = late.call_wrapped(kind == 'vjp')
    assert len(body.outvars) == 2 and not any(v.aval.mat.varying for v in body.outvars)
    assert consts == [] and rest == ([[False]] if kind == 'jvp' else [])
    bound = lambda v: _jax.bind(eqn, v, params=params, ctx=_jax.WithoutMesh(eqn.ctx))[0].sum()
    assert (jax.grad(bound)(jnp.ones((2, 3)) / 2) == 3).all()


def test_a_value_names_the_axes_that_it_is_mapped_along():
    seen = []

    def inner(x, y):
        sums = lax.psum(x, 'a'), lax.psum(x + y, ('a', 'b'))
        seen.extend(map(_jax.mapped_axes, (x, y, x + y, jnp.ones(3), *sums)))
        return x

    rows = jax.vmap(inner, (None, 0), axis_name='b')
    jax.eval_shape(jax.vmap(rows, (0, None), axis_name='a'), X, X)
    assert seen == [{'a'}, {'b'}, {'a', 'b'}, set(), set(), set()]


def test_new_equations_can_name_the_place_of_an_old_one():
    (old,) = equations(jnp.sin, X)

    def elsewhere(x):
        with _jax.at_location(old.source_info):
            return jnp.cos(x)

    (new,) = equations(elsewhere, X)
    assert new.primitive.name == 'cos'
    assert _jax.location(new.source_info) == _jax.location(old.source_info)


def test_functions_with_their_own_derivative_are_custom_calls():
    double = lambda x: x * 2
    own_vjp, own_jvp = jax.custom_vjp(double), jax.custom_jvp(double)
    own_vjp.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))
    own_jvp.defjvp(lambda p, t: (p[0] * 2, t[0] * 2))
    for fn in (own_jvp, own_vjp):
        (eqn,) = equations(fn, X)
        body, consts = _jax.closed_jaxpr(eqn.params['call_jaxpr'])
        assert eqn.primitive.name in _jax.CUSTOM_CALLS and consts == []
        assert [e.primitive.name for e in body.eqns] == ['mul']
    assert equations(jnp.sin, X)[0].primitive.name not in _jax.CUSTOM_CALLS


def test_other_equations_have_no_parts():
    (eqn,) = equations(jnp.sin, X)
    names = 'scan_parts while_parts cond_branches recomputed call_body shard_map_parts'.split()
    assert not [name for name in names if getattr(_jax, name)(eqn) is not None]


def test_varying_names_the_shards_along_which_a_value_differs():
    seen = []

    def body(x, y):
        seen.extend(map(_jax.varying, (x, y, x + y, lax.psum(x, 'a'))))
        return x

    fn = jax.shard_map(body, mesh=MESH, in_specs=(P('a'), P()), out_specs=P('a'))
    fn(jnp.ones(2), jnp.ones(2))
    assert seen == [{'a'}, set(), {'a'}, set()] and _jax.varying(jnp.ones(2)) == set()


@pytest.mark.parametrize('manual', [False, True])
def test_a_lowering_rule_knows_whether_devices_share_the_program(manual):
    seen = []
    primitive = _jax.Primitive('contract_alone')
    primitive.def_abstract_eval(lambda x: x)

    def lower(ctx, x):
        seen.append(is_alone(ctx.module_context.axis_context))
        return [x]

    _jax.mlir.register_lowering(primitive, lower)
    fn = primitive.bind
    auto = (jax.sharding.AxisType.Auto,)
    if manual:
        mesh = jax.sharding.AbstractMesh((4,), ('i',), axis_types=auto)
        fn = jax.shard_map(fn, mesh=mesh, in_specs=P('i'), out_specs=P('i'), check_vma=False)
        x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=jax.NamedSharding(mesh, P('i')))
    else:
        x = jnp.ones(8)
    jax.jit(fn).trace(x).lower(lowering_platforms=('cpu',))
    assert seen == [True]
    shared = _shardings.ShardingContext(num_devices=2)
    half = jax.sharding.AbstractMesh((2, 2), ('i', 'j'), axis_types=auto * 2)
    partly = _shardings.SPMDAxisContext(half, frozenset({'i'}))
    assert not is_alone(shared) and not is_alone(partly)


def test_opened_has_no_calls():
    w = jnp.arange(6.0).reshape(2, 3)

    def fn(x):
        return [jax.jit(lambda x: jax.jit(jnp.sin)(x @ w) + 1)(x)]

    x = jnp.ones((4, 2))
    jaxpr, consts, shapes = _jax.opened(fn, [x])
    assert shapes[0].shape == (4, 3)
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ['dot_general', 'sin', 'add']
    np.testing.assert_allclose(_jax.evaluate(jaxpr, consts, [x])[0], fn(x)[0])


# -- a choice by platform --------------------------------------------------------------------------


on_a_cpu = pytest.mark.skipif(jax.default_backend() != 'cpu', reason='asks what a CPU runs')


def nested(traced: Counter, x):
    """A choice inside of both sides of another one."""

    def made(name, y):
        traced[name] += 1
        return y

    def inside(where):
        return _jax.platform_dependent(
            x,
            cpu=lambda x: made(f'{where}, own', x + 1),
            tpu=lambda x: made(f'{where}, tpu', x + 3),
            default=lambda x: made(f'{where}, other', x + 2),
        )

    return _jax.platform_dependent(
        cpu=lambda: inside('own') * 10, default=lambda: inside('other') * 100
    )


@on_a_cpu
def test_a_choice_inside_of_a_choice_is_traced_for_the_platforms_that_are_left():
    traced = Counter()
    assert jax.jit(functools.partial(nested, traced))(1.0) == 20
    assert traced == {'own, own': 1, 'other, tpu': 1, 'other, other': 1}
    lowered = jax.jit(functools.partial(nested, Counter())).trace(1.0)
    others = {p: lowered.lower(lowering_platforms=(p,)).as_text() for p in ('cpu', 'cuda', 'tpu')}
    for platform, added in (('cpu', 1), ('cuda', 2), ('tpu', 3)):
        numbers = {k for k in (1, 2, 3) if f'dense<{k}.000000e+00>' in others[platform]}
        assert numbers == {added}, platform


@on_a_cpu
def test_a_choice_after_another_one_is_free_again():
    first = _jax.platform_dependent(cpu=lambda: 1, default=lambda: 2)
    assert (first, _jax.platform_dependent(cpu=lambda: 3, default=lambda: 4)) == (1, 3)
    with pytest.raises(ZeroDivisionError):
        _jax.platform_dependent(cpu=lambda: 1 / 0, default=lambda: 0)
    assert _jax.platform_dependent(tpu=lambda: 5, default=lambda: 6) == 6


@pytest.mark.parametrize('lanes', [1, 2, 3, 4, 7, 13])
@pytest.mark.parametrize('fused', [1, 2, 4])
def test_a_sum_over_lanes_has_each_lane_once(lanes, fused):
    values = jnp.asarray([2.0**k for k in range(lanes)])
    total = entries.sum_over_lanes(lambda b: values[b], lanes, fused)
    assert total == 2.0**lanes - 1
