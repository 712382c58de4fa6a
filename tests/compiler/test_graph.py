"""What the compiler finds: groups, relations, routes, cuts and their places."""

import jax
import jax.numpy as jnp
import pytest

import braintrace
from braintrace import functional, rules

B, I, N = 2, 3, 4  # noqa: E741


def graph_of(cell, params, carry, *inputs, **options):
    learner = functional.online(cell, rules.d_rtrl(), **options)
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


def test_layers_coupled_by_ops_are_groups_of_their_own():
    def cell(p, c, x):
        one = jnp.tanh(drive(p['one'], x, c['one']))
        two = jnp.tanh(braintrace.matmul(jnp.concatenate([one, c['two']], -1), p['two']))
        return two, {'one': one, 'two': two}

    graph = graph_of(cell, {'one': W, 'two': jnp.ones((2 * N, N))}, {'one': H, 'two': H}, X)
    assert {r.key: [g.name for g in r.groups] for r in graph.hidden_param_op_relations} == {
        'one': ['one'],
        'two': ['two'],
    }


def test_every_route_has_its_reason_and_place():
    def cell(p, h, x):
        first = braintrace.matmul(x, p['before'])
        y = drive(p['w'] * p['mask'], jnp.tanh(first @ jnp.ones((N, I))), h)
        h = jnp.tanh(y + x @ p['plain'])
        return h @ p['out'], h

    params = {
        'before': U,
        'w': W,
        'mask': jnp.ones((I + N, N), bool),
        'plain': U,
        'out': jnp.ones((N, 2)),
        'fixed': U,
    }
    graph = graph_of(cell, params, H, X, trainable=lambda path, leaf: path != ('fixed',))
    assert {p: (r.kind, r.reason) for p, r in graph.routes.items()} == {
        'before': ('same-step', 'weight_then_weight'),
        'w': ('trace', 'etp_mm'),
        'mask': ('frozen', 'not_inexact'),
        'plain': ('same-step', 'not_etp_op'),
        'out': ('same-step', 'no_hidden_state'),
        'fixed': ('frozen', 'not_trainable'),
    }
    assert (
        'test_graph.py' in graph.routes['w'].location
        and 'test_graph.py' in graph.routes['plain'].location
    )


@pytest.mark.parametrize(
    'mixing, name',
    [
        (lambda h: jnp.roll(h, 1, -1), 'slice'),
        (lambda h: h.mean(-1, keepdims=True), 'broadcast_in_dim'),
        (lambda h: h @ jnp.ones((N, N)), 'dot_general'),
        (lambda h: jax.nn.softmax(h), ''),
        (lambda h: jnp.cumsum(h, -1), 'cumsum'),
        (lambda h: jnp.sort(h, -1), 'sort'),
    ],
    ids=['roll', 'mean', 'dot', 'softmax', 'cumsum', 'sort'],
)
def test_recurrence_that_mixes_positions_is_cut_and_named(mixing, name):
    def cell(w, h, x):
        h = 0.5 * h + 0.1 * mixing(h) + jnp.tanh(drive(w, x, h))
        return h, h

    graph = graph_of(cell, W, H, X)
    notes = [d for d in braintrace.report(graph).diagnostics if d.kind == 'mixing']
    assert notes and all('test_graph.py' in d.location for d in notes)
    assert any(name in d.message for d in notes)
    assert len(graph.hidden_param_op_relations) == 1


def test_moving_there_and_back_is_not_mixing():
    def cell(w, h, x):
        z = jnp.roll(jnp.tanh(jnp.roll(h, 1, -1)), -1, -1)
        h = 0.5 * z[:, ::-1][:, ::-1] + drive(w, x, h).reshape(N, B).reshape(B, N)
        return h, h

    assert not graph_of(cell, W, H, X).diagnostics


def test_a_weight_that_depends_on_the_input_has_no_trace_and_says_so():
    def cell(w, h, x):
        h = jnp.tanh(0.5 * h + drive(w * x.mean(), x, h))
        return h, h

    graph = graph_of(cell, W, H, X)
    assert not graph.hidden_param_op_relations
    assert graph.routes['params'].reason == 'input_dependent_weight'
    assert [d.kind for d in graph.diagnostics] == ['input-dependent-weight', 'no-relation']


def test_a_tail_that_mixes_everything_loses_the_relation_and_says_where():
    def cell(w, h, x):
        h = 0.5 * h + jnp.tanh(jnp.cumsum(drive(w, x, h), -1))
        return h, h

    graph = graph_of(cell, W, H, X)
    assert not graph.hidden_param_op_relations and graph.routes['params'].kind == 'same-step'
    assert any('cumsum' in d.message for d in braintrace.report(graph).diagnostics)


def test_fused_gates_are_followed_to_their_positions():
    def cell(w, c, x):
        i, f, g, o = jnp.split(drive(w, x, c['h']), 4, -1)
        new = jax.nn.sigmoid(f) * c['c'] + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(new)
        return h, {'c': new, 'h': h}

    (relation,) = graph_of(
        cell, jnp.ones((I + N, 4 * N)), {'c': H, 'h': H}, X
    ).hidden_param_op_relations
    (coordinates,) = relation.coordinates
    assert coordinates.positions.shape == (B, 4 * N)
    assert (coordinates.positions[:, :N] == coordinates.positions[:, N : 2 * N]).all()


def test_a_vector_weight_beside_a_batched_state_is_expanded():
    def cell(p, h, x):
        h = braintrace.element_wise(p['leak'], jax.nn.sigmoid) * h + jnp.tanh(drive(p['w'], x, h))
        return h, h

    learner = functional.online(cell, rules.d_rtrl())
    state = learner.init({'w': W, 'leak': jnp.ones(N)}, H, X)
    assert state.trace['leak']['carry']['weight'][0].shape == (B, N)


def test_side_effects_of_the_step_are_kept(capfd):
    def cell(w, h, x):
        jax.debug.print('seen {s}', s=x.sum())
        h = jnp.tanh(drive(w, x, h))
        return h, h

    learner = functional.online(cell, rules.d_rtrl())
    learner.step(W, learner.init(W, H, X), X)
    jax.effects_barrier()
    assert capfd.readouterr().out.count('seen 6.0') == 1


def test_two_leaves_of_one_path_and_python_objects_are_refused():
    def cell(p, h, x):
        return h, jnp.tanh(drive(p['w'], x, h))

    with pytest.raises(braintrace.errors.StructureError, match='same path'):
        graph_of(
            lambda p, h, x: cell({'w': p['a', 'b', 'c']}, h, x),
            {('a', 'b'): {'c': W}, ('a', 'b', 'c'): W},
            H,
            X,
        )
    with pytest.raises(braintrace.errors.StructureError, match="leaf 'name' is str"):
        functional.online(cell, rules.d_rtrl()).init({'w': W, 'name': 'cell'}, H, X)


def test_a_cell_must_return_outputs_and_a_carry():
    with pytest.raises(braintrace.errors.CompileError, match='pair'):
        graph_of(lambda w, h, x: jnp.tanh(drive(w, x, h)), W, H, X)
