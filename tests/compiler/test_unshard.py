"""The rewritten ``shard_map`` against the real one, which runs on four devices in a process."""

import json
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import braintrace
from braintrace import _jax
from braintrace.errors import NotSupportedError
from braintrace.extra._unshard import unsharded
from tests.functional.plain import on_devices

MESHES = {'square': {'a': 2, 'b': 2}, 'four': {'a': 4}}
AB, BA = ('a', 'b'), ('b', 'a')


class Case(NamedTuple):
    """A body with its specs, on a mesh: shapes of its arguments, values of ``check_vma``, whether
    (and without jit) to differentiate.
    """

    fn: Any
    ins: Any = P('a')
    outs: Any = P('a')
    args: tuple = ((8, 3),)
    mesh: str = 'four'
    checks: tuple = (True, False)
    gradient: bool = True
    eager: bool = False


@jax.custom_vjp
def tripled(x):
    return jnp.sin(x)


tripled.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (3 * g * jnp.cos(x),))


@jax.custom_vjp
def summed(x, w):
    return jnp.sin(x) * w


summed.defvjp(
    lambda x, w: (jnp.sin(x) * w, (x, w)),
    lambda r, g: (3 * g * jnp.cos(r[0]) * r[1], lax.psum((g * jnp.sin(r[0])).sum(), 'a')),
)


@jax.custom_jvp
def doubled(x, y):
    return x * lax.pmean(y, 'a')


@doubled.defjvp
def _doubled_jvp(primals, tangents):
    x, y = primals
    return doubled(x, y), 2 * tangents[0] * lax.pmean(y, 'a')


def running(x, y):
    """A scan whose body holds a collective, a custom rule and a conditional."""

    def step(carry, row):
        new = jax.nn.silu(carry * 0.5 + lax.psum(row, 'a') * x)
        return lax.cond(y.sum() > 0, lambda v: v * y[0], jnp.sin, new), carry.sum()

    last, sums = lax.scan(step, x * 0, x)
    return last + sums.sum()


def cell(h, x, w, b):
    return jnp.tanh(braintrace.matmul(jnp.concatenate([h, x], -1), w, b))


def model_parallel(h, w):
    """Columns of the weight along b, rows of the batch along a."""
    y = lax.all_gather(braintrace.matmul(h, w), 'b', axis=1, tiled=True)
    return jnp.tanh(y) - lax.pmean(y, 'a').sum(0)


def gathered_rows(x):
    return x + lax.all_gather(x, AB, axis=1).sum(1) + lax.all_gather(x, BA, tiled=True)[2:4]


def scattered(x):
    whole = jnp.concatenate([x * i for i in range(4)])
    first = lax.psum_scatter(whole, AB, tiled=True)
    return first + lax.psum_scatter(whole.reshape(3, 4, -1), BA, scatter_dimension=1).reshape(
        x.shape
    )


