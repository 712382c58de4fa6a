"""What the compiler finds: groups, relations, routes, cuts and their places."""

import jax
import jax.numpy as jnp

import braintrace
from braintrace import functional, rules

B, I, N = 2, 3, 4  # noqa: E741


def graph_of(cell, params, carry, *inputs):
    learner = functional.online(cell, rules.d_rtrl())
    jax.eval_shape(learner.init, params, carry, *inputs)
    return learner.graph


W, U, H, X = (jnp.ones(s) for s in ((I + N, N), (I, N), (B, N), (B, I)))


def drive(w, x, h):
    return braintrace.matmul(jnp.concatenate([x, h], -1), w)


def test_states_that_read_each_other_position_by_position_form_one_group():
    def cell(w, c, x):
        current = 0.5 * c['i'] + drive(w, x, c['v'])
        voltage = 0.9 * c['v'] + jnp.tanh(current)
        return voltage, {'i': current, 'v': voltage, 'apart': 0.1 * c['apart'] + x.sum()}

    graph = graph_of(cell, W, {'i': H, 'v': H, 'apart': H}, X)
    assert [(g.paths, g.shape) for g in graph.hidden_groups] == [
        (('apart',), (B, N)),
        (('i', 'v'), (B, N)),
    ]
    (relation,) = graph.hidden_param_op_relations
    assert [g.name for g in relation.groups] == ['i,v'] and relation.only_through_groups


def test_a_relation_knows_its_primitive_and_the_values_of_its_trainables():
    def cell(p, h, x):
        h = jnp.tanh(0.5 * h + braintrace.matmul(x, 2 * p['w'], p['b']))
        return h, h

    graph = graph_of(cell, {'w': U, 'b': jnp.ones(N)}, H, X)
    (relation,) = graph.hidden_param_op_relations
    assert relation.primitive.name == 'etp_mm'
    found = relation.trainable_vars
    assert found == relation.op.trainable and len(found) == 2
    assert [graph.program.avals[v].shape for v in found.values()] == [(I, N), (N,)]


def test_moving_there_and_back_is_not_mixing():
    def cell(w, h, x):
        z = jnp.roll(jnp.tanh(jnp.roll(h, 1, -1)), -1, -1)
        h = 0.5 * z[:, ::-1][:, ::-1] + drive(w, x, h).reshape(N, B).reshape(B, N)
        return h, h

    assert not graph_of(cell, W, H, X).diagnostics


def test_a_trace_with_the_batch_in_front_says_so_of_a_state_behind_a_change_of_shape():
    def cell(p, h, x):
        y = braintrace.matmul(x, p['w'])
        return h, (0.5 * h.ravel() + y.ravel()).reshape(h.shape)

    learner = functional.online(cell)
    state = learner.init({'w': jnp.ones((3, 4))}, jnp.zeros((2, 4)), jnp.ones((2, 3)))
    assert learner.graph.lanes == 2 and state.t.shape == (2,)


def test_what_comes_into_a_loop_is_followed_into_its_next_iteration():
    def cell(w, h, x):
        y = drive(w, x, h)

        def turn(carry, _):
            late, total = carry
            return (y, total + late), None

        (_, total), _ = jax.lax.scan(turn, (jnp.zeros_like(h), jnp.zeros_like(h)), length=40)
        h = 0.5 * h + total
        return h, h

    graph = graph_of(cell, W, H, X)
    (relation,) = graph.hidden_param_op_relations
    assert relation.only_through_groups and not graph.diagnostics


def test_side_effects_of_the_step_are_kept(capfd):
    def cell(w, h, x):
        jax.debug.print('seen {s}', s=x.sum())
        h = jnp.tanh(drive(w, x, h))
        return h, h

    learner = functional.online(cell, rules.d_rtrl())
    learner.step(W, learner.init(W, H, X), X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count('seen 6.0') == 1
