"""States on several devices: specs from the parameters', arrays that are sharded from the start.

On one device here; four devices run the same in a process of their own.
"""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import braintrace
from braintrace import functional, rules
from tests import models, oracles
from tests.compare import errors
from tests.functional.plain import loss, on_devices
from tests.gradients.harness import learn
from tests.late import LATE
from tests.models.library import LibraryOps
from tests.tiers import in_turn, none

B, I, N, T = 8, 4, 8, 4  # noqa: E741
SHAPES = {'w': (I + N, N), 'b': (N,), 'leak': (N,), 'out': (N, 2)}
SPECS = {'w': P(None, 'm'), 'b': P('m'), 'leak': P('m'), 'out': P('m')}
REPLICATED = dict.fromkeys(SHAPES)
OPTIMIZER = optax.adam(1e-2)
AUTO = jax.sharding.AxisType.Auto


def cell(p, c, x):
    y = braintrace.matmul(jnp.concatenate([x, c['h']], -1), p['w'], p['b'])
    h = braintrace.element_wise(p['leak'], fn=jax.nn.sigmoid) * c['h'] + jnp.tanh(y)
    return h @ p['out'], {'h': h, **{k: n + 1 for k, n in c.items() if k != 'h'}}


def setting():
    rng = np.random.default_rng(0)
    p = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in SHAPES.items()}
    xs, ys = (jnp.asarray(rng.normal(size=(T, B, n))) for n in (I, 2))
    return p, {'h': jnp.zeros((B, N)), 'n': jnp.array(0)}, xs, ys


def compiled(rule, of=cell):
    learner = functional.online(of, rule)
    p, c, xs, _ = setting()
    jax.eval_shape(learner.init, p, c, xs[0])
    return learner


def shown(specs):
    return {'/'.join(path): tuple(spec) for path, spec in functional.flatten_paths(specs).items()}


def test_a_trace_lies_where_its_weight_lies():
    learner = compiled(rules.d_rtrl())
    specs = learner.partition_specs(SPECS, batch_axis='b')
    assert shown(specs) == {
        'carry/h': ('b', 'm'),
        'carry/n': (),
        'trace/w/h/weight/0': ('b', None, 'm'),
        'trace/w/h/bias/0': ('b', 'm'),
        'trace/leak/h/weight/0': ('b', 'm'),
        't': ('b',),
    }
    p, c, xs, _ = setting()
    assert jax.tree.structure(specs) == jax.tree.structure(learner.init(p, c, xs[0]))
    assert not any(map(any, shown(learner.partition_specs(REPLICATED)).values()))


def test_the_factors_of_a_trace_lie_along_input_and_output():
    specs = compiled(rules.es_d_rtrl(0.7)).partition_specs({**SPECS, 'w': P('k', 'm')}, 'b')
    assert shown(specs)['trace/w/h/x'] == ('b', 'k')
    assert shown(specs)['trace/w/h/f'] == ('b', 'm', None)


def test_pending_steps_have_the_batch_in_front():
    specs = shown(compiled(LATE).partition_specs(SPECS, 'b'))
    pending = {path: spec for path, spec in specs.items() if '(pending)' in path}
    assert pending and all(spec[0] == 'b' for spec in pending.values())


def test_ops_that_disagree_leave_a_state_whole_and_no_axis_is_used_twice():
    specs = shown(compiled(rules.d_rtrl()).partition_specs({**SPECS, 'leak': P('k')}, 'b'))
    assert specs['carry/h'] == ('b', None) and specs['trace/leak/h/weight/0'] == ('b', 'k')
    specs = shown(compiled(rules.d_rtrl()).partition_specs({**SPECS, 'w': P('b', 'm')}, 'b'))
    assert specs['trace/w/h/weight/0'] == ('b', None, 'm')


@pytest.mark.parametrize(
    'change, lies',
    [
        (lambda w: jnp.tanh(w) * jnp.tri(I + N, N), ('b', None, 'm')),
        (lambda w: jnp.roll(w, 1, 0), ('b', None, None)),
        (lambda w: jnp.concatenate([w[:I], w[I:].T]), ('b', None, None)),
    ],
    ids=['masked', 'rolled', 'partly transposed'],
)
def test_a_weight_lies_as_the_parameter_that_it_is_made_of_element_by_element(change, lies):
    learner = compiled(rules.d_rtrl(), lambda p, c, x: cell(p | {'w': change(p['w'])}, c, x))
    assert shown(learner.partition_specs(SPECS, 'b'))['trace/w/h/weight/0'] == lies


@pytest.mark.parametrize(
    'specs, axis, words',
    [
        ({'w': P()}, None, 'another structure than params'),
        ({**SPECS, 'b': 'm'}, None, "param_specs has 'm'"),
        ({**SPECS, 'b': P(None, 'm')}, None, r'more entries than its parameter has axes \(1\)'),
        (SPECS, 0, 'batch_axis is 0'),
    ],
)
def test_bad_specs_are_refused(specs, axis, words):
    with pytest.raises(ValueError, match=words):
        compiled(rules.d_rtrl()).partition_specs(specs, axis)


@in_turn(none, name=models.names(), rule=[rules.d_rtrl(), rules.es_d_rtrl(0.5)])
def test_the_specs_of_every_model_fit_its_arrays(name, rule):
    case = models.case(name)
    learner = functional.online(lambda *args: case.run(LibraryOps(), *args), rule)
    state = jax.eval_shape(learner.init, case.params, case.carry, case.xs[0])
    last = jax.tree.map(lambda a: P(*[None] * (a.ndim - 1), 'm') if a.ndim else P(), case.params)
    specs = learner.partition_specs(last, None if learner.graph.lanes is None else 'b')
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    assert all(jax.tree.leaves(jax.tree.map(lambda s, a: len(tuple(s)) == a.ndim, specs, state)))


