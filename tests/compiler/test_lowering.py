"""How a step is lowered: loops unrolled and descended, branches, checkpoints, effects; its cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import braintrace
from braintrace import Policy, functional, rules
from braintrace.errors import NotSupportedError

B, N, T = 2, 4, 3
X = jnp.linspace(-1.0, 1.0, T * B * N).reshape(T, B, N)
W = {'w': jnp.linspace(-0.5, 0.5, N * N).reshape(N, N), 'a': jnp.linspace(0.1, 0.9, N)}
H = jnp.linspace(0.2, 0.4, B * N).reshape(B, N)
mm = braintrace.matmul


def shown(new_state):
    """The cell whose output is its new state."""

    def cell(p, h, x):
        h = new_state(p, h, x)
        return h, h

    return cell


def compiled(cell, rule=None, **policy):
    learner = functional.online(cell, rule or rules.d_rtrl(), policy=Policy(**policy))
    return learner, learner.init(W, H, X[0])


def scanned(length, decay=lambda p: 0.9):
    def body(p, x):
        return lambda h, k: (decay(p) * h + 0.1 * jnp.tanh(mm(x * k, p['w'])), None)

    turns = jnp.arange(1.0, length + 1.0)
    return shown(lambda p, h, x: lax.scan(body(p, x), h, turns)[0])


def names(learner):
    return [e.primitive.name for e in learner.graph.program.equations]


def test_a_loop_is_unrolled_up_to_the_limit_and_descended_beyond_it():
    short, _ = compiled(scanned(5), unroll=5)
    long, _ = compiled(scanned(6), unroll=5)
    assert [r.op.repeats for r in short.graph.hidden_param_op_relations] == [()] * 5
    assert [r.op.repeats for r in long.graph.hidden_param_op_relations] == [(6,)]
    assert 'loop_begin' not in names(short) and names(long).count('loop_begin') == 1


def test_trace_and_program_of_a_descended_loop_do_not_grow_with_its_length():
    learners = [compiled(scanned(length), unroll=0)[0] for length in (3, 30, 300)]
    assert {learner.report().memory for learner in learners} == {B * N * N * 4}
    assert len({len(names(learner)) for learner in learners}) == 1


def test_what_no_iteration_changes_is_evaluated_before_the_loop():
    learner, _ = compiled(
        scanned(9, decay=lambda p: jax.nn.sigmoid(braintrace.element_wise(p['a'])))
    )
    where = {e.primitive.name: e.repeats for e in learner.graph.program.equations}
    assert where['etp_elemwise'] == () and where['etp_mm'] == (9,)
    assert learner.routes['a'].kind == 'trace'


def test_a_scan_over_weights_of_its_own_is_unrolled_whatever_the_limit():
    def cell(p, h, x):
        weights = jnp.stack([p['w'], 2 * p['w']])
        return 0.5 * h + lax.scan(lambda y, w: (jnp.tanh(mm(y, w)), None), x, weights)[0]

    learner, _ = compiled(shown(cell), unroll=0)
    assert [op.repeats for op in learner.graph.ops] == [(), ()]


def test_a_function_with_a_vmap_rule_of_its_own_is_entered_where_no_vmap_is():
    """Reverse mode through such a function does not exist in JAX."""
    drive = lambda h, x, w: jnp.tanh(0.5 * h + mm(x, w))
    plain, own = (
        compiled(shown(lambda p, h, x, fn=fn: fn(h, x, p['w'])))[0]
        for fn in (drive, jax.custom_batching.sequential_vmap(drive))
    )
    assert names(own) == names(plain) and own.routes['w'].kind == 'trace'


def test_a_branch_with_a_constant_predicate_is_taken_alone():
    def new_state(p, h, x):
        return 0.5 * h + lax.cond(jnp.array(True), lambda: mm(x, p['w']), lambda: jnp.exp(x))

    learner, _ = compiled(shown(new_state))
    assert not {'exp', 'select_n'} & set(names(learner))


def test_control_flow_off_the_path_is_left_as_it_is():
    def cell(p, h, x):
        x = lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=20)[0]
        h = 0.5 * h + mm(x, p['w'])
        return lax.cond(h.sum() > 0, jnp.sin, jnp.cos, h), h

    learner, _ = compiled(cell, refuse=('scan', 'cond'))
    assert {'scan', 'cond'} <= set(names(learner))


def residuals(learner, state):
    """Arrays that the backward pass of one step keeps."""
    step, params, carry = learner.first, jax.tree.leaves(W), jax.tree.leaves(state.carry)
    weights = step.executor.op_weights(params)
    _, pull = jax.vjp(
        lambda probes: step.executor.forward(params, weights, carry, [X[0]], probes)[:2],
        step.executor.zero_probes(),
    )
    return len(jax.tree.leaves(pull))


def deep(wrap):
    def body(h, y):
        for _ in range(20):
            y = jnp.sin(y) * jnp.cos(y)
        return 0.8 * h + y

    return shown(lambda p, h, x: wrap(body)(h, mm(x, p['w'])))


def test_a_checkpoint_still_recomputes_and_its_policy_is_kept():
    everything = jax.checkpoint_policies.everything_saveable
    plain, kept, saved, inline = (
        residuals(*compiled(deep(wrap), **policy))
        for wrap, policy in [
            (lambda f: f, {}),
            (jax.checkpoint, {}),
            (lambda f: jax.checkpoint(f, policy=everything), {}),
            (jax.checkpoint, {'checkpoint': 'inline'}),
        ]
    )
    assert kept < 5 and plain == inline > 30 and saved > 30


def test_a_strict_policy_accepts_recurrence_through_an_op():
    cell = shown(lambda p, h, x: jnp.tanh(0.5 * h + mm(h, p['w'])))
    learner = functional.online(cell, rules.d_rtrl(), policy=Policy(strict=True))
    assert learner.init({'w': W['w']}, H, X[0]).t.shape == (B,)


def gradients(cell, rule, params=W, steps=T, **policy):
    learner = functional.online(cell, rule, policy=Policy(**policy))
    run = jax.jit(learner.sequence_grad(lambda o, y: (o**2).sum(), window=2, reduction='sum'))
    return run(params, learner.init(params, H, X[0]), X[:steps], X[:steps])[0]


clean = shown(lambda p, h, x: 0.9 * h + mm(x, p['w']))


def test_a_while_loop_in_a_branch_that_is_not_taken_does_not_run():
    def cell(p, h, x):
        h = 0.9 * h + mm(x, p['w'])
        endless = lambda h: lax.while_loop(lambda v: jnp.any(v < 1e9), lambda v: v * 1.0, h)
        return lax.cond(h.sum() > 1e9, endless, lambda h: h, h)

    got, want = (gradients(of, rules.d_rtrl())['w'] for of in (shown(cell), clean))
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('rule', [rules.d_rtrl(), rules.es_d_rtrl(0.5)], ids=lambda r: r.name)
def test_what_is_no_number_in_a_branch_that_is_not_taken_reaches_no_gradient(rule):
    def bad(h, p, x):
        y = mm(jnp.log(-x * x), jnp.sqrt(0.0 * p['w'])) + jnp.sqrt(0.0 * p['a'])
        return h + y + braintrace.lora_matmul(x, jnp.log(p['B']), p['A'])

    def cell(p, h, x):
        good = lambda h: 0.9 * h + mm(x, p['w'])
        return lax.cond(x.sum() > 1e9, lambda h: bad(h, p, x), good, h)

    params = {**W, 'B': -jnp.ones((N, 2)), 'A': jnp.ones((2, N))}
    got = gradients(shown(cell), rule, params)
    assert all((got[name] == 0).all() for name in ('A', 'B', 'a'))
    np.testing.assert_allclose(got['w'], gradients(clean, rule)['w'], rtol=1e-6)


def test_what_a_branch_that_is_not_taken_returns_of_parameters_alone_reaches_no_gradient():
    def cell(p, h, x):
        h, scale = lax.cond(
            x.sum() > 1e9, lambda h: (h, jnp.sqrt(0.0 * p['a'])), lambda h: (0.9 * h, p['a'] + 1), h
        )
        h = h + mm(x, p['w']) * scale
        return h, h

    want = jax.grad(lambda p: (cell(p, H, X[0])[0] ** 2).sum())(W)
    got = gradients(cell, rules.d_rtrl(), steps=1)
    np.testing.assert_allclose(got['a'], want['a'], rtol=1e-5)


def test_two_uses_of_one_while_loop_are_judged_by_the_one_that_learns():
    @jax.jit
    def normal(v):
        halve = lambda c: (c[0] + 1, c[1] / (1 + jnp.sum(c[1] ** 2)))
        return lax.while_loop(lambda c: c[0] < 2, halve, (0, v))[1]

    with pytest.raises(NotSupportedError, match='test_lowering.py.*positions meet'):
        compiled(shown(lambda p, h, x: normal(0.9 * h + mm(x, p['w'])) + normal(x)))


def read_inside_two_loops(p, h, x):
    def outer(h, k):
        h, spikes = lax.scan(
            lambda h, j: (0.9 * h + 0.1 * jnp.tanh(mm(x * k * j, p['w'])),) * 2,
            h,
            jnp.arange(1.0, 4.0),
        )
        return h, jnp.sin(spikes[-1])

    h, out = lax.scan(outer, h, jnp.arange(1.0, 3.0))
    return out[-1], h


def recurrent_reversed(p, h, x):
    def body(h, k):
        h = 0.8 * h + 0.2 * jnp.tanh(mm(x * k, p['w']) + mm(h, p['w']))
        return h, h

    new, states = lax.scan(body, h, jnp.arange(1.0, 4.0), reverse=True)
    return new + states.sum(0) * jnp.sin(h), new


@shown
def fed_twice_by_a_sequence(p, h, x):
    """Each number that a turn makes feeds two positions of the state."""

    def body(c, k):
        y = jnp.tanh(mm(x * k, p['w']))
        return c, y + y[:, ::-1]

    return 0.9 * h + lax.scan(body, 0.0, jnp.arange(1.0, 4.0))[1].sum(0)


@shown
def slices_that_feed_two_positions(p, h, x):
    """Each turn reads some numbers of an op in front of the loop, and each feeds two positions."""
    rows = jnp.moveaxis(mm(x, p['w']).reshape(len(h), 2, -1), 1, 0)

    def body(c, row):
        return 0.9 * c + jnp.tanh(jnp.concatenate([row, row[:, ::-1]], -1)), None

    return lax.scan(body, 0.5 * h, rows)[0]


def test_a_sequence_that_is_alike_in_all_turns_needs_no_unrolling():
    """The state goes into the loop and comes out of it as a sequence."""

    def cell(p, h, x):
        turns = lax.scan(lambda c, h: (c, 0.3 * h), 0.0, jnp.stack([h, h, h]))[1]
        return turns.sum(0) + mm(x, p['w'])

    graph = compiled(shown(cell), unroll=0)[0].graph
    assert not graph.mixing and any(eqn.loop for eqn in graph.program.equations)


LOOPS = {
    'read_inside_two_loops': read_inside_two_loops,
    'recurrent_reversed': recurrent_reversed,
    'fed_twice_by_a_sequence': fed_twice_by_a_sequence,
    'slices_that_feed_two_positions': slices_that_feed_two_positions,
}


@pytest.mark.tier(quick=0)
@pytest.mark.parametrize('rule', [rules.d_rtrl(), rules.es_d_rtrl(0.5)], ids=lambda r: r.name)
@pytest.mark.parametrize('name', LOOPS)
def test_an_unrolled_and_a_descended_loop_give_the_same_gradient(name, rule):
    got, want = (gradients(LOOPS[name], rule, unroll=n)['w'] for n in (0, 9))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_movement_that_cancels_over_a_loop_is_no_mixing():
    def cell(p, h, x):
        swap = lambda c, _: ((c[1], 0.9 * c[0]), None)
        parts, _ = lax.scan(swap, (h[:, :2], h[:, 2:]), None, length=2)
        return jnp.concatenate(parts, 1) + mm(x, p['w'])

    assert not compiled(shown(cell), unroll=0)[0].graph.mixing


def test_what_comes_into_a_loop_is_followed_into_its_next_iteration():
    def cell(p, h, x):
        y = mm(x, p['w'])

        def turn(carry, _):
            late, total = carry
            return (y, total + late), None

        (_, total), _ = lax.scan(turn, (jnp.zeros_like(h), jnp.zeros_like(h)), length=40)
        return 0.5 * h + total

    graph = compiled(shown(cell))[0].graph
    (relation,) = graph.hidden_param_op_relations
    assert relation.only_through_groups and [d.path for d in graph.diagnostics] == ['a']


def test_a_state_behind_a_change_of_shape_has_the_lanes_of_its_batch():
    flat = shown(lambda p, h, x: (0.5 * h.ravel() + mm(x, p['w']).ravel()).reshape(h.shape))
    learner, state = compiled(flat)
    assert learner.graph.lanes == B and state.t.shape == (B,)


def test_side_effects_of_the_step_are_kept(capfd):
    def cell(p, h, x):
        jax.debug.print('seen {s}', s=x[0, 0])
        return jnp.tanh(mm(x, p['w']))

    learner, state = compiled(shown(cell))
    learner.step(W, state, X[0])
    jax.effects_barrier()
    assert capfd.readouterr().out.count('seen -1.0') == 1
