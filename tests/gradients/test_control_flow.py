"""Control flow and data movement in a step: against the oracles, and versions of one cell."""

import functools

import jax
import numpy as np
import pytest

from braintrace import functional, rules
from tests import models, oracles
from tests.compare import assert_close, assert_drawn_close
from tests.gradients.harness import learner_of, over_sequence, start
from tests.gradients.rows import core_first, crossed, is_core
from tests.models import control_flow, loops, maps
from tests.models.control_flow import OUT, SMALL, drive, either, half, in_call, leaky, turns
from tests.models.model import cell_of
from tests.tiers import in_turn, none, pairwise, slow

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


@pytest.mark.tier(quick=2, one_in=6)
@pytest.mark.drawn
@both_rules
@pytest.mark.parametrize('name', core_first(OTHERS))
def test_a_program_gives_the_gradient_of_the_oracle(name, rule):
    check(name, rule)


@pytest.mark.tier(one_in=8)
@pytest.mark.drawn
@in_turn(is_core, name=LOOPS, unroll=[8, 0], rule=[D_RTRL, ES_D_RTRL])
def test_a_loop_gives_the_gradient_of_the_oracle_unrolled_and_descended(name, unroll, rule):
    check(name, rule, unroll=unroll)


@pytest.mark.tier(quick=2, one_in=4)
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


WINDOWED = (
    'calls_mixed sharded cond clockwork cond_log_of_negative switch_nan while while_pair'.split()
)
WINDOWED += 'vmap_weights vmap_conv move_put_on_zeros broadcast'.split()
SCANS = 'scan scan_lstm scan_nested scan_weight_slices scan_two_layers scan_decay'.split()
SCANS += ['scan_of_vmap', 'cond_in_scan']


@pytest.mark.tier(one_in=4)
@pytest.mark.slow
@pytest.mark.parametrize(
    'rule, name, window',
    [
        *((D_RTRL, *row) for row in crossed(WINDOWED, (1, None))),
        *((ES_D_RTRL, *row) for row in crossed(WINDOWED, (None, 1))),
    ],
)
def test_windows_of_every_length_give_the_gradient_of_the_oracle(name, window, rule):
    check(name, rule, window)


@pytest.mark.tier(one_in=4)
@pairwise(none, name=SCANS, window=[1, None], unroll=[8, 0], rule=[D_RTRL, ES_D_RTRL])
def test_windows_of_every_length_give_the_gradient_of_the_oracle_with_loops(
    name, window, unroll, rule
):
    check(name, rule, window, unroll)


@pytest.mark.tier(quick=1, one_in=2)
@both_rules
@pytest.mark.parametrize('name', ['cond_root_at_zero', 'cond_log_of_negative', 'switch_nan'])
def test_a_branch_not_taken_leaves_nothing_behind(name, rule):
    """Neither in the gradients nor in what the next step will read."""
    _, _, state, losses = check(name, rule, 1)
    for leaf in jax.tree.leaves((state.carry, state.trace, losses)):
        assert np.isfinite(leaf).all()


# -- versions of one cell --------------------------------------------------------------------------


@functools.cache
def version(update):
    """All versions have one name, hence the same numbers."""
    return models.make_case(models.Model('version', cell_of(update), SMALL | OUT))


@functools.cache
def gradient(update, rule, unroll):
    return over_sequence(version(update), rule, 3, unroll=unroll)[0]


def relations(update, unroll):
    graph = start(version(update), D_RTRL, unroll)[0].graph
    return {
        (r.primitive.name, tuple(sorted(r.paths.items())), tuple(g.name for g in r.groups))
        for r in graph.hidden_param_op_relations
    }


def assert_same(other, plain, rule, unroll):
    assert_close(gradient(other, rule, unroll), gradient(plain, rule, unroll))
    if rule is D_RTRL:
        assert relations(other, unroll) == relations(plain, unroll)


def once(ops, p, h, r, x):
    return leaky(ops, p, h, r, x[:, :1])


def of_the_same_op(ops, p, h, r, x):
    return ops.sin(drive(ops, p, r, x[:, :1]))


def constant(no, yes=once, pred=True):
    """The update as the taken branch."""
    return either(yes, no, lambda h, x: pred)