# on several devices ---------------------------------------------------------------------------

LAYOUTS = {  # the mesh (batch, units), the specs of the parameters
    'batch': ((4, 1), REPLICATED),
    'batch and units': ((2, 2), SPECS),
}


def run(learner, p, state, xs, ys):
    """Updates after every two steps."""
    train = learner.sequence_update(loss, OPTIMIZER, update_every=2)
    p, losses, _, state, opt_state, *_ = train(p, OPTIMIZER.init(p), state, xs, ys)
    return p, opt_state, losses, state


def on(layout: str, rule) -> dict:
    """A run on all devices beside that of one, and where its arrays lie."""
    (sizes, param_specs), learner = LAYOUTS[layout], compiled(rule)
    mesh = jax.make_mesh(sizes, ('b', 'm'), axis_types=(AUTO, AUTO))
    p, c, xs, ys = setting()

    def placed(tree):
        return jax.tree.map(lambda s: NamedSharding(mesh, s or P()), tree, is_leaf=lambda s: not s)

    shardings = placed(learner.partition_specs(param_specs, 'b'))
    state = jax.jit(learner.init, out_shardings=shardings)(p, c, xs[0])
    given = jax.device_put(p, placed(param_specs))
    data = jax.device_put((xs, ys), NamedSharding(mesh, P(None, 'b')))
    of_learner = partial(run, learner)
    fn = jax.jit(of_learner, donate_argnums=1, out_shardings=(None, None, None, shardings))
    program = fn.lower(given, state, *data).compile()
    traces = [a for a in jax.tree.leaves(state.trace) if a.ndim]
    found = {
        'sharded at init': jax.tree.map(lambda a: a.sharding, state) == shardings,
        'trace': sum(a.nbytes for a in traces),
        'of one device': sum(a.addressable_shards[0].data.nbytes for a in traces),
        'aliased': program.memory_analysis().alias_size_in_bytes,
    }
    wanted = jax.jit(of_learner)(p, learner.init(p, c, xs[0]), xs, ys)
    return found | {'error': max(errors(program(given, state, *data), wanted).values())}


def in_shard_map() -> float:
    """Each device steps its own lanes, by specs of ``partition_specs``."""
    learner, local = (functional.online(cell, rules.d_rtrl()) for _ in range(2))
    mesh = jax.make_mesh((len(jax.devices()),), ('b',), axis_types=(AUTO,))
    p, c, xs, ys = setting()
    c = {'h': c['h']}  # what is not of lanes would come back as differing between shards
    whole = learner.init(p, c, xs[0])
    specs = learner.partition_specs(REPLICATED, 'b')

    def step(p, state, x, y):
        grads, value, _, state = local.grad(loss)(p, state, x, y)
        return jax.lax.psum((value, grads), 'b'), state

    def on_lanes(fn, *ins, outs):
        return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs))

    state = on_lanes(local.init, P(), {'h': P('b')}, P('b'), outs=specs)(p, c, xs[0])
    each = on_lanes(step, P(), specs, P('b'), P('b'), outs=((P(), P()), specs))
    one, found = jax.jit(learner.grad(loss)), []
    for x, y in zip(xs, ys, strict=True):
        got, state = each(p, state, x, y)
        grads, value, _, whole = one(p, whole, x, y)
        found.append(max(errors(got, (value, grads)).values()))
    return max(found)


@pytest.mark.slow
def test_four_devices_learn_what_one_does_and_share_the_trace():
    found = on_devices(__file__, 4, JAX_DISABLE_MOST_OPTIMIZATIONS='1')
    assert found.pop('shard_map') < 1e-11
    for name, one in found.items():
        assert one['sharded at init'] and one['error'] < 1e-11, (name, one)
        assert one['of one device'] * 4 == one['trace'], (name, one)
        assert one['aliased'] >= one['of one device'], (name, one)
    assert len(found) == 2


@pytest.mark.slow
@pytest.mark.parametrize('moved', [jax.lax.with_sharding_constraint, jax.sharding.reshard])
def test_a_state_that_is_put_elsewhere_on_a_mesh_has_the_same_gradient(moved):
    mesh = jax.make_mesh((1,), ('d',), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.enable_x64(True):
        p, h, xs = {'w': jnp.ones((3, 4)) / 3}, jnp.zeros((2, 4)), jnp.ones((4, 2, 3))

        def cell(p, h, x, put=lambda h: moved(h, NamedSharding(mesh, P(None, None)))):
            h = put(0.8 * h + jnp.tanh(x @ p['w']))
            return h, h

        data, plain = (p, h, xs, jnp.zeros((4, 2, 4)), loss), partial(cell, put=lambda h: h)
        got, learner = learn(cell, rules.d_rtrl(), *data, mark='auto')
        assert max(errors(got, oracles.by_time(plain, *data)).values()) < 1e-12
        assert not learner.graph.mixing


if __name__ == '__main__':
    jax.config.update('jax_enable_x64', True)
    rows = [('batch and units', rules.d_rtrl()), ('batch', LATE)]
    result = {f'{layout} {rule.name}': on(layout, rule) for layout, rule in rows}
    print(json.dumps({**result, 'shard_map': in_shard_map()}))
