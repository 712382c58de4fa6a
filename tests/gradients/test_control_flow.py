"""Control flow and data movement in a step, against the oracles."""

import jax
import numpy as np
import pytest

import braintrace
from braintrace import functional, rules
from tests import models, oracles
from tests.compare import assert_close, assert_drawn_close
from tests.gradients.harness import learner_of, over_sequence, start
from tests.gradients.rows import core_first, crossed, is_core, row
from tests.models import loops, maps
from tests.tiers import in_turn, none, pairwise

DECAY = 0.8
D_RTRL, ES_D_RTRL = rules.d_rtrl(), rules.es_d_rtrl(DECAY)
WANT = {D_RTRL: oracles.dense_recursion, ES_D_RTRL: lambda case: oracles.es_recursion(case, DECAY)}
both_rules = pytest.mark.parametrize('rule', [D_RTRL, ES_D_RTRL], ids=['d_rtrl', 'es_d_rtrl'])
# The weight of this row is JAX's `select(taken, w, stop_gradient(w))`.
LOST, BRANCHES = 'vmap_cond', ('one', 'two')
REFUSED = ['while_mixing', 'while_mixing_tail']
LOOPS = [m.name for m in [*loops.MODELS, *maps.MODELS] if 'scan' in m.name or 'fori' in m.name]
OTHERS = [name for name in models.PROGRAMS if name not in [*LOOPS, LOST, *REFUSED]]


def check(name, rule, window=3, unroll=None):
    case = models.case(name)
    grads, losses, _, state = over_sequence(case, rule, window, unroll=unroll)
    assert_drawn_close(grads, oracles.total(WANT[rule](case)))
    return case, grads, state, losses


WINDOWED = (
    'calls_mixed sharded cond clockwork cond_log_of_negative switch_nan while while_pair'.split()
)
WINDOWED += 'vmap_weights vmap_conv move_put_on_zeros broadcast'.split()


@pytest.mark.tier(quick=2)
@pytest.mark.drawn
@pytest.mark.parametrize(
    'name, rule, window',
    [
        *(row(name, rule, 3) for name in OTHERS for rule in WANT),
        *(row(name, D_RTRL, window) for name, window in crossed(WINDOWED, (1, None))),
        *(row(name, ES_D_RTRL, window) for name, window in crossed(WINDOWED, (None, 1))),
    ],
)
def test_a_program_gives_the_gradient_of_the_oracle(name, rule, window):
    check(name, rule, window)


@pytest.mark.drawn
@in_turn(is_core, name=LOOPS, unroll=[8, 0], rule=[D_RTRL, ES_D_RTRL])
def test_a_loop_gives_the_gradient_of_the_oracle_unrolled_and_descended(name, unroll, rule):
    check(name, rule, unroll=unroll)


@pytest.mark.tier(quick=2)
@both_rules
def test_what_is_not_followed_is_named_and_keeps_its_same_step_gradient(rule):
    case, same_step = models.case(LOST), oracles.same_step(models.case(LOST))
    want = oracles.total(WANT[rule](case)) | {k: same_step[k] for k in BRANCHES}
    assert_close(over_sequence(case, rule, 3)[0], want)
    notes = learner_of(case, rule).graph.diagnostics
    notes = [d for d in notes if d.kind == 'input-dependent-weight']
    assert {d.path.split('/')[0] for d in notes} & {*BRANCHES} and all(d.location for d in notes)


@pytest.mark.parametrize(
    'name', ['cond', 'scan', 'while', 'vmap_weights', 'move_put', 'back_stack', 'back_gather']
)
def test_a_step_may_be_compiled_inside_jit(name):
    case = models.case(name)
    learner = functional.online(learner_of(case, D_RTRL).cell, D_RTRL)
    state = jax.jit(learner.init)(case.params, case.carry, case.xs[0])
    assert learner.graph.hidden_param_op_relations and not state.t.any()


@pytest.mark.tier(quick=1)
@pytest.mark.parametrize('around', ['jit', 'vmap'])
def test_a_cell_may_close_over_arrays_of_a_transformation_around_it(around):
    params, x = np.full((5, 4), 0.1), np.ones((2, 5))

    def gradient(scale):
        def cell(params, h, x):
            h = jax.numpy.tanh(scale * h + braintrace.matmul(x, params))
            return h, h

        learner = functional.online(cell)
        _, state = learner.step(params, learner.init(params, np.zeros((2, 4)), x), x)
        return learner.grad(models.squared)(params, state, x, np.zeros((2, 4))).grads

    run = jax.jit(gradient) if around == 'jit' else lambda s: jax.vmap(gradient)(s[None])[0]
    assert_close(run(np.array(0.3)), gradient(0.3))


SCANS = 'scan scan_lstm scan_nested scan_weight_slices scan_two_layers scan_decay'.split()
SCANS += ['scan_of_vmap', 'cond_in_scan']


@pairwise(none, name=SCANS, window=[1, None], unroll=[8, 0], rule=[D_RTRL, ES_D_RTRL])
def test_a_loop_gives_it_in_windows_of_every_length(name, window, unroll, rule):
    check(name, rule, window, unroll)


@pytest.mark.tier(quick=1)
@both_rules
@pytest.mark.parametrize('name', ['cond_root_at_zero', 'cond_log_of_negative', 'switch_nan'])
def test_a_branch_not_taken_leaves_nothing_behind(name, rule):
    """Neither in the gradients nor in what the next step will read."""
    _, _, state, losses = check(name, rule, 1)
    for leaf in jax.tree.leaves((state.carry, state.trace, losses)):
        assert np.isfinite(leaf).all()


# -- what is refused, and what is named ------------------------------------------------------------


MOVING = [n for n in models.PROGRAMS if n.startswith(('mix_', 'back_', 'move_'))]


@pytest.mark.parametrize('name', core_first(MOVING))
def test_mixing_is_named_and_data_movement_is_none(name):
    graph, mixes = start(models.case(name), D_RTRL)[0].graph, name.startswith('mix_')
    assert any(d.kind == 'mixing' for d in graph.diagnostics) == mixes
    assert mixes or all(r.kind == 'trace' for path, r in graph.routes.items() if path != 'out')