ONE = {
    'jit': in_call(control_flow.jit, of=once),
    'jit_in_jit': in_call(control_flow.jit, control_flow.jit, of=once),
    'checkpoint': in_call(control_flow.checkpoint, of=once),
    'checkpoint_policy': in_call(control_flow.with_policy, of=once),
    'checkpoint_in_jit': in_call(control_flow.checkpoint, control_flow.jit, of=once),
    'cond_no_op': constant(half),
    'cond_same_op': constant(of_the_same_op),
    'cond_array': constant(half, pred=np.bool_(True)),
    'switch': lambda ops, p, h, r, x: ops.switch(
        1, [lambda h, r: 0.5 * h, lambda h, r: once(ops, p, h, r, x), lambda h, r: 2.0 * h], h, r
    ),
    'scan_once': lambda ops, p, h, r, x: ops.loop(
        lambda h, r, x: (leaky(ops, p, h, r, x), None), h, r, turns(x)[:1]
    )[0],
    'fori_once': lambda ops, p, h, r, x: ops.for_loop(
        1, lambda i, h, r: leaky(ops, p, h, r, turns(x)[i]), h, r
    ),
    'shard': in_call(control_flow.shard, of=once),
    'vmap': lambda ops, p, h, r, x: ops.vmap(lambda h, r, x: leaky(ops, p, h, r, x))(
        h[None], r[None], x[None, :, :1]
    )[0],
}


LATER = [pytest.mark.slow, pytest.mark.nightly]
LOOPS = zip(('scan_once', 'fori_once'), WANT)


@pytest.mark.tier(quick=1, one_in=4)
@pytest.mark.parametrize(
    'name, rule, unroll',
    [
        *(
            pytest.param(name, rule, 8, marks=[] if i < 2 else LATER[(i + k) % 2])
            for i, name in enumerate(ONE)
            for k, rule in enumerate(WANT)
        ),
        *(pytest.param(name, rule, 0, marks=slow) for name, rule in LOOPS),
    ],
)
def test_a_construct_around_one_update_changes_nothing(name, unroll, rule):
    assert_same(ONE[name], once, rule, unroll)


def in_python(ops, p, h, r, x):
    """The inner loop written out."""
    for at in turns(x):
        h, r = ops.twice(lambda h, r, at=at: leaky(ops, p, h, r, at), h, r)
    return h


MANY = {
    'scan': loops.scan(),
    'scan_of_jit': loops.scan(wrap=control_flow.jit),
    'scan_of_checkpoint': loops.scan(wrap=control_flow.checkpoint),
    'scan_reverse': lambda ops, p, h, r, x: loops.scan(reverse=True)(ops, p, h, r, x[:, ::-1]),
    'jit_of_scan': in_call(control_flow.jit, of=loops.scan()),
    'checkpoint_of_scan': in_call(control_flow.checkpoint, of=loops.scan()),
    'cond_of_scan': constant(half, loops.scan()),
    'scan_of_cond': loops.scan(constant(half, leaky)),
    'fori': lambda ops, p, h, r, x: ops.for_loop(
        3, lambda i, h, r: leaky(ops, p, h, r, turns(x)[i]), h, r
    ),
    'scan_of_scan': lambda ops, p, h, r, x: ops.loop(
        lambda h, r, x: ops.loop(lambda h, r, x: (leaky(ops, p, h, r, x), None), h, r, x),
        h,
        r,
        turns(x)[:, None],
    )[0],
    'scan_of_indices': lambda ops, p, h, r, x: ops.loop(
        lambda h, r, i: (leaky(ops, p, h, r, turns(x)[i]), None), h, r, np.arange(3)
    )[0],
}


@pytest.mark.tier(quick=0, one_in=4)
@in_turn(is_core, name=MANY, unroll=[8, 0], rule=[D_RTRL, ES_D_RTRL])
def test_every_way_to_write_a_loop_is_the_loop_written_out(name, unroll, rule):
    assert_close(gradient(in_python, rule, unroll), oracles.total(WANT[rule](version(in_python))))
    assert_same(MANY[name], in_python, rule, unroll)


# -- what is refused, and what is named ------------------------------------------------------------


MOVING = [n for n in models.PROGRAMS if n.startswith(('mix_', 'back_', 'move_'))]


@pytest.mark.parametrize('name', core_first(MOVING))
def test_mixing_is_named_and_data_movement_is_none(name):
    graph, mixes = start(models.case(name), D_RTRL)[0].graph, name.startswith('mix_')
    assert any(d.kind == 'mixing' for d in graph.diagnostics) == mixes
    assert mixes or all(r.kind == 'trace' for path, r in graph.routes.items() if path != 'out')
