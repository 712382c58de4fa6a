"""A learner under ``jax``'s own transformations: the same relations, the same numbers."""

import jax
import optax
import pytest

from braintrace import functional
from braintrace.errors import NotSupportedError
from tests.compare import assert_close
from tests.precision import float64 as float64

from .plain import D_RTRL, both_rules, carry, cell, data, loss, params, shapes_of, started


def scanned(p, h, x):
    """A scan of one step."""
    h, outs = jax.lax.scan(lambda h, x: cell(p, h, x)[::-1], h, x[None])
    return outs[0], h


SAVED = jax.checkpoint_policies.dots_saveable
CELLS = {
    'jit': jax.jit(cell),
    'checkpoint': jax.checkpoint(cell),
    'checkpoint in jit': jax.jit(jax.checkpoint(cell, policy=SAVED)),
    'vmap': lambda p, h, x: jax.vmap(cell, (None, 0, 0))(p, h, x),
    'scan': scanned,
}


@pytest.mark.tier(quick=1)
@both_rules
@pytest.mark.parametrize('name', CELLS)
def test_a_transformed_cell_has_the_relations_and_gradients_of_the_plain_one(name, rule):
    found = []
    for of in (CELLS[name], cell):
        learner, state = started(of, rule)
        grads, losses, _, end = jax.jit(learner.sequence_grad(loss))(params(), state, *data())
        keys = {r.key: sorted(r.paths) for r in learner.graph.hidden_param_op_relations}
        routes = {path: route.kind for path, route in learner.routes.items()}
        found.append((keys, routes, (grads, end.carry, losses)))
    (keys, routes, got), (plain_keys, plain_routes, want) = found
    assert routes == plain_routes and list(keys.values()) == list(plain_keys.values())
    assert_close(got, want)


def test_a_loss_with_more_to_return_goes_through_step_and_has_aux():
    learner, state = started()
    (xs, ys), p = data(), params()

    def with_aux(p):
        out, new = learner.step(p, state, xs[0])
        return loss(out, ys[0]) + 0.1 * (p['w'] ** 2).sum(), (out, new)

    (_, (out, new)), grads = jax.value_and_grad(with_aux, has_aux=True)(p)
    plain, _, want, after = learner.grad(loss)(p, state, xs[0], ys[0])
    assert_close(grads, {**plain, 'w': plain['w'] + 0.2 * p['w']})
    assert_close((out, new), (want, after))


def stepwise(step):
    """The gradient of a loss over a scan of ``step``."""

    def total(p, state, xs, ys):
        def body(state, at):
            out, state = step(p, state, at[0])
            return state, loss(out, at[1])

        return jax.lax.scan(body, state, (xs, ys))[1].sum()

    return jax.jit(jax.grad(total))


@pytest.mark.tier(quick=1)
@both_rules
@pytest.mark.parametrize('wrap', [lambda step: step, jax.checkpoint], ids=['plain', 'checkpoint'])
def test_a_loss_over_a_scan_of_steps_has_the_sum_of_online_gradients(wrap, rule):
    learner, state = started(rule=rule)
    args = params(), state, *data()
    want = jax.jit(learner.sequence_grad(loss, reduction='sum'))(*args)[0]
    assert_close(stepwise(wrap(learner.step))(*args), want, 1e-11)


@pytest.mark.slow
@both_rules
def test_what_a_step_was_given_of_the_past_gets_a_zero_cotangent(rule):
    """The loss may read the new carry; history is the trace's part, so nothing goes back to it."""
    learner, state = started(rule=rule)
    (xs, _), p = data(), params()
    _, state = learner.step(p, state, xs[0])

    def total(p, h, trace):
        out, new = learner.step(p, state.replace(carry=h, trace=trace), xs[1])
        return (out**2).sum() + (new.carry**3).sum()

    of_p, of_h, of_trace = jax.grad(total, (0, 1, 2))(p, state.carry, state.trace)
    assert all((g == 0).all() for g in jax.tree.leaves((of_h, of_trace)))

    def by_output(p, h, x):
        out, h = cell(p, h, x)
        return (out, h), h

    shown = functional.online(by_output, rule)
    _, same = shown.step(p, shown.init(p, carry(), xs[0]), xs[0])
    square = shown.grad(lambda out, _: (out[0] ** 2).sum() + (out[1] ** 3).sum())
    assert_close(of_p, square(p, same, xs[1], None).grads)


def test_a_jitted_run_is_traced_once_for_each_signature():
    traced = []

    def counted(p, h, x):
        traced.append(x.shape)
        return cell(p, h, x)

    learner = functional.online(counted, D_RTRL)
    (xs, ys), p = data(), params()
    step = jax.jit(learner.step)
    for batch in (2, 1, 2):
        state = learner.init(p, carry()[:batch], xs[0, :batch])
        for x in xs[:, :batch]:
            _, state = step(p, state, x)
    jax.eval_shape(learner.sequence_grad(loss), *shapes_of((p, state, xs, ys)))
    assert traced == [(2, 3), (1, 3)]


def test_init_in_vmap_compiles_for_one_lane():
    learner, (xs, _) = functional.online(cell, D_RTRL), data()
    states = jax.vmap(learner.init, (None, 0, 0))(params(), carry(), xs[0])
    assert learner.graph.program.avals[learner.graph.program.inputs[0]].shape == (3,)
    (entry,) = states.trace['w']['carry']['weight']
    assert entry.shape == (2, 7, 4) and states.t.shape == (2,)


# -- derivatives of an online gradient, of which the trace does not hold all -----------------------


def online_sum(p):
    """The sum of a parameter's gradient of a sequence."""
    learner, state = started()
    return learner.sequence_grad(loss)(p, state, *data())[0]['w'].sum()


def updated_sum(p):
    (learner, state), optimizer = started(), optax.sgd(0.1)
    run = learner.sequence_update(loss, optimizer)
    return run(p, optimizer.init(p), state, *data())[0]['w'].sum()


def by_steps(p):
    (learner, state), total = started(), 0.0
    for x, y in zip(*data(), strict=True):
        out, state = learner.step(p, state, x)
        total += loss(out, y)
    return total


@pytest.mark.parametrize(
    'second',
    [
        lambda: jax.grad(lambda p: jax.grad(by_steps)(p)['w'].sum())(params()),
        lambda: jax.jacrev(jax.grad(by_steps))(params()),
        lambda: jax.jit(jax.grad(online_sum))(params()),
        lambda: jax.grad(updated_sum)(params()),
        lambda: jax.hessian(by_steps)(params()),
    ],
    ids=['grad', 'jacrev', 'sequence', 'update', 'forward'],
)
def test_a_derivative_of_an_online_gradient_is_refused(second):
    with pytest.raises(NotSupportedError, match='online gradient .* first derivatives only'):
        second()


@pytest.mark.slow
def test_what_does_not_depend_on_the_gradient_has_its_derivative():
    """A scale of the loss outside of the learner."""
    value = online_sum(params())
    assert jax.grad(lambda a: a * jax.lax.stop_gradient(online_sum(params())))(2.0) == value