CASES = {
    'custom derivatives': Case(
        lambda x: (
            jax.nn.silu(x)
            + jax.nn.relu(x - 1)
            + jax.nn.logsumexp(x, -1, keepdims=True)
            + tripled(x)
        ),
        eager=True,
    ),
    'custom derivatives with collectives': Case(
        lambda x, y: doubled(x, y) + summed(x, jnp.asarray(2.0, x.dtype)),
        (P('a'), P('a')),
        args=((8, 3), (8, 3)),
        eager=True,
    ),
    'jaxprs of their own': Case(
        lambda x: (
            x.at[1].add(x[0], unique_indices=True).at[0].mul(2.0)
            + lax.reduce(x, jnp.asarray(1.0, x.dtype), lambda a, b: a * jnp.tanh(b), (1,))[:, None]
        ),
        gradient=False,
    ),
    'scatter': Case(lambda x: x.at[1].add(x[0]).at[jnp.array([0, 1])].multiply(2.0)),
    'jit': Case(
        jax.jit(lambda x: tripled(x) @ jnp.ones((3, 3)) + jnp.where(x > 1, x, jnp.zeros_like(x)))
    ),
    'control flow': Case(running, (P('a'), P('a')), args=((8, 3), (4, 3)), eager=True),
    'while': Case(
        lambda x: lax.while_loop(lambda v: v.sum() < 100, lambda v: v * 2, x), gradient=False
    ),
    'checkpoint': Case(
        lambda x: jax.checkpoint(lambda v: jnp.tanh(jax.nn.relu(v)) - lax.pmean(v, 'a'))(x),
        eager=True,
    ),
    'a gradient within': Case(lambda x: jax.grad(lambda v: lax.psum((v**3).sum(), 'a'))(x)),
    'index': Case(lambda x: x * jnp.arange(3.0) + lax.axis_index('a') + lax.axis_size('a')),
    'random': Case(
        lambda x: (
            x
            + jax.random.normal(jax.random.fold_in(jax.random.key(0), lax.axis_index('a')), x.shape)
        )
    ),
    'pmean and pmax': Case(lambda x: x * lax.pmax(lax.stop_gradient(x), 'a') - lax.pmean(x, 'a')),
    'cast': Case(lambda x: lax.pcast(lax.psum(x, 'a'), 'a', to='varying')),
    'cast of a weight': Case(
        lambda x, w: x * lax.pcast(lax.pcast(w, 'a', to='reduced'), 'a', to='varying'),
        (P('a'), P()),
        args=((8, 3), (3,)),
        checks=(True,),
    ),
    'where it lies': Case(
        lambda x: lax.with_sharding_constraint(jax.sharding.reshard(x, P()) * 2, P()) + 1
    ),
    'a map within': Case(lambda x: jax.vmap(lambda row: lax.psum(row, 'a') * row)(x)),
    'all_gather': Case(
        lambda x: lax.all_gather(x, 'a', tiled=True)[:2] + lax.all_gather(x, 'a', axis=1).sum(1)
    ),
    # JAX 0.10 differentiates it wrongly without check_vma.
    'all_gather to all alike': Case(
        lambda x: lax.all_gather(x, 'a', tiled=True, to='invarying'), outs=P(), checks=(True,)
    ),
    'psum_scatter': Case(lambda x: lax.psum_scatter(jnp.concatenate([x, 2 * x]), 'a', tiled=True)),
    'ppermute of some': Case(
        lambda x: lax.ppermute(x, 'a', [(0, 1), (3, 0)]) + lax.ppermute(x, 'a', [])
    ),
    'all_to_all': Case(
        lambda x: lax.all_to_all(jnp.concatenate([x, 2 * x]), 'a', 0, 1, tiled=True)
    ),
    'replicated results': Case(
        lambda x: (lax.psum(x, 'a'), jnp.zeros(3), lax.pmean(x.sum(), 'a')), outs=P()
    ),
    'results that no type shows to be replicated': Case(
        lambda x: lax.all_gather(x, 'a', tiled=True), outs=P(), checks=(False,)
    ),
    'replicated weights': Case(
        cell, (P('a'), P('a'), P(), P()), args=((8, 3), (8, 2), (5, 3), (3,))
    ),
    'sharded weights': Case(
        lambda x, w, b: lax.psum(braintrace.matmul(x, w), 'a') + b,
        (P(None, 'a'), P('a'), P()),
        P(),
        args=((2, 8), (8, 3), (3,)),
    ),
    'a shared loss': Case(
        lambda x, w: lax.pmean((braintrace.matmul(x, w) ** 2).sum(), 'a'),
        (P('a'), P()),
        P(),
        args=((8, 3), (3, 2)),
    ),
    'two axes of one dimension': Case(lambda x: x - lax.pmean(x, AB), P(AB), P(BA), mesh='square'),
    'two axes in two dimensions': Case(
        lambda x: (x - lax.pmean(x, 'b'), lax.psum(x, 'a')),
        P('a', None, 'b'),
        (P('b', None, 'a'), P(None, 'b')),
        args=((4, 3, 6),),
        mesh='square',
    ),
    'collectives over two axes': Case(gathered_rows, P(AB), P(AB), mesh='square'),
    'scatter over two axes': Case(scattered, P(AB), P(AB), args=((8, 6),), mesh='square'),
    'all_to_all over two axes': Case(
        lambda x: lax.all_to_all(jnp.concatenate([x, 2 * x]), AB, 0, 0, tiled=True),
        P(AB),
        P(AB),
        mesh='square',
    ),
    'model parallel': Case(
        model_parallel,
        (P('a'), P(None, 'b')),
        P('a'),
        args=((4, 3), (3, 4)),
        mesh='square',
        checks=(False,),
    ),
    'a cell on two axes': Case(
        cell, (P(AB), P(AB), P(), P()), P(AB), args=((8, 3), (8, 2), (5, 3), (3,)), mesh='square'
    ),
}


def values(case: Case) -> list:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.uniform(0.3, 1.5, shape)) for shape in case.args]


def sharded(case: Case, mesh, check: bool):
    return jax.shard_map(
        case.fn, mesh=mesh, in_specs=case.ins, out_specs=case.outs, check_vma=check
    )


def plain(fn, *args):
    """``fn`` with its one ``shard_map`` replaced: same arguments, flat results."""
    jaxpr, consts = _jax.trace(fn, *args)
    (eqn,) = (e for e in jaxpr.eqns if e.primitive.name == 'shard_map')
    run = unsharded(eqn)

    def call(*values):
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *values]))
        return run(*(a.val if isinstance(a, _jax.Literal) else env[a] for a in eqn.invars))

    return call


