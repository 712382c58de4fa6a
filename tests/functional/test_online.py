"""The pure core: states, routes, memory, errors, and its behaviour under transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import braintrace
from braintrace import functional, rules
from braintrace.errors import NotCompiledError, OptionError, StructureError
from tests.compare import assert_close
from tests.precision import float64 as float64

B, I, N, T = 2, 3, 4, 6  # noqa: E741
RULES = [rules.d_rtrl(), rules.es_d_rtrl(0.7)]


def cell(p, c, x):
    h = 0.5 * c['h'] + jnp.tanh(braintrace.matmul(jnp.concatenate([x, c['h']], -1), p['w'], p['b']))
    return h @ p['out'], {'h': h, 'count': c['count'] + 1}


def loss(out, target):
    return ((out - target) ** 2).sum()


def setting(batch=B):
    rng = np.random.default_rng(0)
    params = {
        'w': rng.normal(size=(I + N, N)),
        'b': rng.normal(size=N),
        'out': rng.normal(size=(N, 2)),
        'steps': np.arange(3),
    }
    carry = {'h': rng.normal(size=(batch, N)), 'count': np.array(0)}
    return jax.tree.map(
        jnp.asarray, (params, carry, rng.normal(size=(T, batch, I)), rng.normal(size=(T, batch, 2)))
    )


def started(rule=RULES[0], **options):
    params, carry, xs, ys = setting()
    learner = functional.online(cell, rule, **options)
    return learner, params, learner.init(params, carry, xs[0]), xs, ys


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('rule', [*RULES, None], ids=str)
def test_grad_is_jax_grad_of_a_loss_on_the_outputs_of_step(rule):
    learner, params, state, xs, ys = started(rule)
    grads, value, out, new = learner.grad(loss)(params, state, xs[0], ys[0])
    want = jax.grad(lambda p: loss(learner.step(p, state, xs[0])[0], ys[0]), allow_int=True)(params)
    assert_close(grads, want)
    assert value == loss(out, ys[0])
    assert grads['steps'].dtype == jax.dtypes.float0
    assert_close(new, learner.step(params, state, xs[0])[1])


@pytest.mark.parametrize('rule', RULES, ids=str)
def test_a_loss_over_a_scan_in_one_grad_is_the_sum_of_online_gradients(rule):
    learner, params, state, xs, ys = started(rule)

    def total(params):
        def body(state, xy):
            out, state = learner.step(params, state, xy[0])
            return state, loss(out, xy[1])

        return jax.lax.scan(body, state, (xs, ys))[1].sum()

    grads, *_ = jax.jit(learner.sequence_grad(loss, reduction='sum'))(params, state, xs, ys)
    assert_close(jax.jit(jax.grad(total, allow_int=True))(params), grads, 1e-11)


def test_inputs_get_their_exact_same_step_gradient():
    learner, params, state, xs, ys = started()
    online = jax.grad(lambda x: loss(learner.step(params, state, x)[0], ys[0]))(xs[0])
    plain = jax.grad(lambda x: loss(cell(params, state.carry, x)[0], ys[0]))(xs[0])
    assert_close(online, plain)


def test_jitted_equals_eager_and_a_second_call_does_not_trace_the_cell():
    traced = []

    def counted(p, c, x):
        traced.append(1)
        return cell(p, c, x)

    params, carry, xs, ys = setting()
    learner = functional.online(counted, RULES[0])
    state = learner.init(params, carry, xs[0])
    run = learner.grad(loss)
    assert_close(jax.jit(run)(params, state, xs[0], ys[0]), run(params, state, xs[0], ys[0]))
    assert len(traced) == 1


@pytest.mark.slow
@pytest.mark.parametrize('rule', RULES, ids=str)
def test_mapped_lanes_equal_the_batch_and_mapped_parameters_independent_learners(rule):
    learner, params, state, xs, ys = started(rule)
    whole = jax.jit(learner.sequence_grad(loss, reduction='sum'))
    want, *_ = whole(params, state, xs, ys)
    single = functional.online(cell, rule)
    lanes = jax.vmap(lambda h, x: single.init(params, {'h': h, 'count': jnp.array(0)}, x))(
        state.carry['h'], xs[0]
    )
    run = jax.jit(jax.vmap(single.sequence_grad(loss, reduction='sum'), in_axes=(None, 0, 1, 1)))
    got, *_ = run(params, lanes, xs, ys)
    assert_close(
        {k: got[k].sum(0) for k in ('w', 'b', 'out')},
        {k: want[k] for k in ('w', 'b', 'out')},
        1e-11,
    )

    ensemble = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)
    both, *_ = jax.jit(
        jax.vmap(learner.sequence_grad(loss, reduction='sum'), in_axes=(0, None, None, None))
    )(ensemble, state, xs, ys)
    for k in range(2):
        one, *_ = whole(jax.tree.map(lambda p, k=k: p[k], ensemble), state, xs, ys)
        assert_close(
            {n: both[n][k] for n in ('w', 'b', 'out')},
            {n: one[n] for n in ('w', 'b', 'out')},
            1e-11,
        )


def test_progress_is_shown_from_inside_the_loop_but_not_under_vmap():
    learner = functional.online(lambda w, h, x: (h, 0.5 * h + braintrace.matmul(x, w)), RULES[0])
    optimizer = optax.sgd(0.1)
    w, xs, ys = jnp.ones((I, N)), jnp.ones((T, B, I)), jnp.ones((T, B, N))
    state = learner.init(w, jnp.zeros((B, N)), xs[0])

    def shows(fn, *args) -> bool:
        return 'io_callback' in str(jax.make_jaxpr(fn)(*args))

    for progress in (True, False):
        grad = learner.sequence_grad(loss, progress=progress)
        train = learner.sequence_update(loss, optimizer, progress=progress)
        assert shows(grad, w, state, xs, ys) is progress
        assert shows(train, w, optimizer.init(w), state, xs, ys) is progress
        assert not shows(jax.vmap(lambda xs: grad(w, state, xs, ys)), xs[None])
    for make in (
        learner.sequence_grad,
        lambda f, **kw: learner.sequence_update(f, optimizer, **kw),
    ):
        with pytest.raises(OptionError, match='progress is 2; give True, False or'):
            make(loss, progress=2)


def test_forward_mode_over_step_is_refused_by_jax():
    learner, params, state, xs, _ = started()
    with pytest.raises(TypeError, match='custom_vjp'):
        jax.jvp(lambda x: learner.step(params, state, x)[0], (xs[0],), (xs[0],))


@pytest.mark.slow
def test_auxiliary_carry_is_threaded_and_a_learner_is_frozen():
    learner, params, state, xs, ys = started()
    _, _, _, new = learner.sequence_grad(loss, window=4)(params, state, xs, ys)
    assert int(new.carry['count']) == T and new.t.tolist() == [T] * B
    with pytest.raises(AttributeError):
        learner.rule = None


@pytest.mark.slow
def test_a_tuple_is_passed_as_several_inputs():
    def two(p, c, a, b):
        return cell(p, c, a + b)

    params, carry, xs, ys = setting()
    learner, plain = functional.online(two, RULES[0]), functional.online(cell, RULES[0])
    got, *_ = learner.sequence_grad(loss)(
        params, learner.init(params, carry, xs[0], xs[0]), (xs, xs), ys
    )
    want, *_ = plain.sequence_grad(loss)(params, plain.init(params, carry, xs[0]), 2 * xs, ys)
    assert_close(got, want)


def test_routes_split_and_merge():
    learner, params, *_ = started()
    assert {k: r.kind for k, r in learner.routes.items()} == {
        'w': 'trace',
        'b': 'trace',
        'out': 'same-step',
        'steps': 'frozen',
    }
    parts = functional.split(params, learner)
    assert [sorted(k for k, v in part.items() if v is not None) for part in parts] == [
        ['b', 'w'],
        ['out'],
        ['steps'],
    ]
    assert_close(functional.merge(*parts), params)


def test_what_is_not_trainable_gets_zero_and_what_is_not_hidden_no_trace():
    learner, params, state, xs, ys = started(
        trainable=lambda path, leaf: path != ('w',), hidden=lambda path, leaf: path == ('h',)
    )
    grads, *_ = learner.sequence_grad(loss)(params, state, xs, ys)
    assert (grads['w'] == 0).all() and jnp.abs(grads['b']).max() > 0
    assert set(state.trace['b']['h']) == {'weight', 'bias'}


def test_memory_lists_the_whole_state_and_allocates_nothing():
    params, carry, xs, _ = setting()
    big = functional.online(cell, RULES[0])
    shapes = (
        {'w': (100_000, 99_000), 'b': (99_000,), 'out': (99_000, 2), 'steps': (3,)},
        {'h': (8, 99_000), 'count': ()},
        (8, 1000),
    )
    leaf = lambda s: jax.ShapeDtypeStruct(s, jnp.float32)
    state = jax.eval_shape(
        big.init, *(jax.tree.map(leaf, s, is_leaf=lambda s: isinstance(s, tuple)) for s in shapes)
    )
    memory = big.memory()
    assert memory.total == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) > 3e11
    assert ('trace/w/h/weight/0', (8, 100_000, 99_000)) in [row[:2] for row in memory.rows]


def not_the_count(path, leaf):
    return path != ('count',)


def test_reset_starts_flagged_lanes_anew():
    learner, params, state, xs, ys = started()
    carry0 = {'h': jnp.zeros((B, N)), 'count': jnp.array(9)}
    _, _, _, moved = learner.sequence_grad(loss)(params, state, xs, ys)
    again = functional.reset(moved, jnp.array([True, False]), carry0, hidden=not_the_count)
    assert again.t.tolist() == [0, T] and int(again.carry['count']) == T
    assert (again.carry['h'][0] == 0).all()
    assert_close(again.carry['h'][1], moved.carry['h'][1])
    (entry,), (old,) = again.trace['w']['h']['weight'], moved.trace['w']['h']['weight']
    assert (entry[0] == 0).all()
    assert_close(entry[1], old[1])
    with pytest.raises(ValueError, match=r'bool of shape \[\] or \[2\]'):
        functional.reset(moved, jnp.zeros(3, bool), carry0)


@pytest.mark.slow
def test_a_reset_inside_a_sequence_equals_one_between_two():
    learner, params, state, xs, ys = started(hidden=not_the_count)
    carry0 = {'h': jnp.full((B, N), 0.3), 'count': jnp.array(0)}
    flags = jnp.zeros((T, B), bool).at[4, 0].set(True)
    run = jax.jit(learner.sequence_grad(loss, window=3, reduction='sum'))
    got, _, _, last = run(params, state, xs, ys, reset=(flags, carry0))
    first, _, _, middle = run(params, state, xs[:4], ys[:4])
    second, _, _, end = run(
        params, functional.reset(middle, flags[4], carry0, not_the_count), xs[4:], ys[4:]
    )
    float_keys = ('w', 'b', 'out')
    assert_close(
        {k: got[k] for k in float_keys}, {k: first[k] + second[k] for k in float_keys}, 1e-11
    )
    assert last.t.tolist() == end.t.tolist() == [2, T]


@pytest.mark.parametrize(
    'call, error, words',
    [
        (
            lambda l, p, s, x, y: l.step({**p, 'w': p['w'][:, :2]}, s, x[0]),
            StructureError,
            r'params w: float64\[7, 4\] .*\[7, 2\] now',
        ),
        (
            lambda l, p, s, x, y: l.step({'w': p['w']}, s, x[0]),
            StructureError,
            'params b: .*absent now',
        ),
        (lambda l, p, s, x, y: l.step(p, s.carry, x[0]), StructureError, 'OnlineState'),
        (lambda l, p, s, x, y: l.grad(loss)(p, s.carry, x[0], y[0]), StructureError, 'OnlineState'),
        (lambda l, p, s, x, y: l.vjp(p, None, x[0]), StructureError, 'state is NoneType'),
        (
            lambda l, p, s, x, y: l.sequence_grad(loss, progress=lambda *_: 1 / 0)(p, s, x, y),
            ZeroDivisionError,
            'division by zero',
        ),
        (
            lambda l, p, s, x, y: l.step(p, s.replace(trace={}), x[0]),
            StructureError,
            'trace of this state',
        ),
        (
            lambda l, p, s, x, y: l.sequence_grad(loss, window=0)(p, s, x, y),
            ValueError,
            'window is 0',
        ),
        (
            lambda l, p, s, x, y: l.sequence_grad(loss, reduction='max'),
            ValueError,
            "reduction is 'max'",
        ),
        (
            lambda l, p, s, x, y: l.sequence_grad(lambda o, t: o)(p, s, x, y),
            ValueError,
            'one real scalar',
        ),
        (
            lambda l, p, s, x, y: l.sequence_grad(loss)(p, s, x, y[:2]),
            ValueError,
            'unequal lengths',
        ),
        (
            lambda l, p, s, x, y: l.sequence_grad(loss)(p, s, x, y, mask=np.ones(2)),
            ValueError,
            'mask',
        ),
        (
            lambda l, p, s, x, y: l.sequence_grad(loss)(
                p, s, x, y, reset=(np.ones(2, bool), s.carry)
            ),
            ValueError,
            r'\[6\] or \[6, 2\]',
        ),
    ],
)
def test_bad_calls_are_refused(call, error, words):
    learner, params, state, xs, ys = started()
    with pytest.raises(error, match=words):
        call(learner, params, state, xs, ys)


def test_a_description_before_init_says_how_to_get_one():
    learner = functional.online(cell, RULES[0])
    for use in (lambda: learner.graph, lambda: learner.routes, learner.memory):
        with pytest.raises(NotCompiledError, match='eval_shape'):
            use()


def test_repeated_calls_are_equal_and_arguments_unchanged():
    learner, params, state, xs, ys = started()
    before = jax.tree.map(np.array, (params, state))
    a, b = (learner.sequence_grad(loss)(params, state, xs, ys) for _ in range(2))
    assert_close(a, b, 0)
    assert_close(jax.tree.map(np.array, (params, state)), before, 0)