def loss(fn):
    return lambda *args: sum(jnp.cos(y).sum() for y in jax.tree.leaves(fn(*args)))


def differences(case: Case, mesh, check: bool) -> float:
    """The largest difference between plain and real function, and between their gradients."""
    args, real = values(case), sharded(case, mesh, check)
    fn, every = plain(real, *args), tuple(range(len(args)))

    def both(fn):
        """The function and its gradient in one."""
        grad = jax.grad(loss(fn), every) if case.gradient else lambda *args: ()
        return lambda *args: (fn(*args), grad(*args))

    wanted = jax.tree.leaves(jax.jit(both(real))(*args))
    worst = 0.0
    for run in (jax.jit(both(fn)), both(fn))[: 1 + case.eager]:
        for a, b in zip(jax.tree.leaves(run(*args)), wanted, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype, (a, b)
            worst = max(worst, float(np.abs(np.asarray(a) - np.asarray(b)).max()))
    return worst


def main(name: str) -> None:
    """Print what differs on the devices of this process, as JSON."""
    jax.config.update('jax_enable_x64', True)
    sizes, found = MESHES[name], {}
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(*sizes.values()), tuple(sizes))
    for label, case in CASES.items():
        for check in case.checks if case.mesh == name else ():
            try:
                found[f'{label}, check_vma={check}'] = differences(case, mesh, check)
            except Exception as error:
                found[f'{label}, check_vma={check}'] = f'{type(error).__name__}: {error}'
    print(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize('name', MESHES)
def test_values_and_gradients_are_those_of_shard_map_on_four_devices(name):
    found = on_devices(__file__, 4, ARGUMENT=name)
    assert len(found) == sum(len(case.checks) for case in CASES.values() if case.mesh == name)
    assert all(isinstance(off, float) and off < 1e-10 for off in found.values()), found


# ---- what needs no devices: the mesh is abstract ----


def abstract_mesh(name: str):
    sizes = MESHES[name]
    return jax.sharding.AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * len(sizes)
    )


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for body in _jax.sub_jaxprs(eqn.params):
            yield from equations(_jax.closed_jaxpr(body)[0])


OF_A_MESH = {*'shard_map pvary psum_invariant all_gather reduce_scatter ppermute'.split()}


def traced(case: Case, check: bool = True):
    """The jaxpr of a case without ``shard_map``."""
    args = values(case)
    return _jax.trace(plain(sharded(case, abstract_mesh(case.mesh), check), *args), *args)[0]


def ops_of(label, check=True):
    found = equations(traced(CASES[label], check))
    return [eqn for eqn in found if eqn.primitive.name.startswith('etp')]


@pytest.mark.parametrize('check', [True, False])
@pytest.mark.parametrize('label', ['replicated weights', 'a cell on two axes'])
def test_an_op_with_replicated_weights_is_one_op_on_the_whole_batch(label, check):
    (op,) = ops_of(label, check)
    place = _jax.location(op.source_info)
    assert op.primitive.name == 'etp_mm' and 'test_unshard.py' in place and '(cell)' in place
    assert [v.aval.shape for v in op.invars] == [(8, 5), (5, 3), (3,)]


def test_an_op_with_its_own_weights_in_every_block_is_one_mapped_op():
    assert [op.primitive.original.name for op in ops_of('sharded weights')] == ['etp_mm']


@pytest.mark.parametrize('label', CASES)
def test_nothing_of_the_mesh_is_left(label):
    case = CASES[label]
    jaxpr = traced(case, case.checks[0])
    for eqn in equations(jaxpr):
        assert eqn.primitive.name not in OF_A_MESH
        named = (np.atleast_1d(eqn.params.get(key, ())) for key in ('axes', 'axis_name'))
        assert not {*AB} & {axis for axes in named for axis in axes}
        assert eqn.ctx.cur_abstract_mesh.empty
        assert all(v.aval.sharding.mesh.empty for v in eqn.outvars)
    assert all(isinstance(v, _jax.Literal) or v.aval.sharding.mesh.empty for v in jaxpr.outvars)


def test_what_is_alike_in_all_blocks_is_computed_once():
    shapes = [v.aval.shape for e in traced(CASES['replicated results']).eqns for v in e.outvars]
    assert (4, 2, 3) in shapes and all(
        shape in {(4, 2, 3), (4,), (2, 3), (3,), ()} for shape in shapes
    )


def test_a_result_that_differs_between_blocks_is_that_of_the_first():
    case = Case(lambda x: x, outs=P())
    (got,) = plain(sharded(case, abstract_mesh('four'), False), *values(case))(*values(case))
    assert (got == values(case)[0][:2]).all()


def test_blocks_are_joined_in_the_order_of_the_spec():
    x = np.arange(8.0)
    (got,) = plain(sharded(Case(lambda v: v, P(AB), P(BA)), abstract_mesh('square'), True), x)(x)
    assert got.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def placed(fn, *args) -> tuple[Any, str]:
    """The equation of a function, and its place."""
    (eqn,) = _jax.trace(fn, *args)[0].eqns
    return eqn, 'model.py:7 (step)'


def partly_mapped():
    mesh = abstract_mesh('square')
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=P('a'), out_specs=P('a'), axis_names={'a'})


def still_to_be_summed():
    mesh = jax.sharding.AbstractMesh((4,), ('a',), axis_types=(jax.sharding.AxisType.Explicit,))
    unreduced = lambda x: lax.pcast(x * lax.axis_index('a'), 'a', to='unreduced')
    return jax.shard_map(unreduced, mesh=mesh, in_specs=P(), out_specs=P(unreduced={'a'}))


@pytest.mark.parametrize(
    'make, words',
    [
        (
            partly_mapped,
            r"shard_map at model.py:7 \(step\) maps \['a'\] and leaves \['b'\].*axis_names",
        ),
        (still_to_be_summed, 'model.py:7.*still to be taken.*psum'),
    ],
)
def test_what_is_no_map_over_all_axes_is_refused(make, words):
    with pytest.raises(NotSupportedError, match=words):
        unsharded(*placed(make(), jnp.ones((4, 3))))


GROUPS = [[0, 1], [2, 3]]
REFUSED = {
    'psum': lambda x: lax.psum(x, 'a', axis_index_groups=GROUPS),
    'all_gather': lambda x: lax.all_gather(x, 'a', axis_index_groups=GROUPS)[0],
    'reduce_scatter': lambda x: lax.psum_scatter(x, 'a', axis_index_groups=GROUPS, tiled=True),
    'ppermute': lambda x: lax.ppermute(x, AB, [(0, 1)]),
    'pbroadcast': lambda x: lax.pbroadcast(x, 'a', 1),
    'all_to_all': lambda x: lax.scan(
        lambda c, _: (lax.all_to_all(c, 'a', 0, 0, axis_index_groups=GROUPS), None), x, None, 2
    )[0],
}


@pytest.mark.parametrize('name', REFUSED)
def test_a_collective_without_a_form_under_vmap_is_named(name):
    x, on = jnp.ones((8, 3)), P(AB) if name == 'ppermute' else P('a')
    mesh = abstract_mesh('square' if name == 'ppermute' else 'four')
    eqn, where = placed(sharded(Case(REFUSED[name], on, on), mesh, False), x)
    said = rf'shard_map at model.py:7 \(step\) holds {name} at .*test_unshard.py:.*psum'
    with pytest.raises(NotSupportedError, match=said):
        unsharded(eqn, where)(x)


def test_an_error_that_no_collective_causes_stays_what_it_is():
    stubborn = _jax.Primitive('stubborn')
    stubborn.def_abstract_eval(lambda x: x)
    x = jnp.ones((8, 3))
    eqn, where = placed(sharded(Case(stubborn.bind), abstract_mesh('four'), False), x)
    with pytest.raises(NotImplementedError, match="Batching rule for 'stubborn'"):
        unsharded(eqn, where)(x)


def take(x, w):
    return jnp.take(w, (x[:, 0] > 0).astype(int), axis=0, mode='clip')


@pytest.mark.parametrize(
    'fn, ins, outs, mesh',
    [
        (jnp.matmul, (P('a'), P()), P('a'), 'four'),
        (jnp.matmul, (P(AB), P()), P(AB), 'square'),
        (jnp.matmul, (P(), P(None, 'a')), P(None, 'a'), 'four'),
        (take, (P('a'), P()), P('a'), 'four'),
    ],
    ids=['product', 'two axes', 'columns', 'lookup'],
)
def test_a_marked_product_in_blocks_has_the_lanes_of_the_whole_batch(fn, ins, outs, mesh):
    def cell(p, h, x):
        h = 0.8 * h + sharded(Case(fn, ins, outs), abstract_mesh(mesh), True)(x, p)
        return h, h

    learner = braintrace.functional.online(cell, mark='auto')
    state = jax.eval_shape(learner.init, jnp.ones((3, 4)), jnp.ones((8, 4)), jnp.ones((8, 3)))
    (op,) = learner.graph.ops
    assert op.y_aval.shape == (8, 4) and state.t.shape == (8,) and 'carry' in state.laned


if __name__ == '__main__':
    main(os.environ['ARGUMENT'])
